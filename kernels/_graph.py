"""A captured graph in one spelling: `op(node)` says what an operation is, however it was written, and `args(node)` what it reads.

torch.compile captures a model as a torch.fx graph of the functions and methods that its Python called: `x.pow(2)`, `torch.pow(x, 2)` and
`x ** 2` are three. Here they are one, "pow". An operation has a name only with arguments that the table knows; with any other (alpha of
torch.add, inplace of relu, label_smoothing) it is another operation, which no rule may take for this one.
"""

import operator
import os

import torch
import torch.nn.functional as F
from torch.fx import Node

NEEDED = object()


def _operation(*targets, reads, **others):
    """targets: functions, and names of methods. reads, others: the parameters in their order, with their defaults; those of `reads` (a
    text) may be anything, the others must have their defaults."""
    names = reads.split()
    parameters = {**{name: NEEDED for name in names if name not in others}, **others}
    return targets, parameters, names


_UNARY = dict(reads="input")
_BINARY = dict(reads="input other")
OPERATIONS = {
    "add": _operation(operator.add, torch.add, "add", **_BINARY),
    "sub": _operation(operator.sub, torch.sub, torch.subtract, "sub", **_BINARY),
    "mul": _operation(operator.mul, torch.mul, torch.multiply, "mul", **_BINARY),
    "div": _operation(operator.truediv, torch.div, torch.true_divide, torch.divide, "div", **_BINARY),
    "pow": _operation(operator.pow, torch.pow, "pow", reads="input exponent"),
    "neg": _operation(operator.neg, torch.neg, torch.negative, "neg", **_UNARY),
    "square": _operation(torch.square, "square", **_UNARY),
    "rsqrt": _operation(torch.rsqrt, "rsqrt", **_UNARY),
    "mean": _operation(torch.mean, "mean", reads="input dim keepdim", keepdim=False),
    "relu": _operation(F.relu, torch.relu, "relu", reads="input", inplace=False),
    "silu": _operation(F.silu, reads="input", inplace=False),
    "gelu": _operation(F.gelu, reads="input approximate", approximate="none"),
    "sigmoid": _operation(torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid", **_UNARY),
    "tanh": _operation(torch.tanh, F.tanh, "tanh", **_UNARY),
    "linear": _operation(F.linear, reads="input weight bias", bias=None),
    "rms_norm": _operation(F.rms_norm, torch.rms_norm, reads="input normalized_shape weight eps", weight=None, eps=None),
    "embedding": _operation(
        F.embedding, reads="input weight", padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
    ),
    "dropout": _operation(F.dropout, reads="input p training", p=0.5, training=True, inplace=False),
    "cat": _operation(torch.cat, torch.concat, torch.concatenate, reads="tensors dim", dim=0),
    "chunk": _operation(torch.chunk, "chunk", reads="input chunks dim", dim=0),
    "split": _operation(torch.split, torch.functional.split, "split", reads="tensor split_size_or_sections dim", dim=0),
    "transpose": _operation(torch.transpose, torch.swapaxes, "transpose", reads="input dim0 dim1"),
    "item": _operation(operator.getitem, reads="input index"),
    "cross_entropy": _operation(
        F.cross_entropy, reads="input target ignore_index reduction", target=NEEDED, weight=None, size_average=None, ignore_index=-100,
        reduce=None, reduction="mean", label_smoothing=0.0,
    ),
    "sdpa": _operation(
        F.scaled_dot_product_attention, reads="query key value attn_mask is_causal scale enable_gqa", key=NEEDED, value=NEEDED,
        attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    ),
}
# What keeps a tensor's elements in their order, whatever its arguments are; and what at most changes its dtype or device.
SHAPE = {torch.reshape, torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze, "view", "reshape", "flatten", "unflatten",
         "unsqueeze", "squeeze"}
CAST = {"to", "float", "bfloat16", "half", "type", "type_as"}
_NAMES = {target: name for name, (targets, _, _) in OPERATIONS.items() for target in targets}
_NAMES |= {"expand": "expand"} | dict.fromkeys(SHAPE, "shape") | dict.fromkeys(CAST, "cast")


def value(n):
    """The fake tensor that a node computes (or real numbers, shapes, tuples of tensors), with its dtype, shape and device."""
    return n.meta.get("example_value") if isinstance(n, Node) else n


def _bound(n, name):
    """({parameter: argument}, a text that names one which the table doesn't know or None)."""
    _, parameters, reads = OPERATIONS[name]
    if len(n.args) > len(parameters):
        return {}, f"{len(n.args)} arguments"
    given = dict(zip(parameters, n.args)) | n.kwargs
    if "self" in given:
        given["input"] = given.pop("self")
    for parameter, argument in given.items():
        if parameter not in parameters:
            return given, f"{parameter}={argument}"
        if parameter not in reads and not (type(argument) is type(parameters[parameter]) and argument == parameters[parameter]):
            return given, f"{parameter}={argument}"
    given = parameters | given
    return given, next((f"no {p}" for p, argument in given.items() if argument is NEEDED), None)


def kind(n):
    """The name of the operation, whatever its arguments are; None for others."""
    if not isinstance(n, Node) or n.op not in ("call_function", "call_method") or (n.op == "call_method") != isinstance(n.target, str):
        return None
    return _NAMES.get(n.target)


def op(n):
    """The name of the operation if its arguments are such as the rules know, else None."""
    name = kind(n)
    return name if name not in OPERATIONS or _bound(n, name)[1] is None else None


def unknown_argument(n):
    """What keeps `op` from naming an operation of a known `kind`: "label_smoothing=0.1"; None if nothing does."""
    return _bound(n, kind(n))[1] if kind(n) in OPERATIONS else None


def args(n):
    """The arguments that the rules read, in the order of the table."""
    name = kind(n)
    if name not in OPERATIONS:  # shape, cast: what they are of
        return n.args[:1]
    given, _ = _bound(n, name)
    return tuple(given[parameter] for parameter in OPERATIONS[name][2])


def same(n):
    """Whether a node gives what it is given: a cast to the same dtype, a shape to the same shape, dropout that is off."""
    if op(n) == "dropout":
        x, p, training = args(n)
        return not training or p == 0
    if op(n) not in ("cast", "shape") or not n.args or not is_tensor(n) or not is_tensor(n.args[0]):
        return False
    a, b = value(n), value(n.args[0])
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)


def skip(n, *names):
    """Up through operations of these names."""
    while isinstance(n, Node) and op(n) in names:
        n = n.args[0]
    return n


def is_tensor(n):
    return isinstance(n, Node) and isinstance(value(n), torch.Tensor)


def last_dim(n, dim):
    return isinstance(dim, int) and dim % max(value(n).ndim, 1) == value(n).ndim - 1


def two(n, name):
    """Both orders of a commutative operation's two operands; nothing if `n` is no such operation."""
    if op(n) != name:
        return []
    a, b = args(n)
    return [(a, b), (b, a)]


def scaled(n):
    """(number, rest, whether it divides) of `number * rest` or `rest / number`; None for others."""
    if op(n) == "div" and type(args(n)[1]) in (int, float) and is_tensor(args(n)[0]):
        return args(n)[1], args(n)[0], True
    return next(((a, b, False) for a, b in two(n, "mul") if type(a) in (int, float) and is_tensor(b)), None)


def part(n):
    """(x, start, stop) of a piece of x's last dimension: of a chunk, a split, or a slice. None for others."""
    if op(n) != "item":
        return None
    x, index = args(n)
    if isinstance(index, int):
        if op(x) not in ("chunk", "split") or not last_dim(x.args[0], args(x)[2]):
            return None
        sizes = [piece.shape[-1] for piece in value(x)]
        index %= len(sizes)
        return args(x)[0], sum(sizes[:index]), sum(sizes[: index + 1])
    index = index if isinstance(index, tuple) else (index,)
    if not is_tensor(x) or not isinstance(index[-1], slice) or index[-1].step not in (None, 1):
        return None
    whole = [i for i in index[:-1] if i is not Ellipsis]
    if any(i != slice(None) for i in whole) or Ellipsis not in index and len(index) != value(x).ndim:
        return None
    if any(isinstance(i, Node) for i in (index[-1].start, index[-1].stop)):
        return None
    return x, *index[-1].indices(value(x).shape[-1])[:2]


def signed_products(n):
    """[(sign, a, b)] of a sum of two products, each ±a·b; None for others."""
    if op(n) not in ("add", "sub"):
        return None
    found = []
    for sign, term in zip((1, -1 if op(n) == "sub" else 1), args(n)):
        if op(term) == "neg":
            sign, term = -sign, args(term)[0]
        if op(term) != "mul" or not all(map(is_tensor, args(term))):
            return None
        factors = []
        for factor in args(term):
            if op(factor) == "neg":
                sign, factor = -sign, args(factor)[0]
            factors.append(factor)
        found.append((sign, *factors))
    return found


def reads_only(n, *users):
    """Whether nothing but `users` reads what n computes."""
    return all(u in users for u in n.users)


def depends(n, on, seen=None):
    """Whether n, or what it is computed from, is one of `on`."""
    stack, seen = [n], set()
    while stack:
        n = stack.pop()
        if n in on:
            return True
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return False


# ---- what a graph does beside computing --------------------------------------------------------------------------------------------------

IN_PLACE = {getattr(operator, f"i{name}"): name for name in ("add", "sub", "mul", "truediv")}
_WRITES = set(IN_PLACE) | {operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.ifloordiv, operator.imod,
                           operator.setitem}
_MAKES_NEW = {"add", "sub", "mul", "div", "pow", "neg", "square", "rsqrt", "mean", "relu", "silu", "gelu", "sigmoid", "tanh", "linear",
              "rms_norm", "embedding", "cat", "cross_entropy", "sdpa"}


def stateful(n):
    """Whether what is read before n differs from what is read after it: n writes into a tensor, or switches gradients or autocast."""
    if n.op == "call_method":
        return n.target.endswith("_") and not n.target.endswith("__")
    if n.op != "call_function":
        return n.op == "call_module"  # whatever it does
    name, module = getattr(n.target, "__name__", ""), getattr(n.target, "__module__", "")
    schema = getattr(n.target, "_schema", None)
    return (
        n.target in _WRITES
        or name.endswith("_") and not name.endswith("__") and module not in ("_operator", "operator")
        or any(word in name for word in ("set_grad_enabled", "autocast", "inference_mode"))
        or schema is not None and schema.is_mutable
        or n.kwargs.get("inplace") is True
        or n.kwargs.get("out") is not None
    )


def without_in_place_sums(graph):
    """`x += y` as `x = x + y`, where x is a result of this graph that nobody reads afterwards under another name."""
    for n in list(graph.nodes):
        name = IN_PLACE.get(n.target) if n.op == "call_function" else None
        if not name or not is_tensor(n) or not is_tensor(n.args[0]):
            continue
        x, before = n.args[0], set()
        for m in graph.nodes:
            if m is n:
                break
            before.add(m)
        fresh = op(x) in _MAKES_NEW and all(u is n or u in before and op(u) in _MAKES_NEW for u in x.users)
        y = value(n.args[1])
        fits = not isinstance(y, torch.Tensor) or y.ndim == 0 or y.shape == value(x).shape
        if fresh and fits and torch.result_type(value(x), y) == value(x).dtype:
            n.target = getattr(operator, name)


def without_idle_switches(graph):
    """`torch.no_grad()` around what needs no gradient anyway (positions, masks) changes nothing: without it."""
    off, idle = None, False
    for n in list(graph.nodes):
        if n.op == "call_function" and getattr(n.target, "__name__", "") == "_set_grad_enabled":
            if n.args == (True,) and off and idle:
                graph.erase_node(off)
                graph.erase_node(n)
            off, idle = (n, True) if n.args == (False,) and not off else (None, False)
        elif any(getattr(t, "requires_grad", False) for t in torch.utils._pytree.tree_leaves([value(i) for i in n.all_input_nodes])):
            idle = False


def tidy(graph):
    """Leave out what changes nothing, so that readers of a tensor are readers of one node; and let no view depend on strides, which what
    is put before it may have otherwise."""
    for n in list(graph.nodes):
        if same(n):
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)
        elif n.op == "call_method" and n.target == "view" and not any(isinstance(a, torch.dtype) for a in (*n.args, *n.kwargs.values())):
            n.target = "reshape"


def sort(graph):
    """Put every node behind what it reads, otherwise in the order that they have. For graphs without `stateful` nodes."""
    order, placed = [], set()

    def place(n):
        stack = [(n, iter(n.all_input_nodes))]
        while stack:
            m, inputs = stack[-1]
            missing = next((i for i in inputs if i not in placed), None)
            if missing is not None:
                assert all(missing is not waiting for waiting, _ in stack), f"a circle of operations at {missing}"
                stack.append((missing, iter(missing.all_input_nodes)))
                continue
            stack.pop()
            if m not in placed:
                placed.add(m)
                order.append(m)

    nodes = list(graph.nodes)
    for n in nodes:
        if n.op == "placeholder":
            place(n)
    for n in nodes:
        if n.op != "placeholder" and n not in placed:
            place(n)
    end = next(n for n in nodes if n.op == "output")
    for n in order:
        if n is not end:
            end.prepend(n)


_TORCH = os.path.dirname(torch.__file__) + os.sep


def where(n):
    """(file, line, the line's text) of the Python that a node is from, the innermost that is not torch's; None where that is not known."""
    lines = (n.meta.get("stack_trace") or "").strip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.strip().startswith('File "') and _TORCH not in line]
    if not frames:
        return None
    file, line = lines[frames[-1]].strip().split('"')[1], lines[frames[-1]].split(", line ")[1].split(",")[0]
    text = lines[frames[-1] + 1].strip() if frames[-1] + 1 < len(lines) else ""
    return file, int(line), text

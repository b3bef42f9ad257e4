"""The rules by which fusion.py puts this package's operations in the place of the plain PyTorch that they compute.

A rule is a function of a `Rewriter` and a node, the last of what it would replace. It returns the name of what it put there, or None. Rules
go from large to small. What looks like a rule's business and is not leaves the reason in `Rewriter.reasons`.

Nodes are replaced and not moved: a graph that computes without side effects is put in order once, at the end.
"""

import operator

import torch
import torch.nn.functional as F

from ._graph import (
    args,
    depends,
    is_tensor,
    kind,
    last_dim,
    op,
    part,
    reads_only,
    scaled,
    signed_products,
    skip,
    two,
    unknown_argument,
    value,
)
from .attention import flash_attention
from .cross_entropy import linear_softcap_cross_entropy
from .gated import geglu, relu_squared, swiglu
from .linear import linear
from .mlp import add_norm_mlp
from .norm_linear import add_norm_linear, residual_mix_norm_linear
from .qk_norm_rope import qk_norm_rope
from .qkv import gate_columns, qkv_norm_rope
from .residual_mix import residual_mix_norm
from .rms_norm import add_rms_norm, rms_norm

EPS = torch.finfo(torch.float32).eps  # what F.rms_norm takes where it is told nothing


class Rewriter:
    """A graph under change: how nodes are made and replaced, and what is known of them."""

    def __init__(self, graph, fake_mode, attention):
        self.graph, self.fake_mode, self.attention = graph, fake_mode, attention
        self.swapped = []  # the nodes that the last operation took the place of
        self.cases, self.ways = {}, {}  # of attention: what each site asks for, and what it gets
        self.position = {}  # each node's place, when a rule begins
        self.made = set()  # the nodes that rules put there
        self.normed = set()  # nodes whose last dimension has a mean square of 1
        self.reasons = {}  # node → why no rule took it

    def put(self, before, target, *arguments, **keywords):
        """A new node before another."""
        with self.graph.inserting_before(before):
            n = self.graph.call_function(target, arguments, keywords)
        self.made.add(n)
        real = torch.fx.map_arg((n.args, n.kwargs), value)
        with self.fake_mode, torch.no_grad():
            n.meta["example_value"] = target(*real[0], **real[1])
        if "stack_trace" in before.meta:
            n.meta["stack_trace"] = before.meta["stack_trace"]
        return n

    def items(self, n):
        return [self.put(n.next, operator.getitem, n, i) for i in range(len(value(n)))]

    def fits(self, olds, *arguments):
        """Whether something that reads `arguments` may take the place of `olds`: none of them comes from these."""
        nodes = []
        torch.fx.map_arg(arguments, nodes.append)
        return not any(depends(n, set(olds)) for n in nodes)

    def swap(self, olds, news):
        """Let all readers of each old node read the new one, if all of these have the dtype and shape of what they replace."""
        for old, new in zip(olds, news):
            a, b = value(old), value(new)
            if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
                self.reasons[old] = f"the kernel gives {b.dtype} {tuple(b.shape)}, and here is {a.dtype} {tuple(a.shape)}"
                return False
        for old, new in zip(olds, news):
            old.replace_all_uses_with(new)
        self.swapped = olds
        return True

    def gone(self):
        """The nodes that nobody needs since the last swap."""
        dead, stack = set(), list(self.swapped)
        while stack:
            n = stack.pop()
            if n.op.startswith("call") and n not in dead and dead.issuperset(n.users):
                dead.add(n)
                stack.extend(n.all_input_nodes)
        return dead


# ---- what several rules look for ---------------------------------------------------------------------------------------------------------


def plain_linear(n):
    """(x, weight) of a linear layer without bias; None for others."""
    if op(n) != "linear":
        return None
    x, weight, bias = args(n)
    return (x, weight) if bias is None and value(weight).ndim == 2 else None


def is_weight(n):
    return n.op in ("placeholder", "get_attr")


def norm(n):
    """(x, weight or None, eps) of an RMSNorm over the last dimension that has x's dtype, ending at n; None for others.

    As F.rms_norm, or written out with rsqrt; a cast back to x's dtype (from float32, which autocast or the model chose) is part of it.
    """
    weight, inner = None, n
    if op(inner) == "mul":  # the weight, after the cast: as Llama has it
        for w, rest in two(inner, "mul"):
            if is_tensor(w) and is_weight(w) and value(w).ndim == 1 and is_tensor(rest) and value(w).shape == value(rest).shape[-1:]:
                weight, inner = w, rest
                break
    cast = inner if op(inner) == "cast" else None
    core = inner.args[0] if cast is not None else inner
    if op(core) == "rms_norm":
        x, shape, w, eps = args(core)
        if w is not None and weight is not None or tuple(shape) != value(x).shape[-1:]:
            return None
        found = x, weight if w is None else w, EPS if eps is None else eps
    else:
        x, eps = _written_norm(core)
        if x is None:
            return None
        if op(x) == "cast" and value(x).dtype == torch.float32 and cast is not None:
            x = x.args[0]
        found = x, weight, eps
    return found if value(found[0]).dtype == value(n).dtype and type(found[2]) in (int, float) else None


def _written_norm(n):
    """(x, eps) of x * rsqrt(mean(x²) + eps)."""
    for x, factor in two(n, "mul"):
        if op(factor) != "rsqrt":
            continue
        for mean, eps in two(args(factor)[0], "add"):
            if op(mean) != "mean" or type(eps) not in (int, float):
                continue
            squared, dim, keepdim = args(mean)
            dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
            if not keepdim or not last_dim(squared, dim):
                continue
            if op(squared) == "square" and args(squared)[0] is x or op(squared) == "pow" and args(squared) == (x, 2):
                return x, eps
            if op(squared) == "mul" and args(squared) == (x, x):
                return x, eps
    return None, None


def bare_norm(n):
    """x of a norm without weight and with the eps that the larger kernels have."""
    found = norm(n)
    return found[0] if found and found[1] is None and found[2] == EPS else None


def rotary(n):
    """(x, cos, sin) of the rotation of x's halves; None for others."""
    if op(n) != "cat" or len(args(n)[0]) != 2 or not last_dim(n, args(n)[1]):
        return None
    first, second = (signed_products(half) for half in args(n)[0])
    half = value(n).shape[-1] // 2
    if not first or not second:
        return None

    def found(products, lower_sign, upper_sign):
        """{half: table} if the products are of x's lower half and its upper half with these signs."""
        tables = {}
        for sign, a, b in products:
            for x, table in ((a, b), (b, a)):
                piece = part(x)
                if piece and piece[1:] in ((0, half), (half, 2 * half)) and value(piece[0]).shape == value(n).shape:
                    if sign != (lower_sign if piece[1] == 0 else upper_sign):
                        return None
                    tables[piece[1] == 0] = piece[0], table
                    break
        return tables if len(tables) == 2 else None

    a, b = found(first, 1, 1), found(second, -1, 1)
    if not a or not b or len({x for x, _ in (*a.values(), *b.values())}) != 1:
        return None
    cos, sin = a[True][1], a[False][1]
    if b[True][1] is not sin or b[False][1] is not cos:
        return None
    T = value(n).shape[1] if value(n).ndim == 4 else -1
    if any(tuple(value(t).shape) not in ((T, half), (1, T, 1, half)) or value(t).requires_grad for t in (cos, sin)):
        return None
    if any(tuple(value(t).shape) == (T, half) for t in (cos, sin)):
        return None  # (T, half) would be of heads and columns here
    return a[True][0], cos, sin


def turned_and_normed(n):
    """(x, cos, sin) of the norm of a rotation of x (B, T, heads, head_dim)."""
    x = bare_norm(n)
    return rotary(x) if x is not None else None


def heads_of(n):
    """(input, weight, heads, head_dim) of a linear layer's result as (B, T, heads, head_dim), read by n alone; None for others."""
    if op(n) != "shape" or value(n).ndim != 4 or not (made := plain_linear(n.args[0])) or not reads_only(n.args[0], n):
        return None
    x, weight = made
    if value(x).ndim != 3 or value(n).shape[:2] != value(x).shape[:2] or not is_weight(weight):
        return None
    return x, weight, *value(n).shape[2:]


def with_value_embedding(n):
    """(v, gate weight, idx, table) of v + 2σ(linear(x[..., :channels])) · embedding(idx, table), head by head; None for others."""
    for v, more in two(n, "add"):
        made = heads_of(v) if is_tensor(v) else None
        for gate, embedded in two(more, "mul") if made else ():
            if not is_tensor(gate) or not is_tensor(embedded):
                continue
            x, _, heads, head_dim = made
            rows, s = skip(embedded, "shape"), scaled(skip(gate, "shape"))
            s = s or scaled_inside(gate)
            if op(rows) != "embedding" or not s or s[0] != 2 or s[2] or op(s[1]) != "sigmoid":
                continue
            product = plain_linear(args(s[1])[0])
            piece = part(product[0]) if product else None
            idx, table = args(rows)
            if not piece or piece[0] is not x or piece[1] != 0 or not is_weight(product[1]):
                continue
            if tuple(value(product[1]).shape) != (heads, piece[2]) or tuple(value(gate).shape) != (*value(x).shape[:2], heads, 1):
                continue
            if value(idx).shape != value(x).shape[:2] or value(table).shape[1] != heads * head_dim:
                continue
            if value(embedded).shape != value(v).shape:
                continue
            return v, product[1], idx, table
    return None


def scaled_inside(n):
    """`2 * sigmoid(…)[..., None]` has the number outside: the same numbers."""
    s = scaled(n)
    return (s[0], skip(s[1], "shape"), s[2]) if s else None


def summed(n):
    """(a, b) of a sum of two tensors of its shape; None for others."""
    if op(n) != "add" or not all(is_tensor(a) and value(a).shape == value(n).shape for a in args(n)):
        return None
    return args(n)


def mixed(n):
    """(x, x0, resid_lambda, x0_lambda, update or None) of λ·(x + update) + λ₀·x0 with 0-D λs; None for others."""
    terms = []
    for term in args(n) if op(n) == "add" else ():
        for scale, x in two(term, "mul") if is_tensor(term) else ():
            if is_tensor(scale) and is_tensor(x) and value(scale).ndim == 0 and value(x).shape == value(n).shape:
                terms.append((scale, x, term))
                break
    if len(terms) != 2 or any(value(t[1]).dtype != value(n).dtype for t in terms):
        return None
    for (a, x, term), (b, x0, _) in (terms, terms[::-1]):
        for inner, update in (summed(x) or ()) and (summed(x), summed(x)[::-1]):  # the last sum, which nothing else reads
            if reads_only(x, term) and value(inner).dtype == value(x).dtype:
                return inner, x0, a, b, update
    (a, x, _), (b, x0, _) = terms
    return x, x0, a, b, None


# ---- the rules ---------------------------------------------------------------------------------------------------------------------------


def qkv(rw, n):
    """All of q, k and v of an attention layer, at the norm of q: the layer's input times one packed weight, then qkv_norm_rope."""
    q = _head_source(n)
    if not q:
        return None
    x, q_weight, n_head, head_dim, cos, sin = q
    others = [(m, found) for m in _norms_of(x, cos) if m is not n and (found := _head_source(m)) and found[0] is x and found[3:] == q[3:]]
    if len(others) != 1:
        return None
    k_out, (_, k_weight, n_kv_head, *_) = others[0]
    if n_head % n_kv_head or n_head < n_kv_head or n_head == n_kv_head and rw.position[k_out] < rw.position[n]:
        return None
    values = []  # (v, its weight, gate weight, idx, table)
    for product in x.users:
        for view in product.users if plain_linear(product) and args(product)[1] not in (q_weight, k_weight) else ():
            made = heads_of(view)
            if made and made[0] is x and made[2:] == (n_kv_head, head_dim):
                more = next((m for m in view.users if (found := with_value_embedding(m)) and found[0] is view), None)
                extra = with_value_embedding(more) if more is not None and reads_only(view, more) else None
                values.append((more, made[1], *extra[1:]) if extra else (view, made[1], None, None, None))
    if len(values) != 1:
        return None
    v_out, v_weight, gate, idx, table = values[0]
    weights = [q_weight, k_weight, v_weight]
    olds = [n, k_out, v_out]
    if len({value(w).dtype for w in (*weights, *([gate] if gate is not None else []))}) != 1:
        return None
    if not rw.fits(olds, x, cos, sin, idx, table):
        return None
    if gate is not None:
        channels = value(gate).shape[1]
        zeros = (0, value(x).shape[-1] - channels, 0, gate_columns(n_kv_head) - n_kv_head)
        weights.append(rw.put(n, F.pad, gate, zeros))
    row = rw.put(n, F.linear, x, rw.put(n, torch.cat, weights))
    news = rw.items(rw.put(n, qkv_norm_rope, row, cos, sin, n_head, n_kv_head, idx, table))
    if not rw.swap(olds, news):
        return None
    rw.normed.update(news[:2])
    return "qkv_norm_rope with value embedding" if gate is not None else "qkv_norm_rope"


def _head_source(n):
    """(input, weight, heads, head_dim, cos, sin) of a projection of the input that is rotated and normed, ending at n."""
    turned = turned_and_normed(n)
    made = heads_of(turned[0]) if turned else None
    return (*made, *turned[1:]) if made and made[3] == 2 * value(turned[1]).shape[-1] else None


def _norms_of(x, cos):
    """Nodes that may be the norm of a rotation by `cos`: what reads what reads it, a few steps down."""
    found, level = set(), {cos}
    for _ in range(6):
        level = {u for n in level for u in n.users}
        found |= {n for n in level if norm(n)}
    return found


def qk(rw, n):
    """Rotary embedding and norm of a query, and of the key that has the same tables."""
    q = turned_and_normed(n)
    if not q:
        return None
    others = [m for m in _norms_of(q[0], q[1]) if m is not n and (k := turned_and_normed(m)) and k[1:] == q[1:]]
    others = [m for m in others if m not in rw.normed and rw.position.get(m, -1) > rw.position[n]]
    if not others:
        return None
    k_out = min(others, key=rw.position.get)
    k = turned_and_normed(k_out)
    if not rw.fits([n, k_out], q[0], k[0], *q[1:]):
        return None
    news = rw.items(rw.put(n, qk_norm_rope, q[0], k[0], *q[1:]))
    if not rw.swap([n, k_out], news):
        return None
    rw.normed.update(news)
    return "qk_norm_rope"


_CONSTANT = {
    torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, torch.abs, torch.cumsum, torch.diff, torch.logical_and,
    torch.logical_or, torch.logical_not, torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne, operator.le, operator.lt, operator.ge,
    operator.gt, operator.eq, operator.ne, operator.and_, operator.or_, operator.invert, operator.sub, operator.add, operator.neg,
    operator.getitem, "view", "reshape", "unsqueeze", "expand", "tril", "triu", "bool", "to", "t", "transpose", "abs", "cumsum", "diff",
    "logical_and", "logical_not", "new_ones", "new_zeros", "new_full",
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "sub", "add")),  # as torch 2.11 captures some
}


def constant(n):
    """What a node computes that depends on no input and no random numbers, on the CPU; None for others."""
    known = {}

    def compute(a):
        if not isinstance(a, torch.fx.Node):
            return torch.device("cpu") if isinstance(a, torch.device) else a
        if a not in known:
            if a.target not in _CONSTANT:
                raise LookupError
            if str(a.target).startswith("new_"):  # of its tensor only dtype and device count
                arguments, keywords = (torch.empty((), dtype=value(a).dtype), *a.args[1:]), a.kwargs
                arguments = torch.fx.node.map_aggregate(arguments, lambda x: compute(x) if isinstance(x, torch.fx.Node) else x)
            else:
                arguments, keywords = torch.fx.node.map_aggregate((a.args, a.kwargs), compute)
            if "device" in keywords:
                keywords = dict(keywords) | {"device": "cpu"}
            f = getattr(arguments[0], a.target) if a.op == "call_method" else a.target
            known[a] = f(*arguments[a.op == "call_method" :], **keywords)
        return known[a]

    try:
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            return compute(n)
    except LookupError:
        return None


def causal_window(seen, T):
    """window if `seen` (…, T, T) bool has query i see keys i - window … i, at most T - 1, everywhere; None for any other mask."""
    if seen.dtype != torch.bool or tuple(seen.shape[-2:]) != (T, T):
        return None
    seen = seen.reshape(-1, T, T)
    window = int(seen[0, -1].sum()) - 1
    i = torch.arange(T)
    distance = i[:, None] - i
    return window if bool((seen == ((distance >= 0) & (distance <= window))).all()) else None


def _attention_case(rw, n):
    """(window or None, (B, T, n_head, n_kv_head, head_dim), bounded, device) of attention that kernels compute; None for others."""
    q, k, v, mask, causal, scale, grouped = args(n)
    if value(q).ndim != 4 or value(k).shape[2] != value(q).shape[2] or value(v).shape != value(k).shape:
        rw.reasons[n] = "not as many keys as queries"
        return None
    (B, n_head, T, head_dim), n_kv_head = value(q).shape, value(k).shape[1]
    if n_head != n_kv_head and not grouped:
        rw.reasons[n] = f"{n_head} query heads over {n_kv_head} KV heads without enable_gqa"
        return None
    if head_dim % 8 or not 16 <= head_dim <= 256 or type(scale) not in (int, float, type(None)):
        rw.reasons[n] = f"head_dim {head_dim}, scale {scale}"
        return None
    window = T - 1
    if mask is not None:
        seen = constant(mask) if not causal else None
        window = causal_window(seen, T) if seen is not None else None
        if window is None:
            rw.reasons[n] = "its mask is not causal with a window" if seen is not None else "its mask depends on what the graph is given"
            return None
    elif not causal:
        rw.reasons[n] = "it is not causal"
        return None
    bounded = scale is None and all(_untransposed(t) in rw.normed for t in (q, k))
    return None if window >= T - 1 else window, (B, T, n_head, n_kv_head, head_dim), bounded, value(q).device


def _untransposed(t):
    """x of `x.transpose(1, 2)`; None for others."""
    return args(t)[0] if op(t) == "transpose" and {d % 4 for d in args(t)[1:]} == {1, 2} else None


def attention(rw, n):
    """Of all sites at once, so that which is fastest for each is asked once."""
    if op(n) != "sdpa" or n in rw.reasons:
        return None
    if n not in rw.cases:
        sites = [m for m in rw.graph.nodes if op(m) == "sdpa"]
        rw.cases = {m: _attention_case(rw, m) for m in sites}
        asked = list(dict.fromkeys(case for case in rw.cases.values() if case))
        ways = rw.attention(asked) if rw.attention and asked else ["kernels"] * len(asked)
        rw.ways = dict(zip(asked, ways, strict=True))
    case = rw.cases[n]
    if not case:
        return None
    (window, (_, T, *_), bounded, device), way = case, rw.ways[case]
    q, k, v, mask, _, scale, grouped = args(n)
    if way == "sdpa":
        if window is not None or mask is None:
            rw.reasons[n] = "torch's own is faster here"
            return None  # the same without a mask, which no flash kernel of torch's takes:
        y = rw.put(n, F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return "attention by torch, without the mask" if rw.swap([n], [y]) else None
    q, k, v = (rw.put(n, torch.transpose, t, 1, 2) if _untransposed(t) is None else _untransposed(t) for t in (q, k, v))
    if way == "kernels":
        y = rw.put(n, flash_attention, q, k, v, window=window, scale=scale, bounded=bounded)
    else:
        windows = {} if window is None else {"window_size_left": window, "window_size_right": 0}
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else value(q).dtype
        q, k, v = (t if value(t).dtype == dtype else rw.put(n, torch.Tensor.to, t, dtype) for t in (q, k, v))
        more = windows | {"scale": scale}
        y = rw.put(n, torch.ops.aten._flash_attention_forward.default, q, k, v, None, None, T, T, 0.0, True, False, **more)
        y = rw.put(n, operator.getitem, y, 0)
    return f"attention by {way}" if rw.swap([n], [rw.put(n, torch.transpose, y, 1, 2)]) else None


def loss(rw, n):
    """Linear layer, soft cap where there is one, cross entropy."""
    if op(n) != "cross_entropy":
        return None
    logits, targets, ignore_index, reduction = args(n)
    if value(logits).ndim != 2 or reduction not in ("mean", "sum", "none") or value(targets).dtype != torch.int64:
        return None
    chain, before, cap = [n], skip(logits, "shape"), None
    outer = scaled(before)
    if outer and op(outer[1]) == "tanh" and not outer[2]:
        inner = scaled(args(outer[1])[0])
        factor = inner and (1 / inner[0] if inner[2] else inner[0])
        if not inner or abs(factor * outer[0] - 1) > 1e-12 or not 1 <= outer[0] <= 1000:
            rw.reasons[n] = "no soft cap as c * tanh(x / c)"
            return None
        cap, before = outer[0], inner[1]
    if cap is not None and value(before).dtype != torch.float32:
        rw.reasons[n] = f"the soft cap is computed in {value(before).dtype}, the kernel's in float32"
        return None
    product = before
    while op(product) == "shape" or op(product) == "cast" and _widens(product):
        product = product.args[0]
    made = plain_linear(product)
    if not made or value(n).dtype != torch.float32:
        return None
    inner = logits
    while inner is not product:  # what is between, if others read it, has to be computed anyway
        chain.append(inner)
        inner = next(a for a in inner.all_input_nodes)
    if any(not reads_only(m, *chain) for m in (*chain[1:], product)):
        rw.reasons[n] = "the logits are read by others too"
        return None
    x, weight = made
    shape = value(x).shape[:-1]
    flat = skip(targets, "shape")
    if value(flat).shape != shape:
        flat = rw.put(n, torch.reshape, targets, list(shape))
    if not torch.is_autocast_enabled(value(x).device.type) and value(x).dtype != value(weight).dtype:
        return None
    y = rw.put(n, linear_softcap_cross_entropy, x, weight, flat, cap, ignore_index=ignore_index, reduction=reduction)
    if value(y).shape != value(n).shape:
        y = rw.put(n, torch.reshape, y, list(value(n).shape))
    return "linear_softcap_cross_entropy" if rw.swap([n], [y]) else None


def _widens(n):
    return torch.promote_types(value(n).dtype, value(n.args[0]).dtype) == value(n).dtype


def _relu_squared(n):
    """x of relu(x)²."""
    if op(n) == "square" or op(n) == "pow" and args(n)[1] == 2 or op(n) == "mul" and args(n)[0] is args(n)[1]:
        inner = args(n)[0]
    else:
        return None
    return args(inner)[0] if op(inner) == "relu" else None


def mlp(rw, n):
    """linear(relu(linear(norm(x + update)))²), with the sum."""
    outer = plain_linear(n)
    hidden = _relu_squared(outer[0]) if outer else None
    inner = plain_linear(hidden) if is_tensor(hidden) else None
    if not inner:
        return None
    h = bare_norm(inner[0])
    pair = summed(h) if h is not None else None
    if not pair:
        return None
    if not reads_only(outer[0], n) or not reads_only(hidden, *outer[0].all_input_nodes) or not reads_only(inner[0], hidden):
        rw.reasons[n] = "a part of it is read by others too"
        return None
    return _with_sum(rw, h, n, "add_norm_mlp", add_norm_mlp, *pair, inner[1], outer[1])


def _with_sum(rw, h, y, name, target, *arguments, **keywords):
    """`target` in the place of a sum or mix h and of y, which is made of it."""
    if not rw.fits([h, y], arguments, tuple(keywords.values())):
        return None
    new_h, new_y = rw.items(rw.put(y, target, *arguments, **keywords))[:2]
    return name if rw.swap([h, y], [new_h, new_y]) else None


def sum_norm_product(rw, n):
    """The norm of a mix or of a sum, with the product that alone reads it, if there is one; the norm by itself."""
    found = norm(n)
    if not found:
        return None
    h, weight, eps = found
    readers = list(n.users)
    product = plain_linear(readers[0]) if len(readers) == 1 and plain_linear(readers[0]) and args(readers[0])[0] is n else None
    width = value(h).shape[-1]
    if weight is None and eps == EPS and width <= 8192:
        mix = mixed(h)
        if mix:
            x, x0, a, b, update = mix
            name = "residual_mix_norm" + ("_linear" if product else "") + (" with update" if update is not None else "")
            if product:
                done = _with_sum(rw, h, readers[0], name, residual_mix_norm_linear, x, x0, a, b, product[1], update=update)
            else:
                done = _with_sum(rw, h, n, name, residual_mix_norm, x, x0, a, b, update=update)
            if done:
                return done
        if product and (pair := summed(h)):
            done = _with_sum(rw, h, readers[0], "add_norm_linear", add_norm_linear, *pair, product[1])
            if done:
                return done
    if pair := summed(h):
        done = _with_sum(rw, h, n, "add_rms_norm", add_rms_norm, *pair, weight, eps=eps)
        if done:
            return done
    if width > 65536:
        return None
    y = rw.put(n, rms_norm, h, weight, eps=eps)
    if not rw.swap([n], [y]):
        return None
    rw.normed.update({y} if weight is None else ())
    return "rms_norm"


def gate(rw, n):
    """relu², or silu or gelu of one tensor times another."""
    x = _relu_squared(n)
    if is_tensor(x):
        return "relu_squared" if rw.swap([n], [rw.put(n, relu_squared, x)]) else None
    for a, b in two(n, "mul"):
        if not is_tensor(a) or not is_tensor(b) or value(a).shape != value(b).shape or value(a).dtype != value(b).dtype:
            continue
        if op(a) == "silu":
            return "swiglu" if rw.swap([n], [rw.put(n, swiglu, args(a)[0], b)]) else None
        if op(a) == "gelu":
            return "geglu" if rw.swap([n], [rw.put(n, geglu, args(a)[0], b, args(a)[1])]) else None
    return None


def product(rw, n):
    """A linear layer, for the way in which the gradient of its weight is formed."""
    made = plain_linear(n)
    if not made:
        if op(n) == "linear" and args(n)[2] is not None:
            rw.reasons[n] = "it has a bias"
        return None
    return "linear" if rw.swap([n], [rw.put(n, linear, *made)]) else None


WEIGHTS = {linear: (1,), add_norm_linear: (2,), residual_mix_norm_linear: (4,), add_norm_mlp: (2, 3), linear_softcap_cross_entropy: (1,)}


def products(graph):
    """{device: {(out, in, rows)}} of all weights' products in a rewritten graph."""
    found = {}
    for n in graph.nodes:
        for i in WEIGHTS.get(n.target, ()) if n.op == "call_function" else ():
            x, weight = value(n.args[0]), value(n.args[i])
            found.setdefault(x.device, set()).add((*weight.shape, x.shape[:-1].numel()))
    return found


RULES = (qkv, qk, attention, loss, mlp, sum_norm_product, gate, product)  # large to small


def unfused(n):
    """Why an operation of a kind that rules know is none of theirs: an argument that they don't know; None if that isn't it."""
    return f"with {unknown}" if kind(n) in ("cross_entropy", "sdpa", "linear", "rms_norm") and (unknown := unknown_argument(n)) else None

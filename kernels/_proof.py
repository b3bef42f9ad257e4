"""Whether a rewritten graph computes what its original does: both are run on the same random numbers, forward and backward, in float32;
where that leaves a doubt, in float64.

What is compared is the rewriting, not the kernels: each of this package's operations stands there as the plain PyTorch that defines it (its
`_ref`), so that nothing but a wrong match makes a difference, and a small one shows. Two rows of the batch are enough, on any device.
"""

import contextlib
import copy
import itertools

import torch
import torch.nn.functional as F

from . import attention, cross_entropy, gated, linear, mlp, norm_linear, qk_norm_rope, qkv, residual_mix, rms_norm, sdpa
from ._graph import is_tensor, kind, op, value

TOLERANCE = 1e-4  # of float32 sums in another order; a wrong match of random numbers is off by far more
ROWS = 2


def _reference(module, name):
    return getattr(module, name), getattr(module, f"{name}_ref")


REFERENCES = dict(
    _reference(module, name)
    for module, names in (
        (attention, ["flash_attention"]), (cross_entropy, ["linear_softcap_cross_entropy"]), (gated, ["geglu", "relu_squared", "swiglu"]),
        (linear, ["linear"]), (mlp, ["add_norm_mlp"]), (norm_linear, ["add_norm_linear", "residual_mix_norm_linear"]),
        (qk_norm_rope, ["qk_norm_rope"]), (qkv, ["qkv_norm_rope"]), (residual_mix, ["residual_mix_norm"]),
        (rms_norm, ["add_rms_norm", "rms_norm"]),
    )
    for name in names
)  # fmt: skip


def _attend(q, k, v, window=None, scale=None, bounded=False):
    return attention.flash_attention_ref(q, k, v, window=window, scale=scale)


_torchs_rms_norm = F.rms_norm


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    """torch's, but in float64 with the eps that it takes in float32, so that both compute the same."""
    return _torchs_rms_norm(input, normalized_shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _flash(q, k, v, *rest, window_size_left=None, **more):
    return (attention.flash_attention_ref(q, k, v, window=window_size_left),)


REFERENCES |= {
    attention.flash_attention: _attend,
    # torch's attention too: some of its kernels shorten float32 products, and on AMD one is reported to spoil what follows another.
    F.scaled_dot_product_attention: sdpa.sdpa_ref,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch.ops.aten._flash_attention_forward.default: _flash,
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _small(gm, batch, dtype):
    """A copy of a graph in `dtype`, of definitions, and with `ROWS` in the place of `batch` in the first of all sizes that it names."""
    graph = copy.deepcopy(gm.graph)

    def wide(a):
        return dtype if isinstance(a, torch.dtype) and a in _FLOATS else a

    def fewer(sizes):
        first = sizes[0] if sizes else None
        return (first // batch * ROWS, *sizes[1:]) if type(first) is int and first > 0 and first % batch == 0 else sizes

    for n in graph.nodes:
        if n.op == "call_method" and n.target in ("float", "bfloat16", "half"):
            n.target = "double" if dtype == torch.float64 else "float"
        if not n.op.startswith("call"):
            continue
        n.target = REFERENCES.get(n.target, n.target)
        n.args, n.kwargs = (torch.fx.node.map_aggregate(a, wide) for a in (n.args, n.kwargs))
        if batch and kind(n) in ("shape", "expand") and len(n.args) > 1:
            first, rest = n.args[0], n.args[1:]
            listed = isinstance(rest[0], (tuple, list))
            n.args = (first, fewer(rest[0]), *rest[1:]) if listed else (first, *fewer(rest))
    return graph


def _inputs(nodes, given, batch, device):
    """Random numbers for each placeholder; of whole numbers the ones given."""
    generator = torch.Generator(device).manual_seed(0)
    inputs = []
    for n, real in itertools.zip_longest(nodes, given):
        v = value(n)
        if not isinstance(v, torch.Tensor):
            inputs.append(real)
            continue
        in_batch = batch and v.ndim and v.shape[0] == batch and not isinstance(real, torch.nn.Parameter)
        shape = (ROWS, *v.shape[1:]) if in_batch else tuple(v.shape)
        if v.is_floating_point():
            size = v.shape[-1] ** -0.5 if v.ndim == 2 else 1.0
            x = (torch.randn(shape, generator=generator, device=device) * size).requires_grad_(v.requires_grad)
        elif isinstance(real, torch.Tensor) and not isinstance(real, torch._subclasses.FakeTensor):
            x = (real[:ROWS] if in_batch else real).clone()
        else:
            limits = [value(u.args[1]).shape[0] for u in n.users if op(u) == "embedding"]
            x = torch.randint(0, min(limits, default=2), shape, generator=generator, device=device).to(v.dtype)
        inputs.append(x)
    return inputs


def _batch(nodes, given):
    """The first size that the whole numbers among the inputs (tokens, targets) have in common; None if there is none."""
    data = [value(n) for n, real in zip(nodes, given) if is_tensor(n) and not isinstance(real, torch.nn.Parameter)]
    sizes = {v.shape[0] for v in data if v.ndim > 1 and v.shape[0] > ROWS and not v.is_floating_point()}
    return sizes.pop() if len(sizes) == 1 else None


@contextlib.contextmanager
def _exact(device):
    """No autocast, no shortened products, and the random state as it was afterwards."""
    precision = torch.get_float32_matmul_precision()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.autocast(device.type, enabled=False), torch.enable_grad():
        torch.set_float32_matmul_precision("highest")
        F.rms_norm = _rms_norm  # which the definitions call
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            F.rms_norm = _torchs_rms_norm


def _run(gm, graph, inputs):
    """The tensors that a graph gives, and the gradients of all inputs that have one."""
    torch.manual_seed(2)
    results = torch.utils._pytree.tree_leaves(torch.fx.Interpreter(gm, graph=graph).run(*inputs))
    results = [r for r in results if isinstance(r, torch.Tensor)]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    graded = [r for r in results if r.requires_grad]
    if not leaves or not graded:
        return results
    generator = torch.Generator(results[0].device).manual_seed(3)
    total = sum((r * torch.randn(r.shape, generator=generator, device=r.device)).sum() for r in graded)
    return results + list(torch.autograd.grad(total, leaves, allow_unused=True))


def _results(gm, batch, inputs, dtype):
    def wide(x):
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floating else x

    return _run(gm, _small(gm, batch, dtype), [wide(x) for x in inputs])


def _compare(before, after, batch, inputs):
    """What differs, in a few words. What rounding alone makes differ, however much it is, does so a million times less in float64: a
    gradient that is zero in mathematics, as of a scale before a norm, is nothing but rounding."""
    first, second = (_results(gm, batch, inputs, torch.float32) for gm in (before, after))
    exact = None
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        name = f"result {i} of {len(first)}"
        if (a is None) != (b is None):
            return f"{name}: one has a gradient, the other has none"
        if a is None:
            continue
        if a.shape != b.shape:
            return f"{name}: {tuple(b.shape)} for {tuple(a.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{name}: other whole numbers"
            continue
        error, size = _norm(a - b), _norm(a)
        if not error <= TOLERANCE * size:  # NaN too
            exact = exact or [_results(gm, batch, inputs, torch.float64) for gm in (before, after)]
            if not _norm(exact[0][i] - exact[1][i]) <= 1e-6 * error:
                return f"{name}: relative error {error / max(size, 1e-30):.1e}"
    return None


def _norm(x):
    return x.double().norm().item()


def difference(before, after, given):
    """What differs between two graphs of the same inputs, in a few words; None if nothing does.

    given: the inputs that the graph was captured with. Should the smaller batch not fit a graph, the whole one is used.
    """
    nodes = [n for n in before.graph.nodes if n.op == "placeholder"]
    device = next((value(n).device for n in nodes if isinstance(value(n), torch.Tensor)), torch.device("cpu"))
    batch = _batch(nodes, given)
    with _exact(device):
        for size in (batch, None) if batch else (None,):
            try:
                return _compare(before, after, size, _inputs(nodes, given, size, device))
            except (RuntimeError, ValueError, AssertionError) as e:
                if size is None or isinstance(e, torch.OutOfMemoryError):
                    return f"it could not be compared ({type(e).__name__}: {' '.join(str(e).split())[:120]})"
    return None



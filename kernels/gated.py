"""Gated linear units and relu², forward and backward: `activation(gate) * up` in one pass, two gradients in one.

    swiglu: g·σ(g)      geglu: g·Φ(g) exactly, or g·σ(2u), u = √(2/π)(g + 0.044715 g³), its tanh approximation  (Shazeer 2020)
    relu_squared: max(x, 0)², the same kernel without a gate                                                  (So et al. 2021)

σ(2u) = (1 + tanh u)/2 is how the tanh form is computed: one exponential. Everything is float32 between load and store.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import as_rows, differentiable, operator, require_device, require_float

GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # torch's names for the two forms


@triton.jit
def _sigmoid(z):
    """`σ(z)` and `1 - σ(z)`, the latter without cancellation; the bound keeps exp finite and is far below what shows."""
    e = tl.exp(-tl.maximum(z, -80.0))
    s = 1.0 / (1.0 + e)
    return s, e * s


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """`activation(g)` and its derivative."""
    if ACTIVATION == "relu_squared":
        r = tl.where(g < 0.0, 0.0, g)  # keeps NaN
        a = r * r
        slope = 2.0 * r
    elif ACTIVATION == "relu_squared_from_output":  # g is relu(x)² already
        a = g
        slope = 2.0 * tl.sqrt(g)
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        a = g * cdf
        slope = cdf + g * (0.3989422804014327 * tl.exp(-0.5 * g * g))
    elif ACTIVATION == "gelu_tanh":
        s, rest = _sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        a = g * s
        slope = s + a * rest * (1.5957691216057308 * (1.0 + 0.134145 * g * g))
    else:
        s, rest = _sigmoid(g)
        a = g * s
        slope = s + a * rest
    return a, slope


@triton.jit
def gated_kernel(G, U, S, Y, n_cols, n_blocks, stride_g, stride_u, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """S, if it is not None: what a row of G is multiplied by first."""
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    mask = at < n_cols - start
    g = tl.load(G + row * stride_g + start + at, mask, 0.0).to(tl.float32)
    if S is not None:
        g *= tl.load(S + row)
    y, _ = _activate(g, ACTIVATION)
    if U is not None:
        y *= tl.load(U + row * stride_u + start + at, mask, 0.0).to(tl.float32)
    tl.store(Y + row * n_cols + start + at, y.to(Y.dtype.element_ty), mask)


@triton.jit
def gated_backward_kernel(
    DY, G, U, S, DG, DU, n_cols, n_blocks, stride_dy, stride_g, stride_u, stride_dg, stride_du,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    """S, if it is not None: what a row of DG is multiplied by; G is then what the activation was given, or its output."""
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    mask = at < n_cols - start
    dy = tl.load(DY + row * stride_dy + start + at, mask, 0.0).to(tl.float32)
    a, slope = _activate(tl.load(G + row * stride_g + start + at, mask, 0.0).to(tl.float32), ACTIVATION)
    if DU is not None:
        tl.store(DU + row * stride_du + start + at, (dy * a).to(DU.dtype.element_ty), mask)
    if DG is not None:
        dg = dy * slope
        if U is not None:
            dg *= tl.load(U + row * stride_u + start + at, mask, 0.0).to(tl.float32)
        if S is not None:
            dg *= tl.load(S + row)
        tl.store(DG + row * stride_dg + start + at, dg.to(DG.dtype.element_ty), mask)


def block(n_cols):
    """`(BLOCK, num_warps)`: 16 elements a lane, two 128-bit accesses in bf16."""
    size = max(64, min(2048, triton.next_power_of_2(n_cols)))
    return size, max(1, size // 512)


def _flatten(*tensors, apart=False):
    """Tensors of one shape as rows; as a single row where all are contiguous, so that narrow rows waste no lanes, unless `apart`."""
    if not apart and all(t is None or t.is_contiguous() for t in tensors):
        return [None if t is None else t.view(1, -1) for t in tensors]
    return [None if t is None else as_rows(t) for t in tensors]


def _row_stride(t):
    return 0 if t is None else t.stride(0)


def _forward(gate, up, y, activation, scale=None):
    """Writes y, for a scale (rows,) float32 that of gate times it."""
    if y.numel():
        gate, up, rows = _flatten(gate, up, y, apart=scale is not None)
        n_rows, n_cols = rows.shape
        BLOCK, num_warps = block(n_cols)
        n_blocks = triton.cdiv(n_cols, BLOCK)
        with torch.cuda.device_of(y):
            gated_kernel[(n_rows * n_blocks,)](
                gate, up, scale, rows, n_cols, n_blocks, gate.stride(0), _row_stride(up), activation, BLOCK,
                num_warps=num_warps, num_stages=1,
            )
    return y


def _backward(dy, gate, up, dgate, dup, activation, scale=None):
    """Writes dgate, times the scale (rows,) float32 if there is one, and dup where they are not None."""
    if gate.numel() and not (dgate is None and dup is None):
        dy, gate, up, dgate, dup = _flatten(dy, gate, up, dgate, dup, apart=scale is not None)
        n_rows, n_cols = gate.shape
        BLOCK, num_warps = block(n_cols)
        n_blocks = triton.cdiv(n_cols, BLOCK)
        strides = [_row_stride(t) for t in (dy, gate, up, dgate, dup)]
        with torch.cuda.device_of(gate):
            gated_backward_kernel[(n_rows * n_blocks,)](
                dy, gate, up, scale, dgate, dup, n_cols, n_blocks, *strides, activation, BLOCK, num_warps=num_warps, num_stages=1
            )


def _empty(x, needed=True):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None


def _halves(x):
    """`(up, gate)` of `(..., 2d)` as rows: views, so a gradient can be written through them."""
    x = as_rows(x)
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


@operator("gated")
def gated_op(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _forward(gate, up, _empty(gate), activation)


@gated_op.register_fake
def _(gate, up, activation):
    return _empty(gate)


@operator("gated_backward")
def gated_backward_op(dy: Tensor, gate: Tensor, up: Tensor, activation: str, need_dgate: bool, need_dup: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _empty(gate, need_dgate), _empty(up, need_dup)
    _backward(dy, gate, up, dgate, dup, activation)
    return gate.new_empty(0) if dgate is None else dgate, gate.new_empty(0) if dup is None else dup


@gated_backward_op.register_fake
def _(dy, gate, up, activation, need_dgate, need_dup):
    return _empty(gate) if need_dgate else gate.new_empty(0), _empty(up) if need_dup else gate.new_empty(0)


@operator("gated_chunked")
def gated_chunked_op(x: Tensor, activation: str) -> Tensor:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    up, gate = _halves(x)
    _forward(gate, up, y.view(gate.shape), activation)
    return y


@gated_chunked_op.register_fake
def _(x, activation):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator("gated_chunked_backward")
def gated_chunked_backward_op(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    dx = _empty(x)
    up, gate = _halves(x)
    dup, dgate = _halves(dx)
    _backward(as_rows(dy), gate, up, dgate, dup, activation)
    return dx


@gated_chunked_backward_op.register_fake
def _(dy, x, activation):
    return _empty(x)


@operator("relu_squared")
def relu_squared_op(x: Tensor) -> Tensor:
    return _forward(x, None, _empty(x), "relu_squared")


@relu_squared_op.register_fake
def _(x):
    return _empty(x)


@operator("relu_squared_backward")
def relu_squared_backward_op(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """`saved` is x ("relu_squared") or the output ("relu_squared_from_output")."""
    dx = _empty(saved)
    _backward(dy, saved, None, dx, None, activation)
    return dx


@relu_squared_backward_op.register_fake
def _(dy, saved, activation):
    return _empty(saved)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*(i for i in inputs if isinstance(i, Tensor)))
    ctx.activation = inputs[-1]


def _backward_gated(ctx, dy):
    need_dgate, need_dup, _ = ctx.needs_input_grad
    dgate, dup = gated_backward_op(dy, *ctx.saved_tensors, ctx.activation, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None, None


def _backward_gated_chunked(ctx, dy):
    return gated_chunked_backward_op(dy, *ctx.saved_tensors, ctx.activation), None


differentiable("swiglu/geglu", gated_op, gated_backward_op, _backward_gated, _save)
differentiable("geglu_chunked", gated_chunked_op, gated_chunked_backward_op, _backward_gated_chunked, _save)


def _save_relu_squared(ctx, inputs, output):
    """The output, because the product that follows keeps it anyway: then x need not live on. float16 squares overflow: there x."""
    (x,) = inputs
    ctx.activation = "relu_squared" if x.dtype == torch.float16 else "relu_squared_from_output"
    ctx.save_for_backward(x if x.dtype == torch.float16 else output)


def _backward_relu_squared(ctx, dy):
    return relu_squared_backward_op(dy, *ctx.saved_tensors, ctx.activation)


differentiable("relu_squared", relu_squared_op, relu_squared_backward_op, _backward_relu_squared, _save_relu_squared)


def _gated(name, gate, up, activation):
    require_float(name, gate, up)
    require_device(name, gate, up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"{name}: gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} must have one shape and dtype")
    return gated_op(gate, up, activation)


def _gelu(name, approximate):
    if approximate not in GELU:
        raise ValueError(f"{name}: approximate={approximate!r} is not supported; use 'none' or 'tanh'")
    return GELU[approximate]


def swiglu(gate, up):
    """`silu(gate) * up`. gate, up: one shape and dtype (float32, float16, bfloat16), any strides; the result is contiguous."""
    return _gated("swiglu", gate, up, "silu")


def geglu(gate, up, approximate="none"):
    """`gelu(gate, approximate) * up`, exact ("none") or "tanh". Tensors as for `swiglu`."""
    return _gated("geglu", gate, up, _gelu("geglu", approximate))


def geglu_chunked(x, approximate="none"):
    """`up, gate = x.chunk(2, -1); gelu(gate, approximate) * up`: (..., 2d) → (..., d), without copying the halves.

    The second half is the gate, as in diffusers' GEGLU. The gradient is written as one (..., 2d) tensor.
    """
    activation = _gelu("geglu_chunked", approximate)
    require_float("geglu_chunked", x)
    require_device("geglu_chunked", x)
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % 2:
        raise ValueError(f"geglu_chunked: x of shape {tuple(x.shape)}; the last dimension must be even and not 0")
    return gated_chunked_op(x, activation)


def relu_squared(x):
    """`relu(x)²`. x: any shape and strides, float32, float16 or bfloat16; the result is contiguous.

    The backward reads the result (in float16 x): torch refuses it if that was written into.
    """
    require_float("relu_squared", x)
    require_device("relu_squared", x)
    return relu_squared_op(x)


def swiglu_ref(gate, up):
    return torch.nn.functional.silu(gate) * up


def geglu_ref(gate, up, approximate="none"):
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def geglu_chunked_ref(x, approximate="none"):
    up, gate = x.chunk(2, -1)
    return geglu_ref(gate, up, approximate)


def relu_squared_ref(x):
    return torch.relu(x).square()

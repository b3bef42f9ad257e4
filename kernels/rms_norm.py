"""RMSNorm over the last dimension, alone and fused with a residual addition, forward and backward.

    rms_norm(x)[i]  = x[i] * rstd * weight[i],   rstd = 1 / sqrt(mean(x²) + eps)                      (Zhang & Sennrich 2019)
    add_rms_norm(x, residual) = (h, rms_norm(h)),   h = x + residual

With g = dy * weight and xhat = x * rstd:  dx = rstd * (g - xhat * mean(g * xhat)),  dweight = Σ_rows dy * xhat.

Both sums that the backward needs of a row, Σx² and Σg·x, come from what it reads anyway. So only inputs are saved, the
forward has one output, and a row is read once. A product that scales its rows by rstd itself (mlp.py) needs no norm, only rstd: `add_rstd`.
Each program handles a tile of rows that stays in registers; rows wider than MAX_TILE_WIDTH are walked twice, the second time from the
cache. dweight is summed in two stages (a partial sum a program, then the partial sums), in a fixed order, so it is the same bit for bit
every time.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import INTERPRETED, as_rows, differentiable, operator, require_device, require_float

MAX_WIDTH = 65536
MAX_TILE_WIDTH = 8192  # 16 warps with 16 elements a lane: still 16 waves a SIMD on gfx1151 (96 VGPRs)


@triton.jit
def rms_norm_kernel(
    X, R, W, S, Y, RSTD, n_rows, stride_x, stride_r, eps, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Y, the norm, or RSTD, what it multiplies a row by; the other is None."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows - first) & (col < N)
    x = tl.load(X + first * stride_x + (row * stride_x + col), mask, 0.0).to(tl.float32)
    if R is not None:
        x += tl.load(R + first * stride_r + (row * stride_r + col), mask, 0.0).to(tl.float32)
        h = x.to(S.dtype.element_ty)
        tl.store(S + first * N + (row * N + col), h, mask)
        x = h.to(tl.float32)  # the norm is that of the sum as stored, which is what the backward reads
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / N) + eps)
    if RSTD is not None:
        tl.store(RSTD + first + row, rstd, row < n_rows - first)
    else:
        y = x * rstd
        if W is not None:
            y *= tl.load(W + col, col < N, 0.0).to(tl.float32)
        tl.store(Y + first * N + (row * N + col), y.to(Y.dtype.element_ty), mask)


@triton.jit
def rms_norm_wide_kernel(X, R, W, S, Y, stride_x, stride_r, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    Y += row * N
    if R is not None:
        R += row * stride_r
        S += row * N
    col = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        at = start + col
        x = tl.load(X + at, at < N, 0.0).to(tl.float32)
        if R is not None:
            h = (x + tl.load(R + at, at < N, 0.0).to(tl.float32)).to(S.dtype.element_ty)
            tl.store(S + at, h, at < N)
            x = h.to(tl.float32)
        square += x * x
    rstd = tl.rsqrt(tl.sum(square, 0) * (1.0 / N) + eps)
    for start in range(0, N, BLOCK):
        at = start + col
        x = tl.load(X + at, at < N, 0.0).to(tl.float32)
        if R is not None:  # summed again: reading S back would need a barrier
            x = (x + tl.load(R + at, at < N, 0.0).to(tl.float32)).to(S.dtype.element_ty).to(tl.float32)
        y = x * rstd
        if W is not None:
            y *= tl.load(W + at, at < N, 0.0).to(tl.float32)
        tl.store(Y + at, y.to(Y.dtype.element_ty), at < N)


@triton.jit
def rms_norm_backward_kernel(
    DY, DS, X, W, DX, Y, DW, n_rows, n_tiles, n_programs, stride_dy, stride_ds, stride_x, eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):
    """Tiles pid, pid + n_programs, … ; DW is (n_programs, N) partial sums, or None: then there are as many programs as tiles.

    Y, if it is not None, gets the norm once more, without weight: for a product's weight gradient, which then need not keep it.
    SCALED: DY is rstd times the norm's gradient already.
    """
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), n_tiles, n_programs):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (row < n_rows - first) & (col < N)
        x = tl.load(X + first * stride_x + (row * stride_x + col), mask, 0.0).to(tl.float32)
        g = tl.load(DY + first * stride_dy + (row * stride_dy + col), mask, 0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) * (1.0 / N) + eps)
        xhat = x * rstd
        if Y is not None:
            tl.store(Y + first * N + (row * N + col), xhat.to(Y.dtype.element_ty), mask)
        if DW is not None:
            dw += g * xhat
        if W is not None:
            g *= tl.load(W + col, col < N, 0.0).to(tl.float32)
        if DX is not None:
            dx = g - xhat * (tl.sum(g * xhat, 1, keep_dims=True) * (1.0 / N))
            if not SCALED:
                dx *= rstd
            if DS is not None:
                dx += tl.load(DS + first * stride_ds + (row * stride_ds + col), mask, 0.0).to(tl.float32)
            tl.store(DX + first * N + (row * N + col), dx.to(DX.dtype.element_ty), mask)
    if DW is not None:
        tl.store(DW + tl.program_id(0).to(tl.int64) * N + col, tl.sum(dw, 0)[None, :], col < N)


@triton.jit
def rms_norm_backward_wide_kernel(
    DY, DS, X, W, DX, RSTD, stride_dy, stride_ds, stride_x, eps, N: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_x
    DY += row * stride_dy
    col = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)  # Σ g·x, the part of g that only scales the row
    for start in range(0, N, BLOCK):
        at = start + col
        x = tl.load(X + at, at < N, 0.0).to(tl.float32)
        g = tl.load(DY + at, at < N, 0.0).to(tl.float32)
        if W is not None:
            g *= tl.load(W + at, at < N, 0.0).to(tl.float32)
        square += x * x
        along += g * x
    rstd = tl.rsqrt(tl.sum(square, 0) * (1.0 / N) + eps)
    if RSTD is not None:
        tl.store(RSTD + row, rstd)
    if DX is not None:
        mean = tl.sum(along, 0) * rstd * (1.0 / N)
        for start in range(0, N, BLOCK):
            at = start + col
            x = tl.load(X + at, at < N, 0.0).to(tl.float32)
            g = tl.load(DY + at, at < N, 0.0).to(tl.float32)
            if W is not None:
                g *= tl.load(W + at, at < N, 0.0).to(tl.float32)
            dx = rstd * (g - x * rstd * mean)
            if DS is not None:
                dx += tl.load(DS + row * stride_ds + at, at < N, 0.0).to(tl.float32)
            tl.store(DX + row * N + at, dx.to(DX.dtype.element_ty), at < N)


@triton.jit
def rms_norm_dweight_wide_kernel(DY, X, RSTD, DW, n_rows, rows_each, stride_dy, stride_x, N: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums `rows_each` rows of BLOCK columns."""
    n_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    part = tl.program_id(0) // n_blocks
    at = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    first = part.to(tl.int64) * rows_each
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, tl.minimum(first + rows_each, n_rows)):
        x = tl.load(X + row * stride_x + at, at < N, 0.0).to(tl.float32)
        dy = tl.load(DY + row * stride_dy + at, at < N, 0.0).to(tl.float32)
        dw += dy * (x * tl.load(RSTD + row))
    tl.store(DW + part.to(tl.int64) * N + at, dw, at < N)


def tile(width, elements=2048):
    """`(ROWS, BLOCK, num_warps)`: 16 elements a lane, two 128-bit accesses in bf16; narrow rows share a program of four warps.

    `elements` of a program of narrow rows: the weight's gradient takes half, because its partial sums stay in registers too.
    """
    block = triton.next_power_of_2(width)
    if block > MAX_TILE_WIDTH:
        return 1, 4096, 8
    rows = max(1, elements // block)
    return rows, block, max(4, rows * block // 512)


@lru_cache
def _programs(device, num_warps):
    """How many programs of the weight's gradient run at once: about 32 warps for each multiprocessor."""
    if INTERPRETED:
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 32 // num_warps)


def _forward(x, residual, weight, eps, rstd_alone=False):
    """The norm, or rstd_alone (N ≤ 8,192) what it multiplies each row by, (rows,) float32; and the sum if there is a residual."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    h = None if residual is None else torch.empty(x.shape, dtype=dtype, device=x.device)
    y = None if rstd_alone else torch.empty(x.shape, dtype=dtype, device=x.device)
    N = x.shape[-1]
    ROWS, BLOCK, num_warps = tile(N)
    x = as_rows(x, ROWS)
    r = None if residual is None else as_rows(residual, ROWS)
    n_rows = x.shape[0]
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device) if rstd_alone else None
    if n_rows:
        strides = x.stride(0), 0 if r is None else r.stride(0)
        with torch.cuda.device_of(x):
            if N <= MAX_TILE_WIDTH:
                grid = (triton.cdiv(n_rows, ROWS),)
                rms_norm_kernel[grid](x, r, weight, h, y, rstd, n_rows, *strides, eps, N, ROWS, BLOCK, num_warps=num_warps, num_stages=1)
            else:
                rms_norm_wide_kernel[(n_rows,)](x, r, weight, h, y, *strides, eps, N, BLOCK, num_warps=num_warps, num_stages=1)
    return rstd if rstd_alone else y, h


def add_rstd(x, residual, eps):
    """`h = x + residual`, of their wider dtype, and its norm's rstd (rows,), float32; N ≤ 8,192. For within an operation."""
    rstd, h = _forward(x, residual, None, eps, rstd_alone=True)
    return h, rstd


@operator("rms_norm")
def rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _forward(x, None, weight, eps)[0]


@rms_norm_op.register_fake
def _(x, weight, eps):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("add_rms_norm")
def add_rms_norm_op(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, h = _forward(x, residual, weight, eps)
    return h, y


@add_rms_norm_op.register_fake
def _(x, residual, weight, eps):
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    return h, torch.empty_like(h)


@operator("rms_norm_backward")
def rms_norm_backward_op(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, need_dx: bool, need_dweight: bool, need_y: bool = False,
    scaled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dx + dsum, dweight)`, and the norm without weight once more; what is not needed comes back empty.

    scaled: dy is rstd times the norm's gradient already. It and need_y are for N ≤ 8,192 and no weight.
    """
    assert not (need_y or scaled) or (x.shape[-1] <= MAX_TILE_WIDTH and weight is None), "for rows of a tile, without weight"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_y else None
    dweight = None
    N = x.shape[-1]
    ROWS, BLOCK, num_warps = tile(N, 1024 if need_dweight else 2048)
    dy, x = as_rows(dy, ROWS), as_rows(x, ROWS)
    ds = None if dsum is None else as_rows(dsum, ROWS)
    n_rows = x.shape[0]
    if n_rows == 0 and need_dweight:
        dweight = torch.zeros_like(weight)
    if n_rows:
        options = {"num_warps": num_warps, "num_stages": 1}
        n_tiles = triton.cdiv(n_rows, ROWS)
        parts = min(n_tiles, _programs(x.device, num_warps)) if need_dweight else 0
        partial = torch.empty((parts, N), dtype=torch.float32, device=x.device) if need_dweight else None
        stride_ds = 0 if ds is None else ds.stride(0)
        with torch.cuda.device_of(x):
            if N <= MAX_TILE_WIDTH:
                n_programs = parts or n_tiles
                rms_norm_backward_kernel[(n_programs,)](
                    dy, ds, x, weight, dx, y, partial, n_rows, n_tiles, n_programs, dy.stride(0), stride_ds, x.stride(0), eps,
                    N, ROWS, BLOCK, scaled, **options,
                )
            else:
                rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device) if need_dweight else None
                rms_norm_backward_wide_kernel[(n_rows,)](
                    dy, ds, x, weight, dx, rstd, dy.stride(0), stride_ds, x.stride(0), eps, N, BLOCK, **options
                )
                if need_dweight:
                    rows_each = triton.cdiv(n_rows, parts)
                    partial = partial[: triton.cdiv(n_rows, rows_each)]
                    rms_norm_dweight_wide_kernel[(len(partial) * triton.cdiv(N, BLOCK),)](
                        dy, x, rstd, partial, n_rows, rows_each, dy.stride(0), x.stride(0), N, BLOCK, **options
                    )
        if need_dweight:
            dweight = partial.sum(0).to(weight.dtype)
    return tuple(x.new_empty(0) if d is None else d for d in (dx, dweight, y))


@rms_norm_backward_op.register_fake
def _(dy, dsum, x, weight, eps, need_dx, need_dweight, need_y=False, scaled=False):
    dx, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else x.new_empty(0) for need in (need_dx, need_y))
    return dx, torch.empty_like(weight) if need_dweight else x.new_empty(0), y


def _save_rms_norm(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward_rms_norm(ctx, dy):
    x, weight = ctx.saved_tensors
    need_dx, need_dweight, _ = ctx.needs_input_grad
    dx, dweight, _ = rms_norm_backward_op(dy, None, x, weight, ctx.eps, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None


differentiable("rms_norm", rms_norm_op, rms_norm_backward_op, _backward_rms_norm, _save_rms_norm)


def _save_add_rms_norm(ctx, inputs, output):
    x, residual, weight, ctx.eps = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(output[0], weight)
    ctx.set_materialize_grads(False)  # an unused output must not cost a tensor of zeros


def _backward_add_rms_norm(ctx, dsum, dy):
    h, weight = ctx.saved_tensors
    need_dx, need_dresidual, need_dweight, _ = ctx.needs_input_grad
    dh, dweight = dsum, None
    if dy is not None:
        dh, dweight, _ = rms_norm_backward_op(dy, dsum, h, weight, ctx.eps, need_dx or need_dresidual, need_dweight)
    dx, dresidual = (dh.to(t) if need and dh is not None else None for t, need in zip(ctx.dtypes, (need_dx, need_dresidual)))
    return dx, dresidual, dweight if need_dweight else None, None


add_rms_norm_op.register_autograd(_backward_add_rms_norm, setup_context=_save_add_rms_norm)


def _require(name, x, weight, *others):
    tensors = (x, weight, *others)
    require_float(name, *tensors)
    require_device(name, *tensors)
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{name}: x of shape {tuple(x.shape)}; the last dimension must be 1 to {MAX_WIDTH}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{name}: weight of shape {tuple(weight.shape)} for x of shape {tuple(x.shape)}; need ({x.shape[-1]},)")


def rms_norm(x, weight=None, eps=1e-6):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension.

    x: (..., N), N ≤ 65,536, float32, float16 or bfloat16, any strides; weight: (N,), of any of these dtypes, or None.
    Computes in float32 and returns x's shape and dtype, contiguous, also under autocast. Once differentiable in x and weight.
    ValueError for anything else.
    """
    _require("rms_norm", x, weight)
    return rms_norm_op(x, None if weight is None else weight.contiguous(), float(eps))


def add_rms_norm(x, residual, weight=None, eps=1e-6):
    """`h = x + residual; return h, rms_norm(h, weight, eps)` in one pass, and one pass back.

    x, residual: (..., N) of one shape. Both results have the wider of their dtypes, as the eager sum would.
    The gradient of an output that is not used costs nothing. Otherwise as `rms_norm`.
    """
    _require("add_rms_norm", x, weight, residual)
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x {tuple(x.shape)} and residual {tuple(residual.shape)} must have one shape")
    return add_rms_norm_op(x, residual, None if weight is None else weight.contiguous(), float(eps))


def rms_norm_ref(x, weight=None, eps=1e-6):
    """The definition, in x's own dtype."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else (y * weight).to(x.dtype)


def add_rms_norm_ref(x, residual, weight=None, eps=1e-6):
    h = x + residual
    return h, rms_norm_ref(h, weight, eps)

"""A learned mix of the residual stream with the embedding, and its RMSNorm, in one pass each way.

    mixed = resid_lambda·x + x0_lambda·x0;   residual_mix_norm(...) = (mixed, mixed / sqrt(mean(mixed²) + eps))

With an update, x + update takes the place of x: the sum, rounded to their dtype as it would be in memory, is never written.

Backward, with d the whole gradient of mixed (what came for it, and RMSNorm's of the norm's): dx = resid_lambda·d, dx0 = x0_lambda·d,
dresid_lambda = Σ d·x, dx0_lambda = Σ d·x0. mixed is computed again from x and x0, which the lambdas' gradients read anyway, so only
inputs are saved. The lambdas' sums have two stages (one partial sum a program, then the partial sums) in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import as_rows, differentiable, operator, require_device, require_float
from .rms_norm import MAX_TILE_WIDTH, rms_norm_ref, tile

EPS = torch.finfo(torch.float32).eps


@triton.jit
def _mix(X, U, X0, RESID, EMBED, first, stride_x, stride_u, stride_x0, row, col, mask):
    """x with its update, x0, both lambdas, and mixed as it is stored."""
    x = tl.load(X + first * stride_x + (row * stride_x + col), mask, 0.0).to(tl.float32)
    if U is not None:
        x += tl.load(U + first * stride_u + (row * stride_u + col), mask, 0.0).to(tl.float32)
        x = x.to(X.dtype.element_ty).to(tl.float32)
    x0 = tl.load(X0 + first * stride_x0 + (row * stride_x0 + col), mask, 0.0).to(tl.float32)
    resid = tl.load(RESID).to(tl.float32)
    embed = tl.load(EMBED).to(tl.float32)
    return x, x0, resid, embed, (resid * x + embed * x0).to(X.dtype.element_ty)


@triton.jit
def residual_mix_norm_kernel(
    X, U, X0, RESID, EMBED, MIXED, Y, n_rows, stride_x, stride_u, stride_x0, eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows - first) & (col < N)
    _x, _x0, _resid, _embed, mixed = _mix(X, U, X0, RESID, EMBED, first, stride_x, stride_u, stride_x0, row, col, mask)
    at = first * N
    tl.store(MIXED + at + (row * N + col), mixed, mask)
    m = mixed.to(tl.float32)
    y = m * tl.rsqrt(tl.sum(m * m, 1, keep_dims=True) * (1.0 / N) + eps)
    tl.store(Y + at + (row * N + col), y.to(Y.dtype.element_ty), mask)


@triton.jit
def residual_mix_norm_backward_kernel(
    DMIXED, DY, X, U, X0, RESID, EMBED, DX, DX0, Y, SUMS, n_rows, stride_dmixed, stride_dy, stride_x, stride_u, stride_x0, eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """SUMS: (programs, 2), the lambdas' partial sums. Y, if it is not None, gets the norm once more."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows - first) & (col < N)
    x, x0, resid, embed, mixed = _mix(X, U, X0, RESID, EMBED, first, stride_x, stride_u, stride_x0, row, col, mask)
    d = tl.zeros((ROWS, BLOCK), tl.float32)
    at = first * N
    if DY is not None:
        m = mixed.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(m * m, 1, keep_dims=True) * (1.0 / N) + eps)
        if Y is not None:  # before the gradient is loaded: after it, gfx1151 would need registers for 12 waves a SIMD instead of 16
            tl.store(Y + at + (row * N + col), (m * rstd).to(Y.dtype.element_ty), mask)
        g = tl.load(DY + first * stride_dy + (row * stride_dy + col), mask, 0.0).to(tl.float32)
        d += rstd * (g - m * (tl.sum(g * m, 1, keep_dims=True) * (1.0 / N) * rstd * rstd))
    if DMIXED is not None:
        d += tl.load(DMIXED + first * stride_dmixed + (row * stride_dmixed + col), mask, 0.0).to(tl.float32)
    if DX is not None:
        tl.store(DX + at + (row * N + col), (resid * d).to(DX.dtype.element_ty), mask)
    if DX0 is not None:
        tl.store(DX0 + at + (row * N + col), (embed * d).to(DX0.dtype.element_ty), mask)
    if SUMS is not None:
        tl.store(SUMS + 2 * tl.program_id(0), tl.sum(tl.sum(d * x, 1), 0))
        tl.store(SUMS + 2 * tl.program_id(0) + 1, tl.sum(tl.sum(d * x0, 1), 0))


def _empty(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("residual_mix_norm")
def residual_mix_norm_op(
    x: Tensor, update: Tensor | None, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    mixed, y = _empty(x), _empty(x)
    N = x.shape[-1]
    ROWS, BLOCK, num_warps = tile(N)
    x, update, x0 = (None if t is None else as_rows(t, ROWS) for t in (x, update, x0))
    if x.shape[0]:
        strides = [0 if t is None else t.stride(0) for t in (x, update, x0)]
        with torch.cuda.device_of(x):
            residual_mix_norm_kernel[(triton.cdiv(x.shape[0], ROWS),)](
                x, update, x0, resid_lambda, x0_lambda, mixed, y, x.shape[0], *strides, eps, N, ROWS, BLOCK,
                num_warps=num_warps, num_stages=1,
            )
    return mixed, y


@residual_mix_norm_op.register_fake
def _(x, update, x0, resid_lambda, x0_lambda, eps):
    return _empty(x), _empty(x)


@operator("residual_mix_norm_backward")
def residual_mix_norm_backward_op(
    dmixed: Tensor | None, dy: Tensor | None, x: Tensor, update: Tensor | None, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor,
    eps: float, need_dx: bool, need_dx0: bool, need_dlambdas: bool, need_y: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (the update's too), dx0, both lambdas' gradients as one (2,) float32 tensor, the norm once more; what is not needed is empty."""
    dx, dx0, y = _empty(x) if need_dx else None, _empty(x0) if need_dx0 else None, _empty(x) if need_y else None
    N = x.shape[-1]
    ROWS, BLOCK, num_warps = tile(N)
    dmixed, dy, x, update, x0 = (None if t is None else as_rows(t, ROWS) for t in (dmixed, dy, x, update, x0))
    programs = triton.cdiv(x.shape[0], ROWS)
    sums = torch.empty((programs, 2), dtype=torch.float32, device=x.device) if need_dlambdas else None
    if programs:
        strides = [0 if t is None else t.stride(0) for t in (dmixed, dy, x, update, x0)]
        with torch.cuda.device_of(x):
            residual_mix_norm_backward_kernel[(programs,)](
                dmixed, dy, x, update, x0, resid_lambda, x0_lambda, dx, dx0, y, sums, x.shape[0], *strides, eps, N, ROWS, BLOCK,
                num_warps=num_warps, num_stages=1,
            )
    dlambdas = sums.sum(0) if need_dlambdas else None
    return tuple(x.new_empty(0) if d is None else d for d in (dx, dx0, dlambdas, y))


@residual_mix_norm_backward_op.register_fake
def _(dmixed, dy, x, update, x0, resid_lambda, x0_lambda, eps, need_dx, need_dx0, need_dlambdas, need_y=False):
    dlambdas = torch.empty(2, dtype=torch.float32, device=x.device) if need_dlambdas else x.new_empty(0)
    dx, dx0, y = (_empty(x) if need else x.new_empty(0) for need in (need_dx, need_dx0, need_y))
    return dx, dx0, dlambdas, y


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # an unused output must not cost a tensor of zeros


def mix_gradients(dx, dx0, dlambdas, needs, update, resid_lambda, x0_lambda):
    """What autograd is given for x, update, x0 and both lambdas, of which `needs` says whether they want one."""
    return (
        dx if needs[0] else None,
        dx.to(update.dtype) if needs[1] else None,
        dx0 if needs[2] else None,
        dlambdas[0].to(resid_lambda.dtype) if needs[3] else None,
        dlambdas[1].to(x0_lambda.dtype) if needs[4] else None,
    )


def _backward_residual_mix_norm(ctx, dmixed, dy):
    x, update, x0, resid_lambda, x0_lambda = ctx.saved_tensors
    *needs, _ = ctx.needs_input_grad
    dx, dx0, dlambdas, _ = residual_mix_norm_backward_op(
        dmixed, dy, x, update, x0, resid_lambda, x0_lambda, ctx.eps, needs[0] or needs[1], needs[2], needs[3] or needs[4]
    )
    return *mix_gradients(dx, dx0, dlambdas, needs, update, resid_lambda, x0_lambda), None


differentiable("residual_mix_norm", residual_mix_norm_op, residual_mix_norm_backward_op, _backward_residual_mix_norm, _save)


def check_mix(name, x, update, x0, *lambdas):
    """ValueError where the streams and lambdas don't fit together."""
    streams = [t for t in (x, update, x0) if t is not None]
    require_float(name, *streams, *lambdas)
    require_device(name, *streams, *lambdas)
    if any(t.shape != x.shape or torch.promote_types(t.dtype, x.dtype) != x.dtype for t in streams) or x0.dtype != x.dtype:
        said = ", ".join(f"{which} {t.dtype} {tuple(t.shape)}" for which, t in (("x", x), ("x0", x0), ("update", update)) if t is not None)
        raise ValueError(f"{name}: {said}; need one shape and one dtype (an update's may be narrower)")
    if x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_TILE_WIDTH:
        raise ValueError(f"{name}: x of shape {tuple(x.shape)}; the last dimension must be 1 to {MAX_TILE_WIDTH}")
    if any(t.ndim for t in lambdas):
        raise ValueError(f"{name}: lambdas of shapes {', '.join(str(tuple(t.shape)) for t in lambdas)}; need 0-D tensors")


def residual_mix_norm(x, x0, resid_lambda, x0_lambda, eps=EPS, update=None):
    """`mixed = resid_lambda * (x + update) + x0_lambda * x0; return mixed, rms_norm(mixed)`, without weight; no update adds nothing.

    x, x0, update: (..., N), N ≤ 8,192, one shape and dtype (float32, float16, bfloat16), which both results have, the update's dtype no
    wider; resid_lambda, x0_lambda: 0-D tensors on the same device, float32 as a rule, that promote nothing. Once differentiable in all.
    ValueError for anything else.
    """
    check_mix("residual_mix_norm", x, update, x0, resid_lambda, x0_lambda)
    return residual_mix_norm_op(x, update, x0, resid_lambda, x0_lambda, float(eps))


def residual_mix_norm_ref(x, x0, resid_lambda, x0_lambda, eps=EPS, update=None):
    mixed = resid_lambda * (x if update is None else x + update) + x0_lambda * x0
    return mixed, rms_norm_ref(mixed, None, eps)

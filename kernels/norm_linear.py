"""A residual step, RMSNorm and the product that follows, as one operation that keeps less than the three.

    add_norm_linear(x, update, weight):                            h = x + update
    residual_mix_norm_linear(x, x0, resid_lambda, x0_lambda, …):   h = resid_lambda·(x + update) + x0_lambda·x0
    both return h and (h / sqrt(mean(h²) + eps)) · weightᵀ

The product's weight gradient needs the norm once more. It is not kept: the backward's kernel reads h anyway and writes the norm beside
its gradient, which costs no more than keeping it would have and frees it in between.
"""

import torch
from torch import Tensor

from ._common import differentiable, operator, require_device, require_float
from .linear import compute_dtype, rows, weight_gradient
from .residual_mix import check_mix, mix_gradients, residual_mix_norm_backward_op, residual_mix_norm_op, residual_mix_norm_ref
from .rms_norm import MAX_TILE_WIDTH, add_rms_norm_op, add_rms_norm_ref, rms_norm_backward_op, rms_norm_op

EPS = torch.finfo(torch.float32).eps


def _product(normed, weight, dtype):
    return normed.to(dtype) @ weight.to(dtype).t()


def _dweight(dy, normed, dtype):
    return weight_gradient(rows(dy), rows(normed).to(dy.dtype), dtype)


@operator("add_norm_linear")
def add_norm_linear_op(x: Tensor, update: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    h, normed = add_rms_norm_op(x, update, None, eps)
    return h, _product(normed, weight, dtype)


@add_norm_linear_op.register_fake
def _(x, update, weight, eps, dtype):
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, update.dtype), device=x.device)
    return h, x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@operator("add_norm_linear_backward")
def add_norm_linear_backward_op(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, eps: float, need_dh: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """dh and dweight; what is not needed comes back empty."""
    if not need_dh:
        return h.new_empty(0), _dweight(dy, rms_norm_op(h, None, eps), weight.dtype)
    dh, _, normed = rms_norm_backward_op(dy @ weight.to(dy.dtype), dh, h, None, eps, True, False, need_dweight)
    return dh, _dweight(dy, normed, weight.dtype) if need_dweight else weight.new_empty(0)


@add_norm_linear_backward_op.register_fake
def _(dy, dh, h, weight, eps, need_dh, need_dweight):
    return h.new_empty(h.shape if need_dh else 0), weight.new_empty(weight.shape if need_dweight else 0)


def _save_add(ctx, inputs, output):
    x, update, weight, ctx.eps, _ = inputs
    ctx.dtypes = x.dtype, update.dtype
    ctx.save_for_backward(output[0], weight)
    ctx.set_materialize_grads(False)  # an unused output must not cost a tensor of zeros


def _backward_add(ctx, dh, dy):
    h, weight = ctx.saved_tensors
    need_dx, need_dupdate, need_dweight, _, _ = ctx.needs_input_grad
    dweight = None
    if dy is not None:
        dh, dweight = add_norm_linear_backward_op(dy, dh, h, weight, ctx.eps, need_dx or need_dupdate, need_dweight)
    dx, dupdate = (dh.to(t) if need and dh is not None else None for t, need in zip(ctx.dtypes, (need_dx, need_dupdate)))
    return dx, dupdate, dweight if need_dweight else None, None, None


differentiable("add_norm_linear", add_norm_linear_op, add_norm_linear_backward_op, _backward_add, _save_add)


@operator("residual_mix_norm_linear")
def residual_mix_norm_linear_op(
    x: Tensor, update: Tensor | None, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    h, normed = residual_mix_norm_op(x, update, x0, resid_lambda, x0_lambda, eps)
    return h, _product(normed, weight, dtype)


@residual_mix_norm_linear_op.register_fake
def _(x, update, x0, resid_lambda, x0_lambda, weight, eps, dtype):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@operator("residual_mix_norm_linear_backward")
def residual_mix_norm_linear_backward_op(
    dy: Tensor, dh: Tensor | None, x: Tensor, update: Tensor | None, x0: Tensor, resid_lambda: Tensor, x0_lambda: Tensor, weight: Tensor,
    eps: float, need_dx: bool, need_dx0: bool, need_dlambdas: bool, need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, which is the update's too, dx0, both lambdas' gradients as (2,), dweight; what is not needed comes back empty."""
    if not (need_dx or need_dx0 or need_dlambdas):
        _, normed = residual_mix_norm_op(x, update, x0, resid_lambda, x0_lambda, eps)
        return x.new_empty(0), x.new_empty(0), x.new_empty(0), _dweight(dy, normed, weight.dtype)
    dx, dx0, dlambdas, normed = residual_mix_norm_backward_op(
        dh, dy @ weight.to(dy.dtype), x, update, x0, resid_lambda, x0_lambda, eps, need_dx, need_dx0, need_dlambdas, need_dweight
    )
    return dx, dx0, dlambdas, _dweight(dy, normed, weight.dtype) if need_dweight else weight.new_empty(0)


@residual_mix_norm_linear_backward_op.register_fake
def _(dy, dh, x, update, x0, resid_lambda, x0_lambda, weight, eps, need_dx, need_dx0, need_dlambdas, need_dweight):
    dx, dx0 = (x.new_empty(x.shape if need else 0) for need in (need_dx, need_dx0))
    dlambdas = x.new_empty(2, dtype=torch.float32) if need_dlambdas else x.new_empty(0)
    return dx, dx0, dlambdas, weight.new_empty(weight.shape if need_dweight else 0)


def _save_mix(ctx, inputs, output):
    *tensors, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward_mix(ctx, dh, dy):
    x, update, x0, resid_lambda, x0_lambda, weight = ctx.saved_tensors
    *needs, need_dweight, _, _ = ctx.needs_input_grad
    inputs, asked, dweight = (x, update, x0, resid_lambda, x0_lambda), (needs[0] or needs[1], needs[2], needs[3] or needs[4]), None
    if dy is None:
        dx, dx0, dlambdas, _ = residual_mix_norm_backward_op(dh, None, *inputs, ctx.eps, *asked)
    else:
        dx, dx0, dlambdas, dweight = residual_mix_norm_linear_backward_op(dy, dh, *inputs, weight, ctx.eps, *asked, need_dweight)
    return *mix_gradients(dx, dx0, dlambdas, needs, update, resid_lambda, x0_lambda), dweight if need_dweight else None, None, None


differentiable("residual_mix_norm_linear", residual_mix_norm_linear_op, residual_mix_norm_linear_backward_op, _backward_mix, _save_mix)


def check_sum(name, x, update, *weights):
    """ValueError unless x and update can be added, and weights are floats on their device."""
    require_float(name, x, update, *weights)
    require_device(name, x, update, *weights)
    if x.shape != update.shape or x.ndim == 0 or not 1 <= x.shape[-1] <= MAX_TILE_WIDTH:
        shapes = f"{tuple(x.shape)} and {tuple(update.shape)}"
        raise ValueError(f"{name}: shapes {shapes}; need one shape (..., N), N from 1 to {MAX_TILE_WIDTH}")


def _check_weight(name, x, weight):
    require_float(name, weight)
    require_device(name, x, weight)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{name}: weight of shape {tuple(weight.shape)} for x of {tuple(x.shape)}; need (out, {x.shape[-1]})")


def add_norm_linear(x, update, weight, eps=EPS):
    """`h = x + update; return h, F.linear(rms_norm(h), weight)`.

    x, update: (..., N), N ≤ 8,192, one shape, float32, float16 or bfloat16; weight: (out, N), of any of these dtypes, used in that of the
    product, which is h's or autocast's. Once differentiable in all three. ValueError for anything else.
    """
    check_sum("add_norm_linear", x, update)
    _check_weight("add_norm_linear", x, weight)
    return add_norm_linear_op(x, update, weight, float(eps), compute_dtype(x.device, torch.promote_types(x.dtype, update.dtype)))


def add_norm_linear_ref(x, update, weight, eps=EPS):
    h, normed = add_rms_norm_ref(x, update, None, eps)
    return h, torch.nn.functional.linear(normed, weight)


def residual_mix_norm_linear(x, x0, resid_lambda, x0_lambda, weight, eps=EPS, update=None):
    """`h = resid_lambda * (x + update) + x0_lambda * x0; return h, F.linear(rms_norm(h), weight)`; no update adds nothing.

    Tensors as for `residual_mix_norm`, weight as for `add_norm_linear`. Once differentiable in all. ValueError for anything else.
    """
    name = "residual_mix_norm_linear"
    check_mix(name, x, update, x0, resid_lambda, x0_lambda)
    _check_weight(name, x, weight)
    dtype = compute_dtype(x.device, x.dtype)
    return residual_mix_norm_linear_op(x, update, x0, resid_lambda, x0_lambda, weight, float(eps), dtype)


def residual_mix_norm_linear_ref(x, x0, resid_lambda, x0_lambda, weight, eps=EPS, update=None):
    h, normed = residual_mix_norm_ref(x, x0, resid_lambda, x0_lambda, eps, update)
    return h, torch.nn.functional.linear(normed, weight)

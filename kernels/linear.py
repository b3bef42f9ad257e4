"""`linear`, and the weight's gradient of every product here, formed in the way that is fastest on the device.

    y = x · weightᵀ          x (rows, in), weight (out, in), y (rows, out)
    dx = dy · weight         dweight = dyᵀ · x, summed over the rows in float32

The last product reads both factors along their rows, the layout that BLAS libraries treat worst: hipBLASLt's is two to four times slow
on gfx1151 (ROCm/TheRock#5314), where rocBLAS's is not. `WEIGHT_GRADIENT` says for each shape how it is formed; it is empty, which means
"direct" by torch's own choice of library, until somebody who has measured writes into it. The result is the same but for rounding.
"""

import contextlib

import torch
from torch import Tensor

from ._common import forbid_double_backward, require_float
from ._ops import add_op_namespace_prefix

FORMS = {
    "direct": lambda dy, x, mm: mm(dy.t(), x),
    "transposed": lambda dy, x, mm: mm(x.t(), dy).t(),
    "copied": lambda dy, x, mm: mm(dy.t().contiguous(), x),
}
WEIGHT_GRADIENT = {}  # (out, in) → (a key of FORMS, a BLAS library as torch.backends.cuda.preferred_blas_library takes it, or None)


def _mm_float32(a, b):
    """a @ b in float32. A float32 result of a low-precision product is CUDA's alone; elsewhere it is rounded once before."""
    if a.is_cuda and not torch.version.hip and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


@contextlib.contextmanager
def _blas(library):
    if library is None:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def weight_gradient(dy, x, dtype):
    """dyᵀ · x for dy (rows, out) and x (rows, in), as (out, in) of `dtype`."""
    form, library = WEIGHT_GRADIENT.get((dy.shape[1], x.shape[1]), ("direct", None))
    with _blas(library):
        return FORMS[form](dy, x, torch.mm if dtype == x.dtype else _mm_float32).to(dtype).contiguous()


def compute_dtype(x):
    """What products are computed in: x's dtype, or autocast's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@torch.library.custom_op(add_op_namespace_prefix("linear"), mutates_args=())
def linear_op(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype).t()


@linear_op.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op(add_op_namespace_prefix("linear_backward"), mutates_args=())
def linear_backward_op(dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool) -> tuple[Tensor, Tensor]:
    dx = dy @ weight.to(dy.dtype) if need_dx else x.new_empty(0)
    dweight = weight_gradient(dy.flatten(0, -2), x.flatten(0, -2), weight.dtype) if need_dweight else weight.new_empty(0)
    return dx, dweight


@linear_backward_op.register_fake
def _(dy, x, weight, need_dx, need_dweight):
    return torch.empty_like(x) if need_dx else x.new_empty(0), torch.empty_like(weight) if need_dweight else weight.new_empty(0)


forbid_double_backward("linear", linear_backward_op)


def _backward(ctx, dy):
    dx, dweight = linear_backward_op(dy, *ctx.saved_tensors, *ctx.needs_input_grad)
    return tuple(d if need else None for d, need in zip((dx, dweight), ctx.needs_input_grad))


linear_op.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def linear(x, weight):
    """`F.linear(x, weight)` whose weight gradient is formed as `WEIGHT_GRADIENT` says, in float32 for a float32 weight under autocast.

    x: (..., in), weight: (out, in), float32, float16 or bfloat16; the product is computed in x's dtype, or autocast's. Runs on any
    device. Once differentiable.
    """
    require_float("linear", x, weight)
    if weight.ndim != 2 or x.ndim < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: weight {tuple(weight.shape)} for x {tuple(x.shape)}; need (out, {x.shape[-1]}) and (..., in)")
    return linear_op(x.to(compute_dtype(x)), weight)


def linear_ref(x, weight):
    return torch.nn.functional.linear(x, weight)

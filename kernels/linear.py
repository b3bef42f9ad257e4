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

from ._common import differentiable, forbid_forward_mode, operator, require_float

FORMS = {
    "direct": lambda dy, x, mm: mm(dy.t(), x),
    "transposed": lambda dy, x, mm: mm(x.t(), dy).t(),
    "copied": lambda dy, x, mm: mm(dy.t().contiguous(), x),
}
WEIGHT_GRADIENT = {}  # (out, in) → (a key of FORMS, a BLAS library as torch.backends.cuda.preferred_blas_library takes it, or None)


def _mm_float32(a, b):
    """a @ b in float32. A float32 result of a low-precision product is CUDA's alone; elsewhere it is rounded once before."""
    if a.is_cuda and not torch.version.hip and a.dtype != torch.float32 and a.numel():
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


@contextlib.contextmanager
def blas(library):
    """Products within are made by this library; None: by the one that makes them anyway."""
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
    with blas(library):
        return FORMS[form](dy, x, torch.mm if dtype == x.dtype else _mm_float32).to(dtype).contiguous()


def compute_dtype(device, dtype):
    """What products are computed in: autocast's dtype, or the one given."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def rows(x):
    """(…, N) as (rows, N)."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@operator("linear")
def linear_op(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype).t()


@linear_op.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("linear_backward")
def linear_backward_op(dy: Tensor, x: Tensor | None, weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dx, for which weight is needed, and dweight of `dtype`, for which x is: a gradient without its factor comes back empty."""
    dx = dy.new_empty(0) if weight is None else dy @ weight.to(dy.dtype)
    return dx, dy.new_empty(0, dtype=dtype) if x is None else weight_gradient(rows(dy), rows(x), dtype)


@linear_backward_op.register_fake
def _(dy, x, weight, dtype):
    dx = dy.new_empty(0 if weight is None else (*dy.shape[:-1], weight.shape[1]))
    return dx, dy.new_empty(0 if x is None else (dy.shape[-1], x.shape[-1]), dtype=dtype)


def _save(ctx, inputs, output):
    """Of a frozen layer only what the other gradient needs."""
    x, weight = inputs
    need_dx, need_dweight = ctx.needs_input_grad[:2]  # here torch counts an argument of its own too
    ctx.dtype = weight.dtype
    ctx.save_for_backward(x if need_dweight else None, weight if need_dx else None)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dweight = linear_backward_op(dy, x, weight, ctx.dtype)
    return None if weight is None else dx, None if x is None else dweight


differentiable("linear", linear_op, linear_backward_op, _backward, _save)


def linear(x, weight):
    """`F.linear(x, weight)` whose weight gradient is formed as `WEIGHT_GRADIENT` says.

    x: (..., in), weight: (out, in), float32, float16 or bfloat16, any strides; the product is computed in x's dtype, or autocast's, and
    has it. The gradient of a float32 weight leaves a low-precision product unrounded on CUDA. Runs on any device, the CPU too. Once
    differentiable in both. ValueError for anything else.
    """
    require_float("linear", x, weight)
    forbid_forward_mode("linear", x, weight)
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: weight {tuple(weight.shape)} for x {tuple(x.shape)}; need (out, in) and (..., in)")
    if x.device != weight.device:
        raise ValueError(f"linear: x on {x.device}, weight on {weight.device}; move them to one")
    return linear_op(x.to(compute_dtype(x.device, x.dtype)), weight)


def linear_ref(x, weight):
    return torch.nn.functional.linear(x, weight)

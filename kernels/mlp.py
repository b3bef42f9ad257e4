"""The MLP of a layer as one operation: residual step, RMSNorm, product, relu², product.

    h = x + update,   y = relu(norm(h) · fcᵀ)² · projᵀ          (So et al. 2021 for relu²)

The norm is never written: norm(h) = rstd·h, a number for each row, and the product's rows are scaled instead, where relu² has them in
registers. In the backward relu²'s gradient is multiplied by rstd too. Then fc's wgrad takes h in the place of norm(h). And the dgrad, the
product with fc, is rstd times the gradient of norm(h): the first thing that RMSNorm's backward would compute from it (`scaled=True`).

Kept for the backward are h, a = relu(…)² and rstd: relu²'s slope is 2·√a. On NVIDIA's Hopper and its successors in servers, two of the six
products are a kernel of this file, if all is bfloat16: it squares, or multiplies by the slope, what it has in its registers anyway, so the
tensors between product and activation are never written or read. Elsewhere, and for operands that its descriptors can't describe, the
products are the BLAS library's, with relu² in a kernel of its own.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._common import BACKEND, INTERPRETED, differentiable, operator
from .attention import _dot
from .gated import _backward as _activation_backward
from .gated import _forward as _activation_forward
from .linear import compute_dtype, rows, weight_gradient
from .norm_linear import EPS, add_norm_linear_ref, check_sum
from .rms_norm import add_rstd, rms_norm_backward_op

# A program makes tiles of 128 × 256, stored in two halves; the loop over tiles is flattened into that over K, so that the next tile's
# operands are on their way while this one is stored. The best of those tried on an H200 at K 512.
BLOCK_M, BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 128, 256, 64, 8, 3
SHARED_MEMORY = 224 << 10  # bytes a multiprocessor: three stages take 208 KiB of them, and desktop parts of Blackwell have 100


@triton.jit
def _activated(acc, aux, scale, row, col, SLOPE: tl.constexpr):
    """relu(scale·acc)², or scale·acc times the slope of relu² at the tile of `aux`, its output."""
    acc *= scale
    if SLOPE:
        return acc * (2.0 * tl.sqrt(aux.load([row, col]).to(tl.float32)))
    else:
        r = tl.where(acc < 0.0, 0.0, acc)  # keeps NaN
        return r * r


@triton.jit(do_not_specialize=["M", "n_programs"])
def product_kernel(
    a, b, out, aux, SCALES, M, N, K, n_programs,
    SLOPE: tl.constexpr, TRANSPOSED: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out (M, N) = activated(scales (M,) · a (M, K) · b), b (K, N), or (N, K) if TRANSPOSED.

    Column blocks are innermost: rows of `a` stay in the cache.
    """
    n_cols = tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * n_cols, n_programs, flatten=FLATTEN):
        row = (tile // n_cols) * BLOCK_M
        col = (tile % n_cols) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if TRANSPOSED:
                acc = _dot(a.load([row, k]), b.load([col, k]).T, acc)
            else:
                acc = _dot(a.load([row, k]), b.load([k, col]), acc)
        at = row + tl.arange(0, BLOCK_M)
        scale = tl.load(SCALES + at, at < M, 0.0)[:, None]
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        out.store([row, col], _activated(left, aux, scale, row, col, SLOPE).to(out.dtype))
        out.store([row, col + HALF], _activated(right, aux, scale, row, col + HALF, SLOPE).to(out.dtype))


@functools.lru_cache
def _programs(device):
    """How many programs of `product_kernel` run at once on a device: one a multiprocessor, or none where it has no room or no TMA."""
    if INTERPRETED:
        return 3
    if BACKEND != "cuda":
        return 0
    part = torch.cuda.get_device_properties(device)
    return part.multi_processor_count if part.major >= 9 and part.shared_memory_per_multiprocessor >= SHARED_MEMORY else 0


def _fusable(left, *others):
    """Whether `product_kernel` takes these: bfloat16, contiguous, rows of whole 128-bit words, no less than a tile of `left` (rows, K)."""
    if left.dtype != torch.bfloat16 or left.shape[0] < BLOCK_M or not _programs(left.device):
        return False
    for t in (left, *others):
        n_rows, n_columns = t.shape
        if n_rows < BLOCK_K or n_columns < BLOCK_K or n_columns % 8 or not t.is_contiguous() or t.data_ptr() % 16:
            return False
    return True


def _launch(a, b, out, aux, scales, transposed):
    M, K = a.shape
    N = out.shape[1]
    programs = min(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), _programs(a.device))
    half = [BLOCK_M, BLOCK_N // 2]
    with torch.cuda.device_of(a):
        product_kernel[(programs,)](
            TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]),
            TensorDescriptor.from_tensor(b, [BLOCK_N, BLOCK_K] if transposed else [BLOCK_K, BLOCK_N]),
            TensorDescriptor.from_tensor(out, half),
            None if aux is None else TensorDescriptor.from_tensor(aux, half),
            scales, M, N, K, programs, aux is not None, transposed, not INTERPRETED, BLOCK_M, BLOCK_N, BLOCK_K,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )
    return out


def _relu_squared_product(h, fc, rstd):
    """relu(rstd · h · fcᵀ)² for h (rows, N), fc (hidden, N), rstd (rows,) float32."""
    out = h.new_empty((h.shape[0], fc.shape[0]))
    if _fusable(h, fc, out):
        return _launch(h, fc, out, None, rstd, transposed=True)
    hidden = torch.mm(h, fc.t(), out=out)
    return _activation_forward(hidden, None, hidden, "relu_squared", rstd)  # in place: each element is read before it is written


def _slope_product(dy, proj, a, rstd):
    """rstd · (dy · proj) · 2√a for dy (rows, N), proj (N, hidden), a (rows, hidden), rstd (rows,) float32."""
    out = torch.empty_like(a)
    if _fusable(dy, proj, a, out):
        return _launch(dy, proj, out, a, rstd, transposed=False)
    da = torch.mm(dy, proj, out=out)
    _activation_backward(da, a, None, da, None, "relu_squared_from_output", rstd)
    return da


@operator("add_norm_mlp")
def add_norm_mlp_op(
    x: Tensor, update: Tensor, fc: Tensor, proj: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, y, and what the backward needs: a and rstd."""
    h, rstd = add_rstd(x, update, eps)
    a = _relu_squared_product(rows(h).to(dtype), fc.to(dtype).contiguous(), rstd)
    return h, torch.mm(a, proj.to(dtype).t()).view(*x.shape[:-1], proj.shape[0]), a, rstd


@add_norm_mlp_op.register_fake
def _(x, update, fc, proj, eps, dtype):
    h = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, update.dtype), device=x.device)
    n_rows = x.shape[:-1].numel()
    y, a = x.new_empty((*x.shape[:-1], proj.shape[0]), dtype=dtype), x.new_empty((n_rows, fc.shape[0]), dtype=dtype)
    return h, y, a, x.new_empty(n_rows, dtype=torch.float32)


@operator("add_norm_mlp_backward")
def add_norm_mlp_backward_op(
    dy: Tensor, dh: Tensor | None, h: Tensor, a: Tensor, rstd: Tensor, fc: Tensor, proj: Tensor, eps: float,
    need_dh: bool, need_dfc: bool, need_dproj: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dfc, dproj; what is not needed comes back empty."""
    dy = rows(dy).contiguous()
    dproj = weight_gradient(dy, a, proj.dtype) if need_dproj else proj.new_empty(0)
    if not (need_dh or need_dfc):
        return h.new_empty(0), fc.new_empty(0), dproj
    dhidden = _slope_product(dy, proj.to(dy.dtype).contiguous(), a, rstd)
    dfc = weight_gradient(dhidden, rows(h).to(dy.dtype), fc.dtype) if need_dfc else fc.new_empty(0)
    if not need_dh:
        return h.new_empty(0), dfc, dproj
    dnormed = (dhidden @ fc.to(dy.dtype)).view(h.shape)
    return rms_norm_backward_op(dnormed, dh, h, None, eps, True, False, scaled=True)[0], dfc, dproj


@add_norm_mlp_backward_op.register_fake
def _(dy, dh, h, a, rstd, fc, proj, eps, need_dh, need_dfc, need_dproj):
    return tuple(t.new_empty(t.shape if need else 0) for t, need in ((h, need_dh), (fc, need_dfc), (proj, need_dproj)))


def _save(ctx, inputs, output):
    x, update, fc, proj, ctx.eps, _ = inputs
    h, _, a, rstd = output
    ctx.dtypes = x.dtype, update.dtype
    ctx.mark_non_differentiable(a, rstd)
    ctx.set_materialize_grads(False)  # an unused output must not cost a tensor of zeros
    ctx.save_for_backward(h, a, rstd, fc, proj)


def _backward(ctx, dh, dy, *_):
    h, a, rstd, fc, proj = ctx.saved_tensors
    need_dx, need_dupdate, need_dfc, need_dproj, _, _ = ctx.needs_input_grad
    dfc = dproj = None
    if dy is not None:
        dh, dfc, dproj = add_norm_mlp_backward_op(dy, dh, h, a, rstd, fc, proj, ctx.eps, need_dx or need_dupdate, need_dfc, need_dproj)
    dx, dupdate = (dh.to(t) if need and dh is not None else None for t, need in zip(ctx.dtypes, (need_dx, need_dupdate)))
    return dx, dupdate, dfc if need_dfc else None, dproj if need_dproj else None, None, None


differentiable("add_norm_mlp", add_norm_mlp_op, add_norm_mlp_backward_op, _backward, _save)


def add_norm_mlp(x, update, fc, proj, eps=EPS):
    """`h = x + update; return h, relu(rms_norm(h) @ fc.T)² @ proj.T`.

    x, update: (..., N), N ≤ 8,192, one shape, float32 or bfloat16; fc: (hidden, N), proj: (out, hidden), of any float dtype, used in that
    of the products, which is h's or autocast's. Once differentiable in all four. ValueError for anything else, float16 products among
    it, because their squares overflow (`add_norm_linear` and `relu_squared` take float16).
    """
    name = "add_norm_mlp"
    check_sum(name, x, update, fc, proj)
    if fc.ndim != 2 or proj.ndim != 2 or fc.shape[1] != x.shape[-1] or proj.shape[1] != fc.shape[0]:
        raise ValueError(f"{name}: fc {tuple(fc.shape)}, proj {tuple(proj.shape)}; need (hidden, {x.shape[-1]}) and (out, hidden)")
    dtype = compute_dtype(x.device, torch.promote_types(x.dtype, update.dtype))
    if torch.float16 in (x.dtype, update.dtype, dtype):
        raise ValueError(f"{name}: float16 is not supported, its squares overflow; use bfloat16, or add_norm_linear and relu_squared")
    return add_norm_mlp_op(x, update, fc, proj, float(eps), dtype)[:2]


def add_norm_mlp_ref(x, update, fc, proj, eps=EPS):
    h, hidden = add_norm_linear_ref(x, update, fc, eps)
    return h, torch.nn.functional.linear(torch.relu(hidden).square(), proj)

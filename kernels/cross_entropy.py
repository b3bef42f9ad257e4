"""Cross entropy over soft-capped logits: `softcap_cross_entropy`, and `linear_softcap_cross_entropy`, which makes the logits itself.

    s = softcap * tanh(logits / softcap)                      (..., vocab), or s = logits without a softcap
    loss = logsumexp(s) - s[target]                           (...), 0 where target == ignore_index
    dloss/dlogits = (softmax(s) - onehot(target)) * (1 - (s / softcap)^2)

Soft-capping: Gemma 2 (arXiv:2408.00118, section 2). Everything is computed in float32 from logits of any float dtype.

On logits that exist, the forward reads them once and keeps two numbers a row; the backward reads them once more and writes
their gradient. The linear one takes the hidden states and the output matrix and holds the logits of one chunk of rows at a
time: while a chunk's logits are there their gradient overwrites them and is multiplied out, so no product is done twice and
the logits of all rows never exist. Its backward only scales the two results by the incoming gradient. (The idea of forming
gradients in the forward pass chunk by chunk is Liger-Kernel's, arXiv:2410.10989.)
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ._common import BACKEND, as_rows, differentiable, forbid_double_backward, operator, require_device, require_float
from .linear import WEIGHT_GRADIENT, blas

LOG2E = tl.constexpr(math.log2(math.e))
SOFTCAPS = 1.0, 1e4  # supported; beyond, squares of it and differences from it leave float32's precision
LOWEST = tl.constexpr(-3.4028234663852886e38)

ONE_BLOCK = 32768  # widest row that stays in registers between its reduction and its gradient (32 warps)
SWEEP = 4096  # block of the loop over wider rows
REDUCE_BLOCK = 4096  # 16 warps
SCALE_BLOCK = 4096  # 8 warps
CHUNK_BYTES = 64 << 20  # logits held at a time by the linear one, or a sixteenth of all of them where that is more…
CHUNK_ROWS = 1024  # …unless either is fewer rows than a matrix product needs to run well


def _row_block(vocab, backend=BACKEND):
    """(BLOCK, num_warps) of the kernel that reduces a row.

    On AMD a lane holds 16 values (32 of the widest rows), two 128-bit loads of bfloat16: at most 96 of gfx1151's VGPRs, so that 16
    waves fit a SIMD. On NVIDIA 32, which an H200 takes 13 % less time for. The loop keeps partial sums beside them and takes 8.
    """
    block = triton.next_power_of_2(vocab)
    if block > ONE_BLOCK:
        return SWEEP, max(SWEEP // 256, 1)
    return block, min(max(block // (512 if backend == "hip" else 1024), 1), 32)


def _backward_block(vocab):
    """(BLOCK, num_warps) of the elementwise backward: 16 values a lane as well."""
    block = min(triton.next_power_of_2(vocab), 4096)
    return block, max(block // 512, 1)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _softcap(x, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """softcap * tanh(x / softcap) in float32: with EXACT as accurate as a library's tanh, else to an ulp of softcap / 2.

    Losses are differences of these, so float32 logits need the first; half-precision ones are known to 2^-9 or 2^-12 of themselves.
    """
    if SOFTCAP == 0.0:
        s = x
    else:  # and not a return before it: what follows would still be compiled, and divide by zero
        # tanh(|u|) = (1 - e) / (1 + e) with e = exp(-2|u|), which cannot overflow. The reciprocal is rsqrt squared and one Newton step,
        # because a division is a dozen instructions on RDNA3.
        a = tl.abs(x)
        e = tl.exp2(a * (-2.0 * LOG2E / SOFTCAP))
        r = tl.rsqrt(1.0 + e)
        r = r * r
        r = r + r * (1.0 - (1.0 + e) * r)
        s = (SOFTCAP - SOFTCAP * e) * r
        if EXACT:
            # |u| < 0.7, where that cancels: tanh(u) = u + u³ p(u²), p fitted for the smallest largest relative error (1.4e-8).
            u = x * (1.0 / SOFTCAP)
            z = u * u
            p = -3.3333197e-1 + z * (1.3329244e-1 + z * (-5.3566977e-2 + z * (2.0111630e-2 + z * -5.1550893e-3)))
            s = tl.where(a < 0.7 * SOFTCAP, a + (a * z) * p, s)
        s = tl.where(x < 0.0, -s, s)  # NaN stays NaN
    return s


@triton.jit
def _grad(p, s, hit, SOFTCAP: tl.constexpr):
    """Gradient for the logits from probability `p` and capped logit `s`, in float32: p - 1 is small where it matters."""
    d = tl.where(hit, p - 1.0, p)
    if SOFTCAP != 0.0:
        d = d * ((SOFTCAP - s) * (SOFTCAP + s) * (1.0 / (SOFTCAP * SOFTCAP)))  # 1 - (s / softcap)² with an exact difference
    return d


@triton.jit
def _load_capped(logits, cols, vocab, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """Capped logits as `_softcap` gives them, -inf beyond the vocabulary."""
    EXACT: tl.constexpr = (logits.dtype.element_ty == tl.float32) or (SOFTCAP > 64.0)
    if MASKED:
        s = _softcap(tl.load(logits + cols, mask=cols < vocab, other=0.0).to(tl.float32), SOFTCAP, EXACT)
        return tl.where(cols < vocab, s, float("-inf"))
    else:
        return _softcap(tl.load(logits + cols).to(tl.float32), SOFTCAP, EXACT)


@triton.jit
def _store_grad(out, cols, vocab, d, ignored, MASKED: tl.constexpr):
    d = tl.where(ignored, 0.0, d).to(out.dtype.element_ty)  # a select, not a product: an ignored row may hold NaN
    if MASKED:
        tl.store(out + cols, d, mask=cols < vocab)
    else:
        tl.store(out + cols, d)


@triton.jit
def _row_kernel(
    logits, targets, losses, stats, vocab, stride, stats_stride, ignore_index,
    SOFTCAP: tl.constexpr, STATS: tl.constexpr, GRAD: tl.constexpr, MASKED: tl.constexpr, LOOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss; with STATS its maximum and reciprocal sum; with GRAD its gradient over its own logits."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < vocab)
    logits += row.to(tl.int64) * stride
    EXACT: tl.constexpr = (logits.dtype.element_ty == tl.float32) or (SOFTCAP > 64.0)
    s_target = _softcap(tl.load(logits + target, mask=valid, other=0.0).to(tl.float32), SOFTCAP, EXACT)

    cols = tl.arange(0, BLOCK)
    if LOOP:
        peak = tl.cast(LOWEST, tl.float32)  # finite, so that a block of -inf alone adds zeros, not NaN
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            s = _load_capped(logits, start + cols, vocab, SOFTCAP, MASKED)
            new = tl.maximum(peak, tl.max(s, 0))
            sums = sums * _exp(peak - new) + _exp(s - new)
            peak = new
        total = tl.sum(sums, 0)
    else:
        s = _load_capped(logits, cols, vocab, SOFTCAP, MASKED)
        peak = tl.max(s, 0)
        e = _exp(s - peak)
        total = tl.sum(e, 0)

    # A target outside the vocabulary is the caller's bug: NaN in its row shows it without stopping the device.
    # peak - s_target first: the loss of a confident row is smaller than the rounding of its logits.
    loss = tl.where(valid, tl.log(total) + (peak - s_target), float("nan"))
    scale = tl.where(ignored, 0.0, tl.where(valid, 1.0 / total, float("nan")))
    tl.store(losses + row, tl.where(ignored, 0.0, loss))
    if STATS:
        tl.store(stats + row, peak)
        tl.store(stats + stats_stride + row, scale)
    if GRAD:
        tl.debug_barrier()  # until every warp has read the target's logit, which is about to be overwritten
        if LOOP:
            for start in range(0, vocab, BLOCK):
                s = _load_capped(logits, start + cols, vocab, SOFTCAP, MASKED)
                d = _grad(_exp(s - peak) * scale, s, start + cols == target, SOFTCAP)
                _store_grad(logits, start + cols, vocab, d, ignored, MASKED)
        else:
            _store_grad(logits, cols, vocab, _grad(e * scale, s, cols == target, SOFTCAP), ignored, MASKED)


@triton.jit
def _backward_kernel(
    logits, targets, stats, grad, factor, out, vocab, stride, stats_stride, grad_stride, out_stride, blocks, ignore_index,
    SOFTCAP: tl.constexpr, REDUCED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row a program: out = dloss/dlogits * grad [* factor]. Elementwise, so `out` may be `logits`."""
    pid = tl.program_id(0)
    row = pid // blocks
    cols = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    peak = tl.load(stats + row)
    scale = tl.load(stats + stats_stride + row)
    if REDUCED:
        g = tl.load(grad) * tl.load(factor)
    else:
        g = tl.load(grad + row.to(tl.int64) * grad_stride)
    s = _load_capped(logits + row.to(tl.int64) * stride, cols, vocab, SOFTCAP, MASKED)
    d = _grad(_exp(s - peak) * scale, s, cols == target, SOFTCAP) * g
    _store_grad(out + row.to(tl.int64) * out_stride, cols, vocab, d, target == ignore_index, MASKED)


@triton.jit
def _reduce_kernel(losses, targets, loss, factor, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the sum or mean of the rows' losses, and what the reduction multiplies every row's gradient by."""
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(losses + index, mask=index < rows, other=0.0)
        if MEAN:
            counted = (tl.load(targets + index, mask=index < rows, other=0).to(tl.int64) != ignore_index) & (index < rows)
            count += counted.to(tl.int32)
    result = tl.sum(total, 0)
    if MEAN:
        n = tl.sum(count, 0)
        some = 1.0 / tl.maximum(n, 1).to(tl.float32)
        tl.store(loss, tl.where(n > 0, result * some, float("nan")))
        tl.store(factor, tl.where(n > 0, some, 0.0))
    else:
        tl.store(loss, result)
        tl.store(factor, 1.0)


@triton.jit
def _scale_kernel(values, grad, factor, out, n, BLOCK: tl.constexpr):
    """out = values * grad * factor, flat, in float32 until the store."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    mask = index < n - start
    g = tl.load(grad) * tl.load(factor)
    x = tl.load(values + start + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + index, (x * g).to(out.dtype.element_ty), mask=mask)


def _launch_rows(logits, targets, losses, stats, softcap, ignore_index, grad):
    """logits (n, vocab) → losses (n,); stats (2, n) or None; `grad`: the summed loss's gradient over `logits`."""
    rows, vocab = logits.shape
    block, num_warps = _row_block(vocab)
    _row_kernel[(rows,)](
        logits, targets, losses, stats, vocab, logits.stride(0), 0 if stats is None else stats.stride(0), ignore_index,
        SOFTCAP=softcap, STATS=stats is not None, GRAD=grad, MASKED=vocab % block != 0, LOOP=vocab > block, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


def _launch_backward(logits, targets, stats, grad, factor, out, softcap, ignore_index, reduction):
    """logits (n, vocab), stats (2, n), grad (n,) of any stride, or for "mean" and "sum" 0-D with a factor → out (n, vocab)."""
    rows, vocab = logits.shape
    block, num_warps = _backward_block(vocab)
    blocks = triton.cdiv(vocab, block)
    reduced = reduction != "none"
    _backward_kernel[(rows * blocks,)](
        logits, targets, stats, grad, factor, out, vocab, logits.stride(0), stats.stride(0), 0 if reduced else grad.stride(0),
        out.stride(0), blocks, ignore_index, SOFTCAP=softcap, REDUCED=reduced, MASKED=vocab % block != 0, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


def _reduced(losses, targets, ignore_index, reduction):
    """(loss, factor), both 0-D float32."""
    loss, factor = losses.new_empty(()), losses.new_empty(())
    mean = reduction == "mean"
    _reduce_kernel[(1,)](losses, targets, loss, factor, losses.numel(), ignore_index, MEAN=mean, BLOCK=REDUCE_BLOCK, num_warps=16)
    return loss, factor


# --- logits that exist ----------------------------------------------------------------------------------------------


@operator("softcap_cross_entropy")
def _forward_op(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float, ignore_index: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> loss, stats (2, rows), factor: maxima and reciprocal sums; what "mean" or "sum" multiplies gradients by."""
    flat, flat_targets = as_rows(logits), targets.reshape(-1)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    stats = losses.new_empty((2, losses.numel()))
    with torch.cuda.device_of(logits):
        if losses.numel():
            _launch_rows(flat, flat_targets, losses, stats, softcap, ignore_index, grad=False)
        if reduction == "none":
            return losses, stats, losses.new_zeros(())
        loss, factor = _reduced(losses, flat_targets, ignore_index, reduction)
        return loss, stats, factor


@_forward_op.register_fake
def _(logits, targets, softcap, ignore_index, reduction):
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    loss = losses if reduction == "none" else losses.new_empty(())
    return loss, losses.new_empty((2, losses.numel())), losses.new_empty(())


@operator("softcap_cross_entropy_backward")
def _backward_op(
    grad: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, stats: torch.Tensor, factor: torch.Tensor,
    softcap: float, ignore_index: int, reduction: str,
) -> torch.Tensor:  # fmt: skip
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if dlogits.numel():
        flat = as_rows(logits)
        with torch.cuda.device_of(logits):
            out = dlogits.view(flat.shape)
            _launch_backward(flat, targets.reshape(-1), stats, grad.reshape(-1), factor, out, softcap, ignore_index, reduction)
    return dlogits


@_backward_op.register_fake
def _(grad, logits, targets, stats, factor, softcap, ignore_index, reduction):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup(ctx, inputs, output):
    logits, targets, ctx.softcap, ctx.ignore_index, ctx.reduction = inputs
    _, stats, factor = output
    ctx.mark_non_differentiable(stats, factor)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, stats, factor)


def _backward(ctx, grad, *_):
    if grad is None:
        return None, None, None, None, None
    logits, targets, stats, factor = ctx.saved_tensors
    return _backward_op(grad, logits, targets, stats, factor, ctx.softcap, ctx.ignore_index, ctx.reduction), None, None, None, None


differentiable("softcap_cross_entropy", _forward_op, _backward_op, _backward, _setup)


def softcap_cross_entropy(logits, targets, softcap=15.0, ignore_index=-1, reduction="mean"):
    """Cross entropy of `softcap * tanh(logits / softcap)`, computed in float32.

    logits: (..., vocab), float32, float16 or bfloat16, vocab along the last dimension; any strides (unit stride there avoids a copy).
    targets: (...), int64 or int32. Rows whose target is `ignore_index` have loss 0 and gradient 0 and do not count in the mean. A
        target outside the vocabulary gives NaN as its row's loss and gradient (torch stops the process there).
    softcap: positive; None or 0 for plain cross entropy.
    reduction: "mean" over the rows that count (NaN with a zero gradient if none does, as torch), "sum", or "none".

    Returns float32, 0-D or of targets' shape. Differentiable once in logits, whose gradient has their dtype. ValueError for other
    dtypes, shapes that do not match, unknown reductions, tensors that are not on one GPU.
    """
    softcap = _checked("softcap_cross_entropy", logits, targets, softcap, reduction)
    if logits.shape[-1] == 0:
        raise ValueError(f"softcap_cross_entropy: logits of shape {tuple(logits.shape)} have no vocabulary")
    return _forward_op(logits, targets, softcap, ignore_index, reduction)[0]


def softcap_cross_entropy_ref(logits, targets, softcap=15.0, ignore_index=-1, reduction="mean"):
    """What `softcap_cross_entropy` computes, in plain PyTorch, in float32 or, for float64 logits, float64."""
    s = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    loss = F.cross_entropy(s.reshape(-1, s.shape[-1]), targets.reshape(-1).long(), ignore_index=ignore_index, reduction=reduction)
    return loss.reshape(targets.shape) if reduction == "none" else loss


def _checked(name, values, targets, softcap, reduction):
    """Refuse what is not supported; returns softcap as a float, 0.0 for none."""
    require_float(name, values)
    require_device(name, values, targets)
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: targets of dtype {targets.dtype} are not supported; use int64 or int32 class indices")
    if values.ndim == 0 or values.shape[:-1] != targets.shape:
        raise ValueError(f"{name}: targets of shape {tuple(targets.shape)} for rows of {tuple(values.shape)}; give one target a row")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction {reduction!r} is not supported; use 'mean', 'sum' or 'none'")
    softcap = float(softcap or 0.0)
    if softcap and not SOFTCAPS[0] <= softcap <= SOFTCAPS[1]:  # NaN too
        raise ValueError(f"{name}: softcap {softcap} is not supported; use one from {SOFTCAPS[0]:g} to {SOFTCAPS[1]:g}, or None for none")
    return softcap


# --- logits made here, a chunk of rows at a time --------------------------------------------------------------------


def _chunks(x, weight):
    """Yields (slice of rows, their logits) in equal chunks; all logits share one buffer, so a chunk's are gone with the next."""
    rows, vocab = x.shape[0], weight.shape[0]
    most = max(CHUNK_ROWS, CHUNK_BYTES // (vocab * x.element_size()), rows // 16)
    size = math.ceil(rows / max(1, math.ceil(rows / most)))
    size = min(rows, math.ceil(size / 128) * 128)
    buffer = torch.empty((size, vocab), dtype=x.dtype, device=x.device)
    for start in range(0, rows, max(1, size)):
        part = slice(start, min(start + size, rows))
        yield part, torch.mm(x[part], weight.t(), out=buffer[: part.stop - start])


def _accumulate(total, dlogits, x, first):
    """total (vocab, n_embd) float32, = or += dlogitsᵀ @ x, by the library that WEIGHT_GRADIENT names for this shape."""
    a, beta = dlogits.t(), 0.0 if first else 1.0
    with blas(WEIGHT_GRADIENT.get(tuple(total.shape), (None, None))[1]):
        if total.dtype == x.dtype:
            torch.addmm(total, a, x, beta=beta, out=total)
        elif x.is_cuda and not torch.version.hip:
            torch.addmm(total, a, x, out_dtype=total.dtype, beta=beta, out=total)
        elif first:  # a float32 result of a low-precision product is CUDA's alone; here each chunk's product rounds, their sum does not
            total.copy_(torch.mm(a, x))
        else:
            total.add_(torch.mm(a, x))


@operator("linear_softcap_cross_entropy")
def _linear_op(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float, ignore_index: int, reduction: str,
    need_dx: bool, need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """-> loss, stats, factor, dx, dw; what is not needed is empty.

    "mean", "sum": dx (as x) and dw (float32) of the summed loss, still to be multiplied by `factor` and the incoming gradient:
    probabilities divided by a number of rows would underflow float16. "none": stats, with which the backward makes them.
    """
    flat, flat_targets, w = as_rows(x), targets.reshape(-1), weight.to(x.dtype)
    rows, none = flat.shape[0], reduction == "none"
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    stats = losses.new_empty((2, rows if none else 0))
    need_dx, need_dw = need_dx and not none, need_dw and not none
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dw = losses.new_empty(w.shape if need_dw else 0)
    flat_losses = losses.view(-1)
    with torch.cuda.device_of(x):
        for part, logits in _chunks(flat, w):
            row_stats = stats[:, part] if none else None
            _launch_rows(logits, flat_targets[part], flat_losses[part], row_stats, softcap, ignore_index, grad=need_dx or need_dw)
            if need_dx:
                torch.mm(logits, w, out=dx.view(flat.shape)[part])
            if need_dw:
                _accumulate(dw, logits, flat[part], first=part.start == 0)
        if none:
            return losses, stats, losses.new_zeros(()), dx, dw
        loss, factor = _reduced(losses, flat_targets, ignore_index, reduction)
    return loss, stats, factor, dx, dw if rows else dw.zero_()


@_linear_op.register_fake
def _(x, weight, targets, softcap, ignore_index, reduction, need_dx, need_dw):
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    none = reduction == "none"
    dx = x.new_empty(x.shape if need_dx and not none else 0)
    dw = losses.new_empty(weight.shape if need_dw and not none else 0)
    return losses if none else losses.new_empty(()), losses.new_empty((2, losses.numel() if none else 0)), losses.new_empty(()), dx, dw


@operator("linear_softcap_cross_entropy_backward")
def _linear_backward_op(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, stats: torch.Tensor, softcap: float,
    ignore_index: int, need_dx: bool, need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """reduction "none": the logits of each chunk once more, then its gradients; what is not needed is empty."""
    flat, flat_targets, flat_grad, w = as_rows(x), targets.reshape(-1), grad.reshape(-1), weight.to(x.dtype)
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dw = torch.empty(w.shape if need_dw else 0, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        for part, logits in _chunks(flat, w):
            _launch_backward(logits, flat_targets[part], stats[:, part], flat_grad[part], grad, logits, softcap, ignore_index, "none")
            if need_dx:
                torch.mm(logits, w, out=dx.view(flat.shape)[part])
            if need_dw:
                _accumulate(dw, logits, flat[part], first=part.start == 0)
    return dx, (dw if flat.shape[0] else dw.zero_()).to(weight.dtype)


@_linear_backward_op.register_fake
def _(grad, x, weight, targets, stats, softcap, ignore_index, need_dx, need_dw):
    return x.new_empty(x.shape if need_dx else 0), weight.new_empty(weight.shape if need_dw else 0)


@operator("scale_gradient")
def _scale_op(values: torch.Tensor, grad: torch.Tensor, factor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """values * grad * factor in like's dtype. One kernel, because torch would first round the 0-D float32 `grad` to bfloat16."""
    out = torch.empty(values.shape, dtype=like.dtype, device=values.device)
    if out.numel():
        with torch.cuda.device_of(values):
            n = out.numel()
            _scale_kernel[(triton.cdiv(n, SCALE_BLOCK),)](values, grad, factor, out, n, BLOCK=SCALE_BLOCK, num_warps=8)
    return out


@_scale_op.register_fake
def _(values, grad, factor, like):
    return torch.empty(values.shape, dtype=like.dtype, device=values.device)


def _linear_setup(ctx, inputs, output):
    x, weight, targets, ctx.softcap, ctx.ignore_index, ctx.reduction, need_dx, need_dw = inputs
    _, stats, factor, dx, dw = output
    ctx.mark_non_differentiable(stats, factor, dx, dw)
    ctx.set_materialize_grads(False)
    if ctx.reduction == "none":
        ctx.save_for_backward(x, weight, targets, stats)
    else:  # x and weight so that a second derivative finds its way to them and raises, instead of being silently zero
        ctx.save_for_backward(x if need_dx else None, weight if need_dw else None, factor, dx, dw)


def _linear_backward(ctx, grad, *_):
    need_dx, need_dw = ctx.needs_input_grad[:2]
    if grad is None:
        return (None,) * 8
    if ctx.reduction == "none":
        x, weight, targets, stats = ctx.saved_tensors
        dx, dw = _linear_backward_op(grad, x, weight, targets, stats, ctx.softcap, ctx.ignore_index, need_dx, need_dw)
        return dx if need_dx else None, dw if need_dw else None, *(None,) * 6
    x, weight, factor, dx, dw = ctx.saved_tensors
    dx = _scale_op(dx, grad, factor, x) if need_dx else None
    dw = _scale_op(dw, grad, factor, weight) if need_dw else None
    return dx, dw, *(None,) * 6


differentiable("linear_softcap_cross_entropy", _linear_op, _linear_backward_op, _linear_backward, _linear_setup)
forbid_double_backward("linear_softcap_cross_entropy", _scale_op)


def linear_softcap_cross_entropy(x, weight, targets, softcap=15.0, ignore_index=-1, reduction="mean"):
    """`softcap_cross_entropy(F.linear(x, weight), targets, …)` that never holds the logits of all rows.

    x: (..., n_embd), float32, float16 or bfloat16. weight: (vocab, n_embd) of the same dtype. targets, softcap, ignore_index,
    reduction and what is returned: as in `softcap_cross_entropy`.
    Under autocast x and weight enter the products in autocast's dtype, and a float32 weight gets a float32 gradient, summed in
    float32 over the chunks (on ROCm, whose products can't give float32 from bfloat16, each chunk's part is rounded once before).

    Memory beside x, weight and their gradients: CHUNK_BYTES (64 MiB) of logits, or a sixteenth of all logits or CHUNK_ROWS (1024) rows
    of them where that is more, and the weight's gradient in float32. With "mean" and "sum" the gradients are formed in the forward pass,
    of those of x and weight that require one; with "none" the backward makes the logits again. Differentiable once. ValueError as there.
    """
    name = "linear_softcap_cross_entropy"
    softcap = _checked(name, x, targets, softcap, reduction)
    require_float(name, weight)
    require_device(name, x, weight)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or 0 in weight.shape:
        raise ValueError(f"{name}: weight of shape {tuple(weight.shape)} for x of {tuple(x.shape)}; use (vocab, {x.shape[-1]})")
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != weight.dtype:
        raise ValueError(f"{name}: x of {x.dtype} and weight of {weight.dtype}; use one dtype, or autocast")
    graded = torch.is_grad_enabled()
    need_dx, need_dw = graded and x.requires_grad, graded and weight.requires_grad
    return _linear_op(x, weight, targets, softcap, ignore_index, reduction, need_dx, need_dw)[0]


def linear_softcap_cross_entropy_ref(x, weight, targets, softcap=15.0, ignore_index=-1, reduction="mean"):
    """What `linear_softcap_cross_entropy` computes, in plain PyTorch: the product in the dtype given (or autocast's), the rest as there."""
    return softcap_cross_entropy_ref(F.linear(x, weight), targets, softcap, ignore_index, reduction)

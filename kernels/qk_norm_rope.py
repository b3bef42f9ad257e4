"""Rotary embedding, then RMSNorm, of queries and keys: one launch, one read and one write of each, forward and backward.

    y1 = x1·cos + x2·sin,   y2 = -x1·sin + x2·cos      (x1, x2 the halves of a head, cos and sin of its position: Su et al. 2021)
    out = y / sqrt(mean(y²) + eps)                      (over the head, without weight: Henry et al. 2020, Dehghani et al. 2023)

Backward, with g the gradient of out:  dy = rstd·(g − ŷ·mean(g·ŷ)), then the rotation turned back: dx1 = dy1·cos − dy2·sin,
dx2 = dy1·sin + dy2·cos. y is rotated again from x, so only q, k and the tables are saved. The tables are bfloat16 and cos² + sin² is not
quite 1, so the norm is taken of y, not of x.

q's programs come first in the grid, k's after them. A program has ROWS adjacent (token, head) pairs of one sequence, so that its
offsets are small integers from one base; a lane holds 8 elements of each half, one 128-bit load in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import differentiable, operator, require_device, require_float

EPS = torch.finfo(torch.float32).eps  # what F.rms_norm takes by default, for bfloat16 too
MAX_HEAD_DIM = 1024


@triton.jit
def _place(pid, T, H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sequence, first token and first row (int64 scalars) of a program; token and head of its rows, columns, mask."""
    n_blocks = (T * H + ROWS - 1) // ROWS
    b = (pid // n_blocks).to(tl.int64)
    first = (pid % n_blocks) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    t0 = first // H
    t = row // H - t0
    return b, t0.to(tl.int64), b * T * H + first, t, row - (t0 + t) * H, col, (row < T * H) & (col < HALF)


@triton.jit
def _rotate(x1, x2, cos, sin):
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


@triton.jit
def _tables(COS, SIN, t0, t, col, mask, HALF: tl.constexpr):
    at = t0 * HALF + (t * HALF + col)
    return tl.load(COS + at, mask, 0.0).to(tl.float32), tl.load(SIN + at, mask, 0.0).to(tl.float32)


@triton.jit
def _load_rotated(X, at, COS, SIN, t0, t, col, mask, eps, HALF: tl.constexpr):
    """Both halves of the rows at X + at, rotated; the reciprocal norms of the rows; cos and sin."""
    x1 = tl.load(X + at, mask, 0.0).to(tl.float32)
    x2 = tl.load(X + HALF + at, mask, 0.0).to(tl.float32)
    cos, sin = _tables(COS, SIN, t0, t, col, mask, HALF)
    y1, y2 = _rotate(x1, x2, cos, sin)
    return y1, y2, tl.rsqrt(tl.sum(y1 * y1 + y2 * y2, 1, keep_dims=True) * (0.5 / HALF) + eps), cos, sin


@triton.jit
def _forward(X, Y, RSTD, COS, SIN, pid, T, stride_b, stride_t, stride_h, eps,
             H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """RSTD, if it is not None, gets the reciprocal norms, in the order of Y's rows."""
    b, t0, first, t, h, col, mask = _place(pid, T, H, HALF, ROWS, BLOCK)
    X += b * stride_b + t0 * stride_t
    at = t * stride_t + h * stride_h + col
    y1, y2, rstd, _cos, _sin = _load_rotated(X, at, COS, SIN, t0, t, col, mask, eps, HALF)
    row = tl.arange(0, ROWS)[:, None]
    Y += first * (2 * HALF)
    at = row * (2 * HALF) + col
    tl.store(Y + at, (y1 * rstd).to(Y.dtype.element_ty), mask)
    tl.store(Y + HALF + at, (y2 * rstd).to(Y.dtype.element_ty), mask)
    if RSTD is not None:
        tl.store(RSTD + first + row, rstd, row < (b + 1) * T * H - first)


@triton.jit
def _backward(DY, X, DX, COS, SIN, pid, T, stride_dy_b, stride_dy_t, stride_dy_h, stride_b, stride_t, stride_h, eps,
              H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    b, t0, first, t, h, col, mask = _place(pid, T, H, HALF, ROWS, BLOCK)
    X += b * stride_b + t0 * stride_t
    DY += b * stride_dy_b + t0 * stride_dy_t
    at = t * stride_t + h * stride_h + col
    y1, y2, rstd, cos, sin = _load_rotated(X, at, COS, SIN, t0, t, col, mask, eps, HALF)
    at = t * stride_dy_t + h * stride_dy_h + col
    g1 = tl.load(DY + at, mask, 0.0).to(tl.float32)
    g2 = tl.load(DY + HALF + at, mask, 0.0).to(tl.float32)
    along = tl.sum(g1 * y1 + g2 * y2, 1, keep_dims=True) * (0.5 / HALF) * rstd * rstd
    dx1, dx2 = _rotate(rstd * (g1 - y1 * along), rstd * (g2 - y2 * along), cos, -sin)
    DX += first * (2 * HALF)
    at = tl.arange(0, ROWS)[:, None] * (2 * HALF) + col
    tl.store(DX + at, dx1.to(DX.dtype.element_ty), mask)
    tl.store(DX + HALF + at, dx2.to(DX.dtype.element_ty), mask)


@triton.jit
def qk_norm_rope_kernel(
    Q, K, OUT_Q, OUT_K, COS, SIN, T, q_programs, stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, eps,
    N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < q_programs:
        _forward(Q, OUT_Q, None, COS, SIN, pid, T, stride_q_b, stride_q_t, stride_q_h, eps, N_HEAD, HALF, ROWS, BLOCK)
    else:
        _forward(K, OUT_K, None, COS, SIN, pid - q_programs, T, stride_k_b, stride_k_t, stride_k_h, eps, N_KV_HEAD, HALF, ROWS, BLOCK)


@triton.jit
def qk_norm_rope_backward_kernel(
    DY_Q, DY_K, Q, K, DQ, DK, COS, SIN, T, q_programs, stride_dq_b, stride_dq_t, stride_dq_h, stride_dk_b, stride_dk_t, stride_dk_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, eps,
    N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < q_programs:
        _backward(DY_Q, Q, DQ, COS, SIN, pid, T, stride_dq_b, stride_dq_t, stride_dq_h, stride_q_b, stride_q_t, stride_q_h, eps,
                  N_HEAD, HALF, ROWS, BLOCK)
    else:
        _backward(DY_K, K, DK, COS, SIN, pid - q_programs, T, stride_dk_b, stride_dk_t, stride_dk_h, stride_k_b, stride_k_t, stride_k_h,
                  eps, N_KV_HEAD, HALF, ROWS, BLOCK)


def tile(head_dim):
    """`(ROWS, BLOCK, num_warps)`: of each half 1,024 elements a program, 8 a lane."""
    block = max(8, triton.next_power_of_2(head_dim // 2))
    return max(1, 1024 // block), block, 4


def _adjacent(x):
    """The head dimension must be adjacent, and a tile's offsets, two rows' tokens or heads apart, small; otherwise a copy."""
    small = 1024 * max(x.stride(1), x.stride(2)) < 2**31
    return x if x.stride(3) == 1 and small else x.contiguous()


def _empty(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("qk_norm_rope")
def qk_norm_rope_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out_q, out_k = _empty(q), _empty(k)
    q, k = _adjacent(q), _adjacent(k)
    B, T, n_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    ROWS, BLOCK, num_warps = tile(head_dim)
    q_programs, k_programs = B * triton.cdiv(T * n_head, ROWS), B * triton.cdiv(T * n_kv_head, ROWS)
    if q_programs + k_programs:
        with torch.cuda.device_of(q):
            qk_norm_rope_kernel[(q_programs + k_programs,)](
                q, k, out_q, out_k, cos, sin, T, q_programs, *q.stride()[:3], *k.stride()[:3], eps,
                n_head, n_kv_head, head_dim // 2, ROWS, BLOCK, num_warps=num_warps, num_stages=1,
            )
    return out_q, out_k


@qk_norm_rope_op.register_fake
def _(q, k, cos, sin, eps):
    return _empty(q), _empty(k)


@operator("qk_norm_rope_backward")
def qk_norm_rope_backward_op(
    dy_q: Tensor, dy_k: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, eps: float, need_dq: bool, need_dk: bool
) -> tuple[Tensor, Tensor]:
    dq, dk = _empty(q) if need_dq else q.new_empty(0), _empty(k) if need_dk else k.new_empty(0)
    dy_q, dy_k, q, k = _adjacent(dy_q), _adjacent(dy_k), _adjacent(q), _adjacent(k)
    B, T, n_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    ROWS, BLOCK, num_warps = tile(head_dim)
    q_programs = B * triton.cdiv(T * n_head, ROWS) if need_dq else 0
    k_programs = B * triton.cdiv(T * n_kv_head, ROWS) if need_dk else 0
    if q_programs + k_programs:
        with torch.cuda.device_of(q):
            qk_norm_rope_backward_kernel[(q_programs + k_programs,)](
                dy_q, dy_k, q, k, dq, dk, cos, sin, T, q_programs,
                *dy_q.stride()[:3], *dy_k.stride()[:3], *q.stride()[:3], *k.stride()[:3], eps,
                n_head, n_kv_head, head_dim // 2, ROWS, BLOCK, num_warps=num_warps, num_stages=1,
            )
    return dq, dk


@qk_norm_rope_backward_op.register_fake
def _(dy_q, dy_k, q, k, cos, sin, eps, need_dq, need_dk):
    return _empty(q) if need_dq else q.new_empty(0), _empty(k) if need_dk else k.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_qk_norm_rope(ctx, dy_q, dy_k):
    need_dq, need_dk = ctx.needs_input_grad[:2]
    dq, dk = qk_norm_rope_backward_op(dy_q, dy_k, *ctx.saved_tensors, ctx.eps, need_dq, need_dk)
    return dq if need_dq else None, dk if need_dk else None, None, None, None


differentiable("qk_norm_rope", qk_norm_rope_op, qk_norm_rope_backward_op, _backward_qk_norm_rope, _save)


def qk_norm_rope(q, k, cos, sin, eps=None):
    """Rotary embedding, then RMSNorm over each head, of q and of k.

    q: (B, T, n_head, head_dim); k: (B, T, n_kv_head, head_dim); one dtype (float32, float16, bfloat16); strided views, such as
    parts of a packed qkv, are read in place. cos, sin: (T, head_dim/2) or (1, T, 1, head_dim/2), any float dtype, constants.
    eps: default 1.1920929e-7. Returns both, contiguous, in their dtype. Once differentiable in q and k. ValueError for anything else.
    """
    require_float("qk_norm_rope", q, k, cos, sin)
    require_device("qk_norm_rope", q, k, cos, sin)
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        raise ValueError(
            f"qk_norm_rope: q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}; need (B, T, heads, head_dim), one dtype")
    T, head_dim = q.shape[1], q.shape[3]
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"qk_norm_rope: head_dim {head_dim}; need an even one, 2 to {MAX_HEAD_DIM}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((T, head_dim // 2), (1, T, 1, head_dim // 2)):
            raise ValueError(
                f"qk_norm_rope: {name} of shape {tuple(table.shape)}; need ({T}, {head_dim // 2}) or (1, {T}, 1, {head_dim // 2})")
        if table.requires_grad:
            raise ValueError(f"qk_norm_rope: {name} requires a gradient, which is not computed; detach it")
    return qk_norm_rope_op(q, k, cos.contiguous(), sin.contiguous(), EPS if eps is None else float(eps))


def qk_norm_rope_ref(q, k, cos, sin, eps=None):
    """The definition, in the dtype that its arguments promote to."""
    cos, sin = (t.reshape(1, t.shape[-3] if t.ndim == 4 else t.shape[0], 1, t.shape[-1]) for t in (cos, sin))

    def one(x):  # (B, T, heads, head_dim)
        x1, x2 = x.chunk(2, -1)
        y = torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + (EPS if eps is None else eps))

    return one(q), one(k)

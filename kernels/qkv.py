"""From the packed product of an attention layer to its q, k and v, in one launch each way.

    q, k: rotary embedding, then RMSNorm over the head, as in qk_norm_rope.py
    v: as it is, or v + 2σ(gate)·e, the value residual: e an embedding of the token itself, gate one number a token and KV head

The packed row of a token is [q | k | v | gate …], so that one product makes all of it and one product takes all its gradients back. Only
results are kept for the backward: q and k with the reciprocal norms of their heads, and the gates. With out = y·rstd, the gradient of y is
rstd·(g − out·mean(g·out)), which needs nothing else, and is then rotated back. The embedding's rows are looked up in both directions,
never gathered into a tensor of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import differentiable, operator, require_device, require_float
from .qk_norm_rope import EPS, MAX_HEAD_DIM, _adjacent, _forward, _place, _rotate, _tables, qk_norm_rope_ref, tile

# The packed row's gates take a multiple of this many columns: Triton reads and writes 128 bits of a row only if it knows the stride for a
# multiple of 16, and then so is the width of the product that makes the rows.
GATE_COLUMNS = 16


@triton.jit
def _embedding(TABLE, IDX, t, h, col, vocab, inside, mask, H: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the tokens' embeddings, float32, and which rows have one: memory outside the table is not read."""
    token = tl.load(IDX + t, inside, 0)
    known = (token >= 0) & (token < vocab)
    mask &= known
    TABLE += token * (H * 2 * HALF)
    at = h * (2 * HALF) + col
    return tl.load(TABLE + at, mask, 0.0).to(tl.float32), tl.load(TABLE + HALF + at, mask, 0.0).to(tl.float32), known


@triton.jit
def _norm_rope_backward(DY, Y, RSTD, DX, COS, SIN, pid, T, stride_dy_b, stride_dy_t, stride_dy_h, stride_t,
                        H: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    b, t0, first, t, h, col, mask = _place(pid, T, H, HALF, ROWS, BLOCK)
    DY += b * stride_dy_b + t0 * stride_dy_t
    at = t * stride_dy_t + h * stride_dy_h + col
    g1 = tl.load(DY + at, mask, 0.0).to(tl.float32)
    g2 = tl.load(DY + HALF + at, mask, 0.0).to(tl.float32)
    row = tl.arange(0, ROWS)[:, None]
    Y += first * (2 * HALF)
    at = row * (2 * HALF) + col
    y1 = tl.load(Y + at, mask, 0.0).to(tl.float32)
    y2 = tl.load(Y + HALF + at, mask, 0.0).to(tl.float32)
    rstd = tl.load(RSTD + first + row, row < (b + 1) * T * H - first, 0.0)
    cos, sin = _tables(COS, SIN, t0, t, col, mask, HALF)
    along = tl.sum(g1 * y1 + g2 * y2, 1, keep_dims=True) * (0.5 / HALF)
    dx1, dx2 = _rotate(rstd * (g1 - y1 * along), rstd * (g2 - y2 * along), cos, -sin)
    DX += (b * T + t0) * stride_t
    at = t * stride_t + h * (2 * HALF) + col
    tl.store(DX + at, dx1.to(DX.dtype.element_ty), mask)
    tl.store(DX + HALF + at, dx2.to(DX.dtype.element_ty), mask)


@triton.jit
def qkv_kernel(
    QKV, COS, SIN, IDX, TABLE, OUT_Q, OUT_K, OUT_V, RSTD, GATE, T, k_first, v_first, rstd_k, stride_b, stride_t, vocab, eps,
    N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Programs of q, then from k_first those of k, then from v_first those of v. TABLE, IDX and GATE are None without value residual."""
    pid = tl.program_id(0)
    K = QKV + N_HEAD * 2 * HALF
    V = K + N_KV_HEAD * 2 * HALF
    if pid < k_first:
        _forward(QKV, OUT_Q, RSTD, COS, SIN, pid, T, stride_b, stride_t, 2 * HALF, eps, N_HEAD, HALF, ROWS, BLOCK)
    elif pid < v_first:
        _forward(K, OUT_K, RSTD + rstd_k, COS, SIN, pid - k_first, T, stride_b, stride_t, 2 * HALF, eps, N_KV_HEAD, HALF, ROWS, BLOCK)
    else:
        b, t0, first, t, h, col, mask = _place(pid - v_first, T, N_KV_HEAD, HALF, ROWS, BLOCK)
        V += b * stride_b + t0 * stride_t
        at = t * stride_t + h * (2 * HALF) + col
        v1 = tl.load(V + at, mask, 0.0).to(tl.float32)
        v2 = tl.load(V + HALF + at, mask, 0.0).to(tl.float32)
        row = tl.arange(0, ROWS)[:, None]
        if TABLE is not None:
            inside = row < (b + 1) * T * N_KV_HEAD - first
            gate = tl.load(V + t * stride_t + (N_KV_HEAD * 2 * HALF + h), inside, 0.0).to(tl.float32)
            e1, e2, known = _embedding(TABLE, IDX + b * T + t0, t, h, col, vocab, inside, mask, N_KV_HEAD, HALF)
            gate = tl.where(known, 1.0 / (1.0 + tl.exp(-gate)), float("nan"))
            tl.store(GATE + first + row, gate, inside)
            v1 += 2.0 * gate * e1
            v2 += 2.0 * gate * e2
        OUT_V += first * (2 * HALF)
        at = row * (2 * HALF) + col
        tl.store(OUT_V + at, v1.to(OUT_V.dtype.element_ty), mask)
        tl.store(OUT_V + HALF + at, v2.to(OUT_V.dtype.element_ty), mask)


@triton.jit
def qkv_backward_kernel(
    DY_Q, DY_K, DY_V, Q, K, RSTD, GATE, COS, SIN, IDX, TABLE, DQKV, DE, T, k_first, v_first, rstd_k,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h, stride_t, vocab,
    N_HEAD: tl.constexpr, N_KV_HEAD: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):
    """DQKV: (B·T, stride_t), every column written. DE: (B·T, n_kv_head·head_dim), the gradient of the embedding's rows, or None."""
    pid = tl.program_id(0)
    DK = DQKV + N_HEAD * 2 * HALF
    DV = DK + N_KV_HEAD * 2 * HALF
    if pid < k_first:
        _norm_rope_backward(DY_Q, Q, RSTD, DQKV, COS, SIN, pid, T, stride_q_b, stride_q_t, stride_q_h, stride_t,
                            N_HEAD, HALF, ROWS, BLOCK)
    elif pid < v_first:
        _norm_rope_backward(DY_K, K, RSTD + rstd_k, DK, COS, SIN, pid - k_first, T, stride_k_b, stride_k_t, stride_k_h, stride_t,
                            N_KV_HEAD, HALF, ROWS, BLOCK)
    else:
        b, t0, first, t, h, col, mask = _place(pid - v_first, T, N_KV_HEAD, HALF, ROWS, BLOCK)
        DY_V += b * stride_v_b + t0 * stride_v_t
        at = t * stride_v_t + h * stride_v_h + col
        g1 = tl.load(DY_V + at, mask, 0.0).to(tl.float32)
        g2 = tl.load(DY_V + HALF + at, mask, 0.0).to(tl.float32)
        row = tl.arange(0, ROWS)[:, None]
        DV += (b * T + t0) * stride_t
        if TABLE is not None:
            inside = row < (b + 1) * T * N_KV_HEAD - first
            gate = tl.load(GATE + first + row, inside, 0.0)
            if DE is not None:
                DE += first * (2 * HALF)
                at = row * (2 * HALF) + col
                tl.store(DE + at, (2.0 * gate * g1).to(DE.dtype.element_ty), mask)
                tl.store(DE + HALF + at, (2.0 * gate * g2).to(DE.dtype.element_ty), mask)
            e1, e2, _known = _embedding(TABLE, IDX + b * T + t0, t, h, col, vocab, inside, mask, N_KV_HEAD, HALF)
            dgate = tl.sum(g1 * e1 + g2 * e2, 1, keep_dims=True) * (2.0 * gate * (1.0 - gate))
            at = t * stride_t + N_KV_HEAD * 2 * HALF
            tl.store(DV + at + h, dgate.to(DV.dtype.element_ty), inside)
            for start in tl.static_range(N_KV_HEAD, PAD, BLOCK):  # the unused columns
                tl.store(DV + at + start + col, tl.zeros_like(g1).to(DV.dtype.element_ty), (col < PAD - start) & (h == 0) & inside)
        at = t * stride_t + h * (2 * HALF) + col
        tl.store(DV + at, g1.to(DV.dtype.element_ty), mask)
        tl.store(DV + HALF + at, g2.to(DV.dtype.element_ty), mask)


def gate_columns(n_kv_head):
    """Columns of the packed row that the gates take: n_kv_head and zeros up to the next multiple of 16."""
    return -(-n_kv_head // GATE_COLUMNS) * GATE_COLUMNS


def _programs(B, T, n_head, n_kv_head, rows):
    """Programs of q, of k, and of v."""
    return B * triton.cdiv(T * n_head, rows), B * triton.cdiv(T * n_kv_head, rows)


@operator("qkv")
def qkv_op(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, n_kv_head: int, idx: Tensor | None, table: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and what the backward needs beside them: reciprocal norms (of all of q, then all of k) and gates, float32."""
    B, T, _ = qkv.shape
    head_dim = 2 * cos.shape[-1]
    qkv = qkv if qkv.stride(2) == 1 and qkv.stride(1) < 2**24 else qkv.contiguous()
    q = qkv.new_empty((B, T, n_head, head_dim))
    k, v = qkv.new_empty((B, T, n_kv_head, head_dim)), qkv.new_empty((B, T, n_kv_head, head_dim))
    rstd = torch.empty(B * T * (n_head + n_kv_head), dtype=torch.float32, device=qkv.device)
    gate = rstd.new_empty(B * T * n_kv_head if table is not None else 0)
    ROWS, BLOCK, num_warps = tile(head_dim)
    of_q, of_k = _programs(B, T, n_head, n_kv_head, ROWS)
    if of_q:
        with torch.cuda.device_of(qkv):
            qkv_kernel[(of_q + 2 * of_k,)](
                qkv, cos, sin, idx, table, q, k, v, rstd, None if table is None else gate, T, of_q, of_q + of_k, B * T * n_head,
                qkv.stride(0), qkv.stride(1), 0 if table is None else table.shape[0], eps,
                n_head, n_kv_head, head_dim // 2, ROWS, BLOCK, num_warps=num_warps, num_stages=1,
            )
    return q, k, v, rstd, gate


@qkv_op.register_fake
def _(qkv, cos, sin, n_head, n_kv_head, idx, table, eps):
    B, T, _ = qkv.shape
    head_dim = 2 * cos.shape[-1]
    rstd = torch.empty(B * T * (n_head + n_kv_head), dtype=torch.float32, device=qkv.device)
    gate = rstd.new_empty(B * T * n_kv_head if table is not None else 0)
    q, k = qkv.new_empty((B, T, n_head, head_dim)), qkv.new_empty((B, T, n_kv_head, head_dim))
    return q, k, torch.empty_like(k), rstd, gate


def _dtable(rows, idx, table):
    """The embedding's gradient from its rows': torch's own sum by tokens, which has one order on a GPU when it isn't compiled.

    A token outside the vocabulary has made the loss NaN; nothing is written outside the table for it.
    """
    return torch.ops.aten.embedding_dense_backward(rows, idx.reshape(-1).clamp(0, table.shape[0] - 1), table.shape[0], -1, False)


@operator("qkv_backward")
def qkv_backward_op(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, rstd: Tensor, gate: Tensor, cos: Tensor, sin: Tensor,
    idx: Tensor | None, table: Tensor | None, need_dqkv: bool, need_dtable: bool,
) -> tuple[Tensor, Tensor]:
    """The packed gradient (B, T, width) and the table's; what is not needed comes back empty."""
    B, T, n_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    if not need_dqkv:  # a projection that is frozen under a trained table
        rows = (2 * gate.view(B, T, n_kv_head, 1) * dv).to(table.dtype).view(B * T, n_kv_head * head_dim)
        return q.new_empty(0), _dtable(rows, idx, table)
    pad = 0 if table is None else gate_columns(n_kv_head)
    width = (n_head + 2 * n_kv_head) * head_dim + pad
    dqkv = q.new_empty((B, T, width))
    rows = table.new_empty((B * T, n_kv_head * head_dim)) if need_dtable else None
    dq, dk, dv = map(_adjacent, (dq, dk, dv))
    ROWS, BLOCK, num_warps = tile(head_dim)
    of_q, of_k = _programs(B, T, n_head, n_kv_head, ROWS)
    if of_q:
        with torch.cuda.device_of(q):
            qkv_backward_kernel[(of_q + 2 * of_k,)](
                dq, dk, dv, q, k, rstd, None if table is None else gate, cos, sin, idx, table, dqkv, rows, T, of_q, of_q + of_k,
                B * T * n_head, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], width, 0 if table is None else table.shape[0],
                n_head, n_kv_head, head_dim // 2, ROWS, BLOCK, pad, num_warps=num_warps, num_stages=1,
            )
    return dqkv, q.new_empty(0) if rows is None else _dtable(rows, idx, table)


@qkv_backward_op.register_fake
def _(dq, dk, dv, q, k, rstd, gate, cos, sin, idx, table, need_dqkv, need_dtable):
    B, T, n_head, head_dim = q.shape
    n_kv_head = k.shape[2]
    width = (n_head + 2 * n_kv_head) * head_dim + (0 if table is None else gate_columns(n_kv_head))
    return q.new_empty((B, T, width) if need_dqkv else 0), table.new_empty(table.shape) if need_dtable else q.new_empty(0)


def _save(ctx, inputs, output):
    _, cos, sin, _, _, idx, table, _ = inputs
    q, k, _, rstd, gate = output
    ctx.mark_non_differentiable(rstd, gate)
    ctx.save_for_backward(q, k, rstd, gate, cos, sin, idx, table)


def _backward(ctx, dq, dk, dv, *_):
    q, k, rstd, gate, cos, sin, idx, table = ctx.saved_tensors
    need_dqkv, *_, need_dtable, _ = ctx.needs_input_grad
    dqkv, dtable = qkv_backward_op(dq, dk, dv, q, k, rstd, gate, cos, sin, idx, table, need_dqkv, need_dtable)
    return dqkv if need_dqkv else None, None, None, None, None, None, dtable if need_dtable else None, None


differentiable("qkv_norm_rope", qkv_op, qkv_backward_op, _backward, _save)


def qkv_norm_rope(qkv, cos, sin, n_head, n_kv_head, idx=None, table=None, eps=None):
    """q, k and v of an attention layer from its packed product: q and k rotated and normed, v with its value residual.

    qkv: (B, T, width), float32, float16 or bfloat16, a token's row [q | k | v], with a table [q | k | v | gates | zeros], where the
        gates and zeros take `gate_columns(n_kv_head)` columns.
    cos, sin: (T, head_dim/2) or (1, T, 1, head_dim/2), constants. n_head a multiple of n_kv_head.
    idx, table: the tokens (B, T) int64 and their embeddings (vocab, n_kv_head·head_dim): v + 2σ(gate)·table[idx], head by head; NaN for
        a token outside the vocabulary.
    Returns q (B, T, n_head, head_dim) and k, v (B, T, n_kv_head, head_dim), contiguous, of qkv's dtype. Once differentiable in qkv and
    table. ValueError for anything else.
    """
    name = "qkv_norm_rope"
    require_float(name, qkv, cos, sin, table)
    require_device(name, qkv, cos, sin, idx, table)
    half = cos.shape[-1] if cos.ndim else 0
    if qkv.ndim != 3 or not 1 <= half <= MAX_HEAD_DIM // 2 or (idx is None) != (table is None):
        needed = f"(B, T, width), head_dim up to {MAX_HEAD_DIM}, idx with table or neither"
        raise ValueError(f"{name}: qkv {tuple(qkv.shape)}, cos {tuple(cos.shape)}; need {needed}")
    B, T, width = qkv.shape
    for which, rotary in (("cos", cos), ("sin", sin)):
        if rotary.shape not in ((T, half), (1, T, 1, half)) or rotary.requires_grad:
            raise ValueError(f"{name}: {which} of shape {tuple(rotary.shape)}; need a constant ({T}, {half}) or (1, {T}, 1, {half})")
    expected = (n_head + 2 * n_kv_head) * 2 * half + (0 if table is None else gate_columns(n_kv_head))
    if n_kv_head < 1 or n_head < 1 or n_head % n_kv_head:
        raise ValueError(f"{name}: n_head {n_head}, n_kv_head {n_kv_head}; need the first a multiple of the second")
    if width != expected:
        raise ValueError(f"{name}: rows of {width} for {n_head} and {n_kv_head} heads of {2 * half}; need {expected}")
    if table is not None:
        if table.ndim != 2 or table.shape[1] != n_kv_head * 2 * half or idx.shape != (B, T) or idx.dtype != torch.int64:
            given = f"table {tuple(table.shape)}, idx {idx.dtype} {tuple(idx.shape)}"
            raise ValueError(f"{name}: {given}; need (vocab, {n_kv_head * 2 * half}) and int64 ({B}, {T})")
        idx, table = idx.contiguous(), table.contiguous()
    return qkv_op(qkv, cos.contiguous(), sin.contiguous(), n_head, n_kv_head, idx, table, EPS if eps is None else float(eps))[:3]


def qkv_norm_rope_ref(qkv, cos, sin, n_head, n_kv_head, idx=None, table=None, eps=None):
    """The definition, in the dtype that its arguments promote to."""
    head_dim = 2 * cos.shape[-1]
    sizes = [n * head_dim for n in (n_head, n_kv_head, n_kv_head)]
    q, k, v, gates = qkv.split([*sizes, qkv.shape[-1] - sum(sizes)], -1)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if table is not None:
        v = v + 2 * torch.sigmoid(gates[..., :n_kv_head]).unsqueeze(-1) * torch.nn.functional.embedding(idx, table).view(v.shape)
    return *qk_norm_rope_ref(q, k, cos, sin, eps), v

"""Softmax attention over blocks of keys, forward and backward, without a T × T matrix in memory.

    S = scale · Q Kᵀ,   P = softmax(S) over the keys that a query sees,   O = P V

q is (B, T, n_head, head_dim); k and v are (B, T, n_kv_head, head_dim), n_head a multiple of n_kv_head: query head h reads
KV head h // (n_head // n_kv_head) where it lies, nothing is repeated. Causal attention lets query i see keys j ≤ i, a
window w only i - w ≤ j ≤ i. Blocks of keys that no query of a block sees are left out by the loops' bounds, and only
those that the diagonal, the window's edge or the end of the sequence cuts are masked.

Forward: the online softmax of Milakov and Gimelshein (2018), blocked as in FlashAttention (Dao et al., 2022). It saves,
for each query, lse = log2 Σⱼ exp(Sᵢⱼ): float32, base 2 because the hardware's exponential is (times ln 2: the usual one).
Backward, with delta = Σ_d dO·O for each query (`_delta_kernel`):

    dV = Pᵀ dO,   dS = P ∘ (dO Vᵀ - delta),   dK = scale · dSᵀ Q,   dQ = scale · dS K

P is computed again from lse. `_dkdv_kernel` holds one block of keys and goes over the queries of all the query heads that
share it; `_dq_kernel` holds one block of queries and goes over its keys. Each element is written by one program, so the
results are the same bit for bit from run to run. Products accumulate in float32; float32 inputs are multiplied in float32.

A masked score is -inf and the running maximum starts at a large negative but finite number: exp2(-inf - finite) is 0 even
where the compiler contracts the multiplication by the scale and the subtraction, and even in rows that see no key of their
first block (a window's edge). Two finite sentinels would leave a difference of rounding errors there, and exp2 of that is inf.

Where scores are known to be small no maximum is needed (`bounded`, FIXED_PEAK: it stays 0). With |S| ≤ 60, exp S lies within 1e±26,
which leaves float32 room for the sum over any number of keys, and for any v between 1e-11 and 1e11 of size. For bfloat16 operands alone:
eˢ overflows float16 at 11, and in float32 rounding S · log2 e near 86 would cost a weight 40 ulp. The weights are rounded to
bfloat16 before they are summed, so the sum that the output is divided by is of the very weights that multiply V. A query that has
weight for one key alone then gets exactly that key's value, and its dq no noise (with a maximum that weight is 1 and needs no rounding).
Blocks without a mask truncate instead of rounding, an addition less for each element; the exponent is larger there by what truncation
takes in the mean, so that nothing is biased (rms error of a weight: 0.175 %, rounded 0.166 %).
"""

import math

import torch
import triton
import triton.language as tl

from ._common import BACKEND, INTERPRETED, configs, differentiable, operator, require_device, require_float

DELTA_ROWS = 32
PADDED_TO = 128  # no backward kernel reads queries in larger blocks
MAX_SCALE = 1e30  # beyond it a score of 1 leaves float32's range
HALF_ULP = tl.constexpr(0.004)  # what truncation to bfloat16 takes from log2 of a number, in the mean over mantissas
LOG2E = 1.4426950408889634
# Triton's interpreter multiplies the bit patterns of bfloat16 operands and truncates when it converts to bfloat16.
_INTERPRETED = tl.constexpr(INTERPRETED)
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
HEAD_DIMS = "multiples of 8 from 16 to 256 (32, 64 and 128 are tuned)"


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(base, first, stride, limit, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr,
               AGAIN: tl.constexpr = False):
    """Rows first … first + BLOCK of one head, (BLOCK, BLOCK_D); zeros beyond `limit` (if BOUNDED) and beyond HEAD_DIM.
    AGAIN names the default cache policy, so that the compiler does not merge this with the earlier load of the same rows."""
    CACHE: tl.constexpr = ".ca" if AGAIN else ""
    row = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    # The block's offset is a 64-bit scalar and the tile's are 32-bit: any tensor size, and AMD's buffer loads apply.
    at = base + tl.cast(first, tl.int64) * stride + (row * stride + d)
    if BOUNDED and HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=(row < limit - first) & (d < HEAD_DIM), other=0.0, cache_modifier=CACHE)
    elif BOUNDED:
        return tl.load(at, mask=row < limit - first, other=0.0, cache_modifier=CACHE)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=d < HEAD_DIM, other=0.0, cache_modifier=CACHE)
    else:
        return tl.load(at, cache_modifier=CACHE)


@triton.jit
def _store_rows(base, first, stride, limit, x, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = base + tl.cast(first, tl.int64) * stride + (row * stride + d)
    tl.store(at, x, mask=(row < limit - first) & (d < HEAD_DIM))


@triton.jit
def _narrow(x, dtype: tl.constexpr, FAST_BF16: tl.constexpr):
    """float32 to the type of the operands. FAST_BF16 rounds ties away from zero, in two integer operations where parts without
    an instruction for it take five; infinities stay, and so do the NaNs that arithmetic makes."""
    if (FAST_BF16 or _INTERPRETED) and dtype == tl.bfloat16:
        return ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _dot(a, b, acc):
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _sees(query, key, n_keys, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, FAST_BF16: tl.constexpr):
    """Whether a query sees a key; the two broadcast. Causal attention needs no test for the end: no query lies beyond it."""
    # Without a window, `window` is n_keys. One unsigned comparison for both edges then takes fewer registers on gfx1151 (which FAST_BF16
    # is for) and more on NVIDIA.
    if WINDOWED or (CAUSAL and FAST_BF16):  # 0 ≤ query - key ≤ window
        return (query - key).to(tl.uint32, bitcast=True) <= tl.cast(window, tl.uint32)
    elif CAUSAL:
        return key <= query
    else:
        return key < n_keys


@triton.jit
def _key_ranges(m0, n_keys, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first, full, cut, end) for queries m0 … m0 + BLOCK_M, multiples of BLOCK_N except the last: keys full … cut are seen by all
    of them; first … full (the window's edge) and cut … end (the diagonal, or the end of the sequence) by some."""
    first = 0
    full = 0
    cut = n_keys // BLOCK_N * BLOCK_N
    end = n_keys
    if CAUSAL:
        cut = m0 // BLOCK_N * BLOCK_N
        end = tl.minimum(m0 + BLOCK_M, n_keys)
    if WINDOWED:
        first = tl.maximum(m0 - window, 0) // BLOCK_N * BLOCK_N
        full = tl.minimum(tl.cdiv(tl.maximum(m0 + BLOCK_M - 1 - window, 0), BLOCK_N) * BLOCK_N, cut)
    return first, full, cut, end


@triton.jit
def _query_ranges(n0, n_queries, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first, full, cut, end) for keys n0 … n0 + BLOCK_N, as `_key_ranges`: of the queries, full … cut see all of these keys."""
    first = 0
    full = 0
    cut = n_queries // BLOCK_M * BLOCK_M
    end = n_queries
    if CAUSAL:
        first = n0 // BLOCK_M * BLOCK_M
        full = tl.cdiv(n0 + BLOCK_N - 1, BLOCK_M) * BLOCK_M
    if WINDOWED:
        end = tl.minimum(n0 + BLOCK_N + window, n_queries)
        cut = tl.minimum(cut, (n0 + window + 1) // BLOCK_M * BLOCK_M)
    if CAUSAL:
        full = tl.minimum(full, tl.cdiv(end, BLOCK_M) * BLOCK_M)
        cut = tl.maximum(cut, full)
    return first, full, cut, end


@triton.jit
def _program(n_rows, n_head, HEAVY_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, head, first row) of this program. The blocks of a head are neighbours, for the cache's sake; those with the most
    work go first, so that the last ones to run are short."""
    n_blocks = tl.cdiv(n_rows, BLOCK)
    head = tl.program_id(0) // n_blocks
    block = tl.program_id(0) % n_blocks
    if HEAVY_LAST:
        block = n_blocks - 1 - block
    return (head // n_head).to(tl.int64), (head % n_head).to(tl.int64), block * BLOCK


@triton.jit
def _attend(acc, peak, total, Q, k, v, start, m0, k_t, v_t, n_keys, window, scale,
            MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FAST_BF16: tl.constexpr, FIXED_PEAK: tl.constexpr):
    """One block of keys into the running maximum, sum and product; with FIXED_PEAK the maximum stays what it is."""
    K = _load_rows(k, start, k_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)  # (BLOCK_N, BLOCK_D)
    S = _dot(Q, tl.trans(K), None)  # (BLOCK_M, BLOCK_N)
    if MASKED:
        query = tl.arange(0, BLOCK_M)
        key = (start - m0) + tl.arange(0, BLOCK_N)
        S = tl.where(_sees(query[:, None], key[None, :], n_keys - m0, window, CAUSAL, WINDOWED, FAST_BF16), S, float("-inf"))
    if FIXED_PEAK:  # the sum is of the narrowed weights, as the product: rounded, or truncated with half an ulp added before
        P = tl.exp2(S * scale if MASKED else S * scale + HALF_ULP)
        P = ((P.to(tl.uint32, bitcast=True) + (0x8000 if MASKED else 0)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        new_peak = tl.maximum(peak, tl.max(S, 1) * scale)
        P = tl.exp2(S * scale - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade
        acc = acc * fade[:, None]
        peak = new_peak
    total = total + tl.sum(P, 1)
    V = _load_rows(v, start, v_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    acc = _dot(_narrow(P, V.dtype, FAST_BF16), V, acc)
    return acc, peak, total


@triton.jit(do_not_specialize=["n_queries", "n_keys", "window", "bucket", "n_head"])
def _forward_kernel(q, k, v, o, lse, n_queries, n_keys, window, bucket, n_head, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, scale,
                    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FAST_BF16: tl.constexpr, FIXED_PEAK: tl.constexpr):
    b, h, m0 = _program(n_queries, n_head, CAUSAL, BLOCK_M)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    Q = _load_rows(q + b * q_b + h * q_h, m0, q_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), 0.0 if FIXED_PEAK else -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first, full, cut, end = _key_ranges(m0, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    if WINDOWED:
        # One loop for both edges: a third copy of the body would cost registers.
        n_edge = (full - first) // BLOCK_N
        for i in range(n_edge + tl.cdiv(end - cut, BLOCK_N)):
            start = tl.where(i < n_edge, first, cut - n_edge * BLOCK_N) + i * BLOCK_N
            acc, peak, total = _attend(acc, peak, total, Q, k, v, start, m0, k_t, v_t, n_keys, window, scale,
                                       True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FAST_BF16, FIXED_PEAK)
    else:
        for start in range(cut, end, BLOCK_N):
            acc, peak, total = _attend(acc, peak, total, Q, k, v, start, m0, k_t, v_t, n_keys, window, scale,
                                       True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FAST_BF16, FIXED_PEAK)
    for start in range(full, cut, BLOCK_N):
        acc, peak, total = _attend(acc, peak, total, Q, k, v, start, m0, k_t, v_t, n_keys, window, scale,
                                   False, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, FAST_BF16, FIXED_PEAK)
    row = b * n_head + h
    acc = acc * (1.0 / total)[:, None]
    o_t = n_head * HEAD_DIM
    _store_rows(o + b * n_queries * o_t + h * HEAD_DIM, m0, o_t, n_queries, _narrow(acc, o.dtype.element_ty, FAST_BF16),
                BLOCK_M, HEAD_DIM, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    tl.store(lse + row * n_queries + m0 + m, peak + tl.log2(total), mask=m < n_queries - m0)


@triton.jit(do_not_specialize=["n_queries", "n_padded"])
def _delta_kernel(o, do, lse, rows, n_queries, n_padded, n_head, n_rows, do_b, do_t, do_h,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """rows[0] = lse, rows[1] = delta, padded to n_padded queries, so that the loops read whole blocks without a mask; what is
    beyond the end has P = exp2(0 - inf) = 0."""
    b, h, m0 = _program(n_padded, n_head, False, BLOCK_M)
    o_t = n_head * HEAD_DIM
    out = _load_rows(o + b * n_queries * o_t + h * HEAD_DIM, m0, o_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dO = _load_rows(do + b * do_b + h * do_h, m0, do_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    m = m0 + tl.arange(0, BLOCK_M)
    row = b * n_head + h
    L = tl.load(lse + row * n_queries + m, mask=m < n_queries, other=float("inf"))
    tl.store(rows + row * n_padded + m, L)
    tl.store(rows + (n_rows + row) * n_padded + m, tl.sum(out.to(tl.float32) * dO.to(tl.float32), 1))


@triton.jit
def _dkdv_block(dK, dV, K, V, q, do, lse, delta, start, n0, q_t, do_t, n_queries, n_keys, window, scale, masked,
                BOUNDED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
                HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RELOAD: tl.constexpr,
                FAST_BF16: tl.constexpr):
    """One block of queries into dK and dV. Everything is transposed, so that Pᵀ and dSᵀ are left operands as they come out.
    RELOAD reads Q again for the last product instead of holding it."""
    m = tl.arange(0, BLOCK_M)
    Q = _load_rows(q, start, q_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, BOUNDED)
    L = tl.load(lse + start + m)
    PT = tl.exp2(_dot(K, tl.trans(Q), None) * scale - L[None, :])  # (BLOCK_N, BLOCK_M)
    if masked:
        query = (start - n0) + m
        key = tl.arange(0, BLOCK_N)
        PT = tl.where(_sees(query[None, :], key[:, None], n_keys - n0, window, CAUSAL, WINDOWED, FAST_BF16), PT, 0.0)
    dO = _load_rows(do, start, do_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, BOUNDED)
    if DV:
        dV = _dot(_narrow(PT, dO.dtype, FAST_BF16), dO, dV)
    if DK:
        dPT = _dot(V, tl.trans(dO), None)
        delta_m = tl.load(delta + start + m)
        if RELOAD:
            Q = _load_rows(q, start, q_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, BOUNDED, True)
        dK = _dot(_narrow(PT * (dPT - delta_m[None, :]), Q.dtype, FAST_BF16), Q, dK)
    return dK, dV


@triton.jit(do_not_specialize=["n_queries", "n_padded", "n_keys", "window", "bucket", "n_kv_head"])
def _dkdv_kernel(q, k, v, do, lse, delta, dk, dv, n_queries, n_padded, n_keys, window, bucket, n_kv_head,
                 q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, scale, scale_log2,
                 DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 SPLIT: tl.constexpr, RELOAD: tl.constexpr, FAST_BF16: tl.constexpr):
    b, h, n0 = _program(n_keys, n_kv_head, False, BLOCK_N)
    K = _load_rows(k + b * k_b + h * k_h, n0, k_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    V = K
    if DK:
        V = _load_rows(v + b * v_b + h * v_h, n0, v_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    dK = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dV = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    n_padded = n_padded // 16 * 16  # it is such a multiple: the compiler shall know, for wide loads of lse and delta
    first, full, cut, end = _query_ranges(n0, n_queries, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    q += b * q_b + h * GROUP * q_h
    do += b * do_b + h * GROUP * do_h
    lse += (b * n_kv_head + h) * GROUP * n_padded
    delta += (b * n_kv_head + h) * GROUP * n_padded
    if SPLIT:
        for _ in range(GROUP):  # the query heads of this KV head
            n_edge = (full - first) // BLOCK_M
            for i in range(n_edge + tl.cdiv(end - cut, BLOCK_M)):
                start = tl.where(i < n_edge, first, cut - n_edge * BLOCK_M) + i * BLOCK_M
                dK, dV = _dkdv_block(dK, dV, K, V, q, do, lse, delta, start, n0, q_t, do_t, n_queries, n_keys, window, scale_log2, True,
                                     True, DK, DV, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
            for start in range(full, cut, BLOCK_M):
                dK, dV = _dkdv_block(dK, dV, K, V, q, do, lse, delta, start, n0, q_t, do_t, n_queries, n_keys, window, scale_log2, False,
                                     False, DK, DV, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
            q += q_h
            do += do_h
            lse += n_padded
            delta += n_padded
    else:
        start = first
        for _ in range(GROUP * tl.cdiv(end - first, BLOCK_M)):  # heads and blocks in one loop: nested ones hold more registers
            masked = (start < full) | (start >= cut)
            dK, dV = _dkdv_block(dK, dV, K, V, q, do, lse, delta, start, n0, q_t, do_t, n_queries, n_keys, window, scale_log2, masked,
                                 True, DK, DV, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
            start += BLOCK_M
            done = start >= end
            start = tl.where(done, first, start)
            step = done.to(tl.int64)
            q += step * q_h
            do += step * do_h
            lse += step * n_padded
            delta += step * n_padded
    row_stride = n_kv_head * HEAD_DIM
    out = b * n_keys * row_stride + h * HEAD_DIM
    if DK:
        _store_rows(dk + out, n0, row_stride, n_keys, _narrow(dK * scale, dk.dtype.element_ty, FAST_BF16), BLOCK_N, HEAD_DIM, BLOCK_D)
    if DV:
        _store_rows(dv + out, n0, row_stride, n_keys, _narrow(dV, dv.dtype.element_ty, FAST_BF16), BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit
def _dq_block(dQ, Q, dO, L, delta, k, v, start, m0, k_t, v_t, n_keys, window, scale, masked,
              BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RELOAD: tl.constexpr, FAST_BF16: tl.constexpr):
    """One block of keys into dQ. RELOAD: as in `_dkdv_block`."""
    K = _load_rows(k, start, k_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED)
    P = tl.exp2(_dot(Q, tl.trans(K), None) * scale - L[:, None])  # (BLOCK_M, BLOCK_N)
    if masked:
        query = tl.arange(0, BLOCK_M)
        key = (start - m0) + tl.arange(0, BLOCK_N)
        P = tl.where(_sees(query[:, None], key[None, :], n_keys - m0, window, CAUSAL, WINDOWED, FAST_BF16), P, 0.0)
    V = _load_rows(v, start, v_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED)
    dP = _dot(dO, tl.trans(V), None)
    if RELOAD:
        K = _load_rows(k, start, k_t, n_keys, BLOCK_N, HEAD_DIM, BLOCK_D, BOUNDED, True)
    return _dot(_narrow(P * (dP - delta[:, None]), K.dtype, FAST_BF16), K, dQ)


@triton.jit(do_not_specialize=["n_queries", "n_padded", "n_keys", "window", "bucket", "n_head"])
def _dq_kernel(q, k, v, do, lse, delta, dq, n_queries, n_padded, n_keys, window, bucket, n_head,
               q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, scale, scale_log2,
               GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, RELOAD: tl.constexpr, FAST_BF16: tl.constexpr):
    b, h, m0 = _program(n_queries, n_head, CAUSAL, BLOCK_M)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    m = tl.arange(0, BLOCK_M)
    row = (b * n_head + h) * n_padded + m0
    Q = _load_rows(q + b * q_b + h * q_h, m0, q_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dO = _load_rows(do + b * do_b + h * do_h, m0, do_t, n_queries, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    L = tl.load(lse + row + m)
    delta_m = tl.load(delta + row + m)
    dQ = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first, full, cut, end = _key_ranges(m0, n_keys, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    if SPLIT:
        n_edge = (full - first) // BLOCK_N
        for i in range(n_edge + tl.cdiv(end - cut, BLOCK_N)):
            start = tl.where(i < n_edge, first, cut - n_edge * BLOCK_N) + i * BLOCK_N
            dQ = _dq_block(dQ, Q, dO, L, delta_m, k, v, start, m0, k_t, v_t, n_keys, window, scale_log2, True,
                           True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
        for start in range(full, cut, BLOCK_N):
            dQ = _dq_block(dQ, Q, dO, L, delta_m, k, v, start, m0, k_t, v_t, n_keys, window, scale_log2, False,
                           False, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
    else:
        for start in range(first, end, BLOCK_N):
            masked = (start < full) | (start >= cut)
            dQ = _dq_block(dQ, Q, dO, L, delta_m, k, v, start, m0, k_t, v_t, n_keys, window, scale_log2, masked,
                           True, CAUSAL, WINDOWED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, RELOAD, FAST_BF16)
    o_t = n_head * HEAD_DIM
    _store_rows(dq + b * n_queries * o_t + h * HEAD_DIM, m0, o_t, n_queries, _narrow(dQ * scale, dq.dtype.element_ty, FAST_BF16),
                BLOCK_M, HEAD_DIM, BLOCK_D)


# --- tuning --------------------------------------------------------------------------------------------------------


def _hip(BLOCK_M, BLOCK_N, num_warps=4, waves_per_eu=0, **more):
    options = {"waves_per_eu": waves_per_eu} if waves_per_eu else {}
    return triton.Config({"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "FAST_BF16": True, **more, **options}, num_warps=num_warps, num_stages=1)


def _cuda(BLOCK_M, BLOCK_N, num_warps, num_stages, **more):
    return triton.Config({"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "FAST_BF16": False, **more}, num_warps=num_warps, num_stages=num_stages)


# How the backward's loops are written. On gfx1151 registers are what is short: one copy of the body, a branch around the mask, and
# a tile read twice (from the cache) rather than held. With shared memory for the operands, masked and whole blocks in loops apart.
LEAN = dict(SPLIT=False, RELOAD=True)
ROOMY = dict(SPLIT=True, RELOAD=False)

# By padded head_dim (64 also for smaller ones), or "float32" for any head_dim in float32; the first of each list is the default.
# hip: what compiles for gfx1151 without spills at head_dim up to 128 (on Triton 3.7 and 3.8; on 3.6 the first of each list) and issues
# best on the emulator; waves_per_eu is what keeps the allocator from spilling, or leaves room for more waves (docs/gfx1151.md).
# The backward at 256 and float32 above 64 do spill: they work and are not tuned.
# cuda: what compiles for sm_90 without, or with hardly any, spills; the smaller tiles are for short sequences and smaller parts.
# Each of these versions spills what is first on the others.
_FORWARD_128 = {(3, 6): _hip(128, 32, num_warps=8, waves_per_eu=4), (3, 9): _hip(128, 16, num_warps=8)}.get(
    TRITON_VERSION, _hip(64, 32, waves_per_eu=1))
FORWARD_CONFIGS = {
    64: {"hip": [_hip(128, 32, num_warps=8), _hip(64, 32)],
         "cuda": [_cuda(128, 64, 4, 3), _cuda(128, 128, 4, 3), _cuda(128, 128, 8, 2), _cuda(128, 64, 8, 3), _cuda(64, 64, 4, 3)]},
    128: {"hip": [_FORWARD_128, _hip(128, 16, num_warps=8, waves_per_eu=8)],
          "cuda": [_cuda(64, 64, 4, 3), _cuda(128, 64, 8, 3), _cuda(64, 32, 4, 4)]},
    256: {"hip": [_hip(64, 16, num_warps=8, waves_per_eu=4)], "cuda": [_cuda(128, 32, 8, 2), _cuda(64, 64, 8, 2)]},
    "float32": {"hip": [_hip(16, 16, num_warps=8, waves_per_eu=4)], "cuda": [_cuda(32, 16, 8, 1)]},
}
DKDV_CONFIGS = {
    64: {"hip": [_hip(16, 64, **LEAN), _hip(16, 128, num_warps=8, **LEAN)],
         "cuda": [_cuda(64, 128, 8, 3, **ROOMY), _cuda(64, 128, 8, 2, **ROOMY), _cuda(64, 64, 4, 3, **ROOMY)]},
    128: {"hip": [_hip(16, 64, waves_per_eu=4, **LEAN), _hip(16, 128, num_warps=8, waves_per_eu=4, **LEAN)],
          "cuda": [_cuda(64, 128, 8, 3, **ROOMY), _cuda(32, 64, 4, 3, **ROOMY)]},
    256: {"hip": [_hip(16, 32, num_warps=8, waves_per_eu=4, **LEAN)], "cuda": [_cuda(32, 64, 8, 2, **ROOMY)]},
    "float32": {"hip": [_hip(16, 16, num_warps=8, waves_per_eu=4, **LEAN)], "cuda": [_cuda(16, 16, 8, 1, **ROOMY)]},
}
DQ_CONFIGS = {
    64: {"hip": [_hip(64, 32, waves_per_eu=4, **LEAN)],
         "cuda": [_cuda(128, 64, 8, 3, **ROOMY), _cuda(128, 128, 8, 2, **ROOMY),
                  _cuda(64, 64, 4, 3, **ROOMY), _cuda(64, 128, 4, 2, **ROOMY)]},
    128: {"hip": [_hip(128, 16, num_warps=8, waves_per_eu=4, **LEAN), _hip(64, 16, waves_per_eu=4, **LEAN)],
          "cuda": [_cuda(64, 64, 4, 2, **ROOMY), _cuda(128, 64, 8, 3, **ROOMY)]},
    256: {"hip": [_hip(32, 16, num_warps=8, waves_per_eu=4, **LEAN)], "cuda": [_cuda(64, 32, 8, 2, **ROOMY)]},
    "float32": {"hip": [_hip(16, 16, num_warps=8, waves_per_eu=4, **LEAN)], "cuda": [_cuda(16, 16, 8, 1, **ROOMY)]},
}
# dK and dV in one kernel up to this head_dim, which computes P once instead of twice, and in two beyond, where one spills.
FUSE_DKDV_TO = {"hip": 64, "cuda": 128}
_KEY = ["bucket", "HEAD_DIM", "GROUP", "CAUSAL", "WINDOWED"]


def _tuned(kernel, table, key):
    return {block_d: triton.autotune(configs(candidates), key=key, cache_results=True)(kernel) for block_d, candidates in table.items()}


_forward = _tuned(_forward_kernel, FORWARD_CONFIGS, _KEY + ["FIXED_PEAK"])
_dkdv = _tuned(_dkdv_kernel, DKDV_CONFIGS, _KEY + ["DK", "DV"])
_dq = _tuned(_dq_kernel, DQ_CONFIGS, _KEY)


# --- operators -----------------------------------------------------------------------------------------------------


def _block_d(head_dim):
    return max(16, triton.next_power_of_2(head_dim))


def _rows_contiguous(x):
    """A copy where head_dim is strided, or where rows lie so far apart that a tile's 32-bit offsets would not reach."""
    return x if x.stride(3) == 1 and x.stride(1) < 2**24 else x.contiguous()


def _candidates(table, q):
    return table["float32" if q.dtype == torch.float32 else max(64, _block_d(q.shape[-1]))]


def _shared_arguments(q, k, v, causal, window):
    """Arguments that the forward and the backward kernels share, by name."""
    B, n_queries, n_head, head_dim = q.shape
    n_keys, n_kv_head = k.shape[1:3]
    windowed = 0 <= window < n_keys - 1  # a wider one hides nothing
    return dict(
        n_queries=n_queries, n_keys=n_keys, window=window if windowed else n_keys, bucket=triton.next_power_of_2(n_keys),
        GROUP=n_head // n_kv_head, CAUSAL=causal, WINDOWED=windowed, HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim),
        q_b=q.stride(0), q_t=q.stride(1), q_h=q.stride(2), k_b=k.stride(0), k_t=k.stride(1), k_h=k.stride(2),
        v_b=v.stride(0), v_t=v.stride(1), v_h=v.stride(2))


@operator("flash_attention")
def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, scale: float, bounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = map(_rows_contiguous, (q, k, v))
    B, n_queries, n_head, head_dim = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, n_head, n_queries), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    with torch.cuda.device_of(q):
        _candidates(_forward, q)[lambda meta: (triton.cdiv(n_queries, meta["BLOCK_M"]) * B * n_head,)](
            q, k, v, o, lse, n_head=n_head, scale=scale * LOG2E, FIXED_PEAK=bounded, **_shared_arguments(q, k, v, causal, window))
    return o, lse


@_flash_attention.register_fake
def _(q, k, v, causal, window, scale, bounded=False):
    B, n_queries, n_head, _ = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    return o, q.new_empty((B, n_head, n_queries), dtype=torch.float32)


@operator("flash_attention_backward")
def _flash_attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    causal: bool, window: int, scale: float, needs_dq: bool, needs_dk: bool, needs_dv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; one that is not needed is an empty tensor."""
    do, q, k, v = map(_rows_contiguous, (do, q, k, v))
    B, n_queries, n_head, head_dim = q.shape
    n_keys, n_kv_head = k.shape[1:3]
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for x, needed in ((q, needs_dq), (k, needs_dk), (v, needs_dv)))
    if o.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    n_padded = triton.cdiv(n_queries, PADDED_TO) * PADDED_TO
    rows = torch.empty((2, B, n_head, n_padded), dtype=torch.float32, device=q.device)  # lse, delta
    shared = _shared_arguments(q, k, v, causal, window)
    shared.update(n_padded=n_padded, do_b=do.stride(0), do_t=do.stride(1), do_h=do.stride(2), scale=scale, scale_log2=scale * LOG2E)
    with torch.cuda.device_of(q):
        _delta_kernel[(n_padded // DELTA_ROWS * B * n_head,)](
            o, do, lse, rows, n_queries, n_padded, n_head, B * n_head, do.stride(0), do.stride(1), do.stride(2),
            HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim), BLOCK_M=DELTA_ROWS, num_warps=4)
        passes = [(needs_dk, needs_dv)]
        if _block_d(head_dim) > FUSE_DKDV_TO[BACKEND]:
            passes = [(False, needs_dv), (needs_dk, False)]
        for needs_dk, needs_dv in passes:
            if needs_dk or needs_dv:
                _candidates(_dkdv, q)[lambda meta: (triton.cdiv(n_keys, meta["BLOCK_N"]) * B * n_kv_head,)](
                    q, k, v, do, rows[0], rows[1], dk, dv, n_kv_head=n_kv_head, DK=needs_dk, DV=needs_dv, **shared)
        if needs_dq:
            _candidates(_dq, q)[lambda meta: (triton.cdiv(n_queries, meta["BLOCK_M"]) * B * n_head,)](
                q, k, v, do, rows[0], rows[1], dq, n_head=n_head, **shared)
    return dq, dk, dv


@_flash_attention_backward.register_fake
def _(do, q, k, v, o, lse, causal, window, scale, needs_dq, needs_dk, needs_dv):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)
        for x, needed in ((q, needs_dq), (k, needs_dk), (v, needs_dv)))


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.window, ctx.scale, _ = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, lse)


def _backward(ctx, do, _):
    needs = ctx.needs_input_grad[:3]
    if do is None or not any(needs):
        return (None,) * 7
    grads = _flash_attention_backward(do, *ctx.saved_tensors, ctx.causal, ctx.window, ctx.scale, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs)), None, None, None, None


differentiable("flash_attention", _flash_attention, _flash_attention_backward, _backward, _setup_context)


# --- public --------------------------------------------------------------------------------------------------------


def _check(q, k, v, causal, window, scale):
    """The scale, after ValueError for what is not supported."""
    if not q.ndim == k.ndim == v.ndim == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"flash_attention: q, k, v must be (B, T, heads, head_dim), got {shapes}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"flash_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must have one shape, "
            "and q their batch size and head_dim")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"flash_attention: {q.shape[2]} query heads over {k.shape[2]} KV heads; n_head must be a multiple of n_kv_head")
    if q.shape[3] % 8 or not 16 <= q.shape[3] <= 256:
        raise ValueError(f"flash_attention: head_dim {q.shape[3]} is not supported; use {HEAD_DIMS}")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"flash_attention: causal with {q.shape[1]} queries and {k.shape[1]} keys is ambiguous; it needs as many of each")
    if k.shape[1] == 0 and q.shape[1] != 0:
        raise ValueError("flash_attention: no keys to attend to")
    if window is not None and (not causal or window < 0):
        raise ValueError(f"flash_attention: window {window} with causal={causal}; a window is at least 0 and needs causal=True")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not 0 < scale <= MAX_SCALE:
        raise ValueError(f"flash_attention: scale {scale} is not supported; it must be positive and at most {MAX_SCALE:g}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"flash_attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must have one dtype")
    return scale


def flash_attention(q, k, v, causal=True, window=None, scale=None, bounded=False):
    """Attention of q (B, T, n_head, head_dim) over k and v (B, T, n_kv_head, head_dim), as contiguous (B, T, n_head, head_dim).

    `causal`: query i sees keys j ≤ i. `window`: only keys i - window ≤ j ≤ i. Without causal, k and v may have a length of
    their own. `scale` is 1/√head_dim if None. n_head is a multiple of n_kv_head: query head h reads KV head h // (n_head // n_kv_head).
    `bounded`: your word that no score leaves ±60, as those of normed q and k never do (|q·k| / √head_dim ≤ √head_dim): then no running
    maximum is kept, which is faster. Not far beyond ±60 results are not finite or zero. Has an effect in bfloat16 alone.
    float32, float16 or bfloat16 (under autocast all are cast to its dtype); head_dim a multiple of 8 from 16 to 256.
    Any strides, also a packed qkv's views, as long as head_dim is contiguous; otherwise that tensor is copied.
    Differentiable once in q, k and v. `ValueError` for anything else.
    """
    require_device("flash_attention", q, k, v)
    require_float("flash_attention", q, k, v)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    scale = _check(q, k, v, causal, window, scale)
    bounded = bounded and q.dtype == torch.bfloat16
    return _flash_attention(q, k, v, causal, -1 if window is None else window, scale, bounded)[0]


def flash_attention_ref(q, k, v, causal=True, window=None, scale=None):
    """What `flash_attention` computes, in plain PyTorch and in the inputs' dtype: the definition, with T × T scores."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))  # (B, n_head, T, head_dim)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    distance = torch.arange(q.shape[-2], device=q.device)[:, None] - torch.arange(k.shape[-2], device=q.device)
    if causal:
        seen = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)

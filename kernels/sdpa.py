"""A drop-in for `torch.nn.functional.scaled_dot_product_attention` that uses `flash_attention` where that computes the same thing.

Same arguments, shapes and results; whatever the kernel does not do (masks, dropout, float32, the CPU, odd head sizes, causal
attention of unequal lengths) goes to torch unchanged, errors included: never a silently different number.
"""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # F's own name may be given to `sdpa` below

from ._common import INTERPRETED, has_tangent
from .attention import MAX_SCALE, flash_attention

# A few queries over many keys, as in decoding, are a matrix-vector product: torch splits the keys over the GPU, the kernel does not.
MIN_QUERIES = 16


def _kernel_can(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    tensors = query, key, value
    if attn_mask is not None or dropout_p != 0.0 or any(type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested for x in tensors):
        return False
    device = query.device
    if key.device != device or value.device != device or not (device.type == "cuda" or INTERPRETED and device.type == "cpu"):
        return False
    if has_tangent(*tensors) or not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return False  # torch.func's transforms
    dtypes = {x.dtype for x in tensors}
    if torch.is_autocast_enabled(device.type) and dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        dtypes = {torch.get_autocast_dtype(device.type)}  # torch casts, then attends; it leaves float64 as it is
    if dtypes not in ({torch.float16}, {torch.bfloat16}) or not query.ndim == key.ndim == value.ndim == 4:
        return False
    (B, n_head, n_queries, head_dim), (n_kv_head, n_keys) = query.shape, key.shape[1:3]
    if key.shape != value.shape or key.shape[0] != B or key.shape[3] != head_dim or head_dim % 8 or not 16 <= head_dim <= 256:
        return False
    if n_kv_head == 0 or n_head % n_kv_head or n_head != n_kv_head and not enable_gqa:
        return False
    if B == 0 or n_queries < MIN_QUERIES or n_keys == 0 or is_causal and n_queries != n_keys:
        return False
    return scale is None or 0 < scale <= MAX_SCALE


def sdpa_ref(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What torch's function defines, by products and a softmax in float32 (of float64 inputs, in float64): no kernel of torch's runs."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    scores = query @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.dropout(scores.softmax(-1).to(value.dtype), dropout_p, dropout_p > 0) @ value


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention of query (B, n_head, Tq, head_dim) over key and value (B, n_kv_head, Tk, head_dim), as torch's function of this kind.

    The kernel takes float16 and bfloat16 (also by autocast) on a GPU, without mask or dropout, head_dim a multiple of 8 from 16 to 256,
    at least 16 queries, grouped KV heads with `enable_gqa`, and `is_causal` with Tq = Tk; torch takes the rest.
    Like torch's flash backend it returns a transposed view of (B, Tq, n_head, head_dim) and is differentiable once.
    """
    if _kernel_can(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        out = flash_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=is_causal, scale=scale)
        return out.transpose(1, 2)
    return torch_sdpa(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

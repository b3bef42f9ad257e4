"""Fused Triton kernels that train small GPTs: forward and backward, for AMD's gfx1151 first, for NVIDIA too. README.md shows their use."""

from . import layers
from .attention import flash_attention, flash_attention_ref
from .cross_entropy import linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, softcap_cross_entropy, softcap_cross_entropy_ref
from .fusion import Fusion, explain, fuse
from .gated import geglu, geglu_chunked, geglu_chunked_ref, geglu_ref, relu_squared, relu_squared_ref, swiglu, swiglu_ref
from .linear import WEIGHT_GRADIENT, linear, linear_ref
from .mlp import add_norm_mlp, add_norm_mlp_ref
from .norm_linear import add_norm_linear, add_norm_linear_ref, residual_mix_norm_linear, residual_mix_norm_linear_ref
from .qk_norm_rope import qk_norm_rope, qk_norm_rope_ref
from .qkv import gate_columns, qkv_norm_rope, qkv_norm_rope_ref
from .residual_mix import residual_mix_norm, residual_mix_norm_ref
from .rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from .sdpa import sdpa, sdpa_ref

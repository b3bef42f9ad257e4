"""Drop-in forwards for modules of other people's models: what `kernelize` puts in place of theirs.

Each class is a forward and nothing else: no constructor, no state, no other methods. It runs with the attributes of the
module that it is put into, whose parameters and checkpoint keep their names. Without that tool the same thing is one line:

    module.forward = types.MethodType(RMSNorm.forward, module)
"""

import torch
from torch import nn

from .gated import geglu_chunked, swiglu
from .rms_norm import rms_norm


class RMSNorm(nn.Module):
    """For LlamaRMSNorm and its like (`weight`, `variance_epsilon`) and for `nn.RMSNorm` over one dimension (`weight`, `eps`, or None).

    Multiplies by `weight` itself: not for norms that multiply by `1 + weight` (Gemma).
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if len(getattr(self, "normalized_shape", (0,))) != 1:
            raise ValueError(f"RMSNorm: the module normalizes {self.normalized_shape}; this layer the last dimension alone")
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return rms_norm(hidden_states, self.weight, torch.finfo(torch.float32).eps if eps is None else eps)  # torch's, in bfloat16 too


class SwiGLU(nn.Module):
    """For LlamaMLP and its like: `down_proj(silu(gate_proj(x)) * up_proj(x))`. ValueError if the module's `act_fn` is not SiLU."""

    has_backward = True
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "act_fn") and "SiLU" not in type(self.act_fn).__name__:
            raise ValueError(f"SwiGLU: the module's act_fn is {self.act_fn}; this layer computes SiLU")
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GEGLU(nn.Module):
    """For diffusers' GEGLU: `proj` to twice the width, whose second half is the gate, exact GELU."""

    has_backward = True
    can_torch_compile = True

    proj: nn.Module

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return geglu_chunked(self.proj(hidden_states))

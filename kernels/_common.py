"""What every operation needs: which backend Triton compiles for, and one wording for unsupported input."""

import os

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix

# Decided at import, without touching a device: tuning candidates are lists by backend, and an option of one backend
# (AMD's waves_per_eu) never reaches the other.
BACKEND = "hip" if torch.version.hip else "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def configs(candidates):
    """The tuning candidates for this machine's backend from `{"hip": [...], "cuda": [...]}`; the first alone where nothing can be timed."""
    return candidates[BACKEND][:1] if INTERPRETED else candidates[BACKEND]


def has_tangent(*tensors):
    """Whether forward-mode differentiation is under way with one of them: the operators have no rule for it and would give zeros."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def forbid_forward_mode(name, *tensors):
    if has_tangent(*tensors):
        raise RuntimeError(f"{name}: forward-mode differentiation is not supported; use {name}_ref")


def require_device(name, *tensors):
    """`ValueError` unless all tensors are on one device that Triton can run on; `RuntimeError` for forward-mode differentiation."""
    forbid_forward_mode(name, *tensors)
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on different devices {sorted(map(str, devices))}; move them to one")
    device = devices.pop()
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"{name}: runs on a GPU, got tensors on {device}; use {name}_ref, or TRITON_INTERPRET=1 to debug")


def require_float(name, *tensors):
    """`ValueError` unless every tensor is float32, float16 or bfloat16."""
    for t in tensors:
        if t is not None and t.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{name}: dtype {t.dtype} is not supported; use float32, float16 or bfloat16")


def operator(name):
    """A decorator: the function becomes an operator of this package, for torch.ops and torch.compile. It writes into none of its inputs."""
    return torch.library.custom_op(add_op_namespace_prefix(name), mutates_args=())


def differentiable(name, op, backward_op, backward, save):
    """`op` differentiates by `backward`(ctx, *grads) from what `save`(ctx, inputs, output) kept; `backward_op` itself has no gradient."""
    op.register_autograd(backward, setup_context=save)
    forbid_double_backward(name, backward_op)


def forbid_double_backward(name, backward_op):
    """Let the gradient of a gradient fail with the operation's name instead of torch's "not implemented for …_backward"."""

    def refuse(ctx, *grads):
        raise RuntimeError(f"{name}: double backward is not supported; use {name}_ref for gradients of gradients")

    backward_op.register_autograd(refuse)


def as_rows(x, tile_rows=1):
    """`(..., N)` as `(rows, N)` with adjacent columns; copied only where the strides leave no other way.

    Rows of a tile are addressed by int32 offsets from its first row's int64 base, hence the limit on their stride.
    """
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 and (tile_rows == 1 or tile_rows * x.stride(0) < 2**31) else x.contiguous()

"""The drop-ins against the modules that they replace, written as their libraries write them: same parameters, outputs and gradients."""

import inspect
import types

import pytest
import torch
from precision import assert_close_to_reference
from torch import nn

from kernels.layers import GEGLU, RMSNorm, SwiGLU


class LlamaRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float64 if dtype == torch.float64 else torch.float32)
        hidden_states = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class LlamaMLP(nn.Module):
    def __init__(self, width, inner, act_fn=None):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DiffusersGEGLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.proj = nn.Linear(width, inner * 2)

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states, gate = self.proj(hidden_states).chunk(2, -1)
        return hidden_states * nn.functional.gelu(gate)


CASES = {
    "LlamaRMSNorm": (RMSNorm, lambda: LlamaRMSNorm(64), {"weight"}),
    "nn.RMSNorm": (RMSNorm, lambda: nn.RMSNorm(64, eps=1e-5), {"weight"}),
    "nn.RMSNorm, default eps": (RMSNorm, lambda: nn.RMSNorm(64), {"weight"}),
    "nn.RMSNorm, no weight": (RMSNorm, lambda: nn.RMSNorm(64, elementwise_affine=False), set()),
    "LlamaMLP": (SwiGLU, lambda: LlamaMLP(64, 96), {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}),
    "diffusers' GEGLU": (GEGLU, lambda: DiffusersGEGLU(64, 96), {"proj.weight", "proj.bias"}),
}


def put_into(layer, module):
    module.forward = types.MethodType(layer.forward, module)
    return module


def results(module, x, dy):
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_the_module_it_replaces(name, dtype, device):
    layer, make, parameters = CASES[name]
    torch.manual_seed(0)
    module = make().to(device, dtype)
    assert {n for n, _ in module.named_parameters()} == parameters
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(3, 5, 64, device=device, dtype=dtype)
    dy = torch.randn_like(module(x))
    low = results(module, x, dy)
    exact_module = make().to(device, torch.float64)
    exact_module.load_state_dict(module.state_dict())
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        exact_module.eps = torch.finfo(torch.float32).eps  # what torch takes in bfloat16 too
    exact = results(exact_module, x.double(), dy.double())
    ours = results(put_into(layer, module), x, dy)
    for n, (o, p, e) in enumerate(zip(ours, low, exact)):
        assert_close_to_reference(o, p, e, 3 if n else 2, f"{name}, {'output' if n == 0 else f'gradient {n - 1}'}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_default_eps_of_small_rows(dtype, device):
    """Rows so small that an eps of the dtype's own, 0.0078 in bfloat16, would halve them."""
    module = nn.RMSNorm(64).to(device, dtype)
    x = (torch.randn(4, 64, device=device) * 0.05).to(dtype)
    exact = nn.RMSNorm(64, eps=torch.finfo(torch.float32).eps).to(device, torch.float64)(x.double())
    assert_close_to_reference(put_into(RMSNorm, nn.RMSNorm(64).to(device, dtype))(x), module(x), exact, 2, "small rows")


def test_norm_over_two_dimensions_is_refused(device):
    module = put_into(RMSNorm, nn.RMSNorm((2, 8), elementwise_affine=False).to(device))
    with pytest.raises(ValueError, match="normalizes"):
        module(torch.randn(4, 2, 8, device=device))


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_graph_breaks(name, device):
    layer, make, _ = CASES[name]
    module = put_into(layer, make().to(device))
    x = torch.randn(4, 64, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [RMSNorm, SwiGLU, GEGLU])
def test_is_a_stateless_forward(layer):
    """What PyPI's kernels package demands of a layer before it puts it into a model."""
    assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
    extra = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert extra == {"can_torch_compile", "has_backward"} and layer.can_torch_compile and layer.has_backward
    replaced = {RMSNorm: LlamaRMSNorm, SwiGLU: LlamaMLP, GEGLU: DiffusersGEGLU}[layer]
    ours, theirs = (inspect.signature(c.forward).parameters.values() for c in (layer, replaced))
    assert [p.kind for p in ours] == [p.kind for p in theirs]


def test_another_activation_is_refused(device):
    with pytest.raises(ValueError, match="act_fn is GELU"):
        put_into(SwiGLU, LlamaMLP(8, 8, nn.GELU()).to(device))(torch.zeros(2, 8, device=device))

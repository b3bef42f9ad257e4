"""sdpa: torch's numbers wherever torch has an answer, and the kernel only where it computes the same."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from precision import assert_close_to_reference

from kernels.sdpa import sdpa

module = import_module("kernels.sdpa")  # `from kernels import sdpa` is the function


@pytest.fixture
def used(monkeypatch):
    """Appends "kernel" for each call that reaches flash_attention."""
    calls, kernel = [], module.flash_attention

    def spy(*args, **kwargs):
        calls.append("kernel")
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module, "flash_attention", spy)
    return calls


def make(device, dtype=torch.bfloat16, B=1, n_head=4, n_kv_head=4, Tq=50, Tk=50, head_dim=32):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, n_head, Tq, head_dim), (B, n_kv_head, Tk, head_dim), (B, n_kv_head, Tk, head_dim)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def exact(q, k, v, **options):
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)


def math_in_dtype(q, k, v, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize(
    "shape, options",
    [
        (dict(), dict(is_causal=True)),
        (dict(), dict()),
        (dict(n_kv_head=1), dict(is_causal=True, enable_gqa=True)),
        (dict(n_kv_head=2), dict(is_causal=False, enable_gqa=True, scale=0.3)),
        (dict(Tq=20, Tk=70), dict()),
        (dict(Tq=70, Tk=20), dict()),
        (dict(head_dim=40), dict(is_causal=True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_gives_torchs_numbers(shape, options, dtype, device, used):
    results = []
    for function in (sdpa, math_in_dtype, exact):
        leaves = [x.requires_grad_() for x in make(device, dtype, **shape)]
        o = function(*leaves, **options)
        o.float().square().sum().backward()
        results.append([o, *(x.grad for x in leaves)])
    assert used == ["kernel"]
    for name, factor, ours, low, reference in zip(("o", "dq", "dk", "dv"), (2, 3, 3, 3), *results):
        assert_close_to_reference(ours, low, reference, factor, f"{name} {shape} {options}")


@pytest.mark.parametrize(
    "shape, options",
    [
        (dict(dtype=torch.float32), dict(is_causal=True)),
        (dict(), dict(attn_mask="bool")),
        (dict(), dict(attn_mask="float")),
        (dict(Tq=20, Tk=70), dict(is_causal=True)),
        (dict(Tq=70, Tk=20), dict(is_causal=True)),
        (dict(Tq=1, Tk=70), dict()),
        (dict(head_dim=20), dict(is_causal=True)),
        (dict(head_dim=8), dict()),
        (dict(), dict(scale=-1.0)),
        (dict(), dict(scale=0.0)),
        (dict(B=0), dict()),
        (dict(n_kv_head=2, dtype=torch.float32), dict(enable_gqa=True)),
    ],
)
def test_the_rest_goes_to_torch(shape, options, device, used):
    inputs = make(device, **shape)
    mask = options.get("attn_mask")
    if mask:
        seen = torch.rand(50, 50, device=device) > 0.3
        seen[:, 0] = True
        options = dict(attn_mask=seen if mask == "bool" else torch.randn(50, 50, device=device, dtype=inputs[0].dtype))
    expected = F.scaled_dot_product_attention(*inputs, **options)
    torch.testing.assert_close(sdpa(*inputs, **options), expected, rtol=0, atol=0, equal_nan=True)  # scale 0 may be NaN in torch's flash
    assert used == []


def test_dropout_goes_to_torch(device, used):
    inputs = make(device)
    torch.manual_seed(0)
    ours = sdpa(*inputs, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(ours, F.scaled_dot_product_attention(*inputs, dropout_p=0.5)) and used == []


def test_three_dimensions_and_another_value_width_go_to_torch(device, used):
    q, k, v = make(device)
    assert torch.equal(sdpa(q[0], k[0], v[0]), F.scaled_dot_product_attention(q[0], k[0], v[0]))
    assert sdpa(q, k, v[..., :16]).shape == (1, 4, 50, 16)
    assert used == []


def test_torchs_errors_stay_torchs(device, used):
    q, k, v = make(device, n_kv_head=2)
    with pytest.raises(RuntimeError):
        sdpa(q, k, v)  # grouped heads without enable_gqa
    with pytest.raises((RuntimeError, ValueError)):
        sdpa(q, k, v.float(), enable_gqa=True)
    assert used == []


def test_autocast(device, used):
    inputs = make(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        ours = sdpa(*inputs, is_causal=True)
    assert ours.dtype == torch.bfloat16 and used == ["kernel"]
    assert torch.equal(ours, sdpa(*(x.bfloat16() for x in inputs), is_causal=True))


def test_strided_inputs(device, used):
    """As models call it: views of (B, T, heads, head_dim), and one packed projection."""
    packed = torch.randn(2, 50, 3, 4, 32, device=device, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    assert torch.equal(sdpa(q, k, v), sdpa(*(x.contiguous() for x in (q, k, v))))
    assert used == ["kernel"] * 2


def test_compiles(device):
    torch._dynamo.reset()
    inputs = make(device, n_kv_head=2)
    function = torch.compile(lambda *x: sdpa(*x, is_causal=True, enable_gqa=True) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(*inputs), sdpa(*inputs, is_causal=True, enable_gqa=True) * 2)
    function = torch.compile(
        lambda *x: sdpa(*x, attn_mask=torch.ones(50, 50, dtype=torch.bool, device=device), enable_gqa=True),
        backend="aot_eager",
        fullgraph=True,
    )
    assert function(*inputs).shape == inputs[0].shape


def test_autocast_leaves_float64_to_torch(device):
    q, k, v = (torch.randn(1, 2, 32, 32, device=device, dtype=torch.float64) for _ in "qkv")
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = sdpa(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.float64 and torch.equal(ours, theirs)


def test_transforms_go_to_torch(device):
    """torch.func's gradients and forward-mode tangents: the kernel has no rule for them, and must not give zeros."""
    q, k, v = (torch.randn(1, 2, 32, 32, device=device, dtype=torch.float16) for _ in "qkv")

    def loss(function):
        return lambda q: function(q, k, v, is_causal=True).float().square().sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.func.grad(loss(torch.nn.functional.scaled_dot_product_attention))(q)
        torch.testing.assert_close(torch.func.grad(loss(sdpa))(q), theirs)
        tangent = torch.randn_like(q)
        ours, theirs = (torch.func.jvp(loss(f), (q,), (tangent,))[1] for f in (sdpa, torch.nn.functional.scaled_dot_product_attention))
    assert theirs.abs() > 0
    torch.testing.assert_close(ours, theirs)

"""Gates and relu²: numbers against float64, and how they behave as operators."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once
from precision import assert_close_to_reference

from kernels import gated
from kernels.gated import geglu, geglu_chunked, geglu_chunked_ref, geglu_ref, relu_squared, relu_squared_ref, swiglu, swiglu_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TWO = {
    "swiglu": (swiglu, swiglu_ref),
    **{f"geglu {a}": (partial(geglu, approximate=a), partial(geglu_ref, approximate=a)) for a in ("none", "tanh")},
}
ONE = {
    "relu_squared": (relu_squared, relu_squared_ref),
    **{f"geglu_chunked {a}": (partial(geglu_chunked, approximate=a), partial(geglu_chunked_ref, approximate=a)) for a in ("none", "tanh")},
}
ALL = {**{name: (2, *fs) for name, fs in TWO.items()}, **{name: (1, *fs) for name, fs in ONE.items()}}


def values(shape, dtype, device, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device=device, dtype=dtype)


def results(f, inputs, dy):
    inputs = [i.detach().requires_grad_() for i in inputs]
    y = f(*inputs)
    return [y.detach()], torch.autograd.grad(y, inputs, dy)


def check(f, ref, inputs, dy, what=""):
    ours, low = results(f, inputs, dy), results(ref, inputs, dy)
    exact = results(ref, [i.double() for i in inputs], dy.double())
    for kind, factor in ((0, 2), (1, 3)):
        for n, (o, p, e) in enumerate(zip(ours[kind], low[kind], exact[kind])):
            assert_close_to_reference(o, p, e, factor, f"{what} {('output', 'gradient')[kind]} {n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 256), (3, 5, 62), (2, 3000), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_values(name, shape, dtype, device, poison_empty):
    count, f, ref = ALL[name]
    dy_shape = (*shape[:-1], shape[-1] // 2) if "chunked" in name else shape
    check(f, ref, [values(shape, dtype, device, i) for i in range(count)], values(dy_shape, dtype, device, 5), name)


@pytest.mark.parametrize("name", ALL)
def test_far_from_zero(name, device):
    """Large arguments saturate: no inf·0, in the derivative either; NaN stays NaN."""
    count, f, ref = ALL[name]
    g = torch.tensor([-1e4, -300, -90, -20, -5, -0.0, 0.0, 5, 20, 90, 300, 1e4], device=device)
    inputs = [torch.cat([torch.full_like(g, 0.5), g])] if "chunked" in name else [g, torch.full_like(g, 0.5)][:count]
    y, dx = results(f, inputs, torch.ones(12, device=device))
    exact_y, exact_dx = results(ref, inputs, torch.ones(12, device=device))
    for a, b in zip([*y, *dx], [*exact_y, *exact_dx]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.isnan(f(*(torch.full((4,), float("nan"), device=device) for _ in range(count)))).all()


@pytest.mark.parametrize("name", ALL)
def test_strides(name, device):
    """Halves of a packed tensor, transposes, broadcasts; gradients expanded, concatenated and transposed."""
    count, f, ref = ALL[name]
    packed = values((6, 2, 64), torch.float32, device)
    for view in (
        lambda t: t[:, 1],
        lambda t: t[::2, 0],
        lambda t: t[:, 0, ::2],
        lambda t: t[:, 0].t()[:32],
        lambda t: t[:1, 0].expand(5, 64),
    ):
        inputs = [view(packed), view(packed + 1)][:count]
        y = ref(*inputs)
        check(f, ref, inputs, values(y.shape, torch.float32, device, 3), name)
        check(f, ref, inputs, values(y.shape[::-1], torch.float32, device, 3).t(), name)
        check(f, ref, inputs, torch.ones((), device=device).expand(y.shape), name)
    x = packed[:, 0].clone().requires_grad_()
    ours, exact = (torch.autograd.grad(torch.cat([g(*[x] * count), x], 1).square().sum(), x)[0] for g in (f, ref))
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_written_into_inputs_or_gradients(name, device):
    count, f, _ = ALL[name]
    x = values((4, 64), torch.float32, device).requires_grad_()
    y = f(*[x] * count)
    dy = values(y.shape, torch.float32, device, 1)
    kept = [t.detach().clone() for t in (x, y, dy)]
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(first, second) and all(map(torch.equal, kept, (x, y, dy)))


def test_a_frozen_half_costs_nothing(device, monkeypatch):
    asked = []
    original = gated.gated_backward_op
    monkeypatch.setattr(gated, "gated_backward_op", lambda *a: (asked.append(a[-2:]), original(*a))[1])
    gate, up = values((4, 64), torch.float32, device), values((4, 64), torch.float32, device, 1)
    for trained, frozen, wanted in ((gate, up, (True, False)), (up, gate, (False, True))):
        trained.requires_grad_().grad = None
        frozen.requires_grad_(False).grad = None
        swiglu(gate, up).sum().backward()
        assert asked[-1] == wanted and frozen.grad is None
        (exact,) = torch.autograd.grad(swiglu_ref(gate, up).sum(), trained)
        torch.testing.assert_close(trained.grad, exact)


@pytest.mark.parametrize("name", ALL)
def test_modes(name, device):
    count, f, ref = ALL[name]
    x = values((4, 64), torch.float32, device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not f(*[x] * count).requires_grad
    assert not saved
    with torch.autocast(device, torch.bfloat16):
        assert f(*[x.bfloat16()] * count).dtype == torch.bfloat16
    (dx,) = torch.autograd.grad(f(*[x] * count).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()
    empty = torch.empty(0, 8, device=device, requires_grad=True)
    f(*[empty] * count).sum().backward()
    assert empty.grad.shape == (0, 8)
    torch.testing.assert_close(f(*[x[0]] * count), ref(*[x[0]] * count))  # one dimension


def test_unsupported_input(device):
    x = torch.zeros(3, 8, device=device)
    for call, message in [
        (lambda: swiglu(x, x[:1]), "one shape"),
        (lambda: geglu(x, x.bfloat16()), "dtype"),
        (lambda: geglu(x, x, "fast"), "'none' or 'tanh'"),
        (lambda: geglu_chunked(x[:, :7]), "even"),
        (lambda: geglu_chunked(x, "fast"), "fast"),
        (lambda: relu_squared(x.double()), "float64"),
        (lambda: geglu_chunked(x[0, 0]), "even"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_opcheck(device):
    g, u, dy = (values((4, 64), torch.float32, device, i) for i in range(3))
    torch.library.opcheck(gated.gated_op, (g.requires_grad_(), u.requires_grad_(), "silu"))
    torch.library.opcheck(gated.gated_chunked_op, (g, "gelu_tanh"))
    torch.library.opcheck(gated.relu_squared_op, (g,))
    g, u = g.detach(), u.detach()
    torch.library.opcheck(gated.gated_backward_op, (dy, g, u, "gelu", True, False))
    torch.library.opcheck(gated.gated_chunked_backward_op, (dy[:, :32], g, "gelu"))
    for saved in ("relu_squared", "relu_squared_from_output"):
        torch.library.opcheck(gated.relu_squared_backward_op, (dy, g.square(), saved))


@pytest.mark.parametrize("name", ALL)
def test_gradcheck(name, device):
    """In float32, which is what the kernels take, hence the wide step and tolerance."""
    count, f, _ = ALL[name]
    inputs = [values((2, 4), torch.float32, device, i, 1.0).requires_grad_() for i in range(count)]
    assert torch.autograd.gradcheck(f, inputs, eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0)


def test_compiles_once_without_graph_breaks(device):
    def step(g, u):
        return (swiglu(g, u) + geglu(g, u, "tanh") + relu_squared(g) + geglu_chunked(torch.cat([u, g], -1))).square().mean()

    assert_compiles_once(
        step, lambda seed: [values((4, 64), torch.float32, device, seed + i).requires_grad_() for i in range(2)], [], device
    )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    count, f, ref = ALL[data.draw(st.sampled_from(sorted(ALL)))]
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2)) + [2 * data.draw(st.integers(1, 100))]
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(len(shape))))

    def strided(seed):
        laid = values([2 * shape[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute([order.index(i) for i in range(len(shape))])

    inputs = [strided(i) for i in range(count)]
    check(f, ref, inputs, values(ref(*inputs).shape, dtype, device, 5), f"{shape} {dtype} {order}")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32768, 2048), (2048, 8192), (1000, 5461 * 2)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_real_sizes(name, shape, device, poison_empty):
    count, f, ref = ALL[name]
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
    check(f, ref, inputs, torch.randn(ref(*inputs).shape, device=device, dtype=torch.bfloat16), name)
    first, second = (results(f, inputs, inputs[0][:, : ref(*inputs).shape[1]]) for _ in range(2))
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))


@pytest.mark.gpu
@pytest.mark.memory(24)
def test_more_than_two_billion_elements(device):
    x = torch.randn(2**31 + 4096 + 24, device=device, dtype=torch.bfloat16)
    assert torch.equal(relu_squared(x)[-5000:], relu_squared(x[-5000:].clone()))
    x = x[: 2**31 + 4096].view(2, -1)
    assert torch.equal(
        geglu_chunked(x)[:, -5000:], geglu_chunked(torch.cat([x[:, x.shape[1] // 2 - 5000 : x.shape[1] // 2], x[:, -5000:]], 1))
    )

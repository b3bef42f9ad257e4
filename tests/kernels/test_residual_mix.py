"""The mix of residual stream and embedding with its norm: numbers against float64, and how it behaves as an operator."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, values
from precision import assert_close_to_reference

import kernels.residual_mix as module
from kernels.residual_mix import residual_mix_norm, residual_mix_norm_backward_op, residual_mix_norm_op, residual_mix_norm_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def lambdas(device, resid=0.9, embed=0.1):
    return torch.tensor(resid, device=device), torch.tensor(embed, device=device)


def results(f, inputs, gradients):
    inputs = [i.detach().requires_grad_() for i in inputs]
    outputs = f(*inputs)
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(gradients, outputs)])


def after(f):
    """The same function with the update as its last argument by position."""
    return lambda x, x0, resid, embed, update=None: f(x, x0, resid, embed, update=update)


def check(x, x0, resid, embed, gradients, what="", update=None):
    inputs = [x, x0, resid, embed, *([] if update is None else [update])]
    ours, low = (results(after(f), inputs, gradients) for f in (residual_mix_norm, residual_mix_norm_ref))
    exact = results(after(residual_mix_norm_ref), [i.double() for i in inputs], gradients)
    for kind, factor in ((0, 2), (1, 3)):
        for n, (o, p, e) in enumerate(zip(ours[kind][:2], low[kind], exact[kind])):
            assert_close_to_reference(o, p, e, factor, f"{what} {('output', 'gradient')[kind]} {n}")
    if update is not None:
        assert torch.equal(ours[1][4], ours[1][0].to(update.dtype)), "the update's gradient is that of the stream that it is added to"
        x = (x + update).to(x.dtype)
    # The lambdas' gradients are sums, over all elements, of the gradient of mixed times x or x0: single numbers that mostly cancel.
    # So the error allowed is that of float32 in such a sum, and one rounding of each element of mixed, which is random.
    for n, (o, p, e, t) in enumerate(zip(ours[1][2:4], low[1][2:4], exact[1][2:4], (x, x0))):
        terms = exact[1][0] / resid * t
        allowed = max(3 * (p - e).abs(), 2**-23 * terms.abs().sum() + torch.finfo(x.dtype).eps * terms.norm())
        assert o.dtype == p.dtype and (o - e).abs() <= allowed, f"{what} gradient of lambda {n}: {o} for {e}, allowed {allowed}"
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 512), (5, 64), (3, 1000), (1, 77), (2, 5000)], ids=str)
def test_values(shape, dtype, device, poison_empty):
    x, x0, dmixed, dy = (values(shape, dtype, device, i) for i in range(4))
    (mixed, y), (dx, dx0, dresid, dembed) = check(x, x0, *lambdas(device), (dmixed, dy), str(shape))
    assert {t.dtype for t in (mixed, y, dx, dx0)} == {dtype} and dresid.dtype == dembed.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 512), (3, 1000), (1, 77)], ids=str)
def test_after_an_update(shape, dtype, device, poison_empty):
    x, x0, dmixed, dy, update = (values(shape, dtype, device, i) for i in range(5))
    outputs, gradients = check(x, x0, *lambdas(device), (dmixed, dy), f"{shape} {dtype}", update)
    once = results(residual_mix_norm, (x + update, x0, *lambdas(device)), (dmixed, dy))
    # The sum is rounded as it would be in memory. A compiler may contract other operations of one of the two kernels into FMAs: then
    # float32's last bit differs, and hardly ever what it is rounded to; a sum that is not rounded would show in a third of the elements.
    for name, ours, expected in zip(("mixed", "y", "dx", "dx0"), (*outputs, *gradients), (*once[0], *once[1])):
        torch.testing.assert_close(ours, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert dtype == torch.float32 or (ours != expected).float().mean() < 0.02, name
    torch.testing.assert_close(gradients[2:4], once[1][2:4], rtol=1e-3, atol=1e-3)


def test_an_update_of_a_narrower_dtype(device):
    """As autocast makes one for a stream in float32."""
    x, x0, dmixed, dy = (values((4, 64), torch.float32, device, i) for i in range(4))
    _, gradients = check(x, x0, *lambdas(device), (dmixed, dy), "", values((4, 64), torch.bfloat16, device, 4))
    assert gradients[0].dtype == torch.float32 and gradients[4].dtype == torch.bfloat16


def test_strides(device):
    """x0 may be x; slices, transposes and broadcasts; gradients expanded and concatenated."""
    base = values((6, 2, 96), torch.float32, device)
    for x in (base[:, 1], base[::2, 0], base[:, 0, ::2], base[:, 0].t(), base[:1, 0].expand(5, 96)):
        for update in (None, x - 1, values(x.shape[::-1], torch.float32, device, 3).t()):
            check(x, x + 1, *lambdas(device), [values(x.shape, torch.float32, device, i) for i in (1, 2)], "", update)
        check(x, x + 1, *lambdas(device), [torch.ones((), device=device).expand(x.shape), values(x.shape[::-1], torch.float32, device).t()])
    x = base[:, 0].clone().requires_grad_()
    ours, exact = (
        torch.autograd.grad(torch.cat([*f(x, x, *lambdas(device)), x], 1).pow(3).sum(), x)[0]
        for f in (residual_mix_norm, residual_mix_norm_ref)
    )
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_each_has_its_own_stride_beyond_the_first_tile(device):
    x, x0, update, dmixed, dy = (values((40, n), torch.float32, device, n)[:, :96] for n in (96, 97, 113, 131, 150))
    assert len(x) > module.tile(96)[0]
    check(x, x0, *lambdas(device), (dmixed, dy), "", update)


@pytest.mark.parametrize("used", [0, 1])
def test_unused_outputs(used, device):
    inputs = [
        t.requires_grad_() for t in (values((4, 64), torch.float32, device), values((4, 64), torch.float32, device, 1), *lambdas(device))
    ]
    ours, exact = (torch.autograd.grad(f(*inputs)[used].pow(3).sum(), inputs) for f in (residual_mix_norm, residual_mix_norm_ref))
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_frozen_inputs_cost_nothing(device, monkeypatch):
    asked = []
    original = residual_mix_norm_backward_op
    monkeypatch.setattr(module, "residual_mix_norm_backward_op", lambda *a: (asked.append(a[-3:]), original(*a))[1])
    tensors = [values((4, 64), torch.float32, device), values((4, 64), torch.float32, device, 1), *lambdas(device)]
    tensors.append(values((4, 64), torch.float32, device, 2))
    only = [(True, False, False), (False, True, False), (False, False, True), (False, False, True), (True, False, False)]
    for n, wanted in enumerate(only):
        inputs = [t.detach().requires_grad_(i == n) for i, t in enumerate(tensors)]
        ours, exact = (
            torch.autograd.grad(sum(y.pow(3).sum() for y in after(f)(*inputs)), inputs[n])[0]
            for f in (residual_mix_norm, residual_mix_norm_ref)
        )
        assert asked[-1] == wanted
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_into_inputs_or_gradients(device):
    inputs = [
        t.requires_grad_() for t in (values((9, 64), torch.float32, device), values((9, 64), torch.float32, device, 1), *lambdas(device))
    ]
    y = residual_mix_norm(*inputs)
    gradients = [values((9, 64), torch.float32, device, i) for i in (2, 3)]
    kept = [t.detach().clone() for t in (*inputs, *y, *gradients)]
    first = torch.autograd.grad(y, inputs, gradients, retain_graph=True)
    second = torch.autograd.grad(y, inputs, gradients)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, kept, (*inputs, *y, *gradients)))


def test_modes(device):
    x, l = values((4, 64), torch.float32, device).requires_grad_(), lambdas(device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not residual_mix_norm(x, x, *l)[0].requires_grad
    assert not saved
    with torch.autocast(device, torch.bfloat16):
        assert {t.dtype for t in residual_mix_norm(x.bfloat16(), x.bfloat16(), *l)} == {torch.bfloat16}
    (dx,) = torch.autograd.grad(residual_mix_norm(x, x, *l)[1].pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="residual_mix_norm: double backward is not supported"):
        dx.sum().backward()
    empty, resid = torch.empty(0, 8, device=device, requires_grad=True), l[0].requires_grad_()
    sum(y.sum() for y in residual_mix_norm(empty, empty, resid, l[1])).backward()
    assert empty.grad.shape == (0, 8) and resid.grad == 0


def test_unsupported_input(device):
    x, l = torch.zeros(3, 8, device=device), lambdas(device)
    for arguments, message in [
        ((x, x[:1], *l), "one shape"),
        ((x, x.half(), *l), "dtype"),
        ((x.half(), x.half(), *l, 1e-6, x), "update torch.float32.*an update's may be narrower"),
        ((x, x, *l, 1e-6, x[0]), "one shape"),
        ((x, x, *l, 1e-6, x.double()), "float64"),
        ((x, x, *l, 1e-6, x.long()), "int64 is not supported"),
        ((x, x, *l, 1e-6, x.to("meta")), "different devices"),
        ((x.double(), x.double(), *l), "float64"),
        ((x, x, l[0][None], l[1]), "0-D"),
        ((x[:, :0], x[:, :0], *l), "last dimension"),
        ((x[0, 0], x[0, 0], *l), "last dimension"),
        ((torch.zeros(1, 8193, device=device),) * 2 + l, "8193"),
    ]:
        with pytest.raises(ValueError, match=message):
            residual_mix_norm(*arguments)


def test_opcheck(device):
    x, x0, dmixed, dy = (values((4, 64), torch.float32, device, i) for i in range(4))
    l = lambdas(device)
    update = values((4, 64), torch.float32, device, 4)
    torch.library.opcheck(residual_mix_norm_backward_op, (dmixed, dy, x, update, x0, *l, 1e-6, True, True, True))
    torch.library.opcheck(residual_mix_norm_backward_op, (None, dy, x, None, x0, *l, 1e-6, False, False, True))
    x, update, x0, *l = (t.requires_grad_() for t in (x, update, x0, *l))
    for added in (None, update):
        torch.library.opcheck(residual_mix_norm_op, (x, added, x0, *l, 1e-6))


def test_gradcheck(device):
    """In float32, which is what the kernel takes, hence the wide step and tolerance."""
    inputs = [values((3, 6), torch.float32, device), values((3, 6), torch.float32, device, 1), *lambdas(device)]
    inputs.append(values((3, 6), torch.float32, device, 2))
    assert torch.autograd.gradcheck(
        after(residual_mix_norm), [t.requires_grad_() for t in inputs], eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0
    )


def test_compiles_once_without_graph_breaks(device):
    resid, embed = (torch.full((3,), v, device=device, requires_grad=True) for v in (0.9, 0.1))

    def step(x0):  # as a model uses it: element i of a vector of parameters for layer i
        x, update = x0, None
        for i in range(3):
            x, y = residual_mix_norm(x, x0, resid[i], embed[i], update=update)
            update = y.square()
        return (x + update).square().mean()

    assert_compiles_once(step, lambda seed: [values((4, 64), torch.float32, device, seed).requires_grad_()], [resid, embed], device)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2)) + [data.draw(st.integers(4, 200))]
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(len(shape))))

    def strided(seed):
        laid = values([2 * shape[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute([order.index(i) for i in range(len(shape))])

    update = strided(5) if data.draw(st.booleans()) else None
    check(strided(1), strided(2), *lambdas(device), (strided(3), strided(4)), f"{shape} {dtype} {order}", update)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 512), (8, 2048, 768), (1000, 8192)], ids=str)
def test_real_sizes(shape, device, poison_empty):
    x, x0, dmixed, dy, update = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(5))
    check(x, x0, *lambdas(device), (dmixed, dy))
    check(x, x0, *lambdas(device), (dmixed, dy), "", update)
    first, second = (results(after(residual_mix_norm), [x, x0, *lambdas(device), update], (dmixed, dy)) for _ in range(2))
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))

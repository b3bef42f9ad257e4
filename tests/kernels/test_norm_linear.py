"""Residual step, norm and product as one operation: numbers against float64, and how both operators behave."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, values
from precision import assert_close_to_reference

import kernels.norm_linear as module
from kernels.linear import FORMS, WEIGHT_GRADIENT
from kernels.norm_linear import add_norm_linear, add_norm_linear_ref, residual_mix_norm_linear, residual_mix_norm_linear_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def updated(f):
    """The same function with the update after x, as train.py's."""
    return lambda x, update, x0, resid, embed, weight: f(x, x0, resid, embed, weight, update=update)


ALL = {
    "add": (add_norm_linear, add_norm_linear_ref),
    "mix": (residual_mix_norm_linear, residual_mix_norm_linear_ref),
    "mix after an update": (updated(residual_mix_norm_linear), updated(residual_mix_norm_linear_ref)),
}


def inputs_for(which, shape, out, dtype, device):
    """(x, update, weight), (x, x0, lambdas, weight), or (x, update, x0, lambdas, weight)."""
    x, other, weight = values(shape, dtype, device), values(shape, dtype, device, 1), values((out, shape[-1]), dtype, device, 2)
    update = [values(shape, dtype, device, 5)] if which == "mix after an update" else []
    lambdas = [torch.tensor(0.9, device=device), torch.tensor(0.1, device=device)] if which != "add" else []
    return [x, *update, other, *lambdas, weight / shape[-1] ** 0.5]


def results(f, inputs, gradients):
    inputs = [i.detach().requires_grad_() for i in inputs]
    outputs = f(*inputs)
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(gradients, outputs)])


def check(which, inputs, gradients, what=""):
    f, ref = ALL[which]
    ours, low, exact = results(f, inputs, gradients), results(ref, inputs, gradients), results(ref, [i.double() for i in inputs], gradients)
    for kind, factor in ((0, 2), (1, 3)):
        for n, (o, p, e) in enumerate(zip(ours[kind], low[kind], exact[kind])):
            if e.ndim:  # behind it: the sum of squares, the product's sum, and eight roundings of single elements on the way
                additions = 2 * inputs[0].shape[-1] + 8
                assert_close_to_reference(o, p, e, factor, f"{what} {which} {('output', 'gradient')[kind]} {n}", additions)
    if which != "add":  # single numbers that mostly cancel: see test_residual_mix.py
        *streams, resid, _embed, _weight = inputs
        for n, t in ((-3, sum(streams[:-1])), (-2, streams[-1])):
            o, p, e = (r[1][n] for r in (ours, low, exact))
            terms = exact[1][0] / resid * t
            allowed = max(3 * (p - e).abs(), 2**-23 * terms.abs().sum() + torch.finfo(t.dtype).eps * terms.norm())
            assert o.dtype == p.dtype and (o - e).abs() <= allowed, f"{what} gradient of lambda {n}: {o} for {e}, allowed {allowed}"
    return ours


@pytest.mark.parametrize("which", ALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 512, 40), (5, 64, 64), (3, 1000, 17), (77, 1), (2, 3000, 3)], ids=str)
def test_values(shape, dtype, which, device, poison_empty):
    """(77, 1): one row without a batch dimension, a weight of one row."""
    *shape, out = shape
    inputs = inputs_for(which, shape, out, dtype, device)
    (h, y), gradients = check(which, inputs, [values(shape, dtype, device, 3), values((*shape[:-1], out), dtype, device, 4)], str(shape))
    assert h.dtype == y.dtype == dtype and h.is_contiguous() and y.is_contiguous()
    assert [g.dtype for g in gradients] == [i.dtype for i in inputs]


@pytest.mark.parametrize("which", ALL)
def test_is_what_the_three_operations_do(which, device):
    """Against torch's own norm and product, and a gradient by hand for the weight."""
    inputs = inputs_for(which, (2, 5, 96), 24, torch.float32, device)
    *streams, weight = [t for t in inputs if t.ndim]
    h, y = ALL[which][0](*inputs)
    expected = sum(streams) if which == "add" else 0.9 * sum(streams[:-1]) + 0.1 * streams[-1]
    normed = torch.nn.functional.rms_norm(expected, (96,))
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(y, normed @ weight.t(), rtol=1e-5, atol=1e-5)
    dy = values(y.shape, torch.float32, device, 4)
    dweight = results(ALL[which][0], inputs, (torch.zeros_like(h), dy))[1][-1]
    torch.testing.assert_close(dweight, torch.einsum("bto,btn->on", dy, normed), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ALL)
def test_forms_of_the_weight_gradient(which, form, device, monkeypatch):
    used = []
    monkeypatch.setitem(WEIGHT_GRADIENT, (24, 96), (form, None))
    monkeypatch.setitem(FORMS, form, lambda *a, original=FORMS[form]: (used.append(form), original(*a))[1])
    inputs = inputs_for(which, (2, 5, 96), 24, torch.bfloat16, device)
    check(which, inputs, [values((2, 5, n), torch.bfloat16, device, n) for n in (96, 24)])
    assert used == [form]


@pytest.mark.parametrize("which", ALL)
def test_strides(which, device):
    """Slices, transposes and broadcasts; a transposed weight; gradients expanded, transposed and concatenated."""
    base = values((6, 2, 96), torch.float32, device)
    x, *inputs, weight = inputs_for(which, (1, 96), 40, torch.float32, device)
    lambdas, others = [t for t in inputs if not t.ndim], len([t for t in inputs if t.ndim])
    for x in (base[:, 1], base[::2, 0], base[:, 0, ::2], base[:, 0].t(), base[:1, 0].expand(5, 96), base.transpose(0, 1)):
        w = weight[:, : x.shape[-1]].t().contiguous().t()
        inputs = [x, *[x + 1] * others, *lambdas, w]
        h, y = ALL[which][1](*inputs)
        check(which, inputs, [torch.ones((), device=device).expand(h.shape), torch.ones((), device=device).expand(y.shape)])
        check(which, inputs, [values(t.shape[::-1], torch.float32, device, 3).permute(*reversed(range(t.ndim))) for t in (h, y)])
    x, w = base[:, 0].clone().requires_grad_(), weight.clone().requires_grad_()
    ours, exact = (
        torch.autograd.grad(torch.cat([*f(x, *[x] * others, *lambdas, w), x], 1).pow(3).sum(), (x, w)) for f in ALL[which]
    )  # x may be both
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("which", ALL)
def test_unused_outputs(which, used, device):
    inputs = [t.requires_grad_() for t in inputs_for(which, (4, 64), 24, torch.float32, device)]
    ours, exact = (
        torch.autograd.grad(f(*inputs)[used].pow(3).sum(), inputs, allow_unused=True, materialize_grads=True) for f in ALL[which]
    )
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ALL)
def test_frozen_inputs_cost_nothing(which, device, monkeypatch):
    """Each input trained alone: its gradient is right, no other is asked for, and a product that is not needed is not formed."""
    asked, products = [], []
    name = "add_norm_linear_backward_op" if which == "add" else "residual_mix_norm_linear_backward_op"
    for watched, calls in ((name, asked), ("rms_norm_backward_op", products), ("residual_mix_norm_backward_op", products)):
        original = getattr(module, watched)
        monkeypatch.setattr(module, watched, lambda *a, original=original, calls=calls: (calls.append(a), original(*a))[1])
    tensors = inputs_for(which, (4, 64), 24, torch.float32, device)
    last = len(tensors) - 1
    for n in range(len(tensors)):
        asked.clear(), products.clear()
        inputs = [t.detach().requires_grad_(i == n) for i, t in enumerate(tensors)]
        sum(y.pow(3).sum() for y in ALL[which][0](*inputs)).backward()
        (exact,) = torch.autograd.grad(sum(y.pow(3).sum() for y in ALL[which][1](*inputs)), inputs[n])
        flags = (n < 2, n == last) if which == "add" else (n < last - 3, n == last - 3, n in (last - 2, last - 1), n == last)
        assert [a[-len(flags) :] for a in asked] == [flags]
        assert [a[-1] for a in products] == ([] if n == last else [False])  # the norm's backward without the norm; for the weight, neither
        assert all(t.grad is None for i, t in enumerate(inputs) if i != n)
        torch.testing.assert_close(inputs[n].grad, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ALL)
def test_keeps_no_norm_and_writes_into_nothing(which, device):
    inputs = [t.requires_grad_() for t in inputs_for(which, (9, 64), 24, torch.float32, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.data_ptr()), t)[1], lambda t: t):
        outputs = ALL[which][0](*inputs)
    assert set(saved) == {t.data_ptr() for t in ((outputs[0], inputs[-1]) if which == "add" else inputs)}
    gradients = [values(t.shape, torch.float32, device, 5) for t in outputs]
    kept = [t.detach().clone() for t in (*inputs, *outputs, *gradients)]
    first = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, gradients)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, kept, (*inputs, *outputs, *gradients)))


@pytest.mark.parametrize("which", ALL)
def test_modes(which, device):
    f, _ = ALL[which]
    inputs = [t.requires_grad_() for t in inputs_for(which, (4, 64), 24, torch.float32, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not any(y.requires_grad for y in f(*inputs))
    assert not saved
    for used in (0, 1):
        (dx,) = torch.autograd.grad(f(*inputs)[used].pow(3).sum(), inputs[0], create_graph=True)
        if which == "add" and used == 0:
            continue  # h alone is a plain sum, whose gradient is the one that came
        with pytest.raises(RuntimeError, match=f"{'add' if which == 'add' else 'residual_mix'}_norm.*: double backward is not supported"):
            dx.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        f(torch.autograd.forward_ad.make_dual(inputs[0].detach(), inputs[0].detach()), *inputs[1:])
    empty = [t.requires_grad_() for t in inputs_for(which, (2, 0, 64), 24, torch.float32, device)]
    sum(y.sum() for y in f(*empty)).backward()
    assert empty[0].grad.shape == (2, 0, 64) and not any(t.grad.any() for t in empty)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ALL)
def test_autocast_with_a_float32_weight(which, stream, device):
    """The product in bfloat16, h and its gradients in the stream's dtype, the weight's gradient in float32."""
    inputs = inputs_for(which, (2, 9, 96), 40, torch.float32, device)
    inputs[:-1] = (t.to(stream) if t.ndim else t for t in inputs[:-1])
    gradients = [values((2, 9, n), torch.float32, device, n) for n in (96, 40)]
    f, ref = ALL[which]
    with torch.autocast(device, torch.bfloat16):
        ours, low = results(f, inputs, gradients), results(ref, inputs, gradients)
    exact = results(ref, [t.double() for t in inputs], gradients)
    assert [t.dtype for t in ours[0]] == [stream, torch.bfloat16]
    assert [t.dtype for t in ours[1]] == [t.dtype for t in inputs]
    for kind, factor in ((0, 2), (1, 3)):
        for o, p, e in zip(ours[kind], low[kind], exact[kind]):
            if e.ndim:
                assert_close_to_reference(o, p.to(o.dtype), e, factor, f"{which} {stream}")


def test_mixed_dtypes(device):
    """A sum takes the wider dtype, in which the product is computed; each gradient has its input's."""
    x, update, weight = inputs_for("add", (3, 5, 64), 24, torch.float32, device)
    gradients = [torch.ones(3, 5, n, device=device) for n in (64, 24)]
    exact = results(add_norm_linear_ref, [x.double(), update.double(), weight.double()], gradients)
    for dtypes, wide in (
        ((torch.bfloat16, torch.float32, torch.float32), torch.float32),
        ((torch.float32, torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float16, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.bfloat16, torch.float32), torch.bfloat16),
    ):
        inputs = [t.to(dtype) for t, dtype in zip((x, update, weight), dtypes)]
        outputs, dinputs = results(add_norm_linear, inputs, gradients)
        assert [t.dtype for t in outputs] == [wide, wide] and [g.dtype for g in dinputs] == list(dtypes)
        for ours, wanted in zip((*outputs, *dinputs), (*exact[0], *exact[1])):
            assert (ours - wanted).norm() <= 0.02 * wanted.norm()


def test_unsupported_input(device):
    x, weight, l = torch.zeros(3, 8, device=device), torch.zeros(4, 8, device=device), (torch.ones((), device=device),) * 2
    wide, wide_weight = torch.zeros(1, 8193, device=device), torch.zeros(4, 8193, device=device)
    for call, message in [
        (lambda: add_norm_linear(x, x[:1], weight), "one shape"),
        (lambda: add_norm_linear(x, x, weight.t()), r"weight of shape \(8, 4\)"),
        (lambda: add_norm_linear(x, x, weight[0]), r"need \(out, 8\)"),
        (lambda: add_norm_linear(x.double(), x, weight), "float64"),
        (lambda: add_norm_linear(x[0, 0], x[0, 0], weight), "one shape"),
        (lambda: add_norm_linear(wide, wide, wide_weight), "8192"),
        (lambda: residual_mix_norm_linear(x, x.half(), *l, weight), "one dtype"),
        (lambda: residual_mix_norm_linear(x, x, l[0][None], l[1], weight), "0-D"),
        (lambda: residual_mix_norm_linear(x, x, *l, weight.double()), "float64"),
        (lambda: residual_mix_norm_linear(x, x, *l, weight[:, :7]), "need"),
        (lambda: residual_mix_norm_linear(x[:, :0], x[:, :0], *l, weight[:, :0]), "must be 1 to"),
        (lambda: residual_mix_norm_linear(x, x, *l, weight, update=x[:2]), "one shape"),
        (lambda: add_norm_linear(x, x, weight.to("meta")), "different devices"),
        (lambda: residual_mix_norm_linear(x, x, *l, weight.to("meta")), "different devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_opcheck(device):
    x, update, weight = inputs_for("add", (2, 3, 64), 24, torch.float32, device)
    dh, dy, l = (
        values((2, 3, 64), torch.float32, device, 3),
        values((2, 3, 24), torch.float32, device, 4),
        inputs_for("mix", (1,), 1, torch.float32, device)[2:4],
    )
    transposed = weight.t().contiguous().t()
    check = torch.library.opcheck
    for gradient, w, *needs in ((dh, weight, True, True), (None, transposed, True, False), (dh, transposed, False, True)):
        check(module.add_norm_linear_backward_op, (dy, gradient, x, w, 1e-6, *needs))
    check(module.add_norm_linear_backward_op, (dy.bfloat16().transpose(0, 1).contiguous().transpose(0, 1), dh, x, weight, 1e-6, True, True))
    x0 = values((2, 3, 64), torch.float32, device, 6)
    for gradient, added, w, *needs in (
        (dh, None, weight, *[True] * 4),
        (None, update, transposed, False, True, False, True),
        (dh, update, weight, *[False] * 3, True),
    ):
        check(module.residual_mix_norm_linear_backward_op, (dy, gradient, x, added, x0, *l, w, 1e-6, *needs))
    x, update, x0, weight, *l = (t.requires_grad_() for t in (x, update, x0, weight, *l))
    for dtype, added in ((torch.float32, update), (torch.bfloat16, None)):
        check(module.add_norm_linear_op, (x, update, weight, 1e-6, dtype))
        check(module.residual_mix_norm_linear_op, (x, added, x0, *l, weight, 1e-6, dtype))


@pytest.mark.parametrize("which", ALL)
def test_gradcheck(which, device):
    """In float32, which is what the kernels take, hence the wide step and tolerance."""
    inputs = [t.requires_grad_() for t in inputs_for(which, (2, 4), 3, torch.float32, device)]
    assert torch.autograd.gradcheck(ALL[which][0], inputs, eps=1e-2, atol=3e-2, rtol=2e-2, nondet_tol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_once_without_graph_breaks(autocast, device):
    resid, embed = (torch.full((2,), v, device=device, requires_grad=True) for v in (0.9, 0.1))
    weights = [values((64, 64), torch.float32, device, i).div(8).requires_grad_() for i in range(4)]

    def step(x0):  # as a model uses them: a mix before one product, a sum before the other, in each layer
        x, update = x0, None
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            for i in range(2):
                x, y = residual_mix_norm_linear(x, x0, resid[i], embed[i], weights[2 * i], update=update)
                x, update = add_norm_linear(x, y.square().to(x.dtype), weights[2 * i + 1])
        return (x + update).square().mean()

    draw = lambda seed: [values((4, 64), torch.float32, device, seed).requires_grad_()]
    assert_compiles_once(step, draw, [resid, embed, *weights], device, 1e-3, 1e-4)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    which = data.draw(st.sampled_from(sorted(ALL)))
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2)) + [data.draw(st.integers(4, 200))]
    out, dtype = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(DTYPES))

    def strided(like, seed):
        order = data.draw(st.permutations(range(len(like))))
        laid = values([2 * like[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute([order.index(i) for i in range(len(like))])

    inputs = inputs_for(which, shape, out, dtype, device)
    inputs = [strided(shape, i) if t.ndim else t for i, t in enumerate(inputs[:-1])] + [strided((out, shape[-1]), 3)]
    check(which, inputs, (strided(shape, 4), strided((*shape[:-1], out), 5)), f"{shape} {out} {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 512, 1544), (8, 2048, 768, 3072), (1000, 8192, 64)], ids=str)
@pytest.mark.parametrize("which", ALL)
def test_real_sizes(which, shape, device, poison_empty):
    *shape, out = shape
    inputs = inputs_for(which, shape, out, torch.bfloat16, device)
    gradients = [torch.randn(*shape[:-1], n, device=device, dtype=torch.bfloat16) for n in (shape[-1], out)]
    first, second = check(which, inputs, gradients), results(ALL[which][0], inputs, gradients)
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("which", ALL)
def test_runs_on_the_device_of_its_input(which):
    inputs = inputs_for(which, (33, 512), 64, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        outputs, gradients = check(which, inputs, [torch.randn(33, n, device="cuda:1") for n in (512, 64)])
        assert torch.cuda.current_device() == 0 and {t.device for t in (*outputs, *gradients)} == {inputs[0].device}

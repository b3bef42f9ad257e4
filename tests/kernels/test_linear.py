"""`linear` and the forms of its weight gradient: numbers against float64, on the CPU too, and how the operator behaves."""

from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, values
from precision import assert_close_to_reference

from kernels.linear import FORMS, linear, linear_backward_op, linear_op, linear_ref, weight_gradient

module = import_module("kernels.linear")  # `import kernels.linear as …` is the function
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results(f, x, weight, dy):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = f(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))


def check(x, weight, dy, what=""):
    ours, low = results(linear, x, weight, dy), results(linear_ref, x, weight, dy)
    exact = results(linear_ref, x.double(), weight.double(), dy)
    for o, p, e, factor, name in zip(ours, low, exact, (2, 3, 3), ("output", "dx", "dweight")):
        assert_close_to_reference(o, p, e, factor, f"{what} {name}")
    return ours


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 64, 24), (130, 7, 1), (0, 8, 4), (5, 3)], ids=str)
def test_values(shape, dtype, form, device, poison_empty, monkeypatch):
    """The last has one row and no batch dimension."""
    *rows, wide, out = shape
    monkeypatch.setitem(module.WEIGHT_GRADIENT, (out, wide), (form, None))
    x, weight, dy = values((*rows, wide), dtype, device), values((out, wide), dtype, device, 1), values((*rows, out), dtype, device, 2)
    y, dx, dweight = check(x, weight, dy, f"{shape} {form}")
    assert y.is_contiguous() and dx.is_contiguous() and dweight.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_gives_the_same_gradient(dtype, device, monkeypatch):
    """Small integers, whose products and sums are exact in any order: the forms may differ in nothing, float32 results neither."""
    dy, x = (values((96, n), torch.float32, device, n).mul(2).round().to(dtype) for n in (24, 40))
    exact = dy.double().t() @ x.double()
    for form in FORMS:
        monkeypatch.setitem(module.WEIGHT_GRADIENT, (24, 40), (form, None))
        for wanted in DTYPES:
            got = weight_gradient(dy, x, wanted)
            assert torch.equal(got, exact.to(wanted)) and got.is_contiguous() and got.dtype == wanted, form
    asked = []
    monkeypatch.setitem(FORMS, "direct", lambda *a, original=FORMS["direct"]: (asked.append(a[0].shape), original(*a))[1])
    weight_gradient(dy, x[:, :39], dtype)  # a shape that the table does not have
    assert asked == [(96, 24)]


def test_the_choice_of_blas_library_ends_with_the_product(device, monkeypatch):
    """The switch itself is torch's; a build without a GPU has one library, so here it is written down instead of obeyed."""
    switched, current = [], ["found"]

    def preferred_blas_library(library=None):
        if library is not None:
            switched.append(library)
            current[0] = library
        return current[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred_blas_library)
    monkeypatch.setitem(module.WEIGHT_GRADIENT, (4, 8), ("copied", "cublaslt"))
    during = []
    original = FORMS["copied"]
    monkeypatch.setitem(FORMS, "copied", lambda *a: (during.append(current[0]), original(*a))[1])
    x, weight, dy = values((6, 8), torch.float32, device), values((4, 8), torch.float32, device), values((6, 4), torch.float32, device)
    check(x, weight, dy)
    assert during == ["cublaslt"] and switched == ["cublaslt", "found"]
    check(x[:, :7], weight[:, :7], dy)  # another shape: not touched
    assert len(switched) == 2

    def fails(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(FORMS, "copied", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        results(linear, x, weight, dy)
    assert switched[2:] == ["cublaslt", "found"] and preferred_blas_library() == "found"


def test_torch_takes_its_own_library_back(device, monkeypatch):
    before = torch.backends.cuda.preferred_blas_library()
    monkeypatch.setitem(module.WEIGHT_GRADIENT, (4, 8), ("direct", "cublas"))
    x, weight, dy = values((6, 8), torch.float32, device), values((4, 8), torch.float32, device), values((6, 4), torch.float32, device)
    check(x, weight, dy)
    assert torch.backends.cuda.preferred_blas_library() == before


def test_a_weight_of_another_dtype(device):
    """A float32 master weight under autocast: low-precision product, gradient in the weight's dtype, and the input's its own."""
    x, weight, dy = (
        values((6, 10, 32), torch.float32, device),
        values((16, 32), torch.float32, device, 1),
        values((6, 10, 16), torch.float32, device),
    )
    exact = results(linear_ref, x.double(), weight.double(), dy)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype):
            ours, low = results(linear, x, weight, dy), results(linear_ref, x, weight, dy)
        assert [t.dtype for t in ours] == [dtype, torch.float32, torch.float32]
        for o, p, e, factor in zip(ours, low, exact, (2, 3, 3)):
            # float32 results of a low-precision product: torch's error is what counts, an ulp of float32 is no floor for it
            assert_close_to_reference(o, p, e, factor, str(dtype))
        y, dx, dweight = results(linear, x.to(dtype), weight, dy)
        assert [t.dtype for t in (y, dx, dweight)] == [dtype, dtype, torch.float32]
    assert linear(x, weight.bfloat16()).dtype == torch.float32


def test_strides(device):
    base = values((6, 4, 48), torch.float32, device)
    for x in (base, base[:, 1], base[::2], base[..., ::2], base.transpose(0, 1), base[:1].expand(5, 4, 48), base[:, 0].t()):
        for weight in (values((8, x.shape[-1]), torch.float32, device, 1), values((x.shape[-1], 8), torch.float32, device, 1).t()):
            y = linear_ref(x, weight)
            check(x, weight, values(y.shape, torch.float32, device, 2))
            check(x, weight, values(y.shape[::-1], torch.float32, device, 2).permute(*reversed(range(y.ndim))))
            check(x, weight, torch.ones((), device=device).expand(y.shape))
    x, weight = base.clone().requires_grad_(), values((8, 48), torch.float32, device, 1).requires_grad_()
    ours, exact = (torch.autograd.grad(torch.cat([f(x, weight), x], -1).square().sum(), (x, weight)) for f in (linear, linear_ref))
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_frozen_inputs_cost_nothing(device, monkeypatch):
    """Neither time nor memory: what only the other gradient needs is not kept."""
    x, weight = values((4, 8), torch.float32, device), values((3, 8), torch.float32, device, 1)
    formed = []
    monkeypatch.setattr(module, "weight_gradient", lambda *a, original=weight_gradient: (formed.append(1), original(*a))[1])
    for trained, frozen, kept in ((x, weight, weight), (weight, x, x)):
        trained.requires_grad_().grad = None
        frozen.requires_grad_(False).grad = None
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):  # noqa: B023
            y = linear(x, weight)
        assert len(saved) == 1 and saved[0].data_ptr() == kept.data_ptr()
        y.square().sum().backward()
        (exact,) = torch.autograd.grad(linear_ref(x, weight).square().sum(), trained)
        assert frozen.grad is None
        torch.testing.assert_close(trained.grad, exact, rtol=1e-4, atol=1e-4)
    assert len(formed) == 1


def test_modes(device):
    x, weight = values((4, 8), torch.float32, device).requires_grad_(), values((3, 8), torch.float32, device, 1).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not linear(x, weight).requires_grad
    assert not saved
    y = linear(x, weight)
    dy = values(y.shape, torch.float32, device, 2)
    kept = [t.detach().clone() for t in (x, weight, y, dy)]
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), dy)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, kept, (x, weight, y, dy)))
    (dx,) = torch.autograd.grad(linear(x, weight).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear: double backward is not supported; use linear_ref"):
        dx.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="linear: forward-mode"):
        linear(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()), weight)


def test_unsupported_input(device):
    x, weight = torch.zeros(3, 8, device=device), torch.zeros(4, 8, device=device)
    for arguments, message in [
        ((x, weight.t()), r"weight \(8, 4\) for x \(3, 8\)"),
        ((x, weight[0]), "need"),
        ((x[0, 0], weight), "need"),
        ((x.double(), weight), "float64"),
        ((x, weight.double()), "float64"),
        ((x, weight.to("meta")), "weight on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear(*arguments)


def test_opcheck(device):
    x, weight, dy = (
        values((2, 4, 8), torch.float32, device),
        values((3, 8), torch.float32, device, 1),
        values((2, 4, 3), torch.float32, device),
    )
    strided = values((4, 2, 3), torch.float32, device).transpose(0, 1)
    for gradient in (dy, strided, dy[:1, :1].expand(2, 4, 3)):
        for kept in ((x, weight), (x, None), (None, weight)):
            torch.library.opcheck(linear_backward_op, (gradient, *kept, torch.float32))
    torch.library.opcheck(linear_backward_op, (dy.bfloat16(), x.bfloat16(), values((8, 3), torch.float32, device).t(), torch.float32))
    torch.library.opcheck(linear_op, (x.requires_grad_(), weight.requires_grad_()))
    torch.library.opcheck(linear_op, (x.transpose(0, 1), weight))


def test_gradcheck(device):
    """In float32, which is what the operator takes, hence the wide step and tolerance."""
    inputs = values((2, 3), torch.float32, device).requires_grad_(), values((4, 3), torch.float32, device, 1).requires_grad_()
    assert torch.autograd.gradcheck(linear, inputs, eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_once_without_graph_breaks(autocast, device):
    weight = values((3, 8), torch.float32, device, 1).requires_grad_()

    def step(x):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return linear(x * 2, weight).float().square().mean()

    assert_compiles_once(step, lambda seed: [values((2, 4, 8), torch.float32, device, seed).requires_grad_()], [weight], device)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    rows = data.draw(st.lists(st.integers(0, 5), max_size=3))
    wide, out = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from(DTYPES))

    def strided(shape, seed):
        order = data.draw(st.permutations(range(len(shape))))
        laid = values([2 * shape[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute([order.index(i) for i in range(len(shape))])

    check(strided([*rows, wide], 1), strided([out, wide], 2), strided([*rows, out], 3), f"{rows} {wide} {out}")


@pytest.mark.gpu
@pytest.mark.parametrize("library", [None, "cublas", "cublaslt"])
@pytest.mark.parametrize("form", FORMS)
def test_real_sizes(form, library, device, monkeypatch):
    """Every form by every library, of a low-precision and of a float32 weight."""
    monkeypatch.setitem(module.WEIGHT_GRADIENT, (2048, 512), (form, library))
    x, weight, dy = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((32768, 512), (2048, 512), (32768, 2048)))
    before = torch.backends.cuda.preferred_blas_library()
    first, second = check(x, weight, dy), results(linear, x, weight, dy)
    assert all(map(torch.equal, first, second)) and torch.backends.cuda.preferred_blas_library() == before
    _, _, dweight = results(linear, x, weight.float(), dy)
    exact = dy.double().t() @ x.double()
    assert dweight.dtype == torch.float32
    if not torch.version.hip:  # not rounded to bfloat16 on the way
        assert (dweight - exact).norm() < 1e-4 * exact.norm()
    assert (dweight - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_input():
    with torch.cuda.device(0):
        for t in check(*(values(shape, torch.bfloat16, "cuda:1") for shape in ((33, 512), (64, 512), (33, 64)))):
            assert torch.cuda.current_device() == 0 and t.device == torch.device("cuda:1")

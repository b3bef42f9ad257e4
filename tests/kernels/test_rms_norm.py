"""RMSNorm and the fused addition: numbers against float64, and how they behave as operators."""

from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, values
from precision import assert_close_to_reference

from kernels.rms_norm import add_rms_norm, add_rms_norm_op, add_rms_norm_ref, rms_norm, rms_norm_backward_op, rms_norm_op, rms_norm_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results(f, inputs, gradients, eps):
    """Outputs and input gradients of `f(*inputs, eps=eps)`; None inputs stay None."""
    inputs = [None if i is None else i.detach().requires_grad_() for i in inputs]
    outputs = f(*inputs, eps=eps)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [i for i in inputs if i is not None]
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, used, [g.to(o.dtype) for g, o in zip(gradients, outputs)])


def check(f, ref, inputs, gradients, eps=1e-6, what=""):
    """Compare with the reference in float64, and with the error the reference makes in the inputs' own dtypes."""
    ours = results(f, inputs, gradients, eps)
    low = results(ref, inputs, gradients, eps)
    exact = results(ref, [None if i is None else i.double() for i in inputs], [g.double() for g in gradients], eps)
    for kind, factor in ((0, 2), (1, 3)):
        for n, (o, p, e) in enumerate(zip(ours[kind], low[kind], exact[kind])):
            assert_close_to_reference(o, p.to(o.dtype), e, factor, f"{what} {('output', 'gradient')[kind]} {n}")
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 128), (1, 512), (11, 512), (5, 77), (7, 1), (2, 1000), (4, 3000)], ids=str)
def test_rms_norm(shape, weighted, dtype, device, poison_empty):
    x, dy = values(shape, dtype, device, 1), values(shape, dtype, device, 2)
    weight = values(shape[-1:], dtype, device, 3) if weighted else None
    check(rms_norm, rms_norm_ref, [x, weight], [dy], what=f"{shape}")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(2, 512), (9, 130), (3, 8200)], ids=str)
def test_add_rms_norm(shape, weighted, device, poison_empty):
    x, residual, dsum, dy = (values(shape, torch.bfloat16, device, s) for s in range(4))
    weight = values(shape[-1:], torch.bfloat16, device, 5) if weighted else None
    (h, y), _ = check(add_rms_norm, add_rms_norm_ref, [x, residual, weight], [dsum, dy])
    assert torch.equal(h, x + residual) and torch.equal(y, rms_norm(h, weight)), "the norm is that of the sum as stored"


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [8193, 20000, 65536])
def test_wide_rows_loop(width, weighted, device, poison_empty):
    x, dy = values((5, width), torch.bfloat16, device, 1), values((5, width), torch.bfloat16, device, 2)
    check(rms_norm, rms_norm_ref, [x, values((width,), torch.bfloat16, device, 3) if weighted else None], [dy])


def test_a_program_sums_weight_gradients_over_several_tiles(device, poison_empty):
    x, dy = values((50, 300), torch.float32, device, 1), values((50, 300), torch.float32, device, 2)
    check(rms_norm, rms_norm_ref, [x, values((300,), torch.float32, device, 3)], [dy])


def test_extreme_values(device):
    """Squares are summed in float32 whatever the dtype: float16 would overflow at 256, and lose 1e-4 to zero."""
    for scale in (3e4, 1e-4):
        x = values((4, 512), torch.float16, device, 1, scale).clamp(-65504, 65504)
        y = rms_norm(x, eps=1e-12)
        assert torch.isfinite(y).all() and (y.float().square().mean(-1) - 1).abs().max() < 1e-2
    assert torch.equal(rms_norm(torch.zeros(2, 64, device=device)), torch.zeros(2, 64, device=device))
    x = values((4, 64), torch.float32, device)
    x[1, 7] = float("nan")
    assert torch.isnan(rms_norm(x)).any(-1).tolist() == [False, True, False, False]


def test_weight_of_another_dtype(device):
    """A float32 weight on bfloat16 x, as under autocast: the result keeps x's dtype, the gradient the weight's."""
    x, dy = values((6, 128), torch.bfloat16, device, 1), values((6, 128), torch.bfloat16, device, 2)
    weight = values((128,), torch.float32, device, 3)
    _, (dx, dweight) = check(rms_norm, rms_norm_ref, [x, weight], [dy])
    assert dx.dtype == torch.bfloat16 and dweight.dtype == torch.float32


def test_sum_of_two_dtypes(device):
    x, residual = values((6, 128), torch.bfloat16, device, 1), values((6, 128), torch.float32, device, 2)
    dsum, dy = values((6, 128), torch.float32, device, 3), values((6, 128), torch.float32, device, 4)
    (h, y), (dx, dresidual) = check(add_rms_norm, add_rms_norm_ref, [x, residual, None], [dsum, dy])
    assert (h.dtype, y.dtype, dx.dtype, dresidual.dtype) == (torch.float32, torch.float32, torch.bfloat16, torch.float32)


def test_strides(device):
    """Slices, transposes and broadcasts as input; expanded, concatenated and transposed gradients."""
    base = values((6, 2, 96), torch.float32, device)
    for x in (base[:, 1], base[::2, 0], base[:, 0, ::2], base[:, 0].t(), base[:1, 0].expand(5, 96), base.transpose(0, 1)):
        check(rms_norm, rms_norm_ref, [x, None], [values(x.shape, torch.float32, device, 1)])
    x = base[:, 0].clone().requires_grad_()
    z = values((6, 96), torch.float32, device, 4)
    losses = [
        lambda y: y.sum(),
        lambda y: torch.cat([y, z], 1).square().sum(),
        lambda y: (y.t() @ z).square().sum(),
        lambda y: (y[:, None].expand(6, 3, 96) * 2).sum(),
    ]
    for loss in losses:
        (ours,) = torch.autograd.grad(loss(rms_norm(x)), x)
        (exact,) = torch.autograd.grad(loss(rms_norm_ref(x)), x)
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_into_inputs_or_gradients(device):
    x, weight = values((4, 64), torch.float32, device).requires_grad_(), values((64,), torch.float32, device, 1).requires_grad_()
    h, y = add_rms_norm(x, x, weight)  # one tensor as both
    gradients = [values(t.shape, torch.float32, device, 2) for t in (h, y)]
    kept = [t.detach().clone() for t in (x, weight, h, y, *gradients)]
    first = torch.autograd.grad((h, y), (x, weight), gradients, retain_graph=True)
    second = torch.autograd.grad((h, y), (x, weight), gradients)
    assert all(map(torch.equal, kept, (x, weight, h, y, *gradients))) and all(map(torch.equal, first, second))
    y = rms_norm(x)
    (exact,) = torch.autograd.grad((rms_norm_ref(x) + x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((y + x).sum(), x)[0], exact, rtol=1e-4, atol=1e-4)


def test_unused_outputs_and_frozen_inputs(device, monkeypatch):
    x, r, w = (values(s, torch.float32, device, i).requires_grad_() for i, s in enumerate([(4, 64), (4, 64), (64,)]))
    h, y = add_rms_norm(x, r, w)
    dx, dr, dw = torch.autograd.grad(h.sum(), (x, r, w), allow_unused=True)
    assert torch.equal(dx, torch.ones_like(x)) and torch.equal(dr, dx) and dw is None
    _, y = add_rms_norm(x, r, w)
    exact = torch.autograd.grad(add_rms_norm_ref(x, r, w)[1].square().sum(), (x, r, w))
    for a, b in zip(torch.autograd.grad(y.square().sum(), (x, r, w)), exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    module = import_module("kernels.rms_norm")  # `import kernels.rms_norm as …` is the function

    asked = []
    original = module.rms_norm_backward_op
    monkeypatch.setattr(module, "rms_norm_backward_op", lambda *a: (asked.append(a[-2:]), original(*a))[1])
    for frozen, wanted in ((x, (False, True)), (w, (True, False))):
        for t in (x, w):
            t.requires_grad_(t is not frozen).grad = None
        rms_norm(x, w).sum().backward()
        assert frozen.grad is None and asked[-1] == wanted


def test_without_gradients_nothing_is_saved(device):
    x = values((4, 64), torch.float32, device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not rms_norm(x).requires_grad
    assert not saved


def test_double_backward_is_refused(device):
    x = values((4, 64), torch.float32, device).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm: double backward is not supported"):
        dx.sum().backward()


def test_autocast_keeps_the_dtype(device):
    with torch.autocast(device, torch.bfloat16):
        assert rms_norm(values((2, 64), torch.bfloat16, device)).dtype == torch.bfloat16
        assert rms_norm(values((2, 64), torch.float32, device)).dtype == torch.float32


def test_deterministic(device):
    x, w, dy = (values(s, torch.bfloat16, device, i).requires_grad_() for i, s in enumerate([(40, 512), (512,), (40, 512)]))
    runs = [torch.autograd.grad(rms_norm(x, w), (x, w), dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_zero_rows(device):
    x, w = torch.empty(0, 64, device=device, requires_grad=True), torch.ones(64, device=device, requires_grad=True)
    h, y = add_rms_norm(x, x, w)
    (rms_norm(x, w).sum() + h.sum() + y.sum()).backward()
    assert y.shape == (0, 64) and x.grad.shape == (0, 64) and torch.equal(w.grad, torch.zeros(64, device=device))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(3, 0),), "last dimension must be 1 to 65536"),
        ((torch.zeros(()),), "last dimension"),
        ((torch.zeros(1, 65537),), "65537"),
        ((torch.zeros(3, 8), torch.ones(9)), r"weight of shape \(9,\)"),
        ((torch.zeros(3, 8, dtype=torch.float64),), "float64"),
        ((torch.zeros(3, 8, dtype=torch.int32),), "int32"),
    ],
)
def test_unsupported_input(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        rms_norm(*(t.to(device) for t in arguments))


def test_unsupported_sum(device):
    with pytest.raises(ValueError, match="one shape"):
        add_rms_norm(torch.zeros(3, 8, device=device), torch.zeros(1, 8, device=device))


@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted, device):
    x, r, dy = (values((4, 64), torch.float32, device, i).requires_grad_() for i in range(3))
    w = values((64,), torch.float32, device, 3).requires_grad_() if weighted else None
    torch.library.opcheck(rms_norm_op, (x, w, 1e-6))
    torch.library.opcheck(add_rms_norm_op, (x, r, w, 1e-6))
    plain = [None if t is None else t.detach() for t in (dy, r, x, w)]
    torch.library.opcheck(rms_norm_backward_op, (*plain, 1e-6, True, weighted))


def test_gradcheck(device):
    """In float32, which is what the kernels take, hence the wide step and tolerance."""
    x, r = (values((3, 6), torch.float32, device, i).requires_grad_() for i in range(2))
    w = values((6,), torch.float32, device, 3).requires_grad_()
    assert torch.autograd.gradcheck(add_rms_norm, (x, r, w), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0)


def test_compiles_once_without_graph_breaks(device):
    w = torch.ones(64, device=device, requires_grad=True)

    def step(x, r):
        h, y = add_rms_norm(x, r, w)
        return (rms_norm(y * 2, w) + h).square().mean()

    draw = lambda seed: [values((4, 64), torch.float32, device, seed + i).requires_grad_() for i in range(2)]
    assert_compiles_once(step, draw, [w], device)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2)) + [
        data.draw(st.integers(4, 200))
    ]  # the gradient of narrower rows is all cancellation
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(len(shape))))
    inverse = [order.index(i) for i in range(len(shape))]

    def strided(seed):  # of this shape, laid out in another order, with gaps
        laid = values([2 * shape[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute(inverse)

    weight = data.draw(st.sampled_from([None, values(shape[-1:], dtype, device, 9)]))
    check(rms_norm, rms_norm_ref, [strided(1), weight], [strided(2)], what=f"{shape} {dtype} {order}")


@pytest.mark.gpu
@pytest.mark.memory(16)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "shape", [(262144, 512), (32768, 128), (8192, 2048), (2048, 4096), (4096, 5120), (1024, 8192), (256, 65536)], ids=str
)
def test_real_sizes(shape, weighted, device, poison_empty):
    x, r, dsum, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    weight = torch.randn(shape[-1], device=device, dtype=torch.bfloat16) if weighted else None
    check(rms_norm, rms_norm_ref, [x, weight], [dy])
    check(add_rms_norm, add_rms_norm_ref, [x, r, weight], [dsum, dy])


@pytest.mark.gpu
@pytest.mark.memory(24)
def test_more_than_two_billion_elements(device):
    x = torch.ones(2**31 // 512 + 64, 512, device=device, dtype=torch.bfloat16)
    x[-1] = torch.randn(512, device=device)
    assert torch.equal(rms_norm(x)[-1], rms_norm(x[-1:])[0])
    dx, *_ = rms_norm_backward_op(x, None, x, None, 1e-6, True, False)
    assert torch.equal(dx[-1], rms_norm_backward_op(x[-1:], None, x[-1:], None, 1e-6, True, False)[0][0])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_input():
    x = torch.randn(8, 512, device="cuda:1", requires_grad=True)
    with torch.cuda.device(0):
        rms_norm(x, torch.ones(512, device="cuda:1")).sum().backward()
        assert torch.cuda.current_device() == 0 and x.grad.device == x.device
    torch.testing.assert_close(rms_norm(x), rms_norm_ref(x))


def test_forward_mode_is_refused(device):
    """An operator without a forward-mode rule gives zero tangents, silently."""
    from kernels import flash_attention, qk_norm_rope, softcap_cross_entropy, swiglu

    x = torch.randn(4, 64, device=device)
    heads = torch.randn(1, 16, 2, 32, device=device)
    table = torch.ones(16, 16, device=device)
    targets = torch.zeros(4, dtype=torch.int64, device=device)
    for name, function, value in (
        ("rms_norm", rms_norm, x),
        ("swiglu", lambda t: swiglu(t, t), x),
        ("qk_norm_rope", lambda t: qk_norm_rope(t, t, table, table), heads),
        ("flash_attention", lambda t: flash_attention(t, t, t), heads),
        ("softcap_cross_entropy", lambda t: softcap_cross_entropy(t, targets), x),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: forward-mode differentiation is not supported"):
            torch.func.jvp(function, (value,), (torch.ones_like(value),))

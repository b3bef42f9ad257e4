"""softcap_cross_entropy and linear_softcap_cross_entropy against their references in float64, and how they behave around them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import assert_close_to_reference
from torch._dynamo.testing import CompileCounterWithBackend

import kernels.cross_entropy as module
from kernels.cross_entropy import (
    linear_softcap_cross_entropy,
    linear_softcap_cross_entropy_ref,
    softcap_cross_entropy,
    softcap_cross_entropy_ref,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]


def example(rows, vocab, dtype, device, scale=8.0, seed=0, index=torch.int64):
    """Logits that the cap bends, targets with ignored rows, one row sure of its target, one of another."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows,) if isinstance(rows, int) else rows
    logits = torch.randn(*shape, vocab, generator=g) * scale
    targets = torch.randint(0, vocab, shape, generator=g)
    flat, flat_targets = logits.view(-1, vocab), targets.view(-1)
    if len(flat_targets) > 4:
        flat_targets[1] = -1
        flat_targets[-1] = -1
        flat[2] = -30.0
        flat[2, flat_targets[2]] = 40.0
        flat[3] = -30.0
        flat[3, (flat_targets[3] + 1) % vocab] = 40.0
    return logits.to(device, dtype), targets.to(device, index)


def linear_example(rows, vocab, width, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (rows,) if isinstance(rows, int) else rows
    x = torch.randn(*shape, width, generator=g)
    weight = torch.randn(vocab, width, generator=g) * (4 / width**0.5)
    targets = torch.randint(0, vocab, shape, generator=g)
    targets.view(-1)[::5] = -1
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device)


def run(f, inputs, *args, grad=None, **kwargs):
    """(loss, gradients of the inputs), for an incoming gradient of ones or `grad`."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    loss = f(*inputs, *args, **kwargs)
    return loss.detach(), torch.autograd.grad(loss, inputs, torch.ones_like(loss) if grad is None else grad.to(loss.dtype))


def compare(f, ref, inputs, *args, grad=None, what="", **kwargs):
    """`f` against float64, by the measure of `ref` in the dtype of the inputs."""
    ours = run(f, inputs, *args, grad=grad, **kwargs)
    low = run(ref, inputs, *args, grad=grad, **kwargs)
    exact = run(ref, [t.double() for t in inputs], *args, grad=grad, **kwargs)
    assert ours[0].dtype == torch.float32
    assert_close_to_reference(ours[0], low[0], exact[0], 2, f"{what} loss")
    for i, (a, b, c) in enumerate(zip(ours[1], low[1], exact[1])):
        assert a.dtype == inputs[i].dtype
        assert_close_to_reference(a, b, c, 3, f"{what} gradient {i}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("vocab", [97, 256])
def test_logits(vocab, reduction, dtype, device, poison_empty):
    logits, targets = example((3, 5), vocab, dtype, device)
    grad = torch.randn(targets.shape if reduction == "none" else ()).to(device)
    for softcap in (15.0, None):
        compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, softcap, grad=grad, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear(reduction, dtype, device, poison_empty, monkeypatch):
    """Several chunks of rows, the last one short."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "CHUNK_ROWS", 128)
    x, weight, targets = linear_example((2, 70), 97, 48, dtype, device)
    grad = torch.randn(targets.shape if reduction == "none" else ()).to(device)
    compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets, grad=grad, reduction=reduction)


@pytest.mark.parametrize("vocab", [100, 128])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vocabulary_wider_than_a_block(vocab, reduction, device, poison_empty, monkeypatch):
    monkeypatch.setattr(module, "ONE_BLOCK", 32)
    monkeypatch.setattr(module, "SWEEP", 32)
    monkeypatch.setattr(module, "_backward_block", lambda vocab: (32, 1))
    logits, targets = example(7, vocab, torch.float32, device)
    for softcap in (15.0, None):
        compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, softcap, reduction=reduction)
    logits[:, :32] = float("-inf")  # a first block that holds nothing
    targets = torch.full_like(targets, vocab - 1)
    compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, None, reduction=reduction)
    x, weight, targets = linear_example(7, vocab, 16, torch.float32, device)
    compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets, reduction=reduction)


@pytest.mark.parametrize(
    "rows, vocab, chunks, size",
    [
        (0, 512, 0, 0),
        (300, 512, 1, 300),  # one chunk has no more rows than there are
        (2048, 32768, 2, 1024),  # CHUNK_BYTES
        (2500, 262144, 3, 896),  # CHUNK_ROWS, split evenly into multiples of 128
        (163840, 8192, 16, 10240),  # a sixteenth of all
    ],
)
def test_chunks(rows, vocab, chunks, size):
    """How many rows of logits are held at a time, in bfloat16; on the meta device, where they take no room."""
    x, weight = torch.empty(rows, 16, dtype=torch.bfloat16, device="meta"), torch.empty(vocab, 16, dtype=torch.bfloat16, device="meta")
    parts = list(module._chunks(x, weight))
    assert [part.start for part, _ in parts] == list(range(0, rows, size or 1)) and len(parts) == chunks
    assert sum(logits.shape[0] for _, logits in parts) == rows and all(logits.shape[0] <= size for _, logits in parts)


def test_warps_of_a_row():
    """16 values a lane on AMD and 32 on NVIDIA, whichever this torch is built for; 32 of the widest row on both."""
    assert [module._row_block(vocab, "hip") for vocab in (250, 8192, 32768, 50304)] == [(256, 1), (8192, 16), (32768, 32), (4096, 16)]
    assert [module._row_block(vocab, "cuda") for vocab in (250, 8192, 32768, 50304)] == [(256, 1), (8192, 8), (32768, 32), (4096, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_confident_rows(dtype, device):
    """p near 1: the loss is far below the logits' own rounding, and p - 1 below bfloat16's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 16, generator=generator) * 3 - 15
    targets = torch.arange(100) % 16
    logits[torch.arange(100), targets] = torch.linspace(-10, 30, 100)  # many rows, so that the largest errors are not luck
    logits, targets = logits.to(device, dtype), targets.to(device)
    compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, reduction="none")

    logits = torch.tensor([[6.9, 0.0]], device=device, dtype=dtype)
    _, (grad,) = run(softcap_cross_entropy, [logits], targets[:1], softcap=None)
    exact = logits.double().softmax(-1)[0, 0] - 1  # -0.001: bfloat16 would make it 0 or -0.004
    assert abs(grad[0, 0].double() / exact - 1) < torch.finfo(dtype).eps + 1e-4


def test_infinities_and_nan(device):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[inf, 0.0, -inf, 1.0], [nan, 0.0, 1.0, 2.0], [nan, nan, nan, nan], [0.0, 1.0, 2.0, 3.0]], device=device)
    targets = torch.tensor([0, 1, -1, 2], device=device)
    ours, (grad,) = run(softcap_cross_entropy, [logits], targets, reduction="none")
    exact = softcap_cross_entropy_ref(logits.double(), targets, reduction="none")
    torch.testing.assert_close(ours, exact.float(), equal_nan=True)
    assert grad[0, 0] == 0 and grad[0, 2] == 0, "a saturated cap has no slope"
    assert grad[1].isnan().all() and ours[1].isnan(), "NaN logits are not swallowed"
    assert ours[2] == 0 and (grad[2] == 0).all(), "an ignored row may hold anything"
    assert grad[3].isfinite().all()


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("ignore_index", [-1, -100, 3])
def test_ignored_rows_and_bad_targets(ignore_index, index, device, poison_empty):
    logits, _ = example(6, 40, torch.float32, device)
    targets = torch.tensor([3, 0, 39, 3, 7, 3], device=device, dtype=index)
    targets[targets == 3] = ignore_index
    kwargs = {"ignore_index": ignore_index}
    for reduction in REDUCTIONS:
        compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, reduction=reduction, **kwargs)
    for bad in (40, 41, 2**30, -7):
        targets[1] = bad
        loss, (grad,) = run(softcap_cross_entropy, [logits], targets, reduction="none", **kwargs)
        assert loss[1].isnan() and grad[1].isnan().all() and loss[[0, 2, 3, 4, 5]].isfinite().all()
        assert grad[[0, 2, 3, 4, 5]].isfinite().all()
        assert run(softcap_cross_entropy, [logits], targets, **kwargs)[0].isnan()
        x, weight, _ = linear_example(6, 40, 16, torch.float32, device)
        loss, (dx, dw) = run(linear_softcap_cross_entropy, [x, weight], targets, reduction="sum", **kwargs)
        assert loss.isnan() and dx[1].isnan().all() and dx[0].isfinite().all() and dw.isnan().any()


def test_all_targets_ignored(device, poison_empty):
    logits, targets = example(5, 40, torch.float32, device)
    x, weight, _ = linear_example(5, 40, 16, torch.float32, device)
    targets = torch.full_like(targets, -1)
    for f, ref, inputs in (
        (softcap_cross_entropy, softcap_cross_entropy_ref, [logits]),
        (linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight]),
    ):
        for reduction in REDUCTIONS:
            loss, grads = run(f, inputs, targets, reduction=reduction)
            expected, _ = run(ref, inputs, targets, reduction=reduction)
            assert torch.equal(loss.isnan(), expected.isnan()) and loss.nan_to_num().count_nonzero() == 0
            assert all((g == 0).all() for g in grads)


def test_no_rows(device):
    logits, targets = torch.empty(0, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    weight = torch.randn(8, 4, device=device)
    for reduction, expected in (("mean", float("nan")), ("sum", 0.0)):
        loss, (grad,) = run(softcap_cross_entropy, [logits], targets, reduction=reduction)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)
        assert grad.shape == logits.shape
        loss, (dx, dw) = run(linear_softcap_cross_entropy, [torch.empty(0, 4, device=device), weight], targets, reduction=reduction)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)
        assert dx.shape == (0, 4) and (dw == 0).all()
    assert softcap_cross_entropy(logits, targets, reduction="none").shape == (0,)
    _, (_, dw) = run(linear_softcap_cross_entropy, [torch.empty(0, 4, device=device), weight], targets, reduction="none")
    assert (dw == 0).all()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_shapes_and_strides(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leading = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    vocab = data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from(DTYPES))
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    layout = data.draw(st.sampled_from(["contiguous", "padded", "transposed", "expanded", "reversed"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    backwards = list(range(len(leading)))[::-1]
    if layout == "padded":
        logits = torch.randn(*leading, vocab + 9, generator=generator)[..., :vocab]
    elif layout == "transposed":
        logits = torch.randn(vocab, *leading, generator=generator).movedim(0, -1)
    elif layout == "expanded":
        logits = torch.randn(vocab, generator=generator).expand(*leading, vocab)
    elif layout == "reversed":
        logits = torch.randn(*leading[::-1], vocab, generator=generator).permute([*backwards, len(leading)])
    else:
        logits = torch.randn(*leading, vocab, generator=generator)
    logits = (logits * 10).to(device, dtype)
    targets = torch.randint(-1, vocab, leading[::-1], generator=generator).permute(backwards).to(device)
    grad = torch.randn(leading if reduction == "none" else [], generator=generator).to(device)
    leaf, exact = logits.detach().requires_grad_(), logits.double().requires_grad_()
    loss = softcap_cross_entropy(leaf, targets, reduction=reduction)
    expected = softcap_cross_entropy_ref(exact, targets, reduction=reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=4e-6, equal_nan=True)
    # rounded once to dtype; the loss's own rounding is in the slack of float32 rows
    (ours,), (exact_grad,) = torch.autograd.grad(loss, leaf, grad), torch.autograd.grad(expected, exact, grad.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact_grad, rtol=eps, atol=4e-6)


def incoming(kind, shape, device):
    """Incoming gradients as autograd really makes them: strides 0, of a slice, transposed."""
    if kind == "expanded":
        return torch.tensor(0.7, device=device).expand(shape)
    if kind == "transposed":
        return torch.randn(shape[::-1], device=device).t()
    return torch.randn(shape[0], 2 * shape[1], device=device)[:, ::2]


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_incoming_gradients(kind, device, poison_empty):
    grad = incoming(kind, (3, 5), device)
    before = grad.clone()
    logits, targets = example((3, 5), 40, torch.float32, device)
    compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, grad=grad, reduction="none")
    x, weight, targets = linear_example((3, 5), 40, 16, torch.float32, device)
    compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets, grad=grad, reduction="none")
    assert torch.equal(grad, before)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_of_the_callers_is_written(reduction, device):
    """A second backward gives the first one's numbers, and inputs stay as they were."""
    logits, targets = example((3, 5), 40, torch.bfloat16, device)
    x, weight, _ = linear_example((3, 5), 40, 16, torch.bfloat16, device)
    for f, inputs in ((softcap_cross_entropy, [logits]), (linear_softcap_cross_entropy, [x, weight])):
        inputs = [t.requires_grad_() for t in inputs]
        before = [t.detach().clone() for t in (*inputs, targets)]
        loss = f(*inputs, targets, reduction=reduction)
        kept = loss.detach().clone()
        grad = torch.randn(loss.shape, device=device)
        grad_before = grad.clone()
        first = torch.autograd.grad(loss, inputs, grad, retain_graph=True)
        first_kept = [g.clone() for g in first]
        other = torch.autograd.grad(loss, inputs, 2 * grad, retain_graph=True)
        second = torch.autograd.grad(loss, inputs, grad)
        for a, b, c, d in zip(first, first_kept, second, other):
            assert torch.equal(a, b) and torch.equal(a, c) and torch.allclose(d.float(), 2 * a.float())
            assert a.data_ptr() != c.data_ptr()
        assert torch.equal(grad, grad_before) and torch.equal(loss, kept)
        assert all(torch.equal(a, b) for a, b in zip((*inputs, targets), before))


def test_frozen_inputs(device, monkeypatch):
    x, weight, targets = linear_example(9, 40, 16, torch.float32, device)
    both = run(linear_softcap_cross_entropy, [x, weight], targets)[1]
    for reduction in ("mean", "none"):
        whole = run(linear_softcap_cross_entropy, [x, weight], targets, reduction=reduction)[1]
        for frozen in (0, 1):
            inputs = [x.detach().clone(), weight.detach().clone()]
            inputs[1 - frozen].requires_grad_()
            loss = linear_softcap_cross_entropy(*inputs, targets, reduction=reduction)
            loss.sum().backward()
            assert inputs[frozen].grad is None and torch.equal(inputs[1 - frozen].grad, whole[1 - frozen])
    products = []
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append("mm") or mm(*a, **k))
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: products.append("addmm") or addmm(*a, **k))
    for needs, expected in (((False, False), 1), ((True, False), 2), ((False, True), 2), ((True, True), 3)):
        products.clear()
        inputs = [t.detach().requires_grad_(n) for t, n in zip((x, weight), needs)]
        loss = linear_softcap_cross_entropy(*inputs, targets)
        if any(needs):
            loss.backward()
        assert len(products) == expected, f"{needs}: {products}"
    assert all(g.isfinite().all() for g in both)


def test_without_gradients(device, monkeypatch):
    """no_grad and inference_mode give the same loss, save nothing and make no gradient products."""
    logits, targets = example(6, 40, torch.float32, device)
    x, weight, _ = linear_example(6, 40, 16, torch.float32, device)
    for f, inputs in ((softcap_cross_entropy, [logits]), (linear_softcap_cross_entropy, [x, weight])):
        inputs = [t.requires_grad_() for t in inputs]
        expected = f(*inputs, targets)
        monkeypatch.setattr(module, "_accumulate", None)  # must not be called
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss = f(*inputs, targets)
            assert torch.equal(loss, expected.detach()) and not loss.requires_grad and loss.grad_fn is None
        monkeypatch.undo()


def test_double_backward_is_refused(device):
    logits, targets = example(6, 40, torch.float32, device)
    x, weight, _ = linear_example(6, 40, 16, torch.float32, device)
    for f, inputs in ((softcap_cross_entropy, [logits]), (linear_softcap_cross_entropy, [x, weight])):
        for reduction in REDUCTIONS:
            leaves = [t.detach().requires_grad_() for t in inputs]
            grads = torch.autograd.grad(f(*leaves, targets, reduction=reduction).sum(), leaves, create_graph=True)
            with pytest.raises(RuntimeError, match="double backward is not supported"):
                sum(g.square().sum() for g in grads).backward()


def test_determinism(device):
    for f, inputs in (
        (softcap_cross_entropy, example(9, 97, torch.bfloat16, device)),
        (linear_softcap_cross_entropy, linear_example(9, 97, 16, torch.bfloat16, device)),
    ):
        *inputs, targets = inputs
        first, again = run(f, inputs, targets), run(f, inputs, targets)
        assert torch.equal(first[0], again[0]) and all(torch.equal(a, b) for a, b in zip(first[1], again[1]))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast(weight_dtype, device):
    """As F.linear in bfloat16 and F.cross_entropy in float32; gradients in the dtypes of x and weight."""
    x, weight, targets = linear_example((2, 20), 97, 32, torch.float32, device)
    weight = weight.to(weight_dtype)
    for f, ref, inputs in (
        (linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight]),
        (softcap_cross_entropy, softcap_cross_entropy_ref, [example((2, 20), 97, torch.bfloat16, device)[0]]),
    ):
        with torch.autocast(device, torch.bfloat16):
            ours, low = run(f, inputs, targets), run(ref, inputs, targets)
        exact = run(ref, [t.double() for t in inputs], targets)
        assert_close_to_reference(ours[0], low[0], exact[0], 2, "loss")
        for a, b, c, t in zip(ours[1], low[1], exact[1], inputs):
            assert a.dtype == t.dtype == b.dtype
            assert_close_to_reference(a, b, c, 3, "gradient")


def test_float16_gradients_of_a_mean_do_not_underflow(device):
    """With a loss scale, as a GradScaler gives: what the linear one keeps between its passes must not have underflowed."""
    x, weight, targets = linear_example(64, 4096, 16, torch.float16, device)
    weight = weight / 16  # probabilities near 1/4096, which over 64 rows are 4e-6: two digits in float16
    grad = torch.tensor(4096.0, device=device)
    compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets, grad=grad)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_opcheck(reduction, device):
    logits, targets = example((3, 5), 40, torch.float32, device)
    ops = module._forward_op, module._backward_op, module._linear_op, module._linear_backward_op, module._scale_op
    forward, backward, linear, linear_backward, scale = ops
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (15.0, -1, reduction)
    torch.library.opcheck(forward, (logits.detach().requires_grad_(), targets, *args), test_utils=tests)
    loss, stats, factor = forward(logits, targets, *args)
    torch.library.opcheck(backward, (torch.randn_like(loss), logits, targets, stats, factor, *args), test_utils=tests)
    x, weight, targets = linear_example((3, 5), 40, 16, torch.float32, device)
    for needs in itertools.product((False, True), repeat=2):
        inputs = [t.detach().requires_grad_(n) for t, n in zip((x, weight), needs)]
        torch.library.opcheck(linear, (*inputs, targets, *args, *needs), test_utils=tests)
    loss, stats, factor, _, dw = linear(x, weight, targets, *args, True, True)
    if reduction == "none":
        torch.library.opcheck(linear_backward, (torch.randn_like(loss), x, weight, targets, stats, 15.0, -1, True, True), test_utils=tests)
    else:
        torch.library.opcheck(scale, (dw, torch.randn_like(loss), factor, weight.bfloat16()), test_utils=tests)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction, device):
    """fullgraph, the same numbers as eager, and no recompile from step to step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")

    def step(x, weight, targets):
        x = F.rms_norm(x, x.shape[-1:])
        return (
            linear_softcap_cross_entropy(x, weight, targets, reduction=reduction).sum()
            + softcap_cross_entropy(F.linear(x, weight), targets, reduction=reduction).sum()
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in range(2):
        x, weight, targets = linear_example((3, 5), 40, 16, torch.float32, device, seed=seed)
        ours, low = run(compiled, [x, weight], targets), run(step, [x, weight], targets)
        torch.testing.assert_close(ours, low)
        with torch.autocast(device, torch.bfloat16):
            ours, low = run(compiled, [x, weight], targets), run(step, [x, weight], targets)
        torch.testing.assert_close(ours, low, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 2, f"{counter.frame_count} graphs for two modes"
    torch._dynamo.reset()


def test_unsupported_input_is_refused(device):
    logits, targets = example(6, 40, torch.float32, device)
    x, weight, _ = linear_example(6, 40, 16, torch.float32, device)
    for call, message in (
        (lambda: softcap_cross_entropy(logits.double(), targets), "float64"),
        (lambda: softcap_cross_entropy(logits, targets.float()), "targets of dtype torch.float32"),
        (lambda: softcap_cross_entropy(logits, targets[:3]), r"\(3,\)"),
        (lambda: softcap_cross_entropy(logits.sum(), targets), r"\(6,\)"),
        (lambda: softcap_cross_entropy(logits[:, :0], targets), "no vocabulary"),
        (lambda: softcap_cross_entropy(logits, targets, reduction="avg"), "'avg'"),
        (lambda: softcap_cross_entropy(logits, targets, softcap=-1.0), "-1.0"),
        (lambda: softcap_cross_entropy(logits, targets, softcap=float("nan")), "nan"),
        (lambda: linear_softcap_cross_entropy(x, weight.t(), targets), r"\(16, 40\)"),
        (lambda: linear_softcap_cross_entropy(x, weight.bfloat16(), targets), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_references_are_differentiable_twice():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, -1, 4])
    torch.autograd.gradcheck(lambda t: softcap_cross_entropy_ref(t, targets, 2.0), logits)
    torch.autograd.gradgradcheck(lambda t: softcap_cross_entropy_ref(t, targets, 2.0), logits)


# --- real sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [8192, 32768, 50257, 128256])
def test_real_vocabularies(vocab, dtype, device, poison_empty):
    logits, targets = example(300, vocab, dtype, device)
    for reduction in ("mean", "none"):
        compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets, reduction=reduction, what=f"{vocab}")
    x, weight, targets = linear_example(1500, vocab, 256, dtype, device)
    for reduction in ("mean", "none"):
        compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets, reduction=reduction, what=f"{vocab}")


@pytest.mark.gpu
@pytest.mark.memory(24)
def test_more_than_two_to_the_31_elements(device):
    rows, vocab = 2**31 // 8192 + 5, 8192
    logits = torch.zeros(rows, vocab, device=device, dtype=torch.bfloat16)
    logits[-8:] = torch.randn(8, vocab, device=device) * 8
    targets = torch.zeros(rows, device=device, dtype=torch.int64)
    _, (grad,) = run(softcap_cross_entropy, [logits], targets, reduction="sum")
    last = run(softcap_cross_entropy, [logits[-8:].clone()], targets[-8:], reduction="sum")
    assert torch.equal(grad[-8:], last[1][0]) and torch.equal(grad[0], grad[rows // 2])


@pytest.mark.gpu
def test_memory_of_the_linear_one(device):
    """At most a quarter of what the logits alone would take in float32."""
    rows, vocab, width = 32768, 8192, 512
    x, weight, targets = linear_example(rows, vocab, width, torch.bfloat16, device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    linear_softcap_cross_entropy(x, weight, targets).backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_softcap_cross_entropy(x, weight, targets).backward()
    assert torch.cuda.max_memory_allocated() - before <= rows * vocab * 4 / 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_not_the_current_device():
    logits, targets = example(6, 100, torch.float32, "cuda:1")
    assert torch.cuda.current_device() == 0
    compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], targets)
    x, weight, targets = linear_example(6, 100, 32, torch.float32, "cuda:1")
    compare(linear_softcap_cross_entropy, linear_softcap_cross_entropy_ref, [x, weight], targets)


def test_ignore_index_beyond_the_targets_dtype(device):
    """int32 targets and an ignore_index that is none of theirs: every row counts."""
    logits = torch.randn(3, 40, device=device)
    targets = torch.tensor([1, 2, 3], device=device, dtype=torch.int32)
    ours = softcap_cross_entropy(logits, targets, ignore_index=2**40)
    torch.testing.assert_close(ours, softcap_cross_entropy_ref(logits, targets, ignore_index=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [1.0, 30.0, 100.0, 1e4])
def test_range_of_softcaps(dtype, softcap, device):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(20, 50, generator=generator) * 3).to(device, dtype)
    compare(softcap_cross_entropy, softcap_cross_entropy_ref, [logits], torch.arange(20, device=device), softcap=softcap, reduction="none")


@pytest.mark.parametrize("softcap", [-1.0, 0.1, 1e5, float("inf"), float("nan")])
def test_softcaps_that_are_refused(softcap, device):
    with pytest.raises(ValueError, match="softcap"):
        softcap_cross_entropy(torch.randn(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device), softcap=softcap)

"""q, k and v of the packed product: numbers against float64, and how the operator behaves."""

import itertools
from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, tables, values
from precision import assert_close_to_reference

from kernels.qk_norm_rope import qk_norm_rope
from kernels.qkv import gate_columns, qkv_backward_op, qkv_norm_rope, qkv_norm_rope_ref, qkv_op

module = import_module("kernels.qkv")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 17


def arguments(B, T, n_head, n_kv_head, head_dim, dtype, device, residual=True, seed=0):
    """What qkv_norm_rope takes; tokens of a small vocabulary, so that most rows of the table are used more than once."""
    width = (n_head + 2 * n_kv_head) * head_dim + (gate_columns(n_kv_head) if residual else 0)
    packed = values((B, T, width), dtype, device, seed), *tables(T, head_dim, device), n_head, n_kv_head
    if not residual:
        return packed
    idx = torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed)).to(device)
    return *packed, idx, values((VOCAB, n_kv_head * head_dim), dtype, device, seed + 1)


def gradients_for(packed, seed=5):
    (B, T, _), head_dim, device = packed[0].shape, 2 * packed[1].shape[-1], packed[0].device
    return [values((B, T, n, head_dim), packed[0].dtype, device, seed + i) for i, n in enumerate((packed[3], packed[4], packed[4]))]


def converted(packed, dtype):
    return [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in packed]


def results(f, packed, gradients):
    packed = list(packed)
    trained = [0, 6] if len(packed) > 6 else [0]
    for i in trained:
        packed[i] = packed[i].detach().requires_grad_()
    outputs = f(*packed)
    inputs = [packed[i] for i in trained]
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(gradients, outputs)])


def check(packed, gradients, what=""):
    ours = results(qkv_norm_rope, packed, gradients)
    low = results(qkv_norm_rope_ref, converted(packed, packed[0].dtype), gradients)
    exact = results(qkv_norm_rope_ref, converted(packed, torch.float64), gradients)
    for o, p, e, name in zip(ours[0], low[0], exact[0], "qkv"):
        assert_close_to_reference(o, p, e, 2, f"{what} {name}")
    # The parts of the packed gradient are of different sizes: each is held to torch's error in that part.
    n_head, n_kv_head, head_dim = packed[3], packed[4], 2 * packed[1].shape[-1]
    sizes = [n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim]
    sizes += [n_kv_head, packed[0].shape[-1] - sum(sizes) - n_kv_head] if len(packed) > 6 else []
    for *parts, name in zip(*(r[1][0].split(sizes, -1) for r in (ours, low, exact)), ("dq", "dk", "dv", "dgate", "unused columns")):
        assert_close_to_reference(*parts, 3, f"{what} {name}")
    for *parts, name in zip(ours[1][1:], low[1][1:], exact[1][1:], ["dtable"]):
        assert_close_to_reference(*parts, 3, f"{what} {name}")
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["value residual", "plain"])
@pytest.mark.parametrize("shape", [(2, 17, 4, 4, 128), (1, 7, 6, 2, 64), (3, 1, 3, 1, 32), (1, 5, 2, 2, 96), (2, 3, 9, 9, 6)], ids=str)
def test_values(shape, residual, dtype, device, poison_empty):
    """The last has nine gates, and heads narrower than the columns that they take."""
    packed = arguments(*shape, dtype, device, residual)
    outputs, (dqkv, *_) = check(packed, gradients_for(packed), str(shape))
    assert all(o.is_contiguous() for o in outputs)
    assert dqkv.shape == packed[0].shape and not (residual and dqkv[..., packed[0].shape[-1] - (-shape[3]) % 16 :].any())


def test_is_what_the_model_does(device):
    """Against torch's own norm, complex rotation and embedding: another derivation than the reference's."""
    qkv, cos, sin, n_head, n_kv_head, idx, table = arguments(2, 9, 4, 2, 64, torch.float32, device)
    q, k, v = qkv_norm_rope(qkv, cos, sin, n_head, n_kv_head, idx, table)
    heads = qkv[..., : 8 * 64].view(2, 9, 8, 64)
    z = torch.complex(*heads[:, :, :6].chunk(2, -1)) * torch.complex(cos.float(), -sin.float())[:, None]
    expected = torch.nn.functional.rms_norm(torch.cat([z.real, z.imag], -1), (64,))
    torch.testing.assert_close(torch.cat([q, k], 2), expected, rtol=1e-5, atol=1e-5)
    gate = 2 / (1 + torch.exp(-qkv[..., 8 * 64 : 8 * 64 + 2]))
    torch.testing.assert_close(v, heads[:, :, 6:] + gate[..., None] * table[idx].view(2, 9, 2, 64), rtol=1e-5, atol=1e-5)


def test_is_qk_norm_rope_of_views(device):
    packed = arguments(2, 9, 4, 2, 64, torch.bfloat16, device, residual=False)
    heads = packed[0].unflatten(-1, (-1, 64))
    expected = *qk_norm_rope(heads[:, :, :4], heads[:, :, 4:6], *packed[1:3]), heads[:, :, 6:]
    assert all(map(torch.equal, qkv_norm_rope(*packed), expected))


def test_tables_of_four_dimensions_and_eps(device):
    packed = list(arguments(2, 9, 2, 2, 64, torch.float32, device))
    packed[0] = packed[0] * 1e-3
    gradients = gradients_for(packed)
    for eps in (None, 1e-6, 1e-2):
        ours = results(lambda *a, e=eps: qkv_norm_rope(*a, eps=e), packed, gradients)
        packed[1:3] = (t.reshape(1, 9, 1, 32) for t in packed[1:3])
        again = results(lambda *a, e=eps: qkv_norm_rope(*a, eps=e), packed, gradients)
        exact = results(lambda *a, e=eps: qkv_norm_rope_ref(*a, eps=e), packed, gradients)
        for a, b, c in zip((*ours[0], *ours[1]), (*again[0], *again[1]), (*exact[0], *exact[1])):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4 * c.abs().max().item())


def test_gates_far_from_zero(device):
    """Saturated sigmoids: no inf · 0, and a NaN stays one."""
    packed = arguments(1, 7, 2, 1, 32, torch.float32, device)
    packed[0][0, :, -16] = torch.tensor([-1e4, -90, -20, 0, 20, 90, 1e4], device=device)
    gradients = gradients_for(packed)
    ours, exact = results(qkv_norm_rope, packed, gradients), results(qkv_norm_rope_ref, converted(packed, torch.float64), gradients)
    for a, b in zip((*ours[0], *ours[1]), (*exact[0], *exact[1])):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    packed[0][0, 3, -16] = float("nan")
    v = qkv_norm_rope(*packed)[2]
    assert v[0, 3].isnan().all() and v[0, :3].isfinite().all() and v[0, 4:].isfinite().all()


def test_rows_are_a_multiple_of_16_wide():
    """What Triton wants to know of a stride before it reads and writes 128 bits at a time; benchmarks/gfx1151_report.py tells it so."""
    for n_kv_head in range(1, 40):
        assert n_kv_head <= gate_columns(n_kv_head) < n_kv_head + 16 and gate_columns(n_kv_head) % 16 == 0


@pytest.mark.parametrize("token", [VOCAB, -1, 2**31 + 3])
def test_a_token_outside_the_vocabulary_is_nan(token, device):
    """And touches no memory outside the table, on the way back either."""
    packed = arguments(1, 5, 2, 2, 32, torch.float32, device)
    packed[5][0, 2] = token
    gradients = gradients_for(packed)
    (_, _, v), (dqkv, dtable) = results(qkv_norm_rope, packed, gradients)
    assert v[0, 2].isnan().all() and v[0, [0, 1, 3, 4]].isfinite().all() and dqkv[0, 2, -16:-14].isnan().all()
    assert dtable[min(max(token, 0), VOCAB - 1)].isnan().all()  # inside: torch's sum on a GPU does not check
    used = sorted({*packed[5][0, [0, 1, 3, 4]].tolist()} - {0, VOCAB - 1})
    packed[5][0, 2] = 0
    torch.testing.assert_close(dtable[used], results(qkv_norm_rope_ref, packed, gradients)[1][1][used], rtol=1e-4, atol=1e-5)


def test_strided_inputs_and_gradients(device, monkeypatch):
    """A part of a wider tensor, tokens before sequences, every other column; gradients transposed, expanded and concatenated."""
    copies = []
    monkeypatch.setattr(module, "_adjacent", lambda x, original=module._adjacent: (y := original(x), copies.append(y is not x))[0])
    packed = list(arguments(2, 9, 4, 2, 64, torch.float32, device))
    B, T, width = packed[0].shape
    transposed = [values((B, n, T, 64), torch.float32, device, n).transpose(1, 2) for n in (4, 2, 2)]
    for qkv in (
        values((B, T, width + 24), torch.float32, device)[..., 16 : 16 + width],
        values((T, B, width), torch.float32, device).transpose(0, 1),
        values((B, T, 2 * width), torch.float32, device)[..., ::2],
        values((1, T, width), torch.float32, device).expand(B, T, width),
    ):
        packed[0] = qkv
        check(packed, transposed)
    assert copies and not any(copies)
    packed[5], packed[6] = packed[5].t().contiguous().t(), values((64 * 2, VOCAB), torch.float32, device).t()
    check(packed, [torch.ones((), device=device).expand(g.shape) for g in transposed])
    x = packed[0].detach().clone().requires_grad_()
    ours, exact = (
        torch.autograd.grad(torch.cat([*f(x, *packed[1:]), x[..., :64].unsqueeze(2)], 2).square().sum() + x.sum(), x)[0]
        for f in (qkv_norm_rope, qkv_norm_rope_ref)
    )
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_into_inputs_or_gradients(device):
    packed = arguments(2, 5, 4, 2, 64, torch.float32, device)
    trained = packed[0].requires_grad_(), packed[6].requires_grad_()
    outputs, gradients = qkv_norm_rope(*packed), gradients_for(packed)
    tensors = [*(a for a in packed if isinstance(a, torch.Tensor)), *outputs, *gradients]
    kept = [t.detach().clone() for t in tensors]
    first = torch.autograd.grad(outputs, trained, gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, trained, gradients)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, kept, tensors))


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_outputs(used, device):
    packed = arguments(1, 5, 4, 2, 64, torch.float32, device)
    trained = packed[0].requires_grad_(), packed[6].requires_grad_()
    ours, exact = (
        torch.autograd.grad(f(*packed)[used].pow(3).sum(), trained, allow_unused=True, materialize_grads=True)
        for f in (qkv_norm_rope, qkv_norm_rope_ref)
    )
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_frozen_inputs_cost_nothing(device, monkeypatch):
    asked = []
    original = qkv_backward_op
    monkeypatch.setattr(module, "qkv_backward_op", lambda *a: (asked.append(a[-2:]), original(*a))[1])
    packed = arguments(1, 5, 4, 2, 64, torch.float32, device)
    for trained, frozen, wanted in ((packed[0], packed[6], (True, False)), (packed[6], packed[0], (False, True))):
        trained.requires_grad_().grad = None
        frozen.requires_grad_(False).grad = None
        sum(y.pow(3).sum() for y in qkv_norm_rope(*packed)).backward()
        (exact,) = torch.autograd.grad(sum(y.pow(3).sum() for y in qkv_norm_rope_ref(*packed)), trained)
        assert asked[-1] == wanted and frozen.grad is None
        torch.testing.assert_close(trained.grad, exact, rtol=1e-4, atol=1e-4)


def test_modes(device):
    packed = list(arguments(1, 5, 4, 2, 64, torch.float32, device))
    qkv = packed[0].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not any(y.requires_grad for y in qkv_norm_rope(*packed))
    assert not saved
    with torch.autocast(device, torch.bfloat16):
        assert {y.dtype for y in qkv_norm_rope(qkv.bfloat16(), *packed[1:])} == {torch.bfloat16}
    (dqkv,) = torch.autograd.grad(sum(y.pow(3).sum() for y in qkv_norm_rope(*packed)), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="qkv_norm_rope: double backward is not supported"):
        dqkv.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        qkv_norm_rope(torch.autograd.forward_ad.make_dual(qkv.detach(), qkv.detach()), *packed[1:])
    for (B, T), frozen in itertools.product(((0, 5), (2, 0)), (False, True)):
        packed = arguments(B, T, 4, 2, 64, torch.float32, device)
        trained = packed[0].requires_grad_(not frozen), packed[6].requires_grad_()
        sum(y.sum() for y in qkv_norm_rope(*packed)).backward()
        assert (trained[0].grad is None if frozen else trained[0].grad.shape == packed[0].shape) and not trained[1].grad.any()


def test_a_table_of_another_dtype(device, poison_empty):
    """A float32 table beside a product in bfloat16: its gradient is float32, everything else the product's dtype."""
    packed = list(arguments(2, 9, 4, 2, 64, torch.bfloat16, device))
    gradients = gradients_for(packed)
    _, (expected, dtable) = results(qkv_norm_rope_ref, converted(packed, torch.float64), gradients)
    packed[6] = packed[6].float()
    outputs, (dqkv, ours) = results(qkv_norm_rope, packed, gradients)
    assert {t.dtype for t in (*outputs, dqkv)} == {torch.bfloat16} and ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), dtable, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dqkv.double(), expected, rtol=2e-2, atol=2e-2)


def test_unsupported_input(device):
    qkv, cos, sin, n_head, n_kv_head, idx, table = arguments(2, 5, 4, 2, 64, torch.float32, device)
    heads = n_head, n_kv_head
    for wrong, message in [
        ((qkv[0], cos, sin, *heads, idx, table), "B, T, width"),
        ((qkv, cos, sin, *heads), "rows of 528 for 4 and 2 heads of 64; need 512"),
        ((qkv[..., :-1], cos, sin, *heads, idx, table), "need 528"),
        ((qkv, cos, sin, 4, 3, idx, table), "n_head 4, n_kv_head 3"),
        ((qkv, cos, sin, 0, 2, idx, table), "n_head 0"),
        ((qkv, cos, sin, 4, 0, idx, table), "n_kv_head 0"),
        ((qkv, cos, sin, *heads, idx), "neither"),
        ((qkv, cos, sin, *heads, None, table), "neither"),
        ((qkv, cos, sin, *heads, idx.int(), table), "int64"),
        ((qkv, cos, sin, *heads, idx[:, :4], table), "int64"),
        ((qkv, cos, sin, *heads, idx, table[:, :64]), r"table \(17, 64\)"),
        ((qkv, cos[:4], sin, *heads, idx, table), r"cos of shape \(4, 32\)"),
        ((qkv, cos, sin[:, :8], *heads, idx, table), "sin of shape"),
        ((qkv, cos.sum(), sin.sum(), *heads, idx, table), r"cos \(\)"),
        ((qkv, cos.float().requires_grad_(), sin, *heads, idx, table), "constant"),
        ((qkv.double(), cos, sin, *heads, idx, table), "float64"),
        ((qkv, cos, sin, *heads, idx, table.double()), "float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            qkv_norm_rope(*wrong)


@pytest.mark.parametrize("residual", [True, False], ids=["value residual", "plain"])
def test_opcheck(residual, device):
    packed = arguments(2, 5, 4, 2, 32, torch.float32, device, residual)
    qkv, cos, sin, n_head, n_kv_head, *embedding = packed
    embedding = embedding or [None, None]
    q, k, _, rstd, gate = qkv_op(*packed[:5], *embedding, 1e-6)
    for needs in ((True, residual), (True, False), *([(False, True)] if residual else [])):
        torch.library.opcheck(qkv_backward_op, (*gradients_for(packed), q, k, rstd, gate, cos, sin, *embedding, *needs))
    trained = [t if t is None or not t.is_floating_point() else t.requires_grad_() for t in embedding]
    torch.library.opcheck(qkv_op, (qkv.requires_grad_(), cos, sin, n_head, n_kv_head, *trained, 1e-6))


def test_gradcheck(device):
    """In float32, which is what the kernel takes, hence the wide step and tolerance; one direction, because there are many inputs."""
    qkv, cos, sin, n_head, n_kv_head, idx, table = arguments(1, 3, 2, 1, 8, torch.float32, device)
    inputs = qkv.requires_grad_(), table[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda qkv, table: qkv_norm_rope(qkv, cos, sin, n_head, n_kv_head, idx % 2, table),
        inputs, eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0, fast_mode=True,
    )  # fmt: skip


def test_compiles_once_without_graph_breaks(device):
    packed = list(arguments(2, 5, 4, 2, 64, torch.float32, device))
    table = packed[6].requires_grad_()

    def step(qkv, idx):
        q, k, v = qkv_norm_rope(qkv * 2, *packed[1:5], idx, table)
        return q.square().mean() + (k * v).sum() + sum(y.pow(3).sum() for y in qkv_norm_rope(qkv[..., :512], *packed[1:5]))

    def draw(seed):
        qkv, *_, idx, _ = arguments(2, 5, 4, 2, 64, torch.float32, device, seed=seed)
        return qkv.requires_grad_(), idx

    assert_compiles_once(step, draw, [table], device, 1e-4, 1e-4)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    B, T, n_kv_head, group = (data.draw(st.integers(1, n)) for n in (2, 16, 3, 3))
    head_dim = 2 * data.draw(st.integers(1, 64))
    dtype, residual = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    order = data.draw(st.permutations(range(3)))

    def strided(shape, order, seed):
        laid = values([2 * shape[i] for i in order], dtype, device, seed)[tuple(slice(None, None, 2) for _ in order)]
        return laid.permute([order.index(i) for i in range(len(order))])

    packed = list(arguments(B, T, n_kv_head * group, n_kv_head, head_dim, dtype, device, residual))
    packed[0] = strided(packed[0].shape, order, 1)
    swapped = data.draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)]))
    check(packed, [strided(g.shape, swapped, 3 + i) for i, g in enumerate(gradients_for(packed))], f"{B, T, n_kv_head, group, head_dim}")


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [True, False], ids=["value residual", "plain"])
@pytest.mark.parametrize("shape", [(16, 2048, 4, 4, 128), (4, 1025, 8, 2, 64), (1, 1111, 5, 5, 96)], ids=str)
def test_real_sizes(shape, residual, device, poison_empty):
    packed = arguments(*shape, torch.bfloat16, device, residual)
    gradients = gradients_for(packed)
    first, second = check(packed, gradients), results(qkv_norm_rope, packed, gradients)
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_input():
    packed = arguments(2, 33, 4, 2, 64, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        outputs, gradients = check(packed, gradients_for(packed))
        assert torch.cuda.current_device() == 0 and {t.device for t in (*outputs, *gradients)} == {packed[0].device}


@pytest.mark.gpu
@pytest.mark.memory(24)
def test_more_than_two_billion_elements(device):
    packed = list(arguments(1, 2048, 8, 4, 128, torch.bfloat16, device))
    last, width = packed[0], packed[0].shape[-1]
    B = 2 + 2**31 // (2048 * width)
    packed[0] = torch.ones(B, 2048, width, device=device, dtype=torch.bfloat16)
    packed[0][-1] = last[0]
    gradients = [g.expand(B, -1, -1, -1) for g in gradients_for((last, *packed[1:]))]
    packed[5] = packed[5].expand(B, -1)
    outputs, (dqkv, _) = results(qkv_norm_rope, packed, gradients)
    alone, (expected, _) = results(qkv_norm_rope, (last, *packed[1:5], packed[5][:1], packed[6]), [g[:1] for g in gradients])
    assert all(torch.equal(a[-1:], b) for a, b in zip((*outputs, dqkv), (*alone, expected)))

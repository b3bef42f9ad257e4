"""Rotary embedding and norm of q and k: numbers against float64, and how they behave as an operator."""

from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once, tables, values
from precision import assert_close_to_reference

from kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward_op, qk_norm_rope_op, qk_norm_rope_ref

module = import_module("kernels.qk_norm_rope")  # `import kernels.qk_norm_rope as …` is the function
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results(f, q, k, cos, sin, gradients):
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = f(q, k, cos, sin)
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, (q, k), [g.to(o.dtype) for g, o in zip(gradients, outputs)])


def check(q, k, cos, sin, gradients, what=""):
    ours, low = (
        results(qk_norm_rope, q, k, cos, sin, gradients),
        results(qk_norm_rope_ref, q, k, cos.to(q.dtype), sin.to(q.dtype), gradients),
    )
    exact = results(qk_norm_rope_ref, *(t.double() for t in (q, k, cos, sin)), gradients)
    for kind, factor in ((0, 2), (1, 3)):
        for o, p, e, name in zip(ours[kind], low[kind], exact[kind], "qk"):
            assert_close_to_reference(o, p, e, factor, f"{what} {('output', 'gradient')[kind]} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 4, 4, 128), (1, 7, 6, 2, 64), (3, 1, 3, 1, 32), (1, 5, 2, 2, 96), (2, 3, 1, 1, 6)], ids=str)
def test_values(shape, dtype, device, poison_empty):
    B, T, n_head, n_kv_head, head_dim = shape
    q, dq = (values((B, T, n_head, head_dim), dtype, device, i) for i in (1, 2))
    k, dk = (values((B, T, n_kv_head, head_dim), dtype, device, i) for i in (3, 4))
    check(q, k, *tables(T, head_dim, device), (dq, dk), str(shape))


def test_is_the_norm_of_the_rotation(device):
    """Against the two steps written out with complex numbers: another derivation than the reference's."""
    q, (cos, sin) = values((1, 9, 2, 64), torch.float32, device), tables(9, 64, device, torch.float32)
    z = torch.complex(*q.chunk(2, -1)) * torch.complex(cos, -sin)[:, None]
    expected = torch.nn.functional.rms_norm(torch.cat([z.real, z.imag], -1), (64,))
    torch.testing.assert_close(qk_norm_rope(q, q, cos, sin)[0], expected, rtol=1e-5, atol=1e-5)


def test_tables_of_four_dimensions_and_eps(device):
    q, (cos, sin) = values((2, 9, 2, 64), torch.float32, device) * 1e-3, tables(9, 64, device)
    four = [t[None, :, None] for t in (cos, sin)]
    for eps in (None, 1e-6, 1e-2):
        y, _ = qk_norm_rope(q, q, cos, sin, eps)
        assert torch.equal(y, qk_norm_rope(q, q, *four, eps)[0])
        torch.testing.assert_close(y, qk_norm_rope_ref(q, q, *four, eps)[0], rtol=1e-5, atol=1e-5)


def test_strided_views_are_read_in_place(device, monkeypatch):
    """Parts of a packed qkv, heads before tokens; gradients of the same kinds, expanded ones, and what torch.cat gives."""
    cos, sin = tables(9, 64, device)
    packed = values((2, 9, 8, 64), torch.float32, device)
    q, k, _ = packed.split([4, 2, 2], 2)
    transposed = values((2, 4, 9, 64), torch.float32, device, 1).transpose(1, 2)
    monkeypatch.setattr(module, "_adjacent", lambda x, original=module._adjacent: (y := original(x), copies.append(y is not x))[0])
    copies = []
    check(q, k, cos, sin, (transposed, values((2, 2, 9, 64), torch.float32, device, 2).transpose(1, 2)))
    check(transposed, k, cos, sin, (q, k))
    assert not any(copies)
    check(q, k, cos, sin, (torch.ones((), device=device).expand(q.shape), k))
    check(packed[..., ::2], packed[..., ::2], *tables(9, 32, device), (values((2, 9, 8, 32), torch.float32, device),) * 2)
    x = packed.clone().requires_grad_()
    loss = [torch.cat([*f(x[:, :, :4], x[:, :, 4:], cos, sin), x], 2).square().sum() for f in (qk_norm_rope, qk_norm_rope_ref)]
    ours, exact = (torch.autograd.grad((value + x.sum()), x)[0] for value in loss)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_nothing_is_written_into_inputs_or_gradients(device):
    x, (cos, sin) = values((2, 5, 4, 64), torch.float32, device).requires_grad_(), tables(5, 64, device)
    y = qk_norm_rope(x, x, cos, sin)
    gradients = [values(x.shape, torch.float32, device, i) for i in (1, 2)]
    kept = [t.detach().clone() for t in (x, *y, *gradients)]
    (first,) = torch.autograd.grad(y, x, gradients, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, gradients)
    assert torch.equal(first, second) and all(map(torch.equal, kept, (x, *y, *gradients)))


def test_frozen_inputs_and_modes(device, monkeypatch):
    q, k, (cos, sin) = values((1, 5, 4, 64), torch.float32, device), values((1, 5, 2, 64), torch.float32, device, 1), tables(5, 64, device)
    asked = []
    original = qk_norm_rope_backward_op
    monkeypatch.setattr(module, "qk_norm_rope_backward_op", lambda *a: (asked.append(a[-2:]), original(*a))[1])
    for trained, frozen, wanted in ((q, k, (True, False)), (k, q, (False, True))):
        trained.requires_grad_().grad = None
        frozen.requires_grad_(False).grad = None
        sum(y.square().sum() + y[..., 0].sum() for y in qk_norm_rope(q, k, cos, sin)).backward()
        (exact,) = torch.autograd.grad(sum(y.square().sum() + y[..., 0].sum() for y in qk_norm_rope_ref(q, k, cos, sin)), trained)
        assert asked[-1] == wanted and frozen.grad is None
        torch.testing.assert_close(trained.grad, exact, rtol=1e-4, atol=1e-4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not qk_norm_rope(q, k, cos, sin)[0].requires_grad
    assert not saved
    with torch.autocast(device, torch.bfloat16):
        assert qk_norm_rope(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.bfloat16
    (dk,) = torch.autograd.grad(qk_norm_rope(q, k, cos, sin)[1].pow(3).sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="qk_norm_rope: double backward is not supported"):
        dk.sum().backward()
    empty = torch.empty(0, 5, 4, 64, device=device, requires_grad=True)
    sum(y.sum() for y in qk_norm_rope(empty, empty, cos, sin)).backward()
    assert empty.grad.shape == empty.shape


def test_unsupported_input(device):
    q, (cos, sin) = torch.zeros(2, 5, 4, 64, device=device), tables(5, 64, device)
    for arguments, message in [
        ((q[0], q, cos, sin), "heads, head_dim"),
        ((q, q[:1], cos, sin), "heads, head_dim"),
        ((q, q.half(), cos, sin), "one dtype"),
        ((q, q, cos[:4], sin), r"cos of shape \(4, 32\)"),
        ((q, q, cos, sin[:, :8]), "sin of shape"),
        ((q.double(), q, cos, sin), "float64"),
        ((q[..., :63], q[..., :63], cos, sin), "even"),
        ((q, q, cos.float().requires_grad_(), sin), "detach"),
    ]:
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(*arguments)


def test_opcheck(device):
    q, k = values((2, 5, 4, 32), torch.float32, device), values((2, 5, 2, 32), torch.float32, device, 1)
    cos, sin = tables(5, 32, device)
    torch.library.opcheck(qk_norm_rope_backward_op, (q, k, q, k, cos, sin, 1e-6, True, True))
    torch.library.opcheck(qk_norm_rope_backward_op, (q, k, q, k, cos, sin, 1e-6, False, True))
    torch.library.opcheck(qk_norm_rope_op, (q.requires_grad_(), k.requires_grad_(), cos, sin, 1e-6))


def test_gradcheck(device):
    """In float32, which is what the kernel takes, hence the wide step and tolerance."""
    q, k = (values((1, 2, n, 8), torch.float32, device, n).requires_grad_() for n in (2, 1))
    assert torch.autograd.gradcheck(
        lambda q, k: qk_norm_rope(q, k, *tables(2, 8, device)), (q, k), eps=1e-2, atol=2e-2, rtol=1e-2, nondet_tol=0
    )


def test_compiles_once_without_graph_breaks(device):
    cos, sin = tables(5, 64, device)

    def step(qkv):
        q, k, v = qkv.split([4, 2, 2], 2)
        q, k = qk_norm_rope(q * 2, k, cos, sin)
        return (q.square() * 2).mean() + (k * v).sum()

    assert_compiles_once(step, lambda seed: [values((2, 5, 8, 64), torch.float32, device, seed).requires_grad_()], [], device)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.data())
def test_any_shape_and_strides(device, data):
    B, T, n_kv_head, group = (data.draw(st.integers(1, n)) for n in (3, 40, 3, 3))
    head_dim = 2 * data.draw(st.integers(4, 64))
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(3)))

    def strided(heads, seed):
        shape = (B, T, heads)
        laid = values((*(2 * shape[i] for i in order), head_dim), dtype, device, seed)[::2, ::2, ::2]
        return laid.permute(*(order.index(i) for i in range(3)), 3)

    n_head = n_kv_head * group
    check(strided(n_head, 1), strided(n_kv_head, 2), *tables(T, head_dim, device), (strided(n_head, 3), strided(n_kv_head, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 4, 4, 128), (4, 1025, 32, 4, 128), (2, 4096, 24, 24, 64), (1, 1111, 5, 5, 96)], ids=str)
def test_real_sizes(shape, device, poison_empty):
    B, T, n_head, n_kv_head, head_dim = shape
    q, dq = (torch.randn(B, T, n_head, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, dk = (torch.randn(B, T, n_kv_head, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    cos, sin = tables(T, head_dim, device)
    check(q, k, cos, sin, (dq, dk))
    first, second = (results(qk_norm_rope, q, k, cos, sin, (dq, dk)) for _ in range(2))
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1])))


@pytest.mark.gpu
@pytest.mark.memory(24)
def test_more_than_two_billion_elements(device):
    q = torch.ones(1 + 2**31 // (2048 * 32 * 128), 2048, 32, 128, device=device, dtype=torch.bfloat16)
    q[-1] = torch.randn(2048, 32, 128, device=device)
    cos, sin = tables(2048, 128, device)
    k = q[:, :, :1]
    last = qk_norm_rope(q[-1:], k[-1:], cos, sin)
    assert all(torch.equal(a[-1:], b) for a, b in zip(qk_norm_rope(q, k, cos, sin), last))

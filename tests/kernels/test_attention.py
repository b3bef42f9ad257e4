"""flash_attention: numbers against float64, windows, grouped heads, strides, autograd, compile, and what it refuses."""

import itertools
import math

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from precision import assert_close_to_reference

from kernels import attention
from kernels.attention import flash_attention, flash_attention_ref

# The interpreter divides by the empty sums of the rows beyond the end; nothing of them is stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NAMES = "o", "dq", "dk", "dv"


def make(B, T, n_head, n_kv_head, head_dim, dtype=torch.bfloat16, device="cpu", n_keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    n_keys = T if n_keys is None else n_keys
    return [draw(B, T, n_head, head_dim), *(draw(B, n_keys, n_kv_head, head_dim) for _ in "kv")], draw(B, T, n_head, head_dim)


def run(function, inputs, do, **options):
    """(o, dq, dk, dv) of `function`; fresh leaves that keep the strides."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves, **options)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def check(inputs, do, results=None, **options):
    """Outputs within 2, gradients within 3 times the error of the same mathematics run by torch in the inputs' own dtype.

    Behind each element stand two sums in a row: over head_dim, a score's, and over the keys or queries.
    """
    ours = run(flash_attention, inputs, do, **options) if results is None else results
    low = run(flash_attention_ref, inputs, do, **options)
    exact = run(flash_attention_ref, [x.double() for x in inputs], do.double(), **options)
    for name, a, b, c, factor in zip(NAMES, ours, low, exact, (2, 3, 3, 3)):
        assert a.dtype == inputs[0].dtype
        if not c.any():  # a query that sees one key: P = 1 whatever q and k are, and what is left is P · (dP - delta), float32 rounding
            assert a.abs().max() < 1e-5, f"{name} {options}: {a.abs().max()}, expected 0"
            continue
        additions = inputs[0].shape[3] + max(inputs[0].shape[1], inputs[1].shape[1])
        assert_close_to_reference(a, b, c, factor, f"{name} {tuple(inputs[0].shape)} {options}", additions)
    return ours


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "T, n_head, n_kv_head, head_dim, causal, window",
    [
        (63, 1, 1, 32, True, None),
        (97, 2, 1, 64, True, None),
        (77, 1, 1, 128, True, 20),
        (111, 2, 2, 64, False, None),
        (160, 2, 1, 32, True, 50),
        (130, 1, 1, 96, True, 16),
        (40, 1, 1, 256, True, None),
        (70, 1, 1, 80, False, None),
        (128, 2, 1, 16, True, None),
        (17, 1, 1, 128, True, 1000),
    ],
)
def test_matches_reference(dtype, T, n_head, n_kv_head, head_dim, causal, window, device, poison_empty):
    check(*make(2 if T < 50 else 1, T, n_head, n_kv_head, head_dim, dtype, device), causal=causal, window=window)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 16])
def test_rows_that_see_no_key_of_their_first_block(head_dim, window, device):
    """With a window shorter than a block of queries, the last of them see nothing of the first block of keys that is read."""
    check(*make(1, 150, 1, 1, head_dim, torch.bfloat16, device), causal=True, window=window)


def test_one_token(device):
    """The output is v; q and k have no influence, so their gradients are rounding errors around zero."""
    (q, k, v), do = make(2, 1, 2, 1, 64, torch.float32, device)
    o, dq, dk, dv = run(flash_attention, (q, k, v), do)
    torch.testing.assert_close(o, v.expand(2, 1, 2, 64), rtol=1e-6, atol=0)
    torch.testing.assert_close(dv, do.sum(2, keepdim=True), rtol=1e-6, atol=1e-6)
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5


def test_cross_attention(device):
    check(*make(1, 50, 2, 1, 64, torch.bfloat16, device, n_keys=83), causal=False)
    check(*make(1, 83, 1, 1, 64, torch.bfloat16, device, n_keys=5), causal=False)


def test_scale_and_large_scores(device):
    (q, k, v), do = make(1, 100, 1, 1, 64, torch.bfloat16, device)
    check((q, k, v), do, scale=0.3)
    check((q * 30, k * 30, v), do, window=40)  # scores in the hundreds: the maximum has to be subtracted
    far = k - 100 * q.mean(1, keepdim=True).sign() / 8  # scores well below zero for all keys of many queries
    check((q + 2, far, v), do, causal=False)


def test_window_skips_blocks(device):
    """Keys further back than the window and a block are never read: NaN there would show, even masked (0 · NaN)."""
    (q, k, v), do = make(1, 640, 1, 1, 32, torch.bfloat16, device)
    clean = run(flash_attention, (q, k, v), do, window=16)
    k[:, :128], v[:, :128] = float("nan"), float("nan")
    o, dq, dk, dv = run(flash_attention, (q, k, v), do, window=16)
    for name, ours, expected in zip(NAMES, (o, dq, dk, dv), clean):
        assert torch.equal(ours[:, 384:], expected[:, 384:]), name


def test_window_wider_than_the_sequence_is_plain_causal(device):
    inputs, do = make(1, 60, 1, 1, 32, torch.bfloat16, device)
    plain = run(flash_attention, inputs, do)
    for window in (59, 60, 10**9):
        assert all(map(torch.equal, run(flash_attention, inputs, do, window=window), plain))


@pytest.mark.parametrize("head_dim, window", [(64, None), (64, 20), (128, None), (128, 20), (256, None)])
def test_gfx1151_variants(head_dim, window, device, monkeypatch):
    """The loops, passes and tiles that AMD gets, wherever this runs: only their options (waves_per_eu) stay behind."""
    for name, table in (("_forward", attention.FORWARD_CONFIGS), ("_dkdv", attention.DKDV_CONFIGS), ("_dq", attention.DQ_CONFIGS)):
        kernel = getattr(attention, name + "_kernel")
        tuned = {}
        for block_d, candidates in table.items():
            config = candidates["hip"][-1]
            kwargs = {k: v for k, v in config.kwargs.items() if k != "waves_per_eu"}
            tuned[block_d] = triton.autotune([triton.Config(kwargs, num_warps=config.num_warps, num_stages=1)], key=[])(kernel)
        monkeypatch.setattr(attention, name, tuned)
    monkeypatch.setitem(attention.FUSE_DKDV_TO, attention.BACKEND, attention.FUSE_DKDV_TO["hip"])
    check(*make(1, 100, 2, 1, head_dim, torch.bfloat16, device), window=window)


# --- bounded: no running maximum -----------------------------------------------------------------------------------


def bounded(*inputs, **options):
    return flash_attention(*inputs, bounded=True, **options)


def normed(inputs, size):
    """q and k of one length each, so that no score leaves ±size at the usual scale, and v."""
    q, k, v = inputs
    q, k = (size**0.5 * q.shape[-1] ** 0.25 * torch.nn.functional.normalize(x.double(), dim=-1).to(x.dtype) for x in (q, k))
    return q, k, v


@pytest.mark.parametrize(
    "dtype, T, n_head, n_kv_head, head_dim, causal, window, size",
    [
        (torch.bfloat16, 97, 2, 1, 64, True, None, 8),
        (torch.bfloat16, 97, 1, 1, 64, True, None, 30),  # of a model whose norms multiply
        (torch.bfloat16, 77, 4, 2, 128, True, 20, 11.3),
        (torch.bfloat16, 130, 1, 1, 96, True, 16, 30),
        (torch.bfloat16, 40, 1, 1, 256, True, None, 16),
        (torch.bfloat16, 50, 2, 2, 32, False, None, 5.7),
        (torch.bfloat16, 50, 2, 1, 24, True, 20, 30),
    ],
    ids=str,
)
def test_bounded_matches_reference(dtype, T, n_head, n_kv_head, head_dim, causal, window, size, device, poison_empty):
    inputs, do = make(1, T, n_head, n_kv_head, head_dim, dtype, device)
    inputs, options = normed(inputs, size), dict(causal=causal, window=window)
    check(inputs, do, run(bounded, inputs, do, **options), **options)


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_scores_at_the_bound(sign, device):
    """All scores at 60, all at -60, and both in turns: as accurate as with a maximum."""
    (q, k, v), do = make(1, 80, 1, 1, 32, torch.bfloat16, device)
    signs = sign or (torch.arange(80, device=device) % 2 * 2 - 1)[None, :, None, None]
    inputs = normed((1 + q / 50, (1 + k / 50) * signs, v), 59.9)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs[0].double(), inputs[1].double()) / 32**0.5
    assert scores.abs().min() > 59 and scores.abs().max() < 60.5 and bool((scores > 0).any()) == (sign >= 0)
    for options in (dict(causal=False), dict(window=20)):
        check(inputs, do, run(bounded, inputs, do, **options), **options)


def test_beyond_the_bound(device):
    """What the docstring says of scores that were promised to be small: far above the results are not finite, far below not either,
    or zero. A row whose scores keep the promise is right whatever others do; without the promise all are."""
    (q, k, v), _ = make(1, 70, 1, 1, 64, torch.bfloat16, device)
    k = torch.ones_like(k)
    for size in (300.0, -300.0):
        q = torch.full_like(q, size / 8)
        q[:, :30] = 0.5
        o, plain = bounded(q, k, v), flash_attention(q, k, v)
        assert torch.equal(o[:, :30], bounded(q[:, :30], k[:, :30], v[:, :30]))
        assert not (o[:, 30:].isfinite() & (o[:, 30:] != 0)).any()
        torch.testing.assert_close(plain, flash_attention_ref(q.float(), k.float(), v.float()).bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bounded_has_an_effect_in_bfloat16_alone(dtype, device):
    """e^11.1 is float16's largest number, and normed heads of 128 have scores up to 11.3; in float32 the maximum costs little and saves
    digits. So it stays there, also by autocast."""
    (q, k, v), do = make(1, 60, 1, 1, 128, dtype, device)
    q, k, v = normed((q, q, v), 50)
    assert all(map(torch.equal, run(bounded, (q, k, v), do), run(flash_attention, (q, k, v), do)))
    if dtype == torch.float16:
        with torch.autocast(device, torch.float16):
            assert torch.equal(bounded(q.float(), k.float(), v.float()), flash_attention(q, k, v))
    q, k, v = (x.bfloat16() for x in normed((q, q, v), 5))
    assert not torch.equal(bounded(q, k, v), flash_attention(q, k, v))


def test_bounded_of_a_single_key(device):
    """A query that sees one key gets that key's value, and nothing of it depends on the query, whatever e^score rounds to."""
    (q, k, v), do = make(1, 40, 2, 2, 64, torch.bfloat16, device)
    q, k, v = normed((q, k, v), 9)
    o, dq, dk, dv = run(bounded, (q, k, v), do, window=0)
    assert torch.equal(o, v) and max(dq.abs().max(), dk.abs().max()) < 1e-5
    assert ((dv - do).abs() <= torch.finfo(torch.bfloat16).eps * do.abs()).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bounded_of_one_key_that_outweighs_all(head_dim, device):
    """So does a query that sees many keys, most of them blocks away from it, if one alone has weight."""
    (q, k, v), do = make(1, 300, 1, 1, head_dim, torch.bfloat16, device)
    strength = torch.linspace(0.8, 1, 300, device=device)[None, :, None, None].bfloat16()
    q, k, v = normed((q[:, :1].expand_as(q) * strength, torch.cat([q[:, :1], -q[:, :1].expand_as(q)[:, 1:]], 1), v), 58)
    o, dq, dk, _ = run(bounded, (q * strength, k, v), do)
    assert torch.equal(o, v[:, :1].expand_as(o)) and max(dq.abs().max(), dk.abs().max()) < 2e-3


def test_bounded_lse_is_not_biased(device):
    """bfloat16 weights are summed, rounded or truncated: lse is right in the mean, and of few keys within an ulp."""
    inputs, _ = make(1, 260, 4, 4, 64, torch.bfloat16, device)
    lse, exact = (attention._flash_attention(*normed(inputs, 11), True, -1, 0.125, fixed)[1] for fixed in (True, False))
    assert (lse - exact)[..., 200:].mean().abs() < 2e-4 and (lse - exact).abs().max() < 2**-8 / math.log(2)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_bounded_of_any_shape(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    T, group, n_kv_head = data.draw(st.integers(8, 80)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    head_dim, size = data.draw(st.sampled_from([16, 24, 64])), data.draw(st.floats(0.1, 60))
    window = data.draw(st.none() | st.integers(0, 100))
    causal = window is not None or data.draw(st.booleans())
    inputs, do = make(1, T, group * n_kv_head, n_kv_head, head_dim, torch.bfloat16, device, seed=T)
    inputs, options = normed(inputs, size), dict(causal=causal, window=window)
    check(inputs, do, run(bounded, inputs, do, **options), **options)


# --- layout and grouped heads --------------------------------------------------------------------------------------


def test_packed_and_strided_views(device):
    B, T, n_head, n_kv_head, head_dim = 2, 30, 2, 1, 32
    (wide, _, _), do = make(B, 2 * T, n_head + 2 * n_kv_head, 1, head_dim, torch.bfloat16, device)
    packed = wide[:, :T]
    q, k, v = packed.split([n_head, n_kv_head, n_kv_head], 2)  # views of one projection
    do = do[:, :T, :n_head]
    assert not (q.is_contiguous() or do.is_contiguous())
    expected = check([x.contiguous() for x in (q, k, v)], do.contiguous())
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # (B, n_head, T, head_dim) in memory
    last_apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]  # head_dim strided: copied
    for inputs in ((q, k, v), by_head, last_apart):
        assert all(map(torch.equal, run(flash_attention, inputs, do), expected))
    every_other = [torch.stack([x, x], 2).flatten(1, 2)[:, ::2] for x in (q, k, v)]
    assert all(map(torch.equal, run(flash_attention, every_other, do), expected))


def test_expanded_keys(device):
    """Stride 0 over heads; the gradient is for each expanded head."""
    (q, k, v), do = make(1, 40, 3, 1, 32, torch.bfloat16, device)
    inputs = q, k.expand(-1, -1, 3, -1), v.expand(-1, -1, 3, -1)
    assert all(map(torch.equal, run(flash_attention, inputs, do), run(flash_attention, [x.contiguous() for x in inputs], do)))


def test_incoming_gradients_of_any_stride(device):
    (q, k, v), do = make(2, 17, 2, 2, 32, torch.float32, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def grads(function, loss, inputs=leaves):
        return torch.autograd.grad(loss(function(*inputs)), inputs)

    weight = torch.randn(2, 32, 2, 17, device=device)
    for n, loss in enumerate((
        lambda o: o.sum(),
        lambda o: torch.cat([o, o], 3).square().sum(),
        lambda o: (o.transpose(1, 3) * weight).sum(),
        lambda o: o[:, :, :1].mean(),
        lambda o: (o.permute(2, 0, 1, 3).flatten() ** 2).sum(),
    )):  # fmt: skip
        exact = grads(flash_attention_ref, loss, [x.detach().double().requires_grad_() for x in leaves])
        for name, *three in zip(NAMES[1:], grads(flash_attention, loss), grads(flash_attention_ref, loss), exact):
            assert_close_to_reference(*three, 3, f"{name} of loss {n}", additions=17 + 32)


def test_grouped_heads_equal_repeated_ones(device):
    (q, k, v), do = make(1, 40, 4, 2, 32, torch.float32, device)
    o, dq, dk, dv = run(flash_attention, (q, k, v), do)
    repeated = q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    o2, dq2, dk2, dv2 = run(flash_attention, repeated, do)
    assert torch.equal(o, o2) and torch.equal(dq, dq2)
    for grad, apart in ((dk, dk2), (dv, dv2)):
        torch.testing.assert_close(grad, apart.unflatten(2, (2, 2)).sum(3), rtol=1e-5, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape_and_stride(data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B, T, group, n_kv_head = (data.draw(st.integers(1, n)) for n in (2, 100, 3, 1))
    head_dim = data.draw(st.sampled_from([16, 24, 32, 40, 64]))
    window = data.draw(st.none() | st.integers(0, 150))
    causal = window is not None or data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16]))
    inputs, do = make(B, max(T, 2), group * n_kv_head, n_kv_head, head_dim, dtype, device, seed=T)

    def restride(x):
        order = data.draw(st.permutations(range(3)))
        back = [order.index(i) for i in range(3)]
        gap = data.draw(st.integers(0, 2))
        x = x.permute(*order, 3)
        return torch.cat([x, x[..., : 8 * gap]], 3)[..., :head_dim].permute(*back, 3) if gap else x.contiguous().permute(*back, 3)

    check([restride(x) for x in inputs], restride(do), causal=causal, window=window)


# --- autograd ------------------------------------------------------------------------------------------------------


def test_leaves_inputs_saved_tensors_and_gradients_alone(device):
    inputs, do = make(1, 60, 2, 1, 32, torch.bfloat16, device)
    before = [x.clone() for x in (*inputs, do)]
    leaves = [x.requires_grad_() for x in inputs]
    o = flash_attention(*leaves, window=20)
    kept = o.detach().clone()
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    second = torch.autograd.grad(o, leaves, do)
    assert all(map(torch.equal, first, second)) and torch.equal(o, kept)
    assert all(map(torch.equal, (*inputs, do), before))


def test_same_tensor_as_query_and_key(device):
    (x, _, _), do = make(1, 33, 1, 1, 32, torch.float32, device)
    x.requires_grad_()
    (ours,) = torch.autograd.grad(flash_attention(x, x, x), x, do)
    (expected,) = torch.autograd.grad(flash_attention_ref(x, x, x), x, do)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3))[1:-1])
def test_frozen_inputs(needs, device):
    inputs, do = make(1, 40, 2, 1, 32, torch.bfloat16, device)
    expected = run(flash_attention, inputs, do)[1:]
    leaves = [x.requires_grad_(need) for x, need in zip(inputs, needs)]
    flash_attention(*leaves).backward(do)
    for x, need, grad in zip(leaves, needs, expected):
        assert torch.equal(x.grad, grad) if need else x.grad is None


def test_frozen_inputs_cost_nothing(device, monkeypatch):
    launched = []
    for name in ("_dkdv", "_dq"):
        table = getattr(attention, name)

        class Spy:
            def __init__(self, kernel, name=name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                def launch(*args, **kwargs):
                    launched.append(self.name)
                    return self.kernel[grid](*args, **kwargs)

                return launch

        monkeypatch.setattr(attention, name, {d: Spy(kernel) for d, kernel in table.items()})
    (q, k, v), do = make(1, 20, 1, 1, 32, torch.bfloat16, device)
    flash_attention(q.requires_grad_(), k, v).backward(do)
    assert launched == ["_dq"]


def test_without_gradients(device):
    inputs, do = make(1, 30, 1, 1, 32, torch.bfloat16, device)
    expected = flash_attention(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            o = flash_attention(*leaves)
        assert torch.equal(o, expected) and o.grad_fn is None and not o.requires_grad


def test_double_backward_is_refused(device):
    inputs, do = make(1, 20, 1, 1, 32, torch.float32, device)
    leaves = [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(flash_attention(*leaves), leaves, do, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grads[0].sum().backward()


def test_deterministic(device):
    inputs, do = make(1, 150, 2, 1, 64, torch.bfloat16, device)
    first = run(flash_attention, inputs, do, window=50)
    for _ in range(2):
        assert all(map(torch.equal, run(flash_attention, inputs, do, window=50), first))


def test_autocast(device):
    (q, k, v), do = make(1, 40, 2, 1, 32, torch.float32, device)
    leaves = [q.requires_grad_(), k.bfloat16().requires_grad_(), v.requires_grad_()]  # mixed, as a model under autocast has them
    with torch.autocast(device, torch.bfloat16):
        o = flash_attention(*leaves)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    grads = torch.autograd.grad(o, leaves, do.bfloat16())
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]


def test_nothing_to_do(device):
    for B, T in ((0, 5), (2, 0)):
        leaves = [torch.randn(B, T, 2, 32, device=device, requires_grad=True) for _ in "qkv"]
        o = flash_attention(*leaves)
        assert o.shape == (B, T, 2, 32)
        o.sum().backward()
        assert all(x.grad.shape == x.shape for x in leaves)


# --- as an operator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal, window", [(True, -1), (True, 8), (False, -1)])
def test_opcheck(causal, window, device):
    inputs, do = make(1, 20, 2, 1, 16, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(attention._flash_attention, (*leaves, causal, window, 0.2, window == 8))
    o, lse = attention._flash_attention(*(x.detach() for x in inputs), causal, window, 0.2)
    inputs = [x.detach() for x in inputs]
    torch.library.opcheck(attention._flash_attention_backward, (do, *inputs, o, lse, causal, window, 0.2, True, False, True))


def test_lse_is_the_base_2_log_sum_exp(device):
    (q, k, v), _ = make(1, 40, 1, 1, 32, torch.float32, device)
    _, lse = attention._flash_attention(q, k, v, False, -1, 0.2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2
    torch.testing.assert_close(lse * 0.6931471805599453, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_compiles_without_breaks_or_recompiles(device):
    compiles = []

    def backend(graph, example_inputs):
        compiles.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, example_inputs)

    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: flash_attention(q * 1.0, k, v, window=16, bounded=True).relu(), backend=backend, fullgraph=True
    )
    for step in range(3):
        inputs, do = make(1, 20, 1, 1, 32, torch.float32, device, seed=step)
        ours = run(function, inputs, do)
        expected = run(lambda q, k, v: flash_attention(q, k, v, window=16, bounded=True).relu(), inputs, do)
        assert all(map(torch.equal, ours, expected))
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: ((q[0], k, v), {}), "must be"),
        (lambda q, k, v: ((q, k, v[:, :4]), {}), "one shape"),
        (lambda q, k, v: ((q, k[:1], v[:1]), {}), "batch size"),
        (lambda q, k, v: ((q[:, :, :3], k, v), {}), "multiple of n_kv_head"),
        (lambda q, k, v: ((q[..., :12], k[..., :12], v[..., :12]), {}), "head_dim 12"),
        (lambda q, k, v: ((q[..., :0], k[..., :0], v[..., :0]), {}), "head_dim 0"),
        (lambda q, k, v: ((q.sum(), k.sum(), v.sum()), {}), r"must be \(B, T, heads, head_dim\), got \(\)"),
        (lambda q, k, v: ((q, k[:, :4], v[:, :4]), {}), "ambiguous"),
        (lambda q, k, v: ((q, k[:, :0], v[:, :0]), dict(causal=False)), "no keys"),
        (lambda q, k, v: ((q, k, v), dict(window=-1)), "window -1"),
        (lambda q, k, v: ((q, k, v), dict(window=4, causal=False)), "needs causal"),
        (lambda q, k, v: ((q, k, v), dict(scale=0.0)), "scale 0.0"),
        (lambda q, k, v: ((q, k, v), dict(scale=float("nan"))), "scale nan"),
        (lambda q, k, v: ((q.double(), k.double(), v.double()), {}), "float64"),
        (lambda q, k, v: ((q.half(), k, v), {}), "one dtype"),
        (lambda q, k, v: ((q.to("meta"), k, v), {}), "different devices"),
    ],
)
def test_refuses(change, message, device):
    inputs, _ = make(2, 8, 4, 2, 16, torch.float32, device)
    inputs, options = change(*inputs)
    with pytest.raises(ValueError, match=message):
        flash_attention(*inputs, **options)


# --- real sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("T, window", [(1025, None), (2048, None), (2048, 1024), (2048, 256), (1111, 77), (777, 0)])
def test_real_sizes(dtype, head_dim, T, window, device, poison_empty):
    check(*make(2, T, 4, 2, head_dim, dtype, device), window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("T, window", [(2048, None), (2048, 256), (1111, 77)])
def test_real_sizes_bounded(head_dim, T, window, device, poison_empty):
    inputs, do = make(2, T, 4, 2, head_dim, torch.bfloat16, device)
    for size in (head_dim**0.5, 60):
        check(normed(inputs, size), do, run(bounded, normed(inputs, size), do, window=window), window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_real_sizes_not_causal_and_float32(head_dim, device):
    check(*make(2, 1025, 4, 1, head_dim, torch.bfloat16, device), causal=False)
    check(*make(1, 513, 2, 1, head_dim, torch.float32, device), window=100)


@pytest.mark.gpu
def test_every_cuda_candidate(device, monkeypatch):
    """Autotuning may choose any of them."""
    for block_d in (64, 128, 256, "float32"):
        head_dim, dtype = (64, torch.float32) if block_d == "float32" else (block_d, torch.bfloat16)
        tables = [
            (n, t[block_d][attention.BACKEND])
            for n, t in (("_forward", attention.FORWARD_CONFIGS), ("_dkdv", attention.DKDV_CONFIGS), ("_dq", attention.DQ_CONFIGS))
        ]
        for i in range(max(len(candidates) for _, candidates in tables)):
            for name, candidates in tables:
                kernel = getattr(attention, name + "_kernel")
                one = triton.autotune([candidates[i % len(candidates)]], key=[])(kernel)
                monkeypatch.setitem(getattr(attention, name), block_d, one)
            for window in (None, 150):
                check(*make(1, 700, 2, 1, head_dim, dtype, device), window=window)
            check(*make(1, 500, 2, 1, head_dim, dtype, device), causal=False)


@pytest.mark.gpu
@pytest.mark.memory(16)
def test_more_than_2_31_elements(device):
    buffer = torch.randn(2**31 + 2**20, device=device, dtype=torch.bfloat16)
    views = [buffer.as_strided((2, 100, 2, 64), (2**31, 128, 64, 1), offset) for offset in (0, 2**18, 2**19)]
    do = torch.randn(2, 100, 2, 64, device=device, dtype=torch.bfloat16)
    assert all(map(torch.equal, run(flash_attention, views, do), run(flash_attention, [x.contiguous() for x in views], do)))
    far = [buffer.as_strided((1, 100, 2, 64), (128, 2**24 + 128, 64, 1), offset) for offset in (0, 2**18, 2**19)]  # rows far apart
    expected = run(flash_attention, [x.contiguous() for x in far], do[:1])
    assert all(map(torch.equal, run(flash_attention, far, do[:1]), expected))


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_holds(device):
    check(*make(70_000, 16, 1, 1, 16, torch.bfloat16, device))


@pytest.mark.gpu
def test_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(*make(1, 64, 1, 1, 64, torch.bfloat16, "cuda:1"))


@pytest.mark.gpu
def test_memory_is_inputs_output_and_lse(device):
    (q, k, v), _ = make(1, 4096, 32, 32, 128, torch.bfloat16, device)
    flash_attention(q, k, v)  # tuning allocates
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    flash_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - base <= 1.05 * (q.numel() * 2 + 4 * 32 * 4096)

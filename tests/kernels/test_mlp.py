"""add_norm_mlp: numbers of both its paths against float64, which of them is taken, strides, autograd, compile, what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operators import assert_compiles_once
from precision import assert_close_to_reference

from kernels import add_norm_mlp, add_norm_mlp_ref, mlp

NAMES = "h", "y", "dx", "dupdate", "dfc", "dproj"


def values(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inputs_for(shape, hidden, out, dtype, device, weight_dtype=None):
    N = shape[-1]
    weights = values((hidden, N), torch.float32, device, 2) / N**0.5, values((out, hidden), torch.float32, device, 3) / hidden**0.5
    return [values(shape, dtype, device, 0), values(shape, dtype, device, 1), *(w.to(weight_dtype or dtype) for w in weights)]


def gradients_for(inputs, seed=4):
    x, _, _, proj = inputs
    return [values((*x.shape[:-1], n), x.dtype, x.device, seed + i) for i, n in enumerate((x.shape[-1], proj.shape[0]))]


def results(f, inputs, gradients):
    """(h, y, and the gradients of the four inputs), of leaves that keep the strides."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = f(*leaves)
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, [g.to(y.dtype) for g, y in zip(gradients, outputs)])]


def check(inputs, gradients, what=""):
    ours, low = results(add_norm_mlp, inputs, gradients), results(add_norm_mlp_ref, inputs, gradients)
    exact = results(add_norm_mlp_ref, [t.double() for t in inputs], gradients)
    for name, a, b, c in zip(NAMES, ours, low, exact):
        assert_close_to_reference(a, b, c, 2 if name in "hy" else 3, f"{name} {what}")
    return ours


@pytest.fixture
def launched(monkeypatch):
    """Whether each product so far that could be fused was."""
    calls = []
    original = mlp._fusable
    monkeypatch.setattr(mlp, "_fusable", lambda *tensors: (calls.append(original(*tensors)), calls[-1])[1])
    return calls


@pytest.fixture
def has_kernel(device):
    return mlp._programs(torch.device(device, 0 if device == "cuda" else None)) > 0


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, hidden, out",
    [
        ((128, 64), 64, 64),  # the least that is fused
        ((2, 96, 72), 264, 72),  # tails of all three blocks
        ((131, 64), 520, 136),  # tiles whose second half lies beyond the end; more of them than programs
    ],
)
def test_fused(shape, hidden, out, device, launched, has_kernel, poison_empty):
    inputs = inputs_for(shape, hidden, out, torch.bfloat16, device)
    check(inputs, gradients_for(inputs), f"{shape} {hidden} {out}")
    assert launched == [has_kernel] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, hidden, out",
    [
        ((127, 64), 128, 64),
        ((200, 56), 128, 56),
        ((130, 68), 128, 68),
        ((130, 64), 100, 64),
        ((3, 5, 33), 7, 9),
        ((1, 8), 8, 8),
        ((70, 2), 16, 16),
        ((64,), 96, 64),
        ((5, 16), 2100, 16),
    ],
    ids=str,
)
def test_not_fused(shape, hidden, out, dtype, device, launched, poison_empty):
    """Too few rows, too narrow, rows that are no multiple of 128 bits, float32; a hidden row of two blocks."""
    inputs = inputs_for(shape, hidden, out, dtype, device)
    check(inputs, gradients_for(inputs), f"{shape} {hidden} {out}")
    assert launched == [False, False]


def test_one_number(device):
    """In float32: the norm of a single number is its sign, exact in bfloat16 too, which torch's own path then profits from."""
    inputs = inputs_for((1, 1), 1, 1, torch.float32, device)
    check(inputs, gradients_for(inputs))


def test_both_paths_agree(device, monkeypatch):
    """They round differently between product and activation: closer to each other than bfloat16 is to float32."""
    inputs = inputs_for((256, 128), 320, 128, torch.bfloat16, device)
    fused = results(add_norm_mlp, inputs, gradients_for(inputs))
    monkeypatch.setattr(mlp, "_programs", lambda device: 0)
    apart = results(add_norm_mlp, inputs, gradients_for(inputs))
    assert torch.equal(fused[0], apart[0])
    for name, a, b in zip(NAMES, fused, apart):
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm(), name


@pytest.mark.parametrize("kernel", [True, False])
def test_special_values(kernel, device, monkeypatch):
    """NaN reaches its row alone; what is below 0 gives 0 and no gradient; an infinite hidden value stays infinite."""
    if not kernel:
        monkeypatch.setattr(mlp, "_programs", lambda device: 0)
    normed, fc = torch.eye(128, 64, device=device).bfloat16(), values((64, 64), torch.bfloat16, device)
    normed[1] = float("nan")
    fc[3, 0] = float("inf")
    scales = torch.linspace(0.5, 2, 128, device=device)
    a = mlp._relu_squared_product(normed, fc, scales)
    expected = torch.relu(scales[:, None] * (normed.float() @ fc.float().t())).square()
    torch.testing.assert_close(a.float(), expected, rtol=0.01, atol=0, equal_nan=True)
    assert a[1].isnan().all() and a[0, 3] == float("inf") and (a[2:, :3] == 0).any()
    dy, a = values((128, 64), torch.bfloat16, device, 1), a.nan_to_num(posinf=4.0)
    expected = scales[:, None] * (dy.float() @ fc.float().nan_to_num(posinf=1.0)) * 2 * a.float().sqrt()
    da = mlp._slope_product(dy, fc.nan_to_num(posinf=1.0), a, scales)
    torch.testing.assert_close(da.float(), expected, rtol=0.02, atol=0.02)
    assert not da[a == 0].any() and (a == 0).any()


def test_definition(device):
    """The reference is what torch says, for weights that aren't square."""
    x, update, fc, proj = inputs_for((2, 3, 24), 40, 16, torch.float32, device)
    h, y = add_norm_mlp_ref(x, update, fc, proj, 1e-3)
    torch.testing.assert_close(h, x + update)
    expected = torch.relu(torch.nn.functional.rms_norm(x + update, (24,), None, 1e-3) @ fc.t()) ** 2 @ proj.t()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(add_norm_mlp(x, update, fc, proj, 1e-3)[1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [True, False])
def test_eps_and_rows_of_any_size(kernel, device, monkeypatch):
    """Rows of zeros and from 1e-6 to 1e6, each as accurate as torch's, for an eps that shows in every gradient."""
    if not kernel:
        monkeypatch.setattr(mlp, "_programs", lambda device: 0)
    x, update, fc, proj = inputs_for((130, 64), 128, 64, torch.bfloat16, device)
    size = torch.logspace(-6, 6, 130, device=device)[:, None]
    size[7] = 0
    x, update = ((t * size).bfloat16() for t in (x, update))
    with_eps = [lambda *t, f=f: f(*t, 0.5) for f in (add_norm_mlp, add_norm_mlp_ref)]
    gradients = gradients_for((x, update, fc, proj))
    gradients[0] = torch.zeros_like(gradients[0])
    ours, low = (results(f, (x, update, fc, proj), gradients) for f in with_eps)
    exact = results(with_eps[1], [t.double() for t in (x, update, fc, proj)], gradients)
    for name, a, b, c in zip(NAMES, ours, low, exact):
        errors = [(t.double() - c).norm(dim=-1) / c.norm(dim=-1).clamp_min(1e-30) for t in (a, b)]
        assert errors[0].max() <= max(3 * errors[1].max(), 0.01), name


# --- layout and dtypes ---------------------------------------------------------------------------------------------


def test_operands_that_a_descriptor_cannot_describe(device, launched, has_kernel):
    """The same numbers from weights that are strided or lie at odd addresses, activations and gradients of any strides."""
    x, update, fc, proj = inputs_for((130, 64), 128, 64, torch.bfloat16, device)
    dh, dy = gradients_for((x, update, fc, proj))
    expected = results(add_norm_mlp, (x, update, fc, proj), (dh, dy))

    def odd(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=device)[1:].view_as(t).copy_(t)

    def columns(t):
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]

    def by_column(t):
        return t.t().contiguous().t()

    def padded(t):
        return torch.cat([t, t[:, :3]], 1)[:, : t.shape[1]]

    for change, fused in ((odd, False), (columns, True), (by_column, True), (padded, True)):
        launched.clear()
        ours = results(add_norm_mlp, [x, change(update), change(fc), change(proj)], (change(dh), change(dy)))
        assert launched == [fused and has_kernel] * 2, change
        for name, a, b in zip(NAMES, ours, expected):
            assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm(), (name, change)
    ours = results(add_norm_mlp, (x[:1].expand(130, 64), update, fc, proj), (dh[0, 0].expand(130, 64), dy[:, :1].expand(130, 64)))
    assert all(t.isfinite().all() for t in ours)


@pytest.mark.parametrize("dims", [(0, 64, 128, 64), (130, 64, 0, 64), (130, 64, 128, 0), (2, 0, 64, 128, 64)], ids=str)
def test_nothing_to_do(dims, device):
    """No rows, no hidden columns, no outputs: empty results and gradients, or zeros."""
    *shape, hidden, out = dims
    leaves = [values(s, torch.bfloat16, device).requires_grad_() for s in (shape, shape, (hidden, shape[-1]), (out, hidden))]
    h, y = add_norm_mlp(*leaves)
    assert y.shape == (*shape[:-1], out) and not y.any()
    (h.sum() + y.sum()).backward()
    assert [t.grad.shape for t in leaves] == [t.shape for t in leaves] and not any(t.grad.any() for t in leaves[2:])
    assert (leaves[0].grad == 1).all()


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_weights(kernel, stream, device, launched, has_kernel, monkeypatch):
    """Products in bfloat16, h and its gradients in the stream's dtype, the weights' gradients in float32."""
    if not kernel:
        monkeypatch.setattr(mlp, "_programs", lambda device: 0)
    inputs = inputs_for((2, 65, 64), 136, 72, stream, device, torch.float32)
    gradients = gradients_for(inputs)
    with torch.autocast(device, torch.bfloat16):
        ours = results(add_norm_mlp, inputs, gradients)
        assert launched == [kernel and has_kernel] * 2
        low = results(add_norm_mlp_ref, inputs, gradients)
    exact = results(add_norm_mlp_ref, [t.double() for t in inputs], gradients)
    assert [t.dtype for t in ours] == [stream, torch.bfloat16, stream, stream, torch.float32, torch.float32]
    for name, a, b, c in zip(NAMES, ours, low, exact):
        assert_close_to_reference(a, b.to(a.dtype), c, 2 if name in "hy" else 3, f"{name} {stream}")


def test_mixed_dtypes(device):
    """A sum takes the wider dtype, in which the products are computed; each gradient has its input's."""
    inputs = inputs_for((3, 5, 64), 24, 40, torch.float32, device)
    gradients = gradients_for(inputs)
    exact = results(add_norm_mlp_ref, [t.double() for t in inputs], gradients)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for dtypes, wide in (((bf16, fp32, fp32, bf16), fp32), ((fp32, bf16, bf16, fp16), fp32), ((bf16, bf16, fp32, fp16), bf16)):
        ours = results(add_norm_mlp, [t.to(dtype) for t, dtype in zip(inputs, dtypes)], gradients)
        assert [t.dtype for t in ours] == [wide, wide, *dtypes]
        for name, a, b in zip(NAMES, ours, exact):
            assert (a - b).norm() <= 0.03 * b.norm(), (name, dtypes)


# --- autograd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
def test_unused_outputs(used, device, launched):
    inputs = [t.requires_grad_() for t in inputs_for((4, 64), 24, 40, torch.float32, device)]
    ours, exact = (
        torch.autograd.grad(f(*inputs)[used].pow(3).sum(), inputs, allow_unused=True, materialize_grads=True)
        for f in (add_norm_mlp, add_norm_mlp_ref)
    )
    assert len(launched) == 1 + used  # for h alone nothing is multiplied backward
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", range(4), ids=NAMES[2:])
def test_frozen_inputs_cost_nothing(trained, device, launched, monkeypatch):
    """One input trained alone: its gradient is right, no other is asked for, and products that are not needed are not formed."""
    weight_gradients, norms = [], []
    for name, calls in (("weight_gradient", weight_gradients), ("rms_norm_backward_op", norms)):
        original = getattr(mlp, name)
        monkeypatch.setattr(mlp, name, lambda *a, original=original, calls=calls, **k: (calls.append(a[-1]), original(*a, **k))[1])
    inputs = [t.requires_grad_(i == trained) for i, t in enumerate(inputs_for((9, 64), 24, 40, torch.float32, device))]
    sum(y.pow(3).sum() for y in add_norm_mlp(*inputs)).backward()
    (exact,) = torch.autograd.grad(sum(y.pow(3).sum() for y in add_norm_mlp_ref(*inputs)), inputs[trained])
    assert len(weight_gradients) == (trained >= 2)
    assert norms == ([False] if trained < 2 else [])  # the norm's backward without the norm; for a weight, no backward of it
    assert len(launched) == (1 if trained == 3 else 2)
    assert all(t.grad is None for i, t in enumerate(inputs) if i != trained)
    torch.testing.assert_close(inputs[trained].grad, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [9, 130])
def test_keeps_two_tensors_and_writes_into_nothing(rows, device):
    """h and relu(…)² alone are kept beside the weights, and a number for each row; a second backward gives the same bits."""
    inputs = [t.requires_grad_() for t in inputs_for((rows, 64), 128, 64, torch.bfloat16, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        outputs = add_norm_mlp(*inputs)
    assert [t.shape for t in saved] == [(rows, 64), (rows, 128), (rows,), (128, 64), (64, 128)]
    assert {t.data_ptr() for t in saved} >= {t.data_ptr() for t in (outputs[0], *inputs[2:])}
    gradients = gradients_for(inputs)
    kept = [t.detach().clone() for t in (*inputs, *outputs, *gradients, *saved)]
    first = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, gradients)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, kept, (*inputs, *outputs, *gradients, *saved)))
    assert all(map(torch.equal, outputs, add_norm_mlp(*inputs)))


def test_same_tensor_twice(device):
    """x may be its own update, and one matrix both weights."""
    x, _, w, _ = inputs_for((6, 32), 32, 32, torch.float32, device)
    x.requires_grad_(), w.requires_grad_()
    ours, exact = (torch.autograd.grad(torch.cat(f(x, x, w, w), 1).pow(3).sum(), (x, w)) for f in (add_norm_mlp, add_norm_mlp_ref))
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_modes(device):
    inputs = [t.requires_grad_() for t in inputs_for((4, 64), 24, 40, torch.float32, device)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not any(y.requires_grad for y in add_norm_mlp(*inputs))
    (dx,) = torch.autograd.grad(add_norm_mlp(*inputs)[1].pow(3).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="add_norm_mlp: double backward is not supported; use add_norm_mlp_ref"):
        dx.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="add_norm_mlp: forward-mode"):
        add_norm_mlp(torch.autograd.forward_ad.make_dual(inputs[0].detach(), inputs[0].detach()), *inputs[1:])


def test_gradcheck(device):
    """In float32, which is what the kernels take, hence the wide step and tolerance."""
    inputs = [t.requires_grad_() for t in inputs_for((2, 4), 3, 2, torch.float32, device)]
    assert torch.autograd.gradcheck(add_norm_mlp, inputs, eps=1e-2, atol=3e-2, rtol=3e-2, nondet_tol=0)


# --- as an operator ------------------------------------------------------------------------------------------------


def test_opcheck(device):
    inputs = inputs_for((2, 3, 64), 24, 40, torch.float32, device)
    dh, dy = gradients_for(inputs)
    h, _, a, rstd = mlp.add_norm_mlp_op(*inputs, 1e-6, torch.float32)
    weights = [w.t().contiguous().t() for w in inputs[2:]]
    for gradient, needs in ((None, (True, False, True)), (dh, (False, True, False))):
        torch.library.opcheck(mlp.add_norm_mlp_backward_op, (dy, gradient, h, a, rstd, *weights, 1e-6, *needs))
    x, update, *weights = (t.requires_grad_() for t in inputs)
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        streams = (t.to(dtype) for t, dtype in zip((x, update), dtypes))
        torch.library.opcheck(mlp.add_norm_mlp_op, (*streams, *weights, 1e-6, torch.bfloat16))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_once_without_graph_breaks(autocast, device):
    weights = [values((64, 64), torch.float32, device, i).div(8).requires_grad_() for i in range(4)]

    def step(x0):
        x, update = x0, x0
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            for i in range(2):
                x, update = add_norm_mlp(x, update.to(x.dtype), *weights[2 * i : 2 * i + 2])
        return (x + update).square().mean()

    assert_compiles_once(step, lambda seed: [values((4, 64), torch.float32, device, seed).requires_grad_()], weights, device, 1e-3, 1e-4)


def test_unsupported_input(device):
    x, fc, proj = (torch.zeros(s, device=device) for s in ((3, 8), (4, 8), (8, 4)))
    wide = torch.zeros(1, 8193, device=device)
    for call, message in [
        (lambda: add_norm_mlp(x, x[:1], fc, proj), r"\(3, 8\) and \(1, 8\); need one shape"),
        (lambda: add_norm_mlp(x[0, 0], x[0, 0], fc, proj), "one shape"),
        (lambda: add_norm_mlp(x[:, :0], x[:, :0], fc[:, :0], proj), "N from 1"),
        (lambda: add_norm_mlp(wide, wide, torch.zeros(4, 8193, device=device), proj), "8192"),
        (lambda: add_norm_mlp(x, x, proj, fc), r"fc \(8, 4\), proj \(4, 8\); need \(hidden, 8\)"),
        (lambda: add_norm_mlp(x, x, fc, proj[:, :3]), r"proj \(8, 3\)"),
        (lambda: add_norm_mlp(x, x, fc[0], proj), "need"),
        (lambda: add_norm_mlp(x.double(), x, fc, proj), "float64"),
        (lambda: add_norm_mlp(x, x, fc, proj.double()), "float64"),
        (lambda: add_norm_mlp(x.half(), x.half(), fc, proj), "float16 is not supported"),
        (lambda: add_norm_mlp(x, x, fc.to("meta"), proj), "different devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with torch.autocast(device, torch.float16), pytest.raises(ValueError, match="float16 is not supported"):
        add_norm_mlp(x, x, fc, proj)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shape_and_strides(device, data):
    """Half of the examples have widths that the kernel takes. None is so small that torch's error is that of a few lucky numbers."""
    widths = st.integers(16, 140) if data.draw(st.booleans()) else st.integers(8, 18).map(lambda n: 8 * n)
    rows, N, hidden, out = data.draw(st.integers(8, 200)), data.draw(widths), data.draw(widths), data.draw(widths)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))

    def strided(t):
        layout = data.draw(st.sampled_from(["contiguous", "by column", "every other", "padded"]))
        if layout == "by column":
            return t.t().contiguous().t()
        if layout == "every other":
            return torch.stack([t, t], 1).flatten(0, 1)[::2]
        return torch.cat([t, t[:, :1]], 1)[:, : t.shape[1]] if layout == "padded" else t

    inputs = inputs_for((rows, N), hidden, out, dtype, device)
    gradients = gradients_for(inputs)
    check([strided(t) for t in inputs], [strided(t) for t in gradients], f"{rows} {N} {hidden} {out} {dtype}")


# --- the kernel for parts that are elsewhere -----------------------------------------------------------------------

COMPILE = """
import subprocess, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import mlp

M, N, K = mlp.BLOCK_M, mlp.BLOCK_N, mlp.BLOCK_K
kernel = mlp.product_kernel
for capability, slope in ((90, False), (90, True), (100, True)):
    rows, columns = "tensordesc<bf16[%d,%d]>" % (M, K), "tensordesc<bf16[%d,%d]>" % ((K, N) if slope else (N, K))
    half = "tensordesc<bf16[%d,%d]>" % (M, N // 2)
    values = dict(SLOPE=slope, TRANSPOSED=not slope, FLATTEN=True, BLOCK_M=M, BLOCK_N=N, BLOCK_K=K, **({} if slope else {"aux": None}))
    signature = {"a": rows, "b": columns, "out": half, "aux": half, "SCALES": "*fp32"}
    signature |= dict.fromkeys(("M", "N", "K", "n_programs"), "i32")
    signature = {n: "constexpr" if n in values else signature[n] for n in kernel.arg_names}
    options = dict(num_warps=mlp.NUM_WARPS, num_stages=mlp.NUM_STAGES)
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx), file.flush()
        ptxas = (knobs.nvidia.ptxas if capability < 100 else knobs.nvidia.ptxas_blackwell).path
        command = [ptxas, "-v", f"--gpu-name=sm_{capability}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    print(capability, compiled.metadata.shared, "wgmma.mma_async" in ptx or "tcgen05.mma" in ptx, "cp.async.bulk.tensor" in ptx,
          "0 bytes spill stores" in said)
"""


def test_product_kernel_for_hopper_and_blackwell():
    """Compiled anywhere: tensor memory access, the matrix units, no spills, and no more shared memory than `_programs` asks for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", COMPILE], cwd=folder, check=False, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert len(rows) == 3
    for capability, shared, *facts in rows:
        assert 128 << 10 < int(shared) <= mlp.SHARED_MEMORY - 1024 and facts == ["True"] * 3, (capability, shared, facts)


@pytest.mark.parametrize(
    "backend, major, shared, expected",
    [("cuda", 9, 228, 132), ("cuda", 10, 228, 132), ("cuda", 12, 100, 0), ("cuda", 8, 164, 0), ("hip", 9, 228, 0)],
)
def test_which_parts_have_the_kernel(backend, major, shared, expected, monkeypatch):
    """Hopper and B200; not Ampere, not desktop parts of Blackwell (too little shared memory), not AMD. The parts are made up."""

    class Part:
        multi_processor_count = 132

    Part.major, Part.shared_memory_per_multiprocessor = major, shared << 10
    monkeypatch.setattr(mlp, "INTERPRETED", False)
    monkeypatch.setattr(mlp, "BACKEND", backend)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Part)
    assert mlp._programs.__wrapped__(torch.device("cuda", 3)) == expected


# --- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 2048, 512, 2048), (8, 2048, 768, 3072), (1000, 8192, 128), (4097, 264, 1032)], ids=str)
def test_real_sizes(shape, device, launched, has_kernel, poison_empty):
    *shape, hidden = shape
    inputs = inputs_for(shape, hidden, shape[-1], torch.bfloat16, device)
    gradients = gradients_for(inputs)
    first, second = check(inputs, gradients), results(add_norm_mlp, inputs, gradients)
    assert launched == [has_kernel] * 4 and all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_real_sizes_without_the_kernel(device, monkeypatch):
    monkeypatch.setattr(mlp, "_programs", lambda device: 0)
    inputs = inputs_for((8, 2048, 512), 2048, 512, torch.bfloat16, device)
    check(inputs, gradients_for(inputs))


@pytest.mark.gpu
def test_rows_do_not_recompile(device, has_kernel):
    """A batch of another size runs the same machine code."""
    if not has_kernel:
        pytest.skip("this part has no such kernel")
    _, _, fc, _ = inputs_for((128, 64), 256, 64, torch.bfloat16, device)
    mlp._relu_squared_product(values((128, 64), torch.bfloat16, device), fc, torch.ones(128, device=device))
    compiled = len(mlp.product_kernel.device_caches[torch.cuda.current_device()][0])
    for rows in (129, 144, 4096, 70001):
        mlp._relu_squared_product(values((rows, 64), torch.bfloat16, device), fc, torch.ones(rows, device=device))
    assert len(mlp.product_kernel.device_caches[torch.cuda.current_device()][0]) == compiled


@pytest.mark.gpu
def test_graph(device):
    """Captured, and replayed on other values at the same addresses: descriptors hold addresses, not values."""
    inputs = inputs_for((2, 1024, 512), 2048, 512, torch.bfloat16, device)
    gradients = gradients_for(inputs)
    results(add_norm_mlp, inputs, gradients)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(add_norm_mlp, inputs, gradients)
    for t in (*inputs, *gradients):
        t.copy_(t.flip(0))
    graph.replay()
    assert all(map(torch.equal, captured, results(add_norm_mlp, inputs, gradients)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_input():
    inputs = inputs_for((256, 512), 1024, 512, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        ours = check(inputs, gradients_for(inputs))
        assert torch.cuda.current_device() == 0 and {t.device for t in ours} == {inputs[0].device}

"""Every kernel, forward and backward, executed as its own gfx1151 machine code: are the numbers right, and what does it issue?

    TINYGRAD_PATH=~/tinygrad python benchmarks/gfx1151_emulate.py            # correctness of all, then attention's issue bounds
    TINYGRAD_PATH=~/tinygrad python benchmarks/gfx1151_emulate.py --only cross_entropy --csv emulated.csv

Needs a clone of tinygrad, clang and pyelftools (rdna3_emulator.py). The operators are called as anyone calls them, on CPU tensors:
only Triton's driver is another, one that says "gfx1151", and whose launches run on the emulator. So the launchers, the
compiler with the launcher's facts, and the machine code are the ones that a Strix Halo would get.

Results are held to the tests' measure: against float64, at most twice (outputs) or three times (gradients) the error of
PyTorch's own path in the same dtype, or one ulp of the largest value. Cycles and TFLOP/s are modelled: what issue alone allows.
"""

import argparse
import contextlib
import csv
import importlib
import itertools
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton.jit decorates
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # what "tuning" finds here must not reach a machine with the part
sys.path[:0] = [str(Path(__file__).parents[1]), os.environ.get("TINYGRAD_PATH", "")]

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

# TFLOP/s by head_dim: what a change must keep
BOUNDS = {64: {"forward": 43, "forward, bounded": 46, "backward": 34}, 128: {"forward": 46, "forward, bounded": 51, "backward": 32}}
ATTENTION = {
    "causal": {"causal": True},
    "causal, bounded": {"causal": True, "bounded": True},
    "full": {"causal": False},
    "full, bounded": {"causal": False, "bounded": True},
}
MODULES = ("rms_norm", "gated", "qk_norm_rope", "qkv", "residual_mix", "norm_linear", "mlp", "attention", "cross_entropy")
COLUMNS = ("case", "kernels", "instructions", "wmma", "vector_cycles", "lds_cycles", "scratch", "worst", "verdict", "seconds")


# --- Triton on the emulator -----------------------------------------------------------------------------------------


class EmulatedDriver(DriverBase):
    """A gfx1151 as Triton sees one. Tensors are on the CPU; `launches` collects (kernel, metadata, Cost)."""

    def __init__(self):
        self.launches = []
        self.launcher_cls = lambda source, metadata: _Launcher(self, source, metadata)
        properties = {"max_shared_mem": 65536, "warpSize": 32, "multiprocessor_count": 20}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, binary, shared, device: (True, binary, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, kind):
        return kind

    def get_current_target(self):
        return GPUTarget("hip", "gfx1151", 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        return lambda call, quantiles, **_: [0.0] * len(quantiles)  # all candidates are as good: the first is taken


class _Launcher:
    def __init__(self, driver, source, metadata):
        self.driver, self.source, self.metadata = driver, source, metadata

    def __call__(self, grid_x, grid_y, grid_z, stream, binary, packed, launch_metadata, enter, leave, *arguments):
        from rdna3_emulator import launch

        kinds = self.source.signature.values()
        arguments = [a for kind, a in zip(kinds, arguments) if kind != "constexpr"]
        compiled = SimpleNamespace(asm={"hsaco": binary}, metadata=self.metadata, src=self.source)
        cost = launch(compiled, (grid_x, grid_y, grid_z), arguments)
        self.driver.launches.append((self.metadata.name, self.metadata, cost))


def activate():
    """Let this process be one of a machine with gfx1151: to be called before `kernels` is imported. Returns the driver."""
    driver = EmulatedDriver()
    triton.runtime.driver.set_active(driver)
    torch.version.hip = "emulated"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)  # few programs, several tiles each
    _modules()
    # The kernels are defined now, for the compiler. From here on this only says that tensors on the CPU are welcome.
    importlib.import_module("kernels._common").INTERPRETED = True
    return driver


def _modules():
    """By import_module: some operations have their module's name, and `from kernels import rms_norm` is the operation."""
    return [importlib.import_module(f"kernels.{name}") for name in MODULES]


# --- what is run ----------------------------------------------------------------------------------------------------


def _randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


def cases():
    """(module, name, operation, reference, inputs, how many of them are differentiated, candidate): small shapes, with tails.

    Widths that are multiples of 16 (strides too, then) run the code with 128-bit accesses, the others that with narrow ones.
    `candidate`: a tuner and which of its configurations to take, if not the first of each.
    """
    rms_norm, gated, qk_norm_rope, qkv, residual_mix, norm_linear, mlp, attention, cross_entropy = _modules()

    def case(module, name, f, ref, *inputs, differentiable=None, candidate=None):
        differentiable = len(inputs) if differentiable is None else differentiable
        return module.__name__.split(".")[-1], name, f, ref, inputs, differentiable, candidate

    for width, weighted in ((77, True), (512, False), (720, True), (8200, True), (8208, False)):
        x, w = _randn(5, width), [1 + 0.1 * _randn(width)] if weighted else []
        title = f"5×{width}" + (", weight" if weighted else "")
        yield case(rms_norm, f"rms_norm {title}", rms_norm.rms_norm, rms_norm.rms_norm_ref, x, *w)
        yield case(rms_norm, f"add_rms_norm {title}", rms_norm.add_rms_norm, rms_norm.add_rms_norm_ref, x, _randn(5, width), *w)
    for width in (700, 720):
        gate, up = _randn(3, width), _randn(3, width)
        yield case(gated, f"swiglu 3×{width}", gated.swiglu, gated.swiglu_ref, gate, up)
        for approximate in ("none", "tanh"):
            yield case(gated, f"geglu {approximate} 3×{width}", lambda g, u, a=approximate: gated.geglu(g, u, a),
                       lambda g, u, a=approximate: gated.geglu_ref(g, u, a), gate, up)  # fmt: skip
        yield case(gated, f"geglu_chunked 3×2·{width}", gated.geglu_chunked, gated.geglu_chunked_ref, _randn(3, 2 * width))
        yield case(gated, f"relu_squared 3×{width}", gated.relu_squared, gated.relu_squared_ref, gate)
    for head_dim in (64, 128):
        angle = torch.rand(5, head_dim // 2) * 6
        yield case(qk_norm_rope, f"qk_norm_rope head_dim {head_dim}", qk_norm_rope.qk_norm_rope, qk_norm_rope.qk_norm_rope_ref,
                   _randn(2, 5, 4, head_dim), _randn(2, 5, 2, head_dim), angle.cos().bfloat16(), angle.sin().bfloat16(),
                   differentiable=2)  # fmt: skip
    lambdas = torch.tensor(0.9), torch.tensor(0.1)
    for width in (300, 304):
        yield case(residual_mix, f"residual_mix_norm 5×{width}", residual_mix.residual_mix_norm, residual_mix.residual_mix_norm_ref,
                   _randn(5, width), _randn(5, width), *lambdas)  # fmt: skip
    windowed = ("causal, window 20", 111, 2, {"window": 20})  # rows whose first block of keys is masked throughout
    others = (("causal", 77, 2, {}), ("causal, grouped heads", 65, 1, {}), ("full", 70, 2, {"causal": False}))
    tuners = {"forward": attention._forward, "dkdv": attention._dkdv, "dq": attention._dq}

    def attend(title, T, n_kv_head, options, head_dim, dtype=torch.bfloat16, candidate=None, bounded=False):
        q, k, v = (_randn(1, T, heads, head_dim, dtype=dtype) for heads in (2, n_kv_head, n_kv_head))
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).mul(head_dim**0.5).to(dtype) if bounded else x for x in (q, k))
        return case(attention, f"flash_attention {title}{', bounded' if bounded else ''}, T {T}, head_dim {head_dim}",
                    lambda q, k, v: attention.flash_attention(q, k, v, bounded=bounded, **options),
                    lambda q, k, v: attention.flash_attention_ref(q, k, v, **options), q, k, v, candidate=candidate)  # fmt: skip

    for head_dim in (32, 64, 96, 128, 256):
        for shape in (windowed, *(others if head_dim in (32, 64, 128) else ())):
            yield attend(*shape, head_dim)
    for head_dim in (64, 128):
        title, *rest = windowed
        yield attend(f"{title}, float16", *rest, head_dim, torch.float16)
        for name, table in tuners.items():
            for i, config in enumerate(table[head_dim].configs[1:], 1):
                tile = f"{config.kwargs['BLOCK_M']}×{config.kwargs['BLOCK_N']}"
                for bounded in (False, True) if name == "forward" else (False,):
                    yield attend(f"{title}, {name} {tile}", *rest, head_dim, candidate=(table[head_dim], i), bounded=bounded)
        for shape in (windowed, *others):
            yield attend(*shape, head_dim, bounded=True)
    for vocab in (250, 8192, 33008, 36864):
        targets = torch.randint(0, vocab, (5,))
        targets[1] = -1
        for reduction in ("mean", "none"):
            yield case(cross_entropy, f"softcap_cross_entropy vocab {vocab}, {reduction}",
                       lambda x, t, r=reduction: cross_entropy.softcap_cross_entropy(x, t, reduction=r),
                       lambda x, t, r=reduction: cross_entropy.softcap_cross_entropy_ref(x, t, reduction=r),
                       _randn(5, vocab, scale=8), targets, differentiable=1)  # fmt: skip
            yield case(cross_entropy, f"linear_softcap_cross_entropy vocab {vocab}, {reduction}",
                       lambda x, w, t, r=reduction: cross_entropy.linear_softcap_cross_entropy(x, w, t, reduction=r),
                       lambda x, w, t, r=reduction: cross_entropy.linear_softcap_cross_entropy_ref(x, w, t, reduction=r),
                       _randn(5, 24), _randn(vocab, 24), targets, differentiable=2)  # fmt: skip
    for n_head, n_kv_head, head_dim, residual in ((4, 4, 128, True), (4, 2, 64, True), (4, 2, 64, False), (3, 3, 20, True)):
        angle, heads = torch.rand(5, head_dim // 2) * 6, (n_head, n_kv_head)
        tables = angle.cos().bfloat16(), angle.sin().bfloat16()
        width = (n_head + 2 * n_kv_head) * head_dim + (qkv.gate_columns(n_kv_head) if residual else 0)
        embedding = [_randn(7, n_kv_head * head_dim)] if residual else []
        idx = torch.randint(7, (2, 5)) if residual else None
        yield case(qkv, f"qkv_norm_rope {n_head}/{n_kv_head} heads of {head_dim}{', value residual' if residual else ''}",
                   lambda x, *e, s=(*tables, *heads, idx): qkv.qkv_norm_rope(x, *s, *e),
                   lambda x, *e, s=(*tables, *heads, idx): qkv.qkv_norm_rope_ref(x, *s, *e), _randn(2, 5, width), *embedding)  # fmt: skip
    for width in (300, 304):
        weight = _randn(24, width, scale=width**-0.5)
        yield case(norm_linear, f"add_norm_linear 5×{width}", norm_linear.add_norm_linear, norm_linear.add_norm_linear_ref,
                   _randn(5, width), _randn(5, width), weight)  # fmt: skip
        yield case(norm_linear, f"residual_mix_norm_linear 5×{width}, update",  # the lambdas' gradients are residual_mix's, which cancel
                   lambda x, x0, u, w: norm_linear.residual_mix_norm_linear(x, x0, *lambdas, w, update=u),
                   lambda x, x0, u, w: norm_linear.residual_mix_norm_linear_ref(x, x0, *lambdas, w, update=u),
                   _randn(5, width), _randn(5, width), _randn(5, width), weight)  # fmt: skip
        yield case(mlp, f"add_norm_mlp 5×{width}", mlp.add_norm_mlp, mlp.add_norm_mlp_ref,
                   _randn(5, width), _randn(5, width), _randn(48, width, scale=width**-0.5), _randn(24, 48, scale=0.15))  # fmt: skip


@contextlib.contextmanager
def _taking(candidate):
    """Leave a tuner no choice for a while."""
    if candidate is None:
        yield
        return
    tuner, i = candidate
    kept, tuner.configs = tuner.configs, tuner.configs[i : i + 1]
    yield
    tuner.configs = kept


def _run(f, inputs, differentiable, grads):
    """(outputs, gradients of the first `differentiable` inputs)."""
    inputs = [t.detach().requires_grad_() if i < differentiable else t for i, t in enumerate(inputs)]
    outputs = f(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(outputs, inputs[:differentiable], [g.to(o.dtype) for g, o in zip(grads, outputs)])
    return [o.detach() for o in outputs], gradients


def _ratio(ours, low, exact, factor):
    """The larger of max-abs and rms error over what is allowed: above 1, the number is wrong."""
    ours, low, exact, eps = (
        ours.double(),
        low.double(),
        exact.double(),
        torch.finfo(ours.dtype).eps * (2 if ours.dtype == torch.float32 else 1),
    )
    if not ours.isfinite().all():
        return math.inf
    sizes = (lambda t: t.abs().max().item()), (lambda t: t.square().mean().sqrt().item())
    return max(size(ours - exact) / max(factor * size(low - exact), eps * size(exact), 1e-30) for size in sizes)


def emulate(driver, only=None):
    """Yields one dict of COLUMNS a case; "worst" is the largest error over what is allowed."""
    from rdna3_emulator import Cost

    torch.manual_seed(0)
    for module, name, f, ref, inputs, differentiable, candidate in cases():
        if only and only not in (module, name):
            continue
        with torch.no_grad():
            outputs = ref(*inputs)
        grads = [torch.randn(o.shape) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        low = _run(ref, inputs, differentiable, grads)
        exact = _run(ref, [t.double() if t.is_floating_point() else t for t in inputs], differentiable, grads)
        driver.launches.clear()
        start = time.time()
        with _taking(candidate):
            ours = _run(f, inputs, differentiable, grads)
        ratios = [_ratio(*t, factor) for part, factor in ((0, 2), (1, 3)) for t in zip(ours[part], low[part], exact[part])]
        cost = sum((c for _, _, c in driver.launches), Cost())
        yield {
            "case": name, "kernels": " ".join(name for name, _, _ in driver.launches), "instructions": cost.instructions, "wmma": cost.wmma,
            "vector_cycles": cost.vector_cycles, "lds_cycles": cost.lds_cycles, "scratch": cost.scratch, "worst": round(max(ratios), 3),
            "verdict": "right" if max(ratios) <= 1 else "WRONG", "seconds": round(time.time() - start, 1),
        }  # fmt: skip


# --- the marginal issue bound of attention --------------------------------------------------------------------------


def attention_costs(driver, head_dim, n_queries, n_keys, causal, bounded=False):
    """{kernel: Cost} of attention, forward and backward, one head. `bounded`: without a running maximum, as train.py calls it."""
    from rdna3_emulator import Cost

    from kernels.attention import flash_attention

    driver.launches.clear()
    q, k, v = (_randn(1, n, 1, head_dim).requires_grad_() for n in (n_queries, n_keys, n_keys))
    flash_attention(q, k, v, causal=causal, bounded=bounded).sum().backward()
    costs = {}
    for name, _metadata, cost in driver.launches:
        costs[name] = costs.get(name, Cost()) + cost
    return costs


def marginal_bounds(driver, head_dim, causal, bounded=False):
    """TFLOP/s that issue allows to a full block, forward and backward, from the cost of one more of them.

    A block is as large as the largest tile. Causal attention of n·block positions has n blocks on the diagonal and n(n - 1)/2 full
    ones, and all else grows with n: the second difference is one full block. Without causality, what more keys cost the kernels
    that walk over keys (forward, dq), and more queries those that walk over queries (dk, dv), is the inner loop alone.
    Useful FLOPs: 4·head_dim a pair of query and key forward (two products), 10·head_dim backward (five).
    """
    attention = importlib.import_module("kernels.attention")
    tiles = [table[head_dim].configs[0].kwargs for table in (attention._forward, attention._dkdv, attention._dq)]
    block = max(tile[side] for tile in tiles for side in ("BLOCK_M", "BLOCK_N"))

    def costs(queries, keys):
        return attention_costs(driver, head_dim, queries * block, keys * block, causal, bounded)

    if causal:
        one, two, three = costs(1, 1), costs(2, 2), costs(3, 3)
        inner = {name: (three[name] - two[name]) - (two[name] - one[name]) for name in one}
    else:
        one, keys, queries = costs(1, 1), costs(1, 2), costs(2, 1)
        inner = {name: (queries if "dkdv" in name else keys)[name] - one[name] for name in one}
    forward = [cost for name, cost in inner.items() if "forward" in name]
    backward = [cost for name, cost in inner.items() if "dkdv" in name or "dq" in name]
    return {
        "forward": sum(forward[1:], forward[0]).bound(4 * head_dim * block * block),
        "backward": sum(backward[1:], backward[0]).bound(10 * head_dim * block * block),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a module (cross_entropy) or one case by its name")
    parser.add_argument("--csv", default="gfx1151_emulated.csv")
    parser.add_argument("--bounds", default="gfx1151_bounds.csv", help="attention's issue bounds")
    args = parser.parse_args()
    if not os.environ.get("TINYGRAD_PATH"):
        parser.error("set TINYGRAD_PATH to a clone of https://github.com/tinygrad/tinygrad")
    driver = activate()

    print(f"gfx1151 machine code of Triton {triton.__version__} on an RDNA3 emulator. Modelled: executed, not timed.\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    wrong = 0
    with open(args.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in emulate(driver, args.only):
            writer.writerow(row)
            print("| " + " | ".join(str(row[c]) for c in COLUMNS) + " |", flush=True)
            wrong += row["verdict"] != "right"
    print(f"\n{wrong} wrong; {args.csv} holds the table")
    if args.only in (None, "attention"):
        print("\nMarginal issue bound of a full block of attention, TFLOP/s (modelled)\n")
        print("| head_dim | attention | pass | bound | at least |\n|---|---|---|---|---|")
        with open(args.bounds, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("head_dim", "attention", "pass", "bound"))
            for head_dim, (attention, options) in itertools.product(BOUNDS, ATTENTION.items()):
                for direction, bound in marginal_bounds(driver, head_dim, **options).items():
                    least = BOUNDS[head_dim]["forward, bounded" if direction == "forward" and options.get("bounded") else direction]
                    wrong += bound < least
                    print(f"| {head_dim} | {attention} | {direction} | {bound:.1f} | {least} |", flush=True)
                    writer.writerow((head_dim, attention, direction, round(bound, 1)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""How fast are the norms, gates and rotary norm, against torch's own, torch.compile, Liger and a copy of as many bytes?

python benchmarks/norm_and_gates.py [--only rms_norm] [--dtype bfloat16] [--rounds 50] [--out benchmarks]     (about five minutes)

Prints a table, ratios first, and writes norm_and_gates.csv and norm_and_gates.png. Needs a GPU; Liger is compared if it is installed.

GPU time is that of a CUDA graph of several calls, each on inputs of its own, together larger than any cache, divided by the number of
calls: no Python, no warm cache. Variants take turns within a round, in a new order each round; medians, with the middle half as spread.
Before timing, every variant's results are compared with ours. What a call costs in Python is a table of its own at the end, and so is the
memory that a forward leaves behind for the backward. "The floor" is Tensor.copy_ of as many bytes as the operation has to read and write,
timed in the same turns; of the two with a product it leaves the product's own time out.
"""

import argparse
import csv
import platform
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.gated import geglu, geglu_ref, relu_squared, relu_squared_ref, swiglu, swiglu_ref
from kernels.norm_linear import add_norm_linear, residual_mix_norm_linear
from kernels.qk_norm_rope import qk_norm_rope
from kernels.qkv import gate_columns, qkv_norm_rope
from kernels.residual_mix import residual_mix_norm
from kernels.rms_norm import add_rms_norm, rms_norm

try:
    from liger_kernel.transformers.functional import liger_geglu, liger_rms_norm, liger_swiglu
except ImportError:
    liger_rms_norm = None

EPS = 1e-6
COLD = 512 * 2**20  # bytes that the inputs of one graph cover at least, beyond every cache
CALLS = 8  # that a graph has at least, so that its launch does not count

# strix-halo-kernels on gfx1151, fp16, by do_bench, as published (https://huggingface.co/axjns/strix-halo-kernels): eager ms, its ms
PUBLISHED = {
    ("rms_norm", (512, 4096)): (0.205, 0.072),
    ("rms_norm", (2048, 4096)): (1.592, 0.278),
    ("rms_norm", (4096, 5120)): (3.703, 0.508),
    ("rms_norm", (8192, 2048)): (3.028, 0.387),
    ("geglu", (512, 8192)): (0.233, 0.197),
    ("geglu", (2048, 8192)): (0.843, 0.554),
    ("geglu", (4096, 4096)): (0.838, 0.550),
}


def eager_rms_norm(x, weight=None):
    """As LlamaRMSNorm does it."""
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else weight * y


def eager_add_rms_norm(x, residual):
    h = x + residual
    return h, F.rms_norm(h, h.shape[-1:], eps=EPS)


def eager_qk_norm_rope(q, k, cos, sin):
    """As the model does it without a kernel: rotary in the tables' bfloat16, F.rms_norm."""

    def one(x):
        x1, x2 = x.chunk(2, -1)
        return F.rms_norm(torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], -1), x.shape[-1:])

    return one(q), one(k)


def eager_residual_mix_norm(x, x0, resid_lambda, x0_lambda):
    mixed = resid_lambda * x + x0_lambda * x0
    return mixed, F.rms_norm(mixed, mixed.shape[-1:])


def eager_qkv_norm_rope(qkv, table, cos, sin, idx):
    """As the model does it without a kernel: heads of 128, as many KV heads as query heads, each with a gate for the value residual."""
    n = table.shape[1] // 128
    heads, gates = qkv[..., : 3 * n * 128].unflatten(-1, (3 * n, 128)), qkv[..., 3 * n * 128 : 3 * n * 128 + n]
    q, k, v = heads.split(n, 2)
    v = v + 2 * torch.sigmoid(gates).unsqueeze(-1) * F.embedding(idx, table).view(v.shape)
    return *eager_qk_norm_rope(q, k, cos, sin), v


def eager_add_norm_linear(x, update, weight):
    h = x + update
    return h, F.linear(F.rms_norm(h, h.shape[-1:]), weight)


def eager_residual_mix_norm_linear(x, x0, resid_lambda, x0_lambda, weight):
    mixed, y = eager_residual_mix_norm(x, x0, resid_lambda, x0_lambda)
    return mixed, F.linear(y, weight)


def cases(dtype):
    """(name, shape, make inputs, how many of them want gradients, streams of x's size forward, and backward, {variant: function})"""

    def rows(*shape):
        return lambda: torch.randn(shape, device="cuda", dtype=dtype)

    def rms(shape, weighted):
        variants = {
            "ours": lambda x, *w: rms_norm(x, *w, eps=EPS),
            "eager": eager_rms_norm,
            "torch": lambda x, *w: F.rms_norm(x, x.shape[-1:], *w, eps=EPS),
            "compiled": torch.compile(eager_rms_norm, dynamic=False),
        }
        if weighted and liger_rms_norm:
            variants["liger"] = lambda x, w: liger_rms_norm(x, w, EPS, in_place=False)
        inputs = [rows(*shape)] + ([lambda: torch.ones(shape[-1], device="cuda", dtype=dtype)] if weighted else [])
        return "rms_norm" if weighted else "rms_norm, no weight", shape, inputs, len(inputs), 2, 3, variants

    def gate(name, shape, ours, ref, liger=None):
        variants = {"ours": ours, "eager": ref, "compiled": torch.compile(ref, dynamic=False)} | ({"liger": liger} if liger else {})
        return name, shape, [rows(*shape), rows(*shape)], 2, 3, 5, variants

    def simple(name, shape, inputs, wanted, forward, backward, ours, ref):
        return name, shape, inputs, wanted, forward, backward, {"ours": ours, "eager": ref, "compiled": torch.compile(ref, dynamic=False)}

    for shape in [(512, 4096), (2048, 4096), (4096, 5120), (8192, 2048), (16384, 8192), (262144, 512)]:
        yield rms(shape, True)
    yield rms((262144, 512), False)
    for shape in [(512, 8192), (2048, 8192), (4096, 4096), (32768, 2048)]:
        yield gate("geglu", shape, geglu, geglu_ref)
    for shape in [(2048, 8192), (32768, 2048)]:
        tanh = lambda g, u: geglu_ref(g, u, "tanh")
        yield gate("geglu tanh", shape, lambda g, u: geglu(g, u, "tanh"), tanh, liger_rms_norm and liger_geglu)
        yield gate("swiglu", shape, swiglu, swiglu_ref, liger_rms_norm and liger_swiglu)
    yield simple("relu_squared", (32768, 2048), [rows(32768, 2048)], 1, 2, 3, relu_squared, relu_squared_ref)
    T, D = 2048, 128
    angle = torch.outer(torch.arange(T, device="cuda").float(), 10000 ** (-torch.arange(0, D, 2, device="cuda").float() / D))
    tables = [lambda t=t: t.to(dtype)[None, :, None] for t in (angle.cos(), angle.sin())]
    yield simple("qk_norm_rope", (16, T, 4, D), [rows(16, T, 4, D), rows(16, T, 4, D), *tables], 2, 4, 6, qk_norm_rope, eager_qk_norm_rope)
    n, vocab = 4, 8192
    idx, table = lambda: torch.randint(vocab, (16, T), device="cuda"), rows(vocab, n * D)
    yield simple(  # of x's size: q, k, v written and a row of the table read; back, three gradients, q, k and two rows
        "qkv_norm_rope", (16, T, 3 * n * D + gate_columns(n)), [rows(16, T, 3 * n * D + gate_columns(n)), table, *tables, idx],
        2, 7 / 3, 4, lambda qkv, table, cos, sin, idx: qkv_norm_rope(qkv, cos, sin, n, n, idx, table), eager_qkv_norm_rope,
    )  # fmt: skip
    scalars = [lambda v=v: torch.tensor(v, device="cuda") for v in (0.9, 0.1)]
    stream, widths = rows(32768, 512), (3 * n * D, 2048)  # an attention layer's packed product after a mix, an MLP's after a sum
    weights = [lambda out=out: torch.randn(out, 512, device="cuda", dtype=dtype) / 512**0.5 for out in widths]
    streams = [(5 + out / 512, 6 + 2 * out / 512) for out in widths]
    yield simple("residual_mix_norm_linear", (32768, 512), [stream, stream, *scalars, weights[0]], 5, *streams[0],
                 residual_mix_norm_linear, eager_residual_mix_norm_linear)  # fmt: skip
    yield simple("add_norm_linear", (32768, 512), [stream, stream, weights[1]], 3, *streams[1], add_norm_linear, eager_add_norm_linear)
    for shape in [(32768, 512), (262144, 512)]:
        yield simple(
            "add_rms_norm", shape, [rows(*shape), rows(*shape)], 2, 4, 4, lambda x, r: add_rms_norm(x, r, eps=EPS), eager_add_rms_norm
        )
        yield simple(
            "residual_mix_norm", shape, [rows(*shape), rows(*shape), *scalars], 4, 4, 6, residual_mix_norm, eager_residual_mix_norm
        )


def call(function, inputs, gradients, backward):
    """One forward, or forward and backward; returns all results."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not backward:
        return outputs
    return *outputs, *torch.autograd.grad(outputs, [i for i in inputs if i.requires_grad], gradients)


def graph_of(calls):
    """`(run, how many calls that is)`: the GPU without Python in between.

    Results are kept to the next turn, or all calls would write to one warm place.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeats = max(1, -(-CALLS // len(calls)))
        for _ in range(repeats):
            graph.results = [c() for c in calls]
    graph.calls = calls  # a replay reads their inputs: they must live as long as the graph
    return graph.replay, len(calls) * repeats


def milliseconds(run, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def check(name, ours, other):
    """Same numbers to the rounding of the dtype, other libraries' too. (Scalars are sums that cancel: no measure.)"""
    for n, (a, b) in enumerate(zip(ours, other)):
        if a.ndim == 0:
            continue
        difference = (a.float() - b.float()).norm() / b.float().norm()
        assert difference < 0.02, f"{name}: result {n} differs from ours by {difference:.1%}"


def measure(case, backward, rounds):
    """{variant: sorted times in ms}"""
    name, shape, makers, wanted, forward_streams, backward_streams, variants = case
    torch.manual_seed(0)
    master = [make() for make in makers]
    size = master[0].numel() * master[0].element_size()
    moved = int(size * (forward_streams + (backward_streams if backward else 0)))
    sets = max(1, -(-COLD // moved))
    gradients = [torch.randn_like(o) for o in call(variants["ours"], master, None, False)]

    def inputs():  # of their own for each variant and call: some libraries write into what they save
        return [m.clone().requires_grad_(backward and i < wanted) for i, m in enumerate(master)]

    ours = call(variants["ours"], inputs(), [g.clone() for g in gradients], backward)
    runs = {}
    for variant, function in variants.items():
        check(f"{name} {shape} {variant}", ours, call(function, inputs(), [g.clone() for g in gradients], backward))
        calls = [partial(call, function, inputs(), [g.clone() for g in gradients], backward) for _ in range(sets)]
        runs[variant] = graph_of(calls)
    copies = [
        (torch.empty(moved // 2, dtype=torch.uint8, device="cuda"), torch.empty(moved // 2, dtype=torch.uint8, device="cuda"))
        for _ in range(sets)
    ]
    runs["floor"] = graph_of([partial(a.copy_, b) for a, b in copies])

    times = {v: [] for v in runs}
    order = list(runs)
    for n in range(rounds + 3):
        random.shuffle(order)
        for v in order:
            ms = milliseconds(*runs[v])
            if n >= 3:
                times[v].append(ms)
    return {v: sorted(t) for v, t in times.items()}, moved


def kept(case):
    """{variant: MiB that a forward leaves behind for the backward, results included, inputs not}"""
    _, _, makers, wanted, _, _, variants = case
    inputs = [make().requires_grad_(i < wanted) for i, make in enumerate(makers)]
    megabytes = {}
    for variant, function in variants.items():
        function(*inputs)  # compiles
        before = torch.cuda.memory_allocated()
        results = function(*inputs)
        megabytes[variant] = (torch.cuda.memory_allocated() - before) / 2**20
        del results  # not before it was measured
    return megabytes


def overhead(dtype):
    """Microseconds of Python for a call on a tensor so small that the GPU is always waiting: forward, forward and backward."""
    shape = (16, 512)
    functions = {"rms_norm": rms_norm, "F.rms_norm": lambda x, w: F.rms_norm(x, (512,), w)}
    if liger_rms_norm:
        functions["liger_rms_norm"] = lambda x, w: liger_rms_norm(x, w, EPS, in_place=False)
    functions |= {"swiglu": lambda x, w: swiglu(x, x), "F.silu(x) * x": lambda x, w: F.silu(x) * x}
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.ones(512, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, device="cuda", dtype=dtype)

    def microseconds(f, backward):
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                y = f(x, w)
                if backward:
                    torch.autograd.grad(y, (x, w), dy, allow_unused=True)
            samples.append((time.perf_counter() - start) / 50 * 1e6)
        return statistics.median(samples)

    for name, f in functions.items():
        yield name, microseconds(f, False), microseconds(f, True)


def part():
    properties = torch.cuda.get_device_properties(0)
    return getattr(properties, "gcnArchName", "").split(":")[0] or properties.name


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("norm_and_gates: needs a GPU that torch can see")
    dtype, device = getattr(torch, options.dtype), part()
    print(
        f"{torch.cuda.get_device_name(0)} ({device}), torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {platform.python_version()}, "
        f"{options.dtype}, {options.rounds} rounds, Liger {'compared' if liger_rms_norm else 'not installed'}\n"
    )
    header = f"{'':36}{'best other':>11}{'eager':>8}{'of copy':>9} |{'ours ms':>9}{'±':>5}"
    header += "".join(f"{name:>9}" for name in ("eager", "torch", "compiled", "liger", "floor"))
    print(f"{'':36}{'times ours (more is better)':>28}\n{header}")
    table = []
    for case in cases(dtype):
        name, shape = case[:2]
        if not name.startswith(options.only):
            continue
        for backward in (False, True):
            torch._dynamo.reset()
            times, moved = measure(case, backward, options.rounds)
            median = {v: statistics.median(t) for v, t in times.items()}
            spread = (times["ours"][len(times["ours"]) * 3 // 4] - times["ours"][len(times["ours"]) // 4]) / 2 / median["ours"]
            others = {v: m for v, m in median.items() if v not in ("ours", "floor")}
            best = min(others, key=others.get)
            row = {
                "name": name,
                "shape": "x".join(map(str, shape)),
                "pass": "forward+backward" if backward else "forward",
                "over_best_other": others[best] / median["ours"],
                "best_other": best,
                "over_eager": median["eager"] / median["ours"],
                "of_copy_bandwidth": median["floor"] / median["ours"],
                "GB_per_s": moved / median["ours"] / 1e6,
                "spread": spread,
                **{f"{v}_ms": m for v, m in median.items()},
            }
            table.append(row)
            label = f"{name} {row['shape']}{' f+b' if backward else ''}"
            print(
                f"{label:36}{row['over_best_other']:10.2f}×{row['over_eager']:7.2f}×{row['of_copy_bandwidth']:8.0%}  |"
                f"{median['ours']:9.4f}{spread:5.0%}"
                + "".join(f"{median[v]:9.4f}" if v in median else f"{'':9}" for v in ("eager", "torch", "compiled", "liger", "floor")),
                flush=True,
            )
            del times
        table[-1] |= {f"{variant}_kept_MiB": megabytes for variant, megabytes in kept(case).items()}
        torch.cuda.empty_cache()

    print(f"\nMemory that a forward leaves behind, results included, MiB{'ours':>12}{'eager':>9}{'compiled':>10}")
    for row in table:
        if row["pass"] != "forward":
            print(
                f"{row['name']} {row['shape']}".ljust(58)
                + f"{row['ours_kept_MiB']:12.1f}{row['eager_kept_MiB']:9.1f}{row['compiled_kept_MiB']:10.1f}"
            )

    print(f"\nPython's cost of one eager call, µs {'forward':>22}{'f+b':>9}")
    for name, forward, both in overhead(dtype):
        print(f"{name:36}{forward:21.1f}{both:9.1f}")
    if device == "gfx1151":
        print(
            "\nPublished for gfx1151, strix-halo-kernels, fp16, forward       eager ms   its ms     over eager   ours here: ms, over eager"
        )
        for (name, shape), (eager, theirs) in PUBLISHED.items():
            here = next(
                (r for r in table if r["name"] == name and r["shape"] == "x".join(map(str, shape)) and r["pass"] == "forward"), None
            )
            ours = f"{here['ours_ms']:.3f}, {here['over_eager']:.2f}×" if here else ""
            print(f"{name} {shape}".ljust(62) + f"{eager:9.3f}{theirs:9.3f}{eager / theirs:14.2f}×   {ours}")
    if not table:
        sys.exit(f"norm_and_gates: no case begins with {options.only!r}")
    save(table, options.out, f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {options.dtype}")


def save(table, folder, title):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "norm_and_gates.csv", "w", newline="") as f:
        writer = csv.DictWriter(
            f, sorted({k for r in table for k in r}, key=lambda k: next(i for r in table for i, x in enumerate(r) if x == k))
        )
        writer.writeheader()
        writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in r.items()} for r in table)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 1 + 0.32 * len(table)), layout="constrained")
    for key, color in (
        ("eager_ms", "#bbbbbb"),
        ("torch_ms", "#7f9fc4"),
        ("compiled_ms", "#3a6ea5"),
        ("liger_ms", "#8a6bb1"),
        ("floor_ms", "#222222"),
    ):
        points = [(r[key] / r["ours_ms"], i) for i, r in enumerate(table) if key in r]
        if points:
            axis.plot(
                *zip(*points),
                marker="|" if key == "floor_ms" else "o",
                markersize=11 if key == "floor_ms" else 5,
                linestyle="",
                color=color,
                label={"floor_ms": "copy of as many bytes"}.get(key, key[:-3]),
            )
    axis.axvline(1, color="#c0392b", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}×")
    axis.set_yticks(range(len(table)), [f"{r['name']} {r['shape']}{' f+b' if 'back' in r['pass'] else ''}" for r in table], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("time, in units of ours (red line): right of it is slower")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(folder / "norm_and_gates.png", dpi=150)
    print(f"\nwrote {folder / 'norm_and_gates.csv'} and .png")


if __name__ == "__main__":
    main()

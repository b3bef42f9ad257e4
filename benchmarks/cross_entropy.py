"""How fast is soft-capped cross entropy, and how much memory does it take, against torch.compile, eager PyTorch and a copy?

    python benchmarks/cross_entropy.py [--rows 32768] [--vocab 8192] [--width 512] [--rounds 50] [--out benchmarks]

Prints ratios first, then the table, and writes cross_entropy.csv and cross_entropy.png. Needs a GPU; Liger's fused linear cross
entropy is compared if it is installed.

GPU time is that of a CUDA graph of the call, so without Python; variants take turns within a round, in a new order each round; medians,
with the middle half as spread. Every variant's loss and gradients are compared with ours first. Logits of the default size
are beyond any cache. "floor" is Tensor.copy_ of as many bytes as the operation must read and write. Memory is the peak above
what is allocated before the call, gradients included, with the allocator in charge (no graph). The last table is what an eager call
costs in Python.
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
from kernels.cross_entropy import (
    linear_softcap_cross_entropy,
    linear_softcap_cross_entropy_ref,
    softcap_cross_entropy,
    softcap_cross_entropy_ref,
)

try:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
except ImportError:
    liger_fused_linear_cross_entropy = None

COLUMNS = ("operation", "pass", "shape", "variant", "median_ms", "q1_ms", "q3_ms", "times_ours", "peak_mib", "share_of_float32_logits")


def call(function, inputs, targets, backward):
    """(loss,) or (loss, gradients…)."""
    loss = function(*inputs, targets)
    return (loss.detach(), *torch.autograd.grad(loss, inputs)) if backward else (loss,)


def graph_of(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.results = run()
    graph.run = run  # a replay reads its inputs: they must live as long as the graph
    return graph.replay


def milliseconds(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(runs, rounds):
    """{variant: sorted ms}: all variants in each round, in a new order each time."""
    times, order = {v: [] for v in runs}, list(runs)
    for n in range(rounds + 3):
        random.shuffle(order)
        for v in order:
            ms = milliseconds(runs[v])
            if n >= 3:
                times[v].append(ms)
    return {v: sorted(t) for v, t in times.items()}


def check(name, ours, other):
    for n, (a, b) in enumerate(zip(ours, other, strict=True)):
        difference = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert difference < 0.02, f"{name}: result {n} differs from ours by {difference:.1%}"


def peak_mib(run):
    """Peak above what was allocated before, of a call whose compilation and workspaces are behind it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(operation, shape, variants, inputs, targets, moved, float32_logits, rounds):
    """Rows of COLUMNS for the forward alone (under no_grad) and for forward and backward. `moved`: bytes of the two passes."""
    for backward in (False, True):
        calls = {v: partial(call, f, inputs, targets, backward) for v, f in variants.items()}
        if not backward:
            calls = {v: torch.no_grad()(c) for v, c in calls.items()}
        ours = calls["ours"]()
        for v, c in calls.items():
            check(f"{operation} {v}", ours, c())
        del ours
        peaks = {v: peak_mib(c) for v, c in calls.items()}
        # Liger's linear one waits for the GPU in between, which a graph cannot: it is timed as it is, and takes long enough for that.
        runs = {v: c if v == "liger" else graph_of(c) for v, c in calls.items()}
        if moved:
            a, b = (torch.empty(moved[backward] // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
            runs["floor"] = graph_of(partial(a.copy_, b))
        times = interleaved(runs, rounds)
        median = {v: statistics.median(t) for v, t in times.items()}
        for v, t in times.items():
            peak = peaks.get(v)
            yield {
                "operation": operation, "pass": "forward+backward" if backward else "forward", "shape": shape, "variant": v,
                "median_ms": round(median[v], 4), "q1_ms": round(t[len(t) // 4], 4), "q3_ms": round(t[3 * len(t) // 4], 4),
                "times_ours": round(median[v] / median["ours"], 3), "peak_mib": "" if peak is None else round(peak, 1),
                "share_of_float32_logits": "" if peak is None else round(peak * 2**20 / float32_logits, 3),
            }  # fmt: skip
        del runs


def overhead(repeats=300):
    """{name: (forward, forward+backward)} in microseconds of Python a call, on tensors so small that the GPU waits."""
    logits = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (16, 256))
    targets = torch.randint(0, 256, (16,), device="cuda")
    functions = {
        "softcap_cross_entropy": (softcap_cross_entropy, [logits]),
        "eager softcap and F.cross_entropy": (softcap_cross_entropy_ref, [logits]),
        "F.cross_entropy alone, float32": (F.cross_entropy, [logits.detach().float().requires_grad_()]),
        "linear_softcap_cross_entropy": (linear_softcap_cross_entropy, [x, weight]),
        "eager linear, softcap, F.cross_entropy": (linear_softcap_cross_entropy_ref, [x, weight]),
    }
    results = {}
    for name, (function, inputs) in functions.items():
        both = []
        for backward in (False, True):
            for n in range(repeats + 20):
                if n == 20:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                call(function, inputs, targets, backward)
            both.append((time.perf_counter() - start) / repeats * 1e6)
            torch.cuda.synchronize()
        results[name] = both
    return results


def picture(rows, path, title):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return print("no picture: matplotlib is not installed")
    groups = list(dict.fromkeys((r["operation"], r["pass"]) for r in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(4 * len(groups), 3.6))
    for axis, group in zip(axes, groups):
        bars = [r for r in rows if (r["operation"], r["pass"]) == group]
        colors = ["C3" if r["variant"] == "ours" else "C7" for r in bars]
        axis.barh([r["variant"] for r in bars], [r["median_ms"] for r in bars], color=colors)
        axis.invert_yaxis()
        axis.set_xlabel("ms")
        axis.set_title("\n".join(group), fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"{path} written")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512, help="n_embd of the linear one")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")

    torch.manual_seed(0)
    random.seed(0)
    dtype, rows, vocab = getattr(torch, args.dtype), args.rows, args.vocab
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    targets[::97] = -1
    logits = (torch.randn(rows, vocab, device="cuda", dtype=dtype) * 4).requires_grad_()
    size = logits.numel() * logits.element_size()
    shape, results = f"{rows}x{vocab} {args.dtype}", []
    results += measure(
        "softcap_cross_entropy", shape, {"ours": softcap_cross_entropy, "compiled": torch.compile(softcap_cross_entropy_ref, dynamic=False),
                                         "eager": softcap_cross_entropy_ref},
        [logits], targets, (size, 3 * size), rows * vocab * 4, args.rounds)  # fmt: skip
    del logits
    x = torch.randn(rows, args.width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, args.width, device="cuda", dtype=dtype) * (4 / args.width**0.5)).requires_grad_()
    variants = {"ours": linear_softcap_cross_entropy, "compiled": torch.compile(linear_softcap_cross_entropy_ref, dynamic=False),
                "eager": linear_softcap_cross_entropy_ref}  # fmt: skip
    if liger_fused_linear_cross_entropy:
        variants["liger"] = lambda x, w, t: liger_fused_linear_cross_entropy(x, w, t, ignore_index=-1, softcap=15.0)
    shape = f"{rows}x{args.width} to {vocab} {args.dtype}"
    results += measure("linear_softcap_cross_entropy", shape, variants, [x, weight], targets, None, rows * vocab * 4, args.rounds)

    part = torch.cuda.get_device_name()
    title = f"{part}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    print(f"{title}; medians of {args.rounds}\n\nTimes slower than ours, and memory\n")
    for r in results:
        memory = "" if r["peak_mib"] == "" else f"  {r['peak_mib']:8.0f} MiB, {r['share_of_float32_logits']:.2f} of float32 logits"
        print(f"{r['times_ours']:6.2f}x  {r['operation']:29} {r['pass']:17} {r['variant']:9} {r['median_ms']:9.4f} ms{memory}")
    both = {(r["operation"], r["variant"]): r for r in results if r["pass"] == "forward+backward"}
    ratio = both["softcap_cross_entropy", "compiled"]["times_ours"]
    share = both["linear_softcap_cross_entropy", "ours"]["share_of_float32_logits"]
    print(f"\ntarget at least 2x torch.compile, forward+backward: {ratio:.2f}x; target at most 0.25 of float32 logits: {share:.3f}")
    print("\nMicroseconds of Python a call (forward, forward+backward), (16, 256)\n")
    for name, (forward, total) in overhead().items():
        print(f"{name:40} {forward:7.1f} {total:7.1f}")
    path = args.out / "cross_entropy.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, "part", "torch", "triton"))
        writer.writeheader()
        writer.writerows({**r, "part": part, "torch": torch.__version__, "triton": triton.__version__} for r in results)
    print(f"\n{path} written")
    picture(results, args.out / "cross_entropy.png", title)


if __name__ == "__main__":
    main()

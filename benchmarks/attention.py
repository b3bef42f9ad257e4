"""How fast is `flash_attention` beside SDPA's backends and FlexAttention, forward and forward + backward?

    python benchmarks/attention.py [--out DIR] [--rounds N] [--only SUBSTRING]

GPU time of bfloat16 calls on (B, T, n_head, head_dim) tensors, as models have them (SDPA and FlexAttention get transposed views):
each variant's work is captured in a graph, so that the time of the eager call is left out (it has a table of its own), and the
variants are timed in turn, round after round, with the caches cleared before each, so that what the machine does meanwhile meets
all of them. Medians. The ratio in a variant's column is its time over ours: above 1, ours is faster. Each output is checked first.
Writes attention.csv and attention.png. Runs on a gfx1151 machine too, and there prints what is published for it beside.
"""

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels.attention import flash_attention, flash_attention_ref

# (name, B, n_head, n_kv_head, T, head_dim, window)
CASES = [
    ("causal", 1, 32, 32, 512, 128, None),
    ("causal", 1, 32, 32, 4096, 128, None),
    ("causal", 2, 24, 24, 4096, 64, None),
    ("causal", 1, 16, 16, 8192, 64, None),
    ("causal", 16, 4, 4, 2048, 128, None),
    ("window T/2", 16, 4, 4, 2048, 128, 1024),
    ("window T/8", 16, 4, 4, 2048, 128, 256),
    ("window T/8", 1, 32, 32, 4096, 128, 512),
    ("window T/8", 1, 16, 16, 8192, 64, 1024),
    ("causal", 1, 16, 16, 8192, 128, None),
    ("window T/8", 1, 16, 16, 8192, 128, 1024),
    ("MHA", 16, 32, 32, 2048, 128, None),
    ("GQA 8:1", 16, 32, 4, 2048, 128, None),
]
# strix-halo-kernels' README: forward, fp16, speed over AOTriton's flash attention on gfx1151.
PUBLISHED_GFX1151 = {(1, 32, 512, 128): 3.27, (1, 32, 4096, 128): 2.08, (2, 24, 4096, 64): 3.00, (1, 16, 8192, 64): 2.55}
PUBLISHED_MEMORY = "published, fp16 forward at (1, 32, 4096, 128): 5056 MiB for SDPA, 160 MiB for strix-halo-kernels"


# --- variants ------------------------------------------------------------------------------------------------------


def ours(window, **_):
    return lambda q, k, v: flash_attention(q, k, v, window=window)


def sdpa(backend):
    def make(window, group, **_):
        if window is not None:
            raise NotImplementedError("no windows")

        def call(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=group > 1
                ).transpose(1, 2)

        return call

    return make


def flex(window, group, T, **_):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # one compilation a case, none of them dynamic

    def seen(b, h, i, j):
        return i >= j if window is None else (i >= j) & (i - j <= window)

    mask = create_block_mask(seen, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q, k, v):
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask, enable_gqa=group > 1).transpose(1, 2)

    return call


def sdpa_math(window, group, T, B, n_head, **_):
    if B * n_head * T * T * 16 > torch.cuda.mem_get_info()[0] / 4:
        raise NotImplementedError("does not fit")
    return sdpa(SDPBackend.MATH)(window, group)


VARIANTS = {
    "ours": ours,
    "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "cudnn": sdpa(getattr(SDPBackend, "CUDNN_ATTENTION", None)),
    "math": sdpa_math,
}


# --- measuring -----------------------------------------------------------------------------------------------------


def captured(call):
    """`call` as a graph's replay and True, or `call` itself and False where it cannot be captured."""
    for _ in range(2):
        call()  # compiles and tunes
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = call()
    except Exception as error:
        torch.cuda.synchronize()
        print(f"    not captured, timed eagerly: {str(error).splitlines()[0][:100]}")
        return call, False
    kept = kept, call  # a replay reads what the call refers to (a block mask): it must live as long as the graph
    return lambda kept=kept: graph.replay(), True


def interleaved(calls, rounds):
    """{name: [milliseconds, ...]}: each round times every call once, starting with another one each time."""
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds + 3):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.zero_()
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(start.elapsed_time(end))
    return times


def peak(call):
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - base


def visible(T, window):
    window = T if window is None else window
    return sum(min(i, window) + 1 for i in range(T))


def error_of(call, inputs, window, group):
    """Largest error of the first query head of the first sequence, against float32."""
    q, k, v = (x.detach() for x in inputs)
    out = call(q, k, v)[:1, :, :1].float()
    exact = flash_attention_ref(q[:1, :, :1].float(), k[:1, :, :1].float(), v[:1, :, :1].float(), window=window)
    error = (out - exact).abs().max().item()
    if not error < 3e-2:
        raise AssertionError(f"wrong numbers: error {error}")
    return error


def measure(case, rounds):
    name, B, n_head, n_kv_head, T, head_dim, window = case
    torch.manual_seed(0)
    q = torch.randn(B, T, n_head, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(B, T, n_kv_head, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    do = torch.randn_like(q)
    group = n_head // n_kv_head
    forward, both, rows = {}, {}, []
    for variant, make in VARIANTS.items():
        try:
            function = make(window=window, group=group, T=T, B=B, n_head=n_head)

            def call_forward(function=function):
                with torch.no_grad():
                    return function(q, k, v)

            def call_both(function=function):
                return torch.autograd.grad(function(q, k, v), (q, k, v), do)

            error = error_of(function, (q, k, v), window, group)
            graph_forward, graph_both = captured(call_forward), captured(call_both)
            memory = peak(call_forward), peak(call_both)
            forward[variant], both[variant] = graph_forward[0], graph_both[0]
            rows.append(dict(variant=variant, error=error, graph=graph_forward[1] and graph_both[1], memory=memory))
        except Exception as error:
            print(f"    {variant}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:110]}")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    times_forward, times_both = interleaved(forward, rounds), interleaved(both, rounds)
    flops = 4 * head_dim * visible(T, window) * B * n_head
    least = 2 * (2 * q.numel() + k.numel() + v.numel()) + 4 * B * n_head * T  # inputs, output, lse
    for row in rows:
        f, fb = (statistics.median(times[row["variant"]]) for times in (times_forward, times_both))
        quarters = statistics.quantiles(times_both[row["variant"]], n=4)
        row.update(
            case=name,
            B=B,
            n_head=n_head,
            n_kv_head=n_kv_head,
            T=T,
            head_dim=head_dim,
            window=window,
            forward_ms=f,
            both_ms=fb,
            backward_ms=fb - f,
            forward_tflops=flops / f / 1e9,
            backward_tflops=2.5 * flops / (fb - f) / 1e9 if fb > f else math.nan,
            both_spread=(quarters[2] - quarters[0]) / fb,
            forward_memory_mib=row["memory"][0] / 2**20,
            both_memory_mib=row["memory"][1] / 2**20,
            forward_memory_over_least=(row["memory"][0] + least - 2 * q.numel() - 4 * B * n_head * T) / least,
        )
        del row["memory"]
    return rows


def overhead():
    """Microseconds that an eager call keeps the CPU, at a shape whose kernels take less."""
    q, k, v = (torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    do = torch.randn_like(q)
    result = {}
    for variant in ("ours", "flash"):
        try:
            function = VARIANTS[variant](window=None, group=1, T=64, B=1, n_head=1)

            def forward(function=function):
                with torch.no_grad():
                    function(q, k, v)

            def both(function=function):
                torch.autograd.grad(function(q, k, v), (q, k, v), do)

            for which, call in (("forward", forward), ("forward + backward", both)):
                for _ in range(20):
                    call()
                torch.cuda.synchronize()
                rounds = []
                for _ in range(20):
                    start = time.perf_counter()
                    for _ in range(20):
                        call()
                    rounds.append((time.perf_counter() - start) / 20 * 1e6)
                    torch.cuda.synchronize()
                result[variant, which] = statistics.median(rounds)
        except Exception as error:
            print(f"    {variant}: {str(error).splitlines()[0][:110]}")
    return result


# --- telling -------------------------------------------------------------------------------------------------------


def label(row):
    heads = str(row["n_head"]) if row["n_head"] == row["n_kv_head"] else f"{row['n_head']}/{row['n_kv_head']}"
    return f"({row['B']},{heads},{row['T']},{row['head_dim']}) {row['case']}"


def key_of(row):
    return tuple(row[name] for name in ("B", "n_head", "n_kv_head", "T", "head_dim", "window"))


def by_variant(rows, key):
    return {row["variant"]: row for row in rows if key_of(row) == key}


def keys(rows):
    return list(dict.fromkeys(map(key_of, rows)))


def print_table(rows, published):
    for column, title in (("forward_ms", "forward"), ("both_ms", "forward + backward"), ("backward_ms", "backward (difference)")):
        print(f"\n{title}: time over ours (above 1: ours is faster), then ours in ms and TFLOP/s" + (", published" if published else ""))
        others = [v for v in VARIANTS if v != "ours"]
        print(f"{'(B, n_head, T, head_dim)':<36}" + "".join(f"{v:>8}" for v in others) + f"{'ours ms':>10}{'TFLOP/s':>9}")
        for key in keys(rows):
            variants = by_variant(rows, key)
            if "ours" not in variants:
                continue
            mine = variants["ours"]
            ratios = "".join(f"{variants[v][column] / mine[column]:>7.2f}×" if v in variants else f"{'—':>8}" for v in others)
            rate = {"forward_ms": mine["forward_tflops"], "backward_ms": mine["backward_tflops"]}.get(column)
            line = f"{label(mine):<36}{ratios}{mine[column]:>10.3f}" + (f"{rate:>9.0f}" if rate else "")
            shape = key[0], key[1], key[3], key[4]
            if published and column == "forward_ms" and key[5] is None and shape in PUBLISHED_GFX1151:
                line += f"   published {PUBLISHED_GFX1151[shape]:.2f}× flash (fp16)"
            print(line)


def print_targets(rows):
    """What is to be reached, and by how much it is."""
    print("\ntargets (ratio reached, met from 1.00 up)")

    def tell(what, ratio):
        print(f"  {'met   ' if ratio >= 1 else 'MISSED'} {ratio:5.2f}  {what}")

    get = {key: by_variant(rows, key) for key in keys(rows)}
    for key, variants in get.items():
        if "ours" not in variants or key[2] != key[1]:
            continue
        mine, name = variants["ours"], label(variants["ours"])
        if "flash" in variants:
            tell(f"{name}: forward at SDPA flash's speed", variants["flash"]["forward_ms"] / mine["forward_ms"])
        if "flex" in variants:
            need = 1.15 if key[5] is not None else 1.0
            tell(f"{name}: forward at {need}× FlexAttention's speed", variants["flex"]["forward_ms"] / mine["forward_ms"] / need)
            tell(f"{name}: forward + backward at {need}× FlexAttention's", variants["flex"]["both_ms"] / mine["both_ms"] / need)
    for head_dim, column in itertools.product((64, 128), ("forward_ms", "backward_ms")):
        full, windowed = ((get.get((1, 16, 16, 8192, head_dim, w)) or {}).get("ours") for w in (None, 1024))
        if full and windowed:
            tell(
                f"window T/8 at T 8192, head_dim {head_dim}: {column[:-3]} at most 0.35 of full causal's",
                0.35 * full[column] / windowed[column],
            )
    mha, gqa = ((get.get((16, 32, kv, 2048, 128, None)) or {}).get("ours") for kv in (32, 4))
    if mha and gqa:
        for column in ("forward_ms", "both_ms"):
            tell(f"GQA 8:1 no slower than MHA: {column[:-3]}", mha[column] / gqa[column])
    large = (get.get((1, 32, 32, 4096, 128, None)) or {}).get("ours")
    if large:
        tell("peak memory of the forward at most 1.2 × (inputs, output, lse)", 1.2 / large["forward_memory_over_least"])


def picture(rows, path, device):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib: no picture")
        return
    figure, axes = plt.subplots(2, 1, figsize=(13, 9), sharex=True)
    all_keys = keys(rows)
    for axis, column, factor, title in ((axes[0], "forward_ms", 1, "forward"), (axes[1], "both_ms", 3.5, "forward + backward")):
        for i, variant in enumerate(VARIANTS):
            at, height = [], []
            for x, key in enumerate(all_keys):
                row = by_variant(rows, key).get(variant)
                if row:
                    at.append(x + (i - 2) * 0.17)
                    height.append(factor * row["forward_tflops"] * row["forward_ms"] / row[column])
            axis.bar(at, height, 0.16, label=variant)
        axis.set_ylabel("TFLOP/s, visible pairs only")
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(ncols=len(VARIANTS))
    labels = [label(next(iter(by_variant(rows, key).values()))) for key in all_keys]
    axes[1].set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    figure.suptitle(f"attention, bfloat16, {device}, torch {torch.__version__}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="cases whose label contains this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py: needs a GPU; torch sees none")
    import triton

    properties = torch.cuda.get_device_properties(0)
    architecture = getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"
    print(f"{properties.name} ({architecture}), torch {torch.__version__}, triton {triton.__version__}, {options.rounds} rounds, median")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        name, B, n_head, n_kv_head, T, head_dim, window = case
        title = label(dict(case=name, B=B, n_head=n_head, n_kv_head=n_kv_head, T=T, head_dim=head_dim))
        if options.only not in title:
            continue
        print(f"  {title}", flush=True)
        start = time.time()
        rows += measure(case, options.rounds)
        torch.cuda.empty_cache()
        print(f"    {time.time() - start:.0f} s", flush=True)
        with open(options.out / "attention.csv", "w", newline="") as f:  # after each case: what is done is kept
            if rows:
                writer = csv.DictWriter(f, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    published = architecture.startswith("gfx1151")
    print_table(rows, published)
    print_targets(rows)
    print("\npeak memory beyond the inputs, MiB (forward, forward + backward)")
    for row in rows:
        if row["variant"] in ("ours", "flash", "flex", "math"):
            print(f"  {label(row):<36}{row['variant']:>8}{row['forward_memory_mib']:>9.0f}{row['both_memory_mib']:>9.0f}")
    if published:
        print(PUBLISHED_MEMORY)
    print("\neager call, µs of CPU time")
    for (variant, which), microseconds in overhead().items():
        print(f"  {variant:<8}{which:<20}{microseconds:8.1f}")
    from kernels import attention

    print("\ncandidates chosen")
    for table, kernels in (("forward", attention._forward), ("dkdv", attention._dkdv), ("dq", attention._dq)):
        for block_d, tuned in kernels.items():
            for key, config in getattr(tuned, "cache", {}).items():
                print(f"  {table} {block_d} {key[:5]}: {config}")
    picture(rows, options.out / "attention.png", f"{properties.name} ({architecture})")


if __name__ == "__main__":
    main()

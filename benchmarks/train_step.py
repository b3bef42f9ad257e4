"""How long does a training step take: the published port's recipe, the same with windows, and ours?

    python benchmarks/train_step.py [--rounds 2] [--batches 131072/16,524288/128] [--loader] [--out benchmarks]     (about 15 minutes)
    python benchmarks/train_step.py --report        (the table and the picture again, from what the last call left, also if it was cut)

    recipe   upstream's model as autoresearch-halo trains it: SDPA over the whole context, all the rest left to torch.compile
    flex     the same with the windows of the pattern by FlexAttention
    fa4      the same with the windows by FlashAttention 4, where it is installed (flash-attn-4)
    ours     train.py as it is

Each runs in a process of its own, one after the other, `rounds` times in turns; the first start with a batch is with empty caches (cold),
later ones with what it left (warm). Tokens are random; --loader measures with the prepared dataset's batches too (context 2048).
Prints a table, ratios first, and writes train_step.csv, train_step.png and train_step_kernels.csv, the GPU's time by kernel. Needs a GPU.

Wall time is that of whole steps as train.py takes them, one synchronisation each: median, with the middle half as spread. GPU-busy is the
sum of its kernels in two profiled steps. Peak memory is torch's max_memory_allocated in 10^6 bytes. Start-up runs from the start of the
process to the end of the first timed step's warm-up. Evaluation is the forward pass of evaluate_bpb's calls on a micro-batch.
"""

import argparse
import csv
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.time()  # before torch, whose import is part of the start-up

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import prepare
import train
from harness import cuda_graph, machine
from harness import run as harness
from harness.candidates import ATTENTION
from harness.data import dataset as chosen

VARIANTS = ("recipe", "flex", "fa4", "ours")
VOCABULARY = 8192


# ---- one variant, in a process of its own --------------------------------------------------------------------------------------------


def attentions(model, name, device, whole=False):
    """What computes attention in each layer, by a name of candidates.ATTENTION or "fa4"; whole: over the whole context in all of them."""
    T = model.config.sequence_len
    make = {**ATTENTION, "fa4": flash_attention_4}[name]
    return [make(T if whole else window, T, device) for window, _ in model.window_sizes]


def has_flash_attention_4():
    return importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn.cute") is not None


def flash_attention_4(window, T, device):
    """FlashAttention 4 (package flash-attn-4), which takes windows."""
    from flash_attn.cute import flash_attn_func

    sides = (None, None) if window >= T - 1 else (window, 0)

    def attend(q, k, v):
        result = flash_attn_func(q, k, v, causal=True, window_size=sides)
        return result[0] if isinstance(result, tuple) else result

    return attend


def upstream_forward(model, idx, targets, reduction, dtype, attends):
    """Upstream's forward pass on the parameters of `model`, in plain PyTorch, a product for each of q, k, v and the gates."""
    B, T = idx.shape
    norm = train.norm
    cos, sin = model.cos[:, :T], model.sin[:, :T]
    x = x0 = norm(model.transformer.wte(idx).to(dtype))
    for i, block in enumerate(model.transformer.h):
        attn = block.attn
        x = model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0
        h = norm(x)
        q, k, v = (c(h).view(B, T, -1, attn.head_dim) for c in (attn.c_q, attn.c_k, attn.c_v))
        if str(i) in model.value_embeds:
            gate = 2 * torch.sigmoid(attn.ve_gate(h[..., : attn.ve_gate_channels]))
            v = v + gate.unsqueeze(-1) * model.value_embeds[str(i)](idx).to(dtype).view(v.shape)
        q, k = norm(train.apply_rotary(q, cos, sin)), norm(train.apply_rotary(k, cos, sin))
        x = x + attn.c_proj(attends[i](q, k, v).flatten(2))
        x = x + block.mlp.c_proj(F.relu(block.mlp.c_fc(norm(x))).square())
    logits = model.lm_head(norm(x)).float()
    logits = 15 * torch.tanh(logits / 15)
    if targets is None:
        return logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


def upstream(model, dtype=torch.bfloat16, attention="sdpa", whole=False):
    """Upstream's forward pass, compiled, as a function to be called as train.py's models are: (idx, targets=None, reduction="mean")."""
    attends = attentions(model, attention, model.lm_head.weight.device, whole)
    compiled = torch.compile(upstream_forward, dynamic=False, fullgraph=attention != "fa4")
    return lambda idx, targets=None, reduction="mean": compiled(model, idx, targets, reduction, dtype, attends)


def build(variant, device, vocabulary=VOCABULARY):
    """(model, its loss function (idx, targets, reduction), which attention) of a variant, compiled as it is meant to be."""
    model = harness.build(train.GPT, train.model_config(vocabulary), device)
    if variant == "ours":
        _, chosen = harness.compile_model(model, device)
        return model, model, chosen.names
    name, whole = {"recipe": ("sdpa", True), "flex": ("flex", False), "fa4": ("fa4", False)}[variant]
    return model, upstream(model, attention=name, whole=whole), lambda: "sdpa over the whole context" if whole else name


def measure(variant, tokens, micro_batch, loader, steps, cache):
    chosen.CACHE_DIR = cache  # of what is compiled and tuned; the dataset stays where it was found
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    machine.keep_compiled()
    torch.manual_seed(42)
    tokenizer = prepare.Tokenizer.from_directory() if loader else None
    model, loss_of, attention = build(variant, device, tokenizer.get_vocab_size() if loader else VOCABULARY)
    optimizer = train.make_optimizer(model)
    records = variant == "ours" and not torch.version.hip
    T, micro_batches = train.MAX_SEQ_LEN, tokens // (micro_batch * train.MAX_SEQ_LEN)
    if loader:
        batches = ((x, y) for x, y, _ in prepare.make_dataloader(tokenizer, micro_batch, T, "train"))
    else:
        rows = torch.randint(0, VOCABULARY, (8, micro_batch, T + 1), device=device)
        kept = [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]
        batches = (kept[i % 8] for i in range(10**9))

    def micro_step(x, y):
        with machine.autocast(device):
            loss = loss_of(x, y)
        (loss / micro_batches).backward()
        return loss.detach()

    run = micro_step

    def step():
        for _ in range(micro_batches):
            loss = run(*next(batches))
        optimizer.step()
        model.zero_grad(set_to_none=not records)
        return cuda_graph.wait_for(loss)

    step()
    if records:
        run = cuda_graph.record(micro_step, *next(batches)) or micro_step
    step()
    start_up = time.time() - STARTED
    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            step()
    kernels = [
        {"kernel": e.key, "launches": e.count / 2, "ms": e.self_device_time_total / 2000}
        for e in profile.key_averages()
        if e.self_device_time_total > 0
    ]
    model.zero_grad(set_to_none=True)
    run = None  # with its memory
    quarter, median, three_quarters = statistics.quantiles(times, n=4)
    flops = model.estimate_flops()
    result = {
        "variant": variant,
        "tokens": tokens,
        "micro_batch": micro_batch,
        "data": "loader" if loader else "random",
        "wall_ms": median,
        "quarter_ms": quarter,
        "three_quarters_ms": three_quarters,
        "gpu_ms": sum(k["ms"] for k in kernels),
        "launches": sum(k["launches"] for k in kernels),
        "tok_per_s": 1000 * tokens / median,
        "mfu_percent": 100 * 1000 * tokens / median * flops / machine.peak_flops(device)[0],
        "peak_mb": peak,
        "start_up_s": start_up,
        "eval_tok_per_s": evaluation_speed(loss_of, model, next(batches), device, records),
        "attention": attention(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print("RESULT " + json.dumps({"result": result, "kernels": kernels}))


def evaluation_speed(loss_of, model, batch, device, recorded):
    model.eval()
    with torch.no_grad(), machine.autocast(device):
        losses = cuda_graph.recorded_calls(loss_of) if recorded else loss_of
        for _ in range(3):
            losses(*batch, reduction="none")
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            losses(*batch, reduction="none")
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return batch[0].numel() / statistics.median(times)


# ---- all of them ----------------------------------------------------------------------------------------------------------------------


def child(variant, tokens, micro_batch, loader, steps, cache):
    command = [sys.executable, __file__, "--one", variant, "--batches", f"{tokens}/{micro_batch}", "--steps", str(steps)]
    command += ["--cache", cache]
    os.makedirs(cache, exist_ok=True)
    environment = {**os.environ, "AUTORESEARCH_DATASET": os.environ.get("AUTORESEARCH_DATASET", "climbmix")}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # train.py's own are in the cache
        environment.pop(name, None)
    done = subprocess.run([*command, *(["--loader"] if loader else [])], env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"{variant} {tokens}/{micro_batch}: failed with exit code {done.returncode}\n{done.stdout[-2000:]}", flush=True)
        return None
    return json.loads(lines[0][len("RESULT ") :])


def merged(rounds, start_ups):
    """One row of a variant's rounds: medians. start_ups: of all its processes with this batch, in their order; the first was cold."""
    row = {k: statistics.median([r[k] for r in rounds]) if isinstance(v, float) else v for k, v in rounds[0].items()}
    del row["start_up_s"]
    return row | {"start_up_cold_s": start_ups[0], "start_up_warm_s": min(start_ups[1:], default=None), "rounds": len(rounds)}


def table(rows):
    baseline = {(r["tokens"], r["micro_batch"], r["data"]): r for r in rows if r["variant"] == "recipe"}
    lines = [
        "| tokens / micro-batch, data | variant | faster | wall ms (middle half) | GPU ms | launches | M tok/s | MFU % | peak MB"
        " | less memory | evaluation M tok/s | faster | start-up cold / warm s |",
        "|" + "---|" * 13,
    ]
    for r in rows:
        base = baseline.get((r["tokens"], r["micro_batch"], r["data"]))
        ratio = ["", "", ""]
        if base:
            pairs = (base["wall_ms"], r["wall_ms"]), (base["peak_mb"], r["peak_mb"]), (r["eval_tok_per_s"], base["eval_tok_per_s"])
            ratio = [f"{a / b:.2f}" for a, b in pairs]
        warm = f"{r['start_up_warm_s']:.0f}" if r["start_up_warm_s"] else "–"
        lines.append(
            f"| {r['tokens']:,} / {r['micro_batch']}, {r['data']} | {r['variant']} | {ratio[0]} "
            f"| {r['wall_ms']:.1f} ({r['quarter_ms']:.1f}–{r['three_quarters_ms']:.1f}) | {r['gpu_ms']:.1f} | {r['launches']:.0f} "
            f"| {r['tok_per_s'] / 1e6:.3f} | {r['mfu_percent']:.1f} | {r['peak_mb']:.0f} | {ratio[1]} "
            f"| {r['eval_tok_per_s'] / 1e6:.2f} | {ratio[2]} | {r['start_up_cold_s']:.0f} / {warm} |"
        )
    return "\n".join(lines)


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys((r["tokens"], r["micro_batch"], r["data"]) for r in rows))
    colors = dict(zip(VARIANTS, ("#999999", "#56B4E9", "#D55E00")))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, label in ((axes[0], "wall_ms", "wall ms a step"), (axes[1], "peak_mb", "peak memory, MB")):
        for s, setting in enumerate(settings):
            for v, variant in enumerate(VARIANTS):
                for r in rows:
                    if (r["tokens"], r["micro_batch"], r["data"]) == setting and r["variant"] == variant:
                        bar = axis.bar(s + (v - 1) * 0.27, r[key], 0.25, color=colors[variant], label=variant if s == 0 else None)
                        axis.bar_label(bar, fmt="%.0f", fontsize=8)
        axis.set_xticks(range(len(settings)), [f"{t // 1024}K tokens / {b}\n{data}" for t, b, data in settings])
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.suptitle(f"{rows[0]['device']}, torch {rows[0]['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="131072/16,524288/128", help="tokens a step / rows of a micro-batch, several with commas")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loader", action="store_true", help="measure with the prepared dataset's batches too")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--report", action="store_true", help="make the table again from what is there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*(,[1-9]\d*/[1-9]\d*)*", args.batches):
        parser.error(f"--batches {args.batches}: use tokens/rows, such as 131072/16,524288/128")
    if set(args.variants.split(",")) - set(VARIANTS):
        parser.error(f"--variants {args.variants}: use some of {','.join(VARIANTS)}")
    if args.rounds < 1 or args.steps < 2:
        parser.error(f"--rounds {args.rounds} --steps {args.steps}: use 1 round or more, of 2 steps or more")
    if not args.report and not torch.cuda.is_available():
        sys.exit("train_step.py: needs a GPU that torch can use")
    batches = [tuple(map(int, b.split("/"))) for b in args.batches.split(",")]
    variants = args.variants.split(",")
    if "fa4" in variants and not args.report and not has_flash_attention_4():
        print("fa4 is left out: FlashAttention 4 (pip install flash-attn-4) is not installed here")
        variants.remove("fa4")
    if args.one:
        measure(args.one, *batches[0], args.loader, args.steps, args.cache)
        return
    if not args.out.is_dir() or not os.access(args.out, os.W_OK):
        parser.error(f"--out {args.out}: no folder that can be written")
    kept = args.out / "train_step.jsonl"
    if not args.report:
        kept.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as caches:
            for n in range(args.rounds):
                for tokens, micro_batch in batches:
                    for loader in (False, True) if args.loader and n == args.rounds - 1 else (False,):
                        for variant in variants:
                            cache = os.path.join(caches, f"{variant}-{tokens}-{micro_batch}")
                            done = child(variant, tokens, micro_batch, loader, args.steps, cache)
                            if done:
                                r = done["result"]
                                what = f"{variant} {tokens}/{micro_batch} {r['data']}"
                                print(f"{what}: {r['wall_ms']:.1f} ms, start-up {r['start_up_s']:.0f} s, {r['attention']}", flush=True)
                                with open(kept, "a") as f:
                                    f.write(json.dumps(done) + "\n")
    if not kept.exists():
        sys.exit(f"train_step.py: no results in {args.out}: {kept.name} is what a call leaves there")
    results, start_ups, kernels = {}, {}, {}
    for n, line in enumerate(kept.read_text().splitlines(), 1):
        try:
            done = json.loads(line)
        except ValueError as e:
            sys.exit(f"train_step.py: {kept}, line {n} is no result ({e}); remove it")
        r = done["result"]
        key = r["variant"], r["tokens"], r["micro_batch"], r["data"]
        results.setdefault(key, []).append(r)
        start_ups.setdefault(key[:3], []).append(r["start_up_s"])
        if r["data"] == "random":
            kernels[key] = [{"variant": r["variant"], "tokens": r["tokens"], "micro_batch": r["micro_batch"], **k} for k in done["kernels"]]
    kernels = [k for of_one in kernels.values() for k in of_one]
    rows = [merged(r, start_ups[key[:3]]) for key, r in results.items()]
    order = {v: i for i, v in enumerate(VARIANTS)}
    rows.sort(key=lambda r: (r["tokens"], r["data"] == "loader", order[r["variant"]]))
    print(table(rows))
    for name, content in (("train_step.csv", rows), ("train_step_kernels.csv", sorted(kernels, key=lambda k: -k["ms"]))):
        with open(args.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, content[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in content)
    draw(rows, args.out / "train_step.png")


if __name__ == "__main__":
    main()

"""Does the fused path learn the same? Loss against step, and val_bpb, of three forms of one model on the same data.

    python benchmarks/loss_curves.py [--steps 200] [--seeds 3] [--out benchmarks]        (about ten minutes on an H200)
    python benchmarks/loss_curves.py --forms ours; … --forms recipe; … --report          (the same in several processes)
    python benchmarks/loss_curves.py --runs 700                       (whole runs, of about a minute each: eight minutes)

    float32   upstream's forward pass in plain PyTorch, everything in float32 but the embeddings' parameters: the reference
    recipe    the same in bfloat16 with the windows by FlexAttention, compiled
    ours      train.py as it is

All see the same batches of the prepared dataset in the same order, from the same initial weights, with train.py's optimizer and a constant
learning rate; but the rates of the residual lambdas are zero for the first 10 steps. At the start every block's output is zero, so that
their gradient is zero in exact arithmetic, and what Adam makes full steps of is the sign of rounding errors: two runs of one and the same
program part ways there by more than 0.1.

Training still amplifies what differs by a rounding: so the two in bfloat16 run twice with each seed, the second time from matrices of which
each element is another by some 10⁻⁵ of itself, a 400th of bfloat16's step. How far such twins part is how far two right programs may. The
float32 reference runs once, with the first seed, because it is slow.

Prints the largest difference of the smoothed losses (an exponential mean over some 20 steps) between the forms, between twins, and between
the means over all runs, and val_bpb after the last step with its spread; writes loss_curves.csv and loss_curves.png. Needs a GPU and a
dataset.

--runs N is the same question asked of whole runs of train.py, evaluation included: as it is, and compiled by torch alone, without this
project's kernels, in turns, with each seed. Their schedules go by steps instead of seconds and end after N, so that the faster form gains
nothing by its speed. Writes loss_runs.csv.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import train_step

import prepare
import train
from harness import machine
from harness import run as harness
from harness.data import dataset as chosen
from harness.data import ready

FORMS = ("float32", "recipe", "ours")


def smoothed(losses, keep=0.95):
    mean, result = 0.0, []
    for i, loss in enumerate(losses):
        mean = keep * mean + (1 - keep) * loss
        result.append(mean / (1 - keep ** (i + 1)))
    return result


def train_and_evaluate(form, seed, steps, tokenizer, device, twin=False):
    """(losses, val_bpb, seconds)."""
    started = time.time()
    ours = form == "ours"
    torch.backends.cuda.matmul.fp32_precision = "ieee" if form == "float32" else "tf32"
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    model = train.GPT(train.model_config(tokenizer.get_vocab_size())).to(device)
    torch.manual_seed(seed)
    model.init_weights()
    if twin:
        with torch.no_grad():
            for p in model.transformer.h.parameters():
                p.mul_(1 + 1e-5 * torch.randn_like(p))
    if ours:
        harness.compile_model(model, device)
        loss_of = model
    else:
        exact = form == "float32"
        loss_of = train_step.upstream(model, torch.float32 if exact else torch.bfloat16, "sdpa" if exact else "flex")
    optimizer = train.make_optimizer(model)
    loader = prepare.make_dataloader(tokenizer, train.DEVICE_BATCH_SIZE, train.MAX_SEQ_LEN, "train")
    micro_batches = train.TOTAL_BATCH_SIZE // (train.DEVICE_BATCH_SIZE * train.MAX_SEQ_LEN)
    precision = torch.autocast("cuda", enabled=False) if form == "float32" else machine.autocast(device)
    lambdas = [g for g in optimizer.param_groups if g["params"][0] is model.resid_lambdas or g["params"][0] is model.x0_lambdas]
    curve = []
    for step in range(steps):
        for group in lambdas:
            group["lr"] = 0.0 if step < 10 else group["initial_lr"]
        total = torch.zeros((), device=device)
        for _ in range(micro_batches):
            x, y, _ = next(loader)
            with precision:
                loss = loss_of(x, y)
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        optimizer.step()
        model.zero_grad(set_to_none=True)
        curve.append(total)
    with precision, torch.no_grad():
        val_bpb = prepare.evaluate_bpb(loss_of, tokenizer, train.DEVICE_BATCH_SIZE)
    return [loss.item() for loss in curve], val_bpb, time.time() - started


def edited(source, form, steps):
    """harness/run.py's source for runs of `steps` steps of the form."""
    edits = [("seconds += elapsed", f"seconds = TIME_BUDGET * (step + 1 - WARMUP_STEPS) / {steps - prepare.WARMUP_STEPS}")]
    if form == "recipe":
        edits += [("model.compile(backend=fusion, dynamic=False)", "model.compile(dynamic=False)")]
    for old, new in edits:
        if source.count(old) != 1:
            sys.exit(f"loss_curves.py: harness/run.py has {old!r} {source.count(old)} times; this benchmark needs it once")
        source = source.replace(old, new)
    return source


def whole_run(form, seed, steps):
    """The summary of a run of train.py, key by key."""
    root = HERE.parent
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(root / "train.py", folder)
        shutil.copytree(root / "harness", Path(folder, "harness"))
        Path(folder, "harness/run.py").write_text(edited((root / "harness/run.py").read_text(), form, steps))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        environment |= {"AUTORESEARCH_SEED": str(seed)}
        done = subprocess.run([sys.executable, Path(folder, "train.py")], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"loss_curves.py: {form} with seed {seed} ended with {done.returncode}: {done.stdout[-1000:]}")
    summary = done.stdout.split("\n---\n")[1]
    return {key: value.strip() for key, _, value in (line.partition(":") for line in summary.splitlines())}


def whole_runs(steps, seeds, out):
    keys = ("val_bpb", "num_steps", "peak_vram_mb", "eval_seconds", "total_seconds", "device", "torch")
    rows = []
    for seed in range(42, 42 + seeds):
        for form in ("recipe", "ours"):
            summary = whole_run(form, seed, steps)
            rows.append({"form": form, "seed": seed} | {key: summary[key] for key in keys})
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
            with open(out / "loss_runs.csv", "w", newline="") as f:
                writer = csv.DictWriter(f, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    for form in ("recipe", "ours"):
        summarize(form, [float(row["val_bpb"]) for row in rows if row["form"] == form])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--report", action="store_true", help="compare what earlier calls left in --out")
    parser.add_argument("--runs", type=int, metavar="N", help="whole runs of N steps")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    forms = args.forms.split(",")
    if args.steps < 1 or args.seeds < 1:
        parser.error(f"--steps {args.steps} --seeds {args.seeds}: use 1 or more")
    if args.runs is not None and args.runs <= prepare.WARMUP_STEPS:
        parser.error(f"--runs {args.runs}: a run's schedule begins after {prepare.WARMUP_STEPS} steps; use more, such as 700")
    if set(forms) - set(FORMS):
        parser.error(f"--forms {args.forms}: use some of {','.join(FORMS)}")
    if not os.access(args.out, os.W_OK) or not args.out.is_dir():
        parser.error(f"--out {args.out}: no folder that can be written")
    if args.report:
        return report(args.out)
    if not torch.cuda.is_available():
        sys.exit("loss_curves.py: needs a GPU that torch can use")
    try:
        ready.checked_dataset(chosen.DATASET)
    except prepare.DataError as e:
        sys.exit(f"loss_curves.py: {e}")
    if args.runs:
        return whole_runs(args.runs, args.seeds, args.out)
    device = torch.device("cuda")
    machine.keep_compiled()
    tokenizer = prepare.Tokenizer.from_directory()
    for form in forms:
        for seed in [42] if form == "float32" else range(42, 42 + args.seeds):
            for twin in (False,) if form == "float32" else (False, True):
                name = f"{form} {seed}{' twin' if twin else ''}"
                curve, val_bpb, seconds = train_and_evaluate(form, seed, args.steps, tokenizer, device, twin)
                print(f"{name}: smoothed loss {smoothed(curve)[-1]:.5f}, val_bpb {val_bpb:.6f}, {seconds:.0f} s", flush=True)
                (args.out / f"loss_curve {name}.json").write_text(json.dumps({"losses": curve, "val_bpb": val_bpb}))
    if set(forms) == set(FORMS):
        report(args.out)


def report(out):
    curves, smooth, bpb = {}, {}, {}  # by name: "ours 42", "ours 42 twin"
    paths = [path for form in FORMS for path in sorted(out.glob(f"loss_curve {form} *.json"))]
    if not paths:
        sys.exit(f"loss_curves.py: no 'loss_curve FORM SEED.json' of an earlier call in {out}")
    for path in paths:
        name = path.stem.removeprefix("loss_curve ")
        try:
            kept = json.loads(path.read_text())
            curves[name], bpb[name] = kept["losses"], kept["val_bpb"]
            smooth[name] = smoothed(curves[name])
        except (ValueError, KeyError, TypeError) as e:
            sys.exit(f"loss_curves.py: {path} is no result of an earlier call ({e}); remove it, or run that form again")
    names = list(curves)
    pairs = list(itertools.combinations((name for name in names if name.split()[1:] == ["42"]), 2))
    pairs += [(name, name + " twin") for name in names if name + " twin" in names]
    for a, b in pairs:
        differences = [abs(p - q) for p, q in zip(smooth[a], smooth[b])]
        within = sum(d <= 0.003 for d in differences) / len(differences)
        print(f"{a} and {b}: smoothed losses differ by {max(differences):.5f} at most, {statistics.mean(differences):.5f} in the mean, "
              f"{differences[-1]:.5f} at the end, in {within:.0%} of the steps by 0.003 or less; "
              f"val_bpb by {abs(bpb[a] - bpb[b]):.6f}")  # fmt: skip
    runs = {form: [name for name in names if name.split()[0] == form] for form in FORMS}
    if len(runs["recipe"]) > 1 and len(runs["ours"]) > 1:
        means = [[statistics.mean(at) for at in zip(*(smooth[name] for name in runs[form]))] for form in ("recipe", "ours")]
        differences = [b - a for a, b in zip(*means)]
        print(f"ours - recipe, means over {len(runs['ours'])} runs: smoothed losses differ by {max(map(abs, differences)):.5f} at most, "
              f"{statistics.mean(differences):+.5f} in the mean, {differences[-1]:+.5f} at the end")  # fmt: skip
    for form in FORMS:
        summarize(form, [bpb[name] for name in runs[form]])
    with open(out / "loss_curves.csv", "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["step", *names])
        most = max(len(curve) for curve in curves.values())
        writer.writerows([i, *(f"{c[i]:.6f}" if i < len(c) else "" for c in curves.values())] for i in range(most))
        writer.writerow(["val_bpb", *(f"{bpb[name]:.6f}" for name in names)])
    draw(smooth, names, out / "loss_curves.png")
    for path in paths:
        path.unlink()


def summarize(form, values):
    spread = f", deviation {statistics.stdev(values):.6f} over {len(values)} runs" if len(values) > 1 else ""
    if values:
        print(f"{form}: val_bpb {statistics.mean(values):.6f}{spread}")


def draw(smooth, names, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    colors = dict(float32="#000000", recipe="#0072B2", ours="#D55E00")
    for name in names:
        form = name.split()[0]
        axes[0].plot(smooth[name], color=colors[form], lw=1, label=form if name == f"{form} 42" else None)
        for other, color, label in (
            (f"{name} twin", "#999999", "twin − twin"),
            (name.replace("recipe", "ours"), colors["ours"], "ours − recipe"),
            (name.replace("float32", "ours"), "#000000", "ours − float32"),
        ):
            if other != name and other in names:
                difference = [a - b for a, b in zip(smooth[other], smooth[name])]
                axes[1].plot(difference, color=color, lw=1, label=label if label not in axes[1].get_legend_handles_labels()[1] else None)
    axes[0].set(xlabel="step", ylabel="smoothed loss, nats")
    axes[1].set(xlabel="step", ylabel="difference, nats")
    for axis in axes:
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

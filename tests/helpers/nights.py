"""Ledgers and runs to read back, in the form that experiment.py gives them, with numbers that are drawn."""

import datetime
import json
import random

HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
THOUGHTS = (
    "halve TOTAL_BATCH_SIZE", "EMBEDDING_LR 0.6 -> 0.9", "one layer more", "longer warmdown", "rotary base 200k", "$x_0$ & a \"",
    "SwiGLU instead of relu²", "weight decay on value embeddings and a description that goes on and on",
    "<b>softcap</b> 20", "smaller init",
)  # fmt: skip


def row(commit, val_bpb, memory, status, description):
    return f"{commit[:7]}\t{val_bpb:.6f}\t{memory:.1f}\t{status}\t{description}\n"


def outcome(number, commit, val_bpb=None, kind="try", description="", seed=42, started=0, total=700.0, state="valid", tag="nov29", **more):
    """One outcome.json: valid with a val_bpb, in the given state without. `started` in seconds after the first."""
    start = datetime.datetime(2026, 11, 29, 22, tzinfo=datetime.timezone.utc) + datetime.timedelta(seconds=started)
    training, evaluation = (600.0, 60.0) if state == "valid" else (total - 20.0, 0.0)
    summary = {
        "val_bpb": val_bpb,
        "peak_vram_mb": 6192.6,
        "mfu_percent": 35.9,
        "num_steps": 690,
        "tok_per_sec": 92000,
        "dataset": "climbmix",
    }
    return {
        "number": number, "tag": tag, "kind": kind, "description": description, "commit": commit, "parent": "0" * 40, "seed": seed,
        "started": start.isoformat(), "exit_code": 0 if state == "valid" else 1, "signal": None, "state": state,
        "seconds": {"startup": 20.0, "training": training, "evaluation": evaluation, "total": total}, "reason": None,
        "summary": summary | {"fingerprint": "b98a6de0d3d2"} if state == "valid" else None, "losses": [[0.5, 3.25], [1.0, 2.5]],
        "device": "Radeon 8060S", "versions": {"python": "3.12", "torch": "2.13.0"},
    } | more  # fmt: skip


def write_run(folder, outcome, diff="", log=""):
    run = folder / "runs" / str(outcome["number"])
    run.mkdir(parents=True)
    (run / "outcome.json").write_text(json.dumps(outcome))
    (run / "change.diff").write_text(diff)
    (run / "run.log").write_text(log)


def write_night(folder, count, runs=True, seed=0):
    """`count` experiments in `folder`: a baseline, two repeats of it, then tries, of which some crash and fewer and fewer are kept."""
    draw, lines, best, first = random.Random(seed), [HEADER], 1.2, None
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        commit, kind, status, description, state = f"{draw.getrandbits(160):040x}", "try", "discard", draw.choice(THOUGHTS), "valid"
        val_bpb = best + abs(draw.gauss(0, 0.006)) - (0.12 * (best - 0.9) * draw.random() if draw.random() < 0.25 else 0)
        if number == 1:
            kind, status, description, val_bpb, first = "baseline", "keep", "baseline", best, commit
        elif number in (2, 3):
            kind, commit, description, val_bpb = "noise", first, f"noise: seed {41 + number} of {first[:7]}", best + draw.gauss(0, 0.001)
        elif draw.random() < 0.08:
            status, val_bpb, state = "crash", 0.0, "crash"
        elif draw.random() < 0.04:
            val_bpb += 1
        if kind == "try" and 0 < val_bpb < best:
            status, best = "keep", val_bpb
        lines.append(row(commit, val_bpb, 0.0 if status == "crash" else 6 + 4 * draw.random(), status, description))
        if runs:
            seed = 41 + number if kind == "noise" else 42
            made = outcome(number, commit, round(val_bpb, 6), kind, description, seed, 720 * number, state=state)
            write_run(
                folder,
                made,
                f"--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-DEPTH = 8\n+DEPTH = {number}  # </pre><script>\n",
                "---\nval_bpb: 1\n",
            )
    (folder / "results.tsv").write_text("".join(lines), encoding="utf-8")
    return folder / "results.tsv"

"""How long does the review of a long series take? `results.py` as experiment.py calls it, from the start of Python to the written picture.

    python benchmarks/results.py [--rows 10000] [--rounds 5] [--out DIR]

It writes a ledger of drawn rows to a temporary folder, without and with an outcome.json for each of them, and prints the medians over the
rounds, in seconds of the clock and of a core. It writes results.csv (--out).
"""

import argparse
import csv
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def write_series(folder, count):
    """results.tsv and runs/ of `count` experiments; each outcome holds 200 points of its loss, as experiment.py's do."""
    draw, best = random.Random(0), 1.2
    losses = [[i / 200, round(9 * (i + 1) ** -0.2, 6)] for i in range(200)]
    with open(folder / "results.tsv", "w") as ledger:
        ledger.write("commit\tval_bpb\tmemory_gb\tstatus\tdescription\n")
        for number in range(1, count + 1):
            commit, val_bpb = f"{draw.getrandbits(160):040x}", best + draw.gauss(0.004, 0.003)
            status = "keep" if number == 1 or val_bpb < best else "crash" if draw.random() < 0.08 else "discard"
            best = min(best, val_bpb) if status == "keep" else best
            ledger.write(f"{commit[:7]}\t{0 if status == 'crash' else val_bpb:.6f}\t6.1\t{status}\tidea number {number}, in a few words\n")
            run = folder / "runs" / str(number)
            run.mkdir(parents=True)
            summary = {
                "val_bpb": round(val_bpb, 6),
                "mfu_percent": 35.9,
                "tok_per_sec": 92000,
                "num_steps": 690,
                "fingerprint": "b98a6de0d3d2",
            }
            seconds = {"startup": 20.0, "training": 600.0, "evaluation": 60.0, "total": 700.0}
            outcome = {
                "number": number,
                "tag": "nov29",
                "kind": "try",
                "commit": commit,
                "seed": 42,
                "started": "2026-11-29T22:00:00+00:00",
            }
            outcome |= {"seconds": seconds, "state": "valid", "summary": summary, "losses": losses, "device": "Radeon 8060S"}
            (run / "outcome.json").write_text(json.dumps(outcome))


def seconds(ledger):
    """(by the clock, of processor time) of one call."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(HERE.parent / "results.py"), str(ledger)], check=True, stdout=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with_runs, without = Path(folder, "with"), Path(folder, "without")
        with_runs.mkdir()
        without.mkdir()
        write_series(with_runs, args.rows)
        os.link(with_runs / "results.tsv", without / "results.tsv")
        folders = {"no": without, "yes": with_runs}
        times = [[seconds(folder / "results.tsv") for folder in folders.values()] for _ in range(args.rounds)]  # in turns
    medians = {runs: [f"{statistics.median(values):.2f}" for values in zip(*column)] for runs, column in zip(folders, zip(*times))}
    print(f"results.py, Python {platform.python_version()}, medians of {args.rounds} rounds")
    with open(args.out / "results.csv", "w", newline="") as f:
        csv.writer(f).writerows([("rows", "runs", "seconds", "cpu_seconds"), *((args.rows, runs, *both) for runs, both in medians.items())])
    for runs, (clock, cpu) in medians.items():
        print(f"{args.rows:,} rows, {'with' if runs == 'yes' else 'without'} runs/: {clock} s, {cpu} s of a core")


if __name__ == "__main__":
    main()

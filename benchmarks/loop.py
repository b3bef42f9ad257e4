"""Does the loop stay as it is over a long series? Many experiments with a stand-in for train.py, some of them killed.

    python benchmarks/loop.py [--experiments 1000] [--kill 0.1] [--out DIR]

Each turn is a real one (commit, worktree, supervisor, ledger) through the command line, with a train.py that takes 50 ms; a third or
more are better than the best, others worse, and some crash. With --kill this share of the turns has its caller or its supervisor killed
(SIGKILL) at a random moment, and is tried again if it was not recorded. Prints, for each tenth of the series: experiments so far, the
median seconds of an undisturbed turn and the characters that it prints, the seconds of `status` and its lines, and how many turns were
disturbed. Checks at the end that the ledger holds every idea once and in order, that branch, train.py and git are as the ledger says, and
that nothing is left behind. Writes loop.csv (--out).
"""

import argparse
import contextlib
import csv
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "helpers")]
from checkout import Checkout

from loop.files import read_bytes
from loop.processes import processes


def kill_supervisor(checkout):
    mark = f"{checkout.folder / 'experiment.py'}\0_supervise".encode()
    for process in processes():
        if mark in (read_bytes(f"/proc/{process['pid']}/cmdline") or b""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process["pid"], signal.SIGKILL)


def turn(checkout, idea, chance):
    """One experiment, to its row; returns (seconds, characters printed), None where it was disturbed."""
    start = time.perf_counter()
    process = checkout.start("try", idea)
    disturbed = random.random() < chance
    if disturbed:
        time.sleep(random.random() * 0.5)
        if random.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            kill_supervisor(checkout)
    output = process.communicate()[0]
    seconds = time.perf_counter() - start
    if disturbed:
        output += checkout.call("wait", code=None)
        if checkout.rows[-1][4] != idea:  # it was not judged, and is untouched
            output += checkout.call("try", idea, code=None)
    assert checkout.rows[-1][4] == idea, output
    return None if disturbed else (seconds, len(output))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--kill", type=float, default=0.1, metavar="SHARE", help="of the turns to disturb (default: 0.1)")
    parser.add_argument("--out", default=HERE, type=Path)
    arguments = parser.parse_args()
    random.seed(0)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder) / "project").make()
        checkout.call("begin", "long")
        best, expected, turns, disturbed = 2.0, [], [], 0
        for i in range(1, arguments.experiments + 1):
            kind = random.choice(("better", "worse", "worse", "crash") if i % 3 else ("better",))
            value = best - 0.0001 if kind == "better" else best + random.random()
            checkout.edit("raise ValueError('boom')" if kind == "crash" else "", VALUE=round(value, 6), STEPS=1000 + 10 * i)
            measured = turn(checkout, f"idea {i}", arguments.kill)
            disturbed += measured is None
            turns += [measured] if measured else []
            expected.append((f"idea {i}", {"better": "keep", "worse": "discard", "crash": "crash"}[kind]))
            best = round(value, 6) if kind == "better" else best
            if i % max(1, arguments.experiments // 10) == 0:
                start = time.perf_counter()
                status = checkout.call("status")
                seconds, length = (statistics.median(column) for column in zip(*turns))
                table.append(
                    (i, f"{seconds:.3f}", round(length), f"{time.perf_counter() - start:.3f}", len(status.splitlines()), disturbed)
                )
                print(*table[-1], sep="\t", flush=True)
                turns, disturbed = [], 0
        found = [(row[4], row[3]) for row in checkout.rows[1:]]
        assert found == expected, "the ledger is not what happened"
        assert not list(checkout.folder.glob(".git/worktrees/*")) and not list(checkout.folder.glob("runs/new*"))
        assert checkout.best_value() == best and checkout.is_clean() and os.listdir(checkout.folder / "worktrees") == []
        assert not [p for p in processes() if f"{folder}".encode() in (read_bytes(f"/proc/{p['pid']}/cmdline") or b"")]
    with open(arguments.out / "loop.csv", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(("experiments", "turn_seconds", "turn_characters", "status_seconds", "status_lines", "disturbed"))
        writer.writerows(table)
    print(f"{len(expected)} experiments, all recorded once and rightly; Python {platform.python_version()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

"""How often would `experiment.py try --prune` have been wrong? From the loss curves and scores of runs that went to their end.

    python benchmarks/prune.py [RUNS...]        # folders like runs/ (default: this checkout's); their valid runs are compared by series

Every run is taken once as the best and every other of its series once as what is tried: would it have been stopped, at which progress, and
would it have been better than the best in the end? Only the last is a mistake. Prints one line a rule: the one in use first, then others.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from loop.files import RUNS
from loop.run import PRUNE_COUNT, PRUNE_FROM, PRUNE_RATIO, at_progress


def stopped_at(losses, reference, start, ratio, count):
    """The progress at which a run with these losses would be stopped, None if it would not."""
    worse = 0
    for progress, loss in losses:
        best = at_progress(reference, progress)
        worse = worse + 1 if best and progress >= start and loss > best * ratio else 0
        if worse >= count:
            return progress
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, default=[Path(RUNS)])
    series = {}
    for folder in parser.parse_args().runs:
        for path in folder.glob("*/outcome.json"):
            outcome = json.loads(path.read_text())
            if outcome["state"] == "valid" and len(outcome["losses"]) >= 5:
                series.setdefault((folder, outcome["tag"]), []).append(outcome)
    pairs = [pair for outcomes in series.values() for pair in itertools.permutations(outcomes, 2)]
    if not pairs:
        sys.exit("no two valid runs of one series with loss curves: name folders that hold N/outcome.json")
    better = sum(b["summary"]["val_bpb"] < a["summary"]["val_bpb"] for a, b in pairs)
    print(f"{sum(map(len, series.values()))} runs, {len(pairs)} pairs; in {better} what is tried is better than the best in the end")
    print("from\tratio\tin a row\tstopped of the worse\tmean progress\tstopped of the better")
    used = (PRUNE_FROM, PRUNE_RATIO, PRUNE_COUNT)
    for rule in [used, (0.3, 1.01, 3), (0.3, 1.02, 3), (0.3, 1.05, 3), (0.5, 1.02, 3), (0.5, 1.03, 3)]:
        right, wrong = [], []
        for best, run in pairs:
            at = stopped_at(run["losses"], best["losses"], *rule)
            if at is not None:
                (wrong if run["summary"]["val_bpb"] < best["summary"]["val_bpb"] else right).append(at)
        mean = f"{sum(right) / len(right):.2f}" if right else "-"
        print(*rule, f"{len(right)} of {len(pairs) - better}", mean, f"{len(wrong)} of {better}", sep="\t")


if __name__ == "__main__":
    main()

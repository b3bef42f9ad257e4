"""Where a series stands, as data and on the screen."""

import collections
import contextlib
import json
import math
import os
import statistics
import time

from .files import last_number, read_turn, run_file, seconds_text, stop_requested
from .ledger import Series, is_noise, score
from .processes import state_lock
from .ready import NO_SERIES
from .recovery import recover
from .remote import cluster
from .repository import current_tag
from .verdict import UNEVEN, compared
from .waiting import progress_of


def command_status(arguments):
    with state_lock():
        running = recover(lenient=True)
    tag = current_tag()
    if tag is None:
        print(json.dumps({"tag": None}) if arguments.json else NO_SERIES)
        return 0
    status = describe(Series(tag), running)
    if arguments.json:
        print(json.dumps(status, indent=1))
        return 0
    best, baseline, noise = status["best"], status["baseline"], status["noise"]
    count = status["experiments"]
    print(f"series {tag}: the baseline and {count} experiment{'s' * (count != 1)}: {status['keeps']} kept, {status['crashes']} crashed")
    for turn in status["running"][:8]:
        print(f"running: run {turn['number']} ({turn['progress']}): {turn['description']}")
    if len(running) > 8:
        print(f"running: and {len(running) - 8} more (--json)")
    if status["cluster"]:
        print("\n".join(cluster.lines(status["cluster"])))
    if not running:
        print("running: nothing" + ("; the human has asked to stop: end the loop" if status["stop_requested"] else ""))
    if best:
        difference = round(best["val_bpb"] - baseline["val_bpb"], 6)
        gain = f", {compared(difference)} the baseline {baseline['val_bpb']:.6f}" if best["commit"] != baseline["commit"] else ""
        print(f"best: {best['val_bpb']:.6f} {best['commit']} run {best['run']}: {best['description'][:80]}{gain}")
        if status["best_runs"]:
            print(f"the best's {status['best_runs']['runs']} runs: mean {status['best_runs']['mean']:.6f}")
        if status["bar"] < best["val_bpb"]:
            print(f"to beat: {status['bar']:.6f}, the lowest so far (the best is a simplification of it)")
    if noise:
        print(f"noise floor: {noise['floor']:.6f} ({noise['seeds']} seeds, mean {noise['mean']:.6f})")
        if noise["uneven"]:
            print(f"warning: {UNEVEN.format(100 * noise['uneven'])}")
    elif best:
        print("noise floor: not measured; experiment.py noise 3")
    took = status["seconds_per_experiment"]
    each = f"; {seconds_text(took)} each, {status['finished_last_hour']} in the last hour" if took else ""
    print(f"experiments since the last keep: {status['since_last_keep']}{each}")
    if status["tried"]:
        print("tried, by what changed (tries, kept, gain of the best one over the best of then):")
        for name, group in list(status["tried"].items())[:12]:
            difference = f"{-group['best']:+.6f}" if group["best"] is not None else "no result"
            print(
                f"  {name[:40]}: {group['tries']}, {group['keeps']} kept, {difference}"
                + (f", {group['crashes']} crashed" * bool(group["crashes"]))
            )
        if len(status["tried"]) > 12:
            print(f"  and {len(status['tried']) - 12} more (--json)")
    print("last ten (run, val_bpb, status):")
    for row in status["recent"]:
        print(f"  {row['run']} {row['val_bpb']:.6f} {row['status']} {row['description'][:100]}")
    return 0


def describe(series, running):
    """Everything that `status` says, as data."""
    rows = series.rows
    trials = [row for row in rows if not is_noise(row)]
    since = next((i for i, row in enumerate(reversed(trials)) if row["status"] == "keep"), len(trials))
    groups = collections.defaultdict(lambda: {"tries": 0, "keeps": 0, "crashes": 0, "best": None})
    changed = {line["number"]: line["changed"] for line in series.tried}
    bar = None
    for row in trials:
        for name in changed.get(series.number(row)) or []:
            group = groups[name]
            group["tries"] += 1
            group["keeps"] += row["status"] == "keep"
            group["crashes"] += row["status"] == "crash"
            if score(row) and bar:
                group["best"] = min(score(row) - bar, group["best"] if group["best"] is not None else math.inf)
        if row["status"] == "keep" and score(row):
            bar = min(score(row), bar or math.inf)
    recent = [{"run": series.number(row)} | row for row in rows[-10:]]
    took = [t for t in ((series.outcome(row).get("seconds") or {}).get("total") for row in rows[-20:]) if t]
    baselines = {line["number"] for line in series.tried if line["kind"] == "baseline"}
    attempts = [row for row in trials if row is not series.baseline and series.number(row) not in baselines]
    crashes = sum(row["status"] == "crash" for row in attempts)
    under_way = [{"number": t["number"], "description": t["description"], "progress": progress_of(t["number"])} for t in running]
    last = read_turn(last_number())
    address = next((turn["on"] for turn in [*running, last] if turn and turn.get("on")), None)
    noise = series.noise and dict(zip(("mean", "floor", "seeds"), series.noise)) | {"uneven": series.uneven_noise()}
    return {
        "tag": series.tag,
        "running": under_way,
        "cluster": cluster.describe(address, [turn for turn in running if turn["on"] == address]) if address else None,
        "finished_last_hour": finished_lately(series),
        "stop_requested": stop_requested(),
        "best": series.best and {"run": series.number(series.best)} | series.best,
        "bar": series.bar,
        "baseline": series.baseline,
        "noise": noise,
        "best_runs": (mean := series.best_mean()) and dict(zip(("mean", "runs"), mean)),
        "experiments": len(attempts),  # the baseline is none
        "keeps": sum(row["status"] == "keep" for row in attempts),
        "crashes": crashes,
        "since_last_keep": since,
        "seconds_per_experiment": statistics.median(took) if took else None,
        "tried": dict(sorted(groups.items(), key=lambda item: -item[1]["tries"])),
        "recent": recent,
    }


def finished_lately(series):
    """How many runs of the series ended in the last hour with a row: neither stopped nor the machine's fault."""
    recorded = {series.number(row) for row in series.rows}
    count, now = 0, time.time()
    for line in reversed(series.tried):
        with contextlib.suppress(FileNotFoundError):  # it is under way
            if now - os.stat(run_file(line["number"], "outcome.json")).st_mtime > 3600:
                break
            count += line["number"] in recorded
    return count

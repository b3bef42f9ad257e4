"""What runs/ says: the outcome of each run, checked, and joined to its row of the ledger."""

import json
import math
import os
import re
from collections import defaultdict

import pandas as pd

from harness.common.files import read_bytes

LOSSES = re.compile(rb'"losses"\s*:\s*\[\s*\[[^"]*\]\s*\]')  # most of an outcome.json, and not read here
NUMBER = (int, float)
TYPES = {  # of what is read here; null only where experiment.py writes it
    **dict.fromkeys(("tag", "kind", "commit", "state", "started"), (str,)),
    **dict.fromkeys(("reason", "device"), (str, type(None))),
    **dict.fromkeys(("number", "seed"), (int,)),
    "seconds": (dict,),
    "summary": (dict, type(None)),
}


def read_outcomes(folder):
    """(outcomes in the order of their runs, how many could not be read). A run without outcome.json is still going on."""
    outcomes, unreadable = [], 0
    names = os.listdir(folder) if folder.is_dir() else []
    for name in sorted((name for name in names if re.fullmatch(r"[0-9]{1,9}", name)), key=int):
        try:
            outcome = checked(json.loads(LOSSES.sub(b'"losses":[]', read_bytes(f"{folder}/{name}/outcome.json"))))
            outcomes.append(outcome | {"number": int(name), "folder": f"{folder}/{name}"})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, RecursionError):
            unreadable += 1
    return outcomes, unreadable


def checked(outcome):
    """The outcome; TypeError or ValueError where it says something that experiment.py does not write. Anything may be missing."""
    check_types({"outcome": outcome}, {"outcome": (dict,)})
    check_types(outcome, TYPES)
    seconds, summary = outcome.get("seconds", {}), outcome.get("summary") or {}
    check_types(seconds, dict.fromkeys(seconds, NUMBER))
    check_types(summary, dict.fromkeys(summary, (*NUMBER, str)))  # a model's "n/a", a crash's "nan"
    if outcome.get("state") == "valid":
        check_types(summary, {"val_bpb": NUMBER})
    return outcome


def check_types(values, types):
    for name, value in values.items():
        if name in types and type(value) not in types[name]:
            raise TypeError(f"{name}: {value!r}")
        if type(value) is str:
            value.encode()  # UnicodeEncodeError, a ValueError: a half character, which no file takes


def join(rows, outcomes):
    """Give each row its run: the same commit and kind, of those the one with its number, of those the latest; none twice.

    Returns the other runs of the series.
    """
    by_commit = defaultdict(list)
    for outcome in reversed(outcomes):  # the latest first
        if outcome.get("state") not in ("environment", "stopped"):  # those have no row
            by_commit[outcome.get("commit", "")[:7].lower()].append(outcome)
    taken, tags = set(), set()
    for row in reversed(rows):
        waiting = by_commit[row["commit"][:7]] if len(row["commit"]) >= 7 else []
        same = [outcome for outcome in waiting if belongs(row, outcome)]
        equal = [outcome for outcome in same if abs(section(outcome, "summary", "val_bpb") - row["val_bpb"]) < 1e-6]
        row["run"] = next(iter(equal or same), None)
        if row["run"]:
            waiting.remove(row["run"])
            taken.add(row["run"]["folder"])
            tags.add(row["run"].get("tag"))
    return [outcome for outcome in outcomes if outcome["folder"] not in taken and outcome.get("tag") in tags]


def belongs(row, outcome):
    noise = row["kind"] == "noise"
    if noise != (outcome.get("kind") == "noise") or noise and outcome.get("seed") != row["seed"]:
        return False
    return outcome.get("commit", "").lower().startswith(row["commit"])


def as_number(value):
    """float(value) if that is a number that something here can have, otherwise NaN."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if abs(value) < 1e15 else math.nan  # which sums, squares and axes bear


def section(outcome, name, key):
    """outcome[name][key] as a number, NaN where anything of it is missing."""
    return as_number((outcome.get(name) or {}).get(key))


def timestamps(texts):
    return pd.to_datetime(pd.Series(list(texts), dtype=str), errors="coerce", utc=True, format="ISO8601")


GPU = ("gpu_clock_mhz_mean", "gpu_clock_mhz_min", "gpu_temp_c_max", "gpu_watts_mean")  # of the summary, where telemetry.py could read it


def facts(run):
    """What a row takes over from its run, empty where there is none."""
    run = run or {}
    summary = run.get("summary") or {}
    return {
        **{name: run.get(name) or "" for name in ("tag", "state", "reason", "started")},
        **{name: section(run, "seconds", name) for name in ("startup", "training", "evaluation", "total")},
        **{name: section(run, "summary", name) for name in ("num_steps", "mfu_percent", "tok_per_sec", *GPU)},
        **{name: str(summary.get(name, "")) for name in ("dataset", "fingerprint", "gpu_throttled")},
        "device": run.get("device") or str(summary.get("device", "")),
    }


def read_text(path, size):
    """The first `size` bytes of a file, the last where size is negative, as whole lines, and how much is left out; "" without a file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:  # of a pipe in its place seeking fails, and nothing waits
            left = f.seek(0, os.SEEK_END) - abs(size)
            f.seek(left if size < 0 and left > 0 else 0)
            text = f.read(abs(size)).decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    except OSError:
        return ""
    if left <= 0:
        return text
    note = f"… {left:,} bytes more in {os.path.basename(path)}"
    return f"{note}\n{text.partition(chr(10))[2]}" if size < 0 else f"{text.rpartition(chr(10))[0]}\n{note}"

"""The night in numbers: what it gained, how much of that luck would gain, what kinds of idea paid, where the time went. And as JSON."""

import functools
import json
import math
import os
import re
from collections import Counter

import numpy as np
import pandas as pd

from .runs import read_text, section, timestamps

STATUSES = ("keep", "discard", "crash")
PLATEAU = 20  # tries without a keep


def is_kept(rows):
    return rows["valid"] & (rows["status"] == "keep")


def baseline(night):
    """The result that the night is measured against; None without a result."""
    rows = night.valid[night.valid["kind"] == "baseline"]
    return rows.iloc[0] if len(rows) else None


def best(night):
    """The best kept row, where nothing was kept the best result; None without a result."""
    rows = night.kept if len(night.kept) else night.valid[night.valid["kind"] != "noise"]
    return rows.loc[rows["val_bpb"].idxmin()] if len(rows) else None


def tried(night):
    """The rows that tried an idea: neither a baseline nor a repeat with another seed."""
    return night.rows[night.rows["kind"] == "try"]


def noise_floor(night):
    """(standard deviation of val_bpb over the seeds of the commit that was repeated last, its runs); (NaN, 0) before a repeat."""
    commit, noise = night.valid["commit"].str[:7], night.valid["kind"] == "noise"
    for repeated in commit[noise][::-1].unique():
        values = night.valid["val_bpb"][commit == repeated]
        if len(values) > 1:
            return float(values.std()), len(values)
    return math.nan, 0


@functools.cache
def luck(n):
    """What n tries that change nothing are expected to gain, in noise floors: the mean of the best of n + 1 normal draws.

    (The best so far is a draw too, the one that they must beat.)
    """
    x = np.linspace(-8, 8, 4001)
    below = np.array([math.erf(value) for value in x / math.sqrt(2)]) / 2 + 0.5
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below ** (n + 1))))


# The first match in a description says what kind of idea it was; where there is none, the lines that the change touched are asked.
IDEAS = {
    "batch": r"batch|accum",
    "schedule": r"warm[ _-]?(up|down)|schedul|anneal|cosine|cool[ -]?down|final[ _]?lr",
    "regularisation": r"weight.?decay|\bwd\b|dropout|z.?loss|smoothing",
    "learning rate": r"\blrs?\b|_lr|learning.rate",
    "optimizer": r"muon|adam|momentum|\bbetas?\b|newton|polar|sgd|lion|nesterov|clip|cautious",
    "attention": r"attention|attn|window|heads?\b|head.dim|\bkv|gqa|mqa|rope|rotary|qk|\b[sl]{3,}\b",
    "size": r"depth|deep|shallow|layer|width|wide|narrow|n_embd|aspect|param|bigger|larger|smaller model",
    "embeddings and output": r"embed|lm_head|\btied?\b|soft.?cap|logit|vocab",
    "MLP": r"relu|gelu|silu|glu|mlp|activation",
    "normalisation": r"norm",
    "initialisation": r"init",
    "residual stream": r"resid|skip|lambda|x0",
    "speed": r"compile|bf16|fp8|float|fuse|kernel|precision",
}


def idea(row):
    def first(text):
        return next((kind for kind, pattern in IDEAS.items() if re.search(pattern, text, re.I)), None)

    kind = first(row["description"])
    if not kind and row["run"]:
        changed = re.findall(r"^[+-](?![+-]).*", read_text(f"{row['run']['folder']}/change.diff", 20_000), re.M)
        kind = first("\n".join(changed))
    return kind or "other"


def ideas(night):
    """A line for each kind of idea, the most fruitful first: tries, keep, crash, rate of keeps, gain in all, best single gain."""
    rows = tried(night)
    kinds = [idea(row) for row in records(rows[["description", "run"]])]
    rows = rows.assign(idea=kinds, keep=is_kept(rows), crash=rows["status"] == "crash", gain=rows["gain"].clip(lower=0))
    columns = {"tries": ("number", "size"), "keep": ("keep", "sum"), "crash": ("crash", "sum"), "rate": ("keep", "mean")}
    table = rows.groupby("idea").agg(**columns, gain=("gain", "sum"), best=("gain", "max"))
    return table.sort_values(["gain", "keep", "tries"], ascending=[False, False, True], kind="stable").reset_index()


def keeps(night):
    """A line for each keep: what it is, its gain, the same in noise floors, and what luck would gain in as many tries."""
    floor, _ = noise_floor(night)
    floor = floor or math.nan
    expected = [floor * luck(int(n)) for n in night.kept["tries"]]
    kept = night.kept.assign(floors=night.kept["gain"] / floor, luck=expected)
    kept.loc[kept["gain"].isna(), "luck"] = math.nan
    return kept[["number", "commit", "val_bpb", "gain", "floors", "luck", "memory_gb", "description"]]


def pareto(night):
    """The results that no other one beats in both memory and val_bpb, from the smallest memory on."""
    rows = night.valid[night.valid["memory_gb"] > 0].sort_values(["memory_gb", "val_bpb"], kind="stable")
    return rows[rows["val_bpb"] < rows["val_bpb"].cummin().shift(fill_value=math.inf)]


def hours(night):
    """Where the time went, in hours: startup, training, evaluation, other (within the runs), between (them; 0 where they overlap).

    wall is all from the first start to the last end, lost what runs without a result took, runs their number. None if no run has its times.
    """
    runs = [run for run in [*night.rows["run"], *night.without_row] if run and section(run, "seconds", "total") > 0]
    if not runs:
        return None
    names = ("startup", "training", "evaluation", "total")
    seconds = {name: np.clip([section(run, "seconds", name) for run in runs], 0, None) for name in names}
    started = timestamps(run.get("started", "") for run in runs)
    wall = (started + pd.to_timedelta(seconds["total"], unit="s", errors="coerce")).max() - started.min()
    parts = {name: float(np.nansum(values) / 3600) for name, values in seconds.items()}
    inside = parts.pop("total")
    wall = wall.total_seconds() / 3600 if wall.total_seconds() > 0 else inside
    lost = seconds["total"][[run.get("state") != "valid" for run in runs]].sum() / 3600
    rest = {"other": max(0.0, inside - sum(parts.values())), "between": max(0.0, wall - inside)}
    return parts | rest | {"wall": wall, "lost": float(lost), "runs": len(runs)}


def summarize(night):
    """Everything that is computed, of Python's own types; None where it is not known."""
    rows, tries, start, top = night.rows, tried(night), baseline(night), best(night)
    floor, noise_runs = noise_floor(night)
    gain = start["val_bpb"] - top["val_bpb"] if top is not None else math.nan
    time = hours(night)
    counts = {status: int((rows["status"] == status).sum()) for status in STATUSES}
    since = int((tries["number"] > (night.kept["number"].max() if len(night.kept) else 0)).sum())
    known = {
        "name": night.name,
        "ledger": str(night.path),
        "rows": len(rows),
        "results": len(night.valid),
        "tries": len(tries),
        "repeats": int((rows["kind"] == "noise").sum()),
        **counts,
        "other_status": len(rows) - sum(counts.values()),
        "keep_rate": is_kept(tries).mean() if len(tries) else None,
        "crash_rate": (tries["status"] == "crash").mean() if len(tries) else None,
        "odd": dict(night.odd),
        "without_row": dict(Counter(str(run.get("state")) for run in night.without_row)),
        **{f"{name}s": sorted({text for text in rows[name] if text}) for name in ("device", "dataset", "fingerprint")},
        "baseline": short(start),
        "best": short(top),
        "gain": gain,
        "noise_floor": floor,
        "noise_runs": noise_runs,
        "gain_in_noise_floors": gain / (floor or math.nan),
        "luck": floor * luck(len(tries)),
        "tries_since_keep": since,
        "plateau": since >= PLATEAU,
        "hours": time,
        "experiments_per_hour": time["runs"] / time["wall"] if time else None,
        "throttled": [int(number) for number in rows["number"][rows["gpu_throttled"] != ""]],
        "keeps": records(keeps(night)),
        "ideas": records(ideas(night)),
        "pareto": [short(row) for row in records(pareto(night))],
    }
    return plain(known)


def short(row):
    return None if row is None else {name: row[name] for name in ("number", "commit", "val_bpb", "memory_gb", "description")}


def records(frame):
    return frame.to_dict("records")


def plain(value):
    """The same of Python's own types, with None for NaN, so that every JSON reader takes it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(night):
    """The summary and every row, as text."""
    rows = night.rows.assign(run=[run and os.path.basename(run["folder"]) for run in night.rows["run"]])
    everything = night.summary | {"experiments": plain(records(rows.astype(object)))}
    return json.dumps(everything, ensure_ascii=False, allow_nan=False, indent=1)

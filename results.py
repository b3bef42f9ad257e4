"""
The morning after: what results.tsv and runs/ say, in words, as a picture, as a page, and for machines.

    python results.py [LEDGER]            # write progress.png beside the ledger, print one line
    python results.py [LEDGER] --page     # write results.html: analysis.ipynb, executed, without code
    python results.py [LEDGER] --json     # print everything, write nothing

LEDGER is any autoresearch's results.tsv, with or without runs/ beside it; the default is AUTORESEARCH_RESULTS,
then this folder's results.tsv.

In this order: read, statistics, words, tables, pictures, comparison, files. The notebook calls the same functions.
"""

import argparse
import functools
import html
import io
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError as e:
    if __name__ != "__main__":
        raise
    sys.exit(f"results.py: this Python has no {e.name}: venv/bin/python results.py, or `. ./env.sh` first (./run.sh makes venv/)")
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from harness.common.files import replace_file

HERE = Path(__file__).resolve().parent
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description"]
STATUSES = ("keep", "discard", "crash")
HIGHEST = 16.0  # bits per byte: guessing a byte evenly costs 8; a number above this, or not above 0, is no result
PLATEAU = 20  # tries without a keep

# ---------------------------------------------------------------------------
# Read
# ---------------------------------------------------------------------------


@dataclass(eq=False)
class Night:
    """A ledger read back. `rows` has a line for each of its rows, none left out; what is odd about them is counted in `odd`."""

    path: Path
    rows: pd.DataFrame
    without_row: list  # outcomes of this series' runs that are not in the ledger: the machine's fault, or stopped
    odd: Counter

    @functools.cached_property
    def valid(self):
        """Rows with a result: kept or discarded, and a number that can be one."""
        return self.rows[self.rows["valid"]]

    @functools.cached_property
    def kept(self):
        return self.rows[is_kept(self.rows)]

    @functools.cached_property
    def summary(self):
        return summarize(self)

    @property
    def name(self):
        """The series' tag, or what the ledger's place says."""
        tags = [tag for tag in self.rows["tag"] if tag]
        return tags[-1] if tags else self.path.resolve().parent.name if self.path.stem == "results" else self.path.stem


def read(path=None):
    """The Night in a results.tsv (or in the folder that holds one), joined to runs/ beside it. No file is a night without experiments."""
    path = Path(os.path.expanduser(path or os.environ.get("AUTORESEARCH_RESULTS") or HERE / "results.tsv"))
    if path.is_dir():
        path = path / "results.tsv"
    rows = [parse_row(fields, columns) for fields, columns in ledger_lines(path)]
    folder = path.absolute().parent
    if folder.name == "runs" and not (folder / "runs").is_dir():  # the ledger of an earlier series, set aside
        folder = folder.parent
    outcomes, unreadable = read_outcomes(folder / "runs")
    without_row = join(rows, outcomes)
    for row, number in zip(rows, numbers(rows)):
        row |= {"number": number} | facts(row["run"])
        if row["state"] == "pruned" or row["description"].startswith("pruned:"):  # stopped early on purpose: no number is right
            row["odd"] = ""
    name_baseline(rows)
    odd = Counter(row["odd"] for row in rows if row["odd"]) + Counter({"outcome.json that can't be read": unreadable})
    return Night(path, with_progress(as_frame(rows)), without_row, odd)


def ledger_lines(path):
    """(fields, columns) of every row. Quotes are text, tabs after the last column are part of it, headers are no rows."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    columns = COLUMNS
    for line in decoded(data).split("\n"):  # splitlines() would also cut at a form feed or U+2028
        line = line.strip("\r\ufeff")
        names = [name.strip().lower() for name in line.split("\t")]
        if names[0] == "commit" and "val_bpb" in names:
            columns = names
        elif line.strip():
            yield line.split("\t", len(columns) - 1), columns


def decoded(data):
    """A ledger's text: UTF-8, or UTF-16 as Windows' PowerShell saves it, with or without its mark; then UTF-8 in what was appended."""
    if data[:2] not in (b"\xff\xfe", b"\xfe\xff") and 0 not in data[:2]:
        return data.decode("utf-8-sig", errors="replace")
    little = data[:2] == b"\xff\xfe" or data[1:2] == b"\0"
    end = data.rfind(b"\0") + (1 if little else 2)  # after the last line break: UTF-8 has no NUL
    if b"\t" not in data[end:]:
        end = len(data)
    return data[:end].decode("utf-16-le" if little else "utf-16-be", errors="replace") + data[end:].decode(errors="replace")


def parse_row(fields, columns):
    row = dict.fromkeys(COLUMNS, "") | dict(zip(columns, fields))
    row = {name: re.sub(r"[\x00-\x1f\x7f]+", " ", row[name]).strip() for name in COLUMNS}
    row["commit"], row["status"] = row["commit"].lower(), row["status"].lower()
    row["val_bpb"], row["memory_gb"] = as_number(row["val_bpb"]), as_number(row["memory_gb"])
    row["valid"] = row["status"] in ("keep", "discard") and 0 < row["val_bpb"] <= HIGHEST
    noise = re.match(r"noise: seed (\d{1,18}) of ", row["description"])
    row["kind"], row["seed"] = ("noise", int(noise[1])) if noise else ("try", None)
    if len(fields) < len(columns):
        row["odd"] = "fewer columns than the header"
    elif row["status"] not in STATUSES:
        row["odd"] = f"status {row['status'][:20]!r}"
    else:
        row["odd"] = "no usable val_bpb" if row["status"] != "crash" and not row["valid"] else ""
    return row


def as_number(value):
    """float(value) if that is a number that something here can have, otherwise NaN."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if abs(value) < 1e15 else math.nan  # which sums, squares and axes bear


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
            with open(f"{folder}/{name}/outcome.json", "rb") as f:
                outcome = checked(json.loads(LOSSES.sub(b'"losses":[]', f.read())))
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


def section(outcome, name, key):
    """outcome[name][key] as a number, NaN where anything of it is missing."""
    return as_number((outcome.get(name) or {}).get(key))


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


def numbers(rows):
    """Of `experiment.py show` where every row has its run and they ascend, else counted from 1."""
    found = [row["run"]["number"] for row in rows if row["run"]]
    ascending = all(a < b for a, b in zip(found, found[1:]))
    return found if len(found) == len(rows) and ascending else range(1, len(rows) + 1)


def name_baseline(rows):
    """The rows whose runs say so; where none of them has a result, the first keep, or else the first result."""
    for row in rows:
        if row["run"] and row["run"].get("kind") == "baseline":
            row["kind"] = "baseline"
    if not any(row["kind"] == "baseline" and row["valid"] for row in rows):
        results = [row for row in rows if row["valid"] and row["kind"] == "try"]
        for row in sorted(results, key=lambda row: row["status"] != "keep")[:1]:
            row["kind"] = "baseline"


def as_frame(rows):
    """The rows with their types, which an empty frame does not know by itself."""
    known = facts(None)
    floats = ["val_bpb", "memory_gb", *(name for name, value in known.items() if value != value)]
    frame = pd.DataFrame(rows, columns=["number", *COLUMNS, "kind", "seed", "valid", "odd", "run", *known])
    return frame.astype(dict.fromkeys(floats, float) | {"number": int, "valid": bool})


def timestamps(texts):
    return pd.to_datetime(pd.Series(list(texts), dtype=str), errors="coerce", utc=True, format="ISO8601")


def is_kept(rows):
    return rows["valid"] & (rows["status"] == "keep")


def with_progress(rows):
    """The rows with best (the lowest kept so far), gain of a keep over the best before it, tries since that one, start in hours."""
    kept = is_kept(rows)
    rows["best"] = rows["val_bpb"].where(kept).cummin().ffill().astype(float)
    rows["gain"] = (rows["best"].shift() - rows["val_bpb"]).where(kept).astype(float)
    tries = (rows["kind"] == "try").cumsum()
    rows["tries"] = (tries - tries.where(kept).ffill().shift().fillna(0)).where(kept)
    started = timestamps(rows["started"])
    rows["start_hours"] = (started - started.min()).dt.total_seconds() / 3600
    return rows


# ---------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def one_line(night):
    """The night in one line, for a phone, a chat or a log."""
    s = night.summary
    if not s["rows"]:
        return f"no experiment yet: {night.path} {'is empty' if night.path.exists() else 'is not there'}"
    time = f" in {duration(s['hours']['wall'])}" if s["hours"] else ""
    parts = [f"{count(s['rows'], 'experiment')}{time}: {s['keep']} kept, {s['crash']} crashed"]
    if s["best"]:
        nothing = "" if len(night.kept) else ", nothing kept"
        parts.append(f"val_bpb {s['baseline']['val_bpb']:.6f} → {s['best']['val_bpb']:.6f} ({signed(-s['gain'])}{in_floors(s)}{nothing})")
        parts.append(f"best: {cut(s['best']['description'], 60) or s['best']['commit']}")
    else:
        parts.append("no valid result yet")
    parts += [f"no keep in the last {s['tries_since_keep']} tries"] * s["plateau"]
    parts += [f"WARNING: {len(s['fingerprints'])} fingerprints, whose numbers do not compare"] * (len(s["fingerprints"]) > 1)
    parts += [f"odd: {listed(s['odd'])}"] if s["odd"] else []
    return "; ".join(parts)


def luck_text(night):
    """What of the night may be luck, in sentences."""
    s = night.summary
    if not s["best"]:
        return "Nothing to judge yet."
    if s["noise_floor"] is None:
        again = "run the best again with other seeds. Until then a small gain may be luck, the more so the more was tried."
        return f"The noise floor is not known: {again}"
    small = [f"#{row['number']}" for row in s["keeps"] if row["luck"] is not None and row["gain"] < row["luck"]]
    which = f": {', '.join(small)}" if small else ""
    return (
        f"The noise floor is {s['noise_floor']:.6f}: the standard deviation over {s['noise_runs']} runs that differ only in the seed. "
        f"{count(s['tries'], 'try')} that changed nothing would by luck be expected to end {s['luck']:.6f} below the baseline; "
        f"this night ended {s['gain']:.6f} below it{in_floors(s)}. "
        f"{len(small)} of {max(0, len(s['keeps']) - 1)} keeps gained less than luck would in as many tries{which}."
    )


def hours_text(night):
    time = night.summary["hours"]
    if not time:
        return "No runs beside this ledger say how long they took."
    return (
        f"{count(time['runs'], 'run')} in {duration(time['wall'])}, {time['runs'] / time['wall']:.1f} an hour; "
        f"{100 * time['training'] / time['wall']:.0f} % of the time was training. Runs without a result took {duration(time['lost'])}."
    )


def in_floors(s):
    return "" if s["gain_in_noise_floors"] is None else f", {s['gain_in_noise_floors']:.1f} noise floors"


def listed(counts):
    return ", ".join(f"{n} × {what}" for what, n in counts.items())


def count(n, word):
    plural = word[:-1] + "ies" if word.endswith("y") else word + "s"
    return f"{n:,} {word if n == 1 else plural}"


def cut(text, length):
    """The text, where it is longer its whole words that fit."""
    if len(text) <= length:
        return text
    words = text[:length].rpartition(" ")[0]
    return (words if len(words) > length / 2 else text[: length - 1]).rstrip(" ,;.:") + "…"


def signed(value, digits=6):
    return f"{value + 0.0:+.{digits}f}".replace("-", "−")  # + 0.0: no −0


def duration(hours):
    return f"{hours:.1f} h" if hours >= 1.5 else f"{hours * 60:.0f} min" if hours * 60 >= 1.5 else f"{hours * 3600:.0f} s"


def read_text(path, size):
    """The first `size` bytes of a file, the last where size is negative, as whole lines, and how much is left out; "" without a file."""
    try:
        with open(path, "rb") as f:
            left = f.seek(0, os.SEEK_END) - abs(size)
            f.seek(left if size < 0 and left > 0 else 0)
            text = f.read(abs(size)).decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    except OSError:
        return ""
    if left <= 0:
        return text
    note = f"… {left:,} bytes more in {os.path.basename(path)}"
    return f"{note}\n{text.partition(chr(10))[2]}" if size < 0 else f"{text.rpartition(chr(10))[0]}\n{note}"


# ---------------------------------------------------------------------------
# Tables: HTML, for the notebook and the page
# ---------------------------------------------------------------------------

# Tints and the text's own colour, so that they fit a light and a dark page, and a notebook's theme.
STYLE = """<style>
.night { font: 14px/1.45 system-ui, sans-serif; border-collapse: collapse; width: 100%; margin: 0 0 1rem; text-align: left; }
.night th, .night td { padding: .3rem .6rem; text-align: left; vertical-align: top; background: none; }
.night th, .night td { border-bottom: 1px solid rgb(127 127 127 / .25); }
.night th { font-weight: 600; opacity: .75; vertical-align: bottom; }
.night .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.night .wide { width: 60%; max-width: 0; overflow-wrap: anywhere; }  /* as wide as the others leave it, not as its log */
.night tr.keep td { background: rgb(0 114 178 / .12); }
.night tr.keep td.wide { font-weight: 600; }
.night small { font-weight: 400; opacity: .8; display: block; }
.night summary { cursor: pointer; }
.night summary:focus-visible { outline: 2px solid #56b4e9; outline-offset: 2px; }
.night pre { font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace; white-space: pre; overflow: auto; max-height: 30rem;
  margin: .5rem 0; padding: .5rem .7rem; background: rgb(127 127 127 / .1); border-radius: 6px; }
.night pre.log { white-space: pre-wrap; overflow-wrap: anywhere; }
.night pre span { display: block; min-width: max-content; }
.night pre .a { background: rgb(0 114 178 / .22); }
.night pre .d { background: rgb(213 94 0 / .22); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .6rem; }
.cards { font: 14px/1.4 system-ui, sans-serif; margin: 0 0 1rem; }
.cards div { padding: .6rem .8rem; border: 1px solid rgb(127 127 127 / .3); border-radius: 8px; }
.cards dt { opacity: .75; font-weight: 400; margin: 0; }
.cards dd { margin: 0; font-size: 1.25rem; font-weight: 650; font-variant-numeric: tabular-nums; width: auto; }
.cards small { display: block; font-size: .8rem; font-weight: 400; opacity: .8; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .night thead { display: none; }
  .night, .night tbody { display: block; }
  .night tr { display: flex; flex-wrap: wrap; column-gap: .9rem; padding: .35rem 0; border-bottom: 1px solid rgb(127 127 127 / .25); }
  .night td { border: 0 !important; padding: .1rem .5rem; }
  .night td:empty { display: none; }
  .night .wide { flex: 0 0 100%; box-sizing: border-box; max-width: 100%; }
  .night .n[data-title]::before { content: attr(data-title) " "; opacity: .7; font-size: 12px; }
  .night tr.keep { background: rgb(0 114 178 / .12); }
  .night tr.keep td { background: none; }
}
</style>"""
IDEA = "what it tried"


def as_html(rows, columns, wide):
    """A table of `rows` (dicts). columns: title → what makes the text of a row's cell, or its HTML for the titles in `wide`."""
    lines = []
    for row in rows:
        cells = [
            f'<td class="wide">{make(row)}</td>' if title in wide else f'<td class="n" data-title="{title}">{html.escape(make(row))}</td>'
            for title, make in columns.items()
        ]
        lines.append(f'<tr class="{row.get("class", "")}">{"".join(cells)}</tr>\n')
    head = "".join(f'<th scope="col" class="{"wide" if title in wide else "n"}">{title}</th>' for title in columns)
    nothing = "" if rows else f'<tr><td colspan="{len(columns)}">nothing yet</td></tr>'
    return f'<table class="night"><thead><tr>{head}</tr></thead>\n<tbody>{"".join(lines)}{nothing}</tbody></table>'


def fixed(name, digits=6, sign=False):
    """What makes a cell's text: the number under that name, nothing where there is none."""

    def make(row):
        value = as_number(row[name])
        return "" if math.isnan(value) else signed(value, digits) if sign else f"{value:,.{digits}f}"

    return make


def escaped(name):
    return lambda row: html.escape(row[name])


def overview(night):
    """The night in a few numbers, as HTML."""
    s = night.summary
    cards = []
    if s["best"]:
        below = f"{100 * s['gain'] / s['baseline']['val_bpb']:.2f} % below the baseline's {s['baseline']['val_bpb']:.6f}{in_floors(s)}"
        cards += [("best val_bpb", f"{s['best']['val_bpb']:.6f}", f"#{s['best']['number']}: {s['best']['description']}")]
        cards += [("gain", f"{s['gain']:.6f}", below)]
    if s["rows"]:
        kinds = [f"{s[status]} {status}" for status in STATUSES] + [f"{s['other_status']} of another status"] * bool(s["other_status"])
        repeats = f"; {s['repeats']} of them only to know the noise" * bool(s["repeats"])
        cards += [("experiments", f"{s['rows']:,}", ", ".join(kinds) + repeats)]
    if s["tries"]:
        cards += [("tries kept", f"{100 * s['keep_rate']:.0f} %", f"of {s['tries']:,}; {100 * s['crash_rate']:.0f} % crashed")]
    if s["hours"]:
        cards += [("time", duration(s["hours"]["wall"]), f"{s['experiments_per_hour']:.1f} experiments an hour")]
    if s["noise_floor"] is not None:
        cards += [("noise floor", f"{s['noise_floor']:.6f}", f"standard deviation over {s['noise_runs']} runs that differ in the seed")]
    if s["keeps"]:
        cards += [("since the last keep", count(s["tries_since_keep"], "try"), "a plateau" if s["plateau"] else "no plateau")]
    notes = [one_line(night)] if not s["rows"] else ["No valid result yet."] if not s["best"] else []
    notes += [f"Odd rows: {listed(s['odd'])}."] if s["odd"] else []
    notes += [f"Runs without a row: {listed(s['without_row'])}."] if s["without_row"] else []
    if len(s["fingerprints"]) > 1:
        prints = f"{len(s['fingerprints'])} fingerprints ({', '.join(s['fingerprints'])})"
        notes += [f"WARNING: the runs have {prints}: their numbers do not compare."]
    if s["throttled"]:
        which = f"{count(len(s['throttled']), 'run')} throttled ({', '.join(f'#{number}' for number in s['throttled'][:9])}"
        which += ", …" * (len(s["throttled"]) > 9)
        notes += [f"{which}): a slower clock makes fewer steps, so their numbers may be too high."]
    ran = [*s["devices"], *s["datasets"], *(f"fingerprint {text}" for text in s["fingerprints"])]
    notes += [f"Ran on {', '.join(ran)}."] if ran else []
    e = html.escape
    body = "".join(f"<div><dt>{e(title)}</dt><dd>{e(value)}<small>{e(note)}</small></dd></div>\n" for title, value, note in cards)
    return STYLE + (f'<dl class="cards">{body}</dl>' if body else "") + "".join(map(paragraph, notes))


def paragraph(text):
    return f"<p>{html.escape(text)}</p>"


def kept_table(night):
    """Each keep with its gain and what luck alone would have gained, as HTML."""
    columns = {"#": fixed("number", 0), "val_bpb": fixed("val_bpb"), "gain": fixed("gain", sign=True)}
    if night.summary["noise_floor"]:
        columns |= {"in noise floors": fixed("floors", 1), "by luck": fixed("luck", 6)}
    return as_html(records(keeps(night)), columns | {"GB": fixed("memory_gb", 1), IDEA: escaped("description")}, [IDEA])


def ideas_table(night):
    columns = {"kind of idea": escaped("idea"), "tries": fixed("tries", 0), "kept": fixed("keep", 0), "crashed": fixed("crash", 0)}
    gain = lambda row: fixed("gain", sign=True)(row) if row["gain"] else ""
    columns |= {"rate": lambda row: f"{100 * row['rate']:.0f} %", "gain in all": gain, "best gain": fixed("best", sign=True)}
    return as_html(records(ideas(night)), columns, ["kind of idea"])


def experiments_table(night):
    """Every row of the ledger, with the change and the end of the log folded under it, as HTML."""
    rows = night.rows.assign(change=(night.rows["val_bpb"] - night.rows["best"].shift()).where(night.rows["valid"]))
    rows["class"] = rows["status"].where(rows["valid"], "")
    marks = {"keep": "● keep", "discard": "○ discard", "crash": "× crash"}
    columns = {"#": fixed("number", 0), "val_bpb": lambda row: fixed("val_bpb")(row) if row["val_bpb"] else ""}
    columns |= {"to the best": fixed("change", sign=True), "GB": lambda row: fixed("memory_gb", 1)(row) if row["memory_gb"] else ""}
    columns |= {"steps": fixed("num_steps", 0)} if rows["num_steps"].notna().any() else {}
    columns |= {"status": lambda row: "◇ noise" if row["kind"] == "noise" else marks.get(row["status"], row["status"] or "?")}
    return as_html(records(rows), columns | {IDEA: fold}, [IDEA])


def fold(row):
    """The description, as HTML; what its run left is folded under it."""
    e, run = html.escape, row["run"]
    title = e(row["description"] or row["commit"] or "(no description)")
    notes = [row["reason"] or row["odd"], f"the GPU throttled: {row['gpu_throttled']}" * bool(row["gpu_throttled"])]
    why = "".join(f"<small>{e(note)}</small>" for note in notes if note)
    if not run:
        return title + why
    about = [f"runs/{os.path.basename(run['folder'])}", row["commit"], *([f"seed {run['seed']}"] if "seed" in run else []), row["device"]]
    about += [duration(row["total"] / 3600)] if row["total"] > 0 else []
    gpu = zip(GPU, ("{:,.0f} MHz", "at least {:,.0f} MHz", "up to {:.0f} °C", "{:.0f} W"))
    about += [words.format(row[name]) for name, words in gpu if row[name] == row[name]]  # not NaN
    lines = [line for line in read_text(f"{run['folder']}/change.diff", 20_000).splitlines() if line]
    kind = lambda line: "" if line.startswith(("+++", "---")) else {"+": "a", "-": "d"}.get(line[0], "")
    diff = "".join(f'<span class="{kind(line)}">{e(line)}</span>' for line in lines)
    log = e("\n".join(cut(line, 300) for line in read_text(f"{run['folder']}/run.log", -6000).splitlines()[-25:]))
    left = f'<pre class="diff">{diff}</pre>' * bool(diff) + f'<pre class="log">{log}</pre>' * bool(log)
    return f"<details><summary>{title}{why}</summary><small>{e(' · '.join(filter(None, about)))}</small>{left}</details>"


# ---------------------------------------------------------------------------
# Pictures: opaque cards of one look, which read on a light and on a dark page
# ---------------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind tell apart; the marks differ too.
BLUE, ORANGE, GREEN, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#56b4e9", "#e69f00"
INK, MUTED, FAINT, GRID, CARD = "#1f2328", "#59636e", "#8c959f", "#e7eaee", "#ffffff"
LOOK = {
    "font.family": "sans-serif", "font.size": 9.5, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.edgecolor": "#c3c9d0", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": GRID, "axes.axisbelow": True, "axes.facecolor": "none", "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.formatter.useoffset": False, "text.parse_math": False, "legend.frameon": False, "legend.labelcolor": MUTED,
}  # fmt: skip
WIDTH, DPI = 8.0, 200  # inches and dots an inch: drawn 1,600 pixels wide, to be seen at 800


def drawn(draw):
    """Draw with this file's look, whatever the user's matplotlib is set to."""

    @functools.wraps(draw)
    def with_look(*args):
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a description in a script that no font here has
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(LOOK)
            return draw(*args)

    return with_look


def card(height, title, subtitle, panels=1, left=0.65):
    """(figure, its panels one above the other) with a headline; height and left in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="none")
    shape = dict(boxstyle="round,pad=0,rounding_size=0.09", fc=CARD, ec="none", zorder=-1)
    figure.add_artist(FancyBboxPatch((0, 0), WIDTH, height, transform=figure.dpi_scale_trans, **shape))
    figure.text(0.2 / WIDTH, 1 - 0.2 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.2 / WIDTH, 1 - 0.48 / height, subtitle, fontsize=9.5, color=MUTED, va="top")
    top, bottom, gap = 1.0, 0.55, 0.35
    room = (height - top - bottom + gap) / panels
    width = 1 - (left + 0.25) / WIDTH
    places = [(left / WIDTH, (bottom + i * room) / height, width, (room - gap) / height) for i in reversed(range(panels))]
    return figure, [figure.add_axes(place) for place in places]


def above(axes, words):
    """A vertical axis' name, where it is read without turning one's head."""
    axes.set_title(words, loc="left", fontsize=9, color=MUTED, pad=6)


def empty(axes, words):
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=11)
    axes.set_axis_off()


def whole_numbers(axis, most=9):
    axis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def rings(axes, x, y, size=18, color=FAINT, **more):
    axes.scatter(x, y, size, **dict(facecolors="none", edgecolors=color, linewidths=0.9) | more)


def dots(axes, x, y, size=24, **more):
    axes.scatter(x, y, size, **dict(color=BLUE, edgecolors=CARD, linewidths=0.6, zorder=5) | more)


def scale(rows):
    """(low, high, their distance): what was kept sets the scale of val_bpb, and the better part of the rest."""
    low, high = rows["val_bpb"].min(), max([rows["val_bpb"].quantile(0.75), *rows["val_bpb"][is_kept(rows)]])
    return low, high, max(high - low, 1e-3)


@drawn
def draw_progress(night):
    """Every experiment and the best so far: the picture of the night."""
    valid, kept, n = night.valid, night.kept, len(night.rows)
    figure, (axes,) = card(4.7, *progress_title(night))
    if not len(valid):
        empty(axes, "lower is better; there is nothing to show yet")
        return figure
    low, high, span = scale(valid)
    top, bottom = high + 0.12 * span, low - 0.18 * span  # what is far off is shown at the edge
    first, last = night.rows["number"].iloc[0] - 0.5, night.rows["number"].iloc[-1] + 0.5
    axes.set(ylim=(bottom, top), xlim=(first - 0.01 * n, last + 0.01 * n), xlabel="experiment")
    axes.xaxis.set_label_coords(1.0, -0.083, axes.transAxes)
    axes.xaxis.label.set(ha="right", va="top")
    above(axes, "val_bpb, lower is better")
    whole_numbers(axes.xaxis)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    size = float(np.clip(1200 / n, 5, 26))  # the more, the smaller
    if len(kept):
        dots(axes, kept["number"], kept["val_bpb"], 1.2 * max(size, 11), label="keep")
    noise, others, shown = valid["kind"] == "noise", valid["status"] != "keep", valid["val_bpb"] <= top
    marks = [("discard", others & ~noise & shown, {}), ("off the scale", others & ~noise & ~shown, dict(marker="^"))]
    marks += [("other seed", others & noise, dict(marker="D", color=INK, linewidths=1.3, zorder=4))]
    for label, which, how in marks:
        if which.any():
            rings(axes, valid["number"][which], valid["val_bpb"][which].clip(upper=top - 0.02 * span), size, label=label, **how)
    crashed = night.rows["number"][night.rows["status"] == "crash"]
    if len(crashed):
        axes.scatter(crashed, [bottom + 0.04 * span] * len(crashed), size, marker="x", color=ORANGE, linewidths=1.1, label="crash")
    line = draw_best(axes, kept, last, night.summary["noise_floor"])
    place = dict(loc="upper left", bbox_to_anchor=(-0.012, -0.075), ncols=6, borderaxespad=0)
    axes.legend(**place, handletextpad=0.3, columnspacing=1.3, handlelength=1.3, markerscale=math.sqrt(24 / size))
    place_labels(axes, labels(night), stairs(line), valid[["number", "val_bpb"]].to_numpy(float))
    return figure


def progress_title(night):
    s, n = night.summary, len(night.rows)
    if not n:
        return "no experiment yet", ""
    if s["best"]:
        title = f"{night.name}: val_bpb {s['baseline']['val_bpb']:.4f} → {s['best']['val_bpb']:.4f}"
        title += f" ({signed(-100 * s['gain'] / s['baseline']['val_bpb'], 2)} %)" if s["gain"] else ""
    else:
        title = f"{night.name}: no valid result yet"
    words = [count(n, "experiment") + (f" in {duration(s['hours']['wall'])}" if s["hours"] else "")]
    words += [f"{s['keep']} kept", f"{s['crash']} crashed"]
    words += [f"noise floor {s['noise_floor']:.4f}"] if s["noise_floor"] is not None else []
    return cut(title, 60), cut(" · ".join(words + s["devices"]), 98)


def draw_best(axes, kept, last, floor):
    """The best so far as stairs, to x = `last`, and the noise floor around it. Returns the steps (n, 2)."""
    line = kept[["number", "best"]].to_numpy(float)
    if not len(line):
        return line
    line = np.concatenate([line, [[last, line[-1, 1]]]])
    axes.step(*line.T, where="post", color=BLUE, linewidth=1.4, zorder=4)
    if floor:
        band = (line[:, 1] - floor, line[:, 1] + floor)
        axes.fill_between(line[:, 0], *band, step="post", color=BLUE, alpha=0.13, linewidth=0, label="± noise floor")
    return line


def labels(night):
    """(x, y, words) of the keeps worth a label, the most important first: the best, the baseline, then by gain."""
    kept, ends = night.kept, {night.summary[name]["number"] for name in ("best", "baseline") if night.summary[name]}
    kept = kept.assign(end=kept["number"].isin(ends)).sort_values(["end", "gain"], ascending=False, kind="stable")
    what = lambda row: cut(row["description"], 34) or row["commit"]
    return [(row["number"], row["val_bpb"], f"{signed(-row['gain'], 4)}  " * (row["gain"] > 0) + what(row)) for row in records(kept[:14])]


RISES = (0, -12, 12, -24, 24, -38, 38, -54, 54, -72, 72, -95)  # pixels, of labels above and below their points


def place_labels(axes, texts, line, points):
    """Write (x, y, words) near their points, the first first, where they cover no other label, line or edge and few points; or not at all.

    line: corners (n, 2) of the line that stays free; points (n, 2).
    """
    axes.figure.draw_without_rendering()
    px, frame, place = DPI / 100, axes.get_window_extent(), axes.transData.transform
    line, points = along(place(line), 4 * px), place(points)
    boxes, leaders = [], []
    for x, y, words in texts:
        ruler = axes.text(x, y, words, fontsize=8.8)
        width, height = ruler.get_window_extent().size
        ruler.remove()
        point, options = place((x, y)), []
        for side, rise, push in itertools.product((-1, 1), RISES, (10, 22, 48)):
            start = point + (side * push * px, rise * px)  # where the text begins, on the left where it ends
            left, middle = start[0] - (width if side < 0 else 0), start[1]
            box = (left - 3 * px, middle - height / 2 - px, left + width + 3 * px, middle + height / 2 + px)
            leader = along(np.array([point, start]), 4 * px)[2:]
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 + 16 * px <= box[1] and box[3] <= frame.y1
            if not inside or covered(line, box) or covered(points, box) > 3:
                continue
            if any(overlap(box, other) or covered(leader, other) for other in boxes) or any(covered(other, box) for other in leaders):
                continue
            crossings = sum(covered(line, (*(p - 2 * px), *(p + 2 * px))) > 0 for p in leader[2:])
            options.append((3 * covered(points, box) + 4 * crossings + (abs(rise) + push) / 8, side, rise, push, box, leader))
        if options:
            _, side, rise, push, box, leader = min(options, key=lambda option: option[0])
            boxes.append(box)
            leaders.append(leader)
            arrow = dict(arrowstyle="-", color=FAINT, linewidth=0.7, shrinkA=0, shrinkB=3, relpos=(side < 0, 0.5))
            offset = dict(xytext=(0.72 * side * push, 0.72 * rise), textcoords="offset points")  # 100 px are 72 points
            align = dict(ha="right" if side < 0 else "left", va="center")
            axes.annotate(words, (x, y), fontsize=8.8, zorder=6, **offset, **align, arrowprops=arrow if abs(rise) + push > 22 else None)


def stairs(points):
    """The corners (n, 2) of the line that leads level, then up or down, from point to point."""
    x, y = points.T if len(points) else ([], [])
    return np.column_stack([np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]])


def along(corners, every):
    """Points on the line through `corners` (n, 2), at most `every` apart."""
    pieces = [np.linspace(a, b, int(np.hypot(*(b - a)) / every) + 2) for a, b in zip(corners, corners[1:])]
    return np.concatenate(pieces) if pieces else np.empty((0, 2))


def covered(points, box):
    """How many of the points (n, 2) lie in the box (left, bottom, right, top)."""
    return int(((points > box[:2]) & (points < box[2:])).all(axis=1).sum())


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@drawn
def draw_hours(night):
    """Where the time went."""
    time = night.summary["hours"]
    figure, (axes,) = card(2.6, "Where the time went", hours_text(night), left=1.35)
    if not time:
        empty(axes, "")
        return figure
    names = {"training": "training", "evaluation": "evaluation", "startup": "start-up", "other": "rest of runs", "between": "between runs"}
    values = [time[name] for name in names]
    axes.barh(range(5), values, color=[BLUE, SKY, YELLOW, FAINT, "#c3c9d0"], height=0.62)
    axes.set(yticks=range(5), yticklabels=names.values(), xticks=[], xlim=(0, 1.25 * max(values)), ylim=(4.5, -0.5))
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_position([1.35 / WIDTH, 0.2 / 2.6, 1 - 1.6 / WIDTH, 1.5 / 2.6])
    for i, value in enumerate(values):
        words = f"{duration(value)}, {100 * value / sum(values):.0f} %"
        axes.annotate(words, (value, i), xytext=(5, 0), textcoords="offset points", va="center", color=MUTED)
    return figure


@drawn
def draw_memory(night):
    """Memory against val_bpb, and the results that nothing beats in both."""
    rows, front = night.valid[night.valid["memory_gb"] > 0], pareto(night)
    words = "the line joins the results that no other one beats in both memory and val_bpb: the Pareto front"
    figure, (axes,) = card(3.8, "What memory buys", words)
    if not len(rows):
        empty(axes, "no result with its memory yet")
        return figure
    kept = is_kept(rows)
    low, high, span = scale(rows)
    size, top = float(np.clip(3000 / len(rows), 6, 18)), high + 0.15 * span
    for which, marker in ((rows["val_bpb"] <= top, "o"), (rows["val_bpb"] > top, "^")):  # what is far off is shown at the edge
        rings(axes, rows["memory_gb"][~kept & which], rows["val_bpb"][~kept & which].clip(upper=top - 0.03 * span), size, marker=marker)
    dots(axes, rows["memory_gb"][kept], rows["val_bpb"][kept], 1.3 * size)
    corners = front[["memory_gb", "val_bpb"]].to_numpy(float)
    axes.step(*corners.T, where="post", color=GREEN, linewidth=1.4, zorder=3)
    axes.margins(x=0.08)
    axes.set(xlabel="peak memory (GB)", ylim=(low - 0.25 * span, top))
    above(axes, "val_bpb, lower is better")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    texts = [(row["memory_gb"], row["val_bpb"], f"#{row['number']}  {cut(row['description'], 30)}") for row in records(front[::-1])]
    place_labels(axes, texts[:8], stairs(corners), rows[["memory_gb", "val_bpb"]].to_numpy(float))
    return figure


@drawn
def draw_speed(night):
    """Tokens a second and MFU over the night."""
    wanted = {"tok_per_sec": "tokens a second", "mfu_percent": "MFU (%)"}
    known = [name for name in wanted if night.rows[name].notna().any()]
    note = "a dip says that the machine was busy with something else, or the model slower" if known else ""
    note += "; MFU is not known here" if known == ["tok_per_sec"] else ""
    figure, panels = card(1.9 + 1.4 * max(1, len(known)), "How fast it ran", note, max(1, len(known)))
    if not known:
        empty(panels[0], "no run beside this ledger says how fast it was")
        return figure
    timed = night.rows["start_hours"].notna().any()
    x = night.rows["start_hours"] if timed else night.rows["number"]
    kept = is_kept(night.rows)
    for axes, name in zip(panels, known):
        values = night.rows[name]
        rings(axes, x[~kept], values[~kept])
        dots(axes, x[kept], values[kept])
        axes.set_ylim(0, 1.15 * values.max() or 1)
        above(axes, wanted[name])
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("hours since the first run" if timed else "experiment")
    return figure


# ---------------------------------------------------------------------------
# Comparison: two nights, two machines
# ---------------------------------------------------------------------------


def comparable(nights):
    """(whether their numbers compare, why), by the fingerprints of their runs."""
    prints = {text for night in nights for text in night.summary["fingerprints"]}
    if len(prints) > 1:
        names = ", ".join(sorted(prints))
        return False, f"The fingerprints differ ({names}): data or time budget were not the same, so val_bpb does not compare."
    if not all(night.summary["fingerprints"] for night in nights):
        return True, "Not all say their fingerprint: val_bpb compares only if data and time budget were the same."
    return True, f"All have the fingerprint {prints.pop()}: val_bpb compares."


def compare_table(nights):
    """A line for each night, as HTML."""
    rows = []
    for night in nights:
        s = night.summary
        start, end = s["baseline"] or {"val_bpb": None}, s["best"] or {"val_bpb": None, "description": "no result"}
        where = f"{html.escape(s['name'])}<small>{html.escape(', '.join(s['devices']))}</small>"
        rows.append(s | {"start": start["val_bpb"], "end": end["val_bpb"], "description": end["description"], "where": where})
    columns = {"night": lambda row: row["where"], "experiments": fixed("rows", 0), "kept": fixed("keep", 0), "baseline": fixed("start")}
    columns |= {"best": fixed("end"), "gain": fixed("gain"), "noise floor": fixed("noise_floor")}
    columns |= {"an hour": fixed("experiments_per_hour", 1), "best idea": escaped("description")}
    return as_html(rows, columns, ["night", "best idea"]) + paragraph(comparable(nights)[1])


@drawn
def draw_compare(nights):
    """The best so far of several nights; in percent of each one's own baseline where their numbers do not compare."""
    same, _ = comparable(nights)
    words = "the best so far" if same else "the best so far, in percent of each night's own baseline: their val_bpb does not compare"
    figure, (axes,) = card(3.8, "Nights compared", words)
    nights = [night for night in nights if len(night.kept)]
    if not nights:
        empty(axes, "nothing was kept yet")
        return figure
    styles = itertools.cycle(zip((BLUE, ORANGE, GREEN, INK, YELLOW, SKY), ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))))
    for night, (color, dash) in zip(nights, styles):
        y = night.kept["best"] * (1 if same else 100 / baseline(night)["val_bpb"])
        before = night.rows["number"].iloc[0] - 1  # so that all nights begin at 1
        steps = ([*(night.kept["number"] - before), night.rows["number"].iloc[-1] - before + 0.5], [*y, y.iloc[-1]])
        axes.step(*steps, where="post", color=color, linestyle=dash, linewidth=1.7, label=f"{cut(night.name, 30)}: {y.iloc[-1]:.4f}")
    above(axes, "val_bpb, lower is better" if same else "% of the baseline, lower is better")
    axes.set_xlabel("experiment")
    whole_numbers(axes.xaxis)
    axes.legend(loc="upper right", handlelength=2.8)
    return figure


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


@drawn
def png(figure):
    """The figure as the bytes of a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, facecolor="none", metadata={"Software": None})
    return data.getvalue()


def show(figure, words):
    """The figure for a notebook, as wide as it is meant to be; words for who can't see it."""
    from IPython.display import Image

    return Image(png(figure), width=int(100 * WIDTH), alt=words)


def write(path, data):
    """The file whole or not at all, whoever else writes it at the same time."""
    with replace_file(path, "wb") as f:
        f.write(data)


# What the page's policy forbids, it neither has nor could be made to do by a description or a log: scripts, and anything from elsewhere.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
body {{ color: #1f2328; background: #f6f8fa; }}
h1 {{ font-size: 1.7rem; margin: .5rem 0 1rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .6rem; }}
p {{ margin: .6rem 0; max-width: 46rem; overflow-wrap: anywhere; }}
code {{ font: .9em ui-monospace, Menlo, Consolas, monospace; }}
div:has(> img) {{ overflow-x: auto; }}
img {{ display: block; width: 100%; min-width: 560px; height: auto; margin: .4rem 0; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e6edf3; background: #0d1117; }}
  img {{ filter: invert(.9) hue-rotate(180deg); }}
}}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def executed_notebook(path):
    """analysis.ipynb, executed over the ledger at `path`; ends the program with what its cell says if one fails."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this Python's kernel, whatever the user's own folder calls python3
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(HERE / "analysis.ipynb", as_version=4)
    more = ["--log-level=ERROR"]  # not the warning that it talks over loopback in plain text, which it does for seconds
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", extra_arguments=more, resources={"metadata": {"path": str(HERE)}})
    try:
        return client.execute(env=os.environ | {"AUTORESEARCH_RESULTS": str(path.resolve())})
    except CellExecutionError as e:
        sys.exit(f"FAIL: analysis.ipynb: {e.ename}: {e.evalue}")
    except RuntimeError as e:
        sys.exit(f"FAIL: analysis.ipynb: {e}")


def page(notebook, title):
    """An executed notebook as one HTML file that loads nothing and runs nothing."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_output_prompt=True, exclude_anchor_links=True)
    return PAGE.format(title=html.escape(title), body=exporter.from_notebook_node(notebook)[0])


def main():
    parser = argparse.ArgumentParser(description="The morning after: what results.tsv and runs/ say.")
    where = "a results.tsv, or its folder (default: AUTORESEARCH_RESULTS, then this folder's)"
    parser.add_argument("ledger", nargs="?", type=Path, help=where)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print everything as JSON, write no file")
    what.add_argument("--page", action="store_true", help="write results.html, the executed notebook, instead of progress.png")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the picture or the page goes (default: beside the ledger)")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a description's characters
    if args.ledger and not os.path.exists(os.path.expanduser(args.ledger)):
        sys.exit(f"FAIL: {args.ledger}: no such ledger (without a name it is {HERE / 'results.tsv'})")
    night = read(args.ledger)
    if args.json:
        print(as_json(night))
        return
    line = one_line(night)
    out = args.out or night.path.with_name("results.html" if args.page else "progress.png")
    write(out, page(executed_notebook(night.path), f"{night.name}: {line}").encode() if args.page else png(draw_progress(night)))
    print(f"{out}: {line}" if args.page else line)


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ImportError as e:
        sys.exit(f"FAIL: {e}: ./run.sh installs what is missing, into venv/")
    except OSError as e:
        sys.exit(f"FAIL: {e}")

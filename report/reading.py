"""The ledger read back into rows, each joined to its run: a Night."""

import functools
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.common.files import read_bytes

from .runs import as_number, facts, join, read_outcomes, timestamps
from .summary import STATUSES, is_kept, summarize

HERE = Path(__file__).resolve().parent.parent  # the project
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description"]
HIGHEST = 16.0  # bits per byte: guessing a byte evenly costs 8; a number above this, or not above 0, is no result


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
        data = read_bytes(path)
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

"""results.tsv: its rows, and what they say of a series."""

import fcntl
import os
import re
import statistics

from .files import LEDGER, ROOT, RUNS, Refusal, append_line, read_json, read_ledger, read_outcome, sync_folder, tried


def parse_row(line):
    """A row of results.tsv; None for what is no row."""
    fields = line.rstrip("\n").split("\t")
    if len(fields) != 5 or fields[3] not in ("keep", "discard", "crash") or not re.fullmatch("[0-9a-f]{7,40}", fields[0]):
        return None
    try:
        return dict(commit=fields[0], val_bpb=float(fields[1]), memory_gb=float(fields[2]), status=fields[3], description=fields[4])
    except ValueError:
        return None


def read_rows(offset=0, path=LEDGER):
    """The ledger's rows from byte `offset` on; what is no row is left out."""
    content = read_ledger(path)
    if b"\0" in content[:1000]:
        raise Refusal(f"{path} is not in UTF-8 (saved as UTF-16?): iconv -f UTF-16 -t UTF-8 makes it so")
    text = content[offset:].decode("utf-8", "replace")
    return [row for row in map(parse_row, text.splitlines()) if row]


def is_noise(row):
    return row["description"].startswith("noise: ")


def score(row):
    """val_bpb of a row that has one."""
    return row["val_bpb"] if row["status"] != "crash" and 0 < row["val_bpb"] < 16 else None


def key_of(row):
    """What names the run of a row: its commit, and the seed of a repeat."""
    seed = re.match(r"noise: seed (\d{1,18}) of ", row["description"])
    return row["commit"], int(seed[1]) if seed else None


def repair_ledger(unfinished):
    """Mend a last line that was torn by a crash or a full disk: whole rows get their end, a piece is cut off (and kept in runs/).

    unfinished: the short commits of turns whose rows may be what was being written; these write theirs again.
    """
    content = read_ledger()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    piece = content[start:]
    row = parse_row(piece.decode("utf-8", "replace"))
    if row and row["commit"] not in unfinished:  # somebody's editor
        append_line(LEDGER, "\n")
        return
    append_line(os.path.join(RUNS, "torn.txt"), piece.decode("utf-8", "replace") + "\n")
    with open(LEDGER, "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.truncate(start)
        os.fsync(f.fileno())


def seeds_of(rows, commit):
    """The rows of a commit that have a number: its own and its repeats with other seeds; [] where it has no repeat."""
    same = [row for row in rows if row["commit"] == commit and score(row)]
    return same if len(same) >= 2 else []


def repeated(rows):
    """The rows of the commit that was repeated last, its own too; [] before any repeat."""
    return next(filter(None, (seeds_of(rows, row["commit"]) for row in reversed(rows) if is_noise(row))), [])


def noise_floor(rows):
    """(mean, sample standard deviation, count) of val_bpb over the seeds of the commit that was repeated last; None before any repeat."""
    values = list(map(score, repeated(rows)))
    return (statistics.mean(values), statistics.stdev(values), len(values)) if values else None


def settings_of(tag):
    """What a series was begun with: seed, environment, cores; {} where that is gone, or not as it was written."""
    settings = read_json(os.path.join(RUNS, f"{tag}.json")) or {}
    given = settings.get("environment", {})
    whole = isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
    return settings if whole and all(isinstance(settings.get(key, 1), int) for key in ("seed", "cores")) else {}


class Series:
    """What the ledger says of the series that is checked out: rows, baseline, best, bar and noise."""

    def __init__(self, tag):
        self.tag, self.rows, self.tried = tag, read_rows(), [t for t in tried() if t["tag"] == tag]
        self.numbers = {}  # (commit, seed or None) → number of the run
        for line in self.tried:
            self.numbers[line["commit"], line["seed"] if line["kind"] == "noise" else None] = line["number"]
        kept = [row for row in self.rows if row["status"] == "keep" and score(row)]
        self.baseline, self.best = (kept[0], kept[-1]) if kept else (None, None)  # the best is what the branch holds
        self.bar = min(map(score, kept)) if kept else None  # what counts as lower: simplifications must not let it creep up
        self.noise = noise_floor(self.rows)
        self.settings = settings_of(tag)
        self.seed = self.settings.get("seed", 42)

    def number(self, row):
        """The run of a row; None if runs/ doesn't know it."""
        return self.numbers.get(key_of(row))

    def best_mean(self):
        """(mean val_bpb, count) of the best's runs with all seeds; None where it has not been repeated."""
        values = [score(row) for row in seeds_of(self.rows, self.best["commit"])] if self.best else []
        return (round(statistics.mean(values), 6), len(values)) if values else None

    def uneven_noise(self):
        """By what share the fastest of the runs that make the noise floor was faster than the slowest: more than 0.1 is load, not seeds."""
        summaries = [self.outcome(row).get("summary") or {} for row in repeated(self.rows)]
        columns = ([s[key] for s in summaries if isinstance(s.get(key), (int, float))] for key in ("num_steps", "tok_per_sec"))
        share = max((max(column) / min(column) - 1 for column in columns if column and min(column) > 0), default=0.0)
        return share if share > 0.1 else None

    def outcome(self, row):
        return read_outcome(self.number(row) if row else None)


def set_ledger_aside(tag):
    """results.tsv of an earlier series becomes runs/TAG.tsv. Returns its new path; None where there was none."""
    if not os.path.exists(LEDGER):
        return None
    names = (f"{tag}{suffix}.tsv" for suffix in ["", *(f"-{i}" for i in range(2, 10_000))])
    path = next(path for path in (os.path.join(RUNS, name) for name in names) if not os.path.exists(path))
    os.rename(LEDGER, path)
    sync_folder(RUNS)
    sync_folder(ROOT)
    return path

"""Where the loop keeps what, its limits, and writing that is whole and on the disk."""

import contextlib
import datetime
import fcntl
import json
import os
import re
import sys

from harness.common import files
from harness.common.files import replace_file, sync_folder
from harness.common.text import visible


def main_checkout(here):
    """The checkout whose series and ledger a folder works for: its own, or, for a linked worktree on no branch, the main one's."""
    with contextlib.suppress(OSError):  # where .git is a folder, it is the main one
        with open(os.path.join(here, ".git"), encoding="utf-8") as f:
            gitdir = os.path.join(here, f.read().partition("gitdir:")[2].strip())
        with open(os.path.join(gitdir, "HEAD"), encoding="utf-8") as f:
            detached = not f.read().startswith("ref:")
        with open(os.path.join(gitdir, "commondir"), encoding="utf-8") as f:
            common = os.path.normpath(os.path.join(gitdir, f.read().strip()))
        if detached and os.path.basename(common) == ".git" and os.path.exists(os.path.join(os.path.dirname(common), "experiment.py")):
            return os.path.dirname(common)
    return here


HERE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
ROOT = main_checkout(HERE)
RUNS = os.path.join(ROOT, "runs")
LEDGER = os.path.join(ROOT, "results.tsv")
TREE = os.path.join(ROOT, "worktrees", "run")  # where a run takes place, made anew each time; always one path, for compilers' caches
TRAIN = os.path.join(HERE, "train.py")
HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
DOCUMENTS = (".md", ".ipynb")  # files that may differ from the branch: they change no run

CRASHED, REFUSED, ENVIRONMENT, STOPPED, RUNNING = 1, 2, 3, 4, 75  # exit codes

# Seconds, but for the last three.
LIMITS = {
    "training": 300,  # from the start to the end of training, beyond the time budget
    "evaluation": 600,
    "silence": 180,  # without output after the first step
    "ending": 60,  # after the summary
    "setup": 4 * 3600,  # before a baseline: packages and data
    "grace": 10,  # after a reason to fail was printed; between SIGTERM and SIGKILL
    "kill": 20,  # after SIGKILL; what is left then only a reboot ends
    "queue": 4 * 3600,  # in a cluster, before a node takes a run
    "lost": 900,  # without an answer from a cluster
    "attempts": 3,  # of a run whose node is lost
    "log": 2_000_000,  # bytes of run.log
    "disk": 1_000_000_000,  # bytes that must be free
}
for setting in os.environ.get("AUTORESEARCH_LIMITS", "").split():
    name, _, value = setting.partition("=")
    if name not in LIMITS or not re.fullmatch(r"\d+(\.\d+)?", value):
        print(f"AUTORESEARCH_LIMITS: {setting!r} is none of {', '.join(LIMITS)} with =NUMBER", file=sys.stderr)
        sys.exit(REFUSED)
    LIMITS[name] = float(value)


class Refusal(Exception):
    """A command that can't be done: one line for the caller, and an exit code."""

    def __init__(self, message, code=REFUSED):
        super().__init__(message)
        self.code = code


def write_file(path, content, mode=None):
    """Bring `content` (bytes) under the name `path`, whole or not at all, and on the disk when this returns."""
    with replace_file(path, "wb", permissions=mode) as f:
        f.write(content)


def write_json(path, content):
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path):
    """The object in a JSON file; None without one that can be read."""
    with contextlib.suppress(OSError):
        return files.read_json(path)
    return None


def read_bytes(path):
    """A file's content; None without a file that can be read."""
    with contextlib.suppress(OSError):
        return files.read_bytes(path)
    return None


def read_ledger(path=LEDGER):
    """The ledger's content, b"" without one. Refusal where something else is in its place: it is never taken for an empty one."""
    try:
        return files.read_bytes(path)
    except FileNotFoundError:
        return b""
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror}: move it away", ENVIRONMENT) from None


def run_file(number, name):
    return os.path.join(RUNS, str(number), name)


def numbers():
    """The numbers of all runs."""
    return sorted(int(n) for n in os.listdir(RUNS) if n.isdecimal()) if os.path.isdir(RUNS) else []


def last_number():
    return max(numbers(), default=0)


TEXTS = ("tag", "kind", "description", "commit", "parent", "short", "token", "started")
OPTIONS = {"bar": None, "floor": None, "base": None, "margin": 0.0, "simpler": False, "prune": False, "remaining": 0, "file": None,
           "on": None, "cores": None, "again": None, "times": 0, "ledger": 0}  # fmt: skip


def read_turn(number):
    """turn.json of a run; None without one that is as it was written, since somebody may have edited it."""
    turn = (read_json(run_file(number, "turn.json")) if number else None) or {}
    whole = turn.get("number") == number and all(isinstance(turn.get(key), str) for key in TEXTS) and isinstance(turn.get("seed"), int)
    numeric = all(isinstance(turn.get(key) or 0, (int, float)) for key in ("bar", "floor", "base", "margin", "remaining", "cores", "times"))
    paths = all(isinstance(turn.get(key) or "", str) for key in ("on", "file"))
    return OPTIONS | turn if whole and numeric and paths else None


def read_verdict(number):
    """verdict.json of a run; None without one that is as it was written."""
    said = read_json(run_file(number, "verdict.json")) or {}
    lines, following = said.get("lines"), said.get("next")
    whole = isinstance(lines, list) and all(isinstance(line, str) for line in lines) and isinstance(following, (int, type(None)))
    return said if whole and isinstance(said.get("code"), int) and isinstance(said.get("status"), (str, type(None))) else None


def read_end(number):
    """The outcome of a run, by which it can be judged; None while there is none that is whole."""
    outcome = read_outcome(number)
    state, reason, summary = outcome.get("state"), outcome.get("reason"), outcome.get("summary") or {}
    if state == "valid":
        timed = {"startup", "training", "evaluation", "total"} <= outcome["seconds"].keys()
        return outcome if timed and isinstance(summary.get("val_bpb"), (int, float)) else None
    return outcome if state in ("crash", "pruned", "environment", "stopped") and isinstance(reason, str) else None


def read_outcome(number):
    """outcome.json of an earlier run; {} without one that is as it was written, since somebody may have edited it."""
    outcome = (read_json(run_file(number, "outcome.json")) if number else None) or {}
    nothing, number_kinds = type(None), (float, int)
    kinds = {"seconds": dict, "summary": (dict, nothing), "losses": list, "device": (str, nothing), "other_cpu": (*number_kinds, nothing)}
    whole = all(isinstance(outcome.get(key), kind) for key, kind in kinds.items())
    seconds, losses = (outcome["seconds"].values(), outcome["losses"]) if whole else ((), ())
    pairs = all(isinstance(point, list) and len(point) == 2 for point in losses)
    numbers = [*seconds, *(x for point in losses for x in point)] if pairs else []
    return outcome if whole and pairs and all(isinstance(x, number_kinds) for x in numbers) else {}


def tried():
    """A line for each run: number, tag, kind, commit (short), seed, digest of the program, what it changed."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(RUNS, "tried.jsonl"), "rb") as f:
        lines = []
        for line in f:
            with contextlib.suppress(ValueError):  # a line that was cut short
                lines.append(json.loads(line))
        kinds = {
            "number": int,
            "tag": str,
            "kind": str,
            "commit": str,
            "seed": int,
            "digest": (str, type(None)),
            "changed": (list, type(None)),
        }
        return [line for line in lines if isinstance(line, dict) and all(isinstance(line.get(key, ...), kinds[key]) for key in kinds)]
    return []


def append_line(path, line):
    """Add a line with one write, alone, on the disk when this returns."""
    new = not os.path.exists(path)
    with open(path, "ab", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        size = os.fstat(f.fileno()).st_size
        if f.write(line.encode()) != len(line.encode()):
            os.ftruncate(f.fileno(), size)
            raise OSError(28, "No space left on device", path)
        os.fsync(f.fileno())
    if new:
        sync_folder(os.path.dirname(path))


def seconds_text(seconds):
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def now_text():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def log_tail(number, count):
    """The last lines of a run's log, cut to a length that spares a context."""
    path = run_file(number, "run.log")
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.path.getsize(path) - 20_000))
        text = visible(re.sub(r"[\r\n]+", "\n", f.read().decode("utf-8", "replace")))
        lines = [line.rstrip() for line in text.split("\n") if line.strip()]
        return [line if len(line) <= 160 else line[:80] + " … " + line[-70:] for line in lines[-count:]] if count else []
    return []


def last_words(number):
    return (log_tail(number, 1) or [""])[0]


def stop_requested():
    return os.path.exists(os.path.join(RUNS, "stop"))

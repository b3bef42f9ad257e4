"""
The loop: one command an idea, and a ledger that is true in the morning.

    python3 experiment.py begin nov29                # a new series: the branch autoresearch/nov29 and its baseline
    python3 experiment.py try "what train.py tries"  # run the working train.py; judge, record, and keep it or not
    python3 experiment.py wait                       # go on waiting for it (exit code 75 says that it is still running)
    python3 experiment.py noise 3                    # the best again with 3 other seeds: what is luck?
    python3 experiment.py status                     # where the series stands; --json for programs
    python3 experiment.py show 12                    # one run: diff, summary, end of the log
    python3 experiment.py stop                       # no new run after the current one; --now, --undo

A turn: the working train.py becomes a commit under refs/autoresearch/TAG/N; a detached supervisor runs it from a worktree at exactly that
commit and leaves runs/N/outcome.json; that and the best give the verdict; the verdict becomes one row of results.tsv; for a keep the branch
moves. All state is in runs/ and in git. Finishing a turn and recovering from a crash are the same function, `recover`, which every command
calls first: each of its steps is there already or is done now. Nothing is ever reset.

Exit codes: 0 a verdict, 1 the experiment crashed, 2 refused, 3 the machine or the data is at fault (end the loop), 4 stopped, 75 running.
AUTORESEARCH_LIMITS changes LIMITS below: "silence=60 evaluation=900". The rest of the environment is what run.sh reads.
"""

import argparse
import ast
import collections
import contextlib
import ctypes
import datetime
import fcntl
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
import warnings

ROOT = os.path.dirname(os.path.realpath(__file__))
RUNS = os.path.join(ROOT, "runs")
LEDGER = os.path.join(ROOT, "results.tsv")
TREE = os.path.join(ROOT, "worktrees", "run")  # where a run takes place, made anew each time; always one path, for compilers' caches
TRAIN = os.path.join(ROOT, "train.py")
HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
DOCUMENTS = (".md", ".ipynb")  # files that may differ from the branch: they change no run

CRASHED, REFUSED, ENVIRONMENT, STOPPED, RUNNING = 1, 2, 3, 4, 75  # exit codes

# Seconds, but for the last two.
LIMITS = {
    "training": 300,  # from the start to the end of training, beyond the time budget
    "evaluation": 600,
    "silence": 180,  # without output after the first step
    "ending": 60,  # after the summary
    "setup": 4 * 3600,  # before a baseline: packages and data
    "grace": 10,  # after a reason to fail was printed; between SIGTERM and SIGKILL
    "kill": 20,  # after SIGKILL; what is left then only a reboot ends
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


# ---------------------------------------------------------------------------
# Files and git
# ---------------------------------------------------------------------------


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path, content, mode=None):
    """Bring `content` (bytes) under the name `path`, whole or not at all, and on the disk when this returns."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    if mode is not None:
        os.chmod(temporary, mode)
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


def write_json(path, content):
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path):
    """The object in a JSON file; None without one."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as f:
        content = json.load(f)
        return content if isinstance(content, dict) else None
    return None


def read_bytes(path):
    with contextlib.suppress(OSError), open(path, "rb") as f:
        return f.read()
    return None


DURABLE = (
    "-c",
    "core.fsync=all",
    "-c",
    "core.fsyncObjectFiles=true",
)  # what git writes reaches the disk; the second is for git before 2.36


def git(*arguments, data=None, env=None, check=True, cwd=ROOT):
    """What git prints, without the last line break; with check=False None where it fails. Hooks don't run."""
    printed = git_bytes(*arguments, data=data, env=env, check=check, cwd=cwd)
    return None if printed is None else printed.decode("utf-8", "surrogateescape").rstrip("\n")


def git_bytes(*arguments, data=None, env=None, check=True, cwd=ROOT):
    """The same, to the byte."""
    durable = DURABLE if arguments[0] in ("hash-object", "write-tree", "commit-tree", "update-ref") else ()
    command = ["git", "-c", "core.hooksPath=/dev/null", *durable, *arguments]
    environment = (
        {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"} | (env or {})
    )
    options = {"input": data} if data is not None else {"stdin": subprocess.DEVNULL}
    for _ in range(60):
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, env=environment, **options)
        except FileNotFoundError:
            raise Refusal("git is not installed, and the loop needs it", ENVIRONMENT) from None
        locked = re.search(rb"Unable to create '(.+\.lock)': File exists", done.stderr) if done.returncode else None
        if not locked:
            break
        remove_if_stale(os.fsdecode(locked[1]))
    if done.returncode == 0:
        return done.stdout
    if not check:
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
    disk = any(re.search("No space left|quota exceeded|Out of diskspace", line) for line in lines)
    said = next((line for line in lines if not line.startswith(("warning:", "hint:"))), lines[0])
    raise Refusal(f"git {arguments[0]}: {said}", ENVIRONMENT if disk else REFUSED)


def check_repository():
    """Refuse where this folder is not the top of a repository that git is willing to use."""
    try:
        inside = git("rev-parse", "--show-prefix")
    except Refusal as e:
        trust = f" (git config --global --add safe.directory {shlex.quote(ROOT)})" if "ownership" in str(e) else ""
        raise Refusal(f"{e}{trust}", e.code) from None
    if inside:
        raise Refusal(f"{ROOT} is a folder of a larger git repository, and the loop needs one of its own (git init, git add, git commit)")


def resolve(revision):
    """The full name of an object; None where there is no such."""
    return git("rev-parse", "--quiet", "--verify", revision, check=False)


def changed_files(old, new):
    """Paths that differ between two commits, both names of what was renamed."""
    return [name for name in git("diff", "--name-only", "-z", "--no-renames", old, new).split("\0") if name]


def branch_of(tag):
    return f"autoresearch/{tag}"


def current_tag():
    """TAG where the branch autoresearch/TAG is checked out, else None."""
    head = git("symbolic-ref", "--quiet", "HEAD", check=False) or ""
    return head.removeprefix("refs/heads/autoresearch/") if head.startswith("refs/heads/autoresearch/") else None


def tree_with(blob, commit):
    """The tree of `commit` with the blob as its train.py; neither the index nor a file is touched."""
    mode = git("ls-tree", commit, "train.py").split()[0]
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        git("read-tree", commit, env=index)
        git("update-index", "--cacheinfo", f"{mode},{blob},train.py", env=index)
        return git("write-tree", env=index)


def commit_tree(tree, message, *parents):
    command = ["commit-tree", tree, *(word for parent in parents for word in ("-p", parent))]
    commit = git(*command, data=message.encode(), check=False)
    if commit is None:  # most likely nobody has told git who commits
        who = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER")
               for key, value in (("NAME", "autoresearch"), ("EMAIL", "autoresearch@localhost"))}  # fmt: skip
        commit = git(*command, data=message.encode(), env=who)
    return commit


def remove_if_stale(lock):
    """Wait a little for a lock file of git; one that a killed git has left is removed: it is old, and no git runs that could own it."""
    with contextlib.suppress(FileNotFoundError):
        here = (p["pid"] for p in processes() if p["name"].startswith("git"))
        if time.time() - os.stat(lock).st_mtime > 2 and not any(working_folder(pid).startswith(ROOT) for pid in here):
            os.remove(lock)
            print(f"removed {lock}, left by a git that was killed")
            return
    time.sleep(0.1)


# ---------------------------------------------------------------------------
# Locks and processes
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def state_lock():
    """Held while the state of turns is read and changed: a moment each time, never while something runs."""
    os.makedirs(RUNS, exist_ok=True)
    with open(os.path.join(RUNS, "lock"), "w") as lock:
        for attempt in range(600):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 599:
                    raise Refusal(f"another experiment.py has held {lock.name} for a minute: end it") from None
                time.sleep(0.1)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a supervisor that was forked and not yet executed


def lock_file(path, wait=0.0):
    """The descriptor of the file `path`, locked; None where another process holds it for longer than `wait` seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(descriptor)
                return None
            time.sleep(0.1)


def is_supervised(number):
    """Whether a supervisor of this run lives: it holds the lock from before it is started until it ends, however it ends."""
    with contextlib.suppress(FileNotFoundError), open(run_file(number, "alive")) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cache_folder():
    cache = os.path.expanduser(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch")
    return os.path.join(ROOT, cache)


def has_gpu():
    """Whether there is a GPU in this machine, by its device files; AUTORESEARCH_HARDWARE is taken at its word."""
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    return told != "none" if told else any(map(glob.glob, ("/dev/kfd", "/dev/nvidia[0-9]*", "/dev/dxg")))


def gpu_name():
    """What a run occupies: the first GPU that it may see, or the CPU."""
    if not has_gpu():
        return "cpu"
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(variable) is not None:
            first = os.environ[variable].split(",")[0].strip()
            return f"gpu-{re.sub(r'[^A-Za-z0-9-]', '', first)}" if first not in ("", "-1") else "cpu"
    return "gpu-0"


def processes():
    """Every process that can be seen: pid, name, state, parent, session, start."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as f:
                left, _, right = f.read().decode("utf-8", "replace").rpartition(")")
                fields = right.split()
                yield {
                    "pid": int(entry),
                    "name": left.partition("(")[2],
                    "state": fields[0],
                    "parent": int(fields[1]),
                    "session": int(fields[3]),
                    "start": fields[19],
                }


def boot_id():
    """Names the time since the machine was started: pids of another time mean other processes."""
    return (read_bytes("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def working_folder(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def processes_of(token, leader):
    """Pids of what a run has started: by the token in their environment, by the session of its first process, `leader`, and by descent.

    Descent from this process: orphans of its run become the supervisor's, and no other caller has children then.
    """
    mark, mine = f"AUTORESEARCH_RUN={token}".encode(), {os.getpid()}
    every = [p for p in processes() if p["pid"] not in mine]
    reused = leader and any(p["pid"] == leader["pid"] and p["start"] != leader["start"] for p in every)
    family, more = mine, mine
    while more:
        more = {p["pid"] for p in every if p["parent"] in more}
        family = family | more
    for process in every:
        if process["state"] in "ZX":
            continue
        ours = process["pid"] in family or bool(leader) and not reused and process["session"] == leader["pid"]
        if not ours and process["state"] != "D":  # the environment of a process that hangs in the driver may not be readable either
            ours = mark in (read_bytes(f"/proc/{process['pid']}/environ") or b"").split(b"\0")
        if ours:
            yield process["pid"]


def end_processes(token, leader, grace):
    """End everything that a run has started: SIGTERM, SIGKILL after `grace` seconds. Returns the pids that survive even that."""
    start = time.monotonic()
    number = signal.SIGTERM
    while True:
        left = list(processes_of(token, leader))
        if not left:
            return []
        waited = time.monotonic() - start
        if waited > grace + LIMITS["kill"]:
            return left
        if number == signal.SIGTERM or waited > grace:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            number = signal.SIGKILL
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans that have become the supervisor's
                pass
        time.sleep(0.02)


# ---------------------------------------------------------------------------
# Turns: runs/N/
# ---------------------------------------------------------------------------


def run_file(number, name):
    return os.path.join(RUNS, str(number), name)


def last_number():
    return max((int(n) for n in os.listdir(RUNS) if n.isdecimal()), default=0) if os.path.isdir(RUNS) else 0


def read_turn(number):
    return read_json(run_file(number, "turn.json")) if number else None


def tried():
    """A line for each run: number, tag, kind, commit (short), seed, digest of the program, what it changed."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(RUNS, "tried.jsonl"), "rb") as f:
        lines = []
        for line in f:
            with contextlib.suppress(ValueError):  # a line that was cut short
                lines.append(json.loads(line))
        keys = {"number", "tag", "kind", "commit", "seed", "digest", "changed"}
        return [line for line in lines if isinstance(line, dict) and keys <= line.keys()]
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


# ---------------------------------------------------------------------------
# The ledger
# ---------------------------------------------------------------------------


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
    text = (read_bytes(path) or b"")[offset:].decode("utf-8", "replace")
    return [row for row in map(parse_row, text.splitlines()) if row]


def is_noise(row):
    return row["description"].startswith("noise: ")


def score(row):
    """val_bpb of a row that has one."""
    return row["val_bpb"] if row["status"] != "crash" and 0 < row["val_bpb"] < 16 else None


def repair_ledger(unfinished):
    """Mend a last line that was torn by a crash or a full disk: whole rows get their end, a piece is cut off (and kept in runs/)."""
    content = read_bytes(LEDGER)
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    piece = content[start:]
    row = parse_row(piece.decode("utf-8", "replace"))
    if row and not (unfinished and row["commit"] == unfinished["short"]):  # somebody's editor
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
        self.settings = read_json(os.path.join(RUNS, f"{tag}.json")) or {}
        self.seed = self.settings.get("seed", 42)

    def number(self, row):
        """The run of a row; None if runs/ doesn't know it."""
        seed = re.match(r"noise: seed (\d+) of ", row["description"])
        return self.numbers.get((row["commit"], int(seed[1]) if seed else None))

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
        number = self.number(row) if row else None
        return (read_json(run_file(number, "outcome.json")) if number else None) or {}


# ---------------------------------------------------------------------------
# The verdict, and finishing a turn
# ---------------------------------------------------------------------------


def verdict(turn, outcome):
    """keep, discard, crash, or None where nothing is known of the idea. Depends on nothing but the two."""
    if outcome["state"] in ("environment", "stopped"):
        return None
    if outcome["state"] != "valid":
        return "discard" if outcome["state"] == "pruned" else "crash"
    if turn["kind"] == "noise":
        return "discard"
    if turn["bar"] is None:
        return "keep"
    value, floor = outcome["summary"]["val_bpb"], turn["floor"] or 0.0
    if value < turn["bar"] - turn["margin"] * floor:
        return "keep"
    return "keep" if turn["simpler"] and value <= turn["bar"] + floor else "discard"


def memory_gb(summary):
    peak = summary.get("peak_vram_mb")
    return peak / 1024 if isinstance(peak, (int, float)) else 0.0


def row_text(turn, outcome, status):
    summary = outcome["summary"] or {}
    valid = outcome["state"] == "valid"
    value, memory = (summary["val_bpb"], memory_gb(summary)) if valid else (0.0, 0.0)
    description = turn["description"]
    if outcome["state"] == "pruned":
        description = f"pruned: {description}"
    elif status == "crash" and outcome["reason"].startswith("invalid"):
        description = f"invalid: {description}"
    return f"{turn['short']}\t{value:.6f}\t{memory:.1f}\t{status}\t{description}\n"


def recorded(turn):
    """The row of this turn, if it has been written."""
    for row in read_rows(turn["ledger"]):
        if row["commit"] == turn["short"] and is_noise(row) == (turn["kind"] == "noise"):
            return row
    return None


def set_index(old, new):
    """Let the index hold the blob `new` for train.py where it holds `old`, so that git status stays clean."""
    entry = git("ls-files", "--stage", "train.py").split()
    if len(entry) > 1 and entry[1] == old:
        git("update-index", "--cacheinfo", f"{entry[0]},{new},train.py")
    git("update-index", "-q", "--refresh", check=False)


def keep(turn):
    """Move the branch to what was tried, if it is still where the run began. Returns a line for the verdict where that can't be."""
    name, commit, parent = branch_of(turn["tag"]), turn["commit"], turn["parent"]
    for _ in range(5):
        tip = resolve(f"refs/heads/{name}")
        if tip is None:
            return f"the branch {name} is gone: git branch {name} {turn['short']} brings it back with this keep"
        if git("merge-base", "--is-ancestor", commit, tip, check=False) is not None:
            break  # done already
        new = commit
        if tip != parent:  # somebody has committed to the branch meanwhile
            if not all(path.endswith(DOCUMENTS) for path in changed_files(parent, tip)):
                return f"the branch moved during the run; this keep is {turn['short']}: git restore train.py && git merge {turn['short']}"
            new = commit_tree(tree_with(resolve(f"{commit}:train.py"), tip), turn["description"], tip, commit)
        if git("update-ref", "-m", f"keep: {turn['description']}", f"refs/heads/{name}", new, tip, check=False) is not None:
            break
    else:
        raise Refusal(f"git can't move the branch {name} to {new[:10]}, the keep of run {turn['number']}: see what git status says")
    if current_tag() == turn["tag"]:
        set_index(resolve(f"{parent}:train.py"), resolve(f"{commit}:train.py"))
    return None


def give_back(turn):
    """The best train.py into the working tree, if there is still what was tried. Returns whether it is there now."""
    if current_tag() != turn["tag"] or read_bytes(TRAIN) != read_bytes(run_file(turn["number"], "train.py")):
        return False
    write_file(TRAIN, git_file(turn["parent"]), os.stat(TRAIN).st_mode & 0o777)
    set_index(resolve(f"{turn['commit']}:train.py"), resolve(f"{turn['parent']}:train.py"))
    return True


def finish(turn):
    """Everything between an outcome and a finished turn, as far as it is not done: row, branch, train.py, verdict.json."""
    number, outcome = turn["number"], read_json(run_file(turn["number"], "outcome.json"))
    status = verdict(turn, outcome)
    notes = []
    if status:
        if not read_bytes(LEDGER):
            append_line(LEDGER, HEADER)
        if not recorded(turn):
            append_line(LEDGER, row_text(turn, outcome, status))
        if status == "keep":
            notes += filter(None, [keep(turn)])
        elif turn["kind"] == "try":
            back = give_back(turn)
            mend = " (to mend it: cp " + os.path.relpath(run_file(number, "train.py"), ROOT) + " train.py)" if status == "crash" else ""
            notes.append(f"train.py is the best's again{mend}" if back else "train.py was edited meanwhile and is left as it is")
    remove_tree()
    lines, code = verdict_lines(turn, outcome, status, notes)
    write_json(run_file(number, "verdict.json"), {"status": status, "code": code, "lines": lines})


def recover():
    """Finish the last turn if it is not finished. Returns the turn that is running now, or None. The state lock is held."""
    for leftover in glob.glob(os.path.join(glob.escape(RUNS), "new*")):
        shutil.rmtree(leftover, ignore_errors=True)
    number = last_number()
    if not number:
        return None
    turn = read_turn(number)
    if turn is None:
        raise Refusal(f"{run_file(number, 'turn.json')} is missing or damaged: move runs/{number} away")
    if read_json(run_file(number, "verdict.json")):  # one that is damaged is made again
        repair_ledger(None)
        return turn if turn["remaining"] and is_supervised(number) else None
    alive = is_supervised(number)  # asked first: a supervisor that ends leaves an outcome
    if not read_json(run_file(number, "outcome.json")):
        if alive:
            return turn
        git("update-ref", reference_of(turn), turn["commit"])
        started = read_json(run_file(number, "process.json"))
        leader = started if started and started["boot"] == boot_id() else None
        left = end_processes(turn["token"], leader, LIMITS["grace"])
        if left:
            outcome = end_state("environment", unkillable(left))
        else:
            outcome = end_state("stopped", "its supervisor was killed" if started else "it was killed before it started")
        write_outcome(turn, outcome)
        print(f"run {number} was cut short: {outcome['reason']}")
    repair_ledger(turn)
    finish(turn)
    return None


def end_state(state, reason):
    return {"state": state, "reason": reason}


def unkillable(pids):
    return f"process {', '.join(map(str, pids))} survives SIGKILL, so the driver hangs: reboot the machine"


def write_outcome(turn, outcome):
    copied = ("number", "tag", "kind", "description", "commit", "parent", "seed", "started")
    empty = dict(seconds={}, exit_code=None, signal=None, state=None, reason=None, summary=None, losses=[], device=None, versions={})
    write_json(run_file(turn["number"], "outcome.json"), {key: turn[key] for key in copied} | empty | outcome)


# ---------------------------------------------------------------------------
# What a verdict says
# ---------------------------------------------------------------------------


def compared(difference):
    """A difference of val_bpb in words."""
    return f"{'better' if difference < 0 else 'worse'} by {abs(difference):.6f} than" if difference else "the same as"


def weight_of(difference, floor, outcome, base):
    """What a difference to the best is worth: in noise floors, and in words."""
    floors = abs(difference) / floor if floor else None
    words = not_comparable(difference, outcome, base)
    if floors is None:
        return f": {words}" if words else " (noise not measured: `noise`)"
    return f" = {floors:.1f} floors: {words or ('real' if floors >= 3 else 'probably real' if floors >= 1 else 'may be luck')}"


def speed(summary, before):
    """Tokens/s of a run over another's, where both do equal work: parameters, depth, tokens a step; None where they don't."""

    def work(s):
        tokens = s["total_tokens"] / s["num_steps"] if "total_tokens" in s else round(s["total_tokens_M"] / s["num_steps"], 3)
        return s.get("num_params_M"), s.get("depth"), tokens

    with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
        return summary["tok_per_sec"] / before["tok_per_sec"] if work(summary) == work(before) else None
    return None


def load(outcome):
    """The share of the CPU that other programs took from a run without a GPU; 0 where the run was too short to tell."""
    total = (outcome.get("seconds") or {}).get("total") or 0
    return (outcome.get("other_cpu") or 0.0) if not has_gpu() and total > 5 else 0.0


def not_comparable(difference, outcome, base):
    """Why a difference to the best says nothing: a slow run that is worse, or a fast one that is better. None where it may be the idea."""
    ratio, busier = speed(outcome["summary"] or {}, base.get("summary") or {}) or 1.0, load(outcome) - load(base)
    for slow, fast, words in ((ratio < 0.9, ratio > 1.1, "speed"), (busier > 0.1, busier < -0.1, "the machine's load")):
        if base and (slow and difference > 0 or fast and difference < 0):
            return f"{words} differs: not comparable"
    return None


def number_text(value, pattern="{:g}"):
    return pattern.format(value) if isinstance(value, (int, float)) else "n/a"


def verdict_lines(turn, outcome, status, notes):
    """(at most 12 short lines, exit code): what whoever started the run has to know."""
    number, summary, state = turn["number"], outcome["summary"] or {}, outcome["state"]
    folder = f"runs/{number}"
    if outcome.get("model"):
        notes = [*notes, f"trained, not evaluated: the model is in {outcome['model']} (train.py --evaluate)"]
    if status is None:
        again = "train.py is as it was: try it again" if turn["kind"] == "try" else f"run it again: {turn['kind']}"
        if state == "stopped":
            return [f"STOPPED run {number}: {outcome['reason']}", f"nothing is recorded; {again}", f"log: {folder}/run.log"], STOPPED
        lines = [
            f"ENVIRONMENT run {number}: {outcome['reason']}",
            "Not the idea's fault: nothing is recorded. End the loop and tell the human.",
        ]
        return [*lines, *log_tail(number, 3), *notes, f"log: {folder}/run.log"], ENVIRONMENT
    if status == "crash" or state == "pruned":
        word = "crash" if status == "crash" else "discard"
        lines = [f"{word} run {number} {turn['short']}: {turn['description']}", outcome["reason"]]
        if status == "crash" and not outcome["reason"].startswith("invalid"):
            lines += [line for line in log_tail(number, 4) if line.removeprefix("FAIL: ")[:200] not in outcome["reason"]]
        return [line[:240] for line in [*lines, *notes, f"log: {folder}/run.log"]], CRASHED if status == "crash" else 0
    series = Series(turn["tag"])
    value = summary["val_bpb"]
    base = (read_json(run_file(turn["base"], "outcome.json")) if turn["base"] else None) or {}
    before = base.get("summary") or {}
    lines = [f"{'noise' if turn['kind'] == 'noise' else status} run {number} {turn['short']}: {turn['description']}"]
    if turn["kind"] == "noise" and series.noise:
        mean, floor, count = series.noise
        lines.append(f"val_bpb {value:.6f}; {count} seeds: mean {mean:.6f}, deviation = noise floor {floor:.6f}")
        if uneven := series.uneven_noise():
            lines.append(f"warning: {UNEVEN.format(100 * uneven)}")
    elif turn["bar"] is None:
        lines.append(f"val_bpb {value:.6f}, the baseline")
    else:
        best = before.get("val_bpb", turn["bar"])
        weight = weight_of(value - best, turn["floor"], outcome, base)
        lines.append(f"val_bpb {value:.6f}, {compared(round(value - best, 6))} the best {best:.6f}{weight}")
        lines += filter(None, ["; ".join(conditions(turn, best))])
    steps = number_text(summary.get("num_steps")) + (f" (best {number_text(before.get('num_steps'))})" if before else "")
    took = outcome["seconds"]
    mfu = f"MFU {summary['mfu_percent']} %, " if isinstance(summary.get("mfu_percent"), float) else ""
    lines.append(
        f"memory {memory_gb(summary):.1f} GB, {steps} steps, {mfu}"
        f"{took['total']:.0f} s ({took['startup']:.0f} start, {took['training']:.0f} training, {took['evaluation']:.0f} evaluation)"
    )
    told = speed_warning(outcome, base, same=turn["kind"] == "noise"), longer(outcome, base)
    lines += [f"warning: {words}" for words in told if words]
    return [*lines, *notes, f"log: {folder}/run.log"], 0


UNEVEN = "the speed of these runs differs by {:.0f} %, so their floor is the machine's load, not seeds: measure it again when it is quiet"


def conditions(turn, best):
    """What else decided a verdict, in words: the bar where it is not the best's number, the options that were given; the best's mean."""
    bar, mean = turn["bar"], turn.get("mean")
    if mean:
        yield f"the best's {mean[1]} runs: mean {mean[0]:.6f}"
    if bar < best:
        yield f"to beat was {bar:.6f}, the lowest so far"
    if turn["margin"]:
        yield f"--margin {turn['margin']:g} asked for less than {bar - turn['margin'] * turn['floor']:.6f}"
    if turn["prune"]:
        yield "--prune did not stop it"


def speed_warning(outcome, base, same):
    """A warning where a run was slower or faster than the best's at equal work, or other programs took much of the CPU; None otherwise."""
    others = outcome.get("other_cpu")
    busy = f"other programs used {100 * others:.0f} % of the CPU" if others and others > 0.1 else None
    ratio = speed(outcome["summary"] or {}, base.get("summary") or {})
    if ratio and not 0.95 <= ratio <= 1.05:
        if ratio < 1:
            cause = "the machine was slow" if same or busy else "the idea costs that, or the machine was slow"
        else:
            cause = "the machine was slow when the best ran" if same else "the idea saves that, or the machine was slow when the best ran"
        size = f"{100 * abs(ratio - 1):.0f} % {'fewer' if ratio < 1 else 'more'} tokens/s than the best at equal size"
        return f"{size}: {cause}{f' ({busy})' if busy else ''}"
    return f"{busy}: the number may be too high" if busy and load(outcome) else None


def longer(outcome, base):
    """A warning where a run trained clearly longer than the best: its own clock is what says when the time budget is used up."""
    took, before = ((o.get("seconds") or {}).get("training") for o in (outcome, base))
    if took and before and took > 1.1 * before + 20:
        return f"training took {took:.0f} s, the best's {before:.0f}: much that is not timed, or more than the time budget"
    return None


def log_tail(number, count):
    """The last lines of a run's log, cut to a length that spares a context."""
    path = run_file(number, "run.log")
    with contextlib.suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, os.path.getsize(path) - 20_000))
        lines = [line.rstrip() for line in re.split(r"[\r\n]+", f.read().decode("utf-8", "replace")) if line.strip()]
        return [line if len(line) <= 160 else line[:80] + " … " + line[-70:] for line in lines[-count:]] if count else []
    return []


# ---------------------------------------------------------------------------
# Looking at what is to be tried
# ---------------------------------------------------------------------------


def parse(source):
    try:
        with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 11) else contextlib.nullcontext():
            compile(source, "train.py", "exec", dont_inherit=True)
            return ast.parse(source)
    except (RecursionError, MemoryError):
        raise Refusal("train.py does not compile: something in it is nested too deeply") from None
    except (SyntaxError, ValueError) as e:
        line = f", line {e.lineno}" if getattr(e, "lineno", None) else ""
        raise Refusal(f"train.py does not compile{line}: {getattr(e, 'msg', e)}") from None


def digest_of(tree):
    """Equal for two programs that differ in comments and layout alone."""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def parts(tree):
    """Name → content of what train.py defines: constants (also in an if), functions, methods."""
    found = {}

    def add(name, node):
        found[name] = found.get(name, "") + ast.dump(node)

    def visit(body, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
                add(node.name, ast.Module([*node.bases, *node.decorator_list], []))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                add(prefix + node.name, node)
            elif isinstance(node, ast.If):
                visit(node.body, prefix)
                visit(node.orelse, prefix)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                for target, value in zip(node.targets[0].elts, node.value.elts):
                    add(prefix + ast.unparse(target), value)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                add(prefix + ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node)
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                add("the rest", node)

    visit(tree.body)
    return found


def changed_names(old, new):
    old, new = parts(old), parts(new)
    return [name for name in {**new, **old} if old.get(name) != new.get(name)] or ["imports"]


FIXED = ("prepare", "machine")


def fixed_names(tree):
    """Name → module.name of what a program imports from the fixed modules."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in FIXED]
    return {a.asname or a.name: f"{node.module}.{a.name}" for node in imports for a in node.names}


def meddling(tree, base=None):
    """[(what, line)]: where train.py changes what is fixed: the modules beside it, what it or `base` imports from them, the seed."""
    modules, names, found = {}, (fixed_names(base) if base else {}) | fixed_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name in FIXED}
        elif isinstance(node, ast.ImportFrom) and node.module in FIXED and any(a.name == "*" for a in node.names):
            found.append((f"imports * from {node.module}", node.lineno))  # then what it changes can't be told
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            root = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                found.append((f"changes {modules[root.id]}{ast.unparse(node)[len(root.id) :]}", line))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in {**names, **modules}:
            found.append((f"changes {names.get(node.id) or modules[node.id]}", line))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            found.append((f"replaces {names[node.name]}", line))
        elif isinstance(node, ast.arg) and node.arg in names:
            found.append((f"hides {names[node.arg]}", line))
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0] if node.args else None
            if called in ("setattr", "delattr", "vars") and isinstance(first, ast.Name) and first.id in modules:
                found.append((f"changes {modules[first.id]}", line))
            elif called in ("manual_seed", "manual_seed_all"):
                found.append(("sets a seed", line))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("AUTORESEARCH_[A-Z_]+", node.value):
            found.append((f"uses {node.value}", line))
    return found


def check_program(tree, base, tip):
    """Refuse a train.py that changes what is fixed, or needs a file that is not on the branch."""
    allowed = collections.Counter(what for what, _ in meddling(base))
    for what, line in meddling(tree, base):
        allowed[what] -= 1
        if allowed[what] < 0:
            raise Refusal(f"train.py, line {line}, {what}: data, metric, time budget and seed are fixed")
    imported = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    for name in sorted(imported):
        for path in (f"{name}.py", name):
            if os.path.exists(os.path.join(ROOT, path)) and not git("ls-tree", "--name-only", tip, path):
                raise Refusal(f"train.py imports {path}, which is not on the branch: only train.py may change, so write it there")


def code_size(source):
    """Words and signs of code in a program, comments left out."""
    leave_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return sum(t.type not in leave_out for t in tokenize.tokenize(io.BytesIO(source).readline))


def check_files(exceptions=("train.py",)):
    """Refuse where a tracked file that affects runs differs from the branch."""
    changed = git("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames").split("\0")
    if any(entry[:2] in ("DD", "AU", "UD", "UA", "DU", "AA", "UU") for entry in changed):
        raise Refusal("a merge is not finished, git status says where: git merge --abort")
    names = [entry[3:] for entry in changed if entry and not entry.endswith(DOCUMENTS) and entry[3:] not in exceptions]
    if names:
        which = "only train.py may differ" if "train.py" in exceptions else "commit them, or put them back"
        raise Refusal(f"unsaved changes in {', '.join(names[:5])}: {which} (git restore {names[0]})")


def check_disk():
    for folder in (ROOT, cache_folder()):
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        free = shutil.disk_usage(folder).free
        if free < LIMITS["disk"]:
            raise Refusal(f"{free / 1e9:.1f} GB free in {folder}, and a run needs {LIMITS['disk'] / 1e9:.1f}: make room", ENVIRONMENT)


# ---------------------------------------------------------------------------
# Starting a turn
# ---------------------------------------------------------------------------

SETTINGS = ("AUTORESEARCH_DATASET", "AUTORESEARCH_TIME_BUDGET", "AUTORESEARCH_CACHE", "AUTORESEARCH_HARDWARE", "GPU_BF16_PEAK_FLOPS")


def adopt_settings(series):
    """The environment that the series was begun with, whatever shell calls: its numbers must compare."""
    begun = series.settings.get("environment")
    if begun is None:
        return
    for variable in ("AUTORESEARCH_DATASET", "AUTORESEARCH_TIME_BUDGET"):
        here = os.environ.get(variable)
        if here and here != begun.get(variable):
            was = begun.get(variable) or "not set"
            raise Refusal(f"{variable} is {here}, and {was} when the series was begun: unset it, or begin a new series")
    os.environ.update(begun)


def reference_of(turn):
    return f"refs/autoresearch/{turn['tag']}/{turn['number']}"


def start_turn(series, kind, description, commit, parent, source, seed, **more):
    """Write down a turn and start its supervisor, detached. Returns its number. The state lock is held."""
    check_disk()
    os.makedirs(cache_folder(), exist_ok=True)
    gpu_path = os.path.join(cache_folder(), f"{gpu_name()}.lock")
    gpu = lock_file(gpu_path, wait=1)
    if gpu is None:
        holder = " ".join((read_bytes(gpu_path) or b"").decode("utf-8", "replace").split())
        other = "" if gpu_name() == "cpu" else ", or give this folder another GPU (CUDA_VISIBLE_DEVICES)"
        raise Refusal(f"{gpu_name()} is in use by {holder or 'another run'}: wait for it{other}")
    number = last_number() + 1
    if resolve(f"refs/autoresearch/{series.tag}/{number}"):  # runs/ was removed: numbers go on
        references = git("for-each-ref", "--format=%(refname)", f"refs/autoresearch/{series.tag}/").split()
        number = max(int(r.rpartition("/")[2]) for r in references) + 1
    os.ftruncate(gpu, 0)
    os.pwrite(gpu, f"run {number} of {ROOT}\n".encode(), 0)
    turn = dict(number=number, tag=series.tag, kind=kind, description=description, commit=commit, parent=parent, seed=seed,
                short=git("rev-parse", "--short=7", commit), token=os.urandom(8).hex(), started=now_text(), bar=series.bar,
                floor=series.noise[1] if series.noise else None, base=series.number(series.best) if series.best else None,
                mean=series.best_mean(),
                ledger=os.path.getsize(LEDGER) if os.path.exists(LEDGER) else 0,
                margin=0.0, simpler=False, prune=False, remaining=0) | more  # fmt: skip
    about = {key: turn.get(key) for key in ("number", "tag", "kind", "seed", "digest", "changed")} | {"commit": turn["short"]}
    append_line(os.path.join(RUNS, "tried.jsonl"), json.dumps(about) + "\n")
    folder = os.path.join(RUNS, "new")  # becomes runs/N when it is complete
    os.mkdir(folder)
    write_json(os.path.join(folder, "turn.json"), turn)
    write_file(os.path.join(folder, "train.py"), source)
    diff = git("diff", "--no-color", "--no-ext-diff", parent, commit, "--", "train.py")
    with open(os.path.join(folder, "change.diff"), "wb") as f:
        f.write(diff.encode("utf-8", "surrogateescape") + b"\n" * bool(diff))
    alive = lock_file(os.path.join(folder, "alive"))
    os.rename(folder, os.path.join(RUNS, str(number)))
    sync_folder(RUNS)
    git("update-ref", reference_of(turn), turn["commit"])
    detach(number, alive, gpu)
    for descriptor in (alive, gpu):
        os.close(descriptor)
    return number


def detach(number, alive, gpu):
    """Start the supervisor as nobody's child in a session of its own, so that it outlives the caller, its shell and its terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        log = os.open(run_file(number, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (alive, gpu):
            os.set_inheritable(descriptor, True)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, os.path.join(ROOT, "experiment.py"), "_supervise", *map(str, (number, alive, gpu))])
    finally:
        os._exit(1)


# ---------------------------------------------------------------------------
# The supervisor: one run from its start to its outcome
# ---------------------------------------------------------------------------


def remove_tree():
    """Remove the worktree, also one that was half made or half removed."""
    if os.path.lexists(TREE):
        git("worktree", "remove", "--force", "--force", TREE, check=False)
        shutil.rmtree(TREE, ignore_errors=True)
    common = os.path.join(ROOT, git("rev-parse", "--git-common-dir"))
    for folder in glob.glob(os.path.join(glob.escape(common), "worktrees", "run*")):
        place = (read_bytes(os.path.join(folder, "gitdir")) or b"").strip()
        if place in (b"", os.fsencode(os.path.join(TREE, ".git"))):
            shutil.rmtree(folder, ignore_errors=True)


def make_tree(turn):
    """A worktree at exactly the commit that is tried, with the checkout's venv."""
    remove_tree()
    git("worktree", "add", "--quiet", "--force", "--force", "--detach", TREE, turn["commit"])
    if read_bytes(os.path.join(TREE, "train.py")) != read_bytes(run_file(turn["number"], "train.py")):
        raise Refusal("git does not check train.py out as it was tried (attributes or line ends?)", ENVIRONMENT)
    os.symlink(os.path.realpath(os.path.join(ROOT, "venv")), os.path.join(TREE, "venv"))


class Log:
    """A file that stays below a size: beyond it the middle is left out, and head and end stay."""

    def __init__(self, path, limit):
        self.file, self.limit, self.size = open(path, "w+b", buffering=0), int(limit), 0  # noqa: SIM115

    def write(self, chunk):
        if self.size + len(chunk) > self.limit:
            self.file.seek(0)
            content = self.file.read() + chunk
            kept = content[: self.limit // 8] + b"\n[... left out: the log is too long ...]\n" + content[-self.limit // 2 :]
            self.file.seek(0)
            self.file.truncate()
            self.size, chunk = 0, kept
        self.file.write(chunk)
        self.size += len(chunk)


WORDS = ("run", "fingerprint", "dataset", "device", "attention", "torch", "triton", "python")  # of the summary; they may look like numbers
STEP = re.compile(r"step (\d{1,18}) \((\d{1,18}(?:\.\d{1,18})?)%\) \| loss: (\S+)")


class Reader:
    """What a run's lines say: its phase, its losses, why it fails, its summary."""

    def __init__(self, deadline, reference=None):
        self.start = self.last = time.monotonic()
        self.deadline, self.reference = deadline, reference  # reference: the best's losses, for pruning
        self.first_step = self.evaluation = self.ending = None  # when these began
        self.losses, self.summaries, self.evaluated, self.fault = [], [], [], None
        self.untimed = -1  # the last step that was not timed
        self.open, self.rest, self.worse = None, b"", 0

    def feed(self, chunk):
        self.last = time.monotonic()
        *lines, self.rest = re.split(rb"[\r\n]+", self.rest + chunk)
        if len(self.rest) > 65536:  # a line without end
            self.rest = self.rest[-1024:]
        for line in lines:
            self.line(line.decode("utf-8", "replace"))

    def line(self, text):
        now = time.monotonic()
        if self.open is not None:
            key, colon, value = text.partition(":")
            if colon and re.fullmatch(r"[A-Za-z_][\w.]*", key) and (self.open or key == "val_bpb"):
                if not self.open:
                    self.summaries.append(self.open)
                    self.ending = now
                self.open[key] = value.strip() if key in WORDS else as_number(value.strip())
                return
            self.open = None
        if text == "---":
            self.open = {}
        elif match := STEP.match(text):
            self.first_step = self.first_step or now
            if "warming up" in text:
                self.untimed = int(match[1])
            progress, loss = float(match[2]) / 100, as_number(match[3])
            if isinstance(loss, str):
                self.fail(f"the loss is {loss} at step {int(match[1])}")
            else:
                self.losses.append((progress, loss))
                self.prune()
        elif text.startswith("Evaluating "):
            self.evaluation = self.evaluation or now
        elif match := re.match(r"Evaluated (\d[\d,]{0,25}) tokens: val_bpb (\S+)$", text):
            self.evaluated.append((int(match[1].replace(",", "")), as_number(match[2])))
        elif text.startswith("FAIL: "):
            self.fail(text[6:])

    def fail(self, reason):
        self.fault = self.fault or reason[:300]
        self.ending = self.ending or time.monotonic()

    def prune(self):
        """Count how often in a row the loss is clearly worse than the best's at the same progress."""
        progress, loss = self.losses[-1]
        best = at_progress(self.reference, progress) if self.reference else None
        self.worse = self.worse + 1 if best and progress >= PRUNE_FROM and loss > best * PRUNE_RATIO else 0

    def why_end(self):
        """(state, reason) to end the run now, or None."""
        now = time.monotonic()
        if self.ending and now - self.ending > LIMITS["grace" if self.fault else "ending"]:
            return "crash", self.fault or f"it did not end within {LIMITS['ending']:g} s of its summary"
        if self.ending:
            return None
        if self.worse >= PRUNE_COUNT:
            progress, loss = self.losses[-1]
            return (
                "pruned",
                f"stopped at {100 * progress:.0f} % (--prune): loss {loss:.4f}, the best's was {at_progress(self.reference, progress):.4f}",
            )
        if self.evaluation:
            if now - self.evaluation > LIMITS["evaluation"]:
                return "crash", f"the evaluation had not ended after {LIMITS['evaluation']:g} s"
        elif now - self.start > self.deadline:
            what = "training had not ended" if self.first_step else "there was no first step"
            return "crash", f"{what} {self.deadline:g} s after the start"
        elif self.first_step and now - self.last > LIMITS["silence"]:
            return "crash", f"it hung: no output for {LIMITS['silence']:g} s"
        return None

    def seconds(self):
        end = time.monotonic()
        evaluation = self.evaluation or end
        first = self.first_step or evaluation
        phases = {"startup": first - self.start, "training": evaluation - first, "evaluation": end - evaluation, "total": end - self.start}
        return {key: round(value, 1) for key, value in phases.items()}


PRUNE_FROM, PRUNE_RATIO, PRUNE_COUNT = 0.3, 1.03, 3


def at_progress(losses, progress):
    """The loss of a curve [[progress, loss], …] at `progress`, between its points; None outside."""
    for (p, a), (q, b) in zip(losses, losses[1:]):
        if p <= progress <= q:
            return a + (b - a) * (progress - p) / (q - p) if q > p else b
    return None


def as_number(text):
    """The finite number that a text is, or the text."""
    with contextlib.suppress(ValueError, OverflowError):
        value = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        return value if math.isfinite(value) else text
    return text


def thin(points, most=200):
    """At most `most` of the points, evenly, the last one too."""
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)] if len(points) > most else points


def die_with_parent():
    """In the child: be killed when the supervisor dies, even by SIGKILL."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


LIBC = ctypes.CDLL(None, use_errno=True)


def follow(command, cwd, env, token, log, reader, gpu, started):
    """Run a command to its end, or end it. Returns (exit code or None, (state, reason) or None, pids that survive SIGKILL).

    Never waits for the child: it may hang, flood, or leave children that hold the pipe.
    """
    child = subprocess.Popen(command, cwd=cwd, env=env | {"AUTORESEARCH_RUN": token}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(gpu,), preexec_fn=die_with_parent)  # fmt: skip
    leader = next((p for p in processes() if p["pid"] == child.pid), None)
    leader = {"pid": child.pid, "start": leader["start"], "boot": boot_id()} if leader else None
    with open(started, "w") as f:
        json.dump(leader, f)
    pipe = child.stdout.fileno()
    os.set_blocking(pipe, False)

    def read():
        """Whether there was something."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(pipe, 1 << 16)
            if chunk:
                log.write(chunk)
                reader.feed(chunk)
            return len(chunk) > 0
        return False

    open_, why = True, None
    while child.poll() is None and why is None:
        if open_ and select.select([pipe], [], [], 0.2)[0]:
            open_ = read()
        elif not open_:
            time.sleep(0.02)
        why = ("stopped", interrupted[0]) if interrupted else reader.why_end()
    code = child.poll()
    until = time.monotonic() + 5
    while open_ and time.monotonic() < until and read():
        pass
    left = end_processes(token, leader, LIMITS["grace"] if why else 2)
    if code is None and child.pid not in left:
        code = child.wait()
    while open_ and time.monotonic() < until and read():
        pass
    reader.feed(b"\n")
    child.stdout.close()
    return code, why, left


interrupted = []  # why the supervisor was told to end its run


def cpu_times():
    """(seconds all processors were busy, seconds they had) since boot."""
    with open("/proc/stat") as f:
        user, nice, system, idle, iowait, irq, softirq, *_ = map(int, f.readline().split()[1:])
    busy = user + nice + system + irq + softirq
    return busy / os.sysconf("SC_CLK_TCK"), (busy + idle + iowait) / os.sysconf("SC_CLK_TCK")


def dataset_facts(environment):
    """dataset.json of the dataset that a run uses, {} where it can't be told."""
    name = environment.get("AUTORESEARCH_DATASET") or ("climbmix" if has_gpu() else "demo")
    folder = cache_folder() if name == "climbmix" else os.path.join(cache_folder(), name)
    return read_json(os.path.join(folder, "data", "dataset.json")) or {}


def judge(turn, reader, code, why, expected, tampered):
    """(state, reason) of a run that has ended. A number counts only if all of this holds."""
    if why:
        return why
    if code == ENVIRONMENT:
        return "environment", reader.fault or last_words(turn["number"])
    if code in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return "stopped", "something else ended it"
    if code != 0:
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "crash", "killed by the kernel: out of host memory?"
        if last_words(turn["number"]).startswith("autoresearch: "):  # run.sh and env.sh, before train.py
            return "environment", last_words(turn["number"])
        how = f"exit code {code}" if code > 0 else f"signal {signal_name(-code)}"
        return "crash", reader.fault or f"{last_words(turn['number']) or 'no output'} ({how})"
    if reader.fault or not reader.summaries:
        return "crash", reader.fault or "it ended without a summary"
    if len(reader.summaries) > 1:
        return "crash", f"invalid: {len(reader.summaries)} summaries"
    summary = reader.summaries[0]
    value = summary["val_bpb"]
    if summary.get("run") != turn["token"]:
        return "crash", "invalid: the summary is not this run's (its `run` line)"
    if isinstance(value, str) or not 0 < value < 16:  # NaN too
        return "crash", f"invalid: val_bpb is {value}, which no model has"
    if [v for _, v in reader.evaluated] != [value]:
        found = ", ".join(str(v) for _, v in reader.evaluated) or "nothing"
        return "crash", f"invalid: the summary says {value} and prepare.evaluate_bpb {found}"
    for key, want in {"seed": turn["seed"], "eval_tokens": expected.get("eval_tokens")}.items():
        if want is not None and summary.get(key) != want:
            return "crash", f"invalid: {key} is {summary.get(key)} and must be {want}"
    if expected.get("eval_tokens") not in (None, reader.evaluated[0][0]):
        return "crash", f"invalid: {reader.evaluated[0][0]} tokens were evaluated and not {expected['eval_tokens']}"
    if expected.get("fingerprint") not in (None, summary.get("fingerprint")):
        return (
            "environment",
            f"fingerprint {summary.get('fingerprint')}, the baseline's was {expected['fingerprint']}: the data has changed",
        )
    if expected["untimed"] is not None and reader.untimed >= expected["untimed"]:
        return "crash", f"invalid: step {reader.untimed} was not timed, and only the first {expected['untimed']} are free"
    took, steps = (as_number(str(summary.get(key))) for key in ("training_seconds", "num_steps"))
    if not isinstance(took, str) and not isinstance(steps, str):
        # The last step begins within the budget and may end beyond it; a machine that paused meanwhile is not the idea's fault.
        step = took / max(1, steps - (expected["untimed"] or 0))
        if took > expected["budget"] + max(2 * step, 0.05 * expected["budget"]) + 2:
            return "crash", f"invalid: it trained for {took} s, and the time budget is {expected['budget']} s"
    if tampered:
        return "crash", f"invalid: the run changed {tampered}"
    return "valid", None


def signal_name(number):
    """SIGSEGV for 11; the number of one without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def last_words(number):
    return (log_tail(number, 1) or [""])[0]


def blame_machine(state, reason, number):
    """A crash that is the machine's fault after all, as ("environment", reason): only where a test of the machine says so."""
    if state != "crash" or reason.startswith("invalid"):
        return state, reason
    end = "\n".join(log_tail(number, 40))
    if re.search("No space left on device|Disk quota exceeded", end):
        try:
            check_disk()
        except Refusal as e:
            return "environment", str(e)
    suspicious = re.search(r"\b(HIP|CUDA|hip|cuda|HSA|NVML|ROCm)\b|hipError|cudaError", end) or reason.startswith("it hung")
    if suspicious and has_gpu():
        python = os.path.join(ROOT, "venv", "bin", "python")
        probe = [python, "-W", "ignore", "-c", "import torch; assert torch.ones(64, device='cuda').sum().item() == 64"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True, timeout=LIMITS["silence"])
            if done.returncode:
                said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                return "environment", f"the GPU no longer works, for any program: {said[:200]} (a reboot may help)"
        except subprocess.TimeoutExpired:
            return "environment", "the GPU no longer answers, to any program: reboot the machine"
    return state, reason


def run(turn, gpu):
    """Run one experiment and write its outcome."""
    number = turn["number"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"AUTORESEARCH_SEED": str(turn["seed"]), "AUTORESEARCH_CACHE": cache_folder(), "PYTHONUNBUFFERED": "1"}
    log = Log(run_file(number, "run.log"), LIMITS["log"])
    started = run_file(number, "process.json")
    if turn["kind"] == "baseline":  # the one run before which something may be missing: run.sh sets it up; --help then ends train.py
        reader = Reader(LIMITS["setup"])
        code, why, left = follow(["./run.sh", "--help"], ROOT, environment, turn["token"], log, reader, gpu, started)
        if code != 0 or why:
            return why if why and why[0] == "stopped" else ("environment", reader.fault or f"setting up failed: {last_words(number)}"), {}
        log.file.truncate(0)
        log.file.seek(0)
        log.size = 0
    make_tree(turn)
    facts = dataset_facts(environment)
    budget = as_number(str(environment.get("AUTORESEARCH_TIME_BUDGET") or facts.get("time_budget")))
    budget = 600 if isinstance(budget, str) else budget
    warmup = re.search(rb"^WARMUP_STEPS = (\d+)", read_bytes(os.path.join(TREE, "prepare.py")) or b"", re.M)
    expected = {"eval_tokens": facts.get("eval_tokens"), "untimed": int(warmup[1]) if warmup else None, "budget": budget}
    series = Series(turn["tag"])
    if turn["bar"] is not None:
        expected["fingerprint"] = (series.outcome(series.baseline).get("summary") or {}).get("fingerprint")
    reference = series.outcome(series.best).get("losses") if turn["prune"] and series.best else None
    reader = Reader(budget + LIMITS["training"], reference)
    ours = sum(os.times()[:4])
    busy, had = cpu_times()
    code, why, left = follow(["./run.sh"], TREE, environment, turn["token"], log, reader, gpu, started)
    busy, had = cpu_times()[0] - busy, cpu_times()[1] - had
    ours = sum(os.times()[:4]) - ours
    tampered = (git("diff", "--name-only", turn["commit"], cwd=TREE, check=False) or "").split("\n")[0]
    end = judge(turn, reader, code, why, expected, tampered)
    end = ("environment", unkillable(left)) if left else blame_machine(*end, number)
    summary = reader.summaries[-1] if reader.summaries else None
    facts = dict(
        seconds=reader.seconds(),
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 else None,
        summary=summary,
        losses=thin([list(point) for point in reader.losses]),
        device=(summary or {}).get("device"),
        versions={key: summary[key] for key in ("python", "torch", "triton") if key in summary} if summary else {},
        other_cpu=round(max(0.0, busy - ours) / had, 3) if had > 0 else None,
    )
    model = os.path.join(TREE, "unevaluated.pt")
    if end[0] != "valid" and os.path.exists(model):  # trained, not evaluated: the last such model stays
        os.replace(model, os.path.join(RUNS, "unevaluated.pt"))
        facts["model"] = "runs/unevaluated.pt"
    return end, facts


def supervise(number, alive, gpu):
    """The detached process: run, write the outcome, finish the turn, start the next repeat. It holds the lock `alive` until it ends."""
    turn = read_turn(number)
    LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what the run leaves behind becomes ours, and is ended
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, lambda which, frame: interrupted.append(interrupted_by(which)))
    try:
        (state, reason), facts = run(turn, gpu)
    except Refusal as e:
        state, reason, facts = "environment", str(e), {}
    except OSError as e:
        state, reason, facts = "environment", f"{e}", {}
    except Exception as e:
        traceback.print_exc()
        state, reason, facts = "environment", f"experiment.py itself failed: {type(e).__name__}: {e} (runs/{number}/supervisor.log)", {}
    write_outcome(turn, end_state(state, reason) | facts)
    os.close(gpu)
    with state_lock():
        if not os.path.exists(run_file(number, "verdict.json")):
            recover()
        if turn["remaining"] and state == "valid" and last_number() == number and not stop_requested() and current_tag() == turn["tag"]:
            start_noise(Series(turn["tag"]), turn["remaining"])
    if os.path.exists(os.path.join(ROOT, "results.py")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([os.path.join(ROOT, "venv", "bin", "python"), "results.py"], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=120)


def interrupted_by(which):
    return "it was told to stop" if which == signal.SIGTERM else f"it was ended by {signal.Signals(which).name}"


# ---------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------


NO_SERIES = "no series is checked out: begin one (python3 experiment.py begin TAG) or git switch autoresearch/TAG"


def stop_requested():
    return os.path.exists(os.path.join(RUNS, "stop"))


def ready_series():
    """The series that is checked out, ready for another run; a Refusal says what is in the way. The state lock is held."""
    if stop_requested():
        raise Refusal("the human has asked to stop: end the loop (`stop --undo` allows runs again)", STOPPED)
    if running := recover():
        raise Refusal(f"run {running['number']} is still running: wait for it")
    tag = current_tag()
    if tag is None:
        raise Refusal(NO_SERIES)
    series = Series(tag)
    if series.best is None:
        raise Refusal(f"this series has no baseline yet: python3 experiment.py begin {tag}")
    if not series.settings:  # its seed, its dataset: other ones would not compare
        raise Refusal(f"runs/{tag}.json, with what the series was begun with, is gone: bring it back, or begin another tag")
    adopt_settings(series)
    number = series.number(series.best)
    best = read_turn(number)["commit"] if number else resolve(series.best["commit"])
    head = resolve("HEAD")
    if best is None or git("merge-base", "--is-ancestor", best, head, check=False) is None:
        if best and number:
            raise Refusal(f"{branch_of(tag)} was moved by hand and has lost its best: git merge {series.best['commit']} brings it back")
        raise Refusal(f"results.tsv is another series' (its best, {series.best['commit']}, is not on {branch_of(tag)}): move it into runs/")
    if head != best:
        changed = changed_files(best, head)
        if "train.py" in changed:
            raise Refusal(
                f"train.py was committed by hand, and `try` does that: git reset --soft {best[:10]} takes the commit back, not the edit"
            )
        if others := [name for name in changed if not name.endswith(DOCUMENTS)]:
            raise Refusal(f"{', '.join(others[:3])} changed on the branch since the best: numbers would not compare, begin a new series")
    check_files()
    return series, head


def clean(description):
    """One line without tabs, of a length that a table bears."""
    text = " ".join("".join(c if c.isprintable() else " " for c in description).split())
    if not text:
        raise Refusal('say what is tried: experiment.py try "lower embedding rate"')
    if text.startswith(("noise:", "pruned:", "invalid:")):
        raise Refusal(f"a description can't begin with {text.split(':')[0]}: which the ledger uses itself")
    return text[:200]


def command_begin(arguments):
    tag = arguments.tag
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag) or git("check-ref-format", f"refs/heads/{branch_of(tag)}", check=False) is None:
        raise Refusal(f"{tag!r} is no tag: use letters, digits, - and _, such as nov29")
    seed = os.environ.get("AUTORESEARCH_SEED") or "42"
    if not seed.isdecimal() or int(seed) >= 2**63:
        raise Refusal(f"AUTORESEARCH_SEED={seed!r} is no seed; use a whole number, such as 42")
    with state_lock():
        if running := recover():
            raise Refusal(f"run {running['number']} is still running: wait for it")
        if not os.path.exists(TRAIN):
            raise Refusal("there is no train.py here")
        head = resolve("HEAD")
        if head is None:
            raise Refusal("the branch has no commit yet: commit the project first")
        check_files(exceptions=())
        source = git_file(head)
        digest = digest_of(parse(source))
        check_disk()
        exists, aside = resolve(f"refs/heads/{branch_of(tag)}"), None
        if exists and current_tag() != tag:
            raise Refusal(f"{branch_of(tag)} exists: git switch {branch_of(tag)} goes on with it; a new series needs another tag")
        owners = {line["commit"]: line["tag"] for line in tried()}
        tags = [owners.get(row["commit"]) for row in read_rows()]
        if exists and tags and tags[-1] == tag:
            if any(row["status"] == "keep" for row in read_rows()):
                raise Refusal(f"{branch_of(tag)} has begun: go on with try, or begin another tag")
        elif exists and not tags and any((read_json(run_file(t["number"], "verdict.json")) or {}).get("status") for t in Series(tag).tried):
            raise Refusal(f"{branch_of(tag)} has begun and results.tsv is missing: bring it back, or begin another tag")
        else:
            aside = set_ledger_aside(next(filter(None, reversed(tags)), "earlier"))
        if not exists:
            try:
                git("switch", "--quiet", "--create", branch_of(tag))
            except Refusal:  # then nothing has happened
                if aside:
                    os.rename(aside, LEDGER)
                raise
        if aside:
            print(f"results.tsv of an earlier series is now {os.path.relpath(aside, ROOT)}")
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(RUNS, "stop"))
        settings = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
        write_json(os.path.join(RUNS, f"{tag}.json"), {"tag": tag, "seed": int(seed), "environment": settings, "begun": now_text()})
        # A commit of its own, so that a commit names one run of one series.
        commit = commit_tree(resolve(f"{head}^{{tree}}"), f"baseline\n\nRun {last_number() + 1} of {branch_of(tag)}.\n", head)
        number = start_turn(Series(tag), "baseline", "baseline", commit, head, source, int(seed),
                            digest=digest, changed=[])  # fmt: skip
    print(f"run {number}: the baseline of {branch_of(tag)}" + ("" if exists else f" (from {head[:7]})"))
    return wait_for(arguments.wait)


def git_file(commit):
    """train.py of a commit, as it is checked out."""
    return git_bytes("cat-file", "--filters", f"{commit}:train.py")


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


def command_try(arguments):
    description = clean(arguments.description)
    if not 0 <= arguments.margin < math.inf:
        raise Refusal(f"--margin {arguments.margin}: use a number of noise floors, such as 1")
    with state_lock():
        series, head = ready_series()
        source = read_bytes(TRAIN)
        if source is None:
            raise Refusal("train.py is missing: git restore train.py")
        if arguments.margin and not series.noise:
            raise Refusal("--margin is in noise floors, and the noise is not measured yet: experiment.py noise 3")
        tree, best = parse(source), git_file(head)
        base = parse(best)
        digest = digest_of(tree)
        if digest == digest_of(base):
            raise Refusal("train.py is the best's program: edit it first")
        rows = {series.number(row): row for row in series.rows}
        for line in reversed(series.tried):
            if line["digest"] == digest and line["kind"] != "noise" and line["number"] in rows:
                row = rows[line["number"]]
                raise Refusal(
                    f"tried already, run {line['number']}: {row['commit']} {row['val_bpb']:.6f} {row['status']} {row['description']}"
                )
        check_program(tree, base, head)
        if arguments.simpler:
            more = code_size(source) - code_size(best)
            if more >= 0:
                raise Refusal(f"--simpler: this train.py has {more} more words of code than the best, so it is not simpler")
            description = f"simpler: {description}"
        blob = git("hash-object", "-w", "--path=train.py", "--stdin", data=source)
        commit = commit_tree(tree_with(blob, head), f"{description}\n\nRun {last_number() + 1} of {branch_of(series.tag)}.\n", head)
        number = start_turn(series, "try", description, commit, head, source, series.seed, digest=digest,
                            changed=changed_names(base, tree), margin=arguments.margin, simpler=arguments.simpler,
                            prune=arguments.prune)  # fmt: skip
    return wait_for(arguments.wait, number)


def start_noise(series, count):
    """Start one repeat of the best with a seed that it has not had, and `count` - 1 after it."""
    best = series.best["commit"]
    used = {series.seed} | {line["seed"] for line in series.tried if line["commit"] == best}
    seed = next(seed for seed in itertools.count(42) if seed not in used)
    commit = read_turn(series.number(series.best))["commit"] if series.number(series.best) else resolve(best)
    return start_turn(series, "noise", f"noise: seed {seed} of {best}", commit, commit, git_file(commit), seed, remaining=count - 1)


def command_noise(arguments):
    if not 1 <= arguments.count <= 100:
        raise Refusal(f"noise {arguments.count}: use 1 to 100 repeats")
    with state_lock():
        series, _ = ready_series()
        start_noise(series, arguments.count)
    return wait_for(arguments.wait)


def command_wait(arguments):
    return wait_for(arguments.wait)


def wait_for(seconds, number=None):
    """Wait until no run is under way; print the verdict of each that ended meanwhile. Returns the last one's exit code, or 75."""
    until = time.monotonic() + seconds
    number, pause, code = number or last_number(), 0.02, None
    if not number:
        raise Refusal("nothing has been run yet")
    while True:
        said = read_json(run_file(number, "verdict.json"))
        if said:
            print("\n".join(said["lines"]), flush=True)
            code = said["code"]
            while is_supervised(number) and read_turn(number)["remaining"] and last_number() == number:
                time.sleep(0.05)  # it starts the next repeat
            if last_number() > number and read_turn(number)["remaining"]:
                number += 1
                continue
            return code
        if not is_supervised(number):
            with state_lock():
                recover()
            if read_turn(number) is None:
                raise Refusal(f"runs/{number} was removed: nothing is known of that run")
            continue
        if not time.monotonic() < until:
            print(f"run {number} is still running ({progress_of(number)}): python3 experiment.py wait")
            return RUNNING
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(pause * 1.2, 1.0)


def progress_of(number):
    """How far a run is, in words, from its log."""
    for line in reversed(log_tail(number, 60)):
        if line.startswith("Evaluating"):
            return "evaluating"
        if match := STEP.match(line):
            left = re.search(r"remaining: (\d+)s", line)
            return f"{match[2]} %, loss {match[3]}" + (f", {left[1]} s of training left" if left else "")
    return f"starting; {last_words(number)[:100] or 'no output yet'}"


def command_stop(arguments):
    path = os.path.join(RUNS, "stop")
    with state_lock():
        running = recover()
        if arguments.undo:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            print("runs are allowed again")
            return 0
        write_file(path, b"")
        if running and arguments.now:
            end_supervisor(running["number"])
    if running and arguments.now:
        return wait_for(LIMITS["grace"] + LIMITS["kill"] + 10, running["number"])
    print(f"no new run after run {running['number']}" if running else "no new run", "(stop --undo allows them again)")
    return 0


def end_supervisor(number):
    """Tell the run's supervisor to end it."""
    command = f"{os.path.join(ROOT, 'experiment.py')}\0_supervise\0{number}\0".encode()
    for process in processes():
        if command in (read_bytes(f"/proc/{process['pid']}/cmdline") or b""):
            os.kill(process["pid"], signal.SIGTERM)


def command_show(arguments):
    number = arguments.number or last_number()
    turn = read_turn(number)
    if turn is None:
        raise Refusal(f"there is no run {number}: runs go from 1 to {last_number()}" if last_number() else "nothing has been run yet")
    outcome, said = read_json(run_file(number, "outcome.json")) or {}, read_json(run_file(number, "verdict.json"))
    print("\n".join(said["lines"] if said else [f"run {number} is running ({progress_of(number)}): {turn['description']}"]))
    print(f"{turn['kind']}, commit {turn['commit'][:10]} on {turn['parent'][:10]}, seed {turn['seed']}, started {turn['started']}")
    if outcome.get("summary"):
        print("summary: " + ", ".join(f"{key} {value}" for key, value in outcome["summary"].items() if key != "run")[:1000])
    diff = (read_bytes(run_file(number, "change.diff")) or b"").decode("utf-8", "replace").splitlines()[2:]
    print(
        "\n".join(line[:200] for line in diff[:80])
        + (f"\n… {len(diff) - 80} more lines in runs/{number}/change.diff" if len(diff) > 80 else "")
    )
    print("end of the log:\n" + "\n".join(log_tail(number, 8)))
    return 0


# ---------------------------------------------------------------------------
# Status
# ---------------------------------------------------------------------------


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
    turn = running and {"number": running["number"], "description": running["description"], "progress": progress_of(running["number"])}
    noise = series.noise and dict(zip(("mean", "floor", "seeds"), series.noise)) | {"uneven": series.uneven_noise()}
    return {
        "tag": series.tag,
        "running": turn,
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


def command_status(arguments):
    with state_lock():
        running = recover()
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
    if running:
        print(f"running: run {running['number']} ({status['running']['progress']}): {running['description']}")
    else:
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
    print(f"experiments since the last keep: {status['since_last_keep']}" + (f"; {seconds_text(took)} each" if took else ""))
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


def main():
    parser = argparse.ArgumentParser(description="One experiment a command; what is better is kept, and everything is recorded.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, function, text, wait=False):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if wait:
            command.add_argument("--wait", type=float, default=540, metavar="S", help="seconds to wait for the run (default: 540)")
        return command

    begin = add("begin", command_begin, "Begin a new series: a branch, and the baseline.", wait=True)
    begin.add_argument("tag", help="for example nov29; the branch is autoresearch/TAG")
    attempt = add("try", command_try, "Run the working train.py, judge and record it, keep it if it is better.", wait=True)
    attempt.add_argument("description", help="what it tries, in a few words")
    attempt.add_argument("--margin", type=float, default=0.0, metavar="F", help="keep only if better by F noise floors (default: 0)")
    attempt.add_argument("--simpler", action="store_true", help="less code: keep it at an equal score too (within a noise floor)")
    attempt.add_argument("--prune", action="store_true", help="stop it when its loss is clearly worse than the best's at the same progress")
    add("wait", command_wait, "Wait for the run and print its verdict.", wait=True)
    noise = add("noise", command_noise, "Run the best again with other seeds, to know what is luck.", wait=True)
    noise.add_argument("count", type=int, nargs="?", default=3, metavar="K", help="how many seeds (default: 3)")
    add("status", command_status, "Where the series stands.").add_argument("--json", action="store_true", help="for programs")
    show = add("show", command_show, "One run: verdict, summary, diff, end of the log.")
    show.add_argument("number", type=int, nargs="?", metavar="N", help="default: the last")
    stop = add("stop", command_stop, "No new run after the current one.")
    stop.add_argument("--now", action="store_true", help="end the current run too; it is not recorded")
    stop.add_argument("--undo", action="store_true", help="allow runs again")
    if sys.argv[1:2] == ["_supervise"]:
        return supervise(*map(int, sys.argv[2:]))
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # 0 to 2 may have been closed: no other file must get their numbers
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # descriptions and logs hold characters that not every locale has
        stream.reconfigure(errors="backslashreplace")
    arguments = parser.parse_args()
    try:
        check_repository()
        return arguments.function(arguments)
    except Refusal as e:
        print(f"experiment.py: {e}", file=sys.stderr)
        return e.code
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        print(f"experiment.py: {e}", file=sys.stderr)
        return ENVIRONMENT
    except RecursionError:
        print("experiment.py: train.py is nested too deeply to be looked at", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\nexperiment.py: a run goes on without you; `wait` shows its verdict", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

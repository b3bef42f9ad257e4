"""A turn: started once, finished by whoever comes by. Its state is in runs/N/ and in git."""

import itertools
import json
import os
import sys

from harness.common.text import visible

from .branch import best_commit, score_of
from .files import (
    LEDGER,
    ROOT,
    RUNS,
    Refusal,
    append_line,
    last_number,
    now_text,
    numbers,
    read_turn,
    read_verdict,
    run_file,
    sync_folder,
    write_file,
    write_json,
)
from .processes import check_disk, is_supervised, lock_file, take_gpu
from .proposal import changed_names, digest_of, parse
from .repository import branch_of, commit_tree, git, git_file, resolve, tree_with


def standing(series):
    """What a run is judged against: the series as it is now."""
    floor = series.noise[1] if series.noise else None
    return dict(bar=series.bar, floor=floor, base=series.number(series.best) if series.best else None, mean=series.best_mean())


def propose(series, parent, source, description, **more):
    """Start a turn for a train.py, its content, that was edited from `parent`'s and has been looked at. Returns its number."""
    blob = git("hash-object", "-w", "--path=train.py", "--stdin", data=source)
    message = f"{description}\n\nRun {next_number(series.tag)} of {branch_of(series.tag)}.\n"
    commit = commit_tree(tree_with(blob, parent), message, parent)
    tree, base = parse(source), parse(git_file(parent))
    return start_turn(series, "try", description, commit, parent, source, series.seed, digest=digest_of(tree),
                      changed=changed_names(base, tree), **more)  # fmt: skip


def check_untried(series, digest, best):
    """Refuse a program that is the best's, or was tried, or is being tried. A candidate may be tried again."""
    if digest == digest_of(parse(best)):
        raise Refusal("train.py is the best's program in all that runs (comments, docstrings and layout aside): edit it first")
    rows = {series.number(row): row for row in series.rows}
    for line in reversed(series.tried):
        if line["digest"] != digest or line["kind"] == "noise":
            continue
        row = rows.get(line["number"])
        if row and not row["description"].startswith("candidate: "):
            said = f"{row['commit']} {row['val_bpb']:.6f} {row['status']} {row['description']}"
            raise Refusal(f"tried already, run {line['number']}: {said}")
        if not row and is_supervised(line["number"]):
            raise Refusal(f"run {line['number']} is trying it")


def unfinished():
    """(turns without a verdict, the numbers of those that are damaged).

    Those come first whose verdict was on its way: what it was judged against must not change.
    """
    last = last_number()
    turns, damaged = [], []
    for number in numbers():
        if os.path.exists(run_file(number, "verdict.json")) and (
            number != last or read_verdict(number)
        ):  # one that is damaged is made again
            continue
        turn = read_turn(number)
        if turn is None:
            damaged.append(number)
        else:
            turns.append(turn)
    return sorted(turns, key=lambda turn: "outdated" not in turn), damaged


def last_local():
    """The last turn that ran on this machine; None if there was none lately."""
    last = last_number()
    turns = map(read_turn, range(last, max(0, last - 200), -1))
    return next((turn for turn in turns if turn and turn.get("on") is None), None)


def end_state(state, reason):
    return {"state": state, "reason": reason}


def write_outcome(turn, outcome):
    copied = ("number", "tag", "kind", "description", "commit", "parent", "seed", "started")
    empty = dict(seconds={}, exit_code=None, signal=None, state=None, reason=None, summary=None, losses=[], device=None, versions={})
    outcome = outcome | {"reason": visible(outcome["reason"]) if outcome["reason"] else None}
    write_json(run_file(turn["number"], "outcome.json"), {key: turn[key] for key in copied} | empty | outcome)


def reference_of(turn):
    return f"refs/autoresearch/{turn['tag']}/{turn['number']}"


def next_number(tag):
    """The number of the next run. Where runs/ was removed, numbers go on after those that git knows."""
    number = last_number() + 1
    if resolve(f"refs/autoresearch/{tag}/{number}"):
        references = git("for-each-ref", "--format=%(refname)", f"refs/autoresearch/{tag}/").split()
        number = max(int(r.rpartition("/")[2]) for r in references) + 1
    return number


def start_turn(series, kind, description, commit, parent, source, seed, **more):
    """Write down a turn and start its supervisor, detached. Returns its number. The state lock is held."""
    check_disk()
    number = next_number(series.tag)
    gpu = -1 if more.get("on") else take_gpu(f"run {number} of {ROOT}")
    turn = dict(number=number, tag=series.tag, kind=kind, description=description, commit=commit, parent=parent, seed=seed,
                short=git("rev-parse", "--short=7", commit), token=os.urandom(8).hex(), started=now_text(),
                ledger=os.path.getsize(LEDGER) if os.path.exists(LEDGER) else 0,
                margin=0.0, simpler=False, prune=False, remaining=0, file=None, on=None, cores=None, again=None, times=0)  # fmt: skip
    turn |= standing(series) | {"began": score_of(series, parent) if kind == "try" else None} | more
    about = {key: turn.get(key) for key in ("number", "tag", "kind", "seed", "digest", "changed", "again")} | {"commit": turn["short"]}
    append_line(os.path.join(RUNS, "tried.jsonl"), json.dumps(about) + "\n")
    folder = os.path.join(RUNS, "new")  # becomes runs/N when it is complete
    os.mkdir(folder)
    write_json(os.path.join(folder, "turn.json"), turn)
    write_file(os.path.join(folder, "train.py"), source)
    diff = git("diff", "--no-color", parent, commit, "--", "train.py")
    with open(os.path.join(folder, "change.diff"), "wb") as f:
        f.write(diff.encode("utf-8", "surrogateescape") + b"\n" * bool(diff))
    alive = lock_file(os.path.join(folder, "alive"))
    git("update-ref", reference_of(turn), turn["commit"])  # first: a turn whose commit git has collected could never be finished
    os.rename(folder, os.path.join(RUNS, str(number)))
    sync_folder(RUNS)
    detach(number, alive, gpu)
    os.close(alive)
    if gpu >= 0:
        os.close(gpu)
    return number


def detach(number, alive, gpu):
    """Start the supervisor as nobody's child in a session of its own, so that it outlives the caller, its shell and its terminal.

    alive, gpu: descriptors of locks that it is to hold; gpu is -1 for a run elsewhere.
    """
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
        for descriptor in (alive, gpu) if gpu >= 0 else (alive,):
            os.set_inheritable(descriptor, True)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, os.path.join(ROOT, "experiment.py"), "_supervise", *map(str, (number, alive, gpu))])
    finally:
        os._exit(1)


def start_noise(series, count, before=None, **more):
    """Start one repeat of the best with a seed that it has not had, and `count` - 1 after it. Returns its number.

    before: the turn whose repeats these go on with; they are of its commit, also where another was kept meanwhile.
    """
    best, commit = (before["short"], before["commit"]) if before else (series.best["commit"], best_commit(series))
    used = {series.seed} | {line["seed"] for line in series.tried if line["commit"] == best}
    seed = next(seed for seed in itertools.count(42) if seed not in used)
    return start_turn(series, "noise", f"noise: seed {seed} of {best}", commit, commit, git_file(commit), seed, remaining=count - 1, **more)

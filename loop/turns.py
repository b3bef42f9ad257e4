"""A turn: started once, finished by whoever comes by. Its state is in runs/N/ and in git."""

import glob
import itertools
import json
import os
import shutil
import sys

from .files import (
    DOCUMENTS,
    HEADER,
    LEDGER,
    LIMITS,
    ROOT,
    RUNS,
    STOPPED,
    TRAIN,
    Refusal,
    append_line,
    last_number,
    now_text,
    read_bytes,
    read_json,
    read_turn,
    run_file,
    sync_folder,
    write_file,
    write_json,
)
from .ledger import Series, is_noise, read_rows, repair_ledger
from .processes import boot_id, cache_folder, check_disk, end_processes, gpu_name, is_supervised, lock_file, unkillable
from .repository import (
    branch_of,
    changed_files,
    check_files,
    commit_tree,
    current_tag,
    git,
    git_file,
    remove_tree,
    resolve,
    set_index,
    tree_with,
)
from .verdict import row_text, verdict, verdict_lines


def recorded(turn):
    """The row of this turn, if it has been written."""
    for row in read_rows(turn["ledger"]):
        if row["commit"] == turn["short"] and is_noise(row) == (turn["kind"] == "noise"):
            return row
    return None


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


def write_outcome(turn, outcome):
    copied = ("number", "tag", "kind", "description", "commit", "parent", "seed", "started")
    empty = dict(seconds={}, exit_code=None, signal=None, state=None, reason=None, summary=None, losses=[], device=None, versions={})
    write_json(run_file(turn["number"], "outcome.json"), {key: turn[key] for key in copied} | empty | outcome)


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


def start_noise(series, count):
    """Start one repeat of the best with a seed that it has not had, and `count` - 1 after it."""
    best = series.best["commit"]
    used = {series.seed} | {line["seed"] for line in series.tried if line["commit"] == best}
    seed = next(seed for seed in itertools.count(42) if seed not in used)
    commit = read_turn(series.number(series.best))["commit"] if series.number(series.best) else resolve(best)
    return start_turn(series, "noise", f"noise: seed {seed} of {best}", commit, commit, git_file(commit), seed, remaining=count - 1)

"""A turn: started once, finished by whoever comes by. Its state is in runs/N/ and in git."""

import difflib
import glob
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile

from .files import (
    DOCUMENTS,
    HEADER,
    HERE,
    LEDGER,
    LIMITS,
    ROOT,
    RUNS,
    STOPPED,
    Refusal,
    append_line,
    last_number,
    now_text,
    read_bytes,
    read_json,
    read_turn,
    run_file,
    sync_folder,
    tried,
    write_file,
    write_json,
)
from .ledger import Series, repair_ledger, score
from .processes import boot_id, cache_folder, check_disk, end_processes, gpu_name, is_supervised, lock_file, unkillable
from .proposal import changed_names, check_program, digest_of, parse
from .repository import (
    branch_of,
    changed_files,
    check_files,
    commit_tree,
    current_tag,
    git,
    git_bytes,
    git_file,
    remove_tree,
    resolve,
    set_index,
    tree_with,
)
from .verdict import row_text, verdict, verdict_lines


def standing(series):
    """What a run is judged against: the series as it is now."""
    floor = series.noise[1] if series.noise else None
    return dict(bar=series.bar, floor=floor, base=series.number(series.best) if series.best else None, mean=series.best_mean())


def best_commit(series):
    number = series.number(series.best)
    return read_turn(number)["commit"] if number else resolve(series.best["commit"])


def program_of(commit):
    """The blob of its train.py."""
    return resolve(f"{commit}:train.py")


def score_of(series, commit):
    """val_bpb of the best that `commit` has the train.py of; None where there is none."""
    kept = (row for row in reversed(series.rows) if row["status"] == "keep" and score(row))
    return next((score(row) for row in kept if program_of(row["commit"]) == program_of(commit)), None)


def base_reference(tag):
    """What the working train.py was edited from, where something was kept since; absent otherwise."""
    return f"refs/autoresearch-base/{tag}"


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
            new = commit_tree(tree_with(program_of(commit), tip), turn["description"], tip, commit)
        if git("update-ref", "-m", f"keep: {turn['description']}", f"refs/heads/{name}", new, tip, check=False) is not None:
            break
    else:
        raise Refusal(f"git can't move the branch {name} to {new[:10]}, the keep of run {turn['number']}: see what git status says")
    base = base_reference(turn["tag"])
    if current_tag() == turn["tag"]:
        set_index(program_of(parent), program_of(commit))
        if follow_best(turn, ROOT):
            git("update-ref", "-d", base)
        elif not resolve(base):
            git("update-ref", base, parent)
    folder = os.path.dirname(turn["file"] or "")
    # The worktree that it was tried in goes with it, where that is on no branch and still where it was.
    at = None if folder in ("", ROOT) else git("rev-parse", "HEAD", cwd=folder, check=False)
    if at == parent and git("symbolic-ref", "--quiet", "HEAD", cwd=folder, check=False) is None and follow_best(turn, folder):
        git("update-ref", "--no-deref", "HEAD", commit, parent, cwd=folder)
        set_index(program_of(parent), program_of(commit), cwd=folder)
    return None


def follow_best(turn, folder):
    """Bring a keep into a checkout's train.py. False, and left alone, where that is neither the keep nor what it began from."""
    path = os.path.join(folder, "train.py")
    here, began, kept = read_bytes(path), git_file(turn["parent"]), git_file(turn["commit"])
    if here == began:
        write_file(path, kept, os.stat(path).st_mode & 0o777)
    return here in (began, kept)


def give_back(turn):
    """train.py of the checkout's HEAD into the file that was tried, if that is still as it was tried. Returns whether it is there now."""
    path = turn["file"]
    if path is None or read_bytes(path) != read_bytes(run_file(turn["number"], "train.py")):
        return False
    folder = os.path.dirname(path)
    if folder == ROOT and current_tag() != turn["tag"]:
        return False
    head = git("rev-parse", "HEAD", cwd=folder)
    write_file(path, git_file(head), os.stat(path).st_mode & 0o777)
    set_index(program_of(turn["commit"]), program_of(head), cwd=folder)
    if folder == ROOT:
        git("update-ref", "-d", base_reference(turn["tag"]))
    return True


def propose(series, parent, source, description, **more):
    """Start a turn for a train.py, its content, that was edited from `parent`'s and has been looked at. Returns its number."""
    blob = git("hash-object", "-w", "--path=train.py", "--stdin", data=source)
    message = f"{description}\n\nRun {next_number(series.tag)} of {branch_of(series.tag)}.\n"
    commit = commit_tree(tree_with(blob, parent), message, parent)
    tree, base = parse(source), parse(git_file(parent))
    return start_turn(series, "try", description, commit, parent, source, series.seed, digest=digest_of(tree),
                      changed=changed_names(base, tree), **more)  # fmt: skip


def patched(commit, patch):
    """train.py of a commit with a patch applied (both bytes). Refusal where it does not apply, or changes another file."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        git("read-tree", commit, env=index)
        patch = patch if patch.endswith(b"\n") else patch + b"\n"
        if git("apply", "--cached", "-", data=patch, env=index, check=False) is None:  # written by hand, with counts that are not right?
            git("apply", "--cached", "--recount", "-", data=patch, env=index)
        names = git("diff", "--cached", "--name-only", commit, env=index).splitlines()
        if names != ["train.py"]:
            raise Refusal(f"it changes {', '.join(names[:3]) or 'nothing'}: only train.py may differ")
        content = git_bytes("cat-file", "blob", ":train.py", env=index, check=False)
        if content is None:
            raise Refusal("it removes train.py")
        return content


def merged(base, ours, theirs):
    """What `git merge-file` makes of three contents; None where they conflict."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        paths = [os.path.join(folder, name) for name in ("ours", "base", "theirs")]
        for path, content in zip(paths, (ours, base, theirs)):
            with open(path, "wb") as f:
                f.write(content)
        return git_bytes("merge-file", "-p", "--quiet", *paths, check=False)


def try_again(turn):
    """Run a candidate's change on the best of now. Returns (a line for the verdict, the number of that run or None).

    A candidate is not kept itself: the branch is a line of changes of which each was measured on all before it, and it lacks some.
    """
    for line in tried():
        if line.get("again") == turn["number"] and (read_turn(line["number"]) or {}).get("again") == turn["number"]:  # done already
            return f"its change runs again on the best: run {line['number']}", line["number"]
    series = Series(turn["tag"])
    why = f"it began from an older best; to try it as it is: cp runs/{turn['number']}/train.py train.py"
    if turn["on"] is None or current_tag() != turn["tag"]:
        return why, None
    if stop_requested():
        return f"{why} (not run again: the human has asked to stop)", None
    if turn["times"] >= 3:
        return f"{why} (other keeps overtook it {turn['times']} times)", None
    head = resolve(f"refs/heads/{branch_of(turn['tag'])}")
    source = merged(git_file(turn["parent"]), git_file(head), git_file(turn["commit"]))
    if source is None:
        return f"{why}, or merge it by hand: its change conflicts with the best", None
    description = turn["description"].removeprefix("again: ")
    try:
        check_program(parse(source), parse(git_file(head)), head)
        check_untried(series, digest_of(parse(source)), git_file(head))
        number = propose(series, head, source, f"again: {description}"[:200], again=turn["number"], times=turn["times"] + 1,
                         **{key: turn[key] for key in ("margin", "simpler", "prune", "on", "cores")})  # fmt: skip
    except Refusal as e:
        return f"{why} (not run again: {e})", None
    return f"it began from an older best: its change runs again on the best, run {number}", number


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


def finish(turn):
    """Everything between an outcome and a finished turn, as far as it is not done: row, branch, train.py, verdict.json."""
    number, outcome = turn["number"], read_json(run_file(turn["number"], "outcome.json"))
    if "outdated" not in turn:  # written down before the row, so that a verdict stays what it was
        series = Series(turn["tag"])
        if series.best:
            turn |= standing(series)
        outdated = turn["kind"] == "try" and series.best is not None and program_of(turn["parent"]) != program_of(best_commit(series))
        turn["outdated"] = outdated
        write_json(run_file(number, "turn.json"), turn)
    status = verdict(turn, outcome)
    notes, following = [], None
    if status:
        row = row_text(turn, outcome, status)
        if not read_bytes(LEDGER):
            append_line(LEDGER, HEADER)
        if row not in (read_bytes(LEDGER) or b"")[turn["ledger"] :].decode("utf-8", "replace").splitlines(keepends=True):
            append_line(LEDGER, row)
        if status == "keep":
            notes += filter(None, [keep(turn)])
        elif turn["kind"] == "try":
            back = give_back(turn)
            mend = f" (to mend it: cp runs/{number}/train.py train.py)" if status == "crash" else ""
            if turn["on"] is None:
                notes.append(f"train.py is the best's again{mend}" if back else "train.py was edited meanwhile and is left as it is")
        if status == "candidate":
            note, following = try_again(turn)
            notes.append(note)
    if turn["on"] is None:
        remove_tree()
    lines, code = verdict_lines(turn, outcome, status, notes)
    write_json(run_file(number, "verdict.json"), {"status": status, "code": code, "lines": lines, "next": following})


def unfinished():
    """Turns without a verdict, those first whose verdict was on its way: what it was judged against must not change."""
    last = last_number()
    numbers = sorted(int(n) for n in os.listdir(RUNS) if n.isdecimal()) if last else []
    turns = []
    for number in numbers:
        path = run_file(number, "verdict.json")
        if os.path.exists(path) and (number != last or read_json(path)):  # one that is damaged is made again
            continue
        turn = read_turn(number)
        if turn is None:
            raise Refusal(f"{run_file(number, 'turn.json')} is missing or damaged: move runs/{number} away")
        turns.append(turn)
    return sorted(turns, key=lambda turn: "outdated" not in turn)


def recover():
    """Finish each turn that has ended and is not finished. Returns the turns that are under way. The state lock is held."""
    for leftover in glob.glob(os.path.join(glob.escape(RUNS), "new*")):
        shutil.rmtree(leftover, ignore_errors=True)
    running, ended = [], []
    for turn in unfinished():
        number = turn["number"]
        alive = is_supervised(number)  # asked first: a supervisor that ends leaves an outcome
        if read_json(run_file(number, "outcome.json")):
            ended.append(turn)
        elif alive or turn["on"] and revive(turn):
            running.append(turn)
        else:
            git("update-ref", reference_of(turn), turn["commit"])
            write_outcome(turn, cut_short(turn))
            ended.append(turn)
    repair_ledger({turn["short"] for turn in ended})
    for turn in ended:
        finish(turn)
    last = last_local()
    if last and last["remaining"] and last not in running and is_supervised(last["number"]):  # it starts the next repeat
        running.append(last)
    return running


def revive(turn):
    """Start another supervisor for a run in a cluster, which goes on without one. Returns whether that was done."""
    path = run_file(turn["number"], "revived")
    if len(read_bytes(path) or b"") >= 5:
        return False
    append_line(path, ".")
    git("update-ref", reference_of(turn), turn["commit"])
    alive = lock_file(run_file(turn["number"], "alive"), wait=1)  # whoever asks whether one lives holds it for a moment
    if alive is None:
        return True
    detach(turn["number"], alive, -1)
    os.close(alive)
    return True


def last_local():
    """The last turn that ran on this machine; None if there was none lately."""
    last = last_number()
    turns = map(read_turn, range(last, max(0, last - 200), -1))
    return next((turn for turn in turns if turn and turn.get("on") is None), None)


def cut_short(turn):
    """The outcome of a turn whose supervisor was killed, after what it has left is ended."""
    number = turn["number"]
    started = read_json(run_file(number, "process.json"))
    leader = started if started and started["boot"] == boot_id() else None
    left = end_processes(turn["token"], leader, LIMITS["grace"])
    reason = "its supervisor was killed" if started or turn["on"] else "it was killed before it started"
    outcome = end_state("environment", unkillable(left)) if left else end_state("stopped", reason)
    print(f"run {number} was cut short: {outcome['reason']}")
    return outcome


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


def next_number(tag):
    """The number of the next run. Where runs/ was removed, numbers go on after those that git knows."""
    number = last_number() + 1
    if resolve(f"refs/autoresearch/{tag}/{number}"):
        references = git("for-each-ref", "--format=%(refname)", f"refs/autoresearch/{tag}/").split()
        number = max(int(r.rpartition("/")[2]) for r in references) + 1
    return number


def take_gpu(what):
    """The lock of the GPU that a run here would occupy."""
    os.makedirs(cache_folder(), exist_ok=True)
    path = os.path.join(cache_folder(), f"{gpu_name()}.lock")
    gpu = lock_file(path, wait=1)
    if gpu is None:
        holder = " ".join((read_bytes(path) or b"").decode("utf-8", "replace").split())
        other = "" if gpu_name() == "cpu" else ", or give this folder another GPU (CUDA_VISIBLE_DEVICES)"
        raise Refusal(f"{gpu_name()} is in use by {holder or 'another run'}: wait for it{other}")
    os.ftruncate(gpu, 0)
    os.pwrite(gpu, f"{what}\n".encode(), 0)
    return gpu


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
    diff = git("diff", "--no-color", "--no-ext-diff", parent, commit, "--", "train.py")
    with open(os.path.join(folder, "change.diff"), "wb") as f:
        f.write(diff.encode("utf-8", "surrogateescape") + b"\n" * bool(diff))
    alive = lock_file(os.path.join(folder, "alive"))
    os.rename(folder, os.path.join(RUNS, str(number)))
    sync_folder(RUNS)
    git("update-ref", reference_of(turn), turn["commit"])
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


NO_SERIES = "no series is checked out: begin one (python3 experiment.py begin TAG) or git switch autoresearch/TAG"


def stop_requested():
    return os.path.exists(os.path.join(RUNS, "stop"))


def ready_series(on=None):
    """The series that is checked out, ready for another run; a Refusal says what is in the way. The state lock is held."""
    if stop_requested():
        raise Refusal("the human has asked to stop: end the loop (`stop --undo` allows runs again)", STOPPED)
    for turn in recover():
        if turn["on"] is None and on is None:
            raise Refusal(f"run {turn['number']} is still running: wait for it")
    tag = current_tag()
    if tag is None:
        raise Refusal(NO_SERIES)
    series = Series(tag)
    if series.best is None:
        raise Refusal(f"this series has no baseline yet: python3 experiment.py begin {tag}")
    if not series.settings:  # its seed, its dataset: other ones would not compare
        raise Refusal(f"runs/{tag}.json, with what the series was begun with, is gone: bring it back, or begin another tag")
    adopt_settings(series)
    best, head = best_commit(series), resolve("HEAD")
    if best is None or git("merge-base", "--is-ancestor", best, head, check=False) is None:
        if best and series.number(series.best):
            raise Refusal(f"{branch_of(tag)} was moved by hand and has lost its best: git merge {series.best['commit']} brings it back")
        raise Refusal(f"results.tsv is another series' (its best, {series.best['commit']}, is not on {branch_of(tag)}): move it into runs/")
    check_branch(best, head)
    check_files()
    return series, head


def check_branch(best, head):
    """Refuse where something that affects runs was committed to the branch by hand."""
    changed = changed_files(best, head) if head != best else []
    if "train.py" in changed:
        raise Refusal(
            f"train.py was committed by hand, and `try` does that: git reset --soft {best[:10]} takes the commit back, not the edit"
        )
    if others := [name for name in changed if not name.endswith(DOCUMENTS)]:
        raise Refusal(f"{', '.join(others[:3])} changed on the branch since the best: numbers would not compare, begin a new series")


def starting_point(tag, head, source):
    """The commit whose train.py was edited into `source`: the branch's head, or an older best, where something was kept since."""
    if HERE == ROOT:
        base = resolve(base_reference(tag)) or head
    else:
        base = git("rev-parse", "HEAD", cwd=HERE)
        others = [name for name in changed_files(base, head) if name != "train.py" and not name.endswith(DOCUMENTS)]
        if git("merge-base", "--is-ancestor", base, head, check=False) is None or others:
            raise Refusal(f"{HERE} is not on the series: git -C {shlex.quote(HERE)} checkout --detach {branch_of(tag)}")
        check_files(cwd=HERE)
    # Whoever has meanwhile taken a newer best, or brought its changes in by hand, has edited that.
    bests = [*git("rev-list", "--first-parent", f"{base}..{head}").split(), base]
    programs = {commit: git_file(commit) for commit in bests}
    away = {commit: distance(program, source) for commit, program in programs.items()}
    start, *older = (commit for commit in bests if away[commit] == min(away.values()))
    for commit in older:  # of equals the oldest whose edit merges with what was kept since: so that is not dropped
        if programs[commit] != programs[start] and merged(programs[commit], git_file(head), source) is not None:
            start = commit
    if HERE == ROOT and start == head:
        git("update-ref", "-d", base_reference(tag))
    return start


def distance(old, new):
    """How many lines differ."""
    lines = (text.decode("utf-8", "replace").splitlines() for text in (old, new))
    return sum(line[:1] in "+-" for line in difflib.unified_diff(*lines, n=0))


def start_noise(series, count, before=None, **more):
    """Start one repeat of the best with a seed that it has not had, and `count` - 1 after it. Returns its number.

    before: the turn whose repeats these go on with; they are of its commit, also where another was kept meanwhile.
    """
    best, commit = (before["short"], before["commit"]) if before else (series.best["commit"], best_commit(series))
    used = {series.seed} | {line["seed"] for line in series.tried if line["commit"] == best}
    seed = next(seed for seed in itertools.count(42) if seed not in used)
    return start_turn(series, "noise", f"noise: seed {seed} of {best}", commit, commit, git_file(commit), seed, remaining=count - 1, **more)

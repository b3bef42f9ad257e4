"""The branch of a series, and the working train.py that is edited from it."""

import difflib
import os
import shlex
import tempfile

from .files import DOCUMENTS, HERE, ROOT, RUNS, Refusal, read_bytes, read_turn, run_file, write_file
from .ledger import score
from .repository import (
    branch_of,
    changed_files,
    check_files,
    commit_tree,
    current_tag,
    git,
    git_bytes,
    git_file,
    resolve,
    set_index,
    tree_with,
)


def program_of(commit):
    """The blob of its train.py."""
    return resolve(f"{commit}:train.py")


def best_commit(series):
    number = series.number(series.best)
    return read_turn(number)["commit"] if number else resolve(series.best["commit"])


def score_of(series, commit):
    """val_bpb of the best that `commit` has the train.py of; None where there is none."""
    kept = (row for row in reversed(series.rows) if row["status"] == "keep" and score(row))
    return next((score(row) for row in kept if program_of(row["commit"]) == program_of(commit)), None)


def base_reference(tag):
    """What the working train.py was edited from, where something was kept since; absent otherwise."""
    return f"refs/autoresearch-base/{tag}"


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


def merged(base, ours, theirs):
    """What `git merge-file` makes of three contents; None where they conflict."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        paths = [os.path.join(folder, name) for name in ("ours", "base", "theirs")]
        for path, content in zip(paths, (ours, base, theirs)):
            with open(path, "wb") as f:
                f.write(content)
        return git_bytes("merge-file", "-p", "--quiet", *paths, check=False)


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
        try:
            git("update-ref", f"refs/heads/{name}", new, tip)
        except Refusal as e:
            raise Refusal(f"git can't move the branch {name} to {new[:10]}, the keep of run {turn['number']}: {e}", e.code) from None
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

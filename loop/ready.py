"""Whether another run may begin."""

import os

from .branch import best_commit
from .files import DOCUMENTS, STOPPED, Refusal, numbers, read_turn, stop_requested
from .ledger import Series
from .recovery import recover
from .repository import branch_of, changed_files, check_files, current_tag, git, resolve

SETTINGS = ("AUTORESEARCH_DATASET", "AUTORESEARCH_TIME_BUDGET", "AUTORESEARCH_CACHE", "AUTORESEARCH_HARDWARE", "GPU_BF16_PEAK_FLOPS")


NO_SERIES = "no series is checked out: begin one (python3 experiment.py begin TAG) or git switch autoresearch/TAG"


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
    check_branch(best, head, tag)
    check_files()
    return series, head


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


def kept_since(best, head, tag):
    """The last run whose commit is on the branch after the best, in words; None where what is there was committed by hand."""
    runs = git("for-each-ref", "--format=%(objectname) %(refname)", f"refs/autoresearch/{tag}/").splitlines()
    known = {commit: name.rpartition("/")[2] for commit, _, name in (line.partition(" ") for line in runs)}
    known |= {turn["commit"]: turn["number"] for turn in map(read_turn, numbers()) if turn and turn["tag"] == tag}
    since = git("rev-list", f"{best}..{head}").split()
    return next((f"run {known[commit]} ({commit[:7]})" for commit in since if commit in known), None)


def check_branch(best, head, tag):
    """Refuse where something that affects runs was committed to the branch by hand."""
    changed = changed_files(best, head) if head != best else []
    if "train.py" in changed and (lost := kept_since(best, head, tag)):
        raise Refusal(f"{branch_of(tag)} holds {lost}, and results.tsv has no row of it: bring that row back, or begin another tag")
    if "train.py" in changed:
        raise Refusal(
            f"train.py was committed by hand, and `try` does that: git reset --soft {best[:10]} takes the commit back, not the edit"
        )
    if others := [name for name in changed if not name.endswith(DOCUMENTS)]:
        raise Refusal(f"{', '.join(others[:3])} changed on the branch since the best: numbers would not compare, begin a new series")

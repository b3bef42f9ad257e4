"""Finishing a turn, and recovering from a crash: the same code. Each step is there already or is done now."""

import contextlib
import datetime
import glob
import os
import re
import shutil
import sys
import time

from harness.common.text import visible

from .audit import audit, remember, row_in
from .branch import best_commit, give_back, keep, merged, program_of
from .files import (
    HEADER,
    LEDGER,
    LIMITS,
    ROOT,
    RUNS,
    Refusal,
    append_line,
    read_bytes,
    read_end,
    read_json,
    read_ledger,
    read_turn,
    run_file,
    stop_requested,
    tried,
    write_file,
    write_json,
)
from .ledger import Series, key_of, repair_ledger
from .processes import end_processes, is_supervised, leader_of, lock_file, unkillable
from .proposal import check_program, digest_of, parse
from .repository import branch_of, current_tag, git, git_file, remove_tree, resolve
from .turns import check_untried, detach, end_state, last_local, propose, reference_of, standing, unfinished, write_outcome
from .verdict import row_text, verdict, verdict_lines


def recover(ending=None, notes=(), lenient=False):
    """Finish each turn that has ended and is not finished. Returns the turns that are under way. The state lock is held.

    ending: the number of the turn whose supervisor calls, notes: what its verdict has to say.
    lenient: say what is in the way and go on, as far as that goes, instead of refusing.
    """
    sweep()
    running, ended = [], []
    turns, damaged = unfinished()
    for turn in turns:
        number = turn["number"]
        # Asked first: a supervisor that ends leaves an outcome. While one lives, the run itself may have written what is there.
        if number != ending and is_supervised(number):
            running.append(turn)
        elif resolve(f"{turn['commit']}^{{commit}}") is None and resolve("HEAD"):
            write_outcome(turn, (read_end(number) or cut_short(turn)) | end_state("stopped", "its commit is gone from git"))
            ended.append(turn)
        elif read_end(number):
            ended.append(turn)
        elif turn["on"] and revive(turn):
            running.append(turn)
        else:
            git("update-ref", reference_of(turn), turn["commit"])
            write_outcome(turn, cut_short(turn))
            ended.append(turn)
    try:
        repair_ledger({turn["short"] for turn in ended})
        said = audit(ended[-1]["tag"] if ended else None)
        if said:
            print(said)
        for turn in ended:
            finish(turn, [*filter(None, [said]), *(notes if turn["number"] == ending else ())])
            said = None
        remember()
        if damaged:
            raise Refusal(f"{run_file(damaged[0], 'turn.json')} is missing or damaged: move runs/{damaged[0]} away")
    except Refusal as e:
        if not lenient:
            raise
        print(f"experiment.py: {e}", file=sys.stderr)
    last = last_local()
    if last and last["remaining"] and last not in running and is_supervised(last["number"]):  # it starts the next repeat
        running.append(last)
    return running


def sweep():
    """Remove what a command that was killed has left: a turn that was half written down, files that had not got their names."""
    for leftover in glob.glob(os.path.join(glob.escape(RUNS), "new*")):
        shutil.rmtree(leftover, ignore_errors=True)
    runs = glob.escape(RUNS)
    for path in (p for form in (f"{runs}/*.tmp", f"{runs}/*/*.tmp", f"{glob.escape(ROOT)}/*.tmp") for p in glob.glob(form)):
        writer = re.search(r"\.(\d+)\.tmp$", path)
        with contextlib.suppress(FileNotFoundError):
            if writer and (not os.path.exists(f"/proc/{writer[1]}") or time.time() - os.stat(path).st_mtime > 3600):
                os.remove(path)


def finish(turn, notes=()):
    """Everything between an outcome and a finished turn, as far as it is not done: row, branch, train.py, verdict.json."""
    number, outcome = turn["number"], read_end(turn["number"])
    notes, following = [*notes], None
    if "outdated" not in turn:  # written down before the row, so that a verdict stays what it was
        notes += filter(None, [strike(turn)])
        series = Series(turn["tag"])
        if series.best:
            turn |= standing(series)
        outdated = turn["kind"] == "try" and series.best is not None and program_of(turn["parent"]) != program_of(best_commit(series))
        turn["outdated"] = outdated
        write_json(run_file(number, "turn.json"), turn)
    status = verdict(turn, outcome)
    if status:
        row = row_text(turn, outcome, status)
        if not read_ledger():
            append_line(LEDGER, HEADER)
        if not rows_of(turn):
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
    lines = [visible(" ".join(line.splitlines())) for line in lines]
    write_json(run_file(number, "verdict.json"), {"status": status, "code": code, "lines": lines, "next": following})


def rows_of(turn):
    """The lines of the ledger that are a row of this turn."""
    key = turn["short"], turn["seed"] if turn["kind"] == "noise" else None
    lines = read_ledger().splitlines(keepends=True)
    return [line for line in lines if (row := row_in(line)) and key_of(row) == key]


def strike(turn):
    """Take out the rows that are there before a turn is judged: the run wrote them. Returns a line for the verdict, or None."""
    forged = rows_of(turn)
    if not forged:
        return None
    write_file(LEDGER, b"".join(line for line in read_ledger().splitlines(keepends=True) if line not in forged))
    return f"results.tsv had a row for this run before it was judged, which is taken out: {forged[0].decode('utf-8', 'replace').strip()}"


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


def cut_short(turn):
    """The outcome of a turn whose supervisor was killed, after what it has left is ended."""
    number = turn["number"]
    started = read_json(run_file(number, "process.json"))
    leader = leader_of(started, datetime.datetime.fromisoformat(turn["started"]).timestamp())
    left = end_processes(turn["token"], leader, LIMITS["grace"])
    reason = "its supervisor was killed" if started or turn["on"] else "it was killed before it started"
    outcome = end_state("environment", unkillable(left)) if left else end_state("stopped", reason)
    print(f"run {number} was cut short: {outcome['reason']}")
    return outcome

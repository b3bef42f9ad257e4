"""Waiting for runs, and how far they are."""

import os
import re
import time

from .files import (
    CRASHED,
    ENVIRONMENT,
    RUNNING,
    STOPPED,
    Refusal,
    last_number,
    last_words,
    log_tail,
    read_turn,
    read_verdict,
    run_file,
    tried,
    write_file,
)
from .processes import is_supervised, state_lock
from .recovery import recover
from .remote import cluster
from .run import STEP
from .turns import unfinished


def wait_for(seconds, numbers=None, first=False):
    """Wait for these runs (default: all that are under way or whose verdict nobody was told, or the last one); print each verdict.

    first: return at the first verdict. Returns the last verdict's exit code, of several the one that most asks to be looked at, or 75.
    """
    until, pause, codes = time.monotonic() + seconds, 0.02, []
    if not last_number():
        raise Refusal("nothing has been run yet")
    pending = list(numbers or sorted({*untold(), *(turn["number"] for turn in unfinished()[0])}) or [last_number()])
    several = len(pending) > 1
    while pending:
        for number in list(pending):
            said = read_verdict(number)
            if said:
                print("\n".join(said["lines"]), flush=True)
                write_file(run_file(number, "told"), b"")
                codes.append(said["code"])
                pending.remove(number)
                pending += filter(None, [said.get("next") or next_repeat(number)])
            elif not is_supervised(number):
                with state_lock():
                    recover()
                if read_turn(number) is None:
                    raise Refusal(f"runs/{number} was removed: nothing is known of that run")
        if codes and first:
            return codes[-1]
        if pending and not time.monotonic() < until:
            for number in pending:
                print(f"run {number} is still running ({progress_of(number)}): python3 experiment.py wait")
            return RUNNING
        time.sleep(min(pause, max(0.0, until - time.monotonic())) if pending else 0)
        pause = min(pause * 1.2, 1.0)
    return next(code for code in (ENVIRONMENT, STOPPED, 0, CRASHED) if code in codes) if several else codes[-1]


def untold():
    """Runs in a cluster that ended while nobody waited for them: their verdict was not printed yet."""
    for number in range(1, last_number() + 1):
        ended, told = (os.path.exists(run_file(number, name)) for name in ("verdict.json", "told"))
        if ended and not told and (read_turn(number) or {}).get("on"):
            yield number


def next_repeat(number):
    """The run that goes on with the repeats which this one belongs to; None where it was the last."""
    turn = read_turn(number)
    while turn and turn["remaining"]:
        alive = is_supervised(number)  # asked first: it starts the next one and ends
        for line in tried():
            if line["number"] > number and line["kind"] == "noise" and line["commit"] == turn["short"]:
                return line["number"]
        if not alive:
            break
        time.sleep(0.05)
    return None


def progress_of(number):
    """How far a run is, and in a cluster where, in words."""
    on = (read_turn(number) or {}).get("on")
    place = cluster.where(number) if on else None
    return place if place == "queued" else ", ".join(filter(None, [place, progress_in_log(number)]))


def progress_in_log(number):
    for line in reversed(log_tail(number, 60)):
        if line.startswith("Evaluating"):
            return "evaluating"
        if match := STEP.match(line):
            left = re.search(r"remaining: (\d+)s", line)
            return f"{match[2]} %, loss {match[3]}" + (f", {left[1]} s of training left" if left else "")
    return f"starting; {last_words(number)[:100] or 'no output yet'}"

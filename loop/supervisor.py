"""The detached process of a turn: the run, its outcome, and what follows."""

import contextlib
import os
import signal
import subprocess
import traceback

from .files import LIMITS, ROOT, RUNS, TREE, Refusal, last_words, now_text, read_turn, run_file, stop_requested, write_json
from .ledger import Series
from .processes import cache_folder, lock_file, state_lock
from .recovery import recover
from .remote import cluster
from .repository import current_tag, git, make_tree
from .run import LIBC, Log, Reader, as_number, follow, interrupted, measure
from .turns import end_state, last_local, start_noise, write_outcome


def run(turn, gpu):
    """Run one experiment on this machine. Returns (state, reason), and more of its outcome."""
    number = turn["number"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"AUTORESEARCH_CACHE": cache_folder()}
    if turn["kind"] == "baseline":  # the one run before which something may be missing: run.sh sets it up
        log, reader = Log(run_file(number, "run.log"), LIMITS["log"]), Reader(LIMITS["setup"])
        command, started = ["./run.sh", "--setup"], run_file(number, "process.json")
        code, why, left = follow(command, ROOT, environment, turn["token"], log, reader, gpu, started)
        if code != 0 or why:
            return why if why and why[0] == "stopped" else ("environment", reader.fault or f"setting up failed: {last_words(number)}"), {}
    make_tree(turn)
    log = Log(run_file(number, "run.log"), LIMITS["log"])
    end, facts = measure(turn, TREE, environment, asked(turn), log, gpu)
    tampered = (git("diff", "--name-only", turn["commit"], cwd=TREE, check=False) or "").split("\n")[0]
    if end[0] == "valid" and tampered:
        end = "crash", f"invalid: the run changed {tampered}"
    model = os.path.join(TREE, "unevaluated.pt")
    if end[0] != "valid" and os.path.exists(model):  # trained, not evaluated: the last such model stays
        os.replace(model, os.path.join(RUNS, "unevaluated.pt"))
        facts["model"] = "runs/unevaluated.pt"
    return end, facts


def asked(turn):
    """What the series asks of a run: the baseline's data and device; the best's losses, where a run may be stopped early."""
    series = Series(turn["tag"])
    summary = (series.outcome(series.baseline).get("summary") or {}) if turn["bar"] is not None else {}
    losses = series.outcome(series.best).get("losses") if turn["prune"] and series.best else None
    budget = as_number((series.settings.get("environment") or {}).get("AUTORESEARCH_TIME_BUDGET") or "")
    known = {key: summary.get(key) for key in ("fingerprint", "device", "dataset")}
    return known | {"losses": losses, "budget": budget or None}


def supervise(number, alive, gpu):
    """Run the turn, write its outcome, finish it, start the next repeat. The lock `alive` is held until this process ends.

    gpu: the descriptor of the GPU's lock; -1 for a run elsewhere.
    """
    turn = read_turn(number)
    if turn is None:
        return  # whoever asks next says so
    LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what the run leaves behind becomes ours, and is ended

    def told(which, frame):
        if turn["on"] and not os.path.exists(run_file(number, "stop")):  # this machine is shut down: the job goes on, as after SIGKILL
            os._exit(1)
        interrupted.append(interrupted_by(which))

    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, told)
    if os.path.exists(run_file(number, "stop")):  # told before there was anybody to tell
        interrupted.append("it was told to stop")
    try:
        (state, reason), facts = cluster.run(turn, asked(turn)) if turn["on"] else run(turn, gpu)
    except Refusal as e:
        state, reason, facts = "environment", str(e), {}
    except OSError as e:
        state, reason, facts = "environment", f"{e}", {}
    except Exception as e:
        traceback.print_exc()
        state, reason, facts = "environment", f"experiment.py itself failed: {type(e).__name__}: {e} (runs/{number}/supervisor.log)", {}
    # What the run itself has written of its turn does not count: this process knows what it was to do, and what came of it.
    notes = []
    if read_turn(number) != turn:
        notes.append("turn.json was changed during the run: put back, and not believed")
        write_json(run_file(number, "turn.json"), turn)
    with contextlib.suppress(FileNotFoundError):
        os.remove(run_file(number, "verdict.json"))
        notes.append("verdict.json was there before the run had ended: not believed")
    write_outcome(turn, end_state(state, reason) | facts)
    if gpu >= 0:
        os.close(gpu)
    with state_lock():
        try:
            recover(ending=number, notes=notes)
        except (Refusal, OSError) as e:
            print(f"{now_text()} {e}", flush=True)  # whoever waits is told the same
            return
        goes_on = turn["remaining"] and state == "valid" and not stop_requested()
        if goes_on and (last_local() or turn)["number"] == number and current_tag() == turn["tag"]:
            start_noise(Series(turn["tag"]), turn["remaining"], before=turn)
    draw()


def draw():
    """The picture of the results. Its failure is nobody's; several supervisors that end together do it in turn."""
    turn = lock_file(os.path.join(RUNS, "drawing"), wait=120)
    if turn is not None and os.path.exists(os.path.join(ROOT, "results.py")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([os.path.join(ROOT, "venv", "bin", "python"), "results.py"], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=120)


def interrupted_by(which):
    return "it was told to stop" if which == signal.SIGTERM else f"it was ended by {signal.Signals(which).name}"

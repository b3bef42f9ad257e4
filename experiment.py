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
AUTORESEARCH_LIMITS changes LIMITS of loop/files.py: "silence=60 evaluation=900". The rest of the environment is what run.sh reads.
"""

import argparse
import os
import signal
import sys

from harness.common.text import visible
from loop.commands import command_begin, command_noise, command_show, command_stop, command_try, command_wait
from loop.files import ENVIRONMENT, REFUSED, Refusal
from loop.repository import check_repository
from loop.status import command_status
from loop.supervisor import supervise


def main():
    parser = argparse.ArgumentParser(description="One experiment a command; what is better is kept, and everything is recorded.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name, function, text, wait=False, on=False):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if wait:
            command.add_argument("--wait", type=float, default=540, metavar="S", help="seconds to wait for the run (default: 540)")
        if on:
            where = "run it in the Ray cluster whose dashboard is there (such as 10.0.0.5), or on all GPUs of this machine: local"
            command.add_argument("--on", metavar="ADDRESS", help=where)
            command.add_argument("--cores", type=int, metavar="N", help="with --on: take N cores of a node and no GPU (the demonstration)")
        return command

    begin = add("begin", command_begin, "Begin a new series: a branch, and the baseline.", wait=True, on=True)
    begin.add_argument("tag", help="for example nov29; the branch is autoresearch/TAG")
    attempt = add("try", command_try, "Run the working train.py, judge and record it, keep it if it is better.", wait=True, on=True)
    attempt.add_argument("description", nargs="?", help="what it tries, in a few words")
    attempt.add_argument("--patches", nargs="+", metavar="FILE", help="with --on: a run for each patch of the best's train.py, all at once")
    attempt.add_argument("--margin", type=float, default=0.0, metavar="F", help="keep only if better by F noise floors (default: 0)")
    attempt.add_argument("--simpler", action="store_true", help="less code: keep it at an equal score too (within a noise floor)")
    attempt.add_argument("--prune", action="store_true", help="stop it when its loss is clearly worse than the best's at the same progress")
    waiting = add("wait", command_wait, "Wait for what is under way and print each verdict.", wait=True)
    waiting.add_argument("--any", action="store_true", help="return at the first verdict, where several are under way")
    noise = add("noise", command_noise, "Run the best again with other seeds, to know what is luck.", wait=True, on=True)
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
        stream.write = lambda text, write=stream.write: write(visible(text))  # nor may a terminal obey what they hold
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some launchers leave it ignored: no exit code would be kept, git's neither
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
    try:
        sys.exit(main())
    finally:
        try:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

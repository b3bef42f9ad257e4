"""Is this machine fit to train on, and what to do if not?

    python doctor.py             # one screen: what was seen, why it matters, the command that mends it
    python doctor.py --probe     # and measured: copy bandwidth, GEMM, attention, the step on paper (minutes)
    python doctor.py --report    # report.md, to be pasted into an issue: all of this, versions, ten training steps (minutes)
    python doctor.py --json      # the screen as JSON
    python doctor.py --stop      # what run.sh asks before each run: a line for each fault that would make it fail, freeze or lie
    python doctor.py --list      # every check, as docs/doctor.md lists them

Exit code 3 if a run must not start, else 0. AUTORESEARCH_SKIP_CHECKS="memory, disk" leaves checks out, where you know better.

Each check runs in a process of its own that may crash or hang: that costs its own row and no run. Its parts are in doctor/.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict

from doctor import canary, diagnosis, probe, report, screen
from doctor.machine import Machine
from doctor.words import one_line, say
from harness.common.protocol import EXIT_ENVIRONMENT


def main():
    parser = argparse.ArgumentParser(description="Is this machine fit to train on, and what to do if not?")
    parser.add_argument("--stop", action="store_true", help="only what would make a run fail, freeze or lie; a line each, exit code 3")
    parser.add_argument("--before-install", action="store_true", help="with --stop: without what needs torch")
    parser.add_argument("--probe", action="store_true", help="measure too: bandwidth, GEMM, attention")
    parser.add_argument("--report", action="store_true", help="write report.md, to be pasted into an issue (minutes)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--list", action="store_true", help="every check, as in docs/doctor.md")
    parser.add_argument("--canary", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layer", choices=canary.LAYERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a character
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some launchers leave it ignored: no exit code would be kept
    if args.canary:
        return canary.try_torch()
    if args.layer:
        return canary.try_layer(args.layer)
    if args.list:
        return print(screen.listing())
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    if told and told not in screen.TITLES:
        say(f"AUTORESEARCH_HARDWARE={told} is not known: use {', '.join(screen.TITLES)}")
        sys.exit(EXIT_ENVIRONMENT)
    machine = Machine(root=os.environ.get("AUTORESEARCH_SYSROOT") or "/", torch={} if args.before_install else canary.torch_on_disk())
    if args.stop:
        try:
            sys.exit(EXIT_ENVIRONMENT if diagnosis.stop(machine, args.before_install) else 0)
        except Exception as error:  # of the doctor itself
            say(f"the checks before the run failed, and it goes on without them ({one_line(error)})")
            sys.exit(0)
    if args.report:
        return report.write(machine)
    show(machine, args.probe, args.json)


def show(machine, measured, as_json):
    """Print what was seen, and measured where that is asked for; ends the program with its exit code."""
    rows, asked = diagnosis.look(machine)
    stops = any(row.level == "stop" for row in rows)
    found = diagnosis.measure(machine) if measured and asked and not stops else []
    if as_json:
        facts = {"title": screen.title(machine), "hardware": machine.hardware, "torch": machine.torch, "python": sys.version}
        print(json.dumps(facts | {"rows": [asdict(row) for row in rows], "probe": found}, indent=1))
    else:
        print(screen.screen(machine, rows, min(118, shutil.get_terminal_size((118, 0)).columns)))
        if measured:
            print("\n".join(map(probe.words, found)) or "Nothing was measured: there is no GPU, or it can't be used.")
    sys.exit(EXIT_ENVIRONMENT if stops else 0)


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

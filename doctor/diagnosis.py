"""The checks that apply to a machine, made; what of it stops a run; and what is measured."""

import re
import sys

from doctor import probe
from doctor.canary import ask_layers, ask_torch, cached_canary
from doctor.check import AMD, LEVELS, guarded
from doctor.checks import CHECKS
from doctor.words import say
from harness.common.protocol import EXIT_ENVIRONMENT

PROBE_SECONDS = 1200  # for each part of --probe, which gives what it measures 90 s each


def skipped(machine):
    """The checks that AUTORESEARCH_SKIP_CHECKS names; a name that is none of them ends the program."""
    names = re.findall(r"[^\s,]+", machine.environ.get("AUTORESEARCH_SKIP_CHECKS", ""))
    for name in names:
        if name not in {check.name for check in CHECKS}:
            say(f"AUTORESEARCH_SKIP_CHECKS names no check: {name!r}; use some of {', '.join(check.name for check in CHECKS)}")
            sys.exit(EXIT_ENVIRONMENT)
    return names


def diagnose(machine, levels=LEVELS, without=()):
    """The rows of every check that applies here and can end in one of `levels`."""
    checks = [c for c in CHECKS if machine.hardware in c.where.split() and c.level in levels and c.name not in without]
    return list(filter(None, (guarded(check, machine) for check in checks)))


def stopping(machine, without):
    return [row for row in diagnose(machine, ("stop",), without) if row.level == "stop"]


def stop(machine, before_install=False):
    """Says what must stop a run, a line each; True if there is anything. torch is asked only where its canary has not lived yet."""
    without = skipped(machine)
    if without:
        say(f"not checked: {', '.join(without)} (AUTORESEARCH_SKIP_CHECKS)")
    if before_install:
        without = [*without, "torch_build"]
    faults = stopping(machine, without)
    if not faults and not before_install and not {"gpu", "compile"} <= set(without):
        machine.torch = dict(machine.torch) | {"canary": cached_canary(machine)}
        faults = stopping(machine, without)
    for row in faults:
        ways = f"AUTORESEARCH_SKIP_CHECKS={row.check} skips this check"
        if machine.hardware != "none":
            ways += "; AUTORESEARCH_HARDWARE=none runs the demonstration on the CPU"
        say(f"{row.seen} ({row.why}): {row.mend} ({ways})")
    return bool(faults)


def look(machine):
    """(the rows of every check, whether torch was asked to use the GPU)."""
    without = skipped(machine)
    asked = machine.hardware != "none" and not stopping(machine, without)  # what is known to crash the GPU is not tried
    if asked:
        machine.torch["canary"] = cached_canary(machine)
        if machine.torch["canary"]["stage"] in ("compile", "done"):
            machine.torch["sdpa"], machine.torch["sdpa_end"] = ask_torch(machine, [probe.FILE, "sdpa"], PROBE_SECONDS)
            if machine.hardware in AMD.split():
                machine.torch["miopen"] = ask_layers(machine)
    rows = diagnose(machine, without=without)
    return rows, asked


def measure(machine):
    """The rows of probe.py, each part in a process of its own, and the step on paper."""
    rows = []
    for part in probe.PARTS:
        say(f"measuring: {part} …")
        answers, end = ask_torch(machine, [probe.FILE, part], PROBE_SECONDS)
        rows += answers + ([{"what": part, "why": end}] if end else [])
    step = probe.step_on_paper(rows)
    return rows + ([step] if step else [])

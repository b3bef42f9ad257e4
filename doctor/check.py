"""What a check is, what it finds, and how one is made that may crash or hang.

A check is a function of a Machine, so that tests can lay one out. It returns what it saw in a few words, a Fault, or None where it has
nothing to say, and names in its docstring the report behind it (ROCm/legacy-rocm-build is what was ROCm/ROCm).
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from doctor.machine import CHECK_SECONDS

AMD, GPU, ALL = "gfx1151 amd", "gfx1151 amd nvidia", "gfx1151 amd nvidia none"
LEVELS = ("stop", "warn", "note", "unknown", "fine")


@dataclass
class Fault:
    seen: str
    mend: str = ""  # a command; the check's own if empty
    level: str = ""  # stop, warn or note; the check's own if empty


@dataclass(frozen=True)
class Check:
    run: Callable
    where: str  # of gfx1151, amd, nvidia, none
    level: str  # stop: a run would fail, freeze or lie; warn; note
    why: str
    mend: str

    @property
    def name(self):
        return self.run.__name__


@dataclass
class Row:
    """A check's result. `level` is "fine", the fault's, or "unknown" where the check itself failed."""

    check: str
    level: str
    seen: str
    why: str = ""
    mend: str = ""


def examine(check, machine):
    """The check's Row, or None where it has nothing to say."""
    found = check.run(machine)
    if found is None:
        return None
    if isinstance(found, Fault):
        return Row(check.name, found.level or check.level, found.seen, check.why, found.mend or check.mend)
    return Row(check.name, "fine", found)


def guarded(check, machine, seconds=CHECK_SECONDS):
    """`examine` in a child: its exception, crash or hang costs this row only. A child that hangs in the kernel is left behind."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                row = examine(check, machine)
                answer = row and asdict(row)
            except Exception as error:
                answer = asdict(Row(check.name, "unknown", f"the check itself failed: {type(error).__name__}: {error}"))
            with open(write, "w") as f:
                json.dump(answer, f)
        finally:
            os._exit(0)
    os.close(write)
    answer, end, over = b"", time.monotonic() + seconds, False
    while not over and select.select([read], [], [], max(0, end - time.monotonic()))[0]:
        piece = os.read(read, 65536)
        answer, over = answer + piece, not piece
    os.close(read)
    if not over:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0 if over else os.WNOHANG)
    try:
        found = json.loads(answer)
        return found and Row(**found)
    except ValueError:
        return Row(check.name, "unknown", f"the check itself {'crashed' if over else f'did not end within {seconds} s'}")

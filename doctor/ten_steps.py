"""Ten training steps of train.py as it is, on the prepared data: their time, memory, attention, and the GPU's clock, heat and power.

    python doctor/ten_steps.py      (the start-up of a run, then some seconds; nothing is evaluated or saved)

The lines are train.py's own, those of the first prepare.WARMUP_STEPS steps too, which are never timed; the last line is JSON: ms (each of
the ten), tokens_per_s, mfu_percent (None where it is not known), peak_mb (2**20 bytes), startup_s (until the first timed step), sensors.
`python doctor.py --report` shows it.
"""

import contextlib
import json
import math
import os
import re
import runpy
import statistics
import sys
import time

STARTED = time.time()  # before torch, whose import is part of the start-up
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

import train
from harness import ending, machine
from harness import run as harness
from prepare import WARMUP_STEPS

STEPS = 10
LINE = re.compile(r"step \d+ .*\| dt: (\d+)ms \| .*\| mfu: ([\d.]+%|n/a) \|")


class Enough(Exception):
    """The steps that were wanted are done."""


class Steps(harness.Progress):
    """Every step's line, and the end of the training after the last step that is wanted."""

    lines, startup = [], None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sensors = machine.sensors(device)

    def show(self, line):
        print(line, flush=True)
        self.lines.append(line)
        harness.TIME_BUDGET = math.inf  # from the first step on: it never ends by itself, so nothing is evaluated or saved
        if len(self.lines) == WARMUP_STEPS:
            Steps.startup = time.time() - STARTED
            self.sensors.every = 0.2
            self.sensors.start()
        if len(self.lines) == WARMUP_STEPS + STEPS:
            self.sensors.stop()
            raise Enough


def main():
    harness.Progress = Steps
    with contextlib.suppress(Enough):
        runpy.run_path(train.__file__, run_name="__main__")
    timed = [match for line in Steps.lines[WARMUP_STEPS:] if (match := LINE.match(line))]
    if len(timed) < STEPS:
        ending.fail("train.py's lines of progress are not those that program.md asks for")
    ms = [int(match[1]) for match in timed]
    known = [float(match[2][:-1]) for match in timed if match[2] != "n/a"]
    facts = {
        "ms": ms,
        "tokens_per_s": round(train.TOTAL_BATCH_SIZE * STEPS * 1000 / max(1, sum(ms))),
        "mfu_percent": statistics.median(known) if known else None,
        "peak_mb": round(machine.peak_memory(Steps.device), 1),
        "startup_s": round(Steps.startup, 1),
        "sensors": Steps.sensors.summary(),
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.argv = ["train.py"]  # which takes no arguments here
    main()

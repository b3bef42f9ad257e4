"""Whether the machine is at fault and not the idea: the harness's own look, in processes of its own."""

import json
import os
import subprocess

from harness.common.hardware import gpu_hardware
from harness.common.text import visible

from .files import LIMITS, ROOT, Refusal
from .processes import check_disk

PYTHON = os.path.join(ROOT, "venv", "bin", "python")

# What a run here would train on: importing torch takes seconds and may crash.
FIT = """
import json, sys
import prepare
from harness import machine
try:
    fingerprint = prepare.fingerprint()
except prepare.DataError as e:
    sys.exit(str(e))
print(json.dumps({"fingerprint": fingerprint, "device": machine.peak_flops(machine.find_device())[1]}))
"""


def look(expected, environment=None):
    """Why this machine can't do a run of the series, None if it can. environment: the run's; None for this process's."""
    try:
        done = subprocess.run([PYTHON, "-c", FIT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMITS["silence"])
    except subprocess.TimeoutExpired:
        return f"torch had not found a device after {LIMITS['silence']:g} s"
    said = visible(done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode:
        return said[-1].removeprefix("FAIL: ")[:300]
    found = json.loads(done.stdout.splitlines()[-1])
    differs = [f"{key} {found[key]} and not {expected[key]}" for key in found if expected.get(key) not in (None, found[key])]
    return ", ".join(differs) or None


def disk_fault():
    """Why nothing more can be written, None if it can."""
    try:
        check_disk()
    except Refusal as e:
        return str(e)
    return None


def gpu_fault():
    """Why no program can use the GPU, None if one can or none is there."""
    if not gpu_hardware():
        return None
    probe = [PYTHON, "-W", "ignore", "-c", "import torch; assert torch.ones(64, device='cuda').sum().item() == 64"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=LIMITS["silence"])
    except subprocess.TimeoutExpired:
        return "the GPU no longer answers, to any program: reboot the machine"
    if done.returncode:
        said = (visible(done.stderr).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"the GPU no longer works, for any program: {said[:200]} (a reboot may help)"
    return None

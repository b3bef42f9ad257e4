"""train.py and what it imports in a folder of its own, edited as a researcher would, and run."""

import os
import re
import shutil
import subprocess
import sys

from checkout import NO_GPU
from conftest import PROJECT

TINY = dict(DEPTH=1, TOTAL_BATCH_SIZE=1024, DEVICE_BATCH_SIZE=4)


def clone(folder, **edits):
    """train.py and what it imports in a folder of its own, with constants edited as a researcher would."""
    source = (PROJECT / "train.py").read_text()
    end = "\n\n\ndef lr_multiplier("
    assert all(re.search(rf"^{name} = ", source, re.M) for name in edits) and source.count(end) == 1
    source = source.replace(end, "".join(f"\n{name} = {value}" for name, value in edits.items()) + end)
    (folder / "train.py").write_text(source)
    for name in ("prepare.py", "kernels", "harness"):
        if not (folder / name).exists():
            (folder / name).symlink_to(PROJECT / name)
    return folder


def edit_harness(folder, old, new):
    """A clone's own harness/run.py, with a text replaced that stands in it once."""
    (folder / "harness").unlink()
    shutil.copytree(PROJECT / "harness", folder / "harness")
    source = (folder / "harness/run.py").read_text()
    assert source.count(old) == 1
    (folder / "harness/run.py").write_text(source.replace(old, new))


def run(folder, *args, **environment):
    """train.py as on a machine without a GPU, whose demonstration this is."""
    env = {**os.environ, **NO_GPU, **environment}
    return subprocess.run([sys.executable, "train.py", *args], cwd=folder, env=env, capture_output=True, text=True)


def summary(stdout):
    lines = stdout.split("\n---\n")[-1].strip().splitlines()
    return dict(line.split(":", 1) for line in lines)

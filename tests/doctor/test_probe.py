"""benchmarks/sdpa_probe.py: which backends of SDPA a build has. doctor/probe.py is tested with the doctor."""

import os
import subprocess
import sys

import pytest
from conftest import PROJECT

sys.path.insert(0, str(PROJECT / "benchmarks"))
import sdpa_probe


def test_backends_that_crash_hang_or_spoil_their_process_are_named():
    """In real processes, with stand-ins for the backends; what is right is found among them."""
    command = [sys.executable, PROJECT / "tests/helpers/standin_probe.py", "sdpa_probe"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for head_dim in (64, 128):
        rows = [line.split(None, 1) for line in done.stdout.splitlines() if f"head_dim {head_dim} " in line]
        said = {name: " ".join(rest.split()) for name, rest in rows}
        assert said["FLASH_ATTENTION"] == f"head_dim {head_dim} took its process down: signal 11"
        assert said["EFFICIENT_ATTENTION"] == f"head_dim {head_dim} hung: no answer in 3 s"
        assert said["MATH"] == f"head_dim {head_dim} after it others fail (HIP error: invalid argument)"
        assert said["CUDNN_ATTENTION"].endswith("both right") and said["default"].endswith("both right")
    verdict = done.stdout.split("\nverdict\n")[1].splitlines()
    assert verdict[0].startswith("  Do not use, for what they do to their process: EFFICIENT_ATTENTION (hung") and len(verdict) == 2


def rows(**found):
    return [{"backend": name, "head_dim": 64, "right": True, "errors": [0.0] * 4} | facts for name, facts in found.items()]


@pytest.mark.parametrize(
    "without, switched, words",
    [
        (rows(FLASH_ATTENTION={}), None, "Flash attention is really there"),
        (rows(FLASH_ATTENTION={"harm": "hung"}, EFFICIENT_ATTENTION={}), None, "EFFICIENT_ATTENTION work."),
        (rows(FLASH_ATTENTION={"harm": "hung"}), rows(FLASH_ATTENTION={}), "only with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
        (rows(FLASH_ATTENTION={}), rows(FLASH_ATTENTION={"right": None}), "With TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 it is lost"),
        (rows(FLASH_ATTENTION={"right": False}), None, "WRONG numbers from FLASH_ATTENTION"),
    ],
)
def test_verdict(without, switched, words):
    assert words in "\n".join(sdpa_probe.verdict(without, switched, "cuda"))

"""A kernel that the interpreter runs and no compiler takes fails the tests, by the name of a test that launched it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from specializations import cover, features

FOLDER = Path(__file__).parents[1]

KERNEL = """
import torch, triton
import triton.language as tl

@triton.jit
def scale(x, capped: tl.constexpr):
    if capped == 0.0:
        return x
    return x * (1.0 / capped)  # divides by zero where the compiler goes on after the return

@triton.jit
def kernel(x, n, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, scale(tl.load(x + at, mask=at < n), CAPPED), mask=at < n)

def run(capped):
    x = torch.ones(30)
    kernel[(1,)](x, 30, CAPPED=capped, BLOCK=32, num_warps=1)
    return x
"""
TESTS = """
from kernels import planted

def test_capped():
    assert (planted.run(2.0) == 0.5).all()

def test_uncapped():
    assert (planted.run(0.0) == 1).all()
"""


def planted(tmp_path, tests, *workers):
    """What pytest says of a project of one kernel and its tests."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    (tmp_path / "kernels/planted.py").write_text(KERNEL)
    for name in ("conftest.py", "helpers/specializations.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(FOLDER / name, tmp_path / "tests" / name)
    (tmp_path / "tests/test_it.py").write_text(tests)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "tests"]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_planted_fault(tmp_path):
    """Both tests pass in the interpreter. One specialization of the two can't be compiled."""
    done = planted(tmp_path, TESTS, "-n", "1")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1 and "2 passed" in done.stdout and "2 specializations of 1 kernels" in done.stdout, done.stdout
    assert len(failed) == 2, done.stdout
    for target, line in zip(("gfx1151", "sm_90"), sorted(failed)):
        assert f"tests/test_it.py::test_uncapped: kernels.planted.kernel for {target}: CompilationError: ZeroDivisionError" in line


def test_interrupted_tests_compile_nothing(tmp_path):
    done = planted(tmp_path, TESTS + "\ndef test_interrupt():\n    raise KeyboardInterrupt\n")
    assert done.returncode == 2 and "2 passed" in done.stdout and "specializations" not in done.stdout, done.stdout


def record(**constants):
    return {"kernel": "k", "types": {"x": "*bf16"}, "constants": constants, "options": {}, "tuned_by": None}


def test_cover_has_every_value_once_and_small_sizes():
    records = [record(FLAG=flag, BLOCK=block) for flag in (True, False, None) for block in (1024, 64, 1)]
    chosen = cover(records)
    assert set().union(*map(features, chosen)) == set().union(*map(features, records))
    assert len(chosen) == 3 and all(r["constants"]["BLOCK"] in (1, 64) for r in chosen)

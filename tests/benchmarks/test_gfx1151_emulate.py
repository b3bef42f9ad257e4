"""The kernels' gfx1151 machine code on an emulator: right numbers, no scratch, and attention's issue bounds.

Runs where TINYGRAD_PATH names a clone of tinygrad (with clang and pyelftools); the arithmetic on costs is tested everywhere.
"""

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


KERNELS = {
    "rms_norm": "rms_norm_kernel rms_norm_wide_kernel rms_norm_backward_kernel rms_norm_backward_wide_kernel rms_norm_dweight_wide_kernel",
    "gated": "gated_kernel gated_backward_kernel",
    "qk_norm_rope": "qk_norm_rope_kernel qk_norm_rope_backward_kernel",
    "qkv": "qkv_kernel qkv_backward_kernel",
    "norm_linear": "rms_norm_kernel rms_norm_backward_kernel residual_mix_norm_kernel residual_mix_norm_backward_kernel",
    "mlp": "rms_norm_kernel gated_kernel gated_backward_kernel rms_norm_backward_kernel",
    "residual_mix": "residual_mix_norm_kernel residual_mix_norm_backward_kernel",
    "attention": "_forward_kernel _delta_kernel _dkdv_kernel _dq_kernel",
    "cross_entropy": "_row_kernel _backward_kernel _reduce_kernel _scale_kernel",
}


@pytest.mark.emulator
@pytest.mark.parametrize("module", KERNELS)
def test_machine_code(module, tmp_path):
    """In a process of its own: this one may hold interpreted kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = tmp_path / "emulated.csv"
    command = [sys.executable, BENCHMARKS / "gfx1151_emulate.py", "--only", module, "--csv", path, "--bounds", tmp_path / "bounds.csv"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert all(row["verdict"] == "right" and int(row["instructions"]) > 100 for row in rows)
    assert {kernel for row in rows for kernel in row["kernels"].split()} == set(KERNELS[module].split())
    spilled = [row["case"] for row in rows if int(row["scratch"]) and "head_dim 256" not in row["case"]]
    assert not spilled
    if module == "attention":
        assert all(int(row["wmma"]) for row in rows)
        for bounded in (False, True):  # rows whose first keys are all masked
            windowed = [row["case"] for row in rows if "window 20" in row["case"] and ("bounded" in row["case"]) == bounded]
            assert {case.split()[-1] for case in windowed} >= {"64", "128"}


def test_costs():
    pytest.importorskip("elftools")
    from rdna3_emulator import Cost

    cost = Cost({"v_wmma_f32_16x16x16_bf16": 2, "v_exp_f32": 3, "v_add_f64": 1, "v_mul_f32": 5, "ds_load_b128": 2,
                 "ds_load_2addr_b32": 1, "ds_store_b16": 1, "s_waitcnt": 9, "scratch_load_b32": 4})  # fmt: skip
    assert (cost.instructions, cost.wmma, cost.scratch) == (28, 2, 4)
    assert cost.vector_cycles == 2 * 32 + 3 * 4 + 16 + 5
    assert cost.lds_cycles == 2 * 4 + 2 + 1
    assert math.isclose(cost.wmma_share, 64 / 97)
    assert math.isclose(cost.bound(80 * 97, clock=1e12, simds=80, compute_units=40), 80 * 80 / 1)
    twice = cost + cost
    assert twice.vector_cycles == 2 * 97 and (twice - cost).counts == cost.counts
    assert (cost - twice).vector_cycles == -97


def test_a_wrong_number_is_called_wrong():
    from gfx1151_emulate import _ratio

    exact = torch.linspace(-1, 1, 64, dtype=torch.float64)
    low = exact.bfloat16()
    assert _ratio(low, low, exact, 2) <= 0.5
    wrong = low.clone()
    wrong[3] += 0.05
    assert _ratio(wrong, low, exact, 2) > 1 and _ratio(-low, low, exact, 3) > 1
    wrong[3] = float("nan")
    assert _ratio(wrong, low, exact, 2) == math.inf

"""The step on paper: what is counted against closed forms, the fusing of operations, and what the committed table claims."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "benchmarks"))

import gfx1151_model as model  # noqa: E402

from kernels import gate_columns  # noqa: E402

# Two layers, windows of 64 and all of 128 positions, two micro-steps of two rows; in a process of its own, which becomes a gfx1151's.
TOKENS, T, VOCAB, WIDTH, HEADS = 512, 128, 512, 256, 2
COUNT = f"""
import json, sys
sys.path.insert(0, "benchmarks")
import gfx1151_model as model
model.as_gfx1151()
import train
config = train.GPTConfig({T}, {VOCAB}, 2, {HEADS}, {HEADS}, {WIDTH}, "SL")
steps = [model.count_step(fused, config, {TOKENS}, 2) for fused in (True, False)]
assert model.own_config().sequence_len == 2048  # what the committed table counts
rates = {{**model.product_rates(model.PRODUCTS), "attention forward": 1.0, "attention backward": 1.0}}
print(json.dumps([model.kernel_rows("step", counted, [rates]) for counted in steps]))
"""


@pytest.fixture(scope="module")
def counted():
    run = subprocess.run([sys.executable, "-c", COUNT], check=False, cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [{(row["part"], row["kernel"]): row for row in rows} for rows in json.loads(run.stdout)]


def _sum(rows, part, column="tflop"):
    return sum(row[column] for (of, _), row in rows.items() if of == part)


def test_products(counted):
    """Three products of each matrix and token, and the head's; ours has the gates in the packed weight, with zeros. No TMA kernel."""
    for rows, gates in zip(counted, (gate_columns(HEADS) * WIDTH, HEADS * 32)):
        matrices = 2 * (12 * WIDTH * WIDTH) + gates + VOCAB * WIDTH
        for layout in ("forward", "input gradient", "weight gradient"):
            assert _sum(rows, f"products: {layout}") == pytest.approx(2e-12 * TOKENS * matrices)
    ours, plain = counted
    row = ours["products: weight gradient", f"{4 * WIDTH}×{TOKENS // 2}×{WIDTH} by rocBLAS"]
    assert row["launches"] == 4  # two layers, two micro-steps
    assert row["ms"] == pytest.approx(row["gigabytes"] / model.BANDWIDTH * 1e3)  # so small that its bytes take longer
    assert all(kernel.endswith("by rocBLAS") for part, kernel in ours if part == "products: weight gradient")  # of every shape
    assert all(kernel.endswith("by hipBLASLt") for part, kernel in plain if "products" in part)
    assert ("fused kernels", "gated_kernel") in ours and ("fused kernels", "product_kernel") not in ours
    assert not any(part == "fused kernels" for part, _ in plain)


def test_attention(counted):
    """Ours over the windows, with five useful products in the backward though dV, dK and dQ apart make eight; the recipe's over all."""
    windowed, full = (sum(min(i, window) + 1 for i in range(T)) for window in (T // 2, T))
    for rows, pairs in zip(counted, (windowed + full, 2 * full)):
        forward = 4 * WIDTH * pairs * TOKENS // T
        assert _sum(rows, "attention forward") == pytest.approx(1e-12 * forward)
        assert _sum(rows, "attention backward") == pytest.approx(2.5e-12 * forward)
    assert counted[0]["attention backward", "_dq_kernel"]["tflop"] == pytest.approx(
        2.5e-12 * 3 / 8 * forward * (windowed + full) / (2 * full)
    )
    assert {kernel for part, kernel in counted[0] if part == "attention backward"} == {
        "_dq_kernel",
        "_dkdv_kernel (dK)",
        "_dkdv_kernel (dV)",
    }


def test_bytes(counted):
    """Kernels read and write each tensor once: x, x0, their mix and its norm, an update but in the first layer; logits in place, both."""
    ours = counted[0]
    mix = ours["fused kernels", "residual_mix_norm_kernel"]
    assert mix["launches"] == 4
    assert mix["gigabytes"] == pytest.approx(1e-9 * ((4 + 5) * TOKENS * WIDTH * 2 + 2 * 2 * 2 * 4), rel=1e-3)
    assert ours["fused kernels", "_row_kernel"]["gigabytes"] == pytest.approx(1e-9 * TOKENS * (2 * VOCAB * 2 + 12))
    relu = ours["fused kernels", "gated_kernel"]
    assert relu["gigabytes"] == pytest.approx(1e-9 * 2 * (2 * TOKENS * 4 * WIDTH * 2 + TOKENS * 4))  # a scale for each row
    assert relu["ms"] == pytest.approx(relu["gigabytes"] / model.BANDWIDTH * 1e3)
    adam = 2 * VOCAB * WIDTH * (2 * 5 + 4 * 3)  # at least: moments and weights read and written, gradients read, of bf16 and float32 tables
    assert _sum(ours, "optimizer: elementwise", "gigabytes") > 1e-9 * adam / 2


def test_milliseconds():
    """Of a kernel: its FLOPs or its bytes, whichever take longer."""
    flops, size = 2 * 4096**3, 3 * 2 * 4096**2
    assert model.milliseconds(flops, size, 40.5) == pytest.approx(3.394, rel=1e-3)
    assert model.milliseconds(flops, size, 4050) == model.milliseconds(0, size, None) == pytest.approx(0.4735, rel=1e-3)


def test_visible_pairs():
    for T, window in ((5, None), (5, 0), (5, 2), (5, 4), (5, 9)):
        seen = [(i, j) for i in range(T) for j in range(i + 1) if window is None or i - j <= window]
        assert model.visible_pairs(T, window) == len(seen)


def test_product_layout():
    x, w, dy = torch.empty(6, 4), torch.empty(3, 4), torch.empty(6, 3)
    assert model.product_layout(x, w.t()) == "forward"
    assert model.product_layout(dy, w) == "input gradient"
    assert model.product_layout(dy.t(), x) == "weight gradient"


def _operation(reads, writes, fusable=True, size=100, reduces=False):
    return model.Event("elementwise", "mul", "model", dict.fromkeys(reads, 10), dict.fromkeys(writes, 10), 0, fusable, size, reduces)


def test_fusing():
    """What is made and read within a kernel moves no bytes; a reduction, an operator or another size begins a new kernel."""

    def fused(*events):
        return [(sorted(e.reads), sorted(e.writes)) for e in model.fuse(list(events))]

    a = _operation("x", "a")
    assert fused(a, _operation("ay", "b")) == [(["x", "y"], ["b"])]  # a is not read again
    assert fused(a, _operation("ay", "b"), _operation("a", "c", fusable=False)) == [(["x", "y"], ["a", "b"]), (["a"], ["c"])]
    assert fused(a, _operation("a", "r", reduces=True), _operation("ar", "c")) == [(["x"], ["a", "r"]), (["a", "r"], ["c"])]
    assert fused(a, _operation("z", "b", size=7)) == [(["x"], ["a"]), (["z"], ["b"])]
    assert fused(a, _operation("a", "b", size=7)) == [(["x"], ["b"])]  # the data flows on
    assert fused(_operation("px", "p"), _operation("p", "q")) == [(["p", "x"], ["p", "q"])]  # p in place


def test_trace_of_an_h200(tmp_path):
    """The recipe's kernels at the modelled batch that are neither products nor attention; ours that ran as often as they would here."""
    path = tmp_path / "kernels.csv"
    gigabytes, launches, source = model.recipe_elementwise(path)
    assert (gigabytes, launches) == (pytest.approx(107.5), 0) and "25 ms" in source
    assert model.share_of_copy([], path) is None
    rows = (
        "variant,tokens,micro_batch,kernel,launches,ms",
        "recipe,131072,16,triton_poi_fused_add_1,4,2.0",
        "recipe,131072,16,triton_per_fused__scaled_dot_product_cudnn_attention_mul_2,2,1.0",
        "recipe,131072,16,Memset (Device),1,0.5",
        "recipe,131072,16,nvjet_tst_256x128_64x4,9,7.0",
        "recipe,131072,16,cudnn_generated_fort_native_sdpa_sm90_flash_fprop,3,5.0",
        "recipe,524288,128,triton_poi_fused_add_1,4,8.0",
        "ours,131072,16,triton_poi_fused_add_1,4,1.0",
        "ours,131072,16,rms_norm_kernel,40,2.0",
        "ours,131072,16,gated_kernel,3,9.0",
    )
    path.write_text("\n".join(rows))
    assert model.recipe_elementwise(path)[:2] == (pytest.approx(3.5 * 4.3), 7)
    ours = [dict(part="fused kernels", kernel=k, launches=n, gigabytes=5.0) for k, n in (("rms_norm_kernel", 40), ("gated_kernel", 32))]
    assert model.share_of_copy(ours, path) == pytest.approx(5.0 / 2.0 / 4.3)


def test_committed_table():
    """The published recipe as its author measured it, ours below the aim at the forward's share, and rows that follow from the rates."""
    with open(PROJECT / "benchmarks" / "gfx1151_model.csv") as file:
        rows = list(csv.DictReader(file))
    total = {step: sum(float(row["ms"]) for row in rows if row["step"] == step) / 1e3 for step in ("published recipe", "ours")}
    assert 2.4 <= total["published recipe"] <= 2.8
    assert 0.5 < total["ours"] <= 1.45
    assert sum(float(row["ms_low"]) for row in rows if row["step"] == "ours") / 1e3 > total["ours"]
    forward, low = model.our_rates()
    for row in rows:
        if row["step"] == "ours" and row["part"] == "attention backward":
            assert float(row["ms"]) == pytest.approx(float(row["tflop"]) * 1e3 / forward["attention backward"], rel=1e-3)
            assert float(row["ms_low"]) == pytest.approx(float(row["tflop"]) * 1e3 / low["attention backward"], rel=1e-3)
        if row["part"] == "fused kernels":
            assert float(row["ms"]) == pytest.approx(float(row["gigabytes"]) * 1e3 / model.BANDWIDTH, rel=2e-2, abs=1e-3)

"""The kernels as gfx1151 code: every tuning candidate obeys the report's rules, compiled here for a part that is elsewhere."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gfx1151_report.py"
sys.path.insert(0, str(SCRIPT.parent))

import gfx1151_offenders  # noqa: E402
import gfx1151_report  # noqa: E402


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{part: rows of the report's CSV}, made in processes of their own: this one may hold interpreted kernels, which cannot be
    compiled. About 65 seconds of one core, three at once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    directory = tmp_path_factory.mktemp("gfx1151")
    rest = [module for module in gfx1151_report.MODULES if module != "attention"]
    processes = {}
    for part, modules in (("attention", ["attention"]), ("rest", rest), ("offenders", ["tests.gfx1151_offenders"])):
        command = [sys.executable, SCRIPT, *modules, "--no-large", "--csv", directory / f"{part}.csv"]
        processes[part] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    reports = {}
    for part, process in processes.items():
        output, _ = process.communicate(timeout=600)
        assert process.returncode in (0, 1) and "of these break a rule" in output, output
        with open(directory / f"{part}.csv") as file:
            reports[part] = list(csv.DictReader(file))
        assert process.returncode == any(row["broken"] for row in reports[part]), output
    return reports


@pytest.fixture
def rows(reports):
    return reports["attention"] + reports["rest"]


def test_every_candidate_obeys_the_rules(rows):
    """All rules on the Tritons that the candidates were chosen with. On 3.6 those that are not the first may spill, on others all may
    (docs/gfx1151.md)."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))

    def broken_by(row):
        excused = version not in ((3, 7), (3, 8)) and (version != (3, 6) or row["default"] == "False")
        return {rule for rule in row["broken"].split(", ") if rule} - ({"spills", "scratch"} if excused else set())

    broken = [f"{row['kernel']} {row['shape']} {row['options']}: {row['broken']}" for row in rows if broken_by(row)]
    assert not broken, "\n".join(broken)


def test_every_kernel_is_reported(rows):
    """Forward and backward of every operation, and each with a configuration that it takes first."""
    defaults = {row["kernel"].split(" ")[0].strip(",") for row in rows if row["default"] == "True"}
    assert defaults >= {
        "rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward", "rms_norm_dweight", "relu_squared",
        "relu_squared_backward", "silu", "silu_backward", "gelu", "gelu_backward", "gelu_tanh", "gelu_tanh_backward", "qk_norm_rope",
        "qk_norm_rope_backward", "qkv_norm_rope", "qkv_norm_rope_backward", "residual_mix_norm", "residual_mix_norm_backward",
        "residual_mix_norm_linear_backward", "add_norm_linear_backward", "add_rstd", "add_norm_mlp_backward", "flash_attention",
        "softcap_cross_entropy", "linear_softcap_cross_entropy", "mean",
    }  # fmt: skip
    for head_dim in (64, 128):
        passes = {row["kernel"].split()[1] for row in rows if row["shape"].startswith(f"head_dim {head_dim}") and row["default"] == "True"}
        assert passes == {"forward", "delta", "dq", *(["dkdv"] if head_dim == 64 else ["dv", "dk"])}
        forward = [
            row["shape"] for row in rows if row["kernel"].startswith("flash_attention forward") and f"head_dim {head_dim}" in row["shape"]
        ]
        assert {shape.split(", ")[1] for shape in forward} == {"causal", "window", "full"}
        assert {f"{shape}, bounded" for shape in forward if "bounded" not in shape} == {shape for shape in forward if "bounded" in shape}


def test_figures_are_there(rows):
    """The report reads what it says: a parse that finds nothing would break no rule."""
    for row in rows:
        name = row["kernel"]
        assert 8 <= int(row["vgprs"]) <= 256, name
        assert int(row["load"]) >= int(row["load128"]) >= 0 and int(row["store"]) > 0, name
        assert 1 <= int(row["waves"]) <= 16 and 0 <= int(row["lds"]) <= 65536, name
        assert (int(row["spills"]) > 0) == ("spills" in row["broken"]) and (int(row["scratch"]) > 0) == ("scratch" in row["broken"]), name


def test_a_kernel_that_breaks_a_rule_is_named(reports):
    """Compiled kernels that spill, take too much LDS, use no WMMA, …: the report says so, of them alone, and fails."""
    expected = [case["breaks"] for case in gfx1151_offenders.gfx1151_cases()]
    assert [row["broken"] for row in reports["offenders"]] == [", ".join(breaks) for breaks in expected]
    if gfx1151_offenders.VERSION in ((3, 7), (3, 8)):
        rules = {"spills", "scratch", "LDS", "v_dot2_bf16_bf16", "no WMMA", "narrow loads", "narrow stores", "waves"}
        assert {rule for breaks in expected for rule in breaks} == rules


def test_rules_find_what_they_are_for():
    good = {"spills": 0, "scratch": 0, "lds": 0, "dot2": 0, "wmma": 4, "load_wide": 1.0, "store_wide": 0.8, "waves": 16}
    memory, matmul = {"kind": "memory"}, {"kind": "matmul"}
    assert gfx1151_report.broken_rules(memory, good) == []
    assert gfx1151_report.broken_rules(matmul, {**good, "waves": 5, "load_wide": 0, "store_wide": 0}) == []
    for case, change, rule in (
        (memory, {"spills": 1}, "spills"), (matmul, {"scratch": 4}, "scratch"), (matmul, {"lds": 65540}, "LDS"),
        (memory, {"dot2": 1}, "v_dot2_bf16_bf16"), (matmul, {"dot2": 1}, "v_dot2_bf16_bf16"), (matmul, {"wmma": 0}, "no WMMA"),
        (memory, {"waves": 12}, "waves"), (memory, {"load_wide": 0.5}, "narrow loads"), (memory, {"store_wide": 0.5}, "narrow stores"),
    ):  # fmt: skip
        assert gfx1151_report.broken_rules(case, {**good, **change}) == [rule]
    assert gfx1151_report.broken_rules({**memory, "wide": True}, {**good, "waves": 12}) == []
    assert gfx1151_report.broken_rules({**memory, "stores": False}, {**good, "store_wide": 0}) == []


def test_waves_a_simd():
    """The register limits, and LDS shared by the four SIMDs of a WGP."""
    for vgprs, expected in ((1, 16), (96, 16), (97, 12), (120, 12), (144, 10), (192, 8), (240, 6), (241, 5), (256, 5)):
        assert gfx1151_report.waves(vgprs, 0, 4) == expected
    assert gfx1151_report.waves(96, 65536, 4) == 2 and gfx1151_report.waves(96, 65536, 16) == 8 and gfx1151_report.waves(96, 16384, 4) == 8


def test_document_has_the_committed_figures():
    """Attention's table in docs/gfx1151.md is benchmarks/gfx1151.csv's first candidates, of the Triton that counts; none breaks a rule."""
    with open(SCRIPT.parent / "gfx1151.csv") as file:
        committed = list(csv.DictReader(file))
    assert {row["triton"] for row in committed} == {"3.8.0"} and not any(row["broken"] for row in committed)
    expected = set()
    for row in committed:
        head_dim, _, shape = row["shape"].removeprefix("head_dim ").partition(", ")
        if row["kernel"].startswith("flash_attention") and row["default"] == "True" and shape == "causal":
            loads = f"{row['load128']} of {row['load']}"
            tile = row["kernel"].removeprefix("flash_attention ").lower().replace("dkdv", "dk/dv")
            expected.add((head_dim, tile, row["vgprs"], row["lds"], row["waves"], row["wmma"], loads, row["spills_2gib"]))
    text = (SCRIPT.parents[1] / "docs" / "gfx1151.md").read_text().split("## Attention (compiled)")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]
    assert {(head_dim, tile.lower(), *rest) for head_dim, tile, _, *rest in cells} == expected and len(expected) == 7

"""The kernels as gfx1151 code: the defaults of every kernel obey the report's rules, compiled here for a part that is elsewhere."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gfx1151_report.py"
sys.path.insert(0, str(SCRIPT.parent))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The report's CSV, made in a process of its own: this one may hold interpreted kernels, which cannot be compiled."""
    path = tmp_path_factory.mktemp("gfx1151") / "report.csv"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--defaults", "--no-large", "--csv", path]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert path.exists() and run.returncode in (0, 1), run.stdout + run.stderr
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert rows, run.stdout + run.stderr
    return rows


def test_every_default_obeys_the_rules(rows):
    broken = [f"{row['kernel']} {row['shape']} {row['options']}: {row['broken']}" for row in rows if row["broken"]]
    assert not broken, "\n".join(broken)


def test_figures_are_there(rows):
    """The report reads what it says: a parse that finds nothing would break no rule."""
    for row in rows:
        name = row["kernel"]
        assert 8 <= int(row["vgprs"]) <= 256, name
        assert int(row["load"]) >= int(row["load128"]) >= 0 and int(row["store"]) > 0, name
        assert 1 <= int(row["waves"]) <= 16 and 0 <= int(row["lds"]) <= 65536, name
        assert int(row["spills"]) == int(row["scratch"]) == int(row["dot2"]) == 0, name


def test_rules_find_what_they_are_for():
    import gfx1151_report as report

    good = {"spills": 0, "scratch": 0, "lds": 0, "dot2": 0, "wmma": 4, "load128": 2, "store128": 2, "waves": 16}
    memory, matmul = {"kind": "memory"}, {"kind": "matmul"}
    assert report.broken_rules(memory, good) == [] == report.broken_rules(matmul, {**good, "waves": 5, "load128": 0, "store128": 0})
    for case, change, rule in (
        (memory, {"spills": 1}, "spills"), (matmul, {"scratch": 4}, "scratch"), (matmul, {"lds": 65540}, "LDS"),
        (memory, {"dot2": 1}, "v_dot2_bf16_bf16"), (matmul, {"wmma": 0}, "no WMMA"), (memory, {"waves": 12}, "waves"),
        (memory, {"load128": 0}, "no 128-bit loads"), (memory, {"store128": 0}, "no 128-bit stores"),
    ):  # fmt: skip
        assert report.broken_rules(case, {**good, **change}) == [rule]
    assert report.broken_rules({**memory, "wide": True}, {**good, "waves": 12}) == []
    assert report.broken_rules({**memory, "stores": False}, {**good, "store128": 0}) == []


def test_waves_a_simd():
    """The register limits, and LDS shared by the four SIMDs of a WGP."""
    import gfx1151_report as report

    for vgprs, expected in ((1, 16), (96, 16), (97, 12), (120, 12), (144, 10), (192, 8), (240, 6), (241, 5), (256, 5)):
        assert report.waves(vgprs, 0, 4) == expected
    assert report.waves(96, 65536, 4) == 2 and report.waves(96, 65536, 16) == 8 and report.waves(96, 16384, 4) == 8

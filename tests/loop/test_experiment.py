"""experiment.py as a program: real git repositories, real processes, real kills; train.py is a stand-in that takes a moment.

What is simulated beside train.py: run.sh is two lines, and where a GPU is at fault a stub stands for the Python that would ask it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from checkout import RUN_SH, Checkout, Kill, helper, processes_of, wait_until, without_a_reader
from conftest import PROJECT

from loop import files, processes, proposal, verdict


@pytest.fixture
def fresh(tmp_path):
    return Checkout(tmp_path / "a project").make()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("begun") / "a project").make()
    checkout.call("begin", "nov29")
    return checkout


@pytest.fixture
def series(begun, tmp_path):
    """A series with its baseline."""
    return begun.copy(tmp_path / "a project")


@pytest.fixture(scope="module")
def shared(begun, tmp_path_factory):
    """A series that many tests add a run to."""
    return begun.copy(tmp_path_factory.mktemp("shared") / "a project")


def is_alive(pid):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


# ---- the loop as it should go -------------------------------------------------------------------------------------------------


def test_begin_makes_branch_ledger_and_baseline(series):
    assert series.git("branch", "--show-current") == "autoresearch/nov29" and series.is_clean()
    assert series.git("rev-parse", "HEAD~") == series.git("rev-parse", "main") and series.git("diff", "main") == ""
    assert series.rows == [[series.git("rev-parse", "--short=7", "HEAD"), "2.000000", "0.5", "keep", "baseline"]]
    outcome = series.run_json(1)
    assert (outcome["number"], outcome["tag"], outcome["kind"], outcome["seed"], outcome["state"]) == (1, "nov29", "baseline", 42, "valid")
    assert outcome["commit"] == series.git("rev-parse", "refs/autoresearch/nov29/1") and outcome["exit_code"] == 0
    assert outcome["summary"]["val_bpb"] == 2.0 and outcome["summary"]["num_steps"] == 120 and outcome["device"] == "CPU"
    assert outcome["losses"][0] == [0.0, 8.0] and len(outcome["losses"]) == 10 and outcome["versions"] == {"torch": "2.13.0"}
    assert set(outcome["seconds"]) == {"startup", "training", "evaluation", "total"}


def test_keep_moves_the_branch_and_discard_does_not(series):
    tried = series.edit(VALUE=1.9)
    output = series.call("try", "a lower\tvalue\nreally")
    assert (
        output.startswith("keep run 2")
        and "1.900000, better by 0.100000 than the best 2.000000 (noise not measured" in output
        and len(output.splitlines()) <= 12
    )
    assert series.rows[1][1:] == ["1.900000", "0.5", "keep", "a lower value really"] and series.is_clean()
    assert series.git("rev-parse", "HEAD") == series.run_json(2)["commit"]
    best = series.train.read_text()
    assert best == tried == (series.folder / "runs/2/train.py").read_text()
    worse = series.edit(VALUE=1.95)
    output = series.call("try", "a higher value")
    assert "1.950000, worse by 0.050000 than the best 1.900000" in output
    assert output.startswith("discard run 3") and "train.py is the best's again" in output
    assert series.rows[2][1:] == ["1.950000", "0.5", "discard", "a higher value"] and series.is_clean()
    assert series.train.read_text() == best and series.git("rev-parse", "HEAD") == series.run_json(2)["commit"]
    assert series.git("show", "refs/autoresearch/nov29/3:train.py") == worse.strip(), "a discarded commit stays reachable"
    assert "-VALUE = 1.9\n+VALUE = 1.95" in (series.folder / "runs/3/change.diff").read_text()


def test_a_worktree_on_no_branch_works_on_the_series(series):
    other = helper(series, "other")
    other.edit(VALUE=1.9)
    assert other.call("try", "from beside").startswith("keep run 2")
    assert series.rows[1][1:] == ["1.900000", "0.5", "keep", "from beside"] and not (other.folder / "results.tsv").exists()
    assert series.git("rev-parse", "HEAD") == series.run_json(2)["commit"] and series.best_value() == 1.9
    other.edit(VALUE=1.95)
    assert other.call("try", "worse").startswith("discard run 3") and "VALUE = 1.9\n" in other.train.read_text(), "the best's again"
    (other.folder / "run.sh").write_text("changed\n")
    other.edit(VALUE=1.8)
    assert "unsaved changes in run.sh" in other.call("try", "x", code=2)


def test_what_began_from_an_older_best_is_a_candidate(series):
    other = helper(series, "other")
    series.edit(BONUS=0.1)
    series.call("try", "first")
    other.edit(VALUE=1.7)
    output = other.call("try", "better, without the first")
    assert output.startswith("candidate run 3") and "better by 0.200000 than the best 1.900000" in output
    assert "began from an older best; to try it as it is: cp runs/3/train.py train.py" in output and len(output.splitlines()) <= 12
    assert series.rows[2][1:] == ["1.700000", "0.5", "discard", "candidate: better, without the first"]
    assert series.run_json(3)["parent"] == series.run_json(1)["commit"] and series.best_value() == 2.0
    third = helper(series, "third", "HEAD~")
    third.edit(VALUE=1.95)
    output = third.call("try", "better than what it began from")
    assert output.startswith("discard run 4") and "than the best 1.900000" in output
    assert "better by 0.050000 than what it began from: it may add to the best of now" in output
    (series.folder / "train.py").write_text((series.folder / "runs/3/train.py").read_text())
    assert series.call("try", "as it is").startswith("keep run 5") and series.best_value() == 1.7 and series.git("status", "--short") == ""
    other.train.write_text(series.train.read_text())  # it has what was kept since, so it is the best's edit
    other.edit(VALUE=1.6)
    assert other.call("try", "on the best").startswith("keep run 6") and series.best_value() == 1.6


def test_a_worktree_elsewhere_is_refused(series):
    series.git("switch", "--quiet", "main")
    series.commit_file("run.sh", RUN_SH + "true\n")
    series.git("switch", "--quiet", "autoresearch/nov29")
    other = helper(series, "other", "main")
    other.edit(VALUE=1.9)
    assert "is not on the series" in other.call("try", "x", code=2)


def test_equal_is_no_keep(series):
    series.edit(PARAMS=0.7)
    assert series.call("try", "as good").startswith("discard")


def test_simpler_keeps_an_equal_score_of_less_code(series):
    longer = series.train.read_text() + "\nUNUSED = 1\n"
    series.train.write_text(longer)
    assert "not simpler" in series.call("try", "--simpler", "more", code=2) and series.train.read_text() == longer
    series.train.write_text(
        longer.replace("\nUNUSED = 1\n", "")
        .replace("TOKENS = 65536", "TOKENS = 2**16")
        .replace("PARAMS = 0.6\n", "")
        .replace("PARAMS", "0.6")
    )
    assert series.call("try", "--simpler", "a constant less").startswith("discard") is False
    assert series.rows[1][3:] == ["keep", "simpler: a constant less"] and series.is_clean()
    series.call("noise", 1)
    series.train.write_text(series.train.read_text().replace("VALUE = 2.0", "VALUE = 2.0004").replace("depth=4, ", ""))
    output = series.call("try", "--simpler", "no depth")
    assert "2.000400, worse by 0.000400 than the best 2.000000" in output and output.startswith("keep")
    series.edit(VALUE=2.0002, STEPS=100)
    output = series.call("try", "--prune", "lower than the best, not the lowest")
    assert output.startswith("discard") and "better by 0.000200 than the best 2.000400 = " in output and "100 (best 120) steps" in output
    assert "to beat was 2.000000, the lowest so far; --prune did not stop it\n" in output


def test_noise_is_measured_and_shown(series):
    output = series.call("noise", 2)
    assert "3 seeds: mean 2.001000, deviation = noise floor 0.001000" in output
    commit = series.rows[0][0]
    assert series.rows[1:] == [[commit, f"2.00{s - 42}000", "0.5", "discard", f"noise: seed {s} of {commit}"] for s in (43, 44)]
    assert [series.run_json(n)["seed"] for n in (1, 2, 3)] == [42, 43, 44]
    for value, margin, status, words in (
        (1.9995, 0, "keep", "better by 0.000500 than the best 2.000000 = 0.5 floors: may be luck\nthe best's 3 runs: mean 2.001000\n"),
        (1.9980, 2, "discard", " = 1.5 floors: probably real\n--margin 2 asked for less than 1.997500\n"),
        (1.9960, 2, "keep", " = 3.5 floors: real\n--margin 2 asked for less than 1.997500\n"),
    ):
        series.edit(VALUE=value)
        output = series.call("try", "--margin", margin, f"value {value}")
        assert output.startswith(status) and words in output, output
    series.call("noise", 1)
    assert series.rows[-1][4].startswith("noise: seed 43 of "), "a new best has its own repeats"
    assert "the best's 2 runs: mean 1.996500\n" in series.call("status")
    status = json.loads(series.call("status", "--json"))
    assert status["best_runs"] == {"mean": 1.9965, "runs": 2} and status["noise"]["uneven"] is None
    series.edit(VALUE=3.0)
    series.git("checkout", "HEAD", "train.py")  # as program.md says
    series.call("begin", "again", AUTORESEARCH_SEED="50")
    assert series.best_value() == 1.996 and [row[1] for row in series.rows] == ["2.004000"], "the best measured again, with another seed"


def test_margin_needs_a_measured_noise(series):
    series.edit(VALUE=1.9)
    assert "noise is not measured" in series.call("try", "--margin", 1, "x", code=2) and len(series.rows) == 1


def test_prune_stops_a_run_that_is_clearly_worse(series):
    series.train.write_text(
        series.train.read_text()
        .replace("8 - 6 * step", "8 - 3 * step")
        .replace("flush=True)\n    time", "flush=True) or time.sleep(0.1)\n    time")
    )
    series.edit(VALUE=1.5)
    output = series.call("try", "--prune", "slow learner")
    assert output.startswith("discard") and "stopped at 50 % (--prune): loss 6.5000, the best's was 5.0000" in output
    assert series.rows[1][1:] == ["0.000000", "0.0", "discard", "pruned: slow learner"]
    assert series.run_json(2)["state"] == "pruned" and series.is_clean()


def test_status_and_show_are_short_and_true(series):
    for i in range(12):
        series.edit(**{"VALUE": 2.5} if i % 2 else {"PARAMS": 1.0 + i, "VALUE": 2.0 - i / 100})
        series.call("try", f"idea {i} " + "long " * 60, code=None)
    output = series.call("status")
    assert output.startswith("series nov29: the baseline and 12 experiments: 5 kept, 0 crashed\n")
    assert ", better by 0.100000 than the baseline 2.000000\n" in output and "  PARAMS: 6, 5 kept, +0.020000\n" in output
    assert len(output.splitlines()) <= 40 and max(map(len, output.splitlines())) < 200
    status = json.loads(series.call("status", "--json"))
    assert (status["experiments"], status["keeps"], status["crashes"], status["running"]) == (12, 5, 0, [])
    assert status["best"]["val_bpb"] == status["bar"] == 1.9 and status["baseline"]["val_bpb"] == 2.0 and len(status["recent"]) == 10
    assert status["tried"]["PARAMS"]["tries"] == 6 and status["tried"]["VALUE"]["keeps"] == 5 and status["since_last_keep"] == 1
    shown = series.call("show", 3)
    assert "+VALUE = 2.5" in shown and "val_bpb 2.5" in shown and len(shown.splitlines()) < 60
    assert "no run 99" in series.call("show", 99, code=2)


def test_results_are_drawn_after_each_turn(fresh):
    (fresh.folder / "results.py").write_text("import os\nopen('runs/drawn', 'a').write(open('results.tsv').read())\nraise SystemExit(1)\n")
    fresh.commit("results")
    fresh.call("begin", "a")
    wait_until(lambda: (fresh.folder / "runs/drawn").exists() and "baseline" in (fresh.folder / "runs/drawn").read_text())


# ---- refused, with nothing lost -------------------------------------------------------------------------------------------------


def test_what_try_refuses(series):
    before = series.train.read_text()
    cases = {
        "edit it first": before,
        "edit it first ": before.replace("VALUE = 2.0", "VALUE = 2.0  # a comment"),
        "in all that runs": before.replace('"""A stand-in for train.py', '"""Another docstring: a stand-in for train.py'),
        "changes harness.run.compiled": before.replace("import os\n", "import os\nfrom harness.run import compiled\ncompiled = 1\n"),
        "changes harness.run.TIME_BUDGET": before.replace("import os\n", "import os\nfrom harness import run\nrun.TIME_BUDGET = 9\n"),
        "changes harness.run.TIME_BUDGET ": before.replace("import os\n", "import os\nimport harness.run\nharness.run.TIME_BUDGET = 9\n"),
        "does not compile, line": before + "def broken(:\n",
        "does not compile: something in it is nested too deeply": before + "x = " + "-" * 20_000 + "1\n",
        "changes prepare.TIME_BUDGET": before.replace("import os\n", "import os\nimport prepare\nprepare.TIME_BUDGET = 100\n"),
        "changes prepare.evaluate_bpb": before.replace("import os\n", "import os\nimport prepare as p\np.evaluate_bpb = lambda: 0\n"),
        "changes prepare.__dict__['TIME_BUDGET']": before.replace(
            "import os\n", "import os, prepare\nprepare.__dict__['TIME_BUDGET'] = 9\n"
        ),
        "hands on prepare": before.replace("import os\n", "import os, prepare\np = prepare\np.TIME_BUDGET = 9\n"),
        "hands on prepare ": before.replace("import os\n", "import os, prepare\nsetattr(prepare, 'TIME_BUDGET', 9)\n"),
        "imports by name": before.replace("import os\n", "import os\n__import__('prepare').TIME_BUDGET = 9\n"),
        "uses sys.modules": before.replace("import os\n", "import os, sys\nsys.modules['prepare'].TIME_BUDGET = 9\n"),
        "replaces prepare.evaluate_bpb": before.replace(
            "import os\n", "import os\nfrom prepare import evaluate_bpb\n\ndef evaluate_bpb():\n    pass\n"
        ),
        "imports * from prepare": before.replace("import os\n", "import os\nfrom prepare import *\nTIME_BUDGET = 9\n"),
        "changes prepare.WARMUP_STEPS": before.replace("import os\n", "import os\nfrom prepare import WARMUP_STEPS\nWARMUP_STEPS = 50\n"),
        "changes prepare.TIME_BUDGET ": before.replace("from prepare import TIME_BUDGET  # noqa: F401\n", "TIME_BUDGET = 900\n"),
        "sets a seed": before.replace("import os\n", "import os\nimport random as torch\ntorch.manual_seed(7)\n"),
        "uses AUTORESEARCH_TIME_BUDGET": before.replace("import os\n", "import os\nos.environ['AUTORESEARCH_TIME_BUDGET'] = '9'\n"),
        "imports helper.py": before.replace("import os\n", "import os\nimport helper\n"),
    }
    (series.folder / "helper.py").write_text("")
    for message, text in cases.items():
        series.train.write_text(text)
        assert message.strip() in series.call("try", "x", code=2)
        assert series.train.read_text() == text and len(series.rows) == 1
    series.train.write_text(before)
    series.edit(VALUE=1.9)
    assert "say what is tried" in series.call("try", " \n", code=2)
    (series.folder / "prepare.py").write_text("# mine\n")
    assert "unsaved changes in prepare.py: only train.py may differ" in series.call("try", "x", code=2)
    series.git("restore", "prepare.py")
    (series.folder / "program.md").write_text("steered\n")
    assert series.call("try", "with a steered program.md").startswith("keep")


def test_the_same_program_is_recognised(series):
    series.edit(VALUE=2.5)
    series.call("try", "worse")
    series.edit(VALUE=2.5)
    series.train.write_text(series.train.read_text() + "# another comment\n")
    assert "tried already, run 2" in series.call("try", "worse, again", code=2) and len(series.rows) == 2


def test_a_series_must_be_checked_out_and_its_own(series):
    series.edit(VALUE=1.9)
    for setting in ("AUTORESEARCH_TIME_BUDGET", "AUTORESEARCH_DATASET"):
        assert setting in series.call("try", "x", code=2, **{setting: "300"})
    series.git("-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-am", "by hand")
    message = series.call("try", "x", code=2)
    assert "committed by hand" in message
    series.git("reset", "--soft", re.search("git reset --soft ([0-9a-f]+)", message)[1])
    assert series.call("try", "x").startswith("keep") and series.is_clean()
    assert "has begun" in series.call("begin", "nov29", code=2)
    series.git("switch", "--quiet", "main")
    assert "no series is checked out" in series.call("try", "x", code=2)
    assert len(series.call("status").splitlines()) == 1 and "begin TAG" in series.call("status")
    assert json.loads(series.call("status", "--json")) == {"tag": None}
    assert "git switch autoresearch/nov29" in series.call("begin", "nov29", code=2)
    series.edit(VALUE=1.7)
    assert "unsaved changes in train.py" in series.call("begin", "second", code=2)
    series.git("restore", "train.py")
    assert "no tag" in series.call("begin", "a b", code=2)
    series.call("begin", "second")
    assert len(series.rows) == 1 and len((series.folder / "runs/nov29.tsv").read_text().splitlines()) == 3
    assert series.run_json(3)["tag"] == "second", "numbers go on"
    series.git("switch", "--quiet", "autoresearch/nov29")
    series.edit(VALUE=1.5)
    assert "results.tsv is another series'" in series.call("try", "x", code=2)


def test_a_shell_without_the_settings_goes_on_with_the_series_own(fresh):
    assert "AUTORESEARCH_SEED='x'" in fresh.call("begin", "short", code=2, AUTORESEARCH_SEED="x")
    fresh.call("begin", "short", AUTORESEARCH_TIME_BUDGET="2", GPU_BF16_PEAK_FLOPS="1e12", AUTORESEARCH_SEED="43")
    fresh.edit('print("budget", os.environ["AUTORESEARCH" + "_TIME_BUDGET"], os.environ["GPU_BF16_PEAK_FLOPS"])', VALUE=1.9)
    fresh.call("try", "x")
    assert "budget 2 1e12" in (fresh.folder / "runs/2/run.log").read_text()
    fresh.call("noise", "2")
    assert [fresh.run_json(n)["seed"] for n in (1, 2, 3, 4)] == [43, 43, 42, 44]


def test_one_run_a_gpu(series, tmp_path):
    """A second worktree of the user waits for the same GPU, and runs beside the first on another."""
    series.git("worktree", "add", "--quiet", "-b", "second", str(tmp_path / "two"), "main")
    (tmp_path / "two" / "venv").symlink_to(series.folder / "venv")
    other = Checkout(tmp_path / "two", {"AUTORESEARCH_HARDWARE": "amd", "HIP_VISIBLE_DEVICES": "1"})
    series.environment["AUTORESEARCH_HARDWARE"] = "amd"
    config = series.folder / "runs/nov29.json"
    config.write_text(config.read_text().replace('"none"', '"amd"'))
    series.edit(SECONDS=4.0, VALUE=1.9)
    assert "still running" in series.call("try", "long", "--wait", 0, code=75, HIP_VISIBLE_DEVICES="1")
    message = other.call("begin", "two", code=2)
    assert "gpu-1 is in use by run 2 of " + str(series.folder) in message
    other.call("begin", "two", HIP_VISIBLE_DEVICES="0,1")
    assert other.rows[0][3:] == ["keep", "baseline"]
    assert series.call("wait").startswith("keep") and other.git("worktree", "list").count("\n") == 1


# ---- what the machine does -------------------------------------------------------------------------------------------------------


def test_environment_failure_is_not_the_idea(series):
    text = series.edit(first='print("FAIL: no GPU to be seen", file=sys.stderr); sys.exit(3)', VALUE=1.9)
    for _ in range(2):  # it is not "tried already"
        output = series.call("try", "good idea", code=3)
        assert "ENVIRONMENT" in output and "no GPU to be seen" in output and "End the loop" in output
    assert len(series.rows) == 1 and series.train.read_text() == text


def test_a_full_disk_stops_before_the_run(series):
    series.edit(VALUE=1.9)
    assert "GB free in" in series.call("try", "x", code=3, AUTORESEARCH_LIMITS="disk=1000000000000000") and len(series.rows) == 1
    assert "AUTORESEARCH_LIMITS" in series.call("try", "x", code=2, AUTORESEARCH_LIMITS="patience=1")


def test_begin_again_after_a_failed_setup(fresh):
    (fresh.folder / "venv/ready").write_text("")
    (fresh.folder / "run.sh").write_text(
        RUN_SH.replace("exec", "test -e venv/ready || { echo 'autoresearch: no space' >&2; exit 1; }; exec")
    )
    fresh.commit("a run.sh that needs something")
    (fresh.folder / "venv/ready").unlink()
    output = fresh.call("begin", "nov29", code=3)
    assert "autoresearch: no space" in output and not (fresh.folder / "results.tsv").exists()
    assert "no baseline yet" in fresh.call("noise", code=2)
    (fresh.folder / "venv/ready").write_text("")
    fresh.call("begin", "nov29")
    assert len(fresh.rows) == 1 and fresh.is_clean()
    (fresh.folder / "venv/ready").unlink()
    fresh.edit(VALUE=1.9)
    assert "ENVIRONMENT run 3: autoresearch: no space" in fresh.call("try", "x", code=3) and len(fresh.rows) == 1


def test_what_survives_sigkill_asks_for_a_reboot():
    """A driver that hangs is simulated: signals to the process, which is real, are dropped."""
    code = """
import os, sys
from loop import files, processes

files.LIMITS["kill"], kill = 0.2, os.kill
os.kill = lambda pid, number: None
left = processes.end_processes("0123", None, grace=0.1)
os.kill = kill
print(left, processes.unkillable(left), processes.end_processes("0123", None, grace=1))
"""
    process = subprocess.Popen(["sleep", "60"], env={"AUTORESEARCH_RUN": "0123"})
    try:
        wait_until(lambda: processes_of("0123") == [process.pid])
        done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, capture_output=True, text=True)
        survives = f"process {process.pid} survives SIGKILL, so the driver hangs: reboot the machine"
        assert done.stdout == f"[{process.pid}] {survives} []\n" and process.wait() == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_changed_data_is_not_compared(series):
    facts = series.folder.parent / "cache/demo/data/dataset.json"
    facts.write_text(facts.read_text().replace("0123456789ab", "another"))
    series.edit(FINGERPRINT="another", VALUE=1.9)
    assert "the data has changed" in series.call("try", "x", code=3) and len(series.rows) == 1


def test_another_kind_of_device_is_not_compared(series):
    series.train.write_text(series.edit(VALUE=1.9).replace('device="CPU"', 'device="NVIDIA H200"'))
    output = series.call("try", "x", code=3, STANDIN_DEVICE="NVIDIA H200")
    assert "device NVIDIA H200, the baseline's was CPU: their numbers don't compare" in output and len(series.rows) == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_error_is_the_machines_only_if_the_gpu_no_longer_works(series, works):
    """A stub of venv/bin/python answers for a GPU."""
    python = series.folder / "venv/bin/python"
    python.unlink()
    python.write_text(
        f'#!/bin/sh\n[ "$3" = -c ] || exec "{sys.executable}" "$@"\necho "HIP error: device lost" >&2; exit {0 if works else 1}\n'
    )
    python.chmod(0o755)
    config = series.folder / "runs/nov29.json"
    config.write_text(config.read_text().replace('"none"', '"amd"'))
    series.environment["AUTORESEARCH_HARDWARE"] = "amd"
    series.edit('raise RuntimeError("HIP error: unspecified launch failure")')
    output = series.call("try", "x", code=1 if works else 3)
    assert ("crash" if works else "no longer works, for any program: HIP error: device lost") in output and len(series.rows) == 1 + works


def test_speed_that_differs_is_told(series):
    """At equal work, by exact tokens a step (total_tokens_M is rounded). A number that its speed explains is not judged."""
    best = series.train.read_text()

    def at(steps, value, **more):
        series.train.write_text(best)
        series.edit(VALUE=value, STEPS=steps, **more)
        return series.call("try", f"{steps} steps")

    series.call("noise", 1)
    output = at(90, 2.1)
    assert "= 141.4 floors: speed differs: not comparable\n" in output
    assert "warning: 25 % fewer tokens/s than the best at equal size: " in output
    assert "floors: real\n" in at(110, 2.1), "8 % alone make no such difference"
    assert "warning" not in at(60, 2.1, PARAMS=1.2), "a larger model is slower"
    output = at(180, 1.9)
    assert "speed differs: not comparable\n" in output and output.startswith("keep")
    assert "warning: 50 % more tokens/s than the best at equal size: the idea saves that, or the machine was slow when" in output
    best = series.train.read_text()
    assert "floors: real\n" in at(90, 1.8), "slower and better all the same"


def test_a_floor_of_load_is_told(series):
    series.edit('globals().update(STEPS=STEPS + int(os.environ["AUTORESEARCH" + "_SEED"]) - 42) if 1 else 0', VALUE=1.9)
    series.call("try", "more steps with each seed")
    assert "warning" not in series.call("noise", 1) and "warning" not in series.call("status")
    series.edit(VALUE=1.8)
    series.train.write_text(series.train.read_text().replace("- 42) if 1", "* 20 - 840) if 1"))
    series.call("try", "many more")
    for output in series.call("noise", 1), series.call("status"):
        assert "warning: the speed of these runs differs by 17 %, so their floor is the machine's load, not seeds" in output


# ---- runs that misbehave --------------------------------------------------------------------------------------------------------

INVALID = {
    "two summaries": ('print(f"Evaluated {TOKENS:,} tokens: val_bpb {VALUE:.6f}"); summary()', {}, "invalid: 2 summaries"),
    "another run's token": ("summary(token='0' * 16); sys.exit(0)", {}, "not this run's"),
    "no evaluation": ("summary(); sys.exit(0)", {}, "prepare.evaluate_bpb nothing"),
    "another number": ('print(f"Evaluated {TOKENS:,} tokens: val_bpb 1.95"); summary(); sys.exit(0)', {}, "prepare.evaluate_bpb 1.95"),
    "zero": ("", {"VALUE": 0.0}, "val_bpb is 0.0"),
    "negative": ("", {"VALUE": -37.8}, "val_bpb is -37.8"),
    "nan": ("", {"VALUE": "nan"}, "val_bpb is nan"),
    "a token that looks like a number": ("summary(token='1e5'); sys.exit(0)", {}, "not this run's"),
    "too large": ("", {"VALUE": 17.0}, "val_bpb is 17.0"),
    "fewer tokens": ("", {"TOKENS": 6553}, "eval_tokens is 6553 and must be 65536"),
    "another seed": ("os.environ['AUTORESEARCH' + '_SEED'] = '41'", {}, "seed is 41 and must be 42"),
    "untimed steps": ("print('step 00024 (20.0%) | loss: 6.8 | warming up, not timed')", {}, "step 24 was not timed"),
    "longer than the budget": (
        'print(f"Evaluated {TOKENS:,} tokens: val_bpb {VALUE:.6f}"); summary(training_seconds="9.0"); sys.exit(0)',
        {},
        "it trained for 9.0 s, and the time budget is 1 s",
    ),
    "changes a fixed file": ("open('prepare.py', 'a').write('#')", {}, "the run changed prepare.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_never_a_result(shared, name):
    behaviour, constants, words = INVALID[name]
    best, value = shared.train.read_text(), shared.best_value()
    shared.edit(behaviour, **{"VALUE": 1.9} | constants)
    if constants.get("VALUE") == "nan":
        shared.train.write_text(shared.train.read_text().replace("VALUE = 'nan'", "VALUE = float('nan')"))
    output = shared.call("try", name, code=1)
    assert output.startswith("crash run ") and words in output and len(output.splitlines()) <= 12
    assert shared.rows[-1][1:] == ["0.000000", "0.0", "crash", f"invalid: {name}"]
    assert shared.is_clean() and shared.train.read_text() == best and shared.best_value() == value


CRASHES = {
    "a summary, then an error": ("summary(); raise RuntimeError('boom')", "RuntimeError: boom (exit code 1)"),
    "no summary": ("sys.exit(0)", "it ended without a summary"),
    "an error": ("raise ValueError('boom')", "ValueError: boom (exit code 1)"),
    "a reason": ("print('FAIL: sizes do not fit', file=sys.stderr); sys.exit(1)", "sizes do not fit"),
    "a reason, and a result": ("print('FAIL: doomed', flush=True)", "doomed"),
    "evaluation fails": ("open('unevaluated.pt', 'w'); raise RuntimeError('boom')", "the model is in runs/unevaluated.pt"),
    "a reason, and on": ("print('FAIL: doomed', flush=True); time.sleep(60)", "doomed"),
    "the loss is nan": ("print('step 00115 (99.0%) | loss: nan |', flush=True); time.sleep(60)", "the loss is nan at step 115"),
    "hangs": ("time.sleep(60)", "it hung: no output for 1 s"),
    "hangs, deaf to SIGTERM": ("import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)", "it hung: no output for 1 s"),
    "evaluates forever": ("print('Evaluating 1 tokens', flush=True); time.sleep(60)", "the evaluation had not ended after 1 s"),
    "does not end": ("from threading import Thread; Thread(target=time.sleep, args=(60,)).start()", "did not end within 0.5 s"),
    "trains forever": ("[print('.', flush=True) or time.sleep(0.1) for _ in range(600)]", "training had not ended 2 s after the start"),
    "out of memory": ("os.kill(os.getpid(), 9)", "killed by the kernel"),
    "says that the machine is at fault": ("print('FAIL: no GPU'); sys.exit(3)", "the machine is at fault, which is in order: no GPU"),
    "speaks as run.sh does": ("print('autoresearch: no space'); sys.exit(1)", "which is in order: autoresearch: no space"),
    "says that the data is another": ("globals().update(FINGERPRINT='another')", "which is in order: fingerprint another"),
    "ends itself": ("os.kill(os.getpid(), 15)", "it was ended by a signal, and nobody has told its supervisor"),
    "segmentation fault": ("os.kill(os.getpid(), 11)", "(signal SIGSEGV)"),
}  # fmt: skip
PATIENCE = {  # less than usual, where it is what ends the run: a machine that is busy takes a second for a process
    "hangs": "silence=1",
    "hangs, deaf to SIGTERM": "silence=1",
    "evaluates forever": "evaluation=1",
    "does not end": "ending=0.5",
    "trains forever": "training=1",
}


@pytest.mark.parametrize("name", CRASHES)
def test_crash(shared, name):
    behaviour, words = CRASHES[name]
    best, tried = shared.train.read_text(), shared.edit(behaviour, VALUE=1.9)
    output = shared.call("try", name, code=1, AUTORESEARCH_LIMITS=f"grace=0.3 {PATIENCE.get(name, '')}")
    number = int(re.match(r"crash run (\d+)", output)[1])
    assert words in output and len(output.splitlines()) <= 12, output
    assert shared.rows[-1][1:] == ["0.000000", "0.0", "crash", name]
    assert shared.is_clean() and shared.train.read_text() == best and (shared.folder / f"runs/{number}/train.py").read_text() == tried
    assert f"cp runs/{number}/train.py train.py" in output
    assert not processes_of(shared.run_json(number, "turn")["token"])


def test_children_that_outlive_the_run_are_ended(series):
    """In its process group, in a session of its own, and orphaned with an environment of its own."""
    series.edit(
        "print('left', subprocess.Popen(['sleep', '99']).pid, subprocess.Popen(['sleep', '98'], start_new_session=True).pid, "
        "subprocess.check_output(['sh', '-c', 'sleep 97 >/dev/null & echo $!'], text=True, env={}).strip())", VALUE=1.9)  # fmt: skip
    assert series.call("try", "children").startswith("keep")
    pids = re.search(r"left (\d+) (\d+) (\d+)", (series.folder / "runs/2/run.log").read_text()).groups()
    assert not any(map(is_alive, pids))


def test_a_flood_is_bounded_on_disk(series):
    series.edit("[os.write(1, b'x' * 10**6) for _ in range(30)]; print()", VALUE=1.9)
    assert series.call("try", "flood", AUTORESEARCH_LIMITS="log=100000").startswith("keep")
    log = (series.folder / "runs/2/run.log").read_text()
    assert len(log) <= 100_000 and log.startswith("step 00000") and log.rstrip().endswith(series.run_json(2, "turn")["token"])
    assert max(map(len, series.call("show", 2).splitlines())) < 1100


def test_train_py_edited_during_the_run(series):
    """What is scored is what was tried, and the edit stays."""
    series.edit(VALUE=1.9, SECONDS=1.0)
    series.call("try", "kept", "--wait", 0, code=75)
    edited = series.edit(VALUE=1.8)
    assert "already" not in series.call("status") and "run 2 is still running" in series.call("try", "next", code=2)
    assert series.call("wait").startswith("keep") and series.best_value() == 1.9
    assert series.train.read_text() == edited and series.git("status", "--porcelain") == "M train.py"
    series.edit(VALUE=2.2)
    series.call("try", "discarded", "--wait", 0, code=75)
    edited = series.edit(VALUE=1.7)
    assert "was edited meanwhile" in series.call("wait") and series.train.read_text() == edited and series.best_value() == 1.9
    assert series.rows[2][1] == "2.200000"


def test_a_branch_that_moves_during_the_run(series):
    """A human who steers by a commit to program.md does no harm; after one to what affects runs, a keep is not mixed with it."""
    commit = ("-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "-m", "steer")
    for value, name in ((1.9, "program.md"), (1.8, "prepare.py")):
        series.edit(VALUE=value, SECONDS=1.0)
        series.call("try", "kept", "--wait", 0, code=75)
        (series.folder / name).write_text("# new\n")
        series.git(*commit, name)
        tip = series.git("rev-parse", "HEAD")
        output = series.call("wait")
        assert series.rows[-1][1:] == [f"{value:.6f}", "0.5", "keep", "kept"]
        if name == "program.md":
            assert series.git("rev-parse", "HEAD^1") == tip and series.git("rev-parse", "HEAD^2").startswith(series.rows[-1][0])
            assert series.git("show", "HEAD:program.md") == "# new" and series.best_value() == 1.9 and series.is_clean()
        else:
            assert "the branch moved" in output and series.git("rev-parse", "HEAD") == tip and series.best_value() == 1.9


# ---- killed at every stage ------------------------------------------------------------------------------------------------------

CALLER = (
    "commit_tree:return take_gpu/lock_file:return start_turn/append_line:return start_turn/write_json:return start_turn/lock_file:return "
    "detach:call detach:return wait_for:call"
)
RUNNING = "supervise:call make_tree:call make_tree/remove_tree:return make_tree:return follow:call feed:call judge:call"
ENDED = (
    "write_outcome:call write_outcome:return finish:call row_text:return finish/append_line:return set_index:call set_index:return "
    "finish/remove_tree:return verdict_lines:call finish:return"
)
STAGES = [(f"caller:{stage}", True) for stage in CALLER.split()]
STAGES += [(f"supervisor:{stage}", True) for stage in RUNNING.split()]
STAGES += [(f"supervisor:{stage}", better) for stage in ENDED.split() for better in (True, False)]


@pytest.mark.parametrize("stage, better", STAGES)
def test_killed_then_any_command(shared, tmp_path, stage, better):
    """SIGKILL at a stage of a turn; afterwards ledger, branch and train.py are right, or the idea is untouched and can be tried again."""
    kill = Kill(tmp_path, stage)
    before, count = shared.best_value(), len(shared.rows)
    value = round(before + (-0.001 if better else 0.1), 6)
    tried = shared.edit(VALUE=value, STEPS=1000 + 10 * count)
    caller = shared.start("try", f"{stage} {better}", **kill.environment)
    caller.communicate(timeout=60)
    kill.check()
    assert (caller.returncode == -signal.SIGKILL) == stage.startswith("caller")
    command = ["status", "show", "wait", "try"][len(stage) % 4]
    shared.call(*([command, "x"] if command == "try" else [command]), code=None)
    shared.call("wait", code=None)
    if len(shared.rows) == count:  # not judged
        assert shared.train.read_text() == tried and shared.best_value() == before
        shared.call("try", f"{stage} {better}")
    assert [row[3] for row in shared.rows[count:]] == ["keep" if better else "discard"]
    assert shared.best_value() == (value if better else before) and shared.is_clean()
    assert not (shared.folder / "runs/new").exists() and not (shared.folder / "worktrees/run").exists()


def test_locks_that_a_killed_git_left(series):
    """git's own lock files: the next command waits for them, and removes them when no git can own them."""
    series.edit(VALUE=1.9)
    (series.folder / ".git/index.lock").write_text("")
    (series.folder / ".git/refs/heads/autoresearch/nov29.lock").write_text("")
    (series.folder / ".git/refs/autoresearch/nov29/2.lock").write_text("")
    assert "left by a git that was killed" in series.call("try", "x") and series.best_value() == 1.9 and series.is_clean()


def test_killed_with_its_whole_group_the_run_goes_on(series):
    """An agent's shell that gives up kills the caller's session; the run ends all the same, and `wait` tells."""
    series.edit(VALUE=1.9, SECONDS=1.0)
    caller = series.start("try", "idea")
    wait_until(lambda: (series.folder / "runs/2/process.json").exists())
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait()
    assert series.call("wait").startswith("keep run 2") and series.call("wait").startswith("keep run 2")


def test_killed_supervisor_takes_the_run_with_it(series):
    series.edit("print('pid', os.getpid(), flush=True); import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)", VALUE=1.9)
    series.call("try", "idea", "--wait", 0, code=75)
    log = series.folder / "runs/2/run.log"
    wait_until(lambda: log.exists() and re.search(r"pid \d+\n", log.read_text()))
    for process in processes.processes():
        command = files.read_bytes(f"/proc/{process['pid']}/cmdline") or b""
        if b"_supervise\0002\0" in command and str(series.folder).encode() in command:
            os.kill(process["pid"], signal.SIGKILL)
    output = series.call("wait", code=4)
    assert "run 2 was cut short" in output and "try it again" in output and len(series.rows) == 1
    assert not is_alive(re.search(r"pid (\d+)", log.read_text())[1])


def test_stop(series):
    series.edit(VALUE=1.9, SECONDS=1.0)
    series.call("try", "idea", "--wait", 0, code=75)
    assert "no new run after run 2" in series.call("stop")
    assert series.call("wait").startswith("keep")
    series.edit(VALUE=1.8, SECONDS=30.0)
    assert "asked to stop" in series.call("try", "next", code=4) and len(series.rows) == 2
    series.call("stop", "--undo")
    series.call("try", "next", "--wait", 0, code=75)
    output = series.call("stop", "--now", code=4)
    assert "STOPPED run 3" in output and "train.py is as it was: try it again" in output
    assert len(series.rows) == 2 and series.is_clean() is False and series.best_value() == 1.9
    assert json.loads(series.call("status", "--json"))["finished_last_hour"] == 2, "what was stopped is no experiment"


# ---- the ledger ----------------------------------------------------------------------------------------------------------------


def test_torn_ledger_lines(series):
    ledger = series.folder / "results.tsv"
    whole = ledger.read_text()
    ledger.write_text(whole + "abcdef1\t1.5000")
    assert len(series.call("status").splitlines()) > 3 and ledger.read_text() == whole
    assert "abcdef1\t1.5000" in (series.folder / "runs/torn.txt").read_text()
    ledger.write_text("commit\tval_b")  # the disk was full at the first row
    series.edit(VALUE=2.1)
    assert "results.tsv was missing and is made again from runs/: 1 row\n" in series.call("status") and ledger.read_text() == whole
    ledger.write_text(whole.rstrip("\n"))
    series.call("status")
    assert ledger.read_text() == whole, "a whole row whose line break an editor took"


def test_two_callers_at_once(series):
    series.edit(VALUE=1.9)
    callers = [series.start("try", f"idea {i}") for i in range(4)]
    outputs = [caller.communicate(timeout=60)[0] for caller in callers]
    assert sorted(caller.returncode for caller in callers) == [0, 2, 2, 2], outputs
    assert len(series.rows) == 2 and series.is_clean()


def test_many_experiments(series):
    """All rows, a clean checkout, and nothing that grows but the runs themselves (benchmarks/loop.py does a thousand)."""
    lengths = []
    for i in range(8):
        series.edit(VALUE=2.0 - 0.01 * i if i % 3 == 0 else 2.5 + i)
        lengths.append(len(series.call("try", f"idea {i:02}", code=None)))
    assert [row[4] for row in series.rows] == ["baseline", *(f"idea {i:02}" for i in range(1, 8))]
    assert [row[3] for row in series.rows[1:]] == ["keep" if i % 3 == 0 else "discard" for i in range(1, 8)]
    assert max(lengths[1:]) - min(lengths[1:]) < 120 and series.is_clean()
    assert sorted(os.listdir(series.folder / "worktrees")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": "700"},
        {"seconds": {"total": "700"}},
        {"summary": []},
        {"losses": 3},
        {"losses": [[0.1]]},
        {"device": 1},
        {"seconds": None},
    ],
)
def test_outcome_that_was_edited_is_not_used(shared, changes):
    path = shared.folder / "runs/1/outcome.json"
    right = path.read_text()
    path.write_text(json.dumps(json.loads(right) | changes))
    try:
        assert "best:" in shared.call("status") and json.loads(shared.call("status", "--json"))["tag"] == "nov29"
    finally:
        path.write_text(right)


def test_ledger_in_utf_16_is_refused(shared):
    ledger = shared.folder / "results.tsv"
    right = ledger.read_bytes()
    ledger.write_bytes(right.decode().encode("utf-16"))
    try:
        assert "results.tsv is not in UTF-8" in shared.call("status", code=2)
    finally:
        ledger.write_bytes(right)


def test_patches_of_files(series, tmp_path):
    """A patch with a line of text or none, and what `git format-patch` writes; each applied to the best's train.py."""
    for value in (1.8, 1.7):
        series.edit(VALUE=value)
        series.commit(f"Try {value}, a subject so long that git format-patch breaks it into two lines, which are one again here")
    (tmp_path / "two.mbox").write_text(series.git("format-patch", "--stdout", "HEAD~2"))
    diff = series.git("diff", "HEAD~2", "HEAD~", "--", "train.py") + "\n"
    (tmp_path / "with text.patch").write_text("\nlower\n\nbecause\n" + diff)
    (tmp_path / "bare.patch").write_text(diff)
    (tmp_path / "no end.patch").write_text(diff.rstrip("\n"))
    (tmp_path / "blank lines.patch").write_text(f"\ufeff{diff}\n\n")
    (tmp_path / "counts.patch").write_text(re.sub(r"@@ -(\d+),\d+ \+(\d+),\d+ @@", r"@@ -\1,9 +\2,9 @@", diff))
    encoded = "From 0123456789012345678901234567890123456789 Mon\nSubject: [PATCH] =?UTF-8?q?gr=C3=B6=C3=9Fer?=\n\n"
    (tmp_path / "encoded.mbox").write_text(f"{encoded}{diff} \n-- \n2.39.2\n\n")  # with the blank line that ends the diff
    series.git("reset", "--quiet", "--hard", "HEAD~2")
    script = """
import json, sys
from loop.files import Refusal
from loop.patches import patched, read_patches
found = [patch for path in sys.argv[1:] for patch in read_patches(path)]
texts, source = [], None
for path, description, patch in found:
    try:
        source = patched("HEAD", patch)
        texts.append([description, [line for line in source.decode().splitlines() if line.startswith("VALUE")]])
    except Refusal as e:
        texts.append([description, str(e)])
print(json.dumps(texts))
"""
    names = ("no end.patch", "blank lines.patch", "counts.patch")
    paths = [tmp_path / name for name in ("two.mbox", "with text.patch", "bare.patch", *names, "encoded.mbox")]
    done = subprocess.run([sys.executable, "-c", script, *map(str, paths)], cwd=series.folder, env=series.environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    first, second, *others = json.loads(done.stdout)
    end = "a subject so long that git format-patch breaks it into two lines, which are one again here"
    assert [" ".join(first[0].split()), first[1]] == [f"Try 1.8, {end}", ["VALUE = 1.8"]]
    assert second[0].startswith("Try 1.7") and "patch failed: train.py" in second[1], "it is on top of the first"
    descriptions = ["lower", "bare", *(name.removesuffix(".patch") for name in names), "größer"]
    assert others == [[description, ["VALUE = 1.8"]] for description in descriptions]


# ---- pure functions ------------------------------------------------------------------------------------------------------------


def test_verdict_is_a_pure_function():
    turn = {"kind": "try", "bar": 2.0, "floor": 0.01, "margin": 0.0, "simpler": False, "outdated": False}

    def of(value, state="valid", **changes):
        return verdict.verdict(turn | changes, {"state": state, "summary": {"val_bpb": value}, "reason": None})

    assert of(1.999999) == "keep" and of(2.0) == of(2.1) == "discard"
    assert of(1.995, margin=1.0) == "discard" and of(1.985, margin=1.0) == "keep"
    assert of(2.01, simpler=True) == "keep" and of(2.011, simpler=True) == "discard" and of(2.001, simpler=True, floor=None) == "discard"
    assert of(1.9, outdated=True) == of(2.01, simpler=True, outdated=True) == "candidate" and of(2.0, outdated=True) == "discard"
    assert of(9.0, kind="baseline", bar=None) == "keep" and of(1.0, kind="noise") == "discard"
    assert [of(1.0, state=s) for s in ("crash", "pruned", "environment", "stopped")] == ["crash", "discard", None, None]


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_changes_that_git_is_told_to_overlook(series, flag):
    series.git("update-index", flag, "prepare.py")
    prepare, text = series.folder / "prepare.py", (series.folder / "prepare.py").read_text()
    prepare.write_text(text + "# easier\n")
    series.edit(VALUE=1.7)
    said = series.call("try", "with an easier metric", code=2)
    assert "git is told to overlook changes in prepare.py: git update-index --no-assume-unchanged" in said
    prepare.write_text(text)
    series.git("update-index", "--no-assume-unchanged", "--no-skip-worktree", "prepare.py")
    series.git("checkout", "--quiet", "train.py")


def test_changed_names():
    old = "A, B = 1, 2\nif A == 1:\n    C, D = 3, 4\nclass M:\n    def f(self):\n        return 1\n    def g(self):\n        return 2\n"
    new = old.replace("3, 4", "3, 5").replace("return 2", "return 3").replace("A, B = 1, 2", "A, B = 1, 2\nE = 7")
    assert proposal.changed_names(proposal.parse(old.encode()), proposal.parse(new.encode())) == ["E", "D", "M.g"]


def test_real_train_py_is_allowed():
    """The real train.py as it is meddles with nothing, so that every edit of it is looked at."""
    tree = proposal.parse((PROJECT / "train.py").read_bytes())
    assert proposal.meddling(tree) == []
    for name in ("prepare.MAX_SEQ_LEN", "prepare.DATASET", "harness.run.run"):
        text = (PROJECT / "train.py").read_text()
        with pytest.raises(files.Refusal, match=f"changes {name}"):
            name = name.split(".")[-1]
            proposal.check_program(proposal.parse(f"{text}\n{name} = 10**6\n".encode()), tree, "HEAD")
    assert {"DEPTH", "EMBEDDING_LR", "MLP.forward", "schedule"} <= set(proposal.parts(tree))


# ---- what a tester found ------------------------------------------------------------------------------------------------------


def test_given_back_to_the_byte(series):
    best = series.edit(VALUE=1.9) + "\n\n\n"
    series.train.write_text(best)
    series.call("try", "line breaks at the end")
    series.edit(VALUE=2.5)
    series.call("try", "worse")
    assert series.train.read_text() == best and series.is_clean()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("os.kill(os.getpid(), 40)", "signal 40"),  # which has no name
        ("print('---'); print('val_bpb: 1.0'); print('num_steps:', '9' * 400)", "invalid: 2 summaries"),
        ("print('step 00001 (1.2.3%) | loss: 1.0'); print('Evaluated , tokens: val_bpb 1.0'); sys.exit(7)", "exit code 7"),
    ],
)
def test_odd_output_is_the_runs_fault_and_not_the_machines(shared, behaviour, words):
    shared.edit(VALUE=1.0, behaviour=behaviour)
    assert words in shared.call("try", f"odd: {words}", code=1)


def test_an_orphan_without_our_environment_is_ended(series, tmp_path):
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec /bin/sleep 60"]
    orphan = f"subprocess.Popen({command}, env={{}}, start_new_session=True)"
    series.edit(VALUE=1.9, behaviour=f"{orphan}; time.sleep(0.5)")
    series.call("try", "leaves an orphan")
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_runs_removed_during_the_run(series):
    series.edit(SECONDS=1.0, VALUE=1.9)
    caller = series.start("try", "x")
    wait_until(lambda: (series.folder / "runs/2/run.log").exists())
    (series.folder / "runs").rename(series.folder / "away")
    assert "runs/2 was removed" in caller.communicate(timeout=20)[0] and caller.returncode == 2


def test_damaged_state_is_made_again(series):
    series.edit(VALUE=1.9)
    said = series.call("try", "x")
    (series.folder / "runs/2/verdict.json").write_text("")
    (series.folder / "runs/tried.jsonl").open("ab").write(b'\xff\xfe\n5\n{}\n{"num')
    assert series.call("wait") == said and len(series.rows) == 2 and series.best_value() == 1.9
    series.call("status")


def test_a_begin_that_git_refuses_changes_nothing(series):
    before = series.rows
    assert "git switch" in series.call("begin", "a" * 300, code=2) and series.rows == before
    series.git("rm", "--quiet", "--cached", "train.py")
    series.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "none")
    assert "train.py" in series.call("begin", "other", code=2) and series.rows == before
    assert series.git("branch", "--show-current") == "autoresearch/nov29"


def test_a_document_with_an_odd_name_may_be_committed(series):
    (series.folder / "idées du soir.md").write_text("x")
    series.commit("a document")
    series.edit(VALUE=1.9)
    assert "keep run 2" in series.call("try", "x", GIT_DIR="/nowhere")


def test_what_is_no_repository_of_its_own(fresh):
    (fresh.folder / ".git").rename(fresh.folder.parent / ".git")
    assert "larger git repository" in fresh.call("begin", "nov29", code=2)
    (fresh.folder.parent / ".git").rename(fresh.folder.parent / "git")
    assert "not a git repository" in fresh.call("begin", "nov29", code=2)


def test_any_locale_and_any_nesting(series):
    series.edit(VALUE=1.9)
    assert "\\xe9\\u2026" in series.call("try", "é…", PYTHONIOENCODING="ascii")
    series.train.write_text(series.train.read_text() + "if 0:\n    pass\n" + "elif 0:\n    pass\n" * 2500)
    assert series.call("try", "deep", code=2).count("\n") == 1


def test_gits_error_and_not_its_warning_is_told(fresh):
    """Git's words are simulated: a stub for git fails as one does whose disk is full."""
    (fresh.folder / "bin").mkdir()
    stub = fresh.folder / "bin/git"
    words = "warning: core.fsyncObjectFiles is deprecated\\nfatal: write error. Out of diskspace\\n"
    stub.write_text(f"#!/bin/sh\nprintf '{words}' >&2\nexit 128\n")
    stub.chmod(0o755)
    said = fresh.call("begin", "nov29", code=3, PATH=f"{stub.parent}:{os.environ['PATH']}")
    assert said == "experiment.py: git rev-parse: fatal: write error. Out of diskspace\n"


def test_a_branch_that_was_moved_back_says_what_mends_it(series):
    series.edit(VALUE=1.9)
    series.call("try", "x")
    series.git("reset", "--quiet", "--hard", "HEAD~1")
    series.edit(VALUE=1.8)
    said = series.call("try", "y", code=2)
    series.git("restore", "train.py")
    subprocess.run(re.search(r"git merge \w+", said)[0].split(), cwd=series.folder, check=True, capture_output=True)
    series.edit(VALUE=1.8)
    assert "keep run 3" in series.call("try", "y")


def test_without_standard_output(series):
    series.edit(VALUE=1.9)
    command = 'exec "$0" "$1" try x <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, series.folder / "experiment.py"], env=series.environment, timeout=60)
    assert done.returncode == 0 and len(series.rows) == 2


def test_a_reader_that_leaves(shared):
    """No message of Python's own, and what is refused is refused all the same."""
    for arguments, code, said in ((["status"], 0, ""), (["--help"], 0, ""), (["show", 99999], 2, "experiment.py: there is no run 99999")):
        for ended, stderr in without_a_reader([sys.executable, shared.folder / "experiment.py", *arguments], shared.environment):
            assert ended == code and stderr.startswith(said) and stderr.count("\n") == len(said[:1]), (arguments, stderr)


@pytest.mark.parametrize("setting", ["true", "input"])
def test_gits_line_ends_are_left_alone(fresh, setting):
    fresh.git("config", "core.autocrlf", setting)
    fresh.call("begin", "nov29")
    fresh.edit(VALUE=1.9)
    fresh.train.write_bytes(fresh.train.read_bytes().replace(b"\n", b"\r\n"))
    fresh.call("try", "an editor's line ends")
    best = fresh.train.read_bytes()
    fresh.train.write_bytes(best.replace(b"VALUE = 1.9", b"VALUE = 2.5"))
    assert "discard run 3" in fresh.call("try", "worse")
    assert fresh.train.read_bytes() == best and fresh.is_clean()


def test_a_run_that_trains_longer_is_told():
    outcome = lambda seconds: {"seconds": {"training": seconds}}
    assert "780 s" in verdict.longer(outcome(780), outcome(620))
    for took, before in ((700, 620), (25, 6), (600, None), (None, 600)):
        assert verdict.longer(outcome(took), outcome(before)) is None
    assert verdict.longer(outcome(600), {}) is None


def test_what_a_series_was_begun_with_is_not_guessed(fresh):
    fresh.call("begin", "nov29", AUTORESEARCH_SEED="7")
    (fresh.folder / "runs").rename(fresh.folder.parent / "away")
    fresh.edit(VALUE=1.9)
    assert "runs/nov29.json" in fresh.call("try", "x", code=2) and len(fresh.rows) == 1


def test_a_merge_that_is_not_finished(series):
    series.git("switch", "--quiet", "main")
    best = series.train.read_text()
    series.edit(VALUE=1.5)
    series.commit("theirs")
    series.git("switch", "--quiet", "autoresearch/nov29")
    series.edit(VALUE=1.9)
    series.call("try", "ours")
    merge = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "merge", "main"]
    subprocess.run(merge, cwd=series.folder, env=series.environment, capture_output=True)
    series.train.write_text(best.replace("VALUE = 2.0", "VALUE = 1.2"))
    assert "git merge --abort" in series.call("try", "x", code=2) and len(series.rows) == 2


def test_a_machine_that_was_as_busy_for_the_best_explains_nothing():
    def outcome(tok_per_sec, busy):
        summary = {"num_steps": 100, "total_tokens": 409600, "tok_per_sec": tok_per_sec, "num_params_M": 1.8, "total_tokens_M": 0.4}
        return {"summary": summary, "other_cpu": busy}

    best = outcome(1000, 0.72)
    assert "the idea costs that, or the machine was slow (other programs used 73 %" in verdict.speed_warning(
        outcome(730, 0.73), best, False
    )
    assert "size: the machine was slow (other programs used 90 %" in verdict.speed_warning(outcome(730, 0.9), best, False)
    assert "size: the machine was slow (other programs used 73 %" in verdict.speed_warning(outcome(730, 0.73), best, same=True)
    assert "size: the machine was slow (other" in verdict.speed_warning(outcome(730, 0.2), outcome(1000, None), False)


def test_where_a_launcher_left_sigchld_ignored(tmp_path):
    """Then the kernel keeps no exit codes, and what git answers counts here."""
    launch = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    series = Checkout(tmp_path / "a project").make()
    command, environment = [sys.executable, "-c", launch, "experiment.py", "begin", "nov29"], os.environ | series.environment
    done = subprocess.run(command, cwd=series.folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.splitlines()[-1].startswith("log: "), done.stdout

"""The project as a whole: style, the benchmark on batches, and what the README promises."""

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from conftest import PROJECT


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff")
def test_style():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_readme_names_what_is_there():
    """Every file in its list of files, and every environment variable in its table, is in the project; and no variable is missing."""
    readme = (PROJECT / "README.md").read_text()
    listed = re.findall(r"^([\w./-]+\.\w+|[\w./-]+/)(?:  +([\w.]+\.sh))?  +\S", readme.split("## Files")[1].split("```")[1], re.M)
    files = [name for pair in listed for name in pair if name]
    assert len(files) >= 10 and all((PROJECT / name).exists() for name in files), files
    places = ("*.sh", "*.py", "doctor/*.py", "harness/**/*.py")
    code = "".join(path.read_text() for place in places for path in PROJECT.glob(place))
    variables = set(re.findall(r"`([A-Z][A-Z0-9_]{5,})`", readme.split("## Settings")[1].split("## Measured")[0]))
    assert "AUTORESEARCH_SEED" in variables and {v for v in variables if v not in code} <= {"HTTPS_PROXY"}
    inner = {
        f"AUTORESEARCH_{name}" for name in ("ANSWER", "EXAMINER", "GFX", "MODEL", "RUN", "SAID", "SYSROOT")
    }  # what one part tells another, and tests
    assert set(re.findall(r"\bAUTORESEARCH_[A-Z_]+\b", code)) - inner == {v for v in variables if v.startswith("AUTORESEARCH_")}


DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), PROJECT / "kernels" / "README.md"])
COMMAND = re.compile(r"(?:^|\s)(?:(?:venv/bin/)?python3? ([\w/]+\.py)|(\./\w+\.sh))((?: +[^\s#|;&)]+)*)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_documents_name_commands_and_files_that_exist(path):
    """Every script that is called, every option it is given, every file that is linked."""
    prose, *rest = path.read_text().split("```")
    prose, blocks = "".join([prose, *rest[1::2]]), "\n".join(rest[::2])
    for code in [*re.findall(r"`([^`]+)`", prose), *blocks.splitlines()]:
        for python, shell, arguments in COMMAND.findall(code):
            source = (PROJECT / (python or shell)).read_text() + (PROJECT / "train.py").read_text() * (shell == "./run.sh")
            for option in re.findall(r"--[a-z][\w-]*", arguments):
                assert re.search(rf"{option}(?![\w-])", source), f"{path.name}: {code}"
    for place in re.findall(r"\]\(([^)#\s]+)", prose):
        assert "://" in place or (path.parent / place).exists(), f"{path.name}: {place}"


def test_loader_benchmark(demo, tmp_path):
    """It also checks that the loader makes the same batches as the rule read literally."""
    command = [sys.executable, "benchmarks/loader.py", "--seconds", "0.1", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in (tmp_path / "loader.csv").read_text().splitlines()]
    assert [row[:2] for row in rows[1:]] == [[T, name] for T in ("256", "2048") for name in ("this loader", "straightforward")]
    assert all(float(row[2]) > 5 for row in rows[1:] if row[1] == "this loader") and (tmp_path / "loader.png").stat().st_size > 1000


@pytest.fixture
def program(monkeypatch):
    """Imports a benchmark and gives its `main` for a list of arguments; as on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def load(name):
        module = importlib.import_module(name)

        def call(*arguments):
            monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                module.main()
            return ended.value.code

        return module, call

    return load


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("train_step", ["--batches", "131072"], "--batches 131072: use tokens/rows"),
    ("train_step", ["--variants", "recipe,mine"], "--variants recipe,mine: use some of recipe,flex,fa4,ours"),
    ("train_step", ["--rounds", 0], "--rounds 0 --steps 20: use 1 round or more"),
    ("train_step", ["--steps", 1], "--rounds 2 --steps 1: use 1 round or more, of 2 steps or more"),
    ("train_step", ["--report", "--out", "/nowhere"], "--out /nowhere: no folder that can be written"),
    ("loss_curves", ["--steps", 0], "--steps 0 --seeds 3: use 1 or more"),
    ("loss_curves", ["--seeds", 0], "--steps 200 --seeds 0: use 1 or more"),
    ("loss_curves", ["--runs", 11], "--runs 11: a run's schedule begins after 11 steps"),
    ("loss_curves", ["--forms", "ours,mine"], "--forms ours,mine: use some of float32,recipe,ours"),
    ("loss_curves", ["--report", "--out", "/nowhere"], "--out /nowhere: no folder that can be written"),
])  # fmt: skip
def test_options_of_benchmarks_on_a_gpu(program, capsys, name, arguments, message):
    assert program(name)[1](*arguments) == 2 and f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "kept"), [("train_step", "train_step.jsonl"), ("loss_curves", "loss_curve ours 42.json")])
def test_benchmarks_on_a_gpu_keep_what_they_measured(program, tmp_path, name, kept):
    """Until they can measure again, or report it."""
    call = program(name)[1]
    assert "no " in call("--report", "--out", tmp_path) and not list(tmp_path.iterdir())
    (tmp_path / kept).write_text('{"result": ')
    assert call("--out", tmp_path) == f"{name}.py: needs a GPU that torch can use"
    assert f"{kept}" in call("--report", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [kept] and (tmp_path / kept).read_text() == '{"result": '


def test_loss_curves_needs_a_dataset(program, monkeypatch, tmp_path):
    loss_curves, call = program("loss_curves")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(loss_curves.chosen, "DATASET", dataclasses.replace(loss_curves.chosen.DATASET, root=str(tmp_path)))
    assert "run python prepare.py" in call("--out", tmp_path)


def test_loss_curves_edits_the_run_as_it_is(program, monkeypatch):
    loss_curves, _ = program("loss_curves")
    source = (PROJECT / "harness/run.py").read_text()
    recipe = loss_curves.edited(source, "recipe", 700)
    compile(recipe, "run.py", "exec")
    assert "model.compile(dynamic=False)" in recipe and "(step + 1 - WARMUP_STEPS) / 689" in recipe
    with pytest.raises(SystemExit, match="harness/run.py has 'seconds [+]= elapsed' 0 times"):
        loss_curves.edited(recipe, "ours", 700)
    monkeypatch.setattr(loss_curves, "edited", lambda *a: "print('FAIL: no'); raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ours with seed 42 ended with 3: FAIL: no"):
        loss_curves.whole_run("ours", 42, 700)

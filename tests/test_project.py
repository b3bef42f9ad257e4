"""The project as a whole: style, the benchmark on batches, and what the README promises."""

import os
import re
import subprocess
import sys

import pytest
from conftest import PROJECT


def test_style():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_readme_names_what_is_there():
    """Every file in its list of files, and every environment variable in its table, is in the project; and no variable is missing."""
    readme = (PROJECT / "README.md").read_text()
    listed = re.findall(r"^([\w./-]+\.\w+|[\w./-]+/)(?:  +([\w.]+\.sh))?  +\S", readme.split("## Files")[1].split("```")[1], re.M)
    files = [name for pair in listed for name in pair if name]
    assert len(files) >= 10 and all((PROJECT / name).exists() for name in files), files
    code = "".join(path.read_text() for path in [*PROJECT.glob("*.sh"), *PROJECT.glob("*.py")])
    variables = set(re.findall(r"`([A-Z][A-Z0-9_]{5,})`", readme.split("## Settings")[1].split("## Measured")[0]))
    assert "AUTORESEARCH_SEED" in variables and {v for v in variables if v not in code} <= {"HTTPS_PROXY"}
    inner = {f"AUTORESEARCH_{name}" for name in ("GFX", "RUN", "SAID", "SYSROOT")}  # what one part tells another, and tests
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

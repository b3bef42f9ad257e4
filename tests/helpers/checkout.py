"""A small project around experiment.py, with a stand-in train.py: for its tests and for benchmarks/loop.py."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # for the environment of a process that is to see none
RUN_SH = '#!/bin/sh\ncd "$(dirname "$0")" && exec venv/bin/python train.py "$@"\n'

# What loop/ asks of the fixed modules.
PREPARE = """import json, os

TIME_BUDGET = 1
WARMUP_STEPS = 11

class DataError(Exception):
    pass

def evaluate_bpb():
    return 1

def fingerprint():
    try:
        with open(os.path.join(os.environ["AUTORESEARCH_CACHE"], "demo", "data", "dataset.json")) as f:
            return json.load(f)["fingerprint"]
    except FileNotFoundError:
        raise DataError("there is no data: python prepare.py") from None
"""
MACHINE = """import os

def find_device():
    return None

def peak_flops(device):
    return None, os.environ.get("STANDIN_DEVICE", "CPU")
"""


class Checkout:
    """A small project with a stand-in train.py, and a cache of its own."""

    def __init__(self, folder, environment=None):
        self.folder = folder
        cache = folder.parent / "cache"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("AUTORESEARCH", "GIT_"))}
        self.environment |= {"AUTORESEARCH_CACHE": str(cache), "AUTORESEARCH_HARDWARE": "none", "AUTORESEARCH_DATASET": "demo"}
        self.environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull} | (environment or {})

    def make(self):
        cache = self.folder.parent / "cache"
        (cache / "demo" / "data").mkdir(parents=True)
        facts = {"eval_tokens": 65536, "time_budget": 1, "fingerprint": "0123456789ab"}
        (cache / "demo" / "data" / "dataset.json").write_text(json.dumps(facts))
        (self.folder / "venv" / "bin").mkdir(parents=True)
        (self.folder / "venv" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
        for name in ("experiment.py", ".gitignore", ".gitattributes"):
            shutil.copy(PROJECT / name, self.folder)
        shutil.copytree(PROJECT / "loop", self.folder / "loop", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PROJECT / "tests" / "helpers" / "standin_train.py", self.train)
        (self.folder / "prepare.py").write_text(PREPARE)
        shutil.copytree(PROJECT / "harness" / "common", self.folder / "harness" / "common", ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "harness/machine.py").write_text(MACHINE)
        (self.folder / "program.md").write_text("instructions\n")
        (self.folder / "run.sh").write_text(RUN_SH)
        (self.folder / "run.sh").chmod(0o755)
        self.git("init", "--quiet", "--initial-branch", "main")
        self.commit("start")
        return self

    def copy(self, folder):
        """The same in another folder, with a cache of its own, as if it had been made and begun there."""
        shutil.copytree(self.folder.parent, folder.parent, symlinks=True, dirs_exist_ok=True)
        for path in (folder / "runs").rglob("*.json"):
            path.write_text(path.read_text().replace(str(self.folder.parent), str(folder.parent)))
        return Checkout(folder)

    @property
    def train(self):
        return self.folder / "train.py"

    def git(self, *arguments):
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, env=self.environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, message):
        self.git("add", "--all")
        self.git("-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "commit", "--quiet", "-m", message)

    def commit_file(self, name, text):
        (self.folder / name).write_text(text)
        self.commit(f"change {name}")

    def start(self, *arguments, **environment):
        command = [sys.executable, str(self.folder / "experiment.py"), *map(str, arguments)]
        return subprocess.Popen(command, cwd="/", env=self.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, start_new_session=True)  # fmt: skip

    def call(self, *arguments, code=0, limit=60, **environment):
        """What the command prints; it must end with this exit code."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=limit)
        assert code is None or process.returncode == code, (process.returncode, output)
        return output

    def edit(self, behaviour="", first="", **constants):
        """Change train.py as a researcher would. behaviour: what it does once it has trained, first: before its first step."""
        text = self.train.read_text()
        for name, value in constants.items():
            text, count = re.subn(rf"^{name} = .*", f"{name} = {value!r}", text, flags=re.M)
            assert count == 1
        if behaviour:
            text = text.replace('    """Nothing; experiments write here what goes wrong."""\n', f"    {behaviour}\n")
        if first:
            text = text.replace("    time.sleep(SECONDS / 2)\n", f"    {first}\n    time.sleep(SECONDS / 2)\n", 1)
        self.train.write_text(text)
        return text

    @property
    def rows(self):
        header, *lines = (self.folder / "results.tsv").read_text().splitlines()
        assert header == "commit\tval_bpb\tmemory_gb\tstatus\tdescription"
        return [line.split("\t") for line in lines]

    def run_json(self, number, name="outcome"):
        return json.loads((self.folder / "runs" / str(number) / f"{name}.json").read_text())

    def best_value(self):
        """VALUE in the branch's train.py."""
        return float(re.search(r"^VALUE = (.*)", self.git("show", "HEAD:train.py"), re.M)[1])

    def is_clean(self):
        return self.git("status", "--porcelain") == "" and len(self.git("worktree", "list").splitlines()) == 1


def helper(series, name, start="HEAD"):
    """A worktree on no branch, as somebody who works on the series beside the main checkout has it; as an object to edit and call."""
    folder = series.folder.parent / name
    series.git("worktree", "add", "--quiet", "--detach", str(folder), start)
    return Checkout(folder, {"AUTORESEARCH_CACHE": series.environment["AUTORESEARCH_CACHE"]})


def wait_until(condition, seconds=20, what="it did not happen"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def without_a_reader(command, environment=None):
    """(exit code, stderr) of a command into a pipe that nobody reads on, as `| head` leaves one: as Python buffers it, and unbuffered."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for unbuffered in ("", "1"):
            env = (environment or os.environ) | {"PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(list(map(str, command)), env=env, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
            yield done.returncode, done.stderr
    finally:
        os.close(writer)


def processes_of(token):
    """loop.processes.processes_of, asked by a process that has no children: by descent it would find this one's, as torch's compilers."""
    code = "import sys; from loop import processes; print(*processes.processes_of(sys.argv[1], None))"
    done = subprocess.run([sys.executable, "-c", code, token], cwd=PROJECT, check=True, capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


class Kill:
    """SIGKILL at a stage, such as "supervisor:finish/remove_tree:return": to the caller or to a supervisor, where it calls, or returns
    from, a function of the loop, here where another function has called that; the other may be left out.

    environment: what the command is given to be killed, itself or the supervisor that it starts.
    """

    def __init__(self, folder, stage):
        self.stage, self.mark = stage, folder / "killed"
        (folder / "sitecustomize.py").write_text(HOOK)
        self.environment = {"PYTHONPATH": str(folder), "KILL": stage}

    def check(self):
        """That it was done: a function may have got another name, or may no longer be called there."""
        wait_until(self.mark.exists, what=f"{self.stage} was not reached, and nothing was killed")


HOOK = """
import os, signal, sys

role, _, where = os.environ.get("KILL", "").partition(":")
if any(a.endswith("experiment.py") for a in sys.orig_argv) and role == ("supervisor" if "_supervise" in sys.orig_argv else "caller"):
    place, event = where.split(":")
    caller, _, name = place.rpartition("/")

    def hook(frame, kind, argument):
        if kind == event and frame.f_code.co_name == name and "a project" in frame.f_code.co_filename:
            if not caller or frame.f_back.f_code.co_name == caller:
                with open(os.path.join(os.path.dirname(__file__), "killed"), "w"):
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
"""

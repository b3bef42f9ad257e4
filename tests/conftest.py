"""Shared by all tests: a cache of their own, the demonstration as the dataset, and the switch between interpreter and GPU for kernels."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CACHE = tempfile.TemporaryDirectory(prefix="autoresearch-tests-")
os.environ["AUTORESEARCH_CACHE"] = CACHE.name  # never the user's own
os.environ["AUTORESEARCH_DATASET"] = "demo"
for name in (
    "AUTORESEARCH_HARDWARE",
    "AUTORESEARCH_RESULTS",
    "AUTORESEARCH_TIME_BUDGET",
    "AUTORESEARCH_SEED",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "GPU_BF16_PEAK_FLOPS",
    "GPU_MEMORY_FRACTION",
    "PYTHONUNBUFFERED",  # users have it not, and it hides what is lost in a buffer
):
    os.environ.pop(name, None)
sys.path[:0] = [str(PROJECT), str(Path(__file__).parent / "helpers")]

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from specializations import Launches, autotuners, compile_all  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton.jit decorates, so before any kernel is imported


def _round_to_bfloat16_like_a_gpu():
    """Triton's interpreter truncates float32 to bfloat16, which would double every error that the tests measure."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(x, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return original(x, source, target, rounding)

    interpreter._convert_float = convert


LAUNCHES = {}  # what the interpreter launched, of this process and, where there are several, of those that the tests ran in


def pytest_addoption(parser):
    parser.addoption("--compile-all", action="store_true", help="all specializations of kernels to machine code, not a choice: minutes")


def pytest_configure(config):
    if os.environ.get("TRITON_INTERPRET") == "1":
        _round_to_bfloat16_like_a_gpu()
        config.launches = Launches()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    LAUNCHES.update(getattr(node, "workeroutput", {}).get("launches", {}))


def pytest_sessionfinish(session, exitstatus):
    """What only the interpreter ran is compiled: helpers/specializations.py. Not after Ctrl-C: who ends the tests waits for no compiler."""
    config = session.config
    LAUNCHES.update(config.launches.seen if hasattr(config, "launches") else {})
    if hasattr(config, "workeroutput"):
        config.workeroutput["launches"] = LAUNCHES
    elif LAUNCHES and exitstatus != pytest.ExitCode.INTERRUPTED:
        config.compiled, config.uncompiled = compile_all(LAUNCHES, config.getoption("--compile-all"))
        if config.uncompiled:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "compiled"):
        terminalreporter.section("compiled for gfx1151 and sm_90, beside the interpreter")
        terminalreporter.line(config.compiled)
        for line in config.uncompiled:
            terminalreporter.line(f"FAILED {line}", red=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests are handed out one by one, in their order; but those that share the nodes of a cluster, or what the compiler took a minute for,
    go to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return next((file for file in ("test_cluster.py::", "test_gfx1151_report.py::") if file in nodeid), nodeid)

    return OneByOne(config, log) if config.getoption("dist") in ("load", "loadscope") else None  # `load` is what -n alone means


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.get_closest_marker("slow"))  # the longest first: begun last, one would be waited for alone
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("emulator") and not os.environ.get("TINYGRAD_PATH"):
            item.add_marker(pytest.mark.skip(reason="needs TINYGRAD_PATH, a clone of tinygrad"))
        if item.get_closest_marker("browser") and not (shutil.which("chromium") and shutil.which("chromedriver")):
            item.add_marker(pytest.mark.skip(reason="needs a browser: apt-get install chromium chromium-driver"))


# CI repeats the same examples, so that a failure there is of the change; elsewhere every run draws new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def first_candidates(request, monkeypatch):
    """On a GPU too, small cases run what the interpreter runs: each tuned kernel's first candidate. Tests marked `gpu` try them all."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        for _, tuner in autotuners():
            monkeypatch.setattr(tuner, "configs", tuner.configs[:1])


@pytest.fixture(autouse=True)
def gpu_memory(request, tmp_path_factory):
    """The GPU's memory among several processes: tests marked `memory` run one at a time, and what any test held is given back."""
    if not torch.cuda.is_available():
        yield
        return
    mark = request.node.get_closest_marker("memory")
    if not mark:
        yield
    else:
        (gib,) = mark.args
        base = tmp_path_factory.getbasetemp()
        with open((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "gpu memory.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (free := torch.cuda.mem_get_info()[0] / 2**30) < gib:
                pytest.skip(f"needs {gib} GiB of GPU memory, and {free:.0f} are free")
            torch.cuda.reset_peak_memory_stats()
            yield
            most = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.empty_cache()
        assert most <= gib, f"needs {most:.1f} GiB: mark it so"
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved(0) > 2**30:  # of a device by number: a test may have hidden them
        torch.cuda.empty_cache()


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poison_empty(monkeypatch):
    """Every tensor that is allocated without being filled holds NaN, so that an element which no kernel writes shows.

    Behind those of less than a million elements lie as many numbers as a kernel's tile has, which must still be there at the end.
    """
    tile, guards = 2**14, []

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            t = allocate(*args, **kwargs)
            if not t.is_floating_point() or not t.is_contiguous() or t.numel() > 10**6:
                return t.fill_(float("nan")) if t.is_floating_point() else t
            buffer = torch.full((t.numel() + tile,), 7.0, dtype=t.dtype, device=t.device)
            guards.append(buffer[t.numel() :])
            return buffer[: t.numel()].fill_(float("nan")).view(t.shape)

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield
    assert all((guard == 7).all() for guard in guards), "a kernel wrote beyond the end of a tensor"


def made_once(tmp_path_factory, name, make):
    """The folder that `make(folder)` has filled, by whichever of xdist's processes came first; none of them changes what is in it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder, made = base / name, base / f"{name}.made"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def called_once(tmp_path_factory, name, call):
    """(the folder, what came of `call(folder)`, a process that has ended), likewise."""

    def make(folder):
        done = call(folder)
        (folder / "done.json").write_text(json.dumps([done.args, done.returncode, done.stdout, done.stderr], default=str))

    folder = made_once(tmp_path_factory, name, make)
    return folder, subprocess.CompletedProcess(*json.loads((folder / "done.json").read_text()))


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demonstration's dataset in the tests' cache, prepared as a user would prepare it."""

    def make(folder):
        subprocess.run([sys.executable, "prepare.py"], cwd=PROJECT, env=os.environ | {"AUTORESEARCH_CACHE": str(folder)}, check=True)

    from harness.data import dataset as chosen

    shutil.copytree(made_once(tmp_path_factory, "demonstration", make) / "demo", chosen.DATASET.root)
    return chosen.DATASET


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """The dataset that the golden values were computed on: three real parquet shards, tokenizer and tokens made by prepare.py."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from corpus import documents

    import prepare

    def dataset(root):
        return prepare.Dataset("golden", str(root), max_seq_len=256, vocab_size=2048, eval_tokens=16384, time_budget=60)

    def make(folder):
        os.mkdir(folder / "data")
        for name, seed, count in (("shard_00000.parquet", 11, 1500), ("shard_00001.parquet", 12, 1500), (prepare.VAL_FILENAME, 13, 900)):
            pq.write_table(pa.table({"text": documents(seed, count)}), folder / "data" / name, row_group_size=256)
        prepare.prepare(dataset(folder))

    mine = tmp_path_factory.mktemp("golden")
    return dataset(shutil.copytree(made_once(tmp_path_factory, "golden dataset", make), mine, dirs_exist_ok=True))

"""experiment.py --on: a real Ray cluster of three nodes on this machine. What is simulated: GPUs (runs take cores), and the distance."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib

import checkout
import pytest
from checkout import Checkout
from conftest import PROJECT

pytest.importorskip("ray", reason="needs the extra `ray`")
from ray_nodes import TOKEN, Nodes

from loop import files
from loop.processes import processes
from loop.remote import cluster

pytestmark = pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment, as a node has")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Three nodes of one core each. Who loses one starts it again."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        for n in range(3):
            nodes.start(n)
        yield nodes
    finally:
        nodes.end()


@pytest.fixture(scope="module")
def series(nodes, tmp_path_factory):
    """A series that several tests add runs to, in whatever order."""
    return begin(nodes, tmp_path_factory.mktemp("client"))


def begin(nodes, folder):
    """The stand-in's project as a client that has no GPU, begun on the cluster; the nodes have the stand-in's data."""
    checkout = Checkout(folder / "a project", {"RAY_AUTH_TOKEN": TOKEN}).make()
    use_this_venv(checkout)
    for n in range(3):
        shutil.copytree(checkout.folder.parent / "cache", nodes.cache(n), dirs_exist_ok=True)
    checkout.environment.pop("AUTORESEARCH_DATASET")
    output = checkout.call("begin", "nov29", "--on", nodes.address, "--cores", 1)
    assert "keep run 1" in output and "val_bpb 2.000000, the baseline" in output
    return checkout


def use_this_venv(checkout):
    shutil.rmtree(checkout.folder / "venv", ignore_errors=True)
    (checkout.folder / "venv").symlink_to(sys.prefix)


def until(path):
    """For Checkout.edit: the run goes on when this file is there."""
    return f"[time.sleep(0.05) for _ in iter(lambda: os.path.exists({str(path)!r}), True)]"


def patch(checkout, name, behaviour="", **constants):
    """A file with an edit of the best's train.py, which is left as it is."""
    best = checkout.train.read_text()
    checkout.edit(behaviour, **constants)
    path = checkout.folder.parent / f"{name}.patch"
    path.write_text(f"{name}: as a patch\n\n" + checkout.git("diff", "train.py") + "\n")
    checkout.train.write_text(best)
    return path


wait_until = functools.partial(checkout.wait_until, seconds=60)  # Ray takes its time


def wait_for_end(checkout):
    """What `wait` says of runs that take a while."""
    for _ in range(8):
        output = checkout.call("wait", "--wait", 50, code=None)
        if "is still running" not in output:
            return output
    raise AssertionError(output)


def place(checkout, number):
    return json.loads((checkout.folder / f"runs/{number}/cluster.json").read_text())


def is_running(checkout, number):
    attempts = place(checkout, number)["attempts"] if (checkout.folder / f"runs/{number}/cluster.json").exists() else []
    return bool(attempts) and attempts[-1].get("status") == "RUNNING"


@pytest.mark.slow
def test_several_patches_from_one_best(nodes, tmp_path):
    """The first to end is kept; what is better and lacks it runs again on it, merged, or stays a candidate where that conflicts."""
    series = begin(nodes, tmp_path)
    quick = patch(series, "quick", VALUE=1.9)
    slow = patch(series, "slow", until(tmp_path / "go on"), BONUS=0.15)
    other = patch(series, "other", until(tmp_path / "go on"), VALUE=1.7)
    first = len(series.rows)
    started = series.call("try", "--on", nodes.address, "--wait", 0, "--patches", quick, slow, other, code=75)
    assert started.count("is still running") == 3 and series.is_clean()
    status = series.call("status")
    assert f"cluster {nodes.address}: 3 nodes, 0 GPUs, 3 cores" in status and "slow: as a patch" in status
    assert len(status.splitlines()) <= 40
    wait_until((series.folder / "runs/2/verdict.json").exists)
    (tmp_path / "go on").touch()
    output = series.call("wait", "--wait", 50)
    rows = {row[4]: row for row in series.rows[first:]}
    assert rows["quick: as a patch"][1:4] == ["1.900000", "0.5", "keep"]
    assert rows["candidate: slow: as a patch"][1:4] == ["1.850000", "0.5", "discard"]
    assert rows["again: slow: as a patch"][1:4] == ["1.750000", "0.5", "keep"]
    assert rows["candidate: other: as a patch"][1:4] == ["1.700000", "0.5", "discard"] and len(rows) == 4
    assert "its change runs again on the best, run 5" in output and "merge it by hand: its change conflicts" in output
    assert series.best_value() == 1.9 and "BONUS = 0.15\n" in series.train.read_text() and series.is_clean()
    assert {place(series, n)["attempts"][0]["node"] for n in (2, 3, 4)} == {nodes.ip(n) for n in range(3)}, "each on a node of its own"
    assert [series.run_json(n)["device"] for n in (1, 2, 3, 4, 5)] == ["CPU"] * 5
    assert not (series.folder / "worktrees").exists() and not (series.folder / "runs/2/files").exists()


@pytest.mark.slow
def test_node_with_other_data_is_passed_over(nodes, series):
    facts = nodes.cache(2) / "demo/data/dataset.json"
    right = facts.read_text()
    facts.write_text(right.replace("0123456789ab", "ba9876543210"))
    try:
        first = len(series.rows)
        output = series.call("noise", 3, "--on", nodes.address, "--wait", 50)
    finally:
        facts.write_text(right)
    numbers = [int(n) for n in re.findall(r"^noise run (\d+)", output, re.M)]
    passed = [reason for n in numbers for reason in place(series, n)["passed_over"].values()]
    assert passed == [f"{nodes.ip(2)}: fingerprint ba9876543210 and not 0123456789ab"]
    assert sorted(row[1] for row in series.rows[first:]) == ["2.001000", "2.002000", "2.003000"] and len(numbers) == 3
    assert "4 seeds: mean 2.001500" in output


@pytest.mark.slow
def test_stop_ends_the_job_and_nothing_is_recorded(nodes, series):
    before = series.rows
    source = series.edit(SECONDS=60.0)
    output = series.call("try", "long", "--on", nodes.address, "--wait", 0, code=75)
    assert "train.py is as git has it" in output and series.is_clean()
    number = max(int(name) for name in os.listdir(series.folder / "runs") if name.isdecimal())
    assert (series.folder / f"runs/{number}/train.py").read_text() == source
    wait_until(lambda: is_running(series, number))
    output = series.call("stop", "--now", code=4)
    assert "it was told to stop" in output and f"to try it again: cp runs/{number}/train.py train.py" in output
    series.call("stop", "--undo")
    job = f"/api/jobs/{place(series, number)['attempts'][-1]['id']}"
    os.environ["RAY_AUTH_TOKEN"] = TOKEN
    try:
        wait_until(lambda: cluster.ask(nodes.address, job)["status"] == "STOPPED")
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
    wait_until(lambda: not any(b"train.py" in (files.read_bytes(f"/proc/{pid}/cmdline") or b"") for pid in nodes.processes()))
    assert series.rows == before


@pytest.mark.slow
def test_supervisor_that_is_killed_is_replaced(nodes, series, tmp_path):
    series.edit(until(tmp_path / "go on"), PARAMS=0.7)
    series.call("try", "outlives its supervisor", "--on", nodes.address, "--wait", 0, code=75)
    number = max(int(name) for name in os.listdir(series.folder / "runs") if name.isdecimal())
    wait_until(lambda: is_running(series, number))
    command = f"{series.folder}/experiment.py\0_supervise\0{number}\0".encode()
    for process in processes():
        if command in (files.read_bytes(f"/proc/{process['pid']}/cmdline") or b""):
            os.kill(process["pid"], signal.SIGKILL)
    assert f"running: run {number} (on 127.0." in series.call("status")
    (tmp_path / "go on").touch()
    assert series.call("wait", "--wait", 50).startswith(f"discard run {number}")
    assert [row[4] for row in series.rows].count("outlives its supervisor") == 1 and len(place(series, number)["attempts"]) == 1


@pytest.mark.slow
def test_run_goes_on_after_the_head_was_restarted(nodes, series, tmp_path):
    series.edit(until(tmp_path / "go on"), PARAMS=0.8)
    series.call("try", "outlives the cluster", "--on", nodes.address, "--wait", 0, code=75)
    number = max(int(name) for name in os.listdir(series.folder / "runs") if name.isdecimal())
    wait_until(lambda: is_running(series, number))
    nodes.lose()
    assert "no Ray answers" in series.call("status")
    (tmp_path / "go on").touch()
    for n in range(3):
        nodes.start(n)
    assert series.call("wait", "--wait", 50).startswith(f"discard run {number}")
    attempts = place(series, number)["attempts"]
    assert len(attempts) == 2 and "its head was restarted" in attempts[0]["end"]
    assert f", on {attempts[1]['node']}, attempt 2\n" in series.call("show", number)
    assert [row[4] for row in series.rows].count("outlives the cluster") == 1


@pytest.mark.slow
def test_what_is_refused(nodes, series, tmp_path):
    best = series.train.read_text()
    good, same = patch(series, "good", VALUE=1.5), patch(series, "same", VALUE=1.5)
    wrong = tmp_path / "wrong.patch"
    wrong.write_text("wrong\n" + (good.read_text().partition("\n")[2]).replace("train.py", "prepare.py"))
    before = sorted(os.listdir(series.folder / "runs"))
    for arguments, words in (
        (["try", "--on", nodes.address, "--patches", good, wrong], "wrong.patch: "),
        (["try", "--on", nodes.address, "--patches", good, same], "same.patch: it is the same change as"),
        (["try", "--patches", good], "needs a cluster: --on"),
        (["try", "--on", nodes.address], "say what train.py tries"),
        (["try", "x", "--on", "127.0.0.9:6379"], "use `local`, or the address of Ray's dashboard"),
        (["try", "x", "--cores", 2], "--cores is for a cluster"),
        (["try", "x", "--on", nodes.address, "--cores", 0], "use 1 or more"),
    ):
        assert words in series.call(*arguments, code=2)
    assert "no Ray answers at http://127.0.0.9:8265" in series.call("try", "x", "--on", "127.0.0.9", code=3)
    assert "wants its token" in series.call("try", "x", "--on", nodes.address, code=3, RAY_AUTH_TOKEN="0" * 32)
    assert sorted(os.listdir(series.folder / "runs")) == before and series.train.read_text() == best


@pytest.mark.slow
def test_local_starts_ray(tmp_path):
    """As somebody with one machine calls it, who has no token yet."""
    local = Nodes(tmp_path)
    checkout = Checkout(tmp_path / "a project", {"HOME": str(tmp_path), "NODE": f"{local.mark}-0"}).make()
    use_this_venv(checkout)
    try:
        output = checkout.call("begin", "nov29", "--on", "local", "--cores", 1, "--wait", 55, limit=120)
        assert output.startswith("started Ray on this machine, ") and "keep run 1" in output
        assert len((tmp_path / ".ray/auth_token").read_text()) >= 32
        assert "wants its token" in checkout.call("noise", 1, "--on", "local", code=3, HOME="/nonexistent")
    finally:
        local.end()


@contextlib.contextmanager
def data_of_its_own(nodes, dataset):
    """The nodes have this dataset, and afterwards the stand-in's again."""
    folders = [nodes.cache(n) for n in range(3)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name in os.listdir(folder):
            (folder / name).rename(folder.parent / f"{folder.name} {name}")
        shutil.copytree(dataset.root, folder / "demo")
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder)
            folder.mkdir()
            for path in folder.parent.glob(f"{folder.name} *"):
                path.rename(folder / path.name.removeprefix(f"{folder.name} "))


@pytest.mark.slow
def test_demonstration_outlives_a_lost_node(nodes, demo, tmp_path):
    """The project itself, a model of one layer: its baseline and two tries at once, one of whose nodes loses its power, so that it is
    trained again elsewhere."""
    client = Checkout(tmp_path / "clone", {"RAY_AUTH_TOKEN": TOKEN, "AUTORESEARCH_TIME_BUDGET": "1"})
    client.environment.pop("AUTORESEARCH_DATASET")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        (client.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, client.folder / name)
    for old, new in (("DEPTH = 4 if", "DEPTH = 1 if"), ("= 2**12 if", "= 2**10 if"), ("DEVICE_BATCH_SIZE = 16", "DEVICE_BATCH_SIZE = 4")):
        assert client.train.read_text().count(old) == 1
        client.train.write_text(client.train.read_text().replace(old, new))
    client.git("init", "--quiet", "--initial-branch", "main")
    client.commit("start")
    use_this_venv(client)
    with data_of_its_own(nodes, demo):
        client.call("begin", "real", "--on", nodes.address, "--cores", 1, "--wait", 0, code=75)
        assert "keep run 1" in wait_for_end(client)
        text, patches = client.train.read_text(), []
        for rate in (0.03, 0.05):
            client.train.write_text(re.sub(r"^MATRIX_LR = [\d.]+", f"MATRIX_LR = {rate}", text, flags=re.M))
            patches.append(tmp_path / f"rate {rate}.patch")
            patches[-1].write_text(client.git("diff", "train.py") + "\n")
        client.train.write_text(text)
        client.call("try", "--on", nodes.address, "--wait", 0, "--patches", *patches, code=75)
        wait_until(lambda: is_running(client, 2) and is_running(client, 3))
        at = {number: place(client, number)["attempts"][0]["node"] for number in (2, 3)}
        lost = next(number for number in (2, 3) if at[number] != nodes.ip(0))
        off = next(n for n in range(3) if nodes.ip(n) == at[lost])
        wait_until(lambda: any(b"train.py" in (files.read_bytes(f"/proc/{pid}/cmdline") or b"") for pid in nodes.processes(off)))
        nodes.lose(off)
        try:
            wait_for_end(client)
        finally:
            nodes.start(off)
    attempts = place(client, lost)["attempts"]
    assert len(attempts) == 2 and attempts[0]["counts"] and attempts[1]["node"] != at[lost]
    rows = client.rows
    names = sorted(row[4].removeprefix("candidate: ") for row in rows[1:])  # one that is better than its start, but not than the other
    assert names == ["rate 0.03", "rate 0.05"] and all(1 < float(row[1]) < 16 for row in rows)
    summaries = [client.run_json(number)["summary"] for number in (1, 2, 3)]
    assert len({s["fingerprint"] for s in summaries}) == 1 and {s["eval_tokens"] for s in summaries} == {65536}
    assert client.git("status", "--porcelain") == ""


def test_what_crosses_the_network_is_small(tmp_path):
    """The files of a run, of this very project."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout.strip()
    cluster.files_of(commit, tmp_path)
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert {"run.sh", "env.sh", "train.py", "prepare.py", "pyproject.toml", "kernels/attention.py", "loop/remote/node.py"} <= names
    assert {"doctor.py", "doctor/checks.py", "harness/launch.py"} <= names  # run.sh goes through these doors
    assert not any(name.startswith(("docs/", "tests/", "sample/", "benchmarks/")) for name in names)
    assert ".gitignore" not in names, "Ray would leave out what it names, also where that is in the commit"
    assert sum(len(zlib.compress((tmp_path / name).read_bytes())) for name in names) < 300_000


@pytest.mark.parametrize(
    "text, address",
    [
        ("local", "http://127.0.0.1:8265"),
        ("10.0.0.5", "http://10.0.0.5:8265"),
        ("desk:9000", "http://desk:9000"),
        ("http://desk", "http://desk:8265"),
        ("https://ray.example.org", "https://ray.example.org"),
        ("https://ray.example.org/", "https://ray.example.org"),
    ],
)
def test_address(text, address):
    assert cluster.address_of(text) == address


@pytest.mark.parametrize("text", ["ray://10.0.0.5:10001", "10.0.0.5:6379", "10.0.0.5:port", "", "me:secret@10.0.0.5", "10.0.0.5 10.0.0.6"])
def test_address_that_is_none(text):
    with pytest.raises(files.Refusal, match="use `local`, or the address"):
        cluster.address_of(text)

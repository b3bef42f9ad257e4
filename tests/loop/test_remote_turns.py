"""experiment.py --on as a program, with a stand-in for the cluster's head: real git repositories, processes and kills. See head.py.

What needs nodes that run something is in tests/loop/test_cluster.py.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from checkout import Checkout, Kill, helper, wait_until
from conftest import PROJECT
from head import Head

from loop import branch, files, machine, recovery, repository, turns, verdict
from loop.processes import lock_file, processes
from loop.remote import cluster, node


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A series with its baseline, and the head of a cluster."""
    head = Head()
    checkout = Checkout(tmp_path_factory.mktemp("client") / "a project").make()
    head.serve(checkout)
    checkout.call("begin", "nov29")
    yield checkout, head
    head.end()


@pytest.fixture
def series(begun):
    """As the last test has left it, with nothing under way."""
    checkout, head = begun
    yield checkout
    head.held.clear()
    head.about.clear()
    if not all((folder / "verdict.json").exists() for folder in (checkout.folder / "runs").glob("[0-9]*")):
        checkout.call("wait", code=None)
    (checkout.folder / "runs/stop").unlink(missing_ok=True)


@pytest.fixture
def head(begun):
    return begun[1]


def last(checkout):
    return max(int(name) for name in os.listdir(checkout.folder / "runs") if name.isdecimal())


def remote(checkout, head, description, wait=30, code=0, **environment):
    return checkout.call("try", "--on", head.address, "--wait", wait, description, code=code, **environment)


def supervisors(checkout, number):
    command = f"{checkout.folder}/experiment.py\0_supervise\0{number}\0".encode()
    return [p["pid"] for p in processes() if command in (files.read_bytes(f"/proc/{p['pid']}/cmdline") or b"")]


def attempts(checkout, number):
    return (files.read_json(checkout.folder / f"runs/{number}/cluster.json") or {"attempts": []})["attempts"]


def constants(text):
    return {name: float(re.search(rf"^{name} = (.*)", text, re.M)[1]) for name in ("VALUE", "BONUS")}


# ---- killed at every stage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["send:return", "start_turn/lock_file:return", "detach:call"])
def test_killed_then_any_command(series, head, tmp_path, stage):
    """SIGKILL at a stage of a run that becomes a candidate, or of its second run's start: a row for each, and both are in the best."""
    kill = Kill(tmp_path, f"supervisor:{stage}")
    count, old = len(series.rows), constants(series.train.read_text())
    new = {"BONUS": round(old["BONUS"] + 0.02, 6), "VALUE": round(old["VALUE"] - 0.01, 6)}
    head.held.add(f"BONUS = {new['BONUS']}\n")
    series.edit(BONUS=new["BONUS"])
    remote(series, head, f"once again: {stage}", wait=0, code=75, **kill.environment)
    number = last(series)
    if stage.startswith("send"):
        wait_until(lambda: not supervisors(series, number))
    series.edit(VALUE=new["VALUE"])
    assert "\nkeep run" in remote(series, head, "meanwhile")
    head.held.clear()
    wait_until(lambda: not supervisors(series, number))
    kill.check()
    series.call("status")
    series.call("wait")
    rows = [row[1:] for row in series.rows[count:]]
    value = new["VALUE"] - new["BONUS"]
    assert rows == [
        [f"{new['VALUE'] - old['BONUS']:.6f}", "0.0", "keep", "meanwhile"],
        [f"{old['VALUE'] - new['BONUS']:.6f}", "0.0", "discard", f"candidate: once again: {stage}"],
        [f"{value:.6f}", "0.0", "keep", f"again: once again: {stage}"],
    ]
    assert constants(series.git("show", "HEAD:train.py")) == constants(series.train.read_text()) == new and series.is_clean()
    for n in range(number, last(series) + 1):
        assert series.git("rev-parse", f"refs/autoresearch/nov29/{n}") == series.run_json(n, "turn")["commit"]


def test_a_run_without_a_supervisor_is_stopped(series, head):
    """As after a restart of this machine: the first command starts another supervisor, which must hear what it was told."""
    head.held.add("VALUE = 9.0\n")
    series.edit(VALUE=9.0)
    remote(series, head, "long", wait=0, code=75)
    number = last(series)
    wait_until(lambda: any(attempt.get("known") for attempt in attempts(series, number)))
    for pid in supervisors(series, number):
        os.kill(pid, signal.SIGKILL)
    output = series.call("stop", "--now", code=4)
    assert "it was told to stop" in output and head.stopped == [attempts(series, number)[0]["id"]]


def test_a_shutdown_of_this_machine_stops_nothing(series, head):
    """Every process is told to end then, by SIGTERM; the job goes on, and the next command takes it up."""
    head.held.add("VALUE = 9.3\n")
    series.edit(VALUE=9.3)
    stopped = len(head.stopped)
    remote(series, head, "outlives this machine", wait=0, code=75)
    number = last(series)
    wait_until(lambda: any(attempt.get("known") for attempt in attempts(series, number)))
    for pid in supervisors(series, number):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not supervisors(series, number))
    head.held.clear()
    assert series.call("wait").startswith(f"discard run {number}") and len(attempts(series, number)) == 1 and len(head.stopped) == stopped


def test_a_supervisor_is_started_while_somebody_asks_whether_one_lives(tmp_path, monkeypatch):
    """Whoever asks holds the lock for a moment. The run must not be taken for one that was cut short."""
    started = []
    monkeypatch.setattr(recovery, "run_file", lambda number, name: str(tmp_path / name))
    monkeypatch.setattr(recovery, "git", lambda *arguments: None)
    monkeypatch.setattr(recovery, "detach", lambda *arguments: started.append(arguments[0]))
    with open(tmp_path / "alive", "w") as asks:
        fcntl.flock(asks, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (asks, fcntl.LOCK_UN)).start()
        assert recovery.revive({"number": 7, "tag": "nov29", "commit": "0" * 40}) and started == [7]


def test_wait_tells_what_ended_while_nobody_waited(series, head):
    """Once: what was sent and not waited for, though other runs ended after it."""
    for value in (9.4, 9.5):
        head.held.add(f"VALUE = {value}\n")
        series.edit(VALUE=value)
        remote(series, head, f"ends alone {value}", wait=0, code=75)
    number = last(series)
    head.held.clear()
    wait_until(lambda: all((series.folder / f"runs/{n}/verdict.json").exists() for n in (number - 1, number)))
    output = series.call("wait")
    assert f"discard run {number - 1} " in output and f"discard run {number} " in output
    assert series.call("wait").count("discard run") == 1


# ---- which train.py is whose ----------------------------------------------------------------------------------------------------


def test_a_keep_reaches_every_checkout(series, head):
    """The worktree that it was tried in, whose train.py was given back, and the main one; where one is being edited, nothing is dropped."""
    other = helper(series, "other")
    old = constants(series.train.read_text())
    first, second = round(old["VALUE"] - 0.1, 6), round(old["VALUE"] - 0.2, 6)
    other.edit(VALUE=first)
    assert "\nkeep run" in remote(other, head, "from beside")
    for checkout in (other, series):
        assert constants(checkout.train.read_text())["VALUE"] == first and checkout.git("status", "--porcelain") == ""
    assert other.git("rev-parse", "HEAD") == series.git("rev-parse", "HEAD")
    head.held.add(f"VALUE = {second}\n")
    other.edit(VALUE=second)
    remote(other, head, "from beside, too", wait=0, code=75)
    other.edit(STEPS=7)
    mine = series.edit(BONUS=old["BONUS"] + 0.5)
    head.held.clear()
    assert series.call("wait").startswith("keep")
    assert series.train.read_text() == mine and constants(other.train.read_text())["VALUE"] == first, "they are being edited"
    output = remote(series, head, "bonus")
    assert output.count("\ncandidate run") == 1 and "\nkeep run" in output
    assert constants(series.git("show", "HEAD:train.py")) == {"VALUE": second, "BONUS": old["BONUS"] + 0.5}
    assert series.git("status", "--porcelain") == ""
    series.git("worktree", "remove", "--force", str(other.folder))


def test_a_local_keep_reaches_a_train_py_that_was_given_back(series, head):
    """A run here, and meanwhile another is sent away from the same train.py, which goes back to the best of then."""
    old = constants(series.train.read_text())
    value = round(old["VALUE"] - 0.1, 6)
    series.edit(VALUE=value, SECONDS=1.0)
    series.call("try", "here", "--wait", 0, code=75)
    series.edit(VALUE=old["VALUE"] + 1)
    remote(series, head, "there", wait=0, code=75)
    assert constants(series.train.read_text()) == old
    series.call("wait")
    assert series.rows[-1][3:] == ["keep", "here"] or series.rows[-2][3:] == ["keep", "here"]
    assert constants(series.train.read_text())["VALUE"] == value and series.is_clean()


def test_what_an_edit_began_from(series, monkeypatch, tmp_path):
    """Kept since the noted base: a large change, then a small one. No edit may drop one of them that it has not seen."""
    base = series.train.read_text()

    def change(text, **lines):
        for name, value in lines.items():
            text = re.sub(rf"^{name} = .*", f"{name} = {value}", text, flags=re.M)
        return text

    large = change(base.replace("BONUS = ", "# large\n" * 9 + "BONUS = "), STEPS=7)
    texts, heads = [base, large, change(large, TOKENS=7)], [series.git("rev-parse", "HEAD")]
    series.git("update-ref", "refs/autoresearch-base/nov29", heads[0])
    for text in texts[1:]:
        series.train.write_text(text)
        series.commit("as a keep")
        heads.append(series.git("rev-parse", "HEAD"))
    monkeypatch.setattr(repository, "git_bytes", lambda *a, f=repository.git_bytes, **k: f(*a, **k | {"cwd": series.folder}))
    for module in (repository, branch):
        monkeypatch.setattr(module, "RUNS", tmp_path)
    try:
        for source, start in (
            (change(texts[0], SECONDS=1), 0),
            (change(texts[1], SECONDS=1), 1),  # between the two
            (change(texts[1], TOKENS=8), 2),  # as far from both, and it does not merge: as if the last were tuned further
            (change(texts[1], TOKENS=7), 2),  # brought in by hand
            (change(texts[2], SECONDS=1), 2),
        ):
            assert branch.starting_point("nov29", heads[2], source.encode()) == heads[start], (source, start)
            series.git("update-ref", "refs/autoresearch-base/nov29", heads[0])
        series.train.write_text(change(texts[2], STEPS=8, FINGERPRINT='"7"'))
        series.commit("as a keep")
        last = series.git("rev-parse", "HEAD")
        assert branch.starting_point("nov29", last, change(texts[2], STEPS=8, SECONDS=7).encode()) == heads[2], (
            "as far from both; it merges"
        )
    finally:
        series.git("update-ref", "-d", "refs/autoresearch-base/nov29")
        series.git("reset", "--quiet", "--hard", heads[0])


def test_repeats_go_on_with_what_they_began_with(monkeypatch):
    """Three repeats on this machine, and meanwhile a run from elsewhere is kept: the next repeat is of the same commit all the same."""
    started = []
    monkeypatch.setattr(turns, "start_turn", lambda *arguments, **more: started.append((arguments[2], arguments[3], arguments[6], more)))
    monkeypatch.setattr(turns, "git_file", lambda commit: b"")
    lines = [{"commit": "aaaaaaa", "seed": 43}, {"commit": "bbbbbbb", "seed": 42}]
    series = types.SimpleNamespace(best={"commit": "bbbbbbb"}, seed=42, tried=lines)
    turns.start_noise(series, 2, before={"short": "aaaaaaa", "commit": "a" * 40})
    assert started == [("noise: seed 44 of aaaaaaa", "a" * 40, 44, {"remaining": 1})]


def test_others_have_their_turn_while_many_are_started(series, head):
    count = 40  # enough for a slow machine to be heard meanwhile
    best, paths = series.train.read_text(), []
    for n in range(count):
        series.edit(VALUE=9.6, PARAMS=100.0 + n)
        paths.append(series.folder.parent / f"many {n}.patch")
        paths[-1].write_text(series.git("diff", "train.py") + "\n")
    series.train.write_text(best)
    before = last(series)
    caller = series.start("try", "--on", head.address, "--patches", *paths)
    wait_until(lambda: last(series) > before)
    series.call("stop")
    output, _ = caller.communicate(timeout=60)
    assert caller.returncode == 4 and f"the human has asked to stop: {last(series) - before} of {count} were started" in output


def test_load_is_of_where_it_ran(monkeypatch):
    """Not of the client: a busy node with a GPU trains as fast as an idle one."""
    monkeypatch.setenv("AUTORESEARCH_HARDWARE", "none")
    outcome = {"other_cpu": 0.5, "seconds": {"total": 600.0}}
    assert verdict.load(outcome | {"device": "NVIDIA H200"}) == 0 and verdict.load(outcome | {"device": "CPU"}) == 0.5


# ---- what a cluster says --------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """cluster.watch of a job whose state and log are given."""
    monkeypatch.setattr(cluster, "run_file", lambda number, name: str(tmp_path / name))
    monkeypatch.setattr(cluster, "nap", lambda seconds: None)

    def watch(abouts, log):
        said = iter(abouts)
        monkeypatch.setattr(cluster, "ask", lambda address, path, **more: {"logs": log} if path.endswith("/logs") else next(said))
        clock = itertools.count(0, 20)
        monkeypatch.setattr(cluster.time, "monotonic", lambda: next(clock))
        place = {"address": "http://127.0.0.1:1", "attempts": [{"id": "x"}]}
        return cluster.watch({"number": 1}, {"budget": 1}, place, place["attempts"][0], str(tmp_path / "cluster.json"))

    return watch


@pytest.mark.parametrize("piece", ['{"outcome": {"state": "va', "garbage", "{}", "[1]", "7"])
def test_an_answer_that_is_not_whole_yet(watched, piece):
    """While a run goes on, its log may end within the answer, or in what train.py prints to look like one."""
    log = f"Running entrypoint for job x: y\nstep\nautoresearch answers: {piece}"
    assert watched([{"status": "RUNNING"}, {"status": "STOPPED"}], log) == ("stopped", "it was stopped through Ray")


def test_an_answer_that_quotes_another(watched):
    """The reason of a crash is a line of the log, and that may look like an answer."""
    outcome = {"state": "crash", "reason": 'autoresearch answers: {"outcome": {}}'}
    log = f"Running entrypoint for job x: y\nstep\nautoresearch answers: {json.dumps({'outcome': outcome})}\n"
    assert watched([{"status": "SUCCEEDED"}], log) == ("outcome", outcome)


def test_waiting_longer_than_ray_waits_is_no_lost_node(watched):
    about = {"status": "FAILED", "message": "Job supervisor actor failed to start within 900 seconds.",
             "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}  # fmt: skip
    assert watched([{"status": "PENDING"}, about], "")[0] == "waits"


@pytest.mark.parametrize("status, end", [("RUNNING", ("lost", "it had not ended 1441 s after its start")), ("PENDING", ("queued", None))])
def test_a_job_that_outlives_its_limit_is_stopped(watched, monkeypatch, status, end):
    stopped = []
    monkeypatch.setattr(cluster, "stop_job", lambda address, job: stopped.append(job))
    assert watched(itertools.repeat({"status": status}), "") == end and stopped == ["/api/jobs/x"]


@pytest.mark.parametrize(
    "ends, said",
    [
        ([("lost", "gone")] * 3, "given up after 3 attempts: a node: gone"),
        ([("unfit", "other data")], "no node can run it: a node: other data"),
        ([("outcome", {"state": "environment", "reason": "its GPU"})], "no node can run it: a node: its GPU"),
        ([("queued", None)], "no node took it in 5 s"),
        ([("busy", "in use")], "no node took it in 5 s: in use"),
    ],
)
def test_when_a_run_is_given_up(monkeypatch, tmp_path, ends, said):
    monkeypatch.setattr(cluster, "run_file", lambda number, name: str(tmp_path / name))
    monkeypatch.setattr(cluster, "nap", lambda seconds: None)
    monkeypatch.setattr(cluster, "candidates", lambda place, cores: [])
    monkeypatch.setitem(files.LIMITS, "queue", 5)
    clock = itertools.count(0, 20)
    monkeypatch.setattr(cluster.time, "monotonic", lambda: next(clock))

    def watch(turn, expected, place, attempt, path):
        attempt["node_id"] = "a"
        return ends.pop(0)

    monkeypatch.setattr(cluster, "watch", watch)
    turn = {"number": 1, "on": "x", "tag": "t", "token": "0" * 16, "cores": None}
    assert cluster.run(turn, {}) == (("environment", said), {}) and not ends


def test_a_long_queue_is_waited_for(series, head):
    """Ray gives a job up that no node took in 15 minutes; it is sent again as often as needed, and that is no attempt that was lost."""
    head.about |= {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "driver_agent_http_address": None}
    series.edit(VALUE=9.1)
    remote(series, head, "waits", wait=0, code=75)
    wait_until(lambda: len(attempts(series, last(series))) > 5)
    head.about.clear()
    assert series.call("wait").startswith("discard")


def test_a_port_that_speaks_something_else(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(cluster.Unreachable, match="no Ray answers at"):
            cluster.ask(f"http://127.0.0.1:{server.getsockname()[1]}", "/api/version")


def test_a_token_is_not_shown(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "se\ncret")
    with pytest.raises(files.Refusal) as refusal:
        cluster.ask("http://127.0.0.1:1", "/api/version")
    assert "line breaks" in str(refusal.value) and "cret" not in str(refusal.value).replace("secret", "")


def test_another_token_for_a_while_ends_no_run(monkeypatch, tmp_path):
    """As where a supervisor is started by a shell that has not the token: the job goes on, and so does the run."""
    monkeypatch.setattr(cluster, "run_file", lambda number, name: str(tmp_path / name))
    monkeypatch.setattr(cluster, "nap", lambda seconds: None)
    ends = [cluster.Denied("wants its token"), ("outcome", {"state": "valid", "reason": None})]

    def watch(*arguments):
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(cluster, "watch", watch)
    assert cluster.run({"number": 1, "on": "x", "tag": "t", "token": "0" * 16}, {})[0] == ("valid", None)


def test_a_proxy_is_for_what_is_far_away(head, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert cluster.ask(head.address, "/api/version") == {}


def test_jobs_go_where_they_are_watched(monkeypatch):
    """Ray's client would rather go where its own variables say, and through a proxy."""
    given = []
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(cluster.subprocess, "run", lambda command, env, **more: given.append(env) or done)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.9:1")
    cluster.send({"address": "http://127.0.0.1:1"})
    assert "RAY_API_SERVER_ADDRESS" not in given[0] and given[0]["no_proxy"] == "*"


def test_all_nodes_are_asked_for(series, head):
    """Ray lists 100 nodes unless it is told otherwise, those counted that are gone."""
    head.nodes *= 150
    try:
        assert len(cluster.nodes(head.address)) == 150 and any("limit=10000" in path for path in head.asked)
    finally:
        del head.nodes[1:]


def test_more_cores_than_any_node_has_is_told(series, head):
    series.edit(VALUE=9.2)
    output = series.call("try", "wide", "--on", head.address, "--cores", 99)
    assert f"no node at {head.address} has 99 cores now" in output and "discard run" in output


def refusal(function, *arguments):
    with pytest.raises((files.Refusal, cluster.Unreachable)) as raised:
        function(*arguments)
    return str(raised.value)


def test_without_ray_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "PYTHON", str(tmp_path / "python"))
    assert refusal(cluster.find, "127.0.0.1") == "--on needs Ray in venv/: . ./env.sh && pip install 'ray[default]'"


@pytest.mark.parametrize(
    "said, why",
    [
        (["Error: 8265 is taken", "more"], "Error: 8265 is taken"),
        (["2026 ERROR services.py -- Error should be written to a log", "OSError: before", "  Traceback", "ray.NotFoundError: no build",
          "more"], "ray.NotFoundError: no build"),
        (["2026 ERROR services.py -- Error should be written to a log"], "2026 ERROR services.py -- Error should be written to a log"),
    ],
)  # fmt: skip
def test_ray_that_does_not_start(said, why, monkeypatch, tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 0\ncat >&2 <<'END'\n" + "\n".join(said) + "\nEND\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(cluster, "PYTHON", str(python))
    monkeypatch.setattr(cluster, "venv_without_spaces", lambda: str(tmp_path))
    monkeypatch.setattr(cluster, "LOCAL", "http://127.0.0.1:1")
    assert refusal(cluster.start_local) == f"`ray start --head` failed: {why}"


def test_a_venv_with_a_space_is_called_by_a_link(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "ROOT", str(tmp_path / "a project"))
    (tmp_path / "a project/venv").mkdir(parents=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        link = cluster.venv_without_spaces()
        assert " " not in link and os.path.samefile(link, tmp_path / "a project/venv")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "a cache"))
    assert "Ray does not work from paths with spaces" in refusal(cluster.venv_without_spaces)


def test_a_client_of_ray_that_hangs_and_nodes_in_another_shape(monkeypatch):
    def hang(command, **more):
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(cluster.subprocess, "run", hang)
    assert refusal(cluster.send, {"address": "http://127.0.0.1:1"}) == "Ray at http://127.0.0.1:1 took no job in 300 s"
    monkeypatch.setattr(cluster, "ask", lambda *arguments, **more: {"data": []})
    assert "lists its nodes in another way" in refusal(cluster.nodes, "x")


@pytest.mark.parametrize("command", [["try", "x"], ["noise", 1], ["begin", "another"]])
def test_the_state_is_not_locked_while_a_cluster_is_asked(series, command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = series.start(*command, "--on", f"127.0.0.1:{server.getsockname()[1]}")
        with server.accept()[0]:
            lock = state_is_free(series)
        output, _ = caller.communicate(timeout=60)
    assert lock and caller.returncode == 3 and "no Ray answers" in output


def state_is_free(checkout):
    """Whether nobody holds the lock of the state."""
    descriptor = lock_file(checkout.folder / "runs/lock")
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def test_patches_that_are_none(series, head, tmp_path):
    removal = tmp_path / "removal.patch"
    (series.folder / "train.py").rename(tmp_path / "train.py")
    removal.write_text(series.git("diff", "--", "train.py") + "\n")
    (tmp_path / "train.py").rename(series.folder / "train.py")
    (tmp_path / "empty.patch").write_text("\n")
    for name, words in (("removal", "it removes train.py"), ("empty", "it is empty"), ("none", "there is no such file")):
        assert words in series.call("try", "--on", head.address, "--patches", tmp_path / f"{name}.patch", code=2)


def test_what_is_being_tried_is_not_tried_again(series, head):
    head.held.add("VALUE = 9.31")
    source = series.edit(VALUE=9.31)
    remote(series, head, "held", wait=0, code=75)
    series.train.write_text(source)
    assert f"run {last(series)} is trying it" in remote(series, head, "the same", code=2)
    series.git("restore", "train.py")


# ---- on the node ----------------------------------------------------------------------------------------------------------------


def test_what_a_node_shows_is_utf_8(tmp_path, capfdbinary):
    """Ray gives nothing of a log in which one byte is not."""
    log = node.Echo(tmp_path / "run.log", 100)
    for chunk in (b"\xff\x00\n", "█".encode()[:1], "█".encode()[1:], "█".encode() * 40):
        log.write(chunk)
    log.end()
    shown = capfdbinary.readouterr().out.decode()
    assert shown.startswith("\ufffd\0\n███") and "left out" in shown


def test_a_node_without_a_venv(monkeypatch, capfd):
    monkeypatch.setattr(node.sys, "base_prefix", sys.prefix)
    assert node.move_in({}) == 0 and "is in no virtual environment: `. ./env.sh` before `ray start`" in capfd.readouterr().out


@pytest.mark.parametrize(
    "fit, said",
    [
        ("import sys; sys.exit('there is no data: python prepare.py')", "there is no data: python prepare.py"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import time; time.sleep(60)", "torch had not found a device after 0.5 s"),
        ("""print('hello\\n{"fingerprint": "a", "device": "CPU"}')""", "device CPU and not NVIDIA H200"),
        ("""print('{"fingerprint": "a", "device": "NVIDIA H200"}')""", None),
    ],
)
def test_what_a_node_says_of_itself(monkeypatch, tmp_path, fit, said):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(machine, "ROOT", str(tmp_path))
    monkeypatch.setattr(machine, "PYTHON", str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(machine, "FIT", fit)
    monkeypatch.setitem(files.LIMITS, "silence", 5 if said and "0.5" not in said else 0.5)
    monkeypatch.chdir(tmp_path)
    assert node.look({"fingerprint": "a", "device": "NVIDIA H200"}) == said


def test_a_run_that_changes_what_came_is_invalid(monkeypatch, tmp_path, capfd):
    (tmp_path / "prepare.py").write_text("fixed")
    monkeypatch.setattr(node, "ROOT", str(tmp_path))
    monkeypatch.setattr(node, "run_file", lambda number, name: str(tmp_path / "runs" / name))
    monkeypatch.setattr(node, "look", lambda expected: None)
    monkeypatch.setattr(node, "LIBC", types.SimpleNamespace(prctl=lambda *arguments: 0))
    monkeypatch.setattr(node.signal, "signal", lambda *arguments: None)
    for text, state in (("fixed", "valid"), ("changed", "crash")):

        def measure(*arguments, text=text):
            (tmp_path / "prepare.py").write_text(text)
            return ("valid", None), {}

        monkeypatch.setattr(node, "measure", measure)
        node.run_here({"number": 1, "expected": {}}, -1)
        outcome = json.loads(capfd.readouterr().out.rpartition(node.ANSWER)[2])["outcome"]
        assert outcome == {"state": state, "reason": None if state == "valid" else "invalid: the run changed prepare.py"}
        shutil.rmtree(tmp_path / "runs")


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment, as a node has")
def test_a_node_that_cannot_write_is_passed_over():
    turn = {"number": 1, "tag": "x", "token": "t", "cores": 1, "environment": {}, "limits": files.LIMITS}
    environment = os.environ | {"AUTORESEARCH_TURN": json.dumps(turn), "AUTORESEARCH_CACHE": "/dev/null/cache"}
    done = subprocess.run([sys.executable, "-m", "loop.remote.node"], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and 'autoresearch answers: {"unfit": ' in done.stdout and "Not a directory" in done.stdout


def test_a_nodes_own_time_budget_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_TIME_BUDGET", "77")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path))
    monkeypatch.setattr(node, "ROOT", str(tmp_path / "files"))
    os.mkdir(node.ROOT)
    monkeypatch.setattr(node.sys, "base_prefix", "/elsewhere")
    monkeypatch.setattr(node.os, "execv", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    node.move_in({"number": 1, "tag": "x", "token": "t", "cores": 1, "environment": {}})
    assert "AUTORESEARCH_TIME_BUDGET" not in os.environ


class Strange(BaseHTTPRequestHandler):
    """A server that is no Ray: it leads elsewhere, never ends, or answers something else."""

    seen = []  # the headers of each request

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("Authorization")))
        kind = self.path.split("/")[1]
        self.send_response(302 if kind == "redirect" else 200)
        if kind == "redirect":
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        with contextlib.suppress(OSError):
            while kind == "endless":
                self.wfile.write(b" " * 2**16)
                time.sleep(0.01)
            self.wfile.write({"list": b"[]", "half": b'{"a"', "bytes": b"\xff\xfe"}.get(kind, b"{}"))

    def log_message(self, *arguments):
        pass


def test_servers_that_are_no_ray(monkeypatch):
    """One line each, soon; and the token goes nowhere else."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        strange = {"redirect": "answers 302", "endless": "without end", "list": "no object", "half": "no Ray", "bytes": "no Ray"}
        for path, said in strange.items():
            start = time.monotonic()
            with pytest.raises(cluster.Unreachable, match=said):
                cluster.ask(address, f"/{path}", timeout=2)
            assert time.monotonic() - start < 10
        assert {token for _, token in Strange.seen} == {"Bearer secret"} and "/elsewhere" not in {path for path, _ in Strange.seen}
        turn = {"number": 1}
        with pytest.raises(cluster.Unreachable, match="no log of"):
            cluster.fetch_log(turn, address, "/api/jobs/x")
    finally:
        server.shutdown()
        server.server_close()

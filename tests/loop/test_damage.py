"""What a crash, a hand or the run itself does to the loop's files: nothing is lost, and what is not true is not believed.

Real git repositories and processes, as in tests/loop/test_experiment.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from checkout import Checkout, Kill, wait_until
from conftest import PROJECT

from harness.common.text import visible
from loop import files, processes


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("begun") / "a project").make()
    checkout.call("begin", "nov29")
    return checkout


@pytest.fixture(scope="module")
def kept(begun, tmp_path_factory):
    """A series with two keeps and a discard between."""
    checkout = begun.copy(tmp_path_factory.mktemp("kept") / "a project")
    for value in (1.9, 1.95, 1.8):
        checkout.edit(VALUE=value)
        checkout.call("try", f"value {value}")
    return checkout


@pytest.fixture
def series(kept, tmp_path):
    return kept.copy(tmp_path / "a project")


def supervisors(checkout, number):
    command = f"{checkout.folder}/experiment.py\0_supervise\0{number}\0".encode()
    return [p["pid"] for p in processes.processes() if command in (files.read_bytes(f"/proc/{p['pid']}/cmdline") or b"")]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir], ids=["pipe", "device", "folder"])
def test_something_else_in_the_ledger_s_place(series, make):
    """It is told at once, and is not taken for a ledger that is missing."""
    ledger = series.folder / "results.tsv"
    ledger.rename(series.folder / "aside.tsv")
    make(ledger)
    series.edit(VALUE=1.7)
    assert "results.tsv: " in (said := series.call("try", "x", code=3, limit=20)) and "move it away" in said, said
    assert "move it away" in series.call("status", code=None, limit=20)
    os.rmdir(ledger) if ledger.is_dir() else ledger.unlink()
    (series.folder / "aside.tsv").rename(ledger)
    series.call("try", "x")
    assert series.rows[-1][4] == "x"


# ---- the ledger ----------------------------------------------------------------------------------------------------------------


def test_rows_that_are_gone_come_back(series):
    ledger = series.folder / "results.tsv"
    whole = ledger.read_text()
    lines = whole.splitlines(keepends=True)
    for left, said in (
        ("", "results.tsv was missing and is made again from runs/: 4 rows\n"),
        (whole[:-12], "results.tsv had lost the row of run 4: put back from runs/\n"),
        ("".join(lines[:1] + lines[3:]), "results.tsv had lost the row of run 1, 2: put back from runs/\n"),
    ):
        ledger.write_text(left)
        output = series.call("status")
        assert output.startswith(said) and output.count("put back") <= 1, output
        assert [line.split("\t")[:4] for line in ledger.read_text().splitlines()] == [line.split("\t")[:4] for line in whole.splitlines()]
        assert "put back" not in series.call("status")
    ledger.unlink()
    series.edit(VALUE=1.7)
    assert "keep run 5" in series.call("try", "x") and ledger.read_text().startswith(whole) and series.best_value() == 1.7


def test_rows_of_every_kind_are_made_again(series):
    for behaviour in ("raise ValueError('boom')", "summary(token='0'); sys.exit(0)"):
        series.edit(behaviour)
        series.call("try", f"idea: {behaviour}", code=1)
    series.edit("print('step 00070 (58.0%) | loss: 9.0', flush=True);" * 3 + "time.sleep(9)", VALUE=1.7)
    assert "--prune" in series.call("try", "--prune", "slow")
    series.call("noise", 2)
    ledger = series.folder / "results.tsv"
    whole = ledger.read_text()
    assert len({tuple(row[3:]) for row in series.rows}) == 9 and "pruned: slow" in whole and "invalid: idea" in whole
    ledger.unlink()
    series.git("switch", "--quiet", "main")
    series.call("status")
    series.git("switch", "--quiet", "autoresearch/nov29")
    assert "made again from runs/: 9 rows" in series.call("status") and ledger.read_text() == whole
    old = [row[3:] for row in series.rows]
    for index in range(9):
        lines = whole.splitlines(keepends=True)
        ledger.write_text("".join(lines[: index + 1] + lines[index + 2 :]))
        assert "put back" in series.call("status") and [row[3:] for row in series.rows] == old


def test_a_ledger_removed_during_the_run(series):
    whole = (series.folder / "results.tsv").read_text()
    series.edit(VALUE=1.7, SECONDS=1.0)
    series.call("try", "kept", "--wait", 0, code=75)
    (series.folder / "results.tsv").unlink()
    output = series.call("wait")
    assert output.startswith("keep run 5") and "made again from runs/: 4 rows" in output and len(output.splitlines()) <= 12
    assert (series.folder / "results.tsv").read_text().startswith(whole) and len(series.rows) == 5


def test_a_row_that_contradicts_its_run_is_refused(series):
    ledger = series.folder / "results.tsv"
    whole = ledger.read_text()
    series.edit(VALUE=1.7)
    for old, new in (("1.950000", "1.050000"), ("\tdiscard\t", "\tkeep\t")):
        ledger.write_text(whole.replace(old, new))
        said = series.call("try", "x", code=2)
        assert re.match(
            r"experiment.py: results.tsv, line 4, says 1.\d50000 \w+ of run 3, and its outcome was 1.950000 discard; put back: ", said
        )
        assert said.count("\n") == 1 and "of run 3, and" in series.call("status") and "no new run" in series.call("stop")
        series.call("stop", "--undo")
    ledger.write_text(whole + whole.splitlines()[-1] + "\n")
    assert "line 6: run 4 is there twice" in series.call("try", "x", code=2)
    ledger.write_text(re.sub(r"(?m)^.*\tdiscard\t.*\n", "", ledger.read_text().replace(whole.splitlines()[-1] + "\n", "", 1)))
    assert "keep run 5" in series.call("try", "the line taken out") and [row[1] for row in series.rows][2] == "1.950000"


def test_what_a_hand_may_change_in_the_ledger(series):
    ledger = series.folder / "results.tsv"
    series.call("noise", 1)
    shutil.rmtree(series.folder / "runs/3")
    text = re.sub("noise: seed .*", "the same again", ledger.read_text().replace("value 1.9\n", "a better word\n"))
    ledger.write_text(re.sub(r"(?m)^.*\t1.950000\t.*\n", "", text))
    series.edit(VALUE=1.7)
    assert "keep run 6" in series.call("try", "x")
    assert [row[4] for row in series.rows] == ["baseline", "a better word", "value 1.8", "the same again", "x"]


def test_rows_of_no_known_run_are_left_alone(series):
    """A ledger that is older than runs/, or another series'."""
    ledger = series.folder / "results.tsv"
    head = series.git("rev-parse", "--short=7", "HEAD")
    (series.folder / "runs").rename(series.folder / "away")
    ledger.write_text(f"commit\tval_bpb\tmemory_gb\tstatus\tdescription\n{head}\t1.700000\t1.0\tkeep\tby hand\n")
    assert "best: 1.700000" in series.call("status") and len(series.rows) == 1
    shutil.rmtree(series.folder / "runs")
    (series.folder / "away").rename(series.folder / "runs")
    ledger.write_text("commit\tval_bpb\tmemory_gb\tstatus\tdescription\nabcdef1\t1.700000\t1.0\tkeep\tanother series\n")
    series.call("status")
    assert len(series.rows) == 1


def test_no_advice_takes_a_keep_off_the_branch(series):
    """Its row and its folder are gone, and git knows the run."""
    ledger = series.folder / "results.tsv"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(series.folder / "runs/4")
    series.edit(VALUE=1.7)
    said = series.call("try", "x", code=2)
    assert "holds run 4" in said and "reset" not in said and said.count("\n") == 1


# ---- what the run writes of itself ----------------------------------------------------------------------------------------------


def test_a_run_that_writes_its_own_turn_outcome_and_row(series):
    """Better than nothing, and it says that it was to beat 9: what it was to beat was 1.8."""
    runs = series.folder / "runs"
    outcome = json.loads((runs / "4/outcome.json").read_text()) | {"number": 5, "summary": {"val_bpb": 0.1}}
    (series.folder.parent / "outcome.json").write_text(json.dumps(outcome))
    series.edit(
        f"import json, shutil; turn = json.load(open('{runs}/5/turn.json')); "
        f"open('{series.folder}/results.tsv', 'a').write(turn['short'] + '\\t0.100000\\t0.5\\tkeep\\tforged\\n'); "
        f"json.dump(turn | dict(bar=9.0, outdated=False), open('{runs}/5/turn.json', 'w')); "
        f"open('{runs}/5/verdict.json', 'w').write('x'); shutil.copy('{series.folder.parent}/outcome.json', '{runs}/5/'); time.sleep(1)",
        VALUE=1.85)  # fmt: skip
    series.call("try", "forger", "--wait", 0, code=75)
    wait_until(lambda: (runs / "5/outcome.json").exists())
    assert "running: run 5" in series.call("status"), "an outcome that is there while it runs is not its supervisor's"
    output = series.call("wait")
    assert (
        output.startswith("discard run 5")
        and "turn.json was changed during the run" in output
        and "a row for this run before it was judged" in output
    )
    assert series.rows[-1][1:] == ["1.850000", "0.5", "discard", "forger"] and len(series.rows) == 5 and series.best_value() == 1.8
    assert series.run_json(5, "turn")["bar"] == 1.8 and series.run_json(5)["summary"]["val_bpb"] == 1.85


def test_what_git_would_execute_is_not_executed(series, tmp_path):
    (tmp_path / "evil").write_text(f"#!/bin/sh\necho $0 $@ >> '{tmp_path}/executed'\ncat\n")
    (tmp_path / "evil").chmod(0o755)
    evil = tmp_path / "evil"
    series.git("config", "core.fsmonitor", str(evil))
    series.git("config", "diff.external", str(evil))
    for key in ("filter.x.smudge", "filter.x.clean", "filter.a=b.process", "diff.x.textconv", "diff.x.command"):
        series.git("config", key, str(evil))
    series.git("config", "filter.x.required", "true")
    (series.folder / ".git/info/attributes").write_text("train.py filter=x diff=x\n*.md filter=a=b\n")
    hook = series.folder / ".git/hooks/post-checkout"
    shutil.copy(evil, hook)
    series.edit(VALUE=1.7)
    assert "keep run 5" in series.call("try", "x")
    series.edit(VALUE=2.5)
    assert "discard run 6" in series.call("try", "y")
    series.call("status")
    assert not (tmp_path / "executed").exists()


# ---- killed, and more ------------------------------------------------------------------------------------------------------------


def test_a_turn_whose_commit_git_collected(series, tmp_path):
    kill = Kill(tmp_path, "caller:detach:call")
    series.edit(VALUE=1.7)
    series.start("try", "x", **kill.environment).communicate(timeout=60)
    kill.check()
    series.git("reflog", "expire", "--expire=now", "--all")
    series.git("gc", "--quiet", "--prune=now")
    assert series.git("cat-file", "-t", series.run_json(5, "turn")["commit"]) == "commit", "its reference was there before its folder"
    series.git("update-ref", "-d", "refs/autoresearch/nov29/5")
    series.git("gc", "--quiet", "--prune=now")
    assert "STOPPED run 5: its commit is gone from git" in series.call("wait", code=4)
    assert "best: 1.800000" in series.call("status") and "keep run 6" in series.call("try", "x")


def test_a_lock_from_the_future(series):
    series.edit(VALUE=1.7)
    lock = series.folder / ".git/index.lock"
    lock.write_text("")
    os.utime(lock, (time.time() + 10**6,) * 2)
    start = time.monotonic()
    assert series.call("try", "x").startswith("keep run 5") and series.best_value() == 1.7 and series.is_clean() and not lock.exists()
    assert time.monotonic() - start < 30


def test_half_written_files_are_removed(series):
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = [
        series.folder / name
        for name in (f"runs/3/verdict.json.{dead.pid}.tmp", f"runs/nov29.json.{dead.pid}.tmp", f"results.tsv.{dead.pid}.tmp")
    ]
    mine = series.folder / f"runs/3/told.{os.getpid()}.tmp"
    for path in (*left, mine):
        path.write_text("")
    series.call("status")
    assert not any(path.exists() for path in left) and mine.exists(), "somebody is writing it"


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"number": 5}'])
def test_a_damaged_turn_is_told(series, text):
    (series.folder / "runs/5").mkdir()
    (series.folder / "runs/5/turn.json").write_text(text)
    for command in ("status", "stop"):
        assert "runs/5/turn.json is missing or damaged: move runs/5 away" in series.call(command)
    series.call("stop", "--undo")
    series.edit(VALUE=1.7)
    said = series.call("try", "x", code=2)
    assert "move runs/5 away" in said and said.count("\n") == 1 and "Traceback" not in series.call("show", code=2)
    shutil.rmtree(series.folder / "runs/5")
    assert "keep run 5" in series.call("try", "x")


@pytest.mark.parametrize(
    "changes", [{}, {"state": "valid"}, {"state": "valid", "summary": {"val_bpb": "x"}}, {"state": "odd", "reason": 3}, {"state": "crash"}]
)
def test_a_damaged_outcome_is_no_outcome(series, tmp_path, changes):
    kill = Kill(tmp_path, "supervisor:write_outcome:return")
    series.edit(VALUE=1.7)
    series.start("try", "x", **kill.environment).communicate(timeout=60)
    kill.check()
    folder = series.folder / "runs/5"
    for path in [*folder.glob("verdict.json"), folder / "process.json"]:
        path.unlink()
    (folder / "process.json").write_text("{}")
    (folder / "outcome.json").write_text(
        json.dumps({"seconds": {}, "losses": [], "device": None, "summary": None} | changes if changes else {})
    )
    ledger = series.folder / "results.tsv"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:5]))
    assert "Traceback" not in series.call("status")
    assert "STOPPED run 5: it" in series.call("wait", code=4)


@pytest.mark.parametrize(
    "name", ["turn.json", "outcome.json", "verdict.json", "process.json", "cluster.json", "../nov29.json", "../tried.jsonl"]
)
def test_files_of_odd_shapes_end_in_no_traceback(series, name):
    path = series.folder / "runs/4" / name
    content = files.read_json(path) or {"address": "x", "attempts": [], "passed_over": {}}
    right = path.read_bytes() if path.exists() else None
    for text in (
        "",
        "{}",
        *(json.dumps(dict.fromkeys([*content, "number", "commit"], value)) + "\n" for value in (3, "x", [{}], {"a": []})),
    ):
        path.write_text(text)
        for command in (["status"], ["stop"], ["show"], ["wait"]):
            output = series.call(*command, code=None)
            assert "Traceback" not in output, (text, command, output)
    path.unlink() if right is None else path.write_bytes(right)
    series.call("stop", "--undo")
    assert "best: 1.800000" in series.call("status")


def test_innocent_processes_survive_a_process_json_that_names_them(series, tmp_path):
    kill = Kill(tmp_path, "supervisor:follow:call")
    innocent = [subprocess.Popen(["sleep", "60"], start_new_session=True)]
    try:
        old = next(p for p in processes.processes() if p["pid"] == innocent[0].pid)
        series.edit(VALUE=1.7)
        series.start("try", "x", **kill.environment).communicate(timeout=60)
        kill.check()
        here = {"pid": old["pid"], "start": old["start"], "boot": processes.boot_id(), "namespace": "pid:[1]"}
        (series.folder / "runs/5/process.json").write_text(json.dumps(here))
        (series.folder / "runs/5/verdict.json").unlink(missing_ok=True)
        (series.folder / "runs/5/outcome.json").unlink(missing_ok=True)
        series.call("status")
        assert innocent[0].poll() is None, "another container's pid"
        since = time.time() + 3600  # as if it had been begun long before the turn
        assert processes.leader_of(here | {"namespace": processes.namespace()}, since) is None
        assert processes.leader_of(here | {"namespace": processes.namespace()}, time.time())["pid"] == old["pid"]
        # A session whose leader is gone, and that began before what is said to have led it.
        code = "import json, sys; from loop import processes; print(*processes.processes_of('0123', json.loads(sys.argv[1])))"
        shell = subprocess.run(
            ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $$ $!"], start_new_session=True, capture_output=True, text=True
        )
        session, orphan = shell.stdout.split()
        try:
            for start, found in ((10**12, []), (0, [orphan])):
                leader = json.dumps({"pid": int(session), "start": str(start)})
                done = subprocess.run([sys.executable, "-c", code, leader], cwd=PROJECT, check=True, capture_output=True, text=True)
                assert done.stdout.split() == found
        finally:
            os.kill(int(orphan), signal.SIGKILL)
    finally:
        for process in innocent:
            process.kill()
            process.wait()


def test_a_supervisor_that_was_stopped_is_ended(series):
    series.edit(VALUE=1.7, SECONDS=60.0)
    series.call("try", "x", "--wait", 0, code=75)
    wait_until(lambda: (series.folder / "runs/5/process.json").exists())
    for pid in supervisors(series, 5):
        os.kill(pid, signal.SIGSTOP)
    assert "STOPPED run 5" in series.call("stop", "--now", code=4, AUTORESEARCH_LIMITS="grace=1 kill=1")
    wait_until(lambda: not supervisors(series, 5))


@pytest.mark.parametrize(
    "words", ["couldn't write '.git/refs/heads/x.lock'", "Unable to create '.git/refs/heads/x.lock': Read-only file system"]
)
def test_a_disk_that_fills_after_the_row_is_the_machines(series, words):
    """Git's words are those of a full and of a read-only file system; a stub says them where the branch would move."""
    real, stub = shutil.which("git"), series.folder.parent / "bin/git"
    stub.parent.mkdir()
    fails = f'case "$*" in *"update-ref -m"*|*"update-ref refs/heads"*) echo "fatal: cannot lock ref: {words}" >&2; exit 128;; esac'
    stub.write_text(f'#!/bin/sh\n{fails}\nexec {real} "$@"\n')
    stub.chmod(0o755)
    series.edit(VALUE=1.7)
    said = series.call("try", "x", code=3, PATH=f"{stub.parent}:{os.environ['PATH']}")
    assert f"can't move the branch autoresearch/nov29 to {series.rows[-1][0]}" in said and words in said and said.count("\n") == 1
    assert series.rows[-1][1:] == ["1.700000", "0.5", "keep", "x"] and series.best_value() == 1.8
    assert series.call("wait").startswith("keep run 5") and series.best_value() == 1.7 and len(series.rows) == 5 and series.is_clean()


# ---- what others' text does to whoever reads it -----------------------------------------------------------------------------------

COPY = "\x1b]52;c;cm0gLXJmIC8=\x07"  # what a terminal would put into the clipboard
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_visible():
    assert visible(f"a{COPY}\x9b\u202e\tb\r\né…") == "a\\x1b]52;c;cm0gLXJmIC8=\\x07\\x9b\\u202e\tb\\r\né…"
    assert visible(visible(COPY)) == visible(COPY) and not OBEYED.search(visible("".join(map(chr, range(0x2100)))))


@pytest.mark.parametrize("how", ["FAIL: {}", "{}"])
def test_control_sequences_do_not_get_out(series, how):
    said = how.format(f"{COPY}\x9b2J\u202eevil")
    series.edit(f"print({said!r}, flush=True); sys.exit(1)", VALUE=1.7)
    outputs = [series.call("try", f"idea {COPY}\u202e", code=1), series.call("show"), series.call("wait", code=1)]
    ledger = series.folder / "results.tsv"
    ledger.write_text(ledger.read_text().replace("value 1.9\n", f"value {COPY}\u202e\n"))
    outputs += [series.call("status"), series.call("status", "--json"), series.call("nothing\x1b\u202e", code=2)]
    outputs += [(series.folder / f"runs/5/{name}").read_text() for name in ("verdict.json", "outcome.json", "supervisor.log")]
    for output in outputs:
        assert not OBEYED.search(output), output
    assert "\\x1b]52;c;" in outputs[0] and "\\u202eevil" in outputs[0] and "value \\x1b]52" in outputs[3]

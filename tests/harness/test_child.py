"""child.py: what a program answers counts until it crashes, hangs or ends; nothing is left of it. The programs are real, and small."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PROJECT

from harness.common import child

FIND = f"import os, signal, subprocess, sys, time\nsys.path.insert(0, {str(PROJECT)!r})\nfrom harness.common import child\n"
BEGIN = f"{FIND}task, answer = child.begin()\n"


def processes():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.fixture
def ask(tmp_path):
    """(answers, end) of a program's lines after `begin`; nothing of it may be left."""
    before, asked = (processes(), len(os.listdir("/proc/self/fd"))), []

    def ask(lines, task=None, seconds=0.5, begin=BEGIN):
        program = tmp_path / f"program{len(asked)}.py"
        program.write_text(begin + lines)
        asked.append(program.name)
        with child.Child([sys.executable, str(program)]) as started:
            answers = list(started.answers(task or {}, seconds))
        return answers, started.end

    yield ask
    assert (processes(), len(os.listdir("/proc/self/fd"))) == before
    assert sorted(os.listdir(tmp_path)) == asked, "no core file"


@pytest.fixture(autouse=True)
def in_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_answers_come_as_the_program_gives_them(ask):
    assert ask("answer(got=task['n'])\nanswer(then=[1, None, 'ä'])", {"n": 3}) == ([{"got": 3}, {"then": [1, None, "ä"]}], "")


@pytest.mark.parametrize(
    "act, end",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "took its process down: signal 11"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "took its process down: signal 9"),
        ("print('Memory access fault\\n \\n', file=sys.stderr); os.abort()", "took its process down: signal 6 (Memory access fault)"),
        ("raise ValueError('no')", "ended with exit code 1 (ValueError: no)"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("time.sleep(60)", "hung: no answer in 0.5 s"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "hung: no answer in 0.5 s"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "hung: no answer in 0.5 s"),
        ("os.closerange(0, 20); time.sleep(60)", "hung: no answer in 0.5 s"),
        ("while True: os.write(3, b'x' * 65536)", "hung: no answer in 0.5 s"),
    ],
)
def test_what_was_answered_before_the_end_counts(ask, act, end):
    assert ask(f"answer(n=1)\n{act}") == ([{"n": 1}], end)


def test_each_answer_gives_it_more_time_but_nothing_else_does(ask):
    answers, end = ask("for n in range(4):\n    answer(n=n); time.sleep(0.3)\nwhile True:\n    os.write(3, b'[1]\\n'); time.sleep(0.05)")
    assert [a["n"] for a in answers] == [0, 1, 2, 3] and end == "hung: no answer in 0.5 s"


def test_what_it_says_without_end_fills_no_disk(ask):
    """The last line all the same tells why it ended."""
    flood = "for _ in range(40):\n    os.write(2, b'x' * 2**20 + b'\\n'); time.sleep(0.02)\n"
    answers, end = ask(f"{flood}answer(size=os.fstat(2).st_size)\ntime.sleep(0.3)\nsys.exit('the driver broke')", seconds=20)
    assert answers[0]["size"] < 20 * 2**20 and end == "ended with exit code 1 (the driver broke)"


def test_where_a_launcher_left_sigchld_ignored(tmp_path):
    """Then the kernel keeps no exit codes."""
    (tmp_path / "asks.py").write_text(
        f"import sys\nsys.path.insert(0, {str(PROJECT)!r})\nfrom harness.common import child\n"
        f"with child.Child([sys.executable, '-c', {BEGIN + 'answer(n=1); os.abort()'!r}]) as c: print(list(c.answers({{}}, 5)), c.end)"
    )
    launch = "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv(sys.executable, [sys.executable, 'asks.py'])"
    done = subprocess.run([sys.executable, "-c", launch], capture_output=True, text=True)
    assert done.stdout == "[{'n': 1}] took its process down: signal 6\n", done.stderr


def test_rubbish_is_passed_over(ask):
    rubbish = b'\x00\xff\n[1, 2]\n"n"\n{"n": \n' + b"[" * 100_000 + b"\n"
    code = "print('{\"n\": 9}', flush=True)\nos.write(1, b'{\"n\": 9}\\n')\n"
    assert ask(code + f"os.write(3, {rubbish!r})\nanswer(n=1)\nos.write(3, b'{{}}')") == ([{"n": 1}], "")


def test_one_that_does_not_start(ask, monkeypatch):
    assert ask("", begin="import no_such_module\n") == (
        [],
        "ended with exit code 1 (ModuleNotFoundError: No module named 'no_such_module')",
    )
    monkeypatch.setattr(child, "START_SECONDS", 0.3)
    assert ask("", begin="import time; time.sleep(60)\n") == ([], "hung: did not start")
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        child.Child(["/nowhere"])


def gone(pid, seconds=5):
    """Whether a process ends within so many seconds; one that was not ours to wait for may stay a zombie of process 1."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_what_it_has_started_ends_with_it(ask):
    """As the compilers of torch.compile do: they may hold its output open."""
    answers, end = ask("answer(pid=subprocess.Popen(['sleep', '60'], stdout=3, pass_fds=[3]).pid)")
    assert end == "" and gone(answers[0]["pid"])


def test_those_that_wait_are_ended_untold(ask):
    """An error of the first, or Ctrl-C, must not leave the second waiting for its task."""
    with pytest.raises(KeyboardInterrupt):
        with child.Child([sys.executable, "-c", BEGIN]) as first, child.Child([sys.executable, "-c", BEGIN]):
            assert list(first.answers({}, 5)) == [] and first.end == ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("hang", ["time.sleep(60)", "__import__('ctypes').PyDLL(None).sleep(60)", ""])
def test_it_ends_when_its_parent_is_killed(hang):
    """Though it hangs, be it in a call that holds the interpreter's lock: killed by SIGKILL, the parent can tidy up nothing."""
    inner = BEGIN + f"answer(pid=os.getpid(), other=subprocess.Popen(['sleep', '60']).pid)\n{hang}"
    first = "next(started.answers({}, 60))" if hang else "{'pid': started.process.pid}"
    start = f"started = child.Child([sys.executable, '-c', {inner!r}])"
    code = f"import json, sys, time\nsys.path.insert(0, {str(PROJECT)!r})\nfrom harness.common import child\n{start}\n"
    code += f"print(json.dumps({first}), flush=True)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = json.loads(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids.values())


def test_started_by_a_user_it_says_that_it_is_none_for_him(tmp_path):
    run = dict(capture_output=True, text=True, cwd=tmp_path)
    done = subprocess.run([sys.executable, "-c", BEGIN], stdin=subprocess.DEVNULL, **run)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "ended before it was told what to try\n")
    ours, theirs = os.openpty()
    done = subprocess.run([sys.executable, "-c", BEGIN], stdin=theirs, **run)
    os.close(ours), os.close(theirs)
    assert done.returncode == 1 and done.stderr.endswith("is started by another program, which tells it what to try\n")

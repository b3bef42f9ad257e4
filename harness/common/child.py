"""Programs of ours that try what may crash, hang or spoil its process: each in a process of its own, so that it costs only itself.

Such a program imports what it needs and then calls `begin`, which waits for its task; it answers by JSON objects, a line each. `Child` is
the other side. Several may be started at once: their imports overlap, and each begins when its task comes. The standard library suffices.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings

START_SECONDS = 120  # to import what it needs, from a cold disk
ERRORS = 2**20  # bytes of what it says to stderr that are kept: one that says without end fills no disk
KILL_SECONDS = 10  # a process that SIGKILL has not ended by then hangs in the driver, and only a reboot ends it


class Child:
    """A program that has been started and waits for its task. Leaving the `with` block ends it, and all that it has started.

    command: the program and its arguments. environ: its environment, folder: where it is run; None for this process's.
    `end`: how it ended, in a few words; empty if well, and until it has ended.
    """

    def __init__(self, command, environ=None, folder=None):
        self.end, self.said = "", b""
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # as some launchers leave it: no exit code would be kept
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (_close closes it)
        fcntl.fcntl(self.errors, fcntl.F_SETFL, os.O_APPEND)  # so that it can be cut off while it is written
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environ, cwd=folder, start_new_session=True
            )
        except BaseException:
            self.errors.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._close()

    def answers(self, task, seconds):
        """The JSON objects that it answers to a task, as they come; all else is passed over.

        Ends with the program, or ends that, where no answer comes for `seconds`, the time that it needs to start not counted.
        """
        with contextlib.suppress(OSError):  # it is dead already, which its end will say
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        pipe, rest, hung, until = self.process.stdout.fileno(), b"", "did not start", time.monotonic() + START_SECONDS
        while (left := until - time.monotonic()) > 0:
            if os.fstat(self.errors.fileno()).st_size > ERRORS:
                self.said = self._said()
                os.ftruncate(self.errors.fileno(), 0)
            ended = self._has_ended()  # asked before reading: then all that it wrote is in the pipe
            if select.select([pipe], [], [], 0 if ended else min(left, 0.1))[0]:
                piece = os.read(pipe, 65536)
                *lines, rest = (rest + piece).split(b"\n")
                rest = rest[-65536:]  # of what never ends a line
                for answer in map(_parsed, lines):
                    if answer:
                        yield answer
                    if answer is not None:
                        hung, until = f"no answer in {seconds:g} s", time.monotonic() + seconds
                if piece:
                    continue
                time.sleep(min(left, 0.02))  # it has closed the pipe and lives on
            if ended:
                return self._close()
        self._close(f"hung: {hung}")

    def _has_ended(self):
        """Without taking its exit code, which keeps its process group's number from being given to others."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _close(self, why=""):
        if self.errors.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            code = self.process.wait(KILL_SECONDS)
            self.end = why or self._words(code)
        except subprocess.TimeoutExpired:
            self.end = f"{why or 'ended'}; process {self.process.pid} survives SIGKILL, so the driver hangs: reboot the machine"
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):
                file.close()

    def _words(self, code):
        if code == 0:
            return ""
        end = f"took its process down: signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = (self.said + self._said()).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        return f"{end} ({''.join(filter(str.isprintable, last))[:160]})" if last else end

    def _said(self):
        """The end of what it has said to stderr."""
        file = self.errors.fileno()
        return os.pread(file, 4096, max(0, os.fstat(file).st_size - 4096))


def _parsed(line):
    """The JSON object in a line, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def begin():
    """In the program: (its task, a function that answers with its keyword arguments). It ends when the process that started it does."""
    if sys.stdin is None or sys.stdin.isatty():
        sys.exit(f"{os.path.basename(sys.argv[0])} is started by another program, which tells it what to try")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash: that leaves no file
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no answer
    sys.stdout.reconfigure(line_buffering=True)  # and not lost where it is the last thing before a crash
    warnings.simplefilter("ignore")  # the last line that it prints may say why it ended
    line = sys.stdin.readline()
    if not line:
        sys.exit("ended before it was told what to try")
    _end_with_parent()

    def answer(**facts):
        print(json.dumps(facts), file=answers, flush=True)

    answer()  # that it has started
    return json.loads(line), answer


def _end_with_parent():
    """Have the kernel kill it, and all that it has started, when nobody is left who could write to its stdin, where nothing more comes.

    A thread of Python that waits for that would wait for ever beside a call that hangs and holds the interpreter's lock.
    """
    whom = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()  # its group, where it leads one
    fcntl.fcntl(0, fcntl.F_SETOWN, whom)
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was so before the kernel was asked
        os.kill(whom, signal.SIGKILL)

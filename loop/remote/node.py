"""
On a node of a cluster: one run that was sent there. Ray starts this in the files of the commit that is tried, unpacked.

What is used of the node: the venv whose python3 is first on PATH (`. ./env.sh` before `ray start`), its data and its caches. The last line
says what came of it, as JSON: {"outcome": …}; {"unfit": why} where this node can't do it; {"busy": why} where it can't now.
"""

import codecs
import hashlib
import json
import os
import shutil
import signal
import sys

from ..files import LIMITS, ROOT, Refusal, read_bytes, run_file
from ..machine import look
from ..processes import cache_folder, gpu_name, take_gpu
from ..run import LIBC, Log, interrupted, measure

ANSWER = "autoresearch answers: "


class Echo(Log):
    """The same log, and on stdout: its beginning at once, what is beyond that at the end."""

    def __init__(self, path, limit):
        super().__init__(path, limit)
        self.path, self.room = path, self.limit // 2  # room: how much more is shown at once
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, chunk):
        super().write(chunk)
        self.show(chunk[: max(0, self.room)])
        self.room -= len(chunk)

    def show(self, chunk):
        sys.stdout.buffer.write(self.decoder.decode(chunk).encode())  # Ray gives nothing of a log in which one byte is not UTF-8
        sys.stdout.flush()

    def end(self):
        """Show the last part of what was held back."""
        if self.room < 0:
            self.show(b"\n[... left out ...]\n" + (read_bytes(self.path) or b"")[max(self.room, -self.limit // 4) :])


def answer(**what):
    print(f"\n{ANSWER}{json.dumps(what)}", flush=True)
    return 0


def move_in(turn):
    """Into a copy of the files that is this run's alone, with the node's venv; for a GPU always the same path, for compilers' caches."""
    if sys.prefix == sys.base_prefix:
        return answer(unfit=f"{sys.executable} is in no virtual environment: `. ./env.sh` before `ray start`")
    os.environ.pop("AUTORESEARCH_TIME_BUDGET", None)  # the series', never the node's own
    os.environ.update(turn["environment"])
    os.environ["AUTORESEARCH_CACHE"] = cache_folder()
    try:
        gpu = -1 if turn["cores"] else take_gpu(f"run {turn['number']} of {turn['tag']}, sent by Ray")
    except Refusal as e:
        return answer(busy=str(e))
    place = os.path.join(cache_folder(), "cluster", f"cores-{turn['token']}" if turn["cores"] else gpu_name())
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(ROOT, place, symlinks=True)
    os.symlink(sys.prefix, os.path.join(place, "venv"))
    if gpu >= 0:
        os.set_inheritable(gpu, True)
    os.chdir(place)
    os.execv(sys.executable, [sys.executable, "-m", "loop.remote.node", str(gpu)])


def contents():
    """Path → digest of the files that came."""
    leave_out, found = ("venv", "runs", "__pycache__"), {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in leave_out and not os.path.islink(os.path.join(folder, name))]
        for name in names:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, ROOT)] = hashlib.sha256(read_bytes(path) or b"").digest()
    return found


def run_here(turn, gpu):
    LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER, as a supervisor does

    def stop(which, frame):
        interrupted.append("it was told to stop")
        LIMITS["grace"] = min(LIMITS["grace"], 1)  # Ray kills what is left after 3 s

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if unfit := look(turn["expected"]):
        return answer(unfit=unfit)
    os.makedirs(run_file(turn["number"], ""))
    before = contents()
    log = Echo(run_file(turn["number"], "run.log"), LIMITS["log"])
    (state, reason), facts = measure(turn, ROOT, dict(os.environ), turn["expected"], log, gpu)
    log.end()
    after = contents()
    if state == "valid" and (changed := next((path for path in before if before[path] != after.get(path)), None)):
        state, reason = "crash", f"invalid: the run changed {changed}"
    return answer(outcome={"state": state, "reason": reason} | facts)


def main():
    turn = json.loads(os.environ["AUTORESEARCH_TURN"])
    LIMITS.update(turn["limits"])
    if len(sys.argv) == 1:
        try:
            return move_in(turn)
        except (OSError, shutil.Error) as e:  # a full disk, a cache that can't be written
            return answer(unfit=f"{e}"[:300])
    try:
        return run_here(turn, int(sys.argv[1]))
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

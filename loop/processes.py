"""Locks, processes, and the machine that a run needs."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import time

from harness.common import settings
from harness.common.hardware import gpu_hardware

from .files import ENVIRONMENT, LIMITS, ROOT, RUNS, Refusal, read_bytes, run_file


@contextlib.contextmanager
def state_lock():
    """Held while the state of turns is read and changed: a moment each time, never while something runs."""
    os.makedirs(RUNS, exist_ok=True)
    with open(os.path.join(RUNS, "lock"), "w") as lock:
        for attempt in range(600):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 599:
                    raise Refusal(f"another experiment.py has held {lock.name} for a minute: end it") from None
                time.sleep(0.1)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a supervisor that was forked and not yet executed


def lock_file(path, wait=0.0):
    """The descriptor of the file `path`, locked; None where another process holds it for longer than `wait` seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(descriptor)
                return None
            time.sleep(0.1)


def is_supervised(number):
    """Whether a supervisor of this run lives: it holds the lock from before it is started until it ends, however it ends."""
    with contextlib.suppress(FileNotFoundError), open(run_file(number, "alive")) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cache_folder():
    try:
        return settings.cache_folder()
    except ValueError as e:
        raise Refusal(str(e), ENVIRONMENT) from None


def gpu_name():
    """What a run occupies: the first GPU that it may see, or the CPU."""
    if not gpu_hardware():
        return "cpu"
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(variable) is not None:
            first = os.environ[variable].split(",")[0].strip()
            return f"gpu-{re.sub(r'[^A-Za-z0-9-]', '', first)}" if first not in ("", "-1") else "cpu"
    return "gpu-0"


def processes():
    """Every process that can be seen: pid, name, state, parent, session, start."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as f:
                left, _, right = f.read().decode("utf-8", "replace").rpartition(")")
                fields = right.split()
                yield {
                    "pid": int(entry),
                    "name": left.partition("(")[2],
                    "state": fields[0],
                    "parent": int(fields[1]),
                    "session": int(fields[3]),
                    "start": fields[19],
                }


def boot_id():
    """Names the time since the machine was started: pids of another time mean other processes."""
    return (read_bytes("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def namespace():
    """Names the container: pids of another one mean other processes."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def leader_of(started, since):
    """The first process of a run as process.json tells, where its pid means the same process here and now; None otherwise.

    since: when the turn began. What is older is not of it, whoever has written the file.
    """
    if not isinstance(started, dict) or not all(str(started.get(key)).isdecimal() for key in ("pid", "start")):
        return None
    begun = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(started["start"]) / os.sysconf("SC_CLK_TCK")
    same = (started.get("boot"), started.get("namespace")) == (boot_id(), namespace())
    return started if same and begun > since - 60 else None


def working_folder(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def processes_of(token, leader):
    """Pids of what a run has started: by the token in their environment, by the session of its first process, `leader`, and by descent.

    Descent from this process: orphans of its run become the supervisor's, and no other caller has children then.
    """
    mark, mine = f"AUTORESEARCH_RUN={token}".encode(), {os.getpid()}
    every = [p for p in processes() if p["pid"] not in mine]
    reused = leader and any(p["pid"] == leader["pid"] and p["start"] != leader["start"] for p in every)
    led = leader["pid"] if leader and not reused else None
    family, more = mine, mine
    while more:
        more = {p["pid"] for p in every if p["parent"] in more}
        family = family | more
    for process in every:
        if process["state"] in "ZX":
            continue
        ours = process["pid"] in family or process["session"] == led and int(process["start"]) >= int(leader["start"])
        if not ours and process["state"] != "D":  # the environment of a process that hangs in the driver may not be readable either
            ours = mark in (read_bytes(f"/proc/{process['pid']}/environ") or b"").split(b"\0")
        if ours:
            yield process["pid"]


def end_processes(token, leader, grace):
    """End everything that a run has started: SIGTERM, SIGKILL after `grace` seconds. Returns the pids that survive even that."""
    start = time.monotonic()
    number = signal.SIGTERM
    while True:
        left = list(processes_of(token, leader))
        if not left:
            return []
        waited = time.monotonic() - start
        if waited > grace + LIMITS["kill"]:
            return left
        if number == signal.SIGTERM or waited > grace:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            number = signal.SIGKILL
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans that have become the supervisor's
                pass
        time.sleep(0.02)


def unkillable(pids):
    return f"process {', '.join(map(str, pids))} survives SIGKILL, so the driver hangs: reboot the machine"


def check_disk():
    for folder in (ROOT, cache_folder()):
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        free = shutil.disk_usage(folder).free
        if free < LIMITS["disk"]:
            raise Refusal(f"{free / 1e9:.1f} GB free in {folder}, and a run needs {LIMITS['disk'] / 1e9:.1f}: make room", ENVIRONMENT)


def take_gpu(what):
    """The lock of the GPU that a run here would occupy."""
    os.makedirs(cache_folder(), exist_ok=True)
    path = os.path.join(cache_folder(), f"{gpu_name()}.lock")
    gpu = lock_file(path, wait=1)
    if gpu is None:
        holder = " ".join((read_bytes(path) or b"").decode("utf-8", "replace").split())
        other = "" if gpu_name() == "cpu" else ", or give this folder another GPU (CUDA_VISIBLE_DEVICES)"
        raise Refusal(f"{gpu_name()} is in use by {holder or 'another run'}: wait for it{other}")
    os.ftruncate(gpu, 0)
    os.pwrite(gpu, f"{what}\n".encode(), 0)
    return gpu

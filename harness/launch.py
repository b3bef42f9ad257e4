"""The start of a run: train.py in a box (harness/common/box.py), and at its side, outside, who examines its model (harness/examiner.py).

    python -m harness.launch [arguments of train.py]      (run.sh does that; `python train.py` alone trains without a box)

train.py can read the project, the system's programs and libraries, and the training text; it can write temporary files and what it
compiles. It can't read the validation text, git, or what earlier runs have left; it writes no file of the project, and has no network.
The model that it trains is kept by this process, which ends as train.py does.
"""

import contextlib
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

from harness.common import box, settings, telemetry
from harness.common.files import read_json, replace_file, sync_folder
from harness.common.hardware import gpu_hardware
from harness.common.protocol import EXIT_ENVIRONMENT

HERE = settings.ROOT
CHANNEL, MODEL = "AUTORESEARCH_EXAMINER", "AUTORESEARCH_MODEL"  # descriptors, for train.py's process
ANSWER = "AUTORESEARCH_ANSWER"  # the file that tells the loop what the examination gave; train.py never sees its name
VALIDATION = "shard_06542"
UNEVALUATED = "unevaluated.pt"
# Of the project: what runs before this one have left, and what belongs to the loop.
CLOSED = {".git", "runs", "worktrees", "results.tsv", "report.md"}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/proc", "/sys", "/run", "/nix/store", "/var/lib/dcgm")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/shm", "/dev/kfd", "/dev/dri", "/dev/dxg")
LARGE = 2**24  # bytes: no compiler makes such a file, so one that appears in the compiled cache is a model


def dataset_folder(environ):
    """The root of the dataset that a run uses."""
    name = environ.get("AUTORESEARCH_DATASET") or ("climbmix" if gpu_hardware() else "demo")
    cache = settings.cache_folder(environ)
    return cache if name == "climbmix" else os.path.join(cache, name)


def compiled_folders(environ):
    """{variable: folder} of where compilers and drivers keep what they make, as set or in the cache."""
    compiled = os.path.join(settings.cache_folder(environ), "compiled")
    names = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda",
        "AMD_COMGR_CACHE_DIR": "comgr", "MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    }  # fmt: skip
    return {variable: environ.get(variable) or os.path.join(compiled, folder) for variable, folder in names.items()}


def rules(environ, scratch, compiled, files):
    """(path, access) of what train.py may use. scratch, compiled: folders to write in. files: what else it may read."""
    root = dataset_folder(environ)
    facts = read_json(os.path.join(root, "data", "dataset.json")) or {}
    shards = [str(s.get("shard", "")).removesuffix(".parquet") for s in facts.get("shards", ()) if isinstance(s, dict)]
    tokens = [os.path.join(root, "tokens", s + end) for s in shards if s != VALIDATION for end in (".tokens", ".index.npz", ".json")]
    project = [entry.path for entry in os.scandir(HERE) if entry.name not in CLOSED and not entry.name.endswith((".pt", ".tmp"))]
    python = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *filter(os.path.isabs, sys.path)} - {HERE}
    libraries = filter(os.path.isabs, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    rocm = [entry.path for entry in os.scandir("/opt") if entry.name.startswith(("rocm", "amdgpu"))] if os.path.isdir("/opt") else []
    read = [*SYSTEM, *rocm, *map(os.path.realpath, python), *python, *libraries, *project, *tokens, *files]
    read += [os.path.join(root, "tokenizer"), os.path.join(root, "data", "dataset.json")]
    devices = [*DEVICES, *(entry.path for entry in os.scandir("/dev") if entry.name.startswith("nvidia"))]
    return [
        *((path, box.READ) for path in read),
        ("/proc", box.WRITE),  # CUDA opens its own there to write; nothing can be made in it, and other processes' memory stays closed
        (HERE, box.READ_DIR), (os.path.join(root, "data"), box.READ_DIR),
        *((path, box.WRITE) for path in (scratch, *compiled, *devices)),
    ]  # fmt: skip


class Model:
    """Where train.py's model is written to, as a file that is open already: it can't open one here. It gets its name when it is whole."""

    def __init__(self):
        self.path, self.temporary = os.path.join(HERE, UNEVALUATED), os.path.join(HERE, f"{UNEVALUATED}.{os.getpid()}.tmp")
        self.descriptor = None
        with contextlib.suppress(OSError):  # train.py says it
            self.descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def keep(self):
        os.fsync(self.descriptor)
        os.replace(self.temporary, self.path)
        sync_folder(HERE)

    def evaluated(self, keep):
        """It is model.pt from now on with `keep`, else nothing."""
        try:
            os.replace(self.path, os.path.join(HERE, "model.pt")) if keep else os.remove(self.path)
        except OSError as e:
            print(f"WARNING: {e}" + (f"; the model stays in {self.path}" if keep else ""))

    def close(self):
        with contextlib.suppress(OSError):
            os.remove(self.temporary)


def serve(way, child, model, answer):
    """Do what train.py's process asks for, until it ends. Returns (whether it saved its model, whether that has a number)."""
    examined = saved = False
    while True:
        if not select.select([way], [], [], 0.5)[0]:
            if child.poll() is None:
                continue
            return saved, examined  # what it has started may still hold its end
        content = way.recv(2**16)
        if not content:
            return saved, examined
        try:
            asked = dict(json.loads(content))
        except (ValueError, TypeError):
            asked = {}
        if asked.get("want") == "save" and model.descriptor is not None and not saved:
            try:
                model.keep()
                saved, reply = True, {"saved": model.path}
            except OSError as e:
                reply = {"invalid": str(e)}
        elif asked.get("want") == "examination" and not examined:
            from harness import examiner  # with torch: on a machine of few cores only now, where it takes no time from the training

            reply = examiner.result(way, asked)
            examined = "val_bpb" in reply
            if answer:
                with replace_file(answer) as f:
                    json.dump(reply, f)
        else:
            reply = {"invalid": f"invalid: {ascii(asked.get('want'))} was asked for too early, or again"}
        with contextlib.suppress(BrokenPipeError):
            way.send(json.dumps(reply).encode())


# What a run needs of a GPU, tried in the box once for each kernel, driver and torch: what they open is theirs, and changes.
TRIAL = """
import torch
x = torch.ones(64, device="cuda")
assert torch.compile(lambda x: (x * 2).sum())(x).item() == 128
"""
TRIAL_SECONDS = 180


def why_not_boxed(environ, allowed):
    """Why train.py runs without a box, in a few words; None where the box leaves it all that it needs."""
    if not box.version():
        return "this kernel has no Landlock"
    hardware = gpu_hardware()
    if not hardware:
        return None
    path = os.path.join(settings.cache_folder(environ), "box.json")  # where train.py can't write
    driver = next((text for name in ("nvidia", "amdgpu") if (text := telemetry.read(f"/sys/module/{name}/version"))), "")
    key = json.dumps([platform.release(), driver, hardware, sys.prefix, telemetry.read(f"{HERE}/venv/.autoresearch/constraints.txt") or ""])
    known = read_json(path) or {}
    if key not in known:
        print(
            "autoresearch: trying the GPU in the box that train.py runs in (once for each driver and torch) …", file=sys.stderr, flush=True
        )
        try:
            done = subprocess.run([sys.executable, "-c", TRIAL], cwd=HERE, env=environ, preexec_fn=lambda: box.enter(allowed), text=True,
                                  errors="replace", capture_output=True, timeout=TRIAL_SECONDS)  # fmt: skip
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            known = {key: None if done.returncode == 0 else f"in it the GPU can't be used ({ascii(said[:160])})"}
        except (OSError, subprocess.SubprocessError) as e:
            known = {key: f"the GPU did not answer in it ({type(e).__name__})"}
        with contextlib.suppress(OSError), replace_file(path) as f:
            json.dump(known, f)
    return known[key]


def start(environ, arguments, passed, allowed):
    """train.py's process, in the box where it can be."""
    why = why_not_boxed(environ, allowed)
    if why:
        print(
            f"autoresearch: train.py runs without a box, which would keep it from what it must not read: {why}", file=sys.stderr, flush=True
        )

    def restrict():
        box.LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not without this process
        if not why:
            box.enter(allowed)

    command = [sys.executable, os.path.join(HERE, "train.py"), *arguments]
    return subprocess.Popen(command, cwd=HERE, env=environ, pass_fds=passed, preexec_fn=restrict)


def main():
    arguments = sys.argv[1:]
    environ = {name: value for name, value in os.environ.items() if not re.search("(TOKEN|SECRET|PASSWORD|API_KEY)$", name)}
    answer = environ.pop(ANSWER, None)
    try:
        compiled = compiled_folders(environ)
        for folder in compiled.values():
            os.makedirs(folder, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix="autoresearch-")
    except (OSError, ValueError) as e:
        print(f"FAIL: {e}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    before, model = large_files(compiled.values()), Model()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ |= compiled | {"TMPDIR": scratch, CHANNEL: str(theirs.fileno())}
    passed = [theirs.fileno()]
    if model.descriptor is not None:
        environ[MODEL] = str(model.descriptor)
        passed.append(model.descriptor)
    files = [os.path.realpath(a.removeprefix("--evaluate=")) for a in arguments if os.path.isfile(a.removeprefix("--evaluate="))]
    child = start(environ, arguments, passed, rules(environ, scratch, {*compiled.values()}, files))
    theirs.close()

    def forward(number, frame):
        if number == signal.SIGINT and terminal_is_ours():
            return  # the terminal has sent it to train.py too
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, forward)
    try:
        if (os.cpu_count() or 1) >= 4:  # else it waits until it is needed
            with contextlib.suppress(Exception):  # then said where it is needed
                from harness import examiner  # noqa: F401
        saved, examined = serve(ours, child, model, answer)
        code = child.wait()
        if code == 0 and saved and examined:
            model.evaluated("--keep" in arguments)
    finally:
        model.close()
        shutil.rmtree(scratch, ignore_errors=True)
        for path in large_files(compiled.values()) - before:
            with contextlib.suppress(OSError):
                os.remove(path)
                print(f"WARNING: removed {path} from what is compiled: no compiler makes a file of that size", flush=True)
    if code < 0:  # by a signal: as train.py, so this one, for whoever looks at how it ended
        sys.stdout.flush()
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code == 0 and answer and not examined:
        print("FAIL: train.py ended without an evaluation", file=sys.stderr)
        return 1
    return code


def terminal_is_ours():
    with contextlib.suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def large_files(folders):
    return {
        path
        for top in {*folders}
        for folder, _, names in os.walk(top)
        for path in (os.path.join(folder, name) for name in names)
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) > LARGE
    }


if __name__ == "__main__":
    sys.exit(main())

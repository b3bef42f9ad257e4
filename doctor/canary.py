"""What torch says of itself: its files, and a process that imports and uses it.

Each use of the GPU is in a process of its own, which may crash or hang. What is said without asking comes from torch's files, because
importing it takes seconds.
"""

import ast
import contextlib
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile

from doctor.machine import ROOT, VISIBLE
from doctor.words import last_line, numbers, one_line, say
from harness.common.files import replace_file

DOOR = os.path.join(ROOT, "doctor.py")


CANARY_SECONDS = 180  # import, first use of the GPU, one torch.compile
# Environment variables that can change what the canary found.
TRACES = (*VISIBLE, "HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "ROCM_HOME", "HIP_PATH", "CC", "CXX")


def torch_on_disk():
    """What torch's files say without importing it: version, hip, cuda, rocm, path, site, extras, packages, wants_triton, aotriton."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    folder = os.path.dirname(spec.origin)
    facts = {"path": folder, "site": os.path.dirname(folder), "version": None}
    with contextlib.suppress(OSError), open(os.path.join(folder, "version.py")) as f:
        for name, value in re.findall(r"^(__version__|hip|cuda|rocm)\b[^=\n]*= *(.+)$", f.read(), re.M):
            with contextlib.suppress(ValueError, SyntaxError):
                facts["version" if name == "__version__" else name] = ast.literal_eval(value)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        about = importlib.metadata.metadata("torch")
        facts["version"] = facts["version"] or about["Version"]
        facts["extras"] = about.get_all("Provides-Extra") or []
        wants = [line.split(";")[0].strip() for line in about.get_all("Requires-Dist") or [] if re.match(r"(pytorch-)?triton", line)]
        facts["wants_triton"] = wants[0] if wants else None
    build = (facts["version"] or "").partition("+")[2]
    if build.startswith("rocm"):
        facts["rocm"] = build[4:]
        facts["hip"] = facts.get("hip") or build[4:]
    elif facts.get("hip") and not facts.get("rocm"):
        facts["rocm"] = facts["hip"]
    if re.match(r"cu\d{3}", build):
        facts["cuda"] = facts.get("cuda") or f"{build[2:4]}.{build[4:]}"
    found = {}
    for dist in importlib.metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if re.match(r"triton|pytorch-triton|amd-torch|rocm", name):
            found.setdefault(name, dist.version)
    facts["packages"] = dict(sorted(found.items()))
    libraries = glob.glob(os.path.join(folder, "lib", "libaotriton_v2.so.*.*"))
    facts["aotriton"] = max((p.split(".so.")[1] for p in libraries), key=numbers, default=None)
    return facts


def ask_torch(machine, command, seconds, **environ):
    """The answers (a JSON object a line) of one of our Python programs, and how it ended: "", "crashed (exit code …)", "hung for … s"."""
    environ = dict(machine.environ) | {"AUTORESEARCH_HARDWARE": machine.hardware} | environ
    code, out, err = machine.run([sys.executable, *command], seconds, environ)
    answers = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # whatever else is printed
            answers.append(dict(json.loads(line)))
    if code == 0:
        return answers, ""
    last = last_line(err)[:160]
    ended = f"hung for {seconds} s" if code is None else f"crashed (exit code {code if code >= 0 else 128 - code})"
    return answers, ended + (f": {last}" if last and code is not None and code > 0 else "")


def answer(**facts):
    print(json.dumps(facts), flush=True)


def try_torch():
    """Import torch, see the GPU, compute a sum, compile a kernel; says before each what it is at, so that a crash tells where."""
    stage = "import"
    answer(stage=stage)
    try:
        import torch

        if os.environ.get("AUTORESEARCH_HARDWARE") == "none":
            return answer(stage="done", devices=[])
        stage = "see"
        answer(stage=stage)
        if not torch.cuda.is_available():
            return answer(stage=stage, error="no GPU")
        devices = []
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            names = ("name", "gcnArchName", "total_memory", "is_integrated", "multi_processor_count")
            devices.append({name: getattr(found, name) for name in names if hasattr(found, name)})
        stage = "kernel"
        answer(stage=stage, devices=devices)
        if torch.ones(64, device="cuda").sum().item() != 64:
            return answer(stage=stage, error="wrong", devices=devices)
        stage = "compile"
        answer(stage=stage, devices=devices)
        if torch.compile(lambda x: (x + x).sum())(torch.ones(64, device="cuda")).item() != 128:
            return answer(stage=stage, error="wrong", devices=devices)
        answer(stage="done", devices=devices)
    except Exception as error:
        text = str(error).splitlines()[0] if stage == "kernel" and str(error) else one_line(error)
        answer(stage=stage, error=text)


LAYERS = {"convolution": ("Conv1d", (8, 8, 3)), "batch norm": ("BatchNorm1d", (8,))}


def try_layer(name):
    """Forward and backward of one of LAYERS on the GPU, compared with the CPU; what failed, or None, is the answer."""
    import torch

    kind, sizes = LAYERS[name]
    try:
        torch.manual_seed(0)
        layer, x = getattr(torch.nn, kind)(*sizes), torch.randn(4, 8, 32)
        found = []
        for device in ("cpu", "cuda"):
            y = layer.to(device)(x.to(device))
            found.append([t.cpu() for t in (y, *torch.autograd.grad(y.square().sum(), layer.weight))])
        same = all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*found))
        answer(why=None if same else "wrong numbers")
    except Exception as error:
        answer(why=one_line(error))


def ask_layers(machine):
    """Layer → why it fails, or None."""
    found = {}
    for name in LAYERS:
        answers, end = ask_torch(machine, [DOOR, "--layer", name], CANARY_SECONDS)
        found[name] = end or (answers[-1]["why"] if answers else "it said nothing")
    return found


def canary_key(machine):
    """What its answer depends on: torch, Triton, Python, compiler, kernel, driver, settings; and the boot, which firmware needs."""
    compiler = [os.path.realpath(c) for c in (machine.which("cc", "gcc", "clang"), machine.which("c++", "g++", "clang++")) if c]
    parts = {
        "torch": {k: v for k, v in machine.torch.items() if k not in ("canary", "sdpa", "sdpa_end", "miopen")},
        "python": [sys.executable, sys.version],
        "compiler": [[path, os.stat(path).st_mtime] for path in compiler],
        "driver": [machine.read("proc/sys/kernel/osrelease"), machine.read("proc/driver/nvidia/version")],
        "boot": machine.read("proc/sys/kernel/random/boot_id"),
        "hardware": [machine.hardware, machine.parts],
        "environ": {name: machine.environ.get(name) for name in TRACES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cached_canary(machine):
    """The canary's answer. That it lived is remembered in the cache folder's doctor.json, until something it depends on has changed."""
    path, key = os.path.join(machine.cache(), "doctor.json"), canary_key(machine)
    remembered = {}
    with contextlib.suppress(OSError, ValueError, TypeError), open(path) as f:
        remembered = dict(json.load(f))
        if key in remembered:
            return dict(remembered[key])
    if machine.hardware != "none":
        say("trying torch, the GPU and torch.compile (once for each boot, torch, driver and compiler) …")
    with tempfile.TemporaryDirectory() as empty:  # so that it compiles, whatever was compiled before
        caches = {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": empty, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        answers, end = ask_torch(machine, [DOOR, "--canary"], CANARY_SECONDS, **caches)
    found = (answers or [{"stage": "import"}])[-1] | {"end": end or "ended"}
    if found["stage"] == "done" and not end:
        with contextlib.suppress(OSError):
            os.makedirs(machine.cache(), exist_ok=True)
            with replace_file(path) as f:
                json.dump(dict(list(remembered.items())[-31:]) | {key: found}, f)
    return found

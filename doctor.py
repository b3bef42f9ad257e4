"""Is this machine fit to train on, and what to do if not?

    python doctor.py             # one screen: what was seen, why it matters, the command that mends it
    python doctor.py --probe     # and measured: copy bandwidth, GEMM, attention, the step on paper (minutes)
    python doctor.py --report    # report.md, to be pasted into an issue: all of this, versions, ten training steps (report.py; minutes)
    python doctor.py --json      # the screen as JSON
    python doctor.py --stop      # what run.sh asks before each run: a line for each fault that would make it fail, freeze or lie
    python doctor.py --list      # every check, as docs/doctor.md lists them

Exit code 3 if a run must not start, else 0. AUTORESEARCH_SKIP_CHECKS="memory, disk" leaves checks out, where you know better.

A check is a function of a Machine (its files, its commands, its torch), so that tests can lay one out. It returns what it saw in a
few words, a Fault, or None where it has nothing to say, and names in its docstring the report behind it (ROCm/legacy-rocm-build is what
was ROCm/ROCm). Each runs in a process of its own that may crash or hang: that costs its own row and no run. torch is asked in a
further process, and what is said without asking comes from its files, because importing it takes seconds.
"""

import argparse
import ast
import contextlib
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from harness.common import hardware, settings, telemetry
from harness.common.files import replace_file

HERE = os.path.dirname(os.path.abspath(__file__))
PROBE = os.path.join(HERE, "benchmarks", "probe.py")
EXIT_ENVIRONMENT = 3  # as train.py: the machine or the data is at fault, not the experiment
GIB = 2**30
CHECK_SECONDS = 5  # a check that takes longer hangs
CANARY_SECONDS = 180  # import, first use of the GPU, one torch.compile
PROBE_SECONDS = 1200  # for each part of --probe, which gives what it measures 90 s each
STAY_AWAKE = "idle:sleep:handle-lid-switch"  # what run.sh holds off
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# Environment variables that can change what the canary found.
TRACES = (*VISIBLE, "HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH", "ROCM_HOME", "HIP_PATH", "CC", "CXX")

# ---------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------


def run_command(command, timeout=CHECK_SECONDS, environ=None):
    """(exit code, stdout, stderr); the code is None if it hung. It never waits longer: what hangs in the kernel can't be killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, start_new_session=True)
        except OSError as error:
            return 127, "", str(error)
        code = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")


@dataclass
class Machine:
    """What the checks look at."""

    root: str = "/"  # where /sys, /proc and /dev are
    environ: Mapping = field(default_factory=lambda: os.environ)
    run: Callable = run_command  # a command and seconds → (exit code or None, stdout, stderr)
    access: Callable = os.access  # a path and a mode → whether this user has it
    free: Callable = lambda path: shutil.disk_usage(path).free  # a folder → bytes
    include: str = sysconfig.get_path("include")  # where Python.h is
    torch: Mapping = field(default_factory=dict)  # what torch says of itself: torch_on_disk(); "canary", "sdpa", "miopen" once it was asked

    def path(self, name):
        return os.path.join(self.root, name)

    def glob(self, pattern):
        return sorted(glob.glob(self.path(pattern)))

    def read(self, path):
        """A small file's text without its last newline, or None."""
        with contextlib.suppress(OSError), open(self.path(path), errors="replace") as f:
            return f.read().strip()

    def which(self, *names):
        """The first of these programs that is there."""
        return next(filter(None, (shutil.which(name, path=self.environ.get("PATH")) for name in names if name)), None)

    @property
    def nodes(self):
        """The GPUs that the AMD driver offers for computing, as dictionaries of their properties."""
        return hardware.amd_nodes(self.root)

    @property
    def parts(self):
        return [node["gfx"] for node in self.nodes]

    @property
    def cards(self):
        """The device folders of AMD's graphics cards."""
        return telemetry.amd_cards(self.root)

    @property
    def has_nvidia(self):
        return hardware.has_nvidia(self.root)

    @property
    def hardware(self):
        """gfx1151, amd, nvidia or none: what AUTORESEARCH_HARDWARE says (env.sh sets it), or the same rules as there."""
        told = self.environ.get("AUTORESEARCH_HARDWARE")
        if told:
            return told
        if "gfx1151" in self.parts:
            return "gfx1151"
        if self.has_nvidia:
            return "nvidia"
        if self.parts:
            return "amd"
        for folder in self.glob("sys/bus/pci/devices/*"):  # a GPU whose driver is not there
            vendor, kind = self.read(folder + "/vendor"), self.read(folder + "/class") or ""
            if vendor == "0x10de" and kind.startswith("0x03"):
                return "nvidia"
            if vendor == "0x1002" and self.read(folder + "/device") == "0x1586":
                return "gfx1151"
        return "none"

    @property
    def shares_memory(self):
        """Whether the GPU's memory is the host's."""
        return self.hardware == "gfx1151" or any(d.get("is_integrated") for d in self.canary.get("devices", []))

    @property
    def canary(self):
        return self.torch.get("canary") or {}

    @property
    def in_container(self):
        return any(os.path.exists(self.path(name)) for name in (".dockerenv", "run/.containerenv"))

    @property
    def in_wsl(self):
        return "microsoft" in (self.read("proc/sys/kernel/osrelease") or "").lower()

    def memory(self):
        """/proc/meminfo in bytes."""
        lines = (line.split() for line in (self.read("proc/meminfo") or "").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2 and words[1].isdecimal()}

    def cache(self):
        """Where prepare.py keeps the data."""
        try:
            return settings.cache_folder(self.environ)
        except ValueError:  # which prepare.py says
            return os.path.join(HERE, "~")


def gib(size):
    return f"{size / GIB:.1f} GiB"


def last_line(text):
    return text.strip().rpartition("\n")[2]


def numbers(version):
    """The leading numbers of a version, to compare: "6.17.0-1018-oem" is (6, 17, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version or "").group().split(".") if part)


# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------


@dataclass
class Fault:
    seen: str
    mend: str = ""  # a command; the check's own if empty
    level: str = ""  # stop, warn or note; the check's own if empty


def driver(machine):
    """The device files of the GPU (ROCm/legacy-rocm-build#1798: a container that is not given them has none)."""
    if machine.hardware == "nvidia":
        return "loaded" if machine.has_nvidia else Fault("the NVIDIA driver is not loaded")
    if os.path.exists(machine.path("dev/kfd")):
        return "/dev/kfd"
    if machine.in_container:
        return Fault(
            "/dev/kfd is not in this container",
            "start it with --device /dev/kfd --device /dev/dri --group-add video --group-add render (amdgpu must be loaded outside)",
        )
    return Fault("/dev/kfd is not there, which the AMD GPU needs")


def permissions(machine):
    """ROCm/legacy-rocm-build#1211, ROCm/ROCm-docker#116: "Unable to open /dev/kfd"; #93: in a container the group's number counts."""
    files = [path for path in (machine.path("dev/kfd"), *machine.glob("dev/dri/renderD*")) if os.path.exists(path)]
    for path in files:
        if not machine.access(path, os.R_OK | os.W_OK):
            group = os.stat(path).st_gid
            user = machine.environ.get("USER") or str(os.getuid())
            inside = f"start the container with --group-add {group}"
            return Fault(
                f"no permission on /{os.path.relpath(path, machine.root)}",
                inside if machine.in_container else f"sudo usermod -aG render,video {user}, then log in again",
            )
    return f"{len(files)} device files" if files else None


def gfx_override(machine):
    """On gfx1151 11.0.0 faults at the first allocation (ROCm/legacy-rocm-build#5824), newer runtimes refuse it (ROCm/rocm-systems#3461)."""
    value = machine.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if not value:
        return "unset"
    return Fault(f"HSA_OVERRIDE_GFX_VERSION={value}", level="stop" if machine.hardware == "gfx1151" else "warn")


def torch_build(machine):
    """A CPU or CUDA wheel on an AMD machine: PyPI's torch comes in silently where an index is not named (unslothai/unsloth#9314)."""
    version = machine.torch.get("version")
    if not version:
        return Fault(f"torch is not installed in {sys.executable}", "./run.sh installs it")
    builds = {"hip": "ROCm", "cuda": "CUDA"}
    have = next((builds[key] for key in builds if machine.torch.get(key)), "CPU")
    want = {"nvidia": "CUDA", "none": None}.get(machine.hardware, "ROCm")
    if want in (None, have):
        return f"{version}, a {have} build"
    maker = "NVIDIA GPU" if want == "CUDA" else "AMD GPU " + " ".join(machine.parts)
    return Fault(
        f"the {maker.strip()} cannot be used: venv/ holds torch {version}, a {have} build",
        f"install a {want} build there, or move venv/ away: ./run.sh makes a new one",
    )


# (what ROCm's version begins with, what torch's does, what is reported of these builds): worth knowing, and no reason to refuse a run.
KNOWN_OF_ROCM = (
    (r"7\.15\.0a", r"", "flash attention is wrong at head_dim 512"),
    (r"", r"2\.14\.0(a|\.dev)", "flash attention is wrong at head_dim 512"),
    (r"10\.1\.0a", r"", "flash attention gives zeros in those for Windows"),
)


def rocm_version(machine):
    """ROCm/TheRock#2991: before 7.2, and in 7.9 and 7.10, the register count of gfx1151 is wrong and kernels crash; ROCm/TheRock#5763: the
    nightlies of 2026-06-09 to 12 crash at the first use; later ones: pytorch#189849 (head_dim 512), ROCm/aotriton#210 (zeros). The ROCm is
    in torch's version: torch.version.hip counts differently."""
    version, torch = machine.torch.get("rocm"), machine.torch.get("version") or ""
    if not version:
        return None
    nightly = re.search(r"a(2026060[9]|2026061[0-2])", version)
    bad = numbers(version) < (7, 2) or (7, 9) <= numbers(version) < (7, 11) or nightly and version.startswith("7.14.0a")
    if bad:
        return Fault(f"torch {torch} is built with ROCm {version}")
    known = [words for rocm, of_torch, words in KNOWN_OF_ROCM if re.match(rocm, version) and re.match(of_torch, torch)]
    if known:
        return Fault(f"torch {torch}: reported of these nightlies: {known[0]}", "a stable torch: move venv/ away, ./run.sh", "note")
    return version


# The family whose wheel has the flash-attention images of a part, since ROCm 7.14.
FAMILIES = {"gfx1151": "gfx115x"}
AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next/"


def device_code(machine):
    """ROCm/TheRock#7839: torch from AMD's multi-arch index has no code for any GPU; the extra device-gfx1151 brings it. pytorch#194498,
    ROCm/rocm-systems#10685: flash attention's is in the wheel of the family, and without it fails late, with hipErrorInvalidValue."""
    part, version = machine.parts[0] if machine.parts else "gfx1151", machine.torch.get("version")
    if f"device-{part}" not in machine.torch.get("extras", ()):
        return None
    packages, family = machine.torch.get("packages", {}), FAMILIES.get(part)
    if f"amd-torch-device-{part}" not in packages:
        seen = f"torch {version} without code for {part} (amd-torch-device-{part}): hipErrorInvalidImage at its first kernel"
        return Fault(seen, f'python -m pip install --index-url {AMD_INDEX} "torch[device-{part}]=={version}"')
    if family and numbers(machine.torch.get("rocm")) >= (7, 14) and f"amd-torch-device-{family}" not in packages:
        seen = f"torch {version} without amd-torch-device-{family}: on {part} flash attention will fail, late; MATH alone works"
        wheel = f"amd-torch-device-{family}=={packages[f'amd-torch-device-{part}']}"
        return Fault(seen, f"python -m pip install --index-url {AMD_INDEX} {wheel}", "warn")
    return f"for {part}" + f" and {family}" * (f"amd-torch-device-{family}" in packages)


def install_with(machine, apt, dnf, pacman):
    """The command that installs a system package."""
    if machine.which("apt-get"):
        return f"sudo apt install {apt}"
    if machine.which("dnf"):
        return f"sudo dnf install {dnf}"
    return f"sudo pacman -S {pacman}" if machine.which("pacman") else f"install {apt} (or what your system calls it)"


def toolchain(machine):
    """Triton compiles a launcher in C for each kernel and fails in the middle of a run (sgl-project/sglang#1117, pytorch#97146)."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    missing, packages = [], []
    if not machine.which(machine.environ.get("CXX"), "c++", "g++", "clang++"):
        missing, packages = ["a C++ compiler"], [("g++", "gcc-c++", "gcc")]
    if not machine.which(machine.environ.get("CC"), "cc", "gcc", "clang"):
        missing, packages = [*missing, "a C compiler"], [*packages, ("gcc", "gcc", "gcc")]
    if not os.path.exists(os.path.join(machine.include, "Python.h")):
        missing, packages = [*missing, "Python.h"], [*packages, (f"{python}-dev", "python3-devel", "python")]
    if not missing:
        return "compiler and Python.h"
    return Fault(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        install_with(machine, *(" ".join(dict.fromkeys(names)) for names in zip(*packages))),
        "warn" if machine.hardware == "none" else "stop",
    )


CRASH = "another driver or torch is needed: move venv/ away and ./run.sh installs the tested one"


def gpu(machine):
    """In a process of its own: torch imports, sees the GPU and computes a sum on it (ROCm/TheRock#5763, ROCm/legacy-rocm-build#5853: it
    crashes at the first use; #5991: it hangs)."""
    canary = machine.canary
    if not canary or canary["stage"] in ("compile", "done"):
        return ", ".join(d["name"] for d in canary.get("devices", [])) or None
    name, part = machine.torch.get("version", ""), " ".join(machine.parts)
    error = canary.get("error")
    if canary["stage"] == "import":
        return Fault(f"torch {name} does not import ({error or canary['end']})", "move venv/ away: ./run.sh makes a new one")
    if canary["stage"] == "see" and error:
        if machine.hardware == "nvidia":
            return Fault(f"torch {name} does not see the NVIDIA GPU", "nvidia-smi must work, with a driver that is new enough")
        mend = "look at `sudo dmesg | grep -iE 'amdgpu|kfd'` and your groups (render, video)"
        return Fault(f"torch {name} does not see the AMD GPU {part}".rstrip(), mend)
    if error == "wrong":
        return Fault(f"torch {name} computes wrong sums on the GPU", CRASH)
    if error:
        mend = f'install "torch[device-{machine.parts[0]}]" from AMD\'s index, as run.sh does' if machine.parts else CRASH
        return Fault(f"torch {name} cannot run a kernel on the GPU {part} ({error})", mend)
    return Fault(f"torch {name} {canary['end']} at its first use of the GPU", CRASH)


def compile(machine):
    """A kernel through torch.compile and Triton, with empty caches, in a process of its own (ROCm/legacy-rocm-build#5572: torch.compile
    took the system down; sgl-project/sglang#1117: no Python.h)."""
    canary = machine.canary
    if not canary or canary["stage"] != "compile":
        return "torch.compile and Triton" if canary.get("devices") else None
    error = "a wrong sum" if canary.get("error") == "wrong" else canary.get("error") or canary["end"]
    return Fault(f"a kernel by torch.compile and Triton fails ({error})")


def memory(machine):
    """What a run needs free: on a GPU that shares the host's memory too little freezes the machine (unslothai/unsloth#5301)."""
    have = machine.memory().get("MemAvailable")
    if have is None:
        return None
    limit, used = machine.read("sys/fs/cgroup/memory.max") or "max", machine.read("sys/fs/cgroup/memory.current") or "0"
    if limit.isdecimal() and used.isdecimal():  # a container's own limit
        have = min(have, int(limit) - int(used))
    need = (1 if machine.hardware == "none" else 8 if machine.shares_memory else 4) * GIB
    return gib(have) if have >= need else Fault(f"{gib(have)} of memory are free, a run needs {gib(need)}")


def disk(machine):
    """A full disk ends a night with a broken file (karpathy/autoresearch#343: it was logged as the idea's failure)."""
    need = (0.3 if machine.hardware == "none" else 1) * GIB
    least = math.inf
    for folder in (machine.cache(), HERE, tempfile.gettempdir()):
        there = os.path.abspath(folder)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        if not machine.access(there, os.W_OK):
            return Fault(f"{there} is not writable", "make it yours, or choose another with AUTORESEARCH_CACHE (data) and TMPDIR")
        free = machine.free(there)
        least = min(least, free)
        if free < need:
            return Fault(f"{gib(free)} are free on the disk of {folder}, a run needs {gib(need)}")
    return f"{gib(least)} free"


def memory_cap(machine):
    """machine.py turns over-allocation into an error; without a limit it freezes the host (unslothai/unsloth#5301, and on other shared
    memory NVIDIA/open-gpu-kernel-modules#1358). GPU_MEMORY_FRACTION overrides the limit: this checks what it says."""
    if not machine.shares_memory:
        return None
    text = machine.environ.get("GPU_MEMORY_FRACTION")
    if not text:
        return "set by machine.py: what the host has free, less 4 GiB"
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        return Fault(f"GPU_MEMORY_FRACTION={text} is no share from 0 to 1")
    total = next((d["total_memory"] for d in machine.canary.get("devices", []) if d.get("total_memory")), None)
    have = machine.memory().get("MemAvailable", math.inf)
    if total and fraction * total > have - 2 * GIB:
        return Fault(f"GPU_MEMORY_FRACTION={text} allows {gib(fraction * total)} of {gib(have)} that are free", level="warn")
    return f"GPU_MEMORY_FRACTION={text}"


def sdpa(machine):
    """Which backend of scaled_dot_product_attention runs, forced, forward and backward, each in a process of its own, its numbers against
    float32: what is enabled says nothing (ROCm/legacy-rocm-build#6034: 19 times slower; ROCm/TheRock#1315 and pytorch#173469: NaN;
    ROCm/TheRock#7992: what runs after it fails)."""
    rows, end = [row for row in machine.torch.get("sdpa") or [] if "backend" in row], machine.torch.get("sdpa_end")
    if end:
        tried = ", ".join(row["backend"] for row in rows) or "none"
        return Fault(f"trying its backends {end} (tried before: {tried})", "another torch; python benchmarks/probe.py sdpa shows it")
    if not rows:
        return None
    harm = [f"{row['backend']}: {row['harm']}" for row in rows if row.get("harm")]
    if harm:
        return Fault("; ".join(harm), "another torch; train.py tries each in a process of its own, and uses none that does this")
    wrong = [row for row in rows if row.get("right") is False]
    if wrong:
        names = ", ".join(f"{row['backend']} (error {row['error']:.0e})" for row in wrong)
        return Fault(f"wrong numbers from {names}", "another torch; python doctor.py --probe says all for a report")
    right = [row["backend"] for row in rows if row.get("right")]
    chosen = next((row["chosen"] for row in rows if "chosen" in row), "?")
    if machine.hardware != "nvidia" and "flash" not in right:
        why = next((row.get("why") for row in rows if row["backend"] == "flash"), "not tried")
        switched = machine.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL") == "1"
        return Fault(f"no flash attention ({why}); torch takes {chosen}", "another torch: move venv/ away, ./run.sh" if switched else "")
    return f"torch takes {chosen}; right forward and backward: {', '.join(right)}"


def aotriton(machine):
    """Up to AOTriton 0.11.2 gfx1151 is experimental, and torch reads the switch once (ROCm/legacy-rocm-build#6034); 0.12 made it official
    (ROCm/pytorch#3313)."""
    version = machine.torch.get("aotriton")
    if machine.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL") == "1":
        return f"AOTriton {version or '?'}, switched on"
    if version and numbers(version) >= (0, 12):
        return f"AOTriton {version} needs no switch"
    return Fault(f"AOTriton {version or 'of unknown version'} and TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL is not 1")


def allocator(machine):
    """expandable_segments hangs (pytorch#192259) and gives NaN (pytorch#195202) on ROCm; backend:malloc crashes."""
    names = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    found = [f"{name}={machine.environ[name]}" for name in names if machine.environ.get(name)]
    return Fault(" ".join(found), "unset " + " ".join(item.split("=")[0] for item in found)) if found else "unset"


def library_path(machine):
    """ROCm/TheRock#1011: LD_LIBRARY_PATH beats the wheel's libraries, and two ROCms don't fit together (ROCm/legacy-rocm-build#5339)."""
    folders = [folder for folder in machine.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    site = machine.torch.get("site") or "/nowhere"
    for folder in folders:
        foreign = not os.path.realpath(folder).startswith(os.path.realpath(site))
        if foreign and (re.search(r"/rocm\b", folder) or glob.glob(os.path.join(machine.path(folder.lstrip("/")), "libamdhip64.so*"))):
            rest = ":".join(f for f in folders if f != folder)
            mend = f"export LD_LIBRARY_PATH={rest}" if rest else "unset LD_LIBRARY_PATH"
            return Fault(f"LD_LIBRARY_PATH names another ROCm: {folder}", mend)
    return "no other ROCm"


def rocm_home(machine):
    """ROCM_HOME and HIP_PATH must name the ROCm that torch is of: its wheels bring their own (ROCm/TheRock, RELEASES.md)."""
    site = machine.torch.get("site") or "/nowhere"
    own = next(filter(os.path.isdir, (f"{site}/_rocm_sdk_devel", f"{site}/_rocm_sdk_core")), None)
    for name in ("ROCM_HOME", "HIP_PATH"):
        value = machine.environ.get(name)
        if value and not os.path.isdir(machine.path(value.lstrip("/")) if value.startswith("/opt") else value):
            return Fault(f"{name}={value} is not there", f"unset {name}")
        if value and own and value.startswith("/opt/rocm"):
            return Fault(f"{name}={value}, but torch brings its own ROCm", f"export {name}={own}")
    return machine.environ.get("ROCM_HOME") or "unset"


def gtt(machine):
    """The GPU's share of the memory: half by default; ttm.pages_limit sets it exactly (noamsto/nix-amd-ai#42), amdgpu.gttsize is deprecated
    and must not be set beside it (ROCm/legacy-rocm-build#5595); VRAM and GTT are never added (#6004)."""
    size, vram = (max((int(machine.read(f"{c}/mem_info_{x}_total") or 0) for c in machine.cards), default=0) for x in ("gtt", "vram"))
    total = machine.memory().get("MemTotal", 0)
    if not total or not size:
        return None
    pages = int(total / GIB * 3 / 4) * 262144
    modprobe = f'echo "options ttm pages_limit={pages}" | sudo tee /etc/modprobe.d/ttm.conf; then renew the initramfs and reboot'
    if re.search(r"amdgpu\.gtt_?size", machine.read("proc/cmdline") or ""):
        return Fault(f"amdgpu.gttsize on the kernel's command line; GTT is {gib(size)}", f"remove it, then {modprobe}", "warn")
    if size > total - 4 * GIB:
        return Fault(f"GTT may take {gib(size)} of {gib(total)}: nothing is left for the host", modprobe, "warn")
    if vram > 8 * GIB:
        return Fault(f"{gib(vram)} are set aside as VRAM, lost to the host", "set UMA or VRAM to its least (0.5 GB) in the firmware's menu")
    if size < 0.6 * total:
        return Fault(f"GTT is {gib(size)} of {gib(total)}, the default", modprobe)
    return f"{gib(size)} of {gib(total)}"


def kernel_fixed(machine):
    """Whether the kernel knows gfx1151's registers: its version, Ubuntu's OEM backport, or that it says their save area's size."""
    release = machine.read("proc/sys/kernel/osrelease") or ""
    oem = re.match(r"6\.17\.0-(\d+)-oem", release)
    exported = any(int(node.get("cwsr_size", 0)) for node in machine.nodes if node["gfx"] == "gfx1151")
    return exported or numbers(release) >= (6, 18, 4) or bool(oem and int(oem[1]) >= 1018)


def kernel(machine):
    """ROCm/TheRock#2991: until 6.18.4 (Ubuntu OEM 6.17.0-1018) the kernel saves too few registers of gfx1151 and work crashes; before
    6.16.9 it shows 15.5 GB at most (ROCm/legacy-rocm-build#5444). Newer kernels export cwsr_size (palazzem/hanzo#345)."""
    release = machine.read("proc/sys/kernel/osrelease") or "?"
    told = " (AMD's matrix for Ubuntu 24.04 names 6.17, TheRock's FAQ 6.18.4)" if numbers(release)[:2] == (6, 17) else ""
    return release if kernel_fixed(machine) else Fault(f"Linux {release}{told}")


def firmware(machine):
    """The scheduler's firmware, MES: 0x83 page faults and hangs (ROCm/legacy-rocm-build#5724); 0x80 hangs unless the kernel is fixed or
    amdgpu.cwsr_enable=0 (#5590); with 0x86 silent freezes are reported and not explained yet (#6165)."""
    versions = [int(text, 16) for card in machine.cards if (text := machine.read(card + "/fw_version/mes_fw_version"))]
    for path in machine.glob("sys/kernel/debug/dri/*/amdgpu_firmware_info"):
        versions += [int(x, 16) for x in re.findall(r"^MES feature.*firmware version: (0x[0-9a-f]+)", machine.read(path) or "", re.M)]
    if not versions:
        return "MES version not readable (sudo grep MES /sys/kernel/debug/dri/*/amdgpu_firmware_info)"
    if 0x83 in versions:
        return Fault("MES 0x83")
    cwsr = machine.read("sys/module/amdgpu/parameters/cwsr_enable")
    if 0x80 in versions and cwsr != "0" and not kernel_fixed(machine):
        mend = "boot with amdgpu.cwsr_enable=0 on the kernel's command line, or a kernel from 6.18.4"
        return Fault("MES 0x80 and a kernel that saves waves wrongly", mend)
    if 0x86 in versions:
        return Fault("MES 0x86", "no mend is known: take newer firmware and BIOS when there are some", "note")
    return "MES " + ", ".join(hex(v) for v in dict.fromkeys(versions))


def gpu_faults(machine):
    """After one fault the driver can stay broken until a reboot, unnoticed (ROCm/legacy-rocm-build#5745, #6630)."""
    pattern = re.compile(r"amdgpu.*(MES failed|MES might be|GPU reset|ring \S+ timeout|page fault|VRAM is lost)", re.I)
    for command in (["journalctl", "-k", "-b", "-q", "--no-pager"], ["dmesg"]):
        code, out, _ = machine.run(command, 3)
        lines = [line for line in out.splitlines() if pattern.search(line)]
        if lines:
            mend = ""
            if re.search("timeout|GPU reset", " ".join(lines)) and "amdgpu.lockup_timeout" not in (machine.read("proc/cmdline") or ""):
                mend = "sudo reboot before a night; amdgpu.lockup_timeout=20000 (kernel command line) is reported to help"
            return Fault(f"{len(lines)} faults since boot, the last: {lines[-1].split('amdgpu', 1)[-1].lstrip(': ')[:90]}", mend)
        if code == 0 and out:
            return "none since boot"
    return None


def suspend(machine):
    """run.sh asks systemd to stay awake; where that is refused (no systemd-inhibit, a session from afar) the machine may sleep during the
    night. Closing a lid ignores locks that don't name the lid (systemd#28067, omacom/omarchy#10203): run.sh's does."""
    if not os.path.isdir(machine.path("run/systemd/system")):
        return None
    if all(os.path.realpath(machine.path(f"etc/systemd/system/{name}.target")) == "/dev/null" for name in ("sleep", "suspend")):
        return "switched off"
    code, _, err = machine.run(["systemd-inhibit", f"--what={STAY_AWAKE}", "--who=autoresearch", "--why=doctor", "true"], 3)
    if code == 0:
        return "held off during runs"
    return Fault(f"systemd-inhibit does not work ({last_line(err)[:80] or 'no answer'})")


def power(machine):
    """The profile and the battery set the clocks (ROCm/legacy-rocm-build#5750: idle clocks under load). "performance" is not needed, and
    cuts out under load on some laptops (superm1/amd-debug-tools#48)."""
    profile = machine.read("sys/firmware/acpi/platform_profile")
    if profile in ("low-power", "quiet", "cool"):
        return Fault(f"the power profile is {profile}")
    for supply in machine.glob("sys/class/power_supply/*"):
        if machine.read(supply + "/type") == "Mains" and machine.read(supply + "/online") == "0":
            return Fault("it runs on its battery", "plug it in")
    for card in machine.cards:
        level = machine.read(card + "/power_dpm_force_performance_level")
        if level == "low":
            return Fault("the GPU's clock is forced to its lowest", f"echo auto | sudo tee {card}/power_dpm_force_performance_level")
    return profile or None


def heat(machine):
    """Silent freezes (ROCm/legacy-rocm-build#6165), and hard locks of a gfx1151 at 2,900 MHz, 180 W and 111 °C, are reported; with its
    clock capped at 2,400 MHz it took 100 W, stayed at 70 °C and was 6 % slower. A run samples the same sensors (telemetry.py)."""
    units = {"temp_c": "{:.0f} °C", "clock_mhz": "{:,.0f} MHz", "watts": "{:.0f} W"}
    said = []
    for card in machine.cards:
        now = telemetry.read_amd(card)
        words = ", ".join(text.format(now[name]) for name, text in units.items() if name in now)
        critical = now.get("critical_c") or 100.0  # which is usual where it does not say
        if now.get("temp_c", 0) >= critical - telemetry.NEAR:
            return Fault(f"the GPU is at {words} before any run; {critical:.0f} °C are critical")
        said += [words] * bool(words)
    return "; ".join(said) or None


def swap(machine):
    """Memory that is swapped out is memory that something else wants; where the GPU takes the same memory, the kernel stalls looking for
    some (Nathanw1014/strix-halo-llamacpp#8)."""
    found = machine.memory()
    total, free = found.get("SwapTotal", 0), found.get("SwapFree", 0)
    if total and free < 0.5 * total:
        return Fault(f"{gib(total - free)} of {gib(total)} swap are in use")
    if not total and machine.shares_memory and found.get("MemTotal", 0) < 40 * GIB:
        mend = "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"
        return Fault(f"no swap, and {gib(found.get('MemTotal', 0))} for host and GPU together", mend, "note")
    return f"{gib(total - free)} of {gib(total)} used" if found else None


def wsl(machine):
    """Windows' subsystem: an AMD GPU needs librocdxg there and no /dev/kfd exists (ROCm/legacy-rocm-build#5900, #6528)."""
    if not machine.in_wsl:
        return None
    if machine.hardware == "nvidia":
        return "WSL, with NVIDIA's driver"
    return Fault("this is Windows' subsystem for Linux")


def several_gpus(machine):
    """A second GPU is used by chance or breaks the first: a processor's small one beside a card (ROCm/TheRock#5543,
    oobabooga/textgen#7319). One run uses one GPU."""
    chosen = next((name for name in VISIBLE if machine.environ.get(name)), None)
    if chosen:
        return f"{chosen}={machine.environ[chosen]}"
    if machine.hardware == "nvidia":
        count = len(machine.glob("dev/nvidia[0-9]*"))
        return f"{count}" if count < 2 else Fault(f"{count} GPUs; a run uses the first", "export CUDA_VISIBLE_DEVICES=0 (one run for each)")
    parts = machine.parts
    if len(parts) < 2:
        return f"{len(parts)}"
    largest = max(machine.nodes, key=lambda node: int(node.get("simd_count", 0)))["gfx"]
    wanted = "gfx1151" if "gfx1151" in parts else largest
    mend = f"export HIP_VISIBLE_DEVICES={parts.index(wanted)} (for {wanted})"
    return Fault(f"{len(parts)} GPUs: {', '.join(parts)}; a run uses the first", mend)


TRITONS = {"2.13.0+rocm10.0.0": "3.8.0"}  # what comes with a torch, where its own files do not say


def triton(machine):
    """A later install can put another Triton over torch's own (ROCm/TheRock#1278 shows one that does not link)."""
    packages, torch = machine.torch.get("packages", {}), machine.torch.get("version")
    tritons = {name: packages[name] for name in ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton") if name in packages}
    have = ", ".join(f"{name} {version}" for name, version in tritons.items()) or "no Triton"
    wanted = re.match(r"([\w-]+)\s*\(?==\s*([\w.+]+)", machine.torch.get("wants_triton") or "")
    name, version = wanted.groups() if wanted else ("triton", TRITONS.get(torch))
    if len(tritons) > 1:
        return Fault(f"{len(tritons)} Tritons in one place: {have}")
    if version and version not in (tritons.get(name), tritons.get(name, "").partition("+")[0]):
        return Fault(f"{have}, but torch {torch} wants {name} {version}")
    return have if tritons else None


def tunable_op(machine):
    """It is switched on against slow products (ROCm/TheRock#5314); on torch 2.13 with ROCm 10 it brings nothing, by reports, and not the
    same bits from run to run. backends.py times the products' layouts itself."""
    value = machine.environ.get("PYTORCH_TUNABLEOP_ENABLED")
    return Fault(f"PYTORCH_TUNABLEOP_ENABLED={value}") if value not in (None, "", "0") else "off"


def miopen(machine):
    """A convolution and a batch norm, forward and backward, each in a process of its own: on ROCm 10.0.0 every convolution of a gfx1151
    fails (MIOpen#3964), by other reports batch norm alone does (its run-time compiler finds no type_traits). train.py uses neither."""
    asked = machine.torch.get("miopen")
    if not asked:
        return None
    failed = [f"a {what} fails ({why})" for what, why in asked.items() if why]
    return Fault("; ".join(failed)) if failed else "right: " + ", ".join(asked)


def nvidia_driver(machine):
    """CUDA 13 needs a driver from 580, CUDA 12 one from 525 (pytorch#162531: "the NVIDIA driver on your system is too old")."""
    found = re.search(r"Kernel Module.*?\s(\d{3,})\.\d", machine.read("proc/driver/nvidia/version") or "")
    cuda = numbers(machine.torch.get("cuda"))
    if not found or not cuda:
        return None
    need = {12: 525, 13: 580}.get(cuda[0], 0)
    if int(found[1]) >= need:
        return f"{found[1]} for CUDA {cuda[0]}"
    return Fault(f"the NVIDIA driver is {found[1]}, and torch's CUDA {cuda[0]} needs {need}")


# ---------------------------------------------------------------------------
# The list: where a check applies, how much it matters, why, and the mend that its Fault may make more exact
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    run: Callable
    where: str  # of gfx1151, amd, nvidia, none
    level: str  # stop: a run would fail, freeze or lie; warn; note
    why: str
    mend: str

    @property
    def name(self):
        return self.run.__name__


AMD, GPU, ALL = "gfx1151 amd", "gfx1151 amd nvidia", "gfx1151 amd nvidia none"
CHECKS = (
    Check(driver, GPU, "stop", "without its device file no GPU can be used",
          "sudo modprobe amdgpu (NVIDIA: nvidia-smi must work); in a container: --device /dev/kfd --device /dev/dri, or --gpus all"),
    Check(permissions, AMD, "stop", "ROCm opens these files itself", "sudo usermod -aG render,video $USER, then log in again"),
    Check(gfx_override, AMD, "stop", "another part's code faults at the first allocation; ROCm knows gfx1151 as itself",
          "unset HSA_OVERRIDE_GFX_VERSION"),
    Check(torch_build, ALL, "stop", "each maker's GPUs need a torch of their own, and the wrong one runs on the CPU or not at all",
          "move venv/ away: ./run.sh makes a new one with the right torch"),
    Check(rocm_version, "gfx1151", "stop", "ROCm before 7.2, 7.9, 7.10 and the nightlies of 9 to 12 June 2026 crash on gfx1151",
          "move venv/ away: ./run.sh installs a ROCm that works"),
    Check(device_code, AMD, "stop", "torch from AMD's multi-arch index has its code for a part, and flash attention's, in wheels apart",
          f'python -m pip install --index-url {AMD_INDEX} "torch[device-gfx1151]==…"'),
    Check(nvidia_driver, "nvidia", "stop", "a driver older than torch's CUDA shows no GPU",
          "install a newer driver, or a torch for an older CUDA (AUTORESEARCH_TORCH)"),
    Check(gpu, ALL, "stop", "a torch that can't see or use the GPU crashes or hangs when the run begins",
          "as the row says: another torch, another driver, or your groups"),
    Check(toolchain, ALL, "stop", "Triton and torch.compile compile C and C++ while the run starts", "sudo apt install g++ python3-dev"),
    Check(compile, GPU, "stop", "every kernel of the run is compiled so",
          "read the error: often the compiler, Python.h, or a Triton that is not torch's own"),
    Check(memory, ALL, "stop", "where the GPU uses the host's memory, running out freezes the machine",
          "close what uses it: ps -eo rss,comm --sort=-rss | head"),
    Check(disk, ALL, "stop", "data, the saved model and compiled kernels need room",
          "df -h; make room, or move the data with AUTORESEARCH_CACHE"),
    Check(memory_cap, GPU, "stop", "the cap turns over-allocation into an error; without it the host freezes",
          "unset GPU_MEMORY_FRACTION, or give a share of the GPU's memory such as 0.5"),
    Check(sdpa, GPU, "warn", "without flash attention it is some 18 times slower and needs memory with the context's square",
          "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 before python starts (. ./env.sh does), or a newer torch"),
    Check(aotriton, "gfx1151", "warn", "without the switch these versions have no flash attention for gfx1151",
          "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 (. ./env.sh does)"),
    Check(allocator, AMD, "warn", "allocator settings hang, crash or corrupt on ROCm",
          "unset PYTORCH_HIP_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"),
    Check(library_path, AMD, "warn", "LD_LIBRARY_PATH beats torch's own ROCm, and two of them don't fit together", "unset LD_LIBRARY_PATH"),
    Check(rocm_home, AMD, "warn", "compilers and extensions take the ROCm that these name",
          "unset ROCM_HOME HIP_PATH (. ./env.sh sets them)"),
    Check(triton, GPU, "warn", "torch.compile works with the Triton that its torch was made with",
          "move venv/ away: ./run.sh makes a new one; never install Triton by hand"),
    Check(tunable_op, AMD, "note", "on torch 2.13 with ROCm 10 no gain is reported, and two runs are not the same bits",
          "unset PYTORCH_TUNABLEOP_ENABLED"),
    Check(miopen, AMD, "note", "train.py needs neither; an idea with a convolution or a batch norm would crash",
          "write it otherwise: program.md, \"Convolutions\", says how"),
    Check(gtt, "gfx1151", "note", "it is what the GPU may use of the memory: half by default, which is enough for the protocol's run",
          'echo "options ttm pages_limit=25165824" | sudo tee /etc/modprobe.d/ttm.conf (GiB × 262144); renew the initramfs; reboot'),
    Check(kernel, "gfx1151", "warn", "before 6.18.4 the kernel saves too few of gfx1151's registers: crashes and hangs",
          "boot a kernel from 6.18.4 (Ubuntu's OEM kernel: from 6.17.0-1018)"),
    Check(firmware, "gfx1151", "warn", "MES schedules the GPU's work: 0x83 page faults and hangs, 0x80 hangs on older kernels",
          "a linux-firmware of 2026 or Fedora's amd-gpu-firmware-20251111 (Ubuntu: apt purge amdgpu-dkms-firmware); reboot"),
    Check(gpu_faults, AMD, "warn", "after a fault the driver may stay broken without saying so",
          "sudo reboot before a night; for a report: journalctl -k -b | grep amdgpu"),
    Check(suspend, GPU, "warn", "a machine that sleeps trains nothing",
          "sudo systemctl mask sleep.target suspend.target (unmask undoes it)"),
    Check(power, AMD, "warn", "the clocks follow it: numbers of one profile don't compare with another's",
          "powerprofilesctl set balanced"),
    Check(heat, AMD, "warn", "a hot part lowers its clock, so its numbers don't compare, and hard locks are reported",
          "let it cool, free its fan, powerprofilesctl set balanced; a cap of its clock at 2,400 MHz is reported to cost 6 %"),
    Check(swap, "gfx1151 none", "warn", "the host swaps before the run begins: both will crawl",
          "close what uses memory; then sudo swapoff -a && sudo swapon -a"),
    Check(several_gpus, GPU, "warn", "which GPU runs should not be chance",
          "export HIP_VISIBLE_DEVICES=0 (NVIDIA: CUDA_VISIBLE_DEVICES=0)"),
    Check(wsl, ALL, "warn", "AMD GPUs are not offered there as Linux offers them, and nothing here is tested on it",
          "boot Linux itself; the demonstration works as it is"),
)  # fmt: skip
LEVELS = ("stop", "warn", "note", "unknown", "fine")


@dataclass
class Row:
    """A check's result. `level` is "fine", the fault's, or "unknown" where the check itself failed."""

    check: str
    level: str
    seen: str
    why: str = ""
    mend: str = ""


def examine(check, machine):
    """The check's Row, or None where it has nothing to say."""
    found = check.run(machine)
    if found is None:
        return None
    if isinstance(found, Fault):
        return Row(check.name, found.level or check.level, found.seen, check.why, found.mend or check.mend)
    return Row(check.name, "fine", found)


def guarded(check, machine, seconds=CHECK_SECONDS):
    """`examine` in a child: its exception, crash or hang costs this row only. A child that hangs in the kernel is left behind."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                row = examine(check, machine)
                answer = row and asdict(row)
            except Exception as error:
                answer = asdict(Row(check.name, "unknown", f"the check itself failed: {type(error).__name__}: {error}"))
            with open(write, "w") as f:
                json.dump(answer, f)
        finally:
            os._exit(0)
    os.close(write)
    answer, end, over = b"", time.monotonic() + seconds, False
    while not over and select.select([read], [], [], max(0, end - time.monotonic()))[0]:
        piece = os.read(read, 65536)
        answer, over = answer + piece, not piece
    os.close(read)
    if not over:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0 if over else os.WNOHANG)
    try:
        found = json.loads(answer)
        return found and Row(**found)
    except ValueError:
        return Row(check.name, "unknown", f"the check itself {'crashed' if over else f'did not end within {seconds} s'}")


def skipped(machine):
    """The checks that AUTORESEARCH_SKIP_CHECKS names; a name that is none of them ends the program."""
    names = re.findall(r"[^\s,]+", machine.environ.get("AUTORESEARCH_SKIP_CHECKS", ""))
    for name in names:
        if name not in {check.name for check in CHECKS}:
            say(f"AUTORESEARCH_SKIP_CHECKS names no check: {name!r}; use some of {', '.join(check.name for check in CHECKS)}")
            sys.exit(EXIT_ENVIRONMENT)
    return names


def diagnose(machine, levels=LEVELS, without=()):
    """The rows of every check that applies here and can end in one of `levels`."""
    checks = [c for c in CHECKS if machine.hardware in c.where.split() and c.level in levels and c.name not in without]
    return list(filter(None, (guarded(check, machine) for check in checks)))


# ---------------------------------------------------------------------------
# What torch says
# ---------------------------------------------------------------------------


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


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def canary():
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
        answers, end = ask_torch(machine, [os.path.abspath(__file__), "--layer", name], CANARY_SECONDS)
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
        answers, end = ask_torch(machine, [os.path.abspath(__file__), "--canary"], CANARY_SECONDS, **caches)
    found = (answers or [{"stage": "import"}])[-1] | {"end": end or "ended"}
    if found["stage"] == "done" and not end:
        with contextlib.suppress(OSError):
            os.makedirs(machine.cache(), exist_ok=True)
            with replace_file(path) as f:
                json.dump(dict(list(remembered.items())[-31:]) | {key: found}, f)
    return found


def load_probe():
    sys.path.insert(0, os.path.dirname(PROBE))
    import probe

    return probe


def measure(machine):
    """The rows of benchmarks/probe.py, each part in a process of its own, and the step on paper."""
    probe, rows = load_probe(), []
    for part in probe.PARTS:
        say(f"measuring: {part} …")
        answers, end = ask_torch(machine, [PROBE, part], PROBE_SECONDS)
        rows += answers + ([{"what": part, "why": end}] if end else [])
    step = probe.step_on_paper(rows)
    return rows + ([step] if step else [])


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def say(text):
    print(f"autoresearch: {text}", file=sys.stderr, flush=True)


TITLES = {"gfx1151": "Strix Halo (gfx1151)", "amd": "AMD GPU", "nvidia": "NVIDIA GPU", "none": "no GPU"}
DEMONSTRATION = (
    "No GPU: ./run.sh runs the demonstration, the same program on a small model and text, a minute on the CPU. It shows the whole loop; "
    "its numbers compare only with other demonstrations."
)


def title(machine):
    names = [d["name"] for d in machine.canary.get("devices", [])] or machine.parts
    name = f"{TITLES.get(machine.hardware, machine.hardware)}{': ' + ', '.join(names) if names else ''}"
    return f"{name}; Linux {machine.read('proc/sys/kernel/osrelease')}; torch {machine.torch.get('version') or 'not installed'}"


def screen(machine, rows, width=118):
    """The table as text: faults with why and mend, then what is fine, shortly. What stops a run keeps torch from being asked too."""
    faults = sorted((row for row in rows if row.level != "fine"), key=lambda row: LEVELS.index(row.level))
    lines = [title(machine)]
    if machine.hardware == "none":
        lines += textwrap.wrap(DEMONSTRATION, width)

    def part(label, text):
        return textwrap.wrap(text, width, initial_indent=f"{'':14}{label:5} ", subsequent_indent=" " * 20, break_on_hyphens=False)

    for row in faults:
        lines += textwrap.wrap(f"{row.level.upper():7} {row.check}: {row.seen}", width, subsequent_indent=" " * 8, break_on_hyphens=False)
        lines += part("why", row.why) * bool(row.why) + part("mend", row.mend) * bool(row.mend)
    fine = "; ".join(f"{row.check} {row.seen}" for row in rows if row.level == "fine")
    lines += textwrap.wrap("fine    " + fine, width, subsequent_indent=" " * 8, break_on_hyphens=False)
    count = sum(row.level == "stop" for row in rows)
    if not count:
        verdict = "Nothing stops a run." if faults else "All is well."
    else:
        verdict = f"{count} of these stop{'s' * (count == 1)} a run."
        if machine.hardware != "none" and not machine.canary:
            verdict += " Until then torch was not asked to use the GPU."
    return "\n".join([*lines, verdict])


def listing():
    """docs/doctor.md's table of checks."""
    head = ["| check | on | why it matters | what mends it |", "|---|---|---|---|"]
    rows = [f"| `{c.name}` ({c.level}) | {c.where.replace(' ', ', ')} | {c.why} | {c.mend.replace('|', chr(92) + '|')} |" for c in CHECKS]
    return "\n".join(head + rows)


def stopping(machine, without):
    return [row for row in diagnose(machine, ("stop",), without) if row.level == "stop"]


def stop(machine, before_install=False):
    """Says what must stop a run, a line each; True if there is anything. torch is asked only where its canary has not lived yet."""
    without = skipped(machine)
    if without:
        say(f"not checked: {', '.join(without)} (AUTORESEARCH_SKIP_CHECKS)")
    if before_install:
        without = [*without, "torch_build"]
    faults = stopping(machine, without)
    if not faults and not before_install and not {"gpu", "compile"} <= set(without):
        machine.torch = dict(machine.torch) | {"canary": cached_canary(machine)}
        faults = stopping(machine, without)
    for row in faults:
        ways = f"AUTORESEARCH_SKIP_CHECKS={row.check} skips this check"
        if machine.hardware != "none":
            ways += "; AUTORESEARCH_HARDWARE=none runs the demonstration on the CPU"
        say(f"{row.seen} ({row.why}): {row.mend} ({ways})")
    return bool(faults)


def main():
    parser = argparse.ArgumentParser(description="Is this machine fit to train on, and what to do if not?")
    parser.add_argument("--stop", action="store_true", help="only what would make a run fail, freeze or lie; a line each, exit code 3")
    parser.add_argument("--before-install", action="store_true", help="with --stop: without what needs torch")
    parser.add_argument("--probe", action="store_true", help="measure too: bandwidth, GEMM, attention")
    parser.add_argument("--report", action="store_true", help="write report.md, to be pasted into an issue (minutes)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--list", action="store_true", help="every check, as in docs/doctor.md")
    parser.add_argument("--canary", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layer", choices=LAYERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a character
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some launchers leave it ignored: no exit code would be kept
    if args.canary:
        return canary()
    if args.layer:
        return try_layer(args.layer)
    if args.list:
        return print(listing())
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    if told and told not in TITLES:
        say(f"AUTORESEARCH_HARDWARE={told} is not known: use {', '.join(TITLES)}")
        sys.exit(EXIT_ENVIRONMENT)
    machine = Machine(root=os.environ.get("AUTORESEARCH_SYSROOT") or "/", torch={} if args.before_install else torch_on_disk())
    if args.stop:
        try:
            sys.exit(EXIT_ENVIRONMENT if stop(machine, args.before_install) else 0)
        except Exception as error:  # of doctor.py itself
            say(f"the checks before the run failed, and it goes on without them ({one_line(error)})")
            sys.exit(0)
    if args.report:
        import report

        return report.main()
    show(machine, args.probe, args.json)


def look(machine):
    """(the rows of every check, whether torch was asked to use the GPU)."""
    without = skipped(machine)
    asked = machine.hardware != "none" and not stopping(machine, without)  # what is known to crash the GPU is not tried
    if asked:
        machine.torch["canary"] = cached_canary(machine)
        if machine.torch["canary"]["stage"] in ("compile", "done"):
            machine.torch["sdpa"], machine.torch["sdpa_end"] = ask_torch(machine, [PROBE, "sdpa"], PROBE_SECONDS)
            if machine.hardware in AMD.split():
                machine.torch["miopen"] = ask_layers(machine)
    rows = diagnose(machine, without=without)
    return rows, asked


def show(machine, probe, as_json):
    """Print what was seen, and measured with `probe`; ends the program with its exit code."""
    rows, asked = look(machine)
    measured = measure(machine) if probe and asked and not any(row.level == "stop" for row in rows) else []
    if as_json:
        facts = {"title": title(machine), "hardware": machine.hardware, "torch": machine.torch, "python": sys.version}
        print(json.dumps(facts | {"rows": [asdict(row) for row in rows], "probe": measured}, indent=1))
    else:
        print(screen(machine, rows, min(118, shutil.get_terminal_size((118, 0)).columns)))
        if probe:
            print("\n".join(map(load_probe().words, measured)) or "Nothing was measured: there is no GPU, or it can't be used.")
    sys.exit(EXIT_ENVIRONMENT if any(row.level == "stop" for row in rows) else 0)


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

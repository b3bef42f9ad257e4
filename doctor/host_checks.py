"""Checks of the host: compiler, memory, disk, sleep, power."""

import math
import os
import sys
import tempfile

from doctor.check import Fault
from doctor.machine import ROOT
from doctor.words import GIB, gib, last_line

STAY_AWAKE = "idle:sleep:handle-lid-switch"  # what run.sh holds off


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


def disk(machine):
    """A full disk ends a night with a broken file (karpathy/autoresearch#343: it was logged as the idea's failure)."""
    need = (0.3 if machine.hardware == "none" else 1) * GIB
    least = math.inf
    for folder in (machine.cache(), ROOT, tempfile.gettempdir()):
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


def landlock(machine):
    """The box that a run is in (harness/launch.py); version 4 denies TCP too, 6 signals. Off where an lsm= parameter leaves it out
    (netblue30/firejail#6302), and absent under gVisor (majorcontext/moat#396)."""
    version = machine.landlock()
    return f"version {version}" if version else Fault("this kernel has none, or it is switched off")


def wsl(machine):
    """Windows' subsystem: an AMD GPU needs librocdxg there and no /dev/kfd exists (ROCm/legacy-rocm-build#5900, #6528)."""
    if not machine.in_wsl:
        return None
    if machine.hardware == "nvidia":
        return "WSL, with NVIDIA's driver"
    return Fault("this is Windows' subsystem for Linux")

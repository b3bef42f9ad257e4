"""Checks of the GPU, its driver, its firmware and the kernel's part of them."""

import os
import re

from doctor.check import Fault
from doctor.machine import VISIBLE
from doctor.words import GIB, gib, numbers, sensors
from harness.common import telemetry


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


def nvidia_driver(machine):
    """CUDA 13 needs a driver from 580, CUDA 12 one from 525 (pytorch#162531: "the NVIDIA driver on your system is too old")."""
    version, cuda = numbers(machine.nvidia_version), numbers(machine.torch.get("cuda"))
    if not version or not cuda:
        return None
    need = {12: 525, 13: 580}.get(cuda[0], 0)
    if version[0] >= need:
        return f"{version[0]} for CUDA {cuda[0]}"
    return Fault(f"the NVIDIA driver is {version[0]}, and torch's CUDA {cuda[0]} needs {need}")


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


def gtt(machine):
    """The GPU's share of the memory: half by default; ttm.pages_limit sets it exactly (noamsto/nix-amd-ai#42), amdgpu.gttsize is deprecated
    and must not be set beside it (ROCm/legacy-rocm-build#5595); VRAM and GTT are never added (#6004)."""
    size, vram = (max((machine.card_bytes(card, kind) for card in machine.cards), default=0) for kind in ("gtt", "vram"))
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


def heat(machine):
    """Silent freezes (ROCm/legacy-rocm-build#6165), and hard locks of a gfx1151 at 2,900 MHz, 180 W and 111 °C, are reported; with its
    clock capped at 2,400 MHz it took 100 W, stayed at 70 °C and was 6 % slower. A run samples the same sensors (telemetry.py)."""
    said = []
    for card in machine.cards:
        now = telemetry.read_amd(card)
        words = sensors(now, "temp_c", "clock_mhz", "watts")
        critical = now.get("critical_c") or 100.0  # which is usual where it does not say
        if now.get("temp_c", 0) >= critical - telemetry.NEAR:
            return Fault(f"the GPU is at {words} before any run; {critical:.0f} °C are critical")
        said += [words] * bool(words)
    return "; ".join(said) or None

"""doctor.py on simulated machines: trees of files as Linux' /sys, /proc and /dev have them, what their commands answer, and what their
torch says of itself. We have none of them. Processes, files, forks and, for the measurements, torch on the CPU are real.

`python tests/doctor/test_doctor.py` prints what README.md and docs/doctor.md show of simulated machines.
"""

import faulthandler
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))
from doctor import canary, diagnosis, probe, screen  # noqa: E402
from doctor.check import Check, Row, examine, guarded  # noqa: E402
from doctor.checks import CHECKS  # noqa: E402
from doctor.host_checks import STAY_AWAKE  # noqa: E402
from doctor.machine import Machine, run_command  # noqa: E402
from doctor.words import GIB  # noqa: E402

GPU_8060S = {"name": "AMD Radeon Graphics", "gcnArchName": "gfx1151", "total_memory": 62 * GIB, "is_integrated": 1}
GPU_H200 = {"name": "NVIDIA H200", "total_memory": 140 * GIB, "is_integrated": 0}
CARD = "sys/class/drm/card1/device/"
PACKAGES = dict.fromkeys(("amd-torch-device-gfx1151", "amd-torch-device-gfx115x"), "2.13.0+rocm10.0.0")
PACKAGES |= {"triton": "3.8.0+git4cff872c.rocm10.0.0"}  # as AMD's index has them
FLASH = {"what": "attention", "backend": "flash", "error": 3e-3, "right": True}
DEFAULT = {"what": "attention", "backend": "default", "error": 3e-3, "right": True, "chosen": "FLASH_ATTENTION"}


def write(machine, path, text=""):
    path = Path(machine.root) / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def remove(machine, path):
    (Path(machine.root) / path).unlink()


def commands(**answers):
    """A command runner that answers by the program's name."""
    return lambda command, timeout=5, environ=None: answers.get(os.path.basename(command[0]).replace("-", "_"), (127, "", "not there"))


def machine_of(root, hardware, torch):
    machine = Machine(
        root=str(root),
        environ={"PATH": os.environ["PATH"], "USER": "someone", "AUTORESEARCH_HARDWARE": hardware, "AUTORESEARCH_CACHE": str(root)},
        run=commands(systemd_inhibit=(0, "", ""), journalctl=(0, "amdgpu: initialized\n", "")),
        free=lambda path: 500 * GIB,
        include=str(Path(root) / "include"),
        landlock=lambda: 7,
        torch=torch,
    )
    write(machine, "include/Python.h")
    write(machine, "proc/sys/kernel/osrelease", "6.18.7-generic")
    write(
        machine, "proc/meminfo", f"MemTotal: {125 * 2**20} kB\nMemAvailable: {110 * 2**20} kB\nSwapTotal: 8388604 kB\nSwapFree: 8388604 kB"
    )
    (Path(root) / "run/systemd/system").mkdir(parents=True)
    return machine


def add_node(machine, number, target, **properties):
    lines = {"simd_count": 80, "gfx_target_version": target} | properties
    write(machine, f"sys/class/kfd/kfd/topology/nodes/{number}/properties", "\n".join(f"{k} {v}" for k, v in lines.items()))


def strix_halo(root):
    """A healthy one, with 128 GB: 96 GiB of GTT, the torch that run.sh installs."""
    torch = {"version": "2.13.0+rocm10.0.0", "hip": "7.16.1", "rocm": "10.0.0", "extras": ["device-gfx1151"], "aotriton": "0.12.1"}
    torch |= {"packages": PACKAGES, "site": "/venv", "wants_triton": f"triton=={PACKAGES['triton']}", "path": "/venv/torch"}
    torch |= {"canary": {"stage": "done", "devices": [GPU_8060S]}, "sdpa": [FLASH, DEFAULT]}
    torch |= {"miopen": {"convolution": None, "batch norm": None}}
    machine = machine_of(root, "gfx1151", torch)
    machine.environ["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] = "1"
    write(machine, "dev/kfd")
    write(machine, "dev/dri/renderD128")
    add_node(machine, 0, 0)
    add_node(machine, 1, 110501)
    for name, text in {
        "vendor": "0x1002",
        "mem_info_gtt_total": str(96 * GIB),
        "mem_info_vram_total": str(GIB // 2),
        "fw_version/mes_fw_version": "0x00000085",
        "power_dpm_force_performance_level": "auto",
        "hwmon/hwmon4/freq1_input": "600000000",
        "hwmon/hwmon4/temp1_input": "41000",
        "hwmon/hwmon4/power1_input": "12034000",
    }.items():
        write(machine, CARD + name, text)
    write(machine, "proc/cmdline", "ro quiet ttm.pages_limit=25165824")
    write(machine, "sys/firmware/acpi/platform_profile", "balanced")
    write(machine, "sys/module/amdgpu/parameters/cwsr_enable", "1")
    write(machine, "sys/class/power_supply/ADP1/type", "Mains")
    write(machine, "sys/class/power_supply/ADP1/online", "1")
    return machine


def h200(root):
    torch = {"version": "2.11.0+cu130", "cuda": "13.0", "packages": {"triton": "3.6.0"}, "wants_triton": "triton==3.6.0"}
    torch |= {"canary": {"stage": "done", "devices": [GPU_H200]}, "sdpa": [FLASH, DEFAULT | {"chosen": "CUDNN_ATTENTION"}]}
    machine = machine_of(root, "nvidia", torch)
    write(machine, "dev/nvidia0")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build"
    write(machine, "proc/driver/nvidia/version", version)
    return machine


def radeon(root):
    """A desktop with a 7900 XTX."""
    torch = {"version": "2.13.0+rocm7.2", "hip": "7.2.53211", "rocm": "7.2", "packages": {"triton-rocm": "3.7.1"}, "extras": []}
    torch |= {"canary": {"stage": "done", "devices": [{"name": "AMD Radeon RX 7900 XTX", "is_integrated": 0}]}, "sdpa": [FLASH, DEFAULT]}
    machine = machine_of(root, "amd", torch)
    write(machine, "dev/kfd")
    add_node(machine, 1, 110000)
    write(machine, "sys/class/drm/card0/device/vendor", "0x1002")
    return machine


def cpu(root):
    return machine_of(root, "none", {"version": "2.13.0+cpu", "packages": {}, "canary": {"stage": "done", "devices": []}})


# ---- each check: a machine on which it fires -------------------------------------------------------------------------------------


def torch_is(machine, **facts):
    machine.torch = machine.torch | facts


def canary_is(machine, **facts):
    torch_is(machine, canary=facts)


def hung(**facts):
    return lambda m: canary_is(m, end="hung for 180 s", **facts)


def setting(name, value):
    return lambda m: m.environ.update({name: value})


def content(path, text):
    return lambda m: write(m, path, text)


def meminfo(**gibs):
    return content("proc/meminfo", "\n".join(f"{k}: {int(v * 2**20)} kB" for k, v in gibs.items()))


def no_programs(machine):
    machine.environ |= {"PATH": machine.root, "CC": "", "CXX": ""}


def answers(**found):
    return lambda m: setattr(m, "run", commands(**found))


def old_kernel_80(machine):
    write(machine, "proc/sys/kernel/osrelease", "6.17.9-300.fc43")
    write(machine, CARD + "fw_version/mes_fw_version", "0x00000080")


def no_kfd(machine):
    remove(machine, "dev/kfd")


def no_kfd_in_a_container(machine):
    remove(machine, "dev/kfd")
    write(machine, ".dockerenv")


def no_access(machine):
    machine.access = lambda path, mode: "renderD" not in path


def no_access_in_a_container(machine):
    write(machine, "run/.containerenv")
    machine.access = lambda path, mode: "kfd" not in path


def second_gpu(target, number=2, **properties):
    return lambda m: add_node(m, number, target, **properties)


def full_disk(machine):
    machine.free = lambda path: 0.2 * GIB


def read_only(machine):
    machine.access = lambda path, mode: mode != os.W_OK


def debugfs_83(machine):
    remove(machine, CARD + "fw_version/mes_fw_version")
    text = "MES_KIQ feature version: 6, firmware version: 0x0000006f\nMES feature version: 1, firmware version: 0x00000083"
    write(machine, "sys/kernel/debug/dri/1/amdgpu_firmware_info", text)


def not_ours(machine):
    write(machine, "opt/rocm-6.4/lib/libamdhip64.so.6")
    machine.environ["LD_LIBRARY_PATH"] = "/usr/local/lib:/opt/rocm-6.4/lib"


def own_rocm(machine):
    """The wheel's ROCm is in site-packages, and ROCM_HOME names the system's."""
    (Path(machine.root) / "opt/rocm").mkdir(parents=True)
    (Path(machine.root) / "site/_rocm_sdk_core").mkdir(parents=True)
    torch_is(machine, site=str(Path(machine.root) / "site"))
    machine.environ["ROCM_HOME"] = "/opt/rocm"


def hot(machine):
    """By what its driver calls critical."""
    write(machine, CARD + "hwmon/hwmon4/temp1_input", "84000")
    write(machine, CARD + "hwmon/hwmon4/temp1_crit", "88000")


WRONG = FLASH | {"error": 0.4, "right": False}
NO_FLASH = [{"what": "attention", "backend": "flash", "why": "RuntimeError: No available kernel"}, DEFAULT | {"chosen": "MATH"}]


def no_flash(machine):
    torch_is(machine, sdpa=NO_FLASH, aotriton="0.11.2")
    del machine.environ["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"]


INVALID = "HIP error: invalid device function"
REFUSED = "Failed to inhibit: Access denied"
RESET = "[ 1] amdgpu 0000:c5:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE\n[ 2] amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!\n"
# (check, machine, what is wrong with it, level, words of what was seen, words of the mend)
FAULTS = [
    ("driver", strix_halo, no_kfd, "stop", "/dev/kfd is not there", "modprobe amdgpu"),
    ("driver", strix_halo, no_kfd_in_a_container, "stop", "not in this container", "--device /dev/kfd --device /dev/dri --group-add"),
    ("driver", h200, lambda m: remove(m, "dev/nvidia0"), "stop", "NVIDIA driver is not loaded", "nvidia-smi"),
    ("permissions", strix_halo, no_access, "stop", "no permission on /dev/dri/renderD128", "usermod -aG render,video someone"),
    ("permissions", strix_halo, no_access_in_a_container, "stop", "no permission on /dev/kfd", r"--group-add \d+"),
    ("gfx_override", strix_halo, setting("HSA_OVERRIDE_GFX_VERSION", "11.0.0"), "stop", "=11.0.0", "unset HSA_OVERRIDE_GFX_VERSION"),
    ("gfx_override", radeon, setting("HSA_OVERRIDE_GFX_VERSION", "11.0.0"), "warn", "=11.0.0", "unset"),
    ("torch_build", strix_halo, lambda m: torch_is(m, version="2.13.0+cu130", hip=None, cuda="13.0"), "stop",
     "AMD GPU gfx1151 cannot be used.*a CUDA build", "ROCm build"),
    ("torch_build", h200, lambda m: torch_is(m, version="2.13.0+cpu", cuda=None), "stop", "NVIDIA GPU.*a CPU build", "CUDA build"),
    ("torch_build", cpu, lambda m: setattr(m, "torch", {}), "stop", "torch is not installed", "run.sh"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, rocm="7.1"), "stop", "ROCm 7.1", "run.sh"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, rocm="7.10.0a20251015"), "stop", "7.10.0a20251015", "run.sh"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, rocm="7.14.0a20260609"), "stop", "7.14.0a20260609", "run.sh"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, rocm="7.15.0a20260801"), "note", "head_dim 512", "stable torch"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, version="2.14.0a0+rocm10.0.0"), "note", "head_dim 512", "stable torch"),
    ("rocm_version", strix_halo, lambda m: torch_is(m, rocm="10.1.0a20261015"), "note", "zeros in those for Windows", "stable torch"),
    ("device_code", strix_halo, lambda m: torch_is(m, packages={"rocm": "10"}), "stop", "without code for gfx1151",
     r'"torch\[device-gfx1151\]==2.13.0\+rocm10.0.0"'),
    ("device_code", strix_halo, lambda m: torch_is(m, packages={k: v for k, v in PACKAGES.items() if "115x" not in k}), "warn",
     "without amd-torch-device-gfx115x: on gfx1151 flash attention will fail", r"whl-next/ amd-torch-device-gfx115x==2.13.0\+rocm10.0.0$"),
    ("nvidia_driver", h200, content("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue"), "stop",
     "570, and torch's CUDA 13 needs 580", "AUTORESEARCH_TORCH"),
    ("gpu", strix_halo, lambda m: canary_is(m, stage="see", error="no GPU"), "stop", "does not see the AMD GPU gfx1151", "dmesg"),
    ("gpu", h200, lambda m: canary_is(m, stage="see", error="no GPU"), "stop", "does not see the NVIDIA GPU", "nvidia-smi"),
    ("gpu", strix_halo, lambda m: canary_is(m, stage="kernel", error=INVALID), "stop", "cannot run a kernel.*invalid device function",
     r"torch\[device-gfx1151\]"),
    ("gpu", strix_halo, lambda m: canary_is(m, stage="kernel", error="wrong"), "stop", "wrong sums", "run.sh"),
    ("gpu", strix_halo, lambda m: canary_is(m, stage="see", end="crashed (exit code 139)"), "stop", "crashed .* at its first use",
     "another driver"),
    ("gpu", strix_halo, hung(stage="kernel", devices=[GPU_8060S]), "stop", "hung for 180 s at its first use", "another driver"),
    ("gpu", cpu, lambda m: canary_is(m, stage="import", error="ImportError: libmkl"), "stop", "does not import .ImportError", "run.sh"),
    ("toolchain", strix_halo, no_programs, "stop", "a C.. compiler and a C compiler are missing", "g.. gcc"),
    ("toolchain", h200, lambda m: remove(m, "include/Python.h"), "stop", "Python.h is missing", "python"),
    ("toolchain", cpu, no_programs, "warn", "compiler", "install"),
    ("compile", strix_halo, lambda m: canary_is(m, stage="compile", error="InductorError: gcc failed"), "stop", "gcc failed", "compiler"),
    ("compile", h200, hung(stage="compile"), "stop", "hung for 180 s", "Triton"),
    ("memory", strix_halo, meminfo(MemTotal=125, MemAvailable=6), "stop", "6.0 GiB.*needs 8.0 GiB", "ps -eo rss"),
    ("memory", cpu, meminfo(MemTotal=4, MemAvailable=0.5), "stop", "0.5 GiB", "ps"),
    ("memory", h200, lambda m: [write(m, f"sys/fs/cgroup/memory.{k}", str(v * GIB)) for k, v in (("max", 4), ("current", 2))], "stop",
     "2.0 GiB", "ps"),
    ("disk", strix_halo, full_disk, "stop", "0.2 GiB are free", "AUTORESEARCH_CACHE"),
    ("disk", cpu, read_only, "stop", "is not writable", "AUTORESEARCH_CACHE"),
    ("memory_cap", strix_halo, setting("GPU_MEMORY_FRACTION", "80%"), "stop", "80% is no share", "0.5"),
    ("memory_cap", strix_halo, lambda m: [setting("GPU_MEMORY_FRACTION", "1")(m), meminfo(MemTotal=125, MemAvailable=50)(m)], "warn",
     "allows 62.0 GiB of 50.0", "unset GPU_MEMORY_FRACTION"),
    ("sdpa", strix_halo, lambda m: torch_is(m, sdpa=[WRONG, DEFAULT]), "warn", "wrong numbers from flash .error 4e-01", "another torch"),
    ("sdpa", strix_halo, lambda m: torch_is(m, sdpa=[FLASH], sdpa_end="crashed (exit code 134)"), "warn",
     "crashed .exit code 134. .tried before: flash", "another torch"),
    ("sdpa", strix_halo, lambda m: torch_is(m, sdpa=[FLASH | {"harm": "hung: no answer in 90 s"}, DEFAULT]), "warn", "flash: hung: no ans",
     "another torch; train.py"),
    ("sdpa", strix_halo, no_flash, "warn", "no flash attention .*No available kernel.*MATH", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
    ("sdpa", strix_halo, lambda m: torch_is(m, sdpa=NO_FLASH), "warn", "torch takes MATH", "another torch"),  # though it is switched on
    ("aotriton", strix_halo, no_flash, "warn", "0.11.2", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
    ("allocator", strix_halo, setting("PYTORCH_ALLOC_CONF", "expandable_segments:True"), "warn", "expandable", "unset PYTORCH_ALLOC_CONF$"),
    ("library_path", strix_halo, not_ours, "warn", "/opt/rocm-6.4/lib", "export LD_LIBRARY_PATH=/usr/local/lib$"),
    ("rocm_home", strix_halo, setting("HIP_PATH", "/opt/rocm"), "warn", "HIP_PATH=/opt/rocm is not there", "unset HIP_PATH"),
    ("rocm_home", strix_halo, own_rocm, "warn", "torch brings its own", "export ROCM_HOME=.*/_rocm_sdk_core"),
    ("triton", strix_halo, lambda m: torch_is(m, packages={"triton": "3.7.1"}), "warn", r"triton 3.7.1, but.*3.8.0\+git4",
     "never install Triton"),
    ("triton", strix_halo, lambda m: torch_is(m, packages={"triton": "3.7.1"}, wants_triton=None), "warn", "3.7.1, but.*3.8.0$", "venv"),
    ("triton", strix_halo, lambda m: torch_is(m, packages={"triton": "3.7.1", "pytorch-triton-rocm": "3"}), "warn", "2 Tritons", "venv"),
    ("gtt", strix_halo, content(CARD + "mem_info_gtt_total", str(62 * GIB)), "note", "62.0 GiB of 125.0 GiB, the default",
     "pages_limit=24379392"),
    ("gtt", strix_halo, content(CARD + "mem_info_gtt_total", str(128 * GIB)), "warn", "nothing is left for the host", "pages"),
    ("gtt", strix_halo, content(CARD + "mem_info_vram_total", str(64 * GIB)), "note", "64.0 GiB are set aside", "0.5 GB"),
    ("gtt", strix_halo, content("proc/cmdline", "quiet amdgpu.gttsize=131072"), "warn", "amdgpu.gttsize", "remove it"),
    ("kernel", strix_halo, content("proc/sys/kernel/osrelease", "6.17.0-1017-oem"), "warn",
     "6.17.0-1017-oem .AMD's matrix for Ubuntu 24.04 names 6.17, TheRock's FAQ 6.18.4", "6.18.4"),
    ("kernel", strix_halo, content("proc/sys/kernel/osrelease", "6.18.3-arch1-1"), "warn", "6.18.3", "6.17.0-1018"),
    ("firmware", strix_halo, content(CARD + "fw_version/mes_fw_version", "0x00000083"), "warn", "MES 0x83", "20251111"),
    ("firmware", strix_halo, debugfs_83, "warn", "MES 0x83", "linux-firmware"),
    ("firmware", strix_halo, old_kernel_80, "warn", "MES 0x80", "cwsr_enable=0"),
    ("firmware", strix_halo, content(CARD + "fw_version/mes_fw_version", "0x00000086"), "note", "MES 0x86", "no mend"),
    ("gpu_faults", strix_halo, answers(journalctl=(0, RESET, "")), "warn", "2 faults.*GPU reset begin", "reboot.*lockup_timeout=20000"),
    ("tunable_op", strix_halo, setting("PYTORCH_TUNABLEOP_ENABLED", "1"), "note", "PYTORCH_TUNABLEOP_ENABLED=1", "^unset"),
    ("miopen", strix_halo, lambda m: torch_is(m, miopen={"convolution": None, "batch norm": "crashed (exit code 134)"}), "note",
     "^a batch norm fails .crashed .exit code 134.", "program.md"),
    ("heat", strix_halo, content(CARD + "hwmon/hwmon4/temp1_input", "96000"), "warn", "96 °C, 600 MHz, 12 W before.*100 °C", "cool"),
    ("heat", strix_halo, hot, "warn", "84 °C.* 88 °C are critical", "2,400 MHz"),
    ("gpu_faults", radeon, answers(dmesg=(0, RESET, "")), "warn", "2 faults", "reboot"),
    ("suspend", strix_halo, answers(systemd_inhibit=(1, "", REFUSED)), "warn", "Access denied", "systemctl mask sleep.target"),
    ("power", strix_halo, content("sys/firmware/acpi/platform_profile", "low-power"), "warn", "low-power", "powerprofilesctl set balanced"),
    ("power", strix_halo, content("sys/class/power_supply/ADP1/online", "0"), "warn", "battery", "plug"),
    ("power", strix_halo, content(CARD + "power_dpm_force_performance_level", "low"), "warn", "lowest", "echo auto"),
    ("swap", strix_halo, meminfo(MemTotal=125, SwapTotal=8, SwapFree=1), "warn", "7.0 GiB of 8.0 GiB", "swapoff"),
    ("swap", strix_halo, meminfo(MemTotal=31, SwapTotal=0, SwapFree=0), "note", "no swap", "mkswap"),
    ("several_gpus", strix_halo, second_gpu(120001), "warn", "2 GPUs: gfx1151, gfx1201", "HIP_VISIBLE_DEVICES=0 .for gfx1151"),
    ("several_gpus", radeon, second_gpu(100306, 0, simd_count=4), "warn", "gfx1036, gfx1100", "HIP_VISIBLE_DEVICES=1 .for gfx1100"),
    ("several_gpus", h200, content("dev/nvidia1", ""), "warn", "2 GPUs", "CUDA_VISIBLE_DEVICES=0"),
    ("landlock", strix_halo, lambda m: setattr(m, "landlock", lambda: 0), "note", "this kernel has none", "docs/honest.md"),
    ("wsl", cpu, content("proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2"), "warn", "Windows", "boot Linux"),
]  # fmt: skip


def row_of(name, machine):
    return examine(next(check for check in CHECKS if check.name == name), machine)


@pytest.mark.parametrize("name, make, break_it, level, seen, mend", FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_fault_is_found_and_mended(tmp_path, name, make, break_it, level, seen, mend):
    machine = make(tmp_path)
    before = row_of(name, machine)
    assert before is None or before.level == "fine", before
    break_it(machine)
    row = row_of(name, machine)
    assert row.level == level and re.search(seen, row.seen) and re.search(mend, row.mend) and row.why, row


def test_every_check_fires_somewhere():
    assert {fault[0] for fault in FAULTS} == {check.name for check in CHECKS}
    assert all(re.search(r"\w#\d+|RELEASES.md", check.run.__doc__) for check in CHECKS)  # and names the report behind it


@pytest.mark.parametrize(
    "make, silent",
    [
        (strix_halo, {"wsl"}),
        (radeon, {"device_code", "heat", "memory_cap", "miopen", "power", "wsl"}),
        (h200, {"memory_cap", "wsl"}),
        (cpu, {"gpu", "wsl"}),
    ],
)
def test_healthy_machine_has_no_fault(tmp_path, make, silent):
    """And each check says what it saw, but those that have nothing to look at there."""
    machine = make(tmp_path)
    rows = diagnosis.diagnose(machine)
    assert [row for row in rows if row.level != "fine"] == []
    here = {check.name for check in CHECKS if machine.hardware in check.where.split()}
    assert {row.check for row in rows} == here - silent
    assert "All is well." in screen.screen(machine, rows)


def test_kernels_that_have_the_fix(tmp_path):
    """Ubuntu's OEM backport, and any kernel that exports the save area's size."""
    machine = strix_halo(tmp_path)
    for release, exported, level in (("6.17.0-1018-oem", 0, "fine"), ("6.17.0-35-generic", 0, "warn"), ("6.17.0-35-generic", 1, "fine")):
        write(machine, "proc/sys/kernel/osrelease", release)
        add_node(machine, 1, 110501, cwsr_size=exported * 19226624)
        assert row_of("kernel", machine).level == level


def test_what_mends_a_check_silences_it(tmp_path):
    machine = strix_halo(tmp_path)
    torch_is(machine, packages={"triton": "3.7.1"}, wants_triton="triton==3.7.1")
    assert row_of("triton", machine).level == "fine"
    torch_is(machine, packages={"triton": "3.7.1+git1"})  # a local version is the same release
    assert row_of("triton", machine).level == "fine"
    torch_is(machine, packages=PACKAGES, wants_triton=None)  # its files do not say which, and we know
    assert row_of("triton", machine).level == "fine"
    torch_is(machine, packages={"amd-torch-device-gfx1151": "2.12.0+rocm7.13"}, rocm="7.13")  # before the family had a wheel
    assert row_of("device_code", machine).seen == "for gfx1151"
    machine.environ["PYTORCH_TUNABLEOP_ENABLED"] = "0"
    answers(journalctl=(0, RESET, ""))(machine)
    write(machine, "proc/cmdline", "quiet amdgpu.lockup_timeout=20000")
    assert row_of("tunable_op", machine).level == "fine" and "lockup_timeout" not in row_of("gpu_faults", machine).mend
    second_gpu(120001)(machine)
    machine.environ["HIP_VISIBLE_DEVICES"] = "0"
    answers(systemd_inhibit=(1, "", REFUSED))(machine)
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for name in ("sleep", "suspend"):
        (folder / f"{name}.target").symlink_to("/dev/null")
    old_kernel_80(machine)
    write(machine, "sys/module/amdgpu/parameters/cwsr_enable", "0")
    assert [row_of(name, machine).level for name in ("several_gpus", "suspend", "firmware")] == ["fine"] * 3


@pytest.mark.parametrize(
    "make, told, hardware",
    [(strix_halo, "", "gfx1151"), (radeon, "", "amd"), (h200, "", "nvidia"), (cpu, "", "none"), (strix_halo, "none", "none")],
)
def test_hardware_as_env_sh_finds_it(tmp_path, make, told, hardware):
    machine = make(tmp_path)
    machine.environ["AUTORESEARCH_HARDWARE"] = told
    assert machine.hardware == hardware
    functions = f'source <(sed "/^_ar_main()/,\\$d" "{PROJECT}/env.sh")'  # without what it does when sourced
    code = f'{functions}; AUTORESEARCH_SYSROOT="{tmp_path}" AUTORESEARCH_HARDWARE="{told}"; _ar_find_hardware; echo $AUTORESEARCH_HARDWARE'
    assert subprocess.run(["bash", "-c", code], capture_output=True, text=True).stdout.strip() == hardware


@pytest.mark.parametrize("device, class_, hardware", [("0x1586", "0x038000", "gfx1151"), ("0x515e", "0x030000", "none")])
def test_part_without_its_driver(tmp_path, device, class_, hardware):
    machine = cpu(tmp_path)
    machine.environ["AUTORESEARCH_HARDWARE"] = ""
    for name, text in (("vendor", "0x1002"), ("device", device), ("class", class_)):
        write(machine, f"sys/bus/pci/devices/0000:c5:00.0/{name}", text)
    assert machine.hardware == hardware


# ---- a check that fails, crashes or hangs ----------------------------------------------------------------------------------------


def boom(machine):
    raise RuntimeError("a bug")


def dies(machine):
    faulthandler.disable()  # pytest's, which would print a page
    os.kill(os.getpid(), signal.SIGSEGV)


def sleeps(machine):
    time.sleep(60)


@pytest.mark.parametrize("function, words", [(boom, "RuntimeError: a bug"), (dies, "crashed"), (sleeps, "did not end within 0.3 s")])
def test_check_that_fails_costs_only_its_row(tmp_path, monkeypatch, function, words):
    check = Check(function, "none", "stop", "why", "mend")
    row = guarded(check, cpu(tmp_path), seconds=0.3)
    assert row.level == "unknown" and words in row.seen
    monkeypatch.setattr(diagnosis, "CHECKS", (check,))
    monkeypatch.setattr(guarded, "__defaults__", (0.3,))
    assert diagnosis.stop(cpu(tmp_path / "other")) is False


def test_guarded_passes_rows_on(tmp_path):
    machine = cpu(tmp_path)
    memory = next(check for check in CHECKS if check.name == "memory")
    assert guarded(memory, machine) == Row("memory", "fine", "110.0 GiB")
    remove(machine, "proc/meminfo")
    assert guarded(memory, machine) is None


def test_command_that_hangs_is_cut_and_what_it_said_is_kept():
    code, out, _ = run_command(["bash", "-c", "echo so far; sleep 60"], 0.5)
    assert code is None and out == "so far\n"
    assert run_command(["no such program"])[0] == 127
    assert run_command(["bash", "-c", "echo out; echo err >&2; exit 4"]) == (4, "out\n", "err\n")


# ---- the canary ------------------------------------------------------------------------------------------------------------------


def talkative(code, lines, err=""):
    calls = []

    def run(command, timeout=5, environ=None):
        calls.append((command, environ))
        return code, "\n".join(json.dumps(line) for line in lines), err

    run.calls = calls
    return run


def test_success_of_the_canary_is_remembered_until_something_changes(tmp_path, capsys):
    machine = strix_halo(tmp_path)
    machine.run = talkative(0, [{"stage": "import"}, {"stage": "done", "devices": [GPU_8060S]}])
    for _ in range(2):
        assert canary.cached_canary(machine)["devices"] == [GPU_8060S]
    assert len(machine.run.calls) == 1 and "trying torch" in capsys.readouterr().err
    environ = machine.run.calls[0][1]
    assert environ["TRITON_CACHE_DIR"] and not os.path.exists(environ["TRITON_CACHE_DIR"])  # compiled for real, and gone
    changes = [
        lambda: torch_is(machine, version="2.14.0+rocm10.0.0"),
        lambda: torch_is(machine, packages={"triton": "3.8.0"}),
        lambda: write(machine, "proc/sys/kernel/random/boot_id", "another"),
        lambda: write(machine, "proc/sys/kernel/osrelease", "6.19.1"),
        lambda: machine.environ.update(HIP_VISIBLE_DEVICES="1"),
        lambda: machine.environ.update(PATH=str(tmp_path)),  # no compiler
    ]
    for number, change in enumerate(changes, 2):
        change()
        for _ in range(2):
            canary.cached_canary(machine)
        assert len(machine.run.calls) == number


@pytest.mark.parametrize(
    "code, lines, err, stage, words",
    [
        (-11, [{"stage": "import"}, {"stage": "see"}], "", "see", "crashed (exit code 139)"),
        (None, [{"stage": "import"}, {"stage": "compile", "devices": []}], "", "compile", "hung for 180 s"),
        (1, [], "SyntaxError: torch is broken", "import", "crashed (exit code 1): SyntaxError: torch is broken"),
        (0, [{"stage": "see", "error": "no GPU"}], "", "see", "ended"),
    ],
)
def test_failure_of_the_canary_is_not_remembered(tmp_path, code, lines, err, stage, words):
    machine = strix_halo(tmp_path)
    machine.run = talkative(code, lines, err)
    for _ in range(2):
        found = canary.cached_canary(machine)
        assert found["stage"] == stage and found["end"] == words
    assert len(machine.run.calls) == 2
    torch_is(machine, canary=found)
    assert {row_of(name, machine).level for name in ("gpu", "compile") if row_of(name, machine)} == {"stop"}


def test_damaged_memory_of_the_canary_is_forgotten(tmp_path):
    machine = strix_halo(tmp_path)
    machine.run = talkative(0, [{"stage": "done", "devices": []}])
    for text in ("", "[1]", '{"x": 1', "null"):
        (tmp_path / "doctor.json").write_text(text)
        assert canary.cached_canary(machine)["stage"] == "done"
    assert len(machine.run.calls) == 4


# ---- MIOpen ----------------------------------------------------------------------------------------------------------------------


def test_each_layer_is_tried_in_a_process_of_its_own(tmp_path):
    """So that one which crashes or leaves the GPU broken says nothing of the other; and only where MIOpen is."""
    machine, layers = strix_halo(tmp_path), {"convolution": (-6, "", ""), "batch norm": (0, '{"why": "RuntimeError: miopenStatus"}', "")}
    del machine.torch["miopen"]
    assert row_of("miopen", machine) is None  # nothing was asked yet
    calls = []

    def run(command, timeout=5, environ=None):
        calls.append(command)
        return layers.get(command[-1], (0, '{"stage": "done", "devices": []}', ""))

    machine.run = run
    diagnosis.look(machine)
    assert (
        [command[-2:] for command in calls if "--layer" in command]
        == [["--layer", name] for name in layers]
        == [["--layer", name] for name in canary.LAYERS]
    )
    seen = "a convolution fails (crashed (exit code 134)); a batch norm fails (RuntimeError: miopenStatus)"
    assert row_of("miopen", machine).seen == seen and row_of("miopen", machine).level == "note"
    for make in (h200, cpu):
        machine, before = make(tmp_path / make.__name__), len(calls)
        machine.run = run
        diagnosis.look(machine)
        assert not any("--layer" in command for command in calls[before:])


@pytest.mark.gpu
def test_layers_on_this_gpu():
    """Right numbers, or why not: on some ROCm they fail, which is that machine's fault."""
    import torch

    for name in canary.LAYERS:
        done = subprocess.run([sys.executable, PROJECT / "doctor.py", "--layer", name], capture_output=True, text=True)
        assert torch.version.hip or json.loads(done.stdout) == {"why": None}


def test_layer_that_gives_wrong_numbers(monkeypatch, capsys):
    """On the CPU, in the place of a GPU."""
    import torch

    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "to", lambda self, device: self)
    for name in canary.LAYERS:
        canary.try_layer(name)
    devices = iter(["cpu", "cuda"])
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self if next(devices) == "cpu" else self + 1)
    canary.try_layer("convolution")
    monkeypatch.setattr(torch.nn, "BatchNorm1d", lambda *sizes: boom(None))
    canary.try_layer("batch norm")
    assert [json.loads(line)["why"] for line in capsys.readouterr().out.splitlines()] == [
        None,
        None,
        "wrong numbers",
        "RuntimeError: a bug",
    ]


def test_convolution_of_program_md():
    """What it says to write instead is a causal depthwise convolution."""
    import torch
    import torch.nn.functional as F

    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "program.md").read_text(), re.S)
    names = {"F": F}
    exec(code, names)
    x, w = torch.randn(2, 9, 5), torch.randn(4, 5)
    right = F.conv1d(F.pad(x.mT, (3, 0)), w.flip(0).T[:, None], groups=5).mT  # conv1d's last weight is the latest value's
    torch.testing.assert_close(names["causal_conv"](x, w), right)
    assert names["causal_conv"](x.bfloat16(), w).dtype == torch.bfloat16


# ---- the command -----------------------------------------------------------------------------------------------------------------


def doctor_py(*arguments, root, **environ):
    names = ("AUTORESEARCH_", "HSA_", "PYTORCH_", "HIP_", "ROCM_", "LD_LIBRARY_PATH", "TORCH_ROCM")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    clean |= {"AUTORESEARCH_SYSROOT": str(root), "AUTORESEARCH_CACHE": str(root)} | environ
    return subprocess.run([sys.executable, PROJECT / "doctor.py", *arguments], env=clean, text=True, capture_output=True, timeout=60)


def test_stop_checks_on_a_cpu_run_the_real_canary_once(tmp_path):
    cpu(tmp_path)
    first = doctor_py("--stop", root=tmp_path)
    assert first.returncode == 0 and first.stdout == first.stderr == ""
    remembered = json.loads((tmp_path / "doctor.json").read_text())
    assert [found["stage"] for found in remembered.values()] == ["done"]
    marked = {key: {"stage": "import", "error": "from the file"} for key in remembered}
    (tmp_path / "doctor.json").write_text(json.dumps(marked))
    again = doctor_py("--stop", root=tmp_path)
    assert again.returncode == 3 and "from the file" in again.stderr  # so it was read, and torch was not imported again


def test_stop_checks_say_a_line_for_each_fault(tmp_path):
    strix_halo(tmp_path)  # with this Python's torch, a build without ROCm
    remove(Machine(root=str(tmp_path)), "dev/kfd")
    done = doctor_py("--stop", root=tmp_path, HSA_OVERRIDE_GFX_VERSION="11.0.0")
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and done.stdout == "" and all(line.startswith("autoresearch: ") for line in lines)
    assert [re.search("SKIP_CHECKS=([a-z_]+)", line)[1] for line in lines] == ["driver", "gfx_override", "torch_build"]
    assert "AUTORESEARCH_HARDWARE=none" in lines[0]
    left = doctor_py("--stop", root=tmp_path, AUTORESEARCH_SKIP_CHECKS="driver torch_build, gpu compile")
    assert left.returncode == 0 and "not checked: driver, torch_build, gpu, compile" in left.stderr
    wrong = doctor_py("--stop", root=tmp_path, AUTORESEARCH_SKIP_CHECKS="drivers")
    assert wrong.returncode == 3 and "'drivers'" in wrong.stderr and "permissions" in wrong.stderr


def test_stopping_the_doctor_stops_what_it_started(tmp_path):
    """A torch whose import never ends, as where the driver hangs."""
    cpu(tmp_path)
    (tmp_path / "torch.py").write_text(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("AUTORESEARCH_")}
    clean |= {"AUTORESEARCH_SYSROOT": str(tmp_path), "AUTORESEARCH_CACHE": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, PROJECT / "doctor.py", "--stop"], env=clean)
    end = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(10) == 143
    child = int((tmp_path / "pid").read_text())
    while os.path.exists(f"/proc/{child}/stat") and "Z" not in Path(f"/proc/{child}/stat").read_text().rsplit(")")[1][:3]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_unknown_hardware_is_refused(tmp_path):
    done = doctor_py("--stop", root=tmp_path, AUTORESEARCH_HARDWARE="cuda")
    assert done.returncode == 3 and "AUTORESEARCH_HARDWARE=cuda is not known: use gfx1151, amd, nvidia, none" in done.stderr


def test_before_installing_torch_is_not_asked_for(tmp_path):
    strix_halo(tmp_path)
    assert doctor_py("--stop", "--before-install", root=tmp_path).returncode == 0


def test_doctor_that_fails_itself_stops_no_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--stop"])
    monkeypatch.setattr(diagnosis, "stop", lambda machine, before_install: boom(machine))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROJECT / "doctor.py"), run_name="__main__")
    assert ended.value.code == 0 and "goes on without them (RuntimeError: a bug)" in capsys.readouterr().err


def test_screen_and_json_say_the_same(tmp_path):
    strix_halo(tmp_path)
    text, found = doctor_py(root=tmp_path), doctor_py("--json", root=tmp_path)
    facts = json.loads(found.stdout)
    stops = [row for row in facts["rows"] if row["level"] == "stop"]
    assert text.returncode == found.returncode == 3 and [row["check"] for row in stops] == [
        "torch_build"
    ]  # torch was not asked: its build says all
    flat = " ".join(text.stdout.split())
    assert (
        all(" ".join(row["mend"].split()) in flat and row["why"] in flat for row in stops)
        and "1 of these stops a run. Until then torch was not asked" in flat
    )
    assert len(text.stdout.splitlines()) <= 50  # one screen


def test_cpu_is_told_what_the_demonstration_is(tmp_path):
    cpu(tmp_path)
    done = doctor_py(root=tmp_path)
    assert done.returncode == 0 and "runs the demonstration" in done.stdout and "All is well." in done.stdout
    assert "Nothing was measured: there is no GPU" in doctor_py("--probe", root=tmp_path).stdout


def test_this_torch_is_described_without_importing_it():
    import torch

    facts = canary.torch_on_disk()
    assert facts["version"] == torch.__version__ and facts["path"] == os.path.dirname(torch.__file__)
    assert (facts["hip"], facts["cuda"]) == (torch.version.hip, torch.version.cuda)
    assert facts["packages"]["triton"] and "wants_triton" in facts


# ---- measurements, with tiny sizes ------------------------------------------------------------------------------------


def test_copy_and_gemm_are_measured():
    copy = probe.measure_copy("cpu", mib=1)
    assert 1e7 < copy["bytes_per_s"] < 1e13
    (row,) = probe.measure_gemm("cpu", "CPU", ((64, 48, 32),))
    assert row["library"] == "CPU" and all(row[x]["right"] and row[x]["flops"] > 1e5 for x in ("forward", "dgrad", "wgrad")), row


def measured(device, *backends, shape=(1, 32, 2, 16)):
    return {name: probe.measure_attention(device, name, shape, window=8, rounds=1) for name in backends or probe.attention_backends(device)}


def test_attention_is_measured_and_checked(monkeypatch, device):
    rows = measured(device)
    for name in ("math", "default", probe.OURS, probe.WINDOWED):  # kernels/: without a GPU by Triton's interpreter
        assert rows[name]["right"] and 1e-4 < rows[name]["error"] < 2e-2 and rows[name]["both_s"] > 0, rows[name]
    assert [name for name, row in rows.items() if row["window"]] == [probe.WINDOWED] and not any("harm" in row for row in rows.values())
    assert rows["default"]["chosen"] and ("both_s" in rows["flash"]) != ("why" in rows["flash"])
    assert all(probe.words(row).startswith(f"attention {name}") and "WRONG" not in probe.words(row) for name, row in rows.items())

    import torch
    import torch.nn.functional as F

    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **kwargs: attend(q, k, v))  # forgets causality
    wrong = measured(device, "math", "default").values()
    assert [row["right"] for row in wrong] == [False, False] and all("WRONG" in probe.words(row) for row in wrong)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **kwargs: attend(q, k, v) * float("nan"))
    nan = measured(device, "default")["default"]
    assert nan["right"] is False and nan["error"] == 1e9
    product = torch.Tensor.__matmul__

    def spoil(q, k, v, **kwargs):
        torch.Tensor.__matmul__ = lambda a, b: 1.01 * product(a, b)
        return attend(q, k, v, **kwargs)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)  # so that it goes again
    monkeypatch.setattr(F, "scaled_dot_product_attention", spoil)
    assert measured(device, "default")["default"]["harm"].startswith("after it plain attention is wrong (error")


def test_reference_is_attention_with_a_window():
    """Against torch's own, in float64, with the window as a mask."""
    import torch

    q, k, v, do = (torch.randn(2, 20, 2, 8, dtype=torch.double) for _ in range(4))
    i, j = torch.arange(20)[:, None], torch.arange(20)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = (j <= i) & (i - j <= 5)
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), attn_mask=mask).transpose(1, 2)
    exact = o, *torch.autograd.grad(o, leaves, do)
    for ours, right in zip(probe.attention_reference(q, k, v, do, 5), exact):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


def test_step_on_paper_is_the_published_sum():
    """With gfx1151's published rates: GEMM by the best library of each layout 0.64 s, elementwise work 0.5 s."""

    def gemm(library, *rates):
        layouts = {name: {"flops": rate * 1e12, "right": True} for name, rate in zip(("forward", "dgrad", "wgrad"), rates)}
        return {"what": "gemm", "library": library, "shape": list(probe.GEMM_SHAPES[1])} | layouts

    rows = [gemm("rocBLAS", 21.8, 29.2, 40.5), gemm("hipBLASLt", 34.0, 35.2, 16.3), {"what": "copy", "bytes_per_s": 212.6e9}]
    assert probe.step_on_paper(rows) is None  # a part is missing
    attention = {"what": "attention", "right": True, "window": None, "both_s": 0.02}
    rows += [attention, attention | {"window": 1024, "both_s": 0.015}, attention | {"right": False, "both_s": 0.001}]
    rows += [attention | {"harm": "after it plain attention fails", "both_s": 0.001}]
    step = probe.step_on_paper(rows)
    assert step["gemm_s"] == pytest.approx(0.635, abs=0.005) and step["elementwise_s"] == pytest.approx(0.503, abs=0.005)
    assert step["attention_s"] == pytest.approx(
        4 * (6 * 0.015 + 2 * 0.02)
    )  # the speed of a wrong one does not count, nor of one that does harm
    assert step["flops_per_s"] * step["total_s"] == pytest.approx(31.3e12, rel=0.01)
    assert "modelled" in probe.words(step)


def test_part_of_the_probe_that_crashes_loses_only_itself(tmp_path):
    machine = h200(tmp_path)
    replies = {
        "copy": (0, '{"what": "copy", "bytes_per_s": 4.3e12}', ""),
        "gemm": (-6, '{"what": "gemm", "library": "cuBLAS", "why": "x"}', ""),
    }
    machine.run = lambda command, timeout=5, environ=None: replies.get(command[-1], (None, "", ""))
    assert [probe.words(row) for row in diagnosis.measure(machine)] == [
        "copy: 4300 GB/s",
        "gemm cuBLAS: not measured, x",
        "gemm: not measured, crashed (exit code 134)",
        "attention: not measured, hung for 1200 s",
    ]


def test_backends_that_crash_hang_or_spoil_their_process_are_named_by_the_check(tmp_path):
    """In real processes, with stand-ins for SDPA's backends; the doctor, its child and that one's children end as they should."""
    machine = h200(tmp_path)
    machine.environ, machine.run = {**os.environ, "AUTORESEARCH_HARDWARE": "nvidia", "OMP_NUM_THREADS": "1"}, run_command
    command = [PROJECT / "tests/helpers/standin_probe.py", "doctor.probe", "sdpa"]
    machine.torch["sdpa"], machine.torch["sdpa_end"] = canary.ask_torch(machine, command, 120)
    row = row_of("sdpa", machine)
    assert row.level == "warn" and row.seen == (
        "flash: took its process down: signal 11; efficient: hung: no answer in 3 s; "
        "math: after it plain attention fails (RuntimeError: HIP error: invalid argument)"
    )
    assert [r["backend"] for r in machine.torch["sdpa"] if r.get("right")] == ["default"], "what came after them was tried all the same"
    assert probe.words(machine.torch["sdpa"][0]) == "attention flash: took its process down: signal 11"


def test_each_candidate_of_the_probe_has_a_process_of_its_own(monkeypatch, tmp_path):
    """Small programs answer in its place."""
    program = tmp_path / "program.py"
    lines = (
        "print('oops')",
        "if task['candidate'] == 'CPU': os.abort()",
        "answer(what=task['part'], backend=task['candidate'], pid=os.getpid())",
    )
    program.write_text(
        "\n".join(
            [
                f"import os, sys\nsys.path.insert(0, {str(PROJECT)!r})\nfrom harness.common import child\ntask, answer = child.begin()",
                *lines,
            ]
        )
    )
    monkeypatch.setattr(probe, "PROGRAM", [sys.executable, str(program)])
    assert list(probe.rows_of("gemm", "cpu")) == [{"what": "gemm", "library": "CPU", "harm": "took its process down: signal 6 (oops)"}]
    rows = list(probe.rows_of("sdpa", "cpu"))
    assert [row["backend"] for row in rows] == ["flash", "efficient", "math", "default"] and len({row["pid"] for row in rows}) == 4


def test_probe_needs_a_gpu():
    import torch

    done = subprocess.run([sys.executable, PROJECT / "doctor/probe.py", "flops"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("'flops' is no part")
    if not torch.cuda.is_available():
        done = subprocess.run([sys.executable, PROJECT / "doctor/probe.py", "copy"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == "no GPU that torch can use: nothing to measure\n"


# ---- the memory cap --------------------------------------------------------------------------------------------------------------


def test_memory_cap_is_set_in_one_place_and_on_gfx1151_whatever_it_says_of_itself(monkeypatch, capsys):
    from types import SimpleNamespace

    import torch

    from harness import machine

    caps = []
    part = SimpleNamespace(gcnArchName="gfx1151", total_memory=2**50, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: part)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: caps.append(fraction))
    machine.cap_shared_memory(torch.device("cuda"))
    part.gcnArchName = "gfx1100"
    machine.cap_shared_memory(torch.device("cuda"))
    assert len(caps) == 1 and "GPU memory is the host's" in capsys.readouterr().out
    part.is_integrated = 1
    monkeypatch.setenv("GPU_MEMORY_FRACTION", "80")
    with pytest.raises(SystemExit):
        machine.cap_shared_memory(torch.device("cuda"))
    assert "GPU_MEMORY_FRACTION=80" in capsys.readouterr().err
    files = (*PROJECT.glob("*.py"), *PROJECT.glob("doctor/*.py"), *PROJECT.glob("harness/**/*.py"))
    names = [path.name for path in files if "set_per_process_memory_fraction(" in path.read_text()]
    assert names == ["machine.py"]


# ---- what the documents show -----------------------------------------------------------------------------------------------------

SHOWN = (
    setting("HSA_OVERRIDE_GFX_VERSION", "11.0.0"),
    content(CARD + "fw_version/mes_fw_version", "0x00000083"),
    content(CARD + "mem_info_gtt_total", str(62 * GIB)),
    no_flash,
)


def simulated(root, faults):
    """What doctor.py says of a simulated Strix Halo with these faults."""
    machine = strix_halo(root)
    for break_it in faults:
        break_it(machine)
    return screen.screen(machine, [row for check in CHECKS if "gfx1151" in check.where and (row := examine(check, machine))])


def demonstration(root):
    """What it says of a simulated machine without a GPU."""
    machine = cpu(root)
    return screen.screen(machine, diagnosis.diagnose(machine))


def test_any_locale_and_a_reader_that_leaves():
    command = [sys.executable, PROJECT / "doctor.py", "--list"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0 and "\\u2026" in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    for buffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | buffered
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1 and done.stderr == ""
    os.close(writer)


def test_documents_show_what_it_says(tmp_path):
    readme, page = (PROJECT / "README.md").read_text(), (PROJECT / "docs/doctor.md").read_text()
    assert page.count(screen.listing()) == 1 and page.count("\n| `") == len(CHECKS), "python doctor.py --list"
    for document, shown in (
        (readme, simulated(tmp_path / "one", SHOWN[:1])),
        (page, simulated(tmp_path / "four", SHOWN)),
        (page, demonstration(tmp_path / "none")),
    ):
        assert f"```\n{shown}\n```\n" in document, "python tests/doctor/test_doctor.py"
    assert "AUTORESEARCH_SKIP_CHECKS" in readme and "AUTORESEARCH_SKIP_CHECKS" in page and "(docs/doctor.md)" in readme
    assert f"--what={STAY_AWAKE} " in (PROJECT / "run.sh").read_text()


def test_where_a_launcher_left_sigchld_ignored(tmp_path):
    """Then the kernel keeps no exit codes; a fault must stop a run all the same."""
    launch = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    environment = os.environ | {"AUTORESEARCH_HARDWARE": "gfx1151", "AUTORESEARCH_SYSROOT": str(tmp_path)}
    command = [sys.executable, "-c", launch, PROJECT / "doctor.py", "--stop", "--before-install"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 3 and "autoresearch: /dev/kfd is not there" in done.stderr, done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(simulated(root / "one", SHOWN[:1]), simulated(root / "four", SHOWN), demonstration(root / "none"), sep="\n\n")

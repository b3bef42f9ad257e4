"""What is read of a machine: its files, its commands, its GPUs. Tests lay one out in a folder."""

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness.common import box, hardware, settings, telemetry

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # this project's folder
CHECK_SECONDS = 5  # a check, or a command of one, that takes longer hangs
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


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
    landlock: Callable = box.version  # the version of it in this kernel, 0 without
    torch: Mapping = field(default_factory=dict)  # what torch says of itself: torch_on_disk(); "canary", "sdpa", "miopen" once it was asked

    def path(self, name):
        return os.path.join(self.root, name)

    def glob(self, pattern):
        return sorted(glob.glob(self.path(pattern)))

    def read(self, path):
        """A small file's text without its last newline, or None."""
        return telemetry.read(self.path(path))

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

    @property
    def nvidia_version(self):
        """Of NVIDIA's driver: "580.159.03", or None."""
        found = re.search(r"Kernel Module.*?\s(\d{3,}\.\d[.\d]*)", self.read("proc/driver/nvidia/version") or "")
        return found and found[1]

    def card_bytes(self, card, kind):
        """The size of a card's "vram" or "gtt", 0 where it does not say."""
        text = self.read(f"{card}/mem_info_{kind}_total") or ""
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0

    def memory(self):
        """/proc/meminfo in bytes."""
        lines = (line.split() for line in (self.read("proc/meminfo") or "").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2 and words[1].isdecimal()}

    def cache(self):
        """Where prepare.py keeps the data."""
        try:
            return settings.cache_folder(self.environ)
        except ValueError:  # which prepare.py says
            return os.path.join(ROOT, "~")

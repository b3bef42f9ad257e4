"""Clock, heat and power of a GPU: read once, or sampled beside a run. Standard library alone; the doctor and the run use it.

AMD: what amdgpu shows in sysfs, in hwmon and pp_dpm_sclk (docs.kernel.org/gpu/amdgpu/thermal.html). NVIDIA: an nvidia-smi that goes on
printing while the run lasts.
"""

import contextlib
import glob
import os
import re
import shutil
import statistics
import subprocess
import threading
import time

EVERY = 5.0  # seconds between two readings of a run
FIRST = 60.0  # seconds of a run that its later clock is compared with
SLOWED = 0.9  # of that clock: below it a run has throttled
NEAR = 5.0  # °C below the critical temperature, where the part defends itself


def read(path):
    """A small file's text without its last newline, or None."""
    with contextlib.suppress(OSError), open(path, errors="replace") as f:
        return f.read().strip()


def amd_cards(root="/"):
    """The device folders of AMD's graphics cards."""
    cards = sorted(glob.glob(os.path.join(root, "sys/class/drm/card*/device")))
    return [card for card in cards if read(card + "/vendor") == "0x1002"]


def read_amd(card):
    """What a card's device folder says now, of clock_mhz, temp_c, critical_c, watts; what it does not say is left out."""
    sensors = next(iter(sorted(glob.glob(card + "/hwmon/hwmon*"))), card)
    files = {  # their units: Hz, thousandths of a °C, millionths of a watt
        "clock_mhz": (("freq1_input",), 1e6),
        "temp_c": (("temp1_input",), 1e3),
        "critical_c": (("temp1_crit",), 1e3),
        "watts": (("power1_average", "power1_input"), 1e6),  # some parts have the one, some the other
    }
    found = {}
    for name, (places, unit) in files.items():
        text = next((text for place in places if (text := read(f"{sensors}/{place}"))), "")
        if re.fullmatch(r"\d{1,15}", text) and (name != "critical_c" or int(text)):  # 0 is a driver that does not know it
            found[name] = int(text) / unit
    if "clock_mhz" not in found and (now := re.search(r"(\d{1,6}) *MHz *\*", read(card + "/pp_dpm_sclk") or "", re.I)):
        found["clock_mhz"] = float(now[1])
    return found


def read_nvidia(line):
    """The same of a line that `nvidia_smi` prints."""
    found = {}
    for name, text in zip(("clock_mhz", "temp_c", "watts"), line.split(",")):
        with contextlib.suppress(ValueError):  # "[N/A]"
            found[name] = float(text)
    return found


def nvidia_smi(pci, every):
    """The command that prints a line of readings every so many seconds."""
    query = "--query-gpu=clocks.sm,temperature.gpu,power.draw"
    return ["nvidia-smi", f"--id={pci}", query, "--format=csv,noheader,nounits", f"--loop-ms={max(100, int(1000 * every))}"]


class Sampler:
    """Readings of one GPU, taken by a thread that sleeps between them. It never raises: what can't be read is not known.

    maker: "amd", "nvidia", or None, which reads nothing. pci: the GPU's address, "0000:c5:00.0".
    """

    def __init__(self, maker=None, pci=None, every=EVERY, root="/"):
        self.maker, self.pci, self.every, self.root = maker, pci, every, root
        self.samples = []  # (seconds since start, what was read)
        self.process = self.thread = None
        self.over = threading.Event()

    def start(self):
        with contextlib.suppress(Exception):
            if self.maker == "amd" and (card := self.card()):
                self.follow(self.amd(card))
            elif self.maker == "nvidia" and self.pci and shutil.which("nvidia-smi"):
                ends = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                self.process = subprocess.Popen(nvidia_smi(self.pci, self.every), text=True, **ends)
                self.follow(map(read_nvidia, self.process.stdout))  # which ends with it, and it with its pipe

    def card(self):
        """The card at the address; where none is known the only one."""
        cards = amd_cards(self.root)
        at = [card for card in cards if os.path.basename(os.path.realpath(card)) == self.pci]
        return next(iter(at), cards[0] if len(cards) == 1 else None)

    def amd(self, card):
        while not self.over.wait(self.every):
            yield read_amd(card)

    def follow(self, readings):
        began = time.monotonic()

        def collect():
            with contextlib.suppress(Exception):
                for reading in readings:
                    self.samples.append((time.monotonic() - began, reading))

        self.thread = threading.Thread(target=collect, name="telemetry", daemon=True)
        self.thread.start()

    def stop(self):
        with contextlib.suppress(Exception):
            self.over.set()
            if self.process:
                self.process.kill()  # it has nothing to tidy up, and SIGTERM may not end it
                self.process.wait(2)
            if self.thread:
                self.thread.join(2)  # a driver that no longer answers keeps it, not the run

    def summary(self):
        """The summary's lines, as texts: gpu_clock_mhz_mean, gpu_clock_mhz_min, gpu_temp_c_max, gpu_watts_mean, gpu_throttled; only what is
        known, and the last only where it is so."""
        samples = list(self.samples)
        clocks, temps, watts = ([sample[name] for _, sample in samples if name in sample] for name in ("clock_mhz", "temp_c", "watts"))
        found = {}
        if clocks:
            found |= {"gpu_clock_mhz_mean": f"{statistics.fmean(clocks):.0f}", "gpu_clock_mhz_min": f"{min(clocks):.0f}"}
        if temps:
            found["gpu_temp_c_max"] = f"{max(temps):.0f}"
        if watts:
            found["gpu_watts_mean"] = f"{statistics.fmean(watts):.1f}"
        return found | ({"gpu_throttled": why} if (why := throttled(samples)) else {})


def throttled(samples):
    """In what way a run's clock suffered, or None: the mean clock after its first minute is less than 0.9 of that minute's, or it came
    within 5 °C of the temperature that its part calls critical."""
    first = [sample["clock_mhz"] for t, sample in samples if t <= FIRST and "clock_mhz" in sample]
    later = [sample["clock_mhz"] for t, sample in samples if t > FIRST and "clock_mhz" in sample]
    said = []
    if len(first) >= 3 and len(later) >= 3 and statistics.fmean(later) < SLOWED * statistics.fmean(first):
        said.append(f"{statistics.fmean(first):.0f} MHz in the first minute, {statistics.fmean(later):.0f} after it")
    temps = [(sample["temp_c"], sample["critical_c"]) for _, sample in samples if "temp_c" in sample and "critical_c" in sample]
    if temps and max(temps)[0] >= max(temps)[1] - NEAR:
        said.append("{:.0f} °C, critical are {:.0f}".format(*max(temps)))
    return "; ".join(said) or None

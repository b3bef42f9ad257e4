"""Clock, heat and power of a GPU, from its sensors to the page. We have no such parts: amdgpu's sysfs is laid out as files, nvidia-smi is a
program of ours that prints what it prints. Threads, processes, train.py and the loop are real."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import Checkout
from clones import clone, edit_harness, run, summary
from nights import HEADER, outcome, row, write_run

import results
from harness import machine
from harness.common import telemetry

SENSORS = {"freq1_input": "2012000000", "temp1_input": "71500", "temp1_crit": "100000", "power1_average": "98500000"}


def lay_out_card(root, address="0000:c5:00.0", number=1, sensors=SENSORS, vendor="0x1002"):
    """A graphics card as Linux shows it: /sys/class/drm/cardN/device is a link to the device at its address."""
    device = Path(root) / "sys/devices" / address
    (device / "hwmon/hwmon3").mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    for name, text in sensors.items():
        (device / "hwmon/hwmon3" / name).write_text(text + "\n")
    card = Path(root) / f"sys/class/drm/card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    return device


def test_sensors_of_amdgpu(tmp_path):
    device = lay_out_card(tmp_path)
    lay_out_card(tmp_path, "0000:01:00.0", 0, vendor="0x10de")
    (card,) = telemetry.amd_cards(tmp_path)
    assert telemetry.read_amd(card) == {"clock_mhz": 2012, "temp_c": 71.5, "critical_c": 100, "watts": 98.5}
    for name in ("freq1_input", "power1_average", "temp1_crit"):
        (device / "hwmon/hwmon3" / name).unlink()
    (device / "hwmon/hwmon3/power1_input").write_text("45000000\n")
    (device / "hwmon/hwmon3/temp1_input").write_text("N/A\n")
    assert telemetry.read_amd(card) == {"watts": 45}
    (device / "pp_dpm_sclk").write_text("0: 600Mhz\n1: 1100Mhz *\n2: 2900Mhz\n")
    assert telemetry.read_amd(card) == {"watts": 45, "clock_mhz": 1100}
    assert telemetry.read_amd(str(tmp_path / "gone")) == {}
    (device / "hwmon/hwmon3/temp1_crit").write_text("0\n")  # not known: or each run would have throttled
    assert telemetry.read_amd(card) == {"watts": 45, "clock_mhz": 1100}


@pytest.mark.parametrize(("pci", "cards", "clock"), [
    ("0000:c5:00.0", 2, "2012"), ("0000:03:00.0", 2, "1500"), (None, 2, None), (None, 1, "2012"), ("0000:99:00.0", 1, "2012"),
])  # fmt: skip
def test_the_card_of_the_run_is_sampled(tmp_path, pci, cards, clock):
    """The one at the address; without it the only one, and of several none rather than a wrong one."""
    lay_out_card(tmp_path)
    if cards == 2:
        lay_out_card(tmp_path, "0000:03:00.0", 0, {"freq1_input": "1500000000"})
    sampler = telemetry.Sampler("amd", pci, 0.01, tmp_path)
    sampler.start()
    end = time.monotonic() + 5
    while clock and not sampler.samples and time.monotonic() < end:
        time.sleep(0.01)
    sampler.stop()
    assert sampler.summary().get("gpu_clock_mhz_mean") == clock and not (sampler.thread and sampler.thread.is_alive())


def nvidia_smi(folder, monkeypatch, body):
    (folder / "nvidia-smi").write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_nvidia_smi_is_started_once_and_ended(tmp_path, monkeypatch):
    body = f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    body += "for i in range(10**6):\n    print(f'{1600 + 100 * (i % 2)}, {60 + i % 5}, [N/A]', flush=True)\n    time.sleep(0.01)"
    nvidia_smi(tmp_path, monkeypatch, body)
    sampler = telemetry.Sampler("nvidia", "0000:c5:00.0", 0.5)
    sampler.start()
    end = time.monotonic() + 20
    while len(sampler.samples) < 10 and time.monotonic() < end:
        time.sleep(0.02)
    sampler.stop()
    found = sampler.summary()
    assert set(found) == {"gpu_clock_mhz_mean", "gpu_clock_mhz_min", "gpu_temp_c_max"}  # no watts: they are not known
    assert found["gpu_clock_mhz_min"] == "1600" and 1600 < int(found["gpu_clock_mhz_mean"]) < 1700 and found["gpu_temp_c_max"] == "64"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--id=0000:c5:00.0" in call and "--loop-ms=500" in call and sampler.process.poll() is not None


@pytest.mark.parametrize("body", ["sys.exit('no devices were found')", "print('not, what')", "print('1')\nprint(chr(0) * 99)"])
def test_sensors_that_fail_fail_no_run(tmp_path, monkeypatch, body):
    nvidia_smi(tmp_path, monkeypatch, body)
    for sampler in (telemetry.Sampler("nvidia", "0000:c5:00.0", 0.1), telemetry.Sampler("amd", None, 0.1, tmp_path), telemetry.Sampler()):
        sampler.start()
        time.sleep(0.1)
        sampler.stop()
        assert set(sampler.summary()) <= {"gpu_clock_mhz_mean", "gpu_clock_mhz_min"}
    monkeypatch.setattr(telemetry, "amd_cards", lambda root: 1 / 0)
    sampler = telemetry.Sampler("amd")
    sampler.start()
    sampler.stop()
    assert sampler.summary() == {}


def test_nvidia_smi_that_does_not_heed_sigterm_is_ended_too(tmp_path, monkeypatch):
    body = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    print('1600, 60, 90', flush=True); time.sleep(0.05)"
    )
    nvidia_smi(tmp_path, monkeypatch, body)
    sampler = telemetry.Sampler("nvidia", "0000:c5:00.0", 0.5)
    sampler.start()
    end = time.monotonic() + 20
    while not sampler.samples and time.monotonic() < end:
        time.sleep(0.02)
    sampler.stop()
    assert sampler.process.poll() is not None and not sampler.thread.is_alive() and sampler.summary()["gpu_watts_mean"] == "90.0"


def curve(*clocks, every=5, **more):
    return [(every * (i + 1), {"clock_mhz": clock} | more) for i, clock in enumerate(clocks)]


@pytest.mark.parametrize(("samples", "words"), [
    ([], None),
    (curve(*[2000] * 12, *[1850] * 30), None),  # 7.5 % slower after the first minute
    (curve(*[2000] * 12, *[1750] * 30), "2000 MHz in the first minute, 1750 after it"),
    (curve(*[2000] * 12, 900, *[2000] * 30), None),  # a reading between two steps
    (curve(*[2900] * 3, *[1400] * 9), None),  # a minute is not over
    (curve(2000, 2000, temp_c=94.9, critical_c=100.0), None),
    (curve(2000, 2000, temp_c=95.2, critical_c=100.0), "95 °C, critical are 100"),
    (curve(2000, 2000, temp_c=111.0), None),  # no one says what is critical
])  # fmt: skip
def test_when_a_run_throttled(samples, words):
    assert telemetry.throttled(samples) == words
    sampler = telemetry.Sampler()
    sampler.samples = samples
    assert sampler.summary().get("gpu_throttled") == words


def test_numbers_of_a_run(tmp_path):
    sampler = telemetry.Sampler()
    sampler.samples = [
        (t, {"clock_mhz": clock, "temp_c": temp, "watts": 100 + t}) for t, clock, temp in ((5, 2000, 70.4), (10, 1901, 71.6))
    ]
    expected = {"gpu_clock_mhz_mean": "1950", "gpu_clock_mhz_min": "1901", "gpu_temp_c_max": "72", "gpu_watts_mean": "107.5"}
    assert sampler.summary() == expected


def test_sensors_of_a_device(monkeypatch):
    assert machine.sensors(torch.device("cpu")).maker is None
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC5, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    sampler = machine.sensors(torch.device("cuda"))
    assert sampler.pci == "0000:c5:00.0" and sampler.maker == ("amd" if torch.version.hip else "nvidia")
    del found.pci_bus_id
    assert machine.sensors(torch.device("cuda")).pci is None


def test_lines_of_the_summary(demo, tmp_path):
    """After all others; and saved with the model, for the summary of its evaluation."""
    lay_out_card(tmp_path / "root")
    folder = clone(tmp_path, DEPTH=1)
    sensors = f"__import__('harness.common.telemetry').common.telemetry.Sampler('amd', None, 0.05, {str(tmp_path / 'root')!r})"
    edit_harness(folder, "machine.sensors(device)", sensors)
    done = run(folder, "--keep", AUTORESEARCH_TIME_BUDGET="1", AUTORESEARCH_RUN="a token")
    assert done.returncode == 0, done.stderr
    lines = {"gpu_clock_mhz_mean": "2012", "gpu_clock_mhz_min": "2012", "gpu_temp_c_max": "72", "gpu_watts_mean": "98.5"}
    found = {key: value.strip() for key, value in summary(done.stdout).items()}
    assert list(found.items())[-4:] == list(lines.items()) and list(found)[-5] == "run"
    assert torch.load(folder / "model.pt", weights_only=True)["facts"]["sensors"] == lines


def test_verdict_says_that_the_gpu_throttled(tmp_path):
    """And the run's lines are kept."""
    series = Checkout(tmp_path / "a project").make()
    series.call("begin", "nov29")
    lines = 'gpu_clock_mhz_mean=2012, gpu_watts_mean="98.5", gpu_throttled="97 °C, critical are 100"'
    value = 'print(f"Evaluated {TOKENS:,} tokens: val_bpb {VALUE:.6f}")'
    series.edit(f"{value}; summary({lines}); sys.exit(0)", VALUE=1.9)
    output = series.call("try", "hot")
    assert output.startswith("keep run 2") and "warning: the GPU throttled (97 °C, critical are 100): fewer steps" in output
    assert "throttled" not in series.call("show", "1") and len(output.splitlines()) <= 12
    found = series.run_json(2)["summary"]
    assert (found["gpu_clock_mhz_mean"], found["gpu_watts_mean"]) == (2012, 98.5) and "gpu_watts_mean 98.5" in series.call("show", "2")


def test_page_shows_them_beside_the_run(tmp_path):
    commits, first = [letter * 40 for letter in "ab"], outcome(1, "a" * 40, 1.2, "baseline")
    second = outcome(2, "b" * 40, 1.1)
    second["summary"] |= {"gpu_clock_mhz_mean": 2012, "gpu_clock_mhz_min": 1890, "gpu_temp_c_max": 97, "gpu_watts_mean": 98.5}
    second["summary"]["gpu_throttled"] = "97 °C, critical are 100"
    for made in (first, second):
        write_run(tmp_path, made)
    (tmp_path / "results.tsv").write_text(
        HEADER + row(commits[0], 1.2, 6, "keep", "baseline") + row(commits[1], 1.1, 6, "keep", "hot"), encoding="utf-8"
    )
    night = results.read(tmp_path)
    table, overview = results.experiments_table(night), results.overview(night)
    assert "2,012 MHz · at least 1,890 MHz · up to 97 °C · 98 W" in table and table.count("the GPU throttled: 97 °C") == 1
    assert "1 run throttled (#2)" in overview and night.summary["throttled"] == [2]
    assert table.count(" MHz") == 2  # nothing where nothing is known

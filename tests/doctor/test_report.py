"""doctor.py --report: what it holds, what it must not hold, and that whatever fails in it, it is written.

The Strix Halo is a tree of files and a runner of commands that answers what its programs would (test_doctor.py): we have none. The report
of the machine that runs the tests, as one without a GPU, is real.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clones import clone
from conftest import PROJECT
from test_doctor import GPU_8060S, no_kfd, strix_halo, write

from doctor import diagnosis, report
from doctor.check import Check, Fault
from doctor.machine import Machine

LINES = """Device: AMD Radeon Graphics gfx1151, torch 2.13.0+rocm10.0.0, bf16 peak 49.6 TFLOP/s
Attention: windows (ours up to 1024, ours up to 2048); the rest: fused kernels; 2.389e+08 FLOPs per token
"""
STEP = "step {:05d} (0.0%) | loss: 8.0 | lrm: 1.00 | dt: 1400ms | tok/sec: 93,623 | mfu: 45.1% | epoch: 1 | remaining: 600s\n"
FACTS = {"ms": [1400, 1410, 1390, 1405, 1395, 1400, 1400, 1400, 1420, 1380], "tokens_per_s": 93622, "mfu_percent": 45.1, "peak_mb": 5123.4}
FACTS |= {"startup_s": 131.2, "sensors": {"gpu_clock_mhz_mean": "2012", "gpu_temp_c_max": "78", "gpu_watts_mean": "101.2"}}
TEN_STEPS = (0, LINES + "".join(STEP.format(i) for i in range(21)) + json.dumps(FACTS) + "\n", "")
PROBED = [{"what": "copy", "bytes_per_s": 210.6e9}, {"what": "gemm", "library": "hipBLASLt", "why": "hung for 420 s"}]


def answering(ten_steps):
    """A runner of commands for a Strix Halo whose torch works."""
    done = json.dumps({"stage": "done", "devices": [GPU_8060S]})

    def run(command, timeout=5, environ=None):
        if command[-1] == report.TEN_STEPS:
            return ten_steps(environ) if callable(ten_steps) else ten_steps
        if command[0] == "git":
            return 0, "abc1234 of 2026-11-30\n" if "log" in command else " M train.py\n", ""
        return 0, {"--canary": done, "convolution": '{"why": null}', "batch norm": '{"why": null}'}.get(command[-1], "amdgpu: fine\n"), ""

    return run


@pytest.fixture
def halo(tmp_path, monkeypatch):
    """A simulated Strix Halo, and where its report goes."""
    machine = strix_halo(tmp_path / "root")
    machine.run = answering(TEN_STEPS)
    write(machine, "etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"')
    write(machine, "proc/cpuinfo", "model name\t: AMD RYZEN AI MAX+ 395\n" * 32)
    write(machine, "sys/class/dmi/id/bios_version", "1.0.0.5")
    write(machine, "proc/sys/kernel/hostname", "janes-strix.lan")
    write(machine, "sys/class/drm/card1/device/fw_version/smc_fw_version", "0x0b1d0d00")
    monkeypatch.setattr(report, "PATH", str(tmp_path / "report.md"))
    monkeypatch.setattr(diagnosis, "measure", lambda machine: PROBED)
    return machine


def made(machine):
    report.write(machine)
    return Path(report.PATH).read_text()


def test_report_of_a_strix_halo(halo, capsys):
    text = made(halo)
    out, err = capsys.readouterr()
    assert out == report.PATH + "\n" and err.startswith("autoresearch: the report runs the checks") and "Ten training steps" in err
    titles = re.findall("^## (.*)", text, re.M)
    assert titles == list(report.PARTS) and len(text.splitlines()) < 100
    for words in (
        "Strix Halo (gfx1151): AMD Radeon Graphics; Linux 6.18.7-generic; torch 2.13.0+rocm10.0.0",
        "All is well.",
        "| system | Ubuntu 24.04.3 LTS |",
        "| machine, BIOS | 1.0.0.5 |",
        "| processor | AMD RYZEN AI MAX+ 395, 32 threads |",
        "| of its command line | ttm.pages_limit=25165824 |",
        "| GPU | AMD Radeon Graphics, gfx1151, 62.0 GiB |",
        "| card: firmware | MES 0x00000085, SMC 0x0b1d0d00 |",
        "| card: memory | VRAM 0.5 GiB, GTT 96.0 GiB |",
        "| card: now | 600 MHz, 41 °C, 12 W |",
        "| ROCm | 10.0.0 |",
        "amd-torch-device-gfx115x 2.13.0+rocm10.0.0, triton 3.8.0+git4cff872c.rocm10.0.0",
        "| this project | abc1234 of 2026-11-30, changed: train.py |",
        "- `TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1`",
        "copy: 211 GB/s\ngemm hipBLASLt: not measured, hung for 420 s",
        LINES,
        "| ms a step | 1,400 (median; each: 1400, 1410, 1390, 1405, 1395, 1400, 1400, 1400, 1420, 1380) |",
        "| tokens a second | 93,622 |\n| MFU | 45.1 % |\n| peak memory | 5,123 MiB |",
        "| GPU meanwhile | clock_mhz_mean 2012, temp_c_max 78, watts_mean 101.2 |",
    ):
        assert words in text, words
    assert "step 000" not in text and "Not finished" not in text


def test_report_names_nobody(halo):
    home = "/home/jane"
    halo.environ |= {
        "HOME": home,
        "USER": "jane",
        "LD_LIBRARY_PATH": f"{home}/rocm/lib",
        "HF_TOKEN": "hf_abc",
        "AUTORESEARCH_CACHE": "/data/jane_x/c",
    }
    halo.environ |= {"AUTORESEARCH_TORCH_INDEX": "https://10.1.2.3/simple", "MIOPEN_TOKEN": "abcdefgh", "AUTORESEARCH_HARDWARE": "gfx1151"}
    halo.access = lambda path, mode: "kfd" not in path  # whose mend names the user
    disk = "0f3c5a7e-1b2d-4c6f-8e9a-0123456789ab"
    write(halo, "proc/cmdline", f"root=UUID={disk} ip=192.168.1.7::192.168.1.1 ttm.pages_limit=25165824")
    stops = made(halo)
    halo.access = os.access
    private = f"jane@janes-strix.lan at janes-strix, {home}/x.py, {PROJECT}/train.py 192.168.1.7 fe80::1f2e aa:bb:cc:dd:ee:ff GPU-{disk}"
    public = "c10::Error torch::add at 21:11:57 on 0000:c5:00.0, driver 580.159.03, janet, Linux 6.18.7, 10.0.0"
    halo.run = answering((1, "", f"{private}\n{public}\nRuntimeError: {home}/venv/bin/python"))
    text = made(halo)
    assert "usermod -aG render,video USER" in stops and "LD_LIBRARY_PATH=~/rocm/lib" in stops
    assert "`AUTORESEARCH_TORCH_INDEX is set`" in text and "`MIOPEN_TOKEN is set`" in text and "HF_TOKEN" not in text
    assert "(address) at , ~/x.py, ./train.py (address) (address) (address) (id)" in text and public in text
    assert "RuntimeError: ~/venv/bin/python" in text
    assert "AUTORESEARCH_CACHE=/data/USER_x/c" in text
    for word in (
        r"\bjane\b",
        "jane_",
        "strix.lan",
        "janes-strix",
        "/home",
        r"192\.168",
        r"10\.1\.2",
        "hf_abc",
        "abcdefgh",
        disk,
        str(PROJECT),
    ):
        assert not re.search(word, stops + text), word


@pytest.mark.parametrize(("text", "shown"), [
    ("no answer from 192.168.1.7.", "no answer from (address)."), ("192.168.1.7:6379", "(address):6379"),
    ("80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:0c:51:4a", "(address)"),
    ("Linux 6.6.87.2-microsoft-standard-WSL2", "Linux 6.6.87.2-microsoft-standard-WSL2"),
    ("10.0.0.1.2 7.14.0a20260609", "10.0.0.1.2 7.14.0a20260609"),
])  # fmt: skip
def test_what_is_an_address(text, shown):
    assert report.anonymous(text, ({}, [], [])) == shown


@pytest.mark.parametrize("home", ["//", ".", "", "~", "/"])
def test_home_that_is_no_folder_of_its_own_replaces_nothing(home):
    names = report.names_of(Machine(environ={"HOME": home, "USER": "jane"}))
    assert report.anonymous("at step 3. of /usr/lib", names) == "at step 3. of /usr/lib"


def test_name_at_a_line_s_end_is_left_out_whole(halo):
    """Lines are cut after names are left out: half a name would stay."""
    lines = [f"{'x ' * n}janes-strix.lan {PROJECT}/train.py" for n in range(report.LONGEST // 2 - 50, report.LONGEST // 2)]
    halo.run = answering((0, "\n".join(lines[::4]) + "\n" + json.dumps(FACTS), ""))
    text = made(halo)
    assert "x  ./train.py" in text and not re.search(r"janes|strix\.|-strix|" + str(PROJECT)[:6], text)


def test_settings_are_a_line_each(halo):
    halo.environ |= {"CUDA_A": "x\n" * 300 + "# title", "HIP_B": "a`b|c", "NCCL_COMM_ID": "head:6379", "ROCM_CREDENTIALS": "abcdefgh"}
    halo.environ |= {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512"}
    halo.environ |= {"HSA_B": "\x1b[31mred\x1b[0m\x00\x9b"}
    text = made(halo)
    assert "- `HSA_B=red`" in text
    assert "\n# title" not in text and "- `HIP_B=a'b|c`" in text and len(text.splitlines()) < 100
    assert "`NCCL_COMM_ID is set`" in text and "`ROCM_CREDENTIALS is set`" in text and "abcdefgh" not in text
    assert "- `PYTORCH_HIP_ALLOC_CONF=max_split_size_mb:512`" in text


def test_files_of_many_cards_and_without_sense(halo):
    for n in range(2, 10):
        write(halo, f"sys/class/drm/card{n}/device/vendor", "0x1002")
        write(halo, f"sys/class/drm/card{n}/device/mem_info_gtt_total", "-x")
        write(halo, f"sys/class/drm/card{n}/device/vbios_version", "113-A\n|\n# b")
    text = made(halo)
    assert "| card: memory | VRAM 0.5 GiB" in text and "| card 1: VBIOS | 113-A \\| # b |" in text
    assert "card 2" not in text and "| more cards | 7 |" in text


def crash(*_):
    raise RuntimeError("the probe broke")


def test_part_that_fails_is_said_and_the_next_one_follows(halo, monkeypatch):
    monkeypatch.setattr(diagnosis, "measure", crash)
    monkeypatch.setattr(report, "version_table", lambda machine: os._exit(11))
    halo.run = answering((None, LINES + STEP.format(0) * 3, ""))
    text = made(halo)
    assert "## Versions\n\nthe check itself crashed\n" in text and "This part failed: RuntimeError: the probe broke" in text
    assert "Not measured: it hung for 900 s after 3 steps.\n\n```\nDevice: AMD Radeon Graphics" in text
    halo.run = answering((3, "", "FAIL: there is no data: run python prepare.py\n"))
    text = made(halo)
    assert "ended with exit code 3 after 0 steps. Data that is not there is prepared by `./run.sh --setup`." in text
    assert "FAIL: there is no data" in text


def test_machine_that_freezes_leaves_its_report(halo):
    """What is there when the last part begins: all the others, and which one it was in."""
    seen = []
    halo.run = answering(lambda environ: seen.append(Path(report.PATH).read_text()) or TEN_STEPS)
    made(halo)
    assert "copy: 211 GB/s" in seen[0] and seen[0].rstrip().endswith("ended in this part.") and seen[0].count("Not finished") == 1
    assert [path.name for path in Path(report.PATH).parent.iterdir() if path.name.startswith("report")] == ["report.md"]


def test_what_stops_a_run_is_not_tried(halo):
    no_kfd(halo)
    halo.run = answering(crash)
    text = made(halo)
    assert text.count("Not run: what stops a run stops this too (driver).") == 2 and "STOP    driver" in text


def test_report_is_200_lines_at_most(halo, monkeypatch):
    monkeypatch.setattr(diagnosis, "measure", lambda machine: PROBED * 200)
    halo.environ |= {f"MIOPEN_SETTING_{i}": "x" * 1000 for i in range(300)}
    halo.run = answering((1, "".join(f"line {i} {'x' * 5000}\n" for i in range(500)), "error\n" * 500))
    fault = Check(lambda machine: Fault("fault " * 40), "gfx1151", "note", "why " * 40, "mend " * 40)
    monkeypatch.setattr(diagnosis, "CHECKS", (fault,) * 40)
    text = made(halo)
    assert 150 < len(text.splitlines()) <= 200 and max(map(len, text.splitlines())) <= report.LONGEST and "lines left out" in text


def test_folder_in_the_report_s_place(halo, capsys):
    Path(report.PATH).mkdir()
    with pytest.raises(SystemExit) as ended:
        report.write(halo)
    assert ended.value.code == 3 and capsys.readouterr().err.splitlines()[-1].endswith(": move that folder away")
    assert [path.name for path in Path(report.PATH).parent.iterdir() if path.name.startswith("report")] == ["report.md"]


def test_place_that_cannot_be_written(halo, monkeypatch, capsys):
    monkeypatch.setattr(report, "PATH", "/proc/report.md")
    with pytest.raises(SystemExit) as ended:
        report.write(halo)
    assert ended.value.code == 3 and "the report can't be written" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def checkout(tmp_path):
    """Of this project, with a small train.py, and nobody else's report.md."""
    folder = tmp_path / "my project"
    folder.mkdir()
    clone(folder, DEPTH=2, TOTAL_BATCH_SIZE=512, DEVICE_BATCH_SIZE=2)
    for name in ("doctor.py", "prepare.py"):
        (folder / name).unlink(missing_ok=True)
        shutil.copy(PROJECT / name, folder)  # a link would be followed to where it lies
    (folder / "harness").unlink()
    for name in ("harness", "doctor"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_report_of_this_machine(demo, checkout):
    """As a machine without a GPU: real checks, ten real steps of the demonstration. Nothing else is left behind."""
    before = {path.name for path in checkout.iterdir()}
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    environment = os.environ | hidden | {"AUTORESEARCH_HARDWARE": "none", "AUTORESEARCH_TIME_BUDGET": "0.01"}
    command = [sys.executable, checkout / "doctor.py", "--report"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{checkout}/report.md\n", done.stderr
    text = (checkout / "report.md").read_text()
    assert "## What the doctor says\n\n```\nno GPU; Linux " in text and "| this project | not in git |" in text
    assert "Not run: there is no GPU." in text and "GPU meanwhile" not in text
    each = re.search(r"\| ms a step \| ([\d,]+) \(median; each: ([\d, ]+)\) \|", text)
    assert each and len(each[2].split(", ")) == 10, text
    rate = float(re.search(r"tokens a second \| ([\d,]+)", text)[1].replace(",", ""))
    assert rate == pytest.approx(10 * 512 * 1000 / sum(map(int, each[2].split(", "))), rel=0.01)
    assert {path.name for path in checkout.iterdir()} - before <= {"report.md", "__pycache__"}


def test_ten_steps_need_data(tmp_path):
    environment = os.environ | {"AUTORESEARCH_CACHE": str(tmp_path), "AUTORESEARCH_DATASET": "demo"}
    done = subprocess.run([sys.executable, PROJECT / "doctor/ten_steps.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.startswith("FAIL: ") and "prepare.py" in done.stderr, done.stderr

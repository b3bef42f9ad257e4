"""The report: one Markdown document about this machine, to be pasted into an issue. It names nobody.

    ./run.sh --report      (or python doctor.py --report; minutes)

It writes report.md beside doctor.py: what doctor.py says, versions and settings, what doctor.py --probe measures, and ten training steps
(ten_steps.py), at most 200 lines. Each part works in processes of its own: where one crashes or hangs, the report says so and
goes on. The file is on the disk before each part begins: a machine that freezes leaves a report that says in which part.

Left out: the names of user and host, the home folder and this one's place, addresses, serial numbers, and settings that could be secrets.
"""

import contextlib
import datetime
import json
import os
import platform
import pwd
import re
import socket
import statistics
import sys

from doctor import diagnosis, probe, screen
from doctor.check import Check, guarded
from doctor.machine import ROOT
from doctor.words import gib, one_line, say, sensors
from harness.common import telemetry
from harness.common.files import replace_file
from harness.common.protocol import EXIT_ENVIRONMENT

PATH = os.path.join(ROOT, "report.md")
TEN_STEPS = os.path.join(ROOT, "doctor", "ten_steps.py")
STEPS_SECONDS = 900  # start-up compiles and chooses, in minutes at the first time
MOST, LONGEST = 200, 500  # lines of the report, characters of a line
MOST_CARDS = 2  # that the versions tell of

# ---------------------------------------------------------------------------
# Parts: each takes the machine and what earlier parts have found, and returns its lines
# ---------------------------------------------------------------------------


def doctor_says(machine, found):
    rows, _ = diagnosis.look(machine)
    found["stops"] = [row.check for row in rows if row.level == "stop"]
    names = names_of(machine)
    for row in rows:  # before their lines are broken, where a folder would be in two of them
        row.seen, row.mend = anonymous(row.seen, names), anonymous(row.mend, names)
    return fenced(screen.screen(machine, rows, 110).splitlines(), 60)


def versions(machine, found):
    return apart(version_table, machine)


def settings(machine, found):
    return apart(setting_list, machine)


def measured(machine, found):
    if why := not_run(machine, found, gpu=True):
        return [why]
    return fenced([probe.words(row) for row in diagnosis.measure(machine)], 45)


def ten_steps(machine, found):
    if why := not_run(machine, found):
        return [why]
    environ = dict(machine.environ) | {"AUTORESEARCH_HARDWARE": machine.hardware, "PYTHONUNBUFFERED": "1"}
    code, out, err = machine.run([sys.executable, TEN_STEPS], STEPS_SECONDS, environ)
    lines, facts = [], None
    for line in filter(str.strip, out.splitlines()):
        with contextlib.suppress(ValueError, TypeError):
            facts = dict(json.loads(line))
            continue
        lines.append(line.rpartition("\r")[2])
    before = [line for line in lines if not line.startswith("step ")]  # what train.py chose and found
    steps = len(lines) - len(before)
    if code == 0 and facts:
        return fenced(before, 28) + steps_table(facts, machine.hardware)
    end = f"hung for {STEPS_SECONDS} s" if code is None else f"ended with exit code {code}"
    mend = " Data that is not there is prepared by `./run.sh --setup`." if code == EXIT_ENVIRONMENT else ""
    return [f"Not measured: it {end} after {steps} steps.{mend}", "", *fenced([*before, *err.strip().splitlines()[-6:]], 18)]


PARTS = {
    "What the doctor says": doctor_says,
    "Versions": versions,
    "Settings": settings,
    "What this machine can do (`doctor.py --probe`)": measured,
    "Ten training steps (`doctor/ten_steps.py`)": ten_steps,
}


def not_run(machine, found, gpu=False):
    """Why a part that computes is left out, or None."""
    if "stops" not in found:
        return "Not run: what the doctor says is not known."
    if found["stops"]:
        return f"Not run: what stops a run stops this too ({', '.join(found['stops'])})."
    return "Not run: there is no GPU." if gpu and machine.hardware == "none" else None


def apart(function, machine):
    """The lines of function(machine), made in a process of its own, as a check is."""
    row = guarded(Check(function, "", "", "", ""), machine)
    return row.seen.splitlines() if row else ["nothing"]


def version_table(machine):
    torch, total = machine.torch, machine.memory().get("MemTotal", 0)
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read("etc/os-release") or "", re.M)
    cpu = re.findall(r"^model name\s*: (.*)", machine.read("proc/cpuinfo") or "", re.M)
    board = (machine.read(f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name", "bios_version", "bios_date"))
    boot = [word for word in (machine.read("proc/cmdline") or "").split() if re.match(r"(amdgpu|ttm|amd_iommu|iommu|amd_pstate)\b", word)]
    rows = {
        "system": system and system[1],
        "kernel": machine.read("proc/sys/kernel/osrelease"),
        "of its command line": " ".join(boot),
        "machine, BIOS": " ".join(filter(None, board)),
        "processor": cpu and f"{cpu[0]}, {len(cpu)} threads",
        "memory": total and gib(total),
        "GPU": "; ".join(map(gpu_words, machine.canary.get("devices", []))) or " ".join(machine.parts),
        **card_rows(machine),
        "NVIDIA driver": machine.nvidia_version,
        "Python": platform.python_version(),
        "torch": torch.get("version") or "not installed",
        "ROCm": torch.get("rocm"),
        "AOTriton": torch.get("aotriton"),
        "packages": ", ".join(f"{name} {version}" for name, version in torch.get("packages", {}).items()),
        "this project": project(machine),
    }
    cells = [(name, " ".join(str(text).split()).replace("|", "\\|")) for name, text in rows.items() if text]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)])


def gpu_words(device):
    arch, memory = device.get("gcnArchName", "").split(":")[0], device.get("total_memory")
    return ", ".join(filter(None, (device.get("name"), arch, memory and gib(memory))))


def card_rows(machine):
    """Firmware, memory and sensors of AMD's cards, of many the first ones."""
    rows = {}
    for number, card in enumerate(machine.cards[:MOST_CARDS]):
        name = f"card {number}" if number else "card"
        paths = machine.glob(os.path.relpath(f"{card}/fw_version/*_fw_version", machine.root))
        firmware = [f"{os.path.basename(path)[:-11].upper()} {machine.read(path)}" for path in paths]
        firmware = [words for words in firmware if not words.endswith((" None", " 0x00000000"))]
        sizes = {kind: machine.card_bytes(card, kind.lower()) for kind in ("VRAM", "GTT")}
        rows |= {
            f"{name}: VBIOS": machine.read(f"{card}/vbios_version"),
            f"{name}: firmware": ", ".join(firmware),
            f"{name}: memory": ", ".join(f"{kind} {gib(size)}" for kind, size in sizes.items() if size),
            f"{name}: now": sensors(telemetry.read_amd(card), "clock_mhz", "temp_c", "critical_c", "watts"),
        }
    if more := machine.cards[MOST_CARDS:]:
        rows["more cards"] = len(more)
    return rows


def project(machine):
    """The commit that is checked out, and the files that differ from it."""
    code, commit, _ = machine.run(["git", "-C", ROOT, "log", "-1", "--format=%h of %cs"], 5)
    if code:
        return "not in git"
    _, changed, _ = machine.run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"], 5)
    names = [line[3:] for line in changed.splitlines()]
    return commit.strip() + f", changed: {', '.join(names[:8])}{', …' * (len(names) > 8)}" * bool(names)


OURS = r"(AUTORESEARCH|GPU|HSA|HIP|ROCM|ROCR|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|CUDA|MIOPEN|AMD|AMDGCN|NCCL|LD_LIBRARY|OMP|MKL)_"


def setting_list(machine):
    """The environment variables that can matter. A value that names a place in the network, or could be a secret, is not shown."""
    lines = []
    for name, value in sorted(machine.environ.items()):
        if not re.match(OURS, name) or not value or name in ("AUTORESEARCH_SAID", "AUTORESEARCH_RUN", "AUTORESEARCH_SYSROOT"):
            continue
        secret = re.search("TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH_|AUTH$", name) or re.search(
            r"://|^[A-Za-z][A-Za-z0-9.-]*:\d{2,5}$", value
        )
        shown = " ".join(value.split()).replace("`", "'")
        lines.append(f"- `{name}{' is set' if secret else '=' + shown}`")
    return "\n".join(cut(lines, 24)) or "none"


def steps_table(facts, hardware):
    ms = facts["ms"]
    mfu = "not known" if facts["mfu_percent"] is None else f"{facts['mfu_percent']:.1f} %"
    rows = {
        "ms a step": f"{statistics.median(ms):,.0f} (median; each: {', '.join(map(str, ms))})",
        "tokens a second": f"{facts['tokens_per_s']:,}",
        "MFU": mfu,
        "peak memory": f"{facts['peak_mb']:,.0f} MiB",
        "start-up": f"{facts['startup_s']:.0f} s until the first timed step",
        "GPU meanwhile": ", ".join(f"{name.removeprefix('gpu_')} {value}" for name, value in facts["sensors"].items()),
    }
    if hardware != "none" and not rows["GPU meanwhile"]:
        rows["GPU meanwhile"] = "its sensors say nothing"
    return ["", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items() if text)]


# ---------------------------------------------------------------------------
# The document
# ---------------------------------------------------------------------------


def fenced(lines, most):
    """The lines, at most so many, as they are."""
    return ["```", *cut([line.replace("```", "'''") for line in lines], most), "```"]


def short(line):
    """A line of a length that is read. Of one that is `anonymous`: in half a name nobody sees the name."""
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def cut(lines, most):
    """At most so many lines: of more the middle is left out."""
    if len(lines) <= most:
        return lines
    return [*lines[: most // 2], f"… {len(lines) - most + 1} lines left out …", *lines[len(lines) - (most - most // 2 - 1) :]]


# What is called so is nobody's name, and words of the report.
ORDINARY = {None, "", "root", "user", "admin", "localhost", "linux", "ubuntu", "debian", "fedora", "archlinux", "amd", "gpu", "torch"}


def names_of(machine):
    """(folders and what stands for them, names of people, names of the host), longest first: of this process and of the machine's files."""
    folders, people = {ROOT: "."}, {machine.environ.get(name) for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(os.getuid())
        people.add(account.pw_name)
        folders[account.pw_dir] = "~"
    folders[machine.environ.get("HOME") or "~"] = "~"
    folders = {folder: sign for folder, sign in folders.items() if folder.startswith("/")}
    folders |= {os.path.realpath(folder): sign for folder, sign in folders.items()}
    hosts = {socket.gethostname(), platform.node(), *(machine.read(name) or "" for name in ("proc/sys/kernel/hostname", "etc/hostname"))}
    hosts |= {host.partition(".")[0] for host in hosts}
    return (
        {folder.rstrip("/"): folders[folder] for folder in sorted(folders, key=len, reverse=True) if folder.strip("/")},
        sorted(people - ORDINARY, key=len, reverse=True),
        sorted(hosts - ORDINARY, key=len, reverse=True),
    )


HEX = r"[0-9a-fA-F]{1,4}"
ADDRESSES = (
    (rf"(?<![\w:.])(?:{HEX}:){{3,}}{HEX}(?![\w:])", "(address)"),  # IPv6, MAC
    (rf"(?<![\w:.])(?:{HEX}:){{0,6}}{HEX}::(?:{HEX}(?::{HEX}){{0,6}})?(?![\w:])", "(address)"),
    (r"(?<![\w.+-])(?!127\.0\.0\.1)(?:\d{1,3}\.){3}\d{1,3}(?![\w+-]|\.\w)", "(address)"),
    (r"\b\w[\w.+-]*@[\w-]+(?:\.[\w-]+)+", "(address)"),
    (r"\b(?:GPU-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "(id)"),  # a disk's, a GPU's
)


def anonymous(text, names, addresses=True):
    """The text without what tells whose machine this is. names: of names_of. addresses: whether what looks like one goes too."""
    folders, people, hosts = names
    for folder, sign in folders.items():
        text = re.sub(rf"{re.escape(folder)}(?![\w-])", sign, text)
    text = re.sub(r"/(?:home|Users)/[^/\s:\"'`,;)]+", "~", text)
    text = re.sub(r"/root(?![\w-])", "~", text)
    for pattern, word in ADDRESSES if addresses else ():
        text = re.sub(pattern, word, text)
    for name, word in (*((name, "USER") for name in people), *((name, "") for name in hosts)):
        text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", word, text)
    return text


CONTROL = r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # colours of a terminal, and what no text holds


def document(machine, sections):
    """sections: title → lines."""
    names, parts = names_of(machine), [f"# autoresearch for Strix Halo: a report of {datetime.date.today()}"]
    for title, lines in sections.items():
        # A version can look like an address: this part is made of files and names that hold none.
        text = anonymous(re.sub(CONTROL, "", "\n".join(lines)), names, addresses=title != "Versions")
        parts += ["", f"## {title}", "", *map(short, cut(text.split("\n"), MOST))]
    return "\n".join(parts) + "\n"


def save(text):
    try:
        with replace_file(PATH, encoding="utf-8", errors="replace") as f:
            f.write(text)
    except OSError as error:
        mend = "move that folder away" if os.path.isdir(PATH) else f"make {os.path.dirname(PATH)} writable, and room in it"
        say(f"the report can't be written ({error}): {mend}")
        sys.exit(EXIT_ENVIRONMENT)


def write(machine):
    """The report of this machine; its place is printed."""
    runs = "the checks, --probe's measurements and ten training steps: some minutes. Leave the GPU to it"
    if machine.hardware == "none":
        runs = "the checks, and ten training steps of the demonstration: a minute or two"
    say(f"the report runs {runs}")
    sections, found = {}, {}
    for title, part in PARTS.items():
        say(f"{title} …")
        save(document(machine, sections | {title: ["Not finished: the report, or the machine, ended in this part."]}))
        try:
            sections[title] = part(machine, found)
        except Exception as error:
            sections[title] = [f"This part failed: {one_line(error)}"]
    save(document(machine, sections))
    say("it holds no name, address or serial number that we know of; read it before you paste it")
    print(PATH)

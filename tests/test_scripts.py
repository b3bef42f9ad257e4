"""run.sh, test.sh and env.sh, run for real in temporary copies of the project.

What is simulated, to be quick and to need no network: prepare.py and train.py are stubs, the packages are tiny wheels of the same names
in a folder that pip is pointed to, and GPUs are trees of files laid out as Linux' sysfs and /dev have them (AUTORESEARCH_SYSROOT).
Bash, venv, pip, signals, locks and files are the real ones.
"""

import ast
import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from conftest import called_once, made_once

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["run.sh", "test.sh", "env.sh", "doctor.py", "doctor", "harness", "pyproject.toml"]
NOWHERE = "http://127.0.0.1:9"  # nothing listens there

PREPARE = """
import os, signal, sys, time
if "--check" in sys.argv:
    open("started", "w").write(str(time.time()))
    sys.exit(not os.path.exists("data"))
if os.path.exists("slow-prepare"):
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"prepare stopped\\n"), sys.exit(3)))
    print("preparing", flush=True)
    time.sleep(20)
print("prepared", flush=True)
if os.path.exists("prepare-code"):
    sys.exit(int(open("prepare-code").read()))
open("data", "w").close()
"""

TRAIN = """
import os, signal, sys, time
print("train", sys.argv[1:], os.getcwd(), os.getpid(), os.environ["AUTORESEARCH_HARDWARE"], flush=True)
if "--wait" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        # not print, which may be at work already when the signal comes
        signal.signal(number, lambda number, _: (os.write(1, b"got %d\\n" % number), sys.exit(42)))
    print("waiting", flush=True)
    time.sleep(20)
sys.exit(int(os.environ.get("TRAIN_CODE", 0)))
"""

# A torch that says of itself and of the GPU what FAKE_GPU says: "" (none to be seen), "works", "no code", "crashes".
TORCH = """
import os
__version__ = {version!r}
class version:
    hip, cuda = {hip!r}, {cuda!r}
class cuda:
    is_available = staticmethod(lambda: bool(os.environ.get("FAKE_GPU")))
    device_count = staticmethod(lambda: 1)
    class get_device_properties:
        name = "a simulated GPU"
        __init__ = lambda self, index: None
compile = lambda function: function
class ones:
    def __init__(self, n, device):
        if os.environ["FAKE_GPU"] == "crashes":
            os.kill(os.getpid(), 11)
        if os.environ["FAKE_GPU"] == "no code":
            raise RuntimeError("invalid device function\\nand more")
        self.n = n
    __add__ = sum = item = lambda self, *_: self
    __ne__ = lambda self, other: False
"""


def torch_files(version):
    build = version.partition("+")[2]
    return {
        "torch/__init__.py": TORCH.format(version=version, hip="7.2" if "rocm" in build else None, cuda="13.0" if "cu" in build else None)
    }


def make_wheel(folder, name, version, files=None, requires=()):
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = dict(files or {f"{module}/__init__.py": f"__version__ = {version!r}\n"})
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

    def line(path, text):
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(text.encode())}\n"

    record = "".join(line(path, text) for path, text in files.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", record)


def requirement_names():
    text = (ROOT / "pyproject.toml").read_text()
    for block in re.findall(r"^(?:dependencies|test) = (\[\n.*?^\])", text, re.M | re.S):
        yield from (re.match(r"[\w-]+", line).group() for line in ast.literal_eval(block))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    def make(folder):
        for name in requirement_names():
            if name not in ("torch", "pytest"):
                make_wheel(folder, name, "3.8.0" if name == "triton" else "999")
        files = {"pytest/__init__.py": "", "pytest/__main__.py": "import sys; print('pytest', sys.argv[1:]); sys.exit(5)"}
        make_wheel(folder, "pytest", "999", files)
        for version in ("2.13.0+cpu", "2.12.0+rocm7.14.0"):
            make_wheel(folder, "torch", version, torch_files(version))
        make_wheel(folder, "wants-another-torch", "1", requires=["torch==2.12.0+rocm7.14.0"])
        make_wheel(folder, "something-new", "1")

    return made_once(tmp_path_factory, "wheels", make)


def clean_environment(wheels, folder):
    """What the scripts see: an empty machine (no GPU, whatever the real one has), pip pointed to the wheels, no settings of the user's."""
    names = (
        "AUTORESEARCH_",
        "PIP_",
        "UV_",
        "PYTORCH_",
        "HSA_",
        "VIRTUAL_ENV",
        "ROCM_",
        "HIP_",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "TORCH_",
        "CONDA",
    )
    return {key: value for key, value in os.environ.items() if not key.startswith(names)} | {
        "AUTORESEARCH_SYSROOT": str(folder / "machine"),
        "AUTORESEARCH_PYTHON": sys.executable,
        "AUTORESEARCH_CACHE": str(folder / "cache"),  # never the user's own
        "PATH": f"{folder}/bin:{strip_venv(os.environ['PATH'])}",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_INDEX": "1",
        "HTTPS_PROXY": NOWHERE,
        "https_proxy": NOWHERE,
    }


@pytest.fixture
def env(wheels, tmp_path):
    return clean_environment(wheels, tmp_path)


def strip_venv(path):
    return ":".join(entry for entry in path.split(":") if not entry.startswith(sys.prefix) or sys.prefix == sys.base_prefix)


def copy_files(folder):
    for name in SCRIPTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, Path(folder, name))


def copy_scripts(folder):
    folder.mkdir(parents=True)
    copy_files(folder)
    (folder / "prepare.py").write_text(PREPARE)
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="session")
def bare(tmp_path_factory, wheels):
    """What sourcing env.sh leaves, in zsh where there is one: a venv/ with pip in it. Copied by the tests that begin there."""
    shell = "zsh" if shutil.which("zsh") else "bash"
    show = "python -c 'import sys; print(sys.prefix)'"

    def call(folder):
        return sourced(copy_scripts(folder / "my project"), clean_environment(wheels, folder), show, shell)

    folder, done = called_once(tmp_path_factory, "bare", call)
    return folder / "my project", done


@pytest.fixture
def project(tmp_path, bare):
    """A checkout in a path with a space, whose venv/ was made and holds no packages yet."""
    folder = copy_scripts(tmp_path / "my project")
    subprocess.run(["cp", "-a", bare[0] / "venv", folder / "venv"], check=True)
    return folder


@pytest.fixture(scope="session")
def fresh(tmp_path_factory, wheels):
    """The first call in a fresh clone, through a link, from another folder. Other tests begin with copies of what it leaves."""

    def call(folder):
        (folder / "start").symlink_to(copy_scripts(folder / "my project") / "run.sh")
        env = clean_environment(wheels, folder) | {"TRAIN_CODE": "7"}
        command = [folder / "start", "--keep", "two words"]
        return subprocess.run(command, env=env, cwd="/", text=True, capture_output=True, timeout=120)

    folder, done = called_once(tmp_path_factory, "fresh", call)
    return folder / "my project", done


@pytest.fixture
def ready(tmp_path, fresh):
    """A checkout that run.sh has set up (and that was moved since, which does not matter)."""
    folder = tmp_path / "my project"
    subprocess.run(["cp", "-a", fresh[0], folder], check=True)
    return folder


def run(project, env, *arguments, script="run.sh", **kwargs):
    return subprocess.run([str(project / script), *arguments], env=env, text=True, capture_output=True, timeout=60, **kwargs)


def fails_with(result, *words):
    """One line says what is wrong and what would work; nothing was trained."""
    assert result.returncode not in (0, None), result.stderr
    assert "train" not in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("autoresearch: "), result.stderr
    assert "Traceback" not in result.stderr and "ERROR:" not in result.stderr.replace("ERROR: ", "", last.count("ERROR: ")), result.stderr
    for word in words:
        assert re.search(word, last), f"{word!r} is not in {last!r}"
    return last


def sourced(project, env, commands, shell="bash"):
    """Sources env.sh in an interactive person's way and then runs commands."""
    script = f'cd / && . "{project}/env.sh"; {commands}'
    return subprocess.run([shell, "-c", script], env=env, text=True, capture_output=True, timeout=60)


def site(project):
    return next((project / "venv/lib").glob("python3*")) / "site-packages"


def put_torch(project, version, *, triton=None):
    """A torch of the user's own, with a triton of the name that its makers use."""
    packages = [("torch", version, torch_files(version))] + ([(triton, "3.6.0", {"triton/__init__.py": ""})] if triton else [])
    for name, number, files in packages:
        info = f"{name.replace('-', '_')}-{number}.dist-info"
        for path, text in (
            files.items()
            | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", f"{info}/INSTALLER": "x"}.items()
        ):
            (site(project) / path).parent.mkdir(exist_ok=True)
            (site(project) / path).write_text(text)
        (site(project) / info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def machine(env, *, amd=(), kfd=True, nvidia=False, pci=()):
    """Lays out /sys and /dev of a machine with these parts (a CPU is kfd's node 0)."""
    root = Path(env["AUTORESEARCH_SYSROOT"])
    (root / "dev/dri").mkdir(parents=True)
    for number, target in enumerate([0, *amd] if amd else []):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"cpu_cores_count {0 if target else 32}\nsimd_count 80\ngfx_target_version {target}\nvendor_id 4098\n"
        )
    if amd and kfd:
        (root / "dev/kfd").touch()
        (root / "dev/dri/renderD128").touch()
    if nvidia:
        (root / "dev/nvidia0").touch()
    for number, (vendor, device, kind) in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / name).write_text(value + "\n")


def tools_without(tmp_path, *names):
    """A PATH with all programs of this one but these, and no Python but what the test adds in bin/."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for entry in strip_venv(os.environ["PATH"]).split(":"):
        for program in Path(entry).iterdir() if Path(entry).is_dir() else ():
            if not program.name.startswith("python") and program.name not in names and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return f"{tmp_path}/bin:{folder}"


def program(tmp_path, name, text):
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


# ---- the first call and the next --------------------------------------------------------------------------------------------


def test_fresh_clone_is_set_up_and_trains(fresh):
    project, result = fresh
    assert result.returncode == 7, result.stderr
    prepared, trained = result.stdout.splitlines()
    assert prepared == "prepared"
    assert trained.startswith(f"train ['--keep', 'two words'] {project} ") and trained.endswith(" none")
    said = result.stderr
    assert (
        said.index("making venv/") < said.index("cannot be reached") < said.index("installing torch==2.13.0") < said.index("other packages")
    )
    assert "THIS IS THE DEMONSTRATION" in said and "Traceback" not in said
    assert (site(project) / "torch-2.13.0+cpu.dist-info").exists() and (site(project) / "rustbpe").exists()
    assert not (site(project) / "triton").exists()  # of no use here: only the tests want it
    assert_whole(project)


def test_second_call_costs_under_a_second(ready, env):
    """On a machine that starts Python in 20 ms; here in proportion, since the tests may share it."""

    def seconds(call, until=time.time):
        before = time.time()
        call()
        return until() - before

    def started():  # prepare.py's first line
        return float((ready / "started").read_text())

    def call():
        (ready / "started").unlink()
        result = run(ready, env)
        assert result.returncode == 0 and "installing" not in result.stderr and "prepared" not in result.stdout

    python = [ready / "venv/bin/python", "-c", ""]
    ours, baseline = zip(*((seconds(call, started), seconds(lambda: subprocess.run(python, check=True))) for _ in range(3)))
    assert min(ours) < 50 * min(baseline), (ours, baseline)


def test_moved_project_is_its_own(ready, env):
    where = sourced(ready, env, "command -v python; echo $VIRTUAL_ENV").stdout.splitlines()
    assert where == [f"{ready}/venv/bin/python", f"{ready}/venv"]


def test_python_is_called_by_a_path_without_spaces(ready, env):
    """Inductor's C++ compiler gets paths unquoted: a project in a path with a space calls its venv by a link in the cache."""
    spaced = ready.parent / "a project"
    ready.rename(spaced)
    (spaced / "train.py").write_text("import sys; print('prefix', sys.prefix)")
    result = run(spaced, env)
    prefix = result.stdout.split("prefix ")[-1].strip()
    assert result.returncode == 0 and " " not in prefix and Path(prefix).parent == Path(env["AUTORESEARCH_CACHE"]), result
    assert Path(prefix).resolve() == spaced / "venv"


@pytest.mark.parametrize("code", [0, 1, 130, 255])
def test_exit_code_is_trains(ready, env, code):
    assert run(ready, env | {"TRAIN_CODE": str(code)}).returncode == code


def test_help_says_first_what_run_sh_is(ready, env):
    """Then, where it is set up, what train.py takes. The heading of the file is the help."""
    for option in ("--help", "-h"):
        result = run(ready, env, option)
        first, rest = result.stdout.split("\n\ntrain ")
        assert rest.startswith("['--help'] ") and result.returncode == 0, result.stderr
        assert first.startswith("One experiment: sets up what is missing") and "\n#" not in first and "set -e" not in first
        assert (
            all(f"\n  ./run.sh {name} " in first for name in ("--keep", "--doctor", "--report", "--setup", "--help"))
            and "\nExit codes: " in first
        )
    assert "One experiment" not in run(ready, env, "--keep", "--help").stdout


def test_help_needs_nothing(tmp_path, env):
    project = copy_scripts(tmp_path / "new")
    result = run(project, env, "--help")
    assert result.returncode == 0 and "--setup" in result.stdout and not (project / "venv").exists()


def test_setup_prepares_and_does_not_train(ready, env):
    result = run(ready, env | {"TRAIN_CODE": "7"}, "--setup")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_changed_dependencies_are_installed(ready, env):
    text = (ready / "pyproject.toml").read_text()
    (ready / "pyproject.toml").write_text(text.replace("dependencies = [", 'dependencies = [\n    "something-new",', 1))
    assert "installing" in run(ready, env).stderr
    assert (site(ready) / "something_new").exists()


def test_our_torch_follows_the_hardware_and_a_users_stays(ready, env):
    """The one that run.sh installed is replaced when the machine has changed; one that someone put there since is not."""
    marker = ready / "venv/.autoresearch/torch"
    machine(env, amd=[110501])
    asked = env | {"AUTORESEARCH_TORCH": "torch==2.12.0", "FAKE_GPU": "works"}
    marker.write_text("torch==2.13.0 x|2.13.0+cpu\n")
    result = run(ready, asked)
    assert result.returncode == 0 and "is replaced" in result.stderr, result.stderr
    assert (site(ready) / "torch-2.12.0+rocm7.14.0.dist-info").exists() and not (site(ready) / "torch-2.13.0+cpu.dist-info").exists()

    shutil.rmtree(site(ready) / "torch-2.12.0+rocm7.14.0.dist-info")
    put_torch(ready, "2.12.1+rocm9")
    result = run(ready, asked)
    assert result.returncode == 0 and "of your own: left as it is" in result.stderr, result.stderr


def test_doctor_before_anything_is_installed(project, env):
    result = run(project, env, "--doctor")
    assert result.returncode == 3 and "STOP    torch_build: torch is not installed" in result.stdout, result.stderr
    assert run(project, env, "--doctor", "--list").stdout.startswith("| check |")
    assert not (site(project) / "torch").exists() and not (project / "data").exists()


def test_report_before_anything_is_installed(project, env):
    """It says what is missing: it can be what an issue is about."""
    result = run(project, env, "--report")
    assert (result.returncode, result.stdout) == (0, f"{project}/report.md\n"), result.stderr
    text = (project / "report.md").read_text()
    assert "STOP    torch_build: torch is not installed in" in text and "| torch | not installed |" in text
    assert str(project) not in text and project.name not in text
    assert text.count("Not run: what stops a run stops this too (torch_build).") == 2


# ---- signals ----------------------------------------------------------------------------------------------------------------


def wait_for(process, word):
    for line in process.stdout:
        if word in line:
            return line
    pytest.fail(f"ended without {word!r}: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_training(ready, env, tmp_path, number):
    """Also beside a systemd-inhibit that works (a stand-in: it takes a lock and runs its command), which ends with the training."""
    program(
        tmp_path,
        "systemd-inhibit",
        f'[[ $* == *--what=idle:sleep* ]] && touch "{tmp_path}/lock"; while [[ $1 == --* ]]; do shift; done; "$@"; rm "{tmp_path}/lock"',
    )
    with subprocess.Popen(
        [str(ready / "run.sh"), "--wait"], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        wait_for(process, "train ")
        wait_for(process, "waiting")
        assert eventually((tmp_path / "lock").exists)
        process.send_signal(number)
        assert process.stdout.read() == f"got {number.value}\n"
    assert process.returncode == 42
    assert eventually(lambda: not (tmp_path / "lock").exists())


def eventually(condition, seconds=8):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_systemd_inhibit_that_fails_is_no_matter(ready, env, tmp_path):
    program(tmp_path, "systemd-inhibit", "echo Failed to connect to bus >&2; exit 1")
    result = run(ready, env | {"TRAIN_CODE": "9"})
    assert result.returncode == 9 and "bus" not in result.stderr


def test_preparation_is_stopped_or_fails_before_training(ready, env):
    (ready / "data").unlink()
    (ready / "prepare-code").write_text("5")
    result = run(ready, env)
    assert result.returncode == 5 and result.stdout == "prepared\n"
    (ready / "slow-prepare").touch()
    with subprocess.Popen([str(ready / "run.sh")], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        wait_for(process, "preparing")
        process.terminate()
        assert process.stdout.read() == "prepare stopped\n"
    assert process.returncode == 143


# ---- hardware (simulated trees) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts, hardware, gfx",
    [
        ({}, "none", ""),
        ({"amd": [110501]}, "gfx1151", "gfx1151"),
        ({"amd": [90010]}, "amd", "gfx90a"),
        ({"amd": [90402, 90402]}, "amd", "gfx942"),
        ({"amd": [120001, 110501]}, "gfx1151", "gfx1201 gfx1151"),
        ({"nvidia": True}, "nvidia", ""),
        ({"amd": [100306], "nvidia": True}, "nvidia", "gfx1036"),  # a desktop processor's small GPU beside a card
        ({"amd": [110501], "nvidia": True}, "gfx1151", "gfx1151"),
        ({"pci": [("0x10de", "0x2684", "0x030000")]}, "nvidia", ""),  # its driver is not loaded
        ({"pci": [("0x1002", "0x1586", "0x038000")]}, "gfx1151", ""),
        ({"pci": [("0x10de", "0x22ba", "0x040300"), ("0x1002", "0x515e", "0x030000"), ("0x1234", "0x1111", "0x030000")]}, "none", ""),
    ],
)
def test_hardware_is_found_without_torch(project, env, parts, hardware, gfx):
    machine(env, **parts)
    result = sourced(project, env, 'echo "$AUTORESEARCH_HARDWARE|$AUTORESEARCH_GFX"')
    assert result.stdout == f"{hardware}|{gfx}\n", result.stderr


def test_hardware_can_be_chosen(project, env):
    machine(env, nvidia=True)
    assert sourced(project, env | {"AUTORESEARCH_HARDWARE": "none"}, "echo $AUTORESEARCH_HARDWARE").stdout == "none\n"
    fails_with(run(project, env | {"AUTORESEARCH_HARDWARE": "cuda"}), "gfx1151, amd, nvidia or none")


@pytest.mark.parametrize(
    "hardware, gfx, settings, torch, index",
    [
        ("gfx1151", "gfx1151", {}, "torch[device-gfx1151]==2.13.0+rocm10.0.0", "https://stable.repo.amd.com/rocm/whl-next/"),
        (
            "gfx1151",
            "gfx1151 gfx1201",
            {},
            "torch[device-gfx1151,device-gfx1201]==2.13.0+rocm10.0.0",
            "https://stable.repo.amd.com/rocm/whl-next/",
        ),
        ("gfx1151", "", {"AUTORESEARCH_TORCH_INDEX": "http://mirror/"}, "torch[device-gfx1151]==2.13.0", "http://mirror/"),
        ("amd", "gfx942", {}, "torch==2.13.0", "https://download.pytorch.org/whl/rocm7.2"),
        ("nvidia", "", {}, "torch==2.13.0", ""),
        ("nvidia", "", {"AUTORESEARCH_TORCH": "torch==2.14.1"}, "torch==2.14.1", ""),
        ("none", "", {}, "torch==2.13.0", "https://download.pytorch.org/whl/cpu"),
    ],
)
def test_torch_for_the_hardware(project, env, hardware, gfx, settings, torch, index):
    code = f'source "{project}/run.sh"; AUTORESEARCH_HARDWARE={hardware} AUTORESEARCH_GFX="{gfx}"; choose_torch; echo "$TORCH $INDEX"'
    assert subprocess.run(["bash", "-c", code], env=env | settings, text=True, capture_output=True).stdout == f"{torch} {index}\n"


@pytest.mark.parametrize(
    "parts, words",
    [
        ({"amd": [110501], "kfd": False}, ["/dev/kfd is not", "amdgpu", "--device /dev/kfd", "AUTORESEARCH_HARDWARE=none"]),
        ({"pci": [("0x10de", "0x2684", "0x030200")]}, ["driver is not loaded", "--gpus all", "AUTORESEARCH_HARDWARE=none"]),
        ({"pci": [("0x1002", "0x1586", "0x038000")]}, ["/dev/kfd is not"]),
    ],
)
def test_gpu_without_its_driver_stops_the_run(project, env, parts, words):
    machine(env, **parts)
    fails_with(run(project, env), *words)
    assert not (project / "venv/.autoresearch/torch").exists()  # before anything was downloaded


def test_no_permission_on_kfd(env):
    with tempfile.TemporaryDirectory() as folder:
        env = env | {"AUTORESEARCH_SYSROOT": folder, "USER": "someone"}
        machine(env, amd=[110501])
        (Path(folder) / "dev/kfd").chmod(0)
        os.chmod(folder, 0o755)
        copy_files(folder)
        env = env | {"AUTORESEARCH_HARDWARE": "gfx1151", "AUTORESEARCH_SKIP_CHECKS": "disk,toolchain"}  # which another user may lack
        command = [sys.executable, "doctor.py", "--stop", "--before-install"]
        if os.geteuid() == 0:  # whom no permission stops
            if not shutil.which("setpriv"):
                pytest.skip("root without setpriv")
            command = [
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "--inh-caps=-all",
                "--bounding-set=-all",
                "--",
                *command,
            ]
        result = subprocess.run(command, env=env, cwd=folder, text=True, capture_output=True)
        fails_with(result, "no permission on /dev/kfd", "sudo usermod -aG render,video someone")


def test_hardware_that_torch_cannot_use_stops_the_run(ready, env):
    machine(env, amd=[110501])
    (ready / "venv/.autoresearch/torch").unlink()  # so that the torch is someone's choice
    for _ in range(2):  # nor is it forgotten at the next call
        fails_with(
            run(ready, env),
            "AMD GPU gfx1151 cannot be used",
            "2.13.0.cpu, a CPU build",
            "AUTORESEARCH_HARDWARE=none runs the demonstration",
        )
    result = run(ready, env | {"AUTORESEARCH_HARDWARE": "none"})
    assert result.returncode == 0 and "THIS IS THE DEMONSTRATION" in result.stderr


@pytest.mark.parametrize(
    "parts, torch, gpu, words",
    [
        ({"amd": [110001]}, "2.13.0+cu130", "works", ["AMD GPU gfx1101", "a CUDA build", "install a ROCm build"]),
        ({"nvidia": True}, "2.13.0+cpu", "", ["NVIDIA GPU", "a CPU build", "install a CUDA build"]),
        ({"nvidia": True}, "2.13.0+cu130", "", ["does not see", "nvidia-smi must work"]),
        ({"amd": [110501]}, "2.13.0+rocm10.0.0", "", ["does not see", "render, video"]),
        ({"amd": [110501]}, "2.13.0+rocm10.0.0", "no code", ["cannot run a kernel", r"torch\[device-gfx1151\]", "invalid device function"]),
        ({"amd": [110501]}, "2.13.0+rocm10.0.0", "crashes", ["crashed .exit code 139. at its first use of the GPU"]),
    ],
)
def test_why_torch_cannot_use_the_hardware(project, env, parts, torch, gpu, words):
    machine(env, **parts)
    put_torch(project, torch)
    code = f'source "{project}/run.sh"; source "{project}/env.sh"; stop_checks'
    fails_with(subprocess.run(["bash", "-c", code], env=env | {"FAKE_GPU": gpu}, text=True, capture_output=True), *words)


def test_gpu_that_works_is_no_demonstration(project, env):
    machine(env, amd=[110501])
    put_torch(project, "2.13.0+rocm10.0.0")
    result = run(project, env | {"FAKE_GPU": "works"})
    assert result.returncode == 0 and result.stdout.endswith(" gfx1151\n") and "DEMONSTRATION" not in result.stderr


# ---- env.sh -----------------------------------------------------------------------------------------------------------------

SHELLS = ["bash", pytest.param("zsh", marks=pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here"))]


@pytest.mark.parametrize("shell", SHELLS)
def test_env_on_gfx1151(project, env, shell):
    machine(env, amd=[110501])
    (site(project) / "_rocm_sdk_core").mkdir()
    mine = {
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "PYTORCH_HIP_ALLOC_CONF": "backend:malloc",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    mine |= {"ROCM_HOME": "/opt/rocm", "LD_LIBRARY_PATH": "/opt/rocm/lib:/usr/local/lib"}
    show = "env | grep -E '^(HSA_|PYTORCH_|TORCH_ROCM|ROCM_HOME|HIP_PATH|LD_LIB|VIRTUAL_ENV=)' | sort; command -v python; pwd"
    result = sourced(project, env | mine, f'{show}; echo --- >&2; . "{project}/env.sh"; echo ---; {show}', shell)
    first, second = result.stdout.split("---\n")
    home = site(project) / "_rocm_sdk_core"
    assert first.splitlines() == [
        f"HIP_PATH={home}",
        "LD_LIBRARY_PATH=/usr/local/lib",
        "PYTORCH_ROCM_ARCH=gfx1151",
        f"ROCM_HOME={home}",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
        f"VIRTUAL_ENV={project}/venv",
        f"{project}/venv/bin/python",
        "/",
    ]
    assert first == second
    said, again = result.stderr.split("---\n")
    assert again == ""
    for words in (
        "unset HSA_OVERRIDE_GFX_VERSION=11.0.0: gfx1151",
        "unset PYTORCH_HIP_ALLOC_CONF",
        "unset PYTORCH_ALLOC_CONF",
        f"ROCM_HOME={home}",
        "/opt/rocm out of LD",
    ):
        assert said.count(words) == 1, said


@pytest.mark.parametrize("shell", SHELLS)
def test_env_on_other_machines(project, env, shell):
    names = ["HSA_OVERRIDE_GFX_VERSION", "ROCM_HOME", "PYTORCH_ROCM_ARCH", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "PYTORCH_ALLOC_CONF"]
    show = f'echo "{" ".join(f"${{{name}:-}}" for name in names)}"'
    mine = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "PYTORCH_ALLOC_CONF": "x"}
    assert sourced(project, env | mine, show, shell).stdout == "10.3.0   1 \n"
    machine(env, amd=[100302])
    (Path(env["AUTORESEARCH_SYSROOT"]) / "opt/rocm").mkdir(parents=True)
    assert sourced(project, env | mine, show, shell).stdout == f"10.3.0 {env['AUTORESEARCH_SYSROOT']}/opt/rocm gfx1032 1 \n"
    assert sourced(project, env | {"ROCM_HOME": "/home/me/rocm"}, show, shell).stdout == " /home/me/rocm gfx1032 1 \n"


def test_env_makes_the_venv(bare):
    project, result = bare
    assert result.stdout == f"{project}/venv\n", result.stderr
    assert (project / "venv/.autoresearch/constraints.txt").read_text() == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_env_that_fails_leaves_the_shell(tmp_path, env, shell):
    project = copy_scripts(tmp_path / "new one")
    result = sourced(project, env | {"AUTORESEARCH_PYTHON": "/none"}, 'echo "code $?"', shell)
    assert result.stdout == "code 1\n" and "is not a Python 3.10" in result.stderr


def test_later_installs_are_constrained(ready, env):
    """In a shell with env.sh, whatever pip is asked for."""
    result = sourced(
        ready,
        env | {"PIP_CONSTRAINT": "/dev/null"},
        "python -m pip install wants-another-torch; python -m pip install -q torch hypothesis && echo fine",
    )
    assert "conflict" in result.stderr.lower(), result.stderr
    assert result.stdout.endswith("fine\n")
    assert (site(ready) / "torch-2.13.0+cpu.dist-info").exists() and (site(ready) / "hypothesis").exists()


# ---- a virtual environment of the user's ------------------------------------------------------------------------------------


def fingerprint(folder):
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_own_torch_and_triton_are_never_touched(project, env, tmp_path):
    machine(env, amd=[110501])
    put_torch(project, "2.12.0+rocm7.14.0", triton="pytorch-triton-rocm")
    before = {
        name: fingerprint(site(project) / name)
        for name in ("torch", "triton", "torch-2.12.0+rocm7.14.0.dist-info", "pytorch_triton_rocm-3.6.0.dist-info")
    }
    (project / "venv").rename(tmp_path / "rocm-venv")
    (project / "venv").symlink_to(tmp_path / "rocm-venv")
    env = env | {"FAKE_GPU": "works", "PYTHONDONTWRITEBYTECODE": "1"}
    result = run(project, env)
    assert result.returncode == 0 and "installing torch" not in result.stderr, result.stderr
    assert run(project, env, script="test.sh").returncode == 5  # pytest's, in this setting
    assert before == {name: fingerprint(site(project) / name) for name in before}
    assert not (site(project) / "triton-3.8.0.dist-info").exists()
    assert (site(project) / "rustbpe").exists() and (site(project) / "hypothesis").exists()
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace("dependencies = [", 'dependencies = [\n    "triton>=3.8.0", "torch==2.13.0",', 1))
    assert run(project, env).returncode == 0
    (project / "pyproject.toml").write_text(text.replace("dependencies = [", 'dependencies = [\n    "pytorch-triton-rocm==4",', 1))
    fails_with(run(project, env), "could not install the packages")
    assert before == {name: fingerprint(site(project) / name) for name in before}


def test_linked_venv_without_torch(project, env, tmp_path):
    (project / "venv").rename(tmp_path / "empty-venv")
    (project / "venv").symlink_to(tmp_path / "empty-venv")
    fails_with(run(project, env), "has no torch", "install yours there")
    assert not (site(project) / "rustbpe").exists()


def test_links_and_folders_that_are_no_venv(tmp_path, env):
    project = copy_scripts(tmp_path / "p")
    (project / "venv").symlink_to(tmp_path / "gone")
    fails_with(run(project, env), "which is not there", "remove it")
    (tmp_path / "gone").mkdir()
    fails_with(run(project, env), "no virtual environment")
    (project / "venv").unlink()
    (project / "venv").mkdir()
    (project / "venv/notes.txt").touch()
    fails_with(run(project, env), "move it away")
    (project / "venv/notes.txt").unlink()
    (project / "venv/bin").mkdir()
    (project / "venv/bin/python").symlink_to("/usr/bin/python3.old")
    fails_with(run(project, env), "python3.old, which is gone", "rm -r")


# ---- interruptions ----------------------------------------------------------------------------------------------------------


def test_killed_installation_is_finished_by_the_next_call(project, env, tmp_path):
    """SIGKILL to everything while pip writes a package of many files; afterwards each installed file is there, as RECORD says."""
    folder = tmp_path / "big"
    folder.mkdir()
    make_wheel(folder, "rustbpe", "1000", {f"rustbpe/{number}.py": "x = 1\n" * 50 for number in range(3000)} | {"rustbpe/__init__.py": ""})
    env = env | {"PIP_FIND_LINKS": f"{env['PIP_FIND_LINKS']} {folder}"}
    process = subprocess.Popen(
        [str(project / "run.sh")], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert eventually(lambda: len(list((site(project) / "rustbpe").glob("*.py"))) > 100, 40)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (project / "venv/.autoresearch/ready-run").exists()
    result = run(project, env)
    assert result.returncode == 0 and "interrupted: finishing it" in result.stderr, result.stderr
    assert_whole(project)
    assert "installing" not in run(project, env).stderr


def assert_whole(project):
    for info in site(project).glob("*.dist-info"):
        for line in (info / "RECORD").read_text().splitlines():
            assert (site(project) / line.split(",")[0]).exists(), line


def test_package_that_only_looks_installed_is_mended(ready, env):
    marker = ready / "venv/.autoresearch/installing"
    marker.touch()
    os.utime(marker, (time.time() - 10,) * 2)
    for name in ("torch", "rustbpe"):  # pip was killed just before its last file
        info = next(site(ready).glob(f"{name}-*.dist-info"))
        (info / "INSTALLER").unlink()
        (info / "RECORD").unlink()
        (info / "METADATA").touch()
        info.touch()
        (site(ready) / name / "__init__.py").unlink()
    assert run(ready, env).returncode == 0
    assert_whole(ready)
    assert not marker.exists()


def test_terminated_installation_stops_and_goes_on(project, env):
    """SIGTERM reaches pip, and run.sh does not go on to train."""
    with subprocess.Popen([str(project / "run.sh")], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert eventually((project / "venv/.autoresearch/installing").exists, 20)
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert process.returncode == 143 and out == "" and "Traceback" not in err, err
    assert run(project, env).returncode == 0


def test_interrupted_making_of_venv(project, env):
    (project / "venv/.autoresearch/making").touch()
    pip = site(project) / "pip"
    shutil.rmtree(pip / "_vendor")
    result = run(project, env)
    assert result.returncode == 0 and "making venv/" in result.stderr, result.stderr
    assert (pip / "_vendor").exists()


@pytest.mark.slow
def test_two_calls_at_once(tmp_path, env):
    project = copy_scripts(tmp_path / "p")
    (project / "data").touch()
    both = [
        subprocess.Popen([str(project / "run.sh")], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("making venv/" in text for text in said) == 1
    assert sum("installing torch" in text for text in said) == 1
    assert_whole(project)


# ---- what may be missing: one line each -------------------------------------------------------------------------------------


def test_no_python(tmp_path, env):
    project = copy_scripts(tmp_path / "p")
    env = {key: value for key, value in env.items() if key != "AUTORESEARCH_PYTHON"} | {"PATH": tools_without(tmp_path)}
    fails_with(run(project, env), "no Python 3.10 to 3.13 on PATH", "install|AUTORESEARCH_PYTHON")


def test_newest_python_that_runs_and_has_venv(tmp_path, env):
    """3.13 is a shim of nothing, 3.12 has no venv module, 3.11 has all (stand-ins before the real one)."""
    project = copy_scripts(tmp_path / "p")
    env = {key: value for key, value in env.items() if key != "AUTORESEARCH_PYTHON"} | {"PATH": tools_without(tmp_path)}
    program(tmp_path, "python3.13", 'echo "pyenv: python3.13: command not found" >&2; exit 127')
    program(tmp_path, "python3.12", f'[[ $* != *ensurepip* ]] || exit 1; exec "{sys.executable}" "$@"')
    fails_with(run(project, env), "python3.12 cannot make a virtual environment: ", "venv|python")
    program(tmp_path, "python3.11", f'exec "{sys.executable}" "$@"')
    choice = subprocess.run(
        ["bash", "-c", f'. "{project}/env.sh" 2>/dev/null; _ar_choose_python'],
        env=env | {"AUTORESEARCH_HARDWARE": "?"},
        text=True,
        capture_output=True,
    )
    assert choice.stdout == "python3.11\n"


def test_no_network(project, env):
    env = {key: value for key, value in env.items() if key not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
    env |= {"PIP_INDEX_URL": f"{NOWHERE}/simple", "PIP_RETRIES": "1"}
    fails_with(run(project, env), "could not install torch", "network or HTTPS_PROXY", "PIP_INDEX_URL", "install.log")


def test_no_space(project, env, tmp_path):
    program(tmp_path, "df", "printf 'Filesystem 1024-blocks Used Available Capacity Mounted\\n/dev/x 1 1 1500000 99%% /\\n'")
    fails_with(run(project, env), "no space: installing needs about 2 GB in .*my project/venv, which has 1 GB free")


def test_no_build_for_this_python(project, env):
    fails_with(
        run(project, env | {"AUTORESEARCH_TORCH": "torch==0.0.1"}),
        "no build of torch==0.0.1 for Python 3",
        "AUTORESEARCH_PYTHON",
        "AUTORESEARCH_TORCH",
    )


def test_no_compiler(project, env, tmp_path):
    """An error where Triton needs one; train.py can do without on a CPU, and says so itself."""
    env = env | {"PATH": tools_without(tmp_path, "c++", "g++", "clang++"), "CXX": ""}
    result = run(project, env)
    assert result.returncode == 0 and "missing" not in result.stderr, result.stderr
    machine(env, amd=[110501])
    shutil.rmtree(site(project) / "torch-2.13.0+cpu.dist-info")
    put_torch(project, "2.13.0+rocm10.0.0")
    fails_with(run(project, env | {"FAKE_GPU": "works"}), "a C.. compiler is missing", "install", "Triton and torch.compile compile")


def test_no_python_header(project, env):
    # A .pth file: Debian's Python has a sitecustomize of its own, which would come first.
    (site(project) / "no_header.pth").write_text("import sysconfig; sysconfig.get_path = lambda *_, **__: '/nowhere'\n")
    machine(env, amd=[110501])
    fails_with(run(project, env), "Python.h is missing .*: .*(dev|python)")
    assert not (project / "venv/.autoresearch/torch").exists()  # before anything was downloaded


# ---- test.sh ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_test_sh_sets_up_and_passes_arguments(ready, env, tmp_path):
    result = run(ready, env, "-k", "two words", script="test.sh", cwd=tmp_path)
    processes = str(min(16, max(2, len(os.sched_getaffinity(0)))))
    arguments = ["-n", processes, "--dist", "loadscope", "-k", "two words"]
    assert result.stdout == f"pytest {arguments}\n" and result.returncode == 5, result.stderr
    assert (site(ready) / "hypothesis").exists() and (site(ready) / "triton-3.8.0.dist-info").exists()
    assert "installing" not in run(ready, env).stderr  # run.sh has not forgotten that it is set up
    shutil.copytree(ROOT / ".ci", ready / ".ci")
    program(tmp_path, "apt-get", "exit 1")  # a stand-in: where a browser is missing, it would be installed
    again = subprocess.run(["bash", str(ready / ".ci/run")], env=env, cwd="/", text=True, capture_output=True, timeout=60)
    assert again.returncode == 5 and "installing" not in again.stderr


def test_scripts_are_executable_bash():
    for name in ("run.sh", "test.sh", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
        subprocess.run(["bash", "-n", ROOT / name], check=True)

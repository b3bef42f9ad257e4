"""Checks of torch, of what it is built with, and of the settings that it obeys."""

import glob
import os
import re
import sys

from doctor.check import Fault
from doctor.words import numbers


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


def sdpa(machine):
    """Which backend of scaled_dot_product_attention runs, forced, forward and backward, each in a process of its own, its numbers against
    float32: what is enabled says nothing (ROCm/legacy-rocm-build#6034: 19 times slower; ROCm/TheRock#1315 and pytorch#173469: NaN;
    ROCm/TheRock#7992: what runs after it fails)."""
    rows, end = [row for row in machine.torch.get("sdpa") or [] if "backend" in row], machine.torch.get("sdpa_end")
    if end:
        tried = ", ".join(row["backend"] for row in rows) or "none"
        return Fault(f"trying its backends {end} (tried before: {tried})", "another torch; python doctor/probe.py sdpa shows it")
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

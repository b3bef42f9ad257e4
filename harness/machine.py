"""The device of a run: which it is, its peak rate, the limit of its memory, its sensors, and where what is compiled for it is kept."""

import contextlib
import os
import resource

import torch

from harness.common import hardware as hardware_found
from harness.common import telemetry
from harness.data import dataset as chosen
from harness.ending import EXIT_ENVIRONMENT, fail

# Dense bf16 FLOP/s by the vendors' data sheets (gfx1151: at 2.42 GHz, as published for autoresearch-halo, so that MFUs compare); the first
# key that is in "name gcnArchName" counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.5e12, "H200": 989.5e12, "H20": 148e12, "H800": 989.5e12, "GH200": 989.5e12,
    "B300": 2250e12, "B200": 2250e12, "GB10": 125e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX PRO 6000": 503.8e12, "RTX 6000 Ada": 364.2e12, "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12, "RTX 5080": 112.6e12, "RTX 5070 Ti": 87.9e12, "RTX 4090": 165.2e12, "RTX 4080": 97.5e12,
    "RTX 4070 Ti": 80.2e12, "RTX 3090": 71e12, "RTX 3080": 59.5e12,
    "MI355X": 2500e12, "MI350X": 2300e12, "MI325X": 1307.4e12, "MI308X": 188.4e12, "MI300X": 1307.4e12, "MI300A": 980.6e12,
    "MI250": 383e12, "MI210": 181e12, "8060S": 49.6e12, "gfx1151": 49.6e12, "gfx1150": 23.8e12, "7900 XTX": 122.8e12, "7900 XT": 103e12,
    "9070 XT": 194.6e12, "R9700": 191e12, "gfx1201": 191e12,
}  # fmt: skip


def find_device():
    """The GPU if torch can use one, the CPU if there is none; a GPU that torch can't use ends the run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    hardware = hardware_found.gpu_hardware()
    if hardware and chosen.DATASET.name != "demo":
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
        fail(
            f"this machine has a GPU ({hardware}) that this torch ({torch.__version__}, a {build} build) can't use. Move venv/ away and"
            " run ./run.sh to install the right one, or check the driver and your permissions on /dev/kfd and /dev/dri",
            EXIT_ENVIRONMENT,
        )
    if chosen.DATASET.name == "demo":
        print("No GPU: this is the DEMONSTRATION on the CPU. It shows the whole loop; its numbers compare only with other demonstrations.")
    else:
        print("No GPU: this runs on the CPU")
    return torch.device("cpu")


def positive(variable, example):
    """The positive number in an environment variable, None if it is not set; anything else ends the run."""
    text = os.environ.get(variable)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    fail(f"{variable}={text!r} is no positive number; use for example {example}")


def peak_flops(device):
    """(bf16 FLOP/s of the device or None, what it is called). GPU_BF16_PEAK_FLOPS overrides the table."""
    override = positive("GPU_BF16_PEAK_FLOPS", "49.6e12")
    if device.type == "cpu":
        return override, "CPU"
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "").split(":")[0]  # the name alone may be "AMD Radeon Graphics"; on NVIDIA they are the same
    name = " ".join(dict.fromkeys((properties.name, arch))).strip()
    known = override or next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
    if known is None:
        print(f"WARNING: the peak FLOP/s of {name!r} are not known, so MFU is n/a. Set GPU_BF16_PEAK_FLOPS to its dense bf16 figure.")
    return known, name


def cap_shared_memory(device):
    """On a GPU that shares the host's memory, make over-allocation an error: without a limit it freezes the machine.

    The limit is what the host has available less 4 GiB; GPU_MEMORY_FRACTION, a share of what torch calls the GPU's memory, overrides it.
    """
    if device.type == "cpu":
        return
    properties = torch.cuda.get_device_properties(device)
    if not (getattr(properties, "is_integrated", False) or getattr(properties, "gcnArchName", "").startswith("gfx115")):
        return
    told = positive("GPU_MEMORY_FRACTION", "0.8")
    if told and told > 1:
        fail(f"GPU_MEMORY_FRACTION={told:g} is no share of the GPU's memory; use for example 0.8", EXIT_ENVIRONMENT)
    with open("/proc/meminfo") as f:
        available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    fraction = min(1.0, told or max(0.1, (available - 4 * 2**30) / properties.total_memory))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    limit = fraction * properties.total_memory / 2**30
    print(f"GPU memory is the host's: at most {limit:.1f} GiB are used (GPU_MEMORY_FRACTION={fraction:.2f})")


def peak_memory(device):
    """MiB at most so far: of the GPU's memory, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def sensors(device):
    """What samples the device's clock, heat and power from its `start()` to its `stop()`; nothing on a CPU."""
    if device.type == "cpu":
        return telemetry.Sampler()
    found = torch.cuda.get_device_properties(device)
    try:
        pci = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        pci = None
    return telemetry.Sampler("amd" if torch.version.hip else "nvidia", pci)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast(device):
    """bfloat16 on a GPU; on a CPU everything is float32."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def keep_compiled():
    """Let what is compiled and tuned outlive the run (and a reboot), in the cache folder: the next run starts in seconds."""
    folder = os.path.join(chosen.CACHE_DIR, "compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
    torch._dynamo.config.recompile_limit = 64  # kinds of blocks, each with and without gradients

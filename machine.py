"""What train.py asks of the machine (device, peak rate, memory limit, compiler, sensors) and leaves on it (progress, the saved model)."""

import contextlib
import math
import os
import resource
import sys
import time

import torch

import prepare
import telemetry

EXIT_ENVIRONMENT = prepare.EXIT_ENVIRONMENT

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


def fail(message, code=1):
    """End the run with one line that says why."""
    print(f"FAIL: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def run(main, out_of_memory):
    """`main()`, with one line and an exit code of its own for each kind of end; `out_of_memory`: what to lower then."""
    with contextlib.suppress(AttributeError):  # a notebook's stream takes every character
        sys.stdout.reconfigure(errors="backslashreplace")  # where a ° can't be written, that costs no run its summary
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except prepare.DataError as e:
        fail(e, EXIT_ENVIRONMENT)
    except prepare.NoResult as e:
        fail(e)
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError) as e:  # a path that train.py names
        fail(e)
    except OSError as e:
        fail(e, EXIT_ENVIRONMENT)
    except torch.OutOfMemoryError as e:
        fail(f"out of GPU memory {out_of_memory} ({str(e)[:200]})")
    except KeyboardInterrupt:
        fail("interrupted", 130)


def check_batch(total, rows, T):
    """End the run if TOTAL_BATCH_SIZE tokens are not made of whole micro-batches of DEVICE_BATCH_SIZE rows of T."""
    tokens = rows * T
    if total % tokens == 0:
        return
    fits = [b for b in range(1, total // T + 1) if total % (b * T) == 0]
    nearest = f"DEVICE_BATCH_SIZE {min(fits, key=lambda b: abs(b - rows))} or " if fits else ""
    fail(
        f"TOTAL_BATCH_SIZE {total} is no multiple of DEVICE_BATCH_SIZE {rows} × {T} = {tokens} tokens"
        f"; the nearest that work: {nearest}TOTAL_BATCH_SIZE {max(1, round(total / tokens)) * tokens}"
    )


def find_device():
    """The GPU if torch can use one, the CPU if there is none; a GPU that torch can't use ends the run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    hardware = prepare.gpu_hardware()
    if hardware and prepare.DATASET.name != "demo":
        build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
        fail(
            f"this machine has a GPU ({hardware}) that this torch ({torch.__version__}, a {build} build) can't use. Move venv/ away and"
            " run ./run.sh to install the right one, or check the driver and your permissions on /dev/kfd and /dev/dri",
            EXIT_ENVIRONMENT,
        )
    if prepare.DATASET.name == "demo":
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


class Recorded:
    """`function(*inputs)`, recorded once as a CUDA graph and replayed: the device never waits for Python to launch its kernels.

    function: takes tensors of fixed shapes on the device and returns one tensor; what it reads and writes beside (parameters, gradients)
    must stay where it is, and whatever Python decides in it stays as it was when it was recorded: `holds` tells whether it still would.
    """

    def __init__(self, function, *inputs):
        self.function = function
        self.inputs = [x.clone() for x in inputs]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may go on working
            self.output = function(*self.inputs)

    def __call__(self, *inputs):
        """Valid until the next call."""
        for mine, x in zip(self.inputs, inputs):
            mine.copy_(x)
        self.graph.replay()
        return self.output

    def holds(self, *inputs):
        """Whether the function still computes what was recorded; where two replays differ (dropout), within ten times that.

        The last thing to ask: the graph and its memory are given up first, for there may be none for the function beside it.
        """
        first, second = self(*inputs).clone(), self(*inputs).clone()
        torch.cuda.synchronize()
        self.graph.reset()
        torch.cuda.empty_cache()
        now = self.function(*inputs)
        allowed = 1e-3 * now.abs() + 10 * (first - second).abs()
        return bool(((first - now).abs() <= allowed).all())


def record(function, *inputs):
    """`Recorded(function, *inputs)`, or None where that can't be had, which is said."""
    try:
        return Recorded(function, *inputs)
    except Exception as e:  # anything that a graph can't hold, such as a value that Python reads back
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        random.graphsafe_set_state(random.clone_state())  # a recording that fails leaves it waiting for its end
        print(f"No CUDA graph, Python launches every kernel: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
        return None


def recorded_losses(model):
    """`model` for evaluate_bpb, its forward pass recorded after the first batch."""
    recorded = []

    def losses(x, y, reduction):
        if not recorded:
            first = model(x, y, reduction=reduction)  # compiles and tunes
            recorded.append(record(lambda x, y: model(x, y, reduction=reduction), x, y))
            return first
        return recorded[0](x, y) if recorded[0] else model(x, y, reduction=reduction)

    losses._orig_mod = model  # as torch.compile names it: what checks of the model itself look at
    return losses


def wait_for(value):
    """The number in a 0-D tensor, and all work of the device before it done: one synchronisation."""
    if value.is_cuda:
        on_host = torch.empty((), dtype=value.dtype, pin_memory=True)
        on_host.copy_(value, non_blocking=True)
        torch.cuda.synchronize(value.device)
        value = on_host
    return value.item()


def keep_compiled():
    """Let what is compiled and tuned outlive the run (and a reboot), in the cache folder: the next run starts in seconds."""
    folder = os.path.join(prepare.CACHE_DIR, "compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
    torch._dynamo.config.recompile_limit = 64  # kinds of blocks, each with and without gradients


class Progress:
    """One updating line on a terminal; into a file a plain line every few seconds."""

    def __init__(self, every=5.0):
        self.terminal, self.every, self.last = sys.stdout.isatty(), every, -math.inf

    def show(self, line):
        now = time.monotonic()
        if self.terminal:
            print(f"\r{line}\x1b[K", end="", flush=True)
        elif now - self.last >= self.every:
            self.last = now
            print(line, flush=True)

    def end(self):
        if self.terminal:
            print()


def file_digest(path):
    """sha256 of a file's content."""
    with open(path, "rb") as f:
        return prepare.sha256(f.read())


def save(path, content):
    """torch.save, whole or not at all; on the disk when this returns True, so that no crash after it costs the training."""
    try:
        with prepare.replace_file(path, "wb") as f:
            torch.save(content, f)
        print(f"Saved until it is evaluated: {path}")
        return True
    except (OSError, RuntimeError) as e:  # a full disk: it was only a safety net, and the evaluation goes on
        print(f"WARNING: the model could not be saved ({e})")
        return False


def load(path, device):
    """What `save` wrote, as data: nothing in the file is executed. Anything else ends the run."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        fail(f"{path}: no such file")
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # whatever torch makes of a file that isn't one
        fail(f"{path}: not a saved model ({' '.join(str(e).split())[:120]})")
    if not isinstance(content, dict):
        fail(f"{path}: not a saved model, but a {type(content).__name__}")
    return content

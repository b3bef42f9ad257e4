"""What can this machine do, and what would a training step take on it?

    python doctor/probe.py [copy | gemm | attention | sdpa]

Copy bandwidth; bfloat16 GEMM in the three layouts of a linear layer (forward, gradient of the input, of the weight) on each BLAS
library; causal attention at the shapes of a run by each of SDPA's backends, forced, and by kernels/, forward and with backward; and from
these the step on paper. Every number is checked against float32 products and a softmax, because wrong ones are reported on some parts. With
a part's name it prints that part alone, as JSON lines; `sdpa` is the attention part at a small shape, without kernels/.

Each library and each backend has a process of its own: one that crashes, hangs or spoils its process is named, and loses only itself.
`python doctor.py --probe` calls it a part at a time. The functions take small sizes on a CPU, for tests, and import torch themselves: the
rest works where torch does not.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from doctor.words import one_line
from harness.common import child

FILE = os.path.abspath(__file__)
PROGRAM = [sys.executable, FILE, "--child"]
HANG_SECONDS = 90  # without a row
# The training step of the protocol's model: train.py as it comes.
BATCH, CONTEXT, N_HEAD, HEAD_DIM, N_EMBD, VOCABULARY, WINDOW = 16, 2048, 4, 128, 512, 8192, 1024
STEP_TOKENS, WINDOWED_LAYERS, FULL_LAYERS = 2**17, 6, 2
STEP_BYTES = 107e9  # what its elementwise kernels move: 25 ms on an H200 that copies 4.3 TB/s
LAYOUTS = ("forward", "dgrad", "wgrad")


def seconds_of(call, device, rounds=5):
    """The median time of a call, after two that compile and tune; on a GPU that of its work, three calls at once, not of launching it."""
    import torch

    for _ in range(2):
        call()
    times = []
    for _ in range(rounds):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # some milliseconds in which Python runs ahead
            begin.record()
            for _ in range(3):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 3e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_copy(device, mib=512):
    """Bytes read and written per second by a copy of one tensor to another."""
    import torch

    x = torch.zeros(mib * 2**20, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return {"what": "copy", "mib": mib, "bytes_per_s": 2 * x.numel() / seconds_of(lambda: y.copy_(x), device)}


GEMM_SHAPES = ((4096, 4096, 4096), (BATCH * CONTEXT, 4 * N_EMBD, N_EMBD), (BATCH * CONTEXT, VOCABULARY, N_EMBD))


def blas_backends(device):
    """(what torch calls it, what it is) of each BLAS library; a CPU has one."""
    import torch

    if device != "cuda":
        return [("", "CPU")]
    if torch.version.hip:
        return [("cublas", "rocBLAS"), ("cublaslt", "hipBLASLt"), ("ck", "CK")]
    return [("cublas", "cuBLAS"), ("cublaslt", "cuBLASLt")]


def measure_layer(device, rows, outputs, inputs, library=""):
    """A bfloat16 linear layer's three products (three layouts): FLOP/s, and the error against float32 in 64 rows of each.

    library: torch's name of the one that makes them, empty for any; the float32 products are made before it is called.
    """
    import torch

    torch.manual_seed(0)
    x, w, dy = (torch.randn(shape, device=device).bfloat16() for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    calls = {"forward": lambda: x @ w.T, "dgrad": lambda: dy @ w, "wgrad": lambda: dy.T @ x}
    some = min(64, rows, outputs)
    exact = x[:some].float() @ w.float().T, dy[:some].float() @ w.float(), dy[:, :some].float().T @ x.float()
    if library:
        taken = str(torch.backends.cuda.preferred_blas_library(library))
        if not taken.lower().endswith(f".{library}"):  # a part that the library does not know
            raise RuntimeError(f"torch takes {taken} instead")
    found = {}
    for (layout, call), right in zip(calls.items(), exact):
        error = ((call()[:some].float() - right).norm() / right.norm()).item()
        found[layout] = {"flops": 2 * rows * outputs * inputs / seconds_of(call, device), "error": error, "right": error < 2e-2}
    return found


def measure_gemm(device, library, shapes=GEMM_SHAPES):
    """A row of `measure_layer` for each shape (rows, outputs, inputs), by one BLAS library."""
    key = next(key for key, name in blas_backends(device) if name == library)
    for shape in shapes:
        row = {"what": "gemm", "library": library, "shape": list(shape)}
        try:
            row |= measure_layer(device, *shape, key)
        except Exception as error:
            row["why"] = one_line(error)
        yield row


def attention_reference(q, k, v, do, window=None):
    """(o, dq, dk, dv) in float32, a batch row at a time; all (B, T, n_head, head_dim)."""
    import torch

    T = q.shape[1]
    distance = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    seen = (distance >= 0) & (distance <= (T if window is None else window))
    parts = []
    for row in range(q.shape[0]):
        leaves = [x[row].float().transpose(0, 1).requires_grad_() for x in (q, k, v)]  # (n_head, T, head_dim)
        scores = (leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)
        o = scores.softmax(-1) @ leaves[2]
        gradients = torch.autograd.grad(o, leaves, do[row].float().transpose(0, 1))
        parts.append([x.detach().transpose(0, 1) for x in (o, *gradients)])
    return [torch.stack(x) for x in zip(*parts)]


SDPA = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH", "default": None}
OURS, WINDOWED = "kernels/", f"kernels/ window {WINDOW}"


def attention_backends(device):
    """What measure_attention takes; `default` is torch's own choice."""
    import torch

    others = () if device == "cuda" and not torch.version.hip else ("cudnn",)
    return [name for name in ("flash", "efficient", "cudnn", "math", OURS, WINDOWED, "default") if name not in others]


def measure_attention(device, backend, shape=(BATCH, CONTEXT, N_HEAD, HEAD_DIM), window=WINDOW, rounds=5):
    """A row: seconds forward and with backward of one of `attention_backends`, and the largest relative error of o, dq, dk, dv against
    float32. `shape` is (B, T, n_head, head_dim), causal, bfloat16. "harm" says what it did to its process."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    q, k, v, do = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    row = {"what": "attention", "backend": backend, "window": window if backend == WINDOWED else None}

    def forward():
        if backend in (OURS, WINDOWED):
            from kernels.attention import flash_attention

            return flash_attention(*leaves, window=row["window"])
        with sdpa_kernel(getattr(SDPBackend, SDPA[backend])) if SDPA[backend] else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True).transpose(1, 2)

    def both():
        o = forward()
        return o, *torch.autograd.grad(o, leaves, do)

    def error(results, exact):
        errors = [((a.detach().float() - b).norm() / b.norm()).item() for a, b in zip(results, exact)]
        return max(e if e < 1e9 else 1e9 for e in errors)  # NaN too: it is no JSON

    inputs = [x.detach() for x in (q, k, v, do)]
    try:
        exact = attention_reference(*inputs, row["window"])  # before the first call: its process may not be able to afterwards
        results = both()
        if device == "cuda":
            torch.cuda.synchronize()
        try:
            row["error"] = error(results, exact)
            again = error(attention_reference(*(x[:1] for x in inputs), row["window"]), [x[:1] for x in exact])
            if again > 1e-3:
                row["harm"] = f"after it plain attention is wrong (error {again:.1e})"
        except torch.OutOfMemoryError:
            raise
        except Exception as caught:
            row["harm"] = f"after it plain attention fails ({one_line(caught)})"
            return row
        row["right"] = row["error"] < 2e-2
        del results
        with torch.no_grad():
            row["forward_s"] = seconds_of(forward, device, rounds)
        row["both_s"] = seconds_of(both, device, rounds)
    except Exception as caught:
        row["why"] = one_line(caught)
    if backend == "default":
        with contextlib.suppress(Exception):
            row["chosen"] = SDPBackend(torch._fused_sdp_choice(*(x.transpose(1, 2) for x in leaves), is_causal=True)).name
    return row


def step_on_paper(rows, tokens=STEP_TOKENS):
    """Seconds of one step of the protocol's model from the rows above: each GEMM layout by its best library, attention by its best right
    backend, elementwise work at the copy bandwidth. A model, not a measurement; None where a part is missing."""
    shape = list(GEMM_SHAPES[1])
    rates = {}
    for layout in LAYOUTS:
        good = [r[layout]["flops"] for r in rows if r["what"] == "gemm" and r.get("shape") == shape and r.get(layout, {}).get("right")]
        rates[layout] = max(good, default=0)
    right = [r for r in rows if r["what"] == "attention" and r.get("right") and "both_s" in r and "harm" not in r]
    full = min((r["both_s"] for r in right if r["window"] is None), default=0)
    windowed = min((r["both_s"] for r in right), default=0)
    copy = next((r["bytes_per_s"] for r in rows if r["what"] == "copy"), 0)
    if not (all(rates.values()) and full and copy):
        return None
    matrices = 8 * 12 * N_EMBD**2 + VOCABULARY * N_EMBD
    gemm = sum(2 * matrices * tokens / rate for rate in rates.values())
    attention = tokens / (BATCH * CONTEXT) * (WINDOWED_LAYERS * windowed + FULL_LAYERS * full)
    elementwise = STEP_BYTES * tokens / STEP_TOKENS / copy
    total = gemm + attention + elementwise
    flops = 6 * matrices * tokens + 12 * N_EMBD * (WINDOWED_LAYERS * WINDOW + FULL_LAYERS * CONTEXT) * tokens
    found = {"gemm_s": gemm, "attention_s": attention, "elementwise_s": elementwise, "total_s": total}
    return {"what": "step"} | found | {"tokens_per_s": tokens / total, "flops_per_s": flops / total}


PARTS = ("copy", "gemm", "attention")
SMALL = {"shape": (2, 512, N_HEAD, HEAD_DIM), "rounds": 3}


def candidates(part, device):
    """What is measured in a process of its own for a part."""
    if part == "copy":
        return ["copy"]
    if part == "gemm":
        return [name for _, name in blas_backends(device)]
    return [name for name in attention_backends(device) if part == "attention" or name in SDPA]


def measure(part, candidate, device):
    """The rows of one of a part's candidates, in this process."""
    if part == "copy":
        return [measure_copy(device)]
    if part == "gemm":
        return measure_gemm(device, candidate)
    return [measure_attention(device, candidate, **(SMALL if part == "sdpa" else {}))]


def rows_of(part, device):
    """The rows of a part, as they come. They are started together, so that importing torch costs its seconds once, and measure in turn."""
    with contextlib.ExitStack() as stack:
        started = [(name, stack.enter_context(child.Child(PROGRAM))) for name in candidates(part, device)]
        for name, process in started:
            yield from process.answers({"part": part, "candidate": name, "device": device}, HANG_SECONDS)
            if process.end:
                column = {"gemm": {"library": name}, "copy": {}}.get(part, {"backend": name})
                yield {"what": "attention" if part == "sdpa" else part} | column | {"harm": process.end}


def words(row):
    """A row as a line."""
    if row["what"] == "step":
        parts = f"GEMM {row['gemm_s']:.3f} + attention {row['attention_s']:.3f} + elementwise {row['elementwise_s']:.3f}"
        speed = f"{row['tokens_per_s']:,.0f} tokens/s, {row['flops_per_s'] / 1e12:.1f} TFLOP/s"
        return f"the step on paper (modelled from these): {parts} = {row['total_s']:.3f} s, {speed}"
    name = " ".join(filter(None, (row["what"], row.get("library"), row.get("backend"))))
    if "chosen" in row:
        name += f" ({row['chosen']})"
    if "harm" in row:
        return f"{name}: {row['harm']}"
    if "why" in row:
        return f"{name}: not measured, {row['why']}"
    if row["what"] == "copy":
        return f"copy: {row['bytes_per_s'] / 1e9:.0f} GB/s"
    if row["what"] == "gemm":
        rates = (f"{layout} {row[layout]['flops'] / 1e12:.1f}{'' if row[layout]['right'] else ' WRONG'}" for layout in LAYOUTS)
        return f"{name} bf16 {' × '.join(map(str, row['shape']))}: {', '.join(rates)} TFLOP/s"
    times = f"{row['forward_s'] * 1e3:.3f} ms forward, {row['both_s'] * 1e3:.3f} with backward"
    return f"{name}: {times}, {'right' if row['right'] else 'WRONG'} (error {row['error']:.1e})"


def find_device():
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU that torch can use: nothing to measure")
    return "cuda"


def main():
    part = sys.argv[1] if len(sys.argv) > 1 else None
    if part == "--child":
        import torch

        attention_reference(*torch.randn(4, 1, 2, 1, 2))  # what torch imports at the first gradient, while it waits
        task, answer = child.begin()
        for row in measure(task["part"], task["candidate"], task["device"]):
            answer(**row)
        os._exit(0)  # a GPU's driver may crash while Python tidies up: that harms nothing
    if part not in (None, "sdpa", *PARTS):
        sys.exit(f"{part!r} is no part: use one of copy, gemm, attention, sdpa, or none for all")
    device, rows = find_device(), []
    for name in [part] if part else PARTS:
        for row in rows_of(name, device):
            print(json.dumps(row) if part else words(row), flush=True)
            rows.append(row)
    if not part and (step := step_on_paper(rows)):
        print(words(step))


if __name__ == "__main__":
    main()

"""Which backends of scaled_dot_product_attention does this build of torch really have?

    python benchmarks/sdpa_probe.py

`torch.backends.cuda.flash_sdp_enabled()` says what is allowed, not what is there. So each backend is forced, run forward and
backward, and its numbers are checked against float64 products; then the default's choice is shown. On ROCm everything is done twice,
without and with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 (torch reads it once). Each backend has processes of its own: one that crashes,
hangs or spoils its process is named, and loses only itself. Ends with a verdict.
"""

import contextlib
import os
import sys
import time
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.common import child

SWITCH = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
FLAGS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "math_sdp_enabled")
SHAPES = ((2, 4, 1024, 64), (2, 4, 1024, 128))  # (B, n_head, T, head_dim)
PROGRAM = [sys.executable, os.path.abspath(__file__), "--child"]
HANG_SECONDS = 90  # without a row


def milliseconds(call, rounds, device):
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def exact_attention(q, k, v, do):
    """(o, dq, dk, dv) in float64, by products and a softmax."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()
    o = (leaves[0] @ leaves[1].mT / q.size(3) ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ leaves[2]
    return o, *torch.autograd.grad(o, leaves, do.double())


def relative_errors(results, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact)]


def try_backend(name, device):
    """Yields a row for each shape, of one of BACKENDS, or None, torch's own choice."""
    inputs = []
    for B, n_head, T, head_dim in SHAPES:
        torch.manual_seed(0)
        shape = B, n_head, T if device == "cuda" else 128, head_dim
        inputs.append([torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)])
    references = [exact_attention(*tensors) for tensors in inputs]  # before the first call: its process may not be able to afterwards
    for tensors, exact in zip(inputs, references):
        yield try_shape(name, tensors, exact, device)


def try_shape(name, tensors, exact, device):
    """A row: milliseconds forward and forward + backward, and whether (o, dq, dk, dv) are right; or why not, or what harm was done."""
    leaves, do = [x.detach().requires_grad_() for x in tensors[:3]], tensors[3]
    row = {"backend": name or "default", "head_dim": do.size(3), "right": None, "why": ""}

    def forward():
        with sdpa_kernel(getattr(SDPBackend, name)) if name else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    def both():
        o = forward()
        return o, *torch.autograd.grad(o, leaves, do)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = both()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            reasons = [str(w.message).splitlines()[0] for w in caught]
            row["why"] = (reasons[-1] if reasons else str(error).splitlines()[0])[:160]
    try:
        if not row["why"]:
            row["errors"] = relative_errors(results, exact)
            row["right"] = all(e < 2e-2 for e in row["errors"])  # NaN is not
            del results
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            rounds = 20 if device == "cuda" else 3
            row["forward_ms"], row["both_ms"] = milliseconds(forward, rounds, device), milliseconds(both, rounds, device)
            if device == "cuda":
                row["memory_mib"] = (torch.cuda.max_memory_allocated() - base) / 2**20
        if max(relative_errors(exact_attention(*tensors), exact)) > 1e-6:
            row["harm"] = "after it products are wrong"
    except Exception as error:
        row["harm"] = f"after it others fail ({' '.join(str(error).split())[:120]})"
    if name is None:
        row["chosen"] = "?"
        with contextlib.suppress(Exception):
            row["chosen"] = SDPBackend(torch._fused_sdp_choice(*leaves, is_causal=True)).name
    return row


def try_all(switch, device):
    """The rows of every backend, each tried in a process of its own, with the switch set to "1" or unset (None)."""
    environment = {k: v for k, v in os.environ.items() if k != SWITCH} | ({SWITCH: switch} if switch else {})
    rows = []
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(child.Child(PROGRAM, environment)) for name in (*BACKENDS, None)}
        for name, process in started.items():
            answers = list(process.answers({"backend": name, "device": device}, HANG_SECONDS))
            for _, _, _, head_dim in SHAPES[len(answers) :]:
                answers.append({"backend": name or "default", "head_dim": head_dim, "harm": process.end or "its process gave no answer"})
            rows += answers
    return rows


def show(rows):
    for row in rows:
        name = row["backend"] + (f" → {row['chosen']}" if "chosen" in row else "")
        if "harm" in row:
            print(f"  {name:<28}head_dim {row['head_dim']:<4} {row['harm']}")
        elif row["right"] is None:
            print(f"  {name:<28}head_dim {row['head_dim']:<4} not there: {row['why']}")
        else:
            numbers = "right" if row["right"] else "WRONG NUMBERS, relative errors " + ", ".join(f"{e:.1e}" for e in row["errors"])
            memory = f"{row['memory_mib']:7.0f} MiB" if "memory_mib" in row else ""
            times = f"{row['forward_ms']:8.3f} ms forward {row['both_ms']:8.3f} both"
            print(f"  {name:<28}head_dim {row['head_dim']:<4} {times} {memory}  {numbers}")


def good(rows, name):
    of = [row for row in rows or () if row["backend"] == name]
    return bool(of) and all(row.get("right") and "harm" not in row for row in of)


def verdict(without, switched, device):
    """Plain words: `without` and `switched` are the rows without and with the switch (None: not run)."""
    lines, every = [], [*without, *(switched or ())]
    wrong = {row["backend"] for row in every if row.get("right") is False}
    if wrong:
        lines.append(f"WRONG numbers from {', '.join(sorted(wrong))}: do not use, whatever their speed.")
    harm = {row["backend"]: row["harm"] for row in every if "harm" in row}
    if harm:
        lines.append(
            f"Do not use, for what they do to their process: {', '.join(f'{name} ({what})' for name, what in sorted(harm.items()))}."
        )
    plain, after = good(without, "FLASH_ATTENTION"), good(switched, "FLASH_ATTENTION")
    if device == "cpu":
        lines.append("No GPU: SDPA runs on the CPU; nothing to choose.")
    elif plain:
        lines.append("Flash attention is really there, forward and backward: SDPA needs nothing set.")
        if switched and not after:
            lines.append(f"With {SWITCH}=1 it is lost: leave it unset.")
    elif after:
        lines.append(
            f"Flash attention is there only with {SWITCH}=1: set it before python starts, or SDPA takes another way, "
            "much slower and with memory that grows with T²."
        )
    else:
        fast = [n for n in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION") if good(without, n) or good(switched, n)]
        lines.append(
            "No flash attention in this build, whatever is enabled"
            + (
                f"; {' and '.join(fast)} work."
                if fast
                else ": SDPA falls back to the mathematical way, slow and with memory that grows with T². Use kernels.flash_attention."
            )
        )
    if torch.backends.cuda.flash_sdp_enabled() and not plain and device != "cpu":
        lines.append("(torch.backends.cuda.flash_sdp_enabled() says True all the same: it tells what is allowed, not what is there.)")
    return lines


def main():
    if "--child" in sys.argv:
        exact_attention(*torch.randn(4, 1, 1, 2, 2))  # what torch imports at the first gradient, while it waits
        task, answer = child.begin()
        for row in try_backend(task["backend"], task["device"]):
            answer(**row)
        os._exit(0)  # a GPU's driver may crash while Python tidies up: that harms nothing
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"torch {torch.__version__}, {'ROCm ' + torch.version.hip if torch.version.hip else 'CUDA ' + str(torch.version.cuda)}"
        f"{', ' + torch.cuda.get_device_name() if device == 'cuda' else ''}; causal, bfloat16, forward and backward"
    )
    print(f"{SWITCH} unset" if torch.version.hip else "each backend, forced")
    print(f"  allowed by torch.backends.cuda: {', '.join(name for name in FLAGS if getattr(torch.backends.cuda, name)())}", flush=True)
    without, switched = try_all(None, device), None
    show(without)
    if torch.version.hip:
        print(f"{SWITCH}=1", flush=True)
        switched = try_all("1", device)
        show(switched)
    print("\nverdict")
    for line in verdict(without, switched, device):
        print("  " + line)


if __name__ == "__main__":
    main()

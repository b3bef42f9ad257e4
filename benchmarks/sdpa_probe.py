"""Which backends of scaled_dot_product_attention does this build of torch really have?

    python benchmarks/sdpa_probe.py

`torch.backends.cuda.flash_sdp_enabled()` says what is allowed, not what is there. So each backend is forced, run forward and
backward, and its numbers are checked against float64; then the default's choice is shown. On ROCm everything is done twice, without
and with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 (torch reads it once, so in processes of their own). Ends with a verdict.
"""

import json
import os
import subprocess
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SWITCH = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
FLAGS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "math_sdp_enabled")
SHAPES = ((2, 4, 1024, 64), (2, 4, 1024, 128))  # (B, n_head, T, head_dim)


def run(backend, q, k, v, do, rounds):
    """(o, dq, dk, dv) and milliseconds, forward and forward + backward; `backend` None is torch's own choice."""

    def forward():
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both():
        o = forward()
        return o, *torch.autograd.grad(o, (q, k, v), do)

    def clock(call):
        times = []
        for _ in range(rounds):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[len(times) // 2]

    synchronize = torch.cuda.synchronize if q.is_cuda else (lambda: None)
    results = both()
    return results, clock(forward), clock(both)


def probe():
    """One process's findings, as a dictionary that json can carry."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "hip": torch.version.hip,
        "backends": [],
        "arch": getattr(torch.cuda.get_device_properties(0), "gcnArchName", "") if device == "cuda" else "",
        "flags": {name: getattr(torch.backends.cuda, name)() for name in FLAGS},
    }
    for B, n_head, T, head_dim in SHAPES:
        T = T if device == "cuda" else 128
        torch.manual_seed(0)
        q, k, v, do = (torch.randn(B, n_head, T, head_dim, device=device, dtype=dtype) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        wide = [x.detach().double().requires_grad_() for x in leaves]
        seen = torch.ones(T, T, dtype=torch.bool, device=device).tril()
        o = (wide[0] @ wide[1].mT / head_dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ wide[2]
        exact = o, *torch.autograd.grad(o, wide, do.double())
        for name in (*BACKENDS, None):
            row = {"backend": name or "default", "head_dim": head_dim}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    backend = getattr(SDPBackend, name) if name else None
                    if device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                        base = torch.cuda.memory_allocated()
                    results, row["forward_ms"], row["both_ms"] = run(backend, *leaves, do, 20 if device == "cuda" else 3)
                    if device == "cuda":
                        row["memory_mib"] = (torch.cuda.max_memory_allocated() - base) / 2**20
                    row["errors"] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact)]
                    row["right"] = all(e < 2e-2 for e in row["errors"])  # NaN is not
                    row["why"] = ""
                except Exception as error:
                    reasons = [str(w.message).splitlines()[0] for w in caught]
                    row["right"], row["why"] = None, (reasons[-1] if reasons else str(error).splitlines()[0])[:160]
                if name is None:
                    try:
                        row["chosen"] = SDPBackend(torch._fused_sdp_choice(*leaves, is_causal=True)).name
                    except Exception:
                        row["chosen"] = "?"
            found["backends"].append(row)
    return found


def show(found):
    for row in found["backends"]:
        name = row["backend"] + (f" → {row['chosen']}" if "chosen" in row else "")
        if row["right"] is None:
            print(f"  {name:<28}head_dim {row['head_dim']:<4} not there: {row['why']}")
        else:
            numbers = "right" if row["right"] else "WRONG NUMBERS, relative errors " + ", ".join(f"{e:.1e}" for e in row["errors"])
            memory = f"{row['memory_mib']:7.0f} MiB" if "memory_mib" in row else ""
            times = f"{row['forward_ms']:8.3f} ms forward {row['both_ms']:8.3f} both"
            print(f"  {name:<28}head_dim {row['head_dim']:<4} {times} {memory}  {numbers}")


def good(found, name):
    return bool(found) and all(row["right"] for row in found["backends"] if row["backend"] == name)


def verdict(without, switched):
    """Plain words: `without` and `switched` are what was found without and with the switch (None: not run)."""
    lines = []
    wrong = {row["backend"] for f in (without, switched) if f for row in f["backends"] if row["right"] is False}
    if wrong:
        lines.append(f"WRONG numbers from {', '.join(sorted(wrong))}: do not use, whatever their speed.")
    plain, after = good(without, "FLASH_ATTENTION"), good(switched, "FLASH_ATTENTION")
    if without["device"] == "cpu":
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
    if without["flags"]["flash_sdp_enabled"] and not plain and without["device"] != "cpu":
        lines.append("(torch.backends.cuda.flash_sdp_enabled() says True all the same: it tells what is allowed, not what is there.)")
    return lines


def child(value):
    environment = {k: v for k, v in os.environ.items() if k != SWITCH} | ({SWITCH: value} if value else {})
    done = subprocess.run([sys.executable, __file__, "--json"], env=environment, capture_output=True, text=True, timeout=600)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):  # a crash is a finding too
        print(f"  the process died (exit code {done.returncode}): {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}")
        return None


def main():
    if "--json" in sys.argv:
        print(json.dumps(probe()))
        return
    print(
        f"torch {torch.__version__}, {'ROCm ' + torch.version.hip if torch.version.hip else 'CUDA ' + str(torch.version.cuda)}"
        f"{', ' + torch.cuda.get_device_name() if torch.cuda.is_available() else ''}; causal, bfloat16, forward and backward"
    )
    print(f"{SWITCH} unset" if torch.version.hip else "each backend, forced")
    without = child(None)
    if without:
        print(f"  allowed by torch.backends.cuda: {', '.join(k for k, v in without['flags'].items() if v)}")
        show(without)
    switched = None
    if torch.version.hip:
        print(f"{SWITCH}=1")
        switched = child("1")
        if switched:
            show(switched)
    print("\nverdict")
    if without is None:
        print("  SDPA could not be tried at all: see the error above.")
        sys.exit(1)
    for line in verdict(without, switched):
        print("  " + line)


if __name__ == "__main__":
    main()

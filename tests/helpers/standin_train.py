"""A stand-in for train.py that takes a moment: it prints what train.py prints, and its constants say how it behaves."""

import os
import subprocess  # noqa: F401 - for what experiments write into behave()
import sys
import time

from prepare import TIME_BUDGET  # noqa: F401

VALUE = 2.0
STEPS = 120
PARAMS = 0.6

# Far enough from the lines above for git to merge changes of both.

BONUS = 0.0
SECONDS = 0.0
BEHAVIOUR = ""
TOKENS = 65536
FINGERPRINT = "0123456789ab"


def summary(value=None, token=None, **changes):
    values = dict(val_bpb=f"{VALUE if value is None else value:.6f}", training_seconds="1.0", total_seconds="2.0", peak_vram_mb="512.0",
                  mfu_percent="n/a", total_tokens_M=f"{STEPS * 4096 / 1e6:.1f}", total_tokens=STEPS * 4096,
                  num_steps=STEPS, num_params_M=PARAMS, depth=4, dataset="demo", fingerprint=FINGERPRINT, eval_tokens=TOKENS,
                  seed=os.environ["AUTORESEARCH_SEED"], device="CPU",
                  torch="2.13.0", tok_per_sec=int(STEPS * 4096), run=token or os.environ["AUTORESEARCH_RUN"]) | changes  # fmt: skip
    print("---")
    for key, text in values.items():
        print(f"{key + ':':<17} {text}")


def main():
    if "--setup" in sys.argv:
        return 0
    time.sleep(SECONDS / 2)
    for step in range(0, STEPS, STEPS // 10):
        print(f"step {step:05d} ({100 * step / STEPS:.1f}%) | loss: {8 - 6 * step / STEPS:.6f} | lrm: 1.00 | remaining: 1s", flush=True)
    time.sleep(SECONDS / 2)
    behave(BEHAVIOUR)
    print(f"Evaluating {TOKENS:,} tokens", flush=True)
    value = VALUE - BONUS + (int(os.environ["AUTORESEARCH_SEED"]) - 42) * 0.001
    print(f"Evaluated {TOKENS:,} tokens: val_bpb {value:.6f}")
    summary(value)
    return 0


def behave(how):
    """Nothing; experiments write here what goes wrong."""


if __name__ == "__main__":
    sys.exit(main())

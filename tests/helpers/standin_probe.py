"""A program that tries SDPA's backends, on the CPU, where some of them do what bad drivers do: `standin_probe.py doctor.probe sdpa`.

Tests, and the doctor in a test, start this one in its place.
"""

import contextlib
import importlib
import signal
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "benchmarks"), str(PROJECT / "tests" / "helpers")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from standin_candidates import AfterBackward, end_by, hang, poison, talk  # noqa: E402

ACTS = {"FLASH_ATTENTION": end_by(signal.SIGSEGV), "EFFICIENT_ATTENTION": hang, "CUDNN_ATTENTION": talk, "MATH": poison}
FORCED = [None]
attend = F.scaled_dot_product_attention


@contextlib.contextmanager
def sdpa_kernel(backend):
    """As torch's, which has not all of them on a CPU."""
    FORCED.append(backend.name)
    yield
    FORCED.pop()


def scaled_dot_product_attention(*args, **kwargs):
    act = ACTS.get(FORCED[-1], lambda: None)
    return AfterBackward.apply(attend(*args, **kwargs), act)


def main():
    name = sys.argv.pop(1)
    program = importlib.import_module(name)
    program.PROGRAM = [sys.executable, __file__, name, "--child"]
    program.HANG_SECONDS = 3
    program.find_device = lambda: "cpu"
    program.SMALL = {"shape": (2, 32, 2, 16), "rounds": 1}
    program.SHAPES = ((1, 2, 128, 64), (1, 2, 128, 128))
    torch.nn.attention.sdpa_kernel = program.sdpa_kernel = sdpa_kernel
    F.scaled_dot_product_attention = scaled_dot_product_attention
    program.main()


if __name__ == "__main__":
    main()

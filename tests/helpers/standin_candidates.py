"""candidates.py with candidates beside its own that do what a bad driver does. Tests have backends.py start this program in its place."""

import contextlib
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from harness import candidates


class AfterBackward(torch.autograd.Function):
    """The identity; `act` is called at the end of its backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.act()
        return dy, None


def after(act, wider=0):
    """Attention that is right, or with a window that is `wider`, forward and backward, and then acts; never the fastest."""

    def make(window, T, device):
        right = candidates.sdpa(window + wider, T, device)

        def attend(q, k, v):
            time.sleep(0.03)
            return AfterBackward.apply(right(q, k, v), lambda: act(window))

        return attend

    return make


def poison(*_):
    """Nothing on tensors works from here on, as with a context that an illegal access has spoilt."""

    def fail(*args, **kwargs):
        raise RuntimeError("HIP error: invalid argument")

    for owner, name in ((torch.Tensor, "float"), (torch.Tensor, "norm"), (torch.Tensor, "__matmul__"), (torch, "randn"), (torch, "empty")):
        setattr(owner, name, fail)
    F.scaled_dot_product_attention = fail


def poison_products(*_):
    """Numbers that were computed can still be looked at, but no more made: what a check of its own output alone does not see."""

    def fail(*args, **kwargs):
        raise RuntimeError("HIP error: invalid argument")

    torch.Tensor.__matmul__ = torch.mm = fail


def spoil_numbers(*_):
    """Products give wrong numbers from here on."""
    right = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda a, b: 1.01 * right(a, b)


def end_by(number):
    return lambda *_: os.kill(os.getpid(), number)


def in_the_second_window(act):
    return lambda window: act(window) if window >= 64 else None


def talk(*_):
    print('{"case": 0, "found": 1e-9}\n\x00\xff"[[[', flush=True)
    os.write(1, b'{"case": 0, "found": 1e-9}\n\xff\n[1, 2\n')


def hang(*_):
    time.sleep(600)


def no_memory(*_):
    raise torch.OutOfMemoryError("HIP out of memory")


def after_another(name):
    """What is right by itself, and no longer once `name` was called in the same process."""

    def make(window, T, device):
        right = candidates.sdpa(window, T, device)

        def attend(q, k, v):
            if name in CALLED:
                raise RuntimeError("HIP error: invalid argument")
            return right(q, k, v)

        return attend

    return make


CALLED = set()
BAD = {
    "poisons": after(poison),
    "poisons products": after(poison_products),
    "spoils numbers": after(spoil_numbers),
    "segfaults": after(end_by(signal.SIGSEGV)),
    "aborts later": after(in_the_second_window(end_by(signal.SIGABRT))),
    "is killed": after(end_by(signal.SIGKILL)),
    "hangs": after(hang),
    "talks": after(talk),
    "has no memory": after(no_memory),
    "wrong": after(lambda window: None, wider=1),
    "after aotriton fails": after_another("aotriton"),
    "aotriton": after(lambda window: CALLED.add("aotriton")),
}


def bad_products():
    """Of the ways to form a weight's gradient on AMD: two that end or spoil the process, one that is wrong."""
    linear = import_module("kernels.linear")
    product, acts = linear.weight_gradient, {("direct", "cublaslt"): poison_products, ("copied", "cublaslt"): end_by(signal.SIGSEGV)}

    def weight_gradient(dy, x, dtype):
        way = linear.WEIGHT_GRADIENT[dy.shape[1], x.shape[1]]
        result = product(dy, x, dtype)
        acts.get(way, lambda: None)()
        return 1.1 * result if way == ("direct", "cublas") else result

    linear.weight_gradient = weight_gradient
    linear.blas = lambda library: contextlib.nullcontext()  # a CPU's torch has one library


if __name__ == "__main__":
    candidates.ATTENTION |= BAD
    bad_products()
    candidates.main()

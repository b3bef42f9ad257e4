"""What may compute attention and the weights' gradients, and what each must show before a run uses it: right numbers, and its speed.

A candidate may do worse than fail: crash, hang, or leave its process unable to go on (on AMD the plain attention that follows AOTriton's is
reported to fail, and all after it). So choice.py has each tried by this file as a program, a process for each candidate. There the
numbers that it is compared with are made first, by products and a softmax alone: whatever they need must not be what a candidate spoils.
"""

import contextlib
import functools
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from harness import machine
from harness.common import child

OUTPUT_LIMIT, GRADIENT_LIMIT = 2.0, 3.0  # times the error of torch's own mathematics in the same precision, against float32


class NoneUsable(RuntimeError):
    """Nothing that may be used runs here and gives right numbers."""


# ---- attention: q (B, T, n_head, head_dim), k and v (B, T, n_kv_head, head_dim) → (B, T, n_head, head_dim) -----------------------------


def _seen(window):
    """Query i sees keys i - window … i."""
    return lambda b, h, q, k: (k <= q) & (q - k <= window)


@functools.lru_cache
def _dense_mask(window, T, device):
    position = torch.arange(T, device=device)
    return _seen(window)(None, None, position[:, None], position[None, :])


@functools.lru_cache
def _block_mask(window, T, device):
    return create_block_mask(_seen(window), None, None, T, T, device=device)


def sdpa(window, T, device):
    """torch's scaled_dot_product_attention, whichever backend it takes; windows by a dense mask, which no flash kernel knows."""
    mask = None if window >= T - 1 else _dense_mask(window, T, device)

    def attend(q, k, v):
        n = q.size(1)
        grouped = q.size(2) != k.size(2)  # each KV head serves several query heads, and is not copied for them
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:n, :n], enable_gqa=grouped).transpose(1, 2)

    return attend


def flex(window, T, device):
    """FlexAttention, which skips the blocks outside the window; fast only where it is compiled."""
    mask = _block_mask(window, T, device)

    def attend(q, k, v):
        grouped = q.size(2) != k.size(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return attend


def flash(window, T, device):
    """torch's own flash operator, which takes windows where the build has them: FlashAttention 2 on NVIDIA, AOTriton ≥ 0.11.2b on AMD."""

    def attend(q, k, v):
        n = q.size(1)
        windows = {} if window >= n - 1 else {"window_size_left": window, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, n, n, 0.0, True, False, **windows)[0]

    return attend


def fused(window, T, device, bounded=True):
    """This project's kernel. Bounded, its scores must stay within ±60: q and k are normed (and random ones, of a check, are far below)."""
    try:
        import kernels
    except ModuleNotFoundError as e:
        raise NoneUsable(f"attention by kernels: not available ({e})") from None
    return lambda q, k, v: kernels.flash_attention(q, k, v, window=None if window >= q.size(1) - 1 else window, bounded=bounded)


any_scores = functools.partial(fused, bounded=False)
ATTENTION = {"kernels": fused, "kernels for any scores": any_scores, "flash": flash, "flex": flex, "sdpa": sdpa}


def _forward_backward(attend, q, k, v, dy):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attend(q, k, v)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]


def _random_inputs(shape, device):
    """q, k, v and the output's gradient, by a generator of their own: a run's random numbers must not depend on what was tried before."""
    B, T, n_head, n_kv_head, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    heads = n_head, n_kv_head, n_kv_head, n_head
    return [torch.randn((B, T, n, head_dim), generator=generator, device=device).bfloat16() for n in heads]


def plain_attention(window, q, k, v, dy):
    """Attention's output and gradients in float32, by products and a softmax.

    Rounded to bfloat16 they are what torch's own mathematics (SDPA's MATH) gives for bfloat16: since torch 2.5 that computes in float32 and
    rounds output and gradients once, unless torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True) is set, which nothing here sets.
    """

    def attend(q, k, v):
        groups = q.size(2) // k.size(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~_dense_mask(window, q.size(2), q.device), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return _forward_backward(attend, *(t.float() for t in (q, k, v, dy)))


def _reference(window, inputs):
    """{row: plain_attention of it} of the first and the last row: between them lies every offset that could overflow."""
    return {row: plain_attention(window, *(t[row : row + 1] for t in inputs)) for row in (0, inputs[0].size(0) - 1)}


def _relative_errors(results, exact):
    return [((r.float() - e).norm() / e.norm()).item() for r, e in zip(results, exact)]


def _rounding_errors(exact):
    return _relative_errors([e.bfloat16() for e in exact], exact)


def _wrong_attention(attend, window, inputs, reference):
    """What is wrong with `attend`, in a few words; None if nothing is. reference: made before `attend` was ever called."""
    try:
        ours = _forward_backward(attend, *inputs)
        machine.synchronize(inputs[0].device)
    except Exception as e:  # whatever a build that lacks it raises
        return _not_available(e)
    try:
        for row, exact in reference.items():
            errors, low = _relative_errors([t[row : row + 1] for t in ours], exact), _rounding_errors(exact)
            for name, error, plain, factor in zip(("output", "dq", "dk", "dv"), errors, low, (OUTPUT_LIMIT, *[GRADIENT_LIMIT] * 3)):
                if not error <= factor * plain:  # NaN too
                    return f"wrong numbers ({name}: relative error {error:.1e}, of plain mathematics {plain:.1e})"
        again = _relative_errors(plain_attention(window, *(t[:1] for t in inputs)), reference[0])
        if not all(error <= low for error, low in zip(again, _rounding_errors(reference[0]))):
            return f"wrong numbers from plain mathematics after it (relative error {max(again):.1e})"
    except Exception as e:
        return _spoilt(e)
    return None


def check_attention(attend, window, shape, device):
    """What is wrong with `attend` at this shape (B, T, n_head, n_kv_head, head_dim), in a few words; None if nothing is."""
    inputs = _random_inputs(shape, device)
    return _wrong_attention(attend, window, inputs, _reference(window, inputs))


def _make(name, window, T, device):
    attend = ATTENTION[name](window, T, device)
    if name != "flex":
        return attend
    machine.keep_compiled()  # for the run too
    return torch.compile(attend, dynamic=False)


def _try_attention(name, windows, device, *shape):
    inputs = _random_inputs(shape, device)
    references = [_reference(window, inputs) for window in windows]
    for window, reference in zip(windows, references):
        try:
            attend = _make(name, window, shape[1], device)
        except Exception as e:
            yield _not_available(e)
            continue
        wrong = _wrong_attention(attend, window, inputs, reference)
        yield wrong or _timed(lambda attend=attend: _forward_backward(attend, *inputs), device)


def _try_together(_, mixtures, device, *shape):
    """A mixture: [[name, window], …]. Each was right in a process of its own; here one follows the other, and the first the last."""
    inputs = _random_inputs(shape, device)
    references = {window: _reference(window, inputs) for mixture in mixtures for _, window in mixture}
    for mixture in mixtures:
        attends = [(name, window, _make(name, window, shape[1], device)) for name, window in mixture]
        total = 0.0
        for name, window, attend in 2 * attends:
            wrong = _wrong_attention(attend, window, inputs, references[window])
            found = wrong or _timed(lambda attend=attend: _forward_backward(attend, *inputs), device)
            if isinstance(found, str):
                yield f"{name} up to {window}: {found}"
                break
            total += found / 2
        else:
            yield total


# ---- weight gradients: dy (rows, out), x (rows, in) → dyᵀ · x (out, in) ----------------------------------------------------------------


def _random_factors(out, in_, rows, device):
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn((rows, n), generator=generator, device=device).bfloat16() for n in (out, in_)]


def _plain_weight_gradient(dy, x):
    """The product in float32, 4096 rows at a time, summed in float64."""
    return sum((a.float().t() @ b.float()).double() for a, b in zip(dy.split(4096), x.split(4096)))


def _try_weight_gradient(way, shapes, device, rows):
    """way: a form and a library by torch's name, which is hipBLASLt or rocBLAS on AMD, as "direct by cublas". shapes: of weights."""
    from kernels.linear import WEIGHT_GRADIENT, weight_gradient

    references = [_plain_weight_gradient(*_random_factors(*shape, rows, device)) for shape in shapes]
    for shape, exact in zip(shapes, references):
        WEIGHT_GRADIENT[tuple(shape)] = tuple(way.split(" by "))
        yield _weight_gradient(lambda dy, x: weight_gradient(dy, x, torch.float32), exact, shape, rows, device)


def _weight_gradient(product, exact, shape, rows, device):
    try:
        factors = _random_factors(*shape, rows, device)
        result = product(*factors)
        machine.synchronize(device)
    except Exception as e:
        return _not_available(e)
    try:
        for what, gradient in (("", result), (" from plain mathematics after it", _plain_weight_gradient(*factors))):
            error = ((gradient.double() - exact).norm() / exact.norm()).item()
            if not error <= 0.01:  # NaN too
                return f"wrong numbers{what} (relative error {error:.1e})"
    except Exception as e:
        return _spoilt(e)
    return _timed(lambda: product(*factors), device)


# ---- the program ------------------------------------------------------------------------------------------------------------------------


def _in_words(error):
    return f"({type(error).__name__}: {' '.join(str(error).split())[:100]})"


def _not_available(error):
    return f"not available {_in_words(error)}"


def _spoilt(error):
    return f"after it plain mathematics fail {_in_words(error)}"


def _milliseconds(f, device, repeats=10):
    for _ in range(3):
        f()
    times = []
    for _ in range(repeats):
        if device.type == "cpu":
            start = time.perf_counter()
            f()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)  # some milliseconds in which Python runs ahead: the device's time is measured, not Python's
        start.record()
        f()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _timed(f, device):
    try:
        return _milliseconds(f, device)
    except Exception as e:
        return _not_available(e)


TRIES = {"attention": _try_attention, "attention together": _try_together, "weight gradient": _try_weight_gradient}


def main():
    """Answer each case of a task by its number with milliseconds, or with what is wrong.

    A task: {"what": a key of TRIES, "candidate": name, "cases": windows or shapes, "device": "cuda:0", "sizes": the shape or rows}.
    """
    with contextlib.suppress(ModuleNotFoundError):
        import kernels  # noqa: F401
    plain_attention(1, *_random_inputs((1, 2, 1, 1, 2), torch.device("cpu")))  # what torch imports at the first gradient, while it waits
    task, answer = child.begin()
    device = torch.device(task["device"])
    machine.cap_shared_memory(device)
    answered = 0
    try:
        for found in TRIES[task["what"]](task["candidate"], task["cases"], device, *task["sizes"]):
            answer(case=answered, found=found)
            answered += 1
    except Exception as e:  # before the candidate was called: there was nothing to compare it with
        for case in range(answered, len(task["cases"])):
            answer(case=case, found=f"not tried {_in_words(e)}")
    os._exit(0)  # a GPU's driver may crash while Python tidies up: that is no candidate's fault


if __name__ == "__main__":
    main()

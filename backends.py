"""Which implementation is right and fastest on this device: of attention, for each window, and of the weight gradients' products.

Nothing is taken on trust. A candidate runs at the run's own shapes, is compared with float32 mathematics, and only then timed, forward and
backward; one with wrong numbers (there are such reports of most of them on some device) is named and never used. What was found is kept in
the cache folder for the device, the versions and the shapes, and said in a line of the run.
"""

import functools
import importlib.util
import json
import math
import os
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import machine
import prepare

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


def fused(window, T, device):
    """This project's kernel. Its scores must stay within ±60: q and k are normed (and random ones, of a check, are far below)."""
    try:
        import kernels
    except ModuleNotFoundError as e:
        raise NoneUsable(f"attention by kernels: not available ({e})") from None
    return lambda q, k, v: kernels.flash_attention(q, k, v, window=None if window >= q.size(1) - 1 else window, bounded=True)


ATTENTION = {"kernels": fused, "flash": flash, "flex": flex, "sdpa": sdpa}


def _forward_backward(attend, q, k, v, dy):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attend(q, k, v)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]


def _not_available(error):
    return f"not available ({type(error).__name__}: {' '.join(str(error).split())[:100]})"


def _relative_errors(results, exact):
    return [((r.float() - e).norm() / e.norm()).item() for r, e in zip(results, exact)]


def _reference(window, T, q, k, v, dy):
    """Output and gradients of torch's plain mathematics in the tensors' own precision."""
    with sdpa_kernel(SDPBackend.MATH):
        return _forward_backward(sdpa(window, T, q.device), q, k, v, dy)


def _random_inputs(shape, device, dtype=torch.bfloat16):
    """q, k, v and the output's gradient, by a generator of their own: a run's random numbers must not depend on what was tried before."""
    B, T, n_head, n_kv_head, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    heads = n_head, n_kv_head, n_kv_head, n_head
    return [torch.randn((B, T, n, head_dim), generator=generator, device=device).to(dtype) for n in heads]


def check_attention(attend, window, shape, device, dtype=torch.bfloat16):
    """What is wrong with `attend` at this shape (B, T, n_head, n_kv_head, head_dim), in a few words; None if nothing is."""
    B, T = shape[:2]
    inputs = _random_inputs(shape, device, dtype)
    try:
        ours = _forward_backward(attend, *inputs)
    except Exception as e:  # whatever a build that lacks it raises
        return _not_available(e)
    for row in {0, B - 1}:  # the first and the last: between them lies every offset that could overflow
        part = slice(row, row + 1)
        exact = _reference(window, T, *(t[part].float() for t in inputs))
        low = _relative_errors(_reference(window, T, *(t[part] for t in inputs)), exact)
        errors = _relative_errors([t[part] for t in ours], exact)
        for name, error, plain, factor in zip(("output", "dq", "dk", "dv"), errors, low, (OUTPUT_LIMIT, *[GRADIENT_LIMIT] * 3)):
            if not error <= factor * plain:  # NaN too
                return f"wrong numbers ({name}: relative error {error:.1e}, of plain mathematics {plain:.1e})"
    return None


def _milliseconds(f, device, repeats=10):
    for _ in range(3):
        f()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)  # some milliseconds in which Python runs ahead: the device's time is measured, not Python's
        start.record()
        f()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _try_attention(name, window, shape, device):
    """Milliseconds of forward and backward, or what is wrong."""
    attend = ATTENTION[name](window, shape[1], device)
    if name == "flex":
        attend = torch.compile(attend, dynamic=False)
    wrong = check_attention(attend, window, shape, device)
    if wrong:
        return wrong
    inputs = _random_inputs(shape, device)
    return _milliseconds(lambda: _forward_backward(attend, *inputs), device)


def choose_attention(asked, windows, shape, device, kernels=True):
    """({window: attend}, their names) for q, k, v of `shape` (B, T, n_head, n_kv_head, head_dim). How fast each was is printed.

    asked: "auto", the name of a backend, or "full", which is torch's attention over the whole context whatever the window is.
    kernels: whether "auto" may choose this project's. Where it may, FlexAttention is not tried: each window costs it a compilation of
    some ten seconds, and it was slower wherever both were measured. NoneUsable if nothing that may be used gives right numbers.
    """
    T = shape[1]
    if asked == "full":
        return dict.fromkeys(windows, sdpa(T, T, device)), "full (sdpa)"
    if device.type == "cpu":
        name = "sdpa" if asked == "auto" else asked
        chosen = {w: ATTENTION[name](w, T, device) for w in windows}
        for w, attend in chosen.items() if asked != "auto" else ():
            if wrong := check_attention(attend, w, (1, *shape[1:]), device):
                raise NoneUsable(f"attention up to {w} by {name}: {wrong}")
        return chosen, name
    candidates = ("kernels" if kernels else "flex", "flash", "sdpa") if asked == "auto" else (asked,)
    return _fastest_attention(windows, shape, device, candidates)


def _fastest_attention(windows, shape, device, candidates):
    chosen, names = {}, []
    for window in sorted(windows):
        key = "attention", window, *shape, *candidates
        tried = _remembered(key, candidates, device, lambda n, w=window: _try_attention(n, w, shape, device))
        times = _usable(tried, f"Attention up to {window} by")
        if not times:
            raise NoneUsable(f"no attention gives right numbers for a window of {window} here: {tried}")
        best = min(times, key=times.get)
        chosen[window] = ATTENTION[best](window, shape[1], device)
        names.append(f"{best} up to {window}")
        milliseconds = ", ".join(f"{n} {t:.2f}" for n, t in sorted(times.items(), key=lambda item: item[1]))
        print(f"Attention up to {window} by {best}; forward and backward in ms: {milliseconds}")
    return chosen, ", ".join(names)


# ---- weight gradients -------------------------------------------------------------------------------------------------------------------


def choose_weight_gradients(shapes, rows, device):
    """Set kernels.linear.WEIGHT_GRADIENT for weights of these (out, in) shapes, and print what was chosen. NoneUsable as above.

    Only on AMD: hipBLASLt's product of that layout is two to four times slow on gfx1151, rocBLAS's is not (ROCm/TheRock#5314).
    """
    if not torch.version.hip:
        return
    from kernels.linear import FORMS, WEIGHT_GRADIENT  # `kernels.linear` by itself is the function of that name

    words, ways = [], [f"{form} by {library}" for library in ("cublaslt", "cublas") for form in FORMS]
    for out, in_ in sorted(set(shapes)):
        key = "weight gradient", out, in_, rows
        tried = _remembered(key, ways, device, lambda way, o=out, i=in_: _try_weight_gradient(way, o, i, rows, device))
        times = _usable(tried, f"Weight gradient {out}x{in_}")
        if not times:
            raise NoneUsable(f"no product gives the right gradient of a weight of {out}x{in_} here: {tried}")
        best = min(times, key=times.get)
        WEIGHT_GRADIENT[out, in_] = tuple(best.split(" by "))
        words.append(f"{out}x{in_} {best} ({times[best]:.2f} ms, slowest {max(times.values()):.2f})")
    print(f"Weight gradients: {', '.join(words)}")


def _try_weight_gradient(way, out, in_, rows, device):
    """Milliseconds, or what is wrong. way: a form and a library by torch's name, which is hipBLASLt or rocBLAS on AMD."""
    from kernels.linear import WEIGHT_GRADIENT, weight_gradient

    generator = torch.Generator(device).manual_seed(0)
    dy, x = (torch.randn((rows, n), generator=generator, device=device).bfloat16() for n in (out, in_))
    exact = sum((a.float().t() @ b.float()).double() for a, b in zip(dy.split(4096), x.split(4096)))
    WEIGHT_GRADIENT[out, in_] = tuple(way.split(" by "))
    try:
        result = weight_gradient(dy, x, torch.float32).double()
    except Exception as e:
        return _not_available(e)
    error = ((result - exact).norm() / exact.norm()).item()
    if not error <= 0.01:  # NaN too
        return f"wrong numbers (relative error {error:.1e})"
    return _milliseconds(lambda: weight_gradient(dy, x, torch.float32), device)


# ---- what was found before --------------------------------------------------------------------------------------------------------------


def _here(device):
    """What the results hold for: device, versions, and the code that they were found with."""
    p = torch.cuda.get_device_properties(device)
    folder = os.path.dirname(os.path.abspath(__file__))
    files = "backends.py", "kernels/attention.py", "kernels/linear.py", "kernels/_common.py"
    code = "".join(machine.file_digest(os.path.join(folder, name))[:8] for name in files)
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "no Triton"
    return [p.name, getattr(p, "gcnArchName", ""), torch.__version__, str(torch.version.hip or torch.version.cuda), triton, code]


def _remembered(what, candidates, device, attempt):
    """{candidate: milliseconds, or what is wrong with it}, by `attempt(candidate)`, or what it gave here before.

    The file holds JSON alone; what can't be such a result is made anew. So is what need not hold tomorrow: that there was no memory for a
    candidate, which is not kept, and that none was usable, which would stop every later run.
    """
    path = os.path.join(prepare.CACHE_DIR, "backends.json")
    key = json.dumps([*_here(device), *what])
    entry = (prepare.read_json(path) or {}).get(key)
    before = {c: entry[c] for c in candidates if _is_time(entry.get(c)) or isinstance(entry.get(c), str)} if isinstance(entry, dict) else {}
    if not any(map(_is_time, before.values())):
        before = {}
    found = {c: before[c] if c in before else attempt(c) for c in candidates}
    kept = {c: f for c, f in found.items() if "OutOfMemoryError" not in str(f)}
    if kept != before:
        try:
            known = prepare.read_json(path) or {}  # as it is now: another run may have measured meanwhile
            with prepare.replace_file(path, "w") as f:
                json.dump(known | {key: kept}, f, indent=1)
        except OSError as e:  # a read-only folder, a full disk: the next run measures again
            print(f"WARNING: what was measured can't be kept ({e})")
    return found


def _is_time(found):
    return isinstance(found, float) and 0 < found < math.inf


def _usable(tried, what):
    """{candidate: milliseconds}; the others are named, with the reason."""
    for candidate, found in tried.items():
        if not _is_time(found):
            print(f"{what} {candidate} is not used: {found}")
    return {candidate: found for candidate, found in tried.items() if _is_time(found)}

"""Which implementation is right and fastest on this device: of attention, for each window, and of the weight gradients' products.

Nothing is taken on trust. Each candidate (candidates.py) is tried at the run's own shapes in a process of its own, which it may crash,
hang or spoil: there it is compared with float32 mathematics, and only then timed, forward and backward. One that ends its process or gives
wrong numbers (there are such reports of most of them on some device) is named and never used, and the run's own process meets only what was
proven. What was found is kept in the cache folder for the device, the versions and the shapes, and said in a line of the run.

Meanwhile the run's process holds its model on the GPU, 4 bytes a parameter, and the driver's own few hundred MB.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import sys

import torch

from harness import checkpoint
from harness.candidates import ATTENTION, NoneUsable, check_attention, sdpa
from harness.common import child
from harness.common.files import read_json, replace_file
from harness.data import dataset as chosen

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = [sys.executable, "-m", "harness.candidates"]  # in ROOT
HANG_SECONDS = 120.0  # without an answer: the slowest that is no hang is a window whose kernels are all compiled and tuned first


# ---- attention --------------------------------------------------------------------------------------------------------------------------


def choose_attention(asked, windows, shape, device, kernels=True):
    """({window: attend}, their names) for q, k, v of `shape` (B, T, n_head, n_kv_head, head_dim). How fast each was is printed.

    asked: "auto", the name of a backend, or "full", which is torch's attention over the whole context whatever the window is.
    kernels: whether "auto" may choose this project's. Where it may, FlexAttention is not tried: each window costs it a compilation of
    some ten seconds, and it was slower wherever both were measured. NoneUsable if nothing that may be used gives right numbers.
    On a CPU nothing is timed, and what is asked for by name is checked in this process: nothing there can spoil it.
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
    best = fastest_names(windows, shape, device, candidates)
    chosen = {window: ATTENTION[name](window, shape[1], device) for window, name in best.items()}
    return chosen, ", ".join(f"{name} up to {window}" for window, name in best.items())


def fastest_names(windows, shape, device, candidates):
    """{window: candidate}, by window, of those that are right here; said in a line for each."""
    times = {}  # window → {candidate: milliseconds}
    for window, tried in zip(sorted(windows), _findings("attention", sorted(windows), shape, candidates, device)):
        times[window] = _usable(tried, f"Attention up to {window} by")
        if not times[window]:
            raise NoneUsable(f"no attention gives right numbers for a window of {window} here: {tried}")
    best = _best_together(times, shape, device)
    for window, name in best.items():
        milliseconds = ", ".join(f"{n} {t:.2f}" for n, t in sorted(times[window].items(), key=lambda item: item[1]))
        print(f"Attention up to {window} by {name}; forward and backward in ms: {milliseconds}")
    return best


class Chosen:
    """What kernels.Fusion asks while a model is compiled, answered by what is fastest here."""

    def __init__(self):
        self.found = {}  # (window, shape, candidates) → candidate

    def attention(self, cases):
        """cases: (window or None, (B, T, n_head, n_kv_head, head_dim), bounded, device). Returns what computes each, as kernels.Fusion
        names it. Scores that are not bounded are our kernel's too, in its other form."""
        groups = {}
        for window, shape, bounded, device in cases:
            ours = "kernels" if bounded else "kernels for any scores"
            groups.setdefault((shape, device, ours), set()).add(shape[1] if window is None else window)
        for (shape, device, ours), windows in groups.items():
            for window, name in fastest_names(windows, shape, device, (ours, "flash", "sdpa")).items():
                self.found[window, shape, ours] = name
        keys = ((shape[1] if w is None else w, shape, "kernels" if bounded else "kernels for any scores") for w, shape, bounded, _ in cases)
        return [self.found[key].removesuffix(" for any scores") for key in keys]

    def products(self, shapes, rows, device):
        choose_weight_gradients(shapes, rows, device)

    def names(self):
        """ "kernels up to 1024, sdpa up to 2048"."""
        return ", ".join(dict.fromkeys(f"{name} up to {window}" for (window, *_), name in sorted(self.found.items()))) or "none"


def _best_together(times, shape, device):
    """{window: candidate}, the fastest of each; where these differ, only if they also work in one process, else one for all windows."""
    best = {window: min(of, key=of.get) for window, of in times.items()}
    if len(set(best.values())) == 1:
        return best
    mixture = [[name, window] for window, name in best.items()]
    (tried,) = _findings("attention together", [mixture], shape, [" and ".join(best.values())], device, stops=False)
    if _usable(tried, "Attention in one process by"):
        return best
    for_all = set.intersection(*map(set, times.values()))
    totals = {name: sum(of[name] for of in times.values()) for name in sorted(for_all)}
    if not totals:
        raise NoneUsable(f"no attention gives right numbers for all windows in one process here: {tried}")
    return dict.fromkeys(best, min(totals, key=totals.get))


# ---- weight gradients -------------------------------------------------------------------------------------------------------------------


def choose_weight_gradients(shapes, rows, device):
    """Set kernels.linear.WEIGHT_GRADIENT for weights of these (out, in) shapes, and print what was chosen. NoneUsable as above.

    Only on AMD: hipBLASLt's product of that layout is two to four times slow on gfx1151, rocBLAS's is not (ROCm/TheRock#5314).
    """
    if not torch.version.hip:
        return
    from kernels.linear import FORMS, WEIGHT_GRADIENT  # `kernels.linear` by itself is the function of that name

    shapes, words = sorted(set(shapes)), []
    ways = [f"{form} by {library}" for library in ("cublaslt", "cublas") for form in FORMS]
    for (out, in_), tried in zip(shapes, _findings("weight gradient", shapes, [rows], ways, device)):
        times = _usable(tried, f"Weight gradient {out}x{in_}")
        if not times:
            raise NoneUsable(f"no product gives the right gradient of a weight of {out}x{in_} here: {tried}")
        best = min(times, key=times.get)
        WEIGHT_GRADIENT[out, in_] = tuple(best.split(" by "))
        words.append(f"{out}x{in_} {best} ({times[best]:.2f} ms, slowest {max(times.values()):.2f})")
    print(f"Weight gradients: {', '.join(words)}")


# ---- what was found: before, or by processes of their own --------------------------------------------------------------------------------


def _here(device):
    """What the results hold for: device, versions, and the code that they were found with."""
    p = torch.cuda.get_device_properties(device)
    files = "harness/choice.py", "harness/candidates.py", "kernels/attention.py", "kernels/linear.py", "kernels/_common.py"
    code = "".join(checkpoint.file_digest(os.path.join(ROOT, name))[:8] for name in files)
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "no Triton"
    return [p.name, getattr(p, "gcnArchName", ""), torch.__version__, str(torch.version.hip or torch.version.cuda), triton, code]


def _findings(what, cases, sizes, candidates, device, stops=True):
    """[{candidate: milliseconds, or what is wrong with it} of each case], as found here before, and the rest tried now.

    what, cases, sizes: as in a task of candidates.py. stops: whether a case that no candidate is usable for stops the run; it is tried
    anew then, lest it stop every later one. The file holds JSON alone; what can't be such a result is made anew. A failure that may be
    over the next time, such as too little memory for a candidate, is not kept (`_holds`), so that candidate is tried again.
    """
    path = os.path.join(chosen.CACHE_DIR, "compiled", "backends.json")
    here = _here(device)
    keys = [json.dumps([*here, what, case, *sizes, *candidates]) for case in cases]
    known, found = {}, []
    with contextlib.suppress(OSError, RecursionError):  # a folder, no permission: `_keep` says it
        known = read_json(path) or {}
    for key in keys:
        entry = known.get(key)
        before = {c: f for c, f in entry.items() if c in candidates and _is_finding(f)} if isinstance(entry, dict) else {}
        found.append(before if any(map(_is_time, before.values())) or not stops else {})
    missing = {c: [n for n, before in enumerate(found) if c not in before] for c in candidates}
    keeps = True
    for candidate, numbers, results in _tried(what, cases, sizes, {c: n for c, n in missing.items() if n}, device):
        for number, result in zip(numbers, results):
            found[number][candidate] = result
        keeps = keeps and _keep(path, {keys[n]: {c: f for c, f in found[n].items() if _holds(f)} for n in numbers})
    return [{c: of[c] for c in candidates} for of in found]


def _keep(path, entries):
    """Write them at once: should the next candidate end this process too, the next run knows these. Returns whether that is possible."""
    try:
        known = read_json(path) or {}  # as it is now: another run may have measured meanwhile
        if known != known | entries:
            with replace_file(path, "w") as f:
                json.dump(known | entries, f, indent=1)
        return True
    except (OSError, RecursionError) as e:  # a read-only folder, a full disk, a folder in its place: the next run measures again
        print(f"WARNING: what was measured can't be kept ({e})")
        return False


def _tried(what, cases, sizes, missing, device):
    """Yields (candidate, numbers, findings) for {candidate: numbers of cases}: a process each, one after the other.

    They are started together, so that importing torch costs its seconds once; none touches the GPU before its turn.
    """
    if not missing:
        return
    print(f"Trying {what} by {', '.join(missing)}, each in a process of its own", flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.ExitStack() as stack:
        programs = {candidate: stack.enter_context(child.Child(PROGRAM, folder=ROOT)) for candidate in missing}
        for candidate, program in programs.items():
            numbers, found = missing[candidate], {}
            task = {"what": what, "candidate": candidate, "cases": [cases[n] for n in numbers], "sizes": sizes, "device": str(device)}
            for answer in program.answers(task, HANG_SECONDS):
                if _is_finding(answer.get("found")) and type(answer.get("case")) is int:
                    found.setdefault(answer["case"], answer["found"])
            unanswered = program.end or "its process gave no answer"
            yield candidate, numbers, [found.get(case, unanswered) for case in range(len(numbers))]


def _is_time(found):
    return isinstance(found, float) and 0 < found < math.inf


def _is_finding(found):
    return _is_time(found) or isinstance(found, str)


def _holds(found):
    """Whether a result can be kept for later runs. These can't: too little memory (also signal 9, with which Linux then ends a process),
    not tried or not started, and ended from outside (signals 2 and 15: somebody stopped the whole run)."""
    passing = r"OutOfMemoryError|signal (2|9|15)\b|not tried|did not start"
    return _is_time(found) or not re.search(passing, found)


def _usable(tried, what):
    """{candidate: milliseconds}; the others are named, with the reason."""
    for candidate, found in tried.items():
        if not _is_time(found):
            print(f"{what} {candidate} is not used: {found}")
    return {candidate: found for candidate, found in tried.items() if _is_time(found)}

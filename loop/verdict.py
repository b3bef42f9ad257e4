"""What becomes of an outcome, in one word and in at most 12 lines."""

import contextlib

from .files import CRASHED, ENVIRONMENT, STOPPED, log_tail, read_outcome
from .ledger import Series


def verdict(turn, outcome):
    """keep, candidate, discard, crash, or None where nothing is known of the idea. Depends on nothing but the two.

    A candidate is better than the best, and does not hold what was kept since it began: see `recovery.try_again`.
    """
    if outcome["state"] in ("environment", "stopped"):
        return None
    if outcome["state"] != "valid":
        return "discard" if outcome["state"] == "pruned" else "crash"
    if turn["kind"] == "noise":
        return "discard"
    if turn["bar"] is None:
        return "keep"
    value, floor = outcome["summary"]["val_bpb"], turn["floor"] or 0.0
    if value < turn["bar"] - turn["margin"] * floor or turn["simpler"] and value <= turn["bar"] + floor:
        return "candidate" if turn["outdated"] else "keep"
    return "discard"


def memory_gb(summary):
    peak = summary.get("peak_vram_mb")
    return peak / 1024 if isinstance(peak, (int, float)) else 0.0


def row_text(turn, outcome, status):
    summary = outcome["summary"] or {}
    valid = outcome["state"] == "valid"
    value, memory = (summary["val_bpb"], memory_gb(summary)) if valid else (0.0, 0.0)
    description = turn["description"]
    if outcome["state"] == "pruned":
        description = f"pruned: {description}"
    elif status == "crash" and outcome["reason"].startswith("invalid"):
        description = f"invalid: {description}"
    elif status == "candidate":
        status, description = "discard", f"candidate: {description}"
    return f"{turn['short']}\t{value:.6f}\t{memory:.1f}\t{status}\t{description}\n"


def compared(difference):
    """A difference of val_bpb in words."""
    return f"{'better' if difference < 0 else 'worse'} by {abs(difference):.6f} than" if difference else "the same as"


def weight_of(difference, floor, outcome, base):
    """What a difference to the best is worth: in noise floors, and in words."""
    floors = abs(difference) / floor if floor else None
    words = not_comparable(difference, outcome, base)
    if floors is None:
        return f": {words}" if words else " (noise not measured: `noise`)"
    return f" = {floors:.1f} floors: {words or ('real' if floors >= 3 else 'probably real' if floors >= 1 else 'may be luck')}"


def speed(summary, before):
    """Tokens/s of a run over another's, where both do equal work: parameters, depth, tokens a step; None where they don't."""

    def work(s):
        tokens = s["total_tokens"] / s["num_steps"] if "total_tokens" in s else round(s["total_tokens_M"] / s["num_steps"], 3)
        return s.get("num_params_M"), s.get("depth"), tokens

    with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
        return summary["tok_per_sec"] / before["tok_per_sec"] if work(summary) == work(before) else None
    return None


def load(outcome):
    """The share of the CPU that other programs took from a run without a GPU; 0 where the run was too short to tell."""
    total = (outcome.get("seconds") or {}).get("total") or 0
    return (outcome.get("other_cpu") or 0.0) if outcome.get("device") == "CPU" and total > 5 else 0.0


def not_comparable(difference, outcome, base):
    """Why a difference to the best says nothing: a slow run that is worse, or a fast one that is better. None where it may be the idea."""
    ratio, busier = speed(outcome["summary"] or {}, base.get("summary") or {}) or 1.0, load(outcome) - load(base)
    for slow, fast, words in ((ratio < 0.9, ratio > 1.1, "speed"), (busier > 0.1, busier < -0.1, "the machine's load")):
        if base and (slow and difference > 0 or fast and difference < 0):
            return f"{words} differs: not comparable"
    return None


def number_text(value, pattern="{:g}"):
    return pattern.format(value) if isinstance(value, (int, float)) else "n/a"


def verdict_lines(turn, outcome, status, notes):
    """(at most 12 short lines, exit code): what whoever started the run has to know."""
    number, summary, state = turn["number"], outcome["summary"] or {}, outcome["state"]
    folder = f"runs/{number}"
    if outcome.get("model"):
        notes = [*notes, f"trained, not evaluated: the model is in {outcome['model']} (train.py --evaluate)"]
    if status is None:
        if turn["kind"] != "try":
            again = "run it again: " + (f"begin {turn['tag']}" if turn["kind"] == "baseline" else turn["kind"])
        elif turn.get("on"):  # the working train.py was given back when it started
            again = f"to try it again: cp {folder}/train.py train.py"
        else:
            again = "train.py is as it was: try it again"
        if state == "stopped":
            return [f"STOPPED run {number}: {outcome['reason']}", f"nothing is recorded; {again}", f"log: {folder}/run.log"], STOPPED
        lines = [
            f"ENVIRONMENT run {number}: {outcome['reason']}",
            "Not the idea's fault: nothing is recorded. End the loop and tell the human.",
        ]
        return [*lines, *log_tail(number, 3), *notes, f"log: {folder}/run.log"], ENVIRONMENT
    if status == "crash" or state == "pruned":
        word = "crash" if status == "crash" else "discard"
        lines = [f"{word} run {number} {turn['short']}: {turn['description']}", outcome["reason"]]
        if status == "crash" and not outcome["reason"].startswith("invalid"):
            lines += [line for line in log_tail(number, 4) if line.removeprefix("FAIL: ")[:200] not in outcome["reason"]]
        return [line[:240] for line in [*lines, *notes, f"log: {folder}/run.log"]], CRASHED if status == "crash" else 0
    series = Series(turn["tag"])
    value = summary["val_bpb"]
    base = read_outcome(turn["base"])
    before = base.get("summary") or {}
    lines = [f"{'noise' if turn['kind'] == 'noise' else status} run {number} {turn['short']}: {turn['description']}"]
    if turn["kind"] == "noise" and series.noise:
        mean, floor, count = series.noise
        lines.append(f"val_bpb {value:.6f}; {count} seeds: mean {mean:.6f}, deviation = noise floor {floor:.6f}")
        if uneven := series.uneven_noise():
            lines.append(f"warning: {UNEVEN.format(100 * uneven)}")
    elif turn["bar"] is None:
        lines.append(f"val_bpb {value:.6f}, the baseline")
    else:
        best = before.get("val_bpb", turn["bar"])
        weight = weight_of(value - best, turn["floor"], outcome, base)
        lines.append(f"val_bpb {value:.6f}, {compared(round(value - best, 6))} the best {best:.6f}{weight}")
        lines += filter(None, ["; ".join(conditions(turn, best, value))])
    steps = number_text(summary.get("num_steps")) + (f" (best {number_text(before.get('num_steps'))})" if before else "")
    took = outcome["seconds"]
    mfu = f"MFU {summary['mfu_percent']} %, " if isinstance(summary.get("mfu_percent"), float) else ""
    lines.append(
        f"memory {memory_gb(summary):.1f} GB, {steps} steps, {mfu}"
        f"{took['total']:.0f} s ({took['startup']:.0f} start, {took['training']:.0f} training, {took['evaluation']:.0f} evaluation)"
    )
    told = speed_warning(outcome, base, same=turn["kind"] == "noise"), longer(outcome, base), throttled(summary)
    lines += [f"warning: {words}" for words in told if words]
    return [*lines, *notes, f"log: {folder}/run.log"], 0


UNEVEN = "the speed of these runs differs by {:.0f} %, so their floor is the machine's load, not seeds: measure it again when it is quiet"


def conditions(turn, best, value):
    """What else decided a verdict, in words: the bar where it is not the best's number, the options that were given; the best's mean."""
    bar, mean, began = turn["bar"], turn.get("mean"), turn.get("began")
    if turn["outdated"] and began and bar <= value < began:
        yield f"better by {began - value:.6f} than what it began from: it may add to the best of now, try it on that"
    if mean:
        yield f"the best's {mean[1]} runs: mean {mean[0]:.6f}"
    if bar < best:
        yield f"to beat was {bar:.6f}, the lowest so far"
    if turn["margin"]:
        yield f"--margin {turn['margin']:g} asked for less than {bar - turn['margin'] * turn['floor']:.6f}"
    if turn["prune"]:
        yield "--prune did not stop it"


def speed_warning(outcome, base, same):
    """A warning where a run was slower or faster than the best's at equal work, or other programs took much of the CPU; None otherwise."""
    others = outcome.get("other_cpu")
    busy = f"other programs used {100 * others:.0f} % of the CPU" if others and others > 0.1 else None
    busier = busy and others > (base.get("other_cpu") or 0) + 0.1  # than when the best ran: else that explains nothing
    ratio = speed(outcome["summary"] or {}, base.get("summary") or {})
    if ratio and not 0.95 <= ratio <= 1.05:
        if ratio < 1:
            cause = "the machine was slow" if same or busier else "the idea costs that, or the machine was slow"
        else:
            cause = "the machine was slow when the best ran" if same else "the idea saves that, or the machine was slow when the best ran"
        size = f"{100 * abs(ratio - 1):.0f} % {'fewer' if ratio < 1 else 'more'} tokens/s than the best at equal size"
        return f"{size}: {cause}{f' ({busy})' if busy else ''}"
    return f"{busy}: the number may be too high" if busy and load(outcome) else None


def longer(outcome, base):
    """A warning where a run trained clearly longer than the best: its own clock is what says when the time budget is used up."""
    took, before = ((o.get("seconds") or {}).get("training") for o in (outcome, base))
    if took and before and took > 1.1 * before + 20:
        return f"training took {took:.0f} s, the best's {before:.0f}: much that is not timed, or more than the time budget"
    return None


def throttled(summary):
    """A warning where the run's own lines say that its GPU was too hot or slowed down (telemetry.py)."""
    said = summary.get("gpu_throttled")
    return f"the GPU throttled ({said}): fewer steps than a cool one makes" if said else None

"""The pictures of a night: every experiment, the time, memory, speed."""

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from .labels import place_labels, stairs
from .look import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, SKY, WIDTH, YELLOW, above, card, dots, drawn, empty, rings, whole_numbers
from .summary import is_kept, pareto, records
from .words import count, cut, duration, hours_text, signed


@drawn
def draw_progress(night):
    """Every experiment and the best so far: the picture of the night."""
    valid, kept, n = night.valid, night.kept, len(night.rows)
    figure, (axes,) = card(4.7, *progress_title(night))
    if not len(valid):
        empty(axes, "lower is better; there is nothing to show yet")
        return figure
    low, high, span = scale(valid)
    top, bottom = high + 0.12 * span, low - 0.18 * span  # what is far off is shown at the edge
    first, last = night.rows["number"].iloc[0] - 0.5, night.rows["number"].iloc[-1] + 0.5
    axes.set(ylim=(bottom, top), xlim=(first - 0.01 * n, last + 0.01 * n), xlabel="experiment")
    axes.xaxis.set_label_coords(1.0, -0.083, axes.transAxes)
    axes.xaxis.label.set(ha="right", va="top")
    above(axes, "val_bpb, lower is better")
    whole_numbers(axes.xaxis)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    size = float(np.clip(1200 / n, 5, 26))  # the more, the smaller
    if len(kept):
        dots(axes, kept["number"], kept["val_bpb"], 1.2 * max(size, 11), label="keep")
    noise, others, shown = valid["kind"] == "noise", valid["status"] != "keep", valid["val_bpb"] <= top
    marks = [("discard", others & ~noise & shown, {}), ("off the scale", others & ~noise & ~shown, dict(marker="^"))]
    marks += [("other seed", others & noise, dict(marker="D", color=INK, linewidths=1.3, zorder=4))]
    for label, which, how in marks:
        if which.any():
            rings(axes, valid["number"][which], valid["val_bpb"][which].clip(upper=top - 0.02 * span), size, label=label, **how)
    crashed = night.rows["number"][night.rows["status"] == "crash"]
    if len(crashed):
        axes.scatter(crashed, [bottom + 0.04 * span] * len(crashed), size, marker="x", color=ORANGE, linewidths=1.1, label="crash")
    line = draw_best(axes, kept, last, night.summary["noise_floor"])
    place = dict(loc="upper left", bbox_to_anchor=(-0.012, -0.075), ncols=6, borderaxespad=0)
    axes.legend(**place, handletextpad=0.3, columnspacing=1.3, handlelength=1.3, markerscale=math.sqrt(24 / size))
    place_labels(axes, labels(night), stairs(line), valid[["number", "val_bpb"]].to_numpy(float))
    return figure


def progress_title(night):
    s, n = night.summary, len(night.rows)
    if not n:
        return "no experiment yet", ""
    if s["best"]:
        title = f"{night.name}: val_bpb {s['baseline']['val_bpb']:.4f} → {s['best']['val_bpb']:.4f}"
        title += f" ({signed(-100 * s['gain'] / s['baseline']['val_bpb'], 2)} %)" if s["gain"] else ""
    else:
        title = f"{night.name}: no valid result yet"
    words = [count(n, "experiment") + (f" in {duration(s['hours']['wall'])}" if s["hours"] else "")]
    words += [f"{s['keep']} kept", f"{s['crash']} crashed"]
    words += [f"noise floor {s['noise_floor']:.4f}"] if s["noise_floor"] is not None else []
    return cut(title, 60), cut(" · ".join(words + s["devices"]), 98)


def draw_best(axes, kept, last, floor):
    """The best so far as stairs, to x = `last`, and the noise floor around it. Returns the steps (n, 2)."""
    line = kept[["number", "best"]].to_numpy(float)
    if not len(line):
        return line
    line = np.concatenate([line, [[last, line[-1, 1]]]])
    axes.step(*line.T, where="post", color=BLUE, linewidth=1.4, zorder=4)
    if floor:
        band = (line[:, 1] - floor, line[:, 1] + floor)
        axes.fill_between(line[:, 0], *band, step="post", color=BLUE, alpha=0.13, linewidth=0, label="± noise floor")
    return line


def labels(night):
    """(x, y, words) of the keeps worth a label, the most important first: the best, the baseline, then by gain."""
    kept, ends = night.kept, {night.summary[name]["number"] for name in ("best", "baseline") if night.summary[name]}
    kept = kept.assign(end=kept["number"].isin(ends)).sort_values(["end", "gain"], ascending=False, kind="stable")
    what = lambda row: cut(row["description"], 34) or row["commit"]
    return [(row["number"], row["val_bpb"], f"{signed(-row['gain'], 4)}  " * (row["gain"] > 0) + what(row)) for row in records(kept[:14])]


def scale(rows):
    """(low, high, their distance): what was kept sets the scale of val_bpb, and the better part of the rest."""
    low, high = rows["val_bpb"].min(), max([rows["val_bpb"].quantile(0.75), *rows["val_bpb"][is_kept(rows)]])
    return low, high, max(high - low, 1e-3)


@drawn
def draw_hours(night):
    """Where the time went."""
    time = night.summary["hours"]
    figure, (axes,) = card(2.6, "Where the time went", hours_text(night), left=1.35)
    if not time:
        empty(axes, "")
        return figure
    names = {"training": "training", "evaluation": "evaluation", "startup": "start-up", "other": "rest of runs", "between": "between runs"}
    values = [time[name] for name in names]
    axes.barh(range(5), values, color=[BLUE, SKY, YELLOW, FAINT, "#c3c9d0"], height=0.62)
    axes.set(yticks=range(5), yticklabels=names.values(), xticks=[], xlim=(0, 1.25 * max(values)), ylim=(4.5, -0.5))
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_position([1.35 / WIDTH, 0.2 / 2.6, 1 - 1.6 / WIDTH, 1.5 / 2.6])
    for i, value in enumerate(values):
        words = f"{duration(value)}, {100 * value / sum(values):.0f} %"
        axes.annotate(words, (value, i), xytext=(5, 0), textcoords="offset points", va="center", color=MUTED)
    return figure


@drawn
def draw_memory(night):
    """Memory against val_bpb, and the results that nothing beats in both."""
    rows, front = night.valid[night.valid["memory_gb"] > 0], pareto(night)
    words = "the line joins the results that no other one beats in both memory and val_bpb: the Pareto front"
    figure, (axes,) = card(3.8, "What memory buys", words)
    if not len(rows):
        empty(axes, "no result with its memory yet")
        return figure
    kept = is_kept(rows)
    low, high, span = scale(rows)
    size, top = float(np.clip(3000 / len(rows), 6, 18)), high + 0.15 * span
    for which, marker in ((rows["val_bpb"] <= top, "o"), (rows["val_bpb"] > top, "^")):  # what is far off is shown at the edge
        rings(axes, rows["memory_gb"][~kept & which], rows["val_bpb"][~kept & which].clip(upper=top - 0.03 * span), size, marker=marker)
    dots(axes, rows["memory_gb"][kept], rows["val_bpb"][kept], 1.3 * size)
    corners = front[["memory_gb", "val_bpb"]].to_numpy(float)
    axes.step(*corners.T, where="post", color=GREEN, linewidth=1.4, zorder=3)
    axes.margins(x=0.08)
    axes.set(xlabel="peak memory (GB)", ylim=(low - 0.25 * span, top))
    above(axes, "val_bpb, lower is better")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    texts = [(row["memory_gb"], row["val_bpb"], f"#{row['number']}  {cut(row['description'], 30)}") for row in records(front[::-1])]
    place_labels(axes, texts[:8], stairs(corners), rows[["memory_gb", "val_bpb"]].to_numpy(float))
    return figure


@drawn
def draw_speed(night):
    """Tokens a second and MFU over the night."""
    wanted = {"tok_per_sec": "tokens a second", "mfu_percent": "MFU (%)"}
    known = [name for name in wanted if night.rows[name].notna().any()]
    note = "a dip says that the machine was busy with something else, or the model slower" if known else ""
    note += "; MFU is not known here" if known == ["tok_per_sec"] else ""
    figure, panels = card(1.9 + 1.4 * max(1, len(known)), "How fast it ran", note, max(1, len(known)))
    if not known:
        empty(panels[0], "no run beside this ledger says how fast it was")
        return figure
    timed = night.rows["start_hours"].notna().any()
    x = night.rows["start_hours"] if timed else night.rows["number"]
    kept = is_kept(night.rows)
    for axes, name in zip(panels, known):
        values = night.rows[name]
        rings(axes, x[~kept], values[~kept])
        dots(axes, x[kept], values[kept])
        axes.set_ylim(0, 1.15 * values.max() or 1)
        above(axes, wanted[name])
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("hours since the first run" if timed else "experiment")
    return figure

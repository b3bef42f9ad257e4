"""Two nights, two machines: whether their numbers compare, as a table and as a picture."""

import html
import itertools

from .look import BLUE, GREEN, INK, ORANGE, SKY, YELLOW, above, card, drawn, empty, whole_numbers
from .summary import baseline
from .tables import as_html, escaped, fixed, paragraph
from .words import cut


def comparable(nights):
    """(whether their numbers compare, why), by the fingerprints of their runs."""
    prints = {text for night in nights for text in night.summary["fingerprints"]}
    if len(prints) > 1:
        names = ", ".join(sorted(prints))
        return False, f"The fingerprints differ ({names}): data or time budget were not the same, so val_bpb does not compare."
    if not all(night.summary["fingerprints"] for night in nights):
        return True, "Not all say their fingerprint: val_bpb compares only if data and time budget were the same."
    return True, f"All have the fingerprint {prints.pop()}: val_bpb compares."


def compare_table(nights):
    """A line for each night, as HTML."""
    rows = []
    for night in nights:
        s = night.summary
        start, end = s["baseline"] or {"val_bpb": None}, s["best"] or {"val_bpb": None, "description": "no result"}
        where = f"{html.escape(s['name'])}<small>{html.escape(', '.join(s['devices']))}</small>"
        rows.append(s | {"start": start["val_bpb"], "end": end["val_bpb"], "description": end["description"], "where": where})
    columns = {"night": lambda row: row["where"], "experiments": fixed("rows", 0), "kept": fixed("keep", 0), "baseline": fixed("start")}
    columns |= {"best": fixed("end"), "gain": fixed("gain"), "noise floor": fixed("noise_floor")}
    columns |= {"an hour": fixed("experiments_per_hour", 1), "best idea": escaped("description")}
    return as_html(rows, columns, ["night", "best idea"]) + paragraph(comparable(nights)[1])


@drawn
def draw_compare(nights):
    """The best so far of several nights; in percent of each one's own baseline where their numbers do not compare."""
    same, _ = comparable(nights)
    words = "the best so far" if same else "the best so far, in percent of each night's own baseline: their val_bpb does not compare"
    figure, (axes,) = card(3.8, "Nights compared", words)
    nights = [night for night in nights if len(night.kept)]
    if not nights:
        empty(axes, "nothing was kept yet")
        return figure
    styles = itertools.cycle(zip((BLUE, ORANGE, GREEN, INK, YELLOW, SKY), ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))))
    for night, (color, dash) in zip(nights, styles):
        y = night.kept["best"] * (1 if same else 100 / baseline(night)["val_bpb"])
        before = night.rows["number"].iloc[0] - 1  # so that all nights begin at 1
        steps = ([*(night.kept["number"] - before), night.rows["number"].iloc[-1] - before + 0.5], [*y, y.iloc[-1]])
        axes.step(*steps, where="post", color=color, linestyle=dash, linewidth=1.7, label=f"{cut(night.name, 30)}: {y.iloc[-1]:.4f}")
    above(axes, "val_bpb, lower is better" if same else "% of the baseline, lower is better")
    axes.set_xlabel("experiment")
    whole_numbers(axes.xaxis)
    axes.legend(loc="upper right", handlelength=2.8)
    return figure

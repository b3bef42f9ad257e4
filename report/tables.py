"""Tables and cards as HTML, for the notebook and the page."""

import html
import math
import os

from .runs import GPU, as_number, read_text
from .summary import STATUSES, ideas, keeps, records
from .words import count, cut, duration, in_floors, listed, one_line, signed

# Tints and the text's own colour, so that they fit a light and a dark page, and a notebook's theme.
STYLE = """<style>
.night { font: 14px/1.45 system-ui, sans-serif; border-collapse: collapse; width: 100%; margin: 0 0 1rem; text-align: left; }
.night th, .night td { padding: .3rem .6rem; text-align: left; vertical-align: top; background: none; }
.night th, .night td { border-bottom: 1px solid rgb(127 127 127 / .25); }
.night th { font-weight: 600; opacity: .75; vertical-align: bottom; }
.night .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.night .wide { width: 60%; max-width: 0; overflow-wrap: anywhere; }  /* as wide as the others leave it, not as its log */
.night tr.keep td { background: rgb(0 114 178 / .12); }
.night tr.keep td.wide { font-weight: 600; }
.night small { font-weight: 400; opacity: .8; display: block; }
.night summary { cursor: pointer; }
.night summary:focus-visible { outline: 2px solid #56b4e9; outline-offset: 2px; }
.night pre { font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace; white-space: pre; overflow: auto; max-height: 30rem;
  margin: .5rem 0; padding: .5rem .7rem; background: rgb(127 127 127 / .1); border-radius: 6px; }
.night pre.log { white-space: pre-wrap; overflow-wrap: anywhere; }
.night pre span { display: block; min-width: max-content; }
.night pre .a { background: rgb(0 114 178 / .22); }
.night pre .d { background: rgb(213 94 0 / .22); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .6rem; }
.cards { font: 14px/1.4 system-ui, sans-serif; margin: 0 0 1rem; }
.cards div { padding: .6rem .8rem; border: 1px solid rgb(127 127 127 / .3); border-radius: 8px; }
.cards dt { opacity: .75; font-weight: 400; margin: 0; }
.cards dd { margin: 0; font-size: 1.25rem; font-weight: 650; font-variant-numeric: tabular-nums; width: auto; }
.cards small { display: block; font-size: .8rem; font-weight: 400; opacity: .8; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  .night thead { display: none; }
  .night, .night tbody { display: block; }
  .night tr { display: flex; flex-wrap: wrap; column-gap: .9rem; padding: .35rem 0; border-bottom: 1px solid rgb(127 127 127 / .25); }
  .night td { border: 0 !important; padding: .1rem .5rem; }
  .night td:empty { display: none; }
  .night .wide { flex: 0 0 100%; box-sizing: border-box; max-width: 100%; }
  .night .n[data-title]::before { content: attr(data-title) " "; opacity: .7; font-size: 12px; }
  .night tr.keep { background: rgb(0 114 178 / .12); }
  .night tr.keep td { background: none; }
}
</style>"""
IDEA = "what it tried"


def as_html(rows, columns, wide):
    """A table of `rows` (dicts). columns: title → what makes the text of a row's cell, or its HTML for the titles in `wide`."""
    lines = []
    for row in rows:
        cells = [
            f'<td class="wide">{make(row)}</td>' if title in wide else f'<td class="n" data-title="{title}">{html.escape(make(row))}</td>'
            for title, make in columns.items()
        ]
        lines.append(f'<tr class="{row.get("class", "")}">{"".join(cells)}</tr>\n')
    head = "".join(f'<th scope="col" class="{"wide" if title in wide else "n"}">{title}</th>' for title in columns)
    nothing = "" if rows else f'<tr><td colspan="{len(columns)}">nothing yet</td></tr>'
    return f'<table class="night"><thead><tr>{head}</tr></thead>\n<tbody>{"".join(lines)}{nothing}</tbody></table>'


def fixed(name, digits=6, sign=False):
    """What makes a cell's text: the number under that name, nothing where there is none."""

    def make(row):
        value = as_number(row[name])
        return "" if math.isnan(value) else signed(value, digits) if sign else f"{value:,.{digits}f}"

    return make


def escaped(name):
    return lambda row: html.escape(row[name])


def overview(night):
    """The night in a few numbers, as HTML."""
    s = night.summary
    cards = []
    if s["best"]:
        below = f"{100 * s['gain'] / s['baseline']['val_bpb']:.2f} % below the baseline's {s['baseline']['val_bpb']:.6f}{in_floors(s)}"
        cards += [("best val_bpb", f"{s['best']['val_bpb']:.6f}", f"#{s['best']['number']}: {s['best']['description']}")]
        cards += [("gain", f"{s['gain']:.6f}", below)]
    if s["rows"]:
        kinds = [f"{s[status]} {status}" for status in STATUSES] + [f"{s['other_status']} of another status"] * bool(s["other_status"])
        repeats = f"; {s['repeats']} of them only to know the noise" * bool(s["repeats"])
        cards += [("experiments", f"{s['rows']:,}", ", ".join(kinds) + repeats)]
    if s["tries"]:
        cards += [("tries kept", f"{100 * s['keep_rate']:.0f} %", f"of {s['tries']:,}; {100 * s['crash_rate']:.0f} % crashed")]
    if s["hours"]:
        cards += [("time", duration(s["hours"]["wall"]), f"{s['experiments_per_hour']:.1f} experiments an hour")]
    if s["noise_floor"] is not None:
        cards += [("noise floor", f"{s['noise_floor']:.6f}", f"standard deviation over {s['noise_runs']} runs that differ in the seed")]
    if s["keeps"]:
        cards += [("since the last keep", count(s["tries_since_keep"], "try"), "a plateau" if s["plateau"] else "no plateau")]
    notes = [one_line(night)] if not s["rows"] else ["No valid result yet."] if not s["best"] else []
    notes += [f"Odd rows: {listed(s['odd'])}."] if s["odd"] else []
    notes += [f"Runs without a row: {listed(s['without_row'])}."] if s["without_row"] else []
    if len(s["fingerprints"]) > 1:
        prints = f"{len(s['fingerprints'])} fingerprints ({', '.join(s['fingerprints'])})"
        notes += [f"WARNING: the runs have {prints}: their numbers do not compare."]
    if s["throttled"]:
        which = f"{count(len(s['throttled']), 'run')} throttled ({', '.join(f'#{number}' for number in s['throttled'][:9])}"
        which += ", …" * (len(s["throttled"]) > 9)
        notes += [f"{which}): a slower clock makes fewer steps, so their numbers may be too high."]
    ran = [*s["devices"], *s["datasets"], *(f"fingerprint {text}" for text in s["fingerprints"])]
    notes += [f"Ran on {', '.join(ran)}."] if ran else []
    e = html.escape
    body = "".join(f"<div><dt>{e(title)}</dt><dd>{e(value)}<small>{e(note)}</small></dd></div>\n" for title, value, note in cards)
    return STYLE + (f'<dl class="cards">{body}</dl>' if body else "") + "".join(map(paragraph, notes))


def paragraph(text):
    return f"<p>{html.escape(text)}</p>"


def kept_table(night):
    """Each keep with its gain and what luck alone would have gained, as HTML."""
    columns = {"#": fixed("number", 0), "val_bpb": fixed("val_bpb"), "gain": fixed("gain", sign=True)}
    if night.summary["noise_floor"]:
        columns |= {"in noise floors": fixed("floors", 1), "by luck": fixed("luck", 6)}
    return as_html(records(keeps(night)), columns | {"GB": fixed("memory_gb", 1), IDEA: escaped("description")}, [IDEA])


def ideas_table(night):
    columns = {"kind of idea": escaped("idea"), "tries": fixed("tries", 0), "kept": fixed("keep", 0), "crashed": fixed("crash", 0)}
    gain = lambda row: fixed("gain", sign=True)(row) if row["gain"] else ""
    columns |= {"rate": lambda row: f"{100 * row['rate']:.0f} %", "gain in all": gain, "best gain": fixed("best", sign=True)}
    return as_html(records(ideas(night)), columns, ["kind of idea"])


def experiments_table(night):
    """Every row of the ledger, with the change and the end of the log folded under it, as HTML."""
    rows = night.rows.assign(change=(night.rows["val_bpb"] - night.rows["best"].shift()).where(night.rows["valid"]))
    rows["class"] = rows["status"].where(rows["valid"], "")
    marks = {"keep": "● keep", "discard": "○ discard", "crash": "× crash"}
    columns = {"#": fixed("number", 0), "val_bpb": lambda row: fixed("val_bpb")(row) if row["val_bpb"] else ""}
    columns |= {"to the best": fixed("change", sign=True), "GB": lambda row: fixed("memory_gb", 1)(row) if row["memory_gb"] else ""}
    columns |= {"steps": fixed("num_steps", 0)} if rows["num_steps"].notna().any() else {}
    columns |= {"status": lambda row: "◇ noise" if row["kind"] == "noise" else marks.get(row["status"], row["status"] or "?")}
    return as_html(records(rows), columns | {IDEA: fold}, [IDEA])


def fold(row):
    """The description, as HTML; what its run left is folded under it."""
    e, run = html.escape, row["run"]
    title = e(row["description"] or row["commit"] or "(no description)")
    notes = [row["reason"] or row["odd"], f"the GPU throttled: {row['gpu_throttled']}" * bool(row["gpu_throttled"])]
    why = "".join(f"<small>{e(note)}</small>" for note in notes if note)
    if not run:
        return title + why
    about = [f"runs/{os.path.basename(run['folder'])}", row["commit"], *([f"seed {run['seed']}"] if "seed" in run else []), row["device"]]
    about += [duration(row["total"] / 3600)] if row["total"] > 0 else []
    gpu = zip(GPU, ("{:,.0f} MHz", "at least {:,.0f} MHz", "up to {:.0f} °C", "{:.0f} W"))
    about += [words.format(row[name]) for name, words in gpu if row[name] == row[name]]  # not NaN
    lines = [line for line in read_text(f"{run['folder']}/change.diff", 20_000).splitlines() if line]
    kind = lambda line: "" if line.startswith(("+++", "---")) else {"+": "a", "-": "d"}.get(line[0], "")
    diff = "".join(f'<span class="{kind(line)}">{e(line)}</span>' for line in lines)
    log = e("\n".join(cut(line, 300) for line in read_text(f"{run['folder']}/run.log", -6000).splitlines()[-25:]))
    left = f'<pre class="diff">{diff}</pre>' * bool(diff) + f'<pre class="log">{log}</pre>' * bool(log)
    return f"<details><summary>{title}{why}</summary><small>{e(' · '.join(filter(None, about)))}</small>{left}</details>"

"""results.py: any ledger is read, the numbers are right, the picture is readable, the page folds in a browser."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkout import without_a_reader
from conftest import PROJECT, called_once
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from nights import HEADER, outcome, row, write_night, write_run
from PIL import Image

import results
from report import labels, look, summary
from report.comparison import comparable
from report.words import hours_text

A, B, C, D = (letter * 40 for letter in "abcd")


def ledger(tmp_path, content):
    path = tmp_path / "results.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def call(*arguments, **environment):
    command = [sys.executable, str(PROJECT / "results.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | environment)


# ---- reading ----------------------------------------------------------------------------------------------------------------

ODD = (
    "aaaaaaa\t0.000000\t0.0\tcrash\ta crash first, with a \"quote\n"
    "bbbbbbb\t1.200000\t6.1\tkeep\tbaseline\n"
    "ccccccc\t1.250000\t6.1\tdiscard\ta\ttab inside\r\n"
    "ddddddd\t1.150000\t7.0\tkeep\thalf\x0cthe\u2028batch \"again\"\n"
    "eeeeeee\tnan\t6.0\tkeep\tnot a number\n"
    "fffffff\t-37.8\t6.0\tkeep\tabsurd\n"
    "1111111\t1.1\t6.0\thold\tanother status\n"
    "\n"
    "2222222\t1.1\n"
)  # fmt: skip


@pytest.mark.parametrize("make, said", [
    (os.mkfifo, "A device or a pipe"),
    (lambda path: path.symlink_to("/dev/zero"), "A device or a pipe"),
    (lambda path: path.write_bytes(b"1234567\t1.1\t1.0\tkeep\t" + b"x" * 2**25), "Larger than 32 MiB"),
], ids=["pipe", "device", "endless line"])  # fmt: skip
def test_what_is_no_ledger_is_told_at_once(tmp_path, make, said):
    make(tmp_path / "results.tsv")
    done = call(tmp_path / "results.tsv", "--json")
    assert done.returncode == 1 and said in done.stderr and "results.tsv" in done.stderr and len(done.stderr.splitlines()) == 1


def test_outcomes_that_are_none_hold_up_nobody(tmp_path):
    path = ledger(tmp_path, HEADER + row("1234567", 1.1, 6.0, "keep", "baseline"))
    for number, make in ((1, os.mkfifo), (2, lambda path: os.symlink("/dev/zero", path))):
        (tmp_path / f"runs/{number}").mkdir(parents=True)
        make(tmp_path / f"runs/{number}/outcome.json")
        make(tmp_path / f"runs/{number}/change.diff")
    done = call(path, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["odd"] == {"outcome.json that can't be read": 2}, done.stderr


@pytest.mark.parametrize("encode", [
    lambda text: text.encode(),
    lambda text: text.encode("utf-8-sig"),
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-16-be"),
    lambda text: text[:261].replace("\n", "\r\n").encode("utf-16") + text[261:].encode(),
    lambda text: text[:261].encode("utf-16-be") + text[261:].encode(),
    lambda text: text.replace("\n", "\r\n").encode(),
    lambda text: text.removeprefix(HEADER).rstrip("\n").encode(),
    lambda text: (HEADER + text).encode(),
], ids=["plain", "BOM", "UTF-16", "UTF-16 without mark", "UTF-16, then UTF-8", "the same without mark", "CRLF", "no header, torn end",
        "two headers"])  # fmt: skip
def test_reads_every_row(tmp_path, encode):
    """users.md's crash first, quotes, tabs, nan, absurd numbers: every row is there, none of the bad ones is in a statistic."""
    night = results.read(ledger(tmp_path, encode(HEADER + ODD)))
    assert list(night.rows["commit"].str[0]) == list("abcdef12") and list(night.valid["commit"].str[0]) == list("bcd")
    assert (
        night.rows["description"][2] == "a tab inside"
        and '"quote' in night.rows["description"][0]
        and 'batch "again"' in night.rows["description"][3]
    )
    assert night.odd == {"no usable val_bpb": 2, "status 'hold'": 1, "fewer columns than the header": 1}
    s = night.summary
    assert (s["rows"], s["keep"], s["discard"], s["crash"], s["other_status"]) == (8, 4, 1, 1, 2)
    assert s["baseline"]["val_bpb"] == 1.2 and s["best"]["val_bpb"] == 1.15 and s["gain"] == pytest.approx(0.05)
    assert s["hours"] is None and s["noise_floor"] is None and s["experiments_per_hour"] is None


def test_other_columns(tmp_path):
    """A ledger of another tool names its columns in another order."""
    night = results.read(ledger(tmp_path, "commit\tstatus\tval_bpb\tmfu\tdescription\naaaaaaa\tKeep \t1.2\t40\tfirst\tidea\n"))
    assert night.summary["best"] == {"number": 1, "commit": "aaaaaaa", "val_bpb": 1.2, "memory_gb": None, "description": "first idea"}


@pytest.mark.parametrize(("content", "words"), [
    (None, "no experiment yet: {} is not there"),
    ("", "no experiment yet: {} is empty"),
    (HEADER, "no experiment yet: {} is empty"),
    (HEADER + "aaaaaaa\t0.000000\t0.0\tcrash\toh\n", "1 experiment: 0 kept, 1 crashed; no valid result yet"),
    (HEADER + "aaaaaaa\t1.3\t6\tdiscard\tb\nbbbbbbb\t1.2\t6\tdiscard\tc\n",
     "2 experiments: 0 kept, 0 crashed; val_bpb 1.300000 → 1.200000 (−0.100000, nothing kept); best: c"),
    (HEADER + ODD, "8 experiments: 4 kept, 1 crashed; val_bpb 1.200000 → 1.150000 (−0.050000); best: half the\u2028batch \"again\"; "
     "odd: 2 × no usable val_bpb, 1 × status 'hold', 1 × fewer columns than the header"),
    (HEADER + "aaaaaaa\t1.2\t6\tkeep\tfirst\n" + "bbbbbbb\t1.3\t6\tdiscard\tworse\n" * 20,
     "21 experiments: 1 kept, 0 crashed; val_bpb 1.200000 → 1.200000 (+0.000000); best: first; no keep in the last 20 tries"),
    (b"\xff\xfe\x00\xd8 \x00\x00 \t\x80\n", "odd"),
])  # fmt: skip
def test_always_answers(tmp_path, content, words):
    """One line, a picture and JSON, whatever is or is not in the ledger."""
    path = tmp_path / "results.tsv" if content is None else ledger(tmp_path, content)
    night = results.read(path)
    line = results.one_line(night)
    assert words.format(path) in line and "\n" not in line
    assert Image.open(io.BytesIO(results.png(results.draw_progress(night)))).size == (1600, 940)
    assert json.loads(results.as_json(night))["rows"] == len(night.rows)
    for make in (results.overview, results.kept_table, results.ideas_table, results.experiments_table, results.luck_text, hours_text):
        assert make(night)
    for draw in (results.draw_hours, results.draw_memory, results.draw_speed):
        draw(night)
    assert results.draw_compare([night, night]) and results.compare_table([night, night])


cell = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["keep", "discard", "crash", "1.2", "0.000000", "abcdef1", "nan", "1e999", "", "noise: seed 43 of a"]),
)
line = st.lists(cell, max_size=7).map("\t".join)


@settings(max_examples=40, deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=200), st.lists(line, max_size=8).map(lambda lines: (HEADER + "\n".join(lines)).encode("utf-8", "replace"))
    )
)
@example(content=b"\0")
def test_any_bytes(tmp_path_factory, content):
    """Nothing that a file can hold raises, and no row gets lost."""
    night = results.read(ledger(tmp_path_factory.mktemp("any"), content))
    s = json.loads(results.as_json(night))
    if not content.startswith((b"\xff\xfe", b"\xfe\xff")) and 0 not in content[:2]:  # UTF-16
        lines = [text.strip("\r\ufeff") for text in content.decode("utf-8-sig", "replace").split("\n")]
        headers = [text for text in lines if {"commit", "val_bpb"} <= {name.strip().lower() for name in text.split("\t")}]
        assert len([text for text in lines if text.strip()]) - len(headers) <= s["rows"] <= len([text for text in lines if text.strip()])
    assert s["results"] + s["crash"] + s["other_status"] <= s["rows"] == len(s["experiments"]) and results.one_line(night)
    assert results.overview(night) and results.kept_table(night) and results.experiments_table(night)


# ---- runs -------------------------------------------------------------------------------------------------------------------


def small_night(tmp_path):
    """A baseline, two repeats, a keep, a crash, a pruned try; a run that the machine failed, a stopped one; one of an earlier series."""
    rows = [
        row(A, 1.2, 6, "keep", "baseline"),
        row(A, 1.202, 6, "discard", "noise: seed 43 of aaaaaaa"), row(A, 1.201, 6, "discard", "noise: seed 44 of aaaaaaa"),
        row(B, 1.19, 8, "keep", "halve the batch"), row(C, 0, 0, "crash", "depth 99"), row(D, 0, 0, "discard", "pruned: lr 9"),
    ]  # fmt: skip
    made = [
        outcome(1, A, 1.3, "baseline", tag="nov28"),
        outcome(2, A, 1.2, "baseline", started=1000),
        outcome(3, A, 1.202, "noise", seed=43, started=2000),
        outcome(4, A, 1.201, "noise", seed=44, started=3000),
        outcome(5, B, None, state="environment", reason="no GPU", started=4000, total=50.0),
        outcome(6, B, 1.19, started=5000),
        outcome(7, C, state="crash", reason="out of memory", started=6000, total=100.0),
        outcome(8, D, state="pruned", reason="stopped at 40 %: the loss was clearly worse", started=7000, total=300.0),
        outcome(9, D, state="stopped", started=8000, total=200.0),
    ]  # fmt: skip
    for one in made:
        write_run(tmp_path, one, f"+run {one['number']}\n", "log\n")
    (tmp_path / "runs" / "10").mkdir()  # still running
    for number, text in ((11, "{"), (12, "[1]"), (13, "null"), (14, '{"summary": [], "seconds": 3, "commit": 7, "started": {}}')):
        (tmp_path / "runs" / str(number)).mkdir()
        (tmp_path / "runs" / str(number) / "outcome.json").write_text(text)
    (tmp_path / "runs" / "nov28.tsv").write_text(HEADER + row(A, 1.3, 6, "keep", "baseline"))
    return results.read(ledger(tmp_path, HEADER + "".join(rows)))


def test_rows_find_their_runs(tmp_path):
    """By commit and kind, then by the number: a commit has several runs, and an earlier series the same baseline."""
    night = small_night(tmp_path)
    assert [os.path.basename(run["folder"]) for run in night.rows["run"]] == ["2", "3", "4", "6", "7", "8"]
    assert list(night.rows["kind"]) == ["baseline", "noise", "noise", "try", "try", "try"]
    assert night.summary["without_row"] == {"environment": 1, "stopped": 1}
    assert night.odd == {"outcome.json that can't be read": 4} and night.name == "nov29"
    earlier = results.read(tmp_path / "runs" / "nov28.tsv")
    assert earlier.rows["run"][0]["number"] == 1 and earlier.name == "nov28" and not earlier.without_row


EDITED = {
    "number": [None, "2", 2.0, [2], True], "seed": [None, "43", [43]], "commit": [None, 7, [B]], "kind": [None, ["try"], {}],
    "tag": [None, 29, []], "state": [None, 1, ["valid"]], "started": [None, 1764453600, {}], "reason": [3, ["slow"]],
    "device": [["Radeon"], {"name": "Radeon"}, "half a \ud83d"], "seconds": [None, 700, [700], {"total": "700"}, {"total": None}],
    "summary": [1.19, [1.19], {"val_bpb": "1.19"}, {"val_bpb": None}, {"val_bpb": 1.19, "num_steps": [690]}, {"dataset": None}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDITED.items() for value in values], ids=str)
def test_edited_outcome_is_counted_as_unreadable(tmp_path, name, value):
    """Something of another type than experiment.py writes: the row counts, its run says nothing, and nothing raises."""
    write_run(tmp_path, outcome(1, A, 1.2, "baseline"))
    write_run(tmp_path, outcome(2, B, 1.19))
    (tmp_path / "runs" / "2" / "outcome.json").write_text(json.dumps(outcome(2, B, 1.19) | {name: value}))
    path = ledger(tmp_path, HEADER + row(A, 1.2, 6, "keep", "baseline") + row(B, 1.19, 6, "keep", "halve the batch"))
    night = results.read(path)
    assert night.odd == {"outcome.json that can't be read": 1} and [run and run["number"] for run in night.rows["run"]] == [1, None]
    assert night.summary["best"]["val_bpb"] == 1.19 and night.summary["hours"]["runs"] == 1
    assert "odd: 1 × outcome.json that can't be read" in results.one_line(night)
    assert results.overview(night) and results.experiments_table(night).count("<details>") == 1


def test_what_is_missing_or_null_by_right_is_not_odd(tmp_path):
    """A crash has no summary, and what it printed may be words; an older run lacks what came since."""
    write_run(tmp_path, outcome(1, A, 1.2, "baseline") | {"reason": None, "signal": None})
    write_run(tmp_path, outcome(2, B, state="crash", reason="oh") | {"device": None, "seconds": {}})
    write_run(tmp_path, outcome(3, C, state="crash", reason="invalid: NaN") | {"summary": {"val_bpb": "nan", "mfu_percent": "n/a"}})
    write_run(tmp_path, {"number": 4, "commit": D, "state": "valid"})
    rows = [row(A, 1.2, 6, "keep", "baseline"), *(row(commit, 0, 0, "crash", "x") for commit in (B, C)), row(D, 1.1, 6, "keep", "y")]
    night = results.read(ledger(tmp_path, HEADER + "".join(rows)))
    assert not night.odd and [run["number"] for run in night.rows["run"]] == [1, 2, 3, 4] and list(night.rows["number"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("value", [1.7e308, -1e308, 10**400, -5])
def test_numbers_that_can_not_be(tmp_path, value):
    """No sum, square or axis overflows, and no share is of a time below nothing."""
    write_run(tmp_path, outcome(1, A, 1.2, "baseline"))
    absurd = outcome(2, B, 1.19)
    absurd["seconds"] |= dict.fromkeys(("startup", "training"), value)
    absurd["summary"] |= dict.fromkeys(("tok_per_sec", "mfu_percent", "num_steps"), value)
    write_run(tmp_path, absurd)
    night = results.read(ledger(tmp_path, HEADER + row(A, 1.2, 6, "keep", "baseline") + row(B, 1.19, 6, "keep", "x")))
    assert night.summary["hours"]["training"] * 3600 == 600 and night.summary["hours"]["other"] * 3600 == pytest.approx(20 + 640)
    for draw in (results.draw_progress, results.draw_hours, results.draw_memory, results.draw_speed):
        assert results.png(draw(night))
    assert hours_text(night) and results.experiments_table(night)


def test_times_that_can_not_be(tmp_path):
    for number, seconds in ((1, 1e308), (2, -5), (3, 60)):
        one = {"commit": f"{number:07x}", "state": "valid", "started": "2026-11-29T00:00:00", "seconds": {"total": seconds}}
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "outcome.json").write_text(json.dumps(one))
    rows = "".join(row(f"{number:07x}", 1.0, 6, "keep", "x") for number in (1, 2, 3))
    night = results.read(ledger(tmp_path, HEADER + rows))
    assert json.loads(results.as_json(night))["rows"] == 3 and hours_text(night)


def test_statistics(tmp_path):
    night = small_night(tmp_path)
    s = night.summary
    assert (s["tries"], s["keep_rate"], s["crash_rate"], s["repeats"], s["tries_since_keep"]) == (
        3,
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        2,
        2,
    )
    assert s["noise_floor"] == pytest.approx(0.001) and s["noise_runs"] == 3  # the deviation of 1.200, 1.202, 1.201
    assert s["gain_in_noise_floors"] == pytest.approx(10) and s["luck"] == pytest.approx(0.001 * 1.02938, rel=1e-4)
    assert [(row["number"], row["gain"], row["floors"]) for row in s["keeps"]] == [
        (2, None, None),  # the numbers of their runs
        (6, pytest.approx(0.01), pytest.approx(10)),
    ]
    time = s["hours"]
    parts = {"startup": 8 * 20, "training": 4 * 600 + 30 + 80 + 280 + 180, "evaluation": 4 * 60, "other": 4 * 20}
    parts |= {"lost": 50 + 100 + 300 + 200, "wall": 7200, "between": 7200 - 4 * 700 - 650}
    assert {name: time[name] * 3600 for name in parts} == pytest.approx(parts) and time["runs"] == 8
    assert s["experiments_per_hour"] == pytest.approx(4) and "8 runs in 2.0 h, 4.0 an hour" in hours_text(night)
    assert [(row["number"], row["memory_gb"]) for row in s["pareto"]] == [(2, 6.0), (6, 8.0)]
    assert [(row["idea"], row["tries"], row["keep"], row["crash"]) for row in s["ideas"]] == [
        ("batch", 1, 1, 0),
        ("learning rate", 1, 0, 0),
        ("size", 1, 0, 1),
    ]
    assert "0 of 1 keeps gained less than luck" in results.luck_text(night)


def test_luck():
    """Means of the greatest of 2, 3, 10 and 100 normal draws, from tables of order statistics."""
    assert [summary.luck(n) for n in (0, 1, 2, 9, 99)] == pytest.approx([0, 0.56419, 0.84628, 1.53875, 2.50759], abs=1e-4)


def test_pareto_front(tmp_path):
    cells = [(6, 1.3), (5, 1.4), (6, 1.2), (8, 1.25), (9, 1.1), (9, 1.1), (0, 1.0)]
    night = results.read(ledger(tmp_path, HEADER + "".join(row(A, bpb, memory, "discard", "x") for memory, bpb in cells)))
    assert list(summary.pareto(night)["number"]) == [2, 3, 5]


@pytest.mark.parametrize(("description", "kind"), [
    ("TOTAL_BATCH_SIZE 2**16", "batch"), ("FINAL_LR_FRAC = 0.05", "schedule"), ("Unembedding LR 0.006", "learning rate"),
    ("SSSL to SSL", "attention"), ("weight decay on value embeddings", "regularisation"), ("DEPTH 9", "size"),
    ("tied embeddings", "embeddings and output"), ("swiglu", "MLP"), ("luck", "other"),
])  # fmt: skip
def test_kinds_of_idea(description, kind):
    assert summary.idea({"description": description, "run": None}) == kind


def test_a_change_says_what_kind_it_is_where_the_words_do_not(tmp_path):
    write_run(tmp_path, outcome(1, A, 1.2, "baseline"))
    write_run(tmp_path, outcome(2, B, 1.1), "--- a/train.py\n+++ b/train.py\n depth is context\n-MATRIX_LR = 0.04\n+MATRIX_LR = 0.05\n")
    night = results.read(ledger(tmp_path, HEADER + row(A, 1.2, 6, "keep", "baseline") + row(B, 1.1, 6, "keep", "a bit more of it")))
    assert [row["idea"] for row in night.summary["ideas"]] == ["learning rate"]


def test_different_fingerprints_do_not_compare(tmp_path):
    mine, other = results.read(write_night(tmp_path / "a", 10)), results.read(write_night(tmp_path / "b", 12, seed=1))
    assert comparable([mine, other]) == (True, "All have the fingerprint b98a6de0d3d2: val_bpb compares.")
    for path in (tmp_path / "b" / "runs").glob("*/outcome.json"):
        path.write_text(path.read_text().replace("b98a6de0d3d2", "000000000000"))
    other = results.read(tmp_path / "b")
    assert not comparable([mine, other])[0] and "do not compare" not in results.one_line(other)
    assert "does not compare" in results.compare_table([mine, other])
    axes = results.draw_compare([mine, other]).axes[0]
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([100, 100])  # percent of each one's own baseline
    (tmp_path / "b" / "runs" / "1" / "outcome.json").write_text(json.dumps(outcome(1, other.rows["commit"][0] + "0" * 33, 1.2, "baseline")))
    assert "WARNING: 2 fingerprints, whose numbers do not compare" in results.one_line(results.read(tmp_path / "b"))


# ---- the picture ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 10, 52, 700])
def test_labels_do_not_overlap(tmp_path, count):
    """In pixels: no label covers another, a kept point or the line; none leaves the picture; each is written with at least 12 px at 800."""
    night = results.read(write_night(tmp_path, count))
    figure = results.draw_progress(night)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    texts = [text for text in axes.texts if text.get_text()]
    assert len(texts) >= min(len(night.kept), 5)
    boxes = [Text.get_window_extent(text) for text in texts]  # without its leader
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    kept = axes.transData.transform(night.kept[["number", "val_bpb"]].to_numpy(float))
    steps = axes.transData.transform(labels.stairs(night.kept[["number", "best"]].to_numpy(float)))
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
        assert not labels.covered(kept, (box.x0, box.y0, box.x1, box.y1))
        assert not labels.covered(labels.along(steps, 2), (box.x0, box.y0, box.x1, box.y1))
    others = [*figure.texts, axes.xaxis.label, axes.title, *axes.get_legend().get_texts()]
    ticks = [tick for tick in axes.get_xticklabels() if axes.viewLim.x0 <= tick.get_position()[0] <= axes.viewLim.x1]
    others += ticks + [tick for tick in axes.get_yticklabels() if axes.viewLim.y0 <= tick.get_position()[1] <= axes.viewLim.y1]
    everything = [text for text in [*texts, *others, axes._left_title] if text.get_text()]
    assert all(text.get_fontsize() * 100 / 72 >= 12 for text in everything)
    rest = [text.get_window_extent() for text in everything if text not in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(rest) for b in rest[:i])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0 for box in rest)


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.dot([0.2126, 0.7152, 0.0722], [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels])


def test_readable_in_both_schemes_and_for_the_colour_blind(tmp_path):
    """The card is opaque, so it has one contrast on any page; its marks differ in form, and in colour as a deuteranope sees it."""
    figure = results.draw_progress(results.read(write_night(tmp_path, 60)))
    image = np.asarray(Image.open(io.BytesIO(results.png(figure))).convert("RGBA"))
    assert (image[40:-40, :, 3] == 255).all() and image[0, 0, 3] == 0 and tuple(image[470, 8, :3]) == (255, 255, 255)
    contrast = lambda color: 1.05 / (luminance(color) + 0.05)  # on white
    assert contrast(look.INK) > 12 and contrast(look.MUTED) > 5.5 and min(map(contrast, (look.BLUE, look.FAINT, look.ORANGE))) > 3
    seen = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])  # linear RGB, Machado et al. 2009
    linear = lambda color: [(int(color[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    colors = [seen @ linear(color) for color in (look.BLUE, look.FAINT, look.ORANGE, look.INK)]
    assert min(np.abs(a - b).max() for i, a in enumerate(colors) for b in colors[:i]) > 0.08
    forms = {str(c.get_paths()[0].vertices.round(2).tolist()) + str(len(c.get_facecolors())) for c in figure.axes[0].collections}
    assert len(forms) == len(figure.axes[0].collections) == 6


# ---- the command ------------------------------------------------------------------------------------------------------------


def test_command(tmp_path):
    """A picture and one line, whatever the user's matplotlib and terminal are set to; --json writes nothing."""
    path = write_night(tmp_path / "night", 12)
    path.write_text(path.read_text(encoding="utf-8").replace("\tbaseline", "\t基线 🚀 $a_{b"), encoding="utf-8")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: red\nsavefig.bbox: tight\nbackend: TkAgg\n")
    done = call(path, MATPLOTLIBRC=str(tmp_path), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", DISPLAY="")
    assert (
        (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("12 experiments in 2.4 h: ") and done.stdout.count("\n") == 1
    )
    assert Image.open(tmp_path / "night" / "progress.png").size == (1600, 940)
    assert sorted(os.listdir(tmp_path / "night")) == ["progress.png", "results.tsv", "runs"]
    (tmp_path / "night" / "progress.png").unlink()
    s = json.loads(call("--json", tmp_path / "night").stdout)
    assert s["rows"] == 12 == len(s["experiments"]) and s["experiments"][2]["kind"] == "noise" and s["experiments"][2]["run"] == "3"
    assert sorted(os.listdir(tmp_path / "night")) == ["results.tsv", "runs"]


def test_command_fails_in_one_line(tmp_path):
    """experiment.py goes on after it, and a person knows what is wrong."""
    path = write_night(tmp_path, 3, runs=False)
    for arguments, words in (((path, "--out", tmp_path / "no" / "x.png"), "No such file"), ((path, "--out", tmp_path), "Is a directory")):
        done = call(*arguments)
        assert done.returncode == 1 and done.stderr.startswith("FAIL: ") and words in done.stderr and done.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["results.tsv"]
    for name in ("~no such user/x.tsv", tmp_path / "gone" / "results.tsv"):
        done = call(name)
        assert done.returncode == 1 and done.stderr.startswith(f"FAIL: {name}: no such ledger") and done.stderr.count("\n") == 1


def test_a_reader_that_leaves(tmp_path):
    for ended in without_a_reader([sys.executable, PROJECT / "results.py", "--json", write_night(tmp_path, 3, runs=False)]):
        assert ended == (1, "")


# ---- the page ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def night_page(tmp_path_factory):
    for module in ("nbconvert", "ipykernel"):
        pytest.importorskip(module)

    def make(folder):
        other = folder / "jupyter"  # with a kernel python3 that is not this Python's
        (other / "kernels" / "python3").mkdir(parents=True)
        spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "other", "language": "python"}
        (other / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
        return call(write_night(folder, 20), "--page", JUPYTER_DATA_DIR=str(other), JUPYTER_PREFER_ENV_PATH="0")

    folder, done = called_once(tmp_path_factory, "page", make)
    assert done.returncode == 0 and done.stdout.startswith(f"{folder}/results.html: 20 experiments"), done.stderr
    return folder / "results.html"


def test_page_stands_alone(night_page):
    """No code, no script, nothing from elsewhere; whatever a description or a diff holds is text."""
    text = night_page.read_text(encoding="utf-8")
    assert "import results" not in text and "In [" not in text and "<script" not in text and "&lt;script&gt;" in text
    loaded = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"' >)]*)""", text)
    assert loaded and all(address.startswith("data:image/png;base64,") for address in loaded) and "@import" not in text
    assert text.count("<details>") == 20 and text.count('<pre class="diff">') == 20 and "&lt;b&gt;softcap&lt;/b&gt;" in text
    assert len(re.findall("<img[^>]* alt=.[^\"']{10}", text)) == len(loaded) == 5


@pytest.mark.parametrize(("cell", "words"), [("1 / 0", "ZeroDivisionError: division by zero"), ("import os; os._exit(1)", "Kernel died")])
def test_page_of_a_notebook_that_fails(tmp_path, cell, words):
    """Somebody's own notebook is at fault: one line says why, and there is no half a page."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    shutil.copy(PROJECT / "results.py", tmp_path)
    shutil.copytree(PROJECT / "report", tmp_path / "report", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "harness").symlink_to(PROJECT / "harness")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), tmp_path / "analysis.ipynb")
    done = subprocess.run([sys.executable, "results.py", "--page"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "results.html").exists()
    assert done.stderr.startswith("FAIL: analysis.ipynb: ") and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.browser
def test_page_in_a_browser(night_page):
    """Wide and narrow, light and dark: nothing is cut off, and a row folds open and shut by mouse and keyboard."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        for width, scheme in ((1280, "light"), (390, "dark")):
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
            metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            driver.get(night_page.as_uri())
            rows = driver.find_elements(By.CSS_SELECTOR, "details")
            summary, diff = rows[4].find_element(By.TAG_NAME, "summary"), rows[4].find_element(By.CSS_SELECTOR, "pre.diff")
            others = [row.find_element(By.TAG_NAME, "pre") for row in rows if row != rows[4]]
            assert not diff.is_displayed()
            summary.click()
            assert diff.is_displayed() and "+DEPTH = 5 " in diff.text and not any(other.is_displayed() for other in others)
            assert rows[4].find_element(By.CSS_SELECTOR, "pre.log").text == "---\nval_bpb: 1"
            assert diff.rect["y"] > summary.rect["y"] and diff.rect["x"] >= 0 and diff.rect["x"] + diff.rect["width"] <= width
            scroll = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert scroll[0] <= scroll[1] == width  # no scrolling sideways
            summary.send_keys(Keys.ENTER)
            assert not diff.is_displayed()
            image = driver.find_element(By.TAG_NAME, "img")
            assert driver.execute_script("return arguments[0].complete && arguments[0].naturalWidth", image) == 1600
            background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert background == {"light": "rgb(246, 248, 250)", "dark": "rgb(13, 17, 23)"}[scheme]
        assert driver.get_log("browser") == []
    finally:
        driver.quit()


def test_benchmark(tmp_path):
    command = [sys.executable, "benchmarks/results.py", "--rows", "30", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(",") for line in (tmp_path / "results.csv").read_text().splitlines()]
    assert [line[:2] for line in lines] == [["rows", "runs"], ["30", "no"], ["30", "yes"]] and all(
        0 < float(line[2]) < math.inf for line in lines[1:]
    )


def test_a_python_without_its_packages_is_told_where_they_are(tmp_path):
    """As the system's own, by which experiment.py is run. A stand-in: a matplotlib that is not there."""
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')")
    done = subprocess.run(
        [sys.executable, PROJECT / "results.py"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("results.py: this Python has no matplotlib: venv/bin/python results.py")
    assert len(done.stderr.splitlines()) == 1

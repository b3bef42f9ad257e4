"""The ledger held against the runs that it tells of: rows that are gone come back, rows that say something else are refused."""

import contextlib
import os

from harness.common.files import sha256

from .files import HEADER, LEDGER, RUNS, Refusal, numbers, read_bytes, read_ledger, read_outcome, read_turn, read_verdict, write_file
from .ledger import key_of, parse_row
from .repository import current_tag
from .verdict import row_text

SEEN = os.path.join(RUNS, "ledger.sha256")  # of the ledger as it was when it last agreed: thousands of runs are not read for each command


def audit(tag=None):
    """Put back the rows that the ledger lacks. Returns a line that says so, or None; Refusal where a row contradicts its run.

    tag: whose ledger it is where neither its rows nor the branch that is checked out tell. A hand may edit descriptions, and rows whose run
    is no longer in runs/ are left alone.
    """
    content = read_ledger()
    tag = current_tag() or tag
    if read_bytes(SEEN) == digest_of(content, tag):
        return None
    runs = list(recorded())
    tags = {key_of(parse_row(text)): turn["tag"] for turn, text in runs}
    rows = [row for row in map(row_in, content.splitlines()) if row]
    owners = [tags[key_of(row)] for row in rows if key_of(row) in tags]
    if rows and not owners:  # begun by hand, or of a series whose runs/ is gone
        return None
    tag = owners[-1] if owners else tag
    mended, back = compared(content, [(turn["number"], text) for turn, text in runs if turn["tag"] == tag])
    if not back:
        return None
    write_file(LEDGER, mended)
    if not rows:
        return f"results.tsv was missing and is made again from runs/: {len(back)} row{'s' * (len(back) > 1)}"
    names = ", ".join(map(str, back[:10])) + f" and {len(back) - 10} more" * (len(back) > 10)
    return f"results.tsv had lost the row of run {names}: put back from runs/"


def remember():
    """That the ledger as it is now agrees with its runs."""
    digest = digest_of(read_ledger(), current_tag())
    if read_bytes(SEEN) != digest:
        write_file(SEEN, digest)


def digest_of(content, tag):
    return sha256(f"{tag}\n".encode(), content).encode()


def recorded():
    """(turn, its row as it was written) of each run that has one, in the order of their numbers. What is damaged is left out."""
    for number in numbers():
        status = (read_verdict(number) or {}).get("status")
        turn, outcome = read_turn(number), read_outcome(number)
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # somebody has edited what it is made of
            if status and turn and parse_row(text := row_text(turn, outcome, status)):
                yield turn, text


def row_in(line):
    return parse_row(line.decode("utf-8", "replace"))


def compared(content, runs):
    """(the ledger with all rows, the numbers of the runs whose rows came back). runs: [(number, row)] of its series, by number."""
    lines = content.splitlines(keepends=True)
    known = {key_of(parse_row(text)): (number, parse_row(text), text) for number, text in runs}
    found, others = {}, []  # number → index of its line; lines that are nobody's yet
    for index, row in enumerate(map(row_in, lines)):
        number, its, _ = known.get(key_of(row), (None, None, None)) if row else (None, None, None)
        if number and number not in found and agree(row, its):
            found[number] = index
        elif row:
            others.append((index, row))
    for index, row in others:
        # A repeat whose description was edited is known by its number.
        same = (n for n, its, _ in known.values() if its["commit"] == row["commit"] and n not in found and agree(row, its))
        if number := next(same, None):
            found[number] = index
        elif key_of(row) in known:
            number, its, text = known[key_of(row)]
            if agree(row, its):
                raise Refusal(f"results.tsv, line {index + 1}: run {number} is there twice: take one of the two lines out")
            raise Refusal(
                f"results.tsv, line {index + 1}, says {row['val_bpb']:.6f} {row['status']} of run {number}, and its outcome was "
                f"{its['val_bpb']:.6f} {its['status']}; put back: {text.rstrip()} (or take the line out: it is written again)"
            )
    back = [(number, text) for number, text in runs if number not in found]
    at = {index: number for number, index in found.items()}
    mended = [] if lines else [HEADER.encode()]
    for index, line in enumerate(lines):
        if index in at:  # keeps are in the order of their numbers: each began after the one before it was kept
            while back and back[0][0] < at[index]:
                mended.append(back.pop(0)[1].encode())
        mended.append(line)
    mended += [text.encode() for _, text in back]
    return b"".join(mended), [number for number, _ in runs if number not in found]


def agree(row, its):
    return (f"{row['val_bpb']:.6f}", row["status"]) == (f"{its['val_bpb']:.6f}", its["status"])

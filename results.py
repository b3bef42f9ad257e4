"""
The morning after: what results.tsv and runs/ say, in words, as a picture, as a page, and for machines.

    python results.py [LEDGER]            # write progress.png beside the ledger, print one line
    python results.py [LEDGER] --page     # write results.html: analysis.ipynb, executed, without code
    python results.py [LEDGER] --json     # print everything, write nothing

LEDGER is any autoresearch's results.tsv, with or without runs/ beside it; the default is AUTORESEARCH_RESULTS,
then this folder's results.tsv.

Its parts are in report/; the notebook calls them by this file's name.
"""

import argparse
import os
import sys
from pathlib import Path

try:
    from report.comparison import compare_table, draw_compare
    from report.drawing import draw_hours, draw_memory, draw_progress, draw_speed
    from report.look import png, show
    from report.page import executed_notebook, page
    from report.reading import HERE, read
    from report.summary import as_json
    from report.tables import experiments_table, ideas_table, kept_table, overview, paragraph
    from report.words import luck_text, one_line
except ModuleNotFoundError as e:
    if __name__ != "__main__":
        raise
    sys.exit(f"results.py: this Python has no {e.name}: venv/bin/python results.py, or `. ./env.sh` first (./run.sh makes venv/)")
from harness.common.files import replace_file

# What analysis.ipynb calls.
__all__ = [
    "read", "show", "overview", "paragraph", "luck_text", "kept_table", "ideas_table", "experiments_table", "compare_table",
    "draw_progress", "draw_hours", "draw_memory", "draw_speed", "draw_compare",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="The morning after: what results.tsv and runs/ say.")
    where = "a results.tsv, or its folder (default: AUTORESEARCH_RESULTS, then this folder's)"
    parser.add_argument("ledger", nargs="?", type=Path, help=where)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print everything as JSON, write no file")
    what.add_argument("--page", action="store_true", help="write results.html, the executed notebook, instead of progress.png")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the picture or the page goes (default: beside the ledger)")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a description's characters
    if args.ledger and not os.path.exists(os.path.expanduser(args.ledger)):
        sys.exit(f"FAIL: {args.ledger}: no such ledger (without a name it is {HERE / 'results.tsv'})")
    night = read(args.ledger)
    if args.json:
        print(as_json(night))
        return
    line = one_line(night)
    out = args.out or night.path.with_name("results.html" if args.page else "progress.png")
    data = page(executed_notebook(night.path), f"{night.name}: {line}").encode() if args.page else png(draw_progress(night))
    with replace_file(out, "wb") as f:  # whole or not at all, whoever else writes it at the same time
        f.write(data)
    print(f"{out}: {line}" if args.page else line)


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ImportError as e:
        sys.exit(f"FAIL: {e}: ./run.sh installs what is missing, into venv/")
    except OSError as e:
        sys.exit(f"FAIL: {e}")

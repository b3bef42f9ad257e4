"""Text, second source: files."""

import contextlib
import json
import math
import os
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq

from harness.common.files import replace_file, sha256
from harness.data.dataset import VAL_FILENAME, DataError
from harness.data.shards import check_space, list_shards

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
HELD_OUT = 0.1  # share of the documents that only validation sees
LONGEST_SOURCE = 100_000  # characters of a file that go to training or to validation together
CHARS_PER_TOKEN = 3  # about, at the least: so many characters fit a row


def text_files(paths):
    """The files with text below `paths`, in the order of their names."""
    for path in paths:
        if os.path.isdir(path):
            for folder, folders, names in os.walk(path):
                folders.sort()
                files = (os.path.join(folder, n) for n in sorted(names) if n.endswith(TEXT_SUFFIXES))
                yield from filter(os.path.isfile, files)  # no dangling links, no pipes
        elif not os.path.exists(path):
            raise DataError(f"--text {path}: no such file or folder")
        elif not path.endswith(TEXT_SUFFIXES):
            raise DataError(f"--text {path}: not one of {', '.join(TEXT_SUFFIXES)}")
        else:
            yield path


def cut(text, longest):
    """`text` in pieces of at most `longest` characters, at ends of lines where there are any."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start + 1, start + longest) + 1 or start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def read_sources(files):
    """The texts in `files`: a file is one, in a .jsonl file `text` of each line. Very long ones come in pieces."""
    skipped = 0
    for path in files:
        try:
            with open(path, encoding="utf-8-sig") as f:
                text = f.read()
        except (UnicodeDecodeError, PermissionError):
            skipped += 1
            continue
        if not path.endswith(".jsonl"):
            yield from cut(text, LONGEST_SOURCE)
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    document = json.loads(line)["text"]
                    document.encode("utf-8")
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise DataError(f"{path}, line {number}: no JSON object with a string 'text'") from None
                yield document
    if skipped:
        print(f"Skipped {skipped} file(s) that are not UTF-8, or not to be read")


def write_shards(dataset, sources):
    """Write texts as shards like ClimbMix's: documents that fit a row, shuffled; a tenth of the sources held out for validation.

    Hashes decide what is held out and in which order documents come, so the same text gives the same shards everywhere, and no source is
    partly in training and partly in validation.
    """
    sources = sorted({s for s in sources if s.strip()}, key=lambda s: sha256(s.encode("utf-8")))
    held_out = math.ceil(len(sources) * HELD_OUT)
    if len(sources) < 2:
        raise DataError(
            f"the text is {len(sources)} file(s) of less than {LONGEST_SOURCE:,} characters, and some must be held out: give more text"
        )
    longest = CHARS_PER_TOKEN * dataset.max_seq_len
    val, train = ({d for s in part for d in cut(s, longest) if d.strip()} for part in (sources[:held_out], sources[held_out:]))
    os.makedirs(dataset.data_dir, exist_ok=True)
    check_space(dataset.data_dir, 2 * sum(map(len, sources)), "the text and its tokens")
    with contextlib.suppress(FileNotFoundError):
        os.remove(dataset.file)  # from here on the data is not ready
    for name in list_shards(dataset.data_dir):
        os.remove(os.path.join(dataset.data_dir, name))
    for name, documents in (("shard_00000.parquet", train - val), (VAL_FILENAME, val)):
        documents = sorted(documents, key=lambda d: sha256(d.encode("utf-8")))
        with replace_file(os.path.join(dataset.data_dir, name), "wb") as f:
            pq.write_table(pa.table({"text": pa.array(documents, pa.large_string())}), f, row_group_size=1024)


def standard_library():
    """The Python files of the running Python's standard library, without its tests (which some distributions leave out)."""
    root = sysconfig.get_paths()["stdlib"]
    leave_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - leave_out)
        yield from (os.path.join(folder, n) for n in sorted(names) if n.endswith(".py"))

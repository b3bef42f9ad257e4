"""
The fixed part of every experiment: the text, the tokenizer, the batches and the metric. Do not change it to win.

    python prepare.py                        # prepare this machine's dataset (the first 10 training shards of ClimbMix on a GPU)
    python prepare.py --num-shards 50        # more training text (-1: all 6,542 shards)
    python prepare.py --text notes/ book.txt # a dataset of your own text, then: AUTORESEARCH_DATASET=text ./run.sh
    python prepare.py --check                # is the data ready? exit code 0 if so

Text becomes tokens once, here; training maps the token files into memory and only packs rows. Everything lives in
~/.cache/autoresearch (AUTORESEARCH_CACHE moves it), where upstream autoresearch keeps its shards too, so that what was downloaded is used
again. Calling it again continues what was interrupted and does nothing that is done.

Environment: AUTORESEARCH_DATASET (climbmix, demo or text), AUTORESEARCH_TIME_BUDGET (seconds), AUTORESEARCH_SEED (default 42),
AUTORESEARCH_CACHE, HF_ENDPOINT, HF_TOKEN.
"""

import argparse
import errno
import os
import shutil
import signal
import sys
from dataclasses import replace

from harness.common.protocol import EXIT_ENVIRONMENT, WARMUP_STEPS  # noqa: F401 (here and below: for whoever imports it from here)
from harness.data import dataset as chosen
from harness.data import ready, tokens
from harness.data.climbmix import download_climbmix
from harness.data.dataset import (  # noqa: F401
    DATASET,
    EVAL_TOKENS,
    FOLDERS,
    MAX_SEQ_LEN,
    TIME_BUDGET,
    VAL_FILENAME,
    VAL_SHARD,
    VOCAB_SIZE,
    DataError,
    Dataset,
    NoResult,
    seed_everything,
)
from harness.data.loader import make_dataloader, shards_of  # noqa: F401
from harness.data.metric import check_model, evaluate_bpb  # noqa: F401
from harness.data.ready import check_dataset, fingerprint  # noqa: F401
from harness.data.shards import list_shards, only_one, why_not_a_shard
from harness.data.text import TEXT_SUFFIXES, read_sources, standard_library, text_files, write_shards
from harness.data.tokenizer import Tokenizer, get_token_bytes, train_tokenizer  # noqa: F401
from harness.data.tokens import tokenize


def prepare(dataset, num_shards=10, workers=8, text_paths=None):
    """Make `dataset` ready, doing only what is not done. DataError says what is in the way."""

    def whole(name):
        path = os.path.join(dataset.data_dir, name)
        return os.path.exists(path) and why_not_a_shard(path) is None

    ready.checked_dataset.cache_clear()
    tokens.opened.clear()
    with only_one(dataset.root):
        if dataset.name == "climbmix":
            download_climbmix(dataset, num_shards, workers)
        elif dataset.name == "demo" and not (os.path.exists(dataset.file) and all(whole(n) for n in ("shard_00000.parquet", VAL_FILENAME))):
            print("The demonstration's text: Python's standard library")
            write_shards(dataset, read_sources(standard_library()))
        elif text_paths:
            write_shards(dataset, read_sources(text_files(text_paths)))
        names = list_shards(dataset.data_dir)
        if VAL_FILENAME not in names or len(names) < 2:
            hint = ": run python prepare.py --text PATH..." if dataset.name == "text" else ""
            raise DataError(
                f"{dataset.data_dir} holds {len(names)} shard(s); at least one for training and {VAL_FILENAME} are needed{hint}"
            )
        for path in (os.path.join(dataset.data_dir, name) for name in names):
            if fault := why_not_a_shard(path):
                raise DataError(f"{path}: {fault}. Remove it and run prepare.py again")
        tokenizer = train_tokenizer(dataset)
        dataset = tokenize(dataset, tokenizer)
    train, val = (sum(s["tokens"] for s in shards_of(dataset, split)) / 1e6 for split in ("train", "val"))
    print(f"Ready: {dataset.name}, {train:.1f}M training and {val:.1f}M validation tokens, fingerprint {fingerprint(dataset)}")


def prepare_text(paths):
    """Make the dataset `text` from files and folders; the one that was there before is replaced when the new one is ready."""
    dataset = chosen.text_dataset()
    new = replace(dataset, root=os.path.join(dataset.root, "new"))
    strange = set(os.listdir(dataset.root)) - {*FOLDERS, "new", "prepare.lock"} if os.path.isdir(dataset.root) else set()
    if strange or os.path.isdir(dataset.data_dir) and not os.path.exists(dataset.file) and os.listdir(dataset.data_dir):
        raise DataError(f"{dataset.root} holds something else than a dataset ({', '.join(sorted(strange)[:3]) or 'data'}): move it, "
                        "or the cache with AUTORESEARCH_CACHE")  # fmt: skip
    with only_one(dataset.root):
        shutil.rmtree(new.root, ignore_errors=True)  # of a call that was killed
        prepare(new, text_paths=paths)
        for folder in FOLDERS:
            old = os.path.join(dataset.root, folder)
            if os.path.isdir(old):
                shutil.rmtree(old)
            os.rename(os.path.join(new.root, folder), old)
        shutil.rmtree(new.root)
    if chosen.DATASET.name != "text":
        print("To train on it: AUTORESEARCH_DATASET=text ./run.sh")


def main():
    parser = argparse.ArgumentParser(description="Prepare data and tokenizer.", epilog=f"The cache is {chosen.CACHE_DIR}.")
    parser.add_argument("--num-shards", type=int, default=10, help="ClimbMix training shards to download, -1 for all (default: 10)")
    parser.add_argument("--download-workers", type=int, default=8, help="downloads at a time (default: 8)")
    parser.add_argument(
        "--text", nargs="+", metavar="PATH", help=f"make the dataset 'text' from these files and folders ({', '.join(TEXT_SUFFIXES)})"
    )
    parser.add_argument("--check", action="store_true", help="say whether the data is ready, and change nothing")
    args = parser.parse_args()
    num_shards = VAL_SHARD if args.num_shards == -1 else args.num_shards
    if not 1 <= num_shards <= VAL_SHARD:
        parser.error(f"--num-shards {args.num_shards}: use 1 to {VAL_SHARD}, or -1 for all")
    if args.download_workers < 1:
        parser.error(f"--download-workers {args.download_workers}: use 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    try:
        if args.check:
            print(f"Ready: {ready.checked_dataset(chosen.DATASET)['name']}, fingerprint {fingerprint()}")
            return 0
        if args.text:
            prepare_text(args.text)
        else:
            prepare(chosen.DATASET, num_shards, args.download_workers)
        return 0
    except DataError as e:
        print(f"prepare.py: {e}", file=sys.stderr)
    except OSError as e:
        hint = ": make room, or move the cache with AUTORESEARCH_CACHE" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        print(f"prepare.py: {e}{hint}. What is done is kept; run it again to go on", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nprepare.py: interrupted. What is done is kept; run it again to go on", file=sys.stderr)
        return 130
    return EXIT_ENVIRONMENT


if __name__ == "__main__":
    sys.exit(main())

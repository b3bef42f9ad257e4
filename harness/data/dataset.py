"""What makes two numbers comparable: the dataset, its sizes, the time budget, the seed."""

import contextlib
import json
import math
import os
from dataclasses import dataclass

import torch

from harness.common import hardware, settings


@dataclass(frozen=True)
class Dataset:
    """A text with the sizes that its numbers are measured at. Two results compare only if all of this is equal."""

    name: str
    root: str  # the folder that holds data/, tokenizer/ and tokens/
    max_seq_len: int  # tokens of context
    vocab_size: int  # merges and special tokens
    eval_tokens: int  # validation tokens that the metric looks at; a whole number of rows
    time_budget: int  # seconds of training unless AUTORESEARCH_TIME_BUDGET says otherwise

    @property
    def data_dir(self):
        return os.path.join(self.root, "data")

    @property
    def tokenizer_dir(self):
        return os.path.join(self.root, "tokenizer")

    @property
    def tokens_dir(self):
        return os.path.join(self.root, "tokens")

    @property
    def file(self):
        return os.path.join(self.data_dir, "dataset.json")


class NoResult(ValueError):
    """What a model returned can't be its losses, so there is no number."""


class DataError(RuntimeError):
    """The data is missing, broken or not the data that was asked for; the message says what to do."""


try:
    CACHE_DIR = settings.cache_folder()
except ValueError as e:
    raise SystemExit(str(e)) from None
SIZES = ("max_seq_len", "vocab_size", "eval_tokens", "time_budget")
GPU_SIZES = dict(max_seq_len=2048, vocab_size=8192, eval_tokens=40 * 524288, time_budget=600)
CPU_SIZES = dict(max_seq_len=256, vocab_size=2048, eval_tokens=2**16, time_budget=60)  # so that a bare CPU shows the whole loop in minutes
FOLDERS = ("tokenizer", "tokens", "data")  # what a dataset's root holds


def text_dataset():
    """The dataset that `--text` makes: with ClimbMix's sizes on a GPU, the demonstration's without one."""
    return Dataset("text", os.path.join(CACHE_DIR, "text"), **(GPU_SIZES if torch.cuda.is_available() else CPU_SIZES))


def choose_dataset():
    """AUTORESEARCH_DATASET, or else ClimbMix where there is a GPU and the demonstration where there is none."""
    name = os.environ.get("AUTORESEARCH_DATASET") or ("climbmix" if torch.cuda.is_available() or hardware.gpu_hardware() else "demo")
    if name == "climbmix":
        return Dataset(name, CACHE_DIR, **GPU_SIZES)
    root = os.path.join(CACHE_DIR, name)
    if name == "demo":
        return Dataset(name, root, **CPU_SIZES)
    if name != "text":
        raise SystemExit(f"AUTORESEARCH_DATASET={name!r} is no dataset; use climbmix, demo, or text (made by prepare.py --text PATH...)")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(root, "data", "dataset.json")) as f:
        made = json.load(f)
        return Dataset(name, root, **{key: made[key] for key in SIZES})
    return text_dataset()  # not made yet


def time_budget(dataset):
    """Seconds of training: AUTORESEARCH_TIME_BUDGET or the dataset's own. Part of the fingerprint."""
    text = os.environ.get("AUTORESEARCH_TIME_BUDGET") or str(dataset.time_budget)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SystemExit(f"AUTORESEARCH_TIME_BUDGET={text!r} is no number of seconds; use a positive one, such as 300")
    return int(seconds) if seconds == int(seconds) else seconds


DATASET = choose_dataset()
MAX_SEQ_LEN = DATASET.max_seq_len
EVAL_TOKENS = DATASET.eval_tokens
VOCAB_SIZE = DATASET.vocab_size
TIME_BUDGET = time_budget(DATASET)
VAL_SHARD = 6542  # ClimbMix's last shard: always and only validation; the other datasets use its name too
VAL_FILENAME = f"shard_{VAL_SHARD:05d}.parquet"


def seed_everything():
    """Seed torch from AUTORESEARCH_SEED (default 42) and return the seed. The only place where a seed is set."""
    try:
        seed = settings.seed()
    except ValueError as e:
        raise SystemExit(str(e)) from None
    torch.manual_seed(seed)  # the CPU and every GPU
    return seed

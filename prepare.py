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
import base64
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import threading
import time
import zipfile
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import tiktoken
import torch
import torch.nn.functional as F
from tqdm import tqdm

# ---------------------------------------------------------------------------
# What makes two numbers comparable: the dataset and the time budget
# ---------------------------------------------------------------------------


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


CACHE_DIR = os.path.expanduser(os.environ.get("AUTORESEARCH_CACHE") or os.path.join("~", ".cache", "autoresearch"))
if CACHE_DIR.startswith("~"):
    raise SystemExit("this user has no home folder: say where data goes with AUTORESEARCH_CACHE=/some/folder")
SIZES = ("max_seq_len", "vocab_size", "eval_tokens", "time_budget")
GPU_SIZES = dict(max_seq_len=2048, vocab_size=8192, eval_tokens=40 * 524288, time_budget=600)
CPU_SIZES = dict(max_seq_len=256, vocab_size=2048, eval_tokens=2**16, time_budget=60)  # so that a bare CPU shows the whole loop in minutes

EXIT_ENVIRONMENT = 3  # exit code where the machine or the data is at fault, not the experiment
FOLDERS = ("tokenizer", "tokens", "data")  # what a dataset's root holds


def gpu_hardware(root="/"):
    """What GPU is in this machine, whether or not torch can use it: "AMD gfx1151", "NVIDIA", or None. Reads device files only.

    AUTORESEARCH_HARDWARE (gfx1151, amd, nvidia or none), which run.sh sets and understands too, is taken at its word.
    """
    told = os.environ.get("AUTORESEARCH_HARDWARE")
    if told:
        return {"none": None, "nvidia": "NVIDIA", "amd": "AMD"}.get(told, f"AMD {told}")
    for path in sorted(glob.glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties"))):
        with contextlib.suppress(OSError, ValueError), open(path) as f:
            version = int(dict(line.split()[:2] for line in f if " " in line).get("gfx_target_version", 0))
            if version:  # the CPU's own node says 0; 110501 is 11.5.1
                return f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    if any(glob.glob(os.path.join(root, pattern)) for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*")):
        return "NVIDIA"
    return None


def text_dataset():
    """The dataset that `--text` makes: with ClimbMix's sizes on a GPU, the demonstration's without one."""
    return Dataset("text", os.path.join(CACHE_DIR, "text"), **(GPU_SIZES if torch.cuda.is_available() else CPU_SIZES))


def choose_dataset():
    """AUTORESEARCH_DATASET, or else ClimbMix where there is a GPU and the demonstration where there is none."""
    name = os.environ.get("AUTORESEARCH_DATASET") or ("climbmix" if torch.cuda.is_available() or gpu_hardware() else "demo")
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
WARMUP_STEPS = 11  # steps before the clock starts: they compile

VAL_SHARD = 6542  # ClimbMix's last shard: always and only validation; the other datasets use its name too
VAL_FILENAME = f"shard_{VAL_SHARD:05d}.parquet"


def seed_everything():
    """Seed torch from AUTORESEARCH_SEED (default 42) and return the seed. The only place where a seed is set."""
    text = os.environ.get("AUTORESEARCH_SEED") or "42"
    if not text.isdecimal() or int(text) >= 2**63:
        raise SystemExit(f"AUTORESEARCH_SEED={text!r} is no seed; use a whole number, such as 42")
    torch.manual_seed(int(text))  # the CPU and every GPU
    return int(text)


# ---------------------------------------------------------------------------
# Files: written whole or not at all
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def replace_file(path, mode="w"):
    """Open a temporary file that takes the name `path`, fsynced, if the block ends well."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


@contextlib.contextmanager
def only_one(root):
    """Hold the dataset's lock: a second prepare.py waits for the first instead of writing the same files."""
    os.makedirs(root, exist_ok=True)
    with open(os.path.join(root, "prepare.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another prepare.py that is at work in {root}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in FOLDERS:
            for leftover in glob.glob(os.path.join(glob.escape(root), folder, "shard_*.tmp")):  # of a call that was killed
                os.remove(leftover)
        yield  # the kernel lets go of the lock when the process ends, however it ends


def read_json(path):
    """The object in a JSON file, or None where there is no such file or no JSON object in it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError), open(path) as f:
        content = json.load(f)
        return content if isinstance(content, dict) else None
    return None


def sha256(*buffers):
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def read_texts(path, group):
    """The texts of one row group of a shard. DataError if it can't be read, though the file's end is whole."""
    try:
        texts = pq.ParquetFile(path).read_row_group(group, columns=["text"]).column("text").to_pylist()
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path} is damaged ({str(e)[:80]}): remove it and run prepare.py again") from None
    return [text or "" for text in texts]  # a missing text is an empty one


def list_shards(data_dir):
    """Names of the parquet shards that are there, validation last because its number is the highest."""
    return sorted(n for n in os.listdir(data_dir) if n.endswith(".parquet")) if os.path.isdir(data_dir) else []


def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def check_space(folder, needed, what):
    """DataError if the disk that holds `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{what} needs {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free: make room, "
            "or move the cache with AUTORESEARCH_CACHE=/other/folder"
        )


# ---------------------------------------------------------------------------
# Text, first source: ClimbMix from the Hugging Face hub
# ---------------------------------------------------------------------------

SHARD_BYTES = 100e6  # about; said before the download starts
TOKEN_BYTES_PER_SHARD = 150e6  # what a shard's token file takes, about
ATTEMPTS = 5  # in a row that bring nothing new
BACKOFF = 1.0  # seconds before the second attempt; doubles each time


def shard_url(name):
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return f"{endpoint}/datasets/karpathy/climbmix-400b-shuffle/resolve/main/{name}"


def why_not_a_shard(path):
    """None if `path` is a whole parquet file with text in it, else what is wrong."""
    try:
        metadata = pq.read_metadata(path)  # the footer is the file's last part: a truncated file has none
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as e:
        return f"not a whole parquet file ({str(e)[:80]})"
    if "text" not in schema.names or not (
        pa.types.is_string(schema.field("text").type) or pa.types.is_large_string(schema.field("text").type)
    ):
        return f"no column 'text' of strings, but {schema.names}"
    return None if metadata.num_rows else "no rows"


class NotThisTime(Exception):
    """A download's attempt failed in a way that another one may not."""

    def __init__(self, why, wait=0.0):
        super().__init__(why)
        self.wait = wait  # seconds that the server asked for


def fetch_once(url, part, bar, stop):
    """One attempt to complete the file `part` from `url`, going on where the last one stopped."""
    start = size_of(part)
    headers = {"Accept-Encoding": "identity"}  # so that lengths are those of the file
    if start:
        headers["Range"] = f"bytes={start}-"
    if os.environ.get("HF_TOKEN"):
        headers["Authorization"] = f"Bearer {os.environ['HF_TOKEN']}"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=(10, 30)) as response:
            if response.status_code == 416:  # nothing after `start`: the file is complete, or not the one that was begun
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                if total != str(start):
                    os.remove(part)
                    raise NotThisTime("the file has another size than the part that is here")
                return
            if response.status_code == 429 or response.status_code >= 500:
                asked = response.headers.get("Retry-After", "")
                raise NotThisTime(
                    f"the server answers {response.status_code} {response.reason}", min(float(asked), 60) if asked.isdecimal() else 0
                )
            if response.status_code not in (200, 206):
                hint = "; set HF_TOKEN to a token that may read it" if response.status_code in (401, 403) else "; is HF_ENDPOINT right?"
                raise DataError(f"{url}: the server answers {response.status_code} {response.reason}{hint}")
            if response.status_code == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                os.remove(part)
                raise NotThisTime("the server sent another range than was asked for")
            if response.status_code == 200:
                start = 0  # it does not resume
            length = response.headers.get("Content-Length")
            received = start
            with open(part, "ab" if start else "wb") as f:
                for chunk in response.iter_content(1 << 16):  # what is lost when the connection breaks is less than one
                    if stop.is_set():
                        return
                    f.write(chunk)
                    received += len(chunk)
                    bar.update(len(chunk))
            if length is not None and received - start < int(length):
                raise NotThisTime(f"the connection ended after {received - start:,} of {int(length):,} bytes")
    except requests.RequestException as e:
        raise NotThisTime(f"{type(e).__name__}: {str(e)[:120]}") from None


def download_shard(name, data_dir, bar, stop):
    """Bring one shard under its final name, whole and checked; what is wrong for good raises DataError. `stop`, an Event, ends it early."""
    path, part, url = os.path.join(data_dir, name), os.path.join(data_dir, name + ".part"), shard_url(name)
    failures = 0
    while not stop.is_set():
        before = size_of(part)
        try:
            fetch_once(url, part, bar, stop)
            if stop.is_set():
                return
            fault = why_not_a_shard(part)
            if fault is None:
                with open(part, "rb+") as f:
                    os.fsync(f.fileno())
                os.replace(part, path)
                return
            os.remove(part)
            before = math.inf  # a whole file that is no shard is no progress
            raise NotThisTime(f"what came is {fault}")
        except NotThisTime as e:
            failures = 1 if size_of(part) > before else failures + 1
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{url}: {e} ({ATTEMPTS} attempts). Check the network (HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror) "
                    "and run prepare.py again: it goes on where it stopped"
                ) from None
            stop.wait(max(e.wait, BACKOFF * 2 ** (failures - 1)))


def download_climbmix(dataset, num_shards, workers):
    """Download the first `num_shards` training shards and the validation shard, as far as they are missing or broken."""
    os.makedirs(dataset.data_dir, exist_ok=True)
    names = [f"shard_{i:05d}.parquet" for i in range(num_shards)] + [VAL_FILENAME]
    missing = []
    for name in names:
        path = os.path.join(dataset.data_dir, name)
        fault = why_not_a_shard(path) if os.path.exists(path) else "missing"
        if fault:
            missing.append(name)
            if fault != "missing":
                print(f"{path}: {fault}; downloading it again")
    if not missing:
        return
    size = len(missing) * SHARD_BYTES
    print(
        f"Downloading {len(missing)} of {len(names)} shards, about {size / 1e9:.1f} GB ({size * 8 / 1e8 / 60:.0f} minutes at 100 Mbit/s), "
        f"to {dataset.data_dir}",
        flush=True,
    )
    check_space(dataset.data_dir, size + len(names) * TOKEN_BYTES_PER_SHARD, f"the text of {len(names)} shards and its tokens")
    with tqdm(total=size, unit="B", unit_scale=True, desc="Download", disable=None) as bar, ThreadPoolExecutor(workers) as pool:
        stop = threading.Event()
        downloads = [pool.submit(download_shard, name, dataset.data_dir, bar, stop) for name in missing]
        try:
            for download in as_completed(downloads):
                download.result()
        finally:
            stop.set()  # after a failure or an interruption the others end too; their parts are kept


# ---------------------------------------------------------------------------
# Text, second source: files
# ---------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------

SPLIT_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]
BOS_TOKEN = SPECIAL_TOKENS[0]
MAX_CHARS = 1_000_000_000  # of text that the tokenizer is trained on
DOC_CAP = 10_000  # characters of a document that it is trained on


def tokenizer_digest(pattern, ranks):
    """What identifies a tokenizer: sha256 of its pattern and its merges in the order of their ranks."""
    merges = sorted((rank, token) for token, rank in ranks.items())
    return sha256(pattern.encode(), *(rank.to_bytes(4, "little") + len(token).to_bytes(4, "little") + token for rank, token in merges))


class Tokenizer:
    """Byte pairs with GPT-4's split pattern, stored as data: tiktoken's text format for the merges, JSON for the rest."""

    def __init__(self, enc, trained_on=()):
        self.enc = enc
        self.trained_on = list(trained_on)
        self.bos_token_id = enc.encode_single_token(BOS_TOKEN)

    @classmethod
    def from_ranks(cls, ranks, pattern, trained_on=()):
        """From merges `{bytes: rank}`; the special tokens are numbered after them."""
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        return cls(tiktoken.Encoding("autoresearch", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special), trained_on)

    @classmethod
    def from_directory(cls, tokenizer_dir=None):
        """The tokenizer saved in a folder, by default the dataset's. DataError if there is none."""
        folder = tokenizer_dir or DATASET.tokenizer_dir
        try:
            with open(os.path.join(folder, "tokenizer.json")) as f:
                about = json.load(f)
            with open(os.path.join(folder, "tokenizer.tiktoken"), "rb") as f:
                lines = [line.split() for line in f.read().splitlines()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            if tokenizer_digest(about["pattern"], ranks) != about["sha256"]:
                raise ValueError("the merges are not those that were saved")
            return cls.from_ranks(ranks, about["pattern"], about["trained_on"])
        except FileNotFoundError as e:
            raise DataError(f"no tokenizer ({e.filename} is missing): run python prepare.py") from None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError(f"the tokenizer in {folder} is broken ({e}): run python prepare.py") from None

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        with replace_file(os.path.join(folder, "tokenizer.tiktoken"), "wb") as f:
            for token, rank in self.enc._mergeable_ranks.items():
                f.write(base64.b64encode(token) + b" %d\n" % rank)
        about = {"pattern": self.enc._pat_str, "vocab_size": self.enc.n_vocab, "trained_on": self.trained_on, "sha256": self.digest()}
        with replace_file(os.path.join(folder, "tokenizer.json")) as f:
            json.dump(about, f, indent=1)

    def digest(self):
        return tokenizer_digest(self.enc._pat_str, self.enc._mergeable_ranks)

    def get_vocab_size(self):
        return self.enc.n_vocab

    def get_bos_token_id(self):
        return self.bos_token_id

    def encode(self, text, prepend=None, num_threads=8):
        """Token ids of a string, or a list of them for a list of strings. Special tokens in the text are text.

        `prepend`, a token id or any string, goes before each; in it a special token's name means that token.
        """
        if prepend is None:
            first = []
        else:
            first = [prepend] if isinstance(prepend, int) else self.enc.encode(prepend, allowed_special="all")
        if isinstance(text, str):
            return first + self.enc.encode_ordinary(text)
        if isinstance(text, list):
            return [first + ids for ids in self.enc.encode_ordinary_batch(text, num_threads=num_threads)]
        raise ValueError(f"encode takes a string or a list of strings, not {type(text).__name__}")

    def decode(self, ids):
        return self.enc.decode(ids)


def token_byte_counts(tokenizer):
    """Bytes that each token stands for, (vocab_size,) int32; 0 for special tokens.

    A token that is a lone part of a UTF-8 sequence decodes to U+FFFD and counts 3: kept, so that numbers compare with upstream's.
    """
    ordinary = tokenizer.get_vocab_size() - len(SPECIAL_TOKENS)
    counts = [len(tokenizer.decode([i]).encode("utf-8")) for i in range(ordinary)]
    return torch.tensor(counts + [0] * len(SPECIAL_TOKENS), dtype=torch.int32)


def get_token_bytes(device="cpu"):
    """`token_byte_counts` of the dataset's tokenizer, on `device`."""
    return token_byte_counts(Tokenizer.from_directory()).to(device)


def training_shards(dataset):
    """[name, bytes] of every training shard that is there, in the order of reading."""
    names = [n for n in list_shards(dataset.data_dir) if n != VAL_FILENAME]
    return [[n, os.path.getsize(os.path.join(dataset.data_dir, n))] for n in names]


def saved_tokenizer(dataset, shards):
    """The dataset's saved tokenizer if it was trained on these training shards, else None."""
    with contextlib.suppress(DataError):
        saved = Tokenizer.from_directory(dataset.tokenizer_dir)
        capped = saved.trained_on[-1:] == ["capped"]
        used = saved.trained_on[:-1] if capped else saved.trained_on
        same_shards = shards[: len(used)] == used and (capped or len(shards) == len(used))
        if same_shards and saved.get_vocab_size() == dataset.vocab_size and saved.enc._pat_str == SPLIT_PATTERN:
            return saved
        print("The saved tokenizer belongs to other shards or another vocabulary: training a new one")
    return None


def train_tokenizer(dataset):
    """The dataset's tokenizer: the saved one if it was trained on the shards that are there, else trained now."""
    shards = training_shards(dataset)
    if saved := saved_tokenizer(dataset, shards):
        return saved
    import rustbpe  # only needed to train

    trained_on = []

    def documents():
        chars = 0
        for name, size in shards:
            trained_on.append([name, size])
            path = os.path.join(dataset.data_dir, name)
            for group in range(pq.read_metadata(path).num_row_groups):
                for text in read_texts(path, group):
                    yield text[:DOC_CAP]
                    chars += min(len(text), DOC_CAP)
                    if chars >= MAX_CHARS:
                        trained_on.append("capped")  # further shards would change nothing
                        return

    print(
        f"Training the tokenizer ({dataset.vocab_size} tokens) on {len(shards)} shard(s), at most {MAX_CHARS / 1e9:g} billion characters",
        flush=True,
    )
    start = time.monotonic()
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents(), dataset.vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    tokenizer = Tokenizer.from_ranks(
        {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}, trainer.get_pattern(), trained_on
    )
    if tokenizer.get_vocab_size() != dataset.vocab_size:
        raise DataError(f"the training text is too small: it gives {tokenizer.get_vocab_size()} of {dataset.vocab_size} tokens; add text")
    sample = "Hello world! Numbers: 123. Unicode: 你好"
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    tokenizer.save(dataset.tokenizer_dir)
    print(f"Tokenizer trained in {time.monotonic() - start:.0f} s")
    return tokenizer


# ---------------------------------------------------------------------------
# Tokens: each shard once, into a file that training maps into memory
# ---------------------------------------------------------------------------

ENCODING_BATCH = 128  # documents that are read at a time; never across a row group


@dataclass(frozen=True)
class Shard:
    """A shard's tokens. Document i is `tokens[starts[i] : starts[i] + lengths[i]]`, beginning with BOS."""

    tokens: np.ndarray  # (n_tokens,) uint16, mapped from the file
    starts: np.ndarray  # (n_documents,) int64
    lengths: np.ndarray  # (n_documents,) int64
    row_groups: np.ndarray  # documents in each row group


def token_paths(dataset, name):
    stem = os.path.join(dataset.tokens_dir, name.removesuffix(".parquet"))
    return stem + ".tokens", stem + ".index.npz", stem + ".json"


def open_shard(dataset, name):
    """The tokens of a shard that was prepared."""
    tokens_path, index_path, _ = token_paths(dataset, name)
    with np.load(index_path, allow_pickle=False) as index:
        lengths, row_groups = index["lengths"].astype(np.int64), index["row_groups"]
    tokens = np.asarray(np.memmap(tokens_path, dtype=np.uint16, mode="r"))  # plain array: slices of a memmap object are slow
    return Shard(tokens, np.cumsum(lengths) - lengths, lengths, row_groups)


opened = {}  # sha256 → Shard: once open, it is read to the end, whatever becomes of the files meanwhile


def opened_shard(dataset, record):
    """The shard that dataset.json describes in `record`; DataError if another has taken its place."""
    if record["sha256"] not in opened:
        about = read_json(token_paths(dataset, record["shard"])[2])
        if not about or about["sha256"] != record["sha256"]:
            raise DataError(f"the tokens of {record['shard']} in {dataset.tokens_dir} changed during the run")
        opened[record["sha256"]] = open_shard(dataset, record["shard"])
    return opened[record["sha256"]]


def shard_digest(shard):
    """sha256 of a shard's tokens and index, as it stands in its record."""
    return sha256(shard.tokens, shard.lengths.astype(np.uint32), shard.row_groups.astype(np.uint32))


def encode_row_group(job):
    """Tokens and lengths of the documents of one row group. Runs in threads: tiktoken lets go of the interpreter's lock."""
    path, group, tokenizer = job
    bos = np.array([tokenizer.bos_token_id], dtype=np.uint16)
    pieces, lengths = [], []
    for text in read_texts(path, group):
        ids = tokenizer.enc.encode_to_numpy(text, disallowed_special=())  # encode_ordinary, without a Python integer for each token
        pieces += [bos, ids.astype(np.uint16)]
        lengths.append(1 + len(ids))
    return np.concatenate(pieces) if pieces else bos[:0], lengths


def tokenize_shard(dataset, name, tokenizer, pool, bar):
    """Write a shard's tokens, its index, and last what both were made from; returns that record."""
    source = os.path.join(dataset.data_dir, name)
    tokens_path, index_path, about_path = token_paths(dataset, name)
    with contextlib.suppress(FileNotFoundError):
        os.remove(about_path)
    groups = pq.read_metadata(source).num_row_groups
    digest, all_lengths, row_groups = hashlib.sha256(), [], []
    with replace_file(tokens_path, "wb") as f:
        for tokens, lengths in pool.map(encode_row_group, [(source, g, tokenizer) for g in range(groups)]):
            f.write(tokens)
            digest.update(tokens)
            all_lengths += lengths
            row_groups.append(len(lengths))
            bar.update()
    lengths, row_groups = np.array(all_lengths, dtype=np.uint32), np.array(row_groups, dtype=np.uint32)
    with replace_file(index_path, "wb") as f:
        np.savez(f, lengths=lengths, row_groups=row_groups)
    digest.update(lengths)
    digest.update(row_groups)
    about = {
        "shard": name,
        "source_bytes": os.path.getsize(source),
        "tokenizer": tokenizer.digest(),
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "sha256": digest.hexdigest(),
    }
    with replace_file(about_path) as f:
        json.dump(about, f, indent=1)
    return about


def tokenized(dataset, name, tokenizer_digest):
    """The record of a shard's token file if that is whole and of this shard and tokenizer, else None."""
    tokens_path, index_path, about_path = token_paths(dataset, name)
    about, source = read_json(about_path), os.path.join(dataset.data_dir, name)
    try:
        with np.load(index_path, allow_pickle=False) as index:
            documents, tokens = int(index["row_groups"].sum()), int(index["lengths"].sum(dtype=np.int64))
            whole = (
                documents == len(index["lengths"]) == about["documents"]
                and tokens == about["tokens"]
                and 2 * tokens == os.path.getsize(tokens_path)
                and about["tokenizer"] == tokenizer_digest
                and (not os.path.exists(source) or os.path.getsize(source) == about["source_bytes"])
            )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return about if whole else None


def tokenize(dataset, tokenizer):
    """Tokenize every shard that is not yet, then write dataset.json: from then on the data is ready. Returns the dataset as it is now."""
    assert dataset.vocab_size <= 2**16
    names, digest = list_shards(dataset.data_dir), tokenizer.digest()
    os.makedirs(dataset.tokens_dir, exist_ok=True)
    records = {name: tokenized(dataset, name, digest) for name in names}
    if records[VAL_FILENAME] and shard_digest(open_shard(dataset, VAL_FILENAME)) != records[VAL_FILENAME]["sha256"]:
        records[VAL_FILENAME] = None  # damaged since
    todo = [name for name in names if not records[name]]
    paths = [os.path.join(dataset.data_dir, name) for name in todo]
    check_space(dataset.tokens_dir, 1.5 * sum(map(os.path.getsize, paths)), f"the tokens of {len(todo)} shard(s)")
    groups = sum(pq.read_metadata(path).num_row_groups for path in paths)
    if todo:
        threads = len(os.sched_getaffinity(0))
        print(f"Tokenizing {len(todo)} shard(s) on {threads} core(s)", flush=True)
        with tqdm(total=groups, desc="Tokenize", unit="group", disable=None) as bar, ThreadPoolExecutor(threads) as pool:
            for name in todo:
                records[name] = tokenize_shard(dataset, name, tokenizer, pool, bar)
    if dataset.name == "text":  # a small text is evaluated whole, not over and over
        rows = records[VAL_FILENAME]["tokens"] // dataset.max_seq_len
        if not rows:
            raise DataError(
                f"the held-out text has {records[VAL_FILENAME]['tokens']} tokens, less than a row of {dataset.max_seq_len}: give more text"
            )
        dataset = replace(dataset, eval_tokens=min(dataset.eval_tokens, rows * dataset.max_seq_len))
    kept = ("shard", "documents", "tokens", "sha256")
    facts = {
        "name": dataset.name,
        **{key: getattr(dataset, key) for key in SIZES},
        "tokenizer": digest,
        "shards": [{k: records[n][k] for k in kept} for n in names],
    }
    if read_json(dataset.file) != facts:
        with replace_file(dataset.file) as f:
            json.dump(facts, f, indent=1)
    return dataset


def check_dataset(dataset=None):
    """dataset.json if everything that training and evaluation read is there and belongs together; DataError otherwise."""
    dataset = dataset or DATASET
    mend = "python prepare.py --text PATH..." if dataset.name == "text" else "python prepare.py"
    facts = read_json(dataset.file)
    try:
        names = [s["shard"] for s in facts["shards"]]
        sizes = {key: facts[key] for key in ("max_seq_len", "vocab_size", "eval_tokens")}
        _ = facts["name"], facts["tokenizer"], [(s["sha256"], s["documents"]) for s in facts["shards"]]
    except (KeyError, TypeError):
        raise DataError(f"the dataset {dataset.name} is not prepared in {dataset.root}: run {mend}") from None
    if VAL_FILENAME not in names or len(names) < 2:
        raise DataError(f"{dataset.file} names {len(names)} shard(s), of which the validation shard {VAL_FILENAME} must be one: run {mend}")
    for key, value in sizes.items():
        if value != getattr(dataset, key):
            raise DataError(f"{dataset.file} was prepared for {key} {value}, not {getattr(dataset, key)}: run {mend}")
    if facts["tokenizer"] != Tokenizer.from_directory(dataset.tokenizer_dir).digest():
        raise DataError(f"the tokenizer in {dataset.tokenizer_dir} is not the one that the tokens were made with: run {mend}")
    for shard in facts["shards"]:
        record = tokenized(dataset, shard["shard"], facts["tokenizer"])
        if record is None or record["sha256"] != shard["sha256"]:
            raise DataError(f"the tokens of {shard['shard']} in {dataset.tokens_dir} are missing or of another shard: run {mend}")
    new = sorted(set(list_shards(dataset.data_dir)) - set(names))
    if new:
        raise DataError(f"{len(new)} shard(s) in {dataset.data_dir} were added after preparation ({new[0]} …): run {mend}")
    validation = next(s for s in facts["shards"] if s["shard"] == VAL_FILENAME)
    if shard_digest(opened_shard(dataset, validation)) != validation["sha256"]:  # what every number is measured on
        opened.pop(validation["sha256"])
        raise DataError(f"the validation tokens in {dataset.tokens_dir} are not those that were prepared: run {mend}")
    return facts


# Once a process for what reads the data: what is added to the folder during a run must not end the run before its evaluation.
checked_dataset = lru_cache(check_dataset)


def fingerprint(dataset=None, budget=None):
    """12 hex digits that are equal for two runs if their numbers compare: sizes, tokenizer, every token, and the time budget."""
    facts = checked_dataset(dataset or DATASET)
    keys = ("max_seq_len", "vocab_size", "eval_tokens", "tokenizer")
    what = [facts[k] for k in keys] + [s["sha256"] for s in facts["shards"]] + [float(TIME_BUDGET if budget is None else budget)]
    return sha256(json.dumps(what).encode())[:12]


# ---------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------

BUFFER_DOCUMENTS = 1000  # that a row's next document is chosen from, at least


def shards_of(dataset, split):
    """dataset.json's records of the shards for "train", or of the one for "val"."""
    return [s for s in checked_dataset(dataset)["shards"] if (s["shard"] == VAL_FILENAME) == (split == "val")]


def document_batches(dataset, split):
    """Forever (shard, first document, one past the last, epoch): encoding batches in file order, none across a row group."""
    shards = shards_of(dataset, split)
    for record in shards:
        opened_shard(dataset, record)  # all of them now: see `opened`
    epoch = 0
    while True:
        epoch += 1
        for record in shards:
            shard = opened_shard(dataset, record)
            end = 0
            for count in shard.row_groups.tolist():
                start, end = end, end + count
                for first in range(start, end, ENCODING_BATCH):
                    yield shard, first, min(first + ENCODING_BATCH, end), epoch


def packed_rows(dataset, split, capacity):
    """Forever: fill the row that is sent in, (capacity,) integers, and yield the epoch; `next()` first.

    Best fit: the longest document that fits in what is left of the row, the first among equals; where none fits, the shortest (again
    the first) is cut to fill the row and its rest dropped. Documents wait in a list that is sorted by (length, latest first), so both are
    found by bisection, not by a scan.
    """
    order_bits = 40
    latest = (1 << order_bits) - 1
    batches = document_batches(dataset, split)
    least = BUFFER_DOCUMENTS
    if dataset.name == "text":
        documents = [s["documents"] for s in shards_of(dataset, split)]
        # A text that is small beside the buffer would fill it with copies, and rows with those of its longest documents.
        least = min(BUFFER_DOCUMENTS, max(1, sum(documents) // 20))
    waiting = []  # length << 40 | (latest - order of arrival), ascending
    where = {}  # the low part of such a key → (tokens, start)
    arrived, epoch = 0, 1
    row = yield
    while True:
        filled = 0
        while filled < capacity:
            while len(waiting) < least:
                shard, first, end, epoch = next(batches)
                for length, start in zip(shard.lengths[first:end].tolist(), shard.starts[first:end].tolist(), strict=True):
                    waiting.append(length << order_bits | (latest - arrived))
                    where[latest - arrived] = shard.tokens, start
                    arrived += 1
                waiting.sort()
            room = capacity - filled
            i = bisect_right(waiting, room << order_bits | latest)  # one past the longest that fits
            if i:
                key = waiting.pop(i - 1)
                length = key >> order_bits
            else:
                shortest = waiting[0] >> order_bits
                key = waiting.pop(bisect_right(waiting, shortest << order_bits | latest) - 1)
                length = room
            tokens, start = where.pop(key & latest)
            row[filled : filled + length] = tokens[start : start + length]
            filled += length
        row = yield epoch


def make_dataloader(tokenizer, B, T, split):
    """Forever `(inputs, targets, epoch)`: (B, T) int64 tokens on the GPU (the CPU without one), targets one token ahead.

    Every row begins with BOS and is full. The sequence of rows does not depend on B. On a GPU the copy runs beside the computation.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split {split!r}: use 'train' or 'val'")
    dataset = DATASET
    if tokenizer.digest() != checked_dataset(dataset)["tokenizer"]:
        raise DataError(f"the tokens in {dataset.tokens_dir} were made with another tokenizer than the one given: run python prepare.py")
    on_gpu = torch.cuda.is_available()
    rows = packed_rows(dataset, split, T + 1)
    next(rows)
    # Two buffers in turn: one is filled while the other is copied. int32 halves what crosses to the GPU, where it becomes int64.
    buffers = [torch.empty((B, T + 1), dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
    stream = torch.cuda.Stream() if on_gpu else None
    copied = [torch.cuda.Event() for _ in buffers] if on_gpu else None
    turn = 0
    while True:
        buffer = buffers[turn]
        if on_gpu:
            copied[turn].synchronize()
        for row in buffer.numpy():
            epoch = rows.send(row)
        if on_gpu:
            with torch.cuda.stream(stream):
                batch = buffer.to("cuda", non_blocking=True)
                copied[turn].record(stream)
                inputs, targets = batch[:, :-1].long(), batch[:, 1:].long()
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in (inputs, targets):
                tensor.record_stream(torch.cuda.current_stream())  # its memory is not used again before the computation has read it
        else:
            inputs, targets = buffer[:, :-1].long(), buffer[:, 1:].long()
        turn = 1 - turn
        yield inputs, targets, epoch


# ---------------------------------------------------------------------------
# The metric
# ---------------------------------------------------------------------------


def check_model(model, x, y, losses):
    """NoResult unless `losses`, the model's for (x, y), are those of its logits, and no logit depends on a later token.

    Looks at the first row, with the model uncompiled. The tolerances are far above what rounding does (bfloat16 under autocast, float32
    without) and far below what any use of the next token, or a loss that is not the cross entropy, would change.
    """
    bfloat16 = torch.is_autocast_enabled(x.device.type)
    x, y, losses = x[:1], y[:1], losses.reshape(y.shape)[0]
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with torch.compiler.set_stance("force_eager"):
        logits = model(x)
        if logits.ndim != 3 or logits.shape[:2] != x.shape:
            raise NoResult(
                f"invalid: model(x) returned {tuple(logits.shape)}, not the logits (rows, tokens, vocabulary) of {tuple(x.shape)}"
            )
        entropy = F.cross_entropy(logits[0].float(), y[0], reduction="none")
        for which, got in (("losses", losses), ("uncompiled losses", model(x, y, reduction="none").reshape(-1))):
            difference = (got - entropy).double()
            mean, rms = abs(difference.mean().item()), difference.square().mean().sqrt().item()
            if not (mean <= (0.02 if bfloat16 else 1e-3) and rms <= (0.1 if bfloat16 else 5e-3)):  # NaN too
                raise NoResult(
                    f"invalid: the model's {which} are not the cross entropy of its logits (off by {mean:.4f} in the mean, {rms:.4f} rms): "
                    "this is no result"
                )
        for last in (x.size(1) // 3, x.size(1) // 3 + 1):  # an even and an odd place
            changed = x.clone()
            changed[:, last + 1 :] = (x[:, last + 1 :] + logits.size(-1) // 2) % logits.size(-1)
            difference = (model(changed)[0, : last + 1] - logits[0, : last + 1]).abs().max().item()
            if not difference <= (0.02 if bfloat16 else 1e-3):
                raise NoResult(
                    f"invalid: the logits up to token {last} change by {difference:.4f} when later tokens change: the model sees what "
                    "it must predict, so this is no result"
                )


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of the validation text, lower is better; does not depend on the vocabulary or on `batch_size`.

    `model(x, y, reduction="none")` returns the loss of each token in nats, `model(x)` the logits (rows, tokens, vocabulary). The losses are
    summed over the first EVAL_TOKENS tokens where the target stands for at least one byte, and divided by ln 2 times those bytes. Says how
    many tokens it evaluates and what came of it, which experiment.py compares with the summary.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: use 1 or more")
    print(f"Evaluating {DATASET.eval_tokens:,} tokens", flush=True)
    T, rows_left = DATASET.max_seq_len, DATASET.eval_tokens // DATASET.max_seq_len
    loader = make_dataloader(tokenizer, batch_size, T, "val")
    nats = bytes_ = impossible = None
    while rows_left > 0:
        x, y, _ = next(loader)
        losses = model(x, y, reduction="none")
        if losses.numel() != y.numel():
            raise NoResult(
                f"model(x, y, reduction='none') returned {tuple(losses.shape)}, not one loss for each of the targets {tuple(y.shape)}"
            )
        if nats is None:
            token_bytes = token_byte_counts(tokenizer).to(y.device)
            nats, bytes_ = torch.zeros((), dtype=torch.float64, device=y.device), torch.zeros((), dtype=torch.int64, device=y.device)
            impossible = torch.zeros((), dtype=torch.bool, device=y.device)
            check_model(model, x, y, losses)
        rows = min(rows_left, batch_size)  # a smaller last batch would recompile: it is full, and what is too much is left out
        counts = token_bytes[y[:rows]]
        counted = counts > 0
        losses = torch.where(counted, losses.reshape(y.shape)[:rows].double(), 0.0)
        nats += losses.clamp_min(0.0).sum()  # NaN stays NaN
        impossible |= (losses < -1e-3).any()  # rounding may take a sure token a little below 0
        bytes_ += counts.sum()
        rows_left -= rows
    bpb = nats.item() / (math.log(2) * bytes_.item())
    if impossible.item():
        raise NoResult("some tokens' losses are negative, which no probability gives: this is no result")
    if not 0 < bpb < 16:  # NaN fails too; 16 is worse than no model at all
        raise NoResult(f"val_bpb is {bpb}: no model's losses add up to that, so this is no result")
    print(f"Evaluated {DATASET.eval_tokens:,} tokens: val_bpb {bpb:.6f}")
    return bpb


# ---------------------------------------------------------------------------
# Preparation
# ---------------------------------------------------------------------------


def prepare(dataset, num_shards=10, workers=8, text_paths=None):
    """Make `dataset` ready, doing only what is not done. DataError says what is in the way."""

    def whole(name):
        path = os.path.join(dataset.data_dir, name)
        return os.path.exists(path) and why_not_a_shard(path) is None

    checked_dataset.cache_clear()
    opened.clear()
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
    dataset = text_dataset()
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
    if DATASET.name != "text":
        print("To train on it: AUTORESEARCH_DATASET=text ./run.sh")


def main():
    parser = argparse.ArgumentParser(description="Prepare data and tokenizer.", epilog=f"The cache is {CACHE_DIR}.")
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
            print(f"Ready: {checked_dataset(DATASET)['name']}, fingerprint {fingerprint()}")
            return 0
        if args.text:
            prepare_text(args.text)
        else:
            prepare(DATASET, num_shards, args.download_workers)
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

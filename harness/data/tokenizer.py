"""The tokenizer: trained on a dataset's text, saved with the bytes that each of its tokens stands for."""

import base64
import contextlib
import json
import os
import time

import pyarrow.parquet as pq
import tiktoken
import torch

from harness.common.files import replace_file, sha256
from harness.data import dataset as chosen
from harness.data.dataset import DataError
from harness.data.shards import read_texts, training_shards

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
        folder = tokenizer_dir or chosen.DATASET.tokenizer_dir
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

"""Tokens: each shard once, into a file that training maps into memory."""

import contextlib
import hashlib
import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.parquet as pq
from tqdm import tqdm

from harness.common.files import read_json, replace_file, sha256
from harness.data.dataset import SIZES, VAL_FILENAME, DataError
from harness.data.shards import check_space, list_shards, read_texts

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

"""The parquet shards of a dataset: which there are, what is in them, and the lock of whoever makes them."""

import contextlib
import fcntl
import glob
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

from harness.data.dataset import FOLDERS, VAL_FILENAME, DataError


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


def check_space(folder, needed, what):
    """DataError if the disk that holds `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{what} needs {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free: make room, "
            "or move the cache with AUTORESEARCH_CACHE=/other/folder"
        )


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


def training_shards(dataset):
    """[name, bytes] of every training shard that is there, in the order of reading."""
    names = [n for n in list_shards(dataset.data_dir) if n != VAL_FILENAME]
    return [[n, os.path.getsize(os.path.join(dataset.data_dir, n))] for n in names]

"""Shared by all tests: a cache of their own, the demonstration as the dataset, and the switch between interpreter and GPU for kernels."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CACHE = tempfile.TemporaryDirectory(prefix="autoresearch-tests-")
os.environ["AUTORESEARCH_CACHE"] = CACHE.name  # never the user's own
os.environ["AUTORESEARCH_DATASET"] = "demo"
for name in ("AUTORESEARCH_TIME_BUDGET", "AUTORESEARCH_SEED", "HF_ENDPOINT", "HF_TOKEN", "GPU_BF16_PEAK_FLOPS", "GPU_MEMORY_FRACTION"):
    os.environ.pop(name, None)
sys.path[:0] = [str(PROJECT), str(Path(__file__).parent)]

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def demo():
    """The demonstration's dataset, prepared in the tests' cache as a user would prepare it."""
    subprocess.run([sys.executable, "prepare.py"], cwd=PROJECT, check=True)
    import prepare

    return prepare.DATASET


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """The dataset that the golden values were computed on: three real parquet shards, tokenizer and tokens made by prepare.py."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from corpus import documents

    import prepare

    dataset = prepare.Dataset(
        "golden", str(tmp_path_factory.mktemp("golden")), max_seq_len=256, vocab_size=2048, eval_tokens=16384, time_budget=60
    )
    os.makedirs(dataset.data_dir)
    for name, seed, count in (("shard_00000.parquet", 11, 1500), ("shard_00001.parquet", 12, 1500), (prepare.VAL_FILENAME, 13, 900)):
        pq.write_table(pa.table({"text": documents(seed, count)}), os.path.join(dataset.data_dir, name), row_group_size=256)
    prepare.prepare(dataset)
    return dataset

"""Text, first source: ClimbMix from the Hugging Face hub."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import requests
from tqdm import tqdm

from harness.common.files import size_of
from harness.data.dataset import VAL_FILENAME, DataError
from harness.data.shards import check_space, why_not_a_shard

SHARD_BYTES = 100e6  # about; said before the download starts
TOKEN_BYTES_PER_SHARD = 150e6  # what a shard's token file takes, about
ATTEMPTS = 5  # in a row that bring nothing new
BACKOFF = 1.0  # seconds before the second attempt; doubles each time


def shard_url(name):
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return f"{endpoint}/datasets/karpathy/climbmix-400b-shuffle/resolve/main/{name}"


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

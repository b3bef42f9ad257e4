"""Downloads from a real HTTP server on loopback that misbehaves: nothing broken is ever left under a shard's name."""

import io
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT
from corpus import documents

import prepare
from harness.data import climbmix
from harness.data import tokenizer as tokenizers
from harness.data import tokens as token_files

NAMES = ("shard_00000.parquet", "shard_00001.parquet", prepare.VAL_FILENAME)


def parquet(seed, column="text", count=300):
    buffer = io.BytesIO()
    pq.write_table(pa.table({column: documents(seed, count)}), buffer, row_group_size=100)
    return buffer.getvalue()


class Hub:
    """Serves shards under the hub's paths; `faults[name]` is a list of what goes wrong, one each request, then all is well."""

    def __init__(self):
        self.files = {name: parquet(seed) for seed, name in enumerate(NAMES)}
        self.faults, self.requests = {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                name = self.path.rsplit("/", 1)[-1]
                hub.requests.append((self.path, dict(self.headers)))
                self.close_connection = True
                todo = hub.faults.get(name) or []
                fault = todo.pop(0) if todo else "none"
                data, status, start = hub.files.get(name), 200, 0
                if data is None:
                    return self.answer(404, b"no such file")
                if isinstance(fault, int):
                    return self.answer(fault, b"<html>sorry</html>", {"Retry-After": "0"})
                if fault == "page":  # a captive portal: 200, whole, and no parquet
                    return self.answer(200, b"<html>please log in</html>")
                range_ = self.headers.get("Range")
                if range_ and fault != "no ranges":
                    start = int(range_.removeprefix("bytes=").removesuffix("-"))
                    if start >= len(data):
                        return self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                    status = 206
                body = data[start:]
                headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if status == 206 else {}
                self.answer(status, body, headers, send=len(body) // 2 if fault == "half" else len(body))

            def answer(self, status, body, headers=None, send=None):
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), "Connection": "close", **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body[:send])
                self.wfile.flush()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setattr(climbmix, "BACKOFF", 0.01)
    yield hub
    hub.server.shutdown()


@pytest.fixture
def dataset(tmp_path):
    return prepare.Dataset("climbmix", str(tmp_path / "cache"), max_seq_len=64, vocab_size=400, eval_tokens=640, time_budget=60)


def shards(dataset):
    return {n: open(os.path.join(dataset.data_dir, n), "rb").read() for n in prepare.list_shards(dataset.data_dir)}


def modified(dataset):
    return {p: p.stat().st_mtime_ns for p in Path(dataset.root).rglob("*") if p.is_file() and p.name != "prepare.lock"}


def test_download_prepare_and_again(hub, dataset, capsys):
    prepare.prepare(dataset, num_shards=2)
    assert shards(dataset) == hub.files
    assert sorted(os.listdir(dataset.data_dir)) == ["dataset.json", *NAMES], "nothing else is left"
    out = capsys.readouterr().out
    assert out.startswith("Downloading 3 of 3 shards, about 0.3 GB") and "Ready: climbmix" in out
    count, files = len(hub.requests), modified(dataset)
    prepare.prepare(dataset, num_shards=2)
    assert len(hub.requests) == count, "what is there is not asked for again"
    assert files == modified(dataset), "and nothing is written again"
    assert hub.requests[0][0].startswith("/datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_")


@pytest.mark.parametrize(
    "faults", [["half"], ["half", "half", "half"], [500, 503], [429], ["page"], ["half", "no ranges"], ["half", 502, "half"]]
)
def test_faults_that_pass(hub, dataset, faults):
    hub.faults[NAMES[1]] = list(faults)
    prepare.prepare(dataset, num_shards=2)
    assert shards(dataset) == hub.files


def test_it_resumes_where_it_stopped(hub, dataset):
    hub.faults[NAMES[0]] = ["half"]
    prepare.prepare(dataset, num_shards=1)
    first, second = [headers.get("Range") for path, headers in hub.requests if path.endswith(NAMES[0])]
    half = len(hub.files[NAMES[0]]) // 2
    assert first is None and half - 2**16 < int(second.removeprefix("bytes=").removesuffix("-")) <= half


def test_a_part_that_is_whole_already(hub, dataset):
    """The last run ended between the last byte and the renaming: the server has nothing more to send (416)."""
    os.makedirs(dataset.data_dir)
    with open(os.path.join(dataset.data_dir, NAMES[0] + ".part"), "wb") as f:
        f.write(hub.files[NAMES[0]])
    prepare.prepare(dataset, num_shards=1)
    assert shards(dataset)[NAMES[0]] == hub.files[NAMES[0]]


def test_a_part_of_something_else(hub, dataset):
    os.makedirs(dataset.data_dir)
    with open(os.path.join(dataset.data_dir, NAMES[0] + ".part"), "wb") as f:
        f.write(b"x" * (len(hub.files[NAMES[0]]) + 5))
    prepare.prepare(dataset, num_shards=1)
    assert shards(dataset)[NAMES[0]] == hub.files[NAMES[0]]


def test_a_broken_shard_under_its_final_name_is_replaced(hub, dataset, capsys):
    os.makedirs(dataset.data_dir)
    with open(os.path.join(dataset.data_dir, NAMES[0]), "wb") as f:
        f.write(hub.files[NAMES[0]][:-100])
    prepare.prepare(dataset, num_shards=1)
    assert shards(dataset)[NAMES[0]] == hub.files[NAMES[0]] and "downloading it again" in capsys.readouterr().out


@pytest.mark.parametrize(("fault", "message"), [(404, "404"), (401, "set HF_TOKEN"), (403, "set HF_TOKEN")])
def test_answers_that_will_not_change_end_it_at_once(hub, dataset, fault, message):
    hub.faults[prepare.VAL_FILENAME] = [fault] * 99
    with pytest.raises(prepare.DataError, match=message):
        prepare.prepare(dataset, num_shards=1)
    assert len([p for p, _ in hub.requests if p.endswith(prepare.VAL_FILENAME)]) == 1
    assert prepare.VAL_FILENAME not in shards(dataset)


@pytest.mark.parametrize("fault", [500, "page"])
def test_faults_that_last_end_it_after_some_attempts(hub, dataset, fault):
    hub.faults[prepare.VAL_FILENAME] = [fault] * 99
    with pytest.raises(prepare.DataError, match=f"{climbmix.ATTEMPTS} attempts"):
        prepare.prepare(dataset, num_shards=1)
    assert len([p for p, _ in hub.requests if p.endswith(prepare.VAL_FILENAME)]) == climbmix.ATTEMPTS
    assert prepare.VAL_FILENAME not in os.listdir(dataset.data_dir)
    with pytest.raises(prepare.DataError, match="not prepared"):
        prepare.check_dataset(dataset)


def test_a_shard_without_text_is_none(hub, dataset):
    hub.files[NAMES[0]] = parquet(0, column="content")
    with pytest.raises(prepare.DataError, match=r"no column 'text' of strings, but \['content'\]"):
        prepare.prepare(dataset, num_shards=1)


def test_missing_validation_shard_is_no_data(hub, dataset):
    """Two training shards are there and the validation shard can't be had: not ready, and training says so before it starts."""
    prepare.prepare(dataset, num_shards=2)
    os.remove(os.path.join(dataset.data_dir, prepare.VAL_FILENAME))
    os.remove(token_files.token_paths(dataset, prepare.VAL_FILENAME)[0])
    hub.faults[prepare.VAL_FILENAME] = [404]
    with pytest.raises(prepare.DataError, match="404"):
        prepare.prepare(dataset, num_shards=2)
    with pytest.raises(prepare.DataError, match="shard_06542"):
        prepare.check_dataset(dataset)


def test_token_is_sent(hub, dataset, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    prepare.prepare(dataset, num_shards=1)
    assert all(headers["Authorization"] == "Bearer hf_secret" for _, headers in hub.requests)


def test_space_is_checked_first(hub, dataset, monkeypatch):
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda folder: type("usage", (), {"free": 10_000_000}))
    with pytest.raises(prepare.DataError, match="0.0 GB are free: make room"):
        prepare.prepare(dataset, num_shards=2)
    assert not hub.requests


def test_more_shards_later(hub, dataset, capsys):
    """A further shard changes what the tokenizer was trained on (below a billion characters): both are made anew."""
    prepare.prepare(dataset, num_shards=1)
    before = prepare.check_dataset(dataset)
    prepare.prepare(dataset, num_shards=2)
    after = prepare.check_dataset(dataset)
    assert [s["shard"] for s in after["shards"]] == list(NAMES) and before["tokenizer"] != after["tokenizer"]
    assert "training a new one" in capsys.readouterr().out


def test_shards_beyond_the_tokenizers_text_keep_it(hub, dataset, monkeypatch):
    monkeypatch.setattr(tokenizers, "MAX_CHARS", 50_000)
    prepare.prepare(dataset, num_shards=1)
    before = prepare.check_dataset(dataset)
    prepare.prepare(dataset, num_shards=2)
    after = prepare.check_dataset(dataset)
    assert before["tokenizer"] == after["tokenizer"] and before["shards"] == [after["shards"][0], after["shards"][2]]


def test_new_shard_without_preparation_is_noticed(hub, dataset):
    prepare.prepare(dataset, num_shards=1)
    with open(os.path.join(dataset.data_dir, NAMES[1]), "wb") as f:
        f.write(hub.files[NAMES[1]])
    with pytest.raises(prepare.DataError, match="added after preparation"):
        prepare.check_dataset(dataset)


SCRIPT = """
import sys, prepare
from harness.data import climbmix
climbmix.BACKOFF = 0.01
dataset = prepare.Dataset("climbmix", sys.argv[1], max_seq_len=64, vocab_size=400, eval_tokens=640, time_budget=60)
prepare.prepare(dataset, num_shards=2)
"""


def test_two_at_once(hub, dataset):
    hub.faults[NAMES[0]] = ["half"]
    both = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, dataset.root], cwd=PROJECT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0] and shards(dataset) == hub.files
    assert sum("Downloading" in o for o in outputs) == 1, "the second one waited and found the work done"


def test_killed_in_the_middle_then_again(hub, dataset):
    """SIGKILL while shards come in: no broken file under a final name, and the next call finishes."""
    hub.faults = {name: ["half"] * 4 for name in NAMES}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.replace("0.01", "5"), dataset.root], cwd=PROJECT, stdout=subprocess.DEVNULL)
    while len(hub.requests) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert all(prepare.why_not_a_shard(os.path.join(dataset.data_dir, n)) is None for n in prepare.list_shards(dataset.data_dir))
    prepare.prepare(dataset, num_shards=2)
    assert shards(dataset) == hub.files


# --- the command line ---------------------------------------------------------------------------------------------------


def command(tmp_path, *args, **environment):
    environment = {**os.environ, "AUTORESEARCH_CACHE": str(tmp_path), "AUTORESEARCH_DATASET": "climbmix", **environment}
    return subprocess.run([sys.executable, "prepare.py", *args], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)


def test_no_network_is_one_line(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        closed = s.getsockname()[1]
    script = "import sys, prepare; from harness.data import climbmix; climbmix.BACKOFF = 0.01; sys.exit(prepare.main())"
    environment = {
        **os.environ,
        "AUTORESEARCH_CACHE": str(tmp_path),
        "AUTORESEARCH_DATASET": "climbmix",
        "HF_ENDPOINT": f"http://127.0.0.1:{closed}",
    }
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 3 and "Check the network" in done.stderr and "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("prepare.py: ")]) == 1


def test_proxy_is_used(hub, tmp_path):
    """requests takes HTTP_PROXY: the 'hub' is asked in place of a host that does not exist."""
    script = "import prepare; from harness.data import climbmix; climbmix.BACKOFF = 0.01; climbmix.download_climbmix(prepare.DATASET, 1, 2)"
    environment = {
        **os.environ,
        "AUTORESEARCH_CACHE": str(tmp_path),
        "AUTORESEARCH_DATASET": "climbmix",
        "HTTP_PROXY": hub.url,
        "http_proxy": hub.url,
        "HF_ENDPOINT": "http://hub.invalid",
        "NO_PROXY": "",
        "no_proxy": "",
    }
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, env=environment, check=True)
    assert (tmp_path / "data" / NAMES[0]).read_bytes() == hub.files[NAMES[0]] and hub.requests[0][0].startswith("http://hub.invalid/")


@pytest.mark.parametrize(("args", "message"), [(["--num-shards", "0"], "--num-shards 0"), (["--num-shards", "7000"], "--num-shards 7000"),
                                               (["--download-workers", "0"], "--download-workers 0")])  # fmt: skip
def test_bad_arguments(monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
    with pytest.raises(SystemExit) as ended:
        prepare.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_check_says_what_is_missing_and_changes_nothing(tmp_path):
    done = command(tmp_path, "--check")
    assert done.returncode == 3 and "run python prepare.py" in done.stderr and os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line(hub, tmp_path):
    """A real write to a full device: a part's file that leads to /dev/full."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / (NAMES[0] + ".part")).symlink_to("/dev/full")
    done = command(tmp_path, "--num-shards", "1", HF_ENDPOINT=hub.url)
    assert (
        done.returncode == 3 and "No space left on device" in done.stderr and "make room" in done.stderr and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "data" / NAMES[0]).exists()

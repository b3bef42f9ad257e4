"""Tokenizer, datasets and loader beyond the golden values."""

import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkout import NO_GPU
from conftest import PROJECT
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from harness.common import files
from harness.common import hardware as hardware_found
from harness.data import dataset as chosen
from harness.data import loader as loaders
from harness.data import ready, shards
from harness.data import text as texts
from harness.data import tokenizer as tokenizers
from harness.data import tokens as token_files


@pytest.fixture
def tokenizer(golden, monkeypatch):
    monkeypatch.setattr(chosen, "DATASET", golden)
    return prepare.Tokenizer.from_directory()


# --- tokenizer ----------------------------------------------------------------------------------------------------------


def test_prepend_takes_any_string(tokenizer):
    bos, hello = tokenizer.get_bos_token_id(), tokenizer.encode("hello")
    assert tokenizer.encode("hello", prepend=bos) == [bos, *hello]
    assert tokenizer.encode("hello", prepend="<|reserved_0|>") == [bos, *hello]
    assert tokenizer.encode("hello", prepend="two tokens") == [*tokenizer.encode("two tokens"), *hello]
    assert tokenizer.encode(["hello", ""], prepend=bos) == [[bos, *hello], [bos]]


def test_special_tokens_in_text_are_text(tokenizer):
    text = "<|reserved_0|> <|reserved_3|>"
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.get_bos_token_id() and tokenizer.decode(ids) == text


@pytest.mark.parametrize("value", [3, None, b"bytes"])
def test_encode_refuses_what_is_no_text(tokenizer, value):
    with pytest.raises(ValueError, match=type(value).__name__):
        tokenizer.encode(value)


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_encoding_is_tiktokens_ordinary_one(golden, text):
    """What preparation uses for speed gives the same tokens, and decoding gives the text back."""
    tokenizer = prepare.Tokenizer.from_directory(golden.tokenizer_dir)
    ids = tokenizer.encode(text)
    assert tokenizer.enc.encode_to_numpy(text, disallowed_special=()).tolist() == ids
    assert tokenizer.decode(ids) == text


def test_tokenizer_is_data(golden, tmp_path):
    """Upstream's pickle beside ours is never opened; ours is text that anything can read."""
    folder = tmp_path / "tokenizer"
    prepare.Tokenizer.from_directory(golden.tokenizer_dir).save(folder)

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(Payload()))
    assert prepare.Tokenizer.from_directory(folder).encode("hello")
    assert not (tmp_path / "executed").exists()
    from tiktoken.load import load_tiktoken_bpe

    assert load_tiktoken_bpe(str(folder / "tokenizer.tiktoken")) == prepare.Tokenizer.from_directory(folder).enc._mergeable_ranks
    assert json.loads((folder / "tokenizer.json").read_text())["vocab_size"] == 2048


@pytest.mark.parametrize("damage", [
    lambda f: (f / "tokenizer.json").unlink(),
    lambda f: (f / "tokenizer.tiktoken").unlink(),
    lambda f: (f / "tokenizer.json").write_text("{"),
    lambda f: (f / "tokenizer.tiktoken").write_bytes(b"!!! 1\n"),
    lambda f: (f / "tokenizer.tiktoken").write_bytes((f / "tokenizer.tiktoken").read_bytes().replace(b" 300\n", b" 301\n", 1)),
])  # fmt: skip
def test_damaged_tokenizer(golden, tmp_path, damage):
    prepare.Tokenizer.from_directory(golden.tokenizer_dir).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(prepare.DataError, match=r"run python prepare\.py"):
        prepare.Tokenizer.from_directory(tmp_path)


def test_tokenizer_of_other_shards_or_vocabulary_is_not_reused(golden, tmp_path, capsys):
    root = tmp_path / "copy"
    subprocess.run(["cp", "-r", golden.root, str(root)], check=True)
    same = prepare.Dataset("golden", str(root), 256, 2048, 16384, 60)
    digest = prepare.train_tokenizer(same).digest()
    assert "Training" not in capsys.readouterr().out
    other = prepare.Dataset("golden", str(root), 256, 1024, 16384, 60)
    prepare.prepare(other)
    assert prepare.Tokenizer.from_directory(other.tokenizer_dir).get_vocab_size() == 1024
    prepare.prepare(same)
    assert prepare.check_dataset(same)["tokenizer"] == digest, "the same text gives the same tokenizer again"
    with pytest.raises(prepare.DataError, match="vocab_size"):
        prepare.check_dataset(other)


def test_loader_refuses_another_tokenizer(golden, monkeypatch, tokenizer):
    ranks = dict(list(tokenizer.enc._mergeable_ranks.items())[:1000])
    other = prepare.Tokenizer.from_ranks(ranks, tokenizers.SPLIT_PATTERN)
    with pytest.raises(prepare.DataError, match="another tokenizer"):
        next(prepare.make_dataloader(other, 2, 64, "train"))
    with pytest.raises(ValueError, match="'test'"):
        next(prepare.make_dataloader(tokenizer, 2, 64, "test"))


# --- batches ------------------------------------------------------------------------------------------------------------


def rows_by_the_rule(shards, capacity, count, buffer_documents):
    """The packing rule read literally, on lists: [(document's tokens), ...] for each encoding batch in `shards`, repeated forever."""
    buffer, rows, i = [], [], 0
    while len(rows) < count:
        row = []
        while len(row) < capacity:
            while len(buffer) < buffer_documents:
                buffer += shards[i % len(shards)]
                i += 1
            room = capacity - len(row)
            fits = [d for d in buffer if len(d) <= room]
            if fits:
                longest = max(map(len, fits))
                position = next(p for p, d in enumerate(buffer) if len(d) == longest)
            else:
                shortest = min(map(len, buffer))
                position = next(p for p, d in enumerate(buffer) if len(d) == shortest)
            row += buffer.pop(position)[:room]
        rows.append(row)
    return rows


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(2, 33), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_packing_is_the_rule(groups, capacity, buffer_documents):
    """Any document lengths, encoding batches of 4, buffers from 1 document: the same rows as the rule read literally."""
    rng = random.Random(0)
    documents = [[rng.randrange(1000) for _ in range(n)] for group in groups for n in group]
    lengths = np.array([len(d) for d in documents])
    shard = token_files.Shard(
        np.array(sum(documents, []), dtype=np.uint16), np.cumsum(lengths) - lengths, lengths, np.array([len(g) for g in groups])
    )
    batches, at = [], 0
    for group in groups:
        batches += [documents[at : at + len(group)][i : i + 4] for i in range(0, len(group), 4)]
        at += len(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "ENCODING_BATCH", 4)
        patch.setattr(loaders, "BUFFER_DOCUMENTS", buffer_documents)
        patch.setattr(token_files, "opened_shard", lambda dataset, record: shard)
        patch.setattr(ready, "checked_dataset", lambda dataset: {"shards": [{"shard": "shard_00000.parquet", "sha256": ""}]})
        rows = loaders.packed_rows(SimpleNamespace(name="any", tokens_dir=""), "train", capacity)
        next(rows)
        ours = []
        for _ in range(30):
            row = np.full(capacity, -1)
            rows.send(row)
            ours.append(row.tolist())
    assert ours == rows_by_the_rule(batches, capacity, 30, buffer_documents)


def test_rows_do_not_depend_on_the_batch_size(tokenizer):
    def rows(B):
        loader, found = prepare.make_dataloader(tokenizer, B, 100, "train"), []
        while len(found) < 42:
            x, y, _ = next(loader)
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (B, 100) and torch.equal(x[:, 1:], y[:, :-1])
            found += torch.cat([x, y[:, -1:]], 1).tolist()
        return found[:42]

    assert rows(1) == rows(7) == rows(42)


# --- datasets -----------------------------------------------------------------------------------------------------------


def test_seed(monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_SEED", "5")
    assert prepare.seed_everything() == 5
    first = torch.rand(3)
    monkeypatch.delenv("AUTORESEARCH_SEED")
    assert prepare.seed_everything() == 42
    assert not torch.equal(torch.rand(3), first)
    prepare.seed_everything()
    torch.manual_seed(42)
    expected = torch.rand(3)
    prepare.seed_everything()
    assert torch.equal(torch.rand(3), expected)


def test_fingerprint_changes_with_what_makes_numbers_incomparable(demo, tmp_path):
    base = prepare.fingerprint(demo, 60)
    assert base == prepare.fingerprint(demo, 60.0) and base != prepare.fingerprint(demo, 300)
    root = tmp_path / "demo"
    subprocess.run(["cp", "-r", demo.root, str(root)], check=True)
    copy = prepare.Dataset("demo", str(root), demo.max_seq_len, demo.vocab_size, demo.eval_tokens, demo.time_budget)
    assert prepare.fingerprint(copy, 60) == base, "where the data lies does not matter"
    table = pq.read_table(root / "data" / "shard_00000.parquet")
    changed = [table.column("text")[0].as_py() + "!"] + table.column("text").to_pylist()[1:]
    pq.write_table(pa.table({"text": changed}), root / "data" / "shard_00000.parquet", row_group_size=1024)
    prepare.prepare(copy)
    assert prepare.fingerprint(copy, 60) != base


def write_text(folder):
    rng = random.Random(1)
    words = [f"{a}{b}" for a in ("lo", "mi", "ka", "tre", "vu") for b in ("na", "rol", "sti", "pe", "x", "ng")]
    (folder / "sub").mkdir(parents=True)
    for i in range(40):
        text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(80))
        suffix = (".txt", ".md", ".py")[i % 3]
        (folder / ("sub" if i % 2 else ".") / f"{i}{suffix}").write_text(text)
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=300)), "id": i}) for i in range(50)]
    (folder / "more.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "latin1.txt").write_bytes("Größe".encode("latin-1"))


def text_dataset(root):
    return prepare.Dataset("text", str(root), max_seq_len=128, vocab_size=320, eval_tokens=10**6, time_budget=60)


def test_own_text(tmp_path, capsys):
    write_text(tmp_path / "notes")
    dataset = text_dataset(tmp_path / "cache")
    prepare.prepare(dataset, text_paths=[str(tmp_path / "notes")])
    assert "Skipped 1 file(s) that are not UTF-8, or not to be read" in capsys.readouterr().out
    facts = files.read_json(dataset.file)
    sizes = {s["shard"]: s["tokens"] for s in facts["shards"]}
    share = sizes[prepare.VAL_FILENAME] / sum(sizes.values())
    assert 0.03 < share < 0.25
    assert facts["eval_tokens"] % 128 == 0 and 0 < facts["eval_tokens"] <= sizes[prepare.VAL_FILENAME], (
        "a small text is evaluated whole, once"
    )
    texts = [
        set(pq.read_table(os.path.join(dataset.data_dir, n)).column("text").to_pylist())
        for n in ("shard_00000.parquet", prepare.VAL_FILENAME)
    ]
    assert not texts[0] & texts[1] and max(map(len, texts[0])) <= 3 * 128
    again = text_dataset(tmp_path / "cache2")
    prepare.prepare(again, text_paths=[str(tmp_path / "notes")])
    assert files.read_json(again.file) == facts, "deterministic"


def test_every_held_out_document_is_evaluated(tmp_path, monkeypatch):
    """A text with fewer documents than the packing buffer: none is evaluated over and over while others never are."""
    write_text(tmp_path / "notes")
    dataset = text_dataset(tmp_path / "cache")
    prepare.prepare(dataset, text_paths=[str(tmp_path / "notes")])
    facts = files.read_json(dataset.file)
    dataset = replace(dataset, eval_tokens=facts["eval_tokens"])
    monkeypatch.setattr(chosen, "DATASET", dataset)
    tokenizer = prepare.Tokenizer.from_directory()
    shard = token_files.open_shard(dataset, prepare.VAL_FILENAME)
    assert len(shard.lengths) < loaders.BUFFER_DOCUMENTS
    loader, rows = prepare.make_dataloader(tokenizer, 1, 128, "val"), []
    for _ in range(facts["eval_tokens"] // 128):
        x, y, epoch = next(loader)
        rows.append(x.flatten().tolist())
    placed = [tuple(d) for row in rows for d in split_at(row, tokenizer.get_bos_token_id())]
    heads = [tuple(shard.tokens[s + 1 : s + 9].tolist()) for s in shard.starts]
    counts = [sum(p[:8] == head for p in placed) for head in heads]
    assert max(counts) <= 3 and sum(c > 0 for c in counts) / len(counts) > 0.8, counts


def split_at(row, bos):
    documents = []
    for token in row:
        if token == bos:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


def test_failed_text_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(chosen, "CACHE_DIR", str(tmp_path))
    write_text(tmp_path / "notes")
    monkeypatch.setattr(chosen, "text_dataset", lambda: text_dataset(tmp_path / "text"))
    prepare.prepare_text([str(tmp_path / "notes")])
    before = files.read_json(chosen.text_dataset().file)
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("short")
    with pytest.raises(prepare.DataError):
        prepare.prepare_text([str(tmp_path / "few")])
    assert files.read_json(chosen.text_dataset().file) == before
    assert prepare.check_dataset(replace(chosen.text_dataset(), eval_tokens=before["eval_tokens"])) == before


def test_only_datasets_are_replaced(tmp_path, monkeypatch):
    """A folder of the user's own that lies where the text dataset would, and .tmp files beside, are never touched."""
    monkeypatch.setattr(chosen, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(chosen, "text_dataset", lambda: text_dataset(tmp_path / "text"))
    write_text(tmp_path / "text")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "chapter.tmp").write_text("mine")
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(prepare.DataError, match="something else than a dataset"):
        prepare.prepare_text([str(tmp_path / "text")])
    assert sorted(p for p in tmp_path.rglob("*")) == before
    (tmp_path / "text").rename(tmp_path / "notes")
    for _ in range(2):
        prepare.prepare_text([str(tmp_path / "notes")])
        assert sorted(os.listdir(tmp_path / "text")) == ["data", "prepare.lock", "tokenizer", "tokens"]
    assert (tmp_path / "work" / "chapter.tmp").read_text() == "mine"


def test_odd_things_among_the_text(tmp_path):
    write_text(tmp_path / "notes")
    os.symlink("nowhere", tmp_path / "notes" / ".#0.txt")
    os.symlink("loop.txt", tmp_path / "notes" / "loop.txt")
    os.symlink("..", tmp_path / "notes" / "sub" / "up")
    os.mkfifo(tmp_path / "notes" / "pipe.txt")
    (tmp_path / "notes" / "folder.txt").mkdir()
    (tmp_path / "notes" / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "with a byte order mark"}\n')
    sources = list(prepare.read_sources(prepare.text_files([str(tmp_path / "notes")])))
    assert "with a byte order mark" in sources and len(sources) == 40 + 50 + 1


def test_damage_is_found_and_mended(demo, tmp_path, monkeypatch):
    """Whatever is damaged in a prepared dataset is said by --check and mended by the next preparation."""
    root = tmp_path / "demo"
    subprocess.run(["cp", "-r", demo.root, str(root)], check=True)
    copy = replace(demo, root=str(root))
    facts = prepare.check_dataset(copy)

    def cut_short(path):
        path.write_bytes(path.read_bytes()[:-200])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[1000] ^= 0xFF
        path.write_bytes(content)

    damages = [
        (root / "tokens" / "shard_06542.index.npz", cut_short), (root / "tokens" / "shard_06542.tokens", flip),
        (root / "tokens" / "shard_06542.tokens", lambda p: p.write_bytes(p.read_bytes() + b"x")),
        (root / "tokens" / "shard_06542.json", lambda p: p.write_text("[1]")),
        (root / "tokens" / "shard_00000.json", lambda p: p.write_text("{}")),
        (root / "data" / "dataset.json", lambda p: p.write_text("{}")),
        (root / "tokenizer" / "tokenizer.json", lambda p: p.write_text('{"pattern": null}')),
    ]  # fmt: skip
    for path, damage in damages:
        damage(path)
        with pytest.raises(prepare.DataError):
            prepare.check_dataset(copy)
        prepare.prepare(copy)
        assert prepare.check_dataset(copy) == facts, path
    cut_short(root / "data" / "shard_00000.parquet")
    prepare.prepare(copy)
    (root / "data" / prepare.VAL_FILENAME).unlink()
    prepare.prepare(copy)
    assert prepare.check_dataset(copy) == facts


def test_damaged_middle_of_a_shard_is_named(tmp_path):
    dataset = text_dataset(tmp_path / "cache")
    os.makedirs(dataset.data_dir)
    for name in ("shard_00000.parquet", prepare.VAL_FILENAME):
        pq.write_table(pa.table({"text": [f"some text {i} " * 50 for i in range(500)]}), os.path.join(dataset.data_dir, name))
    path = os.path.join(dataset.data_dir, "shard_00000.parquet")
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 3)
        f.write(b"\0" * 200)
    with pytest.raises(prepare.DataError, match=r"shard_00000\.parquet is damaged .* remove it and run prepare\.py again"):
        prepare.prepare(dataset)


def test_missing_texts_are_empty_documents(tmp_path):
    path = tmp_path / "shard.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path)
    assert shards.read_texts(path, 0) == ["a", "", "b"]


def test_leftovers_of_killed_calls_are_removed(demo):
    leftover = os.path.join(demo.tokens_dir, "shard_00000.tokens.999.tmp")
    with open(leftover, "w"):
        pass
    prepare.prepare(demo)
    assert not os.path.exists(leftover)


def test_no_home_folder(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "AUTORESEARCH_CACHE")} | {"HOME": "~"}
    done = subprocess.run([sys.executable, "-c", "import prepare"], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "AUTORESEARCH_CACHE=/some/folder" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_shard_that_comes_during_a_run_does_not_end_it(demo, tmp_path, monkeypatch):
    root = tmp_path / "demo"
    subprocess.run(["cp", "-r", demo.root, str(root)], check=True)
    monkeypatch.setattr(chosen, "DATASET", replace(demo, root=str(root)))
    tokenizer = prepare.Tokenizer.from_directory()
    next(prepare.make_dataloader(tokenizer, 2, 64, "train"))
    (root / "data" / "shard_00007.parquet").write_bytes((root / "data" / "shard_00000.parquet").read_bytes())
    next(prepare.make_dataloader(tokenizer, 2, 64, "val"))
    (x, *_), (reference, *_) = (next(prepare.make_dataloader(tokenizer, 2, 64, "val")) for _ in range(2))
    for name in os.listdir(root / "tokens"):
        os.remove(root / "tokens" / name)
    again, *_ = next(prepare.make_dataloader(tokenizer, 2, 64, "val"))
    assert torch.equal(x, again) and torch.equal(x, reference), "what the run has opened it reads to the end"


def test_a_file_is_in_training_or_in_validation(tmp_path):
    write_text(tmp_path / "notes")
    dataset = text_dataset(tmp_path / "cache")
    prepare.write_shards(dataset, prepare.read_sources(prepare.text_files([str(tmp_path / "notes")])))
    val = set(pq.read_table(os.path.join(dataset.data_dir, prepare.VAL_FILENAME)).column("text").to_pylist())
    train = set(pq.read_table(os.path.join(dataset.data_dir, "shard_00000.parquet")).column("text").to_pylist())
    for path in (tmp_path / "notes").rglob("*.[tm]*"):
        if path.name != "latin1.txt" and path.suffix != ".jsonl":
            pieces = set(texts.cut(path.read_text(), 3 * 128))
            assert pieces <= val or pieces <= train, path


@given(st.text(max_size=400), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_cut_loses_nothing(text, longest):
    pieces = list(texts.cut(text, longest))
    assert "".join(pieces) == text and all(len(p) <= longest for p in pieces)


@pytest.mark.parametrize(("content", "message"), [
    ({"a.txt": "short"}, "give more text"), ({"a.txt": "one", "b.txt": "two"}, "too small"), ({}, "give more text"),
    ({"a.jsonl": '{"text": "fine"}\n{"txt": "typo"}\n'}, "a.jsonl, line 2"), ({"a.jsonl": "not json\n"}, "a.jsonl, line 1"),
    ({"a.jsonl": '{"text": 3}\n'}, "a.jsonl, line 1"),
])  # fmt: skip
def test_text_that_will_not_do(tmp_path, content, message):
    (tmp_path / "in").mkdir()
    for name, text in content.items():
        (tmp_path / "in" / name).write_text(text)
    with pytest.raises(prepare.DataError, match=message):
        prepare.prepare(text_dataset(tmp_path / "cache"), text_paths=[str(tmp_path / "in")])


def test_text_on_the_command_line(tmp_path):
    """Made by prepare.py --text, checked, and read by a fresh process under AUTORESEARCH_DATASET=text."""
    environment = os.environ | NO_GPU | {"AUTORESEARCH_HARDWARE": "none", "AUTORESEARCH_CACHE": str(tmp_path), "AUTORESEARCH_DATASET": ""}
    command = [sys.executable, "prepare.py"]
    missing = subprocess.run([*command, "--text", "/no/such/folder"], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert missing.returncode == 3 and "/no/such/folder: no such file or folder" in missing.stderr and len(missing.stderr.splitlines()) == 1
    library = os.path.dirname(os.path.dirname(json.__file__))
    packages = [os.path.join(library, name) for name in ("asyncio", "email", "http", "json", "argparse.py")]
    made = subprocess.run([*command, "--text", *packages], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0 and "AUTORESEARCH_DATASET=text" in made.stdout, made.stderr
    environment["AUTORESEARCH_DATASET"] = "text"
    assert subprocess.run([*command, "--check"], cwd=PROJECT, env=environment).returncode == 0


# --- hardware, on simulated device files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "found"), [
    ({}, None),
    ({"sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 32\ngfx_target_version 0\n"}, None),
    ({"sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n",
      "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 80\ngfx_target_version 110501\n"}, "AMD gfx1151"),
    ({"sys/class/kfd/kfd/topology/nodes/1/properties": "gfx_target_version 90010\n"}, "AMD gfx90a"),
    ({"sys/class/kfd/kfd/topology/nodes/1/properties": "gfx_target_version 90402\n"}, "AMD gfx942"),
    ({"sys/class/kfd/kfd/topology/nodes/1/properties": "garbage\n\ngfx_target_version soon\n"}, None),
    ({"dev/nvidia0": ""}, "NVIDIA"), ({"dev/nvidiactl": ""}, None), ({"proc/driver/nvidia/gpus/0000:01:00.0/information": ""}, "NVIDIA"),
])  # fmt: skip
def test_gpu_hardware(tmp_path, files, found):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert hardware_found.gpu_hardware(str(tmp_path)) == found


@pytest.mark.parametrize(("cuda", "hardware", "variable", "name"), [
    (True, "NVIDIA", "", "climbmix"), (False, None, "", "demo"), (False, "AMD gfx1151", "", "climbmix"), (True, "NVIDIA", "demo", "demo"),
    (False, None, "climbmix", "climbmix"),
])  # fmt: skip
def test_choice_of_the_dataset(monkeypatch, cuda, hardware, variable, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(hardware_found, "gpu_hardware", lambda: hardware)
    monkeypatch.setenv("AUTORESEARCH_DATASET", variable)
    dataset = chosen.choose_dataset()
    assert dataset.name == name
    sizes = (dataset.max_seq_len, dataset.vocab_size, dataset.eval_tokens, dataset.time_budget)
    assert sizes == ((2048, 8192, 20_971_520, 600) if name == "climbmix" else (256, 2048, 2**16, 60))
    assert dataset.root == (chosen.CACHE_DIR if name == "climbmix" else os.path.join(chosen.CACHE_DIR, "demo"))

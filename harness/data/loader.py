"""Batches: rows packed from documents."""

from bisect import bisect_right

import torch

from harness.data import dataset as chosen
from harness.data import ready, tokens
from harness.data.dataset import VAL_FILENAME, DataError

BUFFER_DOCUMENTS = 1000  # that a row's next document is chosen from, at least


def shards_of(dataset, split):
    """dataset.json's records of the shards for "train", or of the one for "val"."""
    return [s for s in ready.checked_dataset(dataset)["shards"] if (s["shard"] == VAL_FILENAME) == (split == "val")]


def document_batches(dataset, split):
    """Forever (shard, first document, one past the last, epoch): encoding batches in file order, none across a row group."""
    shards = shards_of(dataset, split)
    for record in shards:
        tokens.opened_shard(dataset, record)  # all of them now: see `tokens.opened`
    epoch = 0
    while True:
        epoch += 1
        for record in shards:
            shard = tokens.opened_shard(dataset, record)
            end = 0
            for count in shard.row_groups.tolist():
                start, end = end, end + count
                for first in range(start, end, tokens.ENCODING_BATCH):
                    yield shard, first, min(first + tokens.ENCODING_BATCH, end), epoch


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
    dataset = chosen.DATASET
    if tokenizer.digest() != ready.checked_dataset(dataset)["tokenizer"]:
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

"""How fast are batches made on one core? The loader beside a straightforward reading of the packing rule, on the same text.

    python benchmarks/loader.py [--seconds 3] [--rounds 5] [--out DIR]

The straightforward reading tokenizes documents when it needs them and looks through the buffer's 1,000 documents for each placement, as
upstream does. Both run on one core, in turns; the figures are medians over the rounds, in millions of tokens a second. It uses the prepared
dataset (AUTORESEARCH_DATASET), prints a table and writes loader.csv and loader.png (--out).
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prepare
from harness.data import dataset as chosen
from harness.data import loader as loaders
from harness.data import tokens as token_files

HERE = Path(__file__).resolve().parent
B = 16


def straightforward(tokenizer, T):
    """The rule read literally: (inputs, targets, epoch) forever."""
    names = [s["shard"] for s in prepare.check_dataset()["shards"] if s["shard"] != prepare.VAL_FILENAME]

    def document_batches():
        epoch = 0
        while True:
            epoch += 1
            for name in names:
                file = pq.ParquetFile(os.path.join(chosen.DATASET.data_dir, name))
                for group in range(file.num_row_groups):
                    texts = file.read_row_group(group, columns=["text"]).column("text").to_pylist()
                    for i in range(0, len(texts), token_files.ENCODING_BATCH):
                        yield texts[i : i + token_files.ENCODING_BATCH], epoch

    batches, buffer = document_batches(), []
    while True:
        rows = torch.empty((B, T + 1), dtype=torch.int64)
        for row in rows:
            filled = 0
            while filled <= T:
                while len(buffer) < loaders.BUFFER_DOCUMENTS:
                    texts, epoch = next(batches)
                    buffer += tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id(), num_threads=1)
                room = T + 1 - filled
                best, best_length = -1, 0
                for i, document in enumerate(buffer):
                    if best_length < len(document) <= room:
                        best, best_length = i, len(document)
                if best < 0:
                    best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
                document = buffer.pop(best)[:room]
                row[filled : filled + len(document)] = torch.tensor(document)
                filled += len(document)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), epoch


def rate(loader, T, seconds):
    """Tokens a second of processor time."""
    start, tokens = time.process_time(), 0
    while time.process_time() - start < seconds:
        next(loader)
        tokens += B * T
    return tokens / (time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="of processor time for each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for loader.csv and loader.png (default: beside this file)")
    args = parser.parse_args()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    torch.set_num_threads(1)
    tokenizer = prepare.Tokenizer.from_directory()
    processor = platform.processor() or platform.machine()
    print(f"{processor}, one core, Python {platform.python_version()}, dataset {chosen.DATASET.name}, B = {B}")
    results = []
    for T in (256, 2048):
        pairs = zip(islice(prepare.make_dataloader(tokenizer, B, T, "train"), 20), straightforward(tokenizer, T), strict=False)
        for ours, literal in pairs:
            assert torch.equal(ours[0].cpu(), literal[0]) and torch.equal(ours[1].cpu(), literal[1]), "the two make different batches"
        loaders = {"this loader": prepare.make_dataloader(tokenizer, B, T, "train"), "straightforward": straightforward(tokenizer, T)}
        rates = {name: [] for name in loaders}
        for loader in loaders.values():
            next(loader)
        for _ in range(args.rounds):
            for name, loader in loaders.items():
                rates[name].append(rate(loader, T, args.seconds) / 1e6)
        medians = {name: statistics.median(r) for name, r in rates.items()}
        for name, r in rates.items():
            ratio = medians["this loader"] / medians["straightforward"] if name == "this loader" else 1.0
            results.append((T, name, round(ratio, 1), round(medians[name], 3), round(min(r), 3), round(max(r), 3)))
    header = ("T", "loader", "ratio", "median M tokens/s", "min", "max")
    print(("{:>5} {:<16} {:>7} {:>18} {:>9} {:>9}").format(*header))
    for row in results:
        print("{:>5} {:<16} {:>6}x {:>18} {:>9} {:>9}".format(*row))
    with open(args.out / "loader.csv", "w", newline="") as f:
        csv.writer(f).writerows([header, *results])
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
    labels = [f"{name}, T = {T}" for T, name, *_ in results]
    axes.barh(labels[::-1], [row[3] for row in results][::-1], color=["#b0b0b0", "#0072b2"] * 2)
    axes.set(xscale="log", xlabel="million tokens/s on one core (log scale)")
    figure.savefig(args.out / "loader.png", dpi=150)


if __name__ == "__main__":
    main()

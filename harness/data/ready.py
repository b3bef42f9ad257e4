"""Whether everything that training and evaluation read is there and belongs together, and the fingerprint of it."""

import json
import os
from functools import lru_cache

from harness.common.files import read_json, sha256
from harness.data import dataset as chosen
from harness.data import tokens
from harness.data.dataset import TIME_BUDGET, VAL_FILENAME, DataError
from harness.data.shards import list_shards
from harness.data.tokenizer import Tokenizer
from harness.data.tokens import shard_digest, tokenized


def check_dataset(dataset=None):
    """dataset.json if everything that training and evaluation read is there and belongs together; DataError otherwise."""
    dataset = dataset or chosen.DATASET
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
    examined = bool(os.environ.get("AUTORESEARCH_EXAMINER"))  # then another process holds the validation text, and this one can't read it
    for shard in facts["shards"]:
        if examined and shard["shard"] == VAL_FILENAME:
            continue
        record = tokenized(dataset, shard["shard"], facts["tokenizer"])
        if record is None or record["sha256"] != shard["sha256"]:
            raise DataError(f"the tokens of {shard['shard']} in {dataset.tokens_dir} are missing or of another shard: run {mend}")
    new = sorted(set(list_shards(dataset.data_dir)) - set(names))
    if new:
        raise DataError(f"{len(new)} shard(s) in {dataset.data_dir} were added after preparation ({new[0]} …): run {mend}")
    if not examined:
        check_validation(dataset, facts)
    return facts


def check_validation(dataset, facts):
    """DataError unless the validation tokens, on which every number is measured, are those of dataset.json, to the bit."""
    mend = "python prepare.py --text PATH..." if dataset.name == "text" else "python prepare.py"
    validation = next(s for s in facts["shards"] if s["shard"] == VAL_FILENAME)
    if shard_digest(tokens.opened_shard(dataset, validation)) != validation["sha256"]:
        tokens.opened.pop(validation["sha256"])
        raise DataError(f"the validation tokens in {dataset.tokens_dir} are not those that were prepared: run {mend}")


# Once a process for what reads the data: what is added to the folder during a run must not end the run before its evaluation.
checked_dataset = lru_cache(check_dataset)


def fingerprint(dataset=None, budget=None):
    """12 hex digits that are equal for two runs if their numbers compare: sizes, tokenizer, every token, and the time budget."""
    facts = checked_dataset(dataset or chosen.DATASET)
    keys = ("max_seq_len", "vocab_size", "eval_tokens", "tokenizer")
    what = [facts[k] for k in keys] + [s["sha256"] for s in facts["shards"]] + [float(TIME_BUDGET if budget is None else budget)]
    return sha256(json.dumps(what).encode())[:12]

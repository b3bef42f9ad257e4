"""The metric: bits per byte, and the checks without which a number is none."""

import contextlib
import math
import os
import random

import torch
import torch.nn.functional as F

from harness.data import dataset as chosen
from harness.data import ready
from harness.data.dataset import NoResult
from harness.data.loader import make_dataloader
from harness.data.tokenizer import token_byte_counts


@contextlib.contextmanager
def uncompiled():
    """Within, models run as they are written. On AMD their attention then goes by products: of torch's own choices there it is reported
    that one which follows another fails, and all after it (see candidates.py), so a run's process meets none that was not proven."""
    attention = F.scaled_dot_product_attention
    with torch.compiler.set_stance("force_eager"):
        if torch.version.hip:
            from kernels import sdpa_ref  # where there is a GPU there is Triton

            F.scaled_dot_product_attention = sdpa_ref
        try:
            yield
        finally:
            F.scaled_dot_product_attention = attention


class Sum:
    """Nats and bytes of the validation text so far. A target that stands for no byte counts nothing."""

    def __init__(self, tokenizer):
        self.tokenizer, self.nats = tokenizer, None

    def add(self, losses, y, rows):
        """losses: of each of the targets y (B, T), in nats. rows: how many of the rows count."""
        if self.nats is None:
            device = y.device
            self.token_bytes = token_byte_counts(self.tokenizer).to(device)
            self.nats, self.bytes = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.int64, device=device)
            self.impossible = torch.zeros((), dtype=torch.bool, device=device)
        counts = self.token_bytes[y[:rows]]
        losses = torch.where(counts > 0, losses[:rows].double(), 0.0)
        self.nats += losses.clamp_min(0.0).sum()  # NaN stays NaN
        self.impossible |= (losses < -1e-3).any()  # rounding may take a sure token a little below 0
        self.bytes += counts.sum()

    def bpb(self):
        """Bits per byte; NoResult for what no model of text has. Says how many tokens were evaluated and what came of it."""
        bpb = self.nats.item() / (math.log(2) * self.bytes.item())
        if self.impossible.item():
            raise NoResult("some tokens' losses are negative, which no probability gives: this is no result")
        if not 0 < bpb < 16:  # NaN fails too; 16 is worse than no model at all
            raise NoResult(f"val_bpb is {bpb}: no model's losses add up to that, so this is no result")
        print(f"Evaluated {chosen.DATASET.eval_tokens:,} tokens: val_bpb {bpb:.6f}", flush=True)
        return bpb


# What differs of the same computation: rounding, and which kernel has computed it. Any use of a later token changes logits by far more.
BFLOAT16_TOLERANCE, TOLERANCE = 0.02, 1e-3


def _tolerance(device):
    return BFLOAT16_TOLERANCE if device.type == "cuda" else TOLERANCE


def check_causal(before, after, places):
    """NoResult unless no logit of `after`, of rows with other tokens behind `places` (B,), differs up to there. Both (B, T, vocabulary)."""
    seen = torch.arange(before.size(1), device=before.device) <= places.to(before.device)[:, None]
    difference = ((after - before).abs().amax(-1) * seen).amax(-1)
    row = difference.nan_to_num(math.inf).argmax().item()
    if not difference[row] <= _tolerance(before.device):
        raise NoResult(
            f"invalid: the logits up to token {places[row].item()} of a row change by {difference[row].item():.4f} when later tokens"
            " change: the model sees what it must predict, so this is no result"
        )


def check_stateless(before, after):
    """NoResult unless the same tokens have the same logits again."""
    difference = (after - before).abs().max().item()
    if not difference <= _tolerance(before.device):
        raise NoResult(
            f"invalid: the same tokens have other logits after other batches (by {difference:.4f}): the model keeps something of what it"
            " was asked before, so this is no result"
        )


def check_model(model, x, y, losses, rows=4, rounds=2):
    """NoResult unless `losses`, the model's for (x, y), are those of its logits, and no logit depends on a later token.

    Looks at rows and places that are drawn so that nobody can know them, with the model uncompiled. The tolerances are far above what
    rounding does (bfloat16 under autocast, float32 without) and far below what any use of the next token, or a loss that is not the cross
    entropy, would change.
    """
    bfloat16, draw = torch.is_autocast_enabled(x.device.type), random.SystemRandom()
    drawn = draw.sample(range(x.size(0)), min(rows, x.size(0)))
    x, y, losses = x[drawn], y[drawn], losses.reshape(y.shape)[drawn]
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with uncompiled():
        logits = model(x)
        if logits.ndim != 3 or logits.shape[:2] != x.shape:
            raise NoResult(
                f"invalid: model(x) returned {tuple(logits.shape)}, not the logits (rows, tokens, vocabulary) of {tuple(x.shape)}"
            )
        entropy = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none").view(y.shape)
        for which, got in (("losses", losses), ("uncompiled losses", model(x, y, reduction="none").reshape(y.shape))):
            difference = (got - entropy).double()
            mean, rms = difference.mean(-1).abs().max().item(), difference.square().mean(-1).sqrt().max().item()  # of the worst row
            if not (mean <= (0.02 if bfloat16 else 1e-3) and rms <= (0.1 if bfloat16 else 5e-3)):  # NaN too
                raise NoResult(
                    f"invalid: the model's {which} are not the cross entropy of its logits (off by {mean:.4f} in the mean, {rms:.4f} rms): "
                    "this is no result"
                )
        for _ in range(rounds):
            places = torch.tensor([draw.randrange(x.size(1) - 1) for _ in drawn], device=x.device)
            others = torch.randint(logits.size(-1), x.shape, generator=torch.Generator().manual_seed(draw.getrandbits(62))).to(x.device)
            changed = torch.where(torch.arange(x.size(1), device=x.device) > places[:, None], others, x)
            check_causal(logits, model(changed), places)


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of the validation text, lower is better; does not depend on the vocabulary or on `batch_size`.

    `model(x, y, reduction="none")` returns the loss of each token in nats, `model(x)` the logits (rows, tokens, vocabulary). The losses are
    summed over the first EVAL_TOKENS tokens where the target stands for at least one byte, and divided by ln 2 times those bytes. Says how
    many tokens it evaluates and what came of it, which experiment.py compares with the summary.

    In a run that ./run.sh has started another process does that (harness/examiner.py), and the model is asked for logits alone.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: use 1 or more")
    if os.environ.get("AUTORESEARCH_EXAMINER"):
        from harness import examiner

        return examiner.answer(model, batch_size)
    print(f"Evaluating {chosen.DATASET.eval_tokens:,} tokens", flush=True)
    facts = ready.checked_dataset(chosen.DATASET)
    T, rows_left = chosen.DATASET.max_seq_len, chosen.DATASET.eval_tokens // chosen.DATASET.max_seq_len
    batches, draw = -(-rows_left // batch_size), random.SystemRandom()
    looked_at = {0, draw.randrange(batches), batches - 1}
    loader, total = make_dataloader(tokenizer, batch_size, T, "val"), Sum(tokenizer)
    for batch in range(batches):
        x, y, _ = next(loader)
        losses = model(x, y, reduction="none")
        if losses.numel() != y.numel():
            raise NoResult(
                f"model(x, y, reduction='none') returned {tuple(losses.shape)}, not one loss for each of the targets {tuple(y.shape)}"
            )
        losses = losses.reshape(y.shape)
        total.add(losses, y, min(rows_left, batch_size))  # a smaller last batch would recompile: it is full, what is too much left out
        rows_left -= batch_size
        if batch in looked_at:
            check_model(model, x, y, losses.clone())
    ready.check_validation(chosen.DATASET, facts)
    return total.bpb()

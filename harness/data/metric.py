"""The metric: bits per byte, and the checks without which a number is none."""

import contextlib
import math

import torch
import torch.nn.functional as F

from harness.data import dataset as chosen
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


def check_model(model, x, y, losses):
    """NoResult unless `losses`, the model's for (x, y), are those of its logits, and no logit depends on a later token.

    Looks at the first row, with the model uncompiled. The tolerances are far above what rounding does (bfloat16 under autocast, float32
    without) and far below what any use of the next token, or a loss that is not the cross entropy, would change.
    """
    bfloat16 = torch.is_autocast_enabled(x.device.type)
    x, y, losses = x[:1], y[:1], losses.reshape(y.shape)[0]
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with uncompiled():
        logits = model(x)
        if logits.ndim != 3 or logits.shape[:2] != x.shape:
            raise NoResult(
                f"invalid: model(x) returned {tuple(logits.shape)}, not the logits (rows, tokens, vocabulary) of {tuple(x.shape)}"
            )
        entropy = F.cross_entropy(logits[0].float(), y[0], reduction="none")
        for which, got in (("losses", losses), ("uncompiled losses", model(x, y, reduction="none").reshape(-1))):
            difference = (got - entropy).double()
            mean, rms = abs(difference.mean().item()), difference.square().mean().sqrt().item()
            if not (mean <= (0.02 if bfloat16 else 1e-3) and rms <= (0.1 if bfloat16 else 5e-3)):  # NaN too
                raise NoResult(
                    f"invalid: the model's {which} are not the cross entropy of its logits (off by {mean:.4f} in the mean, {rms:.4f} rms): "
                    "this is no result"
                )
        for last in (x.size(1) // 3, x.size(1) // 3 + 1):  # an even and an odd place
            changed = x.clone()
            changed[:, last + 1 :] = (x[:, last + 1 :] + logits.size(-1) // 2) % logits.size(-1)
            difference = (model(changed)[0, : last + 1] - logits[0, : last + 1]).abs().max().item()
            if not difference <= (0.02 if bfloat16 else 1e-3):
                raise NoResult(
                    f"invalid: the logits up to token {last} change by {difference:.4f} when later tokens change: the model sees what "
                    "it must predict, so this is no result"
                )


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of the validation text, lower is better; does not depend on the vocabulary or on `batch_size`.

    `model(x, y, reduction="none")` returns the loss of each token in nats, `model(x)` the logits (rows, tokens, vocabulary). The losses are
    summed over the first EVAL_TOKENS tokens where the target stands for at least one byte, and divided by ln 2 times those bytes. Says how
    many tokens it evaluates and what came of it, which experiment.py compares with the summary.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: use 1 or more")
    print(f"Evaluating {chosen.DATASET.eval_tokens:,} tokens", flush=True)
    T, rows_left = chosen.DATASET.max_seq_len, chosen.DATASET.eval_tokens // chosen.DATASET.max_seq_len
    loader = make_dataloader(tokenizer, batch_size, T, "val")
    nats = bytes_ = impossible = None
    while rows_left > 0:
        x, y, _ = next(loader)
        losses = model(x, y, reduction="none")
        if losses.numel() != y.numel():
            raise NoResult(
                f"model(x, y, reduction='none') returned {tuple(losses.shape)}, not one loss for each of the targets {tuple(y.shape)}"
            )
        if nats is None:
            token_bytes = token_byte_counts(tokenizer).to(y.device)
            nats, bytes_ = torch.zeros((), dtype=torch.float64, device=y.device), torch.zeros((), dtype=torch.int64, device=y.device)
            impossible = torch.zeros((), dtype=torch.bool, device=y.device)
            check_model(model, x, y, losses)
        rows = min(rows_left, batch_size)  # a smaller last batch would recompile: it is full, and what is too much is left out
        counts = token_bytes[y[:rows]]
        counted = counts > 0
        losses = torch.where(counted, losses.reshape(y.shape)[:rows].double(), 0.0)
        nats += losses.clamp_min(0.0).sum()  # NaN stays NaN
        impossible |= (losses < -1e-3).any()  # rounding may take a sure token a little below 0
        bytes_ += counts.sum()
        rows_left -= rows
    bpb = nats.item() / (math.log(2) * bytes_.item())
    if impossible.item():
        raise NoResult("some tokens' losses are negative, which no probability gives: this is no result")
    if not 0 < bpb < 16:  # NaN fails too; 16 is worse than no model at all
        raise NoResult(f"val_bpb is {bpb}: no model's losses add up to that, so this is no result")
    print(f"Evaluated {chosen.DATASET.eval_tokens:,} tokens: val_bpb {bpb:.6f}")
    return bpb

"""The protocol against golden values computed with upstream: what makes val_bpb comparable."""

import hashlib
import json
import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
import train
from harness import candidates
from harness.data import dataset as chosen

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = json.loads((GOLDEN / "golden.json").read_text())
MODEL = json.loads((GOLDEN / "golden_model.json").read_text())
MUON = json.loads((GOLDEN / "golden_muon.json").read_text())


@pytest.fixture
def tokenizer(golden, monkeypatch):
    monkeypatch.setattr(chosen, "DATASET", golden)
    return prepare.Tokenizer.from_directory()


# --- tokenizer, batches, metric -----------------------------------------------------------------------------------------


def test_tokenizer(tokenizer):
    ranks = sorted(tokenizer.enc._mergeable_ranks.items(), key=lambda item: item[1])
    digest = hashlib.sha256(b"".join(r.to_bytes(4, "little") + len(t).to_bytes(4, "little") + t for t, r in ranks))
    assert digest.hexdigest() == TEXT["ranks_sha256"]
    assert [t.hex() for t, _ in ranks[256 : 256 + len(TEXT["first_merges"])]] == TEXT["first_merges"]
    assert (tokenizer.get_vocab_size(), tokenizer.get_bos_token_id()) == (TEXT["vocab_size"], TEXT["bos_token_id"])
    for text, ids in TEXT["encode"].items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_token_bytes(tokenizer):
    counts = prepare.get_token_bytes()
    assert counts.dtype == torch.int32 and int(counts.sum()) == TEXT["token_bytes_sum"]
    assert hashlib.sha256(counts.numpy().astype("<i4").tobytes()).hexdigest() == TEXT["token_bytes_sha256"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_batches(tokenizer, split):
    golden, digests, epochs = TEXT[split], [], []
    for i, (x, y, epoch) in enumerate(islice(prepare.make_dataloader(tokenizer, 4, 256, split), 60)):
        x, y = x.cpu(), y.cpu()
        if i == 0:
            assert x[0, : len(golden["first_row_head"])].tolist() == golden["first_row_head"]
            assert y[0, -len(golden["first_row_target_tail"]) :].tolist() == golden["first_row_target_tail"]
        digests.append(hashlib.sha256(x.numpy().astype("<i4").tobytes() + y.numpy().astype("<i4").tobytes()).hexdigest()[:16])
        epochs.append(epoch)
    assert digests == golden["batch_sha256_16"] and epochs == golden["epochs"]


def fixed_model(x, y=None, reduction="none"):
    """Logit of token v after token u: 4 cos(0.37 u + 1.3 v) in float64."""
    assert reduction == "none"
    v = torch.arange(2048, dtype=torch.float64, device=x.device)
    logits = 4 * torch.cos(0.37 * x[..., None].double() + 1.3 * v)
    if y is None:
        return logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").float()


@pytest.mark.parametrize("batch_size", [2, 3, 4, 7, 64, 100])
def test_evaluate_bpb_whatever_the_batch_size(tokenizer, batch_size):
    """64 rows: sizes that don't divide them count the same tokens (upstream drops what is left over)."""
    seen = []

    class Model(torch.nn.Module):
        def forward(self, x, y=None, reduction="none"):
            return fixed_model(x, y, reduction)

    class Compiled:  # as torch.compile wraps it
        _orig_mod = Model()

        def __call__(self, x, y, reduction):
            seen.append(x.shape)
            return fixed_model(x, y, reduction)

    assert prepare.evaluate_bpb(Compiled(), tokenizer, batch_size) == pytest.approx(TEXT["evaluate_bpb"]["4"], abs=1e-6)
    assert set(seen) == {(batch_size, 256)}, "a smaller last batch would recompile"


def later(wrong):
    """A model whose losses are `wrong(losses)` from the second batch on."""
    calls = []

    def model(x, y=None, reduction="none"):
        if y is None or len(x) < 8:  # a check's rows
            return fixed_model(x, y, reduction)
        calls.append(1)
        losses = fixed_model(x, y, reduction)
        return wrong(losses) if len(calls) > 1 else losses

    return model


def test_evaluate_bpb_refuses_what_is_no_result(tokenizer):
    for wrong in (math.nan, math.inf, -1.0, 10.0):
        with pytest.raises(ValueError, match="this is no result"):
            prepare.evaluate_bpb(later(lambda losses, wrong=wrong: losses * wrong), tokenizer, 8)
    with pytest.raises(ValueError, match="losses are negative|are not the cross entropy"):  # plausible in sum, impossible in one place
        prepare.evaluate_bpb(later(lambda losses: losses.index_fill(0, torch.tensor([7], device=losses.device), -0.01)), tokenizer, 8)
    with pytest.raises(ValueError, match="batch_size 0"):
        prepare.evaluate_bpb(fixed_model, tokenizer, 0)
    with pytest.raises(ValueError, match="not one loss for each"):
        prepare.evaluate_bpb(lambda x, y, reduction: torch.zeros(()), tokenizer, 4)


def test_evaluate_bpb_refuses_losses_that_are_not_the_logits(tokenizer):
    for wrong in (math.nan, math.inf, 0.0, 0.99, -1.0):
        for which in (0, 1):  # those that are counted, and those of one row
            with pytest.raises(prepare.NoResult, match="^invalid: the model's .*losses are not the cross entropy of its logits"):
                prepare.evaluate_bpb(
                    lambda x, y=None, reduction="none", wrong=wrong, which=which: (
                        fixed_model(x, y, reduction) * (wrong if y is not None and (len(x) == 4) == which else 1)
                    ),
                    tokenizer,
                    8,
                )
    with pytest.raises(prepare.NoResult, match="^invalid: model"):
        prepare.evaluate_bpb(lambda x, y=None, reduction="none": fixed_model(x, x if y is None else y), tokenizer, 4)


def test_evaluate_bpb_refuses_a_model_that_sees_the_next_token(tokenizer):
    """In its input one place on, in pairs of either parity, in chunks, or in the mean of the row: all from honest logits and losses."""

    def with_leak(leak):
        def model(x, y=None, reduction="none"):
            logits = fixed_model(x) + leak(x.double())[..., None] * torch.linspace(-1e-2, 1e-2, 2048, dtype=torch.float64, device=x.device)
            return (
                logits if y is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction).float()
            )

        return model

    def pairs(x, first):
        return torch.cat([x[:, :first], x[:, first:].unfold(1, 2, 2).mean(-1).repeat_interleave(2, 1), x[:, x.size(1) - first :]], 1)

    leaks = {
        "next": lambda x: x.roll(-1, 1),
        "even pairs": lambda x: pairs(x, 0),
        "odd pairs": lambda x: pairs(x, 1)[:, : x.size(1)],
        "chunks": lambda x: x.unfold(1, 64, 64).mean(-1).repeat_interleave(64, 1),
        "mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    }
    for name, leak in leaks.items():
        with pytest.raises(prepare.NoResult, match="^invalid: the logits up to token "):
            prepare.evaluate_bpb(with_leak(leak), tokenizer, 4)
            raise AssertionError(name)
    assert 0 < prepare.evaluate_bpb(with_leak(lambda x: x.cumsum(1) / 2048), tokenizer, 4) < 16, "the past is no leak"


def test_rounding_is_not_refused():
    """The golden model's float32 losses beside its bfloat16 logits: more than any compiler rounds differently."""
    model = golden_model()
    x = torch.randint(97, (2, 64))
    y = torch.randint(97, (2, 64))
    losses = model(x, y, reduction="none").detach()
    prepare.check_model(model, x, y, losses)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(model(x, y, reduction="none"), losses)
        prepare.check_model(model, x, y, losses)


# --- model --------------------------------------------------------------------------------------------------------------


def golden_model(**changes):
    """The golden model, its parameters set by the formula in golden_model.json."""
    config = train.GPTConfig(**{**MODEL["config"], **changes})
    model = train.GPT(config)
    model.init_weights()
    with torch.no_grad():
        for k, name in enumerate(sorted(MODEL["parameters"])):
            parameter = model.get_parameter(name)
            i = torch.arange(parameter.numel(), dtype=torch.float64)
            base = 1.0 if name == "resid_lambdas" else 0.1 if name == "x0_lambdas" else 0.0
            scale = 0.05 if parameter.dim() == 1 else parameter.size(-1) ** -0.5
            parameter.copy_((base + scale * torch.sin(0.7 * i + 1.9 * k + 0.3)).view(parameter.shape))
    return model


def golden_batch():
    ids = torch.tensor([(31 * t * t + 7 * t + 3) % 97 for t in range(130)]).view(2, 65)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    y[0, :5] = -1
    return x, y


def test_model_shapes_and_counts():
    model = golden_model()
    assert {n: list(p.shape) for n, p in model.named_parameters()} == MODEL["parameters"]
    assert [list(w) for w in model.window_sizes] == MODEL["window_sizes"]
    assert model.estimate_flops() == MODEL["estimate_flops"]
    assert model.num_scaling_params() == MODEL["num_scaling_params"]


def test_model_losses_and_gradients():
    model, (x, y) = golden_model(), golden_batch()
    losses = model(x, y, reduction="none")
    assert losses[:10].tolist() == pytest.approx(MODEL["loss_none_row0_head"], abs=1e-5)
    assert losses[-6:].tolist() == pytest.approx(MODEL["loss_none_row1_tail"], abs=1e-5)
    assert model(x)[1, -1, :8].tolist() == pytest.approx(MODEL["logits_row1_last_head"], abs=1e-5)
    loss = model(x, y)
    assert loss.item() == pytest.approx(MODEL["loss_mean"], abs=1e-5)
    loss.backward()
    assert {n: p.grad.norm().item() for n, p in model.named_parameters()} == pytest.approx(MODEL["grad_norm"], rel=1e-4)


def test_a_model_answers_as_it_is():
    """As upstream's: built, initialised, called; shorter sequences and other batches too. Without init_weights by torch's own weights."""
    model, (x, y) = train.GPT(train.GPTConfig(**MODEL["config"])), golden_batch()
    assert model(x).isfinite().all()
    with pytest.raises(ValueError, match=r"^65 tokens in a row, and sequence_len is 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))
    model.init_weights()
    assert model(x).shape == (2, 64, 97) and model(x[:, :10], y[:, :10]).item() == pytest.approx(math.log(97), abs=0.05)
    model.load_state_dict(golden_model().state_dict())
    assert model(x, y).item() == pytest.approx(MODEL["loss_mean"], abs=1e-5)


def test_the_benchmarks_reference_is_upstream(monkeypatch):
    """What loss_curves.py and train_step.py compare with, which is evaluated as a run's model is."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import train_step

    model, (x, y) = golden_model(), golden_batch()
    reference = train_step.upstream(model, torch.float32)
    with torch.compiler.set_stance("force_eager"):
        loss = reference(x, y)
        assert loss.item() == pytest.approx(MODEL["loss_mean"], abs=1e-5)
        assert reference(x)[1, -1, :8].tolist() == pytest.approx(MODEL["logits_row1_last_head"], abs=1e-5)
        loss.backward()
        assert {n: p.grad.norm().item() for n, p in model.named_parameters()} == pytest.approx(MODEL["grad_norm"], rel=1e-4)
        with torch.no_grad():
            prepare.check_model(reference, x, y.clamp_min(0), reference(x, y.clamp_min(0), reduction="none"))


def test_windows_are_another_function_than_the_whole_context():
    x, y = golden_batch()
    windowed, whole = (golden_model(window_pattern=pattern)(x, y).item() for pattern in ("SL", "L"))
    assert abs(whole - windowed) > 1e-4


@pytest.mark.parametrize("window", [0, 3, 7, 8])
def test_attention_sees_the_keys_of_the_protocol(window):
    """Query i sees keys i - window … i: by values that say which key they are of."""
    q, k = torch.zeros(1, 8, 2, 8), torch.zeros(1, 8, 1, 8)
    v = torch.eye(8).view(1, 8, 1, 8)
    seen = train.attention(q, k, v, window)[0, :, 1] > 0
    assert [[j for j in range(8) if seen[i, j]] for i in range(8)] == [[j for j in range(8) if i - window <= j <= i] for i in range(8)]


def test_window_sees_the_keys_of_the_protocol():
    mask = candidates._dense_mask(3, 8, torch.device("cpu"))
    assert [[j for j in range(8) if mask[i, j]] for i in range(8)] == [[j for j in range(8) if i - 3 <= j <= i] for i in range(8)]


def test_initialization():
    torch.manual_seed(0)
    config = train.GPTConfig(sequence_len=64, vocab_size=512, n_layer=4, n_head=2, n_kv_head=2, n_embd=256)
    model = train.GPT(config)
    model.init_weights()
    s = (3 / 256) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight") or "ve_gate" in name:
            assert (parameter == 0).all(), name
        elif name == "transformer.wte.weight":
            assert parameter.std().item() == pytest.approx(1, rel=0.02)
        elif name == "lm_head.weight":
            assert parameter.std().item() == pytest.approx(0.001, rel=0.02)
        elif "lambdas" in name:
            assert (parameter == {"resid_lambdas": 1.0, "x0_lambdas": 0.1}[name]).all()
        else:  # uniform
            assert s * 0.99 < parameter.abs().max().item() <= s and parameter.std().item() == pytest.approx(256**-0.5, rel=0.03), name


# --- optimizer ----------------------------------------------------------------------------------------------------------


def draws(seed, count):
    values, s = [], seed
    for _ in range(count):
        total = 0.0
        for _ in range(4):
            s = (s * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (s >> 11) / 2**53
        values.append((total - 2) * 1.7320508)
    return torch.tensor(values, dtype=torch.float64).float()


def test_draws():
    assert draws(100, 4).tolist() == pytest.approx(MUON["first_draws_seed_100"], rel=1e-6)


def literal_muon(p, grads, rates, momenta, decays):
    """The steps of one matrix as the protocol has them, in float64: p and grads are numpy arrays."""
    rows, cols = p.shape
    axis = 1 if rows >= cols else 0
    buffer, second, beta2 = np.zeros_like(p), np.zeros_like(p.mean(axis, keepdims=True)), 0.95
    for grad, lr, momentum, decay in zip(grads, rates, momenta, decays, strict=True):
        lr = lr * math.sqrt(max(1, rows / cols))
        buffer = momentum * buffer + (1 - momentum) * grad
        x = (1 - momentum) * grad + momentum * buffer
        x = x / (np.sqrt((x * x).sum()) * 1.02 + 1e-6)
        for a, b, c in train.POLAR_EXPRESS:
            left = x @ x.T
            x = a * x + (b * left + c * left @ left) @ x
        mean = (x * x).mean(axis, keepdims=True)
        second = beta2 * second + (1 - beta2) * mean
        step = 1 / np.sqrt(np.maximum(second, 1e-10))
        before, after = (math.sqrt((mean * scale * x.shape[axis]).sum()) for scale in (1, step * step))
        x = x * step * before / max(after, 1e-10)
        p = p - lr * x - lr * decay * p * (x * p >= 0)
    return p


def muon_steps(i, dtype):
    """(before, gradients, after) of three steps of two matrices of the i-th golden shape; gradients (3, 2, rows, cols)."""
    shape = MUON["shapes"][i]
    size = shape[0] * shape[1]
    params = [torch.nn.Parameter(0.1 * draws(100 + 10 * i + j, size).view(shape)) for j in range(2)]
    before, every = torch.stack([p.detach().clone() for p in params]), []
    group = dict(kind="muon", params=params, lr=0.04, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=0.2)
    optimizer = train.MuonAdamW([group], dtype=dtype)
    for t in range(3):
        group = optimizer.param_groups[0]
        group.update(lr=0.04 * (1, 0.9, 0.5)[t], momentum=(0.85, 0.9, 0.95)[t], weight_decay=0.2 * (1 - t / 3))
        for j, p in enumerate(params):
            p.grad = 0.01 * draws(1000 + 100 * i + 10 * j + t, size).view(shape)
        every.append(torch.stack([p.grad.clone() for p in params]))
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, every[-1], strict=True)), "the step changed a gradient"
    return before, torch.stack(every), torch.stack([p.detach() for p in params])


@pytest.mark.parametrize("i", range(5))
def test_muon(i):
    """In bfloat16, as on a GPU, against upstream's own steps.

    The bound is what one rounding to bfloat16 (2⁻⁹) becomes in five iterations, whose factors at a singular value of 1 are about 2.
    """
    before, _, after = muon_steps(i, torch.bfloat16)
    golden = torch.tensor(MUON["update"][i]).view_as(after)
    assert ((after - before - golden).norm() / golden.norm()).item() < 5e-2


@pytest.mark.parametrize("i", range(5))
def test_muon_in_float32(i):
    """As on a CPU, against the protocol read literally, and near what bfloat16 makes of it."""
    before, gradients, after = muon_steps(i, torch.float32)
    rates, momenta, decays = (0.04, 0.036, 0.02), (0.85, 0.9, 0.95), [0.2 * (1 - t / 3) for t in range(3)]
    for j in range(2):
        exact = literal_muon(before[j].double().numpy(), gradients[:, j].double().numpy(), rates, momenta, decays)
        update, expected = after[j] - before[j], torch.from_numpy(exact) - before[j]
        assert ((update - expected).norm() / expected.norm()).item() < 1e-4
    golden = torch.tensor(MUON["update"][i]).view_as(after)
    assert ((after - before - golden).norm() / golden.norm()).item() < 5e-2


def test_the_products_are_float32_on_a_cpu():
    assert golden_model().setup_optimizer()._dtype == torch.float32


def test_parameter_groups():
    optimizer = golden_model().setup_optimizer(
        unembedding_lr=0.004, embedding_lr=0.6, matrix_lr=0.04, weight_decay=0.2, adam_betas=(0.8, 0.95), scalar_lr=0.5
    )
    for ours, golden in zip(optimizer.param_groups, MODEL["param_groups"], strict=True):
        assert [list(p.shape) for p in ours["params"]] == golden["shapes"]
        for key in set(golden) - {"shapes"}:
            assert (list(ours[key]) if key == "betas" else ours[key]) == pytest.approx(golden[key]), key


def test_two_steps_of_the_model():
    """Upstream's losses and norms, with products in bfloat16 as upstream's.

    Not the third step: AdamW's first steps are little more than the gradient's sign, and where that is nearly 0 processors part.
    """
    model, (x, y) = golden_model(), golden_batch()
    optimizer = model.setup_optimizer(embedding_lr=0.6, matrix_lr=0.04, weight_decay=0.2)
    optimizer._dtype = torch.bfloat16
    for step in range(2):
        loss = model(x, y)
        assert loss.item() == pytest.approx(MODEL["steps"][step]["loss_before"], abs=(1e-5, 1e-2)[step])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1.0, 0.9)[step]
            if group["kind"] == "muon":
                group.update(momentum=(0.85, 0.9)[step], weight_decay=0.2 * (1 - step / 3))
        optimizer.step()
        model.zero_grad()
        norms = {n: p.norm().item() for n, p in model.named_parameters()}
        assert norms == pytest.approx(MODEL["steps"][step]["param_norm"], rel=1e-2)
    assert model(x, y).item() == pytest.approx(MODEL["steps"][2]["loss_before"], abs=5e-2)


def test_adamw_against_torch():
    """torch's AdamW is the same algorithm but for the place of eps, which is negligible here."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2))
    group = dict(kind="adamw", params=[ours], lr=0.1, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.3)
    optimizer = train.MuonAdamW([group], dtype=torch.float32)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.3)
    for _ in range(5):
        ours.grad = torch.randn(4, 6)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("progress", "multiplier"), [(0.0, 1.0), (0.5, 1.0), (0.75, 0.5), (1.0, 0.0)])
def test_learning_rate_schedule(progress, multiplier):
    assert train.lr_multiplier(progress) == pytest.approx(multiplier)


def test_other_schedules():
    assert [train.muon_momentum(s) for s in (0, 150, 300, 1000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert [train.muon_weight_decay(p) for p in (0, 0.5, 1)] == pytest.approx([0.2, 0.1, 0])

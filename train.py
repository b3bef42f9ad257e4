"""
The experiment: a small GPT trained for a fixed time. This is the one file to edit; lower val_bpb wins.

    python train.py                      # train, evaluate, print the summary
    python train.py --keep               # and keep the trained model as model.pt
    python train.py --evaluate FILE      # evaluate a saved model: model.pt, or unevaluated.pt after an evaluation that failed

Plain PyTorch: what is read is what runs. On a GPU it is compiled, and where the compiler finds what a fused kernel computes, that kernel
runs (kernels/fusion.py); the run prints where. In this order: model, optimizer, hyperparameters ("edit these"), the run.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from harness.ending import fail
from harness.run import compiled, run
from prepare import DATASET, MAX_SEQ_LEN

# ---------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------


@dataclass
class GPTConfig:
    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"  # a letter for each layer, repeated: L sees the whole context, S half of it

    def __post_init__(self):
        if not 1 <= self.n_kv_head <= self.n_head or self.n_head % self.n_kv_head:
            fail(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}: each KV head serves as many query heads")


def norm(x):
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)  # which autocast on a GPU makes float32 since torch 2.12


def apply_rotary(x, cos, sin):
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], dim=-1)


def attention(q, k, v, window):
    """softmax(q kᵀ / √head_dim) v, each query over itself and the `window` keys before it.

    q: (B, T, n_head, head_dim); k, v: (B, T, n_kv_head, head_dim), each KV head for as many query heads.
    """
    position = torch.arange(q.size(1), device=q.device)
    distance = position[:, None] - position  # (T, T), from the query back to the key
    seen = (distance >= 0) & (distance <= window)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)


def has_value_embedding(layer, n_layer):
    return layer % 2 == (n_layer - 1) % 2


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        self.c_q = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ve_gate_channels = 32
        self.ve_gate = nn.Linear(self.ve_gate_channels, self.n_kv_head, bias=False) if has_value_embedding(layer, config.n_layer) else None

    def forward(self, x, value_embedding, cos, sin, window):
        B, T, _ = x.shape
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if value_embedding is not None:  # (B, T, n_kv_head * head_dim): a share of it for each head, by what the token is here
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels]))  # (B, T, n_kv_head), 1 at init
            v = v + gate.unsqueeze(-1) * value_embedding.view(v.shape)
        q, k = norm(apply_rotary(q, cos, sin)), norm(apply_rotary(k, cos, sin))
        return self.c_proj(attention(q, k, v, window).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, value_embedding, cos, sin, window):
        x = x + self.attn(norm(x), value_embedding, cos, sin, window)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The whole model: `GPT(config)`, then `init_weights()`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.window_sizes = self._window_sizes(config)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(config.vocab_size, config.n_embd), "h": nn.ModuleList([Block(config, i) for i in range(config.n_layer)])}
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        kv_dim = config.n_kv_head * (config.n_embd // config.n_head)
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, kv_dim) for i in range(config.n_layer) if has_value_embedding(i, config.n_layer)}
        )
        for name, table in zip(("cos", "sin"), self._rotary_tables(self.lm_head.weight.device)):
            self.register_buffer(name, table, persistent=False)

    @staticmethod
    def _window_sizes(config):
        """(keys before the query, keys after it) of each layer; the last one always sees everything."""
        window = {"L": config.sequence_len, "S": config.sequence_len // 2}
        pattern = config.window_pattern.upper()
        sizes = [(window[pattern[i % len(pattern)]], 0) for i in range(config.n_layer)]
        return sizes[:-1] + [(config.sequence_len, 0)]

    @torch.no_grad()
    def init_weights(self):
        s = 3**0.5 * self.config.n_embd**-0.5  # U(-s, s) has the deviation 1/√n_embd
        device = self.lm_head.weight.device
        nn.init.normal_(self.transformer.wte.weight, mean=0.0, std=1.0)
        nn.init.normal_(self.lm_head.weight, mean=0.0, std=0.001)
        for block in self.transformer.h:
            for linear in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                nn.init.uniform_(linear.weight, -s, s)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.uniform_(block.mlp.c_fc.weight, -s, s)
            nn.init.zeros_(block.mlp.c_proj.weight)
        self.resid_lambdas.fill_(1.0)
        self.x0_lambdas.fill_(0.1)
        for embedding in self.value_embeds.values():
            nn.init.uniform_(embedding.weight, -s, s)
        for block in self.transformer.h:
            if block.attn.ve_gate is not None:
                nn.init.zeros_(block.attn.ve_gate.weight)
        self.cos, self.sin = self._rotary_tables(device)  # again: a model that was built on the meta device has none
        if device.type == "cuda":
            self.transformer.wte.to(torch.bfloat16)
            self.value_embeds.to(torch.bfloat16)

    def _rotary_tables(self, device, base=10000):
        """cos and sin, each (1, sequence_len, 1, head_dim / 2) bfloat16."""
        head_dim = self.config.n_embd // self.config.n_head
        frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        angle = torch.outer(torch.arange(self.config.sequence_len, dtype=torch.float32, device=device), frequency)
        return tuple(table.bfloat16()[None, :, None, :] for table in (angle.cos(), angle.sin()))

    def estimate_flops(self):
        """FLOPs per token, forward and backward: 6 for each matrix parameter, and attention over the keys a query sees."""
        counts = self.num_scaling_params()
        head_dim = self.config.n_embd // self.config.n_head
        keys = sum(min(window, self.config.sequence_len) for window, _ in self.window_sizes)
        return 6 * (counts["transformer_matrices"] + counts["lm_head"]) + 12 * self.config.n_head * head_dim * keys

    def num_scaling_params(self):
        def count(parameters):
            return sum(p.numel() for p in parameters)

        counts = {
            "wte": count(self.transformer.wte.parameters()),
            "value_embeds": count(self.value_embeds.parameters()),
            "lm_head": count(self.lm_head.parameters()),
            "transformer_matrices": count(self.transformer.h.parameters()),
            "scalars": self.resid_lambdas.numel() + self.x0_lambdas.numel(),
        }
        return counts | {"total": count(self.parameters())}  # with what is in none of these

    def setup_optimizer(
        self, unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.0, adam_betas=(0.8, 0.95), scalar_lr=0.5
    ):
        matrices = [p for p in self.transformer.h.parameters() if p.dim() == 2]  # Muon takes only those
        scale = (self.config.n_embd / 768) ** -0.5  # the learning rates were tuned at a width of 768
        print(f"AdamW learning rates scaled by (n_embd / 768)^-0.5 = {scale:.4f}")

        def adamw(parameters, lr, betas=adam_betas):
            return dict(kind="adamw", params=list(parameters), lr=lr, betas=betas, eps=1e-10, weight_decay=0.0)

        groups = [
            adamw(self.lm_head.parameters(), unembedding_lr * scale),
            adamw(self.transformer.wte.parameters(), embedding_lr * scale),
            adamw(self.value_embeds.parameters(), embedding_lr * scale),
            adamw([self.resid_lambdas], scalar_lr * 0.01),
            adamw([self.x0_lambdas], scalar_lr, betas=(0.96, 0.95)),
        ]
        for shape in sorted({p.shape for p in matrices}):
            same = [p for p in matrices if p.shape == shape]
            groups.append(dict(kind="muon", params=same, lr=matrix_lr, momentum=0.95, ns_steps=5, beta2=0.95, weight_decay=weight_decay))
        for name, p in self.named_parameters():
            count = sum(p is q for group in groups for q in group["params"])
            if count != 1:
                have = f"{name} {tuple(p.shape)} is in {count} groups of setup_optimizer and must be in one"
                fail(f"{have}: Muon's have all matrices of the blocks (`matrices`), AdamW's the rest")
        # In bfloat16 as upstream on a GPU; a CPU without bfloat16 units takes 7 times as long for that as for float32.
        optimizer = MuonAdamW(groups, torch.bfloat16 if self.lm_head.weight.is_cuda else torch.float32)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def forward(self, idx, targets=None, reduction="mean"):
        """Logits (B, T, vocab_size) float32 of the tokens idx (B, T); with targets (B, T) their cross entropy instead, -1 left out."""
        T = idx.size(1)
        if self.config.sequence_len < T:
            raise ValueError(f"{T} tokens in a row, and sequence_len is {self.config.sequence_len}: the rotary tables end there")
        cos, sin = self.cos[:, :T], self.sin[:, :T]
        x = x0 = norm(self.transformer.wte(idx))  # (B, T, n_embd)
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            value_embedding = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, value_embedding, cos, sin, self.window_sizes[i][0])
        logits = self.lm_head(norm(x)).float()
        logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


# ---------------------------------------------------------------------------
# Optimizer: Muon for the matrices in the blocks, AdamW for the rest
# ---------------------------------------------------------------------------

# Polar Express (Amsel et al. 2025): coefficients of the quintic that brings all singular values near 1, for each iteration.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# In both steps every hyperparameter is a 0-D float32 CPU tensor: a Python number would be compiled in, and compiled again whenever a
# schedule changes it. Every lerp_ weight is cast to the dtype of what it moves: ROCm's compiled lerp takes no other.


@compiled
def adamw_step(p, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay):
    p.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, (1 - beta1).to(exp_avg.dtype))
    exp_avg_sq.lerp_(grad.square(), (1 - beta2).to(exp_avg_sq.dtype))
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    p.sub_(lr / bias1 * (exp_avg / ((exp_avg_sq / bias2).sqrt() + eps)))


@compiled
def muon_step(params, grads, momentum_buffer, second_momentum_buffer, momentum, lr, weight_decay, beta2, ns_steps, red_dim, dtype):
    """One step for all matrices of a shape, stacked: params and grads (n, rows, cols). Writes into all but `grads`.

    dtype: of the products, and of all that follows them.
    """
    momentum_buffer.lerp_(grads, (1 - momentum).to(momentum_buffer.dtype))
    g = grads.lerp(momentum_buffer, momentum.to(grads.dtype))  # Nesterov
    # Orthogonalize by Newton-Schulz iterations, from the side where the product is smaller
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS[:ns_steps]:
        if x.size(-2) > x.size(-1):
            square = x.mT @ x
            x = a * x + x @ (b * square + c * (square @ square))
        else:
            square = x @ x.mT
            x = a * x + (b * square + c * (square @ square)) @ x
    # NorMuon: even out the rows' (or columns') sizes by a running second moment, keeping each matrix's norm
    v_mean = x.float().square().mean(dim=red_dim, keepdim=True)
    norm_before = (v_mean.sum(dim=(-2, -1), keepdim=True) * x.size(red_dim)).sqrt()
    second_momentum_buffer.lerp_(v_mean.to(second_momentum_buffer.dtype), (1 - beta2.to(x.dtype)).to(second_momentum_buffer.dtype))
    step_size = second_momentum_buffer.clamp_min(1e-10).rsqrt()
    norm_after = (v_mean * x.size(red_dim) * step_size.float().square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    x = x * (step_size * (norm_before / norm_after.clamp_min(1e-10))).to(x.dtype)
    # Cautious weight decay: only where it agrees with the step
    lr, weight_decay = lr.to(x.dtype), weight_decay.to(x.dtype)
    params.sub_(lr * x + lr * weight_decay * params * (x * params >= 0))


class MuonAdamW(torch.optim.Optimizer):
    """Groups of `kind` "adamw" (lr, betas, eps, weight_decay) and "muon" (matrices of one shape; momentum, ns_steps, beta2 and so on)."""

    def __init__(self, param_groups, dtype):
        super().__init__(param_groups, defaults={})
        self._dtype = dtype  # of Muon's products
        names = ("step", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum")
        self._scalars = {name: torch.zeros((), dtype=torch.float32) for name in names}

    def _set(self, **values):
        for name, value in values.items():
            self._scalars[name].fill_(value)
        return {name: self._scalars[name] for name in values}

    def _step_adamw(self, group):
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            scalars = self._set(
                step=state["step"],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            adamw_step(p, p.grad, state["exp_avg"], state["exp_avg_sq"], **scalars)

    def _step_muon(self, group):
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        stacked, grads = torch.stack(params), torch.stack([p.grad for p in params])
        rows, cols = stacked.shape[-2:]
        red_dim = -1 if rows >= cols else -2
        state = self.state[params[0]]
        if not state:
            state.update(
                momentum_buffer=torch.zeros_like(stacked), second_momentum_buffer=torch.zeros_like(stacked.mean(red_dim, keepdim=True))
            )
        scalars = self._set(
            lr=group["lr"] * max(1.0, rows / cols) ** 0.5,
            momentum=group["momentum"],
            beta2=group["beta2"],
            weight_decay=group["weight_decay"],
        )
        muon_step(
            stacked,
            grads,
            state["momentum_buffer"],
            state["second_momentum_buffer"],
            **scalars,
            ns_steps=group["ns_steps"],
            red_dim=red_dim,
            dtype=self._dtype,
        )
        torch._foreach_copy_(params, list(stacked.unbind(0)))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            {"adamw": self._step_adamw, "muon": self._step_muon}[group["kind"]](group)


# ---------------------------------------------------------------------------
# Hyperparameters: edit these
# ---------------------------------------------------------------------------

DEMO = DATASET.name == "demo"  # the demonstration: the same experiment, small enough for a bare CPU

DEPTH = 4 if DEMO else 8  # layers
ASPECT_RATIO = 32 if DEMO else 64  # n_embd = DEPTH * ASPECT_RATIO, rounded up to a multiple of HEAD_DIM
HEAD_DIM = 32 if DEMO else 128
WINDOW_PATTERN = "SSSL"  # see GPTConfig
SOFTCAP = 15  # logits stay within ±SOFTCAP

TOTAL_BATCH_SIZE = 2**12 if DEMO else 2**17  # tokens in an optimizer step
DEVICE_BATCH_SIZE = 16  # rows in a micro-batch: lower it when memory runs out

EMBEDDING_LR = 0.6  # AdamW
UNEMBEDDING_LR = 0.004  # AdamW
SCALAR_LR = 0.5  # AdamW
MATRIX_LR = 0.04  # Muon
WEIGHT_DECAY = 0.2  # Muon; falls to 0 over the run
ADAM_BETAS = (0.8, 0.95)
WARMUP_RATIO = 0.0  # share of the time budget over which the learning rate rises
WARMDOWN_RATIO = 0.5  # and over which it falls at the end
FINAL_LR_FRAC = 0.0  # to this share of its peak


def lr_multiplier(progress):
    """Warm-up, plateau, linear warm-down; progress is the share of the time budget that is used."""
    if progress < WARMUP_RATIO:
        return progress / WARMUP_RATIO
    if progress < 1.0 - WARMDOWN_RATIO:
        return 1.0
    left = (1.0 - progress) / WARMDOWN_RATIO if WARMDOWN_RATIO else 0.0
    return left + (1 - left) * FINAL_LR_FRAC


def muon_momentum(step):
    return 0.85 + min(step / 300, 1) * (0.95 - 0.85)


def muon_weight_decay(progress):
    return WEIGHT_DECAY * (1 - progress)


def schedule(optimizer, step, progress):
    """Set the rates of every group for a step; progress is the share of the time budget that is used."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_multiplier(progress)
        if group["kind"] == "muon":
            group["momentum"] = muon_momentum(step)
            group["weight_decay"] = muon_weight_decay(progress)


# ---------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------


def model_config(vocab_size):
    """GPTConfig from the hyperparameters; ends the run if they don't fit together."""
    for name in ("DEPTH", "ASPECT_RATIO", "HEAD_DIM"):
        if not isinstance(globals()[name], int) or globals()[name] < 1:
            fail(f"{name} {globals()[name]!r} must be a whole number from 1")
    if HEAD_DIM % 2:
        fail(f"HEAD_DIM {HEAD_DIM} must be even: rotary embeddings turn pairs")
    if not WINDOW_PATTERN or set(str(WINDOW_PATTERN).upper()) - set("SL"):
        fail(f"WINDOW_PATTERN {WINDOW_PATTERN!r} must consist of the letters S and L")
    n_embd = -(-DEPTH * ASPECT_RATIO // HEAD_DIM) * HEAD_DIM
    if n_embd < 32:
        fail(f"DEPTH {DEPTH} × ASPECT_RATIO {ASPECT_RATIO} makes n_embd {n_embd}; the value embeddings' gates need at least 32")
    n_head = n_kv_head = n_embd // HEAD_DIM
    return GPTConfig(MAX_SEQ_LEN, vocab_size, DEPTH, n_head, n_kv_head, n_embd, WINDOW_PATTERN)


def make_optimizer(model):
    return model.setup_optimizer(UNEMBEDDING_LR, EMBEDDING_LR, MATRIX_LR, WEIGHT_DECAY, ADAM_BETAS, SCALAR_LR)


if __name__ == "__main__":
    run(GPT, model_config, make_optimizer, schedule, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE)

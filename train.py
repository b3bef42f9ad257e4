"""
The experiment: a small GPT trained for a fixed time. This is the one file to edit; lower val_bpb wins.

    python train.py                      # train, evaluate, print the summary
    python train.py --keep               # and keep the trained model as model.pt
    python train.py --evaluate FILE      # evaluate a saved model: model.pt, or unevaluated.pt after an evaluation that failed

In this order: model, optimizer, hyperparameters ("edit these"), setup, training.
"""

import argparse
import gc
import math
import os
import platform
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import backends
import machine
import prepare
from machine import fail
from prepare import EVAL_TOKENS, MAX_SEQ_LEN, TIME_BUDGET, WARMUP_STEPS, Tokenizer, evaluate_bpb, make_dataloader

try:
    import kernels  # this project's, see kernels/README.md
except ModuleNotFoundError as e:
    if e.name != "triton":  # which a bare CPU is without
        raise
    kernels = None

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


# Each step of the layer that has a fused kernel is a function of its own here, with the same mathematics in plain PyTorch beside it. On a
# GPU only the kernel runs: to change such a step, remove its `if FUSED` and edit what is left, or call something else in the layer below.
# Then set COMPILE = True, and torch.compile fuses it.


def norm(x):
    if FUSED:
        return kernels.rms_norm(x, eps=torch.finfo(torch.float32).eps)
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)  # which autocast on a GPU makes float32 since torch 2.12


def add_norm(x, update):
    if update is None:
        return norm(x)
    return kernels.add_rms_norm(x, update, eps=torch.finfo(torch.float32).eps)[1] if FUSED else norm(x + update)


def linear(x, weight):
    return kernels.linear(x, weight) if FUSED else F.linear(x, weight)


def mix_norm_linear(x, update, x0, resid_lambda, x0_lambda, weight):
    """The residual stream after an update (None in the first layer) with a share of the embedding x0, and the product of its norm.

    x, update, x0: (B, T, n_embd); weight: (out, n_embd).
    """
    if FUSED:
        return kernels.residual_mix_norm_linear(x, x0, resid_lambda, x0_lambda, weight, update=update)
    x = x if update is None else x + update
    x = resid_lambda * x + x0_lambda * x0
    return x, F.linear(norm(x), weight)


def add_norm_mlp(x, update, c_fc, c_proj):
    """The residual stream after an update, and the MLP of its norm."""
    if FUSED:
        return kernels.add_norm_mlp(x, update, c_fc, c_proj)
    x = x + update
    return x, F.linear(F.relu(F.linear(norm(x), c_fc)).square(), c_proj)


def apply_rotary(x, cos, sin):
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], dim=-1)


def qkv_norm_rope(qkv, cos, sin, n_head, n_kv_head, idx, value_embedding):
    """q (B, T, n_head, head_dim), k and v (B, T, n_kv_head, head_dim) from a packed row for each token: [q | k | v | gates | zeros].

    q and k are rotated and normed. Where there is a value embedding (vocab_size, n_kv_head * head_dim), v gets the token's own, times a
    gate for each head; without one there are no gates.
    """
    if FUSED:
        return kernels.qkv_norm_rope(qkv, cos, sin, n_head, n_kv_head, None if value_embedding is None else idx, value_embedding)
    head_dim = 2 * cos.size(-1)
    sizes = [n_head * head_dim, n_kv_head * head_dim, n_kv_head * head_dim]
    q, k, v, gates = qkv.split([*sizes, qkv.size(-1) - sum(sizes)], dim=-1)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if value_embedding is not None:
        gates = 2 * torch.sigmoid(gates[..., :n_kv_head])  # 1 at init
        v = v + gates.unsqueeze(-1) * F.embedding(idx, value_embedding).view(v.shape)
    return norm(apply_rotary(q, cos, sin)), norm(apply_rotary(k, cos, sin)), v


def cross_entropy(x, weight, targets, softcap, reduction):
    """Cross entropy of the soft-capped logits `softcap * tanh(x weightᵀ / softcap)`; targets of -1 are left out."""
    if FUSED:
        return kernels.linear_softcap_cross_entropy(x, weight, targets, softcap, ignore_index=-1, reduction=reduction)
    logits = softcap * torch.tanh(F.linear(x, weight).float() / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)


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

    def packed_weight(self):
        """One matrix for all that is computed from the layer's normed input; the gates read its first channels."""
        weights = [self.c_q.weight, self.c_k.weight, self.c_v.weight]
        if self.ve_gate is not None:
            rows = -self.n_kv_head % 16  # a multiple of 16 rows, so that products stay aligned
            weights.append(F.pad(self.ve_gate.weight, (0, self.c_q.in_features - self.ve_gate_channels, 0, rows)))
        return torch.cat(weights)

    def forward(self, qkv, idx, value_embedding, cos, sin, attend):
        q, k, v = qkv_norm_rope(qkv, cos, sin, self.n_head, self.n_kv_head, idx, value_embedding)
        y = attend(q, k, v)  # softmax(q kᵀ / √head_dim) v over the layer's window, by the implementation that is fastest here
        return linear(y.flatten(2), self.c_proj.weight)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x, update):
        """The residual stream with `update`, and this layer's own update."""
        return add_norm_mlp(x, update, self.c_fc.weight, self.c_proj.weight)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, update, x0, resid_lambda, x0_lambda, idx, value_embedding, cos, sin, attend):
        """The residual stream, and this layer's update of it, which the next layer or the head adds where it reads both anyway.

        None instead of the update: the block has added all itself.
        """
        x, qkv = mix_norm_linear(x, update, x0, resid_lambda, x0_lambda, self.attn.packed_weight())
        return self.mlp(x, self.attn(qkv, idx, value_embedding, cos, sin, attend))


class GPT(nn.Module):
    """The whole model. `build_model` makes the run's; by itself: `GPT(config)`, then `init_weights()`."""

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
        self.attend = {}  # window → what computes attention over it: choose_backends, at the latest with the first batch

    @staticmethod
    def _window_sizes(config):
        """(keys before the query, keys after it) of each layer; the last one always sees everything."""
        window = {"L": config.sequence_len, "S": config.sequence_len // 2}
        pattern = config.window_pattern.upper()
        sizes = [(window[pattern[i % len(pattern)]], 0) for i in range(config.n_layer)]
        return sizes[:-1] + [(config.sequence_len, 0)]

    def choose_backends(self, batch_size):
        """Find the fastest right attention for each window, at the run's shapes."""
        config = self.config
        shape = batch_size, config.sequence_len, config.n_head, config.n_kv_head, config.n_embd // config.n_head
        device = self.lm_head.weight.device
        self.attend, self.attention = backends.choose_attention(ATTENTION, {w for w, _ in self.window_sizes}, shape, device, FUSED)
        if FUSED:
            layers = [(b.attn.packed_weight(), b.attn.c_proj.weight, b.mlp.c_fc.weight, b.mlp.c_proj.weight) for b in self.transformer.h]
            shapes = {tuple(w.shape) for w in (*sum(layers, ()), self.lm_head.weight)}
            backends.choose_weight_gradients(shapes, batch_size * config.sequence_len, device)

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
        on_gpu = self.lm_head.weight.is_cuda
        # In bfloat16 as upstream on a GPU; on a CPU in float32 as everything else: one without bfloat16 units takes 7 times as long for it.
        optimizer = MuonAdamW(groups, compiled=on_gpu, dtype=torch.bfloat16 if on_gpu else torch.float32)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def embed(self, idx):
        return norm(self.transformer.wte(idx))  # (B, T, n_embd)

    def head(self, x, update, targets, reduction):
        x = add_norm(x, update)
        if targets is None:
            return 15 * torch.tanh(self.lm_head(x).float() / 15)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), 15, reduction)

    def forward(self, idx, targets=None, reduction="mean"):
        """Logits (B, T, vocab_size) float32 of the tokens idx (B, T); with targets (B, T) their cross entropy instead, -1 left out."""
        T = idx.size(1)
        if self.config.sequence_len < T:
            raise ValueError(f"{T} tokens in a row, and sequence_len is {self.config.sequence_len}: the rotary tables end there")
        if not self.attend:
            self.choose_backends(idx.size(0))
        cos, sin = self.cos[:, :T], self.sin[:, :T]
        x, update = self.embed(idx), None
        x0 = x
        lambdas = zip(self.resid_lambdas.unbind(), self.x0_lambdas.unbind())
        for i, (block, (resid_lambda, x0_lambda)) in enumerate(zip(self.transformer.h, lambdas)):
            value_embedding = self.value_embeds[str(i)].weight if str(i) in self.value_embeds else None
            attend = self.attend[self.window_sizes[i][0]]
            x, update = block(x, update, x0, resid_lambda, x0_lambda, idx, value_embedding, cos, sin, attend)
        return self.head(x, update, targets, reduction)


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


def adamw_step(p, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay):
    p.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, (1 - beta1).to(exp_avg.dtype))
    exp_avg_sq.lerp_(grad.square(), (1 - beta2).to(exp_avg_sq.dtype))
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    p.sub_(lr / bias1 * (exp_avg / ((exp_avg_sq / bias2).sqrt() + eps)))


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

    def __init__(self, param_groups, compiled, dtype):
        super().__init__(param_groups, defaults={})
        self._dtype = dtype  # of Muon's products
        names = ("step", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum")
        self._scalars = {name: torch.zeros((), dtype=torch.float32) for name in names}
        self._adamw_step, self._muon_step = adamw_step, muon_step
        if compiled:
            self._adamw_step, self._muon_step = (torch.compile(f, dynamic=False, fullgraph=True) for f in (adamw_step, muon_step))

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
            self._adamw_step(p, p.grad, state["exp_avg"], state["exp_avg_sq"], **scalars)

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
        self._muon_step(
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

# (The demonstration has sizes of its own: edit those in its row, at the end.)
DEPTH = 8  # layers
ASPECT_RATIO = 64  # n_embd = DEPTH * ASPECT_RATIO, rounded up to a multiple of HEAD_DIM
HEAD_DIM = 128
WINDOW_PATTERN = "SSSL"  # see GPTConfig
ATTENTION = "auto"  # or one of backends.ATTENTION; "full" ignores the windows
FUSED = kernels is not None and torch.cuda.is_available()  # the fused kernels; False: the same in plain PyTorch

TOTAL_BATCH_SIZE = 2**17  # tokens in an optimizer step
DEVICE_BATCH_SIZE = 16  # rows in a micro-batch: lower it when memory runs out
COMPILE = not FUSED  # torch.compile the model: set it True when you add operations in plain PyTorch (the optimizer always is, on a GPU)
GRAPH = torch.cuda.is_available() and not torch.version.hip  # record forward and backward as a CUDA graph: see machine.Recorded

EMBEDDING_LR = 0.6  # AdamW
UNEMBEDDING_LR = 0.004  # AdamW
SCALAR_LR = 0.5  # AdamW
MATRIX_LR = 0.04  # Muon
WEIGHT_DECAY = 0.2  # Muon; falls to 0 over the run
ADAM_BETAS = (0.8, 0.95)
WARMUP_RATIO = 0.0  # share of the time budget over which the learning rate rises
WARMDOWN_RATIO = 0.5  # and over which it falls at the end
FINAL_LR_FRAC = 0.0  # to this share of its peak

if MAX_SEQ_LEN == 256:  # the demonstration: the same experiment, small enough for a bare CPU, where compiling would take half a minute
    DEPTH, ASPECT_RATIO, HEAD_DIM, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE, COMPILE = 4, 32, 32, 2**12, 16, False


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


# ---------------------------------------------------------------------------
# Setup
# ---------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKPOINT = os.path.join(HERE, "unevaluated.pt")  # the trained model, until it is evaluated


def model_config(vocab_size):
    """GPTConfig from the hyperparameters; ends the run if they don't fit together."""
    for name in ("DEPTH", "ASPECT_RATIO", "HEAD_DIM", "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE"):
        if not isinstance(globals()[name], int) or globals()[name] < 1:
            fail(f"{name} {globals()[name]!r} must be a whole number from 1")
    if HEAD_DIM % 2:
        fail(f"HEAD_DIM {HEAD_DIM} must be even: rotary embeddings turn pairs")
    if not WINDOW_PATTERN or set(str(WINDOW_PATTERN).upper()) - set("SL"):
        fail(f"WINDOW_PATTERN {WINDOW_PATTERN!r} must consist of the letters S and L")
    if ATTENTION not in ("auto", "full", *backends.ATTENTION):
        fail(f"ATTENTION {ATTENTION!r} must be 'auto', 'full' or one of {', '.join(backends.ATTENTION)}")
    if (FUSED or GRAPH) and not torch.cuda.is_available():
        fail(f"FUSED {FUSED}, GRAPH {GRAPH}: both need a GPU and must be False without one")
    machine.check_batch(TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE, MAX_SEQ_LEN)
    n_embd = -(-DEPTH * ASPECT_RATIO // HEAD_DIM) * HEAD_DIM
    if n_embd < 32:
        fail(f"DEPTH {DEPTH} × ASPECT_RATIO {ASPECT_RATIO} makes n_embd {n_embd}; the value embeddings' gates need at least 32")
    n_head = n_kv_head = n_embd // HEAD_DIM
    return GPTConfig(MAX_SEQ_LEN, vocab_size, DEPTH, n_head, n_kv_head, n_embd, WINDOW_PATTERN)


def build_model(config, device):
    """The initialised model on `device`."""
    if not 1 <= config.n_kv_head <= config.n_head or config.n_head % config.n_kv_head:
        fail(f"n_kv_head {config.n_kv_head} must divide n_head {config.n_head}: each KV head serves as many query heads")
    with device:
        model = GPT(config)  # with torch's own first values, which stay where init_weights sets no others
    prepare.seed_everything()  # so that they cost no draw of ours
    model.init_weights()
    try:
        model.choose_backends(DEVICE_BATCH_SIZE)
    except backends.NoneUsable as e:  # of those asked for: the experiment's fault; of all: the machine's
        fail(e, machine.EXIT_ENVIRONMENT if ATTENTION == "auto" else 1)
    return model


def compile_model(model, device):
    """Compile in place: the blocks each by itself, so that equal ones are compiled once."""
    if COMPILE and machine.can_compile(device):
        options = dict(dynamic=False, fullgraph=True)
        for block in model.transformer.h:
            block.compile(**options)
        model.embed, model.head = torch.compile(model.embed, **options), torch.compile(model.head, **options)


def load_model(path, device):
    """(model, facts) of a file that `save` wrote; ends the run where it is no model of this train.py."""
    saved = machine.load(path, device)
    try:
        model, facts = build_model(GPTConfig(**saved["config"]), device), saved["facts"]
        model.load_state_dict(saved["model"])
        if facts["train.py"] != machine.file_digest(__file__):
            print("WARNING: train.py has changed since this model was trained; what is evaluated is the model as it is defined now")
        return model, facts
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, but not the file's fault
    except (KeyError, TypeError, RuntimeError) as e:
        fail(f"--evaluate {path}: not a model of this train.py ({' '.join(str(e).split())[:120]})")


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def train(model, optimizer, loader, device, flops_per_step, peak, sensors=None):
    """Steps until the time budget is used. Returns (steps, timed seconds)."""
    compile_model(model, device)
    micro_batches = TOTAL_BATCH_SIZE // (DEVICE_BATCH_SIZE * MAX_SEQ_LEN)

    def micro_step(x, y):
        with machine.autocast(device):
            loss = model(x, y)
        (loss / micro_batches).backward()
        return loss.detach()

    step_on, recorded = micro_step, None
    progress_line = machine.Progress()
    smooth_loss = seconds = 0.0
    step = 0
    x, y, epoch = next(loader)
    while seconds < TIME_BUDGET:
        start = time.perf_counter()
        for _ in range(micro_batches):
            loss = step_on(x, y)
            x, y, epoch = next(loader)  # while the GPU is at work
        progress = min(seconds / TIME_BUDGET, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier(progress)
            if group["kind"] == "muon":
                group["momentum"] = muon_momentum(step)
                group["weight_decay"] = muon_weight_decay(progress)
        optimizer.step()
        if step == 0 and (unused := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]):
            print(f"WARNING: not trained, because the loss does not depend on it: {', '.join(unused)}")
        model.zero_grad(set_to_none=not GRAPH)  # a recorded graph adds to the gradients where they are
        loss = machine.wait_for(loss)  # the step's only synchronisation
        if not -math.inf < loss <= 100:  # NaN too
            progress_line.end()
            fail(f"the loss is {loss} at step {step}: the run diverged")
        elapsed = time.perf_counter() - start
        if step >= WARMUP_STEPS:
            seconds += elapsed
        smooth_loss = 0.9 * smooth_loss + 0.1 * loss
        mfu = f"{100 * flops_per_step / elapsed / peak:.1f}%" if peak else "n/a"
        debiased_loss = smooth_loss / (1 - 0.9 ** (step + 1))
        left = f"remaining: {max(0, TIME_BUDGET - seconds):.0f}s"
        progress_line.show(
            f"step {step:05d} ({100 * progress:.1f}%) | loss: {debiased_loss:.6f} | lrm: {lr_multiplier(progress):.2f} | "
            f"dt: {elapsed * 1000:.0f}ms | tok/sec: {TOTAL_BATCH_SIZE / elapsed:,.0f} | mfu: {mfu} | epoch: {epoch} | "
            + (left if step >= WARMUP_STEPS else f"warming up, not timed (step {step + 1} of {WARMUP_STEPS})")
        )
        if step == 0:  # a collection stalls for half a second: everything so far stays, and from now on there is little garbage
            gc.collect()
            gc.freeze()
            gc.disable()
            if GRAPH:
                recorded = machine.record(micro_step, x, y)
                step_on = recorded or micro_step
        elif (step + 1) % 5000 == 0:
            gc.collect()
        step += 1
        if step == WARMUP_STEPS and sensors:
            sensors.start()
    progress_line.end()
    if recorded and not recorded.holds(x, y):
        fail(
            "something that Python decides in the model changed during training, and the recorded graph went on without it: keep it in a"
            " tensor on the device that is changed in place, or set GRAPH = False"
        )
    model.zero_grad(set_to_none=True)
    return step, seconds


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT for a fixed time and evaluate it.")
    parser.add_argument("--keep", action="store_true", help="keep the trained model as model.pt")
    parser.add_argument("--evaluate", metavar="FILE", help="evaluate a saved model instead of training one")
    args = parser.parse_args()

    started, source = time.time(), machine.file_digest(__file__)
    seed = prepare.seed_everything()
    torch.set_float32_matmul_precision("high")
    machine.keep_compiled()
    facts = prepare.checked_dataset(prepare.DATASET)  # before anything that takes time
    fingerprint = prepare.fingerprint()
    device = machine.find_device()
    peak, device_name = machine.peak_flops(device)
    machine.cap_shared_memory(device)
    tokenizer = Tokenizer.from_directory()
    print(
        f"Dataset: {facts['name']}, context {MAX_SEQ_LEN}, vocabulary {tokenizer.get_vocab_size()}, time budget {TIME_BUDGET} s, "
        f"fingerprint {fingerprint}, seed {seed}"
    )
    print(f"Device: {device_name}, torch {torch.__version__}, bf16 peak {f'{peak / 1e12:g} TFLOP/s' if peak else 'unknown'}")

    path = args.evaluate or CHECKPOINT
    if args.evaluate:
        model, result = load_model(path, device)
        if result["fingerprint"] != fingerprint:
            fail(f"--evaluate {path}: trained on {result['fingerprint']}, and here is {fingerprint}: the number would not compare")
        started -= result["seconds_before_evaluation"]
    else:
        config = model_config(tokenizer.get_vocab_size())
        model = build_model(config, device)
        counts, flops_per_token = model.num_scaling_params(), model.estimate_flops()
        print(f"Model: {config}")
        print("Parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
        steps_by = "fused kernels" if FUSED else "plain PyTorch, compiled" if COMPILE else "plain PyTorch"
        print(f"Attention: {model.attention}; the rest: {steps_by}; {flops_per_token:.3e} FLOPs per token")
        optimizer = model.setup_optimizer(UNEMBEDDING_LR, EMBEDDING_LR, MATRIX_LR, WEIGHT_DECAY, ADAM_BETAS, SCALAR_LR)
        loader = make_dataloader(tokenizer, DEVICE_BATCH_SIZE, MAX_SEQ_LEN, "train")
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
            fail(
                f"{path} can't be written, where the trained model is kept until it is evaluated: make room for it",
                machine.EXIT_ENVIRONMENT,
            )
        sensors = machine.sensors(device)
        steps, seconds = train(model, optimizer, loader, device, flops_per_token * TOTAL_BATCH_SIZE, peak, sensors)
        sensors.stop()
        tokens_per_second = (steps - WARMUP_STEPS) * TOTAL_BATCH_SIZE / seconds
        result = {
            "training_seconds": f"{seconds:.1f}",
            "mfu_percent": f"{100 * tokens_per_second * flops_per_token / peak:.2f}" if peak else "n/a",
            "total_tokens_M": f"{steps * TOTAL_BATCH_SIZE / 1e6:.1f}",
            "total_tokens": steps * TOTAL_BATCH_SIZE,
            "num_steps": steps,
            "num_params_M": f"{counts['total'] / 1e6:.1f}",
            "depth": DEPTH,
            "fingerprint": fingerprint,
            "seed": seed,
            "tok_per_sec": f"{tokens_per_second:.0f}",
            "device_batch_size": DEVICE_BATCH_SIZE,
            "peak_vram_mb": machine.peak_memory(device),
            "seconds_before_evaluation": time.time() - started,
            "train.py": source,
            "sensors": sensors.summary(),
        }
        del optimizer, loader
        saved = machine.save(path, {"config": asdict(model.config), "model": model.state_dict(), "facts": result})

    evaluation_started = time.time()
    model.eval()
    with machine.autocast(device):
        val_bpb = evaluate_bpb(machine.recorded_losses(model) if GRAPH else model, tokenizer, result["device_batch_size"])
    ended = time.time()
    summary = {"val_bpb": f"{val_bpb:.6f}", "training_seconds": result["training_seconds"], "total_seconds": f"{ended - started:.1f}"}
    summary["peak_vram_mb"] = f"{max(result['peak_vram_mb'], machine.peak_memory(device)):.1f}"
    summary |= {key: result[key] for key in ("mfu_percent", "total_tokens_M", "num_steps", "num_params_M", "depth")}
    summary |= {
        "dataset": facts["name"],
        "fingerprint": fingerprint,
        "eval_tokens": EVAL_TOKENS,
        "seed": result["seed"],
        "device": device_name,
        "torch": torch.__version__,
        "attention": model.attention,
        "total_tokens": result.get("total_tokens", "n/a"),  # not in what an earlier version saved
        "tok_per_sec": result["tok_per_sec"],
        "eval_seconds": f"{ended - evaluation_started:.1f}",
        "python": platform.python_version(),
    }
    if os.environ.get("AUTORESEARCH_RUN"):  # by which experiment.py knows that a summary is its run's own
        summary["run"] = os.environ["AUTORESEARCH_RUN"]
    summary |= result.get("sensors", {})  # clock, heat and power of the GPU, where they are known
    print("---")
    for key, value in summary.items():
        print(f"{key + ':':<17} {value}")
    if not args.evaluate and saved:
        try:
            os.replace(path, os.path.join(HERE, "model.pt")) if args.keep else os.remove(path)
        except OSError as e:
            print(f"WARNING: {e}" + (f"; the model stays in {path}" if args.keep else ""))


if __name__ == "__main__":
    half = f"use DEVICE_BATCH_SIZE {DEVICE_BATCH_SIZE // 2} (TOTAL_BATCH_SIZE can stay), or " if DEVICE_BATCH_SIZE > 1 else "use "
    machine.run(main, f"with DEVICE_BATCH_SIZE {DEVICE_BATCH_SIZE} at depth {DEPTH}: {half}a smaller model")

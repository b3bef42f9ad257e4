"""kernels.fuse on random programs made of what kernels compute and of what almost is: the rules alone, without the proof, must be right.

Each operation stands there as its definition; what is tested is which graph comes out. Compiled, a program is as near to its own float64
mathematics as it is uncompiled.
"""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from test_fusion import DEVICE, exact_products, put_definitions  # noqa: F401
from torch import nn

import kernels
from kernels import _proof

B, T, C, HEADS, HEAD_DIM, VOCAB = 3, 8, 32, 2, 16, 11


def rotations(x, cos, sin):
    a, b = x.chunk(2, -1)
    yield lambda: torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
    yield lambda: torch.cat([a * cos + b * sin, a * -sin + b * cos], -1)
    yield lambda: torch.cat([a * cos + b * sin, -(a * sin) + b * cos], -1)
    yield lambda: torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    yield lambda: torch.cat([b * cos + a * sin, a * cos - b * sin], -1)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Draw:
    """random.Random's methods on numbers that were drawn before: Dynamo does not trace the real one."""

    def __init__(self, numbers):
        self.numbers, self.used = numbers, 0

    def random(self):
        self.used += 1
        return self.numbers[self.used]

    def randrange(self, n):
        return int(self.random() * n)

    def choice(self, options):
        return options[self.randrange(len(options))]


class Program(nn.Module):
    """What random numbers make of three earlier results at a time."""

    def __init__(self, seed):
        super().__init__()
        self.numbers = [random.Random(seed).random() for seed in range(1000 * seed, 1000 * seed + 500)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(C, C) / C**0.5) for _ in range(4)])
        self.fc, self.proj = nn.Parameter(torch.randn(2 * C, C) / C**0.5), nn.Parameter(torch.randn(C, 2 * C) / C**0.5)
        self.lambdas, self.scale = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(C))
        self.table, self.gate = nn.Parameter(torch.randn(VOCAB, C)), nn.Parameter(torch.randn(HEADS, 8))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.randn(1, T, 1, HEAD_DIM // 2))

    def attention(self, draw, x, other, idx):
        """Projections of x, one of them sometimes of another input, or with another's weight; rotated, normed, with value embeddings."""
        sources = [x if draw.random() < 0.85 else other for _ in range(3)]
        weights = [self.weights[i] for i in ((0, 1, 2) if draw.random() < 0.85 else (0, 1, 1))]
        q, k, v = (F.linear(source, w).view(B, T, HEADS, HEAD_DIM) for source, w in zip(sources, weights))
        if draw.random() < 0.5:
            share = draw.choice([2, 2, 2, 3]) * torch.sigmoid(F.linear(x[..., :8], self.gate))
            v = v + share.unsqueeze(-1) * F.embedding(idx, self.table).view(v.shape)
        kinds = [draw.choice([0, 1, 2, 3, 4])] * 2 if draw.random() < 0.85 else [0, 3]
        q, k = (norm(list(rotations(t, self.cos, self.sin))[kind]()) for t, kind in zip((q, k), kinds))
        q = q * draw.choice([1, 1, 1, 1.2])
        position = torch.arange(T, device=x.device)
        distance, window = position[:, None] - position, draw.randrange(T)
        seen = draw.choice([distance >= 0, distance >= 0, distance >= -1, (distance > 0) | (distance == 0)]) & (distance <= window)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
        return F.linear(y.transpose(1, 2).reshape(B, T, C), self.weights[3])

    def step(self, draw, a, b, c, idx):
        weight, chance = draw.choice(list(self.weights)), draw.random
        mixed = self.lambdas[0] * (a + b if chance() < 0.5 else a) + self.lambdas[1] * c
        total = a + b if chance() < 0.7 else mixed
        hidden = F.linear(norm(total), self.fc)
        return draw.choice([
            lambda: self.attention(draw, norm(a), b, idx),
            lambda: self.attention(draw, norm(mixed), b, idx),
            lambda: F.linear(norm(total), weight) + (total if chance() < 0.5 else 0),
            lambda: draw.choice([F.rms_norm(total, (C,), self.scale), self.scale * norm(total), F.rms_norm(total, (C,), eps=0.01)]),
            lambda: total * torch.rsqrt(total.pow(2).mean(draw.choice([-1, -1, 1]), keepdim=True) + 1e-6),
            lambda: F.linear(draw.choice([F.relu(hidden).square(), F.relu(hidden) ** 2, F.relu(hidden) ** 3, F.gelu(hidden)]), self.proj)
            + (total if chance() < 0.5 else hidden[..., :C]),
            lambda: draw.choice([F.silu(a) * b, F.gelu(a) * b, F.sigmoid(a) * b, a * F.silu(b)]),
            lambda: draw.choice([F.relu(a).square(), F.relu(a) * F.relu(b), F.relu(a) * a, F.leaky_relu(a).square()]),
            lambda: draw.choice([torch.add(a, b, alpha=2), a.detach() + b, a[:, :1] + b, a - b]),
            lambda: F.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[draw.choice([0, 1])],
        ])()  # fmt: skip

    def forward(self, idx, targets):
        draw = Draw(self.numbers)
        results = [F.embedding(idx, self.table)]
        for _ in range(2 + draw.randrange(5)):
            a, b, c = (draw.choice(results[-3:]) for _ in range(3))
            results.append(self.step(draw, a, b, c, idx))
        x = results[-1]
        x += results[0]
        logits = F.linear(norm(x), self.table).float()
        cap = draw.choice([None, 15, 7])
        if cap:
            logits = cap * torch.tanh(logits / draw.choice([cap, cap, 9]))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def errors(results, exact):
    """The relative error of the loss, and of each gradient, where one that is nothing beside the largest counts as a thousandth of that:
    the gradient of a scale before a norm is zero, and all its digits are rounding."""
    loss, gradients = results
    least = 1e-3 * max(g.norm() for g in exact[1].values())
    found = {"loss": abs(loss - exact[0]) / abs(exact[0])}
    return found | {n: ((gradients[n] - g).norm() / torch.maximum(g.norm(), least)).item() for n, g in exact[1].items()}


def run(model, inputs):
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("first", range(0, 32, 4))
def test_random_programs(monkeypatch, first):
    put_definitions(monkeypatch)
    monkeypatch.setattr(_proof, "difference", lambda *asked: None)
    for seed in range(first, first + 4):
        torch.manual_seed(seed)
        model = Program(seed).to(DEVICE)
        idx, targets = torch.randint(0, VOCAB, (2, B, T), device=DEVICE)
        targets[0, 0] = -1
        exact = run(copy.deepcopy(model).double(), (idx, targets))
        plain = errors(run(model, (idx, targets)), exact)
        torch._dynamo.reset()
        backend = kernels.Fusion(backend="eager")
        model.compile(backend=backend, dynamic=False, fullgraph=True)
        ours = errors(run(model, (idx, targets)), exact)
        assert all(error <= max(10 * max(plain.values()), 1e-4) for error in ours.values()), (seed, ours, backend.report())

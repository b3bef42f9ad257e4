"""kernels.fuse: what researchers do to train.py stays fused where it can, and is right in any case; what looks like a kernel's and is not.

Each edit is made in the text of train.py, and the model that it makes is compared with itself, uncompiled: loss, and all gradients. Without
a GPU most do so with each kernel's definition in its place: what is tested is the rewriting, and interpreted kernels are slow.
"""

import contextlib
import copy
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import PROJECT
from torch import nn

import kernels
from kernels import _graph, _proof, _rules, fusion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = "aot_eager"  # what is tested is which graph comes out: torch's own compiler has tests of its own
SOURCE = (PROJECT / "train.py").read_text()
WHOLE = {  # what the unedited model of two layers is made of
    "qkv_norm_rope": 1,
    "qkv_norm_rope with value embedding": 1,
    "attention by kernels": 2,
    "linear_softcap_cross_entropy": 1,
    "add_norm_mlp": 2,
    "residual_mix_norm_linear": 1,
    "residual_mix_norm_linear with update": 1,
    "add_rms_norm": 1,
    "rms_norm": 1,
    "linear": 2,
}


def put_definitions(monkeypatch):
    """Let the rules put the plain PyTorch that defines each operation in the place of what they find."""
    for name, f in vars(_rules).copy().items():
        if callable(f) and f in _proof.REFERENCES:
            monkeypatch.setattr(_rules, name, _proof.REFERENCES[f])


def edited(*edits):
    """train.py as a module, with texts replaced as a researcher would; each text stands there once."""
    source = SOURCE
    for old, new in edits:
        assert source.count(old) == 1, f"{source.count(old)} times in train.py: {old}"
        source = source.replace(old, new)
    module = types.ModuleType("edited_train")
    module.__file__ = str(PROJECT / "train.py")
    code = compile(source, module.__file__, "exec")
    exec(code, module.__dict__)
    return module


def model_of(module, **changes):
    config = dict(sequence_len=16, vocab_size=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SL") | changes
    torch.manual_seed(0)
    with DEVICE:
        model = module.GPT(module.GPTConfig(**config))
    model.init_weights()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():  # nothing is zero or one: what is there would hide what is before it
            p.data = (p.float().cpu() + 0.1 * torch.randn(p.shape, generator=generator)).to(DEVICE)
    return model


def batch(T=16):
    ids = torch.randint(0, 64, (3, T + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    y[0, :3] = -1
    return x, y


def gradients(model, inputs, autocast=contextlib.nullcontext):
    model.zero_grad()
    with autocast():
        loss = model(*inputs)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def exact_products():
    """float32 products in float32, whatever the machine's settings are or another test has left."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def check(model, inputs, backend):
    """Compiled, the model is as near to its own float64 mathematics as it is uncompiled: three times that error, or 1e-5."""
    torch._dynamo.reset()
    exact = gradients(copy.deepcopy(model).double(), inputs)
    plain = gradients(model, inputs)
    model.compile(backend=backend, dynamic=False)
    ours = gradients(model, inputs)
    assert abs(ours[0] - exact[0]) <= max(3 * abs(plain[0] - exact[0]), 1e-5 * abs(exact[0])), (ours[0], plain[0], exact[0])
    assert exact[1].keys() == plain[1].keys() == ours[1].keys()
    for n, g in exact[1].items():
        mine, theirs = ((other[1][n] - g).norm() for other in (ours, plain))
        assert mine <= max(3 * theirs, 1e-5 * g.norm(), 1e-7), n


def compare(model, inputs):
    """{name: how often it was fused} of a model that computes compiled what it does uncompiled, and what was done with it."""
    backend = kernels.Fusion(backend=BACKEND)
    check(model, inputs, backend)
    counts = {}
    for graph in backend.graphs:
        for name, _ in graph.fused:
            counts[name] = counts.get(name, 0) + 1
    return counts, backend


NORM = "return F.rms_norm(x, (x.size(-1),)).to(x.dtype)"
ROTARY = "return torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], dim=-1)"
MLP = "return self.c_proj(F.relu(self.c_fc(x)).square())"
FC = "self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)"
ATTEND = "return self.c_proj(attention(q, k, v, window).reshape(B, T, -1))"
BLOCK = "        x = x + self.attn(norm(x), value_embedding, cos, sin, window)\n        return x + self.mlp(norm(x))"
QK = "q, k = norm(apply_rotary(q, cos, sin)), norm(apply_rotary(k, cos, sin))"
MIX = "x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0"
CAPPED = "logits = SOFTCAP * torch.tanh(logits / SOFTCAP)"
LOSS = "return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)"
SEEN = "seen = (distance >= 0) & (distance <= window)"
QKV = {"qkv_norm_rope": 1, "qkv_norm_rope with value embedding": 1}

# name → (edits, how the counts of WHOLE change; None: it isn't there any more)
EDITS = {
    "none": ([], {}),
    "softcap 30": ([("SOFTCAP = 15", "SOFTCAP = 30")], {}),
    "no softcap": ([(CAPPED, "pass")], {}),
    "no value embeddings": (
        [("return layer % 2 == (n_layer - 1) % 2", "return False")], {"qkv_norm_rope": 2, "qkv_norm_rope with value embedding": None}
    ),
    "q scaled": ([(QK, QK + "\n        q = q * 1.1")], {}),
    "smear": ([("x = x0 = norm(", "x = norm("), ("        for i, block in enumerate", "        x = x0 = torch.cat([x[:, :1], x[:, 1:] + 0.3 * x[:, :-1]], dim=1)\n        for i, block in enumerate")], {}),
    "another embedding": ([("x = x0 = norm(self.transformer.wte(idx))", "x = x0 = norm(self.transformer.wte(idx) + self.value_embeds['1'](idx))")], {"rms_norm": None, "add_rms_norm": 2}),
    "other spellings": (
        [
            (NORM, "return torch.rms_norm(x, [x.shape[-1]], eps=torch.finfo(torch.float32).eps).type_as(x)"),
            (MLP, "a = torch.relu(self.c_fc(x))\n        return self.c_proj(a * a)"),
            (ROTARY, "return torch.concat((x2 * sin + cos * x1, x2 * cos - x1 * sin), -1)"),
            (MIX, "x = torch.add(x0 * self.x0_lambdas[i], x.mul(self.resid_lambdas[i]))"),
        ],
        {},
    ),
    "relu² by pow": ([(MLP, "return self.c_proj(self.c_fc(x).relu() ** 2)")], {}),
    "the norm written out": ([(NORM, "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)")], {}),
    "sums in place": (
        [(BLOCK, "        x = x + self.attn(norm(x), value_embedding, cos, sin, window)\n        update = self.mlp(norm(x))\n        update += x\n        return update")],
        {},
    ),
    "positions without gradients": ([("        for i, block in enumerate", "        with torch.no_grad():\n            cos, sin = cos + 0.0, sin * 1.0\n        for i, block in enumerate")], {}),
    "dropout that is off": ([(MLP, "return F.dropout(self.c_proj(F.relu(self.c_fc(x)).square()), 0.0, self.training)")], {}),
    "post-norm": (
        [(BLOCK, "        x = x + norm(self.attn(norm(x), value_embedding, cos, sin, window))\n        return x + norm(self.mlp(norm(x)))")],
        {"rms_norm": 5},
    ),
    "GELU": ([(MLP, "return self.c_proj(F.gelu(self.c_fc(x)))")], {"add_norm_mlp": None, "add_norm_linear": 2, "linear": 4}),
    "SwiGLU": (
        [(FC, FC + "\n        self.c_gate = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)"), (MLP, "return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))")],
        {"add_norm_mlp": None, "swiglu": 2, "add_rms_norm": 3, "linear": 8},
    ),
    "GEGLU": (
        [(FC, FC + "\n        self.c_gate = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)"), (MLP, "return self.c_proj(F.gelu(self.c_gate(x), approximate='tanh') * self.c_fc(x))")],
        {"add_norm_mlp": None, "geglu": 2, "add_rms_norm": 3, "linear": 8},
    ),
    "the output gated": (
        [
            ("self.ve_gate_channels = 32", "self.ve_gate_channels = 32\n        self.c_gate = nn.Linear(config.n_embd, config.n_embd, bias=False)"),
            (ATTEND, "return self.c_proj(attention(q, k, v, window).reshape(B, T, -1) * torch.sigmoid(self.c_gate(x)))"),
        ],
        {"residual_mix_norm_linear": None, "residual_mix_norm_linear with update": None, "residual_mix_norm": 1, "residual_mix_norm with update": 1, "linear": 6},
    ),
    "partial rotary": (
        [(QK, "q, k = (norm(torch.cat([apply_rotary(t[..., :16], cos[..., :8], sin[..., :8]), t[..., 16:]], -1)) for t in (q, k))")],
        {"qkv_norm_rope": None, "qkv_norm_rope with value embedding": None, "rms_norm": 5, "residual_mix_norm_linear": None, "residual_mix_norm_linear with update": None, "residual_mix_norm": 1, "residual_mix_norm with update": 1, "linear": 9},
    ),
    "parallel attention and MLP": (
        [(BLOCK, "        h = norm(x)\n        return x + self.attn(h, value_embedding, cos, sin, window) + self.mlp(h)")],
        {"add_norm_mlp": None, "relu_squared": 2, "residual_mix_norm_linear": None, "residual_mix_norm_linear with update": None, "residual_mix_norm": 1, "residual_mix_norm with update": 1, "linear": 8},
    ),
    "learned weights of the norms": (
        [
            ("self.mlp = MLP(config)", "self.mlp = MLP(config)\n        self.scale = nn.Parameter(torch.ones(config.n_embd))"),
            ("self.attn(norm(x), value", "self.attn(F.rms_norm(x, (x.size(-1),), self.scale), value"),
        ],
        {"residual_mix_norm_linear": None, "residual_mix_norm_linear with update": None, "add_rms_norm": 3, "linear": 4},
    ),
    "U-net skips": ([("x = block(x, value", "skip = x if i == 0 else skip\n            x = block(x + (skip if i else 0), value")], {"residual_mix_norm_linear with update": None, "residual_mix_norm_linear": None, "add_norm_linear": 1, "rms_norm": 2, "linear": 3}),
    "a layer without attention": (
        [(BLOCK, "        if window >= 16:\n            x = x + self.attn(norm(x), value_embedding, cos, sin, window)\n        return x + self.mlp(norm(x))")],
        {"qkv_norm_rope": None, "residual_mix_norm_linear": None, "attention by kernels": 1, "linear": 1},
    ),
    "a mixture of experts": (
        [
            (FC, FC + "\n        self.router = nn.Linear(config.n_embd, 2, bias=False)\n        self.other = nn.Linear(config.n_embd, config.n_embd, bias=False)"),
            (MLP, "share = self.router(x).softmax(-1)\n        return share[..., :1] * self.c_proj(F.relu(self.c_fc(x)).square()) + share[..., 1:] * self.other(x)"),
        ],
        {"add_norm_mlp": None, "relu_squared": 2, "add_rms_norm": 3, "linear": 10},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits_lose_only_what_they_touch(monkeypatch, name):
    if DEVICE.type == "cpu" and EDITS[name][0]:
        put_definitions(monkeypatch)
    edits, changes = EDITS[name]
    counts, backend = compare(model_of(edited(*edits)), batch())
    expected = {n: c for n, c in (WHOLE | changes).items() if c}
    assert counts == expected, backend.report()
    assert not [graph.rejected for graph in backend.graphs if graph.rejected]


def test_grouped_heads():
    counts, _ = compare(model_of(edited(), n_head=4, n_kv_head=2), batch())
    assert counts == WHOLE


# What looks like something that a kernel computes, and is not: edits of train.py, and what may not be fused then.
ALIKE = {
    "rotated the other way": ([(ROTARY, "return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)")], QKV),
    "both halves rotated alike": ([(ROTARY, "return torch.cat([x1 * cos + x2 * sin, x1 * sin + x2 * cos], dim=-1)")], QKV),
    "halves the other way round": ([(ROTARY, "return torch.cat([x1 * -sin + x2 * cos, x1 * cos + x2 * sin], dim=-1)")], QKV),
    "k rotated otherwise": ([(QK, "q, k = norm(apply_rotary(q, cos, sin)), norm(apply_rotary(k, sin, cos))")], QKV),
    "k not normed": ([(QK, "q, k = norm(apply_rotary(q, cos, sin)), apply_rotary(k, cos, sin)")], QKV),
    "v from k": ([("v = self.c_v(x).view(", "v = self.c_k(x).view(")], ["qkv_norm_rope"]),
    "v from another input": ([("v = self.c_v(x).view(", "v = self.c_v(x.detach()).view(")], QKV),
    "a gate of 3": ([("gate = 2 * torch.sigmoid(", "gate = 3 * torch.sigmoid(")], ["qkv_norm_rope with value embedding"]),
    "a gate that is divided": ([("gate = 2 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels]))", "gate = torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels])) / 2")], ["qkv_norm_rope with value embedding"]),
    "gates of later channels": ([("x[..., : self.ve_gate_channels]", "x[..., self.ve_gate_channels :]")], ["qkv_norm_rope with value embedding"]),
    "a strict window": ([(SEEN, "seen = (distance >= 0) & (distance < window)")], []),  # fused, one key less
    "without oneself": ([(SEEN, "seen = (distance > 0) & (distance <= window) | (position[:, None] == 0)")], ["attention by kernels"]),
    "one from the future": ([(SEEN, "seen = (distance >= -1) & (distance <= window)")], ["attention by kernels"]),
    "attention that drops": ([("attn_mask=seen, enable_gqa", "attn_mask=seen, dropout_p=0.5, enable_gqa")], ["attention by kernels"]),
    "a mask that is added": ([("attn_mask=seen, enable_gqa", "attn_mask=torch.where(seen, 0.5, -1e9), enable_gqa")], ["attention by kernels"]),
    "leaky relu": ([(MLP, "return self.c_proj(F.leaky_relu(self.c_fc(x), 0.1).square())")], ["add_norm_mlp", "relu_squared"]),
    "relu cubed": ([(MLP, "return self.c_proj(F.relu(self.c_fc(x)) ** 3)")], ["add_norm_mlp", "relu_squared"]),
    "relu times what it was of": ([(MLP, "h = self.c_fc(x)\n        return self.c_proj(F.relu(h) * h.abs())")], ["add_norm_mlp", "relu_squared"]),
    "alpha": ([("return x + self.mlp(norm(x))", "return torch.add(x, self.mlp(norm(x)), alpha=2)")], ["residual_mix_norm_linear with update"]),
    "a large eps": ([(NORM, "return F.rms_norm(x, (x.size(-1),), eps=0.1).to(x.dtype)")], [*QKV, "add_norm_mlp", "residual_mix_norm_linear"]),
    "the norm of two dimensions": ([(NORM, "return F.rms_norm(x, x.shape[-2:]).to(x.dtype)")], [*QKV, "add_norm_mlp", "rms_norm"]),
    "a mean that is centred": ([(NORM, "return F.layer_norm(x, (x.size(-1),))")], [*QKV, "add_norm_mlp", "rms_norm", "add_rms_norm"]),
    "λ for each channel": ([(MIX, "x = self.resid_lambdas.repeat(32) * x + self.x0_lambdas[i] * x0")], ["residual_mix_norm_linear", "residual_mix_norm_linear with update"]),
    "label smoothing": ([(LOSS, LOSS.replace("ignore_index=-1", "ignore_index=-1, label_smoothing=0.1"))], ["linear_softcap_cross_entropy"]),
    "weighted classes": ([(LOSS, LOSS.replace("ignore_index=-1", "weight=torch.arange(64.0, device=logits.device), ignore_index=-1"))], ["linear_softcap_cross_entropy"]),
    "a cap that is not undone": ([(CAPPED, "logits = 15 * torch.tanh(logits / 14)")], ["linear_softcap_cross_entropy"]),
    "a cap of a sigmoid": ([(CAPPED, "logits = 15 * torch.sigmoid(logits / 15)")], ["linear_softcap_cross_entropy"]),
    "a bias": ([("self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)", "self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=True)")], ["linear_softcap_cross_entropy"]),
    "logits that are read again": ([(LOSS, LOSS + " + 1e-3 * logits.square().mean()")], ["linear_softcap_cross_entropy"]),
    "no gradient in the middle": ([(BLOCK, BLOCK.replace("return x + self.mlp(norm(x))", "with torch.no_grad():\n            y = self.attn(norm(x), value_embedding, cos, sin, window)\n        return x + y + self.mlp(norm(x))"))], list(WHOLE)),
    "a write into what was read": ([(BLOCK, BLOCK.replace("return x", "h = norm(x)\n        h.mul_(2)\n        return h + x"))], list(WHOLE)),
    "one that others read is written": ([(BLOCK, BLOCK.replace("return x + self.mlp(norm(x))", "y = x * 1\n        z = y[:]\n        y += 1\n        return z + self.mlp(norm(x))"))], list(WHOLE)),
    "detached": ([(BLOCK, BLOCK.replace("self.mlp(norm(x))", "self.mlp(norm(x).detach())"))], ["add_norm_mlp"]),
}  # fmt: skip


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "the proof alone"])
@pytest.mark.parametrize("name", ALIKE)
def test_what_only_looks_alike_stays_right(monkeypatch, name, guarded):
    edits, absent = ALIKE[name]
    put_definitions(monkeypatch)
    if not guarded:  # every operation has its name whatever its arguments are, and nothing is stateful
        monkeypatch.setattr(
            _graph, "_bound", lambda n, kind: (_graph.OPERATIONS[kind][1] | dict(zip(_graph.OPERATIONS[kind][1], n.args)) | n.kwargs, None)
        )
        monkeypatch.setattr(fusion, "stateful", lambda n: False)
    torch.manual_seed(0)
    model = model_of(edited(*edits))
    if name == "attention that drops":
        backend = kernels.Fusion(backend="eager")
        model.compile(backend=backend, dynamic=False)
        model(*batch())
        counts = {name: 1 for graph in backend.graphs for name, _ in graph.fused}
    else:
        counts, backend = compare(model, batch())
    if guarded:
        assert not set(counts) & set(absent), backend.report()
        assert not [graph.rejected for graph in backend.graphs if graph.rejected and "not the same" in graph.rejected], "the guards see it"


# ---- what it says, and other people's models -----------------------------------------------------------------------------------


def line_of(text):
    (line,) = [i for i, content in enumerate(SOURCE.splitlines(), 1) if text in content]
    return line


def test_the_report_names_lines_and_reasons():
    module = edited((LOSS, LOSS.replace("ignore_index=-1", "ignore_index=-1, label_smoothing=0.1")))
    model = model_of(module)
    said = kernels.explain(model, *batch()).splitlines()
    (mlp,) = [line for line in said if line.startswith("Fused: add_norm_mlp × 2 (train.py:")]
    assert {str(line_of(NORM)), str(line_of(MLP)), str(line_of("x = x + self.attn(norm(x)"))} <= set(
        mlp[:-1].split("train.py:")[1].split(", ")
    )
    assert f"Not fused: cross_entropy (train.py:{line_of(LOSS)}): with label_smoothing=0.1" in said
    assert [
        line for line in said if line.startswith("Left to torch.compile: ") and f"embedding (train.py:{line_of('x = x0 = norm(')})" in line
    ]
    assert model._compiled_call_impl is None, "the model stays as it was"


class Attention(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x):
        how = {k: self.mask if v == "buffer" else v for k, v in self.how.items()}
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, **how) * 1.0


@pytest.mark.parametrize(("how", "said"), [
    (dict(is_causal=True), "Fused: attention by kernels × 1"),
    (dict(is_causal=True, scale=0.3), "Fused: attention by kernels × 1"),
    (dict(), "it is not causal"),
    (dict(attn_mask="buffer"), "its mask depends on what the graph is given"),
    (dict(is_causal=True, dropout_p=0.1), "with dropout_p=0.1"),
])  # fmt: skip
def test_attention_of_others(how, said):
    model, x = Attention(**how).to(DEVICE), torch.randn(2, 16, 64, device=DEVICE, requires_grad=True)
    assert said in kernels.explain(model, x)
    if "dropout_p" not in how:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=kernels.Fusion(backend=BACKEND), dynamic=False)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


def test_what_varies_is_left_and_said():
    backend = kernels.Fusion(backend="eager")
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(64, 64, bias=False, device=DEVICE), backend=backend, dynamic=True)
    assert compiled(torch.randn(5, 64, device=DEVICE)).shape == (5, 64)
    assert "compile with dynamic=False" in backend.report()[0]


def test_which_attention_is_asked_once_for_all_of_it_and_followed(monkeypatch):
    """As backends.Chosen answers: the kernels for the window, torch's own for the whole context, without the mask that keeps it slow."""
    put_definitions(monkeypatch)
    asked = []

    def choose(cases):
        asked.append(cases)
        return ["sdpa" if window is None else "kernels" for window, *_ in cases]

    model, inputs = model_of(edited(), n_layer=3), batch()
    backend = kernels.Fusion(attention=choose, backend=BACKEND)
    check(model, inputs, backend)
    shape = (3, 16, 2, 2, 32)
    assert [[(window, s, bounded) for window, s, bounded, _ in cases] for cases in asked] == [[(8, shape, True), (None, shape, True)]]
    said = "\n".join(backend.report())
    assert "attention by kernels × 1" in said and "attention by torch, without the mask × 2" in said


def test_products_are_named_before_they_are_used(monkeypatch):
    put = []
    model = model_of(edited())
    backend = kernels.Fusion(products=lambda shapes, rows, device: put.append((shapes, rows)), backend="eager")
    torch._dynamo.reset()
    model.compile(backend=backend, dynamic=False)
    model(*batch())
    ((shapes, rows),) = put
    packed = 3 * 64
    assert rows == 3 * 16 and set(shapes) == {(64, 64), (64, 256), (256, 64), (packed, 64), (packed + 16, 64)}


def test_a_wrong_rule_is_caught_by_the_proof(monkeypatch):
    """A rule that takes relu for relu²: the graph is left whole, and the numbers are right."""
    put_definitions(monkeypatch)
    monkeypatch.setattr(_rules, "_relu_squared", lambda n: _graph.args(n)[0] if _graph.op(n) == "relu" else None)
    counts, backend = compare(model_of(edited()), batch())
    assert counts == {} and "the fused graph is not the same" in backend.report()[0]

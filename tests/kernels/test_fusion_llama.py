"""kernels.fuse on a model that knows nothing of it: transformers' Llama, tiny, with random weights."""

import pytest
import torch

import kernels

transformers = pytest.importorskip("transformers")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_llama():
    """Norms with their sums and weights, SwiGLU, attention with grouped KV heads: found, and right in logits, loss and all gradients."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(DEVICE)
    ids = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(call):
        model.zero_grad()
        out = call(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}

    torch._dynamo.reset()
    backend = kernels.Fusion(backend="aot_eager")
    plain, fused = run(model), run(torch.compile(model, backend=backend, dynamic=False))
    torch.testing.assert_close(fused[0], plain[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused[1], plain[1], atol=1e-5, rtol=1e-5)
    for name, g in plain[2].items():
        assert (fused[2][name] - g).norm() <= 1e-4 * g.norm(), name
    (graph,) = backend.graphs
    found = {name: sum(n == name for n, _ in graph.fused) for name, _ in graph.fused}
    assert found == {"attention by kernels": 2, "rms_norm": 1, "add_rms_norm": 4, "swiglu": 2, "linear": 15}, backend.report()
    assert any("the logits are read by others too" in line for line in backend.report())

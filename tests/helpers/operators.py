"""What the tests of the kernels share: values, rotary tables, and how an operator is compiled."""

import torch


def values(shape, dtype, device, seed=0, scale=1.0):
    """Normal numbers, the same on every device and in every dtype, but for its rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device=device, dtype=dtype)


def tables(T, head_dim, device, dtype=torch.bfloat16, base=10000):
    """cos and sin (T, head_dim/2) as a model makes them: computed in float32, stored in bfloat16."""
    frequency = 1.0 / base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.outer(torch.arange(T, device=device).float(), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def assert_compiles_once(step, draw, parameters, device, rtol=1e-4, atol=1e-5):
    """`step(*draw(seed))` compiles without a graph break, once for three draws, and gives the eager loss and gradients.

    The gradients are those of the drawn inputs that require one, and of `parameters`, within rtol and atol.
    """
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            inputs = draw(seed)
            ours, exact = compiled(*inputs), step(*inputs)
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
            trained = [*(x for x in inputs if x.requires_grad), *parameters]
            for a, b in zip(torch.autograd.grad(ours, trained), torch.autograd.grad(exact, trained)):
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol)

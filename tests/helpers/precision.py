"""One measure of "as accurate as torch": our error against the exact result, over that of torch's own low-precision path."""

import torch


def assert_close_to_reference(ours, low_precision, exact, factor, what, additions=0):
    """max-abs and rms error of `ours` against `exact` are at most `factor` times those of `low_precision`.

    ours, low_precision: a kernel's result and the eager reference's, in the dtype under test; exact: the reference in float64.
    Where torch happens to be nearly exact a floor applies: rounding to the dtype cannot be beaten, so one ulp of the largest
    value (max) and of the rms value (rms) is always allowed; two in float32, where a GPU's rsqrt and exp are an ulp off themselves.

    additions: how many float32 roundings stand in a row behind one element, one for each term of a sum. Their order is anyone's, so in
    float32, where torch's own order may happen to be the better one, what they come to is allowed as well: each is at most half an ulp, of
    either sign, and so they grow as √additions (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.8).
    """
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    assert ours.dtype == low_precision.dtype, f"{what}: dtype {ours.dtype}, expected {low_precision.dtype}"
    if exact.numel() == 0:
        return
    exact = exact.double()
    assert torch.isfinite(exact).all(), f"{what}: the reference itself is not finite"
    ulp = torch.finfo(ours.dtype).eps * (2 if ours.dtype == torch.float32 else 1)
    order = additions**0.5 * torch.finfo(torch.float32).eps / 2 if ours.dtype == torch.float32 else 0.0
    errors = [(t.double() - exact).abs() for t in (ours, low_precision)]
    for measure, size in (("max", lambda t: t.abs().max()), ("rms", lambda t: t.square().mean().sqrt())):
        mine, theirs = (size(e).item() for e in errors)
        allowed = max(factor * theirs, ulp * size(exact).item()) + order * size(exact).item()
        assert mine <= allowed, f"{what}: {measure} error {mine:.3e}, torch's {theirs:.3e}, allowed {allowed:.3e}"  # NaN fails too

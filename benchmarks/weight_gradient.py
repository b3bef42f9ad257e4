"""How is a weight's gradient formed fastest here? Every form of kernels/linear.py by every BLAS library, at the shapes of train.py.

    python benchmarks/weight_gradient.py [--rows 32768] [--shapes 1552x512 512x2048] [--weight bfloat16] [--rounds 30]

Prints TFLOP/s, and then the lines that bring a better way than torch's own into `WEIGHT_GRADIENT`: those at least 5 % faster. Needs a GPU.

Variants take turns within a round, in a new order each round, on inputs that no cache holds; medians. Each result is compared with the
first's before it is timed. A product that reads dyᵀ and x along their rows is what libraries are worst at, and by how much depends on the
shape: 4096³ on gfx1151 was published as 40.5 TFLOP/s by rocBLAS and 16.3 by hipBLASLt, of which the latter is faster in every other layout.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.linear import FORMS, WEIGHT_GRADIENT, weight_gradient

# (out, in) of depth 8: q, k, v with gates and without, both output projections, the MLP's first product
SHAPES = ("1552x512", "1536x512", "512x512", "2048x512", "512x2048")
COLD = 512 * 2**20  # bytes of the inputs that take turns, beyond every cache
WORTH = 1.05


def libraries():
    """What can be chosen here; None, torch's own choice, first."""
    found, before = [None], torch.backends.cuda.preferred_blas_library()
    for name in ("cublas", "cublaslt", "ck"):
        try:
            torch.backends.cuda.preferred_blas_library(name)
            found.append(name)
        except RuntimeError:  # not built into this torch, or not for this part
            pass
    torch.backends.cuda.preferred_blas_library(before)
    return found


def milliseconds(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(out, width, rows, dtype, weight, rounds):
    """{(form, library): median ms}"""
    sets = max(2, COLD // (rows * (out + width) * 2))
    inputs = [
        (torch.randn(rows, out, device="cuda", dtype=dtype), torch.randn(rows, width, device="cuda", dtype=dtype)) for _ in range(sets)
    ]

    def form(choice, dy, x):
        WEIGHT_GRADIENT[out, width] = choice
        return weight_gradient(dy, x, weight)

    choices = [(form, library) for form in FORMS for library in libraries()]
    first = form(choices[0], *inputs[0]).float()
    for choice in choices:
        difference = (form(choice, *inputs[0]).float() - first).norm() / first.norm()
        assert difference < 0.01, f"{choice} differs from {choices[0]} by {difference:.1%} at {out}×{width}"
    times = {choice: [] for choice in choices}
    for n in range(rounds):
        for choice in random.sample(choices, len(choices)):
            times[choice].append(milliseconds(lambda c=choice, i=inputs[n % sets]: form(c, *i)))
    del WEIGHT_GRADIENT[out, width]
    return {choice: statistics.median(t) for choice, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32768, help="tokens of a micro-batch (default: %(default)s)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="OUTxIN (default: train.py's)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of the product")
    parser.add_argument("--weight", default="float32", choices=("float32", "bfloat16", "float16"), help="of the weight and its gradient")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("weight_gradient: needs a GPU that torch can see")
    dtype, weight = getattr(torch, options.dtype), getattr(torch, options.weight)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {options.rows} rows, {options.dtype}, weight {options.weight}\n")
    print(f"{'out × in':>12}  {'form':12}{'library':12}{'ms':>9}{'TFLOP/s':>10}{'× torch':>10}")
    found = []
    for shape in options.shapes:
        out, width = map(int, shape.split("x"))
        times = measure(out, width, options.rows, dtype, weight, options.rounds)
        own = times["direct", None]
        for (form, library), ms in sorted(times.items(), key=lambda item: item[1]):
            rate = 2 * options.rows * out * width / ms / 1e9
            print(f"{f'{out} × {width}':>12}  {form:12}{library or 'own choice':12}{ms:9.4f}{rate:10.1f}{own / ms:10.2f}", flush=True)
        best = min(times, key=times.get)
        if own > WORTH * times[best]:
            found.append(f"    ({out}, {width}): {best!r},  # {own / times[best]:.2f} times as fast as torch's own")
    print("\nWEIGHT_GRADIENT = {" + ("\n" + "\n".join(found) + "\n}" if found else "}: torch's own choice is as good as any"))


if __name__ == "__main__":
    main()

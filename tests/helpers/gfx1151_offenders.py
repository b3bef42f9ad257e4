"""Kernels that break a rule of benchmarks/gfx1151_report.py, each one its own: the report has to say so.

    python benchmarks/gfx1151_report.py tests.helpers.gfx1151_offenders

Two of them break none, so that a rule which finds everything is found out too.
"""

import triton
import triton.language as tl

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


@triton.jit
def copy_kernel(X, Y, X_STEP: tl.constexpr, Y_STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at * Y_STEP, tl.load(X + at * X_STEP))


@triton.jit
def square_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(Y + at, x * x + x)  # in bfloat16


@triton.jit
def softmax_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + at, (e / tl.sum(e, 0)).to(Y.dtype.element_ty))


@triton.jit
def transpose_kernel(X, Y, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(Y + n[:, None] * M + m[None, :], tl.trans(tl.load(X + m[:, None] * N + n[None, :])))


@triton.jit
def matmul_kernel(X, Y, M: tl.constexpr, K: tl.constexpr):
    """Y (M, M) = X Xᵀ."""
    m = tl.arange(0, M)
    x = tl.load(X + m[:, None] * K + tl.arange(0, K)[None, :])
    tl.store(Y + m[:, None] * M + m[None, :], tl.dot(x, tl.trans(x), input_precision="ieee"))


def gfx1151_cases():
    """`breaks`: the rules that the report must name, no more and no less."""

    def case(kernel, kind, breaks, num_warps=4, dtype="*bf16", out=None, wide=False, **constexprs):
        signature = {"X": dtype, "Y": out or dtype, **dict.fromkeys(constexprs, "constexpr")}
        return {"name": kernel.__name__, "kernel": kernel, "signature": signature, "constexprs": constexprs, "kind": kind,
                "options": {"num_warps": num_warps, "num_stages": 1}, "shape": "", "default": True, "multiples_of_16": (),
                "wide": wide, "breaks": breaks}  # fmt: skip

    yield case(copy_kernel, "memory", [], X_STEP=1, Y_STEP=1, BLOCK=2048)
    yield case(copy_kernel, "memory", ["narrow loads"], X_STEP=2, Y_STEP=1, BLOCK=2048)
    yield case(copy_kernel, "memory", ["narrow stores"], X_STEP=1, Y_STEP=2, BLOCK=2048)
    yield case(softmax_kernel, "memory", ["waves"], num_warps=1, BLOCK=4096)
    yield case(softmax_kernel, "memory", ["spills", "scratch", "waves"], num_warps=1, BLOCK=8192)
    yield case(matmul_kernel, "matmul", [], out="*fp32", M=64, K=64)
    yield case(matmul_kernel, "matmul", ["no WMMA"], dtype="*fp32", M=16, K=32)
    lds = ["LDS"] if VERSION >= (3, 7) else []  # 3.6 transposes in parts
    yield case(transpose_kernel, "memory", lds, num_warps=16, dtype="*fp32", wide=True, M=128, N=256)
    dot2 = ["v_dot2_bf16_bf16"] if VERSION < (3, 9) else []  # 3.9 multiplies bfloat16 in float32: the rule has nothing to find
    yield case(square_kernel, "memory", dot2, BLOCK=2048)

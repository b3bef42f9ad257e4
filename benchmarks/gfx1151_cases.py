"""What the kernels launch at the shapes of train.py and the README, for gfx1151_report.py: a case for each kernel, shape and candidate.

A case: name, kernel, signature and constexprs as Triton's compiler takes them, options (warps, stages), multiples_of_16 (integers that
are), kind ("matmul" or "memory"), shape in words, default (whether it is the first candidate), stores and wide where they are not the rule.
"""

import itertools
from importlib import import_module


def rms_norm():
    """train.py's width 512 without weight, and the widths of the README with one."""
    m = import_module("kernels.rms_norm")
    ints = {"stride_x": "i32", "eps": "fp32"}
    for width, dtype in [(128, "bf16"), (512, "bf16"), (2048, "bf16"), (4096, "bf16"), (5120, "bf16"), (8192, "bf16"), (8192, "fp32"),
                         (16384, "bf16")]:
        wide = width > m.MAX_TILE_WIDTH
        for weighted in (False, True):
            for added in (False, True):
                ROWS, BLOCK, num_warps = m.tile(width)
                p = f"*{dtype}"
                w, extra = (p if weighted else "constexpr"), (p if added else "constexpr")
                shape = f"(rows, {width}) {dtype}" + (", weight" if weighted else "")
                size = {"N": width, "BLOCK": BLOCK} if wide else {"N": width, "ROWS": ROWS, "BLOCK": BLOCK}
                common = {"options": {"num_warps": num_warps, "num_stages": 1}, "kind": "memory", "shape": shape, "default": True,
                          "multiples_of_16": ("stride_x", "stride_r", "stride_dy", "stride_ds")}
                for rstd_alone in (False, True) if added and not weighted and not wide else (False,):
                    y, rstd = ("constexpr", "*fp32") if rstd_alone else (p, "constexpr")
                    results = {"Y": y} if wide else {"Y": y, "RSTD": rstd, "n_rows": "i32"}
                    signature = {"X": p, "R": extra, "W": w, "S": extra, **results, "stride_x": "i32", "stride_r": "i32", "eps": "fp32",
                                 **dict.fromkeys(size, "constexpr")}
                    absent = {name: None for name, kind in signature.items() if kind == "constexpr" and name not in size}
                    yield {"name": "add_rstd" if rstd_alone else "add_rms_norm" if added else "rms_norm",
                           "kernel": m.rms_norm_wide_kernel if wide else m.rms_norm_kernel,
                           "signature": signature, "constexprs": {**absent, **size}, **common}
                ROWS, BLOCK, num_warps = m.tile(width, 1024 if weighted else 2048)
                common = {**common, "options": {"num_warps": num_warps, "num_stages": 1}}
                partial = "*fp32" if weighted else "constexpr"
                last = {"RSTD": partial} if wide else {"DW": partial, "n_rows": "i32", "n_tiles": "i32", "n_programs": "i32"}
                names = [("add_rms_norm" if added else "rms_norm") + "_backward"]
                if added and not weighted and not wide:
                    names += ["add_norm_linear_backward", "add_norm_mlp_backward"]
                for name in names:
                    y, size = {}, {"N": width, "BLOCK": BLOCK}
                    if not wide:
                        y = {"Y": p if name == "add_norm_linear_backward" else "constexpr"}  # the norm once more
                        size |= {"ROWS": ROWS, "SCALED": name == "add_norm_mlp_backward"}
                    signature = {"DY": p, "DS": extra, "X": p, "W": w, "DX": p, **y, **last, "stride_dy": "i32", "stride_ds": "i32",
                                 **ints, **dict.fromkeys(size, "constexpr")}
                    absent = {name: None for name, kind in signature.items() if kind == "constexpr" and name not in size}
                    yield {"name": name, "kernel": m.rms_norm_backward_wide_kernel if wide else m.rms_norm_backward_kernel,
                           "signature": signature, "constexprs": {**absent, **size}, **common}
        if wide:
            signature = {"DY": p, "X": p, "RSTD": "*fp32", "DW": "*fp32", "n_rows": "i32", "rows_each": "i32", "stride_dy": "i32",
                         "stride_x": "i32", "N": "constexpr", "BLOCK": "constexpr"}
            yield {"name": "rms_norm_dweight", "kernel": m.rms_norm_dweight_wide_kernel,
                   "signature": signature, "constexprs": size, **common}


def gated():
    """flat tensors (one row), the halves of (rows, 2·2048), and rows with scales (mlp.py)."""
    m = import_module("kernels.gated")
    shapes = {"relu_squared": ("flat bf16", "(rows, 2048) bf16, scales"), "silu": ("flat bf16",)}
    for activation in ("relu_squared", "silu", "gelu", "gelu_tanh"):
        for shape in shapes.get(activation, ("flat bf16", "(rows, 2·2048) bf16")):
            BLOCK, num_warps = m.block(2048)
            p, u = "*bf16", "constexpr" if activation == "relu_squared" else "*bf16"
            sizes = {"ACTIVATION": "constexpr", "BLOCK": "constexpr"}
            strides = ("stride_dy", "stride_g", "stride_u", "stride_dg", "stride_du")
            common = {"options": {"num_warps": num_warps, "num_stages": 1}, "kind": "memory", "shape": shape, "default": True,
                      "multiples_of_16": ("n_cols", *strides)}
            values = {"ACTIVATION": activation, "BLOCK": BLOCK}
            s = "*fp32" if "scales" in shape else "constexpr"
            absent = {name: None for name, kind in (("U", u), ("S", s)) if kind == "constexpr"}
            yield {"name": activation, "kernel": m.gated_kernel, "constexprs": {**absent, **values}, **common,
                   "signature": {"G": p, "U": u, "S": s, "Y": p, "n_cols": "i32", "n_blocks": "i32", "stride_g": "i32",
                                 "stride_u": "i32", **sizes}}
            if activation == "relu_squared":
                absent, values = {**absent, "DU": None}, {**values, "ACTIVATION": "relu_squared_from_output"}
            yield {"name": activation + "_backward", "kernel": m.gated_backward_kernel, "constexprs": {**absent, **values}, **common,
                   "signature": {"DY": p, "G": p, "U": u, "S": s, "DG": p, "DU": u, "n_cols": "i32", "n_blocks": "i32",
                                 **dict.fromkeys(strides, "i32"), **sizes}}


def qk_norm_rope():
    """train.py's heads, a packed qkv, and grouped heads of 64."""
    m = import_module("kernels.qk_norm_rope")
    for n_head, n_kv_head, head_dim in [(4, 4, 128), (32, 4, 128), (8, 8, 64)]:
        ROWS, BLOCK, num_warps = m.tile(head_dim)
        q, k = (tuple(f"stride_{x}_{d}" for d in "bth") for x in "qk")
        dq, dk = (tuple(f"stride_d{x}_{d}" for d in "bth") for x in "qk")
        p = "*bf16"
        values = {"N_HEAD": n_head, "N_KV_HEAD": n_kv_head, "HALF": head_dim // 2, "ROWS": ROWS, "BLOCK": BLOCK}
        common = {"constexprs": values, "options": {"num_warps": num_warps, "num_stages": 1}, "kind": "memory", "default": True,
                  "shape": f"{n_head}/{n_kv_head} heads of {head_dim} bf16", "multiples_of_16": ("T", *q, *k, *dq, *dk)}
        last = {"eps": "fp32", **dict.fromkeys(values, "constexpr")}
        yield {"name": "qk_norm_rope", "kernel": m.qk_norm_rope_kernel, **common, "signature": {
            **dict.fromkeys(("Q", "K", "OUT_Q", "OUT_K", "COS", "SIN"), p), "T": "i32", "q_programs": "i32",
            **dict.fromkeys(q + k, "i32"), **last}}
        yield {"name": "qk_norm_rope_backward", "kernel": m.qk_norm_rope_backward_kernel, **common, "signature": {
            **dict.fromkeys(("DY_Q", "DY_K", "Q", "K", "DQ", "DK", "COS", "SIN"), p), "T": "i32", "q_programs": "i32",
            **dict.fromkeys(dq + dk + q + k, "i32"), **last}}


def qkv():
    """train.py's heads with and without a table, and grouped heads of 64."""
    m = import_module("kernels.qkv")
    for n_head, n_kv_head, head_dim in [(4, 4, 128), (8, 2, 64)]:
        for residual in (True, False):
            ROWS, BLOCK, num_warps = m.tile(head_dim)
            dy = tuple(f"stride_{x}_{d}" for x in "qkv" for d in "bth")
            p, f, r, i = "*bf16", "*fp32", *(("*bf16", "*i64") if residual else ("constexpr", "constexpr"))
            values = {"N_HEAD": n_head, "N_KV_HEAD": n_kv_head, "HALF": head_dim // 2, "ROWS": ROWS, "BLOCK": BLOCK}
            common = {"options": {"num_warps": num_warps, "num_stages": 1}, "kind": "memory", "default": True,
                      "shape": f"{n_head}/{n_kv_head} heads of {head_dim} bf16{', value residual' if residual else ''}",
                      "multiples_of_16": ("T", "rstd_k", "stride_b", "stride_t", "vocab", *dy)}
            numbers = dict.fromkeys(("T", "k_first", "v_first", "rstd_k"), "i32")
            gate = {"GATE": f if residual else "constexpr"}
            absent = {} if residual else {"IDX": None, "TABLE": None, "GATE": None}
            yield {"name": "qkv_norm_rope", "kernel": m.qkv_kernel, **common, "constexprs": {**absent, **values}, "signature": {
                "QKV": p, "COS": p, "SIN": p, "IDX": i, "TABLE": r, **dict.fromkeys(("OUT_Q", "OUT_K", "OUT_V"), p), "RSTD": f, **gate,
                **numbers, "stride_b": "i32", "stride_t": "i32", "vocab": "i32", "eps": "fp32", **dict.fromkeys(values, "constexpr")}}
            absent, values = absent if residual else {**absent, "DE": None}, {**values, "PAD": m.gate_columns(n_kv_head) if residual else 0}
            constexprs = {**absent, **values}
            yield {"name": "qkv_norm_rope_backward", "kernel": m.qkv_backward_kernel, **common, "constexprs": constexprs, "signature": {
                **dict.fromkeys(("DY_Q", "DY_K", "DY_V", "Q", "K"), p), "RSTD": f, **gate, "COS": p, "SIN": p, "IDX": i, "TABLE": r,
                "DQKV": p, "DE": r, **numbers, **dict.fromkeys(dy, "i32"), "stride_t": "i32", "vocab": "i32",
                **dict.fromkeys(values, "constexpr")}}


def residual_mix():
    """train.py's width, and wider models'; with an update, which is what train.py has."""
    m = import_module("kernels.residual_mix")
    for width in (512, 768, 2048, 8192):
        ROWS, BLOCK, num_warps = m.tile(width)
        p, f, size = "*bf16", "*fp32", {"N": width, "ROWS": ROWS, "BLOCK": BLOCK}
        common = {"constexprs": size, "options": {"num_warps": num_warps, "num_stages": 1}, "kind": "memory", "default": True,
                  "shape": f"(rows, {width}) bf16, update", "multiples_of_16": ("stride_x", "stride_u", "stride_x0", "stride_dmixed",
                                                                                "stride_dy")}
        streams = {"X": p, "U": p, "X0": p, "RESID": f, "EMBED": f}
        last = {"stride_x": "i32", "stride_u": "i32", "stride_x0": "i32", "eps": "fp32", **dict.fromkeys(size, "constexpr")}
        yield {"name": "residual_mix_norm", "kernel": m.residual_mix_norm_kernel, **common,
               "signature": {**streams, "MIXED": p, "Y": p, "n_rows": "i32", **last}}
        for again in (False, True):  # the norm written once more
            yield {"name": f"residual_mix_norm{'_linear' if again else ''}_backward", **common,
                   "kernel": m.residual_mix_norm_backward_kernel,
                   "constexprs": size if again else {"Y": None, **size}, "signature": {
                       "DMIXED": p, "DY": p, **streams, "DX": p, "DX0": p, "Y": p if again else "constexpr", "SUMS": f, "n_rows": "i32",
                       "stride_dmixed": "i32", "stride_dy": "i32", **last}}

_POINTERS = {"q", "k", "v", "o", "do", "dq", "dk", "dv"}
_STRIDES = ("_b", "_t", "_h")


def attention():
    """Every candidate for gfx1151 in bfloat16: head_dim 128 (train.py: 4 heads, T 2048) and 64, causal with and without a window and
    with heads in groups of 4, full, and bounded scores. What to compile, and what a launch will tell the compiler."""
    m = import_module("kernels.attention")

    def case(name, kernel, shape, constexprs, options, kind, default):
        signature = {
            n: "constexpr" if n in constexprs else "*bf16" if n in _POINTERS else "*fp32" if n in ("lse", "delta", "rows")
            else "fp32" if n.startswith("scale") else "i32" for n in kernel.arg_names}
        return dict(name=name, kernel=kernel, signature=signature, constexprs=constexprs, options=options, kind=kind, shape=shape,
                    default=default, multiples_of_16=tuple(n for n in kernel.arg_names if n.endswith(_STRIDES)))

    for head_dim in (128, 64):
        fused = head_dim <= m.FUSE_DKDV_TO["hip"]
        passes = [("forward", m._forward_kernel, m.FORWARD_CONFIGS, dict(FIXED_PEAK=bounded)) for bounded in (False, True)]
        passes += [("dq", m._dq_kernel, m.DQ_CONFIGS, {})] + [
            (name, m._dkdv_kernel, m.DKDV_CONFIGS, dict(DK="dk" in name, DV="dv" in name))
            for name in (["dkdv"] if fused else ["dv", "dk"])]
        for (name, kernel, table, flags), (group, sees) in itertools.product(
                passes, ((1, "causal"), (1, "window"), (4, "causal"), (1, "full"))):
            shape = f"head_dim {head_dim}, {sees}" + (", groups of 4" if group > 1 else "")
            shape += ", bounded" if flags.get("FIXED_PEAK") else ""
            for i, config in enumerate(table[head_dim]["hip"]):
                tile = {n: x for n, x in config.kwargs.items() if n != "waves_per_eu"}
                options = {n: x for n, x in config.all_kwargs().items() if n in ("num_warps", "num_stages", "waves_per_eu")}
                constexprs = dict(GROUP=group, CAUSAL=sees != "full", WINDOWED=sees == "window", HEAD_DIM=head_dim, BLOCK_D=head_dim,
                                  **flags, **tile)
                which = f"flash_attention {name} {tile['BLOCK_M']}×{tile['BLOCK_N']}"
                yield case(which, kernel, shape, constexprs, options, "matmul", i == 0)
        constexprs = dict(HEAD_DIM=head_dim, BLOCK_D=head_dim, BLOCK_M=m.DELTA_ROWS)
        options = dict(num_warps=4, num_stages=1)
        delta = case("flash_attention delta", m._delta_kernel, f"head_dim {head_dim}", constexprs, options, "memory", True)
        yield {**delta, "stores": False}  # one number a row


def cross_entropy():
    """train.py's vocabulary (8,192), upstream's default (32,768), one that is no multiple of a block, and one that is looped over."""
    m = import_module("kernels.cross_entropy")
    for vocab, dtype in ((8192, "bf16"), (8192, "fp32"), (32768, "bf16"), (50304, "bf16"), (262144, "bf16")):
        pointers = {"logits": f"*{dtype}", "targets": "*i64", "stats": "*fp32"}
        capped = {"SOFTCAP": 15.0}
        common = {"kind": "memory", "shape": f"(rows, {vocab}) {dtype}", "default": True, "wide": vocab > 8192,
                  "multiples_of_16": ("vocab", "stride", "stats_stride", "out_stride")}  # fmt: skip
        block, num_warps = m._row_block(vocab, "hip")
        for name, grad in (("softcap_cross_entropy", False), ("linear_softcap_cross_entropy, a chunk", True)):
            constexprs = {**capped, "STATS": not grad, "GRAD": grad, "MASKED": vocab % block != 0, "LOOP": vocab > block, "BLOCK": block}
            signature = {**pointers, "losses": "*fp32", **dict.fromkeys(constexprs, "constexpr")}
            yield {"name": name, "kernel": m._row_kernel, "constexprs": constexprs, "options": {"num_warps": num_warps},
                   "signature": {n: signature.get(n, "i32") for n in m._row_kernel.arg_names}, "stores": grad, **common}  # fmt: skip
        block, num_warps = m._backward_block(vocab)
        constexprs = {**capped, "REDUCED": True, "MASKED": vocab % block != 0, "BLOCK": block}
        signature = {**pointers, "out": f"*{dtype}", "grad": "*fp32", "factor": "*fp32", **dict.fromkeys(constexprs, "constexpr")}
        yield {
            "name": "softcap_cross_entropy, backward",
            "kernel": m._backward_kernel,
            "constexprs": constexprs,
            "options": {"num_warps": num_warps},
            "signature": {n: signature.get(n, "i32") for n in m._backward_kernel.arg_names},
            **common,
        }
    small = {"kind": "memory", "default": True, "multiples_of_16": ("rows", "n")}
    yield {"name": "mean of the rows' losses", "kernel": m._reduce_kernel, "constexprs": {"MEAN": True, "BLOCK": m.REDUCE_BLOCK},
           "options": {"num_warps": 16}, "shape": "(rows,)", "stores": False, **small,
           "signature": {"losses": "*fp32", "targets": "*i64", "loss": "*fp32", "factor": "*fp32", "rows": "i32", "ignore_index": "i32",
                         "MEAN": "constexpr", "BLOCK": "constexpr"}}  # fmt: skip
    for a, b in (("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16")):
        yield {
            "name": "linear_softcap_cross_entropy, backward",
            "kernel": m._scale_kernel,
            "constexprs": {"BLOCK": m.SCALE_BLOCK},
            "options": {"num_warps": 8},
            "shape": f"flat {a} to {b}",
            **small,
            "signature": {"values": f"*{a}", "grad": "*fp32", "factor": "*fp32", "out": f"*{b}", "n": "i32", "BLOCK": "constexpr"},
        }

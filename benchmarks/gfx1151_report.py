"""What the compiler makes of every kernel for gfx1151 (Strix Halo), on any machine: registers, spills, LDS, waves, instructions.

    python benchmarks/gfx1151_report.py                       # all candidates of all kernels, a table and gfx1151.csv
    python benchmarks/gfx1151_report.py cross_entropy --defaults --no-large --csv report.csv
    PYTHONPATH=path/to/another/triton python benchmarks/gfx1151_report.py attention

gfx1151_cases.py has what each kernel module launches at the shapes of train.py and the README. Compiled is the code
that would run: with the facts that Triton's launcher gives (pointers aligned to 16 bytes, storages below 2 GiB, strides that
are multiples of 16). Beside it stands what tensors of 2 GiB or more get, which no longer fit 32-bit buffer offsets. Nothing here is a
measurement: it is the instruction stream, and arithmetic on it (`waves`).

A case breaks a rule, and is marked, if it spills, uses scratch or more LDS than a workgroup has; if a matrix product has no
WMMA; if v_dot2_bf16_bf16 appears, which truncates (Triton 3.6 to 3.8 make it of bf16 * bf16); if a memory-bound kernel reads or
writes less than three quarters of its bytes 128 bits at a time (the rest: a number a row, a narrow row's weight), or leaves room
for fewer than 16 waves a SIMD at row widths up to 8,192.
"""

import argparse
import collections
import csv
import importlib
import os
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton.jit decorates: interpreted kernels cannot be compiled
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import gfx1151_cases
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("hip", "gfx1151", 32)
WIDE_SHARE = 0.75  # of a memory-bound kernel's bytes, in 128-bit accesses
MODULES = ("rms_norm", "gated", "qk_norm_rope", "qkv", "residual_mix", "attention", "cross_entropy")
LDS_PER_WORKGROUP, LDS_PER_WGP, VGPRS_PER_SIMD, VGPR_GRANULE, MAX_WAVES = 65536, 131072, 1536, 24, 16
COLUMNS = ("kernel", "shape", "options", "default", "vgprs", "spills", "scratch", "lds", "waves", "wmma", "load128", "load", "load_wide",
           "store128", "store", "store_wide", "dot2", "vgprs_2gib", "spills_2gib", "broken")  # fmt: skip


def cases(modules=MODULES):
    """The cases of every module: of one of `kernels` those in gfx1151_cases.py, of any other, by its dotted name, its `gfx1151_cases()`."""
    for module in modules:
        yield from importlib.import_module(module).gfx1151_cases() if "." in module else getattr(gfx1151_cases, module)()


def compile_for_gfx1151(kernel, signature, constexprs, options, multiples_of_16=(), aligned=None, below_2_gib=True):
    """Compile with what Triton's launcher would tell the compiler.

    signature: {parameter: Triton type or "constexpr"}, all parameters in order; multiples_of_16: names of such integers;
    aligned: names of pointers that are multiples of 16 bytes, None for all of them.
    """
    attrs = {}
    for i, (name, kind) in enumerate(signature.items()):
        pointer = kind.startswith("*")
        facts = []
        if (pointer and (aligned is None or name in aligned)) or (not pointer and kind != "constexpr" and name in multiples_of_16):
            facts.append(["tt.divisibility", 16])
        if pointer and below_2_gib:
            facts.append(["tt.pointer_range", 32])
        if facts:
            attrs[(i,)] = facts
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=TARGET, options=options)


def waves(vgprs, lds, num_warps):
    """Waves that fit a SIMD: 1,536 VGPRs a lane in granules of 24, and 128 KiB of LDS among the four SIMDs of a WGP."""
    by_registers = VGPRS_PER_SIMD // (VGPR_GRANULE * -(-max(vgprs, 1) // VGPR_GRANULE))
    by_lds = LDS_PER_WGP // lds * num_warps // 4 if lds else MAX_WAVES
    return min(MAX_WAVES, by_registers, by_lds)


def read(compiled):
    """The figures of a compiled kernel, from its assembly and metadata."""
    assembly = compiled.asm["amdgcn"]

    def figure(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])

    opcodes = collections.Counter(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE))

    def count(pattern):
        return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))

    def wide(access):
        """Share of the bytes that are accessed 128 bits at a time, of the instructions as they stand (a loop's count once)."""
        widths = [(int(re.search(r"\d+$", op)[0]), n) for op, n in opcodes.items() if re.match(f"(buffer|global)_{access}_", op)]
        total = sum(width * n for width, n in widths)
        return round(sum(width * n for width, n in widths if width == 128) / total, 2) if total else 0.0

    return {
        "vgprs": figure("vgpr_count"), "spills": figure("vgpr_spill_count") + figure("sgpr_spill_count"),
        "scratch": figure("private_segment_fixed_size"), "lds": compiled.metadata.shared,
        "waves": waves(figure("vgpr_count"), compiled.metadata.shared, compiled.metadata.num_warps), "wmma": count("v_wmma_"),
        "load128": count("(buffer|global)_load_b128"), "load": count("(buffer|global)_load_"), "load_wide": wide("load"),
        "store128": count("(buffer|global)_store_b128"), "store": count("(buffer|global)_store_"), "store_wide": wide("store"),
        "dot2": count("v_dot2_bf16_bf16"),
    }  # fmt: skip


def broken_rules(case, row):
    """Names of the rules that a compiled case breaks.

    Two optional keys of a case: `"stores": False`, it writes one number a row; `"wide": True`, its rows are wider than 8,192.
    """
    memory = case["kind"] == "memory"
    rules = {
        "spills": row["spills"] > 0,
        "scratch": row["scratch"] > 0,
        "LDS": row["lds"] > LDS_PER_WORKGROUP,
        "v_dot2_bf16_bf16": row["dot2"] > 0,
        "no WMMA": case["kind"] == "matmul" and row["wmma"] == 0,
        "narrow loads": memory and row["load_wide"] < WIDE_SHARE,
        "narrow stores": memory and case.get("stores", True) and row["store_wide"] < WIDE_SHARE,
        "waves": memory and not case.get("wide", False) and row["waves"] < MAX_WAVES,
    }
    return [name for name, broken in rules.items() if broken]


def report(modules=MODULES, defaults=False, large=True):
    """Yields one dict of COLUMNS a case."""
    for case in cases(modules):
        if defaults and not case["default"]:
            continue
        recipe = [case[k] for k in ("kernel", "signature", "constexprs", "options", "multiples_of_16")]
        row = read(compile_for_gfx1151(*recipe))
        beyond = read(compile_for_gfx1151(*recipe, below_2_gib=False)) if large else {"vgprs": "", "spills": ""}
        yield {
            "kernel": case["name"], "shape": case["shape"], "options": " ".join(f"{k}={v}" for k, v in case["options"].items()),
            "default": case["default"], **row, "vgprs_2gib": beyond["vgprs"], "spills_2gib": beyond["spills"],
            "broken": ", ".join(broken_rules(case, row)),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", default=MODULES, help=f"of {', '.join(MODULES)}, or dotted; these if none is named")
    parser.add_argument("--defaults", action="store_true", help="only the configuration that each kernel runs first")
    parser.add_argument("--no-large", dest="large", action="store_false", help="leave out tensors of 2 GiB and more (half the time)")
    parser.add_argument("--csv", default="gfx1151.csv")
    args = parser.parse_args()

    print(f"gfx1151, Triton {triton.__version__}. Modelled: compiled on this machine, not run.\n")
    columns = [c for c in COLUMNS if args.large or not c.endswith("_2gib")]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    broken = 0
    with open(args.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, "triton"))
        writer.writeheader()
        for row in report(args.modules, args.defaults, args.large):
            writer.writerow({**row, "triton": triton.__version__})
            print("| " + " | ".join(str(row[c]) for c in columns) + " |", flush=True)
            broken += bool(row["broken"])
    print(f"\n{broken} of these break a rule; {args.csv} holds the table")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())

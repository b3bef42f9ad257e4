"""What the interpreter runs is compiled too: each specialization of a kernel that a test launches, for gfx1151 and sm_90, without a GPU.

Triton's interpreter executes Python and takes what no compiler would: a branch that divides by zero where the compiler traces both, a
method of a number that is a constant at run time. So conftest.py notes each launch of the interpreter (`Launches`), and at the end of the
tests the compiler gets to see it: whatever does not compile fails the run, under the name of a test that launched it.

The compiler's front end, which is what differs from the interpreter and hardly knows its target, sees each of them, for one of the two.
All the way to machine code (LLVM for gfx1151, ptxas for sm_90) go those that are needed to have every type of every argument and every
value of every option there once for each kernel, sizes aside, for both; with `--compile-all` everything does, which takes minutes. Triton's
cache and one beside it keep what was compiled.

    python tests/helpers/specializations.py gfx1151     # what the tests start: reads JSON, prints a line of JSON for each failure
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TARGETS = {"gfx1151": ("hip", "gfx1151", 32), "sm_90": ("cuda", 90, 32)}
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "bool": "i1",
         "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8"}  # fmt: skip

# --- in the tests: what is launched ------------------------------------------------------------------------------------


class Launches:
    """Notes what Triton's interpreter launches: {specialization as JSON: the first test that launched it}."""

    def __init__(self):
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.interpreter import InterpretedFunction

        self.seen = {}
        self.tuners = {id(tuner): (tuner, where) for where, tuner in autotuners()}
        self.tuned_by = None
        launch, tune = InterpretedFunction.run, Autotuner.run

        def noted_launch(function, *args, grid, warmup, **options):
            if function.fn.__module__.startswith("kernels."):
                given = dict(zip(function.arg_names, args)) | options
                key = json.dumps(specialization(function.fn, function.arg_names, given, self.tuned_by))
                self.seen.setdefault(key, os.environ.get("PYTEST_CURRENT_TEST", "?").partition(" ")[0])
            return launch(function, *args, grid=grid, warmup=warmup, **options)

        def noted_tuning(tuner, *args, **options):
            self.tuned_by = self.tuners.get(id(tuner), (None, None))[1]  # None too for one that a test made
            try:
                return tune(tuner, *args, **options)
            finally:
                self.tuned_by = None

        InterpretedFunction.run, Autotuner.run = noted_launch, noted_tuning


def autotuners():
    """((module, attribute, key), Autotuner) of each autotuned kernel of the package; they stand in dictionaries there."""
    from triton.runtime.autotuner import Autotuner

    importlib.import_module("kernels")
    for name in sorted(n for n in sys.modules if n.startswith("kernels.")):
        for attribute, value in vars(sys.modules[name]).items():
            for key, tuner in value.items() if isinstance(value, dict) else ():
                if isinstance(tuner, Autotuner):
                    yield (name, attribute, key), tuner


def specialization(fn, parameters, given, tuned_by):
    """What Triton's launcher would tell the compiler of these arguments, as JSON can hold it.

    Alignment is left out: nothing fails to compile for that. A number that is 1 becomes a constant, and None always is one.
    """
    constexprs = {name for name, annotation in fn.__annotations__.items() if "constexpr" in str(annotation)}
    types, constants = {}, {}
    for name in parameters:
        value = given[name]
        if name in constexprs or value is None:
            types[name], constants[name] = "constexpr", value
        elif hasattr(value, "block_shape"):
            types[name] = f"tensordesc<{TYPES[dtype_of(value.base)]}{list(value.block_shape)}>"
        elif hasattr(value, "dtype"):
            types[name] = "*" + TYPES[dtype_of(value)]
        elif isinstance(value, bool):
            types[name] = "i1"
        elif isinstance(value, int):
            types[name] = "one" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            types[name] = "fp32"
    return {
        "kernel": f"{fn.__module__}.{fn.__name__}",
        "types": types,
        "constants": constants,
        "options": dict(sorted((name, value) for name, value in given.items() if name not in types)),
        "tuned_by": tuned_by,
    }


def dtype_of(tensor):
    return str(tensor.dtype).removeprefix("torch.")


# --- after the tests: which go all the way, and who compiles them --------------------------------------------------------


def features(record):
    """What of a specialization the compiler branches on: types, flags, words, and of numbers whether they are 0, 1 or a size."""
    of_types = {f"{name}: {kind}" for name, kind in record["types"].items()}
    of_constants = {
        f"{name} = {value if not isinstance(value, (int, float)) or value in (0, 1) else 'n'}"
        for name, value in record["constants"].items()
    }
    return of_types | of_constants


def cover(records):
    """Enough of these specializations of one kernel to have all of their features, small sizes first."""

    def size(record):
        numbers = [abs(v) for v in record["constants"].values() if isinstance(v, (int, float)) and v]
        return sum(map(float, numbers))

    wanted, chosen = set().union(*map(features, records)), []
    while wanted:
        best = max(records, key=lambda record: (len(features(record) & wanted), -size(record)))
        chosen.append(best)
        wanted -= features(best)
    return chosen


def compile_all(seen, everything=False):
    """Compile what was launched, in as many processes as there are cores. Returns (a line that says so, failures as lines)."""
    started = time.monotonic()
    records = [json.loads(key) for key in seen]
    by_kernel = {}
    for record in records:
        by_kernel.setdefault(record["kernel"], []).append(record)
    whole = records if everything else [record for same in by_kernel.values() for record in cover(same)]
    tasks = []
    for n, (record, test) in enumerate(zip(records, seen.values())):
        # Kernels that take descriptors are for parts with tensor memory access.
        fit = ["sm_90"] if "tensordesc" in str(record["types"]) else list(TARGETS)
        all_the_way = any(record is chosen for chosen in whole)
        targets = fit if all_the_way else [fit[n % len(fit)]]
        tasks.append({"record": record, "test": test, "whole": all_the_way, "targets": targets})
    tasks.sort(key=lambda task: task["whole"])  # so that each process gets as many of both kinds
    share = max(1, (os.cpu_count() or 1) // len(TARGETS))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    processes = []
    for target in TARGETS:
        mine = [task for task in tasks if target in task["targets"]]
        for part in (mine[i::share] for i in range(share)):
            with tempfile.TemporaryFile("w+") as file:  # not a pipe, which would be waited for
                json.dump(part, file)
                file.seek(0)
                command = [sys.executable, __file__, target]
                processes.append(subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, text=True, env=environment))
    failures = []
    for process in processes:
        failures += (json.loads(line) for line in process.stdout)
        if process.wait():
            failures.append(f"the compiler's process ended with {process.returncode}")
    seconds = time.monotonic() - started
    return f"{len(records)} specializations of {len(by_kernel)} kernels, {len(whole)} of them to machine code, {seconds:.0f} s", failures


# --- in a process of its own: the compiler -------------------------------------------------------------------------------


def source_and_options(record, target):
    """Triton's source and options of a specialization; where a table of candidates gave its sizes, by the target's own first one."""
    from triton.compiler import ASTSource

    module, _, name = record["kernel"].rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    types, constants, options = dict(record["types"]), dict(record["constants"]), dict(record["options"])
    if record["tuned_by"] and target.backend == "hip":
        module, attribute, key = record["tuned_by"]
        config = getattr(importlib.import_module(module), attribute)[key].configs[0].all_kwargs()
        constants |= {k: v for k, v in config.items() if k in types}
        options = {k: v for k, v in config.items() if k not in types and v is not None}
    unspecialized = {p.name for p in kernel.params if p.do_not_specialize}
    for parameter, kind in types.items():
        if kind == "one":
            types[parameter] = "i32" if parameter in unspecialized else "constexpr"
            if parameter not in unspecialized:
                constants[parameter] = 1
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    return ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs), options


def front_end(source, target, options):
    """The kernel's Python to Triton's intermediate representation, verified; as triton.compile begins."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def main():
    target_name = sys.argv[1]
    sys.path.insert(0, str(PROJECT))
    import torch

    if TARGETS[target_name][0] == "hip":
        torch.version.hip = torch.version.hip or "10"  # the package asks which candidates are this machine's
    else:
        torch.version.hip = None
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(*TARGETS[target_name])
    passed = Passed(triton, target_name)
    for task in json.load(sys.stdin):
        record = task["record"]
        try:
            source, options = source_and_options(record, target)
            if task["whole"]:
                triton.compile(source, target=target, options=options)
            elif not passed.before(source, options):
                front_end(source, target, options)
                passed.add()
        except Exception as e:  # whatever a compiler raises
            cause = e
            while cause.__cause__ or cause.__context__:
                cause = cause.__cause__ or cause.__context__
            at = [line.strip() for line in str(e).splitlines() if line.strip(" ^")][-1:]
            error = " ".join(f"{type(e).__name__}: {type(cause).__name__}: {str(cause)[:200]}; at: {' '.join(at)}".split())
            print(json.dumps(f"{task['test']}: {record['kernel']} for {target_name}: {error}"), flush=True)


class Passed:
    """What went through the front end before, by the source of the kernel and of all that it calls: empty files in Triton's own cache."""

    def __init__(self, triton, target_name):
        from triton.runtime.cache import get_cache_manager

        self.manager, self.about, self.key = get_cache_manager, (triton.__version__, target_name), None

    def before(self, source, options):
        import hashlib

        self.key = hashlib.sha256(repr((source.hash(), sorted(options.items()), *self.about)).encode()).hexdigest()
        return self.manager(self.key).has_file("passed")

    def add(self):
        self.manager(self.key).put("", "passed", binary=False)


if __name__ == "__main__":
    main()

"""The optimizer step on paper for gfx1151: what its kernels compute and move, counted, over the rates that others measured there.

    python benchmarks/gfx1151_model.py --csv benchmarks/gfx1151_model.csv --plot benchmarks/gfx1151_model.png

train.py's own model, forward, backward and optimizer, runs on tensors without content (torch's FakeTensorMode), with the choices that a
gfx1151 makes (BLAS products, tiles, passes of the backward). Every product, every launch of a Triton kernel and every other operation is
seen with its shapes; none is executed. A kernel takes the longer of its FLOPs over its rate and its bytes over the memory's bandwidth.

Two steps are modelled. "ours": train.py as it is. "published recipe": the same model in plain PyTorch as autoresearch-halo trains it
(SDPA over the whole context, one BLAS library, elementwise code left to Inductor): its products and attention are counted in the same
way, its elementwise traffic is what a trace of it on an H200 took. Its author measured 2.57 s, which is what the model is held to.

Nothing here was measured by us on the chip. All is modelled from published rates and the issue bounds of an emulator.
"""

import argparse
import collections
import contextlib
import csv
import importlib
import io
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch
import triton
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, MICRO_BATCH = 131072, 16
MEASURED_SECONDS = 2.57  # a step of the published recipe on the part, by its author (autoresearch-halo)

# Published measurements on gfx1151. Products in TFLOP/s, bf16 at 4096³: x·wᵀ, dy·w, dyᵀ·x. torch takes hipBLASLt.
BANDWIDTH = 212.6  # GB/s, HIP copy
LIBRARIES = {"cublaslt": "hipBLASLt", "cublas": "rocBLAS"}  # by torch's names, which stay NVIDIA's on AMD
LAYOUTS = ("forward", "input gradient", "weight gradient")
PRODUCTS = {"rocBLAS": dict(zip(LAYOUTS, (21.8, 29.2, 40.5))), "hipBLASLt": dict(zip(LAYOUTS, (34.0, 35.2, 16.3)))}
LARGER_PRODUCTS = {"rocBLAS": dict(zip(LAYOUTS, (25.2, 24.2, 31.2))), "hipBLASLt": dict(zip(LAYOUTS, (34.1, 31.0, 8.4)))}  # 8192³
AOTRITON_FORWARD = 11.3  # causal attention, fp16, D128, S4096
AOTRITON_BACKWARD = AOTRITON_FORWARD / 2  # nobody has published one: taken to be half of the forward's, as is usual
# Published Triton kernels for the part, and the issue bounds of kernels of their kind: the share that becomes real.
FORWARD_SHARE = 23.5 / 48  # best public forward
BACKWARD_SHARE = 8.5 / 35  # aiter's backward, bf16, D64, S4096
H200_BANDWIDTH = 4300.0  # GB/s, copy
TRACE_FILE = HERE / "train_step_kernels.csv"
NOT_ELEMENTWISE = ("gemm", "nvjet", "cutlass", "cublas", "splitk", "sdpa", "fmha", "flash", "attention", "cudnn")  # in kernels' names
H200_ELEMENTWISE_MS = 25.0  # of the published recipe, 131,072 tokens, micro-batch 16, where no trace is at hand

PEAK = 49.6e12  # as the published 24.4 % MFU takes it


# --- counting -------------------------------------------------------------------------------------------------------


@dataclass
class Event:
    """One operation or launch. reads, writes: {storage: bytes}; `fusable`: the compiler sees it, outside of a custom operator."""

    kind: str  # "product", "attention", "kernel" or "elementwise"
    name: str
    part: str
    reads: dict
    writes: dict
    flops: float = 0.0
    fusable: bool = False
    size: int = 0  # elements of its largest tensor
    reduces: bool = False
    shape: str = ""  # of a product: rows × summed × columns
    library: str = ""  # that makes it

    @property
    def bytes(self):
        return sum(self.reads.values()) + sum(self.writes.values())


PRODUCT_OPERATIONS = {"mm", "addmm", "bmm", "baddbmm"}
SCALED_DOT_PRODUCT = "_scaled_dot_product_flash_attention_for_cpu"  # the one that a CPU tensor reaches; counted as SDPA's flash attention
NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "_reshape_alias"}
WRITTEN_OVER = {"_row_kernel": 0}  # argument that a kernel reads and writes, given once (an argument given twice counts twice)


def _tensors(*trees):
    return [t for t in tree_leaves(trees) if isinstance(t, torch.Tensor)]


def _bytes(tensors):
    """{storage: bytes}: views of one storage count as the largest of them. Broadcast dimensions hold nothing."""
    sizes = {}
    for t in tensors:
        storage = t.untyped_storage()
        TRACE.storages.append(storage)  # kept, so that no other gets its address
        held = math.prod(n for n, stride in zip(t.shape, t.stride()) if stride) * t.element_size()
        sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), held)
    return sizes


def visible_pairs(T, window=None):
    """Pairs of query and key in causal attention over T positions and `window` keys before the query."""
    window = T - 1 if window is None else min(window, T - 1)
    return (window + 1) * (window + 2) // 2 + (T - window - 1) * (window + 1)


def product_layout(a, b):
    """Which pass makes a · b, by what is transposed: x·wᵀ, dyᵀ·x, or neither: dy·w."""
    if a.stride(-1) != 1 and a.shape[-1] > 1:
        return "weight gradient"
    return "forward" if b.stride(-1) != 1 and b.shape[-1] > 1 else "input gradient"


class Trace(TorchDispatchMode):
    """Collects an Event for each operation and launch, inside custom operators too."""

    def __init__(self):
        super().__init__()
        self.events, self.storages, self.part, self.depth, self.library = [], [], "model", 0, "cublaslt"

    @contextlib.contextmanager
    def recording(self, part):
        self.events, self.part = [], part
        with self:
            yield self.events

    def preferred_blas_library(self, library=None):
        """torch's, which products are made by from then on."""
        self.library = library or self.library
        return self.library

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        custom = OPDEFS.get(func._schema.name)
        if custom is not None:
            self.depth += 1
            with self, torch.no_grad():
                result = custom._init_fn(*args, **kwargs)
            self.depth -= 1
            return result
        if func.namespace == "prim":  # a question to a tensor, such as its device
            return func(*args, **kwargs)
        if self.depth and func._can_decompose():  # outside, torch has done this before
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        self._operation(func, args, kwargs, result)
        return result

    def _operation(self, func, args, kwargs, result):
        name = func._schema.name.split("::")[1]
        outputs, inputs = _tensors(result), _tensors(args, {k: v for k, v in kwargs.items() if k != "out"})
        if func.is_view or name in NO_KERNEL or not outputs:
            return
        if name.removesuffix("_backward") == SCALED_DOT_PRODUCT:
            q = args[1] if name.endswith("_backward") else args[0]
            B, H, T, D = q.shape
            flops = (10 if name.endswith("_backward") else 4) * D * B * H * visible_pairs(T)
            self.add("attention", "SDPA " + ("backward" if name.endswith("_backward") else "forward"), inputs, outputs, flops)
        elif name in PRODUCT_OPERATIONS:
            a, b = inputs[-2:]
            flops = 2 * math.prod(a.shape) * b.shape[-1]
            if kwargs.get("beta") == 0:
                inputs = [a, b]
            self.add("product", product_layout(a, b), inputs, outputs, flops)
            self.events[-1].shape = "×".join(map(str, (*a.shape, b.shape[-1])))
            self.events[-1].library = LIBRARIES[self.library]
        elif max(t.numel() for t in inputs + outputs) > 1:  # single numbers are part of a kernel, or the CPU's
            reads = _bytes(inputs)
            if name == "embedding":  # reads rows, not the table
                table = args[0].untyped_storage()._cdata
                reads[table] = min(reads[table], sum(_bytes(outputs).values()))
            if name in ("fill_", "zero_", "copy_"):  # write what they are given first
                reads = _bytes(inputs[1:])
            self.add("elementwise", name, reads, outputs, fusable=not self.depth)
            event = self.events[-1]
            event.size = max(t.numel() for t in inputs + outputs)
            event.reduces = bool(inputs) and name != "embedding" and event.size >= 16 * max(t.numel() for t in outputs)

    def add(self, kind, name, reads, writes, flops=0.0, fusable=False):
        reads, writes = (x if isinstance(x, dict) else _bytes(x) for x in (reads, writes))
        self.events.append(Event(kind, name, self.part, reads, writes, flops, fusable))

    def launch(self, function, args, kwargs):
        """Of a Triton kernel: every tensor is read or written once. Only attention's FLOPs count."""
        name = function.__name__
        tensors, given = {}, dict(zip(function.arg_names, args)) | kwargs
        for t in _tensors(list(given.values())):
            for storage, size in _bytes([t]).items():
                tensors[storage] = tensors.get(storage, 0) + size
        if name in WRITTEN_OVER:
            for storage, size in _bytes([args[WRITTEN_OVER[name]]]).items():
                tensors[storage] += size
        products = 0
        if function.__module__.endswith(".attention"):
            products = {"_forward_kernel": 2, "_dq_kernel": 3}.get(name, 0)
            if name == "_dkdv_kernel":
                products = 1 + given["DV"] + 2 * given["DK"]
                name += {(0, 1): " (dV)", (1, 0): " (dK)", (1, 1): ""}[int(given["DK"]), int(given["DV"])]
        if products:
            B, T, H, D = given["q"].shape
            flops = 2 * products * D * B * H * visible_pairs(T, given["window"] if given["WINDOWED"] else None)
            self.add("attention", name, tensors, {}, flops)
        else:
            self.add("kernel", name, tensors, {})


TRACE = Trace()


def fuse(events):
    """The events, those that a compiler fuses as one: runs of elementwise operations of one size or one flow of data, up to a reduction.

    What such a kernel makes and only itself reads stays in registers. Inductor does better (a row's reduction and what follows it are
    one kernel there), so this bounds its traffic from above; of its launches it is an estimate.
    """
    last_read = {storage: i for i, event in enumerate(events) for storage in event.reads}
    fused, group, sizes, made = [], [], set(), set()

    def close(end):
        if group:
            fused.append(_merged(group, lambda storage: last_read.get(storage, len(events)) >= end))
        for collection in (group, sizes, made):
            collection.clear()

    for i, event in enumerate(events):
        if not (event.fusable and (event.size in sizes or made & set(event.reads))):
            close(i)
        if not event.fusable:
            fused.append(event)
            continue
        group.append(event)
        sizes.add(event.size)
        made.update(event.writes)
        if event.reduces:
            close(i + 1)
    close(len(events))
    return fused


def _merged(group, is_read_later):
    """One kernel of several operations: what it does not make itself is read once, what it changes in place or others read is written."""
    reads, writes = {}, {}
    for event in group:
        for storage, size in event.reads.items():
            if storage not in writes:
                reads[storage] = max(reads.get(storage, 0), size)
        for storage, size in event.writes.items():
            writes[storage] = max(writes.get(storage, 0), size)
    kept = {storage: size for storage, size in writes.items() if storage in reads or is_read_later(storage)}
    name = collections.Counter(event.name for event in group).most_common(1)[0][0]
    return Event("elementwise", name, group[0].part, reads, kept)


def own_config():
    """train.py's own GPTConfig."""
    import train

    return train.model_config(train.DATASET.vocab_size)


class _Captured(Exception):
    """The graph that was wanted is there."""


def fused_graph(train, config, rows):
    """(graph, what its inputs are called): train.py's model as kernels.fuse rewrites it, for `rows` rows."""
    from kernels import _proof, fusion

    _proof.difference = lambda *asked: None  # nothing is computed here
    model, captured = train.GPT(config), []
    model.init_weights()
    for embedding in (model.transformer.wte, *model.value_embeds.values()):  # as on a GPU
        embedding.to(torch.bfloat16)
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def backend(gm, inputs):
        asked = fusion.Fusion(products=_choose_by_published_rates)
        captured.append((fusion._fused(gm, inputs, asked, fusion.Graph()), [names.get(id(x)) for x in inputs]))
        raise _Captured

    x = torch.zeros((rows, config.sequence_len), dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(x, x)
    return captured[0]


def count_step(fused, config=None, tokens=TOKENS, micro_batch=MICRO_BATCH):
    """One optimizer step of train.py's model (its own configuration, or another): [(Event, how often)]. After `as_gfx1151`.

    fused: with the kernels as kernels.fuse puts them there; else the published port's recipe, with attention over the whole context.
    """
    import train_step

    import train

    config = config or own_config()
    micro_batches = tokens // (micro_batch * config.sequence_len)
    graph, names = fused_graph(train, config, micro_batch) if fused else (None, None)
    counted = []
    with FakeTensorMode():
        model = train.GPT(config)
        model.init_weights()
        for embedding in (model.transformer.wte, *model.value_embeds.values()):  # as on a GPU
            embedding.weight = torch.nn.Parameter(embedding.weight.bfloat16())
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer = model.setup_optimizer()
        optimizer._dtype = torch.bfloat16
        x = torch.zeros((micro_batch, config.sequence_len), dtype=torch.int64)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def loss():
            if fused:
                return graph(*(x if name is None else tensors[name] for name in names))[0]
            attends = train_step.attentions(model, "sdpa", x.device, whole=True)
            return train_step.upstream_forward(model, x, x, "mean", torch.bfloat16, attends)

        for times in (1, micro_batches - 1):  # the first micro-step makes the gradients, the others add to them
            with TRACE.recording("model") as events, torch.autocast("cpu", torch.bfloat16):
                (loss() / micro_batches).backward()
            counted += [(event, times) for event in fuse(events) if times]
        optimizer.step()  # makes its state
        with TRACE.recording("optimizer") as events:
            optimizer.step()
    return counted + [(event, 1) for event in fuse(events)]


def _choose_by_published_rates(shapes, rows, device):
    """What backends.py finds out on the machine, for the shapes that it is asked for."""
    linear = importlib.import_module("kernels.linear")
    library = max(LIBRARIES, key=lambda name: PRODUCTS[LIBRARIES[name]]["weight gradient"])
    linear.WEIGHT_GRADIENT.update({tuple(shape): ("direct", library) for shape in shapes})


def as_gfx1151():
    """Let this process be one of a machine with gfx1151: before train.py and `kernels` are imported. It executes no kernel from here on."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["AUTORESEARCH_DATASET"] = "climbmix"  # not the demonstration's sizes
    torch.version.hip = "modelled"
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0  # what GPU there may be is none of AMD's
    triton.runtime.JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: TRACE.launch(kernel, args, kwargs)
    triton.runtime.Autotuner.run = lambda tuner, *args, grid, warmup, **kwargs: TRACE.launch(tuner.fn, args, kwargs)
    torch.backends.cuda.preferred_blas_library = TRACE.preferred_blas_library
    importlib.import_module("kernels._common").INTERPRETED = True  # the kernels are defined; from here on: tensors on the CPU are welcome


# --- timing on paper ------------------------------------------------------------------------------------------------


def bounds(path=HERE / "gfx1151_bounds.csv"):
    """{pass: TFLOP/s} that issue allows our kernels as train.py calls them: causal, bounded scores, head_dim 128 (gfx1151_emulate.py)."""
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["head_dim"] == "128" and row["attention"] == "causal, bounded"]
    return {row["pass"]: float(row["bound"]) for row in rows}


def product_rates(products):
    return {f"{layout} by {library}": rate for library, rates in products.items() for layout, rate in rates.items()}


def our_rates(products=PRODUCTS):
    """Two sets of TFLOP/s: the backward at the share of its bound that the published forward reaches, and at that of the backward."""
    bound, rates = bounds(), product_rates(products)
    rates["attention forward"] = bound["forward"] * FORWARD_SHARE
    return [{**rates, "attention backward": bound["backward"] * share} for share in (FORWARD_SHARE, BACKWARD_SHARE)]


def recipe_rates(products=PRODUCTS):
    return [{**product_rates(products), "attention forward": AOTRITON_FORWARD, "attention backward": AOTRITON_BACKWARD}]


def classify(event):
    """(part of the step, which rate counts): the rate is None where only bytes do."""
    if event.kind == "product":
        part = "optimizer: products" if event.part == "optimizer" else f"products: {event.name}"
        return part, f"{event.name} by {event.library}"
    if event.part == "optimizer":
        return "optimizer: elementwise", None
    if event.kind == "attention":
        name = "attention forward" if "forward" in event.name else "attention backward"
        return name, name
    return ("fused kernels" if event.kind == "kernel" else "other elementwise"), None


def milliseconds(flops, size, rate):
    """FLOPs at `rate` TFLOP/s or bytes at the memory's bandwidth, whichever takes longer."""
    return max(flops / rate / 1e9 if flops else 0.0, size / BANDWIDTH / 1e6)


def kernel_rows(step, counted, rates):
    """One dict of COLUMNS a kernel (and shape of a product), from [(Event, how often)]; ms by the first and the last of `rates`.

    The useful FLOPs of attention's backward are two and a half times the forward's: five products to its two. Kernels that run apart
    make some of them twice; the rates count useful FLOPs, so each kernel gets its share of those.
    """
    executed = collections.Counter()
    for event, times in counted:
        executed[classify(event)[0]] += times * event.flops
    useful = 2.5 * executed["attention forward"] / (executed["attention backward"] or 1)
    rows = {}
    for event, times in counted:
        part, rate = classify(event)
        flops = event.flops * (useful if part == "attention backward" else 1)
        kernel = f"{event.shape} by {event.library}" if event.library else event.name
        row = rows.setdefault((part, kernel), dict.fromkeys(COLUMNS, 0))
        row.update(step=step, part=part, kernel=kernel)
        row["launches"] += times
        row["tflop"] += times * flops / 1e12
        row["gigabytes"] += times * event.bytes / 1e9
        for column, of in (("ms", rates[0]), ("ms_low", rates[-1])):
            row[column] += times * milliseconds(flops, event.bytes, of.get(rate))
    return sorted(rows.values(), key=lambda row: (PARTS.index(row["part"]), -row["ms"]))


PARTS = ("products: forward", "products: input gradient", "products: weight gradient", "attention forward", "attention backward",
         "fused kernels", "other elementwise", "optimizer: products", "optimizer: elementwise")  # fmt: skip
COLUMNS = ("step", "part", "kernel", "launches", "tflop", "gigabytes", "ms", "ms_low")


def trace_of(variant, path=TRACE_FILE):
    """{kernel: (launches, ms)} of one step of a variant at this batch on an H200, as train_step.py wrote it; empty if there is none."""
    if not Path(path).exists():
        return {}
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == variant]
    at_this_batch = (row for row in rows if (int(row["tokens"]), int(row["micro_batch"])) == (TOKENS, MICRO_BATCH))
    return {row["kernel"]: (float(row["launches"]), float(row["ms"])) for row in at_this_batch}


def recipe_elementwise(path=TRACE_FILE):
    """(gigabytes, launches or 0 if unknown, where from): what Inductor leaves of the published recipe, from its time on an H200."""
    trace = trace_of("recipe", path)
    if not trace:
        return H200_ELEMENTWISE_MS * H200_BANDWIDTH / 1e3, 0, f"{H200_ELEMENTWISE_MS:g} ms on an H200"
    launches, ms = (sum(column) for column in zip(*(taken for kernel, taken in trace.items() if is_elementwise(kernel))))
    return ms * H200_BANDWIDTH / 1e3, round(launches), f"{ms:.1f} ms on an H200"


def is_elementwise(kernel):
    """By its name on NVIDIA. Inductor's are called triton_ and what they were made from, which may be what surrounds attention."""
    return kernel.startswith("triton_") or not any(word in kernel.lower() for word in NOT_ELEMENTWISE)


def share_of_copy(rows, path=TRACE_FILE):
    """What share of a copy's bandwidth our fused kernels reached on an H200: the bytes counted here over its time; None without a trace.

    Of those that ran there as often as they would here: with tensor memory access the MLP has a kernel of its own.
    """
    trace = trace_of("ours", path)
    alike = [(row["gigabytes"], trace[row["kernel"]][1]) for row in rows
             if row["part"] == "fused kernels" and trace.get(row["kernel"], (0, 0))[0] == row["launches"]]  # fmt: skip
    return sum(size for size, _ in alike) / sum(ms for _, ms in alike) * 1e3 / H200_BANDWIDTH if alike else None


# --- the report -----------------------------------------------------------------------------------------------------


def by_part(rows):
    """{part: {launches, tflop, gigabytes, ms, ms_low}}."""
    parts = {}
    for row in rows:
        total = parts.setdefault(row["part"], dict.fromkeys(COLUMNS[3:], 0))
        for column in total:
            total[column] += row[column]
    return parts


def seconds(rows, column="ms"):
    return sum(row[column] for row in rows) / 1e3


def model():
    """({step: rows}, {step: seconds with the products' rates at 8192³}, FLOPs a step by train.py's own windowed count)."""
    as_gfx1151()
    import train

    plain = [(event, times) for event, times in count_step(False) if event.kind in ("product", "attention")]
    fused = count_step(True)
    gigabytes, launches, source = recipe_elementwise()
    ms = gigabytes / BANDWIDTH * 1e3
    inductor = dict(zip(COLUMNS, ("published recipe", "elementwise by Inductor", source, launches, 0, gigabytes, ms, ms)))

    def steps(products):
        return {
            "published recipe": [*kernel_rows("published recipe", plain, recipe_rates(products)), inductor],
            "ours": kernel_rows("ours", fused, our_rates(products)),
        }

    with torch.device("meta"):
        flops = train.GPT(own_config()).estimate_flops() * TOKENS
    return steps(PRODUCTS), {step: seconds(rows) for step, rows in steps(LARGER_PRODUCTS).items()}, flops


def report(steps, larger, flops):
    forward, low = our_rates()
    print(f"One optimizer step of {TOKENS:,} tokens, micro-batch {MICRO_BATCH}, on gfx1151: modelled, not measured.\n")
    print("| step | part | launches | TFLOP | GB | ms | ms, backward's share |\n|---|---|---|---|---|---|---|")
    for step, rows in steps.items():
        for part, total in by_part(rows).items():
            print(
                f"| {step} | {part} | {total['launches'] or ''} | {total['tflop']:.2f} | {total['gigabytes']:.1f} | "
                f"{total['ms']:.0f} | {total['ms_low']:.0f} |"
            )
        launches, tflop, gigabytes, ms, low_ms = (sum(row[column] for row in rows) for column in COLUMNS[3:])
        print(f"| {step} | **all** | {launches} | {tflop:.2f} | {gigabytes:.1f} | **{ms:.0f}** | **{low_ms:.0f}** |")
    print("\n| | s a step | tok/s | MFU of 49.6 TFLOP/s |\n|---|---|---|---|")
    for name, taken in (
        ("published recipe, measured by its author", MEASURED_SECONDS),
        ("published recipe, modelled", seconds(steps["published recipe"])),
        (f"ours, backward at the forward's share ({forward['attention backward']:.1f} TFLOP/s)", seconds(steps["ours"])),
        (f"ours, backward at the backward's share ({low['attention backward']:.1f} TFLOP/s)", seconds(steps["ours"], "ms_low")),
    ):
        print(f"| {name} | {taken:.2f} | {TOKENS / taken:,.0f} | {flops / taken / PEAK:.1%} |")
    backward = by_part(steps["published recipe"])["attention backward"]
    rest = seconds(steps["published recipe"]) - backward["ms"] / 1e3
    source = steps["published recipe"][-1]["kernel"]
    print(f"\nProducts, TFLOP/s: {PRODUCTS}. Memory {BANDWIDTH} GB/s.")
    print(f"Attention: forward {forward['attention forward']:.1f}, the recipe's {AOTRITON_FORWARD} and, assumed, half of that in its")
    print(f"backward; at aiter's 8.5 its step takes {rest + backward['tflop'] / 8.5:.2f} s, and its measured step implies")
    print(f"{backward['tflop'] / (MEASURED_SECONDS - rest):.1f}. Its elementwise traffic: {source}, at {H200_BANDWIDTH:g} GB/s.")
    share = share_of_copy(steps["ours"])
    if share:
        bytes_ms = sum(row["ms"] for row in steps["ours"] if row["tflop"] == 0)
        more = bytes_ms * (1 / share - 1) / 1e3
        print(f"Our memory-bound kernels reached {share:.0%} of a copy's bandwidth on an H200. With that share here, too, ours would take")
        print(f"{seconds(steps['ours']) + more:.2f} s, {seconds(steps['ours'], 'ms_low') + more:.2f} at the backward's share.")
    print(f"With the products' rates at 8192³ the recipe would take {larger['published recipe']:.2f} s and ours {larger['ours']:.2f}.")


def plot(steps, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        ("published recipe", by_part(steps["published recipe"]), "ms"),
        ("ours, forward's share", by_part(steps["ours"]), "ms"),
        ("ours, backward's share", by_part(steps["ours"]), "ms_low"),
    ]
    groups = {"products": "products", "attention forward": "attention forward", "attention backward": "attention backward"}
    colours = {"products": "#4477aa", "attention forward": "#ccbb44", "attention backward": "#ee6677", "elementwise": "#228833"}
    figure, axes = pyplot.subplots(figsize=(8, 2.4))
    for y, (_name, parts, column) in enumerate(bars):
        sums = collections.Counter()
        for part, total in parts.items():
            sums[next((g for g in groups if g in part), "elementwise")] += total[column] / 1e3
        left = 0.0
        for group, colour in colours.items():
            axes.barh(y, sums[group], left=left, color=colour, label=group if y == 0 else None)
            axes.text(left + sums[group] / 2, y, f"{sums[group]:.2f}", ha="center", va="center", color="white", fontsize=8)
            left += sums[group]
        axes.text(left + 0.02, y, f"{left:.2f} s", va="center", fontsize=9)
    axes.axvline(MEASURED_SECONDS, color="black", linewidth=1, linestyle=":", label="published recipe, measured")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set(xlim=(0, 3.0), xlabel="seconds for 131,072 tokens on gfx1151 (modelled)")
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), ncols=5, loc="upper center", fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="write a row for each kernel")
    parser.add_argument("--plot", help="write a picture")
    args = parser.parse_args()
    steps, larger, flops = model()
    report(steps, larger, flops)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for row in (row for rows in steps.values() for row in rows):
                writer.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})
    if args.plot:
        plot(steps, args.plot)


if __name__ == "__main__":
    main()

"""A run of an experiment: train for the time budget, keep the model until it is evaluated, evaluate, print the summary.

train.py ends in one call of `run`. What is here is the same for every experiment, so that their numbers compare: which steps are timed,
what is counted, when a run has diverged, how the model is compiled.
"""

import argparse
import contextlib
import gc
import inspect
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict

import torch

from harness import checkpoint, choice, cuda_graph, ending, machine
from harness.common.protocol import WARMUP_STEPS
from harness.data import dataset as chosen
from harness.data import metric, ready
from harness.data.dataset import EVAL_TOKENS, MAX_SEQ_LEN, TIME_BUDGET, seed_everything
from harness.data.loader import make_dataloader
from harness.data.tokenizer import Tokenizer
from harness.ending import fail

EARLY_CHECK = 50  # the step before which a recorded graph is compared with Python for the first time
FREE, TIMED = range(5, WARMUP_STEPS), range(WARMUP_STEPS, WARMUP_STEPS + 20)  # steps whose times are compared: all should do the same
STEADY_STEPS = 3  # after so many nothing may be compiled again: what changed then will change each step


def compiled(function):
    """A decorator for an optimizer's step: compiled where its tensors are on a GPU, as it is on a CPU."""
    on_gpu = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*args, **kwargs):
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        return (on_gpu if first.is_cuda else function)(*args, **kwargs)

    call.function = function
    return call


# ---- the model ---------------------------------------------------------------------------------------------------------------------------


def build(model_class, config, device):
    """The initialised model on `device`."""
    with device:
        model = model_class(config)  # with torch's own first values, which stay where init_weights sets no others
    seed_everything()  # so that they cost no draw of the experiment's
    model.init_weights()
    return model


def compile_model(model, device):
    """Compile in place on a GPU, with this project's kernels where the model computes what they do. Returns what tells of it, or None."""
    if device.type != "cuda":
        return None
    try:
        import kernels
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        fail(f"this torch ({torch.__version__}) has no Triton, by which it compiles: install it again", ending.EXIT_ENVIRONMENT)
    chosen = choice.Chosen()
    fusion = kernels.Fusion(attention=chosen.attention, products=chosen.products)
    model.compile(backend=fusion, dynamic=False)
    return fusion, chosen


def rehearse(model, device):
    """The evaluation's own check, on a row of random tokens and uncompiled: what would make the result invalid is said before training."""
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(vocabulary, (2, 1, MAX_SEQ_LEN), generator=generator).to(device)
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad(), machine.autocast(device):
        with metric.uncompiled():
            losses = model(x, y, reduction="none")
        metric.check_model(model, x, y, losses)
    model.train()


def load(path, model_class, template, device, source):
    """(model, facts) of a file that `checkpoint.save` wrote; ends the run where it is no model of this train.py."""
    saved = checkpoint.load(path, device)
    try:
        model, facts = build(model_class, type(template)(**saved["config"]), device), saved["facts"]
        model.load_state_dict(saved["model"])
        if facts["train.py"] != source:
            print("WARNING: train.py has changed since this model was trained; what is evaluated is the model as it is defined now")
        return model, facts
    except torch.OutOfMemoryError:
        raise  # a RuntimeError too, but not the file's fault
    except (KeyError, TypeError, RuntimeError) as e:
        fail(f"--evaluate {path}: not a model of this train.py ({' '.join(str(e).split())[:120]})")


# ---- training ----------------------------------------------------------------------------------------------------------------------------


class Progress:
    """One updating line on a terminal; into a file a plain line every few seconds."""

    def __init__(self, every=5.0):
        self.terminal, self.every, self.last = sys.stdout.isatty(), every, -math.inf

    def show(self, line):
        now = time.monotonic()
        if self.terminal:
            print(f"\r{line}\x1b[K", end="", flush=True)
        elif now - self.last >= self.every:
            self.last = now
            print(line, flush=True)

    def end(self):
        if self.terminal:
            print()


def check_batch(total, rows, T):
    """End the run if TOTAL_BATCH_SIZE tokens are not made of whole micro-batches of DEVICE_BATCH_SIZE rows of T."""
    tokens = rows * T
    if total % tokens == 0:
        return
    fits = [b for b in range(1, total // T + 1) if total % (b * T) == 0]
    nearest = f"DEVICE_BATCH_SIZE {min(fits, key=lambda b: abs(b - rows))} or " if fits else ""
    fail(
        f"TOTAL_BATCH_SIZE {total} is no multiple of DEVICE_BATCH_SIZE {rows} × {T} = {tokens} tokens"
        f"; the nearest that work: {nearest}TOTAL_BATCH_SIZE {max(1, round(total / tokens)) * tokens}"
    )


class Micro:
    """Forward and backward of a micro-batch: recorded as a CUDA graph after the first step where the device has such, and checked."""

    def __init__(self, model, device, parts):
        self.model, self.device, self.parts = model, device, parts
        self.recorded, self.records = None, device.type == "cuda" and not torch.version.hip

    def compute(self, x, y):
        with machine.autocast(self.device):
            loss = self.model(x, y)
        (loss / self.parts).backward()
        return loss.detach()

    def __call__(self, x, y):
        """The loss, valid until the next call; gradients are added to those that the parameters have."""
        return self.recorded(x, y) if self.recorded else self.compute(x, y)

    def record(self, x, y):
        if self.records:
            self.recorded = cuda_graph.record(self.compute, x, y)
            self.records = self.recorded is not None

    def check(self, x, y):
        """End the run if Python would compute something else by now than what was recorded. The graph is given up for it."""
        if not self.recorded:
            return
        recorded, self.recorded = self.recorded, None
        with steady():
            if not recorded.holds(x, y):
                fail(
                    "something that Python decides in the model changed during training, and the recorded graph went on without it: keep it"
                    " in a tensor on the device that is changed in place"
                )


def check_free_steps(took):
    """End the run where the steps that are not timed do more than the timed ones do. took: the seconds of the steps so far."""
    if len(took) <= TIMED[-1]:
        return
    free, timed = (statistics.median(took[step] for step in steps) for steps in (FREE, TIMED))
    if free > 3 * timed + 0.5:
        fail(
            f"invalid: a step before the clock starts takes {1000 * free:.0f} ms, a timed one {1000 * timed:.0f}: the first {WARMUP_STEPS}"
            " are free because they compile, and must do the same work"
        )


class steady:
    """Within, nothing may be compiled again; a run in which something would be ends, with the line of it."""

    def __enter__(self):
        self.patch = torch._dynamo.config.patch(error_on_recompile=True)
        self.patch.__enter__()

    def __exit__(self, kind, error, trace):
        self.patch.__exit__(kind, error, trace)
        if kind and issubclass(kind, torch._dynamo.exc.RecompileError):
            reasons = [line.strip().lstrip("- ") for line in str(error).splitlines() if line.strip().startswith("- ")]
            what = reasons[0].split(": ", 1)[-1] if reasons else " ".join(str(error).split())[:200]
            fail(
                f"a Python value changed during training, and the model would be compiled again each time: {what}."
                " Keep it in a tensor on the device (a buffer) that is changed in place"
            )


def train(model, optimizer, schedule, loader, device, total_batch_size, device_batch_size, flops_per_token, peak, sensors=None, told=None):
    """Steps until the time budget is used. Returns (steps, timed seconds, tokens that the model was given).

    told: called once, when the first step is over.
    """
    parts = total_batch_size // (device_batch_size * MAX_SEQ_LEN)
    micro = Micro(model, device, parts)
    progress_line = Progress()
    smooth_loss = seconds = 0.0
    step = tokens = 0
    took = []
    x, y, epoch = next(loader)
    while seconds < TIME_BUDGET:
        start = time.perf_counter()
        losses = 0.0
        with steady() if step >= STEADY_STEPS else contextlib.nullcontext():
            for _ in range(parts):
                losses = losses + micro(x, y)
                tokens += x.numel()
                x, y, epoch = next(loader)  # while the GPU is at work
        progress = min(seconds / TIME_BUDGET, 1.0)
        schedule(optimizer, step, progress)
        optimizer.step()
        if step == 0 and (unused := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]):
            print(f"WARNING: not trained, because the loss does not depend on it: {', '.join(unused)}")
        model.zero_grad(set_to_none=not micro.records)  # a recorded graph adds to the gradients where they are
        loss = cuda_graph.wait_for(losses / parts)  # the step's only synchronisation
        if not -math.inf < loss <= 100:  # NaN too
            progress_line.end()
            fail(f"the loss is {loss} at step {step}: the run diverged")
        elapsed = time.perf_counter() - start
        if step >= WARMUP_STEPS:
            seconds += elapsed
        if step <= TIMED[-1]:
            took.append(elapsed)
            check_free_steps(took)
        smooth_loss = 0.9 * smooth_loss + 0.1 * loss
        mfu = f"{100 * flops_per_token * total_batch_size / elapsed / peak:.1f}%" if peak else "n/a"
        debiased_loss = smooth_loss / (1 - 0.9 ** (step + 1))
        left = f"remaining: {max(0, TIME_BUDGET - seconds):.0f}s"
        group = optimizer.param_groups[0]
        progress_line.show(
            f"step {step:05d} ({100 * progress:.1f}%) | loss: {debiased_loss:.6f} | lrm: {group['lr'] / (group['initial_lr'] or 1):.2f} | "
            f"dt: {elapsed * 1000:.0f}ms | tok/sec: {total_batch_size / elapsed:,.0f} | mfu: {mfu} | epoch: {epoch} | "
            + (left if step >= WARMUP_STEPS else f"warming up, not timed (step {step + 1} of {WARMUP_STEPS})")
        )
        if step == 0:  # a collection stalls for half a second: everything so far stays, and from now on there is little garbage
            if told:
                told()
            gc.collect()
            gc.freeze()
            gc.disable()
            micro.record(x, y)
            model.zero_grad(set_to_none=not micro.records)
        elif (step + 1) % 5000 == 0:
            gc.collect()
        step += 1
        if step == WARMUP_STEPS and sensors:
            sensors.start()
        if step == EARLY_CHECK and micro.recorded:
            with torch.random.fork_rng(devices=[device]):
                micro.check(x, y)
            micro.record(x, y)
            model.zero_grad(set_to_none=not micro.records)
    progress_line.end()
    micro.check(x, y)
    model.zero_grad(set_to_none=True)
    return step, seconds, tokens


# ---- the run -----------------------------------------------------------------------------------------------------------------------------


def _check(optimizer, model):
    """End the run where the loop below could not go on with what the experiment gave it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        fail(f"the optimizer is a {type(optimizer).__name__}; return a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    if "reduction" not in inspect.signature(model.forward).parameters:
        fail(f"{type(model).__name__}.forward has no `reduction`, by which the evaluation asks for the loss of each token")


def _main(model_class, model_config, make_optimizer, schedule, total_batch_size, device_batch_size):
    parser = argparse.ArgumentParser(description="Train a small GPT for a fixed time and evaluate it.")
    parser.add_argument("--keep", action="store_true", help="keep the trained model as model.pt")
    parser.add_argument("--evaluate", metavar="FILE", help="evaluate a saved model instead of training one")
    args = parser.parse_args()

    program = os.path.abspath(inspect.getfile(model_config))
    here = os.path.dirname(program)
    examined = bool(os.environ.get("AUTORESEARCH_EXAMINER"))  # by the process that has started this one, which keeps the model too
    started, source = time.time(), checkpoint.file_digest(program)
    seed = seed_everything()
    torch.set_float32_matmul_precision("high")
    machine.keep_compiled()
    facts = ready.checked_dataset(chosen.DATASET)  # before anything that takes time
    fingerprint = ready.fingerprint()
    device = machine.find_device()
    peak, device_name = machine.peak_flops(device)
    machine.cap_shared_memory(device)
    tokenizer = Tokenizer.from_directory()
    print(
        f"Dataset: {facts['name']}, context {MAX_SEQ_LEN}, vocabulary {tokenizer.get_vocab_size()}, time budget {TIME_BUDGET} s, "
        f"fingerprint {fingerprint}, seed {seed}"
    )
    print(f"Device: {device_name}, torch {torch.__version__}, bf16 peak {f'{peak / 1e12:g} TFLOP/s' if peak else 'unknown'}")

    path = args.evaluate or os.path.join(here, "unevaluated.pt")  # the trained model, until it is evaluated
    config = model_config(tokenizer.get_vocab_size())
    if args.evaluate:
        model, result = load(path, model_class, config, device, source)
        if result["fingerprint"] != fingerprint:
            fail(f"--evaluate {path}: trained on {result['fingerprint']}, and here is {fingerprint}: the number would not compare")
        started -= result["seconds_before_evaluation"]
        how = compile_model(model, device)
    else:
        model = build(model_class, config, device)
        counts, flops_per_token = model.num_scaling_params(), model.estimate_flops()
        print(f"Model: {config}")
        print("Parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
        print(f"{flops_per_token:.3e} FLOPs per token; " + ("as it is" if device.type == "cpu" else "compiled, with fused kernels"))
        optimizer = make_optimizer(model)
        _check(optimizer, model)
        loader = make_dataloader(tokenizer, device_batch_size, MAX_SEQ_LEN, "train")
        writable = os.environ.get("AUTORESEARCH_MODEL") if examined else os.access(os.path.dirname(path), os.W_OK)
        if os.path.isdir(path) or not writable:
            fail(
                f"{path} can't be written, where the trained model is kept until it is evaluated: make room for it", ending.EXIT_ENVIRONMENT
            )
        sensors = machine.sensors(device)
        rehearse(model, device)
        how = compile_model(model, device)
        told = (lambda: print("\n".join(how[0].report()), flush=True)) if how else None
        sizes = total_batch_size, device_batch_size
        steps, seconds, tokens = train(model, optimizer, schedule, loader, device, *sizes, flops_per_token, peak, sensors, told)
        sensors.stop()
        tokens_per_second = tokens * (steps - WARMUP_STEPS) / steps / seconds
        result = {
            "training_seconds": f"{seconds:.1f}",
            "mfu_percent": f"{100 * tokens_per_second * flops_per_token / peak:.2f}" if peak else "n/a",
            "total_tokens_M": f"{tokens / 1e6:.1f}",
            "total_tokens": tokens,
            "num_steps": steps,
            "num_params_M": f"{counts['total'] / 1e6:.1f}",
            "depth": config.n_layer,
            "fingerprint": fingerprint,
            "seed": seed,
            "tok_per_sec": f"{tokens_per_second:.0f}",
            "device_batch_size": device_batch_size,
            "peak_vram_mb": machine.peak_memory(device),
            "seconds_before_evaluation": time.time() - started,
            "train.py": source,
            "sensors": sensors.summary(),
        }
        del optimizer, loader
        saved = checkpoint.save(path, {"config": asdict(config), "model": model.state_dict(), "facts": result})

    evaluation_started = time.time()
    model.eval()
    records = device.type == "cuda" and not torch.version.hip
    with machine.autocast(device):
        val_bpb = metric.evaluate_bpb(cuda_graph.recorded_calls(model) if records else model, tokenizer, result["device_batch_size"])
    ended = time.time()
    summary = {"val_bpb": f"{val_bpb:.6f}", "training_seconds": result["training_seconds"], "total_seconds": f"{ended - started:.1f}"}
    summary["peak_vram_mb"] = f"{max(result['peak_vram_mb'], machine.peak_memory(device)):.1f}"
    summary |= {key: result[key] for key in ("mfu_percent", "total_tokens_M", "num_steps", "num_params_M", "depth")}
    summary |= {
        "dataset": facts["name"],
        "fingerprint": fingerprint,
        "eval_tokens": EVAL_TOKENS,
        "seed": result["seed"],
        "device": device_name,
        "torch": torch.__version__,
        "attention": how[1].names() if how else "sdpa",
        "total_tokens": result.get("total_tokens", "n/a"),  # not in what an earlier version saved
        "tok_per_sec": result["tok_per_sec"],
        "eval_seconds": f"{ended - evaluation_started:.1f}",
        "python": platform.python_version(),
    }
    if os.environ.get("AUTORESEARCH_RUN"):  # by which experiment.py knows that a summary is its run's own
        summary["run"] = os.environ["AUTORESEARCH_RUN"]
    summary |= result.get("sensors", {})  # clock, heat and power of the GPU, where they are known
    print("---")
    for key, value in summary.items():
        print(f"{key + ':':<17} {value}")
    if not args.evaluate and saved and not examined:
        try:
            os.replace(path, os.path.join(here, "model.pt")) if args.keep else os.remove(path)
        except OSError as e:
            print(f"WARNING: {e}" + (f"; the model stays in {path}" if args.keep else ""))


def run(model_class, model_config, make_optimizer, schedule, total_batch_size, device_batch_size):
    """Train and evaluate, and end the process with one line and an exit code of its own where something is wrong.

    model_class: a module class, `model_class(config)`. Its instances have init_weights(), estimate_flops() (per token, forward and
        backward) and num_scaling_params() (a dict of counts with "total"). For x, y (rows, tokens) int64 `model(x, y)` is the mean cross
        entropy, `model(x, y, reduction="none")` that of each token, `model(x)` the logits.
    model_config: vocabulary size → config, a dataclass with n_layer, which is also the model's `config`.
    make_optimizer: model → torch.optim.Optimizer.
    schedule: (optimizer, step, progress), progress from 0 to 1, which sets the groups' rates for the step.
    total_batch_size: tokens of an optimizer step. device_batch_size: rows of a micro-batch.
    """
    for f in (model_class, model_config, make_optimizer, schedule):
        if not callable(f):
            fail(f"run(model_class, model_config, make_optimizer, schedule, …) was given {f!r} for one of these, which can't be called")
    for name, size in (("TOTAL_BATCH_SIZE", total_batch_size), ("DEVICE_BATCH_SIZE", device_batch_size)):
        if type(size) is not int or size < 1:
            fail(f"{name} {size!r} must be a whole number from 1")
    check_batch(total_batch_size, device_batch_size, MAX_SEQ_LEN)
    half = f"use DEVICE_BATCH_SIZE {device_batch_size // 2} (TOTAL_BATCH_SIZE can stay), or " if device_batch_size > 1 else "use "

    def main():
        try:
            _main(model_class, model_config, make_optimizer, schedule, total_batch_size, device_batch_size)
        except torch._dynamo.exc.BackendCompilerFailed as e:
            if isinstance(e.inner_exception, choice.NoneUsable):
                fail(e.inner_exception, ending.EXIT_ENVIRONMENT)
            raise

    ending.run(main, f"with DEVICE_BATCH_SIZE {device_batch_size}: {half}a smaller model")

"""train.py as a program: a whole run, how it fails, how it survives, and what compiling must not do."""

import contextlib
import gc
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from checkout import NO_GPU
from clones import TINY, clone, edit_harness, run, summary
from conftest import PROJECT, called_once
from interpreter import needs_interpreter

import kernels
import prepare
import train
from harness import checkpoint, cuda_graph, ending, machine
from harness import run as harness
from harness.common import hardware as hardware_found
from harness.data import dataset as chosen
from harness.data import metric

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SUMMARY = (
    "val_bpb",
    "training_seconds",
    "total_seconds",
    "peak_vram_mb",
    "mfu_percent",
    "total_tokens_M",
    "num_steps",
    "num_params_M",
    "depth",
)


@pytest.fixture
def no_gpu(monkeypatch):
    """As on a machine without a GPU, in this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def finished(demo, tmp_path_factory):
    """A short demonstration, whole: trained, saved, evaluated, kept."""

    def call(folder):
        edit_harness(clone(folder), "progress_line = Progress()", "progress_line = Progress(every=0.5)")
        return run(folder, "--keep", AUTORESEARCH_TIME_BUDGET="3", AUTORESEARCH_SEED="7", GPU_BF16_PEAK_FLOPS="1e12")

    return called_once(tmp_path_factory, "a finished run", call)


@pytest.mark.slow
def test_run_ends_in_the_summary(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    keys = [line.split(":")[0] for line in done.stdout.split("\n---\n")[1].strip().splitlines()]
    assert tuple(keys[: len(SUMMARY)]) == SUMMARY
    values = {k: v.strip() for k, v in summary(done.stdout).items()}
    decimals = dict(val_bpb=6, training_seconds=1, total_seconds=1, peak_vram_mb=1, total_tokens_M=1, num_params_M=1)
    assert all(re.fullmatch(rf"\d+\.\d{{{n}}}", values[k]) for k, n in decimals.items()), values
    assert 0.5 < float(values["val_bpb"]) < 3.5 and float(values["training_seconds"]) >= 3 and int(values["num_steps"]) > 11
    assert (values["dataset"], values["seed"], values["eval_tokens"]) == ("demo", "7", "65536")
    assert values["fingerprint"] == prepare.fingerprint(budget=3) != prepare.fingerprint(budget=60)


def test_loss_falls_and_progress_is_plain_lines(finished):
    _, done = finished
    assert "\r" not in done.stdout and max(map(len, done.stdout.splitlines())) < 400
    losses = [float(x) for x in re.findall(r"^step \d+ .* loss: ([\d.]+)", done.stdout, re.M)]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.05) and losses[-1] < losses[0] - 1


def test_kept_model_evaluates_to_the_same_number(finished):
    folder, done = finished
    again = run(folder, "--evaluate", "model.pt", AUTORESEARCH_TIME_BUDGET="3")
    assert again.returncode == 0, again.stderr
    assert summary(again.stdout)["val_bpb"] == summary(done.stdout)["val_bpb"]
    assert summary(again.stdout)["num_steps"] == summary(done.stdout)["num_steps"]
    other_budget = run(folder, "--evaluate", "model.pt", AUTORESEARCH_TIME_BUDGET="7")
    assert other_budget.returncode == 1 and "the number would not compare" in other_budget.stderr


def load(path):
    return harness.load(str(path), train.GPT, train.model_config(512), torch.device("cpu"), checkpoint.file_digest(train.__file__))


def test_evaluating_what_is_no_model(finished, no_gpu, tmp_path, capsys):
    folder, _ = finished
    (tmp_path / "noise.pt").write_bytes(b"not a model")
    torch.save({"config": {"sequence_len": 256}, "model": {}, "facts": {}}, tmp_path / "other.pt")
    torch.save({"config": {"n_head": 0}, "model": {}, "facts": {}}, tmp_path / "no heads.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    says = {name: name for name in ("noise.pt", "other.pt", "tensor.pt", "missing.pt")} | {
        "no heads.pt": "n_kv_head 6 must divide n_head 0"
    }
    for name, message in says.items():
        with pytest.raises(SystemExit) as ended:
            load(tmp_path / name)
        error = capsys.readouterr().err
        assert ended.value.code == 1 and message in error and len(error.splitlines()) == 1, error
    done = run(folder, "--evaluate", str(tmp_path / "noise.pt"))
    assert done.returncode == 1 and "noise.pt" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_saved_model_is_data(no_gpu, tmp_path):
    """A checkpoint that would run code when unpickled is refused."""

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"config": {}, "model": Payload(), "facts": {}}, tmp_path / "model.pt")
    with pytest.raises(SystemExit):
        load(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_evaluation_that_crashes_costs_no_training(demo, tmp_path):
    folder = clone(tmp_path, **TINY)
    source = (folder / "train.py").read_text()
    (folder / "train.py").write_text(
        source.replace("T = idx.size(1)\n", "T = idx.size(1)\n        assert self.training or len(idx) == 1, 'the evaluation crashed'\n")
    )
    crashed = run(folder, AUTORESEARCH_TIME_BUDGET="1")
    assert crashed.returncode != 0 and "the evaluation crashed" in crashed.stderr and (folder / "unevaluated.pt").exists()
    (folder / "train.py").write_text(source)
    again = run(folder, "--evaluate", "unevaluated.pt", AUTORESEARCH_TIME_BUDGET="1")
    assert again.returncode == 0 and 0 < float(summary(again.stdout)["val_bpb"]) < 4
    assert "WARNING: train.py has changed" in again.stdout and (folder / "unevaluated.pt").exists(), "--evaluate removes nothing"


def test_summary_counts_the_timed_steps(finished):
    """tokens/s and MFU over the steps after the 11th, the tokens of all."""
    _, done = finished
    values = {k: float(v) for k, v in summary(done.stdout).items() if re.fullmatch(r"\s*\d+(\.\d+)?", v)}
    flops_per_token = float(re.search(r"([\d.e+]+) FLOPs per token", done.stdout)[1])
    rate = (values["num_steps"] - 11) * 4096 / values["training_seconds"]
    assert values["tok_per_sec"] == pytest.approx(rate, rel=0.02)
    assert values["mfu_percent"] == pytest.approx(100 * rate * flops_per_token / 1e12, rel=0.02)
    assert values["total_tokens_M"] == pytest.approx(values["num_steps"] * 4096 / 1e6, abs=0.051)
    assert values["total_tokens"] == values["num_steps"] * 4096


def test_without_keep_the_model_goes_and_a_kept_one_stays(demo, tmp_path):
    folder = clone(tmp_path, **TINY)
    (folder / "model.pt").write_text("kept earlier")
    done = run(folder, AUTORESEARCH_TIME_BUDGET="0.5")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.glob("*.pt*")) == ["model.pt"] and (folder / "model.pt").read_text() == "kept earlier"


def test_training_loop(demo, no_gpu, monkeypatch, capsys):
    """On a clock that ticks a second a reading: 11 untimed steps, then as many as the budget has, with the schedules of each."""
    model = small_model(torch.device("cpu"), n_layer=1, sequence_len=256, vocab_size=2048, n_embd=64, n_head=2, n_kv_head=1)
    model.value_embeds["idle"] = torch.nn.Embedding(4, 4)  # which the model does not read
    model.value_embeds["frozen"] = torch.nn.Embedding(4, 4).requires_grad_(False)
    optimizer, seen = model.setup_optimizer(matrix_lr=0.04, weight_decay=0.2), []
    step = optimizer.step

    def recorded():
        muon = optimizer.param_groups[-1]
        seen.append((muon["lr"] / muon["initial_lr"], muon["momentum"], muon["weight_decay"]))
        step()

    ticks = iter(range(10**6))
    monkeypatch.setattr(optimizer, "step", recorded)
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(harness, "TIME_BUDGET", 8)
    tokenizer = prepare.Tokenizer.from_directory(demo.tokenizer_dir)
    monkeypatch.setattr(chosen, "DATASET", demo)
    monkeypatch.setattr(train, "WEIGHT_DECAY", 0.2)
    loader, told = prepare.make_dataloader(tokenizer, 2, 256, "train"), []
    try:
        cpu, told_once = torch.device("cpu"), lambda: told.append(len(seen))
        found = harness.train(model, optimizer, train.schedule, loader, cpu, 1024, 2, 1e6, None, told=told_once)
        assert not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()
    assert found == (11 + 8, 8, (11 + 8) * 1024) and told == [1]
    steps = found[0]
    progress = [0.0] * 12 + [i / 8 for i in range(1, 8)]  # before each step
    expected = [(train.lr_multiplier(p), train.muon_momentum(i), 0.2 * (1 - p)) for i, p in enumerate(progress)]
    assert [pytest.approx(e) for e in expected] == seen
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if "WARNING" in line] == [
        "WARNING: not trained, because the loss does not depend on it: value_embeds.idle.weight"
    ]
    lines = [line for line in output if line.startswith("step ")]
    assert "warming up, not timed" in lines[0] and len(lines) < steps, "into a file a line every few seconds, not every step"


# --- failures: one line, an exit code, nothing lost ---------------------------------------------------------------------


def test_sizes_that_do_not_fit_end_the_run(demo, tmp_path):
    done = run(clone(tmp_path, TOTAL_BATCH_SIZE="96 * 256", DEVICE_BATCH_SIZE=36))
    message = "the nearest that work: DEVICE_BATCH_SIZE 32 or TOTAL_BATCH_SIZE 27648"
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(("edits", "message"), [
    (dict(HEAD_DIM=31), "HEAD_DIM 31"),
    (dict(DEPTH=0), "DEPTH 0 must be a whole number from 1"),
    (dict(DEPTH=1, ASPECT_RATIO=16, HEAD_DIM=16), "makes n_embd 16"),
    (dict(WINDOW_PATTERN="SXL"), "WINDOW_PATTERN 'SXL'"),
    (dict(WINDOW_PATTERN=["S", "L"]), "WINDOW_PATTERN ['S', 'L'] must consist"),
])  # fmt: skip
def test_sizes_that_do_not_fit(monkeypatch, capsys, edits, message):
    for name, value in edits.items():
        monkeypatch.setattr(train, name, value)
    with pytest.raises(SystemExit) as ended:
        train.model_config(2048)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(("sizes", "message"), [
    ((100, 1), "the nearest that work: TOTAL_BATCH_SIZE 256"),
    ((4096, 0), "DEVICE_BATCH_SIZE 0 must be a whole number from 1"),
    ((4096.0, 16), "TOTAL_BATCH_SIZE 4096.0 must be a whole number from 1"),
])  # fmt: skip
def test_batches_that_do_not_fit(capsys, sizes, message):
    with pytest.raises(SystemExit) as ended:
        harness.run(train.GPT, train.model_config, train.make_optimizer, train.schedule, *sizes)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and message in error and len(error.splitlines()) == 1


def test_a_cpu_needs_no_triton(demo, tmp_path):
    """A bare CPU has none; here a module of that name says so."""
    folder = clone(tmp_path, **TINY)
    (folder / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
    done = run(folder, AUTORESEARCH_TIME_BUDGET="0.5")
    assert done.returncode == 0 and "val_bpb:" in done.stdout, done.stderr


@pytest.mark.parametrize("value", ["nan", "1e4"])
def test_divergence_ends_the_run(demo, tmp_path, value):
    folder = clone(tmp_path, **TINY)
    source = (folder / "train.py").read_text()
    loss, rates = "return F.cross_entropy(", 'group["lr"] = group["initial_lr"] * lr_multiplier(progress)'
    assert source.count(loss) == source.count(rates) == 1
    source = source.replace(loss, f"return (float('{value}') if 'late' in globals() else 1) * F.cross_entropy(")
    (folder / "train.py").write_text(source.replace(rates, f"globals().update({{'late': 1}} if step == 1 else {{}})\n        {rates}"))
    done = run(folder)
    assert done.returncode == 1 and "at step 2: the run diverged" in done.stderr and "---" not in done.stdout


@pytest.mark.parametrize(("old", "new", "message"), [
    ('targets=None, reduction="mean"):', "targets=None):\n        reduction = 'mean'", "forward has no `reduction`"),
    ("if targets is None:\n            return logits", "if targets is None:\n            return logits[0]", "not the logits (rows, tokens"),
    ("logits = SOFTCAP *", "logits = (1 if targets is None else 3) * SOFTCAP *", "are not the cross entropy of its logits"),
    ("return model.setup_optimizer(", "return (", "the optimizer is a tuple; return a torch.optim.Optimizer"),
    ("make_optimizer, schedule, TOTAL", "make_optimizer, 0.5, TOTAL", "was given 0.5 for one of these"),
])  # fmt: skip
def test_what_would_be_no_result_is_said_before_training(demo, tmp_path, old, new, message):
    folder = clone(tmp_path, **TINY)
    source = (folder / "train.py").read_text()
    assert source.count(old) == 1
    (folder / "train.py").write_text(source.replace(old, new))
    done = run(folder, AUTORESEARCH_TIME_BUDGET="0.5")
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1 and "step 0" not in done.stdout, (
        done.stderr
    )


def test_out_of_memory_says_what_to_lower(demo, tmp_path):
    folder = clone(tmp_path)
    source = (folder / "train.py").read_text()
    forward = "x = x0 = norm("
    assert source.count(forward) == 1
    (folder / "train.py").write_text(source.replace(forward, 'raise torch.OutOfMemoryError("CUDA out of memory")\n        ' + forward))
    done = run(folder)
    assert done.returncode == 1 and "use DEVICE_BATCH_SIZE 8 (TOTAL_BATCH_SIZE can stay), or a smaller model" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "error, code",
    [
        (FileNotFoundError(2, "No such file or directory", "notes.txt"), 1),  # a path that train.py names
        (IsADirectoryError(21, "Is a directory", "notes"), 1),
        (OSError(28, "No space left on device"), ending.EXIT_ENVIRONMENT),
        (prepare.DataError("the tokens are gone"), ending.EXIT_ENVIRONMENT),
        (prepare.NoResult("val_bpb is nan"), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_end_has_its_line_and_exit_code(capsys, error, code):
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        ending.run(main, "with DEVICE_BATCH_SIZE 8: use 4")
    line = capsys.readouterr().err
    assert end.value.code == code and line.startswith("FAIL: ") and line.count("\n") == 1
    assert (str(error) or "interrupted") in line and ("use 4" in line) == isinstance(error, torch.OutOfMemoryError)


def test_a_terminal_without_a_character_costs_no_summary(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    ending.run(lambda: print("gpu_throttled: 95 °C, critical are 100"), "")
    assert written.getvalue() == b"gpu_throttled: 95 \\xb0C, critical are 100\n"


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_reader_that_leaves(monkeypatch, capsys, buffering):
    """As `train.py | head`, with an output that Python's buffer holds to the end, or none of it."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=buffering) as pipe, io.TextIOWrapper(pipe, write_through=buffering == 0) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            ending.run(lambda: print("a line"), "")
    assert end.value.code == 1 and capsys.readouterr().err == ""


def test_absurd_losses_are_no_result(demo, tmp_path):
    folder = clone(tmp_path, **TINY)
    source = (folder / "train.py").read_text()
    returned = "return F.cross_entropy("
    (folder / "train.py").write_text(source.replace(returned, "return (-1 if reduction == 'none' else 1) * F.cross_entropy("))
    done = run(folder, AUTORESEARCH_TIME_BUDGET="0.5")
    assert done.returncode == 1 and "this is no result" in done.stderr and "val_bpb:" not in done.stdout


def test_where_the_model_cannot_be_saved_is_said_before_training(demo, tmp_path):
    (clone(tmp_path) / "unevaluated.pt").mkdir()
    done = run(tmp_path)
    assert done.returncode == ending.EXIT_ENVIRONMENT and "unevaluated.pt can't be written" in done.stderr and "step 0" not in done.stdout


def test_save_that_fails_costs_no_result(demo, tmp_path, capsys):
    """A disk that is full when the training is over: the evaluation goes on."""
    checkpoint.save("/dev/full/model.pt", {"model": torch.zeros(3)})
    assert "WARNING: the model could not be saved" in capsys.readouterr().out


def test_what_a_researcher_adds(no_gpu, capsys, monkeypatch):
    """What init_weights leaves out has torch's first values, is counted, and is named until a group has it; the draws stay the same."""
    plain = small_model(torch.device("cpu"), n_layer=1).state_dict()
    init = train.GPT.__init__

    def extended(self, config):
        init(self, config)
        self.transformer.h[0].extra = torch.nn.LayerNorm(config.n_embd)
        self.register_buffer("scale", torch.ones(config.n_embd))
        self.bigram = torch.nn.Embedding(512, config.n_embd)

    monkeypatch.setattr(train.GPT, "__init__", extended)
    model = small_model(torch.device("cpu"), n_layer=1)
    assert (model.transformer.h[0].extra.weight == 1).all() and (model.scale == 1).all()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.items())
    assert model.num_scaling_params()["total"] == sum(value.numel() for value in plain.values()) + 2 * 128 + 512 * 128

    def refused():
        with pytest.raises(SystemExit):
            model.setup_optimizer()
        return capsys.readouterr().err

    assert "FAIL: transformer.h.0.extra.weight (128,) is in 0 groups of setup_optimizer" in refused()
    model.value_embeds["extra"] = model.transformer.h[0].extra  # whose group is AdamW's
    assert "FAIL: bigram.weight (512, 128) is in 0 groups" in refused()
    model.value_embeds["bigram"] = model.bigram
    assert sum(len(group["params"]) for group in model.setup_optimizer().param_groups) == len(list(model.parameters()))
    model.value_embeds["mlp"] = model.transformer.h[0].mlp
    assert "FAIL: transformer.h.0.mlp.c_fc.weight (512, 128) is in 2 groups" in refused()


def test_missing_data_is_said_before_training(tmp_path, demo):
    done = run(PROJECT, AUTORESEARCH_CACHE=str(tmp_path))
    assert done.returncode == ending.EXIT_ENVIRONMENT and "run python prepare.py" in done.stderr and "step 0" not in done.stdout


@pytest.mark.parametrize("name", ["shard_06542.tokens", "shard_00000.index.npz", "shard_00000.json"])
def test_damaged_tokens_are_said_before_training(tmp_path, demo, name):
    copy = tmp_path / "demo"
    subprocess.run(["cp", "-r", demo.root, str(copy)], check=True)
    path = copy / "tokens" / name
    path.write_bytes(path.read_bytes()[:-2]) if name.endswith("tokens") else path.unlink()
    done = run(PROJECT, AUTORESEARCH_CACHE=str(tmp_path))
    assert done.returncode == ending.EXIT_ENVIRONMENT and name.split(".")[0] in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("variable", "value"), [
    ("AUTORESEARCH_TIME_BUDGET", "soon"), ("AUTORESEARCH_TIME_BUDGET", "-3"), ("AUTORESEARCH_SEED", "x"), ("AUTORESEARCH_DATASET", "c4"),
    ("GPU_BF16_PEAK_FLOPS", "fast"),
])  # fmt: skip
def test_bad_environment_variables(monkeypatch, capsys, variable, value):
    """What train.py asks when it begins, each by itself."""
    monkeypatch.setenv(variable, value)
    asks = {
        "AUTORESEARCH_TIME_BUDGET": lambda: chosen.time_budget(chosen.DATASET),
        "AUTORESEARCH_SEED": prepare.seed_everything,
        "AUTORESEARCH_DATASET": chosen.choose_dataset,
        "GPU_BF16_PEAK_FLOPS": lambda: machine.peak_flops(torch.device("cpu")),
    }
    with pytest.raises(SystemExit) as ended:
        asks[variable]()
    said = capsys.readouterr().err if ended.value.code == 1 else ended.value.code
    assert f"{variable}={value!r} is no " in said and len(said.splitlines()) == 1


def test_a_bad_environment_variable_ends_the_run(demo):
    done = run(PROJECT, AUTORESEARCH_SEED="x")
    assert done.returncode == 1 and "'x'" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_interrupt_ends_at_once_without_a_traceback(demo, tmp_path):
    command, both = [sys.executable, "-u", "train.py"], dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=clone(tmp_path, **TINY), env=os.environ | NO_GPU, **both)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)  # a run that went on would end well before
    assert process.returncode == 130 and stderr.strip() == "FAIL: interrupted"


def test_gpu_that_torch_cannot_use_ends_the_run(monkeypatch, capsys):
    """Simulated: this machine with an AMD GPU in its device files and a torch without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware_found, "gpu_hardware", lambda: "AMD gfx1151")
    monkeypatch.setattr(chosen, "DATASET", SimpleNamespace(name="climbmix"))
    with pytest.raises(SystemExit) as e:
        machine.find_device()
    assert e.value.code == ending.EXIT_ENVIRONMENT and "AMD gfx1151" in capsys.readouterr().err


# --- FLOPS table and memory cap, on simulated devices --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "arch", "flops"), [
    ("NVIDIA H100 80GB HBM3", "", 989.5e12), ("NVIDIA H200", "", 989.5e12), ("NVIDIA H100 PCIe", "", 756e12), ("NVIDIA H20", "", 148e12),
    ("NVIDIA A100-SXM4-80GB", "", 312e12), ("NVIDIA B200", "", 2250e12), ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 1307.4e12),
    ("AMD Radeon Graphics", "gfx1151", 49.6e12), ("AMD Radeon 8060S", "gfx1151", 49.6e12),
    ("NVIDIA L40S", "", 362e12), ("NVIDIA L4", "", 121e12),
    ("NVIDIA A10G", "", 125e12), ("AMD Radeon RX 7900 XTX", "gfx1100", 122.8e12), ("AMD Radeon RX 7900 XT", "gfx1100", 103e12),
])  # fmt: skip
def test_peak_flops(monkeypatch, name, arch, flops):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name, gcnArchName=arch))
    assert machine.peak_flops(torch.device("cuda"))[0] == flops


def test_unknown_device_is_warned_of_and_can_be_told(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="Voodoo 2"))
    assert machine.peak_flops(torch.device("cuda"))[0] is None
    assert "WARNING: the peak FLOP/s of 'Voodoo 2' are not known" in capsys.readouterr().out
    monkeypatch.setenv("GPU_BF16_PEAK_FLOPS", "5e12")
    assert machine.peak_flops(torch.device("cuda"))[0] == 5e12


def test_memory_that_the_host_shares_is_capped(monkeypatch, capsys):
    caps = []
    total = 96 * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=True, total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: caps.append(fraction))
    machine.cap_shared_memory(torch.device("cuda"))
    with open("/proc/meminfo") as f:
        available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    assert caps[0] * total <= max(0.1 * total, available) and "GiB are used" in capsys.readouterr().out
    monkeypatch.setenv("GPU_MEMORY_FRACTION", "0.5")
    machine.cap_shared_memory(torch.device("cuda"))
    assert caps[1] == 0.5


def test_uncompiled_attention_on_amd_is_by_products(monkeypatch):
    """Simulated: a build for AMD. The same numbers, by none of torch's own attention, and torch's again afterwards."""
    F, original = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.version, "hip", "10.0")
    q, (k, v) = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 2, 8, 16)
    seen = torch.ones(8, 8, dtype=torch.bool).tril().triu(-3)
    for how in (dict(is_causal=True), dict(attn_mask=seen), dict(attn_mask=seen.float()), dict(scale=0.3), {}):
        exact = original(q, k, v, enable_gqa=True, **how)
        with metric.uncompiled():
            ours = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
            assert F.scaled_dot_product_attention is kernels.sdpa_ref
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    assert F.scaled_dot_product_attention is original


def test_progress_on_a_terminal_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    progress = harness.Progress()
    progress.show("step 1")
    progress.show("step 2")
    progress.end()
    assert capsys.readouterr().out == "\rstep 1\x1b[K\rstep 2\x1b[K\n"


@pytest.mark.parametrize("n_kv_head", [0, 3, 8])
def test_kv_heads_that_do_not_fit(no_gpu, capsys, n_kv_head):
    with pytest.raises(SystemExit):
        small_model(torch.device("cpu"), n_kv_head=n_kv_head)
    assert f"n_kv_head {n_kv_head} must divide n_head 4" in capsys.readouterr().err


# --- compiling ----------------------------------------------------------------------------------------------------------


def small_model(device, **changes):
    config = dict(sequence_len=256, vocab_size=512, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, window_pattern="SSSL") | changes
    torch.manual_seed(0)
    return harness.build(train.GPT, train.GPTConfig(**config), device)


def some_tokens(device, T=256, seed=1):
    ids = torch.randint(0, 512, (2, T + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_no_recompilation_over_a_changing_schedule(monkeypatch):
    """Model and both optimizer steps, traced without graph breaks; a hyperparameter that were compiled in would raise at its first change.

    On the CPU with a backend that traces and does not generate code: torch 2.13's own fails there on a matrix of one row.
    """
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    model = small_model(DEVICE, sequence_len=64, n_layer=2, window_pattern="SL")
    optimizer = model.setup_optimizer(weight_decay=0.2)
    whole = kernels.Fusion() if DEVICE.type == "cuda" else backend
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=whole)
    for name in ("adamw_step", "muon_step"):
        step = torch.compile(getattr(train, name).function, dynamic=False, fullgraph=True, backend=backend)
        monkeypatch.setattr(train, name, step)
    x, y = some_tokens(DEVICE, T=64)
    losses = []
    for step in range(6):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            with machine.autocast(DEVICE):
                loss = compiled(x, y)
            loss.backward()
            train.schedule(optimizer, step, step / 6)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_a_constant_that_is_compiled_in_would_be_seen():
    """The test above has teeth: with Python numbers for hyperparameters dynamo recompiles."""
    torch._dynamo.reset()
    step = torch.compile(train.adamw_step.function, dynamic=False, fullgraph=True, backend="aot_eager")
    p, grad, m, v = (torch.ones(4) for _ in range(4))
    rest = [torch.tensor(x) for x in (0.8, 0.95, 1e-10, 0.0)]
    step(p, grad, m, v, torch.tensor(1.0), 0.1, *rest)
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(torch._dynamo.exc.RecompileError):
        step(p, grad, m, v, torch.tensor(1.0), 0.2, *rest)


# --- the fused path -----------------------------------------------------------------------------------------------------


SMALL = dict(sequence_len=48, n_head=2, n_kv_head=1, n_embd=64)  # the interpreter is slow


BATCHES = 8 if DEVICE.type == "cuda" else 1  # in bfloat16 the error of the few λs' gradients is chance: over several batches it is not


def relative_errors(ours, exact):
    """{parameter: ‖ours - exact‖ / ‖exact‖} over all batches, those of fewer than 100 numbers taken together as `scalars`.

    ours, exact: a {parameter: gradient} for each batch.
    """
    names = {n: n if g.numel() >= 100 else "scalars" for n, g in exact[0].items()}
    errors, sizes = dict.fromkeys(names.values(), 0.0), dict.fromkeys(names.values(), 0.0)
    for mine, theirs in zip(ours, exact):
        for n, name in names.items():
            errors[name] += (mine[n] - theirs[n]).double().square().sum().item()
            sizes[name] += theirs[n].double().square().sum().item()
    return {name: (errors[name] / max(sizes[name], 1e-24)) ** 0.5 for name in errors}


def fuse(model):
    """Compile in place, the kernels as they are: what else torch's compiler would generate is its own matter."""
    torch._dynamo.reset()
    backend = kernels.Fusion(backend="aot_eager")
    model.compile(backend=backend, dynamic=False, fullgraph=True)
    return backend


def losses_and_gradients(fused, device, autocast=True):
    """(mean loss, losses of all tokens, gradients of each batch) of one small model; `c_proj` starts at zero, which would hide what is
    before it. The losses are the first batch's."""
    model = small_model(device, **SMALL)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2 and (p == 0).all():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
        if not autocast:
            model.float()
    backend = fuse(model) if fused else None
    losses, gradients, each = [], [], None
    for batch in range(BATCHES):
        x, y = some_tokens(device, T=SMALL["sequence_len"], seed=1 + batch)
        with machine.autocast(device) if autocast else contextlib.nullcontext():
            losses.append(model(x, y))
            with torch.no_grad():
                each = model(x, y, reduction="none") if batch == 0 else each
        losses[-1].backward()
        gradients.append({n: p.grad.float() for n, p in model.named_parameters()})
        model.zero_grad()
    assert not backend or len(backend.graphs) == 2 and not any(graph.rejected for graph in backend.graphs)
    return losses[0].item(), each, gradients


def test_fused_and_plain_agree():
    """On the CPU in float32, the kernels interpreted; on a GPU in bfloat16, where each differs from float32 by its own rounding."""
    exact = losses_and_gradients(False, DEVICE, autocast=False)
    plain = losses_and_gradients(False, DEVICE)
    ours = losses_and_gradients(True, DEVICE)
    low = DEVICE.type == "cuda"
    assert ours[0] == pytest.approx(exact[0], abs=5e-3 if low else 2e-6)
    assert exact[1].shape == ours[1].shape == plain[1].shape
    assert (ours[1] - exact[1]).abs().max() <= max(2 * (plain[1] - exact[1]).abs().max(), 1e-5)
    errors, allowed = (relative_errors(other[2], exact[2]) for other in (ours, plain))
    assert {n: e for n, e in errors.items() if e > max(3 * allowed[n], 1e-4)} == {}


def test_fused_bfloat16_gradients_are_as_exact_as_plain_ones():
    """The whole model's, against float64's: no more error than plain PyTorch's in bfloat16, and none that makes them all longer or shorter.

    What each operation's own test allows, twice or three times torch's error, would add up to a run that learns more slowly.
    """

    def model():
        model = small_model(DEVICE, **SMALL)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 2 and ((p == 0).all() or name == "lm_head.weight"):
                    p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if name == "lm_head.weight" else 0.05))
            model.transformer.wte.bfloat16(), model.value_embeds.bfloat16()  # as on a GPU
        return model

    def gradients(model, dtype):
        found = []
        for batch in range(BATCHES):
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                model(*some_tokens(DEVICE, T=SMALL["sequence_len"], seed=1 + batch)).backward()
            found.append({n: p.grad.double() for n, p in model.named_parameters()})
            model.zero_grad()
        return found

    reference = model().double()
    reference.cos, reference.sin = reference.cos.double(), reference.sin.double()
    exact = gradients(reference, torch.float64)
    plain = gradients(model(), torch.bfloat16)
    fused = model()
    fuse(fused)
    ours = gradients(fused, torch.bfloat16)
    mine, theirs = (relative_errors(other, exact) for other in (ours, plain))
    # For the few λs of a batch 1.5 would be a throw of dice: by chance one ratio of two such errors in four is beyond it.
    assert {n: e for n, e in mine.items() if e > (3 if n == "scalars" else 1.5) * theirs[n]} == {}
    print(f"the distance of all gradients from float64's, ours over plain: {sum(mine.values()) / sum(theirs.values()):.2f}")
    assert sum(mine.values()) <= 1.1 * sum(theirs.values())
    along = [  # of more than a handful of numbers, which lean somewhere by chance
        (((our[n] - g) * g).sum() / g.square().sum()).item() for our, all_ in zip(ours, exact) for n, g in all_.items() if g.numel() > 1000
    ]
    assert abs(sum(along) / len(along)) <= 1.5e-3


def test_plain_steps_keep_the_dtype_where_autocast_norms_in_float32(monkeypatch):
    """As a GPU's does since torch 2.12: streams would be twice as large, and torch's flash operator refuses such q and k.

    On the CPU a stand-in, whose own autocast leaves the norm alone.
    """
    if DEVICE.type == "cpu":
        rms_norm = torch.nn.functional.rms_norm
        monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape: rms_norm(x.float(), shape))
    model, dtypes = small_model(DEVICE, **SMALL), set()
    model.transformer.wte.bfloat16(), model.value_embeds.bfloat16()  # as on a GPU
    for block in model.transformer.h:
        block.register_forward_hook(lambda block, inputs, output: dtypes.add(output.dtype))
    attend = train.attention
    monkeypatch.setattr(train, "attention", lambda q, k, v, window: dtypes.update({q.dtype, k.dtype, v.dtype}) or attend(q, k, v, window))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        model(*some_tokens(DEVICE, T=SMALL["sequence_len"])).backward()
    assert dtypes == {torch.bfloat16}


def test_the_whole_model_is_one_graph():
    """Which training has one of, and evaluation one."""
    model = small_model(DEVICE, **SMALL | dict(sequence_len=16))
    backend = fuse(model)
    x, y = some_tokens(DEVICE, T=16)
    for _ in range(2):
        with machine.autocast(DEVICE):
            model(x, y).backward()
    assert len(backend.graphs) == 1
    with torch.no_grad(), machine.autocast(DEVICE):
        for _ in range(2):
            model(x, y, reduction="none")
    assert len(backend.graphs) == 2


def counting_model():
    """A model in which a Python number counts the calls."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = torch.nn.Parameter(torch.ones(3, device=DEVICE)), 0

        def forward(self, x, y):
            self.calls += 1
            return (self.weight * self.calls).sum() + 0 * x.float().mean()

    return Counting()


def test_a_python_number_that_changes_is_named_with_its_line(capsys):
    torch._dynamo.reset()
    model = counting_model()
    model.compile(backend="eager", dynamic=False)
    x = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    micro = harness.Micro(model, DEVICE, 1)
    micro(x, x)
    with pytest.raises(SystemExit) as ended, harness.steady():
        micro(x, x)
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("FAIL: a Python value changed during training") and len(error.splitlines()) == 1
    assert "self.calls" in error and "test_train.py" in error, error


@pytest.mark.gpu
def test_a_python_number_that_a_recording_froze_is_found_by_the_check(capsys):
    model = counting_model()
    x = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    micro = harness.Micro(model, DEVICE, 1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    micro.record(x, x)
    assert micro.recorded and micro(x, x).item() == 3
    with pytest.raises(SystemExit):
        micro.check(x, x)
    assert "something that Python decides in the model changed during training" in capsys.readouterr().err


AS_ROCM = """
import contextlib, sys
import conftest, torch
torch.version.hip, torch.version.cuda = "7.2.1", None  # before any kernel is imported: their tables of tilings differ
from importlib import import_module
import kernels, train
from harness import choice as backends
from harness.data import dataset
from harness.run import build
linear = import_module("kernels.linear")
dataset.CACHE_DIR = sys.argv[1]
linear.blas = lambda library: contextlib.nullcontext()
backends._here = lambda device: ["a Strix Halo"]
times = lambda way, cases: [1.0 + (way not in ("copied by cublas", "kernels"))] * len(cases)
backends._tried = lambda what, cases, sizes, missing, device: [(way, cases, times(way, cases)) for way, cases in missing.items()]
config = train.GPTConfig(sequence_len=16, vocab_size=64, n_layer=2, n_head=2, n_kv_head=1, n_embd=64)
model = build(train.GPT, config, torch.device("cpu"))
chosen = backends.Chosen()
model.compile(backend=kernels.Fusion(chosen.attention, chosen.products, "aot_eager"), dynamic=False)
optimizer = model.setup_optimizer()
x = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
for _ in range(2):
    loss = model(x, x)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    print(loss.item())
assert linear.WEIGHT_GRADIENT[64, 64] == ("copied", "cublas"), linear.WEIGHT_GRADIENT
assert chosen.names() == "kernels up to 8, kernels up to 16", chosen.names()
"""


@pytest.mark.slow
@needs_interpreter
def test_steps_as_on_rocm(tmp_path):
    """Everything that a ROCm build of torch decides otherwise, in two steps of a model. Stand-ins: build, BLAS, what trials find."""
    losses = []
    for code in (
        AS_ROCM,
        AS_ROCM.replace('torch.version.hip, torch.version.cuda = "7.2.1", None', "").replace("assert linear", "True or linear"),
    ):
        command, env = [sys.executable, "-c", code, str(tmp_path)], os.environ | NO_GPU
        done = subprocess.run(command, cwd=PROJECT / "tests", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.append([float(line) for line in done.stdout.splitlines() if line[0].isdigit()])
    rocm, elsewhere = losses
    assert rocm == pytest.approx(elsewhere, abs=1e-5) and rocm[-1] < rocm[0]


@pytest.mark.gpu
def test_recorded_steps_are_the_same_steps_without_a_synchronization(monkeypatch):
    def run(recorded):
        model = small_model(DEVICE)
        harness.compile_model(model, DEVICE)
        optimizer = model.setup_optimizer(weight_decay=0.2)
        x, y = some_tokens(DEVICE)

        def micro_step(x, y):
            with machine.autocast(DEVICE):
                loss = model(x, y)
            loss.backward()
            return loss.detach()

        losses = [micro_step(x, y).item()]
        optimizer.step()
        model.zero_grad(set_to_none=False)
        step = cuda_graph.Recorded(micro_step, x, y) if recorded else micro_step
        for _ in range(5):
            torch.cuda.set_sync_debug_mode("error")
            loss = step(x, y)
            optimizer.step()
            model.zero_grad(set_to_none=False)
            torch.cuda.set_sync_debug_mode("default")
            losses.append(cuda_graph.wait_for(loss))
        return losses, step, (x, y)

    plain, recorded = run(False)[0], [run(True), run(True)]
    original = train.SOFTCAP
    for losses, step, batch in recorded:
        assert losses == pytest.approx(plain, abs=2e-2) and losses[-1] < losses[0] - 0.5
        changed = original != train.SOFTCAP
        assert step.holds(*batch) != changed, "a changed constant is seen"
        monkeypatch.setattr(train, "SOFTCAP", 1.5)


def test_what_is_recorded_gives_its_memory_to_its_check(monkeypatch):
    """Asked at a run's end by a pass that needs as much memory as the graph had. CUDA's calls are stand-ins."""
    happened = []
    graph = SimpleNamespace(replay=lambda: happened.append("replay"), reset=lambda: happened.append("reset"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty"))
    step = cuda_graph.Recorded(lambda x: (happened.append("function"), 2 * x)[1], torch.ones(()))
    assert step.holds(torch.ones(()))
    assert happened == ["empty", "function", "replay", "replay", "reset", "empty", "function"]


@pytest.mark.gpu
def test_the_check_of_a_recording_needs_no_memory_beside_it():
    """A pass of 2 GiB: at no time is much more reserved than one pass needs."""
    x = torch.ones(2**26, device=DEVICE)
    step = cuda_graph.Recorded(lambda x: (torch.cat([x, x, x, x]) + 1).sum(), x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assert step.holds(x)
    assert torch.cuda.max_memory_reserved() <= before + 2**28


@pytest.mark.gpu
def test_what_cant_be_recorded_runs_unrecorded(capsys):
    x = torch.ones(3, device=DEVICE)
    assert cuda_graph.record(lambda x: x * x.sum().item(), x) is None
    assert "No CUDA graph" in capsys.readouterr().out
    assert (x * 2).sum().item() == 6, "the device goes on working"
    assert torch.randn(9, device=DEVICE).isfinite().all(), "its random numbers too"


@pytest.mark.gpu
def test_one_synchronization_a_step_and_batches_stay_intact(golden, monkeypatch):
    """The loader hands out tensors that later batches don't overwrite, though copies run on a stream of their own."""
    monkeypatch.setattr(chosen, "DATASET", golden)
    loader = prepare.make_dataloader(prepare.Tokenizer.from_directory(), 8, 256, "train")
    kept = []
    for _ in range(50):
        x, y, _ = next(loader)
        torch.cuda._sleep(1_000_000)  # the computation lags behind the loader
        kept.append((x, y, x.clone(), y.clone()))
    torch.cuda.synchronize()
    assert all(torch.equal(x, cx) and torch.equal(y, cy) and torch.equal(x[:, 1:], y[:, :-1]) for x, y, cx, cy in kept)


def test_importing_runs_nothing():
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", "import train; print(train.DEPTH)"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        env={**os.environ, "AUTORESEARCH_CACHE": "/nonexistent"},
    )
    assert done.stdout == "4\n" and done.stderr == "", (done, time.time() - start)

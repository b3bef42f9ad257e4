"""What would make a number false, by accident or by zeal: refused, kept out by the box, or found by who examines the model."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkout import NO_GPU, Checkout
from clones import clone
from conftest import PROJECT
from test_protocol import TEXT, fixed_model, tokenizer  # noqa: F401

from harness import examiner
from harness import launch as launch_module
from harness.common import box
from harness.data import metric, ready
from harness.data.dataset import DataError, NoResult
from loop import files, proposal
from loop import run as loop_run

SOURCE = (PROJECT / "train.py").read_text()
TREE = proposal.parse(SOURCE.encode())
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# ---- what has no honest use, by what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, said",
    [
        ("F.cross_entropy = lambda *a, **k: 0", "stores into torch.nn.functional.cross_entropy"),
        ("import builtins; builtins.print = None", "stores into builtins.print"),
        ("import math; math.log = lambda x: 1", "stores into math.log"),
        ("import time; time.perf_counter = lambda: 0", "stores into time.perf_counter"),
        ("import sys; sys.stdout = None", "stores into sys.stdout"),
        ("torch.nn.Linear.forward = None", "stores into torch.nn.Linear.forward"),
        ("setattr(F, 'cross_entropy', None)", "stores into F"),
        ("import prepare; prepare.evaluate_bpb.__wrapped__.__code__ = None", "changes prepare.evaluate_bpb.__wrapped__.__code__"),
        ("GPT.forward.__globals__['x'] = 1", "reaches __globals__"),
        ("import prepare; globals()['prepare'].check_model = None", "stores into globals()['prepare'].check_model"),
        ("globals()['TIME_BUDGET'] *= 4", "stores into globals()['TIME_BUDGET']"),
        ("object.__setattr__(DATASET, 'eval_tokens', 4096)", "reaches __setattr__"),
        ("exec('x = 1')", "runs code from text"),
        ("__import__('prepare').TIME_BUDGET = 1", "imports by name"),
        ("import sys; sys._getframe(1)", "reaches _getframe"),
        ("import ctypes; ctypes.memset(0, 0, 0)", "reaches ctypes"),
        ("from prepare import make_dataloader; make_dataloader(None, 1, 2, 'val')", "asks for the validation text"),
        ("from prepare import make_dataloader; make_dataloader(None, 1, 2, 'train')", "reads the data by make_dataloader"),
        ("torch.manual_seed(3)", "sets a seed"),
    ],
)
def test_refused_with_its_line_and_what_would_work(line, said):
    with pytest.raises(files.Refusal) as refused:
        proposal.check_program(proposal.parse(f"{SOURCE}\n{line}\n".encode()), TREE, "HEAD")
    count = SOURCE.count("\n") + 2
    assert re.match(rf"train\.py, line {count}, {re.escape(said)}: \w.{{20,}}", str(refused.value)), refused.value


@pytest.mark.parametrize(
    "line",
    [
        "noise = torch.Generator().manual_seed(3)",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "import os; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
        "torch._dynamo.config.cache_size_limit = 8",
        "TABLE = {i: i * i for i in range(9)}\nTABLE[3] = 4",
        "GPT.cache = {}\nsetattr(GPT, 'seen', None)",
        "from functools import lru_cache\n@lru_cache\ndef rope(T):\n    return torch.arange(T)",
        "step = torch.compile(lambda x: x)",
        "import re\nre.compile('a')\nGPT.eval",
    ],
)
def test_what_is_honest_is_let_through(line):
    proposal.check_program(proposal.parse(f"{SOURCE}\n{line}\n".encode()), TREE, "HEAD")


def test_edits_that_researchers_make_are_let_through():
    """Those of kernels.fuse's tests: activations, gates, norms, rotary, experts, skips and the like."""
    path = str(PROJECT / "tests" / "kernels")
    sys.path.append(path)
    try:
        from test_fusion import EDITS
    finally:
        sys.path.remove(path)
    assert len(EDITS) >= 20
    for edits, _ in EDITS.values():
        source = SOURCE
        for old, new in edits:
            assert source.count(old) == 1
            source = source.replace(old, new)
        proposal.check_program(proposal.parse(source.encode()), TREE, "HEAD")


# ---- the examination ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def examined(tokenizer, monkeypatch):  # noqa: F811
    """val_bpb of a model by an examiner at the other end of a channel, as `evaluate_bpb` asks for it; the examiner is a thread here."""

    def call(model, rows=4):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        monkeypatch.setenv(examiner.CHANNEL, str(theirs.fileno()))

        def side():
            content = ours.recv(2**16)
            if content:
                ours.send(json.dumps(examiner.result(ours, json.loads(content))).encode())

        thread = threading.Thread(target=side)
        thread.start()
        try:
            return metric.evaluate_bpb(model, tokenizer, rows)
        finally:
            theirs.close()
            thread.join(20)
            ours.close()

    return call


def answering(change):
    """A model whose logits are changed: change(logits, x) → logits."""
    return lambda x: change(fixed_model(x), x)


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_the_same_number_as_in_one_process(examined, rows):
    assert examined(lambda x: fixed_model(x).float(), rows) == pytest.approx(TEXT["evaluate_bpb"]["4"], abs=1e-6)


def peek(x, where):
    """Logits that know the next token at the places `where`, a mask like x."""
    ahead = torch.cat([x[:, 1:], x[:, :1]], dim=1)
    return 20.0 * F.one_hot(ahead, 2048) * where[..., None]


class Counted:
    def __init__(self, change):
        self.calls, self.change = 0, change

    def __call__(self, x):
        self.calls += 1
        return self.change(fixed_model(x), x, self.calls)


@pytest.mark.parametrize(
    "where",
    [
        lambda x: torch.ones_like(x),
        lambda x: (torch.arange(len(x), device=x.device)[:, None] >= 1).expand_as(x),
        lambda x: (torch.arange(x.size(1), device=x.device) % 4 == 3).expand_as(x),
        lambda x: (torch.arange(x.size(1), device=x.device) > x.size(1) // 3 + 2).expand_as(x),
    ],
    ids=["everywhere", "not in the first row", "at every fourth place", "in the last two thirds"],
)
def test_a_model_that_sees_what_it_must_predict(examined, where):
    with pytest.raises(NoResult, match="change by .* when later tokens change"):
        examined(answering(lambda logits, x: logits + peek(x, where(x))))


def test_a_leak_by_a_hash_of_the_next_token(examined):
    """The next token modulo half the vocabulary: what adds half the vocabulary to later tokens would not see it."""

    def change(logits, x):
        ahead = torch.cat([x[:, 1:], x[:, :1]], dim=1) % 1024
        return logits + 9.0 * (F.one_hot(ahead, 2048) + F.one_hot(ahead + 1024, 2048))

    with pytest.raises(NoResult, match="when later tokens change"):
        examined(answering(change))


def test_a_model_that_keeps_what_it_was_asked(examined):
    with pytest.raises(NoResult, match="the same tokens have other logits|when later tokens change"):
        examined(Counted(lambda logits, x, calls: logits * (1 + 0.01 * calls)))


def test_answers_that_are_none(examined):
    for wrong, said in ((torch.nan, "that is no result|val_bpb is nan|when later tokens"), (torch.inf, "no result|when later")):
        with pytest.raises(NoResult, match=said):
            examined(answering(lambda logits, x, wrong=wrong: logits * wrong))
    with pytest.raises(NoResult, match="not the logits"):
        examined(lambda x: fixed_model(x).mean())
    with pytest.raises(NoResult, match="1024 wide, and the vocabulary has 2048"):
        examined(lambda x: fixed_model(x)[..., :1024])


def test_no_messages_but_those_that_are_meant(tokenizer, monkeypatch):  # noqa: F811
    """What the model's process sends is looked at, and ends in one line."""
    for want in (
        {},
        {"rows": "x"},
        {"rows": 4, "width": 2**40, "dtype": "float32"},
        {"rows": 4, "width": 2048, "dtype": "object"},
        {"rows": -1},
    ):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert examiner.result(ours, {"want": "examination"} | want)["invalid"].startswith("invalid: logits of")
        theirs.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for message in (b"[]", b"\xff", b'{"opened": true}', b'{"done": 7}'):
        theirs.send(message)
    said = examiner.result(ours, {"rows": 4, "width": 2048, "dtype": "float32", "gpu": False})
    assert "something strange" in said["invalid"] or "does not answer" in said["invalid"]
    theirs.close()
    assert "ended before" in examiner.result(ours, {"rows": 4, "width": 2048, "dtype": "float32", "gpu": False})["invalid"]


def test_validation_tokens_that_change_meanwhile(examined, golden, monkeypatch):
    """The number is of tokens that are, at its end, still those of dataset.json."""
    facts, real = ready.checked_dataset(golden), ready.shard_digest
    monkeypatch.setattr(ready, "shard_digest", lambda shard: "0" * 64)
    with pytest.raises(DataError, match="not those that were prepared"):
        examined(lambda x: fixed_model(x))
    monkeypatch.setattr(ready, "shard_digest", real)
    ready.check_validation(golden, facts)


def test_in_one_process_rows_and_batches_are_drawn(tokenizer):  # noqa: F811
    """Without an examiner: losses that are right in the first row alone, or wrong in the last batch."""
    rows = []

    def first_row(x, y=None, reduction="none"):
        out = fixed_model(x, y, reduction)
        if y is None or len(x) < 16:
            return out
        return (out.view(y.shape) * torch.where(torch.arange(len(x), device=x.device) > 0, 0.3, 1.0)[:, None]).flatten()

    def last_batch(x, y=None, reduction="none"):
        if y is not None and len(x) == 16:
            rows.append(1)
        out = fixed_model(x, y, reduction)
        return out * 0.3 if y is not None and len(rows) == 4 else out

    for model in (first_row, last_batch):
        with pytest.raises(NoResult, match="are not the cross entropy of its logits"):
            metric.evaluate_bpb(model, tokenizer, 16)


# ---- the box ------------------------------------------------------------------------------------------------------------------

needs_landlock = pytest.mark.skipif(not box.version(), reason="this kernel has no Landlock")
PROBE = """
import json, os, signal, socket, sys, tempfile

HERS = "runs/1/turn.json", "results.tsv", ".git/config", "model.pt"
root = os.environ["PROBED"]
def tried(what):
    try:
        what()
        return "done"
    except PermissionError:
        return "denied"
    except OSError as e:
        return type(e).__name__

def read(path):
    return lambda: open(path, "rb").read(1)

def write(path):
    return lambda: open(path, "ab").write(b"x")

inside, cache = os.getcwd(), os.environ["AUTORESEARCH_CACHE"]
print(json.dumps({
    "read": {name: tried(read(os.path.join(inside, name))) for name in ("train.py", "harness/run.py", *HERS)},
    "data": {os.path.basename(p): tried(read(p)) for p in sorted(json.loads(os.environ["DATA"]))},
    "write": {name: tried(write(os.path.join(inside, name))) for name in ("train.py", "new.txt", "harness/run.py", "runs/1/x", *HERS)},
    "cache": tried(write(os.path.join(cache, "left.pt"))),
    "compiled": tried(write(os.path.join(os.environ["TRITON_CACHE_DIR"], "left"))),
    "temporary": tried(write(os.path.join(tempfile.gettempdir(), "left"))),
    "others": tried(write(os.path.join(root, "left"))),
    "connect": tried(lambda: socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))),
    "listen": tried(lambda: socket.socket().bind(("127.0.0.1", 0))),
    "signal": tried(lambda: os.kill(os.getppid(), 0)),
    "answer": [name for name in os.environ if "ANSWER" in name or "TOKEN" in name or "API_KEY" in name],
    "tmp": tempfile.gettempdir(),
}))
"""


@pytest.fixture
def project(tmp_path):
    """A copy of what a run reads, with things that it must not touch beside it."""
    folder = clone(tmp_path / "project") if (tmp_path / "project").mkdir() is None else None
    for name in ("prepare.py", "kernels", "harness"):
        (folder / name).unlink()
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, folder / name)
    for name in ("runs/1/turn.json", ".git/config", "results.tsv", "model.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("before")
    return folder


def launch(folder, *arguments, **environment):
    command = [sys.executable, "-m", "harness.launch", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **NO_GPU, **environment}, capture_output=True, text=True)


@needs_landlock
def test_what_the_box_leaves(demo, project, tmp_path):
    (project / "train.py").write_text(PROBE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = [str(p) for part in ("tokens", "data") for p in Path(demo.root, part).iterdir()]
        secrets = {"RAY_AUTH_TOKEN": "a", "HF_TOKEN": "b", "WANDB_API_KEY": "c", "AUTORESEARCH_ANSWER": str(tmp_path / "answer.json")}
        done = launch(project, **secrets, PROBED=str(tmp_path), DATA=json.dumps(paths), PORT=str(server.getsockname()[1]))
    assert done.returncode == 1 and "without an evaluation" in done.stderr, done.stderr  # which whoever judges it waits for
    found = json.loads(done.stdout)
    assert found["read"] == {"train.py": "done", "harness/run.py": "done"} | dict.fromkeys(
        ("runs/1/turn.json", "results.tsv", ".git/config", "model.pt"), "denied"
    )
    may = {name for name, end in found["data"].items() if end == "done"}
    assert may == {"shard_00000.tokens", "shard_00000.index.npz", "shard_00000.json", "dataset.json"}
    assert set(found["data"]) - may >= {"shard_06542.tokens", "shard_06542.parquet"}
    assert set(found["write"].values()) == {"denied"} and found["cache"] == found["others"] == "denied"
    assert found["compiled"] == found["temporary"] == "done" and not os.path.exists(found["tmp"]), "temporary files go with the run"
    if box.version() >= 4:
        assert found["connect"] == found["listen"] == "denied"
    if box.version() >= 6:
        assert found["signal"] == "denied"
    assert found["answer"] == []


@needs_landlock
def test_a_gpu_is_tried_in_the_box_once(monkeypatch, tmp_path, capfd):
    """Simulated: a GPU, and what it needs. Where the box keeps that from it, the run goes without, and says why."""
    environ = os.environ | {"AUTORESEARCH_CACHE": str(tmp_path)}
    (tmp_path / "closed").touch()
    monkeypatch.setattr(launch_module, "gpu_hardware", lambda: "NVIDIA")
    allowed = launch_module.rules(environ, str(tmp_path / "scratch"), set(), [])
    for trial, why in (("open('/dev/null', 'w')", None), (f"open({str(tmp_path / 'closed')!r})", "PermissionError")):
        monkeypatch.setattr(launch_module, "TRIAL", trial)
        for _ in range(2):
            said = launch_module.why_not_boxed(environ, allowed)
            assert said is None if why is None else why in said
        assert capfd.readouterr().err.count("trying the GPU in the box") == 1, "the second time it is known"
        (tmp_path / "box.json").unlink()


@needs_landlock
def test_no_model_stays_in_what_is_compiled(demo, project):
    (project / "train.py").write_text("import os; open(os.environ['TRITON_CACHE_DIR'] + '/left', 'wb').write(bytes(2**24 + 1))")
    done = launch(project)
    assert done.returncode == 0 and "no compiler makes a file of that size" in done.stdout
    assert not os.path.exists(os.path.join(os.environ["AUTORESEARCH_CACHE"], "compiled/triton/left"))


def test_a_summary_of_its_own(demo, project, tmp_path):
    """What train.py prints is not what counts: who examined the model says it, and here nobody has."""
    (project / "train.py").write_text(
        "print('Evaluating 65,536 tokens\\nEvaluated 65,536 tokens: val_bpb 1.000000\\n---\\nval_bpb: 1.000000')"
    )
    done = launch(project, AUTORESEARCH_ANSWER=str(tmp_path / "answer.json"))
    assert done.returncode == 1 and "ended without an evaluation" in done.stderr and not (tmp_path / "answer.json").exists()


@pytest.mark.parametrize(
    "code, end", [("raise SystemExit(3)", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15), ("os", 1)]
)
def test_it_ends_as_train_py_does(demo, project, code, end):
    (project / "train.py").write_text(code)
    assert launch(project).returncode == end


@pytest.mark.slow
def test_a_whole_run_in_the_box(demo, project, tmp_path):
    """Trained, saved, examined and kept; and the same number without a box."""
    shutil.copy(PROJECT / "train.py", project)
    clone_edits = "\nDEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE = 1, 1024, 4\n\n\ndef lr_multiplier("
    text = (project / "train.py").read_text()
    (project / "train.py").write_text(text.replace("\n\n\ndef lr_multiplier(", clone_edits))
    answer = tmp_path / "answer.json"
    done = launch(project, "--keep", AUTORESEARCH_TIME_BUDGET="1", AUTORESEARCH_ANSWER=str(answer))
    assert done.returncode == 0, done.stderr
    said = json.loads(answer.read_text())
    lines = dict(line.split(":", 1) for line in done.stdout.split("\n---\n")[1].strip().splitlines())
    assert f"{said['val_bpb']:.6f}" == lines["val_bpb"].strip() and said["fingerprint"] == lines["fingerprint"].strip()
    assert sorted(p.name for p in project.glob("*.pt*")) == ["model.pt"]
    environment = {**os.environ, **NO_GPU, "AUTORESEARCH_TIME_BUDGET": "1"}
    command = [sys.executable, "train.py", "--evaluate", "model.pt"]
    alone = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    number = re.search(r"val_bpb ([\d.]+)", alone.stdout)
    assert number and float(number[1]) == pytest.approx(said["val_bpb"], abs=2e-6), alone.stderr


# ---- the judge ----------------------------------------------------------------------------------------------------------------


def judged(tmp_path, monkeypatch, lines, answer=None, budget=60, examined=True):
    """(state, reason) of a run that printed these (seconds, line)."""
    clock = [0.0]
    monkeypatch.setattr(loop_run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop_run, "run_file", lambda number, name: str(tmp_path / name))
    monkeypatch.setattr(loop_run, "last_words", lambda number: "")
    if answer is not None:
        (tmp_path / "answer.json").write_text(json.dumps(answer))
    reader = loop_run.Reader(1e9)
    for clock[0], line in lines:
        reader.feed(f"{line}\n".encode())
    turn = {"number": 1, "token": "abc", "seed": 42}
    expected = {"eval_tokens": 65536, "untimed": 11, "budget": budget, "examined": examined, "fingerprint": None, "device": None}
    return loop_run.judge(turn, reader, 0, None, expected)


def printed(seconds=60.0, value="2.500000", fingerprint="f1"):
    steps = [(10 + i * seconds / 10, f"step {20 + i:05d} ({10 * i}.0%) | loss: 3.0 | dt: 5ms | remaining: 5s") for i in range(11)]
    end = steps[-1][0] + 1
    summary = [
        "---",
        f"val_bpb: {value}",
        "training_seconds: 60.0",
        "num_steps: 100",
        f"fingerprint: {fingerprint}",
        "eval_tokens: 65536",
        "seed: 42",
        "run: abc",
    ]
    return [*steps, (end, f"Evaluated 65,536 tokens: val_bpb {value}"), *((end, line) for line in summary)]


def test_who_examined_the_model_has_the_last_word(tmp_path, monkeypatch):
    true = {"val_bpb": 2.5, "eval_tokens": 65536, "fingerprint": "f1"}
    assert judged(tmp_path, monkeypatch, printed(), true) == ("valid", None)
    for answer, said in ((true | {"val_bpb": 2.7}, "who examined the model 2.7"), ({"invalid": "x"}, "who examined the model None"),
                         (true | {"fingerprint": "f2"}, "and it is f2")):  # fmt: skip
        state, reason = judged(tmp_path, monkeypatch, printed(), answer)
        assert state == "crash" and said in reason


def test_a_clock_of_its_own(tmp_path, monkeypatch):
    """Its lines count 60 s of training; by ours 300 passed. A machine that is a little slow at printing is nobody's fault."""
    answer = {"val_bpb": 2.5, "fingerprint": "f1"}
    state, reason = judged(tmp_path, monkeypatch, printed(seconds=300), answer)
    assert state == "crash" and "300 s passed while it counted 60 s" in reason
    assert judged(tmp_path, monkeypatch, printed(seconds=70), answer)[0] == "valid"


def test_more_work_before_the_clock_starts(capsys):
    from harness import run as harness_run

    honest, greedy = [20.0] + [0.4] * 30, [20.0] + [6.0] * 10 + [0.4] * 20
    harness_run.check_free_steps(honest)
    with pytest.raises(SystemExit):
        harness_run.check_free_steps(greedy)
    assert "a step before the clock starts takes 6000 ms, a timed one 400" in capsys.readouterr().err


# ---- all of it together -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_landlock
def test_the_loop_keeps_what_is_honest_alone(demo, tmp_path):
    """The project itself, a model of one layer: its baseline and three cheats."""
    project = Checkout(tmp_path / "clone", {"AUTORESEARCH_TIME_BUDGET": "1", "AUTORESEARCH_CACHE": os.environ["AUTORESEARCH_CACHE"]})
    names = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, project.folder / name)
    text = project.train.read_text()
    for old, new in (("DEPTH = 4 if", "DEPTH = 1 if"), ("= 2**12 if", "= 2**10 if"), ("DEVICE_BATCH_SIZE = 16", "DEVICE_BATCH_SIZE = 4")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    project.train.write_text(text)
    project.git("init", "--quiet", "--initial-branch", "main")
    project.commit("start")
    (project.folder / "venv").symlink_to(sys.prefix)
    assert "keep run 1" in project.call("begin", "real", "--wait", 200, limit=240)
    printed = "Evaluating 65,536 tokens", "Evaluated 65,536 tokens: val_bpb 1.000000", "---", "val_bpb: 1.000000"
    cheats = {
        "sees the next token": ("self.transformer.wte(idx)", "self.transformer.wte(idx.roll(-1, 1))", "when later tokens change"),
        "a summary of its own": (
            "    run(GPT",
            f"    print({chr(10).join(printed)!r})\n    raise SystemExit\n    run(GPT",
            "without an evaluation",
        ),
        "the validation tokens": (
            "    run(GPT",
            f"    open({demo.tokens_dir!r} + '/shard_06542.tokens')\n    run(GPT",
            "Permission denied",
        ),
    }
    for name, (old, new, said) in cheats.items():
        assert text.count(old) == 1
        project.train.write_text(text.replace(old, new))
        output = project.call("try", name, "--wait", 200, limit=240, code=1)
        assert said in output, output
    assert [row[3] for row in project.rows] == ["keep", "crash", "crash", "crash"]
    assert f"{project.run_json(1, 'answer')['val_bpb']:.6f}" == f"{project.run_json(1)['summary']['val_bpb']:.6f}"

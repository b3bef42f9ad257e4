"""One run, from its start to what is known of it: a process followed, its lines read, its number judged."""

import contextlib
import ctypes
import json
import math
import os
import re
import select
import signal
import subprocess
import time

from harness.common.hardware import gpu_hardware
from harness.common.protocol import WARMUP_STEPS
from harness.common.text import visible

from .files import ENVIRONMENT, LIMITS, last_words, log_tail, read_json, run_file
from .machine import disk_fault, gpu_fault, look
from .processes import boot_id, cache_folder, end_processes, namespace, processes, unkillable


class Log:
    """A file that stays below a size: beyond it the middle is left out, and head and end stay."""

    def __init__(self, path, limit):
        self.file, self.limit, self.size = open(path, "w+b", buffering=0), int(limit), 0  # noqa: SIM115

    def write(self, chunk):
        if self.size + len(chunk) > self.limit:
            self.file.seek(0)
            content = self.file.read() + chunk
            kept = content[: self.limit // 8] + b"\n[... left out: the log is too long ...]\n" + content[-self.limit // 2 :]
            self.file.seek(0)
            self.file.truncate()
            self.size, chunk = 0, kept
        self.file.write(chunk)
        self.size += len(chunk)


WORDS = ("run", "fingerprint", "dataset", "device", "attention", "torch", "triton", "python")  # of the summary; they may look like numbers
STEP = re.compile(r"step (\d{1,18}) \((\d{1,18}(?:\.\d{1,18})?)%\) \| loss: (\S+)")


class Reader:
    """What a run's lines say: its phase, its losses, why it fails, its summary."""

    def __init__(self, deadline, reference=None):
        self.start = self.last = time.monotonic()
        self.deadline, self.reference = deadline, reference  # reference: the best's losses, for pruning
        self.first_step = self.evaluation = self.ending = None  # when these began
        self.losses, self.summaries, self.evaluated, self.fault = [], [], [], None
        self.untimed = -1  # the last step that was not timed
        self.timed = []  # (when the line came, progress that it names) of the first and the last timed step
        self.open, self.rest, self.worse = None, b"", 0

    def feed(self, chunk):
        self.last = time.monotonic()
        *lines, self.rest = re.split(rb"[\r\n]+", self.rest + chunk)
        if len(self.rest) > 65536:  # a line without end
            self.rest = self.rest[-1024:]
        for line in lines:
            self.line(visible(line.decode("utf-8", "replace")))

    def line(self, text):
        now = time.monotonic()
        if self.open is not None:
            key, colon, value = text.partition(":")
            if colon and re.fullmatch(r"[A-Za-z_][\w.]*", key) and (self.open or key == "val_bpb"):
                if not self.open:
                    self.summaries.append(self.open)
                    self.ending = now
                self.open[key] = value.strip() if key in WORDS else as_number(value.strip())
                return
            self.open = None
        if text == "---":
            self.open = {}
        elif match := STEP.match(text):
            self.first_step = self.first_step or now
            if "warming up" in text:
                self.untimed = int(match[1])
            progress, loss = float(match[2]) / 100, as_number(match[3])
            if "warming up" not in text:
                self.timed[1:] = [(now, progress)]
            if isinstance(loss, str):
                self.fail(f"the loss is {loss} at step {int(match[1])}")
            else:
                self.losses.append((progress, loss))
                self.prune()
        elif text.startswith("Evaluating "):
            self.evaluation = self.evaluation or now
        elif match := re.match(r"Evaluated (\d[\d,]{0,25}) tokens: val_bpb (\S+)$", text):
            self.evaluated.append((int(match[1].replace(",", "")), as_number(match[2])))
        elif text.startswith("FAIL: "):
            self.fail(text[6:])

    def fail(self, reason):
        self.fault = self.fault or reason[:300]
        self.ending = self.ending or time.monotonic()

    def prune(self):
        """Count how often in a row the loss is clearly worse than the best's at the same progress."""
        progress, loss = self.losses[-1]
        best = at_progress(self.reference, progress) if self.reference else None
        self.worse = self.worse + 1 if best and progress >= PRUNE_FROM and loss > best * PRUNE_RATIO else 0

    def why_end(self):
        """(state, reason) to end the run now, or None."""
        now = time.monotonic()
        if self.ending and now - self.ending > LIMITS["grace" if self.fault else "ending"]:
            return "crash", self.fault or f"it did not end within {LIMITS['ending']:g} s of its summary"
        if self.ending:
            return None
        if self.worse >= PRUNE_COUNT:
            progress, loss = self.losses[-1]
            return (
                "pruned",
                f"stopped at {100 * progress:.0f} % (--prune): loss {loss:.4f}, the best's was {at_progress(self.reference, progress):.4f}",
            )
        if self.evaluation:
            if now - self.evaluation > LIMITS["evaluation"]:
                return "crash", f"the evaluation had not ended after {LIMITS['evaluation']:g} s"
        elif now - self.start > self.deadline:
            what = "training had not ended" if self.first_step else "there was no first step"
            return "crash", f"{what} {self.deadline:g} s after the start"
        elif self.first_step and now - self.last > LIMITS["silence"]:
            return "crash", f"it hung: no output for {LIMITS['silence']:g} s"
        return None

    def seconds(self):
        end = time.monotonic()
        evaluation = self.evaluation or end
        first = self.first_step or evaluation
        phases = {"startup": first - self.start, "training": evaluation - first, "evaluation": end - evaluation, "total": end - self.start}
        return {key: round(value, 1) for key, value in phases.items()}


PRUNE_FROM, PRUNE_RATIO, PRUNE_COUNT = 0.3, 1.03, 3


def at_progress(losses, progress):
    """The loss of a curve [[progress, loss], …] at `progress`, between its points; None outside."""
    for (p, a), (q, b) in zip(losses, losses[1:]):
        if p <= progress <= q:
            return a + (b - a) * (progress - p) / (q - p) if q > p else b
    return None


def as_number(text):
    """The finite number that a text is, or the text."""
    with contextlib.suppress(ValueError, OverflowError):
        value = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        return value if math.isfinite(value) else text
    return text


def thin(points, most=200):
    """At most `most` of the points, evenly, the last one too."""
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)] if len(points) > most else points


def die_with_parent():
    """In the child: be killed when the supervisor dies, even by SIGKILL."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


LIBC = ctypes.CDLL(None, use_errno=True)


def follow(command, cwd, env, token, log, reader, gpu, started):
    """Run a command to its end, or end it. Returns (exit code or None, (state, reason) or None, pids that survive SIGKILL).

    Never waits for the child: it may hang, flood, or leave children that hold the pipe.
    """
    child = subprocess.Popen(command, cwd=cwd, env=env | {"AUTORESEARCH_RUN": token}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[gpu] if gpu >= 0 else [],
                             preexec_fn=die_with_parent)  # fmt: skip
    leader = next((p for p in processes() if p["pid"] == child.pid), None)
    leader = {"pid": child.pid, "start": leader["start"], "boot": boot_id(), "namespace": namespace()} if leader else None
    with open(started, "w") as f:
        json.dump(leader, f)
    pipe = child.stdout.fileno()
    os.set_blocking(pipe, False)

    def read():
        """Whether there was something."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(pipe, 1 << 16)
            if chunk:
                log.write(chunk)
                reader.feed(chunk)
            return len(chunk) > 0
        return False

    open_, why = True, None
    while child.poll() is None and why is None:
        if open_ and select.select([pipe], [], [], 0.2)[0]:
            open_ = read()
        elif not open_:
            time.sleep(0.02)
        why = ("stopped", interrupted[0]) if interrupted else reader.why_end()
    code = child.poll()
    until = time.monotonic() + 5
    while open_ and time.monotonic() < until and read():
        pass
    left = end_processes(token, leader, LIMITS["grace"] if why else 2)
    if code is None and child.pid not in left:
        code = child.wait()
    while open_ and time.monotonic() < until and read():
        pass
    reader.feed(b"\n")
    child.stdout.close()
    return code, why, left


interrupted = []  # why the supervisor was told to end its run


def cpu_times():
    """(seconds all processors were busy, seconds they had) since boot."""
    with open("/proc/stat") as f:
        user, nice, system, idle, iowait, irq, softirq, *_ = map(int, f.readline().split()[1:])
    busy = user + nice + system + irq + softirq
    return busy / os.sysconf("SC_CLK_TCK"), (busy + idle + iowait) / os.sysconf("SC_CLK_TCK")


def dataset_facts(environment):
    """dataset.json of the dataset that a run uses, {} where it can't be told."""
    name = environment.get("AUTORESEARCH_DATASET") or ("climbmix" if gpu_hardware() else "demo")
    folder = cache_folder() if name == "climbmix" else os.path.join(cache_folder(), name)
    return read_json(os.path.join(folder, "data", "dataset.json")) or {}


def judge(turn, reader, code, why, expected):
    """(state, reason) of a run that has ended. A number counts only if all of this holds."""
    if why:
        return why
    if code == ENVIRONMENT:
        return "environment", reader.fault or last_words(turn["number"])
    if code in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        return "stopped", "something else ended it"
    if code != 0:
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "crash", "killed by the kernel: out of host memory?"
        if last_words(turn["number"]).startswith("autoresearch: "):  # run.sh and env.sh, before train.py
            return "environment", last_words(turn["number"])
        how = f"exit code {code}" if code > 0 else f"signal {signal_name(-code)}"
        return "crash", reader.fault or f"{last_words(turn['number']) or 'no output'} ({how})"
    if reader.fault or not reader.summaries:
        return "crash", reader.fault or "it ended without a summary"
    if len(reader.summaries) > 1:
        return "crash", f"invalid: {len(reader.summaries)} summaries"
    summary = reader.summaries[0]
    value = summary["val_bpb"]
    if summary.get("run") != turn["token"]:
        return "crash", "invalid: the summary is not this run's (its `run` line)"
    if isinstance(value, str) or not 0 < value < 16:  # NaN too
        return "crash", f"invalid: val_bpb is {value}, which no model has"
    if [v for _, v in reader.evaluated] != [value]:
        found = ", ".join(str(v) for _, v in reader.evaluated) or "nothing"
        return "crash", f"invalid: the summary says {value} and prepare.evaluate_bpb {found}"
    for key, want in {"seed": turn["seed"], "eval_tokens": expected.get("eval_tokens")}.items():
        if want is not None and summary.get(key) != want:
            return "crash", f"invalid: {key} is {summary.get(key)} and must be {want}"
    if expected.get("examined"):
        answer = read_json(run_file(turn["number"], "answer.json")) or {}
        told = answer.get("val_bpb")
        if not isinstance(told, float) or float(f"{told:.6f}") != value:
            return "crash", f"invalid: the summary says {value}, and who examined the model {told}"
        if answer.get("fingerprint") != summary.get("fingerprint"):
            return "crash", f"invalid: the summary says fingerprint {summary.get('fingerprint')}, and it is {answer.get('fingerprint')}"
    if expected.get("eval_tokens") not in (None, reader.evaluated[0][0]):
        return "crash", f"invalid: {reader.evaluated[0][0]} tokens were evaluated and not {expected['eval_tokens']}"
    for key, means in {"fingerprint": "the data has changed", "device": "their numbers don't compare"}.items():
        if expected.get(key) not in (None, summary.get(key)):
            return "environment", f"{key} {summary.get(key)}, the baseline's was {expected[key]}: {means}"
    if expected["untimed"] is not None and reader.untimed >= expected["untimed"]:
        return "crash", f"invalid: step {reader.untimed} was not timed, and only the first {expected['untimed']} are free"
    took, steps = (as_number(str(summary.get(key))) for key in ("training_seconds", "num_steps"))
    if not isinstance(took, str) and not isinstance(steps, str):
        # The last step begins within the budget and may end beyond it; a machine that paused meanwhile is not the idea's fault.
        step = took / max(1, steps - (expected["untimed"] or 0))
        if took > expected["budget"] + max(2 * step, 0.05 * expected["budget"]) + 2:
            return "crash", f"invalid: it trained for {took} s, and the time budget is {expected['budget']} s"
    if len(reader.timed) == 2:  # by our clock: the run's own may be anybody's
        (began, first), (ended, last) = reader.timed
        counted = (last - first) * expected["budget"]
        if ended - began > 1.1 * counted + 10:
            return "crash", f"invalid: {ended - began:.0f} s passed while it counted {counted:.0f} s of training"
    return "valid", None


def signal_name(number):
    """SIGSEGV for 11; the number of one without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def blame_machine(state, reason, number):
    """A crash that is the machine's fault after all, as ("environment", reason): only where a test of the machine says so."""
    if state != "crash" or reason.startswith("invalid"):
        return state, reason
    end = "\n".join(log_tail(number, 40))
    fault = disk_fault() if re.search("No space left on device|Disk quota exceeded", end) else None
    suspicious = re.search(r"\b(HIP|CUDA|hip|cuda|HSA|NVML|ROCm)\b|hipError|cudaError", end) or reason.startswith("it hung")
    fault = fault or suspicious and gpu_fault()
    return ("environment", fault) if fault else (state, reason)


def believed(state, reason, reader, expected, environment):
    """An end as far as it is true: what has trained says no more of the machine than the harness finds, nor that somebody stopped it."""
    if state == "stopped" and not interrupted:
        until = time.monotonic() + 2  # whoever ends everything at once has told this process too
        while time.monotonic() < until and not interrupted:
            time.sleep(0.05)
        return (state, reason) if interrupted else ("crash", "it was ended by a signal, and nobody has told its supervisor")
    if state != "environment" or not reader.first_step:
        return state, reason
    fault = disk_fault() or gpu_fault() or look(expected, environment)
    return (state, f"{reason} ({fault})") if fault else ("crash", f"it says that the machine is at fault, which is in order: {reason}")


def measure(turn, tree, environment, expected, log, gpu):
    """Run ./run.sh in `tree`, to its end or its deadline. Returns (state, reason), and more of its outcome. expected: as `asked` says."""
    number = turn["number"]
    facts = dataset_facts(environment)
    budget = as_number(str(environment.get("AUTORESEARCH_TIME_BUDGET") or facts.get("time_budget")))
    budget = 600 if isinstance(budget, str) else budget
    examined = os.path.exists(os.path.join(tree, "harness", "launch.py"))
    expected = expected | {"eval_tokens": facts.get("eval_tokens"), "untimed": WARMUP_STEPS, "budget": budget, "examined": examined}
    environment = environment | {"AUTORESEARCH_SEED": str(turn["seed"]), "PYTHONUNBUFFERED": "1"}
    environment["AUTORESEARCH_ANSWER"] = run_file(number, "answer.json")
    reader = Reader(budget + LIMITS["training"], expected["losses"])
    ours = sum(os.times()[:4])
    busy, had = cpu_times()
    code, why, left = follow(["./run.sh"], tree, environment, turn["token"], log, reader, gpu, run_file(number, "process.json"))
    busy, had = cpu_times()[0] - busy, cpu_times()[1] - had
    ours = sum(os.times()[:4]) - ours
    end = judge(turn, reader, code, why, expected)
    end = blame_machine(*believed(*end, reader, expected, environment), number) if not left else ("environment", unkillable(left))
    summary = reader.summaries[-1] if reader.summaries else None
    return end, dict(
        seconds=reader.seconds(),
        exit_code=code if code is not None and code >= 0 else None,
        signal=signal_name(-code) if code is not None and code < 0 else None,
        summary=summary,
        losses=thin([list(point) for point in reader.losses]),
        device=(summary or {}).get("device"),
        versions={key: summary[key] for key in ("python", "torch", "triton") if key in summary} if summary else {},
        other_cpu=round(max(0.0, busy - ours) / had, 3) if had > 0 else None,
    )

"""The choice of attention and of weight gradients: each candidate in a process of its own, wrong ones never used, what was found kept.

There is no GPU to time on in CI, and no driver that spoils a process: the device's name is a stand-in, and so are candidates that do what
such a driver does (standin_candidates.py), in real processes. Where a test is of the choice alone, what the processes answer is planted.
"""

import contextlib
import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import standin_candidates
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import candidates
from harness import choice as backends
from harness.common import child
from harness.data import dataset as chosen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SHAPE = 2, 64, 4, 2, 32  # B, T, n_head, n_kv_head, head_dim
WINDOW = 20
STANDIN = [sys.executable, standin_candidates.__file__]


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A cache of its own, for a device of that name."""
    monkeypatch.setattr(backends, "_here", lambda device: ["a device"])
    monkeypatch.setattr(chosen, "CACHE_DIR", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    return tmp_path / "compiled" / "backends.json"


@pytest.fixture
def answers(monkeypatch, memory):
    """What each candidate's process answers, for every case; "asked" has which were started."""
    planted = {"kernels": 1.0, "flash": 2.0, "flex": 3.0, "sdpa": 4.0, "asked": []}

    def tried(what, cases, sizes, missing, device):
        for candidate, numbers in missing.items():
            planted["asked"].append(candidate)
            yield candidate, numbers, [planted[candidate]] * len(numbers)

    monkeypatch.setattr(backends, "_tried", tried)
    return planted


def known():
    return json.loads(Path(chosen.CACHE_DIR, "compiled", "backends.json").read_text())


def choose(*candidates, windows=(WINDOW, 64)):
    return backends._fastest_attention(windows, SHAPE, CPU, candidates or ("kernels", "sdpa"))


# ---- the check ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["kernels", "sdpa", pytest.param("flex", marks=pytest.mark.gpu), pytest.param("flash", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("window", [WINDOW, 64])
def test_right_ones_pass(name, window):
    assert candidates.check_attention(candidates.ATTENTION[name](window, 64, DEVICE), window, SHAPE, DEVICE) is None


def broken(kind):
    def make(window, T, device):
        right = candidates.sdpa(window + (kind == "window"), T, device)

        def attend(q, k, v):
            if kind == "gradient":
                return right(q, k, v.detach() + 0 * v)
            if kind == "nan":
                return right(q, k, v) * torch.tensor(float("nan"))
            if kind == "last row":  # an offset that overflows beyond the first rows of a batch
                y = right(q, k, v)
                return torch.cat([y[:-1], y[:-1]])
            return right(q, k, v)

        return attend

    return make


@pytest.mark.parametrize("kind", ["window", "gradient", "nan", "last row"])
def test_a_wrong_one_is_found(kind):
    """A window of one key too many, a gradient that is zero, NaN, a wrong last row."""
    wrong = candidates.check_attention(broken(kind)(WINDOW, 64, DEVICE), WINDOW, SHAPE, DEVICE)
    assert wrong.startswith("wrong numbers (" + {"gradient": "dv: ", "last row": "dq: "}.get(kind, "output: ")), wrong


@pytest.mark.parametrize("shape", [(1, 64, 4, 2, 32), (1, 256, 2, 2, 64), (1, 128, 8, 1, 128)])
@pytest.mark.parametrize("window", [WINDOW, 256])
def test_the_reference_is_torchs_mathematics(shape, window):
    """In float32 as exact; rounded to bfloat16 as far from it as SDPA's MATH is there, so that the limits are what they are for MATH."""
    low = candidates._random_inputs(shape, CPU)
    exact = candidates.plain_attention(window, *low)

    def by_math(inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return candidates._forward_backward(candidates.sdpa(window, shape[1], CPU), *inputs)

    assert max(candidates._relative_errors(by_math([t.float() for t in low]), exact)) < 1e-6
    assert all(t.dtype == torch.bfloat16 for t in by_math(low))
    rounding, errors = candidates._rounding_errors(exact), candidates._relative_errors(by_math(low), exact)
    assert all(1e-3 < ours <= 1.01 * maths for ours, maths in zip(rounding, errors)), (rounding, errors)


def test_the_reference_calls_no_sdpa_and_is_made_first(monkeypatch):
    """What torch's attention spoils can't spoil it: it is computed before any candidate is called, and by no attention of torch's."""
    called, plain = [], candidates.plain_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: called.append("sdpa"))
    monkeypatch.setattr(candidates, "plain_attention", lambda *a: (called.append("reference"), plain(*a))[1])
    found = list(candidates._try_attention("sdpa", [WINDOW, 64], CPU, *SHAPE))
    assert called == ["reference"] * 4 + ["sdpa"] * 2, "two rows for each of two windows"
    assert all("not available" in f for f in found)  # what returns nothing


# ---- what processes of their own survive -------------------------------------------------------------------------------------------------


def processes():
    """pids of every process of this one that is left, zombies too."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.fixture
def in_processes(monkeypatch, memory):
    monkeypatch.setattr(backends, "PROGRAM", STANDIN)
    monkeypatch.setattr(backends, "HANG_SECONDS", 5.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = processes(), len(os.listdir("/proc/self/fd"))
    yield
    assert (processes(), len(os.listdir("/proc/self/fd"))) == before, "nothing is left running, unwaited for or open"
    assert [name for name in os.listdir(memory.parent) if name != memory.name] == []


def test_what_ends_hangs_or_spoils_its_process_is_named_and_never_used(in_processes, monkeypatch, capsys):
    bad = "poisons", "spoils numbers", "segfaults", "aborts later", "is killed", "hangs", "talks", "has no memory", "wrong"
    chosen, names = choose(*bad, "sdpa")
    printed = capsys.readouterr().out
    assert printed.startswith(f"Trying attention by {', '.join(bad)}, sdpa, each in a process of its own\n")
    (_, small), (_, large) = sorted(known().items())
    for tried in (small, large):
        assert tried["spoils numbers"].startswith("wrong numbers from plain mathematics after it (relative error")
        assert tried["segfaults"] == "took its process down: signal 11"
        assert tried["hangs"] == "hung: no answer in 5 s"
        assert tried["sdpa"] > 1e-3 and tried["talks"] > 1e-3, "what it prints is no answer"
        assert not tried.keys() & {"is killed", "has no memory"}, "another day there is memory"
    assert small["poisons"] == "after it plain mathematics fail (RuntimeError: HIP error: invalid argument)"
    assert large["poisons"] == "not available (RuntimeError: HIP error: invalid argument)"
    assert small["aborts later"] > 1e-3 and large["aborts later"] == "took its process down: signal 6"
    assert small["wrong"].startswith("wrong numbers (output") and large["wrong"] > 1e-3
    for window in (WINDOW, 64):
        assert f"Attention up to {window} by is killed is not used: took its process down: signal 9" in printed
        assert f"Attention up to {window} by has no memory is not used: not available (OutOfMemoryError" in printed
    assert set(chosen) == {WINDOW, 64} and names == f"sdpa up to {WINDOW}, sdpa up to 64"
    assert torch.ones(2, 2).matmul(torch.ones(2, 2)).sum() == 8, "this process is as it was"

    monkeypatch.setattr(backends, "PROGRAM", ["/nowhere"])  # nothing is tried again but the two that had no memory
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        choose(*bad, "sdpa")
    assert "Trying attention by is killed, has no memory, each" in capsys.readouterr().out


def test_weight_gradients_that_end_their_process_are_named_and_never_chosen(in_processes, monkeypatch, capsys):
    linear = import_module("kernels.linear")
    monkeypatch.setattr(torch.version, "hip", "7.2")  # a stand-in, as is its library of products
    monkeypatch.setattr(linear, "FORMS", {form: linear.FORMS[form] for form in ("direct", "copied")})
    monkeypatch.setattr(linear, "WEIGHT_GRADIENT", {})
    backends.choose_weight_gradients([(8, 16), (8, 16)], 32, CPU)
    assert linear.WEIGHT_GRADIENT == {(8, 16): ("copied", "cublas")}
    (tried,) = known().values()
    assert tried.pop("copied by cublas") > 1e-3 and tried.pop("direct by cublas").startswith("wrong numbers (relative error")
    assert tried == {
        "direct by cublaslt": "after it plain mathematics fail (RuntimeError: HIP error: invalid argument)",
        "copied by cublaslt": "took its process down: signal 11",
    }
    assert "Weight gradient 8x16 copied by cublaslt is not used: took its process down: signal 11\n" in capsys.readouterr().out


def test_two_that_are_right_alone_must_be_right_in_one_process(in_processes, monkeypatch, capsys):
    """Each window's fastest is another; one of them fails where the other was called before."""
    pair = "aotriton", "after aotriton fails"
    for name in pair:
        monkeypatch.setitem(backends.ATTENTION, name, backends.sdpa)
    keys = [json.dumps(["a device", "attention", window, *SHAPE, *pair]) for window in (WINDOW, 64)]
    found = [dict(zip(pair, times)) for times in ((1.0, 1.5), (4.0, 2.0))]
    Path(chosen.CACHE_DIR, "compiled", "backends.json").write_text(json.dumps(dict(zip(keys, found))))
    for _ in range(2):  # the second time nothing is tried, and the same is chosen
        assert choose(*pair)[1] == f"after aotriton fails up to {WINDOW}, after aotriton fails up to 64"
        printed = capsys.readouterr().out
        assert "Attention in one process by aotriton and after aotriton fails is not used: after aotriton fails up to 64: not av" in printed
        assert f"Attention up to {WINDOW} by after aotriton fails; forward and backward in ms: aotriton 1.00, after" in printed
        monkeypatch.setattr(backends, "PROGRAM", ["/nowhere"])


def test_a_program_that_does_not_start_is_a_reason(in_processes, monkeypatch, tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "candidates.py"
    program.write_text("import no_such_module\n")
    monkeypatch.setattr(backends, "PROGRAM", [sys.executable, str(program)])
    with pytest.raises(backends.NoneUsable, match="ended with exit code 1 .ModuleNotFoundError: No module named 'no_such_module'"):
        choose("sdpa")


def test_the_memory_cap_comes_first_and_what_has_no_reference_is_not_tried(monkeypatch):
    """The program in this process, up to its end."""
    done, task = [], {"what": "attention", "candidate": "sdpa", "cases": [WINDOW, 64], "sizes": SHAPE, "device": "cpu"}
    monkeypatch.setattr(child, "begin", lambda: (task, lambda **answer: done.append(answer)))
    monkeypatch.setattr(candidates.machine, "cap_shared_memory", lambda device: done.append(device))
    monkeypatch.setattr(candidates.os, "_exit", done.append)
    candidates.main()
    assert (
        done[0] == CPU and [answer["case"] for answer in done[1:3]] == [0, 1] and all(a["found"] > 0 for a in done[1:3]) and done[3:] == [0]
    )
    done.clear()

    def full(*_):
        raise torch.OutOfMemoryError("HIP out of memory")

    monkeypatch.setitem(candidates.TRIES, "attention", lambda *_: iter(full, None))
    candidates.main()
    assert done[1:] == [{"case": case, "found": "not tried (OutOfMemoryError: HIP out of memory)"} for case in (0, 1)] + [0]


# ---- what was found before ------------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_remembered(answers, capsys):
    chosen, names = choose()
    assert names == f"kernels up to {WINDOW}, kernels up to 64" and set(chosen) == {WINDOW, 64}
    assert f"Attention up to {WINDOW} by kernels; forward and backward in ms: kernels 1.00, sdpa 4.00" in capsys.readouterr().out
    answers.update(kernels=5.0, asked=[])
    assert choose()[1] == names, "what was found before is used"
    assert len(known()) == 2 and not answers["asked"]
    assert choose("sdpa")[1] == f"sdpa up to {WINDOW}, sdpa up to 64"


def test_where_no_two_work_together_one_does_all(memory, monkeypatch, capsys):
    """Any that is right for every window, though the fastest for none."""
    names, times = ("kernels", "flash", "sdpa"), ({"kernels": 1.0, "sdpa": 3.0}, {"flash": 1.0, "sdpa": 4.0})
    wrong = dict.fromkeys(names, "wrong numbers")
    found = {json.dumps(["a device", "attention", w, *SHAPE, *names]): wrong | t for w, t in zip((WINDOW, 64), times)}
    together = json.dumps(["a device", "attention together", [["kernels", WINDOW], ["flash", 64]], *SHAPE, "kernels and flash"])
    memory.write_text(json.dumps(found | {together: {"kernels and flash": 2.0}}))
    assert choose(*names)[1] == f"kernels up to {WINDOW}, flash up to 64"
    memory.write_text(json.dumps(found | {together: {"kernels and flash": "took its process down: signal 11"}}))
    assert choose(*names)[1] == f"sdpa up to {WINDOW}, sdpa up to 64"
    assert "Attention in one process by kernels and flash is not used: took its process down: signal 11" in capsys.readouterr().out
    found = {key: entry | {"sdpa": "wrong numbers"} for key, entry in found.items()}
    memory.write_text(json.dumps(found | {together: {"kernels and flash": "hung"}}))
    with pytest.raises(backends.NoneUsable, match="no attention gives right numbers for all windows in one process"):
        choose(*names)


def test_what_is_remembered_starts_no_process(memory, monkeypatch):
    """Nor imports anything for one."""
    monkeypatch.setattr(backends.child, "Child", lambda *a: pytest.fail("started"))
    keys = [json.dumps(["a device", "attention", window, *SHAPE, "kernels", "sdpa"]) for window in (WINDOW, 64)]
    memory.write_text(json.dumps(dict.fromkeys(keys, {"kernels": "took its process down: signal 11", "sdpa": 4.0})))
    assert choose()[1] == f"sdpa up to {WINDOW}, sdpa up to 64"


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"half a', "\x00"])
def test_a_damaged_memory_is_made_anew(answers, content):
    Path(chosen.CACHE_DIR, "compiled", "backends.json").write_text(content)
    assert choose()[1] == f"kernels up to {WINDOW}, kernels up to 64"
    assert len(known()) == 2


def test_a_folder_in_the_memory_s_place_stops_no_run(answers, capsys):
    Path(chosen.CACHE_DIR, "compiled", "backends.json").mkdir()
    assert choose()[1] == f"kernels up to {WINDOW}, kernels up to 64"
    assert "WARNING: what was measured can't be kept ([Errno 21] Is a directory: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "entry",
    [None, [], {}, "sdpa", 3, {"sdpa": 4}, {"sdpa": "slow"}, {"sdpa": math.nan}, {"sdpa": math.inf}, {"sdpa": -1.0}, {"other": 0.1}],
    ids=str,
)
def test_an_entry_that_cannot_be_one_is_made_anew(answers, entry):
    choose("sdpa", windows=(WINDOW,))
    Path(chosen.CACHE_DIR, "compiled", "backends.json").write_text(json.dumps(dict.fromkeys(known(), entry)))
    assert choose("sdpa", windows=(WINDOW,))[1] == f"sdpa up to {WINDOW}"
    assert list(known().values()) == [{"sdpa": 4.0}]


@pytest.mark.parametrize(
    "found",
    [
        "not available (OutOfMemoryError: …)",
        "took its process down: signal 9",
        "took its process down: signal 15",
        "not tried (AcceleratorError: busy)",
        "hung: did not start",
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_need_not_hold_tomorrow_is_tried_again_by_the_next_run(answers, alone, found):
    """Another program may have held the memory; a run that could use nothing must not keep later ones from starting."""
    answers["kernels"] = found
    names = ("kernels",) if alone else ("kernels", "sdpa")
    if alone:
        with pytest.raises(backends.NoneUsable, match=found.split()[0]):
            choose(*names, windows=(WINDOW,))
    else:
        assert choose(*names, windows=(WINDOW,))[1] == f"sdpa up to {WINDOW}"
    answers.update(kernels=1.0, asked=[])
    assert choose(*names, windows=(WINDOW,))[1] == f"kernels up to {WINDOW}"
    assert answers["asked"] == ["kernels"], "what was found of the others is not asked for again"


def test_none_that_is_usable_is_tried_again_by_the_next_run(answers):
    answers["kernels"] = "took its process down: signal 11"
    with pytest.raises(backends.NoneUsable, match="no attention gives right numbers for a window of 20 here.*signal 11"):
        choose("kernels")
    answers["kernels"] = 1.0
    assert choose("kernels")[1] == f"kernels up to {WINDOW}, kernels up to 64"


def test_what_was_found_is_kept_before_the_next_is_tried(answers, monkeypatch):
    """The next may take the whole machine down."""
    tried = backends._tried

    def until_the_machine_hangs(*args):
        yield next(tried(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(backends, "_tried", until_the_machine_hangs)
    with pytest.raises(KeyboardInterrupt):
        choose()
    assert list(known().values()) == [{"kernels": 1.0}] * 2


def test_what_two_runs_measure_at_once_is_kept_of_both(answers, monkeypatch):
    tried = backends._tried

    def while_another_run_writes(*args):
        monkeypatch.setattr(backends, "_tried", tried)
        backends._findings("another run's", [1], [], ["sdpa"], CPU)
        yield from tried(*args)

    monkeypatch.setattr(backends, "_tried", while_another_run_writes)
    backends._findings("mine", [1], [], ["sdpa"], CPU)
    assert sorted(json.loads(key)[1] for key in known()) == ["another run's", "mine"]


def test_a_memory_that_cannot_be_written_costs_no_run(answers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(chosen, "CACHE_DIR", str(tmp_path / "gone"))
    assert choose(windows=(WINDOW,))[1] == f"kernels up to {WINDOW}"
    assert capsys.readouterr().out.count("WARNING: what was measured can't be kept") == 1


def test_what_was_found_holds_for_a_device_its_versions_and_this_code(monkeypatch):
    import triton

    device = SimpleNamespace(name="a GPU", gcnArchName="gfx1151")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = [backends._here(DEVICE)]
    for owner, name in ((triton, "__version__"), (torch, "__version__"), (torch.version, "hip"), (device, "gcnArchName")):
        monkeypatch.setattr(owner, name, "another")
        found.append(backends._here(DEVICE))
    monkeypatch.setattr(backends.checkpoint, "file_digest", lambda path: f"{Path(path).name:8}")
    found.append(backends._here(DEVICE))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    found.append(backends._here(DEVICE))
    assert found[-1][-2] == "no Triton"
    assert len({json.dumps(f) for f in found}) == len(found)
    assert all(name[:8] in found[-1][-1] for name in ("choice.py", "candidates.py", "attention.py", "linear.py", "_common.py"))


def test_one_that_is_missing_is_passed_over(monkeypatch):
    def missing(q, k, v):
        raise NotImplementedError("this build has no such operator")

    monkeypatch.setitem(candidates.ATTENTION, "kernels", lambda *a: missing)
    found = "not available (NotImplementedError: this build has no such operator)"
    assert list(candidates._try_attention("kernels", [WINDOW], CPU, *SHAPE)) == [found]


def test_one_that_is_asked_for_must_run_here():
    """On a CPU nothing is timed, but what is named is tried."""
    cpu = torch.device("cpu")
    assert backends.choose_attention("sdpa", {WINDOW, 64}, SHAPE, cpu)[1] == "sdpa"
    with pytest.raises(backends.NoneUsable, match=f"attention up to {WINDOW} by flash: not available"):
        backends.choose_attention("flash", {WINDOW}, SHAPE, cpu)


# ---- weight gradients ------------------------------------------------------------------------------------------------------------------


def test_the_fastest_weight_gradient_is_chosen_and_remembered(answers, monkeypatch, capsys):
    """On a ROCm build, which is a stand-in."""
    linear = import_module("kernels.linear")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(linear, "WEIGHT_GRADIENT", {})
    answers.update({f"{form} by {library}": 5.0 for form in linear.FORMS for library in ("cublaslt", "cublas")})
    answers["copied by cublas"], answers["direct by cublas"] = 1.0, "wrong numbers (relative error 1.0e-01)"
    for _ in range(2):
        backends.choose_weight_gradients([(8, 16), (8, 16)], 32, CPU)
        assert linear.WEIGHT_GRADIENT == {(8, 16): ("copied", "cublas")}
        refused, chosen = capsys.readouterr().out.splitlines()
        assert refused == "Weight gradient 8x16 direct by cublas is not used: wrong numbers (relative error 1.0e-01)"
        assert chosen == "Weight gradients: 8x16 copied by cublas (1.00 ms, slowest 5.00)"
        answers["direct by cublas"] = 0.5  # but what was found before is used
    answers.update(dict.fromkeys([name for name in answers if " by " in name], "not available (RuntimeError: HIPBLAS_STATUS)"))
    with pytest.raises(backends.NoneUsable, match="no product gives the right gradient of a weight of 8x24"):
        backends.choose_weight_gradients([(8, 24)], 32, CPU)


def try_product(monkeypatch, product, rows=32):
    linear = import_module("kernels.linear")
    monkeypatch.setattr(linear, "WEIGHT_GRADIENT", {})
    monkeypatch.setitem(linear.FORMS, "copied", product)
    monkeypatch.setattr(linear, "blas", lambda library: contextlib.nullcontext())
    (found,) = candidates._try_weight_gradient("copied by cublas", [(8, 16)], CPU, rows)
    return found


def test_a_wrong_weight_gradient_is_found(monkeypatch):
    right = import_module("kernels.linear").FORMS["copied"]
    assert try_product(monkeypatch, right) > 1e-3
    assert try_product(monkeypatch, lambda *a: 1.1 * right(*a)).startswith("wrong numbers (relative error")
    assert try_product(monkeypatch, lambda *a: math.nan * right(*a)).startswith("wrong numbers (relative error")


def test_a_weight_gradient_that_raises_is_passed_over(monkeypatch):
    def unsupported(dy, x, mm):
        raise RuntimeError("HIPBLAS_STATUS_NOT_SUPPORTED when calling hipblasLtMatmul")

    assert try_product(monkeypatch, unsupported).startswith("not available (RuntimeError: HIPBLAS_STATUS_NOT_SUPPORTED")


def test_a_weight_gradient_that_is_wrong_in_later_rows_alone_is_found(monkeypatch):
    """As by an offset that overflows: all rows are compared, not the first few thousand."""
    right = import_module("kernels.linear").FORMS["copied"]
    assert try_product(monkeypatch, right, rows=6000) > 1e-3
    assert try_product(monkeypatch, lambda dy, x, mm: right(dy[:5000], x[:5000], mm), rows=6000).startswith("wrong numbers")


def test_nothing_is_chosen_where_products_are_not_rocms(monkeypatch):
    monkeypatch.setattr(backends, "_findings", lambda *a: pytest.fail("tried"))
    backends.choose_weight_gradients([(8, 16)], 32, DEVICE)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(chosen, "CACHE_DIR", str(tmp_path))
    shape = 4, 512, 4, 4, 128
    attends, names = backends.choose_attention("auto", {256, 512}, shape, DEVICE)
    assert set(attends) == {256, 512}
    each = [tried for case, tried in known().items() if "attention together" not in case]  # which a GPU that is busy otherwise may need
    assert all(isinstance(tried["kernels"], float) for tried in each) and len(each) == 2, known()

"""The choice of attention and of weight gradients: wrong numbers are found and never used, what was found is kept, overrides hold.

There is no GPU to time on in CI: there `_milliseconds` and the device's name are stand-ins, all the rest is real.
"""

import contextlib
import json
import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import backends
import prepare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = 2, 64, 4, 2, 32  # B, T, n_head, n_kv_head, head_dim
WINDOW = 20


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Milliseconds by name, and a cache of its own."""
    times = {"kernels": 1.0, "flash": 2.0, "flex": 3.0, "sdpa": 4.0}
    current = []
    attention = dict(backends.ATTENTION)
    for name, make in attention.items():
        monkeypatch.setitem(backends.ATTENTION, name, lambda *a, n=name, m=make: (current.append(n), m(*a))[1])
    monkeypatch.setattr(backends, "_milliseconds", lambda f, device: (f(), times[current[-1]])[1])
    monkeypatch.setattr(backends, "_here", lambda device: ["a device"])
    monkeypatch.setattr(prepare, "CACHE_DIR", str(tmp_path))
    return times


def known():
    return json.loads(Path(prepare.CACHE_DIR, "backends.json").read_text())


def choose(*candidates, windows=(WINDOW, 64)):
    return backends._fastest_attention(windows, SHAPE, DEVICE, candidates or ("kernels", "sdpa"))


@pytest.mark.parametrize(
    "name", ["kernels", "sdpa", pytest.param("flex", marks=pytest.mark.gpu), pytest.param("flash", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("window", [WINDOW, 64])
def test_right_ones_pass(name, window):
    assert backends.check_attention(backends.ATTENTION[name](window, 64, DEVICE), window, SHAPE, DEVICE) is None


def broken(kind):
    def make(window, T, device):
        right = backends.sdpa(window + (kind == "window"), T, device)

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
def test_a_wrong_one_is_named_and_never_used(cpu, monkeypatch, capsys, kind):
    """Though it is the fastest: a window of one key too many, a gradient that is zero, NaN, a wrong last row."""
    cpu["kernels"] = 0.1
    monkeypatch.setitem(backends.ATTENTION, "kernels", broken(kind))
    chosen, names = choose(windows=(WINDOW,))
    assert names == f"sdpa up to {WINDOW}"
    assert f"Attention up to {WINDOW} by kernels is not used: wrong numbers" in capsys.readouterr().out
    with pytest.raises(backends.NoneUsable, match="no attention gives right numbers"):
        choose("kernels", windows=(WINDOW,))


def test_the_fastest_is_chosen_and_remembered(cpu, capsys):
    chosen, names = choose()
    assert names == f"kernels up to {WINDOW}, kernels up to 64" and set(chosen) == {WINDOW, 64}
    assert f"Attention up to {WINDOW} by kernels; forward and backward in ms: kernels 1.00, sdpa 4.00" in capsys.readouterr().out
    cpu.update(kernels=5.0)
    assert choose()[1] == names, "what was found before is used"
    assert len(known()) == 2
    assert choose("sdpa")[1] == f"sdpa up to {WINDOW}, sdpa up to 64"


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"half a', "\x00"])
def test_a_damaged_memory_is_made_anew(cpu, content):
    Path(prepare.CACHE_DIR, "backends.json").write_text(content)
    assert choose()[1] == f"kernels up to {WINDOW}, kernels up to 64"
    assert len(known()) == 2


@pytest.mark.parametrize(
    "entry",
    [None, [], {}, "sdpa", 3, {"sdpa": 4}, {"sdpa": "slow"}, {"sdpa": math.nan}, {"sdpa": math.inf}, {"sdpa": -1.0}, {"other": 0.1}],
    ids=str,
)
def test_an_entry_that_cannot_be_one_is_made_anew(cpu, entry):
    choose("sdpa", windows=(WINDOW,))
    Path(prepare.CACHE_DIR, "backends.json").write_text(json.dumps(dict.fromkeys(known(), entry)))
    assert choose("sdpa", windows=(WINDOW,))[1] == f"sdpa up to {WINDOW}"
    assert list(known().values()) == [{"sdpa": 4.0}]


@pytest.mark.parametrize("alone", [False, True])
def test_what_had_no_memory_is_tried_again_by_the_next_run(cpu, monkeypatch, alone):
    """Another program may have held it; a run that could use nothing must not keep later ones from starting."""
    make, full = backends.ATTENTION["kernels"], [True]

    def attention(*a):
        def attend(q, k, v):
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(*a)(q, k, v)

        return attend

    monkeypatch.setitem(backends.ATTENTION, "kernels", attention)
    candidates = ("kernels",) if alone else ("kernels", "sdpa")
    with pytest.raises(backends.NoneUsable, match="OutOfMemoryError") if alone else contextlib.nullcontext():
        assert choose(*candidates, windows=(WINDOW,))[1] == f"sdpa up to {WINDOW}"
    full.clear()
    monkeypatch.setitem(backends.ATTENTION, "sdpa", broken("nan"))  # what was found of the others is not asked for again
    assert choose(*candidates, windows=(WINDOW,))[1] == f"kernels up to {WINDOW}"
    assert [entry.get("sdpa") for entry in known().values()] == [None if alone else 4.0]


def test_what_two_runs_measure_at_once_is_kept_of_both(cpu):
    def measured_while_another_run_writes(candidate):
        backends._remembered(["another run's"], ["sdpa"], DEVICE, lambda candidate: 2.0)
        return 1.0

    backends._remembered(["mine"], ["sdpa"], DEVICE, measured_while_another_run_writes)
    assert sorted(json.loads(key)[-1] for key in known()) == ["another run's", "mine"]


def test_a_memory_that_cannot_be_written_costs_no_run(cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(prepare, "CACHE_DIR", str(tmp_path / "gone"))
    assert choose("sdpa", windows=(WINDOW,))[1] == f"sdpa up to {WINDOW}"
    assert "WARNING: what was measured can't be kept" in capsys.readouterr().out


def test_what_was_found_holds_for_a_device_its_versions_and_this_code(monkeypatch):
    import triton

    device = SimpleNamespace(name="a GPU", gcnArchName="gfx1151")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = [backends._here(DEVICE)]
    for owner, name in ((triton, "__version__"), (torch, "__version__"), (torch.version, "hip"), (device, "gcnArchName")):
        monkeypatch.setattr(owner, name, "another")
        found.append(backends._here(DEVICE))
    monkeypatch.setattr(backends.machine, "file_digest", lambda path: f"{Path(path).name:8}")
    found.append(backends._here(DEVICE))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    found.append(backends._here(DEVICE))
    assert found[-1][-2] == "no Triton"
    assert len({json.dumps(f) for f in found}) == len(found)
    assert all(name[:8] in found[-1][-1] for name in ("backends.py", "attention.py", "linear.py", "_common.py"))


def test_one_that_is_missing_is_passed_over(cpu, monkeypatch):
    def missing(window, T, device):
        def attend(q, k, v):
            raise NotImplementedError("this build has no such operator")

        return attend

    monkeypatch.setitem(backends.ATTENTION, "kernels", missing)
    assert choose()[1] == f"sdpa up to {WINDOW}, sdpa up to 64"


def test_one_that_is_asked_for_must_run_here():
    """On a CPU nothing is timed, but what is named is tried."""
    cpu = torch.device("cpu")
    assert backends.choose_attention("sdpa", {WINDOW, 64}, SHAPE, cpu)[1] == "sdpa"
    with pytest.raises(backends.NoneUsable, match=f"attention up to {WINDOW} by flash: not available"):
        backends.choose_attention("flash", {WINDOW}, SHAPE, cpu)


@pytest.fixture
def weight_gradients(monkeypatch, tmp_path):
    """`choose()` of a ROCm build, which is a stand-in, as is the time of each choice: (form, library) → ms, 5 for the others."""
    linear, times = import_module("kernels.linear"), {}
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(prepare, "CACHE_DIR", str(tmp_path))
    for form, product in linear.FORMS.items():
        monkeypatch.setitem(linear.FORMS, form, product)  # so that what a test puts there goes again
    monkeypatch.setitem(linear.WEIGHT_GRADIENT, (8, 16), None)
    monkeypatch.setattr(linear, "blas", lambda library: contextlib.nullcontext())
    monkeypatch.setattr(backends, "_here", lambda device: ["a device"])
    monkeypatch.setattr(backends, "_milliseconds", lambda f, device: (f(), times.get(linear.WEIGHT_GRADIENT[8, 16], 5.0))[1])

    def choose(rows=32):
        backends.choose_weight_gradients([(8, 16), (8, 16)], rows, torch.device("cpu"))
        return linear.WEIGHT_GRADIENT[8, 16]

    return choose, times, linear


def test_the_fastest_weight_gradient_is_chosen_and_remembered(weight_gradients, capsys):
    choose, times, _ = weight_gradients
    times["copied", "cublas"] = 1.0
    assert choose() == ("copied", "cublas")
    assert capsys.readouterr().out == "Weight gradients: 8x16 copied by cublas (1.00 ms, slowest 5.00)\n"
    times["direct", "cublas"] = 0.5
    assert choose() == ("copied", "cublas"), "what was found before is used"


def test_a_wrong_weight_gradient_is_named_and_never_chosen(weight_gradients, capsys):
    choose, times, linear = weight_gradients
    right = linear.FORMS["copied"]
    linear.FORMS["copied"] = lambda *a: 1.1 * right(*a)
    times |= {("copied", "cublas"): 0.1, ("transposed", "cublaslt"): 1.0}
    assert choose() == ("transposed", "cublaslt")
    assert "Weight gradient 8x16 copied by cublas is not used: wrong numbers (relative error" in capsys.readouterr().out
    Path(prepare.CACHE_DIR, "backends.json").unlink()
    linear.FORMS.update(dict.fromkeys(linear.FORMS, linear.FORMS["copied"]))
    with pytest.raises(backends.NoneUsable, match="no product gives the right gradient of a weight of 8x16"):
        choose()


def test_a_weight_gradient_that_raises_is_passed_over(weight_gradients, capsys):
    choose, _, linear = weight_gradients

    def unsupported(dy, x, mm):
        raise RuntimeError("HIPBLAS_STATUS_NOT_SUPPORTED when calling hipblasLtMatmul")

    linear.FORMS["direct"] = unsupported
    assert choose() == ("transposed", "cublaslt")
    assert "Weight gradient 8x16 direct by cublas is not used: not available (RuntimeError: HIPBLAS" in capsys.readouterr().out


def test_a_weight_gradient_that_is_wrong_in_later_rows_alone_is_found(weight_gradients):
    """As by an offset that overflows: all rows are compared, not the first few thousand."""
    choose, times, linear = weight_gradients
    right = linear.FORMS["copied"]
    linear.FORMS["copied"] = lambda dy, x, mm: right(dy[:5000], x[:5000], mm)
    times |= {("copied", "cublas"): 0.1, ("transposed", "cublaslt"): 1.0}
    assert choose(rows=6000) == ("transposed", "cublaslt")


def test_nothing_is_chosen_where_products_are_not_rocms(monkeypatch):
    monkeypatch.setattr(backends, "_try_weight_gradient", lambda *a: pytest.fail("tried"))
    backends.choose_weight_gradients([(8, 16)], 32, DEVICE)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "CACHE_DIR", str(tmp_path))
    shape = 4, 512, 4, 4, 128
    chosen, names = backends.choose_attention("auto", {256, 512}, shape, DEVICE)
    assert set(chosen) == {256, 512}
    assert all(isinstance(tried["kernels"], float) for tried in known().values()), known()

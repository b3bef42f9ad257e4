"""The choice of attention and of weight gradients: wrong numbers are found and never used, what was found is kept, overrides hold.

There is no GPU to time on in CI: there `_milliseconds` and the device's name are stand-ins, all the rest is real.
"""

import json
from pathlib import Path

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
    with pytest.raises(RuntimeError, match="no attention gives right numbers"):
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


def test_one_that_is_missing_is_passed_over(cpu, monkeypatch):
    def missing(window, T, device):
        def attend(q, k, v):
            raise NotImplementedError("this build has no such operator")

        return attend

    monkeypatch.setitem(backends.ATTENTION, "kernels", missing)
    assert choose()[1] == f"sdpa up to {WINDOW}, sdpa up to 64"


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "CACHE_DIR", str(tmp_path))
    shape = 4, 512, 4, 4, 128
    chosen, names = backends.choose_attention("auto", {256, 512}, shape, DEVICE)
    assert set(chosen) == {256, 512}
    assert all(isinstance(tried["kernels"], float) for tried in known().values()), known()

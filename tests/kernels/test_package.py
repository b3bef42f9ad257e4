"""kernels/ as others use it: the folder copied, packaged, loaded by PyPI's `kernels`, put into transformers' Llama; and its README's code.

Each runs in a process of its own, outside the project, because the project's folder hides the package of the same name.

Without a GPU the kernels run in Triton's interpreter, and `kernels` finds no variant for a CPU build of torch. So there a variant is
loaded by its own path, which chooses nothing. Where the choice is what is tested, `torch.version` says what it says in a GPU's build:
that is all that `kernels` looks at, and the only thing that is simulated.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from checkout import NO_GPU
from conftest import PROJECT
from interpreter import FAILS, WHY, needs_interpreter
from precision import assert_close_to_reference

from package_kernels import package


def older(name, least):
    try:
        return tuple(map(int, version(name).split(".")[:2])) < least
    except PackageNotFoundError:
        return True


needs_kernels = pytest.mark.skipif(older("kernels", (0, 17)), reason="needs PyPI's kernels, 0.17 or later")
needs_transformers = pytest.mark.skipif(older("transformers", (5, 0)), reason="needs transformers, 5 or later")
runs_kernels = pytest.mark.skipif(FAILS and not torch.cuda.is_available(), reason=WHY)
NAME = "owner/strix-kernels"

# What the scripts below begin with.
PRELUDE = """
import os, sys
from pathlib import Path
import torch
"""


def outside(folder, script, *arguments, interpreted=None):
    """Run a script in `folder` as a stranger would: no path of the project, nothing from the network."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LOCAL_KERNELS", "TRITON_INTERPRET")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(folder / "hf"), "PYTHONDONTWRITEBYTECODE": "1"}
    if not torch.cuda.is_available() if interpreted is None else interpreted:
        env |= NO_GPU | {"TRITON_INTERPRET": "1"}
    (folder / "script.py").write_text(PRELUDE + textwrap.dedent(script))
    command = [sys.executable, "script.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """What the command makes."""
    folder = tmp_path_factory.mktemp("packaged") / "a folder"
    command = [sys.executable, PROJECT / "package_kernels.py", "--out", folder, "--repo", NAME, "--version", "3"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and NAME in done.stdout, done.stderr
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the folder ------------------------------------------------------------------------------------------------------


def test_layout(packaged):
    sources = {path.name for path in (PROJECT / "kernels").glob("*.py")}
    expected = {"build.toml", "README.md", "LICENSE"} | {f"torch-ext/strix_kernels/{name}" for name in sources - {"_ops.py"}}
    expected |= {f"build/torch-{backend}/{name}" for backend in ("cuda", "rocm") for name in sources | {"metadata.json"}}
    assert set(contents(packaged)) == expected
    ids = set()
    for backend in ("cuda", "rocm"):
        metadata = json.loads((packaged / f"build/torch-{backend}/metadata.json").read_text())
        assert (metadata["name"], metadata["version"], metadata["backend"]) == ("strix-kernels", 3, {"type": backend})
        assert metadata["id"].isidentifier() and f'"{metadata["id"]}"' in (packaged / f"build/torch-{backend}/_ops.py").read_text()
        ids.add(metadata["id"])
    assert len(ids) == 2


def test_same_sources_same_folder_and_other_sources_other_names(packaged, tmp_path):
    package(tmp_path / "again", NAME, 3)
    assert contents(tmp_path / "again") == contents(packaged)

    shutil.copytree(PROJECT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "LICENSE", tmp_path)
    (tmp_path / "kernels/gated.py").write_text((tmp_path / "kernels/gated.py").read_text() + "# changed\n")
    (tmp_path / "again/build/torch-rocm/left_over.py").touch()
    (tmp_path / "again/.git").mkdir()
    package(tmp_path / "again", NAME, 3, source=tmp_path / "kernels")
    changed = contents(tmp_path / "again")
    assert set(changed) == set(contents(packaged)) and (tmp_path / "again/.git").is_dir()
    for backend in ("cuda", "rocm"):
        path = f"build/torch-{backend}/_ops.py"
        assert changed[path] != contents(packaged)[path]


@pytest.mark.parametrize("repo", ["Owner/Kernels", "a/b/kernels", "kernels-", "owner/", "x y/kernels"])
def test_names_that_the_layout_does_not_allow(repo, tmp_path):
    with pytest.raises(ValueError, match="OWNER/NAME"):
        package(tmp_path / "out", repo)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    done = subprocess.run([sys.executable, PROJECT / "package_kernels.py", "--out", tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("package_kernels.py: ") and "holds other files" in done.stderr
    assert contents(tmp_path) == {"README.md": b"mine"}


# --- loaded by PyPI's kernels ----------------------------------------------------------------------------------------


@needs_kernels
def test_valid_by_the_parsers_of_kernels(packaged, tmp_path):
    """build.toml and metadata.json as its own (Rust) code reads them, the digest over the files included."""
    script = """
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

    folder = Path(sys.argv[1])
    backends = Build.open(folder).general.backends
    assert sorted(map(str, backends)) == ["cuda", "rocm"], backends
    for backend in backends:
        variant = folder / f"build/torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.backend.backend_type == backend and metadata.license == "MIT" and metadata.python_depends == []
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    """
    outside(tmp_path, script, packaged)


@needs_kernels
@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_the_variant_is_chosen_by_the_backend(backend, packaged, tmp_path):
    script = """
    from kernels import get_kernel, get_loaded_kernels, get_local_kernel

    folder, backend = Path(sys.argv[1]), sys.argv[2]
    torch.version.cuda, torch.version.hip = {"cuda": ("13.0", None), "rocm": (None, "7.2.1-abc")}[backend]
    kernel = get_local_kernel(folder)
    (loaded,) = get_loaded_kernels()
    assert loaded.metadata.id == kernel.__name__ and Path(kernel.__file__).parent == folder / f"build/torch-{backend}"
    os.environ["LOCAL_KERNELS"] = f"owner/strix-kernels={folder}"
    assert get_kernel("owner/strix-kernels", version=1) is kernel
    """
    outside(tmp_path, script, packaged, backend)


LOAD = """
from kernels import get_kernel, get_local_kernel

folder, other, suffix, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["LOCAL_KERNELS"] = f"owner/strix-kernels={folder}{suffix}:owner/other={other}{suffix}"
packages = [get_local_kernel(folder / suffix.strip("/")), get_kernel("owner/other", version=1)]
assert get_kernel("owner/strix-kernels", version=1) is packages[0]
import mine  # a copy of kernels/ under another name, beside the packaged ones
packages.append(mine)

public = {name for name in dir(mine) if not name.startswith("_")}
x = torch.randn(4, 32, device=device)
q, k, v = torch.randn(3, 1, 8, 2, 16, device=device)
cos, sin = torch.randn(2, 8, 8, device=device)
targets = torch.randint(32, (4,), device=device)
lambdas = torch.tensor(0.5, device=device), torch.tensor(0.25, device=device)
packed = torch.randn(1, 8, 2 * 16 + 2 * 16 + 16, device=device)  # two query heads, one KV head, its gate
calls = {
    "rms_norm": (x,), "add_rms_norm": (x, x), "residual_mix_norm": (x, x, *lambdas), "linear": (x, x), "add_norm_linear": (x, x, x),
    "add_norm_mlp": (x, x, x, x.new_ones(3, 4)),
    "residual_mix_norm_linear": (x, x, *lambdas, x), "qkv_norm_rope": (packed, cos, sin, 2, 1, targets[None].repeat(1, 2) % 4, x[:, :16]),
    "swiglu": (x, x), "geglu": (x, x),
    "geglu_chunked": (x,), "relu_squared": (x,), "qk_norm_rope": (q, k, cos, sin), "flash_attention": (q, k, v), "sdpa": (q, k, v),
    "softcap_cross_entropy": (x, targets), "linear_softcap_cross_entropy": (x, torch.randn(32, 32, device=device), targets),
}  # fmt: skip
assert {name for name in public if name + "_ref" in public} == set(calls)
for package in packages:
    assert public <= set(dir(package)) and set("RMSNorm SwiGLU GEGLU".split()) <= set(dir(package.layers))
    for name, arguments in calls.items():
        torch.testing.assert_close(getattr(package, name)(*arguments), getattr(package, name + "_ref")(*arguments), rtol=1e-4, atol=1e-5)
    assert hasattr(getattr(torch.ops, sys.modules[package.__name__ + "._ops"].NAMESPACE), "rms_norm")
assert len({sys.modules[package.__name__ + "._ops"].NAMESPACE for package in packages}) == 3
"""


@pytest.mark.slow
@needs_kernels
@runs_kernels
@pytest.mark.parametrize("where", ["variant", pytest.param("folder", marks=pytest.mark.gpu)])
def test_loads_beside_other_copies(where, packaged, tmp_path, device):
    """Two versions and a plain copy in one process: each has operators of its own, and they work."""
    for copy in ("kernels", "mine"):
        shutil.copytree(PROJECT / "kernels", tmp_path / copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "LICENSE", tmp_path)
    (tmp_path / "kernels/gated.py").write_text((tmp_path / "kernels/gated.py").read_text() + "# another version\n")
    package(tmp_path / "other", "owner/strix-kernels", source=tmp_path / "kernels")
    shutil.rmtree(tmp_path / "kernels")
    variant = "/build/torch-rocm" if torch.version.hip else "/build/torch-cuda"
    outside(tmp_path, LOAD, packaged, tmp_path / "other", variant if where == "variant" else "", device)


@needs_kernels
@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch is built for a GPU")
def test_a_cpu_build_of_torch_is_told(packaged, tmp_path):
    script = """
    from kernels import get_local_kernel
    try:
        get_local_kernel(Path(sys.argv[1]))
    except FileNotFoundError as error:
        assert "torch-rocm" in str(error) and "cpu" in str(error), error
    else:
        raise AssertionError("loaded a variant for a GPU")
    """
    outside(tmp_path, script, packaged)


# --- in a model ------------------------------------------------------------------------------------------------------

LLAMA = """
import copy
import torch.nn.functional as F
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

folder, device, backend = sys.argv[1:4]
os.environ["LOCAL_KERNELS"] = f"owner/strix-kernels={folder}"
replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLU")
mapping = {
    name: {backend: LayerRepository("owner/strix-kernels", layer_name=name, revision="v1")} for name in ("RMSNorm", "SwiGLU")
}
config = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
tokens = torch.randint(96, (2, 12), device=device)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def gradients(model):
    y = model.train()(input_ids=tokens).logits
    return [y.detach(), *torch.autograd.grad(y, list(model.parameters()), dy.to(y.dtype))]


def put(model, mode):
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=backend, use_fallback=False)
    norms, mlps = ([m for m in model.modules() if isinstance(m, c)] for c in (LlamaRMSNorm, LlamaMLP))
    assert len(norms) == 5 and len(mlps) == 2
    for module in norms + mlps:
        assert module.forward.__func__.__module__.startswith("_strix_kernels_"), module.forward
    return model


results = {}
for dtype in map(lambda name: getattr(torch, name), sys.argv[4:]):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, dtype)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.3 if p.ndim == 1 else 0.05)
    dy = torch.randn(2, 12, 96, device=device, dtype=dtype)
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, LlamaRMSNorm):  # theirs rounds to float32 inside
            module.forward = lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    state = copy.deepcopy(model.state_dict())
    found = {"exact": ([logits(exact)], gradients(exact)), "theirs": ([logits(model)], gradients(model))}
    ours = [logits(put(model, Mode.INFERENCE))], gradients(put(model, Mode.TRAINING))
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values())) and list(state) == list(model.state_dict())
    results[dtype] = found | {"ours": ours}

    put(model, Mode.TRAINING | Mode.TORCH_COMPILE)
    x = torch.randn(3, 64, device=device, dtype=dtype)
    for module in (model.model.norm, model.model.layers[0].mlp):
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
torch.save(results, "results.pt")
"""


@pytest.mark.slow
@needs_kernels
@needs_transformers
@pytest.mark.parametrize("where", [pytest.param("interpreter", marks=needs_interpreter), pytest.param("gpu", marks=pytest.mark.gpu)])
def test_kernelized_llama(where, packaged, tmp_path):
    """Norms and MLPs of a random Llama, for inference and for training: outputs and all gradients as accurate as before.

    In the interpreter without bfloat16, which it truncates where a GPU rounds.
    """
    backend = "rocm" if torch.version.hip else "cuda"
    if where == "gpu":
        outside(tmp_path, LLAMA, packaged, "cuda", backend, "float32", "float16", "bfloat16")
    else:
        outside(tmp_path, LLAMA, packaged / f"build/torch-{backend}", "cpu", "cpu", "float32", "float16", interpreted=True)
    additions = 2 * (5 * 64 + 160)  # two layers: sums over hidden_size in norms, projections and MLP, and one over intermediate_size
    for dtype, results in torch.load(tmp_path / "results.pt", weights_only=True).items():
        for mode, ours, theirs, exact in zip(("inference", "training"), results["ours"], results["theirs"], results["exact"]):
            assert len(ours) == (1 if mode == "inference" else 1 + 21)
            for n, (o, t, e) in enumerate(zip(ours, theirs, exact)):
                what = f"{dtype} {mode}, {f'gradient {n - 1}' if n else 'logits'}"
                assert_close_to_reference(o, t, e, 3 if n else 2, what, additions)


# --- the README ------------------------------------------------------------------------------------------------------


def readme(language, *sections):
    """The blocks of code in these sections, as one script. On a machine without a GPU the two lines that name one name the CPU."""
    parts = re.split(r"^## ", (PROJECT / "kernels/README.md").read_text(), flags=re.M)
    chosen = [part for part in parts if part.startswith(sections)]
    assert len(chosen) == len(sections)
    code = "".join(re.findall(rf"^```{language}\n(.*?)^```$", "".join(chosen), re.M | re.S))
    if torch.version.hip:
        code = code.replace('backend = "cuda"', 'backend = "rocm"')
    if not torch.cuda.is_available():
        code = code.replace('device = "cuda"', 'device = "cpu"').replace('backend = "cuda"', 'backend = "cpu"')
    return code


def test_readme_has_no_other_code():
    text = (PROJECT / "kernels/README.md").read_text()
    assert (
        re.findall(r"^```(\w+)$", text, re.M) == ["python", "python", "text", "python", "sh", "python", "python"]
        and text.count("```") == 14
    )


@runs_kernels
def test_readme_with_the_folder_copied(tmp_path):
    """kernels/ and nothing else of the project."""
    shutil.copytree(PROJECT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    found = [] if older("transformers", (5, 0)) else ["Use: let torch.compile find them"]
    script = readme("python", "Use: copy the folder", *found, "Use: in a model that exists")
    without_lines = [line.split(" (")[0] for line in readme("text", *found).splitlines()]  # which differ between versions of transformers
    checks = f"""
assert not {found} or [line.split(" (")[0] for line in said.splitlines()][:-1] == {without_lines[:-1]}, said
assert x.grad.isfinite().all() and lm_head.grad.isfinite().all() and loss.isfinite()
assert model[1].weight.grad is not None and model[1].forward.__func__ is RMSNorm.forward
"""
    outside(tmp_path, script + checks)


@pytest.mark.slow
@needs_kernels
@needs_transformers
@runs_kernels
def test_readme_through_hugging_face(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(PROJECT / "kernels", project / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("package_kernels.py", "LICENSE"):
        shutil.copy(PROJECT / name, project)
    command = readme("sh", "Use: through").replace("python ", f'"{sys.executable}" ')
    subprocess.run(command, shell=True, cwd=project, check=True)
    pretend = "" if torch.cuda.is_available() else 'torch.version.cuda = "13.0"\n'
    checks = """
assert model.model.norm.forward.__func__.__module__.startswith("_autoresearch_kernels_")
assert model.model.layers[1].mlp.forward.__func__.__module__.startswith("_autoresearch_kernels_")
assert all(p.grad is not None for p in model.parameters())
"""
    outside(tmp_path, pretend + readme("python", "Use: through") + checks)

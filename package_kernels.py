"""Make of kernels/ a folder that Hugging Face's `kernels` package (PyPI, 0.17 or later) loads, locally or from the Hub.

    DIR/build/torch-cuda/  torch-rocm/    what get_kernel, get_local_kernel and kernelize import
    DIR/build.toml  torch-ext/NAME/       the same as source for kernel-builder, which adds an _ops.py of its own
    DIR/README.md  LICENSE

Nothing is compiled: Triton does that where it runs. So there is one variant for each backend, for every torch and Python.

One process may load several versions, and torch.ops has one entry a name. So each variant registers its operators under a name of its
own, with a hash of the sources in it: the same sources give the same folder, byte for byte, and other sources other names.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BACKENDS = ("cuda", "rocm")


def build_toml(name, version, repo):
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    hub = f'[general.hub]\nrepo-id = "{repo}"\n\n' if "/" in repo else ""
    return (
        f'[general]\nname = "{name}"\nversion = {version}\nedition = 5\nlicense = "MIT"\nbackends = [{backends}]\n\n{hub}[torch-noarch]\n'
    )


def metadata(name, version, backend, namespace, files):
    """metadata.json of one variant. Without `archs` every GPU of the backend may load it."""
    digests = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in sorted(files.items())}
    return {
        "id": namespace,  # the name of the imported module and, by the layout's rule, of the operators' namespace
        "name": name,
        "version": version,
        "license": "MIT",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def write(folder, files):
    """The folder holds these files and no others afterwards: a file of an older version would be imported or uploaded with the rest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8", newline="\n")


def package(out, repo="autoresearch-kernels", version=1, source=ROOT / "kernels"):
    """Write the folder `out`. repo: "owner/name" on the Hub, or only the name; version: the Hub's branch will be v<version>."""
    name = repo.rpartition("/")[2]
    if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name) or not re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?[^/]+", repo, re.ASCII):
        raise ValueError(f"repo {repo!r}: use NAME or OWNER/NAME, where NAME is lower-case letters, digits and dashes")
    if version < 1:
        raise ValueError(f"version {version}: use 1 or more")
    ours = (out / "build.toml").exists() and "[torch-noarch]" in (out / "build.toml").read_text(encoding="utf-8")
    if out.exists() and not ours and any(p.name not in (".git", ".gitattributes") for p in out.iterdir()):
        raise ValueError(f"{out} holds other files; name a new folder, or one that this command made")

    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(source.glob("*.py"))}
    fingerprint = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        namespace = f"_{name.replace('-', '_')}_{backend}_{fingerprint}"
        ops, count = re.subn(r'^NAMESPACE = ".*"$', f'NAMESPACE = "{namespace}"', files["_ops.py"], flags=re.M)
        assert count == 1, "_ops.py holds NAMESPACE once"
        variant = files | {"_ops.py": ops}
        write(
            out / f"build/torch-{backend}",
            variant | {"metadata.json": json.dumps(metadata(name, version, backend, namespace, variant), indent=2) + "\n"},
        )
    shutil.rmtree(out / "torch-ext", ignore_errors=True)  # one of another name too
    write(out / "torch-ext" / name.replace("-", "_"), {path: text for path, text in files.items() if path != "_ops.py"})
    (out / "build.toml").write_text(build_toml(name, version, repo), encoding="utf-8", newline="\n")
    shutil.copyfile(source / "README.md", out / "README.md")
    shutil.copyfile(source.parent / "LICENSE", out / "LICENSE")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write; made by an earlier call: replaced")
    parser.add_argument("--repo", default="autoresearch-kernels", metavar="[OWNER/]NAME", help="its name (default: %(default)s)")
    parser.add_argument("--version", type=int, default=1, help="raise it when the functions' arguments change (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        package(arguments.out, arguments.repo, arguments.version)
    except (OSError, ValueError) as error:
        sys.exit(f"package_kernels.py: {error}")
    print(f"{arguments.out}: torch-cuda and torch-rocm of {arguments.repo}, version {arguments.version}")


if __name__ == "__main__":
    main()

"""The namespace that the operators of this package are registered under in `torch.ops`.

Kept in one place because two copies of the package in one process (a local clone beside one loaded from a hub) must not
register the same name twice: the packaging command writes a unique namespace here.
"""

NAMESPACE = "autoresearch_kernels"


def add_op_namespace_prefix(name):
    """`"rms_norm"` → `"autoresearch_kernels::rms_norm"`."""
    return f"{NAMESPACE}::{name}"

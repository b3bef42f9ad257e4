"""Whether the kernels can run in Triton's interpreter, as they do without a GPU: for tests whose subprocesses need that."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def release(package):
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdecimal())
    except PackageNotFoundError:
        return ()


FAILS = () < release("triton") < (3, 7, 1) and release("numpy") >= (2, 4)
WHY = "the interpreter of Triton before 3.7.1 fails with numpy 2.4 or later"
needs_interpreter = pytest.mark.skipif(FAILS, reason=WHY)

"""Files written whole or not at all, JSON read as it is found, digests."""

import contextlib
import hashlib
import json
import os


@contextlib.contextmanager
def replace_file(path, mode="w"):
    """Open a temporary file that takes the name `path`, fsynced, if the block ends well."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def read_json(path):
    """The object in a JSON file, or None where there is no such file or no JSON object in it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError), open(path) as f:
        content = json.load(f)
        return content if isinstance(content, dict) else None
    return None


def sha256(*buffers):
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0

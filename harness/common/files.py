"""Files written whole or not at all, JSON read as it is found, digests."""

import contextlib
import hashlib
import json
import os


@contextlib.contextmanager
def replace_file(path, mode="w", permissions=None, **how):
    """Open a temporary file that takes the name `path` if the block ends well, and is on the disk then. how: as `open` takes it."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, mode, **how) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if permissions is not None:
            os.chmod(temporary, permissions)
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def sync_folder(folder):
    """Let the names in a folder be on the disk, as the files are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path):
    """The object in a JSON file, or None where there is no such file or no JSON object in it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError), open(path, encoding="utf-8") as f:
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

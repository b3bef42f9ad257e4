"""Files written whole or not at all, JSON read as it is found, digests."""

import contextlib
import errno
import hashlib
import json
import os
import stat


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


LARGEST = 2**25  # bytes that a ledger or a JSON file of ours may have: thousands of times what a night writes


def read_bytes(path, most=LARGEST):
    """The content of a file. OSError for what is no file of its own (reading a FIFO or a device may never end), or larger than `most`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as f:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "A device or a pipe, and no file", str(path))
        content = f.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"Larger than {most >> 20} MiB, which none of ours is", str(path))
        return content


def read_json(path):
    """The object in a JSON file, or None where there is no such file or no JSON object in it. OSError as of `read_bytes`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        content = json.loads(read_bytes(path).decode())
        return content if isinstance(content, dict) else None
    return None


def sha256(*buffers):
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0

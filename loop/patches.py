"""Changes of train.py that come as patches."""

import contextlib
import os
import re
import tempfile

from .files import RUNS, Refusal, read_bytes
from .repository import git, git_bytes


def read_patches(path):
    """[(path, description, patch)]: one, described by its first line of text or its name; or each mail of `git format-patch --stdout`."""
    content = read_bytes(path)
    if content is None:
        raise Refusal(f"--patches {path}: there is no such file")
    mails = re.split(rb"^(?=From [0-9a-f]{40} )", content.removeprefix(b"\xef\xbb\xbf"), flags=re.M)
    found = []
    for mail in filter(bytes.strip, mails):
        text = re.split(rb"^(?:diff --git |--- )", mail, maxsplit=1, flags=re.M)[0].decode("utf-8", "replace")
        subject = re.search(r"^Subject: (?:\[PATCH[^\]]*\] )?(.+(?:\n .+)*)", text, re.M)
        first = next(filter(str.strip, text.splitlines()), None)
        name = os.path.splitext(os.path.basename(path))[0]
        found.append((path, decoded(subject[1]) if subject else first or name, mail))
    if not found:
        raise Refusal(f"--patches {path}: it is empty")
    return found


def decoded(subject):
    """A mail's subject without the encoding that it has where it is not ASCII."""
    import email.errors  # here, so that only patches wait for it
    import email.header

    with contextlib.suppress(LookupError, ValueError, email.errors.MessageError):
        return str(email.header.make_header(email.header.decode_header(subject)))
    return subject


def patched(commit, patch):
    """train.py of a commit with a patch applied (both bytes). Refusal where it does not apply, or changes another file."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        git("read-tree", commit, env=index)
        patch = patch if patch.endswith(b"\n") else patch + b"\n"
        if git("apply", "--cached", "-", data=patch, env=index, check=False) is None:  # written by hand, with counts that are not right?
            git("apply", "--cached", "--recount", "-", data=patch, env=index)
        names = git("diff", "--cached", "--name-only", commit, env=index).splitlines()
        if names != ["train.py"]:
            raise Refusal(f"it changes {', '.join(names[:3]) or 'nothing'}: only train.py may differ")
        content = git_bytes("cat-file", "blob", ":train.py", env=index, check=False)
        if content is None:
            raise Refusal("it removes train.py")
        return content

"""Git: commits of what is tried, the branch of a series, the worktree of a run."""

import contextlib
import glob
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time

from .files import DOCUMENTS, ENVIRONMENT, REFUSED, ROOT, RUNS, TREE, Refusal, read_bytes, run_file
from .processes import processes, working_folder

DURABLE = (
    "-c",
    "core.fsync=all",
    "-c",
    "core.fsyncObjectFiles=true",
)  # what git writes reaches the disk; the second is for git before 2.36

DISK = re.compile(
    "No space left|quota exceeded|Out of diskspace|Read-only file system|Input/output error|write error|insufficient permission|"
    "(unable|failed|could not|couldn't|cannot) (to )?(write|append|flush|fsync|close)|Permission denied"
)  # in git's words
FILTERING = ("status", "cat-file", "worktree", "diff", "hash-object", "update-index", "archive")
SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")  # a run may have written into .git/config what git would execute


def git(*arguments, data=None, env=None, check=True, cwd=ROOT):
    """What git prints, without the last line break; with check=False None where it fails. Hooks don't run."""
    printed = git_bytes(*arguments, data=data, env=env, check=check, cwd=cwd)
    return None if printed is None else printed.decode("utf-8", "surrogateescape").rstrip("\n")


def git_bytes(*arguments, data=None, env=None, check=True, cwd=ROOT):
    """The same, to the byte."""
    durable = DURABLE if arguments[0] in ("hash-object", "write-tree", "commit-tree", "update-ref") else ()
    diff = ("--no-ext-diff", "--no-textconv") if arguments[0] == "diff" else ()
    command = ["git", *SAFE, *durable, arguments[0], *diff, *arguments[1:]]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    environment |= (without_filters(environment) if arguments[0] in FILTERING else {}) | (env or {})
    options = {"input": data} if data is not None else {"stdin": subprocess.DEVNULL}
    for _ in range(60):
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, env=environment, **options)
        except FileNotFoundError:
            raise Refusal("git is not installed, and the loop needs it", ENVIRONMENT) from None
        locked = re.search(rb"Unable to create '(.+\.lock)': File exists", done.stderr) if done.returncode else None
        if not locked:
            break
        remove_if_stale(os.fsdecode(locked[1]))
    if done.returncode == 0:
        return done.stdout
    if not check:
        return None
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    said = next((line for line in lines if not line.startswith(("warning:", "hint:"))), lines[0])
    raise Refusal(f"git {arguments[0]}: {said}", ENVIRONMENT if any(map(DISK.search, lines)) else REFUSED)


def without_filters(environment):
    """What turns off the filters of the checkout's own .git/config, git-lfs aside: a run may have put them there."""
    config = [read_bytes(os.path.join(ROOT, ".git", name)) for name in ("config", "config.worktree")]
    own = (config[0] or b"filter") + (config[1] or b"")
    if not re.search(b"filter|include", own, re.I):
        return {}
    found = {}
    for scope in ("--local", "--worktree"):
        command = ["git", "config", scope, "--includes", "--null", "--get-regexp", r"^filter\."]
        with contextlib.suppress(FileNotFoundError):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment, stdin=subprocess.DEVNULL)
            for entry in os.fsdecode(done.stdout).split("\0"):
                key, _, value = entry.partition("\n")
                if key and not re.match(r"git-lfs [\w% -]+$", value):
                    found[key] = "false" if key.endswith(".required") else ""
    pairs = {f"GIT_CONFIG_{what}_{i}": text for i, pair in enumerate(found.items()) for what, text in zip(("KEY", "VALUE"), pair)}
    return pairs | {"GIT_CONFIG_COUNT": str(len(found))}


def check_repository():
    """Refuse where this folder is not the top of a repository that git is willing to use."""
    try:
        inside = git("rev-parse", "--show-prefix")
    except Refusal as e:
        trust = f" (git config --global --add safe.directory {shlex.quote(ROOT)})" if "ownership" in str(e) else ""
        raise Refusal(f"{e}{trust}", e.code) from None
    if inside:
        raise Refusal(f"{ROOT} is a folder of a larger git repository, and the loop needs one of its own (git init, git add, git commit)")


def resolve(revision):
    """The full name of an object; None where there is no such."""
    return git("rev-parse", "--quiet", "--verify", revision, check=False)


def changed_files(old, new):
    """Paths that differ between two commits, both names of what was renamed."""
    return [name for name in git("diff", "--name-only", "-z", "--no-renames", old, new).split("\0") if name]


def branch_of(tag):
    return f"autoresearch/{tag}"


def current_tag():
    """TAG where the branch autoresearch/TAG is checked out, else None."""
    head = git("symbolic-ref", "--quiet", "HEAD", check=False) or ""
    return head.removeprefix("refs/heads/autoresearch/") if head.startswith("refs/heads/autoresearch/") else None


def tree_with(blob, commit):
    """The tree of `commit` with the blob as its train.py; neither the index nor a file is touched."""
    mode = git("ls-tree", commit, "train.py").split()[0]
    with tempfile.TemporaryDirectory(prefix="new-", dir=RUNS) as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        git("read-tree", commit, env=index)
        git("update-index", "--cacheinfo", f"{mode},{blob},train.py", env=index)
        return git("write-tree", env=index)


def commit_tree(tree, message, *parents):
    command = ["commit-tree", tree, *(word for parent in parents for word in ("-p", parent))]
    commit = git(*command, data=message.encode(), check=False)
    if commit is None:  # most likely nobody has told git who commits
        who = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER")
               for key, value in (("NAME", "autoresearch"), ("EMAIL", "autoresearch@localhost"))}  # fmt: skip
        commit = git(*command, data=message.encode(), env=who)
    return commit


def remove_if_stale(lock):
    """Wait a little for a lock file of git; one that a killed git has left is removed: it is old, and no git runs that could own it."""
    with contextlib.suppress(FileNotFoundError):
        here = (p["pid"] for p in processes() if p["name"].startswith("git"))
        # One that is from the future was made when the clock was wrong.
        old = not 0 <= time.time() - os.stat(lock).st_mtime <= 2
        if old and not any(f"{working_folder(pid)}/".startswith(f"{ROOT}/") for pid in here):
            os.remove(lock)
            print(f"removed {lock}, left by a git that was killed")
            return
    time.sleep(0.1)


def set_index(old, new, cwd=ROOT):
    """Let the index hold the blob `new` for train.py where it holds `old`, so that git status stays clean."""
    entry = git("ls-files", "--stage", "train.py", cwd=cwd).split()
    if len(entry) > 1 and entry[1] == old:
        git("update-index", "--cacheinfo", f"{entry[0]},{new},train.py", cwd=cwd)
    git("update-index", "-q", "--refresh", check=False, cwd=cwd)


def check_files(exceptions=("train.py",), cwd=ROOT):
    """Refuse where a tracked file that affects runs differs from the branch."""
    changed = git("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", cwd=cwd).split("\0")
    if any(entry[:2] in ("DD", "AU", "UD", "UA", "DU", "AA", "UU") for entry in changed):
        raise Refusal("a merge is not finished, git status says where: git merge --abort")
    flags = (entry for entry in git("ls-files", "-v", "-z", cwd=cwd).split("\0") if entry[:1].islower() or entry[:1] == "S")
    hidden = [entry[2:] for entry in flags if os.path.exists(os.path.join(cwd, entry[2:]))]
    if hidden:
        mend = f"git update-index --no-assume-unchanged --no-skip-worktree {hidden[0]}"
        raise Refusal(f"git is told to overlook changes in {', '.join(hidden[:5])}: {mend}")
    names = [entry[3:] for entry in changed if entry and not entry.endswith(DOCUMENTS) and entry[3:] not in exceptions]
    if names:
        which = "only train.py may differ" if "train.py" in exceptions else "commit them, or put them back"
        raise Refusal(f"unsaved changes in {', '.join(names[:5])}: {which} (git restore {names[0]})")


def remove_tree():
    """Remove the worktree, also one that was half made or half removed."""
    if os.path.lexists(TREE):
        git("worktree", "remove", "--force", "--force", TREE, check=False)
        shutil.rmtree(TREE, ignore_errors=True)
    common = os.path.join(ROOT, git("rev-parse", "--git-common-dir"))
    for folder in glob.glob(os.path.join(glob.escape(common), "worktrees", "run*")):
        place = (read_bytes(os.path.join(folder, "gitdir")) or b"").strip()
        if place in (b"", os.fsencode(os.path.join(TREE, ".git"))):
            shutil.rmtree(folder, ignore_errors=True)


def make_tree(turn):
    """A worktree at exactly the commit that is tried, with the checkout's venv."""
    remove_tree()
    git("worktree", "add", "--quiet", "--force", "--force", "--detach", TREE, turn["commit"])
    if read_bytes(os.path.join(TREE, "train.py")) != read_bytes(run_file(turn["number"], "train.py")):
        raise Refusal("git does not check train.py out as it was tried (attributes or line ends?)", ENVIRONMENT)
    os.symlink(os.path.realpath(os.path.join(ROOT, "venv")), os.path.join(TREE, "venv"))


def git_file(commit):
    """train.py of a commit, as it is checked out."""
    return git_bytes("cat-file", "--filters", f"{commit}:train.py")

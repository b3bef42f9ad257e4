"""Environment variables that several rooms read."""

import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the project's folder


def cache_folder(environ=os.environ):
    """Where data, and what is compiled and measured, is kept: AUTORESEARCH_CACHE, beside the project where it is relative. ValueError for a
    user without a home folder who does not say where."""
    cache = os.path.expanduser(environ.get("AUTORESEARCH_CACHE") or os.path.join("~", ".cache", "autoresearch"))
    if cache.startswith("~"):
        raise ValueError("this user has no home folder: say where data goes with AUTORESEARCH_CACHE=/some/folder")
    return os.path.join(ROOT, cache)


def seed(environ=os.environ):
    """AUTORESEARCH_SEED, 42 without it. ValueError for what is none."""
    text = environ.get("AUTORESEARCH_SEED") or "42"
    if not text.isdecimal() or int(text) >= 2**63:
        raise ValueError(f"AUTORESEARCH_SEED={text!r} is no seed; use a whole number, such as 42")
    return int(text)

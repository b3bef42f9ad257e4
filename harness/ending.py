"""How a run ends where something is wrong: one line that says why, and an exit code of its own for each kind."""

import contextlib
import os
import sys

import torch

from harness.common.protocol import EXIT_ENVIRONMENT
from harness.data.dataset import DataError, NoResult


def fail(message, code=1):
    """End the run with one line that says why."""
    print(f"FAIL: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def run(main, out_of_memory):
    """`main()`, with one line and an exit code of its own for each kind of end; `out_of_memory`: what to lower then."""
    with contextlib.suppress(AttributeError):  # a notebook's stream takes every character
        sys.stdout.reconfigure(errors="backslashreplace")  # where a ° can't be written, that costs no run its summary
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # a short output is written here, not after the last line that could catch it
    except DataError as e:
        fail(e, EXIT_ENVIRONMENT)
    except NoResult as e:
        fail(e)
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError) as e:  # a path that train.py names
        fail(e)
    except OSError as e:
        fail(e, EXIT_ENVIRONMENT)
    except torch.OutOfMemoryError as e:
        fail(f"out of GPU memory {out_of_memory} ({str(e)[:200]})")
    except KeyboardInterrupt:
        fail("interrupted", 130)

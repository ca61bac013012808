"""Exit of a training script: code 2 and one line for refused input, and no crash while Python shuts down."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class InputError(Exception):
    """A request that cannot be met; its text says why, in one line, for people."""


def exit_code(main: Callable[[], None]) -> int:
    """Run a script's main function; return 0, or 2 after an InputError, printed as one line on stderr."""
    try:
        main()
    except InputError as error:
        name, rank = Path(sys.argv[0]).name, os.environ.get("RANK", "0")
        print(f"{name}: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run a script's main function and end the process with its exit code, without Python's own shutdown.

    Gloo's threads may still hold tensors; freeing them while Python shuts down aborts one run in thirty.
    """
    status = exit_code(main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""Owner of a lab."""

from __future__ import annotations

import getpass
import os
import socket


def owner() -> str:
    """Return the caller as ``user@machine``; the number of the user if it has no name."""
    try:
        person = getpass.getuser()
    except (KeyError, OSError):
        person = str(os.getuid())
    return f"{person}@{socket.gethostname()}"

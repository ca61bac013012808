"""Owner of a lab."""

from __future__ import annotations

import getpass
import os
import socket


def owner() -> str:
    """Return the caller as ``user@machine``; ``UID@machine`` if the user has no name."""
    try:
        person = getpass.getuser()
    except (KeyError, OSError):
        person = str(os.getuid())
    return f"{person}@{socket.gethostname()}"

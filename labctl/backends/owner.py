"""Who owns a lab."""

from __future__ import annotations

import getpass
import os
import socket


def owner() -> str:
    """Who calls, and on which machine."""
    try:
        person = getpass.getuser()
    except (KeyError, OSError):
        person = str(os.getuid())
    return f"{person}@{socket.gethostname()}"

"""What was found out about engines by trying them, kept in the lab's directory until it is tried anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labctl.engines import Daemon
from labctl.files import write

FILES = ".lab/engines"
"""A file for each host."""


def kept(directory: Path, host: str, engine: Daemon | None) -> dict[str, Any]:
    """What is kept of this host's engine, or of the last one there where none is asked; empty where it was another."""
    try:
        found = json.loads((directory / FILES / f"{host}.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or (engine and found.get("daemon") != engine.identity()):
        return {}
    return found


def keep(directory: Path, host: str, engine: Daemon, **found: Any) -> None:
    """Keep more of what was found out; of another engine nothing is kept."""
    document = {**kept(directory, host, engine), "daemon": engine.identity(), **found}
    write(directory / FILES / f"{host}.json", json.dumps(document, indent=2) + "\n")

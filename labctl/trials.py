"""What was found out about an engine by trying it, kept in the lab's directory until it is tried anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labctl.engines.docker_engine import DockerEngine
from labctl.files import write

FILE = ".lab/engine.json"


def kept(directory: Path, engine: DockerEngine | None) -> dict[str, Any]:
    """What is kept of this engine, or of the last one where none is asked; empty where it was another."""
    try:
        found = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or (engine and found.get("daemon") != engine.identity()):
        return {}
    return found


def keep(directory: Path, engine: DockerEngine, **found: Any) -> None:
    """Keep more of what was found out; of another engine nothing is kept."""
    document = {**kept(directory, engine), "daemon": engine.identity(), **found}
    write(directory / FILE, json.dumps(document, indent=2) + "\n")

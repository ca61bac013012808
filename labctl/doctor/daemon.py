"""Commands that change how the engine's daemon is set up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labctl.doctor.finding import as_root

DAEMON = "/etc/docker/daemon.json"
RESTART_ENDS = "restarting Docker ends every container of this host"
"""What a person should know before typing that; live-restore, where it is on, keeps them."""


def put(wanted: Mapping[str, Any], root: Path) -> str:
    """The command that puts settings into the daemon's file, beside those that it has."""
    text = json.dumps(wanted)
    write = f"{as_root()}tee {DAEMON}"
    if (root / DAEMON.lstrip("/")).exists():
        # Only what jq made of it is written: a pipe would leave an empty file where jq is missing.
        return f"""merged=$(jq '. * {text}' {DAEMON}) && echo "$merged" | {write}"""
    return f"{as_root()}mkdir -p /etc/docker && echo '{text}' | {write}"


def restart() -> str:
    return f"{as_root()}systemctl restart docker"

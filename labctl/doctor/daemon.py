"""Commands that change how the engine's daemon is set up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from labctl.doctor.finding import Examination

DAEMON = "/etc/docker/daemon.json"
RESTART_ENDS = "restarting Docker ends every container of this host"
"""What a person should know before typing that; live-restore, where it is on, keeps them."""


def put(examination: Examination, wanted: Mapping[str, Any]) -> str:
    """The command that, typed on the host, puts settings into the daemon's file, beside those that it has."""
    text = json.dumps(wanted)
    write = f"{examination.place.sudo}tee {DAEMON}"
    if (examination.root / DAEMON.lstrip("/")).exists():
        # Only what jq made of it is written: a pipe would leave an empty file where jq is missing.
        return f"""merged=$(jq '. * {text}' {DAEMON}) && echo "$merged" | {write}"""
    return f"{examination.place.sudo}mkdir -p /etc/docker && echo '{text}' | {write}"


def restart(examination: Examination) -> str:
    return f"{examination.place.sudo}systemctl restart docker"

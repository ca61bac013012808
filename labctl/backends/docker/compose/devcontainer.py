"""The devcontainer.json that attaches VS Code, or the devcontainers CLI, to a lab's launcher.

Keys: containers.dev/implementors/json_reference. It names the Compose project, file and service of the running
launcher, and has no key that would make the CLI build, change or stop the lab's containers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.config.settings import Settings
from labctl.errors import ConfigError
from labctl.model import LAUNCHER, File
from labctl.naming import compose_path, container_of
from labctl.system.files import write_all

PATH = ".devcontainer/devcontainer.json"


class DevcontainerFile(Struct, frozen=True):
    """The devcontainer file of a lab directory; ``changed`` if it was written now."""

    file: str
    folder: str
    changed: bool


def write(directory: Path, settings: Settings, program: str, *, force: bool) -> DevcontainerFile:
    """Write a lab directory's devcontainer.json; return its path. ConfigError if it was edited, unless ``force``."""
    path = directory / PATH
    if path.exists() and not force and not is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"{path} was not written by labctl, or was changed since", hint="labctl devcontainer --force")
    file = render(settings.text("LAB_NAME"), settings.text("PROJECT_PATH"), program)
    changed = write_all(directory, (file,))
    return DevcontainerFile(str(path), str(directory), bool(changed))


def render(lab: str, project: str, program: str) -> File:
    """Return devcontainer.json for the lab's launcher, which opens at ``project`` and runs `up` if it is down."""
    running = f"docker container inspect --format '{{{{.State.Running}}}}' {container_of(lab, LAUNCHER)}"
    content = {
        "name": f"labctl {lab}",
        # `up` only if the launcher is not running: it would replace one with an outdated image.
        "initializeCommand": f'[ "$({running} 2>&1)" = true ] || {shlex.quote(program)} up',
        # The first node's file has the launcher, whatever the number of nodes.
        "dockerComposeFile": f"../{compose_path('worker-0')}",
        "service": LAUNCHER,
        "runServices": [LAUNCHER],
        "workspaceFolder": project,
        "remoteUser": "lab",
        "updateRemoteUserUID": False,
        "overrideCommand": False,
        "shutdownAction": "none",
        "customizations": {"vscode": {"extensions": ["ms-python.python"]}},
    }
    return File(path=PATH, content=sealed(content), mode=0o644)


def sealed(content: dict[str, Any]) -> str:
    """Return the content as JSON that includes its own digest, which reveals later edits."""
    customizations = {**content["customizations"], "labctl": {"digest": digest(content)}}
    return json.dumps({**content, "customizations": customizations}, indent=2) + "\n"


def is_ours(text: str) -> bool:
    """Tell if labctl wrote this text and it was not edited since."""
    try:
        content = json.loads(text)
        recorded = content["customizations"].pop("labctl")["digest"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(recorded == digest(content))


def digest(content: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits of the content's SHA-256."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

"""Reader of the DeepSpeed configuration that labctl passes to a script as ``--deepspeed_config FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from script_exit import InputError


def read_config(path: Path) -> dict[str, Any]:
    """Read DeepSpeed's configuration file. InputError if it cannot be read or is no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--deepspeed_config {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--deepspeed_config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"--deepspeed_config {path} is not a JSON object")
    return config

"""Capabilities of this rank's device."""

from __future__ import annotations

import socket
from typing import Any

from deepspeed.accelerator import get_accelerator
from script_exit import InputError


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise InputError if fp16 or bf16 is enabled and this rank's device lacks it."""
    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported(), "bf16": accelerator.is_bf16_supported()}
    for name, has in supported.items():
        if (config.get(name) or {}).get("enabled") and not has:
            device = accelerator.device_name()
            raise InputError(f"{name} is enabled, but the {device} device of {socket.gethostname()} does not have it")

"""What this rank's device can do, and what all ranks must have in common."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from arguments import InputError
from deepspeed.accelerator import get_accelerator


def use_cores() -> None:
    """Share the cores that this process may use among the ranks of this node, unless the caller has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuse a number format that this rank's device lacks."""
    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported(), "bf16": accelerator.is_bf16_supported()}
    for name, has in supported.items():
        if (config.get(name) or {}).get("enabled") and not has:
            device = accelerator.device_name()
            raise InputError(f"{name} is enabled, but the {device} device of {socket.gethostname()} does not have it")


def agree(facts: dict[str, Any]) -> None:
    """Refuse to train when ranks differ in a fact: they would silently train on different things, or hang."""
    gathered: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, facts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(f"ranks differ in {name}: rank 0 has {value}, rank {rank} has {other[name]}")

"""This rank among all of them: its number, what it says, and when all have come as far."""

from __future__ import annotations

import os
import time

import torch
from deepspeed.accelerator import get_accelerator
from shapes import InputError

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Print on rank 0 alone."""
    if RANK == 0:
        print(text, flush=True)


def mean(*numbers: torch.Tensor) -> list[float]:
    """Means over all ranks of scalars, with one message."""
    together = torch.stack([number.detach().float() for number in numbers])
    torch.distributed.all_reduce(together)
    return list((together / WORLD).tolist())


def largest(number: float) -> float:
    """The largest over all ranks of a number."""
    tensor = torch.tensor(number, device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)


def synchronised_time() -> float:
    """Seconds on this rank's clock once every rank and its device have finished what they were given."""
    get_accelerator().synchronize()
    torch.distributed.barrier()
    return time.perf_counter()


def agree(facts: dict[str, object]) -> None:
    """Refuse to train when ranks differ in a fact: they would silently train on different things, or hang."""
    gathered: list[dict[str, object]] = [{}] * WORLD
    torch.distributed.all_gather_object(gathered, facts)
    for rank, other in enumerate(gathered):
        for name, value in gathered[0].items():
            if other[name] != value:
                raise InputError(f"ranks differ in {name}: rank 0 has {value}, rank {rank} has {other[name]}")

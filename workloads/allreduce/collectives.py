"""The five operations on one rank: buffers, data that tells ranks and places apart, and the exact result.

Value i of rank r is ``i % 251 + r + 1``: every sum over ranks is a whole number that float32 holds exactly
(below 2^24 for up to 4000 ranks), and parts that are swapped or shifted show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

PERIOD = 251
CHUNK = PERIOD << 14
"""Values that are filled or compared at a time: little memory beside the buffers."""

# torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """An operation at one size: fill the buffers, run it, count wrong values."""

    fill: Callable[[], None]
    run: Callable[[], object]
    wrong: Callable[[], int]


def build(operation: str, values: int, rank: int, world: int, device: torch.device) -> Collective:
    """Build an operation on buffers of ``values`` float32 in total; each rank's part is ``values // world``."""
    part = values // world
    own, summed = rank + 1, world * (world + 1) // 2
    whole = torch.empty(values, device=device)

    if operation == "all_reduce":
        return Collective(
            fill=lambda: fill(whole, own),
            run=lambda: dist.all_reduce(whole),
            wrong=lambda: wrong(whole, summed, scale=world),
        )
    if operation == "broadcast":
        return Collective(
            fill=lambda: fill(whole, own),
            run=lambda: dist.broadcast(whole, src=0),
            wrong=lambda: wrong(whole, 1),
        )
    if operation == "all_gather":
        mine = torch.empty(part, device=device)
        return Collective(
            fill=lambda: (fill(mine, own, start=rank * part), whole.fill_(-1)),
            run=lambda: all_gather(whole, mine),
            wrong=lambda: sum(wrong(piece, r + 1, start=r * part) for r, piece in enumerate(whole.split(part))),
        )
    if operation == "reduce_scatter":
        mine = torch.empty(part, device=device)
        return Collective(
            fill=lambda: (fill(whole, own), mine.fill_(-1)),
            run=lambda: reduce_scatter(mine, whole),
            wrong=lambda: wrong(mine, summed, scale=world, start=rank * part),
        )
    sent = torch.empty(values, device=device)
    return Collective(
        fill=lambda: (fill(sent, own), whole.fill_(-1)),
        run=lambda: dist.all_to_all_single(whole, sent),
        wrong=lambda: sum(wrong(piece, r + 1, start=rank * part) for r, piece in enumerate(whole.split(part))),
    )


def fill(tensor: Tensor, add: int, start: int = 0) -> None:
    """Set each value i of the tensor to ``(start + i) % 251 + add``."""
    for at in range(0, len(tensor), CHUNK):
        piece = tensor[at : at + CHUNK]
        torch.add(pattern(start + at, len(piece), tensor.device), add, out=piece)


def wrong(tensor: Tensor, add: int, scale: int = 1, start: int = 0) -> int:
    """Count the values i of the tensor that are not exactly ``scale * ((start + i) % 251) + add``."""
    found = 0
    for at in range(0, len(tensor), CHUNK):
        piece = tensor[at : at + CHUNK]
        expected = pattern(start + at, len(piece), tensor.device) * scale + add
        found += int((piece != expected).sum())
    return found


def pattern(start: int, length: int, device: torch.device) -> Tensor:
    """Return the values ``i % 251`` from i = start, at most CHUNK of them, as a view not to be written to."""
    return _periods(device)[start % PERIOD :][:length]


@cache
def _periods(device: torch.device) -> Tensor:
    """Return CHUNK + 251 values of the period 0 to 250 on the device; cached."""
    return torch.arange(PERIOD, dtype=torch.float32, device=device).repeat(CHUNK // PERIOD + 1)

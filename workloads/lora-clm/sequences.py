"""Texts -> sequences of one length: tokenised, joined, cut, split, and dealt out to the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from script_exit import InputError

TEXTS_AT_ONCE = 1000


def tokenise(texts: Iterable[str], tokenizer: Any, length: int) -> torch.Tensor:
    """Tokenise and join texts, with an end token after each; cut into (sequences, length) of int64, drop the rest."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    remaining = iter(texts)
    while some := list(islice(remaining, TEXTS_AT_ONCE)):
        for tokens in tokenizer(some, verbose=False)["input_ids"]:
            ids += tokens + end
    whole = len(ids) // length
    return torch.tensor(ids[: whole * length]).view(whole, length)


def split(sequences: torch.Tensor, percentage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences to train on, and the first ones, at least one, to validate on. InputError if too few."""
    held = max(1, math.ceil(len(sequences) * percentage / 100))
    if len(sequences) <= held:
        raise InputError(f"{len(sequences)} sequences of {sequences.shape[1]} tokens are too few to train and validate")
    return sequences[held:], sequences[:held]


def batches(sequences: torch.Tensor, size: int, step: int, seed: int, rank: int, world: int) -> Iterator[torch.Tensor]:
    """Yield a rank's micro-batches without end, shuffled per epoch, each (size, length).

    Within an epoch no sequence comes twice; those that do not fill a step are left out.
    """
    whole = len(sequences) // step * step
    for epoch in count():
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed + epoch))[:whole]
        for start in range(rank * size, whole, world * size):
            yield sequences[order[start : start + size]]


def validation_batches(sequences: torch.Tensor, size: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield a rank's batches and how many of their sequences count, 0 for one that only fills up."""
    for first in range(0, len(sequences), size * world):
        batch = sequences[first + rank * size : first + (rank + 1) * size]
        yield (batch, len(batch)) if len(batch) else (sequences[:1], 0)

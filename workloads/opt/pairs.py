"""Training data of the later steps: pairs of a better and a worse answer, and prompts; of datasets, or made of text."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from data import Corpus, cached_datasets, check_vocabulary, load_corpus
from rank_group import fingerprint
from script_exit import InputError
from setting import Setting

PADDING = 1
"""OPT's <pad>."""


@dataclass(frozen=True)
class Batch:
    """Rows of ids, all of one length, and where each row ends: the index of its last id that is not padding."""

    ids: torch.Tensor
    last: torch.Tensor


class DatasetPairs:
    """Prompt and answers of datasets; (chosen, rejected) rows of ids."""

    def __init__(self, rows: list[tuple[list[int], list[int]]], length: int) -> None:
        self.rows = rows
        self.length = length

    def batch(self, number: int, size: int, rank: int, world: int) -> Batch:
        """Return micro-batch ``number`` of a rank: all chosen rows, then all rejected, padded on the right."""
        first = (number * world + rank) * size
        pairs = [self.rows[index % len(self.rows)] for index in range(first, first + size)]
        rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        ids = torch.tensor([row + [PADDING] * (self.length - len(row)) for row in rows])
        return Batch(ids, torch.tensor([len(row) - 1 for row in rows]))

    def fingerprint(self) -> str:
        """Return a hash of the rows, to compare between ranks."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()[:16]


class CorpusPairs:
    """Text as it goes on, against the same text with its second half drawn from the vocabulary at random."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.vocabulary = corpus.tokens.unique()

    def batch(self, number: int, size: int, rank: int, world: int) -> Batch:
        """Build a micro-batch of a rank as ``DatasetPairs`` does; rows have the corpus's sequence length."""
        chosen = self.corpus.batch(number, size, rank, world)
        length = chosen.shape[1]
        generator = torch.Generator().manual_seed(self.corpus.seed + number * world + rank)
        drawn = torch.randint(len(self.vocabulary), (size, length - length // 2), generator=generator)
        rejected = torch.cat([chosen[:, : length // 2], self.vocabulary[drawn]], dim=1)
        return Batch(torch.cat([chosen, rejected]), torch.full((2 * size,), length - 1))

    def fingerprint(self) -> str:
        """Return a hash of the corpus's tokens, to compare between ranks."""
        return self.corpus.fingerprint()


class Prompts:
    """Prompts of one length, padded on the left; ``mask`` is 1 where there is text, None if there is no padding."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self.padded = bool((ids == PADDING).any())

    def batch(self, number: int, size: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ids and mask of a rank's micro-batch ``number``; the mask is None if no prompt is padded."""
        first = (number * world + rank) * size
        ids = self.ids[torch.arange(first, first + size) % len(self.ids)]
        return ids, (ids != PADDING).long() if self.padded else None

    def fingerprint(self) -> str:
        """Return a hash of the prompts, to compare between ranks."""
        return fingerprint(self.ids)


def load_pairs(setting: Setting, needed: int) -> tuple[DatasetPairs | CorpusPairs, str]:
    """Load at most ``needed`` pairs from cached datasets, else make them of text; return them and a description."""
    args = setting.args
    datasets, note = cached_datasets(args)
    if datasets:
        rows = list(itertools.islice(answered(setting, datasets), needed))
        if not rows:
            raise InputError(f"{note}: no pair differs within {args.sequence_length} tokens")
        return DatasetPairs(rows, args.sequence_length), f"{note}: {len(rows)} pairs"
    length = args.sequence_length
    corpus, text = load_corpus(args, setting.tokenizer, setting.config, length, needed * length)
    return CorpusPairs(
        corpus
    ), f"{text}; made into pairs: the chosen answer continues the text, the rejected one is random tokens"


def answered(setting: Setting, datasets: list[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield chosen and rejected ids, each with its prompt and cut to the length, unless they are equal then."""
    for row in rows_with(datasets, ("prompt", "chosen", "rejected")):
        chosen, rejected = (
            encode(setting, f"{row['prompt']}{row[answer]}", end=True)[: setting.args.sequence_length]
            for answer in ("chosen", "rejected")
        )
        if chosen != rejected:
            yield chosen, rejected


def load_prompts(setting: Setting, needed: int) -> tuple[Prompts, str]:
    """Load at most ``needed`` prompts from cached datasets, else cut them from text; return them, described."""
    args, length = setting.args, setting.args.max_prompt_length
    datasets, note = cached_datasets(args)
    if datasets:
        texts = (row["prompt"] for row in itertools.islice(rows_with(datasets, ("prompt",)), needed))
        rows = [encode(setting, text, end=False)[-length:] for text in texts]
        ids = torch.tensor([[PADDING] * (length - len(row)) + row for row in rows])
        return Prompts(ids), f"{note}: {len(ids)} prompts"
    corpus, text = load_corpus(args, setting.tokenizer, setting.config, length, needed * length)
    ids = torch.stack([corpus.batch(number, 1, 0, 1)[0] for number in range(corpus.sequences)])
    return Prompts(ids), f"{text}; each a prompt"


def rows_with(datasets: list[Any], columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Return an iterator of all datasets' rows. InputError if one lacks a column."""
    for dataset in datasets:
        if missing := [column for column in columns if column not in dataset.features]:
            raise InputError(f"a dataset has no column {missing[0]!r}; it has {', '.join(dataset.features)}")
    return (row for dataset in datasets for row in dataset)


def encode(setting: Setting, text: str, *, end: bool) -> list[int]:
    """Return the ids of a text, </s> in front and, with ``end``, behind. InputError if beyond the vocabulary."""
    eos = setting.config["eos_token_id"]
    ids = [eos, *setting.tokenizer.encode(text, add_special_tokens=False).ids, *([eos] if end else [])]
    check_vocabulary(max(ids), setting.config)
    return ids

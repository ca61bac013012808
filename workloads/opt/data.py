"""Text to batches: documents from files or the Hugging Face cache, a byte-level BPE tokeniser, disjoint batches."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rank_group import fingerprint
from script_exit import InputError
from shapes import Config
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from training_text import LICENCES, PIECE, cached_dataset, files_below, read_plain

SUFFIXES = {".txt", ".md", ".jsonl"}
VOCABULARY = 8192
TRAINING_TEXT = 2 * PIECE


class Corpus:
    """Tokenised text: ``tokens`` is one row of int64 ids, ``sequences`` counts whole sequences in it."""

    def __init__(self, tokens: torch.Tensor, sequence_length: int, seed: int) -> None:
        """Divide the tokens into sequences of this length; ``seed`` decides their order in each epoch."""
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.sequences = len(tokens) // sequence_length
        self.seed = seed
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, number: int, size: int, rank: int, world: int) -> torch.Tensor:
        """Return micro-batch ``number`` of a rank, (size, sequence_length); disjoint from others within an epoch."""
        first = (number * world + rank) * size
        return torch.stack([self._sequence(sample) for sample in range(first, first + size)])

    def _sequence(self, sample: int) -> torch.Tensor:
        """Return a sequence by its number in the endless series; each epoch has its own random order."""
        epoch, index = divmod(sample, self.sequences)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.sequences, generator=generator)
        start = int(self._order[index]) * self.sequence_length
        return self.tokens[start : start + self.sequence_length]

    def fingerprint(self) -> str:
        """Return a hash of the tokens, to compare between ranks."""
        return fingerprint(self.tokens)


def load_corpus(
    args: Namespace, tokenizer: Tokenizer, config: Config, sequence_length: int, needed: int
) -> tuple[Corpus, str]:
    """Tokenise text until it has ``needed`` tokens; return corpus and description. InputError if too short."""
    description, pieces = documents(args)
    ids: list[int] = []
    characters = 0
    for piece in pieces:
        ids += [*tokenizer.encode(piece, add_special_tokens=False).ids, config["eos_token_id"]]
        characters += len(piece)
        if len(ids) >= needed:
            break
    if len(ids) < sequence_length:
        raise InputError(f"{description}: {len(ids)} tokens, fewer than one sequence of {sequence_length}")
    tokens = torch.tensor(ids)
    check_vocabulary(int(tokens.max()), config)
    corpus = Corpus(tokens, sequence_length, args.seed)
    return corpus, f"{description}: {characters} characters, {len(ids)} tokens, {corpus.sequences} sequences"


def check_vocabulary(largest: int, config: Config) -> None:
    """Raise InputError if the largest token id is beyond the model's vocabulary."""
    if largest >= config["vocab_size"]:
        raise InputError(f"the tokeniser gave id {largest}, beyond the model's vocabulary of {config['vocab_size']}")


def load_tokenizer(snapshot: Path | None, args: Namespace, config: Config) -> tuple[Tokenizer, str]:
    """Return the snapshot's tokeniser, else a byte-level BPE trained on the text, and a line that tells which."""
    if snapshot is None:
        return train_tokenizer(args, min(config["vocab_size"], VOCABULARY))
    if (snapshot / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(snapshot / "tokenizer.json")), f"tokenizer.json of {snapshot}"
    files = [snapshot / "vocab.json", snapshot / "merges.txt"]
    if not all(file.is_file() for file in files):
        raise InputError(f"{snapshot} has weights but neither tokenizer.json nor vocab.json with merges.txt")
    return ByteLevelBPETokenizer.from_file(*map(str, files)), f"vocab.json and merges.txt of {snapshot}"


def train_tokenizer(args: Namespace, vocabulary: int) -> tuple[Tokenizer, str]:
    """Train a byte-level BPE on the first 2 MiB of text, with OPT's special tokens; return it and a description."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        first_characters(documents(args)[1], TRAINING_TEXT),
        vocab_size=vocabulary,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        show_progress=False,
    )
    return (
        tokenizer,
        f"byte-level BPE trained on this text, {tokenizer.get_vocab_size()} of at most {vocabulary} entries",
    )


def first_characters(pieces: Iterator[str], limit: int) -> Iterator[str]:
    """Yield pieces until they have ``limit`` characters together."""
    for piece in pieces:
        yield piece
        if (limit := limit - len(piece)) <= 0:
            return


def documents(args: Namespace) -> tuple[str, Iterator[str]]:
    """Return a description of the text, and the text in pieces of at most about 1 MiB."""
    datasets, note = cached_datasets(args)
    if datasets:
        return note, (row_text(row) for dataset in datasets for row in dataset)
    path = args.data or LICENCES
    files = text_files(path, any_suffix=args.data is None)
    if not files:
        hint = f"; expected {', '.join(sorted(SUFFIXES))}" if args.data else "; pass --data PATH"
        raise InputError(f"no text at {path}{hint}")
    return f"{path} ({len(files)} files){note}", (piece for file in files for piece in read_pieces(file))


def text_files(path: Path, *, any_suffix: bool) -> list[Path]:
    """Return the path itself if it is a file, else the files below it with a text suffix, or any, sorted."""
    if path.is_file():
        return [path]
    return [file for file in files_below(path) if any_suffix or file.suffix in SUFFIXES]


def read_pieces(file: Path) -> Iterator[str]:
    """Yield a file's text in pieces of whole lines, about 1 MiB each; of JSON lines the field ``text`` of each."""
    if file.suffix != ".jsonl":
        yield from read_plain(file)
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        yield from (json_text(line, f"{file}:{number}") for number, line in enumerate(stream, 1) if line.strip())


def json_text(line: str, where: str) -> str:
    """Return the field ``text`` of a JSON line. InputError if there is none."""
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{where}: expected a JSON object with "text"') from error


def cached_datasets(args: Namespace) -> tuple[list[Any], str]:
    """Load ``--dataset``, or all ``--datasets``; return them, and a note. [] if one of the latter is not cached."""
    names = [args.dataset] if args.dataset else [] if args.data or args.rehearse else args.datasets
    try:
        found = [cached_dataset(*name.split(":", 1)) for name in names]
    except InputError as error:
        if args.dataset:
            raise
        return [], f", because {error}"
    return found, ", ".join(f"{name} ({len(dataset)} rows)" for name, dataset in zip(names, found, strict=True))


def row_text(row: dict[str, Any]) -> str:
    """Return a row's text: prompt with chosen answer, else column ``text``, else all its text columns."""
    if "prompt" in row and "chosen" in row:
        return f"{row['prompt']}{row['chosen']}"
    if isinstance(row.get("text"), str):
        return str(row["text"])
    return "\n".join(value for value in row.values() if isinstance(value, str))

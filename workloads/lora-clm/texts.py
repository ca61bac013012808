"""Texts to train on, without torch: plain ones, instruction records, a cached dataset, or licences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from script_exit import InputError
from training_text import LICENCES, cached_dataset, files_below, read_plain

PLAIN, RECORDS = (".txt", ".md"), (".json", ".jsonl")

# Prompts of Stanford Alpaca (Taori et al., 2023).
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n{output}"
)


def load(data: Path | None, dataset: str | None) -> tuple[str, Iterator[str]]:
    """Return the name of the source and an iterator of its texts: ``data``, else ``dataset``, else licence texts."""
    if data:
        files = text_files(data)
        return str(data), (text for file in files for text in read(file))
    if dataset:
        return dataset_texts(dataset)
    files = files_below(LICENCES)
    if not files:
        raise InputError(f"no text at {LICENCES}; pass --data PATH")
    return f"licence texts of {LICENCES}, as neither --data nor --dataset is given", (
        text for file in files for text in read_plain(file)
    )


def text_files(path: Path) -> list[Path]:
    """Return the file, or the directory's files of known kinds, sorted. InputError if there is none."""
    known = PLAIN + RECORDS
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if found := [file for file in files if file.suffix in known]:
        return found
    raise InputError(f"--data {path}: no text there; expected {', '.join(known)}")


def read(file: Path) -> Iterator[str]:
    """Yield the texts of a file: plain text in pieces, or the text of each record."""
    if file.suffix in PLAIN:
        yield from read_plain(file)
    else:
        yield from (record_text(record, where) for record, where in read_records(file))


def read_records(file: Path) -> Iterator[tuple[Any, str]]:
    """Yield the records of a .json list or a .jsonl file, each with its place. InputError if it is not JSON."""
    try:
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            records = json.loads(content)
            if not isinstance(records, list):
                raise InputError(f"{file}: expected a list of records, not one {type(records).__name__}")
            yield from ((record, f"{file}, record {number}") for number, record in enumerate(records, 1))
            return
    except ValueError as error:
        raise InputError(f"{file}: not JSON: {error}") from error
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line), f"{file}:{number}"
            except ValueError as error:
                raise InputError(f"{file}:{number}: not JSON: {error}") from error


def record_text(record: Any, where: str) -> str:
    """Return a record's text, from ``instruction``, ``input`` and ``output`` or ``text``. InputError for others."""
    if isinstance(record, Mapping):
        if {"instruction", "output"} <= record.keys():
            return (WITH_INPUT if record.get("input") else WITHOUT_INPUT).format_map(record)
        if "text" in record:
            return str(record["text"])
    found = f"it has {', '.join(record)}" if isinstance(record, Mapping) else f"it is one {type(record).__name__}"
    raise InputError(f'{where}: expected a record with "instruction" and "output", or with "text"; {found}')


def dataset_texts(name: str) -> tuple[str, Iterator[str]]:
    """Return the name and texts of a cached dataset's split ``train``. InputError if it is not cached."""
    try:
        rows: Iterable[Any] = cached_dataset(name)
    except InputError as error:
        raise InputError(f"--dataset {error}; `labctl cache lora-clm` fetches it, or pass --data PATH") from error
    return f"dataset {name}", (record_text(row, f"{name}, row {number}") for number, row in enumerate(rows, 1))

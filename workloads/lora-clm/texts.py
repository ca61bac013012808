"""Texts to train on, without torch: plain ones, instruction records, a cached dataset, or licences."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from arguments import InputError

LICENCES = Path("/usr/share/common-licenses")
"""English prose that Debian's base-files puts into every Debian and Ubuntu image."""
PLAIN, RECORDS = (".txt", ".md"), (".json", ".jsonl")
PIECE = 1 << 20

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
    """What the source is, and its texts; a path wins over a dataset."""
    if data:
        files = text_files(data)
        return str(data), (text for file in files for text in read(file))
    if dataset:
        return cached_dataset(dataset)
    files = sorted(path for path in LICENCES.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        raise InputError(f"no text at {LICENCES}; pass --data PATH")
    return f"licence texts of {LICENCES}, as neither --data nor --dataset is given", (
        text for file in files for text in read_plain(file)
    )


def text_files(path: Path) -> list[Path]:
    """The file, or the directory's files of known kinds in a fixed order."""
    known = PLAIN + RECORDS
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if found := [file for file in files if file.suffix in known]:
        return found
    raise InputError(f"--data {path}: no text there; expected {', '.join(known)}")


def read(file: Path) -> Iterator[str]:
    """The texts of one file."""
    if file.suffix in PLAIN:
        yield from read_plain(file)
    else:
        yield from (record_text(record, where) for record, where in read_records(file))


def read_plain(file: Path) -> Iterator[str]:
    """Text by whole lines, about 1 MiB at a time."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        while lines := stream.readlines(PIECE):
            yield "".join(lines)


def read_records(file: Path) -> Iterator[tuple[Any, str]]:
    """Records, each with where it stands: of a list in a .json file, or one a line in a .jsonl file."""
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
    """The text of a record: ``instruction``, ``input`` (which may be empty or absent) and ``output``, or ``text``."""
    if isinstance(record, Mapping):
        if {"instruction", "output"} <= record.keys():
            return (WITH_INPUT if record.get("input") else WITHOUT_INPUT).format_map(record)
        if "text" in record:
            return str(record["text"])
    found = f"it has {', '.join(record)}" if isinstance(record, Mapping) else f"it is one {type(record).__name__}"
    raise InputError(f'{where}: expected a record with "instruction" and "output", or with "text"; {found}')


def cached_dataset(name: str) -> tuple[str, Iterator[str]]:
    """Split ``train`` of a dataset that is in the cache already."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets

    try:
        rows: Iterable[Any] = datasets.load_dataset(fetched_dataset(name) or name, split="train")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--dataset {name} is not in the cache {datasets.config.HF_DATASETS_CACHE}: {reason}; `labctl cache "
            "lora-clm` fetches it, or pass --data PATH"
        ) from error
    return f"dataset {name}", (record_text(row, f"{name}, row {number}") for number, row in enumerate(rows, 1))


def fetched_dataset(name: str) -> str | None:
    """The newest snapshot that `labctl cache` put into the hub's cache: offline, `datasets` does not look there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = (hub / f"datasets--{name.replace('/', '--')}" / "snapshots").glob("*")
    return max(map(str, found), key=os.path.getmtime, default=None)

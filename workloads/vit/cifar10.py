"""CIFAR-10's binary version (Krizhevsky, 2009), without torch: six files of 10000 images, each after its class."""

from __future__ import annotations

from pathlib import Path

from script_exit import InputError

CLASSES = 10
PIXELS = 3 * 32 * 32
"""Bytes of an image: red, green, blue, each 32 rows of 32."""
RECORD = 1 + PIXELS
FOLDER = "cifar-10-batches-bin"
TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)


def find(directory: Path) -> Path:
    """Return the folder with all six files: ``directory`` or cifar-10-batches-bin in it. InputError if not there."""
    for folder in (directory, directory / FOLDER):
        missing = [name for name in (*TRAINING, *TEST) if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(TRAINING) + len(TEST):
            raise InputError(f"{folder} lacks {', '.join(missing)} of CIFAR-10's binary version")
    if (directory / "data_batch_1").is_file() or (directory / "cifar-10-batches-py").is_dir():
        raise InputError(
            f"{directory} holds CIFAR-10's Python version, pickles, which run whatever code is in them when they are "
            f"read; unpack the binary version (cifar-10-binary.tar.gz, folder {FOLDER}) there instead"
        )
    raise InputError(f"{directory} has no CIFAR-10: neither {TRAINING[0]} nor a folder {FOLDER}")


def read(folder: Path, names: tuple[str, ...]) -> bytearray:
    """Return the records of these files, concatenated. InputError for a wrong size or class."""
    records = bytearray()
    for name in names:
        content = (folder / name).read_bytes()
        if not content or len(content) % RECORD:
            raise InputError(f"{folder / name} has {len(content)} bytes, not a multiple of {RECORD}: is it whole?")
        if (largest := max(content[::RECORD])) >= CLASSES:
            raise InputError(f"{folder / name} has an image of class {largest}; CIFAR-10 has 0 to {CLASSES - 1}")
        records += content
    return records

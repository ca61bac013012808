"""MNIST, or images of its kind: from a directory, from Debian's package of Fashion-MNIST, or generated."""

from __future__ import annotations

import gzip
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script_exit import InputError

PACKAGED = Path("/usr/share/datasets/fashion-mnist")
NPZ = "mnist.npz"
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIDE = 28
CLASSES = 10
UNSIGNED_BYTES = 8


@dataclass(frozen=True)
class Images:
    """Arrays of bytes, images (n, 28, 28) and labels (n,), and in words where they come from."""

    train: tuple[Any, Any]
    test: tuple[Any, Any]
    source: str

    def fingerprint(self) -> int:
        """Return a checksum of the training data, which must be equal on all ranks."""
        return zlib.crc32(self.train[0].tobytes(), zlib.crc32(self.train[1].tobytes()))

    def shard(self, rank: int, ranks: int) -> Images:
        """Return the share of a rank; all shares have the same size."""

        def cut(array: Any) -> Any:
            """Return this rank's share of an array, each ``ranks``-th item."""
            return array[rank : len(array) // ranks * ranks : ranks]

        return Images((cut(self.train[0]), cut(self.train[1])), (cut(self.test[0]), cut(self.test[1])), self.source)


def load(data_path: Path | None, limit: int, *, generated: bool = False) -> Images:
    """Load at most ``limit`` images to train on (0: all) and a fifth as many to test. InputError for broken files."""
    folder, source = (None, "generated, as rehearsed") if generated else find(data_path)
    train, test = read(folder) if folder else generate(limit or 8000)
    if limit:
        train, test = (train[0][:limit], train[1][:limit]), (test[0][: limit // 5], test[1][: limit // 5])
    return Images(train, test, f"{source}, {len(train[0])} images to train on, {len(test[0])} to test")


def find(data_path: Path | None, packaged: Path = PACKAGED) -> tuple[Path | None, str]:
    """Return the folder to read, from ``data_path``, cache or package, and a description; None if there is none."""
    cache = Path(os.environ.get("PROJECT_PATH", "/workspace"), ".cache/mnist")
    if data_path or cache.is_dir():
        folder = data_path or cache
        return folder, f"{'as asked' if data_path else 'from the cache'}, {folder}"
    if packaged.is_dir():
        return packaged, f"Fashion-MNIST from {packaged}, as there is no {cache}"
    return None, f"generated, as there is neither {cache} nor {packaged}"


def read(folder: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Read training and test images from mnist.npz, else the four IDX files. InputError if they are not MNIST's."""
    import numpy as np

    if (folder / NPZ).is_file():
        try:
            with np.load(folder / NPZ, allow_pickle=False) as arrays:
                found = [arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")]
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{folder / NPZ} is not Keras's mnist.npz: {error}") from error
    else:
        found = [np.frombuffer(data, np.uint8).reshape(shape) for shape, data in map(read_idx, idx_files(folder))]
    for images, labels in (found[:2], found[2:]):
        if not labels.size or images.shape != (*labels.shape, SIDE, SIDE) or labels.max() >= CLASSES:
            raise InputError(f"{folder}: images {images.shape} and labels {labels.shape} are not MNIST's")
    return (found[0], found[1]), (found[2], found[3])


def idx_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the four IDX files, .gz or not. InputError if the folder has not all."""
    for place in (folder, folder / "MNIST/raw"):
        found = {name: path for name in IDX for path in (place / f"{name}.gz", place / name) if path.is_file()}
        if len(found) == len(IDX):
            return tuple(found.values())
    raise InputError(f"{folder} holds neither {NPZ} nor all of {', '.join(IDX)} (.gz)")


def read_idx(path: Path) -> tuple[tuple[int, ...], bytes]:
    """Return shape and content of an IDX file of bytes, .gz or not. InputError if it is broken."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot read it: {error}") from error
    dimensions = content[3] if content[:3] == bytes((0, 0, UNSIGNED_BYTES)) and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    if not dimensions or len(content) != start + math.prod(shape):
        raise InputError(f"{path} is not an IDX file of bytes, or not all of one")
    return shape, content[start:]


def generate(count: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return ``count`` training images and a fifth as many test images: noise over class patterns, fixed seed."""
    import numpy as np

    random = np.random.default_rng(1234)
    patterns = random.integers(0, 256, (CLASSES, SIDE, SIDE))
    sets = []
    for size in (count, count // 5):
        labels = random.integers(0, CLASSES, size).astype(np.uint8)
        images = (patterns[labels] + random.integers(0, 256, (size, SIDE, SIDE))) // 2
        sets.append((images.astype(np.uint8), labels))
    return sets[0], sets[1]

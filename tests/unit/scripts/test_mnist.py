"""The MNIST workload without a framework: choice of images, file formats, and the patterns of metrics."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from unit.scripts.conftest import ImportScripts

FOLDER = Path(__file__).resolve().parents[3] / "workloads" / "mnist-horovod"
DECLARED: dict[str, Any] = yaml.safe_load((FOLDER / "workload.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mnist(import_scripts: ImportScripts) -> ModuleType:
    """Return the module mnist of workload mnist-horovod."""
    module: ModuleType = import_scripts("mnist-horovod", "mnist").mnist
    return module


@pytest.fixture(scope="module")
def start(import_scripts: ImportScripts) -> ModuleType:
    """Return the module start of workload mnist-horovod."""
    module: ModuleType = import_scripts("mnist-horovod", "start").start
    return module


def idx(*shape: int, content: bytes) -> bytes:
    """Return an IDX file of this shape and content."""
    return bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape) + content


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_idx_files_are_read_compressed_or_not(
    mnist: ModuleType, tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """Read an IDX file, plain or gzip: shape and bytes."""
    path = tmp_path / ("a.gz" if compress is gzip.compress else "a")
    path.write_bytes(compress(idx(2, 1, 3, content=b"abcdef")))
    assert mnist.read_idx(path) == ((2, 1, 3), b"abcdef")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        bytes((0, 0, 8)),
        bytes((0, 0, 8, 0)),
        bytes((0, 0, 13, 1, 0, 0, 0, 1, 0)),
        idx(3, content=b"ab"),
        idx(1, content=b"ab"),
        idx(2, 3, content=b"")[:-2],
    ],
)
def test_what_is_no_idx_file_or_not_all_of_one_is_refused(mnist: ModuleType, tmp_path: Path, content: bytes) -> None:
    """Read an invalid or cut IDX file: InputError names it."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(mnist.InputError, match=str(tmp_path / "a")):
        mnist.read_idx(tmp_path / "a")


def test_a_compressed_file_that_is_cut_short_is_refused(mnist: ModuleType, tmp_path: Path) -> None:
    """Read a cut gzip file: InputError names it."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx(9, content=b"123456789"))[:-6])
    with pytest.raises(mnist.InputError, match=str(path)):
        mnist.read_idx(path)


def test_all_four_files_are_needed_in_their_order(mnist: ModuleType, tmp_path: Path) -> None:
    """Look for the four IDX files: InputError names a missing one, else they come in order."""
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for name in mnist.IDX[:3]:
        (raw / f"{name}.gz").touch()
    with pytest.raises(mnist.InputError, match=mnist.IDX[3]):
        mnist.idx_files(tmp_path)
    (raw / mnist.IDX[3]).touch()
    assert [path.name.removesuffix(".gz") for path in mnist.idx_files(tmp_path)] == list(mnist.IDX)


def test_images_are_those_asked_for_then_the_caches_then_the_packages_then_generated(
    mnist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look for images: the folder asked for, else the cache, else the package's, else None for generated."""
    monkeypatch.setenv("PROJECT_PATH", str(tmp_path))
    cache, packaged, requested = tmp_path / ".cache/mnist", tmp_path / "packaged", tmp_path / "asked"
    folder, source = mnist.find(None, packaged)
    assert folder is None
    assert source.startswith("generated")
    assert str(cache) in source
    packaged.mkdir()
    assert mnist.find(None, packaged)[0] == packaged
    assert "Fashion-MNIST" in mnist.find(None, packaged)[1]
    cache.mkdir(parents=True)
    assert mnist.find(None, packaged)[0] == cache
    assert mnist.find(requested, packaged)[0] == requested


def test_a_folder_that_was_asked_for_and_is_empty_is_refused_not_replaced(mnist: ModuleType, tmp_path: Path) -> None:
    """Ask for an empty folder: InputError names mnist.npz."""
    with pytest.raises(mnist.InputError, match=r"mnist\.npz"):
        mnist.idx_files(tmp_path)


def test_ranks_share_the_images_evenly(mnist: ModuleType) -> None:
    """Share eleven images among three ranks: equal parts, every third image."""
    images = mnist.Images((list(range(11)), list(range(11))), (list(range(5)), list(range(5))), "")
    shards = [images.shard(rank, 3) for rank in range(3)]
    assert [shard.train[0] for shard in shards] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [shard.test[1] for shard in shards] == [[0], [1], [2]]


def test_too_few_images_for_a_batch_are_refused(mnist: ModuleType, start: ModuleType) -> None:
    """Count steps of an epoch; InputError if there is no full batch."""
    images = mnist.Images((list(range(20)), list(range(20))), ([1], [1]), "")
    assert start.steps_per_epoch(images, 8) == 2
    with pytest.raises(start.InputError, match="20 images"):
        start.steps_per_epoch(images, 21)


def test_ranks_with_different_images_are_refused(start: ModuleType) -> None:
    """Compare images of ranks: InputError if they differ."""
    start.require_same([7, 7])
    with pytest.raises(start.InputError, match="--data-path"):
        start.require_same([7, 8])


@pytest.mark.parametrize("argument", ["--epochs=0", "--batch-size=0", "--images=-1", "--warmup-epochs=-1"])
def test_arguments_that_cannot_work_are_refused(start: ModuleType, argument: str) -> None:
    """Give impossible arguments: InputError names the option."""
    with pytest.raises(start.InputError, match=argument.partition("=")[0]):
        start.check(start.parse([argument]))


@pytest.mark.parametrize(
    "line",
    [
        "93/93 - 4s - loss: 0.7316 - accuracy: 0.7378 - val_loss: 0.4 - val_accuracy: 0.8 - lr: 0.002 - 4s/epoch",
        "[0]<stdout>:500/500 [==============================] - 4s 8ms/step - loss: 0.7316 - accuracy: 0.7378",
        "[1,0]<stdout>: 12/500 [..............................] - ETA: 4s - loss: 0.7316 - accuracy: 0.7378",
    ],
)
def test_the_patterns_read_any_keras_scripts_lines(line: str) -> None:
    """Read Keras' lines with the declared patterns: loss and accuracy of the training."""
    matches = {name: re.findall(metric["pattern"], line) for name, metric in DECLARED["metrics"].items()}
    assert matches["loss"] == ["0.7316"]
    assert matches["accuracy"] == ["0.7378"]

"""The vision transformer's workload without torch: shapes, arguments, CIFAR-10's files, declarations."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from unit.scripts.conftest import ImportScripts

VIT = Path(__file__).resolve().parents[3] / "workloads" / "vit"
DECLARED: dict[str, Any] = yaml.safe_load((VIT / "workload.yml").read_text(encoding="utf-8"))
CONFIG = ["--deepspeed_config", "ds_config.json"]


@pytest.fixture(scope="module")
def vit(import_scripts: ImportScripts) -> SimpleNamespace:
    """Return the modules of vit that need no torch."""
    return import_scripts("vit", "shapes", "arguments", "cifar10", "deepspeed_file", "script_exit")


def declared(variant: str) -> list[str]:
    """Return the declared arguments of this variant."""
    return [*CONFIG, *map(str, DECLARED["variants"][variant]["arguments"])]


def test_the_parameter_count_is_the_known_one_of_vit_b_16(vit: SimpleNamespace) -> None:
    """Count parameters of ViT-B/16 with 1000 classes: 86,567,656."""
    shape = vit.shapes.MODELS["vit-b-16"]
    thousand = vit.shapes.Shape(shape.image, shape.patch, shape.hidden, shape.layers, shape.heads, classes=1000)
    assert vit.shapes.parameters(thousand) == 86_567_656


def test_declared_memory_is_what_the_arguments_make(vit: SimpleNamespace) -> None:
    """Compare declared memory with the arguments: the same number of parameters."""
    args = vit.arguments.parse(declared("vit"))
    memory = DECLARED["variants"]["vit"]["memory"]
    assert memory["parameters"] == vit.shapes.parameters(vit.arguments.check(args))
    assert (args.epochs, args.learning_rate, vit.arguments.check(args).image) == (10, 1e-4, 224)


@pytest.mark.parametrize("variant", DECLARED["variants"])
def test_a_rehearsal_is_tiny(vit: SimpleNamespace, variant: str) -> None:
    """Parse each rehearsal: below a million parameters and a tenth of an epoch."""
    args = vit.arguments.parse([*declared(variant), *DECLARED["rehearse"]["arguments"]])
    assert vit.shapes.parameters(vit.arguments.check(args)) < 1_000_000
    assert args.epochs * args.dataset_percentage < 0.1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--image-size", "100"], "not a multiple of the 16 pixels"),
        (["--image-size", "0"], "not a multiple of the 16 pixels"),
        (["--dataset-percentage", "50"], "at most 1"),
        (["--dataset-percentage", "0"], "not above 0"),
        (["--epochs", "0"], "--epochs 0 is not at least 1"),
    ],
)
def test_impossible_arguments_are_refused_with_the_reason(vit: SimpleNamespace, argv: list[str], reason: str) -> None:
    """Check impossible arguments: InputError with the reason."""
    with pytest.raises(vit.script_exit.InputError, match=reason):
        vit.arguments.check(vit.arguments.parse([*CONFIG, *argv]))


@pytest.mark.parametrize(("content", "reason"), [('{"a": 1,}', "not JSON: .* line 1"), ("[]", "not a JSON object")])
def test_a_configuration_that_is_none_is_refused(
    vit: SimpleNamespace, tmp_path: Path, content: str, reason: str
) -> None:
    """Read an invalid DeepSpeed file: InputError."""
    path = tmp_path / "ds_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(vit.script_exit.InputError, match=reason):
        vit.deepspeed_file.read_config(path)


def write_cifar10(folder: Path, *, skip: str = "") -> Path:
    """Write CIFAR-10's six files except ``skip``, with one image of class 7 each; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        if name != skip:
            (folder / name).write_bytes(bytes([7, *(number % 256 for number in range(3072))]))
    return folder


def test_cifar10_is_found_in_the_directory_and_in_its_folder(vit: SimpleNamespace, tmp_path: Path) -> None:
    """Find CIFAR-10 in the folder or its parent: five files of records."""
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    assert vit.cifar10.find(tmp_path) == vit.cifar10.find(folder) == folder
    records = vit.cifar10.read(folder, vit.cifar10.TRAINING)
    assert len(records) == 5 * 3073
    assert set(records[::3073]) == {7}


def test_cifar10_that_lacks_a_file_is_refused(vit: SimpleNamespace, tmp_path: Path) -> None:
    """Leave out a file of CIFAR-10: InputError names it."""
    write_cifar10(tmp_path, skip="data_batch_3.bin")
    with pytest.raises(vit.script_exit.InputError, match=r"lacks data_batch_3\.bin"):
        vit.cifar10.find(tmp_path)


def test_pickles_are_refused_and_the_form_that_is_read_is_named(vit: SimpleNamespace, tmp_path: Path) -> None:
    """Find pickles: InputError names the binary archive."""
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(vit.script_exit.InputError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        vit.cifar10.find(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\7" * 3000, "3000 bytes, not a multiple of 3073"),
        (b"", "0 bytes"),
        (b"\x0a" + b"\0" * 3072, "an image of class 10"),
    ],
)
def test_broken_cifar10_is_refused(vit: SimpleNamespace, tmp_path: Path, content: bytes, reason: str) -> None:
    """Read broken CIFAR-10: InputError with the reason."""
    folder = write_cifar10(tmp_path)
    (folder / "test_batch.bin").write_bytes(content)
    with pytest.raises(vit.script_exit.InputError, match=reason):
        vit.cifar10.read(folder, vit.cifar10.TEST)


def test_what_nvidias_library_tells_is_in_the_table_and_what_it_refuses_is_empty(
    import_scripts: ImportScripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read load and temperature of a device: text; "" where the library refuses."""

    class NVMLError(Exception):
        pass

    def refuse(_: int) -> float:
        """Raise NVMLError."""
        raise NVMLError

    accelerator = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(utilization=lambda _: 87)))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(accelerator=accelerator))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    device = import_scripts("vit", "device").device
    device.torch.cuda.temperature = lambda index: 61 + index
    assert (device.load(), device.temperature()) == ("87.0%", "61")
    device.torch.cuda.temperature = refuse
    assert device.temperature() == ""

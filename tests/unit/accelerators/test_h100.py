"""Files of a real H100 from its kernel driver and nvidia-smi, as tests/gpu/card.py keeps them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import sysfs

from labctl.accelerators import nvidia, vendor_tools
from labctl.model import Device
from labctl.system.process import CompletedProcess

H100 = Path(__file__).with_name("h100")
GPU = Device(
    id="0",
    path="/dev/nvidia0",
    pci="0000:00:06.0",
    cpus=(0, 1),
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-726a834d-a647-9ff1-e90e-912c6b30335b",
    firmware="96.00.cf.00.01",
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Copy the recorded /proc and /sys of the H100 machine to tmp_path, with cores 0-1 and empty /dev files."""
    shutil.copytree(H100, tmp_path, dirs_exist_ok=True)
    sysfs.cores(tmp_path, "0-1")
    (tmp_path / "dev").mkdir()
    for name in (H100 / "dev.txt").read_text().split():
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_the_card_and_its_driver_are_found(machine: Path) -> None:
    """Find exactly the recorded H100, and driver version 580.159.04."""
    assert nvidia.find(machine) == (GPU,)
    assert nvidia.driver(machine) == "580.159.04"


def test_its_tool_adds_the_memory_and_finds_nothing_wrong() -> None:
    """Describe the H100 from its recorded nvidia-smi output: 81559 MiB of memory and no health problem."""
    text = (H100 / "nvidia-smi-query.txt").read_text()
    (card,) = vendor_tools.describe("nvidia", (GPU,), lambda *_: CompletedProcess((), 0, text, ""))
    assert (card.memory, card.health) == (81559 << 20, "")

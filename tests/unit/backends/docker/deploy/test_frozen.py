from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import workload

from labctl.backends.docker.deploy import frozen
from labctl.health.model import Reading, Snapshot, Subject


def test_the_seed_is_the_workloads_own_or_else_the_scripts(tmp_path: Path) -> None:
    """seed() is the workload's --seed, else the default in its script, else empty."""
    of = workload(directory=tmp_path)
    assert frozen.seed(of) == ""
    (tmp_path / "train.py").write_text('add("--seed", type=int, default=1234)\n')
    (tmp_path / "a.py").write_text('add("--seed", type=int, default=1)\n')
    assert frozen.seed(replace(of, script="train.py")) == "1234"
    assert frozen.seed(replace(of, arguments=("--seed", "7", "--steps", "3"))) == "7"
    assert frozen.seed(replace(of, arguments=("--seed=8",))) == "8"


NVIDIA = Subject(name="NVIDIA")
SILENT = Reading(name="nvidia-smi", value=None, source="nvidia-smi", why="no answer in 5 s", subject="NVIDIA")
CARD = Reading(name="model", value="H100", source="nvidia-smi -q", item="GPU 0", kind="fact", subject="NVIDIA")
TOOLKIT = Reading(name="toolkit", value="1.17", source="nvidia-ctk --version", kind="fact", subject="NVIDIA")
DISK = Reading(name="NVMe state", value="live", source="lsblk", item="/dev/nvme0", subject="Disk")


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        ((SILENT, TOOLKIT, DISK), "no answer in 5 s"),
        ((replace(SILENT, value="version mismatch", why=""),), "version mismatch"),
        ((replace(SILENT, name="NVIDIA", subject=""),), "no answer in 5 s"),
        ((SILENT, CARD), None),
        ((TOOLKIT, DISK), None),
        ((), None),
    ],
)
def test_a_host_whose_tool_tells_nothing_of_its_cards_is_not_frozen(
    readings: tuple[Reading, ...], why: str | None
) -> None:
    """Name such a host and why; one without a card, and one that tells of some, are frozen."""
    found = frozen.without_cards(NVIDIA, {"gpu-1": Snapshot(time=0.0, readings=readings)})
    assert [error.message for error in found.values()] == ([f"gpu-1 tells nothing of its cards: {why}"] if why else [])
    assert frozen.without_cards(None, {"gpu-1": Snapshot(time=0.0, readings=readings)}) == {}

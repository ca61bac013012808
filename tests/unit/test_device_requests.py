"""Which GPUs an engine has as CDI devices, by what it says and by what lies in its folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.device_requests import has_cdi
from labctl.hardware import Device

YAML = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- {name: "0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}
- {name: all, containerEdits: {}}
"""
JSON = '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "1"}]}'


def gpus(*ids: str) -> tuple[Device, ...]:
    return tuple(Device(id=one, path=f"/dev/nvidia{one}") for one in ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two specifications, and files that the engine passes over too."""
    (tmp_path / "nvidia.yaml").write_text(YAML)
    (tmp_path / "more.json").write_text(JSON)
    (tmp_path / "broken.yaml").write_text("devices: [")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "notes.txt").write_text("kind: nvidia.com/gpu\ndevices: [{name: '7'}]\n")
    return tmp_path


def test_every_wanted_gpu_must_be_described(folder: Path) -> None:
    information = {"CDISpecDirs": ["/nowhere", str(folder)]}
    assert has_cdi(information, gpus("0", "1"))
    assert not has_cdi(information, gpus("0", "2"))
    assert not has_cdi(information, gpus("7"))


def test_an_engine_with_cdi_off_has_none(folder: Path) -> None:
    assert not has_cdi({"CDISpecDirs": None}, gpus("0"))
    assert not has_cdi({}, gpus("0"))


def test_what_the_engine_says_itself_counts_before_the_folders(folder: Path) -> None:
    said = [{"Source": "cdi", "ID": "nvidia.com/gpu=5"}, {"Source": "other", "ID": "nvidia.com/gpu=6"}]
    information = {"CDISpecDirs": [str(folder)], "DiscoveredDevices": said}
    assert has_cdi(information, gpus("5"))
    assert not has_cdi(information, gpus("6"))
    assert not has_cdi(information, gpus("0"))

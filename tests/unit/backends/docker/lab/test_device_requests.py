"""Requests of NVIDIA GPUs, by the engine's information, the files in its folders, and earlier trials."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.builders import host

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.lab.device_requests import foreseen, has_cdi, resolve_device_request
from labctl.config import settings
from labctl.errors import HostError
from labctl.model import Device

KIND = "nvidia.com/gpu"
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
    """Return NVIDIA devices of these ids."""
    return tuple(Device(id=device_id, path=f"/dev/nvidia{device_id}") for device_id in ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with two CDI specifications, and files that the engine ignores; return it."""
    (tmp_path / "nvidia.yaml").write_text(YAML)
    (tmp_path / "more.json").write_text(JSON)
    (tmp_path / "broken.yaml").write_text("devices: [")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "names.json").write_text('{"kind": "nvidia.com/gpu", "devices": ["8"]}')
    (tmp_path / "mapping.yaml").write_text("kind: nvidia.com/gpu\ndevices: {name: '9'}\n")
    (tmp_path / "notes.txt").write_text("kind: nvidia.com/gpu\ndevices: [{name: '7'}]\n")
    return tmp_path


def test_every_wanted_gpu_must_be_described(folder: Path) -> None:
    """has_cdi() is True only if the folder's specifications have all wanted GPUs."""
    information = {"CDISpecDirs": ["/nowhere", str(folder)]}
    assert has_cdi(information, KIND, gpus("0", "1"))
    assert not has_cdi(information, KIND, gpus("0", "2"))
    assert not has_cdi(information, KIND, gpus("7"))
    assert not has_cdi(information, KIND, gpus("9"))


def test_an_engine_with_cdi_off_has_none(folder: Path) -> None:
    """has_cdi() is False if the engine names no CDI folders."""
    assert not has_cdi({"CDISpecDirs": None}, KIND, gpus("0"))
    assert not has_cdi({}, KIND, gpus("0"))


def test_what_the_engine_says_itself_counts_before_the_folders(folder: Path) -> None:
    """has_cdi() takes the engine's discovered CDI devices instead of the folders' files."""
    discovered = [{"Source": "cdi", "ID": "nvidia.com/gpu=5"}, {"Source": "other", "ID": "nvidia.com/gpu=6"}]
    information = {"CDISpecDirs": [str(folder)], "DiscoveredDevices": discovered}
    assert has_cdi(information, KIND, gpus("5"))
    assert not has_cdi(information, KIND, gpus("6"))
    assert not has_cdi(information, KIND, gpus("0"))


@dataclass
class Daemon:
    """An engine with these runtimes and CDI devices, with or without NVIDIA's device driver."""

    runtimes: tuple[str, ...] = ("runc",)
    devices: tuple[str, ...] = ()
    driver: bool = False
    wedged: bool = False
    trials: list[tuple[str, ...]] = field(default_factory=list)

    def identity(self) -> str:
        return "one"

    def information(self) -> dict[str, Any]:
        """Return the runtimes and the CDI devices as discovered."""
        discovered = [{"Source": "cdi", "ID": f"nvidia.com/gpu={device_id}"} for device_id in self.devices]
        return {"Runtimes": dict.fromkeys(self.runtimes), "DiscoveredDevices": discovered}

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:  # noqa: ARG002
        """Record the trial; raise HostError if wedged, else return if there is a driver."""
        self.trials.append(ids)
        if self.wedged:
            raise HostError("cannot start a container: not done within 120 s")
        return self.driver


def settle(directory: Path, daemon: Daemon | None, *, refresh: bool = False, **environ: str) -> str:
    """Resolve how the host's two GPUs are requested, with this daemon or none; return the kind of request."""
    loaded = settings.load(directory, environ, {})
    machine = host(devices=gpus("0", "1"))
    engine = cast(DockerEngine, daemon) if daemon else None
    return resolve_device_request(loaded, "nvidia", machine, directory, "image", engine, refresh=refresh).request


def test_the_first_of_cdi_reservation_and_runtime_that_is_there_is_taken(tmp_path: Path) -> None:
    """With all three ways the request is cdi, without all CDI devices a reservation, without a driver runtime."""
    everything = Daemon(runtimes=("runc", "nvidia"), devices=("0", "1"), driver=True)
    assert settle(tmp_path / "a", everything) == "cdi"
    assert everything.trials == []
    assert settle(tmp_path / "b", replace(everything, devices=("0",))) == "reservation"
    assert settle(tmp_path / "c", replace(everything, devices=(), driver=False)) == "runtime"


def test_only_the_gpus_that_are_picked_must_be_there(tmp_path: Path) -> None:
    """With LAB_DEVICES=0 the CDI device 0 alone suffices for cdi."""
    assert settle(tmp_path, Daemon(devices=("0",)), LAB_DEVICES="0") == "cdi"


def test_a_trial_is_made_once_and_counts_where_no_engine_is_asked(tmp_path: Path) -> None:
    """A reservation is tried once, and the answer is used again, also without an engine."""
    daemon = Daemon(driver=True)
    assert [settle(tmp_path, daemon), settle(tmp_path, daemon), settle(tmp_path, None)] == ["reservation"] * 3
    assert daemon.trials == [("0", "1")]


def test_a_trial_made_anew_replaces_what_was_kept(tmp_path: Path) -> None:
    """With refresh a new trial replaces the kept answer."""
    settle(tmp_path, Daemon(driver=True))
    assert settle(tmp_path, Daemon(runtimes=("nvidia", "runc")), refresh=True) == "runtime"
    assert settle(tmp_path, None) == "runtime"


def test_what_was_kept_is_forgotten_where_a_trial_finds_nothing(tmp_path: Path) -> None:
    """A trial that finds no way raises HostError and drops the kept answer; the next one tries again."""
    settle(tmp_path, Daemon(driver=True))
    with pytest.raises(HostError, match="no runtime `nvidia`"):
        settle(tmp_path, Daemon(), refresh=True)
    mended = Daemon(runtimes=("nvidia", "runc"))
    assert settle(tmp_path, mended) == "runtime"
    assert mended.trials == [("0", "1")]


def test_a_trial_that_comes_to_no_end_leaves_what_was_kept(tmp_path: Path) -> None:
    """A trial that times out raises HostError and keeps the earlier answer."""
    settle(tmp_path, Daemon(runtimes=("nvidia", "runc")))
    with pytest.raises(HostError, match="not done within"):
        settle(tmp_path, Daemon(wedged=True), refresh=True)
    assert settle(tmp_path, None) == "runtime"


@pytest.mark.parametrize("text", ["[]", "null", "{", "7"])
def test_what_was_kept_and_cannot_be_read_counts_as_nothing(tmp_path: Path, text: str) -> None:
    """An engine.json that cannot be read is ignored: a reservation without an engine, else a new trial."""
    (tmp_path / ".lab").mkdir()
    (tmp_path / ".lab/engine.json").write_text(text)
    assert settle(tmp_path, None) == "reservation"
    assert settle(tmp_path, Daemon(runtimes=("nvidia", "runc"))) == "runtime"


def foresee(directory: Path, daemon: Daemon) -> str:
    """Return the kind of request that is foreseen with this daemon, without a trial."""
    loaded = settings.load(directory, {}, {})
    return foreseen(loaded, "nvidia", host(devices=gpus("0", "1")), directory, cast(DockerEngine, daemon))[0]


def test_what_is_foreseen_is_what_is_settled_as_far_as_the_engine_tells_it(tmp_path: Path) -> None:
    """foreseen() equals the settled request with CDI or a kept one; before a trial it is a reservation."""
    with_cdi = Daemon(devices=("0", "1"))
    assert foresee(tmp_path, with_cdi) == settle(tmp_path, with_cdi) == "cdi"
    without = Daemon(runtimes=("nvidia", "runc"))
    assert foresee(tmp_path, without) == "reservation", "assumed: what was kept holds no more"
    assert settle(tmp_path, without) == foresee(tmp_path, without) == "runtime"
    assert without.trials == [("0", "1")]

"""Hardware that a workload is fitted in: the lab's, or what is asked for; and the options that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders

from labctl.backends.devices import DetectedDevice, DeviceReport, HostDevices
from labctl.config import settings
from labctl.jobs.request import RunOptions, choose_workload
from labctl.model import Workload
from labctl.runs import fitting
from labctl.runs.fitting import Hardware

ROOT = Path(__file__).parents[3]
GIB = 2**30


def workload(name: str) -> Workload:
    """Return the project's workload of this name."""
    return choose_workload(ROOT, name, RunOptions(), settings.load(ROOT / "none", {}, {}))


def detected(*memory: int | None, kind: str = "nvidia") -> DeviceReport:
    """Return a report of one host with devices of these memory sizes."""
    devices = tuple(
        DetectedDevice(id=str(index), path=f"/dev/x{index}", memory=size, kind=kind, node="worker-0", leased_by="")
        for index, size in enumerate(memory)
    )
    empty: dict[str, Any] = dict.fromkeys(("cpus", "numa", "groups", "infiniband", "fabrics", "nodes", "warnings"), ())
    host = HostDevices(name="local", accelerator=kind, reason="", memory=GIB, devices=devices, drivers={}, **empty)
    return DeviceReport((host,))


@pytest.mark.parametrize(
    ("devices", "smallest"),
    [
        (detected(80 * GIB, 24 * GIB), 24 * GIB),
        (detected(80 * GIB, None), None),
        (detected(), None),
        (detected(80 * GIB, kind="intel"), None),
    ],
)
def test_the_smallest_device_of_the_lab_decides_if_all_are_known(devices: DeviceReport, smallest: int | None) -> None:
    """Ask for the smallest device: its memory, None if a size or the kind is unknown."""
    assert fitting.smallest_device(devices, "nvidia") == smallest


def test_a_lab_is_fitted_in_with_its_own_devices_and_host() -> None:
    """Fit into the lab: memory of its device and host."""
    lab = builders.lab(1, accelerator="nvidia")
    report = fitting.how_it_fits(lab, workload("opt-350m"), GIB, Hardware(), detected(80 * GIB))
    assert (report.available.device, report.available.host) == (80 * GIB, GIB)


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia"])
def test_another_machine_has_what_is_asked_for_and_else_what_is_not_known(accelerator: str) -> None:
    """Fit into other hardware: what was given counts, the host is None unless given."""
    lab = builders.lab(2, accelerator=accelerator)
    asked = Hardware(nodes=1, slots=4, device_memory=24 * GIB)
    report = fitting.how_it_fits(lab, workload("opt-350m"), 0, asked, None)
    assert (report.training["ranks"], report.available.device, report.available.host) == (4, 24 * GIB, None)
    report = fitting.how_it_fits(lab, workload("opt-350m"), 0, replace(asked, host_memory=64 * GIB), None)
    assert report.available.host == 64 * GIB


def test_a_card_that_a_lab_of_cpus_is_asked_about_is_in_another_machine() -> None:
    """Fit a CPU lab with a device size: the accelerator is "device", the host None."""
    report = fitting.how_it_fits(builders.lab(), workload("opt-350m"), 0, Hardware(device_memory=24 * GIB), None)
    assert (report.training["accelerator"], report.available.host) == ("device", None)


def test_options_of_a_workload_are_those_that_its_scripts_declare() -> None:
    """Read a workload's scripts: their options, and if the optimizer can be offloaded."""
    opt, vit = (fitting.settable(workload(name)) for name in ("opt-13b", "vit"))
    assert opt.cpu_optimizer
    assert {"gradient-checkpointing", "lora-dim"} <= opt.arguments
    assert not vit.cpu_optimizer
    assert not {"gradient-checkpointing", "lora-dim"} & vit.arguments
    made_by_deepspeed = replace(workload("vit"), deepspeed={"optimizer": {"type": "AdamW"}})
    assert fitting.settable(made_by_deepspeed).cpu_optimizer


def test_a_script_of_deepspeed_chat_takes_no_options() -> None:
    """Read a DeepSpeed-Chat script: no options."""
    script = builders.workload(directory=ROOT / "workloads/dschat")
    assert (fitting.settable(script).deepspeed, fitting.settable(script).arguments) == (False, frozenset())


def test_a_script_elsewhere_is_read_itself(tmp_path: Path) -> None:
    """Read a script elsewhere: its own options."""
    script = tmp_path / "train.py"
    script.write_text('add_argument("--gradient-checkpointing")')
    assert fitting.settable(builders.workload(script=str(script))).arguments == {"gradient-checkpointing"}

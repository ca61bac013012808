"""Missing devices, and missing support of the engine, are reported before anything starts."""

from __future__ import annotations

import pytest
from conftest import FreshLab
from support.machine import hardware
from support.machine.machine import NODE_IMAGE, Dockerd, Machine

pytestmark = pytest.mark.docker
LOOKED_FOR = {
    "nvidia": ("/dev/nvidia<N>",),
    "habana": ("/dev/accel/accel<N>", "habanalabs"),
    "intel": ("Intel GPU", "/dev/dri"),
}


@pytest.mark.parametrize("accelerator", LOOKED_FOR)
def test_a_missing_device_is_named_with_the_place_where_it_was_looked_for(
    machine: Machine, machine_lab: FreshLab, accelerator: str
) -> None:
    """`up` exits with 3, names the accelerator and the places sought, and makes nothing."""
    hardware.card(machine, 0, vendor="0x1002")
    hardware.npu(machine, 0)
    lab = machine_lab(LAB_ACCELERATOR=accelerator)
    refused = lab.call("up").expect(3)
    assert f"this host has no {accelerator} device" in refused.err
    assert all(text in refused.err for text in LOOKED_FOR[accelerator])
    assert lab.labelled() == []


@pytest.mark.usefixtures("machine")
def test_auto_takes_cpus_where_there_is_no_device_and_says_what_it_missed(machine_lab: FreshLab) -> None:
    """`up --dry-run` says accelerator cpu and lists all places sought."""
    lab = machine_lab(LAB_ACCELERATOR="auto", LAB_NODES="1")
    err = lab.call("up", "--dry-run").expect(0).err
    assert "accelerator cpu" in err
    assert all(text in err for places in LOOKED_FOR.values() for text in places)


def test_auto_warns_where_it_takes_cpus_for_want_of_a_device_file(machine: Machine, machine_lab: FreshLab) -> None:
    """A GPU without /dev/nvidia0: accelerator cpu, with a warning that names nvidia-modprobe."""
    hardware.nvidia(machine, 0)
    machine.at("/dev/nvidia0").unlink()
    lab = machine_lab(LAB_ACCELERATOR="auto", LAB_NODES="1")
    err = lab.call("up", "--dry-run").expect(0).err
    (warned,) = (line for line in err.splitlines() if "accelerator cpu" in line)
    assert "warning:" in warned
    assert "nvidia-modprobe" in warned


@pytest.mark.parametrize(
    "cdi",
    [
        pytest.param("its CDI is off", marks=pytest.mark.dockerd(Dockerd())),
        pytest.param("in /etc/cdi, /var/run/cdi", marks=pytest.mark.dockerd(Dockerd({"features": {"cdi": True}}))),
    ],
)
def test_an_engine_without_any_way_for_nvidia_is_refused_with_what_mends_it(
    machine: Machine, machine_lab: FreshLab, cdi: str
) -> None:
    """No CDI, driver or runtime: `up` exits with 3, names each, and makes nothing."""
    hardware.nvidia(machine, 0)
    lab = machine_lab(LAB_ACCELERATOR="nvidia", LAB_NODES="1")
    err = lab.call("up").expect(3).err
    for text in ("nvidia.com/gpu=0", cdi, "no device driver `nvidia`", "no runtime `nvidia`", "nvidia-ctk runtime"):
        assert text in err
    assert lab.labelled() == []


@pytest.mark.dockerd(Dockerd())
@pytest.mark.parametrize("accelerator", [NODE_IMAGE, "labctl/habana"], ids=["image-there", "before-any-build"])
def test_an_engine_without_gaudis_runtime_is_refused_with_what_mends_it(
    machine: Machine, machine_lab: FreshLab, accelerator: str
) -> None:
    """No runtime habana: `up` exits with 3, names habana-container-runtime, and makes nothing."""
    hardware.gaudi(machine, 0, module=0)
    lab = machine_lab(LAB_ACCELERATOR="habana", LAB_NODES="1", LAB_IMAGE=accelerator)
    err = lab.call("up").expect(3).err
    assert "no runtime `habana`" in err
    assert "habana-container-runtime" in err
    assert lab.labelled() == []

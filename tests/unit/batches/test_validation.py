"""The lab that is validated."""

from __future__ import annotations

from labctl.backends.devices import DetectedDevice, HostDevices
from labctl.batches.validation import _hardware
from labctl.reports.validation import Hardware


def device(kind: str, name: str) -> DetectedDevice:
    """Return a detected device of this kind and name."""
    return DetectedDevice(id="0", path="", name=name, kind=kind, node=None, leased_by="")


def test_the_hardware_of_a_host_has_the_devices_of_its_accelerator_alone() -> None:
    """Give a host nvidia and intel devices: its Hardware counts the nvidia ones, with their driver."""
    host = HostDevices(
        name="red0",
        accelerator="nvidia",
        reason="",
        processor="EPYC",
        cpus=(0, 1),
        numa=(),
        memory=1 << 30,
        devices=(*[device("nvidia", "H200")] * 8, device("intel", "UHD")),
        drivers={"nvidia": "570", "intel": "6.8"},
        groups=(),
        infiniband=(),
        fabrics=(),
        nodes=(),
        warnings=(),
    )
    assert _hardware(host) == Hardware(
        host="red0",
        processor="EPYC",
        cores=2,
        memory=1 << 30,
        accelerator="nvidia",
        devices="8 x H200",
        driver="570",
    )

"""A fictitious accelerator of one module and one compose fragment, from `up` to a run on its cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FreshLab
from support.machine import hardware
from support.machine.machine import Machine
from support.made_up import checkout_with_zeta

pytestmark = pytest.mark.docker
ZETA_SMI = """#!/bin/sh
echo 'index, bus_id, name, memory.total, uuid'
echo '0, 0000:41:00.0, Zeta One, 4096, Z-0'
echo '1, 0000:42:00.0, Zeta One, 4096, Z-1'
"""


def test_its_cards_are_found_mapped_leased_watched_and_run_on(
    machine: Machine, machine_lab: FreshLab, tmp_path: Path
) -> None:
    """Accelerator zeta of a test: `devices`, up, health, doctor, a refused second lab, and a run."""
    for index in range(2):
        folder = hardware.pci(machine, f"0000:{0x41 + index:02x}:00.0", "0x7e7a", "0x0001", "0x120000")
        hardware.driver(machine, folder, "zeta")
        machine.device(f"/dev/zeta{index}")
    machine.program("zeta-smi", ZETA_SMI)
    lab = machine_lab(LAB_ACCELERATOR="auto")
    lab.environ["PYTHONPATH"] = str(checkout_with_zeta(tmp_path))

    (shown,) = lab.call("devices", "--json").expect(0).json["hosts"]
    assert shown["accelerator"] == "zeta"
    assert [(device["path"], device["name"], device["uuid"], device["node"]) for device in shown["devices"]] == [
        ("/dev/zeta0", "Zeta One", "Z-0", "worker-0"), ("/dev/zeta1", "Zeta One", "Z-1", "worker-1"),
    ]  # fmt: skip

    lab.call("up").expect(0)
    containers = lab.containers()
    for index in range(2):
        options = containers[f"worker-{index}"].attrs["HostConfig"]
        assert [device["PathOnHost"] for device in options["Devices"]] == [f"/dev/zeta{index}"]
        assert options["OomScoreAdj"] == 7
        assert f"/dev/zeta{index}" in lab.inside(f"worker-{index}", "cat", "/run/lab/devices")
        lab.inside(f"worker-{index}", "/usr/bin/python3", "-I", "/opt/lab/labnode.py", "health")
    assert not containers["launcher"].attrs["HostConfig"]["Devices"]

    findings = lab.call("doctor", "--json").json["findings"]
    levels = {(finding["code"], finding["level"]) for finding in findings}
    assert {("LAB-ZETA-001", "warn"), ("LAB-DEVICE-002", "ok"), ("LAB-DEVICE-003", "ok")} <= levels
    assert not [finding for finding in findings if finding["level"] == "error" and "DEVICE" in finding["code"]]

    other = machine_lab(LAB_ACCELERATOR="zeta", LAB_NODES="1")
    other.environ["PYTHONPATH"] = lab.environ["PYTHONPATH"]
    refused = other.call("up").expect(3)
    assert f"lab `{lab.name}`" in refused.err

    document = lab.call("run", "hello", "--launcher", "mpirun", "--json").expect(0).json
    assert (document["verdict"], document["world_size"]) == ("PASS", 2)

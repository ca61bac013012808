"""The opening script on a machine with devices, and in a container whose address Docker knows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import IMAGE
from support.machine import hardware
from support.machine.machine import Machine

from docker import DockerClient
from labctl.hosts import facts as survey
from labctl.system import routing

pytestmark = pytest.mark.docker


def test_a_machines_devices_are_told_as_they_are(machine: Machine, tmp_path: Path) -> None:
    for index in range(2):
        hardware.gaudi(machine, index, module=7 - index)
    hardware.npu(machine, 2)
    hardware.card(machine, 0, vendor="0x8086")
    hardware.groups(machine, render=hardware.RENDER)
    machine.file("/etc/gaudinet.json", "{}")
    told = survey.read(machine.run("sh", "-c", survey.SCRIPT).stdout, "gpu-1")
    root = survey.lay_out(told, tmp_path / "root")
    for wanted in ("auto", "intel"):
        accelerator, found = survey.host_of(told, root, wanted)
        there = machine.run(
            sys.executable, "-c", f"from labctl.accelerators.detect import observe; print(observe({wanted!r}))"
        )
        assert repr((accelerator, replace(found, name="local", home=""))) == there.stdout.strip()
    assert [device.module for device in survey.host_of(told, root, "auto")[1].devices] == ["7", "6"]
    assert hardware.RENDER in found.groups


def test_where_a_host_is_on_the_network_is_as_docker_has_it(engine: DockerClient) -> None:
    container = engine.containers.run(IMAGE, ["60"], entrypoint="sleep", detach=True, user="1234:4321")
    try:
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        environment = {"SSH_CONNECTION": f"{network['Gateway']} 51000 {network['IPAddress']} 22", "HOME": "/workspace"}
        code, out = container.exec_run(["sh", "-c", survey.SCRIPT], environment=environment)
        assert code == 0
        assert isinstance(out, bytes)
        facts = survey.facts_of(survey.read(out.decode(), "gpu-1"), 0)
    finally:
        container.remove(force=True)
    assert (facts.uid, facts.gid, facts.home, facts.sockets) == (1234, 4321, "/workspace", {})
    here = routing.Peer(name="gpu-1", network=facts.network)
    assert routing.ways([here]) == (routing.Way("eth0", network["IPAddress"]),)
    beside = replace(here.network, addresses=(("eth0", network["Gateway"]),), reached=network["Gateway"])
    assert routing.ways([here, routing.Peer(name="gpu-2", network=beside)])[0] == routing.Way(
        "eth0", network["IPAddress"]
    )

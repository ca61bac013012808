"""The script that surveys a host, on a machine with devices and in a container with an address."""

from __future__ import annotations

import sys

import pytest
from conftest import IMAGE
from msgspec.structs import replace
from support.machine import hardware
from support.machine.machine import Machine

from docker import DockerClient
from labctl.backends.docker.hosts import facts as survey
from labctl.backends.docker.lab import cluster
from labctl.system import hostdump, routing

pytestmark = pytest.mark.docker


def test_a_machines_devices_are_told_as_they_are(machine: Machine) -> None:
    """The survey script gives the same facts as labctl's own look at Gaudis, an NPU and an Intel card."""
    for index in range(2):
        hardware.gaudi(machine, index, module=7 - index)
    hardware.npu(machine, 2)
    hardware.card(machine, 0, vendor="0x8086")
    hardware.groups(machine, render=hardware.RENDER)
    machine.file("/etc/gaudinet.json", "{}")
    dump = hostdump.read(machine.run("sh", "-c", survey.script()).stdout, "gpu-1")
    for setting in ("auto", "intel"):
        accelerator, host = cluster.observe(setting, dump)
        output = machine.run(
            sys.executable, "-c", f"from labctl.accelerators import observe; print(observe({setting!r}))"
        )
        assert repr((accelerator, replace(host, name="local", home=""))) == output.stdout.strip()
    assert [device.module for device in cluster.observe("auto", dump)[1].devices] == ["7", "6"]
    assert hardware.RENDER in host.groups


def test_where_a_host_is_on_the_network_is_as_docker_has_it(engine: DockerClient) -> None:
    """The survey script in a container gives its uid, home and the address on its network."""
    container = engine.containers.run(IMAGE, ["60"], entrypoint="sleep", detach=True, user="1234:4321")
    try:
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        environment = {"SSH_CONNECTION": f"{network['Gateway']} 51000 {network['IPAddress']} 22", "HOME": "/workspace"}
        code, out = container.exec_run(["sh", "-c", survey.script()], environment=environment)
        assert code == 0
        assert isinstance(out, bytes)
        dump = hostdump.read(out.decode(), "gpu-1")
    finally:
        container.remove(force=True)
    uid, _, gid = dump.user
    assert (uid, gid, dump.facts_at(0).home) == (1234, 4321, "/workspace")
    here = routing.ClusterMember(name="gpu-1", network=dump.network)
    assert routing.endpoints([here]) == (routing.Endpoint("eth0", network["IPAddress"]),)
    beside = replace(here.network, addresses=(("eth0", network["Gateway"]),), reached=network["Gateway"])
    assert routing.endpoints([here, routing.ClusterMember(name="gpu-2", network=beside)])[0] == routing.Endpoint(
        "eth0", network["IPAddress"]
    )

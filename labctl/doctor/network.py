"""The lab's network: room for it in the engine's address pools, its MTU, and who is on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from labctl import render
from labctl.doctor.finding import ANEW, Examination, Finding, as_root, error, ok, warn

MTU = "com.docker.network.driver.mtu"
POOLS = '{"default-address-pools":[{"base":"10.200.0.0/16","size":24}]}'


def pools(examination: Examination) -> Iterator[Finding]:
    """Whether the engine has addresses for the lab's network; asked only while it is not there."""
    if examination.network:
        yield ok("LAB-NET-003", f"network {examination.network['Name']} is there")
    elif reason := examination.engine.try_network(examination.lab.name):
        yield error(
            "LAB-NET-003",
            f"the engine cannot make another network: {reason}",
            why="a lab has a network of its own; by default an engine has addresses for about 30",
            fix=room(examination),
        )
    else:
        yield ok("LAB-NET-003", "the engine has addresses for another network")


def room(examination: Examination) -> str:
    """The command that frees addresses: networks that nothing is attached to, else wider pools."""
    unused = examination.engine.unused_networks()
    if unused:
        return f"docker network rm {shlex.join(unused)}"
    return (
        f"test ! -e /etc/docker/daemon.json && {as_root()}mkdir -p /etc/docker && echo '{POOLS}' | "
        f"{as_root()}tee /etc/docker/daemon.json && {as_root()}systemctl restart docker"
    )


def mtu(examination: Examination) -> Iterator[Finding]:
    """Whether packets of the lab's network fit through the way out of this host."""
    if examination.network is None:
        return
    here = examination.lab.hosts[0].mtu
    theirs = int((examination.network["Options"] or {}).get(MTU, 1500))
    if theirs > here:
        yield warn(
            "LAB-NET-002",
            f"the lab's network has MTU {theirs}, the default route of this host {here}",
            why="large packets are lost on the way out: downloads begin, and then stand still",
            fix=ANEW,
            runnable=True,
        )
    else:
        yield ok("LAB-NET-002", f"MTU {theirs} on the lab's network, {here} on this host's default route")


def members(examination: Examination) -> Iterator[Finding]:
    """Whether every running node is on the lab's network."""
    if examination.network is None:
        return
    there = examination.network["Containers"] or {}
    for one in examination.running:
        if one.id not in there:
            network = shlex.quote(examination.network["Name"])
            yield error(
                "LAB-NET-001",
                f"is not on the network {examination.network['Name']}",
                why="no other node reaches it",
                fix=f"docker network connect --alias {one.node} {network} {one.name}",
                node=one.node,
                runnable=True,
            )


def missing(examination: Examination) -> Iterator[Finding]:
    """A lab that runs has its network."""
    if examination.running and examination.network is None:
        name = render.project(examination.lab)
        why = "the nodes do not reach each other"
        yield error("LAB-NET-001", f"network {name} is gone", why=why, fix=ANEW, runnable=True)

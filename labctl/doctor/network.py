"""The lab's network: room for it in the engine's address pools, its MTU, and who is on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from labctl import naming
from labctl.doctor import daemon
from labctl.doctor.finding import ANEW, Examination, Finding, error, ok, warn
from labctl.errors import HostError
from labctl.lab import capabilities

MTU = "com.docker.network.driver.mtu"
POOLS = {"default-address-pools": [{"base": "10.200.0.0/16", "size": 24}]}
SYSCTL = "/etc/sysctl.d/90-labctl.conf"
EXHAUSTED = "address pool"


def pools(examination: Examination) -> Iterator[Finding]:
    """Whether the engine has addresses for the lab's network; asked only while it is not there."""
    if examination.lab.network == "host":
        return
    if examination.network:
        yield ok("LAB-NET-003", f"network {examination.network['Name']} is there")
        return
    reason = examination.daemon.try_network(examination.lab.name)
    if not reason:
        yield ok("LAB-NET-003", "the engine has addresses for another network")
    elif EXHAUSTED in reason:
        yield no_room(examination, reason)
    else:
        raise HostError(f"the engine cannot make another network: {reason}", hint="docker network ls")


def no_room(examination: Examination, reason: str) -> Finding:
    """No addresses left: what labctl left behind goes; other people's networks are theirs to judge; else wider pools.

    Source of the words: Docker Engine's "all predefined address pools have been fully subnetted".
    """
    unused = examination.daemon.unused_networks()
    own = [name for name, lab in unused if lab]
    others = [name for name, lab in unused if not lab]
    why = "a lab has a network of its own; by default an engine has addresses for about 30"
    if own:
        fix = examination.place.there(f"docker network rm {shlex.join(own)}")
    elif others:
        fix = examination.place.there(
            f"docker network inspect {shlex.join(others)}  # and remove those that nobody needs"
        )
    else:
        fix = examination.place.there(f"{daemon.put(examination, POOLS)} && {daemon.restart(examination)}")
        why = f"{why}; {daemon.RESTART_ENDS}"
    named = f"; of no container: {', '.join(others)}" if others else ""
    return error("LAB-NET-003", f"the engine cannot make another network: {reason}{named}", why=why, fix=fix)


def mtu(examination: Examination) -> Iterator[Finding]:
    """Whether packets of the lab's network fit through the way out of this host."""
    if examination.network is None:
        return
    here = examination.here.mtu
    theirs = int((examination.network["Options"] or {}).get(MTU, 1500))
    if theirs > here:
        yield warn(
            "LAB-NET-002",
            f"the lab's network has MTU {theirs}, the default route of this host {here}",
            why="large packets are lost on the way out: downloads begin, and then stand still",
            fix=ANEW,
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
            yield error(
                "LAB-NET-001",
                f"is not on the network {examination.network['Name']}",
                why="no other node reaches it",
                # Connected again, its interface may have another name than collectives are told.
                fix=f"{examination.place.there(f'docker rm --force {one.name}')} && labctl up",
                node=one.node,
                runnable=True,
            )


def neighbours(examination: Examination) -> Iterator[Finding]:
    """Whether the kernel can remember where all nodes are, when each talks to each."""
    lacking = capabilities.neighbours_lacking(examination.lab, examination.root)
    if not lacking:
        yield ok("LAB-NET-006", "this host remembers where every node is")
        return
    (table, needed), sudo = lacking, examination.place.sudo
    # Room for another lab, and for what is about to be forgotten: from the second value on, only for five seconds.
    most = 1 << (2 * needed).bit_length()
    lines = " ".join(
        f"net.ipv4.neigh.default.gc_thresh{number}={value}" for number, value in ((2, most // 2), (3, most))
    )
    yield warn(
        "LAB-NET-006",
        f"room for {table} neighbours; {len(examination.lab.nodes)} nodes that all talk to each other take {needed}",
        why="the kernel drops packets to those that it has forgotten: connections between nodes time out",
        fix=examination.place.there(
            f"printf '%s\\n' {lines} | {sudo}tee {SYSCTL} && {sudo}sysctl -p {SYSCTL}",
        ),
    )


def missing(examination: Examination) -> Iterator[Finding]:
    """A lab that runs has its network."""
    if examination.lab.network == "bridge" and examination.running and examination.network is None:
        name = naming.project(examination.lab)
        why = "the nodes do not reach each other"
        yield error("LAB-NET-001", f"network {name} is gone", why=why, fix=ANEW, runnable=True)

"""What several hosts are asked for one lab: ports that are free, room for its files, and to be alike."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from tempfile import NamedTemporaryFile

from labctl.config.inventory import InventoryHost
from labctl.doctor.finding import GIB, UP, Examination, Finding, error, gib, ok, warn
from labctl.engines.state import Container, HostPortUser, Owner, elsewhere
from labctl.errors import HostError
from labctl.hosts import ssh_errors
from labctl.model import HERE, Lab
from labctl.system import routing

ROOM = GIB // 64
"""What the lab's own files, keys and workloads of a usual size take."""


def unreached(target: InventoryHost, failure: HostError) -> Finding:
    """The finding of a host that ssh does not reach, or where labctl cannot do anything."""
    return error(
        "LAB-HOST-004",
        failure.message,
        why="none of its nodes can be made, run or looked at; other hosts are not concerned",
        fix=failure.hint or ssh_errors.command(target, "-v"),
        node=target.name,
    )


# --- the lab's directory -----------------------------------------------------------------------------------------


def shared(examination: Examination) -> Iterator[Finding]:
    """Whether the host sees the directory that all are said to share: a file that is made here is looked for there."""
    directory = examination.settings.text("LAB_SHARED_DIR")
    if not directory or examination.place.name == HERE:
        return
    with NamedTemporaryFile(dir=examination.lab.directory, prefix=".seen-") as marker:
        seen = examination.place.rights((marker.name,))[marker.name]
    if seen:
        yield ok("LAB-HOST-008", f"sees {directory} as it is here")
    else:
        yield error(
            "LAB-HOST-008",
            f"does not see {directory}",
            why="LAB_SHARED_DIR is to be the same directory on all hosts, as over NFS",
            fix=f"{examination.drop('LAB_SHARED_DIR')}  # the lab's files are sent then; or mount it there",
        )


# --- ports -------------------------------------------------------------------------------------------------------


def ssh_port(examination: Examination) -> Iterator[Finding]:
    """The port of the nodes' sshd, which is one of the host's own: free, or taken by this lab's node."""
    lab, facts = examination.lab, examination.place.facts
    if lab.network != "host" or facts is None:
        return
    port, user = lab.ssh_port, facts.ports.get(lab.ssh_port)
    there = [one for one in examination.daemon.port_users() if one.port == port]
    foreign = next((one for one in there if is_foreign(examination, one)), None)
    if foreign:
        yield taken(examination, "LAB-PORT-002", "LAB_SSH_PORT", port, worker(foreign, examination))
    elif there and user in (None, "root", facts.user):
        yield ok("LAB-PORT-002", f"port {port} is that of {there[0].container.node}")
    elif user:
        yield taken(examination, "LAB-PORT-002", "LAB_SSH_PORT", port, f"a program of user {user}")
    else:
        yield ok("LAB-PORT-002", f"port {port} is free for sshd")


def is_foreign(examination: Examination, one: HostPortUser) -> bool:
    lab, found = examination.lab, one.container
    return one.lab != lab.name or owner_of(found, lab) is not None


def owner_of(found: Container, lab: Lab) -> Owner | None:
    """Who has a container, if that is not this lab."""
    return elsewhere(found.directory, lab.directory, found.owner, lab.owner, found.host)


def worker(one: HostPortUser, examination: Examination) -> str:
    """A node of another lab, and how to end that where it is known."""
    owner = owner_of(one.container, examination.lab)
    whose = f" ({owner.name}; to end it: {owner.remedy})" if owner else ""
    return f"{one.container.node} of lab `{one.lab}`{whose}"


def master_port(examination: Examination) -> Iterator[Finding]:
    """The port where ranks meet, on the first host; that of a lab which is up is looked at from within."""
    lab, facts = examination.lab, examination.place.facts
    if lab.network != "host" or facts is None or examination.name != lab.nodes[0].host or examination.run_active:
        return
    user = facts.ports.get(lab.master_port)
    up = any(one.role == "worker" and one.state == "running" for one in examination.observed.containers)
    if user and not (up and user == facts.user):
        yield taken(examination, "LAB-PORT-003", "LAB_MASTER_PORT", lab.master_port, f"a program of user {user}")
    elif not up:
        yield ok("LAB-PORT-003", f"port {lab.master_port} is free for the ranks of a run")


def taken(examination: Examination, code: str, key: str, port: int, owner: str) -> Finding:
    """``owner`` is who listens there, in words."""
    used = {*examination.place.busy, examination.lab.ssh_port, examination.lab.master_port}
    return error(
        code,
        f"port {port} is taken by {owner}",
        why="nodes on several hosts have no network of their own, and two programs cannot listen at one port",
        fix=examination.put(key, str(routing.free_port(port, used))),
    )


# --- room --------------------------------------------------------------------------------------------------------


def room(examination: Examination) -> Iterator[Finding]:
    """Disk for the files that are sent to the host."""
    facts, directory = examination.place.facts, examination.here.directory
    if facts is None or not directory or facts.home_free is None:
        return
    seen = f"{gib(facts.home_free)} free at {facts.home}"
    if facts.home_free < ROOM:
        listing = f"du -xah {shlex.quote(facts.home)} | sort -h | tail -20  # remove what you can spare of these"
        yield error(
            "LAB-DISK-004",
            seen,
            why="the lab's files, and the records of runs, lie there",
            fix=examination.place.there(listing),
        )
    else:
        yield ok("LAB-DISK-004", f"{seen} for the lab's files")


# --- alike -------------------------------------------------------------------------------------------------------


def alike(examination: Examination) -> Iterator[Finding]:
    """Image, engine, driver and MTU, which the hosts of one lab should have in common."""
    by_name = {one.name: one for one in examination.hosts}
    awake = tuple(one for one in examination.hosts if not one.silent)

    def typed(command: str) -> Callable[[str], str]:
        return lambda host: by_name[host].place.there(command)

    images = {one.name: one.observed.image for one in awake}
    what = f"image {examination.lab.image} is"
    yield from odd("LAB-IMAGE-004", what, images, "ranks of one run would run different code", lambda _: UP)
    engines = {one.name: str(one.info["ServerVersion"]) for one in awake}
    why = "what works on one host may not on another"
    yield from odd("LAB-HOST-005", "Docker Engine", engines, why, typed("docker version  # have the same everywhere"))
    drivers = {one.name: one.here.driver for one in examination.hosts}
    why = "libraries of one run would meet different drivers"
    yield from odd("LAB-HOST-006", "driver", drivers, why, typed("uname -a  # have the same driver everywhere"))
    if examination.lab.network == "host":
        yield from mtus(by_name)


def mtus(hosts: Mapping[str, Examination]) -> Iterator[Finding]:
    """Of the interfaces that the hosts talk to each other by."""
    found = {name: one.read(f"sys/class/net/{one.here.interface}/mtu") for name, one in hosts.items()}
    usual = common(found)

    def fix(host: str) -> str:
        place = hosts[host].place
        return place.there(f"{place.sudo}ip link set dev {hosts[host].here.interface} mtu {usual}")

    why = "large packets of one host are lost on their way to another: a run begins, and then stands still"
    yield from odd("LAB-NET-008", "MTU", found, why, fix)


def odd(code: str, what: str, told: Mapping[str, str | None], why: str, fix: Callable[[str], str]) -> Iterator[Finding]:
    """A warning for each host that is not as most are, of those that tell."""
    found = {host: value for host, value in told.items() if value}
    usual = common(found)
    different = {host: value for host, value in found.items() if value != usual}
    for host, value in different.items():
        seen = f"{what} {short(value)}, and {short(usual)} on {len(found) - len(different)} of {len(found)} hosts"
        yield warn(code, seen, why=why, fix=fix(host), node=host)
    if len(found) > 1 and not different:
        yield ok(code, f"{what} {short(usual)} on all {len(found)} hosts")


def common(found: Mapping[str, str]) -> str:
    """The value that most have; of several, that of the first host."""
    values = Counter(found.values()).most_common(1)
    return values[0][0] if values else ""


def short(value: str) -> str:
    return value.removeprefix("sha256:")[:12] if value.startswith("sha256:") else value

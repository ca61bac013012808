"""Interface and address by which each host reaches the others, computed from the hosts' routing tables. IPv4 only.

No packet is sent: the tables tell what the kernel would do with a packet to each of the others.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from itertools import count

from msgspec import Struct

from labctl.errors import ConfigError, HostError

_INNER = re.compile(r"lo|docker0|docker_gwbridge|br-[0-9a-f]{12}|veth.*")
"""Loopback and Docker's interfaces for containers; not a user's bridge such as ``br-lan``."""
_GATEWAY = 0x2
"""Flag RTF_GATEWAY of linux/route.h."""
_EVERY = (1 << 32) - 1


class Route(Struct, frozen=True):
    """A line of /proc/net/route: packets to addresses ``first`` to ``last``, as numbers, leave by the interface."""

    interface: str
    """Empty if the kernel rejects the packets."""
    first: int
    last: int
    metric: int
    gateway: bool


class Network(Struct, frozen=True, kw_only=True):
    """A host's interfaces, addresses and routes as the host reports them."""

    interfaces: tuple[str, ...] = ()
    addresses: tuple[tuple[str, str], ...] = ()
    """Pairs of interface and IPv4 address; the first address of an interface is its source address."""
    routes: tuple[Route, ...] = ()
    reached: str = ""
    """The address at which ssh reached it."""
    reached_by: str = ""
    """Interface of this address; empty if none has it."""

    @property
    def usable(self) -> dict[str, str]:
        """First address of each interface that has one, except loopback and Docker's own."""
        first_addresses: dict[str, str] = {}
        for name, address in self.addresses:
            if not _INNER.fullmatch(name):
                first_addresses.setdefault(name, address)
        return first_addresses


class ClusterMember(Struct, frozen=True, kw_only=True):
    """A host of the cluster; ``iface`` is set by the inventory at ``where``, a ``file:line``."""

    name: str
    network: Network
    iface: str = ""
    where: str = ""


class Endpoint(Struct, frozen=True):
    """Interface and address by which a host exchanges packets with the others."""

    interface: str
    address: str


# --- reading ---------------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[Route, ...]:
    """Parse /proc/net/route, whose numbers are in the machine's byte order: little-endian."""
    routes = []
    for line in text.splitlines()[1:]:
        if len(fields := line.split()) < 8:
            continue
        interface, destination, _, flags, _, _, metric, netmask = fields[:8]
        first, mask = (int.from_bytes(bytes.fromhex(number), "little") for number in (destination, netmask))
        gateway = bool(int(flags, 16) & _GATEWAY)
        routes.append(Route(interface.strip("*"), first, first | (_EVERY ^ mask), int(metric), gateway))
    return tuple(routes)


def default_interface(routes: Collection[Route]) -> str:
    """Return the interface of the default route through a gateway with the lowest metric; empty without one."""
    default = [route for route in routes if route.last - route.first == _EVERY and route.gateway]
    return min(default, key=lambda route: route.metric).interface if default else ""


def addresses(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``ip -o -4 addr show`` into pairs of interface and address."""
    return tuple(re.findall(r"^\d+: +([^\s@:]{1,15})\S* +inet ([0-9.]+)", text, re.MULTILINE))


def local_addresses(trie: str, routes: Collection[Route]) -> tuple[tuple[str, str], ...]:
    """Parse /proc/net/fib_trie into pairs of interface and address; an address that no direct route holds is left out.

    The file names no interfaces: an address's interface is the one whose network holds it.
    """
    local = re.findall(r"\|-- ([0-9.]+)\n(?: +/\d+ .*\n)*? +/32 host LOCAL", trie)
    direct = [route for route in routes if not route.gateway]
    taken = {address: next(interfaces(direct, [int(IPv4Address(address))]))[0] for address in local}
    return tuple((interface, address) for address, interface in taken.items() if interface)


def reached(connection: str, addresses: Collection[tuple[str, str]], inet6: str) -> tuple[str, str]:
    """Return a host's address in an SSH_CONNECTION, and its interface, each "" if unknown.

    ``inet6`` is the text of /proc/net/if_inet6.
    """
    parts = connection.split()
    address = parts[2].partition("%")[0].removeprefix("::ffff:") if len(parts) > 2 else ""
    if ":" not in address:
        return address, next((interface for interface, assigned in addresses if assigned == address), "")
    digits = f"{int(IPv6Address(address)):032x}"
    lines = (line.split() for line in inet6.splitlines())
    return address, next((fields[-1] for fields in lines if fields and fields[0] == digits), "")


# --- choosing --------------------------------------------------------------------------------------------------


def endpoints(members: Sequence[ClusterMember]) -> tuple[Endpoint, ...]:
    """Return each host's interface and address towards all others, ``iface=`` first. ConfigError or HostError if none.

    The others' addresses are at first those that ssh reached. A host that ssh reached from outside may have another
    address among the hosts, so the result is checked by a second pass. Raises ConfigError for an ``iface=`` that is not
    found, HostError if no interface leads to all the others.
    """
    assumed = _distinct(members, tuple(_asked(member) if member.iface else _met(member) for member in members))
    routed = _distinct(members, _leaving(members, assumed))
    for member, endpoint, again in zip(members, routed, _leaving(members, routed), strict=True):
        if endpoint != again:
            raise _unroutable(
                member,
                f"reaches the addresses that ssh used by {endpoint.interface}, but the hosts' own addresses by "
                f"{again.interface}: both must use the same interface",
            )
    return routed


def _asked(member: ClusterMember) -> Endpoint:
    """Return the endpoint that ``iface=`` sets. ConfigError if the interface is unusable."""
    if address := member.network.usable.get(member.iface):
        return Endpoint(member.iface, address)
    exists = member.iface in member.network.interfaces
    reason = "has no IPv4 address" if exists else "does not exist"
    if _INNER.fullmatch(member.iface):
        reason = "leads to no other host"
    where = f"{member.where}: " if member.where else ""
    raise ConfigError(
        f"{where}iface={member.iface}: on {member.name} it {reason}",
        hint=f"{member.name} has {_has(member)}",
        node=member.name,
    )


def _met(member: ClusterMember) -> Endpoint:
    """Return the endpoint that ssh reached, else the default route's, else the only one. HostError without any."""
    network, usable = member.network, member.network.usable
    likely = (network.reached_by, default_interface(network.routes), *(usable if len(usable) == 1 else ()))
    interface = next((name for name in likely if name in usable), "")
    if not interface:
        raise HostError(
            f"cannot tell by which address the other hosts reach {member.name}: ssh reached it at "
            f"{network.reached or 'an unknown address'}, and it has no default route",
            hint=_advice(member),
            node=member.name,
        )
    direct = (interface, network.reached) in network.addresses
    return Endpoint(interface, network.reached if direct else usable[interface])


def _leaving(members: Sequence[ClusterMember], assumed: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return each host's endpoint towards the others' ``assumed`` ones; its own with ``iface=``. HostError if none."""
    names = {int(IPv4Address(endpoint.address)): member.name for member, endpoint in zip(members, assumed, strict=True)}
    numbers = sorted(names)
    return tuple(
        endpoint if member.iface or len(members) == 1 else _way_out(member, endpoint, numbers, names)
        for member, endpoint in zip(members, assumed, strict=True)
    )


def _way_out(member: ClusterMember, endpoint: Endpoint, numbers: Sequence[int], names: dict[int, str]) -> Endpoint:
    """Return the one endpoint by which a host reaches the addresses. HostError if there is none, or several."""
    own_number = int(IPv4Address(endpoint.address))
    taken = dict(interfaces(member.network.routes, [number for number in numbers if number != own_number]))
    called = {name: f"{names[number]} ({IPv4Address(number)})" for name, number in taken.items()}
    if "" in taken:
        raise _unroutable(member, f"has no route to {called['']}")
    if inner := next(filter(_INNER.fullmatch, taken), ""):
        raise HostError(
            f"{member.name} would route to {called[inner]} through {inner}, a network of its own containers",
            hint=f"on {member.name}: docker network ls; remove the network, or give it other addresses",
            node=member.name,
        )
    if len(taken) > 1:
        each = ", ".join(f"{member} by {name}" for name, member in called.items())
        raise _unroutable(member, f"reaches the other hosts by different interfaces, {each}: collectives need one")
    (interface,) = taken
    if interface == endpoint.interface:
        return endpoint
    if interface not in member.network.usable:
        raise _unroutable(member, f"reaches the other hosts by {interface}, which has no IPv4 address")
    return Endpoint(interface, member.network.usable[interface])


def interfaces(routes: Collection[Route], numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield each interface by which packets to these sorted addresses leave, with one of them; "" without a route.

    As the kernel does: the longest prefix that matches, then the lowest metric.
    """
    left = list(numbers)
    for route in sorted(routes, key=lambda route: (route.last - route.first, route.metric)):
        begin, end = bisect_left(left, route.first), bisect_right(left, route.last)
        if begin < end:
            yield route.interface, left[begin]
            del left[begin:end]
    if left:
        yield "", left[0]


def _distinct(members: Sequence[ClusterMember], endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Return the endpoints; raise HostError if two members have the same address."""
    owners: dict[str, ClusterMember] = {}
    for member, endpoint in zip(members, endpoints, strict=True):
        first = owners.setdefault(endpoint.address, member)
        if first is not member:
            raise HostError(
                f"{first.name} and {member.name} both have the address {endpoint.address}: one host under two names, "
                "or a network that each has for itself",
                hint=f"name a host once; {_advice(member)}",
                node=member.name,
            )
    return endpoints


def _unroutable(member: ClusterMember, problem: str) -> HostError:
    """Return a HostError about a member's routes, with the hint to write ``iface=``."""
    return HostError(f"{member.name} {problem}", hint=_advice(member), node=member.name)


def _advice(member: ClusterMember) -> str:
    """Return the hint to write ``iface=`` in the inventory, with the member's interfaces."""
    return f"write iface= for {member.name} at {member.where or 'its line'}; it has {_has(member)}"


def _has(member: ClusterMember) -> str:
    """Describe a host's interfaces that may lead to others, with their addresses."""
    usable = member.network.usable
    outer = (name for name in member.network.interfaces if not _INNER.fullmatch(name))
    names = dict.fromkeys((*usable, *outer))
    return ", ".join(f"{name} ({usable.get(name, 'no IPv4 address')})" for name in names) or "no interface"


def free_port(after: int, busy: Collection[int]) -> int:
    """Return the first TCP port above ``after`` that is not ``busy``; from 20000 on if ``after`` >= 65000."""
    return next(number for number in count(after + 1 if after < 65000 else 20000) if number not in busy)

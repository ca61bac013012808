"""Choice of the interface between hosts, from routing tables as hosts of a rack have them."""

from __future__ import annotations

import time
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from labctl.errors import ConfigError, LabError
from labctl.system import routing
from labctl.system.routing import ClusterMember, Endpoint, Network

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
# Of a machine with Docker, as its kernel wrote it.
RECORDED = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010200C0	0003	0	0	100	00000000	0	0	0
wlan0	00000000	010200C0	0003	0	0	600	00000000	0	0	0
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
br-62771fbbef76	000019AC	00000000	0001	0	0	0	0000FFFF	0	0	0
eth0	000200C0	00000000	0001	0	0	100	00FFFFFF	0	0	0
*	0000000A	00000000	0201	0	0	0	000000FF	0	0	0
"""
TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 192.0.2.0/24 2 0 2
        |-- 192.0.2.2
           /31 link UNICAST
           /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
Local:
  +-- 192.0.2.0/24 2 0 2
     |-- 192.0.2.2
        /32 host LOCAL
"""
IP = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: bond0    inet 10.0.0.5/24 brd 10.0.0.255 scope global bond0\\       valid_lft forever preferred_lft forever
2: bond0    inet 10.0.0.77/24 scope global secondary bond0:1\\       valid_lft forever preferred_lft forever
7: ppp0    inet 10.9.0.1 peer 10.9.0.2/32 scope global ppp0\\       valid_lft forever preferred_lft forever
9: bond0.100@bond0    inet 10.1.0.5/24 brd 10.1.0.255 scope global bond0.100\\       valid_lft forever
"""


def table(*lines: str) -> tuple[routing.Route, ...]:
    """Return routes of lines such as ``eth0 10.0.0.0/24``, or ``eth0 default 100`` with a metric."""
    text = HEAD
    for line in lines:
        name, where, *metric = line.split()
        network = IPv4Network("0.0.0.0/0" if where == "default" else where)
        first, mask = (f"{int.from_bytes(a.packed, 'little'):08X}" for a in (network.network_address, network.netmask))
        gateway, flags = ("0100000A", "0003") if metric else ("00000000", "0001")
        text += f"{name}\t{first}\t{gateway}\t{flags}\t0\t0\t{metric[0] if metric else 0}\t{mask}\t0\t0\t0\n"
    return routing.parse(text)


def peer(name: str, *addresses: str, ssh: str = "", iface: str = "", more: tuple[str, ...] = ()) -> ClusterMember:
    """Build a host with addresses such as ``eth0 10.0.0.5/24`` and their routes; ssh reached the first by default."""
    pairs = tuple((word[0], word[1].partition("/")[0]) for word in map(str.split, addresses))
    direct = (f"{word[0]} {IPv4Network(word[1], strict=False)}" for word in map(str.split, addresses))
    ssh = ssh or pairs[0][1]
    network = Network(
        interfaces=tuple(dict.fromkeys(("lo", "docker0", *(interface for interface, _ in pairs)))),
        addresses=(("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), *pairs),
        routes=table(*direct, "docker0 172.17.0.0/16", *more),
        reached=ssh,
        reached_by=next((interface for interface, address in pairs if address == ssh), ""),
    )
    return ClusterMember(name=name, network=network, iface=iface, where=f"hosts.txt:{name.rpartition('-')[2]}")


def rack(count: int, *patterns: str, **changes: object) -> list[ClusterMember]:
    """Build hosts ``gpu-0`` and so on; ``{}`` in their addresses is the host's number plus 10."""
    made = [peer(f"gpu-{i}", *(pattern.format(i + 10) for pattern in patterns)) for i in range(count)]
    return [replace(member, **changes) for member in made]


def failure(peers: list[ClusterMember]) -> LabError:
    """Return the LabError that choosing endpoints raises."""
    with pytest.raises(LabError) as caught:
        routing.endpoints(peers)
    return caught.value


# --- reading -------------------------------------------------------------------------------------------------


def test_the_default_route_is_the_one_of_the_lowest_metric() -> None:
    """Ask for the default interface: that of the lowest metric, "" without routes."""
    assert routing.default_interface(routing.parse(RECORDED)) == "eth0"
    assert routing.default_interface(routing.parse("")) == ""


@pytest.mark.parametrize(
    ("address", "interface"),
    [("192.0.2.9", "eth0"), ("8.8.8.8", "eth0"), ("172.17.4.4", "docker0"), ("172.25.0.9", "br-62771fbbef76"),
     ("10.2.3.4", "")],
)  # fmt: skip
def test_a_recorded_table_sends_addresses_where_the_kernel_does(address: str, interface: str) -> None:
    """Look addresses up in a recorded table: the kernel's interface, "" for an unreachable one."""
    number = int(IPv4Address(address))
    assert list(routing.interfaces(routing.parse(RECORDED), [number])) == [(interface, number)]


def test_addresses_are_told_by_ip() -> None:
    """Parse `ip address`: interface and IPv4 address of each line."""
    assert routing.addresses(IP) == (
        ("lo", "127.0.0.1"),
        ("bond0", "10.0.0.5"),
        ("bond0", "10.0.0.77"),
        ("ppp0", "10.9.0.1"),
        ("bond0.100", "10.1.0.5"),
    )


def test_a_name_of_a_million_letters_takes_no_time() -> None:
    """Parse a line of a million letters: below 1 s of processor time."""
    began = time.process_time()
    assert routing.addresses(f"1: {'a' * 1_000_000}\n2: eth0 inet 10.0.0.5/24\n") == (("eth0", "10.0.0.5"),)
    assert time.process_time() - began < 1


def test_without_ip_the_kernels_own_tables_tell_them() -> None:
    """Read addresses from fib_trie: the local ones but loopback."""
    assert routing.local_addresses(TRIE, routing.parse(RECORDED)) == (("eth0", "192.0.2.2"),)


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("192.0.2.7 51000 10.0.0.5 22", ("10.0.0.5", "bond0")),
        ("::ffff:192.0.2.7 51000 ::ffff:10.0.0.5 22", ("10.0.0.5", "bond0")),
        ("fe80::1%bond0 51000 fe80::d250:99ff:fe0a:1%bond0 22", ("fe80::d250:99ff:fe0a:1", "bond0")),
        ("192.0.2.7 51000 203.0.113.5 22", ("203.0.113.5", "")),
        ("", ("", "")),
    ],
    ids=["IPv4", "mapped", "IPv6", "translated", "untold"],
)
def test_the_address_that_ssh_reached_is_found_among_the_hosts_own(connection: str, address: tuple[str, str]) -> None:
    """Find the address that ssh reached: with its interface, "" if it is not the host's own."""
    inet6 = "00000000000000000000000000000001 01 80 10 80 lo\nfe80000000000000d25099fffe0a0001 02 40 20 80 bond0\n"
    assert routing.reached(connection, routing.addresses(IP), inet6) == address


# --- choosing ------------------------------------------------------------------------------------------------


def test_hosts_of_one_network_meet_on_it() -> None:
    """Choose for 16 hosts of a network: its interface and addresses."""
    assert routing.endpoints(rack(16, "eno1 10.0.0.{}/24")) == tuple(
        Endpoint("eno1", f"10.0.0.{i + 10}") for i in range(16)
    )


@pytest.mark.parametrize("interface", ["bond0", "bond0.100", "enp65s0f0np0", "br-lan", "vmbr0"])
def test_an_interface_of_any_kind_that_people_made_counts(interface: str) -> None:
    """Choose for bonds, VLANs and bridges: that interface."""
    peers = rack(4, f"{interface} 10.0.0.{{}}/24", "usb0 169.254.3.1/24")
    assert {way.interface for way in routing.endpoints(peers)} == {interface}


def test_hosts_may_call_their_interfaces_differently() -> None:
    """Choose for hosts with other interface names: each its own."""
    peers = [peer("a", "eno1 10.0.0.1/24"), peer("b", "enp5s0 10.0.0.2/24")]
    assert [way.interface for way in routing.endpoints(peers)] == ["eno1", "enp5s0"]


def test_the_longest_prefix_wins_and_then_the_lowest_metric() -> None:
    """Choose between routes: the longest prefix, then the lowest metric."""
    more = ("eth1 default 50", "eth0 default 600")
    peers = [
        peer("a", "eth0 10.0.0.1/16", "eth1 10.0.1.1/24", ssh="10.0.1.1", more=more),
        peer("b", "eth1 10.0.1.2/24"),
    ]
    assert routing.endpoints(peers)[0] == Endpoint("eth1", "10.0.1.1")
    far = [peer("a", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", more=more), peer("b", "eth0 10.7.0.2/24", more=more[1:])]
    assert routing.endpoints(far) == (Endpoint("eth1", "10.1.0.1"), Endpoint("eth0", "10.7.0.2"))


def test_what_is_asked_for_stands_and_the_others_follow_it() -> None:
    """Choose with iface= on some hosts: the others use the same network."""
    peers = rack(16, "eno1 10.0.0.{}/24", "ib0 10.8.0.{}/24", iface="ib0")
    assert routing.endpoints(peers) == tuple(Endpoint("ib0", f"10.8.0.{i + 10}") for i in range(16))
    assert routing.endpoints([*peers[:-1], replace(peers[-1], iface="")])[-1] == Endpoint("ib0", "10.8.0.25")


def test_a_master_reached_from_outside_meets_the_others_inside() -> None:
    """Choose for a master that was reached from outside: the inner network for all."""
    master = peer("a-1", "eth1 203.0.113.5/24", "eth0 10.0.0.1/24", more=("eth1 default 0",))
    workers = [peer(f"b-{i}", f"eth0 10.0.0.{i}/24", more=("eth0 default 0",)) for i in (2, 3)]
    assert [(way.interface, way.address) for way in routing.endpoints([master, *workers])] == [
        ("eth0", "10.0.0.1"),
        ("eth0", "10.0.0.2"),
        ("eth0", "10.0.0.3"),
    ]


@pytest.mark.parametrize("ssh", ["127.0.0.1", "::1", "172.17.0.1", "203.0.113.9"])
def test_where_ssh_went_a_way_that_others_cannot_the_default_route_tells(ssh: str) -> None:
    """Choose for a host reached at an unusable address: its default route's interface."""
    here = peer("a", "eth9 10.9.0.1/24", "eth0 10.0.0.1/24", ssh=ssh, more=("eth0 default 0",))
    assert routing.endpoints([here, peer("b", "eth0 10.0.0.2/24")])[0] == Endpoint("eth0", "10.0.0.1")


def test_a_rack_without_a_way_out_has_its_only_network() -> None:
    """Choose without default routes: the only common network."""
    peers = [peer("a", "eth0 10.0.0.1/24", ssh="127.0.0.1"), peer("b", "eth0 10.0.0.2/24")]
    assert routing.endpoints(peers)[0] == Endpoint("eth0", "10.0.0.1")


def test_a_host_alone_needs_no_route() -> None:
    """Choose for one host: its own address."""
    assert routing.endpoints(rack(1, "eth0 10.0.0.{}/24")) == (Endpoint("eth0", "10.0.0.10"),)


# --- what cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iface", "reason"),
    [("ib7", "does not exist"), ("eth2", "has no IPv4 address"), ("docker0", "leads to no other host"),
     ("lo", "leads to no other host")],
)  # fmt: skip
def test_an_interface_that_is_not_to_be_had_is_named_with_its_line(iface: str, reason: str) -> None:
    """Ask for an unusable iface=: ConfigError with its line, the hint lists the host's interfaces."""
    peers = rack(3, "eth0 10.0.0.{}/24", "eth1 10.1.0.{}/24")
    network = replace(peers[1].network, interfaces=(*peers[1].network.interfaces, "eth2"))
    error = failure([peers[0], replace(peers[1], iface=iface, network=network), peers[2]])
    assert isinstance(error, ConfigError)
    assert error.message == f"hosts.txt:1: iface={iface}: on gpu-1 it {reason}"
    assert error.hint == "gpu-1 has eth0 (10.0.0.11), eth1 (10.1.0.11), eth2 (no IPv4 address)"


def test_different_interfaces_to_different_hosts_are_told_apart() -> None:
    """Choose for a host that reaches others by two interfaces: error names both, the hint iface=."""
    a = peer("a-1", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24")
    error = failure([a, peer("b-2", "eth0 10.0.0.2/24"), peer("c-3", "eth0 10.1.0.3/24")])
    assert (error.kind, error.node) == ("environment", "a-1")
    assert "b-2 (10.0.0.2) by eth0, c-3 (10.1.0.3) by eth1" in error.message
    assert error.hint == "write iface= for a-1 at hosts.txt:1; it has eth0 (10.0.0.1), eth1 (10.1.0.1)"


def test_a_host_that_another_has_no_route_to_is_named() -> None:
    """Choose without a route: the error names both hosts."""
    error = failure([peer("a", "eth0 10.0.0.1/24"), peer("b", "eth0 10.5.0.2/24")])
    assert error.message == "a has no route to b (10.5.0.2)"


def test_a_network_of_containers_that_hides_a_host_is_named() -> None:
    """Choose where a Docker network covers a host's address: the error names the bridge."""
    peers = [peer("a", "eth0 10.0.0.1/24", more=("br-0123456789ab 10.0.0.128/25",)), peer("b", "eth0 10.0.0.200/24")]
    error = failure(peers)
    assert error.message.startswith("a would route to b (10.0.0.200) through br-0123456789ab")
    assert "docker network ls" in error.hint


def test_one_address_on_two_hosts_joins_none() -> None:
    """Choose for hosts with the same address: the error names both."""
    # As every machine of VirtualBox has it on its first interface.
    error = failure(rack(3, "eth0 10.0.2.15/24", "eth1 192.168.56.{}/24"))
    assert error.message.startswith("gpu-0 and gpu-1 both have the address 10.0.2.15")
    assert "eth1 (192.168.56.11)" in error.hint


def test_a_host_that_cannot_be_placed_is_asked_for_its_interface() -> None:
    """Choose for a host of two networks that ssh reached at 127.0.0.1: the hint is iface=."""
    error = failure([peer("a", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", ssh="127.0.0.1"), peer("b", "eth0 10.0.0.2/24")])
    assert "ssh reached it at 127.0.0.1" in error.message
    assert error.hint.startswith("write iface= for a")


def test_networks_that_contradict_each_other_are_refused() -> None:
    """Choose where routes contradict each other: the error names both interfaces."""
    # By where ssh reached b, a leaves by eth0; by where a and b then say they are, by eth1.
    a = peer("a", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24")
    b = peer("b", "eth0 10.0.0.2/24", "eth1 10.1.0.2/24", more=("eth1 10.0.0.1/32",))
    error = failure([a, b])
    assert "by eth0" in error.message
    assert "by eth1" in error.message


# --- figures -------------------------------------------------------------------------------------------------


@given(
    prefixes=st.lists(st.tuples(st.integers(0, 255), st.integers(24, 32), st.integers(0, 2)), max_size=12),
    lasts=st.sets(st.integers(0, 255), max_size=20),
    chosen=st.integers(0, 255),
)
def test_every_address_leaves_by_the_route_that_fits_it_best(
    prefixes: list[tuple[int, int, int]], lasts: set[int], chosen: int
) -> None:
    """Look any addresses up in any routes: longest prefix, then lowest metric."""
    networks = [(IPv4Network((f"10.0.0.{n}", length), strict=False), metric) for n, length, metric in prefixes]
    lines = [f"eth{i} {network} {metric}" for i, (network, metric) in enumerate(networks)]
    expected = {
        next(
            (
                f"eth{i}"
                for i, (network, _) in sorted(
                    enumerate(networks), key=lambda entry: (-entry[1][0].prefixlen, entry[1][1])
                )
                if IPv4Address(f"10.0.0.{last}") in network
            ),
            "",
        )
        for last in lasts - {chosen}
    }
    numbers = sorted(int(IPv4Address(f"10.0.0.{last}")) for last in lasts - {chosen})
    interfaces = routing.interfaces(table(*lines), numbers)
    assert {name for name, _ in interfaces} == expected


def test_a_thousand_hosts_with_full_tables_take_less_than_a_second() -> None:
    """Choose for 1000 hosts with 60 routes more each: below 1 s of processor time."""
    more = ("eth0 default 100", *(f"cali{i} 10.244.0.{i}/32" for i in range(60)))
    peers = [peer(f"gpu-{i}", f"eth0 10.0.{i // 250}.{i % 250 + 1}/16", more=more) for i in range(1000)]
    began = time.process_time()
    assert len(routing.endpoints(peers)) == 1000
    assert time.process_time() - began < 1

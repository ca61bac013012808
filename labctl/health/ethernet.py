"""Ethernet links of a node's network cards: carrier, speed, duplex, MTU, flaps and broken packets.

Sources: Documentation/ABI/testing/sysfs-class-net and sysfs-class-net-statistics of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject, shown
from labctl.health.processor import LAPTOPS
from labctl.health.rules import grown, less_than_neighbours, unlike_neighbours
from labctl.system import routing
from labctl.system.hostdump import HostDump

INTERFACES = "sys/class/net"
SCRIPT = """\
text proc/net/route
set -- sys/power/suspend_stats/success sys/class/dmi/id/chassis_type
for interface in sys/class/net/*; do
    case ${interface##*/} in
    lo | veth*) continue ;;
    esac
    set -- "$@" "$interface/mtu"
    # Neither a bridge or the like, nor wireless, nor a virtual function.
    [ -e "$interface/device" ] && [ ! -e "$interface/phy80211" ] && [ ! -e "$interface/device/physfn" ] || continue
    set -- "$@" "$interface/type" "$interface/addr_assign_type" "$interface/address" "$interface/flags" \\
        "$interface/carrier" "$interface/speed" "$interface/duplex" "$interface/carrier_changes" \\
        "$interface/statistics/rx_crc_errors"
done
lines "$@"
printf 'fact network drivers\\n'
grep -s '^DRIVER=' /dev/null sys/class/net/*/device/uevent | body
"""
_ETHERNET = "1"
"""ARPHRD_ETHER of linux/if_arp.h; IPoIB, whose ports are a subject of their own, has 32."""
_UP = 0x1
"""IFF_UP of linux/if.h."""
_PERMANENT = "0"
"""NET_ADDR_PERM of linux/netdevice.h: the card's own address."""
LINKLESS = frozenset(
    (
        *("virtio_net", "vmxnet3", "hv_netvsc", "vif", "ena", "gve"),
        *("cdc_ether", "cdc_eem", "cdc_ncm", "cdc_mbim", "cdc_subset", "rndis_host", "ipheth"),
    )
)
"""Drivers of interfaces of a virtual machine, and of USB devices that a host sees as a network, such as a server's
management controller: they have no link whose carrier, speed and duplex mean anything. Source: the names of the
drivers below drivers/net of the kernel (``vif`` is Xen's, ``ena`` Amazon's, ``gve`` Google's)."""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the readings of each Ethernet port, and the MTU of the default route's interface."""
    drivers = _drivers(dump.facts.get("network drivers", ""))
    default = routing.default_interface(routing.parse(dump.files.get("proc/net/route", "")))
    for name in _names(dump):
        if _is_port(dump, name) and drivers.get(name) not in LINKLESS:
            yield from _facts(dump, name, drivers.get(name, ""))
            yield from _of_port(dump, name)
        elif name == default:
            yield from _mtu(dump, name)


def _names(dump: HostDump) -> list[str]:
    """Return the names of the interfaces that the script printed."""
    paths = (re.fullmatch(rf"{INTERFACES}/([^/]+)/mtu", path) for path in dump.files)
    return sorted(match[1] for match in paths if match)


def _is_port(dump: HostDump, name: str) -> bool:
    """Tell if an interface is an Ethernet port of hardware, of which alone the script prints the type."""
    return _text(dump, name, "type") == _ETHERNET


def _drivers(text: str) -> dict[str, str]:
    """Parse lines such as ``sys/class/net/eth0/device/uevent:DRIVER=ixgbe`` into drivers by interface."""
    return dict(re.findall(rf"^{INTERFACES}/([^/\n]+)/device/uevent:DRIVER=(\S+)", text, re.MULTILINE))


def _text(dump: HostDump, interface: str, file: str) -> str:
    """Return the text of an interface's file; empty if it cannot be read, as most without a carrier."""
    return dump.files.get(f"{INTERFACES}/{interface}/{file}", "").strip()


def _reading(
    interface: str,
    name: str,
    value: int | str,
    file: str,
    kind: Literal["fact", "state", "counter"] = "state",
    unit: str = "",
) -> Reading:
    """Build a reading of an interface's file."""
    source = f"/{INTERFACES}/{interface}/{file}"
    return Reading(name=name, value=value, source=source, item=interface, kind=kind, unit=unit)


def _facts(dump: HostDump, name: str, driver: str) -> Iterator[Reading]:
    """Yield the driver, and the card's own address; that of a bond's port is the bond's."""
    if driver:
        yield _reading(name, "driver", driver, "device/uevent", "fact")
    if _text(dump, name, "addr_assign_type") == _PERMANENT and _text(dump, name, "address"):
        yield _reading(name, "MAC address", _text(dump, name, "address"), "address", "fact")


def _of_port(dump: HostDump, name: str) -> Iterator[Reading]:
    """Yield the state and the counters of a port; speed, duplex and MTU only of one with a carrier."""
    link = _link(dump, name)
    if not link:
        return
    yield _reading(name, "link", link, "carrier")
    # Each sleep of the machine takes its links down.
    if _text_of(dump, "sys/power/suspend_stats/success") in ("", "0"):
        yield from _counter(dump, name, "carrier_changes", "carrier_changes")
    yield from _counter(dump, name, "rx_crc_errors", "statistics/rx_crc_errors")
    if link != "up":
        return
    yield from _mtu(dump, name)
    speed, duplex = _text(dump, name, "speed"), _text(dump, name, "duplex")
    # -1 is unknown.
    if speed.isdecimal() and int(speed):
        yield _reading(name, "speed", int(speed), "speed", unit="Mb/s")
        yield _reading(name, "duplex", duplex, "duplex")


def _link(dump: HostDump, name: str) -> str:
    """Return ``up``, ``down`` if there is no carrier, ``turned off`` by a person; empty if unknown.

    A laptop without a carrier is ``unplugged``: its cable comes and goes, and it may have another network.
    """
    flags = _text(dump, name, "flags")
    if flags and not int(flags, 16) & _UP:
        return "turned off"
    is_laptop = _text_of(dump, "sys/class/dmi/id/chassis_type") in LAPTOPS
    return {"1": "up", "0": "unplugged" if is_laptop else "down"}.get(_text(dump, name, "carrier"), "")


def _counter(dump: HostDump, interface: str, name: str, file: str) -> Iterator[Reading]:
    """Yield a counter if the kernel has it."""
    text = _text(dump, interface, file)
    if text.isdecimal():
        yield _reading(interface, name, int(text), file, "counter")


def _mtu(dump: HostDump, name: str) -> Iterator[Reading]:
    """Yield the MTU of an interface."""
    text = _text(dump, name, "mtu")
    if text.isdecimal():
        yield _reading(name, "MTU", int(text), "mtu")


def _text_of(dump: HostDump, path: str) -> str:
    """Return the text of a file; empty if the host does not have it."""
    return dump.files.get(path, "").strip()


# --- checks ----------------------------------------------------------------------------------------------------


def not_up(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a link that is not up if it was before, or if those of the same name on most neighbours are.

    A port without a cable is usual, thus a single neighbour makes it a remark, as does a port that a person turned off,
    or unplugged from a laptop.
    """
    if reading.value == "up":
        return None
    level: Literal["bad", "remark"] = "bad" if reading.value == "down" else "remark"
    if evidence.same_boot and evidence.before == "up":
        return Answer(level, f"link is {reading.value}, up before")
    answer = unlike_neighbours(reading, evidence)
    places = [place for place, value in evidence.neighbours if value == "up"]
    if not answer or len(places) * 2 <= len(evidence.neighbours):
        return None
    return Answer(level if len(places) > 1 else "remark", answer.text)


def slower(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a speed below the neighbours', or as a remark below the one before: it may be another cable or switch."""
    if answer := less_than_neighbours(reading, evidence):
        return answer
    before = evidence.before if evidence.same_boot else None
    if not isinstance(before, int) or not isinstance(reading.value, int) or reading.value >= before:
        return None
    return Answer("remark", f"speed {reading.text()}, {before} before")


def half_duplex(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge half duplex as bad: one of the two ends does not negotiate, which makes collisions."""
    return Answer("bad", "half duplex") if reading.value == "half" else None


def grew_at_all(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge the growth of a counter as a remark, above the limit as bad."""
    growth = grown(reading.value, evidence.before) if evidence.same_boot else 0
    if not growth:
        return None
    return Answer("bad" if growth > (evidence.limit or 0) else "remark", f"{reading.name} +{shown(growth)}")


def queue_hung(match: re.Match[str]) -> Answer:
    """Judge a card that stopped sending, and that its driver resets, as bad."""
    return Answer("bad", f"stopped sending: {match[3]} timed out", match[1])


_CABLE = "replug or change the cable or transceiver of {item}, then try another port of the switch"
_LINK_STEPS = ("{sudo}ethtool {item}", "{sudo}ethtool --module-info {item}", _CABLE)

SUBJECT = Subject(
    name="Ethernet",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(name="ethernet-link", reading="link", judge=not_up, steps=("{sudo}ip link set {item} up", *_LINK_STEPS)),
        Check(name="ethernet-speed", reading="speed", judge=slower, steps=_LINK_STEPS),
        Check(
            name="ethernet-duplex",
            reading="duplex",
            judge=half_duplex,
            steps=("turn autonegotiation on at both ends: {sudo}ethtool -s {item} autoneg on", *_LINK_STEPS),
        ),
        Check(
            name="ethernet-mtu",
            reading="MTU",
            judge=unlike_neighbours,
            steps=("set it as on the other nodes: {sudo}ip link set {item} mtu VALUE",),
        ),
        # The carrier changes twice when a link goes down and comes back (carrier_up_count and carrier_down_count of
        # sysfs-class-net): once may be a person at the cable, more are a link that flaps. NVSentinel has the
        # same limit (docs/designs/046-link-counter-detection.md).
        Check(
            name="ethernet-flaps",
            reading="carrier_changes",
            judge=grew_at_all,
            limit=2,
            bad_in_run=True,
            steps=("{sudo}dmesg | grep {item}", *_LINK_STEPS),
        ),
        # A packet with a wrong checksum came over a bad cable or transceiver, though a few may (IEEE 802.3 allows one
        # wrong bit in 10^12).
        Check(
            name="ethernet-crc",
            reading="rx_crc_errors",
            judge=grew_at_all,
            limit=100,
            steps=("{sudo}ethtool --statistics {item} | grep -i -e crc -e err", *_LINK_STEPS),
        ),
    ),
    lines=(
        # Source: dev_watchdog() of net/sched/sch_generic.c.
        LineCheck(
            name="ethernet-hang",
            pattern=r"NETDEV WATCHDOG: ([^ ]+) [(]([^)]*)[)]: (transmit queue [0-9]+) timed out",
            judge=queue_hung,
            steps=("{sudo}ethtool -i {item}", "update the card's driver and firmware", "restart the node"),
        ),
    ),
)

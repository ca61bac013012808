"""InfiniBand and RoCE ports: state, rate, link errors, and what GPUDirect needs.

Sources: Documentation/ABI/stable/sysfs-class-infiniband of the kernel; for what the counters mean,
docs/designs/046-link-counter-detection.md of NVSentinel, of which hw_counters are left out here: those grow
where the program at the other end ends or the network is full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import structs

from labctl.health.model import Answer, Check, Evidence, Judge, LineCheck, Reading, Subject, shown
from labctl.health.rules import grew, less_than_neighbours, remark_grew, unlike_neighbours
from labctl.system.hostdump import HostDump

ADAPTERS = "sys/class/infiniband"
SCRIPT = """\
set --
adapters=
for adapter in sys/class/infiniband/*; do
    # Neither one in software, such as rxe, nor a virtual function.
    [ -e "$adapter/device" ] && [ ! -e "$adapter/device/physfn" ] || continue
    adapters="$adapters ${adapter##*/}"
    set -- "$@" "$adapter/fw_ver" "$adapter/board_id" "$adapter/hca_type" "$adapter/device/iommu_group/type"
    for port in "$adapter"/ports/*; do
        set -- "$@" "$port/state" "$port/phys_state" "$port/rate" "$port/link_layer" "$port/counters/symbol_error" \\
            "$port/counters/link_downed" "$port/counters/link_error_recovery" "$port/counters/port_rcv_errors" \\
            "$port/counters/local_link_integrity_errors" "$port/counters/excessive_buffer_overrun_errors"
    done
done
fact 'infiniband adapters' "$adapters"
lines "$@"
# InfiniBand controllers with or without a driver.
fact 'infiniband controllers' "$(grep -l -s '^0x0207' sys/bus/pci/devices/*/class | grep -c .)"
"""
COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_ACTIVE = "ACTIVE"


class Port(NamedTuple):
    """A port of an adapter, with the name that its items have, ``mlx5_0/1``, and the path of its folder."""

    item: str
    folder: str
    kin: str


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the readings of each adapter and port, and the number of adapters; nothing without any."""
    names = sorted(dump.facts.get("infiniband adapters", "").split())
    controllers = dump.facts.get("infiniband controllers", "").strip()
    if not names and controllers in ("", "0"):
        return
    yield Reading(name="InfiniBand adapters", value=len(names), source=f"ls /{ADAPTERS}")
    ports = [port for name in names for port in _ports(dump, name)]
    for name in names:
        yield from _of_adapter(dump, name)
    for port in ports:
        yield from _of_port(dump, port)
    yield from _active_ports(dump, ports)


def _text(dump: HostDump, path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    return dump.files.get(path, "").strip()


def _kin(dump: HostDump, adapter: str) -> str:
    """Name the model of an adapter."""
    return f"{_text(dump, f'{ADAPTERS}/{adapter}/hca_type')} {_text(dump, f'{ADAPTERS}/{adapter}/board_id')}".strip()


def _ports(dump: HostDump, adapter: str) -> Iterator[Port]:
    """Yield the ports of an adapter."""
    paths = (re.fullmatch(rf"({ADAPTERS}/{re.escape(adapter)}/ports/(\d+))/state", path) for path in dump.files)
    for match in filter(None, paths):
        yield Port(f"{adapter}/{match[2]}", match[1], _kin(dump, adapter))


def _of_adapter(dump: HostDump, adapter: str) -> Iterator[Reading]:
    """Yield the facts of an adapter."""
    files = {
        "firmware": "fw_ver",
        "board": "board_id",
        "adapter type": "hca_type",
        "IOMMU": "device/iommu_group/type",
    }
    for name, file in files.items():
        path = f"{ADAPTERS}/{adapter}/{file}"
        if text := _text(dump, path):
            yield Reading(name=name, value=text, source=f"/{path}", item=adapter, kind="fact", kin=_kin(dump, adapter))


def _reading(
    port: Port,
    name: str,
    value: float | str,
    file: str,
    kind: Literal["state", "counter"] = "state",
    *,
    unit: str = "",
    kin: str = "",
) -> Reading:
    """Build a reading of a port's file."""
    source = f"/{port.folder}/{file}"
    return Reading(name=name, value=value, source=source, item=port.item, kind=kind, unit=unit, kin=kin)


def _of_port(dump: HostDump, port: Port) -> Iterator[Reading]:
    """Yield the state, rate and counters of a port. The rate of a port that is not active means nothing."""
    state = _state(dump, port)
    yield _reading(port, "port", state, "state")
    rate = re.match(r"\d+(\.\d+)?", _text(dump, f"{port.folder}/rate"))
    if state == _ACTIVE and rate:
        yield _reading(port, "rate", float(rate[0]), "rate", unit="Gb/s", kin=port.kin)
    for counter in COUNTERS:
        text = _text(dump, f"{port.folder}/counters/{counter}")
        # Older kernels print "N/A (no PMA)" for a counter that the port does not have.
        if text.isdecimal():
            yield _reading(port, counter, int(text), f"counters/{counter}", "counter")


def _state(dump: HostDump, port: Port) -> str:
    """Return the word of ``4: ACTIVE``; of another state also the physical one: ``DOWN (Polling)``."""
    state, physical = (_word(_text(dump, f"{port.folder}/{name}")) for name in ("state", "phys_state"))
    return state if state == _ACTIVE or not physical else f"{state} ({physical})"


def _word(text: str) -> str:
    """Return the word after a number and a colon."""
    return text.rpartition(":")[2].strip()


def _active_ports(dump: HostDump, ports: list[Port]) -> Iterator[Reading]:
    """Yield how many ports of a node are active, if any is InfiniBand's: a port of RoCE may be used as Ethernet."""
    layers = {_text(dump, f"{port.folder}/link_layer") for port in ports}
    if "InfiniBand" not in layers:
        return
    active = sum(_state(dump, port) == _ACTIVE for port in ports)
    yield Reading(name="active ports", value=f"{active} of {len(ports)}", source=f"/{ADAPTERS}/*/ports/*/state")


# --- checks ----------------------------------------------------------------------------------------------------


def not_active(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a port that was active before, or whose namesakes on most neighbours are, as bad; others may be unused."""
    if reading.value == _ACTIVE:
        return None
    if evidence.before == _ACTIVE:
        return Answer("bad", f"port is {reading.value}, ACTIVE before")
    places = [place for place, value in evidence.neighbours if value == _ACTIVE]
    answer = unlike_neighbours(reading, evidence)
    if not answer or len(places) * 2 <= len(evidence.neighbours):
        return None
    return Answer("bad", answer.text.replace("port ", "port is ", 1))


def none_active(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a node with InfiniBand ports of which none is active as a remark."""
    active, _, ports = str(reading.value).partition(" of ")
    if active != "0":
        return None
    return Answer("remark", "the InfiniBand port is not active" if ports == "1" else f"none of {ports} ports is active")


def slower(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a rate below that of the port of the same name on other nodes, or below the one before, as bad.

    On the node itself, a card of the same model may serve storage at a lower rate: then it is a remark.
    """
    before = evidence.before if evidence.same_boot else None
    if isinstance(before, (int, float)) and isinstance(reading.value, (int, float)) and reading.value < before:
        return Answer("bad", f"rate {reading.text()}, {shown(before)} before")
    namesakes = tuple(pair for pair in evidence.neighbours if pair[0].endswith(f" {reading.item}"))
    if namesakes:
        return less_than_neighbours(reading, structs.replace(evidence, neighbours=namesakes))
    answer = less_than_neighbours(reading, evidence)
    return Answer("remark", answer.text) if answer else None


def compromised(match: re.Match[str]) -> Answer:
    """Judge an adapter whose firmware does not answer as bad."""
    return Answer("bad", "the adapter's firmware does not answer", match[1])


def module_error(match: re.Match[str]) -> Answer:
    """Judge a cable or transceiver of which the adapter complains as bad."""
    return Answer("bad", f"transceiver {match[2]}: {match[3]}", match[1])


_ADDRESS = "[0-9a-f]+:[0-9a-f]+:[0-9a-f]+[.][0-7]"
_CABLE = "replug or change the cable or transceiver, then try another port of the switch"
_PORT_STEPS = ("ibstat", "the switch: {sudo}iblinkinfo", _CABLE, "restart the node")
_ERROR_STEPS = ("{sudo}ibqueryerrors", _CABLE)
_ADAPTER_STEPS = ("{sudo}dmesg | grep mlx5", "restart the node", "update the adapter's firmware; then service")


def _counter(counter: str, judge: Judge, limit: float = 0) -> Check:
    """Build the check of a counter."""
    name = f"infiniband-{counter.replace('_', '-')}"
    return Check(name=name, reading=counter, judge=judge, limit=limit, steps=_ERROR_STEPS)


SUBJECT = Subject(
    name="InfiniBand",
    script=SCRIPT,
    readings=readings,
    checks=(
        Check(
            name="infiniband-adapters",
            reading="InfiniBand adapters",
            judge=less_than_neighbours,
            steps=("lspci | grep -i -e infiniband -e mellanox", *_ADAPTER_STEPS),
        ),
        Check(name="infiniband-port", reading="port", judge=not_active, steps=_PORT_STEPS),
        Check(
            name="infiniband-active",
            reading="active ports",
            judge=none_active,
            steps=("is a subnet manager running: {sudo}sminfo", *_PORT_STEPS),
        ),
        Check(name="infiniband-rate", reading="rate", judge=slower, steps=_PORT_STEPS),
        # Each growth breaks connections, or is a packet lost (NVSentinel: fatal).
        _counter("link_downed", grew),
        _counter("local_link_integrity_errors", grew),
        _counter("excessive_buffer_overrun_errors", grew),
        # The link was retrained, which takes milliseconds (NVSentinel: not fatal).
        _counter("link_error_recovery", remark_grew),
        # A good link has up to 120 wrong symbols an hour, as InfiniBand's specification allows one wrong bit in 10^12
        # (NVSentinel, section 2.4.2). How long it took is unknown here, thus it is no more than a remark.
        _counter("symbol_error", remark_grew, 120),
        _counter("port_rcv_errors", remark_grew, 120),
        Check(
            name="infiniband-firmware",
            reading="firmware",
            judge=unlike_neighbours,
            steps=("end the run and give all adapters of this model the same firmware",),
        ),
    ),
    lines=(
        # Source: poll_health() of drivers/net/ethernet/mellanox/mlx5/core/health.c.
        LineCheck(
            name="infiniband-adapter-health",
            pattern=rf"mlx5_core ({_ADDRESS}): .*device's health compromised",
            judge=compromised,
            steps=_ADAPTER_STEPS,
        ),
        # Source: port_module() of drivers/net/ethernet/mellanox/mlx5/core/events.c.
        LineCheck(
            name="infiniband-module",
            pattern=rf"mlx5_core ({_ADDRESS}): .*Port module event\[error\]: module ([0-9]+), Cable error, (.+)",
            judge=module_error,
            steps=("cool and clean it", _CABLE),
        ),
    ),
)

"""Tiles of the cluster's page: a node each, with what is known of it and of its host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from labctl.backends.devices import DeviceReport, HostDevices
from labctl.backends.finding import Finding
from labctl.backends.health import Kept, concerns
from labctl.backends.status import LabStatus, NodeStatus
from labctl.health.model import Condition, Reading
from labctl.model import HERE, Hang, Result
from labctl.records.samples import NodeSamples
from labctl.records.samples import Reading as Sample
from labctl.runs.labs import LabNow
from labctl.system import human

STATES = {
    "running": "good",
    "paused": "unsure",
    "restarting": "unsure",
    "created": "unsure",
    "pending": "unsure",
    "missing": "not-reached",
    "unreachable": "not-reached",
}
"""Class of a state, which has its shape and color; other states are failures."""
HOSTS = {HERE: "this machine", "-": ""}
"""Hosts as a tile has them; a pod that waits for one has none."""
HEALTHS = {"unhealthy": "failed", "starting": "unsure"}
LEVELS = {"ok": "good", "remark": "unsure", "unknown": "unsure", "bad": "failed", "warn": "unsure", "error": "failed"}
SHOWN = ("temperature", "utilisation", "CPU", "memory", "power")
"""Samples that a tile has, in this order."""


class Word(Struct, frozen=True):
    """A state as a word, and its class."""

    text: str
    kind: str


class Remark(Struct, frozen=True, kw_only=True):
    """A sentence on a node or its host, and a command to type if there is one."""

    of: str
    """Origin: health, doctor or hang."""
    kind: str
    text: str
    fix: str = ""


class DeviceLine(Struct, frozen=True):
    """A device of a node, and its values."""

    name: str
    values: tuple[str, ...] = ()


class Tile(Struct, frozen=True, kw_only=True):
    """A node."""

    node: str
    host: str
    role: str
    state: Word
    reason: str = ""
    run: str = ""
    run_name: str = ""
    hardware: str = ""
    """Share of the host that it has, as ``2 of 16 CPUs``."""
    devices: tuple[DeviceLine, ...] = ()
    values: tuple[str, ...] = ()
    """Samples of the node itself."""
    source: str = ""
    """Origin of devices' values and of these: ``run`` or ``health``; empty without any."""
    read: float | None = None
    """Time at which they were read, in seconds since 1970; None for now."""
    health: Word | None = None
    examined: float | None = None
    """Time of its host's last verdict, in seconds since 1970."""
    fitness: str = ""
    remarks: tuple[Remark, ...] = ()


class Known(Struct, frozen=True, kw_only=True):
    """Facts on hosts and runs besides the lab's state."""

    devices: DeviceReport | None = None
    kept: Mapping[str, Kept] = {}
    """Last verdict by host."""
    findings: tuple[Finding, ...] = ()
    """Doctor's last findings."""
    last: Result | None = None
    """Result of the latest run, if that has ended."""


def tiles(now: LabNow, known: Known) -> tuple[Tile, ...]:
    """Return a tile for each node, in the order of the status."""
    hosts = {host.name: host for host in known.devices.hosts} if known.devices else {}
    return tuple(_tile(node, now, known, hosts.get(node.host)) for node in now.status.nodes)


def _tile(node: NodeStatus, now: LabNow, known: Known, host: HostDevices | None) -> Tile:
    """Return the tile of a node."""
    kept, samples = known.kept.get(node.host), now.samples.get(node.name)
    lines, values, source = _measured(node, samples, kept, host)
    return Tile(
        node=node.name,
        host=HOSTS.get(node.host, node.host),
        role=node.role,
        state=_state(node),
        reason=node.reason,
        run=node.run,
        run_name=_short(now.status, node.run),
        hardware=_hardware(node, host),
        devices=lines,
        values=values,
        source=source,
        read=kept.last.time if kept and source == "health" else None,
        health=Word(kept.level, LEVELS[kept.level]) if kept else None,
        examined=kept.last.time if kept else None,
        fitness=node.fitness,
        remarks=tuple(_remarks(node, now, known, host)),
    )


def _state(node: NodeStatus) -> Word:
    """Return the state of a node with its health, as `labctl status` has them."""
    if node.state == "running" and node.health == "starting" and node.reached:
        return Word("running, reachable", "good")
    if node.state == "running" and node.health in HEALTHS:
        return Word(f"running, {node.health}", HEALTHS[node.health])
    return Word(node.state, STATES.get(node.state, "failed"))


def _short(status: LabStatus, run: str) -> str:
    """Return the short id of a run."""
    return next((state.short_id for state in status.runs if state.run_id == run), "") or run


def _hardware(node: NodeStatus, host: HostDevices | None) -> str:
    """Render the share of a host's cores that a node has; empty if it is not known."""
    share = next((share for share in host.nodes if share.name == node.name), None) if host else None
    if not host or not share or not share.cpus:
        return ""
    return f"{len(share.cpus)} of {human.count(len(host.cpus), 'CPU')}"


# --- devices and what they read ------------------------------------------------------------------------------


def _measured(
    node: NodeStatus, samples: NodeSamples | None, kept: Kept | None, host: HostDevices | None
) -> tuple[tuple[DeviceLine, ...], tuple[str, ...], str]:
    """Return devices with values, values of the node, and their origin: samples of a run, else kept readings."""
    names = _named(node, host)
    if samples and (samples.values or samples.devices):
        numbers = sorted(samples.devices, key=lambda number: (len(number), number))
        by_name = {_at(names, number): _sampled(samples.devices[number]) for number in numbers}
        lines = [DeviceLine(name, by_name.pop(name, ())) for name in names]
        lines += [DeviceLine(name, values) for name, values in by_name.items()]
        return tuple(lines), _sampled(samples.values), "run"
    readings = [reading for reading in kept.last.readings if reading.unit == "°C"] if kept else []
    of_device = {name: _kept_of(readings, node, host, place) for place, name in enumerate(names)}
    of_host = tuple(_kept(reading) for reading in readings if not reading.item)
    source = "health" if of_host or any(of_device.values()) else ""
    return tuple(DeviceLine(name, values) for name, values in of_device.items()), of_host, source


def _named(node: NodeStatus, host: HostDevices | None) -> list[str]:
    """Return the devices of a node, as ``0: NAME`` where the host's report has a name."""
    models = {device.id: device.name for device in host.devices} if host else {}
    return [f"{device}: {models[device]}" if models.get(device) else device for device in node.devices]


def _at(names: Sequence[str], number: str) -> str:
    """Return the name of a device by its number on the node."""
    place = int(number) if number.isdecimal() else len(names)
    return names[place] if place < len(names) else f"device {number}"


def _sampled(values: Mapping[str, Sample]) -> tuple[str, ...]:
    """Render the samples that a tile shows, in its order."""
    return tuple(_sample(name, values[name]) for name in SHOWN if name in values)


def _sample(name: str, sample: Sample) -> str:
    """Render a sample with its name, unless the unit tells it."""
    if sample.unit == "MiB":
        return f"{name} {human.memory(sample.value * 2**20)}"
    text = f"{human.number(sample.value, 3)} {sample.unit}"
    return text if name in ("temperature", "power") else f"{name} {text}"


def _kept_of(readings: Iterable[Reading], node: NodeStatus, host: HostDevices | None, place: int) -> tuple[str, ...]:
    """Render the readings of a node's device at a place."""
    device = next((device for device in host.devices if device.id == node.devices[place]), None) if host else None
    if not device:
        return ()
    return tuple(_kept(reading) for reading in readings if concerns(_condition(reading), device))


def _condition(reading: Reading) -> Condition:
    """Return a condition on the item of a reading."""
    return Condition(check="", subject=reading.subject, level="ok", item=reading.item)


def _kept(reading: Reading) -> str:
    """Render a reading with its name."""
    return f"{reading.name} {reading.text()}"


# --- remarks -------------------------------------------------------------------------------------------------


def _remarks(node: NodeStatus, now: LabNow, known: Known, host: HostDevices | None) -> Iterator[Remark]:
    """Yield what is wrong with a node or its host: hang, health and doctor's findings, the worst first."""
    yield from _hangs(node, now, known.last)
    if kept := known.kept.get(node.host):
        for condition in kept.wrong:
            if _is_of(condition, node, host):
                yield Remark(of="health", kind=LEVELS[condition.level], text=condition.sentence())
    for finding in known.findings:
        if finding.level != "ok" and finding.node in (node.name, node.host):
            yield Remark(of=finding.code, kind=LEVELS[finding.level], text=finding.summary, fix=finding.fix)


def _hangs(node: NodeStatus, now: LabNow, last: Result | None) -> Iterator[Remark]:
    """Yield the sentence of a hang of the run on a node, or of the latest run if that ended with one."""
    if hang := now.hangs.get(node.run):
        yield Remark(of="hang", kind="unsure", text=hang.sentence)
    elif last and last.hang and not node.run and node.name in _nodes_of(last.hang, last):
        yield Remark(of="hang", kind="failed", text=f"run {last.run_id}: {last.hang.sentence}")


def _nodes_of(hang: Hang, result: Result) -> set[str]:
    """Return the nodes that others waited for; if it may be any, all of the run."""
    return set(hang.nodes) or {rank.node for rank in result.ranks}


def _is_of(condition: Condition, node: NodeStatus, host: HostDevices | None) -> bool:
    """Return True if a condition of a host concerns a node: it has the device, or no node of the host has."""
    devices = [device for device in host.devices if concerns(condition, device)] if host else []
    return not devices or any(device.node == node.name for device in devices)

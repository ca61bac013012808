"""Health of a lab's hosts: read all at the same time, judged beside each other and the last good readings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from labctl import accelerators, naming
from labctl.errors import Failures, HostError
from labctl.health import catalogue, examine, script
from labctl.health.model import Condition, Level, Rules, Snapshot, Subject
from labctl.model import Device, Host, Lab
from labctl.system import files, hostdump, human, pci
from labctl.system.decode import decode
from labctl.system.parallel import run_with_deadlines
from labctl.system.process import CompletedProcess

FOLDER = ".lab/health"
"""Folder of a file per host, relative to the lab directory."""
NODES = ".lab/nodes"
"""Folder that `up` makes, relative to the lab directory."""
ADDRESS = "PCI address"
"""Reading that tells a device's place on the bus."""
LOCK = "lab.lock"
FINGERPRINT = "hardware"
"""Key of a host's fingerprint among its facts in a lock file."""
SECONDS = 8.0
"""Time limit of a host's quick look, which takes below a second."""
FULL_SECONDS = 60.0
"""Time limit of a full look: vendors' tools may take 20 seconds each."""
ARRIVAL_SECONDS = 1.0
"""Time in which an answer arrives that the limit cut."""

RunOnHosts = Callable[[str, tuple[str, ...], float, Collection[str]], tuple[Mapping[str, CompletedProcess], Failures]]
"""Runs a script with arguments, for some seconds at most, on the hosts of these names, as ``Backend.on_hosts``."""


class Kept(Struct, frozen=True, kw_only=True):
    """The latest readings of a host, and the last good ones."""

    last: Snapshot
    level: Level
    good: Snapshot | None = None
    wrong: tuple[Condition, ...] = ()
    """Answers of the latest verdict that are bad or a remark."""


class HostHealth(Struct, frozen=True, kw_only=True):
    """Verdict on a host: the worst level of its conditions, and those that are not ok."""

    host: str
    nodes: tuple[str, ...]
    """The lab's nodes on it."""
    level: Level
    conditions: tuple[Condition, ...]
    """All answers."""
    last_good: float | None = None
    """Seconds since its last good verdict before this one; None without."""
    error: str = ""
    """Why it could not be read."""

    @property
    def wrong(self) -> tuple[Condition, ...]:
        """Return the conditions that are bad, then those that are a remark."""
        wrong = (each for each in self.conditions if each.level in ("bad", "remark"))
        return tuple(sorted(wrong, key=lambda condition: condition.level != "bad"))


def subjects_of(accelerator: str) -> tuple[Subject, ...]:
    """Return the subjects of a host with this accelerator."""
    own = accelerators.get(accelerator).subject
    return (*((own,) if own else ()), *catalogue.HOST)


def known_checks() -> dict[str, float | None]:
    """Return the limit of each check, of every accelerator; None for a check without one."""
    modules = accelerators.modules().values()
    subjects = [*catalogue.HOST, *(module.subject for module in modules if module.subject)]
    limits = {check.name: check.limit for subject in subjects for check in subject.checks}
    return {
        **limits,
        **dict.fromkeys(check.name for subject in subjects for check in subject.lines),
        examine.CHANGED: None,
    }


def look(
    on_hosts: RunOnHosts,
    hosts: Sequence[str],
    subjects: Sequence[Subject],
    rules: Rules,
    *,
    full: bool,
    limit: float | None = None,
    folders: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, Snapshot], dict[str, HostError]]:
    """Read hosts; return snapshots by host, and an error for each that does not answer in time.

    ``limit``: seconds of a host besides those of the slowest own check; None: FULL_SECONDS or SECONDS. ``folders``:
    those that each host needs, as ``folders_of``. What a host printed before its time was over is used.
    """
    usual = FULL_SECONDS if full else SECONDS
    seconds = (usual if limit is None else limit) + max((check.seconds for check in rules.own_on), default=0)

    def read(host: str) -> Snapshot:
        """Read a host. HostError if it cannot be reached, or if its answer ends before LATE of the script."""
        text = script.script(subjects, rules, full=full, folders=(folders or {}).get(host, ()))
        sent = time.time()
        done, failed = on_hosts(text, (), seconds, (host,))
        received = time.time()
        if host not in done:
            raise failed.get(host, HostError(f"{host} was not read", hint="labctl doctor", node=host))
        output = script.usable(done[host].out)
        quick = hostdump.read(script.quick_part(output), host) if full else None
        dump = hostdump.read(output, host)
        return script.snapshot(dump, subjects, rules, sent=sent, received=received, quick=quick)

    def attempt(host: str) -> Snapshot | HostError:
        """Return a host's snapshot, or why there is none."""
        try:
            return read(host)
        except HostError as error:
            return error

    tasks = [(partial(attempt, host), seconds + ARRIVAL_SECONDS) for host in hosts]
    answers = run_with_deadlines(tasks, width=len(hosts) or 1)
    snapshots: dict[str, Snapshot] = {}
    errors: dict[str, HostError] = {}
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Snapshot):
            snapshots[host] = answer
        else:
            text, hint = f"{host} did not answer within {seconds:g} s", f"labctl doctor --node {host}"
            errors[host] = answer or HostError(text, hint=hint, node=host)
    return snapshots, errors


def folders_of(lab: Lab) -> dict[str, tuple[str, ...]]:
    """Return the folders that nodes mount of each host, as the script takes them; none before the first `up`."""
    if not (lab.directory / NODES).is_dir():
        return {}
    return {host.name: tuple(_folders_on(lab, host)) for host in lab.hosts}


def _folders_on(lab: Lab, host: Host) -> Iterator[str]:
    """Yield the sources of a host's mounts, each with ``r``, or ``own r`` or ``own rw`` before it.

    Only labctl's own, the lab's directory and the cache, must be writable: a folder of data may be root's. They may be
    missing on a host that joined the lab after `up`.
    """
    for mount in lab.mounts:
        is_own = Path(mount.source).is_relative_to(lab.directory) or mount.target.endswith("/.cache")
        own_use = "own r" if mount.read_only else "own rw"
        yield f"{own_use if is_own else 'r'} {naming.path_on(lab, host, mount.source)}"


def judge(
    lab: Lab,
    snapshots: Mapping[str, Snapshot],
    failed: Mapping[str, HostError],
    rules: Rules,
    *,
    since: float | None = None,
) -> tuple[HostHealth, ...]:
    """Judge the hosts that were read, each beside the others, and name those that were not; nothing is written.

    Each is compared with its last good readings; with ``since``, with those of the last ``since`` seconds, if any.
    """
    subjects, locks = subjects_of(lab.accelerator), locked(lab.directory)
    own = accelerators.get(lab.accelerator).subject
    verdicts = []
    for host, now in snapshots.items():
        kept = _read_of(lab.directory, host, now)
        good = kept.good if kept else None
        before = _before(kept, now, since)
        past = examine.Past(
            snapshot=before,
            since=examine.since_of(now, before, since),
            frozen=_of_lab(lab.accelerator, locks[host]) if _is_of(locks.get(host, {}), now) else {},
            lock=LOCK,
        )
        others = {other: snapshot for other, snapshot in snapshots.items() if other != host}
        conditions = named(now, examine.examine(now, subjects, rules, past, others), past)
        verdicts.append(
            HostHealth(
                host=host,
                nodes=nodes_on(lab, host),
                level=examine.worst(conditions, is_blind=own is not None and examine.is_blind(own, now)),
                conditions=conditions,
                last_good=now.time - good.time if good else None,
            )
        )
    for host, error in failed.items():
        kept = read(lab.directory, host)
        age_of_good = time.time() - kept.good.time if kept and kept.good else None
        unread = HostHealth(host=host, nodes=nodes_on(lab, host), level="unknown", conditions=(), error=error.message)
        verdicts.append(msgspec.structs.replace(unread, last_good=age_of_good))
    return tuple(verdicts)


def _is_of(frozen: Mapping[str, Mapping[str, str]], now: Snapshot) -> bool:
    """Tell if a fingerprint is of the machine that was read: a clone of the lab elsewhere has the same names."""
    machine = frozen.get("", {}).get(examine.MACHINE)
    return machine is not None and machine == _machine(now)


def _machine(snapshot: Snapshot) -> str | None:
    """Return what identifies the machine that was read; None if it does not tell."""
    return examine.facts_of(snapshot).get("", {}).get(examine.MACHINE)


def _of_lab(accelerator: str, frozen: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Return the items of a fingerprint that a host with this accelerator tells of: not the cards of another one."""
    modules = accelerators.modules()
    own = _judged_by(subjects_of(accelerator))
    other = _judged_by(module.subject for name, module in modules.items() if name != accelerator and module.subject)
    return {
        item: facts
        for item, facts in frozen.items()
        if not item or other.isdisjoint(facts) or not own.isdisjoint(facts)
    }


def _judged_by(subjects: Iterable[Subject]) -> frozenset[str]:
    """Return the names of the readings that these subjects judge."""
    return frozenset(check.reading for subject in subjects for check in subject.checks)


def _before(kept: Kept | None, now: Snapshot, since: float | None) -> Snapshot | None:
    """Return the readings to compare with: the last good ones, or the first kept ones of the last ``since`` seconds."""
    if kept is None or since is None:
        return kept.good if kept else None
    recent = (each for each in (kept.good, kept.last) if each and each.time >= now.time - since)
    return next(recent, None)


def named(now: Snapshot, conditions: Iterable[Condition], past: examine.Past) -> tuple[Condition, ...]:
    """Return the conditions with the name of a device, also of one that is gone, beside its PCI address.

    Such as ``GPU 2 (0000:3b:00.0)``.
    """
    earlier = examine.renumbered(past.snapshot, now).readings if past.snapshot else ()
    devices = {facts[ADDRESS]: item for item, facts in past.frozen.items() if ADDRESS in facts}
    devices |= {str(reading.value): reading.item for reading in (*earlier, *now.readings) if reading.name == ADDRESS}
    return tuple(
        msgspec.structs.replace(each, item=f"{devices[each.item]} ({each.item})") if each.item in devices else each
        for each in conditions
    )


def nodes_on(lab: Lab, host: str) -> tuple[str, ...]:
    """Return the names of the lab's nodes on a host."""
    return tuple(node.name for node in lab.nodes if node.host == host)


def nodes_of(lab: Lab, verdict: HostHealth, condition: Condition) -> tuple[str, ...]:
    """Return the nodes that a condition concerns: the one that has the device, else all of the host.

    A device that the lab leaves to others concerns none. One that the host lacks may have been the lab's, unless the
    lab leaves others too: more than what is left over when nodes share all of a host.
    """
    members = [node for node in lab.nodes if node.host == verdict.host]
    for node in members:
        if any(concerns(condition, device) for device in node.devices.devices):
            return (node.name,)
    used = {device.id for node in members for device in node.devices.devices}
    present = [device for host in lab.hosts if host.name == verdict.host for device in host.devices]
    left = [device for device in present if device.id not in used]
    if not used or not _is_of_device(lab, present, condition):
        return verdict.nodes
    is_left = any(concerns(condition, device) for device in left)
    return () if is_left or len(left) >= len(members) else verdict.nodes


def concerns(condition: Condition, device: Device) -> bool:
    """Tell if a condition is about a device: its item has the PCI address, or is such as ``GPU 2`` or ``GPU 2 port 3``.

    Items of other hardware have numbers too.
    """
    if device.pci and (address := pci.address(condition.item)):
        return address == device.pci
    words = condition.item.split()
    return not _is_host_wide(condition) and words[1:2] in ([device.id], [device.path.rpartition("/")[2]])


def _is_of_device(lab: Lab, present: Collection[Device], condition: Condition) -> bool:
    """Tell if a condition is about a device of the lab's accelerator: its subject tells so, or its PCI address."""
    address, own = pci.address(condition.item), accelerators.get(lab.accelerator).subject
    is_told = own is not None and own.name == (condition.changed or condition.subject)
    # Only behind the name of a device is an address in brackets.
    is_named = bool(address) and condition.item.endswith(f"({address})")
    return bool(condition.item) and (is_told or is_named or address in {device.pci for device in present if device.pci})


def _is_host_wide(condition: Condition) -> bool:
    """Tell if a condition is of a subject that every host has."""
    return (condition.changed or condition.subject) in {subject.name for subject in catalogue.HOST}


# --- what is kept --------------------------------------------------------------------------------------------


def read(directory: Path, host: str) -> Kept | None:
    """Return the readings that are kept of a host; None without, or if they are of another labctl."""
    try:
        return decode((directory / FOLDER / f"{host}.json").read_bytes(), Kept)
    except (OSError, ValueError):
        return None


def _read_of(directory: Path, host: str, now: Snapshot) -> Kept | None:
    """Return the readings that are kept of a host, unless they are of another machine that had its name.

    A lab's directory may be shared by machines, or copied to another one.
    """
    kept = read(directory, host)
    machines = {machine for machine in (_machine(kept.last) if kept else None, _machine(now)) if machine}
    return None if len(machines) > 1 else kept


def keep(directory: Path, snapshots: Mapping[str, Snapshot], verdicts: Iterable[HostHealth], *, full: bool) -> None:
    """Write the readings of each host that was read, as the last good ones too if it is good.

    A host with a remark is good by a full look only: nobody sees the remarks of a quick one.
    """
    for verdict in verdicts:
        now = snapshots.get(verdict.host)
        if now is None:
            continue
        before = _read_of(directory, verdict.host, now)
        good = before.good if before else None
        if verdict.level == "ok" or (verdict.level == "remark" and full):
            good = _completed(now, good, full=full)
        kept = Kept(last=now, level=verdict.level, good=good, wrong=verdict.wrong)
        files.write(directory / FOLDER / f"{verdict.host}.json", msgspec.json.encode(kept).decode())


def _completed(now: Snapshot, before: Snapshot | None, *, full: bool) -> Snapshot:
    """Return the readings of a look, with the earlier ones that it lacks: those of a tool that gives no answer now.

    A quick look lacks also what only a full one takes. Counters start again with the host.
    """
    if before is None:
        return now
    before = examine.renumbered(before, now)
    silent, known = examine.silent_tools(now), {each.key for each in now.readings if each.value is not None}
    rest = {
        each.key: each
        for each in before.readings
        if each.key not in known
        and ((each.slow and not full) or examine.is_silent(each, silent))
        and (each.kind != "counter" or before.boot == now.boot)
    }
    taken = (each for each in now.readings if each.key not in rest)
    completed = msgspec.structs.replace(now, readings=(*taken, *rest.values()))
    if now.lines_why and before.boot == now.boot:
        # Lines that could not be read count once they can.
        completed = msgspec.structs.replace(completed, lines=before.lines, lines_why=before.lines_why)
    return completed


def frozen(snapshot: Snapshot) -> dict[str, Any]:
    """Return a host's fingerprint as a lock file has it: its own facts by name, and beside them those of each item."""
    facts = examine.facts_of(snapshot)
    return {**facts.pop("", {}), **facts}


def locked(directory: Path) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return the fingerprint of each host in the lab's lock file, facts by item and name; empty without."""
    try:
        document = json.loads((directory / LOCK).read_text(encoding="utf-8"))
        return {host: _by_item(facts.get(FINGERPRINT) or {}) for host, facts in document["hosts"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _by_item(facts: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """Return the facts of a fingerprint by item and name, the host's own by the empty item."""
    own = {name: value for name, value in facts.items() if isinstance(value, str)}
    return {"": own, **{item: value for item, value in facts.items() if isinstance(value, dict)}}


def ages(directory: Path, hosts: Mapping[str, str], now: float) -> dict[str, str]:
    """Return a clause on the last verdict of each node, whose hosts are given: ``last good 9d ago``."""
    kept = {host: read(directory, host) for host in set(hosts.values())}
    return {node: age(verdict, now) for node, host in hosts.items() if (verdict := kept[host])}


def age(kept: Kept, now: float) -> str:
    """Render the age of a host's last good verdict, and what moved since."""
    if kept.good is None:
        return f"{kept.level} {human.ago(now - kept.last.time)}, never good"
    moved = ", ".join(_moved(kept.good, kept.last))
    since = f", {moved} changed since" if moved else ""
    level = f", {kept.level} since" if kept.level in ("bad", "unknown") else ""
    return f"last good {human.ago(now - kept.good.time)}{level}{since}"


def _moved(good: Snapshot, last: Snapshot) -> Iterator[str]:
    """Return the names of the facts that differ."""
    before = examine.fingerprint(examine.renumbered(good, last))
    return (name for name, value in examine.fingerprint(last).items() if before.get(name, value) != value)

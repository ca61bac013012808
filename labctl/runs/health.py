"""Health of a lab's hosts for `labctl health`, before a run, and what changed on its nodes while it ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct, field

from labctl import backends
from labctl.accelerators import CPU
from labctl.backends import Backend
from labctl.backends import health as of_backend
from labctl.backends.health import HostHealth, nodes_of
from labctl.config import health_rules
from labctl.errors import ConfigError, HostError, LabError, did_you_mean
from labctl.health import examine
from labctl.health.model import LEVELS, Condition, Level, Rules, Snapshot
from labctl.model import Lab, Result
from labctl.records.active import Run
from labctl.system import files, human
from labctl.system.decode import decode
from labctl.system.parallel import begin

RECORD = "health.json"
"""Readings before and after a run, in its record."""
AFTERWARDS = 3.0
"""Seconds that a host may take to be read after a run."""
OOM = "oom"
"""Check of the kernel's OOM kills."""
SHOWN = 3
"""Findings that a message names at most."""


class HealthReport(Struct, frozen=True, kw_only=True):
    """Answer of `labctl health`: the worst level of all hosts, and the verdict on each."""

    level: Level
    hosts: tuple[HostHealth, ...]


class Recorded(Struct, frozen=True, kw_only=True):
    """Readings of the hosts of a run, before it and, once it has ended, after it."""

    before: Mapping[str, Snapshot] = field(default_factory=dict)
    after: Mapping[str, Snapshot] = field(default_factory=dict)


class Unfit(HostError):
    """A node is not fit to run."""


# --- labctl health -------------------------------------------------------------------------------------------


def report(backend: Backend, nodes: tuple[str, ...] = (), *, since: float | None = None) -> HealthReport:
    """Examine all hosts of the lab; keep their readings, and return the verdicts on those of ``nodes``, or on all.

    Each is compared with its readings of the last ``since`` seconds; None: with the last good ones. ConfigError for an
    unknown node.
    """
    lab, rules = backend.lab(), known_rules(backend)
    chosen = _hosts_of(lab, nodes)
    verdicts = _examined(backend, lab, tuple(host.name for host in lab.hosts), rules, since=since, full=True)
    shown = tuple(verdict for verdict in verdicts if verdict.host in chosen)
    return HealthReport(level=_worst(shown), hosts=shown)


def _worst(verdicts: Iterable[HostHealth]) -> Level:
    """Return the worst level of hosts: bad if one was not read; an unknown one is worse than any that is ok."""
    levels: list[Level] = ["bad" if verdict.error else verdict.level for verdict in verdicts]
    return max(levels, key=LEVELS.index)


def known_rules(backend: Backend) -> Rules:
    """Return the rules of ``health.yml``; warn of checks in it that labctl does not know."""
    rules = health_rules.load(backend.context.directory)
    if text := health_rules.unknown(rules, of_backend.known_checks()):
        backend.context.warn(text)
    return rules


def _hosts_of(lab: Lab, names: tuple[str, ...]) -> frozenset[str]:
    """Return the hosts of these nodes or hosts, all without names. ConfigError for an unknown one."""
    hosts = {host.name: host.name for host in lab.hosts} | {node.name: node.host for node in lab.nodes}
    for name in names:
        if name not in hosts:
            raise ConfigError(f"{name} is no node of the lab", hint=did_you_mean(name, tuple(hosts)))
    return frozenset(hosts[name] for name in names or hosts)


def _examined(
    backend: Backend, lab: Lab, hosts: Sequence[str], rules: Rules, *, since: float | None = None, full: bool
) -> tuple[HostHealth, ...]:
    """Read hosts, judge them and keep their readings; return the verdicts."""
    subjects = of_backend.subjects_of(lab.accelerator)
    folders = of_backend.folders_of(lab)
    snapshots, failed = of_backend.look(backend.on_hosts, hosts, subjects, rules, full=full, folders=folders)
    verdicts = of_backend.judge(lab, snapshots, failed, rules, since=since)
    of_backend.keep(lab.directory, snapshots, verdicts, full=full)
    return verdicts


# --- before a run --------------------------------------------------------------------------------------------


def mode(backend: Backend, accelerator: str) -> str:
    """Return ``on``, ``warn`` or ``off``, as LAB_PREFLIGHT says; by default a lab without devices is not judged."""
    return backend.settings.text("LAB_PREFLIGHT") or ("off" if accelerator == CPU else "warn")


def is_read(backend: Backend) -> bool:
    """Tell if hosts are read before and after runs: unless LAB_PREFLIGHT=off, or where labctl has no access."""
    refused = "health" in backends.unsupported(backend.settings)
    return not refused and backend.settings.text("LAB_PREFLIGHT") != "off"


Looked = tuple[dict[str, Snapshot], dict[str, HostError]]


def begin_look(backend: Backend, run: Run, limit: float | None = None) -> Future[Looked] | None:
    """Begin to read the hosts of a run in another thread, each for ``limit`` seconds; None if they are not read."""
    if not is_read(backend):
        return None
    subjects, rules = of_backend.subjects_of(run.lab.accelerator), health_rules.load(run.lab.directory)
    look = partial(of_backend.look, full=False, limit=limit, folders=of_backend.folders_of(run.lab))
    return begin(partial(look, backend.on_hosts, hosts_of(run), subjects, rules))


def hosts_of(run: Run) -> tuple[str, ...]:
    """Return the hosts of a run's nodes."""
    return tuple(dict.fromkeys(run.lab.host_of(node.name).name for node in run.job.nodes))


def require_fit(backend: Backend, run: Run, looked: Future[Looked] | None) -> Mapping[str, Snapshot]:
    """Judge the hosts of a run; return their snapshots. Unfit if one is bad and LAB_PREFLIGHT is on, else warn.

    It also warns of a host that was not read: whether that is fit is unknown.
    """
    if looked is None:
        return {}
    snapshots, failed = looked.result()
    judged_as = mode(backend, run.lab.accelerator)
    if judged_as == "off":
        return snapshots
    rules = health_rules.load(run.lab.directory)
    verdicts = of_backend.judge(run.lab, snapshots, failed, rules)
    of_backend.keep(run.lab.directory, snapshots, verdicts, full=False)
    bad = _bad(run.lab, verdicts, [node.name for node in run.job.nodes])
    if bad and judged_as == "on":
        raise unfit(bad, len(run.job.nodes))
    unread = [f"{verdict.host}: its health is unknown: {verdict.error}" for verdict in verdicts if verdict.error]
    for text in (*_texts(bad), *unread):
        backend.context.warn(text)
    return snapshots


def _bad(lab: Lab, verdicts: Iterable[HostHealth], nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return for each of these nodes that is bad the sentences that say why."""
    bad: dict[str, list[str]] = {}
    for verdict in verdicts:
        for condition in verdict.wrong:
            if condition.level != "bad":
                continue
            for node in nodes_of(lab, verdict, condition):
                if node in nodes:
                    bad.setdefault(node, []).append(condition.sentence())
    return bad


def _texts(bad: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each sentence once, after the nodes that it is about: ``worker-2, worker-3: memory 96 GiB, ...``."""
    nodes_by_sentence: dict[str, dict[str, None]] = {}
    for node, sentences in bad.items():
        for sentence in sentences:
            nodes_by_sentence.setdefault(sentence, {})[node] = None
    return [f"{human.listed(nodes, 4)}: {sentence}" for sentence, nodes in nodes_by_sentence.items()]


def unfit(bad: Mapping[str, Sequence[str]], nodes: int) -> Unfit:
    """Return the error of a run on this number of nodes with bad ones, with the option that leaves those out."""
    reasons = _texts(bad)
    message = "; ".join(reasons[:SHOWN]) + (f" {human.more(len(reasons) - SHOWN)}" if len(reasons) > SHOWN else "")
    without = "" if len(bad) == nodes else f"--exclude {'@'.join(bad)} runs without; "
    hint = f"{without}`labctl health` tells what to do; LAB_PREFLIGHT=warn runs all the same"
    return Unfit(message, hint=hint, node=next(iter(bad)))


def unfit_nodes(backend: Backend) -> dict[str, list[str]]:
    """Read all hosts; return the bad nodes with the sentences that say why. None are unless LAB_PREFLIGHT is on."""
    if not is_read(backend):
        return {}
    lab = backend.lab()
    if mode(backend, lab.accelerator) != "on":
        return {}
    hosts = tuple(host.name for host in lab.hosts)
    verdicts = _examined(backend, lab, hosts, health_rules.load(lab.directory), full=False)
    return _bad(lab, verdicts, [node.name for node in lab.nodes])


def unusable(backend: Backend, slots: int = 0) -> dict[str, str]:
    """Return the nodes on which no run can begin, and why: the backend's, and those that are not fit."""
    unfit_now = {node: sentences[0] for node, sentences in unfit_nodes(backend).items()}
    return {**unfit_now, **backend.unusable(slots)}


# --- what changed during a run -------------------------------------------------------------------------------


def record(run: Run, before: Mapping[str, Snapshot]) -> None:
    """Write the readings before a run into its record, if there are any."""
    if before:
        _write(run, Recorded(before=before))


def _write(run: Run, readings: Recorded) -> None:
    """Write the readings of a run into its record. HostError if that fails."""
    files.write(run.directory / RECORD, msgspec.json.encode(readings).decode())


def read(directory: Path) -> Recorded:
    """Return the readings in a run's record; none if it has none, or those of another labctl."""
    try:
        return decode((directory / RECORD).read_bytes(), Recorded)
    except (OSError, ValueError):
        return Recorded()


def begin_after(backend: Backend, run: Run) -> Future[Looked] | None:
    """Begin to read the hosts of a run that has ended, if they were read before it and health.yml can be read."""
    if not read(run.directory).before:
        return None
    with suppress(ConfigError):
        return begin_look(backend, run, AFTERWARDS)
    return None


def changes(run: Run, looked: Future[Looked] | None) -> tuple[Condition, ...]:
    """Return what changed on the hosts of a run while it ran, the bad first, and keep the readings in its record.

    The ``item`` begins with the nodes. A host that does not answer in time has no word: the run's own end names it.
    Nothing that fails here keeps the run from its result: neither a full disk nor a health.yml that was changed.
    """
    if looked is None:
        return ()
    recorded = read(run.directory)
    try:
        rules, (after, _) = health_rules.load(run.lab.directory), looked.result()
    except LabError:
        return ()
    with suppress(HostError):
        _write(run, msgspec.structs.replace(recorded, after=after))
    both = [(host, recorded.before[host], now) for host, now in after.items() if host in recorded.before]
    found = [each for host, before, now in both for each in _changes_of(run, host, before, now, rules)]
    return tuple(sorted(found, key=lambda condition: condition.level != "bad"))


def _changes_of(run: Run, host: str, before: Snapshot, now: Snapshot, rules: Rules) -> list[Condition]:
    """Return the conditions of a host after a run that it did not have before it."""
    subjects = of_backend.subjects_of(run.lab.accelerator)
    past = examine.Past(snapshot=before, since=examine.since_of(now, before), tells_age=False)
    # Lines that were there before are not new, whatever they say.
    earlier = examine.Past(since=examine.since_of(before, before))
    known_before = of_backend.named(before, examine.examine(before, subjects, rules, earlier, {}))
    known = {_identity(each) for each in known_before}
    found = (*_restarted(before, now, rules), *examine.examine(now, subjects, rules, past, {}))
    conditions = of_backend.named(now, found)
    verdict = HostHealth(host=host, nodes=of_backend.nodes_on(run.lab, host), level="ok", conditions=conditions)
    raised = {check.name for subject in subjects for check in subject.checks if check.bad_in_run}
    return [
        msgspec.structs.replace(
            each, item=_with_nodes(run.lab, verdict, each), level="bad" if each.check in raised else each.level
        )
        for each in verdict.wrong
        if _identity(each) not in known
    ]


def _restarted(before: Snapshot, now: Snapshot, rules: Rules) -> Iterator[Condition]:
    """Yield that a host restarted between two looks, unless that is unknown or changes are off."""
    if before.boot and now.boot and before.boot != now.boot and examine.CHANGED not in rules.off:
        yield Condition(check=examine.CHANGED, subject=examine.CHANGES, level="bad", text="restarted")


def _identity(condition: Condition) -> tuple[str, str, Level]:
    """Return the parts of a condition by which it is known again; its text has figures that change."""
    return condition.check, condition.item, condition.level


def _with_nodes(lab: Lab, verdict: HostHealth, condition: Condition) -> str:
    """Return the nodes of a condition, with its item: ``worker-3 mlx5_0/1``."""
    nodes = ", ".join(nodes_of(lab, verdict, condition)) or verdict.host
    return f"{nodes} {condition.item}".rstrip()


def message(result: Result, found: Sequence[Condition]) -> str:
    """Return the message of a run that failed with what went bad on its nodes while it ran."""
    # A message on memory tells of that already.
    told = OOM if result.cause == "out-of-memory" else ""
    bad = [f"{each.sentence()} during the run" for each in found if each.level == "bad" and each.check != told]
    return "; ".join((result.message, *bad[:SHOWN]))

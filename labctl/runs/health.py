"""Health of a lab's hosts, for `labctl health` and before a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from labctl import backends
from labctl.accelerators import CPU
from labctl.backends import Backend
from labctl.backends import health as of_backend
from labctl.backends.health import HostHealth, nodes_of
from labctl.config import health_rules
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError, did_you_mean
from labctl.health import examine
from labctl.health.model import LEVELS, Condition, Level, Rules, Snapshot
from labctl.jobs.request import RunOptions, without
from labctl.model import Lab
from labctl.records.active import Run
from labctl.system import files, human
from labctl.system.parallel import begin

WARNED = ".lab/health/warned"
"""Findings that the last run warned of, relative to the lab directory."""
UNKNOWN = "health of host "
"""Beginning of the warning of a host whose health is unknown."""
SHOWN = 3
"""Findings that a message names at most."""


class HealthReport(Struct, frozen=True, kw_only=True):
    """Answer of `labctl health`: the worst level of all hosts, and the verdict on each."""

    level: Level
    hosts: tuple[HostHealth, ...]


class Unfit(HostError):
    """A node is not fit to run."""


# --- labctl health -------------------------------------------------------------------------------------------


def report(backend: Backend, nodes: tuple[str, ...] = (), *, since: float | None = None) -> HealthReport:
    """Examine all hosts of the lab; keep their readings, and return the verdicts on those of ``nodes``, or on all.

    Each is compared with its readings of the last ``since`` seconds; None: with the last good ones. All are bad if all
    lack the lab's devices. ConfigError for an unknown node.
    """
    (lab, lost), rules = _lab(backend), known_rules(backend)
    chosen = _hosts_of(lab, nodes)
    snapshots, verdicts = _examined(backend, lab, rules, since=since, full=True)
    if lost:
        verdicts = tuple(replace(each, level="bad", conditions=(*each.conditions, lost)) for each in verdicts)
    shown = tuple(verdict for verdict in verdicts if verdict.host in chosen)
    try:
        # With ``since`` a host may be good that is not shown.
        of_backend.keep(lab.directory, snapshots, shown if since else verdicts, full=True)
    except HostError as error:
        backend.context.warn(f"the verdicts are not kept: {error.message}")
    return HealthReport(level=_worst(shown), hosts=shown)


def _lab(backend: Backend) -> tuple[Lab, Condition | None]:
    """Return the lab; if every host lacks its devices, as one on CPUs, and why. HostError otherwise."""
    settings = backend.settings
    accelerator = settings.text("LAB_ACCELERATOR")
    try:
        return backend.lab(), None
    except HostError as error:
        if accelerator in ("auto", CPU):
            raise
        text = f"lacks devices of the lab: {error.message}"
    for key, value in (("LAB_ACCELERATOR", CPU), ("LAB_DEVICES", "")):
        settings = settings.with_value(key, value, origin="a host without devices")
    lost = Condition(check="devices", subject="Devices", level="bad", text=text, steps=("labctl devices",))
    # Raises an error that is not about devices again.
    with backends.connect(backend.context, settings, demand=False) as on_processors:
        return replace(on_processors.lab(), accelerator=accelerator), lost


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
    hosts = {name: lab.host_of(name).name for name in lab.containers} | {host.name: host.name for host in lab.hosts}
    for name in names:
        if name not in hosts:
            raise ConfigError(f"{name} is no node of the lab", hint=did_you_mean(name, tuple(hosts)))
    return frozenset(hosts[name] for name in names or hosts)


def _examined(
    backend: Backend, lab: Lab, rules: Rules, *, since: float | None = None, full: bool
) -> tuple[dict[str, Snapshot], tuple[HostHealth, ...]]:
    """Read all hosts of a lab; return their snapshots and the verdicts on them."""
    subjects = of_backend.subjects_of(lab.accelerator)
    hosts, folders = tuple(host.name for host in lab.hosts), of_backend.folders_of(lab)
    snapshots, failed = of_backend.look(backend.on_hosts, hosts, subjects, rules, full=full, folders=folders)
    return snapshots, of_backend.judge(lab, snapshots, failed, rules, since=since)


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
        if backend.settings.text("LAB_PREFLIGHT") == "on":
            backend.context.warn("LAB_PREFLIGHT=on has no effect here: labctl reads no host of a cluster")
        return None
    subjects, rules = of_backend.subjects_of(run.lab.accelerator), health_rules.load(run.lab.directory)
    look = partial(of_backend.look, full=False, limit=limit, folders=of_backend.folders_of(run.lab))
    return begin(partial(look, backend.on_hosts, hosts_of(run), subjects, rules))


def hosts_of(run: Run) -> tuple[str, ...]:
    """Return the hosts of a run's nodes."""
    return tuple(dict.fromkeys(run.lab.host_of(node.name).name for node in run.job.nodes))


def require_fit(
    backend: Backend, run: Run, options: RunOptions, looked: Future[Looked] | None
) -> Mapping[str, Snapshot]:
    """Judge the hosts of a run; return their snapshots. Unfit if one is bad and LAB_PREFLIGHT is on, else warn.

    It also warns of a host that was not read: whether that is fit is unknown.
    """
    if looked is None:
        return {}
    snapshots, failed = looked.result()
    judged_as = mode(backend, run.lab.accelerator)
    if judged_as == "off":
        return snapshots
    verdicts = of_backend.judge(run.lab, snapshots, failed, health_rules.load(run.lab.directory))
    with suppress(HostError):
        of_backend.keep(run.lab.directory, snapshots, verdicts, full=False)
    nodes = [node.name for node in run.job.nodes]
    bad = _bad(run.lab, verdicts, nodes)
    if bad and judged_as == "on":
        raise unfit(bad, nodes, options)
    unread = [f"{UNKNOWN}{verdict.host} is unknown: {_why(verdict)}" for verdict in verdicts if _why(verdict)]
    _warn(backend.context, [*_texts(bad), *unread], [*nodes, *hosts_of(run)])
    return snapshots


def _why(verdict: HostHealth) -> str:
    """Return why the health of a host is unknown; empty if it is known."""
    if verdict.error or verdict.level != "unknown":
        return verdict.error
    unknown = [condition for condition in verdict.conditions if condition.level == "unknown"]
    # That the kernel's log is closed to a user is usual, and no reason.
    reasons = sorted(unknown, key=lambda condition: condition.source == examine.KERNEL_SOURCE)
    return next((condition.text for condition in reasons), "it told nothing")


def _warn(context: Context, texts: Sequence[str], nodes: Collection[str]) -> None:
    """Warn of findings on a run's nodes or hosts, in full of those that no earlier run warned of."""
    path = context.directory / WARNED
    try:
        earlier = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        earlier = []
    known = [text for text in texts if _without_age(text) in earlier]
    for text in texts:
        if text not in known:
            context.warn(text)
    if known:
        more = f" {human.more(len(known) - 1)}" if len(known) > 1 else ""
        context.warn(f"as before the last run, {known[0]}{more} (labctl health)")
    others = [text for text in earlier if set(nodes).isdisjoint(_named(text))]
    with suppress(HostError):
        files.write(path, "".join(f"{text}\n" for text in (*others, *map(_without_age, texts))))


def _named(text: str) -> list[str]:
    """Return the nodes or the host that a warning is about."""
    return text.partition(": ")[0].removeprefix(UNKNOWN).removesuffix(" is unknown").split(", ")


def _without_age(text: str) -> str:
    """Return a finding without the age of a kernel line: ``Xid 79, 5m ago``."""
    return re.sub(r", [^,]* ago$", "", text)


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


def unfit(bad: Mapping[str, Sequence[str]], nodes: Sequence[str], options: RunOptions) -> Unfit:
    """Return the error of a run that would begin on bad nodes, with the option that leaves those out."""
    reasons = _texts(bad)
    message = "; ".join(reasons[:SHOWN]) + (f" {human.more(len(reasons) - SHOWN)}" if len(reasons) > SHOWN else "")
    rest = without(options, tuple(bad))
    option = f"--include {rest.include}" if rest.include else f"--exclude {rest.exclude}"
    leave_out = f"{option} runs without; " if set(nodes) - bad.keys() else ""
    hint = f"{leave_out}`labctl health` tells what to do; LAB_PREFLIGHT=warn runs all the same"
    return Unfit(message, hint=hint, node=next(iter(bad)))


def unfit_nodes(backend: Backend) -> dict[str, list[str]]:
    """Read all hosts; return the bad nodes with the sentences that say why. None are unless LAB_PREFLIGHT is on."""
    if not is_read(backend):
        return {}
    lab = backend.lab()
    if mode(backend, lab.accelerator) != "on":
        return {}
    snapshots, verdicts = _examined(backend, lab, health_rules.load(lab.directory), full=False)
    with suppress(HostError):
        of_backend.keep(lab.directory, snapshots, verdicts, full=False)
    return _bad(lab, verdicts, [node.name for node in lab.nodes])


def unusable(backend: Backend, slots: int = 0) -> dict[str, str]:
    """Return the nodes on which no run can begin, and why: the backend's, and those that are not fit."""
    unfit_now = {node: sentences[0] for node, sentences in unfit_nodes(backend).items()}
    return {**unfit_now, **backend.unusable(slots)}

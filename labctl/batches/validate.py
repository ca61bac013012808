"""Validate a cluster: examine it, bring the lab up, run checks, find what is bad, remove the lab, and prove it.

A step that fails stops no other that can still say something. Nothing here connects to hosts: a ``ValidatedLab`` does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from msgspec.structs import replace

from labctl.backends.status import LabStatus
from labctl.batches import figures, interfaces
from labctl.batches.baseline import INTERRUPTED, Baseline
from labctl.batches.bisect import Diagnosis, Group
from labctl.batches.figures import Bound, JobOutcome
from labctl.batches.hostfiles import groups as grouped
from labctl.batches.operator import Operator
from labctl.batches.profile import Check, Hook, Profile, digest
from labctl.errors import ConfigError, Failures, HostError, LabError
from labctl.model import HERE, LAUNCHER
from labctl.reports.page import number
from labctl.reports.validation import HEALTH, Figure, Health, LinkVerdict, NodeVerdict, StepResult, Validation
from labctl.system.process import CompletedProcess

if TYPE_CHECKING:
    from labctl.doctor.report import DoctorReport

NO_LAB = "the lab did not come up"
TIMED_OUT = 124
"""What timeout(1) exits with."""


class Suspicion(NamedTuple):
    """Why a check failed on several nodes together: the metric and what it had to reach; neither where a run failed."""

    metric: str = ""
    bound: Bound | None = None


class ValidatedLab(Protocol):
    """The lab that is validated, and its hosts. Methods raise LabError if they fail."""

    def doctor(self) -> DoctorReport:
        """Run the checks of `labctl doctor`."""

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script on every host; also the hosts that failed."""

    def up(self) -> LabStatus:
        """Bring the lab up."""

    def status(self) -> LabStatus:
        """Read the state of the lab."""

    def run(self, check: Check, groups: tuple[Group, ...], record: str, slots: Mapping[str, int]) -> list[JobOutcome]:
        """Run a check on groups of nodes with these slots, disjoint ones at once; ``record`` names its directory."""

    def bisect(self, check: Check, nodes: tuple[str, ...], why: Suspicion, within: float) -> Diagnosis:
        """Find what is bad among nodes by runs of a check; a value may be ``within`` this share below the median."""

    def down(self) -> object:
        """Remove the lab."""

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """Describe what hosts have of the lab and of its runs; also the hosts that do not answer."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of labctl, image, engines and kernels."""


class Outcome(NamedTuple):
    """What came of a step."""

    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    advice: str = ""
    run_id: str = ""


class Evidence(NamedTuple):
    """What a step says of a node, or of a host."""

    health: Health
    text: str
    advice: str


def validate(
    lab: str,
    profile: Profile,
    subject: ValidatedLab,
    notice: Callable[[str], None],
    *,
    operator: Operator = Operator(),  # noqa: B008 - frozen
    baseline: Baseline | None = None,
    drained: tuple[str, ...] = (),
    keep: bool = False,
) -> Validation:
    """Validate the lab's cluster. Ctrl-C ends the step; then only the lab is removed, and the verdict is ERROR.

    ``drained`` are machines that are left out, and why. ConfigError where the lab cannot be brought up as it is set.
    """
    course = _Course(profile, subject, notice, operator, baseline)
    started, began = datetime.now(timezone.utc), time.monotonic()
    try:
        course.examine()
    finally:
        course.step("clean-up", partial(course.clean_up, keep=keep), always=True)
    return Validation(
        lab=lab,
        profile=profile.name,
        started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        seconds=round(time.monotonic() - began, 1),
        verdict=course.verdict,
        message=course.message(),
        drained=drained,
        nodes=course.node_verdicts(),
        links=tuple(course.links),
        steps=tuple(course.steps),
        figures=tuple(course.figures),
        checks={check.name: digest(check) for check in profile.checks},
        versions=course.versions,
    )


class _Course:
    """A validation under way: what is known so far."""

    def __init__(
        self,
        profile: Profile,
        subject: ValidatedLab,
        notice: Callable[[str], None],
        operator: Operator,
        baseline: Baseline | None,
    ) -> None:
        self.profile, self.subject, self.notice = profile, subject, notice
        self.operator, self.baseline = operator, baseline
        self.steps: list[StepResult] = []
        self.figures: list[Figure] = []
        self.links: list[LinkVerdict] = []
        self.evidence: defaultdict[str, list[Evidence]] = defaultdict(list)
        """By node or host."""
        self.placement: dict[str, str] = {}
        """Nodes and their hosts."""
        self.slots: dict[str, int] = {}
        """Of the nodes that are up."""
        self.has_devices = False
        self.tested: set[str] = set()
        """Nodes of runs that passed."""
        self.suspicion: Suspicion | None = None
        self.errors: list[tuple[str, Evidence]] = []
        """What doctor found last, by node or host."""
        self.interfaces: dict[str, dict[str, interfaces.Interface]] = {}
        """As they were counted first, by host."""
        self.before: tuple[str, ...] | None = None
        """What was there of the lab when it was brought up; None until then."""
        self.versions: Mapping[str, str] = {}
        self.interrupted = False

    def examine(self) -> None:
        self.step("doctor", self.doctor)
        seen: set[str] = set()
        for hook in self.profile.hooks:
            self.step(f"{hook.name} again" if hook.name in seen else hook.name, partial(self.hook, hook))
            seen.add(hook.name)
        self.step("network", self.network)
        self.step("up", self.up)
        self.step("nodes", self.doctor_of_nodes)
        for check in self.profile.checks:
            self.step(check.name, partial(self.check, check))
            if self.suspicion:
                self.step(f"bisect {check.name}", partial(self.bisect, check, self.suspicion))
                self.suspicion = None
        self.step("network after", self.network_after)

    def step(self, name: str, work: Callable[[], Outcome], *, always: bool = False) -> None:
        """Carry out a step, unless Ctrl-C was pressed before; what keeps it from ending is its result, too."""
        began = time.monotonic()
        if self.interrupted and not always:
            outcome = Outcome("skipped", INTERRUPTED)
        else:
            self.notice(f"validate: {name}")
            try:
                outcome = work()
            except LabError as error:
                if isinstance(error, ConfigError) and self.before is None:
                    raise
                outcome = Outcome("failed", error.message, error.hint)
            except KeyboardInterrupt:
                self.interrupted = True
                outcome = Outcome("failed", INTERRUPTED, "labctl down" if always else "")
        seconds = round(time.monotonic() - began, 1)
        if outcome.status == "failed":
            self.notice(f"validate: {name} failed: {outcome.message}")
        self.steps.append(StepResult(name=name, seconds=seconds, **outcome._asdict()))

    # --- hosts ---

    def doctor(self) -> Outcome:
        """Errors are evidence against their node or host; whether they keep the lab from coming up, `up` knows."""
        findings = self.subject.doctor().findings
        errors = [one for one in findings if one.level == "error"]
        for node, evidence in self.errors:
            self.evidence[node].remove(evidence)
        self.errors = [(one.node, Evidence("failing", f"{one.code}: {one.summary}", one.fix)) for one in errors]
        for node, evidence in self.errors:
            self.evidence[node].append(evidence)
        warned = sum(one.level == "warn" for one in findings)
        counted = f"{_count(len(errors), 'error')}, {_count(warned, 'warning')} in {_count(len(findings), 'finding')}"
        if errors:
            return Outcome("failed", f"{counted}: {errors[0].summary}", errors[0].fix or "labctl doctor")
        return Outcome("passed", counted)

    def hook(self, hook: Hook) -> Outcome:
        if hook.network_setup and self.operator.skip_network_setup:
            return Outcome("skipped", "SKIP_NETWORK_SETUP=true")
        environment = (_word(self.operator.l3_enabled), _word(self.operator.skip_network_setup))
        failed: dict[str, str] = {}
        hosts = 0
        for what, script in (("command", hook.command), ("check", hook.check)):
            if not script:
                continue
            # The first line is what errors call it.
            text = f'# {hook.name}: {what}\nexport L3_ENABLED="$1" SKIP_NETWORK_SETUP="$2"\n{script}'
            done, lost = self.subject.on_hosts(text, environment, hook.timeout)
            hosts = len(done) + len(lost)
            failed |= {host: error.message for host, error in lost.items() if host not in failed}
            for host, result in done.items():
                if result.code:
                    last = " ".join((result.err or result.out).split()[-30:])
                    how = "timed out" if result.code == TIMED_OUT else f"failed with exit code {result.code}"
                    failed.setdefault(host, f"{what} {how}: {last}".rstrip(": "))
        for host, why in failed.items():
            self.accuse(host, "failing", f"{hook.name}: {why}", f"look at {host}: hook `{hook.name}` of the profile")
        if failed:
            host, why = next(iter(failed.items()))
            return Outcome("failed", f"{len(failed)} of {hosts} hosts: {host}: {why}")
        return Outcome("passed", f"on {_count(hosts, 'host')}")

    def network(self) -> Outcome:
        """Count the interfaces that are up before the lab is."""
        self.interfaces, lost = self.count()
        expected = self.profile.network.up
        short = {}
        for host, found in self.interfaces.items():
            up = interfaces.up(found)
            enough = None if expected is None else up >= expected
            if enough is False:
                short[host] = f"{up} of {expected} interfaces up; {interfaces.down(found.values())}".rstrip("; ")
            limit, source = (f">= {expected} interfaces", "profile") if expected is not None else ("", "")
            self.figures.append(
                Figure(
                    step="network",
                    what="interfaces up",
                    node=host,
                    value=up,
                    unit="interfaces",
                    limit=limit,
                    passed=enough,
                    source=source,
                )
            )
        return self.judge_network(short, lost)

    def network_after(self) -> Outcome:
        """Count them again: none may have gone down or slowed down meanwhile."""
        now, lost = self.count()
        worse = {host: interfaces.changes(old, now[host]) for host, old in self.interfaces.items() if host in now}
        return self.judge_network({host: ", ".join(texts) for host, texts in worse.items() if texts}, lost)

    def count(self) -> tuple[dict[str, dict[str, interfaces.Interface]], Failures]:
        done, lost = self.subject.on_hosts(interfaces.SCRIPT, (), 30)
        wanted = self.profile.network
        read = partial(interfaces.read, interfaces=wanted.interfaces, driver=wanted.driver)
        return {host: read(result.out) for host, result in done.items()}, lost

    def judge_network(self, bad: Mapping[str, str], lost: Failures) -> Outcome:
        for host, why in bad.items():
            self.accuse(host, "failing", f"network: {why}", f"look at cables and driver on {host}: ip -br link")
        for host, error in lost.items():
            self.accuse(host, "not reached", error.message, error.hint)
        texts = [f"{host}: {why}" for host, why in bad.items()] + [error.message for error in lost.values()]
        if texts:
            return Outcome("failed", "; ".join(texts))
        if not any(self.interfaces.values()):
            return Outcome("passed", "no hardware interface to count")
        counts = sorted({interfaces.up(found) for found in self.interfaces.values()})
        return Outcome("passed", f"{' or '.join(map(str, counts))} up on each host")

    # --- the lab ---

    def up(self) -> Outcome:
        """Keys, files, image and containers; the nodes of hosts that fail are left out."""
        self.before, _ = self.subject.remains()
        try:
            self.take(self.subject.up())
        except HostError as error:
            self.take(self.subject.status())
            return Outcome("failed", error.message, error.hint)
        self.versions = self.subject.versions()
        hosts = _count(len(set(self.placement.values())), "host")
        return Outcome("passed", f"keys, files, image and {_count(len(self.slots), 'node')} on {hosts}")

    def take(self, status: LabStatus) -> None:
        failures = {one.host: one for one in status.unreachable}
        workers = [node for node in status.nodes if node.role == "worker"]
        self.placement = {node.name: node.host for node in workers}
        launched = any(node.name == LAUNCHER and node.state == "running" for node in status.nodes)
        for node in workers:
            if node.state == "running":
                if launched:
                    self.slots[node.name] = node.slots
                self.has_devices |= bool(node.devices)
            else:
                failure = failures.get(node.host)
                text = failure.message if failure else f"{node.state} {node.reason}".rstrip()
                self.accuse(node.name, "not reached", text, failure.hint if failure else "labctl up")

    def doctor_of_nodes(self) -> Outcome:
        """What doctor sees only once nodes run, and whether `up` has mended what it found before."""
        if not self.slots:
            return Outcome("skipped", NO_LAB)
        outcome, first = self.doctor(), self.steps[0]
        if first.status == "failed" and outcome.status == "passed":
            self.steps[0] = replace(first, status="passed", message=f"{first.message}; `up` mended it", advice="")
        return outcome

    def usable(self) -> tuple[str, ...]:
        """The nodes that are up and do not fail: with one that does, every run fails."""
        return tuple(node for node in self.slots if self.health(node) not in ("failing", "not reached"))

    def check(self, check: Check) -> Outcome:
        nodes = self.usable()
        if not nodes:
            return Outcome("skipped", "no node is left" if self.slots else NO_LAB)
        if check.needs_devices and not self.has_devices:
            return Outcome("failed" if self.profile.needs_devices else "skipped", "the nodes have no accelerator")
        if check.nodes == "pairs" and len(nodes) < 2:
            return Outcome("skipped", "needs two nodes")
        jobs = self.run(check, _groups(check, nodes), check.name)
        bounds = figures.bounds(check, jobs, self.profile.within, self.baseline, self.placement)
        found = figures.judge(check, jobs, bounds)
        bad = _bad(check, jobs, found)
        recovered: list[str] = []
        if bad and all(len(group) == 1 for group in bad):
            # A single bad run accuses nobody.
            again = self.run(check, tuple(bad), f"{check.name}-again")
            jobs = [job for job in jobs if job.nodes not in bad] + again
            found = figures.judge(check, jobs, bounds)
            still = _bad(check, again, found)
            recovered = [node for (node,) in bad if (node,) not in still]
            bad = still
            for (node,), why in bad.items():
                slow = next(job for job in again if job.nodes == (node,)).passed
                if len(bad) < len(jobs):
                    self.accuse(node, "slow" if slow else "failing", f"{why}, twice", self.advice(node))
                else:
                    # What all nodes fail says nothing of one of them, and the next check may.
                    self.accuse(node, "slow" if slow else "unsure", f"{why}, twice", _look_at(check))
        elif bad:
            missed = next((one for one in found if one.passed is False and one.value is not None), None)
            self.suspicion = Suspicion(missed.what, bounds[missed.what, missed.node]) if missed else Suspicion()
        self.figures += found
        self.tested |= {node for job in jobs if job.nodes not in bad for node in job.nodes}
        run_id = next((job.run_id for job in jobs if job.nodes in bad or len(jobs) == 1), "")
        if bad:
            texts = [f"{', '.join(group)}: {why}" for group, why in bad.items()]
            return Outcome("failed", f"{len(bad)} of {len(jobs)} runs: {'; '.join(texts[:3])}", run_id=run_id)
        note = f"; {', '.join(recovered)} passed when run again" if recovered else ""
        return Outcome("passed", f"{_summary(found) or _count(len(jobs), 'run')}{note}", run_id=run_id)

    def run(self, check: Check, groups: tuple[Group, ...], record: str) -> list[JobOutcome]:
        return self.subject.run(check, groups, record, self.slots)

    def bisect(self, check: Check, suspicion: Suspicion) -> Outcome:
        """Find the node or link with the workload of a check that failed on several nodes together."""
        found = self.subject.bisect(check, self.usable(), suspicion, self.profile.within)
        for node in found.bad:
            text = f"{check.name}: {_measure(node.kind, node.figure)} in {len(node.runs)} runs with good partners"
            self.accuse(node.node, node.kind, text, self.advice(node.node))
        for link in found.links:
            a, b = link.nodes
            text = (
                f"{check.name}: {_measure(link.kind, link.figure)} in {len(link.runs)} runs; both are good with others"
            )
            advice = f"look at cables and switch between {a} and {b}, then re-run"
            self.links.append(LinkVerdict(a=a, b=b, verdict=link.kind, evidence=(text,), advice=advice))
        for name in found.unsure:
            why = found.note or "its runs contradict each other"
            self.accuse(name, "unsure", f"{check.name}: {why}", _look_at(check))
        self.tested |= set(found.good)
        names = [f"{one.node} is {one.kind}" for one in found.bad]
        names += [f"the link {' - '.join(one.nodes)} is {one.kind}" for one in found.links]
        tried = f"{_count(found.runs, 'run')} in {_count(found.rounds, 'round')}"
        if names:
            return Outcome("failed", f"{', '.join(names)} ({tried})")
        if not found.good:
            return Outcome("failed", f"{found.note} ({tried})", _look_at(check))
        return Outcome("passed", f"no node or link alone is bad ({tried}) {found.note}".rstrip())

    def clean_up(self, *, keep: bool) -> Outcome:
        """Remove the lab, unless it was there before, and look whether anything of it is left."""
        if self.before is None:
            return Outcome("skipped", "nothing was started")
        if self.before:
            return Outcome("skipped", "the lab was up before, and stays up")
        if keep:
            return Outcome("skipped", "--keep: `labctl down` removes the lab")
        self.subject.down()
        left, silent = self.subject.remains()
        if left or silent:
            texts = [*left, *(error.message for error in silent.values())]
            return Outcome("failed", f"left: {', '.join(texts)}", "labctl down")
        return Outcome("passed", "no container, network or process of the lab is left")

    # --- verdicts ---

    def accuse(self, name: str, health: Health, text: str, advice: str) -> None:
        self.evidence[name].append(Evidence(health, text, advice))

    def advice(self, node: str) -> str:
        """A host can be taken out of use, a node of this machine cannot."""
        look, host = f"look at {node}: labctl doctor -n {node}", self.placement[node]
        return look if host == HERE else f"take {host} out of use by a line in drained.txt, and {look}"

    def evidence_of(self, node: str) -> list[Evidence]:
        """Evidence against the node and its host, worst first; this machine is no node's host alone."""
        host = self.placement.get(node, "")
        on_host = self.evidence[host] if host not in ("", HERE, node) else []
        return sorted([*self.evidence[node], *on_host], key=lambda one: HEALTH.index(one.health))

    def health(self, node: str) -> Health | None:
        return next((one.health for one in self.evidence_of(node)), None)

    def node_verdicts(self) -> tuple[NodeVerdict, ...]:
        """Of all nodes, of the hosts that failed before they had one, and of this machine where it has a trouble."""
        others = {*self.placement.values()} - {HERE}
        hosts = [name for name, found in self.evidence.items() if found and name not in others]
        verdicts = []
        for node in dict.fromkeys((*self.placement, *hosts)):
            found = self.evidence_of(node)
            if not found and node not in self.tested:
                found = [Evidence("unsure", "no run on it passed", "")]
            absent = node in self.placement and node not in self.slots
            verdict = NodeVerdict(
                node=node,
                host=self.placement.get(node, node),
                verdict="not reached" if absent else found[0].health if found else "good",
                evidence=tuple(dict.fromkeys(one.text for one in found)),
                advice=found[0].advice if found else "",
            )
            verdicts.append(verdict)
        return tuple(verdicts)

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "ERROR"]:
        if self.interrupted or not self.slots:
            return "ERROR"
        failed = any(one.status == "failed" for one in self.steps)
        return "FAIL" if failed or any(one.verdict != "good" for one in self.node_verdicts()) else "PASS"

    def message(self) -> str:
        """Which node is bad, and why; else what else failed."""
        if self.interrupted:
            return "Interrupted."
        if self.verdict == "PASS":
            return f"All {len(self.slots)} nodes are good." if len(self.slots) > 1 else "The node is good."
        nodes = [one for one in self.node_verdicts() if one.verdict != "good"]
        worst = sorted(nodes, key=lambda one: HEALTH.index(one.verdict))
        parts = [f"{one.node} is {one.verdict}: {one.evidence[0]}" for one in worst if one.verdict != "unsure"][:3]
        parts += [f"the link {one.a} - {one.b} is {one.verdict}: {one.evidence[0]}" for one in self.links][:3]
        failed = [one for one in self.steps if one.status == "failed"]
        parts = parts or [f"step {one.name} failed: {one.message}" for one in failed[:1]]
        parts = parts or [f"{one.node} is {one.verdict}: {one.evidence[0]}" for one in nodes[:3]]
        return f"{'; '.join(parts)}."


def _groups(check: Check, nodes: tuple[str, ...]) -> tuple[Group, ...]:
    if check.nodes == "all":
        return (nodes,)
    if check.nodes == "each":
        return tuple((node,) for node in nodes)
    odd = ((nodes[-1], nodes[0]),) if len(nodes) % 2 else ()
    return (*grouped(nodes, 2, "pairs"), *odd)


def _bad(check: Check, jobs: Sequence[JobOutcome], found: Sequence[Figure]) -> dict[Group, str]:
    """The groups whose run failed or missed a threshold, and why."""
    bad = {}
    for job in jobs:
        of = figures.subject(job.nodes, everyone=check.nodes == "all")
        missed = [figures.missed(one) for one in found if one.node == of and one.passed is False]
        if not job.passed:
            bad[job.nodes] = f"{check.name}: {job.message}"
        elif missed:
            bad[job.nodes] = "; ".join(missed)
    return bad


def _summary(found: Sequence[Figure]) -> str:
    """The figures of a check in a few words, as ``memory 11.2 to 12.1 GB/s``."""
    parts = []
    for what in dict.fromkeys(one.what for one in found):
        values = [one.value for one in found if one.what == what and one.value is not None]
        unit = next(one.unit for one in found if one.what == what)
        several = f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else number(values[0])
        parts.append(f"{what} {several} {unit}".rstrip())
    return ", ".join(parts)


def _measure(kind: str, figure: float | None) -> str:
    return kind if figure is None else f"{figure:.0%} of the median"


def _look_at(check: Check) -> str:
    return f"look at the workload or threshold of {check.name}, and at what the nodes share, before any of them"


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'s' * (amount != 1)}"


def _word(value: bool) -> str:
    return "true" if value else "false"

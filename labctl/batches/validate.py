"""Validate a cluster: examine the hosts, bring the lab up, run checks, find bad nodes and links, remove the lab.

A failed step does not stop steps that can still give results. Only a ``ValidatedLab`` reaches the lab and its hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from labctl.backends.status import LabStatus
from labctl.batches import evidence, figures, interfaces, summary
from labctl.batches.advice import Cause
from labctl.batches.alone import Runs, Trial, in_turn
from labctl.batches.baseline import CHECKS, INTERRUPTED, Baseline
from labctl.batches.bisect import Diagnosis, Group, shown_by
from labctl.batches.evidence import Verdict
from labctl.batches.figures import Bound, JobOutcome
from labctl.batches.operator import Operator
from labctl.batches.profile import Check, Hook, Profile, digest
from labctl.batches.summary import Outcome
from labctl.batches.together import GroupTrial, Suspicion, groups_of
from labctl.batches.verdicts import Evidence, Verdicts
from labctl.errors import ConfigError, Failures, HostError, LabError
from labctl.model import HERE, LAUNCHER
from labctl.reports.validation import Figure, Hardware, Health, LinkVerdict, StepResult, Validation
from labctl.system import human
from labctl.system.load import Watch
from labctl.system.process import CompletedProcess

if TYPE_CHECKING:
    from labctl.doctor.report import DoctorReport

NO_LAB = "the lab did not come up"
NO_HOSTS = "labctl reaches no host of a cluster"
TIMED_OUT = 124
"""Exit code of timeout(1)."""


class ValidatedLab(Protocol):
    """The lab that is validated, and its hosts. Methods raise LabError if they fail."""

    def doctor(self) -> DoctorReport:
        """Run the checks of `labctl doctor` and return their findings."""

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script on every host; return the results, of any exit code, and the hosts on which it did not end."""

    def up(self) -> LabStatus:
        """Bring the lab up and return its status. HostError if that fails."""

    def status(self) -> LabStatus:
        """Return the status of the lab as it is."""

    def look_at(self, node: str, host: Hardware, cause: Cause) -> str:
        """Return the commands that show what is wrong with a node on this host."""

    def typed(self, host: str, command: str) -> str:
        """Return the command line that a user types on this machine to run a shell command on a host."""

    def run(self, check: Check, groups: tuple[Group, ...], record: str, slots: Mapping[str, int]) -> list[JobOutcome]:
        """Run a check on groups of nodes with these slots, disjoint ones at once; return an outcome per group."""

    def bisect(self, check: Check, nodes: tuple[str, ...], why: Suspicion, within: float, figures: int) -> Diagnosis:
        """Find the bad nodes and links that explain ``why``, by runs of a check; ``within``: tolerance of values.

        The false accusations that are allowed are shared with so many figures.
        """

    def down(self) -> object:
        """Remove the lab."""

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """List what is left of the lab and its runs on the hosts, and the hosts that do not answer."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of labctl, image, engines and kernels."""

    def hardware(self) -> tuple[Hardware, ...]:
        """Return the hardware of each host; empty if it cannot be read."""


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
    wait: Callable[[float], None] = time.sleep,
) -> Validation:
    """Run all steps of a profile on the lab, remove the lab unless kept, and return the verdicts; ERROR after Ctrl-C.

    ``drained`` are machines that are left out, with the reason. ConfigError if the settings do not allow to bring the
    lab up.
    """
    course = _Course(profile, subject, notice, operator, baseline, wait)
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
        hardware=tuple(course.hardware.values()),
        steps=tuple(course.steps),
        figures=tuple(course.figures),
        checks={check.name: digest(check) for check in profile.checks},
        versions=course.versions,
        busy=tuple(f"{host}: {load.text()}" for host, load in course.watch.busy.items()),
        loads=tuple(course.watch.measured),
    )


class _Course(Verdicts):
    """State of a running validation, with a method per step."""

    def __init__(
        self,
        profile: Profile,
        subject: ValidatedLab,
        notice: Callable[[str], None],
        operator: Operator,
        baseline: Baseline | None,
        wait: Callable[[float], None],
    ) -> None:
        """Start without results; ``notice`` gets a line per step."""
        super().__init__()
        self.profile, self.subject, self.notice = profile, subject, notice
        self.operator, self.baseline, self.wait = operator, baseline, wait
        self.figures: list[Figure] = []
        self.launched = False
        """The launcher is up."""
        self.has_devices = False
        self.suspicion: Suspicion | None = None
        self.logs: list[str] = []
        """Directories of the logs of this step, relative to the report."""
        self.errors: list[tuple[str, Evidence]] = []
        """Errors of the last doctor step, with node or host."""
        self.interfaces: dict[str, dict[str, interfaces.Interface]] = {}
        """First count, per host and name."""
        self.before: tuple[str, ...] | None = None
        """Containers, networks and processes of the lab before it was brought up; None until then."""
        self.watch = Watch(subject.on_hosts, notice)
        self.versions: Mapping[str, str] = {}
        self.hardware: dict[str, Hardware] = {}
        """Hardware per host."""

    def examine(self) -> None:
        """Run doctor, hooks, network, up, doctor of the nodes, each check (bisect if it fails), network again."""
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
        """Run a step and append its result; an error or Ctrl-C fails it; after Ctrl-C skip it unless ``always``.

        ConfigError before the lab is brought up is raised.
        """
        began, self.logs = time.monotonic(), []
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
        if outcome.status in ("failed", "unsure"):
            self.notice(f"validate: {name} {outcome.status}: {outcome.message}")
        self.steps.append(StepResult(name=name, seconds=seconds, logs=tuple(self.logs), **outcome._asdict()))

    # --- hosts ---

    def doctor(self) -> Outcome:
        """Run doctor; replace its earlier evidence by its errors; fail if there is one."""
        findings = self.subject.doctor().findings
        errors = [finding for finding in findings if finding.level == "error"]
        for node, of_doctor in self.errors:
            self.evidence[node].remove(of_doctor)
        self.errors = [
            (finding.node, Evidence("failing", f"{finding.code}: {finding.summary}", finding.fix)) for finding in errors
        ]
        for node, of_doctor in self.errors:
            self.evidence[node].append(of_doctor)
        warned = sum(finding.level == "warn" for finding in findings)
        wrong = f"{human.count(len(errors), 'error')}, {human.count(warned, 'warning')}"
        counted = f"{wrong} in {human.count(len(findings), 'finding')}"
        if errors:
            return Outcome("failed", f"{counted}: {errors[0].summary}", errors[0].fix or "labctl doctor")
        return Outcome("passed", counted)

    def hook(self, hook: Hook) -> Outcome:
        """Run a hook's command and check on all hosts; accuse hosts where one does not end or exits non-zero."""
        if hook.network_setup and self.operator.skip_network_setup:
            return Outcome("skipped", "SKIP_NETWORK_SETUP=true")
        environment = (_boolean(self.operator.l3_enabled), _boolean(self.operator.skip_network_setup))
        failed: dict[str, str] = {}
        hosts = 0
        for part, script in (("command", hook.command), ("check", hook.check)):
            if not script:
                continue
            # Errors name a script by its first line.
            text = f'# {hook.name}: {part}\nexport L3_ENABLED="$1" SKIP_NETWORK_SETUP="$2"\n{script}'
            done, lost = self.subject.on_hosts(text, environment, hook.timeout)
            hosts = len(done) + len(lost)
            for host, error in lost.items():
                failed.setdefault(host, error.message)
            for host, result in done.items():
                if result.code:
                    failed.setdefault(host, _hook_failure(part, result))
        if not hosts:
            return Outcome("skipped", NO_HOSTS)
        for host, why in failed.items():
            self.accuse(host, "failing", f"{hook.name}: {why}", f"look at {host}: hook `{hook.name}` of the profile")
        if failed:
            host, why = next(iter(failed.items()))
            return Outcome("failed", f"{len(failed)} of {hosts} hosts: {host}: {why}")
        return Outcome("passed", f"on {human.count(hosts, 'host')}")

    def network(self) -> Outcome:
        """Count each host's interfaces that are up, as figures; fail if the profile expects more."""
        self.interfaces, lost = self.count()
        expected = self.profile.network.up
        limit, source = (f">= {expected}", "profile") if expected is not None else ("", "")
        short = {}
        for host, by_name in self.interfaces.items():
            up = interfaces.up(by_name)
            enough = None if expected is None else up >= expected
            if enough is False:
                short[host] = f"{up} of {expected} interfaces up; {interfaces.down(by_name.values())}".rstrip("; ")
            self.figures.append(
                Figure(
                    step="network",
                    what="interfaces up",
                    node=host,
                    value=up,
                    unit="",
                    limit=limit,
                    passed=enough,
                    source=source,
                )
            )
        return self.judge_network(short, lost)

    def network_after(self) -> Outcome:
        """Read the interfaces again; fail and accuse hosts where one is gone, down or slower than before."""
        now, lost = self.count()
        bad = {}
        for host, old in self.interfaces.items():
            worse = interfaces.changes(old, now[host]) if host in now else []
            if worse:
                bad[host] = ", ".join(worse)
        return self.judge_network(bad, lost)

    def count(self) -> tuple[dict[str, dict[str, interfaces.Interface]], Failures]:
        """Return the interfaces that the profile selects, by host and name, and the hosts that were not reached."""
        done, lost = self.subject.on_hosts(interfaces.SCRIPT, (), 30)
        selection = self.profile.network
        read = partial(interfaces.read, interfaces=selection.interfaces, driver=selection.driver)
        return {host: read(result.out) for host, result in done.items()}, lost

    def judge_network(self, bad: Mapping[str, str], lost: Failures) -> Outcome:
        """Accuse hosts with bad interfaces or not reached; return failed if any, skipped without hosts."""
        for host, why in bad.items():
            mend = f"look at cables and driver on {host}: `{self.subject.typed(host, 'ip -br link')}`"
            self.accuse(host, "failing", f"network: {why}", mend)
        for host, error in lost.items():
            self.accuse(host, "not reached", error.message, error.hint)
        texts = [f"{host}: {why}" for host, why in bad.items()]
        texts += [error.message for error in lost.values()]
        if texts:
            return Outcome("failed", "; ".join(texts))
        if not self.interfaces:
            return Outcome("skipped", NO_HOSTS)
        if not any(self.interfaces.values()):
            return Outcome("passed", "no hardware interface to count")
        counts = sorted(set(map(interfaces.up, self.interfaces.values())))
        return Outcome("passed", f"{' or '.join(map(str, counts))} up on each host")

    # --- the lab ---

    def up(self) -> Outcome:
        """Bring the lab up and record nodes, hardware and versions; fail, with the nodes that run, on HostError."""
        self.before, _ = self.subject.remains()
        self.hardware = {host.host: host for host in self.subject.hardware()}
        try:
            self.take(self.subject.up())
        except HostError as error:
            self.take(self.subject.status())
            return Outcome("failed", error.message, error.hint)
        self.versions = self.subject.versions()
        hosts = human.count(len(set(self.placement.values())), "host")
        brought = "keys, files, image and " if self.launched else ""
        return Outcome("passed", f"{brought}{human.count(len(self.slots), 'node')} on {hosts}")

    def take(self, status: LabStatus) -> None:
        """Record hosts, slots of running workers and if they have devices; accuse workers that do not run."""
        failures = {failure.host: failure for failure in status.unreachable}
        workers = [node for node in status.nodes if node.role == "worker"]
        self.placement = {node.name: node.host for node in workers}
        self.launched = any(node.name == LAUNCHER and node.state == "running" for node in status.nodes)
        # In a cluster runs bring their launcher.
        without_launcher = all(node.role != LAUNCHER for node in status.nodes)
        for node in workers:
            if node.state == "running":
                if self.launched or without_launcher:
                    self.slots[node.name] = node.slots
                self.has_devices |= bool(node.devices)
            else:
                failure = failures.get(node.host)
                text = failure.message if failure else f"{node.state} {node.reason}".rstrip()
                mend = self.look_at(node.name, "failing") if without_launcher else "labctl up"
                self.accuse(node.name, "not reached", text, failure.hint if failure else mend)

    def doctor_of_nodes(self) -> Outcome:
        """Run doctor again, or skip if no node is up; if it passes, mark a failed first step as passed."""
        if not self.slots:
            return Outcome("skipped", NO_LAB)
        outcome, first = self.doctor(), self.steps[0]
        if first.status == "failed" and outcome.status == "passed":
            self.steps[0] = replace(first, status="passed", message=f"{first.message}; `labctl up` fixed it", advice="")
        return outcome

    def usable(self) -> tuple[str, ...]:
        """Return the nodes that are up and have no evidence of failing or not being reached."""
        return tuple(node for node in self.slots if self.health(node) not in ("failing", "not reached"))

    def check(self, check: Check) -> Outcome:
        """Run a check on the usable nodes, alone or together, and return its outcome; skipped or failed if unmet."""
        nodes = self.usable()
        if unmet := self.unmet(check, nodes):
            return unmet
        if check.nodes in ("each", "turns") or len(nodes) == 1:
            return self.check_alone(check, nodes)
        return self.check_together(check, nodes)

    def check_together(self, check: Check, nodes: tuple[str, ...]) -> Outcome:
        """Run a check on pairs or all nodes, add its figures, and leave what is bad to the next bisect."""
        groups = groups_of(check, nodes)
        trial = GroupTrial(check, evidence.error_per_test(len(groups), self.profile.figures))
        try:
            trial.measure(partial(self.loaded, check), groups, partial(self.bounds, check))
        finally:
            # Also after Ctrl-C.
            self.figures += [*trial.figures(), *figures.latencies(check, trial.last())]
        self.suspicion = trial.suspicion()
        for group in trial.of("good"):
            self.tested.update(group)
        outcome = summary.of_groups(trial)
        return outcome._replace(advice=self.repeat) if outcome.status == "unsure" else outcome

    def check_alone(self, check: Check, nodes: tuple[str, ...]) -> Outcome:
        """Measure each node until judged, and accuse bad and unsure nodes; return the outcome."""
        trial = self.trial(check, nodes)
        self.judge_alone(check, trial)
        if trial.failed_together:
            for node in nodes:
                if trial.proven_slow(node):
                    self.accuse_measured(check, trial, node, doubted=False)
            self.suspicion = Suspicion()
            return Outcome("failed", f"{check.name}: {trial.failed_together}")
        verdicts = {node: trial.verdict(node) for node in nodes}
        doubted = _doubted(trial, verdicts)
        for node, verdict in verdicts.items():
            if verdict == "good":
                self.tested.add(node)
            else:
                self.accuse_measured(check, trial, node, doubted=node in doubted)
        outcome = summary.of_nodes(trial, verdicts)
        if doubted:
            outcome = outcome._replace(message=self.shared_cause(trial, doubted), advice=self.doubt(check))
        return outcome

    def judge_alone(self, check: Check, trial: Trial) -> None:
        """Measure the nodes of a trial until all are judged, slow ones again, and add the figures."""
        numbers = count()
        try:
            self.measure(check, trial, numbers)
            for _ in range(evidence.CONFIRMATIONS):
                if slow := self.to_confirm(trial):
                    self.confirm(check, trial, slow, numbers)
        finally:
            # Also after Ctrl-C.
            self.figures += trial.figures()

    def shared_cause(self, trial: Trial, nodes: Sequence[str]) -> str:
        """Render what several bad nodes may share: their hosts, and the check's limit or workload."""
        hosts = {self.placement[node] for node in nodes}
        place = f"the host {min(hosts)}" if len(hosts) == 1 else "what their hosts share"
        how, blamed = "fail", "the workload"
        if any(map(trial.misses_bound, nodes)):
            sources = dict.fromkeys(bound.source for bound in trial.bounds.values())
            how, blamed = "are slow in", f"the limit ({', '.join(sources)})"
        counted = f"{len(nodes)} of {len(trial.nodes)} nodes {how} {trial.check.name}"
        return f"{counted}: suspect {place} or {blamed}; {nodes[0]}: {summary.against(trial, nodes[0])}"

    def confirm(self, check: Check, trial: Trial, slow: list[str], numbers: Iterator[int]) -> None:
        """Wait, measure the passing nodes again and merge that; on Ctrl-C record slow ones as unsure and raise."""
        self.notice(
            f"validate: {human.listed(slow)} may be slow; {check.name} is repeated in {human.duration(evidence.PAUSE)}"
        )
        try:
            self.wait(evidence.PAUSE)
            later = self.trial(check, trial.passing())
            self.measure(check, later, numbers)
            trial.confirm(later)
        except KeyboardInterrupt:
            for node in slow:
                self.accuse(node, "unsure", f"{check.name}: it may be slow; {INTERRUPTED}", self.repeat)
            raise

    def to_confirm(self, trial: Trial) -> list[str]:
        """Return passing nodes proven slow, if there are several hosts and not all nodes are slow; else none."""
        slow = [node for node in trial.passing() if trial.proven_slow(node)]
        hosts = {self.placement[node] for node in trial.nodes}
        return slow if len(hosts) > 1 and len(slow) < len(trial.nodes) and not trial.failed_together else []

    def trial(self, check: Check, nodes: tuple[str, ...]) -> Trial:
        """Return a trial of a check on nodes, without measurements."""
        # Nodes of one host share its memory and disk; in turn, each has the cores to itself.
        comparable = check.nodes == "turns" or len({self.placement[node] for node in nodes}) == len(nodes)
        error = evidence.error_per_test(len(nodes), self.profile.figures)
        return Trial(check, nodes, self.profile.within, error, compared=comparable)

    def measure(self, check: Check, trial: Trial, numbers: Iterator[int]) -> None:
        """Run a check on the nodes of a trial until all are judged; ``numbers`` number its runs."""
        trial.measure(
            lambda nodes, turns: self.measured(check, nodes, turns, next(numbers)), partial(self.bounds, check)
        )

    def measured(self, check: Check, nodes: tuple[str, ...], turns: int, number: int) -> Runs:
        """Run a check on each of these nodes, or once on all of them in turn, with the load of their hosts."""
        groups: tuple[Group, ...] = tuple((node,) for node in nodes)
        if check.nodes == "turns":
            check, groups = in_turn(check, turns), (nodes,)
        return self.loaded(check, groups, number)

    def loaded(self, check: Check, groups: tuple[Group, ...], number: int) -> Runs:
        """Run a check on groups; return its runs with the load of each node's host, none if it has devices."""
        record = f"{check.name}-again{number}" if number else check.name
        if self.has_devices:
            # What devices compute does not depend on who else uses the cores.
            return Runs(self.run(check, groups, record), {})
        before = self.watch.read(check.name, "before")
        jobs = self.run(check, groups, record)
        after = self.watch.read(check.name, "after")
        lost = {}
        for node in chain.from_iterable(groups):
            of_host = [loads.get(self.placement[node]) for loads in (before, after)]
            # The lab's own runs, which have just ended, may show in one of the two.
            lost[node] = min((of_time.share for of_time in of_host if of_time), default=0.0)
        return Runs(jobs, lost)

    def accuse_measured(self, check: Check, trial: Trial, node: str, *, doubted: bool) -> None:
        """Record failing, slow or wrong evidence against a node; unsure if its verdict or the check is."""
        failure, computed = trial.failing().get(node), trial.agreement().get(node, "good")
        cause: Cause = "failing" if failure else "slow"
        if computed != "good":
            cause = "wrong"
        health: Health = "slow" if cause == "slow" else "failing"
        advice = self.advice(node, cause)
        if trial.verdict(node) == "unsure":
            health, advice = "unsure", self.repeat
        elif doubted:
            # The next check may tell the nodes apart.
            health, advice = "unsure", self.doubt(check)
        for text in [failure] if failure else trial.texts(node):
            self.accuse(node, health, text, advice, run_id=trial.runs[node][-1].run_id)

    def bounds(self, check: Check, jobs: Sequence[JobOutcome]) -> dict[tuple[str, str], Bound]:
        """Return the bounds of a check's figures by metric and node or pair, of profile, baseline and pairs."""
        return figures.bounds(check, jobs, self.profile.within, self.baseline, self.placement)

    def unmet(self, check: Check, nodes: tuple[str, ...]) -> Outcome | None:
        """Return a skipped or failed outcome if nodes or devices are missing for a check; None if it can run."""
        if not nodes:
            return Outcome("skipped", "no node is left" if self.slots else NO_LAB)
        if check.needs_devices and not self.has_devices:
            return Outcome("failed" if self.profile.needs_devices else "skipped", "the nodes have no accelerator")
        if check.nodes == "pairs" and len(nodes) < 2:
            return Outcome("skipped", "needs two nodes")
        return None

    def run(self, check: Check, groups: tuple[Group, ...], record: str) -> list[JobOutcome]:
        """Run a check on groups of nodes; note the directory of its logs, which ``record`` names; return outcomes."""
        self.logs.append(f"{CHECKS}/{record}")
        return self.subject.run(check, groups, record, self.slots)

    def bisect(self, check: Check, suspicion: Suspicion) -> Outcome:
        """Find bad nodes and links behind a failed check; record bad and unsure ones; return the outcome."""
        logs = f"{CHECKS}/{check.name}-bisect"
        self.logs.append(logs)
        diagnosis = self.subject.bisect(check, self.usable(), suspicion, self.profile.within, self.profile.figures)
        for node in diagnosis.bad:
            text = f"{check.name}: {shown_by(node)}, of {human.count(len(node.runs), 'run')} with good partners"
            self.accuse(node.node, node.kind, text, self.advice(node.node, node.kind), logs=logs)
        for link in diagnosis.links:
            a, b = link.nodes
            text = f"{check.name}: {shown_by(link)}, of {human.count(len(link.runs), 'run')}; both are good with others"
            looks = dict.fromkeys(self.look_at(node, "link") for node in link.nodes)
            advice = f"look at cables and switch between {a} and {b}: {', '.join(looks)}; then `{self.profile.command}`"
            self.links.append(LinkVerdict(a=a, b=b, verdict=link.kind, evidence=(text,), advice=advice, logs=(logs,)))
        for name in diagnosis.unsure:
            why = diagnosis.note or "its runs contradict each other"
            self.accuse(name, "unsure", f"{check.name}: {why}", self.doubt(check), logs=logs)
        self.tested |= set(diagnosis.good)
        names = [f"{node.node} is {node.kind}" for node in diagnosis.bad]
        names += [f"the link {' - '.join(link.nodes)} is {link.kind}" for link in diagnosis.links]
        tried = f"{human.count(diagnosis.runs, 'run')} in {human.count(diagnosis.rounds, 'round')}"
        if names:
            return Outcome("failed", f"{', '.join(names)} ({tried})")
        if suspicion.bound and (suspicion.bound.of_others or suspicion.bound.of_baseline):
            # Nothing explains figures that are worse than others of the same check, or than those of another day.
            self.steps[-1] = replace(self.steps[-1], status="unsure")
        if diagnosis.unsure and not diagnosis.none_good:
            return Outcome("unsure", f"{human.listed(diagnosis.unsure)}: {diagnosis.note} ({tried})", self.repeat)
        if not diagnosis.good:
            return Outcome("failed", f"{diagnosis.note} ({tried})", self.doubt(check))
        return Outcome("passed", f"no single node or link is bad ({tried}) {diagnosis.note}".rstrip())

    def clean_up(self, *, keep: bool) -> Outcome:
        """Remove the lab and fail if something is left; skipped if it was up before, with ``keep``, or not begun."""
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

    def advice(self, node: str, cause: Cause) -> str:
        """Return what to do about a node: commands to look at it, and to drain its host unless it is this machine."""
        look, host = f"look at {node}: {self.look_at(node, cause)}", self.placement[node]
        return look if host == HERE else f"{look}; until it is repaired, list {host} in drained.txt"

    def look_at(self, node: str, cause: Cause) -> str:
        """Return the commands that show what is wrong with a node, by its host's hardware."""
        host = self.placement[node]
        return self.subject.look_at(node, self.hardware.get(host, Hardware(host=host)), cause)

    @property
    def repeat(self) -> str:
        """Return what to do where noise hides the verdict."""
        return f"repeat when the hosts are idle: `{self.profile.command}`"

    def doubt(self, check: Check) -> str:
        """Return what to do where a check is doubted before the nodes that did not pass it."""
        shown = f"`{self.profile.command} --print-profile`"
        return f"check what the nodes share (`labctl doctor`), and workload and limits of {check.name} ({shown})"


def _hook_failure(part: str, result: CompletedProcess) -> str:
    """Render how a hook's command failed: timeout or exit code, and the last 30 words of its output."""
    last = " ".join((result.err or result.out).split()[-30:])
    how = "timed out" if result.code == TIMED_OUT else f"failed with exit code {result.code}"
    return f"{part} {how}: {last}".rstrip(": ")


def _doubted(trial: Trial, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return bad nodes whose shared limit or workload is suspect: all are bad, or most miss a bound alone; or []."""
    bad = [node for node, verdict in verdicts.items() if verdict == "bad"]
    if len(bad) == len(verdicts):
        return bad if len(bad) > 1 else []
    beyond = [node for node in bad if trial.misses_bound(node)]
    return beyond if 2 * len(beyond) > len(verdicts) else []


def _boolean(value: bool) -> str:
    return "true" if value else "false"

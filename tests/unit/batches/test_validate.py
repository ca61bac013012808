"""A validation from setup to report to removal, with fictitious hosts and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import Any

import pytest
from msgspec.structs import replace

from labctl.backends.finding import Finding, error, ok
from labctl.backends.status import LabStatus, NodeStatus
from labctl.batches.advice import Cause
from labctl.batches.baseline import Baseline, ValidationReport
from labctl.batches.bisect import BadLink, BadNode, Diagnosis, Group
from labctl.batches.evidence import Reading
from labctl.batches.figures import JobOutcome
from labctl.batches.operator import Operator
from labctl.batches.profile import Check, Hook, Limit, Network, Profile, digest
from labctl.batches.together import Suspicion
from labctl.batches.validate import validate
from labctl.doctor.report import DoctorReport
from labctl.errors import ConfigError, HostError
from labctl.model import HostFailure
from labctl.reports.validation import Figure, Hardware, StepResult, Validation
from labctl.system import load
from labctl.system.process import CompletedProcess

NAMES = ("worker-0", "worker-1", "worker-2", "worker-3")
UP = "eth0 mlx5_core up 1 100000\n"
MEMORY = Check(name="memory", workload="memory", declared="p:1", nodes="each", limits=(Limit(metric="rate"),))
TRAIN = Check(name="train", workload="train", declared="p:2", limits=(Limit(metric="throughput", min=100),))
PLAIN = Profile(name="plain", description="", checks=(MEMORY, TRAIN))
NOTHING_BAD = Diagnosis(bad=(), links=(), good=NAMES, unsure=(), unexplained=(), rounds=3, runs=7)

Value = Callable[[Check, Group], float | None]


def used(share: float) -> str:
    """Return the processor times of a host of which others use this share."""
    return f"times 0 0 0 0\ntimes {int(1000 * share)} {int(1000 * (1 - share))} 0 0\ncores 2\n"


class Cluster:
    """Four hosts, red0 to red3, with a node each; ``calls`` records the actions in order."""

    def __init__(self, value: Value | None = None, **given: Any) -> None:
        """Keep the planned values, findings, hosts and loads; the defaults are a good idle cluster."""
        self.value = value or (lambda _, group: 100.0 * len(group))
        self.calls: list[str] = []
        self.scripts: list[tuple[str, tuple[str, ...]]] = []
        self.findings: tuple[Finding, ...] = given.get("findings", (ok("LAB-HOST-001", "2 cores"),))
        self.refuses: HostError | None = given.get("refuses")
        self.dead: tuple[str, ...] = given.get("dead", ())
        self.left: list[tuple[str, ...]] = given.get("left", [(), ()])
        self.interfaces: Callable[[str], str] = given.get("interfaces", lambda _: UP)
        self.code: Callable[[str, str], int] = given.get("code", lambda _, __: 0)
        self.used: Callable[[str], str] = given.get("used", lambda _: used(0.0))
        self.diagnosis: Diagnosis = given.get("diagnosis", NOTHING_BAD)
        self.lost: float = given.get("lost", 0.0)
        """Share of each turn that other programs took."""
        self.held: dict[str, float] = given.get("held", {})
        """Share of a node's turns that its own quota took."""
        self.suspicions: list[Suspicion] = []

    def doctor(self) -> DoctorReport:
        """Record the call; return the planned findings."""
        self.calls.append("doctor")
        return DoctorReport(self.findings)

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], _seconds: float
    ) -> tuple[dict[str, CompletedProcess], dict[str, HostError]]:
        """Record the call and answer the scripts of load, interfaces and hooks for four hosts."""
        hosts = [f"red{number}" for number in range(4)]
        if script == load.SCRIPT:
            return {host: CompletedProcess((), 0, self.used(host), "") for host in hosts}, {}
        self.scripts.append((script, arguments))
        if "network interfaces" in script:
            self.calls.append("network")
            return {host: CompletedProcess((), 0, self.interfaces(host), "") for host in hosts}, {}
        self.calls.append(script.partition("\n")[0])
        return {host: CompletedProcess((), self.code(script, host), "", "no such card") for host in hosts}, {}

    def look_at(self, node: str, host: Hardware, cause: Cause) -> str:
        """Return text of cause, node and host."""
        return f"{cause} {node} on {host.host}"

    def typed(self, host: str, command: str) -> str:
        """Return the ssh command line for the host."""
        return f"ssh {host} {command}"

    def hardware(self) -> tuple[Hardware, ...]:
        """Return the hardware of four hosts with 64 cores."""
        return tuple(Hardware(host=f"red{number}", processor="EPYC", cores=64) for number in range(4))

    def status(self) -> LabStatus:
        """Return the status: nodes in ``dead`` are unreachable, the launcher exited if ``refuses`` is set."""
        state = {node: "unreachable" if node in self.dead else "running" for node in NAMES}
        launched = "exited" if self.refuses else "running"
        nodes = [NodeStatus(name="launcher", role="launcher", host="red0", state=launched)]
        nodes += [
            NodeStatus(name=node, role="worker", host=f"red{number}", state=state[node], slots=1)
            for number, node in enumerate(NAMES)
        ]
        lost = tuple(HostFailure(f"red{node[-1]}", f"red{node[-1]} is off", "switch it on") for node in self.dead)
        return LabStatus(lab="demo", state="up", nodes=tuple(nodes), unreachable=lost)

    def up(self) -> LabStatus:
        """Record the call; raise ``refuses``, or HostError if nodes are dead; else return the status."""
        self.calls.append("up")
        if self.refuses:
            raise self.refuses
        if self.dead:
            raise HostError(f"{len(self.dead)} host failed", hint="labctl doctor")
        return self.status()

    def run(self, check: Check, groups: tuple[Group, ...], record: str, _: Mapping[str, int]) -> list[JobOutcome]:
        """Record the check and its groups; return a job's outcome for each group."""
        self.calls.append(f"{record}: {' '.join('+'.join(group) for group in groups)}")
        return [self.job(check, group) for group in groups]

    def job(self, check: Check, group: Group) -> JobOutcome:
        """Return an outcome with the planned value, failed where it is None; of turns, in_turn's."""
        if check.nodes == "turns":
            return self.in_turn(check, group)
        value = self.value(check, group)
        metrics = {limit.metric: {"value": value, "unit": "GB/s"} for limit in check.limits if value is not None}
        message = "All criteria met." if value is not None else "rank 0 crashed"
        return JobOutcome(nodes=group, passed=value is not None, message=message, run_id="r1", metrics=metrics)

    def in_turn(self, check: Check, group: Group) -> JobOutcome:
        """Return the outcome of as many turns as the check asks for; failed if any value is None."""
        turns, message = int(dict(check.options.arguments)["turns"] or 0), "All criteria met."
        rounds = [{node: self.value(check, (node,)) for node in group} for _ in range(turns)]
        if any(value is None for values in rounds for value in values.values()):
            rounds, message = [], "rank 0 crashed"
        readings = [
            {
                node: Reading(value or 0.0, self.lost, corrected=True, held=self.held.get(node, 0.0))
                for node, value in values.items()
            }
            for values in rounds
        ]
        metrics = {limit.metric: {"value": 1.0, "unit": "TFLOP/s"} for limit in check.limits}
        return JobOutcome(
            nodes=group, passed=bool(rounds), message=message, run_id="r1", metrics=metrics, rounds=tuple(readings)
        )

    def bisect(self, check: Check, nodes: tuple[str, ...], why: Suspicion, _: float, _figures: int) -> Diagnosis:
        """Record the call and the suspicion; return the planned diagnosis."""
        self.calls.append(f"bisect {check.name}: {' '.join(nodes)}")
        self.suspicions.append(why)
        return self.diagnosis

    def down(self) -> None:
        self.calls.append("down")

    def remains(self) -> tuple[tuple[str, ...], dict[str, HostError]]:
        """Return the next planned list of what is left, and no errors."""
        return self.left.pop(0), {}

    def versions(self) -> dict[str, str]:
        return {}

    def validate(self, profile: Profile = PLAIN, **given: Any) -> Validation:
        """Validate this cluster with the profile, recording waits in place of sleeping."""
        return validate("demo", profile, self, lambda _: None, wait=self.wait, **given)

    def wait(self, seconds: float) -> None:
        self.calls.append(f"wait {seconds:g}")


class OneHost(Cluster):
    """A cluster whose four nodes share a host."""

    def status(self) -> LabStatus:
        """Return the status with every node on host red0."""
        observed = super().status()
        return replace(observed, nodes=tuple(replace(node, host="red0") for node in observed.nodes))


def code(validation: Validation) -> int:
    """Return the exit code of the validation's report."""
    return ValidationReport(validation=validation, page="", data="").exit_code


def step(validation: Validation, name: str) -> StepResult:
    """Return the step of this name."""
    return next(step for step in validation.steps if step.name == name)


def statuses(validation: Validation) -> dict[str, str]:
    """Return the status of each step by name."""
    return {step.name: step.status for step in validation.steps}


def verdicts(validation: Validation) -> dict[str, str]:
    """Return the verdict of each node by name."""
    return {node.node: node.verdict for node in validation.nodes}


def test_a_good_cluster_passes_and_nothing_is_left() -> None:
    """Validate four good hosts: PASS, exit code 0, all steps in order, down at the end."""
    cluster = Cluster()
    validation = cluster.validate()
    assert (validation.verdict, code(validation), validation.message) == ("PASS", 0, "All 4 nodes are good.")
    assert set(statuses(validation).values()) == {"passed"}
    assert set(verdicts(validation).values()) == {"good"}
    assert [call for call in cluster.calls if "-again" not in call] == [
        "doctor",
        "network",
        "up",
        "doctor",
        "memory: worker-0 worker-1 worker-2 worker-3",
        "train: worker-0+worker-1+worker-2+worker-3",
        "network",
        "down",
    ]


def test_a_lab_that_does_not_come_up_is_not_checked_and_is_removed() -> None:
    """Refuse to come up: ERROR, exit code 3, checks skipped, down called."""
    broken = error("LAB-ENGINE-001", "Docker does not answer", "no lab", "systemctl start docker", node="red0")
    cluster = Cluster(findings=(broken,), refuses=HostError("Docker does not answer", hint="labctl doctor"))
    validation = cluster.validate()
    assert (validation.verdict, code(validation)) == ("ERROR", 3)
    assert (step(validation, "doctor").status, step(validation, "doctor").advice) == (
        "failed",
        "systemctl start docker",
    )
    assert (step(validation, "memory").status, step(validation, "memory").message) == (
        "skipped",
        "the lab did not come up",
    )
    assert cluster.calls[-1] == "down"


def test_a_host_that_is_not_reached_is_named_and_the_others_are_checked() -> None:
    """Make worker-2's host unreachable: FAIL, exit code 5, it is "not reached", the others are checked."""
    cluster = Cluster(dead=("worker-2",))
    validation = cluster.validate()
    assert (validation.verdict, code(validation)) == ("FAIL", 5)
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-2": "not reached"}
    assert "memory: worker-0 worker-1 worker-3" in cluster.calls
    assert validation.message == "worker-2 is not reached: red2 is off."


def test_a_slow_node_is_named_once_noise_cannot_explain_it() -> None:
    """Make worker-2 slow in memory: slow after rounds and a wait of 60 s, evidence with p, advice to drain red2."""
    cluster = Cluster(lambda check, group: 80.0 if check is MEMORY and group == ("worker-2",) else 100.0 * len(group))
    validation = cluster.validate()
    assert "memory-again6: worker-0 worker-1 worker-2 worker-3" in cluster.calls
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-2": "slow"}
    assert validation.message == (
        "worker-2 is slow: memory: rate 80 GB/s, not >= 85 GB/s (15 % below the others), "
        "80 % of the others (p < 0.001, 24 rounds)."
    )
    assert "wait 60" in cluster.calls
    assert validation.nodes[2].advice == (
        "look at worker-2: slow worker-2 on red2; until it is repaired, list red2 in drained.txt"
    )
    assert code(validation) == 5


def test_a_node_that_is_slow_for_a_minute_is_unsure_and_nobody_is_drained() -> None:
    """Make worker-2 slow in the first series alone: unsure, exit code 6."""
    cluster = Cluster()

    def value(_: Check, group: Group) -> float:
        """Return 50 for worker-2 before the wait of 60 s, else 100 for each node."""
        return 50.0 if group == ("worker-2",) and "wait 60" not in cluster.calls else 100.0 * len(group)

    cluster.value = value
    validation = cluster.validate()
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-2": "unsure"}
    assert (
        "it was slow in one of two series of rounds, a minute apart, and not in the other"
        in validation.nodes[2].evidence[0]
    )
    assert code(validation) == 6


def test_of_two_nodes_the_slower_is_named() -> None:
    """Make one of two nodes slow: it is named with p, the other is good."""
    cluster = Cluster(
        lambda check, group: 80.0 if check is MEMORY and group == ("worker-1",) else 100.0, dead=NAMES[2:]
    )
    validation = cluster.validate()
    assert "not >= 85 GB/s (15 % below the others), 80 % of the others (p < 0.00" in validation.nodes[1].evidence[0]
    assert verdicts(validation)["worker-0"] == "good"


def test_what_doctor_finds_only_in_a_running_lab_is_evidence_and_what_it_found_before_is_said_once() -> None:
    """Find errors before and in the running lab: both nodes fail, each error is evidence once."""
    before = error("LAB-CLOCK-001", "300 s ahead", "", "", node="red0")
    later = error("LAB-NET-007", "bytes went through eth1, not through eth0", "", "", node="worker-1")
    reports = [(before,), (before, later)]

    class Later(Cluster):
        def doctor(self) -> DoctorReport:
            """Return the next planned report."""
            return DoctorReport(reports.pop(0))

    cluster = Later()
    validation = cluster.validate()
    assert step(validation, "nodes").message.startswith("2 errors, ")
    assert {node: verdicts(validation)[node] for node in NAMES[:3]} == {
        "worker-0": "failing",
        "worker-1": "failing",
        "worker-2": "good",
    }
    assert validation.nodes[0].evidence == ("LAB-CLOCK-001: 300 s ahead",)
    assert "train: worker-2+worker-3" in cluster.calls


def test_what_up_mends_is_no_evidence() -> None:
    """Find an error before `up` and none after: PASS, and the step says that `labctl up` fixed it."""
    stopped = error("LAB-NODE-001", "is stopped", "", "labctl up", node="worker-1")
    reports = [(stopped,), ()]

    class Mended(Cluster):
        def doctor(self) -> DoctorReport:
            """Return the next planned report."""
            return DoctorReport(reports.pop(0))

    validation = Mended().validate()
    assert (validation.verdict, set(verdicts(validation).values())) == ("PASS", {"good"})
    assert step(validation, "doctor").message.endswith("is stopped; `labctl up` fixed it")


def test_a_check_that_fails_on_all_nodes_accuses_none_and_the_next_one_runs() -> None:
    """Fail memory on all nodes: all are unsure, and train runs on all of them."""
    cluster = Cluster(lambda check, group: None if check is MEMORY else 100.0 * len(group))
    validation = cluster.validate()
    assert set(verdicts(validation).values()) == {"unsure"}
    assert (step(validation, "memory").status, step(validation, "train").status) == ("failed", "passed")
    assert "train: worker-0+worker-1+worker-2+worker-3" in cluster.calls


def test_a_search_in_which_no_run_was_good_failed() -> None:
    """Bisect without a good run: the step failed with the note, and no node is to be drained."""
    note = "No run was good: look at the workload, or at the minimum."
    cluster = Cluster(
        lambda check, _: 60.0 if check is TRAIN else 100.0,
        diagnosis=replace(NOTHING_BAD, good=(), unsure=NAMES, note=note, none_good=True),
    )
    validation = cluster.validate()
    assert (step(validation, "bisect train").status, step(validation, "bisect train").message) == (
        "failed",
        f"{note} (7 runs in 3 rounds)",
    )
    assert not any("drained" in node.advice for node in validation.nodes)


def test_a_profile_of_an_accelerator_fails_where_there_is_none() -> None:
    """Validate a profile that needs devices without any: FAIL, the step says so."""
    checks = (replace(MEMORY, needs_devices=True), TRAIN)
    validation = Cluster().validate(replace(PLAIN, checks=checks, needs_devices=True))
    assert (validation.verdict, step(validation, "memory").status) == ("FAIL", "failed")
    assert step(validation, "memory").message == "the nodes have no accelerator"


def test_a_node_that_is_slow_only_once_is_good() -> None:
    """Make one reading slow: PASS."""
    values = chain((100.0, 50.0, 100.0, 100.0), repeat(100.0))
    validation = Cluster(lambda *_: next(values)).validate()
    assert (validation.verdict, step(validation, "memory").status) == ("PASS", "passed")


def test_a_node_that_failed_or_missed_its_threshold_only_once_is_good() -> None:
    """Miss a threshold and fail once each: PASS, both nodes passed when run again."""
    bounded = replace(MEMORY, limits=(Limit(metric="rate", min=90, source="a data sheet"),))
    values = chain((100.0, 50.0, None, 100.0), repeat(100.0))
    validation = Cluster(lambda *_: next(values)).validate(replace(PLAIN, checks=(bounded,)))
    assert (validation.verdict, step(validation, "memory").status) == ("PASS", "passed")
    assert step(validation, "memory").message.endswith("worker-1, worker-2 passed when run again")


def test_a_failing_node_takes_no_part_in_what_follows() -> None:
    """Let worker-1 fail: failing, and train runs on the other three."""
    cluster = Cluster(lambda _, group: None if "worker-1" in group else 100.0 * len(group))
    validation = cluster.validate()
    assert verdicts(validation)["worker-1"] == "failing"
    assert "train: worker-0+worker-2+worker-3" in cluster.calls
    assert step(validation, "train").status == "passed"


def test_what_is_slow_together_is_bisected() -> None:
    """Make train slow on all together: it is bisected, the bad node is slow and the bad link listed."""
    bad = BadNode(node="worker-3", kind="slow", figure=0.5, runs=())
    link = BadLink(nodes=("worker-0", "worker-1"), kind="failing", figure=None, runs=(), apart=())
    cluster = Cluster(
        lambda check, _: 60.0 if check is TRAIN else 100.0,
        diagnosis=replace(NOTHING_BAD, bad=(bad,), links=(link,), good=NAMES[:3]),
    )
    validation = cluster.validate()
    assert "bisect train: worker-0 worker-1 worker-2 worker-3" in cluster.calls
    (why,) = cluster.suspicions
    assert (why.metric, why.bound and why.bound.value) == ("throughput", 100)
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-3": "slow"}
    assert "50 % of the median" in validation.nodes[3].evidence[0]
    assert [(link.a, link.b, link.verdict) for link in validation.links] == [("worker-0", "worker-1", "failing")]
    assert step(validation, "bisect train").message.startswith(
        "worker-3 is slow, the link worker-0 - worker-1 is failing"
    )


def test_steps_and_accused_nodes_name_their_logs() -> None:
    """Accuse two nodes: steps and nodes name their runs and log folders."""
    bad = BadNode(node="worker-3", kind="slow", figure=0.5, runs=())
    slow = Cluster(
        lambda check, group: 80.0 if check is TRAIN or group == ("worker-1",) else 100.0,
        diagnosis=replace(NOTHING_BAD, bad=(bad,), good=NAMES[:3]),
    )
    validation = slow.validate()
    assert validation.nodes[1].runs == ("r1",)
    assert validation.nodes[3].logs == ("checks/train-bisect",)
    assert step(validation, "memory").logs[:2] == ("checks/memory", "checks/memory-again1")
    assert step(validation, "bisect train").logs == ("checks/train-bisect",)
    assert step(validation, "doctor").logs == ()


def test_the_hardware_of_each_host_is_recorded() -> None:
    """Validate: the hardware of all four hosts is in the result."""
    assert [hardware.host for hardware in Cluster().validate().hardware] == ["red0", "red1", "red2", "red3"]


def test_the_latency_of_pairs_is_shown_and_not_judged() -> None:
    """Measure the latency of pairs: a figure for each pair, without verdict."""

    class Printing(Cluster):
        def job(self, check: Check, group: Group) -> JobOutcome:
            """Return the outcome with a latency that grows with the node's number."""
            job = super().job(check, group)
            return replace(job, metrics={**job.metrics, "latency": {"value": 10.0 ** int(group[0][-1]), "unit": "us"}})

    validation = Printing().validate(replace(PLAIN, checks=(replace(MEMORY, nodes="pairs"),)))
    latencies = [figure for figure in validation.figures if figure.what == "latency"]
    assert [(figure.node, figure.value, figure.passed) for figure in latencies] == [
        ("worker-0 - worker-2", 1.0, None),
        ("worker-1 - worker-3", 10.0, None),
    ]
    assert validation.verdict == "PASS"


def test_a_failed_run_is_bisected_by_runs_alone() -> None:
    """Crash train: bisected without a metric, and the message says 1 of 1 runs failed."""
    cluster = Cluster(lambda check, _: None if check is TRAIN else 100.0)
    validation = cluster.validate()
    assert cluster.suspicions == [Suspicion()]
    assert step(validation, "bisect train").message == "no single node or link is bad (7 runs in 3 rounds)"
    assert validation.message.startswith("step train failed: 1 of 1 runs")


def test_a_metric_without_a_number_is_no_pass() -> None:
    """Leave a declared metric out of the runs: the step failed."""
    wrong = replace(MEMORY, limits=(Limit(metric="absent"),))

    class Mute(Cluster):
        def job(self, check: Check, group: Group) -> JobOutcome:
            """Return the outcome without metrics."""
            return replace(super().job(check, group), metrics={})

    validation = Mute().validate(replace(PLAIN, checks=(wrong,)))
    assert step(validation, "memory").status == "failed"


def test_figures_carry_their_threshold_and_its_source() -> None:
    """Judge train by a threshold: the figure has limit, source, verdict and values."""
    limit = Limit(metric="throughput", min=127, source="a data sheet")
    validation = Cluster().validate(replace(PLAIN, checks=(replace(TRAIN, limits=(limit,)),)))
    (figure,) = (figure for figure in validation.figures if figure.step == "train")
    assert figure == Figure(
        step="train",
        what="throughput",
        value=400,
        unit="GB/s",
        limit=">= 127 GB/s",
        passed=True,
        source="a data sheet",
        values=(400, 400),
    )


def baseline_of(profile: Profile, *figures: Figure) -> Baseline:
    """Return the baseline that a validation of all nodes would record with these figures."""
    return Baseline(
        lab="demo",
        profile="plain",
        recorded="2026-11-20T10:00:00Z",
        checks={check.name: digest(check) for check in profile.checks},
        hosts={node: f"red{number}" for number, node in enumerate(NAMES)},
        figures=figures,
    )


def test_a_node_is_compared_with_what_its_own_host_did() -> None:
    """Move one node to another host: it is compared with the others, the rest with the baseline."""
    figures = [Figure(step="memory", what="rate", node=node, value=200, unit="GB/s", passed=None) for node in NAMES]
    recorded = baseline_of(PLAIN, *figures)
    moved = replace(recorded, hosts={**recorded.hosts, "worker-3": "blue0"})
    validation = Cluster(lambda *_: 199.0).validate(baseline=moved)
    assert [figure.source for figure in validation.figures if figure.step == "memory"] == [
        *["15 % below the baseline of 2026-11-20"] * 3,
        "15 % below the others",
    ]


@pytest.mark.parametrize(("value", "verdict"), [(86.0, "PASS"), (84.0, "UNSURE")])
def test_figures_are_compared_with_the_baseline(value: float, verdict: str) -> None:
    """Compare with a baseline of 100: 86 passes, 84 is unsure; another check or fewer nodes are not compared."""
    profile = replace(PLAIN, checks=(replace(MEMORY, nodes="all"),))
    reference = Figure(step="memory", what="rate", value=100, unit="GB/s", passed=None)
    recorded = baseline_of(profile, reference)
    validation = Cluster(lambda *_: value).validate(profile, baseline=recorded)
    assert validation.verdict == verdict
    assert validation.figures[-1].source == "15 % below the baseline of 2026-11-20"
    # Of fewer nodes together it says nothing, and neither of another check with the same name.
    other = replace(profile, checks=(replace(profile.checks[0], workload="other"),))
    assert Cluster(lambda *_: value).validate(other, baseline=recorded).figures[-1].source == ""
    fewer = Cluster(lambda *_: value, dead=("worker-3",)).validate(profile, baseline=recorded)
    assert (fewer.figures[-1].passed, fewer.figures[-1].source) == (None, "")


def test_latency_is_better_when_lower() -> None:
    """Double the latency of worker-0: slow, with an upper limit."""
    check = replace(MEMORY, limits=(Limit(metric="latency", lower_is_better=True),))
    validation = Cluster(lambda _, group: 20.0 if group == ("worker-0",) else 10.0).validate(
        replace(PLAIN, checks=(check,))
    )
    assert verdicts(validation)["worker-0"] == "slow"
    assert validation.figures[0].limit == ""
    assert (validation.figures[-4].value, validation.figures[-4].limit) == (20.0, "<= 11.76 GB/s")


def test_interfaces_are_counted_before_and_after() -> None:
    """Take an interface of red1 down during the checks: "network after" failed, worker-1 is failing."""
    counts = {"red1": [UP, "eth0 mlx5_core down 0 -1\n"]}
    cluster = Cluster(interfaces=lambda host: counts[host].pop(0) if host in counts else UP)
    validation = cluster.validate(replace(PLAIN, network=Network(up=1)))
    assert (step(validation, "network").status, step(validation, "network after").status) == ("passed", "failed")
    assert step(validation, "network after").message == "red1: eth0 went down"
    assert verdicts(validation)["worker-1"] == "failing"


def test_too_few_interfaces_are_named_with_their_host() -> None:
    """Give red0 no interface that is up: the step names host, count and interface."""
    validation = Cluster(interfaces=lambda host: UP if host != "red0" else "eth0 mlx5_core down 0 -1\n").validate(
        replace(PLAIN, network=Network(up=1))
    )
    assert step(validation, "network").message == "red0: 0 of 1 interfaces up; eth0 is down"
    assert validation.figures[0].limit == ">= 1"


HOOKS = (
    Hook(name="set-up", command="ports --up", check="ports --status", network_setup=True),
    Hook(name="qualify", command="hl_qual"),
    Hook(name="set-up", command="ports --up", check="ports --status", network_setup=True),
)


def test_hooks_run_on_every_host_in_order_and_are_checked() -> None:
    """Run three hooks: command and check of each in order, with the operator's variables."""
    cluster = Cluster()
    validation = cluster.validate(replace(PLAIN, hooks=HOOKS), operator=Operator(l3_enabled=True))
    hooks = ["# set-up: command", "# set-up: check", "# qualify: command", "# set-up: command", "# set-up: check"]
    assert cluster.calls[1:7] == [*hooks, "network"]
    assert [step.name for step in validation.steps[1:4]] == ["set-up", "qualify", "set-up again"]
    script, arguments = cluster.scripts[0]
    assert (script.splitlines()[1:], arguments) == (
        ['export L3_ENABLED="$1" SKIP_NETWORK_SETUP="$2"', "ports --up"],
        ("true", "false"),
    )


def test_the_operator_may_skip_the_set_up_of_the_network() -> None:
    """Set skip_network_setup: both set-up hooks are skipped, the other runs."""
    cluster = Cluster()
    validation = cluster.validate(replace(PLAIN, hooks=HOOKS), operator=Operator(skip_network_setup=True))
    assert [step.status for step in validation.steps[1:4]] == ["skipped", "passed", "skipped"]
    assert [call for call in cluster.calls if call.startswith("#")] == ["# qualify: command"]


def test_a_hook_that_fails_names_the_host() -> None:
    """Fail a hook's check on red3: the step names it, worker-3 is failing, the checks run without it."""
    cluster = Cluster(code=lambda script, host: int("check" in script and host == "red3"))
    validation = cluster.validate(replace(PLAIN, hooks=HOOKS[:1]))
    assert step(validation, "set-up").message == "1 of 4 hosts: red3: check failed with exit code 1: no such card"
    assert verdicts(validation)["worker-3"] == "failing"
    assert "memory: worker-0 worker-1 worker-2" in cluster.calls


def test_a_profile_of_which_no_check_can_run_here_is_no_pass() -> None:
    """Validate one check that needs devices: FAIL, all nodes unsure as no run passed."""
    validation = Cluster().validate(replace(PLAIN, checks=(replace(MEMORY, needs_devices=True),)))
    assert (validation.verdict, set(verdicts(validation).values())) == ("FAIL", {"unsure"})
    assert validation.message.startswith("worker-0 is unsure: no run on it passed")


def test_a_threshold_that_all_nodes_miss_is_doubted_before_the_nodes() -> None:
    """Set a threshold above all nodes: FAIL, all unsure, the advice is to look at the shared and the limit."""
    limit = Limit(metric="rate", min=1000, source="a data sheet")
    validation = Cluster().validate(replace(PLAIN, checks=(replace(MEMORY, limits=(limit,)),)))
    assert (validation.verdict, set(verdicts(validation).values())) == ("FAIL", {"unsure"})
    assert "rate 100 GB/s, not >= 1000 GB/s (a data sheet), in 11 runs" in validation.nodes[0].evidence[0]
    assert {node.advice for node in validation.nodes} == {
        "check what the nodes share (`labctl doctor`), and workload and limits of memory "
        "(`labctl validate --profile plain --print-profile`)"
    }


@pytest.mark.parametrize("cluster", [Cluster, OneHost])
@pytest.mark.parametrize(("bad", "verdict"), [(1, "slow"), (2, "slow"), (3, "unsure"), (4, "unsure")])
def test_of_a_limit_that_most_nodes_miss_host_and_limit_are_suspected(
    cluster: type[Cluster], bad: int, verdict: str
) -> None:
    """Let 1 to 4 nodes miss a limit: up to half are slow; of more, all are unsure, host or limit suspected."""
    bounded = replace(MEMORY, limits=(Limit(metric="rate", min=90, source="a data sheet"),))
    lab = cluster(lambda _, group: 50.0 if group[0] in NAMES[:bad] else 100.0)
    validation = lab.validate(replace(PLAIN, checks=(bounded,)))
    assert verdicts(validation) == {node: verdict if node in NAMES[:bad] else "good" for node in NAMES}
    assert (validation.verdict, code(validation)) == ("FAIL", 5)
    place = {Cluster: "what their hosts share", OneHost: "the host red0"}[cluster]
    suspected = f"{bad} of 4 nodes are slow in memory: suspect {place} or the limit (a data sheet); worker-0: "
    assert (suspected in step(validation, "memory").message) == (verdict == "unsure")


def test_a_limit_that_two_of_three_nodes_miss_is_suspected() -> None:
    """Let two of three nodes miss a limit: they are unsure."""
    bounded = replace(MEMORY, limits=(Limit(metric="rate", min=90),))
    lab = Cluster(lambda _, group: 50.0 if group[0] in NAMES[:2] else 100.0, dead=NAMES[3:])
    assert verdicts(lab.validate(replace(PLAIN, checks=(bounded,))))["worker-0"] == "unsure"


def test_most_nodes_that_fail_are_accused_each() -> None:
    """Let three of four nodes crash: each of them is failing."""
    validation = Cluster(lambda _, group: None if group[0] in NAMES[:3] else 100.0).validate()
    assert [verdicts(validation)[node] for node in NAMES] == ["failing", "failing", "failing", "good"]


def test_a_trouble_of_this_machine_is_named_and_its_nodes_are_checked() -> None:
    """Find an error on this machine: all nodes are checked, "local" is failing, no advice to drain."""

    class Here(Cluster):
        def status(self) -> LabStatus:
            """Return the status with every node on host local."""
            observed = super().status()
            return replace(observed, nodes=tuple(replace(node, host="local") for node in observed.nodes))

    trouble = error("LAB-DISK-001", "1 GB free", "", "", node="local")
    cluster = Here(lambda _, group: None if group == ("worker-1",) else 100.0 * len(group), findings=(trouble,))
    validation = cluster.validate()
    assert "memory: worker-0 worker-1 worker-2 worker-3" in cluster.calls
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-1": "failing", "local": "failing"}
    # No list takes a node of one machine out of use.
    assert validation.nodes[1].advice == "look at worker-1: failing worker-1 on local"


def test_settings_that_no_lab_can_be_brought_up_with_end_it_at_once() -> None:
    """Raise ConfigError in doctor: it is raised, and nothing else is called."""

    class Refused(Cluster):
        def doctor(self) -> DoctorReport:
            """Raise ConfigError about a host named twice."""
            raise ConfigError("hosts.txt:2: h1 is named twice")

    cluster = Refused()
    with pytest.raises(ConfigError, match="named twice"):
        cluster.validate()
    assert cluster.calls == []


def test_ctrl_c_removes_the_lab_and_reports() -> None:
    """Interrupt memory: ERROR, exit code 130, later steps skipped, down called."""

    def interrupted(*_: object) -> float:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    cluster = Cluster(interrupted)
    validation = cluster.validate()
    assert (validation.verdict, code(validation)) == ("ERROR", 130)
    assert statuses(validation) == {
        "doctor": "passed",
        "network": "passed",
        "up": "passed",
        "nodes": "passed",
        "memory": "failed",
        "train": "skipped",
        "network after": "skipped",
        "clean-up": "passed",
    }
    assert cluster.calls[-1] == "down"


@pytest.mark.parametrize("check", [MEMORY, replace(TRAIN, nodes="pairs")])
def test_ctrl_c_while_a_check_is_repeated_keeps_what_was_measured(check: Check) -> None:
    """Interrupt the second run of a check on slow nodes: the figures of the first are reported."""
    measured: list[tuple[str, ...]] = []

    def interrupted(_: object, group: tuple[str, ...]) -> float:
        """Return low values, then raise KeyboardInterrupt."""
        if group in measured:
            raise KeyboardInterrupt
        measured.append(group)
        return 40.0

    validation = Cluster(interrupted).validate(replace(PLAIN, checks=(check,)))
    assert validation.verdict == "ERROR"
    assert {figure.value for figure in validation.figures if figure.step == check.name} == {40.0}


def test_a_bug_still_removes_the_lab() -> None:
    """Raise ZeroDivisionError in a run: it is raised after down."""

    def broken(*_: object) -> float:
        """Raise ZeroDivisionError."""
        raise ZeroDivisionError

    cluster = Cluster(broken)
    with pytest.raises(ZeroDivisionError):
        cluster.validate()
    assert cluster.calls[-1] == "down"


def test_what_is_left_after_the_clean_up_is_named() -> None:
    """Leave a container after the clean-up: the step failed with its name, exit code 5."""
    validation = Cluster(left=[(), ("container labctl-demo-worker-1-1 on red1",)]).validate()
    assert step(validation, "clean-up").status == "failed"
    assert "labctl-demo-worker-1-1 on red1" in step(validation, "clean-up").message
    assert code(validation) == 5


def test_a_lab_that_was_up_stays_up() -> None:
    """Validate a lab that was up before: it is not taken down, the step is skipped."""
    cluster = Cluster(left=[("container labctl-demo-launcher-1 on red0",)])
    validation = cluster.validate()
    assert (step(validation, "clean-up").status, code(validation)) == ("skipped", 0)
    assert "down" not in cluster.calls


def test_a_lab_is_kept_if_asked() -> None:
    """Validate with keep=True: down is not called, the step names `labctl down`."""
    cluster = Cluster()
    assert step(cluster.validate(keep=True), "clean-up").message == "--keep: `labctl down` removes the lab"
    assert "down" not in cluster.calls


def test_pairs_have_each_node() -> None:
    """Run pairs of three nodes: one node is in two pairs."""
    cluster = Cluster(dead=("worker-3",))
    cluster.validate(replace(PLAIN, checks=(replace(MEMORY, nodes="pairs"),)))
    assert "memory: worker-0+worker-1 worker-2+worker-0" in cluster.calls


def test_checks_of_devices_are_skipped_without_any() -> None:
    """Validate a check of devices and one of none without devices: the first is skipped, PASS."""
    validation = Cluster().validate(replace(PLAIN, checks=(replace(MEMORY, needs_devices=True), TRAIN)))
    assert statuses(validation)["memory"] == "skipped"
    assert validation.verdict == "PASS"


SPEED = Check(name="speed", workload="speed", declared="p:3", nodes="turns", limits=(Limit(metric="tflops"),))
TURNS = Profile(name="turns", description="", checks=(SPEED,))


def test_nodes_of_one_host_are_compared_in_turn() -> None:
    """Make one of four nodes of one host slow: slow after 9 rounds in turn, FAIL, exit code 5."""
    cluster = OneHost(lambda _, group: 50.0 if group == ("worker-2",) else 100.0)
    validation = cluster.validate(TURNS)
    assert "speed: worker-0+worker-1+worker-2+worker-3" in cluster.calls
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-2": "slow"}
    assert (validation.verdict, code(validation)) == ("FAIL", 5)
    slow = next(figure for figure in validation.figures if figure.node == "worker-2")
    assert slow.judged == "50 % of the others (p < 0.001, 9 rounds)"
    assert slow.values == (50.0,) * 9


def test_the_memory_that_nodes_of_one_host_share_is_not_compared() -> None:
    """Make a node of one host slow in memory: not judged, PASS, in pairs too."""
    validation = OneHost(lambda _, group: 10.0 if group == ("worker-2",) else 100.0).validate(
        replace(PLAIN, checks=(MEMORY,))
    )
    assert (validation.verdict, set(verdicts(validation).values())) == ("PASS", {"good"})
    assert step(validation, "memory").message == "rate 10 to 100 GB/s; not judged: nothing to compare with"
    pairs = OneHost(lambda _, group: 10.0 if "worker-2" in group else 100.0).validate(
        replace(PLAIN, checks=(replace(MEMORY, nodes="pairs"),))
    )
    assert pairs.verdict == "PASS"


def test_on_a_busy_host_a_node_that_may_be_slow_is_unsure_and_none_is_accused() -> None:
    """Take 40 % of the time by other programs: UNSURE, exit code 6, evidence and loads say so."""
    validation = OneHost(lambda *_: 100.0, lost=0.4, used=lambda _: used(0.7)).validate(TURNS)
    assert (validation.verdict, code(validation)) == ("UNSURE", 6)
    assert set(verdicts(validation).values()) == {"unsure"}
    assert step(validation, "speed").status == "unsure"
    assert "other programs took 40 % of its time" in validation.nodes[0].evidence[0]
    assert validation.nodes[0].advice == "repeat when the hosts are idle: `labctl validate --profile turns`"
    assert validation.busy[0] == "red0: 1.4 of 2 cores in use by other programs"
    assert [(load.step, load.when, load.used) for load in validation.loads if load.host == "red0"][:2] == [
        ("speed", "before", 1.4),
        ("speed", "after", 1.4),
    ]


def test_a_node_that_is_slow_while_it_runs_is_bad_on_a_busy_host_too() -> None:
    """Make a node slow in turns on a busy host: slow, without the wait of 60 s."""
    cluster = OneHost(lambda _, group: 50.0 if group == ("worker-2",) else 100.0, lost=0.4)
    assert verdicts(cluster.validate(TURNS))["worker-2"] == "slow"
    assert "wait 60" not in cluster.calls


def test_a_slow_node_that_a_quota_holds_back_is_said_to_have_one() -> None:
    """Give the slow node a quota: its evidence says that the quota held it back."""
    held = {"worker-2": 0.52}
    cluster = OneHost(lambda _, group: 50.0 if group == ("worker-2",) else 100.0, held=held)
    assert cluster.validate(TURNS).nodes[2].evidence == (
        "speed: tflops 50 TFLOP/s, not >= 85 TFLOP/s (15 % below the others), 50 % of the others (p < 0.001, 9 rounds)"
        "; its own CPU quota throttled it for 52 % of its time",
    )


def test_a_bandwidth_that_is_0_on_all_nodes_by_definition_is_not_compared() -> None:
    """Give all nodes a value of 0: PASS."""
    validation = Cluster(lambda *_: 0.0).validate(replace(PLAIN, checks=(MEMORY,)))
    assert (validation.verdict, set(verdicts(validation).values())) == ("PASS", {"good"})


@pytest.mark.parametrize(("speed", "verdict"), [(100.0, "PASS"), (40.0, "FAIL")])
def test_nodes_in_turn_are_judged_by_a_threshold_and_by_the_baseline(speed: float, verdict: str) -> None:
    """Judge turns by a threshold or a baseline: 100 passes and 40 fails."""
    bounded = replace(SPEED, limits=(Limit(metric="tflops", min=50, source="a data sheet"),))
    assert OneHost(lambda *_: speed).validate(replace(TURNS, checks=(bounded,))).verdict == verdict
    figures = [Figure(step="speed", what="tflops", node=node, value=100, unit="", passed=None) for node in NAMES]
    recorded = replace(baseline_of(TURNS, *figures), hosts=dict.fromkeys(NAMES, "red0"))
    validation = OneHost(lambda *_: speed).validate(TURNS, baseline=recorded)
    assert validation.verdict == verdict
    assert validation.figures[-1].source == "15 % below the baseline of 2026-11-20"


def test_a_single_node_is_judged_by_the_threshold_of_a_check_of_all() -> None:
    """Let the only node miss the threshold of a check of all nodes: slow."""
    validation = Cluster(lambda *_: 60.0, dead=NAMES[1:]).validate(replace(PLAIN, checks=(TRAIN,)))
    assert verdicts(validation)["worker-0"] == "slow"


def test_a_node_that_stops_to_print_its_number_is_bad_and_the_check_ends() -> None:
    """Leave out the number in worker-1's repeated runs: slow, and the check ends."""

    class Mute(Cluster):
        def job(self, check: Check, group: Group) -> JobOutcome:
            """Return the outcome, of worker-1 without metrics once runs are repeated."""
            job = super().job(check, group)
            mute = group == ("worker-1",) and any("again" in call for call in self.calls)
            return replace(job, metrics={}) if mute else job

    assert verdicts(Mute().validate(replace(PLAIN, checks=(MEMORY,))))["worker-1"] == "slow"


def test_turns_that_are_not_read_are_no_pass() -> None:
    """Return no rounds from turns: FAIL."""

    class Unread(OneHost):
        def in_turn(self, check: Check, group: Group) -> JobOutcome:
            """Return the outcome without rounds."""
            return replace(super().in_turn(check, group), rounds=())

    assert Unread().validate(TURNS).verdict == "FAIL"


def test_of_errors_none_is_best() -> None:
    """Give worker-2 five errors and the others none, where fewer are better: worker-2 alone is slow."""
    errors = replace(MEMORY, limits=(Limit(metric="errors", lower_is_better=True),))
    validation = Cluster(lambda _, group: 5.0 if group == ("worker-2",) else 0.0).validate(
        replace(PLAIN, checks=(errors,))
    )
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-2": "slow"}


def test_a_host_that_others_use_is_not_accused_of_it() -> None:
    """Make a node slow on a host with other load: unsure, exit code 6."""
    validation = Cluster(
        lambda _, group: 50.0 if group == ("worker-1",) else 100.0, used=lambda host: used(0.5 if host == "red1" else 0)
    ).validate(replace(PLAIN, checks=(MEMORY,)))
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-1": "unsure"}
    assert (validation.verdict, code(validation)) == ("UNSURE", 6)


def test_the_only_node_that_does_not_fail_is_not_measured_for_ever() -> None:
    """Let one of two nodes fail: failing, and memory is run three times at most."""
    cluster = Cluster(lambda _, group: None if group == ("worker-1",) else 100.0, dead=NAMES[2:])
    validation = cluster.validate(replace(PLAIN, checks=(MEMORY,)))
    assert verdicts(validation)["worker-1"] == "failing"
    assert len([call for call in cluster.calls if call.startswith("memory")]) <= 3


def test_a_pair_that_was_slow_only_once_is_good_and_one_that_nothing_explains_is_unsure() -> None:
    """Make a pair slow once: PASS; make pairs with worker-1 always slow: UNSURE."""
    pairs = replace(PLAIN, checks=(replace(MEMORY, nodes="pairs"),))
    values = chain((100.0, 50.0), repeat(100.0))
    assert Cluster(lambda *_: next(values)).validate(pairs).verdict == "PASS"
    slow = Cluster(lambda _, group: 50.0 if "worker-1" in group else 100.0)
    assert slow.validate(pairs).verdict == "UNSURE"


def test_a_run_in_turn_that_fails_is_bisected() -> None:
    """Crash a run in turns: the step says so, and it is bisected without a metric."""
    cluster = OneHost(lambda _, group: None if group == ("worker-2",) else 100.0)
    validation = cluster.validate(TURNS)
    assert step(validation, "speed").message == "speed: rank 0 crashed"
    assert cluster.suspicions == [Suspicion()]


SAME = Check(name="same", workload="train", declared="p:4", nodes="each", equal="loss_curve")


class Computing(OneHost):
    """A cluster whose nodes train; ``results`` has what each gives, run after run."""

    def __init__(self, **results: tuple[str, ...]) -> None:
        """Plan the loss curves of each node, run after run; the last one repeats."""
        super().__init__()
        self.results = {node: repeat("abc on X") for node in NAMES}
        for node, given in results.items():
            self.results[node.replace("_", "-")] = chain(given, repeat(given[-1]))  # type: ignore[assignment]

    def job(self, check: Check, group: Group) -> JobOutcome:
        """Return a passed outcome with the node's next loss curve."""
        (node,) = group
        return replace(super().job(check, group), passed=True, notes={"loss_curve": next(self.results[node])})


@pytest.mark.parametrize(
    ("given", "verdict", "text"),
    [
        (("abd on X",), "failing", "its results are wrong"),
        (("abd on X", "abd on X", "abc on X"), "failing", "its results are wrong"),
        (("abd on X", "abc on X"), "unsure", "nodes with the same hardware computed different results"),
    ],
)
def test_a_node_that_computes_what_no_other_does_is_failing(given: tuple[str, ...], verdict: str, text: str) -> None:
    """Give worker-1 another curve: failing, unless a repeat gives the others' curve, then unsure."""
    validation = Computing(worker_1=given).validate(replace(PLAIN, checks=(SAME,)))
    assert verdicts(validation) == {**dict.fromkeys(NAMES, "good"), "worker-1": verdict}
    assert text in validation.nodes[1].evidence[0]


def test_nodes_of_other_hardware_may_compute_something_else() -> None:
    """Give worker-1 another curve on other hardware: PASS."""
    validation = Computing(worker_1=("abd on Y",)).validate(replace(PLAIN, checks=(SAME,)))
    assert validation.verdict == "PASS"


def test_of_two_nodes_that_differ_none_is_accused() -> None:
    """Give two nodes different curves: both unsure."""
    cluster = Computing(worker_1=("abd on X",))
    cluster.dead = NAMES[2:]
    validation = cluster.validate(replace(PLAIN, checks=(SAME,)))
    assert {verdicts(validation)[node] for node in NAMES[:2]} == {"unsure"}


def test_what_several_nodes_reach_together_is_repeated_until_it_is_certain() -> None:
    """Miss the limit of all nodes once: PASS; in 8 runs: FAIL, and it is bisected."""
    values = chain((90.0, 300.0), repeat(300.0))
    once = Cluster(lambda check, group: next(values) if check is TRAIN else 100.0 * len(group))
    validation = once.validate(replace(PLAIN, checks=(TRAIN,)))
    assert (validation.verdict, step(validation, "train").status) == ("PASS", "passed")
    always = Cluster(lambda *_: 90.0)
    validation = always.validate(replace(PLAIN, checks=(TRAIN,)))
    assert validation.verdict == "FAIL"
    assert step(validation, "train").message == (
        "1 of 1 runs: worker-0, worker-1, worker-2, worker-3: "
        "train: throughput 90 GB/s, not >= 100 GB/s (profile), in 8 runs"
    )
    assert "bisect train: worker-0 worker-1 worker-2 worker-3" in always.calls


def test_what_several_nodes_reach_together_on_a_busy_host_is_unsure_and_not_bisected() -> None:
    """Miss the limit of all nodes on a busy host: UNSURE, and not bisected."""
    cluster = Cluster(lambda *_: 90.0, used=lambda host: used(0.7 if host == "red1" else 0.0))
    validation = cluster.validate(replace(PLAIN, checks=(TRAIN,)))
    assert (validation.verdict, code(validation)) == ("UNSURE", 6)
    assert step(validation, "train").message.endswith("in 16 runs, 16 of them disturbed by other programs")
    assert not [call for call in cluster.calls if call.startswith("bisect")]


def test_a_speed_of_all_nodes_without_a_baseline_is_said_to_be_not_judged() -> None:
    """Run train without limit or baseline: the step says that it is not judged."""
    check = replace(TRAIN, limits=(Limit(metric="throughput"),))
    validation = Cluster().validate(replace(PLAIN, checks=(check,)))
    assert step(validation, "train").message == "throughput 400 GB/s; not judged: nothing to compare with"


def test_ctrl_c_before_a_slow_node_is_confirmed_does_not_make_it_good() -> None:
    """Interrupt the wait before a slow node is confirmed: ERROR, and the node is unsure."""

    class Impatient(Cluster):
        def wait(self, _: float) -> None:
            """Raise KeyboardInterrupt."""
            raise KeyboardInterrupt

    cluster = Impatient(lambda _, group: 40.0 if group == ("worker-2",) else 100.0)
    validation = cluster.validate(replace(PLAIN, checks=(MEMORY,)))
    assert (validation.verdict, verdicts(validation)["worker-2"]) == ("ERROR", "unsure")
    assert [figure.value for figure in validation.figures if figure.node == "worker-2"] == [40.0]


def test_a_lab_below_its_baseline_is_unsure_where_no_node_explains_it() -> None:
    """Fall below the baseline of all nodes: UNSURE, exit code 6, the message has both numbers."""
    profile = replace(PLAIN, checks=(replace(TRAIN, limits=(Limit(metric="throughput"),)),))
    before = Figure(step="train", what="throughput", node="", value=500, unit="samples/s", passed=None)
    validation = Cluster().validate(profile, baseline=baseline_of(profile, before))
    assert (validation.verdict, code(validation)) == ("UNSURE", 6)
    assert "400 GB/s, not >= 425 GB/s (15 % below the baseline of 2026-11-20)" in validation.message

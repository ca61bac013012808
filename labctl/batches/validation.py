"""``labctl validate``: a profile is read, the lab is validated by it, and the report is written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl import backends
from labctl.accelerators import CPU
from labctl.backends import Backend
from labctl.backends.devices import HostDevices
from labctl.backends.status import LabStatus, NodeStatus
from labctl.batches import advice, baseline, operator, search, singly, turns
from labctl.batches import batch as batches
from labctl.batches import hostfiles as sets
from labctl.batches import profile as profiles
from labctl.batches.advice import Cause
from labctl.batches.baseline import Baseline, ValidationReport
from labctl.batches.bisect import Diagnosis, Group
from labctl.batches.evidence import Round
from labctl.batches.figures import JobOutcome
from labctl.batches.profile import Check, Profile
from labctl.batches.record import BatchJob
from labctl.batches.together import Suspicion
from labctl.batches.validate import validate
from labctl.config import inventory
from labctl.config.context import Context, require_initialised
from labctl.config.settings import Settings
from labctl.doctor.report import DoctorReport
from labctl.errors import ConfigError, Failures, LabError
from labctl.jobs.inputs import RUNS
from labctl.jobs.request import choose_workload
from labctl.model import Workload
from labctl.records import store
from labctl.reports.validation import Hardware
from labctl.runs import labs
from labctl.system.process import CompletedProcess


def run(context: Context, name: str, *, keep: bool, out: Path | None, compare: bool) -> ValidationReport:
    """Validate the lab's cluster by a profile's name or file; write and return the report, compared if ``compare``.

    Without a name it is the profile of the operator's TEST_CONFIGURATION, else ``quick``, or in a cluster ``cluster``.
    """
    require_initialised(context)
    context = operator.with_hosts(context)
    settings, words_of_operator = context.settings(), operator.read(context)
    backends.require(settings, "validate")
    profile = profiles.read(profile_file(context, name))
    if not compare and not any(check.limits for check in profile.checks):
        raise ConfigError(f"profile {profile.name} has no figure to record", hint="labctl baseline --profile full")
    for check in profile.checks:
        workload = choose_workload(context.directory, check.workload, check.options, settings)
        profiles.require_metrics(check, workload.metrics, dict(workload.notes))
    reports = context.directory / "reports" / f"{datetime.now():%Y%m%d-%H%M%S}-{profile.name}"
    directory = baseline.new_directory(out or reports, numbered=not out).absolute()
    validation = validate(
        settings.text("LAB_NAME"),
        profile,
        Subject(context=context, directory=directory / baseline.CHECKS),
        context.notice,
        operator=words_of_operator,
        baseline=_baseline(context, profile) if compare else None,
        drained=operator.drained(context),
        keep=keep,
    )
    runs = os.path.relpath(context.directory / RUNS, directory)
    return baseline.write(directory, replace(validation, runs=runs))


def profile_file(context: Context, name: str) -> Path:
    """Return the file of a profile by name or path; without, by TEST_CONFIGURATION of environment or hosts' file."""
    usual = profiles.OF_CLUSTER if brings_nodes(context.settings()) else profiles.USUAL
    configured = operator.read(context).test_configuration
    return profiles.find(name or profiles.configured(configured, context.warn, usual))


def _baseline(context: Context, profile: Profile) -> Baseline | None:
    """Read the lab's baseline; None if there is none or, with a notice, if another profile recorded it."""
    recorded = baseline.read(context.directory / baseline.FILE)
    if recorded and recorded.profile != profile.name:
        context.notice(f"not compared with {baseline.FILE}: it was recorded with profile {recorded.profile}")
        return None
    return recorded


def brings_nodes(settings: Settings) -> bool:
    """Tell if runs bring their own nodes, as in a Kubernetes cluster, where `labctl up` is not supported."""
    return "up" in backends.unsupported(settings)


def nodes_of(backend: Backend) -> LabStatus:
    """Return a cluster's status: nodes that are not drained, as workers, running or with why they are unusable."""
    lab, unusable, drained = backend.lab(), backend.unusable(), inventory.drained(backend.context.directory)
    devices = () if lab.accelerator == CPU else (lab.accelerator,)
    nodes = tuple(
        NodeStatus(
            name=node.name,
            role="worker",
            host=node.host,
            state=unusable.get(node.name, "running"),
            slots=node.slots,
            devices=devices,
        )
        for node in lab.nodes
        if node.name not in drained
    )
    return LabStatus(lab=lab.name, state="up", nodes=nodes, unreachable=())


class Subject(Struct, frozen=True, kw_only=True):
    """The lab that is validated; the records of its checks are below ``directory``."""

    context: Context
    directory: Path

    def doctor(self) -> DoctorReport:
        """Run the checks of `labctl doctor` and return their findings."""
        with backends.connect(self.context, demand=False) as backend:
            return DoctorReport(backend.findings())

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script on every host; return the results, of any exit code, and the hosts on which it did not end."""
        with backends.connect(self.context, demand=False) as backend:
            return backend.on_hosts(script, arguments, seconds)

    def up(self) -> LabStatus:
        """Bring the lab up and return its status; in a cluster, only read the status of its nodes."""
        with backends.connect(self.context) as backend:
            return nodes_of(backend) if brings_nodes(backend.settings) else labs.bring_up(backend)

    def status(self) -> LabStatus:
        """Return the status of the lab, or of the cluster's nodes."""
        with backends.connect(self.context, demand=False) as backend:
            return nodes_of(backend) if brings_nodes(backend.settings) else labs.status(backend)

    def look_at(self, node: str, host: Hardware, cause: Cause) -> str:
        """Return the commands that show what is wrong with a node; in a cluster, `kubectl describe node`."""
        if brings_nodes(self.context.settings()):
            return f"`kubectl describe node {node}`"
        return advice.look_at(node, partial(self.typed, host.host), cause, host.accelerator or CPU)

    def typed(self, host: str, command: str) -> str:
        """Return the command line that a user types on this machine to run a shell command on a host."""
        with backends.connect(self.context, demand=False) as backend:
            return backend.typed(host, command)

    def down(self) -> object:
        """Remove the lab and return the report of what was removed."""
        with backends.connect(self.context, drained=True) as backend:
            return labs.take_down(backend, "labctl validate")

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """List what is left of the lab and its runs on the hosts, and the hosts that do not answer."""
        with backends.connect(self.context, demand=False) as backend:
            return backend.remains()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of labctl, image, engines and kernels."""
        with backends.connect(self.context) as backend:
            return backend.versions()

    def hardware(self) -> tuple[Hardware, ...]:
        """Return the hardware of each host; empty, with a notice, if it cannot be read."""
        try:
            with backends.connect(self.context, demand=False) as backend:
                return tuple(map(_hardware, backend.devices().hosts))
        except LabError as error:
            self.context.notice(f"hardware is not known: {error.message}")
            return ()

    def run(self, check: Check, groups: tuple[Group, ...], record: str, slots: Mapping[str, int]) -> list[JobOutcome]:
        """Run a check's workload on groups of nodes as a batch; write its record; return an outcome per group.

        HostError if the lab loses its launcher.
        """
        hostfiles = self.directory / record / "hostfiles"
        sets.write(hostfiles, sets.texts(groups, slots))
        context, workload = self.context, self._workload(check)
        settings = backends.settings_for(context, context.settings(), workload)
        with backends.connect(context, settings) as backend:
            report = batches.run(
                backend,
                check.workload,
                workload,
                (hostfiles,),
                check.options,
                lambda _: None,
                out=self.directory / record,
            )
        report.batch.require_launcher_kept()
        results = {job.run_id: store.read_result(context.directory, job.run_id) for job in report.batch.jobs}
        outcomes = []
        for job in report.batch.jobs:
            result = results[job.run_id]
            metrics, notes = (result.metrics, result.notes) if result else ({}, {})
            outcomes.append(
                JobOutcome(
                    nodes=job.nodes,
                    passed=job.verdict == "PASS",
                    message=job.message,
                    run_id=job.run_id,
                    metrics=metrics,
                    notes=notes,
                    rounds=self._rounds(check, job),
                )
            )
        return outcomes

    def bisect(self, check: Check, nodes: tuple[str, ...], why: Suspicion, within: float, figures: int) -> Diagnosis:
        """Find bad nodes and links behind a failed run or missed bound. ConfigError unless runs compare by it.

        ConfigError for a metric that no search compares runs by.
        """
        workload, minimum = self._workload(check), None
        if why.bound is None:
            within = singly.RUNS_ALONE
        else:
            _require_searched(workload, check, why.metric, why.bound.sign)
            minimum = search.least(why.metric, why.bound.value, 2 if check.nodes == "pairs" else len(nodes))
        context = self.context
        settings = backends.settings_for(context, context.settings(), workload)
        with backends.connect(context, settings) as backend:
            report = search.bisect(
                backend,
                check.workload,
                workload,
                check.options,
                lambda _: None,
                nodes=nodes,
                within=within,
                minimum=minimum,
                figures=figures,
                out=self.directory / f"{check.name}-bisect",
            )
        if report.interrupted:
            raise KeyboardInterrupt
        return report.diagnosis

    def _rounds(self, check: Check, job: BatchJob) -> tuple[Round, ...]:
        """Return the rounds that a job of nodes in turn printed; empty for other checks."""
        if check.nodes != "turns":
            return ()
        return turns.read((text for _, text in store.output(self.context.directory, job.run_id)), job.nodes)

    def _workload(self, check: Check) -> Workload:
        """Return the workload of a check, chosen by its options and the lab's settings."""
        context = self.context
        return choose_workload(context.directory, check.workload, check.options, context.settings())


def _hardware(host: HostDevices) -> Hardware:
    """Return a host's hardware: processor, cores, memory, and count of its accelerator's devices with driver."""
    kind = host.accelerator or ""
    named = Counter(device.name or device.kind for device in host.devices if device.kind == kind)
    return Hardware(
        host=host.name,
        processor=host.processor,
        cores=len(host.cpus),
        memory=host.memory,
        accelerator=kind,
        devices=", ".join(f"{many} x {name}" for name, many in named.items()),
        driver=host.drivers.get(kind, ""),
    )


def _require_searched(workload: Workload, check: Check, metric: str, sign: str) -> None:
    """Raise ConfigError unless bisection compares runs of the workload by this metric and bound."""
    compared = batches.metric_of(workload)
    if not search.is_searched_by(compared, metric, sign):
        name = compared.name if compared else "none"
        raise ConfigError(f"runs are compared by `{name}`, not by `{metric}`", hint=f"labctl bisect {check.workload}")

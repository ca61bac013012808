"""The steps of a run's plan, besides those of its backend."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime

from labctl import naming
from labctl.backends import Backend
from labctl.backends.plan import Step
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.health.model import Snapshot
from labctl.jobs.request import RunOptions
from labctl.model import HERE, Copy, File, Result
from labctl.records import store
from labctl.records.active import Run
from labctl.records.verdict import RunOutcome
from labctl.runs import changes, judge
from labctl.runs.health import Looked
from labctl.system import human


@dataclass(kw_only=True)
class RunDeployment:
    """State of a run under way that its steps share."""

    backend: Backend
    run: Run
    options: RunOptions
    now: datetime
    held: ExitStack
    """Closed at the end of the run, however that comes."""
    before: Mapping[str, Snapshot]
    """Readings of its hosts before it."""
    began: float = field(init=False)
    log: store.RunLog = field(init=False)
    outcome: RunOutcome = field(init=False)
    looked: Future[Looked] | None = None
    """Readings of its hosts after it."""
    result: Result = field(init=False)

    @property
    def context(self) -> Context:
        return self.backend.context

    def host_of(self, error: HostError) -> str:
        """Return the node that an error names, ``local`` if it names none."""
        return error.node or HERE


class EndRun(Step, frozen=True, kw_only=True):
    """End what is left of an earlier run, fetch its results and close its record."""

    run_id: str

    def __str__(self) -> str:
        return f"end, fetch and close runs/{self.run_id}"

    def do(self, deployment: RunDeployment) -> None:
        """End what an earlier run left, fetch its files, and close its record."""
        judge.close(deployment.backend, self.run_id)


class StageRun(Step, frozen=True, kw_only=True):
    """Create the run's directories: its record, and the one with files that its ranks read and write."""

    run_id: str
    job: tuple[File, ...]
    record: tuple[File, ...]
    code: tuple[Copy, ...]
    reads_health: bool
    """Whether the hosts were read before the run."""

    def __str__(self) -> str:
        read = (changes.RECORD,) if self.reads_health else ()
        printed = (*read, "output.log", "output.times", "metrics.jsonl")
        record = ", ".join((*(file.path for file in (*self.job, *self.record)), "started", *printed))
        needed = ", ".join(("ranks/", self._copied(), *(file.path for file in self.job)))
        return f"write {record} to runs/{self.run_id}, and {needed} to {naming.OUTPUTS}/{self.run_id}"

    def _copied(self) -> str:
        """Render the folder of the copied code, with the number of its files and the project, if there are any."""
        if not self.code:
            return "work/"
        return f"work/ ({human.count(len(self.code), 'file')} of project `{self.code[0].root.name}`)"

    def do(self, deployment: RunDeployment) -> None:
        """Create the run's record and outputs, open its log until the deployment is over, and announce the run."""
        run = deployment.run
        deployment.began = time.monotonic()
        store.create(run.lab, self.run_id, self.job, self.record, self.code)
        changes.record(run, changes.Recorded(before=deployment.before))
        deployment.log = store.RunLog(run.directory, run.lab, run.job.workload)
        deployment.held.callback(deployment.log.close)
        deployment.context.notice(f"run {self.run_id}: {run.job.workload.description}")


class LaunchRun(Step, frozen=True, kw_only=True):
    """Launch the run, and follow it to its end unless it is detached."""

    text: str

    def __str__(self) -> str:
        return self.text

    def do(self, deployment: RunDeployment) -> None:
        """Start the run if detached, else follow it to its end and keep the outcome; collect files if that fails."""
        backend, run = deployment.backend, deployment.run
        if deployment.options.detach:
            backend.start(run, deployment.options)
            return
        keep = deployment.log.keep_and_show(deployment.context.lines)
        try:
            with deployment.context.showing(
                deployment.log.progress, time.monotonic() - deployment.began, run.job.timeout
            ):
                deployment.outcome = backend.supervise(run, keep, deployment.options)
            # In the background, while the results are fetched.
            deployment.looked = changes.begin_after(backend, run)
        except BaseException:
            backend.collect(run.run_id)
            raise


class CollectResults(Step, frozen=True, kw_only=True):
    """Move what ranks wrote into the run's record."""

    text: str

    def __str__(self) -> str:
        return self.text

    def do(self, deployment: RunDeployment) -> None:
        """Fetch the run's files from the nodes."""
        deployment.backend.collect(deployment.run.run_id)


class WriteResult(Step, frozen=True, kw_only=True):
    """Judge the run and write its result; write evidence too if it did not pass."""

    run_id: str

    def __str__(self) -> str:
        return f"write runs/{self.run_id}/result.json"

    def do(self, deployment: RunDeployment) -> None:
        """Close the log, judge the run, write its result, and keep that in the deployment."""
        deployment.log.close()
        deployment.result = judge.conclude(
            deployment.backend,
            deployment.run,
            deployment.outcome,
            deployment.log,
            deployment.outcome.seconds or time.monotonic() - deployment.began,
            deployment.now,
            deployment.looked,
        )

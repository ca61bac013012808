"""Runs that are under way, and how they ended, as the agent beside their ranks reports."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import Cause, Job, Lab
from labctl.system import human

# Seconds without a follower after which a run counts as not followed.
AWAY = 5


class Ended(Struct, frozen=True, kw_only=True):
    """End of a run as the agent reports it; ``cause`` is None unless the agent, a rank or the time limit ended it."""

    code: int
    cause: Cause | None = None
    message: str = ""
    seconds: float = 0
    at: float = 0
    """Time of the end, in seconds since 1970."""
    lost: bool = False
    """The agent ended before the run did."""
    left: tuple[str, ...] = ()
    """Nodes on which the agent could not end the processes of the run."""


class ActiveRun(Struct, frozen=True, kw_only=True):
    """A run that the agent reports: ``state`` is running, ended or lost."""

    id: str
    nodes: tuple[str, ...]
    state: str
    order: float = 0
    """Time of its launch, in seconds since 1970."""
    port: int = 0
    owner: str = ""
    patience: float = 0
    waits: bool = False
    step: str = ""
    """The last step or epoch that it printed, such as ``step 12/100``."""
    followed: float | None = None
    """Seconds since it was last followed; None if it never was."""


class LaunchError(HostError):
    """A run did not start."""


class InUse(LaunchError):
    """Other runs use nodes of a run."""


def in_use(runs: Iterable[ActiveRun]) -> InUse:
    """Return an InUse error, not raised, that names the nodes and the runs that use them."""
    first, *_ = users = tuple(runs)
    return InUse(in_use_text(users), hint=f"--wait waits for it; `labctl stop {first.id}` ends it")


def in_use_text(runs: Iterable[ActiveRun]) -> str:
    """Render the nodes in use, and the runs that use them."""
    return "; ".join(f"{', '.join(run.nodes)}: in use by run {run.id} ({run.owner}, {since(run)})" for run in runs)


def since(run: ActiveRun) -> str:
    """Render a run's launch time, and if its labctl is gone also in how many seconds it ends."""
    text = f"since {datetime.fromtimestamp(run.order).astimezone():%Y-%m-%d %H:%M:%S}"
    if run.patience and run.followed is not None and run.followed > AWAY:
        text += f", its labctl is gone and it ends in {human.duration(max(0, run.patience - run.followed))}"
    return text


class Run(Struct, frozen=True, kw_only=True):
    """A run: its job, and the lab whose nodes it uses."""

    lab: Lab
    job: Job

    @property
    def run_id(self) -> str:
        return self.job.run_id

    def short(self, text: str) -> str:
        """Return the text unchanged; backends with other node names override it."""
        return text

    @property
    def directory(self) -> Path:
        """Return the directory of its record, `runs/ID` in the lab directory."""
        return self.lab.directory / "runs" / self.run_id

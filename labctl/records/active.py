"""A run that is under way, and how one ended, as the agent beside its ranks tells it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from labctl.errors import HostError
from labctl.model import Cause, Job, Lab

# Seconds without a follower after which a run counts as not followed.
AWAY = 5


class Ended(Struct, frozen=True, kw_only=True):
    """How a run ended, as the agent says; ``cause`` if the agent ended it, or its ranks or its time are the reason."""

    code: int
    cause: Cause | None = None
    message: str = ""
    seconds: float = 0
    at: float = 0
    """When, in seconds since 1970."""
    lost: bool = False
    """Whether the agent was ended before the run was."""
    left: tuple[str, ...] = ()
    """Nodes on which the agent could not end what is left of the run."""


class ActiveRun(Struct, frozen=True, kw_only=True):
    """A run that the agent knows: ``state`` is running, ended or lost."""

    id: str
    nodes: tuple[str, ...]
    state: str
    order: float = 0
    """When it was launched, in seconds since 1970."""
    port: int = 0
    owner: str = ""
    patience: float = 0
    waits: bool = False
    step: str = ""
    """The last that it has printed of where it is, such as ``step 12/100``."""
    followed: float | None = None
    """Seconds since it was last followed; None where it never was."""


class LaunchError(HostError):
    """A run did not start."""


class InUse(LaunchError):
    """Nodes are those of other runs."""


def in_use(runs: Iterable[ActiveRun]) -> InUse:
    """What is raised where other runs have a run's nodes."""
    first, *_ = found = tuple(runs)
    words = "; ".join(f"{', '.join(run.nodes)}: in use by run {run.id} ({run.owner}, {since(run)})" for run in found)
    return InUse(words, hint=f"--wait waits for it; `labctl stop {first.id}` ends it")


def since(run: ActiveRun) -> str:
    """When a run was launched, and that nobody follows it where that is so."""
    words = f"since {datetime.fromtimestamp(run.order).astimezone():%Y-%m-%d %H:%M:%S}"
    if run.patience and run.followed is not None and run.followed > AWAY:
        words += f", its labctl is gone and it ends in {max(0, run.patience - run.followed):.0f} s"
    return words


class Run(Struct, frozen=True, kw_only=True):
    """A run: the job, and the lab whose nodes it has."""

    lab: Lab
    job: Job

    @property
    def run_id(self) -> str:
        return self.job.run_id

    def short(self, text: str) -> str:
        """Return a text with nodes by the names that the lab has for them."""
        return text

    @property
    def directory(self) -> Path:
        """The directory of its record."""
        return self.lab.directory / "runs" / self.run_id

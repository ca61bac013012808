"""Protocol of a backend, which runs labs, and the backends by their value of LAB_ENGINE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from labctl.backends.finding import Receiver, ignore
from labctl.config.context import Context
from labctl.config.settings import BACKENDS, Settings
from labctl.errors import ConfigError, HostError

if TYPE_CHECKING:
    from labctl.backends.devices import DeviceReport
    from labctl.backends.finding import Finding
    from labctl.backends.plan import Plan, Step
    from labctl.backends.status import LabStatus
    from labctl.errors import Failures
    from labctl.hub.report import CacheReport
    from labctl.jobs.replay import ReplayedRun
    from labctl.jobs.request import RunOptions
    from labctl.model import Cache, File, Hang, Job, Lab, Result, Workload
    from labctl.records.active import ActiveRun, Run
    from labctl.records.lines import Line
    from labctl.records.verdict import RunOutcome
    from labctl.system.process import CompletedProcess

OnLines = Callable[[Sequence["Line"]], object]
Replay = Callable[[datetime], "Job"]


OF_DOCKER = frozenset({"build", "bundle save", "devcontainer", "down --images", "jupyter", "keys rotate", "render"})
"""Commands that call Docker itself, which no other backend supports."""


class RunPlan(Struct, frozen=True, kw_only=True):
    """Parts of a run's plan that a backend adds: its steps, files for the record, and the texts of two steps."""

    before: tuple[Step, ...] = ()
    record: tuple[File, ...] = ()
    send: tuple[Step, ...] = ()
    launch: str
    collect: str


class Backend(Protocol):
    """Runs the lab of a directory and its runs. Methods raise HostError with the engine's message, or ConfigError.

    A ``preview`` plans for ``--dry-run``: it changes nothing, and leaves out facts that only a change would show.
    """

    name: str
    context: Context
    settings: Settings

    # --- the lab ---

    def lab(self) -> Lab:
        """Return the lab with its nodes and slots, placed or to be placed."""

    def status(self) -> LabStatus:
        """Return the state of the nodes, without runs; hosts that do not answer are named in it."""

    def unusable(self, slots: int = 0) -> Mapping[str, str]:
        """Return the nodes on which no run of ``slots`` slots per node (0: all of them) can begin now, and why."""

    def devices(self) -> DeviceReport:
        """Return the devices of each host or node; needs no lab that is up."""

    def findings(self, node: str = "", receive: Receiver = ignore) -> tuple[Finding, ...]:
        """Run the checks of `labctl doctor` on the lab, or on one node and its host; ``receive`` gets each check's."""

    def plan_prepare(self, *, preview: bool = False) -> Plan:
        """Plan the first part of `up`: images and probes, on whose results the rest depends."""

    def plan_up(self, *, preview: bool = False) -> Plan:
        """Plan the rest of `up`, from the state of the nodes."""

    def plan_down(self, *, images: bool = False, state: str = "", preview: bool = False) -> Plan:
        """Plan the removal of the lab's objects, also of ``images``; for `clean` also of its ``state`` directory."""

    def carry_out(self, plan: Plan) -> None:
        """Carry out a plan of this backend. HostError names the hosts that failed, and why."""

    def under_way(self) -> tuple[str, ...]:
        """Return a text for each run that is under way."""

    def require_idle(self) -> None:
        """Raise HostError if a run is under way."""

    def fill(self, workload: str, cache: Cache, *, hosts: bool, preview: bool) -> CacheReport:
        """Download models and datasets to the lab's cache, with ``hosts`` to theirs; a ``preview`` only reports."""

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str] = ()
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script on these hosts, or on each; return results, of any exit code, and hosts that did not answer."""

    def typed(self, host: str, command: str) -> str:
        """Return the command line that a user types on this machine to run a shell command on a host."""

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """Return a text per object or process of the lab that hosts still have, and the hosts that do not answer."""

    def versions(self) -> dict[str, str]:
        """Return the versions of what the lab runs on, by name, such as the engine and the kernel of each host."""

    def freeze(self) -> dict[str, Any]:
        """Describe the lab: images, packages, files, data, devices. HostError if a host does not answer."""

    def not_replayable(self, recorded: ReplayedRun) -> Iterator[str]:
        """Yield what a recorded run used and is no longer available; warnings go to the context."""

    # --- nodes ---

    def exec(self, run: Run, node: str, argv: tuple[str, ...], *, limit: float) -> CompletedProcess:
        """Run a short program in a node of a run; return exit code and output, whatever the code."""

    def attach(
        self, nodes: tuple[str, ...], command: tuple[str, ...], *, stdin: Literal["terminal", "pipe"], prompt: bool
    ) -> int:
        """Run a command in nodes (none: all workers), in a single one on this terminal; return the largest exit code.

        With ``prompt`` the command needs a terminal. Runs are followed by ``output``.
        """

    def logs(self, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
        """Pass on the output of the containers of a node, or of all nodes; with ``follow`` until they end."""

    # --- runs ---

    def begin(self, workload: Workload, options: RunOptions, now: datetime, replayed: Replay | None = None) -> Run:
        """Build the job of a new run, or of a replayed one, without asking the nodes."""

    def observe(self, run: Run, *, preview: bool = False) -> Run:
        """Observe the nodes of a new run; return the run with their state."""

    def needs_up(self, run: Run) -> bool:
        """Tell if the lab must be brought up with the image of the run's workload."""

    def confirm_image(self, run: Run, ask: Callable[[str], bool] | None, *, preview: bool = False) -> None:
        """Ask if the lab may be brought up with the run's image. HostError if not, or if ``ask`` is None."""

    def require_launcher(self, workload: Workload) -> None:
        """Raise HostError if no run of a workload could begin, whatever its nodes."""

    def require_ready(self, run: Run, options: RunOptions, *, preview: bool = False) -> None:
        """Raise HostError or ConfigError if the run cannot begin."""

    def plan_run(self, run: Run, *, ended: Collection[str] = (), preview: bool = False) -> RunPlan:
        """Plan a run that is ready; ``ended`` are the ids of earlier runs that are ended before it."""

    def carry_out_steps(self, run: Run, steps: tuple[Step, ...], *, before: int, after: int) -> None:
        """Carry out a part of a run's steps; ``before`` and ``after`` count the other steps."""

    def start(self, run: Run, options: RunOptions) -> None:
        """Launch a run without following it."""

    def supervise(
        self,
        run: Run,
        keep: Callable[[Sequence[Line]], Sequence[Line]],
        options: RunOptions | None = None,
        *,
        age: float = 0,
    ) -> RunOutcome:
        """Launch a run, or without ``options`` follow one begun ``age`` seconds ago, to its end; ``keep`` records it.

        A run without ``options`` is followed by `attach`, or after it has ended, to be judged; one whose agent is gone
        ends as lost. A run that is launched here ends with Ctrl-C, which only the main thread gets. ``keep`` gets lines
        as they come, also none, and returns them redacted. RecordError if a line cannot be written, HostError if the
        connection is lost; the run then goes on.
        """

    def output(self, run: Run, on_lines: OnLines, given_up: Callable[[], bool] = bool) -> None:
        """Pass on a run's lines from the first until it ends or is ``given_up``; an empty batch per silent second."""

    def log(self, run_id: str, on_lines: OnLines) -> bool:
        """Pass on what a run without a result has printed, and return True; False if its record has the lines."""

    def recorded(self, run_id: str) -> Run:
        """Load a run from its record."""

    def active(self) -> Mapping[str, ActiveRun]:
        """Return runs that nodes report, by id, also ended ones; if no node answers, recorded ones as unknown."""

    def sharing_losses(self) -> AbstractContextManager[object]:
        """Share one subscription to losses of nodes among all runs within the block."""

    def with_context(self, context: Context) -> Backend:
        """Return a backend on the same connections that reports to another context."""

    def stop(self, run: Run, grace: float, message: str) -> None:
        """Have the agent of a run end it: TERM, and KILL after ``grace`` seconds. HostError if it is not running."""

    def look(self, run: Run) -> Hang:
        """Have the agent of a run tell what its ranks wait for now. HostError if the run is not running."""

    def leaves_processes(self, run_id: str) -> bool:
        """Tell if an earlier run was on this backend and only labctl ends the processes that it left on nodes.

        Runs of a lab's earlier backend are left alone.
        """

    def end(self, run_id: str) -> None:
        """End the processes on nodes of an earlier run whose agent is gone."""

    def collect(self, run_id: str) -> None:
        """Move the results of a run's ranks into its record; warn of those that cannot be moved."""

    def evidence(self, run: Run, since: float) -> dict[str, str]:
        """Return events and messages of hosts and engine since a time, as files of text."""

    def forget(self, run: Run) -> None:
        """Remove the data that the nodes keep of a judged run."""

    def without_lost(self, options: RunOptions, ended: Result, error: HostError) -> RunOptions:
        """Return the options without the nodes that did not come up again; raise ``error`` if no run can go on so."""


def settings_for(context: Context, settings: Settings, workload: Workload) -> Settings:
    """Return the settings with the image and the packages that a workload needs, as the backend provides them."""
    module = import_module(BACKENDS[settings.text("LAB_ENGINE")])
    changed: Settings = module.settings_for(context, settings, workload)
    return changed


def require_options(settings: Settings, options: RunOptions) -> None:
    """Raise ConfigError if the lab's backend does not support an option of `run` that is given."""
    for name in options.__struct_fields__:
        if getattr(options, name):
            require(settings, f"--{name.replace('_', '-')}")


def unsupported(settings: Settings) -> Mapping[str, str]:
    """Return the commands and options that the lab's backend does not support, each with an alternative."""
    module = import_module(BACKENDS[settings.text("LAB_ENGINE")])
    commands: Mapping[str, str] = module.UNSUPPORTED
    return commands


def require(settings: Settings, command: str) -> None:
    """Raise ConfigError if the lab's backend does not support a command or option."""
    engine, hint = settings.text("LAB_ENGINE"), unsupported(settings).get(command)
    if hint is None and command in OF_DOCKER and engine != "docker":
        hint = "it needs LAB_ENGINE=docker"
    if hint is not None:
        raise ConfigError(f"{command} is not supported with LAB_ENGINE={engine}", hint=hint)


@contextmanager
def connect(context: Context, settings: Settings | None = None, **options: Any) -> Iterator[Backend]:
    """Yield the backend that LAB_ENGINE names, closed with the block; hosts are connected when first needed."""
    settings = settings or context.settings()
    module = import_module(BACKENDS[settings.text("LAB_ENGINE")])
    with module.connect(context, settings, **options) as backend:
        yield backend

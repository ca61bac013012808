"""The backend of Docker hosts: this machine's daemon, or those of several hosts over ssh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from labctl import naming
from labctl.backends import Backend, OnLines, Replay, RunPlan
from labctl.backends.docker.deploy import preflight
from labctl.backends.docker.lab.cluster import Cluster, load_lab, preview_lab, read_inventory
from labctl.backends.docker.lab.cluster import connect as connect_hosts
from labctl.backends.finding import Receiver, ignore
from labctl.backends.plan import Plan, carry_out
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import Failures, HostError, LabError, raise_all
from labctl.model import HERE, LAUNCHER, Cache, Hang, Job, Lab, Result, Workload
from labctl.records import pace, store
from labctl.records.active import ActiveRun, Run
from labctl.records.lines import Line
from labctl.system import filelock, human

if TYPE_CHECKING:
    from labctl.backends.devices import DeviceReport
    from labctl.backends.docker.agent import EarlyReach, Standby
    from labctl.backends.docker.events import Losses
    from labctl.backends.finding import Finding
    from labctl.backends.plan import Step
    from labctl.backends.status import LabStatus
    from labctl.hub.report import CacheReport
    from labctl.jobs.replay import ReplayedRun
    from labctl.jobs.request import RunOptions
    from labctl.records.manifest import Manifest
    from labctl.records.verdict import RunOutcome
    from labctl.system.process import CompletedProcess

UNSUPPORTED: Mapping[str, str] = {}
"""Commands and options that this backend does not support: none."""


class UpPlan(Plan, frozen=True):
    """Second part of `up`, with the lab that the hosts get, and the hosts that it skips."""

    lab: Lab | None = None
    failed: Failures = {}  # noqa: RUF012 - msgspec copies it


class DownPlan(Plan, frozen=True):
    """The removal of a lab, and the hosts that it skips."""

    failed: Failures = {}  # noqa: RUF012


class NewRun(Run, frozen=True, kw_only=True):
    """A run that is about to begin, with what was observed of its nodes; ``observed`` is None only in a preview."""

    rebuild: Callable[[Lab], Job] | None = None
    """Builds the job for a lab with another port; None for a replay, whose job is fixed."""
    observed: ObservedState | None = None
    origin: Future[dict[str, Any]] | None = None
    """Facts for the run's record, gathered in the background."""
    active: tuple[ActiveRun, ...] = ()
    foreign: Failures = {}  # noqa: RUF012
    """Hosts that have another user's lab of this name."""


def settings_for(context: Context, settings: Settings, workload: Workload) -> Settings:
    """Return the settings with a workload's packages, and its image if they name none; warn if they name another."""
    from labctl.backends.docker.deploy import images

    changed = images.for_workload(context, settings, workload)
    if remark := images.remark(changed, workload):
        context.warn(remark)
    return changed


@contextmanager
def connect(context: Context, settings: Settings, **options: Any) -> Iterator[Backend]:
    """Open the backend for one command; hosts are connected when they are first needed, with these ``options``."""
    with ExitStack() as held:
        yield DockerBackend(context, settings, held, options)


class DockerBackend:
    """The lab of a directory on Docker hosts."""

    name = "docker"

    def __init__(self, context: Context, settings: Settings, held: ExitStack, options: Mapping[str, Any]) -> None:
        """Connect to no host yet; ``options`` are for the connections, which ``held`` closes."""
        self.context, self.settings = context, settings
        self._held, self._options = held, options
        self._cluster: Cluster | None = None
        self._lab: Lab | None = None
        self._observed: ObservedState | None = None
        """State of the containers; None if it was not observed, or changed since."""
        self._reached: Collection[str] | None = None
        """Workers that `up` has reached over ssh; None if it has not run."""
        self._early: EarlyReach | None = None
        self._losses: Losses | None = None
        self._standbys: dict[str, Standby] = {}
        """Agents that wait to launch runs, or have launched them, by run."""
        self._pushed: dict[str, Manifest] = {}
        """Files that runs were sent, by run."""

    @property
    def cluster(self) -> Cluster:
        """Hosts that are usable. HostError if none answers."""
        if self._cluster is None:
            self._cluster = self._held.enter_context(connect_hosts(self.context, self.settings, **self._options))
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: Cluster) -> None:
        self._cluster, self._lab = cluster, None

    def with_context(self, context: Context) -> DockerBackend:
        """Return a copy that reports to another context, on the same connections, which are made now if none are."""
        _ = self.cluster
        other = copy.copy(self)
        other.context = context
        return other

    # --- the lab ---

    def lab(self) -> Lab:
        """Return the lab on its hosts; hosts without its devices are left out from now on."""
        if self._lab is None:
            self._lab, self._cluster = load_lab(self.context, self.cluster, ask=False)
        return self._lab

    def status(self) -> LabStatus:
        """Return the state of the containers; hosts that do not answer are named in it."""
        from labctl.backends.docker.deploy import applied, drift, readiness
        from labctl.backends.docker.lab.status import status_of

        changed = applied.changed(self.context.directory, self.settings)
        observed = self._observed or self._observe(image=bool(changed))
        status = status_of(self.context, self.cluster, observed, self._reached)
        is_doubtful = status.nodes and (changed or drift.may_be_replaced(observed.container(LAUNCHER)))
        out_of_date = self._out_of_date(observed, changed) if is_doubtful else ""
        lacks = out_of_date or status.state in ("down", "partial")
        hint = readiness.way_up(observed.containers, self.context.flags) if lacks else ""
        return replace(status, out_of_date=out_of_date, hint=hint)

    def _observe(self, *, image: bool) -> ObservedState:
        """Observe the lab, and its image if the hosts tell which it is."""
        name: str | None = None
        if image:
            with suppress(LabError):
                name = self.cluster.image
        return self.cluster.engine.observe(self.settings.text("LAB_NAME"), name)

    def _out_of_date(self, observed: ObservedState, changed: tuple[str, ...]) -> str:
        """Return why `up` would change containers: settings, or a directory of the launcher; empty if it would not."""
        from labctl.backends.docker.deploy import drift, readiness
        from labctl.backends.docker.lab.status import own_containers
        from labctl.backends.owner import owner

        # Without its warnings, which the status has given.
        quiet = replace(self.context, emit=lambda _: None)
        # A lab that cannot be made from the present settings has no reason to name.
        with suppress(LabError):
            lab, _ = load_lab(quiet, self.cluster, ask=False)
            own = own_containers(quiet, observed, owner())
            if why := readiness.out_of_date(lab, own, changed) if changed else "":
                return why
            replaced = drift.replaced(lab, self.cluster.engine, filter(None, (own.container(LAUNCHER),)))
            return replaced.get(LAUNCHER, "")
        return ""

    def unusable(self, slots: int = 0) -> Mapping[str, str]:  # noqa: ARG002
        """Return no nodes: those of silent hosts are not in the lab, and a run reports one that is lost later."""
        return {}

    def devices(self) -> DeviceReport:
        """Return the devices of each host; needs neither an engine nor a lab."""
        from labctl.backends.docker.lab import devices

        return devices.devices(self.context)

    def findings(self, node: str = "", receive: Receiver = ignore) -> tuple[Finding, ...]:
        """Run doctor's checks of hosts, engines, lab and nodes, or of one node and its host; return the findings."""
        from labctl.backends.docker.checks import run

        return run.findings(self.context, receive, node=node)

    def plan_prepare(self, *, preview: bool = False) -> Plan:
        """Plan to get the image to hosts and to probe engines. HostError if `up` would fail on every host."""
        from labctl.backends.docker.checks import run as checks
        from labctl.backends.docker.deploy import images, ledger, provision

        observed, cluster = preflight.observe(self.context, self.cluster)
        self._observed = observed
        # In the background, while the rest is decided.
        self._early = None if preview else cluster.begin_reach(observed)
        ledger.warn_orphaned_hosts(self.context, cluster)
        lab, cluster = preview_lab(cluster)
        cluster = checks.preflight(self.context, lab, cluster, "up")
        ensured, failed = images.plan_images(self.context, cluster, observed)
        self.cluster = cluster.excluding(failed)
        preflight.report_accelerator(self.context, self.cluster, lab)
        self._warn_of_image(lab)
        preflight.warn_small_arp_table(self.context, self.cluster, lab)
        steps = (*ensured, *provision.plan_probe(self.cluster))
        if steps and not preview:
            # Fail before an image is built, which takes minutes.
            lab, self.cluster = preview_lab(self.cluster)
            self._decide_up(lab, observed)
        return Plan(steps)

    def plan_up(self, *, preview: bool = False) -> Plan:
        """Plan the lab directory and the containers, after images and probes; a ``preview`` only predicts."""
        if self._observed is None:
            self._observed, self.cluster = preflight.observe(self.context, self.cluster)
        lab, self.cluster = preview_lab(self.cluster) if preview else load_lab(self.context, self.cluster)
        plan, failed = self._decide_up(lab, self._observed, preview=preview)
        if preview:
            preflight.warn_excluded_hosts(self.context, failed)
        return UpPlan(plan.steps, lab=lab, failed=failed)

    def _decide_up(self, lab: Lab, observed: ObservedState, *, preview: bool = False) -> tuple[Plan, Failures]:
        """Return the plan of `up` and hosts to skip. HostError if nodes cannot be created."""
        from labctl.backends.docker.checks import run as checks
        from labctl.backends.docker.deploy import decide
        from labctl.backends.docker.deploy.steps import ApplyProject

        plan, failed = decide.up(self.context, self.cluster, lab, observed, preview=preview)
        if any(isinstance(step, ApplyProject) for step in plan.steps):
            usable = checks.able_to_create(self.context, lab, self.cluster)
            if usable is not self.cluster:
                self.cluster = usable
                return decide.up(self.context, usable, lab, observed, preview=preview)
        return plan, failed

    def plan_down(self, *, images: bool = False, state: str = "", preview: bool = False) -> Plan:
        """Plan to remove objects with the lab's label, files on hosts, and the image or state if asked for."""
        from labctl.backends.docker.deploy import decide

        self._observed, plan, failed = decide.down(self.context, self.cluster, images_too=images, state=state)
        if preview:
            preflight.warn_excluded_hosts(self.context, failed)
        return DownPlan(plan.steps, failed=failed)

    def carry_out(self, plan: Plan) -> None:
        """Carry out a plan of this backend. HostError names the hosts that failed, and why."""
        if isinstance(plan, UpPlan) and plan.lab:
            self._bring_up(plan, plan.lab)
        elif isinstance(plan, DownPlan):
            failed = carry_out(plan.steps, self._deployment(), plan.failed)
            self._warn_of_left()
            raise_all(failed)
            self.context.forget_image()
        elif plan.steps:
            deployment = self._deployment()
            carry_out(plan.steps, deployment, self.cluster.failed)
            self.cluster, self._observed, self._early = deployment.cluster, None, None

    def _warn_of_left(self) -> None:
        """Warn of nodes on hosts that did not answer: they may still run."""
        for host in self.cluster.failed:
            nodes = human.listed(node for node, place in self.cluster.placement.items() if place == host)
            self.context.warn(f"{nodes} on {host} may still run: repeat `labctl down` when {host} answers")

    def _deployment(self) -> Any:
        """Return a deployment for steps that need no lab."""
        from labctl.backends.docker.deploy.steps import Deployment

        return Deployment(context=self.context, cluster=self.cluster)

    def _bring_up(self, plan: UpPlan, lab: Lab) -> None:
        """Carry out `up` under the lock for devices; record its image. HostError if in use or a host fails."""
        from labctl.accelerators import leases
        from labctl.backends.docker.deploy.steps import LabDeployment

        with leases.granting(lab, wait=filelock.PATIENCE, notice=self.context.notice):
            leases.require_free(lab)
            # A run may have begun while this waited.
            preflight.require_no_run(self.context, self.cluster.engine, self._seen(), plan.steps)
            changes = len(plan.steps) > 1
            early = None if changes else self._early
            deployment = LabDeployment(context=self.context, cluster=self.cluster, lab=lab, early=early)
            failed = carry_out(plan.steps, deployment, plan.failed)
            self._observed = None if changes else self._observed
            raise_all(failed)
        self._reached = frozenset(node.name for node in lab.nodes)
        self.context.keep_image(self.settings)

    def _seen(self) -> ObservedState:
        """Return the state of the containers, observed now unless it is known."""
        return self._observed or self.cluster.engine.observe(self.settings.text("LAB_NAME"))

    def under_way(self) -> tuple[str, ...]:
        """Describe the runs that are under way in the launcher, or recorded by this machine."""
        return preflight.runs_under_way(self.context, self.cluster.engine, self._seen())

    def require_idle(self) -> None:
        """Raise HostError if a run is under way."""
        preflight.require_idle(self.context, self.cluster.engine, self._seen())

    def fill(self, workload: str, contents: Cache, *, hosts: bool, preview: bool) -> CacheReport:
        """Download models and datasets to this machine's cache, and with ``hosts`` send them on; return a report."""
        from labctl.backends.docker.deploy import cache

        return cache.fill_lab(
            self.context, self.settings, lambda: self.cluster, workload, contents, hosts=hosts, preview=preview
        )

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str] = ()
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script for ``seconds`` on these hosts, or all; return results, of any exit code, and lost hosts."""
        from labctl.backends.docker.deploy import on_hosts

        return on_hosts.run(self.cluster, script, arguments, seconds, hosts)

    def typed(self, host: str, command: str) -> str:
        """Return the command line that a user types here to run a shell command on a host of LAB_HOSTS, or here."""
        from labctl.backends.docker.hosts import ssh_errors

        if host == HERE:
            return command
        listed = read_inventory(self.context.directory, self.settings, drained=True)
        return ssh_errors.typed(next(target for target in listed if target.name == host), command)

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """Describe what hosts still have of the lab and its runs; also return the hosts that do not answer."""
        from labctl.backends.docker.deploy import on_hosts

        return on_hosts.remains(self.cluster)

    def versions(self) -> dict[str, str]:
        """Return the versions of labctl, of the image, and of the engine and kernel of each host."""
        from labctl.backends.docker.deploy import on_hosts

        return on_hosts.versions(self.cluster)

    def freeze(self) -> dict[str, Any]:
        """Describe images, packages, files, data and devices of the lab. HostError if a host does not answer."""
        from labctl.backends.docker.deploy import frozen

        lab = self.lab()
        raise_all(self.cluster.failed)
        return frozen.of(self.context, self.cluster, lab)

    def not_replayable(self, recorded: ReplayedRun) -> Iterator[str]:
        """Yield a line per thing that a run used and that changed or is gone; warn of uncommitted changes."""
        from labctl.backends.docker.deploy import readiness, replayable

        lab = self.lab()
        readiness.require_hosts(lab, recorded.job, self.cluster.failed)
        observed = self.cluster.engine.observe(lab.name, self.cluster.image)
        yield from replayable.missing(self.cluster, lab, observed, recorded)
        for remark in replayable.uncommitted(lab, recorded):
            self.context.warn(remark)

    def remove_keys(self) -> bool:
        """Delete the lab's private ssh keys; return True if it has containers. HostError during a run."""
        from labctl.backends.docker.compose import ssh_keys

        self._observed, self.cluster = preflight.observe(self.context, self.cluster)
        lab = self.lab()
        preflight.require_idle(self.context, self.cluster.engine, self._observed)
        for path in ssh_keys.private(lab):
            path.unlink()
        return bool(self._observed.containers)

    # --- nodes ---

    def exec(self, run: Run, node: str, argv: tuple[str, ...], *, limit: float) -> CompletedProcess:
        """Run a short program in a node as the lab's user; return its output and exit code."""
        from labctl.backends.docker import agent

        container, user = naming.container_name(run.lab, node), agent.user(run.lab, node)
        return self.cluster.engine.exec(container, argv, user=user, limit=limit)

    def attach(
        self, nodes: tuple[str, ...], command: tuple[str, ...], *, stdin: Literal["terminal", "pipe"], prompt: bool
    ) -> int:
        """Run a command in one node, or from the launcher in several, all if none is named; return its exit code."""
        from labctl.backends.docker.attach import target

        return target.attach(self.context, nodes, command, stdin=stdin, prompt=prompt)

    def logs(self, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
        """Pass on the logs of a node, or of all, with ``follow`` until they end. HostError for silent hosts."""
        from labctl.backends.docker.attach import target

        name = self.settings.text("LAB_NAME")
        with target.reached(self.context, name, node) as engine:
            engine.logs(naming.project_name(name), on_line, node=node or "", follow=follow, color=colors)

    # --- runs ---

    def begin(self, workload: Workload, options: RunOptions, now: datetime, replayed: Replay | None = None) -> Run:
        """Build a new run and its job on the lab's nodes; start nothing. ConfigError if inputs are missing here."""
        from labctl.jobs.request import build_job, renamed

        lab = self.lab()
        if replayed:
            return NewRun(lab=lab, job=replayed(now))
        self._warn_of_image(lab)
        job = build_job(lab, workload, options, now, self.context.warn)
        if text := renamed(lab, options):
            self.context.notice(f"{options.hostfile}: {text}")
        return NewRun(
            lab=lab, job=job, rebuild=lambda moved: build_job(moved, workload, options, now, run_id=job.run_id)
        )

    def _warn_of_image(self, lab: Lab) -> None:
        """Warn if LAB_IMAGE is made for another accelerator than that of the nodes."""
        from labctl.backends.docker.deploy import images

        if warning := images.unfit_for(self.settings, lab.accelerator):
            self.context.warn(warning)

    def observe(self, run: Run, *, preview: bool = False) -> Run:
        """Return the run with containers observed and a free port; begin checks. InUse for a replay if others run."""
        from labctl.backends.docker.deploy import provenance, readiness
        from labctl.records.active import in_use

        new = cast("NewRun", run)
        lab, job, engine = new.lab, new.job, self.cluster.engine
        lock = self.context.directory / filelock.LAB
        if not preview and filelock.is_held(lock):
            # Wait, so as not to observe the lab in the middle of a change.
            with filelock.held(lock, "labctl run", wait=filelock.PATIENCE, notice=self.context.notice):
                pass
        # Before anything is observed, as it takes longer than all the rest; in the lab of this directory alone.
        if not preview and (lab.directory / naming.compose_path(lab.nodes[0].name)).exists():
            self._stand_by(new)
        observed = readiness.observe(self.context, self.cluster, preview=preview)
        if observed is None:
            return new
        origin = None if preview else provenance.begin(lab, job, self.cluster, observed)
        foreign = preflight.find_foreign_labs(self.context, lab.name, observed)
        active = readiness.under_way(lab, engine, observed, preview=preview)
        if active and new.rebuild is None and not preview:
            raise in_use(active)
        if active and new.rebuild:
            lab = readiness.with_own_port(lab, active)
            job = new.rebuild(lab)
        return replace(new, lab=lab, job=job, observed=observed, origin=origin, active=active, foreign=foreign)

    def _stand_by(self, run: Run) -> None:
        """Start an agent in the launcher that waits for a run and asks the sshd of its nodes; keep it by run id."""
        from labctl.backends.docker.agent import Standby

        nodes = tuple(node.name for node in run.job.nodes)
        standby = Standby(run.lab, self.cluster.engine, run.run_id, nodes)
        self._held.callback(standby.close)
        self._standbys[run.run_id] = standby

    def needs_up(self, run: Run) -> bool:
        """Tell if the run's workload has its own image and the lab is not up with it."""
        from labctl.backends.docker.deploy import readiness

        new = cast("NewRun", run)
        own_image = new.observed and new.job.workload.has_own_image
        return bool(own_image and readiness.not_up(new.lab, new.job.containers, cast("ObservedState", new.observed)))

    def require_ready(self, run: Run, options: RunOptions, *, preview: bool = False) -> None:
        """Raise HostError or ConfigError if hosts, lab or inputs are not ready or nodes in use; note busy hosts.

        A preview only warns of a lab that is not up, and notes nodes in use.
        """
        from labctl.backends.docker.checks import run as checks
        from labctl.backends.docker.deploy import readiness

        new = cast("NewRun", run)
        observed, launcher = new.observed, bool(options.launcher)
        readiness.require_hosts(new.lab, new.job, {**self.cluster.failed, **new.foreign})
        checks.preflight(self.context, new.lab, self.cluster, "run")
        readiness.require_ready(
            self.context, self.cluster, new.lab, new.job, observed, launcher=launcher, preview=preview
        )
        if preview:
            readiness.note_users(self.context, new.job, new.active)
        else:
            readiness.require_free(new.job, new.active, options)
            preflight.note_busy_hosts(self.context, self.cluster)

    def confirm_image(self, run: Run, ask: Callable[[str], bool] | None, *, preview: bool = False) -> None:
        """Ask if a workload's image may be built and the lab brought up with it. HostError if refused."""
        from labctl.backends.docker.deploy import images

        new = cast("NewRun", run)
        image_id = new.observed.on(new.lab.hosts[0].name).image if new.observed else None
        images.confirm_image(new.job.workload, new.lab.image, bool(image_id), ask, dry_run=preview)

    def require_launcher(self, workload: Workload) -> None:
        """Raise HostError unless the launcher is up with the settings and the workload's image."""
        from labctl.backends.docker.deploy import readiness

        readiness.require_launcher(self.context, self.cluster, self.lab(), workload)

    def plan_run(self, run: Run, *, ended: Collection[str] = (), preview: bool = False) -> RunPlan:
        """Plan a run that is ready: check its nodes, record it, send hosts its files, launch it, collect results."""
        from labctl.backends.docker.deploy import artifacts, provenance, readiness
        from labctl.backends.docker.deploy.steps import CheckNodes, PushRun
        from labctl.jobs import inputs

        new = cast("NewRun", run)
        lab, job, cause = new.lab, new.job, f"run {new.run_id}"
        # Until they are ended, earlier runs may have the port.
        if preview and new.observed and not ended:
            readiness.require_port(lab, job, self.cluster.engine, self.cluster.facts)
        nodes = tuple(node.name for node in job.nodes)
        hosts = tuple(host.name for host in artifacts.hosts_apart(lab, job))
        earlier = inputs.earlier(lab, job.workload)
        push = PushRun(run=new, reads=earlier, hosts=hosts, cause=cause)
        elsewhere = f", and fetch it from {', '.join(hosts)}" if hosts else ""
        return RunPlan(
            before=(CheckNodes(nodes=nodes, seconds=15, job=job, cause="a run needs every node"),),
            record=(
                *store.record(lab, self.settings, job, {} if preview else self._versions(new), preview=preview),
                *provenance.rendered(lab, job, preview=preview),
            ),
            send=(push,) if hosts else (),
            launch=_launch_text(job),
            collect=f"move {naming.OUTPUTS}/{job.run_id} to runs{elsewhere}",
        )

    def _versions(self, new: NewRun) -> dict[str, Any]:
        """Return the versions for a run's record; wait for the facts that are gathered in the background."""
        first = new.lab.hosts[0].name
        image_id = new.observed.on(first).image if new.observed else None
        engine = self.cluster.engine.capabilities(first).versions()
        return {**store.versions(new.lab, engine, image_id), **(new.origin.result() if new.origin else {})}

    def carry_out_steps(self, run: Run, steps: tuple[Step, ...], *, before: int, after: int) -> None:
        """Carry out some of a run's steps, numbered by ``before`` and ``after``. HostError if one fails."""
        from labctl.backends.docker.deploy.steps import LabDeployment

        early = self._standbys.get(run.run_id)
        deployment = LabDeployment(
            context=self.context, cluster=self.cluster, lab=run.lab, early=early, pushed=self._pushed
        )
        raise_all(carry_out(steps, deployment, before=before, after=after))

    def start(self, run: Run, options: RunOptions) -> None:
        """Have the agent in the launcher launch a run that is not followed. LaunchError if it does not begin."""
        from labctl.backends.docker import agent

        standby = self._standbys.pop(run.run_id, None)
        agent.launch_run(run.lab, self.cluster.engine, agent.Follower(len), self._launch(run, options), standby)

    def _launch(self, run: Run, options: RunOptions) -> Any:
        """Return the Launch of a run for the agent, with LAB_RUN_PATIENCE, LAB_STALL_SECONDS and the options."""
        from labctl.backends.docker.supervise import launch_of

        patience = 0 if options.detach else self.settings.number("LAB_RUN_PATIENCE")
        return launch_of(
            run.lab,
            run.job,
            patience=patience,
            stall=self.settings.number("LAB_STALL_SECONDS"),
            pace=pace.earlier(self.context.directory, run.job),
            detach=options.detach,
            wait=options.wait,
        )

    def supervise(
        self,
        run: Run,
        keep: Callable[[Sequence[Line]], Sequence[Line]],
        options: RunOptions | None = None,
        *,
        age: float = 0,
    ) -> RunOutcome:
        """Launch a run, or without ``options`` follow one begun before, to its end; ``keep`` records its lines."""
        from labctl.backends.docker.supervise import supervise

        return supervise(
            run.lab,
            run.job,
            self.cluster.engine,
            keep,
            self._launch(run, options) if options else None,
            standby=self._standbys.get(run.run_id),
            losses=self._losses,
            age=age,
            notice=self.context.notice,
        )

    def output(self, run: Run, on_lines: OnLines, given_up: Callable[[], bool] = bool) -> None:
        """Pass on a run's lines from the first until it ends or is ``given_up``, over successive connections."""
        from labctl.backends.docker import agent

        follower = agent.Follower(on_lines, self.context.notice, given_up)
        agent.follow(run.lab, self.cluster.engine, run.run_id, follower)

    def log(self, run_id: str, on_lines: OnLines) -> bool:  # noqa: ARG002
        """Return False: the follower of a run keeps its lines in the record."""
        return False

    def recorded(self, run_id: str) -> Run:
        """Load a run of the record, with the present lab."""
        return Run(lab=self.lab(), job=store.load_job(self.context.directory, run_id))

    def active(self) -> Mapping[str, ActiveRun]:
        """Return the runs that the launcher's agent reports; without an answer, runs without a result as unknown."""
        from labctl.backends.docker import agent

        with suppress(HostError):
            observed = self.cluster.engine.observe(self.settings.text("LAB_NAME"))
            if observed.container(LAUNCHER) or not (observed.silent or self.cluster.failed):
                return agent.runs(self.cluster.engine, observed)
        return store.unknown(self.context.directory)

    @contextmanager
    def sharing_losses(self) -> Iterator[None]:
        """Share one subscription to lost nodes among all runs in the block; on several hosts each run has its own.

        After a host was lost and is back, only the next run's subscription includes it.
        """
        from labctl.backends.docker.events import Losses

        lab = self.lab()
        self._losses = Losses(self.cluster.engine, lab.name) if len(lab.hosts) == 1 else None
        try:
            yield
        finally:
            self._losses = None

    def stop(self, run: Run, grace: float, message: str) -> None:
        """Have the agent end a run: TERM, and KILL after ``grace`` seconds. HostError if it is not running."""
        from labctl.backends.docker import agent

        agent.stop(run.lab, self.cluster.engine, run.run_id, grace, message)

    def look(self, run: Run) -> Hang:
        """Have the agent in the launcher tell what the ranks of a run wait for. HostError if it is not running."""
        from labctl.backends.docker import agent

        return agent.look_at_ranks(run.lab, self.cluster.engine, run.run_id)

    def leaves_processes(self, run_id: str) -> bool:
        """Return True if a run was on Docker hosts; a Kubernetes cluster ends its processes itself."""
        return store.backend(self.context.directory, run_id) == self.name

    def end(self, run_id: str) -> None:
        """Kill the processes of a run whose agent is gone, in the launcher and its nodes; ignore survivors."""
        from labctl.backends.docker import agent

        lab, path = self.lab(), store.directory(self.context.directory, run_id)
        job = store.job(path)
        nodes = tuple(node.name for node in job.nodes if node.name in lab.containers)
        engine, age = self.cluster.engine, store.age(path)
        agent.reap(lab, engine, run_id, 0, nodes=nodes, lasted=age, launcher=job.launcher)

    def collect(self, run_id: str) -> None:
        """Move results that ranks wrote on this machine into the run's record, and fetch those on hosts."""
        from labctl.backends.docker.deploy import artifacts

        pushed = self._pushed.pop(run_id, None)
        artifacts.collect(self.lab(), run_id, self.cluster.engine, self.context.warn, pushed)

    def evidence(self, run: Run, since: float) -> dict[str, str]:
        """Return messages and events of each host and its engine since a time."""
        from labctl.backends.docker.deploy import evidence

        return evidence.of_hosts(run.lab, self.cluster.engine, since)

    def forget(self, run: Run) -> None:
        """Have the agent remove its data of a run that has ended."""
        from labctl.backends.docker import agent

        standby = self._standbys.pop(run.run_id, None)
        if not standby or not standby.forget():
            agent.forget(run.lab, self.cluster.engine, run.run_id)

    def without_lost(self, options: RunOptions, ended: Result, error: HostError) -> RunOptions:
        """Return the options without nodes that are not up again; raise ``error`` if that does not help."""
        from labctl.backends.docker.deploy import readiness

        return readiness.without_lost(self.context, self.cluster, options, ended, error)


def _launch_text(job: Job) -> str:
    """Return the plan's line for the launch: the time limit, the launcher's command, and the workload's own."""
    import shlex

    started = shlex.join((*job.workload.called, *job.workload.arguments))
    return f"in launcher, at most {human.duration(job.timeout)}: {shlex.join(job.argv)}, which starts {started}"

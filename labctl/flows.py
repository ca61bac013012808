"""Commands, each in a handful of lines: connect, one or two calls, answer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl.backends.finding import Receiver, ignore
from labctl.config.context import Context, is_named
from labctl.errors import ConfigError
from labctl.runs import opening
from labctl.runs.opening import (
    connected,
    docker,
    initialised_settings,
    named_settings,
    of_batch,
    of_run,
    settings_for,
    to_bring_up,
    to_remove,
    to_replay,
    to_run,
)

if TYPE_CHECKING:
    from labctl.backends.devices import DeviceReport
    from labctl.backends.docker.compose.devcontainer import DevcontainerFile
    from labctl.backends.docker.compose.render import RenderedFiles
    from labctl.backends.docker.lab.devices import EffectiveSettings
    from labctl.backends.docker.lab.labs import OwnLab
    from labctl.backends.kubernetes.importing import ImportedJob
    from labctl.backends.kubernetes.lab import Submitted
    from labctl.backends.kubernetes.render import Kustomized, Manifests
    from labctl.backends.plan import PlanPreview
    from labctl.backends.status import LabStatus
    from labctl.batches.baseline import BaselineReport, ValidationReport
    from labctl.batches.batch import BatchReport
    from labctl.batches.evaluate import Evaluation, Limits
    from labctl.batches.hostfiles import HostfileSet, Pattern
    from labctl.batches.record import Batch
    from labctl.batches.search import BisectReport
    from labctl.bundle.load import LoadedBundle
    from labctl.bundle.save import SavedBundle
    from labctl.config.scaffold import InitializedLab
    from labctl.doctor.report import DoctorReport
    from labctl.fit import FitReport
    from labctl.hub.report import CacheReport
    from labctl.jobs.request import RunOptions
    from labctl.model import Cache, Hang, Result
    from labctl.records.note import RunNote
    from labctl.records.store import RunFilter, RunList, RunSummary, ShownRun
    from labctl.reports.runs import WrittenReport
    from labctl.runs.compare import Comparison
    from labctl.runs.export import ExportedRun, Formats
    from labctl.runs.fitting import Hardware
    from labctl.runs.freeze import FrozenLab, Verification
    from labctl.runs.health import HealthReport
    from labctl.runs.labs import LabNow
    from labctl.runs.prune import PrunedRuns
    from labctl.runs.spread import RepeatedRuns
    from labctl.runs.start import Ask
    from labctl.runs.top import RunView
    from labctl.system.setup.install import SetupResult
    from labctl.workloads.external import WorkloadList


# --- the lab -------------------------------------------------------------------------------------------------


def init(directory: Path) -> InitializedLab:
    """Create a lab directory with .env, hosts.txt, hostfiles and workloads if missing; return the names written."""
    from labctl.config import scaffold

    return scaffold.InitializedLab(str(directory), scaffold.initialise(directory))


def setup(emit: Callable[[str], None], ask: Ask | None, *, yes: bool) -> SetupResult:
    """Install and start Docker on this host, asked first unless ``yes``. HostError if refused or failed."""
    from labctl.system.setup import install

    return install.SetupResult(install.setup(yes=yes, ask=ask, emit=emit))


def doctor(context: Context, *, node: str = "", receive: Receiver = ignore) -> DoctorReport:
    """Return doctor's findings on hosts, engine and lab, or with ``node`` on that node and its host only.

    Without a lab they are on this machine. ``receive`` gets the findings of each check when it has ended.
    """
    from labctl import backends
    from labctl.doctor.report import DoctorReport

    declared = context.settings()
    if not node and not is_named(context, declared) and declared.text("LAB_ENGINE") == "docker":
        from labctl.backends.docker.checks import run

        return DoctorReport(run.of_machine(context, receive))
    settings = named_settings(context, quiet=True)
    if node:
        backends.require(settings, "doctor --node")
    with backends.connect(context, settings, demand=False) as backend:
        return DoctorReport(backend.findings(node, receive), lab=settings.text("LAB_NAME"))


def fix(context: Context, ask: Ask | None, *, node: str = "") -> DoctorReport:
    """Apply fixes to labctl's own resources, asking for each if ``ask`` is given; return the findings after them."""
    from labctl import backends
    from labctl.doctor import fix as fixes

    settings = named_settings(context, quiet=True)
    backends.require(settings, "doctor --fix")
    with backends.connect(context, settings, demand=False) as backend:
        return fixes.apply(backend, ask, node=node)


def devices(context: Context) -> DeviceReport:
    """Return the devices of each host; the lab need not be up."""
    from labctl import backends

    with backends.connect(context, named_settings(context, quiet=True)) as backend:
        return backend.devices()


def config(context: Context) -> EffectiveSettings:
    """Return the effective settings with their origins, and what they resolve to on the hosts."""
    from labctl.backends.docker.lab import devices

    return devices.effective_settings(context)


def render_files(context: Context) -> RenderedFiles:
    """Write compose files, ssh configuration and secrets of every node; return which changed; start nothing."""
    from labctl.backends.docker.deploy import files

    with docker(context, "render") as backend:
        return files.render_all(context, backend.cluster)


def devcontainer(context: Context, program: str, *, force: bool = False) -> DevcontainerFile:
    """Write the lab's devcontainer.json for VS Code; return its path. ConfigError if edited, unless ``force``."""
    from labctl import backends
    from labctl.backends.docker.compose import devcontainer as devcontainers

    settings = initialised_settings(context)
    backends.require(settings, "devcontainer")
    return devcontainers.write(context.directory, settings, program, force=force)


def build(
    context: Context, *, workload: str = "", base: str = "", update_lock: bool = False, sbom: Path | None = None
) -> dict[str, Any]:
    """Build the nodes' image, a workload's or one on ``base``, or only update its pins; return the build's facts.

    ``base``: anyone's image, to which only what a node needs is added.
    ``sbom``: a file to write the software bill of materials of the image to.
    """
    from labctl.backends.docker.deploy import images

    images.require_directory(sbom)
    # Also while the lab is up for a workload, whose image is built by that workload's name.
    settings = settings_for(context, workload) if workload else context.declared()
    with docker(context, "build", settings) as backend:
        if base:
            built = images.build_from(context, backend.cluster, base)
        else:
            built = images.build_image(context, backend.cluster, update_lock=update_lock, refresh=True)
        return images.with_sbom(built, sbom)


def up(context: Context, *, workload: str = "") -> LabStatus:
    """Bring the lab up and return its status once the launcher reaches every worker. HostError if a host fails.

    With a workload, the nodes get the image that it needs. A host that fails is named once the others are done.
    """
    from labctl.runs import labs

    with to_bring_up(context, workload) as backend:
        return labs.bring_up(backend)


def plan_up(context: Context, *, workload: str = "") -> PlanPreview:
    """Return the plan of `up`; change nothing."""
    from labctl.backends.plan import preview
    from labctl.runs import labs

    with to_bring_up(context, workload) as backend:
        return preview(backend.settings.text("LAB_NAME"), *labs.preview_up(backend))


def rotate_keys(context: Context) -> LabStatus:
    """Delete the lab's ssh keys; if it had containers, bring it up with new ones; return its status."""
    from labctl.runs import labs

    with docker(context, "keys rotate", initialised_settings(context)) as backend:
        with labs.changing(context, "labctl keys rotate"):
            has_containers = backend.remove_keys()
        return labs.bring_up(backend) if has_containers else labs.status(backend)


def status(context: Context) -> LabStatus:
    """Return the status of the lab's nodes and latest runs, with the hosts that do not answer."""
    from labctl import backends
    from labctl.runs import labs

    with backends.connect(context, named_settings(context), demand=False) as backend:
        return labs.status(backend)


def look(context: Context) -> LabNow:
    """Return the lab's status, with samples of nodes and hangs of the runs under way; nothing is judged."""
    from labctl import backends
    from labctl.runs import labs

    with backends.connect(context, named_settings(context), demand=False) as backend:
        return labs.look(backend)


def own_labs() -> tuple[OwnLab, ...]:
    """Return the caller's labs that have containers on this machine, of whatever directory."""
    from labctl.backends.docker.lab import labs

    return labs.own_labs()


def health(
    context: Context, nodes: tuple[str, ...] = (), *, since: float | None = None, prometheus: Path | None = None
) -> HealthReport:
    """Examine the hosts of nodes, or all, and return the verdicts; write them as metrics to ``prometheus`` too.

    Kernel lines of the last ``since`` seconds count; None: those since a host's last good verdict.
    """
    from labctl.reports import prometheus as metrics
    from labctl.runs import health as examination

    if prometheus:
        metrics.require_writable(prometheus)
    with connected(context, "health", demand=False) as backend:
        report = examination.report(backend, nodes, since=since)
    if prometheus:
        metrics.write(prometheus, context.directory, report.hosts)
    return report


def ticket(context: Context, node: str, *, since: float | None = None) -> str:
    """Examine the host of a node, and return a text about it for whoever repairs it."""
    from labctl.runs import ticket as tickets

    (verdict,) = health(context, (node,), since=since).hosts
    return tickets.of(context.directory, verdict)


def down(context: Context, *, images: bool = False, ask: Ask | None = None) -> PlanPreview:
    """End the lab's runs, remove its containers, network and, with ``images``, its image; return the plan.

    With ``images``, hosts lose the lab's image too. ``ask`` confirms that runs under way are ended.
    """
    from labctl.runs import labs

    with to_remove(context, images=images) as backend:
        return labs.take_down(backend, "labctl down", images=images, ask=ask)


def plan_down(context: Context, *, images: bool = False) -> PlanPreview:
    """Return the plan of `down`, and warn of running runs, without changing anything."""
    from labctl.runs import labs

    with to_remove(context, images=images) as backend:
        return labs.preview_down(backend, images=images)


def clean(context: Context, *, ask: Ask | None = None) -> PlanPreview:
    """End the lab's runs, remove containers, network, keys and rendered files; keep run records; return the plan.

    ``ask`` confirms that runs under way are ended.
    """
    from labctl.runs import labs

    with docker(context, "clean", named_settings(context), drained=True) as backend:
        return labs.take_down(backend, "labctl clean", state=labs.STATE, ask=ask)


def plan_clean(context: Context) -> PlanPreview:
    """Return the plan of `clean`, and warn of running runs, without changing anything."""
    from labctl.runs import labs

    with docker(context, "clean", named_settings(context), drained=True) as backend:
        return labs.preview_down(backend, state=labs.STATE)


# --- runs ----------------------------------------------------------------------------------------------------


def run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> Result:
    """Run a workload or script to its end and judge it; repeat while a retry is due; return the last result.

    With ``options.resume`` it goes on from the last whole checkpoint of an earlier run. A run that fails is started
    again where that may help, up to ``options.retries`` times. ``ask`` confirms that the image that the workload needs
    is built and the lab brought up with it.
    """
    from labctl.runs import attempts, start

    with to_run(context, name, options, ask) as (backend, request):
        result = start.run(backend, request)
    while attempts.is_due(result, request.options):
        with to_run(context, request.name, request.options, ask, again=True) as (backend, asked):
            request, result = start.run_again(backend, asked, result)
    attempts.tell_why_not(context, result, request.options)
    return result


def launch(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> RunSummary:
    """Launch a run without following it, and return its summary. HostError if its workload does not fit."""
    from labctl.runs import start

    with to_run(context, name, options, ask) as (backend, request):
        return start.launch(backend, request)


def plan_run(context: Context, name: str, options: RunOptions, ask: Ask | None = None) -> PlanPreview:
    """Return the plan of `run` without changing anything."""
    from labctl.runs import start

    with to_run(context, name, options, ask) as (backend, request):
        return start.preview_run(backend, request)


def repeat(context: Context, name: str, options: RunOptions, count: int, ask: Ask | None = None) -> RepeatedRuns:
    """Run a workload ``count`` times, or to an interrupted run; return the spread. ConfigError with --resume."""
    from labctl.runs import compare
    from labctl.runs.spread import repeated

    if options.detach or options.resume:
        raise ConfigError(
            "--repeat runs one after the other, each from its beginning", hint="leave out --detach and --resume"
        )
    results: list[Result] = []
    while len(results) < count and not (results and results[-1].cause == "interrupted"):
        context.notice(f"repeat {len(results) + 1} of {count}")
        results.append(run(context, name, options, ask))
    return repeated(results, compare.read(context.directory, results[-1]).again)


def replay(context: Context, run: str) -> Result:
    """Repeat a recorded run, follow and judge it; return the result. HostError if something it used has changed."""
    from labctl.runs import start

    with to_replay(context, run) as (backend, request):
        return start.run(backend, request)


def plan_replay(context: Context, run: str) -> PlanPreview:
    """Return the plan of `replay` without changing anything."""
    from labctl.runs import start

    with to_replay(context, run) as (backend, request):
        return start.preview_run(backend, request)


def runs(context: Context, matching: RunFilter | None = None) -> RunList:
    """List the lab's runs that match, latest first; judge those that have ended; note an unknown workload."""
    from labctl.records.store import RunList

    every = opening.listing(context)
    workloads = sorted({run.workload or "" for run in every} - {""})
    if matching and matching.workload and workloads and matching.workload not in workloads:
        context.notice(f"no run of {matching.workload}; there are runs of {', '.join(workloads)}")
    return RunList(tuple(run for run in every if matching is None or matching.has(run)), len(every))


def prune_runs(context: Context, keep: int) -> PrunedRuns:
    """Delete the records of the oldest ended runs but ``keep``; return their ids."""
    from labctl.runs import prune

    chosen = plan_prune(context, keep)
    for run_id in chosen.removed:
        prune.remove(context.directory, run_id)
        context.notice(f"removed run {run_id}")
    return chosen


def plan_prune(context: Context, keep: int) -> PrunedRuns:
    """Return the ids of the records that `runs prune` would delete, without deleting any."""
    from labctl.runs import prune

    named_settings(context)
    return prune.choose(context.directory, keep)


def show(context: Context, run: str) -> ShownRun:
    """Return a run, by id or ``latest``, with its result if any; judge it first if it has ended."""
    return opening.show(context, run)


def note(context: Context, run: str, text: str | None = None) -> RunNote:
    """Return the note on a run; with a text keep that instead, secrets redacted; an empty one removes it."""
    from labctl.backends import spec
    from labctl.records import note as notes
    from labctl.records import store

    settings = named_settings(context)
    run_id = store.find(context.directory, run)
    record = store.directory(context.directory, run_id)
    before = notes.read(record)
    if text is None:
        return notes.RunNote(run_id, before)
    kept = notes.write(record, store.redact(text, spec.hidden(settings)))
    return notes.RunNote(run_id, kept, replaced=before)


def compare(context: Context, runs: Iterable[str], metrics: Collection[str] = ()) -> Comparison:
    """Compare ended runs: differing settings and metrics, all or these. ConfigError for fewer than two."""
    from labctl.runs import compare as comparing

    recorded = opening.records(context, runs)
    if len(recorded) < 2:
        raise ConfigError("name two runs or more to compare", hint="labctl runs")
    return comparing.compare(recorded, metrics)


def report(context: Context, named: Sequence[str], out: Path | None = None) -> WrittenReport:
    """Write an HTML page and pictures of ended runs, or of a script's metrics.csv; return their paths."""
    from labctl.reports import runs as reports

    if len(named) == 1 and named[0].endswith(".csv"):
        return reports.write_csv(Path(named[0]), out or context.directory / "reports" / Path(named[0]).stem)
    runs = opening.records(context, named)
    directory = (out or reports.directory_of(context.directory, runs)).absolute()
    return reports.write(directory, reports.of_runs(context.directory, runs, directory))


def export(context: Context, run: str, formats: Formats) -> ExportedRun:
    """Write an ended run in some formats. ConfigError for none of them; warn of what MLflow did not get."""
    from labctl.runs import export as exports

    if formats == exports.Formats():
        hint = "labctl export latest --csv run.csv; or --tensorboard, --junit, --mlflow"
        raise ConfigError("no format is given", hint=hint)
    (result,) = opening.results(context, (run,))
    exported = exports.write(context.directory, result, formats, context.environ)
    for reason in exported.mlflow.left_out if exported.mlflow else ():
        context.warn(f"not logged to MLflow: {reason}")
    return exported


def attach(context: Context, run: str) -> Result:
    """Print a run's past and coming output to its end, judge it if no other labctl does; return the result."""
    from labctl.runs import judge

    with of_run(context, run) as (backend, run_id):
        return judge.attach(backend, run_id)


def named_run(context: Context, run: str) -> RunSummary:
    """Return the recorded run that an id, ``latest`` or ``-1`` names, with its nodes; nothing is judged."""
    return opening.named_run(context, run)


def stop(context: Context, run: str, grace: float) -> Result:
    """End a run, with SIGKILL ``grace`` seconds after SIGTERM, judge it and return the result."""
    from labctl.runs import judge

    with of_run(context, run) as (backend, run_id):
        return judge.stop(backend, run_id, grace)


def stacks(context: Context, run: str) -> Hang:
    """Tell what each rank of a running run waits for; nodes write stacks of processes to the run's stacks/."""
    from labctl.runs import judge

    with of_run(context, run) as (backend, run_id):
        return judge.look(backend, run_id)


def run_logs(
    context: Context,
    run: str,
    on_line: Callable[[str], None],
    *,
    follow: bool,
    rank: int | None = None,
    timestamps: bool = False,
) -> None:
    """Pass a run's output, or one rank's, to ``on_line``; with ``follow`` also new lines until it ends."""
    from labctl.runs import judge

    with of_run(context, run) as (backend, run_id):
        judge.logs(backend, run_id, on_line, follow=follow, rank=rank, timestamps=timestamps)


def top(context: Context, run: str = "", show: Callable[[RunView], bool] | None = None) -> RunView:
    """Return a view of a running run (default: latest); with ``show``, pass one a second to it until either ends."""
    from labctl.runs import top as runs_top

    with connected(context, "top") as backend:
        observer = runs_top.Observer(backend, runs_top.under_way(backend, run))
        return observer.watch(show) if show else observer.look()


def freeze(context: Context, file: Path) -> FrozenLab:
    """Write the lab's facts (images, packages, files, devices) to a file. HostError if a host does not answer."""
    from labctl.runs import freeze as freezing

    with connected(context, "freeze") as backend:
        return freezing.freeze(backend, file)


def verify(context: Context, file: Path) -> Verification:
    """Compare the lab with a lock file; return facts that differ. ConfigError if `freeze` did not write it."""
    from labctl.runs import freeze as freezing

    before = freezing.read(file)
    with connected(context, "verify") as backend:
        return freezing.verify(backend, str(file), before)


# --- batches -------------------------------------------------------------------------------------------------


def hostfiles(
    context: Context, file: Path | None, *, size: int, pattern: Pattern, slots: int, out: Path | None, seed: int
) -> HostfileSet:
    """Write hostfiles with ``size`` machines each of those in a file, or of the lab's nodes; return the set.

    ``slots`` are those of each machine; 0 for those of the file or the lab, and 8 if neither has any.
    """
    from labctl.batches import hostfiles as sets

    return sets.make(context, file, size=size, pattern=pattern, slots=slots, out=out, seed=seed)


def batch(
    context: Context,
    name: str,
    directories: tuple[Path, ...],
    options: RunOptions,
    show: Callable[[Batch], None],
    **how: Any,
) -> BatchReport:
    """Run a workload on the nodes of each hostfile of directories, disjoint ones at once; return the report.

    ``show`` gets the batch with each change of a job; ``how``: ``out``, ``parallel``, ``repeat`` and ``resume``.
    """
    from labctl.batches import batch as batches

    with of_batch(context, "batch", name, options) as (backend, workload):
        return batches.run(backend, name, workload, directories, options, show, **how)


def bisect(context: Context, name: str, options: RunOptions, show: Callable[[Batch], None], **how: Any) -> BisectReport:
    """Find bad nodes and links by rounds of runs of a workload on groups of nodes; return the report.

    ``how``: ``nodes`` (default: all), ``within`` and ``minimum``, which say what is slow, ``out`` and ``drain``.
    """
    from labctl.batches import search

    with of_batch(context, "bisect", name, options) as (backend, workload):
        return search.bisect(backend, name, workload, options, show, **how)


def evaluate(directories: Iterable[Path], limits: Limits, **files: Any) -> Evaluation:
    """Judge the logs or batches of directories together; write the files named in ``files``; return the result."""
    from labctl.batches import export

    return export.evaluate(directories, limits, **files)


def validate(
    context: Context, name: str = "", *, keep: bool = False, out: Path | None = None, compare: bool = True
) -> ValidationReport:
    """Bring the lab up, run a profile's checks, write a report and take it down unless ``keep``; return the report.

    Without a name it is that of the operator's TEST_CONFIGURATION, else ``quick``. Figures are compared with the lab's
    baseline, if there is one, unless ``compare`` is False.
    """
    from labctl.batches import validation

    return validation.run(context, name, keep=keep, out=out, compare=compare)


def baseline(context: Context, name: str = "", *, keep: bool = False, file: Path | None = None) -> BaselineReport:
    """Validate, and write figures to a file (default baseline.json) only if it passed; return the report."""
    from labctl.batches import baseline as baselines

    file = file or context.directory / baselines.FILE
    before = baselines.read(file)
    return baselines.record(file, validate(context, name, keep=keep, compare=False), before)


# --- nodes ---------------------------------------------------------------------------------------------------


def shell(context: Context, node: str, *, terminal: bool) -> int:
    """Open an interactive bash in a node, in the current directory if it is mounted there; return its exit code."""
    with connected(context) as backend:
        return backend.attach((node,), ("bash",), stdin="terminal" if terminal else "pipe", prompt=True)


def execute(context: Context, command: tuple[str, ...], node: str, *, everywhere: bool, terminal: bool) -> int:
    """Run a command in a node, several (``a,b``) or all workers; return its exit code. ConfigError for both."""
    from labctl.model import LAUNCHER

    if everywhere and node != LAUNCHER:
        raise ConfigError("use either --all or -n", hint=f"labctl exec --all -- {shlex.join(command)}")
    nodes = () if everywhere else tuple(node.split(","))
    with connected(context) as backend:
        return backend.attach(nodes, command, stdin="terminal" if terminal else "pipe", prompt=False)


def jupyter(context: Context, node: str, port: int | None, emit_url: Callable[[str], None]) -> None:
    """Serve Jupyter from a node on 127.0.0.1 until Ctrl-C; pass its URL to ``emit_url``."""
    from labctl import backends
    from labctl.backends.docker.attach import jupyter

    settings = named_settings(context)
    backends.require(settings, "jupyter")
    jupyter.run(context, settings, node, port, emit_url)


def logs(context: Context, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
    """Pass a node's container log, or all nodes', to ``on_line``; with ``follow`` also new lines until it ends."""
    with connected(context) as backend:
        backend.logs(node, on_line, follow=follow, colors=colors)


# --- workloads, images, clusters -----------------------------------------------------------------------------


def workloads(context: Context) -> WorkloadList:
    """Return the lab's workloads, and the errors of those that cannot be read."""
    from labctl import launchers
    from labctl.workloads import external

    roots = external.roots(context.settings())
    return external.list_all(context.directory / "workloads", launchers.accepted(), roots)


def fit(context: Context, name: str, options: RunOptions, asked: Hardware) -> FitReport:
    """Estimate the memory of a run on the lab or on the hardware asked for; return whether it fits and what would."""
    from labctl.jobs.request import choose_workload
    from labctl.runs import fitting

    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    with connected(context, "fit", settings) as backend:
        lab = backend.lab()
        own = lab.accelerator != "cpu" and not (asked.device_memory or asked.is_elsewhere)
        devices = backend.devices() if own else None
    return fitting.how_it_fits(lab, workload, settings.number("LAB_MEMORY"), asked, devices)


def cache(context: Context, name: str, extra: Cache, *, hosts: bool = False, dry_run: bool = False) -> CacheReport:
    """Download models and datasets of a workload and ``extra`` into the cache; with ``hosts`` copy them to hosts.

    ``hosts``: then send them to the lab's hosts, or all of the cache if nothing is named.
    Needs no lab that is up, no engine or device.
    """
    from labctl import backends
    from labctl.hub import repositories

    settings = context.settings()
    if hosts:
        backends.require(settings, "cache --hosts")
    contents = repositories.of(context, settings, name, extra)
    with backends.connect(context, settings) as backend:
        return backend.fill(name, contents, hosts=hosts, preview=dry_run)


def proxies(context: Context) -> dict[str, str]:
    """Return the proxy variables of the settings, with passwords in clear text."""
    from labctl.backends import spec

    return {key: value.reveal() for key, value in spec.proxies(context.settings())}


def save_bundle(context: Context, file: Path, *, workloads: Iterable[str], cache: bool, secrets: bool) -> SavedBundle:
    """Write the lab and its image to a file, with images of workloads, cache and secrets if asked."""
    from labctl import backends
    from labctl.bundle import save

    backends.require(context.settings(), "bundle save")
    return save.save_bundle(context, file, workloads=workloads, cache=cache, secrets=secrets)


def load_bundle(context: Context, file: Path, *, force: bool, ask: Callable[[str], bool] | None) -> LoadedBundle:
    """Unpack a bundle into the context's directory, load its images; ``ask`` confirms files that could be run."""
    from labctl.bundle import load

    return load.load_bundle(context, file, force=force, ask=ask)


def k8s_render(context: Context, name: str, options: RunOptions) -> Manifests:
    """Return the Kubernetes manifests of a workload's job; create nothing, but warn if a Secret is among them."""
    from labctl.backends.kubernetes import job, render

    made = render.rendered(*job.of_workload(context, name, options))
    if f"Secret/{made.name}" in made.objects:
        context.warn("its Secret is in clear text: keep it out of git, or use `labctl k8s export`, which leaves it out")
    return made


def k8s_export(context: Context, name: str, options: RunOptions, directory: Path) -> Kustomized:
    """Write a workload's Kubernetes manifests for kustomize into a directory, without its Secret."""
    from labctl.backends.kubernetes import job, render

    return render.export(*job.of_workload(context, name, options), directory)


def k8s_submit(context: Context, name: str, options: RunOptions) -> Submitted:
    """Create a workload's Kubernetes job, neither followed nor recorded. ConfigError if it exists already."""
    from labctl.backends.kubernetes import lab
    from labctl.jobs.request import choose_workload

    settings = initialised_settings(context)
    cluster = lab.open_lab(context, settings)
    return lab.submit_by_hand(cluster, choose_workload(context.directory, name, options, settings), options)


def k8s_delete(context: Context, name: str, *, storage: bool) -> Submitted:
    """Delete the job that `k8s submit` created for a workload, and with ``storage`` the lab's volume claim."""
    from labctl.backends.kubernetes import lab

    return lab.delete(lab.open_lab(context, initialised_settings(context)), name, storage=storage)


def k8s_import(context: Context, file: Path) -> ImportedJob:
    """Write an MPIJob as a workload of the lab; return its files and .env settings. ConfigError if it exists."""
    from labctl.backends.kubernetes import importing

    initialised_settings(context)
    return importing.write(context.directory, importing.read(file))

"""Requirements on Docker hosts before a run begins."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from labctl import accelerators, launchers, model, naming
from labctl.backends.docker import agent
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import applied, drift, images, plan, preflight
from labctl.backends.docker.engine import Engine, connection_to
from labctl.backends.docker.hosts import facts as survey
from labctl.backends.docker.images import catalog
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.state import Container, ObservedState, lost, resume
from labctl.config.context import Context
from labctl.config.settings import sounds_secret
from labctl.errors import ConfigError, HostError
from labctl.jobs import inputs
from labctl.jobs.request import RunOptions, without
from labctl.model import Job, Lab, Result, Workload
from labctl.records import store
from labctl.records.active import ActiveRun, in_use, in_use_text
from labctl.records.left import out_of_reach
from labctl.system import hostdump, routing


def not_up(lab: Lab, containers: tuple[str, ...], observed: ObservedState) -> list[tuple[str, str]]:
    """Return the containers, of those named, that are missing, not running or outdated, each with the reason."""
    # Only these nodes are rendered: a batch does so for each of its jobs, and labs may be large.
    names = render.extra_hosts(lab)
    owners = {lab.nodes[0].name if name == model.LAUNCHER else name for name in containers}
    files = tuple(render.render_node(lab, node, names) for node in lab.nodes if node.name in owners)
    names_by_host: dict[str, list[str]] = {}
    for name in dict.fromkeys(containers):
        names_by_host.setdefault(lab.host_of(name).name, []).append(name)
    lacking: list[tuple[str, str]] = []
    for host, on_host in names_by_host.items():
        lacking += plan.not_current(lab, files, observed.on(host), tuple(on_host))
    return lacking


def observe(context: Context, cluster: Cluster, *, preview: bool) -> ObservedState | None:
    """Return the lab's state. If no host answers, raise HostError, or in a preview warn and return None."""
    try:
        return cluster.engine.observe(cluster.settings.text("LAB_NAME"), cluster.image)
    except HostError as error:
        if not preview:
            raise
        context.warn(error.message)
        return None


def require_hosts(lab: Lab, job: Job, failed: Mapping[str, HostError]) -> None:
    """Raise the HostError in ``failed`` of the first host of the run's containers that has one."""
    for name in job.containers:
        if error := failed.get(lab.host_of(name).name):
            raise error


def require_ready(
    context: Context,
    cluster: Cluster,
    lab: Lab,
    job: Job,
    observed: ObservedState | None,
    *,
    launcher: bool,
    preview: bool,
) -> None:
    """Require current containers and inputs of a run, else HostError or ConfigError; nothing if ``observed`` is None.

    A preview only warns of a lab that is not up.
    ``launcher``: the user chose the launcher, so the image must have its program.
    """
    if observed is None:
        return
    lacking = not_up(lab, job.containers, observed)
    if preview and lacking:
        if not observed.on(lab.hosts[0].name).image:
            images.require_buildable(cluster)
        context.warn(f"lab {lab.name} {_state(lacking)}, so its launcher was not asked for programs and inputs")
        return
    changed = applied.changed(context.directory, cluster.settings)
    replaced = drift.replaced(lab, cluster.engine, filter(None, (observed.container(model.LAUNCHER),)))
    require_up(lab, job, observed, named(lacking, changed) or [*replaced.items()], context.flags)
    require_inputs(lab, job, cluster.engine)
    if launcher:
        require_program(lab, job, cluster.engine)


def _state(lacking: list[tuple[str, str]]) -> str:
    """Return ``is out of date`` if the first lacking container changed in image or settings, else ``is not up``."""
    return "is out of date" if " changed" in lacking[0][1] else "is not up"


def named(lacking: list[tuple[str, str]], changed: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the containers that are not current, with the changed settings as reason, if they are known."""
    return [(name, plan.named(why, changed)) for name, why in lacking]


def out_of_date(lab: Lab, observed: ObservedState, changed: tuple[str, ...]) -> str:
    """Return the reason of the first container that was made from other settings; empty if there is none."""
    reasons = (why for _, why in named(not_up(lab, lab.containers, observed), changed))
    return next((why for why in reasons if " changed" in why), "")


def way_up(containers: Iterable[Container], flags: Mapping[str, str]) -> str:
    """Return the command for a lab that is not up: resume what is paused, as `labctl up` would end its processes."""
    paused = [resume(container) for container in containers if container.state == "paused"]
    return "; ".join(paused) or up_command(flags)


def up_command(flags: Mapping[str, str]) -> str:
    """Return the `labctl up` to type, with the overrides without which it would leave the lab as it is."""
    overrides = (f"-s {key}={'...' if sounds_secret(key) else shlex.quote(value)}" for key, value in flags.items())
    return " ".join(("labctl up", *overrides))


def require_up(
    lab: Lab, job: Job, observed: ObservedState, lacking: list[tuple[str, str]], flags: Mapping[str, str]
) -> None:
    """Raise HostError if a container of the run is not current, or a node is unhealthy for what it lost."""
    require_current(lab, lacking, observed, flags)
    for node in job.nodes:
        container = observed.container(node.name)
        if container and lost(container.reason):
            raise HostError(f"{node.name} is unhealthy: {container.reason}", hint="labctl up", node=node.name)


def require_current(
    lab: Lab, lacking: list[tuple[str, str]], observed: ObservedState, flags: Mapping[str, str]
) -> None:
    """Raise HostError, with the command to type, for the first of the ``lacking`` containers."""
    if lacking:
        name, why = lacking[0]
        expected = f" (wanted: {lab.image})" if why == "image changed" else ""
        message = f"lab {lab.name} {_state(lacking)}: {name}: {why}{expected}"
        containers = filter(None, (observed.container(each) for each, _ in lacking))
        raise HostError(message, hint=way_up(containers, flags), node=name)


def require_launcher(context: Context, cluster: Cluster, lab: Lab, workload: Workload) -> None:
    """Raise HostError unless the launcher is up with the current settings and the workload's own image."""
    observed = cluster.engine.observe(lab.name, cluster.image)
    lacking = not_up(lab, (model.LAUNCHER,), observed)
    if lacking and workload.has_own_image:
        images.confirm_image(workload, lab.image, bool(observed.on(lab.hosts[0].name).image), None)
    changed = applied.changed(context.directory, cluster.settings)
    require_current(lab, named(lacking, changed), observed, context.flags)


def require_program(lab: Lab, job: Job, engine: Engine) -> None:
    """Raise HostError if the launcher's program is not found in the launcher container; nothing without one."""
    program = launchers.get(job.workload.launcher).PROGRAM
    if not program:
        return
    lookup = engine.exec(naming.container_name(lab, model.LAUNCHER), ("which", program), user=agent.user(lab))
    if lookup.code:
        hint = f"set LAB_IMAGE in .env to one that has {program}, then `labctl up`"
        if program == "horovodrun":
            image = dict(accelerators.get(lab.accelerator).images).get("horovod", "horovod")
            hint = f"LAB_IMAGE={catalog.tag(image)} in .env, then `labctl up`"
        raise HostError(f"launcher `{program}` not found in image {lab.image}", hint=hint)


def require_port(lab: Lab, job: Job, engine: Engine, facts: Mapping[str, hostdump.HostFacts]) -> None:
    """Raise HostError if LAB_MASTER_PORT is in use on the first node's host, as ``facts`` said; not on a bridge.

    ``facts``: the hosts' earlier reports. The port is checked again, as a run of this lab may have been ended since.
    """
    host, port = lab.host_of(job.nodes[0].name).name, lab.master_port
    if lab.network != "host" or port not in facts[host].ports:
        return
    now = hostdump.read(connection_to(engine, host).run(survey.script()).out, host)
    user = now.facts_at(time.time()).ports.get(port)
    if user is None:
        return
    labs = {worker.lab for worker in engine.capabilities(host).port_users()}
    others = [f"`{name}`" for name in sorted(labs - {lab.name})]
    whose = f"; this host has lab {', '.join(others)}, too" if others else ""
    free = routing.free_port(port, {port, lab.ssh_port}.union(*(each.ports for each in facts.values())))
    raise HostError(
        f"{host}: port {port} (LAB_MASTER_PORT) is in use (user {user}){whose}",
        hint=f"wait for it to end, or LAB_MASTER_PORT={free} in .env: two labs on the same hosts need a port each",
        node=host,
    )


def require_inputs(lab: Lab, job: Job, engine: Engine) -> None:
    """Raise ConfigError if the launcher is on a host that is sent files and lacks an input path of the run."""
    host = lab.host_of(model.LAUNCHER)
    runs = lab.directory / inputs.RUNS
    named = inputs.given(job.workload) if naming.sent(host) else ()
    paths = tuple(path for path in named if not inputs.locate(lab, path).is_relative_to(runs))
    if not paths:
        return
    look = ("sh", "-c", 'for path; do [ -e "$path" ] || echo "$path"; done', "sh", *paths)
    absent = engine.exec(naming.container_name(lab, model.LAUNCHER), look, user=agent.user(lab)).out.splitlines()
    if absent:
        raise ConfigError(
            f"{job.workload.name}: {host.name} has no {absent[0]} in its containers",
            hint="HOST_CACHE_PATH is a directory of each host: put it below that here, then `labctl cache --hosts`; of "
            "a clone, hosts get what git tracks",
            node=host.name,
        )


def with_own_port(lab: Lab, active: tuple[ActiveRun, ...]) -> Lab:
    """Return the lab with the first master port from its own up that no active run and no sshd uses."""
    taken = {run.port for run in active} | {lab.ssh_port}
    return replace(lab, master_port=next(port for port in itertools.count(lab.master_port) if port not in taken))


# Seconds until a run that is stopped has ended at most.
ENDING = 30


def under_way(lab: Lab, engine: Engine, observed: ObservedState, *, preview: bool) -> tuple[ActiveRun, ...]:
    """Return the runs that are under way; except in a preview, end those judged while their launcher was unreachable.

    The launcher is not asked if the records show that no run can be under way.
    """
    if not store.unjudged(lab.directory) and not out_of_reach(lab.directory):
        return ()
    active = agent.active(engine, observed)
    judged = {run.id for run in active if store.read_result(lab.directory, run.id)}
    if judged and not preview:
        for run_id in judged:
            with suppress(HostError):
                agent.stop(lab, engine, run_id, 1, "it already has a result")
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline and judged & _active_ids(lab, engine):
            time.sleep(0.2)
    return tuple(run for run in active if run.id not in judged)


def _active_ids(lab: Lab, engine: Engine) -> set[str]:
    """Return the ids of the runs that are under way now."""
    return {run.id for run in agent.active(engine, engine.observe(lab.name))}


def require_free(job: Job, active: tuple[ActiveRun, ...], options: RunOptions) -> None:
    """Raise InUse if other runs use nodes of the run, unless it waits for them."""
    if not options.wait and (others := _users(job, active)):
        raise in_use(others)


def note_users(context: Context, job: Job, active: tuple[ActiveRun, ...]) -> None:
    """Note other runs that use nodes of a job, which a dry run does not mind."""
    if others := _users(job, active):
        context.notice(in_use_text(others))


def _users(job: Job, active: tuple[ActiveRun, ...]) -> list[ActiveRun]:
    """Return the runs that use nodes of a job, each with only these of its nodes."""
    nodes = {node.name for node in job.nodes}
    shared = [(run, tuple(name for name in run.nodes if name in nodes)) for run in active]
    return [replace(run, nodes=names) for run, names in shared if names]


def without_lost(
    context: Context, cluster: Cluster, options: RunOptions, ended: Result, error: HostError
) -> RunOptions:
    """Return options without nodes not up again, and warn; raise ``error`` if none, all or the launcher is gone."""
    observed, answering = preflight.observe(context, cluster)
    running = (container for container in observed.containers if container.state == "running")
    healthy = {container.node for container in running if not lost(container.reason)}
    usable = {node for node in healthy if answering.placement.get(node) not in answering.failed}
    nodes = [node.name for node in store.job(store.directory(context.directory, ended.run_id)).nodes]
    gone = tuple(node for node in nodes if node not in usable)
    if not gone or len(gone) == len(nodes) or model.LAUNCHER not in usable:
        raise error
    context.warn(f"{error.message}; going on without {', '.join(gone)}")
    return without(options, gone)

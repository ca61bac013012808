"""The way to what doctor looks at: the lab and its hosts, of which none need answer; and who may take part in `up`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from labctl.config.context import Context
from labctl.deploy import preflight
from labctl.doctor import examine, refused, require
from labctl.doctor.finding import Examination, Finding, error, ok
from labctl.doctor.hosts import unreached
from labctl.doctor.place import Place
from labctl.engines.docker import DockerEngine
from labctl.errors import ConfigError, HostError, LabError
from labctl.hosts import facts as survey
from labctl.images import catalog
from labctl.lab import cluster
from labctl.lab.cluster import Cluster
from labctl.model import HERE, Lab
from labctl.system import files
from labctl.system.parallel import attempt

ANSWERING = 20
"""Seconds for an engine that is asked how it does: one that stores a large image is slow to answer."""
SKEW = 30.0
"""Seconds between clocks that a person is told of before work begins."""


def findings(context: Context, *, node: str = "") -> tuple[Finding, ...]:
    """What is found of the hosts and the lab, or of one node and its host."""
    found = context.settings()
    preflight.require_named(context, found)
    # What would be warned of is among the findings.
    quiet = replace(context, emit=lambda _: None)
    only = ways_to(context, node)
    with cluster.opened(context, found, only, seconds=ANSWERING, demand=False) as where:
        away = tuple(
            unreached(target, where.failed[target.name])
            for target in where.targets
            if target.name in where.failed and target.name not in where.connections
        )
        try:
            lab, lacking = seen_as(quiet, where)
        except HostError as failure:
            if any(failure is one for one in where.failed.values()):
                return everyone(where)
            return (*away, impossible(failure))
        if not where.targets:
            return examine(local(context, where, lab, only=node), lacking=lacking)
        with examined(context, where, lab, only=node) as whole:
            return examine(whole, lacking=lacking, first=away)


def ways_to(context: Context, node: str) -> tuple[str, ...]:
    """The host of a node, where the others are known from before; else all, as addresses are found among them."""
    found = context.settings()
    targets = cluster.listed(context.directory, found)
    host = cluster.placement(found, targets).get(node)
    known = all(cluster.remembered(context.directory, target.name) for target in targets)
    return (host,) if targets and host and known else ()


def seen_as(quiet: Context, where: Cluster) -> tuple[Lab, Mapping[str, LabError]]:
    """The lab, and what says of which hosts that they lack devices; it has none where all of them do."""
    try:
        lab, able = cluster.load_lab(quiet, where, ask=can_probe(where), anew=True)
        return lab, {name: why for name, why in able.failed.items() if name not in where.failed}
    except (HostError, ConfigError) as lacking:
        # A mistake that has nothing to do with devices is raised anew.
        lab, _ = cluster.load_lab(quiet, without_devices(where), ask=False)
        return lab, dict.fromkeys((HERE, *(host.name for host in lab.hosts)), lacking)


def everyone(where: Cluster) -> tuple[Finding, ...]:
    """Whether each host answers: no more can be told before the first one was reached once."""
    first = where.targets[0].name
    return tuple(
        unreached(target, where.failed[target.name])
        if target.name in where.failed
        else ok("LAB-HOST-004", f"answers; what it has is looked at once {first} was reached", node=target.name)
        for target in where.targets
        if target.name in where.failed or target.name in where.connections
    )


def impossible(failure: HostError) -> Finding:
    return error(
        "LAB-HOST-007",
        failure.message,
        why="the lab cannot be laid over these hosts, so there is nothing more to look at",
        fix=failure.hint,
        node=failure.node or HERE,
    )


def local(context: Context, where: Cluster, lab: Lab, *, only: str = "") -> Examination:
    """A lab on this machine."""
    return Examination(lab=lab, settings=where.settings, environ=context.environ, engine=where.daemons[HERE], only=only)


@contextmanager
def examined(context: Context, where: Cluster, lab: Lab, *, only: str = "") -> Iterator[Examination]:
    """The lab as a whole and on each host that ssh reaches; their files are laid out for the time of the block."""
    whole = Examination(lab=lab, settings=where.settings, environ=context.environ, engine=where.engine, only=only)
    busy = frozenset(port for one in where.facts.values() for port in one.ports)
    targets = {target.name: target for target in where.targets}
    with files.scratch() as scratch:
        hosts = tuple(
            replace(
                whole,
                engine=DockerEngine(connection, seconds=ANSWERING),
                root=survey.lay_out(where.told[name], scratch / str(number)),
                place=Place(
                    name=name,
                    target=targets[name],
                    connection=connection,
                    facts=where.facts[name],
                    busy=busy,
                ),
            )
            for number, (name, connection) in enumerate(where.connections.items())
            if name in {host.name for host in lab.hosts}
        )
        yield replace(whole, hosts=hosts)


def admitted(context: Context, where: Cluster) -> Cluster:
    """The site with those hosts failed that cannot take part in `up`, before anything is done on any.

    A clock that is off stops nothing, and is told of. HostError where no host is left.
    """
    if not where.targets:
        return where
    for name, facts in where.facts.items():
        if abs(facts.skew) > SKEW:
            way = "ahead" if facts.skew > 0 else "behind"
            context.warn(f"{name}: its clock is {abs(facts.skew):.0f} s {way}; `labctl doctor` says how to set it")
    lab, where = cluster.foresee_lab(where)
    with examined(context, where, lab) as whole:
        # Nothing is asked of an engine that has just not answered.
        left = replace(whole, hosts=tuple(one for one in whole.hosts if one.name in where.engine.hosts))
        require(left, "up")
        return where.without(refused(left, "up"))


def without_devices(where: Cluster) -> Cluster:
    """The site as a CPU lab would have it, to look at hosts that lack the devices which the settings ask for."""
    found = where.settings
    wanted = found.text("LAB_ACCELERATOR")
    asked = (
        ("LAB_IMAGE", found.text("LAB_IMAGE") or catalog.tag(wanted)),
        ("LAB_ACCELERATOR", "cpu"),
        ("LAB_DEVICES", ""),
    )
    for key, value in asked:
        found = found.with_value(key, value, origin="a host without devices")
    return replace(where, settings=found)


def can_probe(where: Cluster) -> bool:
    """Whether there is an engine on every host and an image to try limits with."""
    found, failed = attempt(
        lambda name: where.engine.capabilities(name).image_id(where.image), {one.name: one.name for one in where.hosts}
    )
    return not failed and None not in found.values()

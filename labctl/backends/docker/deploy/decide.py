"""Observes a lab once and decides what `up` and `down` do; changes nothing, so that a dry run ends here."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from labctl.accelerators import leases
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import drift, images, ledger, plan, preflight, provision
from labctl.backends.docker.lab import capabilities
from labctl.backends.docker.lab.cluster import Cluster, load_lab, preview_lab
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.errors import Failures
from labctl.model import HERE, Lab


class Decision(Struct, frozen=True, kw_only=True):
    """A plan, and what it was decided from."""

    cluster: Cluster
    lab: Lab
    observed: ObservedState
    plan: plan.Plan
    failed: Failures
    """Hosts that the plan skips, and why."""
    first: int = 0
    """Steps at the beginning on whose results the others depend: they are decided again after those."""


def up(
    context: Context,
    cluster: Cluster,
    observed: ObservedState,
    check: Callable[[Lab, Cluster], Cluster],
    *,
    dry_run: bool,
) -> Decision:
    """The image, the engines, the lab directory, the containers. ``check``: what else can stop it, by host.

    HostError for what stops it everywhere.
    """
    ledger.warn_orphaned_hosts(context, cluster)
    lab, cluster = preview_lab(cluster)
    cluster = check(lab, cluster)
    first, failed = images.plan_images(context, cluster, observed)
    cluster = cluster.excluding(failed)
    steps = (*first, *provision.plan_probe(cluster))
    lab, cluster = preview_lab(cluster) if dry_run or steps else load_lab(context, cluster)
    preflight.report_accelerator(context, cluster, lab)
    preflight.warn_small_arp_table(context, cluster, lab)
    return rest_of_up(context, cluster, lab, observed, steps)


def rest_of_up(
    context: Context, cluster: Cluster, lab: Lab, observed: ObservedState, first: tuple[plan.Step, ...] = ()
) -> Decision:
    """What is left once the image is everywhere and the engines were probed."""
    capabilities.require_files(lab)
    leases.require_free(lab)
    rendered = render.render(lab)
    local, changed = provision.plan_local(lab, rendered, observed.on(HERE).image)
    found, silent = drift.find(lab, cluster.connections, changed, cluster.failed)
    failed = {**cluster.failed, **silent}
    steps = plan.up(
        lab, rendered, observed, local=(*first, *local), stale=found.hosts, unusable=found.containers, failed=failed
    )
    preflight.require_no_run(context, cluster.engine, observed, steps.steps)
    return Decision(cluster=cluster, lab=lab, observed=observed, plan=steps, failed=failed, first=len(first))


def down(
    context: Context, cluster: Cluster, *, images_too: bool, state: str = ""
) -> tuple[plan.Plan, Failures, tuple[str, ...]]:
    """All with the label, what was pushed to hosts, the image if asked for, ``state`` of the lab directory.

    The last are the runs that this ends, in words.
    """
    name, image = cluster.settings.text("LAB_NAME"), images.image_of_hosts(cluster) if images_too else ""
    observed = cluster.engine.observe(name, image)
    foreign = preflight.find_foreign_labs(context, name, observed)
    failed = {**cluster.failed, **dict(observed.silent), **foreign}
    ledger.warn_orphaned_hosts(context, cluster)
    records = ledger.records(context.directory, ledger.machines(cluster))
    steps = plan.down(observed, ledger.sent(context, cluster), image, failed, records=records, state=state)
    return steps, failed, preflight.runs_under_way(context, cluster.engine, observed)

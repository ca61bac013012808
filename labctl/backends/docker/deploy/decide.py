"""Decide the steps of `up` and `down` on Docker hosts; change nothing."""

from __future__ import annotations

from labctl.accelerators import leases
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import applied, drift, images, ledger, plan, preflight, provision
from labctl.backends.docker.lab import capabilities
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.plan import Plan
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.errors import Failures
from labctl.model import HERE, Lab


def up(
    context: Context, cluster: Cluster, lab: Lab, observed: ObservedState, *, preview: bool = False
) -> tuple[Plan, Failures]:
    """Plan `up` of lab directory and hosts; return also hosts to skip. HostError if devices or nodes are in use.

    HostError if another lab holds devices, or if a run would lose its containers, which a preview only notes.
    """
    capabilities.require_files(lab)
    leases.require_free(lab)
    rendered = render.render(lab)
    local, changed = provision.plan_local(lab, rendered, observed.on(HERE).image)
    drifted, silent = drift.find(lab, cluster.connections, changed, cluster.failed)
    replaced = drift.replaced(lab, cluster.engine, observed.containers)
    failed = {**cluster.failed, **silent}
    steps = plan.up(
        lab,
        rendered,
        observed,
        local=local,
        stale=drifted.hosts,
        unusable={**drift.renewed_keys(lab), **replaced, **drifted.containers},
        failed=failed,
        applied=applied.file(context.directory, cluster.settings),
    )
    preflight.require_no_run(context, cluster.engine, observed, steps.steps, preview=preview)
    return steps, failed


def down(
    context: Context, cluster: Cluster, *, images_too: bool, state: str = ""
) -> tuple[ObservedState, Plan, Failures]:
    """Plan to remove the lab's objects, pushed files and records; return observed state, plan and skipped hosts.

    The image and ``state`` are removed only if asked for.
    """
    name, image = cluster.settings.text("LAB_NAME"), images.image_of_hosts(cluster) if images_too else ""
    observed = cluster.engine.observe(name, image)
    foreign = preflight.find_foreign_labs(context, name, observed)
    failed = {**cluster.failed, **dict(observed.silent), **foreign}
    ledger.warn_orphaned_hosts(context, cluster)
    records = ledger.records(context.directory, ledger.machines(cluster))
    steps = plan.down(observed, ledger.sent(context, cluster), image, failed, records=records, state=state)
    return observed, steps, failed

"""The models and datasets that `labctl cache` is asked for."""

from __future__ import annotations

from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.jobs.request import RunOptions, choose_workload
from labctl.model import Cache


def of(context: Context, settings: Settings, name: str, extra: Cache) -> Cache:
    """Return the models and datasets that the workload ``name`` declares, none if empty, followed by ``extra``."""
    if not name:
        return extra
    declared = choose_workload(context.directory, name, RunOptions(), settings).cache
    return Cache(models=(*declared.models, *extra.models), datasets=(*declared.datasets, *extra.datasets))

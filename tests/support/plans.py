"""Plans of a Docker lab, made without its hosts."""

from __future__ import annotations

from contextlib import ExitStack

from labctl.backends.docker.backend import DockerBackend, NewRun
from labctl.backends.plan import Plan
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.jobs.request import RunOptions
from labctl.model import Job, Lab
from labctl.runs import start


def of_run(lab: Lab, job: Job, settings: Settings) -> Plan:
    """Return a run's plan in a preview, before the lab is up."""
    context = Context(directory=lab.directory, environ={}, emit=lambda _: None, flags={})
    backend = DockerBackend(context, settings, ExitStack(), {})
    return start.plan(backend, NewRun(lab=lab, job=job), RunOptions(), preview=True)

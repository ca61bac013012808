"""What is known of a run before it starts: plan, command, settings (redacted), rendered files, versions."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

from labctl import render
from labctl.engines import Engine
from labctl.model import File, Job, Lab
from labctl.plan import Plan
from labctl.settings import Settings


def before(lab: Lab, settings: Settings, job: Job, engine: Engine, steps: Plan) -> tuple[File, ...]:
    """Files for the run's directory, relative to it."""
    rendered = [
        File(path=f"rendered/{file.path.removeprefix('.lab/')}", content=file.content) for file in _rendered(lab)
    ]
    return (
        File(path="plan.txt", content=f"{steps}\n"),
        _json("job.json", _job(job)),
        _json("settings.json", [dict(zip(("key", "value", "origin"), row, strict=True)) for row in settings.rows()]),
        _json("versions.json", _versions(lab, engine)),
        *rendered,
    )


def _rendered(lab: Lab) -> list[File]:
    """The files as they are on disk, which is what the containers were made from."""
    paths = [render.compose_path(node.name) for node in lab.nodes]
    return [
        File(path=path, content=(lab.directory / path).read_text()) for path in paths if (lab.directory / path).exists()
    ]


def _job(job: Job) -> dict[str, Any]:
    return {
        "run_id": job.run_id,
        "workload": job.workload.name,
        "launcher": job.launcher,
        "argv": list(job.argv),
        "rank_argv": [job.workload.script, *job.workload.arguments],
        "environment": dict(job.workload.environment),
        "timeout": job.timeout,
        "nodes": [{"name": node.name, "slots": node.slots} for node in job.nodes],
    }


def _versions(lab: Lab, engine: Engine) -> dict[str, Any]:
    return {
        "labctl": metadata.version("labctl"),
        "python": platform.python_version(),
        **engine.versions(),
        "image": lab.image,
        "image_id": engine.on(lab.hosts[0].name).image_id(lab.image),
    }


def _json(path: str, content: object) -> File:
    return File(path=path, content=json.dumps(content, indent=2) + "\n")

"""Fictitious records of runs in labctl's format: the files of ``runs/<id>/`` that reports and comparisons read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = (
    {"name": "loss", "pattern": r"step \d+/\d+ loss (\S+)", "reduce": "first-last"},
    {"name": "throughput", "pattern": r"Throughput: (\S+) samples/sec", "unit": "samples/s", "reduce": "last"},
    {"name": "tokens", "pattern": r"tokens/s (\S+)", "unit": "tokens/s", "reduce": "mean"},
)
SETTINGS = {"LAB_NAME": "demo", "LAB_ACCELERATOR": "cpu"}
PASSED: dict[str, Any] = {"verdict": "PASS", "cause": None, "message": "All criteria met on 2 ranks.", "exit_code": 0}


def write(
    lab: Path,
    run_id: str,
    *,
    losses: Sequence[float | None] = (),
    tokens: Sequence[float] = (),
    throughput: float | None = None,
    arguments: Sequence[str] = ("--model", "opt-tiny"),
    settings: Mapping[str, str] = SETTINGS,
    versions: Mapping[str, Any] | None = None,
    code: str = "print()",
    log: str = "",
    request: Mapping[str, Any] | None = None,
    **result: Any,
) -> Path:
    """Write a passed run's record below ``runs``, fields of ``result`` replaced; return its directory."""
    path = lab / "runs" / run_id
    (path / "work").mkdir(parents=True)
    (path / "work/train.py").write_text(code, encoding="utf-8")
    metrics: dict[str, Any] = {}
    if losses:
        metrics["loss"] = {"first": losses[0], "last": losses[-1]}
    if tokens:
        metrics["tokens"] = {"value": sum(tokens) / len(tokens), "unit": "tokens/s"}
    if throughput is not None:
        metrics["throughput"] = {"value": throughput, "unit": "samples/s"}
    series = [
        {"metric": name, "step": step, "seconds": float(step), "value": value}
        for name, values in (("loss", losses), ("tokens", tokens))
        for step, value in enumerate(values, start=1)
    ]
    nodes = [{"name": f"worker-{number}", "slots": 1} for number in range(2)]
    workload = {"script": "train.py", "metrics": METRICS, "launcher_arguments": []}
    job = {"run_id": run_id, "workload": "opt-tiny", "launcher": "deepspeed", "nodes": nodes, "environment": {}}
    job |= {"rank_argv": ["train.py", *arguments, "--out", f"/runs/{run_id}"], "job": {"workload": workload}}
    job |= {"request": request} if request else {}
    documents = {
        "job.json": job,
        "settings.json": [{"key": key, "value": value, "origin": ".env:1"} for key, value in settings.items()],
        "versions.json": {"labctl": "0.1.0", "image": "labctl/cpu", **(versions or {})},
        "result.json": {
            "schema": 1, "run_id": run_id, "workload": "opt-tiny", "launcher": "deepspeed", "lab": "demo",
            **PASSED, "metrics": metrics, "seconds": 23.4, "started": "2026-11-25T20:36:15+00:00", "world_size": 2,
            "ranks": [{"rank": number, "node": f"worker-{number}"} for number in range(2)], **result,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (path / name).write_text(json.dumps(document), encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in series), encoding="utf-8")
    (path / "output.log").write_text(log, encoding="utf-8")
    (path / "started").touch()
    return path

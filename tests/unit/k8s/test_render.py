"""The objects of a job for Kubernetes, for each accelerator and kind of job; of files that are the run's, the names.

``pytest tests/unit/k8s --update-golden`` rewrites ``expected/``; read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import accelerators
from labctl.config import settings
from labctl.k8s import job, render, target
from labctl.runs.request import RunOptions, choose_workload

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent / "expected"
ASKED = {
    "LAB_NAME": "demo",
    "LAB_SLOTS": "8",
    "LAB_MEMORY": "250g",
    "LAB_K8S_NAMESPACE": "workloads",
    "LAB_K8S_CPU": "32",
    "LAB_K8S_HUGEPAGES": "16g",
    "LAB_K8S_PULL_SECRET": "registry",
    "LAB_K8S_STORAGE_CLASS": "nfs",
    "LAB_K8S_STORAGE_SIZE": "500g",
    "LAB_K8S_NODE_SELECTOR": "example.com/rack=7",
    "LAB_K8S_TOLERATIONS": "reserved=lab:NoSchedule spot",
    "LAB_K8S_HOST_IPC": "true",
    "LAB_K8S_QUEUE": "team",
    "LAB_K8S_GANG": "coscheduling",
    "HF_TOKEN": "hf_of_nobody",
    "HTTPS_PROXY": "http://proxy:3128",
    "HOME": "/home/someone",
}


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
@pytest.mark.parametrize("accelerator", ["cpu", *(name for name in accelerators.modules() if name != "cpu")])
def test_a_job_has_these_objects(accelerator: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = settings.load(tmp_path, {**ASKED, "LAB_ACCELERATOR": accelerator, "LAB_K8S_JOB": kind}, {})
    options = RunOptions()
    workload = choose_workload(ROOT, "matmul", options, found)
    where = target.read(found, accelerator)
    objects = render.manifests(where, job.build(found, tmp_path, where, workload, options))
    for one in objects:
        if one["kind"] == "ConfigMap":
            one["data"] = dict.fromkeys(one["data"], "...")
    text, path = render.text(objects), FOLDER / f"{accelerator}-{kind}.yaml"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")

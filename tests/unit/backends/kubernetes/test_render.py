"""The objects of a job for Kubernetes, for each accelerator and kind of job; of files that are the run's, the names.

``pytest tests/unit/backends/kubernetes --update-golden`` rewrites ``expected/``; read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import accelerators
from labctl.backends.kubernetes import job, render, target
from labctl.config import settings
from labctl.jobs.request import RunOptions, choose_workload

ROOT = Path(__file__).parents[4]
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


# What Intel's page asks of its job: eight Gaudis, huge pages, proxies, a claim, a token, the host's IPC.
INTELS = {
    "LAB_NAME": "lab",
    "LAB_NODES": "1",
    "LAB_SLOTS": "8",
    "LAB_MEMORY": "250g",
    "LAB_K8S_NAMESPACE": "workloads",
    "LAB_K8S_HUGEPAGES": "312600m",
    "LAB_K8S_HOST_IPC": "true",
    "LAB_K8S_STORAGE_CLASS": "nfs-client",
    "LAB_K8S_STORAGE_SIZE": "500g",
    "HF_TOKEN": "hf_of_nobody",
    "HTTPS_PROXY": "http://proxy.example:3128",
    "HOME": "/home/someone",
}


def test_intels_fine_tuning_is_this_job(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The manifests of lora-clm on habana, with the settings of Intel's page, are expected/intel-lora-clm.yaml."""
    found = settings.load(tmp_path, {**INTELS, "LAB_ACCELERATOR": "habana"}, {})
    options = RunOptions(arguments=(("model", "meta-llama/Llama-2-7b-hf"), ("epochs", "3")))
    where = target.read(found, "habana")
    built = job.build(found, ROOT, where, choose_workload(ROOT, "lora-clm", options, found), options)
    compare(render.manifests(where, built), "intel-lora-clm", request)


def compare(objects: list[render.Manifest], name: str, request: pytest.FixtureRequest) -> None:
    """Hide the ConfigMaps' data, and check the objects against the golden file, which --update-golden rewrites."""
    for one in objects:
        if one["kind"] == "ConfigMap":
            one["data"] = dict.fromkeys(one["data"], "...")
    text, path = render.text(objects), FOLDER / f"{name}.yaml"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
@pytest.mark.parametrize("accelerator", ["cpu", *(name for name in accelerators.modules() if name != "cpu")])
def test_a_job_has_these_objects(accelerator: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The manifests of matmul for each accelerator and kind of job are expected/ACCELERATOR-KIND.yaml."""
    found = settings.load(tmp_path, {**ASKED, "LAB_ACCELERATOR": accelerator, "LAB_K8S_JOB": kind}, {})
    options = RunOptions()
    workload = choose_workload(ROOT, "matmul", options, found)
    where = target.read(found, accelerator)
    objects = render.manifests(where, job.build(found, tmp_path, where, workload, options))
    compare(objects, f"{accelerator}-{kind}", request)


@pytest.mark.parametrize(("length", "cut"), [(12, False), (40, False), (41, True), (60, True)])
def test_the_label_of_a_run_keeps_the_end_of_its_id(length: int, cut: bool) -> None:
    """label() of a run id has at most 63 characters, ends with the id's end, and is cut only if longer."""
    run_id = f"20260102-150405-{'w' * length}-3fa2c1"
    label = render.label(run_id)
    assert (len(label) <= 63, label.endswith("-3fa2c1"), label != run_id) == (True, True, cut)

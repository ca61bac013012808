"""labctl's Kubernetes manifests, validated by a real API server with the operators' definitions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operator import fresh_namespace

from labctl import accelerators, launchers
from labctl.backends.kubernetes import job, render, target
from labctl.backends.kubernetes.api import Api, Refused
from labctl.backends.kubernetes.run import definitions
from labctl.config import settings
from labctl.errors import ConfigError
from labctl.jobs.request import RunOptions, choose_workload
from labctl.workloads import external

pytestmark = [pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
ROOT = Path(__file__).parents[2]
ASKED = {
    "LAB_NAME": "demo",
    "LAB_MEMORY": "250g",
    "LAB_K8S_CPU": "32",
    "LAB_K8S_HUGEPAGES": "16g",
    "LAB_K8S_PULL_SECRET": "registry",
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
# Paths that the user gives; labctl does not look at their content.
GIVEN = {"model": "/storage/model", "actor": "/storage/actor", "critic": "/storage/critic"}


@pytest.fixture(scope="module")
def api(kubeconfig: Path) -> Iterator[Api]:
    """Yield an Api with a new namespace on the test cluster, whose kubeconfig is the default one meanwhile."""
    with pytest.MonkeyPatch.context() as patch, fresh_namespace(kubeconfig) as namespace:
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        yield Api(namespace)


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
@pytest.mark.parametrize("accelerator", [*accelerators.modules()])
def test_the_server_takes_every_declared_workload(
    api: Api, tmp_path: Path, accelerator: str, kind: target.Kind
) -> None:
    """The API server takes the manifests of 30 workloads or more as a dry run, per accelerator and kind."""
    if not definitions(api)[kind]:
        pytest.skip(f"the cluster has no {kind}")
    given = {**ASKED, "LAB_K8S_NAMESPACE": api.namespace, "LAB_ACCELERATOR": accelerator, "LAB_K8S_JOB": kind}
    loaded = settings.load(tmp_path, given, {})
    where = target.read(loaded, accelerator)
    names = [workload.name for workload in external.list_all(ROOT / "workloads", launchers.known(), {}).workloads]
    taken = 0
    for name in names:
        try:
            workload = choose_workload(ROOT, name, RunOptions(), loaded)
        except ConfigError as error:
            # The workload's code is in a clone, which is missing here.
            if "clone" in error.message:
                continue
            raise
        options = RunOptions(arguments=tuple((key, GIVEN[key]) for key in workload.required_inputs))
        built = job.build(loaded, ROOT, where, choose_workload(ROOT, name, options, loaded), options)
        for manifest in render.manifests(where, built):
            api.apply(manifest, dry_run=True)
        taken += 1
    assert taken >= 30


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
@pytest.mark.parametrize(
    "placement",
    [
        job.Placement(nodes=("a", "b"), hostnames=("a.example", "b.example"), slots=2),
        job.Placement(without=("c.example",)),
    ],
)
def test_the_server_takes_workers_on_nodes_by_name(
    api: Api, tmp_path: Path, kind: target.Kind, placement: job.Placement
) -> None:
    """The API server accepts the job and the worker's pod with an affinity for, or against, nodes by name."""
    if not definitions(api)[kind]:
        pytest.skip(f"the cluster has no {kind}")
    given = {**ASKED, "LAB_K8S_NAMESPACE": api.namespace, "LAB_ACCELERATOR": "cpu", "LAB_K8S_JOB": kind}
    loaded = settings.load(tmp_path, given, {})
    where, options = target.read(loaded, "cpu"), RunOptions()
    workload = choose_workload(ROOT, "matmul", options, loaded)
    built = job.build(loaded, ROOT, where, workload, options, placement=placement)
    for manifest in render.manifests(where, built):
        api.apply(manifest, dry_run=True)
    # The operator's pods, too: an MPIJob's definition does not look into the templates of its pods.
    templates = render.pod_templates(render.manifests(where, built))
    (template,) = [template for template in templates if "affinity" in template["spec"]]
    metadata = {"name": "one", "namespace": api.namespace, **template["metadata"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    api.apply(pod, dry_run=True)


@pytest.mark.parametrize("kind", ["mpijob", "trainjob"])
def test_a_misspelt_field_is_refused(api: Api, tmp_path: Path, kind: target.Kind) -> None:
    """The API server takes the job of matmul, and refuses it with an unknown field: kind and name are said."""
    if not definitions(api)[kind]:
        pytest.skip(f"the cluster has no {kind}")
    given = {**ASKED, "LAB_K8S_NAMESPACE": api.namespace, "LAB_ACCELERATOR": "cpu", "LAB_K8S_JOB": kind}
    loaded = settings.load(tmp_path, given, {})
    where, options = target.read(loaded, "cpu"), RunOptions()
    built = job.build(loaded, ROOT, where, choose_workload(ROOT, "matmul", options, loaded), options)
    *_, made = render.manifests(where, built)
    api.apply(made, dry_run=True)
    wrong = copy.deepcopy(made)
    wrong["spec"]["slotsPerWorkr" if kind == "mpijob" else "runtimeReference"] = 1
    with pytest.raises(
        Refused, match=f"{made['kind']} {made['metadata']['name']} was refused: .*(has no field|not declared)"
    ):
        api.apply(wrong, dry_run=True)

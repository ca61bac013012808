from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters import GPU, lab, node, pod, target
from support.fake_api import MPIJOBS, OLD, TRAINJOBS, FakeApi

from labctl.backends.finding import Finding
from labctl.backends.kubernetes import checks, job
from labctl.backends.kubernetes.api import KubernetesEngine, Manifest, Refused
from labctl.backends.kubernetes.examination import View
from labctl.errors import HostError
from labctl.jobs.request import RunOptions, choose_workload
from labctl.system.process import CompletedProcess

ROOT = Path(__file__).parents[4]
NAMESPACE: Manifest = {"kind": "Namespace", "metadata": {"name": "demo"}}
STORED = {"LAB_K8S_STORAGE_SIZE": "10g"}
REGISTRY = {"LAB_K8S_PULL_SECRET": "registry"}


def cluster(*objects: Manifest, **options: Any) -> FakeApi:
    """Return the API server of a cluster of two nodes with room for a worker each, and these objects."""
    return FakeApi(NAMESPACE, node("n0"), node("n1"), *objects, **options)


def examine(api: FakeApi, **given: Any) -> dict[str, list[Finding]]:
    """Return doctor's findings about a lab in the cluster by code, without ``LAB-K8S-``."""
    found: dict[str, list[Finding]] = {}
    for one in checks.examine(lab(api, **given)):
        found.setdefault(one.code.removeprefix("LAB-K8S-"), []).append(one)
    return found


def the(api: FakeApi, code: str, **given: Any) -> Finding:
    """Return doctor's only finding of this code."""
    (found,) = examine(api, **given)[code]
    return found


def preflight(api: FakeApi, **given: Any) -> None:
    """Run the checks before a run of `matmul`; raise HostError for what would stop it."""
    made, where = lab(api, directory=ROOT, **given), target(**given)
    workload = choose_workload(ROOT, "matmul", RunOptions(), made.settings)
    checks.preflight(made, where, job.build(made.settings, ROOT, where, workload, RunOptions()).job)


def claim(mode: str = "ReadWriteMany", phase: str = "Bound", size: str = "10Gi") -> Manifest:
    """Return the lab's storage claim with this mode, phase and size."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    status = {"phase": phase, **({"capacity": {"storage": size}} if phase == "Bound" else {})}
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": "demo-storage"}, "spec": spec, "status": status}


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> Manifest:
    """Return a resource quota `team` with these limits and used amounts."""
    status = {"hard": hard, "used": used or {}}
    return {"kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": spec, "status": status}


def event(about: str, reason: str, message: str, kind: str = "Warning") -> Manifest:
    """Return an event about an object, a warning by default."""
    metadata = {"name": f"{about}.{reason}"}
    return {
        "kind": "Event",
        "metadata": metadata,
        "type": kind,
        "reason": reason,
        "message": message,
        "involvedObject": {"name": about},
    }


def worker(index: int, phase: str = "Running", **status: Any) -> Manifest:
    """Return the pod of worker N with this phase."""
    made = pod(f"demo-m-worker-{index}", namespace="demo")
    made["metadata"] |= {"uid": str(index), "creationTimestamp": "2026-01-01T00:00:00Z"}
    made["metadata"]["labels"] = {"labctl.lab": "demo", "labctl.role": "worker", "labctl.run": "m"}
    made["spec"]["containers"][0]["image"] = "labctl/cpu"
    return {**made, "status": {"phase": phase, **status}}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of a pending pod whose container waits for this reason."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "one", "state": state}]}


def test_a_cluster_that_can_run_the_lab_has_nothing_but_ok() -> None:
    """A cluster with room has only ok findings: server, rights, jobs, nodes and room."""
    found = examine(cluster())
    assert {one.level for some in found.values() for one in some} == {"ok"}
    assert sorted(found) == ["001", "002", "004", "006", "007"]
    assert found["001"][0].summary == "https://cluster:6443 is Kubernetes v1.33.0; the lab's namespace is demo"
    assert found["006"][0].summary == f"2 of 2 nodes can hold a worker, which asks for 8 of {GPU}"
    assert found["007"][0].summary == "nodes have room for 2 workers with their launcher now"


# --- the API server ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"), [(0, "does not answer"), (401, "does not accept the credentials"), (500, "Unauthorized")]
)
def test_a_server_that_lets_nobody_in_is_one_error_and_nothing_else(status: int, words: str) -> None:
    """A silent server, or one that answers 401 or 500, gives only LAB-K8S-001, an error."""
    (only,) = checks.examine(lab(cluster(fails=status)))
    assert (only.code, only.level) == ("LAB-K8S-001", "error")
    assert words in only.summary


def test_a_token_that_expires_meanwhile_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that gets 401 ends the checks with LAB-K8S-001."""
    api = cluster()

    def expired(_: View) -> Iterator[Finding]:
        """Let the token expire, then list the nodes."""
        api.fails = 401
        api.list("Node")
        yield from ()

    monkeypatch.setattr(checks, "CHECKS", {"LAB-K8S-006": expired, "LAB-K8S-007": checks.room})
    first, last = checks.examine(lab(api))
    assert (first.level, last.level, last.code) == ("ok", "error", "LAB-K8S-001")


def test_who_may_not_ask_what_the_server_knows_is_let_in_nowhere() -> None:
    """Without the right to read the API's kinds there is only LAB-K8S-001, with the role as fix."""
    (only,) = checks.examine(lab(cluster(denied=["get /apis/kubeflow.org/v2beta1"])))
    assert (only.code, only.level) == ("LAB-K8S-001", "error")
    assert "--non-resource-url=/apis/kubeflow.org/v2beta1" in only.fix


def test_a_check_that_may_not_look_says_so_and_does_not_end_the_others() -> None:
    """A check without its right is a warning with the role as fix, once per right; others go on."""
    found = examine(cluster(denied=["list nodes", "list resourcequotas"]))
    (hidden,) = found["006"]
    assert (hidden.level, hidden.impact) == ("warn", checks.UNKNOWN)
    assert "whether a node can hold a worker is not known" in hidden.summary
    assert "create clusterrole labctl-list-nodes" in hidden.fix
    assert "kubectl -n demo create role labctl-list-resourcequotas" in found["008"][0].fix
    # The same right is not named twice.
    assert "007" not in found


# --- rights --------------------------------------------------------------------------------------------------


def test_missing_rights_are_named_with_the_role_that_grants_them() -> None:
    """LAB-K8S-002 lists the missing rights, with one role of all of them as fix."""
    found = the(cluster(denied=["patch configmaps", "get pods/log", "create mpijobs.kubeflow.org"]), "002")
    assert found.level == "error"
    assert found.summary == (
        "you may not, in namespace demo: create mpijobs.kubeflow.org, patch configmaps, get pods/log"
    )
    assert (
        "kubectl -n demo create role labctl --verb=create,patch,get "
        "--resource=mpijobs.kubeflow.org,configmaps,pods/log" in found.fix
    )


@pytest.mark.parametrize(
    ("right", "given"),
    [
        ("create trainingruntimes.trainer.kubeflow.org", {"LAB_K8S_JOB": "trainjob"}),
        ("get secrets", REGISTRY),
        ("get persistentvolumeclaims", STORED),
        ("delete persistentvolumeclaims", STORED),
    ],
)
def test_rights_are_those_that_the_settings_take(right: str, given: dict[str, str]) -> None:
    """A right that only some settings need is an error with these settings, else ok."""
    api = cluster(denied=[right], knows=[MPIJOBS, TRAINJOBS])
    assert the(api, "002").level == "ok"
    assert the(api, "002", **given).level == "error"


def test_a_missing_namespace_takes_the_right_to_create_it() -> None:
    """A missing namespace is ok with the right to create it, else an error."""
    assert the(FakeApi(node()), "003").level == "ok"
    found = the(FakeApi(node(), denied=["create namespaces"]), "003")
    assert (found.level, found.summary) == ("error", "namespace demo not found, and you may not create it")
    assert "kubectl create namespace demo" in found.fix


def test_who_may_not_look_at_the_namespace_works_in_it() -> None:
    """Without the right to get the namespace there is no LAB-K8S-003, and rights are checked in it."""
    found = examine(cluster(denied=["get namespaces"]))
    assert found["002"][0].level == "ok"
    assert "003" not in found


# --- kinds of jobs -------------------------------------------------------------------------------------------


def test_the_kind_of_jobs_is_told_with_its_version() -> None:
    """LAB-K8S-004 names MPIJob or TrainJob with its version."""
    assert the(cluster(), "004").summary == "the cluster has MPIJob of kubeflow.org/v2beta1"
    assert the(cluster(knows=[TRAINJOBS]), "004").summary == (
        "the cluster has TrainJob of trainer.kubeflow.org/v1alpha1"
    )


def test_a_cluster_without_jobs_is_an_error_that_names_what_is_left_over() -> None:
    """A cluster with only MPIJob v1 is an error that names it."""
    found = the(cluster(knows=[OLD]), "004")
    assert found.level == "error"
    assert "has no MPIJob and no TrainJob; it has MPIJob v1" in found.summary


def test_an_mpijob_of_the_training_operator_beside_the_other_is_a_warning() -> None:
    """MPIJob v1 beside v2beta1 is a warning, LAB-K8S-005."""
    found = examine(cluster(knows=[MPIJOBS, OLD]))
    assert (found["004"][0].level, found["005"][0].level) == ("ok", "warn")


# --- nodes ---------------------------------------------------------------------------------------------------


def test_a_worker_that_no_node_can_hold_is_an_error_with_what_to_ask_for() -> None:
    """A worker too large for all nodes is an error, with the largest LAB_K8S_CPU as fix."""
    found = the(cluster(), "006", LAB_K8S_CPU="64")
    assert (found.level, found.summary) == ("error", "no node can hold a worker: n0, n1: 16 of cpu, not 64")
    assert "LAB_K8S_CPU of at most 16" in found.fix


def test_a_taint_that_keeps_workers_away_is_named_as_the_setting_has_it() -> None:
    """If a taint keeps workers from all nodes, the fix is the LAB_K8S_TOLERATIONS for it."""
    found = the(FakeApi(NAMESPACE, node(taints=("reserved=team:NoSchedule",))), "006")
    assert found.level == "error"
    assert "LAB_K8S_TOLERATIONS=reserved=team:NoSchedule in .env" in found.fix


def test_a_cluster_that_makes_nodes_is_only_warned_of() -> None:
    """A worker too large for all nodes is a warning on a cluster with Karpenter."""
    found = the(cluster(knows=[MPIJOBS, "karpenter.sh"]), "006", LAB_K8S_CPU="64")
    assert found.level == "warn"
    assert "autoscaler adds one" in found.impact


def test_a_cluster_that_may_make_nodes_is_only_warned_of_and_runs_there() -> None:
    """If the autoscaler's status may not be read, a worker too large is a warning, and a run is not stopped."""
    hidden = cluster()
    ask = hidden.request

    def request(method: str, path: str, *rest: Any, **options: Any) -> Any:
        """Refuse to read kube-system's ConfigMaps; answer other requests."""
        if "/namespaces/kube-system/configmaps" in path:
            raise Refused(403, "cannot get configmaps in namespace kube-system")
        return ask(method, path, *rest, **options)

    hidden.request = request  # type: ignore[method-assign]
    found = the(hidden, "006", LAB_K8S_CPU="64")
    assert (found.level, found.impact.endswith("an autoscaler, which you may not see")) == ("warn", True)
    preflight(hidden, LAB_K8S_CPU="64")


@pytest.mark.parametrize(
    ("others", "given", "level", "words"),
    [
        ([], {"LAB_NODES": "3"}, "warn", "room for 2 of 3 workers with their launcher"),
        (
            [pod("a", **{GPU: "1"})],
            {},
            "warn",
            "room for 1 of 2 workers with their launcher beside the pods that run now",
        ),
        ([pod("a", cpu="1")], {}, "ok", "room for 2 workers with their launcher now"),
        ([], {"LAB_K8S_CPU": "16"}, "warn", "room for 1 of 2 workers with their launcher"),
        ([], {"LAB_SLOTS": "4", "LAB_NODES": "4"}, "ok", "room for 4 workers with their launcher now"),
    ],
)
def test_room_for_all_workers_is_counted(others: list[Manifest], given: dict[str, str], level: str, words: str) -> None:
    """LAB-K8S-007 counts the workers for which there is room, with launcher and other pods."""
    found = the(cluster(*others), "007", **given)
    assert found.level == level
    assert words in found.summary


def test_nodes_that_keep_the_launcher_away_have_a_setting_that_lets_it_in() -> None:
    """If all nodes are tainted for devices, room for the launcher is a warning, with the toleration as fix."""
    kept = FakeApi(NAMESPACE, *(node(name, taints=(f"{GPU}=present:NoSchedule",)) for name in ("n0", "n1", "n2")))
    found = examine(kept)
    assert (found["006"][0].level, found["007"][0].level) == ("ok", "warn")
    assert f"LAB_K8S_TOLERATIONS={GPU} in .env" in found["007"][0].fix
    assert the(kept, "007", LAB_K8S_TOLERATIONS=GPU).level == "ok"


def test_a_node_that_is_away_is_named_where_room_is_short() -> None:
    """A node that is not ready is named in the warning of too little room."""
    api = FakeApi(NAMESPACE, node("n0"), node("n1", ready="False"))
    found = the(api, "007")
    assert found.summary == "nodes have room for 1 of 2 workers with their launcher (n1: not ready)"


def test_room_now_is_unknown_to_who_sees_no_other_namespace() -> None:
    """Without the right to list pods LAB-K8S-007 says that what is free is not known."""
    found = examine(cluster(denied=["list pods"]))
    assert "you may not see what is free now" in found["007"][0].summary


# --- quotas --------------------------------------------------------------------------------------------------


def test_a_quota_that_leaves_enough_is_ok() -> None:
    """A quota that leaves enough for pods, devices and claim is ok, LAB-K8S-008."""
    left = quota({"pods": "4", f"requests.{GPU}": "16", "persistentvolumeclaims": "1"}, {"pods": "1"})
    found = the(cluster(left), "008", **STORED)
    assert (found.level, found.summary) == ("ok", "quota team has room for a run")


@pytest.mark.parametrize(
    ("hard", "words"),
    [
        ({"pods": "3"}, "pods 3, and 2 of 3 is left"),
        ({f"requests.{GPU}": "8"}, f"requests.{GPU} 16, and 8 of 8 is left"),
        ({"requests.cpu": "8"}, "requests.cpu 8.5, and 8 of 8 is left"),
        ({"memory": "64Gi"}, "memory 65 GiB, and 64 GiB of 64Gi is left"),
        ({"requests.storage": "5Gi"}, "requests.storage 10 GiB, and 5 GiB of 5Gi is left"),
        ({"hugepages-2Mi": "1Gi"}, "hugepages-2Mi 4 GiB, and 1 GiB of 1Gi is left"),
    ],
)
def test_a_quota_that_is_too_small_is_an_error(hard: dict[str, str], words: str) -> None:
    """A quota that leaves less than a run asks for is an error with both amounts."""
    asks = {"LAB_K8S_CPU": "4", "LAB_MEMORY": "32g", "LAB_K8S_HUGEPAGES": "2g", **STORED}
    found = the(cluster(quota(hard, {"pods": "1"})), "008", **asks)
    assert (found.level, found.summary) == ("error", f"quota team: the run asks for {words}")


def test_a_quota_that_wants_limits_refuses_a_launcher_without() -> None:
    """A quota of limits.cpu is an error unless a LimitRange gives the launcher a default."""
    api = cluster(quota({"limits.cpu": "100"}))
    assert the(api, "008", LAB_K8S_CPU="4").summary == "quota team requires every pod to set limits.cpu"
    limits = [{"type": "Container", "default": {"cpu": "2"}}]
    api.put({"kind": "LimitRange", "metadata": {"name": "usual"}, "spec": {"limits": limits}})
    assert the(api, "008", LAB_K8S_CPU="4").level == "ok"
    assert "limits.cpu 202" in the(api, "008", LAB_K8S_CPU="100").summary


def test_a_claim_that_is_there_is_not_asked_for_again() -> None:
    """A full quota of claims is no error if the lab's claim exists."""
    full = quota({"persistentvolumeclaims": "1"}, {"persistentvolumeclaims": "1"})
    assert the(cluster(full), "008", **STORED).level == "error"
    assert the(cluster(full, claim()), "008", **STORED).level == "ok"


def test_a_request_that_the_namespace_gives_by_default_is_said() -> None:
    """A quota of cpu is an error unless a LimitRange gives a default request, which then counts."""
    limits = [{"type": "Container", "defaultRequest": {"cpu": "2"}}]
    usual = {"kind": "LimitRange", "metadata": {"name": "usual"}, "spec": {"limits": limits}}
    assert the(cluster(quota({"cpu": "100"})), "008").summary == "quota team requires every pod to set cpu"
    assert the(cluster(quota({"cpu": "100"}), usual), "008").level == "ok"
    assert "cpu 4.5, and 4 of 4 is left" in the(cluster(quota({"cpu": "4"}), usual), "008").summary


def test_a_quota_for_other_pods_is_not_counted() -> None:
    """Quotas of BestEffort, Terminating or a priority class are not checked."""
    for_others = quota({"pods": "1"}, scopes=["BestEffort"]), quota({"pods": "1"}, scopes=["Terminating"])
    by_class = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}
    for one in (*for_others, quota({"pods": "1"}, scopeSelector=by_class)):
        assert "008" not in examine(cluster(one), LAB_K8S_CPU="4")


def test_a_quota_for_pods_such_as_a_jobs_is_counted() -> None:
    """Quotas of NotBestEffort and NotTerminating are counted; workers with devices alone are best effort."""
    without_end = {"matchExpressions": [{"scopeName": "NotTerminating", "operator": "Exists"}]}
    for one in (quota({"pods": "2"}, scopes=["NotBestEffort"]), quota({"pods": "2"}, scopeSelector=without_end)):
        assert "pods 3, and 2 of 2 is left" in the(cluster(one), "008", LAB_K8S_CPU="4").summary
    # Workers that ask for devices alone are of best effort, their launcher is not.
    assert "pods 2, and 1 of 1 is left" in the(cluster(quota({"pods": "1"}, scopes=["BestEffort"])), "008").summary
    assert the(cluster(quota({"pods": "1"}, scopes=["NotBestEffort"])), "008").level == "ok"


# --- storage and images --------------------------------------------------------------------------------------


def storage_class(name: str, *, usual: bool = False) -> Manifest:
    """Return a storage class, the default one if `usual`."""
    annotations = {checks.DEFAULT_CLASS: "true"} if usual else {}
    return {"kind": "StorageClass", "metadata": {"name": name, "annotations": annotations}}


def test_the_claim_takes_a_class_that_is_there() -> None:
    """LAB-K8S-009 is ok for an existing or default class, else a warning that lists the classes."""
    api = cluster(storage_class("nfs"))
    assert "009" not in examine(api)
    assert the(api, "009", LAB_K8S_STORAGE_CLASS="nfs", **STORED).level == "ok"
    found = the(api, "009", LAB_K8S_STORAGE_CLASS="ceph", **STORED)
    assert (found.level, found.summary) == ("warn", "storage class ceph not found")
    assert "it has nfs" in found.fix
    assert the(api, "009", **STORED).summary == "the cluster has no default storage class"
    assert the(cluster(storage_class("nfs", usual=True)), "009", **STORED).level == "ok"


@pytest.mark.parametrize(
    ("mode", "nodes", "level"),
    [
        ("ReadWriteMany", "2", "ok"),
        ("ReadWriteOnce", "2", "error"),
        ("ReadWriteOnce", "1", "warn"),
        ("ReadWriteOncePod", "1", "error"),
    ],
)
def test_a_claim_that_one_node_alone_may_write_to_stops_a_run_on_several(mode: str, nodes: str, level: str) -> None:
    """LAB-K8S-010 by the claim's access mode and the number of workers."""
    found = the(cluster(claim(mode)), "010", LAB_NODES=nodes, **STORED)
    assert found.level == level
    if level != "ok":
        assert "kubectl -n demo delete pvc demo-storage" in found.fix


def test_a_cluster_of_one_node_may_have_a_claim_of_one_node() -> None:
    """On a cluster of one node ReadWriteOnce is ok, ReadWriteOncePod an error."""
    assert the(FakeApi(NAMESPACE, node(), claim("ReadWriteOnce")), "010", **STORED).level == "ok"
    assert the(FakeApi(NAMESPACE, node(), claim("ReadWriteOncePod")), "010", **STORED).level == "error"


@pytest.mark.parametrize(
    ("events", "level", "words"),
    [
        ([], "warn", "claim demo-storage is Pending"),
        ([event("demo-storage", "ProvisioningFailed", "no room")], "error", "Pending: ProvisioningFailed: no room"),
        ([event("demo-storage", "WaitForFirstConsumer", "waits", kind="Normal")], "ok", "once a pod needs it"),
    ],
    ids=["nobody says why", "failed", "waits for a pod"],
)
def test_a_claim_without_a_volume_is_told_with_the_reason(events: list[Manifest], level: str, words: str) -> None:
    """A pending claim is a warning, an error with a failure's event, ok if it waits for a pod."""
    found = the(cluster(claim(phase="Pending"), *events), "011", **STORED)
    assert found.level == level
    assert words in found.summary


def test_a_claim_that_has_lost_its_volume_is_an_error() -> None:
    """A claim of phase Lost is an error, LAB-K8S-011."""
    assert the(cluster(claim(phase="Lost")), "011", **STORED).level == "error"


def test_a_claim_that_is_smaller_than_the_setting_stays_so() -> None:
    """A claim smaller than LAB_K8S_STORAGE_SIZE is a warning, with the patch as fix."""
    found = the(cluster(claim(size="5Gi")), "011", **STORED)
    assert (found.level, found.summary) == ("warn", "claim demo-storage has 5Gi, and LAB_K8S_STORAGE_SIZE is 10Gi")
    assert """patch pvc demo-storage -p '{"spec":{"resources":{"requests":{"storage":"10Gi"}}}}'""" in found.fix


def test_the_pull_secret_must_be_there_and_be_one() -> None:
    """A pull secret that is missing or of another type is an error, LAB-K8S-012."""
    assert the(cluster(), "012", **REGISTRY).summary == "secret registry not found in namespace demo"
    secret = {"kind": "Secret", "metadata": {"name": "registry"}, "type": "Opaque"}
    found = the(cluster(secret), "012", **REGISTRY)
    assert found.level == "error"
    assert "is of type Opaque, not kubernetes.io/dockerconfigjson" in found.summary
    assert the(cluster({**secret, "type": "kubernetes.io/dockerconfigjson"}), "012", **REGISTRY).level == "ok"


# --- pods ----------------------------------------------------------------------------------------------------


def test_pods_that_wait_are_told_in_words_and_only_a_few() -> None:
    """Waiting pods are listed by node with reason, five at most and the number of the others."""
    image = worker(0, **waits("ImagePullBackOff", "no such image"))
    stuck = worker(1, **waits("ContainerCreating"))
    found = examine(cluster(image, stuck, event("demo-m-worker-1", "FailedMount", "no volume")))["013"]
    assert [(one.level, one.summary) for one in found] == [
        ("error", "worker-0 (demo-m-worker-0): ImagePullBackOff: no such image"),
        ("warn", "worker-1 (demo-m-worker-1): FailedMount: no volume"),
    ]
    assert found[0].fix == "kubectl -n demo describe pod demo-m-worker-0"
    many = examine(cluster(*(worker(index, **waits("CrashLoopBackOff")) for index in range(9))))["013"]
    assert len(many) == 6
    assert many[-1].summary == "and 4 more pods"


@pytest.mark.parametrize(
    ("printed", "accelerator", "level"),
    [("unlimited\n1048576", "nvidia", "ok"), ("64\n1024", "nvidia", "warn"), ("64\n1024", "cpu", "ok")],
)
def test_what_a_running_pod_may_lock_is_told(
    printed: str, accelerator: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAB-K8S-014 warns of a memory lock limit in a running worker, unless the accelerator is cpu."""

    def run(_: Any, container: str, argv: tuple[str, ...], **__: Any) -> CompletedProcess:
        """Return the planted limits; fail if another pod than worker-0 is entered."""
        assert container == "demo-m-worker-0"
        return CompletedProcess(argv, 0, printed, "")

    monkeypatch.setattr(KubernetesEngine, "exec", run)
    launcher = worker(1)
    launcher["metadata"]["name"] = "demo-m-launcher"
    launcher["metadata"]["labels"]["labctl.role"] = "launcher"
    found = the(cluster(launcher, worker(0)), "014", LAB_ACCELERATOR=accelerator)
    assert found.level == level
    assert found.summary.startswith("worker-0 may lock ")


def test_pods_that_are_being_deleted_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods of a run that has ended are neither entered nor reported as lost, though their node shows them yet."""
    monkeypatch.setattr(KubernetesEngine, "exec", lambda *_, **__: pytest.fail("it was entered"))
    leaving = worker(0), worker(1, "Failed")
    for each in leaving:
        each["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert not {"013", "014"} & set(examine(cluster(*leaving)))


def test_a_pod_without_a_shell_is_told_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a shell is a warning with exit code 127."""
    monkeypatch.setattr(KubernetesEngine, "exec", lambda _, __, argv, **___: CompletedProcess(argv, 127, "", "no sh"))
    found = the(cluster(worker(0)), "014")
    assert (found.level, found.impact) == ("warn", checks.UNKNOWN)
    assert found.summary.endswith("in worker-0 ended with exit code 127: no sh")


# --- before a run --------------------------------------------------------------------------------------------


def test_a_run_that_nothing_stands_against_goes_on_after_a_few_requests() -> None:
    """preflight() of a good cluster raises nothing and takes six requests."""
    api = cluster(claim(), {"kind": "Secret", "metadata": {"name": "registry"}, "type": checks.PULLS[0]})
    preflight(api, **STORED, **REGISTRY)
    assert len(api.asked) == 6


@pytest.mark.parametrize(
    ("change", "given", "summary"),
    [
        (lambda api: api.denied.add("create pods/exec"), {}, "you may not, in namespace demo: create pods/exec"),
        (lambda _: None, {"LAB_K8S_CPU": "64"}, "no node can hold a worker: n0, n1: 16 of cpu, not 64"),
        (lambda api: api.put(claim("ReadWriteOnce")), STORED, "claim demo-storage is ReadWriteOnce"),
        (lambda _: None, REGISTRY, "secret registry not found"),
        (lambda api: setattr(api, "fails", 0), {}, "does not answer"),
    ],
)
def test_what_would_stop_a_run_stops_it_before(
    change: Callable[[FakeApi], object], given: dict[str, str], summary: str
) -> None:
    """preflight() raises HostError with a hint for a missing right, node, claim mode, secret or server."""
    api = cluster()
    change(api)
    with pytest.raises(HostError, match=summary) as stopped:
        preflight(api, **given)
    assert stopped.value.hint


def test_what_may_not_be_looked_at_does_not_stop_a_run() -> None:
    """preflight() without the rights to look at nodes, secrets and claims raises nothing."""
    denied = ["list nodes", "get secrets", "get persistentvolumeclaims"]
    preflight(cluster(denied=denied), **STORED, **REGISTRY)

"""Checks of a cluster: all for `labctl doctor`, and the cheap ones before each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from labctl.backends.finding import LIMIT, Finding
from labctl.backends.kubernetes import capacity, pods
from labctl.backends.kubernetes.api import Manifest, Refused, Unreachable, is_ready, node_of
from labctl.backends.kubernetes.capacity import TAINTED, amount, hindrances, number, workers_held
from labctl.backends.kubernetes.examination import View, error, found_ok, warn
from labctl.backends.kubernetes.job import lab_of_pods
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.quota import quotas
from labctl.backends.kubernetes.rights import rights, rights_to_run
from labctl.backends.kubernetes.run import KINDS, definitions, kind_of
from labctl.backends.kubernetes.target import Target, read
from labctl.config import dotenv
from labctl.errors import HostError
from labctl.model import Job
from labctl.system import human
from labctl.system.parallel import pool

MOST_PODS = 5
"""Number of failing pods that are shown."""
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
PULLS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
UNKNOWN = "labctl cannot tell whether it would stop a run"
MEMLOCK = "LimitMEMLOCK=infinity for the node's container runtime: systemctl edit containerd"

Check = Callable[[View], Iterator[Finding]]


def examine(lab: ClusterLab) -> Iterator[Finding]:
    """Yield the findings of all checks in turn; if the API server is silent or refuses, an error ends them."""
    accelerator = lab.settings.text("LAB_ACCELERATOR")
    target = read(lab.settings, accelerator)
    try:
        version, kinds = lab.engine.versions()["engine"], definitions(lab.api)
        yield found_ok("LAB-K8S-001", f"{lab.api.server} is {version}; the lab's namespace is {lab.api.namespace}")
        target = read(lab.settings, accelerator, "mpijob" if kinds["mpijob"] or not kinds["trainjob"] else "trainjob")
        shape = lab_of_pods(lab.settings, lab.directory, accelerator, target, lab.name)
        view = View(lab=lab, target=target, workers=len(shape.nodes), slots=shape.nodes[0].slots)
        unknown: set[str] = set()
        for code, check in CHECKS.items():
            for finding in attempt(view, code, check):
                # A missing right may fail several checks in the same way.
                if finding.impact != UNKNOWN or finding.fix not in unknown:
                    yield finding
                unknown |= {finding.fix} if finding.impact == UNKNOWN else set()
    except (Unreachable, Refused) as failure:
        yield error("LAB-K8S-001", failure.message, "labctl can reach nothing of the lab", failure.hint)


def attempt(view: View, code: str, check: Check) -> Iterator[Finding]:
    """Yield a check's findings; a HostError becomes a warning, but Unreachable and 401 are raised."""
    try:
        yield from check(view)
    except HostError as failure:
        if isinstance(failure, Unreachable) or (isinstance(failure, Refused) and failure.status == 401):
            raise
        about = f"{SUBJECTS[code]} not known: {failure.message}"
        yield warn(code, about, UNKNOWN, failure.hint)


def preflight(lab: ClusterLab, target: Target, job: Job) -> None:
    """Run the checks of PREFLIGHT concurrently. HostError for the first finding that is an error."""
    view = View(lab=lab, target=target, workers=len(job.nodes), slots=job.nodes[0].slots)
    with pool(len(PREFLIGHT)) as threads:
        for findings in threads.map(lambda check: list(attempt(view, *check)), PREFLIGHT.items()):
            for finding in findings:
                if finding.level == "error":
                    raise HostError(finding.summary, hint=finding.fix)


# --- kinds of jobs -------------------------------------------------------------------------------------------


def kinds_of_jobs(view: View) -> Iterator[Finding]:
    """Yield ok or an error by whether the cluster has MPIJob or TrainJob; also a warning of MPIJob v1."""
    kinds = definitions(view.lab.api)
    try:
        kind = KINDS[kind_of(view.lab.api, view.lab.settings)]
    except HostError as missing:
        yield error("LAB-K8S-004", missing.message, "no job can be submitted", missing.hint)
        return
    version = {"MPIJob": "kubeflow.org/v2beta1", "TrainJob": "trainer.kubeflow.org/v1alpha1"}[kind]
    yield found_ok("LAB-K8S-004", f"the cluster has {kind} of {version}")
    if kinds["v1"]:
        impact = "where both operators run, both act on one MPIJob"
        fix = "kubectl get deployments -A | grep training-operator  # ask who runs the cluster to remove it"
        yield warn("LAB-K8S-005", "the cluster has MPIJob v1 too, of the training operator", impact, fix)


# --- nodes ---------------------------------------------------------------------------------------------------


def nodes(view: View) -> Iterator[Finding]:
    """Yield whether a node can hold a worker: ok, an error, or a warning with an autoscaler or if unknown."""
    fitting = [node for node in view.nodes if node.could_hold(view.request)]
    requested = ", ".join(f"{amount(name, many)} of {name}" for name, many in view.request.items() if name != "pods")
    if fitting:
        asks = f", which asks for {requested}" if requested else ""
        yield found_ok("LAB-K8S-006", f"{len(fitting)} of {len(view.nodes)} nodes can hold a worker{asks}")
        return
    summary = f"no node can hold a worker: {hindrances(view.nodes, view.request) or 'the cluster has no nodes'}"
    grows = capacity.grows(view.lab.api)
    if grows:
        yield warn("LAB-K8S-006", summary, "workers wait until the cluster's autoscaler adds one", remedy(view))
    elif grows is None:
        impact = "workers are never scheduled, unless the cluster has an autoscaler, which you may not see"
        yield warn("LAB-K8S-006", summary, impact, remedy(view))
    else:
        yield error("LAB-K8S-006", summary, "workers would never be scheduled", remedy(view))


def remedy(view: View) -> str:
    """Return the settings with which the node that needs least could hold a worker; kubectl without nodes."""
    if not view.nodes:
        return "kubectl get nodes"
    request = view.request
    nearest = min(view.nodes, key=lambda node: len(node.obstacles) + len(node.lacks(request)))
    taints = [text.removeprefix(TAINTED) for text in nearest.obstacles if text.startswith(TAINTED)]
    steps = [f"LAB_K8S_TOLERATIONS={dotenv.quote(' '.join(taints))}"] if taints else []
    steps += ["LAB_K8S_NODE_SELECTOR with labels that a node has"] if len(nearest.obstacles) > len(taints) else []
    keys = {"cpu": "LAB_K8S_CPU", "memory": "LAB_MEMORY", "hugepages-2Mi": "LAB_K8S_HUGEPAGES"}
    keys |= {view.target.resource: "LAB_SLOTS"}
    for name in nearest.lacks(request):
        most = nearest.allocatable.get(name, 0.0)
        other = (
            "another LAB_K8S_RESOURCE or LAB_ACCELERATOR"
            if name == view.target.resource
            else f"no {keys.get(name, name)}"
        )
        steps.append(f"{keys.get(name, name)} of at most {amount(name, most)}" if most else other)
    return f"{', '.join(steps)} in .env; labctl devices"


def room(view: View) -> Iterator[Finding]:
    """Yield ok or a warning on whether all pods of a run fit at once; nothing if no node can hold a worker."""
    cluster_nodes = capacity.nodes_with_free(view.lab.api, view.target)
    if not any(node.could_hold(view.request) for node in cluster_nodes):
        return
    total, now = (workers_held(cluster_nodes, view.request, now=at) for at in (False, True))
    away = "; ".join(f"{node.name}: {', '.join(node.passing)}" for node in cluster_nodes if node.passing)
    also = f" ({away})" if away else ""
    if min(total, now) < view.workers:
        others = " beside the pods that run now" if total >= view.workers else ""
        held = f"{min(total, now)} of {view.workers} workers with their launcher"
        impact = f"the run waits for the rest, at most {view.target.patience} s (LAB_K8S_PATIENCE)"
        fix = f"LAB_NODES={min(total, now)} in .env; labctl devices" if min(total, now) else "labctl devices"
        if not any(node.open or node.passing for node in cluster_nodes):
            # On nodes that can hold workers only the taint of the devices keeps launchers off.
            fix = f"LAB_K8S_TOLERATIONS={view.target.resource} in .env, for the launcher; labctl devices"
        yield warn("LAB-K8S-007", f"nodes have room for {held}{others}{also}", impact, fix)
        return
    known_now = " now" if cluster_nodes[0].free is not None else "; you may not see what is free now"
    yield found_ok("LAB-K8S-007", f"nodes have room for {view.workers} workers with their launcher{known_now}")


# --- storage and images --------------------------------------------------------------------------------------


def storage_class(view: View) -> Iterator[Finding]:
    """Yield ok or a warning on the storage class for the claim; nothing without storage or if it exists."""
    chosen = view.target.storage_class
    if not view.target.storage or view.claim:
        return
    classes = {item["metadata"]["name"]: item["metadata"] for item in view.lab.api.list("StorageClass")}
    usual = [name for name, item in classes.items() if item.get("annotations", {}).get(DEFAULT_CLASS) == "true"]
    if chosen in classes or (usual and not chosen):
        yield found_ok("LAB-K8S-009", f"storage class {chosen or usual[0]} provides the claim")
        return
    summary = f"storage class {chosen} not found" if chosen else "the cluster has no default storage class"
    impact = "the claim stays Pending, and all pods wait for it, unless an administrator has created a volume for it"
    existing = f"; it has {', '.join(sorted(classes))}" if classes else "; it has none"
    yield warn("LAB-K8S-009", summary, impact, f"LAB_K8S_STORAGE_CLASS in .env{existing}; kubectl get storageclass")


def access(view: View) -> Iterator[Finding]:
    """Yield ok, a warning or an error on whether all pods may write to the claim; nothing if there is none."""
    if not view.claim:
        return
    name, modes = view.claim["metadata"]["name"], modes_of(view.claim)
    if "ReadWriteMany" in modes or on_one_node(view, modes):
        yield found_ok("LAB-K8S-010", f"all pods can write to claim {name}: it is {', '.join(modes)}")
        return
    summary = f"claim {name} is {', '.join(modes)}, and pods on several nodes write to it"
    fix = f"{view.typed} delete pvc {name}  # removes what is on it; the next run makes it ReadWriteMany"
    level = error if view.workers > 1 or "ReadWriteOncePod" in modes else warn
    yield level("LAB-K8S-010", summary, "pods on other nodes than the first wait forever", fix)


def modes_of(claim: Manifest) -> list[str]:
    return list(claim.get("status", {}).get("accessModes") or claim["spec"]["accessModes"])


def on_one_node(view: View, modes: list[str]) -> bool:
    """Tell if the cluster has a single node, and the access modes allow several pods on it; False if not known."""
    if "ReadWriteOncePod" in modes:
        return False
    try:
        return len(view.nodes) == 1
    except Refused:
        return False


def volume(view: View) -> Iterator[Finding]:
    """Yield a finding on whether the claim is bound and as large as asked; nothing if there is no claim."""
    if not view.claim:
        return
    name, status = view.claim["metadata"]["name"], view.claim.get("status", {})
    phase, size = status.get("phase", "Pending"), status.get("capacity", {}).get("storage", "0")
    if phase != "Bound":
        yield unbound(view, name, phase)
    elif number(size) < number(view.target.storage):
        grow = f'{{"spec":{{"resources":{{"requests":{{"storage":"{view.target.storage}"}}}}}}}}'
        summary = f"claim {name} has {size}, and LAB_K8S_STORAGE_SIZE is {view.target.storage}"
        yield warn("LAB-K8S-011", summary, "the claim keeps its size", f"{view.typed} patch pvc {name} -p '{grow}'")
    else:
        yield found_ok("LAB-K8S-011", f"claim {name} has {size}")


def unbound(view: View, name: str, phase: str) -> Finding:
    """Return the finding of a claim without a volume: ok if it waits for a pod, error with a reason, else warning."""
    events = view.lab.api.list("Event", fields=f"involvedObject.name={name}")
    reason = pods.last_warning(events, [name])
    if not reason and any(event.get("reason") == "WaitForFirstConsumer" for event in events):
        return found_ok("LAB-K8S-011", f"claim {name} gets a volume once a pod needs it")
    summary, fix = f"claim {name} is {phase}{f': {reason}' if reason else ''}", f"{view.typed} describe pvc {name}"
    level = error if reason or phase == "Lost" else warn
    return level("LAB-K8S-011", summary, "pods wait until it is bound", fix)


def pull_secret(view: View) -> Iterator[Finding]:
    """Yield ok, or an error if LAB_K8S_PULL_SECRET does not exist or has a wrong type; nothing if not set."""
    name = view.target.pull_secret
    if not name:
        return
    secret = view.lab.api.get("Secret", name)
    options = "--docker-server=REGISTRY --docker-username=USER --docker-password=TOKEN"
    fix = f"{view.typed} create secret docker-registry {name} {options}"
    impact = "nodes cannot pull the image, unless it is public"
    if not secret:
        yield error("LAB-K8S-012", f"secret {name} not found in namespace {view.namespace}", impact, fix)
    elif secret.get("type") not in PULLS:
        fix = f"{view.typed} delete secret {name} && {fix}"
        yield error("LAB-K8S-012", f"secret {name} is of type {secret.get('type')}, not {PULLS[0]}", impact, fix)
    else:
        yield found_ok("LAB-K8S-012", f"secret {name} exists for the image's registry")


# --- pods ----------------------------------------------------------------------------------------------------


def lab_pods(view: View) -> Iterator[Finding]:
    """Yield a finding per pod that waits or failed, the first MOST_PODS; ok if none; nothing without pods."""
    if not view.pods:
        return
    waiting = [pod for pod in view.pods if not is_ready(pod) and not pods.has_ended(pod)]
    events = view.lab.api.list("Event", fields="type=Warning") if waiting else []
    wrong = {}
    for pod in view.pods:
        name = pod["metadata"]["name"]
        if why := pods.trouble(pod) or (pods.last_warning(events, [name]) if pod in waiting else ""):
            wrong[name] = (node_of(pod), why, error if pods.image_error(pod) else warn)
    for name, (node, why, level) in list(wrong.items())[:MOST_PODS]:
        fix = f"{view.typed} describe pod {name}"
        yield level("LAB-K8S-013", f"{node} ({name}): {why}", "its run waits, or has lost it", fix)
    if len(wrong) > MOST_PODS:
        yield warn("LAB-K8S-013", human.more(len(wrong) - MOST_PODS, "pods"), "as above", "labctl status")
    if not wrong:
        yield found_ok("LAB-K8S-013", f"{len(view.pods)} pods of the lab are healthy")


def limits(view: View) -> Iterator[Finding]:
    """Yield ok, or a warning if a running pod with devices may not lock all memory; nothing if none runs."""
    running = [pod for pod in view.pods if pod.get("status", {}).get("phase") == "Running"]
    if not running:
        return
    # Workers have the devices.
    pod = max(running, key=lambda pod: node_of(pod) != "launcher")
    command = ("sh", "-c", "ulimit -l && ulimit -n")
    done = view.lab.engine.exec(pod["metadata"]["name"], command, user="", limit=LIMIT)
    if done.code:
        raise HostError(f"`ulimit -l` in {node_of(pod)} ended with exit code {done.code}: {done.err.strip()}")
    memory, files = done.out.split()
    summary = f"{node_of(pod)} may lock {memory}{'' if memory == 'unlimited' else ' KiB'} of memory, open {files} files"
    if memory == "unlimited" or not view.target.resource:
        yield found_ok("LAB-K8S-014", summary)
        return
    impact = "RDMA needs locked memory: without it NCCL and similar libraries fail, or are slow"
    yield warn("LAB-K8S-014", summary, impact, f"ask who runs the cluster for {MEMLOCK}")


CHECKS: Mapping[str, Check] = {
    "LAB-K8S-002": rights,
    "LAB-K8S-004": kinds_of_jobs,
    "LAB-K8S-006": nodes,
    "LAB-K8S-007": room,
    "LAB-K8S-008": quotas,
    "LAB-K8S-009": storage_class,
    "LAB-K8S-010": access,
    "LAB-K8S-011": volume,
    "LAB-K8S-012": pull_secret,
    "LAB-K8S-013": lab_pods,
    "LAB-K8S-014": limits,
}
"""Checks of `labctl doctor`, by the code of the warning if they fail."""
PREFLIGHT: Mapping[str, Check] = {
    "LAB-K8S-002": rights_to_run,
    "LAB-K8S-006": nodes,
    "LAB-K8S-010": access,
    "LAB-K8S-012": pull_secret,
}
"""Cheap checks before each run, by code as in CHECKS."""
SUBJECTS: Mapping[str, str] = {
    "LAB-K8S-002": "your rights are",
    "LAB-K8S-004": "the kinds of jobs are",
    "LAB-K8S-006": "whether a node can hold a worker is",
    "LAB-K8S-007": "whether all workers have room is",
    "LAB-K8S-008": "what quotas leave is",
    "LAB-K8S-009": "the storage class is",
    "LAB-K8S-010": "the claim is",
    "LAB-K8S-011": "the claim's volume is",
    "LAB-K8S-012": "the pull secret is",
    "LAB-K8S-013": "the state of the lab's pods is",
    "LAB-K8S-014": "what a pod may lock is",
}
"""Subjects of these warnings, by code."""

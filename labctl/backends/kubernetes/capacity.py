"""Resources of a cluster's nodes, and the number of a lab's workers that fit on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from labctl import accelerators
from labctl.backends.devices import DeviceReport, HostDevices
from labctl.backends.kubernetes.api import Api, Manifest, Refused
from labctl.backends.kubernetes.job import HOSTNAME
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.render import LAUNCHER_REQUESTS, asked
from labctl.backends.kubernetes.target import Target, Toleration, read
from labctl.system import human
from labctl.system.parallel import pool

Amounts = Mapping[str, float]
"""Amounts by resource: cores, bytes, devices, pods."""
TAINTED = "taint "
OF_CLUSTER = "node.kubernetes.io/"
"""Prefix of taints that the cluster sets for a node's temporary conditions."""
NOTHING: Amounts = {}
BYTES = ("memory", "hugepages-2Mi", "hugepages-1Gi", "ephemeral-storage", "storage")


def number(quantity: str | int) -> float:
    """Return a Kubernetes quantity, such as ``500m``, ``8Gi`` or ``1e3``, as a float."""
    from kubernetes.utils.quantity import parse_quantity

    return float(parse_quantity(quantity))


def numbers(quantities: Mapping[str, str]) -> dict[str, float]:
    return {name: number(quantity) for name, quantity in quantities.items()}


def amount(resource: str, value: float) -> str:
    """Return an amount of a resource as text: ``7.5 GiB`` for bytes, ``2`` for others."""
    if resource.rpartition(".")[2] in BYTES:
        return human.memory(value)
    return human.number(value)


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node, its allocatable resources, and the obstacles to the lab's workers whatever they request."""

    name: str
    hostname: str = ""
    """Its label HOSTNAME."""
    address: str = ""
    """Its internal address; empty if not reported."""
    allocatable: Amounts
    capacity: Amounts = NOTHING
    """Resources that it has, allocatable or not: a device that is unhealthy is not."""
    obstacles: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    """Temporary obstacles: the node is cordoned or not ready."""
    open: bool = True
    """True if launchers may be placed on it; they need no device and select no labels."""
    free: Amounts | None = None
    """Resources not requested by its pods; None if pods of all namespaces may not be listed."""

    def lacks(self, request: Amounts) -> tuple[str, ...]:
        """Return the names of the requested resources of which the node has too little in all."""
        return tuple(name for name, many in request.items() if self.allocatable.get(name, 0.0) < many)

    def is_made_for(self, request: Amounts) -> bool:
        """Return True if the node has no obstacles and its capacity covers the request."""
        has = {**self.allocatable, **self.capacity}
        return not self.obstacles and all(has.get(name, 0.0) >= many for name, many in request.items())

    def could_hold(self, request: Amounts) -> bool:
        """Return True if the node has no obstacles and its allocatable resources cover the request."""
        return not self.obstacles and not self.lacks(request)

    def holds(self, request: Amounts, *, now: bool = False, beside: Amounts = NOTHING) -> int:
        """Return how many pods of this request fit, with ``now`` beside present ones; 0 if out of use.

        ``beside``: the request of another pod that has to fit too.
        """
        if self.obstacles or self.passing:
            return 0
        return int(min(self.room(name, now=now, beside=beside) // many for name, many in request.items()))

    def takes(self, launcher: Amounts, *, now: bool = False) -> bool:
        """Tell if a launcher may be placed on the node and fits, with ``now`` beside its present pods."""
        return self.open and all(self.room(name, now=now) >= many for name, many in launcher.items())

    def room(self, name: str, *, now: bool = False, beside: Amounts = NOTHING) -> float:
        """Return how much of a resource is allocatable, with ``now`` free if known, less ``beside``."""
        room = self.free if now and self.free is not None else self.allocatable
        return max(0.0, room.get(name, 0.0) - beside.get(name, 0.0))


def workers_held(candidates: Iterable[ClusterNode], request: Amounts, *, now: bool = False) -> int:
    """Return how many workers fit beside a launcher, with ``now`` beside present pods; 0 without its place."""
    launcher = {**numbers(LAUNCHER_REQUESTS), "pods": 1.0}
    total, costs = 0, []
    for node in candidates:
        held = node.holds(request, now=now)
        total += held
        if node.takes(launcher, now=now):
            costs.append(held - node.holds(request, now=now, beside=launcher))
    return total - min(costs) if costs else 0


def request_of(target: Target, slots: int) -> dict[str, float]:
    """Return the resources that a worker requests, with one of the node's ``pods``."""
    return {**numbers(asked(target, slots)), "pods": 1.0}


def nodes(api: Api, target: Target) -> tuple[ClusterNode, ...]:
    """Return the nodes sorted by name, without free resources. Refused if they may not be listed."""
    listed = (_node(node, target) for node in api.list("Node"))
    return tuple(sorted(listed, key=lambda node: node.name))


def nodes_with_free(api: Api, target: Target, beside: str = "") -> tuple[ClusterNode, ...]:
    """Return nodes with what pods, not lab ``beside``'s, leave free if known. Refused if nodes are hidden."""
    with pool(2) as threads:
        listing, used = threads.submit(nodes, api, target), threads.submit(_used, api, beside)
    taken = used.result()
    if taken is None:
        return listing.result()
    return tuple(_with_free(node, taken.get(node.name, {})) for node in listing.result())


def _node(node: Manifest, target: Target) -> ClusterNode:
    """Return the ClusterNode of a manifest; lasting taints and missing labels are obstacles, cordons pass."""
    spec, labels = node["spec"], node["metadata"].get("labels", {})
    unlabelled = [f"no label {key}={value}" for key, value in target.node_selector if labels.get(key) != value]
    taints = [taint for taint in spec.get("taints") or () if taint["effect"] != "PreferNoSchedule"]
    # Unique, as a taint may be listed twice.
    names = dict.fromkeys(map(_taint, _kept_off(taints, target.tolerated)))
    lasting = [f"{TAINTED}{name}" for name in names if not name.startswith(OF_CLUSTER)]
    passing = [f"{TAINTED}{name}" for name in names if name.startswith(OF_CLUSTER)]
    addresses = node["status"].get("addresses") or ()
    # The cluster's own taints mean the same.
    plain = ["cordoned"] * bool(spec.get("unschedulable")) + ["not ready"] * (not _ready(node))
    return ClusterNode(
        name=node["metadata"]["name"],
        hostname=hostname_of(node),
        address=next((each["address"] for each in addresses if each["type"] == "InternalIP"), ""),
        allocatable=numbers(node["status"].get("allocatable", {})),
        capacity=numbers(node["status"].get("capacity", {})),
        obstacles=(*unlabelled, *lasting),
        passing=tuple(plain or passing),
        open=not plain and not _kept_off(taints, target.tolerations),
    )


def hostname_of(node: Manifest) -> str:
    """Return the hostname of a node, by its label; its name if it has none."""
    return str(node["metadata"].get("labels", {}).get(HOSTNAME, node["metadata"]["name"]))


def _kept_off(taints: Iterable[Manifest], tolerated: Sequence[Toleration]) -> list[Manifest]:
    """Return the taints that none of the tolerations covers."""
    return [taint for taint in taints if not any(map(partial(_tolerates, taint), tolerated))]


def _ready(node: Manifest) -> bool:
    """Tell if a node is ready; True if it does not report that condition."""
    conditions = node["status"].get("conditions") or ()
    return all(condition["status"] == "True" for condition in conditions if condition["type"] == "Ready")


def _tolerates(taint: Manifest, allowed: Toleration) -> bool:
    """Tell if a toleration covers a taint; its empty value or effect covers any."""
    return (
        allowed.key == taint["key"]
        and allowed.value in ("", taint.get("value", ""))
        and allowed.effect in ("", taint["effect"])
    )


def _taint(taint: Manifest) -> str:
    """Return a taint as text, KEY=VALUE:EFFECT, as in LAB_K8S_TOLERATIONS."""
    value = taint.get("value")
    return f"{taint['key']}{f'={value}' if value else ''}:{taint['effect']}"


def _used(api: Api, beside: str) -> dict[str, dict[str, float]] | None:
    """Return pods' requests summed by node, without ended or leaving pods and lab ``beside``'s; None if hidden."""
    try:
        listed = api.request("GET", "/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
    except Refused as error:
        if error.status == 403:
            return None
        raise
    used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in listed["items"]:
        metadata = pod["metadata"]
        is_here = metadata.get("namespace", api.namespace) == api.namespace
        is_own = is_here and metadata.get("labels", {}).get("labctl.lab") == beside
        if "deletionTimestamp" in metadata or is_own:
            continue
        for name, many in _asked_by(pod["spec"]).items():
            used[pod["spec"].get("nodeName", "")][name] += many
    return used


def _asked_by(pod: Manifest) -> dict[str, float]:
    """Return a pod's total request: sum of its containers, or per resource its largest init container if more.

    Source: the Kubernetes documentation, Init Containers, Resource sharing within containers.
    """
    total: dict[str, float] = defaultdict(float, {"pods": 1.0} | numbers(pod.get("overhead") or {}))
    for container in pod["containers"]:
        for name, many in _requests(container).items():
            total[name] += many
    for container in pod.get("initContainers") or ():
        for name, many in _requests(container).items():
            total[name] = max(total[name], many)
    return total


def _requests(container: Manifest) -> dict[str, float]:
    return numbers(container.get("resources", {}).get("requests") or {})


def _with_free(node: ClusterNode, taken: Amounts) -> ClusterNode:
    return replace(node, free={name: many - taken.get(name, 0.0) for name, many in node.allocatable.items()})


def hindrances(candidates: Iterable[ClusterNode], request: Amounts) -> str:
    """Return up to four reasons why nodes cannot hold this request, each after the nodes' names, as text."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for node in candidates:
        lacking = (
            f"{amount(name, node.allocatable.get(name, 0.0))} of {name}, not {amount(name, request[name])}"
            for name in node.lacks(request)
        )
        for reason in (*node.obstacles, *lacking):
            reasons[reason].append(node.name)
    return "; ".join(f"{human.listed(names, 3)}: {reason}" for reason, names in list(reasons.items())[:4])


def grows(api: Api) -> bool | None:
    """Return True if the cluster has a cluster-autoscaler or Karpenter, False if not, None if the user may not see.

    Sources: kubernetes/autoscaler, whose status is this ConfigMap; karpenter.sh.
    """
    hidden = False
    for path in ("/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status", "/apis/karpenter.sh"):
        try:
            api.request("GET", path)
        except Refused as error:
            hidden |= error.status != 404
            continue
        return True
    return None if hidden else False


# --- labctl devices ------------------------------------------------------------------------------------------


def devices(lab: ClusterLab) -> DeviceReport:
    """Return a device report per node; ``auto``: the first kind that a node has. Refused if nodes are hidden."""
    accelerator = lab.settings.text("LAB_ACCELERATOR")
    if accelerator == "auto":
        accelerator = next(_kinds(lab.api.list("Node")), accelerators.CPU)
    target = read(lab.settings, accelerator)
    cluster_nodes = nodes_with_free(lab.api, target)
    return DeviceReport(tuple(_host(node, accelerator, target.resource) for node in cluster_nodes))


def _kinds(manifests: Iterable[Manifest]) -> Iterator[str]:
    """Yield the name of each accelerator that a node has resources of, node by node, with repetitions."""
    for node in manifests:
        for name, module in accelerators.modules().items():
            if any(number(node["status"].get("allocatable", {}).get(resource, 0)) for resource in module.resources):
                yield name


def _host(node: ClusterNode, accelerator: str, resource: str) -> HostDevices:
    """Return a node's device report by allocatable resources; ``accelerator`` is None if it has none of it."""
    has = not resource or node.allocatable.get(resource, 0.0) > 0
    counted = resource or "cpu"
    free = "" if node.free is None else f", {amount(counted, node.free.get(counted, 0.0))} free"
    total = f"{amount(counted, node.allocatable.get(counted, 0.0))} of {counted}{free}"
    return HostDevices(
        name=node.name,
        accelerator=accelerator if has else None,
        reason=total if has else f"no {resource}",
        cpus=tuple(range(int(node.allocatable.get("cpu", 0.0)))),
        numa=(),
        memory=int(node.allocatable.get("memory", 0.0)),
        devices=(),
        drivers={},
        groups=(),
        infiniband=(),
        fabrics=(),
        nodes=(),
        warnings=(*node.obstacles, *node.passing),
    )

"""What a cluster's nodes have for a lab, and whether they can hold its workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from labctl import accelerators
from labctl.backends.devices import DeviceReport, HostDevices
from labctl.backends.kubernetes.api import Api, Manifest, Refused
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.render import LAUNCHER_REQUESTS, asked
from labctl.backends.kubernetes.target import Target, Toleration, read
from labctl.system.parallel import pool

Amounts = Mapping[str, float]
"""By resource: cores, bytes, devices, pods."""
TAINTED = "taint "
NOTHING: Amounts = {}
BYTES = ("memory", "hugepages-2Mi", "hugepages-1Gi", "ephemeral-storage", "storage")


def number(quantity: str | int) -> float:
    """A quantity of Kubernetes, such as ``500m``, ``8Gi`` or ``1e3``."""
    from kubernetes.utils.quantity import parse_quantity

    return float(parse_quantity(quantity))


def numbers(quantities: Mapping[str, str]) -> dict[str, float]:
    return {name: number(quantity) for name, quantity in quantities.items()}


def amount(resource: str, value: float) -> str:
    """An amount in words, such as ``7.5 GiB`` or ``2``."""
    if resource.rpartition(".")[2] in BYTES:
        return f"{value / (1 << 30):.4g} GiB"
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node, what it may hand out, and what keeps the lab's workers from it, whatever they ask for."""

    name: str
    allocatable: Amounts
    obstacles: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    """Obstacles of today: it is cordoned, or does not answer."""
    open: bool = True
    """Whether launchers are placed on it, which need no device and have no labels to look for."""
    free: Amounts | None = None
    """What pods leave of it; None where those of all namespaces may not be listed."""

    def lacks(self, request: Amounts) -> tuple[str, ...]:
        """The resources that it can never hand out to a pod which asks for so much."""
        return tuple(name for name, wanted in request.items() if self.allocatable.get(name, 0.0) < wanted)

    def could_hold(self, request: Amounts) -> bool:
        """Whether such a pod may ever be placed on it."""
        return not self.obstacles and not self.lacks(request)

    def holds(self, request: Amounts, *, now: bool = False, beside: Amounts = NOTHING) -> int:
        """How many such pods it has room for ``beside`` another: in all, or with those that are there ``now``."""
        if self.obstacles or self.passing:
            return 0
        return int(min(self._room(name, now, beside) // many for name, many in request.items()))

    def takes(self, launcher: Amounts, *, now: bool = False) -> bool:
        """Whether a launcher has room on it."""
        return self.open and all(self._room(name, now, NOTHING) >= many for name, many in launcher.items())

    def _room(self, name: str, now: bool, beside: Amounts) -> float:
        room = self.free if now and self.free is not None else self.allocatable
        return max(0.0, room.get(name, 0.0) - beside.get(name, 0.0))


def workers_held(known: Iterable[ClusterNode], request: Amounts, *, now: bool = False) -> int:
    """How many workers have room together with their launcher, in all or ``now``; none where that has none."""
    launcher = {**numbers(LAUNCHER_REQUESTS), "pods": 1.0}
    total, costs = 0, []
    for node in known:
        held = node.holds(request, now=now)
        total += held
        if node.takes(launcher, now=now):
            costs.append(held - node.holds(request, now=now, beside=launcher))
    return total - min(costs) if costs else 0


def request_of(target: Target, slots: int) -> dict[str, float]:
    """What a worker takes of its node, with its place among the node's pods."""
    return {**numbers(asked(target, slots)), "pods": 1.0}


def nodes(api: Api, target: Target) -> tuple[ClusterNode, ...]:
    """The nodes by name, without what is free on them. Refused where they may not be listed."""
    found = (_node(one, target) for one in api.list("Node"))
    return tuple(sorted(found, key=lambda one: one.name))


def nodes_with_free(api: Api, target: Target) -> tuple[ClusterNode, ...]:
    """The nodes, with what is free where pods of all namespaces may be listed. Refused."""
    with pool(2) as threads:
        known, used = threads.submit(nodes, api, target), threads.submit(_used, api)
    taken = used.result()
    if taken is None:
        return known.result()
    return tuple(_with_free(one, taken.get(one.name, {})) for one in known.result())


def _node(node: Manifest, target: Target) -> ClusterNode:
    spec, labels = node["spec"], node["metadata"].get("labels", {})
    unlabelled = [f"no label {key}={value}" for key, value in target.node_selector if labels.get(key) != value]
    taints = [one for one in spec.get("taints") or () if one["effect"] != "PreferNoSchedule"]
    kept_off = _kept_off(taints, target.tolerated)
    tainted = {_taint(one): f"{TAINTED}{_taint(one)}" for one in kept_off}
    today = [words for taint, words in tainted.items() if taint.startswith("node.kubernetes.io/")]
    # The cluster's own taints say these in other words.
    plain = ["cordoned"] * bool(spec.get("unschedulable")) + ["not ready"] * (not _ready(node))
    return ClusterNode(
        name=node["metadata"]["name"],
        allocatable=numbers(node["status"].get("allocatable", {})),
        obstacles=(*unlabelled, *(words for words in tainted.values() if words not in today)),
        passing=tuple(plain or today),
        open=not plain and not _kept_off(taints, target.tolerations),
    )


def _kept_off(taints: Iterable[Manifest], tolerated: Iterable[Toleration]) -> list[Manifest]:
    """The taints that keep a pod away which tolerates so much."""
    return [one for one in taints if not any(_tolerates(allowed, one) for allowed in tolerated)]


def _ready(node: Manifest) -> bool:
    conditions = node["status"].get("conditions") or ()
    return all(one["status"] == "True" for one in conditions if one["type"] == "Ready")


def _tolerates(allowed: Toleration, taint: Manifest) -> bool:
    return (
        allowed.key == taint["key"]
        and allowed.value in ("", taint.get("value", ""))
        and allowed.effect in ("", taint["effect"])
    )


def _taint(taint: Manifest) -> str:
    """As LAB_K8S_TOLERATIONS has it."""
    value = taint.get("value")
    return f"{taint['key']}{f'={value}' if value else ''}:{taint['effect']}"


def _used(api: Api) -> dict[str, dict[str, float]] | None:
    """What the pods on each node have asked it for; None where pods of all namespaces may not be listed."""
    try:
        found = api.request("GET", "/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
    except Refused as error:
        if error.status == 403:
            return None
        raise
    used: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in found["items"]:
        for name, many in _asked_by(pod["spec"]).items():
            used[pod["spec"].get("nodeName", "")][name] += many
    return used


def _asked_by(pod: Manifest) -> dict[str, float]:
    """What a pod takes of its node: the sum of its containers, or its largest init container.

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


def hindrances(known: Iterable[ClusterNode], request: Amounts) -> str:
    """Why no node can hold a pod that asks for so much: each reason with the nodes that it is true of."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for node in known:
        lacking = (
            f"{amount(name, node.allocatable.get(name, 0.0))} of {name}, not {amount(name, request[name])}"
            for name in node.lacks(request)
        )
        for reason in (*node.obstacles, *lacking):
            reasons[reason].append(node.name)
    return "; ".join(f"{_some(names)}: {reason}" for reason, names in list(reasons.items())[:4])


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def grows(api: Api) -> bool | None:
    """Whether the cluster makes nodes when pods wait for them; None where this person may not see it.

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
    """The nodes of the cluster, without LAB_ACCELERATOR for what they have. Refused where they may not be listed."""
    wanted = lab.settings.text("LAB_ACCELERATOR")
    if wanted == "auto":
        wanted = next(_kinds(lab.api.list("Node")), accelerators.CPU)
    target = read(lab.settings, wanted)
    found = nodes_with_free(lab.api, target)
    return DeviceReport(tuple(_host(one, wanted, target.resource) for one in found))


def _kinds(found: Iterable[Manifest]) -> Iterator[str]:
    """The accelerators whose resources nodes have."""
    for node in found:
        for name, module in accelerators.modules().items():
            if any(number(node["status"].get("allocatable", {}).get(one, 0)) for one in module.resources):
                yield name


def _host(node: ClusterNode, accelerator: str, resource: str) -> HostDevices:
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

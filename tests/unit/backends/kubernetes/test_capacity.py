from __future__ import annotations

from typing import Any

import pytest
from support.clusters import GPU, lab, node, pod, target
from support.fake_api import FakeApi

from labctl.backends.kubernetes import capacity
from labctl.backends.kubernetes.api import Refused
from labctl.backends.kubernetes.capacity import ClusterNode


def only(api: FakeApi, **given: str) -> ClusterNode:
    """Return the only node of the cluster, as capacity.nodes() reads it with these settings."""
    (found,) = capacity.nodes(api, target(**given))
    return found


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("500m", 0.5), ("8Gi", 8 << 30), ("100k", 100_000), ("1e3", 1000), ("2", 2), ("312600m", 312.6)],
)
def test_quantities_are_read(quantity: str, value: float) -> None:
    """number() reads Kubernetes quantities with m, k, Gi and exponents."""
    assert capacity.number(quantity) == value


def test_amounts_are_told_as_people_say_them() -> None:
    """amount() writes memory in GiB and other resources as numbers with thousands separators."""
    assert capacity.amount("memory", 1.5 * (1 << 30)) == "1.5 GiB"
    assert capacity.amount("requests.memory", 2 << 30) == "2 GiB"
    assert capacity.amount("cpu", 7.5) == "7.5"
    assert capacity.amount("count/pods", 12_345) == "12,345"


def test_a_node_holds_as_many_workers_as_its_scarcest_resource() -> None:
    """holds() is the least quotient of a node's resources; lacks() names those that it has too little of."""
    found = only(FakeApi(node()))
    assert found.holds({"cpu": 4.0, GPU: 1.0, "pods": 1.0}) == 4
    assert found.holds({"cpu": 1.0, GPU: 3.0, "pods": 1.0}) == 2
    assert found.holds({"cpu": 17.0, "pods": 1.0}) == 0
    assert found.lacks({"cpu": 17.0, "hugepages-2Mi": 1.0, GPU: 8.0}) == ("cpu", "hugepages-2Mi")


def test_a_taint_keeps_workers_away_unless_it_is_tolerated() -> None:
    """A NoSchedule taint is an obstacle unless LAB_K8S_TOLERATIONS has it; PreferNoSchedule is none."""
    api = FakeApi(node(taints=("reserved=team:NoSchedule",)))
    assert only(api).obstacles == ("taint reserved=team:NoSchedule",)
    assert not only(api).could_hold({})
    for tolerated in ("reserved", "reserved=team", "reserved=team:NoSchedule"):
        assert only(api, LAB_K8S_TOLERATIONS=tolerated).obstacles == ()
    for other in ("other", "reserved=others", "reserved=team:NoExecute"):
        assert only(api, LAB_K8S_TOLERATIONS=other).obstacles
    assert only(FakeApi(node(taints=("slow=yes:PreferNoSchedule",)))).obstacles == ()


def test_a_taint_for_the_workers_own_devices_keeps_none_away() -> None:
    """A taint named as the accelerator's resource is no obstacle for workers with that accelerator."""
    api = FakeApi(node(taints=(f"{GPU}=present:NoSchedule",)))
    assert only(api).obstacles == ()
    assert only(api, LAB_ACCELERATOR="habana").obstacles == (f"taint {GPU}=present:NoSchedule",)


def test_a_node_without_the_label_that_workers_want_takes_none() -> None:
    """A node without the label of LAB_K8S_NODE_SELECTOR has that as an obstacle."""
    assert only(FakeApi(node()), LAB_K8S_NODE_SELECTOR="rack=7").obstacles == ()
    assert only(FakeApi(node()), LAB_K8S_NODE_SELECTOR="rack=8").obstacles == ("no label rack=8",)


def test_a_node_that_is_away_today_may_hold_workers_later() -> None:
    """A node that is not ready holds no worker, but could_hold() one later."""
    api = FakeApi(node(ready="Unknown", taints=("node.kubernetes.io/unreachable=:NoSchedule",)))
    found = only(api)
    assert (found.obstacles, found.passing) == ((), ("not ready",))
    assert found.could_hold({"cpu": 1.0})
    assert found.holds({"cpu": 1.0}) == 0


def test_a_launcher_takes_its_room_where_that_costs_no_worker() -> None:
    """workers_held() counts a worker less if the launcher has no other node."""
    whole = {"cpu": 16.0, "pods": 1.0}
    assert capacity.workers_held(capacity.nodes(FakeApi(node("n0"), node("n1")), target()), whole) == 1
    small = node("n2", cpu="2")
    assert capacity.workers_held(capacity.nodes(FakeApi(node("n0"), node("n1"), small), target()), whole) == 2


def test_a_launcher_is_placed_where_what_all_pods_tolerate_lets_it() -> None:
    """The launcher needs a node that it tolerates; a taint for devices is tolerated by workers alone."""
    whole, small = {"cpu": 16.0, "pods": 1.0}, node("n2", cpu="2")
    reserved = [node(f"n{index}", taints=("reserved=team:NoSchedule",)) for index in range(2)]
    known = capacity.nodes(FakeApi(*reserved), target(LAB_K8S_TOLERATIONS="reserved"))
    assert capacity.workers_held(known, whole) == 1
    # Nodes that are kept for devices are workers' alone.
    kept = [node(f"n{index}", taints=(f"{GPU}=present:NoSchedule",)) for index in range(2)]
    assert capacity.workers_held(capacity.nodes(FakeApi(*kept), target()), whole) == 0
    assert capacity.workers_held(capacity.nodes(FakeApi(*kept, small), target()), whole) == 2
    known = capacity.nodes(FakeApi(*kept), target(LAB_K8S_TOLERATIONS=GPU))
    assert capacity.workers_held(known, whole) == 1


def test_what_is_free_is_less_what_pods_ask_for() -> None:
    """free is allocatable without the requests of pods, init containers and overhead."""
    mixed = pod("b", cpu="1")
    mixed["spec"] |= {"initContainers": [{"resources": {"requests": {"cpu": "3"}}}], "overhead": {"memory": "1Gi"}}
    api = FakeApi(node(), node("n1"), pod("a", cpu="500m", **{GPU: "2"}), mixed)
    first, second = capacity.nodes_with_free(api, target())
    assert first.free
    assert (first.free["cpu"], first.free[GPU], first.free["pods"]) == (12.5, 6, 108)
    assert first.free["memory"] == 63 << 30
    assert second.free == second.allocatable


def test_what_is_free_is_unknown_to_who_may_not_list_all_pods() -> None:
    """Without the right to list pods free is None, and holds() counts by allocatable."""
    (found,) = capacity.nodes_with_free(FakeApi(node(), denied=["list pods"]), target())
    assert found.free is None
    assert found.holds({"cpu": 8.0}, now=True) == 2


def test_why_no_node_holds_a_worker_is_told_with_the_nodes() -> None:
    """hindrances() tells what nodes lack, three by name, and taints."""
    api = FakeApi(*(node(f"n{index}", cpu="4") for index in range(4)), node("x", taints=("a=b:NoSchedule",)))
    words = capacity.hindrances(capacity.nodes(api, target()), {"cpu": 8.0})
    assert words == "n0, n1, n2 and 1 more: 4 of cpu, not 8; x: taint a=b:NoSchedule"


def test_devices_tells_what_each_node_has() -> None:
    """devices() tells each node's devices, free ones, cores, memory, and a taint as a warning."""
    small = node("n1", taints=("reserved=team:NoSchedule",), **{GPU: "0"})
    report = capacity.devices(lab(FakeApi(node(), small, pod("a", **{GPU: "2"}))))
    first, second = report.hosts
    assert (first.name, first.accelerator, first.reason) == ("n0", "nvidia", f"8 of {GPU}, 6 free")
    assert (len(first.cpus), first.memory, first.warnings) == (16, 64 << 30, ())
    assert (second.accelerator, second.reason) == (None, f"no {GPU}")
    assert second.warnings == ("taint reserved=team:NoSchedule",)


def test_devices_says_no_free_where_other_peoples_pods_are_hidden() -> None:
    """devices() without the right to list pods tells the devices without free ones."""
    (found,) = capacity.devices(lab(FakeApi(node(), denied=["list pods"]))).hosts
    assert found.reason == f"8 of {GPU}"


def test_devices_finds_the_accelerator_that_nodes_have() -> None:
    """devices() with `auto` finds nvidia by the nodes' resources, else cpu."""
    (found,) = capacity.devices(lab(FakeApi(node()), LAB_ACCELERATOR="auto")).hosts
    assert (found.accelerator, found.reason) == ("nvidia", f"8 of {GPU}, 8 free")
    none: dict[str, Any] = {GPU: "0"}
    (found,) = capacity.devices(lab(FakeApi(node(**none)), LAB_ACCELERATOR="auto")).hosts
    assert (found.accelerator, found.reason) == ("cpu", "16 of cpu, 16 free")


def test_devices_names_the_right_of_the_cluster_that_it_takes() -> None:
    """devices() without the right to list nodes raises Refused with the clusterrole as hint."""
    with pytest.raises(Refused) as refused:
        capacity.devices(lab(FakeApi(node(), denied=["list nodes"])))
    assert "kubectl create clusterrole labctl-list-nodes --verb=list --resource=nodes" in refused.value.hint

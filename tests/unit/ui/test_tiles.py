"""Tiles of nodes from made-up states, samples, verdicts and findings."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.backends.devices import DetectedDevice, DeviceReport, HostDevices, NodeShare
from labctl.backends.finding import error, ok
from labctl.backends.health import Kept
from labctl.backends.status import LabStatus, NodeStatus, RunState
from labctl.health.model import Condition, Reading, Snapshot
from labctl.model import HERE, Hang, Rank, Result
from labctl.records.samples import NodeSamples
from labctl.records.samples import Reading as Sample
from labctl.runs.labs import LabNow
from labctl.ui.tiles import Known, Tile, tiles

RUN = "20260102-150405-opt-tiny-3fa2c1"
HOT = Reading(name="device temperature", value=81.0, unit="°C", source="hwmon", item="CARD 1")


def node(name: str = "worker-0", **changes: Any) -> NodeStatus:
    """Return a worker on gpu-0 that runs."""
    usual = {"role": "worker", "host": "gpu-0", "state": "running", "devices": ("0", "1")}
    return NodeStatus(name=name, **{**usual, **changes})


def now(*nodes: NodeStatus, **changes: Any) -> LabNow:
    """Return a lab that is up, with a run under way."""
    runs = (RunState(RUN, "running", "3fa2c1", tuple(each.name for each in nodes)),)
    return LabNow(status=LabStatus(lab="demo", state="up", nodes=nodes, unreachable=(), runs=runs), **changes)


def device(number: int, of: str) -> DetectedDevice:
    """Return a device of a node."""
    return DetectedDevice(id=str(number), path=f"/dev/card{number}", name="H9000", kind="card", node=of, leased_by="")


def report(*devices: DetectedDevice, **changes: Any) -> DeviceReport:
    """Return the devices of gpu-0."""
    usual: dict[str, Any] = {
        "accelerator": "card", "reason": "", "cpus": tuple(range(16)), "numa": (), "memory": 0, "devices": devices,
        "drivers": {}, "groups": (), "infiniband": (), "fabrics": (), "nodes": (), "warnings": (),
    }  # fmt: skip
    return DeviceReport((HostDevices(name="gpu-0", **{**usual, **changes}),))


def kept(*wrong: Condition, readings: tuple[Reading, ...] = ()) -> Kept:
    """Return a verdict of an hour ago."""
    return Kept(last=Snapshot(time=1000.0, readings=readings), level="bad", wrong=wrong)


def only(lab: LabNow, **known: Any) -> Tile:
    """Return the tile of a lab's only node."""
    (tile,) = tiles(lab, Known(**known))
    return tile


@pytest.mark.parametrize(
    ("state", "health", "reached", "word", "kind"),
    [
        ("running", None, False, "running", "good"),
        ("running", "healthy", False, "running", "good"),
        ("running", "starting", True, "running, reachable", "good"),
        ("running", "starting", False, "running, starting", "unsure"),
        ("running", "unhealthy", False, "running, unhealthy", "failed"),
        ("paused", "healthy", False, "paused", "unsure"),
        ("exited", None, False, "exited", "failed"),
        ("missing", None, False, "missing", "not-reached"),
        ("unreachable", None, False, "unreachable", "not-reached"),
    ],
)
def test_a_state_is_a_word_and_a_class(state: str, health: str | None, reached: bool, word: str, kind: str) -> None:
    tile = only(now(node(state=state, health=health, reached=reached)))
    assert (tile.state.text, tile.state.kind) == (word, kind)


def test_the_devices_of_a_node_have_the_latest_samples_of_its_run() -> None:
    """Devices of a node are numbered from 0 in its samples, whatever their ids on the host."""
    values = {
        "temperature": Sample(64, "°C"),
        "utilisation": Sample(98, "%"),
        "throttle reasons": Sample(4, "bit mask"),
    }
    samples = NodeSamples(node="worker-1", values={"CPU": Sample(2.5, "cores")}, devices={"1": values})
    lab = now(node("worker-1", devices=("2", "3"), run=RUN), samples={"worker-1": samples})
    devices = report(device(2, "worker-1"), device(3, "worker-1"))
    tile = only(lab, devices=devices, kept={"gpu-0": kept(readings=(HOT,))})
    assert [(each.name, each.values) for each in tile.devices] == [
        ("2: H9000", ()),
        ("3: H9000", ("64 °C", "utilisation 98 %")),
    ]
    assert (tile.values, tile.source, tile.read) == (("CPU 2.5 cores",), "run", None)
    assert (tile.run, tile.run_name) == (RUN, "3fa2c1")


def test_without_a_run_devices_have_the_temperature_of_the_last_look_and_its_age() -> None:
    devices = report(device(0, "worker-0"), device(1, "worker-0"))
    tile = only(now(node()), devices=devices, kept={"gpu-0": kept(readings=(HOT,))})
    assert [each.values for each in tile.devices] == [(), ("device temperature 81 °C",)]
    assert (tile.source, tile.read) == ("health", 1000.0)


def test_a_fault_of_a_device_is_told_of_the_node_that_has_it_alone() -> None:
    fault = Condition(
        check="pcie-width", subject="card", level="bad", item="CARD 1", text="PCIe width 8, 16 on 7 others"
    )
    whole = Condition(check="disk", subject="disk", level="remark", text="disk 96 % full")
    devices = report(device(0, "worker-0"), device(1, "worker-1"))
    lab = now(node("worker-0", devices=("0",)), node("worker-1", devices=("1",)))
    first, second = tiles(lab, Known(devices=devices, kept={"gpu-0": kept(fault, whole)}))
    assert [remark.text for remark in first.remarks] == ["disk 96 % full"]
    assert [remark.text for remark in second.remarks] == ["CARD 1: PCIe width 8, 16 on 7 others", "disk 96 % full"]
    assert first.health
    assert (first.health.text, first.examined) == ("bad", 1000.0)


@pytest.mark.parametrize(("host", "shown"), [("gpu-0", "gpu-0"), (HERE, "this machine"), ("-", "")])
def test_a_node_is_on_a_host_or_waits_for_one(host: str, shown: str) -> None:
    assert tiles(now(node(host=host)), Known())[0].host == shown


def test_findings_of_doctor_are_on_the_tiles_of_their_node_and_host() -> None:
    findings = (
        error("LAB-SSH-001", "sshd does not answer", "no run", "labctl up", node="worker-1"),
        error("LAB-DISK-004", "the disk is full", "no record", "docker system df", node="gpu-0"),
        ok("LAB-NET-001", "the network is there", node="worker-0"),
    )
    first, second = tiles(now(node("worker-0"), node("worker-1")), Known(findings=findings))
    assert [remark.of for remark in first.remarks] == ["LAB-DISK-004"]
    assert [(remark.of, remark.fix) for remark in second.remarks] == [
        ("LAB-SSH-001", "labctl up"),
        ("LAB-DISK-004", "docker system df"),
    ]


def test_the_sentence_of_a_hang_is_on_the_tiles_of_its_run() -> None:
    hang = Hang(kind="collective", sentence="rank 1 waits in all_reduce #6")
    tile = only(now(node(run=RUN), hangs={RUN: hang}))
    assert [remark.text for remark in tile.remarks] == ["rank 1 waits in all_reduce #6"]


def test_a_run_that_ended_by_a_hang_is_told_on_the_nodes_that_others_waited_for() -> None:
    hang = Hang(kind="collective", sentence="rank 1 never came", nodes=("worker-1",))
    ranks = (Rank(rank=0, node="worker-0"), Rank(rank=1, node="worker-1"))
    last = Result(
        run_id=RUN, workload="opt", launcher="", lab="", verdict="ERROR", cause="stalled", message="", exit_code=4,
        ranks=ranks, hang=hang,
    )  # fmt: skip
    first, second = tiles(now(node("worker-0"), node("worker-1")), Known(last=last))
    assert first.remarks == ()
    assert [remark.text for remark in second.remarks] == [f"run {RUN}: rank 1 never came"]


def test_a_node_without_devices_has_its_share_of_the_cores() -> None:
    share = NodeShare(name="worker-0", slots=1, cpus=(0, 1), devices=())
    assert only(now(node(devices=())), devices=report(nodes=(share,))).hardware == "2 of 16 CPUs"

"""InfiniBand and RoCE ports: state, rate, link errors, and adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.health_trees import answers, fuzzed, plant, printed, read, snapshot

from labctl.health import infiniband
from labctl.health.model import Snapshot
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

ADAPTER = {
    "fw_ver": "28.39.1002",
    "board_id": "MT_0000000838",
    "hca_type": "MT4129",
    "device/vendor": "0x15b3",
    "device/iommu_group/type": "identity",
}
PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    **{f"counters/{name}": "0" for name in infiniband.COUNTERS},
}
POLLING = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
ROCE = {"link_layer": "Ethernet"}


def adapter(name: str, *ports: dict[str, str], files: dict[str, str] | None = None) -> dict[str, str]:
    """Return the files of an adapter, whose ports have these besides a port's."""
    tree = {f"sys/class/infiniband/{name}/{file}": text for file, text in {**ADAPTER, **(files or {})}.items()}
    for number, port in enumerate(ports, start=1):
        folder = f"sys/class/infiniband/{name}/ports/{number}"
        tree |= {f"{folder}/{file}": text for file, text in {**PORT, **port}.items()}
    return tree


def dump_of(tmp_path: Path, *trees: dict[str, str]) -> HostDump:
    """Return the dump of a machine with these files."""
    return read(infiniband.SUBJECT, plant(tmp_path, {name: text for one in trees for name, text in one.items()}))


def taken(tmp_path: Path, *trees: dict[str, str], kernel: tuple[str, ...] = ()) -> Snapshot:
    """Return the snapshot of a machine with these files."""
    return snapshot(infiniband.SUBJECT, dump_of(tmp_path, *trees), *kernel)


def test_adapters_and_ports_are_readings(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, adapter("mlx5_0", {}), {"sys/module/nvidia/initstate": "live"})
    readings = list(infiniband.readings(dump))
    facts = {(reading.item, reading.name): reading.text() for reading in readings if reading.kind == "fact"}
    assert facts == {
        ("mlx5_0", "firmware"): "28.39.1002",
        ("mlx5_0", "board"): "MT_0000000838",
        ("mlx5_0", "adapter type"): "MT4129",
        ("mlx5_0", "IOMMU"): "identity",
    }
    states = {(reading.item, reading.name): reading.text() for reading in readings if reading.kind == "state"}
    assert states == {
        ("", "InfiniBand adapters"): "1",
        ("mlx5_0/1", "port"): "ACTIVE",
        ("mlx5_0/1", "rate"): "400 Gb/s",
        ("", "active ports"): "1 of 1",
    }
    assert {reading.name for reading in readings if reading.kind == "counter"} == set(infiniband.COUNTERS)
    assert {reading.kin for reading in readings if reading.name == "rate"} == {"MT4129 MT_0000000838"}


def test_a_counter_that_a_port_lacks_has_no_reading(tmp_path: Path) -> None:
    file = f"counters/{infiniband.COUNTERS[0]}"
    readings = list(infiniband.readings(dump_of(tmp_path, adapter("mlx5_0", {file: "N/A (no PMA)"}))))
    counters = {reading.name for reading in readings if reading.kind == "counter"}
    assert counters == set(infiniband.COUNTERS[1:])


def test_a_machine_without_infiniband_has_no_readings(tmp_path: Path) -> None:
    assert list(infiniband.readings(dump_of(tmp_path))) == []


def test_software_and_virtual_functions_are_left_out(tmp_path: Path) -> None:
    soft = {name: text for name, text in adapter("rxe0", {}).items() if "/device/" not in name}
    function = adapter("mlx5_9", {}, files={"device/physfn/vendor": "0x15b3"})
    assert list(infiniband.readings(dump_of(tmp_path, soft, function))) == []


def test_active_ports_like_the_neighbours_are_ok(tmp_path: Path) -> None:
    now = taken(tmp_path, adapter("mlx5_0", {}), adapter("mlx5_1", {}))
    assert answers(infiniband.SUBJECT, now, now, {"worker-1": now, "worker-2": now}) == []


@pytest.mark.parametrize("layer", [{}, ROCE])
def test_an_unused_second_port_is_ok(tmp_path: Path, layer: dict[str, str]) -> None:
    now = taken(tmp_path, adapter("mlx5_0", layer, {**layer, **POLLING}))
    assert answers(infiniband.SUBJECT, now, now, {"worker-1": now, "worker-2": now}) == []


def test_a_port_that_is_active_on_the_neighbour_is_bad(tmp_path: Path) -> None:
    down = taken(tmp_path / "down", adapter("mlx5_0", {}, POLLING))
    active = taken(tmp_path / "active", adapter("mlx5_0", {}, {}))
    assert answers(infiniband.SUBJECT, down, None, {"worker-1": active}) == [
        ("infiniband-port", "bad", "mlx5_0/2: port is DOWN (Polling), ACTIVE on worker-1 mlx5_0/2"),
    ]
    assert answers(infiniband.SUBJECT, active, None, {"worker-1": down}) == []


def test_a_port_that_was_active_is_bad(tmp_path: Path) -> None:
    down = taken(tmp_path / "down", adapter("mlx5_0", {}, {"state": "2: INIT"}))
    active = taken(tmp_path / "active", adapter("mlx5_0", {}, {}))
    assert answers(infiniband.SUBJECT, down, active) == [
        ("infiniband-port", "bad", "mlx5_0/2: port is INIT (LinkUp), ACTIVE before"),
    ]


def test_infiniband_ports_of_which_none_is_active_are_a_remark(tmp_path: Path) -> None:
    assert answers(infiniband.SUBJECT, taken(tmp_path / "two", adapter("mlx5_0", POLLING, POLLING))) == [
        ("infiniband-active", "remark", "none of 2 ports is active"),
    ]
    assert answers(infiniband.SUBJECT, taken(tmp_path / "one", adapter("mlx5_0", POLLING))) == [
        ("infiniband-active", "remark", "the InfiniBand port is not active"),
    ]


def test_an_unused_roce_card_is_ok(tmp_path: Path) -> None:
    assert answers(infiniband.SUBJECT, taken(tmp_path, adapter("mlx5_0", {**ROCE, **POLLING}))) == []


def test_a_rate_below_the_neighbours_is_bad(tmp_path: Path) -> None:
    slow = taken(tmp_path / "slow", adapter("mlx5_0", {"rate": "200 Gb/sec (2X NDR)"}))
    fast = taken(tmp_path / "fast", adapter("mlx5_0", {}))
    assert answers(infiniband.SUBJECT, slow, None, {"worker-1": fast, "worker-2": fast}) == [
        ("infiniband-rate", "bad", "mlx5_0/1: rate 200 Gb/s, 400 on 2 others"),
    ]


def test_a_rate_below_the_one_before_is_bad(tmp_path: Path) -> None:
    slow = taken(tmp_path / "slow", adapter("mlx5_0", {"rate": "200 Gb/sec (2X NDR)"}))
    fast = taken(tmp_path / "fast", adapter("mlx5_0", {}))
    assert answers(infiniband.SUBJECT, slow, fast) == [
        ("infiniband-rate", "bad", "mlx5_0/1: rate 200 Gb/s, 400 before")
    ]


def test_a_rate_below_other_adapters_of_the_node_is_a_remark_without_other_nodes(tmp_path: Path) -> None:
    slow = adapter("mlx5_2", {"rate": "200 Gb/sec (4X HDR)"})
    now = taken(tmp_path, adapter("mlx5_0", {}), adapter("mlx5_1", {}), slow)
    expected = ("infiniband-rate", "remark", "mlx5_2/1: rate 200 Gb/s, 400 on 2 others")
    assert answers(infiniband.SUBJECT, now) == [expected]
    # On every node the third serves storage.
    assert answers(infiniband.SUBJECT, now, None, {"worker-1": now, "worker-2": now}) == []


@pytest.mark.parametrize(
    ("counter", "now", "level"),
    [
        ("link_downed", 2, "bad"),
        ("local_link_integrity_errors", 1, "bad"),
        ("excessive_buffer_overrun_errors", 1, "bad"),
        ("link_error_recovery", 1, "remark"),
        ("symbol_error", 120, ""),
        ("symbol_error", 121, "remark"),
        ("port_rcv_errors", 120, ""),
        ("port_rcv_errors", 121, "remark"),
    ],
)
def test_growing_counters_are_told(tmp_path: Path, counter: str, now: int, level: str) -> None:
    before = taken(tmp_path / "before", adapter("mlx5_0", {}))
    after = taken(tmp_path, adapter("mlx5_0", {f"counters/{counter}": str(now)}))
    check = f"infiniband-{counter.replace('_', '-')}"
    expected = [(check, level, f"mlx5_0/1: {counter} +{now}")] if level else []
    assert answers(infiniband.SUBJECT, after, before) == expected
    assert answers(infiniband.SUBJECT, after) == []


def test_fewer_adapters_than_on_the_neighbours_are_bad(tmp_path: Path) -> None:
    two = taken(tmp_path / "two", adapter("mlx5_0", {}), adapter("mlx5_1", {}))
    one = taken(tmp_path / "one", adapter("mlx5_0", {}))
    # Its card is there, its driver is not.
    none = taken(tmp_path / "none", {"sys/bus/pci/devices/0000:17:00.0/class": "0x020700"})
    for count, now in ((1, one), (0, none)):
        assert answers(infiniband.SUBJECT, now, None, {"worker-1": two, "worker-2": two}) == [
            ("infiniband-adapters", "bad", f"InfiniBand adapters {count}, 2 on 2 others"),
        ]


def test_other_firmware_than_the_neighbours_is_a_remark(tmp_path: Path) -> None:
    new = taken(tmp_path / "new", adapter("mlx5_0", {}))
    old = taken(tmp_path / "old", adapter("mlx5_0", {}, files={"fw_ver": "28.36.1010"}))
    assert answers(infiniband.SUBJECT, old, None, {"worker-1": new, "worker-2": new}) == [
        ("infiniband-firmware", "remark", "mlx5_0: firmware 28.36.1010, 28.39.1002 on 2 others"),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "mlx5_core 0000:d2:00.0: poll_health:174:(pid 0): device's health compromised - reached miss count",
            ("infiniband-adapter-health", "bad", "0000:d2:00.0: the adapter's firmware does not answer"),
        ),
        (
            "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature",
            ("infiniband-module", "bad", "0000:5c:00.0: transceiver 0: High Temperature"),
        ),
        ("mlx5_core 0000:63:00.1: Port module event: module 1, Cable unplugged", None),
    ],
)
def test_kernel_lines(tmp_path: Path, line: str, expected: tuple[str, str, str] | None) -> None:
    now = taken(tmp_path, kernel=(line,))
    found = [(check, level, text.rpartition(", ")[0]) for check, level, text in answers(infiniband.SUBJECT, now)]
    assert found == ([expected] if expected else [])


def test_this_very_machine_has_nothing_wrong() -> None:
    now = snapshot(infiniband.SUBJECT, read(infiniband.SUBJECT, Path("/")))
    assert [answer for answer in answers(infiniband.SUBJECT, now) if answer[1] in ("bad", "remark")] == []


def test_a_damaged_output_raises_no_more_than_a_parser_does(tmp_path: Path) -> None:
    text = printed(infiniband.SUBJECT, plant(tmp_path, adapter("mlx5_0", {}, POLLING)))
    assert fuzzed(text, lambda damaged: list(infiniband.readings(hostdump.read(damaged, "gpu-1"))))

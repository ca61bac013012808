"""Ethernet links: carrier, speed, duplex, MTU, flaps and broken packets."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.health_trees import answers, fuzzed, plant, printed, read, snapshot

from labctl.health import ethernet
from labctl.health.model import Snapshot
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

ROUTES = """\
Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0"""
PORT = {
    "type": "1",
    "mtu": "1500",
    "addr_assign_type": "0",
    "address": "3c:ec:ef:00:00:01",
    "flags": "0x1003",
    "carrier": "1",
    "speed": "25000",
    "duplex": "full",
    "carrier_changes": "2",
    "statistics/rx_crc_errors": "0",
    "device/uevent": "DRIVER=mlx5_core\nPCI_CLASS=20000",
}
DOWN = {"carrier": "0", "speed": "-1", "duplex": "unknown"}


def interface(name: str, *files: dict[str, str]) -> dict[str, str]:
    """Return the files of an interface."""
    merged = {file: text for group in files for file, text in group.items()}
    return {f"sys/class/net/{name}/{file}": text for file, text in merged.items()}


def dump_of(tmp_path: Path, *trees: dict[str, str]) -> HostDump:
    """Return the dump of a machine with these files, and the usual interfaces of software."""
    software = {**interface("lo", {"mtu": "65536"}), **interface("docker0", {"mtu": "1500"})}
    merged = {"proc/net/route": ROUTES, **software, **{name: text for one in trees for name, text in one.items()}}
    return read(ethernet.SUBJECT, plant(tmp_path, merged))


def taken(tmp_path: Path, *files: dict[str, str], kernel: tuple[str, ...] = ()) -> Snapshot:
    """Return the snapshot of a machine whose eth0 has these files besides a port's."""
    return snapshot(ethernet.SUBJECT, dump_of(tmp_path, interface("eth0", PORT, *files)), *kernel)


def test_a_port_has_facts_state_and_counters_as_readings(tmp_path: Path) -> None:
    readings = taken(tmp_path).readings
    assert {reading.name: (reading.kind, reading.text()) for reading in readings if reading.item == "eth0"} == {
        "driver": ("fact", "mlx5_core"),
        "MAC address": ("fact", "3c:ec:ef:00:00:01"),
        "link": ("state", "up"),
        "carrier_changes": ("counter", "2"),
        "rx_crc_errors": ("counter", "0"),
        "MTU": ("state", "1500"),
        "speed": ("state", "25000 Mb/s"),
        "duplex": ("state", "full"),
    }
    assert {reading.item for reading in readings if reading.source.startswith("/")} == {"eth0"}


def test_a_file_without_a_number_has_no_reading(tmp_path: Path) -> None:
    files = {"mtu": "N/A", "carrier_changes": "N/A"}
    names = {reading.name for reading in taken(tmp_path, files).readings if reading.item == "eth0"}
    assert names == {"driver", "MAC address", "link", "rx_crc_errors", "speed", "duplex"}


@pytest.mark.parametrize("driver", ["virtio_net", "hv_netvsc", "ena", "cdc_ether"])
def test_an_interface_without_a_link_has_only_the_mtu_of_the_default_route(tmp_path: Path, driver: str) -> None:
    unusual = {"device/uevent": f"DRIVER={driver}", "speed": "-1", "duplex": "half", "carrier": "0"}
    readings = taken(tmp_path, unusual).readings
    assert [(reading.item, reading.name) for reading in readings if reading.item] == [("eth0", "MTU")]


def test_a_bond_has_its_mtu_and_each_of_its_ports_a_link(tmp_path: Path) -> None:
    bond = interface("bond0", {"mtu": "9000", "carrier": "1", "type": "1", "flags": "0x1403"})
    # Its ports have the bond's address.
    ports = [interface(name, PORT, {"addr_assign_type": "3", "mtu": "9000"}) for name in ("eno1", "eno2")]
    dump = dump_of(tmp_path, bond, *ports, {"proc/net/route": ROUTES.replace("eth0", "bond0")})
    found = {(reading.item, reading.name) for reading in ethernet.readings(dump)}
    assert [name for item, name in found if item == "bond0"] == ["MTU"]
    assert {("eno1", "link"), ("eno2", "link"), ("eno2", "speed")} <= found
    assert ("eno1", "MAC address") not in found


@pytest.mark.parametrize(
    "files",
    [
        {"phy80211/name": "phy0"},
        {"device/physfn/vendor": "0x15b3"},
        {"type": "32"},
    ],
)
def test_wireless_virtual_functions_and_ipoib_are_no_ethernet_ports(tmp_path: Path, files: dict[str, str]) -> None:
    dump = dump_of(tmp_path, interface("other", PORT, files))
    assert [reading for reading in ethernet.readings(dump) if reading.item == "other"] == []


def test_a_port_like_its_neighbours_and_as_before_is_ok(tmp_path: Path) -> None:
    now = taken(tmp_path)
    assert answers(ethernet.SUBJECT, now, now, {"worker-1": now, "worker-2": now}) == []


def test_a_port_without_a_cable_is_ok(tmp_path: Path) -> None:
    assert answers(ethernet.SUBJECT, taken(tmp_path, DOWN)) == []


@pytest.mark.parametrize(("others", "level"), [(1, "remark"), (2, "bad")])
def test_a_port_that_most_neighbours_use_and_has_no_carrier_is_told(tmp_path: Path, others: int, level: str) -> None:
    neighbours = {f"worker-{number}": taken(tmp_path / str(number)) for number in range(others)}
    where = "worker-0 eth0" if others == 1 else "2 others"
    assert answers(ethernet.SUBJECT, taken(tmp_path, DOWN), None, neighbours) == [
        ("ethernet-link", level, f"eth0: link down, up on {where}"),
    ]


def test_a_port_that_no_neighbour_uses_is_ok(tmp_path: Path) -> None:
    down = taken(tmp_path, DOWN)
    assert answers(ethernet.SUBJECT, down, None, {"worker-1": down, "worker-2": down}) == []
    used = taken(tmp_path / "used")
    assert answers(ethernet.SUBJECT, used, None, {"worker-1": down, "worker-2": down}) == []


def test_a_port_that_lost_its_carrier_is_bad_one_that_was_turned_off_a_remark(tmp_path: Path) -> None:
    before, down = taken(tmp_path / "before"), taken(tmp_path / "down", DOWN)
    off = taken(tmp_path / "off", {"flags": "0x1002"})
    assert answers(ethernet.SUBJECT, down, before) == [("ethernet-link", "bad", "eth0: link is down, up before")]
    assert answers(ethernet.SUBJECT, off, before) == [
        ("ethernet-link", "remark", "eth0: link is turned off, up before")
    ]


def test_the_unplugged_cable_of_a_laptop_is_a_remark(tmp_path: Path) -> None:
    laptop = {"sys/class/dmi/id/chassis_type": "10"}
    before, now = (
        snapshot(ethernet.SUBJECT, dump_of(tmp_path / name, laptop, interface("eth0", PORT, files)))
        for name, files in (("before", {}), ("now", DOWN))
    )
    assert answers(ethernet.SUBJECT, now, before) == [("ethernet-link", "remark", "eth0: link is unplugged, up before")]
    assert answers(ethernet.SUBJECT, now) == []


def test_a_port_that_was_up_before_a_restart_is_ok(tmp_path: Path) -> None:
    before, now = taken(tmp_path / "before"), taken(tmp_path, DOWN, {"carrier_changes": "3"})
    restarted = dump_of(tmp_path / "restarted", interface("eth0", PORT, DOWN))
    restarted.files["proc/sys/kernel/random/boot_id"] = "another\n"
    assert answers(ethernet.SUBJECT, snapshot(ethernet.SUBJECT, restarted), before) == []
    assert answers(ethernet.SUBJECT, now, now) == []


def test_less_speed_than_two_neighbours_is_bad(tmp_path: Path) -> None:
    other, slow = taken(tmp_path / "other"), taken(tmp_path, {"speed": "10000"})
    assert answers(ethernet.SUBJECT, slow, None, {"worker-1": other, "worker-2": other}) == [
        ("ethernet-speed", "bad", "eth0: speed 10000 Mb/s, 25000 on 2 others"),
    ]
    assert answers(ethernet.SUBJECT, other, None, {"worker-1": slow, "worker-2": slow}) == []


def test_less_speed_than_before_is_a_remark(tmp_path: Path) -> None:
    before, slow = taken(tmp_path / "before"), taken(tmp_path, {"speed": "10000"})
    assert answers(ethernet.SUBJECT, slow, before) == [
        ("ethernet-speed", "remark", "eth0: speed 10000 Mb/s, 25000 before")
    ]
    assert answers(ethernet.SUBJECT, before, slow) == []


def test_an_unknown_speed_gives_neither_speed_nor_duplex(tmp_path: Path) -> None:
    names = {reading.name for reading in taken(tmp_path, {"speed": "-1", "duplex": "half"}).readings}
    assert names.isdisjoint(("speed", "duplex"))


def test_half_duplex_is_bad(tmp_path: Path) -> None:
    assert answers(ethernet.SUBJECT, taken(tmp_path, {"duplex": "half", "speed": "100"})) == [
        ("ethernet-duplex", "bad", "eth0: half duplex"),
    ]


def test_another_mtu_than_the_neighbours_is_a_remark(tmp_path: Path) -> None:
    other = taken(tmp_path / "other", {"mtu": "9000"})
    assert answers(ethernet.SUBJECT, taken(tmp_path), None, {"worker-1": other, "worker-2": other}) == [
        ("ethernet-mtu", "remark", "eth0: MTU 1500, 9000 on 2 others"),
    ]


@pytest.mark.parametrize(
    ("file", "now", "expected"),
    [
        ("carrier_changes", 4, ("ethernet-flaps", "remark", "eth0: carrier_changes +2")),
        ("carrier_changes", 5, ("ethernet-flaps", "bad", "eth0: carrier_changes +3")),
        ("statistics/rx_crc_errors", 100, ("ethernet-crc", "remark", "eth0: rx_crc_errors +100")),
        ("statistics/rx_crc_errors", 101, ("ethernet-crc", "bad", "eth0: rx_crc_errors +101")),
        ("statistics/rx_crc_errors", 2_500_001, ("ethernet-crc", "bad", "eth0: rx_crc_errors +2500001")),
    ],
)
def test_growing_counters_are_told(tmp_path: Path, file: str, now: int, expected: tuple[str, str, str]) -> None:
    before, after = taken(tmp_path / "before"), taken(tmp_path, {file: str(now)})
    assert answers(ethernet.SUBJECT, after, before) == [expected]
    assert answers(ethernet.SUBJECT, after) == []


def test_flaps_of_a_machine_that_slept_are_not_counted(tmp_path: Path) -> None:
    slept = dump_of(tmp_path, interface("eth0", PORT), {"sys/power/suspend_stats/success": "3"})
    assert "carrier_changes" not in {reading.name for reading in ethernet.readings(slept)}


@pytest.mark.parametrize("queue", ["timed out", "timed out 5004 ms"])
def test_a_card_that_stopped_sending_is_bad(tmp_path: Path, queue: str) -> None:
    now = taken(
        tmp_path, kernel=(f"NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 7 {queue}", "eth0: link becomes ready")
    )
    (found,) = answers(ethernet.SUBJECT, now)
    assert found[:2] == ("ethernet-hang", "bad")
    assert found[2].startswith("eth0: stopped sending: transmit queue 7 timed out, ")


def test_this_very_machine_has_nothing_wrong() -> None:
    now = snapshot(ethernet.SUBJECT, read(ethernet.SUBJECT, Path("/")))
    assert [answer for answer in answers(ethernet.SUBJECT, now, now) if answer[1] in ("bad", "remark")] == []


def test_a_damaged_output_raises_no_more_than_a_parser_does(tmp_path: Path) -> None:
    tree = {"proc/net/route": ROUTES, **interface("eth0", PORT), **interface("eth1", PORT, DOWN)}
    text = printed(ethernet.SUBJECT, plant(tmp_path, tree))
    assert fuzzed(text, lambda damaged: list(ethernet.readings(hostdump.read(damaged, "gpu-1"))))

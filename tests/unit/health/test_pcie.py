"""PCIe links: width, speed, errors, and kernel lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.health_trees import answers, fuzzed, plant, printed, read, snapshot

from labctl.health import pcie
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

GPU, OTHER_GPU, THIRD_GPU = "0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0"
NIC, DISK, BRIDGE = "0000:17:00.0", "0000:c1:00.0", "0000:00:1c.0"
H100 = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200"}
CONNECTX = {"vendor": "0x15b3", "device": "0x1021", "class": "0x020700"}
NVME = {"vendor": "0x144d", "device": "0xa80a", "class": "0x010802"}
LINK = {
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "32.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
}
SLOT = {"vendor": "0x8086", "max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}
BARE, GUEST = "flags\t\t: fpu vme sse2", "flags\t\t: fpu vme hypervisor sse2"


def device(address: str, *files: dict[str, str], slot: dict[str, str] | None = None) -> dict[str, str]:
    """Return the files of a device in a slot: its folder is below that of the port."""
    port = f"devices/pci0000:00/0000:00:{address[5:7]}.0"
    merged = {name: text for group in files for name, text in group.items()}
    return {
        f"sys/bus/pci/devices/{address}": f"-> ../../../{port}/{address}",
        **{f"sys/{port}/{address}/{name}": text for name, text in merged.items()},
        **{f"sys/{port}/{name}": text for name, text in (SLOT if slot is None else slot).items()},
    }


def dump_of(tmp_path: Path, *devices: dict[str, str], flags: str = BARE) -> HostDump:
    """Return the dump of a machine with these devices."""
    tree = {"proc/cpuinfo": flags, **{name: text for one in devices for name, text in one.items()}}
    return read(pcie.SUBJECT, plant(tmp_path, tree))


def answers_of(tmp_path: Path, *devices: dict[str, str], flags: str = BARE) -> list[tuple[str, str, str]]:
    """Return the answers of a machine with these devices."""
    return answers(pcie.SUBJECT, snapshot(pcie.SUBJECT, dump_of(tmp_path, *devices, flags=flags)))


def errors(fatal: int = 0, nonfatal: int = 0, correctable: int = 0) -> dict[str, str]:
    """Return the counters of a device."""
    return {
        "aer_dev_fatal": f"Undefined 0\nDLP {fatal}\nTOTAL_ERR_FATAL {fatal}",
        "aer_dev_nonfatal": f"Undefined 0\nTLP {nonfatal}\nTOTAL_ERR_NONFATAL {nonfatal}",
        "aer_dev_correctable": f"RxErr 0\nBadTLP {correctable}\nTOTAL_ERR_COR {correctable}",
    }


def test_a_device_has_its_id_abilities_and_state_as_readings(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, device(NIC, CONNECTX, LINK, errors(correctable=7)))
    readings = {reading.name: reading for reading in pcie.readings(dump)}
    values = {name: (reading.kind, reading.text()) for name, reading in readings.items()}
    assert values == {
        "PCI id": ("fact", "15b3:1021"),
        "PCIe width": ("state", "16"),
        "PCIe max width": ("fact", "16"),
        "PCIe max speed": ("fact", "32 GT/s"),
        "PCIe usable width": ("fact", "16"),
        "PCIe lanes": ("state", "16 of 16"),
        "PCIe speed": ("state", "32 GT/s"),
        "fatal PCIe errors": ("counter", "0"),
        "nonfatal PCIe errors": ("counter", "0"),
        "correctable PCIe errors": ("counter", "7"),
    }
    assert {reading.item for reading in readings.values()} == {NIC}
    assert readings["PCIe width"].source == f"/sys/bus/pci/devices/{NIC}/current_link_width"


def test_bridges_and_virtual_functions_are_left_out(tmp_path: Path) -> None:
    bridge = device(BRIDGE, LINK, {"class": "0x060400", "vendor": "0x8086", "device": "0x1234"})
    function = device(NIC, CONNECTX, LINK, {"physfn": "-> .."})
    assert list(pcie.readings(dump_of(tmp_path, bridge, function))) == []


def test_equal_links_are_ok(tmp_path: Path) -> None:
    gpus = [device(address, H100, LINK) for address in (GPU, OTHER_GPU, THIRD_GPU)]
    assert (
        answers_of(tmp_path, *gpus, device(DISK, NVME, LINK, {"current_link_width": "4", "max_link_width": "4"})) == []
    )


def test_fewer_lanes_than_two_of_the_same_kind_are_bad(tmp_path: Path) -> None:
    gpus = [device(address, H100, LINK) for address in (OTHER_GPU, THIRD_GPU)]
    narrow = device(GPU, H100, LINK, {"current_link_width": "8"})
    assert answers_of(tmp_path, *gpus, narrow) == [
        ("pcie-width", "bad", f"{GPU}: PCIe width 8, 16 on 2 others"),
    ]


def test_fewer_lanes_than_a_single_other_are_a_remark(tmp_path: Path) -> None:
    narrow = device(GPU, H100, LINK, {"current_link_width": "8"})
    assert answers_of(tmp_path, device(OTHER_GPU, H100, LINK), narrow) == [
        ("pcie-width", "remark", f"{GPU}: PCIe width 8, 16 on {OTHER_GPU}"),
    ]


def test_cards_in_slots_of_different_widths_are_not_compared(tmp_path: Path) -> None:
    narrow = device(GPU, H100, LINK, {"current_link_width": "8"}, slot={**SLOT, "max_link_width": "8"})
    gpus = [device(address, H100, LINK) for address in (OTHER_GPU, THIRD_GPU)]
    assert answers_of(tmp_path, *gpus, narrow) == []


def test_a_narrower_slot_than_that_of_the_same_device_on_other_nodes_is_a_remark(tmp_path: Path) -> None:
    narrow = device(NIC, CONNECTX, LINK, {"current_link_width": "8"}, slot={**SLOT, "max_link_width": "8"})
    now = snapshot(pcie.SUBJECT, dump_of(tmp_path / "now", narrow))
    other = snapshot(pcie.SUBJECT, dump_of(tmp_path / "other", device(NIC, CONNECTX, LINK)))
    assert answers(pcie.SUBJECT, now, None, {"worker-1": other, "worker-2": other}) == [
        ("pcie-slot", "remark", f"{NIC}: PCIe usable width 8, 16 on 2 others"),
    ]


@pytest.mark.parametrize(
    ("kind", "slot", "remarks"),
    [
        (CONNECTX, "16", 1),
        (CONNECTX, "8", 0),
        (NVME, "16", 1),
        # A display controller may save power.
        (H100, "16", 0),
    ],
)
def test_unused_lanes_of_a_single_device_are_a_remark_if_its_slot_has_them(
    tmp_path: Path, kind: dict[str, str], slot: str, remarks: int
) -> None:
    narrow = device(NIC, kind, LINK, {"current_link_width": "8"}, slot={**SLOT, "max_link_width": slot})
    text = f"{NIC}: PCIe uses 8 of the 16 lanes that device and slot have"
    assert answers_of(tmp_path, narrow) == [("pcie-lanes", "remark", text)] * remarks


def test_the_ports_of_a_card_share_its_link(tmp_path: Path) -> None:
    narrow = {"current_link_width": "8"}
    ports = [device(address, CONNECTX, LINK, narrow) for address in (NIC, "0000:17:00.1")]
    text = f"{NIC}: PCIe uses 8 of the 16 lanes that device and slot have"
    assert answers_of(tmp_path, *ports) == [("pcie-lanes", "remark", text)]


def test_a_single_device_without_a_port_above_it_is_ok(tmp_path: Path) -> None:
    assert answers_of(tmp_path, device(NIC, CONNECTX, LINK, {"current_link_width": "8"}, slot={})) == []


def test_a_lower_speed_of_a_disk_is_bad_that_of_an_idle_card_is_not(tmp_path: Path) -> None:
    slow = {"current_link_speed": "8.0 GT/s PCIe"}
    gpus = [device(address, H100, LINK) for address in (OTHER_GPU, THIRD_GPU)]
    disks = [device(address, NVME, LINK) for address in ("0000:c2:00.0", "0000:c3:00.0")]
    found = answers_of(tmp_path, *gpus, device(GPU, H100, LINK, slow), *disks, device(DISK, NVME, LINK, slow))
    assert found == [("pcie-speed", "bad", f"{DISK}: PCIe speed 8 GT/s, 32 on 2 others")]


@pytest.mark.parametrize("width", ["0", "255", "63"])
def test_a_device_without_a_link_has_no_more_than_its_id(tmp_path: Path, width: str) -> None:
    hidden = {"current_link_width": width, "max_link_width": width, "current_link_speed": "Unknown"}
    readings = list(pcie.readings(dump_of(tmp_path, device(GPU, H100, LINK, hidden))))
    assert [(reading.name, reading.kin) for reading in readings] == [("PCI id", "")]


def test_a_device_that_sleeps_is_not_asked_for_its_link(tmp_path: Path) -> None:
    text = printed(pcie.SUBJECT, plant(tmp_path, device(GPU, H100, LINK, {"power/runtime_status": "suspended"})))
    assert f"{GPU}/vendor" in text
    assert "link_width" not in text


def test_a_virtual_machine_that_hides_the_links_of_its_cards_is_unknown_once(tmp_path: Path) -> None:
    hidden = {"current_link_width": "0", "max_link_width": "255", "current_link_speed": "Unknown"}
    gpus = [device(address, H100, hidden) for address in (GPU, OTHER_GPU)]
    screen = device(NIC, {"vendor": "0x1234", "device": "0x1111", "class": "0x030000"})
    why = f"the virtual machine does not show the PCIe link of {GPU}, {OTHER_GPU}"
    assert answers_of(tmp_path, *gpus, screen, flags=GUEST) == [("pcie-width", "unknown", why)]


def test_the_slots_of_a_virtual_machine_tell_nothing(tmp_path: Path) -> None:
    narrow = device(NIC, CONNECTX, LINK, {"current_link_width": "8"}, slot={**SLOT, "max_link_width": "32"})
    assert answers_of(tmp_path / "guest", narrow, flags=GUEST) == []
    port = {**SLOT, "vendor": "0x1b36"}
    narrow = device(NIC, CONNECTX, LINK, {"current_link_width": "8"}, slot=port)
    assert answers_of(tmp_path / "arm", narrow) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (errors(1, 1, 5), []),
        (errors(3, 1, 5), [("pcie-fatal", "bad", f"{GPU}: fatal PCIe errors +2")]),
        (errors(1, 2, 5), [("pcie-nonfatal", "bad", f"{GPU}: nonfatal PCIe errors +1")]),
        (errors(1, 1, 1005), []),
        (errors(1, 1, 1006), [("pcie-correctable", "remark", f"{GPU}: correctable PCIe errors +1001")]),
    ],
)
def test_growing_errors_are_told(tmp_path: Path, now: dict[str, str], expected: list[tuple[str, str, str]]) -> None:
    before, after = (
        snapshot(pcie.SUBJECT, dump_of(tmp_path / name, device(GPU, H100, LINK, counters)))
        for name, counters in (("before", errors(1, 1, 5)), ("after", now))
    )
    assert answers(pcie.SUBJECT, after, before) == expected


def test_errors_without_earlier_readings_are_ok(tmp_path: Path) -> None:
    assert answers_of(tmp_path, device(GPU, H100, LINK, errors(3, 3, 3_000_000))) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "nvidia 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible, (Unregistered)",
            ("pcie-error", "bad", "0000:3b:00.0: fatal PCIe error"),
        ),
        (
            "nvme 0000:c1:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Receiver)",
            ("pcie-error", "remark", "0000:c1:00.0: non-fatal PCIe error"),
        ),
        (
            "pcieport 0000:00:1c.2: AER: Root Port link has been reset (-25)",
            ("pcie-reset", "bad", "0000:00:1c.2: PCIe error below this port: Root Port link has been reset"),
        ),
        (
            "pcieport 0000:00:1c.2: AER: device recovery failed",
            ("pcie-reset", "bad", "0000:00:1c.2: PCIe error below this port: device recovery failed"),
        ),
        (
            "pcieport 0000:80:01.0: pciehp: Slot(12): Link Down",
            ("pcie-slot-down", "remark", "slot 12: PCIe link went down"),
        ),
        ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Receiver ID)", None),
        ("pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0", None),
        ("pcieport 0000:80:01.0: pciehp: Slot(12): Link Up", None),
    ],
)
def test_kernel_lines(tmp_path: Path, line: str, expected: tuple[str, str, str] | None) -> None:
    now = snapshot(pcie.SUBJECT, dump_of(tmp_path), line)
    found = [(check, level, text.partition(", ")[0]) for check, level, text in answers(pcie.SUBJECT, now)]
    assert found == ([expected] if expected else [])


def test_this_very_machine_has_nothing_wrong() -> None:
    now = snapshot(pcie.SUBJECT, read(pcie.SUBJECT, Path("/")))
    assert [answer for answer in answers(pcie.SUBJECT, now) if answer[1] in ("bad", "remark")] == []


def test_a_damaged_output_raises_no_more_than_a_parser_does(tmp_path: Path) -> None:
    text = printed(pcie.SUBJECT, plant(tmp_path, device(GPU, H100, LINK, errors(1, 2, 3))))
    assert fuzzed(text, lambda damaged: list(pcie.readings(hostdump.read(damaged, "gpu-1"))))

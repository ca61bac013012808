"""Health of NVIDIA GPUs, from reports composed of the documented elements, and from the script on trees of files."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import structs

from labctl.accelerators.nvidia.checks import SUBJECT
from labctl.accelerators.nvidia.readings import HOST_NAMESPACE, Process, processes, processes_text
from labctl.accelerators.nvidia.report import report_of
from labctl.health import script
from labctl.health.examine import Past, examine, is_blind
from labctl.health.model import Condition, KernelLine, Reading, Rules, Snapshot
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

from .health_hosts import judged_by_host

DATA = Path(__file__).resolve().parents[2] / "data/health/nvidia"
REPORTS = sorted(path.name for path in DATA.glob("*.xml"))
HEALTHY = ("h100.xml", "a100-mig.xml", "rtx-3080.xml", "a10g-virtual.xml")
CARDS = ("0000:18:00.0", "0000:2a:00.0")
HOST = {"pid namespace": HOST_NAMESPACE, "nvidia files": "dev/nvidia0 dev/nvidia1 dev/nvidiactl"}
CONTAINER = "ab" * 32
LINK_STATES = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""
LINK_ERRORS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 2
\t Link 0: CRC Errors: 5
\t Link 1: Replay Errors: 0
\t Link 1: Recovery Errors: 1
\t Link 1: CRC Errors: 0
"""
PYNVML = """
class NVMLError(Exception):
    value = 15
class Values:
    def __init__(self, **values):
        self.__dict__.update(values)
nvmlInit = lambda: None
nvmlSystemGetCudaDriverVersion = lambda: 13000
nvmlSystemGetDriverVersion = lambda: b"580.95.05"
nvmlDeviceGetCount = lambda: 2
def nvmlDeviceGetHandleByIndex(index):
    if index:
        raise NVMLError("GPU is lost")
    return "handle"
nvmlDeviceGetPciInfo = lambda handle: Values(busId=b"00000000:18:00.0")
nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"
def nvmlDeviceGetMemoryInfo(handle, version=None):
    return Values(total=81559 << 20, used=40000 << 20)
nvmlDeviceGetTotalEccErrors = lambda handle, kind, time: 3 * kind
nvmlDeviceGetRemappedRows = lambda handle: (0, 1, 1, 0)
nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x48
nvmlDeviceGetEnforcedPowerLimit = lambda handle: 500000
nvmlDeviceGetPowerManagementDefaultLimit = lambda handle: 700000
nvmlDeviceGetNvLinkState = lambda handle, link: int(link < 18)
nvmlDeviceGetNvLinkErrorCounter = lambda handle, link, counter: counter
nvmlDeviceGetComputeRunningProcesses = lambda handle: [Values(pid=4711, usedGpuMemory=31 << 30)]
nvmlDeviceGetGraphicsRunningProcesses = lambda handle: []
nvmlSystemGetProcessName = lambda pid: b"/opt/conda/bin/python train.py"
"""


def text_of(name: str) -> str:
    """Return a report of nvidia-smi."""
    return (DATA / name).read_text(encoding="utf-8")


def dump_of(text: str | None, /, cards: Iterable[str] = CARDS, driver: str = "nvidia", **facts: str) -> HostDump:
    """Build the output of the script on a host with these cards on its PCI bus."""
    dump = HostDump("gpu-1", facts={**HOST, **facts})
    if text is not None:
        dump.facts["nvidia-smi"] = text
    for minor, card in enumerate(cards):
        folder = f"sys/bus/pci/devices/{card}"
        dump.files.update(
            {f"{folder}/vendor": "0x10de\n", f"{folder}/class": "0x030200\n", f"{folder}/device": "0x2330\n"}
        )
        if driver:
            dump.links[f"{folder}/driver"] = f"sys/bus/pci/drivers/{driver}"
        if driver == "nvidia":
            dump.files[f"proc/driver/nvidia/gpus/{card}/information"] = f"Model: H100\nDevice Minor: \t {minor}\n"
    return dump


def snapshot_of(dump: HostDump, lines: Iterable[KernelLine] = ()) -> Snapshot:
    """Build a snapshot of a host's readings and kernel lines."""
    return Snapshot(time=0.0, boot="1", uptime=100.0, readings=tuple(SUBJECT.readings(dump)), lines=tuple(lines))


def conditions_of(
    dump: HostDump, *, before: HostDump | None = None, neighbours: Mapping[str, HostDump] | None = None
) -> dict[tuple[str, str], Condition]:
    """Return the answers of all checks that are not ok, by check and item."""
    past = Past(snapshot=snapshot_of(before)) if before else Past()
    others = {name: snapshot_of(other) for name, other in (neighbours or {}).items()}
    found = examine(snapshot_of(dump), (SUBJECT,), Rules(off=frozenset({"changed"})), past, others)
    return {(condition.check, condition.item): condition for condition in found if condition.level != "ok"}


def answers(dump: HostDump, **others: HostDump | Mapping[str, HostDump]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return level and text of the answers that are not ok."""
    found = conditions_of(dump, **others)  # type: ignore[arg-type]
    return {key: (condition.level, condition.text) for key, condition in found.items()}


def values(dump: HostDump, item: str = "GPU 0") -> dict[str, Reading]:
    """Return an item's readings by name."""
    return {reading.name: reading for reading in SUBJECT.readings(dump) if reading.item == item}


def line_answers(*texts: str) -> list[tuple[str, str, str]]:
    """Return check, level and sentence of what these kernel lines say."""
    now = snapshot_of(HostDump("gpu-1"), (KernelLine(50.0, text) for text in texts))
    found = examine(now, (SUBJECT,), Rules(), Past(), {})
    return [(condition.check, condition.level, condition.sentence()) for condition in found if condition.level != "ok"]


def altered(name: str, old: str, new: str) -> HostDump:
    """Return a host whose report has another text, at each place."""
    assert old in text_of(name)
    return dump_of(text_of(name).replace(old, new))


# --- healthy hosts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_host(name: str) -> None:
    """Accept a node of H100, MIG, a desktop's GeForce and a card of a virtual machine."""
    addresses = [gpu.address for gpu in report_of(text_of(name)).gpus]
    assert answers(dump_of(text_of(name), addresses)) == {}


def test_nothing_is_said_of_a_host_without_a_card() -> None:
    """Yield nothing where there is neither a card nor the tool."""
    assert list(SUBJECT.readings(HostDump("cpu-1"))) == []


def test_facts_identify_a_card() -> None:
    """Read model, PCI address as sysfs writes it, memory and VBIOS as facts."""
    found = values(dump_of(text_of("h100.xml")))
    facts = {name: reading.text() for name, reading in found.items() if reading.kind == "fact"}
    assert facts == {
        "model": "NVIDIA H100 80GB HBM3",
        "PCI address": "0000:18:00.0",
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "serial": "0000000000000",
        "device memory": "81559 MiB",
        "persistence mode": "Enabled",
        "MIG mode": "Disabled",
        "VBIOS": "96.00.00.00.01",
    }
    assert found["model"].kin == "NVIDIA H100 80GB HBM3"


def test_a_card_without_ecc_has_no_such_reading() -> None:
    """Yield nothing for what a GeForce lacks."""
    found = values(dump_of(text_of("rtx-3080.xml"), ["0000:01:00.0"]))
    lacking = {"uncorrectable ECC errors", "row remapping pending", "retired pages", "serial", "MIG mode", "fabric"}
    assert not lacking & set(found)
    assert found["processes"].value == "none"


@pytest.mark.parametrize("name", REPORTS)
def test_no_reading_of_a_card_is_taken_for_one_of_its_host(name: str) -> None:
    """Name readings otherwise than those that the checks of every host judge."""
    assert judged_by_host(SUBJECT.readings(dump_of(text_of(name)))) == set()


# --- errors of a card -----------------------------------------------------------------------------------------


def test_every_error_of_a_card_is_named() -> None:
    """Judge memory errors, repairs, fabric, heat and limits of one card, and a second one as lost."""
    assert answers(dump_of(text_of("h100-errors.xml"))) == {
        ("gpu-state", "GPU 1"): ("bad", "the driver cannot reach it: GPU is lost"),
        ("gpu-recovery", "GPU 0"): ("bad", "the driver asks for an action: Reset"),
        ("gpu-ecc", "GPU 0"): ("bad", "uncorrectable ECC errors 3"),
        ("gpu-ecc-life", "GPU 0"): ("remark", "uncorrectable ECC errors of its life 5"),
        ("gpu-sram", "GPU 0"): ("bad", "SRAM error threshold exceeded is yes"),
        ("gpu-remap", "GPU 0"): ("bad", "row remapping pending is yes"),
        ("gpu-remap-failed", "GPU 0"): ("bad", "row remapping failed is yes"),
        ("gpu-banks", "GPU 0"): ("remark", "memory banks without a spare row 3"),
        ("gpu-slowdown", "GPU 0"): ("bad", "clocks are lowered by HW slowdown, HW thermal slowdown"),
        ("gpu-power-limit", "GPU 0"): ("remark", "power limit 500 W, by default 700 W"),
        ("gpu-temperature", "GPU 0"): ("remark", "temperature is 3 °C below that of its slowdown, while it is idle"),
        ("gpu-leftover", "GPU 0"): ("remark", "39.06 GiB of memory is in use by no process"),
    }


def test_the_fabric_of_several_cards_must_be_complete() -> None:
    """Judge cards that the fabric manager has not registered, or registered with an error."""
    waiting = altered("h100.xml", "<state>Completed</state>", "<state>In Progress</state>")
    assert answers(waiting)["gpu-fabric", "GPU 0"] == ("bad", "fabric is In Progress")
    failed = altered("h100.xml", "<status>Success</status>", "<status>Insufficient Resources</status>")
    assert answers(failed)["gpu-fabric", "GPU 1"] == ("bad", "fabric is Completed, Insufficient Resources")


def test_retired_pages_of_an_older_card() -> None:
    """Judge 60 retired pages and a pending one; memory that an old driver reserves is no leftover."""
    dump = dump_of(text_of("v100-pages.xml"), ("0000:06:00.0", "0000:07:00.0"))
    assert answers(dump) == {
        ("gpu-ecc", "GPU 1"): ("bad", "uncorrectable ECC errors 1"),
        ("gpu-ecc-life", "GPU 1"): ("remark", "uncorrectable ECC errors of its life 2"),
        ("gpu-pages", "GPU 1"): ("bad", "retired pages 60, NVIDIA replaces the card from 60 on"),
        ("gpu-pages-pending", "GPU 1"): ("bad", "page retirement pending is yes"),
    }
    assert values(dump)["retired pages"].value == 0


def test_corrected_errors_count_if_they_grow() -> None:
    """Remark corrected errors since the earlier readings."""
    more = altered("h100.xml", "<dram_correctable>0<", "<dram_correctable>4<")
    before = dump_of(text_of("h100.xml"))
    assert answers(more, before=before)["gpu-ecc-corrected", "GPU 0"] == ("remark", "corrected ECC errors +4")
    assert answers(more) == {}


@pytest.mark.parametrize(
    ("reason", "level"),
    [("hw_slowdown", "remark"), ("sw_thermal_slowdown", "remark"), ("hw_power_brake_slowdown", "bad")],
)
def test_a_slowdown_is_judged_by_its_reason(reason: str, level: str) -> None:
    """Judge a brake by the power supply as bad, others as a remark."""
    tag = f"clocks_event_reason_{reason}"
    found = answers(altered("h100.xml", f"<{tag}>Not Active", f"<{tag}>Active"))
    assert found["gpu-slowdown", "GPU 0"][0] == level


def test_a_laptop_may_slow_down() -> None:
    """Accept a lower limit and slowdowns of a host with a battery."""
    dump = dump_of(text_of("h100-errors.xml"))
    dump.files["sys/class/power_supply/BAT0/type"] = "Battery\n"
    assert not {"gpu-slowdown", "gpu-power-limit"} & {check for check, _ in answers(dump)}


# --- which cards there are ------------------------------------------------------------------------------------


def test_a_card_that_the_tool_does_not_list_is_bad() -> None:
    """Name the PCI address of a card that has a device file, or no driver and the others' model."""
    word = ("bad", "is on the PCI bus but nvidia-smi does not list it")
    third = (*CARDS, "0000:3a:00.0")
    listed = text_of("h100.xml")
    served = dump_of(listed, third, **{"nvidia files": "dev/nvidia0 dev/nvidia1 dev/nvidia2"})
    assert answers(served) == {("gpu-listed", "0000:3a:00.0"): word}
    without = dump_of(listed, third)
    del without.links["sys/bus/pci/devices/0000:3a:00.0/driver"]
    assert answers(without) == {("gpu-listed", "0000:3a:00.0"): word}


def test_cards_of_others_are_not_missed() -> None:
    """Accept cards without a device file in a container, those of a virtual machine, and virtual functions."""
    third = (*CARDS, "0000:3a:00.0")
    assert answers(dump_of(text_of("h100.xml"), third)) == {}
    passed = dump_of(text_of("h100.xml"), third)
    passed.links["sys/bus/pci/devices/0000:3a:00.0/driver"] = "sys/bus/pci/drivers/vfio-pci"
    assert answers(passed) == {}
    virtual = dump_of(text_of("h100.xml"), third)
    del virtual.links["sys/bus/pci/devices/0000:3a:00.0/driver"]
    virtual.links["sys/bus/pci/devices/0000:3a:00.0/physfn"] = "sys/devices/pci0000:18/0000:18:00.0"
    assert answers(virtual) == {}


def test_fewer_cards_than_the_neighbours_is_bad() -> None:
    """Compare the number of cards of a model with other nodes."""
    text = text_of("h100.xml")
    one = text[: text.index("</gpu>")] + "</gpu></nvidia_smi_log>"
    full = dump_of(text)
    found = answers(dump_of(one, CARDS[:1]), neighbours={"worker-1": full, "worker-2": full})
    assert found["gpu-count", ""] == ("bad", "GPUs 1, 2 on 2 others")


@pytest.mark.parametrize(
    "message",
    [
        "Unable to determine the device handle for GPU 0000:2A:00.0: GPU is lost.  Reboot the system",
        "Unable to determine the device handle for GPU0000:2A:00.0: Unknown Error",
        "Unable to determine the device handle for GPU1: 0000:2A:00.0: Unknown Error",
    ],
)
def test_a_lost_card_is_bad_by_its_index(message: str) -> None:
    """Find the index of a card that is only in an error, with and without a report of the others."""
    text = text_of("h100.xml")
    first = text[: text.index("</gpu>")] + "</gpu></nvidia_smi_log>"
    for report in (f"{message}\n{first}\n", f"{message}\n"):
        level, said = answers(dump_of(report))["gpu-state", "GPU 1"]
        assert (level, said) == ("bad", f"the driver cannot reach it: {message.rpartition('00.0: ')[2]}")


@pytest.mark.parametrize(
    "text",
    [
        "Unable to determine the device handle for GPU 0000:2A:00.0: Insufficient Permissions\n{first}",
        "Unable to determine the device handle for GPU1: 0000:2A:00.0: Insufficient Permissions\n{first}",
        '{{"gpus": [{{"index": 0, "address": "0000:18:00.0", "name": "NVIDIA H100 80GB HBM3"}},'
        ' {{"index": 1, "error": "Insufficient Permissions"}}]}}',
    ],
)
def test_a_card_that_the_user_may_not_open_is_unknown(text: str) -> None:
    """Accuse no card that belongs to others, nor the host that has fewer for this user than its neighbours."""
    report = text_of("h100.xml")
    first = report[: report.index("</gpu>")] + "</gpu></nvidia_smi_log>"
    full = dump_of(report)
    found = answers(dump_of(text.format(first=first)), neighbours={"worker-1": full, "worker-2": full})
    assert found["gpu-state", "GPU 1"] == ("unknown", "permission denied")
    assert {level for level, _ in found.values()} == {"unknown"}


def test_a_host_whose_cards_are_all_closed_is_unknown() -> None:
    """Know nothing of the cards of a host if the user may open none."""
    lines = (f"Unable to determine the device handle for GPU {card}: Insufficient Permissions" for card in CARDS)
    now = snapshot_of(dump_of("\n".join(lines)))
    assert is_blind(SUBJECT, now)


def test_a_tool_that_fails_is_bad_if_a_card_needs_it() -> None:
    """Judge a driver of another version; a host without a card says nothing, nor does one whose cards are passed on."""
    text = "Failed to initialize NVML: Driver/library version mismatch\n"
    code = {"nvidia-smi code": "18"}
    word = ("bad", "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch")
    assert answers(dump_of(text, **code)) == {("nvidia-smi", ""): word}
    assert answers(dump_of(text, driver="", **code)) == {("nvidia-smi", ""): word}
    assert answers(dump_of(text, driver="vfio-pci", **code)) == {}
    assert answers(dump_of(text, cards=(), **code)) == {}
    laptop = dump_of(text, driver="", **code)
    laptop.files["sys/class/power_supply/BAT0/type"] = "Battery\n"
    assert answers(laptop) == {}


def test_a_tool_that_is_absent_or_slow_is_unknown() -> None:
    """Say why it is unknown, and nothing if the driver serves no card."""
    for code, why in (("127", "nvidia-smi is not installed"), ("124", "nvidia-smi did not answer in 5 s")):
        facts = {"nvidia-smi code": code}
        assert answers(dump_of("", **facts)) == {("nvidia-smi", ""): ("unknown", why)}
        assert answers(dump_of("", driver="nouveau", **facts)) == {}


def test_a_container_blames_nobody() -> None:
    """Report as unknown what a container cannot see: a driver that it was not given, and processes."""
    inside = {"pid namespace": "pid:[4026532000]", "nvidia-smi code": "9"}
    assert answers(dump_of("Failed to initialize NVML: Unknown Error\n", **inside)) == {
        ("nvidia-smi", ""): ("unknown", "in a container: Failed to initialize NVML: Unknown Error")
    }
    levels = {key: level for key, (level, _) in answers(dump_of(text_of("h100-used.xml"), **inside)).items()}
    assert levels == {("gpu-processes", "GPU 0"): "unknown", ("gpu-processes", "GPU 1"): "unknown"}


# --- who uses a card ------------------------------------------------------------------------------------------


def test_a_process_outside_of_containers_is_bad() -> None:
    """Name pid, program, user and memory; one in a container has no word, and NVIDIA's own server is nobody's work."""
    dump = dump_of(text_of("h100-used.xml"), **{"owner 4711": "ann", "owner 4712": "root"})
    dump.files["proc/4712/cgroup"] = f"0::/system.slice/docker-{CONTAINER}.scope\n"
    assert answers(dump) == {("gpu-processes", "GPU 0"): ("bad", "is used by pid 4711 (python, ann), 31 GiB")}
    value = f"4711 python ann 31 GiB; 4712 python root 512 MiB in {CONTAINER}"
    assert values(dump)["processes"].value == value


def test_processes_are_rendered_and_parsed() -> None:
    """Parse the reading with a process of a container and unknown sizes, and render it."""
    text = f"4711 python ann 31 GiB; 4712 python root 512 MiB in {CONTAINER}; 4713 a ? 1,023 MiB; 4714 b c ? MiB"
    found = processes(text)
    assert found == (
        Process(4711, "python", "ann", 31 << 30, ""),
        Process(4712, "python", "root", 512 << 20, CONTAINER),
        Process(4713, "a", "?", 1023 << 20, ""),
        Process(4714, "b", "c", None, ""),
    )
    assert processes(processes_text(found)) == found
    assert processes_text(()) == "none"
    assert processes("none") == ()


def test_a_process_without_much_memory_is_a_remark() -> None:
    """Judge work of 512 MiB outside of containers beside a run in one: a remark; in containers or ended, no word."""
    dump = dump_of(text_of("h100-used.xml"), **{"owner 4711": "ann", "owner 4712": "ann"})
    dump.files["proc/4711/cgroup"] = f"0::/docker/{CONTAINER}\n"
    assert answers(dump) == {("gpu-processes", "GPU 0"): ("remark", "is used by pid 4712 (python, ann), 512 MiB")}
    dump.files["proc/4712/cgroup"] = f"0::/kubepods/pod1/{CONTAINER}\n"
    assert answers(dump) == answers(dump_of(text_of("h100-used.xml"))) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<current_mig>Disabled", "<current_mig>Enabled"),
        ("<addressing_mode>HMM", "<addressing_mode>ATS"),
        ("<virtualization_mode>None", "<virtualization_mode>Host VGPU"),
    ],
)
def test_memory_without_a_process_may_have_a_reason(old: str, new: str) -> None:
    """Accept memory of MIG instances, of virtual GPUs, and of a GPU that is a NUMA node."""
    text = text_of("h100.xml").replace("<used>1 MiB", "<used>40000 MiB")
    assert answers(dump_of(text))["gpu-leftover", "GPU 0"][0] == "remark"
    assert answers(dump_of(text.replace(old, new))) == {}


# --- compared with others -------------------------------------------------------------------------------------


def test_inactive_links_are_bad_where_others_are_active() -> None:
    """Count links and their errors from ``nvidia-smi nvlink``, which only a full examination prints."""
    text = text_of("h100.xml")
    dump = dump_of(text, **{"nvlink -s": LINK_STATES, "nvlink -e": LINK_ERRORS})
    full = dump_of(text, **{"nvlink -s": LINK_STATES.replace("<inactive>", "26.562 GB/s")})
    found = answers(dump, neighbours={"worker-1": full})
    assert found == {("gpu-nvlink", "GPU 1"): ("bad", "active NVLinks 1, 2 on 3 others")}
    assert values(dump)["NVLink recovery errors"].value == 3
    assert "active NVLinks" not in values(dump_of(text))


def test_growing_link_errors() -> None:
    """Judge recoveries as bad, replays and CRC errors that a link corrects as a remark."""
    before = dump_of(text_of("h100.xml"), **{"nvlink -e": LINK_ERRORS})
    more = LINK_ERRORS.replace("Recovery Errors: 1", "Recovery Errors: 2").replace("CRC Errors: 5", "CRC Errors: 7")
    found = answers(dump_of(text_of("h100.xml"), **{"nvlink -e": more}), before=before)
    assert found["gpu-nvlink-recovery", "GPU 0"] == ("bad", "NVLink recovery errors +1")
    assert found["gpu-nvlink-crc", "GPU 0"] == ("remark", "NVLink CRC errors +2")


def test_cards_that_no_bridge_joins_are_not_blamed() -> None:
    """Accept a pair with a bridge beside a pair without; remark a card that alone has no link."""
    one = text_of("h100.xml")
    two = one[one.index("<gpu id") : one.index("</nvidia_smi_log>")].replace("18:00", "3A:00").replace("2A:00", "4A:00")
    text = one.replace("</nvidia_smi_log>", f"{two}</nvidia_smi_log>")
    state = "GPU {}: H100 (UUID: GPU-0)\n\t Link 0: {}\n"
    active, off = "26.562 GB/s", "<inactive>"
    pair = "".join(state.format(index, link) for index, link in enumerate((active, active, off, off)))
    assert answers(dump_of(text, **{"nvlink -s": pair})) == {}
    alone = "".join(state.format(index, link) for index, link in enumerate((active, active, active, off)))
    word = ("remark", "has no active NVLink; the 3 others have")
    assert answers(dump_of(text, **{"nvlink -s": alone})) == {("gpu-nvlink", "GPU 3"): word}


def test_modes_and_versions_unlike_the_neighbours() -> None:
    """Remark another compute mode, MIG mode, VBIOS or driver than most."""
    usual = {"worker-1": dump_of(text_of("h100.xml")), "worker-2": dump_of(text_of("h100.xml"))}
    for check, item, old, new in (
        ("gpu-compute-mode", "GPU 0", "<compute_mode>Default", "<compute_mode>Exclusive_Process"),
        ("gpu-mig", "GPU 0", "<current_mig>Disabled", "<current_mig>Enabled"),
        ("gpu-vbios", "GPU 0", "96.00.00.00.01", "96.00.00.00.02"),
        ("nvidia-driver", "", "580.95.05", "575.57.08"),
    ):
        found = answers(altered("h100.xml", old, new), neighbours=usual)
        assert found[check, item][0] == "remark"


def test_boards_of_several_makers_have_their_own_vbios() -> None:
    """Accept another VBIOS of a GeForce, which has no part number."""
    text = text_of("rtx-3080.xml")
    other = text.replace("96.00.00.00.01", "94.02.71.00.7C").replace("GPU-00000000", "GPU-11111111")
    one, two = (dump_of(report, ["0000:01:00.0"]) for report in (text, other))
    assert answers(one, neighbours={"worker-1": two, "worker-2": two}) == {}


# --- container toolkit ----------------------------------------------------------------------------------------


def test_the_toolkit_and_its_mode_are_facts() -> None:
    """Read the version and the mode; remark the version that has failed elsewhere."""
    dump = HostDump("gpu-1", facts={"nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.17.8"})
    dump.files["etc/nvidia-container-runtime/config.toml"] = '[nvidia-container-runtime]\n#x = 1\nmode = "auto"\n'
    assert {name: reading.value for name, reading in values(dump, "").items()} == {
        "toolkit": "1.17.8",
        "toolkit mode": "auto",
    }
    assert answers(dump) == {}
    dump.facts["nvidia-ctk"] = "NVIDIA Container Toolkit CLI version 1.19.1"
    assert answers(dump)["nvidia-toolkit", ""][0] == "remark"


# --- kernel lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "check", "level", "words"),
    [
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row", "gpu-xid", "bad", "0000:10:1c.0: Xid 63 ("),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable", "gpu-xid", "bad", "uncorrectable ECC error"),
        ("NVRM: Xid (PCI:0000:3b:00): 119, pid=7, Timeout", "gpu-xid", "bad", "does not answer"),
        (
            "NVRM: Xid (PCI:0000:2a:00): 13, pid=7, Graphics Exception",
            "gpu-xid",
            "remark",
            "0000:2a:00.0: Xid 13 (graphics engine exception): the program's own fault",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault",
            "gpu-xid",
            "remark",
            "page fault): the program's own fault",
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 43, pid=7, Ch 0", "gpu-xid", "remark", "the GPU is healthy"),
        ("NVRM: Xid (PCI:0000:3b:00): 45, pid=7, Ch 8", "gpu-xid", "remark", "the driver ended the program's channels"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "gpu-bus", "bad", "0000:3b:00.0: has fallen"),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
            "gpu-bus",
            "bad",
            "0000:3b:00.0: has fallen off the bus",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 154, recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "gpu-action",
            "bad",
            "0000:3b:00.0: the driver asks for an action: Node Reboot Required",
        ),
    ],
)
def test_a_kernel_line_is_explained(line: str, check: str, level: str, words: str) -> None:
    """Judge an Xid by its number: hardware is bad, a program's own fault a remark."""
    ((found, judged, text),) = line_answers(line)
    assert (found, judged) == (check, level)
    assert words in text


def test_lines_of_one_loss_are_one_answer() -> None:
    """Count the two lines of a card that fell off the bus as one answer."""
    lines = (
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    )
    ((_, _, text),) = line_answers(*lines)
    assert "(2 times)" in text


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
        "NVRM: Xid (PCI:0000:3b:00): 121, C2C corrected error",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05",
    ],
)
def test_a_harmless_line_accuses_nobody(line: str) -> None:
    """Pass over what needs no action."""
    assert line_answers(line) == []


def test_the_script_sends_the_lines_that_are_judged() -> None:
    """Match by grep -E what Python matches."""
    texts = (
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "usb 1-1: new device",
    )
    for check in SUBJECT.lines:
        command = ["grep", "-E", check.pattern]
        done = subprocess.run(command, input="\n".join(texts), capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [text for text in texts if re.search(check.pattern, text)]


# --- the script -----------------------------------------------------------------------------------------------


def run(root: Path | str, environment: Mapping[str, str]) -> HostDump:
    """Run the script on a root folder; return what it prints."""
    text = script.script((structs.replace(SUBJECT, lines=()),), Rules(), full=True)
    command = ["sh", "-c", text, "sh", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return hostdump.read(done.stdout, "gpu-1")


def machine(root: Path) -> None:
    """Write the files of a host with two cards and a process below a root folder."""
    for minor, card in enumerate(CARDS):
        files = {
            f"sys/bus/pci/devices/{card}/vendor": "0x10de\n",
            f"sys/bus/pci/devices/{card}/class": "0x030200\n",
            f"sys/bus/pci/devices/{card}/device": "0x2330\n",
            f"proc/driver/nvidia/gpus/{card}/information": f"Device Minor: \t {minor}\n",
            f"dev/nvidia{minor}": "",
            "proc/4711/cgroup": f"0::/docker/{CONTAINER}\n",
            "etc/nvidia-container-runtime/config.toml": 'mode = "cdi"\n',
        }
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        (root / "sys/bus/pci/drivers/nvidia").mkdir(parents=True, exist_ok=True)
        (root / f"sys/bus/pci/devices/{card}/driver").symlink_to(root / "sys/bus/pci/drivers/nvidia")
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(HOST_NAMESPACE)


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """Write programs of a shell; return a PATH that has them first."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name.replace("_", "-")).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_script_reads_nvidia_smi(tmp_path: Path) -> None:
    """Run the real script with a tool that prints a report, and links; examine what it says."""
    machine(tmp_path / "root")
    (tmp_path / "links").write_text(LINK_STATES)
    tool = f"case $1 in -q) cat {DATA / 'h100-used.xml'};; nvlink) [ $2 = -e ] || cat {tmp_path / 'links'};; esac"
    ctk = "echo 'NVIDIA Container Toolkit CLI version 1.17.8'; echo 'commit: 0'"
    path = programs(tmp_path / "bin", nvidia_smi=tool, nvidia_ctk=ctk, python3="exit 1")
    dump = run(tmp_path / "root", path)
    now = script.snapshot(dump, (SUBJECT,), Rules(), sent=0.0, received=0.0)
    found = {reading.key: reading.value for reading in now.readings}
    assert found["", "toolkit"] == "1.17.8"
    assert found["", "toolkit mode"] == "cdi"
    assert found["GPU 1", "active NVLinks"] == 1
    owner = (tmp_path / "root/proc/4711").owner()
    assert str(found["GPU 0", "processes"]).startswith(f"4711 python {owner} 31 GiB in {CONTAINER}")
    assert "supported_graphics_clock" not in dump.facts["nvidia-smi"]
    levels = {key: level for key, (level, _) in answers(dump).items()}
    assert levels == {("gpu-nvlink", "GPU 1"): "remark"}


def test_a_tool_that_hangs_is_unknown_and_is_asked_once(tmp_path: Path) -> None:
    """Run the script with a Python that ignores SIGTERM: unknown, without a try of nvidia-smi; cut, it is so too."""
    machine(tmp_path / "root")
    deaf = "trap : TERM\nwhile :; do sleep 1; done"
    path = programs(tmp_path / "bin", python3=deaf, nvidia_smi=f"touch {tmp_path / 'asked'}; exit 9")
    text = script.script((SUBJECT,), Rules(), full=False).replace("ask 5", "ask 1")
    for limit, why in (("30", "nvidia-smi did not answer in 5 s"), ("0.5", "it did not answer in time")):
        command = ["timeout", limit, "sh", "-c", text, "sh", str(tmp_path / "root")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **path})
        dump = hostdump.read(script.usable(done.stdout), "gpu-1")
        now = script.snapshot(dump, (SUBJECT,), Rules(), sent=0.0, received=1e12)
        assert [reading.why for reading in now.readings if reading.value is None] == [why]
    assert not (tmp_path / "asked").exists()


def test_the_script_reads_nvml_first(tmp_path: Path) -> None:
    """Run the program on a pynvml that lacks most functions, and has lost a card."""
    machine(tmp_path / "root")
    (tmp_path / "pynvml.py").write_text(PYNVML)
    python = f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"'
    dump = run(tmp_path / "root", programs(tmp_path / "bin", python3=python, nvidia_smi="exit 9"))
    found = answers(dump)
    assert {(check, item): level for (check, item), (level, _) in found.items()} == {
        ("gpu-state", "GPU 1"): "bad",
        ("gpu-ecc", "GPU 0"): "bad",
        ("gpu-ecc-life", "GPU 0"): "remark",
        ("gpu-remap", "GPU 0"): "bad",
        ("gpu-slowdown", "GPU 0"): "bad",
        ("gpu-power-limit", "GPU 0"): "remark",
    }
    assert found["gpu-state", "GPU 1"] == ("bad", "the driver cannot reach it: GPU is lost")
    assert values(dump)["device memory"].text() == "81559 MiB"


def test_the_script_accuses_nobody_on_this_machine() -> None:
    """Run the real script here: whatever this machine is, it has no bad and no remark."""
    assert {level for level, _ in answers(run("/", {})).values()} <= {"unknown"}


# --- broken output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_a_broken_report_raises_only_what_is_expected(name: str) -> None:
    """Cut and change a report at random: a result, or an error that makes the subject unknown."""
    chance, text = random.Random(name), text_of(name)  # noqa: S311 - repeatable
    for _ in range(300 // len(REPORTS) + 1):
        mutated = list(text[: chance.randrange(len(text))] if chance.random() < 0.3 else text)
        for _ in range(chance.randrange(1, 12) if mutated else 0):
            mutated[chance.randrange(len(mutated))] = chance.choice("<>/&0-9aN \n\x00é")
        try:
            dump = dump_of(
                "".join(mutated), **{"nvlink -s": "".join(mutated), "nvlink -e": LINK_ERRORS[: len(mutated) % 200]}
            )
            answers(dump)
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
            continue


def test_broken_json_and_broken_processes() -> None:
    """Cut the program's output and a reading's value at random."""
    chance = random.Random(7)  # noqa: S311 - repeatable
    whole = '{"driver": "580", "cuda": "13.0", "gpus": [{"index": 0, "name": "H100", "used": 3, "processes": []}]}'
    value = f"4711 python ann 31 GiB; 4712 python root 512 MiB in {CONTAINER}"
    for _ in range(300):
        cut = chance.randrange(len(whole))
        changed = whole[:cut] + chance.choice('{}[]",:0x') + whole[cut + 1 :]
        with suppress(ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
            answers(dump_of(changed))
        cut = chance.randrange(len(value))
        processes(value[:cut] + chance.choice(";., 0x") + value[cut + chance.randrange(3) :])


def test_reports_are_read_in_many_threads_at_once() -> None:
    """Read the first reports of a process in 16 threads: msgspec alone crashes at that."""
    code = f"""
from threading import Thread
from labctl.accelerators.nvidia.report import report_of
texts = ['{{"gpus": [{{"index": 0}}]}}', open({str(DATA / "h100.xml")!r}).read()]
threads = [Thread(target=report_of, args=(texts[number % 2],)) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""

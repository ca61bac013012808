"""Health of Gaudis.

Fixtures: query.txt is published output of hl-smi 1.12 for one Gaudi2, shortened and repeated for a second one, without
serial numbers; csv.txt is composed of the documented columns and the units that tools expect in its header; link, ports
and stats have the form that Habana's Intel Gaudi Health Screen and a public exporter parse; dmesg.txt has published
lines (HabanaAI/Setup_and_Install#1) and the formats of drivers/accel/habanalabs.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from labctl.accelerators.habana import health
from labctl.health import examine
from labctl.health.model import Rules, Snapshot

from .health_hosts import DATA, answers, judged_by_host, look, sent, sentences, tool

FIXTURES = DATA / "habana"
TOOL = f"""
case "$*" in
"-Q "*) cat "${{CSV:-{FIXTURES}/csv.txt}}" ;;
"-q") cat {FIXTURES}/query.txt ;;
"-n ports "*) cat {FIXTURES}/ports.txt ;;
"-n link "*) cat {FIXTURES}/link.txt ;;
"-n stats "*) cat {FIXTURES}/stats.txt ;;
esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a host with two Gaudi2 of the driver, and an NPU, which is none."""
    root = tmp_path / "root"
    gaudi(root, 0, "0000:43:00.0")
    gaudi(root, 1, "0000:44:00.0")
    gaudi(root, 2, "0000:00:0b.0", driver="intel_vpu")
    (root / "sys/module/habanalabs").mkdir(parents=True)
    (root / "sys/module/habanalabs/version").write_text("1.18.0-ee698fb\n")
    return root


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Write an hl-smi that prints the fixtures."""
    return tool(tmp_path / "bin", "hl-smi", TOOL)


def gaudi(root: Path, index: int, address: str, *, driver: str = "habanalabs") -> Path:
    """Write a device of /sys/class/accel, and return its real folder."""
    device = root / f"sys/devices/pci0000:40/{address}"
    hwmon = device / f"hwmon/hwmon{index}"
    hwmon.mkdir(parents=True)
    (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")
    (root / f"sys/class/accel/accel{index}").mkdir(parents=True)
    (root / f"sys/class/accel/accel{index}/device").symlink_to(device)
    values = {"device_type": "GAUDI2", "fw_os_ver": "Zephyr 2.7.2", "module_id": index, "status": "Operational"}
    for name, value in {**values, "hard_reset_cnt": 0}.items():
        (device / name).write_text(f"{value}\n")
    for name, value in {"temp1_input": 45000, "temp1_crit": 95000, "temp2_input": 505712272000}.items():
        (hwmon / name).write_text(f"{value}\n")
    return device


def values(now: Snapshot, item: str) -> dict[str, object]:
    """Return the values of an item's readings by name."""
    return {reading.name: reading.value for reading in now.readings if reading.item == item}


def test_a_healthy_host_is_read_in_full(root: Path, tools: Path) -> None:
    """Read two Gaudis of sysfs, hwmon and hl-smi, and answer nothing."""
    now = look(health.SUBJECT, root, tools=tools)
    assert values(now, "")["Gaudis"] == 2
    assert values(now, "")["Gaudi driver"] == "1.18.0-ee698fb"
    assert values(now, "Gaudi 1") == {
        "PCI address": "0000:44:00.0",
        "model": "GAUDI2",
        "device firmware": "Zephyr 2.7.2",
        "module": "1",
        "driver status": "Operational",
        "hard resets": 0,
        "device temperature": 45.0,
        "margin to critical temperature": 50.0,
        "uncorrectable ECC errors": 0.0,
        "uncorrectable ECC errors of all time": 0.0,
        "device memory": 98304.0,
        "power draw": 87.0,
        "product": "HL-225",
        "serial": "AM00000001",
        "thermal slowdown": "Not Active",
        "row replacement pending": "No",
        "boot firmware": "Preboot version hl-gaudi2-1.12.1-fw-46.0.5-sec-6 (Oct 12 2023 - 22:14:34)",
        "power limit": "550 W",
        "rows replaced after single bit errors": 0,
        "rows replaced after double bit errors": 0,
        "internal ports up": 3,
        "external ports up": 1,
        "link toggles": 3,
    }
    assert judged_by_host(now.readings) == set()
    assert answers(health.SUBJECT, now) == []


def test_a_quick_look_asks_sysfs_alone(root: Path, tools: Path) -> None:
    """Yield nothing of hl-smi and of sensors in a quick look, and no unknown answer."""
    now = look(health.SUBJECT, root, tools=tools, full=False)
    assert "driver status" in values(now, "Gaudi 0")
    assert "uncorrectable ECC errors" not in values(now, "Gaudi 0")
    assert answers(health.SUBJECT, now) == []


def test_without_its_tool_the_checks_are_unknown(root: Path) -> None:
    """Answer unknown, with the reason, to what only hl-smi tells; the driver's status is still judged."""
    found = answers(health.SUBJECT, look(health.SUBJECT, root))
    assert {each.level for each in found} == {"unknown"}
    assert {each.text for each in found} == {"hl-smi is not installed"}
    assert {each.check for each in found} == {"gaudi-ecc", "gaudi-rows-pending", "gaudi-ports"}


def test_a_host_without_gaudis_says_nothing(tmp_path: Path) -> None:
    """Yield no reading of a machine that has none."""
    now = look(health.SUBJECT, tmp_path)
    assert [reading for reading in now.readings if reading.name != "clock offset"] == []


def test_this_machine_is_not_accused() -> None:
    """Answer nothing bad and no remark about the machine of the tests."""
    now = look(health.SUBJECT, Path("/"))
    assert [each for each in answers(health.SUBJECT, now) if each.level in ("bad", "remark")] == []


@pytest.mark.parametrize(
    ("status", "level"), [("Malfunction", "bad"), ("Needs reset", "bad"), ("In reset", "remark"), ("", "unknown")]
)
def test_the_status_of_the_driver_is_judged(root: Path, status: str, level: str) -> None:
    """Judge each status other than operational; it is unknown if the driver says none."""
    (root / "sys/devices/pci0000:40/0000:44:00.0/status").write_text(f"{status}\n" if status else "")
    (found,) = answers(health.SUBJECT, look(health.SUBJECT, root, full=False))
    assert (found.check, found.level, found.item) == ("gaudi-status", level, "Gaudi 1")
    assert found.text == (f"driver status is {status}" if status else "the driver does not report it")


def test_a_hot_sensor_is_bad(root: Path) -> None:
    """Judge a sensor above its own threshold as bad; a misreading of another sensor does not count."""
    (root / "sys/devices/pci0000:40/0000:44:00.0/hwmon/hwmon1/temp1_input").write_text("97500\n")
    found = [each for each in answers(health.SUBJECT, look(health.SUBJECT, root)) if each.level == "bad"]
    expected = [("bad", "Gaudi 1: temperature of a sensor is 2.5 °C above its critical threshold")]
    assert sentences(found) == expected


def changed(root: Path, tools: Path, name: str, value: float | str) -> list[tuple[str, str]]:
    """Return what is answered if a reading of Gaudi 1 has another value, compared with two healthy hosts."""
    good = look(health.SUBJECT, root, tools=tools)
    readings = (replace(each, value=value) if each.key == ("Gaudi 1", name) else each for each in good.readings)
    past = examine.Past(snapshot=good)
    now = replace(good, readings=tuple(readings))
    conditions = examine.examine(now, (health.SUBJECT,), Rules(), past, {"gpu-2": good, "gpu-3": good})
    return sentences([each for each in conditions if each.level in ("bad", "remark") and each.check != "changed"])


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("uncorrectable ECC errors", 3, ("bad", "Gaudi 1: uncorrectable ECC errors 3")),
        ("row replacement pending", "Yes", ("bad", "Gaudi 1: row replacement pending is Yes")),
        ("rows replaced after double bit errors", 1, ("remark", "Gaudi 1: rows replaced after double bit errors +1")),
        ("thermal slowdown", "Active", ("remark", "Gaudi 1: thermal slowdown is Active")),
        ("hard resets", 2, ("remark", "Gaudi 1: hard resets +2")),
        ("link toggles", 7, ("remark", "Gaudi 1: link toggles +4")),
        ("internal ports up", 2, ("bad", "Gaudi 1: internal ports up 2, 3 on 5 others")),
        ("external ports up", 0, ("bad", "Gaudi 1: external ports up 0, 1 on 5 others")),
        ("power limit", "300 W", ("remark", "Gaudi 1: power limit 300 W, 550 W on 5 others")),
        ("device firmware", "Zephyr 2", ("remark", "Gaudi 1: device firmware Zephyr 2, Zephyr 2.7.2 on 5 others")),
        ("device memory", 49152.0, ("bad", "Gaudi 1: device memory 49152 MiB, 98304 on 5 others")),
    ],
)
def test_what_is_wrong_is_named(
    root: Path, tools: Path, name: str, value: float | str, answer: tuple[str, str]
) -> None:
    """Answer in a clause what is wrong with a Gaudi, compared with its limit, its past and its neighbours."""
    assert changed(root, tools, name, value) == [answer]


def test_a_host_with_fewer_gaudis_is_bad(root: Path, tools: Path) -> None:
    """Judge a missing Gaudi by the other hosts."""
    good = look(health.SUBJECT, root, tools=tools)
    (root / "sys/class/accel/accel1/device").unlink()
    now = look(health.SUBJECT, root, tools=tools)
    assert ("bad", "Gaudis 1, 2 on 2 others") in sentences(answers(health.SUBJECT, now, {"a": good, "b": good}))


def test_a_gaudi_that_its_tool_does_not_list_is_unknown(root: Path, tmp_path: Path) -> None:
    """Answer unknown with the tool's first line if it prints no table."""
    tools = tool(tmp_path / "bin", "hl-smi", "echo 'Failed to initialize HLML: Driver Not Loaded'; exit 1\n")
    found = answers(health.SUBJECT, look(health.SUBJECT, root, tools=tools))
    why = "hl-smi does not list it: Failed to initialize HLML: Driver Not Loaded"
    assert sentences(found) == [("unknown", f"Gaudi {index}: {why}") for index in (0, 1)]


def test_kernel_lines_name_the_device(root: Path) -> None:
    """Answer each kind of line once, and nothing to those of a healthy start and of corrected errors."""
    lines = (FIXTURES / "dmesg.txt").read_text()
    now = look(health.SUBJECT, root, dmesg=lines, full=False)
    found = [(level, text.rpartition(", ")[0]) for level, text in sentences(answers(health.SUBJECT, now))]
    assert found == [
        ("bad", "0000:1a:00.0: is not usable: its driver could not start it"),
        ("bad", "0000:33:00.0: is not usable: its driver could not start it"),
        ("bad", "Gaudi 2: its firmware does not answer: Failed to communicate with Device CPU"),
        ("bad", "Gaudi 4: its firmware does not answer: Device heartbeat failed"),
        ("bad", "Gaudi 6: lost its PCI connection: PCI frozen state error detected"),
        ("bad", "Gaudi 5: reports an uncorrectable memory error: CPU_AXI_ECC"),
        ("remark", "Gaudi 7: slowed down because it was too hot"),
    ]


def test_the_script_sends_the_lines_that_are_judged() -> None:
    """Match the same lines by grep -E as by Python."""
    lines = (FIXTURES / "dmesg.txt").read_text()
    assert sent(health.SUBJECT, lines) == [
        line for line in lines.splitlines() if any(re.search(check.pattern, line) for check in health.SUBJECT.lines)
    ]


def test_broken_output_raises_only_what_is_expected() -> None:
    """Parse truncated and mutated output of hl-smi, 300 times each, without any other error."""
    chance = random.Random(20)  # noqa: S311 - no secret
    texts = {name: (FIXTURES / f"{name}.txt").read_text() for name in ("csv", "query", "link", "ports", "stats")}
    for _ in range(300):
        cut = {name: mutated(text, chance) for name, text in texts.items()}
        facts = {f"hl-smi {name} 0000:43:00.0": text for name, text in cut.items()}
        try:
            list(health.of_columns(cut["csv"], "0000:43:00.0", "Gaudi 0", "GAUDI2"))
            list(health.of_query(cut["query"], "0000:43:00.0", "Gaudi 0", "GAUDI2"))
            list(health.of_ports(facts, "0000:43:00.0", "Gaudi 0", "GAUDI2"))
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
            continue


def mutated(text: str, chance: random.Random) -> str:
    """Return a text that is cut, and has some other characters."""
    characters = list(text[: chance.randrange(len(text) + 1)])
    for _ in range(chance.randrange(8)):
        if characters:
            characters[chance.randrange(len(characters))] = chance.choice('\n\t:,[]0x\0"é ')
    return "".join(characters)

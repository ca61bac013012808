"""Health of Intel GPUs.

Fixtures: health-1.json and health-2.json have the fields and sentences of xpu-smi 1.3.7 and 2.0 (its user guide, and
intel/xpumanager: cli/src/core_stub/lib_core_stub.cpp, ial/cmn/cmd_health.cpp); discovery.txt has the form of the
guide's example; dmesg.txt has published lines of i915 and xe.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from labctl.accelerators.intel import health
from labctl.health import examine
from labctl.health.model import Rules, Snapshot

from .health_hosts import DATA, answers, judged_by_host, look, sent, sentences, tool

FIXTURES = DATA / "intel"
GPU = "0000:4d:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a host with the processor's GPU and a card of the driver xe."""
    root = tmp_path / "root"
    gpu(root, 128, "0000:00:02.0", driver="i915")
    card = gpu(root, 129, GPU)
    (card / "tile0").mkdir()
    (card / "tile0/physical_vram_size_bytes").write_text("0x1000000000\n")
    counters = card / "tile0/gt0/error_counter"
    counters.mkdir(parents=True)
    for name in ("fatal_guc", "sgunit_nonfatal", "sgunit_correctable"):
        (counters / name).write_text("0\n")
    hwmon = card / "hwmon/hwmon3"
    hwmon.mkdir(parents=True)
    for name, value in {"temp2_input": 51000, "temp2_crit": 105000, "temp3_input": 60000}.items():
        (hwmon / name).write_text(f"{value}\n")
    (root / "sys/module/xe").mkdir(parents=True)
    (root / "sys/module/xe/version").write_text("1.0.6\n")
    return root


def gpu(root: Path, number: int, address: str, *, driver: str = "xe") -> Path:
    """Write a GPU with its render node in sysfs, and return its real folder."""
    device = root / f"sys/devices/pci0000:00/{address}"
    device.mkdir(parents=True)
    (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")
    (root / f"sys/class/drm/renderD{number}").mkdir(parents=True)
    (root / f"sys/class/drm/renderD{number}/device").symlink_to(device)
    (device / "vendor").write_text("0x8086\n")
    (device / "device").write_text("0x0bd5\n")
    return device


def tools(tmp_path: Path, version: int = 1) -> Path:
    """Write an xpu-smi that prints the fixtures of a version."""
    discovery, said = FIXTURES / "discovery.txt", FIXTURES / f"health-{version}.json"
    return tool(tmp_path / "bin", "xpu-smi", f"case $1 in discovery) cat {discovery} ;; health) cat {said} ;; esac\n")


def values(now: Snapshot, item: str) -> dict[str, object]:
    """Return the values of an item's readings by name."""
    return {reading.name: reading.value for reading in now.readings if reading.item == item}


def test_a_healthy_card_is_read_in_full(root: Path, tmp_path: Path) -> None:
    """Read sysfs, sensors and xpu-smi of the card, nothing of the processor's GPU, and answer nothing."""
    now = look(health.SUBJECT, root, tools=tools(tmp_path))
    assert values(now, "")["Intel GPUs"] == 1
    assert values(now, "")["Intel GPU driver"] == "xe 1.0.6"
    assert {reading.item for reading in now.readings} == {"", "GPU renderD129"}
    assert values(now, "GPU renderD129") == {
        "PCI address": GPU,
        "model": "0x0bd5",
        "device memory": 65536,
        "hardware errors": 0,
        "device temperature": 60.0,
        "margin to critical temperature": 54.0,
        "product": "Intel(R) Data Center GPU Max 1550",
        "device firmware": "PVC2_1.23374",
        **{f"{name} status": "OK" for name in health.COMPONENTS.values()},
    }
    assert judged_by_host(now.readings) == set()
    assert answers(health.SUBJECT, now) == []


def test_a_quick_look_asks_sysfs_alone(root: Path, tmp_path: Path) -> None:
    """Yield nothing of xpu-smi and of sensors in a quick look, and no unknown answer."""
    now = look(health.SUBJECT, root, tools=tools(tmp_path), full=False)
    assert set(values(now, "GPU renderD129")) == {"PCI address", "model", "device memory", "hardware errors"}
    assert answers(health.SUBJECT, now) == []


def test_components_are_judged_as_the_tool_does(root: Path, tmp_path: Path) -> None:
    """Judge Critical as bad, Warning as a remark, Unknown as unknown, and throttling by the power limit not at all."""
    found = answers(health.SUBJECT, look(health.SUBJECT, root, tools=tools(tmp_path, 2)))
    hot = "core temperature is Warning: Unhealthy temperature sensor value, 106.00 >= 105 (threshold)"
    replaced = "memory health is Critical: Device should be replaced due to excessive uncorrectable errors."
    assert sentences(found) == [
        ("remark", f"GPU renderD129: {hot}"),
        ("unknown", "GPU renderD129: Health cannot be determined for temperature sensors."),
        ("bad", f"GPU renderD129: {replaced}"),
    ]


@pytest.mark.parametrize(
    ("program", "why"),
    [("", "xpu-smi is not installed"), ("echo 'Error: no device'; exit 1\n", "xpu-smi does not report it")],
)
def test_without_its_tool_the_components_are_unknown(root: Path, tmp_path: Path, program: str, why: str) -> None:
    """Answer unknown, with the reason, to what only xpu-smi tells."""
    folder = tool(tmp_path / "bin", "xpu-smi", program) if program else None
    found = answers(health.SUBJECT, look(health.SUBJECT, root, tools=folder))
    assert [(each.level, each.text) for each in found] == [("unknown", why)] * len(health.COMPONENTS)


def test_a_host_with_only_the_processors_gpu_says_nothing(tmp_path: Path) -> None:
    """Yield no reading of a laptop, whatever its kernel says of the processor's GPU."""
    gpu(tmp_path, 128, "0000:00:02.0", driver="i915")
    now = look(health.SUBJECT, tmp_path)
    assert [reading for reading in now.readings if reading.name != "clock offset"] == []
    assert answers(health.SUBJECT, now) == []


def test_this_machine_is_not_accused() -> None:
    """Answer nothing bad and no remark about the machine of the tests."""
    now = look(health.SUBJECT, Path("/"))
    assert [each for each in answers(health.SUBJECT, now) if each.level in ("bad", "remark")] == []


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("hardware errors", 2, ("bad", "GPU renderD129: hardware errors 2")),
        (
            "margin to critical temperature",
            0.0,
            ("bad", "GPU renderD129: temperature of a sensor is at its critical threshold"),
        ),
        ("device memory", 32768, ("bad", "GPU renderD129: device memory 32768 MiB, 65536 on 2 others")),
        ("device firmware", "PVC1", ("remark", "GPU renderD129: device firmware PVC1, PVC2_1.23374 on 2 others")),
        ("Intel GPU driver", "xe 1.0.5", ("remark", "Intel GPU driver xe 1.0.5, xe 1.0.6 on 2 others")),
        ("Intel GPUs", 0, ("bad", "Intel GPUs 0, 1 on 2 others")),
    ],
)
def test_what_is_wrong_is_named(
    root: Path, tmp_path: Path, name: str, value: float | str, answer: tuple[str, str]
) -> None:
    """Answer in a clause what is wrong with a card or its host, compared with its limit and two healthy hosts."""
    good = look(health.SUBJECT, root, tools=tools(tmp_path))
    readings = (replace(each, value=value) if each.name == name else each for each in good.readings)
    now = replace(good, readings=tuple(readings))
    assert sentences(answers(health.SUBJECT, now, {"a": good, "b": good})) == [answer]


def test_kernel_lines_name_the_card_and_the_program(root: Path) -> None:
    """Answer wedged cards, hardware errors and hangs, not those of the processor's GPU nor a reset that worked."""
    now = look(health.SUBJECT, root, dmesg=(FIXTURES / "dmesg.txt").read_text(), full=False)
    found = [(level, text.rpartition(", ")[0]) for level, text in sentences(answers(health.SUBJECT, now))]
    assert found == [
        ("bad", "0000:4d:00.0: has been given up by its driver: Failed to reset chip"),
        ("bad", "0000:03:00.0: has been given up by its driver: declared device 0000:03:00.0 as wedged"),
        ("bad", "0000:03:00.0: reports a hardware error: NONFATAL"),
        ("remark", "0000:4d:00.0: hung and was reset while python3 used it"),
        ("remark", "0000:03:00.0: hung and was reset while python3 used it (2 times)"),
    ]


def test_unreadable_kernel_lines_are_unknown(root: Path) -> None:
    """Answer unknown to the checks of kernel lines if the user may not read them."""
    now = replace(look(health.SUBJECT, root, full=False), lines=(), lines_why="dmesg: not permitted")
    found = examine.examine(now, (health.SUBJECT,), Rules(), examine.Past(), {})
    levels = {each.level for each in found if each.check in {line.name for line in health.SUBJECT.lines}}
    assert levels == {"unknown"}


def test_the_script_sends_the_lines_that_are_judged() -> None:
    """Match the same lines by grep -E as by Python."""
    lines = (FIXTURES / "dmesg.txt").read_text()
    assert sent(health.SUBJECT, lines) == [
        line for line in lines.splitlines() if any(re.search(check.pattern, line) for check in health.SUBJECT.lines)
    ]


def test_broken_output_raises_only_what_is_expected() -> None:
    """Parse truncated and mutated output of xpu-smi, 300 times, without any other error."""
    chance = random.Random(21)  # noqa: S311 - no secret
    names = ("health-1.json", "health-2.json", "discovery.txt")
    texts = {name: (FIXTURES / name).read_text() for name in names}
    for number in range(300):
        cut = {name: mutated(text, chance, whole=bool(number % 2)) for name, text in texts.items()}
        for name in names[:2]:
            facts = {"xpu-smi health": cut[name], "xpu-smi discovery": cut["discovery.txt"]}
            try:
                list(health.of_tool(facts, GPU, "GPU renderD129", "Intel"))
            except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
                continue


def mutated(text: str, chance: random.Random, *, whole: bool) -> str:
    """Return a text that has some other characters, and is cut unless it shall stay whole."""
    characters = list(text if whole else text[: chance.randrange(len(text) + 1)])
    for _ in range(chance.randrange(8)):
        if characters:
            characters[chance.randrange(len(characters))] = chance.choice('\n\t:,[]{}0x\0"é ')
    return "".join(characters)

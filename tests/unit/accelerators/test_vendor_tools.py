"""The vendors' tools, as stand-ins on PATH: the facts they add, and the handling of their failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.accelerators import vendor_tools
from labctl.accelerators.vendor_tools import describe
from labctl.model import Device

GPUS = tuple(
    Device(id=str(index), path=f"/dev/nvidia{index}", pci=f"0000:{bus}:00.0", name="as the driver says")
    for index, bus in enumerate(("3b", "5e"))
)
HEALTHY = (
    "0, 00000000:3B:00.0, NVIDIA H100 80GB HBM3, 81559, GPU-aaaa, 0\n"
    "1, 00000000:5E:00.0, NVIDIA H100 80GB HBM3, 81559, GPU-bbbb, [N/A]\n"
)

Tool = Callable[..., None]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Set PATH to an empty directory; return a function that writes executables into it."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, out: str, code: int = 0, *, before: str = "") -> None:
        """Write an executable of this name that runs ``before``, prints ``out`` and exits with ``code``."""
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\nimport sys, time\n{before}\nprint({out!r}, end='')\nsys.exit({code})\n")
        path.chmod(0o755)

    return make


def healths(devices: tuple[Device, ...]) -> list[str]:
    """Return each device's health."""
    return [device.health for device in devices]


@pytest.mark.usefixtures("tool")
def test_a_tool_that_is_not_there_adds_no_word() -> None:
    """Without nvidia-smi on PATH: describe returns the devices unchanged."""
    assert describe("nvidia", GPUS) == GPUS
    assert describe("cpu", ()) == ()


def test_a_gpu_gets_name_memory_and_uuid_by_its_address(tool: Tool) -> None:
    """Print the GPUs in reverse order: name, memory and UUID go to the device with that PCI address."""
    tool("nvidia-smi", "".join(reversed(HEALTHY.splitlines(keepends=True))))
    first, second = describe("nvidia", GPUS)
    assert (first.name, first.memory, first.uuid) == ("NVIDIA H100 80GB HBM3", 81559 << 20, "GPU-aaaa")
    assert second.uuid == "GPU-bbbb"
    assert healths((first, second)) == ["", ""]


def test_a_gpu_without_an_address_goes_by_its_index(tool: Tool) -> None:
    """Describe a device without a PCI address: it gets the UUID of the line with its index."""
    tool("nvidia-smi", HEALTHY)
    (device,) = describe("nvidia", (Device(id="1", path="/dev/nvidia1"),))
    assert device.uuid == "GPU-bbbb"


@pytest.mark.parametrize("cell", ["[Unknown Error]", "[GPU is lost]", "ERR!", "[GPU requires reset]"])
def test_a_cell_that_is_an_error_is_that_gpus_health(tool: Tool, cell: str) -> None:
    """Print an error in the last cell of one GPU: its health is that text, the other's stays empty."""
    tool("nvidia-smi", HEALTHY.replace("GPU-bbbb, [N/A]", f"GPU-bbbb, {cell}"))
    assert healths(describe("nvidia", GPUS)) == ["", f"nvidia-smi: {cell}"]


def test_a_gpu_that_cannot_even_tell_its_address_is_known_by_its_index(tool: Tool) -> None:
    """Print an error in every cell but the index: that device's health is the error, and it keeps its name."""
    lost = "1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]\n"
    tool("nvidia-smi", HEALTHY.splitlines(keepends=True)[0] + lost)
    described = describe("nvidia", GPUS)
    assert healths(described) == ["", "nvidia-smi: [GPU is lost]"]
    assert described[1].name == "as the driver says"


def test_uncorrected_memory_errors_are_counted(tool: Tool) -> None:
    """Print 12 in the error column: the health says 12 uncorrected memory errors since the driver was loaded."""
    tool("nvidia-smi", HEALTHY.replace("[N/A]", "12"))
    assert healths(describe("nvidia", GPUS)) == [
        "",
        "nvidia-smi: 12 uncorrected memory errors since the driver was loaded",
    ]


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ("Failed to initialize NVML: Unknown Error\n", 255),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n", 18),
    ],
)
def test_a_tool_that_fails_is_said_of_every_device(tool: Tool, out: str, code: int) -> None:
    """Let nvidia-smi fail: every device's health is the first line of its output."""
    tool("nvidia-smi", out, code)
    assert healths(describe("nvidia", GPUS)) == [f"nvidia-smi: {out.splitlines()[0]}"] * 2


def test_a_failure_that_names_a_gpu_is_said_of_that_one(tool: Tool) -> None:
    """Let nvidia-smi fail with a line that names one PCI address: only that device's health is the line."""
    line = (
        "Unable to determine the device handle for GPU0000:5E:00.0: GPU is lost.  Reboot the system to recover this GPU"
    )
    tool("nvidia-smi", f"{line}\n", 15)
    assert healths(describe("nvidia", GPUS)) == ["", f"nvidia-smi: {line}"]


def test_a_gpu_that_fell_off_the_bus_is_not_listed(tool: Tool) -> None:
    """Leave one GPU out of the output: its health is "nvidia-smi: does not list it"."""
    tool("nvidia-smi", HEALTHY.splitlines(keepends=True)[0])
    assert healths(describe("nvidia", GPUS)) == ["", "nvidia-smi: does not list it"]


def test_a_tool_that_fails_without_a_word_gives_its_code(tool: Tool) -> None:
    """Let nvidia-smi exit with code 9 and no output: every device's health is "nvidia-smi: exit code 9"."""
    tool("nvidia-smi", "", 9)
    assert healths(describe("nvidia", GPUS)) == ["nvidia-smi: exit code 9"] * 2


def test_a_tool_that_hangs_is_cut_off(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nvidia-smi sleep beyond the time limit: every device's health says "timed out after 0.5 s"."""
    monkeypatch.setattr(vendor_tools, "SECONDS", 0.5)
    tool("nvidia-smi", "", before="time.sleep(60)")
    assert ["timed out after 0.5 s" in text for text in healths(describe("nvidia", GPUS))] == [True, True]


@pytest.mark.usefixtures("tool")
def test_a_tool_that_is_no_program_is_said(tmp_path: Path) -> None:
    """Make nvidia-smi a file without execute permission: every device's health says "Permission denied"."""
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o644)
    assert ["Permission denied" in text for text in healths(describe("nvidia", GPUS))] == [True, True]


def test_a_gaudi_keeps_what_its_driver_said(tool: Tool) -> None:
    """Describe a Gaudi from hl-smi: name, memory and UUID are added, its driver's health text stays."""
    tool("hl-smi", "0, 0000:19:00.0, HL-225, 98304, 01P0-HL2080A0\n")
    card = Device(id="0", path="/dev/accel/accel0", pci="0000:19:00.0", name="GAUDI2", health="driver status: in reset")
    (device,) = describe("habana", (card,))
    assert (device.name, device.memory, device.uuid) == ("HL-225", 98304 << 20, "01P0-HL2080A0")
    assert device.health == card.health


def test_an_intel_card_is_read_from_a_table_with_a_head(tool: Tool) -> None:
    """Describe cards from xpu-smi's CSV: the listed card gets name and memory, the integrated one nothing."""
    tool(
        "xpu-smi",
        "Device ID,PCI BDF Address,Device Name,Memory Physical Size,SOC UUID\n"
        '0,"0000:4d:00.0","Intel(R) Data Center GPU Max 1100","49152.00 MiB","00000000-0000-004d"\n',
    )
    node = "/dev/dri/renderD128"
    cards = (
        Device(id=node, path=node, pci="0000:4d:00.0"),
        Device(id="/dev/dri/renderD129", path="/dev/dri/renderD129", pci="0000:00:02.0", integrated=True),
    )
    first, second = describe("intel", cards)
    assert (first.name, first.memory) == ("Intel(R) Data Center GPU Max 1100", 49152 << 20)
    assert second == cards[1]

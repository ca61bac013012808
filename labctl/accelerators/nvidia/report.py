"""Report of NVIDIA GPUs: the JSON of the program ``nvml``, or the XML of ``nvidia-smi -q -x``.

Source: nvidia-smi(1).
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from msgspec import Struct

from labctl.system import pci
from labctl.system.decode import convert, decode


class Used(Struct, frozen=True, kw_only=True):
    """A process with memory of a GPU; memory in MiB."""

    pid: int
    name: str = ""
    memory: int | None = None
    compute: bool = True
    """True if it only computes: a desktop's programs also draw."""


class Gpu(Struct, frozen=True, kw_only=True):
    """Values of a GPU in the order of nvidia-smi's index; None where the GPU or its driver has no such value."""

    index: int
    error: str = ""
    """Why the driver cannot reach it; empty if it can."""
    address: str = ""
    name: str = ""
    uuid: str | None = None
    serial: str | None = None
    part: str | None = None
    """Part number of the board."""
    vbios: str | None = None
    persistence: str | None = None
    compute_mode: str | None = None
    mig: str | None = None
    memory: int | None = None
    """Memory in MiB, and that in use, without what the driver reserves."""
    used: int | None = None
    vgpu_host: bool = False
    system_memory: bool = False
    """True if the kernel manages its memory as that of a NUMA node."""
    uncorrectable: int | None = None
    corrected: int | None = None
    uncorrectable_ever: int | None = None
    sram_exceeded: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    full_banks: int | None = None
    """Banks of memory without a spare row."""
    retired: int | None = None
    retirement_pending: bool | None = None
    recovery: str | None = None
    """The driver's own word for what has to be done."""
    slowdowns: tuple[str, ...] | None = None
    limit: float | None = None
    default_limit: float | None = None
    idle: bool | None = None
    margin: float | None = None
    """Degrees up to the temperature at which the card slows down."""
    fabric: str | None = None
    fabric_error: str = ""
    nvlinks: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_crc: int | None = None
    processes: tuple[Used, ...] | None = None

    @property
    def item(self) -> str:
        return f"GPU {self.index}"

    @property
    def is_closed(self) -> bool:
        """Tell if the user has no right to open it. Source: NVML API Reference Guide, NVML_ERROR_NO_PERMISSION."""
        return "insufficient permissions" in self.error.lower()


class Report(Struct, frozen=True, kw_only=True):
    """The driver and its GPUs; ``cuda`` is the newest CUDA that it supports."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


def report_of(text: str) -> Report:
    """Parse the output of the program ``nvml``, or of ``nvidia-smi -q -x``. ValueError if it is neither."""
    if text.lstrip().startswith("{"):
        return decode(text, Report)
    begin, end = text.find("<nvidia_smi_log>"), text.rfind("</nvidia_smi_log>")
    if begin < 0 or end < 0:
        raise ValueError(f"nvidia-smi prints no report: {first_line(text)}")
    try:
        # The file begins with a DOCTYPE of another file, and may end with warnings.
        root = ET.fromstring(text[begin : end + len("</nvidia_smi_log>")])  # noqa: S314 - without its DOCTYPE
    except ET.ParseError as error:
        raise ValueError(f"nvidia-smi's report: {error}") from None
    gpus = (_gpu(index, node) for index, node in enumerate(root.findall("gpu")))
    driver, cuda = _text(root, "driver_version") or "", _text(root, "cuda_version") or ""
    return Report(driver=driver, cuda=cuda, gpus=tuple(gpus))


def is_report(text: str) -> bool:
    """Tell if a text is a report of either form, rather than an error."""
    return "<nvidia_smi_log>" in text or text.lstrip().startswith("{")


def first_line(text: str) -> str:
    """Return the first line of a text that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")


_NONE = re.compile(r"(N/A|Not Supported|Unknown|Not Found|Requested functionality has been deprecated)", re.IGNORECASE)
_LOST = re.compile(r"(GPU is lost|GPU requires re(set|start)|Unknown Error|No data|ERR!)", re.IGNORECASE)


def _text(node: ET.Element, *paths: str) -> str | None:
    """Return the text of the first of these elements that has any; None for nvidia-smi's words for no value."""
    texts = ((node.findtext(path) or "").strip().strip("[]") for path in paths)
    return next((text for text in texts if text and not _NONE.fullmatch(text)), None)


def _number(node: ET.Element, *paths: str) -> float | None:
    """Return the number with which the first of these elements begins, such as ``81920 MiB``."""
    match = re.match(r"-?\d+(\.\d+)?", _text(node, *paths) or "")
    return float(match[0]) if match else None


def _count(node: ET.Element, *paths: str) -> int | None:
    """Return a whole number."""
    number = _number(node, *paths)
    return None if number is None else int(number)


def _sum(node: ET.Element | None, *tags: str) -> int | None:
    """Return the sum of these children; None if none has a number."""
    counts = [_count(node, tag) for tag in tags] if node is not None else []
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _flag(node: ET.Element, *paths: str) -> bool | None:
    """Return True for ``Yes``, False for ``No``."""
    return {"Yes": True, "No": False}.get(_text(node, *paths) or "")


def _gpu(index: int, node: ET.Element) -> Gpu:
    """Build a GPU from its element of nvidia-smi's report."""
    texts = (node.findtext(path) or "" for path in ("product_name", "uuid", "fb_memory_usage/total"))
    lost = next(filter(None, map(_LOST.search, texts)), None)
    address = pci.address(node.get("id", "")) or pci.address(_text(node, "pci/pci_bus_id") or "")
    if lost:
        return Gpu(index=index, address=address, error=lost[0])
    users = [_used(part) for part in node.findall("processes/process_info")]
    parts = (_identity(node), _memory(node), _errors(node), _clocks(node), _fabric(node), {"processes": users})
    values = {name: value for part in parts for name, value in part.items() if value is not None}
    return convert({"index": index, "address": address, **values}, Gpu)


def _identity(node: ET.Element) -> dict[str, object]:
    """Return a GPU's name, numbers, versions and modes."""
    return {
        "name": _text(node, "product_name"),
        "uuid": _text(node, "uuid"),
        "serial": _text(node, "serial"),
        "part": _text(node, "board_part_number"),
        "vbios": _text(node, "vbios_version"),
        "persistence": _text(node, "persistence_mode"),
        "compute_mode": _text(node, "compute_mode"),
        "mig": _text(node, "mig_mode/current_mig"),
    }


def _memory(node: ET.Element) -> dict[str, object]:
    """Return memory; before driver 510 ``used`` is with what the driver reserves, and has no ``reserved``."""
    reserved = _count(node, "fb_memory_usage/reserved")
    return {
        "memory": _count(node, "fb_memory_usage/total"),
        "used": None if reserved is None else _count(node, "fb_memory_usage/used"),
        "vgpu_host": (_text(node, "gpu_virtualization_mode/virtualization_mode") or "").startswith("Host"),
        "system_memory": _text(node, "addressing_mode") == "ATS",
    }


def _errors(node: ET.Element) -> dict[str, object]:
    """Return the errors of memory and their repairs."""
    volatile, ever = node.find("ecc_errors/volatile"), node.find("ecc_errors/aggregate")
    pages = ("multiple_single_bit_retirement/retired_count", "double_bit_retirement/retired_count")
    return {
        "uncorrectable": _sum(volatile, *_UNCORRECTABLE),
        "corrected": _sum(volatile, *_CORRECTED),
        "uncorrectable_ever": _sum(ever, *_UNCORRECTABLE),
        "sram_exceeded": _flag(node, "ecc_errors/aggregate/sram_threshold_exceeded"),
        "remap_pending": _flag(node, "remapped_rows/remapped_row_pending"),
        "remap_failed": _flag(node, "remapped_rows/remapped_row_failure"),
        "full_banks": _count(node, "remapped_rows/row_remapper_histogram/row_remapper_histogram_none"),
        "retired": _sum(node.find("retired_pages"), *pages),
        "retirement_pending": _flag(node, "retired_pages/pending_retirement", "retired_pages/pending_blacklist"),
        "recovery": _recovery(node),
    }


_UNCORRECTABLE = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
    "double_bit/total",
)
"""Elements of drivers from 450 on, of those from 535 on for newer GPUs, and of older drivers."""
_CORRECTED = ("sram_correctable", "dram_correctable", "single_bit/total")


def _recovery(node: ET.Element) -> str | None:
    """Return the driver's word for what has to be done; before driver 565 it is one of two flags."""
    if _flag(node, "gpu_reset_status/reset_required"):
        return "Reset"
    if _flag(node, "gpu_reset_status/drain_and_reset_recommended"):
        return "Drain and Reset"
    return _text(node, "gpu_recovery_action")


def _clocks(node: ET.Element) -> dict[str, object]:
    """Return reasons for lower clocks, power limits, and the margin of the temperature; as of the driver's version."""
    used = _number(node, "utilization/gpu_util")
    reasons = node.find("clocks_event_reasons")
    old = node.find("clocks_throttle_reasons") if reasons is None else reasons
    limit = ("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit")
    return {
        "slowdowns": None if old is None else [word for end, word in _SLOWDOWNS.items() if _active(old, end)],
        "limit": _number(node, *limit),
        "default_limit": _number(node, "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        "idle": None if used is None else used == 0,
        "margin": _margin(node),
    }


_SLOWDOWNS = {
    "hw_slowdown": "HW slowdown",
    "hw_thermal_slowdown": "HW thermal slowdown",
    "hw_power_brake_slowdown": "HW power brake",
    "sw_thermal_slowdown": "SW thermal slowdown",
}


def _active(reasons: ET.Element, end: str) -> bool:
    """Tell if a reason is ``Active``."""
    return any(reason.tag.endswith(f"_reason_{end}") and reason.text == "Active" for reason in reasons)


def _margin(node: ET.Element) -> float | None:
    """Return the degrees up to the slowdown: newer GPUs have margins to a limit, older ones temperatures."""
    own, lowest = (
        _number(node, "temperature/gpu_temp_tlimit"),
        _number(node, "temperature/gpu_temp_slow_tlimit_threshold"),
    )
    if own is not None and lowest is not None:
        return own - lowest
    now, slow = _number(node, "temperature/gpu_temp"), _number(node, "temperature/gpu_temp_slow_threshold")
    return None if now is None or slow is None else slow - now


def _fabric(node: ET.Element) -> dict[str, object]:
    """Return the state of the registration with the fabric manager, and its error."""
    state, status = _text(node, "fabric/state"), _text(node, "fabric/status")
    return {"fabric": state, "fabric_error": status if state == "Completed" and status != "Success" else None}


def _used(node: ET.Element) -> dict[str, object]:
    """Return a process, whose type is C, G, C+G or M+C."""
    kind, memory = _text(node, "type") or "", _count(node, "used_memory")
    name = _text(node, "process_name") or ""
    return {"pid": _count(node, "pid"), "name": name, "memory": memory, "compute": "G" not in kind}

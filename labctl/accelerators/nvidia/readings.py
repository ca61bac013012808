"""Health of NVIDIA GPUs: readings from NVML, else nvidia-smi, from the kernel's log and the container toolkit.

Sources: NVML API Reference Guide; nvidia-smi(1); NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors); GPU Memory
Error Management; Dynamic Page Retirement.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree as ET

import msgspec
from msgspec import Struct

from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, Level, LineCheck, Reading, Subject, Value
from labctl.system import human, pci
from labctl.system.hostdump import HostDump
from labctl.system.procfs import read

SOURCE = "nvidia-smi -q"
GPUS = "proc/driver/nvidia/gpus"
GIB = 1 << 30
HOST_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of linux/include/linux/proc_ns.h: in another namespace, processes of the host are not seen."""
RESET = (
    "end what runs on {item}",
    "{sudo}nvidia-smi --gpu-reset --id={id}",
    "{sudo}reboot",
    "if it comes again: have the card replaced",
)
RESTART = ("end what runs on the node", "{sudo}reboot", "if it comes again: reseat or replace the card")

# --- the script ----------------------------------------------------------------------------------------------

_PROGRAM = Path(__file__).with_name("nvml.py").read_text(encoding="utf-8") + "\nprint(output())\n"
_SCRIPT = f"""
cards=$(grep -lx 0x10de sys/bus/pci/devices/*/vendor 2> /dev/null)
[ -n "$cards" ] || command -v nvidia-smi > /dev/null || exit 0
for vendor in $cards; do
    card=${{vendor%/vendor}}
    link "$card/driver" "$card/physfn"
    set -- "$@" "$vendor" "$card/class" "$card/device"
done
lines "$@" sys/class/power_supply/*/type
text {GPUS}/*/information etc/nvidia-container-runtime/config.toml
fact 'nvidia files' "$(echo dev/nvidia[0-9]*)"
fact 'pid namespace' "$(readlink proc/self/ns/pid)"
program={shlex.quote(_PROGRAM)}
report=$(timeout 5 python3 -c "$program" 2> /dev/null)
code=$?
if [ $code != 0 ]; then
    report=$(timeout 5 nvidia-smi -q -x 2>&1)
    code=$?
fi
fact 'nvidia-smi code' $code
printf 'fact nvidia-smi\\n'
printf '%s\\n' "$report" | sed '/<supported_clocks>/,/<\\/supported_clocks>/d' | body
pids=$(printf '%s\\n' "$report" | sed -n 's/.*pid["> :]*\\([0-9][0-9]*\\).*/\\1/p' | sort -u)
for pid in $pids; do
    [ -d "proc/$pid" ] || continue
    fact "owner $pid" "$(stat -c %U "proc/$pid" 2> /dev/null)"
    text "proc/$pid/cgroup"
done
! command -v nvidia-ctk > /dev/null || fact nvidia-ctk "$(timeout 5 nvidia-ctk --version 2> /dev/null | head -n 1)"
"""
_SLOW = """
command -v nvidia-smi > /dev/null || exit 0
for option in -s -e; do
    printf 'fact nvlink %s\\n' "$option"
    timeout 10 nvidia-smi nvlink $option 2> /dev/null | body
done
"""

# --- what it prints ------------------------------------------------------------------------------------------


class Used(Struct, frozen=True, kw_only=True):
    """A process with memory of a GPU; memory in MiB."""

    pid: int
    name: str = ""
    memory: int | None = None
    compute: bool = True
    """Whether it only computes: a desktop's programs also draw."""


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
    """Whether the kernel manages its memory as that of a NUMA node."""
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


class Report(Struct, frozen=True, kw_only=True):
    """The driver and its GPUs; ``cuda`` is the newest CUDA that it supports."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


class Process(NamedTuple):
    """A process that computes on a GPU; memory in bytes, None if unknown, ``container`` empty outside of any."""

    pid: int
    name: str
    user: str
    memory: int | None
    container: str = ""


def report_of(text: str) -> Report:
    """Parse the output of the program ``nvml``, or of ``nvidia-smi -q -x``. ValueError if it is neither."""
    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text.encode(), type=Report)
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


def _is_report(text: str) -> bool:
    """Tell if a text is a report of either form, rather than an error."""
    return "<nvidia_smi_log>" in text or text.lstrip().startswith("{")


def first_line(text: str) -> str:
    """Return the first line of a text that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "it printed nothing")


_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU ?(?:[0-9]+: ?)?([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+): (.+)"
)
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
    return msgspec.convert({"index": index, "address": address, **values}, Gpu)


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


# --- readings ------------------------------------------------------------------------------------------------


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield a host's readings; none without a card of NVIDIA and without its tool."""
    yield from _toolkit(dump)
    text = dump.facts.get("nvidia-smi")
    if text is None:
        return
    lost = {pci.address(match[1]): match[2].strip() for match in _NO_HANDLE.finditer(text)}
    if not lost and not _is_report(text):
        yield from _silent(dump, text)
        return
    report = report_of(text) if _is_report(text) else Report()
    gpus = tuple(_gpus(dump, report, lost))
    yield from _versions(report)
    yield from _devices(gpus)
    yield from _listed(dump, gpus)
    for gpu in gpus:
        yield from _of_gpu(gpu, dump)
    if sum(not gpu.error for gpu in gpus) > 1:
        yield from _between(gpus, dump)


def _toolkit(dump: HostDump) -> Iterator[Reading]:
    """Yield the container toolkit's version and the way in which it gives GPUs to containers."""
    version = re.search(r"version (\d[\w.~+-]*)", dump.facts.get("nvidia-ctk", ""))
    if version:
        yield Reading(name="toolkit", value=version[1], source="nvidia-ctk --version", kind="fact")
    path = dump.root / "etc/nvidia-container-runtime/config.toml"
    mode = re.search(r'^\s*mode\s*=\s*"([\w-]+)"', read(path), re.MULTILINE)
    if mode:
        yield Reading(name="toolkit mode", value=mode[1], source=str(path), kind="fact")


def _silent(dump: HostDump, text: str) -> Iterator[Reading]:
    """Yield that the tool reports no GPU, if there is one that the driver serves, or should serve."""
    drivers = {card.driver for card in _cards(dump)}
    message = first_line(text)
    why = {"124": "nvidia-smi did not answer in 5 s", "127": "nvidia-smi is not installed"}.get(
        dump.facts.get("nvidia-smi code", ""), "" if _sees_host(dump) else f"in a container: {message}"
    )
    # A laptop's GPU may be turned off, and a card of another driver belongs to a virtual machine.
    should = not why and not _portable(dump) and not drivers.isdisjoint(("", "nouveau"))
    if "nvidia" in drivers or should:
        yield Reading(name="nvidia-smi", value=None if why else message, source="nvidia-smi", why=why)


def _cards(dump: HostDump) -> Iterator[pci.PciDevice]:
    """Yield NVIDIA's GPUs on the PCI bus, without the virtual functions of a host of virtual GPUs."""
    for card in pci.cards(dump.root):
        virtual = (dump.root / f"sys/bus/pci/devices/{card.address}/physfn").is_symlink()
        if card.vendor == "0x10de" and card.display and not virtual:
            yield card


def _portable(dump: HostDump) -> bool:
    """Tell if the host has a battery: its GPU may be turned off, and slows down to spare it."""
    types = (read(path) for path in (dump.root / "sys/class/power_supply").glob("*/type"))
    return any(text.strip() == "Battery" for text in types)


def _sees_host(dump: HostDump) -> bool:
    """Tell if the script ran among the processes of the host, not in a container."""
    return dump.facts.get("pid namespace") == HOST_NAMESPACE


def _gpus(dump: HostDump, report: Report, lost: Mapping[str, str]) -> Iterator[Gpu]:
    """Yield the GPUs, those too that nvidia-smi only names in an error.

    Its list lacks these, though they count in its numbers: the place among the driver's GPUs, in PCI order.
    """
    folders = (pci.address(folder.name) for folder in (dump.root / GPUS).glob("*"))
    order = sorted(filter(None, folders), key=pci.order)
    places = {address: place for place, address in enumerate(order)}
    for gpu in report.gpus:
        address = pci.address(gpu.address)
        index = places.get(address, gpu.index) if lost else gpu.index
        if gpu.error and not address and len(order) == len(report.gpus):
            address = order[gpu.index]
        yield msgspec.structs.replace(gpu, address=address, index=index)
    for address, error in lost.items():
        yield Gpu(index=places.get(address, len(report.gpus)), address=address, error=error)


def _versions(report: Report) -> Iterator[Reading]:
    """Yield the driver's version and the newest CUDA that it supports."""
    for name, value in (("NVIDIA driver", report.driver), ("CUDA of the driver", report.cuda)):
        if value:
            yield Reading(name=name, value=value, source="nvidia-smi", kind="fact")


def _devices(gpus: tuple[Gpu, ...]) -> Iterator[Reading]:
    """Yield the number of GPUs of each model."""
    for name, count in Counter(gpu.name for gpu in gpus if gpu.name).items():
        yield Reading(name="devices", value=count, source="nvidia-smi -L", kin=name)


def _listed(dump: HostDump, gpus: tuple[Gpu, ...]) -> Iterator[Reading]:
    """Yield for each card on the PCI bus that should be in nvidia-smi's list whether it is there."""
    items = {gpu.address: gpu.item for gpu in gpus if gpu.address}
    cards = tuple(_cards(dump))
    models = {_model(dump, card) for card in cards if card.address in items}
    for card in cards:
        expected = _has_file(dump, card) or (not card.driver and _model(dump, card) in models)
        if card.address in items or expected:
            value = "yes" if card.address in items else "no"
            yield Reading(
                name="listed", value=value, source="nvidia-smi -L", item=items.get(card.address, card.address)
            )


def _model(dump: HostDump, card: pci.PciDevice) -> str:
    """Return a card's device id."""
    return read(dump.root / f"sys/bus/pci/devices/{card.address}/device").strip()


def _has_file(dump: HostDump, card: pci.PciDevice) -> bool:
    """Tell if the driver serves a card by a device file: a container has those alone of its own cards."""
    information = read(dump.root / f"{GPUS}/{card.address}/information")
    minor = re.search(r"^Device Minor:\s*(\d+)", information, re.MULTILINE)
    files = dump.facts.get("nvidia files", "").split()
    return card.driver == "nvidia" and bool(minor) and f"dev/nvidia{minor[1] if minor else ''}" in files


class _Field(NamedTuple):
    """A reading, and the attribute of a GPU that has its value."""

    name: str
    attribute: str
    unit: str = ""
    kind: Literal["fact", "state", "counter"] = "state"


_FIELDS = (
    _Field("model", "name", kind="fact"),
    _Field("PCI address", "address", kind="fact"),
    _Field("uuid", "uuid", kind="fact"),
    _Field("serial", "serial", kind="fact"),
    _Field("memory", "memory", "MiB", "fact"),
    _Field("persistence mode", "persistence", kind="fact"),
    _Field("compute mode", "compute_mode"),
    _Field("MIG mode", "mig", kind="fact"),
    _Field("uncorrectable ECC errors", "uncorrectable", kind="counter"),
    _Field("corrected ECC errors", "corrected", kind="counter"),
    _Field("uncorrectable ECC errors of its life", "uncorrectable_ever"),
    _Field("SRAM error threshold exceeded", "sram_exceeded"),
    _Field("row remapping pending", "remap_pending"),
    _Field("row remapping failed", "remap_failed"),
    _Field("memory banks without a spare row", "full_banks"),
    _Field("retired pages", "retired"),
    _Field("page retirement pending", "retirement_pending"),
    _Field("recovery action", "recovery"),
    _Field("NVLink replay errors", "nvlink_replays", kind="counter"),
    _Field("NVLink recovery errors", "nvlink_recoveries", kind="counter"),
    _Field("NVLink CRC errors", "nvlink_crc", kind="counter"),
)


def _of_gpu(gpu: Gpu, dump: HostDump) -> Iterator[Reading]:
    """Yield the readings of a GPU; of one that the driver cannot reach, that alone."""
    yield Reading(name="state", value=gpu.error or "reachable", source=SOURCE, item=gpu.item, kin=gpu.name)
    if gpu.error:
        return
    for field in _FIELDS:
        value = getattr(gpu, field.attribute)
        value = _YES[value] if isinstance(value, bool) else value
        if value not in (None, ""):
            yield _reading(gpu, field.name, value, field.unit, field.kind)
    if gpu.vbios:
        # Boards of several makers have the same product name, but no part number, and each maker's own VBIOS.
        kin = f"{gpu.name} {gpu.part or gpu.uuid or gpu.address}"
        yield msgspec.structs.replace(_reading(gpu, "VBIOS", gpu.vbios, kind="fact"), kin=kin)
    yield from _load(gpu, dump)
    yield from _used_by(gpu, dump)


_YES = {True: "yes", False: "no"}


def _reading(
    gpu: Gpu, name: str, value: Value, unit: str = "", kind: Literal["fact", "state", "counter"] = "state"
) -> Reading:
    """Build a reading of a GPU, which is compared with those of its model."""
    return Reading(name=name, value=value, source=SOURCE, item=gpu.item, unit=unit, kind=kind, kin=gpu.name)


def _load(gpu: Gpu, dump: HostDump) -> Iterator[Reading]:
    """Yield an idle card's temperature, and why clocks or power are low, which a laptop does for its battery."""
    if gpu.idle and gpu.margin is not None:
        yield _reading(gpu, "temperature margin", gpu.margin, "°C")
    if _portable(dump):
        return
    if gpu.slowdowns is not None:
        yield _reading(gpu, "slowdown", ", ".join(gpu.slowdowns) or "none")
    if gpu.limit and gpu.default_limit:
        yield _reading(gpu, "power limit", f"{gpu.limit:.0f} W, by default {gpu.default_limit:.0f} W")


def _used_by(gpu: Gpu, dump: HostDump) -> Iterator[Reading]:
    """Yield the processes that compute on a GPU, and memory that none has."""
    if not _sees_host(dump):
        why = "a container does not see the processes of its host"
        yield Reading(name="processes", value=None, source=SOURCE, item=gpu.item, why=why)
        return
    if gpu.processes is None:
        return
    yield _reading(gpu, "processes", processes_text(_processes(gpu.processes, dump)))
    # Instances of MIG and virtual GPUs have processes that are not listed here; the kernel puts its own pages into
    # memory that is a NUMA node.
    elsewhere = gpu.mig == "Enabled" or gpu.vgpu_host or gpu.system_memory
    if gpu.used is not None and not elsewhere:
        yield _reading(gpu, "memory without a process", 0 if gpu.processes else gpu.used, "MiB")


def _processes(used: tuple[Used, ...], dump: HostDump) -> tuple[Process, ...]:
    """Return the processes that only compute, with their owners and containers."""
    found = {user.pid: _process(user, dump) for user in used if user.compute}
    # NVIDIA's server for processes that share a card has no work of its own.
    return tuple(process for process in found.values() if process.name != "nvidia-cuda-mps-server")


def _process(used: Used, dump: HostDump) -> Process:
    """Build a process; its name is that of its program."""
    program = (used.name.split() or ["?"])[0]
    container = re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", read(dump.root / f"proc/{used.pid}/cgroup"))
    return Process(
        pid=used.pid,
        name=program.rpartition("/")[2].replace(";", "") or "?",
        user=dump.facts.get(f"owner {used.pid}", "").strip() or "?",
        memory=None if used.memory is None else used.memory << 20,
        container=container[0] if container else "",
    )


def processes_text(found: tuple[Process, ...]) -> str:
    """Render processes as the value of a reading: ``4711 python ann 31 GiB; ...``, or ``none``."""
    return "; ".join(map(_process_text, found)) or "none"


def _process_text(process: Process) -> str:
    """Render a process, with its container's id."""
    memory = "? MiB" if process.memory is None else human.memory(process.memory)
    container = f" in {process.container}" if process.container else ""
    return f"{process.pid} {process.name} {process.user} {memory}{container}"


_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40}
_PROCESS = re.compile(r"(\d+) (\S+) (\S+) (\?|\d[\d,]*(?:\.\d+)?) (B|[KMGT]iB)(?: in ([0-9a-f]{64}))?")


def processes(text: str) -> tuple[Process, ...]:
    """Parse the value of a reading ``processes``; those of a lab's own containers may be dropped before it is judged.

    Memory is as exact as it is printed.
    """
    return tuple(
        Process(
            int(pid), name, user, None if size == "?" else int(float(size.replace(",", "")) * _SIZES[unit]), container
        )
        for pid, name, user, size, unit, container in _PROCESS.findall(text)
    )


# --- between GPUs ---------------------------------------------------------------------------------------------


def _between(gpus: tuple[Gpu, ...], dump: HostDump) -> Iterator[Reading]:
    """Yield the NVLinks and the fabric of a node with several GPUs: a virtual machine with one has none of its own."""
    links = _links(dump.facts.get("nvlink -s", ""))
    errors = _link_errors(dump.facts.get("nvlink -e", ""))
    for gpu in gpus:
        active = links.get(gpu.index) if gpu.nvlinks is None else gpu.nvlinks
        if active is not None:
            yield msgspec.structs.replace(_reading(gpu, "active NVLinks", active), source="nvidia-smi nvlink -s")
        if gpu.nvlink_replays is None:
            for name, count in errors.get(gpu.index, {}).items():
                reading = _reading(gpu, f"NVLink {name} errors", count, kind="counter")
                yield msgspec.structs.replace(reading, source="nvidia-smi nvlink -e")
        if gpu.fabric:
            yield _reading(gpu, "fabric", f"{gpu.fabric}, {gpu.fabric_error}" if gpu.fabric_error else gpu.fabric)


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """Yield the index of each GPU in the output of ``nvidia-smi nvlink``, and its lines."""
    parts = re.split(r"^GPU (\d+):.*$", text, flags=re.MULTILINE)
    yield from ((int(index), lines) for index, lines in zip(parts[1::2], parts[2::2], strict=False))


def _links(text: str) -> dict[int, int]:
    """Return the number of active NVLinks by GPU: ``Link 0: 26.562 GB/s``, or ``<inactive>``."""
    found: dict[int, int] = {}
    for index, lines in _sections(text):
        if links := re.findall(r"Link \d+: (.+)", lines):
            found[index] = sum("GB/s" in link for link in links)
    return found


def _link_errors(text: str) -> Mapping[int, Mapping[str, int]]:
    """Return the sum over links of each kind of error: ``Link 0: Replay Errors: 0``."""
    found: dict[int, Counter[str]] = {}
    for index, lines in _sections(text):
        counts = found.setdefault(index, Counter())
        for name, count in re.findall(r"Link \d+: (Replay|Recovery|CRC)(?: FLIT)? Errors?: (\d+)", lines):
            counts[name if name == "CRC" else name.lower()] += int(count)
    return found


# --- judges --------------------------------------------------------------------------------------------------


def _judge_silent(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a tool that cannot talk to the driver."""
    return Answer("bad", f"nvidia-smi fails: {reading.value}")


def _judge_listed(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a card that the driver does not know."""
    return None if reading.value == "yes" else Answer("bad", "is on the PCI bus but nvidia-smi does not list it")


def _judge_state(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a GPU that the driver cannot reach."""
    return None if reading.value == "reachable" else Answer("bad", f"the driver cannot reach it: {reading.value}")


def _judge_recovery(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a GPU for which the driver asks for an action."""
    if str(reading.value) in ("None", ""):
        return None
    return Answer("bad", f"the driver asks for an action: {reading.value}")


def _judge_retired(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge retired pages. Source: Dynamic Page Retirement, RMA Policy: 60 of the 64 that a card can retire."""
    if evidence.limit is None or not isinstance(reading.value, int) or reading.value < evidence.limit:
        return None
    return Answer("bad", f"retired pages {reading.value}, NVIDIA replaces the card from {evidence.limit:g} on")


def _judge_slowdown(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge the reasons for low clocks: heat that the hardware saw, or a power supply that failed, are bad.

    A slowdown of the hardware that gives no reason may be a change of clocks. Source: NVML, nvmlClocksEventReasons.
    """
    words = str(reading.value)
    if words == "none":
        return None
    level: Level = "bad" if "HW thermal" in words or "HW power brake" in words else "remark"
    return Answer(level, f"clocks are lowered by {words}")


def _judge_limit(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a power limit below the card's default."""
    now, default = map(int, re.findall(r"(\d+) W", str(reading.value)))
    return Answer("remark", f"power limit {now} W, by default {default} W") if now < default else None


def _judge_margin(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge an idle card that is nearly as hot as makes it slow."""
    if not isinstance(reading.value, (int, float)) or evidence.limit is None or reading.value > evidence.limit:
        return None
    return Answer("remark", f"temperature is {reading.value:g} °C below that of its slowdown, while it is idle")


def _judge_links(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a card with fewer NVLinks than most of its model.

    Without any it may be one that no bridge joins to another, unless every other of at least three has some.
    """
    if reading.value:
        return rules.less_than_neighbours(reading, evidence)
    others = [value for _, value in evidence.neighbours]
    if len(others) < 3 or not all(others):
        return None
    return Answer("remark", f"has no active NVLink, the {len(others)} others have")


def _judge_processes(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge what computes on a card: over 1 GiB outside of containers is bad, anything else a remark."""
    found = processes(str(reading.value))
    if not found:
        return None
    large = any((process.memory or 0) > GIB and not process.container for process in found)
    shown = "; ".join(map(_told, found[:3])) + (f"; {len(found) - 3} more" if len(found) > 3 else "")
    return Answer("bad" if large else "remark", f"is used by {shown}")


def _told(process: Process) -> str:
    """Render a process for a person: ``pid 4711 (python, ann), 31 GiB``."""
    memory = "" if process.memory is None else f", {human.memory(process.memory)}"
    container = f", container {process.container[:12]}" if process.container else ""
    return f"pid {process.pid} ({process.name}, {process.user}){memory}{container}"


def _judge_leftover(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge memory that no process has."""
    if not isinstance(reading.value, int) or evidence.limit is None or reading.value <= evidence.limit:
        return None
    return Answer("remark", f"{human.memory(reading.value << 20)} of memory are in use without a process")


def _judge_toolkit(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a version of the toolkit with which CUDA failed in containers, nvidia-smi did not.

    Source: NVIDIA/nvidia-container-toolkit#1967 and #1934, of single hosts.
    """
    if reading.value != "1.19.1":
        return None
    return Answer(
        "remark", "container toolkit 1.19.1: on some hosts CUDA fails in containers with it, nvidia-smi works"
    )


# --- kernel lines --------------------------------------------------------------------------------------------


class Xid(NamedTuple):
    """An Xid of NVIDIA's catalog and what NVIDIA says to do at once; a remark if the program may have caused it."""

    meaning: str
    action: str
    level: Level = "bad"


_RESET, _SERVICE, _PROGRAM_OWN = "reset the GPU", "reset the GPU, then service", "end or mend the program"
XIDS: Mapping[int, Xid] = {
    13: Xid("graphics engine exception, mostly the program's own fault", _PROGRAM_OWN, "remark"),
    31: Xid("GPU memory page fault, mostly the program's own fault", _PROGRAM_OWN, "remark"),
    43: Xid("GPU stopped processing, a fault of the program's own, the GPU is healthy", _PROGRAM_OWN, "remark"),
    45: Xid("cleanup after a program was ended or failed", "look at the lines before", "remark"),
    46: Xid("GPU stopped processing", _SERVICE),
    48: Xid("uncorrectable ECC error", _RESET),
    54: Xid("auxiliary power is not connected", "check the power cables"),
    62: Xid("micro-controller halt", _SERVICE),
    63: Xid("a row of memory is remapped, or a page retired", "reset the GPU when convenient"),
    64: Xid("remapping of a row, or retirement of a page, failed", _SERVICE),
    69: Xid("graphics engine class error, mostly the program's own fault", _PROGRAM_OWN, "remark"),
    74: Xid("NVLink error", "reset the GPU, look at the other end of the link"),
    92: Xid("high rate of corrected ECC errors", "service if it comes again"),
    94: Xid("memory error contained to one program", "restart the program, reset the GPU when convenient"),
    95: Xid("uncontained memory error", _RESET),
    109: Xid("context switch timeout", _SERVICE),
    110: Xid("security fault", "power cycle, then service"),
    119: Xid("the GPU's system processor (GSP) does not answer", "reset the GPU, else power cycle"),
    120: Xid("error of the GPU's system processor (GSP)", "reset the GPU, else power cycle"),
    136: Xid("link training failed", _RESET),
    140: Xid("unrecovered ECC error", _SERVICE),
    143: Xid("GPU initialization failed", _SERVICE),
    156: Xid("resource retirement", _RESET),
    158: Xid("fatal timeout", _SERVICE),
    171: Xid("uncorrectable DRAM error", _RESET),
    172: Xid("uncorrectable SRAM error", _RESET),
    **dict.fromkeys(range(144, 151), Xid("NVLink error", "see NVIDIA's table of its status", "remark")),
}
"""Source: NVIDIA's Xid catalog, immediate and investigatory actions. Others are for the display, or need no action."""


def _judge_xid(match: re.Match[str]) -> Answer | None:
    """Judge an Xid: its number, meaning and what NVIDIA says to do."""
    number, where = int(match[2]), _place(match[1])
    xid = XIDS.get(number)
    return Answer(xid.level, f"Xid {number} on {where}: {xid.meaning} ({xid.action})") if xid else None


def _judge_lost(match: re.Match[str]) -> Answer | None:
    """Judge a GPU that fell off the bus: its Xid is 79, another line has no Xid."""
    return Answer("bad", f"the GPU at {_place(match[0])} has fallen off the bus")


def _judge_action(match: re.Match[str]) -> Answer | None:
    """Judge the driver's own word for what has to be done: `changed from 0x0 (None) to 0x2 (Node Reboot Required)`."""
    if match[2] == "None":
        return None
    return Answer("bad", f"the driver asks for an action on {_place(match[1])}: {match[2]}")


def _place(text: str) -> str:
    """Return a PCI address in a line, which has no function behind ``PCI:``."""
    match = re.search(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})", text)
    return pci.address(f"{match[0]}.0") if match else text


# --- the subject ---------------------------------------------------------------------------------------------

_REPLACE = ("end what runs on {item}", "have the card replaced: NVIDIA's RMA guidelines")
_BUSY = ("{sudo}ps -o pid,user,lstart,cmd -p PID", "ask its user, or end it")
_LINK = ("{sudo}systemctl status nvidia-fabricmanager", "nvidia-smi nvlink -s -i {id}", *RESET[:3])

SUBJECT = Subject(
    name="NVIDIA",
    script=_SCRIPT,
    slow=_SLOW,
    readings=readings,
    checks=(
        Check(
            name="nvidia-smi",
            reading="nvidia-smi",
            judge=_judge_silent,
            steps=("{sudo}modprobe nvidia", "after an update of the driver: {sudo}reboot"),
        ),
        Check(name="gpu-count", reading="devices", judge=rules.less_than_neighbours, steps=RESTART),
        Check(name="gpu-listed", reading="listed", judge=_judge_listed, steps=RESTART),
        Check(name="gpu-state", reading="state", judge=_judge_state, steps=RESTART),
        Check(name="gpu-recovery", reading="recovery action", judge=_judge_recovery, steps=RESET),
        Check(name="gpu-ecc", reading="uncorrectable ECC errors", judge=rules.above, limit=0, steps=RESET),
        Check(name="gpu-ecc-life", reading="uncorrectable ECC errors of its life", judge=rules.remark_above, limit=0),
        Check(name="gpu-ecc-corrected", reading="corrected ECC errors", judge=rules.remark_grew, limit=0),
        Check(name="gpu-sram", reading="SRAM error threshold exceeded", judge=rules.one_of(("no",)), steps=_REPLACE),
        Check(name="gpu-remap", reading="row remapping pending", judge=rules.one_of(("no",)), steps=RESET),
        Check(name="gpu-remap-failed", reading="row remapping failed", judge=rules.one_of(("no",)), steps=_REPLACE),
        Check(name="gpu-banks", reading="memory banks without a spare row", judge=rules.remark_above, limit=0),
        Check(name="gpu-pages", reading="retired pages", judge=_judge_retired, limit=60, steps=_REPLACE),
        Check(name="gpu-pages-pending", reading="page retirement pending", judge=rules.one_of(("no",)), steps=RESET),
        Check(name="gpu-nvlink", reading="active NVLinks", judge=_judge_links, steps=_LINK),
        Check(name="gpu-nvlink-recovery", reading="NVLink recovery errors", judge=rules.grew, limit=0, steps=_LINK),
        Check(name="gpu-nvlink-replay", reading="NVLink replay errors", judge=rules.remark_grew, limit=0),
        Check(name="gpu-nvlink-crc", reading="NVLink CRC errors", judge=rules.remark_grew, limit=0),
        Check(
            name="gpu-fabric",
            reading="fabric",
            judge=rules.one_of(("Completed",)),
            steps=(
                "{sudo}systemctl restart nvidia-fabricmanager",
                "install it in the driver's own version",
                *RESET[:3],
            ),
        ),
        Check(
            name="gpu-slowdown",
            reading="slowdown",
            judge=_judge_slowdown,
            steps=("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {id}", "check fans, airflow and power supplies"),
        ),
        Check(
            name="gpu-power-limit",
            reading="power limit",
            judge=_judge_limit,
            steps=("{sudo}nvidia-smi -i {id} -pl WATTS",),
        ),
        Check(name="gpu-temperature", reading="temperature margin", judge=_judge_margin, limit=5),
        Check(name="gpu-processes", reading="processes", judge=_judge_processes, steps=_BUSY),
        Check(
            name="gpu-leftover",
            reading="memory without a process",
            judge=_judge_leftover,
            limit=1024,
            steps=("{sudo}fuser -v /dev/nvidia{id}", *RESET[1:3]),
        ),
        Check(name="gpu-compute-mode", reading="compute mode", judge=rules.unlike_neighbours),
        Check(name="gpu-mig", reading="MIG mode", judge=rules.unlike_neighbours),
        Check(name="gpu-vbios", reading="VBIOS", judge=rules.unlike_neighbours),
        Check(name="nvidia-driver", reading="NVIDIA driver", judge=rules.unlike_neighbours),
        Check(name="nvidia-toolkit", reading="toolkit", judge=_judge_toolkit),
    ),
    lines=(
        LineCheck(
            name="gpu-xid",
            pattern=r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+)",
            judge=_judge_xid,
            steps=("end what runs on the GPU", "{sudo}nvidia-smi --gpu-reset --id=GPU", "{sudo}reboot", "service"),
        ),
        LineCheck(
            name="gpu-bus",
            pattern=r"NVRM: .*(PCI:)?[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}.* fallen off the bus",
            judge=_judge_lost,
            steps=RESTART,
        ),
        LineCheck(
            name="gpu-action",
            pattern=r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): 154,.* to 0x[0-9a-f]+ \(([A-Za-z0-9 ]+)\)",
            judge=_judge_action,
            steps=("end what runs on the GPU", "do what the driver asks for"),
        ),
    ),
)

"""Readings of NVIDIA GPUs: from NVML, else nvidia-smi, and from the container toolkit.

Sources: NVML API Reference Guide; nvidia-smi(1).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from labctl.accelerators.nvidia.report import Gpu, Report, Used, first_line, is_report, report_of
from labctl.health.model import Reading, Value
from labctl.system import human, pci
from labctl.system.hostdump import HostDump
from labctl.system.procfs import read

SOURCE = "nvidia-smi -q"
GPUS = "proc/driver/nvidia/gpus"
GIB = 1 << 30
HOST_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of linux/include/linux/proc_ns.h: in another namespace, processes of the host are not seen."""

# --- the script ----------------------------------------------------------------------------------------------

_PROGRAM = Path(__file__).with_name("nvml.py").read_text(encoding="utf-8") + "\nprint(output())\n"
SCRIPT = f"""
cards=$(grep -lx 0x10de sys/bus/pci/devices/*/vendor 2> /dev/null)
[ -n "$cards" ] || command -v nvidia-smi > /dev/null || exit 0
for vendor in $cards; do
    card=${{vendor%/vendor}}
    link "$card/driver" "$card/physfn"
    set -- "$@" "$vendor" "$card/class" "$card/device"
done
lines "$@" sys/class/power_supply/*/type sys/module/nvidia_peermem/initstate sys/module/nv_peer_mem/initstate
text {GPUS}/*/information etc/nvidia-container-runtime/config.toml
fact 'nvidia files' "$(echo dev/nvidia[0-9]*)"
fact 'pid namespace' "$(readlink proc/self/ns/pid)"
"""
# A driver that does not answer one of them does not answer the other.
LATE = f"""
grep -qx 0x10de sys/bus/pci/devices/*/vendor 2> /dev/null || command -v nvidia-smi > /dev/null || exit 0
program={shlex.quote(_PROGRAM)}
ask 5 python3 -c "$program"
case $code in 0 | 124) ;; *) ask 5 sh -c 'exec nvidia-smi -q -x 2>&1' ;; esac
fact 'nvidia-smi code' "$code"
printf 'fact nvidia-smi\\n'
printf '%s\\n' "$answer" | sed '/<supported_clocks>/,/<\\/supported_clocks>/d' | body
pids=$(printf '%s\\n' "$answer" | sed -n 's/.*pid["> :]*\\([0-9][0-9]*\\).*/\\1/p' | sort -u)
for pid in $pids; do
    [ -d "proc/$pid" ] || continue
    fact "owner $pid" "$(stat -c %U "proc/$pid" 2> /dev/null)"
    text "proc/$pid/cgroup"
done
command -v nvidia-ctk > /dev/null || exit 0
ask 5 nvidia-ctk --version
fact nvidia-ctk "$(printf '%s' "$answer" | head -n 1)"
"""
SLOW = """
command -v nvidia-smi > /dev/null || exit 0
for option in -s -e; do
    printf 'fact nvlink %s\\n' "$option"
    ask 10 nvidia-smi nvlink $option
    printf '%s\\n' "$answer" | body
done
"""

# --- readings ------------------------------------------------------------------------------------------------

_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU ?(?:[0-9]+: ?)?([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+): (.+)"
)


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield a host's readings; none without a card of NVIDIA and without its tool."""
    yield from _toolkit(dump)
    text = dump.facts.get("nvidia-smi")
    if text is None:
        return
    lost = {pci.address(match[1]): match[2].strip() for match in _NO_HANDLE.finditer(text)}
    if not lost and not is_report(text):
        yield from _silent(dump, text)
        return
    report = report_of(text) if is_report(text) else Report()
    gpus = tuple(_gpus(dump, report, lost))
    if gpus and all(gpu.is_closed for gpu in gpus):
        yield Reading(name="nvidia-smi", value=None, source="nvidia-smi", why="permission denied for all GPUs")
        return
    yield from _versions(report)
    yield from _peer_memory(dump)
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


def _peer_memory(dump: HostDump) -> Iterator[Reading]:
    """Yield the module by which an RDMA adapter reads a GPU's memory. Without one, dma-buf may do the same.

    Source: GPUDirect RDMA documentation, "Using DMA-BUF for GPUDirect RDMA".
    """
    if not dump.facts.get("infiniband adapters"):
        return
    modules = ("nvidia_peermem", "nv_peer_mem")
    loaded = [name for name in modules if read(dump.root / f"sys/module/{name}/initstate").strip()]
    yield Reading(name="peer memory module", value=" ".join(loaded) or "none", source="lsmod", kind="fact")


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
    """Yield the number of GPUs of each model, unless there is one whose model the user has no right to read."""
    if any(gpu.is_closed for gpu in gpus):
        return
    for name, count in Counter(gpu.name for gpu in gpus if gpu.name).items():
        yield Reading(name="GPUs", value=count, source="nvidia-smi -L", kin=name)


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
    _Field("device memory", "memory", "MiB", "fact"),
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
    """Yield the readings of a GPU; of one that the driver cannot reach or the user may not open, that alone."""
    yield _state(gpu)
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


def _state(gpu: Gpu) -> Reading:
    """Return whether the driver reaches a GPU; unknown of one that the user has no right to open."""
    if gpu.is_closed:
        return Reading(name="state", value=None, source=SOURCE, item=gpu.item, why="permission denied")
    return Reading(name="state", value=gpu.error or "reachable", source=SOURCE, item=gpu.item, kin=gpu.name)


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


# --- processes -----------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """A process that computes on a GPU; memory in bytes, None if unknown, ``container`` empty outside of any."""

    pid: int
    name: str
    user: str
    memory: int | None
    container: str = ""


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
    # Of one that has ended since, nobody knows whether it was in a container.
    there = [user for user in used if f"owner {user.pid}" in dump.facts]
    found = {user.pid: _process(user, dump) for user in there if user.compute}
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
    """Parse the value of a reading ``processes``; memory is as exact as it is printed."""
    return tuple(
        Process(
            int(pid), name, user, None if size == "?" else int(float(size.replace(",", "")) * _SIZES[unit]), container
        )
        for pid, name, user, size, unit, container in _PROCESS.findall(text)
    )


# --- between GPUs --------------------------------------------------------------------------------------------


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

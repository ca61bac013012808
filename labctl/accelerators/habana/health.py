"""Health of Gaudis: the driver's sysfs and kernel lines, and hl-smi.

Sources: docs.habana.ai, "System Management Interface Tool (hl-smi)"; Documentation/ABI/testing/sysfs-driver-habanalabs
and drivers/accel/habanalabs of the kernel; the port commands as Habana's Intel Gaudi Health Screen uses them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from labctl.accelerators import hwmon
from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, LineCheck, Reading, Subject
from labctl.system import pci
from labctl.system.hostdump import HostDump
from labctl.system.hostpath import HostPath
from labctl.system.procfs import read

Kind = Literal["fact", "state", "counter"]

COLUMNS = (
    "index",
    "bus_id",
    "name",
    "serial",
    "memory.total",
    "power.draw",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
)
"""Properties that hl-smi has had since its first releases: an unknown one makes it print nothing."""
QUERY = f"hl-smi -Q {','.join(COLUMNS)} -f csv,nounits"
ATTRIBUTES = ("device_type", "fw_os_ver", "module_id", "status", "hard_reset_cnt")
FACTS = {"model": "device_type", "device firmware": "fw_os_ver", "module": "module_id"}
"""Attributes of the facts."""
DRIVER = "sys/module/habanalabs/version"

# Each Gaudi: `card` is its folder in sysfs/class, `where` its real one. The script's own arguments are cleared first.
_CARDS = r"""
set --
for card in sys/class/accel/accel[0-9]*/device; do
    case $(readlink -f "$card/driver") in */habanalabs) ;; *) continue ;; esac
    where=$(readlink -f "$card")
    where=${where#"$root"}
"""
SCRIPT = rf"""{_CARDS}
    printf 'link %s\n\t%s\n' "$card" "$where"
    for name in {" ".join(ATTRIBUTES)}; do set -- "$@" "$where/$name"; done
done
lines "$@" {DRIVER}
"""
# Without a folder that the user may write its log to, hl-smi fails. Each entry of a port command is printed at once,
# since they run at the same time: the counters of eight Gaudis take half a minute one after the other.
SLOW = rf"""{_CARDS}
    set -- "$@" "${{where##*/}}"
    lines "$where"/{hwmon.FILES[0]} "$where"/{hwmon.FILES[1]}
done
[ $# -gt 0 ] || exit 0
command -v hl-smi > /dev/null || {{
    fact 'hl-smi error' 'hl-smi is not installed'
    exit 0
}}
HABANA_LOGS=$(mktemp -d)
export HABANA_LOGS
entry() {{
    printf 'fact %s\n' "$1"
    shift
    ask 20 sh -c 'exec "$@" 2>&1' sh "$@"
    printf '%s\n' "$answer" | body
}}
entry 'hl-smi csv' {QUERY}
entry 'hl-smi query' hl-smi -q
for address in "$@"; do
    for kind in ports link stats; do
        (
            text=$(entry "hl-smi $kind $address" hl-smi -n "$kind" -i "$address" |
                grep -E "^fact|port|external|internal|pcs_link_toggles")
            printf '%s\n' "$text"
        ) &
    done
done
wait
rm -r "$HABANA_LOGS"
"""


# --- readings ------------------------------------------------------------------------------------------------


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield what the driver and hl-smi report of a host's Gaudis; nothing on a host without the driver."""
    folders = sorted((dump.root / "sys/class/accel").glob("accel[0-9]*"), key=lambda path: int(path.name[5:]))
    version = read(dump.root / DRIVER).strip()
    if not folders and not version:
        return
    yield Reading(name="Gaudis", value=len(folders), kind="fact", source="ls /sys/class/accel")
    yield Reading(
        name="Gaudi driver",
        value=version or None,
        kind="fact",
        source=f"/{DRIVER}",
        why="the driver does not report its version",
    )
    for folder in folders:
        yield from card(dump, folder)


def card(dump: HostDump, folder: HostPath) -> Iterator[Reading]:
    """Yield the readings of a Gaudi."""
    device = folder / "device"
    item, address = f"Gaudi {folder.name[5:]}", pci.address_of(device)
    kin = read(device / "device_type").strip() or "Gaudi"
    yield from of_driver(device, item, kin)
    yield from hwmon.readings(device, item, kin)
    if "hl-smi error" in dump.facts:
        yield from unknown(item, kin, dump.facts["hl-smi error"])
    elif "hl-smi csv" in dump.facts:
        yield from of_columns(dump.facts["hl-smi csv"], address, item, kin)
        yield from of_query(dump.facts.get("hl-smi query", ""), address, item, kin)
        yield from of_ports(dump.facts, address, item, kin)


def of_driver(device: HostPath, item: str, kin: str) -> Iterator[Reading]:
    """Yield what the driver's attributes say of a Gaudi; its status is unknown if the driver does not tell it."""
    address, why = pci.address_of(device), "the driver does not report it"
    yield Reading(name="PCI address", value=address, item=item, kind="fact", kin=kin, source=f"readlink {device}")
    for name, attribute in FACTS.items():
        text, source = read(device / attribute).strip(), f"{device}/{attribute}"
        if text:
            yield Reading(name=name, value=text, item=item, kind="fact", kin=kin, source=source)
    status = read(device / "status").strip() or None
    yield Reading(name="driver status", value=status, item=item, kin=kin, source=f"{device}/status", why=why)
    resets, source = read(device / "hard_reset_cnt").strip(), f"{device}/hard_reset_cnt"
    if resets.isdecimal():
        yield Reading(name="hard resets", value=int(resets), item=item, kind="counter", kin=kin, source=source)


NUMBERS: Mapping[str, tuple[str, str, Kind]] = {
    "ecc.errors.uncorrected.volatile.total": ("uncorrectable ECC errors", "", "counter"),
    "ecc.errors.uncorrected.aggregate.total": ("uncorrectable ECC errors of all time", "", "counter"),
    "memory.total": ("device memory", "MiB", "fact"),
    "power.draw": ("power draw", "W", "state"),
}
"""Reading, unit and kind of hl-smi's columns that are numbers."""


def unknown(item: str, kin: str, why: str) -> Iterator[Reading]:
    """Yield the readings of hl-smi that a check asks for, without a value."""
    for name in ("uncorrectable ECC errors", "row replacement pending", "internal ports up"):
        yield Reading(name=name, value=None, item=item, kin=kin, source="hl-smi", why=why)


def of_columns(text: str, address: str, item: str, kin: str) -> Iterator[Reading]:
    """Yield the numbers and the serial number of a Gaudi in hl-smi's CSV; unknown if it has no row there."""
    row = next((row for row in rows(text) if pci.address(row.get("bus_id", "")) == address), None)
    if row is None:
        why = f"hl-smi does not list it: {text.strip().splitlines()[0]}" if text.strip() else "hl-smi printed nothing"
        yield Reading(name="uncorrectable ECC errors", value=None, item=item, kin=kin, source=QUERY, why=why)
        return
    for column, (name, unit, kind) in NUMBERS.items():
        cell = row.get(column, "")
        value = float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None
        why = f"hl-smi prints {cell or 'nothing'}"
        yield Reading(name=name, value=value, unit=unit, kind=kind, item=item, kin=kin, source=QUERY, why=why)
    for column, name in (("name", "product"), ("serial", "serial")):
        cell = row.get(column, "")
        if cell not in ("", "N/A"):
            yield Reading(name=name, value=cell, kind="fact", item=item, kin=kin, source=QUERY)


def rows(text: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of hl-smi's CSV by its header's names, which have units: ``power.draw [W]``."""
    names: list[str] = []
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        if "bus_id" in (cell.strip() for cell in cells):
            names = [cell.partition("[")[0].strip() for cell in cells]
        elif names and len(cells) == len(names):
            yield dict(zip(names, (cell.strip() for cell in cells), strict=True))


def of_query(text: str, address: str, item: str, kin: str) -> Iterator[Reading]:
    """Yield throttling, power limit, boot firmware and replaced rows of a Gaudi from `hl-smi -q`."""
    fields = next((block for start, block in blocks(text) if pci.address(start) == address), {})
    texts: tuple[tuple[str, str, Kind], ...] = (
        ("thermal slowdown", "Clocks Throttle Reasons/HW Slowdown/Thermal Slowdown", "state"),
        ("row replacement pending", "Replaced Rows/Pending", "state"),
        ("boot firmware", "Firmware [SPI] Version", "fact"),
        ("power limit", "Power Readings (54V PSU)/Power Limit", "state"),
    )
    for name, path, kind in texts:
        value = fields.get(path, "")
        if value not in ("", "N/A"):
            yield Reading(name=name, value=value, kind=kind, item=item, kin=kin, source="hl-smi -q")
    for cause in ("Single", "Double"):
        count = fields.get(f"Replaced Rows/{cause} Bit ECC", "")
        if count.isdecimal():
            name = f"rows replaced after {cause.lower()} bit errors"
            yield Reading(name=name, value=int(count), kind="counter", item=item, kin=kin, source="hl-smi -q")


def blocks(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the first line of each device in `hl-smi -q`, and the values below it."""
    for block in re.split(r"^(?=\[\d+\] AIP )", text, flags=re.MULTILINE)[1:]:
        start, _, rest = block.partition("\n")
        yield start, values(rest)


def values(text: str) -> dict[str, str]:
    """Return values by path, such as ``Replaced Rows/Pending``, of lines that are indented below their section.

    A line is ``key : value``, a section, or ``: value`` of the section before it.
    """
    fields: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in filter(str.strip, text.splitlines()):
        key, colon, value = line.strip().partition(":")
        if key:
            indent = len(line) - len(line.lstrip())
            path = [*(parent for parent in path if parent[0] < indent), (indent, key.strip())]
        if colon:
            fields["/".join(name for _, name in path)] = value.strip()
    return fields


def of_ports(facts: Mapping[str, str], address: str, item: str, kin: str) -> Iterator[Reading]:
    """Yield the number of ports that are up, inside the node and to other nodes, and how often a link has toggled."""
    types = ports(facts.get(f"hl-smi ports {address}", ""))
    states = ports(facts.get(f"hl-smi link {address}", ""))
    source = f"hl-smi -n link -i {address}"
    for kind in ("internal", "external"):
        listed = [state for port, state in states.items() if types.get(port, "internal").casefold() == kind]
        if listed:
            up = sum(state.casefold() == "up" for state in listed)
            yield Reading(name=f"{kind} ports up", value=up, item=item, kin=kin, source=source)
    toggles = re.findall(r"pcs_link_toggles\s*:\s*(\d+)", facts.get(f"hl-smi stats {address}", ""))
    if toggles:
        total, source = sum(map(int, toggles)), f"hl-smi -n stats -i {address}"
        yield Reading(name="link toggles", value=total, item=item, kind="counter", kin=kin, source=source)


def ports(text: str) -> dict[str, str]:
    """Return the word after each port's number, such as ``UP`` or ``external``: ``port 8:  external``."""
    return dict(re.findall(r"^\s*port\s+(\d+)\s*:\s*(\w+)", text, re.MULTILINE))


# --- checks --------------------------------------------------------------------------------------------------


def judge_status(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a status other than operational as bad; a Gaudi that is being reset after a program ended as a remark.

    Source: hl_device_status() in drivers/accel/habanalabs/common/device.c.
    """
    status = str(reading.value).casefold()
    if status == "operational":
        return None
    passing = status.startswith("in ")
    return Answer("remark" if passing else "bad", f"driver status is {reading.value}")


PREFIX = r"(habanalabs|accel)( [^ ]+)?: "
"""Begin of the driver's lines: ``habanalabs hl2: ``, ``habanalabs 0000:1a:00.0: `` or ``accel accel2: ``."""


def judge_unusable(match: re.Match[str]) -> Answer | None:
    """Judge a device that the driver could not start or reset as bad."""
    return Answer("bad", "is not usable: its driver could not start it", _item(match[4] or _who(match)))


def judge_silent(match: re.Match[str]) -> Answer | None:
    """Judge a device whose firmware does not answer the driver as bad."""
    return Answer("bad", f"its firmware does not answer: {match[3]}", _item(_who(match)))


def judge_pci(match: re.Match[str]) -> Answer | None:
    """Judge a device that the PCI bus has cut off as bad."""
    return Answer("bad", f"lost its PCI connection: {match[3]}", _item(_who(match)))


def judge_memory(match: re.Match[str]) -> Answer | None:
    """Judge a memory error that the driver calls critical, or of two bits, as bad; it corrects all others."""
    event = match[3]
    if not re.search(r"critical 1|Critical\(1\)|DERR", event):
        return None
    return Answer("bad", f"reports an uncorrectable memory error: {event.partition(':')[0]}", _item(_who(match)))


def judge_hot(match: re.Match[str]) -> Answer | None:
    """Judge a device that slowed down because it was too hot as a remark."""
    return Answer("remark", "slowed down because it was too hot", _item(_who(match)))


def _who(match: re.Match[str]) -> str:
    """Return the device that a line of the driver is about, or the driver's name."""
    return (match[2] or match[1]).strip()


def _item(name: str) -> str:
    """Return the item of a device by the driver's name for it: ``Gaudi 2`` for ``hl2`` and ``accel2``."""
    return re.sub(r"^(hl|accel)(?=[0-9]+$)", "Gaudi ", name)


RESET = (
    "end the run that uses {item}",
    "{sudo}hl-smi -r -i BUS_ID  # as `hl-smi -Q index,bus_id -f csv` prints it for {item}",
    "restart the node",
)
SERVICE = (*RESET, "if it comes back: have the card serviced")
CABLES = ("hl-smi -n link -i BUS_ID  # as `hl-smi -Q index,bus_id -f csv` prints it", "check cable and seat", *RESET)
COOLING = ("check fans, air flow and the room's temperature", "compare with the other Gaudis: hl-smi")
LINE_STEPS = ("end the run on the node", "dmesg | grep habanalabs", "restart the node", "have the card serviced")
VERSIONS = ("install the same Gaudi software on all nodes", "restart the node")

SUBJECT = Subject(
    name="Gaudi",
    script=SCRIPT,
    slow=SLOW,
    readings=readings,
    checks=(
        Check(name="gaudi-count", reading="Gaudis", judge=rules.less_than_neighbours, steps=LINE_STEPS[1:]),
        Check(name="gaudi-driver", reading="Gaudi driver", judge=rules.unlike_neighbours, steps=VERSIONS),
        Check(name="gaudi-firmware", reading="device firmware", judge=rules.unlike_neighbours, steps=VERSIONS),
        Check(name="gaudi-boot-firmware", reading="boot firmware", judge=rules.unlike_neighbours, steps=VERSIONS),
        Check(name="gaudi-memory", reading="device memory", judge=rules.less_than_neighbours, steps=SERVICE),
        Check(name="gaudi-status", reading="driver status", judge=judge_status, steps=SERVICE),
        Check(name="gaudi-resets", reading="hard resets", judge=rules.remark_grew, limit=0, steps=LINE_STEPS[1:]),
        Check(name="gaudi-ecc", reading="uncorrectable ECC errors", judge=rules.above, limit=0, steps=SERVICE),
        Check(
            name="gaudi-rows-pending",
            reading="row replacement pending",
            judge=rules.one_of(("No",)),
            steps=RESET,
        ),
        Check(
            name="gaudi-rows",
            reading="rows replaced after double bit errors",
            judge=rules.remark_grew,
            limit=0,
            steps=("have the card serviced if the number grows on",),
        ),
        Check(
            name="gaudi-temperature", reading="margin to critical temperature", judge=hwmon.judge_margin, steps=COOLING
        ),
        Check(
            name="gaudi-throttled",
            reading="thermal slowdown",
            judge=rules.one_of(("Not Active",), "remark"),
            steps=COOLING,
        ),
        Check(
            name="gaudi-power-limit",
            reading="power limit",
            judge=rules.unlike_neighbours,
            steps=("{sudo}hl-smi -p WATTS -i BUS_ID  # as on the others",),
        ),
        Check(name="gaudi-ports", reading="internal ports up", judge=rules.less_than_neighbours, steps=CABLES),
        Check(name="gaudi-external-ports", reading="external ports up", judge=rules.less_than_neighbours, steps=CABLES),
        Check(name="gaudi-link-toggles", reading="link toggles", judge=rules.remark_grew, limit=0, steps=CABLES),
    ),
    lines=(
        LineCheck(
            name="gaudi-unusable",
            pattern=PREFIX + r".*Device (([^ ]+) )?is NOT usable",
            judge=judge_unusable,
            steps=LINE_STEPS,
        ),
        LineCheck(
            name="gaudi-heartbeat",
            pattern=PREFIX
            + r"(Device heartbeat failed|Device CPU packet timeout|Failed to communicate with Device CPU)",
            judge=judge_silent,
            steps=LINE_STEPS,
        ),
        LineCheck(
            name="gaudi-pci",
            pattern=PREFIX + r"((PCI )?(frozen|failure) state error detected)",
            judge=judge_pci,
            steps=LINE_STEPS,
        ),
        LineCheck(
            name="gaudi-memory-errors",
            pattern=PREFIX + r"(.*(ECC error detected|System Error Interrupt - HBM).*)",
            judge=judge_memory,
            steps=LINE_STEPS,
        ),
        LineCheck(
            name="gaudi-overheated",
            pattern=PREFIX + r"Clock throttling due to overheating",
            judge=judge_hot,
            steps=COOLING,
        ),
    ),
)

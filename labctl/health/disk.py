"""Folders that a run needs, their file systems, and the disks of a node."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from labctl.health import rules
from labctl.health.model import Answer, Check, Evidence, Reading, Subject, shown
from labctl.system import procfs
from labctl.system.hostdump import HostDump
from labctl.system.hostpath import HostPath

GIB = 1 << 30
LEAST = 1.0
"""GiB that must be free."""
SPARE = 20.0
"""GiB: with that much free, a large file system is not full, whatever its share."""
SECONDS = 5
"""A file system that takes longer to tell its size does not answer; a disk that starts may take some seconds."""
NETWORK_DISKS = re.compile(
    r"Elastic Block Store|nvme_card-pd|PersistentDisk|QEMU|VBOX|Virtual|MSFT NVMe|^Linux$", re.IGNORECASE
)
"""Models of disks that a cloud, a virtual machine or a storage network attaches and detaches at any time."""
WARNINGS = (
    "its spare space is used up",
    "it is too hot or too cold",
    "it is unreliable",
    "it is read-only",
    "its volatile memory's backup has failed",
    "its persistent memory is unreliable",
)
"""Bits of an NVMe disk's critical warning. Source: NVM Express Base Specification 2.0, figure "SMART / Health"."""
_HEAT = 1 << 1

SCRIPT = r"""
printf 'file proc/self/mounts\n'
grep -v -e ' nsfs ' -e '/merged overlay ' proc/self/mounts 2> /dev/null | body
set --
printf 'fact disks\n'
# shellcheck disable=SC2012 # names of disks are plain
ls -l sys/block 2> /dev/null | sed -n 's/.* \([^ ]* -> .*\)/\1/p' | grep -v /virtual/block/ | body
for disk in sys/block/sd* sys/block/nvme*; do set -- "$@" "$disk/device/model" "$disk/size" "$disk/removable"; done
lines "$@" sys/class/nvme/nvme*/state
"""
# A folder on a file server that does not answer holds its process for ever: nothing waits for it. Fields: given,
# own or usual; what it is for; r and w if it can be read and written, or missing, or closed if a folder above may not
# be entered; path; block size, blocks free and in all, inodes free and in all, id of the file system; real path.
LATE = rf"""
root_of_docker=$(sed -n 's/.*"data-root" *: *"\([^"]*\)".*/\1/p' etc/docker/daemon.json 2> /dev/null)
examine() {{
    path=./${{3#/}} r=- w=-
    if [ ! -e "$path" ]; then
        case $(LC_ALL=C stat "$path" 2>&1) in *'Permission denied'*) state=closed ;; *) state=missing ;; esac
        printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$state" "$3"
        return
    fi
    [ -r "$path" ] && r=r
    [ -w "$path" ] && w=w
    sizes=$(stat -f -c '%S %a %b %d %c %i' "$path") &&
        printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$r$w" "$3" "$sizes" "$(readlink -f "$path")"
}}
folders=$(
    printf '%s\n' "${{health_paths:-}}" | sed -n -e 's/^rw* ./given &/p' -e 's/^own rw* ./&/p'
    printf 'usual - %s\n' "$HOME" /tmp "${{root_of_docker:-/var/lib/docker}}"
)
printf 'fact folders asked for\n'
printf '%s\n' "$folders" | body
printf 'fact folders\n'
printf '%s\n' "$folders" | (
    while read -r kind use path; do examine "$kind" "$use" "$path" & done
) 2> /dev/null | timeout {SECONDS} cat 2> /dev/null | body
"""
SLOW = r"""
fact 'id of the user' "$(id -u)"
fact smartctl "$(command -v smartctl)"
fact nvme "$(command -v nvme)"
[ "$(id -u)" = 0 ] && for disk in sys/block/sd* sys/block/nvme*n*; do
    [ -e "$disk/device" ] && command -v smartctl > /dev/null || continue
    printf 'fact smart of %s\n' "${disk##*/}"
    ask 10 sh -c 'exec "$@" 2>&1' sh smartctl -n standby -H "/dev/${disk##*/}"
    printf '%s\n' "$answer" | body
done
[ "$(id -u)" = 0 ] && for disk in sys/class/nvme/nvme[0-9]*; do
    [ -e "$disk" ] && command -v nvme > /dev/null || continue
    printf 'fact warning of %s\n' "${disk##*/}"
    ask 10 nvme smart-log -o json "/dev/${disk##*/}"
    printf '%s\n' "$answer" | body
done
"""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield what a node reports of its folders and disks."""
    yield from _folders(dump)
    yield from _disks(dump)
    yield from _nvme(dump.root)
    if "smartctl" in dump.facts:
        yield from _smart(dump)


# --- folders -------------------------------------------------------------------------------------------------


def _folders(dump: HostDump) -> Iterator[Reading]:
    """Yield access to each folder that was asked for, and the space of each file system once."""
    answers = {fields[3]: fields for fields in _rows(dump, "folders", "\t")}
    if "folders" not in dump.facts:
        return
    # A given folder may also be a usual one: the given come first.
    asked = {path: (kind, use) for kind, use, path in reversed(list(_rows(dump, "folders asked for", " ")))}
    seen: set[str] = set()
    for path, (kind, use) in reversed(asked.items()):
        fields = answers.get(path, [])
        yield from _access(kind, use, path, fields)
        if len(fields) < 6:
            continue
        # The id that stat(1) prints last; NFS has none.
        file_system = fields[4].rpartition(" ")[2].strip("0") or path
        if file_system not in seen:
            seen.add(file_system)
            yield from _space(path, fields[4], _mount_options(dump, fields[5]))


def _rows(dump: HostDump, fact: str, separator: str) -> Iterator[list[str]]:
    """Yield the fields of each line of a fact; a path may have blanks."""
    for line in dump.facts.get(fact, "").splitlines():
        yield line.split(separator) if separator == "\t" else line.split(separator, 2)


def _access(kind: str, use: str, path: str, fields: list[str]) -> Iterator[Reading]:
    """Yield whether a folder answers, and one that was given also whether it can be used; others may not exist.

    Labctl's own may be missing too: `up` makes them.
    """
    if not fields:
        value = f"does not answer within {SECONDS} s"
    elif kind == "usual" or (kind == "own" and fields[2] == "missing"):
        return
    elif fields[2] == "closed":
        yield Reading(name="folder", value=None, source=f"ls -ld {path}", item=path, why="permission denied")
        return
    elif fields[2] == "missing":
        value = "does not exist"
    elif "r" not in fields[2]:
        value = "is not readable"
    elif "w" in use and "w" not in fields[2]:
        value = "is not writable"
    else:
        value = "ok"
    yield Reading(name="folder", value=value, source=f"ls -ld {path}", item=path)


def _mount_options(dump: HostDump, path: str) -> list[str]:
    """Return the options of the file system that a real path is on; empty if unknown. Source: proc_mounts(5)."""
    options: list[str] = []
    longest = ""
    for line in procfs.read(dump.root / "proc/self/mounts").splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        # Of several on the same folder, the last one is on top.
        if f"{path.rstrip('/')}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(longest):
            longest, options = point, fields[3].split(",")
    return options


def _space(path: str, sizes: str, options: list[str]) -> Iterator[Reading]:
    """Yield the free space and inodes of a folder's file system, unless it is read-only, and whether it is.

    Some report no sizes: network file systems; or no inodes: btrfs.
    """
    size, free, blocks, free_inodes, inodes = map(int, sizes.split(" ")[:5])
    if options:
        mounted = "read-only" if "ro" in options else "read-write"
        yield Reading(name="mounted", value=mounted, source="/proc/self/mounts", item=path)
    if "ro" in options or not blocks:
        return
    value = " of ".join(shown(round(count * size / GIB, 2 if blocks * size > GIB else 4)) for count in (free, blocks))
    yield Reading(name="free space", value=value, source=f"df {path}", item=path, unit="GiB")
    if inodes:
        yield Reading(name="free inodes", value=free_inodes, source=f"df -i {path}", item=path)


# --- disks ---------------------------------------------------------------------------------------------------


def _disks(dump: HostDump) -> Iterator[Reading]:
    """Yield the built-in disks by model and size: their names may change with each start of the node."""
    found = Counter(_disk(dump.root / "sys/block" / name) for name in built_in(dump))
    if found:
        value = "; ".join(f"{count} x {disk}" for disk, count in sorted(found.items()))
        yield Reading(name="disks", value=value, source="lsblk", kind="fact")


def built_in(dump: HostDump) -> Iterator[str]:
    """Yield the names of disks inside the machine: not on USB, and not of a network or a virtual machine."""
    for line in dump.facts.get("disks", "").splitlines():
        name, _, path = line.partition(" -> ")
        folder = dump.root / "sys/block" / name
        model = procfs.read(folder / "device/model").strip()
        removable = procfs.read(folder / "removable").strip() == "1"
        known = re.fullmatch(r"sd[a-z]+|nvme[0-9]+n[0-9]+", name) and model and not removable
        outside = re.search(r"/(usb[0-9]|session[0-9]|rport-|vport-|nvme-fabrics/)", path)
        if known and not outside and not NETWORK_DISKS.search(model):
            yield name


def _disk(folder: HostPath) -> str:
    """Render a disk's model and size: sysfs counts sectors of 512 bytes, whatever the disk's own."""
    model = " ".join(procfs.read(folder / "device/model").split())
    return f"{model} {int(procfs.read(folder / 'size')) * 512 / 1e9:.0f} GB"


def _nvme(root: HostPath) -> Iterator[Reading]:
    """Yield the state of each NVMe controller. Source: drivers/nvme/host/sysfs.c of the kernel."""
    for folder in sorted((root / "sys/class/nvme").glob("nvme*")):
        state = procfs.read(folder / "state").strip()
        if state:
            yield Reading(name="NVMe state", value=state, source=f"{folder}/state", item=f"/dev/{folder.name}")


def _smart(dump: HostDump) -> Iterator[Reading]:
    """Yield the disks' own opinion of themselves, if root asked for it and a program for it is installed."""
    names = sorted(built_in(dump))
    if not names:
        return
    if dump.facts["id of the user"] != "0":
        yield Reading(name="SMART", value=None, source="smartctl -H", why="only root reads it")
        return
    if not dump.facts["smartctl"] and not dump.facts.get("nvme"):
        yield Reading(name="SMART", value=None, source="smartctl -H", why="smartctl is not installed")
        return
    for name in names:
        if f"smart of {name}" in dump.facts:
            yield from _opinion(name, dump.facts[f"smart of {name}"])
    for folder in sorted((dump.root / "sys/class/nvme").glob("nvme*")):
        if dump.facts.get(f"warning of {folder.name}", "").strip():
            yield _warning(folder.name, dump.facts[f"warning of {folder.name}"])


def _opinion(name: str, text: str) -> Iterator[Reading]:
    """Yield the result of ``smartctl -H``; nothing of a disk that sleeps, or that has no opinion.

    Source: smartctl(8), scsiprint.cpp and ataprint.cpp of smartmontools.
    """
    if re.search(r"STANDBY|SLEEP|Unavailable|lacks SMART", text):
        return
    match = re.search(r"(?:self-assessment test result|SMART Health Status): *(.+)$", text, re.MULTILINE)
    value = match[1].strip().rstrip("!") if match else None
    why = "" if value else f"smartctl: {text.strip().splitlines()[-1] if text.strip() else 'no answer'}"
    yield Reading(name="SMART", value=value, source=f"smartctl -H /dev/{name}", item=f"/dev/{name}", why=why)


def _warning(name: str, text: str) -> Reading:
    """Return the bits of an NVMe disk's critical warning, None with what nvme-cli says of one that it cannot read."""
    bits = _bits(text)
    why = "" if bits is not None else f"nvme: {' '.join(text.split())[:200]}"
    source = f"nvme smart-log /dev/{name}"
    return Reading(name="critical warning", value=bits, source=source, item=f"/dev/{name}", why=why)


def _bits(text: str) -> int | None:
    """Return the critical warning of ``nvme smart-log``, None without; newer ones print an object with ``value``."""
    try:
        value = json.loads(text)["critical_warning"]
        return int(value["value"] if isinstance(value, dict) else value)
    except (ValueError, LookupError, TypeError):
        return None


# --- checks --------------------------------------------------------------------------------------------------


def space(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge less free space than the limit in GiB as bad, less than 5 % of a file system as a remark.

    A file system that is hardly larger than the limit, such as /tmp in memory, is full with less than a tenth of it.
    """
    free, total = map(float, str(reading.value).split(" of "))
    least = min(LEAST, total / 10) if evidence.limit in (None, LEAST) else evidence.limit
    if free < least:
        return Answer("bad", f"free space {reading.text()}")
    return Answer("remark", f"free space {reading.text()}") if free < min(SPARE, total / 20) else None


def mounted(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a file system that was writable before and is read-only now as bad, as the kernel makes it after errors."""
    if reading.value == "read-only" and evidence.before == "read-write":
        return Answer("bad", "file system is read-only, it was writable before")
    return None


def folder(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a folder that cannot be used as bad."""
    return None if reading.value == "ok" else Answer("bad", f"the folder {reading.value}")


def warning(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
    """Judge a critical warning as bad, of the temperature alone as a remark."""
    bits = int(reading.value or 0)
    if not bits:
        return None
    texts = [text for bit, text in enumerate(WARNINGS) if bits >> bit & 1] or [f"critical warning {bits:#x}"]
    return Answer("remark" if bits == _HEAT else "bad", f"the disk warns: {', '.join(texts)}")


REPLACE = ("save what the disk holds", "{sudo}smartctl -a {item}", "have the disk replaced")
FREE = ("du -xh --max-depth=2 {item} | sort -h | tail", "docker system df")
SUBJECT = Subject(
    name="Disk",
    script=SCRIPT,
    late=LATE,
    slow=SLOW,
    readings=readings,
    checks=(
        Check(name="folder", reading="folder", judge=folder, steps=("ls -ld {item}", "df {item}", "findmnt -T {item}")),
        Check(name="disk-space", reading="free space", judge=space, limit=LEAST, steps=FREE),
        Check(
            name="inodes",
            reading="free inodes",
            judge=rules.below,
            limit=1000,
            steps=("du -x --inodes --max-depth=2 {item} | sort -n | tail", *FREE[1:]),
        ),
        Check(
            name="read-only",
            reading="mounted",
            judge=mounted,
            steps=("{sudo}dmesg | grep -i 'read-only'", "check the file system with fsck, then mount it again"),
        ),
        Check(
            name="nvme-state",
            reading="NVMe state",
            judge=rules.one_of(("live",)),
            steps=("{sudo}nvme reset {item}", "restart the node", *REPLACE[2:]),
        ),
        Check(name="smart", reading="SMART", judge=rules.one_of(("PASSED", "OK")), steps=REPLACE),
        Check(name="nvme-warning", reading="critical warning", judge=warning, steps=REPLACE),
    ),
)

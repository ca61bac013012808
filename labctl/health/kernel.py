"""Lines of the kernel on disks, file systems and NFS servers, and on its own faults."""

from __future__ import annotations

import re
from collections.abc import Iterator

from labctl.health import rules
from labctl.health.model import Answer, Check, LineCheck, Reading, Subject
from labctl.system.hostdump import HostDump

DISKS = r"(sd[a-z]+|nvme[0-9]+(c[0-9]+)?n[0-9]+|vd[a-z]+|xvd[a-z]+|mmcblk[0-9]+|md[0-9]+|dasd[a-z]+|pmem[0-9]+)"
"""Disks whose errors count: not floppies, CDs, loop, network or mapped devices, which fail when they are removed."""
NFS = r"nfs: server ([^ ]+) (not responding|OK)"
"""Source: net/sunrpc/clnt.c of the kernel, call_timeout and rpc_check_timeout."""
_SEEN = "kernel"
"""Fact with the lines that a check of any subject asks for."""

SCRIPT = """\
printf 'fact nfs mounts\\n'
grep -E '^[^ ]+ [^ ]+ nfs4? ' proc/self/mounts 2> /dev/null | body
"""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the state of each NFS server that is mounted, by the last line of the kernel on it."""
    states: dict[str, str] = {}
    for match in re.finditer(NFS, dump.facts.get(_SEEN, "")):
        states[match[1]] = match[2]
    sources = [line.split(" ")[0] for line in dump.facts.get("nfs mounts", "").splitlines()]
    # An address of IPv6 has brackets in the list of mounts.
    mounted = {source.rpartition(":/")[0].strip("[]") for source in sources}
    for server, state in states.items():
        if server in mounted:
            yield Reading(name="NFS server", value=state, source="dmesg", item=server)


# --- checks --------------------------------------------------------------------------------------------------


def io_error(match: re.Match[str]) -> Answer | None:
    """Judge an error of a disk as bad, unless it was asked to forget blocks, or for its first sector.

    Disks of a thin pool may refuse the former (DISCARD, WRITE_ZEROES). Passive paths of a storage network, and virtual
    drives of a remote console, answer a look at the partition table, sector 0, with an error.
    """
    if match[4] == "0" or (match[6] or "").startswith(("DISCARD", "WRITE_ZEROES", "SECURE_ERASE")):
        return None
    return Answer("bad", "I/O error", _disk(match[2]))


def buffer_error(match: re.Match[str]) -> Answer | None:
    """Judge a lost block as bad, unless it is the first, as in ``io_error``."""
    return None if match[6] == "0" else Answer("bad", "I/O error", _disk(match[3]))


def _disk(name: str) -> str:
    """Return the file of a disk; a path to an NVMe disk, such as ``nvme0c1n1``, has none of its own."""
    return f"/dev/{re.sub('c[0-9]+n', 'n', name)}"


def blocked(match: re.Match[str]) -> Answer:
    """Name the process that the kernel found waiting for minutes."""
    return Answer("bad", f"process {match[2]} ({match[1]}) was blocked in the kernel for minutes")


def nfs(match: re.Match[str]) -> Answer | None:
    """Name a server that did not respond for a while; whether it does by now is a reading."""
    return None if match[2] == "OK" else Answer("remark", "NFS server did not respond", match[1])


REPLACE = ("save what it holds", "have the disk or its cable replaced")
DISK_STEPS = ("{sudo}smartctl -a {item}", *REPLACE)
FILE_SYSTEM_STEPS = (
    "end the runs on the node",
    "unmount the file system, and check it with {sudo}fsck {item}",
    "{sudo}smartctl -a /dev/NAME  # the disk, as `lsblk` prints it",
    *REPLACE,
)
NFS_STEPS = ("ping the server", "nfsstat -m", "on the server: {sudo}systemctl status nfs-server")
SUBJECT = Subject(
    name="Kernel",
    script=SCRIPT,
    readings=readings,
    checks=(Check(name="nfs", reading="NFS server", judge=rules.one_of(("OK",)), steps=NFS_STEPS),),
    lines=(
        # Source: block/blk-core.c and blk-mq.c of the kernel, blk_print_req_error.
        LineCheck(
            name="io-error",
            pattern=rf"(I/O error|critical medium error), dev {DISKS}, sector ([0-9]+)( op 0x[0-9a-f]+:\(([A-Z_]+))?",
            judge=io_error,
            steps=DISK_STEPS,
        ),
        # Source: fs/buffer.c of the kernel, buffer_io_error.
        LineCheck(
            name="buffer-error",
            pattern=rf"(Buffer I/O error on dev(ice)?) {DISKS}(p?[0-9]+)?, logical block ([0-9]+)",
            judge=buffer_error,
            steps=DISK_STEPS,
        ),
        # Source: kernel/hung_task.c of the kernel.
        LineCheck(
            name="blocked",
            pattern=r"INFO: task (.*):([0-9]+)( <[a-z]+>)? blocked (in I/O wait )?for more than [0-9]+ seconds",
            judge=blocked,
            steps=("look for errors of disks and file servers", "restart the node if the process stays"),
        ),
        # Source: fs/ext4/super.c, fs/jbd2/journal.c, fs/xfs/xfs_error.c and fs/btrfs/super.c of the kernel.
        LineCheck(
            name="ext4",
            pattern=r"EXT4-fs error \(device (sd|nvme|vd|xvd|mmcblk|md|dm-|dasd|pmem)([a-z0-9]*)",
            judge=lambda match: Answer("bad", "errors in its ext4 file system", f"/dev/{match[1]}{match[2]}"),
            steps=FILE_SYSTEM_STEPS,
        ),
        LineCheck(
            name="xfs",
            pattern=r"XFS \((sd|nvme|vd|xvd|mmcblk|md|dm-|dasd|pmem)([a-z0-9]*)\): "
            r"(.*[Cc]orruption|Internal error|metadata I/O error|log I/O error)",
            judge=lambda match: Answer("bad", "errors in its XFS file system", f"/dev/{match[1]}{match[2]}"),
            steps=FILE_SYSTEM_STEPS,
        ),
        LineCheck(
            name="remounted",
            pattern=r"EXT[234]-fs \(([a-z0-9-]+)\): Remounting filesystem read-only"
            r"|BTRFS[^(]* \(device ([a-z0-9-]+)[^)]*\): forced readonly",
            judge=lambda match: Answer("bad", "its file system was made read-only", f"/dev/{match[1] or match[2]}"),
            steps=FILE_SYSTEM_STEPS,
        ),
        LineCheck(name="nfs-delay", pattern=NFS, judge=nfs, steps=NFS_STEPS),
        # Source: Documentation/admin-guide/bug-hunting.rst of the kernel.
        LineCheck(
            name="kernel-fault",
            pattern=r"kernel BUG at |Kernel panic - not syncing|Oops: .*\[#[0-9]+\]|BUG: unable to handle "
            r"|BUG: kernel NULL pointer dereference",
            judge=lambda _: Answer("bad", "fault of the kernel"),
            steps=("end the runs on the node", "restart the node", "update the kernel and the drivers"),
        ),
    ),
)

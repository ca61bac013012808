"""Lines of the kernel on disks, file systems and NFS servers, and on its own faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import host_health
from support.host_health import of_line, put

from labctl.health.kernel import SUBJECT
from labctl.health.model import Evidence
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

MOUNTS = "proc/self/mounts"
NFS = "nas:/data /data nfs4 rw,hard 0 0\n/dev/sda1 / ext4 rw 0 0\n[fd00::1]:/x /x nfs rw 0 0\n"


def states(root: Path, kernel: str) -> dict[str, object]:
    """Return the states of NFS servers by these kernel lines, with the mounts of the tree."""
    dump = host_health.dump_of(SUBJECT, root)
    lines = HostDump("gpu-1", facts={**dump.facts, "kernel": kernel})
    return {reading.item: reading.value for reading in SUBJECT.readings(lines)}


def test_nfs_server_by_its_last_line(tmp_path: Path) -> None:
    """Judge a mounted server by the last line on it; one that is not mounted has no state."""
    put(tmp_path, {MOUNTS: NFS})
    lost, back = "[ 1.0] nfs: server nas not responding, still trying\n", "[ 2.0] nfs: server nas OK\n"
    assert states(tmp_path, lost + back) == {"nas": "OK"}
    assert states(tmp_path, lost + back + lost) == {"nas": "not responding"}
    assert states(tmp_path, "[ 1.0] nfs: server fd00::1 not responding, timed out\n") == {"fd00::1": "not responding"}
    assert states(tmp_path, lost.replace("nas", "gone")) == {}


def test_nothing_without_nfs(tmp_path: Path) -> None:
    """Yield nothing without mounts."""
    assert states(tmp_path, "") == {}


@pytest.mark.parametrize(("state", "level"), [("not responding", "bad"), ("OK", None)])
def test_nfs_check(tmp_path: Path, state: str, level: str | None) -> None:
    """Judge a server that does not respond as bad."""
    put(tmp_path, {MOUNTS: NFS})
    dump = host_health.dump_of(SUBJECT, tmp_path)
    dump.facts["kernel"] = f"[ 1.0] nfs: server nas {state}"
    (reading,) = SUBJECT.readings(dump)
    answer = SUBJECT.checks[0].judge(reading, Evidence())
    assert (answer.level if answer else None) == level


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        (
            "I/O error, dev sda, sector 1024 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
            "bad",
            "/dev/sda: I/O error",
        ),
        ("blk_update_request: I/O error, dev nvme0n1, sector 98 op 0x1:(WRITE)", "bad", "/dev/nvme0n1: I/O error"),
        ("blk_update_request: critical medium error, dev sdb, sector 9", "bad", "/dev/sdb: I/O error"),
        ("Buffer I/O error on dev sda1, logical block 77, async page read", "bad", "/dev/sda: I/O error"),
        ("Buffer I/O error on device nvme0n1p2, logical block 77", "bad", "/dev/nvme0n1: I/O error"),
        ("Buffer I/O error on dev sdb, logical block 0, async page read", "", ""),
        ("I/O error, dev sdc, sector 0 op 0x0:(READ) flags 0x0", "", ""),
        ("I/O error, dev sda, sector 2048 op 0x3:(DISCARD) flags 0x800", "", ""),
        ("blk_update_request: I/O error, dev fd0, sector 0", "", ""),
        ("I/O error, dev loop3, sector 8", "", ""),
        ("I/O error, dev nbd0, sector 8", "", ""),
        ("blk_update_request: I/O error, dev sr0, sector 8", "", ""),
        ("Buffer I/O error on dev dm-3, logical block 5, async page read", "", ""),
        (
            "INFO: task python3:4711 blocked for more than 120 seconds.",
            "bad",
            "process 4711 (python3) was blocked in the kernel for minutes",
        ),
        (
            "INFO: task pt main:7 blocked in I/O wait for more than 122 seconds.",
            "bad",
            "process 7 (pt main) was blocked in the kernel for minutes",
        ),
        ('"echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.', "", ""),
        (
            "EXT4-fs error (device dm-0): ext4_lookup:1785: inode #2: comm ls: deleted inode referenced",
            "bad",
            "/dev/dm-0: errors in its ext4 file system",
        ),
        ("EXT4-fs (vda): mounted filesystem with ordered data mode. Quota mode: none.", "", ""),
        ("EXT4-fs (vda): re-mounted /dev/root r/w.", "", ""),
        ("EXT4-fs error (device loop0): ext4_fill_super:1", "", ""),
        ("EXT4-fs (sda2): Remounting filesystem read-only", "bad", "/dev/sda2: its file system was made read-only"),
        (
            "BTRFS info (device sda2: state EA): forced readonly",
            "bad",
            "/dev/sda2: its file system was made read-only",
        ),
        ("XFS (nvme0n1p1): Metadata corruption detected at x", "bad", "/dev/nvme0n1p1: errors in its XFS file system"),
        ("XFS (sdb1): Internal error xfs_trans_cancel at line 1", "bad", "/dev/sdb1: errors in its XFS file system"),
        ("XFS (dm-1): metadata I/O error in x", "bad", "/dev/dm-1: errors in its XFS file system"),
        ("XFS (sdb1): Ending clean mount", "", ""),
        ("nfs: server nas not responding, still trying", "remark", "nas: NFS server did not respond"),
        ("nfs: server nas not responding, timed out", "remark", "nas: NFS server did not respond"),
        ("nfs: server nas OK", "", ""),
        ("kernel BUG at mm/slub.c:305!", "bad", "fault of the kernel"),
        ("Oops: 0000 [#1] SMP NOPTI", "bad", "fault of the kernel"),
        ("BUG: kernel NULL pointer dereference, address: 0000000000000008", "bad", "fault of the kernel"),
        ("traps: python3[12] general protection fault ip:7f sp:7f error:0 in libc.so", "", ""),
        ("python3[9]: segfault at 0 ip 0 sp 0 error 4 in a.so", "", ""),
        ("Kernel command line: quiet panic=1 oops=panic", "", ""),
    ],
)
def test_kernel_lines(line: str, level: str, words: str) -> None:
    """Judge lines on disks, file systems and the kernel; harmless ones get no word."""
    assert of_line(SUBJECT, line) == (level, words)


def test_damaged_output(tmp_path: Path) -> None:
    """Raise only what the frame catches."""
    put(tmp_path, {MOUNTS: NFS})
    text = host_health.output(SUBJECT, tmp_path)
    assert hostdump.read(text, "gpu-1").facts["nfs mounts"]
    host_health.fuzz(SUBJECT, text.replace("\nend", "\nfact kernel\n\tnfs: server nas OK\nend"), seed=3)


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []

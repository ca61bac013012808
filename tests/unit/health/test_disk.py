"""Folders, their file systems, and disks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from support import host_health
from support.host_health import conditions, look, put, read

from labctl.health import disk, script
from labctl.health.disk import SUBJECT, WARNINGS
from labctl.health.model import Answer, Evidence, Reading, Rules, Snapshot
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

BLOCK = "sys/block"
PCI = "sys/devices/pci0000:00"
MOUNTS = (
    "/dev/sda1 / ext4 rw,relatime 0 0\n/dev/sdb1 /my\\040data xfs ro,relatime 0 0\n/dev/sdc /my\\040data/x xfs rw 0 0\n"
)
SLOW = {"id of the user": "0", "smartctl": "/usr/sbin/smartctl", "nvme": ""}
NOBODY = 65534
PASSED = "=== START ===\nSMART overall-health self-assessment test result: PASSED\n"


def add_disk(root: Path, path: str, model: str, **files: str) -> None:
    """Add a disk with 3.84 TB at this path of sysfs, and its link below /sys/block."""
    put(root, {f"{path}/device/model": f"{model}   \n", f"{path}/size": "7501476528\n"})
    put(root, {f"{path}/{name}": text for name, text in files.items()})
    link = root / BLOCK / path.rpartition("/")[2]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"../../{path}")


def dump_with(root: Path, **facts: str) -> HostDump:
    """Run the script on the tree and put these facts in place of those of the slow part."""
    dump = host_health.dump_of(SUBJECT, root)
    known = {name: text for name, text in dump.facts.items() if name not in SLOW}
    return msgspec.structs.replace(
        dump, facts={**known, **{name.replace("_", " "): text for name, text in facts.items()}}
    )


def folders(*lines: str, asked: str, mounts: str = MOUNTS) -> dict[tuple[str, str], object]:
    """Return the readings of these answers."""
    facts = {"folders asked for": asked, "folders": "\n".join(lines)}
    dump = HostDump("gpu-1", facts=facts, files={"proc/self/mounts": mounts})
    return {reading.key: reading.value for reading in SUBJECT.readings(dump)}


# --- folders -------------------------------------------------------------------------------------------------


def test_given_folders(tmp_path: Path) -> None:
    """Tell which of the given folders exist; blanks in a name do not matter."""
    (tmp_path / "data" / "my set").mkdir(parents=True)
    found = read(SUBJECT, tmp_path, HOME="/nowhere", health_paths="rw /data/my set\nr /data\nrw /missing\n")
    values = {item: reading.value for (item, name), reading in found.items() if name == "folder"}
    assert values == {"/data/my set": "ok", "/data": "ok", "/missing": "does not exist"}


def test_a_folder_of_labctl_may_be_missing(tmp_path: Path) -> None:
    """Say nothing of a folder that the next `up` makes, such as on a host that was just added to the lab."""
    (tmp_path / "my cache").mkdir()
    found = read(SUBJECT, tmp_path, HOME="/nowhere", health_paths="own rw /my cache\nown rw /lab/runs\nown r /lab\n")
    assert {item: reading.value for (item, name), reading in found.items() if name == "folder"} == {"/my cache": "ok"}
    answer = "own\trw\tr-\t/lab\t4096 10 20 5 9 ab\t/lab"
    assert folders(answer, asked="own rw /lab")["/lab", "folder"] == "is not writable"


def test_space_of_a_file_system_once(tmp_path: Path) -> None:
    """Read space and inodes of several folders on the same file system once."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    found = read(SUBJECT, tmp_path, HOME="/home")
    spaces = [reading for (_, name), reading in found.items() if name == "free space"]
    assert [reading.item for reading in spaces] == ["/home"]
    assert " of " in str(spaces[0].value)


def test_file_systems_are_told_apart_by_their_id() -> None:
    """Read a file system once while it is written to; without an id, each folder is one."""
    lines = [f"usual\t-\trw\t/{name}\t4096 {free} 20 5 9 {{}}\t/{name}" for name, free in (("a", 8), ("b", 7))]
    asked = "usual - /a\nusual - /b"
    spaces = ("/a", "free space"), ("/b", "free space")
    same = folders(*(line.format("be0c") for line in lines), asked=asked)
    assert spaces[0] in same
    assert spaces[1] not in same
    assert {*spaces} <= folders(*(line.format("0") for line in lines), asked=asked).keys()


@pytest.mark.parametrize(
    ("use", "rights", "value"),
    [
        ("rw", "rw", "ok"),
        ("r", "r-", "ok"),
        ("rw", "r-", "is not writable"),
        ("r", "-w", "is not readable"),
        ("r", "missing", "does not exist"),
    ],
)
def test_access(use: str, rights: str, value: str) -> None:
    """Ask of a folder what it is for."""
    answer = f"given\t{use}\t{rights}\t/data" + ("" if rights == "missing" else "\t4096 10 20 5 9 ab\t/data")
    assert folders(answer, asked=f"given {use} /data")["/data", "folder"] == value


def test_a_folder_below_a_closed_one_is_unknown(tmp_path: Path) -> None:
    """Do not call missing what the user has no right to see: Docker mounts it as root."""
    (tmp_path / "closed/data").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    path = f"{tmp_path}/closed/data"
    done = subprocess.run(
        ["sh", "-c", script.script((SUBJECT,), Rules(), full=False, folders=(f"r {path}",)), "sh", "/"],
        user=NOBODY if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    (tmp_path / "closed").chmod(0o700)
    readings = SUBJECT.readings(hostdump.read(done.stdout, "gpu-1"))
    found = [(reading.value, reading.why) for reading in readings if reading.key == (path, "folder")]
    assert found == [(None, "permission denied")]


def test_usual_folders_may_be_missing() -> None:
    """Say nothing of a usual folder that is not there, or not writable."""
    assert folders("usual\t-\tmissing\t/x", asked="usual - /x") == {}
    assert ("/x", "folder") not in folders("usual\t-\t--\t/x\t4096 10 20 5 9 ab\t/x", asked="usual - /x")


def test_a_folder_that_does_not_answer() -> None:
    """Judge a folder whose file server does not answer, given or not."""
    value = folders(asked="usual - /home/ann")["/home/ann", "folder"]
    assert value == "does not answer within 5 s"


def test_read_only_file_system() -> None:
    """Read the options of the innermost mount; the free space of a read-only one says nothing."""
    line = "given\tr\tr-\t/d\t4096 0 20 0 9 ab\t/my data/set"
    assert folders(line, asked="given r /d") == {("/d", "folder"): "ok", ("/d", "mounted"): "read-only"}
    inner = folders(line.replace("data/set", "data/x/set"), asked="given r /d")
    assert inner["/d", "mounted"] == "read-write"
    assert inner["/d", "free space"] == "0 of 0.0001"


def test_large_file_system() -> None:
    """Show the space of a file system of 2 PiB in full."""
    found = folders(f"given\tr\tr-\t/d\t4096 {1 << 38} {1 << 39} 5 9 ab\t/d", asked="given r /d")
    assert found["/d", "free space"] == "1048576 of 2097152"


def test_no_sizes() -> None:
    """Say nothing of sizes that a file system does not report."""
    assert ("/d", "free inodes") not in folders("given\tr\tr-\t/d\t4096 9 20 0 0 ab\t/d", asked="given r /d")
    assert ("/d", "free space") not in folders("given\tr\tr-\t/d\t4096 0 0 0 0 ab\t/d", asked="given r /d")


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("0.9 of 100.0", "bad"),
        ("1.1 of 100.0", "remark"),
        ("6.0 of 100.0", None),
        ("19.0 of 4000.0", "remark"),
        ("21.0 of 4000.0", None),
        ("0.4 of 0.5", None),
        ("0.0 of 0.5", "bad"),
    ],
)
def test_free_space(value: str, level: str | None) -> None:
    """Judge free space by its size and its share."""
    reading = Reading(name="free space", value=value, source="df", unit="GiB")
    answer = disk.space(reading, Evidence(limit=1))
    assert (answer.level if answer else None) == level


def changed(name: str, value: str | int, before: str | int | None = None) -> dict[str, tuple[str, str]]:
    """Return level and text of each check of a folder's or disk's reading that is not ok."""
    now, earlier = (
        Snapshot(time=0, boot="b", readings=(Reading(name=name, value=text, source="", item="/dev/nvme0"),))
        for text in (value, value if before is None else before)
    )
    found = conditions(SUBJECT, now, earlier)
    return {check: (condition.level, condition.text) for check, condition in found.items()}


def test_checks() -> None:
    """Judge folders, inodes, read-only file systems, and NVMe controllers."""
    assert changed("folder", "ok") == changed("mounted", "read-only") == changed("free inodes", 1000) == {}
    assert changed("folder", "does not exist") == {"folder": ("bad", "the folder does not exist")}
    assert changed("mounted", "read-only", "read-write")["read-only"][0] == "bad"
    assert changed("free inodes", 12) == {"inodes": ("bad", "free inodes 12, at least 1000 is needed")}
    assert changed("NVMe state", "live") == {}
    assert changed("NVMe state", "dead") == {"nvme-state": ("bad", "NVMe state is dead")}
    assert changed("SMART", "PASSED") == changed("SMART", "OK") == changed("critical warning", 0) == {}
    assert changed("SMART", "FAILED") == {"smart": ("bad", "SMART is FAILED")}


# --- disks ---------------------------------------------------------------------------------------------------


def test_disks_inside_the_machine(tmp_path: Path) -> None:
    """Count disks by model and size; not those on USB, of a network, or of a virtual machine."""
    add_disk(tmp_path, f"{PCI}/nvme/nvme0/nvme0n1", "SAMSUNG MZQL23T8")
    add_disk(tmp_path, f"{PCI}/nvme/nvme1/nvme1n1", "SAMSUNG MZQL23T8")
    add_disk(tmp_path, f"{PCI}/ata1/sda", "ST4000", removable="0\n")
    add_disk(tmp_path, f"{PCI}/usb1/1-1/sdb", "Stick")
    add_disk(tmp_path, f"{PCI}/ata2/sdc", "Card", removable="1\n")
    add_disk(tmp_path, f"{PCI}/nvme/nvme2/nvme2n1", "Amazon Elastic Block Store")
    add_disk(tmp_path, "sys/devices/platform/host3/session1/sdd", "LUN")
    add_disk(tmp_path, "sys/devices/virtual/block/loop0", "")
    add_disk(tmp_path, f"{PCI}/virtio1/vda", "")
    found = read(SUBJECT, tmp_path)
    assert found["", "disks"].value == "2 x SAMSUNG MZQL23T8 3841 GB; 1 x ST4000 3841 GB"


def test_nvme_states(tmp_path: Path) -> None:
    """Read the state of each controller."""
    put(tmp_path, {"sys/class/nvme/nvme0/state": "live\n", "sys/class/nvme/nvme1/state": "dead\n"})
    states = {item: reading.value for (item, name), reading in read(SUBJECT, tmp_path).items() if name == "NVMe state"}
    assert states == {"/dev/nvme0": "live", "/dev/nvme1": "dead"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PASSED, "PASSED"),
        (PASSED.replace("PASSED", "FAILED!"), "FAILED"),
        ("SMART Health Status: OK\n", "OK"),
        ("SMART Health Status: FAILURE PREDICTION THRESHOLD EXCEEDED [asc=5d, ascq=10]\n", "FAILURE"),
        ("/dev/sda: Unknown USB bridge\n", None),
        ("", None),
    ],
)
def test_smart(tmp_path: Path, text: str, value: str | None) -> None:
    """Read a disk's opinion of itself; unknown if smartctl has no answer."""
    add_disk(tmp_path, f"{PCI}/ata1/sda", "ST4000")
    found = SUBJECT.readings(dump_with(tmp_path, **{**SLOW, "smart of sda": text}))
    (reading,) = (reading for reading in found if reading.name == "SMART")
    assert reading.item == "/dev/sda"
    assert str(reading.value).startswith(value) if value else reading.value is None
    assert bool(reading.why) == (value is None)


def test_a_sleeping_disk_has_no_opinion(tmp_path: Path) -> None:
    """Yield nothing of a disk that sleeps."""
    add_disk(tmp_path, f"{PCI}/ata1/sda", "ST4000")
    dump = dump_with(tmp_path, **{**SLOW, "smart of sda": "Device is in STANDBY mode, exit(2)\n"})
    assert "SMART" not in {reading.name for reading in SUBJECT.readings(dump)}


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"id of the user": "1000"}, "only root reads it"), ({"smartctl": ""}, "smartctl is not installed")],
)
def test_smart_is_unknown(tmp_path: Path, facts: dict[str, str], why: str) -> None:
    """Say why SMART is unknown, once; nothing without a disk."""
    assert "SMART" not in {reading.name for reading in SUBJECT.readings(dump_with(tmp_path, **{**SLOW, **facts}))}
    add_disk(tmp_path, f"{PCI}/ata1/sda", "ST4000")
    found = [
        reading for reading in SUBJECT.readings(dump_with(tmp_path, **{**SLOW, **facts})) if reading.name == "SMART"
    ]
    assert [(reading.value, reading.why) for reading in found] == [(None, why)]


@pytest.mark.parametrize("warning", [4, {"value": 4, "available_spare": 0}])
def test_critical_warning(tmp_path: Path, warning: object) -> None:
    """Read an NVMe disk's warning, from either form of nvme-cli's output."""
    add_disk(tmp_path, f"{PCI}/nvme/nvme0/nvme0n1", "SAMSUNG")
    put(tmp_path, {"sys/class/nvme/nvme0/state": "live\n"})
    text = json.dumps({"critical_warning": warning, "temperature": 310})
    dump = dump_with(tmp_path, **{**SLOW, "nvme": "/usr/sbin/nvme", "warning of nvme0": text})
    (reading,) = (reading for reading in SUBJECT.readings(dump) if reading.name == "critical warning")
    assert (reading.item, reading.value) == ("/dev/nvme0", 4)
    assert disk.warning(reading, Evidence()) == Answer("bad", f"the disk warns: {WARNINGS[2]}")


@pytest.mark.parametrize("text", ['{"error": "Permission denied"}', "smart log: Invalid argument", "[]", '"x"'])
def test_a_warning_that_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    """Say what nvme-cli answers instead of a warning, and read the other disks all the same."""
    add_disk(tmp_path, f"{PCI}/nvme/nvme0/nvme0n1", "SAMSUNG")
    put(tmp_path, {"sys/class/nvme/nvme0/state": "live\n", "sys/class/nvme/nvme1/state": "live\n"})
    texts = {"warning of nvme0": text, "warning of nvme1": '{"critical_warning": 0}'}
    dump = dump_with(tmp_path, **{**SLOW, "nvme": "/usr/sbin/nvme", **texts})
    found = [reading for reading in SUBJECT.readings(dump) if reading.name == "critical warning"]
    assert [(reading.value, reading.why) for reading in found] == [(None, f"nvme: {text}"), (0, "")]


def test_heat_alone_is_a_remark() -> None:
    """Judge a warning of the temperature alone as a remark."""
    assert changed("critical warning", 2)["nvme-warning"][0] == "remark"
    assert changed("critical warning", 6)["nvme-warning"][0] == "bad"
    assert changed("critical warning", 128)["nvme-warning"] == ("bad", "the disk warns: critical warning 0x80")


def test_damaged_output(tmp_path: Path) -> None:
    """Raise only what the frame catches."""
    add_disk(tmp_path, f"{PCI}/ata1/sda", "ST4000")
    put(tmp_path, {"proc/self/mounts": MOUNTS, "sys/class/nvme/nvme0/state": "live\n", "tmp/x": ""})
    text = host_health.output(SUBJECT, tmp_path, health_paths="rw /tmp")
    slow = f"fact smart of sda\n\t{PASSED.splitlines()[1]}\nfact warning of nvme0\n\t" + '{"critical_warning": 0}\nend'
    host_health.fuzz(SUBJECT, text.replace("\nend", f"\n{slow}"), seed=6)


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []
    assert conditions(SUBJECT, msgspec.structs.replace(look(SUBJECT, health_paths="rw /tmp"), lines_why="")).keys() <= {
        "smart"
    }


def test_a_limit_of_health_yml_holds_on_small_file_systems() -> None:
    """Judge by the site's own limit, whatever the size; the usual one is at most a tenth of a file system."""
    reading = Reading(name="free space", value="0.8 of 2", source="df", unit="GiB")
    judged = [disk.space(reading, Evidence(limit=limit)) for limit in (1.0, 1.5, 0.5)]
    assert [answer.level if answer else None for answer in judged] == [None, "bad", None]

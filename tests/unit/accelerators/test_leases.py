"""Leases between real processes: nodes acquire them as in a container, and labctl reads the holders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.builders import devices, host, lab, node
from support.harness import wait_until

from labctl import naming
from labctl.accelerators import leases
from labctl.backends.docker.compose import render
from labctl.errors import HostError
from labctl.model import Device, DeviceMapping, Lab

DOCKER = Path(__file__).resolve().parents[3] / "docker"
# A node, with another program than sshd: it says that it runs, and says so when it is asked to end.
NODE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import labnode
labnode.LEASES, labnode.HANDOVER = Path(sys.argv[2]), float(sys.argv[3])
labnode.hold_leases()
labnode.run_with_leases(["sh", "-c", "trap 'echo ending; exit 7' TERM; echo held; while read -r _; do :; done"])
"""
CARDS = (Device(id="0", path="/dev/nvidia0", pci="0000:3b:00.0"), Device(id="1", path="/dev/nvidia1"))


def wanting(folder: Path, *cards: Device, **changes: object) -> Lab:
    """Build a lab with one node and these devices; its host has both CARDS and keeps its locks in ``folder``."""
    here = host(devices=CARDS, locks=str(folder), uid=os.getuid())
    with_devices = node(devices=DeviceMapping(devices=cards))
    return lab((with_devices,), hosts=(here,), directory=folder / "mine", **changes)


@pytest.fixture
def mine(tmp_path: Path) -> Lab:
    """Build a lab that wants the first device, and create its lease files by granting once."""
    of = wanting(tmp_path, CARDS[0])
    (tmp_path / "mine").mkdir()
    with leases.granting(of, wait=0, notice=print):
        pass
    return of


def start(of: Lab, said: dict[str, str] | None = None, *, patience: float = 0) -> subprocess.Popen[str]:
    """Start a process that acquires the leases of the lab's first node; ``said`` replaces fields of LAB_LEASE."""
    where = of.directory.parent / f"container-{len(list(of.directory.parent.iterdir()))}"
    where.mkdir()
    for mount in render.lease_mounts(of.nodes[0], of.hosts[0]):
        (where / Path(mount.target).name).symlink_to(mount.source)
    holder = {
        **json.loads(dict(render.lease_holder(of, of.nodes[0], of.hosts[0])).get("LAB_LEASE", "{}")),
        **(said or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(DOCKER), str(where), str(patience)],
        env={"PATH": os.environ["PATH"], "LAB_LEASE": json.dumps(holder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a node's process group, as the kernel does when a container ends, and wait for it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


@contextmanager
def running(of: Lab, **said: str) -> Iterator[subprocess.Popen[str]]:
    """Run a node that holds the locks of the lab's devices; yield its process and kill it at the end of the block."""
    process = start(of, said)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n", process.communicate()[1]
        yield process
    finally:
        if process.returncode is None:
            kill(process)


def refusal(of: Lab) -> HostError:
    """Return the HostError that require_free raises for the lab; fail if it raises none."""
    with pytest.raises(HostError) as caught:
        leases.require_free(of)
    return caught.value


def handles(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Return True if the process handles the signal. Source: SigCgt of /proc/PID/status, proc(5)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


# --- who has a device ----------------------------------------------------------------------------------------


def test_a_device_that_nobody_has_is_free(tmp_path: Path, mine: Lab) -> None:
    """Without a holder, or without a lock directory: holder() is empty, and require_free raises nothing."""
    assert leases.holder(mine.hosts[0].locks, CARDS[0]) == ""
    assert leases.holder(str(tmp_path / "none"), CARDS[0]) == ""
    leases.require_free(mine)


def test_the_holder_is_named_and_what_to_do(tmp_path: Path, mine: Lab) -> None:
    """Let another lab hold device 0: HostError with exit code 3 names it; the hint is its down or the free device."""
    with running(mine, lab="other", directory="/srv/lab a"):
        error = refusal(mine)
        holder = leases.holder(mine.hosts[0].locks, CARDS[0])
    assert error.exit_code == 3
    assert error.message == f"device 0 (0000:3b:00.0) is held by {holder}"
    assert holder.startswith("lab `other` of ")
    assert "(worker-0, /srv/lab a, since 20" in holder
    assert error.hint == "labctl down -C '/srv/lab a'; or set LAB_DEVICES=1 in .env, which is free"


def test_another_persons_lab_is_theirs_to_end(mine: Lab) -> None:
    """Let another user's lab hold the device: the message names user 4000000, the hint offers no down command."""
    with running(mine, lab="other", uid="4000000"):
        error = refusal(mine)
    assert "of user 4000000 (" in error.message
    assert "labctl down" not in error.hint
    assert "LAB_DEVICES=1" in error.hint


def test_what_is_free_is_offered_only_where_it_is_enough(tmp_path: Path, mine: Lab) -> None:
    """Hold one of two devices of which the lab wants both: the hint does not offer the other."""
    with running(mine, lab="other"):
        error = refusal(wanting(tmp_path, *CARDS))
    assert "LAB_DEVICES" not in error.hint


def test_the_lease_ends_with_the_container(mine: Lab) -> None:
    """Kill the holder's process: the device it held is free again."""
    with running(mine, lab="other") as container:
        refusal(mine)
        kill(container)
        leases.require_free(mine)


def test_the_same_lab_is_not_in_its_own_way(mine: Lab) -> None:
    """Hold a device as the lab itself: require_free raises nothing, though holder() names a holder."""
    with running(mine):
        leases.require_free(mine)
        assert leases.holder(mine.hosts[0].locks, CARDS[0])


def test_a_lab_whose_directory_was_renamed_is_the_same(tmp_path: Path, mine: Lab) -> None:
    """Hold a device under the lab's former directory, which is gone: require_free raises nothing."""
    with running(mine, directory=str(tmp_path / "before")):
        leases.require_free(mine)


@pytest.mark.parametrize("changed", ["lab", "directory", "uid"])
def test_a_lab_that_shares_only_the_name_or_the_directory_is_another(tmp_path: Path, mine: Lab, changed: str) -> None:
    """Change lab name, directory or user id of the holder: require_free raises HostError each time."""
    gone = str(tmp_path / "gone")
    changes = {
        "lab": {"lab": "other"},
        "directory": {"directory": str(tmp_path)},
        "uid": {"uid": "1", "directory": gone},
    }
    with running(mine, **changes[changed]):
        refusal(mine)


def test_other_devices_are_left_alone(tmp_path: Path, mine: Lab) -> None:
    """Let another lab hold device 0: labs that want device 1 or none are let through."""
    with running(mine, lab="other"):
        leases.require_free(wanting(tmp_path, CARDS[1]))
        leases.require_free(wanting(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\x00",
        b"[1]",
        b'{"lab": "x"}',
        b'{"lab": "x\\n\\u001b[2J\\u202e", "node": "n", "directory": "/d", "uid": "1e99", "since": "now"}',
        b'{"lab": "' + b"x" * 10_000 + b'"}',
    ],
)
def test_a_strangers_words_are_printed_as_one_short_line(mine: Lab, text: bytes) -> None:
    """Fill a held lock file with malformed bytes: holder() is one printable line below 1000 characters."""
    with running(mine, lab="other"):
        naming.lease_path(mine.hosts[0].locks, CARDS[0]).write_bytes(text)
        holder = leases.holder(mine.hosts[0].locks, CARDS[0])
        refusal(mine)
    assert holder.startswith(("lab `x", "another lab"))
    assert holder.isprintable()
    assert len(holder) < 1000


def test_a_pipe_in_the_place_of_a_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Put a FIFO in place of a lock file: holder() returns "" without blocking."""
    of = wanting(tmp_path, CARDS[0])
    os.mkfifo(naming.lease_path(of.hosts[0].locks, CARDS[0]))
    assert leases.holder(of.hosts[0].locks, CARDS[0]) == ""


# --- giving out ----------------------------------------------------------------------------------------------


def test_everyone_may_use_the_locks_whatever_the_umask(tmp_path: Path) -> None:
    """Grant devices under umask 077: every lock file has mode 0666."""
    before = os.umask(0o077)
    try:
        with leases.granting(wanting(tmp_path, *CARDS), wait=0, notice=print):
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    names = ("labctl-up.lock", "labctl-0000:3b:00.0.lock", "labctl-nvidia1.lock")
    assert modes == dict.fromkeys(names, 0o666)


def test_one_lab_after_the_other_is_given_devices(tmp_path: Path) -> None:
    """Grant devices to a second lab while the first is being granted: HostError names `labctl up of lab first`."""
    first, second = wanting(tmp_path, CARDS[0], name="first"), wanting(tmp_path, CARDS[1], name="second")
    with leases.granting(first, wait=0, notice=print), pytest.raises(HostError) as caught, ExitStack() as stack:
        stack.enter_context(leases.granting(second, wait=0, notice=print))
    assert "`labctl up of lab first` by " in caught.value.message


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    """Grant to a second lab that may wait: it is told once that it waits for lab first, and then gets its devices."""
    first, second = wanting(tmp_path, CARDS[0], name="first"), wanting(tmp_path, CARDS[1], name="second")
    messages: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        """Hold the first lab's grant until ``leave`` is set, for 60 s at most."""
        with leases.granting(first, wait=0, notice=print):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)

    def notice(text: str) -> None:
        """Record the notice and let the first lab finish."""
        messages.append(text)
        leave.set()

    with leases.granting(second, wait=60, notice=notice):
        pass
    thread.join(60)
    assert len(messages) == 1
    assert "lab first" in messages[0]


def test_a_lab_without_devices_neither_waits_nor_leaves_files(tmp_path: Path) -> None:
    """Grant nothing to labs without devices: they pass a held grant, and no file is made."""
    with (
        leases.granting(wanting(tmp_path, CARDS[0]), wait=0, notice=print),
        leases.granting(wanting(tmp_path), wait=0, notice=print),
    ):
        pass
    before = set(tmp_path.iterdir())
    with leases.granting(lab(hosts=(host(locks=str(tmp_path / "none")),)), wait=0, notice=print):
        assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["labctl-up.lock", "labctl-0000:3b:00.0.lock"])
def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path: Path, name: str) -> None:
    """Put a symbolic link in place of a lock file: HostError names it, and the link's target is not created."""
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError) as caught, leases.granting(wanting(tmp_path, CARDS[0]), wait=0, notice=print):
        pytest.fail("it followed the link")
    assert name in caught.value.message
    assert not (tmp_path / "elsewhere").exists()


def test_a_lab_whose_locks_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Give a file as the lock directory: HostError, and the block is not entered."""
    (tmp_path / "file").touch()
    of = wanting(tmp_path, CARDS[0])
    nowhere = lab(of.nodes, hosts=(host(locks=str(tmp_path / "file")),))
    with pytest.raises(HostError), leases.granting(nowhere, wait=0, notice=print):
        pytest.fail("devices were given out without a lock")


def test_devices_without_a_pci_address_go_by_their_files() -> None:
    """Name lock files of devices without a PCI address after their paths under /dev."""
    names = [
        naming.lease_path("/run/lock", device).name for device in devices("/dev/dri/renderD128", "/dev/accel/accel0")
    ]
    assert names == ["labctl-dri-renderD128.lock", "labctl-accel-accel0.lock"]


# --- the node ------------------------------------------------------------------------------------------------


def test_a_node_whose_device_is_taken_leaves_with_one_line(mine: Lab) -> None:
    """Start a node whose device another lab holds: exit code 1 and one printable line that names the holder."""
    with running(mine, lab="other\n\x1b[2J"):
        late = start(mine)
        out, err = late.communicate(timeout=60)
    assert (late.returncode, out) == (1, "")
    assert err.startswith("device 0000:3b:00.0 is held by {")
    assert "other" in err
    assert err.rstrip("\n").isprintable()


def test_a_node_waits_for_one_that_is_on_its_way_out(mine: Lab) -> None:
    """Start a node with 10 s of patience: it gets the lock when the node that holds the device is killed."""
    with running(mine) as old:
        new = start(mine, patience=10)
        try:
            assert new.poll() is None
            kill(old)
            assert new.stdout is not None
            assert new.stdout.readline() == "held\n"
        finally:
            kill(new)


def test_a_node_takes_the_locks_of_its_own_devices_only(tmp_path: Path) -> None:
    """Run a node with the second of two devices: only that one has a holder."""
    of = wanting(tmp_path, *CARDS)
    of.directory.mkdir()
    with leases.granting(of, wait=0, notice=print):
        pass
    with running(wanting(tmp_path, CARDS[1])):
        assert [bool(leases.holder(of.hosts[0].locks, card)) for card in CARDS] == [False, True]


def test_a_node_ends_as_its_program_does(mine: Lab) -> None:
    """Send SIGTERM to a node: it is passed to its program, whose exit code 7 is the node's, and the lease ends."""
    with running(mine) as process:
        wait_until(lambda: handles(process, signal.SIGTERM), 60, "the node passes on what it is told")
        process.terminate()
        assert process.wait(timeout=60) == 7
        assert process.communicate()[0] == "ending\n"
        assert leases.holder(mine.hosts[0].locks, CARDS[0]) == ""

"""Doctor's checks of several fictitious hosts: ports, disk space, differences, network paths."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import builders

from labctl.backends.docker.checks import devices, host, hosts, network, run
from labctl.backends.docker.checks.examination import CheckContext
from labctl.backends.docker.checks.run import Check
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.finding import Finding, error, ok
from labctl.backends.state import HostPortUser, ObservedState
from labctl.config import settings
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import Device, DeviceMapping
from labctl.naming import lease_path
from labctl.system import load
from labctl.system.process import CompletedProcess


@dataclass
class Daemon:
    """Stand-in for the engine of a host."""

    seen: ObservedState
    listening: tuple[HostPortUser, ...] = ()

    def observe(self, lab: str, image: str | None = None) -> ObservedState:  # noqa: ARG002
        """Return the planted state."""
        return self.seen

    def information(self) -> dict[str, Any]:
        return {"ServerVersion": "26.1.5"}

    def port_users(self) -> tuple[HostPortUser, ...]:
        """Return the planted users of ports."""
        return self.listening


class Shell:
    """A connection to a host that is this machine."""

    def __init__(self, name: str) -> None:
        self.target = InventoryHost(name=name, user="ann")

    def run(self, script: str, *arguments: str, timeout: float, check: bool = True) -> CompletedProcess:
        """Run the script by `sh` on this machine; raise CalledProcessError if it fails and check is true."""
        argv = ("sh", "-c", script, "sh", *arguments)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=check)
        return CompletedProcess(argv, done.returncode, done.stdout, done.stderr)


@pytest.fixture(autouse=True)
def without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no load of this machine, which other tests raise."""
    monkeypatch.setattr(load, "SCRIPT", "true")


@pytest.fixture
def second(tmp_path: Path) -> Callable[..., CheckContext]:
    """Return a function that makes the check context of one of two hosts, from facts and busy ports."""

    def make(*listening: HostPortUser, up: bool = False, first: bool = False, **told: Any) -> CheckContext:
        """Return the check context of host h2, or h1 if `first`; `up` adds worker-0's container on it."""
        names = ("h1", "h2")
        here = tuple(
            replace(
                builders.host(), name=name, number=number, address=f"10.0.0.{number}", interface="eth0", directory="/x"
            )
            for number, name in enumerate(names)
        )
        nodes = tuple(replace(builders.node(number), host=name) for number, name in enumerate(names))
        of = replace(builders.lab(nodes), hosts=here, network="host", directory=tmp_path, owner="ann@here")
        (tmp_path / ".env").write_text("LAB_HOSTS=hosts.txt\n")
        loaded = settings.load(tmp_path, {"HOME": str(tmp_path)}, {})
        name = names[0] if first else names[1]
        current = ObservedState(host=name, containers=(builders.container("worker-0", host=name),) if up else ())
        engine = cast(DockerEngine, Daemon(current, listening))
        return CheckContext(
            lab=of,
            settings=loaded,
            environ={},
            engine=engine,
            connection=cast(Connection, Shell(name)),
            facts=builders.facts(**told),
            root=tmp_path / "root",
        )

    return make


def listener(lab: str, **changes: str) -> HostPortUser:
    """Return worker-1's container of this lab as the user of the lab's ssh port."""
    return HostPortUser(port=builders.lab().ssh_port, lab=lab, container=builders.container("worker-1", **changes))


def levels(findings: Any) -> list[tuple[str, str]]:
    """Return the code and level of each finding."""
    return [(finding.code, finding.level) for finding in findings]


def test_a_port_that_nobody_has_is_free_and_this_labs_own_is_its_own(second: Callable[..., CheckContext]) -> None:
    """LAB-PORT-002 is ok if nobody listens, and if the listener is this lab's own container."""
    port, name = builders.lab().ssh_port, builders.lab().name
    assert levels(hosts.ssh_port(second())) == [("LAB-PORT-002", "ok")]
    listening = listener(name, owner="ann@here", directory="")
    assert levels(hosts.ssh_port(second(listening, ports={port: "root"}))) == [("LAB-PORT-002", "ok")]


def test_a_port_is_told_by_its_owner_and_another_free_one_is_offered(second: Callable[..., CheckContext]) -> None:
    """A port taken by a user or another lab's node is an error that names it; the fix is the next port."""
    port = builders.lab().ssh_port
    (finding,) = hosts.ssh_port(second(ports={port: "bob"}))
    assert (finding.level, "user bob" in finding.summary, f"LAB_SSH_PORT={port + 1}" in finding.fix) == (
        "error",
        True,
        True,
    )
    (finding,) = hosts.ssh_port(second(listener("other", owner="cy@desk", directory="/lab"), ports={port: "root"}))
    assert finding.level == "error"
    assert "worker-1 of lab `other` (cy@desk (/lab)" in finding.summary
    # The own node is there, and somebody else had the port before it.
    listening = listener(builders.lab().name, owner="ann@here", directory="")
    assert levels(hosts.ssh_port(second(listening, ports={port: "bob"}))) == [("LAB-PORT-002", "error")]


@pytest.mark.parametrize(
    ("first", "up", "user", "expected"),
    [
        (True, False, "", ["ok"]),
        (True, False, "bob", ["error"]),
        # What ranks of this person left behind, the next run ends.
        (True, True, "ann", []),
        (True, True, "bob", ["error"]),
        (False, False, "bob", []),
    ],
)
def test_the_master_port_is_that_of_the_first_host(
    second: Callable[..., CheckContext], first: bool, up: bool, user: str, expected: list[str]
) -> None:
    """The master port is an error if another user has it on the first host; on the second it is not checked."""
    ports = {builders.lab().master_port: user} if user else {}
    findings = list(hosts.master_port(second(first=first, up=up, ports=ports)))
    assert [finding.level for finding in findings] == expected


@pytest.mark.parametrize("up", [False, True])
def test_a_master_port_that_a_run_of_another_lab_may_have_is_a_warning(
    second: Callable[..., CheckContext], up: bool
) -> None:
    """With a node of another lab on the host, the port in use is a warning that names it, for a lab that is up, too."""
    other = listener("other", owner="cy@desk", directory="/lab")
    ports = {builders.lab().master_port: "cy"}
    (finding,) = hosts.master_port(second(other, first=True, up=up, ports=ports))
    assert finding.level == "warn"
    assert "user cy, perhaps a run of worker-1 of lab `other`" in finding.summary
    assert "LAB_MASTER_PORT=29501" in finding.fix


class Elsewhere(Shell):
    """A host with other files than this machine's."""

    def run(self, script: str, *arguments: str, timeout: float, check: bool = True) -> CompletedProcess:
        """Run the script with each absolute path below /elsewhere."""
        elsewhere = (f"/elsewhere{word}" if word.startswith("/") else word for word in arguments)
        return super().run(script, *elsewhere, timeout=timeout, check=check)


@pytest.mark.parametrize(("connection", "level"), [(Shell("h2"), "ok"), (Elsewhere("h2"), "error")])
def test_a_directory_that_hosts_are_said_to_share_is_looked_for_there(
    second: Callable[..., CheckContext], tmp_path: Path, connection: Shell, level: str
) -> None:
    """LAB_SHARED_DIR is ok if the host sees the file written there, else an error; no file is left."""
    plain = second()
    shared = plain.settings.with_value("LAB_SHARED_DIR", str(tmp_path), origin=".env:2")
    assert list(hosts.shared_directory(plain)) == []
    (tmp_path / ".env").write_text(f"LAB_HOSTS=hosts.txt\nLAB_SHARED_DIR={tmp_path}\n")
    before = sorted(tmp_path.iterdir())
    (finding,) = hosts.shared_directory(replace(plain, connection=cast(Connection, connection), settings=shared))
    assert (finding.level, str(tmp_path) in finding.summary, sorted(tmp_path.iterdir())) == (level, True, before)


def test_room_for_the_files_is_that_of_the_home_directory(second: Callable[..., CheckContext]) -> None:
    """LAB-DISK-004 is ok, or with 1 MiB free in the home directory an error with an ssh command as fix."""
    assert levels(hosts.home_space(second())) == [("LAB-DISK-004", "ok")]
    (finding,) = hosts.home_space(second(home_free=1 << 20))
    assert (finding.level, finding.fix.startswith("ssh -l ann h2 ")) == ("error", True)


def test_the_odd_host_out_is_the_one_that_is_named() -> None:
    """Of versions 1, 2, 2 and None, only the host with 1 is warned of; equal versions are one ok."""
    findings = list(
        hosts.differing("LAB-HOST-005", "engine", {"a": "1", "b": "2", "c": "2", "d": None}, "so", str.upper)
    )
    assert [(finding.node, finding.level, finding.fix) for finding in findings] == [("a", "warn", "A")]
    assert levels(hosts.differing("LAB-HOST-005", "engine", {"a": "1", "b": "1"}, "so", str)) == [
        ("LAB-HOST-005", "ok")
    ]


@pytest.mark.parametrize(
    ("through", "kin", "astray"),
    [
        ({"eth0": 4300, "eth1": 10}, [], []),
        ({"eth0": 10, "eth1": 4300}, [], ["eth1"]),
        ({"bond0": 4300, "eth0": 4300}, [], []),
        ({"eth0": 3000, "eth1": 10}, [], ["none"]),
        ({"eth0": 10, "br0": 4300, "eth1": 4200}, ["br0"], ["eth1"]),
    ],
)
def test_bytes_that_took_another_interface_are_seen_in_its_counters(
    through: dict[str, int], kin: list[str], astray: list[str]
) -> None:
    """astray() lists the interfaces that carried the 4,096 bytes instead of the chosen one, `none` if none did."""
    chosen = next(iter(through))
    assert network.astray(through, chosen, kin, 4096) == astray


def test_a_host_that_cannot_take_part_is_named_and_no_other(
    second: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """failing_hosts() maps each host to its own failure: h1's HostError, h2's error finding with its fix as hint."""

    def look(examination: CheckContext) -> Any:
        """Yield an error for h2, and ok."""
        if examination.name == "h2":
            yield error("LAB-PORT-002", "port is taken", impact="so", fix="do that")
        yield ok("LAB-PORT-002", "well")

    def broken(examination: CheckContext) -> Any:
        """Raise HostError for h1; yield ok for others."""
        if examination.name == "h1":
            raise HostError("h1: it hung up", hint="ssh h1")
        yield ok("LAB-DISK-004", "well")

    monkeypatch.setattr(host, "look", look, raising=False)
    monkeypatch.setattr(host, "broken", broken, raising=False)
    monkeypatch.setattr(run, "CHECKS", (Check("host.look", stops="up"), Check("host.broken", stops="up")))
    whole = replace(second(), connection=LocalConnection(), hosts=(second(first=True), second()))
    failed = run.failing_hosts(whole, "up")
    assert {name: (why.node, why.hint) for name, why in failed.items()} == {
        "h1": ("h1", "ssh h1"),
        "h2": ("h2", "do that"),
    }
    assert failed["h1"].message == "h1: it hung up"


def test_a_host_that_cannot_create_its_containers_is_left_out(
    second: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An image that does not start on h2 leaves h1 in the cluster, and h2 among its failed hosts."""

    def look(examination: CheckContext) -> Any:
        """Yield an error for h2."""
        if examination.name == "h2":
            yield error("LAB-IMAGE-005", "so", "bad", "do that")

    monkeypatch.setattr(host, "look", look, raising=False)
    monkeypatch.setattr(run, "CHECKS", (Check("host.look", stops="compose up"),))
    examined = (second(first=True), second())
    whole = replace(examined[0], connection=LocalConnection(), hosts=examined)
    monkeypatch.setattr(run, "check_context", lambda *_: whole)
    daemons = {each.name: each.daemon for each in examined}
    engine = MultiHostEngine(daemons, {})
    where = Cluster(settings=whole.settings, directory=tmp_path, engine=engine, daemons=daemons)
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    usable = run.able_to_create(context, whole.lab, where)
    assert (tuple(usable.daemons), usable.failed["h2"].hint) == (("h1",), "do that")


def test_findings_of_a_host_bear_its_name_and_its_commands_are_run_there(
    second: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host's finding has its name as node and `ssh -t HOST` in front of its fix."""

    def look(examination: CheckContext) -> Any:
        """Yield a warning whose fix is a sysctl command on the host."""
        yield Finding(code="X", level="warn", node="local", summary="so", fix=examination.command("sudo sysctl -w a=1"))

    monkeypatch.setattr(host, "look", look, raising=False)
    monkeypatch.setattr(run, "CHECKS", (Check("host.look"),))
    whole = replace(second(), connection=LocalConnection(), hosts=(second(first=True), second()))
    findings = run.examine(whole)
    assert [(finding.node, finding.fix) for finding in findings] == [
        ("h1", "ssh -l ann -t h1 'sudo sysctl -w a=1'"),
        ("h2", "ssh -l ann -t h2 'sudo sysctl -w a=1'"),
    ]


def test_each_busy_host_is_warned_of_with_the_command_to_look_at_it(second: Callable[..., CheckContext]) -> None:
    """Of two hosts, the one with 40 of 64 cores in use is a warning with `top` over ssh as fix."""
    idle, busy = (load.Load(cores=64, used=used) for used in (1.5, 40.0))
    whole = replace(second(), hosts=(replace(second(first=True), load=idle), replace(second(), load=busy)))
    free, taken = host.load(whole)
    assert (free.node, free.level, taken.node, taken.level) == ("h1", "ok", "h2", "warn")
    assert taken.summary == "40 of 64 cores in use by other programs"
    assert taken.fix == "ssh -l ann h2 'top -b -n 1 | head -n 20'  # end what is not needed"


@pytest.fixture
def leasing(second: Callable[..., CheckContext], tmp_path: Path) -> CheckContext:
    """Return the check context of host h2, whose node wants both devices; its lease files are in tmp_path."""
    examination = second()
    cards = (Device(id="0", path="/dev/nvidia0"), Device(id="1", path="/dev/nvidia1"))
    first, here = examination.lab.hosts
    here = replace(here, devices=cards, locks=str(tmp_path), uid=1000)
    worker = replace(examination.lab.nodes[1], devices=DeviceMapping(devices=cards))
    of = replace(examination.lab, hosts=(first, here), nodes=(examination.lab.nodes[0], worker))
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/passwd").write_text("root:x:0:0::/:/bin/sh\nbob:x:4000:4000::/:/bin/sh\n")
    return replace(examination, lab=of)


def test_a_device_of_a_host_that_another_lab_has_is_told_with_its_holder(leasing: CheckContext, tmp_path: Path) -> None:
    """LAB-DEVICE-005 names the other lab that locks the lease file; its own lab or an unlocked file gives nothing."""
    device = leasing.host.devices[1]
    holder = {"lab": "other", "node": "worker-3", "directory": "/srv/\x1b[2J", "uid": 4000, "since": "noon"}
    with lease_path(str(tmp_path), device).open("w") as stream:
        json.dump(holder, stream)
        stream.flush()
        assert list(devices.leases(leasing)) == []
        fcntl.flock(stream, fcntl.LOCK_EX)
        (finding,) = devices.leases(leasing)
        mine = replace(leasing, lab=replace(leasing.lab, name="other", directory=Path("/srv/\x1b[2J")))
        assert list(devices.leases(mine)) == []
    assert (finding.code, finding.level, finding.node) == ("LAB-DEVICE-005", "error", "worker-1")
    assert finding.summary == "1 is held by lab `other` of bob (worker-3, /srv/?[2J, since noon)"
    assert finding.fix == "ssh -l ann h2 'docker ps --filter label=labctl.lab=other'  # and ask its holder"
    assert list(devices.leases(leasing)) == []


def test_ones_own_other_lab_is_ended_where_it_is(leasing: CheckContext, tmp_path: Path) -> None:
    """A device leased by another lab of the same user: the fix is `labctl down -C` with its directory."""
    with lease_path(str(tmp_path), leasing.host.devices[0]).open("w") as stream:
        json.dump({"lab": "other", "node": "worker-0", "directory": str(tmp_path), "uid": 1000, "since": ""}, stream)
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        (finding,) = devices.leases(leasing)
    assert finding.fix == f"labctl down -C {tmp_path}"


def test_a_pipe_in_the_place_of_a_hosts_lock_keeps_nobody_waiting(leasing: CheckContext, tmp_path: Path) -> None:
    """A FIFO in the place of a lease file gives no finding and does not block."""
    os.mkfifo(lease_path(str(tmp_path), leasing.host.devices[0]))
    assert list(devices.leases(leasing)) == []


def test_nothing_is_claimed_of_hosts_where_none_answers(
    second: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no host that answers, only machine checks run, locally; with every host failed, none."""

    def look(examination: CheckContext) -> Any:
        yield ok("X", f"{examination.name} looked at")

    monkeypatch.setattr(host, "look", look, raising=False)
    checks = (
        *(Check("host.look", "host", engine=engine) for engine in (True, False)),
        *(Check("host.look", "machine", engine=engine) for engine in (True, False)),
    )
    monkeypatch.setattr(run, "CHECKS", checks)
    whole = replace(second(), connection=LocalConnection(), hosts=())
    away = error("LAB-HOST-004", "h1: does not answer", impact="so", fix="ssh h1", node="h1")
    findings = (away, *run.examine(whole))
    assert [(finding.node, finding.summary) for finding in findings] == [
        ("h1", "h1: does not answer"),
        ("local", "local looked at"),
    ]
    lacking = dict.fromkeys(("local", "h1", "h2"), HostError("h2 has no device", node="h2"))
    assert (away, *run.examine(whole, lacking)) == (away,)

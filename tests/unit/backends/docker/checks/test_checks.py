"""Doctor's checks on fictitious labs and hosts, the commands that it suggests, and its list of codes."""

from __future__ import annotations

import inspect
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import builders
from support.fake_backend import FakeBackend

from labctl.accelerators import nvidia
from labctl.backends.docker.checks import conflicts, devices, engine, files, host, network, nodes, run
from labctl.backends.docker.checks import examination as examining
from labctl.backends.docker.checks.examination import CheckContext
from labctl.backends.docker.checks.run import CHECKS, NODE_CHECKS, Check
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import applied
from labctl.backends.docker.hosts.ssh import LocalConnection
from labctl.backends.docker.images import catalog, foreign
from labctl.backends.docker.lab import cluster
from labctl.backends.finding import Finding, ok
from labctl.backends.state import ObservedState, not_running
from labctl.cli.output import to_json
from labctl.config import settings
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.doctor import causes
from labctl.errors import ConfigError, HostError
from labctl.model import Device, DeviceMapping, Lab, Mount, Pairs
from labctl.system import filelock, load
from labctl.system.parallel import run_with_deadlines
from labctl.system.process import CompletedProcess, ProcessTimeout

ROOT = Path(__file__).parents[5]


class Engine:
    """An engine with planted answers."""

    def __init__(
        self, *, observed: ObservedState | None = None, out: str = "", err: str = "", code: int = 0, **information: Any
    ) -> None:
        """Plant what it observes, an exit code and output for each program, and changes of its information."""
        self.seen = observed or ObservedState()
        self.out, self.err, self.code = out, err, code
        self.labels: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.unused: tuple[tuple[str, str], ...] = ()
        self.no_network = ""
        self.described: dict[str, Any] | None = None
        self.foreign: tuple[str, ...] = ()
        self.foreign_in_use: bool | None = None
        self.published: tuple[tuple[str, str, str], ...] = ()
        now = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())
        defaults = {
            "ServerVersion": "26.1.5",
            "SystemTime": now,
            "DockerRootDir": "/nonexistent",
            "Runtimes": {"runc": {}},
            "Architecture": "x86_64",
        }
        self.told = {**defaults, "CgroupDriver": "cgroupfs", **information}

    def information(self) -> dict[str, Any]:
        """Return the planted information."""
        return self.told

    def observe(self, lab: str, image: str | None = None) -> ObservedState:  # noqa: ARG002
        """Return the planted state, for each lab."""
        return self.seen

    def exec(self, container: str, argv: tuple[str, ...], *, user: str, limit: float) -> CompletedProcess:  # noqa: ARG002
        """Return the planted exit code and output, whatever the program."""
        return CompletedProcess(argv, self.code, self.out, self.err)

    def image(self, image: str) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the planted image, None if it does not exist."""
        return self.described

    def foreign_containers(self, prefix: str, lab: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the planted names of containers of others."""
        return self.foreign

    def foreign_network(self, name: str, lab: str) -> bool | None:  # noqa: ARG002
        """Return if the planted network of others is in use, None if there is none."""
        return self.foreign_in_use

    def publishers(self, port: int) -> tuple[tuple[str, str, str], ...]:  # noqa: ARG002
        """Return the planted containers that publish a port."""
        return self.published

    def image_labels(self, image: str) -> dict[str, str]:  # noqa: ARG002
        return self.labels

    def image_variables(self, image: str) -> dict[str, str]:  # noqa: ARG002
        return self.variables

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:  # noqa: ARG002
        """Refuse all limits."""
        return False

    def unused_networks(self) -> tuple[tuple[str, str], ...]:
        """Return the planted networks that no container uses."""
        return self.unused

    def try_network(self, lab: str) -> str:  # noqa: ARG002
        """Return the planted reason why no network can be made, empty if one can."""
        return self.no_network


@pytest.fixture(autouse=True)
def without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no load of this machine, which other tests raise."""
    monkeypatch.setattr(load, "SCRIPT", "true")


@pytest.fixture
def examined(tmp_path: Path) -> Callable[..., CheckContext]:
    """Return a function that makes the check context of a lab from lines of .env, flags and an engine."""

    def make(of: Lab | None = None, *, env: str = "", told: Engine | None = None, **flags: str) -> CheckContext:
        """Write .env; return the check context of this lab in tmp_path, with the flags and this engine."""
        (tmp_path / ".env").write_text(env)
        loaded = settings.load(tmp_path, {"HOME": str(tmp_path)}, flags)
        lab = replace(of or builders.lab(), directory=tmp_path)
        speaks = cast(DockerEngine, told or Engine())
        return CheckContext(lab=lab, settings=loaded, environ={}, engine=speaks, root=tmp_path / "root")

    return make


def wrong(findings: Iterator[Finding]) -> list[str]:
    """List the codes of the findings that are not ok."""
    return [finding.code for finding in findings if finding.level != "ok"]


# --- side by side --------------------------------------------------------------------------------------------


def test_what_does_not_answer_holds_up_neither_the_others_nor_their_order() -> None:
    """Of 42 functions, 40 hang past 0.2 s: None for each, the others' answers in order."""
    never = threading.Event()

    def hang() -> str:
        never.wait()
        return "too late"

    def answer(text: str) -> Callable[[], str]:
        return lambda: text

    works = [(answer("a"), 60.0), *[(hang, 0.2)] * 40, (answer("b"), 60.0)]
    answers = run_with_deadlines(works)
    assert [answers[0], answers[-1]] == ["a", "b"]
    assert answers[1:-1] == [None] * 40
    never.set()


def test_a_mistake_in_a_check_is_not_hidden() -> None:
    """An exception of a task is raised by run_with_deadlines()."""

    def mistaken() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_with_deadlines([(mistaken, 60.0)])


def test_a_check_that_hangs_or_cannot_go_on_is_a_finding_of_its_own(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that hangs gives LAB-CHECK-002; HostError, PermissionError and bad JSON give LAB-CHECK-001."""
    never = threading.Event()

    def hangs(examination: CheckContext) -> Iterator[Finding]:
        """Wait until the test ends."""
        never.wait()
        yield ok("LAB-HOST-001", "too late")

    def refused(examination: CheckContext) -> Iterator[Finding]:
        """Raise HostError."""
        if examination:
            raise HostError("it does not want to", hint="ask it again")
        yield ok("LAB-HOST-001", "it does")

    def answers(examination: CheckContext) -> Iterator[Finding]:
        yield ok("LAB-HOST-001", "here")

    def closed(examination: CheckContext) -> Iterator[Finding]:
        """Raise PermissionError for /a/key."""
        if examination:
            raise PermissionError(13, "Permission denied", "/a/key")
        yield ok("LAB-HOST-001", "it may")

    def garbled(examination: CheckContext) -> Iterator[Finding]:
        yield from json.loads("<html>")

    for check in (hangs, refused, closed, garbled, answers):
        monkeypatch.setattr(host, check.__name__, check, raising=False)
    names = ("refused", "closed", "garbled", "answers")
    checks = (Check("host.hangs", seconds=0.1), *(Check(f"host.{name}") for name in names))
    monkeypatch.setattr(run, "CHECKS", checks)
    late, unable, kept_out, nonsense, well = run.examine(examined())
    assert (late.code, late.level) == ("LAB-CHECK-002", "warn")
    assert "hangs" in late.summary
    assert (unable.code, unable.fix) == ("LAB-CHECK-001", "ask it again")
    assert "it does not want to" in unable.summary
    assert (kept_out.code, kept_out.fix) == ("LAB-CHECK-001", "ls -ld /a/key")
    assert (nonsense.code, nonsense.level) == ("LAB-CHECK-001", "warn")
    assert "labctl doctor" not in {late.fix, nonsense.fix}
    assert well.summary == "here"
    never.set()


def test_the_engine_is_asked_once_for_all_checks(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checks that read the engine's information make one request for it."""
    requests: list[str] = []

    class Counting(Engine):
        def information(self) -> dict[str, Any]:
            requests.append("info")
            return super().information()

    def version(ctx: CheckContext) -> Iterator[Finding]:
        yield ok("LAB-ENGINE-001", ctx.info["ServerVersion"])

    monkeypatch.setattr(host, "version", version, raising=False)
    monkeypatch.setattr(run, "CHECKS", (Check("host.version"), Check("host.version")))
    assert len(run.examine(examined(told=Counting()))) == 2
    assert requests == ["info"]


def test_a_node_that_the_lab_has_not_is_a_mistake_of_the_person(examined: Callable[..., CheckContext]) -> None:
    """examine() with only=`worker-9`, which the lab has not, raises ConfigError that names it."""
    with pytest.raises(ConfigError, match="worker-9"):
        run.examine(replace(examined(), only="worker-9"))


# --- commands that mend settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ("LAB_SHM_SIZE=64m\nLAB_NODES=3\n", {}),
        ("LAB_NODES=3\n  export LAB_SHM_SIZE='64m'  # little", {}),
        ("LAB_NODES=3", {}),
        ("# LAB_SHM_SIZE=1g\nLAB_ENV_X='LAB_SHM_SIZE=7'\nLAB_SHM_SIZE=64m\nLAB_NODES=3", {}),
    ],
)
def test_the_command_that_changes_a_setting_changes_it_and_nothing_else(
    examined: Callable[..., CheckContext], tmp_path: Path, env: str, flags: dict[str, str]
) -> None:
    """The command of set_setting(), run by bash, sets LAB_SHM_SIZE to 2g in .env, whether set there or not."""
    examination = examined(env=env, **flags)
    before = {key: value for key, value, _ in examination.settings.rows()}
    subprocess.run(["bash", "-c", examination.set_setting("LAB_SHM_SIZE", "2g")], cwd=tmp_path, check=True)
    after = {key: value for key, value, _ in settings.load(tmp_path, {}, {}).rows()}
    changed = {key for key in after if after[key] != before.get(key) and not key.startswith("HOST_")}
    assert changed == {"LAB_SHM_SIZE"}
    assert after["LAB_SHM_SIZE"] == "2g"


def test_the_command_that_unsets_a_setting_leaves_its_default(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """The command of unset_setting("HTTP_PROXY") removes its lowercase line from .env, and no other."""
    examination = examined(env="LAB_NODES=3\nhttp_proxy=http://p.example:1\nNO_PROXY=a,b\n")
    subprocess.run(["bash", "-c", examination.unset_setting("HTTP_PROXY")], cwd=tmp_path, check=True)
    assert (tmp_path / ".env").read_text() == "LAB_NODES=3\nNO_PROXY=a,b\n"


def test_workers_of_a_lab_without_its_launcher_are_not_looked_at_from_there(
    examined: Callable[..., CheckContext],
) -> None:
    """Without a launcher, or with one that has exited, nodes.ssh() finds nothing."""
    of = builders.lab()
    whole = builders.observed(of)
    workers = tuple(container for container in whole.containers if container.role == "worker")
    assert workers
    ended = builders.observed(of, launcher={"state": "exited"})
    for state in (replace(whole, containers=workers), ended):
        assert list(nodes.ssh(examined(of, told=Engine(observed=state)))) == []


def test_a_warning_is_no_reason_to_make_the_nodes_anew(examined: Callable[..., CheckContext]) -> None:
    """The warning of a slow link to a node is not auto_fixable."""
    slow = {"name": "worker-0", "seconds": 0.1, "rate": 1e5}
    (finding,) = (
        finding for finding in nodes.link(examined(), builders.container("worker-0"), slow) if finding.level == "warn"
    )
    assert not finding.auto_fixable


def test_what_mends_a_hanging_engine_is_not_to_ask_again(examined: Callable[..., CheckContext]) -> None:
    """For an engine that times out, the fix looks at journalctl instead of `labctl doctor`."""
    finding = engine.silent(examined(), HostError("Docker Engine: timed out", hint="labctl doctor"))
    assert "journalctl" in finding.fix


def test_the_makers_tool_is_called_once_for_all_nodes(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with a device each: describe() is called once with both, and the lost one is an error."""
    calls: list[int] = []

    def describe(_: str, given: tuple[Device, ...], run: object) -> tuple[Device, ...]:
        """Record how many devices are asked for; return them, device 1 with health `lost`."""
        calls.append(len(given))
        return tuple(replace(device, health="lost" if device.id == "1" else "") for device in given)

    monkeypatch.setattr(devices, "describe", describe)
    first, second = (Device(id=name, path=f"/dev/{name}") for name in ("0", "1"))
    workers = tuple(
        builders.node(i, devices=DeviceMapping(devices=(device,))) for i, device in enumerate((first, second))
    )
    findings = list(devices.health(examined(builders.lab(workers, accelerator="nvidia"))))
    assert calls == [2]
    assert [(finding.node, finding.level) for finding in findings] == [("worker-0", "ok"), ("worker-1", "error")]


# --- the host ------------------------------------------------------------------------------------------------


def test_a_host_that_others_use_is_warned_of_unless_a_run_is_under_way(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """LAB-HOST-009 warns of a busy host; an idle one is ok, and an unknown load or an active run gives nothing."""
    idle = load.Load(cores=2, used=0.1)
    (quiet,) = host.load(replace(examined(), load=idle))
    assert (quiet.level, quiet.summary) == ("ok", "0.1 of 2 cores in use by other programs")
    busy = replace(examined(), load=load.Load(cores=2, used=1.9, runnable=6))
    (finding,) = host.load(busy)
    assert (finding.code, finding.level, finding.node) == ("LAB-HOST-009", "warn", "local")
    assert finding.summary == "1.9 of 2 cores in use by other programs, 6 runnable tasks"
    assert finding.fix.startswith("top ")
    assert list(host.load(examined())) == []
    with filelock.held(tmp_path / filelock.RUNS / "20260102-150405-hello-3fa2.lock", "a run"):
        assert list(host.load(replace(busy, environ={"x": "y"}))) == []


def test_the_load_is_read_before_the_checks_begin(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """examine() measures the load by the script: 9 of 100 ticks busy of 4 cores are 0.4 cores."""
    monkeypatch.setattr(load, "SCRIPT", "printf 'times 0 0 0 0\\ntimes 9 91 0 0\\ncores 4\\n'")
    monkeypatch.setattr(run, "CHECKS", (Check("host.load", "lab", engine=False, lab=False),))
    (finding,) = run.examine(examined())
    assert finding.summary == "0.4 of 4 cores in use by other programs"


@pytest.mark.parametrize(
    ("proxy", "good"),
    [
        ("http://proxy.example:3128", True),
        ("proxy.example:3128", True),
        ("http://user:p@ss@proxy.example:3128/", True),
        ("socks5h://[fd00::1]:1080", True),
        ("http:/proxy.example:3128", False),
        ("http//proxy.example:3128", False),
        ("http://:3128", False),
        ("http://proxy.example:99999", False),
        ("ftp://proxy.example:21", False),
        ("http://[fd00::1:3128", False),
        ("http://user:p@ss\u2100@proxy.example:3128", False),
    ],
)
def test_proxies_that_name_no_host_are_told_of(examined: Callable[..., CheckContext], proxy: str, good: bool) -> None:
    """A proxy URL without a valid host, port or scheme gives LAB-PROXY-001; its password is never shown."""
    examination = examined(env=f"HTTP_PROXY={proxy}\nNO_PROXY=*\n")
    findings = list(host.proxies(examination))
    assert wrong(iter(findings)) == ([] if good else ["LAB-PROXY-001"])
    assert not any("p@ss" in finding.summary + finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("accelerator", "slots", "size", "level"),
    [
        ("cpu", 1, "64m", "ok"),
        ("cpu", 2, "64m", "warn"),
        ("cpu", 2, "256m", "ok"),
        ("nvidia", 1, "64m", "ok"),
        ("nvidia", 8, "64m", "error"),
        ("nvidia", 8, "4g", "warn"),
        ("nvidia", 8, "8g", "ok"),
    ],
)
def test_shared_memory_is_judged_by_the_ranks_that_share_it(
    examined: Callable[..., CheckContext], accelerator: str, slots: int, size: str, level: str
) -> None:
    """Shared memory is ok, a warning or an error by accelerator, slots and size."""
    of = builders.lab((builders.node(slots=slots),), accelerator=accelerator, shm_size=size)
    (finding,) = host.shared_memory(examined(of))
    assert finding.level == level


def test_a_mount_that_up_would_make_is_no_fault_and_another_stops_it(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """A missing mount in the lab directory is ok; a missing one elsewhere raises HostError with `mkdir -p`."""
    mount = Mount(source=str(tmp_path / "runs"), target="/workspace/runs")
    assert wrong(host.mounts(examined(builders.lab(mounts=(mount,))))) == []
    other = Mount(source="/nonexistent/clone", target="/workspace/DeepSpeedExamples")
    with pytest.raises(HostError, match=r"/nonexistent/clone.*LAB-MOUNT-001") as refused:
        run.failing_hosts(examined(builders.lab(mounts=(mount, other))), "up")
    assert refused.value.hint == "mkdir -p /nonexistent/clone"


def test_a_missing_mount_is_told_the_folder_that_was_meant(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """Mount a misspelt folder: the fix asks for the one beside it first."""
    (tmp_path / "data").mkdir()
    misspelt = Mount(source=f"{tmp_path}/dat", target="/data", read_only=True)
    findings = host.mounts(examined(builders.lab(mounts=(misspelt,))))
    (finding,) = (finding for finding in findings if finding.level == "error")
    assert finding.fix == f"did you mean `{tmp_path}/data`? otherwise: mkdir -p {tmp_path}/dat"


def test_what_may_not_be_looked_at_is_not_said_to_be_missing(
    examined: Callable[..., CheckContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key and a mount that may not be read are LAB-KEY-001 `cannot be read` and LAB-MOUNT-002."""

    def closed(*_: Any, **__: Any) -> None:
        """Raise PermissionError."""
        raise PermissionError(13, "Permission denied", "/a/key")

    examination = examined(told=Engine(observed=builders.observed(builders.lab())))
    mounted = replace(examination, lab=builders.lab(mounts=(Mount(source="/closed/clone", target="/workspace/x"),)))
    monkeypatch.setattr(ssh_keys, "missing", closed)
    (key,) = files.keys(examination)
    refuses = tmp_path / "bin/stat"
    refuses.parent.mkdir()
    refuses.write_text("#!/bin/sh\necho \"stat: cannot statx '$5': Permission denied\" >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{refuses.parent}:{os.environ['PATH']}")
    assert (key.code, "cannot be read" in key.summary) == ("LAB-KEY-001", True)
    assert wrong(host.mounts(mounted)) == ["LAB-MOUNT-002"]


@pytest.mark.parametrize("image", ["labctl/cpu", "labctl/packages:0123456789ab"])
@pytest.mark.parametrize(("image_id", "level"), [("sha256:1111", "warn"), (None, "error")])
def test_what_only_a_build_needs_stops_only_a_lab_without_its_image(
    examined: Callable[..., CheckContext], image_id: str | None, level: str, image: str
) -> None:
    """A missing CA file, LAB-CA-001, is a warning if the image exists and an error if it does not."""
    planted = Engine(observed=ObservedState(image=image_id))
    lab = replace(builders.lab(), image=image)
    examination = examined(lab, env="LAB_CA_CERTIFICATES=/nonexistent/ca.crt\n", told=planted)
    (finding,) = host.certificates(examination)
    assert (finding.code, finding.level) == ("LAB-CA-001", level)


def typed(examination: CheckContext, finding: Finding) -> None:
    """Type the fix of a finding in the lab directory."""
    subprocess.run(["bash", "-c", finding.fix], cwd=examination.lab.directory, check=True)


def test_a_directory_of_labctl_s_that_is_a_file_stops_up_and_is_moved_away(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """`runs` is a file: LAB-MOUNT-001, also of `up`; its fix, typed, mends it."""
    (tmp_path / "runs").touch()
    examination = examined(builders.lab(mounts=(Mount(source=str(tmp_path / "runs"), target="/workspace/runs"),)))
    with pytest.raises(HostError, match=r"runs.* is not a directory"):
        run.failing_hosts(examination, "up")
    (finding,) = host.mounts(examination)
    typed(examination, finding)
    assert wrong(host.mounts(examination)) == []


@pytest.mark.parametrize(
    ("mounts", "fix"),
    [
        ("/ rw,relatime\n/mnt/the cache ro,relatime\n", "findmnt -T"),
        ("/ rw,relatime\n", "chown"),
        ("", "chown"),
    ],
)
def test_a_mount_that_is_read_only_is_looked_into_and_another_gets_its_owner(
    examined: Callable[..., CheckContext],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: str,
    fix: str,
) -> None:
    """A mount that is not writable: its fix shows why if findmnt says `ro` of it, else it changes the owner."""
    mount = Mount(source=str(tmp_path), target="/workspace/.cache")
    closed = "status() { echo '0 0 41ed r'; }\n"
    planted = f"{closed}mounted() {{ printf '{mounts}'; }}\n\"$@\"\n"
    monkeypatch.setattr(examining, "ON_HOST", planted)
    (finding,) = host.mounts(examined(builders.lab(mounts=(mount,))))
    assert (finding.code, fix in finding.fix) == ("LAB-MOUNT-002", True)
    assert ("/mnt/the cache is mounted read-only" in finding.summary) == (fix == "findmnt -T")


def test_a_data_set_that_lacks_only_read_permission_gets_its_owner(
    examined: Callable[..., CheckContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that nodes only read, on a file system mounted read-only: its fix changes the owner."""
    mount = Mount(source=str(tmp_path), target="/workspace/data", read_only=True)
    planted = "status() { echo '0 0 41ed -'; }\nmounted() { echo '/mnt/data ro,relatime'; }\n\"$@\"\n"
    monkeypatch.setattr(examining, "ON_HOST", planted)
    (finding,) = host.mounts(examined(builders.lab(mounts=(mount,))))
    assert ("is not readable" in finding.summary, "chown" in finding.fix) == (True, True)


@pytest.mark.parametrize(
    ("printed", "codes"),
    [
        ("9999999 4096 500 90000", ["LAB-DISK-003"]),
        ("9999999 4096 5000 90000", []),
        ("9999999 4096 0 0", []),
        ("9999999 4096 -1 90000", []),
    ],
)
def test_a_disk_without_inodes_stops_a_run(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch, printed: str, codes: list[str]
) -> None:
    """Fewer than 1000 free inodes are LAB-DISK-003; a file system without a limit, or a known number, is well."""
    monkeypatch.setattr(examining, "ON_HOST", f"echo {printed}\n")
    assert wrong(host.run_space(examined())) == codes


def test_the_disk_of_runs_counts_for_the_record_of_a_run(
    examined: Callable[..., CheckContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk that is mounted at runs/ is LAB-DISK-003, whatever the lab directory has free."""
    monkeypatch.setattr(examining, "ON_HOST", f'[ "$2" = {tmp_path}/runs ] && echo 0 4096 0 0 || echo 9999999 4096 0 0')
    assert wrong(host.run_space(examined())) == ["LAB-DISK-003"]


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("ssh: Could not resolve hostname worker-0: Name or service not known", "labctl down && labctl up"),
        ("ssh: connect to host worker-0 port 22: No route to host", "labctl down && labctl up"),
        (
            "timeout: failed to run command \u2018ssh\u2019: No such file or directory",
            "docker run --rm labctl/cpu ssh -V  # install an ssh client in this image, then: labctl up",
        ),
        ("lab@worker-0: Permission denied (publickey).", "labctl down && labctl up"),
        ("Connection refused", "docker restart -t 1 labctl-demo-worker-0-1"),
    ],
)
def test_a_name_or_key_that_is_wrong_is_not_mended_by_a_restart_of_the_worker(
    examined: Callable[..., CheckContext], said: str, fix: str
) -> None:
    """LAB-SSH-001 restarts the worker, but recreates the nodes if the launcher has a wrong address or key."""
    (finding,) = nodes.link(examined(), builders.container("worker-0"), {"said": said})
    assert (finding.code, finding.fix) == ("LAB-SSH-001", fix)


def test_a_proxy_that_does_not_answer_is_told_of_without_its_password(examined: Callable[..., CheckContext]) -> None:
    """A proxy at a port on which nothing listens is LAB-PROXY-003; one that accepts connections is ok."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        examination = examined(env=f"HTTP_PROXY=http://me:secret@127.0.0.1:{server.getsockname()[1]}\n")
        assert wrong(host.proxies_answer(examination)) == []
    (finding,) = host.proxies_answer(examination)
    assert (finding.code, "secret" in f"{finding.summary} {finding.fix}") == ("LAB-PROXY-003", False)
    # The proxy may be the only way out: the fix only asks it.
    assert finding.fix.startswith("curl -sSI --proxy http://127.0.0.1:")


# --- names and ports ---------------------------------------------------------------------------------------------


def test_a_container_of_others_with_a_node_s_name_stops_up(examined: Callable[..., CheckContext]) -> None:
    """A foreign container has worker-1's name: LAB-NAME-002 of it, with `docker rename`; other names are well."""
    planted = Engine()
    planted.foreign = ("labctl-demo-worker-1-1", "labctl-demo-other-1")
    (finding,) = conflicts.names(examined(told=planted))
    assert (finding.code, finding.node) == ("LAB-NAME-002", "worker-1")
    rename = "docker rename labctl-demo-worker-1-1 labctl-demo-worker-1-1-other"
    assert finding.fix == f"{rename}  # or set another LAB_NAME in .env"
    assert any(check.function == "conflicts.names" and check.stops == "compose up" for check in CHECKS)


@pytest.mark.parametrize(
    ("in_use", "fix"), [(False, "docker network rm labctl-demo"), (True, "printf '\\n%s\\n' LAB_NAME=demo-2 >> .env")]
)
def test_a_network_of_others_is_removed_only_if_nobody_uses_it(
    examined: Callable[..., CheckContext], in_use: bool, fix: str
) -> None:
    """A foreign network with the lab's name is LAB-NAME-002; one in use is left, and the lab gets another name."""
    planted = Engine()
    planted.foreign_in_use = in_use
    (finding,) = conflicts.names(examined(told=planted))
    assert (finding.code, finding.fix) == ("LAB-NAME-002", fix)


def test_a_port_that_another_program_has_stops_up_and_is_replaced(examined: Callable[..., CheckContext]) -> None:
    """A port of LAB_PORTS with a listener is LAB-PORT-004; the fix replaces only it, and the next check passes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ports = (("127.0.0.1", port, 80),)
        examination = examined(builders.lab(ports=ports), env=f'LAB_PORTS="{port}:80 0.0.0.0:9001:9000"\n')
        (finding,) = conflicts.published_ports(examination)
        assert (finding.code, f"port {port} of 127.0.0.1" in finding.summary) == ("LAB-PORT-004", True)
        typed(examination, finding)
    replaced = settings.load(examination.lab.directory, {}, {}).text("LAB_PORTS").split()
    assert replaced[1] == "0.0.0.0:9001:9000"
    assert int(replaced[0].split(":")[1]) > port
    assert wrong(conflicts.published_ports(examination)) == []


@pytest.mark.parametrize(
    ("published", "codes"),
    [
        ((("web", "", "127.0.0.1"),), ["LAB-PORT-004"]),
        ((("web", "", "0.0.0.0"),), ["LAB-PORT-004"]),  # noqa: S104 - no binding
        ((("web", "", "::"),), ["LAB-PORT-004"]),
        ((("web", "", "192.0.2.5"),), []),
        ((("web", "", "192.0.2.5"), ("db", "", "127.0.0.1")), ["LAB-PORT-004"]),
        ((("labctl-demo-launcher-1", "demo", "127.0.0.1"),), []),
    ],
)
def test_a_port_that_a_container_publishes_is_the_lab_s_or_in_use(
    examined: Callable[..., CheckContext], published: tuple[tuple[str, str, str], ...], codes: list[str]
) -> None:
    """A port that another container publishes there is LAB-PORT-004; well of another address, or the launcher's."""

    class Publishing(Engine):
        """An engine with a container that publishes port 9001."""

        def publishers(self, port: int) -> tuple[tuple[str, str, str], ...]:
            return published if port == 9001 else ()

    of = builders.lab(ports=(("127.0.0.1", 9001, 9001),))
    assert wrong(conflicts.published_ports(examined(of, env="LAB_PORTS=9001\n", told=Publishing()))) == codes


@pytest.mark.parametrize(
    ("address", "codes"), [("127.0.0.1", []), ("10.0.0.1", ["LAB-PORT-004"]), ("::", ["LAB-PORT-004"])]
)
def test_a_port_of_a_host_is_in_use_only_on_its_address(
    examined: Callable[..., CheckContext], address: str, codes: list[str]
) -> None:
    """A program of a host that listens on another address than LAB_PORTS names is well."""
    of = builders.lab(ports=(("10.0.0.1", 9001, 80),))
    facts = builders.facts(ports={9001: "bob"}, listening={9001: (address,)})
    assert (
        wrong(conflicts.published_ports(replace(examined(of, env="LAB_PORTS=10.0.0.1:9001:80\n"), facts=facts)))
        == codes
    )


def test_ports_that_are_all_in_use_leave_the_choice_to_the_user(examined: Callable[..., CheckContext]) -> None:
    """The last port is in use and none is above: LAB-PORT-004, with an editor as fix."""
    planted = Engine()
    planted.published = (("web", "", ""),)
    of = builders.lab(ports=(("127.0.0.1", 65535, 80),))
    (finding,) = conflicts.published_ports(examined(of, env="LAB_PORTS=65535:80\n", told=planted))
    assert (finding.code, finding.fix.startswith("${EDITOR:-vi} .env")) == ("LAB-PORT-004", True)


def test_the_fix_of_a_network_in_use_changes_the_settings_here(examined: Callable[..., CheckContext]) -> None:
    """A foreign network in use on a host: LAB_NAME is set in .env of this machine; an unused one is removed there."""
    planted = Engine()
    blue = LocalConnection()
    blue.target = InventoryHost(name="blue", address="blue", user="", port=22)
    at_blue = replace(examined(told=planted), connection=blue)
    fixes = []
    for planted.foreign_in_use in (True, False):
        fixes += [finding.fix for finding in conflicts.names(at_blue)]
    assert [fix.startswith("ssh ") for fix in fixes] == [False, True]
    assert ".env" in fixes[0]


def test_an_address_that_the_host_has_not_is_replaced(examined: Callable[..., CheckContext]) -> None:
    """LAB_PORTS with an address of documentation is LAB-PORT-004, and its fix publishes on 127.0.0.1."""
    of = builders.lab(ports=(("192.0.2.1", 9001, 80),))
    (finding,) = conflicts.published_ports(examined(of, env="LAB_PORTS=192.0.2.1:9001:80\n"))
    assert "has no address 192.0.2.1" in finding.summary
    assert "LAB_PORTS=127.0.0.1:90" in finding.fix


# --- the lab's files -----------------------------------------------------------------------------------------


def test_a_workload_that_cannot_be_read_is_named_with_its_line(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """A tab and a missing script in workload.yml are LAB-WORKLOAD-001, each with file, line and an editor."""
    for name, text in {"tab": "launcher: x\n\ty: z\n", "gone": "description: d\nscript: no.py\n"}.items():
        (tmp_path / "workloads" / name).mkdir(parents=True)
        (tmp_path / "workloads" / name / "workload.yml").write_text(text)
    findings = list(files.workloads(examined()))
    assert [finding.code for finding in findings] == ["LAB-WORKLOAD-001"] * 2
    assert findings[1].fix == "${EDITOR:-vi} +2 workloads/tab/workload.yml"


def test_a_workload_whose_script_has_windows_line_ends_is_told_of(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """LAB-WORKLOAD-001 has the command that mends the script."""
    (tmp_path / "workloads").mkdir()
    shutil.copytree(ROOT / "workloads/hello-mpi", tmp_path / "workloads/hello-mpi")
    script = tmp_path / "workloads/hello-mpi/hello.sh"
    script.write_bytes(script.read_bytes().replace(b"\n", b"\r\n"))
    (finding,) = files.workloads(examined())
    assert (finding.code, finding.level) == ("LAB-WORKLOAD-001", "warn")
    assert finding.fix == f"sed -i 's/\\r$//' {script}"


def test_a_lab_whose_workloads_can_be_read_is_well(examined: Callable[..., CheckContext], tmp_path: Path) -> None:
    """The workloads that labctl ships are ok."""
    (tmp_path / "workloads").symlink_to(ROOT / "workloads")
    assert wrong(files.workloads(examined())) == []


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("services.worker-1 Additional property enviroment is not allowed", "s/\\benviroment:/environment:/"),
        ("services.worker-1 additional properties 'volums' not allowed", "# volumes instead of volums"),
        ("services.worker-1.ports must be a list", "${EDITOR:-vi} compose.override.yml"),
    ],
)
def test_an_override_that_compose_refuses_stops_up(
    examined: Callable[..., CheckContext], speaks: Callable[..., None], message: str, fix: str
) -> None:
    """LAB-FILES-002 has compose's words without labctl's file, and corrects a misspelt key.

    Its fix is an editor if something else has the same name. Without a file nothing is found.
    """
    speaks(f"validating /tmp/x/.lab/nodes/worker-1/override.yml: {message.replace(chr(39), '')}", 15, "override.yml")
    of = replace(builders.lab(), override=(("worker-1", '{"x": 1}'),))
    examination = examined(of)
    text = "services: {worker-1: {enviroment: {volums: 1}, volums: []}}"
    (examination.lab.directory / "compose.override.yml").write_text(text)
    (finding,) = files.override(examination)
    assert (finding.code, finding.summary.startswith("compose.override.yml: services.worker-1")) == (
        "LAB-FILES-002",
        True,
    )
    assert fix in finding.fix
    assert list(files.override(examined())) == []
    assert any(check.function == "files.override" and check.stops == "compose up" for check in CHECKS)


def test_an_override_is_not_blamed_for_a_compose_that_does_not_work(
    examined: Callable[..., CheckContext], speaks: Callable[..., None]
) -> None:
    """A docker command without compose, which refuses the nodes' own files too, is no LAB-FILES-002."""
    speaks("docker: unknown command: docker compose\n\nRun docker --help for more information", 1)
    of = replace(builders.lab(), override=(("worker-1", '{"x": 1}'),))
    assert wrong(files.override(examined(of))) == []


def test_an_override_is_not_blamed_for_a_busy_machine(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compose that is late refuses nothing: `up` asks it again."""

    def late(*_: Any, **__: Any) -> None:
        raise ProcessTimeout("docker compose timed out")

    monkeypatch.setattr("labctl.system.process.run", late)
    assert wrong(files.override(examined(replace(builders.lab(), override=(("worker-1", '{"x": 1}'),))))) == []


# --- the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "summary"), [(0, None), (3, None), (-3, None), (90, "90 s ahead"), (-90, "90 s behind")]
)
def test_a_clock_that_is_off_is_told_of(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch, seconds: int, summary: str | None
) -> None:
    """An engine's clock 90 s ahead or behind is reported with that; 3 s are ok."""
    monkeypatch.setattr(engine, "time", SimpleNamespace(time=lambda: 1_700_000_000.5))
    theirs = time.strftime("%Y-%m-%dT%H:%M:%S.5Z", time.gmtime(1_700_000_000 + seconds))
    (finding,) = engine.clock(examined(told=Engine(SystemTime=theirs)))
    assert (finding.level == "ok") == (summary is None)
    assert (summary or "") in finding.summary


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-02T15:04:05Z",
        "2026-01-02T15:04:05.000000001Z",
        "2026-01-02T17:04:05.0+02:00",
        "2026-01-02T10:04:05-05:00",
    ],
)
def test_the_engine_s_clock_is_read_in_all_its_spellings(text: str) -> None:
    """seconds_of() reads the same moment with and without fractions and with three UTC offsets."""
    assert engine.seconds_of(text) == pytest.approx(1767366245, abs=0.001)


def test_an_old_engine_is_told_of(examined: Callable[..., CheckContext]) -> None:
    """Docker 20.10 gives LAB-ENGINE-001."""
    assert wrong(engine.version(examined(told=Engine(ServerVersion="20.10.24+dfsg1")))) == ["LAB-ENGINE-001"]


@pytest.mark.parametrize(
    ("type_of_store", "socket", "folder"),
    [
        ("io.containerd.snapshotter.v1", "/run/containerd/containerd.sock", "/var/lib/containerd"),
        ("io.containerd.snapshotter.v1", "/run/user/1000/docker/containerd/containerd.sock", "/srv/docker"),
        ("", "/run/containerd/containerd.sock", "/srv/docker"),
    ],
)
def test_the_disk_that_is_judged_has_the_images(type_of_store: str, socket: str, folder: str) -> None:
    """image_folder() is containerd's folder if the system's containerd stores images, else DockerRootDir."""
    status = [["Backing Filesystem", "extfs"], *([["driver-type", type_of_store]] if type_of_store else [])]
    info = {"DockerRootDir": "/srv/docker", "DriverStatus": status, "Containerd": {"Address": socket}}
    assert engine.image_folder(info) == Path(folder)
    assert engine.image_folder({"DockerRootDir": "/srv/docker", "DriverStatus": None}) == Path("/srv/docker")


@pytest.fixture
def speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a `docker` on PATH with this output and exit code."""

    def make(printed: str, code: int = 0, argument: str = "") -> None:
        """Put a `docker` on PATH that prints this text, to stderr if it fails, and exits with this code.

        With an ``argument`` only if it is among its arguments.
        """
        program = tmp_path / "bin/docker"
        program.parent.mkdir(exist_ok=True)
        without = f'case "$*" in *"{argument}"*) ;; *) exit 0 ;; esac'
        program.write_text(f"#!/bin/sh\n{without}\necho '{printed}' >&{2 if code else 1}\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(
    ("printed", "old"),
    [
        ("Docker Compose version v2.17.3", "2.17.3"),
        ("Docker Compose version 2.24.3+ds1-1", "2.24.3+ds1-1"),
        ("Docker Compose version v2.24.4", ""),
        ("Docker Compose version 2.26.1-4", ""),
        ("Docker Compose version v5.6.1", ""),
        ("Docker Compose version dev", ""),
    ],
)
def test_compose_that_is_too_old_is_named_and_stops_up_before_it_is_used(
    examined: Callable[..., CheckContext], speaks: Callable[..., None], printed: str, old: str
) -> None:
    """Compose older than 2.24.4 raises HostError with LAB-ENGINE-002 and `labctl setup`; newer or `dev` passes."""
    speaks(printed)
    if not old:
        assert run.failing_hosts(examined(), "compose up") == {}
        return
    with pytest.raises(HostError) as caught:
        run.failing_hosts(examined(), "compose up")
    needed = "labctl needs 2.24.4 or newer, which reads `!override` in compose.override.yml"
    assert caught.value.message == f"docker compose {old} (LAB-ENGINE-002): {needed}"
    assert caught.value.hint == "labctl setup"


def test_an_old_plugin_of_the_users_own_is_what_is_moved_away(
    examined: Callable[..., CheckContext], speaks: Callable[..., None], tmp_path: Path
) -> None:
    """With an old Compose plugin in the user's home, the fix moves it to `.broken`."""
    plugin = tmp_path / ".docker/cli-plugins/docker-compose"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    speaks("Docker Compose version v2.17.3")
    (finding,) = engine.compose(examined())
    assert finding.fix == f"mv {plugin} {plugin}.broken"


@pytest.mark.parametrize(
    ("printed", "code", "level"),
    [
        ("github.com/docker/buildx v0.9.1 ed00243", 0, "error"),
        ("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", 0, "ok"),
        ("docker: unknown command: docker buildx", 1, "error"),
    ],
)
def test_buildx_is_judged_by_its_version(
    examined: Callable[..., CheckContext], speaks: Callable[..., None], printed: str, code: int, level: str
) -> None:
    """buildx 0.9.1 or none is an error, LAB-ENGINE-003; 0.13.1 is ok."""
    speaks(printed, code)
    (finding,) = engine.buildx(examined())
    assert (finding.code, finding.level) == ("LAB-ENGINE-003", level)


def with_devices(accelerator: str, request: str = "reservation", **mapping: Any) -> Lab:
    """Return a lab of one node with two devices and two slots, requested in this way."""
    given = (Device(id="0", path="/dev/one"), Device(id="1", path="/dev/two"))
    node = builders.node(slots=2, devices=DeviceMapping(devices=given, **mapping))
    here = builders.host(devices=given, request=request)
    return builders.lab((node,), accelerator=accelerator, hosts=(here,))


@pytest.mark.parametrize(
    ("accelerator", "request_", "driver", "expected"),
    [
        ("nvidia", "reservation", "systemd", ["LAB-ENGINE-005"]),
        ("nvidia", "runtime", "systemd", ["LAB-ENGINE-005"]),
        ("nvidia", "cdi", "systemd", []),
        ("nvidia", "reservation", "cgroupfs", []),
        ("habana", "reservation", "systemd", []),
    ],
)
def test_gpus_that_a_daemon_reload_would_take_away_are_told_of(
    examined: Callable[..., CheckContext], accelerator: str, request_: str, driver: str, expected: list[str]
) -> None:
    """LAB-ENGINE-005 warns of NVIDIA devices with cgroup driver systemd, unless they are requested by CDI."""
    lab = with_devices(accelerator, request_)
    assert wrong(engine.cgroups(examined(lab, told=Engine(CgroupDriver=driver)))) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"hosts": (builders.host(infiniband=("/dev/infiniband/uverbs0",)),)}, ["LAB-LIMIT-001"]),
        ({"nodes": tuple(builders.node(number, slots=8) for number in range(32))}, ["LAB-LIMIT-002"]),
    ],
)
def test_a_limit_that_the_host_refuses_matters_where_it_is_needed(
    examined: Callable[..., CheckContext], change: dict[str, Any], expected: list[str]
) -> None:
    """Refused memlock is reported on a host with InfiniBand, refused nofile for 256 ranks, else neither."""
    base = builders.lab()
    refused = replace(base.limits, memlock=None, nofile=None)
    assert wrong(engine.limits(examined(replace(base, limits=refused, **change)))) == expected


def test_a_limit_that_does_for_this_lab_though_less_than_asked_is_well(examined: Callable[..., CheckContext]) -> None:
    """For 256 ranks nofile 1024 gives one ok and one error, 20,000 is ok."""
    base = builders.lab(tuple(builders.node(number, slots=8) for number in range(32)))
    levels = {
        files: [
            finding.level
            for finding in engine.limits(examined(replace(base, limits=replace(base.limits, nofile=files))))
        ]
        for files in (1024, 20_000)
    }
    assert levels == {1024: ["ok", "error"], 20_000: ["ok", "ok"]}


def test_a_table_of_neighbours_that_is_too_small_is_told_with_what_raises_it(
    examined: Callable[..., CheckContext],
) -> None:
    """gc_thresh3 of 1024 for 64 nodes gives LAB-NET-006 with a fix of 16384; with 16384 it is ok."""
    look = examined(builders.lab(64))
    file = Path(str(look.root)) / "proc/sys/net/ipv4/neigh/default/gc_thresh3"
    file.parent.mkdir(parents=True)
    file.write_text("1024\n")
    (finding,) = network.arp_table(look)
    assert (finding.code, finding.level) == ("LAB-NET-006", "warn")
    assert "gc_thresh3=16384" in finding.fix
    file.write_text("16384\n")
    assert wrong(network.arp_table(look)) == []


FULL = "all predefined address pools have been fully subnetted"


@pytest.mark.parametrize(
    ("unused", "fix"),
    [
        ((("labctl-old", "old"), ("other's", "")), "docker network rm labctl-old"),
        ((("other's", ""),), "docker network inspect 'other'\"'\"'s'  # and remove those that nobody needs"),
    ],
)
def test_only_networks_of_labs_are_removed_when_addresses_run_out(
    examined: Callable[..., CheckContext], unused: tuple[tuple[str, str], ...], fix: str
) -> None:
    """LAB-NET-003: the fix removes unused networks of labs; for only others' it inspects them, and names all."""
    planted = Engine()
    planted.unused, planted.no_network = unused, FULL
    (finding,) = network.address_pools(examined(told=planted))
    assert (finding.code, finding.level, finding.fix) == ("LAB-NET-003", "error", fix)
    assert "other's" in finding.summary


def test_wider_pools_are_put_beside_what_the_engine_is_told_already(examined: Callable[..., CheckContext]) -> None:
    """The fix for exhausted address pools writes a new daemon.json, or merges into an existing one by jq."""
    planted = Engine()
    planted.no_network = FULL
    examination = examined(told=planted)
    (fresh,) = network.address_pools(examination)
    assert "default-address-pools" in fresh.fix
    assert "jq" not in fresh.fix
    (Path(str(examination.root)) / "etc/docker").mkdir(parents=True)
    (Path(str(examination.root)) / "etc/docker/daemon.json").touch()
    (merging,) = network.address_pools(examination)
    assert 'merged=$(jq \'. * {"default-address-pools"' in merging.fix
    assert "ends every container" in merging.impact


def test_a_network_that_cannot_be_made_for_another_reason_is_no_lack_of_addresses(
    examined: Callable[..., CheckContext],
) -> None:
    """A network that fails for another reason than address pools raises HostError with the engine's text."""
    planted = Engine()
    planted.no_network = "plugin bridge not found"
    with pytest.raises(HostError, match="plugin bridge not found"):
        list(network.address_pools(examined(told=planted)))


# --- devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "groups", "uid", "closed"),
    [
        (0o666, (), 1000, False),
        (0o660, (), 1000, True),
        (0o660, ("its",), 1000, False),
        (0o640, ("its",), 1000, True),
        (0o600, (), "its", False),
    ],
)
def test_device_files_are_judged_as_the_containers_user_would_find_them(
    examined: Callable[..., CheckContext],
    tmp_path: Path,
    mode: int,
    groups: tuple[str, ...],
    uid: int | str,
    closed: bool,
) -> None:
    """why_closed() judges mode 660 and the like by owner, given groups and the container's uid."""
    path = tmp_path / "renderD128"
    path.touch()
    path.chmod(mode)
    status = path.stat()
    here = builders.host(uid=status.st_uid if uid == "its" else status.st_uid + 1, gid=status.st_gid + 1)
    given = tuple(status.st_gid for _ in groups)
    assert bool(devices.why_closed(examined().files([str(path)])[str(path)], here, given)) == closed


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"vm/nr_hugepages": "15000", "kernel/numa_balancing": "0"}, []),
        ({"vm/nr_hugepages": "0", "kernel/numa_balancing": "0"}, ["LAB-GAUDI-001"]),
        ({"vm/nr_hugepages": "15000", "kernel/numa_balancing": "1", "kernel/osrelease": "5.15.0-86-generic"},
         ["LAB-GAUDI-002"]),
        ({"vm/nr_hugepages": "15000", "kernel/numa_balancing": "1", "kernel/osrelease": "6.8.0"}, []),
    ],
)  # fmt: skip
def test_what_gaudi_asks_of_a_host_is_read_off_the_kernel(
    examined: Callable[..., CheckContext], files: dict[str, str], expected: list[str]
) -> None:
    """Missing huge pages give LAB-GAUDI-001; NUMA balancing on Linux 5.15 LAB-GAUDI-002, on 6.8 nothing."""
    examination = examined(with_devices("habana"))
    for name, text in files.items():
        path = Path(str(examination.root)) / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    findings = list(devices.vendor_host(examination))
    assert wrong(iter(findings)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("quiet", []), ("intel_iommu=on iommu=pt", []), ("quiet intel_iommu=on", ["LAB-GAUDI-003"])],
)
def test_an_iommu_that_translates_is_told_of_on_a_host_with_gaudis(
    examined: Callable[..., CheckContext], text: str, expected: list[str]
) -> None:
    """intel_iommu=on without iommu=pt in /proc/cmdline gives LAB-GAUDI-003."""
    examination = examined(with_devices("habana"))
    (Path(str(examination.root)) / "proc").mkdir(parents=True)
    (Path(str(examination.root)) / "proc/cmdline").write_text(text)
    assert wrong(finding for finding in devices.vendor_host(examination) if finding.code == "LAB-GAUDI-003") == expected


@pytest.mark.parametrize(
    ("out", "err", "code", "summary", "level"),
    [
        ("a banner\ntorch 2\n", "", 0, "torch counts 2 devices", "ok"),
        ("tensorflow 2\n", "", 0, "tensorflow counts 2 devices", "ok"),
        ("tensorflow 1\n", "", 0, "1 of 2", "error"),
        ("", "no driver", 1, "no of 2 devices: no driver", "error"),
        ("", "ModuleNotFoundError: No module named 'torch'", 1, "nothing that counts", "ok"),
        ("", "ModuleNotFoundError: No module named 'torch.xpu'", 1, "no of 2 devices", "error"),
    ],
)
def test_a_node_s_framework_must_count_the_devices_it_was_given(
    examined: Callable[..., CheckContext], out: str, err: str, code: int, summary: str, level: str
) -> None:
    """framework_count() is ok for 2 of 2 or without a framework; fewer, or a failed count, is an error."""
    planted = Engine(out=out, err=err, code=code)
    (finding,) = devices.framework_count(examined(with_devices("intel"), told=planted), builders.container("worker-0"))
    assert summary in finding.summary
    assert finding.level == level


def test_an_image_that_counts_no_device_is_taken_out_of_the_settings(examined: Callable[..., CheckContext]) -> None:
    """Count no device in an image that LAB_IMAGE names: the fix removes the setting, and is not automatic."""
    lab = replace(with_devices("nvidia"), image="labctl/cpu")
    ctx = examined(lab, env="LAB_IMAGE=labctl/cpu\n", told=Engine(out="torch 0\n"))
    (finding,) = devices.framework_count(ctx, builders.container("worker-0"))
    assert finding.summary == "torch in image labctl/cpu counts 0 of 2 devices"
    assert finding.fix.startswith("sed -i '/^LAB_IMAGE=/d' .env && labctl up")
    assert not finding.auto_fixable


def test_without_the_image_it_is_said_that_no_device_was_passed(examined: Callable[..., CheckContext]) -> None:
    """Check a lab with devices whose image is missing: a warning; nothing without devices."""
    (finding,) = devices.container_starts(examined(with_devices("nvidia")))
    assert (finding.level, finding.code) == ("warn", "LAB-RUNTIME-002")
    assert finding.summary.startswith("no container was started with devices 0, 1: image ")
    assert not list(devices.container_starts(examined()))


@pytest.mark.parametrize(("count", "shown"), [(1, "the device's file"), (8, "all 8 device files")])
def test_device_files_are_counted_in_words(count: int, shown: str) -> None:
    """_device_files() names one file without a number."""
    assert devices._device_files(count) == shown


def test_devices_are_not_counted_while_a_run_has_them_nor_beyond_their_time(
    examined: Callable[..., CheckContext],
) -> None:
    """framework_count() raises HostError for a program killed after its time, and yields nothing during a run."""
    late = examined(with_devices("nvidia"), told=Engine(code=137))
    with pytest.raises(HostError, match="not counted within"):
        list(devices.framework_count(late, builders.container("worker-0")))
    with filelock.held(late.lab.directory / filelock.RUNS / "one.lock", "run one"):
        assert not list(devices.framework_count(replace(late), builders.container("worker-0")))


@pytest.mark.parametrize(
    ("image", "setting", "level", "fix"),
    [
        ("labctl/cpu", "", "warn", "labctl build"),
        ("labctl/packages:0123456789ab", "", "warn", "labctl build"),
        ("labctl/packages:0123456789ab", "labctl/packages:0123456789ab", "error", "unset LAB_IMAGE"),
        ("labctl/from:0123456789ab", "labctl/from:0123456789ab", "error", "labctl build --from IMAGE"),
        ("mine:1", "mine:1", "error", "docker pull mine:1"),
    ],
)
def test_an_image_that_is_not_found_is_built_made_or_pulled(
    examined: Callable[..., CheckContext], image: str, setting: str, level: str, fix: str
) -> None:
    """LAB-IMAGE-001 is a warning for images that labctl builds by itself, an error for others; the fix fits each."""
    lab = replace(builders.lab(), image=image)
    (finding,) = engine.image(examined(lab, env=f"LAB_IMAGE={setting}\n" if setting else ""))
    assert (finding.code, finding.level, finding.fix.startswith(fix)) == ("LAB-IMAGE-001", level, True)


@pytest.mark.parametrize(
    ("version", "cuda", "old"),
    [("580.65.06", 13, False), ("575.57.08", 13, True), ("525.60.13", 12, False), ("470.256.02", 12, True),
     ("470.256.02", 99, False)],
)  # fmt: skip
def test_a_driver_that_is_too_old_for_an_image_s_cuda_is_told_of(version: str, cuda: int, old: bool) -> None:
    """why_too_old() names a driver older than CUDA 12 or 13 need, and is empty for an unknown CUDA."""
    reason = nvidia.why_too_old(version, cuda)
    assert bool(reason) is old
    assert not old or version in reason


def test_the_cuda_of_labctl_s_own_image_is_known_and_has_its_driver() -> None:
    """cuda_of() knows labctl/nvidia and labctl/nvidia-horovod; for another image without CUDA_VERSION it is 0."""
    assert nvidia.cuda_of("labctl/nvidia", "debian:bookworm-slim", dict) in nvidia.DRIVERS
    assert nvidia.cuda_of("labctl/nvidia-horovod", "labctl/nvidia", dict) in nvidia.DRIVERS
    assert nvidia.cuda_of("someone/nvidia", "debian:bookworm-slim", dict) == 0


@pytest.mark.parametrize(
    ("base", "variables", "expected"),
    [
        ("nvcr.io/nvidia/pytorch:24.05-py3", {"CUDA_VERSION": "12.4.1.003"}, []),
        ("nvcr.io/nvidia/pytorch:26.01-py3", {"CUDA_VERSION": "13.1.0.036"}, ["LAB-IMAGE-003"]),
        ("registry.example/somebody/pytorch:1", {}, []),
        ("docker.example:5000/library/debian:bookworm-slim", {}, ["LAB-IMAGE-003"]),
        ("labctl/base:bookworm", {}, ["LAB-IMAGE-003"]),
    ],
)
def test_an_nvidia_image_is_judged_by_the_cuda_of_the_base_that_it_was_built_on(
    examined: Callable[..., CheckContext], base: str, variables: dict[str, str], expected: list[str]
) -> None:
    """Driver 550 is too old, LAB-IMAGE-003, by the base image's CUDA_VERSION or, for Debian, by labctl's CUDA."""
    lab = with_devices("nvidia")
    lab = replace(lab, image="labctl/nvidia", hosts=(replace(lab.hosts[0], driver="550.54.14"),))
    planted = Engine(observed=ObservedState(image="sha256:1111"))
    planted.labels, planted.variables = {catalog.BASE_LABEL: base}, variables
    assert wrong(engine.driver(examined(lab, told=planted))) == expected


def test_packages_on_top_leave_an_nvidia_image_with_its_cuda(examined: Callable[..., CheckContext]) -> None:
    """labctl/packages on labctl's NVIDIA image with driver 550 gives LAB-IMAGE-003."""
    lab = with_devices("nvidia")
    lab = replace(lab, image="labctl/packages:01", hosts=(replace(lab.hosts[0], driver="550.54.14"),))
    planted = Engine(observed=ObservedState(image="sha256:1111"))
    planted.labels = {catalog.BASE_LABEL: "debian:bookworm-slim"}
    assert wrong(engine.driver(examined(lab, told=planted))) == ["LAB-IMAGE-003"]


@pytest.mark.parametrize("image", ["labctl/habana", "labctl/packages:0123456789ab"])
@pytest.mark.parametrize(("version", "expected"), [("1.22.1", []), ("1.19.0", ["LAB-IMAGE-003"])])
def test_a_gaudi_image_of_another_release_than_the_driver_is_told_of(
    examined: Callable[..., CheckContext], version: str, expected: list[str], image: str
) -> None:
    """Driver 1.19 with a Gaudi 1.22.0 image gives LAB-IMAGE-003 with `labctl build && labctl up`; 1.22.1 is ok."""
    lab = replace(with_devices("habana"), image=image)
    lab = replace(lab, hosts=(replace(lab.hosts[0], driver=version),))
    planted = Engine(observed=ObservedState(image="sha256:1111"))
    planted.labels = {catalog.BASE_LABEL: "vault.habana.ai/gaudi-docker/1.22.0/ubuntu22.04/habanalabs/pytorch:latest"}
    findings = list(engine.driver(examined(lab, told=planted)))
    assert wrong(iter(findings)) == expected
    assert all(finding.fix == "labctl build && labctl up" for finding in findings if finding.level != "ok")


# --- nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "good"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth1,eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^eth", False),
        ("NCCL_SOCKET_IFNAME", "ib0", False),
        ("OMPI_MCA_btl_tcp_if_include", "172.18.0.0/16", True),
        ("OMPI_MCA_btl_tcp_if_include", "10.9.0.0/16", False),
        ("OMPI_MCA_btl_tcp_if_include", "eth0/x", False),
    ],
)
def test_an_interface_is_read_as_its_library_reads_it(key: str, value: str, good: bool) -> None:
    """chooses() reads interface names for Gloo, NCCL's prefix, `=` and `^`, and Open MPI's subnets."""
    assert nodes.chooses(key, value, ["eth0"], [ipaddress.ip_network("172.18.0.0/16")]) is good


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"state": "exited"}, "LAB-NODE-001"),
        ({"state": "dead"}, "LAB-NODE-001"),
        ({"name": "1234_labctl-demo-worker-0-1"}, "LAB-NODE-001"),
        ({"state": "paused", "fingerprint": "other"}, "LAB-NODE-002"),
        ({"fingerprint": "other"}, "LAB-NODE-003"),
        ({"image": "sha256:2222"}, "LAB-NODE-003"),
        ({"health": "unhealthy", "reason": "device lost: /dev/nvidia0 is gone"}, "LAB-NODE-004"),
        ({"health": "unhealthy", "reason": "Health check exceeded timeout (5s)"}, "LAB-NODE-006"),
        ({"health": "unhealthy", "reason": ""}, None),
    ],
)
def test_a_node_is_judged_by_what_the_engine_says_of_it(
    examined: Callable[..., CheckContext], change: dict[str, str], code: str | None
) -> None:
    """Each state, health, image or fingerprint of worker-0 gives its LAB-NODE code; each node has a finding."""
    examination = examined()
    planted = Engine(observed=builders.observed(examination.lab, worker_0=change))
    findings = list(nodes.states(replace(examination, engine=cast(DockerEngine, planted))))
    assert wrong(iter(findings)) == ([code] if code else [])
    assert [finding.node for finding in findings] == ["launcher", "worker-0", "worker-1"]


def test_a_node_that_is_out_of_date_names_the_changed_setting(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor names the settings that `labctl status` names."""
    monkeypatch.setattr(applied, "changed", lambda *_: ("LAB_SHM_SIZE",))
    examination = examined()
    planted = Engine(observed=builders.observed(examination.lab, worker_0={"fingerprint": "other"}))
    findings = nodes.states(replace(examination, engine=cast(DockerEngine, planted)))
    assert "is out of date: LAB_SHM_SIZE changed" in [finding.summary for finding in findings]


def listener(**changes: Any) -> dict[str, Any]:
    """Return a program that listens on the master port, pid 17 by default, with these fields changed."""
    return {"pid": 17, "uid": "1000", "command": "python serve.py", "run": "", **changes}


def test_who_took_the_master_port_is_named(examined: Callable[..., CheckContext]) -> None:
    """A program on the master port is named with pid and command; the fix kills it in the node."""
    finding = nodes.master_port(examined(), builders.container("worker-0"), listener())
    assert "pid 17: python serve.py" in finding.summary
    assert finding.fix == "labctl exec --node worker-0 -- kill 17"


def test_what_a_run_left_on_the_master_port_is_no_fault(examined: Callable[..., CheckContext]) -> None:
    """A listener of a labctl run on the master port is ok, and the summary names the run."""
    finding = nodes.master_port(examined(), builders.container("worker-0"), listener(run="20260102-150405-hello-3fa2"))
    assert finding.level == "ok"
    assert "20260102-150405-hello-3fa2" in finding.summary


@pytest.mark.parametrize(
    ("answer", "codes"),
    [
        ({"name": "worker-0", "seconds": 0.1, "rate": 5e7}, []),
        ({"name": "worker-0", "seconds": 0.1, "rate": 1e5}, ["LAB-NET-005"]),
        ({"name": "worker-0", "seconds": 0.1, "rate": None}, ["LAB-NET-005"]),
        ({"name": "", "said": "ssh: connect to host worker-0 port 12345: Connection refused"}, ["LAB-SSH-001"]),
        ({"name": "other", "said": ""}, ["LAB-SSH-001"]),
        ({"name": "", "said": "@ REMOTE HOST IDENTIFICATION HAS CHANGED @"}, ["LAB-SSH-002"]),
    ],
)
def test_a_login_is_judged_by_what_the_launcher_says_of_it(
    examined: Callable[..., CheckContext], answer: dict[str, Any], codes: list[str]
) -> None:
    """A slow or silent link is LAB-NET-005, a failed login LAB-SSH-001, a changed host key LAB-SSH-002."""
    assert wrong(nodes.link(examined(), builders.container("worker-0"), answer)) == codes


@pytest.mark.parametrize(
    ("free", "running", "codes"), [(1 << 30, False, []), (1 << 20, False, ["LAB-SHM-002"]), (0, True, [])]
)
def test_shared_memory_that_is_full_is_told_of_unless_a_run_uses_it(
    examined: Callable[..., CheckContext], free: int, running: bool, codes: list[str]
) -> None:
    """Shared memory with less than a tenth free is LAB-SHM-002 and says to restart the node, but not during a run."""
    examination = examined()
    examination.__dict__["run_active"] = running
    findings = list(nodes.shared_memory(examination, builders.container("worker-0"), free, 8 << 30))
    assert wrong(iter(findings)) == codes
    full = [finding for finding in findings if finding.level != "ok"]
    assert all("docker restart" in finding.fix and not finding.auto_fixable for finding in full)


@pytest.mark.parametrize(
    ("state", "exit_code", "words"),
    [
        ("exited", 137, "has stopped (exit code 137, killed)"),
        ("exited", 0, "has stopped (exit code 0)"),
        ("created", None, "was created, but has not started"),
        ("restarting", None, "keeps restarting"),
    ],
)
def test_a_container_that_does_not_run_is_told_of_in_words(state: str, exit_code: int | None, words: str) -> None:
    """The states of Docker are named in plain English, with the exit code."""
    assert not_running(builders.container("worker-0", state=state, exit_code=exit_code)) == words


@pytest.mark.parametrize(
    ("changes", "override", "summary", "fix"),
    [
        ({"state": "exited", "exit_code": 137}, (), "has stopped (exit code 137, killed)", "labctl up"),
        (
            {"state": "exited", "exit_code": 1},
            (),
            "has stopped (exit code 1): labctl-demo",
            "labctl logs worker-0  # mend what it names, then: labctl up",
        ),
        (
            {"state": "exited", "exit_code": 1},
            (("worker-0", "{}"),),
            "has stopped (exit code 1): labctl-demo",
            "labctl logs worker-0  # mend what it names in compose.override.yml, then: labctl up",
        ),
        ({"state": "created", "reason": "no such device"}, (), "but has not started: no such device", "labctl up"),
        (
            {"state": "created", "reason": "no such device"},
            (("worker-0", "{}"),),
            "but has not started: no such device",
            "${EDITOR:-vi} compose.override.yml  # it adds to worker-0; then: labctl up",
        ),
    ],
)
def test_a_node_that_failed_by_itself_says_why_instead_of_sending_to_up(
    examined: Callable[..., CheckContext], changes: dict[str, Any], override: Pairs, summary: str, fix: str
) -> None:
    """Only `labctl up` is fixable automatically: what it cannot mend names the log or compose.override.yml."""
    container = builders.container("worker-0", **changes)
    examination = examined(builders.lab(override=override))
    engine = cast(DockerEngine, FakeBackend(seen=ObservedState(containers=(container,))))
    finding = nodes.stopped(replace(examination, engine=engine), container)
    assert finding.summary.endswith(summary)
    assert (finding.fix, finding.auto_fixable) == (fix, fix == "labctl up")


# --- what the image and the docker command are ---------------------------------------------------------------


def node_image(architecture: str = "amd64", **config: Any) -> dict[str, Any]:
    """Return an image of a node as inspected."""
    entrypoint = {"Entrypoint": ["python3", foreign.PROGRAM]}
    return {"Id": "sha256:1", "Architecture": architecture, "Config": {**entrypoint, **config}}


@pytest.mark.parametrize(
    ("image", "described", "codes", "fix"),
    [
        ("labctl/cpu", node_image(), [], ""),
        ("labctl/cpu", None, [], ""),
        ("acme/torch:2", node_image(Entrypoint=None), ["LAB-IMAGE-005"], "labctl build --from acme/torch:2 && "),
        ("acme/torch:2", node_image("arm64"), ["LAB-IMAGE-006"], "docker pull --platform linux/amd64 acme/torch:2"),
        ("labctl/cpu", node_image("arm64"), ["LAB-IMAGE-006"], "labctl build"),
    ],
)
def test_an_image_that_up_refuses_is_told_of_with_what_makes_it_fit(
    examined: Callable[..., CheckContext], image: str, described: dict[str, Any] | None, codes: list[str], fix: str
) -> None:
    """An image without labctl's entrypoint is LAB-IMAGE-005, one for another processor LAB-IMAGE-006."""
    planted = Engine()
    planted.described = described
    findings = list(engine.image_fit(examined(replace(builders.lab(), image=image), told=planted, LAB_IMAGE=image)))
    assert wrong(iter(findings)) == codes
    assert all(finding.fix.startswith(fix) for finding in findings if finding.level != "ok")
    # Emulated programs run: `up` goes on.
    assert all(finding.level == "warn" for finding in findings if finding.code == "LAB-IMAGE-006")


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("labctl/horovodd", "sed -i '/^LAB_IMAGE=/c LAB_IMAGE=labctl/horovod' .env"),
        ("labctl/nosuch", "sed -i '/^LAB_IMAGE=/d' .env"),
    ],
)
def test_an_image_of_labctl_s_that_no_registry_has_is_not_pulled(
    examined: Callable[..., CheckContext], image: str, fix: str
) -> None:
    """An unknown name below labctl/ is LAB-IMAGE-001; the fix takes the nearest that labctl builds, or unsets it."""
    (finding,) = engine.image(examined(replace(builders.lab(), image=image), env=f"LAB_IMAGE={image}\n"))
    assert (finding.level, finding.code, finding.fix) == ("error", "LAB-IMAGE-001", fix)


def test_the_line_of_a_setting_is_found_behind_a_byte_order_mark(
    examined: Callable[..., CheckContext], tmp_path: Path
) -> None:
    """Run the commands for a setting on the first line of a .env with BOM: they can be typed, and change it alone."""
    rest = "# LAB_IMAGE=labctl/cpu\nLAB_ENV_MY_LAB_IMAGE=x\n"
    context = examined(replace(builders.lab(), image="labctl/nosuch"), env=f"\ufeffLAB_IMAGE=labctl/nosuch\n{rest}")
    for command in (context.set_setting("LAB_IMAGE", "labctl/cpu"), context.unset_setting("LAB_IMAGE")):
        path = tmp_path / str(len(command))
        path.mkdir()
        (path / ".env").write_text(f"\ufeffLAB_IMAGE=labctl/nosuch\n{rest}", encoding="utf-8")
        assert command.isascii()
        subprocess.run(command, shell=True, check=True, cwd=path)  # noqa: S602
        kept = (path / ".env").read_text(encoding="utf-8")
        assert kept == ("LAB_IMAGE=labctl/cpu\n" if "/c " in command else "") + rest


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        (["name=seccomp,profile=builtin"], []),
        (["name=rootless"], ["LAB-ENGINE-007"]),
        (["name=userns"], ["LAB-ENGINE-007"]),
    ],
)
def test_an_engine_that_maps_users_is_told_of(
    examined: Callable[..., CheckContext], options: list[str], codes: list[str]
) -> None:
    """A rootless engine and one with userns-remap are LAB-ENGINE-007."""
    assert wrong(engine.user_mapping(examined(told=Engine(SecurityOptions=options)))) == codes


# --- findings as they come, and a machine without a lab ------------------------------------------------------


def test_findings_are_passed_on_as_checks_end(
    examined: Callable[..., CheckContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings of a quick check are received while an earlier, slow one waits for that; the order is kept."""
    received: list[str] = []
    quick = threading.Event()

    def slow(_: CheckContext) -> Iterator[Finding]:
        """Wait until the quick check's finding was received."""
        assert quick.wait(60)
        yield ok("LAB-HOST-001", "slow")

    def receive(findings: Sequence[Finding]) -> None:
        """Keep the summaries, and let the slow check go on after the quick one's."""
        received.extend(finding.summary for finding in findings)
        if "quick" in received:
            quick.set()

    monkeypatch.setattr(host, "cores", slow)
    monkeypatch.setattr(host, "memory", lambda _: iter([ok("LAB-HOST-003", "quick")]))
    checks = (Check("host.cores"), Check("host.memory"))
    findings = run.examine(examined(), checks=checks, receive=receive)
    assert received == ["quick", "slow"]
    assert [finding.summary for finding in findings] == ["slow", "quick"]


def test_a_machine_is_examined_without_a_lab_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a lab the checks of the machine run, none of the lab; the directory stays empty."""
    monkeypatch.setattr(cluster, "backend_here", lambda _: FakeBackend())
    monkeypatch.setattr(
        run, "CHECKS", tuple(check for check in CHECKS if check.function in {"host.cores", "files.lab_name"})
    )
    context = Context(directory=tmp_path, environ={"HOME": str(tmp_path)}, emit=lambda _: None, flags={})
    assert [finding.code for finding in run.of_machine(context)] == ["LAB-HOST-001"]
    assert list(tmp_path.iterdir()) == []
    hosts = replace(context, environ={"HOME": str(tmp_path), "LAB_HOSTS": "hosts.txt"})
    assert [finding.code for finding in run.of_machine(hosts)] == ["LAB-HOST-001"]
    of_lab = {"files.lab_name", "nodes.states", "engine.image", "conflicts.names", "nodes.ssh"}
    assert not of_lab & {check.function for check in CHECKS if check.machine}


# --- the list of codes ---------------------------------------------------------------------------------------


def test_the_list_of_codes_is_that_of_the_checks() -> None:
    """The codes in the sources are those in the table of docs/doctor.md."""
    used = {
        code
        for package in ("doctor", "accelerators", "backends")
        for path in (ROOT / "labctl" / package).rglob("*.py")
        for code in re.findall(r"LAB-[A-Z0-9]+-\d{3}", path.read_text(encoding="utf-8"))
    }
    listed = re.findall(
        r"^\| `(LAB-[A-Z0-9]+-\d{3})` \|", (ROOT / "docs/doctor.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(used) == sorted(listed)


def test_errors_that_stop_up_are_mended_before_it() -> None:
    """The codes that stop `up`, by the table of docs/doctor.md and the checks' sources, are causes.BLOCKING."""
    text = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(LAB-[A-Z0-9]+-\d{3})` \|.*\|(.*)\|$", text, re.MULTILINE)
    listed = {code for code, level in rows if re.search("stops (an )?`up`|error, also in `up`", level)}
    sources = set()
    for check in CHECKS:
        if check.stops.endswith("up"):
            module, name = check.function.split(".")
            source = inspect.getsource(getattr(import_module(f"labctl.backends.docker.checks.{module}"), name))
            sources |= set(re.findall(r'error\("(LAB-[A-Z0-9]+-\d{3})"', source))
    assert sources
    assert listed | sources <= set(causes.BLOCKING)


def test_a_finding_is_what_scripts_rely_on() -> None:
    """A finding's JSON has the ten keys, with `seen` from the summary, and is serializable."""
    document = to_json(ok("LAB-HOST-001", "well"))
    assert set(document) == {
        *("code", "level", "node", "summary", "impact", "fix", "auto_fixable"),
        *("seen", "why", "runnable"),
    }
    assert (document["seen"], document["why"], document["runnable"]) == ("well", "", False)
    assert json.dumps(document)


@pytest.mark.parametrize("check", [*CHECKS, *NODE_CHECKS], ids=lambda check: check.function)
def test_every_check_that_is_listed_is_a_function(check: Check) -> None:
    """Each check's module has a function of its name."""
    module = import_module(f"labctl.backends.docker.checks.{check.function.partition('.')[0]}")
    assert callable(getattr(module, check.name))


def test_a_preflight_loads_only_the_checks_that_can_stop_its_command() -> None:
    """Importing labctl.flows and run loads no module of checks; checks that stop `run` are all in `host`."""
    program = (
        "import sys, labctl.flows, labctl.backends.docker.checks.run as run;"
        "print(*{check.function.partition('.')[0] for check in run.CHECKS}"
        " & {m.rpartition('docker.checks.')[2] for m in sys.modules if 'docker.checks.' in m})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert {check.function.partition(".")[0] for check in CHECKS if check.stops == "run"} == {"host"}

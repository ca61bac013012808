"""A lab over several hosts, some of which fail: the lab uses the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from support import builders
from support.fake_backend import FakeBackend

from labctl.backends.docker.checks import run
from labctl.backends.docker.compose import render
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import ledger
from labctl.backends.docker.lab import capabilities, cluster
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import ConfigError, HostError
from labctl.model import Lab
from labctl.runs import labs
from labctl.system import hostdump

ROUTES = """\
Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
"""
NAMES = ("h0", "h1", "h2")
Open = Callable[..., Cluster]


class Engine(FakeBackend):
    """An engine that answers for its limits and NVIDIA's device driver only after ``meet`` returns."""

    def __init__(self, meet: Callable[[], object] = lambda: None) -> None:
        """Call `meet` before each answer about limits."""
        super().__init__()
        self.meet = meet

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:  # noqa: ARG002
        """Call `meet`; grant all limits."""
        self.meet()
        return True


def refuse() -> None:
    """Raise HostError that a container is not done within 120 s."""
    raise HostError("cannot start a container: not done within 120 s", hint="labctl doctor")


def dump(number: int, gpus: tuple[int, ...]) -> hostdump.HostDump:
    """Return the survey of host hN, at address 10.0.0.N+1, with these GPUs."""
    return hostdump.HostDump(
        f"h{number}",
        facts={
            "id": "uid=1000(ann) gid=1000(ann)",
            "home": "/home/ann",
            "ssh": f"10.0.0.9 51000 10.0.0.{number + 1} 22",
            "addresses": f"2: eth0    inet 10.0.0.{number + 1}/24 brd 10.0.0.255 scope global eth0",
        },
        files={"proc/meminfo": "MemTotal: 2048 kB\n", "proc/net/route": ROUTES, "sys/class/net/eth0/mtu": "1500\n"},
        nodes={f"dev/nvidia{minor}": 44 for minor in gpus},
    )


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return the context of lab `demo` in tmp_path."""
    return Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})


@pytest.fixture
def opened(context: Context) -> Open:
    """Return a function that makes a cluster of three hosts with these GPUs, engines and settings."""

    def make(*gpus: tuple[int, ...], engines: tuple[Engine, ...] = (), **settings: str) -> Cluster:
        """Return a cluster of hosts h0, h1 and h2 with these GPUs, engines and settings."""
        loaded = context.settings()
        for key, value in settings.items():
            loaded = loaded.with_value(key, value, origin="test")
        daemons = dict(zip(NAMES, engines or tuple(Engine() for _ in NAMES), strict=True))
        return Cluster(
            settings=loaded,
            directory=context.directory,
            engine=MultiHostEngine(cast(dict[str, FakeBackend], daemons), {}),
            daemons=cast(dict[str, DockerEngine], daemons),
            inventory=tuple(InventoryHost(name=name) for name in NAMES),
            dumps={name: dump(number, gpus[number] if gpus else ()) for number, name in enumerate(NAMES)},
        )

    return make


@pytest.mark.parametrize(
    ("accelerator", "image", "origin", "expected"),
    [
        ("cpu", "labctl/horovod", "workload mnist-horovod", "labctl/horovod"),
        ("nvidia", "labctl/horovod", "workload mnist-horovod", "labctl/nvidia-horovod"),
        ("intel", "labctl/horovod", "workload mnist-horovod", "labctl/intel-tensorflow"),
        ("nvidia", "labctl/horovod", ".env:3", "labctl/horovod"),
        ("nvidia", "", "default", "labctl/nvidia"),
    ],
)
def test_an_accelerator_may_have_its_own_of_the_image_that_a_workload_needs(
    context: Context, accelerator: str, image: str, origin: str, expected: str
) -> None:
    """LAB_IMAGE from a workload is mapped to the accelerator's image of that kind; from .env it is taken as it is."""
    loaded = context.settings().with_value("LAB_IMAGE", image, origin)
    assert cluster.base_image(loaded, lambda: accelerator) == expected


def files(lab: Lab, *but: str) -> dict[str, str]:
    """Render the lab; return the content of files by path, without those whose path has one of these names."""
    return {file.path: file.content for file in render.render(lab) if not any(name in file.path for name in but)}


def test_engines_are_asked_all_at_once(context: Context, opened: Open) -> None:
    """load_lab() asks the three engines in parallel, and all hosts are usable."""
    together = threading.Barrier(len(NAMES))
    lab, usable = cluster.load_lab(context, opened(engines=tuple(Engine(lambda: together.wait(60)) for _ in NAMES)))
    assert (usable.engine.hosts, usable.failed) == (NAMES, {})
    assert lab.limits.memlock == -1


def test_a_host_whose_engine_fails_is_named_and_its_node_stays_in_the_lab(context: Context, opened: Open) -> None:
    """A host whose engine fails is in `failed`; the lab's files are the same as with all hosts."""
    lab, usable = cluster.load_lab(context, opened(engines=(Engine(), Engine(refuse), Engine())))
    assert usable.engine.hosts == ("h0", "h2")
    assert usable.failed["h1"].message == "h1: cannot start a container: not done within 120 s"
    cured, _ = cluster.load_lab(context, opened())
    assert files(lab) == files(cured)


def test_what_is_known_is_not_asked_again(context: Context, opened: Open) -> None:
    """A second load_lab() does not ask the engines for their limits again."""
    cluster.load_lab(context, opened())
    _, usable = cluster.load_lab(context, opened(engines=tuple(Engine(refuse) for _ in NAMES)))
    assert usable.failed == {}


def test_where_all_engines_fail_all_are_named(context: Context, opened: Open) -> None:
    """If all engines fail, load_lab() raises HostError with all three."""
    with pytest.raises(HostError, match=r"3 hosts failed:\n  h0: .*\n  h1: .*\n  h2: "):
        cluster.load_lab(context, opened(engines=tuple(Engine(refuse) for _ in NAMES)))


@pytest.mark.parametrize(
    ("gpus", "settings", "reason"),
    [
        (((0,), (), (0,)), {}, "h1: this host has no nvidia device"),
        (((0,), (1,), (0,)), {"LAB_DEVICES": "0"}, "h1 has no nvidia device `0`"),
        (((0, 1), (0,), (0, 1)), {"LAB_SLOTS": "2"}, "1 node with 2 slots needs 2 nvidia devices, h1 has 1"),
    ],
)
def test_what_one_host_lacks_is_told_of_it_and_changes_nothing_for_the_others(
    context: Context, opened: Open, gpus: tuple[tuple[int, ...], ...], settings: dict[str, str], reason: str
) -> None:
    """A host that lacks devices is in `failed` with the reason; other nodes' files are as with all hosts."""
    nvidia = {"LAB_ACCELERATOR": "nvidia", **settings}
    lab, usable = cluster.load_lab(context, opened(*gpus, **nvidia))
    assert usable.engine.hosts == ("h0", "h2")
    assert reason in usable.failed["h1"].message
    assert usable.failed["h1"].node == "h1"
    assert list(cluster.preview_lab(opened(*gpus, **nvidia))[1].failed) == ["h1"]
    cured, all_of_them = cluster.load_lab(context, opened(gpus[0], gpus[0], gpus[0], **nvidia))
    assert all_of_them.failed == {}
    assert files(lab, "worker-1") == files(cured, "worker-1")
    assert files(lab) != files(cured)


def test_what_all_hosts_lack_is_one_mistake(context: Context, opened: Open) -> None:
    """If all hosts lack the devices, load_lab() raises one HostError, and ConfigError for LAB_DEVICES."""
    with pytest.raises(HostError, match=r"^this host has no nvidia device"):
        cluster.load_lab(context, opened(LAB_ACCELERATOR="nvidia"))
    with pytest.raises(ConfigError, match=r"^LAB_DEVICES: h0 has no nvidia device `7`"):
        cluster.load_lab(context, opened((0,), (0,), (0,), LAB_ACCELERATOR="nvidia", LAB_DEVICES="7"))


def test_a_host_that_does_not_answer_and_lacks_devices_is_told_not_to_answer(opened: Open) -> None:
    """A host that is silent and lacks devices is in `failed` as silent."""
    silent = opened((0,), (), (0,), LAB_ACCELERATOR="nvidia").excluding({"h1": HostError("h1: timed out", node="h1")})
    assert cluster.preview_lab(silent)[1].failed["h1"].message == "h1: timed out"


def test_down_forgets_the_hosts_that_have_nothing_any_more(
    context: Context, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a `down` that fails on h1, only h1 is left in the ledger."""
    monkeypatch.setattr(ledger, "backend_here", lambda _: FakeBackend())
    engines = tuple(Engine() for _ in NAMES)
    for name, engine in zip(NAMES, engines, strict=True):
        node = builders.container("worker-0", host=name, directory=str(context.directory))
        engine.seen = ObservedState(host=name, containers=(node,))
        monkeypatch.setattr(engine, "identity", lambda name=name: f"engine of {name}")
        ledger.note(context.directory, name, f"engine of {name}")
    monkeypatch.setattr(engines[1], "remove", lambda *_: refuse())
    with pytest.raises(HostError, match="cannot start a container"):
        labs.take_down(builders.backend(context, opened(engines=engines, LAB_SHARED_DIR="/")), "labctl down")
    assert [host.host for host in ledger.left_over(context.directory, {})] == ["h1"]


@pytest.mark.parametrize(("gone", "over_ssh"), [("", True), ("launcher", False), ("worker_1", False)])
def test_only_a_lab_that_is_running_is_asked_over_ssh_meanwhile(opened: Open, gone: str, *, over_ssh: bool) -> None:
    """begin_reach() starts only if launcher and all workers run."""
    connected = opened()
    changes = {gone: {"state": "exited"}} if gone else {}
    nodes = tuple(builders.node(number, host=name) for number, name in enumerate(NAMES))
    of = builders.lab(nodes, hosts=tuple(builders.host(name=name) for name in NAMES))
    assert bool(connected.begin_reach(builders.observed(of, **changes))) == over_ssh


def test_hosts_are_examined_without_a_first_one_that_was_never_reached(context: Context, opened: Open) -> None:
    """With h0 never reached, hardware is an error, unless unplaced: then h0 lacks all, and h1 and h2 are as found."""
    lost = HostError("h0: no sshd on port 2222: connection refused", node="h0")
    whole = opened()
    dumps = {name: whole.dumps[name] for name in NAMES[1:]}
    headless = replace(whole, dumps=dumps, failed={"h0": lost})
    with pytest.raises(HostError, match="no sshd"):
        cluster.detect_hardware(headless)
    hardware = cluster.detect_hardware(replace(headless, unplaced=True))
    assert [host.name for host in hardware.hosts] == [*NAMES]
    assert [host.memory for host in hardware.hosts] == [0, 2 << 20, 2 << 20]
    assert list(hardware.lacking) == ["h0"]


def test_doctor_goes_on_without_a_first_host_that_was_never_reached(
    context: Context, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With h0 never reached, doctor names it and runs the checks of the other hosts, without those of the whole lab."""
    lost = HostError("h0: no sshd on port 2222: connection refused", node="h0")
    whole = opened()
    headless = replace(whole, dumps={name: whole.dumps[name] for name in NAMES[1:]}, failed={"h0": lost})
    examined: list[tuple[str, ...]] = []

    def note(_: Context, __: Cluster, lab: Lab, **___: str) -> None:
        """Record the lab's containers."""
        examined.append(lab.containers)

    monkeypatch.setattr(run, "check_context", note)
    monkeypatch.setattr(run, "examine", lambda _, __, checks, **___: tuple(check.scope for check in checks))
    first, *scopes = run.findings_on(context, headless, lambda _: None)
    assert (getattr(first, "code", ""), getattr(first, "node", "")) == ("LAB-HOST-004", "h0")
    assert examined == [("launcher", "worker-0", "worker-1", "worker-2")]
    assert {*map(str, scopes)} == {"machine", "host", "node"}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), []),
        (("/dev/infiniband/uverbs0",), ["h1 cannot raise memlock for a container: RDMA pins memory"]),
    ],
)
def test_a_limit_that_a_host_refuses_is_warned_of_only_where_the_lab_needs_it(
    context: Context, opened: Open, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], expected: list[str]
) -> None:
    """h1 refuses memlock and nofile: with RDMA there is a warning of memlock with the reason, else none."""
    messages: list[str] = []
    listening = replace(context, emit=lambda event: messages.append(event.text))
    whole = opened()
    hardware = cluster.detect_hardware(whole)
    hosts = (hardware.hosts[0], replace(hardware.hosts[1], infiniband=devices), hardware.hosts[2])
    monkeypatch.setattr(cluster, "detect_hardware", lambda _: replace(hardware, hosts=hosts))
    refused = {"h1": ("memlock", "nofile")}
    monkeypatch.setattr(capabilities, "probe", lambda _, __, ___, host, ____: refused.get(host, ()))
    cluster.load_lab(listening, whole)
    assert [text.partition("; ")[0] for text in messages] == expected

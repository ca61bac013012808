"""Reading hosts at the same time, judging them beside each other, and what the lab keeps of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders

from labctl.backends import health
from labctl.backends.health import HostHealth, Kept
from labctl.errors import Failures, HostError
from labctl.health import catalogue, examine, rules, script
from labctl.health.model import (
    Answer,
    Check,
    Condition,
    KernelLine,
    Level,
    LineCheck,
    OwnCheck,
    Reading,
    Rules,
    Snapshot,
    Subject,
)
from labctl.model import Device, DeviceMapping, Lab, Mount
from labctl.system import parallel
from labctl.system.hostdump import HostDump
from labctl.system.process import CompletedProcess


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield the width of a link, and the version that only a full look takes."""
    yield Reading(name="width", value=int(dump.facts["width"]), item="eth0", kind="fact", kin="x", source="")
    if "version" in dump.facts:
        yield Reading(name="version", value=dump.facts["version"], item="eth0", kind="fact", source="")


LINKS = Subject(
    name="Links",
    script="fact width 16",
    slow="fact version v1",
    readings=readings,
    checks=(
        Check(name="width", reading="width", judge=rules.less_than_neighbours),
        Check(name="errors", reading="errors", judge=rules.grew),
    ),
    lines=(LineCheck(name="xid", pattern="Xid", judge=lambda _: Answer("bad", "Xid")),),
)
MACHINE = Reading(name="machine", value="m1", kind="fact", source="")
GOOD = "labctl survey\nfact width\n\t16\nend\n"


@pytest.fixture(autouse=True)
def _subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make LINKS the only subject of hosts."""
    monkeypatch.setattr(catalogue, "HOST", (LINKS,))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return a lab of three hosts gpu-0 to gpu-2, two nodes on gpu-0 and one on each other."""
    hosts = ("gpu-0", "gpu-0", "gpu-1", "gpu-2")
    nodes = tuple(builders.node(number, host=host) for number, host in enumerate(hosts))
    return builders.lab(
        nodes, directory=tmp_path, hosts=tuple(builders.host(name=name) for name in dict.fromkeys(hosts))
    )


def width(value: int | None = 16, **fields: Any) -> Reading:
    """Build the width of eth0."""
    return replace(Reading(name="width", value=value, item="eth0", kind="fact", kin="x", source=""), **fields)


def snapshot(*read: Reading, **fields: Any) -> Snapshot:
    """Build readings of now, 1000 s after the start."""
    return Snapshot(**{"time": 9000.0, "boot": "b1", "uptime": 1000.0, "readings": read, **fields})


class Hosts:
    """Hosts that answer a script with a text each; an error is raised, or is a failure, and an event is waited for."""

    def __init__(self, **answers: str | Exception | threading.Event) -> None:
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.readers: dict[str, threading.Thread] = {}
        self.seconds: list[float] = []

    def __call__(
        self,
        script: str,  # noqa: ARG002 - as Backend.on_hosts
        arguments: tuple[str, ...],  # noqa: ARG002
        seconds: float,
        hosts: Collection[str],
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Answer as the host of this name does."""
        (name,) = hosts
        self.seconds.append(seconds)
        self.readers[name] = threading.current_thread()
        answer = self.answers[name]
        if isinstance(answer, threading.Event):
            answer.wait()
            answer = GOOD
        if isinstance(answer, HostError):
            return {}, {name: answer}
        if isinstance(answer, Exception):
            raise answer
        return {name: CompletedProcess(("sh",), 0, answer, "")}, {}


def look(hosts: Hosts, *, full: bool = False, **given: Any) -> tuple[dict[str, Snapshot], dict[str, HostError]]:
    """Read these hosts."""
    return health.look(hosts, tuple(hosts.answers), (LINKS,), given.pop("rules", Rules()), full=full, **given)


# --- look ------------------------------------------------------------------------------------------------


def test_each_host_has_readings_or_an_error() -> None:
    """Read hosts of which one is lost, one prints half, and one prints garbage: each has its answer."""
    hosts = Hosts(
        good=GOOD, lost=HostError("no route", node="lost"), half=GOOD[:20], garbage="labctl survey\nlines\n\0\x01\nend"
    )
    snapshots, errors = look(hosts)
    assert list(snapshots) == ["good", "garbage"]
    assert {host: error.message for host, error in errors.items()} == {
        "lost": "no route",
        "half": "facts from half are incomplete: the text ends with `fact w`",
    }
    assert [reading.value for reading in snapshots["good"].readings] == [16, None]
    (unknown, _) = snapshots["garbage"].readings
    assert (unknown.name, unknown.value) == ("Links", None)


def test_an_answer_that_the_time_limit_cut_is_used() -> None:
    """Read a host that prints its files and half of what a tool says: a reading, and no error."""
    cut = f"{GOOD.removesuffix('end' + chr(10))}{script.LATE}\nfact tool\n\thal"
    for full in (False, True):
        snapshots, errors = look(Hosts(cut=cut), full=full)
        assert errors == {}
        assert snapshots["cut"].readings[0] == width(kin="x", subject="Links")


def test_a_host_that_does_not_answer_in_time_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read two hosts of which one is silent: within the limit the other has its readings, the silent one an error."""
    over, began = threading.Event(), time.monotonic()
    hosts = Hosts(good=GOOD, slow=over)

    def now() -> float:
        """Return the time, which stands still until the other host was read."""
        reader = hosts.readers.get("good")
        return time.monotonic() if reader and not reader.is_alive() else began

    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=now))
    snapshots, errors = look(hosts, limit=0.2)
    over.set()
    assert list(snapshots) == ["good"]
    assert errors["slow"].message == "slow did not answer within 0.2 s"
    assert (errors["slow"].node, errors["slow"].hint) == ("slow", "labctl doctor --node slow")


@pytest.mark.parametrize(
    ("full", "given", "seconds"),
    [(False, {}, health.SECONDS), (True, {}, health.FULL_SECONDS), (False, {"limit": 3.0}, 3.0)],
)
def test_the_slowest_own_check_adds_to_the_time_limit(full: bool, given: dict[str, float], seconds: float) -> None:
    """Read with own checks of 2 and 5 s, and one that is off: the limit of a look has the time of the slowest."""
    checks = (OwnCheck(name=name, command=(name,), seconds=seconds) for name, seconds in (("a", 2), ("b", 5), ("c", 9)))
    own = Rules(own=tuple(checks), off=frozenset({"c"}))
    hosts = Hosts(good=GOOD)
    look(hosts, full=full, rules=own, **given)
    assert hosts.seconds == [seconds + 5]


def test_a_bug_is_not_hidden() -> None:
    """Raise another error than a host's: it comes out."""
    with pytest.raises(ZeroDivisionError):
        look(Hosts(good=ZeroDivisionError()))


def test_only_the_labs_directory_and_its_cache_must_be_writable(lab: Lab) -> None:
    """List the folders of a lab after its first `up`: a user's mount of data is only read, as is a read-only one."""
    mounts = (
        Mount(source=str(lab.directory / "runs/.outputs"), target="/workspace/runs/.outputs"),
        Mount(source=str(lab.directory / "runs"), target="/workspace/runs", read_only=True),
        Mount(source="/home/ann/.cache/labctl", target="/workspace/.cache"),
        Mount(source="/data", target="/data"),
    )
    mounted = replace(lab, mounts=mounts)
    assert health.folders_of(mounted) == {}
    (lab.directory / health.NODES).mkdir(parents=True)
    assert health.folders_of(mounted)["gpu-0"] == (
        f"own rw {lab.directory}/runs/.outputs",
        f"own r {lab.directory}/runs",
        "own rw /home/ann/.cache/labctl",
        "r /data",
    )


# --- judge -----------------------------------------------------------------------------------------------


def judged(lab: Lab, failed: Failures | None = None, since: float | None = None, **read: Snapshot) -> Any:
    """Return the verdicts on hosts by name."""
    snapshots = {name.replace("_", "-"): now for name, now in read.items()}
    return {verdict.host: verdict for verdict in health.judge(lab, snapshots, failed or {}, Rules(), since=since)}


def sentences(verdict: HostHealth) -> list[str]:
    """Return what is wrong with a host."""
    return [condition.sentence() for condition in verdict.wrong]


def test_hosts_are_judged_beside_each_other(lab: Lab) -> None:
    """Judge three hosts, one narrower: it alone is bad, with the nodes on it; a silent one is unknown."""
    found = judged(
        lab,
        {"gpu-3": HostError("no route")},
        gpu_0=snapshot(width(8)),
        gpu_1=snapshot(width()),
        gpu_2=snapshot(width()),
    )
    assert {host: verdict.level for host, verdict in found.items()} == {
        "gpu-0": "bad", "gpu-1": "ok", "gpu-2": "ok", "gpu-3": "unknown"
    }  # fmt: skip
    assert sentences(found["gpu-0"]) == ["eth0: width 8, 16 on 2 others"]
    assert found["gpu-0"].nodes == ("worker-0", "worker-1")
    assert (found["gpu-3"].error, found["gpu-3"].conditions, found["gpu-3"].nodes) == ("no route", (), ())


def keep(lab: Lab, now: Snapshot, level: Level = "ok", *, full: bool = True) -> Kept:
    """Keep readings of gpu-0 with this verdict, and return what is kept."""
    verdict = HostHealth(host="gpu-0", nodes=(), level=level, conditions=())
    health.keep(lab.directory, {"gpu-0": now}, [verdict], full=full)
    kept = health.read(lab.directory, "gpu-0")
    assert kept
    return kept


def test_a_host_is_compared_with_its_last_good_readings_and_the_lock_file(lab: Lab) -> None:
    """Judge a host that was good once and has a lock file: both are compared, and its last good time is told."""
    keep(lab, snapshot(width(32), time=1000.0))
    locked = {"hosts": {"gpu-0": {"driver": "x", "hardware": {"machine": "m1", "eth0": {"width": "64"}}}}}
    (lab.directory / "lab.lock").write_text(json.dumps(locked))
    verdict = judged(lab, gpu_0=snapshot(width(), MACHINE))["gpu-0"]
    assert sentences(verdict) == ["eth0: width 16, 32 before", "eth0: width 16, 64 in lab.lock"]
    assert (verdict.level, verdict.last_good) == ("remark", 8000)


def test_a_card_of_the_lock_file_that_is_not_there_is_bad_unless_its_tool_is_silent(tmp_path: Path) -> None:
    """Judge a host without good readings that lacks one of two locked cards: bad; if no card is told, unknown only."""
    lab = builders.lab(directory=tmp_path, accelerator="nvidia")
    cards = [
        Reading(name=name, value=value, item=f"GPU {at}", kind="fact", kin="H100", source="nvidia-smi -q -x")
        for at in range(2)
        for name, value in (("VBIOS", "96.00"), ("model", "H100"))
    ]
    locked = {"hosts": {"local": {"hardware": health.frozen(snapshot(MACHINE, width(), *cards))}}}
    (tmp_path / "lab.lock").write_text(json.dumps(locked))
    assert health.locked(tmp_path)["local"]["GPU 1"] == {"VBIOS": "96.00", "model": "H100"}
    lost = judged(lab, local=snapshot(MACHINE, width(), *cards[:2]))["local"]
    assert sentences(lost) == ["GPU 1: is not there; lab.lock has model H100, VBIOS 96.00"]
    assert lost.level == "bad"
    silent = Reading(name="nvidia-smi", value=None, source="nvidia-smi", why="nvidia-smi did not answer in 5 s")
    assert sentences(judged(lab, local=snapshot(MACHINE, width(), silent))["local"]) == []


@pytest.mark.parametrize("machine", ["m2", None])
def test_a_lock_file_of_another_machine_says_nothing(lab: Lab, machine: str | None) -> None:
    """Judge a host of the same name with a lock file of another machine, or of an unknown one: no word."""
    other = [replace(MACHINE, value=machine)] if machine else []
    locked = health.frozen(snapshot(width(64), width(item="0000:3b:00.0"), *other))
    (lab.directory / "lab.lock").write_text(json.dumps({"hosts": {"gpu-0": {"hardware": locked}}}))
    assert sentences(judged(lab, gpu_0=snapshot(width(), MACHINE))["gpu-0"]) == []
    assert sentences(judged(lab, gpu_0=snapshot(width()))["gpu-0"]) == []


def test_cards_are_not_missed_in_a_lab_of_another_accelerator(tmp_path: Path) -> None:
    """Judge a host of a lab without accelerator whose lock file and last good readings have a GPU: nothing is gone."""
    gpu = [
        Reading(name=name, value="1", item="GPU 0", kind="fact", kin="H100", source="nvidia-smi -q", subject="NVIDIA")
        for name in ("VBIOS", "device memory", "model")
    ]
    before = snapshot(MACHINE, width(), *gpu, time=1.0)
    (tmp_path / "lab.lock").write_text(json.dumps({"hosts": {"local": {"hardware": health.frozen(before)}}}))
    ok = HostHealth(host="local", nodes=(), level="ok", conditions=())
    health.keep(tmp_path, {"local": before}, [ok], full=True)
    lab = builders.lab(directory=tmp_path, accelerator="cpu")
    assert sentences(judged(lab, local=snapshot(MACHINE, width()))["local"]) == []
    as_it_was = builders.lab(directory=tmp_path, accelerator="nvidia")
    assert sentences(judged(as_it_was, local=snapshot(MACHINE, width()))["local"]) == [
        "GPU 0: is gone; it had VBIOS 1, device memory 1, model 1"
    ]


def test_bad_findings_last_until_they_are_mended_or_a_shorter_time_is_asked_for(lab: Lab) -> None:
    """Judge errors, a line and a lost item again: all are told since the last good look, none of the last minute."""
    errors = Reading(name="errors", value=3, item="eth0", kind="counter", source="")
    now = snapshot(width(), replace(errors, value=5), lines=(KernelLine(500.0, "Xid"),))
    keep(lab, snapshot(width(), errors, width(item="eth1"), time=1000.0))
    keep(lab, replace(now, time=8990.0), "bad")
    told = ["eth0: errors +2", "Xid, 8m ago", "eth1: is gone; it had width 16"]
    assert sentences(judged(lab, gpu_0=now)["gpu-0"]) == told
    assert sentences(judged(lab, since=60, gpu_0=now)["gpu-0"]) == []
    assert sentences(judged(lab, since=8500, gpu_0=now)["gpu-0"]) == told
    assert sentences(judged(lab, since=600, gpu_0=now)["gpu-0"]) == ["Xid, 8m ago"]


def test_a_finding_at_a_pci_address_names_the_device() -> None:
    """Name conditions of a device's address, of another address, and of none."""
    now = snapshot(Reading(name="PCI address", value="0000:3b:00.0", item="GPU 2", source=""))
    plain = [
        Condition(check="x", subject="PCIe", level="bad", item=item) for item in ("0000:3b:00.0", "0000:5e:00.0", "")
    ]
    named = health.named(now, plain, examine.Past())
    assert [each.item for each in named] == ["GPU 2 (0000:3b:00.0)", "0000:5e:00.0", ""]
    gone = examine.Past(
        snapshot=snapshot(Reading(name="PCI address", value="0000:5e:00.0", item="GPU 3", source="", kind="fact"))
    )
    assert [each.item for each in health.named(now, plain, gone)][1] == "GPU 3 (0000:5e:00.0)"


def test_a_kernel_line_on_a_card_accuses_the_node_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge a host of two nodes with an Xid of one card, which the lab knows by its PCI address: the other is fit."""
    monkeypatch.setattr(catalogue, "HOST", ())
    cards = [Device(id=str(at), path=f"/dev/nvidia{at}", pci=f"0000:0{at + 1}:00.0") for at in range(2)]
    members = [builders.node(at, devices=DeviceMapping(devices=(card,))) for at, card in enumerate(cards)]
    lab = builders.lab(tuple(members), accelerator="nvidia")
    addresses = [Reading(name="PCI address", value=card.pci, item=f"GPU {card.id}", source="") for card in cards]
    now = snapshot(*addresses, lines=(KernelLine(990, "NVRM: Xid (PCI:0000:02:00): 48, pid=7, DBE"),))
    (verdict,) = health.judge(lab, {"local": now}, {}, Rules())
    (found,) = verdict.wrong
    assert found.item == "GPU 1 (0000:02:00.0)"
    assert health.nodes_of(lab, verdict, found) == ("worker-1",)


@pytest.mark.parametrize(
    ("subject", "item", "nodes"),
    [
        ("NVIDIA", "GPU 1", ("worker-1",)),
        ("NVIDIA", "GPU 1 NVLink 0", ("worker-1",)),
        ("NVIDIA", "GPU 7", ("worker-0", "worker-1")),
        ("Intel", "GPU renderD129", ("worker-1",)),
        ("Changes", "GPU 0", ("worker-0",)),
        ("Links", "GPU 1 (0000:02:00.0)", ("worker-1",)),
        ("Links", "0000:01:00.0", ("worker-0",)),
        ("Links", "socket 1", ("worker-0", "worker-1")),
        ("Changes", "NUMA node 1", ("worker-0", "worker-1")),
        ("Changes", "eth0", ("worker-0", "worker-1")),
        ("Own", "", ("worker-0", "worker-1")),
    ],
)
def test_a_finding_is_about_the_node_that_has_the_device_else_about_all_of_the_host(
    subject: str, item: str, nodes: tuple[str, ...]
) -> None:
    """Find the nodes of conditions on a host of two nodes with a card each: numbers of other hardware do not count."""
    cards = [Device(id=str(at), path=f"/dev/dri/renderD{128 + at}", pci=f"0000:0{at + 1}:00.0") for at in range(2)]
    members = [builders.node(at, devices=DeviceMapping(devices=(card,))) for at, card in enumerate(cards)]
    lab = builders.lab((*members, builders.node(2, host="other")))
    verdict = HostHealth(host="local", nodes=("worker-0", "worker-1"), level="bad", conditions=())
    condition = Condition(check="x", subject=subject, level="bad", item=item)
    assert health.nodes_of(lab, verdict, condition) == nodes


@pytest.mark.parametrize(
    ("subject", "item", "changed", "nodes"),
    [
        ("NVIDIA", "GPU 5", "", ()),
        ("NVIDIA", "GPU 1", "", ("worker-1",)),
        ("NVIDIA", "0000:06:00.0", "", ()),
        ("NVIDIA", "0000:09:00.0", "", ()),
        ("NVIDIA", "GPU 1 (0000:06:00.0)", "", ()),
        ("NVIDIA", "", "", ("worker-0", "worker-1")),
        ("Changes", "GPU 5", "NVIDIA", ()),
        ("Changes", "GPU 0", "NVIDIA", ("worker-0",)),
        ("Changes", "eth0", "Links", ("worker-0", "worker-1")),
        ("Links", "GPU 5 (0000:06:00.0)", "", ()),
        ("Links", "0000:06:00.0", "", ()),
        ("Links", "0000:09:00.0", "", ("worker-0", "worker-1")),
        ("Links", "/data (old)", "", ("worker-0", "worker-1")),
        ("Own", "", "", ("worker-0", "worker-1")),
    ],
)
def test_a_device_that_the_lab_leaves_to_others_concerns_no_node(
    subject: str, item: str, changed: str, nodes: tuple[str, ...]
) -> None:
    """Find the nodes of conditions on a host of eight GPUs, of which a lab uses two: not the others' GPUs."""
    cards = [Device(id=str(at), path=f"/dev/nvidia{at}", pci=f"0000:0{at + 1}:00.0") for at in range(8)]
    members = tuple(builders.node(at, devices=DeviceMapping(devices=(card,))) for at, card in enumerate(cards[:2]))
    host = builders.host(devices=tuple(cards))
    lab = builders.lab(members, hosts=(host,), accelerator="nvidia")
    verdict = HostHealth(host="local", nodes=("worker-0", "worker-1"), level="bad", conditions=())
    condition = Condition(check="x", subject=subject, level="bad", item=item, changed=changed)
    assert health.nodes_of(lab, verdict, condition) == nodes


@pytest.mark.parametrize(
    ("count", "item", "nodes"),
    [
        (6, "GPU 7", ("worker-0", "worker-1")),
        (7, "GPU 7", ("worker-0", "worker-1")),
        (7, "GPU 0 (0000:99:00.0)", ("worker-0", "worker-1")),
        (7, "GPU 6", ()),
        (8, "GPU 9", ()),
    ],
)
def test_a_lost_device_concerns_all_nodes_of_a_lab_that_shares_the_whole_host(
    count: int, item: str, nodes: tuple[str, ...]
) -> None:
    """Find the nodes of a GPU that is gone, on a host whose two nodes have three each of these that are left."""
    cards = tuple(Device(id=str(at), path=f"/dev/nvidia{at}", pci=f"0000:0{at + 1}:00.0") for at in range(count))
    shares = (cards[:3], cards[3:6])
    members = tuple(builders.node(at, devices=DeviceMapping(devices=share)) for at, share in enumerate(shares))
    lab = builders.lab(members, hosts=(builders.host(devices=cards),), accelerator="nvidia")
    verdict = HostHealth(host="local", nodes=("worker-0", "worker-1"), level="bad", conditions=())
    gone = Condition(check="changed", subject="Changes", level="bad", item=item, changed="NVIDIA")
    assert health.nodes_of(lab, verdict, gone) == nodes


# --- what is kept ----------------------------------------------------------------------------------------


def test_only_good_readings_become_the_last_good_ones(lab: Lab) -> None:
    """Keep readings of each level: those that are bad or unknown are the last ones, not the good ones."""
    first = snapshot(width(), time=1.0)
    assert keep(lab, first, "unknown").good is None
    assert keep(lab, first, "remark").good == first
    for level in ("bad", "unknown"):
        kept = keep(lab, snapshot(width(8), time=2.0), level)
        assert (kept.good, kept.last.time, kept.level) == (first, 2.0, level)


def test_a_host_of_which_nothing_could_be_read_is_not_kept_as_good(lab: Lab) -> None:
    """Judge a host with unknown readings only, and keep it: unknown, without good readings."""
    now = snapshot(width(None, why="no right"), lines_why="no right")
    verdict = judged(lab, gpu_0=now)["gpu-0"]
    assert verdict.level == "unknown"
    assert keep(lab, now, verdict.level).good is None


def test_a_host_whose_nvidia_smi_hangs_is_unknown_and_not_kept_as_good(tmp_path: Path) -> None:
    """Judge a host whose tool does not answer: unknown though its links are good, bad if the kernel says so."""
    lab = builders.lab(directory=tmp_path, accelerator="nvidia")
    why = "nvidia-smi did not answer in 5 s"
    silent = Reading(name="nvidia-smi", value=None, source="nvidia-smi", why=why, subject="NVIDIA")
    (hung,) = health.judge(lab, {"local": snapshot(width(), silent)}, {}, Rules())
    assert (hung.level, [each.text for each in hung.conditions if each.level == "unknown"]) == ("unknown", [why])
    health.keep(tmp_path, {"local": snapshot(width(), silent)}, [hung], full=False)
    kept = health.read(tmp_path, "local")
    assert kept
    assert (kept.level, kept.good) == ("unknown", None)
    lost = snapshot(width(), silent, lines=(KernelLine(990, "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off"),))
    assert judged(lab, local=lost)["local"].level == "bad"
    assert judged(builders.lab(directory=tmp_path), local=snapshot(width()))["local"].level == "ok"


def test_a_quick_look_completes_the_earlier_full_one(lab: Lab) -> None:
    """Keep a full look, then a quick one: the good readings have the quick values, and the rest of the full ones."""
    version = Reading(name="version", value="v1", item="eth0", kind="fact", source="", slow=True)
    keep(lab, snapshot(width(32), width(32, item="eth1"), version, time=1.0))
    kept = keep(lab, snapshot(width(), time=2.0), full=False)
    assert kept.good == snapshot(width(), version, time=2.0)
    assert kept.last == snapshot(width(), time=2.0)
    assert keep(lab, snapshot(width(), time=3.0)).good == snapshot(width(), time=3.0)


@pytest.mark.parametrize("full", [True, False])
def test_a_card_is_missed_whose_tool_was_silent_for_a_while(lab: Lab, full: bool) -> None:
    """Keep a good look in which a tool was silent, after one with its cards and counters: these stay the good ones."""
    errors = Reading(name="errors", value=3, item="GPU 1", kind="counter", source="smi -q")
    cards = [width(item=f"GPU {at}", source="smi -q") for at in range(2)]
    silent = Reading(name="smi", value=None, source="smi", why="it did not answer in 5 s")
    keep(lab, snapshot(width(), *cards, errors, time=1.0), full=full)
    kept = keep(lab, snapshot(width(), silent, time=2.0), full=full)
    assert kept.good == snapshot(width(), silent, *cards, errors, time=2.0)
    grown = snapshot(width(), *cards, replace(errors, value=5), time=3.0)
    assert sentences(judged(lab, gpu_0=grown)["gpu-0"]) == ["GPU 1: errors +2"]
    assert sentences(judged(lab, gpu_0=snapshot(width(), cards[0], time=3.0))["gpu-0"]) == [
        "GPU 1: is gone; it had width 16"
    ]


def test_values_that_are_unknown_for_a_while_are_kept_but_no_counters_of_another_start(lab: Lab) -> None:
    """Keep a look with unknown values of a card, after a restart: the facts stay the good ones, counters do not."""
    errors = Reading(name="errors", value=3, item="eth0", kind="counter", source="")
    keep(lab, snapshot(width(), errors, time=1.0))
    unknown = [width(None, why="no answer"), replace(errors, value=None, why="no answer")]
    kept = keep(lab, snapshot(*unknown, time=2.0, boot="b2"))
    assert kept.good == snapshot(unknown[1], width(), time=2.0, boot="b2")


def test_a_quick_look_after_a_full_one_finds_nothing_gone_or_moved(lab: Lab) -> None:
    """Read a host fully, then quickly, and fully with another version: only that moved, across the quick look."""
    full, _ = look(Hosts(gpu_0=GOOD.replace("end", "fact slow\nfact version\n\tv1\nend")), full=True)
    keep(lab, full["gpu-0"])
    quick, _ = look(Hosts(gpu_0=GOOD))
    assert sentences(judged(lab, gpu_0=quick["gpu-0"])["gpu-0"]) == []
    keep(lab, quick["gpu-0"], full=False)
    again, _ = look(Hosts(gpu_0=GOOD.replace("end", "fact slow\nfact version\n\tv2\nend")), full=True)
    assert sentences(judged(lab, gpu_0=again["gpu-0"])["gpu-0"]) == ["eth0: version v2, v1 before"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"last": 1}', '{"last": {"time": 1}, "level": "fine"}'])
def test_what_another_labctl_kept_is_ignored(lab: Lab, text: str) -> None:
    """Read files that cannot be read, and none: nothing is kept."""
    assert health.read(lab.directory, "gpu-0") is None
    (lab.directory / health.FOLDER).mkdir(parents=True)
    (lab.directory / health.FOLDER / "gpu-0.json").write_text(text)
    assert health.read(lab.directory, "gpu-0") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"hosts": []}', '{"hosts": {"a": 1}}', '{"hosts": {"a": {"hardware": 1}}}']
)
def test_a_lock_file_of_another_labctl_has_no_fingerprints(lab: Lab, text: str) -> None:
    """Read lock files without fingerprints: none, and no error."""
    (lab.directory / "lab.lock").write_text(text)
    assert health.locked(lab.directory) == {}


def test_the_age_of_a_verdict_tells_what_moved_since(lab: Lab) -> None:
    """Render ages of nodes: never good, good, bad or unknown since, with what moved; unread hosts have none."""
    day = 86_400.0
    driver = Reading(name="driver", value="570", kind="fact", source="")
    good = snapshot(width(), driver, time=0.0)

    def age(level: Level, now: Snapshot, good: Snapshot | None = good) -> str:
        return health.age(Kept(last=now, level=level, good=good), 9 * day)

    assert age("ok", good) == "last good 9d ago"
    assert age("unknown", replace(good, time=8 * day)) == "last good 9d ago, unknown since"
    moved = snapshot(width(8), replace(driver, value="580"), time=8 * day)
    assert age("bad", moved) == "last good 9d ago, bad since, eth0 width, driver changed since"
    assert age("bad", moved, None) == "bad 1d ago, never good"
    keep(lab, good)
    assert health.ages(lab.directory, {"worker-0": "gpu-0", "worker-1": "gpu-0", "worker-2": "gpu-1"}, day) == {
        "worker-0": "last good 1d ago", "worker-1": "last good 1d ago"
    }  # fmt: skip


def test_checks_of_every_accelerator_are_known() -> None:
    """List the names: those of hosts' subjects, of lines, of accelerators' subjects, and of changes."""
    assert {"width", "errors", "xid", "changed", "gaudi-count", "gaudi-ecc"} <= health.known_checks().keys()
    assert {name for name, limit in health.known_checks().items() if limit is not None} >= {"gaudi-ecc", "gpu-pages"}
    assert health.subjects_of("cpu") == (LINKS,)
    assert [subject.name for subject in health.subjects_of("habana")] == ["Gaudi", "Links"]


def test_a_kernel_line_counts_although_a_look_between_could_not_read_the_log(tmp_path: Path) -> None:
    """Keep the lines of the last look that could read them, so that a line written meanwhile is told later."""
    before = Snapshot(time=1.0, boot="b", uptime=10.0, lines=(KernelLine(5.0, "old"),))
    blind = Snapshot(time=2.0, boot="b", uptime=20.0, lines_why="only root reads it")
    completed = health._completed(blind, before, full=False)
    assert examine.since_of(Snapshot(time=3.0, boot="b", uptime=30.0), completed) == 5.0


def test_a_remark_that_only_a_quick_look_saw_is_told_later(lab: Lab) -> None:
    """Keep a good look and a quick one with a remark: the good readings stay, as nobody saw the remark."""
    keep(lab, snapshot(width(), time=1.0))
    assert keep(lab, snapshot(width(8), time=2.0), "remark", full=False).good == snapshot(width(), time=1.0)
    assert keep(lab, snapshot(width(8), time=3.0), "remark").good == snapshot(width(8), time=3.0)


def test_readings_of_another_machine_of_the_name_are_none(lab: Lab) -> None:
    """Judge a machine whose lab directory came from another one: nothing that the other had is missed."""
    of = [Reading(name=examine.MACHINE, value=name, kind="fact", source="") for name in ("here", "there")]
    keep(lab, snapshot(of[1], width(), width(item="eth1"), time=1.0))
    verdict = judged(lab, gpu_0=snapshot(of[0], width(), time=2.0))["gpu-0"]
    assert (sentences(verdict), verdict.last_good) == ([], None)

"""Detection of hosts' missing files: hosts are local directories, queried by the real script."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from support import builders
from support.nearby import Nearby

from labctl import naming
from labctl.backends.docker.compose import render, ssh_keys
from labctl.backends.docker.deploy import drift, provision
from labctl.backends.docker.deploy.drift import Drift
from labctl.backends.docker.engine import Engine
from labctl.model import Lab
from labctl.system.files import outdated, write_all
from labctl.system.process import CompletedProcess

NOTHING = Drift(frozenset(), {})
NEW = "its files are gone"
OTHER = "has other files"


@dataclass(frozen=True)
class Rack:
    """A lab over two hosts, ``red`` with the launcher and ``blue``."""

    lab: Lab
    connections: dict[str, Nearby]

    def find(self) -> Drift:
        """Return which hosts and nodes lack files; fail if a host does not answer."""
        changed = outdated(self.lab.directory, render.render(self.lab))
        stale, mute = drift.find(self.lab, self.connections, changed, ())
        assert mute == {}
        return stale

    def up(self) -> None:
        """Render the lab, make its keys and send each host its files."""
        write_all(self.lab.directory, render.render(self.lab))
        ssh_keys.ensure(self.lab)
        for host in self.lab.hosts:
            provision.send(self.lab, host, self.connections[host.name], "sha256:1111")

    def on(self, host: str) -> Path:
        """Return the lab directory of a host."""
        return Path(self.lab.host(host).directory)


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    """Return a lab on two hosts, with a workload and a clone, and connections that run on this machine."""
    names = ("red", "blue")
    hosts = tuple(
        builders.host(name=name, address="10.0.0.1", directory=str(tmp_path / name / ".labctl/demo")) for name in names
    )
    nodes = tuple(builders.node(number, host=name) for number, name in enumerate(names))
    clones = ((str(tmp_path / "clone"), "clones/DeepSpeedExamples"),)
    lab = builders.lab(nodes, hosts=hosts, network="host", directory=tmp_path / "here", mounts=(), clones=clones)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/main.py").write_text("print()")
    (lab.directory / "workloads/hello").mkdir(parents=True)
    (lab.directory / "workloads/hello/hello.py").write_text("print()")
    return Rack(lab, {name: Nearby(name=name) for name in names})


def test_hosts_that_have_all_lack_nothing(rack: Rack) -> None:
    """Before the files are sent both hosts lack some, afterwards none."""
    assert rack.find().hosts == {"red", "blue"}
    rack.up()
    assert rack.find() == NOTHING


def test_an_edited_workload_goes_to_every_host_and_costs_no_container(rack: Rack) -> None:
    """After an edit of a workload's file, both hosts are to get files and no container is unusable."""
    rack.up()
    (rack.lab.directory / "workloads/hello/hello.py").write_text("print(1)")
    assert rack.find() == Drift(frozenset({"red", "blue"}), {})


def test_an_edited_clone_goes_to_every_host_and_costs_no_container(rack: Rack) -> None:
    """After an edit of a clone's file, both hosts are to get files and no container is unusable."""
    rack.up()
    Path(rack.lab.clones[0][0], "main.py").write_text("print(1)")
    assert rack.find() == Drift(frozenset({"red", "blue"}), {})


def test_what_is_rendered_anew_goes_to_the_host_of_its_node(rack: Rack) -> None:
    """A changed compose file of worker-1 is to be sent to its host `blue` alone."""
    rack.up()
    (rack.lab.directory / naming.compose_path("worker-1")).write_text("")
    assert rack.find() == Drift(frozenset({"blue"}), {})


def test_a_new_key_goes_to_the_launcher_too(rack: Rack) -> None:
    """Without worker-1's keys both hosts are to get files, and worker-1 is unusable."""
    rack.up()
    shutil.rmtree(ssh_keys.ssh_directory(rack.lab, "worker-1"))
    assert rack.find() == Drift(frozenset({"red", "blue"}), {"worker-1": "its keys are gone"})


@pytest.mark.parametrize(
    ("host", "removed", "lost"),
    [
        ("blue", "", {"worker-1": NEW}),
        ("red", "", {"launcher": NEW, "worker-0": NEW}),
        ("blue", "workloads", {"worker-1": NEW}),
        ("blue", "workloads/.current", {}),
        ("blue", "clones/DeepSpeedExamples", {"worker-1": NEW}),
        ("blue", "clones/DeepSpeedExamples/.current/main.py", {}),
        ("blue", "workloads/hello", {}),
        ("blue", "workloads/.current/hello/hello.py", {}),
        ("blue", ".lab/nodes/worker-1/.current", {"worker-1": OTHER}),
        ("blue", ".lab/nodes/worker-1/ssh/authorized_keys", {"worker-1": OTHER}),
        ("red", ".lab/nodes/worker-0/launcher/.current", {}),
        ("red", ".lab/nodes/worker-0/launcher", {"launcher": NEW}),
    ],
)
def test_what_was_removed_on_a_host_is_missed_and_by_whom(
    rack: Rack, host: str, removed: str, lost: dict[str, str]
) -> None:
    """A removed file or folder on a host is found there alone, with the nodes it makes unusable, until `up`."""
    rack.up()
    path = rack.on(host) / removed
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    assert rack.find() == Drift(frozenset({host}), lost)
    rack.up()
    assert rack.find() == NOTHING


def test_a_host_that_failed_or_sees_the_lab_itself_is_not_asked(rack: Rack) -> None:
    """find() skips a host that failed or has no connection, and all of a lab on this machine."""
    connections = {"blue": rack.connections["blue"]}
    outdated, mute = drift.find(rack.lab, connections, (), ("red",))
    assert outdated.hosts == {"blue"}
    assert mute == {}
    here, mute = drift.find(builders.lab(), {}, (), ())
    assert here.hosts == set()
    assert mute == {}


def test_a_host_that_does_not_say_is_named(rack: Rack) -> None:
    """A host whose shell fails is returned with its error, not as lacking files."""
    rack.up()
    rack.connections["blue"].shell = ("false",)
    outdated, mute = drift.find(rack.lab, rack.connections, (), ())
    assert outdated == NOTHING
    assert [error.node for error in mute.values()] == ["blue"]


class Inside:
    """An engine whose containers see the directories that had their paths when they started."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen

    def exec(self, _container: str, argv: tuple[str, ...], **_: object) -> CompletedProcess:
        """Print the inode and path of the targets that `stat` is asked for."""
        printed = "".join(f"{self.seen[path]} {path}\n" for path in argv[3:] if path in self.seen)
        return CompletedProcess(argv, 0, printed, "")


def test_a_container_whose_directory_was_replaced(tmp_path: Path) -> None:
    """A directory that was made anew is not what the container mounts; one that only changed is."""
    lab = builders.lab()
    sources = {name: tmp_path / name for name in ("runs", "cache")}
    for source in sources.values():
        source.mkdir()
    engine = Inside({f"/workspace/{name}": source.stat().st_ino for name, source in sources.items()})
    mounts = tuple((str(source), f"/workspace/{name}") for name, source in sources.items())
    container = builders.container("worker-0", mounts=mounts, created=sources["runs"].stat().st_ctime - 1)
    assert drift.replaced(lab, cast(Engine, engine), (container,)) == {}
    assert not drift.may_be_replaced(replace(container, created=container.created + 100))
    sources["runs"].rename(tmp_path / "moved")
    assert drift.may_be_replaced(container)
    why = f"{sources['runs']} changed: moved, removed or recreated"
    assert drift.replaced(lab, cast(Engine, engine), (container,)) == {"worker-0": why}
    sources["runs"].mkdir()
    assert drift.replaced(lab, cast(Engine, engine), (container,)) == {"worker-0": why}
    assert drift.replaced(lab, cast(Engine, engine), (replace(container, state="exited"),)) == {}


def test_a_node_whose_key_files_were_edited_is_made_anew(rack: Rack) -> None:
    """A worker whose authorized_keys is to be written again has read another; the others stay."""
    rack.up()
    assert drift.renewed_keys(rack.lab) == {}
    (ssh_keys.ssh_directory(rack.lab, "worker-1") / "authorized_keys").write_text("")
    assert drift.renewed_keys(rack.lab) == {"worker-1": "its key files were edited"}


def test_the_launcher_is_made_anew_if_its_key_was_replaced(rack: Rack) -> None:
    """A launcher copies its key when it starts: with another one, no worker would let it in."""
    rack.up()
    identity = ssh_keys.launcher_directory(rack.lab) / ssh_keys.IDENTITY
    identity.unlink()
    ssh_keys.ensure_pair(identity)
    assert [*drift.renewed_keys(rack.lab)] == ["launcher", *(node.name for node in rack.lab.nodes)]

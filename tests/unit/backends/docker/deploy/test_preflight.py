from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import sysfs
from support.builders import backend, cluster_of, deployment, lab, observed, workload
from support.fake_backend import FakeBackend, active

from labctl import naming
from labctl.backends.docker.checks import run as doctor_run
from labctl.backends.docker.compose import render, ssh_keys
from labctl.backends.docker.deploy import images, ledger, plan, preflight, provision
from labctl.backends.docker.lab import cluster as clusters
from labctl.backends.plan import Step, carry_out
from labctl.backends.state import elsewhere
from labctl.config import settings
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import HERE, Lab, Secret
from labctl.records import store
from labctl.runs import labs
from labctl.system import filelock, procfs


def prepare(of: Lab, image_id: str = "sha256:1") -> tuple[Step, ...]:
    """Carry out the local plan of a lab; return its steps; fail if a second plan is not empty."""
    steps, _ = provision.plan_local(of, render.render(of), image_id)
    assert carry_out(steps, deployment(of, FakeBackend())) == {}
    assert provision.plan_local(of, render.render(of), image_id) == ((), ())
    return steps


def secrets_of(directory: Path) -> dict[str, str]:
    """Return the secrets of worker-1 by file name."""
    return {path.name: path.read_text() for path in (directory / ".lab/nodes/worker-1/secrets").iterdir()}


def test_a_secret_is_a_private_file_of_every_node(tmp_path: Path) -> None:
    """A secret is a file of each node with its value and mode 0600."""
    prepare(lab(directory=tmp_path, secrets=(("hf_token", Secret("first")),)))
    assert secrets_of(tmp_path) == {"hf_token": "first"}
    assert (tmp_path / ".lab/nodes/worker-0/secrets/hf_token").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_is_not_set_any_more_is_removed(tmp_path: Path) -> None:
    """A secret that the next lab does not have is removed from the node's folder."""
    prepare(lab(directory=tmp_path, secrets=(("hf_token", Secret("a")), ("environment", Secret("b")))))
    prepare(lab(directory=tmp_path, secrets=(("environment", Secret("b")),)))
    assert secrets_of(tmp_path) == {"environment": "b"}


def test_a_changed_secret_renews_the_containers_and_is_not_in_the_text() -> None:
    """Another value of a secret changes the fingerprint of the compose file, which has no value."""
    before, after = (
        render.render_node(of, of.nodes[0], {}).content
        for of in (lab(secrets=(("hf_token", Secret(value)),)) for value in ("CANARY-1", "CANARY-2"))
    )
    assert naming.fingerprint(before) != naming.fingerprint(after)
    assert "CANARY" not in before + after


def at(directory: Path) -> Context:
    """Return the context of this directory."""
    return Context(directory=directory, environ={}, emit=lambda _: None, flags={})


def test_a_busy_host_is_noted_unless_the_labs_own_runs_may_be_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of 5.28 on 2 cores is noted; not if a run of this lab ended recently or the load is 0.42."""
    for path, text in (("proc/loadavg", "5.28 2.10 0.93 3/345 4711\n"), ("sys/devices/system/cpu/online", "0-1\n")):
        sysfs.put(tmp_path / "root" / path, text)
    monkeypatch.setattr(procfs, "ROOT", tmp_path / "root")
    notices: list[str] = []
    context = replace(at(tmp_path), emit=lambda event: notices.append(event.text))
    cluster = cluster_of(context)
    preflight.note_busy_hosts(context, cluster)
    assert notices == ["this machine is busy: load average 5.28 on 2 cores"]
    monkeypatch.setattr(store, "ran_within", lambda *_: True)
    preflight.note_busy_hosts(context, cluster)
    monkeypatch.undo()
    sysfs.put(tmp_path / "root/proc/loadavg", "0.42 2.10 0.93 3/345 4711\n")
    monkeypatch.setattr(procfs, "ROOT", tmp_path / "root")
    preflight.note_busy_hosts(context, cluster)
    assert len(notices) == 1


def test_a_lab_of_the_same_name_in_another_directory_is_left_alone(tmp_path: Path) -> None:
    """A container of another existing directory raises HostError that names it; the hint is LAB_NAME."""
    current = observed(lab(), worker_0={"directory": str(tmp_path)})
    with pytest.raises(HostError) as caught:
        preflight.require_lab_owner(at(Path("/srv/lab")), "demo", current)
    assert str(tmp_path) in caught.value.message
    assert "LAB_NAME" in caught.value.hint


def test_up_names_who_has_the_lab_before_what_only_follows_from_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a foreign lab and a taken port, `up` raises HostError about the lab."""

    def port_is_taken(*_: object) -> None:
        """Raise HostError that the port is taken."""
        raise HostError("port 12345 is taken")

    context = replace(at(tmp_path), environ={"LAB_NAME": "demo"})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    engine = FakeBackend(seen=observed(lab(), worker_0={"directory": str(theirs)}))
    monkeypatch.setattr(doctor_run, "preflight", port_is_taken)
    with pytest.raises(HostError, match="lab `demo` belongs to"):
        labs.bring_up(backend(context, cluster_of(context, engine)))


def test_a_lab_whose_directory_was_moved_can_still_be_taken_over(tmp_path: Path) -> None:
    """A container whose directory does not exist raises nothing."""
    preflight.require_lab_owner(
        at(Path("/srv/lab")), "demo", observed(lab(), worker_0={"directory": str(tmp_path / "gone")})
    )


def test_a_directory_behind_a_home_that_is_closed_is_somebodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If stat() of the other directory is denied, elsewhere() returns it as the owner."""

    def refuse(path: Path, **_: Any) -> None:
        """Raise PermissionError."""
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    owner = elsewhere("/home/bob/lab", tmp_path)
    assert owner is not None
    assert owner.name == "/home/bob/lab"


@pytest.mark.parametrize(
    ("host", "made_by", "theirs"),
    [
        ("h1", "bob@here", True),
        ("h1", "ann@desk", True),
        ("h1", "ann@here", False),
        (HERE, "bob@here", False),
        (HERE, "ann@desk", True),
    ],
)
def test_a_host_may_have_the_lab_of_somebody_whose_directory_is_not_on_this_machine(
    tmp_path: Path, host: str, made_by: str, theirs: bool
) -> None:
    """owner_elsewhere() of a missing directory is None for the same user and machine, or any user of it locally.

    Another machine may have this one's name.
    """
    lost = {"directory": str(tmp_path / "gone"), "owner": made_by, "host": host}
    owner = observed(lab(), worker_0=lost).owner_elsewhere(tmp_path, "ann@here")
    assert (owner is not None) == theirs
    assert owner is None or made_by in owner.name


def test_who_works_in_its_directory_has_a_lab_on_hosts_under_whatever_name(tmp_path: Path) -> None:
    """A lab in this directory, made as another user of this machine, is no one else's; of another machine it is."""
    here = {"directory": str(tmp_path), "owner": "root@here", "host": "red"}
    elsewhere = here | {"owner": "root@there"}
    assert observed(lab(), worker_0=here).owner_elsewhere(tmp_path, "ann@here") is None
    assert observed(lab(), worker_0=elsewhere).owner_elsewhere(tmp_path, "ann@here") is not None


@pytest.mark.parametrize(
    ("listed", "remaining", "former"),
    [
        ({"h1": "X"}, [], ()),
        ({"h1": ""}, [], ()),
        ({"h2": "Y"}, ["h1"], ()),
        # Another machine has its name.
        ({"h1": "Y"}, ["h1"], ()),
        # The machine has another name.
        ({"h2": "X"}, [], ("h1",)),
        ({"h1": "Y", "h2": "X"}, [], ("h1",)),
    ],
)
def test_a_machine_that_has_nodes_is_known_whatever_it_is_called_now(
    tmp_path: Path, listed: dict[str, str], remaining: list[str], former: tuple[str, ...]
) -> None:
    """The ledger finds h1's files by machine id: left over if no listed host has it, `former` if one has."""
    ledger.note(tmp_path, "h1", "X")
    assert [host.host for host in ledger.left_over(tmp_path, listed)] == remaining
    assert ledger.former(tmp_path, listed).get("h2", ()) == former
    assert ledger.records(tmp_path, {"h2": "Y"}) == {"h2": ()}
    assert ledger.records(tmp_path, {"h2": "X"}) == {"h2": (ledger.DeployedHost("h1", "X").path,)}


def test_what_this_machine_got_as_a_listed_host_stays_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine listed earlier as `red` is warned of, and its record stays while files and results are there."""
    engine = FakeBackend()
    monkeypatch.setattr(FakeBackend, "identity", lambda _: "X", raising=False)
    ledger.note(tmp_path, "red", "X")
    cluster = clusters.Cluster(settings=settings.load(tmp_path, {}, {}), directory=tmp_path, engine=engine)
    messages: list[str] = []
    context = Context(directory=tmp_path, environ={}, emit=lambda event: messages.append(event.text), flags={})
    ledger.warn_orphaned_hosts(context, cluster)
    assert "red was removed from LAB_HOSTS" in messages[0]
    assert ledger.records(tmp_path, ledger.machines(cluster)) == {}


def test_an_engine_says_nothing_that_leads_out_of_the_notes(tmp_path: Path) -> None:
    """A host id with `../` is recorded in the ledger's folder and read back."""
    ledger.note(tmp_path, "h1", "../../x")
    assert ledger.left_over(tmp_path, {}) == (ledger.DeployedHost("h1", "../../x"),)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path / ledger.FILES}


def test_what_nodes_of_before_had_is_removed(tmp_path: Path) -> None:
    """With one node fewer, prepare() removes the third node's folder."""
    prepare(lab(3, directory=tmp_path), "sha256:1")
    prepare(lab(2, directory=tmp_path), "sha256:1")
    assert sorted(path.name for path in (tmp_path / ".lab/nodes").iterdir()) == ["worker-0", "worker-1"]


def test_compiled_operators_are_kept_for_the_image_that_compiled_them(tmp_path: Path) -> None:
    """torch_extensions stay for the same image; for another one the cache folder is emptied, not replaced."""
    compiled = tmp_path / ".lab/cache/worker-1/torch_extensions/op.so"
    prepare(lab(directory=tmp_path), "sha256:1")
    compiled.parent.mkdir()
    compiled.touch()
    prepare(lab(directory=tmp_path), "sha256:1")
    assert compiled.exists()
    mounted = (tmp_path / ".lab/cache/worker-1").stat().st_ino
    prepare(lab(directory=tmp_path), "sha256:2")
    assert [path.name for path in (tmp_path / ".lab/cache/worker-1").iterdir()] == ["image"]
    assert (tmp_path / ".lab/cache/worker-1").stat().st_ino == mounted


@pytest.mark.parametrize("plant", ["link", "pipe", "folder"])
def test_what_a_container_puts_in_place_of_a_caches_marker_is_replaced(tmp_path: Path, plant: str) -> None:
    """A link, pipe or folder in place of the cache's `image` file is replaced by it; the link's target stays."""
    keys, marker = tmp_path / "keys", tmp_path / ".lab/cache/worker-1/image"
    keys.write_text("mine")
    prepare(lab(directory=tmp_path), "sha256:1")
    marker.unlink()
    plants: dict[str, Callable[[], object]] = {
        "link": lambda: marker.symlink_to(keys), "pipe": lambda: os.mkfifo(marker), "folder": marker.mkdir
    }  # fmt: skip
    plants[plant]()
    prepare(lab(directory=tmp_path), "sha256:1")
    assert (marker.read_text(), marker.is_symlink(), keys.read_text()) == ("sha256:1", False, "mine")


def test_keys_that_are_gone_are_noticed(tmp_path: Path) -> None:
    """missing() names worker-1 without its host key, and all nodes without the launcher's identity."""
    of = lab(directory=tmp_path)
    ssh_keys.ensure(of)
    assert ssh_keys.missing(of) == frozenset()
    (tmp_path / ".lab/nodes/worker-1/ssh/ssh_host_ed25519_key").unlink()
    assert ssh_keys.missing(of) == {"worker-1"}
    (tmp_path / ".lab/nodes/worker-0/launcher/id_ed25519").unlink()
    assert ssh_keys.missing(of) == {"launcher", "worker-0", "worker-1"}


def test_a_run_keeps_its_nodes(tmp_path: Path) -> None:
    """A change to the nodes of a locked or observed run raises HostError; a run on other nodes does not."""
    steps = plan.up(lab(3), render.render(lab(3)), observed(lab())).steps
    engine, other = (FakeBackend(answer=active("r2", *nodes)) for nodes in (("worker-1", "worker-2"), ("worker-1",)))
    preflight.require_no_run(at(tmp_path), FakeBackend(), observed(lab()), steps)
    with (
        filelock.held(tmp_path / filelock.RUNS / "r1.lock", "run r1"),
        pytest.raises(HostError, match=r"cannot change the lab while `run r1` by .* is active"),
    ):
        preflight.require_no_run(at(tmp_path), FakeBackend(), observed(lab()), steps)
    with pytest.raises(HostError, match=r"cannot change the lab while run r2 \(ann@desk, since .*\) is active"):
        preflight.require_no_run(at(tmp_path), engine, observed(lab()), steps)
    preflight.require_no_run(at(tmp_path), other, observed(lab()), steps)


def test_an_up_that_changes_nothing_does_not_mind_a_run(tmp_path: Path) -> None:
    """Steps that change no container pass while a run is active."""
    steps = plan.up(lab(), render.render(lab()), observed(lab())).steps
    with filelock.held(tmp_path / filelock.RUNS / "r1.lock", "run r1"):
        preflight.require_no_run(at(tmp_path), FakeBackend(), observed(lab()), steps)


@pytest.mark.parametrize(
    ("local_images", "reason", "hint"),
    [
        ((), "which is not found", "labctl build --workload hello && labctl up --workload hello"),
        (("labctl/horovod",), "which the lab does not run", "labctl up --workload hello"),
    ],
)
def test_the_image_that_a_workload_needs_is_offered(local_images: tuple[str, ...], reason: str, hint: str) -> None:
    """confirm_image() asks; on refusal or without a way to ask it raises HostError with the commands as hint."""
    questions: list[str] = []

    def agree(question: str) -> bool:
        """Record the question; agree."""
        questions.append(question)
        return True

    exists = "labctl/horovod" in local_images
    task = workload(image="horovod")
    images.confirm_image(task, "labctl/horovod", exists, agree)
    assert reason in questions[0]
    for ask in (None, lambda _: False):
        with pytest.raises(HostError, match=f"hello needs image labctl/horovod, {reason}") as caught:
            images.confirm_image(task, "labctl/horovod", exists, ask)
        assert caught.value.hint == hint


def test_a_workloads_image_gives_way_to_the_one_that_is_set(tmp_path: Path) -> None:
    """A workload's image is used if LAB_IMAGE is not set; without one LAB_IMAGE stays empty."""
    task = workload(image="horovod")
    assert images.for_workload(at(tmp_path), at(tmp_path).settings(), task).text("LAB_IMAGE") == "labctl/horovod"
    chosen = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={"LAB_IMAGE": "mine:1"})
    assert images.for_workload(chosen, chosen.settings(), task).text("LAB_IMAGE") == "mine:1"
    assert images.for_workload(at(tmp_path), at(tmp_path).settings(), workload()).text("LAB_IMAGE") == ""


def test_a_hosts_cache_of_another_image_is_emptied_and_no_link_followed_that_is_put_there_meanwhile(
    tmp_path: Path,
) -> None:
    """A link planted while the script empties a host's cache makes it fail; the link's target stays."""
    cache, keys = tmp_path / "cache", tmp_path / "keys"
    (cache / "torch_extensions").mkdir(parents=True)
    keys.write_text("mine")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "find").write_text(f'#!/bin/sh\n/usr/bin/find "$@"\nln -s "{keys}" "{cache}/image"\n')
    (tools / "find").chmod(0o755)

    def make(path: str) -> int:
        """Run the script that makes a host's folders with this PATH; return its exit code."""
        argv = ["sh", "-c", provision.MAKE, "sh", "sha256:1", "1", "", str(cache)]
        return subprocess.run(argv, env={"PATH": path}, capture_output=True, check=False).returncode

    assert make(f"{tools}:/usr/bin:/bin") != 0
    assert (keys.read_text(), list(cache.iterdir())) == ("mine", [cache / "image"])
    assert make("/usr/bin:/bin") == 0
    assert ((cache / "image").read_text(), keys.read_text()) == ("sha256:1", "mine")


def test_the_accelerator_is_told_with_the_hosts_that_have_it(tmp_path: Path) -> None:
    """`auto` on red and blue: the line begins with both; on this machine with the accelerator."""
    messages: list[str] = []
    environ = {"LAB_NAME": "demo"}
    context = Context(directory=tmp_path, environ=environ, emit=lambda event: messages.append(event.text), flags={})
    cluster = clusters.Cluster(settings=context.settings(), directory=tmp_path, engine=FakeBackend())
    remote = tuple(replace(lab(1).hosts[0], name=name) for name in ("red", "blue"))
    for hosts in (remote, lab(1).hosts):
        preflight.report_accelerator(context, cluster, replace(lab(1), hosts=hosts))
    assert [text.partition(" (")[0] for text in messages[:2]] == ["red, blue: accelerator cpu", "accelerator cpu"]

"""Where in a container a person stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labctl.attach import session
from labctl.errors import HostError
from labctl.system import process


@pytest.mark.parametrize(
    ("stands", "there"),
    [
        ("lab/workloads", "/workspace/workloads"),
        ("lab/workloads/opt/deep", "/workspace/workloads/opt/deep"),
        ("lab/workloads/opt/cache/x", "/workspace/.cache/x"),
        ("lab", None),
        ("lab/workloads-of-another", None),
    ],
    ids=["a mount itself", "below a mount", "the mount nearest to it", "above the mounts", "a name that begins alike"],
)
def test_a_directory_is_found_by_the_mount_that_holds_it(tmp_path: Path, stands: str, there: str | None) -> None:
    mounts = [
        (str(tmp_path / "lab/workloads"), "/workspace/workloads"),
        (str(tmp_path / "lab/workloads/opt/cache"), "/workspace/.cache"),
        (str(tmp_path / "lab/runs"), "/workspace/runs"),
    ]
    assert session.mounted_at(tmp_path / stands, mounts) == there


def test_a_mount_named_through_a_link_holds_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real/repo").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    assert session.mounted_at(tmp_path / "real/repo", [(str(tmp_path / "link"), "/clone")]) == "/clone/repo"


def test_links_of_this_machine_are_not_those_of_another(tmp_path: Path) -> None:
    """Where /home is a link here, it is a directory there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    there = tmp_path / "home/.labctl/demo/workloads"
    assert session.mounted_at(there / "opt", [(str(there), "/workspace")], apart=True) == "/workspace/opt"


def fails(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Docker commands that end with these words."""
    monkeypatch.setattr(process, "run", lambda argv, **_: process.CompletedProcess(tuple(argv), 1, "[]\n", said))


def test_a_container_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "Error response from daemon: No such container: demo-launcher")
    assert session.look("demo", "demo-launcher") is None


def test_where_docker_does_not_say_what_a_container_is_its_own_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, "Failed to initialize: open ca.pem: no such file")
    with pytest.raises(HostError, match=r"docker container inspect demo-launcher: Failed to initialize: open ca.pem"):
        session.look("demo", "demo-launcher")


def test_who_stands_in_a_directory_that_was_removed_stands_nowhere_in_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [{"Type": "bind", "Source": str(tmp_path), "Destination": "/workspace"}]
    labels = {"labctl.lab": "demo", "labctl.directory": "/labs/demo"}
    node = {
        "Config": {"Labels": labels, "Env": ["LAB_UID=7", "LAB_GID=8"]},
        "State": {"Running": True, "Paused": True},
        "Mounts": mounts,
    }
    monkeypatch.setattr(
        process, "run", lambda argv, **_: process.CompletedProcess(tuple(argv), 0, json.dumps([node]), "")
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = session.look("demo", "demo-launcher")
    assert found == session.ExecTarget(
        container="demo-launcher", directory=None, user="7:8", owner="/labs/demo", paused=True
    )

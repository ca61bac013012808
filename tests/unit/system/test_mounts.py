"""Paths of a host as containers see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.system.mounts import mounted_at


@pytest.mark.parametrize(
    ("stands", "path_inside"),
    [
        ("lab/workloads", "/workspace/workloads"),
        ("lab/workloads/opt/deep", "/workspace/workloads/opt/deep"),
        ("lab/workloads/opt/cache/x", "/workspace/.cache/x"),
        ("lab", None),
        ("lab/workloads-of-another", None),
    ],
    ids=["a mount itself", "below a mount", "the mount nearest to it", "above the mounts", "a name that begins alike"],
)
def test_a_directory_is_found_by_the_mount_that_holds_it(tmp_path: Path, stands: str, path_inside: str | None) -> None:
    """Map a path of the host: by the nearest mount that holds it, else None."""
    mounts = [
        (str(tmp_path / "lab/workloads"), "/workspace/workloads"),
        (str(tmp_path / "lab/workloads/opt/cache"), "/workspace/.cache"),
        (str(tmp_path / "lab/runs"), "/workspace/runs"),
    ]
    assert mounted_at(tmp_path / stands, mounts) == path_inside


def test_a_mount_named_through_a_link_holds_what_it_leads_to(tmp_path: Path) -> None:
    """Map a path whose mount is named through a link: the link is followed."""
    (tmp_path / "real/repo").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    assert mounted_at(tmp_path / "real/repo", [(str(tmp_path / "link"), "/clone")]) == "/clone/repo"


def test_links_of_this_machine_are_not_those_of_another(tmp_path: Path) -> None:
    """Map paths of another machine, on which /home is a directory rather than a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    remote = tmp_path / "home/.labctl/demo/workloads"
    assert mounted_at(remote / "opt", [(str(remote), "/workspace")], apart=True) == "/workspace/opt"

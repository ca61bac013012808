"""Directories with odd names are mounted; those that cannot be mounted are refused before anything is created."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

ODD = (
    "a b  c",
    "$HOME ${LAB_NAME} $$",
    "#1 a #2",
    'it\'s "so"',
    "a:b:ro",
    "back\\slash",
    "-x,y=%z*",
    "größe \u65e5\u2028",
)


@pytest.fixture(scope="module")
def mounting(new_lab: Callable[[dict[str, str]], Lab], image: str) -> Iterator[Lab]:
    """Yield a lab of one worker, not up; destroy it at the end."""
    lab = new_lab({"LAB_NODES": "1"})
    yield lab
    lab.destroy()


def refused(lab: Lab, source: Path | str) -> str:
    """Return the message with which `up` refuses ``source`` as HOST_CACHE_PATH; assert that it made nothing."""
    lab.configure({"LAB_NODES": "1", "HOST_CACHE_PATH": str(source)})
    answer = lab.call("up", "--json").expect(2)
    assert lab.labelled() == []
    assert not (lab.path / ".lab/nodes").exists()
    return str(answer.json["error"]["message"])


def test_what_cannot_be_mounted_is_refused_before_anything_is_made(mounting: Lab, tmp_path: Path) -> None:
    """A loop of links, a file, and control characters in a name: exit code 2."""
    (tmp_path / "loop").symlink_to("loop")
    assert refused(mounting, tmp_path / "loop").endswith(f"{tmp_path}/loop, which is a loop of links")
    (tmp_path / "file").touch()
    assert refused(mounting, tmp_path / "file").endswith(f"{tmp_path}/file, which is not a directory")
    for name in ("line\nbreak", "tab\there"):
        (tmp_path / name).mkdir()
        assert "control character" in refused(mounting, tmp_path / name)


def test_odd_names_are_mounted_as_they_are(mounting: Lab, tmp_path: Path) -> None:
    """Cache and clone below directories with special characters are readable in both nodes."""
    cache, clone = tmp_path.joinpath(*ODD), tmp_path.joinpath(*reversed(ODD))
    for place in (cache, clone):
        place.mkdir(parents=True)
        (place / "seen").write_text(place.name)
    mounting.configure({"LAB_NODES": "1", "HOST_CACHE_PATH": str(cache), "HOST_REPO_PATH": str(clone)})
    mounting.call("up").expect(0)
    for node in ("launcher", "worker-0"):
        assert mounting.inside(node, "cat", "/workspace/.cache/seen") == cache.name
        assert mounting.inside(node, "cat", "/workspace/DeepSpeedExamples/seen") == clone.name
    mounting.inside("worker-0", "touch", "/workspace/.cache/made")
    assert (cache / "made").exists()
    mounting.call("up").expect(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_a_read_only_file_system_is_mounted_and_serves_what_it_holds(mounting: Lab, tmp_path: Path) -> None:
    """With the cache on a read-only tmpfs, up, run and down exit with 0."""
    share = tmp_path / "share"
    share.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "labctl-tests", share], check=True)
    try:
        (share / "seen").write_text("here")
        subprocess.run(["mount", "-o", "remount,ro", share], check=True)
        mounting.configure({"LAB_NODES": "1", "HOST_CACHE_PATH": str(share)})
        mounting.call("up").expect(0)
        assert mounting.inside("worker-0", "cat", "/workspace/.cache/seen") == "here"
        mounting.call("run", "hello").expect(0)
        mounting.call("down").expect(0)
    finally:
        subprocess.run(["umount", "--lazy", share], check=True)

"""The user's clones and model cache, sent to hosts that have neither."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import RackLabs

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("shared_rack")]

CLONES = Path(__file__).parents[1] / "clones"
CLONE = "/workspace/DeepSpeedExamples"
ANN = "1000:1000"
LIST = 'cd "$0" && find -L . -type f ! -path "*/.versions/*" ! -path "*/.current/*" | cut -c 3- | LC_ALL=C sort'


@pytest.fixture
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a git repository with tracked, untracked and ignored files."""
    root = tmp_path_factory.mktemp("clone") / "DeepSpeedExamples"
    shutil.copytree(CLONES / "DeepSpeedExamples", root)
    (root / "edited").write_text("one")
    (root / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "-C", root, "init", "-q"], check=True)
    subprocess.run(["git", "-C", root, "add", "--all"], check=True)
    (root / "notes.txt").write_text("untracked")
    (root / "data").mkdir()
    (root / "data/big").write_text("ignored")
    return root


def test_hosts_see_what_git_tracks_of_a_clone_as_it_is_now(rack_lab: RackLabs, clone: Path) -> None:
    """Hosts see tracked files read-only, `up` sends only edits, a run on both passes; 300 MB give exit code 2."""
    lab = rack_lab(2, HOST_REPO_PATH=str(clone))
    tracked = subprocess.check_output(["git", "-C", clone, "ls-files"], text=True).splitlines()
    lab.call("up").expect(0)
    for node in ("launcher", "worker-0", "worker-1"):
        assert lab.inside(node, "env", "sh", "-c", LIST, CLONE, user=ANN).splitlines() == tracked
        assert "Read-only file system" in lab.inside(node, "sh", "-c", f"touch {CLONE}/new || :", user=ANN)
    before = lab.identities()
    (clone / "edited").write_text("two")
    err = lab.call("up").expect(0).err
    assert "push files of worker-0 to h1" in err
    assert "push files of worker-1 to h2" in err
    for node in ("worker-0", "worker-1"):
        assert lab.inside(node, "cat", f"{CLONE}/edited", user=ANN) == "two"
    assert "push files" not in lab.call("up").expect(0).err
    assert lab.identities() == before

    result = lab.call("run", "dschat/run_opt-350m_bs24_zero0", "--json").expect(0).json
    assert (result["verdict"], {rank["node"] for rank in result["ranks"]}) == ("PASS", {"worker-0", "worker-1"})

    with (clone / "edited").open("wb") as large:
        large.truncate(300_000_000)
    refused = lab.call("up").expect(2).err
    assert f"{clone} holds 300 MB without .git, and labctl sends hosts at most 200 MB of a clone" in refused


def test_one_command_fills_the_cache_of_every_host_once(rack_lab: RackLabs, tmp_path: Path) -> None:
    """`cache --hosts` sends files and links once; a host without sshd gives exit code 3, the other its new file."""
    lab = rack_lab(2)
    home = {"HOME": str(tmp_path / "home")}
    cache = tmp_path / "home/.cache/labctl"
    blob, link = "huggingface/hub/models--a--b/blobs/0a", "huggingface/hub/models--a--b/snapshots/1/model.bin"
    for name, size in {blob: 70_000_000, "mnist/images": 5000}.items():
        (cache / name).parent.mkdir(parents=True)
        with (cache / name).open("wb") as stream:
            stream.truncate(size)
    (cache / link).parent.mkdir(parents=True)
    (cache / link).symlink_to("../../blobs/0a")

    foreseen = lab.call("cache", "--hosts", "--dry-run", "--json", environ=home).expect(0).json["hosts"]
    assert foreseen == [{"host": name, "files": 3, "bytes": 70_005_000} for name in ("h1", "h2")]
    assert [host.shell("ls ~ann/.cache 2>&1 || :").count("labctl") for host in lab.hosts] == [0, 0]

    lab.call("cache", "--hosts", environ=home).expect(0)
    for host in lab.hosts:
        sums = host.shell(f"cd {host.home}/.cache/labctl && sha256sum {link} mnist/images")
        assert sums == subprocess.check_output(["sha256sum", link, "mnist/images"], cwd=cache, text=True)
        assert host.shell(f"stat -c %U {host.home}/.cache/labctl/{blob}") == "ann\n"
    before = [host.traffic().received for host in lab.hosts]
    again = lab.call("cache", "--hosts", "--json", environ=home).expect(0).json
    assert [host["files"] for host in again["hosts"]] == [0, 0]
    assert all(host.traffic().received - old < 300_000 for host, old in zip(lab.hosts, before, strict=True))

    (cache / "mnist/more").write_text("rows")
    # Point the first host to a port without a listener.
    (lab.path / "hosts.txt").write_text(f"{lab.hosts[0].line(port=1)}\n{lab.hosts[1].line()}\n")
    answer = lab.call("cache", "--hosts", environ=home).expect(3)
    assert "h1" in answer.out
    assert lab.hosts[1].run("cat", f"{lab.hosts[1].home}/.cache/labctl/mnist/more").stdout == "rows"

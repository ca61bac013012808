"""Filling the caches of hosts that are directories of this machine, by the real script."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.fakehost import FakeHost

from labctl.backends.docker.deploy import cache as hosts
from labctl.backends.docker.deploy.cache import CachedFile
from labctl.config import settings
from labctl.hub.report import HostCache
from labctl.system import files
from labctl.system.process import CompletedProcess

BLOB = "huggingface/hub/models--facebook--opt-350m/blobs/0a1b"
LINK = "huggingface/hub/models--facebook--opt-350m/snapshots/7/model.safetensors"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Make a cache with a model, data, and files that are not sent to hosts; return its root."""
    root = tmp_path / "cache"
    texts = {BLOB: "weights", "mnist/train images": "rows", "mnist/empty": ""}
    excluded = ("huggingface/token", f"{BLOB}.incomplete", "huggingface/hub/.locks/x.lock", ".labctl.lock")
    for name, text in {**texts, **dict.fromkeys(excluded, "x")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / LINK).parent.mkdir(parents=True)
    (root / LINK).symlink_to("../../blobs/0a1b")
    (root / "out").symlink_to(tmp_path)
    return root


@pytest.fixture
def rack(tmp_path: Path) -> dict[str, FakeHost]:
    """Return two fake hosts with home directories below tmp_path."""
    return {name: FakeHost(tmp_path / "rack", name) for name in ("red", "blue")}


def fill(
    cache: Path, rack: dict[str, FakeHost], only: Iterable[str] = ("",), *, dry_run: bool = False
) -> dict[str, HostCache]:
    """Fill `my cache` of the hosts from the named parts; return each one's result; fail if a host failed."""
    filled, failures = hosts.fill(
        cache, hosts.read_here(cache, only), rack, "my cache", lambda _: None, dry_run=dry_run
    )
    assert failures == {}
    return {host.host: host for host in filled}


def tree(root: Path) -> dict[str, str]:
    """Return the content of each file below a folder, by path."""
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if not path.is_dir()}


DATA = {BLOB: "weights", LINK: "weights", "mnist/train images": "rows", "mnist/empty": ""}


def test_hosts_get_models_and_data_and_nothing_the_second_time(cache: Path, rack: dict[str, FakeHost]) -> None:
    """Both hosts get the four files, with the link kept and no token or lock; a second fill sends nothing."""
    assert fill(cache, rack) == {name: HostCache(host=name, files=4, bytes=11) for name in rack}
    sent = {name: host.sent for name, host in rack.items()}
    for host in rack.values():
        assert tree(host.home / "my cache") == DATA
        assert (host.home / "my cache" / LINK).readlink() == Path("../../blobs/0a1b")
    assert fill(cache, rack) == {name: HostCache(host=name, files=0, bytes=0) for name in rack}
    assert {name: host.sent for name, host in rack.items()} == sent


def test_only_what_differs_is_sent_again(cache: Path, rack: dict[str, FakeHost]) -> None:
    """A changed file goes to both hosts, a removed one to its host; a blob with another time is not sent again."""
    fill(cache, rack)
    (cache / "mnist/train images").write_text("ROWS")
    os.utime(cache / "mnist/train images", (1, 1))
    (rack["blue"].home / "my cache/mnist/empty").unlink()
    # What a host downloaded itself is the same by its name.
    os.utime(rack["red"].home / "my cache" / BLOB, (1, 1))
    filled = fill(cache, rack)
    assert {name: host.files for name, host in filled.items()} == {"red": 1, "blue": 2}
    assert (rack["red"].home / "my cache/mnist/train images").read_text() == "ROWS"


def test_of_what_is_named_only_that_is_sent(cache: Path, rack: dict[str, FakeHost]) -> None:
    """Of a cache, only the named part `mnist` is sent."""
    fill(cache, rack, ["mnist"])
    assert tree(rack["red"].home / "my cache") == {"mnist/train images": "rows", "mnist/empty": ""}


def test_a_dry_run_says_how_much_and_leaves_hosts_as_they_are(cache: Path, rack: dict[str, FakeHost]) -> None:
    """A dry run returns files and bytes to send, and the host's home stays as it was."""
    before = tree(rack["red"].home)
    assert fill(cache, rack, dry_run=True)["red"] == HostCache(host="red", files=4, bytes=11)
    assert tree(rack["red"].home) == before
    assert not (rack["red"].home / "my cache").exists()


def test_a_large_file_goes_on_where_it_was_cut_off(
    cache: Path, rack: dict[str, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob cut off at 2 MiB is a failure; the next fill sends only the rest, and the file is whole."""
    monkeypatch.setattr(hosts, "LARGE", 3 << 20)
    content = os.urandom((5 << 20) + 7)
    (cache / BLOB).write_bytes(content)
    red, whole = rack["red"], FakeHost.send

    def cut(host: FakeHost, script: str, *arguments: str, chunks: Iterable[bytes], timeout: float) -> CompletedProcess:
        """Send only the first 2 MiB and 500 bytes."""
        return whole(host, script, *arguments, chunks=[b"".join(chunks)[: (2 << 20) + 500]], timeout=timeout)

    with monkeypatch.context() as broken:
        broken.setattr(FakeHost, "send", cut)
        _, failures = hosts.fill(cache, hosts.read_here(cache), {"red": red}, "my cache", lambda _: None)
    assert (
        f"red: the cache was not received completely: {BLOB}: 2097652 of 5242887 bytes received"
        in failures["red"].message
    )
    assert not (red.home / "my cache" / BLOB).exists()
    sent = red.sent
    assert fill(cache, {"red": red})["red"].bytes == len(content) - (2 << 20) + 4
    assert (3 << 20) < red.sent - sent < (3 << 20) + 20_000
    assert (red.home / "my cache" / BLOB).read_bytes() == content
    assert list((red.home / "my cache").glob(".labctl*")) == []
    assert fill(cache, {"red": red})["red"].files == 0


def test_many_files_come_in_several_archives(
    cache: Path, rack: dict[str, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LARGE at 10 bytes, the files go in more than three archives of at most 10 bytes each."""
    monkeypatch.setattr(hosts, "LARGE", 10)
    for number in range(7):
        (cache / f"mnist/{number}").write_text("four")
    fill(cache, {"red": rack["red"]})
    assert tree(rack["red"].home / "my cache") == {**DATA, **{f"mnist/{number}": "four" for number in range(7)}}
    sizes = [sum(file.size for file in batch.values()) for batch in hosts.batches(hosts.read_here(cache))]
    assert max(sizes) <= 10
    assert len(sizes) > 3


def test_links_come_after_what_they_lead_to() -> None:
    """batches() lists a file before the link to it."""
    files = {"a": CachedFile(0, target="b"), "b": CachedFile(4, 1)}
    assert [name for batch in hosts.batches(files) for name in batch] == ["b", "a"]


def test_a_host_without_room_or_cache_is_named_and_the_other_is_filled(
    cache: Path, rack: dict[str, FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose cache is a file, or whose disk is too small, is a failure; the other host is filled."""
    (rack["red"].home / "my cache").write_text("a file")
    filled, failures = hosts.fill(cache, hosts.read_here(cache), rack, "my cache", lambda _: None)
    assert [host.host for host in filled] == ["blue"]
    assert "red: cannot use its cache my cache: " in failures["red"].message
    (cache / "mnist/more").write_text("more")
    monkeypatch.setattr(hosts, "room", lambda _: files.Room("/dev/sda", 3))
    _, failures = hosts.fill(cache, hosts.read_here(cache), rack, "my cache", lambda _: None)
    assert "blue: no room for the cache: 4 B needed on /dev/sda, 3 B free" in failures["blue"].message


def test_a_part_that_a_container_made_a_link_leads_nowhere(
    cache: Path, rack: dict[str, FakeHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbolic link in the place of a partial file is replaced; the file that it leads to stays."""
    monkeypatch.setattr(hosts, "LARGE", 3)
    (tmp_path / "private").write_text("mine")
    remote = rack["red"].home / "my cache"
    remote.mkdir()
    part = hosts.part_of("red", BLOB, hosts.read_here(cache)[BLOB])
    (remote / f"{hosts.COMING}{part}").symlink_to(tmp_path / "private")
    fill(cache, {"red": rack["red"]})
    assert ((tmp_path / "private").read_text(), tree(remote)) == ("mine", DATA)


def test_the_cache_of_hosts_is_below_their_own_home(tmp_path: Path) -> None:
    """`~/models` is `models` on hosts; an absolute path outside the home is the same there."""
    loaded = settings.load(tmp_path, {"HOME": "/home/me", "HOST_CACHE_PATH": "~/models"}, {})
    assert hosts.folder_on_hosts(loaded) == "models"
    assert hosts.folder_on_hosts(settings.load(tmp_path, {"HOST_CACHE_PATH": "/data/models"}, {})) == "/data/models"

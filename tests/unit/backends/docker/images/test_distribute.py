"""Distribution of images to hosts: layers sent and skipped, and broken connections."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import pytest
from support.fakehost import FakeHost
from support.harness import wait_until
from support.imagefile import image_archive

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.images import catalog, distribute, local, remote
from labctl.backends.docker.images.archive import Archive, common, tagged
from labctl.backends.docker.images.distribute import Failures, ImageTargets, alike
from labctl.errors import HostError
from labctl.system import process, progress
from labctl.system.files import Room
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess

BASE, TOP, OTHER = (letter * 5000 for letter in (b"b", b"t", b"o"))
NAME = "lab/node:latest"


class Rack:
    """Hosts, and this machine's images for them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []

    def hosts(self, *names: str) -> dict[str, FakeHost]:
        """Return fake hosts of these names."""
        return {name: FakeHost(self.path / "rack", name) for name in names}

    def archive(self, *layers: bytes, name: str = NAME, **config: object) -> Archive:
        """Write an image archive of these layers; return it read."""
        return Archive(image_archive(self.path / "image.tar", name, layers, **config))

    def hand_out(self, archive: Archive, hosts: dict[str, FakeHost]) -> Failures:
        """Distribute lab/node to the hosts; return the failures, and keep the notices."""
        targets = ImageTargets(hosts=hosts, notice=self.said.append, addresses={})
        return distribute.hand_out(archive, "lab/node", targets)

    def hand_out_as(self, name: str, archive: Archive, hosts: dict[str, FakeHost]) -> None:
        """Distribute the image of this name; fail if a host failed."""
        assert distribute.hand_out(archive, name, fleet_of(hosts)) == {}


@pytest.fixture
def rack(tmp_path: Path) -> Rack:
    """Return a rack below tmp_path."""
    return Rack(tmp_path)


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hosts send even a small image to each other."""
    monkeypatch.setattr(distribute, "WORTH", 0)


def names_in(archive: Archive, held: int) -> list[str]:
    """Return the names of the files in the stream for a host that holds this many layers."""
    stream = io.BytesIO(b"".join(archive.stream(archive.image("lab/node"), held).chunks()))
    with tarfile.open(fileobj=stream) as tar:
        return [member.name for member in tar if member.isfile()]


# --- the archive ---------------------------------------------------------------------------------------------


def test_an_archive_leaves_out_the_lowest_layers(rack: Rack) -> None:
    """The stream for a host with one layer has no file of the lowest layer, and that of the next."""
    archive = rack.archive(BASE, TOP)
    image = archive.image("lab/node")
    assert set(names_in(archive, 0)) - set(names_in(archive, 1)) == {image.layers[0]}
    assert image.layers[1] in names_in(archive, 1)


def test_a_stream_goes_on_from_any_place(rack: Rack) -> None:
    """A stream from any place equals the rest of the whole stream."""
    archive = rack.archive(BASE, TOP)
    stream = archive.stream(archive.image("lab/node"))
    whole = b"".join(stream.chunks())
    assert len(whole) == stream.size
    assert all(b"".join(stream.chunks(place)) == whole[place:] for place in (0, 1, 511, 512, 6000, stream.size))


def test_the_same_image_is_the_same_stream_whenever_it_is_saved(rack: Rack) -> None:
    """Two saves of one image give the same stream and key; with other layers held the key differs."""
    first = rack.archive(BASE, TOP)
    stream = first.stream(first.image("lab/node"), 1)
    data, key = b"".join(stream.chunks()), stream.key
    again = rack.archive(BASE, TOP)
    assert b"".join(again.stream(again.image("lab/node"), 1).chunks()) == data
    assert again.stream(again.image("lab/node"), 1).key == key
    assert again.stream(again.image("lab/node"), 0).key != key


def test_an_archive_of_an_older_engine_is_read(tmp_path: Path) -> None:
    """An archive with layer.tar files and a linked layer is read."""
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:a", "sha256:b"]}}).encode()
    entry = [{"Config": "c.json", "RepoTags": [NAME], "Layers": ["1/layer.tar", "2/layer.tar"]}]
    with tarfile.open(tmp_path / "old.tar", "w") as tar:
        for name, content in (("1/layer.tar", BASE), ("c.json", config), ("manifest.json", json.dumps(entry).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("2/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../1/layer.tar"
        tar.addfile(link)
    assert names_in(Archive(tmp_path / "old.tar"), 1) == ["manifest.json", "c.json", "2/layer.tar"]


@pytest.mark.parametrize("content", [b"", b"x" * 2000])
def test_what_is_no_archive_is_said(tmp_path: Path, content: bytes) -> None:
    """An empty file, or one of other content, raises HostError that it is no archive."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(HostError, match="is not an image archive"):
        Archive(tmp_path / "file")


ITSELF = {"digest": "sha256:x", "mediaType": "application/vnd.oci.image.index.v1+json"}
ENTRY = {"Config": "c", "RepoTags": [NAME], "Layers": ["l"]}


@pytest.mark.parametrize(
    ("manifest", "index", "config"),
    [
        ([1], {}, b"{}"),
        ({"a": 1}, {}, b"{}"),
        ([{"RepoTags": [[]]}], {}, b"{}"),
        ([ENTRY], [], b"{}"),
        ([ENTRY], {"manifests": [ITSELF]}, b"{}"),
        ([ENTRY], {"manifests": [{"digest": 1}]}, b"{}"),
        ([ENTRY], {}, b'{"rootfs": []}'),
        ([ENTRY], {}, b"[" * 100_000),
        ([ENTRY], {}, b'"' + b" " * (33 << 20) + b'"'),
    ],
    ids=[
        "an entry is a number",
        "the manifest is no list",
        "a tag is a list",
        "the index is a list",
        "an index names itself",
        "a digest is a number",
        "the layers are a list",
        "the configuration is nested without end",
        "the configuration is huge",
    ],
)
def test_an_archive_whose_documents_make_no_sense_is_said(
    tmp_path: Path, manifest: object, index: object, config: bytes
) -> None:
    """A manifest, index or configuration of the wrong shape or size raises HostError that it is no archive."""
    documents = {"manifest.json": manifest, "index.json": index, "blobs/sha256/x": {"manifests": [ITSELF, ITSELF]}}
    members = {name: json.dumps(content).encode() for name, content in documents.items()}
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for name, content in {**members, "c": config}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(HostError, match="is not an image archive"):
        Archive(tmp_path / "odd.tar").image(NAME)


def test_an_image_that_is_not_in_it_is_said(rack: Rack) -> None:
    """image() of a name that is not in the archive raises HostError, with the names in it as hint."""
    with pytest.raises(HostError, match="has no image other") as caught:
        rack.archive(BASE).image("other")
    assert caught.value.hint == f"it has {NAME}"


@pytest.mark.parametrize(
    ("held", "count"), [([], 0), (["a"], 1), (["a", "b", "c", "d"], 3), (["b", "a"], 0), (["a", "x", "c"], 1)]
)
def test_layers_are_held_from_the_lowest_on(held: list[str], count: int) -> None:
    """common() counts the layers held without a gap from the lowest on."""
    assert common(["a", "b", "c"], [["x"], held]) == count


@pytest.mark.parametrize(("name", "full"), [("a/b", "a/b:latest"), ("h:5000/b", "h:5000/b:latest"), ("b:1", "b:1")])
def test_a_name_without_a_tag_means_latest(name: str, full: str) -> None:
    """tagged() appends `:latest` to a name without a tag, also behind a registry's port."""
    assert tagged(name) == full


# --- to hosts ------------------------------------------------------------------------------------------------


def test_every_host_gets_the_image_and_keeps_nothing_else(rack: Rack) -> None:
    """Each host has the image and no rest of the upload in .labctl."""
    hosts = rack.hosts("h1", "h2")
    assert rack.hand_out(rack.archive(BASE, TOP), hosts) == {}
    for host in hosts.values():
        assert host.images == [NAME]
        assert not (host.home / ".labctl").exists()


def test_what_is_there_is_not_touched(rack: Rack) -> None:
    """A second distribution of the same image sends nothing and says nothing."""
    hosts = rack.hosts("h1")
    rack.hand_out(rack.archive(BASE, TOP), hosts)
    hosts["h1"].sent = 0
    rack.said.clear()
    assert rack.hand_out(rack.archive(BASE, TOP), hosts) == {}
    assert (hosts["h1"].sent, rack.said) == (0, [])


def test_of_a_change_only_the_changed_layer_is_sent(rack: Rack) -> None:
    """Of two layers only the changed one is sent to both hosts, and the notice says so."""
    hosts = rack.hosts("h1", "h2")
    rack.hand_out(rack.archive(BASE, TOP), hosts)
    whole = hosts["h1"].sent
    for host in hosts.values():
        host.sent = 0
    assert rack.hand_out(rack.archive(BASE, OTHER), hosts) == {}
    assert {host.sent for host in hosts.values()} == {whole - 5120 - 512}
    assert "with 1 of 2 layers to h1, h2" in rack.said[-5]


def test_what_was_cut_off_goes_on_where_it_stopped(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upload cut off at 7,000 bytes, the next one sends only the rest, and says so."""
    hosts = rack.hosts("h1")
    archive = rack.archive(BASE, TOP)

    def cut(connection: Connection, name: str, at: int, chunks: Iterator[bytes]) -> bool:
        """Append only the first 7,000 bytes."""
        return append(connection, name, at, iter([b"".join(chunks)[:7000]]))

    append = remote.append
    with monkeypatch.context() as patch:
        patch.setattr(remote, "append", cut)
        (failure,) = rack.hand_out(archive, hosts).values()
    assert "h1: the image is incomplete: 7 kB of" in failure.message
    hosts["h1"].sent = 0
    assert rack.hand_out(archive, hosts) == {}
    size = archive.stream(archive.image("lab/node")).size
    assert hosts["h1"].sent == size - 7000
    assert f"h1: resuming after 7 kB of {size / 1000:.1f} kB" in rack.said


def test_what_came_damaged_is_not_loaded_and_is_sent_anew_the_next_time(rack: Rack) -> None:
    """A damaged partial upload is a failure and is removed, without an image; the next upload succeeds."""
    hosts = rack.hosts("h1")
    archive = rack.archive(BASE, TOP)
    stream = archive.stream(archive.image("lab/node"))
    staged = hosts["h1"].home / f".labctl/images/{stream.key[:32]}-h10000"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"".join(stream.chunks())[:9000].replace(b"bb", b"xx"))
    (failure,) = rack.hand_out(archive, hosts).values()
    assert "the upload of lab/node was damaged, and is removed" in failure.message
    assert (hosts["h1"].images, hosts["h1"].staged) == ([], [])
    assert rack.hand_out(archive, hosts) == {}


def test_who_still_loads_is_told_now_and_then(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """While two hosts load, a notice names both with the seconds."""

    def load(*arguments: Any) -> str:
        """Wait for a notice that both hosts load, then load."""
        both = re.compile(r"h[12], h[12]: loading, \d+ s")
        wait_until(lambda: any(map(both.fullmatch, rack.said)), 120, "a line of both hosts")
        return str(loaded(*arguments))

    loaded = remote.load
    monkeypatch.setattr(progress, "PACE", 0.01)
    monkeypatch.setattr(remote, "load", load)
    assert rack.hand_out(rack.archive(BASE), rack.hosts("h1", "h2")) == {}


def test_reading_an_image_says_how_far_it_is(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """While `docker save` writes its temporary file, a notice says how much of the image is there."""
    half = re.compile(r"reading lab/node: 4 kB of about 8 kB, [\d.]+ s")

    def run(argv: list[str], **_: object) -> None:
        """Write 4,000 bytes under docker's temporary name; wait for a notice of them."""
        Path(argv[3]).with_name(".docker_temp_1").write_bytes(bytes(4000))
        wait_until(lambda: any(map(half.fullmatch, rack.said)), 120, "a line of how much is there")

    monkeypatch.setattr(progress, "PACE", 0.01)
    monkeypatch.setattr(process, "run", run)
    (rack.path / "spool").mkdir()
    local.save(("lab/node",), rack.path / "spool/image.tar", 8000, rack.said.append)


def test_an_engine_that_wants_all_layers_gets_them(rack: Rack) -> None:
    """An engine that cannot load only the missing layers is sent all of them, with a notice."""
    hosts = rack.hosts("h1", "h2")
    rack.hand_out(rack.archive(BASE), hosts)
    (hosts["h2"].engine / "wants-all").touch()
    archive = rack.archive(BASE, TOP)
    assert rack.hand_out(archive, hosts) == {}
    assert [host.images for host in hosts.values()] == [[NAME]] * 2
    assert any("no such file or directory; sending all layers" in line for line in rack.said)


def test_an_engine_that_refuses_the_whole_image_is_not_sent_it_again(rack: Rack) -> None:
    """An engine that fails to load the whole image is a failure with its message; the image is sent once."""
    hosts = rack.hosts("h1")
    (hosts["h1"].engine / "broken").touch()
    archive = rack.archive(BASE)
    (failure,) = rack.hand_out(archive, hosts).values()
    assert failure.message == ("h1: its engine did not load the image: write /var/lib/docker: input/output error")
    assert hosts["h1"].sent == archive.stream(archive.image("lab/node")).size


def test_an_engine_that_never_stores_the_image_is_given_up_and_what_came_is_kept(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `docker load` that is not done in time is a failure, and the upload stays on the host."""

    def run(self: FakeHost, script: str, *arguments: str, timeout: float = 60, **options: Any) -> CompletedProcess:
        """Raise ProcessTimeout for `load` and record its limit; run other scripts."""
        if arguments[0] != "load":
            return usual(self, script, *arguments, **options)
        limits.append(timeout)
        raise process.ProcessTimeout("h1: `docker load` is not done in time")

    usual, limits = FakeHost.run, list[float]()
    monkeypatch.setattr(FakeHost, "run", run)
    hosts = rack.hosts("h1")
    (failure,) = rack.hand_out(rack.archive(BASE), hosts).values()
    assert (failure.message, limits) == ("h1: `docker load` is not done in time", [remote.STORING])
    assert len(hosts["h1"].staged) == 1


def test_an_engine_here_that_never_hands_the_image_out_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `docker save` that does not end within the limit raises HostError."""
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 60\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(local, "STORING", 0.1)
    with (
        pytest.raises(HostError, match=r"`docker save .*` timed out after"),
        local.spooled("image", tmp_path / "lab", 0, print),
    ):
        pass


def test_who_is_stopped_waits_for_no_host() -> None:
    """KeyboardInterrupt for one host is raised by map_hosts() while another host is still at work."""
    held = threading.Event()

    def work(name: str) -> None:
        """Raise KeyboardInterrupt for h1; wait up to 60 s for others."""
        if name == "h1":
            raise KeyboardInterrupt
        held.wait(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        map_hosts(work, {"h1": "h1", "h2": "h2"})
    held.set()
    assert time.monotonic() - began < 30


def test_a_host_that_cannot_have_it_harms_no_other(rack: Rack) -> None:
    """A host without an engine and one that cannot store files are failures; the third has the image."""
    hosts = rack.hosts("h1", "h2", "h3")
    (hosts["h1"].engine / "down").touch()
    (hosts["h2"].home / ".labctl").write_text("")
    failures = rack.hand_out(rack.archive(BASE), hosts)
    assert {name: failure.node for name, failure in failures.items()} == {"h1": "h1", "h2": "h2"}
    assert "Is the docker daemon running?" in failures["h1"].message
    assert failures["h1"].hint == "on h1: systemctl start docker"
    assert hosts["h3"].images == [NAME]


def test_a_host_without_room_is_told_before_anything_is_sent(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 20 kB free is a failure with what is needed, and nothing is sent."""
    hosts = rack.hosts("h1")
    monkeypatch.setattr(remote, "room", lambda _: Room("/dev/vda", 20_000))
    (failure,) = rack.hand_out(rack.archive(BASE, TOP), hosts).values()
    assert "h1: no room for the image: " in failure.message
    assert "needed on /dev/vda, 20 kB free" in failure.message
    assert hosts["h1"].sent == 0


# --- from host to host ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chained")
def test_hosts_that_reach_each_other_hand_the_image_on(rack: Rack) -> None:
    """Of three hosts that reach each other, the first is sent the image and relays it to the next."""
    hosts = rack.hosts("h1", "h2", "h3")
    archive = rack.archive(BASE, TOP)
    assert rack.hand_out(archive, hosts) == {}
    assert [host.images for host in hosts.values()] == [[NAME]] * 3
    assert [host.sent for host in hosts.values()] == [archive.stream(archive.image("lab/node")).size, 0, 0]
    assert rack.said[0].endswith("to h1 -> h2 -> h3 (each relays to the next)")
    assert not any((host.home / ".labctl").exists() for host in hosts.values())


@pytest.mark.usefixtures("chained")
def test_a_host_that_is_not_reached_by_another_is_sent_the_image_from_here(rack: Rack) -> None:
    """A host that no other reaches is sent the image from here, and relays it to the next."""
    hosts = rack.hosts("h1", "h2", "h3")
    (hosts["h2"].home / "unreachable").touch()
    assert rack.hand_out(rack.archive(BASE, TOP), hosts) == {}
    assert [bool(host.sent) for host in hosts.values()] == [True, True, False]
    assert "to h1, h2 -> h3 (" in rack.said[0]


@pytest.mark.usefixtures("chained")
def test_a_way_that_leads_to_another_machine_is_not_taken(rack: Rack) -> None:
    """If h2's address leads to another machine from h1, h2 is sent the image from here and that machine nothing."""
    hosts = rack.hosts("h1", "h2", "other")
    targets = ImageTargets(
        hosts={name: hosts[name] for name in ("h1", "h2")}, notice=lambda _: None, addresses={"h2": "other"}
    )
    assert distribute.hand_out(rack.archive(BASE), "lab/node", targets) == {}
    assert (bool(hosts["h2"].sent), hosts["other"].staged) == (True, [])


@pytest.mark.usefixtures("chained")
def test_where_a_link_breaks_the_rest_comes_from_here(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that becomes unreachable for the relaying one is sent the rest from here, with a notice."""
    hosts = rack.hosts("h1", "h2")

    def break_after(*arguments: object, **_: object) -> bool:
        """Make h2 unreachable for other hosts; return True, as if it were reached."""
        (hosts["h2"].home / "unreachable").touch()
        return True

    monkeypatch.setattr(remote, "reaches", break_after)
    assert rack.hand_out(rack.archive(BASE, TOP), hosts) == {}
    assert hosts["h2"].sent > 0
    assert any("h2: h1 relayed 0 B of" in line and "sending the rest from here" in line for line in rack.said)


# --- from elsewhere ------------------------------------------------------------------------------------------


def fleet_of(hosts: dict[str, FakeHost]) -> ImageTargets:
    """Return hosts to distribute to, without notices and addresses."""
    return ImageTargets(hosts=hosts, notice=lambda _: None, addresses={})


def test_hosts_pull_what_is_of_a_registry_and_not_here(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that is not here is pulled by each host; a host whose registry lacks it is a failure."""
    monkeypatch.setattr(local, "described", lambda _: None)
    hosts = rack.hosts("h1", "h2")
    image_archive(hosts["h1"].engine / "registry", "far.example/node:1", [BASE])
    failures = distribute.send("far.example/node:1", fleet_of(hosts), rack.path)
    assert hosts["h1"].images == ["far.example/node:1"]
    assert list(failures) == ["h2"]
    assert "pull access denied" in failures["h2"].message


def test_hosts_that_pulled_different_images_are_told_apart(rack: Rack) -> None:
    """After a pull, a host whose image differs from the first host's is a failure."""
    hosts = rack.hosts("h1", "h2", "h3")
    for host, layer in zip(hosts.values(), (BASE, BASE, OTHER), strict=True):
        image_archive(host.engine / "registry", "far.example/node:1", [layer])
    (failure,) = distribute.pull("far.example/node:1", fleet_of(hosts)).values()
    assert failure.message == "h3: image far.example/node:1 differs from the one on h1"


def test_a_dry_run_tells_what_would_be_brought_to_hosts(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """preview() says which hosts would be sent, pull or build the image; it is empty if all have it."""

    def summary(image: str, how: str) -> str:
        """Return the preview of bringing the image to the hosts in this way."""
        return distribute.preview(image, how, fleet_of(hosts))

    hosts = rack.hosts("h1", "h2", "h3")
    rack.hand_out(rack.archive(BASE), {"h1": hosts["h1"]})
    (record,) = (json.loads(path.read_text()) for path in hosts["h1"].engine.glob("*.json"))
    monkeypatch.setattr(local, "described", lambda _: {**record, "Size": 2_284_984_296})
    assert summary(NAME, "send") == f"send image {NAME} (2.28 GB or less) to h2, h3"
    assert summary(NAME, "pull") == f"pull image {NAME} on h2, h3"
    assert summary(NAME, "build") == f"build image {NAME} on h2, h3"
    monkeypatch.setattr(local, "described", lambda _: None)
    assert summary("labctl/cpu", "send") == "build image labctl/cpu here and send it to h1, h2, h3"
    assert summary("far.example/node:1", "send") == "pull image far.example/node:1 on h1, h2, h3"
    rack.hand_out(rack.archive(BASE), hosts)
    assert summary(NAME, "send") == ""
    assert sum(len(host.staged) for host in hosts.values()) == 0


def test_another_persons_image_under_labctls_tag_stays_on_its_host(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's image under labctl's tag is a failure of its host and stays; the other host gets labctl's."""
    name, hosts = "labctl/cpu:latest", rack.hosts("h1", "h2")
    labels = {catalog.INPUTS_LABEL: "of files"}
    rack.hand_out_as(name, rack.archive(OTHER, name=name), {"h1": hosts["h1"]})
    theirs = [path.read_text() for path in hosts["h1"].engine.glob("*.json")]
    archive = rack.archive(BASE, name=name, Labels=labels)
    ours = {"Id": min(archive.image(name).ids), "Size": 1, "RootFS": {}, "Config": {"Labels": labels}}
    monkeypatch.setattr(local, "described", lambda _: ours)
    monkeypatch.setattr(local, "spooled", lambda *_: contextlib.nullcontext(archive))
    (failure,) = distribute.send(name, fleet_of(hosts), rack.path).values()
    assert failure.message == "h1: image labctl/cpu:latest was not built by labctl, so it is not replaced"
    assert [path.read_text() for path in hosts["h1"].engine.glob("*.json")] == theirs
    assert hosts["h2"].images == [name]


@pytest.mark.parametrize("name", ["labctl/cpu", "labctl/packages:0123456789ab", "labctl/from:0123456789ab"])
def test_one_of_labctls_own_that_is_nowhere_is_to_be_built(
    rack: Rack, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An own image of labctl that is nowhere is a failure with `labctl build` as hint, and nothing is pulled."""
    monkeypatch.setattr(local, "described", lambda _: None)
    monkeypatch.setattr(remote, "pull", lambda *_: pytest.fail("pulled"))
    (failure,) = distribute.send(name, fleet_of(rack.hosts("h1")), rack.path).values()
    assert failure.message == f"h1: image {name} not found, nor on this machine"
    assert failure.hint == "labctl build, or labctl bundle load FILE"


def test_only_hosts_that_lack_it_build(rack: Rack) -> None:
    """build() builds only on the host that lacks the image."""
    hosts = rack.hosts("h1", "h2")
    rack.hand_out(rack.archive(BASE), {"h1": hosts["h1"]})
    built: list[str] = []
    assert distribute.build("lab/node", fleet_of(hosts), built.append) == {}
    assert built == ["h2"]


def test_engines_that_count_images_differently_are_seen_to_have_the_same() -> None:
    """alike() compares layers and configuration without empty fields, not ids; False if one is None."""
    described = {
        "Id": "sha256:a",
        "RootFS": {"Layers": ["l"]},
        "Created": "now",
        "Config": {"Env": ["A=1"], "User": ""},
    }
    assert alike(described, {**described, "Id": "sha256:b", "Config": {"Env": ["A=1"]}})
    assert not alike(described, {**described, "Id": "sha256:b", "Config": {"Env": ["A=2"]}})
    assert not alike(None, described)


# --- two attempts at once ------------------------------------------------------------------------------------


def writer(host: FakeHost, name: str) -> subprocess.Popen[bytes]:
    """Start the host's append of an upload, which writes its input to the file of this name."""
    environ = {**os.environ, "HOME": str(host.home)}
    return subprocess.Popen(["sh", "-c", remote.SCRIPT, "sh", "append", name, "0"], stdin=subprocess.PIPE, env=environ)


def test_an_attempt_that_was_cut_off_unseen_is_ended(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """size() stops a writer that has stalled, and returns the bytes that it wrote."""
    monkeypatch.setattr(remote, "STALLED", 1)
    (host,) = rack.hosts("h1").values()
    with writer(host, "file") as other:
        assert other.stdin
        other.stdin.write(b"half")
        other.stdin.flush()
        wait_until(lambda: host.staged and host.staged[0].read_bytes() == b"half", 120, "half of it is there")
        assert remote.size(host, "file") == 4
        assert other.wait(60) == -signal.SIGTERM


def test_an_attempt_that_goes_on_is_let_finish(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """size() waits for a writer that keeps writing, and returns all its bytes."""
    # It writes for longer than that, but never pauses for so long.
    monkeypatch.setattr(remote, "STALLED", 3)
    (host,) = rack.hosts("h1").values()
    with writer(host, "file") as other, ThreadPoolExecutor(1) as pool:
        assert other.stdin
        wait_until((host.home / ".labctl/images/file.writer.0").is_symlink, 120, "it has begun")
        size = pool.submit(remote.size, host, "file")
        for _ in range(25):
            other.stdin.write(b"x")
            other.stdin.flush()
            with contextlib.suppress(NotYet):
                size.result(0.2)
        other.stdin.close()
        assert size.result(120) == 25
        assert other.wait(60) == 0


def test_one_of_two_attempts_writes(rack: Rack) -> None:
    """append() writes nothing while another writer has the file, or at another place than its end."""
    (host,) = rack.hosts("h1").values()
    with writer(host, "file") as other:
        wait_until((host.home / ".labctl/images/file.writer.0").is_symlink, 120, "it has begun")
        assert not remote.append(host, "file", 0, [b"of the second"])
        other.communicate(b"of the first")
    assert host.staged[0].read_bytes() == b"of the first"
    assert not remote.append(host, "file", 0, [b"of the second"])
    assert remote.append(host, "file", 12, [b", and the rest"])
    assert host.staged[0].read_bytes() == b"of the first, and the rest"


def test_an_attempt_that_comes_second_goes_on_with_what_the_first_has_brought(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another attempt uploads the image meanwhile, distribution goes on with it and ends without failure."""
    (host,) = rack.hosts("h1").values()
    archive = rack.archive(BASE, TOP)

    def second(host: FakeHost, name: str, at: int, chunks: Iterator[bytes]) -> bool:
        """Upload all as the first attempt, once, then append as the second."""
        if not firsts:
            with writer(host, name) as first:
                first.communicate(b"".join(archive.stream(archive.image("lab/node")).chunks()))
            firsts.append(first)
        return append(host, name, at, chunks)

    append, firsts = remote.append, list[object]()
    monkeypatch.setattr(remote, "append", second)
    assert rack.hand_out(archive, {"h1": host}) == {}
    assert (host.images, host.staged) == ([NAME], [])


def test_what_another_attempt_has_loaded_and_removed_meanwhile_is_there(rack: Rack) -> None:
    """load() of an upload removed by another attempt returns the id of the image loaded."""
    (host,) = rack.hosts("h1").values()
    archive = rack.archive(BASE)
    assert rack.hand_out(archive, {"h1": host}) == {}
    assert remote.load(host, "gone", NAME) in archive.image("lab/node").ids

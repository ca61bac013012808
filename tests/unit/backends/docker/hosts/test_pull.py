"""Transfer of results from hosts: real directories and tar streams, those of a hostile host among them."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.nearby import Nearby

from labctl.backends.docker.hosts import pull
from labctl.errors import HostError
from labctl.records import manifest
from labctl.records.merge import Merge
from labctl.system.process import CompletedProcess


def write(root: Path, **files: str) -> Path:
    """Write files by name, with ``__`` for a slash and ``_log`` for the suffix ``.log``; return the root."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_log", ".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def texts(root: Path) -> dict[str, str]:
    """Return the content of each file below a folder, by path."""
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    """Return the permission bits of a path."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make the run's directory on this machine, with three files; return it."""
    return write(tmp_path / "runs/1", rank="#!/bin/bash", job="{}", ranks__own_log="here")


def test_what_ranks_wrote_comes_back_for_its_owner_alone(run: Path, tmp_path: Path) -> None:
    """pull() brings files, empty folders and links, without setuid and rights of others; six files, none refused."""
    remote = write(tmp_path / "there", ranks__0_log="loss 1", model__config="{}", model__run="x", empty="")
    (remote / "model/run").chmod(0o4775)
    (remote / "model").chmod(0o777)
    (remote / "nothing/in/it").mkdir(parents=True)
    (remote / "latest").symlink_to("model")
    (remote / "new\nline").write_text("x")
    (remote / "model/again").hardlink_to(remote / "model/config")
    pulled = pull.pull(Nearby(), str(remote), run)
    assert {**texts(run)} == {**texts(remote), "rank": "#!/bin/bash", "job": "{}", "ranks/own.log": "here"}
    assert (mode(run / "model"), mode(run / "model/config"), mode(run / "model/run")) == (0o700, 0o600, 0o700)
    assert (run / "nothing/in/it").is_dir()
    assert os.readlink(run / "latest") == "model"  # noqa: PTH115
    assert (pulled.files, pulled.aside, pulled.refused) == (6, [], [])


def test_what_was_sent_is_left_out_unless_it_was_changed_there(run: Path, tmp_path: Path) -> None:
    """A file that was sent and not changed does not come; a changed one goes to hosts/h1."""
    sent = manifest.scan(run)
    remote = write(tmp_path / "there", rank="#!/bin/bash", job="changed by a rank", ranks__own_log="here")
    # Written here since.
    write(run, rank="here only")
    pulled = pull.pull(Nearby(name="h1"), str(remote), run, pushed=sent)
    assert pulled.aside == ["hosts/h1/job"]
    assert texts(run) == {
        "rank": "here only",
        "job": "{}",
        "ranks/own.log": "here",
        "hosts/h1/job": "changed by a rank",
    }


def test_a_hard_link_to_what_was_sent_brings_its_content(run: Path) -> None:
    """A hard link to a file that was sent comes as a file with the sent content."""
    merge = Merge(run, "h1", manifest.scan(run))
    write(run, rank="changed here")
    merge.unpack(packed(("job", FILE, "{}"), ("kept", HARD, "job"), ("rank", FILE, "#!/bin/bash"), ("r", HARD, "rank")))
    assert texts(run) == {
        "rank": "changed here",
        "job": "{}",
        "kept": "{}",
        "r": "#!/bin/bash",
        "ranks/own.log": "here",
    }
    assert (merge.found.files, merge.found.aside, merge.found.refused) == (2, [], [])


def test_hosts_at_once_lose_nothing_of_each_other(run: Path, tmp_path: Path) -> None:
    """Eight hosts at once: each one's files come, equal ones once, differing ones in hosts/NAME."""
    names = [f"h{number}" for number in range(8)]
    for name in names:
        write(tmp_path / name, same="same", other__file=name, **{f"only_{name}": name, f"ranks__{name}_log": name})
        (tmp_path / name / "link").symlink_to(f"only_{name}")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: pull.pull(Nearby(name=name), str(tmp_path / name), run), names))
    kept = texts(run)
    first = kept["other/file"]
    assert kept["same"] == "same"
    for name in names:
        assert kept[f"only_{name}"] == kept[f"ranks/{name}.log"] == name
        assert kept.get(f"hosts/{name}/other/file", first) == name
    assert len([path for path in kept if path.endswith("other/file")]) == len(names)


def test_what_a_killed_labctl_left_half_fetched_goes(run: Path, tmp_path: Path) -> None:
    """pull() removes the temporary folder that an earlier pull from this host left, and no other host's."""
    before = texts(run)
    write(run / ".incoming-abcd1234.h1", file="half")
    incoming = write(run / ".incoming-abcd1234.x.h1", file="on its way")
    pull.pull(Nearby(name="h1"), str(write(tmp_path / "there", job="{}")), run)
    assert texts(run) == {**before, f"{incoming.name}/file": "on its way"}


def test_a_log_that_has_grown_replaces_its_beginning(run: Path, tmp_path: Path) -> None:
    """A longer log replaces its beginning, a shorter one does not; another changed file goes to hosts/h1."""
    remote = write(tmp_path / "there", ranks__0_log="step 1\n", numbers="1")
    pull.pull(Nearby(name="h1"), str(remote), run)
    write(remote, ranks__0_log="step 1\nstep 2\n", numbers="12")
    pull.pull(Nearby(name="h1"), str(remote), run)
    write(remote, ranks__0_log="step")
    assert pull.pull(Nearby(name="h1"), str(remote), run).aside == ["hosts/h1/numbers"]
    assert (run / "ranks/0.log").read_text() == "step 1\nstep 2\n"
    assert ((run / "numbers").read_text(), (run / "hosts/h1/numbers").read_text()) == ("1", "12")


class Broken(Nearby):
    """A connection that breaks after this many bytes, with or without an error message."""

    after = 0
    word = True

    def receive(
        self, script: str, *arguments: str, on_chunk: Callable[[bytes], object], timeout: float
    ) -> CompletedProcess:
        """Receive the first bytes, then raise HostError or return code 255."""
        came: list[bytes] = []
        done = super().receive(script, *arguments, on_chunk=came.append, timeout=timeout)
        on_chunk(b"".join(came)[: self.after])
        if self.word:
            raise HostError("gpu-1: the connection was lost: reset by peer")
        return CompletedProcess(done.argv, 255, "", "reset by peer")


@pytest.mark.parametrize("word", [True, False])
def test_of_a_broken_stream_whole_files_and_beginnings_of_logs_are_kept(run: Path, tmp_path: Path, word: bool) -> None:
    """A broken stream raises HostError and keeps whole files and a log's beginning; a later pull completes them."""
    remote = tmp_path / "there"
    text = {"a": "a" * 3000, "b.log": "b" * 3000, "c": "c" * 3000}
    remote.mkdir()
    for name, content in text.items():
        (remote / name).write_text(content)
    before = texts(run)
    host = Broken()
    host.word = word
    contents = set()
    for after in range(0, 12_000, 900):
        host.after = after
        with pytest.raises(HostError, match=r"gpu-1: cannot fetch \S+: (the connection was lost: )?reset by peer; "):
            pull.pull(host, str(remote), run)
        for name, came in texts(run).items():
            if name not in before:
                assert came == text[name] or (name == "b.log" and text[name].startswith(came))
                contents.add((name, came == text[name]))
    assert {("a", True), ("b.log", False), ("b.log", True), ("c", True)} == contents
    assert texts(run) == {**before, **text}
    pull.pull(Nearby(), str(remote), run)
    assert texts(run) == {**before, **text}


def test_a_directory_that_is_not_there_is_named(run: Path) -> None:
    """pull() of a missing directory raises HostError that names it and that nothing came."""
    with pytest.raises(HostError, match=r"gpu-1: cannot fetch /no/such: .*/no/such; fetched 0 new files"):
        pull.pull(Nearby(), "/no/such", run)


def test_what_cannot_be_written_here_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If fchmod() fails with a full disk, pull() raises HostError and leaves the run's files as they were."""
    remote = write(tmp_path / "there", large="x" * 300_000)

    def full(descriptor: int, mode: int) -> None:
        """Raise OSError that the disk is full."""
        raise OSError(28, "No space left on device", "large")

    monkeypatch.setattr(os, "fchmod", full)
    before = texts(run)
    with pytest.raises(HostError, match="cannot write large: No space left on device"):
        pull.pull(Nearby(), str(remote), run)
    assert texts(run) == before


def packed(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """Build a tar stream of arbitrary members: name, kind, and a link's target or a file's text."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o777
            if kind == tarfile.REGTYPE:
                member.size = len(text)
            else:
                member.linkname = text
            archive.addfile(member, io.BytesIO(text.encode()))
    stream.seek(0)
    return stream


FILE, LINK, HARD, FOLDER, PIPE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, "x")],
        [("{outside}/out", FILE, "x")],
        [("a/../../out", FILE, "x")],
        [("link", LINK, "../")],
        [("link", LINK, "{outside}"), ("link/out", FILE, "x")],
        [("link", LINK, "{outside}/secret")],
        [("deep/link", LINK, "../../secret")],
        [("q", LINK, "."), ("link", LINK, "q/r/../../../secret"), ("r", FOLDER, "")],
        [("q", LINK, "deep/er"), ("deep/er", FOLDER, ""), ("link", LINK, "q/../../../secret")],
        [("deep", FOLDER, ""), ("link", LINK, "deep/../secret")],
        [("hard", HARD, "{outside}/secret")],
        [("hard", HARD, "../secret")],
        [("pipe", PIPE, "")],
        [("hosts/h1", LINK, "{outside}"), ("taken", FILE, "x")],
        [("taken", LINK, "../secret"), ("taken", FILE, "x")],
    ],
)
def test_nothing_gets_out_of_the_directory(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    """A member with `..`, an absolute path, a link or a pipe touches no file outside; it is refused or put aside."""
    outside, into = tmp_path / "outside", tmp_path / "outside/into"
    write(into, taken="here")
    (outside / "secret").write_text("theirs")
    before = {str(path) for path in outside.iterdir()}
    merge = Merge(into, "h1")
    merge.unpack(
        packed(*((name.format(outside=outside), kind, text.format(outside=outside)) for name, kind, text in members))
    )
    assert {str(path) for path in outside.iterdir()} == before
    assert (outside / "secret").read_text() == "theirs"
    assert (into / "taken").read_text() == "here"
    for path in into.rglob("*"):
        assert path.resolve().is_relative_to(into)
        assert not path.is_file() or path.read_text() != "theirs"
    assert merge.found.refused or merge.found.aside


def test_a_link_that_is_there_already_is_never_written_through(tmp_path: Path) -> None:
    """A member below an existing link is put aside into hosts/h1, and nothing is written through the link."""
    outside, into = tmp_path / "outside", tmp_path / "into"
    outside.mkdir()
    into.mkdir()
    (into / "folder").symlink_to(outside)
    merge = Merge(into, "h1")
    merge.unpack(packed(("folder/file", FILE, "x")))
    assert list(outside.iterdir()) == []
    assert (into / "hosts/h1/folder/file").read_text() == "x"


def test_a_link_within_comes_into_a_directory_that_is_reached_by_a_link(tmp_path: Path) -> None:
    """In a directory reached by a symbolic link, a link within it is unpacked."""
    (tmp_path / "into").mkdir()
    (tmp_path / "alias").symlink_to("into")
    merge = Merge(tmp_path / "alias", "h1")
    merge.unpack(packed(("first", FILE, "1"), ("near", LINK, "first")))
    assert merge.found.refused == []
    assert (tmp_path / "into/near").read_text() == "1"


def test_links_of_two_hosts_do_not_lead_out_together(tmp_path: Path) -> None:
    """A link of h1 that would lead out only with another one of h2 is refused."""
    into = tmp_path / "outside/into"
    into.mkdir(parents=True)
    (into.parent / "secret").write_text("theirs")
    first, second = Merge(into, "h1"), Merge(into, "h2")
    first.unpack(packed(("a", LINK, "d/../secret")))
    second.unpack(packed(("d", LINK, ".")))
    assert first.found.refused == ["a"]
    assert [path.name for path in into.iterdir()] == ["d"]


def test_every_content_that_a_file_aside_had_is_kept(run: Path, tmp_path: Path) -> None:
    """Three contents of one file of host h1 are kept as job, job.2 and job.3; an equal one adds none."""
    remote = tmp_path / "there"
    for text in ("one", "two", "two", "three"):
        pull.pull(Nearby(name="h1"), str(write(remote, job=text)), run)
    kept = texts(run)
    assert [kept[f"hosts/h1/job{end}"] for end in ("", ".2", ".3")] == ["one", "two", "three"]
    assert len(list((run / "hosts/h1").iterdir())) == 3


def odd(kind: bytes = FILE, **headers: str) -> bytes:
    """Build a tar stream with a file, and with an entry of these headers; ``__`` stands for a dot."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("first"))
        member = tarfile.TarInfo("odd")
        member.type, member.pax_headers = kind, {name.replace("__", "."): text for name, text in headers.items()}
        archive.addfile(member)
    return stream.getvalue()


@pytest.mark.parametrize(
    "stream",
    [
        odd(GNU__sparse__map="0,1,a"),
        odd(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__realsize="9"),
        odd()[:512] + packed(("x" * 200, FILE, "")).getvalue()[:1024] * 3000,
    ],
    ids=["numbers", "sparse", "many"],
)
def test_headers_that_make_no_sense_are_a_broken_stream(run: Path, tmp_path: Path, stream: bytes) -> None:
    """A tar stream with invalid headers raises HostError; the file before it came."""
    write(tmp_path, bin__tar="#!/bin/sh\nexec cat stream\n")
    (tmp_path / "bin/tar").chmod(0o755)
    (tmp_path / "stream").write_bytes(stream)
    host = Nearby(environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    with pytest.raises(
        HostError, match=r"gpu-1: cannot fetch \S+: the stream broke off: .*; fetched 1 new file before that"
    ):
        pull.pull(host, str(tmp_path), run)
    assert (run / "first").exists()


@pytest.mark.parametrize(
    "stream", [odd(path="a\0b"), odd(LINK, linkpath="a\0b"), odd(LINK), odd(HARD, linkpath="a\0b")]
)
def test_what_no_file_can_be_called_is_refused(tmp_path: Path, stream: bytes) -> None:
    """A member whose name or link has a NUL, or no target, is refused; the file before it came."""
    merge = Merge(tmp_path, "h1")
    assert merge.unpack(io.BytesIO(stream)) == ""
    assert (len(merge.found.refused), merge.found.files) == (1, 1)


@pytest.mark.parametrize("when", ["1e30", "nan", "inf", "-5"])
def test_a_date_that_no_file_can_have_is_none(tmp_path: Path, when: str) -> None:
    """A member's mtime that is no valid time is set to 0."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", pax_headers={"mtime": when}, format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("file")
        member.mtime = 7
        archive.addfile(member)
    stream.seek(0)
    Merge(tmp_path, "h1").unpack(stream)
    assert (tmp_path / "file").stat().st_mtime == 0


def test_a_link_that_leads_out_through_one_that_is_here_is_refused(tmp_path: Path) -> None:
    """A link whose target goes through an existing link to the outside is refused."""
    into = tmp_path / "into"
    into.mkdir()
    (into / "folder").symlink_to(tmp_path)
    merge = Merge(into, "h1")
    merge.unpack(packed(("link", LINK, "folder/secret")))
    assert merge.found.refused == ["link"]
    assert [path.name for path in into.iterdir()] == ["folder"]

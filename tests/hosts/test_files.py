"""File transfer to and from a real host, over a real connection."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.rack.host import Host
from support.rack.rack import Rack

from labctl.backends.docker.hosts import pull, push
from labctl.backends.docker.hosts.ssh import SshConnection, connected
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.records import manifest

pytestmark = pytest.mark.docker

NAMES = ("a b", 'it\'s "one"', "new\nline", "-rf", "ünï", "$HOME")


@pytest.fixture
def host(rack: Rack) -> Host:
    """Return a shared host."""
    return rack.hosts(1)[0]


@contextmanager
def reached(host: Host) -> Iterator[SshConnection]:
    """Connect to the host without errors; yield the connection during the block."""
    target = InventoryHost(name=host.name, address=host.address, user=host.user, port=host.port, key=str(host.key))
    with connected([target], "true", seconds=60) as (connections, errors):
        assert errors == {}
        yield connections[host.name]


@pytest.fixture
def connection(rack: Rack, host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshConnection]:
    """Yield a connection to the host, with the rack's ssh on PATH."""
    monkeypatch.setenv("PATH", rack.environ["PATH"])
    with reached(host) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a directory with odd names and a file `key` of mode 0600; return its path."""
    for name in NAMES:
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / name).write_text(name)
    (tmp_path / "source/key").write_text("one")
    (tmp_path / "source/key").chmod(0o600)
    return tmp_path / "source"


def test_files_reach_a_host_without_python_and_come_back(
    connection: SshConnection, host: Host, source: Path, tmp_path: Path
) -> None:
    """push sends names and modes, then changed files only; pull brings results; remove deletes all."""
    lab = f"{host.home}/.labctl/lab"
    files = manifest.scan(source)
    push.push_new(connection, files, f"{lab}/runs/.outputs/1")
    push.push(connection, lab, {"workloads": files})
    assert host.run("stat", "-c", "%a %U", f"{lab}/workloads/.current/key", user="ann").stdout == "600 ann\n"
    assert host.run("cat", f'{lab}/workloads/it\'s "one"/it\'s "one"').stdout == 'it\'s "one"'

    (source / "large").write_bytes(os.urandom(4 << 20))
    push.push(connection, lab, {"workloads": manifest.scan(source)})
    before = host.traffic().received
    assert push.push(connection, lab, {"workloads": manifest.scan(source)}) == ()
    (source / "key").write_text("two")
    assert push.push(connection, lab, {"workloads": manifest.scan(source)}) == ("workloads/key",)
    assert host.traffic().received - before < 200_000
    assert host.run("cat", f"{lab}/workloads/key").stdout == "two"

    host.run("sh", "-c", f"echo loss > {lab}/runs/.outputs/1/rank.log", user="ann")
    pulled = pull.pull(connection, f"{lab}/runs/.outputs/1", tmp_path / "back", pushed=files)
    assert (pulled.files, (tmp_path / "back/rank.log").read_text()) == (1, "loss\n")

    push.remove(connection, lab)
    assert host.run("find", f"{host.home}/.labctl", check=False).stdout == ""


def test_a_full_disk_is_named_and_what_was_there_still_shows(
    connection: SshConnection, host: Host, source: Path
) -> None:
    """push raises HostError with `df -h` and keeps the old files; after the cure it works."""
    lab = f"{host.home}/.labctl/lab"
    push.push(connection, lab, {"workloads": manifest.scan(source)})
    host.fill_disk()
    (source / "key").write_text("two" * 1000)
    with pytest.raises(HostError, match=rf"{host.name} .*: cannot write {lab}: .*No space left on device") as caught:
        push.push(connection, lab, {"workloads": manifest.scan(source)})
    assert caught.value.node == host.name
    assert "df -h" in caught.value.hint
    assert host.run("cat", f"{lab}/workloads/key").stdout == "one"
    host.cure()
    push.push(connection, lab, {"workloads": manifest.scan(source)})
    assert host.run("cat", f"{lab}/workloads/key").stdout == "two" * 1000
    assert host.run("ls", "-A", lab).stdout == "workloads\n"


def test_what_may_not_be_written_is_named(connection: SshConnection, host: Host, source: Path) -> None:
    """push to /srv raises HostError with `Permission denied` and the path."""
    with pytest.raises(HostError, match=r"cannot write /srv/lab: .*/srv/lab.*: Permission denied"):
        push.push(connection, "/srv/lab", {"workloads": manifest.scan(source)})


def test_copies_whose_connection_breaks_never_show(
    connection: SshConnection, host: Host, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut push at four places: HostError, and the host shows the old files; a whole push the new ones."""
    lab = f"{host.home}/.labctl/lab"
    names = [f"file-{number}" for number in range(6)]
    (source / "large").write_bytes(os.urandom(1 << 20))
    for name in names:
        (source / name).write_text("old ")
    push.push(connection, lab, {"workloads": manifest.scan(source)})
    (source / "large").write_bytes(os.urandom(1 << 20))
    for name in names:
        (source / name).write_text("new ")
    new = {"workloads": manifest.scan(source)}
    whole = push.stream
    length = sum(map(len, whole([push.Update("", new["workloads"])])))
    shown = ("sh", "-c", f"cd {lab}/workloads; cat file-*")
    # The unit tests of push cover more cut positions.
    for cut in (0, 3, 6, 9):
        with reached(host) as doomed, monkeypatch.context() as patched:

            def breaking(
                parts: Iterable[push.Update], left: int = cut * length // 10, doomed: SshConnection = doomed
            ) -> Iterator[bytes]:
                """Yield the first ``left`` bytes of the stream, then close the connection."""
                for chunk in whole(parts):
                    if left <= len(chunk):
                        yield chunk[:left]
                        doomed.close()
                        return
                    left -= len(chunk)
                    yield chunk

            patched.setattr(push, "stream", breaking)
            with pytest.raises(HostError, match=rf"^{host.name} "):
                push.push(doomed, lab, new)
        assert host.run(*shown).stdout == "old " * len(names)
    push.push(connection, lab, new)
    assert host.run(*shown).stdout == "new " * len(names)
    assert host.run("ls", "-A", lab).stdout == "workloads\n"

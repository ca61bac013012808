"""Handling of ssh's outcomes, with a stand-in for ssh that runs the host's commands here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from labctl.backends.docker.hosts.ssh import SshConnection
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.system.parallel import begin

SSH = """#!/bin/sh
for last; do :; done
cd {folder}
case "$*" in
*"-O forward"*) exit ;;
*ControlMaster=yes*) ;;
*) exec sh -c "$last" ;;
esac
{login}
"""

Login = Callable[[str], None]
Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return a function that puts a program with this name and text on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)

    def write(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    return write


@pytest.fixture
def login(program: Program, tmp_path: Path) -> Login:
    """Return a function that puts an `ssh` on PATH whose login runs this script; ``$last`` is the command."""
    return lambda text: program("ssh", SSH.format(folder=tmp_path, login=text))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[InventoryHost]:
    """Yield host `red`, with a bound Unix socket as its engine's."""
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{tmp_path}/engine")
        yield InventoryHost(name="red", docker=f"{tmp_path}/engine")


@contextmanager
def opened(target: InventoryHost, stem: Path, seconds: float = 10) -> Iterator[str]:
    """Open a connection; yield the output of its opening script; close it."""
    link = SshConnection(target, str(stem), seconds)
    try:
        link.open("printf told", seconds)
        yield link.output
    finally:
        link.close()


def test_a_users_name_may_have_blanks(login: Login, program: Program, target: InventoryHost, tmp_path: Path) -> None:
    """With a user name that has a blank, by `id`, a connection opens and its script's output is read."""
    login('exec sh -c "$last"')
    program("id", "#!/bin/sh\necho 'CORP\\john doe'\n")
    with opened(target, tmp_path / "0") as output:
        assert output == "told"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("echo Timeout, server red not responding. >&2", ": Timeout, server red not responding."),
        (":", ""),
    ],
)
def test_why_a_connection_was_lost_is_told_without_the_banner(
    login: Login, target: InventoryHost, tmp_path: Path, last: str, why: str
) -> None:
    """why_lost() is empty while connected; afterwards it has ssh's last error without the banner before."""
    os.mkfifo(tmp_path / "cut")
    login(f"""
printf 'Authorized users only.\\nAll else is recorded.\\n' >&2
sh -c "$last" &
read -r _ <cut
{last}
exit 255
""")
    connection = SshConnection(target, f"{tmp_path}/0", 5)
    try:
        connection.open(":", 10)
        assert connection.why_lost() == ""
        (tmp_path / "cut").write_text("now\n")
        assert connection.why_lost() == f"red: the connection was lost{why}"
    finally:
        connection.close()


def test_a_connection_is_told_of_and_counted_once_it_is_made_again(
    login: Login, target: InventoryHost, tmp_path: Path
) -> None:
    """After a cut and reconnect(), why_lost() waits until the connection is made, and `made` is 2."""
    for name in ("cut", "tried", "go"):
        os.mkfifo(tmp_path / name)
    login("""
[ ! -e again ] || { echo >tried; read -r _ <go; }
touch again
sh -c "$last" &
read -r _ <cut
exit 255
""")
    connection = SshConnection(target, f"{tmp_path}/0", 5)
    try:
        connection.open(":", 10)
        (tmp_path / "cut").write_text("now\n")
        assert connection.why_lost()
        made = begin(lambda: connection.reconnect(10))
        (tmp_path / "tried").read_text()
        outcome = begin(lambda: (connection.why_lost(), connection.made))
        # Longer than the time that a connection which stands is asked for.
        assert wait([outcome], 1.2).not_done
        assert connection.made == 1
        (tmp_path / "go").write_text("now\n")
        assert outcome.result(10) == ("", 2)
        made.result(10)
    finally:
        connection.close()


def test_a_host_that_hung_up_and_then_says_nothing_until_the_time_is_up_has_hung_up(
    login: Login, target: InventoryHost, tmp_path: Path
) -> None:
    """A host that first closes the connection and then hangs raises HostError that it closed the connection."""
    login("""
[ ! -e tried ] || exec sleep 60
touch tried
echo 'kex_exchange_identification: Connection closed by remote host' >&2
exit 255
""")
    with pytest.raises(HostError, match="red: closed the connection before login"), opened(target, tmp_path / "0", 5):
        pass
    assert (tmp_path / "tried").exists()

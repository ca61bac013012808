"""Connections to real sshds with hosts' usual defaults and refusals, all in one container."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker.models.containers import Container
from msgspec.structs import replace
from support.harness import wait_until

import docker
from docker import DockerClient
from labctl.backends.docker.hosts.ssh import SshConnection, connected
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.system import process

pytestmark = pytest.mark.docker

# Additional lines of sshd's configuration by port.
SSHDS = {
    2201: "MaxSessions 10\nMaxStartups 10:30:100",
    2202: "AllowStreamLocalForwarding no\nSetEnv PATH=/engine:/usr/bin:/bin\nMaxSessions 10\nMaxStartups 10:30:100",
    2203: "MaxStartups 3:100:3",
    2204: "MaxSessions 1",
}
COMMON = """
HostKey /host/key
AuthorizedKeysFile /host/authorized
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
"""
# The dead socket imitates one that a killed daemon leaves behind.
START = """
useradd --create-home --password '*' guest
mkdir -p /run/sshd
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/dead.sock")'
for config in /host/*.sshd; do /usr/sbin/sshd -f "$config"; done
exec sleep infinity
"""
# The user's options for all hosts, none of which may affect the lab's connections.
PERSONAL = """
    ControlMaster auto
    ControlPath {folder}/personal-%C
    ControlPersist yes
    LocalForward {folder}/personal.sock /var/run/docker.sock
    RemoteCommand uname
    RequestTTY force
    LogLevel QUIET
"""


@dataclass(frozen=True)
class Site:
    """A container with several sshds, and an ssh config of the user that knows them."""

    folder: Path
    container: Container

    @property
    def id(self) -> str:
        """Return the container's id."""
        return str(self.container.id)

    def host(self, port: int = 2201) -> InventoryHost:
        """Return the host entry of the sshd on this container port, at its published port, as root."""
        published = self.container.ports[f"{port}/tcp"]
        assert published
        return InventoryHost(name=f"host-{port}", address="127.0.0.1", port=int(published[0]["HostPort"]), user="root")

    def trust(self, key: str = "key") -> None:
        """Write known_hosts with this key as the host key of all sshds."""
        public = (self.folder / f"{key}.pub").read_text()
        lines = [f"[127.0.0.1]:{self.host(port).port} {public}" for port in SSHDS]
        (self.folder / "known").write_text("".join(lines))

    def configure(self, more: str = "", key: str = "person") -> None:
        """Write the user's ssh config: these lines, then known_hosts and this identity for all hosts."""
        common = f"    UserKnownHostsFile {self.folder}/known\n    IdentityFile {self.folder}/{key}\n"
        (self.folder / "config").write_text(f"{more}\nHost *\n{common}    IdentitiesOnly yes\n")


@pytest.fixture(scope="module")
def shared_site(engine: DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a container with an sshd per port of SSHDS, with keys and an ssh of its own configuration."""
    folder = tmp_path_factory.mktemp("site")
    folder.chmod(0o755)
    for name in ("key", "person", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized").write_text((folder / "person.pub").read_text())
    for port, lines in SSHDS.items():
        (folder / f"{port}.sshd").write_text(f"Port {port}\n{COMMON}{lines}\n")
    container = engine.containers.run(
        image,
        entrypoint=["sh", "-c", START],
        detach=True,
        init=True,
        ports={f"{port}/tcp": ("127.0.0.1", 0) for port in SSHDS},
        volumes={
            str(folder): {"bind": "/host", "mode": "ro"},
            "/var/run/docker.sock": {"bind": "/var/run/docker.sock", "mode": "rw"},
            str(Path(shutil.which("docker") or "").resolve()): {"bind": "/engine/docker", "mode": "ro"},
        },
    )
    try:
        # ssh takes the user's configuration from passwd's home directory, not from HOME, so pass it explicitly.
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)
        site = Site(folder, container)
        container.reload()
        for port in SSHDS:
            wait_until(lambda port=port: _greets(site.host(port).port), 120, f"an sshd on {port}")  # type: ignore[misc]
        yield site
    finally:
        container.remove(force=True, v=True)


@pytest.fixture
def site(shared_site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return the shared site with right host key and identity, and its ssh first on PATH."""
    monkeypatch.setenv("PATH", f"{shared_site.folder}/bin", prepend=os.pathsep)
    shared_site.trust()
    shared_site.configure()
    return shared_site


def _greets(port: int) -> bool:
    """Return True if an sshd answers on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as made:
        return made.recv(4) == b"SSH-"
    return False


@contextlib.contextmanager
def single_connection(target: InventoryHost, opening: str = ":") -> Iterator[SshConnection]:
    """Connect to the host without errors; yield the connection during the block."""
    with connected([target], opening, seconds=60) as (connections, errors):
        assert errors == {}
        yield connections[target.name]


def refusal(target: InventoryHost, opening: str = ":") -> HostError:
    """Connect to the host, which must fail with an error of that host; return the error."""
    with connected([target], opening, seconds=60) as (connections, errors):
        assert connections == {}
        assert errors[target.name].node == target.name
        return errors[target.name]


def commands(word: str) -> list[str]:
    """List the command lines of this machine's processes that contain the word, with NULs between arguments."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_text(errors="replace"))
    return [line for line in lines if word in line]


def test_an_opening_script_tells_of_its_host(site: Site) -> None:
    """`connection.output` is the opening script's stdout, without its stderr."""
    opening = "printf 'it'\"'\"'s\\t%s\\\\n' \"$(hostname)\"; cat; echo noise >&2"
    with single_connection(site.host(), opening) as connection:
        assert connection.output == f"it's\t{site.id[:12]}\\n"


def test_thirty_scripts_at_once_all_run_where_sshd_takes_ten_sessions(site: Site) -> None:
    """With MaxSessions 10, 30 concurrent `run` return their own output."""
    with single_connection(site.host()) as connection, ThreadPoolExecutor(30) as pool:
        done = list(pool.map(lambda number: connection.run('sleep 0.1; echo "$1"', str(number)), range(30)))
        assert [(each.out, each.err) for each in done] == [(f"{number}\n", "") for number in range(30)]


def test_scripts_run_even_where_sshd_takes_a_single_session(site: Site) -> None:
    """With MaxSessions 1, scripts run one after the other with stdout and empty stderr."""
    with single_connection(site.host(2204)) as connection:
        assert (connection.run("echo two").out, connection.run("echo three").err) == ("two\n", "")


def test_more_hosts_open_at_once_than_their_gate_lets_in(site: Site) -> None:
    """Seven connections open at an sshd with MaxStartups 3."""
    hosts = [replace(site.host(2203), name=f"host-{number}") for number in range(7)]
    with connected(hosts, "echo here", seconds=60) as (connections, errors):
        assert (errors, list(connections)) == ({}, [host.name for host in hosts])


@pytest.mark.parametrize("port", [2201, 2202], ids=["forwarded", "forwarding forbidden"])
def test_the_engine_is_reached_over_the_connection(site: Site, engine: DockerClient, port: int) -> None:
    """SDK, python-on-whales and docker exec reach the engine, also where sshd forbids forwarding."""
    from python_on_whales import DockerClient as Whales

    with single_connection(site.host(port)) as connection:
        with contextlib.closing(DockerClient(base_url=connection.address)) as client:
            assert client.info()["ID"] == engine.info()["ID"]
            assert client.containers.get(site.id).status == "running"
        whales = Whales(host=connection.address)
        assert whales.container.inspect(site.id).id == site.id
        argv = ("docker", "--host", connection.address, "exec", "-i", site.id, "cat")
        assert subprocess.run(argv, input=b"both ways", capture_output=True, check=True).stdout == b"both ways"


def test_thirty_calls_at_once_reach_the_engine_where_forwarding_is_forbidden(site: Site, engine: DockerClient) -> None:
    """30 concurrent `docker version` over one connection all answer."""

    def ask(host: str) -> str:
        argv = ["docker", "--host", host, "version", "--format", "{{.Server.Version}}"]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    with single_connection(site.host(2202)) as connection, ThreadPoolExecutor(30) as pool:
        assert set(pool.map(ask, [connection.address] * 30)) == {f"{engine.version()['Version']}\n"}


def test_another_socket_of_the_host_is_forwarded_too(site: Site) -> None:
    """`forward("/other.sock")` gives a local socket that leads to that of the host."""
    serve = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/other.sock'); s.listen(); print('on', flush=True);"
        "s.accept()[0].sendall(b'from there')"
    )
    with single_connection(site.host()) as connection, ThreadPoolExecutor(1) as pool:
        listening = threading.Event()
        served = pool.submit(
            connection.receive, 'exec python3 -c "$1"', serve, on_chunk=lambda _: listening.set(), timeout=60
        )
        assert listening.wait(60)
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(connection.forward("/other.sock")))
            assert made.recv(100) == b"from there"
        served.result()


def test_bytes_pass_unchanged_in_both_directions(site: Site) -> None:
    """1 MiB of all bytes, sent to a file and received from it, is unchanged."""
    data = bytes(range(256)) * 4096
    got: list[bytes] = []
    with single_connection(site.host()) as connection:
        connection.send('cat > "$1"', "/root/it's here", chunks=(data[:1000], data[1000:]), timeout=60)
        connection.receive('cat "$1"', "/root/it's here", on_chunk=got.append, timeout=60)
    assert b"".join(got) == data


def test_a_script_that_fails_or_takes_too_long_names_its_host(site: Site) -> None:
    """`run` raises HostError or ProcessTimeout with host and command; check=False returns 255."""
    with single_connection(site.host()) as connection:
        with pytest.raises(
            HostError, match=r"(?s)host-2201 \(127.0.0.1\): `ls /nowhere` failed with exit code 2\nls: cannot"
        ):
            connection.run("ls /nowhere")
        with pytest.raises(
            process.ProcessTimeout, match=r"host-2201 \(127.0.0.1\): `sleep 30` timed out after [0-9.]+ s"
        ):
            connection.run("sleep 30", timeout=0.5)
        assert connection.run("exit 255", check=False).code == 255


def test_a_connection_that_breaks_is_told_from_a_script_that_fails(site: Site) -> None:
    """A script kills its sshd: HostError `the connection was lost` with the host's name."""
    with (
        single_connection(site.host()) as connection,
        pytest.raises(HostError, match=r"host-2201.*the connection was lost") as caught,
    ):
        connection.run("kill -9 $PPID", check=False)
    assert caught.value.node == "host-2201"


@pytest.mark.parametrize("port", [2201, 2202], ids=["forwarded", "forwarding forbidden"])
def test_a_connection_that_broke_is_made_again_and_leads_to_the_engine_by_the_same_address(
    site: Site, engine: DockerClient, port: int
) -> None:
    """Kill ssh: why_lost() says so; after reconnect() both work."""
    with single_connection(site.host(port)) as connection:
        address = connection.address
        for master in Path(address.removeprefix("unix://")).parent.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(master.read_text()), signal.SIGKILL)
        assert "the connection was lost" in connection.why_lost()
        connection.reconnect(20)
        assert (connection.why_lost(), connection.run("echo here").out) == ("", "here\n")
        with contextlib.closing(DockerClient(base_url=address)) as client:
            assert client.info()["ID"] == engine.info()["ID"]


def test_the_persons_own_config_says_how_a_host_is_reached(site: Site) -> None:
    """HostName, Port and User of the user's ssh config are used."""
    port = site.host().port
    site.configure(f"Host gate\n    HostName 127.0.0.1\n    Port {port}\n    User root\n")
    with single_connection(InventoryHost(name="gate"), "id -un") as connection:
        assert connection.output == "root\n"
        assert connection.run("echo again").out == "again\n"


def test_what_a_person_wrote_for_their_own_logins_does_not_meddle(site: Site) -> None:
    """ControlMaster, RemoteCommand and others of the user's ssh config have no effect."""
    site.configure(f"Host *{PERSONAL.format(folder=site.folder)}")
    with single_connection(site.host(), "echo told") as connection:
        assert (connection.output, connection.run("echo out; echo err >&2").err) == ("told\n", "err\n")
        with contextlib.closing(DockerClient(base_url=connection.address)) as client:
            assert client.ping()
    assert list(site.folder.glob("personal*")) == []


@pytest.mark.parametrize("config", ["", "Host *\n    StrictHostKeyChecking no\n"], ids=["asking", "careless"])
def test_another_host_key_is_never_trusted(site: Site, config: str) -> None:
    """A changed host key is an error, also with StrictHostKeyChecking no; the hint forgets the old key."""
    site.trust("stranger")
    site.configure(config)
    error = refusal(site.host())
    assert "host key has changed: host was reinstalled, or the connection is intercepted" in error.message
    forget = f"ssh-keygen -f {site.folder}/known -R '[127.0.0.1]:{site.host().port}'"
    assert forget in error.hint
    subprocess.run(["sh", "-c", forget], check=True, capture_output=True)
    assert str(site.host().port) not in (site.folder / "known").read_text()


def test_an_unknown_host_key_is_for_the_person_to_compare(site: Site) -> None:
    """Empty known_hosts: an error, whose hint is the ssh command to type."""
    (site.folder / "known").write_text("")
    error = refusal(site.host())
    assert "host key is not known" in error.message
    assert error.hint.startswith(f"ssh -l root -p {site.host().port} 127.0.0.1 ")


def test_a_key_that_the_host_does_not_take_is_named(site: Site) -> None:
    """Error `permission denied` with user and key; the hint has ssh-copy-id and ssh-add."""
    site.configure(key="nothing")
    stranger = f"{site.folder}/stranger"
    error = refusal(replace(site.host(), key=stranger))
    assert f"permission denied for root with the key {stranger} (publickey" in error.message
    copy = f"ssh-copy-id -i {stranger} -p {site.host().port} root@127.0.0.1"
    assert error.hint == f"{copy}; or, for a key with a passphrase: ssh-add {stranger}"


def test_a_key_that_is_not_here_is_told_from_one_that_the_host_does_not_take(site: Site) -> None:
    """`key=` of a missing file: the error says so; the hint names hosts.txt:1 and ssh-keygen."""
    site.configure(key="nothing")
    error = refusal(replace(site.host(), key="/nowhere/key", where="hosts.txt:1"))
    assert "does not exist" in error.message
    assert error.hint.startswith("set another `key=` in hosts.txt:1, or create it: ssh-keygen ")


def test_a_machine_without_ssh_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ssh on PATH, connecting raises HostError `ssh client not found`."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostError, match="ssh client not found"), connected([site.host()], ":", seconds=5):
        pytest.fail("it connected")


def test_a_key_that_others_may_read_is_named_with_its_cure(site: Site) -> None:
    """A key of mode 0644: the hint is `chmod 600`."""
    site.configure(key="nothing")
    open_key = site.folder / "open"
    shutil.copy(site.folder / "person", open_key)
    open_key.chmod(0o644)
    assert refusal(replace(site.host(), key=str(open_key))).hint == f"chmod 600 {open_key}"


def test_a_user_without_a_right_to_the_engine_is_told_how_to_get_it(site: Site) -> None:
    """User guest may not use the socket: the hint adds it to the docker group."""
    error = refusal(replace(site.host(), user="guest"))
    assert "guest may not use /var/run/docker.sock" in error.message
    assert error.hint.endswith("127.0.0.1 sudo usermod -aG docker guest")


def test_a_login_shell_that_prints_before_commands_is_named(site: Site) -> None:
    """.bashrc prints `Welcome`: the error quotes it, and the hint guards it."""
    site.container.exec_run(["sh", "-c", "cp /root/.bashrc /root/kept; echo 'printf Welcome' > /root/.bashrc"])
    try:
        error = refusal(site.host())
    finally:
        site.container.exec_run(["mv", "/root/kept", "/root/.bashrc"])
    assert "its login shell prints output for non-interactive commands: `Welcome`" in error.message
    assert "case $- in *i*)" in error.hint


def test_a_host_without_an_engine_is_told_from_one_whose_engine_is_down(site: Site) -> None:
    """No socket: an error when connecting; a dead socket: DockerException when it is used."""
    error = refusal(replace(site.host(), docker="/nowhere.sock"))
    assert "Docker Engine not found (no /nowhere.sock, no docker command)" in error.message
    with (
        single_connection(replace(site.host(), docker="/dead.sock")) as connection,
        pytest.raises(docker.errors.DockerException),
    ):
        DockerClient(base_url=connection.address, version="auto")


def test_hosts_that_cannot_be_reached_are_named_within_the_limit_while_the_others_answer(site: Site) -> None:
    """Silent, closed, unknown, failing: an error each; the good host connects."""
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        targets = [
            replace(site.host(), name="silent", port=silent.getsockname()[1]),
            site.host(),
            replace(site.host(), name="closed", port=closed.getsockname()[1]),
            InventoryHost(name="nobody", address="nobody.invalid", where="hosts.txt:4"),
            replace(site.host(2204), name="failing"),
        ]
        opening = '[ "$(hostname)" = none ] || [ "${SSH_CONNECTION##* }" != 2204 ]'
        waits: list[str] = []
        began = time.monotonic()
        with connected(targets, opening, seconds=8, waits=waits.append) as (connections, errors):
            # The other hosts were tried concurrently with the silent one, which used up the time limit.
            assert time.monotonic() - began < 2 * 8
            assert waits == ["waiting for silent (127.0.0.1)"]
            assert list(connections) == ["host-2201"]
            messages = {name: error.message for name, error in errors.items()}
    assert list(messages) == ["silent", "closed", "nobody", "failing"]
    assert "timed out after 8 s" in messages["silent"]
    assert f"no sshd on port {targets[2].port}: connection refused" in messages["closed"]
    assert "nobody (nobody.invalid): address not found" in messages["nobody"]
    assert "collecting facts failed (exit code 1)" in messages["failing"]
    assert "write `nobody address=...` in hosts.txt:4" in errors["nobody"].hint


def test_hosts_that_do_not_answer_leave_time_for_those_behind_them(site: Site) -> None:
    """With one connection at a time, a silent host fails and the next one connects."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        dead = replace(site.host(), name="silent", port=silent.getsockname()[1])
        with connected([dead, site.host()], ":", seconds=16, bound=1) as (connections, errors):
            assert (list(connections), list(errors)) == (["host-2201"], ["silent"])


def test_nothing_is_left_of_a_connection_when_its_block_ends(site: Site) -> None:
    """No process with the connection's folder and no folder is left."""
    with single_connection(site.host()) as connection:
        folder = str(Path(connection.address.removeprefix("unix://")).parent)
        assert commands(folder)
    assert (commands(folder), Path(folder).exists()) == ([], False)


OWNER = """
import sys
from labctl.backends.docker.hosts.ssh import connected
from labctl.config.inventory import InventoryHost as Target
target = Target(name="a", address="127.0.0.1", port=int(sys.argv[1]), user="root")
with connected([target], ":", seconds=60) as (connections, errors):
    print(connections["a"].address, flush=True)
    connections["a"].run("exec sleep 98765")
"""


def test_a_killed_owner_takes_its_connection_along(site: Site) -> None:
    """SIGKILL a process that runs a script on the host: its ssh processes and folder go."""
    argv = [sys.executable, "-c", OWNER, str(site.host().port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = str(Path(owner.stdout.readline().strip().removeprefix("unix://")).parent)
        wait_until(lambda: commands("sleep\x0098765"), 120, "the owner's script runs on the host")
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not commands(folder) and not Path(folder).exists(), 120, f"the end of all in {folder}")


DIALLING = """
import sys
from labctl.backends.docker.hosts.ssh import connected
from labctl.config.inventory import InventoryHost as Target
with connected([Target(name="a", address="127.0.0.1", port=int(sys.argv[1]), user=sys.argv[2])], ":", seconds=60):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_owner_killed_while_it_dials_leaves_nothing(number: signal.Signals) -> None:
    """A signal while ssh waits for a silent host: the ssh process ends too."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        word = f"dials-{secrets.token_hex(8)}"
        argv = [sys.executable, "-c", DIALLING, str(silent.getsockname()[1]), word]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as owner:
            dialled, _ = silent.accept()
            # Cleanup may miss a process that the owner started at the instant of its death.
            wait_until(lambda: any(map(noted, commands(word))), 120, "its ssh is noted")
            owner.send_signal(number)
        with dialled:
            wait_until(lambda: not commands(word), 120, "the end of its ssh")


def noted(command: str) -> bool:
    """Return True if the command is a connection's ssh whose pid file is written."""
    control = re.search(r"\0-S\0([^\0]+)\.ctl\0", command)
    return bool(control and Path(f"{control[1]}.pid").exists() and Path(f"{control[1]}.pid").read_text())


GUARDED = """
import sys
from labctl.system import process
from labctl.backends.docker.hosts.ssh import connected
from labctl.config.inventory import InventoryHost as Target
target = Target(name="a", address="127.0.0.1", port=int(sys.argv[1]), user="root")
with connected([target], ":", seconds=60) as (connections, errors):
    docker = ("docker", "--host", connections["a"].address)
    with process.guarded([*docker, "exec", sys.argv[2], "touch", sys.argv[3]]):
        print("within", flush=True)
        sys.stdin.readline()
"""


def test_what_a_killed_owner_still_has_to_do_on_a_host_is_done_before_its_connection_ends(site: Site) -> None:
    """SIGKILL within process.guarded: its command still runs on the host."""
    argv = [sys.executable, "-c", GUARDED, str(site.host().port), site.id, "/reached"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "within\n"
        owner.kill()
    wait_until(lambda: site.container.exec_run(["test", "-e", "/reached"]).exit_code == 0, 120, "what was to be done")


SLOW = """
import sys
from labctl.backends.docker.hosts.ssh import connected
from labctl.config.inventory import InventoryHost as Target
from labctl.system.parallel import pool
targets = [Target(name=name, address="127.0.0.1", port=int(sys.argv[1]), user="root") for name in "ab"]
def chunks():
    # Wait for more bytes than a pipe holds, so that ssh has begun to read.
    yield bytes(1 << 18)
    sys.stdout.write("sending\\n")
    sys.stdout.flush()
    while True:
        yield bytes(1 << 16)
with connected(targets, ":", seconds=60) as (connections, errors), pool() as threads:
    send = lambda connection: connection.send("exec sleep 60", chunks=chunks(), timeout=300)
    list(threads.map(send, connections.values()))
"""


def test_ctrl_c_ends_what_is_being_sent(site: Site) -> None:
    """Ctrl-C during two endless `send`: the process ends within 40 s, not with 0."""
    argv = [sys.executable, "-c", SLOW, str(site.host().port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        try:
            assert [owner.stdout.readline() for _ in "ab"] == ["sending\n"] * 2
            owner.send_signal(signal.SIGINT)
            assert owner.wait(40) != 0
        finally:
            owner.kill()

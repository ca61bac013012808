"""A host of the rack: its contents, and the faults that a test can inject."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from docker.models.containers import Container
from docker.models.networks import Network

import docker
from docker import DockerClient
from support.harness import wait_until
from support.rack import images

LISTEN = """
socket(S, PF_INET, SOCK_STREAM, 0) && setsockopt(S, SOL_SOCKET, SO_REUSEADDR, 1);
bind(S, sockaddr_in($ARGV[0], INADDR_ANY)) && listen(S, 5) || die $!;
exit if fork;
open(STDOUT, ">/dev/null"); open(STDERR, ">&STDOUT"); sleep;
"""
FULL = """
set -e
size=$(($(du -sk "$1" | cut -f1) + 512))
mkdir -p /run/full
mount -t tmpfs -o "size=${size}k" full /run/full
cp -a "$1/." /run/full
mount --bind /run/full "$1"
umount /run/full
head -c "${size}k" /dev/zero > "$1/filler" 2> /dev/null || true
"""
# Select by parent, not by name: the nodes of a lab run sshd too. A session is a child of sshd that may have a child of
# its own, whose end may end it.
HANG_UP = """
for session in $(pgrep -P "$(cat /run/sshd.pid)"); do
    pkill -KILL -P "$session" -x sshd
    kill -KILL "$session" 2> /dev/null || true
done
"""
SMI = """#!/bin/sh
case $1 in
-q) cat /opt/smi.xml ;;
-L) printf 'GPU 0: H100\\nGPU 1: H100\\n' ;;
--query*) printf '0, 00000000:18:00.0, H100, 81559, GPU-0, 0\\n1, 00000000:2A:00.0, H100, 81559, GPU-1, 0\\n' ;;
esac
"""
HOOK = Path(__file__).with_name("hook.sh").read_text(encoding="utf-8")
HARDWARE = Path(__file__).with_name("hardware.sh").read_text(encoding="utf-8")
CLEAN = """
home=$1
if mountpoint -q "$home"; then umount --lazy "$home"; fi
find "$home" /root /tmp -mindepth 1 -maxdepth 1 ! -name .ssh ! -name '.bash*' ! -name .profile -exec rm -rf {} +
"""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes through a host's interface since it started."""

    received: int
    sent: int


class Host:
    """A host: its address, its programs and its faults, all of which `cure` removes."""

    def __init__(self, container: Container, directory: Path, *, address: str, user: str, port: int, key: Path) -> None:
        """Keep the host's container, directory and login; start nothing."""
        self.name, self.home = directory.name, f"/home/{user}"
        self.address, self.user, self.port, self.key = address, user, port, key
        self.known = ""
        """Line for known_hosts, with the key that the host made when it first started."""
        self._container, self._directory = container, directory
        self._faults = contextlib.ExitStack()

    # --- its life ---

    def start(self) -> None:
        """Start the host, for the first time or after `kill`, and wait until its engine and sshd answer."""
        self._container.start()
        self._wait_for_engine()
        wait_until(self._greets, 120, f"sshd on {self.name} greets")
        if not self.known:
            where = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
            self.known = f"{where} {self.run('cat', '/etc/ssh/ssh_host_ed25519_key.pub').stdout}"

    def give_image(self, name: str) -> None:
        """Copy an image of this machine to the host's engine, which restarts for it if the storage is overlay2."""
        if arguments := images.given(self._outer, name, self.engine.images.list()):
            self._stop_engine()
            self.run("/opt/rack/give.sh", *arguments)
            self._start_engine()
        else:
            images.load(name, f"unix://{self._socket}")

    def clean(self, image: str) -> None:
        """Cure the host, empty its engine except for ``image``, copied if missing, and remove the home's files."""
        self.cure()
        for container in self.engine.containers.list(all=True, ignore_removed=True):
            container.remove(force=True, v=True)
        self.engine.networks.prune()
        self.engine.volumes.prune({"all": True})
        self.engine.api.prune_builds(all=True)
        kept = self._outer.images.get(image)
        for other in self.engine.images.list():
            for name in set(other.tags or [other.id or ""]) - set(kept.tags if other.id == kept.id else ()):
                self.engine.images.remove(name, force=True)
        if not self.engine.images.list():
            self.give_image(image)
        self.shell(CLEAN, self.home)

    def remove(self) -> None:
        """Remove the host and its disks."""
        if "engine" in self.__dict__:
            self.engine.close()
        self._container.remove(force=True, v=True)

    # --- what is in it ---

    def run(
        self,
        *argv: str,
        user: str = "root",
        stdin: str = "",
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host, not over ssh, and wait for its end; if ``check``, fail unless it exits with 0."""
        inside = ["docker", "exec", "--interactive", "--user", user, self._container.name or "", *argv]
        done = subprocess.run(inside, input=stdin, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0 or not check, f"{self.name}: {shlex.join(argv)}: {done.returncode}\n{done.stderr}"
        return done

    def shell(self, script: str, *arguments: str, check: bool = True) -> str:
        """Run a script as root, ``arguments`` as $1, $2 ...; return its output; with ``check`` it must succeed."""
        return self.run("sh", "-c", script, "sh", *arguments, check=check).stdout

    @cached_property
    def engine(self) -> DockerClient:
        """Client of the host's engine, by a socket unknown to labctl, as an independent witness."""
        return docker.DockerClient(base_url=f"unix://{self._socket}", version="1.44", timeout=300)

    def has_engine(self) -> bool:
        """Return True if the engine's socket accepts connections; the SDK leaks sockets that fail to connect."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(self._socket))
            return True
        return False

    def line(self, **fields: object) -> str:
        """Return the host's line of a hosts file; fields replace or extend the default ones, empty ones are omitted."""
        plain = {"address": self.address, "user": self.user, "port": self.port, "key": self.key}
        parts = (f"{name}={value}" for name, value in {**plain, **fields}.items() if value != "")
        return " ".join((self.name, *parts))

    def traffic(self, interface: str = "eth0") -> Traffic:
        """Return the bytes that passed an interface since the host started."""
        folder = f"/sys/class/net/{interface}/statistics"
        received, sent = self.shell(f"cat {folder}/rx_bytes {folder}/tx_bytes").split()
        return Traffic(received=int(received), sent=int(sent))

    # --- what it is given ---

    def program(self, name: str, text: str = "") -> None:
        """Put a program first on PATH until `cure`: this text, or if empty the host's kept one of that name (rsync)."""
        if text:
            self.run("sh", "-c", 'cat > "$0" && chmod 755 "$0"', f"/usr/local/bin/{name}", stdin=text)
        else:
            self.run("ln", "-s", f"/opt/programs/{name}", "/usr/local/bin/")
        self._faults.callback(self.run, "rm", "-f", f"/usr/local/bin/{name}")

    def sshd(self, **options: object) -> None:
        """Restart sshd with these options, such as MaxSessions="10" or AllowStreamLocalForwarding="no"."""
        lines = "".join(f"{name} {value}\n" for name, value in options.items())
        self._configure_sshd(lines)
        self._faults.callback(self._configure_sshd, "")

    def second_interface(self, network: Network) -> str:
        """Connect the host to another network, as the next interface; return the address."""
        network.connect(self._container)
        self._faults.callback(network.disconnect, self._container, force=True)
        self._container.reload()
        return str(self._container.attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"])

    def interface(self, address: str) -> str:
        """Return the name of the interface with this address."""
        return self.shell("ip -oneline -4 address show to \"$1\" | awk '{print $2}'", address).strip()

    # --- what goes wrong with it ---

    def cure(self) -> None:
        """Remove all faults and additions, last first.

        Undoing tolerates faults that ended by themselves when the host was killed.
        """
        self._faults.close()

    def drop(self) -> None:
        """Drop all packets in and out, except on the loopback, until `cure`."""
        chains = (("INPUT", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-i"))
        for chain, way in chains:
            rule = (chain, "!", way, "lo", "--jump", "DROP")
            self.run("iptables", "--wait", "--insert", *rule)
            self._faults.callback(self.run, "iptables", "--wait", "--delete", *rule, check=False)

    def cut(self) -> None:
        """Drop all packets from and to this machine, where labctl runs; other hosts stay reachable."""
        this_machine = self.shell("ip -4 route show default").split()[2]
        for rule in (("INPUT", "--source", this_machine), ("OUTPUT", "--destination", this_machine)):
            self.run("iptables", "--wait", "--insert", *rule, "--jump", "DROP")
            self._faults.callback(self.run, "iptables", "--wait", "--delete", *rule, "--jump", "DROP", check=False)

    def slow(self, rate: str) -> None:
        """Limit the bandwidth of outgoing traffic, for example to 10mbit."""
        self.run("tc", "qdisc", "add", "dev", "eth0", "root", *shaped(rate))
        self._faults.callback(self.run, "tc", "qdisc", "delete", "dev", "eth0", "root", check=False)

    def refuse(self, port: int) -> None:
        """Reject connections from other hosts to this port, as a firewall does."""
        rule = ("INPUT", "--protocol", "tcp", "--dport", str(port), "!", "--in-interface", "lo", "--jump", "REJECT")
        self.run("iptables", "--wait", "--insert", *rule)
        self._faults.callback(self.run, "iptables", "--wait", "--delete", *rule, check=False)

    def throttle(self, cores: float) -> None:
        """Limit the host to this number of cores."""
        period = 100_000
        self._container.update(cpu_period=period, cpu_quota=int(cores * period))
        self._faults.callback(self._container.update, cpu_period=period, cpu_quota=-1)

    def hang_up(self) -> None:
        """Kill all ssh sessions; new ones are accepted."""
        self.shell(HANG_UP)

    def fill_disk(self) -> None:
        """Fill the user's home directory. Cured, it has free space again and keeps its files."""
        self.shell(FULL, self.home)
        self._faults.callback(self.shell, 'rm "$1/filler"; mount -o remount,size=4g "$1"', self.home, check=False)

    def small_engine_disk(self, size: str = "64m") -> None:
        """Restart the engine on a small empty tmpfs; cured, on its own disk again."""
        self._stop_engine()
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "small", "/var/lib/docker")
        self._start_engine()

        def undo() -> None:
            self._stop_engine()
            self.shell("if findmnt --types tmpfs /var/lib/docker; then umount /var/lib/docker; fi")
            self._start_engine()

        self._faults.callback(undo)

    def stop_engine(self) -> None:
        """Stop the host's dockerd until `cure`."""
        self._stop_engine()
        self._faults.callback(self._start_engine)

    def hang_engine(self) -> None:
        """Suspend dockerd by SIGSTOP until `cure`."""
        self.run("pkill", "-STOP", "-x", "dockerd")
        self._faults.callback(self.run, "pkill", "-CONT", "-x", "dockerd", check=False)

    def keep_from_docker(self) -> None:
        """Remove the user from group docker until `cure`."""
        self.run("gpasswd", "--delete", self.user, "docker")
        self._faults.callback(self.run, "gpasswd", "--add", self.user, "docker")

    def occupy(self, port: int, user: str = "bob") -> None:
        """Listen on the port with another user's program."""
        self.shell('id "$1" > /dev/null 2>&1 || useradd --create-home "$1"', user)
        self.run("perl", "-MSocket", "-e", LISTEN, str(port), user=user)
        self._faults.callback(self.run, "pkill", "-u", user, "-x", "perl", check=False)

    def change_host_key(self) -> None:
        """Replace sshd's host keys by a new one that known_hosts lacks; cured, restore them."""
        self.shell("cd /etc/ssh && mkdir old && mv ssh_host_* old && ssh-keygen -q -t ed25519 -N '' -f old/new && "
                   "mv old/new ssh_host_ed25519_key && mv old/new.pub ssh_host_ed25519_key.pub")  # fmt: skip
        self._restart_sshd()

        def undo() -> None:
            self.shell("cd /etc/ssh && mv old/ssh_host_* . && rmdir old")
            self._restart_sshd()

        self._faults.callback(undo)

    def clock(self, seconds: int) -> None:
        """Set the clock ahead by these seconds: only `date` shows it, as containers share the kernel's clock."""
        self.program("date", f'#!/bin/sh\nexec /usr/bin/date --date="{seconds} seconds" "$@"\n')

    def plant_hardware(self, smi: str) -> None:
        """Show two NVIDIA GPUs, whose nvidia-smi prints ``smi``, an InfiniBand and a network port, until `cure`."""
        self.run("sh", "-s", "plant", stdin=HARDWARE)
        self._faults.callback(self.run, "sh", "-s", "unplant", stdin=HARDWARE)
        self.run("sh", "-c", "cat > /opt/smi.xml", stdin=smi)
        self.program("nvidia-smi", SMI)
        self.program("nvidia-container-runtime-hook", HOOK)
        self.write_kernel_log("")
        self.program("dmesg", "#!/bin/sh\ncat /opt/dmesg\n")
        # It looks for the hook when it starts.
        self._stop_engine()
        self._start_engine()

    def write_kernel_log(self, *lines: str) -> None:
        """Let dmesg print these lines, written now."""
        text = 'now=$(cut -d " " -f 1 /proc/uptime); while read -r line; do [ -z "$line" ] || echo "[$now] $line"; done'
        self.run("sh", "-c", f"({text}) > /opt/dmesg", stdin="".join(f"{line}\n" for line in lines))

    def kill(self) -> None:
        """Kill the host as a power failure does. Cured, it starts again with an empty /run and the same disks."""
        self._container.kill()
        self._faults.callback(self.start)

    # --- how that is done ---

    @property
    def _outer(self) -> DockerClient:
        """Client of this machine's engine."""
        assert self._container.client
        return self._container.client

    @property
    def _socket(self) -> Path:
        return self._directory / "docker.sock"

    def _greets(self) -> bool:
        """Return True if sshd sends its greeting."""
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=2) as stream:
            return stream.recv(4) == b"SSH-"
        return False

    def _start_engine(self) -> None:
        """Start the host's engine and wait until it answers."""
        self.run("sh", "-c", "(/opt/rack/engine.sh > /dev/null 2>&1 &)")
        self._wait_for_engine()

    def _wait_for_engine(self) -> None:
        """Wait until the engine answers; fail after 120 s with the ends of its logs."""
        try:
            wait_until(lambda: self.has_engine() and self.engine.ping(), 120, f"the engine of {self.name} answers")
        except AssertionError as error:
            output = self._container.logs(tail=20).decode()
            log = self.run("tail", "/var/log/dockerd.log", check=False).stdout
            raise AssertionError(f"{error}\n{output}{log}") from None

    def _stop_engine(self) -> None:
        """Stop dockerd and wait for its end, 60 s at most."""
        self.shell("pkill -x dockerd; timeout 60 sh -c 'while pgrep -x dockerd; do sleep 0.1; done'")

    def _configure_sshd(self, lines: str) -> None:
        """Replace sshd's options by these lines and restart it."""
        # sshd reads this file before its defaults, and the first value counts.
        self.run("sh", "-c", "cat > /etc/ssh/sshd_config.d/options.conf", stdin=lines)
        self._restart_sshd()

    def _restart_sshd(self) -> None:
        """Restart sshd; open connections stay. sshd writes its pid once it listens."""
        self.shell('old=$(cat /run/sshd.pid); kill "$old"; while kill -0 "$old" 2> /dev/null; do sleep 0.05; done; '
                   "rm -f /run/sshd.pid; /usr/sbin/sshd; until [ -s /run/sshd.pid ]; do sleep 0.05; done")  # fmt: skip


def shaped(rate: str) -> tuple[str, ...]:
    """Return tc's arguments for an interface of that rate."""
    return ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")

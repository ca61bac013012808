"""A rack of hosts on this machine.

A host is a privileged container with sshd and a Docker engine of its own, and no more: no Python, no rsync. Its address
is one on the rack's own network; its engine's directory is a volume that goes with the host. `hosts.host.Host` has what
can be done to one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

import pytest
from docker.errors import APIError
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import EndpointConfig, IPAMConfig, IPAMPool, Mount

from docker import DockerClient
from support.harness import Lab, wait_until
from support.rack import images
from support.rack.host import Host, shaped

FIRST_ADDRESS = 10
CONFIG = """\
UserKnownHostsFile "{known_hosts}"
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
IdentityFile none
IdentityAgent none
"""


class Rack:
    """Hosts that tests share, and hosts of a single test; `close` removes all.

    ``environ`` is for the control side: an ssh that, in place of the user's own files, reads ``config`` and
    ``known_hosts``, which a test may change; ``key`` opens every host, ``other_key`` none.
    """

    def __init__(self, engine: DockerClient, family: str, directory: Path, lab_image: str) -> None:
        """Make keys, an ssh with its own configuration, the hosts' image and a network; start no host."""
        self._engine, self._family, self._directory, self._lab_image = engine, family, directory, lab_image
        self._hosts: dict[str, Host] = {}
        self._shared: set[str] = set()
        self._used: set[str] = set()
        self._numbers = count(FIRST_ADDRESS)
        self.config, self.known_hosts = directory / "ssh_config", directory / "known_hosts"
        self.environ = {"PATH": f"{_ssh_with(self.config, directory / 'bin')}:{os.environ['PATH']}"}
        self.key, self.other_key = _new_key(directory / "key"), _new_key(directory / "other_key")
        self._tell_ssh()
        self._image = images.ensure(engine, directory)
        self._faults, self._networks = contextlib.ExitStack(), contextlib.ExitStack()
        self.network = self._networks.enter_context(_network(engine, f"{family}-rack"))

    # --- hosts ---

    def hosts(self, number: int) -> tuple[Host, ...]:
        """Return the first shared hosts, h1, h2 ..., for `clear` to clean; start missing ones with the lab's image."""
        names = [f"h{n}" for n in range(1, number + 1)]
        missing = [name for name in names if name not in self._hosts]
        self.make(*missing, image=self._lab_image)
        self._shared.update(missing)
        self._used.update(names)
        return tuple(self._hosts[name] for name in names)

    def make(
        self,
        *names: str,
        image: str = "",
        user: str = "ann",
        uid: int = 1000,
        port: int = 22,
        shared: Path | None = None,
    ) -> tuple[Host, ...]:
        """Start new hosts for one test, in parallel, each with ``image`` or an empty engine; return them.

        The hosts see this machine's ``shared`` directory under the same path.
        """

        def start(name: str, address: str) -> Host:
            """Create and start a host, and give its engine the image, if any."""
            arguments = images.given(self._engine, image) if image else []
            host = self._new(name, address, arguments, user=user, uid=uid, port=port, shared=shared)
            self._hosts[name] = host
            host.start()
            if image and not arguments:
                host.give_image(image)
            return host

        with ThreadPoolExecutor(8) as pool:
            made = tuple(pool.map(start, names, [self._address() for _ in names]))
        self._tell_ssh()
        return made

    def clear(self) -> None:
        """Cure all faults, clean the shared hosts that were used, and remove the others."""
        self._faults.close()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self._hosts[name].clean(self._lab_image), self._used))
        self._used.clear()
        self._remove([host for name, host in self._hosts.items() if name not in self._shared])
        self._tell_ssh()

    def close(self) -> None:
        """Remove everything except the hosts' image."""
        self._faults.close()
        self._remove(list(self._hosts.values()))
        self._networks.close()

    @cached_property
    def fabric(self) -> Network:
        """A second network, for hosts with two interfaces."""
        return self._networks.enter_context(_network(self._engine, f"{self._family}-fabric"))

    def slow_uplink(self, rate: str) -> None:
        """Limit the bandwidth from this machine to all hosts together, for example to 100mbit."""
        bridge = f"br-{(self.network.id or '')[:12]}"
        self._on_this_machine("tc", "qdisc", "add", "dev", bridge, "root", *shaped(rate))
        self._faults.callback(self._on_this_machine, "tc", "qdisc", "delete", "dev", bridge, "root")

    def introduce(self, *hosts: Host) -> None:
        """Put the user's key and known hosts on hosts, to ssh between them; removed when faults are cured."""
        known_hosts, key = self.known_hosts.read_text(), self.key.read_text()
        for host in hosts:
            host.run("sh", "-c", "cat > ~/.ssh/known_hosts", user=host.user, stdin=known_hosts)
            host.run("sh", "-c", "umask 077; cat > ~/.ssh/id_ed25519", user=host.user, stdin=key)
            private = f"{host.home}/.ssh/known_hosts {host.home}/.ssh/id_ed25519"
            self._faults.callback(host.shell, f"rm -f {private}", check=False)

    # --- the control side ---

    def inventory(self, path: Path, *hosts: Host, **fields: object) -> None:
        """Write a hosts file of these hosts; ``fields`` replace or extend those of each line."""
        path.write_text("".join(f"{host.line(**fields)}\n" for host in hosts))

    def ssh(
        self,
        host: Host,
        *argv: str,
        key: Path | None = None,
        stdin: str = "",
        check: bool = True,
        patience: int = 20,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host over ssh as the user does; if ``check``, fail unless it exits with 0.

        ``patience``: connect timeout in seconds.
        """
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={patience}", "-i", str(key or self.key)]
        done = subprocess.run(
            ["ssh", *options, "-p", str(host.port), f"{host.user}@{host.address}", *argv],
            env={**os.environ, **self.environ},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 or not check, f"ssh {host.name} {shlex.join(argv)}: {done.stderr}"
        return done

    def lab(self, path: Path, name: str, hosts: tuple[Host, ...], settings: dict[str, str]) -> RackLab:
        """Make a lab over these hosts, with its directory on this machine."""
        # Use the default cache on each host: the hosts cannot see a folder of this machine.
        plain = {"LAB_HOSTS": "hosts.txt", "HOST_CACHE_PATH": ""}
        here = Lab.make(path, name, hosts[0].engine, {**plain, **settings})
        self.inventory(path / "hosts.txt", *hosts)
        return RackLab(path, name, here.engine, {**here.environ, **self.environ}, hosts=hosts)

    # --- how that is done ---

    def _new(
        self, name: str, address: str, given: list[str], *, user: str, uid: int, port: int, shared: Path | None
    ) -> Host:
        """Create the privileged container that stands in for a host, without starting it."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        # Exclude mounts below it, which are the file systems of other containers.
        mount = Mount("/given", str(self._engine.info()["DockerRootDir"]), "bind", read_only=True)
        mount["BindOptions"] = {"NonRecursive": True}
        container = self._engine.containers.create(
            self._image,
            command=given,
            name=f"{self._family}-{name}",
            hostname=name,
            init=True,
            privileged=True,
            # Empty at each start, as after a boot.
            tmpfs={"/run": "exec,mode=755"},
            volumes={
                str(directory): {"bind": "/witness", "mode": "rw"},
                **({str(shared): {"bind": str(shared), "mode": "rw"}} if shared else {}),
            },
            mounts=[mount],
            network=self.network.name,
            networking_config={self.network.name or "": EndpointConfig("1.44", ipv4_address=address)},
            environment={
                "RACK_USER": user,
                "RACK_UID": str(uid),
                "RACK_PORT": str(port),
                "RACK_KEY": self.key.with_suffix(".pub").read_text().strip(),
            },
        )
        return Host(container, directory, address=address, user=user, port=port, key=self.key)

    def _on_this_machine(self, *argv: str) -> None:
        """Run a program in a privileged container in this machine's network namespace."""
        self._engine.containers.run(
            self._image, list(argv[1:]), entrypoint=argv[0], network_mode="host", privileged=True, remove=True
        )

    def _address(self) -> str:
        """Return the next free address of the rack's network."""
        subnet = ipaddress.ip_network(self.network.attrs["IPAM"]["Config"][0]["Subnet"])
        return str(subnet[next(self._numbers)])

    def _remove(self, hosts: list[Host]) -> None:
        """Remove these hosts, in parallel."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Host.remove, hosts))
        for host in hosts:
            del self._hosts[host.name]

    def _tell_ssh(self) -> None:
        """Write ssh's configuration, and known_hosts of all hosts."""
        self.config.write_text(CONFIG.format(known_hosts=self.known_hosts))
        self.known_hosts.write_text("".join(host.known for host in self._hosts.values()))


@dataclass(frozen=True)
class RackLab(Lab):
    """A lab over several hosts, observed through all engines that run."""

    hosts: tuple[Host, ...] = ()

    def on(self, host: Host) -> Lab:
        """Return the part of the lab on one host."""
        return Lab(self.path, self.name, host.engine, self.environ)

    @property
    def parts(self) -> list[Lab]:
        """Return the parts of the lab on all hosts with a running engine."""
        return [self.on(host) for host in self.hosts if host.has_engine()]

    def containers(self) -> dict[str, Container]:
        """Return the lab's containers by node, of all hosts with a running engine."""
        return {node: container for part in self.parts for node, container in part.containers().items()}

    def networks(self) -> list[Network]:
        """Return the lab's networks of all hosts with a running engine."""
        return [network for part in self.parts for network in part.networks()]

    def labelled(self) -> list[str]:
        return [name for part in self.parts for name in part.labelled()]

    def destroy(self) -> None:
        for part in self.parts:
            part.destroy()


@contextlib.contextmanager
def _network(engine: DockerClient, name: str) -> Iterator[Network]:
    """Provide a network with an explicit subnet that Docker chose; remove it afterwards."""

    def made() -> Network | None:
        """Create the network; None if another test's network took the subnet."""
        trial = engine.networks.create(name)
        trial.reload()
        subnet = trial.attrs["IPAM"]["Config"][0]["Subnet"]
        trial.remove()
        ipam, options = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)]), {"com.docker.network.driver.mtu": "1400"}
        try:
            return engine.networks.create(name, ipam=ipam, options=options)
        except APIError as error:
            # Another test's network may have taken the subnet.
            if "overlap" not in str(error):
                raise
            return None

    network = wait_until(made, 120, f"a subnet for {name}")
    network.reload()
    yield network
    network.remove()


def _new_key(path: Path) -> Path:
    """Make an ed25519 key pair at a path; return the path."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
    subprocess.run(argv, check=True, capture_output=True)
    return path


def _ssh_with(config: Path, directory: Path) -> Path:
    """Make a folder with an ssh that reads this configuration; return it; skip the test without an ssh.

    The real ssh finds home in passwd and ignores HOME.
    """
    real = shutil.which("ssh")
    if real is None:
        pytest.skip("no ssh here")
    directory.mkdir()
    program = directory / "ssh"
    program.write_text(f'#!/bin/sh\nexec {real} -F {shlex.quote(str(config))} "$@"\n')
    program.chmod(0o755)
    return directory

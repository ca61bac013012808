"""Docker Engine of this machine or at a forwarded socket: read by the docker SDK, changed by python-on-whales."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from labctl import model
from labctl.backends.docker import probe
from labctl.backends.docker.agent import AGENT, IN_NODE
from labctl.backends.docker.engine import Kind, OnLine, OnLines
from labctl.backends.docker.events import watch
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection
from labctl.backends.state import Container, HostPortUser, ObservedState
from labctl.errors import HostError, parsing
from labctl.model import Cause, DeviceMapping, Pairs
from labctl.system import human, process
from labctl.system.cached import once

if TYPE_CHECKING:
    import signal

    from labctl.backends.docker.api import Client


def container_of(listed: dict[str, Any], host: str) -> Container:
    """Return the Container for an entry of the daemon's list; unprintable characters in labels are removed."""
    # Every user of the daemon may set labels.
    labels = {name: "".join(filter(str.isprintable, value)) for name, value in listed["Labels"].items()}
    slots = labels.get("labctl.slots", "")
    status = listed.get("Status", "")
    # As `Up 5 minutes (unhealthy)` or `Up 5 seconds (health: starting)`.
    states = ("unhealthy", "healthy", "starting")
    health = next((word for word in states if f"({word}" in status or f": {word}" in status), None)
    # As `Exited (137) 5 minutes ago`.
    ended = re.match(r"Exited \((\d+)\)", status)
    binds = (mount for mount in listed.get("Mounts", ()) if mount["Type"] == "bind")
    mode = listed.get("HostConfig", {}).get("NetworkMode", "")
    return Container(
        id=listed["Id"],
        name=listed["Names"][0].lstrip("/") if listed.get("Names") else listed["Id"][:12],
        node=labels.get("labctl.node", "?"),
        host=host,
        role=labels.get("labctl.role", "?"),
        slots=int(slots) if re.fullmatch("[0-9]{1,6}", slots) else 0,
        state=listed["State"],
        health=health,
        exit_code=int(ended[1]) if ended else None,
        fingerprint=labels.get("labctl.config-hash", ""),
        image=listed["ImageID"],
        image_name=listed.get("Image", ""),
        created=listed.get("Created", 0),
        directory=labels.get("labctl.directory", ""),
        owner=labels.get("labctl.owner", ""),
        devices=tuple(filter(None, labels.get("labctl.devices", "").split(","))),
        mounts=tuple((mount["Source"], mount["Destination"]) for mount in binds),
        network="" if mode in BUILT_IN or ":" in mode else mode,
        networks=tuple((listed.get("NetworkSettings") or {}).get("Networks") or ()),
        rendered_limits=labels.get("labctl.limits", ""),
    )


def completed(container: Container, inspected: dict[str, Any], *, user: bool) -> Container:
    """Return a container with networks, limits, why it is unhealthy and, with ``user``, its uid:gid, as inspected."""
    return replace(
        container,
        reason=last_check(inspected) if container.health == "unhealthy" else start_error(container, inspected),
        user="{LAB_UID}:{LAB_GID}".format(**variables_of(inspected)) if user else "",
        networks=tuple(named_networks(container, inspected)),
        limits=limits_of(inspected),
    )


def start_error(container: Container, inspected: dict[str, Any]) -> str:
    """Return why the engine could not start a container; empty if it could, or has not tried."""
    return "" if container.state == "running" else str(inspected["State"].get("Error", ""))


def named_networks(container: Container, inspected: dict[str, Any]) -> Iterator[str]:
    """Yield a container's networks, but its lab's own only if others find it there by the name of its node.

    The name is lost if the user disconnects the container and connects it again.
    """
    for name, endpoint in (inspected["NetworkSettings"]["Networks"] or {}).items():
        if name != container.network or container.node in (endpoint.get("Aliases") or ()):
            yield name


def limits_of(inspected: dict[str, Any]) -> Pairs:
    """Return a container's memory, pids, cpuset and CPU limits from its inspection; those not set are left out."""
    config = inspected["HostConfig"]
    pids, cpus = config["PidsLimit"], [config[key] for key in ("NanoCpus", "CpuQuota", "CpuShares")]
    limits = {
        "memory": str(config["Memory"] or ""),
        "pids": "" if pids is None else str(pids),
        "cpuset": config["CpusetCpus"],
        "cpus": " ".join(map(str, cpus)) if any(cpus) else "",
    }
    return tuple((name, value) for name, value in limits.items() if value)


def node_order(container: Container) -> tuple[bool, str, int]:
    """Return a sort key that puts the launcher first, then workers by number."""
    stem, _, number = container.node.rpartition("-")
    return (container.role != "launcher", stem, int(number) if number.isdigit() else 0)


def inspect(api: Client, kind: Kind, identity: str) -> dict[str, Any] | None:
    """Return a container, network or image in full; None if not found."""
    from docker.errors import NotFound

    try:
        return dict(getattr(api, f"inspect_{kind}")(identity))
    except NotFound:
        return None


def variables_of(inspected: dict[str, Any] | None) -> dict[str, str]:
    """Return the environment variables of a container or image; none if it was not found."""
    lines = (inspected or {}).get("Config", {}).get("Env") or ()
    return dict(line.partition("=")[::2] for line in lines)


def last_check(inspected: dict[str, Any] | None) -> str:
    """Return the output of a container's last health check; empty if it was not found or not yet checked."""
    log = inspected["State"]["Health"]["Log"] if inspected else ()
    return str(log[-1]["Output"]).strip() if log else ""


# Networks that are not created by a compose file.
BUILT_IN = ("", "host", "none", "default", "bridge")
LAST_LINES = 20
# Messages of the daemon.
PORT_TAKEN = re.compile(
    r"(?:listen tcp4?|Bind for|host port(?: for)?) ([0-9.]+):([0-9]+)\S*"
    r"(?:: bind: address| failed: port is|(?<=:) address) already"
)
TAKEN = re.compile(r'container name "/(\S+)" is already in use')
# Default time limit of a program in a container, in seconds; those that reach or reap have shorter limits inside.
EXECUTING = 120
# Variables of the user's environment that are for another daemon than that at the end of a connection.
OF_ANOTHER = ("DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_API_VERSION")
# Time limit in seconds of a command that changes something, and its extension per container: a busy disk, or many GPUs
# that are initialized, may take minutes; a daemon that hangs never answers.
CHANGING, EACH = 300, 10
# Seconds from TERM to KILL for a command that timed out, and exit codes of timeout(1) for one.
GRACE, LATE = 10, (124, 137)
# Variable by which the agent finds a run's processes; its value here marks one command.
RUN_VARIABLE = "LABCTL_RUN_ID"
# Seconds between TERM and KILL for programs whose labctl was killed.
LEFT_GRACE = "2"
# Seconds between lines to a program whose output is streamed, which tell it that it is still read.
PULSE = 1
# Docker delays the first key of this sequence until the next, and its default begins with Ctrl-P, which shells use.
DETACH_KEYS = "ctrl-^,ctrl-_,ctrl-^,ctrl-_"
# Exit code of docker when it detaches from a command.
DETACHED = 1
# Printed by docker compose to erase the line before, whatever its options, also if the output is not a terminal.
ERASE = "\033[2K"


def within(seconds: int) -> tuple[str, ...]:
    """Return the arguments of timeout(1) that limit the time of the command after them.

    It stays in the foreground so that the terminal's Ctrl-C reaches it.
    """
    return ("timeout", "--foreground", f"--kill-after={GRACE}", str(seconds))


def without_repeats(printed: str) -> list[str]:
    """Return each line of docker's output once: compose prints some twice, or again after a service's name."""
    lines = list(dict.fromkeys(line.rstrip() for line in printed.splitlines() if line.strip()))
    return [line for line in lines if line == lines[-1] or not line.endswith(f" {lines[-1]}")]


class DockerEngine:
    """Engine of one daemon, at the end of a connection or by DOCKER_HOST, with a time limit per answer.

    ``docker`` is the command that reaches it, to be followed by arguments; ``connection`` leads to its host.
    """

    def __init__(self, connection: Connection | None = None, *, seconds: int = 30) -> None:
        """Connect to nothing yet; ``seconds`` is the time limit of an answer."""
        self.connection = connection or LocalConnection()
        self._address = self.connection.address
        self._seconds = seconds
        self.host = self.connection.target.name
        # The SDK heeds no context: without this, a context would lead the command to another engine.
        here = ("docker", "--context=default")
        self._program = process.without(OF_ANOTHER, ["docker"]) if self._address else here
        self.docker = (*self._program, "--host", self._address) if self._address else self._program

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)

    @property
    def connections(self) -> Mapping[str, Connection]:
        return {self.host: self.connection} if self.connection else {}

    def capabilities(self, host: str) -> DockerEngine:  # noqa: ARG002
        """Return this engine, whatever the host."""
        return self

    @contextlib.contextmanager
    def _api(self) -> Iterator[Client]:
        """Yield the SDK's client, closed with the block. HostError if the daemon refuses or does not answer."""
        from docker.errors import APIError, DockerException
        from urllib3.exceptions import HTTPError

        from labctl.backends.docker.api import first_cause

        try:
            # A connection ends with the block: over ssh it may be a session.
            with parsing(self.host), contextlib.closing(self._client()) as api:
                yield api
        except APIError as error:
            raise self._error(f"Docker Engine: {error.explanation or error}") from error
        except (DockerException, HTTPError, OSError, ValueError) as error:
            cause = first_cause(error)
            if isinstance(cause, ValueError) or not isinstance(cause, OSError):
                raise self._error(f"Docker Engine: {str(cause) or type(cause).__name__}") from error
            raise self._silent(cause) from error

    def _silent(self, cause: OSError) -> HostError:
        """Return the HostError of a daemon that does not answer, with a hint how to start it."""
        why = cause.strerror or str(cause)
        start = "restart" if "timed out" in why else "start"
        hint = "labctl setup" if self.host == model.HERE else f"on {self.host}: systemctl {start} docker"
        named = "" if self._address else process.variable("DOCKER_HOST")
        if named:
            hint = "unset DOCKER_HOST"
            why = why if named in why else f"{why} (DOCKER_HOST={named})"
        return self._error(f"Docker Engine does not answer: {why}", hint)

    def _client(self) -> Client:
        """Connect the SDK's client. OSError if address or TLS fail, DockerException for a bad config.json."""
        from docker.errors import DockerException, TLSParameterError

        from labctl.backends.docker.api import Client

        address = self._address or process.variable("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not address.startswith(("unix://", "tcp://", "http://", "https://")):
            raise OSError(f"DOCKER_HOST={address} is neither unix:// nor tcp://")
        try:
            return Client(address, self._seconds)
        except TLSParameterError:
            folder = process.variable("DOCKER_CERT_PATH") or "~/.docker"
            raise OSError(f"no cert.pem, key.pem and ca.pem in {folder}, and DOCKER_TLS_VERIFY is set") from None
        except (DockerException, ValueError) as error:
            raise OSError(str(error)) from None
        except (AttributeError, TypeError) as error:
            raise DockerException(f"the docker command's config.json is invalid: {error}") from error

    def _inspect(self, kind: Kind, identity: str) -> dict[str, Any] | None:
        """Return an object in full; None if not found."""
        with self._api() as api:
            return inspect(api, kind, identity)

    def _error(self, message: str, hint: str = "labctl doctor") -> HostError:
        """Return a HostError; for another host it names the host in the message and as node."""
        where = "" if self.host == model.HERE else self.host
        return HostError(f"{where}: {message}" if where else message, hint=hint, node=where or None)

    @contextlib.contextmanager
    def _acting(self, command: str, containers: int = 0) -> Iterator[Any]:
        """Yield a client for changes, limited by the number of ``containers``. HostError if ``command`` fails."""
        from python_on_whales import DockerClient
        from python_on_whales.exceptions import DockerException

        seconds = CHANGING + EACH * containers
        try:
            yield DockerClient(client_call=[*within(seconds), *self._program], host=self._address or None)
        except DockerException as error:
            raise self._failed(command, error.return_code, error.stderr or "", seconds) from error

    def _failed(self, command: str, code: int, output: str, seconds: int) -> HostError:
        """Return the HostError of a command: timed out, name taken, port in use, or its last lines of output."""
        if code in LATE:
            prefix = f"on {self.host}: " if self._address else "sudo "
            hint = f"{prefix}systemctl restart docker, if it hangs; then re-run the command"
            return self._error(f"`{command}` timed out after {human.duration(seconds)}", hint)
        message = f"`{command}` failed:\n" + "\n".join(without_repeats(output)[-LAST_LINES:])
        if taken := TAKEN.search(output):
            hint = f"docker rename {taken[1]} {taken[1]}-other  # or set another LAB_NAME in .env"
            return self._error(message, f"on {self.host}: {hint}" if self._address else hint)
        if taken := PORT_TAKEN.search(output):
            port = f"port {taken[2]} of {taken[1]} is in use"
            return self._error(port, "end what listens there, or choose another port of this machine in LAB_PORTS")
        return self._error(message)

    def versions(self) -> dict[str, str]:
        """Return the versions of the engine, its API and its kernel."""
        with self._api() as api:
            version = api.version(api_version=False)
        return {"engine": version["Version"], "api": version["ApiVersion"], "kernel": version.get("KernelVersion", "")}

    def information(self) -> dict[str, Any]:
        """Return the daemon's description of itself, as ``docker info``."""
        with self._api() as api:
            return dict(api.info())

    def identity(self) -> str:
        return self._identity

    @once
    def _identity(self) -> str:
        return str(self.information()["ID"])

    def port_users(self) -> tuple[HostPortUser, ...]:
        """Return the workers of any lab on this host's network, with their sshd's port, 0 if not known."""
        users = []
        with self._api() as api:
            for listed in api.containers(filters={"label": ["labctl.lab", "labctl.role=worker"]}):
                if listed["HostConfig"]["NetworkMode"] == "host":
                    port = variables_of(inspect(api, "container", listed["Id"])).get("LAB_SSH_PORT", "")
                    number, lab = int(port) if port.isdecimal() else 0, listed["Labels"]["labctl.lab"]
                    users.append(HostPortUser(port=number, lab=lab, container=container_of(listed, self.host)))
        return tuple(users)

    def labs(self) -> dict[str, list[Container]]:
        """Return the launchers and workers of every lab on this host by the name of the lab, also stopped ones."""
        by_lab: dict[str, list[Container]] = {}
        with self._api() as api:
            for listed in api.containers(all=True, filters={"label": ["labctl.lab", "labctl.node"]}):
                name = "".join(filter(str.isprintable, listed["Labels"]["labctl.lab"]))
                by_lab.setdefault(name, []).append(container_of(listed, self.host))
        return by_lab

    def network(self, identity: str) -> dict[str, Any]:
        """Return a network in full: its options, addresses and containers. HostError if not found."""
        if not (inspected := self._inspect("network", identity)):
            raise self._error(f"Docker Engine: network {identity} not found")
        return inspected

    def compose_refusal(self, directory: Path, files: Iterable[str], seconds: float) -> str:
        """Return the last line of `docker compose config` on files below a directory; empty if accepted, or late."""
        named = chain.from_iterable(("--file", path) for path in files)
        command = (*self.docker, "compose", "--project-directory", str(directory), *named, "config", "--quiet")
        try:
            done = process.run(command, cwd=str(directory), timeout=seconds, check=False)
        except process.ProcessTimeout:
            # A busy machine is no refusal.
            return ""
        lines = [line for line in done.err.splitlines() if "level=warning" not in line]
        return lines[-1] if done.code and lines else ""

    def foreign_containers(self, prefix: str, lab: str) -> tuple[str, ...]:
        """Return the names of containers, also stopped ones, that begin with ``prefix-`` and are not of the lab."""
        with self._api() as api:
            listed = api.containers(all=True, filters={"name": f"^/?{prefix}-"})
        others = (container for container in listed if container["Labels"].get("labctl.lab") != lab)
        paths = chain.from_iterable(container["Names"] for container in others)
        return tuple(path.lstrip("/") for path in paths)

    def foreign_network(self, name: str, lab: str) -> bool | None:
        """Return True if a network of this name is not of the lab and in use, False if unused; None without one."""
        with self._api() as api:
            network = inspect(api, "network", name)
        if network is None or (network["Labels"] or {}).get("labctl.lab") == lab:
            return None
        return not self._networks_in_use().isdisjoint((name, network["Id"]))

    def publishers(self, port: int) -> tuple[tuple[str, str, str], ...]:
        """Return the running containers that publish a TCP port of the host: name, lab of its label, and address."""
        with self._api() as api:
            listed = api.containers(filters={"publish": f"{port}/tcp"})
        # The filter also finds the ports of containers.
        return tuple(
            (container["Names"][0].lstrip("/"), container["Labels"].get("labctl.lab", ""), published.get("IP", ""))
            for container in listed
            for published in container["Ports"]
            if (published.get("PublicPort"), published["Type"]) == (port, "tcp")
        )

    def unused_networks(self) -> tuple[tuple[str, str], ...]:
        """Return the networks that no container refers to, not even a stopped one: name, and the lab of its label."""
        with self._api() as api:
            networks = api.networks(filters={"type": "custom"})
        used = self._networks_in_use()
        free = (network for network in networks if used.isdisjoint((network["Name"], network["Id"])))
        return tuple(sorted((network["Name"], (network["Labels"] or {}).get("labctl.lab", "")) for network in free))

    def _networks_in_use(self) -> set[str]:
        """Return the names, or ids, of the networks that containers refer to, also stopped ones."""
        with self._api() as api:
            containers = api.containers(all=True)
        return set(chain.from_iterable(container["NetworkSettings"]["Networks"] for container in containers))

    def try_network(self, lab: str) -> str:
        """Create and remove a network for a lab; return why the daemon refuses, or "". HostError if it is silent."""
        import secrets

        from docker.errors import APIError, NotFound

        name = f"labctl-{lab}-{probe.ROLE}-{secrets.token_hex(4)}"
        labels = {"labctl.lab": lab, "labctl.role": probe.ROLE}
        try:
            with self._api() as api:
                api.create_network(name, labels=labels)
        except HostError as error:
            if not isinstance(error.__cause__, APIError):
                raise
            return str(error.__cause__.explanation)
        finally:  # By name: it may have been created although the request timed out.
            with self._api() as api, contextlib.suppress(NotFound):
                api.remove_network(name)
        return ""

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """Return the lab's containers, networks and probes, by label, and an image's id, None if not found.

        A list of containers includes neither the reason why one is unhealthy, nor its limits, nor its user: those are
        inspected.
        """
        mark = {"label": [f"labctl.lab={lab}"]}
        with self._api() as api:
            containers = [container_of(listed, self.host) for listed in api.containers(all=True, filters=mark)]
            networks = api.networks(filters=mark)
            for number, container in enumerate(containers):
                incomplete = container.health == "unhealthy" or container.rendered_limits or container.node == node
                if incomplete and (inspected := inspect(api, "container", container.id)):
                    containers[number] = completed(container, inspected, user=bool(node))
            inspected_image = inspect(api, "image", image) if image else None
        containers.sort(key=node_order)
        probes = tuple(container for container in containers if container.role == probe.ROLE)
        nodes = tuple(container for container in containers if container.role != probe.ROLE)
        tried: list[tuple[str, str]] = []
        lasting: list[tuple[str, str]] = []
        for network in networks:
            is_probe = (network["Labels"] or {}).get("labctl.role") == probe.ROLE
            (tried if is_probe else lasting).append((network["Id"], network["Name"]))
        return ObservedState(
            host=self.host,
            containers=nodes,
            probes=probes,
            networks=tuple(lasting),
            probe_networks=tuple(tried),
            image=str(inspected_image["Id"]) if inspected_image else None,
        )

    def image(self, image: str) -> dict[str, Any] | None:
        """Return an image as ``docker image inspect``; None if not found."""
        return self._inspect("image", image)

    def image_id(self, image: str) -> str | None:
        """Return the id of an image; None if not found."""
        inspected = self.image(image)
        return str(inspected["Id"]) if inspected else None

    def image_labels(self, image: str) -> dict[str, str]:
        """Return the labels of a local image; empty if not found."""
        return dict((self.image(image) or {}).get("Config", {}).get("Labels") or {})

    def image_variables(self, image: str) -> dict[str, str]:
        """Return the environment variables of a local image; empty if not found."""
        return variables_of(self.image(image))

    def pull(self, image: str) -> None:
        """Pull an image. HostError with docker's message."""
        with self._acting(f"docker pull {image}") as actor:
            actor.pull(image, quiet=True)

    def import_image(self, archive: Path, image: str) -> None:
        """Create an image from the tar archive of a file system, by `docker import`. HostError if it fails."""
        with self._acting(f"docker import {image}") as actor:
            actor.import_(archive, image)

    def file_of(self, image: str, path: str) -> str:
        """Return the content of a text file of an image, by `cat` in a new container. HostError if that fails."""
        with self._acting(f"docker run {image} cat {path}") as actor:
            return str(actor.run(image, [path], entrypoint="cat", networks=["none"], remove=True))

    def context(self) -> str:
        """Return the name of this daemon's docker context, which its image builder has, too."""
        with self._acting("docker context inspect") as actor:
            return str(actor.context.inspect().name)

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:  # noqa: ARG002
        """Run `docker compose up` for these files as one project; other containers stay. HostError if it fails.

        By the docker program, so that the terminal's Ctrl-C reaches it.
        """
        seconds = CHANGING + EACH * len(files)
        named = chain.from_iterable(("--file", str(file)) for file in files)
        compose = ("compose", "-p", project, "--env-file", "/dev/null", *named, "up", "--detach", "--pull", "never")
        done = process.run((*within(seconds), *self.docker, *compose, "--no-build"), check=False)
        if done.code:
            raise self._failed(f"docker compose -p {project} up", done.code, done.err, seconds)

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:  # noqa: ARG002
        """Remove containers, running or missing ones too, networks or images. HostError if docker fails."""
        command = shlex.join(("docker", kind, "rm", *(ids if kind == "image" else ())))
        with self._acting(command, len(ids)) as actor:
            getattr(actor, kind).remove(list(ids), **({"force": True} if kind == "container" else {}))

    def exec(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,
        workdir: str | None = None,
        limit: float = EXECUTING,
    ) -> process.CompletedProcess:
        """Run a short program in a container; return code and output, code 1 if the container does not run."""
        from docker.errors import APIError

        with self._api() as api:
            try:
                made = api.exec_create(container, list(argv), user=user, workdir=workdir)["Id"]
                try:
                    out, err = api.exec_output(made, limit)
                except TimeoutError:
                    late = f"`{shlex.join(argv)}` timed out after {human.duration(limit)}"
                    raise process.ProcessTimeout(late) from None
            except APIError as error:  # The container is gone, or not running.
                return process.CompletedProcess(argv, 1, "", f"{error.explanation}\n")
            code = api.exec_inspect(made)["ExitCode"]
        if code is None:
            raise self._error(f"{container}: the connection to {argv[0]} was lost")
        return process.CompletedProcess(argv, int(code), out, err)

    def stream(
        self,
        container: str,
        argv: tuple[str, ...],
        on_lines: OnLines,
        *,
        user: str,
        environment: Pairs = (),
        limit: float,
        typed: process.Input | None = None,
    ) -> int:
        """Run a program in a container, pass its lines on; return its code. HostError after ``limit`` s."""
        variables = [f"{name}={value}" for name, value in environment]
        command = self._exec(container, user, options=("-i",), variables=variables)
        return process.stream_blocks(
            (*command, *argv), on_lines, timeout=limit, check=False, pulse=PULSE, typed=typed, rest=False
        ).code

    def attach(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,
        workdir: str | None,
        environment: tuple[str, ...] = (),
        secret_env: Mapping[str, str] | None = None,
        stdin: Literal["terminal", "pipe", "none"] = "none",
        on_line: OnLine | None = None,
    ) -> int:
        """Run a program in a container on this terminal; return its exit code. HostError if docker detaches."""
        import secrets

        mark = f"person-{secrets.token_hex(8)}"
        agent = (*self._exec(container, user), *AGENT)
        options = {"terminal": ("-it", "--detach-keys", DETACH_KEYS), "pipe": ("-i",), "none": ()}[stdin]
        variables = (f"{RUN_VARIABLE}={mark}", *environment, *(secret_env or ()))
        command = (*self._exec(container, user, workdir, options, variables), *argv)
        with process.guarded((*agent, "reap", mark, LEFT_GRACE)), process.begun() as begin:
            if on_line:
                return process.stream(command, on_line, env=secret_env, check=False).code

            def forward(number: signal.Signals) -> None:
                begin((*agent, "signal", mark, str(int(number))))

            code = process.attached(command, forward, env=secret_env)
            look = ("sh", "-c", IN_NODE, "sh", "runs", f"{RUN_VARIABLE}={mark}")
            if stdin == "terminal" and code == DETACHED and self.exec(container, look, user=user).code == 0:
                raise HostError(f"docker detached from `{shlex.join(argv)}` in {container}; labctl ends the command")
            return code

    def _exec(
        self,
        container: str,
        user: str,
        workdir: str | None = None,
        options: tuple[str, ...] = (),
        variables: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Return the `docker exec` command that runs the program after it in a container."""
        where = ("--workdir", workdir) if workdir else ()
        set_variables = chain.from_iterable(("--env", variable) for variable in variables)
        return (*self.docker, "exec", *options, "--user", user, *where, *set_variables, container)

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:
        """Pass on the lines of `docker compose logs` of a project, or of one node; with ``follow`` to the end."""
        options = (*(("--follow",) if follow else ()), *((node,) if node else ()))
        command = ("compose", "--ansi", "always" if color else "never", "-p", project, "logs", *options)
        process.stream((*self.docker, *command), lambda line: on_line(line.removeprefix(ERASE)))

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:
        """Return True if a container with these ulimits starts. HostError if it is refused otherwise."""
        options = tuple(chain.from_iterable(("--ulimit", f"{name}={value}:{value}") for name, value in limits))
        return not probe.refused(self.docker, lab, image, options, because="rlimit")

    def most_files(self, lab: str, image: str) -> int:
        return probe.most_files(self.docker, lab, image)

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:
        """Return True if the daemon has this device driver for these devices. HostError if refused otherwise."""
        options = ("--gpus", probe.reservation(driver, ids))
        return not probe.refused(self.docker, lab, image, options, because="could not select device driver")

    def starts(self, lab: str, image: str, mapping: DeviceMapping) -> str:
        """Return the error of starting a container with these devices; empty if it starts."""
        return probe.refusal(self.docker, lab, image, probe.device_options(mapping))

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """Yield node, cause and text of each loss of a lab's containers, as the daemon reports them."""
        # A filter for labels would leave out the events of networks, which have none.
        labels = {"container": (lab,), "network": (None,)}
        actions = ["die", "oom", "health_status", "disconnect", "pause", "unpause"]
        with self._api() as api, api.event_lines(type=["container", "network"], event=actions) as lines:
            events = map(json.loads, lines)
            ours = (
                event for event in events if event["Actor"]["Attributes"].get("labctl.lab") in labels[event["Type"]]
            )
            yield from watch(ours, partial(self.observe, lab), self._last_check)

    def _last_check(self, container: str) -> str:
        return last_check(self._inspect("container", container))

"""One Docker daemon, here or at the end of a forwarded socket: changed with python-on-whales, read with the SDK."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from labctl import model
from labctl.engines import CALL_LIMIT, probe
from labctl.engines import events as losses
from labctl.engines.state import Container, HostPortUser, ObservedState
from labctl.errors import HostError
from labctl.hosts.ssh import Connection, LocalConnection
from labctl.model import Cause, DeviceMapping, Pairs
from labctl.system import process
from labctl.system.cached import once


def container_of(found: dict[str, Any], host: str) -> Container:
    labels = found["Labels"]
    status = found.get("Status", "")
    health = next(
        (word for word in ("unhealthy", "healthy", "starting") if f"({word}" in status or f": {word}" in status), None
    )
    return Container(
        id=found["Id"],
        name=found["Names"][0].lstrip("/") if found.get("Names") else found["Id"][:12],
        node=labels.get("labctl.node", "?"),
        host=host,
        role=labels.get("labctl.role", "?"),
        slots=int(labels.get("labctl.slots", 0)),
        state=found["State"],
        health=health,
        fingerprint=labels.get("labctl.render", ""),
        image=found["ImageID"],
        directory=labels.get("labctl.directory", ""),
        owner=labels.get("labctl.owner", ""),
        devices=tuple(filter(None, labels.get("labctl.devices", "").split(","))),
    )


def listener_of(found: dict[str, Any], environment: Mapping[str, str], host: str) -> HostPortUser:
    """By what the container was made with, where its sshd listens; port 0 where that is not to be told."""
    port = environment.get("LAB_SSH_PORT", "")
    container = container_of(found, host)
    return HostPortUser(
        port=int(port) if port.isdecimal() else 0, lab=found["Labels"]["labctl.lab"], container=container
    )


def node_order(container: Container) -> tuple[bool, str, int]:
    """The launcher first, then the workers by number."""
    stem, _, number = container.node.rpartition("-")
    return (container.role != "launcher", stem, int(number) if number.isdigit() else 0)


def root_cause(error: BaseException) -> str:
    """The innermost reason: requests and urllib3 wrap a refused connection three times."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(getattr(error, "strerror", None) or error)


LAST_LINES = 20
# What a person's environment says of another daemon than that at the end of a connection.
OF_ANOTHER = ("DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_API_VERSION")
# Seconds for a command that changes something, and for each container that it makes or removes: a busy disk, and many
# GPUs that wake, take minutes; a daemon that hangs takes for ever.
CHANGING, EACH = 300, 10
# Seconds until a command that does not heed that its time is up is killed; and what timeout(1) then ends with.
GRACE, LATE = 10, (124, 137)


class DockerEngine:
    """One daemon, at the end of a connection or by the usual DOCKER_HOST, with so many seconds for an answer.

    ``docker`` is the command that reaches it, to be followed by arguments; ``connection`` leads to its host.
    """

    def __init__(self, connection: Connection | None = None, *, seconds: int = 30) -> None:
        self.connection = connection or LocalConnection()
        self._address = self.connection.address
        self._seconds = seconds
        self.host = self.connection.target.name
        self._program = process.without(OF_ANOTHER, ["docker"]) if self._address else ("docker",)
        self.docker = (*self._program, "--host", self._address) if self._address else self._program

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)

    def on(self, host: str) -> DockerEngine:  # noqa: ARG002
        """The daemon of a host: there is only this one."""
        return self

    @once
    def _reader(self) -> Any:
        import docker

        try:
            if self._address:
                return docker.DockerClient(self._address, timeout=self._seconds).api
            return docker.from_env(timeout=self._seconds).api
        except (docker.errors.DockerException, OSError) as error:
            why = root_cause(error)
            start = "restart" if "timed out" in why else "start"
            hint = "labctl setup" if self.host == model.HERE else f"on {self.host}: systemctl {start} docker"
            raise self._error(f"Docker Engine does not answer: {why}", hint) from error

    def _actor(self, seconds: int, **options: Any) -> Any:
        """Changes things, each in so many seconds; in the foreground, so that the terminal's Ctrl-C reaches it."""
        from python_on_whales import DockerClient

        limited = ["timeout", "--foreground", f"--kill-after={GRACE}", str(seconds), *self._program]
        return DockerClient(client_call=limited, host=self._address or None, **options)

    def _error(self, message: str, hint: str = "labctl doctor") -> HostError:
        """A failure, and on which host where that is not this machine."""
        where = "" if self.host == model.HERE else self.host
        return HostError(f"{where}: {message}" if where else message, hint=hint, node=where or None)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        import docker

        try:
            yield
        except (docker.errors.APIError, OSError) as error:
            raise self._error(f"Docker Engine: {root_cause(error)}") from error

    @contextlib.contextmanager
    def _acting(self, what: str, containers: int = 0, **options: Any) -> Iterator[Any]:
        """What acts, in time for so many containers; HostError for what fails, and for what is not done by then."""
        from python_on_whales.exceptions import DockerException

        seconds = CHANGING + EACH * containers
        try:
            yield self._actor(seconds, **options)
        except DockerException as error:
            if error.return_code in LATE:
                there = f"on {self.host}: " if self._address else "sudo "
                hint = f"{there}systemctl restart docker, where it hangs; then the same command again"
                raise self._error(f"`{what}` was not done by Docker Engine within {seconds} s", hint) from error
            said = (error.stderr or "").strip().splitlines()[-LAST_LINES:]
            raise self._error(f"`{what}` failed:\n" + "\n".join(said)) from error

    def versions(self) -> dict[str, str]:
        """Versions of the engine, its API and its kernel."""
        with self._reading():
            version = self._reader.version()
        return {"engine": version["Version"], "api": version["ApiVersion"], "kernel": version.get("KernelVersion", "")}

    def information(self) -> dict[str, Any]:
        """What the daemon says of itself: ``docker info``."""
        with self._reading():
            return dict(self._reader.info())

    def identity(self) -> str:
        """What tells this daemon from another."""
        return self._identity

    @once
    def _identity(self) -> str:
        return str(self.information()["ID"])

    def listeners(self) -> tuple[HostPortUser, ...]:
        """The workers, of whatever lab, whose sshd listens on this host's own network."""
        with self._reading():
            found = self._reader.containers(filters={"label": ["labctl.lab", "labctl.role=worker"]})
            there = (one for one in found if one["HostConfig"]["NetworkMode"] == "host")
            return tuple(listener_of(one, self._environment(one["Id"]), self.host) for one in there)

    def _environment(self, container: str) -> dict[str, str]:
        """A container's variables; none of one that is gone."""
        import docker

        try:
            given = self._reader.inspect_container(container)["Config"]["Env"] or ()
        except docker.errors.NotFound:
            return {}
        return dict(one.partition("=")[::2] for one in given)

    def network(self, identity: str) -> dict[str, Any]:
        """A network in full: its options, addresses, and who is on it."""
        with self._reading():
            return dict(self._reader.inspect_network(identity))

    def unused_networks(self) -> tuple[tuple[str, str], ...]:
        """Networks that no container refers to, not even a stopped one: name, and the lab it was made for, if any."""
        with self._reading():
            made = self._reader.networks(filters={"type": ["custom"]})
            held = {name for one in self._reader.containers(all=True) for name in one["NetworkSettings"]["Networks"]}
        free = (one for one in made if held.isdisjoint((one["Name"], one["Id"])))
        return tuple(sorted((one["Name"], (one["Labels"] or {}).get("labctl.lab", "")) for one in free))

    def try_network(self, lab: str) -> str:
        """Why the daemon cannot make another network for a lab; empty when it can. What was made for it is removed."""
        import docker

        name = f"labctl-{lab}-{probe.ROLE}-{secrets.token_hex(4)}"
        with self._reading():
            try:
                self._reader.create_network(name, labels={"labctl.lab": lab, "labctl.role": probe.ROLE})
            except docker.errors.APIError as error:
                return str(error.explanation or error)
            finally:  # By name: one whose making took too long is there too.
                with contextlib.suppress(docker.errors.NotFound):
                    self._reader.remove_network(name)
        return ""

    def observe(self, lab: str, image: str | None = None) -> ObservedState:
        """The lab's containers and networks, by label, and the id of an image where one is asked about."""
        mark = {"label": f"labctl.lab={lab}"}
        with self._reading():
            containers = self._reader.containers(all=True, filters=mark)
            networks = self._reader.networks(filters=mark)
        tried = [one for one in networks if (one["Labels"] or {}).get("labctl.role") == probe.ROLE]
        found = sorted((self._with_reason(container_of(one, self.host)) for one in containers), key=node_order)
        return ObservedState(
            host=self.host,
            containers=tuple(one for one in found if one.role != probe.ROLE),
            probes=tuple(one for one in found if one.role == probe.ROLE),
            networks=tuple((one["Id"], one["Name"]) for one in networks if one not in tried),
            probe_networks=tuple((one["Id"], one["Name"]) for one in tried),
            image=self.image_id(image) if image else None,
        )

    def _with_reason(self, container: Container) -> Container:
        """A list of containers does not say why one is unhealthy."""
        if container.health != "unhealthy":
            return container
        return replace(container, reason=self._last_check(container.id))

    def _last_check(self, container: str) -> str:
        """What the last health check said; nothing where the container is gone."""
        import docker

        with self._reading():
            try:
                log = self._reader.inspect_container(container)["State"]["Health"]["Log"]
            except docker.errors.NotFound:
                return ""
        return str(log[-1]["Output"]).strip() if log else ""

    def image(self, image: str) -> dict[str, Any] | None:
        """``docker image inspect``; None if it is not there."""
        import docker

        with self._reading():
            try:
                return dict(self._reader.inspect_image(image))
            except docker.errors.ImageNotFound:
                return None

    def image_id(self, image: str) -> str | None:
        """Id of a local image, None if it is not there."""
        found = self.image(image)
        return str(found["Id"]) if found else None

    def image_labels(self, image: str) -> dict[str, str]:
        """Labels of a local image."""
        with self._reading():
            return dict(self._reader.inspect_image(image)["Config"].get("Labels") or {})

    def image_variables(self, image: str) -> dict[str, str]:
        """Environment variables of a local image."""
        with self._reading():
            given = self._reader.inspect_image(image)["Config"].get("Env") or ()
        return dict(one.partition("=")[::2] for one in given)

    def compose_up(self, project: str, files: tuple[Path, ...]) -> None:
        """Bring up all services of these files as one project; nothing else of that project is touched."""
        options = {"compose_files": files, "compose_project_name": project, "compose_env_files": ["/dev/null"]}
        with self._acting(f"docker compose -p {project} up", len(files), **options) as actor:
            actor.compose.up(detach=True, quiet=True, pull="never", no_build=True)

    def remove(self, containers: tuple[str, ...]) -> None:
        """Kill and remove containers; one that is gone already is fine."""
        with self._acting("docker container rm", len(containers)) as actor:
            actor.container.remove(list(containers), force=True)

    def remove_networks(self, networks: tuple[str, ...]) -> None:
        with self._acting("docker network rm") as actor:
            actor.network.remove(list(networks))

    def pull(self, image: str) -> None:
        """Pull an image. HostError with docker's own words."""
        with self._acting(f"docker pull {image}") as actor:
            actor.pull(image, quiet=True)

    def import_image(self, archive: Path, image: str) -> None:
        """Make an image of a file system in a tar archive."""
        with self._acting(f"docker import {image}") as actor:
            actor.import_(archive, image)

    def file_of(self, image: str, path: str) -> str:
        """A text file of an image; HostError if it has none."""
        with self._acting(f"docker run {image} cat {path}") as actor:
            return str(actor.run(image, [path], entrypoint="cat", networks=["none"], remove=True))

    def context(self) -> str:
        """Name of the docker context of this daemon: that of its own image builder too."""
        with self._acting("docker context inspect") as actor:
            return str(actor.context.inspect().name)

    def remove_image(self, image: str) -> None:
        """Remove an image; HostError where a container uses it."""
        with self._acting(f"docker image rm {image}") as actor:
            actor.image.remove(image)

    def call(
        self, container: str, argv: tuple[str, ...], *, user: str, limit: float = CALL_LIMIT
    ) -> process.CompletedProcess:
        """Run a short program in a container to its end, whatever its exit code; HostError after so many seconds."""
        return process.run((*self.docker, "exec", "--user", user, container, *argv), timeout=limit, check=False)

    def follow(
        self,
        container: str,
        argv: tuple[str, ...],
        on_line: Callable[[str], None],
        *,
        user: str,
        workdir: str,
        environment: Pairs,
        limit: float,
    ) -> int:
        """Run a program in a container, handing on each line as it prints; returns its exit code.

        The terminal's Ctrl-C does not reach it, so that its last words are heard. HostError after ``limit`` seconds.
        """
        variables = tuple(word for name, value in environment for word in ("--env", f"{name}={value}"))
        where = (*self.docker, "exec", "--user", user, "--workdir", workdir, *variables, container)
        return process.stream((*where, *argv), on_line, timeout=limit, check=False).code

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:
        """Whether the daemon can start a container with these ulimits: some hosts refuse to raise them."""
        options = tuple(word for name, value in limits for word in ("--ulimit", f"{name}={value}:{value}"))
        return not probe.refused(self.docker, lab, image, options, because="rlimit")

    def most_files(self, lab: str, image: str) -> int:
        """How many files a process in a container may open, whatever it asks for."""
        return probe.most_files(self.docker, lab, image)

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:
        """Whether the daemon knows this device driver, by reserving these devices: it lists none."""
        options = ("--gpus", probe.reservation(driver, ids))
        return not probe.refused(self.docker, lab, image, options, because="could not select device driver")

    def starts(self, lab: str, image: str, mapping: DeviceMapping) -> str:
        """Why a container with these devices does not start; empty when it does."""
        return probe.refusal(self.docker, lab, image, probe.device_options(mapping))

    def losses(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        """Yield (node, cause, what happened) for each container that dies or is lost to runs, from now on."""
        with contextlib.closing(self._events(lab)) as events:
            yield from losses.watch(events, partial(self.observe, lab), self._last_check)

    def _events(self, lab: str) -> Any:
        filters = {"label": f"labctl.lab={lab}", "type": "container", "event": ["die", "oom", "health_status"]}
        return self._reader.events(filters=filters, decode=True)

"""Docker Engine of this machine or at a forwarded socket: read with the docker SDK, changed with python-on-whales."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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
from labctl.system import process
from labctl.system.cached import once

if TYPE_CHECKING:
    import signal

    from labctl.backends.docker.api import Client


def container_of(found: dict[str, Any], host: str) -> Container:
    # Anyone who may use the daemon may write them.
    labels = {name: "".join(filter(str.isprintable, value)) for name, value in found["Labels"].items()}
    slots = labels.get("labctl.slots", "")
    status = found.get("Status", "")
    health = next(
        (word for word in ("unhealthy", "healthy", "starting") if f"({word}" in status or f": {word}" in status), None
    )
    mode = found.get("HostConfig", {}).get("NetworkMode", "")
    return Container(
        id=found["Id"],
        name=found["Names"][0].lstrip("/") if found.get("Names") else found["Id"][:12],
        node=labels.get("labctl.node", "?"),
        host=host,
        role=labels.get("labctl.role", "?"),
        slots=int(slots) if re.fullmatch("[0-9]{1,6}", slots) else 0,
        state=found["State"],
        health=health,
        fingerprint=labels.get("labctl.config-hash", ""),
        image=found["ImageID"],
        directory=labels.get("labctl.directory", ""),
        owner=labels.get("labctl.owner", ""),
        devices=tuple(filter(None, labels.get("labctl.devices", "").split(","))),
        mounts=tuple((one["Source"], one["Destination"]) for one in found.get("Mounts", ()) if one["Type"] == "bind"),
        network="" if mode in BUILT_IN or ":" in mode else mode,
        networks=tuple((found.get("NetworkSettings") or {}).get("Networks") or ()),
        rendered_limits=labels.get("labctl.limits", ""),
    )


def completed(container: Container, inspected: dict[str, Any], *, user: bool) -> Container:
    """A container with what a list of containers does not say of it."""
    return replace(
        container,
        reason=last_check(inspected) if container.health == "unhealthy" else "",
        user="{LAB_UID}:{LAB_GID}".format(**variables_of(inspected)) if user else "",
        networks=tuple(named_networks(container, inspected)),
        limits=limits_of(inspected),
    )


def named_networks(container: Container, inspected: dict[str, Any]) -> Iterator[str]:
    """The networks on which other containers find this one by the name of its node.

    That name is lost when the container is disconnected and connected again by hand.
    """
    for name, endpoint in (inspected["NetworkSettings"]["Networks"] or {}).items():
        if name != container.network or container.node in (endpoint.get("Aliases") or ()):
            yield name


def limits_of(inspected: dict[str, Any]) -> Pairs:
    """The limits of a container, without those that the kernel lacks: the engine leaves these out."""
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
    """The launcher first, then the workers by number."""
    stem, _, number = container.node.rpartition("-")
    return (container.role != "launcher", stem, int(number) if number.isdigit() else 0)


def inspect(api: Client, kind: Kind, identity: str) -> dict[str, Any] | None:
    """A container, network or image in full; None if it is not there."""
    from docker.errors import NotFound

    try:
        return dict(getattr(api, f"inspect_{kind}")(identity))
    except NotFound:
        return None


def variables_of(inspected: dict[str, Any] | None) -> dict[str, str]:
    """Environment variables of a container or image; none of one that is gone."""
    given = (inspected or {}).get("Config", {}).get("Env") or ()
    return dict(one.partition("=")[::2] for one in given)


def last_check(inspected: dict[str, Any] | None) -> str:
    """What the last health check of a container said; nothing where it is gone."""
    log = inspected["State"]["Health"]["Log"] if inspected else ()
    return str(log[-1]["Output"]).strip() if log else ""


# Networks that no compose file makes.
BUILT_IN = ("", "host", "none", "default", "bridge")
LAST_LINES = 20
# In the daemon's words.
PORT_TAKEN = re.compile(
    r"(?:listen tcp4?|Bind for|host port(?: for)?) ([0-9.]+):([0-9]+)\S*"
    r"(?:: bind: address| failed: port is|(?<=:) address) already"
)
TAKEN = re.compile(r'container name "/(\S+)" is already in use')
# Seconds for a program that reaches or reaps: each has a shorter limit of its own.
EXECUTING = 120
# What a person's environment says of another daemon than that at the end of a connection.
OF_ANOTHER = ("DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_API_VERSION")
# Seconds for a command that changes something, and for each container that it makes or removes: a busy disk, and many
# GPUs that wake, take minutes; a daemon that hangs takes for ever.
CHANGING, EACH = 300, 10
# Seconds until a command that does not heed that its time is up is killed; and what timeout(1) then ends with.
GRACE, LATE = 10, (124, 137)
# What the agent knows a run's processes by; its value here is a mark of one command.
RUN_VARIABLE = "LABCTL_RUN_ID"
# Seconds between TERM and KILL for what a killed labctl has left.
LEFT_GRACE = "2"
# Seconds between two words to a program whose output is streamed: that it is still read.
PULSE = 1
# Docker holds the first key back until the next, and always has such a sequence: its own begins with Ctrl-P.
DETACH_KEYS = "ctrl-^,ctrl-_,ctrl-^,ctrl-_"
# What docker itself ends with when it lets go of a command.
DETACHED = 1
# What docker compose erases the line before with, on a terminal, and elsewhere too, whatever its options.
ERASE = "\033[2K"


def within(seconds: int) -> tuple[str, ...]:
    """What ends a command that is not done by then, in the foreground so that the terminal's Ctrl-C reaches it."""
    return ("timeout", "--foreground", f"--kill-after={GRACE}", str(seconds))


def without_repeats(printed: str) -> list[str]:
    """Each line once. Compose 5 prints some twice, and its last error also before, behind the service's name."""
    lines = list(dict.fromkeys(line.rstrip() for line in printed.splitlines() if line.strip()))
    return [line for line in lines if line == lines[-1] or not line.endswith(f" {lines[-1]}")]


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

    @property
    def connections(self) -> Mapping[str, Connection]:
        return {self.host: self.connection} if self.connection else {}

    def capabilities(self, host: str) -> DockerEngine:  # noqa: ARG002
        return self

    @contextlib.contextmanager
    def _api(self) -> Iterator[Client]:
        """The SDK's client; HostError for what the daemon refuses, and if it does not answer."""
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
        """Why the daemon does not answer, and what mends that."""
        why = cause.strerror or str(cause)
        start = "restart" if "timed out" in why else "start"
        hint = "labctl setup" if self.host == model.HERE else f"on {self.host}: systemctl {start} docker"
        named = "" if self._address else process.variable("DOCKER_HOST")
        if named:
            hint = "unset DOCKER_HOST"
            why = why if named in why else f"{why} (DOCKER_HOST={named})"
        return self._error(f"Docker Engine does not answer: {why}", hint)

    def _client(self) -> Client:
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
        """In full; None if it is not there."""
        with self._api() as api:
            return inspect(api, kind, identity)

    def _error(self, message: str, hint: str = "labctl doctor") -> HostError:
        """A failure, and on which host where that is not this machine."""
        where = "" if self.host == model.HERE else self.host
        return HostError(f"{where}: {message}" if where else message, hint=hint, node=where or None)

    @contextlib.contextmanager
    def _acting(self, what: str, containers: int = 0) -> Iterator[Any]:
        """What changes things, in time for so many containers; HostError for what fails, and is not done by then."""
        from python_on_whales import DockerClient
        from python_on_whales.exceptions import DockerException

        seconds = CHANGING + EACH * containers
        try:
            yield DockerClient(client_call=[*within(seconds), *self._program], host=self._address or None)
        except DockerException as error:
            raise self._failed(what, error.return_code, error.stderr or "", seconds) from error

    def _failed(self, what: str, code: int, said: str, seconds: int) -> HostError:
        """Why a command that changes something did not do it within so many seconds."""
        if code in LATE:
            there = f"on {self.host}: " if self._address else "sudo "
            hint = f"{there}systemctl restart docker, if it hangs; then re-run the command"
            return self._error(f"`{what}` timed out after {seconds} s", hint)
        message = f"`{what}` failed:\n" + "\n".join(without_repeats(said)[-LAST_LINES:])
        if taken := TAKEN.search(said):
            hint = f"docker rename {taken[1]} {taken[1]}-other, or set another LAB_NAME in .env"
            return self._error(message, f"on {self.host}: {hint}" if self._address else hint)
        if taken := PORT_TAKEN.search(said):
            port = f"port {taken[2]} of {taken[1]} is in use"
            return self._error(port, "end what listens there, or choose another port of this machine in LAB_PORTS")
        return self._error(message)

    def versions(self) -> dict[str, str]:
        with self._api() as api:
            version = api.version(api_version=False)
        return {"engine": version["Version"], "api": version["ApiVersion"], "kernel": version.get("KernelVersion", "")}

    def information(self) -> dict[str, Any]:
        """What the daemon says of itself: ``docker info``."""
        with self._api() as api:
            return dict(api.info())

    def identity(self) -> str:
        return self._identity

    @once
    def _identity(self) -> str:
        return str(self.information()["ID"])

    def port_users(self) -> tuple[HostPortUser, ...]:
        """The workers, of whatever lab, whose sshd listens on this host's own network; port 0 where it is not known."""
        found = []
        with self._api() as api:
            for one in api.containers(filters={"label": ["labctl.lab", "labctl.role=worker"]}):
                if one["HostConfig"]["NetworkMode"] == "host":
                    port = variables_of(inspect(api, "container", one["Id"])).get("LAB_SSH_PORT", "")
                    number, lab = int(port) if port.isdecimal() else 0, one["Labels"]["labctl.lab"]
                    found.append(HostPortUser(port=number, lab=lab, container=container_of(one, self.host)))
        return tuple(found)

    def network(self, identity: str) -> dict[str, Any]:
        """A network in full: its options, addresses, and who is on it."""
        if not (found := self._inspect("network", identity)):
            raise self._error(f"Docker Engine: network {identity} not found")
        return found

    def unused_networks(self) -> tuple[tuple[str, str], ...]:
        """Networks that no container refers to, not even a stopped one: name, and the lab it was made for, if any."""
        with self._api() as api:
            made = api.networks(filters={"type": "custom"})
            held = {name for one in api.containers(all=True) for name in one["NetworkSettings"]["Networks"]}
        free = (one for one in made if held.isdisjoint((one["Name"], one["Id"])))
        return tuple(sorted((one["Name"], (one["Labels"] or {}).get("labctl.lab", "")) for one in free))

    def try_network(self, lab: str) -> str:
        """Why the daemon cannot make another network for a lab; empty when it can. What was made for it is removed."""
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
        finally:  # By name: one whose making took too long is there too.
            with self._api() as api, contextlib.suppress(NotFound):
                api.remove_network(name)
        return ""

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """The lab's containers and networks, by label, and the id of an image; the user of this one node.

        A list of containers says neither why one is unhealthy, nor its limits, nor who runs in it.
        """
        mark = {"label": [f"labctl.lab={lab}"]}
        with self._api() as api:
            containers = [container_of(one, self.host) for one in api.containers(all=True, filters=mark)]
            networks = api.networks(filters=mark)
            for number, container in enumerate(containers):
                unknown = container.health == "unhealthy" or container.rendered_limits or container.node == node
                if unknown and (inspected := inspect(api, "container", container.id)):
                    containers[number] = completed(container, inspected, user=bool(node))
            found_image = inspect(api, "image", image) if image else None
        tried = [one for one in networks if (one["Labels"] or {}).get("labctl.role") == probe.ROLE]
        found = sorted(containers, key=node_order)
        return ObservedState(
            host=self.host,
            containers=tuple(one for one in found if one.role != probe.ROLE),
            probes=tuple(one for one in found if one.role == probe.ROLE),
            networks=tuple((one["Id"], one["Name"]) for one in networks if one not in tried),
            probe_networks=tuple((one["Id"], one["Name"]) for one in tried),
            image=str(found_image["Id"]) if found_image else None,
        )

    def image(self, image: str) -> dict[str, Any] | None:
        """``docker image inspect``; None if it is not there."""
        return self._inspect("image", image)

    def image_id(self, image: str) -> str | None:
        found = self.image(image)
        return str(found["Id"]) if found else None

    def image_labels(self, image: str) -> dict[str, str]:
        """Labels of a local image."""
        return dict((self.image(image) or {}).get("Config", {}).get("Labels") or {})

    def image_variables(self, image: str) -> dict[str, str]:
        """Environment variables of a local image."""
        return variables_of(self.image(image))

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

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:  # noqa: ARG002
        """Bring up all services of these files as one project; nothing else of that project is touched.

        By the docker program itself, which the terminal's Ctrl-C reaches.
        """
        seconds = CHANGING + EACH * len(files)
        given = (word for file in files for word in ("--file", str(file)))
        words = ("compose", "-p", project, "--env-file", "/dev/null", *given, "up", "--detach", "--pull", "never")
        done = process.run((*within(seconds), *self.docker, *words, "--no-build"), check=False)
        if done.code:
            raise self._failed(f"docker compose -p {project} up", done.code, done.err, seconds)

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:  # noqa: ARG002
        """Remove containers, running ones too, networks or images; HostError for an image that a container uses."""
        what = shlex.join(("docker", kind, "rm", *(ids if kind == "image" else ())))
        with self._acting(what, len(ids)) as actor:
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
        """As the protocol says. By the API: the docker program takes a third of such a call to start."""
        from docker.errors import APIError

        with self._api() as api:
            try:
                made = api.exec_create(container, list(argv), user=user, workdir=workdir)["Id"]
                try:
                    out, err = api.exec_output(made, limit)
                except TimeoutError:
                    raise process.ProcessTimeout(f"{shlex.join(argv)}: not done within {limit:g} s") from None
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
    ) -> int:
        variables = [f"{name}={value}" for name, value in environment]
        command = self._exec(container, user, options=("-i",), variables=variables)
        return process.stream_blocks(
            (*command, *argv), on_lines, timeout=limit, check=False, pulse=PULSE, rest=False
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
        """As the protocol says, also where docker lets go of the program by its own keys for that."""
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
                raise HostError(f"docker let go of {shlex.join(argv)} in {container}; it is ended")
            return code

    def _exec(
        self,
        container: str,
        user: str,
        workdir: str | None = None,
        options: tuple[str, ...] = (),
        variables: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """The command that runs what follows it in a container."""
        where = ("--workdir", workdir) if workdir else ()
        given = (word for one in variables for word in ("--env", one))
        return (*self.docker, "exec", *options, "--user", user, *where, *given, container)

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:
        options = (*(("--follow",) if follow else ()), *((node,) if node else ()))
        words = ("compose", "--ansi", "always" if color else "never", "-p", project, "logs", *options)
        process.stream((*self.docker, *words), lambda line: on_line(line.removeprefix(ERASE)))

    def grants(self, lab: str, image: str, limits: tuple[tuple[str, int], ...]) -> bool:
        options = tuple(word for name, value in limits for word in ("--ulimit", f"{name}={value}:{value}"))
        return not probe.refused(self.docker, lab, image, options, because="rlimit")

    def most_files(self, lab: str, image: str) -> int:
        return probe.most_files(self.docker, lab, image)

    def reserves(self, lab: str, image: str, driver: str, ids: tuple[str, ...]) -> bool:
        options = ("--gpus", probe.reservation(driver, ids))
        return not probe.refused(self.docker, lab, image, options, because="could not select device driver")

    def starts(self, lab: str, image: str, mapping: DeviceMapping) -> str:
        """Why a container with these devices does not start; empty when it does."""
        return probe.refusal(self.docker, lab, image, probe.device_options(mapping))

    def events(self, lab: str) -> Iterator[tuple[str, Cause, str]]:
        # A filter for labels would leave out the events of networks, which have none.
        own = {"container": (lab,), "network": (None,)}
        actions = ["die", "oom", "health_status", "disconnect", "pause", "unpause"]
        with self._api() as api, api.event_lines(type=["container", "network"], event=actions) as lines:
            heard = map(json.loads, lines)
            ours = (one for one in heard if one["Actor"]["Attributes"].get("labctl.lab") in own[one["Type"]])
            yield from watch(ours, partial(self.observe, lab), self._last_check)

    def _last_check(self, container: str) -> str:
        return last_check(self._inspect("container", container))

"""A host that is reached by ssh: what the opening script tells of it, read by the functions that read this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from labctl import accelerators
from labctl.accelerators import detect
from labctl.config import inventory
from labctl.errors import HostError
from labctl.model import Accelerator, Host
from labctl.system import procfs, routing
from labctl.system.files import is_below


def script() -> str:
    """What a host runs at first: ``facts.sh``, which says what it prints, with the paths that accelerators read."""
    modules = accelerators.modules().values()
    lists = {
        "nodes": [f"dev/{pattern}" for one in modules if one.watch for pattern in one.watch.files],
        "attributes": [pattern for one in modules for pattern in one.attributes],
        "texts": [pattern for one in modules for pattern in one.texts],
        "present": [path.lstrip("/") for one in modules for path in one.present],
    }
    settings = "".join(f"accelerator_{name}={shlex.quote(' '.join(words))}\n" for name, words in lists.items())
    return settings + Path(__file__).with_name("facts.sh").read_text(encoding="utf-8")


SCRIPT = script()

_LISTENING = "0A"
"""TCP_LISTEN of linux/include/net/tcp_states.h, as /proc/net/tcp writes it."""


@dataclass(frozen=True, slots=True)
class HostDump:
    """What the script printed, by kind; paths are without their first slash."""

    host: str
    facts: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    """With their modes."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Device files with the numbers of their groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What else is to be known of a host before something is done there. Space in bytes, None where it is unknown."""

    user: str
    uid: int
    gid: int
    home: str
    hostname: str
    distribution: str
    kernel: str
    skew: float
    """Seconds that its clock is ahead of this one's, give or take what the text took on its way."""
    home_free: int | None
    docker: str
    """Where its engine keeps images, as far as /etc/docker/daemon.json says it."""
    docker_free: int | None
    sockets: Mapping[str, bool]
    """The usual sockets of an engine that are there, and whether the person may open them."""
    ports: Mapping[int, str]
    """TCP ports that are listened to, on whatever address, and the user who does."""
    network: routing.Network


def read(text: str, name: str) -> HostDump:
    """What the script printed on the host of this name, among what its shell may have printed as it started.

    Raises HostError where that is no more than a part of it.
    """
    told, lines = HostDump(name), text.split("\n")
    begin = lines.index("labctl survey") + 1 if "labctl survey" in lines else len(lines)
    entries: list[tuple[str, list[str]]] = []
    for line in lines[begin:]:
        number, tab, rest = line.partition("\t")
        if tab and entries and not number.strip(" 0123456789"):
            entries[-1][1].append(rest)
        elif line:
            entries.append((line, []))
    heads = [head for head, _ in entries]
    if "end" not in heads:
        last = f"it ends with `{lines[-1][:80]}`" if text else "it printed nothing"
        raise HostError(
            f"{name} did not tell all of what it was asked by ssh: {last}",
            hint=f"on {name}: uname -a; df -h /tmp",
            node=name,
        )
    with _making_sense(name):
        for head, content in entries[: heads.index("end")]:
            _take(told, head, content)
    return told


@contextmanager
def _making_sense(name: str) -> Iterator[None]:
    """HostError, which names the host, where what it told cannot be used."""
    try:
        yield
    except (ValueError, LookupError, OSError) as error:
        text = f"{name} tells what cannot be used: {type(error).__name__}: {error}"
        raise HostError(text, hint=f"on {name}: id", node=name) from error


def _take(told: HostDump, head: str, content: list[str]) -> None:
    kind, _, name = head.partition(" ")
    value = content[0] if content else ""
    if kind == "fact":
        told.facts[name] = "\n".join(content)
    elif kind == "file":
        told.files[name] = "".join(f"{line}\n" for line in content)
    elif kind == "lines":
        told.files.update(_one_line_each(content))
    elif kind == "link":
        told.links[name] = value
    elif kind == "folder":
        told.folders[name] = int(value or "755", 8)
    elif kind == "nodes":
        pairs = (line.split(" ", 1) for line in content)
        told.nodes.update({path: int(gid) for gid, path in pairs})


def _one_line_each(content: list[str]) -> Iterator[tuple[str, str]]:
    """Files and their first lines, each below its name, as head(1) prints several."""
    path = ""
    for line in content:
        if match := re.fullmatch("==> (.*) <==", line):
            path = match[1]
        elif line and path != "/dev/null":
            yield path, f"{line}\n"


def require_apart(
    targets: Iterable[inventory.InventoryHost], told: Mapping[str, HostDump], engines: Mapping[str, str]
) -> None:
    """ConfigError where two names lead to one machine; of those that answer, ``engines`` are the engines' identities.

    Copies of a machine may have one such identity, and hosts that are containers one kernel: no two have both.
    """
    machines: dict[tuple[str, str], inventory.InventoryHost] = {}
    for target in (one for one in targets if one.name in engines):
        machine = engines[target.name], told[target.name].files.get("proc/sys/kernel/random/boot_id", "")
        if (earlier := machines.setdefault(machine, target)) is not target:
            raise inventory.same(target, earlier)


def lay_out(told: HostDump, directory: Path) -> Path:
    """The host's files below a directory of this machine, which is empty or not there; what they lead to is below too.

    HostError where a path would lead out of it.
    """
    paths = (*told.files, *told.links, *told.links.values(), *told.folders, *told.nodes)
    if astray := next((path for path in paths if not is_below(path)), ""):
        raise HostError(f"{told.host} tells of a path that is none below /: `{astray}`", node=told.host)
    with _making_sense(told.host):
        _lay_out(told, directory)
    return directory


def _lay_out(told: HostDump, directory: Path) -> None:
    parents = (str(PurePosixPath(path).parent) for path in (*told.files, *told.links, *told.nodes))
    for path in {*told.folders, *parents}:
        (directory / path).mkdir(parents=True, exist_ok=True)
    for path, text in {**told.files, **dict.fromkeys(told.nodes, "")}.items():
        (directory / path).write_text(text, encoding="utf-8", errors="surrogateescape")
    for path, target in told.links.items():
        (directory / path).symlink_to(directory / target)
    for path, mode in told.folders.items():
        (directory / path).chmod(mode | 0o700)


def texts_in(told: HostDump, folder: str) -> dict[str, str]:
    """What a folder of the host holds, as far as it was told, by name; ``folder`` is the path that the host knows."""
    path = folder.strip("/")
    for link, target in told.links.items():
        if path.startswith(f"{link}/"):
            path = target + path.removeprefix(link)
    return {PurePosixPath(file).name: text for file, text in told.files.items() if file.rpartition("/")[0] == path}


def host_of(told: HostDump, root: Path, wanted: str) -> tuple[Accelerator, Host]:
    """The accelerator that the setting asks for, and the host, whose files were laid out below this root.

    Raises HostError, which names it, when it has no device of the wanted kind.
    """
    try:
        with _making_sense(told.host):
            accelerator, found = detect.observe(wanted, root, person_of(told))
            return accelerator, replace(found, name=told.host, home=told.facts["home"])
    except HostError as error:
        raise HostError(error.message, hint=error.hint, node=told.host) from error


def person_of(told: HostDump) -> detect.Person:
    """Who one is on the host."""
    uid, _, gid = _person(told)
    return detect.Person(uid, gid, lambda path: told.nodes.get(path.lstrip("/"), 0))


def facts_of(told: HostDump, now: float) -> HostFacts:
    """The rest of what was told; ``now`` is this machine's clock when the last of it came in, in seconds.

    HostError where it makes no sense.
    """
    with _making_sense(told.host):
        return _facts(told, now)


def _facts(told: HostDump, now: float) -> HostFacts:
    uid, user, gid = _person(told)
    release = procfs.parse_os_release(told.files.get("etc/os-release") or told.files.get("usr/lib/os-release", ""))
    clock = re.match(r"\d+(\.\d+)?", told.facts.get("clock", ""))
    return HostFacts(
        user=user,
        uid=uid,
        gid=gid,
        home=told.facts["home"],
        hostname=told.files.get("proc/sys/kernel/hostname", "").strip(),
        distribution=release.get("PRETTY_NAME", ""),
        kernel=told.files.get("proc/sys/kernel/osrelease", "").strip(),
        skew=float(clock[0]) - now if clock else 0.0,
        home_free=_space(told.facts.get("free home", "")),
        docker=told.facts["docker"],
        docker_free=_space(told.facts.get("free docker", "")),
        sockets={name[7:]: may == "rw" for name, may in told.facts.items() if name.startswith("socket ")},
        ports=_ports(told),
        network=network_of(told),
    )


def _person(told: HostDump) -> tuple[int, str, int]:
    """Number and name of the user, number of the group. Source: id(1), whose form POSIX fixes."""
    match = re.match(r"uid=(\d+)(?:\((.*?)\))? gid=(\d+)", told.facts.get("id", ""))
    if not match:
        raise HostError(f"{told.host} does not tell who one is there", hint=f"on {told.host}: id", node=told.host)
    return int(match[1]), match[2] or "", int(match[3])


def _space(text: str) -> int | None:
    """Bytes of ``blocks size``."""
    words = text.split()
    return int(words[0]) * int(words[1]) if len(words) == 2 else None


def _ports(told: HostDump) -> dict[int, str]:
    """Source: Documentation/networking/proc_net_tcp.rst of the kernel."""
    people = (line.split(":") for line in told.files.get("etc/passwd", "").splitlines())
    names = {fields[2]: fields[0] for fields in people if len(fields) > 2}
    sockets = (line.split() for name in ("tcp", "tcp6") for line in told.files.get(f"proc/net/{name}", "").splitlines())
    return {
        int(fields[1].rpartition(":")[2], 16): names.get(fields[7], f"user {fields[7]}")
        for fields in sockets
        if len(fields) > 7 and fields[3] == _LISTENING
    }


def network_of(told: HostDump) -> routing.Network:
    table = routing.parse(told.files.get("proc/net/route", ""))
    addresses = (
        routing.addresses(told.facts["addresses"])
        if "addresses" in told.facts
        else routing.local_addresses(told.files.get("proc/net/fib_trie", ""), table)
    )
    reached, by = routing.reached(told.facts.get("ssh", ""), addresses, told.files.get("proc/net/if_inet6", ""))
    interfaces = (PurePosixPath(path).parent.name for path in told.files if path.startswith("sys/class/net/"))
    return routing.Network(
        interfaces=tuple(interfaces), addresses=addresses, routes=table, reached=reached, reached_by=by
    )

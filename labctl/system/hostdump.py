"""A host's report of itself: output of a script on ``entries.sh``; its files as paths that read like this machine's."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct, field

from labctl.errors import HostError
from labctl.system import routing
from labctl.system.cached import once

_LISTENING = "0A"
"""State TCP_LISTEN of linux/include/net/tcp_states.h in /proc/net/tcp."""
ENTRIES = Path(__file__).with_name("entries.sh").read_text(encoding="utf-8")
"""Shell functions that print entries."""


class HostFacts(Struct, frozen=True, kw_only=True):
    """Facts about a host besides its hardware. Space in bytes, None if unknown."""

    user: str
    uid: int
    home: str
    skew: float
    """Seconds that its clock is ahead of this machine's, up to the time that the text took to arrive."""
    home_free: int | None
    ports: Mapping[int, str]
    """TCP ports in use on any address, and the user of each."""
    listening: Mapping[int, tuple[str, ...]]
    """The addresses on which each of these ports is in use."""


class HostDump(Struct, frozen=True, dict=True):
    """Output of the script by kind; paths are without their leading slash."""

    host: str
    facts: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    """Links and the real paths that they resolve to."""
    folders: dict[str, int] = field(default_factory=dict)
    """Folders and their modes."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Device files and the ids of their groups."""

    @property
    def root(self) -> DumpPath:
        return DumpPath(self, "")

    @property
    def home(self) -> str:
        return self.facts["home"]

    @property
    def user(self) -> tuple[int, str, int]:
        """The user's id, name and group id on the host, from the output of id(1)."""
        uid, name, gid = re.findall(r"^uid=(\d+)(?:\((.*?)\))? gid=(\d+)", self.facts["id"])[0]
        return int(uid), name, int(gid)

    @once
    def children(self) -> dict[str, set[str]]:
        """Names in each directory of the dump, by the directory's path; the root is ""."""
        names: dict[str, set[str]] = {}
        for path in (*self.files, *self.links, *self.links.values(), *self.folders, *self.nodes):
            rest = path
            while rest:
                rest, _, name = rest.rpartition("/")
                names.setdefault(rest, set()).add(name)
        return names

    @property
    def network(self) -> routing.Network:
        """The host's interfaces, addresses and routes."""
        table = routing.parse(self.files.get("proc/net/route", ""))
        addresses = (
            routing.addresses(self.facts["addresses"])
            if "addresses" in self.facts
            else routing.local_addresses(self.files.get("proc/net/fib_trie", ""), table)
        )
        reached, by = routing.reached(self.facts.get("ssh", ""), addresses, self.files.get("proc/net/if_inet6", ""))
        interfaces = tuple(path.split("/")[3] for path in self.files if path.startswith("sys/class/net/"))
        return routing.Network(interfaces=interfaces, addresses=addresses, routes=table, reached=reached, reached_by=by)

    def facts_at(self, now: float) -> HostFacts:
        """Return user, clock skew, free space and ports; ``now``: time of the text. HostError if it is invalid."""
        with valid(self.host):
            uid, user, _ = self.user
            clock = re.match(r"\d+(\.\d+)?", self.facts.get("clock", ""))
            free = self.facts.get("free home", "").split()
            listeners = tuple(self._listeners())
            listening: dict[int, tuple[str, ...]] = {}
            for address, port, _ in listeners:
                listening[port] = (*listening.get(port, ()), address)
            return HostFacts(
                user=user,
                uid=uid,
                home=self.home,
                skew=float(clock[0]) - now if clock else 0.0,
                # The number of blocks and their size.
                home_free=int(free[0]) * int(free[1]) if len(free) == 2 else None,
                ports={port: name for _, port, name in listeners},
                listening=listening,
            )

    def _listeners(self) -> Iterator[tuple[str, int, str]]:
        """Yield address, TCP port and user of each socket on which the host listens.

        Source: Documentation/networking/proc_net_tcp.rst of the kernel.
        """
        accounts = (line.split(":") for line in self.files.get("etc/passwd", "").splitlines())
        names = {fields[2]: fields[0] for fields in accounts if len(fields) > 2}
        texts = (self.files.get(f"proc/net/{name}", "") for name in ("tcp", "tcp6"))
        sockets = (line.split() for text in texts for line in text.splitlines())
        for fields in sockets:
            if len(fields) > 7 and fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                yield _address(address), int(port, 16), names.get(fields[7], f"user {fields[7]}")


def _address(text: str) -> str:
    """Return the address that the kernel prints as little-endian words; an IPv4 address within IPv6 as IPv4."""
    words = (bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


class DumpPath(Struct, frozen=True):
    """A path on a host that reads the host's dump; implements ``system.hostpath.HostPath``."""

    dump: HostDump
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return f"/{self.path}"

    def __truediv__(self, path: str, /) -> DumpPath:
        return DumpPath(self.dump, f"{self.path}/{path}".strip("/"))

    def __lt__(self, other: DumpPath, /) -> bool:
        return self.path < other.path

    def glob(self, pattern: str, /) -> Iterator[DumpPath]:
        """Yield the existing paths that match the pattern, as ``pathlib.Path.glob`` without ``**``."""
        first, _, rest = pattern.partition("/")
        for name in self.dump.children.get(self.resolve().path, ()):
            if fnmatchcase(name, first):
                yield from (self / name).glob(rest) if rest else (self / name,)

    def resolve(self) -> DumpPath:
        """Return the path with each link that the dump lists replaced by its target."""
        real = ""
        for name in self.path.split("/"):
            step = f"{real}/{name}".lstrip("/")
            real = self.dump.links.get(step, step)
        return DumpPath(self.dump, real)

    def is_symlink(self) -> bool:
        """Return True if the dump lists the path, in its resolved parent, as a link."""
        parent, _, name = self.path.rpartition("/")
        return f"{DumpPath(self.dump, parent).resolve().path}/{name}".lstrip("/") in self.dump.links

    def is_file(self) -> bool:
        return self.resolve().path in self.dump.files

    def is_dir(self) -> bool:
        real = self.resolve().path
        return real in self.dump.folders or real in self.dump.children

    def exists(self) -> bool:
        return self.is_file() or self.is_dir() or self.resolve().path in self.dump.nodes

    def stat(self) -> os.stat_result:
        """Return a status with mode and group, all else made up. FileNotFoundError without the path."""
        real = self.resolve().path
        if not self.exists():
            raise FileNotFoundError(str(self))
        mode = stat.S_IFDIR | self.dump.folders.get(real, 0o755) if self.is_dir() else stat.S_IFREG | 0o644
        return os.stat_result((mode, 0, 0, 1, 0, self.dump.nodes.get(real, 0), 0, 0, 0, 0))

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:  # noqa: ARG002 - as Path's
        """Return the text of a file; FileNotFoundError if the dump does not have it."""
        try:
            return self.dump.files[self.resolve().path]
        except KeyError:
            raise FileNotFoundError(str(self)) from None


def read(text: str, name: str) -> HostDump:
    """Parse a host's output of the script, without what its login shell printed before. HostError if incomplete."""
    dump, lines = HostDump(name), text.split("\n")
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
        last = f"the text ends with `{lines[-1][:80]}`" if text else "no output"
        hint = f"on {name}: uname -a; df -h /tmp"
        raise HostError(f"facts from {name} are incomplete: {last}", hint=hint, node=name)
    with valid(name):
        for head, content in entries[: heads.index("end")]:
            _add(dump, head, content)
    return dump


@contextmanager
def valid(name: str) -> Iterator[None]:
    """Raise a ValueError, LookupError or OSError of the block again as a HostError on this host's facts."""
    try:
        yield
    except (ValueError, LookupError, OSError) as error:
        text = f"facts from {name} are invalid: {type(error).__name__}: {error}"
        raise HostError(text, hint=f"on {name}: id", node=name) from error


def _add(dump: HostDump, head: str, content: list[str]) -> None:
    """Add an entry of the output to the dump: a fact, file, first lines, link, folder or device nodes."""
    kind, _, name = head.partition(" ")
    value = content[0] if content else ""
    if kind == "fact":
        dump.facts[name] = "\n".join(content)
    elif kind == "file":
        dump.files[name] = "".join(f"{line}\n" for line in content)
    elif kind == "lines":
        # The format of head(1) for several files.
        first_lines = re.findall(r"^==> (.*) <==\n(.+)$", "\n".join(content), re.MULTILINE)
        dump.files.update((path, f"{line}\n") for path, line in first_lines)
    elif kind == "link":
        dump.links[name] = value
    elif kind == "folder":
        dump.folders[name] = int(value or "755", 8)
    elif kind == "nodes":
        for line in content:
            gid, path = line.split(" ", 1)
            dump.nodes[path] = int(gid)

"""The inventory: which machines a lab runs on and how ssh reaches them. The first is the master.

Forms: a host per line with ``key=value`` words (a hostfile and a plain list are such), ``MASTER_IP=`` and
``MEMBER_IPS=`` as in an env file, and an Ansible inventory in YAML. In each, ``user@host:port`` means what it means to
ssh. Values become arguments of ssh: all are data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from ipaddress import IPv6Address, ip_address
from itertools import starmap
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.config import dotenv, hostfile, yaml_reader
from labctl.config.hostfile import host_name, quote
from labctl.config.yaml_reader import Value
from labctl.errors import ConfigError, did_you_mean
from labctl.model import HERE
from labctl.system import process

Given = dict[str, tuple[str, str]]
"""Fields of a host, by labctl's name for each: the text and its ``file:line``."""
Named = tuple[str, Given, str]
"""A host's name, its fields, and its ``file:line``."""

VARIABLES = {
    "ansible_host": "address",
    "ansible_user": "user",
    "ansible_port": "port",
    "ansible_ssh_private_key_file": "key",
    "labctl_slots": "slots",
    "labctl_iface": "iface",
    "labctl_docker": "docker",
}
_KNOWN = f"known: {', '.join(VARIABLES)}; what else ssh needs belongs in ~/.ssh/config"
# These variables change how a host is reached: ignoring them could reach another host.
_REFUSED = "ansible_(connection|password|private_key_file|ssh_.*)|labctl_.*"
_INSTALL = "install ansible-core, whose ansible-inventory labctl then asks, or write one line per host"
_ALL = "all"


class NeedsAnsible(ConfigError):
    """Raised for an inventory that only Ansible can resolve."""


def resolved(path: Path, shown: str, text: str) -> Iterator[Named]:
    """Yield name, fields and place of hosts by `ansible-inventory`; none if not installed, ConfigError if it fails.

    A host's line is the first line of ``text`` that has its name.
    """
    # Ansible would execute an executable inventory, load the plugin that a YAML file names, and what an ansible.cfg of
    # the current directory names.
    only = {"ANSIBLE_INVENTORY_ENABLED": "yaml,ini", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"}
    argv = ("ansible-inventory", "--list", "-i", str(path.absolute()))
    # Seconds; it takes about one.
    done = process.run(argv, check=False, timeout=60, env=only, cwd="/")
    if done.code == process.NOT_FOUND:
        return
    if done.code:
        raise ConfigError(
            f"{shown}:1: ansible-inventory cannot read it: {' '.join(done.err.split())[:300]}", hint=_HINT
        )
    groups = json.loads(done.out)
    lines = _first_lines(text)
    for name in dict.fromkeys(_members(groups, _ALL)):
        where = f"{shown}:{lines.get(name, 1)}"
        variables = groups["_meta"]["hostvars"].get(name, {})
        yield name, _fields((key, str(value), where) for key, value in variables.items()), where


def _first_lines(text: str) -> dict[str, int]:
    """Map each word of a text, without comments, to the first line that has it."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for word in re.findall(r"[^\s\"'{},:=]+", line.partition("#")[0]):
            lines.setdefault(word, number)
    return lines


def _members(groups: dict[str, Any], name: str) -> Iterator[str]:
    """Yield the hosts of a group and, recursively, of its child groups; duplicates are possible."""
    group = groups.get(name, {})
    yield from group.get("hosts", ())
    for child in group.get("children", ()):
        yield from _members(groups, child)


def _fields(variables: Iterable[tuple[str, str, str]]) -> Given:
    """Return host fields that Ansible variables set; skip others. ConfigError for templates and refused variables.

    A variable is a name, its text and its line. Ansible fills templates in when it runs a play, not in its inventory.
    """
    fields: Given = {}
    for name, text, where in variables:
        if name in VARIABLES and "{{" in text:
            raise ConfigError(f"{where}: `{name}` is a template, {quote(text)}", hint="write the value itself")
        if name in VARIABLES:
            fields[VARIABLES[name]] = text, where
        elif re.fullmatch(_REFUSED, name):
            raise ConfigError(f"{where}: `{name}` is not understood here", hint=_KNOWN)
    return fields


def hosts(path: Path, shown: str) -> Iterator[Named]:
    """Return a YAML inventory's hosts, in order. ConfigError if invalid; NeedsAnsible if only that can resolve it.

    A host's own variables override its group's, and those the variables of the groups around. NeedsAnsible for all that
    takes Ansible's precedence: groups and hosts in several places with different variables.
    """
    for name in ("group_vars", "host_vars"):
        if (path.parent / name).is_dir():
            raise NeedsAnsible(f"{shown}:1: {name} beside it holds more variables of its hosts", hint=_INSTALL)
    root, read = yaml_reader.compose(path, shown, hint=_HINT), _YamlInventory()
    if root.node.id == "mapping":
        root.node.value = [(name, node) for name, node in root.node.value if not _is_nothing(node)]
    for name, value in root.entries().items():
        if name == "hosts":
            # The operator that validates clusters writes hosts without a group around them.
            read.take_hosts(value, {})
        else:
            read.take_group(name, value, {})
    return ((name, read.of_all | fields, where) for name, (fields, where) in read.hosts.items())


class _YamlInventory:
    """The hosts of an Ansible inventory, with their fields and lines; ``of_all`` are the fields of every host."""

    def __init__(self) -> None:
        self.hosts: dict[str, tuple[Given, str]] = {}
        self.of_all: Given = {}
        self._groups: set[str] = set()

    def take_group(self, name: str, value: Value, around: Given) -> None:
        """Add a group's hosts and children with the fields of groups around it. NeedsAnsible if given twice."""
        sections = dict(_entries(value, ("hosts", "vars", "children")))
        if not sections and not around:
            return
        if name in self._groups:
            raise NeedsAnsible(f"{value.path}:{value.line}: group `{name}` is described in two places", hint=_INSTALL)
        self._groups.add(name)
        fields = _variables(sections["vars"]) if "vars" in sections else {}
        if name == _ALL:
            self.of_all, fields = fields, {}
        if "hosts" in sections:
            self.take_hosts(sections["hosts"], around | fields)
        if "children" in sections:
            for child, body in _entries(sections["children"]):
                self.take_group(child, body, around | fields)

    def take_hosts(self, value: Value, around: Given) -> None:
        """Add hosts with their own and the ``around`` fields. NeedsAnsible for a range or differing variables."""
        for name, content in _entries(value):
            where = f"{content.path}:{content.line}"
            if "[" in name:
                raise NeedsAnsible(f"{where}: bad host name `{name}`, a range", hint=_INSTALL)
            fields = around | _variables(content)
            known, first = self.hosts.get(name, ({}, where))
            if any(known[key][0] != fields[key][0] for key in known.keys() & fields.keys()):
                raise NeedsAnsible(f"{where}: `{name}` has other variables than on {first}", hint=_INSTALL)
            self.hosts[name] = known | fields, first


def _variables(value: Value) -> Given:
    """Return the host fields that variables set. NeedsAnsible for ``<<`` and priorities; ConfigError if refused."""
    entries = list(_entries(value))
    for name, content in entries:
        if name in ("<<", "ansible_group_priority"):
            raise NeedsAnsible(f"{content.path}:{content.line}: `{name}` is not understood here", hint=_INSTALL)
    relevant = [(name, content) for name, content in entries if name in VARIABLES or re.fullmatch(_REFUSED, name)]
    return _fields((name, content.text(), f"{content.path}:{content.line}") for name, content in relevant)


def _entries(value: Value, names: Collection[str] | None = None) -> Iterable[tuple[str, Value]]:
    """Return the entries of a mapping, restricted to ``names``; none if it is null."""
    return () if _is_nothing(value.node) else value.entries(names).items()


def _is_nothing(node: Any) -> bool:
    """Tell if a YAML node is null."""
    return bool(node.id == "scalar" and node.tag.endswith(":null"))


class InventoryHost(Struct, frozen=True, kw_only=True):
    """A host of the inventory; an empty or zero field is left to the user's ssh config or to the host."""

    name: str
    address: str = ""
    """Connect ssh to this instead of the name: an IP address, a DNS name or an alias of the ssh config."""
    user: str = ""
    port: int = 0
    key: str = ""
    """Path of a private key on this machine."""
    slots: int = 0
    iface: str = ""
    """Network interface for collectives."""
    docker: str = "/var/run/docker.sock"
    """Path of the engine's socket on the host."""
    where: str = ""
    """``file:line``."""


def read(path: Path, shown: str = "") -> tuple[InventoryHost, ...]:
    """Read the hosts of an inventory in any form; ask ansible-inventory if needed. ConfigError if none can be read.

    A relative ``key`` is a path relative to the file.
    """
    shown = shown or str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        hint = f"LAB_HOSTS names a file; in it, {_HINT}"
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown}:{error.object.count(10, 0, error.start) + 1}: is not UTF-8", hint="save it as UTF-8"
        ) from error
    first = _first(text)
    if text.startswith("#!"):
        hint = f"ansible-inventory -i {shown} --list --yaml > hosts.yaml, and LAB_HOSTS=hosts.yaml in .env"
        raise ConfigError(f"{shown}:1: is a program, and labctl does not execute inventories", hint=hint)
    try:
        if path.suffix in (".yaml", ".yml") or first == "---" or first.endswith(":"):
            listed = _checked(hosts(path, shown), shown)
        else:
            listed = parse(text, shown)
    except NeedsAnsible:
        if not (named := list(resolved(path, shown, text))):
            raise
        listed = _checked(named, shown)
    folder = path.absolute().parent
    return tuple(_with_absolute_key(host, folder) for host in listed)


def _with_absolute_key(host: InventoryHost, folder: Path) -> InventoryHost:
    """Return a host with its key's path absolute, relative to ``folder`` and ``~`` expanded."""
    return replace(host, key=str(folder / Path(host.key).expanduser())) if host.key else host


DRAINED = "drained.txt"
"""File of the machines to leave out, in the lab directory: a name per line, with the reason after ``#``."""


def drained(directory: Path) -> dict[str, str]:
    """Map drained machines, in lower case, to the reasons of drained.txt; empty without the file."""
    path = directory / DRAINED
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines() if path.is_file() else []
    named = (line.partition("#") for line in lines)
    return {name.split()[0].lower(): why.strip() for name, _, why in named if name.split()}


def drained_reasons(directory: Path) -> dict[str, str]:
    """Map drained machines, in lower case, to the same text, that drained.txt lists them."""
    return dict.fromkeys(drained(directory), f"{DRAINED} lists it")


def in_use(
    directory: Path, listed: tuple[InventoryHost, ...]
) -> tuple[tuple[InventoryHost, ...], tuple[tuple[str, str], ...]]:
    """Split hosts into those that are not in drained.txt, and pairs of name and reason for those that are."""
    out = drained(directory)
    why = {host.name: out.get(host.name.lower(), out.get(host.address.lower())) for host in listed}
    left_out = tuple((name, reason or DRAINED) for name, reason in why.items() if reason is not None)
    return tuple(host for host in listed if why[host.name] is None), left_out


def parse(text: str, shown: str) -> tuple[InventoryHost, ...]:
    """Parse the hosts of an inventory that is not YAML, in order. ConfigError if invalid."""
    return _checked(_seed(text, shown) if _ASSIGNMENT.match(_first(text)) else _lines(text, shown), shown)


# The line of an env file: no host's name holds a `=`.
_ASSIGNMENT = re.compile(r"(?:export[ \t]+)?[A-Za-z_][A-Za-z0-9_]*=")
_HINT = "write one line per host, such as `node-0 address=10.0.0.5 user=lab slots=8`"
_ONCE = "name each machine once; `slots=` says how much of it is used"


def _first(text: str) -> str:
    """Return the first line with content, stripped and cut at a `#`; empty if none."""
    match = re.search(r"^[ \t]*([^#\s][^#\n]*)", text, re.MULTILINE)
    return match[1].rstrip() if match else ""


def _checked(listed: Iterable[Named], shown: str) -> tuple[InventoryHost, ...]:
    """Build hosts from names and fields. ConfigError if there are none, or two have one name or address and port."""
    names: dict[str, InventoryHost] = {}
    machines: dict[tuple[str, int], InventoryHost] = {}
    for target in starmap(_target, listed):
        # Host names are the same in either case, to DNS and to ssh.
        if (earlier := names.setdefault(target.name.lower(), target)) is not target:
            raise ConfigError(
                f"{target.where}: duplicate host {quote(target.name)}, first named {_at(earlier)}", hint=_ONCE
            )
        machine = ((target.address or target.name).lower(), target.port)
        if (earlier := machines.setdefault(machine, target)) is not target:
            raise same(target, earlier)
    if not names:
        raise ConfigError(f"{shown}:1: names no host", hint=_HINT)
    return tuple(names.values())


def same(target: InventoryHost, earlier: InventoryHost) -> ConfigError:
    """Return the ConfigError for two names of the same machine."""
    text = f"{target.where}: {quote(target.name)} is the same machine as {quote(earlier.name)} {_at(earlier)}"
    return ConfigError(text, hint=_ONCE)


def _at(target: InventoryHost) -> str:
    """Render the line of a host, as ``on line 3``."""
    return f"on line {target.where.rpartition(':')[2]}"


# --- a host per line ---


def _lines(text: str, shown: str) -> Iterator[Named]:
    """Yield name, fields and place per line of a plain inventory. NeedsAnsible if it has ``[groups]``."""
    if group := re.search(r"^[ \t]*(\[[^\n]+\])[ \t\r]*$", text, re.MULTILINE):
        raise NeedsAnsible(
            f"{shown}:{text.count(chr(10), 0, group.start()) + 1}: {quote(group[1])} begins a group, as in an Ansible "
            "inventory of the INI form",
            hint=_INSTALL,
        )
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{shown}:{number}"
        if fields := _split(line, where):
            yield fields[0], _assigned(fields, where), where


def _split(line: str, where: str) -> list[str]:
    """Split a line at blanks, without its comment; empty for a blank line. ConfigError on control characters."""
    if "#" in line:
        # A path may contain `#`: a comment begins with the line or after a blank.
        line = re.split(r"(?:^|[ \t])#", line, maxsplit=1)[0]
    if not line.isprintable() and not (line := line.removesuffix("\r").replace("\t", " ")).isprintable():
        raise ConfigError(f"{where}: contains a control character: {quote(line)}", hint="retype the line")
    return line.split()


def _assigned(line: list[str], where: str) -> Given:
    """Return the ``key=value`` words after the name as fields. ConfigError for other words and repeated keys."""
    fields: Given = {}
    for word in line[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{where}: expected `key=value`, found {quote(word)}", hint=_meant(word, line[0]))
        if key in fields:
            raise ConfigError(f"{where}: {quote(key)} is given twice", hint="leave one of them out")
        fields[key] = value, where
    return fields


def _meant(word: str, name: str) -> str:
    """Return a hint for a word that is not ``key=value``: an address, a swapped name, or the known keys."""
    if _is_ip(word) or "@" in word or ":" in word:
        return f"write `address={word}`"
    if _is_ip(name) and word not in _FIELDS:
        return f"the name comes first: `{word} address={name}`"
    return f"write no blank around `=`; known: {', '.join(_FIELDS)}"


def _is_ip(word: str) -> bool:
    """Tell if a word is an IP address."""
    try:
        return bool(ip_address(word))
    except ValueError:
        return False


def _target(name: str, fields: Given, where: str) -> InventoryHost:
    """Build a host from its name and fields, checked. ConfigError for unknown fields and invalid values."""
    if "@" in name or ":" in name:
        name, fields = _apart(name, fields, where)
    if name == HERE:
        raise ConfigError(f"{where}: {quote(name)} is reserved for this machine", hint="call the host something else")
    address, its_line = fields.get("address", ("", ""))
    if "@" in address or ":" in address:
        address, fields = _apart(address, fields, its_line)
        fields["address"] = address, its_line
    values: dict[str, Any] = {}
    for key, (text, its_line) in fields.items():
        if not (check := _FIELDS.get(key)):
            hint = f"write `{VARIABLES[key]}=`" if key in VARIABLES else did_you_mean(key, _FIELDS)
            raise ConfigError(f"{its_line}: unknown word {quote(key)}", hint=hint)
        values[key] = check(text, its_line)
    if ":" in name and _is_ip(name):
        hint = f"write `node-0 address={name}`, with a name of your own"
        raise ConfigError(f"{where}: the host at {quote(name)} has no name", hint=hint)
    return InventoryHost(name=host_name(name, where), where=where, **values)


def _apart(word: str, given: Given, where: str) -> tuple[str, Given]:
    """Split ``user@host:port`` into the host and the fields with user and port added. ConfigError if given twice."""
    user, at, rest = word.rpartition("@")
    # More than one colon makes it an IPv6 address, unless that is in brackets.
    with_port = re.fullmatch(r"(\[[^][]*\]|[^][:]*):([^:]*)", rest)
    fields: Given = {}
    if at:
        fields["user"] = user, where
    if with_port:
        fields["port"] = with_port[2], where
    if twice := next((key for key in fields if key in given), ""):
        raise ConfigError(
            f"{where}: {quote(word)} gives a {twice}, and so does `{twice}=`", hint="leave one of them out"
        )
    return with_port[1].strip("[]") if with_port else rest, given | fields


# --- values ---


def _matching(key: str, pattern: str, form: str) -> Callable[[str, str], str]:
    """Return a validator that returns a text matching a pattern, else raises ConfigError that it must be ``form``."""
    compiled = re.compile(pattern)

    def check(text: str, where: str) -> str:
        """Return the text if it matches; raise ConfigError otherwise."""
        if not compiled.fullmatch(text) or not text.isprintable():
            raise ConfigError(f"{where}: {key} must be {form}, not {quote(text)}")
        return text

    return check


def _address(text: str, where: str) -> str:
    """Return an IP address or host name if it is valid. ConfigError otherwise."""
    if ":" not in text:
        return host_name(text, where)
    try:
        IPv6Address(text)
    except ValueError as error:
        hint = "write an IPv6 address with a port as `[fe80::1]:22`" if "[" in text or "]" in text else ""
        raise ConfigError(f"{where}: address must be an IP address or a name, not {quote(text)}", hint=hint) from error
    return _ZONED(text, where)


def _port(text: str, where: str) -> int:
    """Parse a port from 1 to 65535. ConfigError for anything else."""
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise ConfigError(f"{where}: port must be between 1 and 65535, not {quote(text)}")
    return int(text)


_ZONED = _matching("address", r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?", "an IP address or a name")
# Socket addresses have at most 107 bytes; ssh expands `%` and `${` in paths, and splits at a colon.
_FIELDS: dict[str, Callable[[str, str], Any]] = {
    "address": _address,
    "user": _matching("user", r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,254}", "a user's name"),
    "port": _port,
    "key": _matching("key", r"(?:~/)?[^-~\s%$][^\s%$]*", "a path without blanks, `%` and `$`"),
    "slots": hostfile.slot_count,
    "iface": _matching("iface", r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", "the name of a network interface"),
    "docker": _matching("docker", r"/[A-Za-z0-9_./@+-]{1,106}", "the absolute path of a socket"),
}


# --- MASTER_IP and MEMBER_IPS ---


_MASTER, _MEMBERS = HOST_WORDS = ("MASTER_IP", "MEMBER_IPS")
OPERATOR_WORDS = ("TEST_CONFIGURATION", "BUILD_VERSION", "SKIP_NETWORK_SETUP", "L3_ENABLED")
"""Other keys of a MASTER_IP file; they configure the tests, not the hosts."""


def operator_words(path: Path, shown: str) -> dict[str, str]:
    """Return the operator's settings in a file of MASTER_IP; empty for others. ConfigError if malformed."""
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    if not _ASSIGNMENT.match(_first(text)):
        return {}
    return {entry.key: entry.value for entry in dotenv.parse(text, shown) if entry.key in OPERATOR_WORDS}


def _seed(text: str, shown: str) -> Iterator[Named]:
    """Yield hosts of a MASTER_IP file as node-0, node-1... ConfigError for unknown keys or a missing MASTER_IP."""
    entries = {entry.key: entry for entry in dotenv.parse(text, shown)}
    for entry in entries.values():
        if entry.key not in (_MASTER, _MEMBERS, *OPERATOR_WORDS):
            hint = did_you_mean(entry.key, (_MASTER, _MEMBERS))
            raise ConfigError(f"{shown}:{entry.line}: unknown key {quote(entry.key)}", hint=hint)
    if _MASTER not in entries:
        raise ConfigError(f"{shown}:1: {_MASTER} is missing", hint=f"write {_MASTER}=10.0.0.5")
    master, members = entries[_MASTER], entries.get(_MEMBERS)
    addresses = [(master.value, master.line)]
    if members and members.value.strip():
        addresses += [(address.strip(), members.line) for address in members.value.split(",")]
    for number, (address, line) in enumerate(addresses):
        where = f"{shown}:{line}"
        yield f"node-{number}", {"address": (address, where)}, where

"""An Ansible inventory: its hosts, and what its variables say of how they are reached.

Plain YAML is read here, with a line for each error; what it takes Ansible to resolve is left to `ansible-inventory`
where that is installed, and refused elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labctl import shell
from labctl.errors import ConfigError
from labctl.yamlfile import Value

Given = dict[str, tuple[str, str]]
"""What is said of a host by our own words for it: its text and where it stands."""

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
# They change how a host is reached: to pass over them could be to reach another one.
_REFUSED = re.compile("ansible_(connection|password|private_key_file|ssh_.*)|labctl_.*")
_INSTALL = "install ansible-core: labctl then asks its ansible-inventory"
_ALL = "all"
_SECTIONS = ("hosts", "vars", "children")


class NeedsAnsible(ConfigError):
    """An inventory has what only Ansible resolves."""


def require_alone(path: Path, shown: str) -> None:
    """NeedsAnsible where variables lie in files beside an inventory."""
    for name in ("group_vars", "host_vars"):
        if (path.parent / name).is_dir():
            raise NeedsAnsible(f"{shown}:1: {name} beside it holds more variables of its hosts", hint=_INSTALL)


def resolved(path: Path, shown: str, text: str) -> Iterator[tuple[str, str, Given]]:
    """As ``hosts``, by `ansible-inventory`; none where that is not installed. A line is the first that has the name."""
    # Neither an executable file nor a plugin's configuration is run as one.
    only = {"ANSIBLE_INVENTORY_ENABLED": "yaml,ini", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"}
    # Seconds; it takes about one.
    done = shell.run(("ansible-inventory", "--list", "-i", str(path)), check=False, timeout=60, env=only)
    if done.code == shell.NOT_FOUND:
        return
    if done.code:
        raise ConfigError(f"{shown}:1: ansible-inventory cannot read it: {' '.join(done.err.split())[:300]}")
    groups = json.loads(done.out)
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for word in re.findall(r"[^\s\"'{},:=]+", line.partition("#")[0]):
            lines.setdefault(word, number)
    for name in dict.fromkeys(_members(groups, _ALL)):
        where = f"{shown}:{lines.get(name, 1)}"
        given = groups["_meta"]["hostvars"].get(name, {})
        if refused := next(filter(_REFUSED.fullmatch, given.keys() - VARIABLES), ""):
            raise ConfigError(f"{where}: `{refused}` is not understood here", hint=_KNOWN)
        yield name, where, {VARIABLES[key]: (str(value), where) for key, value in given.items() if key in VARIABLES}


def _members(groups: dict[str, Any], name: str) -> Iterator[str]:
    group = groups.get(name, {})
    yield from group.get("hosts", ())
    for child in group.get("children", ()):
        yield from _members(groups, child)


def hosts(root: Value) -> Iterator[tuple[str, str, Given]]:
    """Names in the order of the file, where they stand and what is said of them. ConfigError, ``path:line: reason``.

    As Ansible has it: what a host says itself goes before its groups, a group before those that hold it, and ``all``
    holds every host.
    """
    read = _Inventory()
    for name, value in _groups(root):
        if name == "hosts":
            # Without a group around them: so writes the operator that validates clusters.
            read.take_hosts(value, _ALL)
        else:
            read.take_group(name, value, ())
    for name, host in read.hosts.items():
        said: Given = {}
        for _, group in sorted((read.depth(group, host.where), group) for group in read.holding(host)):
            said |= read.groups[group].said
        yield name, host.where, said | host.said


def _groups(root: Value) -> Iterable[tuple[str, Value]]:
    if root.node.id == "mapping":
        root.node.value = [(name, node) for name, node in root.node.value if not _is_nothing(node)]
    return root.entries().items()


@dataclass
class _Group:
    said: Given = field(default_factory=dict)
    parents: set[str] = field(default_factory=set)


@dataclass
class _Host:
    where: str
    said: Given = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)


class _Inventory:
    """Groups and hosts by name: either may be spoken of at several places."""

    def __init__(self) -> None:
        self.groups: dict[str, _Group] = {_ALL: _Group()}
        self.hosts: dict[str, _Host] = {}
        self._depths: dict[str, int] = {_ALL: 0}

    def take_group(self, name: str, value: Value, above: tuple[str, ...]) -> None:
        if name in above:
            raise value.error(f"group `{name}` holds itself", hint="take it out of the `children` below it")
        group = self.groups.setdefault(name, _Group())
        if name != _ALL:
            group.parents.add(above[-1] if above else _ALL)
        for section, content in _entries(value, _SECTIONS):
            if section == "hosts":
                self.take_hosts(content, name)
            elif section == "vars":
                group.said |= _variables(content)
            else:
                for child, body in _entries(content):
                    self.take_group(child, body, (*above, name))

    def take_hosts(self, value: Value, group: str) -> None:
        for name, content in _entries(value):
            if "[" in name:
                raise NeedsAnsible(f"{content.path}:{content.line}: bad host name `{name}`, a range", hint=_INSTALL)
            host = self.hosts.setdefault(name, _Host(f"{content.path}:{content.line}"))
            host.groups.add(group)
            host.said |= _variables(content)

    def holding(self, host: _Host) -> list[str]:
        """The groups that hold the host, and those that hold them."""
        found, new = {_ALL}, host.groups
        while new := new - found:
            found |= new
            new = {parent for name in new for parent in self.groups[name].parents}
        return sorted(found)

    def depth(self, name: str, where: str, below: tuple[str, ...] = ()) -> int:
        """How many groups stand above this one, by the longest way."""
        if name in below:
            reason = f"group `{name}` of this host holds itself"
            raise ConfigError(f"{where}: {reason}", hint=f"of {', '.join(below)}, take one out of another's `children`")
        if name not in self._depths:
            parents = self.groups[name].parents
            self._depths[name] = 1 + max(self.depth(parent, where, (*below, name)) for parent in parents)
        return self._depths[name]


def _variables(value: Value) -> Given:
    said: Given = {}
    for name, content in _entries(value):
        where = f"{content.path}:{content.line}"
        if name in ("<<", "ansible_group_priority") or (name in VARIABLES and "{{" in str(content.node.value)):
            raise NeedsAnsible(f"{where}: `{name}` is not understood here", hint=_INSTALL)
        if name in VARIABLES:
            said[VARIABLES[name]] = content.text(), where
        elif _REFUSED.fullmatch(name):
            raise content.error(f"`{name}` is not understood here", hint=_KNOWN)
    return said


def _entries(value: Value, known: Collection[str] | None = None) -> Iterable[tuple[str, Value]]:
    return () if _is_nothing(value.node) else value.entries(known).items()


def _is_nothing(node: Any) -> bool:
    return bool(node.id == "scalar" and node.tag.endswith(":null"))

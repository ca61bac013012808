"""An Ansible inventory in YAML: its hosts, and what its variables say of how they are reached."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
# They change how a host is reached: to pass over them could be to reach another one.
_REFUSED = re.compile("ansible_(connection|password|private_key_file|ssh_.*)|labctl_.*")
_ALL = "all"
_SECTIONS = ("hosts", "vars", "children")


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
        if name in VARIABLES:
            said[VARIABLES[name]] = content.text(), f"{content.path}:{content.line}"
        elif _REFUSED.fullmatch(name):
            raise content.error(
                f"`{name}` is not understood here",
                hint=f"known: {', '.join(VARIABLES)}; what else ssh needs belongs in ~/.ssh/config",
            )
    return said


def _entries(value: Value, known: Iterable[str] | None = None) -> Iterable[tuple[str, Value]]:
    return () if _is_nothing(value.node) else value.entries(known).items()


def _is_nothing(node: Any) -> bool:
    return bool(node.id == "scalar" and node.tag.endswith(":null"))

"""Readings of a node, checks, and their answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, field

from labctl.system.hostdump import HostDump

Level = Literal["ok", "remark", "bad", "unknown"]
Value = float | int | str
LEVELS: tuple[Level, ...] = ("ok", "unknown", "remark", "bad")
"""Levels, the worst last."""


class Reading(Struct, frozen=True, kw_only=True):
    """A value that a node reports of itself, or of an item such as a card, a port or a folder.

    ``kind``: a ``fact`` stays as it is (a model, a size, a version), a ``counter`` grows since the start of the node
    or the driver, a ``state`` may change at any time.
    """

    name: str
    """Quantity, such as ``PCIe width``: a check names it."""
    value: Value | None
    """None if it cannot be read; ``why`` tells why."""
    source: str
    """File or command that it was read from, as a person would type it."""
    item: str = ""
    """Card, port, interface or folder, such as ``GPU 2`` or ``eth0``; empty for the node itself."""
    unit: str = ""
    kind: Literal["fact", "state", "counter"] = "state"
    slow: bool = False
    """True if only `labctl health` and `doctor` take it: its absence from another look says nothing."""
    kin: str = ""
    """Name that is common to items of the same hardware, such as the model of a card: these are compared with each
    other, on one node and on several. Without it an item is compared with that of the same name on other nodes."""
    why: str = ""
    subject: str = ""
    """Name of the subject that took it; empty for what every look takes."""

    @property
    def key(self) -> tuple[str, str]:
        """Identify the reading in a node's readings."""
        return self.item, self.name

    def text(self) -> str:
        """Render the value with its unit: ``8``, ``81.5 °C``."""
        value = "" if self.value is None else shown(self.value)
        return f"{value} {self.unit}".rstrip()


def shown(value: Value) -> str:
    """Render a value; a large number with all its digits before the point."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e6 else f"{value:g}"
    return str(value)


class KernelLine(NamedTuple):
    """A line of the kernel's log, and the seconds since the start of the node at which it was written."""

    seconds: float
    text: str


class Answer(NamedTuple):
    """Answer of a check that is not ok: ``text`` is a clause without the name of item and node."""

    level: Level
    text: str
    item: str = ""
    """Item that a kernel line names; a card by its PCI address, as sysfs writes it."""


class Evidence(Struct, frozen=True, kw_only=True):
    """Values that a check may compare a reading with."""

    limit: float | None = None
    """Threshold: the check's own, or the one of ``health.yml``."""
    neighbours: tuple[tuple[str, Value], ...] = ()
    """Values of the same reading of comparable hardware, each with its place: ``worker-1 GPU 2``, or ``GPU 3`` of the
    same node."""
    before: Value | None = None
    """The value of the earlier readings, such as the last good ones; None without."""
    same_boot: bool = False
    """True if the node has not restarted since: counters go on."""


Judge = Callable[[Reading, Evidence], Answer | None]
"""Judges a reading whose value is known; None if it is ok."""


class Check(Struct, frozen=True, kw_only=True):
    """A check of each reading of a name."""

    name: str
    """Name in ``health.yml``, in tables and in metrics, such as ``pcie-width``."""
    reading: str
    judge: Judge
    limit: float | None = None
    bad_in_run: bool = False
    """True if a remark is bad when it comes up while a run goes on: it may be why the run failed."""
    steps: tuple[str, ...] = ()
    """Steps if it is not ok, in order: a command, or a short sentence. ``{item}`` is the item, ``{id}`` its last
    word, ``{sudo}`` the prefix for root."""


class LineCheck(Struct, frozen=True, kw_only=True):
    """A check of the kernel's lines, each of which counts once."""

    name: str
    pattern: str
    """Regular expression for both grep -E and Python: no ``(?:``, no ``\\d``."""
    judge: Callable[[re.Match[str]], Answer | None]
    """Judges a line that matches, None if it accuses nobody; its text begins with what happened."""
    steps: tuple[str, ...] = ()
    """As those of a check; ``{item}`` and ``{id}`` only if each answer has an item."""


class Subject(Struct, frozen=True, kw_only=True):
    """A part of a node that is examined: the script that prints it, its readings and their checks."""

    name: str
    """Heading in a table, such as ``PCIe``."""
    script: str = ""
    """POSIX sh on the functions of ``entries.sh``, in at most some tens of milliseconds: it also runs before and after
    each run. It begins at the root folder, and may set variables of its own."""
    late: str = ""
    """Further script of each look, for what may give no answer in time: a vendor's tool, a file server. What the others
    print is used all the same."""
    slow: str = ""
    """Further script, for what takes longer: only `labctl health` and `doctor` run it."""
    readings: Callable[[HostDump], Iterable[Reading]] = lambda _: ()
    checks: tuple[Check, ...] = ()
    lines: tuple[LineCheck, ...] = ()


class Snapshot(Struct, frozen=True, kw_only=True):
    """Readings of a node at a time."""

    time: float
    """Seconds since 1970 on the machine of labctl."""
    boot: str = ""
    """Id of the node's start; empty if unknown."""
    uptime: float = 0.0
    root: bool = False
    """True if labctl is root there."""
    readings: tuple[Reading, ...] = ()
    lines: tuple[KernelLine, ...] = ()
    """Lines of the kernel that a check asks for, since the start of the node."""
    lines_why: str = ""
    """Why the kernel's lines cannot be read; empty if they can."""

    def by_key(self) -> Mapping[tuple[str, str], Reading]:
        """Return the readings by item and name."""
        return {reading.key: reading for reading in self.readings}


class OwnCheck(Struct, frozen=True, kw_only=True):
    """A command that judges a host by its exit code: 0 ok, 1 remark, 2 bad, 3 unknown, as Nagios' plugins do.

    Its first line says what is wrong. Source: Monitoring Plugins Development Guidelines, "Plugin Return Codes".
    """

    name: str
    command: tuple[str, ...]
    seconds: float = 2.0


class Rules(Struct, frozen=True, kw_only=True):
    """The site's own rules: checks turned off, thresholds, kernel lines to ignore, and own checks."""

    off: frozenset[str] = frozenset()
    limits: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Regular expressions of harmless kernel lines."""
    own: tuple[OwnCheck, ...] = ()

    @property
    def own_on(self) -> tuple[OwnCheck, ...]:
        """Return the own checks that are not off."""
        return tuple(check for check in self.own if check.name not in self.off)


class Condition(Struct, frozen=True, kw_only=True):
    """Answer of a check on a node."""

    check: str
    subject: str
    level: Level
    item: str = ""
    text: str = ""
    """The fault, or why it is unknown; empty if ok."""
    value: str = ""
    source: str = ""
    steps: tuple[str, ...] = ()
    changed: str = ""
    """Subject that told of an item that is gone or moved; empty if unknown."""

    def sentence(self) -> str:
        """Render as ``GPU 2: PCIe width 8, 16 on 7 others``."""
        return f"{self.item}: {self.text}" if self.item else self.text

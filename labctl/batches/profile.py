"""Profiles of `labctl validate`: YAML files that list the checks and their thresholds.

labctl's own profiles are in ``profiles/``; `labctl validate --profile FILE` takes a changed copy of one.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, cast

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.yaml_reader import Schema, Value, compose
from labctl.errors import ConfigError, did_you_mean
from labctl.jobs.request import RunOptions
from labctl.model import Metric
from labctl.workloads.schema import NAME, parse_duration

PACKAGED = Path(__file__).with_name("profiles")
Nodes = Literal["each", "turns", "pairs", "all"]
USUAL, OF_CLUSTER = "quick", "cluster"
NODES: tuple[Nodes, ...] = ("each", "turns", "pairs", "all")
HOOK_SECONDS = 600.0
"""Default time limit of a command on a host."""


class Limit(Struct, frozen=True, kw_only=True):
    """A metric of a check to judge: at least ``min``, or at most ``max``.

    Without either it is compared with the baseline, else with the other nodes.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    lower_is_better: bool = False
    source: str = ""
    """Source of the threshold, to show."""


class Check(Struct, frozen=True, kw_only=True):
    """A workload to run on each node alone, on pairs of nodes, on all nodes together, or in a run of all in turn."""

    name: str
    workload: str
    declared: str
    """``file:line``."""
    nodes: Nodes = "all"
    options: RunOptions = RunOptions()
    needs_devices: bool = False
    """Skipped on nodes without an accelerator."""
    limits: tuple[Limit, ...] = ()
    equal: str = ""
    """Note of the workload that must be the same on all nodes of the same hardware, as ``RESULT on HARDWARE``."""


def digest(check: Check) -> str:
    """Return a short SHA-256 of a check without its thresholds and place, by which a baseline sees a change."""
    ran = replace(check, declared="", limits=())
    return hashlib.sha256(repr(ran).encode()).hexdigest()[:16]


class Hook(Struct, frozen=True, kw_only=True):
    """A shell command to run on every host before the lab comes up; ``check`` verifies its effect."""

    name: str
    command: str
    check: str = ""
    timeout: float = HOOK_SECONDS
    """Seconds, for each of the two."""
    network_setup: bool = False
    """Skipped with SKIP_NETWORK_SETUP."""


class Network(Struct, frozen=True, kw_only=True):
    """Regular expressions of name and driver that select the hardware interfaces of a host to count."""

    interfaces: str = ".*"
    driver: str = ".*"
    up: int | None = None
    """Interfaces expected to be up on each host; None to expect nothing."""


class Profile(Struct, frozen=True, kw_only=True):
    """Hooks and checks of a validation, in order."""

    name: str
    word: str = ""
    """Name or file by which `--profile` finds it; empty: its name."""
    description: str
    within: float = 0.15
    """Largest distance of a figure from the baseline, or from the median of the nodes, as a share of it."""
    needs_devices: bool = False
    """Checks that need an accelerator fail on nodes without one; else they are skipped."""
    network: Network = Network()
    hooks: tuple[Hook, ...] = ()
    checks: tuple[Check, ...]

    @property
    def command(self) -> str:
        """Return the `labctl validate --profile` command that uses this profile."""
        return f"labctl validate --profile {shlex.quote(self.word or self.name)}"

    @property
    def figures(self) -> int:
        """Return the number of limits of all checks."""
        return sum(len(check.limits) for check in self.checks)


def names() -> tuple[str, ...]:
    """Return the names of the profiles that come with labctl."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.yml")))


def find(word: str) -> Path:
    """Return the file of a packaged profile, or the path given. ConfigError if neither exists."""
    if word in names():
        return PACKAGED / f"{word}.yml"
    if not Path(word).is_file():
        hint = f"{did_you_mean(word, names())} or the path of a file"
        raise ConfigError(f"--profile {word}: no such profile", hint=hint)
    return Path(word)


def configured(word: str, warn: Callable[[str], None], usual: str = USUAL) -> str:
    """Return the profile name in TEST_CONFIGURATION; the default if it is empty or, with a warning, unknown."""
    if word.lower() in names():
        return word.lower()
    if word:
        warn(f"TEST_CONFIGURATION={word} is not a profile ({', '.join(names())}); using {usual}")
    return usual


def read(path: Path) -> Profile:
    """Load a profile from a YAML file. ConfigError with ``file:line`` if it is invalid."""
    shown = path.name if path.parent == PACKAGED else str(path)
    root = compose(path, shown, hint="a profile needs a description and checks")
    fields: Schema = {
        "description": Value.text,
        "within": _share,
        "needs_devices": Value.flag,
        "network": _network,
        "hooks": lambda value: tuple(map(_hook, value.items())),
        "checks": _checks,
    }
    word = path.stem if path.parent == PACKAGED else str(path)
    return Profile(name=path.stem, word=word, **root.read(fields, required=("description", "checks")))


def require_metrics(check: Check, metrics: Iterable[Metric], notes: Iterable[str]) -> None:
    """Raise ConfigError if the check judges a metric, or compares a note, that its workload does not have."""
    if check.equal and check.equal not in (known := tuple(notes)):
        hint = (
            f"{did_you_mean(check.equal, known)}; `mv workloads workloads.old; labctl init` copies those of this labctl"
        )
        raise ConfigError(f"{check.declared}: {check.workload} has no note `{check.equal}`", hint=hint)
    names = [metric.name for metric in metrics]
    for limit in check.limits:
        if limit.metric not in names:
            hint = did_you_mean(limit.metric, names)
            raise ConfigError(f"{check.declared}: {check.workload} has no metric `{limit.metric}`", hint=hint)


def _share(value: Value) -> float:
    """Parse a share below 100 %, such as ``10%``, as a fraction. ConfigError if it is anything else."""
    match = re.fullmatch(r"(\d{1,2}(?:\.\d+)?) ?%", value.text())
    if not match:
        raise value.error(f"`{value.name}` is a share below 100%, such as 10%, not `{value.text()}`")
    return float(match[1]) / 100


def _network(value: Value) -> Network:
    """Load the selection of interfaces to count, and the number expected to be up."""
    return Network(**value.read({"interfaces": _expression, "driver": _expression, "up": Value.whole}))


def _expression(value: Value) -> str:
    """Return a regular expression as text. ConfigError if it does not compile."""
    try:
        re.compile(value.text())
    except re.error as error:
        raise value.error(f"`{value.text()}` is not a regular expression: {error}") from None
    return value.text()


def _hook(value: Value) -> Hook:
    """Load a hook: a command with name, check and time limit."""
    fields: Schema = {
        "name": Value.text,
        "command": Value.text,
        "check": Value.text,
        "timeout": _duration,
        "network_setup": Value.flag,
    }
    return Hook(**value.read(fields, required=("name", "command")))


def _checks(value: Value) -> tuple[Check, ...]:
    """Load the checks. ConfigError if there are none, or two have the same name."""
    checks: dict[str, Check] = {}
    for item in value.items():
        check = _check(item)
        if check.name in checks:
            raise item.error(f"two checks are named `{check.name}`", hint="give one of them a `name` of its own")
        checks[check.name] = check
    if not checks:
        raise value.error("`checks` is empty", hint="name at least one, such as `checks: [{workload: ssh-check}]`")
    return tuple(checks.values())


def _check(value: Value) -> Check:
    """Load a check; its name is that of the workload by default."""
    fields: Schema = {
        "workload": Value.text,
        "name": _name,
        "nodes": lambda nodes: cast("Nodes", nodes.choice(NODES)),
        "rehearse": Value.flag,
        "timeout": _duration,
        "set": _options,
        "needs_devices": Value.flag,
        "metrics": _limits,
        "equal": Value.text,
    }
    entries = value.read(fields, required=("workload",))
    options = RunOptions(
        rehearse=entries.pop("rehearse", False),
        timeout=entries.pop("timeout", None),
        arguments=entries.pop("set", ()),
    )
    limits = entries.pop("metrics", ())
    return Check(
        **{"name": entries["workload"].replace("/", "-"), **entries},
        declared=f"{value.path}:{value.line}",
        options=options,
        limits=limits,
    )


def _options(value: Value) -> tuple[tuple[str, str], ...]:
    """Load the options of a workload, as key and text."""
    return tuple((key, option.text()) for key, option in value.entries().items())


def _limits(value: Value) -> tuple[Limit, ...]:
    """Load the metrics' limits of a check."""
    return tuple(_limit(name, limit) for name, limit in value.entries().items())


def _name(value: Value) -> str:
    """Return the name of a check. ConfigError unless it is 1 to 63 letters, digits, ``.``, ``_`` and ``-``."""
    if not NAME.fullmatch(value.text()):
        raise value.error(f"bad name `{value.text()}`", hint="letters, digits, `.`, `_` and `-`, at most 63")
    return value.text()


def _limit(name: str, value: Value) -> Limit:
    """Load the limit of a metric. ConfigError with both ``min`` and ``max``."""
    fields: Schema = {"min": Value.number, "max": Value.number, "lower_is_better": Value.flag, "source": Value.text}
    limit = Limit(metric=name, **value.read(fields))
    if limit.min is not None and limit.max is not None:
        raise value.error(f"`{name}` has both `min` and `max`", hint="keep one of them")
    return limit


def _duration(value: Value) -> float:
    """Parse a duration into seconds. ConfigError with ``file:line``."""
    try:
        return parse_duration(value.text())
    except ConfigError as error:
        raise value.error(error.message, error.hint) from None

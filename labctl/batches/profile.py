"""Profiles of `labctl validate`: YAML files that say what is checked, and what counts as good.

Those that come with labctl lie in ``profiles/``; `labctl validate --profile FILE` takes a changed copy of one.
"""

from __future__ import annotations

import hashlib
import re
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
Nodes = Literal["each", "pairs", "all"]
USUAL = "quick"
NODES: tuple[Nodes, ...] = ("each", "pairs", "all")
# Seconds of a command on a host, where the profile says nothing.
HOOK_SECONDS = 600.0


class Limit(Struct, frozen=True, kw_only=True):
    """A metric of a check that is judged: at least ``min`` or at most ``max``.

    Without either it is compared with the baseline, else with the other nodes.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    lower_is_better: bool = False
    source: str = ""
    """Where the threshold comes from."""


class Check(Struct, frozen=True, kw_only=True):
    """A workload that is run on each node alone, on pairs of nodes, or on all nodes together."""

    name: str
    workload: str
    declared: str
    """``file:line``."""
    nodes: Nodes = "all"
    options: RunOptions = RunOptions()
    needs_devices: bool = False
    """Whether it is skipped on nodes without an accelerator."""
    limits: tuple[Limit, ...] = ()


def digest(check: Check) -> str:
    """What tells what is run from another check of the same name; thresholds are no part of it."""
    ran = replace(check, declared="", limits=())
    return hashlib.sha256(repr(ran).encode()).hexdigest()[:16]


class Hook(Struct, frozen=True, kw_only=True):
    """A shell command that is run on every host before the lab comes up; ``check`` then says whether it took."""

    name: str
    command: str
    check: str = ""
    timeout: float = HOOK_SECONDS
    """In seconds, of either."""
    network_setup: bool = False
    """Whether SKIP_NETWORK_SETUP skips it."""


class Network(Struct, frozen=True, kw_only=True):
    """The hardware interfaces of a host that are counted: those whose names and drivers match these expressions."""

    interfaces: str = ".*"
    driver: str = ".*"
    up: int | None = None
    """How many of them are up on each host; None where that is not known."""


class Profile(Struct, frozen=True, kw_only=True):
    """What a validation does, in order."""

    name: str
    description: str
    within: float = 0.1
    """How far a figure may be from the baseline, or the median of the nodes, as a share of it."""
    needs_devices: bool = False
    """Whether a check that needs an accelerator fails, rather than being skipped, on nodes without one."""
    network: Network = Network()
    hooks: tuple[Hook, ...] = ()
    checks: tuple[Check, ...]


def names() -> tuple[str, ...]:
    """The profiles that come with labctl."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.yml")))


def find(word: str) -> Path:
    """The file of a profile, by its name or path. ConfigError where there is neither."""
    if word in names():
        return PACKAGED / f"{word}.yml"
    if not Path(word).is_file():
        hint = f"{did_you_mean(word, names())} or the path of a file"
        raise ConfigError(f"--profile {word}: no such profile", hint=hint)
    return Path(word)


def configured(word: str, warn: Callable[[str], None]) -> str:
    """The profile of the operator's TEST_CONFIGURATION; the usual one where that is none, with a warning."""
    if word.lower() in names():
        return word.lower()
    if word:
        warn(f"TEST_CONFIGURATION={word} is no profile ({', '.join(names())}): {USUAL} is used")
    return USUAL


def read(path: Path) -> Profile:
    """The profile of a file. ConfigError with ``file:line``."""
    shown = path.name if path.parent == PACKAGED else str(path)
    root = compose(path, shown, hint="a profile needs a description and checks")
    fields: Schema = {
        "description": Value.text,
        "within": _share,
        "needs_devices": _flag,
        "network": _network,
        "hooks": lambda value: tuple(map(_hook, value.items())),
        "checks": _checks,
    }
    return Profile(name=path.stem, **root.read(fields, required=("description", "checks")))


def require_metrics(check: Check, metrics: Iterable[Metric]) -> None:
    """ConfigError where the check judges a metric that its workload does not have."""
    known = [metric.name for metric in metrics]
    for limit in check.limits:
        if limit.metric not in known:
            hint = did_you_mean(limit.metric, known)
            raise ConfigError(f"{check.declared}: {check.workload} has no metric `{limit.metric}`", hint=hint)


def _share(value: Value) -> float:
    """The share in ``10%``."""
    found = re.fullmatch(r"(\d{1,2}(?:\.\d+)?) ?%", value.text())
    if not found:
        raise value.error(f"`{value.name}` is a share below 100%, such as 10%, not `{value.text()}`")
    return float(found[1]) / 100


def _network(value: Value) -> Network:
    return Network(**value.read({"interfaces": _expression, "driver": _expression, "up": Value.whole}))


def _expression(value: Value) -> str:
    try:
        re.compile(value.text())
    except re.error as error:
        raise value.error(f"`{value.text()}` is not a regular expression: {error}") from None
    return value.text()


def _hook(value: Value) -> Hook:
    fields: Schema = {
        "name": Value.text,
        "command": Value.text,
        "check": Value.text,
        "timeout": _duration,
        "network_setup": _flag,
    }
    return Hook(**value.read(fields, required=("name", "command")))


def _checks(value: Value) -> tuple[Check, ...]:
    checks: dict[str, Check] = {}
    for item in value.items():
        check = _check(item)
        if check.name in checks:
            raise item.error(f"two checks are named `{check.name}`", hint="give one of them a `name` of its own")
        checks[check.name] = check
    if not checks:
        raise value.error("there is no check", hint="`checks: [{workload: ssh-check}]` has one")
    return tuple(checks.values())


def _check(value: Value) -> Check:
    fields: Schema = {
        "workload": Value.text,
        "name": _name,
        "nodes": lambda nodes: cast("Nodes", nodes.choice(NODES)),
        "rehearse": _flag,
        "timeout": _duration,
        "set": lambda words: tuple((key, word.text()) for key, word in words.entries().items()),
        "needs_devices": _flag,
        "metrics": lambda metrics: tuple(_limit(name, metric) for name, metric in metrics.entries().items()),
    }
    found = value.read(fields, required=("workload",))
    options = RunOptions(
        rehearse=found.pop("rehearse", False), timeout=found.pop("timeout", None), arguments=found.pop("set", ())
    )
    limits = found.pop("metrics", ())
    return Check(
        **{"name": found["workload"].replace("/", "-"), **found},
        declared=f"{value.path}:{value.line}",
        options=options,
        limits=limits,
    )


def _name(value: Value) -> str:
    if not NAME.fullmatch(value.text()):
        raise value.error(f"bad name `{value.text()}`", hint="letters, digits, `.`, `_` and `-`, at most 63")
    return value.text()


def _limit(name: str, value: Value) -> Limit:
    fields: Schema = {"min": Value.number, "max": Value.number, "lower_is_better": _flag, "source": Value.text}
    limit = Limit(metric=name, **value.read(fields))
    if limit.min is not None and limit.max is not None:
        raise value.error(f"`{name}` has both `min` and `max`", hint="a metric is judged by one of them")
    return limit


def _duration(value: Value) -> float:
    try:
        return parse_duration(value.text())
    except ConfigError as error:
        raise value.error(error.message, error.hint) from None


def _flag(value: Value) -> bool:
    flag = value.data()
    if not isinstance(flag, bool):
        raise value.error(f"`{value.name}` must be true or false")
    return flag

"""workload.yml -> Workload: a strict reader whose errors name file, line and the nearest right spelling.

Text may be written as a string or as a number, which is taken as it is written; true, no, null and dates are quoted.
A variant adds its arguments to the common ones, merges environment and metrics by name, and replaces the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from labctl.errors import ConfigError
from labctl.model import Criterion, Memory, Metric, Reduce, Workload
from labctl.yamlfile import Schema, Value, compose, finite, hint_for

FILE = "workload.yml"

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smh]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_YEAR = 365 * 24 * 3600
_EXPECTATION = re.compile(rf"\s*({_NAME.pattern})\s*(>=|<=)\s*(\S+)\s*")


def load(directory: Path, name: str, launchers: tuple[str, ...], *, rehearse: bool = False) -> Workload:
    """The workload of that name, or its rehearsal; broken files that do not hide it are passed over.

    Raises ConfigError where it is unknown, declared twice, broken, or has no rehearsal to give.
    """
    declared, errors = _scan(directory, launchers)
    found = [item for item in declared if item.workload.name == name]
    if not found:
        # A file that cannot be read may be the one that declares it.
        raise errors[0] if errors else _unknown(directory, name, [item.workload for item in declared])
    for clash in _clashes(found):
        raise clash
    workload, rehearsal = found[0].workload, found[0].rehearsal
    if not rehearse:
        return workload
    if rehearsal is None:
        raise ConfigError(
            f"{workload.declared}: workload `{name}` has no `rehearse` section, so it cannot be rehearsed",
            hint="declare `rehearse: {arguments: [...]}` with what makes it small",
        )
    return rehearsal


def load_all(directory: Path, launchers: tuple[str, ...]) -> tuple[Workload, ...]:
    """Every workload, by folder and then in the file's order. Raises the first ConfigError of any file."""
    workloads, errors = list_all(directory, launchers)
    for error in errors:
        raise error
    return workloads


def list_all(directory: Path, launchers: tuple[str, ...]) -> tuple[tuple[Workload, ...], tuple[ConfigError, ...]]:
    """Every workload that can be read, and the errors of the files that cannot."""
    declared, errors = _scan(directory, launchers)
    return tuple(item.workload for item in declared), (*errors, *_clashes(declared))


def parse_duration(text: str) -> float:
    """Seconds of ``30s``, ``20m``, ``2h`` or ``90``. Raises ConfigError unless above zero and at most a year."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _YEAR:
        raise ConfigError(f"`{text}` is not a duration", hint="write 30s, 20m, 2h or seconds, at most a year")
    return seconds


def parse_expectation(text: str) -> Criterion:
    """The criterion in ``throughput>=600`` or ``loss<=2.5``. Raises ConfigError for anything else."""
    match = _EXPECTATION.fullmatch(text)
    number = finite(match[3]) if match else None
    if not match or number is None:
        raise ConfigError(f"`{text}` is not an expectation", hint="write it as 'throughput>=600' or 'loss<=2.5'")
    return Criterion(metric=match[1], **{"min" if match[2] == ">=" else "max": number})


# --- files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Declared:
    workload: Workload
    rehearsal: Workload | None


def _scan(directory: Path, launchers: tuple[str, ...]) -> tuple[list[_Declared], list[ConfigError]]:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such folder of workloads", hint="`labctl init` writes one")
    declared: list[_Declared] = []
    errors: list[ConfigError] = []
    for path in sorted(directory.glob(f"*/{FILE}")):
        try:
            declared += _read_file(path, launchers)
        except ConfigError as error:
            errors.append(error)
    return declared, errors


def _clashes(declared: Iterable[_Declared]) -> list[ConfigError]:
    first: dict[str, Workload] = {}
    return [
        ConfigError(f"{again.declared}: workload `{again.name}` is already declared at {known.declared}")
        for again in (item.workload for item in declared)
        if (known := first.setdefault(again.name, again)) is not again
    ]


def _unknown(directory: Path, name: str, known: list[Workload]) -> ConfigError:
    if not known:
        return ConfigError(f"{directory}: no workload is declared here", hint="`labctl init` writes some")
    nearest = get_close_matches(name, [workload.name for workload in known], n=1, cutoff=0)[0]
    place = next(workload.declared for workload in known if workload.name == nearest)
    return ConfigError(
        f"{place}: no workload `{name}`; the nearest declared is `{nearest}`, here",
        hint="`labctl workloads` lists them",
    )


def _read_file(path: Path, launchers: tuple[str, ...]) -> list[_Declared]:
    folder = path.parent
    root = compose(path, f"{folder.absolute().parent.name}/{folder.name}/{FILE}")
    fields: Schema = {
        "describe": Value.text,
        "arguments": _arguments,
        "environment": _environment,
        "timeout": _timeout,
        "metrics": _metrics,
        "criteria": _criteria,
        "rehearse": _rehearse,
        "memory": _memory,
    }
    common = root.read(
        {
            **fields,
            "launcher": lambda value: value.choice(launchers),
            "script": lambda value: _script(value, folder),
            "variants": Value.entries,
        },
        required=("launcher", "script"),
    )
    variants: dict[str, Value] = common.pop("variants", {folder.name: root})
    if not variants:
        raise root.error("`variants` declares no workload")
    return [_declare(name, folder, at, common, {} if at is root else at.read(fields)) for name, at in variants.items()]


def _declare(name: str, folder: Path, at: Value, common: dict[str, Any], own: dict[str, Any]) -> _Declared:
    if not _NAME.fullmatch(name):
        raise at.error(f"bad workload name `{name}`", hint="letters, digits, `.`, `_` and `-`, at most 63")
    fields = {**common, **own}
    for key in ("describe", "timeout"):
        if key not in fields:
            raise at.error(f"workload `{name}` has no `{key}`")
    metrics: dict[str, Metric] = {**common.get("metrics", {}), **own.get("metrics", {})}
    workload = Workload(
        name=name,
        describe=fields["describe"],
        declared=f"{at.path}:{at.line}",
        directory=folder,
        launcher=fields["launcher"],
        script=fields["script"],
        arguments=(*common.get("arguments", ()), *own.get("arguments", ())),
        environment=tuple({**common.get("environment", {}), **own.get("environment", {})}.items()),
        timeout=fields["timeout"],
        metrics=tuple(metrics.values()),
        criteria=_resolve(fields.get("criteria", ()), metrics),
        memory=fields.get("memory"),
    )
    if "rehearse" not in fields:
        return _Declared(workload, None)
    smaller = dict(fields["rehearse"])
    arguments = (*workload.arguments, *smaller.pop("arguments", ()))
    if "criteria" in smaller:
        smaller["criteria"] = _resolve(smaller["criteria"], metrics)
    return _Declared(workload, replace(workload, arguments=arguments, memory=None, **smaller))


def _resolve(criteria: Iterable[tuple[Value, Criterion]], metrics: dict[str, Metric]) -> tuple[Criterion, ...]:
    for at, criterion in criteria:
        metric = metrics.get(criterion.metric)
        if metric is None:
            raise at.error(f"no metric `{criterion.metric}`", hint=hint_for(criterion.metric, metrics))
        if criterion.drop is not None and metric.reduce != "first-last":
            raise at.error(f"`drop` needs a first and a last: give metric `{metric.name}` `reduce: first-last`")
    return tuple(criterion for _, criterion in criteria)


# --- fields --------------------------------------------------------------------------------------------------


def _script(value: Value, folder: Path) -> str:
    text = value.text()
    path = (folder / text).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise value.error(f"script `{text}` leaves its folder")
    if not path.is_file():
        raise value.error(f"script `{text}` is not in {folder}")
    return text


def _arguments(value: Value) -> tuple[str, ...]:
    return tuple(item.text() for item in value.items())


def _environment(value: Value) -> dict[str, str]:
    entries = value.entries()
    for name, entry in entries.items():
        if not _VARIABLE.fullmatch(name):
            raise entry.error(
                f"bad environment name `{name}`", hint="letters, digits and `_`, not beginning with a digit"
            )
    return {name: entry.text() for name, entry in entries.items()}


def _timeout(value: Value) -> float:
    text = value.text()
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise value.error(error.message, error.hint) from None


def _metrics(value: Value) -> dict[str, Metric]:
    return {name: _metric(name, entry) for name, entry in value.entries().items()}


def _metric(name: str, value: Value) -> Metric:
    if not _NAME.fullmatch(name):
        raise value.error(f"bad metric name `{name}`", hint="letters, digits, `.`, `_` and `-`, at most 63")
    fields: Schema = {
        "pattern": _pattern,
        "unit": Value.text,
        "skip": Value.whole,
        "reduce": lambda reduce: reduce.choice(get_args(Reduce)),
    }
    return Metric(name=name, **value.read(fields, required=("pattern",)))


def _pattern(value: Value) -> str:
    text = value.text()
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise value.error(f"`{text}` is not a regular expression: {error}") from None
    if groups != 1:
        raise value.error(
            f"`{text}` must have exactly one group, the number; it has {groups}", hint="(?:...) is no group"
        )
    return text


def _criteria(value: Value) -> tuple[tuple[Value, Criterion], ...]:
    return tuple((item, _criterion(item)) for item in value.items())


def _criterion(value: Value) -> Criterion:
    fields: Schema = {"metric": Value.text, "min": Value.number, "max": Value.number, "drop": Value.number}
    criterion = Criterion(**value.read(fields, required=("metric",)))
    if criterion.min is None and criterion.max is None and criterion.drop is None:
        raise value.error("a criterion needs `min`, `max` or `drop`")
    if criterion.min is not None and criterion.max is not None and criterion.min > criterion.max:
        raise value.error("`min` is above `max`")
    if criterion.drop is not None and not 0 < criterion.drop <= 1:
        raise value.error("`drop` is a share, above 0 and at most 1")
    return criterion


def _rehearse(value: Value) -> dict[str, Any]:
    return value.read({"arguments": _arguments, "timeout": _timeout, "criteria": _criteria})


def _memory(value: Value) -> Memory:
    names = ("parameters", "trainable", "zero_stage", "bytes_per_weight")
    memory = Memory(**value.read(dict.fromkeys(names, Value.whole), required=names))
    if not memory.trainable <= memory.parameters or not memory.parameters:
        raise value.error("`parameters` must be above 0 and at least `trainable`")
    if memory.zero_stage > 3:
        raise value.error("`zero_stage` must be 0, 1, 2 or 3")
    if memory.bytes_per_weight not in (2, 4):
        raise value.error("`bytes_per_weight` must be 2 (bf16, fp16) or 4 (fp32)")
    return memory

"""Fields of workload.yml: each reader converts a YAML value for the model, or raises ConfigError with file and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, cast, get_args

from labctl.config import requirements
from labctl.config.settings import distribution_packages, require_requirement
from labctl.config.yaml_reader import Schema, Value, finite
from labctl.errors import ConfigError
from labctl.model import BOUNDS, Cache, Criterion, Memory, Metric, Project, Reduce, Relative, Resume, Sign
from labctl.system.files import is_below
from labctl.workloads import deepspeed_config

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
TASKS = ("sft", "reward", "rlhf")
FORMER_KEYS = {"describe": "description", "requires": "required_inputs", "drop": "decrease"}
"""Deprecated keys of workload.yml, still accepted, and their current names."""
INPUT_KINDS = ("directory", "file", "model", "path")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARGUMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_LONG_OPTION = re.compile(rf"--{_ARGUMENT.pattern}")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smh]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_YEAR = 365 * 24 * 3600
_EXPECTATION = re.compile(rf"\s*({NAME.pattern})\s*(>=|<=|>|<|=)\s*(.*?)\s*")
_RELATIVE = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?% of (\S+)")


def parse_duration(text: str) -> float:
    """Parse ``30s``, ``20m``, ``2h`` or ``90`` into seconds; raise ConfigError unless above 0 and at most a year."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _YEAR:
        raise ConfigError(f"`{text}` is not a duration", hint="write 30s, 20m, 2h or seconds, at most a year")
    return seconds


def parse_expectation(text: str) -> Criterion:
    """Parse ``x>=600``, ``loss<2.5``, ``x=600..700`` or ``x>=-5% of latest``; raise ConfigError for anything else."""
    match = _EXPECTATION.fullmatch(text)
    bounds = _bounds(match[2], match[3]) if match else {}
    if not match or not bounds:
        hint = "write it as 'throughput>=600', 'loss<2.5', 'throughput=600..700' or 'throughput>=-5% of RUN'"
        raise ConfigError(f"`{text}` is not an expectation", hint=hint)
    return Criterion(metric=match[1], **bounds)


def parse_metric(text: str) -> Metric:
    """Parse ``NAME=REGEX`` into a metric. ConfigError for a bad name, or a pattern without exactly one group."""
    name, _, pattern = text.partition("=")
    if not NAME.fullmatch(name) or not pattern:
        raise ConfigError(f"--metric {text}: no name and pattern", hint=r"such as --metric 'bleu=BLEU = (\S+)'")
    require_group(pattern)
    return Metric(name=name, pattern=pattern)


def _bounds(sign: str, text: str) -> dict[str, Any]:
    """Return the fields of a criterion for a sign and the text after it; empty if they are not a bound."""
    if sign == "=":
        low, high = map(finite, text.partition("..")[::2])
        return {"min": low, "max": high} if low is not None and high is not None and low <= high else {}
    if relative := _RELATIVE.fullmatch(text):
        return {"relative": Relative(cast("Sign", sign), float(relative[1]) / 100, relative[2])}
    number = finite(text)
    return {} if number is None else {BOUNDS[cast("Sign", sign)]: number}


def _criteria(value: Value) -> tuple[tuple[Value, Criterion], ...]:
    """Return each criterion of a list, with its place in the file."""
    return tuple((item, _criterion(item)) for item in value.items())


def schema(folder: Path, launchers: tuple[str, ...]) -> Schema:
    """Return the reader of each field that a workload in this folder may declare, common or in a variant."""
    return {
        "description": Value.text,
        "launcher": lambda value: _launcher(value, launchers),
        "launcher_arguments": _words,
        "image": _image,
        "packages": lambda value: tuple(map(_requirement, value.items())),
        "requirements": lambda value: _requirements(value, folder),
        "apt": lambda value: tuple(map(_distribution_package, value.items())),
        "script": lambda value: _script(value, folder),
        "module": _module,
        "command": _words,
        "project": lambda value: _project(value, folder),
        "prepare": lambda value: _file(value, folder),
        "arguments": _words,
        "inputs": _inputs,
        "required_inputs": _words,
        "deepspeed": _deepspeed,
        "environment": _environment,
        "deepspeed_option": lambda value: value.choice(("deepspeed_config", "deepspeed")),
        "local_rank": Value.flag,
        "timeout": _timeout,
        "metrics": _metrics,
        "notes": _notes,
        "criteria": _criteria,
        "cache": lambda value: Cache(**value.read({"models": _repositories, "datasets": _repositories})),
        "memory": _memory,
        "resume": _resume,
        "elastic": Value.flag,
        "rehearse": lambda value: value.read(
            {"arguments": _words, "timeout": _timeout, "criteria": _criteria, "deepspeed": _deepspeed}
        ),
    }


def _launcher(value: Value, launchers: tuple[str, ...]) -> str:
    """Return a launcher's current name. ConfigError if it is unknown."""
    name = launcher_name(value.text())
    return name if name in launchers else value.choice(launchers)


def launcher_name(text: str) -> str:
    """Return the current name of a launcher: ``script`` was formerly ``own``."""
    return "script" if text == "own" else text


def _script(value: Value, folder: Path) -> str:
    """Return a script's path: absolute ones unchecked, with ~ expanded, others as a file of the folder."""
    text = value.text()
    return str(Path(text).expanduser()) if text.startswith(("/", "~/")) else _file(value, folder)


def _file(value: Value, folder: Path) -> str:
    """Return the path of an existing file relative to the folder. ConfigError if it is missing or outside."""
    text = value.text()
    path = (folder / text).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise value.error(f"script `{text}` is outside the folder of its workload")
    if not path.is_file():
        raise value.error(
            f"script `{text}` is not in {folder}",
            hint="put it there, or write the absolute path of a script elsewhere, also of one in `project`",
        )
    return text


def _module(value: Value) -> str:
    """Return the name of a Python module. ConfigError unless it is words of letters, digits and `_`, with dots."""
    if not re.fullmatch(rf"{_VARIABLE.pattern}(\.{_VARIABLE.pattern})*", value.text()):
        raise value.error(f"bad module `{value.text()}`", hint="write it as for `python -m`: package.train")
    return value.text()


def _project(value: Value, folder: Path) -> Project:
    """Load the project: its root, the workload's folder by default, where ranks start in it, and its installation."""
    fields: Schema = {"path": Value.text, "start": Value.text, "install": Value.flag}
    entries = value.read(fields)
    root = (folder / Path(entries.get("path", ".")).expanduser()).resolve()
    start = (root / entries.get("start", ".")).resolve()
    if not start.is_dir() or not start.is_relative_to(root):
        raise value.error(
            f"`{start}` is not a folder of the project",
            hint="`path` is the root of the project, `start` a folder in it",
        )
    return Project(root=root, start=str(start.relative_to(root)), install=entries.get("install", False))


def _image(value: Value) -> str:
    """Return the name of a Dockerfile of labctl's. ConfigError if it has invalid characters."""
    text = value.text()
    if not re.fullmatch("[a-z0-9][a-z0-9-]*", text):
        raise value.error(
            f"bad image `{text}`", hint="the name of a Dockerfile that comes with labctl, such as horovod"
        )
    return text


def _requirement(value: Value) -> str:
    """Return a pip requirement without spaces. ConfigError if it is invalid."""
    return _valid(value, require_requirement, requirements.without_spaces(value.text()))


def _distribution_package(value: Value) -> str:
    """Return the name of a distribution's package. ConfigError if it is invalid."""
    return _valid(value, distribution_packages, value.text())


def _valid(value: Value, check: Callable[[str], None], text: str) -> str:
    """Return the text if the validator accepts it; raise ConfigError with its reason otherwise."""
    try:
        check(text)
    except ValueError as error:
        raise value.error(error.args[0], hint=(*error.args[1:], "")[0]) from None
    return text


def _requirements(value: Value, folder: Path) -> tuple[str, ...]:
    """Return the requirements in a file of the folder."""
    return requirements.read(folder / _file(value, folder), f"{value.path}:{value.line}")


def _words(value: Value) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(item.text() for item in value.items())


def _named(value: Value, kind: str, pattern: re.Pattern[str], hint: str) -> dict[str, Value]:
    """Return the entries of a mapping. ConfigError for a key that does not match the pattern."""
    entries = value.entries()
    for name, entry in entries.items():
        if not pattern.fullmatch(name):
            raise entry.error(f"bad {kind} name `{name}`", hint=hint)
    return entries


def _inputs(value: Value) -> dict[str, str]:
    """Return the kind of each input by argument name. ConfigError for an unknown kind or a bad name."""
    entries = _named(value, "argument", _ARGUMENT, "as in --data-path, without the dashes")
    return {name: entry.choice(INPUT_KINDS) for name, entry in entries.items()}


def _deepspeed(value: Value) -> dict[str, Any]:
    """Return a DeepSpeed configuration. ConfigError if a section is not an object or the ZeRO stage is invalid."""
    value.entries()
    config: dict[str, Any] = value.data()
    deepspeed_config.check_sections(config, f"{value.path}:{value.line}")
    return config


def _environment(value: Value) -> dict[str, str]:
    """Return environment variables by name. ConfigError for a bad name."""
    entries = _named(value, "environment", _VARIABLE, "letters, digits and `_`, not beginning with a digit")
    return {name: entry.text() for name, entry in entries.items()}


def _timeout(value: Value) -> float:
    """Return a duration in seconds. ConfigError with ``file:line`` if it is invalid."""
    text = value.text()
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise value.error(error.message, error.hint) from None


def _metrics(value: Value) -> dict[str, Metric]:
    """Return the metrics by name. ConfigError for a bad name, or a metric without a pattern."""
    fields: Schema = {
        "pattern": _pattern,
        "unit": Value.text,
        "skip": Value.whole,
        "reduce": lambda reduce: reduce.choice(get_args(Reduce)),
        "optional": Value.flag,
    }
    entries = _named(value, "metric", NAME, "letters, digits, `.`, `_` and `-`, at most 63")
    return {name: Metric(name=name, **entry.read(fields, required=("pattern",))) for name, entry in entries.items()}


def _notes(value: Value) -> dict[str, str]:
    """Return the pattern of each note by name. ConfigError for a bad name or pattern."""
    entries = _named(value, "note", NAME, "letters, digits, `.`, `_` and `-`, at most 63")
    return {name: _pattern(entry, "text") for name, entry in entries.items()}


def _pattern(value: Value, content: str = "number") -> str:
    """Return a regular expression that has exactly one group; raise ConfigError with ``file:line`` otherwise."""
    text = value.text()
    try:
        require_group(text, content)
    except ConfigError as error:
        raise value.error(error.message, error.hint) from None
    return text


def require_group(pattern: str, content: str = "number") -> None:
    """Raise ConfigError for a regular expression that is invalid or does not have exactly one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"`{pattern}` is not a regular expression: {error}") from None
    if groups != 1:
        message = f"`{pattern}` must have exactly one group, the {content}; it has {groups}"
        raise ConfigError(message, hint="(?:...) does not count as a group")


def _criterion(value: Value) -> Criterion:
    """Return a criterion written as a text or as a mapping. ConfigError for missing or contradictory bounds."""
    if value.node.id == "scalar":
        try:
            return parse_expectation(value.text())
        except ConfigError as error:
            raise value.error(error.message, error.hint) from None
    fields: Schema = {"metric": Value.text, "min": Value.number, "max": Value.number, "decrease": Value.number}
    criterion = Criterion(**value.read(fields, required=("metric",), former=FORMER_KEYS))
    if criterion.min is None and criterion.max is None and criterion.decrease is None:
        raise value.error("a criterion needs `min`, `max` or `decrease`")
    return _consistent(criterion, value)


def _consistent(criterion: Criterion, value: Value) -> Criterion:
    """Return the criterion; raise ConfigError if ``min`` is above ``max`` or ``decrease`` is not a share."""
    if criterion.min is not None and criterion.max is not None and criterion.min > criterion.max:
        raise value.error("`min` is above `max`")
    if criterion.decrease is not None and not 0 < criterion.decrease <= 1:
        raise value.error("`decrease` is a share, above 0 and at most 1")
    return criterion


def _repositories(value: Value) -> tuple[str, ...]:
    """Return names of repositories on the hub. ConfigError for a malformed name."""
    for item in value.items():
        if not _REPOSITORY.fullmatch(item.text()):
            raise item.error(f"bad name on the hub `{item.text()}`", hint="write it like facebook/opt-350m")
    return _words(value)


def _memory(value: Value) -> Memory:
    """Read the memory estimate's fields, numbers as argument defaults. ConfigError without a model or parameters."""
    defaults: Schema = {
        **dict.fromkeys(
            ("parameters", "sequence_length", "max_prompt_length", "max_answer_length", "lora_dim"),
            lambda number: (str(number.whole()),),
        ),
        "lora_modules": _words,
        "gradient_checkpointing": lambda switch: (switch.choice(("on", "off")),),
    }
    read = value.read({"model": Value.text, "critic": Value.text, "task": _task, **defaults})
    if ("model" in read) == ("parameters" in read):
        raise value.error("`memory` takes either `model`, a config.json, or `parameters`, their number")
    given = {name: item for name, item in read.items() if name not in defaults}
    return Memory(**given, defaults=tuple((name, item) for name, item in read.items() if name in defaults))


def _resume(value: Value) -> Resume:
    """Read how a workload resumes: option, checkpoint and marker. ConfigError without the first two."""
    fields: Schema = {"argument": _long_option, "checkpoint": _below, "marker": _below}
    return Resume(**value.read(fields, required=("argument", "checkpoint")))


def _long_option(value: Value) -> str:
    """Return an option such as ``--resume``; raise ConfigError otherwise."""
    if not _LONG_OPTION.fullmatch(value.text()):
        raise value.error(f"`{value.text()}` is not a valid script option", hint="such as --resume")
    return value.text()


def _below(value: Value) -> str:
    """Return a path, or a glob, below a run's directory; raise ConfigError otherwise."""
    text = value.text()
    if not PurePosixPath(text).parts or not is_below(text) or "**" in text:
        raise value.error(
            f"`{text}` is not a path in the run's directory", hint="such as checkpoints/* or work/last.pt"
        )
    return text


def _task(value: Value) -> str:
    """Return one of TASKS, or a text with a ``{placeholder}`` as it is. ConfigError otherwise."""
    return value.text() if "{" in value.text() else value.choice(TASKS)

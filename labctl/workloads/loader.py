"""workload.yml -> Workload: a strict reader whose errors name file, line and the nearest correct spelling.

Text may be written as a string or as a number, which is kept as written; true, no, null and dates must be quoted.
A variant appends its arguments to the common ones, merges environment, inputs, metrics and DeepSpeed's keys by name,
and replaces the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from labctl.config.yaml_reader import Value, compose, content
from labctl.errors import ConfigError, did_you_mean, nearest
from labctl.model import Criterion, Metric, Project, Workload
from labctl.workloads import deepspeed_config
from labctl.workloads.schema import FORMER_KEYS, NAME, schema

FILE = "workload.yml"
Declared = tuple[Workload, Workload | None]
"""A workload and its rehearsal, None if it has none."""


def load(directory: Path, name: str, launchers: tuple[str, ...], *, rehearse: bool = False) -> Workload:
    """Load the workload of that name, or its rehearsal; other files may be broken. ConfigError if there is none.

    It is raised if it is unknown, declared twice, broken, or has no rehearsal.
    """
    # Files without the name in their text are parsed only if no other file declares it.
    for text in (name, ""):
        declared, errors = _scan(directory, launchers, text)
        if matching := [pair for pair in declared if pair[0].name == name]:
            break
        if text and errors:
            # A broken file that has the name may be the one that declares it.
            raise errors[0]
    else:
        raise _unknown(directory, name, [workload for workload, _ in declared])
    for clash in _clashes(matching):
        raise clash
    workload, rehearsal = matching[0]
    if not rehearse:
        return workload
    if rehearsal is None:
        raise ConfigError(
            f"{workload.declared}: workload `{name}` has no `rehearse` section, so it cannot be rehearsed",
            hint="declare `rehearse: {arguments: [...]}` with what makes it small",
        )
    return rehearsal


def list_all(directory: Path, launchers: tuple[str, ...]) -> tuple[tuple[Workload, ...], tuple[ConfigError, ...]]:
    """Return every readable workload of the workload files, in order; and errors of unreadable and duplicate ones."""
    declared, errors = _scan(directory, launchers)
    return tuple(workload for workload, _ in declared), (*errors, *_clashes(declared))


# --- files ---------------------------------------------------------------------------------------------------


def _scan(directory: Path, launchers: tuple[str, ...], name: str = "") -> tuple[list[Declared], list[ConfigError]]:
    """Read workload files, all or those that contain ``name``; return workloads, errors. ConfigError without folder."""
    if not directory.is_dir():
        hint = "cd into the lab's directory, or name it: -C DIRECTORY; `labctl init mylab` creates one"
        raise ConfigError(f"{directory.parent} is not a lab directory (no {directory.name}/)", hint=hint)
    declared: list[Declared] = []
    errors: list[ConfigError] = []
    for path in sorted(directory.glob(f"*/{FILE}")):
        try:
            if name in (path.parent.name, "") or _has_key(path, name):
                declared += _read_file(path, launchers)
        except ConfigError as error:
            errors.append(error)
    return declared, errors


def _has_key(path: Path, name: str) -> bool:
    """Return True if a workload file's text has the name as a key; False if it cannot be read."""
    word = re.escape(name.encode("utf-8", "surrogateescape"))
    try:
        return bool(re.search(rb"(?<![\w.-])" + word + rb"[\"']?\s*:", content(path, _shown(path))))
    except ConfigError:
        return False


def _clashes(declared: Iterable[Declared]) -> list[ConfigError]:
    """Return an error for each workload whose name an earlier one has."""
    first: dict[str, Workload] = {}
    return [
        ConfigError(f"{again.declared}: workload `{again.name}` is already declared at {earlier.declared}")
        for again, _ in declared
        if (earlier := first.setdefault(again.name, again)) is not again
    ]


def _unknown(directory: Path, name: str, declared: list[Workload]) -> ConfigError:
    """Return the error for an unknown workload, with the nearest of the declared ones."""
    if not declared:
        return ConfigError(f"{directory}: no workload is declared here", hint="`labctl init` writes some")
    if Path(name).is_file():
        return ConfigError(f"no workload `{name}`", hint=f"a script is run by: labctl run --script {name}")
    by_name = {workload.name.lower(): workload for workload in declared}
    near = by_name.get(nearest(name.lower(), by_name))
    hint = f"the nearest is `{near.name}` ({near.declared}); " if near else ""
    return ConfigError(f"no workload `{name}`", hint=f"{hint}`labctl workloads` lists them")


def _shown(path: Path) -> str:
    """Return the path with its last two folders, as ``workloads/opt/workload.yml``, for messages."""
    folder = path.absolute().parent
    return f"{folder.parent.name}/{folder.name}/{FILE}"


def _read_file(path: Path, launchers: tuple[str, ...]) -> list[Declared]:
    """Read a workload file; return its variants and rehearsals, or one as the folder is named. ConfigError if bad."""
    folder = path.parent
    root = compose(path, _shown(path), hint="a workload needs description, launcher, script and timeout")
    fields = schema(folder, launchers)
    common = root.read({**fields, "variants": Value.entries}, former=FORMER_KEYS)
    variants: dict[str, Value] = common.pop("variants", {folder.name: root})
    if not variants:
        raise root.error("`variants` declares no workload")
    return [
        _declare(name, folder, at, common, {} if at is root else at.read(fields, former=FORMER_KEYS))
        for name, at in variants.items()
    ]


def _declare(name: str, folder: Path, at: Value, common: dict[str, Any], variant: dict[str, Any]) -> Declared:
    """Build a workload and its rehearsal from the common fields and a variant's; raise ConfigError if incomplete."""
    if not NAME.fullmatch(name):
        raise at.error(f"bad workload name `{name}`", hint="letters, digits, `.`, `_` and `-`, at most 63")
    fields = {**common, **variant}
    for key in ("description", "launcher", "timeout"):
        if key not in fields:
            raise at.error(f"workload `{name}` has no `{key}`")
    programs = [key for key in ("script", "module", "command") if fields.get(key)]
    if len(programs) != 1:
        has = " and ".join(f"`{key}`" for key in programs) or "no `script`"
        raise at.error(f"workload `{name}` has {has}", hint="give exactly one of `script`, `module` and `command`")
    if not fields.get("script"):
        fields = {"project": Project(root=folder.resolve()), **fields, "script": ""}
    listed = fields.pop("requirements", ())
    if listed or "packages" in fields:
        fields["packages"] = (*fields.get("packages", ()), *listed)
    if fields["launcher"] == "script" and "prepare" in fields:
        raise at.error(f"workload `{name}` starts its ranks itself, so nothing runs its `prepare` on the nodes")
    rehearse = fields.pop("rehearse", None)
    by_name = ("metrics", "notes", "inputs", "environment")
    merged = {key: {**common.get(key, {}), **variant.get(key, {})} for key in by_name}
    metrics: dict[str, Metric] = merged["metrics"]
    fields |= {
        **_merged(common, variant),
        "inputs": tuple(merged["inputs"].items()),
        "environment": tuple(merged["environment"].items()),
        "metrics": tuple(metrics.values()),
        "notes": tuple(merged["notes"].items()),
        "criteria": _resolve(fields.get("criteria", ()), metrics),
    }
    workload = Workload(name=name, declared=f"{at.path}:{at.line}", directory=folder, **fields)
    if rehearse is None:
        return workload, None
    smaller = {**rehearse, **_merged(fields, rehearse)}
    if "criteria" in smaller:
        smaller["criteria"] = _resolve(smaller["criteria"], metrics)
    return workload, replace(workload, memory=None, required_inputs=(), **smaller)


def _merged(common: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """Return common and variant ``arguments`` joined and ``deepspeed`` merged, None if neither has one."""
    configs = [part["deepspeed"] for part in (common, variant) if part.get("deepspeed") is not None]
    return {
        "arguments": (*common.get("arguments", ()), *variant.get("arguments", ())),
        "deepspeed": deepspeed_config.merge(configs[0], configs[-1]) if configs else None,
    }


def _resolve(criteria: Iterable[tuple[Value, Criterion]], metrics: dict[str, Metric]) -> tuple[Criterion, ...]:
    """Return the criteria; ConfigError for an unknown metric, or ``decrease`` on one that is not first-last.

    Without ``metrics`` they are on those that programs print in known ways.
    """
    for at, criterion in criteria if metrics else ():
        metric = metrics.get(criterion.metric)
        if metric is None:
            raise at.error(f"no metric `{criterion.metric}`", hint=did_you_mean(criterion.metric, metrics))
        if criterion.decrease is not None and metric.reduce != "first-last":
            raise at.error(f"`decrease` needs a first and a last: give metric `{metric.name}` `reduce: first-last`")
    return tuple(criterion for _, criterion in criteria)

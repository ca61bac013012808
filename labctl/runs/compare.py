"""Compare runs: group those with the same settings, name what differs between groups, and what it did to metrics."""

from __future__ import annotations

import hashlib
import json
import posixpath
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.settings import sounds_secret
from labctl.errors import ConfigError
from labctl.jobs.request import RunOptions
from labctl.model import Metric, Project, Result
from labctl.records import note as notes
from labctl.records import redaction, store
from labctl.records.metrics import Sample
from labctl.runs import origin, series, spread
from labctl.runs.spread import Effect, Spread
from labctl.system import files, human
from labctl.system.decode import convert

CODE = (".py", ".sh")
"""Suffixes of files in a run's ``work/`` that are compared beside the script: ranks write other files there too."""
RESULTS = (store.REACHED, "loss_curve")
"""Notes on how a run went, which are no facts about what ran."""
FILE = "file "
"""Prefix of the names of facts about files of code."""
PACKAGE = "package "
"""Prefix of the names of facts about packages in the image."""
SHOWN = 2
"""Groups whose command is told for more runs."""


class RecordedRun(Struct, frozen=True, kw_only=True):
    """Record of a run to compare: ``facts`` are its settings, versions and files; its own id in them is ``RUN``."""

    result: Result
    target: str
    """Its workload, ``--script FILE``, ``-m MODULE`` or ``-- COMMAND``, as `labctl run` takes it."""
    command: str
    """The command line that repeats it; empty if it is not recorded."""
    facts: Mapping[str, str]
    declared: Mapping[str, Metric]
    series: Mapping[str, Sequence[Sample]]
    note: str = ""
    """As `labctl note` keeps it; empty without one."""

    @property
    def again(self) -> str:
        """Return what `labctl run` takes to repeat it, with options and arguments as far as they are recorded."""
        return self.command.removeprefix("labctl run ") or self.target

    def unit(self, metric: str) -> str:
        """Return a metric's unit, as declared or as found in the output; empty if it has none."""
        declared = self.declared.get(metric)
        return declared.unit if declared else str(self.result.metrics.get(metric, {}).get("unit", ""))


class Group(Struct, frozen=True, kw_only=True):
    """Runs with equal facts, and the spread of their metrics."""

    name: str
    runs: tuple[str, ...]
    verdicts: tuple[str, ...]
    outcomes: tuple[str, ...]
    """As ``Result.outcome``."""
    metrics: Mapping[str, Spread]


class Difference(Struct, frozen=True, kw_only=True):
    """A fact that differs between groups; ``values`` by group, empty if a group does not have it."""

    what: str
    values: Mapping[str, str]


class Comparison(Struct, frozen=True, kw_only=True):
    """Groups of equal runs, their differences, and the effects on metrics: of each group against the first.

    Of a single group, the effects are those of the run that is furthest from the others.
    """

    groups: tuple[Group, ...]
    columns: tuple[Group, ...]
    """The groups, with the change of each metric to the first; of two runs in one group the runs, as A1 and A2."""
    differences: tuple[Difference, ...]
    effects: tuple[Effect, ...]
    conclusion: str
    """Estimate of the usual difference, or the command that gives one."""
    notes: Mapping[str, str] = {}
    """The note on each run that has one, by its id."""


def read(lab: Path, result: Result, folder: Path | None = None) -> RecordedRun:
    """Read an ended run's record: what it is, facts, declared metrics and samples by metric.

    ``folder``: where the metrics of a run under way grow, if not in its record.
    """
    path = store.directory(lab, result.run_id)
    documents = {name: _checked(path / name, kind) for name, kind in KINDS.items()}
    request = (documents["job.json"] or {}).get("request")
    return RecordedRun(
        result=result,
        target=origin.target(request or {}, result.workload),
        command=origin.command(request, documents["settings.json"] or ()),
        facts=_facts(path, result, documents),
        declared={metric.name: metric for metric in store.workload(path).metrics},
        series=series.by_metric(series.read(lab, result.run_id, folder)),
        note=notes.read(path),
    )


def command(path: Path) -> str:
    """Return the command line that repeats a recorded run; empty if it is not recorded."""
    job, settings = (_checked(path / name, KINDS[name]) for name in ("job.json", "settings.json"))
    return origin.command((job or {}).get("request"), settings or ())


def compare(runs: Sequence[RecordedRun], metrics: Collection[str] = ()) -> Comparison:
    """Group runs with equal facts; return groups, differing facts, effects on metrics and a conclusion.

    ``metrics`` are the only ones to compare. ConfigError if no run has one of them.
    """
    same: dict[tuple[tuple[str, str], ...], list[RecordedRun]] = {}
    for run in _with_comparable_packages(_with_only(metrics, runs) if metrics else runs):
        same.setdefault(tuple(sorted(run.facts.items())), []).append(run)
    named = {_letter(number): group for number, group in enumerate(same.values())}
    results = {name: [run.result for run in group] for name, group in named.items()}
    groups = tuple(_group(name, of_group) for name, of_group in results.items())
    effects = tuple(_effects(groups) if len(groups) > 1 else spread.within("A", results["A"]))
    every = chain.from_iterable(group.metrics.values() for group in groups)
    return Comparison(
        groups=groups,
        columns=tuple(_columns(groups, results)),
        differences=tuple(_differences({name: group[0].facts for name, group in named.items()})),
        effects=effects,
        conclusion=spread.conclusion(effects, every, _targets(named.values())),
        notes={run.result.run_id: run.note for run in runs if run.note},
    )


def _targets(groups: Iterable[Sequence[RecordedRun]]) -> list[str]:
    """Return what `labctl run` takes to repeat a run of each group, once each, of the first SHOWN groups."""
    return list(islice(dict.fromkeys(run.again for run, *_ in groups), SHOWN))


def _with_only(metrics: Collection[str], runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs with only these metrics. ConfigError if no run has one of them."""
    known = dict.fromkeys(chain.from_iterable(run.result.metrics for run in runs))
    for name in metrics:
        if name not in known:
            hint = f"they have {human.listed(known)}" if known else "labctl show RUN"
            raise ConfigError(f"no metric `{name}` in these runs", hint=hint)
    kept = ({name: value for name, value in run.result.metrics.items() if name in metrics} for run in runs)
    return [replace(run, result=replace(run.result, metrics=own)) for run, own in zip(runs, kept, strict=True)]


def _columns(groups: Sequence[Group], results: Mapping[str, Sequence[Result]]) -> Iterator[Group]:
    """Yield the groups, or a single group's two runs, all but the first with each metric's change to it."""
    first, *others = groups
    if not others and len(first.runs) == 2:
        first, *others = (_group(f"A{number}", [run]) for number, run in enumerate(results["A"], start=1))
    yield first
    for group in others:
        yield replace(group, metrics=dict(_changed(group.metrics, first.metrics)))


def _changed(metrics: Mapping[str, Spread], first: Mapping[str, Spread]) -> Iterator[tuple[str, Spread]]:
    """Yield name and spread of each metric, with its change against the first column; None if missing there."""
    for name, metric in metrics.items():
        change = spread.change_of(metric.mean, first[name].mean) if name in first else None
        yield name, replace(metric, change=change)


def _differences(facts: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    """Yield each fact that is not the same in all groups, with its value per group; secrets redacted."""
    for name in dict.fromkeys(chain.from_iterable(facts.values())):
        if len({of_group.get(name) for of_group in facts.values()}) > 1:
            values = {group: redact_fact(name, of_group.get(name, "")) for group, of_group in facts.items()}
            yield Difference(what=name, values=values)


def _effects(groups: Sequence[Group]) -> Iterator[Effect]:
    """Yield the effect on each metric of every other group against the first."""
    by_name = {group.name: group.metrics for group in groups}
    first, *others = by_name
    for name in others:
        for metric in dict.fromkeys((*by_name[first], *by_name[name])):
            yield spread.between(metric, name, first, by_name)


def described(compared: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Yield a heading, ``B against A`` or empty for a single group, with the effects in words.

    Effects without a judgement are left out: the table of metrics has their changes.
    """
    judged = (effect for effect in compared.effects if effect.run or effect.basis)
    for (group, against), effects in groupby(judged, lambda effect: (effect.group, effect.against)):
        yield "" if group == against else f"{group} against {against}", list(map(spread.in_words, effects))


def _with_comparable_packages(runs: Sequence[RecordedRun]) -> Sequence[RecordedRun]:
    """Return the runs unchanged, or all without package facts if one of them has none."""
    if all(map(_lists_packages, runs)):
        return runs
    return [replace(run, facts=_without_packages(run.facts)) for run in runs]


def _lists_packages(run: RecordedRun) -> bool:
    """Tell if a run's facts include packages."""
    return any(key.startswith(PACKAGE) for key in run.facts)


def _without_packages(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts without those about packages."""
    return {key: value for key, value in facts.items() if not key.startswith(PACKAGE)}


def _settings(path: Path) -> dict[str, str]:
    """Return the recorded settings of a run, without secrets that have no value."""
    return _without_unset(store.settings(path))


def _without_unset(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings without secrets that have no value."""
    return {key: value for key, value in settings.items() if not (value == "unset" and sounds_secret(key))}


def redact_fact(name: str, value: str) -> str:
    """Return a fact's value without secrets: all of it if the name sounds secret; versions of packages stay."""
    if not value or name.startswith(PACKAGE):
        return value
    if sounds_secret(name):
        return redaction.REDACTED
    return " ".join(word for word, _ in redaction.redacted(value.split(" ")))


def redacted(facts: Mapping[str, str]) -> dict[str, str]:
    """Return facts with the values without secrets."""
    return {name: redact_fact(name, value) for name, value in facts.items()}


def _group(name: str, results: Sequence[Result]) -> Group:
    """Return a group of runs with their ids, verdicts, outcomes and metric spreads."""
    return Group(
        name=name,
        runs=tuple(result.run_id for result in results),
        verdicts=tuple(result.verdict for result in results),
        outcomes=tuple(result.outcome for result in results),
        metrics=spread.spreads(results),
    )


def _letter(number: int) -> str:
    """Return the name of a group by its number: A to Z, then AA, AB and so on."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


# --- facts ---------------------------------------------------------------------------------------------------


class _Request(Struct, frozen=True):
    """Parts of a recorded request that are read here."""

    workload: str | None = None
    options: RunOptions | None = None


class _RawRequest(Struct, frozen=True):
    """Part of a recorded request by which a run can be searched."""

    options: dict[str, Any] | None = None


class _Given(Struct, frozen=True):
    """Parts of ``job.json`` by which a run can be searched."""

    launcher: str = ""
    rank_argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    nodes: tuple[store.NamedNode, ...] = ()
    request: _RawRequest | None = None


class _Slots(store.NamedNode, frozen=True):
    """A node in ``job.json``."""

    slots: int


class _Job(Struct, frozen=True):
    """Parts of ``job.json`` that are facts, or the command."""

    rank_argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    nodes: tuple[_Slots, ...] = ()
    shared: dict[str, str] = {}
    request: _Request | None = None


class _Setting(store.SettingRow, frozen=True):
    """A setting in ``settings.json``, with its origin."""

    origin: str = ""


class _Clone(Struct, frozen=True):
    """A repository in ``versions.json``."""

    path: str
    commit: str
    dirty: bool


class _DeviceKind(Struct, frozen=True):
    """A kind of devices in ``versions.json``."""

    name: str
    driver: str
    firmware: str


class _Versions(Struct, frozen=True):
    """Parts of ``versions.json`` whose types matter here."""

    image: str | None = None
    packages: dict[str, str] | None = None
    code: tuple[_Clone, ...] | None = None
    devices: dict[str, tuple[_DeviceKind, ...]] | None = None
    images: dict[str, str | None] | None = None


KINDS: Mapping[str, Any] = {"job.json": _Job, "settings.json": tuple[_Setting, ...], "versions.json": _Versions}
"""Files of a record that have facts, and the types of those parts."""


class Parameters(Struct, frozen=True):
    """Options, arguments and settings chosen for a run, without secrets and empty values; quick to read."""

    own: Mapping[str, str]
    """Launcher, number of nodes, options, environment and arguments; they count before settings of the same name."""
    settings: Mapping[str, str]
    """The same mapping for all runs with the same settings."""

    def get(self, name: str) -> str | None:
        """Return a value; None if the run has none of this name."""
        return self.own.get(name) or self.settings.get(name)


def parameters(path: str) -> Parameters:
    """Read what a person chose for a recorded run."""
    given = store.decode(f"{path}/job.json", _Given) or _Given()
    options = (given.request and given.request.options) or {}
    found = {
        "launcher": given.launcher,
        "nodes": str(len(given.nodes)),
        **dict(_flat("", {key: value for key, value in options.items() if not isinstance(value, list)})),
        **dict(_flat("deepspeed", _document(f"{path}/ds_config.json"))),
        **given.environment,
        **_options(given.rank_argv),
    }
    return Parameters(_filled(found), _filled_settings(store.read_record(f"{path}/settings.json") or b"[]"))


@lru_cache(maxsize=256)
def _filled_settings(content: bytes) -> Mapping[str, str]:
    """Return the settings in a settings.json, of which most runs of a lab have the same; empty if it is broken."""
    return _filled(_without_unset(store.settings_in(content)))


def _filled(values: Mapping[str, str]) -> dict[str, str]:
    """Return values that are not empty, secrets redacted; texts that runs share are kept once."""
    return {sys.intern(name): sys.intern(text) for name, text in redacted(values).items() if text}


def _facts(path: Path, result: Result, documents: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's non-empty facts from its record (arguments, settings, versions, nodes, code), its id as RUN.

    ``documents`` are the files of KINDS, None for those that are missing or broken; the latter are a fact, too.
    """
    job, versions, workload = documents["job.json"] or {}, documents["versions.json"] or {}, store.workload(path)
    facts = {
        "workload": result.workload,
        "launcher": result.launcher,
        "launcher arguments": " ".join(workload.launcher_arguments),
        "nodes": ", ".join(f"{node['name']} slots={node['slots']}" for node in job.get("nodes", ())),
        **_options(job.get("rank_argv", ())),
        **dict(_flat("environment", job.get("environment", {}))),
        **dict(_flat("deepspeed", _document(path / "ds_config.json"))),
        **_settings(path),
    }
    facts |= _origin(versions, _copied(path.parents[1], workload.project))
    facts |= {f"{FILE}{name}": digest[:12] for name, digest in job.get("shared", {}).items()}
    start = workload.project.work if workload.project else "."
    facts |= dict(_code(path / "work", posixpath.normpath(f"{start}/{workload.script}")))
    facts |= {name: text for name, text in result.notes.items() if name not in RESULTS}
    facts["resumed from"] = result.resumed
    facts[origin.UNREADABLE] = ", ".join(name for name in KINDS if documents[name] is None and (path / name).exists())
    # On Kubernetes the names of nodes end in the workload and the last part of the id.
    suffix = result.run_id.split("-", 2)[-1]
    return {key: text.replace(result.run_id, "RUN").replace(suffix, "RUN") for key, text in facts.items() if text}


def _copied(lab: Path, project: Project | None) -> set[str]:
    """Return the folders that a run copies code from: the lab's workloads, and the project if any."""
    return {str(lab / "workloads"), *([str(project.root)] if project else ())}


def _origin(versions: dict[str, Any], copied: Collection[str]) -> dict[str, str]:
    """Return versions as facts: packages, other images, device kinds, and commits of clones not copied."""
    rest = {**versions}
    packages, code, devices, images = (rest.pop(key, None) or {} for key in ("packages", "code", "devices", "images"))
    facts = dict(_flat("", rest))
    # The image of the launcher's host is that of the lab, ``image_id``.
    facts |= {f"image on {name}": image for name, image in images.items() if image and image != rest.get("image_id")}
    each = list(chain.from_iterable(devices.values()))
    # Not which devices, but of which kind.
    for key in ("name", "driver", "firmware"):
        facts[f"device {key}"] = ", ".join(sorted({device[key] for device in each} - {""}))
    for clone in code:
        if clone["path"] not in copied:
            facts[f"code {clone['path']}"] = clone["commit"][:12] + (" changed" if clone["dirty"] else "")
    return facts | {f"{PACKAGE}{name}": version for name, version in packages.items()}


def versions(path: Path) -> dict[str, Any]:
    """Return a run's recorded versions; {} if they are missing or broken."""
    return _checked(path / "versions.json", _Versions) or {}


def _checked(path: Path, kind: Any) -> Any:
    """Return a JSON file of a record; None if it is missing or not of this type."""
    document = _document(path)
    try:
        convert(document, kind)
    except ValueError:
        return None
    return document


def _document(path: Path | str) -> Any:
    """Read a JSON file of a record; None if it is missing or broken."""
    try:
        return json.loads(store.read_record(path) or "null")
    except (ValueError, RecursionError):
        return None


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a JSON document's values, such as ``deepspeed.zero_optimization.stage``; skip null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), inner)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Map each option of the script to its values joined by blanks, ``given`` without any; the last one counts."""
    option = "arguments"
    values: dict[str, list[str]] = {option: []}
    for argument in arguments[1:]:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            values[option] = [value] if equals else []
        else:
            values[option].append(argument)
    # Options without a value count too.
    return {option: " ".join(given) or "given" for option, given in values.items() if given or option != "arguments"}


def _code(folder: Path, script: str) -> Iterator[tuple[str, str]]:
    """Yield ``file NAME`` and the digest of the script and each code file in a folder; empty if unreadable."""
    for name in files.walk(folder):
        if name == script or name.endswith(CODE):
            content = store.read_record(folder / name)
            yield f"{FILE}{name}", "" if content is None else hashlib.sha256(content).hexdigest()[:12]

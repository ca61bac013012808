"""Compare runs: group those with equal settings, and test if the difference of their metrics is significant."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.settings import sounds_secret
from labctl.model import Metric, Result
from labctl.records import store
from labctl.records.metrics import Sample
from labctl.records.verdict import final
from labctl.runs import series
from labctl.system import files, human

CODE = (".py", ".sh")
"""Suffixes of files in a run's ``work/`` that are compared beside the script: ranks write other files there too."""
PACKAGE = "package "
"""Prefix of the names of facts about packages in the image."""
BLOCKS = 10
"""Parts of a series: consecutive steps are correlated, the means of parts hardly."""
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 95 %, by degrees of freedom from 1; at most 2.2 beyond."""


class RecordedRun(Struct, frozen=True, kw_only=True):
    """Record of a run to compare: ``facts`` are its settings, versions and files; its own id in them is ``RUN``."""

    result: Result
    facts: Mapping[str, str]
    declared: Mapping[str, Metric]
    series: Mapping[str, Sequence[Sample]]


class Spread(Struct, frozen=True, kw_only=True):
    """A metric of repeated runs. ``cv`` is standard deviation / mean; None for a single run, or a mean of 0."""

    unit: str
    values: tuple[float, ...]
    median: float
    cv: float | None


class RepeatedRuns(Struct, frozen=True, kw_only=True):
    """Results of a run that was repeated."""

    runs: tuple[Result, ...]
    spread: Mapping[str, Spread]

    @property
    def worst(self) -> Result:
        """Return the first result with the worst verdict: ERROR, then FAIL, then PASS."""
        severity = {"PASS": 0, "FAIL": 1}
        return max(self.runs, key=lambda run: severity.get(run.verdict, 2))


class Group(Struct, frozen=True, kw_only=True):
    """Runs with equal facts."""

    name: str
    runs: tuple[str, ...]
    verdicts: tuple[str, ...]
    metrics: Mapping[str, Spread]


class Difference(Struct, frozen=True, kw_only=True):
    """A fact that differs between groups; ``values`` by group, empty if a group does not have it."""

    what: str
    values: Mapping[str, str]


class Effect(Struct, frozen=True, kw_only=True):
    """A metric of one group compared with another; values are means over runs, None if no run has one.

    ``change`` and ``noise`` are shares of the other value. 95 % of the differences between equal runs are below
    ``noise``, which is estimated from repeated ``runs``, or for one run each from the ``steps``.
    """

    metric: str
    unit: str
    at_end: bool
    """The values are the last of a series, as of a loss."""
    group: str
    against: str
    value: float | None
    other: float | None
    change: float | None = None
    noise: float | None = None
    basis: Literal["runs", "steps"] | None = None
    verdict: Literal["more than noise", "within noise"] | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """Groups of equal runs, their differences, and the effects on metrics."""

    groups: tuple[Group, ...]
    differences: tuple[Difference, ...]
    effects: tuple[Effect, ...]


def read(lab: Path, result: Result) -> RecordedRun:
    """Read the record of a run that has ended; records of earlier versions have fewer facts."""
    path = store.directory(lab, result.run_id)
    return RecordedRun(
        result=result,
        facts=_facts(path, result),
        declared={metric.name: metric for metric in store.workload(path).metrics},
        series=series.by_metric(series.read(lab, result.run_id)),
    )


def compare(runs: Sequence[RecordedRun]) -> Comparison:
    """Group runs with equal facts; return the groups, the facts that differ, and the effects on metrics."""
    same: dict[tuple[tuple[str, str], ...], list[RecordedRun]] = {}
    for run in _listed_alike(runs):
        same.setdefault(tuple(sorted(run.facts.items())), []).append(run)
    named = {_letter(number): group for number, group in enumerate(same.values())}
    facts = {name: group[0].facts for name, group in named.items()}
    groups = [_group(name, group) for name, group in named.items()]
    return Comparison(groups=tuple(groups), differences=tuple(_differences(facts)), effects=tuple(_effects(named)))


def _differences(facts: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    """Yield each fact that differs between groups, given the facts of each; secrets are redacted."""
    for name in dict.fromkeys(chain.from_iterable(facts.values())):
        if len({of_group.get(name) for of_group in facts.values()}) > 1:
            values = {group: redact_fact(name, of_group.get(name, "")) for group, of_group in facts.items()}
            yield Difference(what=name, values=values)


def _effects(groups: Mapping[str, Sequence[RecordedRun]]) -> Iterator[Effect]:
    """Yield the effect on each metric for each pair of groups."""
    for a, b in combinations(groups, 2):
        for metric in _metrics((*groups[a], *groups[b])):
            yield _effect(metric, a, groups[a], b, groups[b])


def _listed_alike(runs: Sequence[RecordedRun]) -> Sequence[RecordedRun]:
    """Return the runs, all without facts about packages if one of them has none recorded."""
    if all(map(_lists_packages, runs)):
        return runs
    return [replace(run, facts=_without_packages(run.facts)) for run in runs]


def _lists_packages(run: RecordedRun) -> bool:
    return any(key.startswith(PACKAGE) for key in run.facts)


def _without_packages(facts: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in facts.items() if not key.startswith(PACKAGE)}


def spreads(results: Sequence[Result]) -> dict[str, Spread]:
    """Return the spread of each metric that any of these runs has."""
    spread: dict[str, Spread] = {}
    for name in dict.fromkeys(chain.from_iterable(result.metrics for result in results)):
        if values := _values(name, results):
            spread[name] = Spread(unit=_unit(name, results), values=values, median=median(values), cv=_cv(values))
    return spread


def in_words(effect: Effect) -> str:
    """Render an effect, as ``throughput: 24.8 samples/s against 11.2 samples/s, 121 % faster: more than noise``."""
    name = f"{effect.metric} at the end" if effect.at_end else effect.metric
    value, other = _quantity(effect.value, effect.unit), _quantity(effect.other, effect.unit)
    figures = f"{name}: {value} against {other}"
    if effect.change is None:
        return figures
    if not effect.change:
        return f"{figures}, the same"
    more, less = ("faster", "slower") if effect.unit.endswith("/s") else ("higher", "lower")
    judged = effect.verdict or "whether that is noise is not known"
    noise = "" if effect.noise is None else f" ({human.share(abs(effect.noise))})"
    return f"{figures}, {human.share(abs(effect.change))} {more if effect.change > 0 else less}: {judged}{noise}"


def redact_fact(name: str, value: str) -> str:
    """Return the value of a fact; redacted if its name sounds secret."""
    return store.REDACTED if value and sounds_secret(name) else value


def source_of_noise(compared: Comparison) -> str:
    """Render how the noise of a comparison was estimated; empty if nothing is compared."""
    bases = {effect.basis for effect in compared.effects if effect.change}
    if "runs" in bases:
        return "noise: 95 % of repeated runs are no further apart, by the spread within the groups"
    if "steps" in bases:
        return "noise: by the spread from step to step of one run each; `labctl run --repeat 3` shows that of runs"
    return "noise: unknown of one run each; `labctl run --repeat 3` shows it" if bases else ""


def _quantity(value: float | None, unit: str) -> str:
    """Format a value with its unit; ``none`` for None."""
    if value is None:
        return "none"
    return f"{human.number(value)} {unit}".rstrip()


def _group(name: str, runs: Sequence[RecordedRun]) -> Group:
    """Build a group of runs with equal facts."""
    results = [run.result for run in runs]
    run_ids = [result.run_id for result in results]
    return Group(
        name=name,
        runs=tuple(run_ids),
        verdicts=tuple(result.verdict for result in results),
        metrics=spreads(results),
    )


def _letter(number: int) -> str:
    """Return the name of a group: A to Z, AA, AB ..."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


# --- facts ---------------------------------------------------------------------------------------------------


def _facts(path: Path, result: Result) -> dict[str, str]:
    """Return arguments, settings, versions, nodes, DeepSpeed configuration and code of a run, from its record."""
    job, versions = _mapping(path / "job.json"), _mapping(path / "versions.json")
    settings, config = _document(path / "settings.json"), _document(path / "ds_config.json")
    workload = store.workload(path)
    facts = {
        "workload": result.workload,
        "launcher": result.launcher,
        "launcher arguments": " ".join(workload.launcher_arguments),
        "nodes": ", ".join(f"{node['name']} slots={node['slots']}" for node in job.get("nodes", ())),
        **_options(job.get("rank_argv", ())),
        **dict(_flat("environment", job.get("environment", {}))),
        **dict(_flat("deepspeed", config)),
    }
    facts |= {row["key"]: row["value"] for row in settings or ()}
    facts |= _origin(versions, _copied(path.parents[1], job))
    facts |= {f"file {name}": digest[:12] for name, digest in job.get("shared", {}).items()}
    facts |= dict(_code(path / "work", workload.script))
    facts |= {name: text for name, text in result.notes.items() if name != store.REACHED}
    facts["resumed from"] = result.resumed
    # On Kubernetes the names of nodes end in the workload and the last part of the id.
    suffix = result.run_id.split("-", 2)[-1]
    return {key: text.replace(result.run_id, "RUN").replace(suffix, "RUN") for key, text in facts.items() if text}


def _copied(lab: Path, job: dict[str, Any]) -> set[str]:
    """Return the folders that a run copied its code from: their files are compared, not their commits."""
    script = ((job.get("request") or {}).get("options") or {}).get("script")
    return {str(lab / "workloads"), *([str(Path(script).parent.resolve())] if script else ())}


def _origin(versions: dict[str, Any], copied: Collection[str]) -> dict[str, str]:
    """Return versions as facts: packages, images, kinds of devices, and commits of clones that were not copied."""
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


def _mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object of a record; empty if it is missing or broken."""
    document = _document(path)
    return document if isinstance(document, dict) else {}


def _document(path: Path) -> Any:
    """Read a JSON file of a record; None if it is missing or broken."""
    try:
        return json.loads(store.read_record(path) or "null")
    except (ValueError, RecursionError):
        return None


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the values of a document, with names such as ``deepspeed.zero_optimization.stage``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), inner)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the script's arguments by option; the last of each counts, as for argparse."""
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
    """Yield a digest of the script and of each other code file."""
    for name in files.walk(folder):
        if name == script or name.endswith(CODE):
            content = store.read_record(folder / name)
            yield f"file {name}", "" if content is None else hashlib.sha256(content).hexdigest()[:12]


# --- effects -------------------------------------------------------------------------------------------------


def _metrics(runs: Sequence[RecordedRun]) -> dict[str, None]:
    """Return the names of all metrics, in order."""
    return dict.fromkeys(chain.from_iterable(run.result.metrics for run in runs))


def _values(name: str, results: Sequence[Result]) -> tuple[float, ...]:
    """Return the value of each run that has one; runs that ended with ERROR count only if all did."""
    results = [result for result in results if result.verdict != "ERROR"] or results
    recorded = (result.metrics[name] for result in results if name in result.metrics)
    return tuple(value for metric in recorded if isinstance(value := metric.get(final(metric)), (int, float)))


def _unit(name: str, results: Sequence[Result]) -> str:
    return next((str(result.metrics[name].get("unit", "")) for result in results if name in result.metrics), "")


def _cv(values: Sequence[float]) -> float | None:
    return stdev(values) / abs(mean(values)) if len(values) > 1 and mean(values) else None


def _effect(metric: str, a: str, runs: Sequence[RecordedRun], b: str, others: Sequence[RecordedRun]) -> Effect:
    """Compare a metric of the runs of group ``a`` with those of group ``b``."""
    results = [run.result for run in runs]
    other_results = [run.result for run in others]
    values, other_values = _values(metric, results), _values(metric, other_results)
    value = mean(values) if values else None
    other = mean(other_values) if other_values else None
    all_results = [*results, *other_results]
    effect = Effect(
        metric=metric,
        unit=_unit(metric, all_results),
        at_end=any("last" in result.metrics.get(metric, ()) for result in all_results),
        group=a,
        against=b,
        value=value,
        other=other,
    )
    if value is None or not other:
        return effect
    return _judged(effect, value, other, *_noise(metric, values, other_values, runs, others))


def _judged(
    effect: Effect, value: float, other: float, noise: float | None, basis: Literal["runs", "steps"] | None
) -> Effect:
    """Return the effect with its change, and if the noise is known with a verdict."""
    change = (value - other) / abs(other)
    if noise is None:
        return replace(effect, change=change)
    verdict: Literal["more than noise", "within noise"] = (
        "more than noise" if abs(value - other) > noise else "within noise"
    )
    return replace(effect, change=change, noise=noise / abs(other), basis=basis, verdict=verdict)


def _noise(
    metric: str,
    values: Sequence[float],
    others: Sequence[float],
    runs: Sequence[RecordedRun],
    other_runs: Sequence[RecordedRun],
) -> tuple[float | None, Literal["runs", "steps"] | None]:
    """Return the largest difference of two means due to noise, and how it was estimated; None, None if not known."""
    degrees = len(values) + len(others) - 2
    if degrees:
        squares = sum((*_squares(values), *_squares(others)))
        return _t95(degrees) * math.sqrt(squares / degrees * (1 / len(values) + 1 / len(others))), "runs"
    errors = [_error(metric, run) for run in (*runs, *other_runs) if metric in run.result.metrics]
    estimated = [error for error in errors if error is not None]
    return (_t95(2 * BLOCKS - 2) * math.hypot(*estimated), "steps") if len(estimated) == 2 else (None, None)


def _squares(values: Sequence[float]) -> list[float]:
    """Return the squared distances from the mean."""
    center = mean(values)
    return [(value - center) ** 2 for value in values]


def _t95(degrees: int) -> float:
    return T95[degrees - 1] if degrees <= len(T95) else 2.2


def _error(name: str, run: RecordedRun) -> float | None:
    """Return the standard error of a run's value, estimated from its series; None if the series is too short."""
    metric, samples = run.declared.get(name), run.series.get(name, ())
    values = [sample.value for sample in samples if sample.value is not None]
    if metric and metric.reduce in ("last", "first-last") and len(values) > 1:
        return _error_of_one(values[len(values) // 2 :])
    if len(values) > 1:
        return _error_of_mean(values[max(metric.skip if metric else 0, len(values) // BLOCKS) :])
    # The relative error of a rate that is printed once, at the end, is that of the step time.
    times = [seconds for _, seconds in step_times(run.series)]
    (figure,) = _values(name, [run.result]) or (None,)
    if figure is None or not _unit(name, [run.result]).endswith("/s") or not times:
        return None
    relative = _error_of_mean(times[max(1, len(times) // BLOCKS) :])
    return None if relative is None else figure * relative / mean(times)


def step_times(by_metric: Mapping[str, Sequence[Sample]]) -> list[tuple[int, float]]:
    """Return steps and the seconds of each, from the metric with the most steps that have a time."""
    longest = max(map(_timed_steps, by_metric.values()), key=len, default=[])
    return [(to, (end - begin) / (to - of)) for (of, begin), (to, end) in pairwise(longest) if to > of]


def _timed_steps(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """Return step and time of the samples that have both."""
    return [
        (sample.step, sample.seconds) for sample in samples if sample.step is not None and sample.seconds is not None
    ]


def _error_of_mean(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, from the means of consecutive parts; None if there are too few."""
    parts = min(BLOCKS, len(values) // 2)
    if parts < 2:
        return None
    length = len(values) // parts
    return stdev(mean(values[at * length : (at + 1) * length]) for at in range(parts)) / math.sqrt(parts)


def _error_of_one(values: Sequence[float]) -> float | None:
    """Return the standard deviation of single values around their trend, from consecutive differences."""
    steps = [after - before for before, after in pairwise(values)]
    return math.sqrt(mean(step * step for step in steps) / 2) if len(steps) > 1 else None

"""What differed between runs, and what it did: their records -> groups of the same -> metrics, against the noise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
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
from labctl.system import files

CODE = (".py", ".sh")
"""Of a run's directory ``work/``, where ranks write too, what is compared beside the script."""
PACKAGE = "package "
"""How the names of facts begin that are of packages in the image."""
BLOCKS = 10
"""Parts of a series: single steps depend on those before them, means of parts hardly."""
# Student's t for 95 % of the differences, by degrees of freedom from 1; beyond them it is no larger than 2.2.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


class RecordedRun(Struct, frozen=True, kw_only=True):
    """What is compared of a run: ``facts`` are what it ran as, by name; its own id in them is ``RUN``."""

    result: Result
    facts: Mapping[str, str]
    declared: Mapping[str, Metric]
    series: Mapping[str, Sequence[Sample]]


class Spread(Struct, frozen=True, kw_only=True):
    """A metric of repeated runs. ``cv``: standard deviation as a share of the mean; None of one run, or around 0."""

    unit: str
    values: tuple[float, ...]
    median: float
    cv: float | None


class RepeatedRuns(Struct, frozen=True, kw_only=True):
    """Runs of the same, one after the other."""

    runs: tuple[Result, ...]
    spread: Mapping[str, Spread]

    @property
    def worst(self) -> Result:
        """An ERROR is worse than a FAIL, and that than a PASS; the first of these."""
        severity = {"PASS": 0, "FAIL": 1}
        return max(self.runs, key=lambda run: severity.get(run.verdict, 2))


class Group(Struct, frozen=True, kw_only=True):
    """Runs that are the same in everything that was recorded."""

    name: str
    runs: tuple[str, ...]
    verdicts: tuple[str, ...]
    metrics: Mapping[str, Spread]


class Difference(Struct, frozen=True, kw_only=True):
    """What is not the same in all groups; ``values`` by group, empty where a group has none."""

    what: str
    values: Mapping[str, str]


class Effect(Struct, frozen=True, kw_only=True):
    """A metric of one group against that of another; the means of their runs, None where none has a figure.

    ``change`` and ``noise`` are shares of the other's: 95 % of differences between runs of the same are below
    ``noise``, by the spread of repeated ``runs``, or, of one run each, by that of its ``steps``.
    """

    metric: str
    unit: str
    at_end: bool
    """Whether it is the last value of a series, as of a loss."""
    group: str
    against: str
    value: float | None
    other: float | None
    change: float | None = None
    noise: float | None = None
    basis: Literal["runs", "steps"] | None = None
    verdict: Literal["more than noise", "within noise"] | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    """Runs in groups of the same, what differs between the groups, and what that did."""

    groups: tuple[Group, ...]
    differences: tuple[Difference, ...]
    effects: tuple[Effect, ...]


def read(lab: Path, result: Result) -> RecordedRun:
    """The record of a run that has ended; one of an earlier labctl has fewer facts."""
    path = store.directory(lab, result.run_id)
    return RecordedRun(
        result=result,
        facts=_facts(path, result),
        declared={metric.name: metric for metric in store.workload(path).metrics},
        series=series.by_metric(series.read(lab, result.run_id)),
    )


def compare(runs: Sequence[RecordedRun]) -> Comparison:
    """Group the runs by what they ran as, and set each two groups against each other."""
    same: dict[tuple[tuple[str, str], ...], list[RecordedRun]] = {}
    for run in _listed_alike(runs):
        same.setdefault(tuple(sorted(run.facts.items())), []).append(run)
    named = {_letter(number): group for number, group in enumerate(same.values())}
    facts = {name: group[0].facts for name, group in named.items()}
    differences = (
        Difference(what=what, values={name: redact_fact(what, of.get(what, "")) for name, of in facts.items()})
        for what in dict.fromkeys(key for of in facts.values() for key in of)
        if len({of.get(what) for of in facts.values()}) > 1
    )
    return Comparison(
        groups=tuple(_group(name, group) for name, group in named.items()),
        differences=tuple(differences),
        effects=tuple(
            _effect(metric, a, named[a], b, named[b])
            for a, b in combinations(named, 2)
            for metric in _metrics((*named[a], *named[b]))
        ),
    )


def _listed_alike(runs: Sequence[RecordedRun]) -> Sequence[RecordedRun]:
    """The runs without the packages of their images, where an earlier labctl has not recorded those of one."""
    if all(any(key.startswith(PACKAGE) for key in run.facts) for run in runs):
        return runs
    facts = ({key: value for key, value in run.facts.items() if not key.startswith(PACKAGE)} for run in runs)
    return [replace(run, facts=less) for run, less in zip(runs, facts, strict=True)]


def spreads(results: Sequence[Result]) -> dict[str, Spread]:
    """Each metric of repeated runs, of those that have a figure."""
    return {
        name: Spread(unit=_unit(name, results), values=values, median=median(values), cv=_cv(values))
        for name in dict.fromkeys(name for result in results for name in result.metrics)
        if (values := _values(name, results))
    }


def in_words(effect: Effect) -> str:
    """As ``throughput: 24.8 samples/s against 11.2 samples/s, 121 % faster: more than noise (4.1 %)``."""
    name = f"{effect.metric} at the end" if effect.at_end else effect.metric
    value, other = (_quantity(one, effect.unit) for one in (effect.value, effect.other))
    figures = f"{name}: {value} against {other}"
    if effect.change is None:
        return figures
    if not effect.change:
        return f"{figures}, the same"
    more, less = ("faster", "slower") if effect.unit.endswith("/s") else ("higher", "lower")
    judged = effect.verdict or "whether that is noise is not known"
    noise = "" if effect.noise is None else f" ({_per_cent(effect.noise)})"
    return f"{figures}, {_per_cent(effect.change)} {more if effect.change > 0 else less}: {judged}{noise}"


def redact_fact(name: str, value: str) -> str:
    """The value of a fact, redacted if its name sounds secret."""
    return store.REDACTED if value and sounds_secret(name) else value


def source_of_noise(compared: Comparison) -> str:
    """What the noise of a comparison is known from, in a line; empty where nothing is compared."""
    known = {effect.basis for effect in compared.effects if effect.change}
    if "runs" in known:
        return "noise: 95 % of repeated runs are no further apart, by the spread within the groups"
    if "steps" in known:
        return "noise: by the spread from step to step of one run each; `labctl run --repeat 3` shows that of runs"
    return "noise: unknown of one run each; `labctl run --repeat 3` shows it" if known else ""


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "none"
    return f"{f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'} {unit}".rstrip()


def _per_cent(share: float) -> str:
    number = abs(100 * share)
    return f"{number:,.0f} %" if number >= 10 else f"{number:.2g} %"


def _group(name: str, runs: Sequence[RecordedRun]) -> Group:
    results = [run.result for run in runs]
    return Group(
        name=name,
        runs=tuple(result.run_id for result in results),
        verdicts=tuple(result.verdict for result in results),
        metrics=spreads(results),
    )


def _letter(number: int) -> str:
    """A to Z, AA, AB ..."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


# --- what it ran as ------------------------------------------------------------------------------------------


def _facts(path: Path, result: Result) -> dict[str, str]:
    """What a run ran as, from its record: arguments, settings, versions, nodes, DeepSpeed's configuration, code."""
    job, settings, versions, config = (
        _document(path / name) for name in ("job.json", "settings.json", "versions.json", "ds_config.json")
    )
    job = job if isinstance(job, dict) else {}
    found = {
        "workload": result.workload,
        "launcher": result.launcher,
        "launcher arguments": " ".join(store.workload(path).launcher_arguments),
        "nodes": ", ".join(f"{node['name']} slots={node['slots']}" for node in job.get("nodes", ())),
        **_options(job.get("rank_argv", ())),
        **dict(_flat("environment", job.get("environment", {}))),
        **dict(_flat("deepspeed", config)),
        **{row["key"]: row["value"] for row in settings or ()},
        **_origin(versions if isinstance(versions, dict) else {}, _copied(path.parents[1], job)),
        **{f"file {name}": digest[:12] for name, digest in job.get("shared", {}).items()},
        **dict(_code(path / "work", store.workload(path).script)),
        **{name: text for name, text in result.notes.items() if name != store.REACHED},
        "resumed from": result.resumed,
    }
    # On Kubernetes the names of nodes end in the workload and the last part of the id.
    own = result.run_id.split("-", 2)[-1]
    return {key: text.replace(result.run_id, "RUN").replace(own, "RUN") for key, text in found.items() if text}


def _copied(lab: Path, job: dict[str, Any]) -> set[str]:
    """Where a run copied its code from: the files themselves are compared, not the commits there."""
    script = ((job.get("request") or {}).get("options") or {}).get("script")
    return {str(lab / "workloads"), *([str(Path(script).parent.resolve())] if script else ())}


def _origin(versions: dict[str, Any], copied: Collection[str]) -> dict[str, str]:
    """Versions, and what a run was on and of: of devices what they are, not which of them; of clones their commits."""
    found = {**versions}
    packages, code, devices = (found.pop(key, None) or {} for key in ("packages", "code", "devices"))
    # That of the launcher's host is the lab's.
    images = {
        name: image for name, image in (found.pop("images", None) or {}).items() if image != found.get("image_id")
    }
    each = [device for node in devices.values() for device in node]
    kinds = {f"device {key}": {device[key] for device in each} - {""} for key in ("name", "driver", "firmware")}
    return {
        **dict(_flat("", found)),
        **{f"image on {name}": image for name, image in images.items() if image},
        **{key: ", ".join(sorted(values)) for key, values in kinds.items()},
        **{
            f"code {one['path']}": one["commit"][:12] + (" changed" if one["dirty"] else "")
            for one in code
            if one["path"] not in copied
        },
        **{f"{PACKAGE}{name}": version for name, version in packages.items()},
    }


def _document(path: Path) -> Any:
    try:
        return json.loads(store.read_record(path) or "null")
    except (ValueError, RecursionError):
        return None


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """What a document holds, under names such as ``deepspeed.zero_optimization.stage``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), inner)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _options(words: Sequence[str]) -> dict[str, str]:
    """The script's arguments, by option; the last of each counts, as for argparse."""
    option = "arguments"
    found: dict[str, list[str]] = {option: []}
    for word in words[1:]:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found[option] = [value] if equals else []
        else:
            found[option].append(word)
    # An option without a value is something, too.
    return {option: " ".join(given) or "given" for option, given in found.items() if given or option != "arguments"}


def _code(folder: Path, script: str) -> Iterator[tuple[str, str]]:
    for name in files.walk(folder):
        if name == script or name.endswith(CODE):
            content = store.read_record(folder / name)
            yield f"file {name}", "" if content is None else hashlib.sha256(content).hexdigest()[:12]


# --- what it did ---------------------------------------------------------------------------------------------


def _metrics(runs: Sequence[RecordedRun]) -> dict[str, None]:
    return dict.fromkeys(name for run in runs for name in run.result.metrics)


def _values(name: str, results: Sequence[Result]) -> tuple[float, ...]:
    """The figure of each run that has one; what those that broke off had printed counts only where all did."""
    results = [result for result in results if result.verdict != "ERROR"] or results
    found = (result.metrics[name] for result in results if name in result.metrics)
    return tuple(value for metric in found if isinstance(value := metric.get(final(metric)), (int, float)))


def _unit(name: str, results: Sequence[Result]) -> str:
    return next((str(result.metrics[name].get("unit", "")) for result in results if name in result.metrics), "")


def _cv(values: Sequence[float]) -> float | None:
    return stdev(values) / abs(mean(values)) if len(values) > 1 and mean(values) else None


def _effect(metric: str, a: str, runs: Sequence[RecordedRun], b: str, others: Sequence[RecordedRun]) -> Effect:
    results, other_results = ([run.result for run in group] for group in (runs, others))
    values, other_values = _values(metric, results), _values(metric, other_results)
    value, other = (mean(found) if found else None for found in (values, other_values))
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
    """How far two means may be apart by noise, in the metric's unit, and what that is known from."""
    degrees = len(values) + len(others) - 2
    if degrees:
        squares = sum((one - mean(side)) ** 2 for side in (values, others) for one in side)
        return _t95(degrees) * math.sqrt(squares / degrees * (1 / len(values) + 1 / len(others))), "runs"
    errors = [_error(metric, run) for run in (*runs, *other_runs) if metric in run.result.metrics]
    known = [error for error in errors if error is not None]
    return (_t95(2 * BLOCKS - 2) * math.hypot(*known), "steps") if len(known) == 2 else (None, None)


def _t95(degrees: int) -> float:
    return T95[degrees - 1] if degrees <= len(T95) else 2.2


def _error(name: str, run: RecordedRun) -> float | None:
    """The standard error of a run's figure by what it printed on its way; None where that is too little."""
    metric, samples = run.declared.get(name), run.series.get(name, ())
    values = [one.value for one in samples if one.value is not None]
    if metric and metric.reduce in ("last", "first-last") and len(values) > 1:
        return _error_of_one(values[len(values) // 2 :])
    if len(values) > 1:
        return _error_of_mean(values[max(metric.skip if metric else 0, len(values) // BLOCKS) :])
    # A rate that is printed once, at the end, is as sure as the time of a step.
    times = [seconds for _, seconds in step_times(run.series)]
    (figure,) = _values(name, [run.result]) or (None,)
    if figure is None or not _unit(name, [run.result]).endswith("/s") or not times:
        return None
    relative = _error_of_mean(times[max(1, len(times) // BLOCKS) :])
    return None if relative is None else figure * relative / mean(times)


def step_times(found: Mapping[str, Sequence[Sample]]) -> list[tuple[int, float]]:
    """Steps and the seconds that each took, by the series that has the most steps with a time."""
    timed = [
        [(one.step, one.seconds) for one in samples if one.step is not None and one.seconds is not None]
        for samples in found.values()
    ]
    longest = max(timed, key=len, default=[])
    return [(to, (end - begin) / (to - of)) for (of, begin), (to, end) in pairwise(longest) if to > of]


def _error_of_mean(values: Sequence[float]) -> float | None:
    """The standard error of the mean, by the means of consecutive parts."""
    parts = min(BLOCKS, len(values) // 2)
    if parts < 2:
        return None
    length = len(values) // parts
    return stdev(mean(values[at * length : (at + 1) * length]) for at in range(parts)) / math.sqrt(parts)


def _error_of_one(values: Sequence[float]) -> float | None:
    """The standard deviation of single values around their trend, by how much each differs from the one before."""
    steps = [after - before for before, after in pairwise(values)]
    return math.sqrt(mean(step * step for step in steps) / 2) if len(steps) > 1 else None

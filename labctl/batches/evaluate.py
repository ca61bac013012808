"""Judge a batch: jobs against a threshold and the other jobs of their size, nodes by their jobs.

A missing number is never a pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.batches.logs import Measured
from labctl.system import human

Status = Literal["PASS", "FAIL"]
SHOWN = 3
"""Jobs that the message about a node, or about outliers, lists."""
FAR = 0.1
"""Share of the median below which a job is no outlier, however equal the others are."""
DEVIATIONS = 3
"""Standard deviations below the median from which a job is an outlier."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution: 1 / its quantile of 0.75."""
FEWEST = 3
"""Jobs of a size below which none is an outlier."""


class Limits(Struct, frozen=True, kw_only=True):
    """Thresholds of jobs: a minimum, in total or per node, and the largest distance below the median.

    ``within`` is a share of the median, over the jobs of a workload on as many nodes, of their values per node.
    """

    min: float | None = None
    per_node: bool = False
    within: float | None = None

    @property
    def given(self) -> bool:
        """Tell if there is a threshold."""
        return self.min is not None or self.within is not None


class JobResult(Struct, frozen=True, kw_only=True):
    """A job, its statistics and status, over all runs of its hostfile."""

    job: str
    set: str
    workload: str
    nodes: tuple[str, ...]
    size: int | None
    """Number of nodes; None if it is unknown."""
    logs: tuple[str, ...]
    repeats: int
    value: float | None
    """The mean over its runs."""
    per_node: float | None
    vs_median: float | None = None
    """Distance of its value per node from the median of its size, as a share of it: -0.05 is 5 % below."""
    spread: float | None
    """Coefficient of variation over its runs: standard deviation / mean."""
    status: Status = "PASS"
    cause: str | None = None
    message: str = ""
    outlier: bool = False
    """Its runs passed, with a value per node below ``outlier_below`` of its size: a remark, not a failure."""


class SizeResult(Struct, frozen=True, kw_only=True):
    """Statistics of the values per node of a workload's jobs on ``size`` nodes, without failed runs."""

    workload: str
    size: int
    jobs: int
    mean: float
    median: float
    spread: float | None
    """Coefficient of variation: standard deviation / mean."""
    min: float
    max: float
    efficiency: float | None
    """The mean divided by the mean of the smallest size."""
    outlier_below: float | None
    """Value per node below which a job is far from the others; None with fewer than 3 jobs, or a median <= 0."""


class NodeResult(Struct, frozen=True, kw_only=True):
    """A node, its status, and its jobs."""

    node: str
    status: Status
    jobs: tuple[str, ...]
    failed: tuple[str, ...]
    vs_median: float | None
    """The mean of its jobs' distances from their medians."""
    message: str


class Evaluation(Struct, frozen=True, kw_only=True):
    """Result of judging a batch: jobs, sizes, and nodes, the worst first."""

    passed: bool
    judged: bool
    """There was a threshold; without, only jobs that failed by themselves or have no number fail."""
    limits: Limits
    unit: str
    jobs: tuple[JobResult, ...]
    sizes: tuple[SizeResult, ...]
    nodes: tuple[NodeResult, ...]
    remarks: tuple[str, ...]
    """Differences between jobs of a size that ``within`` would judge, as text; with it, what has too few runs."""


def judge(runs: Sequence[Measured], limits: Limits) -> Evaluation:
    """Evaluate the runs of one or more batches together: status of jobs and nodes, statistics by number of nodes."""
    measured = _by_job(runs)
    sizes = _by_size(measured)
    by_size = {(size.workload, size.size): size for size in sizes}
    jobs = tuple(_judged(job, by_size.get((job.workload, job.size or 0)), limits) for job in measured)
    units = {run.unit for run in runs}
    return Evaluation(
        passed=all(job.status == "PASS" for job in jobs),
        judged=limits.given,
        limits=limits,
        unit=units.pop() if len(units) == 1 else "",
        jobs=jobs,
        sizes=sizes,
        nodes=_by_node(jobs),
        remarks=tuple(_remarks(jobs, sizes) if limits.within is None else _too_few(jobs)),
    )


def _by_job(runs: Sequence[Measured]) -> tuple[JobResult, ...]:
    """Combine the runs of each directory, set, workload and job into one, with the first failed run's cause."""
    grouped: dict[tuple[str, ...], list[Measured]] = defaultdict(list)
    for run in runs:
        grouped[run.directory, run.set, run.workload, run.job].append(run)
    # Jobs of several directories or workloads may have the same names.
    alone = len({run.job for run in runs}) == len(grouped)
    return tuple(_combined(repeats, "" if alone else f"{key[0]}/") for key, repeats in grouped.items())


def _combined(runs: list[Measured], prefix: str) -> JobResult:
    """Combine the runs of one job into a result: mean value, spread, logs, and the cause of the first failed run."""
    first = runs[0]
    values = [run.value for run in runs if run.value is not None]
    value = _mean(values) if values else None
    failed = next(((number, run) for number, run in enumerate(runs, 1) if run.cause), None)
    cause, message = None, ""
    if failed:
        number, run = failed
        cause, message = run.cause, f"run {number} of {len(runs)}: {run.message}" if len(runs) > 1 else run.message
    return JobResult(
        job=f"{prefix}{first.log.removesuffix('.log')}" if prefix else first.job,
        set=first.set,
        workload=first.workload,
        nodes=first.names,
        size=first.size,
        logs=tuple(f"{run.directory}/{run.log}" for run in runs),
        repeats=len(runs),
        value=value,
        per_node=value / first.size if value is not None and first.size else None,
        spread=_variation(values),
        cause=cause,
        message=message,
    )


def _judged(job: JobResult, size: SizeResult | None, limits: Limits) -> JobResult:
    """Return a job with status, distance from its size's median and outlier flag; FAIL with a cause if it misses."""
    median = size.median if size else None
    vs_median = job.per_node / median - 1 if job.per_node is not None and median is not None and median > 0 else None
    misses = [(job.cause, job.message)] if job.cause else list(_misses(job, median, limits))
    job = replace(job, vs_median=vs_median, outlier=_is_outlier(job, size))
    if not misses:
        return job
    message = "; ".join(text for _, text in misses)
    return replace(job, status="FAIL", cause=misses[0][0], message=message)


def _is_outlier(job: JobResult, size: SizeResult | None) -> bool:
    """Tell if a job without a failed run has a value per node under its size's outlier bound."""
    if job.cause or job.per_node is None or size is None or size.outlier_below is None:
        return False
    return job.per_node < size.outlier_below


def _misses(job: JobResult, median: float | None, limits: Limits) -> Iterable[tuple[str, str]]:
    """Yield cause and message of each limit missed, or only why none can be compared: no number, or nodes unknown."""
    if not limits.given:
        return
    if job.value is None:
        yield "no-metric", "no number to compare"
        return
    if (limits.per_node or limits.within is not None) and not job.size:
        yield "nodes-unknown", "its number of nodes is unknown: no hostfile at the start of its log, no 2xN in its name"
        return
    yield from _below_minimum(job.value, job.size, limits)
    if limits.within is not None and median is not None and job.per_node is not None:
        yield from _below_median(job.per_node, median, limits.within)


def _below_minimum(value: float, size: int | None, limits: Limits) -> Iterable[tuple[str, str]]:
    """Yield cause and message if a value is below the minimum, times the nodes if that is per node, or is nan."""
    if limits.min is None:
        return
    least, each = limits.min, ""
    if limits.per_node:
        least *= size or 1
        each = f" ({human.exact(limits.min)} on each of {size} nodes)" if size != 1 else ""
    # The opposite of "at least": nan is no pass.
    if not value >= least:
        shown, limit = human.compared(value, least)
        yield "below-min", f"{shown} is below {limit}{each}"


def _below_median(per_node: float, median: float, within: float) -> Iterable[tuple[str, str]]:
    """Yield cause and message if a value per node is more than ``within`` below the median."""
    if not per_node >= median * (1 - within):
        below = f"{human.share(1 - per_node / median)} below" if median > 0 else "below"
        shown, middle = human.compared(per_node, median)
        yield "below-median", f"{shown} per node is {below} the median, {middle}"


def _by_size(jobs: Iterable[JobResult]) -> tuple[SizeResult, ...]:
    """Return statistics per workload and size over jobs that did not fail; efficiency is against the smallest."""
    from statistics import median

    grouped: dict[tuple[str, int], list[float]] = defaultdict(list)
    for job in jobs:
        if job.size and job.per_node is not None and not job.cause:
            grouped[job.workload, job.size].append(job.per_node)
    sizes: list[SizeResult] = []
    for (workload, size), values in sorted(grouped.items()):
        mean = _mean(values)
        smallest = next((result.mean for result in sizes if result.workload == workload), mean)
        sizes.append(
            SizeResult(
                workload=workload,
                size=size,
                jobs=len(values),
                mean=mean,
                median=median(values),
                spread=_variation(values),
                min=min(values),
                max=max(values),
                efficiency=mean / smallest if smallest > 0 else None,
                outlier_below=_outlier_below(values),
            )
        )
    return tuple(sizes)


def _outlier_below(values: Sequence[float]) -> float | None:
    """Return the value below which a job is an outlier; None for fewer than FEWEST jobs or a median <= 0."""
    from statistics import median

    # Median and median absolute deviation hardly move with outliers, as long as these are less than half of the jobs.
    middle = median(values)
    if len(values) < FEWEST or middle <= 0:
        return None
    deviation = MAD_TO_DEVIATION * median(abs(value - middle) for value in values)
    return middle - max(FAR * middle, DEVIATIONS * deviation)


def _remarks(jobs: Sequence[JobResult], sizes: Iterable[SizeResult]) -> Iterable[str]:
    """Yield a line about the outliers, and one for each size whose jobs differ without an outlier."""
    outliers = sorted((job for job in jobs if job.outlier), key=lambda job: job.vs_median or 0)
    if outliers:
        shown = [f"{job.job} ({human.share(1 + (job.vs_median or 0))} of the median)" for job in outliers]
        are, their = ("is", "its") if len(outliers) == 1 else ("are", "their")
        far = f"{len(outliers):,} of {human.count(len(jobs), 'job')} {are} far below the others of {their} size"
        yield f"{far}: {human.listed(shown, SHOWN)}"
    clear = {(job.workload, job.size) for job in outliers}
    for size in sizes:
        if size.min < (1 - FAR) * size.median and (size.workload, size.size) not in clear:
            differ = f"the {size.jobs:,} jobs on {human.count(size.size, 'node')} differ, and none stands out"
            yield f"{differ}: {human.span((size.min, size.max))} per node"


def _too_few(jobs: Iterable[JobResult]) -> Iterable[str]:
    """Yield a line about jobs below the median that ran fewer than FEWEST times; nothing if there are none."""
    slow = [job.job for job in jobs if job.cause == "below-median" and job.repeats < FEWEST]
    if slow:
        yield (
            f"{human.listed(slow, SHOWN)}: fewer than {FEWEST} runs do not tell a slow node from noise; "
            f"`labctl batch ... --repeat {FEWEST}`, or `labctl bisect`, which repeats until it is certain"
        )


def _by_node(jobs: Iterable[JobResult]) -> tuple[NodeResult, ...]:
    """Return a result for each node of finished jobs: failed nodes first, then by distance below the median."""
    grouped: dict[str, list[JobResult]] = defaultdict(list)
    for job in jobs:
        if job.cause != "not-finished":
            for node in job.nodes:
                grouped[node].append(job)
    nodes = [_node(node, took_part) for node, took_part in grouped.items()]
    return tuple(sorted(nodes, key=lambda node: (node.status == "PASS", _distance(node), node.node)))


def _distance(node: NodeResult) -> float:
    """Return the distance from the median, to sort by: a node without a number comes first."""
    return -1 if node.vs_median is None else node.vs_median


def _node(node: str, jobs: list[JobResult]) -> NodeResult:
    """Return a node's result, FAIL if all its jobs failed or all those it ran alone, with its mean distance."""
    failed = [job for job in jobs if job.status == "FAIL"]
    alone = [job for job in jobs if job.size == 1]
    distances = [job.vs_median for job in jobs if job.vs_median is not None]
    return NodeResult(
        node=node,
        status="FAIL" if _all_failed(jobs) or _all_failed(alone) else "PASS",
        jobs=_names(jobs),
        failed=_names(failed),
        vs_median=_mean(distances) if distances else None,
        message=_failures(failed, len(jobs)) if failed else "",
    )


def _all_failed(jobs: Sequence[JobResult]) -> bool:
    """Tell if there are jobs, and all of them failed."""
    return bool(jobs) and all(job.status == "FAIL" for job in jobs)


def _names(jobs: Iterable[JobResult]) -> tuple[str, ...]:
    return tuple(job.job for job in jobs)


def _failures(failed: Sequence[JobResult], total: int) -> str:
    """Render the failed jobs of a node, with the cause of the first few."""
    shown = [f"{job.job} ({_evidence(job)})" for job in failed]
    return f"{len(failed)} of {total} jobs failed: {human.listed(shown, SHOWN)}"


def _evidence(job: JobResult) -> str:
    """Render cause, distance from the median and number of nodes of a job that failed."""
    distance = "" if job.vs_median is None else f", {human.share(job.vs_median, '+')} of the median"
    others = f", on {job.size} nodes" if len(job.nodes) > 1 else ""
    return f"{job.cause}{distance}{others}"


def _mean(values: Sequence[float]) -> float:
    """Return the mean, kept between the lowest and highest value against rounding."""
    # By rounding, the mean of equal values may lie below a threshold that all of them reach.
    return min(max(sum(values) / len(values), min(values)), max(values))


def _variation(values: Sequence[float]) -> float | None:
    """Return standard deviation / |mean|, of the sample; None for fewer than two values or a mean of 0."""
    if len(values) < 2 or not (mean := _mean(values)):
        return None
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5 / abs(mean))

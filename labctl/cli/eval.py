"""eval."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import Json, answering
from labctl.cli.output import quantity, table
from labctl.errors import ConfigError

if TYPE_CHECKING:
    from labctl.batches.evaluate import Evaluation, JobResult

CRITERIA_NOT_MET = 5
# Rows of jobs, and nodes, that the text lists.
JOBS = 40
NODES = 8
# Nodes that are listed where none failed.
LOWEST = 3


def eval_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of logs, or of batches, judged together.")
    ],
    min_: Annotated[float | None, typer.Option("--min", help="What each job must reach.")] = None,
    per_node: Annotated[bool, typer.Option("--per-node", help="--min is for each of a job's nodes.")] = False,
    within: Annotated[
        str, typer.Option(metavar="SHARE", help="How far below the median of its size a job may be, such as 5%.")
    ] = "",
    pattern: Annotated[
        str, typer.Option(metavar="REGEX", help="Find the number by this expression, which has one group.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one line per job.")] = None,
    lambda_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what Lambda's eval_batch.py writes.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    json: Json = False,
) -> None:
    from labctl.batches.evaluate import Limits

    with answering(as_json=json) as output:
        if min_ is None and (per_node or lambda_csv):
            option = "--per-node" if per_node else "--lambda-csv"
            raise ConfigError(f"{option} needs --min", hint=f"--min 600 {option}")
        if min_ is not None and not math.isfinite(min_):
            raise ConfigError(f"--min {min_}: not a finite number", hint="--min 600")
        limits = Limits(min=min_, per_node=per_node, within=share(within) if within else None)
        evaluation = flows.evaluate(directories, limits, pattern=pattern, csv=csv, lambda_csv=lambda_csv, junit=junit)
        output.answer(evaluation, text(evaluation))
        sys.exit(0 if evaluation.passed else CRITERIA_NOT_MET)


def share(written: str) -> float:
    """The share in ``5%``. ConfigError."""
    try:
        per_cent = float(written.removesuffix("%"))
    except ValueError:
        per_cent = math.nan
    if not (written.endswith("%") and 0 <= per_cent <= 100):
        raise ConfigError(f"--within {written}: not a share", hint="write it in per cent: --within 5%")
    return per_cent / 100


def text(evaluation: Evaluation) -> str:
    """The jobs, failed ones first; statistics of each size; the worst nodes; how many passed."""
    parts = [jobs_table(evaluation.jobs), sizes_table(evaluation), worst_nodes(evaluation), verdict(evaluation)]
    return "\n\n".join(filter(None, parts))


def jobs_table(jobs: tuple[JobResult, ...]) -> str:
    repeated = any(job.repeats > 1 for job in jobs)
    head = ("JOB", "NODES", "VALUE", *(["SPREAD"] if repeated else []), "PER NODE", "VS MEDIAN", "STATUS", "CAUSE")
    ordered = sorted(jobs, key=lambda job: job.status == "PASS")
    rows = [
        (
            job.job,
            job.size or "-",
            shown(job.value),
            *([per_cent(job.spread)] if repeated else []),
            shown(job.per_node),
            per_cent(job.vs_median, "+"),
            job.status,
            f"{job.cause}: {job.message}" if job.cause else "",
        )
        for job in ordered[:JOBS]
    ]
    rest = ordered[JOBS:]
    failed = sum(job.status == "FAIL" for job in rest)
    more = f"\n... and {len(rest):,} more jobs, {failed:,} of them failed: --csv and --json list all" if rest else ""
    return table(head, rows) + more


def sizes_table(evaluation: Evaluation) -> str:
    if not evaluation.sizes:
        return ""
    named = len({size.workload for size in evaluation.sizes}) > 1
    head = ("NODES", "JOBS", "MEAN PER NODE", "MEDIAN", "SPREAD", "MIN", "MAX", "EFFICIENCY")
    rows = [
        (
            *([size.workload or "-"] if named else []),
            size.size,
            size.jobs,
            shown(size.mean),
            shown(size.median),
            per_cent(size.spread),
            shown(size.min),
            shown(size.max),
            per_cent(size.efficiency),
        )
        for size in evaluation.sizes
    ]
    unit = f"\nvalues in {evaluation.unit}" if evaluation.unit else ""
    return table((*(["WORKLOAD"] if named else []), *head), rows) + unit


def worst_nodes(evaluation: Evaluation) -> str:
    """The nodes that failed, with the evidence; or the lowest, where there are some to compare."""
    nodes = evaluation.nodes
    failed = [node for node in nodes if node.status == "FAIL"]
    if len(nodes) < 2 and not failed:
        return ""
    count = min(NODES, max(LOWEST, len(failed)))
    rows = [(node.node, per_cent(node.vs_median, "+"), node.status, node.message) for node in nodes[:count]]
    more = f"\n... and {len(failed) - count:,} more failed" if len(failed) > count else ""
    return table(("WORST NODES", "VS MEDIAN", "STATUS", "EVIDENCE"), rows) + more


def verdict(evaluation: Evaluation) -> str:
    kinds = (("jobs", evaluation.jobs), ("nodes", evaluation.nodes))
    counts = [
        f"{sum(one.status == 'PASS' for one in results):,} of {len(results):,} {kind} passed"
        for kind, results in kinds
        if results
    ]
    return f"{'PASS' if evaluation.passed else 'FAIL'}: {', '.join(counts)}"


def shown(value: float | None) -> str:
    return "-" if value is None else quantity(value)


def per_cent(value: float | None, sign: str = "") -> str:
    # Adding 0 takes the sign from -0.0.
    return "-" if value is None else f"{round(100 * value, 1) + 0:{sign}.1f} %"

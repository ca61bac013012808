"""Command eval."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import Json, answering
from labctl.cli.output import table
from labctl.errors import ConfigError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.batches.evaluate import Evaluation, JobResult, NodeResult

CRITERIA_NOT_MET = 5
JOBS = 40
"""Jobs that the text lists."""
NODES = 8
"""Nodes that the text lists at most."""
LOWEST = 3
"""Nodes that the text lists if none failed."""


def eval_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of logs, or of batches, judged together.")
    ],
    min_: Annotated[float | None, typer.Option("--min", help="Minimum value of each job.")] = None,
    per_node: Annotated[bool, typer.Option("--per-node", help="--min is per node of a job.")] = False,
    within: Annotated[
        str,
        typer.Option(metavar="SHARE", help="Largest distance below the median of jobs of the same size, such as 5%."),
    ] = "",
    pattern: Annotated[
        str, typer.Option(metavar="REGEX", help="Regular expression of the number, with one group.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one line per job.")] = None,
    lambda_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the CSV of Lambda's eval_batch.py.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    json: Json = False,
) -> None:
    """`labctl eval`: judge the logs of a batch."""
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
    """Parse a share such as ``5%`` into a fraction. ConfigError if it is not from 0% to 100%."""
    try:
        per_cent = float(written.removesuffix("%"))
    except ValueError:
        per_cent = math.nan
    if not (written.endswith("%") and 0 <= per_cent <= 100):
        raise ConfigError(f"--within {written}: not a share", hint="write it in per cent: --within 5%")
    return per_cent / 100


def text(evaluation: Evaluation) -> str:
    """Render an evaluation: jobs, failed ones first; statistics of each size; the worst nodes; totals."""
    parts = [jobs_table(evaluation.jobs), sizes_table(evaluation), worst_nodes(evaluation), verdict(evaluation)]
    return "\n\n".join(filter(None, parts))


def jobs_table(jobs: tuple[JobResult, ...]) -> str:
    """Render a table of jobs, failed ones first."""
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
    left = f"{human.more(len(rest), 'jobs')}, {failed:,} of them failed: --csv and --json list all"
    more = f"\n... {left}" if rest else ""
    return table(head, rows) + more


def sizes_table(evaluation: Evaluation) -> str:
    """Render the statistics of each size; empty without any."""
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
    return table(("WORKLOAD", *head) if named else head, rows) + unit


def worst_nodes(evaluation: Evaluation) -> str:
    """Render the nodes that failed, with evidence, or the lowest ones; empty if there is nothing to compare."""
    nodes = evaluation.nodes
    failed = [node for node in nodes if node.status == "FAIL"]
    if len(nodes) < 2 and not failed:
        return ""
    count = min(NODES, max(LOWEST, len(failed)))
    rows = [(node.node, per_cent(node.vs_median, "+"), node.status, node.message) for node in nodes[:count]]
    more = f"\n... {human.more(len(failed) - count, 'failed')}" if len(failed) > count else ""
    return table(("WORST NODES", "VS MEDIAN", "STATUS", "EVIDENCE"), rows) + more


def verdict(evaluation: Evaluation) -> str:
    """Render the verdict, and the jobs and nodes that passed."""
    counts = filter(None, (passed("jobs", evaluation.jobs), passed("nodes", evaluation.nodes)))
    return f"{'PASS' if evaluation.passed else 'FAIL'}: {', '.join(counts)}"


def passed(kind: str, results: Sequence[JobResult | NodeResult]) -> str:
    """Render the number of results that passed; empty without any."""
    count = sum(result.status == "PASS" for result in results)
    return f"{count:,} of {len(results):,} {kind} passed" if results else ""


def shown(value: float | None) -> str:
    return "-" if value is None else human.number(value)


def per_cent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else human.share(value, sign)

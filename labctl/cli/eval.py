"""Command eval."""

from __future__ import annotations

import math
import re
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
EVIDENCE = 2
"""Failed jobs that the text lists of a node."""
WIDTH = 100
"""Columns of a line of the text, which the last cell of a table is cut to."""
SHORTEST = 20
"""Columns that the last cell keeps."""
NO_THRESHOLD = "no threshold; --within 10% compares jobs of a size"


def eval_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of logs, or of batches, judged together.")
    ],
    min_: Annotated[float | None, typer.Option("--min", metavar="X", help="Minimum value of each job.")] = None,
    per_node: Annotated[bool, typer.Option("--per-node", help="--min is per node of a job.")] = False,
    within: Annotated[
        str,
        typer.Option(metavar="PERCENT", help="Allowed drop below the median of jobs of the same size, such as 5%."),
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
    """`labctl eval`: judge the logs of a batch; exit with an error if it did not pass."""
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
    """Parse `--within`, such as ``5%``, into a fraction. ConfigError if it is not from 0% to 100%."""
    try:
        per_cent = float(written.removesuffix("%"))
    except ValueError:
        per_cent = math.nan
    if not (written.endswith("%") and 0 <= per_cent <= 100):
        raise ConfigError(f"--within {written}: not a share", hint="write it in per cent: --within 5%")
    return per_cent / 100


def text(evaluation: Evaluation) -> str:
    """Render an evaluation: tables of jobs, sizes and worst nodes, then remarks and the verdict."""
    end = "\n".join((*evaluation.remarks, verdict(evaluation)))
    parts = [jobs_table(evaluation), sizes_table(evaluation), worst_nodes(evaluation), end]
    return "\n\n".join(filter(None, parts))


def jobs_table(evaluation: Evaluation) -> str:
    """Render a table of the first JOBS jobs, failed ones and outliers first, and a line on how many are left out."""
    jobs = evaluation.jobs
    repeated = any(job.repeats > 1 for job in jobs)
    head = ("JOB", "NODES", "VALUE", *(["SPREAD"] if repeated else []), "PER NODE", "VS MEDIAN", "STATUS", "CAUSE")
    ordered = sorted(jobs, key=lambda job: (job.status == "PASS", not job.outlier))
    rows = [
        (
            job.job,
            job.size or "-",
            shown(job.value),
            *([per_cent(job.spread)] if repeated else []),
            shown(job.per_node),
            per_cent(job.vs_median, "+"),
            status(job, evaluation),
            cause(job),
        )
        for job in ordered[:JOBS]
    ]
    rest = ordered[JOBS:]
    failed = sum(job.status == "FAIL" for job in rest)
    left = f"{human.more(len(rest), 'jobs')}, {failed:,} of them failed: --csv and --json list all"
    more = f"\n... {left}" if rest else ""
    return fitted(head, rows) + more


def status(result: JobResult | NodeResult, evaluation: Evaluation) -> str:
    """Return a result's status, or ``-`` if it passed and no threshold was given."""
    return result.status if evaluation.judged or result.status == "FAIL" else "-"


def cause(job: JobResult) -> str:
    """Render why a job failed, ``far below the others`` for an outlier that passed, else empty."""
    if job.cause == "below-median":
        return job.cause
    if job.cause == "below-min":
        # The first miss, without the minimum of each node.
        return f"{job.cause}: {re.split('; | [(]', job.message)[0]}"
    if job.cause:
        return f"{job.cause}: {job.message}"
    return "far below the others" if job.outlier else ""


def fitted(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render a table, with the last column cut so that lines are about WIDTH long."""
    others = table(head[:-1], [row[:-1] for row in rows])
    room = max(SHORTEST, WIDTH - 2 - max(map(len, others.split("\n"))))
    return table(head, [(*row[:-1], human.shortened(str(row[-1]), room)) for row in rows])


def sizes_table(evaluation: Evaluation) -> str:
    """Render statistics of each size, with efficiency if a workload has several; empty without sizes."""
    if not evaluation.sizes:
        return ""
    workloads = {size.workload for size in evaluation.sizes}
    named, scaled = len(workloads) > 1, len(evaluation.sizes) > len(workloads)
    head = ("NODES", "JOBS", "MEAN PER NODE", "MEDIAN", "SPREAD", "MIN", "MAX", *(["EFFICIENCY"] if scaled else []))
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
            *([per_cent(size.efficiency)] if scaled else []),
        )
        for size in evaluation.sizes
    ]
    unit = f"\nvalues in {evaluation.unit}" if evaluation.unit else ""
    return table(("WORKLOAD", *head) if named else head, rows) + unit


def worst_nodes(evaluation: Evaluation) -> str:
    """Render a table of the LOWEST worst nodes, or all failed up to NODES; empty for one node that passed."""
    nodes = evaluation.nodes
    failed = [node for node in nodes if node.status == "FAIL"]
    if len(nodes) < 2 and not failed:
        return ""
    count = min(NODES, max(LOWEST, len(failed)))
    rows = [
        (node.node, per_cent(node.vs_median, "+"), status(node, evaluation), evidence(node)) for node in nodes[:count]
    ]
    more = f"\n... {human.more(len(failed) - count, 'failed')}" if len(failed) > count else ""
    return fitted(("WORST NODES", "VS MEDIAN", "STATUS", "EVIDENCE"), rows) + more


def evidence(node: NodeResult) -> str:
    """Render how many of a node's jobs failed, and which; empty if none did."""
    if not node.failed:
        return ""
    return f"{len(node.failed)} of {len(node.jobs)} jobs failed: {human.listed(node.failed, EVIDENCE)}"


def verdict(evaluation: Evaluation) -> str:
    """Render PASS or FAIL with how many jobs and nodes passed, or that nothing was judged."""
    if not evaluation.judged:
        failed = sum(job.status == "FAIL" for job in evaluation.jobs)
        of_jobs = f"FAIL: {failed:,} of {human.count(len(evaluation.jobs), 'job')} failed; nothing else judged"
        return f"{of_jobs if failed else 'nothing judged'}: {NO_THRESHOLD}"
    counts = filter(None, (passed("jobs", evaluation.jobs), passed("nodes", evaluation.nodes)))
    return f"{'PASS' if evaluation.passed else 'FAIL'}: {', '.join(counts)}"


def passed(kind: str, results: Sequence[JobResult | NodeResult]) -> str:
    """Render ``N of M KIND passed``; empty without results."""
    count = sum(result.status == "PASS" for result in results)
    return f"{count:,} of {len(results):,} {kind} passed" if results else ""


def shown(value: float | None) -> str:
    return "-" if value is None else human.number(value)


def per_cent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else human.share(value, sign)

"""Commands hostfiles, batch and bisect."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.command import ARGUMENTS
from labctl.cli.common import (
    HERE,
    Directory,
    Json,
    Launcher,
    Setting,
    Timeout,
    Workload,
    answering,
    context,
)
from labctl.cli.output import Output, can_redraw, table
from labctl.cli.run import Expect, Rehearse, SetArgument, options_of
from labctl.system import human

if TYPE_CHECKING:
    from labctl.batches.batch import BatchReport
    from labctl.batches.bisect import Run
    from labctl.batches.record import Batch, BatchJob
    from labctl.batches.search import BisectReport

ROWS = 20
"""Rows of the live table."""
COLUMNS = 40
"""Columns of the timeline."""


def hostfiles_command(
    size: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes per hostfile.")],
    nodes: Annotated[
        Path | None,
        typer.Argument(
            metavar="[NODES.txt]",
            show_default=False,
            help="A machine per line: name, IP or worker-N (default: the nodes of the lab or of its cluster).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory to write (default: hostfiles/4nodes_2xN; 2xN is two nodes, all their slots).",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="N", help="Slots per node (default: as the lab or list has them, or 8)."),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            autocompletion=complete.pattern,
            help="sequential, pairs, ring, all-pairs or random.",
        ),
    ] = "sequential",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random pattern.")] = 0,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl hostfiles`: write a set of hostfiles."""
    from labctl.batches.hostfiles import pattern_named

    with answering(as_json=json) as output:
        lab = context(directory, output, setting)
        chosen = pattern_named(pattern)
        made = flows.hostfiles(lab, nodes, size=size, pattern=chosen, slots=slots or 0, out=out, seed=seed)
        count = len(made.hostfiles)
        groups = f"{human.count(count, 'hostfile')} of {human.count(size, 'node')}"
        text = f"{os.path.relpath(made.directory)}: {groups}"
        if made.left_over:
            text += f"\nleft over: {', '.join(made.left_over)} (in no hostfile)"
        if made.drained:
            text += f"\ndrained: {', '.join(made.drained)} (in no hostfile)"
        output.answer(made, text)


def batch_command(
    ctx: typer.Context,
    name: Workload,
    hostfiles: Annotated[
        list[Path],
        typer.Argument(
            metavar="HOSTFILES_DIR...", autocompletion=complete.hostfile_set, help="Directories of hostfile_*."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the logs and the record (default: output/...).")
    ] = None,
    timeout: Timeout = "",
    parallel: Annotated[
        int, typer.Option(min=0, metavar="N", help="Maximum number of jobs at a time (default: no limit).")
    ] = 0,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Run each hostfile N times.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the batch in the output directory.")] = False,
    rehearse: Rehearse = False,
    expect: Expect = None,
    set_: SetArgument = None,
    launcher: Launcher = "",
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl batch`: run a workload on each hostfile, and print a timeline; exit with the batch's code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with answering(as_json=json, stopped="--resume goes on with the batch") as output:
        options = options_of(
            timeout=timeout,
            expect=expect,
            set_=set_,
            rehearse=rehearse,
            words=ctx.meta[ARGUMENTS],
            launcher=launcher,
        )
        lab = context(directory, output, setting)
        output.begin(f"preparing {name} and looking at the nodes")
        with Display(output) as display:
            report = flows.batch(
                lab,
                name,
                tuple(hostfiles),
                options,
                display.show,
                out=out,
                parallel=parallel,
                repeat=repeat,
                resume=resume,
            )
        output.answer(report, report_text(report))
        sys.exit(report.exit_code)


def bisect_command(
    ctx: typer.Context,
    name: Workload,
    nodes: Annotated[
        str,
        typer.Option(metavar="NODES", autocompletion=complete.node, help="Test only these, such as worker-0,worker-1."),
    ] = "",
    within: Annotated[str, typer.Option(metavar="PERCENT", help="Allowed drop of a run below the median.")] = "10%",
    min_: Annotated[float | None, typer.Option("--min", metavar="X", help="Minimum throughput per node.")] = None,
    links: Annotated[bool, typer.Option("--links", help="Look for bad links between nodes of one host, too.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="Add bad nodes to drained.txt.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of hostfiles and logs (default: output/...).")
    ] = None,
    timeout: Timeout = "",
    rehearse: Rehearse = False,
    set_: SetArgument = None,
    launcher: Launcher = "",
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl bisect`: find bad nodes and links; exit with an error if there are any, or unsure nodes."""
    from labctl.cli.eval import share

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with answering(as_json=json, stopped="re-run to start over") as output:
        options = options_of(
            timeout=timeout, set_=set_, rehearse=rehearse, words=ctx.meta[ARGUMENTS], launcher=launcher
        )
        lab = context(directory, output, setting)
        output.begin(f"preparing {name} and looking at the nodes")
        with Display(output) as display:
            report = flows.bisect(
                lab,
                name,
                options,
                display.show,
                nodes=tuple(filter(None, nodes.split(","))),
                within=share(within),
                minimum=min_,
                out=out,
                drain=drain,
                links=links,
            )
        output.answer(report, bisect_text(report))
        sys.exit(report.exit_code)


def bisect_text(report: BisectReport) -> str:
    """Render bad nodes and links with their runs, unsure nodes, totals, drained nodes and the report's directory."""
    from labctl.batches.bisect import shown_by

    diagnosis = report.diagnosis
    unit = f" {report.unit} per node" if report.unit else " per node"
    lines = []
    for bad in diagnosis.bad:
        lines += [f"{bad.node}: {bad.kind}, {shown_by(bad)}", *(f"  {run_text(run, unit)}" for run in bad.runs)]
    for link in diagnosis.links:
        lines.append(f"link {' - '.join(link.nodes)}: {link.kind}, {shown_by(link)}")
        lines += [f"  {run_text(run, unit)}" for run in (*link.runs, *link.apart)]
    lines += [f"only as a whole: {run_text(run, unit)}" for run in diagnosis.unexplained]
    if diagnosis.unsure:
        lines.append(f"unsure: {', '.join(diagnosis.unsure)}")
    if diagnosis.note:
        lines.append(diagnosis.note)
    count = f"{human.count(len(diagnosis.good), 'node')} good"
    tried = f"{human.count(diagnosis.runs, 'run')} in {human.count(diagnosis.rounds, 'round')}"
    links = human.count(len(diagnosis.links), "bad link")
    lines.append(f"{count}, {len(diagnosis.bad)} bad, {links}: {tried}")
    if report.drained:
        lines.append(f"drained: {', '.join(report.drained)} (drained.txt)")
    return "\n".join((*lines, f"files {os.path.relpath(report.directory)}"))


def run_text(run: Run, unit: str) -> str:
    """Render a run of a search in a line: nodes, value and share of the median, or why it failed."""
    nodes = ", ".join(run.nodes)
    if run.value is None:
        return f"{nodes}: failed ({run.why})"
    of_median = "" if run.figure is None else f", {human.share(run.figure)} of the median"
    return f"{nodes}: {human.number(run.value)}{unit}{of_median}"


class Display:
    """Context manager that shows a running batch: a live table where that can be redrawn, else a line per change."""

    def __init__(self, output: Output) -> None:
        """Start without a table; lines go to ``output`` where no table can be redrawn."""
        self._output = output
        self._states: dict[str, str] = {}
        self._batch: Batch | None = None
        self._live: Any = None

    def __enter__(self) -> Display:
        """Start a live table, which redraws twice a second, if stderr can be redrawn."""
        if can_redraw(sys.stderr):
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

            def table() -> Text:
                return Text(live_text(self._batch, time.time()) if self._batch else "")

            console = Console(stderr=True, highlight=False)
            self._live = Live(get_renderable=table, console=console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the live table, if there is one."""
        if self._live:
            self._live.stop()

    def show(self, batch: Batch) -> None:
        """Keep a changed batch for the live table; without it, print a line for each job whose state changed."""
        self._batch = batch
        if self._live:
            return
        for job in batch.jobs:
            if job.state != "waiting" and self._states.get(job.log) != job.state:
                self._output.tell(line(job, batch))
            self._states[job.log] = job.state


def line(job: BatchJob, batch: Batch) -> str:
    """Render a job in a line: its name, nodes, and its state or result with value or error."""
    return f"{named(job)}: {state(job, batch)}"


def named(job: BatchJob) -> str:
    """Render ``JOB (REPEAT) on NODES``, without the repeat if it is the first."""
    turn = f" ({job.repeat})" if job.repeat > 1 else ""
    return f"{job.job}{turn} on {', '.join(job.nodes)}"


def state(job: BatchJob, batch: Batch) -> str:
    """Render a job's state with its run, or its verdict with cause and either value and duration or message."""
    if job.state != "done":
        return f"{job.state}, run {job.run_id}" if job.run_id else job.state
    cause = f" ({job.cause})" if job.cause else ""
    number = f", {batch.metric} {human.number(job.value)} {batch.unit}".rstrip() if job.value is not None else ""
    why = f": {job.message}" if job.verdict != "PASS" else f"{number}, {human.duration(duration(job))}"
    return f"{job.verdict}{cause}{why}"


def duration(job: BatchJob) -> float:
    """Return the seconds between start and end of a job; a missing one counts as 0."""
    return (job.ended or 0) - (job.began or 0)


def live_text(batch: Batch, now: float) -> str:
    """Render how many jobs are done, running and failed, and a table of the running and failed ones."""
    running = [job for job in batch.jobs if job.state == "running"]
    failed = [job for job in batch.jobs if job.state == "done" and job.verdict != "PASS"]
    done = sum(job.state == "done" for job in batch.jobs)
    rows = [(job, now - (job.began or now), "running") for job in running]
    rows += [(job, duration(job), f"{job.verdict} ({job.cause})") for job in failed]
    cells = [(job.job, ",".join(job.nodes), human.duration(seconds), what) for job, seconds, what in rows[:ROWS]]
    more = f"\n... {human.more(len(rows) - ROWS)}" if len(rows) > ROWS else ""
    head = f"{done} of {len(batch.jobs)} jobs done, {len(running)} running, {len(failed)} failed"
    return f"{head}\n{table(('JOB', 'NODES', 'TIME', 'STATE'), cells)}{more}"


def report_text(report: BatchReport) -> str:
    """Render a batch: timeline of jobs, failures, totals, remarks, and the `labctl eval` command."""
    batch = report.batch
    first = min((job.began or 0 for job in batch.jobs if job.began), default=0)
    scale = COLUMNS / max(report.seconds, 0.001)
    time_title = f"TIME (0 to {human.duration(report.seconds)})"
    metric = (batch.metric or "VALUE").upper()
    head = ("JOB", "REPEAT", "NODES", time_title, "SECONDS", metric, "VERDICT", "CAUSE")
    rows = [job_row(job, first, scale) for job in batch.jobs]
    failures = "".join(f"\n{named(job)}: {job.message}" for job in batch.jobs if job.verdict != "PASS")
    total = f"{report.passed} passed, {report.failed} failed in {human.duration(report.seconds)}"
    total += f"; the busiest node was in use for {human.duration(report.ideal)}"
    files = f"files {os.path.relpath(report.directory)}"
    return "\n".join((f"{table(head, rows)}{failures}", total, files, *report.remarks, f"next: {eval_line(report)}"))


def eval_line(report: BatchReport) -> str:
    """Return the `labctl eval` command for a batch, with `--within 10%` if several jobs have the same size."""
    sizes = Counter(len(job.nodes) for job in report.batch.jobs if job.repeat == 1)
    within = " --within 10%" if report.batch.metric and max(sizes.values()) > 1 else ""
    return f"labctl eval {shlex.quote(os.path.relpath(report.directory))}{within}"


def job_row(job: BatchJob, first: float, scale: float) -> tuple[object, ...]:
    """Return a table row of a job; its timeline bar has ``scale`` columns per second since ``first``."""
    start = round(((job.began or first) - first) * scale)
    width = max(1, round(duration(job) * scale))
    bar = ("." * start + "#" * width).ljust(COLUMNS, ".")[:COLUMNS]
    value = "-" if job.value is None else human.number(job.value)
    nodes = ",".join(job.nodes)
    return job.job, job.repeat, nodes, bar, human.number(duration(job)), value, job.verdict, job.cause or "-"

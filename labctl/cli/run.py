"""Commands workloads, run, attach, stop, stacks and show."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict, replace

from labctl import flows
from labctl.cli import complete
from labctl.cli.command import ARGUMENTS
from labctl.cli.common import (
    HERE,
    Directory,
    DryRun,
    Json,
    Launcher,
    Quiet,
    Run,
    Setting,
    Timeout,
    Workload,
    answer_plan,
    answering,
    confirmation,
    context,
)
from labctl.cli.output import table, width_of, wrapped
from labctl.errors import ConfigError, HostError, Interrupted
from labctl.model import COMPLETED, Result
from labctl.system import human

if TYPE_CHECKING:
    from labctl.jobs.request import RunOptions
    from labctl.records.store import RunSummary
    from labctl.runs.spread import RepeatedRuns, Spread

WHOLE = ("command", "next", "debug bundle", "files")
"""Rows of a result that are commands or paths."""
SHOWN, FOUND, CHANGES = 8, 3, 6
"""Ranks, lines with metrics that were found, and changes of nodes that the text of a result has at most."""


def workloads_command(directory: Directory = HERE, json: Json = False) -> None:
    """`labctl workloads`: list workloads, and those that cannot be loaded; exit with an error if any cannot."""
    with answering(as_json=json) as output:
        listed = flows.workloads(context(directory, output))
        for error in listed.errors:
            output.error(error) if not json else None
        rows = [(workload.name, workload.launcher, workload.description) for workload in listed.workloads]
        output.answer(listed, table(("WORKLOAD", "LAUNCHER", "DESCRIPTION"), rows))
        if listed.errors:
            sys.exit(ConfigError.exit_code)


Rehearse = Annotated[bool, typer.Option("--rehearse", help="Smoke test: tiny model, a few steps.")]
Expect = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CRITERION",
        help="Criterion, such as 'throughput>=600', 'loss<2.5', 'throughput=600..700' or 'throughput>=-5% of RUN'"
        " (repeatable).",
    ),
]
MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME=REGEX",
        help="Declare a metric by the pattern of its line, with one group, the number (repeatable).",
    ),
]
SetArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY[=VALUE]",
        help="Set a script argument, or with deepspeed.KEY a value of the DeepSpeed configuration (repeatable).",
    ),
]


def run_command(
    ctx: typer.Context,
    name: Workload = "",
    directory: Directory = HERE,
    rehearse: Rehearse = False,
    timeout: Timeout = "",
    expect: Expect = None,
    metric: MetricOption = None,
    set_: SetArgument = None,
    launcher: Launcher = "",
    launcher_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="Extra launcher argument (repeatable).")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this script, on its own or instead of the workload's.")
    ] = None,
    module: Annotated[
        str, typer.Option("--module", "-m", metavar="MODULE", help="Run this Python module, as `python -m` does.")
    ] = "",
    project: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy this folder to the nodes (default: the repository, else the folder)."),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install the project's Python package, editable, before the run.")
    ] = False,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Start the program for each rank.")] = False,
    per_node: Annotated[
        bool, typer.Option("--per-node", help="Start it once on each node, as `torchrun` and `accelerate launch`.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Start the program once, in the launcher.")] = False,
    local_rank: Annotated[
        bool, typer.Option("--local-rank", help="Pass --local_rank=N to the script, as DeepSpeed's launcher does.")
    ] = False,
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this DeepSpeed configuration.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Nodes and slots to use (default: all).")
    ] = None,
    include: Annotated[
        str, typer.Option(metavar="NODES", help="Use only these nodes and slots, such as worker-0@worker-1:0,2.")
    ] = "",
    exclude: Annotated[str, typer.Option(metavar="NODES", help="Use all but these.")] = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Exit once the run is launched; `labctl attach` follows it.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no other run uses the nodes.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            autocompletion=complete.run,
            help="Continue from the last complete checkpoint of this run, such as `latest`.",
        ),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restart up to N times after failures where that may help.")
    ] = 0,
    repeat: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Run it N times in sequence, and print mean and spread of the metrics."),
    ] = 1,
    setting: Setting = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """`labctl run`: run a workload, and exit with the code of its result; or detach, or print the plan."""
    stopped = "re-run to start over, or `labctl down` to remove the lab"
    with answering(as_json=json, stopped=stopped, quiet=quiet) as output:
        if resume == "":
            raise ConfigError("--resume names no run", hint="--resume latest, or an id of `labctl runs`")
        words, program = ctx.meta[ARGUMENTS], name or script or module or resume
        options = options_of(
            timeout=timeout,
            expect=expect,
            metric=metric,
            set_=set_,
            rehearse=rehearse,
            words=words if program else (),
            command=() if program else words,
            module=module,
            project=project,
            install=install,
            here=None if name and not script else Path.cwd(),
            per=_per({"rank": per_rank, "node": per_node, "once": once}),
            local_rank=local_rank,
            launcher=launcher,
            launcher_arguments=tuple(launcher_arg or ()),
            script=script,
            deepspeed_config=deepspeed_config,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            detach=detach,
            wait=wait,
            resume=resume or "",
            retries=retries,
        )
        lab = replace(context(directory, output, setting), showing=output.showing)
        ask = confirmation(json)
        output.begin(f"preparing {name or 'the run'} and looking at its nodes")
        if dry_run:
            answer_plan(output, flows.plan_run(lab, name, options, ask))
        elif repeat > 1:
            repeated = flows.repeat(lab, name, options, repeat, ask)
            output.answer(repeated, repeated_text(repeated))
            sys.exit(repeated.worst.exit_code)
        elif detach:
            launched = flows.launch(lab, name, options, ask)
            next_steps = f"next: labctl attach {launched.run_id}, or labctl stop {launched.run_id}"
            output.answer(launched, f"{run_text(launched, lab.directory, width_of(sys.stdout))}\n{next_steps}")
        else:
            answer = flows.run(lab, name, options, ask)
            output.answer(answer, run_text(answer, lab.directory, width_of(sys.stdout)))
            sys.exit(answer.exit_code)


def _per(flags: Mapping[str, bool]) -> str:
    """Return the name of the flag that is given, empty without one. ConfigError for several."""
    given = [name for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        raise ConfigError("--per-rank, --per-node and --once exclude each other", hint="leave all but one of them out")
    return next(iter(given), "")


def options_of(
    *,
    timeout: str | None = None,
    expect: list[str] | None = None,
    metric: list[str] | None = None,
    set_: list[str] | None = None,
    **others: Any,
) -> RunOptions:
    """Return run options with time limit, criteria, metrics and ``--set`` parsed. ConfigError if one is invalid."""
    from labctl.jobs.request import RunOptions
    from labctl.workloads.schema import parse_duration, parse_expectation, parse_metric

    return RunOptions(
        timeout=parse_duration(timeout) if timeout else None,
        expect=tuple(map(parse_expectation, expect or ())),
        metrics=tuple(map(parse_metric, metric or ())),
        arguments=settings_of_script(set_ or []),
        **others,
    )


def settings_of_script(arguments: list[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse `--set KEY[=VALUE]` into pairs, the last of each key, None without ``=``. ConfigError without key."""
    values: dict[str, str | None] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not key:
            raise ConfigError(f"--set {argument}: no key", hint="--set KEY=VALUE")
        values[key] = value if equals else None
    return tuple(values.items())


def attach_command(run: Run = "latest", directory: Directory = HERE, quiet: Quiet = False, json: Json = False) -> None:
    """`labctl attach`: follow a run to its end, and exit with the code of its result."""
    with answering(as_json=json, quiet=quiet, only_shows=True) as output:
        lab = replace(context(directory, output), showing=output.showing)
        try:
            answer = flows.attach(lab, run)
        except KeyboardInterrupt:
            hint = "`labctl attach` follows it again, `labctl stop` ends it"
            output.error(Interrupted("no longer followed: the run goes on", hint=hint))
            sys.exit(Interrupted.exit_code)
        output.answer(answer, run_text(answer, lab.directory, width_of(sys.stdout)))
        sys.exit(answer.exit_code)


def stop_command(
    run: Run = "latest",
    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time between SIGTERM and SIGKILL.")] = 5,
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl stop`: stop a run, and print its result."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        named = flows.named_run(lab, run)
        if named.state != "done":
            output.begin(stopping_text(named, grace))
        elif run == "latest":
            ended = f"no run is under way (the latest, {named.run_id}, has ended: {named.verdict})"
            raise HostError(ended, hint=f"labctl show {named.run_id}")
        answer = flows.stop(lab, named.run_id, grace)
        output.answer(answer, run_text(answer, lab.directory, width_of(sys.stdout)))


def stopping_text(run: RunSummary, grace: float) -> str:
    """Render which run is stopped, on how many nodes if they are known, and within what time."""
    nodes = f" ({human.count(len(run.nodes), 'node')})" if run.nodes else ""
    return f"stopping run {run.run_id}{nodes}; SIGKILL after {human.duration(grace)} if needed"


def stacks_command(run: Run = "latest", directory: Directory = HERE, json: Json = False) -> None:
    """`labctl stacks`: tell what the ranks of a running run wait for, and where in their code they are."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        answer = flows.stacks(lab, run)
        output.answer(answer, "\n".join((answer.sentence, *(f"  {line}" for line in answer.lines))))


def show_command(
    run: Run = "latest",
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl show`: print the result of a run, or its state if it has none."""
    from labctl.records import store
    from labctl.runs import compare

    with answering(as_json=json) as output:
        lab = context(directory, output)
        shown = flows.show(lab, run)
        answer = shown.result or shown.summary
        command = compare.command(store.directory(lab.directory, answer.run_id))
        document = {**asdict(answer), "note": shown.summary.note, "command": command}
        output.answer(document, run_text(answer, lab.directory, width_of(sys.stdout), command))


def repeated_text(repeated: RepeatedRuns) -> str:
    """Render verdict and duration of each run, spread of the metrics, effects and conclusion."""
    from labctl.runs.spread import in_words

    runs = [(run.run_id, run.outcome, run.cause or "-", human.number(run.seconds)) for run in repeated.runs]
    effects = "\n".join(map(in_words, repeated.effects))
    parts = (table(("RUN", "VERDICT", "CAUSE", "SECONDS"), runs), spread_table(repeated.spread), effects)
    return "\n\n".join(filter(None, (*parts, repeated.conclusion)))


def spread_table(spread: Mapping[str, Spread]) -> str:
    """Render a table of metrics: mean, number of runs, range, and spread if known; empty without metrics."""
    rows = [
        (
            metric_title(name, metric),
            metric.figure,
            len(metric.values or metric.non_finite),
            ", ".join(filter(None, (human.span(metric.values), metric.others))) if metric.values else "-",
            "-" if metric.usual is None else human.share(metric.usual),
        )
        for name, metric in spread.items()
    ]
    return table(("METRIC", "MEAN", "RUNS", "RANGE", "SPREAD"), rows) if rows else ""


def metric_title(name: str, spread: Spread) -> str:
    """Render a metric's name with its unit and ``found`` if it is a found one, as ``throughput (samples/s)``."""
    from labctl.runs.spread import titled

    title = titled(name, at_end=spread.at_end)
    remarks = ", ".join(filter(None, (spread.unit, "found" if spread.found else "")))
    return f"{title} ({remarks})" if remarks else title


def run_text(run: Result | RunSummary, lab: Path, columns: int = 0, command: str = "") -> str:
    """Render a run's result, or its state if it has none, with the paths of its debug bundle and record.

    ``command`` is the command line that repeats it, if it is to be shown.

    Sentences are broken at ``columns``, 0 for none; commands and paths are not, so that they can be copied.
    """
    from labctl.records import note as notes
    from labctl.runs import next_step

    rows = [("run", run.run_id), *([("command", command)] if command else [])]
    if note := notes.read(lab / "runs" / run.run_id):
        rows.append(("note", note))
    if isinstance(run, Result):
        rows += result_rows(run)
        if step := next_step.of_record(lab / "runs" / run.run_id, run):
            rows.append(("next", step))
    else:
        rows.append(("state", ", ".join(filter(None, (run.shown_state, run.step)))))
    files = lab / "runs" / run.run_id
    if (files / "evidence.tar.gz").exists():
        rows.append(("debug bundle", str(files / "evidence.tar.gz")))
    rows.append(("files", str(files)))
    width = max(len(name) for name, _ in rows)
    lines = ((name, f"{name:<{width}} {text}") for name, text in rows)
    return "\n".join(line if name in WHOLE else wrapped(line, columns, width + 1) for name, line in lines)


def result_rows(result: Result) -> list[tuple[str, str]]:
    """Return name and text of notes, metrics, retries, ranks, hang and verdict of a result."""
    from labctl.records import straggler

    rows = list(result.notes.items())
    for name, value in result.metrics.items():
        unit = f" {value['unit']}" if value.get("unit") else ""
        of_all = human.figure(value)
        if "first" in value:
            of_all = f"{human.figure(value, 'first')} -> {human.figure(value, 'last')}"
        rows.append((name, f"{of_all}{unit}{found_mark(value)}"))
    rows += [("found in", line) for line in found_lines(result.metrics)]
    if result.resumed:
        rows.append(("resumed", f"from {result.resumed}"))
    rows += [("retried", attempt) for attempt in result.retried]
    if result.replays:
        rows.append(("replays", result.replays))
    if result.ranks:
        ranks = human.listed((f"{rank.rank} on {rank.node}" for rank in result.ranks), SHOWN)
        rows.append(("ranks", f"{result.world_size} ({ranks})"))
        rows.append(("seconds", human.number(result.seconds)))
    if result.hang:
        rows += [("hang", line) for line in (result.hang.sentence, *result.hang.lines)]
    if result.straggler:
        rows.append(("straggler", straggler.sentence(result.straggler)))
    rows += [("changed", change) for change in result.node_changes[:CHANGES]]
    cause = f" ({result.cause})" if result.cause else ""
    unjudged = ", nothing judged" if result.outcome == COMPLETED else ""
    rows.append(("verdict", f"{result.outcome}{cause}{unjudged}: {result.message}"))
    # The verdict of missed criteria says all that the outlook would.
    if result.retry and result.cause not in ("interrupted", "criteria"):
        rows.append(("retry", result.outlook))
    return rows


def found_mark(metric: Mapping[str, Any]) -> str:
    """Return `` (found)`` for a metric found in the output; empty for a declared one."""
    return " (found)" if "found" in metric else ""


def found_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines in which metrics were found, each once, at most FOUND of them."""
    lines = dict.fromkeys(str(metric["line"]) for metric in metrics.values() if "line" in metric)
    return list(lines)[:FOUND]

"""Command health."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.output import table
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.backends.health import HostHealth
    from labctl.health.model import Condition
    from labctl.runs.health import HealthReport


def health_command(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE]...", autocompletion=complete.node_or_host, help="Nodes or hosts (default: all)."
        ),
    ] = None,
    directory: Directory = HERE,
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="Judge what happened in this time, not since the last good verdict.")
    ] = "",
    ticket: Annotated[bool, typer.Option("--ticket", help="Print a text about NODE for whoever repairs it.")] = False,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write metrics for node_exporter's textfile collector.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl health`: print the verdict on each host; exit with an error if one is bad."""
    from labctl.workloads.schema import parse_duration

    with answering(as_json=json) as output:
        lab = context(directory, output, setting)
        names = tuple(nodes or ())
        output.begin(f"reading hardware, kernel, disks and clock of {human.listed(names) or 'all hosts'}")
        seconds = parse_duration(since) if since else None
        if ticket:
            if len(names) != 1 or json:
                raise ConfigError("--ticket is a text about one node", hint="labctl health --ticket NODE")
            output.answer(None, flows.ticket(lab, names[0], since=seconds))
            return
        report = flows.health(lab, names, since=seconds, prometheus=prometheus and prometheus.absolute())
        output.answer(report, report_text(report, verbose=verbose))
        if report.level == "bad":
            sys.exit(HostError.exit_code)


def report_text(report: HealthReport, *, verbose: bool) -> str:
    """Render a table of hosts, and each finding with what to do; ``verbose``: also every check."""
    rows = [
        (verdict.host, human.listed(verdict.nodes, 4) or "-", verdict.level, checks_text(verdict), age_text(verdict))
        for verdict in report.hosts
    ]
    parts = [table(("HOST", "NODES", "VERDICT", "CHECKS", "LAST GOOD"), rows)]
    for verdict in report.hosts:
        parts += [f"\n{verdict.host}: {verdict.error}"] if verdict.error else []
        parts += [finding_text(verdict, condition) for condition in verdict.wrong]
    parts += unknown_texts(report.hosts)
    if bad := [verdict.host for verdict in report.hosts if verdict.level == "bad"]:
        parts += [
            f"\nnext: `labctl health {bad[0]} --ticket` prints a text for its repair",
            f"      once mended: `labctl health {bad[0]} --since 1m`, to count nothing from before",
        ]
    if verbose:
        cells = [
            (verdict.host, each.check, each.item or "-", each.level, each.value or "-", each.source)
            for verdict in report.hosts
            for each in verdict.conditions
        ]
        parts += ["", table(("HOST", "CHECK", "ITEM", "ANSWER", "VALUE", "SOURCE"), cells)]
    return "\n".join(parts)


def checks_text(verdict: HostHealth) -> str:
    """Render the number of answers, and of those that are unknown."""
    unknown = sum(condition.level == "unknown" for condition in verdict.conditions)
    return f"{len(verdict.conditions)}" + (f", {unknown} unknown" if unknown else "")


def age_text(verdict: HostHealth) -> str:
    """Render the age of the last good verdict before this one."""
    return "never before" if verdict.last_good is None else human.ago(verdict.last_good)


def finding_text(verdict: HostHealth, condition: Condition) -> str:
    """Render a finding, where it was read, and what to do, in order."""
    lines = [f"\n{condition.level}  {verdict.host}: {condition.sentence()}"]
    if condition.source:
        lines.append(f"  check {condition.check}, read from {condition.source}")
    lines += [f"  {number}. {step}" for number, step in enumerate(condition.steps, 1)]
    return "\n".join(lines)


def unknown_texts(verdicts: Iterable[HostHealth]) -> list[str]:
    """Render a line for each reason why checks could not look, with the hosts and the checks."""
    checks: dict[tuple[str, str], dict[str, None]] = {}
    for verdict in verdicts:
        for condition in verdict.conditions:
            if condition.level == "unknown":
                checks.setdefault((verdict.host, condition.text), {})[condition.check] = None
    lines = [f"unknown  {host}: {human.listed(names, 4)}: {why}" for (host, why), names in checks.items()]
    return ["", *lines] if lines else []

"""Commands validate and baseline."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.output import say, table
from labctl.system import human

if TYPE_CHECKING:
    from labctl.batches.baseline import ValidationReport
    from labctl.reports.validation import Figure, LinkVerdict, NodeVerdict, Validation


Profile = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        show_default=False,
        autocompletion=complete.profile,
        help="quick, full, one for an accelerator, or a YAML file (default: TEST_CONFIGURATION, or quick).",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the lab up.")]
NODES = 20
"""Nodes and actions that the text lists."""


def validate_command(
    profile: Profile = "",
    keep: Keep = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the report (default: reports/TIME-PROFILE).")
    ] = None,
    print_profile: Annotated[
        bool, typer.Option("--print-profile", help="Print the YAML of the profile, to copy and change, and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each measurement of each node.")] = False,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl validate`: validate the cluster, write a report and exit with its code; or print the profile."""
    end_as_ctrl_c()
    with answering(as_json=json) as output:
        lab = context(directory, output, setting)
        if print_profile:
            from labctl.batches import validation

            say(validation.profile_file(lab, profile).read_text(encoding="utf-8").rstrip())
            return
        output.begin("looking at hosts, devices and containers")
        report = flows.validate(lab, profile, keep=keep, out=out)
        output.answer(report, report_text(report, verbose=verbose))
        sys.exit(report.exit_code)


def baseline_command(
    profile: Profile = "",
    keep: Keep = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write (default: baseline.json of the lab).")
    ] = None,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl baseline`: validate the cluster, record its figures if it passes, and exit with its code."""
    end_as_ctrl_c()
    with answering(as_json=json) as output:
        output.begin("looking at hosts, devices and containers")
        done = flows.baseline(context(directory, output, setting), profile, keep=keep, file=out)
        recorded = f"figures recorded in {done.file}" if done.file else "not recorded: the validation did not pass"
        recorded += f", in place of those of {done.replaced}" if done.replaced else ""
        output.answer(done, f"{report_text(done.report)}\n{recorded}")
        sys.exit(done.report.exit_code)


def end_as_ctrl_c() -> None:
    """Handle SIGTERM as Ctrl-C, and SIGHUP too, unless it is ignored, with the terminal's output dropped."""
    terminal = [stream for stream in (1, 2) if os.isatty(stream)]

    def hang_up(number: int, frame: FrameType | None) -> None:
        """Redirect terminal output to /dev/null, since writes to it fail from now on; raise KeyboardInterrupt."""
        for stream in terminal:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), stream)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def report_text(report: ValidationReport, *, verbose: bool = False) -> str:
    """Render steps, bad nodes and links, busy and drained hosts, advice and verdict; measurements if ``verbose``."""
    validation = report.validation
    steps = table(
        ("STEP", "STATUS", "SECONDS", "RESULT"),
        [(step.name, step.status, human.number(step.seconds), shortened(step.message)) for step in validation.steps],
    )
    busy = "\n".join(f"busy: {text}" for text in validation.busy)
    drained = f"drained: {', '.join(validation.drained)}" if validation.drained else ""
    measured = measurements_table(validation.figures) if verbose else ""
    parts = [steps, measured, verdicts_table(validation), busy, drained, actions_text(validation)]
    parts.append(f"{validation.verdict}: {validation.message}\nreport: {report.page}")
    return "\n\n".join(filter(None, parts))


def measurements_table(figures: Sequence[Figure]) -> str:
    """Render a line per figure with its measurements in order, or else its one value; empty without figures."""
    rows = [
        (f"{figure.step}: {figure.what}", figure.node or "all", figure.unit, measurements_text(figure))
        for figure in figures
    ]
    return table(("FIGURE", "NODE", "UNIT", "EACH MEASUREMENT"), rows) if rows else ""


def measurements_text(figure: Figure) -> str:
    """Render a figure's measurements in order, or its value if it was measured once."""
    return "  ".join(map(human.number, figure.values or (figure.value,)))


def verdicts_table(validation: Validation) -> str:
    """Render a table of nodes that are not good, the first NODES, and of bad links; empty if none."""
    bad = [node for node in validation.nodes if node.verdict != "good"]
    rows = [(node.node, node.host, node.verdict, evidence_text(node)) for node in bad[:NODES]]
    rows += [(f"{link.a} - {link.b}", "", link.verdict, evidence_text(link)) for link in validation.links]
    more = f"\n... {human.more(len(bad) - NODES)}: --json lists all" if len(bad) > NODES else ""
    return table(("NODE", "HOST", "VERDICT", "EVIDENCE"), rows) + more if rows else ""


def evidence_text(verdict: NodeVerdict | LinkVerdict) -> str:
    return shortened("; ".join(verdict.evidence))


def actions_text(validation: Validation) -> str:
    """Render the advice of nodes, links and steps as a numbered list of up to NODES; empty without any."""
    advice = [node.advice for node in validation.nodes]
    advice += [link.advice for link in validation.links]
    advice += [step.advice for step in validation.steps]
    lines = [f"  {number}. {text}" for number, text in enumerate(dict.fromkeys(filter(None, advice)), start=1)]
    return "\n".join(("what to do:", *lines[:NODES])) if lines else ""


def shortened(text: str) -> str:
    """Join a text to a line and cut it to 100 characters."""
    return human.shortened(" ".join(text.split()), 100)

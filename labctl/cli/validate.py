"""validate, baseline."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.output import say, table

if TYPE_CHECKING:
    from labctl.batches.baseline import ValidationReport
    from labctl.reports.validation import Validation


def complete_profile(incomplete: str) -> list[str]:
    from labctl.batches import profile

    return [name for name in profile.names() if name.startswith(incomplete)]


Profile = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        show_default=False,
        autocompletion=complete_profile,
        help="quick, full, one for an accelerator, or a YAML file (default: TEST_CONFIGURATION, or quick).",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the lab up.")]
# Nodes that the text lists.
NODES = 20


def validate_command(
    profile: Profile = "",
    keep: Keep = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the report.  [default: reports/TIME-PROFILE]")
    ] = None,
    print_profile: Annotated[
        bool, typer.Option("--print-profile", help="Print the profile's YAML, to copy and change, and do nothing.")
    ] = False,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    end_as_ctrl_c()
    with answering(as_json=json) as output:
        lab = context(directory, output, setting)
        if print_profile:
            from labctl.batches import profile as profiles

            said = lab.environ.get("TEST_CONFIGURATION", "")
            say(profiles.find(profile or profiles.configured(said, lab.warn)).read_text(encoding="utf-8").rstrip())
            return
        report = flows.validate(lab, profile, keep=keep, out=out)
        output.answer(report, report_text(report))
        sys.exit(report.exit_code)


def baseline_command(
    profile: Profile = "",
    keep: Keep = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write.  [default: baseline.json of the lab]")
    ] = None,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    end_as_ctrl_c()
    with answering(as_json=json) as output:
        done = flows.baseline(context(directory, output, setting), profile, keep=keep, file=out)
        recorded = f"figures recorded in {done.file}" if done.file else "not recorded: the validation did not pass"
        recorded += f", in place of those of {done.replaced}" if done.replaced else ""
        output.answer(done, f"{report_text(done.report)}\n{recorded}")
        sys.exit(done.report.exit_code)


def end_as_ctrl_c() -> None:
    """Have the lab removed where this process is to end, and where its terminal is closed."""
    terminal = [stream for stream in (1, 2) if os.isatty(stream)]

    def hang_up(number: int, frame: FrameType | None) -> None:
        """Write to nothing what would go to the terminal: each write there fails from now on."""
        for stream in terminal:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), stream)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def report_text(report: ValidationReport) -> str:
    """The steps, the nodes and links that are not good, what to do, and the page."""
    found = report.validation
    steps = table(
        ("STEP", "STATUS", "SECONDS", "RESULT"),
        [(step.name, step.status, f"{step.seconds:.1f}", shortened(step.message)) for step in found.steps],
    )
    drained = f"drained: {', '.join(found.drained)}" if found.drained else ""
    parts = [steps, verdicts_table(found), drained, actions_text(found)]
    parts.append(f"{found.verdict}: {found.message}\nreport: {report.page}")
    return "\n\n".join(filter(None, parts))


def verdicts_table(found: Validation) -> str:
    bad = [one for one in found.nodes if one.verdict != "good"]
    rows = [(one.node, one.host, one.verdict, shortened("; ".join(one.evidence))) for one in bad[:NODES]]
    rows += [(f"{one.a} - {one.b}", "", one.verdict, shortened("; ".join(one.evidence))) for one in found.links]
    more = f"\n... and {len(bad) - NODES:,} more: --json lists all" if len(bad) > NODES else ""
    return table(("NODE", "HOST", "VERDICT", "EVIDENCE"), rows) + more if rows else ""


def actions_text(found: Validation) -> str:
    """What to do, each only once."""
    advice = [*(one.advice for one in found.nodes), *(one.advice for one in found.links)]
    advice += [step.advice for step in found.steps]
    lines = [f"  {number}. {text}" for number, text in enumerate(dict.fromkeys(filter(None, advice)), start=1)]
    return "\n".join(("what to do:", *lines[:NODES])) if lines else ""


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:99]}…"

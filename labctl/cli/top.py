"""Command top."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.bar import clock, metric_texts, step_text, with_bar
from labctl.cli.common import HERE, RUN_HELP, Directory, Json, answering, context, not_an_option
from labctl.cli.output import can_redraw, printable, table, width_of
from labctl.errors import Interrupted
from labctl.system import human

if TYPE_CHECKING:
    from labctl.records.samples import NodeSamples, Reading
    from labctl.runs.top import RunView

PACE = 1.0
"""Seconds between updates."""
WIDE = 120
"""Columns if there is no terminal."""
SHORT = {"utilisation": "util", "temperature": "temp"}
LEAVES = "q quits; the run goes on"


def top_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            callback=not_an_option,
            autocompletion=complete.run,
            help=f"{RUN_HELP.removesuffix('.')} (default: the latest that is under way).",
        ),
    ] = "",
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl top`: watch a run until it ends or q is pressed; print it once without a terminal."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        try:
            if json or not can_redraw(sys.stdout):
                view = flows.top(lab, run)
            else:
                with Screen() as screen:
                    view = flows.top(lab, run, screen.show)
        except KeyboardInterrupt:
            if json:
                raise
            # Who leaves has done nothing wrong.
            output.note("no longer watched: the run goes on; `labctl stop` ends it")
            sys.exit(Interrupted.exit_code)
        then = f"\nnext: labctl show {view.run_id}" if view.state == "ended" else ""
        output.answer(view, view_text(view, width_of(sys.stdout)) + then)


class Screen:
    """Context manager that shows a run on the whole terminal, and restores the terminal at its end."""

    def __init__(self) -> None:
        self._live: Any = None
        self._terminal: Any = None

    def __enter__(self) -> Screen:
        return self

    def _open(self) -> None:
        """Show the terminal's alternate screen, and read keys without echo if stdin is a terminal."""
        import termios
        import tty

        from rich.console import Console
        from rich.live import Live

        if sys.stdin.isatty():
            self._terminal = termios.tcgetattr(sys.stdin)
            # Not TCSAFLUSH: keys that were pressed before count.
            tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        self._live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
        self._live.start()

    def __exit__(self, *_: object) -> None:
        """Leave the alternate screen and restore the terminal's settings."""
        import termios

        if self._live:
            self._live.stop()
        if self._terminal:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    def show(self, view: RunView) -> bool:
        """Draw the run and wait up to a second for a key; return False on q or the end of input, else True."""
        from rich.text import Text

        if not self._live:
            self._open()
        width, height = self._live.console.size
        self._live.update(Text(view_text(view, width, height), no_wrap=True, end=""), refresh=True)
        return not self._is_left()

    def _is_left(self) -> bool:
        """Wait up to a second for a key; return True on q or the end of input, False otherwise."""
        if not self._terminal:
            time.sleep(PACE)
            return False
        ready, _, _ = select.select([sys.stdin], [], [], PACE)
        return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def view_text(view: RunView, width: int = 0, height: int = 0) -> str:
    """Render a run's progress, metrics, nodes and devices; cut to ``width`` and ``height``, with keys, unless 0."""
    from labctl.records.straggler import sentence

    progress = view.progress
    title = (view.workload, view.state, f"{clock(view.seconds)} of {clock(view.timeout)}", f"run {view.run_id}")
    lines = [fitting(title, width)]
    steps = [step_text(progress)]
    if progress.seconds_left is not None:
        steps.append(f"{clock(progress.seconds_left)} left")
    if progress.seconds_per_step is not None:
        steps.append(f"{human.number(progress.seconds_per_step)} s per {progress.counts}")
    has_found = any("found" in metric for metric in progress.metrics.values())
    remark = ("(found in the output)",) if has_found else ()
    shown = fitting((*metric_texts(progress.metrics), *remark), width)
    lines += filter(None, (with_bar(progress, steps, width or WIDE), shown))
    for head, rows in (("NODE",), node_rows(view.nodes)), (("NODE", "DEVICE"), device_rows(view.nodes)):
        if rows:
            lines += ["", *sampled(head, rows, width)]
    if view.straggler:
        lines += ["", f"in the last minute: {sentence(view.straggler)}"]
    if not height:
        return "\n".join(lines)
    ago = "" if progress.last_line is None else f"last line {clock(max(0, time.time() - progress.last_line))} ago  "
    room = height - 2
    if len(lines) > room:
        lines[room - 1 :] = [f"... {human.more(len(lines) - room + 1, 'lines')}"]
    return "\n".join(line[:width] for line in (*lines, "", f"{ago}{LEAVES}"))


def fitting(parts: Iterable[str], width: int) -> str:
    """Join parts by two spaces, leaving out each that would exceed ``width``; all of them if it is 0."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}".strip()
        line = line if width and len(longer) > width else longer
    return line


Row = tuple[tuple[str, ...], "Mapping[str, Reading]"]
"""First columns, and the samples by name."""


def node_rows(nodes: Iterable[NodeSamples]) -> list[Row]:
    """Return a row for each node: its name and its samples."""
    return [((node.node,), node.values) for node in nodes]


def device_rows(nodes: Iterable[NodeSamples]) -> list[Row]:
    """Return a row for each device: its node and number, and its samples."""
    rows: list[Row] = []
    for node in nodes:
        rows += [((node.node, number), values) for number, values in node.devices.items()]
    return rows


def sampled(head: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table of samples, without the last columns if it would exceed ``width``."""
    units: dict[str, str] = {}
    for _, values in rows:
        units |= {name: reading.unit for name, reading in values.items()}
    # Last, as it is left out first: it is hardly ever other than 0.
    names = sorted(units, key="lost samples".__eq__)
    while True:
        titles = (f"{SHORT.get(name, name).upper()} {units[name]}".strip() for name in names)
        cells = [(*first, *value_cells(values, names)) for first, values in rows]
        lines = printable(table((*head, *titles), cells)).splitlines()
        if not width or not names or max(map(len, lines)) <= width:
            return lines
        names.pop()


def value_cells(values: Mapping[str, Reading], names: Iterable[str]) -> list[str]:
    """Return the values of these names, as text, or ``-`` where there is none."""
    return [human.number(values[name].value) if name in values else "-" for name in names]

"""Command ui."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from msgspec.structs import replace

from labctl.cli.common import HERE, Directory, answering, context
from labctl.cli.output import say
from labctl.errors import Interrupted


def ui_command(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Port on 127.0.0.1 (default: first free from 8765)."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser, if there is one.")] = False,
    directory: Directory = HERE,
) -> None:
    """`labctl ui`: serve the lab's pages until Ctrl-C."""
    from labctl.ui import server

    with answering() as output:
        lab = context(directory, output)

        def show(address: str) -> None:
            """Print the address."""
            say(address)

        try:
            server.serve(replace(lab, emit=lambda _: None), port, show)
        except KeyboardInterrupt:
            output.note("stopped")
            sys.exit(Interrupted.exit_code)

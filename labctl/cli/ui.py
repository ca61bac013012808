"""Command ui."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Annotated

import typer
from msgspec.structs import replace

from labctl.cli import browser
from labctl.cli.common import HERE, Directory, answering, context
from labctl.cli.output import say
from labctl.errors import Interrupted


def ui_command(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="PORT", help="Port on 127.0.0.1 (default: first free from 8765)."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the pages in a browser.")] = False,
    directory: Directory = HERE,
) -> None:
    """`labctl ui`: serve the lab's pages until Ctrl-C."""
    with answering() as output:
        output.begin("starting")
        from labctl.ui import server

        # The pages themselves show what fails.
        site = server.new_site(replace(context(directory, output), emit=lambda _: None))
        with server.listen(port) as listener:
            number = listener.getsockname()[1]
            address = f"http://{server.LOOPBACK}:{number}{site.root}/"
            with browser.opened_address(address, os.environ) if open_ else nullcontext(False) as is_open:
                say(address)
                if not is_open:
                    output.note(f"from another machine, first run: {browser.tunnel(number, os.environ)}")
                output.note("press Ctrl-C to stop")
                try:
                    server.serve(site, listener)
                except KeyboardInterrupt:
                    output.note("stopped")
                    sys.exit(Interrupted.exit_code)

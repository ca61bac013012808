"""Browsers: open a page, or say how to reach it from another machine over ssh."""

from __future__ import annotations

import getpass
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables of which one is set where a browser can be opened."""


def open_page(page: Path, environ: Mapping[str, str]) -> str:
    """Open a page in a browser; return how to get it to one if there is none on this machine."""
    if opened(page, environ):
        return ""
    user, address = account(environ)
    # Without brackets scp takes what is before the first colon for the host.
    address = f"[{address}]" if ":" in address else address
    return f"no browser on this machine; on yours: {shlex.join(('scp', '-r', f'{user}@{address}:{page.parent}', '.'))}"


def opened(page: Path, environ: Mapping[str, str]) -> bool:
    """Open a file in a browser; return False if there is none on this machine."""
    import webbrowser

    return any(environ.get(name) for name in DISPLAYS) and webbrowser.open(page.as_uri())


@contextmanager
def opened_address(address: str, environ: Mapping[str, str]) -> Iterator[bool]:
    """Open an address in a browser, for the block; yield False if there is none on this machine.

    The browser gets a file that leads there: every user of the machine can read the arguments of a program.
    """
    with tempfile.TemporaryDirectory(prefix="labctl-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(f'<meta http-equiv="refresh" content="0; url={escape(address)}">\n', encoding="utf-8")
        yield opened(page, environ)


def tunnel(port: int, environ: Mapping[str, str]) -> str:
    """Return the command by which a browser of another machine reaches a port of this one."""
    user, address = account(environ)
    return shlex.join(("ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", f"{user}@{address}"))


def account(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the user and this machine's address, as the ssh client of this session has them, if it is one."""
    # Client's address and port, then this machine's as the client sees it.
    connection = environ.get("SSH_CONNECTION", "").split()
    return environ.get("SUDO_USER") or user_name(), connection[2] if len(connection) == 4 else "HOST"


def user_name() -> str:
    """Return the name of the user; ``USER`` for an id without a name, as in a container."""
    # KeyError before Python 3.13.
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return "USER"

"""`labctl ui` as a process, and a browser's page that notes what goes wrong in it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.harness import Lab, Running, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

ADDRESS = re.compile(r"^(http://127\.0\.0\.1:([0-9]+))/([A-Za-z0-9_-]{20,})/\n", re.MULTILINE)
OWN = re.compile(r"http://127\.0\.0\.1:[0-9]+/|file:///|data:|about:blank")
"""Beginnings of addresses that do not leave this machine."""


@dataclass(frozen=True)
class Served:
    """Pages that `labctl ui` serves: their origin, their token, and the process."""

    lab: Lab
    origin: str
    token: str
    running: Running

    @property
    def root(self) -> str:
        """Return the address that all pages' addresses begin with, without a slash at its end."""
        return f"{self.origin}/{self.token}"

    @property
    def port(self) -> int:
        return int(self.origin.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.running.process.pid

    def ask(self, path: str) -> tuple[int, bytes]:
        """Ask the server for a path below the token, as it is written; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", f"/{self.token}/{path}")
            answer = connection.getresponse()
            return answer.status, answer.read()

    def cpu_seconds(self) -> float:
        """Return the seconds of a CPU that the server has used, in it and in the kernel."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> float:
        """Return the resident memory of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"^VmRSS:\s+([0-9]+) kB$", status, re.MULTILINE)[0]) / 1000

    def threads(self) -> int:
        """Return how many threads the server has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@contextlib.contextmanager
def serving(lab: Lab, *options: str) -> Iterator[Served]:
    """Serve a lab's pages by `labctl ui` in the block; end it by Ctrl-C, which it must take without a traceback."""
    with lab.start("ui", *options) as running:
        wait_until(lambda: ADDRESS.match(running.out) or running.process.poll() is not None, 60, "labctl ui serves")
        answered = ADDRESS.match(running.out)
        assert answered, running.err
        yield Served(lab, answered[1], answered[3], running)
        running.process.send_signal(signal.SIGINT)
        ended = running.answer(60).expect(130)
        assert "Traceback" not in ended.err, ended.err


@dataclass
class Watched:
    """A page of the browser, and what went wrong in it or left this machine."""

    page: Page
    missing: bool = False
    """Its address may have no page."""
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listen to the console, to errors of scripts, and to all requests."""
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("websocket", lambda socket: self.problems.append(f"socket: {socket.url}"))

    def until(self, script: str, argument: object = None, limit: float = 30) -> Any:
        """Return the value of a script once it is true; fail the test after ``limit`` seconds.

        The driver's own way is to evaluate texts in the page, which the page's policy forbids.
        """
        return wait_until(lambda: self.page.evaluate(script, argument), limit, script)

    def _said(self, message: ConsoleMessage) -> None:
        """Note a warning or an error on the console."""
        is_known = self.missing and "a status of 404" in message.text
        if message.type in ("error", "warning") and not is_known:
            self.problems.append(f"console: {message.type}: {message.text} ({message.location})")

    def _asked(self, address: str) -> None:
        """Note a request to another machine."""
        if not OWN.match(address):
            self.problems.append(f"request to {address}")

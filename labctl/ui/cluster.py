"""The page of the cluster: a live tile per node, with the findings of doctor and health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from labctl import backends, flows
from labctl.backends import health
from labctl.backends.devices import DeviceReport
from labctl.backends.finding import Finding
from labctl.config.context import Context
from labctl.doctor import causes
from labctl.doctor.report import DoctorReport
from labctl.errors import ConfigError, HostError, LabError
from labctl.model import Event, Result
from labctl.records import store
from labctl.runs.health import HealthReport
from labctl.runs.labs import LabNow
from labctl.ui.page_state import PageState, stream
from labctl.ui.site import Site, as_json
from labctl.ui.tiles import LEVELS, Known, tiles

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

PACE = 5.0
"""Seconds between looks at the lab while a page is open."""
REST = 8
"""Pause after a look, in times that it took: looks over ssh cost the hosts more."""
LONGEST_PAUSE = 15.0
DEVICES_AGE = 600.0
"""Seconds after which the hosts' devices are read again."""
TILE = "tile "
"""Prefix of the names of tiles among the parts of the page."""


class Head(Struct, frozen=True, kw_only=True):
    """Heading of the page: the lab, its state and its problems."""

    lab: str
    state: str
    hint: str = ""
    out_of_date: str = ""
    unreachable: tuple[Any, ...] = ()
    warnings: tuple[str, ...] = ()


class Examination(Struct, frozen=True, kw_only=True):
    """Result of doctor or health, for all open pages."""

    busy: bool = False
    """It is under way."""
    at: float | None = None
    """Time of the answer, in seconds since 1970; None without one."""
    text: str = ""
    error: str = ""
    hint: str = ""
    problems: tuple[Any, ...] = ()


def routes(site: Site) -> list[BaseRoute]:
    """Return the addresses of the cluster's page."""
    from starlette.routing import Route

    pages = ClusterPages(site)
    return [
        Route("/cluster", pages.page),
        Route("/cluster/events", pages.events),
        Route("/cluster/{name:str}", pages.examine, methods=["POST"]),
    ]


class ClusterPages:
    """Answers to requests for the cluster's page."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._monitor = Monitor(site.context)

    def page(self, _: Request) -> Response:
        """Return the page; its script fills it."""
        return self._site.page("cluster.html.j2", here="/cluster", refused=refusal(self._site.context))

    async def events(self, request: Request) -> Response:
        """Stream the parts of the page that change."""
        return stream(self._monitor.page, request, self._monitor.look_if_due)

    def examine(self, request: Request) -> Response:
        """Start doctor or health, whose result comes by the events."""
        self._monitor.examine(request.path_params["name"])
        return as_json({}, 202)


def refusal(context: Context) -> str:
    """Return why the lab's backend has no `labctl health`; empty if it has."""
    try:
        backends.require(context.declared(), "health")
    except ConfigError as error:
        return f"{error.message}: {error.hint}"
    return ""


class Monitor:
    """Monitor of the lab for all open pages: looks at it, one look at a time, and updates the page."""

    def __init__(self, context: Context) -> None:
        """Look at nothing yet."""
        self.page = PageState()
        self._context = context
        self._looking = False
        self._due = 0.0
        self._now: LabNow | None = None
        self._devices: DeviceReport | None = None
        self._devices_due = 0.0
        self._findings: tuple[Finding, ...] = ()
        self._examining = threading.Lock()
        """Held while doctor or health is under way."""

    # --- the lab ---

    def look_if_due(self) -> None:
        """Start a look, unless one is under way or the next is not due yet."""
        if not self._looking and time.monotonic() >= self._due:
            self._looking = True
            _start(self._look)

    def _look(self) -> None:
        """Look at the lab, put its tiles on the page, and set the time of the next look."""
        began = time.monotonic()
        try:
            self._read()
        except LabError as error:
            self.page.put({"error": {"message": error.message, "hint": error.hint}})
        except Exception as error:
            # A page that goes on asking would hide it.
            self.page.put({"error": {"message": f"labctl failed: {error!r}", "hint": "labctl status"}})
            raise
        finally:
            took = time.monotonic() - began
            self._due = time.monotonic() + min(LONGEST_PAUSE, max(PACE, REST * took))
            self._looking = False
            self.page.put({"looked": {"at": time.time(), "pause": round(self._due - time.monotonic())}})

    def _read(self) -> None:
        """Read the lab, and its devices if they were not read for some time. LabError if it cannot be read."""
        warnings: list[str] = []
        self._now = flows.look(replace(self._context, emit=partial(_keep_warning, warnings)))
        self.page.put({"head": _head(self._now, warnings), "error": None})
        self._show()
        if time.monotonic() >= self._devices_due:
            self._devices_due = time.monotonic() + DEVICES_AGE
            self._read_devices()
            self._show()

    def _read_devices(self) -> None:
        """Read the devices of the hosts; if that fails, the page says why and has tiles without them."""
        why = None
        try:
            self._devices = flows.devices(self._context)
        except LabError as error:
            why = {"message": f"cannot list the devices of the hosts: {error.message}", "hint": error.hint}
        self.page.put({"devices": why})

    def _show(self) -> None:
        """Put the tiles on the page."""
        if self._now:
            shown = tiles(self._now, self._known(self._now))
            parts: dict[str, object] = {f"{TILE}{tile.node}": tile for tile in shown}
            self.page.put({**parts, "order": [tile.node for tile in shown]})
            self.page.keep(set(parts), TILE)

    def _known(self, now: LabNow) -> Known:
        """Return the facts that tiles have beside the lab's state."""
        directory = self._context.directory
        hosts = {node.host for node in now.status.nodes}
        kept = {host: verdict for host in hosts if (verdict := health.read(directory, host))}
        return Known(devices=self._devices, kept=kept, findings=self._findings, last=_last(now, self._context))

    # --- doctor and health ---

    def examine(self, name: str) -> None:
        """Start doctor or health. HostError if one is under way, ConfigError if the backend does not have it."""
        work: dict[str, Callable[[], Examination]] = {"doctor": self._doctor, "health": self._health}
        if name not in work:
            raise ConfigError(f"unknown examination {name}")
        if name == "health":
            backends.require(self._context.declared(), "health")
        if not self._examining.acquire(blocking=False):
            raise HostError("doctor or health is already running: wait until it ends")
        self.page.put({name: Examination(busy=True)})
        _start(partial(self._examine, name, work[name]))

    def _examine(self, name: str, work: Callable[[], Examination]) -> None:
        """Put the answer of doctor or health on the page, or why there is none, and show it on the tiles."""
        answer = Examination(at=time.time(), error=f"labctl {name} failed", hint=f"labctl {name}")
        try:
            answer = work()
        except LabError as error:
            answer = replace(answer, error=error.message, hint=error.hint)
        finally:
            self._examining.release()
            self.page.put({name: answer})
        self._show()

    def _doctor(self) -> Examination:
        """Run the checks of `labctl doctor`."""
        report = flows.doctor(self._context)
        self._findings = report.findings
        return of_doctor(report, time.time())

    def _health(self) -> Examination:
        """Examine the hosts as `labctl health`."""
        return of_health(flows.health(self._context), time.time())


def _start(work: Callable[[], None]) -> None:
    """Start work in a thread, which prints the traceback of a bug where the server runs."""
    threading.Thread(target=work, daemon=True).start()


def _keep_warning(warnings: list[str], event: Event) -> None:
    """Keep the text of a warning."""
    if event.kind == "warning":
        warnings.append(event.text)


def _head(now: LabNow, warnings: list[str]) -> Head:
    """Return the heading of the page."""
    status = now.status
    return Head(
        lab=status.lab,
        state=status.state,
        hint=status.hint,
        out_of_date=status.out_of_date,
        unreachable=status.unreachable,
        warnings=tuple(warnings),
    )


def _last(now: LabNow, context: Context) -> Result | None:
    """Return the result of the latest run; None if it is under way."""
    latest = now.status.runs[:1]
    return store.read_result(context.directory, latest[0].run_id) if latest else None


def of_doctor(report: DoctorReport, at: float) -> Examination:
    """Return doctor's findings as the page shows them: by fix, in the order in which to mend them."""
    wrong = [finding for finding in report.findings if finding.level != "ok"]
    return Examination(
        at=at,
        text=f"{len(report.findings) - len(wrong)} of {len(report.findings)} checks passed",
        problems=tuple(
            {
                "fix": problem.fix,
                "findings": [_finding(finding) for finding in problem.findings],
                "consequences": [_finding(finding) for finding in problem.consequences],
            }
            for problem in causes.problems(wrong)
        ),
    )


def _finding(finding: Finding) -> dict[str, str]:
    """Return a finding as the page shows it."""
    return {
        "word": finding.level,
        "kind": LEVELS[finding.level],
        "text": f"{finding.code} {finding.node}: {finding.summary}",
        "impact": finding.impact,
    }


def of_health(report: HealthReport, at: float) -> Examination:
    """Return the verdicts of `labctl health` as the page shows them."""
    findings = [
        {"word": each.level, "kind": LEVELS[each.level], "text": f"{host.host}: {each.sentence()}", "steps": each.steps}
        for host in report.hosts
        for each in host.wrong
    ]
    findings += [
        {"word": "unknown", "kind": LEVELS["unknown"], "text": f"{host.host}: {host.error}"}
        for host in report.hosts
        if host.error
    ]
    hosts = ", ".join(f"{host.host} {host.level}" for host in report.hosts)
    return Examination(at=at, text=hosts, problems=tuple({"fix": "", "findings": [each]} for each in findings))

"""Validations of a lab and its baseline: the last verdicts, and the reports that they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from labctl.batches import baseline
from labctl.batches.baseline import DATA, FILE
from labctl.errors import ConfigError
from labctl.reports.validation import Figure, Validation, status, worst
from labctl.system import human
from labctl.system.decode import decode
from labctl.ui.batches import REPORTS, subfolders
from labctl.ui.files import list_folder, open_file
from labctl.ui.site import Site, as_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

SHOWN = 10
"""Latest validations that are listed."""
WORST = 5
"""Worst figures that are shown of the latest validation."""
LARGEST = 64 << 20
"""Bytes of a file that is served, at most."""
TYPES = {".html": "text/html", ".json": "application/json", ".svg": "image/svg+xml", ".png": "image/png"}
"""Media types by suffix; other files are text."""
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:"
"""Policy of a file that others may have written: it runs nothing, and is of no origin."""


def routes(site: Site) -> list[BaseRoute]:
    """Return the addresses of validations and of reports."""
    from starlette.routing import Route

    pages = ValidationPages(site)
    return [
        Route("/cluster/validations.json", pages.listing),
        Route("/cluster/reports/{path:path}", pages.report),
        Route("/cluster/runs/{path:path}", pages.run),
    ]


class ValidationPages:
    """Answers to requests for validations and their reports."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def listing(self, _: Request) -> Response:
        """Return the latest validations, and the baseline."""
        lab = self._site.directory
        return as_json({"validations": validations(lab), "baseline": baseline_row(lab)})

    def report(self, request: Request) -> Response:
        """Return a file of a report, or the list of a folder."""
        return _report_file(self._site, request.path_params["path"])

    def run(self, request: Request) -> Response:
        """Redirect a link of a report to the files of a run."""
        from starlette.responses import RedirectResponse

        name, _, path = request.path_params["path"].partition("/")
        return RedirectResponse(f"{self._site.root}/run/{quote(name)}/files/{quote(path)}")


def validations(lab: Path) -> list[dict[str, object]]:
    """Return the latest validations as the page shows them, the last first; only that with its worst figures."""
    shown: list[dict[str, object]] = []
    # Their names begin with the date.
    for name in sorted(subfolders(lab / REPORTS), reverse=True):
        if len(shown) == SHOWN:
            break
        if validation := _read(lab, name):
            shown.append(_row(name, validation, first=not shown))
    return shown


def _read(lab: Path, name: str) -> Validation | None:
    """Return the validation of a report's directory; None if it has none that can be read."""
    try:
        stream = open_file(lab / REPORTS, (name, DATA))
        if stream is None:
            return None
        with stream:
            return decode(stream.read(LARGEST), Validation)
    except (OSError, ValueError):
        return None


def _row(name: str, validation: Validation, *, first: bool) -> dict[str, object]:
    """Return a validation as the page shows it."""
    return {
        "name": name,
        "profile": validation.profile,
        "started": validation.started,
        "seconds": human.duration(validation.seconds),
        "verdict": {"text": validation.verdict, "kind": validation.verdict.lower()},
        "message": validation.message,
        "figures": [_figure(figure) for figure in worst(validation.figures, WORST)] if first else [],
    }


def _figure(figure: Figure) -> dict[str, str]:
    """Return a figure as the page shows it."""
    return {
        "what": f"{figure.what} ({figure.step})",
        "node": figure.node,
        "value": f"{human.number(figure.value)} {figure.unit}".rstrip() if figure.value is not None else "no value",
        "limit": figure.limit,
        "source": figure.source,
        "status": status(figure),
    }


def baseline_row(lab: Path) -> dict[str, object] | None:
    """Return the lab's baseline as the page shows it; None without one."""
    try:
        kept = baseline.read(lab / FILE)
    except ConfigError as error:
        return {"error": error.message, "hint": error.hint}
    if not kept:
        return None
    return {"recorded": kept.recorded, "profile": kept.profile, "figures": len(kept.figures)}


# --- files of reports ----------------------------------------------------------------------------------------


def _report_file(site: Site, path: str) -> Response:
    """Return a file of a report, which may run nothing, or the list of a folder; ConfigError if there is neither."""
    from starlette.responses import Response

    root, parts = site.directory / REPORTS, [part for part in path.split("/") if part]
    try:
        stream = open_file(root, parts)
        if stream is None:
            return _folder(site, path, parts)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{REPORTS}/{path}: not found", hint=f"ls {root}") from error
    with stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ConfigError(
            f"{REPORTS}/{path} is larger than {human.memory(LARGEST)}", hint=f"less {root.joinpath(*parts)}"
        )
    kind = TYPES.get(Path(path).suffix, "text/plain; charset=utf-8")
    return Response(content, media_type=kind, headers={"content-security-policy": SANDBOX})


def _folder(site: Site, path: str, parts: list[str]) -> Response:
    """Return the list of a folder, whose address ends with a slash for its links. OSError if it cannot be read."""
    from starlette.responses import RedirectResponse

    if path and not path.endswith("/"):
        return RedirectResponse(f"{site.root}/cluster/reports/{quote(path)}/")
    entries, others = list_folder(site.directory / REPORTS, parts)
    return site.page("report_folder.html.j2", here="", path=path, entries=entries, others=others)

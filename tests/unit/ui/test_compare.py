"""The page that compares runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route
from support import records

from labctl.config.context import Context
from labctl.errors import ConfigError
from labctl.records import store
from labctl.records.store import RunSummary
from labctl.runs import opening
from labctl.ui import compare
from labctl.ui.site import Site
from labctl.ui.watcher import Watchers

FIRST, SECOND, THIRD = (f"20261125-20361{number}-opt-tiny-{number}ac123" for number in range(3))

DATA = '<script type="application/json" id="charts" data-of="compare">'
"""Beginning of the data of charts, whose files of points are named after the comparison."""


@pytest.fixture
def site(site: Site) -> Site:
    """Return the pages of a lab with two ended runs."""
    for run_id, micro, loss in ((FIRST, "1", 4.8), (SECOND, "4", 5.2)):
        records.write(site.directory, run_id, losses=(8.1, loss), settings={"MICRO": micro})
    return site


def page(site: Site, *named: str, watchers: Watchers | None = None) -> str:
    """Return the page that compares the named runs."""
    return bytes(answer(site, "/compare", named, watchers).body).decode()


def answer(site: Site, path: str, named: Sequence[str], watchers: Watchers | None = None) -> Response:
    """Return what the pages answer for the named runs."""
    routes = compare.routes(site, watchers or Watchers(site.context))
    (route,) = (route for route in routes if isinstance(route, Route) and route.path == path)
    request = SimpleNamespace(query_params=SimpleNamespace(getlist=lambda _: named))
    response: Response = route.endpoint(request)
    return response


def test_settings_metrics_and_curves_are_on_one_page(site: Site) -> None:
    html = page(site, FIRST, SECOND)
    assert '<th scope="row">MICRO</th><td data-head="A">1</td><td data-head="B">4</td>' in html
    assert '<th scope="row">loss<span class="dim">at the end</span></th>' in html
    (_, after) = html.split(DATA)
    (loss, *_) = json.loads(after.partition("</script>")[0])
    assert [line["name"] for line in loss["lines"]] == ["A MICRO=1", "B MICRO=4"]
    assert f'<a href="/token/run/{FIRST}">{FIRST}</a>' in html


def test_runs_are_named_by_parts_of_their_ids_and_each_counts_once(site: Site) -> None:
    runs, left_out = compare.chosen(site, Watchers(site.context), ["latest", FIRST, SECOND, "0ac123"])
    assert ([run.result.run_id for run in runs], left_out) == ([SECOND, FIRST], [])


def test_each_run_can_be_the_reference(site: Site) -> None:
    """Follow the link of the second run: its group is the first, and the other run has the link."""
    html = page(site, FIRST, SECOND)
    assert html.count(">set as reference<") == html.count(">reference<") == 1
    assert f'href="/token/compare?run={SECOND}&amp;run={FIRST}"' in html
    html = page(site, SECOND, FIRST)
    assert f'href="/token/compare?run={FIRST}&amp;run={SECOND}"' in html
    assert '<th scope="row">MICRO</th><td data-head="A">4</td><td data-head="B">1</td>' in html


def test_equal_runs_have_no_reference(site: Site) -> None:
    """Their differences are those of the run that is furthest from the others."""
    others = (THIRD, FIRST.replace("0ac123", "3ac123"))
    for run_id in others:
        records.write(site.directory, run_id, losses=(8.1, 4.9), settings={"MICRO": "1"})
    assert "reference" not in page(site, FIRST, *others)


def lines(html: str) -> list[list[str]]:
    """Return the names of the lines of each chart of a page."""
    _, _, rest = html.partition(DATA)
    data, _, _ = rest.partition("</script>")
    return [[line["name"] for line in chart["lines"]] for chart in json.loads(data)]


def test_a_run_under_way_is_compared_by_its_settings_and_curves_so_far(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No metric is judged against it, and no setting is taken for another that it has as well."""
    path = leave_unfinished(site, monkeypatch, losses=(8.1, 7.0), settings={"MICRO": "8"})
    (path / "work/train.py").unlink()
    html = page(site, FIRST, THIRD)
    assert f"Run {THIRD} is running: its settings and curves so far." in html
    assert "data-reload>Load again" in html
    assert '<td class="status running">RUNNING</td>' in html
    assert lines(html)[0] == ["A MICRO=1", "B MICRO=8"]
    assert '<th scope="row">MICRO</th><td data-head="A">1</td><td data-head="B">8</td>' in html
    assert '<th scope="row">launcher</th><td data-head' not in html
    assert "file train.py" not in html
    assert "against 4.8" not in html


def test_the_curves_of_a_run_that_is_followed_here_are_where_it_is_followed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record has none. Without anyone who follows it the page says so."""
    (leave_unfinished(site, monkeypatch) / "metrics.jsonl").unlink()
    assert "It has no curves yet" in page(site, FIRST, THIRD)
    followed = records.write(tmp_path / "followed", THIRD, losses=(8.1, 7.0))
    watchers = Watchers(site.context)
    monkeypatch.setattr(watchers, "folder", lambda _: followed)
    html = page(site, FIRST, THIRD, watchers=watchers)
    assert "It has no curves yet" not in html
    assert lines(html)[0] == ["A 0ac123", "B 2ac123"]


def test_a_run_under_way_whose_record_is_gone_is_compared_by_what_is_left(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in leave_unfinished(site, monkeypatch).iterdir():
        if path.is_file():
            path.unlink()
    assert "2 runs compared" in page(site, FIRST, THIRD)


def test_a_run_that_nothing_supervises_is_left_out_with_a_sentence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unfinished(site, monkeypatch, state="orphaned")
    html = page(site, FIRST, THIRD, SECOND)
    assert f"<p>Run {THIRD} is left out: it is orphaned.</p>" in html
    assert "2 runs compared" in html


def test_a_comparison_is_saved_as_one_file_without_links_to_this_machine(site: Site) -> None:
    assert f'href="/token/compare/report?run={FIRST}&amp;run={SECOND}"' in page(site, FIRST, SECOND)
    saved = answer(site, "/compare/report", [FIRST, SECOND])
    assert saved.headers["content-disposition"] == f'attachment; filename="{FIRST}-and-1-more.html"'
    html = bytes(saved.body).decode()
    assert "2 runs compared" in html
    assert "<svg" in html
    assert "<a href=" not in html


def leave_unfinished(site: Site, monkeypatch: pytest.MonkeyPatch, *, state: str = "running", **record: Any) -> Path:
    """Write the record of a run that has no result; return its directory."""
    path = records.write(site.directory, THIRD, **record)
    (path / "result.json").unlink()
    show = opening.show

    def shown(context: Context, name: str) -> object:
        """Stand in for the nodes, which tell its state."""
        if name != THIRD:
            return show(context, name)
        return store.ShownRun(RunSummary(run_id=THIRD, state=state, workload="opt-tiny"), None)

    monkeypatch.setattr(opening, "show", shown)
    return path


def test_a_result_that_cannot_be_read_is_left_out_with_a_sentence(site: Site) -> None:
    (records.write(site.directory, THIRD) / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=f"Run {THIRD} is left out: its result cannot be read."):
        compare.chosen(site, Watchers(site.context), [FIRST, THIRD])


@pytest.mark.parametrize("named", [[], [FIRST], [FIRST, FIRST]])
def test_fewer_than_two_runs_are_refused(site: Site, named: list[str]) -> None:
    with pytest.raises(ConfigError, match="a comparison needs two runs"):
        compare.chosen(site, Watchers(site.context), named)


def test_more_runs_than_can_be_told_apart_are_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match="cannot compare 21 runs: 20 is the limit"):
        compare.chosen(site, Watchers(site.context), [FIRST] * 21)


@pytest.mark.parametrize("name", ["nosuchrun", "../../etc/passwd", "<script>"])
def test_an_unknown_run_is_named(site: Site, name: str) -> None:
    with pytest.raises(ConfigError, match="no run"):
        compare.chosen(site, Watchers(site.context), [FIRST, name])

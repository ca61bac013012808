"""The page that compares runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.routing import Route
from support import records

from labctl.config.context import Context
from labctl.errors import ConfigError
from labctl.runs import opening
from labctl.ui import compare
from labctl.ui.site import Site

FIRST, SECOND, THIRD = (f"20261125-20361{number}-opt-tiny-{number}ac123" for number in range(3))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return the pages of a lab with two ended runs."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    for run_id, micro, loss in ((FIRST, "1", 4.8), (SECOND, "4", 5.2)):
        records.write(tmp_path, run_id, losses=(8.1, loss), settings={"MICRO": micro})
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    return Site(context=context, lab="demo", token="t")  # noqa: S106


def page(site: Site, *named: str) -> str:
    """Return the page that compares the named runs."""
    (route,) = compare.routes(site)
    assert isinstance(route, Route)
    request = SimpleNamespace(query_params=SimpleNamespace(getlist=lambda _: named))
    text: str = route.endpoint(request).body.decode()
    return text


def test_settings_metrics_and_curves_are_on_one_page(site: Site) -> None:
    html = page(site, FIRST, SECOND)
    assert '<th scope="row">MICRO</th><td data-head="A">1</td><td data-head="B">4</td>' in html
    assert '<th scope="row">loss<span class="dim">at the end</span></th>' in html
    (data,) = (
        part.partition("</script>")[0] for part in html.split('<script type="application/json" id="charts">')[1:]
    )
    (loss, *_) = json.loads(data)
    assert [line["name"] for line in loss["lines"]] == ["A MICRO=1", "B MICRO=4"]
    assert f'<a href="/t/run/{FIRST}">{FIRST}</a>' in html


def test_runs_are_named_by_parts_of_their_ids_and_each_counts_once(site: Site) -> None:
    runs, left_out = compare.chosen(site.context, ["latest", FIRST, SECOND, "0ac123"])
    assert ([run.result.run_id for run in runs], left_out) == ([SECOND, FIRST], [])


def test_a_run_without_a_result_is_left_out_with_a_sentence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unfinished(site, monkeypatch)
    html = page(site, FIRST, THIRD, SECOND)
    assert f"<p>Run {THIRD} is left out: it is running.</p>" in html
    assert "2 runs compared" in html


def leave_unfinished(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the record of a run that goes on."""
    records.write(site.directory, THIRD)
    show = opening.show

    def shown(context: Context, name: str) -> object:
        """Stand in for the nodes, which tell that it goes on."""
        if name != THIRD:
            return show(context, name)
        return SimpleNamespace(summary=SimpleNamespace(run_id=THIRD, state="running"), result=None)

    monkeypatch.setattr(opening, "show", shown)


def test_a_result_that_cannot_be_read_is_left_out_with_a_sentence(site: Site) -> None:
    (records.write(site.directory, THIRD) / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=f"Run {THIRD} is left out: its result cannot be read."):
        compare.chosen(site.context, [FIRST, THIRD])


@pytest.mark.parametrize("named", [[], [FIRST], [FIRST, FIRST]])
def test_fewer_than_two_runs_are_refused(site: Site, named: list[str]) -> None:
    with pytest.raises(ConfigError, match="a comparison needs two ended runs"):
        compare.chosen(site.context, named)


def test_more_runs_than_can_be_told_apart_are_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match="cannot compare 21 runs: 20 is the limit"):
        compare.chosen(site.context, [FIRST] * 21)


@pytest.mark.parametrize("name", ["nosuchrun", "../../etc/passwd", "<script>"])
def test_an_unknown_run_is_named(site: Site, name: str) -> None:
    with pytest.raises(ConfigError, match="no run"):
        compare.chosen(site.context, [FIRST, name])

"""A person at the pages of a lab: watches a run to its end, sorts, filters and compares runs, notes, and stops one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import records
from support.harness import Lab, wait_until
from support.pages import Served, serving

from page.conftest import Open

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.page, pytest.mark.docker]

# Keeps the plots of a page, whose points are drawn on a canvas.
PLOTS = """
window.plots = [];
(() => {
  let real;
  const construct = (target, given) => {
    const made = new target(...given);
    window.plots.push(made);
    return made;
  };
  const set = (library) => { real = new Proxy(library, {construct}); };
  Object.defineProperty(window, "uPlot", {get: () => real, set});
})();
"""
POINTS = """
(name) => {
  const shown = window.plots.filter((plot) => plot.root.isConnected && plot.root.closest(`[data-chart="${name}"]`));
  return Math.max(0, ...shown.map((plot) => plot.data[1].filter((value) => Number.isFinite(value)).length));
}
"""
"""Script that counts the points of a metric's chart."""
GROW = """
([step, value]) => {
  const chart = {name: "grown", title: "grown", caption: "", along: "step", unit: ""};
  labctl.charts.add(document.getElementById("curves"), chart);
  labctl.charts.append("grown", "", [[step, value]], {times: [value]});
}
"""
"""Script that adds a point to a chart."""
EARLIER = {"20260101-000000-vit-aaaaaa": 90.0, "20260102-000000-vit-bbbbbb": 120.0, "20260103-000000-gpt-cccccc": 60.0}
"""Throughputs of runs of which there are records."""


@pytest.fixture(scope="module")
def served(module_lab: Lab) -> Iterator[Served]:
    """Serve the pages of a lab that is up, with records of earlier runs."""
    for run_id, throughput in EARLIER.items():
        workload, rate = run_id[16:19], throughput / 1e5
        path = records.write(
            module_lab.path,
            run_id,
            workload=workload,
            losses=(8.0, 7.0, 400 / throughput),
            throughput=throughput,
            arguments=("--learning-rate", str(rate)),
            log="first line\nsecond line: out of tea\nthird line\n",
            started=f"2026-01-0{run_id[7]}T00:00:00+00:00",
        )
        job = json.loads((path / "job.json").read_text())
        (path / "job.json").write_text(json.dumps(job | {"workload": workload}))
    with serving(module_lab) as pages:
        yield pages


def rows(page: Page) -> list[str]:
    """Return the ids in the list of runs, in its order."""
    read = "(links) => links.map((link) => link.href.split('/').pop())"
    run_ids: list[str] = page.locator("main table tbody tr a").evaluate_all(read)
    return run_ids


def lists(page: Page, *run_ids: str) -> None:
    """Wait until the list has these runs in this order."""
    wait_until(lambda: page.wait_for_timeout(20) or rows(page) == list(run_ids), 60, f"the list has {run_ids}")


def test_a_run_is_watched_from_the_list_to_its_end(served: Served, open_page: Open) -> None:
    """It appears in the open list; its curve grows and its log gets lines while one looks, and its end is shown."""
    window = open_page("about:blank", script=PLOTS)
    page = window.page
    page.goto(served.root + "/")
    page.get_by_role("link", name=re.compile("cccccc")).wait_for()
    with served.lab.start("run", "opt-tiny") as running:
        page.get_by_role("row", name=re.compile("opt-tiny")).get_by_role("link").first.click(timeout=60_000)
        page.wait_for_url("**/run/*-opt-tiny-*")
        window.until(f"({POINTS})('loss') >= 5", limit=120)
        early = page.evaluate(POINTS, "loss")
        files = page.get_by_role("table", name="Files")
        sizes = files.inner_text()
        log = page.get_by_role("log")
        log.get_by_text(re.compile(r"step 5/120 loss")).first.wait_for()
        window.until(f"({POINTS})('loss') >= {early + 20}", limit=120)
        log.get_by_text(re.compile(rf"step {early + 15}/120 loss")).first.wait_for()
        assert "PASS" not in page.get_by_role("heading", level=1).inner_text()
        wait_until(lambda: page.wait_for_timeout(200) or files.inner_text() != sizes, 60, "files grow in their list")
        running.answer(600).expect(0)
        page.get_by_role("heading", level=1).get_by_text("PASS").wait_for(timeout=30_000)
    window.until(f"({POINTS})('loss') === 120")
    assert "All criteria met" in page.locator("header").first.inner_text()


def test_a_point_between_gaps_is_drawn(served: Served, open_page: Open) -> None:
    """Of a loss that was not a number before and after, no line is drawn: its points are."""
    run_id, losses = "20260104-000000-vit-dddddd", (8.0, 7.0, None, 5.0, None, 3.0)
    path = records.write(served.lab.path, run_id, losses=losses)
    window = open_page("about:blank", script=PLOTS)
    window.page.goto(f"{served.root}/run/{run_id}")
    window.until(f"({POINTS})('loss') === 4")
    assert window.page.evaluate("plots[0].series[1].points.filter(plots[0], 1, false, null)") == [3, 5]
    shutil.rmtree(path)


def test_the_list_is_sorted_by_the_heads_of_its_columns(served: Served, open_page: Open) -> None:
    page = open_page(served.root + "/").page
    field = page.get_by_role("searchbox")
    first, second, third = EARLIER
    field.fill("0-vit-")
    lists(page, second, first)
    field.fill("000000-")
    lists(page, third, second, first)
    page.get_by_role("columnheader", name=re.compile("Throughput")).get_by_role("button").click()
    lists(page, second, first, third)
    page.get_by_role("columnheader", name=re.compile("Throughput")).get_by_role("button").click()
    lists(page, third, first, second)
    page.get_by_role("columnheader", name=re.compile("Workload")).get_by_role("button").focus()
    page.keyboard.press("Enter")
    lists(page, third, second, first)


def test_the_list_is_filtered_by_workload_text_setting_and_bound(served: Served, open_page: Open) -> None:
    page = open_page(served.root + "/").page
    field = page.get_by_role("searchbox")
    first, second, third = EARLIER
    page.get_by_role("combobox", name=re.compile("^Workload")).select_option("vit")
    lists(page, second, first)
    field.fill("--learning-rate=0.0009")
    lists(page, first)
    page.get_by_role("combobox", name=re.compile("^Workload")).select_option("gpt")
    lists(page)
    field.fill("throughput<100")
    lists(page, third)


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("000000- loss <4", [1]),
        ("metrics.loss < 5 and params.learning-rate = '9e-4'", [0]),
        ("000000- learning_rate>=0.0009 -bbb", [0]),
        ("run=20260103-000000-gpt-cccccc verdict=Completed workload=gpt node=worker-0", [2]),
        ("000000- cause=", []),
        ("000000- --learning-rate= -learning_rate=0.0006", [1, 0]),
    ],
)
def test_the_filter_takes_comparisons_in_several_forms(
    served: Served, open_page: Open, query: str, places: list[int]
) -> None:
    page = open_page(served.root + "/").page
    page.get_by_role("searchbox").fill(query)
    lists(page, *(list(EARLIER)[place] for place in places))


def test_a_loss_that_became_infinite_is_above_every_bound(served: Served, open_page: Open) -> None:
    page = open_page(served.root + "/").page
    holds = "query => labctl.filter.matches({loss: 'inf', text: ''}, labctl.filter.parse(query), {})"
    queries = {"loss>5": True, "loss<5": False, "-loss>5": False, "loss=inf": True, "loss=nan": False}
    assert {query: page.evaluate(holds, query) for query in queries} == queries


def test_the_filter_says_what_it_does_not_know(served: Served, open_page: Open) -> None:
    page = open_page(served.root + "/").page
    page.get_by_role("link", name=re.compile("cccccc")).wait_for()
    page.keyboard.press("/")
    page.keyboard.type("foo<3 loss<abc")
    page.get_by_text("“abc” is not a number. No run has a metric, argument or setting “foo”.").wait_for()
    page.get_by_role("button", name="Clear filter").click()
    page.get_by_text("No run has a metric").wait_for(state="detached")


def test_runs_that_were_not_judged_are_no_passed_ones(served: Served, open_page: Open) -> None:
    page = open_page(served.root + "/").page
    page.get_by_role("searchbox").fill("000000-")
    verdict = page.get_by_role("combobox", name=re.compile("^Verdict"))
    verdict.select_option("PASS")
    lists(page)
    verdict.select_option("completed")
    lists(page, *reversed(EARLIER))


def test_an_argument_is_a_column_to_sort_by(served: Served, open_page: Open) -> None:
    """It is kept in the address, and removed again."""
    page = open_page(served.root + "/").page
    first, second, third = EARLIER
    page.get_by_role("searchbox").fill("000000-")
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="--learning-rate").check()
    head = page.get_by_role("columnheader", name=re.compile("--learning-rate"))
    head.get_by_role("button").click()
    lists(page, third, first, second)
    page.reload()
    page.get_by_role("cell", name="0.0006", exact=True).wait_for()
    lists(page, third, first, second)
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="--out").check()
    page.get_by_text(f"/runs/{first}").wait_for()
    page.set_viewport_size({"width": 700, "height": 500})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("checkbox", name="--learning-rate").uncheck()
    head.wait_for(state="detached")


def test_the_link_that_compares_stays_in_view(served: Served, open_page: Open) -> None:
    """Select all that are listed, on a narrow page, and move to the last: it hides nothing that has the focus."""
    page = open_page(served.root + "/", viewport={"width": 390, "height": 500}).page
    page.get_by_role("searchbox").fill("000000-")
    lists(page, *reversed(EARLIER))
    last = page.get_by_role("checkbox", name=re.compile("aaaaaa"))
    for run_id in EARLIER:
        page.get_by_role("checkbox", name=re.compile(run_id)).check()
    last.focus()
    compare = page.get_by_role("link", name="Compare 3")
    place, focused = compare.bounding_box(), last.bounding_box()
    assert place
    assert focused
    assert 0 <= place["y"] <= place["y"] + place["height"] <= focused["y"] <= 500


def test_two_runs_are_compared(served: Served, open_page: Open) -> None:
    """They are picked in the list; the page has what differs, and not what is the same."""
    page = open_page(served.root + "/").page
    first, second, _ = EARLIER
    for run_id in (first, second):
        page.get_by_role("checkbox", name=re.compile(run_id)).check()
    page.get_by_role("link", name=re.compile("Compare")).click()
    page.wait_for_url("**/compare?*")
    text = page.get_by_role("main").inner_text()
    assert "--learning-rate" in text
    assert {"0.0009", "0.0012"} <= set(re.findall(r"[0-9.]+", text))
    assert "LAB_ACCELERATOR" not in text
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download as one file").click()
        page.get_by_role("link", name="Making the file…").wait_for()
    assert saved.value.suggested_filename == f"{first}-and-1-more.html"
    assert "2 runs compared" in saved.value.path().read_text()
    page.get_by_role("link", name="Download as one file").wait_for()


def test_curves_of_a_comparison_are_switched_from_steps_to_time(served: Served, open_page: Open) -> None:
    """The axis, the legend at the crosshair and what a screen reader says are of seconds then."""
    first, second, _ = EARLIER
    page = open_page(f"{served.root}/compare?run={first}&run={second}").page
    page.get_by_role("application", name=re.compile("^loss over step")).wait_for()
    page.get_by_role("combobox", name="X axis").select_option("time")
    page.get_by_role("application", name=re.compile("^loss over seconds")).press("ArrowLeft")
    page.get_by_text("seconds 3", exact=True).first.wait_for()
    assert page.get_by_role("button", name=re.compile(r"^A learning-rate=0.0009")).count()


def test_how_curves_are_drawn_is_kept_in_the_address(served: Served, open_page: Open) -> None:
    """Smoothing, scale and axis are as chosen when the page is loaded again, and where its address is opened."""
    page = open_page(f"{served.root}/run/{next(iter(EARLIER))}").page
    page.get_by_role("slider").press("PageUp")
    page.get_by_role("checkbox", name="Log scale").check()
    page.get_by_role("combobox", name="X axis").select_option("time")
    weight = page.get_by_role("slider").input_value()
    assert float(weight) > 0
    page.reload()
    for shown in (page, open_page(page.url).page):
        shown.get_by_role("application", name=re.compile("^loss over seconds")).wait_for()
        assert shown.get_by_role("slider").input_value() == weight
        assert shown.get_by_role("checkbox", name="Log scale").is_checked()
        assert shown.get_by_role("combobox", name="X axis").input_value() == "time"
        shown.get_by_text(re.compile(r"\(smoothed ")).first.wait_for()


def test_epochs_whose_steps_begin_again_grow_into_the_curve_of_the_ended_run(served: Served, open_page: Open) -> None:
    """At each step the median in a band of all, as points come one by one; over time each value by itself."""
    run_id, epochs = "20260105-000000-vit-eeeeee", [(step, 10 * epoch + step) for epoch in (1, 2, 5) for step in (1, 2)]
    path = records.write(served.lab.path, run_id)
    samples = [{"metric": "loss", "step": step, "seconds": value, "value": value} for step, value in epochs]
    (path / "metrics.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    window = open_page("about:blank", script=PLOTS)
    window.page.goto(f"{served.root}/run/{run_id}")
    window.until(f"({POINTS})('loss') === 2")
    figure = window.page.locator('[data-chart="loss"]')
    figure.get_by_text("11 to 52; median and range of 3 epochs at each step").wait_for()
    assert figure.locator(".value").inner_text() == "52"
    for step, value in epochs:
        window.page.evaluate(GROW, [step, value])
    drawn = "(name) => plots.findLast((plot) => plot.root.closest(`[data-chart=${name}]`)).data.map((ys) => [...ys])"
    ended = window.page.evaluate(drawn, "loss")
    assert ended == [[1, 2], [51, 52], [11, 12], [21, 22]]
    wait_until(lambda: window.page.evaluate(drawn, "grown") == ended, 20, "the curve grows")
    window.page.get_by_role("combobox", name="X axis").select_option("time")
    window.page.get_by_role("application", name=re.compile("^grown over seconds")).wait_for()
    over_time = [[value for _, value in epochs]] * 2
    assert [window.page.evaluate(drawn, name) for name in ("loss", "grown")] == [over_time, over_time]
    shutil.rmtree(path)


def test_a_chart_is_enlarged_and_its_points_are_saved(served: Served, open_page: Open, tmp_path: Path) -> None:
    """On the page of a run and in the file of its report; nothing of it shows where no script runs."""
    run_id = next(iter(EARLIER))
    served.lab.call("report", run_id, "--out", str(tmp_path)).expect(0)
    report = (tmp_path / "report.html").as_uri()
    for address in (f"{served.root}/run/{run_id}", report):
        page = open_page(address, viewport={"width": 1280, "height": 900}).page
        enlarge_and_save(page, "aaaaaa-loss.csv", f'step,"loss"\n1,8\n2,7\n3,{400 / EARLIER[run_id]:.6g}\n')
    assert not open_page(report, java_script_enabled=False).page.get_by_text(re.compile("^(Enlarge|CSV)$")).count()


def enlarge_and_save(page: Page, name: str, points: str) -> None:
    """Enlarge the chart of the loss and make it small again, by keyboard, and save its points."""
    size = "(figure) => [figure.clientWidth, figure.clientHeight]"
    chart = page.locator('[data-chart="loss"]')
    small = chart.evaluate(size)
    page.get_by_role("button", name="Enlarge loss").press("Enter")
    large = chart.evaluate(size)
    assert large[0] > 1.5 * small[0]
    assert large[1] > 1.5 * small[1]
    page.keyboard.press("Escape")
    assert chart.evaluate(size) == small
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save loss as CSV").press("Enter")
    assert saved.value.suggested_filename == name
    assert saved.value.path().read_text() == points


def test_a_note_is_kept_on_a_run(served: Served, open_page: Open) -> None:
    """Type a note on its page: it is in the list, and `labctl show` has it."""
    run_id = next(iter(EARLIER))
    page = open_page(f"{served.root}/run/{run_id}").page
    page.get_by_role("button", name="Add note").click()
    page.get_by_role("textbox", name=re.compile("Note")).fill("baseline <b>before</b> the new disks")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.get_by_text("baseline <b>before</b> the new disks").first.wait_for()
    assert served.lab.call("show", run_id, "--json").expect(0).json["note"] == "baseline <b>before</b> the new disks"
    listed = open_page(served.root + "/").page
    listed.get_by_role("row").filter(has_text="aaaaaa").get_by_text("baseline <b>before</b> the new disks").wait_for()


def test_a_log_is_searched_and_a_file_is_opened(served: Served, open_page: Open) -> None:
    run_id = next(iter(EARLIER))
    page = open_page(f"{served.root}/run/{run_id}").page
    page.get_by_role("log").get_by_text("second line: out of tea").wait_for()
    page.get_by_role("searchbox", name="Search the log").fill("out of TEA")
    page.keyboard.press("Enter")
    page.locator("button:focus", has_text="2: second line: out of tea").wait_for()
    page.get_by_role("list", name="Matching lines").get_by_role("button", name="2: second line: out of tea").click()
    page.get_by_role("table", name="Files").get_by_role("link", name="result.json").click()
    page.wait_for_url("**/files/result.json")
    assert json.loads(page.inner_text("body"))["run_id"] == run_id


def test_a_run_is_stopped_by_its_page_only_if_one_says_so(served: Served, open_page: Open) -> None:
    """The dialog's other button, and Escape, leave it alone; `labctl show` knows how it ended."""
    run_id = served.lab.call("run", "opt-tiny", "--detach", "--json", "--set", "steps=4000").expect(0).json["run_id"]
    window = open_page("about:blank", script=PLOTS)
    page = window.page
    page.goto(f"{served.root}/run/{run_id}")
    window.until(f"({POINTS})('loss') >= 3", limit=120)
    stop, dialog = page.get_by_role("button", name=re.compile("^Stop")), page.get_by_role("dialog")
    stop.click()
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="hidden")
    stop.click()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    points = page.evaluate(POINTS, "loss")
    window.until(f"({POINTS})('loss') > {points + 2}", limit=60)
    assert served.lab.call("show", run_id).out.count("running") == 1
    stop.click()
    dialog.get_by_role("button", name=re.compile("^Stop")).click()
    page.get_by_role("banner").get_by_text(re.compile("interrupted")).first.wait_for(timeout=60_000)
    assert page.locator("header .status").get_attribute("class") == "status interrupted"
    result = served.lab.call("show", run_id, "--json").expect(0).json
    assert (result["verdict"], result["cause"]) == ("ERROR", "interrupted")

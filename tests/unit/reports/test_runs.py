"""The report of runs and of a metrics.csv, from fictitious records."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support import records

from labctl.errors import ConfigError
from labctl.model import Metric, Reduce, Result
from labctl.records import note, store
from labctl.records.metrics import Sample
from labctl.reports import chart, curves, page, runs, samples
from labctl.reports.runs import Report
from labctl.runs import compare, series
from labctl.ui import site

FIRST, SECOND = "20261125-203600-opt-tiny-0d07", "20261125-203700-opt-tiny-1e18"
THIRD = "20261125-203800-opt-tiny-2f29"
LOSSES = [8 - step / 25 for step in range(40)]
BROKEN = "RuntimeError: <script>alert(1)</script> & more"


def report(lab: Path, *run_ids: str) -> Report:
    """Return the report of these runs of the lab."""
    results = [store.read_result(lab, run_id) for run_id in run_ids]
    return runs.of_runs(lab, [compare.read(lab, result) for result in results if result])


def sampled(path: Path, devices: int, seconds: int = 30, *, lost: int | None = None) -> None:
    """Write samples of a node, one a second, empty at ``lost``; the last line is incomplete."""
    devices_read = (f"device {number} utilisation (%)" for number in range(devices))
    head = ["seconds (s)", "lost samples (count)", "cpu (%)", *devices_read]
    rows = [[f"{at}", "0", *([""] if at == lost else [f"{50 + at}"]) * (1 + devices)] for at in range(seconds)]
    (path / "samples").mkdir(exist_ok=True)
    (path / "samples/worker-0.csv").write_text("\n".join(",".join(row) for row in (head, *rows)) + "\n1,2")


def titles(made: Report) -> list[str]:
    """Return the titles of the report's charts."""
    return re.findall(r"<figcaption><strong>([^<]*)", made.html)


def test_a_report_has_the_verdict_the_curves_the_machine_the_ranks_the_log_and_the_environment(tmp_path: Path) -> None:
    """Report a full record: verdict, five charts with pictures, slowest rank, last line of the log, image."""
    ranks = [{"rank": rank, "node": "worker-0"} for rank in range(3)]
    path = records.write(tmp_path, FIRST, losses=LOSSES, throughput=24.8, log="the last line\n", ranks=ranks)
    sampled(path, devices=2, lost=7)
    (path / "ranks").mkdir()
    for rank, milliseconds in enumerate((180, 220, 181)):
        (path / f"ranks/rank-{rank}.log").write_text(f"step 1 step time: 900 ms\nstep 2 step time: {milliseconds} ms\n")
    made = report(tmp_path, FIRST)
    assert "All criteria met on 2 ranks." in made.html
    assert titles(made) == ["loss", "step time", "cpu", "device utilisation", "time per rank"]
    assert "rank 1 is the slowest: 21.5 % above the median" in made.html
    assert "no value for 1 of 30" in made.html
    assert "<pre>the last line</pre>" in made.html
    assert '<th scope="row">image</th><td>labctl/cpu</td>' in made.html
    assert set(made.pictures) == {
        "loss.png", "step+time.png", "machine+cpu.png", "machine+device+utilisation.png", "ranks.png"
    }  # fmt: skip
    assert all(picture.startswith(b"\x89PNG") for picture in made.pictures.values())


def test_the_page_begins_with_the_workload_its_verdict_and_its_main_figures(tmp_path: Path) -> None:
    """Report a run: name and verdict are the heading, then rate, loss, nodes and time, the sentence last."""
    records.write(tmp_path, FIRST, losses=[8.119, 4.8749], throughput=208.604)
    header = report(tmp_path, FIRST).html.partition("<header")[2].partition("</header>")[0]
    assert '<h1>opt-tiny <span class="status completed">completed</span></h1>' in header
    figures = re.findall("<li>(.*?)</li>", header)
    assert figures == ["208.6 samples/s", "loss 8.12 → 4.87", "2 nodes", "23 s"]
    assert header.index("All criteria met") > header.index("23 s")


def test_a_loss_that_ended_as_nan_is_in_the_headline_and_among_the_metrics(tmp_path: Path) -> None:
    """Report a run whose loss became nan: both say so."""
    records.write(tmp_path, FIRST, metrics={"loss": {"first": 8.0, "last": None, "note": "nan"}})
    page = report(tmp_path, FIRST).html
    assert "<li>loss 8 → nan</li>" in page
    assert '<td data-head="Value">nan <span class="dim">8 at the start</span></td>' in page


def test_the_headline_of_a_run_without_loss_and_throughput_has_its_first_metrics(tmp_path: Path) -> None:
    """Report a run with other metrics: the first two are in the headline, with their names."""
    metrics = {name: {"value": 2, "unit": "ranks"} for name in ("answers", "late", "third")}
    records.write(tmp_path, FIRST, metrics=metrics)
    assert "<li>answers 2 ranks</li>\n<li>late 2 ranks</li>\n<li>2 nodes" in report(tmp_path, FIRST).html


def test_what_ran_and_where_its_files_are_come_before_the_figures_and_packages_are_folded(tmp_path: Path) -> None:
    """Report a run: command, arguments and links stand above the figures, packages in a closed part at the end."""
    request = {"workload": "opt-tiny", "options": {"arguments": [["steps", "40"]]}}
    versions = {"packages": {"torch": "2.4"}, "image_id": "sha256:1d7aa7a765045565"}
    records.write(tmp_path, FIRST, throughput=24.8, request=request, versions=versions, arguments=("--steps", "40"))
    page = report(tmp_path, FIRST).html
    run = page.partition("<h2>Run</h2>")[2].partition("<h2>Figures</h2>")[0]
    assert "<span>labctl</span> <span>run</span> <span>opt-tiny</span> <span>--set</span> <span>steps=40</span>" in run
    assert "<span>--steps</span> <span>40</span>" in run
    assert "labctl/cpu (1d7aa7a76504)" in run
    assert f'<a href="../../runs/{FIRST}/output.log">output.log</a>' in run
    assert re.search("<summary>1 package</summary>.*package torch", page, re.DOTALL)


def test_a_page_elsewhere_links_the_files_of_the_run(tmp_path: Path) -> None:
    """Report into another folder, whose path has a blank: the links lead back to the record."""
    records.write(tmp_path / "my lab", FIRST)
    result = store.read_result(tmp_path / "my lab", FIRST)
    assert result
    made = runs.of_runs(tmp_path / "my lab", [compare.read(tmp_path / "my lab", result)], tmp_path / "out")
    assert f'href="../my%20lab/runs/{FIRST}/output.log"' in made.html


def test_a_figure_says_what_it_is_the_median_of_and_its_part_per_rank(tmp_path: Path) -> None:
    """Report rates of two ranks: the steps that count, the part of each rank; of a loss its first value."""
    records.write(tmp_path, FIRST, losses=[8.0, 7.0], tokens=[100.0, 110.0, 120.0], throughput=25.0)
    page = report(tmp_path, FIRST).html
    assert '<span class="dim">mean of steps 1 to 3, 55 per rank</span>' in page
    assert '<span class="dim">12.5 per rank</span>' in page
    assert '<span class="dim">8 at the start</span>' in page


@pytest.mark.parametrize(
    ("reduce", "skip", "steps", "text"),
    [
        ("median", 3, [4, 5, 120], ["median of steps 4 to 120"]),
        ("max", 2, [None, None], ["max without the first 2"]),
        ("max", 0, [None, None], ["max"]),
        ("median", 3, [4], []),
        ("last", 0, [1, 2], []),
    ],
)
def test_a_reduction_is_said_with_the_steps_that_count(
    reduce: Reduce, skip: int, steps: list[int | None], text: list[str]
) -> None:
    """Render reductions of several values, with and without steps; one of a single value is not said."""
    metric = Metric(name="tokens", pattern="(x)", reduce=reduce, skip=skip)
    kept = [Sample(metric="tokens", step=step, seconds=None, value=1.0) for step in steps]
    assert list(runs._reduction(metric, kept)) == text


def test_ranks_that_print_steps_but_no_times_are_charted_by_when_they_printed_them(tmp_path: Path) -> None:
    """Report ranks that print steps without times: their times come from output.times."""
    path = records.write(tmp_path, FIRST)
    (path / "ranks").mkdir()
    times = []
    for rank, seconds in enumerate((2.0, 3.0)):
        (path / f"ranks/rank-{rank}.log").write_text("start\nstep 1/3 a\nstep 2/3 a\nstep 3/3 a\nend\n")
        times += [f"{1000 + when * seconds} {rank}\n" for when in (0, 10, 11, 12, 50)]
    (path / "output.times").write_text("".join(times))
    made = report(tmp_path, FIRST)
    assert titles(made) == ["time per rank"]
    assert "rank 1 is the slowest: 20 % above the median" in made.html


def test_ranks_that_take_no_time_are_charted_without_a_share(tmp_path: Path) -> None:
    """Report ranks with step times of 0: the slowest is named without a percentage."""
    path = records.write(tmp_path, FIRST)
    (path / "ranks").mkdir()
    for rank in (0, 1):
        (path / f"ranks/rank-{rank}.log").write_text("step time: 0 ms\nstep time: 0 ms\n")
    html = report(tmp_path, FIRST).html
    assert "is the slowest" in html
    assert "above the median" not in html


def test_ranks_whose_steps_came_at_once_have_no_times(tmp_path: Path) -> None:
    """Report ranks whose steps have the same time: no chart."""
    path = records.write(tmp_path, FIRST)
    (path / "ranks").mkdir()
    for rank in (0, 1):
        (path / f"ranks/rank-{rank}.log").write_text("step 1/3\nstep 2/3\n")
    (path / "output.times").write_text("1000 0\n1000 0\n1000 1\n1000 1\n")
    assert titles(report(tmp_path, FIRST)) == []


@pytest.mark.parametrize(
    ("step", "seconds", "axis"), [(1, 2.0, "step"), (None, 2.0, "seconds"), (None, None, "value"), (1, None, "step")]
)
def test_a_metric_is_drawn_over_steps_where_they_are_known_else_over_time(
    step: int | None, seconds: float | None, axis: str
) -> None:
    """Choose the x axis of samples with or without steps and times."""
    assert curves._axis([Sample(metric="tokens", step=step, seconds=seconds, value=1.0)]) == axis


def without_scripts(page: str) -> str:
    """Return a page without labctl's own scripts and its charts' data; each script is one that its policy names."""
    allowed = re.findall(
        "'sha256-([^']+)'", page.partition('http-equiv="Content-Security-Policy"')[2].partition(">")[0]
    )
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert [b64encode(sha256(script.encode()).digest()).decode() for script in scripts] == allowed
    assert scripts == [
        (Path(runs.__file__).parent / "static" / name).read_text() for name in (runs.COMMON, *runs.SCRIPTS)
    ]
    return re.sub(r'<script( type="application/json" id="charts"[^>]*)?>.*?</script>', "", page, flags=re.DOTALL)


def chart_data(page: str) -> list[dict[str, Any]]:
    """Return the data of a page's charts."""
    element = page.partition('id="charts"')[2].partition("</script>")[0]
    data: list[dict[str, Any]] = json.loads(element.partition(">")[2])
    return data


def test_a_page_fetches_nothing_and_runs_only_its_own_scripts_and_what_a_log_says_stays_text(tmp_path: Path) -> None:
    """Put markup into arguments, log and samples: it is escaped, and the page loads nothing and runs three scripts."""
    arguments = ("--name", "<img src=x onerror=alert(1)>")
    log = f"step 1\n{BROKEN}\n"
    failed: dict[str, Any] = {"verdict": "ERROR", "cause": "rank-crashed", "exit_code": 4}
    message = f"rank 1 on worker-1 exited with code 7: {BROKEN}"
    path = records.write(tmp_path, FIRST, losses=LOSSES, log=log, arguments=arguments, message=message, **failed)
    (path / "samples").mkdir()
    (path / "samples/<b>.csv").write_text("seconds (s),<i>cpu</i> (%)\n0,1\n1,2\n")
    page = without_scripts(report(tmp_path, FIRST).html)
    assert not re.search(
        r'<(script|img|b|i|link|iframe)\b|href="(?!#|\.\./\.\./runs/20261125)|<[^>]* src=|url\((?!#)|@import', page
    )
    assert "default-src 'none'" in page
    assert page.count("&lt;script&gt;alert(1)") >= 3


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--<script>", "\u2028\u2029", "\"'&{{ 7 * 7 }}"]
)
def test_a_name_in_the_data_of_charts_cannot_end_it(tmp_path: Path, name: str) -> None:
    """Name a metric and a line as markup: the data has no character that ends it, and gives the name unchanged."""
    path = records.write(tmp_path, FIRST)
    samples = [{"metric": name, "step": at, "seconds": float(at), "value": 20.0 + at} for at in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = report(tmp_path, FIRST).html
    without_scripts(page)
    assert [chart["title"] for chart in chart_data(page)] == [name]
    data = curves.as_data(charted(name, {name: [(1.0, 2.0), (2.0, 3.0)]}))
    assert not set(data) & set("<>&\u2028\u2029")
    assert json.loads(data)[0]["lines"][0]["name"] == name


def charted(title: str, lines: dict[str, Any]) -> list[curves.Chart]:
    """Return the chart of lines over steps, by their names."""
    series = [curves.Series(name=("", name), points=points) for name, points in lines.items()]
    return curves.of_series(title, series, [("", "")], "step", "")


SERVED = {"site": SimpleNamespace(root="/TOKEN", lab="demo"), "here": "/"}
"""Data of a served page that is not of its runs."""


def served(lab: Path, *results: Result) -> str:
    """Return the served page of these runs of the lab."""
    content = runs.served(lab, [compare.read(lab, result) for result in results], "/TOKEN")
    return page.render("runs.html.j2", Path(site.__file__).parent / "pages", **SERVED, **content)


def read(lab: Path, run_id: str) -> Result:
    """Return a run's result."""
    result = store.read_result(lab, run_id)
    assert result
    return result


def test_a_served_page_is_the_written_one_with_links_to_the_server(tmp_path: Path) -> None:
    """Serve a run: data and text are those of its report, scripts and files have addresses, nothing is drawn."""
    path = records.write(tmp_path, FIRST, losses=LOSSES, throughput=24.8, log="the last line\n")
    sampled(path, devices=2)
    html, written = served(tmp_path, read(tmp_path, FIRST)), report(tmp_path, FIRST).html
    assert chart_data(html) == chart_data(written)
    assert re.findall("<h2>.*</h2>", html) == re.findall("<h2>.*</h2>", written)
    assert re.findall('<script src="([^"]+)"></script>', html) == [
        "/TOKEN/static/common.js", "/TOKEN/static/uplot.js", "/TOKEN/static/charts.js"
    ]  # fmt: skip
    assert f'href="/TOKEN/run/{FIRST}/files/output.log"' in html
    assert "<svg" in written
    assert "<svg" not in html
    assert "<script>" not in html


def test_a_served_page_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a run where matplotlib cannot be imported: the page has its charts, a report fails."""
    records.write(tmp_path, FIRST, losses=LOSSES)
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'data-chart="loss"' in served(tmp_path, read(tmp_path, FIRST))
    with pytest.raises(ImportError):
        report(tmp_path, FIRST)


def test_the_page_of_a_run_under_way_claims_no_end(tmp_path: Path) -> None:
    """Serve a run with a provisional result: its state is a word, no cause and criteria; charts may still come."""
    records.write(tmp_path, FIRST, losses=LOSSES)
    provisional = replace(read(tmp_path, FIRST), verdict=runs.RUNNING, message="", checks=())
    html = served(tmp_path, provisional)
    assert '<header class="running">' in html
    assert '<span class="status running">RUNNING</span>' in html
    assert "No output yet." in html
    assert "at the end" not in html
    assert "Lines with the cause" not in html
    assert '<div class="charts" id="curves" data-controls>' in html
    assert re.search('<section hidden>\\n<h2>Machine</h2>\\n<div class="charts" id="machine">', html)
    assert "<h2>Machine</h2>" not in served(tmp_path, read(tmp_path, FIRST))


def test_a_page_of_the_site_replaces_parts_of_the_page_of_a_run(tmp_path: Path) -> None:
    """Extend the template: controls in the header, figures of now, and another log are where they belong."""
    records.write(tmp_path, FIRST, log="the last line\n")
    own = "{% extends 'runs.html.j2' %}{% block controls %}STOP{% endblock %}{% block now %}NOW{% endblock %}"
    (tmp_path / "own.html.j2").write_text(own + "{% block log %}LOG{% endblock %}")
    content = runs.served(tmp_path, [compare.read(tmp_path, read(tmp_path, FIRST))], "/TOKEN")
    html = page.render("own.html.j2", tmp_path, Path(site.__file__).parent / "pages", **SERVED, **content)
    assert re.search("STOP\\s*</header>.*<main>\\s*NOW.*LOG.*<h2>Environment", html, re.DOTALL)
    assert "the last line" not in html


def test_a_run_has_the_same_color_in_all_charts_and_each_line_other_dashes(tmp_path: Path) -> None:
    """Compare three runs, of which the first has no samples: color by run, dashes by line."""
    for number, run_id in enumerate((FIRST, SECOND, THIRD)):
        path = records.write(tmp_path, run_id, losses=LOSSES, arguments=("--lr", str(number)))
        if number:
            sampled(path, devices=2)
    loss, _, cpu, devices = chart_data(served(tmp_path, *(read(tmp_path, run_id) for run_id in (FIRST, SECOND, THIRD))))
    assert {line["name"]: (line["color"], line["dash"]) for line in loss["lines"]} == {
        "A lr=0": (0, 0), "B lr=1": (1, 1), "C lr=2": (2, 2)
    }  # fmt: skip
    assert {line["name"]: (line["color"], line["dash"]) for line in cpu["lines"]} == {
        "B lr=1 worker-0": (1, 1), "C lr=2 worker-0": (2, 2)
    }  # fmt: skip
    assert [line["color"] for line in devices["lines"]] == [1, 1, 2, 2]
    assert len({line["dash"] for line in devices["lines"]}) == 4


def test_a_spike_and_a_gap_stay_in_a_thinned_line() -> None:
    """Thin 100,000 points with one high, one low and a part without values: few points, with all three."""
    values: list[float | None] = [1.0] * 100_000
    values[31_415], values[62_831] = 9.0, -9.0
    values[50_000:50_600] = [None] * 600
    (chart,) = charted("loss", {"": [(float(step), value) for step, value in enumerate(values)]})
    points = curves.thinned(chart).lines[0].points
    assert {(31_415.0, 9.0), (62_831.0, -9.0)} < set(points)
    assert len(points) <= 2 * curves.PARTS
    assert [value for step, value in points if 50_200 <= step < 50_400] == [None]


def test_points_between_gaps_are_marked() -> None:
    """Draw a line of which every second point has no value: a mark for each of the others."""
    points = [(float(step), 5.0 if step % 2 else None) for step in range(20)]
    (drawn,) = charted("loss", {"": points})
    assert chart.curves(drawn).svg().count("<use ") == 10


def test_a_line_that_stands_for_several_has_the_range_of_their_values() -> None:
    """Thin a line with three values of each second: the median, in a band of all; a second without any is a gap."""
    points = [(float(second), value) for second in range(3) for value in (1.0, 2.0, 7.0)]
    chart = curves.Chart(
        name="cpu", title="cpu", caption="", along="seconds", unit="%",
        lines=(curves.Line(name="all", points=[*points, (3.0, None), (3.0, None)]),),
    )  # fmt: skip
    (line,) = curves.thinned(chart).lines
    assert line.points == [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0), (3.0, None)]
    assert line.band == [(1.0, 7.0)] * 3 + [(None, None)]


def node_tracks(*memory: float) -> list[samples.Track]:
    """Return samples of nodes with these amounts of memory, one a second, each node a bit later than the one before."""
    return [
        samples.Track(
            what="memory", unit="GB", node=f"worker-{number}",
            points=tuple((second + number / 10, amount) for second in range(30)),
        )
        for number, amount in enumerate(memory)
    ]  # fmt: skip


def test_nodes_of_many_runs_are_drawn_as_the_mean_of_each_run_in_a_band() -> None:
    """Chart four runs on two nodes: a line each, steady at the mean, with the band of both; its caption says so."""
    labels = [(name, name) for name in "ABCD"]
    (chart,) = curves.of_machine({label: node_tracks(10.0, 20.0) for label in labels})
    assert [line.name for line in chart.lines] == ["A", "B", "C", "D"]
    assert chart.caption == "10 to 20 GB; mean of 2 nodes"
    (line, *_) = curves.thinned(chart).lines
    assert {value for _, value in line.points} == {15.0}
    assert set(line.band) == {(10.0, 20.0)}
    assert len(line.points) == 15


@pytest.mark.parametrize(
    ("names", "caption"),
    [
        ([("", "", f"worker-{node}", "") for node in range(8)], "mean of 8 nodes"),
        ([("", "", "worker-0", f"device {number}") for number in range(8)], "mean of 8 devices"),
        ([(name, name, "worker-0", "") for name in "ABCDEFGH"], "mean of 8 runs"),
        ([("A", f"A{number}") for number in range(8)], "mean of 8 runs"),
        ([("A", "A", f"w{node}", "") for node in range(5)] + [("B", "B", f"w{node}", "") for node in range(3)],
         "mean of 3 to 5 nodes"),
        ([("", "", "worker-0", f"device {number}") for number in range(6)], ""),
    ],
)  # fmt: skip
def test_a_caption_says_of_what_lines_are_the_mean(names: list[tuple[str, ...]], caption: str) -> None:
    """Chart more series than can be told apart, and as many as can."""
    series = [curves.Series(name=name, points=[(0.0, 1.0), (1.0, 3.0)]) for name in names]
    runs_of = list(dict.fromkeys((name[0], name[1]) for name in names))
    (chart,) = curves.of_series("load", series, runs_of, "seconds", "")
    assert chart.remark == caption


def test_runs_with_the_same_steps_are_averaged_step_by_step() -> None:
    """Merge eight lines of three steps, of which two have no value at the last: mean and range at each step."""
    lines = {str(number): [(1.0, 1.0), (2.0, float(number)), (3.0, None if number < 2 else 5.0)] for number in range(8)}
    (chart,) = charted("loss", lines)
    assert chart.lines[0].points == [(1.0, 1.0), (2.0, 3.5), (3.0, 5.0)]
    assert chart.lines[0].band == [(1.0, 1.0), (0.0, 7.0), (5.0, 5.0)]


def with_series(path: Path, *samples: dict[str, Any]) -> None:
    """Write the samples of the loss of a run."""
    text = "".join(json.dumps({"metric": "loss", "seconds": None} | sample) + "\n" for sample in samples)
    (path / "metrics.jsonl").write_text(text)


def test_of_ranks_that_print_the_same_metric_one_is_drawn(tmp_path: Path) -> None:
    """Report a loss of rank 1 that one rank 0 printed many times: the curve is that of rank 0, and says so."""
    path = records.write(tmp_path, FIRST)
    stray = {"step": 1, "value": 99.0, "rank": 1, "seconds": 0.5}
    with_series(path, stray, *({"step": at, "value": 8.0 - at, "rank": 0, "seconds": float(at)} for at in (1, 2, 3)))
    loss, times = chart_data(served(tmp_path, read(tmp_path, FIRST)))
    assert loss["lines"][0]["points"] == [[1.0, 7.0], [2.0, 6.0], [3.0, 5.0]]
    assert loss["lines"][0]["times"] == [1.0, 2.0, 3.0]
    assert loss["caption"] == "5 to 7; rank 0"
    assert times["lines"][0]["points"] == [[2.0, 1.0], [3.0, 1.0]]
    assert times["lines"][0]["times"] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("counts", "rank"), [({0: 9, 1: 10}, 0), ({0: 1, 1: 256}, 1), ({2: 5, 1: 5}, 1), ({None: 4}, None), ({}, None)]
)
def test_the_rank_to_draw_is_the_lowest_of_those_that_print_much(counts: dict[int | None, int], rank: int) -> None:
    assert series.main_rank(counts) == rank


def test_a_run_without_steps_is_left_out_of_a_chart_over_steps(tmp_path: Path) -> None:
    """Compare runs of which one printed no steps: the other is drawn over them; without any steps all over time."""
    for run_id, step in ((FIRST, 1), (SECOND, None)):
        path = records.write(tmp_path, run_id, arguments=("--lr", str(step)))
        with_series(path, *({"step": step and at, "value": 8.0 - at, "seconds": float(at)} for at in (1, 2)))
    loss, *_ = chart_data(served(tmp_path, read(tmp_path, FIRST), read(tmp_path, SECOND)))
    assert (loss["along"], [line["name"] for line in loss["lines"]]) == ("step", ["A lr=1"])
    assert loss["caption"] == "6 to 7; without B lr=None: no steps"
    with_series(tmp_path / "runs" / FIRST, *({"step": None, "value": 8.0, "seconds": float(at)} for at in (1, 2)))
    loss, *_ = chart_data(served(tmp_path, read(tmp_path, FIRST), read(tmp_path, SECOND)))
    assert (loss["along"], len(loss["lines"])) == ("seconds", 2)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([("--lr", "0.1"), ("--lr", "0.2")], ["A lr=0.1", "B lr=0.2"]),
        ([("--lr", "0.1"), ("--optim.lr", "2", "--lr", "0.1")], ["A lr=none", "B lr=2"]),
        ([("--a", "1", "--b", "1", "--c", "1"), ("--a", "2", "--b", "2", "--c", "2")], ["A 0d07", "B 1e18"]),
        ([("--data", "/a/very/long/path/to/the/data"), ("--data", "b")], ["A 0d07", "B 1e18"]),
        ([(), ()], ["A1 0d07", "A2 1e18"]),
    ],
)
def test_lines_are_named_by_what_tells_runs_apart(
    tmp_path: Path, arguments: list[tuple[str, ...]], names: list[str]
) -> None:
    """Compare runs with few and short settings that differ, with many or long ones, and without any."""
    for run_id, own in zip((FIRST, SECOND), arguments, strict=True):
        records.write(tmp_path, run_id, losses=LOSSES, arguments=own)
    loss, *_ = chart_data(served(tmp_path, read(tmp_path, FIRST), read(tmp_path, SECOND)))
    assert [line["name"] for line in loss["lines"]] == names


def test_a_comparison_shows_curves_before_metrics_and_folds_log_and_environment_of_each_run(tmp_path: Path) -> None:
    for run_id, lr in ((FIRST, "0.1"), (SECOND, "0.2")):
        records.write(tmp_path, run_id, losses=LOSSES, arguments=("--lr", lr), log=f"log of {lr}\n")
    html = served(tmp_path, read(tmp_path, FIRST), read(tmp_path, SECOND))
    heads = re.findall("<h2>(.*)</h2>", html)
    assert heads[:3] == ["Runs", "What differs", "Curves"]
    assert heads.count("Curves") == 1
    assert 'id="charts" data-of="compare">' in html
    assert f'id="charts" data-of="{FIRST.rpartition("-")[2]}">' in served(tmp_path, read(tmp_path, FIRST))
    assert re.search(r"<details><summary>B</summary>\s*<pre>log of 0.2</pre>\s*</details>", html)
    assert re.findall("<summary>([AB])</summary>", html) == ["A", "B"] * 2


def test_many_files_that_differ_are_folded_behind_the_settings(tmp_path: Path) -> None:
    """Compare runs with 20 other files and another argument: the argument is shown, the number of files beside it."""
    for run_id, lr in ((FIRST, "0.1"), (SECOND, "0.2")):
        path = records.write(tmp_path, run_id, arguments=("--lr", lr))
        for number in range(20):
            (path / f"work/module_{number}.py").write_text(lr)
    html = served(tmp_path, read(tmp_path, FIRST), read(tmp_path, SECOND))
    shown, _, folded = html.partition("<h2>What differs</h2>")[2].partition("<details><summary>20 more</summary>")
    assert re.findall('<th scope="row">(.*?)</th>', shown) == ["--lr"]
    assert "file module_7.py" in folded


def test_a_run_that_its_user_stopped_says_nothing_of_another_attempt(tmp_path: Path) -> None:
    stopped: dict[str, Any] = {"verdict": "ERROR", "cause": "interrupted", "message": "stopped", "exit_code": 130}
    records.write(tmp_path, FIRST, **stopped, domain="unknown", retry="unknown")
    html = report(tmp_path, FIRST).html
    assert "stopped" in html
    assert "Retry:" not in html


def test_a_run_that_its_user_stopped_does_not_look_failed(tmp_path: Path) -> None:
    """Report a stopped run alone and beside one that crashed: its ERROR has the neutral look, the other's has not."""
    records.write(tmp_path, FIRST, verdict="ERROR", cause="interrupted", message="stopped", exit_code=130)
    records.write(tmp_path, SECOND, verdict="ERROR", cause="rank-crashed", message="crashed", exit_code=4)
    html = report(tmp_path, FIRST).html
    assert '<header class="interrupted">' in html
    assert '<span class="status interrupted">ERROR</span>' in html
    looks = re.findall('<td class="status ([^"]*)">ERROR</td>', report(tmp_path, FIRST, SECOND).html)
    assert sorted(looks) == ["error", "interrupted"]


def test_a_metric_that_is_the_last_of_several_values_is_said_to_be_at_the_end(tmp_path: Path) -> None:
    """Report a throughput declared as the last one, printed once, then printed twice."""
    path = records.write(tmp_path, FIRST, throughput=24.8)
    said = 'throughput<span class="dim">at the end</span>'
    assert said not in report(tmp_path, FIRST).html
    lines = ({"metric": "throughput", "step": step, "seconds": 1.0, "value": 24.8} for step in (1, 2))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert said in report(tmp_path, FIRST).html


def test_the_name_of_a_chart_is_that_of_no_other_and_of_a_file() -> None:
    """A metric's own name if it is one, whatever else is on the page."""
    titles = ("step time", "step-time", "step_time", "step+time", "loss", "Loss", "machine+loss", "../loss", "<>")
    names = [*map(curves.name_of, titles), *map(curves.machine_name, titles)]
    assert len(set(names)) == len(names)
    assert not set("".join(names)) & set('/\\<>"')
    assert curves.name_of("step_time-1.a") == "step_time-1.a"


def test_ranks_of_a_long_run_are_timed_by_their_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time ranks whose logs are longer than what is read: by the ends of logs and times, which belong together."""
    path = records.write(tmp_path, FIRST, ranks=[{"rank": rank, "node": "worker-0"} for rank in (0, 1)])
    (path / "ranks").mkdir()
    times = []
    for rank in (0, 1):
        (path / f"ranks/rank-{rank}.log").write_text("".join(f"step {step}/1000\n" for step in range(1000)))
    for step in range(1000):
        times += [f"{1000 + step * (1 if step < 500 else 3) * (1 + rank)} {rank}\n" for rank in (0, 1)]
    (path / "output.times").write_text("".join(times))
    monkeypatch.setattr(runs, "RANKS_TAIL", 4000)
    means, unit = runs.rank_times(tmp_path, read(tmp_path, FIRST))
    assert means == pytest.approx({0: 3, 1: 6})
    assert unit == "s/step"


def test_a_failed_run_shows_the_lines_with_the_cause_before_its_figures(tmp_path: Path) -> None:
    """Report a crashed run: the lines around the cause, and if trying again helps."""
    log = "".join(f"step {step}\n" for step in range(100)) + f"Traceback:\n{BROKEN}\n" + "bye\n" * 80
    message = f"rank 1 on worker-1 exited with code 7: {BROKEN}"
    failed: dict[str, Any] = {"verdict": "ERROR", "cause": "rank-crashed", "message": message, "exit_code": 4}
    failed |= {"domain": "unknown", "retry": "unknown", "evidence": BROKEN}
    records.write(tmp_path, FIRST, log=log, **failed)
    page = report(tmp_path, FIRST).html
    assert "Retry: may help: cause unclear" in page
    cause = page.partition("<h2>Lines with the cause</h2>")[2].partition("</pre>")[0]
    assert "Traceback:\nRuntimeError" in cause
    assert "step 98" in cause
    assert "step 80" not in cause


def test_the_head_of_the_page_of_a_failed_run_says_what_is_next(tmp_path: Path) -> None:
    message = "rank 0 on worker-0 exited with code 1: EOFError: EOF when reading a line"
    records.write(tmp_path, FIRST, verdict="ERROR", cause="rank-crashed", message=message, exit_code=4)
    header = report(tmp_path, FIRST).html.partition("<main>")[0]
    step = "nobody can answer a rank: pass what it asks for as an argument, after <code>--</code>"
    assert f"<p>Next: {step}</p>" in header


def test_a_run_that_missed_a_criterion_shows_the_line_of_its_metric_in_place_of_a_cause(tmp_path: Path) -> None:
    """Report a missed criterion: the last line of its metric, and no lines with the cause."""
    log = "failed to load libnvml\nThroughput: 99 samples/sec\nThroughput: 24.8 samples/sec\nstep 1/1 loss 7\nbye\n"
    checks = [
        {"criterion": "throughput >= 600 samples/s", "value": 24.8, "passed": False},
        {"criterion": "loss < 8", "value": 7.0, "passed": True},
    ]
    missed: dict[str, Any] = {"verdict": "FAIL", "cause": "criteria", "exit_code": 5, "checks": checks}
    message = "1 of 2 criteria not met: throughput >= 600 samples/s (was 24.8)."
    records.write(tmp_path, FIRST, throughput=24.8, losses=[7.0], log=log, message=message, **missed)
    page = report(tmp_path, FIRST).html
    assert "Lines with the cause" not in page
    shown = page.partition("<h2>Lines with the missed metric</h2>")[2].partition("</section>")[0]
    assert shown.strip() == "<pre>Throughput: 24.8 samples/sec</pre>"


def test_a_node_that_the_others_waited_for_is_named(tmp_path: Path) -> None:
    """Report a run with a straggler: its sentence is on the page; without one there is no such heading."""
    late = {"node": "worker-1", "share": 0.08, "others": 0.56, "behind": 0.33}
    records.write(tmp_path, FIRST, straggler=late)
    records.write(tmp_path, SECOND)
    assert "<p>worker-1 arrives last, the others wait for it: " in report(tmp_path, FIRST).html
    assert "Node that the others waited for" not in report(tmp_path, SECOND).html


def test_changes_on_the_nodes_are_on_the_page(tmp_path: Path) -> None:
    """Report a run while which a link flapped: the change is on the page, escaped; without one there is no heading."""
    records.write(tmp_path, FIRST, node_changes=["worker-1 <eth0>: carrier_changes +6"])
    records.write(tmp_path, SECOND)
    assert "<li>worker-1 &lt;eth0&gt;: carrier_changes +6</li>" in report(tmp_path, FIRST).html
    assert "Changes on the nodes" not in report(tmp_path, SECOND).html


def test_a_metric_that_was_found_is_shown_with_its_unit_and_the_text_that_has_it(tmp_path: Path) -> None:
    """Report a metric found in the output: its unit and the line that has it."""
    line = {"found": "1.2 samples/s", "line": "step 9: 24.8 samples/s"}
    metrics = {"samples_per_second": {"value": 24.8, "unit": "samples/s", **line}}
    checks = [{"criterion": "samples_per_second >= 600 samples/s", "value": 24.8, "passed": False}]
    missed: dict[str, Any] = {"verdict": "FAIL", "cause": "criteria", "exit_code": 5, "checks": checks}
    path = records.write(tmp_path, FIRST, metrics=metrics, message="1 of 1 criterion not met.", **missed)
    samples = [{"metric": "samples_per_second", "step": at, "seconds": float(at), "value": 20.0 + at} for at in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = report(tmp_path, FIRST).html
    assert '<span class="dim">found in “step 9: 24.8 samples/s”</span>' in page
    assert "<pre>step 9: 24.8 samples/s</pre>" in page
    assert "21 to 22 samples/s" in page


def test_a_run_that_left_nothing_but_its_result_has_a_report(tmp_path: Path) -> None:
    """Report a run with result.json alone: message, "No output.", no pictures."""
    path = records.write(tmp_path, FIRST, verdict="ERROR", cause="does-not-fit", message="too large", exit_code=3)
    for name in ("metrics.jsonl", "settings.json", "versions.json", "job.json", "output.log"):
        (path / name).unlink()
    made = report(tmp_path, FIRST)
    assert "too large" in made.html
    assert "No output." in made.html
    assert made.pictures == {}


def test_the_note_on_a_run_is_on_its_page_as_text(tmp_path: Path) -> None:
    """Note markup on one of two runs: its own page has it in the header, that of both beside its id, escaped."""
    note.write(records.write(tmp_path, FIRST), "<b>lr halved</b>")
    records.write(tmp_path, SECOND)
    header = report(tmp_path, FIRST).html.partition("<main>")[0]
    assert "<p>Note: &lt;b&gt;lr halved&lt;/b&gt;</p>" in header
    assert f'{FIRST}</a><span class="dim">&lt;b&gt;lr halved&lt;/b&gt;</span>' in report(tmp_path, FIRST, SECOND).html
    assert "Note:" not in report(tmp_path, SECOND).html


def test_several_runs_are_on_one_page_with_what_differs_and_what_it_did(tmp_path: Path) -> None:
    """Report two runs: what differs, the change in the table alone, and that one run each is too few."""
    for run_id, figure, micro in ((FIRST, 24.8, "4"), (SECOND, 11.2, "1")):
        records.write(tmp_path, run_id, losses=LOSSES, throughput=figure, arguments=("--micro-batch", micro))
    page = report(tmp_path, FIRST, SECOND).html
    assert "2 runs compared" in page
    assert '<th scope="row">--micro-batch</th><td data-head="A">4</td><td data-head="B">1</td>' in page
    assert "throughput: 54.8 % slower" not in page
    assert "11.2 samples/s (-54.8 %)" in page
    assert "1 run each is too few to tell (needs 3 or more): <code>labctl run opt-tiny --repeat 5</code>" in page
    assert FIRST in page
    assert SECOND in page


def test_five_runs_with_the_same_settings_are_on_one_page_with_the_one_that_differs(tmp_path: Path) -> None:
    """Report five runs with the same settings: the one that differs is named, with the usual spread."""
    run_ids = [f"20261125-20360{number}-opt-tiny-0d07" for number in range(5)]
    for run_id, figure in zip(run_ids, (24.8, 24.9, 24.7, 25.0, 18.6), strict=True):
        records.write(tmp_path, run_id, throughput=figure)
    page = report(tmp_path, *run_ids).html
    assert "Nothing that was recorded differs." in page
    assert f"throughput of {run_ids[-1]}: same settings; 25.2 % slower, more than the usual 3.3 %" in page
    assert "mean of 5, spread 11.9 %" in page


def test_two_runs_with_the_same_settings_have_a_column_each(tmp_path: Path) -> None:
    """Report two runs with the same settings: a column each, with the change."""
    for run_id, figure in ((FIRST, 24.0), (SECOND, 18.0)):
        records.write(tmp_path, run_id, throughput=figure)
    page = report(tmp_path, FIRST, SECOND).html
    assert '<td data-head="A1">24 samples/s' in page
    assert '<td data-head="A2">18 samples/s (-25 %)' in page


def test_more_devices_than_can_be_told_apart_are_drawn_as_one_line_with_its_band(tmp_path: Path) -> None:
    """Report 16 devices: one line with a band; of 2, a line each."""
    sampled(records.write(tmp_path, FIRST), devices=16)
    drawn = report(tmp_path, FIRST).html.partition("device utilisation")[2]
    assert "device 0" not in drawn
    sampled(records.write(tmp_path, SECOND), devices=2)
    assert "worker-0 device 1" in report(tmp_path, SECOND).html


def test_a_loss_of_nan_is_a_gap_that_is_said(tmp_path: Path) -> None:
    """Report a loss with None: "no value for 2 of 5"."""
    records.write(tmp_path, FIRST, losses=[8.0, 7.5, None, None, 7.0])
    assert "7 to 8; no value for 2 of 5" in report(tmp_path, FIRST).html


def test_the_report_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """Report 100,000 steps: the page stays below 200,000 characters."""
    path = records.write(tmp_path, FIRST, losses=[8 - step / 1e5 for step in range(100_000)])
    assert path.is_dir()
    assert len(report(tmp_path, FIRST).html) < 200_000


def test_samples_of_days_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read samples larger than the limit: between 200 and 1000 of 1000 points."""
    path = records.write(tmp_path, FIRST)
    sampled(path, devices=1, seconds=1000)
    monkeypatch.setattr(store, "LARGEST_RECORD", 5000)
    for track in samples.read(path):
        assert 200 < len(track.points) < 1000


HEAD = (
    "Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,GPU_Free_Mem_MB,GPU_Used_Mem_MB,"
    "GPU_Total_Mem_MB,GPU_Temp_C"
)
ROWS = [
    f"2024-05-01 10:00:00,{rank},{epoch},{700 + 90 * rank},0,NVIDIA GeForce RTX 3070,95.0%,1000,7000,8000,7{epoch}"
    for epoch in range(3)
    for rank in range(2)
]


def test_a_metrics_csv_is_shown_by_epoch_and_rank(tmp_path: Path) -> None:
    """Report a metrics.csv with a second head and half a line: charts by rank and epoch."""
    file = tmp_path / "metrics.csv"
    # Ranks append to one file on a network file system: a head in the middle, and half a line.
    file.write_text("\n".join((HEAD, *ROWS[:2], HEAD, *ROWS[2:], "2024-05-01 10:30:00,0,3,7")))
    made = runs.of_csv(file)
    assert titles(made) == [
        "time per rank",
        "epoch time",
        "device load",
        "device memory",
        "device temperature",
    ]
    assert "rank 1 is the slowest" in made.html
    assert "700 to 790 s" in made.html


def test_a_run_that_wrote_a_metrics_csv_has_its_ranks_charted(tmp_path: Path) -> None:
    """Report a run with metrics.csv: its ranks are charted."""
    path = records.write(tmp_path, FIRST)
    (path / "metrics.csv").write_text("\n".join((HEAD, *ROWS)))
    assert titles(report(tmp_path, FIRST)) == ["time per rank"]


def test_a_run_that_wrote_a_metrics_csv_of_its_own_kind_has_a_report(tmp_path: Path) -> None:
    """Report a run with a CSV of other columns: it is not charted."""
    path = records.write(tmp_path, FIRST, losses=LOSSES)
    (path / "metrics.csv").write_text("step,loss\n1,8\n")
    assert titles(report(tmp_path, FIRST)) == ["loss", "step time"]


def test_a_csv_of_something_else_is_refused(tmp_path: Path) -> None:
    """Read a CSV of other columns as epochs: ConfigError names the expected ones."""
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table with the columns Rank, Epoch, Computation_Time"):
        samples.epochs(tmp_path / "other.csv")


def test_pictures_lie_beside_the_page(tmp_path: Path) -> None:
    """Write a report: page and pictures are the only files of the folder."""
    records.write(tmp_path, FIRST, losses=LOSSES)
    written = runs.write(tmp_path / "out", report(tmp_path, FIRST))
    assert {Path(name).name for name in (written.page, *written.pictures)} == {
        path.name for path in (tmp_path / "out").iterdir()
    }

"""The page of a validation. ``pytest tests/unit/reports --update-golden`` rewrites ``tests/golden/validation.html``."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from labctl.cli.output import to_json
from labctl.reports.validation import (
    Figure,
    Hardware,
    Health,
    LinkVerdict,
    NodeVerdict,
    StepResult,
    Validation,
    html,
    write,
)
from labctl.system.load import Measured

GOLDEN = Path(__file__).parents[2] / "golden/validation.html"
LIMIT = 127
GPUS = Hardware(
    host="", processor="AMD EPYC 9554", cores=128, memory=1 << 40, accelerator="nvidia", devices="8 x NVIDIA H200",
    driver="570.124.06",
)  # fmt: skip


def node(number: int, verdict: Health = "good", advice: str = "") -> NodeVerdict:
    """Return a verdict on worker-``number`` of host red``number``."""
    evidence = (f"{number} GB/s",)
    return NodeVerdict(node=f"worker-{number}", host=f"red{number}", verdict=verdict, evidence=evidence, advice=advice)


def figure(name: str, value: float | None, what: str = "bus bandwidth") -> Figure:
    """Return a bus bandwidth of the node, passed if it is at least LIMIT."""
    limit, passed = f">= {LIMIT} GB/s", value is not None and value >= LIMIT
    return Figure(step="all_reduce", what=what, node=name, value=value, unit="GB/s", limit=limit, passed=passed)


def validation(size: int = 2, **more: object) -> Validation:
    """Return a passed validation of this many good nodes; ``more`` replaces fields."""
    passed = Validation(
        lab="red",
        profile="quick",
        started="2026-11-20T14:15:02Z",
        seconds=421,
        verdict="PASS",
        message="All nodes are good.",
        nodes=tuple(map(node, range(size))),
        figures=tuple(figure(f"worker-{number}", 140 + number / size) for number in range(size)),
    )
    return replace(passed, **more)


def failed() -> Validation:
    """Return a failed validation with bad nodes and links, steps of each kind and figures."""
    advice = "Check its cables, then re-run `labctl validate`."
    broken = "RuntimeError: <script>alert('worker-2')</script> & more"
    return validation(
        3,
        verdict="FAIL",
        message="worker-2 on red2 is slow: check its cables.",
        nodes=(node(0), node(1), replace(node(2, "slow", advice), runs=("20261120-141502",))),
        hardware=(*(replace(GPUS, host=f"red{number}") for number in range(2)), replace(GPUS, host="red2", cores=64)),
        runs="../../runs",
        links=(
            LinkVerdict(a="worker-0", b="worker-1", verdict="good"),
            LinkVerdict(
                a="worker-1",
                b="worker-2",
                verdict="failing",
                evidence=("21 of 46 GB/s",),
                advice=advice,
                logs=("checks/all_reduce-bisect",),
            ),
        ),
        steps=(
            StepResult(name="doctor", status="passed", seconds=4.2),
            StepResult(
                name="all_reduce",
                status="failed",
                message=broken,
                seconds=183,
                run_id="20261120-141502",
                logs=("checks/all_reduce", "checks/all_reduce-again"),
            ),
            StepResult(name="train", status="skipped", message="Needs all nodes.", seconds=0),
        ),
        figures=(
            figure("worker-0", 141.26),
            figure("worker-1", None),
            figure("worker-2", 98.06),
            figure("worker-0 - worker-1", 46.1, "bandwidth of links"),
            figure("worker-2 - worker-0", 21.3, "bandwidth of links"),
            Figure(step="disk", what="disk read", value=2113.4, unit="MB/s", passed=None),
        ),
        versions={"labctl": "0.1.0", "kernel of red2": "6.8.0"},
    )


def without_charts(page: str) -> str:
    """Return the page with empty charts, whose drawing depends on matplotlib's version."""
    return re.sub(r"<svg .*?</svg>", "<svg></svg>", page, flags=re.DOTALL)


def rows(page: str, heading: str) -> list[str]:
    """Return the row heads of the first table below a heading."""
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return re.findall(r'<th scope="row">([^<]*)', table)


def test_the_page_is_the_expected_one(request: pytest.FixtureRequest) -> None:
    """Render the failed validation: equal to the golden page, without charts."""
    page = without_charts(html(failed()))
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(page, encoding="utf-8")
    assert page == GOLDEN.read_text(encoding="utf-8")


def test_the_same_validation_gives_the_same_bytes(tmp_path: Path) -> None:
    """Write a validation: the file equals what html() returns."""
    path = tmp_path / "validation.html"
    write(path, failed())
    assert path.read_text(encoding="utf-8") == html(failed())


def test_what_machines_say_is_text() -> None:
    """Put markup into every text of a validation: it is escaped, in charts too."""
    evil = "<script>\"'$x_1$&"
    page = html(
        validation(
            lab=evil,
            profile=evil,
            message=evil,
            nodes=(NodeVerdict(node=evil, host=evil * 2, verdict="slow", evidence=(evil,), advice=evil),),
            links=(LinkVerdict(a=evil, b=evil, verdict="slow", evidence=(evil,)),),
            steps=(StepResult(name=evil, status="failed", message=f"`{evil}`", seconds=1, run_id=evil),),
            figures=tuple(
                Figure(step=evil, what=evil, node=node, value=1, unit=evil, limit=evil, passed=True, source=evil)
                for node in (evil, "worker-1")
            ),
            versions={evil: evil},
        )
    )
    assert "<script" not in page
    assert "<code>&lt;script&gt;" in page
    chart = page[page.index("<svg") : page.index("</svg>")]
    assert "&lt;script&gt;&quot;&#x27;$x_1$&amp;" in chart


def test_the_page_needs_no_network() -> None:
    """Render the failed validation: no external address, script or image."""
    page = html(failed())
    assert re.findall(r"https?:|@import|<(?:script|link|img|iframe|object)\b|\bsrc=", page) == []
    assert re.findall(r"(?:href=\"|url\()(?!#|data:|\.\./\.\./runs/|checks/).{,40}", page) == []


def test_every_id_is_used_once() -> None:
    """Render 80 figures: every id is there once."""
    figures = [figure(f"worker-{number}", 99, place) for number in range(40) for place in ("in a node", "of all")]
    ids = re.findall(r' id="([^"]*)"', html(validation(figures=tuple(figures))))
    assert len(ids) == len(set(ids)) > 0


def test_bad_nodes_and_links_come_first() -> None:
    """Render nodes of all verdicts: failing, not reached, slow, unsure, then good; links alike."""
    verdicts: tuple[Health, ...] = ("good", "unsure", "slow", "not reached", "failing", "good")
    nodes = tuple(node(number, verdict) for number, verdict in enumerate(verdicts))
    assert rows(html(validation(nodes=nodes)), "Nodes") == [f"worker-{number}" for number in (4, 3, 2, 1, 0, 5)]
    assert rows(html(failed()), "Links") == ["worker-1 - worker-2", "worker-0 - worker-1"]


def test_runs_lead_to_their_logs_beside_the_page() -> None:
    """Render nodes, links and steps with runs: links to their logs and folders; none without."""
    page = html(failed())
    log, files = "../../runs/20261120-141502/output.log", "../../runs/20261120-141502/"
    nodes, links, steps = (page.partition(f"<h2>{heading}</h2>")[2] for heading in ("Nodes", "Links", "Steps"))
    assert re.findall('href="(.*?)"', nodes.partition("</section>")[0]) == [log, files]
    assert re.findall('href="(.*?)"', links.partition("</section>")[0]) == ["checks/all_reduce-bisect/"]
    assert re.findall('href="(.*?)"', steps) == [log, files, "checks/all_reduce/", "checks/all_reduce-again/"]
    assert "href" not in html(replace(failed(), runs="", links=(), steps=()))


def test_nodes_of_equal_hardware_are_a_row() -> None:
    """Render equal hardware: one row for its nodes; no section without hardware."""
    page = html(failed())
    assert rows(page, "Hardware") == ["worker-0 to worker-1", "worker-2"]
    table = page.partition("<h2>Hardware</h2>")[2].partition("</table>")[0]
    assert "red0 to red1" in table
    assert "8 x NVIDIA H200" in table
    assert "1 TiB" in table
    assert "<h2>Hardware</h2>" not in html(validation())


def test_nodes_of_one_host_are_a_row_with_their_host() -> None:
    """Render twelve nodes of one host: one row of hardware."""
    nodes = tuple(replace(node(number), host="local") for number in range(12))
    page = html(validation(nodes=nodes, hardware=(Hardware(host="local", cores=2),)))
    assert rows(page, "Hardware") == ["worker-0 to worker-11"]


def between(page: str) -> list[list[str]]:
    """Return the cells of the page's first table of nodes by nodes."""
    table = page.partition('<table class="grid">')[2].partition("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in table.split("<tr>")[1:]]


def test_figures_of_links_are_a_table_of_nodes_by_nodes() -> None:
    """Render bandwidths of links: a symmetric table of nodes by nodes."""
    assert between(html(failed())) == [
        ["", "worker-0", "worker-1", "worker-2"],
        ["worker-0", "-", "✕ 46.1", "✕ 21.3"],
        ["worker-1", "✕ 46.1", "-", "-"],
        ["worker-2", "✕ 21.3", "-", "-"],
    ]


def test_nodes_of_one_host_and_very_many_nodes_have_no_such_table() -> None:
    """Render links of one host, or of more than 32 nodes: no such table."""
    link = figure("worker-0 - worker-1", 140, "bandwidth of links")
    alone = tuple(replace(node(number), host="local") for number in range(2))
    assert between(html(validation(figures=(link,), nodes=alone))) == []
    assert between(html(validation(33, figures=(link,)))) == []
    assert len(between(html(validation(32, figures=(link,))))) == 33


def test_many_good_nodes_are_counted_and_folded() -> None:
    """Render 1000 nodes, one failing: the good ones are counted and folded."""
    page = html(validation(nodes=(*map(node, range(1, 1000)), node(0, "failing"))))
    assert "1,000 nodes:\n1 failing, 999 good." in page
    assert rows(page, "Nodes") == ["worker-0"]
    assert "<details><summary>The 999 good nodes</summary>" in page


def test_the_same_advice_is_given_once_for_all_that_it_concerns() -> None:
    """Render ten nodes with the same advice: given once, with eight names and "2 more"."""
    nodes = tuple(node(number, "slow", "Check its cables.") for number in range(10))
    step = StepResult(name="train", status="failed", seconds=1, advice="Train again.")
    page = html(validation(nodes=nodes, steps=(step,), verdict="FAIL"))
    actions = page.partition("<h2>What to do next</h2>")[2].partition("</section>")[0]
    assert re.sub(r"<[^>]*>", "", actions).split("\n")[2:4] == [
        f"Check its cables. ({', '.join(f'worker-{number} on red{number}' for number in range(8))} and 2 more)",
        "Train again. (step train)",
    ]


def test_nothing_is_to_be_done_about_a_cluster_that_passed() -> None:
    """Render a passed validation: "Nothing." to do."""
    assert "<h2>What to do next</h2>\n<p>Nothing.</p>" in html(validation())


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_number_that_is_missing_is_no_figure_and_comes_first(value: float | None) -> None:
    """Render a figure of None, NaN or infinity: "no value", first in the chart."""
    page = html(validation(figures=(figure("worker-0", 98.06), replace(figure("worker-1", None), value=value))))
    assert "2 of 2 missed; no value for 1; 98.06 GB/s" in page
    labels = re.findall(r"<text [^>]*>([^<]*)", page)
    assert [label for label in labels if "worker" in label] == ["worker-1", "worker-0"]
    assert [label for label in labels if "✕" in label] == ["✕ no value", "✕ 98.06"]
    assert re.findall(r"\b(?:nan|inf|None)\b", page) == []


def test_figures_without_any_number_have_no_chart() -> None:
    """Render figures without a chartable number: a table, no chart."""
    page = html(validation(figures=(figure("worker-0", None), figure("", 140.0, "training"))))
    assert "<svg" not in page
    assert rows(page, "Figures and thresholds") == ["bus bandwidth", "training"]


def test_of_times_the_longest_is_the_worst() -> None:
    """Render latencies with a limit and without: the longest is first in the chart."""
    times = (20.0, 31.5, 18.0)
    figures = tuple(
        Figure(step="latency", what="latency", node=f"worker-{number}", value=value, unit="µs", limit="<= 25 µs",
               passed=value <= 25)
        for number, value in enumerate(times)
    )  # fmt: skip
    labels = re.findall(r"<text [^>]*>([^<]*)", html(validation(figures=figures)))
    assert [label for label in labels if "worker" in label] == ["worker-1", "worker-0", "worker-2"]
    assert "✕ 31.5" in labels
    unjudged = tuple(replace(figure, limit="", passed=None) for figure in figures)
    labels = re.findall(r"<text [^>]*>([^<]*)", html(validation(figures=unjudged)))
    assert [label for label in labels if "worker" in label] == ["worker-1", "worker-0", "worker-2"]


@pytest.mark.parametrize(("size", "rows"), [(1, 1), (4, 4), (64, 13), (1000, 13)])
def test_a_chart_names_the_worst_and_draws_the_others_in_one_row(size: int, rows: int) -> None:
    """Render a chart of many nodes: the twelve worst, and one row for the others."""
    figures = [
        replace(figure, value=90 + number, passed=number > 30) for number, figure in enumerate(validation(size).figures)
    ]
    labels = re.findall(r"<text [^>]*>([^<]*)", html(validation(size, figures=tuple(figures[::-1]))))
    named = [label for label in labels if "worker" in label or "others" in label]
    assert len(named) == rows
    assert named[0] == "worker-0"
    assert (named[-1] == f"{size - 12} others, ✕ 19") == (size > 12)


@pytest.mark.parametrize(("size", "kib"), [(64, 200), (1000, 1024)])
def test_a_page_stays_small(size: int, kib: int) -> None:
    """Render 64 or 1000 nodes with six figures each: below the size in KiB."""
    kinds = (
        "matrix multiply",
        "memory bandwidth",
        "disk read",
        "bandwidth in the node",
        "latency",
        "bandwidth of links",
    )
    figures = tuple(replace(figure, what=kind) for kind in kinds for figure in validation(size).figures)
    versions = {f"kernel of red{number}": "6.8.0-60-generic" for number in range(size)}
    links = tuple(LinkVerdict(a="worker-0", b=f"worker-{number}", verdict="good") for number in range(size))
    page = html(validation(size, figures=figures, versions=versions, links=links))
    assert len(page.encode()) < kib << 10


def test_a_validation_without_loads_is_read_and_one_with_them_as_written() -> None:
    """Convert a validation with and without loads from JSON: as written, or empty."""
    measured = Measured(cores=2, used=1.9, runnable=6, step="matmul", when="before", host="red0")
    document = to_json(validation(loads=(measured,)))
    assert msgspec.convert(document, Validation).loads == (measured,)
    del document["loads"]
    assert msgspec.convert(document, Validation).loads == ()

"""The text of `labctl fit`: the answer first, and with --explain the components.

``pytest tests/unit/cli/test_fit.py --update-golden`` rewrites ``expected/fit/``; read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support import builders

from labctl.cli.fit import size, text
from labctl.config import settings
from labctl.config.settings import in_bytes
from labctl.errors import ConfigError
from labctl.fit import FitReport
from labctl.jobs.request import RunOptions, choose_workload
from labctl.runs import fitting
from labctl.runs.fitting import Hardware

ROOT = Path(__file__).parents[3]
EXPECTED = Path(__file__).parent / "expected/fit"
OFFLOADED = "deepspeed.zero_optimization.offload_optimizer.device"


def fitted(name: str, device: str = "", *, slots: int = 1, host: str = "", offload: bool = False) -> FitReport:
    """Report how a workload of this project fits one node with the given hardware."""
    arguments = ((OFFLOADED, "cpu"),) if offload else ()
    chosen = choose_workload(ROOT, name, RunOptions(arguments=arguments), settings.load(ROOT / "none", {}, {}))
    memory = {key: in_bytes(text) for key, text in {"device_memory": device, "host_memory": host}.items() if text}
    lab = builders.lab(accelerator="nvidia")
    return fitting.how_it_fits(lab, chosen, 0, Hardware(nodes=1, slots=slots, **memory), None)


def compare(name: str, text: str, request: pytest.FixtureRequest) -> None:
    """Assert that the text is that of expected/fit/``name``.txt; with --update-golden write it first."""
    path = EXPECTED / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    assert f"{text}\n" == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("opt-13b-on-1-of-24", fitted("opt-13b", "24g")),
        ("opt-13b-on-1-of-80", fitted("opt-13b", "80g")),
        ("opt-13b-on-8-of-80", fitted("opt-13b", "80g", slots=8)),
        ("opt-66b-on-8-of-80", fitted("opt-66b", "80g", slots=8)),
        ("opt-350m-on-1-of-24", fitted("opt-350m", "24g")),
        ("opt-13b-offloaded-to-a-host-that-is-not-known", fitted("opt-13b", "80g", offload=True)),
        ("opt-13b-on-a-host-of-128", fitted("opt-13b", "80g", host="128g")),
        ("opt-66b-on-a-host-of-64", fitted("opt-66b", "24g", host="64g")),
        ("opt-13b-rlhf-on-8-of-24", fitted("opt-13b-rlhf", "24g", slots=8, host="512g")),
        ("opt-13b-on-devices-that-are-not-known", fitted("opt-13b", slots=8)),
        ("vit-on-1-of-24", fitted("vit", "24g")),
    ],
)
def test_the_answer_is_this_text(name: str, report: FitReport, request: pytest.FixtureRequest) -> None:
    """Format the fit of many workloads and devices: the text equals its golden file."""
    compare(name, text(report), request)


def test_the_components_are_this_text(request: pytest.FixtureRequest) -> None:
    """Format with explain: the text equals its golden file."""
    compare("opt-13b-explained", text(fitted("opt-13b", "80g", offload=True), explain=True), request)


def test_on_a_cpu_the_answer_is_about_a_node(request: pytest.FixtureRequest) -> None:
    """Format the fit on CPU nodes of 8 GiB: the text equals its golden file."""
    chosen = choose_workload(ROOT, "opt-13b", RunOptions(), settings.load(ROOT / "none", {}, {}))
    report = fitting.how_it_fits(builders.lab(), chosen, 0, Hardware(host_memory=in_bytes("8g")), None)
    compare("opt-13b-on-2-nodes", text(report), request)


def test_changes_without_an_option_are_for_the_script(request: pytest.FixtureRequest) -> None:
    """Format advice without settings: the text equals its golden file."""
    report = fitted("opt-13b", "24g")
    assert report.advice is not None
    in_words = tuple(replace(change, set="") for change in report.advice.changes)
    compare("opt-13b-in-words", text(replace(report, advice=replace(report.advice, changes=in_words))), request)


@pytest.mark.parametrize(("option", "written"), [("--device-memory", "lots"), ("--host-memory", "64x")])
def test_a_size_that_is_none_is_refused_with_its_option(option: str, written: str) -> None:
    """Parse an invalid size: ConfigError names option and value."""
    with pytest.raises(ConfigError, match=f"{option} {written}"):
        size(option, written)


def test_the_page_shows_the_answer() -> None:
    """Read docs/fit.md: it has the golden answer word for word."""
    answer = (EXPECTED / "opt-13b-on-1-of-24.txt").read_text(encoding="utf-8")
    shown = "\n".join(f"    {line}" if line else "" for line in answer.splitlines())
    assert shown in (ROOT / "docs/fit.md").read_text(encoding="utf-8")

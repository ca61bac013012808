from __future__ import annotations

import re
from pathlib import Path

import pytest

from labctl import accelerators, launchers
from labctl.backends import health
from labctl.backends.kubernetes import backend as kubernetes
from labctl.config import health_rules
from labctl.health import catalogue
from labctl.health.model import Subject
from labctl.workloads.schema import schema

TESTS = Path(__file__).parents[1]


def test_the_tests_that_a_page_names_are_there() -> None:
    """Read docs/dev/failures.md: every test that it names exists, and there are more than 50."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs/dev/failures.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    lacking = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(def|class) {name}\b", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert lacking == []


def test_every_key_of_workload_yml_is_in_the_table() -> None:
    """Read docs/workload-yml.md: its table of keys has exactly the keys of workload.yml."""
    page = (TESTS.parent / "docs/workload-yml.md").read_text(encoding="utf-8")
    table, _, _ = page.partition("\n## Keys\n")[2].partition("\n## ")
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert named == {*schema(Path(), ()), "variants"}


def test_every_launcher_is_in_the_pages_for_workloads() -> None:
    """Read the pages on workloads: every launcher is named."""
    docs = TESTS.parent / "docs"
    described = set(re.findall(r"`([\w:]+)`", (docs / "workloads.md").read_text(encoding="utf-8")))
    row = next(
        line for line in (docs / "workload-yml.md").read_text(encoding="utf-8").splitlines() if "| `launcher` |" in line
    )
    assert [name for name in launchers.known() if name not in described] == []
    assert [name for name in launchers.names() if f"`{name}`" not in row] == []


def test_the_page_on_kubernetes_lists_what_is_refused_there(request: pytest.FixtureRequest) -> None:
    """Compare docs/kubernetes.md with kubernetes.UNSUPPORTED; with --update-golden write it first."""
    path = TESTS.parent / "docs/kubernetes.md"
    before, _, rest = path.read_text(encoding="utf-8").partition("<!-- unsupported -->\n")
    _, _, after = rest.partition("<!-- end -->")
    rows = [f"| `{command}` | {hint} |" for command, hint in kubernetes.UNSUPPORTED.items()]
    table = "\n".join(("| not in a cluster | instead |", "|---|---|", *rows))
    text = f"{before}<!-- unsupported -->\n{table}\n<!-- end -->{after}"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_page_on_health_lists_all_checks(request: pytest.FixtureRequest) -> None:
    """Compare docs/health.md with the subjects of hosts and accelerators; with --update-golden write it first."""
    path = TESTS.parent / "docs/health.md"
    before, _, rest = path.read_text(encoding="utf-8").partition("<!-- checks -->\n")
    _, _, after = rest.partition("<!-- end -->")
    vendors = tuple(module.subject for module in accelerators.modules().values() if module.subject)
    rows = [row for subject in (*catalogue.HOST, *vendors) for row in rows_of(subject)]
    table = "\n".join(("| subject | check | of | limit |", "|---|---|---|---|", *rows))
    text = f"{before}<!-- checks -->\n{table}\n<!-- end -->{after}"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def rows_of(subject: Subject) -> list[str]:
    """Return a table row for each check of a subject."""
    rows = [
        f"| {subject.name} | `{check.name}` | {check.reading} | {'' if check.limit is None else f'{check.limit:g}'} |"
        for check in subject.checks
    ]
    return [*rows, *(f"| {subject.name} | `{check.name}` | kernel lines | |" for check in subject.lines)]


def test_the_example_of_health_yml_is_valid(tmp_path: Path) -> None:
    """Read the example of docs/health.md as a lab's health.yml: its checks are known."""
    page = (TESTS.parent / "docs/health.md").read_text(encoding="utf-8")
    (tmp_path / "health.yml").write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    rules = health_rules.load(tmp_path)
    assert health_rules.unknown(rules, health.known_checks()) == ""
    assert [own.name for own in rules.own] == ["scratch"]

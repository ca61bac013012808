"""The site's rules for `labctl health`, health.yml, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.config import health_rules
from labctl.errors import ConfigError
from labctl.health.model import OwnCheck, Rules

WHOLE = """\
checks:
  pcie-width: off
  clock: false
  temperature: {limit: 85.5}
ignore:
  - 'Xid .*: 13,'
own:
  storage:
    command: /opt/check_mount --path "/my data"
  licence:
    command: check_licence
    seconds: 0.5
"""


def loaded(directory: Path, text: str) -> Rules:
    """Write health.yml and return its rules."""
    (directory / "health.yml").write_text(text)
    return health_rules.load(directory)


def test_checks_are_turned_off_changed_ignored_and_added(tmp_path: Path) -> None:
    """Load a file with everything: each part is in the rules, and a command is split as a shell does."""
    assert loaded(tmp_path, WHOLE) == Rules(
        off=frozenset({"pcie-width", "clock"}),
        limits={"temperature": 85.5},
        ignored=("Xid .*: 13,",),
        own=(
            OwnCheck(name="storage", command=("/opt/check_mount", "--path", "/my data")),
            OwnCheck(name="licence", command=("check_licence",), seconds=0.5),
        ),
    )


def test_without_the_file_or_a_part_of_it_the_rules_are_empty(tmp_path: Path) -> None:
    """Load without health.yml, and with one part only: the others are empty."""
    assert health_rules.load(tmp_path) == Rules()
    assert loaded(tmp_path, "ignore: []\n") == Rules()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "health.yml:1: is empty"),
        ("\n\nchecks: [x]\n", "health.yml:3: `checks` must be a mapping, not a list"),
        ("check: {}\n", "health.yml:1: unknown key `check`"),
        ("checks:\n  x: 'on'\n", "health.yml:2: `x` must be `off` or a limit"),
        ("own:\n  x: {command: echo a; exit 2}\n", "health.yml:2: `a;` needs a shell, and it is run without one"),
        ("checks:\n  x: {}\n", "health.yml:2: `x` has no `limit`"),
        ("checks:\n  x:\n    limit: high\n", "health.yml:3: `limit` must be a number, not `high`"),
        ("checks:\n  x: off\n  x: off\n", "health.yml:3: duplicate key `x`, first on line 2"),
        ("ignore:\n  - ok\n  - '('\n", "health.yml:3: `(` is not a regular expression"),
        ("ignore: text\n", "health.yml:1: `ignore` must be a list, not text"),
        ("own:\n  Storage: {command: x}\n", "health.yml:2: `Storage` must be at most 63 of a-z, 0-9 and `-`"),
        ("own:\n  x: {seconds: 2}\n", "health.yml:2: `x` has no `command`"),
        ("own:\n  x:\n    command: ''\n", "health.yml:3: `command` is empty"),
        ('own:\n  x:\n    command: "it\'s"\n', "health.yml:3: `command` is not a command: No closing quotation"),
        ("own:\n  x:\n    command: y\n    seconds: 0\n", "health.yml:4: `seconds` must be above 0"),
        ("own:\n  x:\n    command: y\n    seconds: -1\n", "health.yml:4: `seconds` must be above 0"),
        ("own:\n  x: {command: y, limit: 3}\n", "health.yml:2: unknown key `limit`"),
        ("checks: [\n", "health.yml:2: not YAML"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    """Load an invalid file: ConfigError with file, line and reason."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert caught.value.message.startswith(reason)


def test_checks_that_nobody_knows_are_named(tmp_path: Path) -> None:
    """Compare the names with the known ones: the unknown are named once, own checks are known."""
    rules = loaded(tmp_path, WHOLE.replace("clock: false", "storage: off"))
    assert health_rules.unknown(rules, {"temperature": 5, "pcie-width": None}) == ""
    assert health_rules.unknown(rules, {}) == "health.yml: no check is called pcie-width, temperature"


def test_limits_of_checks_that_have_none_are_named(tmp_path: Path) -> None:
    """Set limits of checks: those without one are named, own checks too, beside a check that nobody knows."""
    known = {"disk-space": 1.0, "pcie-width": None}
    rules = loaded(tmp_path, "checks:\n  disk-space: {limit: 5}\n  pcie-width: {limit: 8}\n")
    assert health_rules.unknown(rules, known) == "health.yml: pcie-width has no limit"
    rules = loaded(
        tmp_path, "checks:\n  own1: {limit: 5}\n  pcie-width: {limit: 8}\n  x: off\nown:\n  own1: {command: a}\n"
    )
    assert health_rules.unknown(rules, known) == ("health.yml: no check is called x; own1, pcie-width have no limit")

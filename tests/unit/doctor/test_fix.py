"""`labctl doctor --fix`, with commands that are not run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support import builders

from labctl.backends import Backend
from labctl.backends.finding import Finding, Level, problem
from labctl.config.context import Context
from labctl.doctor import fix
from labctl.errors import HostError
from labctl.system import filelock


def examining(directory: Path, monkeypatch: pytest.MonkeyPatch, findings: list[Finding]) -> Backend:
    """Build a backend whose checks return these findings."""
    context = Context(directory=directory, environ={}, emit=lambda _: None, flags={})
    backend = builders.backend(context, builders.cluster_of(context))
    monkeypatch.setattr(backend, "findings", lambda _: tuple(findings))
    return backend


def test_commands_of_fix_are_the_printed_ones_word_by_word() -> None:
    """Split a fix text at && into argument lists, with quoted words kept whole."""
    printed = "labctl down && chmod 600 'a b' c && labctl up"
    assert fix.simple_commands(printed) == [["labctl", "down"], ["chmod", "600", "a b", "c"], ["labctl", "up"]]


def test_fix_asks_before_each_command_runs_it_once_and_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fix five findings: errors first, none twice, and neither the unfixable nor the refused one."""

    def finding(level: Level, fix: str, *, auto_fixable: bool = True) -> Finding:
        """Build a Finding with this level and fix."""
        return problem(level, "LAB-X-001", "so", impact="so", fix=fix, auto_fixable=auto_fixable)

    findings = [
        finding("warn", "labctl render"),
        finding("error", "sed -i x .env", auto_fixable=False),
        finding("error", "labctl up"),
        finding("error", "labctl down"),
        finding("error", "docker unpause one"),
    ]
    questions: list[str] = []
    typed: list[str] = []

    def type_in(context: Context, command: str) -> int:
        """Record the command and remove its finding; return 1, with nothing removed, for `labctl up`."""
        typed.append(command)
        if command != "labctl up":
            findings[:] = [finding for finding in findings if finding.fix != command]
        return int(command == "labctl up")

    def ask(question: str) -> bool:
        """Record the question; say no to the one about `down`."""
        questions.append(question)
        return "down" not in question

    monkeypatch.setattr(fix, "run", type_in)
    report = fix.apply(examining(tmp_path, monkeypatch, findings), ask)
    assert typed == ["labctl up", "docker unpause one", "labctl render"]
    assert [(fix.command, fix.code) for fix in report.fixed] == [(typed[0], 1), (typed[1], 0), (typed[2], 0)]
    assert {finding.fix for finding in report.findings} == {"sed -i x .env", "labctl up", "labctl down"}
    assert len(questions) == 4


def test_fix_runs_nothing_once_a_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a run while the question is asked: HostError names the run, and no command is run."""
    typed: list[str] = []
    monkeypatch.setattr(fix, "run", lambda _, command: typed.append(command))
    wrong_one = Finding(code="LAB-X-001", level="error", node="local", summary="", fix="labctl up", auto_fixable=True)
    with contextlib.ExitStack() as run:

        def ask(_: str) -> bool:
            """Hold the lock of a run from here on; say yes."""
            run.enter_context(filelock.held(tmp_path / filelock.RUNS / "one.lock", "run one"))
            return True

        with pytest.raises(HostError, match="run one"):
            fix.apply(examining(tmp_path, monkeypatch, [wrong_one]), ask)
    assert typed == []

"""labctl's command line in the test process: no program is started, and no engine answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from labctl import cli


@dataclass
class Completed:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Parse stdout as a single JSON document; fail unless its schema is 1."""
        parsed: dict[str, Any] = json.loads(self.out)
        assert parsed["schema"] == 1
        return parsed


class Labctl:
    """labctl in a lab directory: a call runs a command in this process and returns its output and exit code."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.directory, self._monkeypatch, self._capfd = directory, monkeypatch, capfd

    def env(self, text: str) -> None:
        """Write .env: lab ``demo`` on CPUs, then this text."""
        (self.directory / ".env").write_text(f"LAB_NAME=demo\nLAB_ACCELERATOR=cpu\n{text}", encoding="utf-8")

    def workload(self, text: str = "") -> None:
        """Write the workload `hello` with an empty script and this workload.yml, or a default one."""
        folder = self.directory / "workloads/hello"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hello.py").write_text("")
        declared = text or "describe: hello\nlauncher: deepspeed\nscript: hello.py\ntimeout: 60s\n"
        (folder / "workload.yml").write_text(declared, encoding="utf-8")

    def write(self, name: str, text: str) -> None:
        """Write a file of the lab directory."""
        (self.directory / name).write_text(text, encoding="utf-8")

    def __call__(self, *arguments: str) -> Completed:
        """Run labctl with these arguments in this process; return exit code, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["labctl", *arguments])
        self._capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        return Completed(code, *self._capfd.readouterr())


@pytest.fixture
def labctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Labctl]:
    """Yield labctl in a temporary lab directory with the workload `hello`, without user settings or an engine."""
    for name in [name for name in os.environ if name.startswith(("LAB_", "DOCKER_", "HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    # No server listens on this socket: a command that contacts the engine fails on any machine.
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = Labctl(tmp_path, monkeypatch, capfd)
    made.env("")
    made.workload()
    yield made
    # Restore the environment before typer's and click's lookups leak into the next test.
    monkeypatch.undo()

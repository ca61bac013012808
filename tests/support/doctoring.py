"""Run doctor as the user does, and type the commands that it suggests."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from support.harness import LABCTL, Lab

Environ = dict[str, str]
Finding = dict[str, Any]


BUSY = "LAB-HOST-009"
"""Code for a busy host."""


def wrong(findings: list[Finding]) -> list[Finding]:
    """Return the findings that are not ok, except for a busy host."""
    return [finding for finding in findings if finding["level"] != "ok" and finding["code"] != BUSY]


def doctor(lab: Lab, environ: Environ | None = None) -> list[Finding]:
    """Run `labctl doctor`; return the findings that are not ok; fail on exit code other than 3 for errors, else 0."""
    answer = lab.call("doctor", "--json", environ=environ)
    unwell = wrong(answer.json["findings"])
    answer.expect(3 if any(finding["level"] == "error" for finding in unwell) else 0)
    return unwell


def single(findings: list[Finding], code: str, node: str) -> Finding:
    """Return the finding with this code for this node; fail unless it is the only one and says what and why."""
    matching = [finding for finding in findings if (finding["code"], finding["node"]) == (code, node)]
    assert len(matching) == 1, f"no single {code} of {node} among {findings}"
    assert matching[0]["seen"]
    assert matching[0]["why"]
    return matching[0]


def type_in(lab: Lab, commands: list[str], environ: Environ) -> list[Finding]:
    """Run these commands, which must succeed, then doctor, in one shell; return the findings that are not ok."""
    typed = "".join(f"{{ {command}\n}} >&2 || echo failed: {shlex.quote(command)}\n" for command in commands)
    done = subprocess.run(
        [*lab.prefix, "bash", "-c", f"{typed}labctl doctor --json"],
        cwd=lab.path,
        env={**lab.environ, **environ, "PATH": f"{Path(LABCTL).parent}:{lab.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not done.stdout.startswith("failed"), f"{done.stdout}\n{done.stderr}"
    remaining = wrong(json.loads(done.stdout)["findings"])
    assert done.returncode == (3 if any(finding["level"] == "error" for finding in remaining) else 0), done.stderr
    return remaining

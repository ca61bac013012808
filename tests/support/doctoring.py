"""Run doctor as the user does, and type the commands that it suggests."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from support.harness import LABCTL, Lab

Environ = dict[str, str]
Found = dict[str, Any]


def wrong(findings: list[Found]) -> list[Found]:
    return [one for one in findings if one["level"] != "ok"]


def doctor(lab: Lab, environ: Environ | None = None) -> list[Found]:
    """Run doctor; return the findings that are not ok, and check its exit code against them."""
    answer = lab.call("doctor", "--json", environ=environ)
    found = wrong(answer.json["findings"])
    answer.expect(3 if any(one["level"] == "error" for one in found) else 0)
    return found


def the(findings: list[Found], code: str, node: str) -> Found:
    """Return the single finding with this code for this node."""
    found = [one for one in findings if (one["code"], one["node"]) == (code, node)]
    assert len(found) == 1, f"no single {code} of {node} among {findings}"
    assert found[0]["seen"]
    assert found[0]["why"]
    return found[0]


def type_in(lab: Lab, commands: list[str], environ: Environ) -> list[Found]:
    """Type these commands in the lab's directory and run doctor in the same shell; return the remaining findings."""
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
    left = wrong(json.loads(done.stdout)["findings"])
    assert done.returncode == (3 if any(one["level"] == "error" for one in left) else 0), done.stderr
    return left

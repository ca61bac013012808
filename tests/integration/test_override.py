"""A lab with a ``compose.override.yml``: Compose merges it, and `up` converges."""

from __future__ import annotations

import re

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

OWN = """\
services:
  worker-1:
    environment: {GREETING: hello}
    tmpfs: [/scratch]
    shm_size: !reset null
"""


def test_what_a_person_adds_to_a_service_is_there_until_it_is_taken_away(lab: Lab) -> None:
    """compose.override.yml recreates worker-1 only; a misspelt key gives exit code 3, before anything is done."""
    before = lab.identities()
    file = lab.path / "compose.override.yml"
    file.write_text(OWN)
    (row,) = [row for row in lab.call("config", "--json").expect(0).json["resolved"] if row["key"] == "override"]
    assert (row["value"], row["reason"]) == ("worker-1", "compose.override.yml")
    plan = "\n".join(lab.call("up", "--dry-run", "--json").expect(0).json["plan"])
    assert ("worker-1/override.yml" in plan, "worker-1 configuration changed" in plan) == (True, True)
    lab.call("up").expect(0)
    added = lab.identities()
    assert [node for node in added if added[node] != before[node]] == ["worker-1"]
    script = "echo $GREETING; stat -f -c %T /scratch; df -m --output=size /dev/shm | tail -1"
    assert lab.inside("worker-1", "sh", "-c", script).split() == ["hello", "tmpfs", "64"]
    assert lab.call("run", "hello", "--json").expect(0).json["verdict"] == "PASS"
    lab.call("doctor").expect(0)
    lab.call("up").expect(0)
    assert lab.identities() == added

    file.write_text(OWN.replace("tmpfs:", "tmpfss:"))
    # Compose 5 words the message differently.
    reason = r"services\.worker-1( Additional property tmpfss is not allowed|\.tmpfss false schema)"
    for command in (("up", "--dry-run"), ("up",)):
        refused = lab.call(*command).expect(3).err
        assert re.search(rf"error: compose\.override\.yml: {reason}", refused)
        assert "hint: sed -i 's/\\btmpfss:/tmpfs:/' compose.override.yml" in refused
    assert lab.identities() == added

    file.unlink()
    lab.call("up").expect(0)
    assert lab.inside("worker-1", "sh", "-c", "echo -$GREETING-") == "--\n"

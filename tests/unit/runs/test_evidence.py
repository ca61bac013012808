"""Content of the archive of a failed run."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import lab
from support.fake_backend import FakeBackend

from labctl.backends.docker.deploy.evidence import of_hosts
from labctl.model import Lab, Rank, Result, Secret
from labctl.records import store
from labctl.runs import evidence

RUN = "20260102-150405-ask-3fa2"
FAILED = Result(
    run_id=RUN,
    workload="ask",
    launcher="mpirun",
    lab="demo",
    verdict="ERROR",
    cause="rank-crashed",
    message="rank 1 on worker-1 exited with code 3: ValueError: no such data",
    exit_code=4,
    domain="workload",
    retry="does not",
    evidence="ValueError: no such data",
    ranks=(Rank(rank=0, node="worker-0"), Rank(rank=1, node="worker-1")),
)
OUTPUT = """\
worker-0: step 1
worker-1: Traceback (most recent call last):
worker-1: ValueError: no such data
worker-1: labctl: rank 1 on worker-1 exited with code 3
worker-0: labctl: rank 0 on worker-0 exited with code 1
"""


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Write the record of a failed run with secrets in logs, job.json and settings; return its lab."""
    made = replace(lab(), directory=tmp_path, hidden=(Secret("hf_canary"),))
    path = store.directory(tmp_path, RUN)
    (path / "ranks").mkdir(parents=True)
    (path / store.OUTPUT).write_text(OUTPUT)
    (path / store.TIMES).write_text("".join(f"1767366245.{at} {at % 2}\n" for at in range(5)))
    (path / "ranks/rank-1.log").write_text(
        "".join(f"line {at}\n" for at in range(300)) + "token hf_canary, key w-canary\noption o-canary\n"
    )
    environment = [["GREETING", "hello"], ["WANDB_API_KEY", "w-canary"]]
    argv = ["train.py", "--epochs", "3", "--hf_token", "o-canary", "--api-key=q-canary", "--verbose"]
    content = {"environment": {"MY_PASSWORD": "p-canary"}, "pairs": environment, "argv": argv}
    (path / "job.json").write_text(json.dumps(content))
    (path / "settings.json").write_text(json.dumps([{"key": "HF_TOKEN", "value": "s-canary", "origin": ".env"}]))
    return made


def unpacked(of: Lab, result: Result = FAILED, engine: FakeBackend | None = None) -> dict[str, str]:
    """Write the archive of a run; return its text files by name, {} without an archive; fail on a warning."""
    warnings: list[str] = []
    evidence.write(of, result, warnings.append, partial(of_hosts, of, engine) if engine else None)
    assert warnings == []
    path = store.directory(of.directory, RUN) / store.EVIDENCE
    if not path.exists():
        return {}
    with tarfile.open(path) as tar:
        members = {member.name.removeprefix(f"evidence-{RUN}/"): tar.extractfile(member) for member in tar.getmembers()}
        return {name: stream.read().decode() for name, stream in members.items() if stream}


def test_what_failed_first_and_the_lines_that_show_it_come_first(of: Lab) -> None:
    """Read evidence.txt, the first member: cause, retry, first failure, and the lines with times."""
    name, text = next(iter(unpacked(of).items()))
    assert name == "evidence.txt"
    assert "cause: rank 1 on worker-1 exited with code 3: ValueError: no such data" in text
    assert "trying again: does not help: ValueError: no such data (workload)" in text
    assert "first to fail: worker-1: labctl: rank 1 on worker-1 exited with code 3" in text
    assert ":05.200  worker-1: ValueError: no such data" in text


def test_of_each_rank_there_are_its_last_lines(of: Lab) -> None:
    """Read a rank's log in the archive: its last 200 lines, secrets redacted."""
    lines = unpacked(of)["ranks/rank-1.log"].splitlines()
    assert (len(lines), lines[0]) == (200, "line 102")
    assert lines[-2:] == ["token [REDACTED], key [REDACTED]", "option [REDACTED]"]


def test_no_secret_is_in_it_by_value_or_by_name(of: Lab) -> None:
    """Read all members: no secret, and redacted values in job.json by name of variable or option."""
    texts = unpacked(of)
    assert "canary" not in "".join(texts.values())
    job = json.loads(texts["job.json"])
    assert job["pairs"] == [["GREETING", "hello"], ["WANDB_API_KEY", "[REDACTED]"]]
    options = ["--epochs", "3", "--hf_token", "[REDACTED]", "--api-key=[REDACTED]", "--verbose"]
    assert job["argv"] == ["train.py", *options]


def test_the_version_of_a_package_is_no_secret_whatever_its_name(of: Lab) -> None:
    """Read versions.json: the version of Debian's base-passwd is there, and no variable that sounds secret."""
    versions = {"packages": {"deb/base-passwd": "3.6.1"}, "environment": {"MY_PASSWD": "p-canary"}}
    (store.directory(of.directory, RUN) / "versions.json").write_text(json.dumps(versions))
    assert json.loads(unpacked(of)["versions.json"]) == {
        "packages": {"deb/base-passwd": "3.6.1"},
        "environment": {"MY_PASSWD": "[REDACTED]"},
    }


@pytest.mark.parametrize("content", ["5", "null", '"packages"', "[]"])
def test_a_file_of_another_kind_than_expected_is_taken_as_it_is(of: Lab, content: str) -> None:
    """Read versions.json that is no object: it is in the archive."""
    (store.directory(of.directory, RUN) / "versions.json").write_text(content)
    assert unpacked(of)["versions.json"] == f"{content}\n"


def test_a_variable_that_a_launcher_is_given_is_no_longer_in_it(of: Lab) -> None:
    """Read the arguments of a launcher that hands on a variable: its value is redacted."""
    (store.directory(of.directory, RUN) / "job.json").write_text(json.dumps(["mpirun", "-x", "HF_TOKEN=x-canary"]))
    assert json.loads(unpacked(of)["job.json"]) == ["mpirun", "-x", "HF_TOKEN=[REDACTED]"]


def test_a_run_that_passed_has_none(of: Lab) -> None:
    """Write evidence of a PASS: no archive."""
    assert unpacked(of, replace(FAILED, verdict="PASS", cause=None)) == {}


def test_of_missed_criteria_the_last_lines_are_shown(of: Lab) -> None:
    """Write evidence of missed criteria: the last lines are in evidence.txt."""
    missed = replace(FAILED, verdict="FAIL", cause="criteria", message="1 of 1 criterion not met: loss <= 1 (was 2).")
    assert "worker-0: step 1" in unpacked(of, missed)["evidence.txt"]


def test_events_of_its_whole_time_are_asked_for(of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask Docker for events of a run shorter than a second: the span includes its failure."""
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\n[ "$1" != events ] || echo from "$3" to "$5"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(docker.parent), prepend=os.pathsep)
    failed = time.time()
    (span,) = re.findall(r"from (\S+) to (\S+)", unpacked(of, engine=FakeBackend())["hosts/local.txt"])
    assert float(span[0]) <= failed <= float(span[1])


def test_the_same_files_are_the_same_archive() -> None:
    """Archive the same texts twice: equal bytes, owner 0 and time 0."""
    texts = {"a.txt": "one", "b/c.txt": "two"}
    assert evidence.archive(RUN, texts) == evidence.archive(RUN, texts)
    with tarfile.open(fileobj=io.BytesIO(evidence.archive(RUN, texts))) as tar:
        assert [(member.name, member.uid, member.mtime) for member in tar.getmembers()] == [
            (f"evidence-{RUN}/a.txt", 0, 0),
            (f"evidence-{RUN}/b/c.txt", 0, 0),
        ]


def test_where_it_cannot_be_written_is_a_warning(of: Lab) -> None:
    """Make evidence.tar.gz a folder: a warning, and no exception."""
    (store.directory(of.directory, RUN) / store.EVIDENCE).mkdir()
    warnings: list[str] = []
    evidence.write(of, FAILED, warnings.append)
    assert warnings
    assert warnings[0].startswith("no evidence.tar.gz: cannot write ")

"""The origin of a run: the command line that repeats it, and what it ran on, from fictitious records."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import records

from labctl.cli.run import settings_of_script
from labctl.health.model import Reading, Snapshot
from labctl.jobs import request
from labctl.jobs.request import RunOptions
from labctl.model import Workload
from labctl.records import store
from labctl.records.redaction import REDACTED
from labctl.runs import changes, compare, origin
from labctl.runs.changes import Recorded
from labctl.workloads.schema import parse_duration, parse_expectation, parse_metric

WORKLOAD = Workload(
    name="opt-tiny",
    description="",
    declared="",
    directory=Path("workloads/opt"),
    launcher="deepspeed",
    script="train.py",
    arguments=(),
    environment=(),
    timeout=60,
    metrics=(),
    criteria=(),
)


def recorded(options: RunOptions, workload: str = "opt-tiny") -> dict[str, Any]:
    """Return the options as the record of a run of this workload has them."""
    return {**request.recorded(WORKLOAD, options), "workload": workload}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(), ""),
        (RunOptions(rehearse=True, timeout=parse_duration("20m")), " --rehearse --timeout 1200s"),
        (RunOptions(arguments=settings_of_script(["steps=40", "fast"])), " --set steps=40 --set fast"),
        (RunOptions(expect=(parse_expectation("throughput>=600"),)), " --expect 'throughput>=600'"),
        (RunOptions(expect=(parse_expectation("x=6..7"),)), " --expect 'x>=6' --expect 'x<=7'"),
        (RunOptions(expect=(parse_expectation("x>=-5% of latest"),)), " --expect 'x>=-5% of latest'"),
        (RunOptions(metrics=(parse_metric("bleu=BLEU (.*)"),)), " --metric 'bleu=BLEU (.*)'"),
        (RunOptions(launcher="mpirun", exclude="worker-1"), " --launcher mpirun --exclude worker-1"),
        (RunOptions(launcher_arguments=("--bind",), words=("--epochs", "3")), " --launcher-arg=--bind -- --epochs 3"),
        (RunOptions(detach=True, resume="latest"), ""),
    ],
)
def test_the_command_line_has_the_options_that_were_given(options: RunOptions, words: str) -> None:
    """Render recorded options of a workload: as they are typed, without those of a single run."""
    assert origin.command(recorded(options), ()) == f"labctl run opt-tiny{words}"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (RunOptions(script=Path("/a b/train.py"), local_rank=True), "--local-rank --script '/a b/train.py'"),
        (RunOptions(module="a.b", per="node", project=Path("/a")), "-m a.b --project /a --per-node"),
        (RunOptions(command=("torchrun", "train.py")), "-- torchrun train.py"),
    ],
)
def test_the_command_line_of_a_program_names_it(options: RunOptions, line: str) -> None:
    """Render recorded options of a script, a module and a command."""
    assert origin.command(recorded(options, workload=""), ()) == f"labctl run {line}"


def test_the_command_line_has_the_settings_that_were_flags_and_no_secret() -> None:
    """Render settings of flags, and secrets as setting, as --set and after --: their values are hidden."""
    settings = [
        {"key": "LAB_NODES", "value": "4", "origin": "flag"},
        {"key": "HF_TOKEN", "value": "set", "origin": "flag"},
        {"key": "LAB_NAME", "value": "demo", "origin": ".env:1"},
    ]
    options = RunOptions(arguments=(("api-key", "hidden"),), words=("--token", "hidden", "--password=hidden", "--x"))
    line = origin.command(recorded(options), settings)
    assert line == (
        "labctl run opt-tiny --set 'api-key=[REDACTED]' -s LAB_NODES=4 -s 'HF_TOKEN=[REDACTED]' "
        "-- --token '[REDACTED]' '--password=[REDACTED]' --x"
    )


def test_a_record_without_a_request_has_no_command_line() -> None:
    """Render the request of an early record: nothing."""
    assert origin.command(None, ()) == ""


def snapshot(cores: int) -> Snapshot:
    """Return the readings of a host with this number of cores."""
    facts = (("processor", "Xeon", ""), ("cores", cores, ""), ("memory", 24, "GiB"), ("kernel", "6.1", ""))
    readings = (Reading(name=name, value=value, unit=unit, source="", kind="fact") for name, value, unit in facts)
    return Snapshot(time=0, readings=tuple(readings))


def test_what_a_run_ran_on_is_told_with_alike_hosts_and_devices_together(tmp_path: Path) -> None:
    """Describe a record with three hosts, devices and a clone; of another there is only what it has."""
    device = {"id": "0", "name": "H100", "uuid": "", "firmware": "96", "driver": "550.1"}
    versions = {
        "image_id": "sha256:1d7aa7a765045565",
        "devices": {"worker-0": [device], "worker-1": [device]},
        "code": [{"path": "/mine", "commit": "0123456789abcdef", "dirty": True}],
    }
    path = records.write(tmp_path, "20261125-203600-opt-tiny-0d07")
    hosts = {"red": snapshot(2), "blue": snapshot(2), "green": snapshot(4)}
    (path / changes.RECORD).write_bytes(msgspec.json.encode(Recorded(before=hosts)))
    facts = {"--steps": "40", "--fast": "given", "arguments": "x", "nodes": "worker-0 slots=1", "workload": "opt"}
    assert origin.rows(path, facts, {"image": "labctl/cpu", **versions}) == {
        "arguments": "--steps 40 --fast x",
        "image": "labctl/cpu (1d7aa7a76504)",
        "nodes": "worker-0 slots=1",
        "hosts red, blue": "Xeon, 2 cores, 24 GiB, Linux 6.1",
        "host green": "Xeon, 4 cores, 24 GiB, Linux 6.1",
        "devices": "2 x H100, driver 550.1, firmware 96",
        "code": "/mine at 0123456789ab, with changes that are not committed",
    }
    assert origin.rows(tmp_path, {}, {}) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(launcher_arguments=("-x", "HF_TOKEN=hidden")), "--launcher-arg=-x --launcher-arg=HF_TOKEN=HIDE"),
        (RunOptions(launcher_arguments=("--api-key=hidden",)), "--launcher-arg=--api-key=HIDE"),
        (RunOptions(launcher_arguments=("--token", "hidden")), "--launcher-arg=--token --launcher-arg=HIDE"),
        (RunOptions(words=("--token", "-hidden")), "-- --token HIDE"),
        (RunOptions(words=("-token", "hidden")), "-- -token HIDE"),
        (RunOptions(arguments=(("x", "HF_TOKEN=hidden"),)), "--set x=HF_TOKEN=HIDE"),
    ],
)
def test_no_secret_is_in_the_command_line_wherever_it_was_given(options: RunOptions, words: str) -> None:
    """Render secrets as arguments of the launcher and the script, in each of their forms: all are hidden."""
    line = origin.command(recorded(options), ())
    assert shlex.split(line)[3:] == words.replace("HIDE", REDACTED).split()


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(expect=(parse_expectation("token_acc>=5"),)),
        RunOptions(metrics=(parse_metric("token_rate=tok (.*)"),)),
    ],
)
def test_what_is_measured_is_no_secret_whatever_its_name(options: RunOptions) -> None:
    """Render a criterion and a metric whose names sound secret: the command can be repeated."""
    assert REDACTED not in origin.command(recorded(options), ())


def test_a_comparison_reads_what_a_run_ran_and_takes_settings_without_an_origin(tmp_path: Path) -> None:
    """Read a record with a request, and settings as no labctl writes them: the target names the workload."""
    asked = {"workload": "opt-tiny", "options": {"rehearse": True}}
    path = records.write(tmp_path, "20261125-203600-opt-tiny-0d07", request=asked)
    (path / "settings.json").write_text('[{"key": "LAB_NODES", "value": "2"}]')
    result = store.read_result(tmp_path, "20261125-203600-opt-tiny-0d07")
    assert result
    assert compare.read(tmp_path, result).target == "opt-tiny"

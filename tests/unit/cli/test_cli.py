"""The command line: arguments, streams and exit codes, without an engine."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.builders import container
from support.commandline import Completed, Labctl

from labctl import __version__, cli, flows, naming
from labctl.backends.docker.attach import jupyter, session, target
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.cli import exec as commands
from labctl.cli import lab as lab_commands
from labctl.cli.output import Output
from labctl.cli.runs import list_text
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.records import store
from labctl.records.store import RunList, RunSummary
from labctl.system import process
from labctl.system.parallel import WIDTH
from labctl.system.setup import requirements

SECONDS = 30


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make DockerEngine.observe raise HostError, without a socket.

    The SDK would leak sockets that fail to connect.
    """

    def fail(*_: object) -> None:
        raise HostError("Docker Engine does not answer")

    monkeypatch.setattr(DockerEngine, "observe", fail)


# --- help ----------------------------------------------------------------------------------------------------


def test_help_lists_every_command_in_one_group_and_the_exit_codes(labctl: Labctl) -> None:
    """Run --help: every command stands below one heading, and every exit code is listed."""
    answer = labctl("--help")
    assert (answer.code, answer.err) == (0, "")
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.COMMANDS)
    lists = answer.out.partition("\nLab:\n")[2]
    assert re.findall(r"^  ([a-z0-9]+)  ", lists, re.MULTILINE) == grouped
    for code in (
        "0 pass",
        "2 usage",
        "3 environment",
        "4 workload failed",
        "5 criteria not met",
        "124 time",
        "130 interrupted",
    ):
        assert code in re.sub(r"\s+", " ", answer.out)


@pytest.mark.parametrize("arguments", [[], ["-h"], ["help"]])
def test_help_has_many_doors(labctl: Labctl, arguments: list[str]) -> None:
    """Run without arguments, with -h or help: the same as --help."""
    assert labctl(*arguments) == labctl("--help")


@pytest.mark.parametrize(
    ("docker", "found"),
    [
        ("echo engine=26.1.5+dfsg1 buildx=v0.13.1 compose=2.26.1-4 scout=v1", ("26.1.5+dfsg1", "2.26.1-4", "v0.13.1")),
        ("echo engine= buildx=; echo no daemon >&2; exit 1", ("no answer", "not found", "no answer")),
        ("exec /bin/sleep 60", ("no answer",) * 3),
        ("", ("not found",) * 3),
    ],
    ids=["all", "no daemon", "silent", "no docker"],
)
def test_the_version_names_what_labctl_drives(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, docker: str, found: tuple[str, str, str]
) -> None:
    """Run --version with a stand-in docker: the versions of labctl, engine, compose and buildx, or what is missing."""
    if docker:
        program = labctl.directory / "bin/docker"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{docker}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(labctl.directory / "bin"))
    # Others answer on a busy machine, too.
    monkeypatch.setattr(requirements, "PATIENCE", 0.3 if "sleep" in docker else 60)
    engine, compose, buildx = found
    lines = (f"labctl {__version__}", f"Docker Engine {engine}", f"Docker Compose {compose}", f"Docker Buildx {buildx}")
    assert labctl("--version") == Completed(0, "\n".join((*lines, "")), "")
    assert labctl("-V") == labctl("-C", "mylab", "--version") == labctl("--version")


@pytest.mark.parametrize("command", ["run", "k8s submit", "runs"])
def test_help_of_a_command_is_what_the_command_says(labctl: Labctl, command: str) -> None:
    """Run `help COMMAND`: the same as `COMMAND --help`."""
    words = command.split()
    assert labctl("help", *words) == labctl(*words, "--help")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(labctl: Labctl, command: str) -> None:
    """Run each command with --help: exit code 0 and its usage on stdout."""
    answer = labctl(command, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"Usage: labctl {command} ")


@pytest.mark.parametrize("arguments", [["frobnicate"], ["--frobnicate"], ["up", "--frobnicate"], ["run"]])
def test_what_no_command_takes_is_usage(labctl: Labctl, arguments: list[str]) -> None:
    """Run an unknown command or option: exit code 2, no traceback, nothing on stdout."""
    answer = labctl(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err


def test_a_program_in_place_of_a_workload_is_typed_as_a_command(labctl: Labctl) -> None:
    """Run `labctl run python x.py`: the hint has the command behind `--`."""
    assert "hint: a command follows `--`: labctl run -- python x.py" in labctl("run", "python", "x.py").err


USAGE = {
    "unknown command": ("statsu", "no command `statsu`", "did you mean `labctl status`?"),
    "command of docker": ("ps", "no command `ps`", "labctl status; `labctl --help` lists all commands"),
    "command of gh": (
        "completion",
        "no command `completion`",
        "labctl --install-completion sets up completion in your shell",
    ),
    "nothing like it": ("frobnicate", "no command `frobnicate`", "`labctl --help` lists all commands"),
    "workload": ("helo", "no command `helo`", "did you mean `labctl run hello`?"),
    "unknown subcommand": ("runs lss", "`labctl runs` has no command `lss`", "did you mean `labctl runs ls`?"),
    "option before the command": (
        "-v status",
        "`-v` is before the command",
        "options follow the command: labctl status -v",
    ),
    "value of an option that is a command": (
        "-n run status",
        "`-n` is before the command",
        "options follow the command: labctl status -n run",
    ),
    "no command": (
        "-C mylab",
        "no command is named for `-C`",
        "name a command; options follow it; `labctl --help` lists all commands",
    ),
    "misspelt after an option": ("-C mylab statsu", "no command `statsu`", "did you mean `labctl status`?"),
    "option alone": ("-v", "no option `-v`", "`labctl --help` lists all commands"),
    "option misspelt": ("up --dryrun", "`labctl up` has no option `--dryrun`", "did you mean `--dry-run`?"),
    "option of a command of runs": ("show --jsn", "`labctl show` has no option `--jsn`", "did you mean `--json`?"),
    "number of ranks": (
        "run --nodes 3",
        "`labctl run` has no option `--nodes`",
        "arguments of the script follow `--`: labctl run --script FILE -- ARGUMENTS; LAB_NODES and LAB_SLOTS in .env",
    ),
    "option of the script": (
        "run --script train.py --data /data/train.npy -s LAB_NODES=2",
        "`labctl run` has no option `--data`",
        "arguments of the script follow `--`: labctl run --script train.py -s LAB_NODES=2 -- --data /data/train.npy",
    ),
    "option of the script that is like one of labctl": (
        "run -m train --metrc=2 --quiet -- --lr 1",
        "`labctl run` has no option `--metrc`",
        "did you mean `--metric`? Else arguments of the script follow `--`: labctl run -m train --quiet -- --metrc=2",
    ),
    "option of a workload": (
        "run hello --steps 5",
        "`labctl run` has no option `--steps`",
        "arguments of the script follow `--`: labctl run hello -- --steps 5",
    ),
    "dash": ("show -", "`labctl show` has no option `-`", "`labctl show --help` lists the options"),
    "option after the end of options": (
        "show -- --json",
        "`--json` after `--` is an argument, not an option",
        "`labctl show --help` lists the options",
    ),
    "unknown option": (
        "status --frob",
        "`labctl status` has no option `--frob`",
        "`labctl status --help` lists the options",
    ),
    "argument too many": ("status a b", "unexpected argument `a b`", "usage: labctl status [OPTIONS]"),
    "argument missing": ("fit", "`labctl fit` needs WORKLOAD", "labctl fit opt-13b; `labctl fit --help` has more"),
    "option missing": (
        "runs prune",
        "`labctl runs prune` needs --keep N",
        "labctl runs prune --keep 20 --dry-run; `labctl runs prune --help` has more",
    ),
    "value missing": ("run hello --timeout", "--timeout needs a value", "labctl run --help"),
    "choice": ("runs --verdict bad", "--verdict bad: must be PASS, FAIL or ERROR", "labctl runs --help"),
    "number in words": ("fit hello --nodes two", "--nodes two: must be a whole number of at least 1", "labctl fit -"),
    "number out of range": ("jupyter --port 0", "--port 0: must be a whole number from 1 to 65535", "labctl jupyter"),
    "any number": ("hostfiles --size 2 --seed x", "--seed x: must be a whole number", "labctl hostfiles --help"),
    "number that is not whole": ("eval . --min x", "--min x: must be a number", "labctl eval --help"),
    "options of a group": (
        "runs --since 2d ls",
        "options follow the subcommand: labctl runs ls",
        "labctl runs ls --since",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_have_one_form(labctl: Labctl, case: str) -> None:
    """Type what cannot be parsed: exit code 2, and an error and a hint, nothing else."""
    typed, message, hint = USAGE[case]
    answer = labctl(*typed.split())
    error, hinted = answer.err.splitlines()
    assert (answer.code, answer.out) == (2, "")
    assert error.startswith(f"error: {message}")
    assert hinted.startswith(f"hint: {hint}")


def test_a_group_alone_prints_its_help(labctl: Labctl) -> None:
    """Run k8s without a subcommand: exit code 2 and its help on stderr."""
    assert labctl("k8s") == Completed(2, "", labctl("k8s", "--help").out)


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_cannot_be_is_usage(labctl: Labctl, port: str) -> None:
    """Run jupyter with an impossible port: exit code 2 names --port."""
    answer = labctl("jupyter", "--port", port)
    assert answer.code == 2
    assert "--port" in answer.err


def test_a_run_to_go_on_from_that_a_variable_left_empty_is_no_new_run(labctl: Labctl) -> None:
    """Run with an empty --resume: exit code 2, not a new run."""
    answer = labctl("run", "hello", "--resume", "")
    assert (answer.code, "--resume names no run" in answer.err) == (2, True)


@pytest.mark.parametrize("arguments", [["run", "--json"], ["up", "--frobnicate", "--json"]])
def test_usage_errors_with_json_are_one_document_too(labctl: Labctl, arguments: list[str]) -> None:
    """Make a usage error with --json: exit code 2 and one error document."""
    answer = labctl(*arguments)
    assert answer.code == 2
    assert answer.document["error"]["kind"]


def test_json_after_the_end_of_options_is_an_argument(labctl: Labctl) -> None:
    """Make a usage error with --json after `--`: its message is on stderr, and no document."""
    answer = labctl("show", "--", "--json")
    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_before_a_command_is_the_help_of_the_command(labctl: Labctl, word: str) -> None:
    """Type --help before a command: the same as after it."""
    assert labctl(word, "status") == labctl("status", "--help")


def test_the_installed_program_answers() -> None:
    """Run the installed labctl --version in a process: it prints the package's version first."""
    program = Path(sys.executable).with_name("labctl")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout.startswith(f"labctl {__version__}\n")


# --- bad input -----------------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "unknown key": ("LAB_NODE=2", "unknown key LAB_NODE", "LAB_NODES"),
    "unclosed quote": ("LAB_IMAGE='x", "not closed", ""),
    "bad port": ("LAB_SSH_PORT=99999", "LAB_SSH_PORT", ""),
    "text after a quote": ("DOCKER_MASTER_PORT=29501\nLAB_ENV_X='a'b", "after the closing quote", ""),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
@pytest.mark.parametrize("command", [["config"], ["render"], ["run", "hello", "--dry-run"], ["status"], ["down"]])
def test_bad_settings_say_file_line_and_what_to_do(labctl: Labctl, case: str, command: list[str]) -> None:
    """Write an invalid .env and run commands: exit code 2 with file, line, reason and hint, nothing on stdout."""
    text, reason, hint = BAD_SETTINGS[case]
    labctl.env(f"{text}\n")
    answer = labctl(*command)
    line = 2 + len(text.splitlines())
    assert answer.code == 2
    assert answer.out == ""
    assert f".env:{line}: " in answer.err
    assert reason in answer.err
    assert hint in answer.err
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_hint_of_a_command_with_a_directory_names_it(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    """Let `up` fail with the hint `labctl doctor`, with -C: the hint has the directory, also as JSON."""

    def fail(*_: object, **__: object) -> None:
        """Raise an error with a hint."""
        raise HostError("Docker does not answer", hint="labctl doctor")

    monkeypatch.setattr(flows, "up", fail)
    answer = labctl("-C", str(labctl.directory), "up", *form)
    assert f"labctl -C {labctl.directory} doctor" in (answer.out or answer.err)
    assert "hint: labctl doctor\n" in labctl("up").err


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("LAB_NAME=a;b\n", ".env:1: LAB_NAME"),
        ("LAB_NAME=demo\nLAB_ACCELERATOR=gpu\n", ".env:2: LAB_ACCELERATOR: unknown accelerator 'gpu'"),
    ],
)
def test_a_bad_name_or_accelerator_says_file_and_line(labctl: Labctl, text: str, where: str) -> None:
    """Set an invalid LAB_NAME or accelerator: exit code 2, and the document names file and line."""
    (labctl.directory / ".env").write_text(text)
    answer = labctl("render", "--json")
    assert answer.code == 2
    assert answer.document["error"]["message"].startswith(where)
    assert answer.document["error"]["kind"] == "config"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("worker-0 slots=1\nworker-0 slots=1\n", ":2: duplicate host `worker-0`"),
        ("# none\nworker-0 slots=0\n", ":2: slots must be between 1"),
        ("worker-0;id slots=1\n", ":1: bad host name `worker-0;id`"),
        ("", ":1: no nodes listed"),
    ],
)
def test_a_bad_hostfile_says_file_and_line(labctl: Labctl, text: str, reason: str) -> None:
    """Run with an invalid hostfile: exit code 2 names file, line and reason."""
    (labctl.directory / "hosts").write_text(text)
    answer = labctl("run", "hello", "--hostfile", "hosts", "--dry-run")
    assert answer.code == 2
    assert f"hosts{reason}" in answer.err


def test_a_hostfile_that_is_not_there_is_never_a_local_run(labctl: Labctl) -> None:
    """Run with a missing hostfile: exit code 2 names it."""
    answer = labctl("run", "hello", "--hostfile", "nowhere", "--dry-run")
    assert answer.code == 2
    assert "nowhere" in answer.err


DECLARED = """
describe: hello
launcher: deepspeed
script: hello.py
timeout: 60s
inputs: {data-path: directory, model: model}
deepspeed: {train_micro_batch_size_per_gpu: 4, bf16: {enabled: true}}
"""
CONFIGS = {
    "comma.json": '{\n  "train_batch_size": 80,\n}\n',
    "misspelt.json": '{"train_micro_batch_size_per_gpus": 16}',
    "half.json": '{"train_batch_size": 80, "fp16": {"enabled": true}}',
    "indivisible.json": '{"train_batch_size": 81}',
}
BAD_RUNS: dict[str, tuple[list[str], str]] = {
    "launcher": (["--launcher", "slurm"], "unknown launcher `slurm`"),
    "way": (["--launcher", "horovod:nccl"], "unknown launcher `horovod:nccl`"),
    "launcher that starts nothing": (
        ["--launcher", "script"],
        "does not start its ranks itself, so it cannot run under `script`",
    ),
    "the same by its name of before": (
        ["--launcher", "own"],
        "does not start its ranks itself, so it cannot run under `script`",
    ),
    "launcher option": (["--launcher-arg=bind_cores"], "unknown deepspeed option `bind_cores`"),
    "launcher's own": (["--launcher-arg=--hostfile"], "is set by labctl"),
    "node": (["--include", "worker-7"], "no node `worker-7`"),
    "commas": (["--include", "worker-0,worker-1:0"], "separate nodes with `@`"),
    "slot": (["--include", "worker-0:1"], "worker-0 has no slot `1`"),
    "nothing left": (["--exclude", "worker-0@worker-1"], "leaves no slot"),
    "both": (["--include", "worker-0", "--exclude", "worker-1"], "use either --include or --exclude"),
    "slots that torchrun cannot start": (["--launcher", "torchrun", "--hostfile", "uneven"], "the slots differ"),
    "batch": (["--set", "deepspeed.train_batch_size=7"], "--set: `train_batch_size` 7 is not micro-batch x"),
    "batch in a file": (["--deepspeed-config", "indivisible.json"], "indivisible.json: `train_batch_size` 81"),
    "key in a file": (["--deepspeed-config", "misspelt.json"], "misspelt.json: DeepSpeed 0.19 has no key"),
    "stage": (["--set", "deepspeed.zero_optimization.stage=4"], "must be 0, 1, 2 or 3"),
    "comma": (["--deepspeed-config", "comma.json"], "comma.json:2: not JSON: a comma before the closing bracket"),
    "fp16": (["--deepspeed-config", "half.json"], "CPUs do not train in fp16"),
    "configuration": (["--deepspeed-config", "gone.json"], "gone.json: cannot be read"),
    "data": (["--set", "data-path=/no/such/data"], "no such directory"),
    "model": (["--set", "model=empty"], "no config.json"),
    "script": (["--script", "/no/such.py"], "script not found: /no/such.py"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_what_cannot_be_run_as_asked_is_refused_and_nothing_is_launched(labctl: Labctl, case: str) -> None:
    """Run with options or configurations that cannot be: exit code 2 with the reason, and no runs/ is created."""
    options, reason = BAD_RUNS[case]
    cache = labctl.directory / "cache"
    (cache / "empty").mkdir(parents=True)
    labctl.env(f"HOST_CACHE_PATH={cache}\nLAB_SLOTS=1\n")
    labctl.workload(DECLARED.lstrip())
    labctl.write("uneven", "worker-0 slots=1\nworker-1 slots=2\n")
    for name, text in CONFIGS.items():
        labctl.write(name, text)
    if case.startswith("slots"):
        labctl.env(f"HOST_CACHE_PATH={cache}\nLAB_SLOTS=2\n")
    answer = labctl("run", "hello", *options)
    assert answer.code == 2, answer
    assert reason in answer.err
    assert not (labctl.directory / "runs").exists()


@pytest.mark.usefixtures("no_engine")
def test_keys_and_options_that_labctl_does_not_know_are_passed_on_with_a_warning(labctl: Labctl) -> None:
    """Run --dry-run with unknown DeepSpeed keys and options: exit code 0, passed on, each with a warning."""
    labctl.env(f"HOST_CACHE_PATH={labctl.directory / 'cache'}\n")
    declared = DECLARED.lstrip().replace("bf16:", "shiny: {level: 9}, bf16:").replace("inputs:", "#")
    labctl.workload(declared)
    changes = ["--set", "deepspeed.zero_optimization.stages=2", "--launcher-arg=--bind_cores"]
    answer = labctl("run", "hello", "--dry-run", *changes)
    assert answer.code == 0, answer
    assert " --bind_cores " in answer.out
    assert [line for line in answer.err.splitlines() if line != "warning: Docker Engine does not answer"] == [
        "warning: deepspeed option `--bind_cores` is unknown to labctl and passed on as it is; "
        "did you mean `--bind_core_list`?",
        "warning: --set: DeepSpeed 0.19 has no key `shiny` and ignores it",
        "warning: --set: DeepSpeed 0.19 has no key `zero_optimization.stages` and ignores it; did you mean `stage`?",
    ]


def test_an_unknown_workload_says_where_the_nearest_is(labctl: Labctl) -> None:
    """Run an unknown workload: exit code 2, the hint names the nearest and its file."""
    answer = labctl("run", "helo", "--json")
    assert answer.code == 2
    assert answer.document["error"]["message"] == "no workload `helo`"
    assert re.match(r"the nearest is `hello` \(workloads/hello/workload\.yml:\d+\)", answer.document["error"]["hint"])


def test_a_bad_declaration_says_file_and_line(labctl: Labctl) -> None:
    """Run a workload with a misspelt key: exit code 2 names file, line and the right key."""
    labctl.workload("describe: x\nlauncher: deepspeed\nscrpt: hello.py\n")
    answer = labctl("run", "hello")
    assert answer.code == 2
    assert "workloads/hello/workload.yml:3: unknown key `scrpt`" in answer.err
    assert "`script`" in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "hello", "--expect", "throughput=600"],
        ["run", "hello", "--expect", "nothing>=1"],
        ["run", "hello", "--timeout", "soon"],
        ["run", "hello", "--timeout", "0"],
        ["run", "hello", "--set", "deepspeed.steps"],
        ["run"],
        ["run", "--script", "train.py", "--rehearse"],
        ["run", "hello", "--rehearse"],
        ["render", "--setting", "LAB_NODES"],
        ["render", "--setting", "LAB_NODES=0"],
        ["render", "--setting", "LAB_NODE=1"],
        ["show", "nope"],
        ["show"],
    ],
)
def test_errors_with_json_are_one_document(labctl: Labctl, arguments: list[str]) -> None:
    """Make a configuration error with --json: exit code 2 and one document with kind, message, hint and node."""
    answer = labctl(*arguments, "--json")
    assert answer.code == 2
    assert set(answer.document) == {"schema", "error"}
    assert set(answer.document["error"]) == {"kind", "message", "hint", "node"}
    assert answer.document["error"]["kind"] == "config"
    assert "Traceback" not in answer.err


def test_a_directory_that_was_removed_is_said_and_another_can_be_named(
    labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in a removed directory: exit code 2 says so; with -C the command works."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    answer = labctl("render")
    assert answer.code == 2
    assert "no longer exists" in answer.err
    assert labctl("render", "-C", str(labctl.directory)).code == 0


def test_a_missing_engine_is_the_environments_fault(labctl: Labctl) -> None:
    """Run status without an engine in a process: exit code 3, kind environment, hint on DOCKER_HOST."""
    # In a process of its own: the library leaves its socket open when nobody answers.
    program = [sys.executable, "-c", "from labctl.cli import main; main()", "status", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=SECONDS)
    answer = Completed(done.returncode, done.stdout, done.stderr)
    assert answer.code == 3
    assert answer.document["error"]["kind"] == "environment"
    assert answer.document["error"]["hint"] == "unset DOCKER_HOST"


# --- answers that need no engine -----------------------------------------------------------------------------


def test_config_shows_values_origins_and_no_secret(labctl: Labctl) -> None:
    """Run config: each setting has its value and origin, secrets only "set"."""
    labctl.env("LAB_NODES=3\nHF_TOKEN=CANARY\nLAB_ENV_API_KEY=CANARY\n")
    rows = {row["key"]: (row["value"], row["origin"]) for row in labctl("config", "--json").document["settings"]}
    assert rows["LAB_NODES"] == ("3", ".env:3")
    assert rows["HF_TOKEN"] == ("set", ".env:4")
    assert rows["LAB_ENV_API_KEY"] == ("set", ".env:5")
    assert rows["LAB_SSH_PORT"] == ("12345", "default")
    shown = labctl("config", "-s", "LAB_NODES=4")
    assert re.search(r"LAB_NODES +4 +flag", shown.out)
    assert "CANARY" not in shown.out + shown.err


def test_config_shows_the_accelerator_and_why_it_is_that_one(labctl: Labctl) -> None:
    """Run config: the accelerator is shown with the reason for it."""
    labctl.env("")
    decided = {row["key"]: row for row in labctl("config", "--json").document["decided"]}
    why = "asked for by LAB_ACCELERATOR"
    assert decided["accelerator"] == {"key": "accelerator", "value": "cpu", "reason": why, "why": why}
    assert re.search(r"accelerator +cpu +asked for by LAB_ACCELERATOR", labctl("config").out)


def test_config_shows_what_is_set_or_was_decided_and_with_all_the_rest(labctl: Labctl) -> None:
    """Run config: settings of .env, decided nodes, slots and image, and how many are at the default; --all has them."""
    labctl.env("LAB_SHM_SIZE=1g\n")
    text = labctl("config").out
    keys = [line.split()[0] for line in text.split("\n\n", maxsplit=1)[0].splitlines()[1:]]
    assert keys == [
        "LAB_NAME", "LAB_ACCELERATOR", "LAB_NODES", "LAB_SLOTS", "LAB_IMAGE", "LAB_SHM_SIZE", "accelerator", "device",
    ]  # fmt: skip
    assert re.search(r"^LAB_NODES +2 +decided: default on one host$", text, re.MULTILINE)
    assert re.search(r"^LAB_IMAGE +labctl/cpu +decided: for accelerator cpu$", text, re.MULTILINE)
    every = labctl("config", "--all").out
    hidden = len(every.splitlines()) - len(keys) - 1
    assert text.splitlines()[-1] == f"not shown: {hidden} settings at the default; labctl config --all"
    assert re.search(r"^LAB_SSH_PORT +12345 +default$", every, re.MULTILINE)
    assert "LAB_NODES  " not in labctl("config", "-s", "LAB_ENGINE=kubernetes").out


def test_config_names_the_image_with_the_packages_of_the_lab(labctl: Labctl) -> None:
    """Run config with LAB_PACKAGES: the image of the nodes is the one that has them."""
    labctl.env("LAB_PACKAGES=nltk\nLAB_NODES=3\n")
    text = labctl("config").out
    assert re.search(r"LAB_IMAGE +labctl/packages:\w+ +decided: labctl/cpu with the packages of the lab", text)
    assert re.search(r"LAB_NODES +3 +\.env:4", text)


def test_devices_needs_neither_an_engine_nor_a_lab(labctl: Labctl) -> None:
    """Run devices without a lab or engine: the cores of this host, no file written; in a lab its nodes."""
    bare = labctl.directory / "bare"
    bare.mkdir()
    (here,) = labctl("devices", "-C", str(bare), "--json").document["hosts"]
    assert set(os.sched_getaffinity(0)) == set(here["cpus"])
    assert here["nodes"] == []
    assert not list(bare.iterdir())
    labctl.env("LAB_NODES=2\n")
    (here,) = labctl("devices", "--json").document["hosts"]
    assert [node["name"] for node in here["nodes"]] == ["worker-0", "worker-1"]
    assert "worker-1: " in labctl("devices").out


def test_render_writes_what_compose_needs_and_then_nothing(labctl: Labctl) -> None:
    """Run render twice: files are written, then none changed; the token is only in hf_token, mode 0600."""
    labctl.env("HF_TOKEN=CANARY\n")
    first = labctl("render", "--json").document
    assert first["nodes"] == ["worker-0", "worker-1"]
    assert ".lab/nodes/worker-0/compose.yml" in first["changed"]
    assert labctl("render", "--json").document["changed"] == []
    holders = [
        path for path in (labctl.directory / ".lab").rglob("*") if path.is_file() and "CANARY" in path.read_text()
    ]
    assert {path.name for path in holders} == {"hf_token"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}


@pytest.mark.usefixtures("no_engine")
def test_a_dry_run_prints_the_plan_and_leaves_no_trace(labctl: Labctl) -> None:
    """Run --dry-run --json: the plan's steps, and no file is written."""
    before = sorted(labctl.directory.rglob("*"))
    document = labctl("run", "hello", "--dry-run", "--json").document
    assert [line.split()[1] for line in document["plan"]] == ["ask", "write", "in", "move", "write"]
    assert sorted(labctl.directory.rglob("*")) == before


@pytest.mark.usefixtures("no_engine")
def test_arguments_of_a_person_come_last_in_the_launch(labctl: Labctl) -> None:
    """Run --dry-run with a hostfile and a timeout: the plan has both."""
    (labctl.directory / "hosts").write_text("worker-1 slots=1\n")
    document = labctl("run", "hello", "--hostfile", "hosts", "--timeout", "90s", "--dry-run", "--json").document
    assert "at most 90 s" in document["plan"][-3]
    assert "--master_addr worker-1" in document["plan"][-3]


def test_workloads_lists_what_can_be_run_and_what_is_broken(labctl: Labctl) -> None:
    """Run workloads: each with launcher and source; with a broken one exit code 2 and its error."""
    document = labctl("workloads", "--json").document
    (workload,) = document["workloads"]
    assert (workload["name"], workload["launcher"], workload["description"]) == ("hello", "deepspeed", "hello")
    assert workload["source"] == "workloads/hello/workload.yml:1"
    assert (workload["describe"], workload["declared"]) == (workload["description"], workload["source"])
    broken = labctl.directory / "workloads/broken"
    broken.mkdir()
    (broken / "workload.yml").write_text("launcher: slurm\n")
    answer = labctl("workloads", "--json")
    assert answer.code == 2
    assert [workload["name"] for workload in answer.document["workloads"]] == ["hello"]
    assert answer.document["errors"][0].startswith("workloads/broken/workload.yml:1: ")


def test_runs_of_a_new_lab_are_none(labctl: Labctl) -> None:
    """Run runs in a new lab: none, and the command that makes one."""
    assert labctl("runs", "--json").document["runs"] == []
    assert labctl("runs").out == "no runs yet\nhint: labctl run opt-tiny\n"
    assert labctl("runs", "--verdict", "PASS").out == labctl("runs").out


def recorded(labctl: Labctl, ago: timedelta, workload: str = "hello", verdict: str = "PASS") -> str:
    """Write the record of a run that ended this long ago; return its id."""
    run_id = store.new_id(workload, datetime.now() - ago)
    path = labctl.directory / "runs" / run_id
    path.mkdir(parents=True)
    fields = {
        "run_id": run_id,
        "workload": workload,
        "launcher": "mpirun",
        "lab": "demo",
        "cause": None,
        "message": ".",
    }
    (path / "result.json").write_text(json.dumps({**fields, "verdict": verdict, "exit_code": 0}))
    return run_id


SPEED = {"value": 9.5, "unit": "/s"}
LOSS = {"first": 8.0, "last": 2.25}
SAMPLES = {"value": 1234.5, "unit": "samples/s"}
NAN = {"value": None, "note": "nan"}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"speed": SPEED, "loss": LOSS}, ["LOSS  NODES  TIME", "2.25  2      19 s"]),
        ({"train_loss": LOSS, "throughput": SAMPLES}, ["LOSS  SAMPLES/S  NODES  TIME", "2.25  1,234      2      19 s"]),
        ({"speed": SPEED}, ["METRIC        NODES  TIME", "speed 9.5 /s  2      19 s"]),
        ({}, ["NODES  TIME", "2      19 s"]),
    ],
)
def test_a_run_is_listed_with_its_loss_and_throughput_or_its_first_metric(
    labctl: Labctl, metrics: dict[str, Any], shown: list[str]
) -> None:
    """Run runs: loss and throughput with its unit in the head, else the first metric; no column without a value."""
    path = labctl.directory / "runs" / recorded(labctl, timedelta(hours=1)) / "result.json"
    ranks = [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    more = {"metrics": metrics, "seconds": 19, "ranks": ranks}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    for line, end in zip(labctl("runs").out.splitlines(), shown, strict=True):
        assert line.endswith(f"  {end}")
    assert labctl("runs", "--json").document["runs"][0]["metrics"] == metrics


def test_throughputs_of_several_units_have_them_beside_them() -> None:
    """Render two runs with different units of throughput: each has its unit."""
    runs = [
        RunSummary(
            run_id=f"r{number}", state="done", verdict="PASS", metrics={"throughput": {"value": 5.0, "unit": unit}}
        )
        for number, unit in enumerate(("samples/s", "GB/s"))
    ]
    assert list_text(RunList(tuple(runs), 2), 0).splitlines() == [
        "RUN  RESULT  THROUGHPUT", "r0   done    5 samples/s", "r1   done    5 GB/s",
    ]  # fmt: skip


def test_a_throughput_without_a_unit_is_not_below_the_unit_of_another() -> None:
    """Render a run whose throughput has a unit, and one whose throughput has none: the head is no unit."""
    metrics: tuple[dict[str, Any], ...] = (
        {"throughput": {"value": 5.0, "unit": "samples/s"}},
        {"throughput": {"value": 6.0}},
        {},
    )
    runs = [
        RunSummary(run_id=f"r{number}", state="done", verdict="PASS", metrics=each)
        for number, each in enumerate(metrics)
    ]
    assert list_text(RunList(tuple(runs), 3), 0).splitlines()[:3] == [
        "RUN  RESULT  THROUGHPUT", "r0   done    5 samples/s", "r1   done    6",
    ]  # fmt: skip


@pytest.mark.parametrize("started", ["junk", "2026-01-02T15:04:05"])
def test_a_run_whose_result_has_no_proper_time_does_not_cost_the_list(started: str) -> None:
    """Render a run whose start is no time, or has no zone: its line is there."""
    run = RunSummary(run_id="20260102-150405-hello-c3a223", state="done", verdict="PASS", started=started)
    assert list_text(RunList((run,), 1), 0).splitlines()[1].split()[0::3] == [run.run_id, "done"]


def test_a_narrow_terminal_has_short_ids_fewer_columns_and_no_line_that_wraps() -> None:
    """Render runs for 80, 50 and 30 columns: ids by their ends, then without nodes and time, then cut."""
    began = (datetime.now().astimezone() - timedelta(minutes=3)).isoformat()
    common: dict[str, Any] = {"workload": "opt-tiny", "started": began, "nodes": ("worker-0", "worker-1")}
    failed = RunSummary(
        run_id="20260102-150405-opt-tiny-c3a223", short_id="c3a223", state="done", outcome="ERROR",
        cause="rank-crashed", seconds=70, **common,
    )  # fmt: skip
    running = RunSummary(
        run_id="20260102-150407-opt-tiny-0a1b2c", short_id="0a1b2c", state="running", step="step 30/120", age=185,
        **common,
    )  # fmt: skip
    listed = RunList((running, failed), 2)
    assert list_text(listed, 0) == list_text(listed, 100)
    assert list_text(listed, 0).splitlines()[2].split()[:3] == [failed.run_id, "3m", "ago"]
    assert (
        list_text(listed, 80)
        == """\
RUN     WHEN    WORKLOAD  RESULT               NODES  TIME
0a1b2c  3m ago  opt-tiny  running step 30/120  2      3 min 5 s
c3a223  3m ago  opt-tiny  ERROR rank-crashed   2      70 s"""
    )
    assert list_text(listed, 50).splitlines()[1:] == [
        "0a1b2c  3m ago  opt-tiny  running step 30/120", "c3a223  3m ago  opt-tiny  ERROR rank-crashed",
    ]  # fmt: skip
    assert list_text(listed, 30).splitlines()[1] == "0a1b2c  3m ago  opt-tiny  r..."


def test_a_run_whose_result_is_of_another_kind_is_called_unreadable(labctl: Labctl) -> None:
    """List, show and report a run with a result of wrong types: it is named so, and the others are listed."""
    fine, broken = (recorded(labctl, timedelta(hours=hours)) for hours in (2, 1))
    (labctl.directory / "runs" / broken / "result.json").write_text('{"run_id": 5}')
    listed = labctl("runs").out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == [broken, fine]
    assert listed[1].endswith("unreadable")
    assert "state unreadable" in labctl("show", broken).out
    answer = labctl("report", broken)
    assert (answer.code, answer.err) == (
        3, f"error: cannot read result.json of run {broken}\nhint: labctl logs --run {broken}\n"
    )  # fmt: skip


def test_runs_as_csv_have_a_column_for_each_metric(labctl: Labctl) -> None:
    """Run runs --csv: whole ids, ISO times, quotes where a value needs them, metrics that some runs have."""
    first, second = (recorded(labctl, timedelta(hours=hours)) for hours in (2, 1))
    for run_id, metrics in ((first, {"loss": LOSS, 'a "b", c': SPEED}), (second, {"throughput": SAMPLES, "x": NAN})):
        path = labctl.directory / "runs" / run_id / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": metrics, "world_size": 2}))
    answer = labctl("runs", "--csv")
    assert '"a ""b"", c (/s)"' in answer.out
    rows = list(csv.DictReader(answer.out.splitlines()))
    assert [row["run_id"] for row in rows] == [second, first]
    assert datetime.fromisoformat(rows[0]["started"]).strftime("%Y%m%d-%H%M%S") == second[:15]
    assert (rows[0]["throughput (samples/s)"], rows[0]["loss"], rows[0]["world_size"]) == ("1234.5", "", "2")
    assert (rows[0]["x"], rows[1]["x"]) == ("nan", "")
    assert (rows[1]["loss"], rows[1]["loss first"], rows[1]['a "b", c (/s)']) == ("2.25", "8.0", "9.5")
    assert labctl("runs", "--csv", "--json").code == 2


def test_runs_are_chosen_by_workload_verdict_and_time(labctl: Labctl) -> None:
    """Run runs with --workload, --verdict and --since: only matching ones; without any, names are suggested."""
    old = recorded(labctl, timedelta(days=3))
    failed = recorded(labctl, timedelta(hours=5), verdict="FAIL")
    other = recorded(labctl, timedelta(hours=1), "opt-tiny")

    def listed(*options: str) -> list[str]:
        """Return the ids that `labctl runs` lists with these options."""
        return [run["run_id"] for run in labctl("runs", *options, "--json").document["runs"]]

    assert listed() == listed("ls") == [other, failed, old]
    assert listed("--workload", "hello") == [failed, old]
    assert listed("--verdict", "fail") == listed("ls", "--verdict", "FAIL") == [failed]
    assert listed("--since", "2d") == [other, failed]
    assert listed("--since", "90m") == [other]
    assert listed("--since", f"{datetime.now() - timedelta(days=2):%Y-%m-%d}") == [other, failed]
    assert listed("--workload", "hello", "--verdict", "PASS", "--since", "7d") == [old]
    none = labctl("runs", "--workload", "helo")
    assert (none.code, none.err) == (0, "no run of helo; there are runs of hello, opt-tiny\n")
    assert none.out == "no matching run; labctl runs lists all 3\n"


@pytest.mark.parametrize("text", ["yesterday", "2w", "-2d", "2026-13-01", "d"])
def test_what_is_no_time_is_refused(labctl: Labctl, text: str) -> None:
    """Run runs with an invalid --since: exit code 2 names it."""
    answer = labctl("runs", f"--since={text}")
    assert (answer.code, f"--since: `{text}` is not a time" in answer.err) == (2, True)


def test_prune_removes_the_oldest_runs_and_names_them(labctl: Labctl) -> None:
    """Run runs prune --keep 1: the older runs are removed and named; a dry run removes none; 0 is refused."""
    ids = [recorded(labctl, timedelta(days=days)) for days in (3, 2, 1)]
    foreseen = labctl("runs", "prune", "--keep", "1", "--dry-run")
    assert foreseen.out.splitlines() == [f"remove runs/{run_id}" for run_id in ids[:2]]
    assert len(labctl("runs", "--json").document["runs"]) == 3
    answer = labctl("runs", "prune", "--keep", "1")
    assert (answer.out, answer.err) == ("2 removed, 1 kept\n", "".join(f"removed run {run_id}\n" for run_id in ids[:2]))
    assert [run["run_id"] for run in labctl("runs", "--json").document["runs"]] == ids[2:]
    assert labctl("runs", "prune", "--keep", "0").code == 2


@pytest.mark.parametrize(
    "typed", ["config --json", "runs prune --keep 1 --dry-run", "runs", "keys rotate -s LAB_NODES=x"]
)
def test_the_lab_directory_may_be_named_before_the_command(
    labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    """Type -C before the command, in another directory: the answer is that of the lab."""
    expected = labctl(*typed.split())
    monkeypatch.chdir(tmp_path.parent)
    assert labctl("-C", str(labctl.directory), *typed.split()) == expected


def test_options_before_the_subcommand_are_not_passed_over(labctl: Labctl, tmp_path: Path) -> None:
    """Put an option before the subcommand of runs: exit code 2 says where it belongs."""
    recorded(labctl, timedelta(days=1))
    answer = labctl("runs", "-C", str(tmp_path), "prune", "--keep", "1")
    assert (answer.code, "options follow the subcommand: labctl runs prune" in answer.err) == (2, True)
    assert f"hint: labctl runs prune -C {tmp_path} --keep 1\n" in answer.err


@pytest.mark.parametrize("option", ["--rank 1", "--timestamps"])
def test_ranks_and_times_are_of_a_run(labctl: Labctl, option: str) -> None:
    """Run logs with --rank or --timestamps and no --run: exit code 2 shows the command."""
    answer = labctl("logs", *option.split())
    assert (answer.code, f"labctl logs --run latest {option}" in answer.err) == (2, True)


def test_init_writes_a_lab_that_renders(labctl: Labctl) -> None:
    """Run init: the files are named, the lab renders, and a second time nothing is missing."""
    target = labctl.directory / "fresh"
    document = labctl("init", str(target), "--json").document
    assert document == {
        "schema": 1,
        "directory": str(target),
        "written": ["hostfiles", "workloads", "hosts.txt", ".env"],
    }
    assert labctl("render", "-C", str(target), "-s", "LAB_ACCELERATOR=cpu", "--json").code == 0
    assert "is complete already" in labctl("init", str(target)).out


# --- into the nodes ------------------------------------------------------------------------------------------

GOING_IN = [["exec", "--", "true"], ["shell"], ["jupyter"], ["logs"]]


@dataclass
class Nodes:
    """Stand-in for labs whose nodes all run; ``asked`` records the requested names."""

    asked: list[str]
    owner: Path
    paused: bool = False

    def observe(self, lab: str) -> ObservedState:
        """Record the lab's name; return its launcher and two workers, running or paused."""
        self.asked.append(lab)
        state = "paused" if self.paused else "running"
        nodes = ("launcher", "worker-0", "worker-7")
        return ObservedState(
            containers=tuple(container(node, directory=str(self.owner), state=state) for node in nodes)
        )


@pytest.fixture
def nodes(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Replace engine, session, jupyter and log streams by a lab whose nodes all run; return it."""
    made = Nodes([], labctl.directory)
    monkeypatch.setattr(session, "run", lambda *_, **__: 0)
    monkeypatch.setattr(DockerEngine, "observe", lambda _, lab, **__: made.observe(lab))
    monkeypatch.setattr(jupyter, "serve", lambda *_: None)
    monkeypatch.setattr(process, "stream", lambda *_: None)
    return made


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be on a terminal, which a shell requires."""
    monkeypatch.setattr(commands, "on_terminal", lambda: True)


@pytest.mark.usefixtures("nodes")
def test_a_nodes_name_where_a_command_belongs_is_told_with_what_was_meant(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give a node's name as the command of exec: the hint shows `labctl exec -n NODE --`; not for an unknown node."""
    monkeypatch.setattr(session, "run", lambda *_, **__: 127)
    monkeypatch.setattr(session, "lacks", lambda *_: True)
    assert labctl("exec", "worker-0", "id", "-u").err.endswith("hint: labctl exec -n worker-0 -- id -u\n")
    assert "labctl exec -n" not in labctl("exec", "worker-7", "id").err


@pytest.mark.parametrize(
    ("typed", "node", "command"),
    [
        (["worker-1", "--", "id", "-u"], "worker-1", ("id", "-u")),
        (["worker-0,worker-1", "--", "id"], "worker-0,worker-1", ("id",)),
        (["launcher", "--", "grep", "--", "-x"], "launcher", ("grep", "--", "-x")),
        (["-n", "worker-1", "--", "id"], "worker-1", ("id",)),
        (["-n", "worker-1", "worker-0", "--", "id"], "worker-1", ("worker-0", "--", "id")),
        (["grep", "--", "-x"], "launcher", ("grep", "--", "-x")),
        (["--", "worker-1"], "launcher", ("worker-1",)),
    ],
)
def test_exec_takes_the_node_as_shell_does(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, typed: list[str], node: str, command: tuple[str, ...]
) -> None:
    """Type exec with a node before `--`, with -n or without: node and command are as expected."""
    given: list[object] = []

    def execute(_: object, argv: tuple[str, ...], name: str, **__: object) -> int:
        """Record command and node; return 0."""
        given.extend((argv, name))
        return 0

    monkeypatch.setattr("labctl.flows.execute", execute)
    assert labctl("exec", *typed).code == 0
    assert given == [command, node]


@pytest.mark.parametrize("arguments", GOING_IN)
def test_from_outside_any_lab_no_lab_is_entered(
    labctl: Labctl, nodes: Nodes, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run exec, shell, jupyter and logs outside any lab: exit code 2, and no lab is looked up."""
    (tmp_path / ".env").unlink()
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.chdir(outside)
    answer = labctl(*arguments)
    assert (answer.code, nodes.asked) == (2, [])
    assert "outside is not a lab directory (no .env)" in answer.err
    assert "-C" in answer.err


@pytest.mark.usefixtures("on_terminal")
@pytest.mark.parametrize("arguments", GOING_IN)
def test_the_lab_is_that_of_the_nearest_directory_upwards(
    labctl: Labctl, nodes: Nodes, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run exec, shell, jupyter and logs below a lab: that lab is used; a .env without its keys is passed over."""
    (labctl.directory / "workloads/.env").write_text("OTHER=1\n")
    monkeypatch.chdir(labctl.directory / "workloads/hello")
    labctl(*arguments)
    assert nodes.asked == ["demo"]


@pytest.mark.parametrize("arguments", [["config"], ["workloads"], ["config", "--json"]])
def test_every_command_finds_the_lab_upwards_unless_c_names_another(
    labctl: Labctl, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run commands in a folder of the lab: the same answer as in the lab, another with -C elsewhere."""
    expected = labctl(*arguments)
    monkeypatch.chdir(labctl.directory / "workloads/hello")
    assert labctl(*arguments) == expected
    (tmp_path / "empty").mkdir()
    assert labctl(*arguments, "-C", str(tmp_path / "empty")) != expected


@pytest.mark.usefixtures("on_terminal")
@pytest.mark.parametrize("arguments", GOING_IN)
def test_the_nodes_of_another_directorys_lab_are_not_entered(
    labctl: Labctl, nodes: Nodes, arguments: list[str], tmp_path: Path
) -> None:
    """Run into nodes that belong to another directory: exit code 3 names it, with -C."""
    nodes.owner = tmp_path / "theirs"
    nodes.owner.mkdir()
    answer = labctl(*arguments)
    assert answer.code == 3
    assert f"lab `demo` belongs to {nodes.owner}" in answer.err
    assert f"-C {nodes.owner}" in answer.err


def test_where_the_engine_does_not_answer_its_own_reason_is_told(
    labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run exec with a DOCKER_HOST that does not answer: exit code 3 with reason and hint."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    answer = labctl("exec", "--", "true")
    assert answer.code == 3
    assert f"No such file or directory (DOCKER_HOST=unix://{tmp_path}/no.sock)\nhint: unset DOCKER_HOST\n" in answer.err


def test_a_paused_node_is_said_with_what_wakes_it(labctl: Labctl, nodes: Nodes) -> None:
    """Run exec on a paused node: exit code 3 with the `docker unpause` command."""
    nodes.paused = True
    answer = labctl("exec", "-n", "worker-0", "--", "true")
    assert answer.code == 3
    assert "worker-0 is paused" in answer.err
    assert f"docker unpause {naming.container_of('demo', 'worker-0')}" in answer.err


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[DockerEngine]:
    """Replace the lab's engine by daemons on more hosts than are served at once; return them."""
    names = [f"h{number}" for number in range(WIDTH + 8)]
    ways: list[Any] = [SimpleNamespace(address=name, target=SimpleNamespace(name=name)) for name in names]
    daemons = [DockerEngine(way) for way in ways]
    engine = MultiHostEngine(dict(zip(names, daemons, strict=True)), {})
    monkeypatch.setattr(target, "reached", lambda *_: contextlib.nullcontext(engine))
    return daemons


def test_the_logs_of_every_host_are_followed_at_once(
    labctl: Labctl, followed: list[DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run logs -f on many hosts: all are followed at the same time."""
    all_at_once = threading.Barrier(len(followed), timeout=60)

    def stream(argv: tuple[str, ...], on_line: Callable[[str], None]) -> None:
        """Wait until every host is followed, then print a line."""
        all_at_once.wait()
        on_line(f"from {argv[2]}")

    monkeypatch.setattr(process, "stream", stream)
    answer = labctl("logs", "-f")
    assert (answer.code, set(answer.out.splitlines())) == (0, {f"from {daemon.hosts[0]}" for daemon in followed})


@pytest.mark.usefixtures("followed")
def test_logs_that_go_into_a_file_have_no_control_characters(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run logs into a pipe: control characters are removed."""
    monkeypatch.setattr(process, "stream", lambda _, on_line: on_line("\033[2Kworker-0  | listening"))
    assert set(labctl("logs").out.splitlines()) == {"worker-0  | listening"}


@pytest.mark.usefixtures("followed")
def test_logs_in_a_terminal_have_colors_and_no_other_escape_sequence(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run logs on a terminal: colors stay, other escape sequences become "?"."""
    line = "\033[36mworker-0  | \033[0m\033]0;title\007"
    monkeypatch.setattr(process, "stream", lambda _, on_line: on_line(f"\033[2K{line}"))
    monkeypatch.setattr(flows, "run_logs", lambda _lab, _run, on_line, **_: on_line(line))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = {"\033[36mworker-0  | \033[0m?]0;title?\033[0m"}
    assert set(labctl("logs").out.splitlines()) == shown
    assert set(labctl("logs", "--run", "latest").out.splitlines()) == shown


def test_a_host_whose_logs_cannot_be_had_is_named_once_those_of_the_others_are_here(
    labctl: Labctl, followed: list[DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail the logs of one host: the others' are printed, exit code 3 names it."""

    def stream(argv: tuple[str, ...], on_line: Callable[[str], None]) -> None:
        """Raise HostError for host h0; print a line for others."""
        if argv[2] == "h0":
            raise HostError("docker compose logs: exit code 1")
        on_line(f"from {argv[2]}")

    monkeypatch.setattr(process, "stream", stream)
    answer = labctl("logs")
    assert (answer.code, len(answer.out.splitlines())) == (3, len(followed) - 1)
    assert "error: h0: docker compose logs: exit code 1" in answer.err


def test_logs_that_nobody_reads_any_more_end_quietly_though_other_hosts_are_silent(
    labctl: Labctl, followed: list[DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close stdout while logs -f follows silent hosts: exit code 141 at once, without an error."""
    ended, silent = threading.Event(), []

    def stream(argv: tuple[str, ...], on_line: Callable[[str], None]) -> None:
        """Wait on all hosts but h3; on h3 print a line to a closed pipe."""
        if argv[2] != "h3":
            ended.wait(60)
            silent.append(argv[2])
            return
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes, "w") as unread:
            monkeypatch.setattr(sys, "stdout", unread)
            on_line("from h3")

    monkeypatch.setattr(process, "stream", stream)
    answer = labctl("logs", "-f")
    # None of the others was waited for.
    assert (answer.code, answer.err, silent) == (141, "", [])
    ended.set()


@pytest.mark.parametrize(
    ("command", "unread"),
    [("--help", "out"), ("config --json", "out"), ("down -C /nope", "err"), ("up --json --x", "out")],
)
def test_what_nobody_reads_ends_quietly_as_sigpipe_does(labctl: Labctl, command: str, unread: str) -> None:
    """Close the reader of stdout or stderr: exit code 141, and nothing printed elsewhere."""
    program = [sys.executable, "-c", "from labctl.cli import main; main()", *command.split()]
    reads, writes = os.pipe()
    os.close(reads)
    out, err = (writes, subprocess.PIPE) if unread == "out" else (subprocess.PIPE, writes)
    done = subprocess.run(program, stdout=out, stderr=err, cwd=labctl.directory, timeout=SECONDS, check=False)
    os.close(writes)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (141, b"", b"")


def test_ctrl_c_is_how_a_notebook_server_is_ended(
    labctl: Labctl, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt jupyter: exit code 130 and "stopped"."""

    def serve(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jupyter, "serve", serve)
    assert labctl("jupyter") == Completed(130, "", "stopped\n")


@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - {"init", "setup", "eval"}))
def test_a_directory_that_is_not_there_is_said(labctl: Labctl, command: str) -> None:
    """Run each command with -C /nope: exit code 2 "no such directory"."""
    arguments_by_command = {
        "exec": ["--", "true"],
        "run": ["hello"],
        "fit": ["hello"],
        "cache": ["hello"],
        "compare": ["latest"],
        "note": ["latest"],
        "bundle": ["file"],
        "k8s": ["hello"],
    }
    arguments_by_command |= {
        "hostfiles": ["nodes.txt", "--size", "2"],
        "batch": ["hello", "hostfiles/1node_1xN"],
        "bisect": ["hello"],
    }
    which = {"bundle": ["save"], "k8s": ["render"], "keys": ["rotate"]}.get(command, [])
    answer = labctl(command, *which, "-C", "/nope", *arguments_by_command.get(command, []))
    assert (answer.code, answer.out) == (2, "")
    assert "/nope: no such directory" in answer.err


# --- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flow", "hint"),
    [
        (["up"], "flows.up", "re-run `labctl up` to resume, or `labctl down` to remove the lab"),
        (["down"], "flows.down", "re-run to finish"),
        (["bundle", "save", "x"], "flows.save_bundle", "nothing was written; re-run to start over"),
        (["status"], "flows.status", ""),
    ],
)
def test_ctrl_c_says_what_is_true_of_the_command(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, arguments: list[str], flow: str, hint: str
) -> None:
    """Interrupt a command: exit code 130, with the hint of that command where it has one."""

    def stop(*_: object, **__: object) -> None:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    monkeypatch.setattr(f"labctl.{flow}", stop)
    answer = labctl(*arguments)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines() == ["error: stopped by Ctrl-C", *([f"hint: {hint}"] if hint else [])]


@pytest.mark.parametrize(
    ("command", "code"), [("--version >&-", 0), ("run nosuch 2>&-", 2), ("show nosuch --json 2>&-", 2)]
)
def test_a_stream_that_is_closed_changes_no_exit_code(tmp_path: Path, command: str, code: int) -> None:
    """Run with a closed stdout or stderr: the usual exit code, no traceback."""
    program = f"{sys.executable} -c 'from labctl.cli import program; program()' {command}"
    done = subprocess.run(["sh", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("flow", "typed", "named"),
    [
        ("show", "show -1", "-1"),
        ("show", "show --json -1", "-1"),
        ("attach", "attach -2 -q", "-2"),
        ("named_run", "stop --grace 1 -12", "-12"),
        ("stacks", "stacks -1", "-1"),
        ("plan_replay", "replay -1 --dry-run", "-1"),
        ("export", "export -1 --junit x.xml", "-1"),
        ("compare", "compare -2 latest -1", ["-2", "latest", "-1"]),
        ("report", "report -2 -1", ["-2", "-1"]),
        ("top", "top -1", "-1"),
        ("note", "note -1 text", "-1"),
        ("run_logs", "logs --run -1", "-1"),
    ],
)
def test_runs_counted_back_are_arguments(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, flow: str, typed: str, named: str | list[str]
) -> None:
    """Type -1 where a run is named: it reaches the flow as it is, and is no option."""
    seen: list[object] = []

    def record(_: object, run: object, *__: object, **___: object) -> None:
        """Keep the run, and end the command."""
        seen.append(run)
        raise HostError("ended here")

    monkeypatch.setattr(flows, flow, record)
    assert labctl(*typed.split()).code == HostError.exit_code
    assert seen == [named]


def test_a_run_to_go_on_from_may_be_counted_back(labctl: Labctl) -> None:
    """Give -1 to the option --resume: it is the name of a run, of which there is none."""
    answer = labctl("run", "hello", "--resume", "-1")
    assert (answer.code, f"no runs in {labctl.directory}/runs" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((), "stopping run r1; SIGKILL after 5 s if needed"),
        (("worker-0",), "stopping run r1 (1 node); SIGKILL after 5 s if needed"),
        (("worker-0", "worker-1"), "stopping run r1 (2 nodes); SIGKILL after 5 s if needed"),
    ],
)
def test_the_run_that_is_announced_is_stopped(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, ...], text: str
) -> None:
    """Stop the latest run: it is announced by its id, with its nodes as far as known, and stopped by that id."""
    events: list[str] = []

    def stop(_: object, run: str, __: float) -> None:
        """Keep the run, and end the command."""
        events.append(run)
        raise HostError("ended here")

    monkeypatch.setattr(flows, "named_run", lambda *_: RunSummary(run_id="r1", state="running", nodes=nodes))
    monkeypatch.setattr(flows, "stop", stop)
    monkeypatch.setattr(Output, "begin", lambda _, line: events.append(line))
    assert labctl("stop").code == HostError.exit_code
    assert events == [text, "r1"]


def test_no_stop_is_announced_of_a_run_that_has_ended(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a run with a result: nothing is announced."""
    events: list[str] = []

    def stop(*_: object) -> None:
        """End the command as for a run that has ended."""
        raise HostError("run r1 has ended: PASS")

    monkeypatch.setattr(flows, "named_run", lambda *_: RunSummary(run_id="r1", state="done", verdict="PASS"))
    monkeypatch.setattr(flows, "stop", stop)
    monkeypatch.setattr(Output, "begin", lambda _, line: events.append(line))
    answer = labctl("stop")
    assert (answer.code, events) == (HostError.exit_code, [])
    assert "error: no run is under way (the latest, r1, has ended: PASS)" in answer.err
    assert "error: run r1 has ended: PASS" in labctl("stop", "r1").err


def test_a_named_run_has_the_nodes_that_it_was_started_on(labctl: Labctl) -> None:
    """Name the latest of two runs that have not ended: its id and its nodes."""
    for run_id, count in (("20260102-150405-hello-c3a223", 1), ("20260102-150407-hello-0a1b2c", 2)):
        (labctl.directory / "runs" / run_id).mkdir(parents=True)
        labctl.write(f"runs/{run_id}/started", "")
        nodes = [{"name": f"worker-{number}"} for number in range(count)]
        labctl.write(f"runs/{run_id}/job.json", json.dumps({"nodes": nodes}))
    lab = Context(directory=labctl.directory, environ={}, emit=lambda _: None, flags={})
    run = flows.named_run(lab, "latest")
    assert (run.run_id, run.nodes) == ("20260102-150407-hello-0a1b2c", ("worker-0", "worker-1"))


def test_a_file_names_labctl_from_path_where_that_is_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name the program for devcontainer.json: `labctl` if PATH leads to it, by a link too; else its path."""
    program = tmp_path / "venv/labctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lab_commands.program_name() == str(program)
    (tmp_path / "labctl").symlink_to(program)
    assert lab_commands.program_name() == "labctl"
    monkeypatch.setattr("sys.prefix", str(program.parents[1]))
    assert lab_commands.program_name() == "labctl"


def test_a_file_names_labctl_of_an_activated_environment_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name the program of a virtual environment whose programs are first in PATH: its path."""
    program = tmp_path / "venv/bin/labctl"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert lab_commands.program_name() == str(program)

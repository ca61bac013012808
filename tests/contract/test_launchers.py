"""What every launcher module must do, whichever they are."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest

from labctl import hostfile, launchers
from labctl.errors import ConfigError
from labctl.launchers import Launch

NAMES = launchers.names()
LAUNCH = Launch(
    entries=(("worker-1", 4), ("worker-0", 2)),
    directory="/workspace/runs/r1",
    program="/workspace/runs/r1/rank.sh",
    master_port=29600,
    ssh_port=3022,
    variables=(("LABCTL_RUN_ID", "r1"),),
)


def test_there_is_a_launcher() -> None:
    assert "deepspeed" in NAMES


@pytest.mark.parametrize("name", ["slurm", "", "../deepspeed", "__init__"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launchers.get(name)
    assert f"`{name}`" in caught.value.message
    assert caught.value.hint == f"known: {', '.join(NAMES)}"


@pytest.mark.parametrize("name", NAMES)
def test_module_keeps_the_protocol(name: str) -> None:
    module = launchers.get(name)
    assert list(inspect.signature(module.argv).parameters) == ["launch"]
    assert list(inspect.signature(module.files).parameters) == ["launch"]


@pytest.mark.parametrize("name", NAMES)
def test_module_is_pure(name: str) -> None:
    module, before = launchers.get(name), copy.deepcopy(LAUNCH)
    assert module.argv(LAUNCH) == module.argv(LAUNCH)
    assert module.files(LAUNCH) == module.files(LAUNCH)
    assert before == LAUNCH


@pytest.mark.parametrize("name", NAMES)
def test_command_starts_the_one_program_and_nothing_else(name: str) -> None:
    argv = launchers.get(name).argv(LAUNCH)
    assert all(argv)
    assert argv[-1] == LAUNCH.program
    assert argv.count(LAUNCH.program) == 1


@pytest.mark.parametrize("name", NAMES)
def test_files_lie_in_the_runs_directory(name: str) -> None:
    paths = [file.path for file in launchers.get(name).files(LAUNCH)]
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if path.startswith("/") or ".." in path.split("/")]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_meet_on_the_first_node_at_the_labs_port(name: str) -> None:
    argv = launchers.get(name).argv(LAUNCH)
    assert "worker-1" in " ".join(argv)
    assert "29600" in " ".join(argv)
    assert argv != launchers.get(name).argv(replace(LAUNCH, master_port=29601))


# --- deepspeed -----------------------------------------------------------------------------------------------


def deepspeed_files(launch: Launch = LAUNCH) -> dict[str, str]:
    return {file.path: file.content for file in launchers.get("deepspeed").files(launch)}


def test_deepspeed_never_runs_locally_by_itself() -> None:
    argv = launchers.get("deepspeed").argv(replace(LAUNCH, entries=(("worker-0", 1),)))
    assert "--force_multi" in argv
    assert argv[argv.index("--hostfile") + 1] == "/workspace/runs/r1/hostfile"


def test_deepspeed_reads_the_hostfile_as_it_was_meant() -> None:
    assert hostfile.parse(deepspeed_files()["hostfile"], "hostfile") == LAUNCH.entries


def test_deepspeeds_environment_is_bare_lines_that_its_reader_can_split() -> None:
    launch = replace(LAUNCH, variables=(("A", "1"), ("LABCTL_RUN_ID", "r1")))
    text = deepspeed_files(launch)[".deepspeed_env"]
    # As deepspeed/launcher/runner.py reads it.
    assert [tuple(line.split("=", maxsplit=1)) for line in text.splitlines()] == [("A", "1"), ("LABCTL_RUN_ID", "r1")]
    assert not [line for line in text.splitlines() if not line.strip() or line.startswith("#")]

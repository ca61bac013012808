"""Words that shells complete, read from files: no engine answers here."""

from __future__ import annotations

import pytest
from support.commandline import Labctl

from labctl import cli

RUNS = ("20261126-220826-opt-tiny-c3a223", "20261126-220900-opt-tiny-9f01b4", "20261127-100000-hello-aa01b4")
CASES = {
    "command": ("stat", ["status"]),
    "command that another begins with": ("run", ["run", "runs"]),
    "subcommand": ("k8s sub", ["submit"]),
    "workload": ("run he", ["hello"]),
    "workload of an option": ("up --workload h", ["hello"]),
    "runs, the latest first": ("show ", ["latest", *reversed(RUNS)]),
    "run": ("show 20261127", [RUNS[2]]),
    "run by its short id": ("show c3a", ["c3a223"]),
    "run to note on": ("note 20261127", [RUNS[2]]),
    "second run": ("compare latest 20261127", [RUNS[2]]),
    "run of an option": ("logs --run l", ["latest"]),
    "run to resume": ("run --resume 20261127", [RUNS[2]]),
    "node": ("shell w", ["worker-0", "worker-1", "worker-2"]),
    "launcher as a node": ("exec -n l", ["launcher"]),
    "node of exec": ("exec worker-2", ["worker-2"]),
    "launcher": ("run hello --launcher horovod", ["horovod", "horovod:mpi", "horovod:elastic"]),
    "profile": ("validate --profile q", ["quick"]),
    "pattern": ("hostfiles --pattern r", ["ring", "random"]),
    "setting": ("up -s LAB_NOD", ["LAB_NODES=", "LAB_NODES=VALUE"]),
    "settings, each once": ("up -s LAB_MEM", ["LAB_MEMORY=", "LAB_MEMLOCK="]),
    "set of hostfiles": ("batch hello ", ["hostfiles/4nodes_2xN"]),
    "option": ("status --verb", ["--verbose"]),
}


@pytest.fixture
def complete(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> Labctl:
    """Return labctl in a lab with three nodes, runs and hostfiles, asked by bash for completions."""
    labctl.env("LAB_NODES=3\n")
    for run_id in RUNS:
        (labctl.directory / "runs" / run_id).mkdir(parents=True)
        labctl.write(f"runs/{run_id}/started", "")
    (labctl.directory / "hostfiles/4nodes_2xN").mkdir(parents=True)
    labctl.write("hostfiles/4nodes_2xN/hostfile_2xN_batch0001", "worker-0 slots=1\n")
    monkeypatch.setenv("_LABCTL_COMPLETE", "complete_bash")
    return labctl


def words(labctl: Labctl, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Return what bash is given for a line with the cursor at its end."""
    typed = f"labctl {line}".split(" ")
    monkeypatch.setenv("COMP_WORDS", "\n".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    answer = labctl()
    assert (answer.code, answer.err) == (0, "")
    return answer.out.split()


@pytest.mark.parametrize("case", CASES)
def test_a_word_is_completed_from_files(complete: Labctl, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Complete each kind of word: exactly those that begin with it."""
    line, expected = CASES[case]
    assert words(complete, monkeypatch, line) == expected


def test_hosts_are_completed_from_the_inventory(complete: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete nodes of a lab on two hosts: a worker each, and for `health` also the hosts."""
    complete.env("LAB_HOSTS=hosts.txt\n")
    complete.write("hosts.txt", "red address=10.0.0.5\nblue address=10.0.0.6\n")
    assert words(complete, monkeypatch, "shell ") == ["launcher", "worker-0", "worker-1"]
    assert words(complete, monkeypatch, "health ") == ["worker-0", "worker-1", "red", "blue"]


def test_rendered_nodes_are_those_of_the_lab(complete: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete nodes of a lab that was up with another number of nodes: those that it has."""
    for number in range(2):
        (complete.directory / f".lab/nodes/worker-{number}").mkdir(parents=True)
    assert words(complete, monkeypatch, "shell w") == ["worker-0", "worker-1"]


def test_workers_are_in_the_order_of_their_numbers(complete: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete the eleven nodes of a lab: worker-10 is the last."""
    for number in range(11):
        (complete.directory / f".lab/nodes/worker-{number}").mkdir(parents=True)
    assert words(complete, monkeypatch, "shell w") == [f"worker-{number}" for number in range(11)]


def test_a_lab_below_the_home_directory_is_meant_by_a_tilde(complete: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete runs of a lab that -C names with `~`, which a shell does not expand; none for an unknown user."""
    monkeypatch.setenv("HOME", str(complete.directory.parent))
    monkeypatch.chdir("/")
    assert words(complete, monkeypatch, f"show -C ~/{complete.directory.name} 20261127") == [RUNS[2]]
    assert words(complete, monkeypatch, "show -C ~no-such-user/lab 20261127") == []


def test_words_that_no_lab_has_are_completed_without_one(complete: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete a launcher and a profile no lab is looked for."""
    monkeypatch.setattr("labctl.cli.complete.lab_of", lambda _: pytest.fail("a lab was looked for"))
    assert words(complete, monkeypatch, "run hello --launcher deep") == ["deepspeed", "deepspeed:openmpi"]
    assert words(complete, monkeypatch, "validate --profile q") == ["quick"]


def test_the_lab_of_an_option_and_of_a_parent_directory_is_meant(
    complete: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete runs below the lab, and elsewhere with -C: its runs."""
    (complete.directory / "below").mkdir()
    monkeypatch.chdir(complete.directory / "below")
    assert words(complete, monkeypatch, "show 20261127") == [RUNS[2]]
    monkeypatch.chdir("/")
    assert words(complete, monkeypatch, f"show -C {complete.directory} 20261127") == [RUNS[2]]
    assert words(complete, monkeypatch, "show 20261127") == []


@pytest.mark.parametrize("line", ["run he", "show 2", "shell w", "health ", "batch hello "])
def test_a_lab_that_cannot_be_read_completes_no_word_and_no_traceback(
    complete: Labctl, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Complete with a .env, an inventory and workloads that are broken: exit code 0 and no error."""
    complete.env("LAB_NODES=x\nLAB_HOSTS=gone.txt\n")
    complete.workload("launcher: [\n")
    words(complete, monkeypatch, line)
    (complete.directory / ".env").write_bytes(b"\xff\xfeL")
    words(complete, monkeypatch, line)


@pytest.mark.parametrize(("shell", "form"), [("zsh", '"quick"'), ("fish", "quick")])
def test_other_shells_are_answered_too(labctl: Labctl, monkeypatch: pytest.MonkeyPatch, shell: str, form: str) -> None:
    """Complete a profile and a setting for zsh and fish: in their form, the setting without VALUE."""
    monkeypatch.setenv("_LABCTL_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "labctl validate --profile q")
    assert form in labctl().out
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "labctl up -s LAB_NOD")
    answer = labctl().out
    assert ("LAB_NODES=" in answer, "VALUE" in answer) == (True, False)


def test_only_the_command_of_the_line_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete a word of a command: only this command is read; without one, all are."""
    monkeypatch.setenv("COMP_WORDS", "labctl\nshow\n")
    assert cli.completed_commands() == {"show"}
    for line in ("labctl\nrun", "labctl\n", "labctl\nnosuch\n"):
        monkeypatch.setenv("COMP_WORDS", line)
        assert cli.completed_commands() == set(cli.COMMANDS)

"""The contract of launcher modules."""

from __future__ import annotations

import copy
import socket
import subprocess
import typing
from typing import Any

import pytest
from msgspec.structs import replace

from labctl import launchers
from labctl.config import hostfile
from labctl.errors import ConfigError
from labctl.launchers import LaunchSpec

NAMES = launchers.known()
LAUNCH = LaunchSpec(
    entries=(("worker-1", 4), ("worker-0", 2)),
    directory="/workspace/outputs/r1",
    program="/workspace/outputs/r1/rank.sh",
    master_port=29600,
    ssh_port=3022,
    interface="lab0",
    addresses="lab0",
    variables=(("LABCTL_RUN_ID", "r1"),),
    way="pdsh",
)


def launch(name: str, **changes: Any) -> LaunchSpec:
    """Return a launch on two nodes of two slots each, worker-1 first, by this launcher, with these fields changed."""
    return replace(LAUNCH, way=launchers.way(name), entries=(("worker-1", 2), ("worker-0", 2)), **changes)


def argv(name: str, **changes: Any) -> tuple[str, ...]:
    """Return the command line of this launcher for the launch of `launch()`."""
    return launchers.get(name).argv(launch(name, **changes))


def test_all_launchers_are_known_with_their_ways() -> None:
    """known() has all launchers and their ways; accepted() adds each one's first way as NAME:WAY."""
    assert {
        "deepspeed", "deepspeed:openmpi", "horovod", "horovod:mpi", "horovod:elastic", "impi", "mpirun", "script",
        "torchrun", "torchrun:elastic",
    } <= {*NAMES}  # fmt: skip
    assert {*launchers.accepted()} - {*NAMES} == {
        f"{name}:{launchers.get(name).WAYS[0]}" for name in launchers.names()
    }  # fmt: skip


def mpi_options(name: str, **changes: Any) -> str:
    """Return Open MPI's options as one text, from the command line and from OMPI_MCA_ variables."""
    given = launchers.environment(name, launch(name, **changes))
    return " ".join((*argv(name, **changes), *(f"{key.removeprefix('OMPI_MCA_')} {value}" for key, value in given)))


@pytest.mark.parametrize("name", ["deepspeed:openmpi", "horovod:mpi", "mpirun"])
def test_open_mpi_yields_where_ranks_share_cores_and_there_only(name: str) -> None:
    """`mpi_yield_when_idle 1` is set for a crowded launch and not for another."""
    said = [mpi_options(name, crowded=crowded) for crowded in (False, True)]
    assert ["mpi_yield_when_idle 1" in text for text in said] == [False, True]


def test_horovod_gives_open_mpis_options_to_no_other_mpi() -> None:
    """The Intel MPI command of `horovod:mpi` has no `-mca`, which it refuses; horovod sets no variables."""
    assert not [word for word in argv("horovod:mpi", crowded=True) if "mca" in word]
    assert launchers.environment("horovod", launch("horovod", crowded=True)) == ()


@pytest.mark.parametrize("name", ["slurm", "", "../deepspeed", "__init__"])
def test_unknown_name_lists_the_known(name: str) -> None:
    """get() raises ConfigError that quotes the name; its hint lists all launchers."""
    with pytest.raises(ConfigError) as caught:
        launchers.get(name)
    assert f"`{name}`" in caught.value.message
    assert caught.value.hint == f"known: {', '.join(NAMES)}"


def test_an_unknown_way_lists_the_known() -> None:
    """get("horovod:nccl") raises ConfigError, with horovod's ways as its hint."""
    with pytest.raises(ConfigError) as caught:
        launchers.get("horovod:nccl")
    assert caught.value.hint == "horovod has gloo, mpi, elastic"


@pytest.mark.parametrize("name", NAMES)
def test_module_keeps_the_protocol(name: str) -> None:
    """Each launcher's check, argv and files have the protocol's types, and its constants have theirs."""
    module = launchers.get(name)
    for function in ("check", "argv", "files"):
        hints = typing.get_type_hints(getattr(module, function))
        hints.setdefault("return", type(None))
        assert hints == typing.get_type_hints(getattr(launchers.LauncherModule, function)) | {"launch": LaunchSpec}
    assert isinstance(module.PROGRAM, str)
    assert isinstance(module.WAYS, tuple)
    assert isinstance(module.RESERVED, frozenset)
    assert all(isinstance(count, int) for count in module.OPTIONS.values())
    assert not module.OPTIONS.keys() & module.RESERVED


@pytest.mark.parametrize("name", NAMES)
def test_the_program_that_the_image_must_have_is_in_the_command(name: str) -> None:
    """A launcher's PROGRAM, if it has one, is a word of its command line."""
    program = launchers.get(name).PROGRAM
    assert not program or program in argv(name)


@pytest.mark.parametrize("name", NAMES)
def test_only_one_launcher_takes_slots_by_number(name: str) -> None:
    """Including slot 1 of worker-1 is accepted by deepspeed; other launchers raise ConfigError."""
    if name == "deepspeed":
        launchers.check(name, launch(name, include="worker-1:1"))
        return
    with pytest.raises(ConfigError, match="takes the first slots of a node"):
        launchers.check(name, launch(name, include="worker-1:1"))


@pytest.mark.parametrize("name", NAMES)
def test_module_is_pure(name: str) -> None:
    """Two calls of argv() and of files() return the same and do not change the launch."""
    module, given, before = launchers.get(name), launch(name), launch(name)
    assert module.argv(given) == module.argv(copy.deepcopy(given))
    assert module.files(given) == module.files(copy.deepcopy(given))
    assert before == given


@pytest.mark.parametrize("name", NAMES)
def test_command_starts_the_one_program_and_nothing_else(name: str) -> None:
    """The rank's program is the last word, occurs once, and no word is empty."""
    words = argv(name)
    assert all(words)
    assert words[-1] == LAUNCH.program
    assert words.count(LAUNCH.program) == 1


@pytest.mark.parametrize("name", NAMES)
def test_files_lie_in_the_runs_directory(name: str) -> None:
    """Each launcher's files have distinct relative paths without `..`."""
    paths = [file.path for file in launchers.get(name).files(launch(name))]
    assert paths
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if path.startswith("/") or ".." in path.split("/")]


@pytest.mark.parametrize("name", NAMES)
def test_nodes_come_in_the_hostfiles_order_with_their_slots(name: str) -> None:
    """The first file of each launcher lists worker-1, then worker-0, with two slots each."""
    first, second = launchers.get(name).files(launch(name))[0].content.splitlines()
    assert first in ("worker-1 slots=2", "worker-1:2")
    assert second in ("worker-0 slots=2", "worker-0:2")


@pytest.mark.parametrize("name", ["deepspeed:openmpi", "horovod", "horovod:mpi", "horovod:elastic", "impi", "mpirun"])
def test_the_labs_interface_is_named(name: str) -> None:
    """Interface lab0 is in the command line."""
    assert "lab0" in " ".join(argv(name))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"script", "script:once"}))
def test_an_option_of_the_launcher_reaches_it(name: str) -> None:
    """Each known option with its values passes check() and is in the command line before the program."""
    for option, values in launchers.get(name).OPTIONS.items():
        words = (option, *("1" for _ in range(values)))
        assert launchers.unknown_options(name, words) == []
        launchers.check(name, launch(name, options=words))
        shown = " ".join(argv(name, options=words))
        assert " ".join(words) in shown
        assert shown.index(" ".join(words)) < shown.index(LAUNCH.program)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"script", "script:once"}))
def test_an_unknown_option_reaches_the_launcher_with_a_warning(name: str) -> None:
    """Unknown options pass check(), are in the command line, and unknown_options() warns of each by name."""
    words = ("--tune", "tuned.conf", "--tuned-by=me")
    launchers.check(name, launch(name, options=words))
    assert " ".join(words) in " ".join(argv(name, options=words))
    warnings = launchers.unknown_options(name, words)
    assert [one.split()[2] for one in warnings] == ["`--tune`", "`--tuned-by`"]
    assert all("unknown to labctl and passed on as it is" in one for one in warnings)


@pytest.mark.parametrize("word", ["stray", "node-0"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"script", "script:once"}))
def test_a_stray_word_is_refused(name: str, word: str) -> None:
    """A word that is no option raises ConfigError that quotes it."""
    with pytest.raises(ConfigError, match=f"unknown .* option `{word}`"):
        launchers.check(name, launch(name, options=(word,)))


def test_a_script_of_its_own_ranks_has_no_options() -> None:
    """Launcher `script` raises ConfigError for any option."""
    with pytest.raises(ConfigError, match=r"unknown script option `--no-such-thing`"):
        launchers.check("script", launch("script", options=("--no-such-thing",)))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"script", "script:once"}))
def test_what_labctl_sets_cannot_be_set(name: str) -> None:
    """Each option in RESERVED raises ConfigError `set by labctl`."""
    for option in launchers.get(name).RESERVED:
        with pytest.raises(ConfigError, match="set by labctl"):
            launchers.check(name, launch(name, options=(option, "x")))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("torchrun", "--nproc_per_node=2"),
        ("deepspeed", "--hostf=x"),
        ("deepspeed", "--master-port=1"),
        ("mpirun", "-machinefile"),
        ("horovod", "--num"),
        ("impi", "--hosts=x"),
    ],
)
def test_nor_in_another_spelling(name: str, option: str) -> None:
    """A reserved option, abbreviated, with `=` or after another option, raises ConfigError `set by labctl`."""
    with pytest.raises(ConfigError, match="set by labctl"):
        launchers.check(name, launch(name, options=("--tune", "x", option)))


def test_a_misspelt_option_names_the_nearest() -> None:
    """`--map-to` gives one warning, which suggests `--map-by`; the known `--bind-to` gives none."""
    (warning,) = launchers.unknown_options("mpirun", ("--map-to", "node", "--bind-to", "core"))
    assert warning.startswith("mpirun option `--map-to` ")
    assert warning.endswith("; did you mean `--map-by`?")


def test_an_option_without_its_value_is_refused() -> None:
    """`--mca` with one value of two raises ConfigError."""
    with pytest.raises(ConfigError, match="`--mca` needs 2 values"):
        launchers.check("mpirun", launch("mpirun", options=("--mca", "pml")))


@pytest.mark.parametrize("word", ["--role=a;touch x", "--map-by node", "$(id)", "--role=`id`", "a\nb", ""])
def test_a_word_that_a_shell_would_read_is_refused(word: str) -> None:
    """An option with a shell's character, or an empty one, raises ConfigError."""
    with pytest.raises(ConfigError, match="contains more than"):
        launchers.check("torchrun", launch("torchrun", options=(word,)))


# --- torchrun ------------------------------------------------------------------------------------------------


def test_torchrun_meets_on_the_first_node_at_the_labs_port() -> None:
    """torchrun has --master-addr worker-1, the first node, and the lab's master port."""
    words = argv("torchrun")
    assert words[words.index("--master-addr") + 1] == "worker-1"
    assert words[words.index("--master-port") + 1] == "29600"


def test_torchrun_refuses_nodes_with_different_slots() -> None:
    """Nodes of 2 and 4 slots raise ConfigError that names both."""
    with pytest.raises(ConfigError) as caught:
        launchers.check("torchrun", replace(LAUNCH, way="pdsh"))
    assert "worker-0 has 2, worker-1 has 4" in caught.value.message


# --- mpirun --------------------------------------------------------------------------------------------------


def test_workers_start_no_daemons_on_other_workers() -> None:
    """Launchers by Open MPI set plm_rsh_no_tree_spawn to 1."""
    for name in ("mpirun", "deepspeed:openmpi", "horovod:mpi"):
        assert "plm_rsh_no_tree_spawn 1" in mpi_options(name)


def test_mpiruns_at_once_do_not_share_a_directory() -> None:
    """Launchers by Open MPI keep session files in a directory named for the run."""
    for name in ("mpirun", "deepspeed:openmpi", "horovod:mpi"):
        assert "orte_tmpdir_base /tmp/run-a" in mpi_options(name, directory="/workspace/outputs/run-a")


@pytest.mark.parametrize("asked", [("--bind-to", "core"), ("--bind-to=core",)])
def test_ranks_are_bound_only_as_a_person_asks(asked: tuple[str, ...]) -> None:
    """With `--bind-to core` mpirun's command has no default `none` and has `core`."""
    words = argv("mpirun", options=asked)
    assert "none" not in words
    assert "core" in " ".join(words)


# --- horovod -------------------------------------------------------------------------------------------------


def test_an_elastic_horovod_is_given_the_nodes_that_answer_in_order() -> None:
    """The discovery script prints the nodes whose ssh port answers, with slots, in the hostfile's order."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        entries = (("127.0.0.1", 2), ("127.0.0.9", 1), ("localhost", 4))
        given = launch("horovod:elastic", ssh_port=listening.getsockname()[1])
        (script,) = (
            file for file in launchers.get("horovod").files(replace(given, entries=entries)) if file.mode & 0o100
        )
        done = subprocess.run(["bash", "-c", script.content], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["127.0.0.1:2", "localhost:4"]


# --- deepspeed -----------------------------------------------------------------------------------------------


def deepspeed_files(given: LaunchSpec = LAUNCH) -> dict[str, str]:
    """Return the content of deepspeed's files by path."""
    return {file.path: file.content for file in launchers.get("deepspeed").files(given)}


def test_deepspeed_never_runs_locally_by_itself() -> None:
    """Even for one node, deepspeed gets --force_multi and the run's hostfile."""
    for name in ("deepspeed", "deepspeed:openmpi"):
        words = launchers.get(name).argv(replace(launch(name), entries=(("worker-0", 1),)))
        assert "--force_multi" in words
        assert words[words.index("--hostfile") + 1] == "/workspace/outputs/r1/hostfile"


def test_deepspeed_reads_the_hostfile_as_it_was_meant() -> None:
    """labctl's parser reads deepspeed's hostfile back as the launch's entries."""
    assert hostfile.parse(deepspeed_files()["hostfile"], "hostfile") == LAUNCH.entries


def test_deepspeeds_environment_is_bare_lines_that_its_reader_can_split() -> None:
    """Each line of .deepspeed_env is NAME=VALUE; none is empty or a comment."""
    given = replace(LAUNCH, variables=(("A", "1"), ("LABCTL_RUN_ID", "r1")))
    text = deepspeed_files(given)[".deepspeed_env"]
    # As deepspeed/launcher/runner.py reads it.
    assert [tuple(line.split("=", maxsplit=1)) for line in text.splitlines()] == [("A", "1"), ("LABCTL_RUN_ID", "r1")]
    assert not [line for line in text.splitlines() if not line.strip() or line.startswith("#")]

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import host, job, lab, node, workload

from labctl.config import hostfile
from labctl.errors import ConfigError
from labctl.jobs import job as jobs
from labctl.jobs.job import choose
from labctl.model import Copy, Job, Lab, Pairs, Project
from labctl.records.lines import line_of
from unit.scripts.test_labnode import labnode

ODD = ["a;b", "$(touch x)", "`touch x`", "it's", 'say "x"', "two\nlines", "", "*", "~", "-n", "\\", "$HOME", "ü", "a b"]
ARGUMENTS = ("--words", *ODD)


def files(of: Job) -> dict[str, str]:
    """Return the content of the job's files by path."""
    return {file.path: file.content for file in of.files}


# --- nodes ---------------------------------------------------------------------------------------------------


def test_without_a_hostfile_the_run_has_all_nodes() -> None:
    """Build a job without hostfile: all nodes with their slots."""
    assert [(node.name, node.slots) for node in job(lab(3)).nodes] == [
        ("worker-0", 1),
        ("worker-1", 1),
        ("worker-2", 1),
    ]


def test_a_hostfile_chooses_nodes_slots_and_order() -> None:
    """Build a job with a hostfile: its nodes, slots and order; the first is the master."""
    of = job(lab((node(0, slots=4), node(1, slots=4))), entries=(("worker-1", 2), ("worker-0", 1)))
    assert files(of)["hostfile"] == "worker-1 slots=2\nworker-0 slots=1\n"
    assert of.argv[of.argv.index("--master_addr") + 1] == "worker-1"


def test_a_hostfile_with_an_unknown_node_names_those_there_are() -> None:
    """Name an unknown node: ConfigError lists the lab's nodes."""
    with pytest.raises(ConfigError) as caught:
        job(lab(2), entries=(("worker-0", 1), ("worker-7", 1)))
    assert "worker-7" in caught.value.message
    assert caught.value.hint == "it has worker-0, worker-1"


def test_a_hostfile_with_too_many_slots_says_how_many_there_are() -> None:
    """Ask for more slots than a node has: ConfigError with both numbers."""
    with pytest.raises(ConfigError, match="worker-0 has 1 slots, not 2"):
        job(lab(2), entries=(("worker-0", 2),))


def called(of: Lab, *names: str) -> list[str]:
    """Return the names of the lab's nodes that this list of hosts or nodes selects."""
    return [node.name for node in jobs.nodes_of(of, names, "nodes.txt")]


def over_hosts(*names: str, address: str = "10.0.0.{}") -> Lab:
    """Return a lab with one node on each host, addresses from 10.0.0.1."""
    nodes = tuple(node(number, host=name) for number, name in enumerate(names))
    hosts = tuple(host(name=name, address=address.format(number + 1)) for number, name in enumerate(names))
    return lab(nodes, hosts=hosts, network="host")


def test_machines_are_called_by_their_node_their_host_or_its_address_in_any_order() -> None:
    """Name nodes by node, address and host: the nodes in that order."""
    of = over_hosts("ml-001", "ml-002", "ml-003")
    assert called(of, "ml-003", "10.0.0.2", "worker-0") == ["worker-2", "worker-1", "worker-0"]


def test_case_is_ignored_in_the_names_of_hosts() -> None:
    """Name hosts in other case: the same nodes."""
    assert called(over_hosts("ML-001", "ml-002"), "ml-001", "ML-002") == ["worker-0", "worker-1"]


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", socket.gethostname()])
def test_this_machine_is_the_first_of_its_nodes(name: str) -> None:
    """Name this machine by any of its names: worker-0."""
    assert called(lab(2), name) == ["worker-0"]


def test_names_of_this_machine_take_the_nodes_that_nothing_else_names_in_order() -> None:
    """Name this machine twice among nodes: the first nodes that nothing else names."""
    assert called(lab(4), "localhost", "worker-0", "127.0.0.1") == ["worker-1", "worker-0", "worker-2"]


def test_a_name_of_this_machine_that_comes_once_too_often_is_refused() -> None:
    """Name this machine more often than it has nodes: ConfigError."""
    with pytest.raises(ConfigError, match=r"^nodes.txt: no node of `127.0.0.1` is left$") as caught:
        called(lab(1), "localhost", "127.0.0.1")
    assert caught.value.hint == "it has worker-0"
    with pytest.raises(ConfigError, match="no node of `ml-001` is left"):
        called(over_hosts("ml-001"), "worker-0", "ml-001")


def test_an_unknown_machine_is_refused_with_the_nodes_and_hosts_that_there_are() -> None:
    """Name an unknown machine, or localhost in a lab of several hosts: ConfigError with nodes and hosts."""
    with pytest.raises(ConfigError, match=r"^nodes.txt: lab demo has no node `ml-009`$") as caught:
        called(over_hosts("ml-001", "ml-002"), "ml-001", "ml-009")
    assert caught.value.hint == "it has worker-0, worker-1; hosts: ml-001, ml-002"
    # On several hosts each would call another machine so.
    with pytest.raises(ConfigError, match="no node `localhost`"):
        called(over_hosts("ml-001"), "localhost")


def test_a_hostfile_with_too_many_slots_says_which_node_its_machine_is() -> None:
    """Ask for too many slots of localhost: ConfigError names it and worker-0."""
    with pytest.raises(ConfigError, match=r"^h: localhost \(worker-0\) has 1 slots, not 8$"):
        choose(lab(2), (("localhost", 8),), "h")


def test_a_node_that_a_hostfile_names_alone_has_all_of_its_slots() -> None:
    """Name nodes without slots: all their slots; --include chooses some."""
    of = lab((node(0, slots=2), node(1, slots=4)))
    chosen = choose(of, hostfile.parse("worker-1\nworker-0:1\n", "h"), "h")
    assert [(node.name, slots) for node, slots in chosen] == [("worker-1", (0, 1, 2, 3)), ("worker-0", (0,))]
    assert choose(of, hostfile.parse("worker-1", "h"), include="worker-1:3") == ((of.nodes[1], (3,)),)


def test_nodes_can_be_left_out() -> None:
    """Exclude a node and a slot: the others remain."""
    of = lab((node(0, slots=2), node(1, slots=2), node(2, slots=1)))
    assert [(chosen.name, slots) for chosen, slots in choose(of, exclude="worker-1@worker-0:1")] == [
        ("worker-0", (0,)),
        ("worker-2", (0,)),
    ]


def test_whole_nodes_may_have_commas_between_them() -> None:
    """Separate whole nodes by commas: the same as by @."""
    of = lab((node(0, slots=2), node(1, slots=2), node(2, slots=1)))
    assert choose(of, include="worker-0,worker-2") == choose(of, include="worker-0@worker-2")
    assert choose(of, exclude="worker-0,worker-2") == choose(of, exclude="worker-0@worker-2")


def test_slots_by_number_go_to_deepspeed_in_its_own_words() -> None:
    """Include slots by number: DeepSpeed gets --include, the hostfile all slots of the node."""
    of = lab((node(0, slots=2), node(1, slots=4)))
    chosen = choose(of, include="worker-1:1,3")
    built = jobs.build(of, workload(), "r1", chosen, 60)
    assert built.argv[built.argv.index("--include") + 1] == "worker-1:1,3"
    assert files(built)["hostfile"] == "worker-1 slots=4\n"
    assert sum(node.slots for node in built.nodes) == 2


def test_deepspeeds_configuration_is_completed_for_the_ranks_and_handed_to_the_script() -> None:
    """Build with a DeepSpeed configuration: train_batch_size is added, the script gets the option with its path."""
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    of = job(lab((node(0, slots=2), node(1, slots=2))), deepspeed=config)
    assert json.loads(files(of)["ds_config.json"])["train_batch_size"] == 24
    assert of.workload.arguments[-2:] == ("--deepspeed_config", f"{of.directory}/ds_config.json")
    of = job(deepspeed=config, deepspeed_option="deepspeed")
    assert of.workload.arguments[-2:] == ("--deepspeed", f"{of.directory}/ds_config.json")


@pytest.mark.parametrize(
    ("accelerator", "has", "declared", "enabled"),
    [
        ("cpu", False, "auto", False),
        ("cpu", True, "auto", True),
        ("nvidia", False, "auto", True),
        ("cpu", False, True, True),
        ("cpu", True, False, False),
    ],
)
def test_bf16_is_decided_by_the_processors_of_all_hosts_unless_it_is_set(
    accelerator: str, has: bool, declared: object, enabled: bool
) -> None:
    """Build with bf16 "auto": true if all processors have it or on nvidia; true and false stay."""
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": declared}}
    of = job(lab(accelerator=accelerator, hosts=(host(), host(name="b", bf16=has))), deepspeed=config)
    assert json.loads(files(of)["ds_config.json"])["bf16"] == {"enabled": enabled}
    assert of.workload.deepspeed == {**config, "bf16": {"enabled": enabled}}


def test_horovod_starts_as_the_accelerators_own_can_unless_a_way_is_named() -> None:
    """Build with horovod: on intel it becomes horovod:mpi; a named way and mpirun stay."""
    names = {
        accelerator: [
            job(replace(lab(2), accelerator=accelerator), launcher=launcher).workload.launcher
            for launcher in ("horovod", "horovod:gloo", "mpirun")
        ]
        for accelerator in ("cpu", "intel")
    }
    assert names == {
        "cpu": ["horovod", "horovod:gloo", "mpirun"],
        "intel": ["horovod:mpi", "horovod:gloo", "mpirun"],
    }


def test_the_run_id_is_on_every_process() -> None:
    """Build a job: LABCTL_RUN_ID is in its environment and in .deepspeed_env."""
    of = job()
    assert of.environment == (("LABCTL_RUN_ID", of.run_id),)
    assert files(of)[".deepspeed_env"] == f"LABCTL_RUN_ID={of.run_id}\n"


@pytest.mark.parametrize(
    ("cores", "cpusets", "slots", "crowded"),
    [
        (2, ((0,), (1,)), 1, False),
        (2, ((0,), (1,)), 2, True),
        (2, ((), (), (), ()), 1, True),
        (8, ((),), 8, False),
        (8, ((),), 9, True),
    ],
)
def test_ranks_that_share_cores_yield_to_each_other(
    cores: int, cpusets: tuple[tuple[int, ...], ...], slots: int, crowded: bool
) -> None:
    """Build for slots and cores: mpi_yield_when_idle is set only where ranks share cores."""
    nodes = tuple(node(number, slots=slots, cpuset=cpuset) for number, cpuset in enumerate(cpusets))
    of = job(lab(nodes, hosts=(host(cpus=tuple(range(cores))),)), launcher="mpirun")
    assert ("mpi_yield_when_idle" in of.argv) == crowded


# --- the script of a rank ------------------------------------------------------------------------------------


PROGRAM = Path(__file__).parents[3] / "docker/rank_output.py"


class Ranks:
    """Runs of rank.sh with a ``python`` that records its arguments and environment."""

    def __init__(self, root: Path) -> None:
        """Create a project with a workload, and a `python` and `uname` on PATH that record or answer."""
        self.root = root
        self.project = root / "it's a project"
        self.run_id = "r1"
        (self.project / "workloads/hello").mkdir(parents=True)
        self.make(self.run_id)
        bin_ = root / "bin"
        bin_.mkdir()
        (bin_ / "python").write_text(
            '#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN/argv"\npwd > "$SEEN/cwd"\nenv -0 > "$SEEN/env"\n'
            'echo "said by the workload"; echo "complaint" >&2\nexit "${FAKE_CODE:-0}"\n'
        )
        (bin_ / "python").chmod(0o755)
        (bin_ / "uname").write_text("#!/bin/bash\necho worker-1\n")
        (bin_ / "uname").chmod(0o755)
        self.environment = {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "SEEN": str(root),
            "HOSTNAME": "launcher",
            "HOME": str(root),
            "RANK": "3",
            "WORLD_SIZE": "4",
        }

    def make(self, run_id: str) -> None:
        """Create a run's folders and copy rank_output.py into it."""
        for path in (self.project / "outputs" / run_id / name for name in ("ranks", "work")):
            if not path.exists():
                path.mkdir(parents=True)
        shutil.copy(PROGRAM, self.project / "outputs" / run_id)

    def run(
        self,
        *arguments: str,
        environment: Pairs = (),
        given: dict[str, str] | None = None,
        prepare: str = "",
        run_id: str = "",
        **workload: Any,
    ) -> tuple[int, str]:
        """Run the rank.sh of a job once; return its exit code and output without the marks."""
        of = job(
            lab(project_path=str(self.project)),
            run_id=run_id or self.run_id,
            arguments=arguments,
            environment=environment,
            prepare=prepare,
            **workload,
        )
        self.make(of.run_id)
        # Ranks that start together have a file each: bash reads it while it runs.
        script = self.root / f"rank-{threading.get_ident()}.sh"
        script.write_text(files(of)["rank.sh"], encoding="utf-8")
        done = subprocess.run(
            ["bash", str(script)],
            env=self.environment | (given or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=self.root,
            timeout=60,
        )
        lines = [line_of(line, 0) for line in done.stdout.splitlines()]
        assert all(line.rank is not None and line.text == line.said for line in lines)
        return done.returncode, "".join(f"{line.text}\n" for line in lines)

    def script(self, program: str) -> str:
        """Write rank.sh, with this code as its ``python``; return the script's path."""
        (self.root / "bin/python").write_text(f"#!/bin/sh\n{program}\n")
        self.make(self.run_id)
        path = self.root / "rank.sh"
        path.write_text(files(job(lab(project_path=str(self.project)), run_id=self.run_id))["rank.sh"])
        return str(path)

    def recorded(self, name: str) -> list[str]:
        """Return the NUL-separated words of the recorded file."""
        return (self.root / name).read_text(encoding="utf-8").split("\0")[:-1]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Return Ranks at tmp_path."""
    return Ranks(tmp_path)


def test_open_mpi_reads_whole_lines_with_room_for_its_marks(ranks: Ranks) -> None:
    """Print lines of many lengths: each read of stderr ends at a line end, at most 128 lines, and none is lost."""
    short = "".join(f"{number}\n" * (number % 3) + "\n" * (number % 5) for number in range(3000))
    printed = short + "".join("x" * size + "\n" for size in (4091, 4092, 4093, 4094, 9000, 100_000))
    script = ranks.script(f"cat <<'END'\n{printed}\nEND")
    environment = {**ranks.environment, "OMPI_COMM_WORLD_RANK": "3"}
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash", script], env=environment, stdout=pipe, stderr=pipe, cwd=ranks.root) as child:
        assert child.stderr
        pieces = [*iter(functools.partial(os.read, child.stderr.fileno(), 4096), b"")]
    assert all(piece.endswith(b"\n") and piece.count(b"\n") <= 128 for piece in pieces)
    with os.fdopen(os.memfd_create("printed"), "wb+") as output:
        output.write(b"".join(pieces))
        output.seek(0)
        lines: list[bytes] = []
        labnode.read_output(output, lines.append, labnode.RunState())
    text = b"".join(lines).replace(b"\x013\x02", b"").decode()
    assert text.split("\n", 1)[1] == f"{printed}\n"


@pytest.mark.parametrize("end", ["\\n", ""])
def test_a_line_that_is_too_long_for_launchers_is_cut_and_said_to_be_and_the_log_has_it_whole(
    ranks: Ranks, end: str
) -> None:
    """Print a line of 700,000 bytes: cut to 120,000 with a remark on stdout, whole in the rank's log."""
    program = f"head -c 700000 /dev/zero | tr '\\0' x; printf '{end}'; printf 'step 2\\n'; exit 9"
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash", ranks.script(program)], env=ranks.environment, stdout=pipe, text=True) as child:
        assert child.stdout
        lines = [line_of(line, 0) for line in child.stdout.read().splitlines()]
    words, said = ("", ["step 2"]) if end else ("step 2", [])
    assert [line.text for line in lines] == [
        "labctl: rank 3 of 4 on worker-1",
        "x" * 120_000,
        f"labctl: rank 3 printed a line of {700_000 + len(words):,} bytes, cut to 120,000 here; rank-3.log has all",
        *said,
        "labctl: rank 3 on worker-1 exited with code 9",
    ]
    assert all(line.rank == 3 for line in lines)
    logged = (ranks.project / "outputs/r1/ranks/rank-3.log").read_text().splitlines()
    assert logged == [lines[0].text, "x" * 700_000 + words, *(line.text for line in lines[2:])]


def test_a_bar_that_is_drawn_over_and_over_is_seen_before_its_end(ranks: Ranks) -> None:
    """Print a bar with carriage returns: each state is marked with the rank and arrives before the line ends."""
    os.mkfifo(ranks.root / "go")
    script = ranks.script(rf"read -r _ < {ranks.root}/go; printf '\r 1%%|a\r 2%%|b'")
    command = ["bash", script]
    with subprocess.Popen(command, env=ranks.environment, bufsize=0, stdout=subprocess.PIPE, cwd=ranks.root) as child:
        assert child.stdout
        child.stdout.readline()
        (ranks.root / "go").write_text("go\n")
        printed = child.stdout.read()
    assert printed.split(b"\n") == [b"\x013\x02\r 1%|a", b"\x013\x02\r 2%|b", b""]


def test_dots_without_a_newline_are_seen_before_the_line_ends(ranks: Ranks) -> None:
    """Print dots, wait until they are seen, then end the line: they arrive in two lines; the log has the one."""
    os.mkfifo(ranks.root / "go")
    script = ranks.script(f"printf ...; read -r _ < {ranks.root}/go; printf '.. 5 passed\\nnext\\n'")
    program = ranks.project / "outputs/r1/rank_output.py"
    program.write_text(re.sub("^WORDLESS = .*", "WORDLESS = 0.1", program.read_text(), flags=re.MULTILINE))
    command = ["bash", script]
    with subprocess.Popen(command, env=ranks.environment, bufsize=0, stdout=subprocess.PIPE, cwd=ranks.root) as child:
        assert child.stdout
        child.stdout.readline()
        dots = child.stdout.readline()
        (ranks.root / "go").write_text("go\n")
        printed = child.stdout.read()
    assert (dots, printed) == (b"\x013\x02...\n", b"\x013\x02.. 5 passed\n\x013\x02next\n")
    assert (ranks.project / "outputs/r1/ranks/rank-3.log").read_text().endswith("\n..... 5 passed\nnext\n")


def test_arguments_reach_the_script_unchanged(ranks: Ranks) -> None:
    """Run with odd arguments: the script gets them unchanged, and none is executed by the shell."""
    assert ranks.run(*ARGUMENTS)[0] == 0
    assert ranks.recorded("argv") == ["-u", "hello.py", *ARGUMENTS]
    assert (ranks.root / "cwd").read_text() == f"{ranks.project}/outputs/r1/work\n"
    assert not list(ranks.root.rglob("x"))


def test_ranks_start_where_the_project_says(ranks: Ranks) -> None:
    """Run a project that starts in src: working directory, script and LABCTL_PROJECT."""
    project = Project(root=Path("/home/me/my repo"), start="src")
    assert ranks.run(*ARGUMENTS, project=project, script="../a b.py")[0] == 0
    work = f"{ranks.project}/outputs/r1/work/my repo"
    assert (ranks.root / "cwd").read_text() == f"{work}/src\n"
    assert ranks.recorded("argv") == ["-u", "../a b.py", *ARGUMENTS]
    assert f"LABCTL_PROJECT={work}" in ranks.recorded("env")


def test_a_module_finds_the_projects_root_first(ranks: Ranks) -> None:
    """Run a module of a project: `-m`, and the project's root first in PYTHONPATH."""
    project = Project(root=Path("/home/me/mine"), start="src")
    assert ranks.run(*ARGUMENTS, project=project, script="", module="pkg.train")[0] == 0
    assert ranks.recorded("argv") == ["-u", "-m", "pkg.train", *ARGUMENTS]
    root = f"{ranks.project}/outputs/r1/work/mine"
    assert f"PYTHONPATH={root}:{ranks.project}/workloads/common" in ranks.recorded("env")


def test_a_command_gets_its_words_unchanged(ranks: Ranks) -> None:
    """Run a command: its words and then the arguments, unchanged."""
    assert ranks.run("last", script="", command=("python", *ARGUMENTS))[0] == 0
    assert ranks.recorded("argv") == [*ARGUMENTS, "last"]


def test_a_program_of_a_node_finds_its_node_and_no_rank(ranks: Ranks) -> None:
    """Run a program per node: torchrun's variables of the node are set, none of a rank."""
    del ranks.environment["RANK"], ranks.environment["WORLD_SIZE"]
    _, output = ranks.run(launcher="pdsh", given={"LABCTL_NODE_RANK": "1"})
    environment = dict(line.split("=", 1) for line in ranks.recorded("env"))
    of_node = {
        "NODE_RANK": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": "worker-0",
        "MASTER_PORT": "29500",
    }
    expected = of_node | {f"PET_{name}": value for name, value in of_node.items()}
    assert {name: environment.get(name) for name in expected} == expected
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & environment.keys()
    assert output.splitlines()[0] == "labctl: rank 1 of 2 on worker-1"


def test_a_project_is_installed_once_on_each_node(ranks: Ranks) -> None:
    """Run two ranks of a project with install: pip installs it once, before both."""
    project = Project(root=Path("/home/me/mine"), install=True)
    (ranks.root / "bin/python").write_text('#!/bin/bash\necho "$*" >> "$SEEN/calls"\n')
    for _ in range(2):
        assert ranks.run(project=project)[0] == 0
    calls = (ranks.root / "calls").read_text().splitlines()
    root = f"{ranks.project}/outputs/r1/work/mine"
    install = (
        "-m pip install --quiet --no-index --no-deps --no-build-isolation --use-pep517 "
        "--prefix /tmp/labctl-site-r1 --editable"
    )
    assert calls == [f"{install} {root}", "-u hello.py", "-u hello.py"]


def test_a_build_backend_that_the_image_lacks_is_named(ranks: Ranks) -> None:
    """Fail the installation for a missing build backend: exit code 1, the output names it and LAB_PACKAGES."""
    project = Project(root=Path("/home/me/mine"), install=True)
    error = "pip._vendor.pyproject_hooks._impl.BackendUnavailable: Cannot import 'pdm.backend'"
    (ranks.root / "bin/python").write_text(f'#!/bin/bash\necho "{error}" >&2\nexit 1\n')
    code, output = ranks.run(project=project)
    assert code == 1
    assert output.splitlines()[-2] == (
        "labctl: the project's package was not installed: `pdm` is missing; "
        "add to LAB_PACKAGES what its pyproject.toml requires to build it"
    )


def test_environment_reaches_the_script_unchanged(ranks: Ranks) -> None:
    """Run with odd values in the environment: the script gets them unchanged."""
    ranks.run(environment=tuple((f"V{index}", value) for index, value in enumerate(ODD)))
    environment = dict(line.split("=", 1) for line in ranks.recorded("env"))
    assert [environment[f"V{index}"] for index in range(len(ODD))] == ODD


@pytest.mark.parametrize(("given", "before"), [("", ""), ("/mine:/image", "/mine:/image:")])
def test_the_workloads_common_modules_are_last_on_pythons_path(ranks: Ranks, given: str, before: str) -> None:
    """Run with and without PYTHONPATH: workloads/common is its last entry."""
    ranks.run(environment=(("PYTHONPATH", given),))
    assert f"PYTHONPATH={before}{ranks.project}/workloads/common" in ranks.recorded("env")
    ranks.run(given={"PYTHONPATH": given})
    assert f"PYTHONPATH={before}{ranks.project}/workloads/common" in ranks.recorded("env")


def test_a_rank_reports_in_and_keeps_what_it_says(ranks: Ranks) -> None:
    """Run a rank: its report, stdout and stderr are printed and kept in its log."""
    _, output = ranks.run()
    lines = ["labctl: rank 3 of 4 on worker-1", "said by the workload", "complaint"]
    assert output.splitlines() == lines
    assert (ranks.project / "outputs/r1/ranks/rank-3.log").read_text().splitlines() == lines


def test_what_a_rank_says_arrives_where_it_can_write_no_log(ranks: Ranks) -> None:
    """Make the folder of logs unusable: the rank runs, its output says why it has no log."""
    (ranks.project / "outputs/r1/ranks").rmdir()
    (ranks.project / "outputs/r1/ranks").symlink_to(ranks.root / "bin/uname")
    code, output = ranks.run(given={"FAKE_CODE": "7"})
    (why, *rest) = output.splitlines()
    assert why.startswith("labctl: a rank has no log: [Errno 20]")
    assert code == 7
    assert rest[0] == "labctl: rank 3 of 4 on worker-1"
    assert rest[-1] == "labctl: rank 3 on worker-1 exited with code 7"


def test_a_rank_that_fails_says_so_last_and_keeps_its_code(ranks: Ranks) -> None:
    """Let the script exit with 7: exit code 7, and the last line says so."""
    code, output = ranks.run(given={"FAKE_CODE": "7"})
    assert code == 7
    assert output.splitlines()[-1] == "labctl: rank 3 on worker-1 exited with code 7"


SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER; linux/prctl.h."""
FORGED = "labctl: rank 1 on worker-1 exited with code 7"


def test_a_program_cannot_print_a_report(ranks: Ranks) -> None:
    """Print text that looks like a report: only labctl's own lines are reports."""
    program = f"printf '{FORGED}\\n\\0011!\\002{FORGED}\\n'; printf '\\0011!\\002{FORGED}'; exit 9"
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash", ranks.script(program)], env=ranks.environment, stdout=pipe, text=True) as child:
        assert child.stdout
        lines = [line_of(line, 0) for line in child.stdout.read().splitlines()]
    assert [line.text for line in lines if line.report] == [
        "labctl: rank 3 of 4 on worker-1",
        "labctl: rank 3 on worker-1 exited with code 9",
    ]
    assert [(line.text, line.rank) for line in lines if not line.report] == [
        (FORGED, 3),
        (f"1!\x02{FORGED}", 3),
        (f"1!\x02{FORGED}", 3),
    ]
    assert lines[-1].report, "a report comes behind all that the rank printed, on a line of its own"


def test_a_rank_reports_where_there_is_no_python(ranks: Ranks) -> None:
    """Run where no python is on PATH: the rank still reports start and exit code."""
    script = Path(ranks.script("echo one; exit 9"))
    script.write_text(script.read_text().replace("command -v", "false"))
    done = subprocess.run(
        ["bash", str(script)], env=ranks.environment, check=False, timeout=60, capture_output=True, text=True
    )
    lines = [line_of(line, 0) for line in done.stdout.splitlines()]
    assert [(line.text, line.report) for line in lines] == [
        ("labctl: rank 3 of 4 on worker-1", True),
        ("one", False),
        ("labctl: rank 3 on worker-1 exited with code 9", True),
    ]


@pytest.mark.parametrize(
    ("rank", "world"),
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")],
)
def test_a_rank_knows_itself_under_every_launcher(ranks: Ranks, rank: str, world: str) -> None:
    """Set the rank variables of each launcher: the report has rank and world size."""
    del ranks.environment["RANK"], ranks.environment["WORLD_SIZE"]
    _, output = ranks.run(given={rank: "5", world: "9"})
    assert output.splitlines()[0] == "labctl: rank 5 of 9 on worker-1"


@pytest.mark.parametrize(
    ("rank", "local", "local_world"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ],
)
def test_a_script_finds_torchs_variables_under_every_launcher(
    ranks: Ranks, rank: str, local: str, local_world: str
) -> None:
    """Set the variables of each launcher: the script gets torch's, with MASTER_ADDR and MASTER_PORT."""
    del ranks.environment["RANK"], ranks.environment["WORLD_SIZE"]
    ranks.run(given={rank: "5", local: "1", local_world: "2", "WORLD_SIZE": "9"})
    environment = dict(line.split("=", 1) for line in ranks.recorded("env"))
    expected = {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "worker-0", "MASTER_PORT": "29500"}
    assert {key: environment[key] for key in (*expected, *meeting)} == expected | meeting


def test_deepspeeds_local_rank_goes_to_the_script_before_its_arguments(ranks: Ranks) -> None:
    """Run with local_rank: --local_rank=5 stands before the script's arguments."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", local_rank=True, arguments=("--lr", "3"))
    script = ranks.root / "rank.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    environment = {**ranks.environment, "LOCAL_RANK": "5"}
    subprocess.run(["bash", str(script)], env=environment, check=True, timeout=60, capture_output=True)
    assert ranks.recorded("argv") == ["-u", "hello.py", "--local_rank=5", "--lr", "3"]


@contextmanager
def hub(*, answers: bool) -> Iterator[dict[str, str]]:
    """Bind a port on loopback, listening if ``answers``; yield HF_ENDPOINT with it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}/hub"}


LOADS = "AutoModel.from_pretrained('gpt2')"
NOT_REACHED = "labctl: 127.0.0.1 is not reached from worker-1 within 3 s"


@pytest.mark.parametrize(
    ("code", "answers", "given", "offline"),
    [
        (LOADS, False, {}, "1"),
        (LOADS, True, {}, None),
        (LOADS, False, {"HF_HUB_OFFLINE": "0"}, "0"),
        (LOADS, False, {"HTTP_PROXY": "http://proxy:3128"}, None),
        (LOADS, False, {"all_proxy": "socks5://proxy:1080"}, None),
        (LOADS, False, {"HTTPS_PROXY": "http://proxy:3128"}, "1"),
        ("os.environ['HF_HUB_OFFLINE'] = '0'; load_dataset('x')", False, {}, None),
        ("print('no hub')", False, {}, None),
        ("# without the from_pretrained function of huggingface_hub", False, {}, None),
    ],
)
def test_a_rank_does_not_try_for_a_hub_that_is_not_reached(
    ranks: Ranks, code: str, answers: bool, given: dict[str, str], offline: str | None
) -> None:
    """Load from the hub: HF_HUB_OFFLINE=1 and a remark only if it is not reached and nothing else decides."""
    (ranks.project / "outputs/r1/work/hello.py").write_text(code)
    with hub(answers=answers) as named:
        output = ranks.run(given=named | given)[1]
    environment = dict(line.split("=", 1) for line in ranks.recorded("env"))
    assert environment.get("HF_HUB_OFFLINE") == offline
    assert (NOT_REACHED in output) == (offline == "1")


def test_whether_the_hub_is_reached_is_decided_once_for_a_node(ranks: Ranks) -> None:
    """Run again after the hub has come back: still offline in this run, not in another."""
    (ranks.project / "outputs/r1/work/hello.py").write_text(LOADS)
    with hub(answers=False) as named:
        assert NOT_REACHED in ranks.run(given=named)[1]
    with hub(answers=True) as named:
        assert NOT_REACHED not in ranks.run(given=named)[1]
        assert "HF_HUB_OFFLINE=1" in ranks.recorded("env")
        ranks.make("r2")
        (ranks.project / "outputs/r2/work/hello.py").write_text(LOADS)
        ranks.run(given=named, run_id="r2")
    assert "HF_HUB_OFFLINE=1" not in ranks.recorded("env")


@pytest.mark.parametrize(("free", "warned"), [(5000, True), (60000, False)])
def test_a_rank_tells_that_the_shared_memory_of_its_node_is_nearly_full(ranks: Ranks, free: int, warned: bool) -> None:
    """Begin with 5 of 64 MB free in /dev/shm: a remark before the script; none with 60."""
    df = ranks.root / "bin/df"
    df.write_text(f"#!/bin/sh\necho Filesystem 1024-blocks Used Available\necho shm 65536 0 {free} 1% /dev/shm\n")
    df.chmod(0o755)
    remark = "labctl: worker-1 has 4 of 64 MiB free in /dev/shm; ranks die of SIGBUS when it is full"
    assert (remark in ranks.run()[1]) == warned


@pytest.mark.parametrize(("name", "missed"), [("train.py", True), ("workloads/opt/model.py", False)])
def test_code_that_decides_by_itself_decides_for_its_own_folder(ranks: Ranks, name: str, missed: bool) -> None:
    """Set HF_HUB_OFFLINE in one folder's code: the check is left out for that folder only."""
    work = ranks.project / "outputs/r1/work"
    (work / "workloads/opt").mkdir(parents=True)
    (work / "workloads/opt/train.py").write_text("os.environ['HF_HUB_OFFLINE'] = '1'")
    (work / name).write_text(LOADS)
    with hub(answers=False) as named:
        assert (NOT_REACHED in ranks.run(given=named)[1]) == missed


def test_code_of_a_clone_on_the_path_asks_the_hub_too(ranks: Ranks) -> None:
    """Load from the hub in a clone on PYTHONPATH: the check is made."""
    clone = ranks.root / "a clone/lib"
    clone.mkdir(parents=True)
    (clone / "model.py").write_text(LOADS)
    with hub(answers=False) as named:
        assert NOT_REACHED in ranks.run(given={**named, "PYTHONPATH": f"/gone:{clone.parent}"})[1]


def test_a_line_with_nul_bytes_comes_whole_and_at_once(ranks: Ranks) -> None:
    """Print NUL bytes and a line without end: NULs are dropped, and lines arrive at once."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", script="says")
    says = ranks.project / "outputs/r1/work/says"
    says.write_text("#!/bin/bash\nprintf 'loss:\\0 1.5\\n'; printf 'no end'; read -r -t 60 < \"$GO\"\n")
    says.chmod(0o755)
    script, go = ranks.root / "rank.sh", ranks.root / "go"
    os.mkfifo(go)
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    environment = {**ranks.environment, "GO": str(go)}
    with subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.PIPE) as started:
        assert started.stdout
        assert [started.stdout.readline() for _ in range(2)] == [
            b"\x013!\x02labctl: rank 3 of 4 on worker-1\n",
            b"\x013\x02loss: 1.5\n",
        ]
        go.write_text("\n")
        assert started.stdout.read() == b"\x013\x02no end\n"


def test_lines_that_come_at_once_are_marked_each_and_none_is_lost(
    ranks: Ranks,
) -> None:
    """Print 20,000 lines at once: each is marked, none lost, and the log has the same bytes."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", script="says")
    says = ranks.project / "outputs/r1/work/says"
    lines = [b"%d %b" % (number, b"x" * (number % 200)) for number in range(20_000)]
    (ranks.root / "lines").write_bytes(b"\n".join((*lines, b"y" * 110_000, b"\xff\r bar\r bar", b"")))
    says.write_text(f"#!/bin/bash\ncat {ranks.root / 'lines'}\n")
    says.chmod(0o755)
    script = ranks.root / "rank.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    done = subprocess.run(["bash", str(script)], env=ranks.environment, check=False, timeout=60, capture_output=True)
    _, *marked = done.stdout.split(b"\n")[:-1]
    assert [line.removeprefix(b"\x013\x02") for line in marked] == [*lines, b"y" * 110_000, b"\xff\r bar\r bar"]
    assert all(line.startswith(b"\x013\x02") for line in marked)
    log = ranks.project / "outputs/r1/ranks/rank-3.log"
    assert log.read_bytes().split(b"\n", 1)[1] == (ranks.root / "lines").read_bytes()


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("leaves", ["sleep 600 &", "setsid sleep 600 &", "setsid sleep 600 > /dev/null &"])
def test_what_a_rank_started_and_left_does_not_keep_the_run_from_ending(ranks: Ranks, code: int, leaves: str) -> None:
    """Leave a background process: the rank ends with its code, and the output names what was ended."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", script="says")
    says = ranks.project / "outputs/r1/work/says"
    says.write_text(f"#!/bin/bash\n{leaves}\nexit {code}\n")
    says.chmod(0o755)
    script = ranks.root / "rank.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    # Who reads the output waits for the last who has it open.
    done = subprocess.run(
        ["bash", str(script)], env=ranks.environment, check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == code
    assert "rank 3 on worker-1 has ended; what it started and left is ended too: sleep 600\n" in done.stdout


@pytest.mark.parametrize(("program", "leaves"), [("exit 0", False), ("setsid sleep 600 > /dev/null 2>&1 &", True)])
def test_a_rank_says_if_it_left_processes_that_have_its_output_no_more(
    ranks: Ranks, program: str, leaves: bool
) -> None:
    """Leave a process that has closed its output: the rank says that it left processes behind."""
    script = Path(ranks.script(f"{program}\necho $! > {ranks.root}/left"))
    # In place of the node's own, a parent that is this test's: orphans of other programs are none of it.
    orphanage = f"import ctypes, os, subprocess, sys; ctypes.CDLL(None).prctl({SUBREAPER}, 1); "
    orphanage += "os.environ['INIT'] = str(os.getpid()); sys.exit(subprocess.call(sys.argv[1:]))"
    text = script.read_text().replace("/opt/lab/labnode.py", str(PROGRAM)).replace("[1]} != 1 ", "[1]} != $INIT ")
    script.write_text(text)
    command = [sys.executable, "-c", orphanage, "bash", "-c", f"bash {script}; exit"]
    done = subprocess.run(command, env=ranks.environment, check=True, timeout=60, capture_output=True, text=True)
    try:
        assert ("labctl: rank 3 on worker-1 left processes behind\n" in done.stdout) == leaves
    finally:
        if leaves:
            os.kill(int((ranks.root / "left").read_text()), signal.SIGKILL)


class TestPreparing:
    """Preparation by one rank of each node before the others start."""

    @pytest.fixture
    def prepared(self, ranks: Ranks) -> Ranks:
        """Write prepare.sh, which exits with PREPARE_CODE, to the workload; return the ranks."""
        script = ranks.project / "workloads/hello/prepare.sh"
        script.write_text('#!/bin/bash\necho preparing; exit "${PREPARE_CODE:-0}"\n')
        script.chmod(0o755)
        return ranks

    def test_the_first_rank_of_a_node_does_it_and_the_next_does_not(self, prepared: Ranks) -> None:
        """Run two ranks of a node: only the first prepares."""
        assert "preparing" in prepared.run(prepare="prepare.sh")[1]
        assert "preparing" not in prepared.run(prepare="prepare.sh")[1]

    def test_every_run_does_it_once(self, prepared: Ranks) -> None:
        """Run two runs: each prepares once."""
        assert "preparing" in prepared.run(prepare="prepare.sh")[1]
        assert "preparing" in prepared.run(prepare="prepare.sh", run_id="r2")[1]

    def test_it_is_the_workloads_own_also_where_the_script_is_another(self, prepared: Ranks) -> None:
        """Run another script with prepare.sh: the workload's own is run, in the run's work folder."""
        elsewhere = Copy(path="work/hello.py", root=Path("/elsewhere"), name="hello.py")
        of = jobs.build(
            lab(project_path=str(prepared.project)),
            workload(prepare="prepare.sh"),
            "r1",
            choose(lab()),
            60,
            code=(elsewhere,),
        )
        script = prepared.root / "rank.sh"
        script.write_text(files(of)["rank.sh"], encoding="utf-8")
        done = subprocess.run(
            ["bash", str(script)], env=prepared.environment, check=True, capture_output=True, text=True, timeout=60
        )
        assert "preparing" in done.stdout
        assert (prepared.root / "cwd").read_text() == f"{prepared.project}/outputs/r1/work\n"

    def test_it_runs_where_the_ranks_do_if_that_is_a_copy_of_the_workload(self, prepared: Ranks) -> None:
        """Copy the workload into the run: the copy's prepare.sh is run."""
        shutil.copy(prepared.project / "workloads/hello/prepare.sh", prepared.project / "outputs/r1/work")
        (prepared.project / "outputs/r1/work/prepare.sh").write_text("#!/bin/bash\necho prepares the copy\n")
        given = workload(prepare="prepare.sh")
        copied = Copy(path="work/prepare.sh", root=given.directory, name="prepare.sh")
        of = jobs.build(lab(project_path=str(prepared.project)), given, "r1", choose(lab()), 60, code=(copied,))
        script = prepared.root / "rank.sh"
        script.write_text(files(of)["rank.sh"], encoding="utf-8")
        done = subprocess.run(
            ["bash", str(script)], env=prepared.environment, check=True, capture_output=True, text=True, timeout=60
        )
        assert "prepares the copy" in done.stdout

    def test_where_it_fails_the_rank_fails_and_the_next_tries_again(self, prepared: Ranks) -> None:
        """Fail the preparation: the rank fails with its code without starting, and the next rank prepares again."""
        code, output = prepared.run(prepare="prepare.sh", given={"PREPARE_CODE": "6"})
        assert code == 6
        assert "said by the workload" not in output
        assert "preparing" in prepared.run(prepare="prepare.sh")[1]

    def test_the_lock_of_a_compilation_that_was_killed_is_removed(self, ranks: Ranks) -> None:
        """Leave a lock of torch_extensions: it is removed before the rank starts."""
        lock = ranks.root / ".cache/torch_extensions/py311_cpu/cpu_adam/lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        assert ranks.run()[0] == 0
        assert not lock.exists()

    def test_ranks_that_start_together_wait_for_it(self, prepared: Ranks) -> None:
        """Start three ranks at once: prepare.sh never runs twice at a time, and all exit with 0."""
        slow = prepared.project / "workloads/hello/prepare.sh"
        slow.write_text('#!/bin/bash\nmkdir "$SEEN/busy" || echo "two at once"; sleep 0.3; rmdir "$SEEN/busy"\n')
        with ThreadPoolExecutor(3) as pool:
            outputs = list(pool.map(lambda _: prepared.run(prepare="prepare.sh"), range(3)))
        assert [code for code, _ in outputs] == [0, 0, 0]
        assert not [text for _, text in outputs if "two at once" in text]


def test_a_script_that_starts_its_ranks_itself_gets_the_hostfile_and_the_runs_directory(ranks: Ranks) -> None:
    """Run with launcher script: arguments, LABCTL_HOSTFILE, LABCTL_RUN_DIR and PYTHONPATH reach the script."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", launcher="script", arguments=ARGUMENTS)
    assert of.argv == (f"{ranks.project}/outputs/r1/rank.sh",)
    script = ranks.root / "start.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    subprocess.run(["bash", str(script)], env=ranks.environment, check=True, timeout=60, capture_output=True)
    environment = dict(line.split("=", 1) for line in ranks.recorded("env"))
    assert ranks.recorded("argv") == ["-u", "hello.py", *ARGUMENTS]
    assert environment["LABCTL_HOSTFILE"] == f"{ranks.project}/outputs/r1/hostfile"
    assert environment["PYTHONPATH"] == f"{ranks.project}/workloads/common"
    assert (environment["LABCTL_RUN_DIR"], environment["LABCTL_RUN_ID"]) == (f"{ranks.project}/outputs/r1", "r1")


def test_a_rank_without_its_folder_fails(ranks: Ranks) -> None:
    """Put a file in place of the work folder: the rank fails, and the script is not run."""
    (ranks.project / "outputs/r1/work").rmdir()
    (ranks.project / "outputs/r1/work").write_text("in its place")
    code, output = ranks.run()
    assert code != 0
    assert "said by the workload" not in output


@pytest.mark.parametrize("leaves", [":", "sleep 600 &", "setsid sleep 600 &"])
def test_what_a_script_that_starts_its_ranks_itself_left_does_not_keep_the_run_from_ending(
    ranks: Ranks, leaves: str
) -> None:
    """Leave a process from a script that starts its ranks: exit code and output, and what was ended."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", launcher="script", script="says")
    says = ranks.project / "outputs/r1/work/says"
    says.write_text(f"#!/bin/bash\necho out; echo err >&2\n{leaves}\nexit 3\n")
    says.chmod(0o755)
    script = ranks.root / "start.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script)], env=ranks.environment, check=False, timeout=60, capture_output=True, text=True
    )
    ended = "labctl: the script has ended; what it started and left is ended too: sleep 600\n"
    assert (done.returncode, done.stdout) == (3, "out\nerr\n" + ("" if leaves == ":" else ended))


def test_a_script_that_starts_its_ranks_itself_answers_its_time_limit(ranks: Ranks) -> None:
    """Send SIGTERM to such a script: its trap runs, and its exit code is kept."""
    of = job(lab(project_path=str(ranks.project)), run_id="r1", launcher="script", script="says")
    says = ranks.project / "outputs/r1/work/says"
    says.write_text("#!/bin/bash\ntrap 'echo cleaned; exit 9' TERM\nsleep 600 &\necho ready\nwait\n")
    says.chmod(0o755)
    script = ranks.root / "start.sh"
    script.write_text(files(of)["rank.sh"], encoding="utf-8")
    with subprocess.Popen(
        ["bash", str(script)], env=ranks.environment, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        assert started.stdout
        # What hands on its output has begun, too.
        assert started.stdout.readline() == b"ready\n"
        os.killpg(started.pid, signal.SIGTERM)
        assert started.stdout.read() == b"cleaned\n"
    assert started.returncode == 9

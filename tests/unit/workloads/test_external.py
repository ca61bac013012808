"""Scripts in the user's clones: discovery, conversion into workloads, and their environment at run time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.builders import read_values

from labctl import launchers
from labctl.config import settings
from labctl.errors import ConfigError, HostError
from labctl.jobs import request
from labctl.model import Workload
from labctl.workloads import external

ROOT = Path(__file__).parents[3]
WORKLOADS = ROOT / "workloads"
FIXTURES = ROOT / "tests/clones"
DSCHAT, HABANA = FIXTURES / "DeepSpeedExamples", FIXTURES / "optimum-habana"
BOTH = {"dschat": DSCHAT, "gaudi": HABANA}
TRAINING = DSCHAT / external.DSCHAT.scripts


def load(name: str, *, rehearse: bool = False, roots: dict[str, Path] = BOTH) -> Workload:
    """Load the workload of this name with these clones."""
    return external.load(WORKLOADS, name, launchers.known(), roots, rehearse=rehearse)


def names(roots: dict[str, Path]) -> list[str]:
    """Return the names of all scripts in these clones; fail on errors."""
    listed = external.list_all(WORKLOADS, launchers.known(), roots)
    assert listed.errors == ()
    return [workload.name for workload in listed.workloads if "/" in workload.name]


# --- names ---------------------------------------------------------------------------------------------------


def test_the_scripts_that_train_are_listed_and_nothing_else_of_a_clone() -> None:
    """List the clones' scripts: exactly those that train; none without clones."""
    assert names({"dschat": DSCHAT}) == [
        *("dschat/run_opt-1.3b_zero0", "dschat/run_opt-13b", "dschat/run_opt-13b_bs16_zero0", "dschat/run_opt-350m"),
        *("dschat/run_opt-350m_bs16", "dschat/run_opt-350m_bs24", "dschat/run_opt-350m_bs24_zero0"),
        *("dschat/run_opt-66b", "dschat/run_that_fails"),
    ]
    assert names({"gaudi": HABANA}) == [
        "gaudi/contrastive-image-text/run_bridgetower",
        "gaudi/language-modeling/run_lora_clm",
    ]
    assert names({}) == []


STEP = "step3_rlhf_finetuning/training_scripts/opt/single_node/run_1.3b.sh"
OF_STEP = """\
ACTOR=$1
CRITIC=$2
OUTPUT=$3
mkdir -p $OUTPUT
deepspeed --num_gpus 1 main.py --actor_model_name_or_path ${ACTOR:-facebook/opt-1.3b} \\
    --data_path Dahoas/rm-static --critic "$CRITIC" --output_dir $OUTPUT &> $OUTPUT/training.log
"""


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Write a clone with a step's script that takes its output, and one that does not; return the clone."""
    root = tmp_path / "clone"
    path = root / external.DSCHAT.scripts / STEP
    path.parent.mkdir(parents=True)
    path.write_text(OF_STEP)
    path.with_name("run_lora.sh").write_text(OF_STEP.replace("OUTPUT=$3", 'OUTPUT="./output"'))
    return root


def test_a_script_of_a_step_is_listed_with_its_step(upstream: Path) -> None:
    """List a clone with a step's scripts: only the one that takes its output."""
    assert names({"dschat": upstream}) == ["dschat/step3_rlhf_finetuning/opt/single_node/run_1.3b"]


def test_a_script_of_a_step_takes_a_persons_arguments_beside_its_output(upstream: Path) -> None:
    """Choose a step's script: its arguments, datasets and devices; HostError on cpu, ConfigError for --set."""
    loaded = settings.load(upstream, {"HOST_REPO_PATH": str(upstream)}, {})
    name = "dschat/step3_rlhf_finetuning/opt/single_node/run_1.3b"
    task = request.choose_workload(ROOT, name, request.RunOptions(words=("actor", "critic")), loaded)
    started = external.at(task, "2xN", "/runs/7")
    assert started.arguments == (STEP, "2xN", "/runs/7/hostfile", "/runs/7", "actor", "critic")
    assert (task.criteria, task.cache.datasets) == ((), ("Dahoas/rm-static",))
    external.require_device(task, "nvidia", {"dschat": upstream})
    with pytest.raises(HostError, match="trains in fp16"):
        external.require_device(task, "cpu", {"dschat": upstream})
    with pytest.raises(ConfigError, match="takes no --set"):
        request.choose_workload(ROOT, name, request.RunOptions(arguments=(("a", "1"),)), loaded)


def test_a_script_that_is_a_link_out_of_the_clone_is_none_of_its_own(tmp_path: Path) -> None:
    """Link a script out of the clone: not listed, and ConfigError when loaded.

    Containers write the clones, and the link's target would be copied into a run.
    """
    (tmp_path / "private.py").write_text("password = 1  # __main__ $2 main.py\n")
    for clone, script in ((external.GAUDI, "x/run_leak.py"), (external.DSCHAT, "x/run_leak.sh")):
        root = tmp_path / clone.family
        link = root / clone.scripts / script
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "private.py")
        assert names({clone.family: root}) == []
        with pytest.raises(ConfigError, match="no script"):
            load(f"{clone.family}/x/run_leak", roots={clone.family: root})


def test_an_unknown_script_names_the_nearest_and_the_folder() -> None:
    """Load a misspelt script: ConfigError with folder and nearest."""
    with pytest.raises(ConfigError, match=f"{TRAINING}: no script `dschat/run_opt-350m_bs42`") as caught:
        load("dschat/run_opt-350m_bs42")
    assert "dschat/run_opt-350m_bs24" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "roots", "message"),
    [
        ("dschat/run_opt-13b", {}, "HOST_REPO_PATH is not set"),
        ("dschat/run_opt-13b", {"dschat": HABANA}, f"HOST_REPO_PATH: {HABANA} is not a clone of DeepSpeedExamples"),
        ("dschat", BOTH, "name a script of"),
        ("dschat/run_batch", BOTH, "take JOB, HOSTFILE and OUTPUT"),
        ("gaudi/language-modeling/run_lora_clm", {}, "HOST_OPTIMUM_HABANA_PATH is not set"),
        ("gaudi/gaudi_spawn", BOTH, "no script"),
        ("bridgetower", {}, "HOST_OPTIMUM_HABANA_PATH is not set"),
    ],
)
def test_what_is_not_there_says_what_to_set_or_to_type(name: str, roots: dict[str, Path], message: str) -> None:
    """Load what is missing or no script: ConfigError says which setting or name."""
    with pytest.raises(ConfigError, match=message):
        load(name, roots=roots)


# --- workloads -----------------------------------------------------------------------------------------------


def test_a_deepspeed_chat_script_is_judged_by_its_throughput() -> None:
    """Load a DeepSpeed-Chat script: start.sh under launcher script, criterion on throughput."""
    task = load("dschat/run_opt-13b_bs16_zero0")
    assert (task.launcher, task.script, task.arguments) == ("script", "start.sh", ("run_opt-13b_bs16_zero0.sh",))
    assert [criterion.metric for criterion in task.criteria] == ["throughput"]
    assert task.description == str(TRAINING / "run_opt-13b_bs16_zero0.sh")


@pytest.mark.parametrize("line", ["Throughput: 290.3027 samples/sec", "ml-512-node-001: Throughput: 290 samples/sec"])
def test_its_throughput_is_read_whole_or_not(line: str) -> None:
    """Read throughput lines by its pattern: the number."""
    values = read_values(load("dschat/run_opt-13b").metrics, [line])
    assert [(name, int(value)) for name, figures in values.items() for value in figures] == [("throughput", 290)]


def test_what_a_script_names_on_the_hub_can_be_fetched_before_it_runs(tmp_path: Path) -> None:
    """Load a script that names models and datasets: its cache lists each once, no output or local path."""
    clone = tmp_path / "clone"
    shutil.copytree(DSCHAT, clone, symlinks=True)
    (clone / external.DSCHAT.scripts / "run_more.sh").write_text(
        "source ./setup_env.sh opt-13b 3 && \\\n"
        "deepspeed --hostfile=$2 main.py --data_path Dahoas/rm-static Dahoas/rm-static \\\n"
        "  yitingxie/rlhf-reward-datasets $MORE --data_split 2,4,4 --actor_model_name_or_path $MODEL_PATH \\\n"
        "  --critic_model_name_or_path $HOME/hub/models--facebook--opt-350m/snapshots/08ab --output_dir out/put\n"
        "# --model_name_or_path nobody/this\n"
        "OUTPUT=./trained\n"
        "deepspeed main.py --data_path local/jsonfile Dahoas/rm-static --model_name_or_path output/critic\n"
        "deepspeed main.py --actor_model_name_or_path trained/actor --critic_model_name_or_path out/critic\n"
    )
    cache = load("dschat/run_more", roots={"dschat": clone}).cache
    assert cache.models == ("facebook/opt-13b", "facebook/opt-350m")
    assert cache.datasets == ("Dahoas/rm-static", "yitingxie/rlhf-reward-datasets")
    assert load("dschat/run_opt-350m_bs16").cache.models == ("facebook/opt-350m",)


def test_it_is_told_a_jobs_name_the_hostfile_and_where_its_log_goes() -> None:
    """Place a script's run: arguments are script, job, hostfile and run folder."""
    task = external.at(load("dschat/run_opt-13b"), "3xN", "/workspace/runs/7")
    assert task.arguments == ("run_opt-13b.sh", "3xN", "/workspace/runs/7/hostfile", "/workspace/runs/7")


@pytest.mark.parametrize(
    "options",
    [
        request.RunOptions(rehearse=True),
        request.RunOptions(arguments=(("max_steps", "5"),)),
        request.RunOptions(arguments=(("deepspeed.zero_optimization.stage", "3"),)),
        request.RunOptions(launcher="mpirun"),
    ],
    ids=["rehearse", "set", "deepspeed", "launcher"],
)
def test_a_script_with_everything_written_in_it_takes_no_changes(options: request.RunOptions, tmp_path: Path) -> None:
    """Choose a script with --rehearse, --set or --launcher: ConfigError."""
    loaded = settings.load(tmp_path, {"HOST_REPO_PATH": str(DSCHAT)}, {})
    with pytest.raises(ConfigError, match=r"^dschat/run_opt-13b "):
        request.choose_workload(ROOT, "dschat/run_opt-13b", options, loaded)


def test_a_gaudi_example_is_started_itself_and_rehearsed_by_a_check() -> None:
    """Load a Gaudi example: its own script; rehearsed, check.py with its path."""
    task = load("gaudi/language-modeling/run_lora_clm")
    assert (task.script, task.arguments) == (str(HABANA / "examples/language-modeling/run_lora_clm.py"), ())
    checked = load("gaudi/language-modeling/run_lora_clm", rehearse=True)
    assert checked.script == "check.py"
    assert checked.arguments == ("optimum-habana/examples/language-modeling/run_lora_clm.py",)


def test_bridgetower_has_its_own_arguments_for_the_clones_script() -> None:
    """Load bridgetower: the clone's script with declared arguments and inputs."""
    task = load("bridgetower")
    assert task.script == str(HABANA / "examples/contrastive-image-text/run_bridgetower.py")
    assert task.arguments[:2] == ("--output_dir", "/tmp/bridgetower-test")  # noqa: S108
    assert dict(task.inputs) == {"model_name_or_path": "model", "dataset_name": "directory"}


@pytest.mark.parametrize(
    ("value", "given"),
    [("", ()), ("8", ("8",)), ("q_proj v_proj", ("q_proj", "v_proj")), ("'a b'", ("a b",))],
    ids=["flag", "value", "list", "blank"],
)
def test_a_gaudi_example_takes_flags_and_lists(value: str, given: tuple[str, ...]) -> None:
    """Split a value of --set: a flag, words, or a quoted word."""
    assert external.words(load("bridgetower"), "key", value) == ("--key", *given)


def test_a_quote_that_is_left_open_is_an_error() -> None:
    """Split an open quote: ConfigError."""
    with pytest.raises(ConfigError, match="--set key='a"):
        external.words(load("bridgetower"), "key", "'a")


def test_only_gaudis_run_gaudi_examples() -> None:
    """Require a device: Gaudi examples only on habana, unless rehearsed."""
    external.require_device(load("bridgetower"), "habana", BOTH)
    external.require_device(load("bridgetower", rehearse=True), "cpu", BOTH)
    assert load("bridgetower", rehearse=True).inputs == ()
    external.require_device(load("dschat/run_opt-13b"), "cpu", BOTH)
    with pytest.raises(HostError, match="needs Gaudis"):
        external.require_device(load("bridgetower"), "cpu", BOTH)


def test_a_clone_that_asks_torch_for_cuda_by_name_runs_on_cuda_alone(tmp_path: Path) -> None:
    """Require a device for a clone that calls torch.cuda: nvidia alone; a comment does not count."""
    clone = tmp_path / "clone"
    shutil.copytree(DSCHAT, clone)
    main = clone / external.DSCHAT.scripts / "step1_supervised_finetuning/main.py"
    main.write_text(f"{main.read_text()}    # torch.cuda.set_device(0)\n")
    task = load("dschat/run_opt-13b")
    external.require_device(task, "intel", {"dschat": clone})
    main.write_text(f"{main.read_text()}    torch.cuda.set_device(args.local_rank)\n")
    external.require_device(task, "nvidia", {"dschat": clone})
    with pytest.raises(HostError, match="needs CUDA"):
        external.require_device(task, "intel", {"dschat": clone})


def test_a_clone_of_another_version_and_an_environment_that_is_not_read_are_remarked() -> None:
    """Ask for remarks: another version of the clone, and a .deepspeed_env that is not read."""
    assert external.remarks(load("gaudi/language-modeling/run_lora_clm"), BOTH) == ()
    (remark,) = external.remarks(load("bridgetower"), BOTH)
    assert "written for optimum-habana 1.9.0" in remark
    assert "is 1.14.1" in remark
    (remark,) = external.remarks(load("dschat/run_opt-13b"), BOTH)
    assert f"{TRAINING / '.deepspeed_env'} is for its authors' machines" in remark


# --- around a script -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Scratch folder with start.sh's files in the launcher, and a `deepspeed` that prints its arguments."""

    root: Path

    @classmethod
    def make(cls, root: Path, *, deepspeed: str = 'echo "called: $*"') -> Stage:
        """Build a stage with the DeepSpeed-Chat clone and a `deepspeed` that runs this shell command."""
        (root / "programs").mkdir()
        (root / "home").mkdir()
        (root / "run").mkdir()
        (root / "run/hostfile").write_text("worker-0 slots=1\n")
        (root / "programs/deepspeed").write_text(f"#!/bin/bash\n{deepspeed}\n")
        (root / "programs/deepspeed").chmod(0o755)
        shutil.copytree(DSCHAT, root / "DeepSpeedExamples", symlinks=True)
        return cls(root)

    def script(self, text: str) -> None:
        """Write mine.sh with this text to the clone."""
        (self.root / "DeepSpeedExamples" / external.DSCHAT.scripts / "mine.sh").write_text(f"#!/bin/bash\n{text}\n")

    def start(self, name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run start.sh of `dschat` on a script; return output and exit code."""
        run = self.root / "run"
        environ = {
            "PATH": f"{self.root / 'programs'}:{os.environ['PATH']}",
            "HOME": str(self.root / "home"),
            "PROJECT_PATH": str(self.root),
            "HF_HOME": str(self.root / "huggingface"),
            "LABCTL_RUN_ID": "7",
            "LABCTL_RUN_DIR": str(run),
            "LABCTL_HOSTFILE": str(run / "hostfile"),
            "MASTER_ADDR": "worker-0",
            "MASTER_PORT": "29500",
            "SSH_PORT": "12345",
            **more,
        }
        command = ["./start.sh", f"{name}.sh", "1xN", str(run / "hostfile"), str(run), *arguments]
        folder = WORKLOADS / "dschat"
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_a_script_finds_the_labs_deepspeed_and_its_own_words_come_last(tmp_path: Path) -> None:
    """Start a script: `deepspeed` gets labctl's arguments before the script's own."""
    done = Stage.make(tmp_path).start("run_opt-13b")
    assert done.returncode == 0, done.stderr
    called = done.stdout.split("called: ")[1]
    assert called.startswith(f"--hostfile {tmp_path}/run/hostfile --force_multi --master_addr worker-0 ")
    assert called.index("--master_port 29500") < called.index("--master_port 12346") < called.index("main.py")


@pytest.mark.parametrize(
    ("arguments", "critic"),
    [((), "--critic  --"), (("mine", "yours"), "--critic yours --"), (("mine",), "--critic  --")],
)
def test_a_script_of_a_step_begins_in_its_folder_and_what_it_keeps_in_a_file_is_said(
    tmp_path: Path, arguments: tuple[str, ...], critic: str
) -> None:
    """Start a step's script: in its step's folder, with output to stdout and its exit code."""
    stage = Stage.make(tmp_path, deepspeed='echo "called: $*"; echo "in $PWD with $PYTHONPATH"; exit 3')
    path = tmp_path / "DeepSpeedExamples" / external.DSCHAT.scripts / STEP
    path.parent.mkdir(parents=True)
    path.write_text(OF_STEP)
    done = stage.start(STEP.removesuffix(".sh"), *arguments)
    assert done.returncode == 3, done.stderr
    called, where = done.stdout.splitlines()
    chat = path.parents[5]
    assert where == f"in {chat}/training/step3_rlhf_finetuning with {chat}"
    assert called.startswith(f"called: --num_nodes 1 --hostfile {tmp_path}/run/hostfile --force_multi ")
    assert f"{critic}output_dir {tmp_path}/run/output" in called
    assert f"--actor_model_name_or_path {arguments[0] if arguments else 'facebook/opt-1.3b'} " in called


def test_its_log_begins_with_the_hostfile(tmp_path: Path) -> None:
    """Start a script: its log begins with the hostfile."""
    Stage.make(tmp_path).start("run_opt-13b")
    log = (tmp_path / "run/opt-13b_3_1xN.log").read_text()
    assert log.startswith("worker-0 slots=1\n\ncalled: ")


def test_a_deepspeed_that_fails_before_the_pipe_fails_the_script(tmp_path: Path) -> None:
    """Fail deepspeed inside a pipe: start.sh has its exit code."""
    assert Stage.make(tmp_path, deepspeed="exit 3").start("run_opt-13b").returncode == 3


def test_the_authors_home_holds_the_labs_deepspeed_too(tmp_path: Path) -> None:
    """Start a script twice that calls ~/.local/bin/deepspeed: it is labctl's both times."""
    stage = Stage.make(tmp_path)
    stage.script('"$HOME/.local/bin/deepspeed" mine; echo "I am $USER"')
    for _ in range(2):
        done = stage.start("mine")
        assert "--ssh_port 12345 mine" in done.stdout
        assert "I am home" in done.stdout


def test_ranks_get_the_run_and_the_caches_and_nothing_of_the_clones_environment(tmp_path: Path) -> None:
    """Read DS_ENV_FILE in a script: the run's variables and caches alone."""
    stage = Stage.make(tmp_path)
    stage.script('cat "$DS_ENV_FILE"')
    lines = stage.start("mine").stdout.splitlines()
    assert {line.split("=")[0] for line in lines} == {
        *("LABCTL_RUN_ID", "LABCTL_RUN_DIR", "TRANSFORMERS_CACHE", "HF_HUB_CACHE")
    }
    assert f"TRANSFORMERS_CACHE={tmp_path}/huggingface/transformers" in lines


def test_a_persons_own_file_of_variables_is_added_to_the_labs_and_takes_none_away(tmp_path: Path) -> None:
    """Start with a DS_ENV_FILE of one's own: its variables are added, the run's stay."""
    stage = Stage.make(tmp_path)
    env = tmp_path / "mine.env"
    env.write_text("# of ours\n\nexport NCCL_DEBUG=WARN\nLABCTL_RUN_ID=8\nA=b=c")
    stage.script('cat "$DS_ENV_FILE"')
    lines = stage.start("mine", DS_ENV_FILE=str(env)).stdout.splitlines()
    # DeepSpeed wants a `=` in each line, and the last line of a name wins.
    assert all("=" in line for line in lines)
    given = dict(line.split("=", 1) for line in lines)
    assert given.items() >= {"NCCL_DEBUG": "WARN", "A": "b=c", "LABCTL_RUN_ID": "7"}.items()
    assert "HF_HUB_CACHE" in given


def test_a_file_of_variables_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Start with a missing DS_ENV_FILE: an error that names it."""
    done = Stage.make(tmp_path).start("run_opt-13b", DS_ENV_FILE="/nowhere/mine.env")
    assert done.returncode != 0
    assert "start.sh: DS_ENV_FILE: cannot read /nowhere/mine.env" in done.stdout


@pytest.mark.parametrize(("exists", "where"), [(True, "transformers"), (False, "hub")], ids=["there", "new"])
def test_models_are_in_the_clones_cache_where_there_is_one_and_else_in_the_hubs(
    tmp_path: Path, exists: bool, where: str
) -> None:
    """Start a script: HF_HUB_CACHE is the clone's cache if it exists, else the hub's."""
    stage = Stage.make(tmp_path)
    if exists:
        (tmp_path / "huggingface/transformers").mkdir(parents=True)
    stage.script('touch "$HF_HUB_CACHE/model"')
    assert stage.start("mine").returncode == 0
    assert (tmp_path / "huggingface" / where / "model").exists()


# --- the check of a Gaudi example ----------------------------------------------------------------------------


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run workloads/gaudi/check.py with these arguments; return its end."""
    command = [sys.executable, str(WORKLOADS / "gaudi/check.py"), *arguments]
    environ = {**os.environ, "PROJECT_PATH": str(FIXTURES)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


SCRIPT = "optimum-habana/examples/language-modeling/run_lora_clm.py"


def test_arguments_that_the_script_or_its_clone_declare_are_checked() -> None:
    """Check declared arguments: exit code 0 with a count, and undeclared ones are named."""
    done = check(
        SCRIPT, "--lora_rank", "8", "--lora_target_modules", "q_proj", "v_proj", "--use_habana", "--elsewhere=1"
    )
    assert done.returncode == 0, done.stderr
    assert "checked 3 arguments of 4" in done.stdout
    assert "--elsewhere is declared neither" in done.stdout


def test_an_argument_that_is_misspelt_fails() -> None:
    """Check a misspelt argument: exit code 1 with the nearest."""
    done = check(SCRIPT, "--lora_rnk", "8")
    assert done.returncode == 1
    assert "did you mean --lora_rank?" in done.stderr

"""Advice after a run, by its result and record."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import records

from labctl.model import Project, Result
from labctl.runs.next_step import next_step, of_record

CRASHED = Result(
    run_id="r1",
    workload="hello",
    launcher="deepspeed",
    lab="demo",
    verdict="ERROR",
    cause="rank-crashed",
    message="rank 0 on worker-0 exited with code 1",
    exit_code=4,
)


@pytest.mark.parametrize(
    ("message", "step"),
    [
        (
            "rank 1 on worker-1 exited with code 1: ModuleNotFoundError: No module named 'boto3.x'",
            "add the package of `boto3` to LAB_PACKAGES in .env",
        ),
        (
            "rank 0 on worker-0 exited with code 1: OSError: [Errno 30] Read-only file system: '/workspace/x'",
            "LABCTL_RUN",
        ),
        (
            "rank 0 on worker-0 exited with code 1: RuntimeError: [enforce fail] . Unable to find address for: eth9",
            "without LAB_ENV_GLOO_SOCKET_IFNAME labctl sets",
        ),
        (
            "rank 1 on worker-1 exited with code 134 (SIGABRT): terminate called without an active exception",
            "os._exit(0)",
        ),
        ("ModuleNotFoundError: No module named 'torchvision'", "LAB_PACKAGES=torchvision in .env"),
        ("ModuleNotFoundError: No module named 'cv2'", "add opencv-python-headless to LAB_PACKAGES"),
        (
            "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--deepspeed_config', 'c']",
            "`deepspeed_option: deepspeed` in its workload.yml",
        ),
        ("train.py: error: unrecognized arguments: --deepspeed_config c.json", "`-- --deepspeed FILE`"),
        ("train.py: error: unrecognized arguments: --local_rank=0", "leave out --local-rank"),
        ("train.py: error: unrecognized arguments: --lr 1", "what follows `--`"),
        (
            "Exception: URL fetch failure on https://storage.example/tf-keras-datasets/mnist.npz: None -- [Errno -3] "
            "Temporary failure in name resolution (mnist.py:9)",
            "put mnist.npz into keras/datasets/ below HOST_CACHE_PATH (~/.cache/labctl)",
        ),
        ("URLError: <urlopen error [Errno -2] Name or service not known> (train.py:3)", "torch/hub/checkpoints/"),
        ("RuntimeError: Error downloading train-images-idx3-ubyte.gz: ", "LAB_MOUNTS; or HTTPS_PROXY"),
        ("LookupError: Resource punkt not found. Please use the NLTK Downloader", "nltk.downloader -d DIRECTORY punkt"),
        (
            "RuntimeError: unable to write to file </torch_12_1>: No space left on device (28) (train.py:3)",
            "LAB_SHM_SIZE in .env",
        ),
        ("AssertionError: FSDP is only available on GPU (train.py:3)", "one on CPUs alone has none"),
        ("RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.", "LAB_ACCEL"),
        ("ValueError: fp16 mixed precision requires a GPU (not 'cpu').", "`labctl devices` lists"),
    ],
)
def test_a_failure_that_every_newcomer_meets_has_its_way_out(message: str, step: str) -> None:
    """Format a known failure: the line "next" has its remedy."""
    assert step in next_step(replace(CRASHED, message=message))


def test_data_that_is_nowhere_on_this_machine_is_said_to_be_so(tmp_path: Path) -> None:
    """Format a FileNotFoundError: LAB_MOUNTS is advised, and a path that this machine lacks is said to be missing."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.csv").touch()
    existing, gone = str(tmp_path / "data/train.csv"), str(tmp_path / "data/gone.csv")
    lines = []
    for path in (existing, gone):
        message = f"rank 0 on worker-0 exited with code 1: FileNotFoundError: No such file or directory: '{path}'"
        lines.append(next_step(replace(CRASHED, message=message)))
    folder = tmp_path / "data"
    assert all(f"LAB_MOUNTS={folder}:{folder}:ro in .env" in line for line in lines)
    assert [f"(this machine has no {gone} either)" in line for line in lines] == [False, True]


def test_a_file_beside_the_project_is_to_be_mounted_and_named_by_its_path(tmp_path: Path) -> None:
    """Advise on ../../data/a.npy, named from a folder of the project: LAB_MOUNTS, or how its mount has it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.npy").touch()
    error = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
    project = Project(root=tmp_path / "mine", start="code")

    def advice(name: str, **settings: str) -> str:
        """Return the next step after this name was not found."""
        failed = replace(CRASHED, message=error.format(name))
        return next_step(failed, project, settings)

    folder = tmp_path / "data"
    assert advice("../../data/a.npy") == (
        f"ranks see what is mounted: LAB_MOUNTS={folder}:{folder}:ro in .env, then `labctl up`, "
        f"and name it {folder}/a.npy"
    )
    mounted = f"ranks see {folder}/a.npy at {folder}/a.npy, where LAB_MOUNTS mounts it: name it so"
    assert advice("../../data/a.npy", LAB_MOUNTS=f"{folder}:{folder}:ro") == mounted
    assert "LAB_MOUNTS" not in advice("../a.npy")


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("./a.sh", "the nodes have no file `./a.sh`, or not the program that its first line (`#!`) names"),
        (
            "lm_eval",
            "the image has no program `lm_eval`: check its name, or add its package to LAB_PACKAGES or LAB_APT",
        ),
    ],
)
def test_advice_on_a_program_that_does_not_start(program: str, advice: str) -> None:
    """A script that is there, but not its interpreter, fails in the words of a missing file."""
    message = f"rank 0 on a exited with code 127: failed to run command '{program}': No such file or directory"
    failed = replace(CRASHED, message=message)
    assert next_step(failed).startswith(advice)


def test_advice_on_a_missing_path_or_module_knows_what_the_lab_mounts_and_installs(tmp_path: Path) -> None:
    """Advise on paths with a mount in LAB_MOUNTS, and on a module with LAB_REQUIREMENTS."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.npy").touch()
    settings = {"LAB_MOUNTS": f"{tmp_path}/data:/data:ro", "LAB_REQUIREMENTS": "mine/requirements.txt"}

    def advice(error: str) -> str:
        """Return the next step after this error."""
        return next_step(replace(CRASHED, message=error), None, settings)

    missing = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
    of_mounted = f"ranks see {tmp_path}/data/a.npy at /data/a.npy, where LAB_MOUNTS mounts it: name it so"
    assert advice(missing.format(tmp_path / "data/a.npy")) == of_mounted
    assert advice(missing.format("/data/b.npy")) == f"/data is {tmp_path}/data of this machine, which has no b.npy"
    other = advice(missing.format(tmp_path / "b.npy"))
    assert f"LAB_MOUNTS='{tmp_path}/data:/data:ro {tmp_path}:{tmp_path}:ro' in .env, then `labctl up`" in other
    module = advice("ModuleNotFoundError: No module named 'sklearn'")
    assert module.startswith("add scikit-learn to mine/requirements.txt (LAB_REQUIREMENTS), then `labctl up`; ")


def test_a_missing_module_that_the_project_lists_is_installed_by_its_requirements(tmp_path: Path) -> None:
    """Advise on modules with requirements.txt in the project: its path for a package that it lists, else the other."""
    (tmp_path / "requirements.txt").write_text("# nltk\nscikit-learn>=1\ninflect2\nnltk-data\n")

    def advice(module: str, **settings: str) -> str:
        """Return the next step after this module is not found."""
        failed = replace(CRASHED, message=f"No module named '{module}'")
        return next_step(failed, Project(root=tmp_path), settings)

    listed = f"LAB_REQUIREMENTS={tmp_path}/requirements.txt in .env, as it lists scikit-learn, then `labctl up`"
    assert advice("sklearn") == listed
    assert advice("sklearn", LAB_REQUIREMENTS="mine.txt").startswith("add scikit-learn to mine.txt (LAB_REQUIREMENTS)")
    assert "LAB_PACKAGES" in advice("inflect")
    assert "LAB_PACKAGES" in advice("nltk")


def test_an_option_that_a_script_does_not_take_is_told_the_nearest_of_its_usage(tmp_path: Path) -> None:
    """Format argparse's error with the usage in the log: the nearest option, or the general advice."""
    usage = "usage: train.py [-h] [--data DATA]\n                [--lr LR]\n"
    log = f"{usage}train.py: error: unrecognized arguments: --dta x\n"
    (tmp_path / "runs/r1").mkdir(parents=True)
    (tmp_path / "runs/r1/output.log").write_text(log)
    for option, step in (("--dta", "did you mean `--data`?"), ("--verbose", "the script has no such option")):
        message = f"rank 0 on worker-0 exited with code 2: train.py: error: unrecognized arguments: {option} x"
        assert of_record(tmp_path / "runs/r1", replace(CRASHED, message=message)).startswith(step)


def test_a_criterion_on_a_metric_misspelt_names_that_of_the_output() -> None:
    """Advise after --expect 'los<1' of an output with loss: the metric loss."""
    message = "Metric `los` not found in the output, as `los: 1.2`, `los=1.2` or alike; what was found: loss."
    found = {"loss": {"value": 0.5, "unit": ""}}
    missed = replace(CRASHED, cause="no-metric", message=message, metrics=found)
    assert next_step(missed) == "did you mean the metric `loss`?"
    assert next_step(replace(missed, metrics={})) == "`labctl logs --run r1` prints its output"


def test_a_file_of_the_project_that_git_ignores_is_said_not_to_be_in_the_run(tmp_path: Path) -> None:
    """Format a FileNotFoundError for a file that git ignores: .gitignore is named; not for other files."""
    root, record = tmp_path / "mine", tmp_path / "runs/r1"
    for folder in (root / "data", record):
        folder.mkdir(parents=True)
    (root / ".gitignore").write_text("*.bin\n")
    (root / "data/a.bin").touch()
    (root / "data/a.txt").touch()
    subprocess.run(["git", "init", "-q", root], check=True)
    project = {"root": str(root), "start": "data"}
    (record / "job.json").write_text(json.dumps({"job": {"workload": {"project": project}}}))

    def shown(name: str) -> str:
        """Return the advice after a FileNotFoundError with this name."""
        message = f"rank 0 exited with code 1: FileNotFoundError: No such file or directory: '{name}' (a.py:3)"
        return of_record(record, replace(CRASHED, message=message))

    advice = (
        f"{root}/data/a.bin is not in the run, as .gitignore leaves it out: take it out there, or mount it, "
        f"LAB_MOUNTS={root}/data:{root}/data:ro in .env, then `labctl up`, and name it by this path"
    )
    for name in ("a.bin", "../data/a.bin", "/workspace/outputs/r1/work/mine/data/a.bin", f"{root}/data/a.bin"):
        assert shown(name) == advice
    for name in ("a.txt", "b.bin", "../../a.bin", "x" * 300):
        assert ".gitignore" not in shown(name)


def test_a_file_that_is_named_from_beside_the_project_is_named_from_where_ranks_start(tmp_path: Path) -> None:
    """Format a FileNotFoundError for mine/words.txt, typed beside project mine: its path from the start is named."""
    root, record = tmp_path / "mine", tmp_path / "runs/r1"
    for folder in (root / "data", record):
        folder.mkdir(parents=True)
    (root / "words.txt").touch()
    (record / "job.json").write_text(
        json.dumps({"job": {"workload": {"project": {"root": str(root), "start": "data"}}}})
    )
    message = "rank 0 exited with code 1: FileNotFoundError: No such file or directory: 'mine/words.txt' (a.py:3)"
    step = of_record(record, replace(CRASHED, message=message))
    assert step == f"ranks start in {root}/data: name it ../words.txt"


@pytest.mark.parametrize("name", ["/" + "x" * 300, "/a\0b"])
def test_a_name_that_is_no_path_has_no_advice(tmp_path: Path, name: str) -> None:
    message = f"rank 0 on a exited with code 1: FileNotFoundError: No such file or directory: '{name}'"
    assert of_record(tmp_path, replace(CRASHED, message=message)) == ""


def test_a_checkpoint_that_is_a_link_to_itself_is_none(tmp_path: Path) -> None:
    record = stopped(tmp_path, {"resume": ["--resume", "checkpoints/step-*", "whole.json"]})
    (record / "checkpoints").mkdir()
    (record / "checkpoints/step-1").symlink_to("step-1")
    assert of_record(record, STOPPED) == ""


def stopped(lab: Path, workload: dict[str, object], **request: object) -> Path:
    """Write the record of a run, without a checkpoint; return its directory."""
    record = records.write(lab, "r1", request={"options": request})
    job = json.loads((record / "job.json").read_text())
    job["job"]["workload"] |= workload
    (record / "job.json").write_text(json.dumps(job))
    return record


STOPPED = replace(CRASHED, cause="interrupted", message="stopped by SIGINT")


def test_a_stopped_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Advise on a stopped run of a workload that resumes, before and after it saved a checkpoint."""
    record = stopped(tmp_path, {"resume": ["--resume", "checkpoints/step-*", ""]})
    assert of_record(record, STOPPED) == ""
    (record / "checkpoints/step-60").mkdir(parents=True)
    assert of_record(record, STOPPED) == "`labctl run --resume r1` goes on from r1/checkpoints/step-60"


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        ({"script": "/srv/train.py"}, "labctl run --script /srv/train.py -- "),
        ({"script": "/srv/train.py", "words": ["--lr", "1"]}, "labctl run --script /srv/train.py -- --lr 1 "),
        ({"command": ["python", "train.py"]}, "labctl run -- python train.py "),
    ],
)
def test_a_stopped_script_gets_its_checkpoint_by_its_own_option(
    tmp_path: Path, request_: dict[str, object], command: str
) -> None:
    """Advise on a stopped run of a script without a workload.yml, before and after it saved a checkpoint."""
    record = stopped(tmp_path, {}, **request_)
    assert of_record(record, STOPPED) == ""
    (record / "work/last.pt").touch()
    line = f"{command}--resume /workspace/runs/r1/work/last.pt"
    assert of_record(record, STOPPED) == f"pass the checkpoint by the script's own option, as in: `{line}`"


def test_a_model_among_the_code_is_no_checkpoint(tmp_path: Path) -> None:
    """Advise on a stopped script whose project has a .pt file, which the run's code was copied with."""
    record = stopped(tmp_path, {}, script="/srv/train.py")
    (record / "work/weights.pt").touch()
    job = json.loads((record / "job.json").read_text())
    (record / "job.json").write_text(json.dumps({**job, "code": {"work/weights.pt": "0" * 64}}))
    assert of_record(record, STOPPED) == ""

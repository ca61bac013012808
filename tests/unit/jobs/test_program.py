"""Programs that no workload declares."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.errors import ConfigError
from labctl.jobs import program
from labctl.jobs.request import RunOptions

RUN = ("python3", "-m", "torch.distributed.run")


@pytest.mark.parametrize(
    ("options", "launcher", "words"),
    [
        (RunOptions(script=Path("/a/train.py")), "torchrun", ("python", "-u", "/a/train.py")),
        (RunOptions(script=Path("/a/solver")), "mpirun", ("/a/solver",)),
        (RunOptions(module="pkg.train"), "torchrun", ("python", "-u", "-m", "pkg.train")),
        (RunOptions(module="pkg.train", launcher="deepspeed"), "deepspeed", ("python", "-u", "-m", "pkg.train")),
        (RunOptions(command=("lm_eval", "--model", "hf")), "torchrun", ("lm_eval", "--model", "hf")),
        (RunOptions(command=("torchrun", "a.py")), "pdsh", ("torchrun", "a.py")),
        (RunOptions(command=("accelerate", "test")), "pdsh", ("accelerate", "test")),
        (RunOptions(command=("accelerate", "launch", "a.py"), per="node"), "pdsh", ("accelerate", "launch", "a.py")),
        (RunOptions(command=(*RUN, "a.py")), "pdsh", (*RUN, "a.py")),
        (RunOptions(command=("mpirun", "a"), per="once"), "script:once", ("mpirun", "a")),
        (RunOptions(command=("mpirun", "a"), per="rank"), "torchrun", ("mpirun", "a")),
        (RunOptions(script=Path("/a/train.py"), per="once"), "script:once", ("python", "-u", "/a/train.py")),
        (RunOptions(script=Path("/a/start.sh"), per="node"), "pdsh", ("/a/start.sh",)),
    ],
)  # fmt: skip
def test_a_program_is_started_as_is_usual_for_it_or_as_it_is_said(
    options: RunOptions, launcher: str, words: tuple[str, ...]
) -> None:
    """Choose a launcher for a script, module or command: by its kind, or as --per and --launcher say."""
    workload = program.of(options)
    assert (workload.launcher, workload.program) == (launcher, words)


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        (RunOptions(script=Path("my train.py")), "my-train", "--script 'my train.py'"),
        (RunOptions(module="pkg.train"), "pkg-train", "-m pkg.train"),
        (RunOptions(command=("/opt/bin/lm_eval", "a b")), "lm-eval", "-- /opt/bin/lm_eval 'a b'"),
    ],
)
def test_a_program_is_named_as_it_was_given(options: RunOptions, name: str, text: str) -> None:
    """Name a script, module or command: a label, and the options as they were typed."""
    assert (program.of(options).name, program.of(options).declared) == (name, text)


def test_it_is_said_if_a_program_is_not_started_for_each_rank() -> None:
    """torchrun is remarked on unless `per` is given, and a command in `here` if nothing is copied; others are not."""
    assert next(program.remarks(RunOptions(command=("torchrun", "a.py")))) == (
        "-- torchrun a.py: it starts its ranks itself, so it runs once on each node; --per-rank starts it for each rank"
    )
    assert not [*program.remarks(RunOptions(command=("torchrun", "a.py"), per="node"))]
    assert not [*program.remarks(RunOptions(command=("lm_eval",)))]
    assert not [*program.remarks(RunOptions(script=Path("a.py")))]
    [said] = program.remarks(RunOptions(command=("lm_eval",), here=Path("/")))
    assert "nothing is copied into the run" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(), "name a workload or a program"),
        (RunOptions(script=Path("a.py"), module="b"), "--script and -m both name a program"),
        (RunOptions(module="b", rehearse=True), "--rehearse shrinks a workload"),
        (RunOptions(command=("torchrun", "a"), launcher="mpirun"), "runs per node, not under `mpirun`"),
        (RunOptions(module="b", per="once", launcher="torchrun"), "runs once, not under `torchrun`"),
        (RunOptions(command=("deepspeed", "a.py")), "deepspeed starts the ranks itself, and so does labctl"),
        (RunOptions(command=("accelerate", "launch", "a.py")), "starts ranks on one machine only, unless"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: RunOptions, message: str) -> None:
    """Give options that contradict each other: ConfigError."""
    with pytest.raises(ConfigError, match=message):
        program.of(options)


def test_a_script_is_recorded_by_its_plain_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a script by `..`, and through a link: the record has its path without `..`, of the file that is meant."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    monkeypatch.chdir(tmp_path / "a")
    assert program.plain(Path("../train.py")) == tmp_path / "train.py"
    assert program.plain(tmp_path / "link/../train.py") == tmp_path / "a/train.py"
    assert program.plain(Path("train.py")) == tmp_path / "a/train.py"

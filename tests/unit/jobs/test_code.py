from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import lab, workload

from labctl.errors import ConfigError, HostError
from labctl.jobs import code, inputs
from labctl.jobs.code import Code
from labctl.model import Lab, Mount, Project
from labctl.system import files, process
from labctl.system.process import CompletedProcess
from labctl.workloads import loader


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Create a clone's folder; return a lab that mounts it."""
    (tmp_path / "clone").mkdir()
    mounts = (Mount(source=str(tmp_path / "clone"), target="/workspace/DeepSpeedExamples"),)
    return lab(directory=tmp_path / "lab", mounts=mounts)


def write(folder: Path, *names: str) -> Path:
    """Write files that contain their own names; return the first path."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder / names[0]


def script(of: Lab, path: Path) -> Code:
    """Return the Code that is copied for this script."""
    return code.choose(of, workload(script=str(path)))[1]


def names(of: Code) -> set[str]:
    """Return the names of the copied files."""
    return {copy.name for copy in of.copies}


def test_a_workloads_folder_is_copied_whole_but_for_compiled_python(of: Lab, tmp_path: Path) -> None:
    """Choose a workload's folder: all files to work/, but __pycache__ and .git."""
    write(tmp_path / "hello", "hello.py", "lib/util.py", ".deepspeed_env", "__pycache__/hello.pyc", ".git/config")
    placed, chosen = code.choose(of, workload(directory=tmp_path / "hello", script="hello.py"))
    assert placed.script == "hello.py"
    assert names(chosen) == {"hello.py", "lib/util.py", ".deepspeed_env"}
    assert {copy.path for copy in chosen.copies} == {f"work/{name}" for name in names(chosen)}
    assert code.remark(chosen) == ""


def test_a_script_brings_what_lies_beside_and_below_it(of: Lab, tmp_path: Path) -> None:
    """Choose a script: files beside and below it, but .env and .venv."""
    path = write(tmp_path / "mine", "train.py", "util.py", "conf/small.json", ".env", ".venv/lib/x.py")
    placed, chosen = code.choose(of, workload(script=str(path)))
    assert (placed.script, names(chosen)) == ("train.py", {"train.py", "util.py", "conf/small.json"})


def test_of_a_repository_come_the_files_that_it_does_not_ignore(of: Lab, tmp_path: Path) -> None:
    """Choose a script in a git repository: tracked and new files; the remark names ignored ones."""
    mine = tmp_path / "mine"
    path = write(mine, "train.py", "util.py", "new.py", "data/big.bin", ".gitignore", "gone.py")
    (mine / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "-q", mine], check=True)
    subprocess.run(["git", "-C", mine, "add", "train.py", "util.py", "gone.py"], check=True)
    (mine / "gone.py").unlink()
    (mine / "__pycache__").mkdir()
    (mine / "__pycache__/util.pyc").write_text("")
    (mine / ".gitignore").write_text("data/\n*.npz\n__pycache__/\n.cache\n")
    write(mine, "digits.npz", ".cache")
    chosen = script(of, path)
    assert names(chosen) == {"train.py", "util.py", "new.py", ".gitignore"}
    assert code.remark(chosen) == "not copied into the run: data/ (ignored by git), digits.npz (ignored by git)"


@pytest.mark.parametrize("now", ["file", "outside", "inside", "gone"])
def test_what_git_lists_of_a_folder_that_is_none_any_more_does_not_come(of: Lab, tmp_path: Path, now: str) -> None:
    """Replace a tracked folder by a file, a link or nothing: it is copied only if it stays inside."""
    mine = tmp_path / "mine"
    path = write(mine, "train.py", "data/x", "data/deep/y", "other/x")
    write(tmp_path / "big", "x")
    subprocess.run(["git", "init", "-q", mine], check=True)
    subprocess.run(["git", "-C", mine, "add", "--all"], check=True)
    shutil.rmtree(mine / "data")
    if now == "file":
        write(mine, "data")
    elif now != "gone":
        (mine / "data").symlink_to(tmp_path / "big" if now == "outside" else "other")
    chosen = script(of, path)
    assert names(chosen) == {"train.py", "other/x"} | ({"data"} if now in ("file", "inside") else set())
    assert code.remark(chosen).endswith("data (a link that points outside)") == (now == "outside")
    files.create_all(tmp_path / "run", (), copies=chosen.copies)


def test_names_that_are_not_utf_8_come_too(of: Lab, tmp_path: Path) -> None:
    """Choose a repository with a file name that is not UTF-8: it is copied."""
    mine, name = tmp_path / "mine", os.fsdecode(b"caf\xe9.txt")
    path = write(mine, "train.py")
    (mine / name).touch()
    subprocess.run(["git", "init", "-q", mine], check=True)
    chosen = script(of, path)
    assert names(chosen) == {"train.py", name}
    files.create_all(tmp_path / "run", (), copies=chosen.copies)
    assert (tmp_path / "run/work/mine" / name).exists()


@pytest.mark.parametrize("in_git", [True, False])
def test_the_copy_of_an_earlier_run_can_be_run_again(of: Lab, in_git: bool) -> None:
    """Choose a script in the copy of an earlier run, below the ignored runs/: it and its files are copied."""
    path = write(of.directory, "runs/r1/work/train.py", "runs/r1/work/util.py", ".env", ".gitignore")
    (of.directory / ".env").write_text("LAB_NAME=demo\n")
    (of.directory / ".gitignore").write_text("runs/\n")
    if in_git:
        subprocess.run(["git", "init", "-q", of.directory], check=True)
    assert names(script(of, path)) == {"train.py", "util.py"}


def test_a_script_of_any_size_comes(of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a script above the size limit: it is copied, another file above it is not."""
    monkeypatch.setattr(code, "LARGEST", 100)
    monkeypatch.setattr(code, "MOST_BYTES", 200)
    path = write(tmp_path / "mine", "train", "small", "big")
    path.write_text("x" * 300)
    path.chmod(0o755)
    (tmp_path / "mine/big").write_text("x" * 101)
    chosen = script(of, path)
    assert (names(chosen), chosen.left_out) == ({"train", "small"}, ("big (101 B)",))
    declared = code.choose(of, workload(directory=tmp_path / "mine", script="train"))[1]
    assert names(declared) == {"train", "small"}


def test_a_script_that_cannot_be_copied_is_an_error(of: Lab, tmp_path: Path) -> None:
    """Choose a script named .netrc: ConfigError, as it may contain passwords."""
    path = write(tmp_path / "mine", ".netrc")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"\.netrc cannot be copied into the run: may contain passwords"):
        script(of, path)


def test_a_script_that_its_repository_ignores_comes_all_the_same(of: Lab, tmp_path: Path) -> None:
    """Choose a script that git ignores: it is copied."""
    path = write(tmp_path / "mine", "train.py", ".gitignore")
    (tmp_path / "mine/.gitignore").write_text("*.py\n")
    subprocess.run(["git", "init", "-q", tmp_path / "mine"], check=True)
    assert names(script(of, path)) == {"train.py", ".gitignore"}


def test_a_repositorys_own_programs_are_not_started(of: Lab, tmp_path: Path) -> None:
    """Configure core.fsmonitor in the repository: labctl lists the files without running it."""
    mine = tmp_path / "mine"
    path = write(mine, "train.py", "monitor")
    (mine / "monitor").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (mine / "monitor").chmod(0o755)
    subprocess.run(["git", "init", "-q", mine], check=True)
    subprocess.run(["git", "-C", mine, "config", "core.fsmonitor", str(mine / "monitor")], check=True)
    assert "train.py" in names(script(of, path))
    assert not (tmp_path / "started").exists()


def test_what_labctl_keeps_in_the_lab_directory_stays_there(of: Lab) -> None:
    """Choose a script in the lab directory: .env, .lab, runs and .devcontainer are not copied, even if tracked."""
    kept = (".env", ".lab/nodes/worker-0/secrets/HF_TOKEN", "runs/r1/output.log", ".devcontainer/devcontainer.json")
    path = write(of.directory, "train.py", "util.py", *kept)
    assert names(script(of, path)) == {"train.py", "util.py"}
    subprocess.run(["git", "init", "-q", of.directory], check=True)
    subprocess.run(["git", "-C", of.directory, "add", "--all"], check=True)
    assert names(script(of, path)) == {"train.py", "util.py"}


def test_what_other_labs_keep_stays_there_and_so_do_passwords(of: Lab, tmp_path: Path) -> None:
    """Choose a repository with another lab in it: its .env, .lab and runs, and .netrc, are not copied."""
    mine = tmp_path / "mine"
    kept = ("other/.env", "other/.lab/nodes/worker-0/ssh/id_ed25519", "other/runs/r1/output.log")
    path = write(mine, "train.py", "other/hostfiles/two", "runs/plan.py", ".netrc", *kept)
    (mine / "other/.env").write_text("LAB_NAME=other\nHF_TOKEN=hf_canary\n")
    subprocess.run(["git", "init", "-q", mine], check=True)
    chosen = script(of, path)
    assert names(chosen) == {"train.py", "other/hostfiles/two", "runs/plan.py"}
    assert code.remark(chosen) == "not copied into the run: .netrc (may contain passwords)"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "fatal: detected dubious ownership in repository at '/m'\n"
            "To add an exception, call:\n\n\tgit config --global --add safe.directory /m\n",
            "git config --global --add safe.directory /m",
        ),
        ("fatal: index file corrupt\n", "git -C .* status, or copy the files out of the repository"),
    ],
)
def test_where_git_fails_what_it_ignores_is_not_copied(
    of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, hint: str
) -> None:
    """Let git fail to list the files: ConfigError, the hint has a command to mend it."""
    path = write(tmp_path / "mine", "train.py", ".git/HEAD", "secret.key")
    failed = CompletedProcess(("git",), 128, "", message)
    monkeypatch.setattr(process, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="git cannot list the files of") as caught:
        script(of, path)
    assert re.fullmatch(hint, caught.value.hint)


def test_a_folder_that_its_repository_ignores_as_a_whole_is_copied(of: Lab, tmp_path: Path) -> None:
    """Choose a script in a folder that git ignores: that folder is copied whole."""
    path = write(tmp_path / "mine", "scratch/train.py", "scratch/util.py", ".gitignore")
    (tmp_path / "mine/.gitignore").write_text("scratch/\n")
    subprocess.run(["git", "init", "-q", tmp_path / "mine"], check=True)
    chosen = script(of, tmp_path / "mine/scratch/train.py")
    assert path.exists()
    assert (names(chosen), code.remark(chosen)) == ({"train.py", "util.py"}, "")


def test_a_folder_of_many_folders_is_copied_with_few_descriptors(of: Lab, tmp_path: Path) -> None:
    """Copy 200 folders with few file descriptors left: all are there."""
    path = write(tmp_path / "mine", "train.py", *(f"part-{number}/x/data.json" for number in range(200)))
    copies = script(of, path).copies
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        files.create_all(tmp_path / "run", (), copies=copies)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "run/work/mine/part-199/x/data.json").read_text() == "part-199/x/data.json"


def test_big_files_and_links_that_lead_out_are_left_out_by_name(of: Lab, tmp_path: Path) -> None:
    """Choose a folder with large files, FIFOs and links that lead out: left out and named in the remark."""
    mine = tmp_path / "mine"
    path = write(mine, "train.py", "a/b.py")
    (mine / "data").symlink_to("/data")
    (mine / "key").symlink_to(tmp_path / ".netrc")
    (mine / "inside").symlink_to("a/b.py")
    (mine / "folder").symlink_to("a")
    with (mine / "weights.bin").open("wb") as stream:
        stream.truncate(code.LARGEST + 1)
    os.mkfifo(mine / "pipe")
    chosen = script(of, path)
    assert names(chosen) == {"train.py", "a/b.py", "inside", "folder"}
    assert code.remark(chosen) == (
        "not copied into the run: data (a link that points outside), key (a link that points outside), "
        "pipe (not a regular file), weights.bin (50 MB)"
    )


def test_a_folder_with_too_much_in_it_is_refused_with_its_largest_folders(
    of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choose a folder above the limit of files: ConfigError with counts and its largest folders."""
    monkeypatch.setattr(code, "MOST_FILES", 3)
    path = write(tmp_path / "mine", "train.py", "a/1", "b/1", "b/2", "b/3", "c/1", "c/2", "d/1")
    with pytest.raises(ConfigError) as caught:
        script(of, path)
    assert caught.value.message == (
        f"{tmp_path}/mine holds more than a run copies: 8 files, 21 B, not 3 files and 500 MB; "
        "largest: b/ 3 files, 9 B; c/ 2 files, 6 B; a/ 1 file, 3 B"
    )
    assert ".gitignore" not in caught.value.hint
    with pytest.raises(ConfigError, match="holds more than a run copies: 8 files"):
        code.choose(of, workload(directory=tmp_path / "mine", script="train.py"))


def test_gitignore_is_advised_in_a_repository(of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a repository above the limit: the hint names .gitignore."""
    monkeypatch.setattr(code, "MOST_FILES", 1)
    path = write(tmp_path / "mine", "train.py", "util.py")
    subprocess.run(["git", "init", "-q", path.parent], check=True)
    with pytest.raises(ConfigError, match="holds more than a run copies") as caught:
        script(of, path)
    assert ".gitignore leaves files out" in caught.value.hint


def test_a_submodule_that_is_not_checked_out_is_told_so_and_a_clone_inside_is_left_out(of: Lab, tmp_path: Path) -> None:
    """Choose a repository with an empty submodule and a clone in it: both are named in the remark."""
    root = tmp_path / "mine"
    path = write(root, "train.py")
    subprocess.run(["git", "init", "-q", root], check=True)
    entry = f"160000,{'1' * 40},sub"
    subprocess.run(["git", "-C", root, "update-index", "--add", "--cacheinfo", entry], check=True)
    (root / "sub").mkdir()
    write(root, "clone/a.py")
    subprocess.run(["git", "init", "-q", root / "clone"], check=True)
    assert code.remark(script(of, path)) == (
        "not copied into the run: sub (a submodule that is not checked out: git submodule update --init), "
        "clone/ (its own git repository)"
    )


def test_of_the_home_directory_the_script_alone_comes(of: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a script in the home directory: it alone is copied, and the remark says why."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    chosen = script(of, write(tmp_path / "me", "train.py", "photos/cat.jpg"))
    assert names(chosen) == {"train.py"}
    assert "it is not a single project" in code.remark(chosen)


def test_a_project_is_copied_under_its_own_name_and_its_script_is_relative_to_where_ranks_start(
    of: Lab, tmp_path: Path
) -> None:
    """Choose a script of a project: files go to work/<project>, the script is relative to the start folder."""
    root = tmp_path / "mine"
    path = write(root, "src/train.py", "configs/a.yaml", "pkg/__init__.py")
    for start, relative in ((".", "src/train.py"), ("src", "train.py"), ("configs", "../src/train.py")):
        placed, chosen = code.choose(of, workload(script=str(path), project=Project(root=root, start=start)))
        assert placed.script == relative
        assert {copy.path for copy in chosen.copies} == {f"work/mine/{name}" for name in names(chosen)}
        assert names(chosen) == {"src/train.py", "configs/a.yaml", "pkg/__init__.py"}


def test_a_module_or_command_brings_its_project_too(of: Lab, tmp_path: Path) -> None:
    """Choose a module or command: its project is copied; nothing without a project."""
    write(tmp_path / "mine", "pkg/train.py")
    placed, chosen = code.choose(of, workload(script="", module="pkg.train", project=Project(root=tmp_path / "mine")))
    assert (placed.script, names(chosen)) == ("", {"pkg/train.py"})
    assert code.choose(of, workload(script="", command=("lm_eval",), directory=Path()))[1] == Code(())


def test_a_repository_brings_its_submodules_and_what_differs_from_its_commit(of: Lab, tmp_path: Path) -> None:
    """Choose a changed repository with a submodule: its files too, and project.diff; no diff of a part."""
    other, root = tmp_path / "other", tmp_path / "mine"
    write(other, "lib.py")
    path = write(root, "train.py", "notes.txt")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    for folder in (other, root):
        subprocess.run([*git, "init", "-q", folder], check=True)
        subprocess.run([*git, "-C", folder, "add", "--all"], check=True)
        subprocess.run([*git, "-C", folder, "commit", "-qm", "x"], check=True)
    subprocess.run([*git, "-C", root, "submodule", "--quiet", "add", other, "sub"], check=True)
    path.write_text("changed\n")
    write(root, "new.py")
    _, chosen = code.choose(of, workload(script=str(path), project=Project(root=root)))
    assert names(chosen) == {"train.py", "notes.txt", "new.py", ".gitmodules", "sub/lib.py"}
    assert "+changed" in chosen.difference
    assert [file.path for file in chosen.files] == ["project.diff"]
    of_part = code.choose(of, workload(script="", module="lib", project=Project(root=root / "sub")))[1]
    assert of_part.difference == ""
    write(root, "part/x.py")
    assert code.choose(of, workload(script="", module="x", project=Project(root=root / "part")))[1].difference == ""


@pytest.mark.parametrize("at", ["clone", "link-to-clone"])
def test_a_link_that_a_container_planted_copies_nothing_of_the_host(of: Lab, tmp_path: Path, at: str) -> None:
    """Plant a link to a host's file in the mounted clone: ConfigError."""
    (tmp_path / "link-to-clone").symlink_to("clone")
    (tmp_path / ".netrc").write_text("password canary")
    (tmp_path / "clone/train.py").symlink_to(tmp_path / ".netrc")
    mounts = (Mount(source=str(tmp_path / at), target="/workspace/DeepSpeedExamples"),)
    for folder in ("clone", at):
        with pytest.raises(ConfigError, match="a link to a file outside the mounted folders"):
            script(replace(of, mounts=mounts), tmp_path / folder / "train.py")


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(of: Lab, tmp_path: Path) -> None:
    """Replace a chosen folder by a link before the copy: HostError, and nothing is read through it."""
    write(tmp_path / "keys", "id_ed25519")
    chosen = script(of, write(tmp_path / "mine", "train.py", "ssh/id_ed25519"))
    (tmp_path / "mine/ssh/id_ed25519").unlink()
    (tmp_path / "mine/ssh").rmdir()
    (tmp_path / "mine/ssh").symlink_to(tmp_path / "keys")
    with pytest.raises(HostError):
        files.create_all(tmp_path / "run", (), copies=chosen.copies)
    assert not (tmp_path / "run/work/mine/ssh/id_ed25519").exists()


def test_the_copy_has_the_same_bytes_and_modes_and_may_be_written(of: Lab, tmp_path: Path) -> None:
    """Copy a project: bytes, links and execute bits are kept, copies are writable and independent."""
    mine = tmp_path / "mine"
    path = write(mine, "train.py", "sub/tool")
    (mine / "sub/tool").write_bytes(bytes(range(256)) * 1000)
    (mine / "sub/tool").chmod(0o555)
    (mine / "link").symlink_to("sub/tool")
    files.create_all(tmp_path / "run", (), copies=script(of, path).copies)
    work = tmp_path / "run/work/mine"
    assert (work / "link").readlink() == Path("sub/tool")
    assert (work / "link").read_bytes() == (mine / "sub/tool").read_bytes()
    assert (work / "sub/tool").stat().st_mode & 0o777 == 0o755
    (work / "sub/tool").write_text("changed")
    assert (mine / "sub/tool").stat().st_size == 256_000


def test_a_script_that_nothing_could_start_is_refused(of: Lab, tmp_path: Path) -> None:
    """Choose a text file without execute permission: ConfigError with chmod +x."""
    (tmp_path / "notes.txt").touch(mode=0o644)
    with pytest.raises(ConfigError, match="neither Python nor executable") as caught:
        script(of, tmp_path / "notes.txt")
    assert caught.value.hint.startswith("chmod +x ")


@pytest.mark.parametrize("kind", ["script", "prepare"])
def test_a_script_with_windows_line_ends_is_refused(of: Lab, tmp_path: Path, kind: str) -> None:
    """Its interpreter would not be found: ConfigError with the command that mends it."""
    path = tmp_path / "go.sh"
    path.write_bytes(b"#!/bin/sh\r\ntrue\r\n")
    chosen = workload(**{"directory": tmp_path, "script": "", kind: "go.sh"})
    with pytest.raises(ConfigError, match=r"go\.sh has Windows line ends") as caught:
        code.choose(of, chosen)
    subprocess.run(shlex.split(caught.value.hint), check=True)
    assert path.read_bytes() == b"#!/bin/sh\ntrue\n"
    assert inputs.windows_script(chosen) is None


def test_python_reads_windows_line_ends(tmp_path: Path) -> None:
    """A script in Python is started by Python, whatever its line ends."""
    (tmp_path / "go.py").write_bytes(b"#!/usr/bin/python3\r\n")
    assert inputs.windows_script(workload(directory=tmp_path, script="go.py")) is None


def test_a_script_that_is_not_there_is_refused(of: Lab, tmp_path: Path) -> None:
    """Choose a missing script: ConfigError."""
    with pytest.raises(ConfigError, match="script not found"):
        script(of, tmp_path / "gone.py")


def test_a_declared_script_may_be_a_clones(of: Lab, tmp_path: Path) -> None:
    """Declare a workload whose script is in the mounted clone: its folder is copied."""
    path = write(tmp_path / "clone", "cifar/train.py", "cifar/model.py")
    declared = loader.load(declare(tmp_path, path), "mine", ("torchrun",))
    inputs.require_mounted(of, declared)
    placed, chosen = code.choose(of, declared)
    assert (placed.script, names(chosen)) == ("train.py", {"train.py", "model.py"})


def test_a_declared_script_that_containers_do_not_see_is_refused(of: Lab, tmp_path: Path) -> None:
    """Declare a workload whose script is not mounted: ConfigError with --script.

    Declarations may be other people's, and the named files would be copied to the ranks.
    """
    path = write(tmp_path, "private/keys.py")
    with pytest.raises(ConfigError, match="is not in a folder that the lab mounts") as caught:
        inputs.require_mounted(of, loader.load(declare(tmp_path, path), "mine", ("torchrun",)))
    assert f"labctl run mine --script {path}" in caught.value.hint


def declare(folder: Path, script: Path) -> Path:
    """Write workloads/mine with this script elsewhere; return the folder of workloads."""
    text = f"description: a clone's\nlauncher: torchrun\nscript: {script}\ntimeout: 30s\n"
    (folder / "workloads/mine").mkdir(parents=True)
    (folder / "workloads/mine/workload.yml").write_text(text)
    return folder / "workloads"


def test_a_misspelt_script_is_told_the_nearest_and_a_folder_is_told_so(of: Lab, tmp_path: Path) -> None:
    """Choose a misspelt script or a folder: ConfigError with the nearest name, or "is a directory"."""
    write(tmp_path / "mine", "train.py", "model.py")
    with pytest.raises(ConfigError, match="script not found") as caught:
        script(of, tmp_path / "mine/trian.py")
    assert caught.value.hint == "did you mean `train.py`?"
    with pytest.raises(ConfigError, match="mine is a directory"):
        script(of, tmp_path / "mine")


def test_a_workloads_folder_may_be_a_link(of: Lab, tmp_path: Path) -> None:
    """Choose a workload whose folder is a link: its files are copied."""
    write(tmp_path / "mine", "train.py")
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    copies = code.choose(of, workload(directory=tmp_path / "linked", script="train.py"))[1].copies
    files.create_all(tmp_path / "run", (), folders=("work",), copies=copies)
    assert (tmp_path / "run/work/train.py").read_text() == "train.py"

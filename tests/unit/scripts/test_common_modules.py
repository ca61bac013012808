"""workloads/common without torch: exit codes, rank, DeepSpeed's file, text, and unique module names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unit.scripts.conftest import WORKLOADS, ImportScripts

COMMON = WORKLOADS / "common"
MODULES = tuple(sorted(path.stem for path in COMMON.glob("*.py")))


@pytest.fixture(scope="module")
def common(import_scripts: ImportScripts) -> SimpleNamespace:
    """Return all modules of workloads/common."""
    return import_scripts("common", *MODULES)


def run(tmp_path: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run this code as a script with workloads/common on its path, as rank.sh does; return its end."""
    script = tmp_path / "train.py"
    script.write_text(code)
    argv = [sys.executable, "-B", "-u", str(script)]
    env = {"PYTHONPATH": str(COMMON), **environ}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Raise InputError in a rank: one line with rank and reason on stderr, exit code 2."""
    code = (
        "import script_exit\ndef main():\n    raise script_exit.InputError('no text')\nscript_exit.run_and_exit(main)"
    )
    done = run(tmp_path, code, RANK="3")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "train.py: rank 3: no text\n")


def test_a_script_ends_with_all_its_output_and_without_pythons_shutdown(tmp_path: Path) -> None:
    """End a script by run_and_exit: its output is written, atexit handlers are not run, exit code 0."""
    code = (
        "import atexit, script_exit, sys\natexit.register(print, 'shutdown')\n"
        "script_exit.run_and_exit(lambda: sys.stdout.write('done'))"
    )
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done", "")


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    """Raise another error: its traceback on stderr, exit code 1."""
    done = run(tmp_path, "import script_exit\nscript_exit.run_and_exit(lambda: 1 / 0)")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_only_rank_0_prints(tmp_path: Path) -> None:
    """Call say() as rank 0, as rank 1 and without ranks: rank 1 prints nothing, and without ranks it is 0 of 1."""
    code = "from rank_group import RANK, WORLD, say\nsay(f'{RANK} of {WORLD}')"
    assert run(tmp_path, code, RANK="0", WORLD_SIZE="2").stdout == "0 of 2\n"
    assert run(tmp_path, code, RANK="1", WORLD_SIZE="2").stdout == ""
    assert run(tmp_path, code).stdout == "0 of 1\n"


def test_a_module_beside_the_script_wins(tmp_path: Path) -> None:
    """Put a module of a common module's name beside the script: it is imported."""
    (tmp_path / "rank_group.py").write_text("MINE = True")
    done = run(tmp_path, "import rank_group\nprint(rank_group.MINE)")
    assert done.stdout == "True\n"


def test_ranks_of_a_node_share_its_cores(common: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share eight cores among ranks: at least one each; local_ranks() reads LOCAL_WORLD_SIZE."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [common.rank_group.cores_per_rank(ranks) for ranks in (1, 3, 16)] == [8, 2, 1]
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert common.rank_group.local_ranks() == 4


@pytest.mark.parametrize(("content", "reason"), [('{"a": 1,}', "not JSON: .* line 1"), ("[]", "not a JSON object")])
def test_a_configuration_that_is_none_is_refused(
    common: SimpleNamespace, tmp_path: Path, content: str, reason: str
) -> None:
    """Read a missing, invalid or non-object DeepSpeed file: InputError; a valid one is returned."""
    path = tmp_path / "ds_config.json"
    with pytest.raises(common.script_exit.InputError, match=r"ds_config\.json: No such file"):
        common.deepspeed_file.read_config(path)
    path.write_text(content)
    with pytest.raises(common.script_exit.InputError, match=reason):
        common.deepspeed_file.read_config(path)
    path.write_text('{"bf16": {"enabled": true}}')
    assert common.deepspeed_file.read_config(path) == {"bf16": {"enabled": True}}


def test_text_is_read_by_whole_lines_and_links_are_left_out(common: SimpleNamespace, tmp_path: Path) -> None:
    """Read a text of 2.2 MB: three pieces of whole lines; links are left out."""
    text = tmp_path / "b" / "text.txt"
    text.parent.mkdir()
    text.write_text("0123456789\n" * 200_000)
    (tmp_path / "a.txt").symlink_to(text)
    assert common.training_text.files_below(tmp_path) == [text]
    pieces = list(common.training_text.read_plain(text))
    assert "".join(pieces) == text.read_text()
    assert len(pieces) == 3
    assert all(piece.endswith("\n") for piece in pieces)


def test_no_workloads_module_has_the_name_of_a_common_one_or_of_pythons() -> None:
    """Compare module names: none of workloads/common is Python's own or another workload's."""
    assert not set(MODULES) & sys.stdlib_module_names
    for folder in WORKLOADS.iterdir():
        if folder != COMMON:
            assert not set(MODULES) & {path.stem for path in folder.glob("*.py")}, folder


def test_a_projects_root_and_src_are_last_on_pythons_path_so_that_they_hide_no_package(tmp_path: Path) -> None:
    """Run with LABCTL_PROJECT: its root and src are last on sys.path, so json stays Python's own."""
    for folder in ("datasets", "mine/json", "mine/pkg", "mine/src/inner"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    code = "import sys, json, pkg, inner\nprint(json.__file__)\nprint(*sys.path[-2:], sep='\\n')"
    done = run(tmp_path, code, LABCTL_PROJECT=str(tmp_path / "mine"))
    hidden, *last = done.stdout.splitlines()
    assert str(tmp_path) not in hidden
    assert last == [str(tmp_path / "mine"), str(tmp_path / "mine/src")]


def test_what_a_project_installed_is_found(tmp_path: Path) -> None:
    """Run with LABCTL_SITE: packages of .pth files below it are found."""
    packages = tmp_path / "site/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "code/pkg").mkdir(parents=True)
    (tmp_path / "code/pkg/__init__.py").touch()
    (packages / "editable.pth").write_text(f"{tmp_path}/code\n")
    done = run(tmp_path, "import pkg\nprint(pkg.__file__)", LABCTL_SITE=str(tmp_path / "site"))
    assert done.stdout == f"{tmp_path}/code/pkg/__init__.py\n"

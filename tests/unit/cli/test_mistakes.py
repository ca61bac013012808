"""Mistakes that are reported before anything is started: nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commandline import Labctl
from support.mistakes import PAGE, STARTED, TYPED, Mistake, table


@pytest.mark.parametrize("mistake", TYPED, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_a_mistake_is_named_with_the_way_out_and_costs_nothing(mistake: Mistake, labctl: Labctl) -> None:
    """Type each known mistake: its exit code, message and hint, and no file changes."""
    plain = ("LAB_NAME=demo", "LAB_ACCELERATOR=cpu")
    kept = [line for line in plain if not mistake.setting.startswith(line.partition("=")[0])]
    labctl.write(".env", "\n".join((*kept, mistake.setting, "")))
    for name, text in mistake.files.items():
        (labctl.directory / name).parent.mkdir(parents=True, exist_ok=True)
        labctl.write(name, text)
    before = files_in(labctl.directory)
    answer = labctl(*mistake.typed.split())
    assert answer.code == mistake.code, answer.err
    assert mistake.says in answer.err
    assert mistake.hint in answer.err
    assert files_in(labctl.directory) == before


@pytest.mark.parametrize("mistake", [*TYPED, *STARTED], ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_every_mistake_has_words_and_a_way_out_that_the_person_did_not_type(mistake: Mistake) -> None:
    """Check each known mistake: message and hint are not what the person typed."""
    for text in (mistake.says, mistake.hint):
        assert text
        assert text not in f"{mistake.setting} {mistake.typed}"


@pytest.mark.parametrize("command", ["up", "run hello"])
def test_a_directory_that_is_no_lab_is_told_apart(
    command: str, labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in a directory that is no lab: exit code 2, the hint names -C and `labctl init`."""
    (tmp_path / "other").mkdir()
    (tmp_path / ".env").unlink()
    monkeypatch.chdir(tmp_path / "other")
    answer = labctl(*command.split())
    assert answer.code == 2
    assert "-C DIRECTORY; `labctl init mylab` creates one" in answer.err
    assert f"{tmp_path / 'other'} is not a lab directory" in answer.err


@pytest.mark.parametrize(
    "command", ["run --script train.py", "runs", "show", "attach", "stop", "logs --run latest", "status", "down"]
)
def test_outside_a_lab_no_lab_of_a_default_name_is_meant(
    command: str, labctl: Labctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run commands outside a lab: exit code 2, not a lab of the default name."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train.py").touch()
    (tmp_path / ".env").unlink()
    monkeypatch.chdir(tmp_path / "other")
    answer = labctl(*command.split())
    assert answer.code == 2
    assert f"{tmp_path}/other is not a lab directory (no .env)" in answer.err
    assert "-C DIRECTORY" in answer.err


@pytest.mark.parametrize("command", ["attach", "stop"])
def test_a_command_that_there_is_is_not_called_unknown(command: str, labctl: Labctl) -> None:
    """Give attach and stop an unknown option: the error names the option, not the command."""
    assert f"`labctl {command}` has no option `--nowhere`" in labctl(command, "--nowhere").err


def test_the_page_has_what_is_tested(request: pytest.FixtureRequest) -> None:
    """Compare the page of mistakes with the tested table; with --update-golden write it first."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("| What |")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(head + table(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == head + table()


def files_in(directory: Path) -> dict[str, bytes]:
    """Return the content of all files below a directory by path, without those in .lab."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".lab" not in path.parts)
    return {str(path): path.read_bytes() for path in files}

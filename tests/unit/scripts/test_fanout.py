"""Program in the launcher for `labctl exec --all`: prefixed lines, workers, and the number of sessions."""

from __future__ import annotations

import importlib.util
import resource
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).resolve().parents[3] / "docker/fanout.py"
MARK = "person-1"


def load() -> ModuleType:
    """Import docker/fanout.py from its file; return the module."""
    spec = importlib.util.spec_from_file_location("fanout", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fanout = load()


@pytest.fixture(scope="module")
def path_with_ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PATH whose only program is an `ssh` that ends at once."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ssh").symlink_to("/bin/true")
    return str(folder)


def handed_on(path: str, pieces: list[bytes]) -> tuple[bytes, bool]:
    """Feed pieces of a worker's output to a session; return the text to print, and True if the command has begun."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PATH", path)
        session = fanout.Session("worker-7", "", MARK)
    printed = b"".join(session.add(fanout.STDOUT, piece) for piece in [*filter(None, pieces), b""])
    session.exit_code()
    for stream in session.streams.values():
        stream.close()
    return printed, session.begun


@settings(max_examples=50)
@given(st.binary(max_size=60).map(lambda text: text.replace(b"x", b"\n")), st.lists(st.integers(0, 60), max_size=6))
@example(b"a\nb", [1, 2])
@example(b"", [])
def test_every_line_is_whole_and_marked_however_it_arrives(path_with_ssh: str, text: bytes, cuts: list[int]) -> None:
    """Feed any text in any pieces: every line is prefixed with the worker and complete."""
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    lines = text.split(b"\n")
    expected = b"".join(b"worker-7: " + line + b"\n" for line in (lines if lines[-1] else lines[:-1]))
    assert handed_on(path_with_ssh, pieces) == (expected, False)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_mark_that_says_that_the_command_began_is_not_shown(path_with_ssh: str, size: int) -> None:
    """Feed the mark that the command has begun: it is not printed, `begun` is True."""
    text = f"{MARK}\n{MARK} too\n".encode()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert handed_on(path_with_ssh, pieces) == (f"worker-7: {MARK} too\n".encode(), True)


def test_a_line_without_end_is_not_kept_back_until_its_end(path_with_ssh: str) -> None:
    """Feed a line above LONGEST without end: it is printed before its end."""
    piece = b"x" * (fanout.LONGEST // 2 + 1)
    printed, _ = handed_on(path_with_ssh, [piece, piece, b"y"])
    assert printed == b"worker-7: " + 2 * piece + b"\nworker-7: y\n"


@pytest.fixture
def known_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an ssh config with twelve workers and make it fanout's."""
    config = tmp_path / "config"
    names = "".join(f"Host worker-{number}\n  Port 12345\n" for number in range(12))
    config.write_text(f"# How\n{names}\nHost *\n  User lab\n")
    monkeypatch.setattr(fanout, "CONFIG", config)


@pytest.mark.usefixtures("known_workers")
def test_all_workers_are_asked_where_none_is_named_and_one_named_twice_once() -> None:
    """Choose nodes: all without names, each named one once."""
    assert fanout.choose_nodes("") == [f"worker-{number}" for number in range(12)]
    assert fanout.choose_nodes("worker-3,worker-11,worker-3") == ["worker-3", "worker-11"]


@pytest.mark.usefixtures("known_workers")
def test_a_worker_that_is_not_there_is_said_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Choose an unknown worker: exit code 2, stderr names it and the range of known ones."""
    with pytest.raises(SystemExit) as ended:
        fanout.choose_nodes("worker-1,worker-12")
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "no worker `worker-12`" in err
    assert "worker-0 to worker-11" in err


def test_more_nodes_than_open_files_allow_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raise the file limit for 300 nodes; for 400 nodes exit code 3 with the numbers."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    fanout.raise_file_limit(300)
    assert raised == [(1024, 1024)]
    with pytest.raises(SystemExit) as ended:
        fanout.raise_file_limit(400)
    assert ended.value.code == 3
    assert "400 nodes at once need 1232 open files, and a process here may have 1024" in capsys.readouterr().err


def test_a_signal_before_the_first_login_is_the_result() -> None:
    """Report after SIGTERM before any login: 143."""
    command = fanout.Fanout(["worker-0"], "", MARK)
    command._stopped_by = 15
    assert command.report() == 128 + 15

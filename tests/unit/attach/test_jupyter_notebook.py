"""What a person reads of a notebook server: where to go, and its log only when there is something in it for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.attach import jupyter, session
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import Event
from labctl.system import process

INSIDE = session.ExecTarget(container="labctl-demo-worker-0-1", directory=None, user="1000:1000")
Serve = Callable[[int, list[str]], tuple[list[str], list[str]]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves by a server that says some lines and ends with a code; returns what was noted and what was told."""
    (tmp_path / ".lab/home").mkdir(parents=True)

    def run(code: int, lines: list[str]) -> tuple[list[str], list[str]]:
        events: list[Event] = []
        told: list[str] = []

        def follow(_: object, __: object, on_line: Callable[[str], None], hidden: dict[str, str]) -> int:
            # It answers once it has been started, whatever it has said.
            monkeypatch.setattr(jupyter, "answers", lambda _: True)
            for line in lines:
                on_line(line.format(token=hidden["JUPYTER_TOKEN"]))
            return code

        monkeypatch.setattr(session, "follow", follow)
        monkeypatch.setattr(
            process, "run", lambda argv, **_: process.CompletedProcess(argv, 0, "/bin/jupyter-lab\n", "")
        )
        here = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=events.append, flags={})
        jupyter.serve(here, INSIDE, "worker-0", None, told.append)
        return [event.text for event in events], told

    return run


def test_the_url_is_told_alone_and_last(serve: Serve) -> None:
    noted, told = serve(0, ["[I 1 ServerApp] http://{token}", "[I 1 ServerApp] more"])
    assert len(told) == 1
    assert told[0].startswith("http://127.0.0.1:")
    assert noted[-1].endswith("open this:")
    assert not [text for text in noted if "ServerApp" in text]


def test_it_is_said_where_notebooks_stay(serve: Serve) -> None:
    noted, _ = serve(0, [])
    assert "runs/notebooks stay" in noted[0]
    assert "/workspace itself, go with the container" in noted[0]


def test_an_error_of_the_server_is_shown_as_it_comes(serve: Serve) -> None:
    noted, _ = serve(0, ["[E 1 ServerApp] kernel died, {token}"])
    assert "[E 1 ServerApp] kernel died, [REDACTED]" in noted


def test_a_server_that_fails_has_its_last_words_in_the_error(serve: Serve) -> None:
    with pytest.raises(HostError, match=r"ended with code 1\n(.*\n)*\[I 24 .*\[REDACTED\]") as raised:
        serve(1, [f"[I {number} ServerApp] {{token}}" for number in range(25)])
    assert "[I 4 " not in raised.value.message

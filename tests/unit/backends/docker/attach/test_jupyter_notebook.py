"""Output of a notebook server: its URL, and its log only if it contains something for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_backend import Failed, FakeBackend

from labctl.backends.docker.attach import jupyter, session
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import Event

Serve = Callable[[int, list[str]], tuple[list[str], list[str]]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return a function that serves notebooks by a fake server and returns labctl's notes and messages."""
    (tmp_path / ".lab/home").mkdir(parents=True)

    def run(code: int, lines: list[str]) -> tuple[list[str], list[str]]:
        """Serve notebooks by a server that prints these lines and exits with this code; return notes and messages."""
        events: list[Event] = []
        messages: list[str] = []

        def answer(_: str, argv: tuple[str, ...]) -> Iterator[str]:
            """Answer `sh` with jupyter-lab's path; for the server yield its lines, raise Failed if code is not 0."""
            if argv[0] == "sh":
                yield "/bin/jupyter-lab"
                return
            # It answers once it has been started, whatever it has said.
            monkeypatch.setattr(jupyter, "answers", lambda _: True)
            token = backend.options[-1]["secret_env"]["JUPYTER_TOKEN"]
            assert token not in " ".join(argv)
            yield from (line.format(token=token) for line in lines)
            if code:
                raise Failed(code)

        backend = FakeBackend(answer=answer)
        inside = session.ExecTarget(
            engine=backend, container="labctl-demo-worker-0-1", directory=None, user="1000:1000"
        )
        here = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=events.append, flags={})
        jupyter.serve(here, inside, "worker-0", None, messages.append)
        return [event.text for event in events], messages

    return run


def test_the_url_is_told_alone_and_last(serve: Serve) -> None:
    """Only the URL is a message; the last note announces it, and the server's information lines are not shown."""
    noted, messages = serve(0, ["[I 1 ServerApp] http://{token}", "[I 1 ServerApp] more"])
    assert len(messages) == 1
    assert messages[0].startswith("http://127.0.0.1:")
    assert noted[-1].endswith("Ctrl-C stops the server:")
    assert not [text for text in noted if "ServerApp" in text]


def test_it_is_said_where_notebooks_stay(serve: Serve) -> None:
    """The first note says that files in runs/notebooks are kept, and those directly in /workspace are lost."""
    noted, _ = serve(0, [])
    assert "files in runs/notebooks and" in noted[0]
    assert "directly in /workspace are lost with the container" in noted[0]


def test_an_error_of_the_server_is_shown_as_it_comes(serve: Serve) -> None:
    """An error line of the server is a note, with the token replaced by [REDACTED]."""
    noted, _ = serve(0, ["[E 1 ServerApp] kernel died, {token}"])
    assert "[E 1 ServerApp] kernel died, [REDACTED]" in noted


def test_a_server_that_fails_has_its_last_words_in_the_error(serve: Serve) -> None:
    """Exit code 1 raises HostError with the last of 25 lines, the token redacted; earlier lines are left out."""
    with pytest.raises(HostError, match=r"exited with code 1\n(.*\n)*\[I 24 .*\[REDACTED\]") as raised:
        serve(1, [f"[I {number} ServerApp] {{token}}" for number in range(25)])
    assert "[I 4 " not in raised.value.message

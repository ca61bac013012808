"""Errors for people: what was tried, on which node, what came back, what to type next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager


class LabError(Exception):
    """A failure with a message for people, a hint of what to type next, and the exit code that scripts see."""

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", node: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.node = node


class ConfigError(LabError):
    """What was typed or written cannot be used; the message begins with ``file:line:`` where there is one."""

    kind = "config"
    exit_code = 2


class HostError(LabError):
    """The host, Docker, the image, the network or ssh does not allow it."""

    kind = "environment"
    exit_code = 3


class OutputClosed(LabError):
    """Nobody reads the output any more, as after ``| head``: nothing is left to be said."""

    kind = "unread"
    exit_code = 141


class Interrupted(LabError):
    """The person stopped it; everything was cleaned up first."""

    kind = "interrupted"
    exit_code = 130


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word most like this one; empty where none is near."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint: the nearest known spelling, or all of them."""
    near = nearest(word, known)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(known) or 'none'}"


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """What fails within is said of this host, unless it says itself where."""
    try:
        yield
    except HostError as error:
        if error.node or name == "local":
            raise
        raise HostError(f"{name}: {error.message}", hint=error.hint, node=name) from error


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """HostError of this host where the block cannot parse what it answered; of this machine that is a bug."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if name == "local":
            raise
        what = f"{type(error).__name__}: {error}"[:300]
        raise HostError(f"{name}: its answer is invalid: {what}", hint="labctl doctor", node=name) from error


Failures = Mapping[str, HostError]
"""What failed, by the name of the host."""


def raise_all(lost: Failures) -> None:
    """HostError that says what failed on each of these hosts; nothing where none failed."""
    if len(lost) == 1:
        raise next(iter(lost.values()))
    if lost:
        first = next(iter(lost))
        lines = "".join("\n  " + about(host, error).replace("\n", "\n    ") for host, error in lost.items())
        advice = lost[first].hint
        if advice and len({error.hint for error in lost.values()}) > 1:
            advice = f"{advice} (for {first}; `labctl doctor` says what for each)"
        hint = f"{advice}; then re-run the command" if advice else "re-run the command"
        raise HostError(f"{len(lost)} hosts failed:{lines}", hint=hint, node=first)


def about(host: str, error: HostError) -> str:
    return error.message if error.message.startswith(host) else f"{host}: {error.message}"

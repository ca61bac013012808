"""Errors for users: what was tried, on which node, what came back, what to type next."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager


class LabError(Exception):
    """A failure with a message for users, a hint of what to type next, and the exit code."""

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", node: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.node = node


class ConfigError(LabError):
    """Invalid input, typed or in a file; the message begins with ``file:line:`` if it is in a file."""

    kind = "config"
    exit_code = 2


class HostError(LabError):
    """A failure of a host, Docker, the image, the network or ssh."""

    kind = "environment"
    exit_code = 3


class OutputClosed(LabError):
    """The reader of the output is gone, as after ``| head``: nothing more is printed."""

    kind = "unread"
    exit_code = 141


class OutputFailed(HostError):
    """The output cannot be written, as to a full disk; nothing more is printed to it."""


def unwritten(error: OSError) -> LabError:
    """Return the error, not raised, of output that cannot be written: OutputClosed if nobody reads it any more."""
    if isinstance(error, BrokenPipeError):
        return OutputClosed("output closed by its reader")
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "check the disk that the output is redirected to: df -h" if is_full else ""
    return OutputFailed(f"cannot write the output: {error.strerror}", hint=hint)


class Interrupted(LabError):
    """The user stopped the command; everything was cleaned up first."""

    kind = "interrupted"
    exit_code = 130


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the candidate most like this word; empty if none is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, candidates, n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, candidates: Collection[str]) -> str:
    """Return ``did you mean NAME?`` for the nearest candidate, else ``known: ...`` with all of them."""
    near = nearest(word, candidates)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(candidates) or 'none'}"


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Prefix a HostError raised in the block with this host's name; unchanged if it names a node or is local."""
    try:
        yield
    except HostError as error:
        if error.node or name == "local":
            raise
        raise HostError(f"{name}: {error.message}", hint=error.hint, node=name) from error


@contextmanager
def parsing(name: str) -> Iterator[None]:
    """Raise a HostError for ValueError, LookupError and the like in the block; unchanged if the host is local."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if name == "local":
            raise
        problem = f"{type(error).__name__}: {error}"[:300]
        raise HostError(f"{name}: its answer is invalid: {problem}", hint="labctl doctor", node=name) from error


Failures = Mapping[str, HostError]
"""Errors by the name of the host."""


def raise_all(lost: Failures) -> None:
    """Raise the only failure as it is, or one HostError listing all; do nothing without failures."""
    if len(lost) == 1:
        raise next(iter(lost.values()))
    if lost:
        first = next(iter(lost))
        lines = "".join("\n  " + about(host, error).replace("\n", "\n    ") for host, error in lost.items())
        advice = lost[first].hint
        if advice and len({error.hint for error in lost.values()}) > 1:
            advice = f"{advice} (for {first}; `labctl doctor` has a hint for each)"
        hint = f"{advice}; then re-run the command" if advice else "re-run the command"
        raise HostError(f"{len(lost)} hosts failed:{lines}", hint=hint, node=first)


def about(host: str, error: HostError) -> str:
    """Render a host's error with its name, unless the message begins with it."""
    return error.message if error.message.startswith(host) else f"{host}: {error.message}"

"""Thread pools for work on several hosts or nodes at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from labctl.errors import ConfigError, HostError, parsing
from labctl.model import HERE

T = TypeVar("T")
K = TypeVar("K")
Done = Callable[[int, T | None], object]
"""Gets the number and result of a task; None for one that is late."""

# Maximum number of hosts or nodes that are worked on at once.
WIDTH = 32


@contextmanager
def pool(width: int = WIDTH, *, endless: bool = False) -> Iterator[ThreadPoolExecutor]:
    """Provide up to ``width`` threads, and WIDTH at most unless their work is ``endless``; wait for them at the end.

    An exception in the block, such as Ctrl-C, does not wait: queued work is dropped, and running work ends with the
    connection that it uses.
    """
    threads = ThreadPoolExecutor(max(1, width if endless else min(width, WIDTH)))
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()


def map_hosts(work: Callable[[K], T], hosts: Mapping[str, K]) -> tuple[dict[str, T], dict[str, HostError]]:
    """Run ``work`` for hosts in parallel; return results and, as HostErrors, failures by host, in order. Raises bugs.

    Other exceptions than those of hosts, files and settings are bugs: the first is raised after all work has ended.
    """

    def attempt(name: str, host: K) -> T:
        """Do the host's work, with parse errors raised under its name."""
        with parsing(name):
            return work(host)

    done: dict[str, T] = {}
    failures: dict[str, HostError] = {}
    bugs: list[Exception] = []
    with pool(len(hosts)) as threads:
        futures = {name: threads.submit(attempt, name, host) for name, host in hosts.items()}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except HostError as error:
                failures[name] = error
            except (ConfigError, OSError) as error:
                message = str(error) if name == HERE else f"{name}: {error}"
                failures[name] = HostError(message, hint=getattr(error, "hint", ""), node=name)
            except Exception as error:  # noqa: BLE001 - raised below, after the other hosts' work
                bugs.append(error)
    if bugs:
        raise bugs[0]
    return done, failures


def run_with_deadlines(
    tasks: Sequence[tuple[Callable[[], T], float]], width: int = 16, *, done: Done[T] | None = None
) -> list[T | None]:
    """Return the result of each task, in order; None for a task not done within its seconds. Raises a task's error.

    ``done`` gets the number and result of each task as it ends or is late, in this thread. A hanging task delays
    neither the others nor the end of the process: its thread is a daemon.
    """
    started: list[tuple[Future[T], float]] = []
    results: dict[int, T | None] = {}
    for work, seconds in tasks:
        while len(busy := _unfinished(started)) >= width:
            wait(busy, timeout=0.1, return_when=FIRST_COMPLETED)
            _take_ended(started, results, done)
        started.append((begin(work), time.monotonic() + seconds))
    while busy := _unfinished(started):
        _take_ended(started, results, done)
        first = min(end for future, end in started if future in busy)
        wait(busy, timeout=max(0.0, first - time.monotonic()), return_when=FIRST_COMPLETED)
    _take_ended(started, results, done)
    return [results[number] for number in range(len(tasks))]


def _take_ended(started: Sequence[tuple[Future[T], float]], results: dict[int, T | None], done: Done[T] | None) -> None:
    """Add to ``results`` those of tasks that have ended or are late since the last call."""
    now = time.monotonic()
    for number, (future, end) in enumerate(started):
        if number not in results and (future.done() or now >= end):
            results[number] = future.result() if future.done() else None
            if done:
                done(number, results[number])


def _unfinished(started: Sequence[tuple[Future[T], float]]) -> list[Future[T]]:
    """Return the futures that are neither done nor past their deadline."""
    now = time.monotonic()
    return [future for future, end in started if not future.done() and now < end]


def begin(work: Callable[[], T]) -> Future[T]:
    """Start work in a daemon thread, which does not delay the end of the process; return the future of its result."""
    future: Future[T] = Future()

    def fulfil() -> None:
        """Run the work and set the future's result or exception."""
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future's result()
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future

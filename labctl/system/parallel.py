"""Threads for what is done on several hosts, or nodes, at once."""

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

# Hosts, and nodes, that are worked on at once.
WIDTH = 32


@contextmanager
def pool(width: int = WIDTH, *, endless: bool = False) -> Iterator[ThreadPoolExecutor]:
    """At most so many threads, never more than WIDTH unless their work is ``endless``. All is done when the block ends.

    Where an exception leaves it, as Ctrl-C does, nobody waits: what has not begun never does, and what runs ends with
    the connection that it uses.
    """
    threads = ThreadPoolExecutor(max(1, width if endless else min(width, WIDTH)))
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()


def map_hosts(work: Callable[[K], T], wanted: Mapping[str, K]) -> tuple[dict[str, T], dict[str, HostError]]:
    """What came of each, by host, and what failed on which; in their order.

    Any other exception than those that hosts, files and settings cause is a bug: it is raised once all are done.
    """

    def attempt(name: str, one: K) -> T:
        with parsing(name):
            return work(one)

    done: dict[str, T] = {}
    failures: dict[str, HostError] = {}
    bugs: list[Exception] = []
    with pool(len(wanted)) as threads:
        futures = {name: threads.submit(attempt, name, one) for name, one in wanted.items()}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except HostError as error:
                failures[name] = error
            except (ConfigError, OSError) as error:
                said = str(error) if name == HERE else f"{name}: {error}"
                failures[name] = HostError(said, hint=getattr(error, "hint", ""), node=name)
            except Exception as error:  # noqa: BLE001 - the others are not left in the middle for it
                bugs.append(error)
    if bugs:
        raise bugs[0]
    return done, failures


def run_with_deadlines(tasks: Sequence[tuple[Callable[[], T], float]], width: int = 16) -> list[T | None]:
    """The result of each task, in their order; None for one not done within its seconds. Raises what a task raised.

    A task that hangs holds up neither the others nor the end of the process: its thread is a daemon.
    """
    started: list[tuple[Future[T], float]] = []
    for work, seconds in tasks:
        while len(busy := [one for one, end in started if not one.done() and time.monotonic() < end]) >= width:
            wait(busy, timeout=0.1, return_when=FIRST_COMPLETED)
        started.append((begin(work), time.monotonic() + seconds))
    for future, end in started:
        wait([future], timeout=max(0.0, end - time.monotonic()))
    return [future.result() if future.done() else None for future, _ in started]


def begin(work: Callable[[], T]) -> Future[T]:
    """Start this beside what follows; the end of the process does not wait for it: its thread is a daemon."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future

"""Threads for what is done on several hosts, or nodes, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from labctl.errors import ConfigError, HostError
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


def attempt(work: Callable[[K], T], wanted: Mapping[str, K]) -> tuple[dict[str, T], dict[str, HostError]]:
    """What came of each, by host, and what failed on which; in their order.

    Any other exception than those that hosts, files and settings cause is a bug: it is raised once all are done.
    """
    done: dict[str, T] = {}
    failures: dict[str, HostError] = {}
    bugs: list[Exception] = []
    with pool(len(wanted)) as threads:
        futures = {name: threads.submit(work, one) for name, one in wanted.items()}
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

"""Threads for what is done on several hosts, or nodes, at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

# Hosts, and nodes, that are worked on at once.
WIDTH = 32


@contextmanager
def pool(width: int = WIDTH) -> Iterator[ThreadPoolExecutor]:
    """At most so many threads, never more than WIDTH. All work is done when the block ends.

    Where an exception leaves it, as Ctrl-C does, nobody waits: what has not begun never does, and what runs ends with
    the connection that it uses.
    """
    threads = ThreadPoolExecutor(max(1, min(width, WIDTH)))
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()

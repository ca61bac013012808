"""Scheduler of a batch: starts jobs whose nodes are free, in order, without starving large ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

AHEAD = 16
"""A waiting job is overtaken only by jobs at most this many places behind it, times the nodes of the batch. With fewer,
nodes would idle until all nodes of a large job are free; with more, that job would run last."""


class JobQueue:
    """Queue of jobs that wait for their nodes. A job is its index in ``nodes``, which has the nodes of each."""

    def __init__(self, nodes: Sequence[tuple[str, ...]], parallel: int = 0) -> None:
        """Queue a job for each tuple of nodes; at most ``parallel`` run at a time, 0 for no limit."""
        self._nodes = nodes
        self._by_node: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(nodes):
            for name in names:
                self._by_node[name].append(index)
        self._free = set(self._by_node)
        self._parallel = parallel or len(nodes)
        self._begun = [False] * len(nodes)
        self._first = 0
        self.running: set[int] = set()

    def start(self) -> list[int]:
        """Return the indices of jobs to start, nodes free and within the limit; mark nodes and jobs as in use."""
        last = self._first + AHEAD * len(self._by_node)
        started = []
        waiting = chain.from_iterable(self._waiting(name, last) for name in self._free)
        for index in sorted(set(waiting)):
            if len(self.running) < self._parallel and self._free.issuperset(self._nodes[index]):
                self._free.difference_update(self._nodes[index])
                self.running.add(index)
                self._begun[index] = True
                started.append(index)
        while self._first < len(self._begun) and self._begun[self._first]:
            self._first += 1
        return started

    def _waiting(self, name: str, last: int) -> Iterator[int]:
        """Yield unstarted jobs that need a node, up to index ``last``; drop the started ones at the head."""
        indices = self._by_node[name]
        while indices and self._begun[indices[0]]:
            del indices[0]
        for index in indices:
            if index > last:
                return
            if not self._begun[index]:
                yield index

    def end(self, index: int) -> None:
        """Mark a running job as ended, and its nodes as free."""
        self.running.remove(index)
        self._free.update(self._nodes[index])

    def __bool__(self) -> bool:
        """Tell if a job is running or has not been started."""
        return bool(self.running) or self._first < len(self._begun)

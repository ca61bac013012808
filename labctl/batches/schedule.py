"""Which jobs of a batch may start: those whose nodes are free, in their order, without leaving any behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

# A job that waits is overtaken by those at most so many places behind it, for each node of the batch. Fewer would have
# nodes idle until all of a large job are free; with more, that job would run last of all.
AHEAD = 16


class JobQueue:
    """Jobs that wait for their nodes. A job is its index in ``nodes``, which has the nodes of each."""

    def __init__(self, nodes: Sequence[tuple[str, ...]], parallel: int = 0) -> None:
        """At most ``parallel`` jobs at a time; 0 for as many as have nodes."""
        self._nodes = nodes
        self._wanted: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(nodes):
            for name in names:
                self._wanted[name].append(index)
        self._free = set(self._wanted)
        self._parallel = parallel or len(nodes)
        self._begun = [False] * len(nodes)
        self._first = 0
        self.running: set[int] = set()

    def start(self) -> list[int]:
        """The jobs that start now, in order; the nodes of each are in use from then on."""
        last = self._first + AHEAD * len(self._wanted)
        started = []
        for index in sorted({index for name in self._free for index in self._waiting(name, last)}):
            if len(self.running) < self._parallel and self._free.issuperset(self._nodes[index]):
                self._free.difference_update(self._nodes[index])
                self.running.add(index)
                self._begun[index] = True
                started.append(index)
        while self._first < len(self._begun) and self._begun[self._first]:
            self._first += 1
        return started

    def _waiting(self, name: str, last: int) -> Iterator[int]:
        """The jobs that wait for a node, up to this one."""
        wanted = self._wanted[name]
        while wanted and self._begun[wanted[0]]:
            del wanted[0]
        for index in wanted:
            if index > last:
                return
            if not self._begun[index]:
                yield index

    def end(self, index: int) -> None:
        """A job has ended: its nodes are free."""
        self.running.remove(index)
        self._free.update(self._nodes[index])

    def __bool__(self) -> bool:
        """Whether a job is running, or waits."""
        return bool(self.running) or self._first < len(self._begun)

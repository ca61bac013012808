"""Find slow or failing nodes and bad links by running groups of nodes and regrouping: no clock, no input or output.

1. All nodes in pairs, at the same time. Each node of a bad pair is tested with other partners that are good: bad with
   them too, it is a bad node; if both are good with others and bad together again, their link is bad.
2. Pairs test few of the links, so good groups are merged two by two until all nodes are in one: log2 N rounds test
   every link. Inside a bad merge of two good groups, cross halves of both lead to the pair whose link is bad.

Training is synchronous: a group is as slow as its slowest node or link, so one good run clears all that is in it.
A single bad run accuses nobody: tests are repeated until bad or good runs clearly lead. Good nodes that a test leaves
idle run beside it in groups of its size, as controls: so the load stays the same, and it is compared with its like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations, islice, pairwise, zip_longest
from typing import Literal, TypeVar

from msgspec import Struct

Group = tuple[str, ...]
"""The nodes of one run."""

LEAD = 6
"""A verdict needs so many points: a good run is 3 against the node or link being bad, a bad one 3 for it, or 2 if it is
so near the threshold that noise may have done it. So two tests decide if they are clear and agree."""
MAX_TESTS = 8
"""Of one node or link; it is unsure if neither side leads by then."""


class Outcome(Struct, frozen=True):
    """Of a run: the metric per node, higher is better; None, and why, if it failed or gave none."""

    value: float | None
    why: str = ""


class Run(Struct, frozen=True, kw_only=True):
    """A run and how it compares."""

    nodes: Group
    value: float | None
    figure: float | None
    """Its value as a share of the median of good runs of about its size; None if it failed."""
    bad: bool
    why: str = ""


class BadNode(Struct, frozen=True, kw_only=True):
    node: str
    kind: Literal["slow", "failing"]
    figure: float | None
    """The median of its bad runs' figures; None if it is failing."""
    runs: tuple[Run, ...]
    """Its tests with partners that are good with others, or alone where no such partner is known."""


class BadLink(Struct, frozen=True, kw_only=True):
    nodes: tuple[str, str]
    kind: Literal["slow", "failing"]
    figure: float | None
    """The median of its bad runs' figures; None if it is failing."""
    runs: tuple[Run, ...]
    """Its tests: the two nodes together."""
    apart: tuple[Run, ...]
    """A good run of each node without the other."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    bad: tuple[BadNode, ...]
    links: tuple[BadLink, ...]
    good: tuple[str, ...]
    """Nodes that are good with others; one end of a bad link is too."""
    unsure: tuple[str, ...]
    """Nodes whose tests contradict each other, or were cut short by the limit, or had nothing to compare with."""
    unexplained: tuple[Run, ...]
    """Groups that are bad only as a whole: no node or link in them was found bad; size may be the reason."""
    rounds: int
    runs: int
    note: str = ""
    """What limits the diagnosis."""


T = TypeVar("T")
Steps = Generator[tuple[Group, ...], Mapping[Group, Outcome], T]
"""Yields rounds, takes their outcomes, returns something."""


def diagnose(
    nodes: tuple[str, ...], *, within: float = 0.1, minimum: float | None = None, seed: int = 0, rounds: int = 100
) -> Steps[Diagnosis]:
    """Yield rounds, disjoint groups to run at the same time; take their outcomes by send(); return the diagnosis.

    A run is bad if it failed, if its value per node is below ``minimum``, or more than ``within`` below the median of
    good runs of about its size: bad nodes may be a third of all. ``seed`` orders the nodes, so another pairs them
    differently. At most so many ``rounds``; what is open then is unsure.

    Two nodes have no other pair to compare with: a slow link between them is found only with ``minimum``.
    """
    bisection = _Bisection(_shuffled(nodes, seed), within, minimum, rounds)
    try:
        yield from bisection.all_nodes()
    except _OutOfRounds:
        return bisection.diagnosis(nodes, f"The limit of {rounds} rounds was reached.")
    return bisection.diagnosis(nodes)


class _OutOfRounds(Exception):
    pass


class _Bisection:
    """What is known so far. Methods that return Steps run groups."""

    def __init__(self, order: Group, within: float, minimum: float | None, limit: int) -> None:
        self.order, self.within, self.minimum, self.limit = order, within, minimum, limit
        self.rounds = 0
        self.record: list[Run] = []
        self.good: set[str] = set()
        """Nodes that were in a good run with others."""
        self.bad: dict[str, BadNode] = {}
        self.links: list[BadLink] = []
        self.barred: defaultdict[str, set[str]] = defaultdict(set)
        """The other ends of a node's bad links."""
        self.bad_with: defaultdict[str, set[str]] = defaultdict(set)
        """The nodes that a node was in a bad pair with."""
        self.suspects: set[str] = set()
        """Nodes under test, which are no partners."""
        self.unsure: set[str] = set()
        self.unexplained: list[Group] = []
        """Bad groups in which nothing was found bad, so far."""
        self.values: defaultdict[int, list[float]] = defaultdict(list)
        """Of good runs, by scale."""

    def all_nodes(self) -> Steps[None]:
        """Find bad nodes, then bad links."""
        opening = yield from self.opening()
        bad = [run.nodes for run in opening if run.bad]
        if not self.good and len(self.order) > 2:
            yield from self.resolve([], self.order)
            return
        suspects = [node for group in bad for node in group if len(group) == 1 or node not in self.good]
        yield from self.resolve(bad, suspects)
        if len(self.order) <= 3:
            return
        groups = _partition(self.usable(self.order), [run.nodes for run in opening if not run.bad])
        while len(groups) > 1:
            groups = yield from self.check(_merge(groups))
        # One end of each bad link was left out; now the other end is.
        left_out = [node for node in self.barred if node not in set().union(*groups)]
        if left_out and groups:
            yield from self.check([self.usable((*left_out, *groups[0]))])
        while pairs := self.apart():
            yield from self.resolve((yield from self.run(pairs)), [])

    def opening(self) -> Steps[list[Run]]:
        """Disjoint pairs; others while no pair is good. All pairs, and each node alone, of up to three nodes."""
        turns = list(islice(_round_robin(self.order), 3))
        if len(self.order) == 2:
            turns.append(tuple((node,) for node in self.order))
        outcomes: dict[Group, Outcome] = {}
        runs: list[Run] = []
        for turn in turns:
            outcomes.update((yield from self.ask(turn)))
            runs = self.compare(outcomes, ())
            if len(self.order) > 3 and any(len(run.nodes) > 1 and not run.bad for run in runs):
                break
        self.learn(runs)
        return runs

    def resolve(self, groups: Iterable[Group], suspects: Iterable[str]) -> Steps[list[Group]]:
        """Tell bad nodes from bad links: test the suspects, then the pairs whose nodes are both good."""
        tests = yield from self.settle([(node,) for node in dict.fromkeys(suspects)])
        for (node,), runs in tests.items():
            if self.lead(runs) >= LEAD:
                kind, figure = _summary(runs)
                self.bad[node] = BadNode(node=node, kind=kind, figure=figure, runs=tuple(runs))
            elif self.lead(runs) > -LEAD:
                self.unsure.add(node)
        pairs: list[Group] = [group for group in groups if len(group) == 2 and self.usable(group) == group]
        tests = yield from self.settle(pairs)
        for pair, runs in tests.items():
            if self.lead(runs) >= LEAD:
                self.links.append(self.bad_link((pair[0], pair[1]), runs))
                self.barred[pair[0]].add(pair[1])
                self.barred[pair[1]].add(pair[0])
            elif self.lead(runs) > -LEAD:
                self.unsure |= set(pair)
        return [group for group in groups if self.usable(group) != group]

    def settle(self, subjects: list[Group]) -> Steps[dict[Group, list[Run]]]:
        """Test each pair, or each node with partners, until bad or good runs lead: the runs of each.

        Those before count too, but for the first: it was bad, or nobody would ask.
        """
        before: defaultdict[Group, list[Run]] = defaultdict(list)
        for run in self.record:
            before[run.nodes].append(run)
        tests = {subject: before[subject][1:] for subject in subjects}
        while left := [one for one, runs in tests.items() if abs(self.lead(runs)) < LEAD and len(runs) < MAX_TESTS]:
            self.suspects = {node for subject in left for node in subject}
            groups = self.with_partners(left, tests)
            yield from self.run(list(groups.values()))
            latest = {run.nodes: run for run in self.record[-len(groups) :]}
            for subject, group in groups.items():
                tests[subject].append(latest[group])
        self.suspects = set()
        return tests

    def with_partners(self, subjects: list[Group], tests: Mapping[Group, list[Run]]) -> dict[Group, Group]:
        """Disjoint groups for as many subjects as go: a node gets a new partner; it is alone if none is good."""
        free = self.partners()
        alone, busy = not free, set[str]()
        groups: dict[Group, Group] = {}
        for subject in subjects:
            if len(subject) > 1 or alone:
                group = subject
            else:
                (node,) = subject
                if not free:
                    break
                met = {other for run in tests[subject] for other in run.nodes}
                unmet = (other for other in free if other not in met and other not in self.bad_with[node])
                partner = next(unmet, None) or min(free, key=self.bad_with[node].__contains__)
                free.remove(partner)
                group = (node, partner)
            if busy.isdisjoint(group):
                busy.update(group)
                groups[subject] = group
        return groups

    def check(self, groups: list[Group]) -> Steps[list[Group]]:
        """Run groups whose parts are good; the good ones, without the bad nodes and links that were found in others."""
        bad = yield from self.run(groups)
        bad = yield from self.run(bad)
        good = [group for group in groups if group not in bad]
        explained = self.unexplained
        found = True
        while bad and found:
            self.unexplained = explained + bad
            pairs = yield from self.search(bad)
            found = bool((yield from self.resolve(pairs, [node for pair in pairs for node in pair])))
            rest = [group for group in map(self.usable, bad) if group]
            bad = yield from self.run([group for group in rest if len(group) > 1])
            good += [group for group in rest if group not in bad]
        self.unexplained = explained + bad
        return good

    def search(self, groups: list[Group]) -> Steps[list[Group]]:
        """The pairs that are bad inside bad groups; all groups are searched in the same rounds."""
        if not groups:
            return []
        found = yield from self.run([group for group in groups if len(group) == 2])
        larger = [group for group in groups if len(group) > 2]
        for way in _WAYS:
            halves = [half for group in larger for half in _halves(group, way) if len(half) > 1]
            bad = yield from self.run(halves)
            pairs = yield from self.search(bad)
            found += pairs
            larger = [group for group in larger if not any(set(pair) <= set(group) for pair in pairs)]
        return found

    def run(self, tests: list[Group]) -> Steps[list[Group]]:
        """Run a round, if there is anything to test."""
        if not tests:
            return []
        controls = self.controls(tests)
        runs = self.compare((yield from self.ask((*controls, *tests))), controls)
        self.learn(runs)
        return [run.nodes for run in runs[len(controls) :] if run.bad]

    def ask(self, groups: tuple[Group, ...]) -> Steps[dict[Group, Outcome]]:
        if self.rounds == self.limit:
            raise _OutOfRounds
        self.rounds += 1
        outcomes = yield groups
        return {group: outcomes[group] for group in groups}

    def controls(self, tests: list[Group]) -> list[Group]:
        """Groups of the tests' size, of the good nodes that the tests leave idle."""
        busy = set().union(*tests)
        idle = self.usable([node for node in self.partners() if node not in busy])
        size = max(2, *map(len, tests))
        return [idle[start : start + size] for start in range(0, len(idle) - size + 1, size)]

    def apart(self) -> list[Group]:
        """Disjoint pairs of ends of bad links that no good run had together."""
        ends = [node for node in self.barred if self.usable([node])]
        together = [set(run.nodes) for run in self.record if not run.bad and len(set(ends) & set(run.nodes)) > 1]
        pairs: list[Group] = []
        for one, other in combinations(ends, 2):
            seen = other in self.barred[one] or any({one, other} <= nodes for nodes in together)
            if not seen and all({one, other}.isdisjoint(pair) for pair in pairs):
                pairs.append((one, other))
        return pairs

    def partners(self) -> list[str]:
        """Good nodes that are not under test. Of two nodes none: only alone do they differ."""
        if len(self.order) == 2:
            return []
        return [node for node in self.usable(self.order) if node in self.good and node not in self.suspects]

    def usable(self, nodes: Iterable[str]) -> Group:
        """These nodes without bad and unsure ones, and with only one end of each bad link, the first."""
        taken: list[str] = []
        barred: set[str] = set()
        for node in nodes:
            if node not in self.bad and node not in self.unsure and node not in barred:
                taken.append(node)
                barred |= self.barred.get(node, set())
        return tuple(taken)

    def compare(self, outcomes: Mapping[Group, Outcome], controls: Sequence[Group] = ()) -> list[Run]:
        """Judge runs by the controls beside them; if these are few, by all of the round and the good ones before."""
        known, peers = defaultdict(list), defaultdict(list)
        for group, outcome in outcomes.items():
            peers[_scale(group)].append(outcome.value or 0.0)
        for group in controls:
            known[_scale(group)].append(outcomes[group].value or 0.0)
        medians = {}
        for scale, values in peers.items():
            own = known[scale] if len(known[scale]) >= 3 else values + self.values[scale]
            smaller = self.values[scale - 1] if scale > 1 else []
            # A single run of its size has only smaller groups to compare with. Where there are others, to be twice as
            # large may cost all of them twice `within`.
            medians[scale] = self.median(own if len(own) > 1 else own + smaller)
            if smaller:
                medians[scale] = max(medians[scale], (1 - 2 * self.within) * self.median(smaller))
        return [self.judged(group, outcome, medians[_scale(group)]) for group, outcome in outcomes.items()]

    def median(self, values: list[float]) -> float:
        """Of the good values: those near the upper quartile, which is good where a quarter of them are."""
        from statistics import median

        top = sorted(values)[len(values) * 3 // 4]
        return median(value for value in values if value >= (1 - 1.5 * self.within) * top)

    def judged(self, nodes: Group, outcome: Outcome, median: float) -> Run:
        value = outcome.value
        figure = None if value is None or not median else value / median
        # Of a single rank a bandwidth is 0 by definition, which says nothing of its node.
        alone = len(nodes) == 1 and value == 0
        low = self.minimum is not None and not alone and value is not None and value < self.minimum
        bad = value is None or value < (1 - self.within) * median or low
        return Run(nodes=nodes, value=value, figure=figure, bad=bad, why=outcome.why)

    def learn(self, runs: list[Run]) -> None:
        self.record += runs
        for run in runs:
            if run.bad and len(run.nodes) == 2:
                self.bad_with[run.nodes[0]].add(run.nodes[1])
                self.bad_with[run.nodes[1]].add(run.nodes[0])
            if not run.bad and run.value is not None:
                self.values[_scale(run.nodes)].append(run.value)
                # Alone, a node shows nothing of its network, but of two nodes there is no more to see.
                if len(run.nodes) > 1 or len(self.order) < 3:
                    self.good.update(run.nodes)

    def lead(self, runs: Iterable[Run]) -> int:
        """Points for bad, less those for good."""
        clear = 1 - 2 * self.within
        return sum((3 if run.figure is None or run.figure < clear else 2) if run.bad else -3 for run in runs)

    def bad_link(self, nodes: tuple[str, str], runs: list[Run]) -> BadLink:
        kind, figure = _summary(runs)
        apart = [
            next(run for run in reversed(self.record) if not run.bad and one in run.nodes and other not in run.nodes)
            for one, other in (nodes, nodes[::-1])
        ]
        return BadLink(nodes=nodes, kind=kind, figure=figure, runs=tuple(runs), apart=tuple(apart))

    def diagnosis(self, nodes: Group, note: str = "") -> Diagnosis:
        if all(run.bad for run in self.record):
            self.bad = {}
            note = note or "No run was good: look at the workload, or at the minimum."
        elif not self.good:
            note = note or "No two nodes ran well together: there is no good partner to test others with."
        good = [node for node in nodes if node in self.good - self.bad.keys() - self.suspects - self.unsure]
        last = {run.nodes: run for run in self.record}
        return Diagnosis(
            bad=tuple(self.bad[node] for node in nodes if node in self.bad),
            links=tuple(self.links),
            good=tuple(good),
            unsure=tuple(node for node in nodes if node not in self.bad and node not in set(good)),
            unexplained=tuple(last[group] for group in self.unexplained),
            rounds=self.rounds,
            runs=len(self.record),
            note=note,
        )


def _summary(runs: Iterable[Run]) -> tuple[Literal["slow", "failing"], float | None]:
    """Kind and figure of what these tests show bad: failing if most of the bad ones failed."""
    from statistics import median

    bad = [run for run in runs if run.bad]
    figures = [run.figure for run in bad if run.figure is not None]
    if 2 * len(figures) < len(bad) or not figures:
        return "failing", None
    return "slow", median(figures)


def _scale(group: Group) -> int:
    """Groups of one scale are compared: 1, 2, 3 to 4, 5 to 8 nodes, and so on."""
    return (len(group) - 1).bit_length()


# Halves of a group made of two good ones, by quarters: any two quarters are together in one way. The halves that cross
# come first, since what lies inside either half was good before.
_WAYS = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3)))


def _halves(group: Group, way: tuple[tuple[int, int], tuple[int, int]]) -> list[Group]:
    cuts = [len(group) * number // 4 for number in range(5)]
    quarters = [group[start:stop] for start, stop in pairwise(cuts)]
    return [quarters[one] + quarters[other] for one, other in way]


def _merge(groups: list[Group]) -> list[Group]:
    """Two groups become one, the smallest first; of an odd number the largest stays."""
    ordered = sorted(groups, key=len)
    return [one + other for one, other in zip_longest(ordered[::2], ordered[1::2], fillvalue=())]


def _partition(nodes: Group, groups: list[Group]) -> list[Group]:
    """The nodes in these groups where they are disjoint and have no other nodes; each other node alone."""
    left, parts = set(nodes), []
    for group in (*groups, *((node,) for node in nodes)):
        if left.issuperset(group):
            left -= set(group)
            parts.append(group)
    return parts


def _round_robin(nodes: Group) -> Iterator[tuple[Group, ...]]:
    """Rounds in which each node meets each other once; of an odd number one is alone."""
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield tuple(tuple(node for node in pair if node is not None) for pair in pairs)
        seats.insert(1, seats.pop())


def _shuffled(nodes: Group, seed: int) -> Group:
    return tuple(sorted(nodes, key=lambda node: sha256(f"{seed} {node}".encode()).digest()))

"""Find slow or failing nodes and links by running groups of nodes and regrouping them. No clock, no I/O.

1. All nodes in pairs, at the same time. Each node of a bad pair is tested with other partners that are good: bad with
   them too, it is a bad node; if both are good with others and bad together again, their link is bad.
2. Pairs test few of the links, so good groups are merged two by two until all nodes are in one: log2 N rounds test
   every link. Inside a bad merge of two good groups, cross halves of both lead to the pair whose link is bad.

Training is synchronous: a group is as slow as its slowest node or link, so one good run clears all that is in it.
A single bad run accuses nobody: tests are repeated until ``evidence`` decides. Good nodes that a test leaves idle run
beside it in groups of its size, as controls: so the load stays the same, and it is compared with its like.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain, combinations, islice, pairwise, zip_longest
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from labctl.batches import evidence
from labctl.system import human

Group = tuple[str, ...]
"""The nodes of one run."""

FAILURES = 2
"""Failed tests of a node or link, and none that passed, after which it is failing."""
NOT_CONFIRMED = "It was slow in one of two series of rounds, a minute apart, and not in the other."
"""Note of a diagnosis with nodes or links that were not slow again."""
MAX_TESTS = 16
"""Tests of one node or link at most; it is unsure without a verdict by then."""


class Outcome(Struct, frozen=True):
    """Result of a run: the metric per node, higher is better; None and the reason if it failed or gave none."""

    value: float | None
    why: str = ""
    lost: float = 0.0
    """Share of the hosts' cores that other programs used."""


class Run(Struct, frozen=True, kw_only=True):
    """A run, and how it compares with others of its size."""

    nodes: Group
    value: float | None
    figure: float | None
    """Value as a share of the median of good runs of about its size; None if it failed."""
    bad: bool
    why: str = ""
    lost: float = 0.0
    """Share of its hosts' cores that other programs used."""
    peers: tuple[float, ...] = ()
    """Sorted values of groups of its size in the same round, without those under test if there are enough others."""


class BadNode(Struct, frozen=True, kw_only=True):
    """A node that is slow or failing, with the runs that show it."""

    node: str
    kind: Literal["slow", "failing"]
    figure: float | None
    """The median of its bad runs' figures; None if it is failing, or nothing was comparable."""
    runs: tuple[Run, ...]
    """Tests of the node, with partners that are good with others, or alone if no such partner is known."""
    p: float | None = None
    """Upper bound of the probability that noise alone makes it look so slow; None where that is not known."""
    minimum: float | None = None
    """Value below which a run is bad, if there was one."""


class BadLink(Struct, frozen=True, kw_only=True):
    """A link between two good nodes that is slow or failing, with the runs that show it."""

    nodes: tuple[str, str]
    kind: Literal["slow", "failing"]
    figure: float | None
    """The median of its bad runs' figures; None if it is failing, or nothing was comparable."""
    runs: tuple[Run, ...]
    """Tests of the two nodes together."""
    apart: tuple[Run, ...]
    """A good run of each node without the other."""
    minimum: float | None = None
    """Value below which a run is bad, if there was one."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """Result of a bisection: bad nodes, bad links, good and unsure nodes, and groups that stay unexplained."""

    bad: tuple[BadNode, ...]
    links: tuple[BadLink, ...]
    good: tuple[str, ...]
    """Nodes that are good with others, also at the ends of bad links."""
    unsure: tuple[str, ...]
    """Nodes whose tests contradict each other, or were cut short by the limit, or had nothing to compare with."""
    unexplained: tuple[Run, ...]
    """Groups that are bad only as a whole: no node or link in them was found bad; size may be the reason."""
    rounds: int
    runs: int
    note: str = ""
    """Limitation of the diagnosis, as text."""
    none_good: bool = False
    """No run was good."""

    @property
    def slow(self) -> tuple[str, ...]:
        """Return the names of slow nodes and links."""
        links = (" - ".join(link.nodes) for link in self.links if link.kind == "slow")
        return (*(bad.node for bad in self.bad if bad.kind == "slow"), *links)


T = TypeVar("T")
Steps = Generator[tuple[Group, ...], Mapping[Group, Outcome], T]
"""Generator that yields rounds (groups to run at the same time), takes their outcomes, and returns a ``T``."""


def diagnose(
    nodes: tuple[str, ...],
    *,
    within: float = 0.1,
    minimum: float | None = None,
    seed: int = 0,
    rounds: int = 100,
    figures: int = 1,
    notice: Callable[[str], None] = lambda _: None,
) -> Steps[Diagnosis]:
    """Yield rounds of disjoint groups to run at once; take outcomes by send(); return bad nodes and links.

    A run is bad if it failed, if its value per node is below ``minimum``, or if it is more than ``within`` below the
    median of good runs of about its size; up to a third of the nodes may be bad. ``seed`` shuffles the nodes: another
    seed pairs them differently. After ``rounds`` rounds, or if Stopped is thrown in, nodes without a verdict are
    unsure. The false accusations that are allowed are shared with so many ``figures``. ``notice`` gets a line for each
    round, and for each bad node or link as soon as it is certain.

    Two nodes have no other pair to compare with: a slow link between them is found only with ``minimum``.
    """
    bisection = _Bisection(_shuffled(nodes, seed), within, minimum, rounds, figures, notice)
    try:
        yield from bisection.all_nodes()
    except Stopped as stopped:
        return bisection.diagnosis(nodes, str(stopped))
    return bisection.diagnosis(nodes)


def confirm(
    first: Diagnosis,
    *,
    within: float = 0.1,
    minimum: float | None = None,
    seed: int = 0,
    rounds: int = 100,
    figures: int = 1,
    notice: Callable[[str], None] = lambda _: None,
) -> Steps[Diagnosis]:
    """Yield rounds that test a diagnosis's slow nodes and links again; return it, unconfirmed ones unsure.

    What is not bad again is unsure. ``rounds`` and the others are those of ``diagnose``.
    """
    slow = [bad for bad in first.bad if bad.kind == "slow"]
    links = [link for link in first.links if link.kind == "slow"]
    failing = {bad.node: bad for bad in first.bad if bad.kind == "failing"}
    nodes = tuple(bad.node for bad in first.bad) + first.good + first.unsure
    again = _Bisection(_shuffled(nodes, seed), within, minimum, rounds, figures, notice)
    again.good, again.bad = set(first.good), dict(failing)
    note = ""
    try:
        yield from again.opening()
        # Of two nodes, each is compared with the other one.
        suspects = nodes if len(nodes) == 2 else tuple(bad.node for bad in slow)
        yield from again.resolve([link.nodes for link in links], suspects)
    except Stopped as stopped:
        note = str(stopped)
    confirmed = {link.nodes for link in again.links}
    not_bad = {bad.node for bad in slow} - again.bad.keys()
    not_links = [link for link in links if link.nodes not in confirmed]
    doubted = not_bad.union(*(link.nodes for link in not_links))
    if doubted:
        note = note or NOT_CONFIRMED
    return replace(
        first,
        bad=tuple(bad for bad in first.bad if bad.node not in not_bad),
        links=tuple(link for link in first.links if link not in not_links),
        good=tuple(node for node in first.good if node not in doubted),
        unsure=tuple(node for node in nodes if node in doubted or node in first.unsure),
        rounds=first.rounds + again.rounds,
        runs=first.runs + len(again.record),
        note=note or first.note,
    )


class Stopped(Exception):
    """The search ends before its time, for this reason; it returns what it knows."""


class _Bisection:
    """State of a bisection. Methods that return Steps run groups."""

    def __init__(
        self,
        order: Group,
        within: float,
        minimum: float | None,
        limit: int,
        figures: int,
        notice: Callable[[str], None],
    ) -> None:
        """Start without runs; ``order`` is the shuffled nodes, ``limit`` the number of rounds."""
        self.order, self.within, self.minimum, self.limit, self.notice = order, within, minimum, limit, notice
        self.figures = figures
        self.rounds = 0
        self.doing = "all nodes in pairs"
        """Reason of the next round."""
        self.record: list[Run] = []
        self.good: set[str] = set()
        """Nodes that were in a good run with others."""
        self.bad: dict[str, BadNode] = {}
        self.links: list[BadLink] = []
        self.barred: defaultdict[str, set[str]] = defaultdict(set)
        """Per node, the other ends of its bad links."""
        self.bad_with: defaultdict[str, set[str]] = defaultdict(set)
        """Per node, the nodes that it was in a bad pair with."""
        self.suspects: set[str] = set()
        """Nodes under test, which cannot be partners of others."""
        self.unsure: set[str] = set()
        self.unexplained: list[Group] = []
        """Bad groups in which no bad node or link was found so far."""
        self.values: defaultdict[int, list[float]] = defaultdict(list)
        """Values of good runs, by scale."""

    def all_nodes(self) -> Steps[None]:
        """Yield the rounds of the whole search: pairs, then suspects, then links; record bad nodes and links."""
        opening = yield from self.opening()
        if not self.good and len(self.order) > 2:
            yield from self.resolve([], self.order)
            return
        bad = [run.nodes for run in opening if run.bad]
        yield from self.resolve(bad, self.first_suspects(bad))
        if len(self.order) > 3:
            yield from self.bad_links([run.nodes for run in opening if not run.bad])

    def first_suspects(self, bad: Iterable[Group]) -> list[str]:
        """Return nodes of bad groups that ran alone or were in no good run."""
        suspects: list[str] = []
        for group in bad:
            suspects += [node for node in group if len(group) == 1 or node not in self.good]
        return suspects

    def bad_links(self, good: list[Group]) -> Steps[None]:
        """Merge good groups until all nodes are in one, then test untested ends of bad links; record bad ones."""
        groups = _partition(self.usable(self.order), good)
        while len(groups) > 1:
            groups = yield from self.check(_merge(groups))
        # The merges had one end of each bad link: test the other ends too.
        left_out = [node for node in self.barred if node not in set().union(*groups)]
        if left_out and groups:
            yield from self.check([self.usable((*left_out, *groups[0]))])
        while pairs := self.apart():
            yield from self.resolve((yield from self.run(pairs)), [])

    def opening(self) -> Steps[list[Run]]:
        """Run 3 rounds of pairs at most until one is good, of 2 or 3 nodes all, and each alone; return the runs."""
        turns = list(islice(_round_robin(self.order), 3))
        if len(self.order) == 2:
            turns.append(tuple((node,) for node in self.order))
        outcomes: dict[Group, Outcome] = {}
        runs: list[Run] = []
        for turn in turns:
            outcomes.update((yield from self.ask(turn)))
            runs = self.compare(outcomes)
            if len(self.order) > 3 and any(len(run.nodes) > 1 and not run.bad for run in runs):
                break
        self.learn(runs)
        return runs

    def resolve(self, groups: Iterable[Group], suspects: Iterable[str]) -> Steps[list[Group]]:
        """Test suspects, then bad pairs; record verdicts; return the groups with bad or unsure nodes or links."""
        tests = yield from self.settle([(node,) for node in dict.fromkeys(suspects)])
        for (node,), runs in tests.items():
            verdict = self.verdict(runs, len(self.order))
            if verdict == "bad":
                kind, figure = _summary(runs)
                p = self.p(runs) if kind == "slow" else None
                self.bad[node] = BadNode(
                    node=node, kind=kind, figure=figure, runs=tuple(runs), p=p, minimum=self.minimum
                )
                self.notice(f"{node} is {kind}: {shown_by(self.bad[node])}, round {self.rounds}")
            elif verdict == "unsure":
                self.unsure.add(node)
        pairs: list[Group] = [group for group in groups if len(group) == 2 and self.usable(group) == group]
        tests = yield from self.settle(pairs)
        for pair, runs in tests.items():
            verdict = self.verdict(runs, self.links_of_all)
            if verdict == "bad":
                link = self.bad_link((pair[0], pair[1]), runs)
                self.links.append(link)
                self.notice(f"the link {' - '.join(pair)} is {link.kind}: {shown_by(link)}, round {self.rounds}")
                self.barred[pair[0]].add(pair[1])
                self.barred[pair[1]].add(pair[0])
            elif verdict == "unsure":
                self.unsure |= set(pair)
        return [group for group in groups if self.usable(group) != group]

    def settle(self, subjects: list[Group]) -> Steps[dict[Group, list[Run]]]:
        """Test each pair, or node with a partner, until its verdict is sure or tests run out; return runs by it.

        Earlier runs count too, except the first one: it was bad, which is why the subject is tested.
        """
        before: defaultdict[Group, list[Run]] = defaultdict(list)
        for run in self.record:
            before[run.nodes].append(run)
        tests = {subject: before[subject][1:] for subject in subjects}
        while left := [subject for subject, runs in tests.items() if self.is_open(subject, runs)]:
            self.suspects = {node for subject in left for node in subject}
            subjects_text = human.listed(" - ".join(subject) for subject in left)
            self.doing = f"{subjects_text} again, nodes with partners that are good"
            groups = self.with_partners(left, tests)
            yield from self.run(list(groups.values()))
            latest = {run.nodes: run for run in self.record[-len(groups) :]}
            for subject, group in groups.items():
                tests[subject].append(latest[group])
        self.suspects = set()
        return tests

    @property
    def links_of_all(self) -> int:
        """Return the number of links between all nodes."""
        return len(self.order) * (len(self.order) - 1) // 2

    def is_open(self, subject: Group, runs: Sequence[Run]) -> bool:
        """Tell if these tests of a node or link are not enough for a verdict, and more are allowed."""
        of_kind = len(self.order) if len(subject) == 1 else self.links_of_all
        return len(runs) < MAX_TESTS and self.verdict(runs, of_kind) == "unsure"

    def verdict(self, runs: Sequence[Run], of_kind: int) -> evidence.Verdict:
        """Return bad, good or unsure by tests of a node or link; bad at once if FAILURES or more all failed.

        Half of the false accusations that are allowed are for nodes, half for links.
        """
        if len(runs) >= FAILURES and all(run.value is None for run in runs):
            return "bad"
        enough = 1 / evidence.error_per_test(of_kind, 2 * self.figures)
        if 1 / self.p(runs) >= enough:
            return "bad"
        misses = sum(run.bad for run in runs)
        return "good" if len(runs) - 2 * misses >= evidence.CLEARED else "unsure"

    def p(self, runs: Iterable[Run]) -> float:
        """Return an upper bound of the probability that noise alone makes these tests so slow."""
        undisturbed = [run for run in runs if run.lost <= evidence.DISTURBED]
        return 1 / evidence.evidence((self.is_slow(run), self.odds(run)) for run in undisturbed)

    def odds(self, run: Run) -> float:
        """Return N: at most one in N tests of a good node is slower than its peers by ``within``.

        Disturbances meet the groups of a round independently, each with a probability p: that of n groups one alone is
        met is at most that of p = 1/n. Of peers that differ among themselves by ``within``, more were met: then the
        slowest is any of them.
        """
        many = len(run.peers)
        if many < 2:
            # Whether a single peer was met cannot be seen: either may be the slower one.
            return 2.0
        if many >= evidence.OUTLIERS or run.peers[0] < (1 - self.within) * run.peers[-1]:
            return evidence.odds(many)
        return (many + 1) * (1 + 1 / many) ** many

    def is_slow(self, run: Run) -> bool:
        """Tell if a test failed, is below the minimum or its slowest peer by ``within``; or bad, without peers."""
        if run.value is None or not run.peers:
            return run.bad
        possible = evidence.undisturbed(run.value, run.lost)
        below = self.minimum is not None and possible < self.minimum
        return below or possible < (1 - self.within) * evidence.slowest(run.peers)

    def with_partners(self, subjects: list[Group], tests: Mapping[Group, list[Run]]) -> dict[Group, Group]:
        """Map subjects to disjoint groups: a pair itself, a node with a free partner; alone if none exists.

        Subjects for which no partner is free are left out.
        """
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
                partner = self.partner(node, free, tests[subject])
                free.remove(partner)
                group = (node, partner)
            if busy.isdisjoint(group):
                busy.update(group)
                groups[subject] = group
        return groups

    def partner(self, node: str, free: Sequence[str], runs: Iterable[Run]) -> str:
        """Return the node of ``free`` that a node has met least in these tests and earlier bad pairs."""
        met = Counter(chain.from_iterable(run.nodes for run in runs))
        met.update(self.bad_with[node])
        return min(free, key=met.__getitem__)

    def check(self, groups: list[Group]) -> Steps[list[Group]]:
        """Run merged groups and search bad ones for nodes and links; return the good rest of the groups."""
        left = (len(groups) - 1).bit_length()
        self.doing = f"good groups together, as a link between them may be bad; {left} more such rounds"
        bad = yield from self.run(groups)
        bad = yield from self.run(bad)
        good = [group for group in groups if group not in bad]
        explained = self.unexplained
        progress = True
        while bad and progress:
            self.unexplained = explained + bad
            self.doing = "halves of groups that are bad together"
            pairs = yield from self.search(bad)
            progress = bool((yield from self.resolve(pairs, [node for pair in pairs for node in pair])))
            rest = [group for group in map(self.usable, bad) if group]
            bad = yield from self.run([group for group in rest if len(group) > 1])
            good += [group for group in rest if group not in bad]
        self.unexplained = explained + bad
        return good

    def search(self, groups: list[Group]) -> Steps[list[Group]]:
        """Run bad groups in halves, in halves of those and so on; return the pairs that are bad."""
        if not groups:
            return []
        bad_pairs = yield from self.run([group for group in groups if len(group) == 2])
        larger = [group for group in groups if len(group) > 2]
        for way in _WAYS:
            halves = chain.from_iterable(_halves(group, way) for group in larger)
            bad = yield from self.run([half for half in halves if len(half) > 1])
            pairs = yield from self.search(bad)
            bad_pairs += pairs
            larger = [group for group in larger if not _has_any(group, pairs)]
        return bad_pairs

    def run(self, tests: list[Group]) -> Steps[list[Group]]:
        """Run groups and controls in one round and record them; return the bad groups. Stopped at the limit."""
        if not tests:
            return []
        controls = self.controls(tests)
        runs = self.compare((yield from self.ask((*controls, *tests))), controls)
        self.learn(runs)
        return [run.nodes for run in runs[len(controls) :] if run.bad]

    def ask(self, groups: tuple[Group, ...]) -> Steps[dict[Group, Outcome]]:
        """Yield groups as one round and return their outcomes by group. Stopped if the limit of rounds is reached."""
        if self.rounds == self.limit:
            raise Stopped(f"The limit of {self.limit} rounds was reached.")
        self.rounds += 1
        self.notice(f"round {self.rounds}: {self.doing}")
        outcomes = yield groups
        return {group: outcomes[group] for group in groups}

    def controls(self, tests: list[Group]) -> list[Group]:
        """Return groups as large as the largest test, of idle good nodes, in another order each round."""
        busy = set().union(*tests)
        # The same groups in each round would be the same bad links.
        idle = _shuffled(self.usable([node for node in self.partners() if node not in busy]), self.rounds)
        size = max(2, *map(len, tests))
        return [idle[start : start + size] for start in range(0, len(idle) - size + 1, size)]

    def apart(self) -> list[Group]:
        """Return disjoint pairs to test: ends of different bad links that no good run had together."""
        ends = [node for node in self.barred if self.usable([node])]
        together = [set(run.nodes) for run in self.record if not run.bad and len(set(ends) & set(run.nodes)) > 1]
        pairs: list[Group] = []
        for a, b in combinations(ends, 2):
            tested = b in self.barred[a] or any({a, b} <= nodes for nodes in together)
            if not tested and {a, b}.isdisjoint(chain.from_iterable(pairs)):
                pairs.append((a, b))
        return pairs

    def partners(self) -> list[str]:
        """Return good nodes that are not under test; none of a lab of two, which differ only when each runs alone."""
        if len(self.order) == 2:
            return []
        return [node for node in self.usable(self.order) if node in self.good and node not in self.suspects]

    def usable(self, nodes: Iterable[str]) -> Group:
        """Return these nodes without bad and unsure ones, and with only the first end of each bad link."""
        taken: list[str] = []
        barred: set[str] = set()
        for node in nodes:
            if node not in self.bad and node not in self.unsure and node not in barred:
                taken.append(node)
                barred |= self.barred.get(node, set())
        return tuple(taken)

    def compare(self, outcomes: Mapping[Group, Outcome], controls: Sequence[Group] | None = None) -> list[Run]:
        """Judge runs by the median of three or more controls of their size, else of the round and earlier runs."""
        controlled, of_scale = defaultdict(list), defaultdict(list)
        for group, outcome in outcomes.items():
            of_scale[_scale(group)].append(outcome.value or 0.0)
        for group in controls or ():
            controlled[_scale(group)].append(outcomes[group].value or 0.0)
        medians = {}
        for scale, values in of_scale.items():
            comparable = controlled[scale] if len(controlled[scale]) >= 3 else values + self.values[scale]
            smaller = self.values[scale - 1] if scale > 1 else []
            # A single run of its size has only smaller groups to compare with. If there are others, all of them may
            # lose twice `within` by being twice as large.
            medians[scale] = self.median(comparable if len(comparable) > 1 else comparable + smaller)
            if smaller:
                medians[scale] = max(medians[scale], (1 - 2 * self.within) * self.median(smaller))
        peers = {} if controls is None else self.peers(outcomes, controls)
        return [
            self.judged(group, outcome, medians[_scale(group)], peers.get(group, ()))
            for group, outcome in outcomes.items()
        ]

    def peers(self, outcomes: Mapping[Group, Outcome], controls: Sequence[Group]) -> dict[Group, tuple[float, ...]]:
        """Map each test to the values it is compared with: controls of its size, else all others of that size."""
        tests = [group for group in outcomes if group not in set(controls)]
        peers = {}
        for test in tests:
            chosen = [group for group in controls if _scale(group) == _scale(test)]
            if len(chosen) < evidence.FEWEST_REFERENCES:
                chosen = [group for group in outcomes if group != test and _scale(group) == _scale(test)]
            peers[test] = tuple(sorted(outcomes[group].value or 0.0 for group in chosen))
        return peers

    def median(self, values: list[float]) -> float:
        """Return the median of values at most 1.5 ``within`` below the upper quartile."""
        from statistics import median

        top = sorted(values)[len(values) * 3 // 4]
        return median(value for value in values if value >= (1 - 1.5 * self.within) * top)

    def judged(self, nodes: Group, outcome: Outcome, median: float, peers: tuple[float, ...]) -> Run:
        """Return a run, bad if failed, below the minimum, or more than ``within`` below the median."""
        value = outcome.value
        figure = None if value is None or not median else value / median
        # The bandwidth of a single rank is 0 by definition, and no evidence against its node.
        alone = len(nodes) == 1 and value == 0
        low = self.minimum is not None and not alone and value is not None and value < self.minimum
        bad = value is None or value < (1 - self.within) * median or low
        return Run(nodes=nodes, value=value, figure=figure, bad=bad, why=outcome.why, lost=outcome.lost, peers=peers)

    def learn(self, runs: list[Run]) -> None:
        """Record runs: the nodes of good ones as good, bad pairs, and good values for later comparison."""
        self.record += runs
        for run in runs:
            if run.bad and len(run.nodes) == 2:
                self.bad_with[run.nodes[0]].add(run.nodes[1])
                self.bad_with[run.nodes[1]].add(run.nodes[0])
            if not run.bad and run.value is not None:
                self.values[_scale(run.nodes)].append(run.value)
                # A run of a single node does not test the network, but of two nodes no better test exists.
                if len(run.nodes) > 1 or len(self.order) < 3:
                    self.good.update(run.nodes)

    def bad_link(self, nodes: tuple[str, str], runs: list[Run]) -> BadLink:
        """Build a bad link with kind, figure, its runs, and for each end a good run without the other if any."""
        kind, figure = _summary(runs)
        a, b = nodes
        apart = filter(None, (self.good_run(a, without=b), self.good_run(b, without=a)))
        return BadLink(
            nodes=nodes, kind=kind, figure=figure, runs=tuple(runs), apart=tuple(apart), minimum=self.minimum
        )

    def good_run(self, node: str, *, without: str) -> Run | None:
        """Return the latest good run of a node without another one; None if it had none."""
        good = (run for run in reversed(self.record) if not run.bad)
        return next((run for run in good if node in run.nodes and without not in run.nodes), None)

    def diagnosis(self, nodes: Group, note: str = "") -> Diagnosis:
        """Build the diagnosis from the runs so far; with a note and no bad node if no run was good."""
        if all(run.bad for run in self.record):
            self.bad = {}
            note = note or "No run was good: look at the workload, or at the minimum."
        elif not self.good:
            note = note or "No two nodes ran well together: there is no good partner to test others with."
        cleared = self.good - self.bad.keys() - self.suspects - self.unsure
        unsure = set(nodes) - self.bad.keys() - cleared
        bad = [self.bad[node] for node in nodes if node in self.bad]
        last = {run.nodes: run for run in self.record}
        return Diagnosis(
            bad=tuple(bad),
            links=tuple(self.links),
            good=tuple(filter(cleared.__contains__, nodes)),
            unsure=tuple(filter(unsure.__contains__, nodes)),
            unexplained=tuple(map(last.__getitem__, self.unexplained)),
            rounds=self.rounds,
            runs=len(self.record),
            note=note,
            none_good=bool(self.record) and all(run.bad for run in self.record),
        )


def shown_by(bad: BadNode | BadLink) -> str:
    """Render what shows that a node or link is bad: ``27 % of the others, p < 0.001``, or ``2 runs failed``."""
    if bad.kind == "failing":
        return f"{human.count(sum(run.value is None for run in bad.runs), 'run')} failed"
    below = [run for run in bad.runs if bad.minimum is not None and (run.value or 0.0) < bad.minimum]
    if bad.figure is None or 2 * len(below) > len(bad.runs):
        return f"below {human.number(bad.minimum)} in {len(below)} of {human.count(len(bad.runs), 'run')}"
    if isinstance(bad, BadNode) and bad.p is not None:
        return f"{human.share(bad.figure)} of the others, {evidence.p_text(bad.p)}"
    return f"{human.share(bad.figure)} of the median"


def _summary(runs: Iterable[Run]) -> tuple[Literal["slow", "failing"], float | None]:
    """Return kind and figure of bad tests: failing if most of them failed, else slow with their median."""
    from statistics import median

    bad = [run for run in runs if run.bad]
    figures = [run.figure for run in bad if run.figure is not None]
    if 2 * sum(run.value is None for run in bad) > len(bad):
        return "failing", None
    return "slow", median(figures) if figures else None


def _has_any(group: Group, pairs: Iterable[Group]) -> bool:
    """Tell if both nodes of any of the pairs are in the group."""
    return any(set(pair) <= set(group) for pair in pairs)


def _scale(group: Group) -> int:
    """Return the size class of a group, within which runs are compared: 1, 2, 3 to 4, 5 to 8 nodes, and so on."""
    return (len(group) - 1).bit_length()


# Halves of a group made of two good ones, by quarters: any two quarters are together in one way. The halves that cross
# come first, since what lies inside either half was good before.
_WAYS = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3)))


def _halves(group: Group, way: tuple[tuple[int, int], tuple[int, int]]) -> list[Group]:
    """Split a group into two halves, each of two quarters as ``way`` says."""
    cuts = [len(group) * number // 4 for number in range(5)]
    quarters = [group[start:stop] for start, stop in pairwise(cuts)]
    return [quarters[a] + quarters[b] for a, b in way]


def _merge(groups: list[Group]) -> list[Group]:
    """Merge groups two by two, the smallest first; of an odd number the largest stays."""
    ordered = sorted(groups, key=len)
    return [a + b for a, b in zip_longest(ordered[::2], ordered[1::2], fillvalue=())]


def _partition(nodes: Group, groups: list[Group]) -> list[Group]:
    """Return the given groups that are disjoint and within the nodes, and each node that is left as a group."""
    left, parts = set(nodes), []
    for group in (*groups, *((node,) for node in nodes)):
        if left.issuperset(group):
            left -= set(group)
            parts.append(group)
    return parts


def _round_robin(nodes: Group) -> Iterator[tuple[Group, ...]]:
    """Yield rounds in which each node meets each other one once; of an odd number, one node is alone."""
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield tuple(map(_taken, pairs))
        seats.insert(1, seats.pop())


def _taken(seats: Iterable[str | None]) -> Group:
    """Return the nodes of these seats without the empty one."""
    return tuple(node for node in seats if node is not None)


def _shuffled(nodes: Group, seed: int) -> Group:
    """Shuffle nodes in an order that depends only on the seed and their names."""
    return tuple(sorted(nodes, key=lambda node: sha256(f"{seed} {node}".encode()).digest()))

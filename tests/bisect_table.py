"""`python tests/bisect_table.py`: rounds, runs and accuracy of labctl/batches/bisect.py on simulated clusters."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from msgspec import Struct

sys.path.insert(0, str(Path(__file__).parents[1]))

from labctl.batches.bisect import Diagnosis, Group, Outcome, diagnose

FAILS = 0.0
"""Speed of a run that fails."""


class Cluster(Struct, frozen=True, kw_only=True):
    """A simulated cluster: a run is as fast as its slowest node or link. Speeds are relative to a good node's."""

    nodes: tuple[str, ...]
    slow: dict[str, float] = {}
    """Speed of the bad nodes."""
    links: dict[tuple[str, str], float] = {}
    """Speed of the bad links."""
    noise: float = 0.02
    """Standard deviation of a run."""
    accidents: float = 0.0
    """Share of runs that are slow or fail by chance."""
    growth: float = 0.0
    """Relative loss of speed each time the group doubles."""

    def run(self, group: Group, chance: random.Random) -> Outcome:
        """Return the outcome of a run: the speed of the slowest node or link in the group, with noise, or a failure."""
        members = set(group)
        speed = min((self.slow[node] for node in members & self.slow.keys()), default=1.0)
        speed = min([speed, *(value for ends, value in self.links.items() if members.issuperset(ends))])
        if self.accidents and chance.random() < self.accidents:
            speed = min(speed, chance.choice([FAILS, 0.6]))
        if speed == FAILS:
            return Outcome(None, "exit code 1")
        size = (1 - self.growth) ** (len(group) - 1).bit_length()
        return Outcome(100 * speed * size * chance.gauss(1, self.noise))


def solve(cluster: Cluster, seed: int = 0, **options: float) -> Diagnosis:
    """Let ``diagnose`` bisect a cluster; return its Diagnosis. AssertionError if groups of a round share a node."""
    chance = random.Random(seed)  # noqa: S311
    steps = diagnose(cluster.nodes, seed=seed, **options)  # type: ignore[arg-type]
    try:
        groups = next(steps)
        while True:
            named = [node for group in groups for node in group]
            assert len(set(named)) == len(named) > 0, "groups of a round share a node"
            groups = steps.send({group: cluster.run(group, chance) for group in groups})
    except StopIteration as stop:
        diagnosis: Diagnosis = stop.value
        return diagnosis


def names(count: int) -> tuple[str, ...]:
    """Return ``worker-0`` to ``worker-N``, ``count`` names."""
    return tuple(f"worker-{number}" for number in range(count))


Scenario = Callable[[int, random.Random], Cluster]


def one_node(speed: float) -> Scenario:
    """Return a scenario with one slow node."""
    return lambda count, chance: Cluster(nodes=names(count), slow={chance.choice(names(count)): speed})


def nodes(one_in: int, *speeds: float) -> Scenario:
    """Return a scenario in which one in ``one_in`` nodes, at least two, has one of the speeds."""

    def cluster(count: int, chance: random.Random) -> Cluster:
        bad = chance.sample(names(count), max(2, count // one_in))
        return Cluster(nodes=names(count), slow={node: chance.choice(speeds) for node in bad})

    return cluster


def links(how_many: int, bad_nodes: int = 0) -> Scenario:
    """Return a scenario with so many bad links between good nodes, and so many bad nodes."""

    def cluster(count: int, chance: random.Random) -> Cluster:
        """Draw a cluster with that many bad nodes, and bad links between good ones."""
        bad = chance.sample(names(count), bad_nodes)
        rest = [node for node in names(count) if node not in bad]
        slow = {node: chance.choice([FAILS, 0.7]) for node in bad}
        ends = {tuple(chance.sample(rest, 2)): chance.choice([FAILS, 0.5]) for _ in range(how_many)}
        return Cluster(
            nodes=names(count), slow=slow, links={(first, second): it for (first, second), it in ends.items()}
        )

    return cluster


def healthy(count: int, chance: random.Random) -> Cluster:
    """Return a cluster with nothing bad."""
    return Cluster(nodes=names(count))


def accidents(count: int, chance: random.Random) -> Cluster:
    """Return a cluster with one slow node, in which 1 % of the runs are slow or fail by chance."""
    return Cluster(nodes=names(count), slow={chance.choice(names(count)): 0.7}, accidents=0.01)


def noisy(count: int, chance: random.Random) -> Cluster:
    """Return a cluster with one slow node and 5 % noise."""
    return Cluster(nodes=names(count), slow={chance.choice(names(count)): 0.7}, noise=0.05)


SCENARIOS: dict[str, Scenario] = {
    "nothing bad": healthy,
    "one node at 0.7": one_node(0.7),
    "one node at 0.85": one_node(0.85),
    "one failing node": one_node(FAILS),
    "1 in 20 nodes failing, at 0.7 or at 0.85": nodes(20, FAILS, 0.7, 0.85),
    "1 in 4 nodes failing or at 0.7": nodes(4, FAILS, 0.7),
    "one bad link": links(1),
    "two bad nodes, three bad links": links(3, bad_nodes=2),
    "one node at 0.7, 1 % accidents": accidents,
    "one node at 0.7, 5 % noise": noisy,
}
HEAD = """\
| nodes | scenario | seeds | rounds: mean | max | runs | found | wrong | all pairs: rounds | runs |
|---|---|---|---|---|---|---|---|---|---|
"""
SIZES = (8, 16, 64, 256, 1024, 4096)


class Score(Struct, frozen=True, kw_only=True):
    rounds: int
    runs: int
    bad: int
    """Bad nodes and links."""
    found: int
    wrong: int
    """Good nodes and links that were accused."""
    unsure: int


def score(scenario: Scenario, count: int, seed: int) -> Score:
    """Bisect a random cluster of a scenario; count bad subjects, right and wrong accusations, and unsure nodes."""
    cluster = scenario(count, random.Random(f"{count} {seed}"))  # noqa: S311
    diagnosis = solve(cluster, seed)
    bad = {*cluster.slow, *map(frozenset, cluster.links)}
    accused = {*(node.node for node in diagnosis.bad), *(frozenset(link.nodes) for link in diagnosis.links)}
    return Score(
        rounds=diagnosis.rounds,
        runs=diagnosis.runs,
        bad=len(bad),
        found=len(bad & accused),
        wrong=len(accused - bad),
        unsure=len(diagnosis.unsure),
    )


def main() -> None:
    """Bisect clusters of each size and scenario with many seeds, and print a table of rounds, runs and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=0, help="per row; by default 400, fewer from 256 nodes on, 20 at least"
    )
    parser.add_argument("--only", default="", help="scenarios whose name holds this text")
    options = parser.parse_args()
    sys.stdout.write(HEAD)
    for count in SIZES:
        seeds = options.seeds or max(20, min(400, 51200 // count))
        for name, scenario in SCENARIOS.items():
            if options.only in name:
                scores = [score(scenario, count, seed) for seed in range(seeds)]
                sys.stdout.write(f"{row(count, name, scores)}\n")
                sys.stdout.flush()


def row(count: int, name: str, scores: list[Score]) -> str:
    """Render the scores of a scenario at one size as a row of the table."""
    rounds, bad = [score.rounds for score in scores], sum(score.bad for score in scores)
    accused = f"{sum(score.found for score in scores)} of {bad}" if bad else ""
    wrong, runs = sum(score.wrong for score in scores), mean(score.runs for score in scores)
    return (
        f"| {count:,} | {name} | {len(scores)} | {mean(rounds):.1f} | {max(rounds)} | "
        f"{runs:,.0f} | {accused} | {wrong} | {count - 1:,} | {count * (count - 1) // 2:,} |"
    )


if __name__ == "__main__":
    main()

"""`python tests/validation_table.py`: error rates of `validate` and `bisect`, by thousands drawn from recorded noise.

`record` measures noise on labs of this machine: 200 readings a way, in four minutes or so; nothing else may run here.
`validate` (the default) and `bisect` simulate from the recordings; `episodes` needs none: its hosts are slow at times.
A quota slows a node's readings by its factor; what other programs take from it stays as it was recorded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import noise_recording
import numpy as np
from bisect_table import FAILS, Cluster, names, solve
from msgspec import Struct
from noise_recording import DATA, Drawn, Floats, Recording, Series
from noise_table import LABCTL, LABS, LOADS, OpenLab, load
from simulated_trial import EACH, TURNS, Draw, Judgement, by_arrays, by_trial

from labctl.batches import turns
from labctl.batches.bisect import Group, Outcome
from labctl.batches.profile import Profile

WITHIN = Profile(name="", description="", checks=()).within
MEASUREMENTS = 200
START = 15.0
"""Seconds until a run of matmul measures."""
SIZES = (4, 16, 64, 256, 1024)
SPEEDS = (None, 0.75, 0.5, 0.2)
"""Speed of the bad nodes; None without any."""
MOST_BAD = 4
SAMPLE = 50
"""Number of validations of which labctl's own loop does one, too, of many nodes ten times as many: the verdicts must
be equal."""


# --- record --------------------------------------------------------------------------------------------------


def record(only: str, loads: Sequence[str], out: Path) -> None:
    """Record each lab of `noise_table` whose name contains ``only``, under each load, into ``out``."""
    for name, opened in LABS.items():
        if only in name:
            with opened() as lab:
                record_lab(name, lab, loads, out)


def record_lab(name: str, lab: OpenLab, loads: Sequence[str], out: Path) -> None:
    """Bring a lab up, write a recording of a run of turns under each load into ``out``, and remove the lab."""
    nodes = names(lab.nodes)
    run = partial(
        subprocess.run,
        cwd=lab.path,
        env=lab.environ,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        run((LABCTL, "up"))
        for kind in loads:
            with load(kind):
                began = time.monotonic()
                output = run((LABCTL, *command(len(nodes)))).stdout
                seconds = time.monotonic() - began
            written = noise_recording.write(recorded(name, kind, output, nodes, seconds), out)
            sys.stdout.write(f"{written}: {round(seconds)} s\n")
            sys.stdout.flush()
    finally:
        run((LABCTL, "down"))


def command(nodes: int) -> tuple[str, ...]:
    """Return labctl's arguments for a run of MEASUREMENTS readings of matmul, taken as in the profile quick."""
    return ("run", "matmul", "--timeout", "15m", "--set", "rounds=2", "--set", f"turns={MEASUREMENTS // nodes}")


def recorded(lab: str, load: str, output: str, nodes: Sequence[str], seconds: float) -> Recording:
    """Return the recording that a run printed in so many seconds. ValueError if it lacks turns."""
    rounds = turns.read(output.splitlines(), nodes)
    if len(rounds) * len(nodes) < MEASUREMENTS:
        raise ValueError(f"{lab}, {load}: {len(rounds)} rounds of {len(nodes)} nodes, not {MEASUREMENTS} readings")
    return noise_recording.recorded(lab, load, rounds, (seconds - START) / (len(rounds) * len(nodes)))


# --- counts --------------------------------------------------------------------------------------------------


class Count(Struct, frozen=True):
    """A number of cases, of how many."""

    many: int
    of: int

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the probability (Wilson, J. of the American Statistical Association 22, 1927)."""
        z, share = 1.96, self.many / self.of
        middle = share + z * z / (2 * self.of)
        width = z * sqrt(share * (1 - share) / self.of + z * z / (4 * self.of**2))
        low, high = ((middle + sign * width) / (1 + z * z / self.of) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)

    def text(self) -> str:
        """Render as ``0.1 % (0 to 0.3)``; empty of no cases."""
        if not self.of:
            return ""
        low, high = self.interval()
        return f"{self.many / self.of:.1%} ({100 * low:.1f} to {100 * high:.1f})".replace("%", " %")


def count(cases: Iterable[bool]) -> Count:
    """Count all cases and the true ones."""
    listed = list(cases)
    return Count(sum(listed), len(listed))


def line(*cells: object) -> None:
    """Print cells as a row of a Markdown table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def head(*cells: str) -> None:
    """Print cells as the heading of a Markdown table."""
    line(*cells)
    sys.stdout.write(f"{'|---' * len(cells)}|\n")


def layouts(recording: Recording) -> dict[str, Series]:
    """Return the series that a recording stands for, by name: nodes as recorded, and a node per host."""
    return {
        f"{recording.nodes} nodes a host": noise_recording.as_recorded(recording),
        "a node a host": noise_recording.node_each(recording),
    }


# --- validate ------------------------------------------------------------------------------------------------


class Validated(Struct, frozen=True):
    """A simulated validation, and its bad nodes."""

    judged: Judgement
    bad: frozenset[int]

    @property
    def accuses_good(self) -> bool:
        """True if a good node's verdict is bad."""
        return any(word == "bad" and node not in self.bad for node, word in enumerate(self.judged.verdicts))

    @property
    def is_unsure(self) -> bool:
        """True if a node's verdict is unsure, and none's is bad."""
        return "unsure" in self.judged.verdicts and "bad" not in self.judged.verdicts

    def of_bad(self, verdict: str) -> list[bool]:
        """Return, for each bad node, True if it has this verdict."""
        return [self.judged.verdicts[node] == verdict for node in sorted(self.bad)]


def factors(nodes: int, speed: float | None, chance: np.random.Generator) -> Floats:
    """Return the speed of each node: one to four, at most half of them, are bad; none without a speed."""
    of_node = np.ones(nodes)
    if speed is not None:
        many = int(chance.integers(1, min(MOST_BAD, nodes // 2) + 1))
        of_node[chance.choice(nodes, many, replace=False)] = speed
    return of_node


def slowed(drawn: Drawn, of_node: Floats) -> Drawn:
    """Multiply the readings by the speed of each node; keep the lost time."""
    return Drawn(speeds=drawn.speeds * of_node, lost=drawn.lost)


def validated(series: Series, nodes: int, speed: float | None, seed: int) -> Validated:
    """Simulate a validation. AssertionError if, in one of the sample, labctl's own verdicts differ."""

    def source() -> tuple[Floats, Draw]:
        """Return the nodes' speeds and a function that draws rounds, the same in each call."""
        chance = np.random.default_rng([seed, nodes])
        of_node = factors(nodes, speed, chance)
        return of_node, lambda rounds: slowed(noise_recording.draw(series, nodes, rounds, chance), of_node)

    of_node, draw = source()
    judged = by_arrays(draw, nodes, WITHIN)
    if seed % (SAMPLE if nodes < 256 else 10 * SAMPLE) == 0:
        assert by_trial(source()[1], nodes, WITHIN) == judged, f"{nodes} nodes, {speed}, seed {seed}"
    return Validated(judged, frozenset(np.flatnonzero(of_node < 1).tolist()))


def seconds(series: Series, judged: Judgement) -> float:
    """Return how long the runs of a validation's matmul take."""
    return judged.runs * START + judged.rounds * series.seconds


def validations(recordings: Sequence[Recording], sizes: Sequence[int], many: int) -> Iterator[str]:
    """Print a row per recording, layout, size and speed of validations; yield a text for each missed goal."""
    head(
        *("lab", "load", "hosts", "nodes", "bad at", "false accusations", "found bad", "called good", "unsure nodes"),
        *("unsure", "rounds", "seconds"),
    )
    for recording in recordings:
        for (hosts, series), size, speed in product(layouts(recording).items(), sizes, SPEEDS):
            if size < series.nodes:
                continue
            done = [validated(series, size, speed, seed) for seed in range(many)]
            false, unsure = count(one.accuses_good for one in done), count(one.is_unsure for one in done)
            found, good, unknown = (
                count(case for one in done for case in one.of_bad(verdict)) for verdict in ("bad", "good", "unsure")
            )
            shown = "" if speed is None else f"{speed:g}"
            way = (recording.lab, recording.load, hosts, f"{size:,}", shown)
            line(
                *way,
                *(counted.text() for counted in (false, found, good, unknown, unsure)),
                round(median(one.judged.rounds for one in done)),
                round(median(seconds(series, one.judged) for one in done)),
            )
            for goal in missed(recording.load, speed, false, found, good, unsure):
                yield f"{', '.join(filter(None, way))}: {goal}"


FOUND = {0.75: 0.5, 0.5: 0.95, 0.2: 0.95}
"""Least share of bad nodes that is found on an idle machine, by their speed."""


def missed(load: str, speed: float | None, false: Count, found: Count, good: Count, unsure: Count) -> list[str]:
    """Return the goals that a row misses; the error rates count if their whole interval is above 1 %."""
    goals = {
        "more than 1 % false accusations": false.interval()[0] > 0.01,
        "more than 1 % of bad nodes called good": bool(good.of) and good.interval()[0] > 0.01,
    }
    if load == "idle" and speed is None:
        goals["more than 5 % unsure"] = unsure.many > 0.05 * unsure.of
    if load == "idle" and speed is not None:
        goals[f"less than {FOUND[speed]:.0%} found"] = found.many < FOUND[speed] * found.of
    return [goal for goal, is_missed in goals.items() if is_missed]


# --- bisect --------------------------------------------------------------------------------------------------

RUN = 5
"""Seconds, and so readings, whose median is the speed of a run on a node."""
PLANTS = (None, *product(("nodes", "links"), (0.7, FAILS)))


class RecordedCluster(Cluster, frozen=True, kw_only=True):
    """A cluster of hosts with a node each: a run is as fast as its slowest node, each of which has a recorded time."""

    speeds: Floats
    """Speed of a run at each recorded time."""
    lost: Floats
    """Share of a host that others use just before it, when labctl reads the load."""

    def run(self, group: Group, chance: Random) -> Outcome:
        """Draw the outcome of a run: the slowest node's speed times the slowest link's, no value if one fails."""
        factors = [self.slow.get(node, 1.0) for node in group]
        link = min((speed for ends, speed in self.links.items() if set(group).issuperset(ends)), default=1.0)
        if FAILS in (link, *factors):
            return Outcome(None, "exit code 1")
        at = chance.choices(range(len(self.speeds)), k=len(group))
        return Outcome(float((self.speeds[at] * factors).min() * link), lost=float(self.lost[at].max()))


def runs_of(series: Series) -> tuple[Floats, Floats]:
    """Return the median speed of a run from each reading on, lost time included, and what others took just before."""
    proven = (series.speeds * (1 - series.lost))[:, 0]
    windows = np.lib.stride_tricks.sliding_window_view(proven[1:], RUN)
    return np.median(windows, axis=1), series.lost[: len(windows), 0]


def planted(recording: Recording, nodes: int, plant: tuple[str, float] | None, chance: Random) -> RecordedCluster:
    """Return a cluster with one to four bad nodes or links, at most a third as many as nodes; good without a plant."""
    speeds, lost = runs_of(noise_recording.node_each(recording))
    everyone, slow, links = names(nodes), dict[str, float](), dict[tuple[str, str], float]()
    many = chance.randint(1, min(MOST_BAD, nodes // 3))
    if plant and plant[0] == "nodes":
        slow = dict.fromkeys(chance.sample(everyone, many), plant[1])
    elif plant:
        pairs = [tuple(chance.sample(everyone, 2)) for _ in range(many)]
        links = {(min(pair), max(pair)): plant[1] for pair in pairs}
    return RecordedCluster(nodes=everyone, slow=slow, links=links, speeds=speeds, lost=lost)


class Searched(Struct, frozen=True):
    """A simulated bisection: of its bad nodes or links, how many it found, and the good ones that it accused."""

    bad: int
    found: int
    wrong: int
    good: int
    """Bad nodes that are called good."""
    unsure: bool
    rounds: int


def searched(recording: Recording, nodes: int, plant: tuple[str, float] | None, seed: int) -> Searched:
    """Simulate a bisection of a cluster with planted bad nodes or links; count those found and wrongly accused."""
    cluster = planted(recording, nodes, plant, Random(f"{nodes} {seed}"))  # noqa: S311
    diagnosis = solve(cluster, seed)
    bad = {*cluster.slow, *map(frozenset, cluster.links)}
    accused = {*(node.node for node in diagnosis.bad), *(frozenset(link.nodes) for link in diagnosis.links)}
    return Searched(
        bad=len(bad),
        found=len(bad & accused),
        wrong=len(accused - bad),
        good=len(set(cluster.slow).intersection(diagnosis.good)),
        unsure=bool(diagnosis.unsure),
        rounds=diagnosis.rounds,
    )


def fewer(many: int, nodes: int) -> int:
    """Return how many bisections to do: ``many``, fewer for more than 64 nodes, but 100 at least."""
    return min(many, max(100, many * 64 // nodes))


def bisections(recordings: Sequence[Recording], sizes: Sequence[int], many: int) -> Iterator[str]:
    """Print a row per recording, size and plant of bisections; yield a text if false accusations exceed 1 %."""
    head("lab", "load", "nodes", "bad", "false accusations", "found", "called good", "unsure", "rounds", "most")
    for recording, size, plant in product(recordings, sizes, PLANTS):
        done = [searched(recording, size, plant, seed) for seed in range(fewer(many, size))]
        false, unsure = count(one.wrong > 0 for one in done), count(one.unsure for one in done)
        bad = sum(one.bad for one in done)
        found = Count(sum(one.found for one in done), bad)
        good = Count(sum(one.good for one in done), bad if plant and plant[0] == "nodes" else 0)
        rounds = [one.rounds for one in done]
        shown = f"{plant[0]} {f'at {plant[1]:g}' if plant[1] else 'failing'}" if plant else ""
        way = (recording.lab, recording.load, f"{size:,}", shown)
        rates = (counted.text() for counted in (false, found, good, unsure))
        line(*way, *rates, round(median(rounds)), max(rounds))
        if false.interval()[0] > 0.01:
            yield f"{', '.join(filter(None, way))}: more than 1 % false accusations"


# --- episodes ------------------------------------------------------------------------------------------------

SLOWED, SLOW_TIME = 0.7, 0.1
"""Speed of a host in an episode, which the load does not show; share of the time that is in episodes."""
EPISODES, PAUSES = (5, 20, 60), (30, 60, 120)
"""Seconds of an episode, and between two series of rounds."""
SPREAD = 0.02
"""Standard deviation of a reading without an episode."""
SERIES = 4


class Pace(Struct, frozen=True):
    """Seconds between two rounds of a run, of a measurement, and between two runs."""

    interval: float
    measurement: float
    between: float


PACES = {"each": (EACH, Pace(6.0, 2.0, 0.0)), "turns": (TURNS, Pace(1.1, 1.0, 20.0))}


class Episodes:
    """Hosts with a node each that are slow in episodes of their own, of a fixed length, at random times."""

    def __init__(self, nodes: int, length: float, pace: Pace, chance: np.random.Generator) -> None:
        """Draw the beginnings of the episodes of ``nodes`` hosts, each ``length`` seconds long."""
        self.length, self.pace, self.chance, self.now = length, pace, chance, 0.0
        cycle = length / SLOW_TIME
        gaps = length + chance.exponential(cycle - length, size=(int(20 + 4000 / cycle), nodes))
        self.starts = gaps.cumsum(axis=0) - 5 * cycle

    def draw(self, rounds: int) -> Drawn:
        """Return the next rounds; all hosts measure at the same time."""
        began = self.now + self.pace.interval * np.arange(rounds)
        self.now = began[-1] + self.pace.interval + self.pace.between
        began = began[:, None, None]
        ends = np.minimum(self.starts + self.length, began + self.pace.measurement)
        share = (ends - np.maximum(self.starts, began)).clip(0).sum(axis=1) / self.pace.measurement
        speeds = (1 - (1 - SLOWED) * share) * self.chance.normal(1, SPREAD, share.shape)
        return Drawn(speeds=speeds, lost=np.zeros_like(speeds))


def accused_after(nodes: int, length: float, pause: float, way: str, seed: int) -> int:
    """Return how many series of rounds in a row, up to SERIES, all accuse a same good host."""
    check, pace = PACES[way]
    hosts = Episodes(nodes, length, pace, np.random.default_rng([seed, nodes]))
    accused = set(range(nodes))
    for number in range(SERIES):
        verdicts = by_arrays(hosts.draw, nodes, WITHIN, check).verdicts
        accused &= {node for node, verdict in enumerate(verdicts) if verdict == "bad"}
        if not accused:
            return number
        hosts.now += pause - pace.between
    return SERIES


def episodes(sizes: Sequence[int], many: int) -> Iterator[str]:
    """Print how often several series of rounds in turn accuse the same good host; yield nothing."""
    series = [f"false after {number} series" for number in range(1, SERIES + 1)]
    head("nodes", "measured", "episode, s", "pause, s", *series)
    for size, way, length, pause in product(sizes, PACES, EPISODES, PAUSES):
        after = [accused_after(size, length, pause, way, seed) for seed in range(many)]
        rates = (count(one > number for one in after).text() for number in range(SERIES))
        line(f"{size:,}", way, length, pause, *rates)
    yield from ()


# --- command -------------------------------------------------------------------------------------------------


def main() -> None:
    """Print the table of the chosen part and the missed goals, or record the labs for ``record``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", nargs="?", choices=("validate", "bisect", "episodes", "record"), default="validate")
    add("--validations", type=int, default=2000, help="of a row; bisections of more than 64 nodes are fewer")
    add("--nodes", type=int, action="append", help=f"default: {', '.join(map(str, SIZES))}")
    add("--lab", default="", help="labs whose name holds this text")
    add("--load", choices=LOADS, action="append")
    add("--data", type=Path, default=DATA, help="directory of recordings")
    options = parser.parse_args()
    loads, sizes = options.load or LOADS, options.nodes or SIZES
    if options.part == "record":
        record(options.lab, loads, options.data)
        return
    recordings = [one for one in noise_recording.read(options.data) if options.lab in one.lab and one.load in loads]
    if options.part != "episodes" and not recordings:
        parser.error(f"no recording in {options.data}: `python {sys.argv[0]} record` makes them")
    tables = {
        "validate": partial(validations, recordings, sizes),
        "bisect": partial(bisections, recordings, sizes),
        "episodes": partial(episodes, sizes),
    }
    goals = [f"- {goal}\n" for goal in tables[options.part](options.validations)]
    sys.stdout.write("".join(["\nMissed:\n", *goals]) if goals else "\n")


if __name__ == "__main__":
    main()

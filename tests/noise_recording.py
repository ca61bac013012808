"""Recorded noise: speeds of nodes that have nothing planted, and series of rounds that are drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from labctl.batches.evidence import Reading, Round

DATA = Path(__file__).with_name("data") / "noise"
BLOCK = 20.0
"""Seconds of a block: about three cycles of the bursts of load, the longest disturbance in the recordings (7 s)."""

Floats = NDArray[np.float64]


class Recording(Struct, frozen=True, kw_only=True):
    """Rounds in time order, in each of which all nodes of a host were measured in turn."""

    lab: str
    load: str
    seconds: float
    """Duration of a turn."""
    rounds: tuple[tuple[tuple[float, float], ...], ...]
    """Speed of each node in the time in which it could run, and the share of time that other programs took."""

    @property
    def nodes(self) -> int:
        return len(self.rounds[0])


class Series(Struct, frozen=True, kw_only=True):
    """Speeds and lost shares of the nodes of a host, by round and node, and the seconds of a round."""

    speeds: Floats
    lost: Floats
    seconds: float

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the host."""
        return int(self.speeds.shape[1])


class Drawn(Struct, frozen=True, kw_only=True):
    """Speeds and lost shares of simulated nodes, by round and node."""

    speeds: Floats
    lost: Floats

    def rounds(self, names: Sequence[str]) -> tuple[Round, ...]:
        """Return the rounds as labctl reads them from a run of turns."""
        pairs = zip(self.speeds.tolist(), self.lost.tolist(), strict=True)
        return tuple(
            {name: Reading(speed, lost, corrected=True) for name, speed, lost in zip(names, speeds, losts, strict=True)}
            for speeds, losts in pairs
        )


def recorded(lab: str, load: str, rounds: Sequence[Round], seconds: float) -> Recording:
    """Return the recording of a run of turns. ValueError without nodes, or if a round lacks one that another has."""
    nodes = sorted({node for readings in rounds for node in readings})
    if not nodes or any(sorted(readings) != nodes for readings in rounds):
        raise ValueError(f"{lab}, {load}: not every round has all of the nodes {nodes}")
    kept = tuple(tuple((readings[node].speed, readings[node].lost) for node in nodes) for readings in rounds)
    return Recording(lab=lab, load=load, seconds=round(seconds, 3), rounds=kept)


def write(recording: Recording, directory: Path) -> Path:
    """Write a recording as JSON, a line per round, into a directory; return the file's path."""
    head = {"lab": recording.lab, "load": recording.load, "seconds": recording.seconds}
    fields = [f"{msgspec.json.encode({key: value}).decode()[1:-1]}," for key, value in head.items()]
    rounds = ",\n".join(msgspec.json.encode(of_round).decode() for of_round in recording.rounds)
    path = directory / f"{recording.lab}-{recording.load}.json".replace(", ", "-").replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + "\n".join(fields) + f'\n"rounds":[\n{rounds}\n]}}\n')
    return path


def read(directory: Path = DATA) -> list[Recording]:
    """Read all recordings of a directory, sorted by file name."""
    return [msgspec.json.decode(path.read_bytes(), type=Recording) for path in sorted(directory.glob("*.json"))]


def as_recorded(recording: Recording) -> Series:
    """Return the series of a host with all recorded nodes, which disturbances meet together as they did then."""
    readings = np.array(recording.rounds)
    return Series(speeds=readings[..., 0], lost=readings[..., 1], seconds=recording.seconds * recording.nodes)


def node_each(recording: Recording) -> Series:
    """Return the series of a host with one node, which has all turns of the recorded nodes, one after the other.

    A speed is divided by the median of its recorded node, so that lasting differences of nodes are not noise.
    """
    series = as_recorded(recording)
    speeds = series.speeds / np.median(series.speeds, axis=0)
    return Series(speeds=speeds.reshape(-1, 1), lost=series.lost.reshape(-1, 1), seconds=recording.seconds)


def draw(series: Series, nodes: int, rounds: int, chance: np.random.Generator) -> Drawn:
    """Draw rounds of a run by the moving-block bootstrap: each host draws blocks of consecutive rounds of its own.

    Nodes of a host have the same blocks. The blocks of ``BLOCK`` seconds keep disturbances whole (Kuensch, The
    Jackknife and the Bootstrap for General Stationary Observations, Annals of Statistics 17 (1989)).
    """
    hosts = -(-nodes // series.nodes)
    recorded_rounds = len(series.speeds)
    length = min(recorded_rounds, max(1, round(BLOCK / series.seconds)))
    blocks = -(-rounds // length)
    starts = chance.integers(0, recorded_rounds - length + 1, size=(blocks, 1, hosts))
    chosen = (starts + np.arange(length)[:, None]).reshape(blocks * length, hosts)[:rounds]
    return Drawn(
        speeds=series.speeds[chosen].reshape(rounds, -1)[:, :nodes],
        lost=series.lost[chosen].reshape(rounds, -1)[:, :nodes],
    )

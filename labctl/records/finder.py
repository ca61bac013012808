"""Finder of the metrics that a run prints in known ways, line by line."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from labctl.model import Metric, Reduce, Workload
from labctl.records import known_metrics
from labctl.records.known_metrics import EVALUATION, EVALUATIONS, Match
from labctl.records.lines import Line
from labctl.records.metrics import reduce_values, searched
from labctl.system import human

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
REDRAWN = re.compile(r"[\r\x08]+")
LAST_DRAWN = 4
"""Texts to search of a line that is drawn again and again: a bar, its erasure, what is printed above it."""
# Bars of tqdm and Lightning: `Epoch 0:  30%|###  | 3/10 [00:01<00:02,  1.2it/s, loss=1.2]`, `3it [00:01, 2.9it/s]`.
BAR = re.compile(
    r"(?:\d{1,3}%\s?(?:\|[^|]*\|)?\s*[\d.]+\w*/(?P<of>[\d.]+\w*)|\b\d+it) \[(?P<state>\d+:\d\d[^\]]*)(?:\]|$)"
)
BAR_EXAMPLE = "30%|###| 3/10 [00:01<00:02, 1.2it/s]"
BAR_RATE = re.compile(r", +([\d.]+)(it/s|s/it)")
# Bars of Hugging Face's datasets, of data that is prepared: `Map: 20 examples [00:00, 3012.77 examples/s]`.
PREPARED = re.compile(r"\[\d[\d:]*(?:<[\d:?]+)?, [^\]]*\bexamples/s\]")
TRAINING = re.compile(r"\b(?:epochs?|train(?:ing)?|steps?|iter(?:ation)?s?)\b", re.IGNORECASE)
# Bars of Keras: `102/250 [===>......] - ETA: 13s - loss: 1.2`; Keras 3 draws a line and tells no ETA.
KERAS = re.compile(r"^\s*(\d+)/(\d+) (?:\[[=>.]*\]|━+|- \d+s).* - ")
KERAS_EPOCH = re.compile(r"^Epoch \d+/\d+")
ANNOUNCEMENT = re.compile(
    r"^\W*(eval|valid|test)(?:uat|at)?ing\b|\b(eval|valid|test)(?:uat|at)?ing\W*$"
    r"|^\W*(eval|val|test)(?:uation|idation)?\W*$|\b(?:on|running|a) (?:the )?(eval|val|test)(?:uation|idation)?\b",
    re.IGNORECASE,
)
# Programs that start ranks themselves mark the lines of each: `[rank1]:`, `[default1]:`, `[1,3]<stdout>:`.
MARK_OF_RANK = re.compile(r"^\[(?:(?:rank|default)(\d+)\]|\d+,(\d+)\]<std(?:out|err)>):?")
NO_RANK = 1 << 30
HINTS = (
    *("loss", "acc", "ppl", "perplexity", "reward", "throughput", "persec", "per_sec", "per sec", "skipped="),
    *("it/s", "s/it", "epoch", "eval", "valid", "test"),
)
"""Words of lines that can have a metric, or say of what the next ones are: most others are passed over by them."""
PER_SECOND = re.compile(r"/s(?:ec(?:ond)?)?\b")
LONGEST = 120
"""Characters of a text to quote."""


class Found(NamedTuple):
    """A value of a metric that was found in a line."""

    name: str
    value: float


class Series:
    """Values of a metric of one rank, with its unit, and the format and the text of the last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values = array("d")
        self.unit = self.example = ""
        self._text, self._begin = "", 0

    def add(self, match: Match, text: str) -> None:
        """Append a value, and keep its unit, example and text in place of the last one's."""
        self.values.append(match.value)
        self.unit, self.example = match.unit, match.example
        self._text, self._begin = text, match.begin

    def _line(self, hide: Callable[[str], str]) -> str:
        """Return up to LONGEST characters of the last text around its value, secrets hidden first."""
        text = hide(self._text)
        middle = self._begin if text == self._text else 0
        begin = max(0, min(middle - LONGEST // 3, len(text) - LONGEST))
        return human.shortened(text[begin:].strip(), LONGEST)

    def reduced(self, name: str, hide: Callable[[str], str]) -> dict[str, Any]:
        """Return a metric: median of a rate, first and last of others, or the only value, with its source."""
        is_rate = self.unit.endswith("/s") or name in ("throughput", "mfu")
        reduce: Reduce = "median" if is_rate else "first-last"
        metric = Metric(name=name, pattern="", unit=self.unit, reduce=reduce if len(self.values) > 1 else "last")
        return {**reduce_values([metric], {name: self.values})[name], "found": self.example, "line": self._line(hide)}


class Finder:
    """Finds metrics in the lines of a run: each of rank 0, else of the lowest rank that prints it."""

    def __init__(
        self, asked: Collection[str] = (), *, only_asked: bool = False, declared: Collection[str] = ()
    ) -> None:
        """Begin a run; ``asked``: names in its criteria, with ``only_asked`` no others; never those ``declared``."""
        self._asked, self._only_asked, self._declared = frozenset(asked), only_asked, frozenset(declared)
        self._hints = (*HINTS, *(re.split("[._]", known_metrics.plain(name))[0] for name in asked))
        self.series: dict[str, Series] = {}
        self._steps: dict[int, str | None] = {}
        """Number of steps of the first bar without a name that each rank drew beside metrics of a training."""
        self._ended: set[int] = set()
        """Ranks whose last epoch in Keras has ended: another bar is of an evaluation."""
        self._announced: dict[int, str] = {}
        """Evaluation that each rank has announced."""

    def read(self, line: Line) -> list[Found]:
        """Record and return the metrics found in a line, one value per name."""
        text = searched(line.said or line.text)
        if line.report or not self._may_tell(text.lower()):
            return []
        rank = NO_RANK if line.rank is None else line.rank
        if mark := MARK_OF_RANK.match(text):
            rank, text = int(mark[1] or mark[2]), text[mark.end() :]
        drawn = [part for part in REDRAWN.split(ESCAPE.sub("", text)) if part.strip()][-LAST_DRAWN:]
        found: dict[str, tuple[Match, str]] = {}
        for part in reversed(drawn):
            for match in self._of_part(part, rank):
                found.setdefault(match.name, (match, part))
        for part in reversed(drawn):
            for match in self._rate(part, rank, found):
                found.setdefault(match.name, (match, part))
        return [Found(name, match.value) for name, (match, part) in found.items() if self._keep(match, part, rank)]

    def _may_tell(self, lowered: str) -> bool:
        """Tell if a lower-case line may contain a metric or announce an evaluation, by quick hints."""
        return any(hint in lowered for hint in self._hints) or bool("/s" in lowered and PER_SECOND.search(lowered))

    def _of_part(self, part: str, rank: int) -> list[Match]:
        """Return the metrics in a part of a line drawn at once, without its bar's rate; [] of Keras evaluations."""
        if KERAS_EPOCH.match(part):
            self._ended.discard(rank)
        if PREPARED.search(part) or self._is_evaluation_of_keras(part, rank):
            return []
        bar = BAR.search(part)
        text = self._beside(part, bar, rank) if bar else part
        return self._named_as_announced(known_metrics.matches(text, self._asked), part, rank)

    def _named_as_announced(self, found: list[Match], part: str, rank: int) -> list[Match]:
        """Return metrics, with an announced evaluation's name unless the part tells of training."""
        if found:
            split = self._announced.pop(rank, "")
            is_of_training = not split or TRAINING.search(part)
            return found if is_of_training else [known_metrics.of_evaluation(match, split) for match in found]
        if announced := ANNOUNCEMENT.search(part):
            self._announced[rank] = known_metrics.split_of(next(filter(None, announced.groups())))
        elif TRAINING.search(part):
            self._announced.pop(rank, None)
        return []

    # --- bars ------------------------------------------------------------------------------------------------

    def _is_evaluation_of_keras(self, part: str, rank: int) -> bool:
        """Tell if a part is a Keras bar after an epoch's end without ``val_``; record an epoch's end."""
        bar = KERAS.match(part)
        if not bar:
            return False
        had_ended = rank in self._ended
        if bar[1] == bar[2] and "ETA:" not in part:
            self._ended.add(rank)
        return had_ended and "val_" not in part

    def _beside(self, part: str, bar: re.Match[str], rank: int) -> str:
        """Return the text beside a bar: name, state and rest of a training bar, else only the rest."""
        head, rest = part[: bar.start()], part[bar.end() :]
        may_be_first = not head.strip() and rank not in self._steps
        if not may_be_first and not self._is_of_training(head, bar, rank):
            return rest
        return " ; ".join((head.rstrip(": |"), BAR_RATE.sub("", bar["state"]).partition(",")[2], rest))

    def _rate(self, part: str, rank: int, found: Collection[str]) -> Iterator[Match]:
        """Yield ``steps_per_second`` of a bar of training; nothing if it has none. Remembers the bar's steps."""
        bar = BAR.search(part)
        rate = BAR_RATE.search(bar["state"]) if bar else None
        if not bar or not rate or not float(rate[1]):
            return
        head = part[: bar.start()]
        has_training = any(name.partition("_")[0] not in EVALUATIONS for name in found)
        if has_training and not head.strip():
            self._steps.setdefault(rank, bar["of"])
        if self._is_of_training(head, bar, rank) and (has_training or not found):
            value = float(rate[1]) if rate[2] == "it/s" else 1 / float(rate[1])
            yield Match("steps_per_second", value, "steps/s", BAR_EXAMPLE, bar.start(), bar.end())

    def _is_of_training(self, head: str, bar: re.Match[str], rank: int) -> bool:
        """Tell if a bar is of training: by name or metrics in it, else by its rank's number of steps."""
        if not head.strip():
            return self._steps.get(rank, "") == bar["of"]
        is_named = bool(TRAINING.search(head) or known_metrics.matches(head.rstrip(": |")))
        return is_named and not EVALUATION.search(head)

    # --- series ----------------------------------------------------------------------------------------------

    def _keep(self, match: Match, part: str, rank: int) -> bool:
        """Add a value to its series, which a lower rank takes over; return False if unwanted or of a higher rank."""
        name = match.name
        if name in self._declared or (self._only_asked and not self._is_asked(name)):
            return False
        series = self.series.get(name)
        if series is None or rank < series.rank:
            series = self.series[name] = Series(rank)
        if rank > series.rank:
            return False
        series.add(match, part)
        return True

    def _is_asked(self, name: str) -> bool:
        """Tell if a criterion is about a metric, by its name or one that stands in for it."""
        return name in self._asked or any(known_metrics.stand_in(asked, (name,)) for asked in self._asked)

    def reduced(self, hide: Callable[[str], str] = str) -> dict[str, dict[str, Any]]:
        """Return each metric reduced, with ``found``, its format, and ``line``, its last text after ``hide``."""
        return {name: series.reduced(name, hide) for name, series in self.series.items()}


def finder_of(workload: Workload) -> Finder | None:
    """Return a finder of metrics that a workload does not declare; None if it wants only declared ones."""
    if workload.known_metrics == "none":
        return None
    declared = {metric.name for metric in workload.metrics}
    asked = {criterion.metric for criterion in workload.criteria} - declared
    return Finder(asked, only_asked=workload.known_metrics == "asked", declared=declared)


def answered(workload: Workload, metrics: Mapping[str, object]) -> Workload:
    """Return the workload with criteria on found metrics, as ``train_loss``, in place of ones not printed."""
    declared = {metric.name for metric in workload.metrics}
    criteria = []
    for criterion in workload.criteria:
        name = criterion.metric
        meant = "" if name in declared or name in metrics else known_metrics.stand_in(name, metrics.keys())
        criteria.append(replace(criterion, metric=meant) if meant else criterion)
    return replace(workload, criteria=tuple(criteria))

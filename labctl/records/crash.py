"""Find the rank failure that explains a run in the output of the run."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from labctl import accelerators, launchers
from labctl.model import Cause, Job, Lab
from labctl.records import last_words, metrics, store
from labctl.records.active import Ended
from labctl.records.lines import Line

REPORTED = re.compile(r"labctl: (rank \d+) on (\S+) exited with code (\d+)")
# Printed by DeepSpeed's launcher on the node of a failed rank; deepspeed/launcher/launch.py.
DEEPSPEED_REPORTED = re.compile(r"^(\S+): .*\[launch\.py:.* exits with return code = (-?\d+)")
# The rank or node of a line, as marked by pdsh (`worker-0: `), Open MPI (`[1,0]<stdout>:`) or Horovod (`[0]<stderr>:`).
SPEAKER = re.compile(r"(?:\[(?:\d+,)?(\d+)\](?:<std\w+>:)? ?|(\S+): )(.*)")
OUT_OF_MEMORY = (
    r"out of memory|OutOfMemoryError|can(?:'t|not) allocate memory|MemoryError\b|bad_alloc|OOM when allocating"
)
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]|\b(?:ENOSPC|EDQUOT)\b")
# Printed by rank.sh.
OUT_OF_HOST_MEMORY = re.compile(r"labctl: (\S+) (ran out of memory: .*)$")
TERMINATED = 128 + signal.SIGTERM
SCRIPT = "the script"
"""Speaker of the lines that name no rank or node, of a script that starts its ranks itself."""
# Other ranks that a message names.
SHOWN = 4


class RankFailure(Struct, frozen=True):
    """A failed rank: its node, the exit code of its process, and its last output or the reason of its end."""

    who: str
    node: str
    code: int
    words: str
    cause: Cause
    place: str = ""
    """File and line of the person's code in which its exception was raised, as ``train.py:3``."""

    def __str__(self) -> str:
        """Render the failed rank with its last words, marked as such if they are no error, and place."""
        if not self.words:
            return self.ended
        before = ": " if last_words.is_error(self.words) else "; the last it wrote: "
        return f"{self.ended}{before}{self.words}" + (f" ({self.place})" if self.place else "")

    @property
    def ended(self) -> str:
        """Render ``WHO on NODE exited with code N``, with the signal if there is one."""
        return f"{self.who} on {self.node} exited with code {self.code}{signal_name(self.code)}"

    @property
    def follows(self) -> bool:
        """Tell if the failure follows from another's: words of a lost peer, or SIGTERM without an error."""
        return last_words.follows(self.words) or (self.code == TERMINATED and not last_words.is_error(self.words))


def signal_name(code: int) -> str:
    """Return a shell exit code's signal, as `` (SIGKILL)``; empty if it is none."""
    with suppress(ValueError):
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    return ""


class CrashWatch:
    """Finds the rank failure that explains a run, in the output of the run.

    It is the first failure that is not a consequence of a lost peer. Ranks that a script starts itself report nothing;
    DeepSpeed's launcher reports them. An elastic launcher restarts its ranks.
    """

    def __init__(self, lab: Lab, job: Job) -> None:
        """Start without a failure."""
        self._lab, self._nodes = lab, {node.name: node.slots for node in job.nodes}
        self._starts_itself = job.workload.starts_itself
        self._ranks = [f"rank {rank}" for rank in range(job.ranks)]
        self._elastic = launchers.is_elastic(job.workload.launcher)
        self._speakers = {*self._nodes, *self._ranks}
        self._kept = last_words.kept(len(self._speakers))
        self._killed: dict[str, str] = {}
        patterns = (OUT_OF_MEMORY, *(module.out_of_memory for module in accelerators.modules().values()))
        self._out_of_memory = re.compile("|".join(filter(None, patterns)), re.IGNORECASE)
        self._last: dict[str, deque[str]] = {}
        self._unmarked: deque[str] = deque(maxlen=last_words.MOST)
        self._has_spoken = False
        self._ended: list[RankFailure] = []
        self.reason: RankFailure | None = None

    @property
    def cause(self) -> Cause | None:
        return self.reason.cause if self.reason else None

    @property
    def message(self) -> str:
        """Render the failed rank and up to SHOWN others that failed; empty without a failure."""
        if not self.reason:
            return ""
        # Ranks that a script starts itself have no number here by which to tell them apart.
        ranks = () if self._starts_itself else self._ended
        others = [crash.ended for crash in ranks if crash.who != self.reason.who]
        return "; ".join((str(self.reason), *others[:SHOWN]))

    @property
    def ends_run(self) -> bool:
        """Tell if a failed rank ends the run: the launcher is not elastic and no script starts the ranks."""
        return self.reason is not None and not self._elastic and not self._starts_itself

    def look_at(self, lines: Sequence[Line]) -> None:
        """Take output lines into account: reports of failed ranks and the last output of ranks or nodes."""
        for line in lines:
            self._look_at(line)

    def _look_at(self, line: Line) -> None:
        """Keep a line's output by its speaker, or record the failure that it reports."""
        text = metrics.searched(line.text)
        reports = line.report or "[launch.py:" in text or (self._starts_itself and "labctl: " in text)
        if reports and self._hear_report(line, text):
            return
        who, output = _speaker(line, text)
        if reports and (line.report or output.startswith("labctl: ") or "[launch.py:" in output):
            # Output of rank.sh and DeepSpeed's launcher, not of the rank.
            return
        if who in self._speakers and output and not output.isspace():
            self._keep(who, output)
            self._has_spoken = True
            return
        if self._starts_itself and not who and text.strip():
            self._keep(SCRIPT, text)
        # The agent's own lines are not the launcher's.
        if who not in self._speakers and not text.startswith("labctl: "):
            self._unmarked.append(text.rpartition("\r")[2][: last_words.LONGEST])

    @property
    def launcher_words(self) -> str:
        """Return the last error in output of no rank or node; empty if there is none."""
        words = last_words.quoted(self._unmarked)
        return words if last_words.is_error(words) else ""

    def _keep(self, who: str, output: str) -> None:
        """Append output to the last lines of a rank, node or script, cut to LONGEST."""
        if who not in self._last:
            self._last[who] = deque(maxlen=self._kept)
        self._last[who].append(output[: last_words.LONGEST])

    def _hear_report(self, line: Line, text: str) -> bool:
        """Record a failure, a restart or a killed container from a line; return True for a failure."""
        if self._elastic and line.report and store.RANK_REPORTED.match(line.said):
            # Its launcher restarted it.
            self.reason, self._ended, self._killed = None, [], {}
        if line.report and (killed := OUT_OF_HOST_MEMORY.match(line.said)):
            self._killed[killed[1]] = f"{killed[2]}; {memory_limit(self._lab)}"
        crash = self._crash_in(line, text)
        if not crash:
            return False
        if len(self._ended) <= SHOWN:
            self._ended.append(crash)
        if self.reason is None or (self.reason.follows and not crash.follows):
            self.reason = crash
        return True

    def _crash_in(self, line: Line, text: str) -> RankFailure | None:
        """Return the failure that a line reports, with the rank's last words and cause; None without one."""
        # Reports of ranks that a script starts itself may be in its own output.
        reported = REPORTED.match(line.said) if line.report else self._starts_itself and REPORTED.search(text)
        if reported:
            who, node, code = reported[1], reported[2], int(reported[3])
        elif self._starts_itself and (reported := DEEPSPEED_REPORTED.search(text)):
            who, node, code = "a rank", reported[1], int(reported[2])
        else:
            return None
        lines = self._last.get(who) or self._last.get(node) or ()
        killed = self._killed.get(node)
        quote = killed or last_words.quoted(lines, who)
        place = "" if killed else last_words.place(lines, who)
        return RankFailure(who, node, code if code >= 0 else 128 - code, quote, self._cause_in(quote, lines), place)

    def _cause_in(self, quote: str, lines: Iterable[str]) -> Cause:
        """Return out-of-memory, disk-full or rank-crashed by the quote, or all lines if it is no error."""
        # An earlier line about memory may have been a warning.
        searched = (quote,) if last_words.is_error(quote) else tuple(lines)
        if any(map(self._out_of_memory.search, searched)):
            return "out-of-memory"
        return "disk-full" if any(map(NO_SPACE.search, searched)) else "rank-crashed"

    def gave_up(self) -> str:
        """Render ``WHO: LAST LINE`` for the first rank or node whose words give up; empty if none."""
        for who, lines in self._last.items():
            if words := last_words.giving_up(lines):
                return f"{who}: {words}"
        return ""

    @property
    def is_silent(self) -> bool:
        """Tell if no rank or node wrote anything; False for scripts that start ranks themselves."""
        return not self._has_spoken and not self._starts_itself


def judged(ended: Ended, watch: CrashWatch) -> tuple[Cause | None, str]:
    """Return cause (None if none) and message of a run's end: the agent's if it is another, else the ranks'."""
    if ended.cause not in (None, "rank-crashed"):
        return ended.cause, ended.message
    if watch.cause and (ended.cause or ended.code != 0):
        return watch.cause, watch.message
    return ended.cause, ended.message


def _speaker(line: Line, text: str) -> tuple[str, str]:
    """Return the rank or node of a line and what it says, of a progress bar the last state; ("", "") if unknown."""
    if line.rank is not None:
        return f"rank {line.rank}", line.said.rpartition("\r")[2]
    if speaker := SPEAKER.match(text):
        return speaker[2] or f"rank {speaker[1]}", speaker[3].rpartition("\r")[2]
    return "", ""


def memory_limit(lab: Lab) -> str:
    """Render a node's memory limit, or that LAB_MEMORY is not set."""
    if lab.memory:
        return f"a node has LAB_MEMORY={lab.memory}"
    return "LAB_MEMORY is not set: a node has what its host has left"

"""Which rank of a run failed, and its last words, read from the run's output."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from typing import Literal

REPORTED = re.compile(r"labctl: (rank \d+) on (\S+) exited with code (\d+)")
# What DeepSpeed's launcher says on the node where a rank failed; deepspeed/launcher/launch.py.
DEEPSPEED_REPORTED = re.compile(r"^(\S+): .*\[launch\.py:.* exits with return code = (-?\d+)")
# Who said a line, as pdsh marks it (`worker-0: `), Open MPI (`[1,0]<stdout>:`) or Horovod (`[0]<stderr>:`).
SPEAKER = re.compile(r"(?:\[(?:\d+,)?(\d+)\](?:<std\w+>:)? ?|(\S+): )(.*)")
# What is said about a rank, not by it.
REMARK = re.compile(r"labctl: |.*\[launch\.py:")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
# The last words of a rank that failed because another was gone, as gloo, torch's store, NCCL and Horovod put it.
PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process exit|ncclRemoteError"
    r"|HorovodInternalError",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Crash:
    """A rank that failed: where, the exit code of its process, and the last line that it said."""

    who: str
    node: str
    code: int
    words: str
    cause: Literal["rank-crashed", "out-of-memory"]

    def __str__(self) -> str:
        said = f": {self.words}" if self.words else ""
        return f"{self.who} on {self.node} exited with code {self.code}{signal_name(self.code)}{said}"

    @property
    def follows(self) -> bool:
        """Whether it failed because another had."""
        return bool(PEER_LOST.search(self.words))


class Crashes:
    """The crash that explains a run: the first that is reported, unless a later one was not of a lost peer.

    The ranks of a script that starts them itself report nothing; there it is DeepSpeed that says so.
    """

    def __init__(self, *, starts_itself: bool = False) -> None:
        self._starts_itself = starts_itself
        self._memory = False
        self._last: dict[str, str] = {}
        self.reason: Crash | None = None

    def look_at(self, line: str) -> None:
        self._memory = self._memory or bool(OUT_OF_MEMORY.search(line))
        if crash := self._crash_in(line):
            if self.reason is None or (self.reason.follows and not crash.follows):
                self.reason = crash
            return
        speaker = SPEAKER.match(line)
        if speaker and speaker[3].strip() and not REMARK.match(speaker[3]):
            self._last[speaker[2] or f"rank {speaker[1]}"] = speaker[3].strip()

    def _crash_in(self, line: str) -> Crash | None:
        if reported := REPORTED.search(line):
            return self._crash(reported[1], reported[2], int(reported[3]))
        if self._starts_itself and (reported := DEEPSPEED_REPORTED.search(line)):
            code = int(reported[2])
            return self._crash("a rank", reported[1], code if code > 0 else 128 - code)
        return None

    def _crash(self, who: str, node: str, code: int) -> Crash:
        words = self._last.get(node) or self._last.get(who) or ""
        return Crash(who, node, code, words, "out-of-memory" if self._memory else "rank-crashed")


def signal_name(code: int) -> str:
    """What a shell's exit code above 128 means."""
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    return ""

"""Trees of files such as /sys, and what subjects read and answer of them."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from labctl.errors import HostError
from labctl.health import examine, script
from labctl.health.model import Condition, KernelLine, Rules, Snapshot, Subject
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

BOOT = "0b6a2a5e-4c6f-4a0d-8d55-000000000001"
FUZZ_ROUNDS = 300
MAY_RAISE = (HostError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)


def plant(root: Path, tree: Mapping[str, str]) -> Path:
    """Write files below a root, with the id of a start of the machine; ``-> TARGET`` is a link."""
    for name, content in {"proc/sys/kernel/random/boot_id": BOOT, "proc/uptime": "1000.5 2.0", **tree}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_text(f"{content}\n", encoding="utf-8")
    return root


def printed(subject: Subject, root: Path) -> str:
    """Return what a subject's script prints of a root."""
    # Kernel lines of this very machine have no place in a test of files.
    text = script.script((subject,), Rules(), full=True).replace("log=$(dmesg", "log=$(true")
    return subprocess.run(["sh", "-c", text, "sh", str(root)], capture_output=True, text=True, check=True).stdout


def read(subject: Subject, root: Path) -> HostDump:
    """Return the dump of a root."""
    return hostdump.read(printed(subject, root), "gpu-1")


def snapshot(subject: Subject, dump: HostDump, *kernel: str) -> Snapshot:
    """Return the snapshot of a dump, with kernel lines that were written just now."""
    now = time.time()
    taken = script.snapshot(dump, (subject,), Rules(), sent=now, received=now)
    lines = tuple(KernelLine(999.0, line) for line in kernel)
    return Snapshot(time=now, boot=taken.boot, uptime=taken.uptime, readings=taken.readings, lines=lines)


def answers(
    subject: Subject, now: Snapshot, before: Snapshot | None = None, neighbours: Mapping[str, Snapshot] | None = None
) -> list[tuple[str, str, str]]:
    """Return check, level and sentence of each answer that is not ok."""
    conditions = examine.examine(now, (subject,), Rules(), examine.Past(snapshot=before), neighbours or {})
    return [_shown(condition) for condition in conditions if condition.level != "ok"]


def _shown(condition: Condition) -> tuple[str, str, str]:
    """Return check, level and sentence."""
    return condition.check, condition.level, condition.sentence()


def fuzzed(text: str, read_all: Callable[[str], object], seed: int = 7) -> int:
    """Read mutated texts; return how many of them were read without an error. Other errors than a parser's come out."""
    generator, whole = random.Random(seed), 0  # noqa: S311 - the same texts each time
    for _ in range(FUZZ_ROUNDS):
        try:
            read_all(_mutated(text, generator))
        except MAY_RAISE:
            continue
        whole += 1
    return whole


def _mutated(text: str, generator: random.Random) -> str:
    """Return a text of which characters were changed, and lines removed or cut."""
    characters = list(text)
    for _ in range(generator.randint(1, 20)):
        characters[generator.randrange(len(characters))] = generator.choice("0123456789abcx:./->\t\n \0-")
    lines = "".join(characters).split("\n")
    for _ in range(generator.randint(0, 5)):
        lines.pop(generator.randrange(len(lines)))
    position = generator.randrange(len(lines))
    lines[position] = lines[position][: generator.randint(0, 20)]
    return "\n".join(lines)

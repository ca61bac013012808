"""Health as metrics in Prometheus' text format, for node_exporter's textfile collector.

Source: Prometheus' documentation, "Exposition formats", version 0.0.4.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from labctl.backends.health import HostHealth, read
from labctl.errors import ConfigError
from labctl.health.model import Level, Snapshot
from labctl.system import files

NUMBERS: Mapping[Level, int] = {"ok": 0, "remark": 1, "bad": 2, "unknown": 3}


def require_writable(path: Path) -> None:
    """Raise ConfigError unless the file can be made or replaced: its folder exists, and it is no device or pipe."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist", hint=f"mkdir -p {shlex.quote(str(path.parent))}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", hint="--prometheus FILE")


def write(path: Path, lab: Path, verdicts: Sequence[HostHealth]) -> None:
    """Write the metrics of hosts to a file, whole or not at all. HostError if that fails.

    A host that was not read has its verdict only, not the readings of an earlier time.
    """
    kept = {verdict.host: read(lab, verdict.host) for verdict in verdicts if not verdict.error}
    snapshots = {host: readings.last for host, readings in kept.items() if readings}
    files.write(path, text(verdicts, snapshots), mode=0o644)


def text(verdicts: Iterable[HostHealth], snapshots: Mapping[str, Snapshot]) -> str:
    """Render the verdicts, the answer of each check, and the numbers that were read."""
    verdicts = tuple(verdicts)
    hosts = [_line("labctl_health_host", NUMBERS[verdict.level], host=verdict.host) for verdict in verdicts]
    times = [_line("labctl_health_read_seconds", now.time, host=host) for host, now in snapshots.items()]
    families = (
        ("labctl_health_host", "Verdict on a host: 0 ok, 1 remark, 2 bad, 3 unknown.", hosts),
        (
            "labctl_health_check",
            "Worst answer of a check on an item: 0 ok, 1 remark, 2 bad, 3 unknown.",
            _checks(verdicts),
        ),
        ("labctl_health_reading", "Number that a host reports.", _readings(snapshots)),
        ("labctl_health_read_seconds", "Time at which a host was read, since 1970.", times),
    )
    lines: list[str] = []
    for name, help_text, samples in families:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", *samples]
    return "\n".join(lines) + "\n"


def _checks(verdicts: Iterable[HostHealth]) -> Iterator[str]:
    """Yield a sample per host, check and item, with its worst answer: each set of labels may appear once."""
    worst: dict[tuple[str, str, str], int] = {}
    for verdict in verdicts:
        for condition in verdict.conditions:
            key = (verdict.host, condition.check, condition.item)
            number = NUMBERS[condition.level]
            worst[key] = max(worst.get(key, 0), number, key=(0, 3, 1, 2).index)
    for (host, check, item), number in worst.items():
        yield _line("labctl_health_check", number, host=host, check=check, item=item)


def _readings(snapshots: Mapping[str, Snapshot]) -> Iterator[str]:
    """Yield a sample per number that was read."""
    for host, snapshot in snapshots.items():
        for reading in snapshot.by_key().values():
            if isinstance(reading.value, (int, float)):
                labels = {"host": host, "item": reading.item, "name": reading.name, "unit": reading.unit}
                yield _line("labctl_health_reading", reading.value, **labels)


def _line(name: str, value: float, /, **labels: str) -> str:
    """Render a sample, its labels escaped."""
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}"


def _escaped(value: str) -> str:
    """Escape a label's value."""
    return re.sub(r'[\\"\n]', lambda match: {"\n": "\\n"}.get(match[0], f"\\{match[0]}"), value)

"""Health as metrics, read back by the grammar of Prometheus' text format."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from labctl.backends import health
from labctl.backends.health import HostHealth
from labctl.errors import ConfigError
from labctl.health.model import Condition, Level, Reading, Snapshot
from labctl.reports import prometheus

LABEL = r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"([a-z_]+)\{{({LABEL}(?:,{LABEL})*)\}} (-?[0-9][0-9.e+-]*)")
"""Source: Prometheus' documentation, "Exposition formats"."""
Labels = tuple[tuple[str, str], ...]


def samples(text: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of an exposition by name and labels; fail on another line, and on labels that come twice."""
    found: dict[tuple[str, Labels], float] = {}
    types: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            kind, name = line.split()[1:3]
            assert kind in ("HELP", "TYPE")
            types |= {name} if kind == "TYPE" else set()
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] in types, "a sample follows the type of its family"
        key = match[1], tuple((label, unescaped(value)) for label, value in re.findall(LABEL, match[2]))
        assert key not in found, "each set of labels appears once"
        found[key] = float(match[match.re.groups])
    return found


def unescaped(value: str) -> str:
    """Return a label's value without escapes."""
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)


def condition(level: Level, check: str = "width", item: str = "GPU 2") -> Condition:
    """Build the answer of a check."""
    return Condition(check=check, subject="Cards", level=level, item=item)


def verdict(level: Level, *conditions: Condition, host: str = "gpu-1", error: str = "") -> HostHealth:
    """Build a verdict on a host."""
    return HostHealth(host=host, nodes=("worker-0",), level=level, conditions=conditions, error=error)


SNAPSHOT = Snapshot(
    time=1700000000.25,
    readings=(
        Reading(name="width", value=8, item="GPU 2", source=""),
        Reading(name="temperature", value=81.5, unit="°C", item='a "quoted" \\ name\nof two lines', source=""),
        Reading(name="driver", value="580", source=""),
        Reading(name="power", value=None, source=""),
    ),
)


def test_verdicts_checks_and_numbers_are_samples() -> None:
    """Render two hosts: the verdict of each, each check's answer, and numbers only, with escapes that read back."""
    text = prometheus.text(
        (verdict("bad", condition("bad"), condition("ok", "heat")), verdict("unknown", host="gpu-2", error="gone")),
        {"gpu-1": SNAPSHOT},
    )
    host = ("host", "gpu-1")
    assert samples(text) == {
        ("labctl_health_host", (host,)): 2,
        ("labctl_health_host", (("host", "gpu-2"),)): 3,
        ("labctl_health_check", (host, ("check", "width"), ("item", "GPU 2"))): 2,
        ("labctl_health_check", (host, ("check", "heat"), ("item", "GPU 2"))): 0,
        ("labctl_health_reading", (host, ("item", "GPU 2"), ("name", "width"), ("unit", ""))): 8,
        (
            "labctl_health_reading",
            (host, ("item", 'a "quoted" \\ name\nof two lines'), ("name", "temperature"), ("unit", "°C")),
        ): 81.5,
        ("labctl_health_read_seconds", (host,)): 1700000000.25,
    }


def test_several_answers_of_a_check_are_one_sample_with_the_worst() -> None:
    """Render several answers of one check on one item: the worst, where unknown is worse than ok only."""

    def worst(*levels: Level) -> float:
        text = prometheus.text([verdict("ok", *(condition(level) for level in levels))], {})
        return next(value for (name, _), value in samples(text).items() if name == "labctl_health_check")

    assert worst("ok", "unknown", "ok") == 3
    assert worst("unknown", "remark", "ok") == 1
    assert worst("bad", "remark", "unknown") == 2


def test_readings_of_the_same_name_and_item_are_one_sample() -> None:
    """Render two readings with the same labels: one sample."""
    twice = Snapshot(time=1.0, readings=(SNAPSHOT.readings[0], SNAPSHOT.readings[0]))
    assert len(samples(prometheus.text([], {"gpu-1": twice}))) == 2


def test_the_file_is_for_everyone_to_read_and_has_nothing_old(tmp_path: Path) -> None:
    """Write the file with a host that was read and one that was not: the latter has no readings of an earlier time."""
    verdicts = [verdict("ok"), verdict("ok", host="gpu-2")]
    health.keep(tmp_path, {"gpu-1": SNAPSHOT, "gpu-2": SNAPSHOT}, verdicts, full=True)
    path = tmp_path / "metrics/labctl.prom"
    prometheus.write(path, tmp_path, [verdict("ok"), verdict("unknown", host="gpu-2", error="gone")])
    hosts = {labels[0][1] for name, labels in samples(path.read_text()) if name != "labctl_health_host"}
    assert hosts == {"gpu-1"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_device_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    """Refuse to replace what is no regular file, and to make folders: a path that is mistyped is noticed."""
    with pytest.raises(ConfigError, match="is not a regular file"):
        prometheus.require_writable(Path("/dev/full"))
    with pytest.raises(ConfigError, match="does not exist"):
        prometheus.require_writable(tmp_path / "missing/x.prom")
    prometheus.require_writable(tmp_path / "x.prom")

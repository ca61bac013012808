"""Evidence of a failed run, to attach to a bug report: ``evidence.tar.gz`` in its record."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from labctl.config.settings import sounds_secret
from labctl.errors import HostError
from labctl.model import Lab, Result, Secret
from labctl.records import last_words, redaction, store
from labctl.records.store import EVIDENCE
from labctl.system import files, human

LAST = 200
"""Last lines of each rank, and of other long output."""
MOST = 256
"""Logs at most."""
PIECE, SEARCHED = 1 << 19, 1 << 20
"""Bytes to read of the end of a log, and of the output that is searched for the cause."""
MINUTE = 60
"""Last rows of samples."""
LONGEST = 2000
"""Last characters of a line."""
LIMIT = 3
"""Seconds for the answer of a host."""
REPORTED = re.compile(r"labctl: (?:(rank \d+) on (\S+) exited with code|(\S+) ran out of memory|stalled)")


def write(
    lab: Lab,
    result: Result,
    warn: Callable[[str], object],
    witnesses: Callable[[float], Mapping[str, str]] | None = None,
) -> None:
    """Write evidence.tar.gz for a run that did not pass, with ``witnesses``' texts; warn if it cannot be written.

    ``witnesses`` returns what hosts and engine saw since a time; without it the archive has the record alone.
    """
    if result.verdict == "PASS":
        return
    path = store.directory(lab.directory, result.run_id)
    try:
        content = _collected(lab, result, path, witnesses)
        with files.writing(path / EVIDENCE), files.opened(path) as folder:
            files.replace_in(folder, EVIDENCE, [content], 0o644)
    except HostError as error:
        warn(f"no {EVIDENCE}: {error.message}")


def _collected(lab: Lab, result: Result, path: Path, witnesses: Callable[[float], Mapping[str, str]] | None) -> bytes:
    """Return the archive's bytes: summary, record, ranks' logs and witnesses' texts, secrets redacted."""
    texts = {
        "evidence.txt": summary(path, result),
        **_of_record(path),
        **_of_ranks(path),
    }
    if witnesses:
        texts |= witnesses(time.time() - store.age(path))
    # What the workload was given as a secret it may have printed, too.
    given = (*lab.hidden, *map(Secret, sorted(_secrets(store.decode(path / "job.json", Any)), key=len, reverse=True)))
    return archive(result.run_id, {name: store.redact(text, given) for name, text in texts.items()})


def archive(run_id: str, texts: Mapping[str, str]) -> bytes:
    """Return a gzipped tar archive of these texts by file name; equal texts give equal bytes."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, text in texts.items():
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"evidence-{run_id}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def summary(path: Path, result: Result) -> str:
    """Render how a run ended, the first failed rank, and the output lines that show the failure, with times."""
    lines, times = _tail(path / store.OUTPUT, SEARCHED), _tail(path / store.TIMES, SEARCHED)
    # Each line has one in the times. Matched from the end: the beginnings may be cut off differently.
    printed_at = dict(zip(lines[-len(times) :], times[-len(lines) :], strict=False))
    first = next(filter(REPORTED.search, lines), "")
    # No line shows a missing metric.
    failed = result.cause not in ("criteria", "no-metric")
    shown = last_words.cause_of(result, lines) if failed else []
    shown = shown or lines[-last_words.BEFORE :]
    nodes = ", ".join(f"rank {rank.rank} on {rank.node}" for rank in result.ranks) or "none reported"
    return "\n".join(
        (
            f"run {result.run_id} of {result.workload} ({result.launcher})",
            f"verdict: {result.verdict} ({result.cause}), exit code {result.exit_code}",
            f"cause: {result.message}",
            f"trying again: {result.outlook}",
            f"first to fail: {first or 'no rank reported a failure'}",
            f"began {result.started}, took {human.duration(result.seconds)}",
            f"ranks: {nodes}",
            "",
            "the lines that show it:",
            *(f"{_clock(printed_at.get(text, ''))}  {text}" for text in shown),
            "",
        )
    )


def _clock(time_and_rank: str) -> str:
    """Render a record's time of a line as HH:MM:SS.mmm; ``-`` if empty."""
    when = store.moment(time_and_rank.partition(" ")[0])
    return f"{datetime.fromtimestamp(when):%H:%M:%S.%f}"[:-3] if when else "-"


def _of_record(path: Path) -> dict[str, str]:
    """Map names to texts of the record's JSON files with secrets masked, plan, samples' ends and stacks' ends."""
    texts = {}
    for name in ("result.json", "job.json", "settings.json", "versions.json", "plan.txt"):
        content = store.read_record(path / name)
        if content is None:
            continue
        text = content.decode("utf-8", "replace")
        with suppress(ValueError, RecursionError):
            text = json.dumps(_masked(name, json.loads(text)), indent=2) + "\n"
        texts[name] = text
    for sampled in sorted((path / "samples").glob("*.csv")):
        with suppress(OSError), files.open_regular(sampled) as stream:
            head = stream.readline(LONGEST).decode("utf-8", "replace").rstrip("\n")
            texts[f"samples/{sampled.name}"] = "\n".join((head, *_tail(sampled)[-MINUTE:], ""))
    for log in sorted((path / "stacks").glob("*.txt")):
        texts[f"stacks/{log.name}"] = "\n".join(_tail(log))
    return texts


def _masked(name: str, document: Any) -> Any:
    """Return a file of the record with secrets masked; versions of packages stay, such as that of base-passwd."""
    masked = _without_secrets(document)
    if name == "versions.json" and isinstance(document, dict) and "packages" in document:
        masked["packages"] = document["packages"]
    return masked


def _without_secrets(value: Any) -> Any:
    """Return a JSON value with values of secret-sounding keys masked, in mappings and lists."""
    if isinstance(value, dict):
        named = _hides(value.get("key"))
        return {
            key: redaction.REDACTED if item and (_hides(key) or (named and key == "value")) else _without_secrets(item)
            for key, item in value.items()
        }
    return [item for item, _ in _redacted_items(value)] if isinstance(value, list) else value


def _redacted_items(items: list[Any]) -> Iterator[tuple[Any, str]]:
    """Yield each item masked, with the secret it had, which is empty if it had none."""
    if not all(isinstance(item, str) for item in items):
        yield from ((_without_secrets(item), "") for item in items)
    elif len(items) == 2 and "=" not in items[0] and sounds_secret(items[0]):
        yield items[0], ""
        yield redaction.REDACTED, items[1]
    else:
        yield from redaction.redacted(items)


def _hides(key: object) -> bool:
    """Tell if a key is text that sounds secret."""
    return isinstance(key, str) and sounds_secret(key)


def _secrets(value: Any) -> set[str]:
    """Return the secret texts of four characters or more in a JSON value, by secret-sounding keys and options."""
    if isinstance(value, dict):
        hidden = {item for key, item in value.items() if _hides(key) and isinstance(item, str) and len(item) >= 4}
        return hidden.union(*map(_secrets, value.values()))
    if isinstance(value, list):
        return {secret for _, secret in _redacted_items(value) if len(secret) >= 4}.union(*map(_secrets, value))
    return set()


def _of_ranks(path: Path) -> dict[str, str]:
    """Map names to the last LAST lines of the logs of ranks, of MOST logs at most."""
    logs = [log for pattern in store.LOGS for log in sorted(path.glob(pattern))][:MOST]
    return {str(log.relative_to(path)): "\n".join((*_tail(log)[-LAST:], "")) for log in logs}


def _tail(path: Path, size: int = PIECE) -> list[str]:
    """Return a file's last lines, within its last ``size`` bytes, each cut to its last LONGEST characters."""
    return [line[-LONGEST:] for line in store.last_lines(path, size)]

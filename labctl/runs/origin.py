"""Origin of a run: the command that repeats it, its arguments, image, nodes, hosts, devices and code, for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from labctl.health import examine
from labctl.jobs import program
from labctl.jobs.request import RunOptions
from labctl.model import BOUNDS, Criterion
from labctl.records import redaction
from labctl.runs import changes
from labctl.system import human
from labctl.system.decode import convert

SWITCHES = {"rehearse": "--rehearse", "install": "--install", "local_rank": "--local-rank"}
"""Options of `labctl run` without a value, by their field."""
VALUED = {
    "script": "--script",
    "module": "-m",
    "project": "--project",
    "launcher": "--launcher",
    "deepspeed_config": "--deepspeed-config",
    "hostfile": "--hostfile",
    "include": "--include",
    "exclude": "--exclude",
}
"""Options of `labctl run` with a value, by their field."""
HARDWARE = ("processor", "cores", "memory")
"""Facts of a host to show, as `labctl health` names them."""
UNREADABLE = "unreadable"
"""Name of the fact that files of the record are broken, or of a kind that another labctl wrote."""
HASH = 12
"""Characters of an image's id or a commit."""
HOSTS = 4
"""Names of alike hosts to show."""


def target(request: Mapping[str, Any], name: str) -> str:
    """Return what `labctl run` takes to run it again: the workload, or `--script FILE` and the like."""
    options = convert(request.get("options") or {}, RunOptions)
    if request.get("workload") or not (options.script or options.module or options.command):
        return request.get("workload") or name
    return program.text(options)


def command(request: Mapping[str, Any] | None, settings: Sequence[Mapping[str, str]]) -> str:
    """Return the command line with a recorded request and the settings that were flags; empty without a request.

    Secrets are redacted where users put them: in settings, and in arguments of the script and the launcher.
    """
    if not request:
        return ""
    options = convert(request.get("options") or {}, RunOptions)
    words = ["labctl", "run", *filter(None, [request.get("workload")]), *_options(options)]
    for setting in settings:
        if setting.get("origin") == "flag":
            words += ["-s", _redacted_word(f"{setting['key']}={setting['value']}")]
    if last := options.command or options.words:
        words += ["--", *_redacted(last)]
    return shlex.join(words)


def _options(options: RunOptions) -> Iterator[str]:
    """Yield the words of all options but those of settings and of the program itself."""
    yield from (flag for field, flag in SWITCHES.items() if getattr(options, field))
    for field, flag in VALUED.items():
        if value := getattr(options, field):
            yield from (flag, str(value))
    if options.per:
        yield program.FLAGS[options.per]
    if options.timeout:
        yield from ("--timeout", f"{options.timeout:.15g}s")
    for key, value in options.arguments:
        yield from ("--set", key if value is None else _redacted_word(f"{key}={value}"))
    for argument in _redacted(options.launcher_arguments):
        yield f"--launcher-arg={argument}"
    for metric in options.metrics:
        yield from ("--metric", f"{metric.name}={metric.pattern}")
    for text in chain.from_iterable(map(_expectations, options.expect)):
        yield from ("--expect", text)


def _expectations(criterion: Criterion) -> Iterator[str]:
    """Yield a criterion's bounds as `--expect` takes them."""
    if criterion.relative:
        sign, share, run = criterion.relative
        yield f"{criterion.metric}{sign}{human.exact(100 * share)}% of {run}"
        return
    for sign, field in BOUNDS.items():
        if (bound := getattr(criterion, field)) is not None:
            yield f"{criterion.metric}{sign}{human.exact(bound)}"


def _redacted(words: Iterable[str]) -> Iterator[str]:
    """Yield the words without their secrets."""
    return (word for word, _ in redaction.redacted(words))


def _redacted_word(word: str) -> str:
    """Return a word without its secret."""
    return redaction.redacted_word(word)[0]


def rows(directory: Path, facts: Mapping[str, str], versions: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments, image, nodes, hosts, devices, code and broken files of a record, those that it has, by name.

    ``facts`` are the redacted ones of a comparison.
    """
    named = {
        "arguments": " ".join(_arguments(facts)),
        "image": _image(versions),
        "nodes": facts.get("nodes", ""),
        **_hosts(directory),
        "devices": _devices(chain.from_iterable((versions.get("devices") or {}).values())),
        "code": "; ".join(map(_commit, versions.get("code") or ())),
        UNREADABLE: facts.get(UNREADABLE, ""),
    }
    return {name: text for name, text in named.items() if text}


def _arguments(facts: Mapping[str, str]) -> Iterator[str]:
    """Yield the script's arguments: each option with its value, ``given`` standing for none."""
    for name, value in facts.items():
        if name.startswith("--"):
            yield name if value == "given" else f"{name} {value}"
        elif name == "arguments":
            yield value


def _image(versions: Mapping[str, Any]) -> str:
    """Return the image with the beginning of its id, as ``labctl/cpu (1d7aa7a76504)``."""
    digest = str(versions.get("image_id") or "").rpartition(":")[2][:HASH]
    return " ".join(filter(None, (versions.get("image"), f"({digest})" if digest else "")))


def _hosts(directory: Path) -> dict[str, str]:
    """Return processor, cores, memory and kernel of the hosts that were read before a run, alike ones in one row."""
    alike: dict[str, list[str]] = {}
    for host, snapshot in changes.read(directory).before.items():
        own = examine.facts_of(snapshot).get("", {})
        shown = [own[name] for name in HARDWARE if name in own]
        if "cores" in own:
            shown[shown.index(own["cores"])] = human.count(int(own["cores"]), "core")
        if "kernel" in own:
            shown.append(f"Linux {own['kernel']}")
        alike.setdefault(", ".join(shown), []).append(host)
    return {_hosts_name(names): text for text, names in alike.items() if text}


def _hosts_name(names: Sequence[str]) -> str:
    """Return ``host NAME`` or ``hosts NAME, NAME``."""
    return f"{'host' if len(names) == 1 else 'hosts'} {human.listed(names, HOSTS)}"


def _devices(devices: Iterable[Mapping[str, str]]) -> str:
    """Return the kinds of devices with their number, driver and firmware."""
    kinds = Counter((device["name"] or "unnamed", device["driver"], device["firmware"]) for device in devices)
    return "; ".join(f"{number} x {_kind(*kind)}" for kind, number in kinds.items())


def _kind(name: str, driver: str, firmware: str) -> str:
    """Return a device's name with the versions that are known."""
    versions = (f"driver {driver}" if driver else "", f"firmware {firmware}" if firmware else "")
    return ", ".join(filter(None, (name, *versions)))


def _commit(clone: Mapping[str, Any]) -> str:
    """Return a clone's path and commit, and if it has changes that are not in it."""
    changed = ", with changes that are not committed" if clone["dirty"] else ""
    return f"{clone['path']} at {clone['commit'][:HASH]}{changed}"

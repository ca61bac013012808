"""The script that reads a host's health, and its output as a snapshot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from labctl.health.model import KernelLine, Reading, Rules, Snapshot, Subject
from labctl.system import hostdump
from labctl.system.hostdump import HostDump

HEAD = "# health of this host\n"
"""First line, by which errors name the script."""
BEGIN = """\
begin
fact uid "$(id -u)"
fact 'clock before' "$(date +%s.%N)"
lines proc/sys/kernel/random/boot_id proc/uptime
"""
# A driver may hold a command for ever, and a child of the command its output: nothing waits for either.
ASK = r"""
# Run a command with a time limit in seconds; set `answer`, without its errors, and `code`, 124 if it did not end.
ask() {
    answer=$({
        { (
            timeout -k 1 "$@" < /dev/null
            printf '\nexit code %s\n' $?
        ) & } | timeout $((${1%.*} + 2)) sed '/^exit code [0-9]*$/q'
    } 2> /dev/null)
    code=${answer##*exit code }
    answer=${answer%exit code *}
    case $code in '' | 137 | *[!0-9]*) code=124 ;; esac
}
"""
LATE = "fact late"
"""Entry after the files and the lines of the kernel: an answer that the time limit cuts after it is used."""
SLOW = "fact slow"
"""Entry after which all is left out of a quick look."""
KERNEL = """\
log=$(dmesg 2> /dev/null) || {
    log=$(journalctl --quiet --dmesg --boot --output=short-monotonic --no-pager 2> /dev/null)
    [ -n "$log" ] || fact 'kernel error' "$({ dmesg > /dev/null; } 2>&1 | head -n 1)"
}
printf 'fact kernel\n'
printf '%s\n' "$log" | grep -E "$pattern" | tail -n 1000 | body
"""
OWN = """\
own() {
    name=$1 seconds=$2
    shift 2
    ask "$seconds" sh -c 'exec "$@" 2>&1' sh "$@"
    fact "own $name" "$(printf '%s %s\n' "$code" "$answer" | head -n 1 | head -c 1000)"
}
"""
_LINE = re.compile(r"^(?:<\d+>)?\[ *(\d+\.\d+)\] ?(.*)$")
ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, OSError, RuntimeError)
"""Errors of a parser or judge on garbage; a RuntimeError is a StopIteration in a generator, or too deep a recursion."""


def script(subjects: Iterable[Subject], rules: Rules, *, full: bool, folders: Iterable[str] = ()) -> str:
    """Return the script that prints a host's readings; ``full`` also those that take longer.

    ``folders``: those that the lab needs on the host, each with ``r`` or ``rw`` before it: ``rw /home/ann/lab``.
    Before those that labctl makes there is also ``own``: ``own rw /home/ann/lab``.
    """
    subjects = tuple(subjects)
    needed = "\n".join(folders)
    parts = [HEAD, hostdump.ENTRIES, ASK, BEGIN, f"health_paths={shlex.quote(needed)}\n" if needed else ""]
    parts += [f"({subject.script}\n)\n" for subject in subjects if subject.script]
    patterns = "|".join(f"({check.pattern})" for subject in subjects for check in subject.lines)
    parts += [f"pattern={shlex.quote(patterns)}\n", KERNEL] if patterns else []
    parts += _marked(LATE, ((subject.name, subject.late) for subject in subjects))
    parts += _marked(SLOW, ((subject.name, subject.slow) for subject in subjects)) if full else ()
    parts += [OWN] if rules.own_on else []
    parts += [f"own {shlex.join((own.name, f'{own.seconds:g}', *own.command))} &\n" for own in rules.own_on]
    return "".join((*parts, "wait\n", "finish\n"))


def _marked(mark: str, parts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the script of a mark and of the subjects' parts, with an entry after each that ended."""
    yield f"printf '{mark}\\n'\n"
    for name, text in parts:
        if text:
            yield f"({text}\n)\nprintf '{mark} of {name}\\n'\n"


def usable(output: str) -> str:
    """Return the entries that are whole, of an output that the time limit cut after LATE; any other as it is."""
    if f"\n{LATE}\n" not in output or re.search(r"^end$", output, re.MULTILINE):
        return output
    last = [*re.finditer(r"^[a-z].*", output, re.MULTILINE)][-1]
    whole = output if last[0] in (LATE, SLOW) else output[: last.start()]
    return f"{whole}\nend\n"


def quick_part(output: str) -> str:
    """Return what a quick look would have printed of subjects, of the output of a full one."""
    part, mark, _ = output.partition(f"\n{SLOW}\n")
    return f"{part}\nend\n" if mark else output


def snapshot(
    dump: HostDump,
    subjects: Iterable[Subject],
    rules: Rules,
    *,
    sent: float,
    received: float,
    quick: HostDump | None = None,
) -> Snapshot:
    """Build a snapshot from the script's output, which was asked for and had arrived at these times of labctl.

    ``quick``: the quick part of a full look's output, which tells the other readings.
    """
    subjects = tuple(subjects)
    uptime = dump.files.get("proc/uptime", "").partition(" ")[0]
    readings = [reading for subject in subjects for reading in _of_subject(subject, dump)]
    if quick:
        taken = {reading.key for subject in subjects for reading in _of_subject(subject, quick)}
        readings = [replace(reading, slow=reading.key not in taken) for reading in readings]
    return Snapshot(
        time=received,
        boot=dump.files.get("proc/sys/kernel/random/boot_id", "").strip(),
        uptime=float(uptime) if re.fullmatch(r"\d+(\.\d+)?", uptime) else 0.0,
        root=dump.facts.get("uid") == "0",
        readings=(*readings, clock_offset(dump, sent, received), *_own(dump, rules)),
        lines=tuple(kernel_lines(dump.facts.get("kernel", ""))),
        lines_why=(dump.facts["kernel error"] or "dmesg prints nothing") if "kernel error" in dump.facts else "",
    )


def _of_subject(subject: Subject, dump: HostDump) -> Sequence[Reading]:
    """Return a subject's readings; a single unknown one if the host's text cannot be parsed."""
    try:
        found = (*subject.readings(dump), *_cut(subject, dump))
        return tuple(replace(reading, subject=subject.name) for reading in found)
    except ERRORS as error:
        why = f"its output cannot be read: {type(error).__name__}: {error}"
        return (Reading(name=subject.name, value=None, source="", why=why),)


def _cut(subject: Subject, dump: HostDump) -> Iterator[Reading]:
    """Yield an unknown reading of a subject whose tools were asked and gave no answer before the output was cut."""
    for mark, text in ((LATE, subject.late), (SLOW, subject.slow)):
        fact = mark.removeprefix("fact ")
        if text and fact in dump.facts and f"{fact} of {subject.name}" not in dump.facts:
            yield Reading(name=subject.name, value=None, source="", why="it did not answer in time")
            return


def clock_offset(dump: HostDump, sent: float, received: float) -> Reading:
    """Return the seconds by which a host's clock is ahead of labctl's at least; 0 if it may be right.

    The host read its clock at the beginning and at the end of the script, both between ``sent`` and ``received``.
    """
    source = "date +%s.%N"
    try:
        before = float(dump.facts["clock before"])
        # An output that was cut has no second time.
        after = float(dump.facts.get("clock", before))
    except (ValueError, KeyError):
        return Reading(name="clock offset", value=None, source=source, why="date(1) prints no fraction of a second")
    offset = max(0.0, after - received) or min(0.0, before - sent)
    return Reading(name="clock offset", value=round(offset, 3), unit="s", source=source)


def kernel_lines(text: str) -> Iterator[KernelLine]:
    """Yield the lines of dmesg(1), or of journalctl(1) with monotonic times, that have a time."""
    for line in text.splitlines():
        if match := _LINE.match(line.strip()):
            yield KernelLine(float(match[1]), re.sub(r"^\S+ kernel: ", "", match[2]))


def _own(dump: HostDump, rules: Rules) -> Iterator[Reading]:
    """Yield the answer of each own check as a reading: its exit code and first line."""
    for own in rules.own_on:
        text = dump.facts.get(f"own {own.name}")
        yield Reading(
            name=f"own {own.name}",
            value=text,
            # Its command may have a password.
            source=own.name,
            why="" if text else "it did not answer in time",
        )

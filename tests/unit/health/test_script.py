"""The script that reads a host, and its output as a snapshot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from labctl.errors import HostError
from labctl.health import script
from labctl.health.model import KernelLine, LineCheck, OwnCheck, Reading, Rules, Subject
from labctl.system import hostdump
from labctl.system.hostdump import HostDump


def fans(dump: HostDump) -> Iterator[Reading]:
    """Yield the speed of the fan, and the model that only a slow tool prints."""
    yield Reading(name="fan", value=int(dump.files["fan"]), source="/fan", unit="rpm")
    if "model" in dump.facts:
        yield Reading(name="fan model", value=dump.facts["model"], source="fanctl", kind="fact")


FANS = Subject(name="Fans", script="text fan", slow="fact model F1", readings=fans)
OWN = OwnCheck(name="storage", command=("sh", "-c", "echo 'no mount'; echo more; exit 2"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write the files of a host's root folder: a fan, a boot id and an uptime."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b1\n")
    (tmp_path / "proc/uptime").write_text("123.45 99.00\n")
    (tmp_path / "fan").write_text("900\n")
    return tmp_path


def shells() -> list[tuple[str, ...]]:
    """Return the shells of this machine in which the script must work."""
    found = [(name,) for name in ("dash", "bash") if shutil.which(name)]
    return [*found, *([("busybox", "sh")] if shutil.which("busybox") else [])]


def output(text: str, root: Path, shell: tuple[str, ...] = ("sh",)) -> str:
    """Run a script on a root folder; return its output."""
    done = subprocess.run([*shell, "-c", text, "sh", str(root)], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def snapshot(printed: str, subjects: tuple[Subject, ...] = (FANS,), **times: Any) -> Any:
    """Return the snapshot of an output, with the given rules and times."""
    rules = times.pop("rules", Rules())
    dump = hostdump.read(printed, "gpu-1")
    return script.snapshot(dump, subjects, rules, **{"sent": 0.0, "received": 1e12, **times})


@pytest.mark.parametrize("shell", shells())
def test_a_host_is_read_in_any_posix_shell(root: Path, shell: tuple[str, ...]) -> None:
    """Run the script in dash, bash and busybox: boot, uptime, readings and own checks are there."""
    rules = Rules(own=(OWN,))
    now = snapshot(output(script.script((FANS,), rules, full=True), root, shell), rules=rules)
    assert (now.boot, now.uptime) == ("b1", 123.45)
    values = {reading.name: reading.value for reading in now.readings}
    assert (values["fan"], values["fan model"], values["own storage"]) == (900, "F1", "2 no mount")
    assert {reading.name for reading in now.readings if reading.subject == "Fans"} == {"fan", "fan model"}


def test_a_quick_look_leaves_out_the_slow_part(root: Path) -> None:
    """Run a quick look: no model, and the mark of the slow part is not in the script either."""
    text = script.script((FANS,), Rules(), full=False)
    assert [reading.name for reading in snapshot(output(text, root)).readings] == ["fan", "clock offset"]
    assert "F1" not in text
    assert script.SLOW not in text


def test_readings_that_only_a_full_look_takes_are_marked(root: Path) -> None:
    """Read a full look with its quick part: only the model is slow."""
    printed = output(script.script((FANS,), Rules(), full=True), root)
    now = snapshot(printed, quick=hostdump.read(script.quick_part(printed), "gpu-1"))
    assert {reading.name for reading in now.readings if reading.slow} == {"fan model"}
    quick = output(script.script((FANS,), Rules(), full=False), root)
    assert script.quick_part(quick) == quick


SLOW_TOOL = Subject(name="Tool", late="fact half 1; printf 'fact tool\\n'; sleep 60; fact tool 2")


@pytest.mark.parametrize("full", [False, True])
def test_what_came_before_a_tool_that_does_not_answer_is_used(root: Path, full: bool) -> None:
    """End a look whose tool sleeps: the files' reading is there, the tool is unknown, and so is an own check."""
    text = script.script((SLOW_TOOL, FANS), Rules(own=(OWN,)), full=full)
    with subprocess.Popen(
        ["sh", "-c", text, "sh", str(root)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout
        printed = "".join(takewhile(lambda line: line != "fact tool\n", shell.stdout))
        os.killpg(shell.pid, signal.SIGKILL)
    with pytest.raises(HostError):
        hostdump.read(printed, "gpu-1")
    now = snapshot(script.usable(printed), (SLOW_TOOL, FANS), rules=Rules(own=(OWN,)), received=time.time())
    assert {(reading.name, reading.value) for reading in now.readings} == {
        ("Tool", None), ("fan", 900), ("clock offset", 0.0), ("own storage", None)
    }  # fmt: skip
    assert {reading.why for reading in now.readings} == {"", "it did not answer in time"}


def test_an_output_is_used_up_to_its_last_whole_entry(root: Path) -> None:
    """Cut an output at each place: before the files are whole it stays; then no half of an entry is read."""
    wordy = Subject(name="Wordy", late="printf 'fact words\\n'; printf 'one\\ntwo\\n' | body", slow="fact more x")
    whole = output(script.script((FANS, wordy), Rules(), full=True), root)
    assert script.usable(whole) == whole
    begin = whole.index(f"\n{script.LATE}\n") + len(f"\n{script.LATE}\n")
    assert script.usable(whole[: begin - 1]) == whole[: begin - 1]
    for end in range(begin, whole.index("\nend\n")):
        dump = hostdump.read(script.usable(whole[:end]), "gpu-1")
        assert dump.files["fan"] == "900\n"
        assert dump.facts.get("words", "one\ntwo").strip() == "one\ntwo"
        now = script.snapshot(dump, (FANS, wordy), Rules(), sent=0, received=1e12)
        unknown = {reading.name for reading in now.readings if reading.value is None}
        assert "words" in dump.facts or "Wordy" in unknown


@pytest.mark.parametrize("shell", shells())
@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("30 sh -c 'echo a; echo b >&2; exit 3'", "3 a"),
        ("30 printf 'no newline'", "0 no newline"),
        ("30 sh -c 'sleep 60 & echo a'", "0 a"),
        ("0.2 sh -c 'trap : TERM; while :; do sleep 1; done'", "124"),
        ("30 no-such-program", "127"),
    ],
)
def test_a_command_is_asked_with_a_time_limit(root: Path, shell: tuple[str, ...], command: str, answer: str) -> None:
    """Ask commands that fail, leave a child with their output, or ignore SIGTERM: none is waited for."""
    tool = Subject(name="Tool", late=f'ask {command}\nfact tool "$(echo $code $answer)"')
    dump = hostdump.read(output(script.script((tool,), Rules(), full=False), root, shell), "gpu-1")
    assert dump.facts["tool"] == answer


def test_errors_name_the_script_by_its_first_line() -> None:
    """Look at the first line, by which an error of ssh names the script."""
    assert script.script((FANS,), Rules(), full=True).startswith("# health of this host\n")


def test_a_subject_cannot_disturb_another(root: Path) -> None:
    """Run a subject that changes folder, sets a variable and exits: the next one still works."""
    rude = Subject(name="Rude", script="cd /tmp; seconds=x; exit 3")
    printed = output(script.script((rude, FANS), Rules(), full=True), root)
    assert snapshot(printed).readings[0].value == 900


def test_an_own_check_that_does_not_end_is_ended(root: Path) -> None:
    """Run a command that sleeps for long, limited to 0.2 s: exit code 124."""
    rules = Rules(own=(OwnCheck(name="slow", command=("sleep", "60"), seconds=0.2),))
    reading = snapshot(output(script.script((), rules, full=False), root), (), rules=rules).readings[-1]
    assert reading.value == "124 "


def test_an_own_check_that_is_off_is_not_run(root: Path) -> None:
    """Turn the only own check off: the script has no word of it, and nothing is read."""
    rules = Rules(own=(OWN,), off=frozenset({OWN.name}))
    text = script.script((FANS,), rules, full=False)
    assert text == script.script((FANS,), Rules(), full=False)
    assert [each.name for each in snapshot(output(text, root), rules=rules).readings] == ["fan", "clock offset"]


def test_words_of_an_own_check_reach_it_unchanged(root: Path) -> None:
    """Pass words with spaces, quotes and a dollar: the command gets them as they are."""
    rules = Rules(own=(OwnCheck(name="echo", command=("printf", "%s|", "a b", "'$HOME'", '"')),))
    printed = output(script.script((), rules, full=False), root)
    assert snapshot(printed, rules=rules).readings[-1].value == "0 a b|'$HOME'|\"|"


def test_own_checks_run_at_the_same_time_and_no_child_of_theirs_is_waited_for(root: Path) -> None:
    """Run a check that waits for the next one, which leaves a child with its output, and two that print 10 MB."""
    commands = {
        "waits": f"until [ -e {root}/made ]; do sleep 0.1; done; echo late",
        "child": f"touch {root}/made; sleep 60 & echo hi; exit 1",
        "large": "head -c 10000000 /dev/zero | tr '\\0' x; exit 2",
        "lines": "yes | head -n 1000000",
    }
    own = tuple(OwnCheck(name=name, command=("sh", "-c", text), seconds=30) for name, text in commands.items())
    printed = output(script.script((), Rules(own=own), full=False), root)
    values = {each.name: each.value for each in snapshot(printed, (), rules=Rules(own=own)).readings}
    assert values == {
        "clock offset": values["clock offset"],
        "own waits": "0 late",
        "own child": "1 hi",
        "own large": f"2 {'x' * 998}",
        "own lines": "0 y",
    }


def test_the_words_of_an_own_check_are_not_kept(root: Path) -> None:
    """Run a check with a password: its name is the source of the reading."""
    rules = Rules(own=(OwnCheck(name="mysql", command=("true", "-p", "secret")),))
    now = snapshot(output(script.script((), rules, full=False), root), (), rules=rules)
    assert now.readings[-1].source == "mysql"
    assert "secret" not in str(now)


@pytest.mark.parametrize(
    "error", [StopIteration, ValueError, KeyError, ZeroDivisionError, AttributeError, TypeError, RecursionError]
)
def test_output_that_cannot_be_parsed_is_unknown(root: Path, error: type[Exception]) -> None:
    """Read a host whose text a subject cannot parse: one unknown reading of that subject, and the others."""

    def readings(_: HostDump) -> Iterator[Reading]:
        """Raise the error, as a parser on garbage does."""
        yield Reading(name="x", value=1, source="")
        raise error("garbage")

    broken = Subject(name="Broken", readings=readings)
    first, second, _ = snapshot(output(script.script((FANS,), Rules(), full=False), root), (broken, FANS)).readings
    assert (first.name, first.value) == ("Broken", None)
    assert first.why.startswith("its output cannot be read: ")
    assert second.value == 900


def test_garbage_is_a_host_error_or_a_snapshot(root: Path) -> None:
    """Cut and change the output at random: HostError, or a snapshot; no other exception."""
    whole = output(script.script((FANS,), Rules(own=(OWN,)), full=True), root)
    chance = random.Random(5)  # noqa: S311 - the same on each run
    for _ in range(300):
        place = chance.randrange(len(whole))
        text = (
            whole[:place] + chance.choice(("", "\0", "\nend\n", "\t", "9" * 5)) + whole[place + chance.randrange(9) :]
        )
        try:
            snapshot(text[: chance.randrange(len(text) * 2)], rules=Rules(own=(OWN,)))
        except HostError:
            continue


LINES = """\
[    1.500000] usb 1-1: new device
<4>[   12.000001] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
[  13.000000][    T7] with its caller
[   14.25] gpu-1 kernel: of journalctl
no time
"""


def test_kernel_lines_of_dmesg_and_journalctl_have_their_times() -> None:
    """Parse lines of both programs: time and text, without level and host's name; lines without time are dropped."""
    assert list(script.kernel_lines(LINES)) == [
        KernelLine(1.5, "usb 1-1: new device"),
        KernelLine(12.000001, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        KernelLine(13.0, "[    T7] with its caller"),
        KernelLine(14.25, "of journalctl"),
    ]


def fake(folder: Path, name: str, text: str) -> None:
    """Write a program of the shell into a folder."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("dmesg", "journalctl", "lines", "why"),
    [
        ("echo '[ 1.0] a Xid'; echo '[ 2.0] b'", "exit 1", ["a Xid"], ""),
        ("echo 'not permitted' >&2; exit 1", "echo '[ 1.0] gpu kernel: c Xid'", ["c Xid"], ""),
        ("echo 'not permitted' >&2; exit 1", "exit 1", [], "not permitted"),
        ("exit 1", "exit 1", [], "dmesg prints nothing"),
        ("exit 0", "exit 1", [], ""),
    ],
)
def test_kernel_lines_are_read_from_dmesg_else_the_journal_else_it_is_said_why_not(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    dmesg: str,
    journalctl: str,
    lines: list[str],
    why: str,
) -> None:
    """Run with fake programs: matching lines of the first that works; else the reason, also if it prints none."""
    tools = root / "tools"
    tools.mkdir()
    fake(tools, "dmesg", dmesg)
    fake(tools, "journalctl", journalctl)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    subject = Subject(name="X", lines=(LineCheck(name="xid", pattern="Xid", judge=lambda _: None),))
    now = snapshot(output(script.script((subject,), Rules(), full=False), root), (subject,))
    assert ([line.text for line in now.lines], now.lines_why) == (lines, why)


def clock(before: str, after: str, **times: float) -> Reading:
    """Return the clock offset of a host whose clock printed these times."""
    dump = HostDump("gpu-1", facts={"clock before": before, "clock": after})
    return script.clock_offset(dump, times["sent"], times["received"])


def test_a_clock_is_wrong_by_at_least_what_the_transfer_cannot_explain() -> None:
    """Compare a host's times with those around them: 0 between these, else the distance; unknown without a number."""
    assert clock("100.0", "101.0", sent=99, received=102).value == 0
    assert clock("105.0", "106.0", sent=99, received=102).value == 4
    assert clock("90.0", "91.0", sent=99, received=102).value == -9
    unknown = clock("100.N", "101.N", sent=99, received=102)
    assert unknown.value is None
    assert unknown.why

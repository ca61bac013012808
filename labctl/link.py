"""The ssh process behind a connection to a host: it logs in, and what goes to that host goes through it."""

from __future__ import annotations

import math
import random
import re
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from labctl import pipes, shell, ssh_words
from labctl.errors import HostError
from labctl.hosts import Target
from labctl.ssh_words import destination

# Seconds before another try at a host whose sshd hung up before the login.
PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2)
# Seconds for a login of its own that a script may need. When a host falls silent ssh sees it after eight, and a script
# that had just begun tries this before it gives up.
AGAIN = 5
# What the person's own config may say of commands, forwarding and multiplexing is not meant for these.
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes", "-o", "ConnectionAttempts=1", "-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"),
    *("-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no", "-o", "ControlPersist=no"),
)
# Words: a mark, the engine's socket, the caller's script. `cat` ends with its input, and with it the connection.
_OPENING = """
state=ready user=$(id -un 2>/dev/null)
[ -S "$2" ] || command -v docker >/dev/null 2>&1 || state=absent
[ ! -S "$2" ] || [ -w "$2" ] || state=denied
printf '\\n%s\\n' "$1"
sh -c "$3" </dev/null
printf '\\n%s %s %s %s\\n' "$1" "$?" "$state" "${user:-somebody}"
exec cat >/dev/null
"""


class Link:
    """Nothing is opened yet. Its files begin with ``stem``, a short path; ssh tries for so many seconds."""

    def __init__(self, target: Target, stem: str, patience: float) -> None:
        self.target = target
        self._control, self._errors, self._number = f"{stem}.ctl", Path(f"{stem}.err"), Path(f"{stem}.pid")
        self._ssh = ("ssh", *_OPTIONS, *ssh_words.options(target))
        self._patience = math.ceil(patience)
        through = ("-o", "LogLevel=ERROR", "-o", "ControlMaster=no", "-S", self._control)
        self.client = (*self._ssh, "-o", f"ConnectTimeout={AGAIN}", *through)
        """The ssh command that goes through here; where sshd takes no further session it logs in by itself."""
        self._master: pipes.Held | None = None
        self._greeting = ""
        self._closing = threading.Event()

    def open(self, opening: str, seconds: float) -> str:
        """Log in and run the opening script; returns what that printed. HostError, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        pauses = iter(PAUSES)
        refused: HostError | None = None
        while True:
            try:
                return self._greeted(opening, deadline - time.monotonic())
            except HostError as error:
                # A last try may have had next to no time: why the one before failed says more.
                if refused and time.monotonic() >= deadline:
                    raise refused from error
                # Others may be at the door too, as where one gate leads to all hosts.
                wait = next(pauses, math.inf) * random.uniform(0.5, 1.5)  # noqa: S311 - so that not all come back at once
                late = time.monotonic() + wait > deadline
                if late or not ssh_words.passing(self.said()) or self._closing.wait(wait):
                    raise
                refused = error

    def forward(self, path: str, here: Path, seconds: float) -> None:
        """Make a socket here that leads to that of this path on the host. HostError names the host."""
        words = ("ssh", "-F", "none", "-S", self._control, "-O", "forward", "-L", f"{here}:{path}", "host")
        try:
            done = shell.run(words, timeout=seconds, check=False)
        except shell.OutOfTime as error:
            raise ssh_words.silent(self.target, seconds) from error
        if done.code != 0:
            said = done.err.strip() or f"code {done.code}"
            raise ssh_words.error(self.target, f"its socket {path} cannot be forwarded: {said}")

    def said(self) -> str:
        """What this ssh said on its standard error."""
        return self._errors.read_text(encoding="utf-8", errors="replace") if self._errors.exists() else ""

    def said_since(self) -> str:
        """What it said after it had logged in: not the banner of the host's sshd, nor what scripts say at login."""
        return self.said().removeprefix(self._greeting)

    def lost(self, seconds: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        return self._master is None or self._master.ended(seconds)

    def close(self) -> None:
        """End it, with whatever still goes through."""
        self._closing.set()
        if self._master:
            self._master.end()

    def _greeted(self, opening: str, seconds: float) -> str:
        mark = secrets.token_hex(8)
        command = remote(_OPENING, (mark, self.target.docker, opening))
        waiting = ("-o", f"ConnectTimeout={self._patience}", "-o", "LogLevel=INFO")
        shared = ("-o", "ControlMaster=yes", "-S", self._control)
        words = (*self._ssh, *waiting, *shared, "--", destination(self.target), command)
        self._master = pipes.Held(words, self._errors)
        self._number.write_text(f"{self._master.number}\n", encoding="ascii")
        try:
            told, end = self._told(self._master, mark, seconds)
            self._judge(*end)
            self._greeting = self.said()
        except BaseException:
            self._master.end()
            raise
        return told

    def _told(self, master: pipes.Held, mark: str, seconds: float) -> tuple[str, list[str]]:
        """What the opening script printed, and the words that come after it."""
        began = time.monotonic()
        # What the login itself prints comes before the mark.
        before: list[str] = []
        told: list[str] | None = None
        with closing(master.lines(seconds)) as lines:
            for line in lines:
                if told is None and line == f"{mark}\n":
                    if noise := "".join(before).strip():
                        raise ssh_words.talkative(self.target, noise)
                    told = []
                elif told is not None and line.startswith(f"{mark} "):
                    return "".join(told).removesuffix("\n"), line.split(maxsplit=3)[1:]
                else:
                    (before if told is None else told).append(line)
        if time.monotonic() - began >= seconds:
            raise ssh_words.silent(self.target, seconds)
        raise ssh_words.why(self.target, self.said() or "".join(before))

    def _judge(self, code: str, engine: str, user: str) -> None:
        """HostError if the host cannot be used, by the code of the opening script and what was seen of the engine."""
        path, user = self.target.docker, user.rstrip()
        if ssh_words.distrusted(self.said()):
            raise ssh_words.why(self.target, self.said())
        if code != "0":
            last = "\n".join(self.said().rstrip().splitlines()[-5:])
            raise ssh_words.error(self.target, f"cannot say what it has: code {code}\n{last}".rstrip())
        if engine == "absent":
            hint = f"`labctl setup` there installs it; or say `docker=` in {self.target.where or 'the inventory'}"
            text = f"has no Docker Engine: neither {path} nor a docker command; without it a host cannot have nodes"
            raise ssh_words.error(self.target, text, hint)
        if engine == "denied":
            hint = f"{ssh_words.command(self.target, '-t')} sudo usermod -aG docker {shlex.quote(shlex.quote(user))}"
            raise ssh_words.error(self.target, f"{user} may not use {path}", hint)


def remote(script: str, words: Sequence[str]) -> str:
    """A command line for the login shell over there, whichever it is: it starts a POSIX one that speaks English."""
    return " ".join(("exec env LC_ALL=C sh -c", *(_quoted(word) for word in (script, "sh", *words))))


def _quoted(word: str) -> str:
    # To fish a backslash between single quotes is a sign; between double quotes two are one to every shell.
    return "'" + re.sub(r"['\\]+", lambda found: _between_double_quotes(found[0]), word) + "'"


def _between_double_quotes(signs: str) -> str:
    doubled = signs.replace("\\", "\\\\")
    return f"'\"{doubled}\"'"

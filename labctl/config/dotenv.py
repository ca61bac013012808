"""One strict dialect of ``.env``: nothing is expanded, nothing is guessed, every error names its line.

Blank lines, ``# comment`` lines and ``KEY=VALUE``, optionally after ``export``. A bare value has neither blanks nor
quotes; in single quotes everything is literal; in double quotes the escapes are \\ \" \n \r \t and no others. ``$`` is
an ordinary character everywhere. A comment begins with ``#`` at the start of a line, after a blank, or after a quote.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from labctl.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_DOUBLE_QUOTED = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_BARE = re.compile(r"[^\s'\"]*")
_PORTABLE = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_ESCAPED = str.maketrans({character: f"\\{letter}" for letter, character in _ESCAPES.items()})


@dataclass(frozen=True, slots=True)
class Entry:
    """One assignment and the line it stands on."""

    key: str
    value: str = field(repr=False)
    line: int


def read(path: Path, *, shown: str = "") -> tuple[Entry, ...]:
    """The entries of a file, called ``shown`` in errors. ConfigError where unreadable or writable by everyone."""
    shown = shown or str(path)
    try:
        everyone_writes = path.stat().st_mode & stat.S_IWOTH
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from None
    if everyone_writes:
        raise ConfigError(f"{shown}: everyone on this machine may write to it", hint=f"chmod o-w {shown}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8 text", hint=f"save {shown} as UTF-8") from None
    return parse(text, shown)


def parse(text: str, path: str) -> tuple[Entry, ...]:
    """The entries of a text, in order. ConfigError ``path:line: reason``, which never shows a value."""
    entries: dict[str, Entry] = {}
    # Not splitlines(): it also breaks at U+0085, U+2028 and others, which may stand inside a value.
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            assignment = _assignment(line.removesuffix("\r"))
        except _Unreadable as error:
            raise ConfigError(f"{path}:{number}: {error.reason}", hint=error.hint) from None
        if assignment is None:
            continue
        key, value = assignment
        if key in entries:
            reason = f"duplicate key {key}, first on line {entries[key].line}"
            raise ConfigError(f"{path}:{number}: {reason}", hint="keep one of the two")
        entries[key] = Entry(key, value, number)
    return tuple(entries.values())


def quote(value: str) -> str:
    """Text that ``parse`` reads back as exactly this value. ValueError on NUL and on lone surrogates."""
    if "\0" in value or not is_utf8(value):
        raise ValueError("a value cannot hold NUL or lone surrogates")
    if _PORTABLE.fullmatch(value):
        return value
    if not any(character in value for character in "'\r\n"):
        return f"'{value}'"
    return f'"{value.translate(_ESCAPED)}"'


def is_utf8(value: str) -> bool:
    """Whether UTF-8 can say it: lone surrogates, such as undecodable bytes of the process environment, it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


class _Unreadable(Exception):
    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def _assignment(line: str) -> tuple[str, str] | None:
    if line.startswith("\ufeff"):
        raise _Unreadable("begins with a byte order mark", "save the file as UTF-8 without BOM")
    for character, name in ("\0", "NUL"), ("\r", "carriage return"):
        # In comments too: a file with lone carriage returns as line ends would be one long comment.
        if character in line:
            raise _Unreadable(f"a {name} inside the line", "end lines with LF or CRLF")
    line = line.strip(" \t")
    if not line or line.startswith("#"):
        return None
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        raise _not_an_assignment(line)
    key, text = match.groups()
    return key, _value(key, text)


def _not_an_assignment(line: str) -> _Unreadable:
    """The reason, without a word of the line itself: what is misplaced may be a secret."""
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*[ \t]*:(\s|$)", line):
        return _Unreadable("a colon where '=' belongs", "write KEY=value, not KEY: value")
    if "=" not in line:
        return _Unreadable("no '='", "write KEY=value; a comment begins with #")
    if re.match(r"(export[ \t]+)?[A-Za-z_][A-Za-z0-9_]*\s+=", line):
        return _Unreadable("blanks before '='", "write KEY=value without blanks around '='")
    if re.match(r"(export[ \t]+)?=", line):
        return _Unreadable("no key before '='", "write KEY=value")
    return _Unreadable(
        "what stands before '=' is not a key",
        "a key is letters, digits and _, and does not begin with a digit",
    )


def _value(key: str, text: str) -> str:
    if text.startswith("'"):
        end = text.find("'", 1)
        if end < 0:
            raise _unclosed("single", key)
        _only_comment_after_quote(text[end + 1 :])
        return text[1:end]
    if text.startswith('"'):
        match = _DOUBLE_QUOTED.match(text)
        if match is None:
            raise _unclosed("double", key)
        _only_comment_after_quote(text[match.end() :])
        return re.sub(r"\\(.)", _unescape, match[1], flags=re.DOTALL)
    return _bare(key, text)


def _unclosed(kind: str, key: str) -> _Unreadable:
    return _Unreadable(
        f"the {kind} quote of {key} is not closed on this line",
        f'a line break inside a value is written \\n: {key}="first\\nsecond"',
    )


def _only_comment_after_quote(rest: str) -> None:
    rest = rest.strip(" \t")
    if rest and not rest.startswith("#"):
        raise _Unreadable(
            "text after the closing quote",
            'after it only a # comment may follow; inside double quotes a quote is written \\"',
        )


def _unescape(match: re.Match[str]) -> str:
    if match[1] not in _ESCAPES:
        raise _Unreadable(
            f"unknown escape \\{match[1]} in double quotes",
            'known are \\\\ \\" \\n \\r \\t; in single quotes a backslash is literal',
        )
    return _ESCAPES[match[1]]


def _bare(key: str, text: str) -> str:
    match = _BARE.match(text)
    assert match is not None  # noqa: S101 - it also matches nothing
    value, rest = match[0], text[match.end() :]
    comment = rest.lstrip(" \t")
    if not rest or (comment != rest and comment.startswith("#")):
        return value
    if rest[0] in "'\"":
        raise _Unreadable(f"a quote inside the bare value of {key}", f"quote the whole value: {key}='...' or \"...\"")
    if not value and rest[0] in " \t":
        raise _Unreadable("blanks after '='", f"write {key}=value without blanks around '='")
    blank = "blanks" if rest[0] in " \t" else f"a blank (U+{ord(rest[0]):04X})"
    raise _Unreadable(f"{blank} in the bare value of {key}", f"a value with blanks must be quoted: {key}='...'")

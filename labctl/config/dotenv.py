"""A strict dialect of ``.env``: nothing is expanded, nothing is guessed, every error names its line.

Blank lines, ``# comment`` lines and ``KEY=VALUE``, optionally after ``export``. A bare value has neither blanks nor
quotes; in single quotes everything is literal; in double quotes the escapes are \\ \" \n \r \t and no others. ``$`` is
an ordinary character everywhere. A comment begins with ``#`` at the start of a line, after a blank, or after a quote.
A byte order mark may begin the file.
python-dotenv reads the lines; what it would guess at, or what other readers take differently, is refused first.
"""

from __future__ import annotations

import re
import shlex
import stat
from io import StringIO
from pathlib import Path

from msgspec import Struct

from labctl.errors import ConfigError

_PORTABLE = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"})
_KEY = r"(?:export[ \t]+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)"
_UNCLOSED = "the {} quote of {{key}} is not closed on this line"
_ONE_LINE = 'a line break inside a value is written \\n: {key}="first\\nsecond"'
_LINE_ENDS = "end lines with LF or CRLF"
_NO_BLANKS = "write {key}=value without blanks around '='"
_QUOTE_BLANKS = "a value with blanks must be quoted: {key}='...'"
# Not in comments either: a file with lone carriage returns as line ends would be one long comment.
_REFUSED_ANYWHERE = (
    ("\ufeff", "begins with a byte order mark", "save the file as UTF-8 without BOM"),
    (r"[^\0]*\0", "a NUL inside the line", _LINE_ENDS),
    (r"[^\r]*\r", "a carriage return inside the line", _LINE_ENDS),
)
# The first pattern that matches gives the reason. No reason quotes a value or an invalid key: either may be a secret.
_REFUSED = (
    (rf"{_KEY}[ \t]*:(\s|$)", "a colon where '=' belongs", "write KEY=value, not KEY: value"),
    (r"[^=]*$", "no '='", "write KEY=value; a comment begins with #"),
    (rf"{_KEY}\s+=", "blanks before '='", "write KEY=value without blanks around '='"),
    (r"(export[ \t]+)?=", "no key before '='", "write KEY=value"),
    (rf"(?!{_KEY}=)", "what stands before '=' is not a key", "a key is letters, digits and _, and no digit first"),
    (rf"{_KEY}='[^']*$", _UNCLOSED.format("single"), _ONE_LINE),
    (rf'{_KEY}="[^"\\]*(\\.[^"\\]*)*\\?$', _UNCLOSED.format("double"), _ONE_LINE),
    (
        rf"""{_KEY}=('[^']*'|"[^"\\]*(\\.[^"\\]*)*")[ \t]*[^# \t]""",
        "text after the closing quote",
        'after it only a # comment may follow; inside double quotes a quote is written \\"',
    ),
    (
        rf'{_KEY}="[^"\\]*(\\[\\"nrt][^"\\]*)*\\(?P<character>[^\\"nrt])',
        "unknown escape \\{character} in double quotes",
        'known are \\\\ \\" \\n \\r \\t; in single quotes a backslash is literal',
    ),
    (rf"""{_KEY}=[^\s'"]+['"]""", "a quote inside the bare value of {key}", "quote the whole value: {key}='...'"),
    (rf"{_KEY}=[ \t]+[^# \t]", "blanks after '='", _NO_BLANKS),
    (
        rf"{_KEY}=[\u2018-\u201f]",
        "the value of {key} begins with a curly quote, as word processors write it",
        "type the quotes again, straight: {key}='...'",
    ),
    (
        rf"(?i:{_KEY}=(?P<number>[0-9]+)[ \t]+(?P<unit>[kmgt]i?b?)([ \t]|$))",
        "blanks in the bare value of {key}",
        "write a size as {key}={number}{unit}; other values with blanks must be quoted",
    ),
    (rf"""{_KEY}=[^\s'"]+[ \t]+[^# \t]""", "blanks in the bare value of {key}", _QUOTE_BLANKS),
    (
        rf"""{_KEY}=[^\s'"]*(?P<character>[^\S \t])""",
        "a blank (U+{code:04X}) in the bare value of {key}",
        _QUOTE_BLANKS,
    ),
)


class Entry(Struct, frozen=True):
    """An assignment of a .env file: key, value and line number."""

    key: str
    value: str
    line: int

    def __repr__(self) -> str:
        """Show key and line without the value, which may be a secret."""
        return f"Entry({self.key!r}, line {self.line})"  # its value may be a secret


def read(path: Path, *, shown: str = "") -> tuple[Entry, ...]:
    """Read a .env file, ``shown`` in errors. ConfigError if unreadable, world-writable, not UTF-8 or invalid."""
    shown = shown or str(path)
    try:
        everyone_writes = path.stat().st_mode & stat.S_IWOTH
        data = path.read_bytes()
    except OSError as error:
        hint = f"ls -ld {shlex.quote(shown)}; make it a file that you may read, or remove it"
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}", hint=hint) from None
    if everyone_writes:
        raise ConfigError(f"{shown}: everyone on this machine may write to it", hint=f"chmod o-w {shown}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{shown}:{line}: not UTF-8 text", hint=f"save {shown} as UTF-8") from None
    return parse(text, shown)


def parse(text: str, path: str) -> tuple[Entry, ...]:
    """Return a .env text's entries, in order. ConfigError with ``path:line`` if ambiguous or a key is repeated."""
    from dotenv.parser import parse_stream

    entries: dict[str, Entry] = {}
    # Not splitlines(): it also breaks at U+0085, U+2028 and others, which may stand inside a value.
    for number, whole in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = whole.removesuffix("\r").strip(" \t")
        assigns = line[:1] not in ("", "#")
        refused = (*_REFUSED_ANYWHERE, *_REFUSED) if assigns else _REFUSED_ANYWHERE
        _require_unambiguous(line, refused, f"{path}:{number}")
        if not assigns:
            continue
        binding = next(parse_stream(StringIO(line)))
        # In single quotes python-dotenv takes a backslash for an escape.
        literal = re.match(rf"{_KEY}='(?P<value>[^']*)'", line)
        key, value = literal.group("key", "value") if literal else (binding.key or "", binding.value or "")
        if key in entries:
            reason = f"duplicate key {key}, first on line {entries[key].line}"
            raise ConfigError(f"{path}:{number}: {reason}", hint="keep one of the two")
        entries[key] = Entry(key, value, number)
    return tuple(entries.values())


def _require_unambiguous(line: str, refused: tuple[tuple[str, str, str], ...], where: str) -> None:
    """Raise ConfigError with reason and hint if a line matches one of these refused patterns."""
    for pattern, reason, hint in refused:
        if match := re.match(pattern, line):
            fields = {"code": ord(match.groupdict().get("character") or "\0"), **match.groupdict()}
            raise ConfigError(f"{where}: {reason.format(**fields)}", hint=hint.format(**fields))


def quote(value: str) -> str:
    """Quote a value, if needed, so that ``parse`` returns it unchanged. ValueError on NUL or a lone surrogate."""
    if "\0" in value or not is_utf8(value):
        raise ValueError("a value cannot hold NUL or lone surrogates")
    if _PORTABLE.fullmatch(value):
        return value
    if not any(character in value for character in "'\r\n"):
        return f"'{value}'"
    return f'"{value.translate(_ESCAPED)}"'


def is_utf8(value: str) -> bool:
    """Tell if a text can be encoded as UTF-8: lone surrogates, as from undecodable environment bytes, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)

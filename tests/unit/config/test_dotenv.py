from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labctl.config import dotenv
from labctl.errors import ConfigError

any_value = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))

# Where readers of .env differ, or could: compose's env_file and python-dotenv disagree on many of these.
READS: dict[str, dict[str, str]] = {
    # bare values
    "A=1": {"A": "1"},
    "A=": {"A": ""},
    "A=   ": {"A": ""},
    "A=1   ": {"A": "1"},
    "  A=1": {"A": "1"},
    "\tA=1": {"A": "1"},
    "A=b=c==": {"A": "b=c=="},
    "A=$HOME": {"A": "$HOME"},
    "A=${HOME}": {"A": "${HOME}"},
    "A=${B:-x}": {"A": "${B:-x}"},
    "A=$$": {"A": "$$"},
    "A=p@ss$word1": {"A": "p@ss$word1"},
    "A=$(id)": {"A": "$(id)"},
    "A=`id`": {"A": "`id`"},
    "A=${B}\nB=1": {"A": "${B}", "B": "1"},
    "B=1\nA=${B}": {"B": "1", "A": "${B}"},
    r"A=a\nb": {"A": r"a\nb"},
    r"A=C:\temp": {"A": r"C:\temp"},
    "A=x\\": {"A": "x\\"},
    "A=x;y": {"A": "x;y"},
    "A=yes": {"A": "yes"},
    "A=0o17": {"A": "0o17"},
    "A=null": {"A": "null"},
    "A=*alias": {"A": "*alias"},
    "A=!!python/object": {"A": "!!python/object"},
    "A=~": {"A": "~"},
    "A=ü": {"A": "ü"},
    "A=[1,2]": {"A": "[1,2]"},
    # comments
    "# A=1": {},
    "   # A=1": {},
    "#A=1": {},
    "A=1 # c": {"A": "1"},
    "A=1\t#c": {"A": "1"},
    "A=1#c": {"A": "1#c"},
    "A=#c": {"A": "#c"},
    "A=   # only comment": {"A": ""},
    "A='x' # c": {"A": "x"},
    'A="x"#c': {"A": "x"},
    "A='x # y'": {"A": "x # y"},
    'A="x # y"': {"A": "x # y"},
    "A=1 # it's": {"A": "1"},
    # quotes
    "A=''": {"A": ""},
    'A=""': {"A": ""},
    "A='  x  '": {"A": "  x  "},
    "A='$HOME'": {"A": "$HOME"},
    'A="it\'s"': {"A": "it's"},
    "A='say \"x\"'": {"A": 'say "x"'},
    r"A='a\nb\'": {"A": r"a\nb" + "\\"},
    'A="double $HOME"': {"A": "double $HOME"},
    'A="${HOME}"': {"A": "${HOME}"},
    r'A="a\nb\tc\rd"': {"A": "a\nb\tc\rd"},
    r'A="a\\nb"': {"A": r"a\nb"},
    r'A="say \"x\""': {"A": 'say "x"'},
    r'A="x\\"': {"A": "x\\"},
    "A='x'   ": {"A": "x"},
    "A='x\u2028y\x85z\x0b'": {"A": "x\u2028y\x85z\x0b"},
    # lines and keys
    "": {},
    "\n\n": {},
    "A=1\r\nB=2\r\n": {"A": "1", "B": "2"},
    "\ufeffA=1\r\n": {"A": "1"},
    "A=x\u201d": {"A": "x\u201d"},
    "A='x'\r\n": {"A": "x"},
    "export A=1": {"A": "1"},
    "export \t A=1": {"A": "1"},
    "export=1": {"export": "1"},
    "_a1=x": {"_a1": "x"},
    "a=1\nA=2": {"a": "1", "A": "2"},
}

REFUSES: dict[str, tuple[int, str]] = {
    "A: yaml": (1, "colon"),
    "A:": (1, "colon"),
    "A : yaml": (1, "colon"),
    "A": (1, "no '='"),
    "export A": (1, "no '='"),
    "export": (1, "no '='"),
    "just some words": (1, "no '='"),
    "A =1": (1, "blanks before '='"),
    "A\t= 1": (1, "blanks before '='"),
    "A= 1": (1, "blanks after '='"),
    "A= 'x'": (1, "blanks after '='"),
    "=1": (1, "no key"),
    "1A=x": (1, "not a key"),
    "A-B=x": (1, "not a key"),
    "A.B=x": (1, "not a key"),
    "Ä=x": (1, "not a key"),
    "exportA B=x": (1, "not a key"),
    "A=two words": (1, "must be quoted|blanks in the bare value of A"),
    "A=x\u00a0y": (1, r"U\+00A0"),
    "A=x\u00a0": (1, r"U\+00A0"),
    "A=x\x0c": (1, r"U\+000C"),
    "A=it's": (1, "quote inside"),
    'A=a"b"': (1, "quote inside"),
    "A='open": (1, "single quote of A is not closed"),
    'A="open': (1, "double quote of A is not closed"),
    'A="first\nsecond"': (1, "not closed"),
    "A='first\nsecond'": (1, "not closed"),
    r'A="x\"': (1, "not closed"),
    "A='": (1, "not closed"),
    "A='a'b": (1, "after the closing quote"),
    "A='a''b'": (1, "after the closing quote"),
    r"A='it\'s'": (1, "after the closing quote"),
    'A="a" b': (1, "after the closing quote"),
    r'A="\x41"': (1, r"unknown escape \\x"),
    r'A="\$HOME"': (1, r"unknown escape \\\$"),
    r'A="C:\temp\new\q"': (1, r"unknown escape \\q"),
    "A=1\nB=2\nA=3": (3, "duplicate key A, first on line 1"),
    "A=1\nA=1": (2, "duplicate key A, first on line 1"),
    "# ok\n\nB=1\nB x": (4, "no '='"),
    "A=1\rB=2": (1, "carriage return"),
    "# old\rA=2": (1, "carriage return"),
    "A=x\0y": (1, "NUL"),
    "# \0": (1, "NUL"),
    "A=1\n\ufeffB=1": (2, "byte order mark"),
    "A=\u201cx\u201d": (1, "curly quote"),
    "A=\u2018two words\u2019": (1, "curly quote"),
    "A=8 g": (1, "blanks in the bare value of A"),
}


@pytest.mark.parametrize("text", READS)
def test_reads(text: str) -> None:
    """Parse each text of READS: its keys and values."""
    assert {entry.key: entry.value for entry in dotenv.parse(text, ".env")} == READS[text]


@pytest.mark.parametrize("text", REFUSES)
def test_refuses_with_the_line(text: str) -> None:
    """Parse each text of REFUSES: ConfigError with line and reason, exit code 2."""
    line, reason = REFUSES[text]
    with pytest.raises(ConfigError, match=rf"\A\.env:{line}: .*({reason})") as caught:
        dotenv.parse(text, ".env")
    assert caught.value.exit_code == 2


def test_entries_know_their_lines() -> None:
    """Parse two keys: each entry has its line."""
    assert dotenv.parse("# x\nA=1\n\nB='2'\n", ".env") == (dotenv.Entry("A", "1", 2), dotenv.Entry("B", "2", 4))


@pytest.mark.parametrize(
    "text", ["A=CANARY x", "A='CANARY", 'A="CANARY', "A='x'CANARY", "CANARY-x=1", "CANARY x", "CANARY"]
)
def test_errors_never_show_what_may_be_a_secret(text: str) -> None:
    """Parse faulty lines with a secret: neither message, hint nor repr has it."""
    with pytest.raises(ConfigError) as caught:
        dotenv.parse(text, ".env")
    assert "CANARY" not in caught.value.message + caught.value.hint
    assert caught.value.__cause__ is None
    assert "CANARY" not in repr(dotenv.parse("A=CANARY", ".env"))


@given(any_value)
@example("\r\n")
@example("'\"\\")
@example("#x")
@example("\u2028\x85\x0b\x1c\ufeff")
@example("${HOME} $$ `id` \\n")
@example("x" * 2**20)
def test_any_value_survives_quoting(value: str) -> None:
    """Quote any value and parse it: the same value."""
    assert [entry.value for entry in dotenv.parse(f"A={dotenv.quote(value)}", ".env")] == [value]


@given(any_value, any_value)
def test_quoted_values_stand_beside_each_other_and_comments(first: str, second: str) -> None:
    """Parse two quoted values with a comment and CRLF: both values."""
    text = f"A={dotenv.quote(first)} # c\r\nB={dotenv.quote(second)}\r\n"
    assert [entry.value for entry in dotenv.parse(text, ".env")] == [first, second]


@given(any_value)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Parse any text: entries or ConfigError, nothing else."""
    with suppress(ConfigError):
        dotenv.parse(text, ".env")


@pytest.mark.parametrize("value", ["a\0b", "a\ud800"])
def test_quote_refuses_what_no_file_can_hold(value: str) -> None:
    """Quote a NUL or a lone surrogate: ValueError."""
    with pytest.raises(ValueError, match="NUL or lone surrogates"):
        dotenv.quote(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"A=1\nB=\xff\n", r"\.env:2: not UTF-8"),
        ("A=1".encode("utf-16"), r"\.env:1: not UTF-8"),
        (b"A=1\n\nB=\0", r"\.env:3: a NUL"),
    ],
)
def test_read_refuses_bytes_with_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    """Read a file with invalid bytes: ConfigError with the line."""
    (tmp_path / ".env").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        dotenv.read(tmp_path / ".env")


def test_read_gives_bytes_unchanged(tmp_path: Path) -> None:
    """Read a file with CRLF and an umlaut: the value unchanged."""
    (tmp_path / ".env").write_bytes("A='ü$x'\r\n".encode())
    assert dotenv.read(tmp_path / ".env") == (dotenv.Entry("A", "ü$x", 1),)


def test_read_says_why_it_cannot(tmp_path: Path) -> None:
    """Read a directory: ConfigError with the reason."""
    with pytest.raises(ConfigError, match=r"\A\.env: cannot be read: Is a directory") as caught:
        dotenv.read(tmp_path, shown=".env")
    assert caught.value.hint.startswith("ls -ld .env")

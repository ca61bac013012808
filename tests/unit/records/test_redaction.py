"""Words of a command line without their secrets."""

from __future__ import annotations

import shlex

import pytest

from labctl.records.redaction import redacted


@pytest.mark.parametrize(
    ("line", "shown", "secrets"),
    [
        ("--token abc --epochs 3", "--token [REDACTED] --epochs 3", ["abc"]),
        ("-token abc", "-token [REDACTED]", ["abc"]),
        ("--token -abc", "--token [REDACTED]", ["-abc"]),
        ("--token ab= --x", "--token [REDACTED] --x", ["ab="]),
        ("--api-key=ab=c", "--api-key=[REDACTED]", ["ab=c"]),
        ("-x HF_TOKEN=abc", "-x HF_TOKEN=[REDACTED]", ["abc"]),
        ("--x=HF_TOKEN=abc", "--x=HF_TOKEN=[REDACTED]", ["abc"]),
        ("--launcher-arg=--api-key=abc", "--launcher-arg=--api-key=[REDACTED]", ["abc"]),
        ("train.py --tokens 4 'token is=5' token", "train.py --tokens 4 'token is=5' token", []),
    ],
)
def test_a_secret_is_what_follows_an_option_or_name_that_sounds_secret(
    line: str, shown: str, secrets: list[str]
) -> None:
    """Redact command lines: the value after such an option or its `=` is hidden and told, and nothing else is."""
    words, values = zip(*redacted(shlex.split(line)), strict=True)
    assert (list(words), list(filter(None, values))) == (shlex.split(shown), secrets)

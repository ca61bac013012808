"""Words of a command line without their secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from labctl.config.settings import sounds_secret

REDACTED = "[REDACTED]"
"""Text in place of a secret."""
_NAME = re.compile(r"[\w.-]+")


def redacted(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each word without its secret, with that secret, which is empty if it has none.

    A secret is what follows an option that sounds secret, as in ``--token abc``, and what ``redacted_word`` finds.
    """
    is_secret = False
    for word in words:
        yield (REDACTED, word) if is_secret else redacted_word(word)
        is_secret = not is_secret and word.startswith("-") and "=" not in word and sounds_secret(word)


def redacted_word(word: str) -> tuple[str, str]:
    """Return a word without the value of a name that sounds secret, as in ``--x=TOKEN=abc``, and that value."""
    parts = word.split("=")
    for place, name in enumerate(parts[:-1], start=1):
        if _NAME.fullmatch(name) and sounds_secret(name):
            return "=".join((*parts[:place], REDACTED)), "=".join(parts[place:])
    return word, ""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
from msgspec.structs import asdict, replace
from support.builders import lab

from labctl.model import Secret

SECRET = Secret("CANARY")


def test_reveal_gives_the_plain_value() -> None:
    """Reveal, compare and hash secrets by their value; an empty one is false."""
    assert Secret("CANARY").reveal() == "CANARY"
    assert Secret("CANARY") == SECRET
    assert Secret("other") != SECRET
    assert len({SECRET, Secret("CANARY"), Secret("")}) == 2
    assert not Secret("")


@pytest.mark.parametrize(
    "shown",
    [repr(SECRET), str(SECRET), f"{SECRET}", f"{SECRET:>12}", f"{SECRET!r}", "%s" % (SECRET,), repr([SECRET])],  # noqa: UP031
)
def test_text_of_a_secret_is_redacted(shown: str) -> None:
    """Format a secret in any way: [REDACTED]."""
    assert "CANARY" not in shown
    assert "[REDACTED]" in shown


@pytest.mark.parametrize(
    "use",
    [
        json.dumps,
        pickle.dumps,
        copy.copy,
        "".join,
        " ".join,
        list,
        bytes,
        vars,
        asdict,
        lambda value: "".join([value]),
        lambda value: json.dumps({"token": value}),
        lambda value: pickle.dumps({"token": value}, protocol=2),
        lambda value: value + "x",
        lambda value: "x" + value,
        lambda value: value * 2,
        lambda value: value[0],
        lambda value: "CAN" in value,
        lambda value: value < "x",
        lambda value: value.strip(),
        lambda value: value.encode(),
        lambda value: value.__dict__,
    ],
)
def test_a_secret_is_no_string(use: Callable[[Secret], object]) -> None:
    """Use a secret as a string, or copy and serialise it: TypeError or AttributeError without the value."""
    with pytest.raises((TypeError, AttributeError)) as caught:
        use(SECRET)
    assert "CANARY" not in str(caught.value)


def test_a_lab_as_a_dictionary_keeps_its_secrets() -> None:
    """Turn a lab with secrets into a dictionary or copy it: the secrets stay hidden and equal."""
    of = lab(secrets=(("hf_token", SECRET),), hidden=(SECRET,))
    assert "CANARY" not in repr(asdict(of)) + repr(of)
    assert copy.deepcopy(of) == of == replace(of, hidden=(Secret("CANARY"),))

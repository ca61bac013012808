from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_tests_that_a_page_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs/failures.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    lacking = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(def|class) {name}\b", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert lacking == []

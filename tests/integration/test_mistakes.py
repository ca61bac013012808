"""Mistakes in a lab that is up, with their settings: the lab stays unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.harness import Lab
from support.mistakes import STARTED, Mistake

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("mistake", STARTED, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_a_mistake_is_named_with_the_way_out_and_the_lab_stays(
    mistake: Mistake, lab: Lab, fresh_lab: Callable[..., Lab]
) -> None:
    """Each planted mistake has its exit code, message and hint, and changes no container."""
    if mistake.setting:
        key, _, value = mistake.setting.partition("=")
        lab = fresh_lab(**{key: value})
        lab.call("up").expect(0)
    before = lab.identities()
    for name, text in mistake.files.items():
        (lab.path / name).write_text(text)
    answer = lab.call(*started_quickly(mistake.typed))
    assert answer.code == mistake.code, answer.err
    assert mistake.says in answer.out + answer.err
    assert mistake.hint in answer.out + answer.err
    assert lab.identities() == before


def started_quickly(typed: str) -> list[str]:
    """Split a command into words; add `--launcher mpirun` if it has --script and no launcher."""
    argv = typed.split()
    return [*argv, "--launcher", "mpirun"] if "--script" in argv and "--launcher" not in argv else argv

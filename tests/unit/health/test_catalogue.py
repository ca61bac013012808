"""Names of readings and checks, over the subjects of a host and those of each accelerator."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from labctl import accelerators
from labctl.health import catalogue
from labctl.health.model import Subject

EXAMINED = tuple(name for name, module in accelerators.modules().items() if module.subject)


def subjects_of(accelerator: str) -> tuple[Subject, ...]:
    """Return the subjects of a host with this accelerator."""
    own = accelerators.get(accelerator).subject
    assert own is not None
    return (*catalogue.HOST, own)


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_no_reading_is_judged_by_two_subjects(accelerator: str) -> None:
    """Judge a reading by its name in one subject alone: a check sees the readings of every subject."""
    judges: defaultdict[str, set[str]] = defaultdict(set)
    for subject in subjects_of(accelerator):
        for check in subject.checks:
            judges[check.reading].add(subject.name)
    assert {reading: names for reading, names in judges.items() if len(names) > 1} == {}


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_each_check_has_a_name_of_its_own(accelerator: str) -> None:
    """Name checks of readings and of kernel lines differently, since health.yml turns them off by name."""
    counted: Counter[str] = Counter()
    for subject in subjects_of(accelerator):
        counted.update(check.name for check in subject.checks)
        counted.update(check.name for check in subject.lines)
    assert [name for name, count in counted.items() if count > 1] == []


@pytest.mark.parametrize("accelerator", EXAMINED)
def test_steps_after_a_kernel_line_ask_for_no_item(accelerator: str) -> None:
    """Leave the item out of steps of kernel lines, which concern the node: nothing fills it in."""
    steps = [step for subject in subjects_of(accelerator) for check in subject.lines for step in check.steps]
    assert [step for step in steps if "{item}" in step or "{id}" in step] == []

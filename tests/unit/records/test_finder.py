"""Metrics that are found in the lines of runs: outputs of real programs, bars, ranks, and what criteria ask for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.builders import workload

from labctl.model import Criterion, Metric
from labctl.records.finder import LONGEST, Finder, answered, finder_of
from labctl.records.lines import Line

OUTPUTS = Path(__file__).parents[2] / "data/outputs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((OUTPUTS / "expected.json").read_text(encoding="utf-8"))
"""By output: ``found``, the values of each metric to be found, and ``missed``, those known not to be."""


def read(*lines: str | tuple[int | None, str], **options: Any) -> Finder:
    """Read lines, by default of rank 0; return the finder."""
    finder = Finder(**options)
    for line in lines:
        rank, text = (0, line) if isinstance(line, str) else line
        finder.read(Line(text, 0.0, rank))
    return finder


def values(finder: Finder) -> dict[str, list[float]]:
    """Return the values that were found, by metric."""
    return {name: [*series.values] for name, series in finder.series.items()}


# --- outputs of programs -------------------------------------------------------------------------------------


def lines_of(name: str) -> list[str]:
    """Return the lines of a recorded output."""
    with (OUTPUTS / f"{name}.txt").open(encoding="utf-8", newline="\n") as stream:
        return stream.read().split("\n")


@pytest.mark.parametrize("name", EXPECTED)
def test_of_a_programs_output_the_expected_is_found_and_nothing_else(name: str) -> None:
    """Search a recorded output: exactly the expected metrics and values."""
    found = values(read(*lines_of(name)))
    expected = EXPECTED[name]["found"]
    assert found.keys() == expected.keys()
    for metric, numbers in found.items():
        assert numbers == pytest.approx(list(map(float, expected[metric])), nan_ok=True, rel=1e-9), metric


def test_most_of_what_programs_print_is_found() -> None:
    """Count metrics found in all recorded outputs: as the page says, and more than twice those missed."""
    found = sum(len(output["found"]) for output in EXPECTED.values())
    missed = sum(len(output["missed"]) for output in EXPECTED.values())
    assert {path.stem for path in OUTPUTS.glob("*.txt")} == EXPECTED.keys()
    page = (OUTPUTS.parents[2] / "docs/dev/figures.md").read_text(encoding="utf-8")
    outputs = f"In {len(EXPECTED)} outputs of training programs (`tests/data/outputs`)"
    sentence = f"{outputs} labctl finds {found} metrics by itself and misses {missed}; none is wrong."
    assert sentence in " ".join(page.split())
    assert found > 2 * missed


# --- bars ----------------------------------------------------------------------------------------------------


def bar(step: int, steps: int, *, rate: str = "2.00it/s", said: str = "", name: str = "") -> str:
    """Return a progress bar of this step as tqdm prints it."""
    return f"\r{name}{100 * step // steps:3}%|###   | {step}/{steps} [00:10<00:23,  {rate}{said}]"


def test_a_bar_without_a_name_counts_once_a_metric_of_the_training_is_beside_it() -> None:
    """Print bars: steps per second only once a metric of the training stands beside one."""
    assert values(read(bar(9, 9, rate="900.00it/s"), bar(3, 20))) == {}
    training = (bar(3, 20) + "\r{'loss': 1.5, 'epoch': 0.1}", bar(4, 20, rate="4.00s/it"))
    assert values(read(bar(9, 9, rate="900.00it/s"), *training)) == {"loss": [1.5], "steps_per_second": [2.0, 0.25]}


def test_a_bar_of_an_evaluation_gives_nothing() -> None:
    """Print bars of evaluations: their loss and rate are not taken."""
    training = bar(3, 20, said=", loss=1.5")
    found = values(read(training, bar(2, 5, said=", loss=9.5"), bar(2, 5, name="Validating: ", said=", loss=9.5")))
    assert found == {"loss": [1.5], "steps_per_second": [2.0]}


@pytest.mark.parametrize(
    "bar",
    [
        "Generating test split: 20 examples [00:00, 414.33 examples/s]",
        "Generating train split: 100%|###| 20/20 [00:00<00:00, 1087.42 examples/s]",
        "Running tokenizer on train dataset: 50%|#  | 10/20 [00:01<00:01, 3012.77 examples/s]",
    ],
)
def test_a_bar_of_data_that_is_prepared_gives_nothing(bar: str) -> None:
    """Print bars of data preparation: no metric."""
    assert values(read("loss: 1.5", bar)) == {"loss": [1.5]}


def test_of_a_bar_that_is_drawn_again_in_a_line_the_last_counts() -> None:
    """Draw a bar many times in one line: the last values."""
    drawn = "".join(bar(step, 20, said=f", loss={step}.5", name="Epoch 1: ") for step in range(1, 20))
    assert values(read(drawn)) == {"loss": [19.5], "steps_per_second": [2.0]}


def test_a_bar_of_keras_after_an_epoch_is_of_its_evaluation() -> None:
    """Print Keras' bars: the second of an epoch is an evaluation and not taken."""
    epoch = "9/9 [=====] - 1s 2ms/step - loss: 0.5 - val_loss: 0.6"
    evaluation = "9/9 [=====] - 1s 2ms/step - loss: 0.9"
    found = values(read("Epoch 1/2", epoch, evaluation, "Epoch 2/2", epoch, evaluation))
    assert found == {"loss": [0.5, 0.5], "val_loss": [0.6, 0.6]}


def test_what_follows_an_announced_evaluation_is_named_by_it() -> None:
    """Announce a validation: the next loss is val_loss, later ones are loss."""
    found = values(read("Validating ...", "loss: 0.9", "loss: 0.5", "Testing", "epoch 2 loss: 0.4"))
    assert found == {"val_loss": [0.9], "loss": [0.5, 0.4]}


# --- ranks ---------------------------------------------------------------------------------------------------


def test_rank_0_counts_whoever_prints_first_else_the_only_one_that_prints() -> None:
    """Print as several ranks: rank 0 counts, or the only one that prints the metric."""
    finder = read((1, "loss: 3.1"), (0, "loss: 3.0"), (1, "loss: 2.1"), (0, "loss: 2.0"), (3, "accuracy: 0.5"))
    assert values(finder) == {"loss": [3.0, 2.0], "accuracy": [0.5]}


def test_a_mark_that_a_program_puts_before_its_ranks_lines_tells_the_rank() -> None:
    """Print with marks of launchers: they tell the rank, and rank 0 counts."""
    finder = read((None, "[rank1]:loss: 3.1"), (None, "[1,0]<stdout>:loss: 3.0"), (None, "[default1]:loss: 2.1"))
    assert values(finder) == {"loss": [3.0]}


def test_lines_of_rank_sh_are_not_searched() -> None:
    """Read a report of labctl: nothing is found in it."""
    assert Finder().read(Line("labctl: rank 1 loss: 3", 0.0, 1, report=True)) == []


# --- in a result ---------------------------------------------------------------------------------------------


def test_a_result_has_the_format_and_the_text_of_what_was_found() -> None:
    """Reduce what was found: value or first and last, unit, format and the line."""
    finder = read("step 1 loss: 3.5, 9 samples/s", "step 2 loss: 2.5, 11 samples/s", "step 3 loss: nan", "reward: 1.0")
    assert finder.reduced() == {
        "loss": {"first": 3.5, "last": None, "note": "nan", "found": "name: 1.2", "line": "step 3 loss: nan"},
        "samples_per_second": {
            "value": 10,
            "unit": "samples/s",
            "found": "1.2 samples/s",
            "line": "step 2 loss: 2.5, 11 samples/s",
        },
        "reward": {"value": 1, "unit": "", "found": "name: 1.2", "line": "reward: 1.0"},
    }


def test_of_a_long_text_the_part_with_the_number_is_quoted() -> None:
    """Find a number in a long line: the quoted part has it and is at most LONGEST."""
    line = read("1; " * 300 + "loss: 2.5" + "; 1" * 300).reduced()["loss"]["line"]
    assert "loss: 2.5" in line
    assert len(line) <= LONGEST


def test_a_declared_metric_is_not_found_as_well() -> None:
    """Declare loss: only other metrics are found."""
    assert values(read("loss: 2.5, lr: 0.1", declared=["loss"])) == {"learning_rate": [0.1]}


def test_only_what_criteria_ask_for_is_found_beside_declared_metrics() -> None:
    """Ask for two metrics alone: only these are found, loss as train_loss."""
    lines = ("train loss: 2.5, accuracy: 0.5, lr: 0.1", "bleu: 31.5")
    assert values(read(*lines, asked=["loss", "bleu"], only_asked=True)) == {"train_loss": [2.5], "bleu": [31.5]}


def test_a_workload_has_the_finder_that_it_says() -> None:
    """Make the finder of a workload: None, only asked metrics, or all."""
    speed, loss = Metric(name="speed", pattern="(x)"), Criterion(metric="loss", max=1)
    assert finder_of(workload(metrics=(speed,))) is None
    asked = finder_of(workload(metrics=(speed,), criteria=(loss,), known_metrics="asked"))
    assert asked
    assert [found.name for found in asked.read(Line("loss: 1, accuracy: 2, speed: 3", 0.0))] == ["loss"]
    every = finder_of(workload(known_metrics="all"))
    assert every
    assert [found.name for found in every.read(Line("loss: 1, accuracy: 2, speed: 3", 0.0))] == ["loss", "accuracy"]


def test_a_criterion_on_the_loss_is_answered_by_the_training_loss() -> None:
    """Answer a criterion on loss: by train_loss if no loss was found or declared."""
    asked = workload(criteria=(Criterion(metric="loss", max=1), Criterion(metric="val_loss", max=1)))
    replaced = answered(asked, {"train_loss": 1, "val_loss": 1}).criteria
    assert [criterion.metric for criterion in replaced] == ["train_loss", "val_loss"]
    assert answered(asked, {"loss": 1, "train_loss": 1}) == asked
    declared = workload(criteria=asked.criteria, metrics=(Metric(name="loss", pattern="(x)"),))
    assert answered(declared, {"train_loss": 1}).criteria[0].metric == "loss"


@pytest.mark.parametrize("line", ["loss: nan", "loss: NaN", "step 3 loss nan acc 0.5"])
def test_nan_is_kept(line: str) -> None:
    """Print nan: it is a value, also before the name of another metric."""
    (value,) = values(read(line))["loss"]
    assert math.isnan(value)

"""Comparisons of fictitious records: differences, their effects, and noise."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import records

from labctl.records import store
from labctl.runs.compare import Comparison, Effect, RecordedRun, compare, in_words, read, source_of_noise, spreads


class Lab:
    """A lab whose runs have ended."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._numbers = directory, count()

    def run(self, throughput: float | None = 10.0, **changes: Any) -> RecordedRun:
        run_id = f"20261125-2036{next(self._numbers):02}-opt-tiny-0d07"
        records.write(self.directory, run_id, throughput=throughput, **changes)
        result = store.read_result(self.directory, run_id)
        assert result
        return read(self.directory, result)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def effect(compared: Comparison, metric: str = "throughput") -> Effect:
    (single,) = (candidate for candidate in compared.effects if candidate.metric == metric)
    return single


MICRO_4 = ("--micro-batch", "4")
MICRO_1 = ("--micro-batch", "1")


def test_runs_that_differ_in_nothing_are_one_group_though_their_ids_are_in_their_arguments(lab: Lab) -> None:
    compared = compare([lab.run(24.8), lab.run(25.2)])
    (group,) = compared.groups
    assert len(group.runs) == 2
    assert group.metrics["throughput"].median == 25.0
    assert group.metrics["throughput"].cv == pytest.approx(0.0113, abs=1e-4)
    assert (compared.differences, compared.effects, source_of_noise(compared)) == ((), (), "")


def test_a_difference_beyond_that_of_repeated_runs_is_more_than_noise(lab: Lab) -> None:
    fast = [lab.run(figure, arguments=MICRO_4) for figure in (24.8, 24.9, 24.7)]
    slow = [lab.run(figure, arguments=MICRO_1) for figure in (11.2, 11.3, 11.1)]
    compared = compare([fast[0], slow[0], *fast[1:], *slow[1:]])
    assert [len(group.runs) for group in compared.groups] == [3, 3]
    (difference,) = compared.differences
    assert (difference.what, difference.values) == ("--micro-batch", {"A": "4", "B": "1"})
    assert in_words(effect(compared)) == (
        "throughput: 24.8 samples/s against 11.2 samples/s, 121 % faster: more than noise (2 %)"
    )
    assert "repeated runs" in source_of_noise(compared)


def test_a_difference_that_repeated_runs_have_too_is_within_noise(lab: Lab) -> None:
    a = [lab.run(figure, arguments=MICRO_4) for figure in (24.0, 26.0, 25.0)]
    b = [lab.run(figure, arguments=MICRO_1) for figure in (25.0, 24.5, 26.2)]
    change = effect(compare([*a, *b]))
    assert (change.verdict, change.basis) == ("within noise", "runs")


def test_repeats_on_one_side_tell_the_noise_of_the_other(lab: Lab) -> None:
    a = [lab.run(figure, arguments=MICRO_4) for figure in (24.0, 26.0, 25.0)]
    assert effect(compare([*a, lab.run(27.0, arguments=MICRO_1)])).verdict == "within noise"
    assert effect(compare([*a, lab.run(50.0, arguments=MICRO_1)])).verdict == "more than noise"


CHANCE = Random(1)  # noqa: S311
UNSTEADY = tuple(CHANCE.gauss(100, 20) for _ in range(100))


def test_of_one_run_each_the_spread_from_step_to_step_is_the_noise(lab: Lab) -> None:
    a = lab.run(tokens=UNSTEADY, arguments=MICRO_4)
    b = lab.run(tokens=tuple(value + 1 for value in UNSTEADY), arguments=MICRO_1)
    c = lab.run(tokens=tuple(value + 30 for value in UNSTEADY), arguments=("--micro-batch", "8"))
    near, far = (effect(compare([a, other]), "tokens") for other in (b, c))
    assert (near.verdict, near.basis) == ("within noise", "steps")
    assert far.verdict == "more than noise"
    assert "from step to step of one run each" in source_of_noise(compare([a, b]))


def test_a_rate_that_is_printed_once_is_as_noisy_as_the_time_of_a_step(lab: Lab) -> None:
    change = effect(compare([lab.run(20.0, losses=UNSTEADY), lab.run(10.0, losses=UNSTEADY, code="print(1)")]))
    # Every step took one second.
    assert (change.verdict, change.noise) == ("more than noise", 0)


def test_the_noise_of_single_figures_is_unknown_and_that_is_said(lab: Lab) -> None:
    compared = compare([lab.run(20.0), lab.run(10.0, code="print(1)")])
    assert in_words(effect(compared)).endswith("100 % faster: whether that is noise is not known")
    assert source_of_noise(compared) == "noise: unknown of one run each; `labctl run --repeat 3` shows it"


def test_a_loss_is_compared_by_its_end_and_its_fall_is_no_noise(lab: Lab) -> None:
    falling = [8 - step / 25 for step in range(100)]
    a, b = (lab.run(losses=[value + shift for value in falling], code=str(shift)) for shift in (0, 0.5))
    change = effect(compare([a, b]), "loss")
    assert change.verdict == "more than noise"
    assert in_words(change).startswith("loss at the end: 4.04 against 4.54, 11 % lower: more than noise")


def test_a_run_without_the_figure_is_compared_as_having_none(lab: Lab) -> None:
    failed = lab.run(None, verdict="ERROR", cause="rank-crashed", exit_code=4, code="raise")
    assert in_words(effect(compare([lab.run(20.0), failed]))) == "throughput: 20 samples/s against none"


def test_what_a_run_that_broke_off_had_printed_does_not_count_beside_runs_that_ended(lab: Lab) -> None:
    ended = [lab.run(figure).result for figure in (20.0, 20.2)]
    broken = lab.run(3.0, verdict="ERROR", cause="rank-crashed", exit_code=4).result
    assert spreads([*ended, broken])["throughput"].values == (20.0, 20.2)
    assert spreads([broken])["throughput"].values == (3.0,)


def test_every_kind_of_difference_is_named(lab: Lab) -> None:
    a = lab.run()
    b = lab.run(
        settings={**records.SETTINGS, "LAB_SHM_SIZE": "16g"},
        versions={"image": "labctl/other", "nodes": {"worker-0": {"driver": "570"}}},
        arguments=("--model", "opt-tiny", "--bf16"),
        code="print(2)",
        notes={"data": "14 files"},
    )
    differences = {
        difference.what: (difference.values["A"], difference.values["B"]) for difference in compare([a, b]).differences
    }
    first, second = differences.pop("file train.py")
    assert first != second
    assert differences == {
        "--bf16": ("", "given"),
        "LAB_SHM_SIZE": ("", "16g"),
        "data": ("", "14 files"),
        "image": ("labctl/cpu", "labctl/other"),
        "nodes.worker-0.driver": ("", "570"),
    }


def test_the_value_of_an_option_that_sounds_secret_is_not_told(lab: Lab) -> None:
    (difference,) = compare(
        [lab.run(arguments=("--api-key", "one")), lab.run(arguments=("--api-key", "two"))]
    ).differences
    assert (difference.what, {*difference.values.values()}) == ("--api-key", {"[REDACTED]"})


def test_what_falls_below_zero_is_lower(lab: Lab) -> None:
    change = effect(compare([lab.run(-3.0), lab.run(-2.0, arguments=MICRO_1)]))
    assert change.change == pytest.approx(-0.5)


CARD = {"id": "0", "name": "H100", "uuid": "GPU-1", "firmware": "96.0", "driver": "550.54"}
COMMIT = "d90b2f69" * 5


def test_packages_driver_clones_and_images_are_what_differs_and_which_device_is_not(lab: Lab) -> None:
    def origin(driver: str, uuid: str, torch: str, image: str, dirty: bool) -> dict[str, Any]:
        return {
            "image_id": "sha256:1111",
            "images": {"gpu-a": "sha256:1111", "gpu-b": image},
            "packages": {"torch": torch, "numpy": "2.3.1"},
            "devices": {"worker-0": [{**CARD, "driver": driver, "uuid": uuid}], "worker-1": []},
            "code": [{"host": "gpu-a", "path": "/data/clone", "commit": COMMIT, "dirty": dirty}],
            "cache": {"gpu-a": {"model facebook/opt-125m": "r1"}},
        }

    a = lab.run(versions=origin("550.54", "GPU-1", "2.13.0", "sha256:1111", dirty=False))
    b = lab.run(versions=origin("570.86", "GPU-2", "2.14.0", "sha256:2222", dirty=True))
    assert {
        difference.what: (difference.values["A"], difference.values["B"]) for difference in compare([a, b]).differences
    } == {
        "device driver": ("550.54", "570.86"),
        "package torch": ("2.13.0", "2.14.0"),
        "image on gpu-b": ("", "sha256:2222"),
        "code /data/clone": (COMMIT[:12], f"{COMMIT[:12]} changed"),
    }


def test_packages_are_not_compared_with_a_record_that_has_none(lab: Lab) -> None:
    assert len(compare([lab.run(), lab.run(versions={"packages": {"torch": "2.13.0"}})]).groups) == 1


def test_an_earlier_record_without_series_or_settings_is_compared_by_what_it_has(tmp_path: Path, lab: Lab) -> None:
    a = lab.run(20.0)
    path = records.write(tmp_path, "20250101-000000-opt-tiny-0000", throughput=10.0)
    for name in ("metrics.jsonl", "settings.json", "versions.json", "job.json"):
        (path / name).unlink()
    result = store.read_result(tmp_path, path.name)
    assert result
    compared = compare([a, read(tmp_path, result)])
    assert effect(compared).change == 1.0


def test_the_spread_of_repeats_leaves_out_runs_without_the_figure(lab: Lab) -> None:
    spread = spreads([lab.run(value).result for value in (10.0, None, 12.0, 11.0)])
    assert spread["throughput"].values == (10.0, 12.0, 11.0)
    assert spread["throughput"].median == 11.0
    assert spread["throughput"].cv == pytest.approx(1 / 11)

"""Comparisons of fictitious records: groups, columns, differences, and their effects."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import records

from labctl.records import store
from labctl.reports.runs import of_runs
from labctl.runs.compare import Comparison, RecordedRun, compare, read, redact_fact, versions
from labctl.runs.origin import UNREADABLE, rows
from labctl.runs.spread import Effect, in_words


class Lab:
    """A lab whose runs have ended."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._numbers = directory, count()

    def run(self, throughput: float | None = 10.0, **changes: Any) -> RecordedRun:
        """Write the record of a run with this throughput; return it as read for comparing."""
        run_id = f"20261125-2036{next(self._numbers):02}-opt-tiny-0d07"
        records.write(self.directory, run_id, throughput=throughput, **changes)
        result = store.read_result(self.directory, run_id)
        assert result
        return read(self.directory, result)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return a Lab at tmp_path."""
    return Lab(tmp_path)


def effect(compared: Comparison, metric: str = "throughput") -> Effect:
    """Return the one effect on this metric."""
    (single,) = (candidate for candidate in compared.effects if candidate.metric == metric)
    return single


MICRO_4 = ("--micro-batch", "4")
MICRO_1 = ("--micro-batch", "1")


TOO_FEW = "too few to tell (needs 3 or more): `labctl run opt-tiny --repeat 5`"


def changes(compared: Comparison, metric: str = "throughput") -> dict[str, float | None]:
    """Return each column's change of this metric."""
    return {column.name: column.metrics[metric].change for column in compared.columns}


def test_runs_that_differ_in_nothing_are_one_group_though_their_ids_are_in_their_arguments(lab: Lab) -> None:
    """Compare three equal runs: one group and one column, no differences, and the usual spread."""
    compared = compare([lab.run(24.8), lab.run(25.2), lab.run(25.0)])
    (group,) = compared.groups
    assert len(group.runs) == 3
    assert group.metrics["throughput"].mean == 25.0
    assert group.metrics["throughput"].usual == pytest.approx(0.008)
    assert (compared.differences, compared.columns) == ((), (group,))


def test_two_runs_with_the_same_settings_have_a_column_each_and_are_too_few_to_tell(lab: Lab) -> None:
    """Compare two runs with the same settings: a column each, no judgement, "2 runs are too few"."""
    runs = [lab.run(24.0), lab.run(18.0)]
    compared = compare(runs)
    assert len(compared.groups) == 1
    assert changes(compared) == {"A1": None, "A2": -0.25}
    assert in_words(effect(compared)) == f"throughput of {runs[1].result.run_id}: same settings; 25 % slower"
    assert compared.conclusion == f"2 runs are {TOO_FEW}"


def test_two_runs_with_other_settings_have_a_column_each_and_are_too_few_to_tell(lab: Lab) -> None:
    """Compare two runs with other settings: a column each, no judgement, "1 run each is too few"."""
    compared = compare([lab.run(24.0, arguments=MICRO_4), lab.run(12.0, arguments=MICRO_1)])
    assert changes(compared) == {"A": None, "B": -0.5}
    assert in_words(effect(compared)) == "throughput: 50 % slower"
    assert (effect(compared).noise, effect(compared).verdict) == (None, None)
    assert compared.conclusion == f"1 run each is {TOO_FEW}"


def test_the_command_for_more_runs_is_that_of_each_group_with_its_arguments(lab: Lab) -> None:
    """Compare two scripts' runs: the commands of both, --repeat before the arguments."""
    runs = []
    for rate in ("0.1", "0.2"):
        options = {"script": "/mine/train.py", "words": ["--lr", rate]}
        runs.append(lab.run(float(rate), arguments=("--lr", rate), request={"workload": "", "options": options}))
    assert compare(runs).conclusion.endswith(
        ": `labctl run --script /mine/train.py --repeat 5 -- --lr 0.1`"
        " and `labctl run --script /mine/train.py --repeat 5 -- --lr 0.2`"
    )


def test_a_secret_that_is_not_set_is_no_fact_of_a_run(lab: Lab) -> None:
    """Read a run whose HF_TOKEN is unset, and one where it is set: only the latter has it."""
    assert "HF_TOKEN" not in lab.run(settings={"HF_TOKEN": "unset"}).facts
    assert "HF_TOKEN" in lab.run(settings={"HF_TOKEN": "set"}).facts


def test_groups_have_a_column_each_with_their_mean_and_are_judged_by_the_spread_within_them(lab: Lab) -> None:
    """Compare groups of three and two runs: mean of each, and the effect is judged by their spread."""
    fast = [lab.run(figure, arguments=MICRO_4) for figure in (24.8, 24.9, 24.7)]
    slow = [lab.run(figure, arguments=MICRO_1) for figure in (11.2, 11.3)]
    compared = compare([fast[0], slow[0], *fast[1:], *slow[1:]])
    assert [len(group.runs) for group in compared.groups] == [3, 2]
    assert [column.metrics["throughput"].mean for column in compared.columns] == pytest.approx([24.8, 11.25])
    (difference,) = compared.differences
    assert (difference.what, difference.values) == ("--micro-batch", {"A": "4", "B": "1"})
    assert in_words(effect(compared)) == "throughput: 54.6 % slower, more than the usual 3.6 %"
    assert compared.conclusion.startswith("usual: 99 % of runs with the same settings are no further apart")


def test_a_difference_that_runs_with_the_same_settings_have_too_is_no_more_than_usual(lab: Lab) -> None:
    """Compare groups that overlap: "within noise"."""
    a = [lab.run(figure, arguments=MICRO_4) for figure in (24.0, 26.0, 25.0)]
    b = [lab.run(figure, arguments=MICRO_1) for figure in (25.0, 24.5, 26.2)]
    assert effect(compare([*a, *b])).verdict == "within noise"


def test_repeats_on_one_side_tell_what_is_usual_on_the_other(lab: Lab) -> None:
    """Compare three runs with one: judged by the spread of the three."""
    a = [lab.run(figure, arguments=MICRO_4) for figure in (24.0, 26.0, 25.0)]
    assert effect(compare([*a, lab.run(27.0, arguments=MICRO_1)])).verdict == "within noise"
    assert effect(compare([*a, lab.run(50.0, arguments=MICRO_1)])).verdict == "more than noise"


def test_groups_of_two_runs_are_too_few_to_tell_however_near_these_are(lab: Lab) -> None:
    """Compare two groups of two runs: no judgement."""
    a = [lab.run(figure, arguments=MICRO_4) for figure in (24.0, 24.1)]
    b = [lab.run(figure, arguments=MICRO_1) for figure in (11.0, 11.1)]
    compared = compare([*a, *b])
    assert (effect(compared).basis, effect(compared).verdict) == (None, None)
    assert compared.conclusion == f"2 runs are {TOO_FEW}"


def test_each_of_three_groups_is_compared_with_the_first(lab: Lab) -> None:
    """Compare three groups: the second and third against the first."""
    compared = compare([lab.run(10.0 + batch, arguments=("--micro-batch", str(batch))) for batch in (0, 1, 2)])
    assert changes(compared) == {"A": None, "B": 0.1, "C": 0.2}
    assert [(one.group, one.against) for one in compared.effects] == [("B", "A"), ("C", "A")]


def test_the_command_that_tells_names_the_script_of_a_run_without_a_workload(lab: Lab) -> None:
    """Compare runs of a script: the suggested command has --script."""
    request = {"workload": "", "options": {"script": "/data/own.py"}}
    runs = [lab.run(figure, request=request) for figure in (20.0, 10.0)]
    assert "`labctl run --script /data/own.py --repeat 5`" in compare(runs).conclusion


def test_a_loss_is_compared_by_its_end(lab: Lab) -> None:
    """Compare losses: by their last values."""
    falling = [8 - step / 25 for step in range(100)]
    a, b = (lab.run(losses=[value + shift for value in falling], code=str(shift)) for shift in (0, 0.5))
    assert in_words(effect(compare([a, b]), "loss")) == "loss at the end: 12.4 % higher"


def test_a_run_without_the_figure_is_compared_as_having_none(lab: Lab) -> None:
    """Compare with a run without the metric: "none against 20 samples/s"."""
    failed = lab.run(None, verdict="ERROR", cause="rank-crashed", exit_code=4, code="raise")
    assert in_words(effect(compare([lab.run(20.0), failed]))) == "throughput: none against 20 samples/s"


def test_every_kind_of_difference_is_named(lab: Lab) -> None:
    """Compare runs that differ in option, setting, note, image, driver and file: each is named with both values."""
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
    """Compare runs with other --api-key: the difference is named, the values are redacted."""
    (difference,) = compare(
        [lab.run(arguments=("--api-key", "one")), lab.run(arguments=("--api-key", "two"))]
    ).differences
    assert (difference.what, {*difference.values.values()}) == ("--api-key", {"[REDACTED]"})


def test_the_value_of_a_positional_argument_that_sounds_secret_is_not_told(lab: Lab) -> None:
    """Compare runs with different tokens after `--`: that they differ is said, in no place their values."""
    runs = [lab.run(arguments=("hub_token=s3cret" + end, "-x", "HF_TOKEN=s3cret", "lr=1")) for end in "ab"]
    (difference,) = compare(runs).differences
    assert difference.what == "arguments"
    assert difference.values["A"].startswith("hub_token=[REDACTED] -x HF_TOKEN=[REDACTED] lr=1")
    page = of_runs(lab.directory, runs).html
    assert "hub_token=[REDACTED]" in page
    assert "s3cret" not in page


def test_the_version_of_a_package_is_no_secret_whatever_its_name() -> None:
    """Redact facts: values of options that sound secret, and not the version of Debian's base-passwd."""
    assert redact_fact("package deb/base-passwd", "3.6.1") == "3.6.1"
    assert redact_fact("--api-key", "one") == "[REDACTED]"
    assert redact_fact("MY_PASSWD", "one") == "[REDACTED]"


def test_what_falls_below_zero_is_lower(lab: Lab) -> None:
    """Compare -2 with -3: the change is -0.5."""
    change = effect(compare([lab.run(-2.0), lab.run(-3.0, arguments=MICRO_1)]))
    assert change.change == pytest.approx(-0.5)


CARD = {"id": "0", "name": "H100", "uuid": "GPU-1", "firmware": "96.0", "driver": "550.54"}
COMMIT = "d90b2f69" * 5


def test_packages_driver_clones_and_images_are_what_differs_and_which_device_is_not(lab: Lab) -> None:
    """Compare versions: driver, package, image on a host and clone differ; device UUIDs are not compared."""

    def origin(driver: str, uuid: str, torch: str, image: str, dirty: bool) -> dict[str, Any]:
        """Return the versions of a run with these driver, device, package, image and clone."""
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
    """Compare with a record without packages: one group."""
    assert len(compare([lab.run(), lab.run(versions={"packages": {"torch": "2.13.0"}})]).groups) == 1


def test_an_earlier_record_without_series_or_settings_is_compared_by_what_it_has(tmp_path: Path, lab: Lab) -> None:
    """Compare with a record of result.json alone: the metric is compared."""
    a = lab.run(20.0)
    path = records.write(tmp_path, "20250101-000000-opt-tiny-0000", throughput=10.0)
    for name in ("metrics.jsonl", "settings.json", "versions.json", "job.json"):
        (path / name).unlink()
    result = store.read_result(tmp_path, path.name)
    assert result
    compared = compare([a, read(tmp_path, result)])
    assert effect(compared).change == -0.5


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("job.json", {"nodes": ["worker-0"]}),
        ("job.json", {"nodes": [{"name": "worker-0"}]}),
        ("job.json", {"request": {"workload": 5}}),
        ("job.json", {"request": {"options": {"timeout": "soon"}}}),
        ("settings.json", [{"key": "LAB_NODES", "origin": "flag"}]),
        ("versions.json", {"packages": {"torch": 2}}),
        ("versions.json", {"devices": {"host": [{"name": None}]}}),
        ("versions.json", {"code": "main"}),
        ("versions.json", {"image": 5}),
        ("versions.json", "text"),
    ],
)
def test_a_file_of_a_record_that_is_of_another_kind_is_named_in_its_place(
    lab: Lab, name: str, document: object
) -> None:
    """Compare and report a run with a file of wrong types: the comparison and the table of the run name it."""
    run = lab.run()
    path = lab.directory / "runs" / run.result.run_id
    (path / name).write_text(json.dumps(document))
    broken = read(lab.directory, run.result)
    (named,) = (each for each in compare([run, broken]).differences if each.what == UNREADABLE)
    assert named.values == {"A": "", "B": name}
    assert rows(path, broken.facts, versions(path))[UNREADABLE] == name

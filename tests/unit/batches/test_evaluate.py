from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from labctl.batches.evaluate import Evaluation, JobResult, Limits, judge
from labctl.batches.logs import Measured


def run(job: str, names: str, value: float | None, **more: Any) -> Measured:
    """Return a Measured of a job on the named hosts; ``more`` replaces fields."""
    hosts = tuple(names.split())
    given = {"directory": "out", "set": "out", "workload": "opt", "log": f"opt_1_{job}.log", "size": len(hosts) or None}
    return Measured(**{**given, "job": job, "names": hosts, "unit": "samples/s", "value": value, **more})


def alone(values: Iterable[float | None]) -> list[Measured]:
    """Build a job on one node for each value."""
    return [run(f"1xN_{number}", f"n{number}", value) for number, value in enumerate(values, 1)]


def statuses(evaluation: Evaluation) -> list[tuple[str, str | None]]:
    """Return each job's status and cause."""
    return [(job.status, job.cause) for job in evaluation.jobs]


def only(evaluation: Evaluation) -> JobResult:
    """Return the one job of the evaluation; fail on more."""
    (job,) = evaluation.jobs
    return job


# --- thresholds --------------------------------------------------------------------------------------------------


def test_a_job_must_reach_the_threshold() -> None:
    """Judge 600 and 599.9999 against min 600: PASS and FAIL with cause below-min."""
    evaluation = judge(alone([600, 599.9999]), Limits(min=600))
    assert statuses(evaluation) == [("PASS", None), ("FAIL", "below-min")]
    assert evaluation.jobs[1].message == "599.9999 is below 600"
    assert not evaluation.passed


def test_per_node_multiplies_the_threshold() -> None:
    """Judge jobs of two nodes with per_node: they must reach twice the minimum."""
    runs = [run("2xN_1", "a b", 1200), run("2xN_2", "c d", 1100), run("1xN_1", "e", 600)]
    evaluation = judge(runs, Limits(min=600, per_node=True))
    assert statuses(evaluation) == [("PASS", None), ("FAIL", "below-min"), ("PASS", None)]
    assert evaluation.jobs[1].message == "1100 is below 1200 (600 on each of 2 nodes)"


@pytest.mark.parametrize("limits", [Limits(min=600, per_node=True), Limits(within=0.05)])
def test_a_job_on_unknown_nodes_fails_where_their_number_counts(limits: Limits) -> None:
    """Judge a job without known nodes per node or by median: FAIL with cause nodes-unknown."""
    job = only(judge([run("mine", "", 9000)], limits))
    assert (job.status, job.cause, job.per_node) == ("FAIL", "nodes-unknown", None)


def test_a_job_on_unknown_nodes_is_judged_by_its_value() -> None:
    """Judge a job without known nodes against a plain minimum: PASS."""
    assert only(judge([run("mine", "", 600)], Limits(min=600))).status == "PASS"


def test_a_job_without_a_hostfile_counts_the_nodes_of_its_name() -> None:
    """Judge a job without host names but with size 2: its value per node is half."""
    job = only(judge([run("2xN_1", "", 1200, size=2)], Limits(min=600, per_node=True)))
    assert (job.status, job.per_node, job.nodes) == ("PASS", 600, ())


@pytest.mark.parametrize("limits", [Limits(), Limits(min=-1e9), Limits(within=1), Limits(min=-1e9, per_node=True)])
def test_a_missing_number_is_never_a_pass(limits: Limits) -> None:
    """Judge a job without a value under any limits: FAIL with its cause and message."""
    missing = run("1xN_9", "a", None, cause="no-metric", message="`nan` is not a number")
    evaluation = judge([missing, *alone([600])], limits)
    assert statuses(evaluation) == [("FAIL", "no-metric"), ("PASS", None)]
    assert evaluation.jobs[0].message == "`nan` is not a number"


def test_where_no_number_is_expected_limits_still_need_one() -> None:
    """Judge a job without value or cause: PASS without limits, FAIL with no-metric with one."""
    assert only(judge(alone([None]), Limits())).status == "PASS"
    assert statuses(judge(alone([None]), Limits(min=0))) == [("FAIL", "no-metric")]


# --- the median --------------------------------------------------------------------------------------------------


def test_a_job_may_not_be_too_far_below_the_median_of_its_size() -> None:
    """Judge with within=0.05: only the job more than 5 % below the median of its size fails, as below-median."""
    runs = [*alone([1000, 1000, 950, 949.9, 2000]), run("2xN_1", "a b", 100)]
    evaluation = judge(runs, Limits(within=0.05))
    assert [job.job for job in evaluation.jobs if job.status == "FAIL"] == ["1xN_4"]
    assert evaluation.jobs[3].cause == "below-median"


def test_the_median_is_that_of_values_per_node() -> None:
    """Judge two jobs of two nodes: vs_median and the message compare values per node."""
    evaluation = judge([run("2xN_1", "a b", 2000), run("2xN_2", "c d", 1600)], Limits(within=0.10))
    assert [job.vs_median for job in evaluation.jobs] == pytest.approx([1 / 9, -1 / 9])
    assert evaluation.jobs[1].message == "800 per node is 11.1 % below the median, 900"


def test_a_failed_runs_number_does_not_move_the_median() -> None:
    """Judge a job with a cause and a low value: it fails, and the median ignores it."""
    failed = run("1xN_9", "n9", 1, cause="timeout", message="It ran too long.")
    evaluation = judge([failed, *alone([1000, 1010])], Limits(within=0.05))
    assert statuses(evaluation) == [("FAIL", "timeout"), ("PASS", None), ("PASS", None)]
    assert evaluation.sizes[0].median == 1005


def test_other_workloads_have_medians_of_their_own() -> None:
    """Judge jobs of two workloads: each workload has its own median."""
    runs = [*alone([1000, 1000]), run("1xN_1", "n1", 70, workload="opt-13b", log="opt-13b_1_1xN_1.log")]
    evaluation = judge(runs, Limits(within=0.05))
    assert evaluation.passed
    assert [(size.workload, size.median) for size in evaluation.sizes] == [("opt", 1000), ("opt-13b", 70)]


def test_all_misses_are_in_the_message() -> None:
    """Judge a job below both limits: cause is the first, the message names both."""
    job = judge(alone([500, 1000, 1000]), Limits(min=600, within=0.05)).jobs[0]
    assert job.cause == "below-min"
    assert job.message == "500 is below 600; 500 per node is 50 % below the median, 1000"


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_median_that_is_not_above_zero_gives_no_shares(value: float) -> None:
    """Judge jobs with a median of 0 or below: vs_median and efficiency are None."""
    evaluation = judge(alone([value, value]), Limits(min=1))
    assert [job.vs_median for job in evaluation.jobs] == [None, None]
    assert evaluation.sizes[0].efficiency is None


# --- outliers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "outliers"),
    [
        # A tenth below the median is no outlier, more is.
        ([100, 100, 100, 90], []),
        ([100, 100, 100, 89.9], [89.9]),
        ([100, 101, 102, 100, 101, 102, 48, 47], [48, 47]),
        # Where jobs differ by noise, an outlier is further away.
        ([100, 120, 80, 110, 90, 115, 70], []),
        ([100, 120, 80, 110, 90, 115, 20], [20]),
        # Fast ones are none, and of two jobs neither is.
        ([100, 100, 100, 500], []),
        ([50, 100], []),
        ([-1, -1, -9], []),
    ],
)
def test_a_job_far_below_the_others_of_its_size_is_an_outlier(values: list[float], outliers: list[float]) -> None:
    """Judge without limits: jobs far below their size's median are outliers, yet the evaluation passes."""
    evaluation = judge(alone(values), Limits())
    assert [job.value for job in evaluation.jobs if job.outlier] == outliers
    assert (evaluation.passed, evaluation.judged) == (True, False)


def test_outliers_are_named_the_worst_first_and_are_no_failure() -> None:
    """Judge with two outliers: the remark names them, the worst first, and all pass."""
    evaluation = judge(alone([100, 47, 100, 100, 60, 100, 100]), Limits(min=1))
    assert evaluation.passed
    assert evaluation.remarks == (
        "2 of 7 jobs are far below the others of their size: 1xN_2 (47 % of the median), 1xN_5 (60 % of the median)",
    )


def test_a_size_whose_jobs_differ_without_an_outlier_is_named() -> None:
    """Judge a size with two values far apart: the remark says its jobs differ and none stands out.

    Half of the jobs are slow, as in a ring of four nodes with a slow one.
    """
    runs = [run(f"2xN_{number}", "a b", value) for number, value in enumerate((49.46, 49.8, 160, 162))]
    assert judge([*runs, *alone([100, 99])], Limits()).remarks == (
        "the 4 jobs on 2 nodes differ, and none stands out: 24.73 to 81 per node",
    )


def test_what_is_judged_by_the_median_gets_no_remark() -> None:
    """Judge with ``within``: no remark on outliers."""
    evaluation = judge(alone([100, 47, 100]), Limits(within=0.6))
    assert (evaluation.passed, evaluation.judged, evaluation.remarks) == (True, True, ())


def test_a_job_whose_run_failed_is_no_outlier() -> None:
    """Judge a failed job with a low value: it is no outlier."""
    failed = run("1xN_9", "n9", 1, cause="timeout", message="It ran too long.")
    evaluation = judge([failed, *alone([100, 100, 100])], Limits())
    assert (evaluation.jobs[0].outlier, evaluation.remarks) == (False, ())


# --- repeats, sizes ----------------------------------------------------------------------------------------------


def test_runs_of_one_hostfile_are_one_job() -> None:
    """Judge three runs of one hostfile: one job with their mean, count, logs and spread."""
    runs = [run("1xN_1", "a", value, log=f"1xN_1_{value}.log") for value in (590, 600, 610)]
    evaluation = judge(runs, Limits(min=600))
    job = only(evaluation)
    assert (job.status, job.value, job.repeats, len(job.logs)) == ("PASS", 600, 3, 3)
    assert job.spread == pytest.approx(10 / 600)
    assert evaluation.nodes[0].jobs == ("1xN_1",)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 10])
def test_equal_runs_have_their_value_as_mean(count: int) -> None:
    """Judge equal runs of 0.1: the mean is exactly 0.1."""
    runs = [run("1xN_1", "a", 0.1) for _ in range(count)]
    assert only(judge(runs, Limits(min=0.1))).value == 0.1


def test_a_job_fails_where_one_of_its_runs_failed() -> None:
    """Judge two runs, one with a cause: the job fails with it, and the message says run 2 of 2."""
    runs = [run("1xN_1", "a", 600), run("1xN_1", "a", 600, cause="node-lost", message="a is gone.")]
    job = only(judge(runs, Limits()))
    assert (job.status, job.cause, job.message) == ("FAIL", "node-lost", "run 2 of 2: a is gone.")


def test_jobs_of_the_same_name_in_two_directories_are_two() -> None:
    """Judge equal job names from two directories: two jobs, named with their directory."""
    evaluation = judge([run("1xN_1", "a", 600), run("1xN_1", "a", 500, directory="again")], Limits(min=600))
    assert [(job.job, job.status) for job in evaluation.jobs] == [
        ("out/opt_1_1xN_1", "PASS"),
        ("again/opt_1_1xN_1", "FAIL"),
    ]


def test_sizes_have_mean_spread_and_efficiency_per_node() -> None:
    """Judge two sizes: each has mean, spread (None of one job) and efficiency per node."""
    small, large = judge([*alone([900, 1100]), run("2xN_1", "n1 n2", 1800)], Limits()).sizes
    assert (small.size, small.jobs, small.mean, small.min, small.max, small.efficiency) == (1, 2, 1000, 900, 1100, 1)
    assert small.spread == pytest.approx(0.1414, abs=1e-4)
    assert (large.size, large.mean, large.spread, large.efficiency) == (2, 900, None, 0.9)


def test_values_per_node_that_are_very_large_are_still_numbers() -> None:
    """Judge values of 1e100: the spread is still a number."""
    (size,) = judge(alone([1e100, -1e100, 3e99]), Limits(within=0.05)).sizes
    assert size.spread is not None


# --- nodes -------------------------------------------------------------------------------------------------------


def nodes(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return each node's name and status."""
    return [(node.node, node.status) for node in evaluation.nodes]


def test_a_node_whose_jobs_all_failed_fails_and_comes_first() -> None:
    """Judge three nodes, one below the median: it is FAIL, first, with its job in the message."""
    evaluation = judge(alone([1000, 1010, 800]), Limits(within=0.05))
    assert nodes(evaluation) == [("n3", "FAIL"), ("n1", "PASS"), ("n2", "PASS")]
    assert evaluation.nodes[0].message == "1 of 1 jobs failed: 1xN_3 (below-median, -20 % of the median)"


def test_a_node_that_passes_alone_is_cleared_of_a_job_with_others() -> None:
    """Judge a failed pair of a good and a bad node: the good one passes by its own job."""
    runs = [*alone([1000, 800, 1000]), run("2xN_1", "n1 n2", 1000)]
    evaluation = judge(runs, Limits(min=900, per_node=True))
    assert nodes(evaluation) == [("n2", "FAIL"), ("n1", "PASS"), ("n3", "PASS")]
    assert evaluation.nodes[1].failed == ("2xN_1",)


def test_a_node_that_fails_alone_fails_though_a_larger_job_passes() -> None:
    """Judge a node that fails alone and passes in a pair: FAIL."""
    runs = [*alone([1000, 880]), run("2xN_1", "n1 n2", 1900)]
    assert nodes(judge(runs, Limits(min=900, per_node=True))) == [("n2", "FAIL"), ("n1", "PASS")]


def test_nodes_that_only_ran_together_fail_together() -> None:
    """Judge a failed pair whose nodes ran in no other job: both nodes are FAIL."""
    evaluation = judge([run("2xN_1", "a b", 1000), run("2xN_2", "c d", 2000)], Limits(min=900, per_node=True))
    assert nodes(evaluation)[:2] == [("a", "FAIL"), ("b", "FAIL")]
    assert evaluation.nodes[0].message == ("1 of 1 jobs failed: 2xN_1 (below-min, -33.3 % of the median, on 2 nodes)")


def test_a_job_that_is_not_finished_fails_but_accuses_no_node() -> None:
    """Judge a job with cause not-finished: the evaluation fails, and the job's node is not listed."""
    waiting = run("1xN_9", "n9", None, cause="not-finished", message="waiting")
    evaluation = judge([*alone([600]), waiting], Limits())
    assert not evaluation.passed
    assert nodes(evaluation) == [("n1", "PASS")]


def test_a_node_without_any_number_is_the_worst() -> None:
    """Judge a node without a value: it is listed before a slow one."""
    silent = run("1xN_9", "n9", None, cause="no-metric", message="nothing matches")
    evaluation = judge([*alone([1000, 1000, 100]), silent], Limits(within=0.05))
    assert nodes(evaluation)[:2] == [("n9", "FAIL"), ("n3", "FAIL")]
    assert evaluation.nodes[0].message == "1 of 1 jobs failed: 1xN_9 (no-metric)"


def test_the_evidence_lists_three_jobs() -> None:
    """Judge five failed jobs of a node: the message names three and "and 2 more"."""
    runs = [run(f"1xN_{number}", "a", 1) for number in range(5)]
    message = judge(runs, Limits(min=2)).nodes[0].message
    assert message.startswith("5 of 5 jobs failed: 1xN_0 ")
    assert message.endswith(" and 2 more")
    assert message.count("below-min") == 3


def test_a_job_that_is_slow_in_too_few_runs_is_said_to_be_so() -> None:
    """Judge one slow run with ``within``: a remark says too few runs; with three runs each, none."""
    limits = Limits(within=0.1)
    (remark,) = judge(alone([100, 100, 100, 50]), limits).remarks
    assert "fewer than 3 runs do not tell a slow node from noise" in remark
    repeated = judge([run for _ in range(3) for run in alone([100, 100, 100, 50])], limits)
    assert (repeated.passed, repeated.remarks) == (False, ())

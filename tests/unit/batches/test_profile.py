"""Profiles: the built-in ones name existing workloads, and errors in others name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import launchers
from labctl.batches import profile
from labctl.errors import ConfigError
from labctl.system import files
from labctl.workloads import loader

CHECKS = "description: mine\nchecks:\n"


def written(directory: Path, text: str) -> Path:
    """Write mine.yml with this text; return its path."""
    path = directory / "mine.yml"
    path.write_text(text)
    return path


def test_the_profiles_have_their_names() -> None:
    """List the profiles: the seven built-in names, sorted."""
    assert profile.names() == ("cluster", "cpu", "full", "gaudi", "intel", "nvidia", "quick")


@pytest.mark.parametrize("name", profile.names())
def test_a_profile_names_workloads_and_metrics_that_there_are(name: str) -> None:
    """Read each profile: its workloads load, and its metrics and notes exist in them."""
    for check in profile.read(profile.find(name)).checks:
        workload = loader.load(
            files.path("workloads"), check.workload, launchers.known(), rehearse=check.options.rehearse
        )
        profile.require_metrics(check, workload.metrics, dict(workload.notes))


@pytest.mark.parametrize("name", profile.names())
def test_a_threshold_says_where_it_comes_from(name: str) -> None:
    """Read each profile: every minimum and maximum names its source."""
    limits = [limit for check in profile.read(profile.find(name)).checks for limit in check.limits]
    assert all(limit.source for limit in limits if limit.min is not None or limit.max is not None)


def test_gaudi_sets_up_the_network_again_after_hl_qual() -> None:
    """Read gaudi: network set-up runs before and after hl_qual, and 24 interfaces must be up."""
    gaudi = profile.read(profile.find("gaudi"))
    assert [(hook.name, hook.network_setup, bool(hook.check)) for hook in gaudi.hooks] == [
        ("network set-up", True, True),
        ("hl_qual", False, True),
        ("network set-up", True, True),
    ]
    assert gaudi.network.up == 24


def test_gaudi_has_the_thresholds_of_omnia() -> None:
    """Read gaudi: its minimums are exactly Omnia's, with "1 node, 8 ranks" as source."""
    limits = {(check.workload, limit.metric): limit for check in profile.read(profile.find("gaudi")).checks
              for limit in check.limits if limit.min}  # fmt: skip
    assert {key: limit.min for key, limit in limits.items()} == {
        ("allreduce", "busbw"): 127,
        ("allreduce", "algbw"): 73,
        ("all-gather", "busbw"): 127,
        ("reduce-scatter", "busbw"): 126,
        ("reduce-scatter", "algbw"): 142,
        ("all-to-all", "busbw"): 126,
        ("all-to-all", "algbw"): 142,
    }
    assert all("1 node, 8 ranks" in limit.source for limit in limits.values())


def test_a_copy_of_a_profile_is_read(tmp_path: Path) -> None:
    """Read a copy of quick.yml by path: same checks, named after the file."""
    path = written(tmp_path, (profile.PACKAGED / "quick.yml").read_text())
    assert profile.read(profile.find(str(path))).checks[0].workload == "ssh-check"
    assert profile.read(path).name == "mine"


def test_a_check_has_the_options_of_its_run(tmp_path: Path) -> None:
    """Read a check with options: name, nodes, line, rehearse, timeout in seconds and arguments."""
    text = f"{CHECKS}  - {{workload: a/b, nodes: pairs, rehearse: true, timeout: 2m, set: {{max-bytes: 1M}}}}\n"
    (check,) = profile.read(written(tmp_path, text)).checks
    assert (check.name, check.nodes, check.declared) == ("a-b", "pairs", f"{tmp_path}/mine.yml:3")
    assert (check.options.rehearse, check.options.timeout, check.options.arguments) == (
        True,
        120,
        (("max-bytes", "1M"),),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("description: x\n", "has no `checks`"),
        ("description: x\nchecks: []\n", ":2: `checks` is empty"),
        (f"{CHECKS}  - {{nodes: all}}\n", ":3: `checks` has no `workload`"),
        (f"{CHECKS}  - {{workload: a, nodes: some}}\n", ":3: unknown nodes `some`"),
        (f"{CHECKS}  - {{workload: a}}\n  - {{workload: a}}\n", ":4: two checks are named `a`"),
        (f"{CHECKS}  - {{workload: a, metrics: {{b: {{min: 1, max: 2}}}}}}\n", ":3: `b` has both `min` and `max`"),
        (f"{CHECKS}  - {{workload: a, rehearse: maybe}}\n", ":3: `rehearse` must be true or false"),
        (f"within: 0.1\n{CHECKS}  - {{workload: a}}\n", ":1: `within` is a share below 100%"),
        (f"network: {{interfaces: '('}}\n{CHECKS}  - {{workload: a}}\n", ":1: `(` is not a regular expression"),
        (f"hooks: [{{name: a, command: b, timeout: soon}}]\n{CHECKS}  - {{workload: a}}\n", ":1: `soon` is not a dur"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    """Read a faulty profile: ConfigError with line and reason."""
    with pytest.raises(ConfigError) as raised:
        profile.read(written(tmp_path, text))
    assert reason in raised.value.message


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    """Find an unknown profile: ConfigError suggests the nearest."""
    with pytest.raises(ConfigError, match="--profile quik") as raised:
        profile.find("quik")
    assert "did you mean `quick`?" in raised.value.hint


def test_an_unknown_metric_is_refused_with_its_line(tmp_path: Path) -> None:
    """Require a metric that the workload lacks: ConfigError with the profile's line."""
    (check,) = profile.read(written(tmp_path, f"{CHECKS}  - {{workload: a, metrics: {{loss: {{}}}}}}\n")).checks
    with pytest.raises(ConfigError, match=":3: a has no metric `loss`"):
        profile.require_metrics(check, (), ())


def test_an_unknown_note_is_refused_with_its_line(tmp_path: Path) -> None:
    """Require a note that the workload lacks: ConfigError with the profile's line."""
    (check,) = profile.read(written(tmp_path, f"{CHECKS}  - {{workload: a, equal: curve}}\n")).checks
    with pytest.raises(ConfigError, match=":3: a has no note `curve`"):
        profile.require_metrics(check, (), ("curves",))


def test_the_operators_configuration_names_a_profile() -> None:
    """Map TEST_CONFIGURATION to a profile: quick if empty or unknown, and a message if unknown."""
    messages: list[str] = []
    assert [profile.configured(word, messages.append) for word in ("", "GAUDI", "HCCL")] == ["quick", "gaudi", "quick"]
    assert messages == [
        "TEST_CONFIGURATION=HCCL is not a profile (cluster, cpu, full, gaudi, intel, nvidia, quick); using quick"
    ]

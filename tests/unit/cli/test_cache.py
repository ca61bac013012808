"""Output of `labctl cache` about the hosts that it fills."""

from __future__ import annotations

from support.commandline import Labctl

from labctl.cli.cache import cache_text
from labctl.hub.report import CacheReport, HostCache, Item
from labctl.model import HostFailure

ITEM = Item(kind="model", name="gpt2", revision="0a1b2c3d4e", bytes=548_000_000, fetched_bytes=0, state="to fetch")
REPORT = CacheReport(
    workload="",
    cache="/c",
    items=(),
    seconds=1.0,
    hosts=(HostCache(host="red", files=3, bytes=70_000_000), HostCache(host="blue", files=0, bytes=0)),
    failed=(HostFailure(host="green", message="green: no room for the cache", hint="on green: df -h"),),
)


def test_each_host_has_a_line_and_each_failure_its_hint() -> None:
    """Format a report of hosts: a row for each, and the failed host with its hint below."""
    assert cache_text(REPORT).splitlines() == [
        "HOST  FILES  SIZE   STATE",
        "red   3      70 MB  sent",
        "blue  0      0 B    present",
        "green: no room for the cache",
        "  on green: df -h",
    ]


def test_a_dry_run_says_what_is_to_be_fetched_before_it_is_sent() -> None:
    """Format a dry run: hosts are "to send", and the last line counts what is to be fetched."""
    planned = CacheReport(workload="", cache="/c", items=(ITEM,), seconds=1.0, hosts=REPORT.hosts)
    lines = cache_text(planned, dry_run=True).splitlines()
    assert "red   3      70 MB  to send" in lines
    assert lines[-1] == "and to each the 548 MB to fetch, as far as it does not have that"


def test_without_hosts_there_is_nothing_to_fill(labctl: Labctl) -> None:
    """Run cache --hosts without LAB_HOSTS: exit code 2 says so."""
    answer = labctl("cache", "--hosts")
    assert answer.code == 2
    assert "--hosts: LAB_HOSTS is not set" in answer.err


def test_a_cache_with_nothing_in_it_fills_no_host(labctl: Labctl) -> None:
    """Run cache --hosts with an empty cache: exit code 3 says that there is nothing to send."""
    (labctl.directory / "cache").mkdir()
    (labctl.directory / "hosts.txt").write_text("red\n")
    labctl.env(f"LAB_HOSTS=hosts.txt\nHOST_CACHE_PATH={labctl.directory}/cache\n")
    answer = labctl("cache", "--hosts")
    assert answer.code == 3
    assert f"HOST_CACHE_PATH {labctl.directory}/cache has nothing to send" in answer.err

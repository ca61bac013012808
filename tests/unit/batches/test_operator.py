"""Hostfile and environment variables that the operator of a cluster provides."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.batches import operator
from labctl.batches.operator import Operator, drained, with_hosts
from labctl.config import inventory
from labctl.config.context import Context
from labctl.errors import ConfigError

HOSTS = "MASTER_IP=10.0.0.1\nMEMBER_IPS=10.0.0.2\n"


def operator_of(directory: Path, hosts: str, environ: dict[str, str]) -> Operator:
    """Write .env and this file of hosts; return what operator.read gives."""
    (directory / ".env").write_text("LAB_NAME=demo\nLAB_HOSTS=hosts.env\n")
    (directory / "hosts.env").write_text(hosts)
    return operator.read(Context(directory=directory, environ=environ, emit=lambda _: None, flags={}))


def test_it_is_read_from_the_file_of_hosts(tmp_path: Path) -> None:
    """Read the file of hosts with the operator's variables: all are taken, others ignored."""
    hosts = f"{HOSTS}TEST_CONFIGURATION=full\nSKIP_NETWORK_SETUP=true\nL3_ENABLED=true\nBUILD_VERSION=7\n"
    expected = Operator(test_configuration="full", skip_network_setup=True, l3_enabled=True)
    assert operator_of(tmp_path, hosts, {}) == expected


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    """Set a variable in file and environment: the environment's value counts."""
    assert operator_of(tmp_path, f"{HOSTS}SKIP_NETWORK_SETUP=true\n", {"SKIP_NETWORK_SETUP": "false"}) == Operator()


@pytest.mark.parametrize("hosts", [HOSTS, "red\nblue\n", "# none\nred\n"])
def test_nothing_is_said_where_the_file_says_nothing(tmp_path: Path, hosts: str) -> None:
    """Read a file of hosts without variables: the default Operator."""
    assert operator_of(tmp_path, hosts, {}) == Operator()


def test_a_word_that_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    """Set L3_ENABLED to On or perhaps: True, and ConfigError."""
    assert operator_of(tmp_path, HOSTS, {"L3_ENABLED": "On"}).l3_enabled
    with pytest.raises(ConfigError, match="L3_ENABLED=perhaps is neither true nor false"):
        operator_of(tmp_path, HOSTS, {"L3_ENABLED": "perhaps"})


def test_hosts_of_the_environment_are_used_where_no_others_are_named(tmp_path: Path) -> None:
    """Give MASTER_IP and MEMBER_IPS: LAB_HOSTS names a file of these hosts, unless .env sets it."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    environ = {"MASTER_IP": "10.0.0.1", "MEMBER_IPS": "10.0.0.2, 10.0.0.3"}
    context = Context(directory=tmp_path, environ=environ, emit=lambda _: None, flags={})
    value = with_hosts(context).settings().text("LAB_HOSTS")
    hosts = inventory.read(tmp_path / value, value)
    assert [host.address for host in hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]

    (tmp_path / ".env").write_text("LAB_NAME=demo\nLAB_HOSTS=mine.txt\n")
    assert with_hosts(context) is context


def test_what_is_drained_is_said_with_its_reason(tmp_path: Path) -> None:
    """Write drained.txt with a comment: drained() names the node with it."""
    operator_of(tmp_path, HOSTS, {})
    (tmp_path / "drained.txt").write_text("10.0.0.2  # slow, 0.52 of the median\n")
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    assert drained(context) == ("node-1 (slow, 0.52 of the median)",)

"""What the operator of a cluster says, in the file of hosts or in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.batches.on_hosts import Operator, operator
from labctl.config.context import Context

HOSTS = "MASTER_IP=10.0.0.1\nMEMBER_IPS=10.0.0.2\n"


def said(directory: Path, hosts: str, environ: dict[str, str]) -> Operator:
    (directory / ".env").write_text("LAB_NAME=demo\nLAB_HOSTS=hosts.env\n")
    (directory / "hosts.env").write_text(hosts)
    return operator(Context(directory=directory, environ=environ, emit=lambda _: None, flags={}))


def test_it_is_read_from_the_file_of_hosts(tmp_path: Path) -> None:
    hosts = f"{HOSTS}TEST_CONFIGURATION=full\nSKIP_NETWORK_SETUP=true\nL3_ENABLED=true\nBUILD_VERSION=7\n"
    expected = Operator(test_configuration="full", skip_network_setup=True, l3_enabled=True)
    assert said(tmp_path, hosts, {}) == expected


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    assert said(tmp_path, f"{HOSTS}SKIP_NETWORK_SETUP=true\n", {"SKIP_NETWORK_SETUP": "false"}) == Operator()


@pytest.mark.parametrize("hosts", [HOSTS, "red\nblue\n", "# none\nred\n"])
def test_nothing_is_said_where_the_file_says_nothing(tmp_path: Path, hosts: str) -> None:
    assert said(tmp_path, hosts, {}) == Operator()

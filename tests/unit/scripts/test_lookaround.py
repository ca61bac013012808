"""The survey that a node makes of itself, with its own Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "docker/lookaround.py"


def test_variables_that_choose_an_interface_are_seen_whosever_library_reads_them() -> None:
    """Run the survey with variables that name interfaces: exactly these are listed, no empty one."""
    choosing = {"ZETA_SOCKET_IFNAME": "eth0", "FI_TCP_IFACE": "eth1", "OMPI_MCA_btl_tcp_if_include": "eth2"}
    environment = {**choosing, "GLOO_SOCKET_IFNAME": "", "SOCKET": "eth3"}
    done = subprocess.run(
        [sys.executable, "-I", SOURCE, "look", "1"], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["variables"] == choosing

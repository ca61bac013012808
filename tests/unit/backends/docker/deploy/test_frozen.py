from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from support.builders import workload

from labctl.backends.docker.deploy import frozen


def test_the_seed_is_the_workloads_own_or_else_the_scripts(tmp_path: Path) -> None:
    """seed() is the workload's --seed, else the default in its script, else empty."""
    of = workload(directory=tmp_path)
    assert frozen.seed(of) == ""
    (tmp_path / "train.py").write_text('add("--seed", type=int, default=1234)\n')
    (tmp_path / "a.py").write_text('add("--seed", type=int, default=1)\n')
    assert frozen.seed(replace(of, script="train.py")) == "1234"
    assert frozen.seed(replace(of, arguments=("--seed", "7", "--steps", "3"))) == "7"
    assert frozen.seed(replace(of, arguments=("--seed=8",))) == "8"

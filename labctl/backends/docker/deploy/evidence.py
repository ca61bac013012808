"""What hosts and their engines saw of a run that failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labctl import accelerators
from labctl.backends.docker.engine import Backend, connection_to
from labctl.errors import HostError
from labctl.model import Lab
from labctl.system.parallel import pool

LIMIT = 3
"""Seconds for the hosts to say what they saw."""
LOOK = Path(__file__).with_name("evidence.sh").read_text(encoding="utf-8")
# Of what the kernel says, what ends or slows programs; and that it may not be read.
KERNEL = (
    "[Oo]ut of memory|oom[-_]kill|[Kk]illed process|hung_task|blocked for more|segfault|I/O error"
    "|Operation not permitted"
)


def of_hosts(lab: Lab, engine: Backend, since: float) -> dict[str, str]:
    """What each host and its engine saw meanwhile."""
    module = accelerators.modules().get(lab.accelerator)
    pattern = "|".join(filter(None, (KERNEL, module.kernel if module else "")))
    tool: Sequence[str] = module.tool.argv if module and module.tool else ()

    def look(host: str) -> str:
        words = (lab.name, str(int(since)), pattern, *tool)
        try:
            return connection_to(engine, host).run(LOOK, *words, timeout=LIMIT, check=False).out
        except HostError as error:
            return f"{error.message}\n"

    names = [host.name for host in lab.hosts]
    with pool(len(names)) as threads:
        return {f"hosts/{name}.txt": said for name, said in zip(names, threads.map(look, names), strict=True)}

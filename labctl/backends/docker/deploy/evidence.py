"""Collect messages and events of hosts and their engines after a run failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labctl import accelerators
from labctl.backends.docker.engine import Engine, connection_to
from labctl.errors import HostError
from labctl.model import Lab
from labctl.system.parallel import pool

LIMIT = 3
"""Time limit of each host, in seconds."""
LOOK = Path(__file__).with_name("evidence.sh").read_text(encoding="utf-8")
# Kernel messages about programs that it ends or slows, and the error if its log may not be read.
KERNEL = (
    "[Oo]ut of memory|oom[-_]kill|[Kk]illed process|hung_task|blocked for more|segfault|I/O error"
    "|Operation not permitted"
)


def of_hosts(lab: Lab, engine: Engine, since: float) -> dict[str, str]:
    """Return messages and events of each host and its engine since a time, as text by file name; or its error."""
    module = accelerators.modules().get(lab.accelerator)
    pattern = "|".join(filter(None, (KERNEL, module.kernel if module else "")))
    tool: Sequence[str] = module.tool.argv if module and module.tool else ()

    def look(host: str) -> str:
        """Return the evidence of a host, or the error if it does not answer."""
        arguments = (lab.name, str(int(since)), pattern, *tool)
        try:
            return connection_to(engine, host).run(LOOK, *arguments, timeout=LIMIT, check=False).out
        except HostError as error:
            return f"{error.message}\n"

    names = [host.name for host in lab.hosts]
    with pool(len(names)) as threads:
        return {f"hosts/{name}.txt": text for name, text in zip(names, threads.map(look, names), strict=True)}

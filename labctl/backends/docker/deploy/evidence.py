"""What hosts and their engines saw of a run that failed."""

from __future__ import annotations

from collections.abc import Sequence

from labctl import accelerators
from labctl.backends.docker.engine import Backend, connection_to
from labctl.errors import HostError
from labctl.model import Lab
from labctl.system.parallel import pool

LIMIT = 3
"""Seconds for the hosts to say what they saw."""
# On a host, as `sh -c LOOK sh LAB SINCE PATTERN [TOOL...]`. What a command of the lab was given is in no event here.
LOOK = r"""
lab=$1 since=$2 pattern=$3
shift 3
echo "# containers"
docker ps --all --filter "label=labctl.lab=$lab" --format '{{.Names}}: {{.Status}}'
docker ps --all --quiet --filter "label=labctl.lab=$lab" | xargs -r docker inspect \
    --format '{{.Name}}: {{.State.Status}}, exit code {{.State.ExitCode}}, out of memory {{.State.OOMKilled}}'
echo "# container events"
code='{{with index .Actor.Attributes "exitCode"}}, exit code {{.}}{{end}}'
docker events --since "$since" --until "$(date +%s.%N)" --filter "label=labctl.lab=$lab" --filter event=die \
    --filter event=oom --filter event=kill --filter event=stop --filter event=start --filter event=restart \
    --filter event=pause --filter event=unpause --filter event=health_status \
    --format "{{.Time}} {{.Actor.Attributes.name}}: {{.Action}}$code" | tail -n 200
echo "# kernel messages"
{ dmesg --time-format iso 2>&1 || dmesg 2>&1; } | grep -E "$pattern" | tail -n 200
[ $# = 0 ] || { echo "# devices: $*"; command -v "$1" > /dev/null && timeout 3 "$@" 2>&1; }
:
"""
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

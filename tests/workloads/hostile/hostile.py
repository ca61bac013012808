"""Plant links at all names that labctl writes, leave processes behind, print a line without end and a token."""

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# Processes that stay: each as a rank may start it, with an environment of its own or without, alone or in a session.
STAYS = "import time; time.sleep(900)"
DEAF = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(900)"
TWICE = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); " + STAYS
# Plants links for as long as it lives.
PLANTS = """
import os, sys, time
while True:
    for name in ("result.json", "output.log", "ranks", "rank-0.log", "hostfile", "script"):
        for folder in sys.argv[2:]:
            path = os.path.join(folder, name)
            try:
                os.rename(path, path + ".was") if not os.path.islink(path) else None
                os.symlink(sys.argv[1], path)
            except OSError:
                pass
    time.sleep(0.001)
"""

options = argparse.ArgumentParser()
options.add_argument("--home", required=True, help="what nothing may change, by its path on the host")
options.add_argument("--line", type=int, default=0, help="bytes of a line without end")
options.add_argument("--crash", action="store_true")
args = options.parse_args()

project, run, rank = os.environ["PROJECT_PATH"], Path(os.environ["LABCTL_RUN_DIR"]), int(os.environ["RANK"])
victims = [f"{args.home}/.ssh/authorized_keys", f"{args.home}/.bashrc", args.home]


def forge(path: Path) -> None:
    """Write a fake result with the opposite verdict; ignore an OSError."""
    with suppress(OSError):
        path.write_text(json.dumps({"schema": 1, "verdict": "FAIL" if not args.crash else "PASS", "exit_code": 0}))


def link(path: Path, number: int) -> None:
    """Replace a file by a symbolic link to one of the victims; ignore an OSError."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        path.symlink_to(victims[number % len(victims)])


def leave(*arguments: str, **how: Any) -> None:
    """Start a process and leave it behind."""
    subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)


names = (
    "result.json",
    "output.log",
    "job.json",
    "plan.txt",
    "settings.json",
    "versions.json",
    "started",
    "run.lock",
    "rendered",
)
for number, name in enumerate(names):
    forge(Path(project, "runs", run.name, name))
    link(Path(project, "runs", run.name, name), number)
    link(run / name, number)
for number, name in enumerate(("a.log", "ranks/rank-9.log", "model")):
    link(run / name, number)
for number, name in enumerate(("image", "jupyter-worker-0.sock", "history-worker-0", "directory-worker-0")):
    link(Path.home() / ".cache" / name, number)
    link(Path.home() / ".kept" / name, number)
link(Path(project, "outputs", "20260101-000000-never-0000"), 2)
link(Path(project, ".cache", "huggingface"), 2)
with suppress(OSError):
    os.mkfifo(run / "pipe")

python = sys.executable
nothing: dict[str, str] = {}
leave(python, "-c", STAYS)
leave(python, "-c", DEAF, start_new_session=True)
leave("setsid", python, "-c", STAYS, env=nothing)
leave(python, "-c", TWICE, env=nothing)
leave("sh", "-c", 'setsid "$0" -c "$1" &', python, DEAF, env=nothing)
folders = (str(run), str(run / "ranks"), f"{project}/runs/{run.name}", f"{project}/outputs")
leave(python, "-c", PLANTS, args.home, *folders, env=nothing, start_new_session=True)

token = Path(os.environ["HF_TOKEN_PATH"]).read_text()
if rank == 0:
    block = "x" * (1 << 20)
    for _ in range(args.line >> 20):
        sys.stdout.write(block)
    # Its middle is at the end of a piece of any size that is a power of two.
    sys.stdout.write("x" * ((1 << 20) - len(token) // 2))
for part in (token[:3], token[3:]):
    sys.stdout.write(part)
    sys.stdout.flush()
print()
print(f"answer {42 + rank}", flush=True)
if args.crash and rank == 1:
    print(f"RuntimeError: refused {token}", flush=True)
    sys.exit(7)

"""One command on many workers at once: the launcher logs in to all of them, and labctl enters the launcher alone."""

from __future__ import annotations

from labctl import attach, resources

PROGRAM = "LABCTL_FANOUT"
RUN_IT = f"import os; exec(os.environ.pop({PROGRAM!r}))"


def run(launcher: attach.Inside, nodes: tuple[str, ...], command: tuple[str, ...]) -> int:
    """Run it on these workers, all where none is named; returns the largest of their codes, 255 of one not reached.

    It reads nothing; each line of its output is marked with the node. Signals, and the death of this process, end it
    everywhere, as ``attach.run`` ends what runs in one node.
    """
    # It is handed over, so any image will do; not as an argument, or every list of processes would show it in full.
    program = resources.path("docker", "fanout.py").read_text(encoding="utf-8")
    argv = ("/usr/bin/python3", "-I", "-c", RUN_IT, ",".join(nodes), *command)
    return attach.run(launcher, argv, terminal=False, hidden={PROGRAM: program}, reads=False)

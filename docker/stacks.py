"""Look at the processes of a run on a node: state, stacks, collectives and connections. Used by labnode.py.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

# Seconds over which a process's CPU use is measured, and that each process, or py-spy for it, may take to answer.
CPU_PERIOD, ANSWER_LIMIT, PY_SPY_LIMIT = 0.5, 3, 5
# Processes that are asked at once.
AT_ONCE = 16
# Parts of 64 KiB of an answer that are read.
MOST_PARTS = 256
# The connection states in /proc/net/tcp that matter to a run that hangs; net/tcp_states.h.
CONNECTED = {"01": "established", "02": "connecting", "08": "closed by the peer"}
# sitecustomize.py has the stacks written to this file in memory at this signal.
STACKS_FILE, STACKS_SIGNAL = "/memfd:labctl-stacks", signal.SIGRTMAX - 2
# States of a process that does not answer; proc(5).
UNANSWERING = "DTtZX"
# The first line of a thread's stack, and a frame, innermost first, as Python's fault handler writes them.
THREAD = re.compile(r"^(?:Current thread|Thread) 0x|^Stack \(", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# A thread and a frame, as py-spy writes them; the main thread has this name.
SPY_THREAD = re.compile(r"^Thread ", re.MULTILINE)
SPY_FRAME = re.compile(r"^ +(.+) \((.+):(\d+)\)$", re.MULTILINE)
# Libraries that tell how ranks talk to each other, by their names.
LIBRARIES = {"libmpi": "MPI", "/horovod/": "Horovod"}


def look(pids: Iterable[int]) -> list[dict[str, Any]]:
    """Return what each process does, in the order of their ids; those that end meanwhile are left out."""
    before: dict[int, list[str]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            before[pid] = stat(pid)
    time.sleep(CPU_PERIOD)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        processes = list(pool.map(lambda each: process(*each), sorted(before.items())))
    return list(filter(None, processes))


def process(pid: int, before: list[str]) -> dict[str, Any] | None:
    """Return what a process does; None if it has ended. ``before``: the fields of `stat` CPU_PERIOD before."""
    try:
        return of_process(pid, before)
    except (OSError, ValueError, KeyError, IndexError):
        return None


def of_process(pid: int, before: list[str]) -> dict[str, Any]:
    """Return what a process does. OSError if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ranks = [variable[5:] for variable in variables if variable.startswith(b"RANK=")]
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115, PTH119 - of Python 3.9
    state = status["State"].strip()
    answers = state[0] not in UNANSWERING
    return {
        "pid": pid,
        "parent": int(status["PPid"]),
        "command": " ".join(command.split())[:200],
        "program": program,
        "rank": int(ranks[0]) if ranks and ranks[0].isdigit() else None,
        "state": state,
        "stays": state[0] == before[0],
        "waits_in": waits_in(pid),
        "cores": round((cpu_ticks(stat(pid)) - cpu_ticks(before)) / os.sysconf("SC_CLK_TCK") / CPU_PERIOD, 2),
        "threads": int(status["Threads"]),
        "libraries": libraries(pid),
        "stacks": stacks(pid, status) if answers and program.startswith("python") else [],
        "recorder": recorder(pid, variables) if answers else None,
    }


def cpu_ticks(fields: list[str]) -> int:
    """Return the CPU time of a process, user and system, in clock ticks; proc(5)."""
    return int(fields[11]) + int(fields[12])


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def libraries(pid: int) -> list[str]:
    """Return the names in LIBRARIES of those that a process has loaded."""
    with contextlib.suppress(OSError):
        loaded = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return [name for part, name in LIBRARIES.items() if part in loaded]
    return []


def waits_in(pid: int) -> str:
    """Return the kernel function that a process waits in; empty if it runs, or if that may not be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return ""


# --- stacks --------------------------------------------------------------------------------------------------


def stacks(pid: int, status: dict[str, str]) -> list[list[dict[str, Any]]]:
    """Return the frames of each thread, innermost first, the main thread last; empty if they cannot be read."""
    caught = int(status["SigCgt"].strip(), 16) >> (STACKS_SIGNAL - 1) & 1
    written = stacks_file(pid) if caught else None
    if written:
        parts = THREAD.split(ask_for_stacks(pid, written))[1:]
        threads = [[frame(name, line, function) for name, line, function in FRAME.findall(part)] for part in parts]
    else:
        parts = SPY_THREAD.split(py_spy(pid))[1:]
        threads = [[frame(name, line, function) for function, name, line in SPY_FRAME.findall(part)] for part in parts]
        threads.reverse()
    return threads


def frame(name: str, line: str, function: str) -> dict[str, Any]:
    return {"file": name, "line": int(line), "function": function, "text": source(name, int(line))}


@functools.lru_cache(maxsize=None)  # noqa: UP033 - of Python 3.9
def source(name: str, line: int) -> str:
    """Return a line of a source file; empty if it cannot be read."""
    try:
        with open(name, errors="replace") as file:  # noqa: PTH123 - a name may be odd
            for number, text in enumerate(file, 1):
                if number == line:
                    return text.strip()[:200]
    except (OSError, ValueError):
        pass
    return ""


def stacks_file(pid: int) -> Path | None:
    """Return the file that a process writes its stacks to, if it has that open."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(str(descriptor)).startswith(STACKS_FILE):  # noqa: PTH115 - of Python 3.9
                return descriptor
    return None


def ask_for_stacks(pid: int, file: Path) -> str:
    """Signal a process, and return the stacks that it writes then; empty if it writes none in time."""
    with contextlib.suppress(OSError), file.open("rb") as written:
        begin = size = os.fstat(written.fileno()).st_size
        os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + ANSWER_LIMIT
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(written.fileno()).st_size
            if size == before > begin:
                break
        written.seek(begin)
        return written.read().decode(errors="replace")
    return ""


def py_spy(pid: int) -> str:
    """Return the Python stacks of a process; empty if py-spy is not installed or may not read them."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["py-spy", "dump", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_LIMIT, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


# --- collectives ---------------------------------------------------------------------------------------------


def recorder(pid: int, variables: list[bytes]) -> dict[str, Any] | None:
    """Return the answer of flight_recorder.py in a process; None if it has none, or not in time."""
    run = next((variable[14:] for variable in variables if variable.startswith(b"LABCTL_RUN_ID=")), b"")
    name = b"/".join((b"\0labctl", run, os.uname().nodename.encode(), str(pid).encode()))
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(ask(name, pid, b"stacks"))
        now = time.time_ns()
        for entry in answer["collectives"]:
            entry["age"] = round((now - entry.pop("began")) / 1e9, 3)
        return answer  # type: ignore[no-any-return]
    return None


def ask(name: bytes, pid: int, question: bytes, limit: float = ANSWER_LIMIT) -> bytes:
    """Return the answer of a process to a question at its abstract socket. OSError if another one has that name."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(limit)
        client.connect(name)
        peer = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        if peer != pid:
            raise OSError(f"the socket is of process {peer}, not {pid}")
        client.sendall(question)
        return b"".join(itertools.islice(iter(lambda: client.recv(1 << 16), b""), MOST_PARTS))


# --- text ----------------------------------------------------------------------------------------------------


def render(processes: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of ``stacks/NODE.txt``."""
    for found in processes:
        yield "process {pid}: {command}".format(**found)
        state = "{state}, {:.0f} % of a core, {threads} threads".format(100 * found["cores"], **found)
        yield f"  {state}" + (", in {waits_in}".format(**found) if found["waits_in"] else "")
        for number, thread in enumerate(found["stacks"], 1):
            yield "  main thread" if number == len(found["stacks"]) else "  thread"
            for each in thread:
                yield '    File "{file}", line {line}, in {function}'.format(**each)
        if found["recorder"]:
            yield from map(render_collective, found["recorder"]["collectives"][-3:])
    yield "connections"
    for line in connections(found["pid"] for found in processes):
        yield f"  {line}"


def render_collective(entry: dict[str, Any]) -> str:
    state = "done" if entry["done"] else "not finished"
    return "  {name} #{number} of group {group}, begun {age:.1f} s ago, {}".format(state, **entry)


def connections(pids: Iterable[int]) -> Iterator[str]:
    """Yield a line for each TCP connection of the processes, with the bytes in its queues; proc(5)."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(str(descriptor))] = pid  # noqa: PTH115
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                owner = owners.get(f"socket:[{fields[9]}]")
                if owner and fields[3] in CONNECTED:
                    to_send, to_read = (int(number, 16) for number in fields[4].split(":"))
                    ends = f"port {int(fields[1][-4:], 16)} to {address(fields[2])}"
                    queues = f"{to_send} bytes to send, {to_read} to read"
                    yield f"process {owner}: {ends}, {CONNECTED[fields[3]]}, {queues}"


def address(text: str) -> str:
    """Return an address of /proc/net/tcp in readable form; its 32-bit words are in the host's byte order."""
    digits, port = text.split(":")
    packed = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)} port {int(port, 16)}"

#!/usr/bin/python3
"""The agent in every container: starts a node, checks it, reaches its peers, runs the launch command, ends runs.

Standard library only, Python >= 3.8, so that it works in any vendor's image:

    labnode.py start worker|launcher     set up the user, the keys and the environment, then become sshd or sleep
    labnode.py start COMMAND [ARGS...]   become that command, as `docker run IMAGE COMMAND` expects
    labnode.py health                    exit 0 if sshd listens and the node's devices work, else print the reason
    labnode.py reach SECONDS NODE...     log in to every node at once over ssh; print one JSON line per node
    labnode.py reap RUN_ID GRACE         send TERM to every process of a run, and KILL after the grace period; exit 1 if
                                         a process is left. With LABCTL_RUN_SECONDS, the age of the run, also to orphans
                                         that removed the run's id from their environment
    labnode.py signal RUN_ID NUMBER      send a signal to every process of a run, as soon as it has one
    labnode.py stacks RUN_ID DIRECTORY   write the state of each process of a run, its stacks and collectives to
                                         stacks/NODE.txt there, and print them as one line of JSON

As root in the launcher, so that ranks cannot interfere:

    labnode.py launch                    start the run that one line of JSON on stdin describes, and follow it; the run
                                         does not end with its follower. `forget` on stdin then removes its record
    labnode.py follow RUN_ID OFFSET      print a run's output from that offset, until the run has ended
    labnode.py stop RUN_ID GRACE CAUSE MESSAGE
                                         end a run for this reason, unless it is being ended already; with a GRACE of 0
                                         kill it at once in either case
    labnode.py runs                      print one JSON line for each run that is running or not forgotten
    labnode.py forget RUN_ID             remove the record of a run that has ended
    labnode.py look RUN_ID               print one JSON line on what the ranks of a run that is running wait for
    labnode.py user DIRECTORY COMMAND... become that command as the lab's user, in the directory

In the launcher's pod of a cluster, as its only user:

    labnode.py pod JOB COMMAND...        run the launch command and end it as `launch` does; JOB is a JSON file
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType

# typing and concurrent.futures take longer to import than most commands last.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType
    from typing import IO, Any, NoReturn

USER = "lab"
HOME = Path("/home/lab")
STATE = Path("/run/lab")
KEYS = Path("/etc/lab/ssh")
LEASES = Path("/etc/lab/leases")
# Seconds to wait for a device whose node is being stopped: Docker kills a container after ten.
HANDOVER = 15.0
SECRETS = Path("/run/secrets")
# The state of a listening socket in /proc/net/tcp; proc(5).
LISTENING = "0A"
RUN_VARIABLE = "LABCTL_RUN_ID"
ANY_RUN = f"{RUN_VARIABLE}=".encode()
# The container's init, which becomes the parent of orphaned processes.
INIT = 1
# Seconds by which a run may be older than LABCTL_RUN_SECONDS when this process reads it.
START_MARGIN = 1
DEV = Path("/dev")
# Seconds. A tool that loads the driver first needs a few per device; Docker's health check has no longer timeout.
TOOL_LIMIT = 10
# A failed check is repeated after RETRY_DELAY seconds, so that a short failure ends no run. A check that took longer
# than QUICK_CHECK is not repeated: Docker's health check would time out.
RETRY_DELAY, QUICK_CHECK = 1, 2
REMEDY = "`labctl up` recreates this node"
# Interactive shells write each command to the history at once, so that it outlives the container.
BASHRC = r"""\
. ~/.lab-env
[[ $- == *i* ]] || return 0
PS1='\u@$LAB_NAME/\h:\w\$ '
HISTFILE=~/.kept/history-$HOSTNAME HISTSIZE=10000 HISTFILESIZE=20000 HISTCONTROL=ignoredups
shopt -s histappend
[[ -z $LABCTL_RESUME ]] || { unset LABCTL_RESUME; cd "$(< ~/.kept/directory-$HOSTNAME)"; } 2> /dev/null
PROMPT_COMMAND='history -a; (umask 077; pwd > ~/.kept/directory-$HOSTNAME)'
"""
# Each ssh session sets these itself; the container's values would be wrong there.
PER_SESSION = {"HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "LOGNAME", "SHELL", "MAIL", "_"}


# --- start ---------------------------------------------------------------------------------------------------


def start(*arguments: str) -> NoReturn:
    """Lock devices, write files and become sshd (``worker``) or sleep (``launcher``); else become the command."""
    if arguments not in (("worker",), ("launcher",)):
        become(arguments)
    (role,) = arguments
    uid, gid = int(os.environ["LAB_UID"]), int(os.environ["LAB_GID"])
    os.umask(0o077)
    leases = hold_leases()
    register_user(uid, gid)
    KEYS.parent.chmod(0o755)
    with acting_as(uid, gid):
        write_session_environment()
        link_keras()
        keys = read_keys()
    if role == "worker":
        # The host key belongs to the lab's user, whose ranks must not read it.
        KEYS.parent.chmod(0o700)
        record_devices(keys.get("devices.json", b"{}"))
        become_sshd(keys, leases)
    else:
        become_launcher(keys, uid, gid)


def become(command: tuple[str, ...]) -> NoReturn:
    """Replace this process with a command; exit 127 or 126 if that fails, with the usage if it is empty."""
    if not command:
        sys.exit("usage: docker run IMAGE COMMAND [ARGS...]; `labctl up` starts nodes")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def hold_leases() -> tuple[int, ...]:
    """Lock this node's devices, or exit if another node has one; a lock is held while its descriptor is open."""
    deadline = time.monotonic() + HANDOVER
    return tuple(take_lease(path, deadline) for path in sorted(LEASES.glob("*")))


def take_lease(path: Path, deadline: float) -> int:
    """Lock a device's file, or exit at the deadline; write this node's lease to it; return the descriptor."""
    descriptor = os.open(path, os.O_RDWR)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 500, 0).decode(errors="replace")
                sys.exit("device {} is held by {}".format(path.name, "".join(filter(str.isprintable, holder))))
            time.sleep(0.05)
        else:
            break
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({**json.loads(os.environ["LAB_LEASE"]), "since": since}).encode(), 0)
    return descriptor


def register_user(uid: int, gid: int) -> None:
    """Add the lab's user to /etc/passwd, in the first line: it precedes a system user with the same uid."""
    groups = "".join(f"labdevice{number}:x:{number}:{USER}\n" for number in os.getgroups() if number not in (0, gid))
    prepend("/etc/passwd", f"{USER}:x:{uid}:{gid}:labctl:{HOME}:/bin/bash\n")
    prepend("/etc/group", f"{USER}:x:{gid}:\n{groups}")


def prepend(path: str, lines: str) -> None:
    """Insert lines at the start of a file, unless it has them: a restarted container does."""
    present = Path(path).read_text()
    if not present.startswith(lines):
        Path(path).write_text(lines + present)


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Read and write files as the lab's user: root without CAP_DAC_OVERRIDE cannot read the user's private files."""
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def read_keys() -> dict[str, bytes]:
    """Return the key files by name. Directories are skipped: they hold the versions that a host was sent."""
    return {path.name: path.read_bytes() for path in KEYS.iterdir() if path.is_file()}


def write_session_environment() -> None:
    """Write the container's environment to a file that bash reads in ssh sessions, through BASH_ENV.

    Variables that ssh sent along take precedence, except PATH.
    """
    lines = ["unset BASH_ENV\n"]
    for name, value in sorted(os.environb.items()):
        variable = name.decode("utf-8", "surrogateescape")
        if variable in PER_SESSION or not variable.isidentifier():
            continue
        unless_set = "" if variable == "PATH" else f"[[ -v {variable} ]] || "
        lines.append(f"{unless_set}export {variable}={shlex.quote(os.fsdecode(value))}\n")
    secret = SECRETS / "environment"
    if secret.exists():
        lines.append(secret.read_text(encoding="utf-8", errors="surrogateescape"))
    write(HOME / ".lab-env", os.fsencode("".join(lines)))
    write(HOME / ".bashrc", BASHRC.encode())
    write(HOME / ".profile", b". ~/.bashrc\n")


def link_keras() -> None:
    """Link ~/.keras, the only folder that Keras 2 reads, to KERAS_HOME, created if missing; ignore errors."""
    cache = Path(os.environ.get("KERAS_HOME", HOME / ".cache/keras"))
    with contextlib.suppress(OSError):
        if not cache.exists():
            cache.mkdir(parents=True)
            cache.chmod(0o755)
        (HOME / ".keras").symlink_to(cache)


def record_devices(watch: bytes) -> None:
    """Write ``watch`` and the device files that this node has at its start to a file, for `health`.

    ``watch`` is JSON: ``files``, patterns below /dev of the files that programs open, the first of which matches one
    file per device; ``tool``, the vendor's command that lists devices, if any; ``line``, a pattern of its line for one.
    """
    record = json.loads(watch)
    record["given"] = []
    for pattern in record.get("files", ()):
        record["given"] += map(str, sorted(DEV.glob(pattern)))
    write(STATE / "devices", json.dumps(record).encode(), 0o644)


def become_sshd(keys: dict[str, bytes], leases: tuple[int, ...]) -> NoReturn:
    """Write sshd's keys, mark the node ready, and become sshd; with leases, run it as a child and keep them."""
    write(STATE / "ssh_host_ed25519_key", keys["ssh_host_ed25519_key"])
    write(STATE / "authorized_keys", keys["authorized_keys"], 0o644)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/opt/lab/sshd_config", "-p", os.environ["LAB_SSH_PORT"]]
    # A node on its host's network listens only on the addresses that the other nodes connect to.
    for address in os.environ.get("LAB_SSH_ADDRESS", "").split():
        sshd += ["-o", f"ListenAddress={address}"]
    if level := os.environ.get("LAB_SSHD_LOG_LEVEL"):
        sshd += ["-o", f"LogLevel={level}"]
    mark_ready()
    os.umask(0o022)
    if leases:
        run_with_leases(sshd)
    os.execv(sshd[0], sshd)


def run_with_leases(command: list[str]) -> NoReturn:
    """Run the node's program as a child, pass it TERM, INT and HUP, and exit with its code, 128 + N for a signal.

    sshd closes the descriptors that it inherits, so this process holds the leases. It is the container's main process,
    so no node outlives its lease.
    """
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


def become_launcher(keys: dict[str, bytes], uid: int, gid: int) -> NoReturn:
    """Write the ssh client's files, mark the node ready, and become `sleep infinity` as the lab's user."""
    with acting_as(uid, gid):
        (HOME / ".ssh").mkdir(mode=0o700, exist_ok=True)
        for name in ("config", "known_hosts", "id_ed25519"):
            write(HOME / ".ssh" / name, keys[name])
    mark_ready()
    os.umask(0o022)
    os.setgroups([number for number in os.getgroups() if number])
    os.setgid(gid)
    os.setuid(uid)
    os.execvp("sleep", ["sleep", "infinity"])


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def mark_ready() -> None:
    """Write the pid of this process, which is or becomes the node's program, to a file."""
    write(STATE / "ready", str(os.getpid()).encode(), 0o644)


# --- health and reach ----------------------------------------------------------------------------------------


def health() -> None:
    """Check the node, again if it fails quickly; exit with its problem, if any, the start of which labctl parses."""
    count = devices_expected()
    if count and os.getuid() == 0:
        become_user(int(os.environ["LAB_UID"]), int(os.environ["LAB_GID"]))
    began = time.monotonic()
    problem = node_problem(count)
    if problem and time.monotonic() - began < QUICK_CHECK:
        time.sleep(RETRY_DELAY)
        problem = node_problem(count)
    if problem:
        sys.exit(problem)


def node_problem(count: int) -> str | None:
    """Return that sshd does not listen, a device is lost or its tool timed out, with a remedy; None if healthy."""
    if not sshd_listens():
        return f"sshd does not listen; {REMEDY}"
    try:
        problem = device_problem(count) if count else None
    except TimeoutError as error:
        # Not reported as a lost device, which would end a run: the machine may only be busy.
        return f"{error}; if that stays so, `labctl doctor`"
    return f"device lost: {problem}; {REMEDY}; if that does not help, `labctl doctor`" if problem else None


def devices_expected() -> int:
    """Return the number of devices that this node was given."""
    return int(os.environ.get("LAB_HEALTH_DEVICES", "").rpartition(":")[2] or 0)


def become_user(uid: int, gid: int) -> None:
    """Become the lab's user, as whom runs open devices: root may open devices that the user may not."""
    os.initgroups(USER, gid)
    os.setgid(gid)
    os.setuid(uid)


def device_problem(count: int) -> str | None:
    """Return the problem of the node's device files or the vendor's tool, or None. TimeoutError if that times out.

    The files are not opened: some devices can be opened once only, which is up to the run. access(2) also checks the
    device cgroup, which loses devices when systemd rewrites it: devcgroup_inode_permission() in fs/namei.c.
    """
    watch = json.loads((STATE / "devices").read_text())
    if not watch.get("files"):
        return None
    given = watch["given"]
    for path in given:
        if not Path(path).exists():
            return f"{path} is gone"
        if not os.access(path, os.R_OK | os.W_OK):
            return f"the lab's user may not open {path}"
    pattern = watch["files"][0]
    started_with = sum(Path(path).match(pattern) for path in given)
    if started_with < count:
        return f"the node started with {started_with} of {count} device files {DEV / pattern}"
    return tool_problem(watch["tool"], watch["line"], count) if watch["tool"] else None


def tool_problem(tool: list[str], device: str, count: int) -> str | None:
    """Return the tool's error; None if it lists all devices or is not installed. TimeoutError if it times out."""
    name = tool[0]
    if not shutil.which(name):
        return None
    code, lines = run_tool(tool)
    listed = [line for line in lines if re.match(device, line)]
    if code == 0 and len(listed) >= count:
        return None
    messages = [line.strip() for line in lines if line.strip() and line not in listed]
    if messages:
        return f"{name} says `{messages[0]}`"
    return f"{name} lists {len(listed)} of {count} devices and ends with code {code}"


def run_tool(tool: list[str]) -> tuple[int, list[str]]:
    """Run the tool and return its exit code and lines; TimeoutError if it takes longer than TOOL_LIMIT.

    A tool that hangs in its driver survives SIGKILL, so only one runs at a time: it inherits the lock, and the kernel
    keeps that for as long as the tool lives.
    """
    timeout = TimeoutError(f"{tool[0]} gives no answer within {TOOL_LIMIT} s")
    deadline = time.monotonic() + TOOL_LIMIT
    with (STATE / "devices").open() as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise timeout from None
                time.sleep(0.05)
        child = subprocess.Popen(
            tool,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
        try:
            printed = child.communicate(timeout=max(0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            # A process that hangs in its driver cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=1)
            raise timeout from None
    return child.returncode, printed.decode(errors="replace").splitlines()


def sshd_listens() -> bool:
    """Tell if sshd listens, by the kernel's table: a connection every few seconds would fill sshd's log."""
    listening = (f":{int(os.environ['LAB_SSH_PORT']):04X}", LISTENING)
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if (local[-5:], state) == listening:
                    return True
    return False


# Errors of ssh that a retry does not cure.
PERMANENT_ERRORS = ("IDENTIFICATION HAS CHANGED", "Permission denied", "verification failed")


def reach(seconds: str, *nodes: str) -> NoReturn:
    """Copy ssh's config and known_hosts, log in to all nodes until the time is up; exit 0 if all answered, else 1."""
    from concurrent.futures import ThreadPoolExecutor

    deadline = time.monotonic() + float(seconds)
    while not (STATE / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    # Nodes may have been added since this launcher started.
    for name in ("config", "known_hosts"):
        write(HOME / ".ssh" / name, (KEYS / name).read_bytes())
    with ThreadPoolExecutor(min(len(nodes), 64)) as pool:
        reached = list(pool.map(lambda node: reach_one(node, deadline), nodes))
    sys.exit(0 if all(reached) else 1)


def reach_one(node: str, deadline: float) -> bool:
    """Log in to a node until it answers, fails for good or time is up; print a JSON line; return True if reached."""
    began = time.monotonic()
    while True:
        left = max(1, int(deadline - time.monotonic()))
        ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={left}", "--", node, "hostname"]
        try:
            done = subprocess.run(ssh, capture_output=True, text=True, check=False, timeout=left + 1)
            ok = done.returncode == 0 and done.stdout.strip() == node
            printed = done.stderr + done.stdout
        except subprocess.TimeoutExpired:
            ok = False
            printed = "no answer over ssh"
        is_final = ok or any(error in printed for error in PERMANENT_ERRORS)
        if is_final or time.monotonic() >= deadline:
            report: dict[str, object] = {"node": node, "ok": ok, "seconds": round(time.monotonic() - began, 3)}
            print(json.dumps(report if ok else {**report, "error": printed.strip()}), flush=True)
            return ok
        time.sleep(0.05)


# --- reap ----------------------------------------------------------------------------------------------------


def print_processes(pids: dict[int, str]) -> None:
    """Print pid and command line of each process as a JSON line, by pid; one that is gone is left out."""
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            print(json.dumps({"pid": pid, "command": command_line(pid)[:200]}))


def command_line(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return " ".join(arguments.split())


def reap(run_id: str, grace: str) -> None:
    """Send TERM to all processes of a run, after ``grace`` KILL for 10 s; if any are left, print them and exit 1."""
    age = os.environ.get("LABCTL_RUN_SECONDS")
    began = time.clock_gettime(time.CLOCK_BOOTTIME) - float(age) - START_MARGIN if age else math.inf
    left = processes(run_id, {}, began)
    signal_all(left, signal.SIGTERM)
    left = wait_until_gone(run_id, left, float(grace), began)
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        left = wait_until_gone(run_id, left, 0.05, began)
    if left:
        print_processes(left)
        sys.exit(1)


def signal_run(run_id: str, number: str) -> None:
    """Signal every process of a run; wait up to two seconds for the first process to start."""
    deadline = time.monotonic() + 2
    while not (pids := processes(run_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    signal_all(pids, signal.Signals(int(number)))


def wait_until_gone(run_id: str, left: dict[int, str], seconds: float, began: float) -> dict[int, str]:
    """Wait until the run has no processes; return the processes that are left at the timeout."""
    deadline = time.monotonic() + seconds
    while True:
        left = processes(run_id, left, began)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def signal_all(pids: dict[int, str], number: signal.Signals) -> None:
    # Parents first: a shell goes on if INT ends its child before the shell itself has received it.
    for pid in sorted(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def processes(run_id: str, before: dict[int, str] | None = None, began: float = math.inf) -> dict[int, str]:
    """Return the living processes of a run: pid -> start time, which differs if the kernel reuses a pid.

    A process belongs to the run if its environment has the run's id, if its parent belongs to the run, or if ``before``
    has it. An orphan that started after ``began``, in seconds since boot, belongs to the run too, unless it has the id
    of another run: it cleared its environment. The node's own program may be as young, and is skipped.
    """
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    first_tick = began * os.sysconf("SC_CLK_TCK")
    node_pid = (STATE / "ready").read_text() if (STATE / "ready").exists() else ""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    marked: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            parents[int(entry.name)], started[int(entry.name)] = int(fields[1]), fields[19]
            variables: list[bytes] = []
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except PermissionError:
                # A program can make its environment unreadable; processes of other users are not the run's.
                if f"\nUid:\t{os.getuid()}\t" not in (entry / "status").read_text(errors="replace"):
                    continue
            is_orphan = fields[1] == str(INIT) and int(fields[19]) >= first_tick and entry.name != node_pid
            if mark in variables or (is_orphan and not any(variable.startswith(ANY_RUN) for variable in variables)):
                marked.add(int(entry.name))
    pids = marked | {pid for pid, start in (before or {}).items() if started.get(pid) == start}
    while True:
        children = {pid for pid, parent in parents.items() if parent in pids} - pids
        if not children:
            return {pid: started[pid] for pid in pids}
        pids |= children


# --- stacks --------------------------------------------------------------------------------------------------


def stacks(run_id: str, directory: str) -> None:
    """Write what a run's processes do to ``stacks/<node>.txt`` in the run's directory; print it as JSON."""
    looker = beside("stacks")
    pids = []
    for pid in processes(run_id):
        with contextlib.suppress(OSError):
            if str(SAMPLER) not in command_line(pid):
                pids.append(pid)
    looked = looker.look(pids)
    # Printed first: the file system of the run may not answer.
    print(json.dumps({"node": os.uname().nodename, "processes": looked}), flush=True)
    folder = Path(directory, "stacks")
    folder.mkdir(exist_ok=True)
    (folder / f"{os.uname().nodename}.txt").write_text("".join(f"{line}\n" for line in looker.render(looked)))


def beside(name: str) -> ModuleType:
    """Import a program beside this one, which is not on Python's path."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look it up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- runs ----------------------------------------------------------------------------------------------------

RUNS = Path("/var/lib/lab/runs")
# The report of rank.sh on a rank that failed, and the seconds that the launcher then has to end the other ranks.
CRASHED, CRASH_GRACE = re.compile(rb"\x01\d+!\x02labctl: (rank (\d+) on \S+ exited with code (\d+))"), 5
# Its first line, by a rank that has begun.
BEGUN = re.compile(rb"\x01\d+!\x02labctl: rank (\d+) of \d+ on (\S+)")
GRACE = 5
# Bytes. Longer lines are split.
LONGEST_LINE = 1_000_000
# Seconds between two polls, and between two heartbeats to the follower of a silent run.
POLL, BEAT = 0.02, 2
# Seconds between two connections to each worker of a run without a follower. A worker is lost after REFUSED failures in
# a row for a reason in GONE, or after UNANSWERED failures for any reason.
NODE_POLL, REFUSED, UNANSWERED = 5, 2, 12
# The progress that runs print, such as `step 12/100`, and the bytes that are searched for it: the end of the output and
# the start of a line.
STEP = re.compile(Path(__file__).with_name("step.regex").read_bytes())
RECENT, LINE_START = 1 << 16, 1 << 12
# A run is stalled after STALL_STEPS times the median of its last steps, of which the median needs LEAST_STEPS.
STALL_STEPS, LEAST_STEPS = 20, 3
# Lines that arrive together are searched for a step from the last back, up to this number.
MOST_STEP_LINES = 64
STEP_WORDS = (b"step", b"iter", b"epoch")
# The mark that rank_output.py puts before each line of a rank.
RANK = re.compile(rb"\x01(\d+)!?\x02")
# That mark, and a plus sign in it if the next line of the rank continues this one.
PIECE = re.compile(rb"\x01(\d+!?)(\+?)\x02")
# The report of rank_output.py on a launcher's process of a node that has ended before its rank, and how late it may be.
KILLED, KILL_REPORT = re.compile(rb"\x01\d+!\x02labctl: (\S+ on \S+ was killed) while rank \d+ ran"), 3
# The report of rank.sh on a rank that left processes on its node.
LEFT = re.compile(rb"\x01\d+!\x02labctl: rank \d+ on \S+ (?:has ended; what it started and left|left processes)")
# Exit code of ssh if it does not reach the node.
SSH_FAILED = 255
# Exit codes of timeout(1) when it ends its command.
TIMED_OUT = (124, 137)
# Timeout in seconds for looking at a node's processes.
LOOK_LIMIT = 10
# A run is looked at that is silent for QUIET seconds and QUIET_STEPS times its longest step, or an earlier run's;
# before its first step for QUIET_STEPS times what that took in an earlier run.
QUIET_STEPS, QUIET = 4, 10
# Seconds, and steps, that a rank must have waited for others before a run that still prints steps is called stuck.
STUCK, STUCK_STEPS = 2, 3
# What is no hang by itself: nobody waits, or nothing is known.
HARMLESS = ("all-outside", "unknown")
# What keeps a rank from going on, also if no other one waits for it.
HELD = ("rank-stopped", "uninterruptible", "node-unreached")
# Reasons to end a run before which its ranks are looked at.
LOOKED_AT = ("stalled", "timeout", "rank-crashed", "launcher-failed", "interrupted")
# All nodes of a run have the same image, so this program has the same path there.
AGENT = (sys.executable, "-I", __file__)
SAMPLER = Path(__file__).with_name("sampler.py")
# The Python of the image has the vendor's modules.
START_SAMPLER = 'exec env {} "$(command -v python || command -v python3)" -I {}'
# The delay leaves the run's launcher time to log in first. A run that ends within it has no samples.
START_SAMPLERS = """
read -rt 3
(($? > 128)) || exit
while (($#)); do
    ssh -o BatchMode=yes -o ConnectTimeout=5 -- "$1" "$2" <&0 &
    shift 2
done
"""
# Seconds to wait for the description of a run.
WAITING = 60
# Exit code of `launch` if other runs have the nodes.
IN_USE = 75
# The mark of pod.sh's last line. rank_output.py removes the first byte of a mark from the output of ranks.
LAST_LINE = b"\x01!\x02"


def launch_from_stdin() -> None:
    """Launch the run that a line of stdin describes, if any; if followed, wait for stdin, which may ask to forget it.

    Without such a line in time, as for a run that was refused, SIGALRM ends this process.
    """
    signal.alarm(WAITING)
    lines = iter(sys.stdin.buffer.readline, b"")
    line = next(filter(bytes.strip, lines), b"")
    signal.alarm(0)
    if line and launch(json.loads(line)):
        signal.pause()


def launch(job: dict[str, Any]) -> bool:
    """Start a run under a supervisor and follow it if asked, then return True; exit if other runs have its nodes.

    A node has one run at a time: if other runs have the nodes, print them and exit, unless the job asks to wait.
    """
    folder = RUNS / job["id"]
    RUNS.mkdir(mode=0o700, parents=True, exist_ok=True)
    registry = lock(RUNS / "lock", wait=True)
    conflicts = [run for run in active_runs() if share_nodes(run, job)]
    if conflicts and not job["wait"]:
        for run in conflicts:
            print_message("busy", run)
        sys.exit(IN_USE)
    folder.mkdir(mode=0o700)
    job["order"] = time.time()
    (folder / "output").touch(0o600)
    # Held by the supervisor alone, for as long as it lives.
    alive = lock(folder / "alive")
    # The run exists for other processes once it has this file, so it is renamed into place.
    write(folder / "job.new", json.dumps(job).encode())
    (folder / "job.new").rename(folder / "job.json")
    # Readable once the supervisor has ended.
    ended, held = os.pipe()
    if os.fork() == 0:
        os.close(registry)
        os.close(ended)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        try:
            supervise(folder, job)
        finally:
            os._exit(0)
    for descriptor in (alive, registry, held):
        os.close(descriptor)
    if job["follow"]:
        follow(job["id"], "0", ended)
    return bool(job["follow"])


def lock(path: Path, *, wait: bool = False) -> int:
    """Lock a file and return the descriptor that holds the lock; BlockingIOError if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def print_message(kind: str, content: object) -> None:
    """Print a message of the protocol with labctl: its kind and JSON."""
    print(kind, json.dumps(content), flush=True)


def state_of(folder: Path) -> str:
    """Return ``running``, ``ended``, or ``lost`` if the supervisor was killed, as it is with its container."""
    if (folder / "ended.json").exists():
        return "ended"
    try:
        os.close(lock(folder / "alive"))
    except BlockingIOError:
        return "running"
    # It may have ended between the two looks.
    return "ended" if (folder / "ended.json").exists() else "lost"


def read_runs() -> Iterator[dict[str, object]]:
    """Yield fields and state of each run, by folder; of a running one if it waits and seconds since ``watched``."""
    for path in sorted(RUNS.glob("*/job.json")):
        folder = path.parent
        try:
            job, state = json.loads(path.read_bytes()), state_of(folder)
        except OSError:
            continue  # Another process is removing the run.
        run = {name: job[name] for name in ("id", "nodes", "order", "port", "owner", "patience")}
        if state == "running":
            run["waits"] = not (folder / "started").exists()
            run["followed"] = seconds_since(folder / "watched")
        yield {**run, "state": state}


def last_step(output: Path) -> str:
    """Return the last step that a run has printed; empty if the end of its output has none."""
    steps: list[tuple[bytes, bytes, bytes]] = []
    with contextlib.suppress(OSError), output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - RECENT))
        steps = STEP.findall(file.read())
    return render_step(*steps[-1]) if steps else ""


def render_step(kind: bytes, number: bytes, count: bytes) -> str:
    """Return a step as text, such as ``step 12/100``."""
    step = b"%b %b" % (kind.lower(), number)
    return (step + b"/" + count if count else step).decode()


def active_runs() -> list[dict[str, object]]:
    """Return the runs that have nodes or wait for them, in the order of their launch."""
    running = (run for run in read_runs() if run["state"] == "running")
    return sorted(running, key=lambda run: str(run["order"]))


def share_nodes(run: dict[str, object], job: dict[str, object]) -> bool:
    return bool(set(run["nodes"]) & set(job["nodes"]))  # type: ignore[call-overload]


def seconds_since(path: Path) -> float | None:
    """Return the age of a file in seconds, or None if it does not exist."""
    try:
        return round(time.time() - path.stat().st_mtime, 1)
    except OSError:
        return None


def list_runs() -> None:
    for run in read_runs():
        print(json.dumps({**run, "step": last_step(RUNS / str(run["id"]) / "output")}))


def forget(run_id: str) -> None:
    """Remove a run's folder; do nothing if there is none, or the run is running."""
    folder = RUNS / run_id
    if folder.is_dir() and state_of(folder) != "running":
        # First the file that makes it a run for other processes.
        (folder / "job.json").unlink()
        shutil.rmtree(folder)


def stop(run_id: str, grace: str, cause: str, message: str) -> None:
    """Ask a run's supervisor to end it; a later request only kills it, with grace 0. Exit if it is not running."""
    folder = RUNS / run_id
    if not folder.is_dir() or state_of(folder) != "running":
        sys.exit(f"run {run_id} is not running")
    request = {"grace": float(grace), "cause": cause, "message": message}
    try:
        with (folder / "stop.json").open("x") as file:
            json.dump(request, file)
    except FileExistsError:
        if not float(grace):
            (folder / "at-once").touch()


def follow(run_id: str, offset: str, run_ended: int | None = None) -> None:
    """Print each line of output with the offset after it and its time, then ``end`` and how it ended. Exit if no run.

    Exits with its reader, which closes stdin. ``run_ended`` is a descriptor that is readable once the run has ended.
    """
    folder = RUNS / run_id
    if not folder.is_dir():
        sys.exit(f"no run {run_id} here")
    threading.Thread(target=watch_follower, args=(folder,), daemon=True).start()
    out = sys.stdout.buffer
    last_print = 0.0
    at = int(offset)
    with (folder / "output").open("rb", buffering=0) as output:
        while True:
            # Before the read: a run that has ended by now has written all of its output.
            state = state_of(folder)
            while lines := whole_lines(output, at):
                for line in lines:
                    at += len(line) + 1
                    out.write(b"%d %b\n" % (at, line))
                last_print = time.monotonic()
            if state != "running":
                break
            if time.monotonic() - last_print > BEAT:
                out.write(b"beat\n")
                last_print = time.monotonic()
            out.flush()
            select.select([] if run_ended is None else [run_ended], [], [], POLL)
    out.flush()
    ended = json.loads((folder / "ended.json").read_bytes()) if state == "ended" else {"code": 137, "lost": True}
    print_message("end", ended)


def whole_lines(file: IO[bytes], offset: int) -> list[bytes]:
    """Return the complete lines from an offset on, up to twice the length of the longest line."""
    file.seek(offset)
    return file.read(2 * LONGEST_LINE).split(b"\n")[:-1]


def watch_follower(folder: Path) -> None:
    """Touch ``watched`` at each line of stdin, at ``forget`` remove the run; exit then or when stdin closes.

    Writes to a follower that is gone may succeed for minutes.
    """
    received = b"\n"
    try:
        while received:
            if b"forget" in received:
                forget(folder.name)
                break
            with contextlib.suppress(OSError):
                (folder / "watched").touch()
            received = os.read(0, 1024)
    finally:
        os._exit(0)


class RunState:
    """State of a run, collected by its supervisor."""

    def __init__(self, *, has_reports: bool = True, pace: Mapping[str, float] = MappingProxyType({})) -> None:
        """``has_reports``: rank.sh starts the ranks and reports on them, with a mark that no program can print.

        ``pace``: seconds of the ``first_step`` and the ``longest_step`` of an earlier run of the same program.
        """
        self._has_reports = has_reports
        self.crashed: float | None = None
        """Time at which the first rank failed."""
        self.crash = ""
        """Message about the first rank that failed."""
        self.killed: float | None = None
        """Time at which a launcher's process of a node was seen to be killed."""
        self.kill = ""
        """Message about it."""
        self.leaves = False
        """True if a rank left processes on its node."""
        self.lost: dict[str, str] = {}
        """Lost nodes -> reason."""
        self.places: dict[int, str] = {}
        """Ranks that have begun -> their node."""
        self.codes: dict[int, int] = {}
        """Ranks that have failed -> their exit code."""
        self.uncleaned: set[str] = set()
        """Nodes on which processes of the run could not be ended."""
        self.steps = Steps(**pace)

    def add(self, lines: bytes) -> None:
        """Note the reports of rank.sh, if it starts the ranks, and the steps in lines that arrived together."""
        if self._has_reports and b"!\x02" in lines:
            self._add_reports(lines)
        # Also without a step: any output shows that the run is alive.
        self.steps.add(b"")
        for line in lines_with_steps(lines):
            self.steps.add(line)

    @property
    def failure(self) -> tuple[float, dict[str, object]] | None:
        """Time of the first failure of a rank or of a launcher's process of a node, with its cause and message."""
        # A launcher's end is reported up to KILL_REPORT seconds later, when its ranks may have failed for it.
        if self.killed is not None and (self.crashed is None or self.killed - KILL_REPORT < self.crashed):
            return self.killed, {"cause": "launcher-failed", "message": self.kill}
        if self.crashed is not None:
            return self.crashed, {"cause": "rank-crashed", "message": self.crash}
        return None

    def _add_reports(self, lines: bytes) -> None:
        """Note ranks' nodes, codes of failed ones until restart, first crash and killed launcher, left processes."""
        for rank, node in BEGUN.findall(lines):
            self.places[int(rank)] = node.decode(errors="replace")
            self.codes.pop(int(rank), None)
        for crash in CRASHED.finditer(lines):
            self.codes[int(crash[2])] = int(crash[3])
            if self.crashed is None:
                self.crashed, self.crash = time.monotonic(), crash[1].decode(errors="replace")
        killed = KILLED.search(lines)
        if self.killed is None and killed:
            self.killed, self.kill = time.monotonic(), killed[1].decode(errors="replace")
        self.leaves = self.leaves or bool(LEFT.search(lines))


def may_name_step(lines: bytes) -> bool:
    """Tell if a step is worth searching for: this costs less than the regular expression."""
    text = lines.lower()
    return any(word in text for word in STEP_WORDS)


def lines_with_steps(lines: bytes) -> list[bytes]:
    """Return up to MOST_STEP_LINES last lines that may name a step, oldest first."""
    if not may_name_step(lines):
        return []
    latest_first = filter(may_name_step, reversed(lines.split(b"\n")))
    return [*itertools.islice(latest_first, MOST_STEP_LINES)][::-1]


class Steps:
    """Steps that the ranks of a run print, and their durations."""

    def __init__(self, first_step: float = 0, longest_step: float = 0) -> None:
        """Take the seconds that the first and the longest step of an earlier run took; 0 if that is not known."""
        self._first, self._longest = first_step, longest_step
        self._at: dict[tuple[bytes, bytes], tuple[bytes, float]] = {}
        """Rank and kind of step -> its number and time."""
        self._seconds: deque[float] = deque(maxlen=100)
        self._last_output = time.monotonic()
        self._last: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    def add(self, line: bytes) -> None:
        """Process a line, and the step that it names unless its rank has printed that step before."""
        now = self._last_output = time.monotonic()
        step = STEP.search(line, 0, LINE_START)
        if not step:
            return
        rank = RANK.search(line, 0, LINE_START)
        kind, number, count = step.groups(b"")
        key = (rank[1] if rank else b"", kind.lower())
        before, since = self._at.get(key, (number, now))
        if number != before:
            self._seconds.append(now - since)
        if number != before or key not in self._at:
            self._at[key], self._last = (number, now), (kind, number, count)

    @property
    def last(self) -> str:
        """The step of the rank that is furthest, as ``step 12/100``; empty without one."""
        kind, number, count = self._last
        numbers = (each for (_, other), (each, _) in [*self._at.items()] if other == kind.lower())
        return render_step(kind, max(numbers, key=float, default=number), count) if number else ""

    @property
    def last_output(self) -> float:
        """Time of the last output, by the monotonic clock."""
        return self._last_output

    @property
    def silent(self) -> float:
        """Seconds since the last output."""
        return time.monotonic() - self._last_output

    @property
    def is_last(self) -> bool:
        """Tell if the last of a known number of steps was printed."""
        return bool(self._last[1]) and self._last[1] == self._last[2]

    @property
    def median(self) -> float:
        """Median duration of the last steps in seconds; 0 without enough of them."""
        return sorted(self._seconds)[len(self._seconds) // 2] if len(self._seconds) >= LEAST_STEPS else 0

    def quiet_since(self, least: float) -> float | None:
        """Return the time of the last output, if a run like this is seldom silent for so long; else None.

        ``least``: seconds of silence after which it is in any case; 0 turns the check off.
        """
        limit = least
        usual = max(self._longest, *self._seconds) if self.median else 0 if self._last[1] else self._first
        if usual and not self.is_last:
            limit = min(least, max(QUIET, QUIET_STEPS * usual))
        return self._last_output if least and self.silent > limit else None

    def stalled(self, least: float) -> str:
        """Return the reason why the run is stalled, or an empty text: no output for much longer than a step takes.

        ``least``: seconds without output that are never a stall; 0 turns the check off. After the last step of a known
        number of steps a run is never stalled.
        """
        silent, median = self.silent, self.median
        if not least or silent <= least or not median or self.is_last or silent <= STALL_STEPS * median:
            return ""
        took = round(median, 3 if median < 10 else 0)
        return f"no step and no line for {silent:.0f} s; steps took {took:g} s; the last was {self.last}"


def supervise(folder: Path, job: dict[str, Any]) -> None:
    """Run the job's command once its nodes are free; record output and end, code 130 if stopped while it waits."""
    stop_request: dict[str, object] | None = None
    while stop_request is None and waits_for_nodes(job):
        stop_request = read_stop_request(folder)
        time.sleep(POLL)
    if stop_request is not None:
        finish(folder, {"code": 130, "seconds": 0, **stop_request})
        return
    (folder / "started").touch()
    with (folder / "output").open("ab", buffering=0) as output:
        finish(folder, run_command(folder, job, functools.partial(record, output)))


def waits_for_nodes(job: dict[str, Any]) -> bool:
    """Tell if an earlier run has nodes of this job or waits for them."""
    return any(run["order"] < job["order"] and share_nodes(run, job) for run in active_runs())


def pod(path: str, *command: str) -> NoReturn:
    """Run the launch command of a pod, print its output to the pod's log, and exit with its code.

    TERM ends the run. ``~/.ended`` then has the end of the pod's last line.
    """
    home = Path(os.environ["HOME"])
    job = json.loads(Path(path).read_bytes())
    environment = {"HOME": str(home), RUN_VARIABLE: job["id"]}
    job = {**job, "argv": command, "environment": environment, "patience": 0, "in_pod": True}
    folder = home / ".agent"
    folder.mkdir(exist_ok=True)
    request = {"grace": GRACE, "cause": "interrupted", "message": "terminated"}
    signal.signal(signal.SIGTERM, lambda *_: write(folder / "stop.json", json.dumps(request).encode()))
    ended = run_command(folder, job, print_lines)
    write(home / ".ended", describe_end(ended).encode())
    sys.exit(int(str(ended["code"])))


def print_lines(lines: bytes) -> None:
    """Print whole lines, without the mark of the pod's last line."""
    sys.stdout.buffer.write(lines.replace(LAST_LINE, LAST_LINE[1:]))
    sys.stdout.buffer.flush()


def describe_end(ended: dict[str, object]) -> str:
    """Return how long a run lasted and why it was ended, as ``after 7 s; timeout: timed out after 7 s``.

    The reason of an interrupted run is left out: the process that stopped it reports that.
    """
    after = "after {} s".format(ended["seconds"])
    if ended.get("cause", "interrupted") == "interrupted":
        return after
    return "{}; {}: {}".format(after, ended["cause"], ended["message"])


def run_command(folder: Path, job: dict[str, Any], keep: Callable[[bytes], object]) -> dict[str, object]:
    """Run the job's command, lines to ``keep``; end it if needed, clean up; return its end, 127 if not started."""
    state = RunState(has_reports=job["launcher"] != "script", pace=job.get("pace", {}))
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            job["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(HOME), **job["environment"]},
            start_new_session=True,
            # Safe while this process has one thread, and faster than starting another interpreter.
            preexec_fn=functools.partial(be_user, job["directory"]),  # noqa: PLW1509
        )
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, subprocess.SubprocessError):
            error = OSError("the lab's user may not enter {}".format(job["directory"]))
        keep(f"{error}\n".encode())
        return {"code": 127, "seconds": 0}
    with sampling(job):
        reader = threading.Thread(target=read_output, args=(child.stdout, keep, state), daemon=True)
        reader.start()
        ended = oversee(folder, job, child, reader, state, began, keep)
    # A process that keeps the output open is left of the run.
    reader.join(0.5)
    if reader.is_alive():
        clean(job, state, 1, began)
        reader.join(GRACE)
    if child.stdout and not reader.is_alive():
        child.stdout.close()
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    at, seconds = time.time(), round(time.monotonic() - began, 3)
    ended = ended or judge(job, state, code, began, seconds)
    if code or ended or state.leaves or job["launcher"] == "script" or job.get("elastic"):
        clean(job, state, 1, began, last=True)
    return {"at": round(at, 3), "code": code, "seconds": seconds, **ended, "left": sorted(state.uncleaned)}


@contextlib.contextmanager
def sampling(job: dict[str, Any]) -> Iterator[None]:
    """Run a sampler on each node of the run during the block; a node on which that fails has no samples.

    A sampler exits when the stdin of its ssh session closes, which is a pipe from this process.
    """
    quiet = subprocess.DEVNULL
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            starter = subprocess.Popen(
                ["bash", "-c", START_SAMPLERS, "bash", *itertools.chain.from_iterable(sampler_commands(job))],
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                env={**os.environ, "HOME": str(HOME), RUN_VARIABLE: job["id"]},
                start_new_session=True,
                # Safe for the same reason as in run_command.
                preexec_fn=functools.partial(be_user, "/"),  # noqa: PLW1509
            )
            stack.enter_context(starter)
        yield


def sampler_commands(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each node of a run with the command that samples it, under its name in the lab; pods have other names."""
    variable = shlex.quote("{}={}".format(RUN_VARIABLE, job["id"]))
    for number, node in enumerate(job["nodes"]):
        name = f"worker-{number}" if job.get("in_pod") else node
        arguments = (str(SAMPLER), job["directory"], f"{time.time():.3f}", name)
        yield node, START_SAMPLER.format(variable, shlex.join(arguments))


def record(output: IO[bytes], lines: bytes) -> None:
    """Write whole lines, each with a timestamp."""
    timestamp = b"%.3f " % time.time()
    output.write(timestamp + lines[:-1].replace(b"\n", b"\n" + timestamp) + b"\n")


def read_output(source: IO[bytes], keep: Callable[[bytes], object], state: RunState) -> None:
    """Pass whole lines, pieces joined, to ``keep`` and ``state``; split long ones; end the last with a newline."""
    partial, pieces = b"", Pieces()

    def add(lines: bytes) -> None:
        if lines:
            keep(lines)
            state.add(lines)

    while text := os.read(source.fileno(), 1 << 16):
        end = text.rfind(b"\n") + 1
        lines, partial = (partial + text[:end], text[end:]) if end else (b"", partial + text)
        if len(partial) > LONGEST_LINE:
            lines, partial = lines + partial + b"\n", b""
        add(pieces.join(lines))
    add(pieces.join(partial and partial + b"\n") + pieces.unfinished())


class Pieces:
    """Long lines of ranks, which rank_output.py cuts for Open MPI."""

    def __init__(self) -> None:
        self._begun: dict[bytes, bytes] = {}
        """Rank, with ``!`` for a report -> the beginning of its line."""

    def join(self, lines: bytes) -> bytes:
        """Join the pieces among whole lines; keep back a line whose end has not come."""
        if not self._begun and b"+\x02" not in lines:
            return lines
        whole = []
        for line in lines[:-1].split(b"\n"):
            joined = self._join(line)
            if joined is not None:
                whole.append(joined + b"\n")
        return b"".join(whole)

    def _join(self, line: bytes) -> bytes | None:
        """Return the line, joined to its earlier pieces if it is a piece; None if more pieces follow."""
        mark = PIECE.search(line)
        if not mark:
            return line
        rank, goes_on = mark.groups()
        begun = self._begun.pop(rank, line[: mark.start()] + b"\x01%b\x02" % rank)
        joined = begun + line[mark.end() :]
        if not goes_on:
            return joined
        self._begun[rank] = joined
        return None

    def unfinished(self) -> bytes:
        """Return the lines whose end has not come."""
        return b"".join(line + b"\n" for line in self._begun.values())


def finish(folder: Path, ended: dict[str, object]) -> None:
    """Record how a run ended, atomically."""
    write(folder / "ended.new", json.dumps({"at": round(time.time(), 3), **ended}).encode())
    (folder / "ended.new").rename(folder / "ended.json")


def judge(job: dict[str, Any], state: RunState, code: int, began: float, seconds: float) -> dict[str, object]:
    """Return cause and message of an ended command's failure in time, unless elastic, or of its timeout; else {}."""
    failure = state.failure
    in_time = failure is not None and failure[0] - began < job["limit"]
    if failure and in_time and (code or state.crashed is not None) and not job.get("elastic"):
        return failure[1]
    if code in TIMED_OUT and seconds >= job["limit"]:
        return timed_out(job, state)
    return {}


def timed_out(job: dict[str, Any], state: RunState) -> dict[str, object]:
    """Return the cause and message of a run at its time limit, with the last step that it printed."""
    step = state.steps.last
    at = f", after {step}" if step else ""
    return {"cause": "timeout", "message": "timed out after {:g} s{}".format(job["limit"], at)}


def oversee(
    folder: Path,
    job: dict[str, Any],
    child: subprocess.Popen[bytes],
    reader: threading.Thread,
    state: RunState,
    began: float,
    keep: Callable[[bytes], object],
) -> dict[str, object]:
    """Wait for the command's end; end the run for the first stop request or ``reason_to_end``; return that or {}.

    ``reader`` reads the command's output, which mostly closes when the command ends.
    """
    command_ended = threading.Event()
    threading.Thread(target=watch_nodes, args=(folder, job, state, command_ended), daemon=True).start()
    looker = Looker(folder, job, state, keep)
    ending: dict[str, object] = {}
    end, kill = threading.Thread(), threading.Thread(target=clean, args=(job, state, 0, began), daemon=True)
    while child.poll() is None:
        if not ending:
            stop_request = read_stop_request(folder)
            ending = stop_request or reason_to_end(folder, job, state, began) or {}
            if ending:
                grace = float(ending.pop("grace", GRACE))  # type: ignore[arg-type]
                is_stalled = ending["cause"] == "stalled"
                # Printed before the ranks are ended, so that a follower does not take their end for a crash.
                if is_stalled and not stop_request:
                    keep("labctl: stalled: {}\n".format(ending["message"]).encode())
                # A run that labctl ends as stalled has a paused node, which does not answer.
                is_paused = is_stalled and stop_request
                looks = grace and ending["cause"] in LOOKED_AT and not is_paused
                arguments = (job, state, grace, began, looker if looks else None, ending)
                end = threading.Thread(target=end_run, args=arguments, daemon=True)
                end.start()
            else:
                looker.poll()
        elif kill.ident is None and (folder / "at-once").exists():
            kill.start()
        if reader.is_alive():
            reader.join(POLL)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL)
    command_ended.set()
    if ending:
        end.join()
    looker.drop_what_is_over()
    return ending


def read_stop_request(folder: Path) -> dict[str, object] | None:
    """Return the request of `stop` to end the run, or None."""
    try:
        return dict(json.loads((folder / "stop.json").read_bytes()))
    except (OSError, ValueError):
        return None


def reason_to_end(folder: Path, job: dict[str, Any], state: RunState, began: float) -> dict[str, object] | None:
    """Return cause and message if over the limit, failed, stalled, or unwatched beyond its patience; else None."""
    now = time.monotonic()
    if now - began > job["limit"]:
        return timed_out(job, state)
    if failure := failed(job, state, now):
        return failure
    if stall := state.steps.stalled(job.get("stall", 0)):
        return {"cause": "stalled", "message": stall}
    unwatched = seconds_since(folder / "watched")
    if job["patience"] and unwatched is not None and unwatched > job["patience"]:
        return {"cause": "interrupted", "message": "labctl was away for {:g} s".format(job["patience"])}
    return None


def failed(job: dict[str, Any], state: RunState, now: float) -> dict[str, object] | None:
    """Return the reason if a rank or launcher failed CRASH_GRACE ago (not elastic) or a node is lost, or None."""
    failure = state.failure
    if failure and not job.get("elastic") and now - failure[0] > CRASH_GRACE:
        return failure[1]
    if state.lost:
        node, error = next(iter(state.lost.items()))
        return {"cause": "node-lost", "message": f"{node}: {error}"}
    return None


def watch_nodes(folder: Path, job: dict[str, Any], state: RunState, run_ended: threading.Event) -> None:
    """Connect to nodes while no labctl follows the run; once a needed one or all are gone, set ``state.lost``.

    A labctl that follows the run learns of them from Docker.
    """
    # The address is kept: a cluster's DNS drops the name of a pod that is too busy to be ready.
    addresses = {node: address_of(node) if job.get("in_pod") else node for node in job["nodes"]}
    failed: dict[str, list[str]] = {node: [] for node in job["nodes"]}
    gone: dict[str, str] = {}
    needed = set(job.get("needed", job["nodes"]))
    while not run_ended.wait(NODE_POLL):
        unwatched = seconds_since(folder / "watched")
        if unwatched is not None and unwatched < NODE_POLL:
            continue
        for node, errors in failed.items():
            error = connect_error(addresses[node], job["ssh_port"])
            errors[:] = [*errors, error] if error else []
            if len(errors) >= UNANSWERED or (errors[-REFUSED:].count(error) == REFUSED and error in GONE):
                gone[node] = error
        if needed & gone.keys() or len(gone) == len(failed):
            state.lost.update(gone)
            return


def address_of(node: str) -> str:
    """Return the address of a node, or its name if that does not resolve."""
    try:
        return str(socket.getaddrinfo(node, None)[0][4][0])
    except OSError:
        return node


GONE = ("its host name no longer resolves", "its sshd is gone")


def connect_error(node: str, port: int) -> str:
    """Return the reason why a worker is unreachable; empty if it is reachable."""
    try:
        socket.create_connection((node, port), timeout=3).close()
    except socket.gaierror:
        return GONE[0]
    except ConnectionRefusedError:
        return GONE[1]
    except OSError:
        return "it does not answer"
    return ""


def as_user(directory: str, command: list[str]) -> list[str]:
    """Return the command line that runs a command as the lab's user in a directory."""
    return [*AGENT, "user", directory, *command]


def be_user(directory: str) -> None:
    """Become the lab's user in a directory; a pod runs as that user already."""
    if os.getuid() == 0:
        os.setgroups([number for number in os.getgroups() if number])
        os.setgid(int(os.environ["LAB_GID"]))
        os.setuid(int(os.environ["LAB_UID"]))
    os.umask(0o022)
    os.chdir(directory)


def become_as_user(directory: str, *command: str) -> NoReturn:
    be_user(directory)
    become(command)


def end_run(
    job: dict[str, Any], state: RunState, grace: float, began: float, looker: Looker | None, ending: dict[str, object]
) -> None:
    """End a run; with a ``looker`` print first what ranks wait for, and add it to a stall's or timeout's message."""
    sentences: list[str] = []
    if looker:
        # The run is ended even if the look fails, or hangs as on a file system that does not answer.
        look = threading.Thread(target=lambda: sentences.append(looker.last(ending["cause"])), daemon=True)
        look.start()
        look.join(2 * LOOK_LIMIT)
    if ending["cause"] in ("stalled", "timeout"):
        ending["message"] = "; ".join(filter(None, (str(ending["message"]), *sentences[:1])))
    clean(job, state, grace, began)


class Looker:
    """Looks at what the ranks of a run wait for: once per silence, when `look` asks, and before they are ended."""

    def __init__(self, folder: Path, job: dict[str, Any], state: RunState, keep: Callable[[bytes], object]) -> None:
        """Look at the run of `state` in `folder`; `keep` gets the lines that a look prints. Nothing starts yet."""
        self._folder, self._job, self._state, self._keep = folder, job, state, keep
        self._told: float | None = None
        """Time of the last output before the silence that was told of."""
        self._kept: tuple[str, float] | None = None
        """Last step, and time of the last output, when `hang.json` was written."""
        self._seen = ""
        """Last sentence on ranks whose calls have no time."""
        self._next = 0.0
        """Time before which a silence is not looked at again."""
        self._thread = threading.Thread()

    def poll(self) -> None:
        """Start a look if `look` asks for one or a silence is due, and none is under way."""
        if self._thread.is_alive():
            return
        if (self._folder / "look").exists():
            self._thread = threading.Thread(target=self._answer, daemon=True)
        else:
            since = self._state.steps.quiet_since(self._job.get("stall", 0))
            if since in (None, self._told) or time.monotonic() < self._next:
                return
            self._told = since
            self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def last(self, cause: object) -> str:
        """Look before ranks are ended; if stuck or stalled, print and return what they wait for; else empty."""
        if cause == "interrupted" and self._state.steps.silent <= STUCK:
            return ""
        if self._thread.ident is not None:
            self._thread.join(LOOK_LIMIT)
        finding = look_at_ranks(self._job, self._state)
        if cause != "stalled" and self._is_new(finding):
            time.sleep(STUCK)
            finding = look_at_ranks(self._job, self._state)
        is_told = cause == "stalled" or (is_stuck(finding, self._state.steps) and not self._is_new(finding))
        if not tells(finding) or not is_told:
            return ""
        self._print(finding["sentence"], finding)
        self._kept = None
        return str(finding["sentence"])

    def drop_what_is_over(self) -> None:
        """Remove what was told of a silence that another step has ended, or of a run without steps any output."""
        if self._kept is None:
            return
        (step, output), steps = self._kept, self._state.steps
        if steps.last != step or (not step and steps.last_output != output):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                remover = as_user(self._job["directory"], ["rm", "-f", "stacks/hang.json"])
                subprocess.run(remover, timeout=5, check=False)

    def _is_new(self, finding: dict[str, Any]) -> bool:
        """Note what ranks wait for; tell if their calls have no time, and they waited for something else before."""
        before, self._seen = self._seen, finding["sentence"]
        return bool(finding["collective"] and finding["seconds"] is None and before != self._seen)

    def _answer(self) -> None:
        # First: if the answer cannot be written, it is not looked for again at once.
        (self._folder / "look").unlink()
        finding = look_at_ranks(self._job, self._state)
        write(self._folder / "looked.new", json.dumps(finding).encode())
        (self._folder / "looked.new").rename(self._folder / "looked.json")

    def _tell(self) -> None:
        """Look at the ranks: again later if they may go on; else print a finding worth a line, if still silent."""
        silent = self._state.steps.silent
        finding = look_at_ranks(self._job, self._state)
        # Ranks that have only just begun to wait may go on: they are looked at again.
        may_go_on = self._is_new(finding) or not is_stuck(finding, self._state.steps)
        if waits(finding) and may_go_on:
            self._told, self._next = None, time.monotonic() + QUIET
        # Not if the run has printed something meanwhile.
        elif tells(finding) and self._state.steps.silent > silent:
            self._print("silent for {:.0f} s: {}".format(silent, finding["sentence"]), finding)

    def _print(self, sentence: str, finding: dict[str, Any]) -> None:
        """Print what ranks wait for, and keep it in ``stacks/hang.json`` of the run."""
        self._kept = self._state.steps.last, self._state.steps.last_output
        lines = [sentence, *("  " + line for line in finding["lines"])]
        self._keep("".join(f"labctl: {line}\n" for line in lines).encode())
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            keeper = as_user(self._job["directory"], ["tee", "stacks/hang.json"])
            quiet = subprocess.DEVNULL
            subprocess.run(
                keeper, input=json.dumps(finding).encode(), stdout=quiet, stderr=quiet, timeout=5, check=False
            )


def tells(finding: dict[str, Any]) -> bool:
    """Tell if a finding is worth a line."""
    return bool(finding["kind"] != "unknown" or finding["collective"])


def waits(finding: dict[str, Any]) -> bool:
    """Tell if ranks wait for others in a collective or message."""
    return bool(finding["collective"]) and finding["kind"] not in HARMLESS


def is_stuck(finding: dict[str, Any], steps: Steps) -> bool:
    """Tell if ranks wait in a collective for over STUCK seconds and STUCK_STEPS median steps; False if harmless."""
    if not waits(finding):
        return finding["kind"] in HELD
    waited = steps.silent if finding["seconds"] is None else finding["seconds"]
    return bool(waited > max(STUCK, STUCK_STEPS * steps.median))


def look_at_ranks(job: dict[str, Any], state: RunState) -> dict[str, Any]:
    """Have each node write its stacks; return diagnosis.py's finding on them, of kind ``unknown`` if it fails."""
    command = [*AGENT, "stacks", job["id"], job["directory"]]
    nodes: dict[str, Any] = {}
    for name, (code, printed) in ask_nodes(job, LOOK_LIMIT, command, command).items():
        try:
            answer = json.loads(printed)
            nodes[answer["node"]] = answer
        except (ValueError, KeyError, TypeError):
            is_reached = code != SSH_FAILED
            reason = {"error": "it could not be inspected"} if is_reached else {"unreached": "no answer over ssh"}
            nodes[name.partition(".")[0]] = reason
    try:
        return dict(beside("diagnosis").explain(nodes, state.places, state.codes))
    except Exception as error:  # noqa: BLE001 - ranks may answer anything, and the run has to be ended
        sentence = f"cannot interpret what its ranks answered: {error!r}"
        return {"kind": "unknown", "sentence": sentence, "lines": [], "collective": "", "seconds": None}


def look(run_id: str) -> None:
    """Have the supervisor of a run look at its ranks, and print what it finds; exit if it gives no answer."""
    folder = RUNS / run_id
    if not folder.is_dir():
        folder = Path(os.environ["HOME"]) / ".agent"
    began = time.time()
    try:
        (folder / "look").touch()
    except OSError:
        sys.exit(f"run {run_id} is not running")
    answer = folder / "looked.json"
    deadline = time.monotonic() + 2 * LOOK_LIMIT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if answer.stat().st_mtime >= began:
                print(answer.read_text())
                return
        if folder.parent == RUNS and state_of(folder) != "running":
            break
        time.sleep(POLL)
    sys.exit(f"run {run_id} is not running")


def clean(job: dict[str, Any], state: RunState, grace: float, began: float, *, last: bool = False) -> None:
    """End the processes of a run in this container and in its workers at once; record the nodes on which that fails.

    The ``last`` time, the launcher of a script comes before the workers: processes that its ssh sessions started become
    orphans only when the sessions end. Nodes on which an earlier time failed are skipped.
    """
    is_script = job["launcher"] == "script"
    reap_command = [*AGENT, "reap", job["id"], str(grace)]
    # In a pod ssh sessions are children of process 1, as orphans are, so orphans cannot be recognised.
    age = [] if job.get("in_pod") else [f"LABCTL_RUN_SECONDS={time.monotonic() - began:.3f}"]
    # Only a script that starts its ranks itself can leave orphans in the launcher.
    in_launcher = ["env", *(age if is_script else []), *reap_command]
    in_workers = ["env", *age, *reap_command]
    if last and is_script:
        state.uncleaned.update(run_on_nodes({**job, "nodes": []}, grace + 20, in_launcher, in_workers))
    nodes = [node for node in job["nodes"] if not last or node not in state.uncleaned]
    state.uncleaned.update(run_on_nodes({**job, "nodes": nodes}, grace + 20, in_launcher, in_workers))


def run_on_nodes(job: dict[str, Any], limit: float, in_launcher: list[str], in_workers: list[str]) -> list[str]:
    """Run a command as `ask_nodes` does; return the nodes on which it fails, or that are unreachable."""
    return [node for node, (code, _) in ask_nodes(job, limit, in_launcher, in_workers).items() if code]


def ask_nodes(
    job: dict[str, Any], limit: float, in_launcher: list[str], in_workers: list[str]
) -> dict[str, tuple[int, bytes]]:
    """Run a command in this container and a command in each of the run's workers at once, as the lab's user.

    Returns exit code and output by node; the exit code of one that is unreachable, or takes too long, is not 0.
    """
    from concurrent.futures import ThreadPoolExecutor

    ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--"]
    commands = {"launcher": in_launcher, **{node: [*ssh, node, shlex.join(in_workers)] for node in job["nodes"]}}

    def ask(command: list[str]) -> tuple[int, bytes]:
        """Run a command as the lab's user; return code and stdout; 1 and none on failure, 1 and a part at timeout."""
        quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
        variables = {**os.environ, "HOME": str(HOME)}
        try:
            done = subprocess.run(
                as_user("/", command), stdin=quiet, stdout=pipe, stderr=quiet, env=variables, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as late:
            return 1, late.stdout or b""
        except (OSError, subprocess.SubprocessError):
            return 1, b""
        return done.returncode, done.stdout

    with ThreadPoolExecutor(min(len(commands), 64)) as pool:
        answers = list(pool.map(ask, commands.values()))
    return {node: answers[at] for at, node in enumerate(commands)}


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "start": start,
        "health": health,
        "reach": reach,
        "reap": reap,
        "signal": signal_run,
        "stacks": stacks,
        "launch": launch_from_stdin,
        "follow": follow,
        "stop": stop,
        "look": look,
        "runs": list_runs,
        "forget": forget,
        "user": become_as_user,
        "pod": pod,
    }
    commands[sys.argv[1]](*sys.argv[2:])

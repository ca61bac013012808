#!/usr/bin/python3
"""The part of labctl that lives in every container: starts a node, reaches its peers, ends what a run left.

Standard library only, Python >= 3.8, so that it runs in any vendor's image:

    labnode.py start worker|launcher     make the user, the keys and the environment right, then become sshd or sleep
    labnode.py start COMMAND [ARGS...]   become that command, as `docker run IMAGE COMMAND` expects
    labnode.py health                    exit 0 when this node's sshd listens and its devices answer, else say why not
    labnode.py reach SECONDS NODE...     ssh to every node at once; one JSON line each
    labnode.py reap RUN_ID GRACE         TERM, grace, KILL to every process of a run; exit 1 if one is left.
                                         With LABCTL_RUN_SECONDS, how long it has lasted, also to those that left it
    labnode.py signal RUN_ID NUMBER      that signal to every process of a run, as soon as there is one
    labnode.py stacks RUN_ID DIRECTORY   write what each process of a run does to stacks/NODE.txt there; those of Python
                                         that no tool reads are ended, and write their stacks to their logs

And, as root in the launcher, where no rank can interfere:

    labnode.py launch                    start the run that the input names, a line of JSON, and follow it; it goes on
                                         whoever looks on. `forget` on the input then removes what is kept of it
    labnode.py follow RUN_ID PLACE       print what it has printed since that place, until it has ended
    labnode.py stop RUN_ID GRACE CAUSE MESSAGE
                                         end a run for this reason, unless it has one; with a GRACE of 0 at once, also
                                         if it is being ended
    labnode.py runs                      one JSON line for each run that is under way, or is not forgotten
    labnode.py forget RUN_ID             remove what is kept of a run that has ended
    labnode.py user DIRECTORY COMMAND... become the lab's user, who alone may enter the directory, and that command

And in the launcher's pod of a cluster, as its only user:

    labnode.py pod JOB COMMAND...        run the launch command and end it as `launch` does; JOB is a file of JSON
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
import resource
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

# typing and concurrent.futures take longer to import than most commands last.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO, Any, NoReturn

USER = "lab"
HOME = Path("/home/lab")
STATE = Path("/run/lab")
KEYS = Path("/etc/lab/ssh")
LEASES = Path("/etc/lab/leases")
# Seconds to wait for a device whose node is on its way out: Docker gives a container ten to stop.
HANDOVER = 15.0
SECRETS = Path("/run/secrets")
# The state of a listening socket in /proc/net/tcp; proc(5).
LISTENING = "0A"
RUN_VARIABLE = "LABCTL_RUN_ID"
ANY_RUN = f"{RUN_VARIABLE}=".encode()
# The container's init, which becomes the parent of processes that have lost theirs.
INIT = 1
# Seconds that a container is slower to ask how long a run has lasted than labctl is to say it.
ASKING = 1
DEV = Path("/dev")
# Seconds. A tool that has to load the driver first needs a few for each device; Docker waits for no check longer.
TOOL_LIMIT = 10
# What passes within a second ends no run; a slow answer is not asked for again, because Docker waits no longer.
SECOND_LOOK, QUICK = 1, 2
REMEDY = "`labctl up` makes this node anew"
# What a person finds at a prompt. Each command is kept at once: a node that goes down takes none of them along.
BASHRC = r"""\
. ~/.lab-env
[[ $- == *i* ]] || return 0
PS1='\u@$LAB_NAME/\h:\w\$ '
HISTFILE=~/.kept/history-$HOSTNAME HISTSIZE=10000 HISTFILESIZE=20000 HISTCONTROL=ignoredups
shopt -s histappend
[[ -z $LABCTL_RESUME ]] || { unset LABCTL_RESUME; cd "$(< ~/.kept/directory-$HOSTNAME)"; } 2> /dev/null
PROMPT_COMMAND='history -a; (umask 077; pwd > ~/.kept/directory-$HOSTNAME)'
"""
# Each session has its own of these; the container's would be wrong there.
PER_SESSION = {"HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "TERM", "USER", "LOGNAME", "SHELL", "MAIL", "_"}


# --- start ---------------------------------------------------------------------------------------------------


def start(*words: str) -> NoReturn:
    if words not in (("worker",), ("launcher",)):
        become(words)
    (role,) = words
    uid, gid = int(os.environ["LAB_UID"]), int(os.environ["LAB_GID"])
    os.umask(0o077)
    leases = hold_leases()
    register_user(uid, gid)
    KEYS.parent.chmod(0o755)
    with acting_as(uid, gid):
        write_session_environment()
        link_keras()
        keys = given_keys()
    if role == "worker":
        # The host key is a file of the person's, as ranks are, and must not be theirs to read.
        KEYS.parent.chmod(0o700)
        record_devices(keys.get("devices.json", b"{}"))
        become_sshd(keys, leases)
    else:
        become_launcher(keys, uid, gid)


def become(command: tuple[str, ...]) -> NoReturn:
    """A command in place of a node."""
    if not command:
        sys.exit("usage: docker run IMAGE COMMAND [ARGS...]; `labctl up` starts nodes")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def hold_leases() -> tuple[int, ...]:
    """Lock this node's devices, or leave if another has one; the kernel keeps a lock while its descriptor is open."""
    deadline = time.monotonic() + HANDOVER
    return tuple(take_lease(path, deadline) for path in sorted(LEASES.glob("*")))


def take_lease(path: Path, deadline: float) -> int:
    """A descriptor that holds the lock, with this node's name in the file."""
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
    """Give the caller's uid a name, first in the file so that it wins over a system user with the same number."""
    groups = "".join(f"labdevice{number}:x:{number}:{USER}\n" for number in os.getgroups() if number not in (0, gid))
    prepend("/etc/passwd", f"{USER}:x:{uid}:{gid}:labctl:{HOME}:/bin/bash\n")
    prepend("/etc/group", f"{USER}:x:{gid}:\n{groups}")


def prepend(path: str, lines: str) -> None:
    """Put lines at the head of a file, once: a restarted container finds them there already."""
    present = Path(path).read_text()
    if not present.startswith(lines):
        Path(path).write_text(lines + present)


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Read and write as the lab's user: root without CAP_DAC_OVERRIDE may not read that person's private files."""
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def given_keys() -> dict[str, bytes]:
    """The files by name. Where they were sent to this host, directories with their versions lie beside them."""
    return {path.name: path.read_bytes() for path in KEYS.iterdir() if path.is_file()}


def write_session_environment() -> None:
    """Hand what the container was started with to sessions that come in over ssh: bash reads it through BASH_ENV.

    What such a session was sent by its launcher stays; PATH is the container's.
    """
    lines = ["unset BASH_ENV\n"]
    for name, value in sorted(os.environb.items()):
        text = name.decode("utf-8", "surrogateescape")
        if text in PER_SESSION or not text.isidentifier():
            continue
        unless = "" if text == "PATH" else f"[[ -v {text} ]] || "
        lines.append(f"{unless}export {text}={shlex.quote(os.fsdecode(value))}\n")
    secret = SECRETS / "environment"
    if secret.exists():
        lines.append(secret.read_text(encoding="utf-8", errors="surrogateescape"))
    write(HOME / ".lab-env", os.fsencode("".join(lines)))
    write(HOME / ".bashrc", BASHRC.encode())
    write(HOME / ".profile", b". ~/.bashrc\n")


def link_keras() -> None:
    """Let ~/.keras be what KERAS_HOME is: Keras 2 looks for data sets and weights there alone."""
    kept = Path(os.environ.get("KERAS_HOME", HOME / ".cache/keras"))
    with contextlib.suppress(OSError):
        if not kept.exists():
            kept.mkdir(parents=True)
            kept.chmod(0o755)
        (HOME / ".keras").symlink_to(kept)


def record_devices(watch: bytes) -> None:
    """Note the device files that this node was given, for `health` to look for.

    ``watch`` is JSON: ``files``, patterns below /dev of what programs open, of which the first has one for each device;
    ``tool``, the command that lists devices, if there is one, and ``line``, what it prints for each.
    """
    kept = json.loads(watch)
    kept["given"] = [str(path) for pattern in kept.get("files", ()) for path in sorted(DEV.glob(pattern))]
    write(STATE / "devices", json.dumps(kept).encode(), 0o644)


def become_sshd(keys: dict[str, bytes], leases: tuple[int, ...]) -> NoReturn:
    write(STATE / "ssh_host_ed25519_key", keys["ssh_host_ed25519_key"])
    write(STATE / "authorized_keys", keys["authorized_keys"], 0o644)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/opt/lab/sshd_config", "-p", os.environ["LAB_SSH_PORT"]]
    # On its host's own network a node listens where the other nodes look for it, and nowhere else.
    for address in os.environ.get("LAB_SSH_ADDRESS", "").split():
        sshd += ["-o", f"ListenAddress={address}"]
    if level := os.environ.get("LAB_SSHD_LOG_LEVEL"):
        sshd += ["-o", f"LogLevel={level}"]
    mark_ready()
    os.umask(0o022)
    if leases:
        stay_for(sshd)
    os.execv(sshd[0], sshd)


def stay_for(command: list[str]) -> NoReturn:
    """Run the node's program, which closes what it inherits, and end with it.

    This process keeps the leases and is the container's: whoever ends it ends the node, so no node outlives its lease.
    """
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


def become_launcher(keys: dict[str, bytes], uid: int, gid: int) -> NoReturn:
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
    """Leave the pid of the node's program, which this process is or becomes."""
    write(STATE / "ready", str(os.getpid()).encode(), 0o644)


# --- health and reach ----------------------------------------------------------------------------------------


def health() -> None:
    """Whether a run can use this node; one line says what was seen and what to do. Its first words are relied on."""
    count = devices_expected()
    if count and os.getuid() == 0:
        become_user(int(os.environ["LAB_UID"]), int(os.environ["LAB_GID"]))
    began = time.monotonic()
    seen = trouble(count)
    if seen and time.monotonic() - began < QUICK:
        time.sleep(SECOND_LOOK)
        seen = trouble(count)
    if seen:
        sys.exit(seen)


def trouble(count: int) -> str | None:
    """What stands against a run on this node; None when nothing does."""
    if not sshd_listens():
        return f"sshd does not listen; {REMEDY}"
    try:
        what = device_lost(count) if count else None
    except TimeoutError as error:
        # No word of a loss, which would end a run: a machine that is only busy is as silent.
        return f"{error}; if that stays so, `labctl doctor`"
    return f"device lost: {what}; {REMEDY}; if that does not help, `labctl doctor`" if what else None


def devices_expected() -> int:
    """How many devices this node was given."""
    return int(os.environ.get("LAB_HEALTH_DEVICES", "").rpartition(":")[2] or 0)


def become_user(uid: int, gid: int) -> None:
    """Look with the eyes of what runs here: root may open what the lab's user may not."""
    os.initgroups(USER, gid)
    os.setgid(gid)
    os.setuid(uid)


def device_lost(count: int) -> str | None:
    """What is wrong with the node's devices; None when nothing is. TimeoutError when their vendor's tool does not say.

    The files are not opened: some devices have one opener at a time, which is to be the run. access(2) asks the device
    cgroup as well, from which devices vanish when systemd rewrites it: devcgroup_inode_permission() in fs/namei.c.
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
    there = sum(Path(path).match(pattern) for path in given)
    if there < count:
        return f"the node started with {there} of {count} device files {DEV / pattern}"
    return complaint(watch["tool"], watch["line"], count) if watch["tool"] else None


def complaint(tool: list[str], device: str, count: int) -> str | None:
    """What the vendor's tool says instead of listing every device; None when it lists them, or is not there.

    TimeoutError when it gives no answer.
    """
    name = tool[0]
    if not shutil.which(name):
        return None
    code, said = answer(tool)
    listed = [line for line in said if re.match(device, line)]
    if code == 0 and len(listed) >= count:
        return None
    others = [line.strip() for line in said if line.strip() and line not in listed]
    if others:
        return f"{name} says `{others[0]}`"
    return f"{name} lists {len(listed)} of {count} devices and ends with code {code}"


def answer(tool: list[str]) -> tuple[int, list[str]]:
    """The tool's exit code and lines; TimeoutError where it is not done in time.

    One at a time: a process that its driver holds outlives SIGKILL, and each check would leave one more. The tool
    inherits the lock, so the kernel keeps it for as long as one lives.
    """
    late = TimeoutError(f"{tool[0]} gives no answer within {TOOL_LIMIT} s")
    deadline = time.monotonic() + TOOL_LIMIT
    with (STATE / "devices").open() as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise late from None
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
            said = child.communicate(timeout=max(0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            # Not for ever: a process that its driver holds cannot be ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=1)
            raise late from None
    return child.returncode, said.decode(errors="replace").splitlines()


def sshd_listens() -> bool:
    """By the kernel's own table: a connection every few seconds would fill sshd's log."""
    wanted = (f":{int(os.environ['LAB_SSH_PORT']):04X}", LISTENING)
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if (local[-5:], state) == wanted:
                    return True
    return False


def reach(seconds: str, *nodes: str) -> NoReturn:
    """Log in to every node at once and ask its name, again and again until it answers or the time is up."""
    from concurrent.futures import ThreadPoolExecutor

    deadline = time.monotonic() + float(seconds)
    while not (STATE / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    # Nodes may have come since this launcher started.
    for name in ("config", "known_hosts"):
        write(HOME / ".ssh" / name, (KEYS / name).read_bytes())
    with ThreadPoolExecutor(min(len(nodes), 64)) as pool:
        reached = list(pool.map(lambda node: reach_one(node, deadline), nodes))
    sys.exit(0 if all(reached) else 1)


def reach_one(node: str, deadline: float) -> bool:
    began = time.monotonic()
    while True:
        left = max(1, int(deadline - time.monotonic()))
        ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={left}", "--", node, "hostname"]
        try:
            answer = subprocess.run(ssh, capture_output=True, text=True, check=False, timeout=left + 1)
            ok, said = answer.returncode == 0 and answer.stdout.strip() == node, answer.stderr + answer.stdout
        except subprocess.TimeoutExpired:
            ok, said = False, "no answer over ssh"
        final = "IDENTIFICATION HAS CHANGED" in said or "Permission denied" in said or "verification failed" in said
        if ok or final or time.monotonic() >= deadline:
            report: dict[str, object] = {"node": node, "ok": ok, "seconds": round(time.monotonic() - began, 3)}
            print(json.dumps(report if ok else {**report, "error": said.strip()}), flush=True)
            return ok
        time.sleep(0.05)


# --- reap ----------------------------------------------------------------------------------------------------


def describe(pids: dict[int, str]) -> None:
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            print(json.dumps({"pid": pid, "command": command_line(pid)[:200]}))


def command_line(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return " ".join(words.split())


def reap(run_id: str, grace: str) -> None:
    """End every process of a run; new ones that appear meanwhile are ended too."""
    lasted = os.environ.get("LABCTL_RUN_SECONDS")
    began = time.clock_gettime(time.CLOCK_BOOTTIME) - float(lasted) - ASKING if lasted else math.inf
    known = processes(run_id, {}, began)
    signal_all(known, signal.SIGTERM)
    known = wait_until_gone(run_id, known, float(grace), began)
    deadline = time.monotonic() + 10
    while known and time.monotonic() < deadline:
        signal_all(known, signal.SIGKILL)
        known = wait_until_gone(run_id, known, 0.05, began)
    if known:
        describe(known)
        sys.exit(1)


def pass_on(run_id: str, number: str) -> None:
    """Signal every process of a run; one that is only about to start is waited for."""
    deadline = time.monotonic() + 2
    while not (known := processes(run_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    signal_all(known, signal.Signals(int(number)))


def wait_until_gone(run_id: str, known: dict[int, str], seconds: float, began: float) -> dict[int, str]:
    """What is left of the run after so many seconds; sooner when nothing is."""
    deadline = time.monotonic() + seconds
    while True:
        known = processes(run_id, known, began)
        if not known or time.monotonic() >= deadline:
            return known
        time.sleep(0.02)


def signal_all(pids: dict[int, str], number: signal.Signals) -> None:
    # Parents first: a shell whose child is ended by an INT that it has not seen itself goes on.
    for pid in sorted(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def processes(run_id: str, known: dict[int, str] | None = None, began: float = math.inf) -> dict[int, str]:
    """Living processes with the run's id in their environment, all that descend from them, and those known before.

    By pid, with the start time that tells a process from a later one of the same number. Of those that were born since
    the run ``began``, in seconds since boot, also those that lost their parent and have no other id: they cleaned their
    environment. The node's own program, which may be as young, is none of them.
    """
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    first_tick = began * os.sysconf("SC_CLK_TCK")
    own = (STATE / "ready").read_text() if (STATE / "ready").exists() else ""
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
                # A program may ask that nobody reads it; another user's is none of ours.
                if f"\nUid:\t{os.getuid()}\t" not in (entry / "status").read_text(errors="replace"):
                    continue
            is_orphan = fields[1] == str(INIT) and int(fields[19]) >= first_tick and entry.name != own
            if mark in variables or (is_orphan and not any(one.startswith(ANY_RUN) for one in variables)):
                marked.add(int(entry.name))
    found = marked | {pid for pid, start in (known or {}).items() if started.get(pid) == start}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return {pid: started[pid] for pid in found}
        found |= more


# --- stacks --------------------------------------------------------------------------------------------------

# Seconds over which a process' share of a core is measured, and that py-spy has for one process.
MEASURED, PY_SPY_LIMIT = 0.5, 5
# The states of a connection in /proc/net/tcp that say something of a run that hangs; net/tcp_states.h.
CONNECTED = {"01": "established", "02": "connecting", "08": "closed by the peer"}


def stacks(run_id: str, directory: str) -> None:
    """Write what each process of a run here does, and its connections, to ``stacks/<node>.txt`` of the run's directory.

    py-spy reads the stacks of Python, where the image has it and may. Python's own fault handler writes those of the
    others to their logs, and ends them, which the run is in for.
    """
    folder = Path(directory, "stacks")
    folder.mkdir(exist_ok=True)
    before: dict[int, int] = {}
    for pid in processes(run_id):
        with contextlib.suppress(OSError):
            if SAMPLER[-1] not in command_line(pid):
                before[pid] = cpu_ticks(pid)
    time.sleep(MEASURED)
    unread = []
    with (folder / f"{os.uname().nodename}.txt").open("w") as out:
        for pid, ticks in sorted(before.items()):
            with contextlib.suppress(OSError):
                share = (cpu_ticks(pid) - ticks) / os.sysconf("SC_CLK_TCK") / MEASURED
                out.write(doing(pid, share))
                said = py_spy(pid) if is_python(pid) else ""
                out.write(said)
                if not said and b"PYTHONFAULTHANDLER=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    unread.append(pid)
        out.write("connections\n")
        out.writelines(f"  {line}\n" for line in connections(before))
    for pid in unread:
        with contextlib.suppress(OSError):
            if is_python(pid):
                # Of a process with gigabytes no core is wanted.
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def is_python(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")


def doing(pid: int, share: float) -> str:
    """A process with its state, its share of a core, and what it waits for in the kernel."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    waits = ""
    with contextlib.suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    state = f"{status['State'].strip()}, {100 * share:.0f} % of a core, {status['Threads'].strip()} threads"
    return f"process {pid}: {command_line(pid)[:200]}\n  {state}{f', in {waits}' if waits else ''}\n"


def py_spy(pid: int) -> str:
    """The Python stacks of a process; empty where py-spy is not there or may not read them."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["py-spy", "dump", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_LIMIT, check=False)
        return "".join(f"  {line}\n" for line in done.stdout.splitlines()) if done.returncode == 0 else ""
    return ""


def connections(pids: Iterable[int]) -> Iterator[str]:
    """The TCP connections of processes, with the bytes that wait to be sent or read; proc(5)."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[str(descriptor.readlink())] = pid
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                owner = owners.get(f"socket:[{fields[9]}]")
                if owner and fields[3] in CONNECTED:
                    sent, read = (int(number, 16) for number in fields[4].split(":"))
                    ends = f"port {int(fields[1][-4:], 16)} to {address(fields[2])}"
                    yield f"process {owner}: {ends}, {CONNECTED[fields[3]]}, {sent} bytes to send, {read} to read"


def address(text: str) -> str:
    """An address of /proc/net/tcp, whose words are in the host's byte order."""
    words, port = text.split(":")
    packed = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)} port {int(port, 16)}"


# --- runs ----------------------------------------------------------------------------------------------------

RUNS = Path("/var/lib/lab/runs")
# What rank.sh reports of a rank that failed, and the seconds that the launcher then has to end the others by itself.
CRASHED, CRASH_GRACE = re.compile(rb"\x01\d+!\x02labctl: (rank \d+ on \S+ exited with code \d+)"), 5
GRACE = 5
# Bytes of a line; what is longer comes in pieces.
LONGEST_LINE = 1_000_000
# Seconds between two looks of whom nothing else wakes, and between two words to who follows a silent run.
LOOK, BEAT = 0.02, 2
# Seconds between two looks at the workers of a run that nobody follows, and how many of them fail before one is lost.
NODE_LOOK, REFUSED, UNANSWERED = 5, 2, 12
# How runs say where they are, such as `step 12/100`; the bytes of output and of a line in which that is looked for.
STEP = re.compile(Path(__file__).with_name("step.regex").read_bytes())
RECENT, SHORT = 1 << 16, 1 << 12
# A run is stalled after so many times the median of its last steps; it needs that many to have a median.
STALL_STEPS, KNOWN_STEPS = 20, 3
# Of lines that come at once no more of those that may name a step are heard, the last: what came before took no time.
TOLD_AT_ONCE = 64
STEP_WORDS = (b"step", b"iter", b"epoch")
# What rank_output.py puts before each line of a rank.
RANK = re.compile(rb"\x01(\d+)!?\x02")
# What rank.sh reports of a rank that left processes on its node.
LEFT = re.compile(rb"\x01\d+!\x02labctl: rank \d+ on \S+ (?:has ended; what it started and left|left processes)")
# Exit codes of a command that timeout(1) has ended.
TIMED_OUT = (124, 137)
# Seconds in which the processes of a stalled run are looked at, before it is ended all the same.
STACKS_LIMIT = 30
# All nodes of a run have the same image, and this program in the same place.
AGENT = (sys.executable, "-I", __file__)
# The image's own Python has its vendor's modules.
SAMPLER = ("python", "-I", "/opt/lab/sampler.py")
# After seconds in which the run's own launcher logs in to its nodes; a run that is over by then has no samples.
START_SAMPLERS = """
read -rt 3
(($? > 128)) || exit
for node; do ssh -o BatchMode=yes -o ConnectTimeout=5 -- "$node" "$0" <&0 & done
"""
# Exit code of `launch` where other runs have the nodes.
IN_USE = 75
# The mark of pod.sh's last line. From what ranks print rank_output.py drops the bytes that begin a mark.
LAST_LINE = b"\x01!\x02"


def launch_named() -> None:
    """Wait for the input to name a run, and launch it; one that is followed may then be forgotten."""
    lines = iter(sys.stdin.buffer.readline, b"")
    text = next(filter(bytes.strip, lines), b"")
    if text and launch(json.loads(text)):
        signal.pause()


def launch(job: dict[str, Any]) -> bool:
    """Start a run under a supervisor of its own, and follow it if it is to be followed; return if it is.

    Its nodes are its own: prints which other runs have them instead, unless it is to wait for those.
    """
    folder = RUNS / job["id"]
    RUNS.mkdir(mode=0o700, parents=True, exist_ok=True)
    registry = lock(RUNS / "lock", wait=True)
    others = [other for other in under_way() if share_nodes(other, job)]
    if others and not job["wait"]:
        for other in others:
            say("busy", other)
        sys.exit(IN_USE)
    folder.mkdir(mode=0o700)
    job["order"] = time.time()
    (folder / "output").touch(0o600)
    # Held by the supervisor while it lives, and by no other process.
    alive = lock(folder / "alive")
    # What makes it a run to others, and so in one step.
    write(folder / "job.new", json.dumps(job).encode())
    (folder / "job.new").rename(folder / "job.json")
    # Readable once the supervisor has ended.
    over, held = os.pipe()
    if os.fork() == 0:
        os.close(registry)
        os.close(over)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        try:
            supervise(folder, job)
        finally:
            os._exit(0)
    for descriptor in (alive, registry, held):
        os.close(descriptor)
    if job["follow"]:
        follow(job["id"], "0", over)
    return bool(job["follow"])


def lock(path: Path, *, wait: bool = False) -> int:
    """A descriptor that holds the lock; BlockingIOError if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def say(kind: str, content: object) -> None:
    print(kind, json.dumps(content), flush=True)


def state_of(folder: Path) -> str:
    """``running``; ``ended``; ``lost`` where its supervisor was killed, as with its container."""
    if (folder / "ended.json").exists():
        return "ended"
    try:
        os.close(lock(folder / "alive"))
    except BlockingIOError:
        return "running"
    return "lost"


def described() -> Iterator[dict[str, object]]:
    """The runs as ``runs`` and ``launch`` tell of them."""
    for path in sorted(RUNS.glob("*/job.json")):
        folder = path.parent
        try:
            job, state = json.loads(path.read_bytes()), state_of(folder)
        except OSError:
            continue  # It is forgotten at this moment.
        told = {name: job[name] for name in ("id", "nodes", "order", "port", "owner", "patience")}
        if state == "running":
            told["waits"] = not (folder / "started").exists()
            told["followed"] = seconds_since(folder / "watched")
        yield {**told, "state": state}


def last_step(output: Path) -> str:
    """The last that a run has printed of where it is; nothing where it printed much since."""
    found: list[tuple[bytes, bytes, bytes]] = []
    with contextlib.suppress(OSError), output.open("rb") as lines:
        lines.seek(max(0, output.stat().st_size - RECENT))
        found = STEP.findall(lines.read())
    return place(*found[-1]) if found else ""


def place(kind: bytes, number: bytes, of: bytes) -> str:
    """Where a run is, such as ``step 12/100``."""
    return (b"%b %b/%b" % (kind.lower(), number, of) if of else b"%b %b" % (kind.lower(), number)).decode()


def under_way() -> list[dict[str, object]]:
    """The runs that have nodes or wait for them, in their order."""
    return sorted((one for one in described() if one["state"] == "running"), key=lambda one: str(one["order"]))


def share_nodes(one: dict[str, object], other: dict[str, object]) -> bool:
    return bool(set(one["nodes"]) & set(other["nodes"]))  # type: ignore[call-overload]


def seconds_since(path: Path) -> float | None:
    try:
        return round(time.time() - path.stat().st_mtime, 1)
    except OSError:
        return None


def list_runs() -> None:
    for one in described():
        print(json.dumps({**one, "step": last_step(RUNS / str(one["id"]) / "output")}))


def forget(run_id: str) -> None:
    folder = RUNS / run_id
    if folder.is_dir() and state_of(folder) != "running":
        # Nobody is to take it for a run while it goes.
        (folder / "job.json").unlink()
        shutil.rmtree(folder)


def stop(run_id: str, grace: str, cause: str, message: str) -> None:
    """Have the supervisor of a run end it; the first who asks gives the reason."""
    folder = RUNS / run_id
    if not folder.is_dir() or state_of(folder) != "running":
        sys.exit(f"run {run_id} is not running")
    asked = {"grace": float(grace), "cause": cause, "message": message}
    try:
        with (folder / "stop.json").open("x") as file:
            json.dump(asked, file)
    except FileExistsError:
        if not float(grace):
            (folder / "at-once").touch()


def follow(run_id: str, place: str, over: int | None = None) -> None:
    """Print each line with the place behind it and its time, then ``end`` and how the run ended.

    Ends with who reads: then the input is at its end. ``over`` is a descriptor that is readable once the run has ended.
    """
    folder = RUNS / run_id
    if not folder.is_dir():
        sys.exit(f"no run {run_id} here")
    threading.Thread(target=hear_reader, args=(folder,), daemon=True).start()
    out = sys.stdout.buffer
    spoken = 0.0
    at = int(place)
    with (folder / "output").open("rb", buffering=0) as output:
        while True:
            # What was written before it ended is read below.
            state = state_of(folder)
            while lines := whole_lines(output, at):
                for line in lines:
                    at += len(line) + 1
                    out.write(b"%d %b\n" % (at, line))
                spoken = time.monotonic()
            if state != "running":
                break
            if time.monotonic() - spoken > BEAT:
                out.write(b"beat\n")
                spoken = time.monotonic()
            out.flush()
            select.select([] if over is None else [over], [], [], LOOK)
    out.flush()
    ended = json.loads((folder / "ended.json").read_bytes()) if state == "ended" else {"code": 137, "lost": True}
    say("end", ended)


def whole_lines(file: IO[bytes], place: int) -> list[bytes]:
    """The lines from a place on, up to twice as much as the longest has."""
    file.seek(place)
    return file.read(2 * LONGEST_LINE).split(b"\n")[:-1]


def hear_reader(folder: Path) -> None:
    """Note each line of the reader, and end with it: output for a reader that is gone may be taken for minutes."""
    heard = b"\n"
    while heard:
        if b"forget" in heard:
            forget(folder.name)
            break
        with contextlib.suppress(OSError):
            (folder / "watched").touch()
        heard = os.read(0, 1024)
    os._exit(0)


class Seen:
    """What a supervisor knows of its run."""

    def __init__(self, *, has_reports: bool = True) -> None:
        """``has_reports``: its ranks are started by rank.sh, which reports on them as no program can."""
        self._has_reports = has_reports
        self.crashed: float | None = None
        """When the first rank failed, and how, in words."""
        self.crash = ""
        self.leaves = False
        """Whether a rank left processes on its node."""
        self.lost: dict[str, str] = {}
        self.uncleaned: set[str] = set()
        """Nodes on which what is left of the run could not be ended."""
        self.steps = Steps()

    def hear(self, lines: bytes) -> None:
        """Take note of lines that came at once."""
        if self._has_reports and b"!\x02" in lines:
            self._hear_reports(lines)
        told = filter(may_name_step, reversed(lines.split(b"\n"))) if may_name_step(lines) else ()
        for line in (b"", *reversed([*itertools.islice(told, TOLD_AT_ONCE)])):
            self.steps.hear(line)

    def _hear_reports(self, lines: bytes) -> None:
        crash = CRASHED.search(lines)
        if self.crashed is None and crash:
            self.crashed, self.crash = time.monotonic(), crash[1].decode(errors="replace")
        self.leaves = self.leaves or bool(LEFT.search(lines))


def may_name_step(lines: bytes) -> bool:
    text = lines.lower()
    return any(word in text for word in STEP_WORDS)


class Steps:
    """The steps of a run, by what its ranks print, and how long they take."""

    def __init__(self) -> None:
        self._at: dict[tuple[bytes, bytes], tuple[bytes, float]] = {}
        self._seconds: deque[float] = deque(maxlen=100)
        self._spoken = time.monotonic()
        self._last: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    def hear(self, line: bytes) -> None:
        """Take note of a line, and of the step that it names if its rank has not named that before."""
        now = self._spoken = time.monotonic()
        found = STEP.search(line, 0, SHORT)
        if not found:
            return
        rank = RANK.search(line, 0, SHORT)
        kind, number, of = found.groups(b"")
        key = (rank[1] if rank else b"", kind.lower())
        before, since = self._at.get(key, (number, now))
        if number != before:
            self._seconds.append(now - since)
        if number != before or key not in self._at:
            self._at[key], self._last = (number, now), (kind, number, of)

    def stalled(self, least: float) -> str:
        """Why the run is stalled, where no rank has printed anything for longer than steps take; empty else.

        ``least``: seconds of silence that are no stall, 0 where no silence is one. What comes after the last of a known
        number of steps may take as long as it likes.
        """
        silent = time.monotonic() - self._spoken
        if not least or silent <= least or len(self._seconds) < KNOWN_STEPS or self._last[1] == self._last[2]:
            return ""
        usual = sorted(self._seconds)[len(self._seconds) // 2]
        if silent <= STALL_STEPS * usual:
            return ""
        words = f"no step and no line for {silent:.0f} s; steps took {round(usual, 3 if usual < 10 else 0):g} s"
        return f"{words}; the last was {place(*self._last)}"


def supervise(folder: Path, job: dict[str, Any]) -> None:
    """Run the job's command once its nodes are free, and record what it prints and how it ended."""
    ended: dict[str, object] | None = None
    while ended is None and any(other["order"] < job["order"] and share_nodes(other, job) for other in under_way()):
        ended = asked_to_stop(folder)
        time.sleep(LOOK)
    if ended is not None:
        finish(folder, {"code": 130, "seconds": 0, **ended})
        return
    (folder / "started").touch()
    with (folder / "output").open("ab", buffering=0) as output:
        finish(folder, run_command(folder, job, functools.partial(record, output)))


def pod(path: str, *command: str) -> NoReturn:
    """Run the launch command of a pod, whose log is its output, and end with its exit code.

    TERM ends the run. How it ended is in ``~/.ended`` for the pod's last line.
    """
    home = Path(os.environ["HOME"])
    job = json.loads(Path(path).read_bytes())
    environment = {"HOME": str(home), RUN_VARIABLE: job["id"]}
    job = {**job, "argv": command, "environment": environment, "patience": 0, "in_pod": True}
    folder = home / ".agent"
    folder.mkdir(exist_ok=True)
    asked = {"grace": GRACE, "cause": "interrupted", "message": "terminated"}
    signal.signal(signal.SIGTERM, lambda *_: write(folder / "stop.json", json.dumps(asked).encode()))
    ended = run_command(folder, job, print_lines)
    write(home / ".ended", describe_end(ended).encode())
    sys.exit(int(str(ended["code"])))


def print_lines(lines: bytes) -> None:
    """Print whole lines as they are; none can be taken for the pod's last."""
    sys.stdout.buffer.write(lines.replace(LAST_LINE, LAST_LINE[1:]))
    sys.stdout.buffer.flush()


def describe_end(ended: dict[str, object]) -> str:
    """Render how long a run lasted and why it was ended, as ``after 7 s; timeout: timed out after 7 s``.

    Who stops a run says why.
    """
    after = "after {} s".format(ended["seconds"])
    if ended.get("cause", "interrupted") == "interrupted":
        return after
    return "{}; {}: {}".format(after, ended["cause"], ended["message"])


def run_command(folder: Path, job: dict[str, Any], keep: Callable[[bytes], object]) -> dict[str, object]:
    """Run the job's command, hand on the lines that it prints, end it for a reason, and clean up; how it ended."""
    seen = Seen(has_reports=job["launcher"] != "script")
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            job["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(HOME), **job["environment"]},
            start_new_session=True,
            # This process has one thread yet, and another interpreter would take a while to start.
            preexec_fn=functools.partial(be_user, job["directory"]),  # noqa: PLW1509
        )
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, subprocess.SubprocessError):
            error = OSError("the lab's user may not enter {}".format(job["directory"]))
        keep(f"{error}\n".encode())
        return {"code": 127, "seconds": 0}
    with sampled(job):
        reader = threading.Thread(target=read, args=(child.stdout, keep, seen), daemon=True)
        reader.start()
        ended = oversee(folder, job, child, reader, seen, began, keep)
    # What holds the output is left of the run.
    reader.join(0.5)
    if reader.is_alive():
        clean(job, seen, 1, began)
        reader.join(GRACE)
    if child.stdout and not reader.is_alive():
        child.stdout.close()
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    over, seconds = time.time(), round(time.monotonic() - began, 3)
    ended = ended or judged(job, seen, code, began, seconds)
    if code or ended or seen.leaves or job["launcher"] == "script" or job.get("elastic"):
        clean(job, seen, 1, began, last=True)
    return {"at": round(over, 3), "code": code, "seconds": seconds, **ended, "left": sorted(seen.uncleaned)}


@contextlib.contextmanager
def sampled(job: dict[str, Any]) -> Iterator[None]:
    """Have the run's nodes write samples of themselves meanwhile; those that cannot have none.

    A sampler ends with the input of its ssh, which is a pipe from this process. Pods have none.
    """
    if job.get("in_pod"):
        yield
        return
    sampler = ["env", f"{RUN_VARIABLE}={job['id']}", *SAMPLER, job["directory"], f"{time.time():.3f}"]
    quiet = subprocess.DEVNULL
    with contextlib.ExitStack() as until_then:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            starter = subprocess.Popen(
                ["bash", "-c", START_SAMPLERS, shlex.join(sampler), *job["nodes"]],
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                env={**os.environ, "HOME": str(HOME), RUN_VARIABLE: job["id"]},
                start_new_session=True,
                # As for the run's command.
                preexec_fn=functools.partial(be_user, "/"),  # noqa: PLW1509
            )
            until_then.enter_context(starter)
        yield


def record(output: IO[bytes], lines: bytes) -> None:
    """Keep whole lines, each with its time."""
    when = b"%.3f " % time.time()
    output.write(when + lines[:-1].replace(b"\n", b"\n" + when) + b"\n")


def read(source: IO[bytes], keep: Callable[[bytes], object], seen: Seen) -> None:
    """Keep each line as it comes; a last one that has no end gets one."""
    begun = b""
    while text := os.read(source.fileno(), 1 << 16):
        end = text.rfind(b"\n") + 1
        lines, begun = (begun + text[:end], text[end:]) if end else (b"", begun + text)
        if len(begun) > LONGEST_LINE:
            lines, begun = lines + begun + b"\n", b""
        if lines:
            keep(lines)
            seen.hear(lines)
    if begun:
        keep(begun + b"\n")
        seen.hear(begun)


def finish(folder: Path, ended: dict[str, object]) -> None:
    """Say how a run ended, in one step."""
    write(folder / "ended.new", json.dumps({"at": round(time.time(), 3), **ended}).encode())
    (folder / "ended.new").rename(folder / "ended.json")


def judged(job: dict[str, Any], seen: Seen, code: int, began: float, seconds: float) -> dict[str, object]:
    """Why a command that ended by itself did not end well, if its ranks or its time are the reason."""
    in_time = seen.crashed is not None and seen.crashed - began < job["limit"]
    if in_time and not job.get("elastic"):
        return {"cause": "rank-crashed", "message": seen.crash}
    if code in TIMED_OUT and seconds >= job["limit"]:
        return timed_out(job)
    return {}


def timed_out(job: dict[str, Any]) -> dict[str, object]:
    return {"cause": "timeout", "message": "timed out after {:g} s".format(job["limit"])}


def oversee(
    folder: Path,
    job: dict[str, Any],
    child: subprocess.Popen[bytes],
    reader: threading.Thread,
    seen: Seen,
    began: float,
    keep: Callable[[bytes], object],
) -> dict[str, object]:
    """Wait for the command to end; end the run for the first reason to do so, which is returned.

    ``reader`` reads its output, whose end mostly comes with its own.
    """
    over = threading.Event()
    threading.Thread(target=watch_nodes, args=(folder, job, seen, over), daemon=True).start()
    ending: dict[str, object] = {}
    end, hurry = threading.Thread(), threading.Thread(target=clean, args=(job, seen, 0, began), daemon=True)
    while child.poll() is None:
        if not ending:
            asked = asked_to_stop(folder)
            ending = asked or reason(folder, job, seen, began) or {}
            if ending:
                grace = float(ending.pop("grace", GRACE))  # type: ignore[arg-type]
                # Who asks knows why: a node is paused.
                stalled = not asked and ending["cause"] == "stalled"
                if stalled:
                    # Said before ranks are ended for it, so that who follows takes their end for no failure.
                    keep("labctl: stalled: {}\n".format(ending["message"]).encode())
                end = threading.Thread(
                    target=end_run, args=(job, seen, grace, began), kwargs={"stalled": stalled}, daemon=True
                )
                end.start()
        elif hurry.ident is None and (folder / "at-once").exists():
            hurry.start()
        if reader.is_alive():
            reader.join(LOOK)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LOOK)
    over.set()
    if ending:
        end.join()
    return ending


def asked_to_stop(folder: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads((folder / "stop.json").read_bytes()))
    except (OSError, ValueError):
        return None


def reason(folder: Path, job: dict[str, Any], seen: Seen, began: float) -> dict[str, object] | None:
    """Why a run is to be ended now; None where it may go on."""
    now = time.monotonic()
    # The command's own limit comes first.
    if now - began > job["limit"] + 1:
        return timed_out(job)
    if seen.crashed is not None and not job.get("elastic") and now - seen.crashed > CRASH_GRACE:
        return {"cause": "rank-crashed", "message": seen.crash}
    if seen.lost:
        node, why = next(iter(seen.lost.items()))
        return {"cause": "node-lost", "message": f"{node}: {why}"}
    if why := seen.steps.stalled(job.get("stall", 0)):
        return {"cause": "stalled", "message": why}
    unseen = seconds_since(folder / "watched")
    if job["patience"] and unseen is not None and unseen > job["patience"]:
        return {"cause": "interrupted", "message": "labctl was away for {:g} s".format(job["patience"])}
    return None


def watch_nodes(folder: Path, job: dict[str, Any], seen: Seen, over: threading.Event) -> None:
    """Note workers that are gone, where no labctl follows, which hears of that from Docker."""
    # A cluster's DNS forgets a pod that is only too busy to be ready; its address stays.
    addresses = {node: address_of(node) if job.get("in_pod") else node for node in job["nodes"]}
    failed: dict[str, list[str]] = {node: [] for node in job["nodes"]}
    gone: dict[str, str] = {}
    needed = set(job.get("needed", job["nodes"]))
    while not over.wait(NODE_LOOK):
        unseen = seconds_since(folder / "watched")
        if unseen is not None and unseen < NODE_LOOK:
            continue
        for node, reasons in failed.items():
            why = why_unreached(addresses[node], job["ssh_port"])
            reasons[:] = [*reasons, why] if why else []
            if len(reasons) >= UNANSWERED or (reasons[-REFUSED:].count(why) == REFUSED and why in GONE):
                gone[node] = why
        if needed & gone.keys() or len(gone) == len(failed):
            seen.lost.update(gone)
            return


def address_of(node: str) -> str:
    """Return the address of a node; its name if that is not known."""
    try:
        return str(socket.getaddrinfo(node, None)[0][4][0])
    except OSError:
        return node


GONE = ("its name is not known any more", "its sshd is gone")


def why_unreached(node: str, port: int) -> str:
    """Why a worker cannot be reached; empty where it can."""
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
    return [*AGENT, "user", directory, *command]


def be_user(directory: str) -> None:
    """Become the lab's user, who is a pod's only one, in a directory."""
    if os.getuid() == 0:
        os.setgroups([number for number in os.getgroups() if number])
        os.setgid(int(os.environ["LAB_GID"]))
        os.setuid(int(os.environ["LAB_UID"]))
    os.umask(0o022)
    os.chdir(directory)


def become_as_user(directory: str, *command: str) -> NoReturn:
    be_user(directory)
    become(command)


def end_run(job: dict[str, Any], seen: Seen, grace: float, began: float, *, stalled: bool) -> None:
    """End a run; of one that is stalled, what its processes do is kept first."""
    if stalled:
        everywhere(job, STACKS_LIMIT, *[[*AGENT, "stacks", job["id"], job["directory"]]] * 2)
    clean(job, seen, grace, began)


def clean(job: dict[str, Any], seen: Seen, grace: float, began: float, *, last: bool = False) -> None:
    """End what runs of a run, in this container and in its workers, all at once; note the nodes where that fails.

    The ``last`` time first here: what a script's own ssh sessions have started is theirs until those end. And not on
    nodes where it has failed before.
    """
    own = [*AGENT, "reap", job["id"], str(grace)]
    # The first process of a pod is its program, whose sessions would be taken for what has left the run.
    lasted = [] if job.get("in_pod") else [f"LABCTL_RUN_SECONDS={time.monotonic() - began:.3f}"]
    # In the launcher only a script that starts its ranks itself can have left something there.
    here = ["env", *(lasted if job["launcher"] == "script" else []), *own]
    there = ["env", *lasted, *own]
    if last and job["launcher"] == "script":
        seen.uncleaned.update(everywhere({**job, "nodes": []}, grace + 20, here, there))
    nodes = [node for node in job["nodes"] if not last or node not in seen.uncleaned]
    seen.uncleaned.update(everywhere({**job, "nodes": nodes}, grace + 20, here, there))


def everywhere(job: dict[str, Any], limit: float, here: list[str], there: list[str]) -> list[str]:
    """Run a command in this container and one in each of the run's workers, as the lab's user, all at once.

    Returns the nodes where it fails, or that are not reached.
    """
    from concurrent.futures import ThreadPoolExecutor

    ssh = ["ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--"]
    commands = {"launcher": here, **{node: [*ssh, node, shlex.join(there)] for node in job["nodes"]}}

    def failed(node: str) -> str:
        quiet = subprocess.DEVNULL
        words, variables = as_user("/", commands[node]), {**os.environ, "HOME": str(HOME)}
        try:
            done = subprocess.run(
                words, stdin=quiet, stdout=quiet, stderr=quiet, env=variables, timeout=limit, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return node
        return node if done.returncode else ""

    with ThreadPoolExecutor(min(len(commands), 64)) as pool:
        return [node for node in pool.map(failed, commands) if node]


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "start": start,
        "health": health,
        "reach": reach,
        "reap": reap,
        "signal": pass_on,
        "stacks": stacks,
        "launch": launch_named,
        "follow": follow,
        "stop": stop,
        "runs": list_runs,
        "forget": forget,
        "user": become_as_user,
        "pod": pod,
    }
    commands[sys.argv[1]](*sys.argv[2:])

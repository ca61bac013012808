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
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

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
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            print(json.dumps({"pid": pid, "command": command[:200]}))


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


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "start": start,
        "health": health,
        "reach": reach,
        "reap": reap,
        "signal": pass_on,
    }
    commands[sys.argv[1]](*sys.argv[2:])

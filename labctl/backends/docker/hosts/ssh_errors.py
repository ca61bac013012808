"""Errors of ssh in plain words, with the command to type next."""

from __future__ import annotations

import re
import shlex

from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.system import human

_CLOSED = r"(?i)kex_exchange_identification|Connection (closed|reset) by|banner exchange: .*(closed|reset)"
_CHANGED = "HOST IDENTIFICATION HAS CHANGED"
# Lines to keep from the beginning and from the end of an output, and characters of each.
LINES, LENGTH = 100, 500


def destination(target: InventoryHost) -> str:
    """Return the name that ssh connects to, which may be an alias of the user's ssh config."""
    return target.address or target.name


def options(target: InventoryHost) -> tuple[str, ...]:
    """Return the ssh options for user, port and key that the inventory sets for a host."""
    user = ("-l", target.user) if target.user else ()
    # With a named key, the agent's other keys must not use up sshd's limit of attempts.
    key = (*_identity(target), "-o", "IdentitiesOnly=yes") if target.key else ()
    return (*user, *_port(target), *key)


def command(target: InventoryHost, *more: str) -> str:
    """Return the command that the user types to reach the host."""
    return shlex.join(("ssh", *options(target), *more, destination(target)))


def typed(target: InventoryHost, script: str) -> str:
    """Return the ssh command that a user types to run a shell command on the host; with -t if it has sudo."""
    script, mark, comment = script.partition("  # ")
    terminal = ("-t",) if "sudo " in script else ()
    return f"{command(target, *terminal)} {shlex.quote(script)}{mark}{comment}"


def named(target: InventoryHost) -> str:
    """Return the host's name, with its address if that differs."""
    return f"{target.name} ({target.address})" if target.address not in ("", target.name) else target.name


def is_transient(stderr: str) -> bool:
    """Tell if sshd closed the connection before login, as with too many parallel logins (MaxStartups)."""
    return bool(re.search(_CLOSED, stderr)) and "Permission denied" not in stderr


def distrusted(stderr: str) -> bool:
    """Tell if ssh printed that the host key has changed, even if it connected nevertheless."""
    return _CHANGED in stderr


def error(target: InventoryHost, text: str, hint: str = "") -> HostError:
    """Return an error of this host; the default hint is the command to reach it."""
    return HostError(f"{named(target)}: {text}", hint=hint or command(target), node=target.name)


def silent(target: InventoryHost, seconds: float) -> HostError:
    """Return the HostError of a host that timed out after these seconds, with ping as the hint."""
    return error(target, f"timed out after {human.duration(seconds)}", _ping(target))


def noisy_shell(target: InventoryHost, output: str) -> HostError:
    """Return the HostError of a host whose login shell prints output, with its first line."""
    text = f"its login shell prints output for non-interactive commands: `{output.splitlines()[0][:80]}`"
    return error(
        target,
        text,
        f"on {target.name}: print that only in interactive shells: `case $- in *i*)` in its .bashrc or profile",
    )


def excerpt(text: str) -> str:
    """Return the first and last 100 lines of a text, each cut to 500 characters; ssh ends some with ``\\r\\n``."""
    lines = text.replace("\r\n", "\n").splitlines(keepends=True)
    ends = lines if len(lines) <= 2 * LINES else lines[:LINES] + lines[-LINES:]
    return "".join(line if len(line) <= LENGTH else f"{line[:LENGTH]}\n" for line in ends)


def why(target: InventoryHost, output: str) -> HostError:  # noqa: PLR0911 - a cause each
    """Return the HostError, with text and hint by cause, for the error output of ssh or of the host's shell."""
    stderr = excerpt(output)
    verbose, where = command(target, "-v"), target.where or "the inventory"
    if distrusted(stderr):
        text = "host key has changed: host was reinstalled, or the connection is intercepted"
        return error(target, text, f"if it was reinstalled: {_forget(target, stderr)}; {command(target)}")
    if re.search(r"Host key verification failed|No \S+ host key is known", stderr):
        return error(target, "host key is not known", f"{command(target)}   (once; compare the key)")
    if match := re.search(r"Could not resolve hostname (.*)", stderr):
        source = f" in {target.where}" if target.where else ""
        hint = f"write `{target.name} address=...`{source}, or a Host in ~/.ssh/config"
        return error(target, f"address not found: {match[1]}", hint)
    if match := re.search(r"(?:(\S+)@\S+: )?(?:Permission denied \((.*)\)|(Too many authentication failures))", stderr):
        return _denied(target, stderr, match[1] or target.user, match[2] or match[3])
    if match := re.search(r"(?:port (\d+): )?Connection refused", stderr):
        text = f"no sshd on {f'port {match[1]}' if match[1] else 'its port'}: connection refused"
        return error(target, text, f"start sshd there, or set `port=` in {where}; {verbose}")
    silence = r"(Connection|Operation) timed out|No route to host|Network is unreachable|port \d+ timed out"
    if match := re.search(silence, stderr):
        return error(target, f"unreachable: {match[0].strip().lower()}", _ping(target))
    if match := re.search(r"Unmatched ['\"`].*", stderr):
        text = f"its login shell is not POSIX, such as csh or tcsh: it prints `{match[0]}`"
        return error(target, text, f"{command(target, '-t')} chsh -s /bin/sh")
    if is_transient(stderr):
        text = "closed the connection before login (sshd MaxStartups reached, or this client is blocked)"
        return error(target, text, verbose)
    last = "\n".join(stderr.rstrip().splitlines()[-5:])
    return error(target, f"cannot be reached over ssh:\n{last}" if last else "closed the connection", verbose)


def _denied(target: InventoryHost, stderr: str, user: str, methods: str) -> HostError:
    """Return the HostError of a denied login: user, key, methods, and the command to fix it."""
    key, path, where = target.key, shlex.quote(target.key), target.where or "the inventory"
    if key and "not accessible: No such file" in stderr:
        hint = f"set another `key=` in {where}, or create it: ssh-keygen -t ed25519 -f {path}"
        return error(target, f"permission denied: key {key} does not exist", hint)
    text = f"permission denied for {user or 'this user'}{f' with the key {key}' if key else ''} ({methods})"
    if trouble := re.search(r"^(.*(?:not accessible|Load key|Permissions \S+ for).*)$", stderr, re.MULTILINE):
        text = f"{text}: {trouble[1].strip()}"
    if key and "UNPROTECTED PRIVATE KEY FILE" in stderr:
        return error(target, text, f"chmod 600 {path}")
    login = f"{user}@{destination(target)}" if user else destination(target)
    copy = shlex.join(("ssh-copy-id", *_identity(target), *_port(target), login))
    return error(target, text, f"{copy}; or, for a key with a passphrase: ssh-add {path if key else ''}".rstrip())


def _forget(target: InventoryHost, stderr: str) -> str:
    """Return the ssh-keygen command that removes the host's old key from the known_hosts file that ssh names."""
    name = re.search(r"Host key for (\S+) has changed", stderr) or re.search(r'-R "([^"]+)"', stderr)
    file = re.search(r"Offending \S+ key in (.+):\d+", stderr)
    plain = destination(target) if target.port in (0, 22) else f"[{destination(target)}]:{target.port}"
    return shlex.join(("ssh-keygen", *(("-f", file[1]) if file else ()), "-R", name[1] if name else plain))


def _ping(target: InventoryHost) -> str:
    return f"ping -c 3 {destination(target)}; {command(target, '-v')}"


def _identity(target: InventoryHost) -> tuple[str, ...]:
    return ("-i", target.key) if target.key else ()


def _port(target: InventoryHost) -> tuple[str, ...]:
    return ("-p", str(target.port)) if target.port else ()


def ssh_reason(stderr: str) -> str:
    """Return ssh's reason for a failure: a changed host key, or the last line of its output, or ``no answer``."""
    if distrusted(stderr):
        return "host key is not the pinned one (REMOTE HOST IDENTIFICATION HAS CHANGED)"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "no answer"

"""What ssh says of a host that it cannot reach, made plain, with the command to type next."""

from __future__ import annotations

import re
import shlex

from labctl.config.inventory import InventoryHost
from labctl.errors import HostError

_CLOSED = re.compile(
    r"kex_exchange_identification|Connection (closed|reset) by|banner exchange: .*(closed|reset)", re.IGNORECASE
)


def destination(target: InventoryHost) -> str:
    """What ssh is asked for: it may be an alias of the person's own config."""
    return target.address or target.name


def options(target: InventoryHost) -> tuple[str, ...]:
    """The options of ssh that the inventory asks for."""
    user = ("-l", target.user) if target.user else ()
    port = ("-p", str(target.port)) if target.port else ()
    # Where a key is named the agent's others must not use up the tries that sshd grants.
    key = ("-i", target.key, "-o", "IdentitiesOnly=yes") if target.key else ()
    return (*user, *port, *key)


def command(target: InventoryHost, *more: str) -> str:
    """The command that a person types to reach the host."""
    return shlex.join(("ssh", *options(target), *more, destination(target)))


def named(target: InventoryHost) -> str:
    """The host as people are told of it."""
    return f"{target.name} ({target.address})" if target.address not in ("", target.name) else target.name


def passing(said: str) -> bool:
    """Whether its sshd hung up before any login, as it does while too many others are at the door (MaxStartups)."""
    return bool(_CLOSED.search(said)) and "Permission denied" not in said


def distrusted(said: str) -> bool:
    """Whether the host showed another key than the one known, also where ssh went on nevertheless."""
    return "HOST IDENTIFICATION HAS CHANGED" in said


def silent(target: InventoryHost, seconds: float) -> HostError:
    """It did not answer in time."""
    return error(
        target, f"does not answer within {seconds:.0f} s", f"ping -c 3 {destination(target)}; {command(target, '-v')}"
    )


def talkative(target: InventoryHost, said: str) -> HostError:
    """Its login shell prints this whatever it is asked to run, and so into the answer to every command."""
    text = f"prints `{said.splitlines()[0][:80]}` before commands that come in by ssh"
    return error(target, text, f"on {target.name}: move that behind `case $- in *i*)` in its .bashrc, or its like")


def untried(target: InventoryHost) -> HostError:
    """Its turn did not come in time."""
    return error(target, "was not asked: hosts before it took all the time there was", command(target))


def why(target: InventoryHost, said: str) -> HostError:
    """The reason in what ssh said on its standard error."""
    if distrusted(said):
        return _changed(target, said)
    for pattern, reason in _REASONS:
        if found := re.search(pattern, said):
            return reason(target, said, found)
    last = "\n".join(said.rstrip().splitlines()[-5:])
    return error(target, f"cannot be reached over ssh:\n{last}" if last else "hung up", command(target, "-v"))


def error(target: InventoryHost, text: str, hint: str = "") -> HostError:
    """An error of this host, by the name and the address that it has; without a hint of its own, how to get there."""
    return HostError(f"{named(target)}: {text}", hint=hint or command(target), node=target.name)


def _changed(target: InventoryHost, said: str) -> HostError:
    name = re.search(r"Host key for (\S+) has changed", said) or re.search(r'-R "([^"]+)"', said)
    file = re.search(r"Offending \S+ key in (.+):\d+", said)
    plain = destination(target) if target.port in (0, 22) else f"[{destination(target)}]:{target.port}"
    forget = shlex.join(
        ("ssh-keygen", *(("-f", file[1]) if file else ()), "-R", name[1] if name else plain),
    )
    return error(
        target,
        "shows another host key than the one known for it: it was installed anew, or somebody is in between",
        f"if it was installed anew: {forget}; {command(target)}",
    )


def _unknown(target: InventoryHost, _said: str, _found: re.Match[str]) -> HostError:
    return error(target, "shows a host key that is not known here", f"{command(target)}   (once; compare the key)")


def _no_such_name(target: InventoryHost, _said: str, found: re.Match[str]) -> HostError:
    where = f" in {target.where}" if target.where else ""
    return error(
        target, f"has no address: {found[1]}", f"write `{target.name} address=...`{where}, or a Host in ~/.ssh/config"
    )


def _denied(target: InventoryHost, said: str, found: re.Match[str]) -> HostError:
    user, how = found[1] or target.user, found[2]
    key = f"the key {target.key}" if target.key else "the keys of this account and of its agent"
    text = f"does not let {user or 'this user'} in with {key} ({how})"
    trouble = re.search(r"^(.*(?:not accessible|Load key|Permissions \S+ for).*)$", said, re.MULTILINE)
    if trouble:
        text = f"{text}: {trouble[1].strip()}"
    path = shlex.quote(target.key)
    if "UNPROTECTED PRIVATE KEY FILE" in said and target.key:
        return error(target, text, f"chmod 600 {path}")
    if "not accessible: No such file" in said and target.key:
        where = target.where or "the inventory"
        return error(target, text, f"say another `key=` in {where}, or make this one: ssh-keygen -t ed25519 -f {path}")
    port = ("-p", str(target.port)) if target.port else ()
    login = f"{user}@{destination(target)}" if user else destination(target)
    copy = shlex.join(("ssh-copy-id", *(("-i", target.key) if target.key else ()), *port, login))
    add = shlex.join(("ssh-add", *((target.key,) if target.key else ())))
    return error(target, text, f"{copy}; or where the key has a passphrase: {add}")


def _strange_shell(target: InventoryHost, _said: str, found: re.Match[str]) -> HostError:
    return error(
        target,
        f"has a login shell that does not read commands as POSIX shells do, as csh and tcsh: it says `{found[0]}`",
        f"{command(target, '-t')} chsh -s /bin/sh",
    )


def _refused(target: InventoryHost, _said: str, found: re.Match[str]) -> HostError:
    port = f"port {found[1]}" if found[1] else "its port"
    return error(
        target,
        f"has no sshd on {port}: connection refused",
        f"start sshd there, or say `port=` in {target.where or 'the inventory'}; {command(target, '-v')}",
    )


def _unreachable(target: InventoryHost, _said: str, found: re.Match[str]) -> HostError:
    hint = f"ping -c 3 {destination(target)}; {command(target, '-v')}"
    return error(target, f"cannot be reached: {found[0].strip().lower()}", hint)


def _closed(target: InventoryHost, _said: str, _found: re.Match[str]) -> HostError:
    return error(
        target,
        "hangs up before any login: its sshd is overrun (MaxStartups), or does not take this machine",
        command(target, "-v"),
    )


_REASONS = (
    (r"Host key verification failed|No \S+ host key is known", _unknown),
    (r"Could not resolve hostname (.*)", _no_such_name),
    (r"(?:(\S+)@\S+: )?Permission denied \((.*)\)", _denied),
    (r"()(Too many authentication failures)", _denied),
    (r"(?:port (\d+): )?Connection refused", _refused),
    (r"(Connection|Operation) timed out|No route to host|Network is unreachable|port \d+ timed out", _unreachable),
    (r"Unmatched ['\"`].*", _strange_shell),
    (_CLOSED, _closed),
)


def ssh_reason(said: str) -> str:
    """The line of ssh's words that says why."""
    if "IDENTIFICATION HAS CHANGED" in said:
        return "its host key is not the one pinned for it (REMOTE HOST IDENTIFICATION HAS CHANGED); not trusted"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "no answer"

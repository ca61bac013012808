"""Settings of a cluster's operator besides its hosts, from the environment or the file of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl.config import dotenv, inventory
from labctl.config.context import Context
from labctl.errors import ConfigError
from labctl.system import files


class Operator(Struct, frozen=True, kw_only=True):
    """Settings of a cluster's operator besides its hosts: TEST_CONFIGURATION, SKIP_NETWORK_SETUP, L3_ENABLED."""

    test_configuration: str = ""
    skip_network_setup: bool = False
    l3_enabled: bool = False


HOSTS = ".lab/hosts.env"
"""The file of hosts that is made of the environment's words, in the lab directory."""


def with_hosts(context: Context) -> Context:
    """Write MASTER_IP and MEMBER_IPS to a file; return the context with LAB_HOSTS as it, unchanged if that is set.

    Later commands can be given the file. HostError if it cannot be written.
    """
    given = {key: context.environ[key] for key in inventory.HOST_WORDS if context.environ.get(key)}
    if not given or context.settings().text("LAB_HOSTS"):
        return context
    text = "".join(f"{key}={dotenv.quote(value)}\n" for key, value in given.items())
    files.write(context.directory / HOSTS, text, mode=0o644)
    context.notice(
        f"wrote {' and '.join(given)} of the environment to {HOSTS}; other commands need LAB_HOSTS={HOSTS} to use them"
    )
    return replace(context, environ={**context.environ, "LAB_HOSTS": HOSTS})


def drained(context: Context) -> tuple[str, ...]:
    """Return the drained hosts of LAB_HOSTS as ``host (reason)``. ConfigError if the file cannot be read."""
    name = context.settings().text("LAB_HOSTS")
    listed = inventory.read(context.directory / Path(name).expanduser(), name) if name else ()
    _, left_out = inventory.in_use(context.directory, listed)
    return tuple(f"{host} ({why})" for host, why in left_out)


def read(context: Context) -> Operator:
    """Read the operator's settings from the environment, else from the file of hosts. ConfigError for a bad flag."""
    name = context.settings().text("LAB_HOSTS")
    given = inventory.operator_words(context.directory / Path(name).expanduser(), name) if name else {}
    given |= {key: context.environ[key] for key in inventory.OPERATOR_WORDS if key in context.environ}
    return Operator(
        test_configuration=given.get("TEST_CONFIGURATION", ""),
        skip_network_setup=_flag(given, "SKIP_NETWORK_SETUP"),
        l3_enabled=_flag(given, "L3_ENABLED"),
    )


def _flag(given: Mapping[str, str], key: str) -> bool:
    """Tell if a setting is true; False if it is absent. ConfigError if it is neither true nor false."""
    word = given.get(key, "").strip().lower()
    if word not in ("", *YES, *NO):
        raise ConfigError(f"{key}={given[key]} is neither true nor false", hint=f"{key}=true or {key}=false")
    return word in YES


YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

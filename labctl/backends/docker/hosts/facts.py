"""The first script that a host runs, and the check that hosts are different machines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from labctl import accelerators
from labctl.config import inventory
from labctl.system import hostdump
from labctl.system.hostdump import HostDump


def script() -> str:
    """Return the first script that a host runs: ``facts.sh``, with the file patterns that accelerators need."""
    modules = accelerators.modules().values()
    watches = [module.watch for module in modules if module.watch]
    patterns: dict[str, list[str]] = {"nodes": [f"dev/{pattern}" for watch in watches for pattern in watch.files]}
    patterns["attributes"] = [pattern for module in modules for pattern in module.attributes]
    patterns["texts"] = [pattern for module in modules for pattern in module.texts]
    patterns["present"] = [path.lstrip("/") for module in modules for path in module.present]
    settings = "".join(f"accelerator_{name}={shlex.quote(' '.join(listed))}\n" for name, listed in patterns.items())
    return settings + hostdump.ENTRIES + Path(__file__).with_name("facts.sh").read_text(encoding="utf-8")


def require_distinct(
    targets: Iterable[inventory.InventoryHost], dumps: Mapping[str, HostDump], engines: Mapping[str, str]
) -> None:
    """Raise ConfigError if two hosts have the same engine id and boot id, so are the same machine.

    Copies of a machine may share an engine id, and hosts that are containers share a kernel: different machines never
    share both.
    """
    machines: dict[tuple[str, str], inventory.InventoryHost] = {}
    for target in (target for target in targets if target.name in engines):
        machine = engines[target.name], dumps[target.name].files.get("proc/sys/kernel/random/boot_id", "")
        if (earlier := machines.setdefault(machine, target)) is not target:
            raise inventory.same(target, earlier)

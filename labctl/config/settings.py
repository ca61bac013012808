"""Settings from flags, the process environment, ``.env`` and defaults, in order of precedence, with their origin."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address
from os.path import lexists
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from labctl.config import dotenv, mount_sources
from labctl.errors import ConfigError, nearest
from labctl.model import Mount, Pairs, Secret

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Validator = Callable[[str], None]
"""Raises ``ValueError(reason)`` or ``ValueError(reason, hint)``, neither of which contains the value."""


def in_bytes(text: str) -> int:
    """Parse a size with an optional binary unit into bytes, ``64k`` as 65536. ValueError for other text."""
    match = re.fullmatch(r"([0-9]+)([kmgt]?)i?b?", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    return int(match[1]) * _UNITS[match[2]]


def shaped(pattern: str, reason: str, hint: str = "") -> Validator:
    """Return a validator that raises ValueError(reason, hint) unless a value fully matches a pattern."""

    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(reason, hint)

    return check


def whole(low: int, high: int) -> Validator:
    """Return a validator that raises ValueError unless a value is a whole number from ``low`` to ``high``."""

    def check(value: str) -> None:
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", value) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}", f"write digits, such as {low}")

    return check


def span(word: str) -> tuple[int, int] | None:
    """Return the ends of a range such as ``0-3``, in either order; None if the word is no range."""
    match = re.fullmatch(r"(\d{1,4})-(\d{1,4})", word)
    return (int(match[1]), int(match[2])) if match else None


def devices(value: str) -> None:
    """Raise ValueError(reason, hint) unless the value lists devices and ascending ranges, separated by commas."""
    if not re.fullmatch(r"[\w:./-]+(\s*,\s*[\w:./-]+)*", value):
        raise ValueError("must be comma-separated devices", "write it like 0,1 or 0-3; labctl devices")
    for word in map(str.strip, value.split(",")):
        if (ends := span(word)) and ends[0] > ends[1]:
            raise ValueError(f"has the range {word}, which is empty", f"write it as {ends[1]}-{ends[0]}")


def size(value: str) -> None:
    """Raise ValueError(reason, hint) unless the value is a size of 6 MiB or more, and below 1 EiB."""
    # Six MiB is the least memory that the engine accepts.
    if (
        not re.fullmatch(r"[1-9][0-9]{0,17}([kmgt](i?b)?|b)?", value.lower())
        or not 6 * 2**20 <= in_bytes(value) < 2**60
    ):
        raise ValueError("must be a size of at least 6m", "write it like 512m or 8g, without a blank")


def accelerator_meant(word: str, names: tuple[str, ...]) -> str:
    """Return the accelerator whose alias a word is, else the nearest of ``names``; empty if none is close."""
    from labctl import accelerators

    called = (name for name, module in accelerators.modules().items() if word in module.aliases)
    return next(called, "") or nearest(word, names)


def accelerators_known() -> tuple[str, ...]:
    """Return the values that LAB_ACCELERATOR accepts."""
    from labctl import accelerators

    return ("auto", accelerators.CPU, *(name for name in accelerators.modules() if name != accelerators.CPU))


def accelerator(value: str) -> None:
    """Raise ValueError(reason, hint) unless the value is ``auto`` or the name of an accelerator."""
    names = accelerators_known()
    if value not in names:
        near = accelerator_meant(value.lower(), names)
        reason = f"unknown accelerator {value[:40]!r}; known are {', '.join(names)}"
        raise ValueError(reason, f"did you mean {near}?" if near else "auto takes what it finds")


def requirements(value: str) -> None:
    """Raise ValueError unless every word of the value is a requirement for pip."""
    for word in value.split():
        require_requirement(word)


def require_requirement(word: str) -> None:
    """Raise ValueError(reason, hint) unless the word is a pip requirement: a name, extras, versions."""
    if not re.fullmatch(
        r"[A-Za-z0-9][\w.-]*(\[[\w.,-]+\])?(([=<>!~]=?=?[\w.*+!-]+)(,[=<>!~]=?=?[\w.*+!-]+)*)?", word, re.ASCII
    ):
        reason = f"`{word[:60]}` is not a name with a version, such as transformers<5"
        raise ValueError(reason, "spaces between packages and none within one, such as 'transformers>=4,<5 nltk'")


def mounts_list(value: str) -> None:
    """Raise ValueError(reason, hint) unless the value lists mounts."""
    mount_sources.split(value, "/home", "/lab")


def one_of(*choices: str) -> Validator:
    """Return a validator that raises ValueError, with the nearest choice as hint, unless a value is a choice."""

    def check(value: str) -> None:
        """Raise ValueError, with the nearest choice as hint, if the value is not a choice."""
        if value not in choices:
            near = nearest(value.lower(), choices)
            raise ValueError(f"must be one of {', '.join(choices)}", f"did you mean {near}?" if near else "")

    return check


def label(value: str) -> None:
    """Raise ValueError, with the value as a name as hint, unless the value can name a lab."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", value):
        near = re.sub(r"[^a-z0-9]+", "-", value.lower())[:40].strip("-")
        raise ValueError(
            "must be at most 40 lower-case letters, digits and inner '-'", f"did you mean {near or 'lab'}?"
        )


def published_ports(value: str) -> None:
    """Raise ValueError unless the value lists ports to publish."""
    split_ports(value)


def split_ports(value: str) -> tuple[tuple[str, int, int], ...]:
    """Parse a list of ports into (address, host port, container port). ValueError if bad or a host port repeats."""
    if "," in value:
        spaced = " ".join(value[:60].replace(",", " ").split())
        raise ValueError(f"`{value[:60]}` is not a list of ports", f"separate by spaces: '{spaced}'")
    published = tuple(split_port(word) for word in value.split())
    taken = [host for _, host, _ in published]
    if twice := next((port for port in taken if taken.count(port) > 1), None):
        raise ValueError(f"publishes port {twice} of the host twice", "each port once")
    return published


def split_port(word: str) -> tuple[str, int, int]:
    """Parse a port to publish: ``8080:80`` is ``("127.0.0.1", 8080, 80)``. ValueError(reason, hint) if it is invalid.

    Other machines reach the port only if the setting names an address.
    """
    match = re.fullmatch(r"(?:([0-9.]{7,15}):)?(?:([0-9]{1,5}):)?([0-9]{1,5})", word)
    if match is None:
        raise ValueError(f"`{word[:60]}` is not a port", "write it like 6006, 8080:80 or 0.0.0.0:9000:9000")
    try:
        address = str(IPv4Address(match[1] or "127.0.0.1"))
    except ValueError:
        raise ValueError(f"{match[1]} is not an IPv4 address", "write it like 0.0.0.0:9000:9000") from None
    host, container = int(match[2] or match[3]), int(match[3])
    if not (1024 <= host <= 65535 and 1 <= container <= 65535):
        raise ValueError(f"`{word}`: ports of the host are 1024 to 65535, of the container 1 to 65535")
    return address, host, container


log_levels = ("QUIET", "FATAL", "ERROR", "INFO", "VERBOSE", "DEBUG", "DEBUG1", "DEBUG2", "DEBUG3")
log_level = shaped("|".join(log_levels), f"must be one of {', '.join(log_levels)}")
port = whole(1024, 65535)
namespace = shaped(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "must be at most 63 of a-z, 0-9 and inner '-', such as team-2"
)
object_name = shaped(
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?",
    "must be at most 253 of a-z, 0-9 and inner '-' and '.', such as registry.team",
)
# Kubernetes limits the value of a label to 63 characters.
queue_name = shaped(
    r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", "must be at most 63 of a-z, 0-9 and inner '-' and '.', such as team.gpus"
)
image = shaped(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "must be the name of an image", "write it like debian:bookworm-slim")
distribution_packages = shaped(
    r"[a-z0-9][a-z0-9.+-]*( +[a-z0-9][a-z0-9.+-]*)*", "must be names of packages, with spaces between them"
)
memlock = shaped(r"unlimited|0|[1-9][0-9]{0,17}", "must be 'unlimited' or a number of bytes")
host_path = shaped(r"/.*", "must be an absolute path", "begin it with / or ~/; `$` is not expanded")
# Narrow because launchers put it into remote shell commands without quotes.
container_path = shaped(r"(/(?!\.\.?(/|\Z))[A-Za-z0-9._+-]+)+", "must be /an/absolute/path of letters, digits, . _ + -")
url = shaped(r"(https?|file)://\S+", "must be a URL", "begin it with https://, http:// or file://")
sources = shaped(r"((https?|file):/)?/\S+(\s+((https?|file):/)?/\S+)*", "must be space-separated URLs or /paths")
proxy = shaped(r"\S+", "must be one URL without spaces", "write it like http://proxy.example:3128")
token = shaped(r"[!-~]+", "contains spaces or characters that no token has")
anything = shaped(r".*", "must be one line")

USUAL_NODES = 2
"""Nodes on one host unless it has devices for one only."""
EXTRA = "LAB_ENV_"
"""``LAB_ENV_<NAME>=value`` gives workloads ``NAME=value``."""

LOGIN = re.compile(r"://[^\s:/]*:(\S+)@")
"""User and password of a URL."""
_SENSITIVE = r"TOKEN(?![A-Z])|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|_KEY\Z"

# --- the table -----------------------------------------------------------------------------------------------


BACKENDS: dict[str, str] = {
    "docker": "labctl.backends.docker.backend",
    "kubernetes": "labctl.backends.kubernetes.backend",
}
"""The module of each backend, by its value of LAB_ENGINE."""


def engine(value: str) -> None:
    """Raise ValueError(reason, hint) unless the value is the name of a backend."""
    one_of(*BACKENDS)(value)


class Setting(NamedTuple):
    """A setting's key and default; env.example documents it."""

    key: str
    default: str
    kind: Validator
    secret: bool = False
    aliases: tuple[str, ...] = ()


SETTINGS = (
    Setting("LAB_NAME", "lab", label),
    Setting("LAB_ACCELERATOR", "auto", accelerator),
    Setting("LAB_ENGINE", "docker", engine),
    Setting("LAB_HOSTS", "", anything),
    Setting("LAB_SHARED_DIR", "", host_path),
    Setting("LAB_NODES", "", whole(1, 1000)),
    Setting("LAB_SLOTS", "", whole(1, 1024)),
    Setting("LAB_DEVICES", "", devices),
    Setting("LAB_IMAGE", "", image),
    Setting("LAB_BASE_IMAGE", "", image),
    Setting("LAB_PACKAGES", "", requirements),
    Setting("LAB_REQUIREMENTS", "", anything),
    Setting("LAB_APT", "", distribution_packages),
    Setting("LAB_DOCKERFILE", "", anything),
    Setting("LAB_IMAGE_FROM", "send", one_of("send", "pull", "build")),
    Setting("LAB_SSH_PORT", "12345", port, aliases=("DOCKER_SSH_PORT",)),
    Setting("LAB_MASTER_PORT", "29500", port, aliases=("DOCKER_MASTER_PORT",)),
    Setting("LAB_PORTS", "", published_ports),
    Setting("LAB_RUN_PATIENCE", "120", whole(10, 10**6)),
    Setting("LAB_STALL_SECONDS", "600", whole(0, 10**6)),
    Setting("LAB_PREFLIGHT", "", one_of("on", "warn", "off")),
    Setting("LAB_SSHD_LOG_LEVEL", "VERBOSE", log_level),
    Setting("LAB_SHM_SIZE", "8g", size),
    Setting("LAB_MEMORY", "", size),
    Setting("LAB_MEMLOCK", "unlimited", memlock),
    Setting("LAB_STACK", "67108864", whole(2**16, 2**40)),
    Setting("LAB_NOFILE", "1048576", whole(1024, 2**30)),
    Setting("LAB_PIDS", "8192", whole(64, 2**22)),
    Setting("HOST_CACHE_PATH", "~/.cache/labctl", host_path),
    Setting("LAB_MOUNTS", "", mounts_list),
    Setting("HOST_REPO_PATH", "", host_path),
    Setting("HOST_OPTIMUM_HABANA_PATH", "", host_path),
    Setting("PROJECT_PATH", "/workspace", container_path),
    Setting("HF_TOKEN", "", token, secret=True, aliases=("HUGGING_FACE_HUB_TOKEN",)),
    Setting("LAB_PIP_INDEX_URL", "", url),
    Setting("LAB_PIP_EXTRA_INDEX_URL", "", sources),
    Setting("LAB_PIP_FIND_LINKS", "", sources),
    Setting("LAB_CA_CERTIFICATES", "", host_path),
    Setting("LAB_APT_MIRROR", "", url),
    Setting("LAB_TORCH_INDEX", "", sources),
    Setting("HTTP_PROXY", "", proxy, aliases=("http_proxy",)),
    Setting("HTTPS_PROXY", "", proxy, aliases=("https_proxy",)),
    Setting("NO_PROXY", "", anything, aliases=("no_proxy",)),
    Setting("LAB_K8S_NAMESPACE", "", namespace),
    Setting("LAB_K8S_CONTEXT", "", anything),
    Setting("LAB_K8S_JOB", "auto", one_of("auto", "mpijob", "trainjob")),
    Setting("LAB_K8S_PATIENCE", "1800", whole(10, 10**6)),
    Setting("LAB_K8S_RESOURCE", "", shaped(r"[a-z0-9.-]{1,253}/[\w.-]{1,63}", "must be like example.com/gpu")),
    Setting("LAB_K8S_CPU", "", shaped(r"[1-9][0-9]{0,3}|[1-9][0-9]{0,6}m", "must be cores, such as 8 or 500m")),
    Setting("LAB_K8S_HUGEPAGES", "", size),
    Setting("LAB_K8S_PULL_SECRET", "", object_name),
    Setting("LAB_K8S_STORAGE_CLASS", "", object_name),
    Setting("LAB_K8S_STORAGE_SIZE", "", size),
    Setting("LAB_K8S_NODE_SELECTOR", "", anything),
    Setting("LAB_K8S_TOLERATIONS", "", anything),
    Setting("LAB_K8S_HOST_IPC", "false", one_of("true", "false")),
    Setting("LAB_K8S_HOST_NETWORK", "false", one_of("true", "false")),
    Setting("LAB_K8S_INTERFACE", "eth0", shaped(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", "must be an interface's name")),
    Setting("LAB_K8S_QUEUE", "", queue_name),
    Setting("LAB_K8S_GANG", "none", one_of("none", "coscheduling", "volcano")),
)

SYNONYMS = {
    "WORKERS": "LAB_NODES",
    "NUM_NODES": "LAB_NODES",
    "NNODES": "LAB_NODES",
    "REPLICAS": "LAB_NODES",
    "HOST": "LAB_HOSTS",
    "HOSTFILE": "LAB_HOSTS",
    "INVENTORY": "LAB_HOSTS",
    "GPU": "LAB_DEVICES",
    "GPUS": "LAB_DEVICES (which), or LAB_SLOTS (how many per node)",
    "NPROC_PER_NODE": "LAB_SLOTS",
    "RANKS": "LAB_SLOTS (per node)",
    "VOLUMES": "LAB_MOUNTS",
}
"""Words of other tools, and the setting that each means."""

_BY_NAME = {name: setting for setting in SETTINGS for name in (setting.key, *setting.aliases)}


class SettingValue(Struct, frozen=True):
    """A value, the key or alias that set it, and its origin."""

    key: str
    value: str
    origin: str

    def __repr__(self) -> str:
        """Show key and origin without the value, which may be a secret."""
        return f"SettingValue({self.key!r}, {self.origin!r})"  # its value may be a secret

    def error(self, reason: str, hint: str = "") -> ConfigError:
        """Return a ConfigError, not raised, that names key and origin but not the value."""
        where = f"--setting {self.key}" if self.origin == "flag" else f"{self.origin}: {self.key}"
        return ConfigError(f"{where}: {reason}", hint=hint)


class Settings(Struct, frozen=True, kw_only=True):
    """All settings with value and origin. KeyError on an unknown key."""

    values: Mapping[str, SettingValue]
    extra: tuple[SettingValue, ...] = ()
    """The ``LAB_ENV_`` variables, by name."""
    home: str
    directory: Path
    """Lab directory, from which relative mounts are taken."""
    warnings: tuple[str, ...] = ()

    def text(self, key: str) -> str:
        """Return a setting's value, ``~`` of a host path expanded; empty if not set. ValueError for a secret."""
        if _BY_NAME[key].secret:
            raise ValueError(f"{key} is a secret: use secret()")
        return _expanded(_BY_NAME[key], self.values[key].value, self.home)

    def number(self, key: str) -> int:
        """Return a setting as a whole number, sizes in bytes; 0 if not set, -1 for ``unlimited``."""
        text = self.text(key)
        return -1 if text == "unlimited" else in_bytes(text or "0")

    def secret(self, key: str) -> Secret | None:
        """Return a setting's value wrapped in Secret, which prints no text; None if not set."""
        value = self.values[key].value
        return Secret(value) if value else None

    def origin(self, key: str) -> str:
        """Return the origin: ``default``, ``.env:3``, ``environment``, ``flag`` or ``workload NAME``."""
        return self.values[key].origin

    def with_value(self, key: str, value: str, origin: str) -> Settings:
        """Return a copy with this value and origin of a setting."""
        return replace(self, values={**self.values, key: SettingValue(key, value, origin)})

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Return the mounts of LAB_MOUNTS."""
        return mount_sources.split(self.values["LAB_MOUNTS"].value, self.home, str(self.directory))

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return (key, value with secrets hidden, origin) of every setting and ``LAB_ENV_`` variable."""
        keyed = (*self.values.items(), *((setting.key, setting) for setting in self.extra))
        return tuple((key, _shown(setting), setting.origin) for key, setting in keyed)

    @property
    def environment(self) -> Pairs:
        """Return names and values of ``LAB_ENV_`` variables that are not secret, for workloads."""
        return tuple((_name(setting), setting.value) for setting in self.extra if not _is_secret(setting))

    @property
    def secret_environment(self) -> tuple[tuple[str, Secret], ...]:
        """Return names and values of ``LAB_ENV_`` variables that look secret, values as Secret."""
        return tuple((_name(setting), Secret(setting.value)) for setting in self.extra if _is_secret(setting))


def load(directory: Path, environ: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Load a lab's settings, checked, from flags, else environment, .env, defaults. ConfigError if invalid."""
    typed = [SettingValue(key, value, "flag") for key, value in flags.items()]
    exported = [SettingValue(key, value, "environment") for key, value in environ.items() if _is_known(key)]
    file = directory / ".env"
    entries = dotenv.read(file, shown=file.name) if lexists(file) else ()
    written = [SettingValue(entry.key, entry.value, f"{file.name}:{entry.line}") for entry in entries]
    home = environ.get("HOME") or str(Path.home())
    for setting in (*typed, *exported, *written):
        _check(setting, home)
    defaults = {setting.key: SettingValue(setting.key, setting.default, "default") for setting in SETTINGS}
    in_force = defaults | _by_key(written) | _by_key(exported) | _by_key(typed)
    _check_ports(in_force["LAB_SSH_PORT"], in_force["LAB_MASTER_PORT"])
    project, here = in_force["PROJECT_PATH"].value, not in_force["LAB_HOSTS"].value
    for key in mount_sources.EXAMPLES:
        _check_mount(in_force[key], home, directory.absolute(), project, here=here)
    extra = tuple(in_force[key] for key in sorted(in_force.keys() - defaults.keys()))
    values = {key: in_force[key] for key in defaults}
    return Settings(
        values=values, extra=extra, home=home, directory=directory.absolute(), warnings=_unknown_keys(environ)
    )


def _unknown_keys(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each ``LAB_`` variable of the environment that is not a setting."""
    unknown = sorted(key for key in environ if key.startswith("LAB_") and not _is_known(key))
    return tuple(f"environment: unknown key {key}, not read ({_hint_for_unknown(key)})" for key in unknown)


def _is_known(key: str) -> bool:
    """Tell if a key is a setting, an alias, or a ``LAB_ENV_`` variable with a name."""
    return key in _BY_NAME or (key.startswith(EXTRA) and key != EXTRA)


def _check(setting: SettingValue, home: str) -> None:
    """Raise ConfigError if a setting is unknown, or its value is not valid text or fails its validator."""
    if not _is_known(setting.key):
        where = "--setting" if setting.origin == "flag" else setting.origin
        raise ConfigError(f"{where}: unknown key {setting.key}", hint=_hint_for_unknown(setting.key))
    if "\0" in setting.value or not dotenv.is_utf8(setting.value):
        raise setting.error("not UTF-8 text without NUL")
    if setting.key.startswith(EXTRA):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", _name(setting)):
            raise setting.error(f"the part after {EXTRA} is not a variable name")
    elif re.search(r"[\x00-\x1f\x7f]", setting.value):
        raise setting.error("contains a line break, a tab or another control character")
    elif setting.value:
        declared = _BY_NAME[setting.key]
        try:
            declared.kind(_expanded(declared, setting.value, home))
        except ValueError as error:
            raise setting.error(*error.args) from None


def _hint_for_unknown(key: str) -> str:
    """Return a hint for an unknown key: the nearest setting, or that LAB_ENV_ passes it to workloads."""
    near = SYNONYMS.get(key.upper().removeprefix("LAB_")) or nearest(key.upper(), _BY_NAME, cutoff=0.7)
    otherwise = f"env.example lists every key; {EXTRA}{key}=... would hand {key} to workloads"
    return f"did you mean {near}?" if near else otherwise


def _by_key(layer: Iterable[SettingValue]) -> dict[str, SettingValue]:
    """Return non-empty settings of a source by key, aliases resolved. ConfigError if a key and its alias differ."""
    chosen: dict[str, SettingValue] = {}
    for setting in layer:
        if setting.key.startswith(EXTRA):
            chosen[setting.key] = setting
        elif setting.value:
            first = chosen.setdefault(_BY_NAME[setting.key].key, setting)
            # Environments often set proxies in both spellings, not for labctl.
            if first.value != setting.value and not (setting.origin == "environment" and setting.key.islower()):
                raise setting.error(
                    f"differs from {first.key} ({first.origin}), the same setting", "keep one of the two"
                )
    return chosen


def _check_ports(ssh: SettingValue, master: SettingValue) -> None:
    """Raise ConfigError if the ssh port and the master port are the same."""
    if ssh.value == master.value:
        blamed, other = (ssh, master) if master.origin == "default" else (master, ssh)
        raise blamed.error(f"{blamed.value} is also {other.key} ({other.origin})", "the two ports must differ")


def _check_mount(setting: SettingValue, home: str, directory: Path, project: str, *, here: bool) -> None:
    """Raise ConfigError if a mount setting names a forbidden host path or container path."""
    if setting.key == "LAB_MOUNTS":
        mounts = mount_sources.split(setting.value, home, str(directory))
        paths = [mount.source for mount in mounts]
    else:
        mounts = ()
        paths = [_expanded(_BY_NAME[setting.key], setting.value, home)]
    for path in filter(None, paths):
        if reason := mount_sources.refusal(path, home, here=here):
            hint = f"name a directory for this alone, such as {mount_sources.EXAMPLES[setting.key]}"
            raise setting.error(f"containers would write {path}, which {reason}", hint)
    for mount in mounts:
        if reason := mount_sources.target_refusal(mount.target, project):
            raise setting.error(f"{mount.target} in the containers {reason}", "mount it at /data, say")


@functools.lru_cache(maxsize=4096)
def sounds_secret(key: str) -> bool:
    """Tell if a key's value is secret: a secret setting, or a name such as `--api-key` or ``TOKEN``."""
    setting = _BY_NAME.get(key)
    name = key.removeprefix(EXTRA).replace("-", "_")
    return setting.secret if setting else bool(re.search(_SENSITIVE, name, re.IGNORECASE))


def _is_secret(setting: SettingValue) -> bool:
    """Tell if a setting's key sounds secret or its value has a login in a URL."""
    return sounds_secret(setting.key) or bool(LOGIN.search(setting.value))


def _name(setting: SettingValue) -> str:
    """Return the variable's name, without ``LAB_ENV_``."""
    return setting.key.removeprefix(EXTRA)


def _shown(setting: SettingValue) -> str:
    """Return a value for display: ``set`` or ``unset`` if secret, logins in URLs as ``[REDACTED]``."""
    if sounds_secret(setting.key):
        return "set" if setting.value else "unset"
    # Up to the last @ of a word: a password may itself contain / and @, and a proxy may have no scheme.
    return re.sub(r"((?:\w+://)?)\S+@", r"\1[REDACTED]@", setting.value)


def _expanded(setting: Setting, value: str, home: str) -> str:
    """Return a value with a leading ``~`` as the home directory if the setting is a host path."""
    return re.sub(r"\A~(?=/|\Z)", lambda _: home, value) if setting.kind is host_path else value

"""Imports an MPIJob as settings of a lab and a workload, and lists the fields that neither covers."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl import accelerators
from labctl.backends.kubernetes import manifest
from labctl.backends.kubernetes.capacity import number
from labctl.backends.kubernetes.target import quantity
from labctl.config import dotenv
from labctl.config.settings import EXTRA, LOGIN, SETTINGS, Setting, sounds_secret
from labctl.config.yaml_reader import documents
from labctl.errors import ConfigError
from labctl.model import File, Pairs
from labctl.system import files

Manifest = Mapping[str, Any]


def _by_name() -> dict[str, Setting]:
    """Return the settings by key and by alias."""
    settings: dict[str, Setting] = {}
    for setting in SETTINGS:
        settings |= dict.fromkeys((setting.key, *setting.aliases), setting)
    return settings


KNOWN = _by_name()
# Variables that every lab sets itself.
OWN = ("HF_HOME",)
# Repeats the whole job, with its tokens.
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
HUB_TOKEN = re.compile(r"\bhf_\w{8,}")
# NAME=value, --name=value or --name value; shorter values are no tokens, and references to variables hold none.
GIVEN = re.compile(
    r"""((?:--(?P<option>[A-Za-z][\w-]*)(?:=|[ \t]+)|\b(?P<name>[A-Za-z_]\w*)=)["']?)[^\s"'$;&|<>]{8,}"""
)
PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s@$]+(?=@)")


class ImportedJob(Struct, frozen=True, kw_only=True):
    """Result of importing an MPIJob: settings for .env, files of a workload, and the fields left out."""

    name: str
    settings: Pairs
    files: tuple[File, ...]
    left_out: tuple[str, ...]

    @property
    def env(self) -> str:
        """The settings as lines of .env."""
        return "".join(f"{key}={dotenv.quote(value)}\n" for key, value in self.settings)


def write(directory: Path, job: ImportedJob) -> ImportedJob:
    """Write the workload files of an imported job, not its settings; return the job. ConfigError if there."""
    folder = directory / "workloads" / job.name
    if folder.exists():
        raise ConfigError(f"{folder} already exists", hint="remove it, or rename the MPIJob")
    for file in job.files:
        files.write(directory / file.path, file.content, mode=file.mode)
    return job


def read(path: Path) -> ImportedJob:
    """Convert the only MPIJob in a YAML file; list other objects as left out. ConfigError if none or invalid."""
    with naming(path):
        contents = [document.data() for document in documents(path, str(path))]
        # Dates are text to Kubernetes.
        plain = json.loads(json.dumps(contents, default=str))
        described: list[manifest.Document] = [manifest.convert(content, manifest.Document) for content in plain]
        jobs = [content for content, document in zip(plain, described, strict=True) if document.kind == "MPIJob"]
        if len(jobs) != 1:
            kinds = ", ".join(str(document.kind) for document in described) or "nothing"
            raise ConfigError(f"it has {len(jobs)} MPIJobs, not one", hint=f"the file has {kinds}")
        version = jobs[0].get("apiVersion")
        if version != "kubeflow.org/v2beta1":
            raise ConfigError(f"its MPIJob is of {version}", hint="labctl reads kubeflow.org/v2beta1")
        manifest.check(jobs[0])
        others = tuple(_title(document) for document in described if document.kind != "MPIJob")
        return _Reading(jobs[0], others).job()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix a ConfigError of the block with the file's path, unless it has it already."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(f"{path}:"):
            raise
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error


def _title(document: manifest.Document) -> str:
    """Return kind and name of an object as text."""
    return f"{document.kind} {(document.metadata and document.metadata.name) or ''}".strip()


class _Reading:
    """A job being read: fields are removed as they are read, so that the rest was left out."""

    def __init__(self, job: dict[str, Any], others: tuple[str, ...]) -> None:
        """Start with no field read; ``others``, titles of the file's other objects, are left out."""
        self.rest = job
        self.settings: dict[str, str] = {}
        self.left_out = [f"{other}: not part of the job" for other in others]

    def job(self) -> ImportedJob:
        """Return the job as settings, workload files and left-out fields. ConfigError without a command."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", str(self.take("metadata", "name") or "imported"))
        for key in ("apiVersion", "kind", "status"):
            self.take(key)
        self.take("metadata", "annotations", LAST_APPLIED)
        self.put("LAB_K8S_NAMESPACE", self.take("metadata", "namespace"))
        self.put("LAB_K8S_QUEUE", self.take("metadata", "labels", "kueue.x-k8s.io/queue-name"))
        worker, launcher = (("spec", "mpiReplicaSpecs", role) for role in ("Worker", "Launcher"))
        self.put("LAB_NODES", self.take(*worker, "replicas"))
        self.take(*launcher, "replicas")
        slots, timeout = self.take("spec", "slotsPerWorker"), self.take("spec", "runPolicy", "activeDeadlineSeconds")
        self.resources(*worker, "template", "spec", "containers", 0, "resources")
        self.put("LAB_SLOTS", slots)
        self.put("LAB_IMAGE", self.take(*worker, "template", "spec", "containers", 0, "image"))
        image = self.take(*launcher, "template", "spec", "containers", 0, "image")
        if image and image != self.settings.setdefault("LAB_IMAGE", image):
            self.left_out.append(f"the launcher's own image, {image}: launcher and workers share one")
        self.placement(*worker, "template", "spec")
        workers, launchers = (
            self.environment(*role, "template", "spec", "containers", 0, "env") for role in (worker, launcher)
        )
        differ = (name for name in workers.keys() & launchers.keys() if workers[name] != launchers[name])
        self.left_out += [
            f"the workers' {name}={workers[name]}: launcher and workers share one value" for name in sorted(differ)
        ]
        command = self.command(*launcher, "template", "spec", "containers", 0)
        for role in (worker, launcher):
            self.take(*role, "template", "spec", "containers", 0, "name")
        self.left_out += [f"{path}: {value}" for path, value in _leaves(self.rest)]
        return ImportedJob(
            name=name,
            settings=tuple(self.settings.items()),
            files=_workload(name, command, workers | launchers, timeout),
            left_out=tuple(dict.fromkeys(self.left_out)),
        )

    def take(self, *path: str | int) -> Any:
        """Remove the value at a path and return it; None if it does not exist."""
        at: Any = self.rest
        for part in path[:-1]:
            if isinstance(at, list):
                at = dict(enumerate(at))
            at = at.get(part) if isinstance(at, dict) else None
        return at.pop(path[-1], None) if isinstance(at, dict) else None

    def put(self, key: str, value: object) -> None:
        """Set a setting to the value as text, unless it is None or empty."""
        if value not in (None, ""):
            self.settings[key] = str(value)

    def resources(self, *path: str | int) -> None:
        """Set accelerator, slots, memory, huge pages and CPU by limits, else requests; list others as left out."""
        asked = {**(self.take(*path, "requests") or {}), **(self.take(*path, "limits") or {})}
        self.settings["LAB_ACCELERATOR"] = accelerators.CPU
        for name, amount in asked.items():
            kind = next((kind for kind, module in accelerators.modules().items() if name in module.resources), "")
            if kind:
                self.settings |= {"LAB_ACCELERATOR": kind, "LAB_SLOTS": str(amount)}
                if name != accelerators.get(kind).resources[0]:
                    self.settings["LAB_K8S_RESOURCE"] = name
            elif key := {"memory": "LAB_MEMORY", "hugepages-2Mi": "LAB_K8S_HUGEPAGES"}.get(name):
                self.settings[key] = quantity(round(number(amount))).removesuffix("i").lower()
            elif name == "cpu":
                cores = number(amount)
                self.settings["LAB_K8S_CPU"] = f"{cores:g}" if cores.is_integer() else f"{cores * 1000:.0f}m"
            else:
                self.left_out.append(f"resource {name}: {amount}")

    def placement(self, *spec: str | int) -> None:
        """Set host namespaces, node selector, tolerations and pull secret from a pod's spec."""
        for key, name in (("hostIPC", "LAB_K8S_HOST_IPC"), ("hostNetwork", "LAB_K8S_HOST_NETWORK")):
            if self.take(*spec, key):
                self.settings[name] = "true"
        if selector := self.take(*spec, "nodeSelector"):
            self.settings["LAB_K8S_NODE_SELECTOR"] = " ".join(f"{key}={value}" for key, value in selector.items())
        tolerated = [toleration for toleration in self.take(*spec, "tolerations") or [] if toleration.get("key")]
        self.put("LAB_K8S_TOLERATIONS", " ".join(map(_toleration, tolerated)))
        first, *_ = self.take(*spec, "imagePullSecrets") or [{}]
        self.put("LAB_K8S_PULL_SECRET", first.get("name"))

    def environment(self, *path: str | int) -> dict[str, str]:
        """Return variables for the workload; set those that are settings; leave out secrets."""
        variables = {}
        for variable in self.take(*path) or []:
            name, value = str(variable.get("name")), variable.get("value")
            if value is None and name not in KNOWN:
                self.left_out.append(
                    f"{name}: its value is in another object of the cluster; set {_setting(name)}= in .env"
                )
            elif value is None or _is_secret(name, str(value)):
                self.not_copied(name)
            elif name in KNOWN:
                self.put(KNOWN[name].key, value)
            elif name not in OWN:
                variables[name] = str(value)
        return variables

    def not_copied(self, name: str) -> None:
        """List a variable as left out, with the key of .env that sets it."""
        self.left_out.append(f"{name}: not copied; set {_setting(name)}= in .env")

    def command(self, *container: str | int) -> str:
        """Return the launcher's command as a shell script without secrets. ConfigError if it has none."""
        given = [*(self.take(*container, "command") or []), *(self.take(*container, "args") or [])]
        argv = [str(word) for word in given]
        if not argv:
            raise ConfigError("the launcher has no command", hint="name it in the MPIJob: command or args")
        shell = re.compile(r"(.*/)?(ba)?sh")
        script = f"exec {shlex.join(argv)}"
        if len(argv) >= 3 and shell.fullmatch(argv[0]) and argv[1].startswith("-") and argv[1].endswith("c"):
            script, *rest = argv[2:]
            script = script if not rest else f"set -- {shlex.join(rest[1:])}\n{script}"
        script, names = _without_secrets(script)
        for name in names:
            self.not_copied(name)
        return script


def _toleration(toleration: Manifest) -> str:
    value, effect = (toleration.get(key) or "" for key in ("value", "effect"))
    return f"{toleration['key']}{value and f'={value}'}{effect and f':{effect}'}"


def _setting(name: str) -> str:
    """Return the key of .env that sets a variable for workloads."""
    return KNOWN[name].key if name in KNOWN else f"{EXTRA}{name}"


def _is_secret(name: str, value: str) -> bool:
    """Return True if the name sounds secret, or the value has a login in a URL or a hub token."""
    return sounds_secret(name) or bool(LOGIN.search(value) or HUB_TOKEN.search(value))


def _without_secrets(text: str) -> tuple[str, list[str]]:
    """Return a command with tokens and passwords replaced by variables, and the variables' names."""
    names: list[str] = []

    def put(name: str) -> str:
        """Note a variable's name; return the shell text that reads it."""
        names.append(name)
        # Workloads get the hub's token as a file.
        return '$(cat "$HF_TOKEN_PATH")' if _setting(name) == "HF_TOKEN" else f"${name}"

    def given(match: re.Match[str]) -> str:
        """Return the match with its value replaced if its name sounds secret, else unchanged."""
        name = match["name"] or match["option"].replace("-", "_").upper()
        return match[1] + put(name) if sounds_secret(name) else match[0]

    text = HUB_TOKEN.sub(lambda _: put("HF_TOKEN"), text)
    text = GIVEN.sub(given, PASSWORD.sub(lambda match: f"{match[1]}{put('URL_PASSWORD')}", text))
    return text, names


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each value in nested mappings and lists, secrets masked, empty values left out."""
    if isinstance(value, dict):
        hidden = "value" in value and sounds_secret(str(value.get("name")))
        for key, inner in value.items():
            place = f"{path}.{key}" if path else key
            yield from [(place, "...")] if hidden and key == "value" else _leaves(inner, place)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    elif value not in (None, "", []):
        # The arguments of a command as a whole: an option's name may mark the next one as a token.
        yield path, _without_secrets(shlex.join(map(str, value)) if isinstance(value, list) else str(value))[0]


def _workload(name: str, command: str, environment: Mapping[str, str], timeout: object) -> tuple[File, ...]:
    """Return workload.yml and start.sh of a workload that runs the job's command as launcher ``script``."""
    import yaml

    declared: dict[str, Any] = {
        "description": f"the launcher's command of MPIJob {name}",
        "launcher": "script",
        "script": "start.sh",
        "timeout": f"{timeout or 86_400}s",
    }
    if environment:
        declared["environment"] = dict(environment)
    head = "#!/bin/bash\n# The command of the MPIJob's launcher. $LABCTL_HOSTFILE names the nodes.\n"
    # The operator sets this name.
    head += "export OMPI_MCA_orte_default_hostfile=${OMPI_MCA_orte_default_hostfile:-$LABCTL_HOSTFILE}\n"
    folder = f"workloads/{name}"
    return (
        File(path=f"{folder}/workload.yml", content=yaml.safe_dump(declared, sort_keys=False, width=1000), mode=0o644),
        File(path=f"{folder}/start.sh", content=f"{head}{command.rstrip()}\n", mode=0o755),
    )

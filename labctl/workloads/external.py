"""Scripts of the user's own clones, run unchanged: ``dschat/run_opt-13b``, ``gaudi/language-modeling/run_lora_clm``.

Only this module knows the layout of the clones. The runs of their scripts and the criteria are declared like any
workload's, in ``workloads/dschat`` and ``workloads/gaudi``; there the first argument names the clone's script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, nearest
from labctl.model import Cache, Workload
from labctl.system import procfs
from labctl.workloads import loader


class ExternalRepo(Struct, frozen=True, kw_only=True):
    """A repository with scripts that labctl runs, by the first part of their names: ``dschat``."""

    family: str
    setting: str
    """Setting with its path on the host."""
    repository: str
    """Folder of the repository below PROJECT_PATH."""
    scripts: str
    kinds: tuple[tuple[str, str], ...]
    """Pairs of a glob of files below ``scripts`` and a pattern of the text of runnable scripts."""
    takes: str
    """Description of ``kinds`` for messages."""


_STEP = r"(?ms)^OUTPUT=\$\d$.*\bmain\.py\b"
DSCHAT = ExternalRepo(
    family="dschat",
    setting="HOST_REPO_PATH",
    repository="DeepSpeedExamples",
    scripts="applications/DeepSpeed-Chat/training",
    # Lambda's scripts start beside the steps' folders, Microsoft's in the folder of their step.
    kinds=(
        ("*.sh", r"(?s)\$\{?2\b.*\bmain\.py\b"),
        ("step*/training_scripts/*/*.sh", _STEP),
        ("step*/training_scripts/*/*/*.sh", _STEP),
    ),
    takes="take JOB, HOSTFILE and OUTPUT, or OUTPUT alone, and start a main.py",
)
GAUDI = ExternalRepo(
    family="gaudi",
    setting="HOST_OPTIMUM_HABANA_PATH",
    repository="optimum-habana",
    scripts="examples",
    kinds=(("*/**/*.py", "__main__"),),
    takes="lie in a folder of it and can be started",
)
CLONES = (DSCHAT, GAUDI)
FAMILIES = {clone.family: clone for clone in CLONES}

# Script that rehearses a Gaudi workload, in the folder of its declaration.
CHECK = "check.py"
# Environment variable of a workload: the version of optimum-habana that its arguments were written for.
WRITTEN_FOR = "LABCTL_WRITTEN_FOR"

# A name becomes part of a run's id, and of paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def roots(settings: Settings) -> dict[str, Path]:
    """Return the paths of the configured clones on this host, by family."""
    paths = {clone.family: settings.text(clone.setting) for clone in CLONES}
    return {family: Path(path) for family, path in paths.items() if path}


def load(
    directory: Path, name: str, launchers: tuple[str, ...], clones: Mapping[str, Path], *, rehearse: bool = False
) -> Workload:
    """Load a workload, or its rehearsal, by name from the workload files or a clone. ConfigError if there is none.

    It is raised as by ``loader.load``, and if the clone or the script in it is missing.
    """
    family, _, script = name.partition("/")
    if family == DSCHAT.family and rehearse:
        raise ConfigError(
            f"{name} cannot be rehearsed: its model and its steps are written in the script, which is run as it is",
            hint="`labctl run opt-13b --rehearse` rehearses the same training with labctl's own script",
        )
    declared = loader.load(directory, family if family in FAMILIES else name, launchers, rehearse=rehearse)
    clone = FAMILIES.get(declared.directory.name)
    if clone is None:
        return declared
    arguments = (*filter(None, [script]), *declared.arguments)
    path = locate(clone, arguments[0] if arguments else "", clones.get(clone.family))
    if script:
        declared = replace(declared, name=name, description=str(path))
    if clone is DSCHAT:
        relative = path.relative_to(clones[clone.family] / clone.scripts)
        # Not every step of Microsoft's prints a throughput.
        criteria = declared.criteria if relative.parent == Path() else ()
        return replace(declared, arguments=(str(relative),), criteria=criteria, cache=named_on_hub(procfs.read(path)))
    if rehearse:
        # check.py takes a path relative to PROJECT_PATH.
        checked = f"{clone.repository}/{clone.scripts}/{arguments[0]}.py"
        return replace(declared, arguments=(checked, *arguments[1:]), inputs=())
    return replace(declared, script=str(path), arguments=arguments[1:])


def words(of: Workload, key: str, value: str | None) -> tuple[str, ...]:
    """Return the script's arguments for ``--set key=value``, or a bare ``--set key``; ConfigError for DeepSpeed-Chat.

    For a Gaudi workload the value is split as a shell does: empty is a bare flag, several words are a list.
    """
    require_arguments(of, "--set")
    if value is None:
        return (f"--{key}",)
    if of.directory.name != GAUDI.family:
        return (f"--{key}", value)
    try:
        return (f"--{key}", *shlex.split(value))
    except ValueError as error:
        raise ConfigError(f"--set {key}={value}: {error}", hint="close the quote") from None


def require_arguments(of: Workload, option: str) -> None:
    """Raise ConfigError if a DeepSpeed-Chat script, which has its arguments written in it, gets more by this option."""
    if of.directory.name == DSCHAT.family and not (is_step(of) and option == "arguments"):
        raise ConfigError(
            f"{of.name} takes no {option}: its arguments are written in the script, which is run as it is",
            hint="what it reads from the environment can be set: LAB_ENV_<NAME>=value in .env, then `labctl up`",
        )


def is_step(of: Workload) -> bool:
    """Return True if the workload is a DeepSpeed-Chat script in a step's folder."""
    return of.directory.name == DSCHAT.family and "/" in "".join(of.arguments[:1])


def script_of(of: Workload) -> Path | None:
    """Return the DeepSpeed-Chat script on this host that a workload runs; None for other workloads."""
    return Path(of.description) if of.directory.name == DSCHAT.family else None


def at(of: Workload, job: str, directory: str) -> Workload:
    """Return the workload as a run starts it; DeepSpeed-Chat scripts get job, hostfile and folder as arguments."""
    if of.directory.name != DSCHAT.family:
        return of
    script, *more = of.arguments
    return replace(of, arguments=(script, job, f"{directory}/hostfile", directory, *more))


class WorkloadInfo(Struct, frozen=True, kw_only=True):
    """A row of the list of workloads; ``source`` is the ``file:line`` of its declaration."""

    name: str
    launcher: str
    description: str
    source: str


class WorkloadList(Struct, frozen=True):
    """The workloads of a lab, and the errors of unreadable ones."""

    workloads: tuple[WorkloadInfo, ...]
    errors: tuple[ConfigError, ...]


def list_all(directory: Path, launchers: tuple[str, ...], clones: Mapping[str, Path]) -> WorkloadList:
    """List every readable workload, each family followed by its clone's scripts, and the errors of the rest."""
    declared, errors = loader.list_all(directory, launchers)
    listed: list[WorkloadInfo] = []
    for workload in declared:
        info = WorkloadInfo(
            name=workload.name,
            launcher=workload.launcher,
            description=workload.description,
            source=workload.declared,
        )
        listed.append(info)
        clone, root = FAMILIES.get(info.name), clones.get(info.name)
        if clone and root:
            paths = scripts(clone, root).items()
            listed += [replace(info, name=f"{info.name}/{name}", description=str(path)) for name, path in paths]
    return WorkloadList(tuple(listed), errors)


def remarks(of: Workload, clones: Mapping[str, Path]) -> tuple[str, ...]:
    """Return a warning if optimum-habana's version is another, or if the clone has a .deepspeed_env; else ()."""
    root = clones.get(of.directory.name)
    if root is None:
        return ()
    if of.directory.name == GAUDI.family:
        expected, actual = dict(of.environment).get(WRITTEN_FOR, ""), version(root)
        differs = f"{of.name} was written for optimum-habana {expected}; {root} is {actual or 'of no known version'}"
        return () if actual == expected else (f"{differs} (git checkout v{expected})",)
    environment = root / DSCHAT.scripts / ".deepspeed_env"
    if not environment.exists():
        return ()
    return (
        f"{environment} is for its authors' machines and is not read: LAB_ENV_<NAME>=value in .env sets a variable",
    )


def require_device(of: Workload, accelerator: str, clones: Mapping[str, Path]) -> None:
    """Raise HostError if the workload needs Gaudis, CUDA or any device, and the accelerator is another."""
    if of.directory.name == GAUDI.family and of.script != CHECK and accelerator != "habana":
        raise HostError(
            f"{of.name} needs Gaudis: it imports Habana's own software, and this lab's accelerator is {accelerator}",
            hint=f"labctl run {of.name} --rehearse checks what can be checked without one",
        )
    if of.directory.name == DSCHAT.family and accelerator != "nvidia" and calls_cuda(clones[DSCHAT.family]):
        raise HostError(
            f"{of.name} needs CUDA: its main.py calls torch.cuda.set_device, and the accelerator is {accelerator}",
            hint="labctl's own opt-13b and others train the same on any device: docs/coming-from.md has their names",
        )
    if is_step(of) and accelerator == "cpu":
        raise HostError(
            f"{of.name} trains in fp16, which DeepSpeed does not on CPUs, and this lab has no devices",
            hint="its main.py takes --dtype bf16: docs/bring-your-own.md has the command",
        )


# --- in a clone ----------------------------------------------------------------------------------------------


def locate(clone: ExternalRepo, script: str, root: Path | None) -> Path:
    """Return the script's path in the clone on the host. ConfigError without either; it names the nearest script."""
    label = f"`{clone.family}/{script or 'SCRIPT'}`"
    if root is None:
        raise ConfigError(
            f"{label} is a script of your clone of {clone.repository}, and {clone.setting} is not set",
            hint=f"set {clone.setting} in .env to the clone's folder, then `labctl up`",
        )
    folder = root / clone.scripts
    if not folder.is_dir():
        raise ConfigError(
            f"{clone.setting}: {root} is not a clone of {clone.repository}: it has no {clone.scripts}",
            hint=f"set {clone.setting} to the clone's top folder",
        )
    paths = scripts(clone, root)
    if script in paths:
        return paths[script]
    if not script:
        raise ConfigError(f"{label}: name a script of {folder}", hint="`labctl workloads` lists them")
    near = nearest(script, paths, cutoff=0)
    raise ConfigError(
        f"{folder}: no script {label}; {clone.family} runs those that {clone.takes}",
        hint=f"the nearest is {clone.family}/{near}; `labctl workloads` lists them" if near else "",
    )


def scripts(clone: ExternalRepo, root: Path) -> dict[str, Path]:
    """Return the clone's scripts by name: their path below ``scripts`` without suffix and ``training_scripts/``.

    Scripts with invalid names, and links that lead out of the clone, are skipped.
    """
    folder = root / clone.scripts
    marked = ((path, mark) for pattern, mark in clone.kinds for path in folder.glob(pattern))
    runnable = [path for path, mark in marked if _is_runnable(path, mark, root)]
    paths = {_script_name(path, folder): path for path in runnable}
    return {name: paths[name] for name in sorted(paths) if _NAME.fullmatch(name)}


def _is_runnable(path: Path, mark: str, root: Path) -> bool:
    """Tell if a path is a file inside the clone whose text matches the pattern of runnable scripts."""
    is_inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
    return is_inside and bool(re.search(mark, procfs.read(path)))


def _script_name(path: Path, folder: Path) -> str:
    """Return a script's path below the folder, without its suffix and ``training_scripts/``."""
    return path.relative_to(folder).as_posix().removesuffix(path.suffix).replace("training_scripts/", "")


def calls_cuda(root: Path) -> bool:
    """Return True if a step's main.py in a DeepSpeed-Chat clone calls torch.cuda.set_device."""
    steps = (root / DSCHAT.scripts).glob("step*/main.py")
    return any(re.search(r"(?m)^[^#\n]*torch\.cuda\.set_device\(", procfs.read(step)) for step in steps)


def named_on_hub(text: str) -> Cache:
    """Return the models and data sets that a DeepSpeed-Chat script names; names in variables are not seen.

    ``setup_env.sh opt-13b 3`` means facebook/opt-13b.
    """
    code = re.sub(r"(?m)^\s*#.*|\\$", "", text)
    models = [f"facebook/{name}" for name in re.findall(r"setup_env\.sh\s+(opt-[\w.-]+)", code)]
    models += re.findall(rf"model_name_or_path[ =]+({_REPOSITORY})(?=\s|$)", code)
    models += [f"{owner}/{name}" for owner, name in re.findall(r"models--([\w.-]+?)--([\w.-]+)", code)]
    data_paths = " ".join(re.findall(r"--data_path\s+((?:(?!--)\S+\s+)*)", code)).split()
    datasets = [word for word in data_paths if re.fullmatch(_REPOSITORY, word)]
    # DeepSpeed-Chat calls the user's own data `local/...`; models that an earlier step trained are in its output.
    local = {"local", "output", *re.findall(r"(?:\bOUTPUT=|--output_dir[ =]+)(?:\./)?([\w-]+)", code)}
    return Cache(models=_remote(models, local), datasets=_remote(datasets, local))


def _remote(names: Iterable[str], local: Collection[str]) -> tuple[str, ...]:
    """Return the distinct names in order, without names of local owners."""
    return tuple(dict.fromkeys(name for name in names if name.partition("/")[0] not in local))


def version(root: Path) -> str:
    """Return the version of a clone of optimum-habana; empty if it does not state one."""
    match = re.search(r"__version__ = \"([^\"]+)\"", procfs.read(root / "optimum/habana/version.py"))
    return match[1] if match else ""

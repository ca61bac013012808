"""Scripts of a person's own clones, run as they are: ``dschat/run_opt-13b``, ``gaudi/language-modeling/run_lora_clm``.

This is the one place that knows how the clones are laid out. How their scripts are run and judged is declared like
any workload's, in ``workloads/dschat`` and ``workloads/gaudi``; there the first argument names the clone's script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, nearest
from labctl.model import Cache, Workload
from labctl.system import procfs
from labctl.workloads import loader


class ExternalRepo(Struct, frozen=True, kw_only=True):
    """A repository whose scripts labctl runs, by the first part of their names: ``dschat``."""

    family: str
    setting: str
    """The setting that says where on the host it is."""
    repository: str
    """Its folder below PROJECT_PATH."""
    scripts: str
    kinds: tuple[tuple[str, str], ...]
    """Which files below ``scripts`` may be scripts, and what the text of one holds that is meant to be run so."""
    takes: str
    """The same, in words."""


_STEP = r"(?ms)^OUTPUT=\$\d$.*\bmain\.py\b"
DSCHAT = ExternalRepo(
    family="dschat",
    setting="HOST_REPO_PATH",
    repository="DeepSpeedExamples",
    scripts="applications/DeepSpeed-Chat/training",
    # Lambda's, which are begun beside the steps' folders, and Microsoft's own, in the folder of their step.
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

# What rehearses a Gaudi workload, beside its declaration.
CHECK = "check.py"
# The environment variable of a workload that says which optimum-habana its arguments were written for.
WRITTEN_FOR = "LABCTL_WRITTEN_FOR"

# A name becomes part of a run's id, and of paths.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def roots(found: Settings) -> dict[str, Path]:
    """Where on this host the clones are, by family."""
    paths = {clone.family: found.text(clone.setting) for clone in CLONES}
    return {family: Path(path) for family, path in paths.items() if path}


def load(
    directory: Path, name: str, launchers: tuple[str, ...], clones: Mapping[str, Path], *, rehearse: bool = False
) -> Workload:
    """The workload of that name, from the folder of workloads or from a clone.

    Raises ConfigError as ``workload.load`` does, and where the clone or the script in it is not there.
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
    given = (*filter(None, [script]), *declared.arguments)
    path = locate(clone, given[0] if given else "", clones.get(clone.family))
    if script:
        declared = replace(declared, name=name, description=str(path))
    if clone is DSCHAT:
        named = path.relative_to(clones[clone.family] / clone.scripts)
        # Not every step of Microsoft's prints a throughput.
        criteria = declared.criteria if named.parent == Path() else ()
        return replace(declared, arguments=(str(named),), criteria=criteria, cache=named_on_hub(procfs.read(path)))
    if rehearse:
        # As check.py finds it below PROJECT_PATH.
        arguments = (f"{clone.repository}/{clone.scripts}/{given[0]}.py", *given[1:])
        return replace(declared, arguments=arguments, inputs=())
    return replace(declared, script=str(path), arguments=given[1:])


def words(of: Workload, key: str, value: str | None) -> tuple[str, ...]:
    """What a script gets of ``--set key=value``, or of a bare ``--set key``; ConfigError where it takes nothing.

    For a Gaudi workload a value is read as a shell does: none is a bare flag, two are a list.
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
    """ConfigError where a script takes no arguments of a person's, as by this option."""
    if of.directory.name == DSCHAT.family and not (is_step(of) and option == "arguments"):
        raise ConfigError(
            f"{of.name} takes no {option}: its arguments are written in the script, which is run as it is",
            hint="what it reads from the environment can be set: LAB_ENV_<NAME>=value in .env, then `labctl up`",
        )


def is_step(of: Workload) -> bool:
    """Whether it is one of Microsoft's scripts, which are in the folder of a step."""
    return of.directory.name == DSCHAT.family and "/" in "".join(of.arguments[:1])


def script_of(of: Workload) -> Path | None:
    """The DeepSpeed-Chat script on this host that a workload runs; None for another workload."""
    return Path(of.description) if of.directory.name == DSCHAT.family else None


def at(of: Workload, job: str, directory: str) -> Workload:
    """The workload as one run starts it: DeepSpeed-Chat's scripts get the job's name, the hostfile and a folder."""
    if of.directory.name != DSCHAT.family:
        return of
    script, *more = of.arguments
    return replace(of, arguments=(script, job, f"{directory}/hostfile", directory, *more))


class WorkloadInfo(Struct, frozen=True, kw_only=True):
    """A workload in a list; ``source`` is the ``file:line`` of its declaration."""

    name: str
    launcher: str
    description: str
    source: str


class WorkloadList(Struct, frozen=True):
    """The workloads of a lab, and the errors of those that cannot be read."""

    workloads: tuple[WorkloadInfo, ...]
    errors: tuple[ConfigError, ...]


def list_all(directory: Path, launchers: tuple[str, ...], clones: Mapping[str, Path]) -> WorkloadList:
    """Every workload that can be read, each family followed by the scripts of its clone, and the errors of the rest."""
    declared, errors = loader.list_all(directory, launchers)
    listed: list[WorkloadInfo] = []
    for one in declared:
        info = WorkloadInfo(name=one.name, launcher=one.launcher, description=one.description, source=one.declared)
        listed.append(info)
        clone, root = FAMILIES.get(one.name), clones.get(one.name)
        if clone and root:
            found = scripts(clone, root).items()
            listed += [replace(info, name=f"{one.name}/{name}", description=str(path)) for name, path in found]
    return WorkloadList(tuple(listed), errors)


def remarks(of: Workload, clones: Mapping[str, Path]) -> tuple[str, ...]:
    """What a person should know of the clone before this workload runs from it."""
    root = clones.get(of.directory.name)
    if root is None:
        return ()
    if of.directory.name == GAUDI.family:
        wanted, found = dict(of.environment).get(WRITTEN_FOR, ""), version(root)
        differs = f"{of.name} was written for optimum-habana {wanted}; {root} is {found or 'of no known version'}"
        return () if found == wanted else (f"{differs} (git checkout v{wanted})",)
    own = root / DSCHAT.scripts / ".deepspeed_env"
    if not own.exists():
        return ()
    return (f"{own} is for its authors' machines and is not read: LAB_ENV_<NAME>=value in .env sets a variable",)


def require_device(of: Workload, accelerator: str, clones: Mapping[str, Path]) -> None:
    """HostError where a workload needs devices that the lab does not have."""
    if of.directory.name == GAUDI.family and of.script != CHECK and accelerator != "habana":
        raise HostError(
            f"{of.name} needs Gaudis: it imports Habana's own software, and this lab's accelerator is {accelerator}",
            hint=f"labctl run {of.name} --rehearse checks what can be checked without one",
        )
    if of.directory.name == DSCHAT.family and accelerator != "nvidia" and calls_cuda(clones[DSCHAT.family]):
        raise HostError(
            f"{of.name} needs CUDA: its main.py calls torch.cuda.set_device, and the accelerator is {accelerator}",
            hint="labctl's own opt-13b and others train the same on any device: docs/workloads.md has their names",
        )
    if is_step(of) and accelerator == "cpu":
        raise HostError(
            f"{of.name} trains in fp16, which DeepSpeed does not on CPUs, and this lab has no devices",
            hint="its main.py takes --dtype bf16: docs/bring-your-own.md has the command",
        )


# --- in a clone ----------------------------------------------------------------------------------------------


def locate(clone: ExternalRepo, script: str, root: Path | None) -> Path:
    """The script in the clone on the host. ConfigError where it is not there, with what is."""
    what = f"`{clone.family}/{script or 'SCRIPT'}`"
    if root is None:
        raise ConfigError(
            f"{what} is a script of your clone of {clone.repository}, and {clone.setting} does not say where that is",
            hint=f"set {clone.setting} in .env to the clone's folder, then `labctl up`",
        )
    folder = root / clone.scripts
    if not folder.is_dir():
        raise ConfigError(
            f"{clone.setting}: {root} is no clone of {clone.repository}: it has no {clone.scripts}",
            hint=f"set {clone.setting} to the clone's top folder",
        )
    known = scripts(clone, root)
    if script in known:
        return known[script]
    if not script:
        raise ConfigError(f"{what}: say which script of {folder}", hint="`labctl workloads` lists them")
    near = nearest(script, known, cutoff=0)
    raise ConfigError(
        f"{folder}: no script {what}; {clone.family} runs those that {clone.takes}",
        hint=f"the nearest is {clone.family}/{near}; `labctl workloads` lists them" if near else "",
    )


def scripts(clone: ExternalRepo, root: Path) -> dict[str, Path]:
    """The clone's scripts by name: their path below ``scripts`` without suffix, and without ``training_scripts/``.

    Those with odd names, and links that lead out of the clone, are passed over.
    """
    folder = root / clone.scripts
    found = {
        path.relative_to(folder).as_posix().removesuffix(path.suffix).replace("training_scripts/", ""): path
        for pattern, mark in clone.kinds
        for path in folder.glob(pattern)
        if path.is_file() and path.resolve().is_relative_to(root.resolve()) and re.search(mark, procfs.read(path))
    }
    return {name: found[name] for name in sorted(found) if _NAME.fullmatch(name)}


def calls_cuda(root: Path) -> bool:
    """Whether the steps of a clone of DeepSpeed-Chat ask torch for CUDA by name, as Lambda's do."""
    steps = (root / DSCHAT.scripts).glob("step*/main.py")
    return any(re.search(r"(?m)^[^#\n]*torch\.cuda\.set_device\(", procfs.read(step)) for step in steps)


def named_on_hub(text: str) -> Cache:
    """The models and data sets that a DeepSpeed-Chat script names; what it gets by a variable is not known.

    ``setup_env.sh opt-13b 3`` stands for facebook/opt-13b.
    """
    code = re.sub(r"(?m)^\s*#.*|\\$", "", text)
    models = [f"facebook/{name}" for name in re.findall(r"setup_env\.sh\s+(opt-[\w.-]+)", code)]
    models += re.findall(rf"model_name_or_path[ =]+({_REPOSITORY})(?=\s|$)", code)
    models += [f"{owner}/{name}" for owner, name in re.findall(r"models--([\w.-]+?)--([\w.-]+)", code)]
    lists = re.findall(r"--data_path\s+((?:(?!--)\S+\s+)*)", code)
    datasets = [word for words in lists for word in words.split() if re.fullmatch(_REPOSITORY, word)]
    # Data of a person's own are `local/...` to DeepSpeed-Chat, and what an earlier step trained is in its output.
    own = {"local", "output", *re.findall(r"(?:\bOUTPUT=|--output_dir[ =]+)(?:\./)?([\w-]+)", code)}
    models, datasets = ([name for name in names if name.partition("/")[0] not in own] for names in (models, datasets))
    return Cache(models=tuple(dict.fromkeys(models)), datasets=tuple(dict.fromkeys(datasets)))


def version(root: Path) -> str:
    """The version that a clone of optimum-habana says it has; empty where it says none."""
    match = re.search(r"__version__ = \"([^\"]+)\"", procfs.read(root / "optimum/habana/version.py"))
    return match[1] if match else ""

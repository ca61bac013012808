"""Scripts of a person's own clones, run as they are: ``dschat/run_opt-13b``, ``gaudi/language-modeling/run_lora_clm``.

This is the one place that knows how the clones are laid out. How their scripts are run and judged is declared like
any workload's, in ``workloads/dschat`` and ``workloads/gaudi``; there the first argument names the clone's script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from labctl import workload
from labctl.errors import ConfigError, HostError
from labctl.model import Mount, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """A repository whose scripts labctl runs, by the first part of their names: ``dschat``."""

    family: str
    setting: str
    """The setting that says where on the host it is."""
    repository: str
    """Its folder below PROJECT_PATH."""
    scripts: str
    pattern: str
    """Which files below ``scripts`` may be scripts."""
    mark: str
    """What the text of one holds that is meant to be run so."""
    takes: str
    """The same, in words."""


DSCHAT = Clone(
    family="dschat",
    setting="HOST_REPO_PATH",
    repository="DeepSpeedExamples",
    scripts="applications/DeepSpeed-Chat/training",
    pattern="*.sh",
    mark=r"(?s)\$\{?2\b.*\bmain\.py\b",
    takes="take JOB, HOSTFILE and OUTPUT and start a main.py",
)
GAUDI = Clone(
    family="gaudi",
    setting="HOST_OPTIMUM_HABANA_PATH",
    repository="optimum-habana",
    scripts="examples",
    pattern="*/**/*.py",
    mark="__main__",
    takes="lie in a folder of it and can be started",
)
CLONES = (DSCHAT, GAUDI)
FAMILIES = {clone.family: clone for clone in CLONES}

# What rehearses a Gaudi workload, beside its declaration.
CHECK = "check.py"
# The environment variable of a workload that says which optimum-habana its arguments were written for.
WRITTEN_FOR = "OPTIMUM_HABANA"


def roots(mounts: Iterable[Mount]) -> dict[str, Path]:
    """Where on the host the clones are that a lab mounts, by family."""
    return {
        clone.family: Path(mount.source)
        for mount in mounts
        for clone in CLONES
        if mount.target.endswith(f"/{clone.repository}")
    }


def load(
    directory: Path,
    name: str,
    launchers: tuple[str, ...],
    clones: Mapping[str, Path],
    *,
    rehearse: bool = False,
    arguments: tuple[str, ...] = (),
) -> Workload:
    """The workload of that name, from the folder of workloads or from a clone, with a person's own arguments added.

    Raises ConfigError as ``workload.load`` does, and where the clone or the script in it is not there.
    """
    family, _, script = name.partition("/")
    if family == DSCHAT.family:
        refuse_changes(name, rehearse=rehearse, arguments=arguments)
    declared = workload.load(directory, family if family in FAMILIES else name, launchers, rehearse=rehearse)
    clone = FAMILIES.get(declared.directory.name)
    if clone is None:
        return replace(declared, arguments=(*declared.arguments, *arguments))
    words = (*filter(None, [script]), *declared.arguments, *split(arguments))
    root = clones.get(clone.family)
    path = locate(clone, words[0] if words else "", root)
    if script:
        declared = replace(declared, name=name, describe=str(path))
    if clone is DSCHAT:
        return replace(declared, arguments=(path.name,))
    if rehearse:
        # As check.py finds it below PROJECT_PATH.
        return replace(declared, arguments=(f"{clone.repository}/{clone.scripts}/{words[0]}.py", *words[1:]))
    return replace(declared, script=str(path), arguments=words[1:])


def at(of: Workload, nodes: int, directory: str) -> Workload:
    """The workload as one run starts it: DeepSpeed-Chat's scripts are told a job's name, the hostfile and a folder."""
    if of.directory.name != DSCHAT.family:
        return of
    return replace(of, arguments=(*of.arguments, f"{nodes}xN", f"{directory}/hostfile", directory))


def list_all(
    directory: Path, launchers: tuple[str, ...], clones: Mapping[str, Path]
) -> tuple[tuple[Workload, ...], tuple[ConfigError, ...]]:
    """Every workload that can be read, each family followed by the scripts of its clone, and the errors of the rest."""
    declared, errors = workload.list_all(directory, launchers)
    found: list[Workload] = []
    for one in declared:
        found.append(one)
        clone, root = FAMILIES.get(one.name), clones.get(one.name)
        if clone and root:
            paths = {name: root / clone.scripts / name for name in scripts(clone, root)}
            found += [replace(one, name=f"{one.name}/{name}", describe=str(path)) for name, path in paths.items()]
    return tuple(found), errors


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
    return (f"{own} is for its authors' machines and is not read; LAB_ENV_DS_ENV_FILE=.deepspeed_env in .env reads it",)


def require_device(of: Workload, accelerator: str) -> None:
    """HostError where a workload needs Gaudis and the lab has none."""
    if of.directory.name == GAUDI.family and of.script != CHECK and accelerator != "habana":
        raise HostError(
            f"{of.name} needs Gaudis: it imports Habana's own software, and this lab's accelerator is {accelerator}",
            hint=f"labctl run {of.name} --rehearse checks what can be checked without one",
        )


# --- in a clone ----------------------------------------------------------------------------------------------


def locate(clone: Clone, script: str, root: Path | None) -> Path:
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
        return folder / f"{script}{Path(clone.pattern).suffix}"
    nearest = get_close_matches(script, known, n=1, cutoff=0)
    raise ConfigError(
        f"{folder}: no script {what}; {clone.family} runs those that {clone.takes}",
        hint=f"the nearest is {clone.family}/{nearest[0]}; `labctl workloads` lists them" if nearest else "",
    )


def scripts(clone: Clone, root: Path) -> tuple[str, ...]:
    """Names of the clone's scripts, without their suffix, relative to where they lie."""
    folder = root / clone.scripts
    return tuple(
        path.relative_to(folder).with_suffix("").as_posix()
        for path in sorted(folder.glob(clone.pattern))
        if path.is_file() and re.search(clone.mark, path.read_text(encoding="utf-8", errors="replace"))
    )


def version(root: Path) -> str:
    """The version that a clone of optimum-habana says it has; empty where it says none."""
    try:
        text = (root / "optimum/habana/version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"__version__ = \"([^\"]+)\"", text)
    return match[1] if match else ""


# --- what a person adds --------------------------------------------------------------------------------------


def split(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """``--key value`` pairs as words: a value is read as a shell does, so none is a bare flag and two are a list."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return tuple(word for key, value in pairs for word in (key, *words_of(key, value)))


def words_of(key: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"--set {key[2:]}={value}: {error}", hint="close the quote") from None


def refuse_changes(name: str, *, rehearse: bool, arguments: tuple[str, ...]) -> None:
    """ConfigError for what cannot be asked of a script that has its model, steps and arguments written in it."""
    if rehearse:
        raise ConfigError(
            f"{name} cannot be rehearsed: its model and its steps are written in the script, which is run as it is",
            hint="`labctl run opt-13b --rehearse` rehearses the same training with labctl's own script",
        )
    if arguments:
        raise ConfigError(
            f"{name} takes no --set: its arguments are written in the script, which is run as it is",
            hint="what it reads from the environment can be set: LAB_ENV_<NAME>=value in .env, then `labctl up`",
        )

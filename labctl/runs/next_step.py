"""Advice on what to do next after a run, by the way it ended: its cause and message."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from labctl.errors import nearest
from labctl.jobs import checkpoints
from labctl.model import COMPLETED, Project, Result
from labctl.records import store
from labctl.runs import compare

NONE: Mapping[str, str] = MappingProxyType({})
PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages of modules that have another name."""
CACHE = "below HOST_CACHE_PATH (~/.cache/labctl)"
NOT_TAKEN = r"(?:unrecognized arguments: |not used by the HfArgumentParser: ).*"
"""Pattern of what argparse and transformers say of arguments that a script does not take."""
NOT_FOUND = r"No such file or directory: '(/(?!workspace/|proc/|sys/)[^']+)"
LEFT_OUT = r"No such file or directory: '([^']+)'"
ABOVE = r"No such file or directory: '(\.\./[^']+)"
NO_MODULE = r"No module named '(\w+)"
STEPS = (
    (
        "terminate called without an active exception",
        "torch's Gloo aborts at times while Python shuts down: if the work was done, "
        "end the script with sys.stdout.flush(); os._exit(0)",
    ),
    ("ran out of memory", "LAB_MEMORY in .env is what each node may have; `labctl fit` tells what a training needs"),
    (
        r"(?i)(?:\bonly (?:available|supported|works?|implemented) (?:on|for|with)|\b(?:requires?|needs?))"
        r" (?:an? )?(?:[\w-]+ )?(?:gpu|accelerator)|gpu is (?:needed|required)",
        "`labctl devices` lists the lab's accelerators: one on CPUs alone has none, and LAB_ACCELERATOR chooses them",
    ),
    (
        r"Unable to find address for: |connectFullMesh failed .*remote=\[127\.0\.0\.1\]",
        "GLOO_SOCKET_IFNAME names an interface that does not lead to the other nodes: without "
        "LAB_ENV_GLOO_SOCKET_IFNAME labctl sets the one that does; `labctl shell worker-0 -- ls /sys/class/net` lists "
        "those of a node",
    ),
    ("Read-only file system", "write to the current directory, which is the run's own, or to $LABCTL_RUN_DIR"),
    (
        r"insufficient shared memory|/dev/shm|</torch_\d+",
        "LAB_SHM_SIZE in .env is the shared memory of each node; then `labctl up`",
    ),
    (
        r"couldn't connect to 'https?://|offline mode is enabled|LocalEntryNotFoundError|huggingface\.co",
        "the hub was not reached: where there is a network, `labctl cache --model NAME` or `--dataset NAME`, or "
        "`labctl cache WORKLOAD`, downloads below HOST_CACHE_PATH",
    ),
    (
        r"URL fetch failure on \S+/([^/\s:]+)",
        f"put {{0}} into keras/datasets/ {CACHE}, where Keras looks in the nodes; or HTTPS_PROXY in .env, "
        "then `labctl up`",
    ),
    (
        r"Resource '?(\w+)'? not found",
        f"NLTK looks in nltk_data/ {CACHE}: where there is a network, `python -m nltk.downloader -d DIRECTORY {{0}}`",
    ),
    (
        r"urlopen error|HTTPS?ConnectionPool\(|Error downloading |NameResolutionError|ClientConnectorError",
        f"a download did not reach its server: put the files {CACHE} (torch/hub/checkpoints/, keras/datasets/, "
        "nltk_data/, tensorflow_datasets/), or mount them by LAB_MOUNTS; or HTTPS_PROXY in .env, then `labctl up`",
    ),
    (
        f"{NOT_TAKEN}--deepspeed_config",
        "`deepspeed_option: deepspeed` in its workload.yml gives the configuration as --deepspeed, as Hugging Face's "
        "scripts take it; without a workload.yml: `-- --deepspeed FILE`",
    ),
    (f"{NOT_TAKEN}--local[-_]rank", "leave out --local-rank: the variable LOCAL_RANK is set for each rank"),
    (NOT_TAKEN, "the script has no such option: --set KEY=VALUE gives it --KEY VALUE, and what follows `--` unchanged"),
    ("the following arguments are required: ", "pass them to the script after `--`, or by --set KEY=VALUE"),
    (
        r"failed to run command .(\S*/\S+).: No such file",
        "the nodes have no file `{0}`, or not the program that its first line (`#!`) names",
    ),
    (
        r"failed to run command .(\S+).: No such file",
        "the image has no program `{0}`: check its name, or add its package to LAB_PACKAGES or LAB_APT in .env, "
        "then `labctl up`",
    ),
    ("EOFError: EOF when reading a line", "nobody can answer a rank: pass what it asks for as an argument, after `--`"),
)
"""Pattern of a result's message, and advice; ``{0}`` is the first group."""
USAGE = 64 << 10
"""Last bytes of a log in which a script's usage is looked for."""


def of_record(record: Path, result: Result) -> str:
    """Return what to try after the run of a record ended this way; empty without advice."""
    # Ranks choose the names in a message and in a record: a path may be too long, or a link lead to itself.
    with suppress(OSError, ValueError, RuntimeError):
        return _of_record(record, result)
    return ""


def _of_record(record: Path, result: Result) -> str:
    """Return what to try, by the parts of the record that advice needs; OSError or alike for a name that is no path."""
    if result.cause == "interrupted":
        return _going_on(record, result.run_id)
    log = store.last_lines(record / store.OUTPUT, USAGE) if "unrecognized arguments" in result.message else ()
    return next_step(result, store.workload(record).project, store.settings(record), log)


def _going_on(record: Path, run_id: str) -> str:
    """Return how to go on from the last checkpoint of a stopped run; empty if it saved none."""
    if declared := store.workload(record).resume:
        checkpoint, _ = checkpoints.last(record.parent.parent, run_id, declared)
        return f"`labctl run --resume {run_id}` goes on from {checkpoint}" if checkpoint else ""
    saved, command = checkpoints.newest(record), compare.command(record)
    if not (saved and command):
        return ""
    dashes = "" if " -- " in command else "-- "
    path = checkpoints.in_nodes(run_id, saved)
    return f"pass the checkpoint by the script's own option, as in: `{command} {dashes}--resume {path}`"


def next_step(
    result: Result, project: Project | None = None, settings: Mapping[str, str] = NONE, log: Sequence[str] = ()
) -> str:
    """Return what to try after a run ended this way, by its project, settings and last lines; empty without advice."""
    if result.outcome == COMPLETED:
        return "add a criterion for a verdict, such as --expect 'loss<2.5'"
    if result.cause == "node-lost":
        on = f"`labctl run --resume {result.run_id}` goes on from its last checkpoint, if it saved any"
        return f"`labctl up` starts the node again; then {on}"
    if result.hang and result.cause in ("timeout", "stalled"):
        return "stacks/ in its files has the stack, last collectives and connections of each process"
    if result.cause == "timeout":
        return "if it needs more time: --timeout, such as --timeout 2h"
    advice = _near_metric(result) or _near_option(result.message, log) or _by_message(result.message, project, settings)
    if not advice and result.cause == "disk-full":
        return "`labctl runs prune --keep N` removes old runs"
    return advice or _output_of_rank(result) or _more_of(result)


def _near_option(message: str, log: Sequence[str]) -> str:
    """Return a question for the option of the script's usage that is most like an unknown one; empty if none is."""
    unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)
    usage = re.search(r"(?s)\busage: (.*?): error: ", "\n".join(log))
    near = nearest(unknown[1], re.findall(r"--[\w-]+", usage[1])) if unknown and usage else ""
    return f"did you mean `{near}`?" if near else ""


def _by_message(message: str, project: Project | None, settings: Mapping[str, str]) -> str:
    """Return advice on a failure by its message; empty if there is none."""
    if advice := _left_out(message, project, settings) or _missing_device(message):
        return advice
    return _missing_module(message, project, settings) or _missing_path(message, project, settings) or _step(message)


def _near_metric(result: Result) -> str:
    """Return a question for the metric of the output that is named most like the one not found; empty if none is."""
    absent = re.match(r"Metric `([^`]+)` not found", result.message)
    near = nearest(absent[1], result.metrics) if absent else ""
    return f"did you mean the metric `{near}`?" if near else ""


def _output_of_rank(result: Result) -> str:
    """Return how to read all that the first crashed rank wrote; empty if no rank crashed."""
    rank = re.search(r"\brank (\d+) on ", result.message) if result.cause == "rank-crashed" else None
    return f"`labctl logs --run {result.run_id} --rank {rank[1]}` prints all that rank {rank[1]} wrote" if rank else ""


def _more_of(result: Result) -> str:
    """Return how to see more of a run that missed its criteria, or failed without a rank to blame; else empty."""
    if result.cause == "criteria":
        return f"`labctl report {result.run_id}` draws its metrics, machines and ranks"
    shows_why = result.cause in ("no-metric", "launcher-failed", "stalled", "no-progress")
    return f"`labctl logs --run {result.run_id}` prints its output" if shows_why else ""


def _missing_device(message: str) -> str:
    """Return advice if the message is a program's that found no device of a vendor; else empty."""
    from labctl import accelerators

    for name, module in accelerators.modules().items():
        if module.missed and re.search(module.missed, message):
            return f"the lab has no {name} device: `labctl devices` lists what it has"
    return ""


def _left_out(message: str, project: Project | None, settings: Mapping[str, str]) -> str:
    """Return advice if the message names a file of the project that git ignores, so it was not copied; else empty."""
    from labctl.system import git

    match = re.search(LEFT_OUT, message)
    if not (match and project):
        return ""
    if place := _other_place(match[1], project):
        return place
    repository = git.root(project.root)
    if not repository:
        return ""
    # Ranks name it relative to where they start, or in the run's copy.
    named = re.sub(rf"^/.*/work/{re.escape(project.root.name)}/", f"{project.root}/", match[1])
    path = Path(os.path.normpath(project.root / project.start / named))
    is_here = path.is_relative_to(project.root) and os.path.lexists(path)
    if not is_here or not git.ignores(repository, path):
        return ""
    folder = mountable(path)
    mounts = shlex.quote(f"{settings.get('LAB_MOUNTS', '')} {folder}:{folder}:ro".lstrip())
    return (
        f"{path} is not in the run, as .gitignore leaves it out: take it out there, or mount it, "
        f"LAB_MOUNTS={mounts} in .env, then `labctl up`, and name it by this path"
    )


def _other_place(name: str, project: Project) -> str:
    """Return how to name a missing file from where ranks start, if it was named from beside the project; else empty."""
    inside = name.removeprefix(f"{project.root.name}/")
    start = project.root / project.start
    if inside == name or not (project.root / inside).exists():
        return ""
    return f"ranks start in {start}: name it {os.path.relpath(project.root / inside, start)}"


def _missing_module(message: str, project: Project | None, settings: Mapping[str, str]) -> str:
    """Return advice if the message misses a Python module: where to add its package, or mounts; else empty."""
    match = re.search(NO_MODULE, message)
    if not match:
        return ""
    module = match[1]
    if module in ("torchvision", "torchaudio"):
        return f"LAB_PACKAGES={module} in .env, then `labctl up`: its build for the image's torch, by the index of that"
    package = PACKAGES.get(module, f"the package of `{module}`")
    file = settings.get("LAB_REQUIREMENTS", "")
    if not file and project and _lists(listed := project.root / "requirements.txt", PACKAGES.get(module, module)):
        return f"LAB_REQUIREMENTS={shlex.quote(str(listed))} in .env, as it lists {package}, then `labctl up`"
    add = f"add {package} to {f'{file} (LAB_REQUIREMENTS)' if file else 'LAB_PACKAGES in .env'}, then `labctl up`"
    return (
        f"{add}; if `{module}` is code of yours: check its name, or, if it lies in another folder of your clone, add "
        f"that folder to LAB_ENV_PYTHONPATH in .env as ranks see it, mounted by LAB_MOUNTS"
    )


def _lists(requirements: Path, package: str) -> bool:
    """Return True if a file of requirements can be read and has a line of this package."""
    text = requirements.read_text(errors="replace") if requirements.is_file() else ""
    return bool(re.search(rf"(?mi)^{re.escape(package)}(?![\w.-])", text))


def _missing_path(message: str, project: Project | None, settings: Mapping[str, str]) -> str:
    """Return advice if the message says a path is missing: its place in a mount, or LAB_MOUNTS with it; else empty."""
    match, above = re.search(NOT_FOUND, message), _above(message, project)
    if not (match or above):
        return ""
    path, mounted = Path(match[1]) if match else Path(above), settings.get("LAB_MOUNTS", "")
    if place := _place(path, mounted, of_ranks=bool(match)):
        return place
    mount = mountable(path)
    value = shlex.quote(f"{mounted} {mount}:{mount}:ro".lstrip())
    absent = "" if path.exists() else f" (this machine has no {path} either)"
    name = f", and name it {above}" if above else ""
    return f"ranks see what is mounted: LAB_MOUNTS={value} in .env, then `labctl up`{name}{absent}"


def _above(message: str, project: Project | None) -> str:
    """Return the path on this machine of a missing file that was named relative to the project, above it; or empty."""
    match = re.search(ABOVE, message)
    if not (match and project):
        return ""
    path = os.path.normpath(project.root / project.start / match[1])
    return "" if Path(path).is_relative_to(project.root) else path


def _place(path: Path, mounted: str, *, of_ranks: bool) -> str:
    """Return how to name a path that LAB_MOUNTS mounts, or that it is not in its mount; empty if it is in none.

    ``of_ranks``: it is a path as ranks see it, which may also be one of this machine.
    """
    from labctl.system.mounts import mounted_at

    mounts = [tuple(word.split(":")[:2]) for word in mounted.split()]
    for source, target in mounts:
        if of_ranks and path.is_relative_to(target):
            return f"{target} is {source} of this machine, which has no {path.relative_to(target)}"
    inside = mounted_at(path.resolve(), [(source, target) for source, target in mounts])
    return f"ranks see {path} at {inside}, where LAB_MOUNTS mounts it: name it so" if inside else ""


def _step(message: str) -> str:
    """Return the advice of STEPS for a message; empty if no pattern matches."""
    for pattern, step in STEPS:
        if match := re.search(pattern, message):
            return step.format(*match.groups())
    return ""


def mountable(path: Path) -> str:
    """Return a path's directory, itself if it is one, to mount it; ``DIRECTORY`` if mounting it is refused."""
    from labctl.config import mount_sources

    folder = path if path.is_dir() else path.parent
    refused = mount_sources.refusal(str(folder), str(Path.home()), here=True)
    return "DIRECTORY" if refused else str(folder)

"""Commands render, devcontainer, build, up, keys, status, down and clean."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from labctl import flows, model
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, DryRun, Json, Setting, answer_plan, answering, confirmation, context
from labctl.cli.output import Output, fitted, width_of
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.backends.status import LabStatus, NodeStatus

HEALTH = {"unhealthy": "UNHEALTHY", "starting": "just started"}
"""Text per health status of Docker: `starting` until the first health check."""
DISPENSABLE = ("SLOTS", "IMAGE", "DEVICES")
"""Columns that a narrow terminal does not show, in their order."""


def render_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    """`labctl render`: write the files of all nodes."""
    with answering(as_json=json) as output:
        files = flows.render_files(context(directory, output, setting))
        folder = Path(files.directory) / ".lab/nodes"
        output.answer(files, f"{len(files.nodes)} nodes in {folder}, {len(files.changed)} files changed")


def devcontainer_command(
    directory: Directory = HERE,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that was edited.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl devcontainer`: write devcontainer.json."""
    with answering(as_json=json) as output:
        written = flows.devcontainer(context(directory, output, setting), program_name(), force=force)
        output.answer(written, f"{written.file}: in VS Code, open {written.folder} and reopen it in its container")


def program_name() -> str:
    """Return how labctl is called: ``labctl`` if PATH leads to this program, else its path.

    That of an activated virtual environment does not count: a program started from a desktop has another PATH.
    """
    program = Path(sys.argv[0]).absolute()
    in_path = Path(shutil.which("labctl") or os.devnull)
    is_activated = sys.prefix != sys.base_prefix and in_path.parent == Path(sys.prefix, "bin")
    return "labctl" if in_path.resolve() == program.resolve() and not is_activated else str(program)


def build_command(
    directory: Directory = HERE,
    workload: Annotated[
        str,
        typer.Option(metavar="WORKLOAD", autocompletion=complete.workload, help="Build the image of this workload."),
    ] = "",
    from_: Annotated[
        str, typer.Option("--from", metavar="IMAGE", help="Build on this image instead: add what a node needs.")
    ] = "",
    update_lock: Annotated[bool, typer.Option("--update-lock", help="Update the pinned versions.")] = False,
    sbom: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the packages of the image as CycloneDX JSON.")
    ] = None,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl build`: build an image, or update its lock file."""
    with answering(as_json=json, stopped="re-run to resume") as output:
        output.begin(f"building the image of {workload or from_ or 'the lab'}")
        if sbom and update_lock:
            raise ConfigError("--update-lock builds no image for --sbom", hint="labctl build --sbom FILE")
        if from_ and (workload or update_lock):
            other = "--workload" if workload else "--update-lock"
            raise ConfigError(
                f"--from builds on an image of its own, not with {other}", hint=f"labctl build --from {from_}"
            )
        lab = context(directory, output, setting)
        document = flows.build(
            lab, workload=workload, base=from_, update_lock=update_lock, sbom=sbom and sbom.resolve()
        )
        output.answer(document, "\n".join(f"{key:<8} {value}" for key, value in document.items()))


def up_command(
    directory: Directory = HERE,
    workload: Annotated[
        str,
        typer.Option(metavar="WORKLOAD", autocompletion=complete.workload, help="Use the image of this workload."),
    ] = "",
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """`labctl up`: create and start the lab, or print the plan."""
    with answering(as_json=json, stopped="re-run `labctl up` to resume, or `labctl down` to remove the lab") as output:
        lab = context(directory, output, setting)
        output.begin("looking at hosts, devices and containers")
        if dry_run:
            answer_plan(output, flows.plan_up(lab, workload=workload))
        else:
            answer_status(output, flows.up(lab, workload=workload))


keys_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys_command.callback()
def keys() -> None:
    """Group of key commands: without a callback, Typer would make the only command the group itself."""


@keys_command.command("rotate", help="Replace the lab's ssh keys; a lab that is up gets new containers.")
def rotate_command(directory: Directory = HERE, setting: Setting = None, json: Json = False) -> None:
    """`labctl keys rotate`: replace the ssh keys; a lab that is up gets new containers."""
    with answering(as_json=json, stopped="re-run `labctl up` to resume") as output:
        output.begin("replacing the ssh keys of all nodes")
        answer_status(output, flows.rotate_keys(context(directory, output, setting)))


def status_command(
    directory: Directory = HERE,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show when each node was last fit to run.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl status`: print containers and their health; exit with an error if a host does not answer."""
    with answering(as_json=json) as output:
        answer_status(output, flows.status(context(directory, output, setting)), verbose=verbose)


def down_command(
    directory: Directory = HERE,
    images: Annotated[
        bool, typer.Option("--images", help="Also remove the lab's image from the hosts of LAB_HOSTS if it is unused.")
    ] = False,
    setting: Setting = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """`labctl down`: remove containers and network, or print the plan."""
    with answering(as_json=json, stopped="re-run to finish") as output:
        lab = context(directory, output, setting)
        output.begin("looking for runs, containers and networks of the lab")
        if dry_run:
            answer_plan(output, flows.plan_down(lab, images=images))
            return
        answer = flows.down(lab, images=images, ask=confirmation(json))
        output.answer(answer, f"lab {answer.lab} is down")


def clean_command(
    directory: Directory = HERE, setting: Setting = None, dry_run: DryRun = False, json: Json = False
) -> None:
    """`labctl clean`: remove the lab with keys and rendered files, but not its runs, or print the plan."""
    with answering(as_json=json, stopped="re-run to finish") as output:
        lab = context(directory, output, setting)
        output.begin("looking for runs, containers and networks of the lab")
        if dry_run:
            answer_plan(output, flows.plan_clean(lab))
            return
        answer = flows.clean(lab, ask=confirmation(json))
        text = f"lab {answer.lab} is down; its keys and rendered files were removed, runs/ is kept"
        output.answer(answer, f"{text}\nimages are kept: `docker image ls 'labctl/*'` lists them")


def answer_status(output: Output, status: LabStatus, *, verbose: bool = False) -> None:
    """Print a lab's status, ``verbose`` with each node's fitness; exit with an error if a host does not answer."""
    status = replace(status, hint=output.typed_here(status.hint))
    text = status_text(status, width_of(sys.stdout))
    if verbose:
        text += "".join(f"\n{node.name}: {node.fitness}" for node in status.nodes if node.fitness)
    output.answer(status, text)
    if status.unreachable:
        sys.exit(HostError.exit_code)


def status_text(status: LabStatus, width: int = 0) -> str:
    """Render a lab's state, its nodes in ``width`` columns, 0 for all, reasons, a hint, and silent hosts."""
    state = f"{status.state}, out of date: {status.out_of_date}" if status.out_of_date else status.state
    lines = [f"lab {status.lab}: {state}"]
    if status.nodes:
        lines.append(fitted(node_columns(status), width, DISPENSABLE))
    lines += [f"{node.name}: {node.reason}" for node in status.nodes if node.state != "unreachable" and node.reason]
    if status.hint:
        lines.append(f"hint: {status.hint}")
    for failure in status.unreachable:
        lines += [failure.message, f"  hint: {failure.hint}"]
    return "\n".join(lines)


def node_columns(status: LabStatus) -> dict[str, list[str]]:
    """Return the cells of a lab's nodes by the head of their column; hosts only if there are several."""
    several = any(node.host != model.HERE for node in status.nodes)
    short = {run.run_id: run.short_id for run in status.runs}
    return {
        "NODE": [node.name for node in status.nodes],
        "HOST": [node.host if several else "" for node in status.nodes],
        "STATE": [node.state for node in status.nodes],
        "HEALTH": list(map(health, status.nodes)),
        "SLOTS": [str(node.slots or "") for node in status.nodes],
        "DEVICES": [", ".join(node.devices) for node in status.nodes],
        "AGE": ["" if node.age is None else human.age(node.age) for node in status.nodes],
        "IMAGE": [shown_image(node.image) for node in status.nodes],
        "RUN": [short.get(node.run, "") for node in status.nodes],
    }


def health(node: NodeStatus) -> str:
    """Render a node's health; until its first health check, that the launcher reaches it."""
    return (
        "reachable" if node.reached and node.health == "starting" else HEALTH.get(node.health or "", node.health or "")
    )


def shown_image(image: str) -> str:
    """Return the name of an image, or its id as `docker ps` shows it."""
    return image.removeprefix("sha256:")[:12] if image.startswith("sha256:") else image

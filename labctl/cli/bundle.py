"""Commands bundle save and bundle load."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli import complete
from labctl.cli.common import HERE, Directory, Json, Setting, answering, confirmation, context
from labctl.cli.output import failure_lines
from labctl.errors import ConfigError, HostError
from labctl.system import human

if TYPE_CHECKING:
    from labctl.bundle.load import LoadedBundle
    from labctl.bundle.save import SavedBundle

bundle_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@bundle_command.command("save", help="Save the lab with its image to a file, without keys and secrets.")
def save_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; replaced if it exists.")],
    directory: Directory = HERE,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKLOAD", help="Add the image of this workload.", autocompletion=complete.workload),
    ] = None,
    with_cache: Annotated[
        bool, typer.Option("--with-cache", help="Add the models and data of HOST_CACHE_PATH.")
    ] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="Add keys, tokens and passwords.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl bundle save`: save the lab with its image to a file."""
    with answering(as_json=json, stopped="nothing was written; re-run to start over") as output:
        lab = context(directory, output, setting)
        output.begin(f"collecting files and images for {file}")
        saved = flows.save_bundle(lab, file, workloads=workload or (), cache=with_cache, secrets=with_secrets)
        output.answer(saved, saved_text(saved))


@bundle_command.command(
    "load", help="Verify and unpack a bundle, and load its images into Docker on this machine or the lab's hosts."
)
def load_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `bundle save` wrote.")],
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Lab directory; created if missing.")] = HERE,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before writing files that programs of this machine may execute."),
    ] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl bundle load`: verify and unpack a bundle, and load its images; exit with an error if a host failed."""
    with answering(as_json=json, stopped="re-run to resume") as output:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory} is a file", hint="labctl bundle load FILE DIRECTORY")
        ask = (lambda _: True) if yes else confirmation(json)
        loaded = flows.load_bundle(context(directory, output, setting, create=True), file, force=force, ask=ask)
        output.answer(loaded, loaded_text(loaded, directory))
        if loaded.failed:
            sys.exit(HostError.exit_code)


def saved_text(saved: SavedBundle) -> str:
    """Render a saved bundle in a line: file, lab, images, cache, secrets and size."""
    cache = ", its cache" if saved.cache else ""
    secrets = " and its secrets" if saved.secrets else "; no keys and secrets"
    return f"{saved.file}: lab {saved.lab} with {', '.join(saved.images)}{cache}{secrets}, {human.size(saved.bytes)}"


def written(loaded: LoadedBundle) -> Iterator[str]:
    """Yield ``FOLDER: N files`` per lab folder written, other written files by name, and the cache's count."""
    from labctl.bundle.load import LOCKS
    from labctl.bundle.save import FOLDERS

    rest = list(loaded.files)
    for folder in (*FOLDERS, LOCKS):
        files = [name for name in rest if name.startswith(f"{folder}/")]
        rest = [name for name in rest if name not in files]
        if files:
            yield f"{folder}: {human.count(len(files), 'file')}"
    yield from rest
    if loaded.cache_files:
        yield f"{loaded.cache}: {human.count(loaded.cache_files, 'file')} of the cache"


def loaded_text(loaded: LoadedBundle, directory: Path) -> str:
    """Render a loaded bundle: lab, files written, hosts that failed, and the `labctl up` command that is next."""
    lines = [f"lab {loaded.lab} is in {loaded.directory}, {len(loaded.files)} files written"]
    lines += [f"  {line}" for line in written(loaded)]
    lines += failure_lines(loaded.failed)
    cd = "" if directory == HERE else f"cd {shlex.quote(str(directory))} && "
    return "\n".join([*lines, f"next: {cd}labctl up"])

"""bundle save, bundle load."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.run import complete_workload
from labctl.errors import ConfigError, HostError
from labctl.system.progress import amount

if TYPE_CHECKING:
    from labctl.bundle.load import LoadedBundle
    from labctl.bundle.save import SavedBundle

bundle_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@bundle_command.command("save", help="Write the lab with its image into one file, without keys and secrets.")
def save_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; replaced if it exists.")],
    directory: Directory = HERE,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Add the image of this workload.", autocompletion=complete_workload),
    ] = None,
    with_cache: Annotated[bool, typer.Option("--with-cache", help="Add all of HOST_CACHE_PATH.")] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="Add keys, tokens and passwords.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="nothing was written; re-run to start over") as output:
        lab = context(directory, output, setting)
        saved = flows.save_bundle(lab, file, workloads=workload or (), cache=with_cache, secrets=with_secrets)
        output.answer(saved, saved_text(saved))


@bundle_command.command(
    "load", help="Check a bundle, unpack it, and load its images into Docker here or on the lab's hosts."
)
def load_command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Lab directory; created if missing.")] = HERE,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="re-run to resume") as output:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory} is a file", hint="labctl bundle load FILE DIRECTORY")
        loaded = flows.load_bundle(context(directory, output, setting, create=True), file, force=force)
        output.answer(loaded, loaded_text(loaded, directory))
        if loaded.failed:
            sys.exit(HostError.exit_code)


def saved_text(saved: SavedBundle) -> str:
    cache = ", its cache" if saved.cache else ""
    secrets = " and its secrets" if saved.secrets else "; no keys and secrets"
    return f"{saved.file}: lab {saved.lab} with {', '.join(saved.images)}{cache}{secrets}, {amount(saved.bytes)}"


def loaded_text(loaded: LoadedBundle, directory: Path) -> str:
    lines = [f"lab {loaded.lab} is in {loaded.directory}, {len(loaded.files)} files written"]
    for failure in loaded.failed:
        # Most messages begin with their host's name already.
        named = failure.message.startswith(failure.host)
        lines.append(failure.message if named else f"{failure.host}: {failure.message}")
        lines += [f"  {failure.hint}"] if failure.hint else []
    cd = "" if directory == HERE else f"cd {shlex.quote(str(directory))} && "
    return "\n".join([*lines, f"next: {cd}labctl up"])

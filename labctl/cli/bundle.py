"""bundle save, bundle load."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labctl import bundle
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context, pairs, show
from labctl.cli.run import complete_workload
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.system.progress import amount

bundle_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@bundle_command.command("save", help="Write the lab with its image into one file, without keys and secrets.")
def save_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where; a file of that name is replaced.")],
    directory: Directory = HERE,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also the image that it needs.", autocompletion=complete_workload),
    ] = None,
    with_cache: Annotated[bool, typer.Option("--with-cache", help="Also all of HOST_CACHE_PATH.")] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="Also keys, tokens and passwords.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="nothing was written; the same command again begins anew") as output:
        where = context(directory, output, setting)
        document = bundle.save_bundle(where, file, workloads=workload or (), cache=with_cache, secrets=with_secrets)
        show(output, document, lambda: saved_text(document))


@bundle_command.command(
    "load", help="Check a bundle, unpack it, and hand its images to this engine or the lab's hosts."
)
def load_command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where; made if it is not there.")] = HERE,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there with other content.")] = False,
    setting: Setting = None,
    json: Json = False,
) -> None:
    with answering(as_json=json, stopped="the same command again goes on") as output:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"{directory} is a file", hint="labctl bundle load FILE DIRECTORY")
        where = Context(
            directory=directory.resolve(),
            environ=os.environ,
            emit=output.event,
            flags=pairs(setting or [], "--setting"),
        )
        document = bundle.load_bundle(where, file, force=force)
        show(output, document, lambda: loaded_text(document, directory))
        if document["failed"]:
            sys.exit(HostError.exit_code)


def saved_text(document: dict[str, Any]) -> str:
    with_what = ", its cache" if document["cache"] else ""
    secrets = " and its secrets" if document["secrets"] else "; no keys and secrets"
    images = ", ".join(document["images"])
    return f"{document['file']}: lab {document['lab']} with {images}{with_what}{secrets}, {amount(document['bytes'])}"


def loaded_text(document: dict[str, Any], directory: Path) -> str:
    went = "" if directory == HERE else f"cd {shlex.quote(str(directory))} && "
    failed = [failed_text(**one) for one in document["failed"]]
    done = f"lab {document['lab']} is in {document['directory']}, {len(document['files'])} files written"
    return "\n".join([done, *failed, f"next: {went}labctl up"])


def failed_text(host: str, message: str, hint: str) -> str:
    """Most messages begin with their host's name already."""
    named = message if message.startswith(host) else f"{host}: {message}"
    return f"{named}\n  {hint}" if hint else named

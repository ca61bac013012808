"""k8s render."""

from __future__ import annotations

from typing import Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Setting, answering, context
from labctl.cli.run import Rehearse, SetArgument, complete_workload, settings_of_script

k8s_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@k8s_command.callback()
def group() -> None:
    """Without a second command Typer would take `render` for an argument."""


@k8s_command.command(
    "render", help="Print a workload as a job for Kubernetes: `labctl k8s render NAME | kubectl apply -f -`."
)
def render_command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", autocompletion=complete_workload)],
    directory: Directory = HERE,
    rehearse: Rehearse = False,
    timeout: Annotated[str | None, typer.Option(help="Time limit, such as 90s, 20m, 2h.")] = None,
    set_: SetArgument = None,
    launcher: Annotated[
        str, typer.Option(metavar="NAME[:BACKEND]", help="Use this launcher, such as mpirun or horovod:mpi.")
    ] = "",
    setting: Setting = None,
    json: Json = False,
) -> None:
    from labctl.runs.request import RunOptions
    from labctl.workloads.schema import parse_duration

    with answering(as_json=json) as output:
        options = RunOptions(
            rehearse=rehearse,
            timeout=parse_duration(timeout) if timeout else None,
            arguments=settings_of_script(set_ or []),
            launcher=launcher,
        )
        made = flows.k8s_render(context(directory, output, setting), name, options)
        output.answer(made, made.yaml.rstrip("\n"))

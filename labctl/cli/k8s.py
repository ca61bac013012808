"""Commands k8s render, export, submit, delete and import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labctl import flows
from labctl.cli.common import HERE, Directory, Json, Launcher, Setting, Timeout, Workload, answering, context
from labctl.cli.run import Rehearse, SetArgument, options_of

k8s_command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@k8s_command.command("render", help="Print a workload as Kubernetes manifests, for kubectl apply --server-side -f -.")
def render_command(
    name: Workload,
    directory: Directory = HERE,
    rehearse: Rehearse = False,
    timeout: Timeout = "",
    set_: SetArgument = None,
    launcher: Launcher = "",
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl k8s render`: print the manifests of a workload."""
    with answering(as_json=json) as output:
        options = options_of(timeout=timeout, set_=set_, rehearse=rehearse, launcher=launcher)
        made = flows.k8s_render(context(directory, output, setting), name, options)
        output.answer(made, made.yaml.rstrip("\n"))


@k8s_command.command("export", help="Write a workload as manifests for kustomize, without the Secret.")
def export_command(
    name: Workload,
    kustomize: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write.")],
    directory: Directory = HERE,
    rehearse: Rehearse = False,
    timeout: Timeout = "",
    set_: SetArgument = None,
    launcher: Launcher = "",
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl k8s export`: write the manifests of a workload for kustomize."""
    with answering(as_json=json) as output:
        lab = context(directory, output, setting)
        options = options_of(timeout=timeout, set_=set_, rehearse=rehearse, launcher=launcher)
        made = flows.k8s_export(lab, name, options, kustomize)
        for left in made.left_out:
            lab.warn(f"not written: {left}; `labctl k8s render` has it")
        apply = f"kubectl apply --server-side -k {made.directory}"
        output.answer(made, f"{len(made.files)} files in {made.directory}: {apply}")


@k8s_command.command(
    "submit", help="Create the job of a workload without following or recording it; `labctl run` does both."
)
def submit_command(
    name: Workload,
    directory: Directory = HERE,
    rehearse: Rehearse = False,
    timeout: Timeout = "",
    set_: SetArgument = None,
    launcher: Launcher = "",
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl k8s submit`: create the job of a workload without following or recording it."""
    with answering(as_json=json) as output:
        options = options_of(timeout=timeout, set_=set_, rehearse=rehearse, launcher=launcher)
        made = flows.k8s_submit(context(directory, output, setting), name, options)
        watch = f"kubectl -n {made.namespace} get pods -l labctl.run={made.name}"
        output.answer(made, "\n".join((*made.objects, f"next: {watch}, or labctl k8s delete {name}")))


@k8s_command.command("delete", help="Delete the job that `k8s submit` created.")
def delete_command(
    name: Workload,
    storage: Annotated[
        bool, typer.Option("--storage", help="Also delete the lab's PersistentVolumeClaim with all data.")
    ] = False,
    directory: Directory = HERE,
    setting: Setting = None,
    json: Json = False,
) -> None:
    """`labctl k8s delete`: delete the job that `k8s submit` created; with ``--storage`` also the lab's volume claim."""
    with answering(as_json=json) as output:
        gone = flows.k8s_delete(context(directory, output, setting), name, storage=storage)
        output.answer(gone, "\n".join(f"deleted {deleted}" for deleted in gone.objects))


@k8s_command.command("import", help="Convert an MPIJob to a workload, and print settings for .env.")
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with an MPIJob of kubeflow.org/v2beta1.")],
    directory: Directory = HERE,
    json: Json = False,
) -> None:
    """`labctl k8s import`: write an MPIJob as a workload, and print the settings that it takes in .env."""
    with answering(as_json=json) as output:
        lab = context(directory, output)
        imported = flows.k8s_import(lab, file)
        for left in imported.left_out:
            lab.warn(f"left out: {left}")
        lab.notice(f"workload {imported.name}: {imported.files[0].path}; the settings below go into .env")
        output.answer(imported, imported.env.rstrip("\n"))

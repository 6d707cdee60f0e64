"""`headway export` writes heads as other programs' folders, `headway import` reads those, `headway push` uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heads.checkpoint.opening import open_backbone, open_heads
from heads.checkpoint.save_load import save
from heads.checkpoint.schema import DESCRIPTION
from heads.cli.hub import BY_NAME
from heads.cli.option_groups import read_config
from heads.cli.options import BackboneOption
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import format_module, formats, reads, recognise, writes
from heads.export.hub.push import push_to_hub

ListOption = Annotated[bool, typer.Option("--list", help="List the formats, and who loads them.")]


def export_command(
    context: typer.Context,
    heads: Annotated[Path | None, typer.Argument(metavar="HEADS", help="Folder or hub name of heads."), BY_NAME] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="The format; its own options follow: --format-help lists them."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="New folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier folder once the new is whole.")] = (
        False
    ),
    backbone: BackboneOption = None,
    format_help: Annotated[bool, typer.Option("--format-help", help="List the options of --to FORMAT.")] = False,
    list_formats: ListOption = False,
) -> None:
    """Write heads as a folder that other programs load.

    What is written is read back and compared in logits before the folder takes its place.
    """
    if list_formats:
        Console().print(formats_table())
        return
    allowed = ", ".join(filter(writes, formats()))
    if to is None and format_help:
        raise ValueError(f"--format-help lists the options of a format; give --to with one of {allowed}.")
    if to is None or (heads is None and not format_help):
        raise ValueError(f"Give HEADS and --to FORMAT, one of {allowed}.")
    module = format_module(to)
    typed = f"{context.command_path} HEADS --to {to}", "--format-help"
    if format_help:
        read_config(module.Config, ["--format-help"], *typed)
    if out is None or heads is None:
        raise ValueError("Give --out FOLDER, a new folder.")
    config = read_config(module.Config, context.args, *typed) if writes(to) else None
    if hasattr(module, "convert"):
        typer.echo(f"{out}: {module.convert(heads, out, config, backbone=backbone, overwrite=overwrite)}")
        return
    opened = open_heads([heads], backbone)
    (token_heads,) = opened.token_heads.values()
    said = export_heads(token_heads, to, out, overwrite=overwrite, **({} if config is None else vars(config)))
    typer.echo(f"{out}: {token_heads.family} heads as {to}; {said}")


def import_command(
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Folder of another program's heads.")] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder or hub name of the model that they belong to.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="HEADS", help="New folder for the heads.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="By default the format that the folder shows.")
    ] = None,
    list_formats: ListOption = False,
) -> None:
    """Read heads of another program as a native folder, which decodes and can be trained further."""
    if list_formats:
        Console().print(formats_table())
        return
    if folder is None or backbone is None or out is None:
        raise ValueError("Give FOLDER, --backbone MODEL and --out HEADS.")
    if (out / DESCRIPTION).exists():
        raise ValueError(f"--out {out} holds heads, which would be lost; give a folder without heads.")
    if out.resolve() == folder.resolve() or folder.resolve() in out.resolve().parents:
        raise ValueError(f"--out {out} is, or lies in, {folder}, which is read; give a folder of its own.")
    source = source or recognise(folder)
    token_heads = import_heads(folder, open_backbone(backbone).model, source)
    save(token_heads, out, recipe={"imported": {"format": source, "folder": str(folder)}})
    typer.echo(f"{out}: {token_heads.num_heads} {token_heads.family} heads, read from {folder} as {source}")


def push_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of heads, or what headway export --to hub wrote.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub: organisation/name.")],
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch, which is made if there is none; by default main.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Of a repository that is made; by default as the organisation's are."),
    ] = None,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Message of the commit.")] = "Upload heads",
    measured: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSON of headway benchmark or evaluate, for the card; may be repeated."),
    ] = None,
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="Licence for the card, such as apache-2.0; by default the base's.")
    ] = None,
) -> None:
    """Upload heads to the hub with a model card; heads.load("organisation/name", model) loads them from there."""
    address = push_to_hub(
        folder, name, revision=revision, private=private, message=message, measured=measured or (), license=license
    )
    typer.echo(address)


def formats_table() -> Table:
    table = Table(title="formats", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("format", "export", "import", "who loads it"):
        table.add_column(column, overflow="fold")
    for name in formats():
        yes = ["yes" if able(name) else "–" for able in (writes, reads)]
        table.add_row(name, *yes, format_module(name).SUMMARY)
    return table

"""The command `headway merge`: heads with a LoRA adapter in, heads with a whole backbone out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heads.backbone.loading import Dtype
from heads.checkpoint.convert import merge


def merge_command(
    folder: Annotated[Path, typer.Argument(metavar="HEADS", help="Heads that were trained with a LoRA adapter.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the heads and their merged backbone.")],
    dtype: Annotated[
        Dtype, typer.Option(help="Of the merged backbone on disk; auto: that of the original's files.")
    ] = "auto",
) -> None:
    """Fold the LoRA adapter into the backbone's weights, so that heads and backbone load without peft."""
    backbone = merge(folder, out, dtype=dtype)
    size = sum(path.stat().st_size for path in backbone.glob("*.safetensors"))
    typer.echo(f"{out}: the heads of {folder}, and in {backbone.name} their backbone, merged ({size / 2**20:.1f} MiB)")

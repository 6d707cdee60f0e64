"""`headway quantize`: what microscaling weights cost in quality, and the packed backbone as a folder."""
# T position

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from heads.checkpoint.opening import Opened, open_backbone, open_heads
from heads.checkpoint.packed_backbone import RECORD, pack_backbone
from heads.checkpoint.remote import find_heads
from heads.checkpoint.save_load import save
from heads.checkpoint.schema import TENSORS
from heads.cli.hub import BY_NAME
from heads.cli.option_groups import given_options, with_groups
from heads.cli.options import DtypeOption, JsonOption, TextOptions, print_aside
from heads.evaluation.lossy.rounded_weights import Quality, measure_quality, rounded
from heads.evaluation.methods import GreedySettings
from heads.evaluation.perplexity_report import interval, new_table, number
from heads.evaluation.predictions import tokenise_texts
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine, progress_bar, versions, write_content
from heads.quantization.formats import FORMATS, Format, find_format
from heads.quantization.packed_heads import pack_heads
from heads.quantization.quantizer import MXConfig

LEGEND = (
    "error: of the weights, relative; PPL: perplexity of the next token; tokens/pass: heads alone, greedy; text: "
    "whether heads wrote plain generation's on the same weights"
)


@dataclass(frozen=True, kw_only=True)
class QuantizedTexts(TextOptions):
    """Perplexity."""

    blocks: Annotated[int, typer.Option(metavar="N", min=0, help="Texts for perplexity; 0 leaves it out.")] = 32
    block_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of each text at most.")] = 256


@dataclass(frozen=True, kw_only=True)
class PassesOptions:
    """Tokens per pass."""

    num_prompts: Annotated[int, typer.Option(metavar="N", min=0, help="Prompts for tokens per pass.")] = 8
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="New tokens for each prompt.")] = 64


@dataclass(frozen=True, kw_only=True)
class PackedFolders:
    """Packed weights."""

    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="New folder for the packed backbone, in one --format; it opens without the original."
        ),
    ] = None
    heads_out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="New folder for the heads, packed as the backbone is; with --out."),
    ] = None


@with_groups
def quantize_command(
    context: typer.Context,
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help="Folder or hub name of the model.")],
    heads: Annotated[
        Path | None,
        typer.Option(metavar="HEADS", help="Heads on this backbone: measures their tokens per pass."),
        BY_NAME,
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=f"all, or one of {', '.join(FORMATS)}.")
    ] = "all",
    *,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    measured_on: QuantizedTexts,
    passes: PassesOptions,
    folders: PackedFolders,
) -> None:
    """Show what weights of 4, 6 or 8 bits cost in perplexity and accepted drafts; with --out, write them packed.

    Weights are rounded to the format and the same texts are measured, before and after; greedy text of heads is
    compared with plain generation on the same weights. With --out the folder is written first, and what is measured
    is that folder, computed on its packed weights.
    """
    out, heads_out = folders.out, folders.heads_out
    if out is not None and formats == "all":
        raise ValueError(f"--out {out} takes one format; give --format, one of {', '.join(FORMATS)}.")
    if heads_out is not None and (out is None or heads is None):
        raise ValueError(f"--heads-out {heads_out} goes with --heads, which are packed, and --out.")
    if heads_out is not None and (heads_out.exists() or heads_out == out):
        raise ValueError(f"--heads-out {heads_out} exists already or is --out; give a new folder.")
    given = given_options(context, ["num_prompts", "max_new_tokens"])
    if given and heads is None:
        raise ValueError(f"{', '.join(given)} is about tokens per pass of heads; give --heads too, or leave it out.")
    chosen = list(FORMATS.values()) if formats == "all" else [find_format(formats)]
    if out is not None:
        size = pack_backbone(backbone, formats, out, dtype=dtype)
        typer.echo(f"{out}: {backbone} in {formats}, {size / 2**20:.1f} MiB of weights")
    if heads is not None and heads_out is not None:
        write_packed_heads(heads, str(out), formats, heads_out)
    opened = open_backbone(backbone, dtype) if heads is None else open_heads([heads], backbone, dtype)
    files = measured_on.text or []
    texts = cut_texts(opened, files, measured_on.blocks, measured_on.block_tokens)
    prompts = find_prompts(opened, files, passes.num_prompts) if heads is not None else []
    console = Console()
    with progress_bar(console, "measuring", 1 + len(chosen)) as report:
        settings = GreedySettings(new_tokens=passes.max_new_tokens)

        def measured(one: Opened, rows: Sequence[Format | None]) -> list[Quality]:
            token_heads = next(iter(one.token_heads.values()), None)
            return list(measure_quality(one.model, rows, texts, token_heads, prompts, settings=settings, report=report))

        if out is None:
            found = measured(opened, [None, *chosen])
        else:
            with rounded(opened.model, chosen[0]) as (_, error):
                pass  # the weights' error alone; all else is the packed folder's own
            used = heads_out or heads
            folder = open_backbone(str(out), dtype) if used is None else open_heads([used], str(out), dtype)
            (packed,) = measured(folder, [None])
            found = [*measured(opened, [None]), replace(packed, format=chosen[0], weight_error=error)]
    console.print(quality_table(found, f"{backbone}: {len(texts)} texts, {len(prompts)} prompts"))
    typer.echo(LEGEND)
    if json_file is not None:
        write_content(json_file, as_content(found, opened.model.device))
        print_aside(f"figures: {json_file}")


def write_packed_heads(heads: Path, backbone: str, format: str, out: Path) -> None:
    """Pack heads and save them with the tree that was fitted to them left out, since their accuracy changes.

    Raises:
        ValueError: the heads cannot be packed.
    """
    (token_heads,) = open_heads([heads], backbone).token_heads.values()
    stored = load_file(Path(find_heads(heads)) / TENSORS).values()
    dtype = next((tensor.dtype for tensor in stored if tensor.is_floating_point()), None)
    save(pack_heads(token_heads, MXConfig(format)), out, recipe={"packed_from": str(heads)}, dtype=dtype)
    typer.echo(f"{out}: {heads} in {format}, {(out / TENSORS).stat().st_size / 2**20:.1f} MiB")


def cut_texts(opened: Opened, files: Sequence[Path], count: int, length: int) -> list[Tensor]:
    """At most `count` texts (T,), spread evenly; without a record of held-out text or files none, with a remark."""
    if not count:
        return []
    if not files and not (Path(opened.source) / RECORD).is_file():
        print_aside("perplexity is left out: the backbone records no held-out text; give --text FILE.")
        return []
    texts = [torch.tensor(tokens[:length]) for tokens in tokenise_texts(opened, files) if len(tokens) > 1]
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def find_prompts(opened: Opened, files: Sequence[Path], count: int) -> list[Tensor]:
    """Prompts (1, T) on the model's device."""
    if not count:
        return []
    if not files:
        found = default_prompts(opened.source, opened.tokenizer, count)
    else:
        found = [text_T[None, :64] for text_T in cut_texts(opened, files, count, 64)]
    return [prompt_1T.to(opened.model.device) for prompt_1T in found]


def quality_table(found: Sequence[Quality], title: str) -> Table:
    columns = ["bits", "MiB", "error", "PPL", "95 %", "× PPL", "tokens/pass", "text"]
    table = new_table(title, "weights", columns)
    table.columns[0].no_wrap = True
    before = found[0]
    for one in found:
        ppl, first = one.perplexity, before.perplexity
        table.add_row(
            "as they are" if one.format is None else one.format.name,
            "–" if one.format is None else f"{one.format.bits_per_weight}",
            f"{one.weight_bytes / 2**20:.1f}",
            f"{one.weight_error:.4f}",
            "–" if ppl is None else number(ppl.value),
            "–" if ppl is None else interval(ppl),
            "–" if ppl is None or first is None else f"{ppl.value / first.value:.4f}",
            "–" if one.tokens_per_pass is None else f"{one.tokens_per_pass:.2f}",
            one.same_text or "–",
        )
    return table


def as_content(found: Sequence[Quality], device: torch.device) -> dict[str, Any]:
    rows = [
        {**vars(one), "format": one.format and one.format.name, "perplexity": one.perplexity and vars(one.perplexity)}
        for one in found
    ]
    return {"rows": rows, "machine": describe_machine(device), "versions": versions()}

"""The commands about folders of heads: `headway info`, `merge` and `prune-vocabulary`."""
# V vocabulary, S scored tokens

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heads.backbone.loading import Dtype
from heads.checkpoint.convert import merge, prune_vocabulary
from heads.checkpoint.opening import open_heads
from heads.checkpoint.remote import with_heads_inside
from heads.checkpoint.save_load import save
from heads.checkpoint.schema import DESCRIPTION, read_description
from heads.checkpoint.summary import describe, describe_run, list_facts, list_run
from heads.cli.hub import BY_NAME, BY_NAME_ALONE
from heads.cli.options import BackboneOption, Heads
from heads.interface.draft_vocabulary import most_frequent_tokens
from heads.ngrams.table import NgramTable

RANKS_SHOWN = 5


def info_command(
    folder: Annotated[Path, typer.Argument(metavar="HEADS", help="Folder or hub name of heads."), BY_NAME_ALONE],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a folder of heads holds, how accurate the heads are, and how they were made.

    For a run's folder, show the heads that the run saved.
    """
    folder = with_heads_inside(folder)
    of_run = describe_run(folder)
    description: dict[str, Any] = of_run or describe(folder)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
        return
    console = Console()
    if of_run:
        console.print(run_table(folder, of_run))
        console.print(Text(f"headway info {folder / next(iter(of_run))} says more."), soft_wrap=True)
        return
    console.print(facts_table(description))
    if description["measured_accuracy"]:
        console.print(agreement_table(description["measured_accuracy"]))


def run_table(folder: Path, of_run: dict[str, dict[str, Any]]) -> Table:
    """The heads that a run saved, a row for each folder."""
    rows = list_run(of_run)
    table = Table(
        title=Text(f"{folder}: heads that a run saved"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in rows[0]:
        table.add_column(name, overflow="fold", justify="right" if name in ("step", "tokens per pass") else "left")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def facts_table(description: dict[str, Any]) -> Table:
    table = Table(
        title=Text(description["folder"]), title_justify="left", box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0)
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in list_facts(description).items():
        table.add_row(name, Text(value))  # a recorded command may hold brackets, which rich would take for markup
    return table


def agreement_table(agreement: Sequence[Sequence[float]]) -> Table:
    """How often each head's candidate of each rank was the backbone's own next token."""
    ranks = min(RANKS_SHOWN, max(map(len, agreement)))
    title = "agreement with the backbone's own choice, by rank of the candidate"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("head")
    for rank in range(1, ranks + 1):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column(f"1 to {ranks}", justify="right")
    for k, shares in enumerate(agreement, start=1):
        table.add_row(str(k), *(f"{share:.1%}" for share in shares[:ranks]), f"{sum(shares[:ranks]):.1%}")
    return table


def merge_command(
    folder: Annotated[
        Path, typer.Argument(metavar="HEADS", help="Heads that were trained with a LoRA adapter."), BY_NAME
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the heads and their merged backbone.")],
    dtype: Annotated[
        Dtype,
        typer.Option(metavar="DTYPE", help="Dtype of the merged backbone on disk; auto: as before merging."),
    ] = "auto",
) -> None:
    """Fold the LoRA adapter into the backbone's weights, so that heads and backbone load without peft."""
    backbone = merge(folder, out, dtype=dtype)
    size = sum(path.stat().st_size for path in backbone.glob("*.safetensors"))
    typer.echo(f"{out}: the heads of {folder}, and in {backbone.name} their backbone, merged ({size / 2**20:.1f} MiB)")


def prune_vocabulary_command(
    heads: Heads,
    ngrams: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Table of the training data that headway count-ngrams made.")
    ],
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of tokens that the new heads score: the most frequent ones.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the new heads; those in HEADS stay as they are.")
    ],
    backbone: BackboneOption = None,
) -> None:
    """Cut heads to a draft vocabulary: less to read when drafting, and the same text (docs/families.md)."""
    if out.resolve() == heads.resolve():
        raise ValueError(f"--out {out} is the folder of the heads themselves; give another one.")
    if (out / DESCRIPTION).exists():
        raise ValueError(f"--out {out} holds heads, which would be lost; give a folder without heads.")
    opened = open_heads([heads], backbone)
    (token_heads,) = opened.token_heads.values()
    counted = torch.tensor(NgramTable.open(ngrams, opened.tokenizer).unigrams_V, dtype=torch.long)
    counts_V = torch.zeros(token_heads.backbone.vocab_size, dtype=torch.long)
    counts_V[: len(counted)] = counted[: len(counts_V)]
    if (vocabulary := token_heads.draft_vocabulary) is not None:  # tokens that are not scored now come last
        counts_V[torch.isin(torch.arange(len(counts_V)), vocabulary.tokens_S.cpu(), invert=True)] = -1
    ids_S = most_frequent_tokens(counts_V, tokens)
    pruned = prune_vocabulary(token_heads, ids_S)
    coverage = float(counted[ids_S[ids_S < len(counted)]].sum() / counted.sum().clamp(min=1))
    chosen = {"tokens": tokens, "coverage": coverage, "counted_tokens": int(counted.sum())}
    recipe = (read_description(heads).recipe or {}) | {"draft_vocabulary": chosen}
    dtype = getattr(torch, describe(heads)["dtypes"][0])  # as they were saved
    save(pruned, out, recipe=recipe, dtype=dtype, tokenizer=opened.tokenizer)
    typer.echo(
        f"{out}: scores {tokens:,} of {len(counts_V):,} tokens, {coverage:.1%} of the {int(counted.sum()):,} counted",
        err=True,
    )

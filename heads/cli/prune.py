"""The command `headway prune-vocabulary`: trained heads that score the most frequent tokens alone, as a new folder."""
# V vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from heads.checkpoint.opening import open_heads
from heads.checkpoint.pruning import prune_vocabulary
from heads.checkpoint.save_load import read_description, save
from heads.cli.info import describe
from heads.interface.draft_vocabulary import most_frequent_tokens
from heads.ngrams.table import NgramTable


def prune_vocabulary_command(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Folder that heads were saved to.")],
    ngrams: Annotated[Path, typer.Option(help="Table of the training data that headway count-ngrams made.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens the new heads score: the most frequent ones.")],
    out: Annotated[Path, typer.Option(help="Folder for the new heads; those in HEADS stay as they are.")],
    backbone: Annotated[
        str | None, typer.Option(help="Folder or hub name of the backbone; by default the one in heads.json.")
    ] = None,
) -> None:
    """Cut heads to a draft vocabulary: less to read when drafting, and the same text (docs/draft_vocabulary.md)."""
    if out.resolve() == heads.resolve():
        raise ValueError(f"--out {out} is the folder of the heads themselves; give another one.")
    opened = open_heads([heads], backbone)
    (token_heads,) = opened.token_heads.values()
    counted = torch.tensor(NgramTable.open(ngrams, opened.tokenizer).unigrams_V, dtype=torch.long)
    counts_V = torch.zeros(token_heads.backbone.vocab_size, dtype=torch.long)
    counts_V[: len(counted)] = counted[: len(counts_V)]
    if (vocabulary := token_heads.draft_vocabulary) is not None:
        counts_V[torch.isin(torch.arange(len(counts_V)), vocabulary.tokens_S.cpu(), invert=True)] = -1  # last of all
    ids_S = most_frequent_tokens(counts_V, tokens)
    few = prune_vocabulary(token_heads, ids_S)
    coverage = float(counted[ids_S[ids_S < len(counted)]].sum() / counted.sum().clamp(min=1))
    chosen = {"tokens": tokens, "coverage": coverage, "counted_tokens": int(counted.sum())}
    recipe = (read_description(heads).get("recipe") or {}) | {"draft_vocabulary": chosen}
    dtype = getattr(torch, describe(heads)["dtypes"][0])  # as they were saved
    save(few, out, recipe=recipe, dtype=dtype, tokenizer=opened.tokenizer)
    typer.echo(
        f"{out}: scores {tokens:,} of {len(counts_V):,} tokens, {coverage:.1%} of the {int(counted.sum()):,} counted",
        err=True,
    )

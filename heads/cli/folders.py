"""The commands about folders: `headway info`, `merge` and `prune-vocabulary` of heads, `count-ngrams` of data."""
# V vocabulary, S scored tokens, T position in a document

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from heads.backbone.loading import BackboneConfig, Dtype, load_tokenizer
from heads.checkpoint.convert import merge, prune_vocabulary
from heads.checkpoint.opening import open_heads
from heads.checkpoint.remote import with_heads_inside
from heads.checkpoint.save_load import save
from heads.checkpoint.schema import DESCRIPTION, read_description
from heads.checkpoint.summary import describe, describe_run, list_facts, list_run
from heads.cli.hub import BY_NAME, BY_NAME_ALONE
from heads.cli.options import BackboneOption, Heads
from heads.extras import needs_extra
from heads.interface.draft_vocabulary import most_frequent_tokens
from heads.ngrams.counting import count_ngrams
from heads.ngrams.files import MAX_ORDER
from heads.ngrams.table import NgramTable
from heads.validation import build

if TYPE_CHECKING:
    from datasets import Dataset

    from heads.data.documents import Documents, SourceConfig

RANKS_SHOWN = 5
BATCH_ROWS = 256


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


def count_ngrams_command(
    tokenizer: Annotated[
        str, typer.Option(metavar="BACKBONE", help="Folder or hub name of the backbone, whose tokenizer is used.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="The heads' training data: file, directory, glob, hub name or python-stdlib; may be repeated.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="New folder for the table; FOLDER.counting is its unfinished count.")
    ],
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Split of hub data sets, directories and python-stdlib.")
    ] = "train",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Configuration name of a data set on the hub.")
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of text, token ids or conversations; by default the usual names."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help='"vicuna" or a Jinja file; by default the tokenizer\'s own, for conversations.'
        ),
    ] = None,
    heldout_list: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file that names the files python-stdlib holds out.")
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=ROLE,…", help="What other roles of turns stand for, such as moderator=user; as in training."
        ),
    ] = None,
    max_bad_fraction: Annotated[
        float, typer.Option(metavar="X", min=0, max=1, help="Share of a source's rows that may be bad; as in training.")
    ] = 0.01,
    order: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_ORDER, help="Longest n-grams; a joint of n tokens needs order n.")
    ] = 3,
    min_count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Drop n-grams of two and more tokens that occur less often.")
    ] = 1,
    workers: Annotated[int, typer.Option(metavar="N", min=0, help="Threads that count; 0: one for each core.")] = 0,
) -> None:
    """Count the n-grams of training data, for co-occurrence masks and superposed decoding.

    The same command resumes an interrupted count. No n-gram crosses a document's end.
    """
    from heads.data.documents import DataConfig, SourceConfig, load_documents

    known_roles = read_roles(roles)
    loaded = load_tokenizer(BackboneConfig(name_or_path=tokenizer))
    fields = {"name": name, "split": split, "column": column, "roles": known_roles}
    sources = [build(SourceConfig, fields | {"path": path}, of="--data") for path in data]
    config = DataConfig(train=sources, heldout_list=heldout_list, chat_template=chat_template)
    console = Console(stderr=True)
    found = [load_documents(source, config, loaded) for source in sources]
    for documents in found:
        check_rows(documents, max_bad_fraction)
    with progress_bars(console, sum(count_tokens(documents) for documents in found)) as report:
        table = count_ngrams(
            (ids_T for documents in found for ids_T in read_ids(documents)),
            folder=out,
            order=order,
            vocab_size=len(loaded),
            tokenizer=loaded,
            sources=[describe_source(source, heldout_list) for source in sources],
            min_count=min_count,
            workers=workers or os.cpu_count() or 1,
            report=report,
        )
    typer.echo(describe_table(table))


def read_roles(roles: str | None) -> dict[str, str]:
    """
    >>> read_roles("moderator=user,bot=assistant")
    {'moderator': 'user', 'bot': 'assistant'}

    Raises:
        ValueError: not of this form.
    """
    pairs = [pair.partition("=") for pair in roles.split(",")] if roles else []
    if not all(name.strip() and role.strip() for name, _, role in pairs):
        raise ValueError(f"--roles {roles!r} was given; give names and roles such as moderator=user,bot=assistant.")
    return {name.strip(): role.strip() for name, _, role in pairs}


def check_rows(documents: Documents, max_bad_fraction: float) -> None:
    """Warn of bad rows as training does.

    Raises:
        ValueError: there are too many.
    """
    from heads.data.bad_rows import SHOWN_PROBLEMS, refuse_bad_rows, warn_of_bad_rows

    rows = stored_rows(documents)
    bad = np.flatnonzero(np.asarray(rows.with_format("numpy")["status"][:]) == "bad")
    problems = list(rows.select(bad[:SHOWN_PROBLEMS])["problem"])
    refuse_bad_rows(documents.name, len(rows), len(bad), problems, max_bad_fraction, "--max-bad-fraction")
    warn_of_bad_rows(documents.name, len(rows), len(bad), problems)


def count_tokens(documents: Documents) -> int:
    return int(np.sum(stored_rows(documents).with_format("numpy")["num_tokens"][:]))


def read_ids(documents: Documents) -> Iterator[Any]:
    """The token ids (T,) of one document after another, without bad and empty rows."""
    rows = stored_rows(documents).select_columns(["input_ids"]).with_format("arrow")
    for table in rows.iter(batch_size=BATCH_ROWS):
        for ids in table["input_ids"]:
            if len(ids.values):
                yield ids.values.to_numpy()


def stored_rows(documents: Documents) -> Dataset:
    with needs_extra("train", "Rows of data were requested"):
        from datasets import Dataset
    assert isinstance(documents.rows, Dataset), "they were not opened as a stream"
    return documents.rows


def describe_source(source: SourceConfig, heldout_list: str | None) -> str:
    """A source as the table records it.

    >>> from heads.data.documents import SourceConfig
    >>> describe_source(SourceConfig(path="python-stdlib"), "training.json")
    'python-stdlib, split train, heldout_list training.json'
    """
    roles = ",".join(f"{name}={role}" for name, role in source.roles.items()) or None
    facts = {"name": source.name, "split": source.split, "column": source.column, "heldout_list": heldout_list}
    facts |= {"roles": roles}
    return ", ".join([source.path, *(f"{name} {value}" for name, value in facts.items() if value is not None)])


def describe_table(table: NgramTable) -> str:
    different: Sequence[int] = table.description["num_ngrams"]
    orders = ", ".join(f"{number:,} of {order}" for order, number in enumerate(different, start=1) if order > 1)
    documents = table.description["num_documents"]
    return (
        f"{table.folder}: {table.num_tokens:,} tokens of {documents:,} documents; n-grams: {orders or 'tokens alone'}"
    )


@contextmanager
def progress_bars(console: Console, num_tokens: int) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage on a terminal, nothing elsewhere; yields the function (stage, done, total) that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or num_tokens)
            bars.update(tasks[stage], completed=done)

        yield report

"""The command `headway count-ngrams`: the documents that a training run would read, counted into an n-gram table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from heads.backbone.loading import BackboneConfig, load_tokenizer
from heads.data.documents import DataConfig, Documents, SourceConfig, load_documents
from heads.ngrams.counting import count_ngrams
from heads.ngrams.files import MAX_ORDER
from heads.ngrams.table import NgramTable

BAD_SHARE = 0.01  # of a source's rows; more bad ones stop the count, as they would stop training
ROWS_AT_ONCE = 256


def count_ngrams_command(
    tokenizer: Annotated[
        str, typer.Option(metavar="BACKBONE", help="Folder or hub name of the backbone, whose tokenizer is used.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="What the heads are trained on: file, directory, glob, hub name or python-stdlib; may be repeated.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="New folder for the table; FOLDER.counting holds what is unfinished.")
    ],
    split: Annotated[str, typer.Option(help="Split of hub data sets, directories and python-stdlib.")] = "train",
    name: Annotated[str | None, typer.Option(help="Configuration name of a data set on the hub.")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of text, token ids or conversations; by default the usual names.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help='"vicuna" or a Jinja file; by default the tokenizer\'s own, for conversations.')
    ] = None,
    heldout_list: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file that names the files python-stdlib holds out.")
    ] = None,
    order: Annotated[
        int, typer.Option(min=1, max=MAX_ORDER, help="Longest n-grams; a joint of n tokens needs order n.")
    ] = 3,
    min_count: Annotated[
        int, typer.Option(min=1, help="Drop n-grams of two tokens and more that are seen less often.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Threads that count; 0: one for each core.")] = 0,
) -> None:
    """Count the n-grams of training data, for co-occurrence masks and superposed decoding.

    An interrupted count goes on where it stopped when the same command is given again. No n-gram crosses a document.
    """
    loaded = load_tokenizer(BackboneConfig(name_or_path=tokenizer))
    sources = [SourceConfig(path=path, name=name, split=split, column=column) for path in data]
    config = DataConfig(train=sources, heldout_list=heldout_list, chat_template=chat_template)
    console = Console(stderr=True)
    found = [load_documents(source, config, loaded) for source in sources]
    for documents in found:
        check_rows(documents, console)
    with progress(console, sum(count_tokens(documents) for documents in found)) as report:
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


def stored_rows(documents: Documents) -> Dataset:
    assert isinstance(documents.rows, Dataset)  # they were not asked for as a stream
    return documents.rows


def check_rows(documents: Documents, console: Console) -> None:
    """Bad rows are named; more than 1 % of them are an error."""
    rows = stored_rows(documents)
    bad = np.flatnonzero(np.asarray(rows.with_format("numpy")["status"][:]) == "bad")
    if not len(bad):
        return
    first = rows[int(bad[0])]["problem"]
    if len(bad) > BAD_SHARE * len(rows):
        raise ValueError(
            f"{documents.name!r} has {len(bad):,} bad rows of {len(rows):,}, the first one {first}; at most "
            f"{BAD_SHARE:.0%} may be bad: repair the file or set --column."
        )
    console.print(
        f"{documents.name}: {len(bad):,} bad rows skipped, the first one {first}",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def count_tokens(documents: Documents) -> int:
    return int(np.sum(stored_rows(documents).with_format("numpy")["num_tokens"][:]))


def read_ids(documents: Documents) -> Iterator[Any]:
    """The token ids of one document after the other; bad and empty rows hold none."""
    rows = stored_rows(documents).select_columns(["input_ids"]).with_format("arrow")
    for table in rows.iter(batch_size=ROWS_AT_ONCE):
        for ids in table["input_ids"]:
            if len(ids.values):
                yield ids.values.to_numpy()


def describe_source(source: SourceConfig, heldout_list: str | None) -> str:
    """A source as the table keeps it.

    >>> describe_source(SourceConfig(path="python-stdlib"), "training.json")
    'python-stdlib, split train, heldout_list training.json'
    """
    facts = {"name": source.name, "split": source.split, "column": source.column, "heldout_list": heldout_list}
    return ", ".join([source.path, *(f"{name} {value}" for name, value in facts.items() if value is not None)])


def describe_table(table: NgramTable) -> str:
    different: Sequence[int] = table.description["num_ngrams"]
    orders = ", ".join(f"{number:,} of {order}" for order, number in enumerate(different, start=1) if order > 1)
    documents = table.description["num_documents"]
    return (
        f"{table.folder}: {table.num_tokens:,} tokens of {documents:,} documents; n-grams: {orders or 'tokens alone'}"
    )


class progress:  # noqa: N801 - reads as a phrase: `with progress(console, tokens) as report`
    """Bars on a terminal, nothing elsewhere."""

    def __init__(self, console: Console, num_tokens: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        self.bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.num_tokens = num_tokens
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Any:
        self.bars.start()
        return self.report

    def __exit__(self, *_: Any) -> None:
        self.bars.stop()

    def report(self, what: str, done: int, total: int | None) -> None:
        if what not in self.tasks:
            self.tasks[what] = self.bars.add_task(what, total=total or self.num_tokens)
        self.bars.update(self.tasks[what], completed=done)

"""`headway count-ngrams`: the n-grams of training data, counted with a backbone's tokenizer."""
# T position in a document

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from heads.backbone.loading import BackboneConfig, load_tokenizer
from heads.cli.option_groups import with_groups
from heads.extras import needs_extra
from heads.ngrams.counting import count_ngrams
from heads.ngrams.files import MAX_ORDER
from heads.ngrams.table import NgramTable
from heads.validation import build

if TYPE_CHECKING:
    from datasets import Dataset

    from heads.data.documents import Documents, SourceConfig

BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Data, as in training."""

    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="The heads' training data: file, directory, glob, hub name or python-stdlib; may be repeated.",
        ),
    ]
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Split of hub data sets, directories and python-stdlib.")
    ] = "train"
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration name of a data set on the hub.")] = (
        None
    )
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of text, token ids or conversations; by default the usual names."),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help='"vicuna" or a Jinja file; by default the tokenizer\'s own, for conversations.'
        ),
    ] = None
    heldout_list: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file that names the files python-stdlib holds out.")
    ] = None
    roles: Annotated[
        str | None,
        typer.Option(metavar="NAME=ROLE,…", help="What other roles of turns stand for, such as moderator=user."),
    ] = None
    max_bad_fraction: Annotated[
        float, typer.Option(metavar="X", min=0, max=1, help="Share of a source's rows that may be bad.")
    ] = 0.01

    def sources(self) -> list[SourceConfig]:
        from heads.data.documents import SourceConfig

        fields = {"name": self.name, "split": self.split, "column": self.column, "roles": read_roles(self.roles)}
        return [build(SourceConfig, fields | {"path": path}, of="--data") for path in self.data]

    def load(self, sources: list[SourceConfig], tokenizer: Any) -> list[Documents]:
        """
        Raises:
            ValueError: a source that cannot be read, or with too many bad rows.
        """
        from heads.data.documents import DataConfig, load_documents

        config = DataConfig(train=sources, heldout_list=self.heldout_list, chat_template=self.chat_template)
        found = [load_documents(source, config, tokenizer) for source in sources]
        for documents in found:
            check_rows(documents, self.max_bad_fraction)
        return found


@dataclass(frozen=True, kw_only=True)
class CountingOptions:
    """Counting."""

    order: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_ORDER, help="Longest n-grams; a joint of n tokens needs order n.")
    ] = 3
    min_count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Drop n-grams of two and more tokens that occur less often.")
    ] = 1
    workers: Annotated[int, typer.Option(metavar="N", min=0, help="Threads that count; 0: one for each core.")] = 0


@with_groups
def count_ngrams_command(
    tokenizer: Annotated[
        str, typer.Option(metavar="BACKBONE", help="Folder or hub name of the backbone, whose tokenizer is used.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="New folder for the table; FOLDER.counting is its unfinished count.")
    ],
    *,
    given: SourceOptions,
    counting: CountingOptions,
) -> None:
    """Count the n-grams of training data, for co-occurrence masks and superposed decoding.

    The same command resumes an interrupted count. No n-gram crosses a document's end.
    """
    sources = given.sources()
    loaded = load_tokenizer(BackboneConfig(name_or_path=tokenizer))
    found = given.load(sources, loaded)
    with progress_bars(Console(stderr=True), sum(count_tokens(documents) for documents in found)) as report:
        table = count_ngrams(
            (ids_T for documents in found for ids_T in read_ids(documents)),
            folder=out,
            order=counting.order,
            vocab_size=len(loaded),
            tokenizer=loaded,
            sources=[describe_source(source, given.heldout_list) for source in sources],
            min_count=counting.min_count,
            workers=counting.workers or os.cpu_count() or 1,
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

"""Show a config's data before training: counts per source, and sample documents with their loss mask.

Green tokens are targets of the heads, dim ones are context only; without colour, targets stand in ⟦ ⟧. Data that
training would refuse is shown too, followed by the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from heads.backbone.loading import load_tokenizer, read_vocab_size
from heads.data.documents import DataConfig
from heads.validation import validated, within
from train.config import TrainConfig
from train.data.packing import build_datasets, read_sources
from train.data.report import CountedSource, DataReport, PackReport, SourceReport

SHOWN_TOKENS = 400  # of a sample; the rest is counted
GREEN, DIM = "green", "dim"
COUNTS = [*("rows", "bad", "empty", "too short", "documents", "longer than a block", "tokens")]
COUNTS += ["leading replies dropped", "turns joined", "supervised"]
MARKS = ("⟦", "⟧")  # around targets, where there is no colour


@validated
@dataclass(kw_only=True)
class InspectFlags:
    """Flags of `python -m train inspect-data`.

    Attributes:
        samples: documents to show
    """

    samples: int = within(0, default=3)


def inspect_data(config: TrainConfig, flags: InspectFlags) -> None:
    """Run `python -m train inspect-data`."""
    show_data(
        config.data,
        load_tokenizer(config.backbone),
        num_heads=config.num_heads,
        vocab_size=read_vocab_size(config.backbone),
        samples=flags.samples,
    )


def show_data(
    data_config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_heads: int,
    vocab_size: int,
    samples: int = 3,
    console: Console | None = None,
) -> None:
    """Print the report, then raise the ValueError that training would raise, if any."""
    console = console or Console()
    train, evaluated = read_sources(data_config, tokenizer, num_heads=num_heads)
    console.print(source_table(train, evaluated, streamed=data_config.streaming))
    for source in train + evaluated:
        for line in [f"bad row: {problem}" for problem in source.report.problems] + tell_roles(source.report):
            console.print(line, style="yellow", markup=False, highlight=False)
    show_samples(train, tokenizer, samples, console)
    packed = build_datasets(data_config, tokenizer, num_heads=num_heads, vocab_size=vocab_size)
    show_packing(packed.report, data_config, console)


def source_table(train: list[CountedSource], evaluated: list[CountedSource], *, streamed: bool) -> Table:
    first_rows = " (first rows of each stream)" if streamed else ""
    listed = [("train", source) for source in train] + [("eval", source) for source in evaluated]
    table = Table(title=f"Sources{first_rows}", title_justify="left")
    table.add_column("")
    for split, source in listed:  # a column for each source keeps names and counts unbroken on a narrow terminal
        table.add_column(f"{source.report.name}\n({split})", justify="right", overflow="fold")
    columns = [count_cells(source.report) for _, source in listed]
    for heading, *cells in zip(COUNTS, *columns, strict=True):
        table.add_row(heading, *cells)
    return table


def count_cells(report: SourceReport) -> list[str]:
    counts = [report.rows, report.bad, report.empty, report.too_short, report.documents, report.split, report.tokens]
    counts += [report.leading, report.joined]
    return [f"{count:,}" for count in counts] + [f"{report.supervised_share:.1%}"]


def tell_roles(report: SourceReport) -> list[str]:
    """One line on unknown roles, if there are any."""
    if not report.unknown_roles:
        return []
    found = ", ".join(f"{role!r} in {count:,} rows" for role, count in report.unknown_roles.items())
    example = f"roles: {{{next(iter(report.unknown_roles))}: user}}"
    return [f"unknown roles of {report.name}: {found}; say what they stand for in the source's roles, as {example}"]


def show_samples(
    sources: list[CountedSource], tokenizer: PreTrainedTokenizerBase, samples: int, console: Console
) -> None:
    """Print usable documents, taken from the sources in turn, each under a line with its number and source."""
    streams = [sample_documents(source, samples) for source in sources]
    in_turn = [stream[index] for index in range(samples) for stream in streams if index < len(stream)]
    marks = ("", "") if console.color_system and not console.no_color else MARKS
    if in_turn and all(marks):
        console.print(f"tokens in {' '.join(marks)} are targets of the heads, the others are context", highlight=False)
    for number, (name, document) in enumerate(in_turn[:samples], start=1):
        title = f"sample {number} of {name}: {document['num_supervised']} of {document['num_tokens']} tokens supervised"
        console.rule(Text(title), align="left")
        console.print(colour(tokenizer, document["input_ids"], document["loss_mask"], marks))
    if in_turn:
        console.rule()


def sample_documents(source: CountedSource, samples: int) -> list[tuple[str, dict[str, Any]]]:
    rows = source.documents.rows
    if source.used is not None:
        # Documents from all over the source: its first ones are often not typical.
        chosen = source.used[np.linspace(0, len(source.used) - 1, min(samples, len(source.used))).astype(int)]
        return [(source.report.name, row) for row in rows.select(chosen)]
    return [(source.report.name, row) for row in islice((row for row in rows if row["status"] == "ok"), samples)]


def colour(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[bool], marks: tuple[str, str] = ("", "")
) -> Text:
    """The decoded tokens, supervised ones green and between marks, the others dim.

    ids of "USER: Hi ASSISTANT: Yes.</s>", mask True on the last three  ->  a dim and a green stretch of text
    """
    text = Text()
    shown = np.asarray(mask[:SHOWN_TOKENS], bool)
    edges = [0, *(np.flatnonzero(shown[1:] != shown[:-1]) + 1).tolist(), len(shown)]
    for start, end in pairwise(edges):
        words = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        words = words.join(marks) if shown[start] else words
        text.append(words, style=GREEN if shown[start] else DIM)
    if len(ids) > SHOWN_TOKENS:
        text.append(f" ... {len(ids) - SHOWN_TOKENS:,} more tokens", style="italic")
    return text


def show_packing(report: DataReport, config: DataConfig, console: Console) -> None:
    if report.packed_train is None:
        console.print(
            f"training: blocks of {config.block_size} tokens, packed ({config.packing}) while they are streamed",
            highlight=False,
        )
    for split, packed in (("training", report.packed_train), ("evaluation", report.packed_eval)):
        if packed is not None:
            console.print(f"{split}: {describe(packed, config.block_size)}", highlight=False)


def describe(packed: PackReport, block_size: int) -> str:
    unused = f", {packed.unused_blocks:,} more not used (max_eval_blocks)" if packed.unused_blocks else ""
    positions = (packed.blocks + packed.unused_blocks) * block_size
    return (
        f"{packed.blocks:,} blocks of {block_size:,} tokens from {packed.documents:,} documents{unused}; "
        f"{packed.cut / packed.documents:.1%} of them cut at edges of blocks, {packed.padding / positions:.1%} "
        f"padding, {packed.dropped_tokens:,} tail tokens dropped"
    )

"""Tokenise the rows of a source into documents, which are cached on disk or streamed.

A document is one text, one row of ids or one conversation; heads never predict across its end. Every row of a source
becomes one row with its counts here, even a bad one, so that reports are exact when documents come from the cache. The
cache is `$HF_DATASETS_CACHE/headway`, with one file for each source, tokenizer, template and format.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from heads.data.chat import choose_template
from heads.data.conversations import BadRowError, EmptyRowError
from heads.data.rows import DOCUMENT_FEATURES, RowFormat, RowTokenizer, parse_row
from heads.data.sources import OpenedRows, first_line, open_rows
from heads.data.streams import ROWS_PER_BATCH, DocumentStream
from heads.extras import needs_extra
from heads.validation import validated, within

with needs_extra("train", "Rows of data are to be read"):
    import datasets
    from datasets import Dataset, IterableDataset
    from datasets.fingerprint import Hasher
    from pyarrow import ArrowException

CHAT_FORMATS = ("sharegpt", "messages", "alpaca")
AUTO_COLUMNS: dict[str, RowFormat] = {  # first match wins: spelled exactly so, then in any case
    "conversations": "sharegpt",
    "messages": "messages",
    "instruction": "alpaca",
    "input_ids": "tokens",
    "tokens": "tokens",
    "text": "text",
}
SAMPLE_ROWS = 20  # read to find out what a source holds
CACHE_VERSION = 3  # raised when the same row becomes other tokens than before


@validated
@dataclass(kw_only=True)
class SourceConfig:
    """One source of rows.

    Attributes:
        path: File (.txt .jsonl .json .parquet .arrow), directory or glob of these, dataset name on the hub, or
            "python-stdlib". A text file is one document, cut at line ends into pieces of about a million characters.
        name: Configuration name of a dataset on the hub.
        split: Split of a hub dataset or directory; "train" or "heldout" for python-stdlib; not used for single files.
        format: What a row holds; "auto" goes by the columns.
        column: Column of the text, token ids or conversation; default "text", "input_ids"/"tokens",
            "conversations"/"messages", in any case. Beside token ids a column `loss_mask` of 0 and 1 may say which of
            them heads learn to predict.
        weight: Share of documents in a mixture, relative to the other sources' weights. Smaller sources are repeated
            until the largest, by its share, has been used up.
        fraction: Share of the rows to use, over 0 and up to 1; sampled with the seed.
        roles: What the roles of a conversation's turns stand for, beside the usual names: {moderator: user}.
    """

    path: str
    name: str | None = None
    split: str = "train"
    format: RowFormat = "auto"
    column: str | None = None
    weight: float = within(above=0, default=1.0)
    fraction: float = within(high=1, above=0, default=1.0)
    roles: dict[str, Literal["user", "assistant", "system", "tool"]] = field(default_factory=dict)


@validated
@dataclass(kw_only=True)
class DataConfig:
    """What to train and evaluate on.

    Attributes:
        train: Sources to train on.
        eval: Sources to evaluate on; when empty, eval_fraction is taken from the training rows.
        eval_fraction: Share of training documents, whole ones, set aside for evaluation; 0 for none.
        block_size: Tokens in a packed row.
        packing: "cut" lays documents end to end and cuts them at the edges of rows, without padding; "whole" keeps each
            in one row where it fits, for chats, and pads what is left.
        max_eval_blocks: Use at most so many packed rows for evaluation; null for all.
        streaming: Read the training rows when they are needed, without a copy on disk.
        attend_across_documents: Let attention cross document boundaries within a block; heads never predict across.
        chat_template: "vicuna", a Jinja file, or null for the tokenizer's own.
        heldout_list: JSON file whose "heldout_files" names the files that python-stdlib holds out.
        seed: Seed of shuffling, subsets, mixtures and the evaluation split.
        num_proc: Processes that tokenise; null for this one.
        max_bad_fraction: Share of a source's rows that may be bad, from 0 to 1; more stop the run.
    """

    train: list[SourceConfig]
    eval: list[SourceConfig] = field(default_factory=list)
    eval_fraction: float = within(0, below=1, default=0.0)
    block_size: int = within(2, default=2048)
    packing: Literal["cut", "whole"] = "cut"
    max_eval_blocks: int | None = within(1, default=None, advice="null takes all")
    streaming: bool = False
    attend_across_documents: bool = False
    chat_template: str | None = None
    heldout_list: str | None = None
    seed: int = within(0, 2**32 - 1, default=0)
    num_proc: int | None = within(1, default=None)
    max_bad_fraction: float = within(0, 1, default=0.01)


@dataclass(kw_only=True)
class Documents:
    """The tokenised rows of one source, columns as in DOCUMENT_FEATURES.

    Attributes:
        stream: where `rows` come from, if they are tokenised when they are read.
    """

    name: str
    is_chat: bool
    weight: float
    rows: Dataset | IterableDataset
    stream: DocumentStream | None = None


def load_documents(
    source: SourceConfig, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, streaming: bool = False
) -> Documents:
    """A source's documents: tokenised now and cached, or with `streaming` tokenised when they are read."""
    rows, format, column = open_source(source, config, streaming=streaming)
    is_chat = format in CHAT_FORMATS
    template = choose_template(tokenizer, config.chat_template) if is_chat else None
    tokenize = RowTokenizer(tokenizer, source.path, format, column, template, source.roles)
    stream = None
    if isinstance(rows, Dataset):
        rows = tokenize_cached(rows, tokenize, source.fraction, config)
    else:
        columns = list(next(iter(rows)))
        stream = DocumentStream(
            rows=rows, columns=columns, tokenize=tokenize, fraction=source.fraction, seed=config.seed
        )
        rows = stream.documents()
    return Documents(name=source.path, is_chat=is_chat, weight=source.weight, rows=rows, stream=stream)


def open_source(source: SourceConfig, config: DataConfig, *, streaming: bool) -> tuple[OpenedRows, RowFormat, str]:
    """A source's rows, their format, and the column with their content.

    Raises:
        ValueError: the rows cannot be read, there are none, or their format cannot be found.
    """
    rows = open_rows(source.path, source.name, source.split, config.heldout_list, streaming=streaming)
    try:
        samples: list[dict[str, Any]] = list(islice(rows, SAMPLE_ROWS))
    except ArrowException as error:  # a stream reads its files only now
        raise ValueError(f"{source.path!r} could not be read: {first_line(error)}; check the files.") from None
    if not samples:
        raise ValueError(f"{source.path!r} holds no rows; give a source with rows.")
    return rows, *detect_format(samples, source)


def tokenize_cached(rows: Dataset, tokenize: RowTokenizer, fraction: float, config: DataConfig) -> Dataset:
    rows, numbers = sample_rows(rows, fraction, config.seed)
    fingerprint = Hasher.hash((CACHE_VERSION, rows._fingerprint, tokenize.identity()))
    return rows.map(
        tokenize,
        with_indices=True,
        batched=True,
        batch_size=ROWS_PER_BATCH,
        remove_columns=rows.column_names,
        features=DOCUMENT_FEATURES,
        fn_kwargs={"row_numbers": numbers},
        num_proc=config.num_proc,
        cache_file_name=str(cache_file("documents", fingerprint)),
        new_fingerprint=fingerprint,
        desc=f"Tokenising {tokenize.name}",
    )


def sample_rows(rows: Dataset, fraction: float, seed: int) -> tuple[Dataset, np.ndarray]:
    """A random share of the rows, in their order, and their numbers in the source."""
    if fraction == 1:
        return rows, np.arange(len(rows))
    count = max(1, round(len(rows) * fraction))
    numbers = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
    return rows.select(numbers), numbers


def find_usable(status: ArrayLike, num_tokens: ArrayLike, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the rows that are documents, and of those with num_heads + 2 tokens, so that each head has a label.

    >>> [found.tolist() for found in find_usable(["ok", "bad", "ok"], [9, 9, 3], num_heads=2)]
    [[True, False, True], [True, False, False]]
    """
    good = np.asarray(status) == "ok"
    return good, good & (np.asarray(num_tokens) >= num_heads + 2)


def split_held_out(usable: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of a source's usable rows, shuffled by the seed: the share that is held out, and the others.

    >>> held_out, others = split_held_out(np.arange(10), 0.2, seed=0)
    >>> len(held_out), sorted([*held_out.tolist(), *others.tolist()])
    (2, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> [len(part) for part in split_held_out(np.arange(10), 0.0, seed=0)]
    [0, 10]
    """
    shuffled = np.random.default_rng(seed).permutation(usable)
    count = max(1, round(len(shuffled) * share)) if share else 0
    return shuffled[:count], shuffled[count:]


def cache_file(kind: str, fingerprint: str) -> Path:
    """The cache file of tokenised documents or packed blocks with this fingerprint."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "headway"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{fingerprint}.arrow"


def detect_format(samples: Sequence[dict[str, Any]], source: SourceConfig) -> tuple[RowFormat, str]:
    """The format of a source's rows and the column with their content, found from the first rows.

    [{"id": 1, "conversations": [...]}]  ->  ("sharegpt", "conversations")
    [{"Tokens": [5, 6]}]                 ->  ("tokens", "Tokens")
    """
    first: dict[str, Any] = {}
    for sample in samples:
        with suppress(BadRowError, EmptyRowError):
            first |= {key: value for key, value in parse_row(sample).items() if first.get(key) is None}
    columns = [name for name in first if name != "_place"]
    if source.format == "auto" and source.column is None:
        found = [(AUTO_COLUMNS[name.lower()], name) for name in match_columns(AUTO_COLUMNS, columns)]
    elif source.format == "auto":
        found = [(format_of_value(first.get(source.column)), source.column)] if source.column in first else []
    else:
        usual = [name for name, format in AUTO_COLUMNS.items() if format == source.format]
        usual += ["messages", "conversations"] if source.format in ("sharegpt", "messages") else []
        wanted = [source.column] if source.column else match_columns(usual, columns)
        found = [(source.format, name) for name in wanted if name in first]
    if not found:
        raise ValueError(
            f"{source.path!r} has the columns {', '.join(columns) or '(none that could be read)'}, in which no "
            f"{'text, token ids or chat' if source.format == 'auto' else source.format} was found; "
            "set format and column."
        )
    return found[0]


def match_columns(usual: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Columns that have one of the usual names: first those spelled the same, then those in another case ("Tokens")."""
    usual = list(usual)
    exact = [name for name in usual if name in columns]
    return exact + [column for name in usual for column in columns if column != name and column.lower() == name]


def format_of_value(value: Any) -> RowFormat:
    if isinstance(value, str):
        return "text"
    turns = value if isinstance(value, list) else [value]
    return "messages" if turns and isinstance(turns[0], dict) else "tokens"

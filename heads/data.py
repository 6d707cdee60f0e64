"""Rows to tokenised documents: text, token ids and chats from files, directories, the hub or the standard library.

A document is what heads may predict within: one text, one row of ids, one conversation. Every row of a source becomes
one row here, good or not, with its counts beside it, so that reports are exact even when nothing is recomputed.
Tokenised documents are cached under `$HF_DATASETS_CACHE/headway`, one file per source, tokenizer, template and format.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from heads.chat import (
    BadRowError,
    ChatEncoder,
    EmptyRowError,
    alpaca_messages,
    choose_template,
    kind_of,
    read_conversation,
)
from heads.corpora import open_rows

Format = Literal["auto", "text", "tokens", "sharegpt", "messages", "alpaca"]
Encoded = tuple[Sequence[int], Sequence[bool] | None]  # token ids and mask; None: all True
CHAT_FORMATS = ("sharegpt", "messages", "alpaca")
AUTO_COLUMNS: dict[str, Format] = {  # first match wins
    "conversations": "sharegpt",
    "messages": "messages",
    "instruction": "alpaca",
    "input_ids": "tokens",
    "tokens": "tokens",
    "text": "text",
}
DOCUMENT_FEATURES = Features(
    {
        "row_number": Value("int64"),  # in the source, from 0
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "num_tokens": Value("int64"),
        "num_supervised": Value("int64"),
        "max_id": Value("int64"),
        "status": Value("string"),  # "ok", "bad" or "empty"
        "problem": Value("string"),  # where and why, for a bad row
    }
)
TEXT_OPTIONS = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
SAMPLE_ROWS = 20  # looked at to find out what a source holds
DRAW_FRACTION, DRAW_EVAL = 0, 1  # purposes of a seeded draw per row
CACHE_VERSION = 1  # raise it when the same row would become other tokens than before
ROWS_PER_BATCH = 64  # a few megabytes of text at most, so that one batch never fills the memory


@dataclass(kw_only=True)
class SourceConfig:
    """One source of rows.

    Attributes:
        path: File (.txt .jsonl .json .parquet .arrow), directory or glob of these, dataset name on the hub, or
            "python-stdlib". A text file is one document, cut at line ends into pieces of about a million characters.
        name: Configuration name of a dataset on the hub.
        split: Split of a hub dataset or directory; "train" or "heldout" for python-stdlib; not used for single files.
        format: What a row holds; "auto" goes by the columns.
        column: Text, token-id or conversation column; default "text", "input_ids"/"tokens", "conversations"/"messages".
        weight: Share of documents in a mixture, relative to the other sources' weights. Smaller sources are repeated
            until the largest, by its share, has been used up.
        fraction: Random subset of the rows to use, over 0 and up to 1; drawn by the seed.
    """

    path: str
    name: str | None = None
    split: str = "train"
    format: Format = "auto"
    column: str | None = None
    weight: float = 1.0
    fraction: float = 1.0


@dataclass(kw_only=True)
class DataConfig:
    """What is trained on and measured.

    Attributes:
        train: Sources to train on.
        eval: Sources to evaluate on; when empty, eval_fraction is taken from the training rows.
        eval_fraction: Share of training documents set aside for evaluation, whole and before packing; 0 for none.
        block_size: Tokens in a packed row.
        max_eval_blocks: Use at most so many packed rows for evaluation; null for all.
        streaming: Read the training rows as they are needed, without a copy on disk.
        attend_across_documents: Let attention cross document boundaries within a block; heads never predict across.
        chat_template: "vicuna", a Jinja file, or null for the tokenizer's own.
        heldout_list: JSON file whose "heldout_files" names the files that python-stdlib holds out.
        seed: Seed of shuffling, subsets, mixtures and the evaluation split.
        num_proc: Processes that tokenise; null for this one.
    """

    train: list[SourceConfig]
    eval: list[SourceConfig] = field(default_factory=list)
    eval_fraction: float = 0.0
    block_size: int = 2048
    max_eval_blocks: int | None = None
    streaming: bool = False
    attend_across_documents: bool = False
    chat_template: str | None = None
    heldout_list: str | None = None
    seed: int = 0
    num_proc: int | None = None


@dataclass(kw_only=True)
class Documents:
    """The tokenised rows of one source, columns as in DOCUMENT_FEATURES."""

    name: str
    is_chat: bool
    weight: float
    rows: Dataset | IterableDataset


def load_documents(
    source: SourceConfig, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, streaming: bool = False
) -> Documents:
    """All rows of a source as documents, tokenised and cached; with `streaming`, tokenised as they are asked for."""
    if not 0 < source.fraction <= 1 or source.weight <= 0:
        raise ValueError(
            f"{source.path!r} has fraction {source.fraction} and weight {source.weight}; "
            "give a fraction over 0 and up to 1, and a weight over 0."
        )
    rows = open_rows(source.path, source.name, source.split, config.heldout_list, streaming=streaming)
    samples: list[dict[str, Any]] = list(islice(rows, SAMPLE_ROWS))
    if not samples:
        raise ValueError(f"{source.path!r} holds no rows; give a source with rows.")
    format, column = detect_format(samples, source)
    is_chat = format in CHAT_FORMATS
    template = choose_template(tokenizer, config.chat_template) if is_chat else None
    tokenize = RowTokenizer(tokenizer, source.path, format, column, template)
    if isinstance(rows, Dataset):
        rows = tokenize_cached(rows, tokenize, source.fraction, config)
    else:
        rows = tokenize_streamed(rows, tokenize, source.fraction, config.seed, list(samples[0]))
    return Documents(name=source.path, is_chat=is_chat, weight=source.weight, rows=rows)


def tokenize_cached(rows: Dataset, tokenize: "RowTokenizer", fraction: float, config: DataConfig) -> Dataset:
    numbers = np.arange(len(rows))
    if fraction < 1:
        count = max(1, round(len(rows) * fraction))
        numbers = np.sort(np.random.default_rng(config.seed).permutation(len(rows))[:count])
        rows = rows.select(numbers)
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


def tokenize_streamed(
    rows: IterableDataset, tokenize: "RowTokenizer", fraction: float, seed: int, columns: list[str]
) -> IterableDataset:
    rows = rows.map(number_rows, with_indices=True, batched=True)
    if fraction < 1:
        chosen = partial(draw_below, share=fraction, purpose=DRAW_FRACTION, seed=seed)
        rows = rows.filter(chosen, input_columns=["row_number"])
    return rows.map(
        tokenize, batched=True, batch_size=ROWS_PER_BATCH, remove_columns=columns, features=DOCUMENT_FEATURES
    )


def cache_file(kind: str, fingerprint: str) -> Path:
    """Where tokenised documents or packed blocks with this fingerprint lie."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "headway"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{fingerprint}.arrow"


def number_rows(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
    return {"row_number": indices}


def draw_below(row_number: int, *, share: float, purpose: int, seed: int) -> bool:
    """A draw that depends on the seed, what it is for and the row's number alone, so that a stream needs no memory."""
    return bool(np.random.default_rng((seed, purpose, row_number)).random() < share)


def detect_format(samples: Sequence[dict[str, Any]], source: SourceConfig) -> tuple[Format, str]:
    """What the rows of a source hold, and in which column, from its first rows.

    [{"id": 1, "conversations": [...]}]  ->  ("sharegpt", "conversations")
    """
    first: dict[str, Any] = {}
    for sample in samples:
        with suppress(BadRowError):
            first |= {key: value for key, value in parse_row(sample).items() if first.get(key) is None}
    columns = [name for name in first if name != "_place"]
    if source.format == "auto" and source.column is None:
        named = [(format, name) for name, format in AUTO_COLUMNS.items() if name in first]
    elif source.format == "auto":
        named = [(format_of_value(first.get(source.column)), source.column)] if source.column in first else []
    else:
        usual = [name for name, format in AUTO_COLUMNS.items() if format == source.format]
        usual += ["messages", "conversations"] if source.format in ("sharegpt", "messages") else []
        named = [(source.format, name) for name in ([source.column] if source.column else usual) if name in first]
    if not named:
        raise ValueError(
            f"{source.path!r} has the columns {', '.join(columns) or '(none that could be read)'}, in which no "
            f"{'text, token ids or chat' if source.format == 'auto' else source.format} was found; "
            "set format and column."
        )
    return named[0]


def format_of_value(value: Any) -> Format:
    if isinstance(value, str):
        return "text"
    turns = value if isinstance(value, list) else [value]
    return "messages" if turns and isinstance(turns[0], dict) else "tokens"


def parse_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row's fields; those of a JSON line are inside the line."""
    if "_json_line" not in row:
        return row
    if not row["_json_line"]:
        raise BadRowError("an empty line")
    try:
        fields = json.loads(row["_json_line"])
        if b"\\u" in row["_json_line"]:
            json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(fields, dict):
        raise BadRowError(f"{kind_of(fields)}, not an object with fields")
    return fields


def document_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids put before and behind every text, so that a model sees where one ends.

    bos is eos (GPT-2, GPT-NeoX, the demo)       ->  [eos] text
    the tokenizer begins with bos itself (Llama) ->  [bos] text [eos]
    otherwise (Qwen)                             ->        text [eos]
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and eos is None:
        raise ValueError("The tokenizer has neither bos_token nor eos_token to keep documents apart; set eos_token.")
    if bos == eos:
        return [eos], []
    begins_with_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return [bos] if begins_with_bos or eos is None else [], [] if eos is None else [eos]


class RowTokenizer:
    """Turns a batch of rows into documents; a row that cannot become one stays, with its place and the reason."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str, format: Format, column: str, template: str | None
    ):
        self.tokenizer, self.name, self.format, self.column, self.template = tokenizer, name, format, column, template
        self.chat = ChatEncoder(tokenizer, template) if template is not None else None
        self.frame = document_frame(tokenizer) if format == "text" else ([], [])

    def identity(self) -> tuple[Any, ...]:
        """All that decides which tokens a row becomes, for the cache."""
        tokenizer = self.tokenizer
        if tokenizer.is_fast:
            state = json.loads(tokenizer.backend_tokenizer.to_str())
            state |= {"truncation": None, "padding": None}  # set anew by every call
        else:
            state = tokenizer.get_vocab()
        words = json.dumps([state, tokenizer.special_tokens_map], sort_keys=True)
        return type(tokenizer).__name__, words, self.frame, self.name, self.format, self.column, self.template

    def __call__(
        self, batch: dict[str, list[Any]], indices: Sequence[int] = (), row_numbers: np.ndarray | None = None
    ) -> dict[str, list[Any]]:
        numbers = batch["row_number"] if row_numbers is None else row_numbers[indices].tolist()
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        results = [self.read(row, number) for row, number in zip(rows, numbers, strict=True)]
        texts = [text for text, _, _, _ in results if text]
        encoded = iter(self.tokenizer(texts, **TEXT_OPTIONS)["input_ids"] if texts else [])
        columns: dict[str, list[Any]] = {name: [] for name in DOCUMENT_FEATURES}
        for number, (text, (ids, mask), status, problem) in zip(numbers, results, strict=True):
            if text:
                ids = self.frame[0] + next(encoded) + self.frame[1]
            ids_T = np.asarray(ids, np.int32)
            mask_T = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
            values = (number, ids_T, mask_T, len(ids_T), mask_T.sum(), ids_T.max(initial=-1), status, problem)
            for name, value in zip(DOCUMENT_FEATURES, values, strict=True):
                columns[name].append(value)
        return columns

    def read(self, row: dict[str, Any], number: int) -> tuple[str, Encoded, str, str]:
        """Text still to be tokenised, or ids and mask (None: all True), and what is wrong with the row."""
        nothing: Encoded = ([], None)
        try:
            fields = parse_row(row)
            if self.format == "text":
                return read_text(fields.get(self.column)), nothing, "ok", ""
            if self.format == "tokens":
                return "", (read_ids(fields.get(self.column)), None), "ok", ""
            alpaca = self.format == "alpaca"
            messages = alpaca_messages(fields) if alpaca else read_conversation(fields.get(self.column))
            assert self.chat is not None
            return "", self.chat.encode(messages), "ok", ""
        except EmptyRowError as problem:
            return "", nothing, "empty", f"{self.place(row, number)}: {problem}"
        except BadRowError as problem:
            return "", nothing, "bad", f"{self.place(row, number)}: {problem}"

    def place(self, row: dict[str, Any], number: int) -> str:
        return row.get("_place") or f"{self.name} row {number + 1}"


def read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"the text is {kind_of(value)}")
    if not value.strip():
        raise EmptyRowError("no text")
    return value


def read_ids(value: Any) -> list[int]:
    """Token ids of a row, which must be whole numbers from 0."""
    if not isinstance(value, list):
        raise BadRowError(f"the token ids are {kind_of(value)}, not a list")
    if not value:
        raise EmptyRowError("no token ids")
    if not all(type(item) is int for item in value):
        raise BadRowError("the token ids are not all whole numbers")
    if min(value) < 0 or max(value) > np.iinfo(np.int32).max:
        raise BadRowError(f"the token ids reach from {min(value)} to {max(value)}")
    return value

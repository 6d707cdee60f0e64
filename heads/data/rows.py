"""Turn rows of data into documents: text, token ids or a chat become token ids and a mask of the heads' targets.

A row that cannot become a document becomes an empty one, with its place and the reason, so that it can be counted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from heads.data.chat import ChatEncoder
from heads.data.conversations import (
    BadRowError,
    Changes,
    EmptyRowError,
    Message,
    UnknownRoleError,
    alpaca_messages,
    kind_of,
    read_conversation,
)
from heads.extras import needs_extra

with needs_extra("train", "Rows of data were requested"):
    from datasets import Features, List, Value

RowFormat = Literal["auto", "text", "tokens", "sharegpt", "messages", "alpaca"]
Encoded = tuple[Sequence[int], Sequence[bool] | None]  # token ids and mask; None: all True
Read = tuple[str, Encoded, str, str, Changes, str]  # text or ids, status, problem, changes, unknown role
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
        "leading": Value("int64"),  # replies before the first user's turn, which are dropped
        "joined": Value("int64"),  # turns joined to the one before them
        "unknown_role": Value("string"),  # for which the row is bad
    }
)
TEXT_OPTIONS = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}


class RowTokenizer:
    """Turns a batch of rows into a batch of documents."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        format: RowFormat,
        column: str,
        template: str | None,
        roles: Mapping[str, str] | None = None,
    ):
        self.tokenizer, self.name, self.format, self.column, self.template = tokenizer, name, format, column, template
        self.roles = dict(roles or {})
        self.chat = ChatEncoder(tokenizer, template) if template is not None else None
        self.frame = document_frame(tokenizer) if format == "text" else ([], [])

    def identity(self) -> tuple[Any, ...]:
        """Everything that a row's tokens depend on, which is a part of the cache's fingerprint."""
        tokenizer = self.tokenizer
        if tokenizer.is_fast:
            state = json.loads(tokenizer.backend_tokenizer.to_str())
            state |= {"truncation": None, "padding": None}  # every call sets them anew
        else:
            state = tokenizer.get_vocab()
        words = json.dumps([state, tokenizer.special_tokens_map], sort_keys=True)
        return (
            type(tokenizer).__name__,
            words,
            self.frame,
            self.name,
            self.format,
            self.column,
            self.template,
            self.roles,
        )

    def __call__(
        self, batch: dict[str, list[Any]], indices: Sequence[int] = (), row_numbers: np.ndarray | None = None
    ) -> dict[str, list[Any]]:
        numbers = batch["row_number"] if row_numbers is None else row_numbers[indices].tolist()
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        results = [self.read(row, number) for row, number in zip(rows, numbers, strict=True)]
        texts = [text for text, *_ in results if text]
        encoded = iter(self.tokenizer(texts, **TEXT_OPTIONS)["input_ids"] if texts else [])
        columns: dict[str, list[Any]] = {name: [] for name in DOCUMENT_FEATURES}
        for number, (text, (ids, mask), status, problem, changes, role) in zip(numbers, results, strict=True):
            if text:
                ids = self.frame[0] + next(encoded) + self.frame[1]
            ids_T = np.asarray(ids, np.int32)
            mask_T = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
            counts = len(ids_T), mask_T.sum(), ids_T.max(initial=-1)
            values = (number, ids_T, mask_T, *counts, status, problem, changes.leading, changes.joined, role)
            for name, value in zip(DOCUMENT_FEATURES, values, strict=True):
                columns[name].append(value)
        return columns

    def read(self, row: dict[str, Any], number: int) -> Read:
        """A text to tokenise, or ids with their mask; then status, problem, changes and unknown role."""
        nothing: Encoded = ([], None)
        changes = Changes()
        try:
            fields = parse_row(row)
            if self.format == "text":
                return read_text(fields.get(self.column)), nothing, "ok", "", changes, ""
            if self.format == "tokens":
                ids = read_ids(fields.get(self.column))
                return "", (ids, read_mask(fields.get("loss_mask"), len(ids))), "ok", "", changes, ""
            assert self.chat is not None
            messages = read_messages(fields, self.format, self.column, self.roles, changes)
            return "", self.chat.encode(messages), "ok", "", changes, ""
        except EmptyRowError as problem:
            return "", nothing, "empty", f"{self.place(row, number)}: {problem}", changes, ""
        except BadRowError as problem:
            role = problem.role if isinstance(problem, UnknownRoleError) else ""
            return "", nothing, "bad", f"{self.place(row, number)}: {problem}", changes, role

    def place(self, row: dict[str, Any], number: int) -> str:
        return row.get("_place") or f"{self.name} row {number + 1}"


def document_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and after every text, which show a model where one ends.

    bos is eos (GPT-2, GPT-NeoX, the demo)       ->  [eos] text
    the tokenizer begins with bos itself (Llama) ->  [bos] text [eos]
    there is no eos                              ->  [bos] text
    otherwise (Qwen)                             ->        text [eos]

    Raises:
        ValueError: the tokenizer has neither.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and eos is None:
        raise ValueError("The tokenizer has neither bos_token nor eos_token to keep documents apart; set eos_token.")
    if bos == eos:
        return [eos], []
    begins_with_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return [bos] if begins_with_bos or eos is None else [], [] if eos is None else [eos]


def parse_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row's fields, parsed if the row is a JSON line."""
    if "_json_line" not in row:
        return row
    if not row["_json_line"]:
        raise EmptyRowError("a blank line")
    try:
        fields = json.loads(row["_json_line"])
        if b"\\u" in row["_json_line"]:
            json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(fields, dict):
        raise BadRowError(f"{kind_of(fields)}, not an object with fields")
    return fields


def read_messages(
    fields: dict[str, Any],
    format: RowFormat,
    column: str,
    roles: Mapping[str, str] | None = None,
    changes: Changes | None = None,
) -> list[Message]:
    """The conversation in a row of a chat format."""
    if format == "alpaca":
        return alpaca_messages(alpaca_fields(fields))
    return read_conversation(fields.get(column), roles, changes)


def read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"the text is {kind_of(value)}")
    if not value.strip():
        raise EmptyRowError("no text")
    return value


def read_ids(value: Any) -> list[int]:
    """Token ids of a row: whole numbers from 0."""
    if not isinstance(value, list):
        raise BadRowError(f"the token ids are {kind_of(value)}, not a list")
    if not value:
        raise EmptyRowError("no token ids")
    if not all(type(item) is int for item in value):
        raise BadRowError("the token ids are not all whole numbers")
    if min(value) < 0 or max(value) > np.iinfo(np.int32).max:
        raise BadRowError(f"the token ids reach from {min(value)} to {max(value)}")
    return value


def read_mask(value: Any, length: int) -> list[bool] | None:
    """The loss_mask beside token ids, if any: 1 if the token is a target of the heads, 0 if it is only context."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise BadRowError(f"the loss_mask is {kind_of(value)}, not a list")
    if len(value) != length:
        raise BadRowError(f"the loss_mask has {len(value)} values for {length} token ids")
    if not all(type(item) in (int, bool) and item in (0, 1) for item in value):
        raise BadRowError("the loss_mask has values other than 0 and 1")
    return list(map(bool, value))


def alpaca_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A row's fields with the names of `alpaca_messages`, which some sources spell "Instruction" and "Output"."""
    return fields if "instruction" in fields else {name.lower(): value for name, value in fields.items()}

"""The rows of `data.train` in their order, each turned into the prompts that the backbone continues."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from datasets import Dataset

from heads.data.chat import choose_template
from heads.data.conversations import BadRowError, EmptyRowError
from heads.data.documents import CHAT_FORMATS, DataConfig, open_source, sample_rows
from heads.data.rows import TEXT_OPTIONS, RowFormat, document_frame, parse_row, read_ids, read_messages, read_text
from train.regenerate.config import RegenerateConfig
from train.regenerate.rewriting import Rewriting, Tally, continue_text, end_of_turn, rewrite_chat


@dataclass(kw_only=True)
class OpenedSource:
    """One opened source of the config's data: the rows in use and how they are read."""

    name: str
    rows: Dataset
    format: RowFormat
    column: str
    roles: Mapping[str, str]


class SourceRows:
    """Rows of all sources, one source after the other; weights are not applied.

    A row of text gives `prompts_per_text` lines, a conversation one.

    Raises:
        ValueError: the data is streamed, or has both conversations and texts.
    """

    def __init__(self, data: DataConfig, config: RegenerateConfig, tokenizer: Any, vocab_size: int) -> None:
        if data.streaming:
            raise ValueError(
                "regenerate-data reads stored rows, in which it can resume; give --data.streaming false, and files or "
                "a fraction where the data is large."
            )
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.sources = [read_source(source, data) for source in data.train]
        self.is_chat = refuse_mixture(self.sources)
        self.per_row = 1 if self.is_chat else config.prompts_per_text
        self.template = choose_template(tokenizer, data.chat_template) if self.is_chat else None
        self.frame = document_frame(tokenizer)
        self.ends = find_ends(tokenizer, self.template)
        self.stops = list(accumulate(len(source.rows) for source in self.sources))

    def __len__(self) -> int:
        """Number of rows; each gives `per_row` lines."""
        return self.stops[-1] if self.stops else 0

    @property
    def lines(self) -> int:
        """Number of lines of all rows."""
        return self.per_row * len(self)

    @property
    def fingerprint(self) -> list[str]:
        """The fingerprint of each source's rows."""
        return [source.rows._fingerprint for source in self.sources]

    def rewriting(self, line: int, fits: Callable[[Sequence[int]], bool], tally: Tally) -> Rewriting:
        """The coroutine that makes line number `line`. Bad or empty rows give empty lines; bad ones are counted.

        A template may reject a conversation at any turn; the whole row is bad then, as it is in training.
        """
        row, place = divmod(line, self.per_row)
        number = bisect_right(self.stops, row)
        source = self.sources[number]
        within = row - (self.stops[number - 1] if number else 0)
        fields = source.rows[within]
        try:
            return (yield from self.rewriting_of(parse_row(fields), source, place, fits, tally))
        except EmptyRowError:
            pass
        except BadRowError as problem:
            tally.bad += place == 0
            tally.first_problem = tally.first_problem or (
                f"{fields.get('_place') or f'{source.name} row {within + 1}'}: {problem}"
            )
        return {"messages" if self.is_chat else "input_ids": []}

    def rewriting_of(
        self,
        fields: dict[str, Any],
        source: OpenedSource,
        place: int,
        fits: Callable[[Sequence[int]], bool],
        tally: Tally,
    ) -> Rewriting:
        if self.template is not None:
            messages = read_messages(fields, source.format, source.column, source.roles)
            return rewrite_chat(messages, tokenizer=self.tokenizer, template=self.template, fits=fits, tally=tally)
        prompt = self.prompt(fields, source, place)
        frame = self.frame[1] if source.format == "text" else []
        return continue_text(prompt, frame=frame, ends=self.ends, tokenizer=self.tokenizer, tally=tally)

    def first_prompts(self) -> Iterator[list[int]]:
        """The first prompt of each conversation; none for a conversation that is bad or has no answer to generate."""
        for line in range(len(self)):
            with suppress(StopIteration):
                yield next(self.rewriting(line, lambda prompt: True, Tally())).tokens

    def prompt(self, fields: dict[str, Any], source: OpenedSource, place: int) -> list[int]:
        """Tokens of a text from one of its `per_row` places; at the first, after what training puts before a text."""
        tokens, before = self.tokens(fields.get(source.column), source.format)
        length = self.config.prompt_tokens
        if place and len(tokens) < length * self.per_row:
            raise EmptyRowError("too short for several prompts")
        start = place * len(tokens) // self.per_row
        return [*(before if place == 0 else []), *tokens[start : start + length]]

    def tokens(self, value: Any, format: RowFormat) -> tuple[list[int], list[int]]:
        if format == "text":
            return self.tokenizer(read_text(value), **TEXT_OPTIONS)["input_ids"], self.frame[0]
        tokens = read_ids(value)
        if max(tokens) >= self.vocab_size:
            raise BadRowError(f"it has the token id {max(tokens)}, and the backbone knows {self.vocab_size} tokens")
        return tokens, []


def read_source(source: Any, data: DataConfig) -> OpenedSource:
    rows, format, column = open_source(source, data, streaming=False)
    assert isinstance(rows, Dataset), "streaming is refused"
    rows, _ = sample_rows(rows, source.fraction, data.seed)
    return OpenedSource(name=source.path, rows=rows, format=format, column=column, roles=source.roles)


def refuse_mixture(sources: Sequence[OpenedSource]) -> bool:
    """Whether the sources are conversations.

    Raises:
        ValueError: some are conversations and some are texts.
    """
    kinds = {source.format in CHAT_FORMATS for source in sources}
    if len(kinds) > 1:
        given = ", ".join(f"{source.name} ({source.format})" for source in sources)
        raise ValueError(
            f"data.train has {given}; a file holds either conversations or texts: regenerate each kind by itself with "
            f"--data.train."
        )
    return kinds == {True}


def find_ends(tokenizer: Any, template: str | None) -> list[int]:
    """Tokens at which a text or an answer ends.

    Raises:
        ValueError: there is none.
    """
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ends += end_of_turn(tokenizer, template) if template is not None else []
    if not ends:
        raise ValueError("The tokenizer has no eos_token, so no text would ever end; set eos_token.")
    return list(dict.fromkeys(ends))

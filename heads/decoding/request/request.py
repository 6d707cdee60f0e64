"""What one `generate` call asks for, and its rows: how tokens are chosen, and when a row ends.

Processors and stopping criteria are Hugging Face's own objects. A row calls each of them once for every emitted token,
in order, with that token's own prefix, as plain generation does for a batch of one. Only processors that cannot tell
the difference are called for all nodes of a pass together (heads/decoding/acceptance/batched.py).
"""
# B batch, T prompt position, L length so far, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)

STATEFUL = (SynthIDTextWatermarkLogitsProcessor,)
"""Processors of transformers that keep a state from call to call."""

Choose = Callable[[Tensor], int]
"""Chooses one token from processed scores (1, V)."""


def choose_best(scores_1V: Tensor) -> int:
    """Greedy: the most likely token, and the one that `torch.argmax` returns of equals, as in `generate`."""
    return int(scores_1V.argmax(dim=-1))


def choose_sampled(generator: torch.Generator | None) -> Choose:
    """Sampling: one token from softmax(scores), by the same call that `generate` makes."""

    def choose(scores_1V: Tensor) -> int:
        probs_1V = torch.softmax(scores_1V, dim=-1)
        return int(torch.multinomial(probs_1V, num_samples=1, generator=generator))

    return choose


@dataclass(kw_only=True)
class Request:
    """A checked request.

    Attributes:
        processors: logits processors in the order of `generate`.
        max_length: number of tokens, prompt and padding included, at which a row ends.
        eos_tokens: tokens that end a row; they are emitted.
        criteria: further stopping criteria.
        keep_scores, keep_logits: return the processed scores, the raw logits of each emitted token.
        as_dict: return an output object with statistics.
        keep_cache: return the KV cache of a single row.
        generator: source of randomness for sampling; None is torch's global one.
        penalised_from: how many of a row's first tokens a repetition penalty ignores, padding included.
    """

    processors: LogitsProcessorList
    choose: Choose
    max_length: int
    eos_tokens: frozenset[int]
    criteria: StoppingCriteriaList
    pad_token: int
    keep_scores: bool
    keep_logits: bool
    as_dict: bool
    keep_cache: bool
    greedy: bool
    generator: torch.Generator | None = None
    penalised_from: int = 0

    @property
    def needs_argmax_alone(self) -> bool:
        """Whether the argmax of raw logits is the chosen token, and nothing else about the logits is asked for."""
        return self.greedy and not self.processors and not self.keep_scores and not self.keep_logits

    def processors_of(self, row: int) -> LogitsProcessorList:
        """The processors for one row.

        A processor that differs from row to row has a method `of_row(row)`, which returns the one for a row. A
        processor of transformers that has a state is copied, since rows are at different lengths. A repetition penalty
        that ignores each row's padding is given this row's alone.
        """
        own = LogitsProcessorList()
        for processor in (of_row(processor, row) for processor in self.processors):
            if isinstance(processor, STATEFUL):
                processor = copy.deepcopy(processor)
            padding = getattr(processor, "prompt_ignore_length", None)
            if isinstance(padding, Tensor) and len(padding) > 1:
                processor = copy.copy(processor)
                processor.prompt_ignore_length = padding[row : row + 1]
            own.append(processor)
        return own

    def criteria_of(self, row: int) -> StoppingCriteriaList:
        return StoppingCriteriaList(of_row(criterion, row) for criterion in self.criteria)


def may_keep_state(processor: Any) -> bool:
    """Whether a processor may depend on earlier calls; those of transformers do only if they are `STATEFUL`."""
    return isinstance(processor, STATEFUL) or not type(processor).__module__.startswith("transformers.")


def fork(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors for drafts that may not be emitted: those that may keep a state are copied.

    Raises:
        ValueError: a processor cannot be copied.
    """
    return LogitsProcessorList(copied(p) if may_keep_state(p) else p for p in processors)


def copied(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor)
    except (TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{type(processor).__name__} cannot be copied ({error}), but rule='typical' and DynamicDecoding call "
            f"a copy of it for each token that may yet be rejected; give it a __deepcopy__, or decode by "
            f"TreeDecoding with rule='exact' or 'rejection'."
        ) from error


def of_row(processor: Any, row: int) -> Any:
    return processor.of_row(row) if hasattr(processor, "of_row") else processor


@dataclass(kw_only=True)
class Row:
    """One row's text while it is decoded; `index` is its index in the batch that the call began with."""

    request: Request
    tokens: list[int]
    device: torch.device
    index: int = 0
    done: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    _buffer_1L: Tensor | None = None
    _written: int = 0

    def __post_init__(self) -> None:
        self.processors = self.request.processors_of(self.index)
        self.criteria = self.request.criteria_of(self.index)

    def prefix(self) -> Tensor:
        """(1, L): the tokens so far, on the device; only tokens emitted since the last call are copied to it."""
        length = len(self.tokens)
        if self._buffer_1L is None or self._buffer_1L.shape[1] < length:
            self._buffer_1L = self.grown_buffer(length)
        if self._written < length:
            self._buffer_1L[0, self._written : length] = torch.tensor(self.tokens[self._written :], device=self.device)
            self._written = length
        return self._buffer_1L[:, :length]

    def grown_buffer(self, length: int) -> Tensor:
        """A buffer of up to twice `length`, since one of `max_length` might not fit in memory."""
        room = max(length, min(2 * length, self.request.max_length))
        buffer_1L = torch.zeros(1, room, dtype=torch.long, device=self.device)
        if self._buffer_1L is not None:
            buffer_1L[:, : self._written] = self._buffer_1L[:, : self._written]
        return buffer_1L

    def choose(self, logits_V: Tensor) -> int:
        """The token that plain generation would choose; to be called once for each emitted token."""
        return self.request.choose(self.score(logits_V))

    def score(self, logits_V: Tensor) -> Tensor:
        """(1, V): the processed scores of the next emitted token, stored where the request returns them."""
        raw_1V, scores_1V = self.process(logits_V)
        self.store(raw_1V, scores_1V)
        return scores_1V

    def process(
        self, logits_V: Tensor, ahead: Sequence[int] = (), processors: LogitsProcessorList | None = None
    ) -> tuple[Tensor, Tensor]:
        """(1, V) twice: the float32 logits before and after all processors.

        Args:
            ahead: drafted tokens after the text so far, which may never be emitted.
            processors: what `fork` returned for these tokens; None: the row's.
        """
        raw_1V = logits_V[None].to(self.device, torch.float32, copy=True)
        prefix_1L = self.prefix()
        if ahead:
            prefix_1L = torch.cat([prefix_1L, torch.tensor([ahead], device=self.device)], dim=1)
        scores_1V = raw_1V.clone() if self.request.keep_logits else raw_1V
        used = self.processors if processors is None else processors
        for processor in used:  # calling the list would inspect every processor's signature for every token
            scores_1V = processor(prefix_1L, scores_1V)
        return raw_1V, scores_1V

    def store(self, raw_1V: Tensor, scores_1V: Tensor) -> None:
        if self.request.keep_logits:
            self.logits.append(raw_1V)
        if self.request.keep_scores:
            self.scores.append(scores_1V)

    def emit(self, token: int) -> None:
        self.tokens.append(token)
        request = self.request
        self.done = token in request.eos_tokens or len(self.tokens) >= request.max_length
        if self.criteria:
            scores = tuple(self.scores) if request.keep_scores else None
            self.done |= bool(self.criteria(self.prefix(), scores).all())

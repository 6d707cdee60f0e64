"""Plain generation and decoding with heads as speakers in a conversation: caches are kept from turn to turn."""
# T prompt position

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from heads.decoding.proposers.prompt_lookup import count_shared
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import GreedySettings, TreeShape, new_tokens
from heads.evaluation.speed.counting import CountingRule, Passes
from heads.interface.token_heads import TokenHeads

PLAIN, ALONE, WITH_LOOKUP = "plain", "heads alone", "heads with lookup"


@dataclass(frozen=True, kw_only=True)
class TimedAnswer:
    """One answer: its tokens, what it cost, and for heads what was accepted in each pass."""

    tokens: list[int]
    passes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    counted: Passes | None = None


class Speaker(Protocol):
    """Answers turn by turn."""

    name: str

    def begin(self) -> None:
        """A new conversation: forget the caches of the last one."""
        ...

    def answer(self, prompt_1T: Tensor, settings: GreedySettings, clock: Callable[[], float]) -> TimedAnswer: ...


class PlainSpeaker:
    """`model.generate`; its cache is cut back to what the next prompt shares with the text so far."""

    name = PLAIN

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begin()

    def begin(self) -> None:
        self.cache = DynamicCache(config=self.model.config.get_text_config())
        self.text: list[int] = []

    def answer(self, prompt_1T: Tensor, settings: GreedySettings, clock: Callable[[], float]) -> TimedAnswer:
        prompt_1T = prompt_1T.to(self.model.device)
        self.keep_shared(prompt_1T[0].tolist())
        start = clock()
        output = settings.generate(self.model, prompt_1T, past_key_values=self.cache)
        seconds = clock() - start
        self.text = output[0].tolist()
        tokens = new_tokens(output, prompt_1T)
        return TimedAnswer(tokens=tokens, passes=len(tokens), seconds=seconds)

    def keep_shared(self, prompt: list[int]) -> None:
        """The prompt's last token is always read: its pass gives the first logits."""
        held = int(self.cache.get_seq_length())
        shared = min(held, count_shared(self.text, prompt[:-1]))
        if shared == held:
            return
        if any(map(drops_past, self.cache.layers)):
            self.begin()
        else:
            self.cache.crop(shared - held)  # a negative number: tokens to drop


def drops_past(layer: Any) -> bool:
    """Whether a cache's layer cannot be cut back: a window keeps no older tokens, a recurrent layer its last state."""
    return getattr(layer, "is_sliding", False) or isinstance(layer, LinearAttentionCacheLayerMixin)


class HeadsSpeaker:
    """`TreeDecoding` with kept caches, which counts what it accepts.

    Attributes:
        depth: of the deepest draft that it may make: the tree's depth, or a looked-up chain at its longest.
        compiled: whether its passes are compiled.
    """

    def __init__(
        self, name: str, model: Any, token_heads: TokenHeads, shape: TreeShape, lookup: int, compile: bool | None
    ) -> None:
        self.name, self.model = name, model
        self.rule = CountingRule()
        self.decoding = TreeDecoding(
            token_heads, shape, lookup=lookup, keep_caches=True, rule=self.rule, compile=compile
        )
        of_one_row = self.decoding.settings.at(1)
        self.depth, self.compiled = of_one_row.max_depth, of_one_row.compile

    def begin(self) -> None:
        self.decoding.forget()

    def answer(self, prompt_1T: Tensor, settings: GreedySettings, clock: Callable[[], float]) -> TimedAnswer:
        prompt_1T = prompt_1T.to(self.model.device)
        self.rule.begin()
        start = clock()
        output = settings.generate(self.model, prompt_1T, custom_generate=self.decoding, return_dict_in_generate=True)
        seconds = clock() - start
        return TimedAnswer(
            tokens=new_tokens(output.sequences, prompt_1T),
            passes=output.stats.row_passes,
            seconds=seconds,
            phases=dict(output.stats.seconds),
            counted=self.rule.passes,
        )


def as_prompt(tokens: list[int]) -> Tensor:
    """(1, T)"""
    return torch.tensor([tokens], dtype=torch.long)

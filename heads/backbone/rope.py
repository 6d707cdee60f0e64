"""Rotary embeddings that change with the length of the text, and the texts that can be decoded with them.

Two kinds of RoPE choose their frequencies by the longest position of a pass: "longrope" (such as Phi-3's) has one set
up to a border and another beyond it, "dynamic" (NTK) has new ones for every length beyond it. Keys that were cached
under other frequencies than the queries' are wrong. Plain generation reads the whole text again when it crosses a
longrope border; beyond a dynamic border its text depends on what was generated before the call. So a text is decoded on
either side of a longrope border and refused if it would cross it; with dynamic RoPE it is decoded up to the border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

MOVING = ("longrope", "dynamic")


@dataclass(frozen=True, kw_only=True)
class RopeBorder:
    """Where a backbone's rotary embeddings change.

    Attributes:
        kind: the kind of RoPE, "longrope" or "dynamic".
        tokens: length of the longest text under the first frequencies.
    """

    kind: str
    tokens: int

    def refuse(self, *, prompt: int, padded: bool, longest: int) -> None:
        """Refuse a call whose text may cross the border.

        A text's last token is emitted and never read, so a text may be one token longer than the border.

        Args:
            prompt: tokens of the prompt, padding included.
            padded: whether any row of the prompt has padding.
            longest: tokens that the text may get to.

        >>> border = RopeBorder(kind="longrope", tokens=24)
        >>> border.refuse(prompt=10, padded=True, longest=25)
        >>> border.refuse(prompt=25, padded=False, longest=90)
        >>> border.refuse(prompt=10, padded=False, longest=26)              # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: This backbone's rotary embeddings (longrope) change at 24 tokens, and a text of 10 to 26 was ...

        Raises:
            ValueError: a text that may go over the border.
        """
        if longest <= self.tokens + 1:
            return
        if self.kind == "longrope" and prompt > self.tokens and not padded:
            return
        allowed = f"texts of at most {self.tokens + 1} tokens"
        if self.kind == "longrope":
            allowed += f", or prompts of more than {self.tokens} without padding"
        raise ValueError(
            f"This backbone's rotary embeddings ({self.kind}) change at {self.tokens} tokens, and a text of {prompt} "
            f"to {longest} was asked for, whose cached keys would be of both kinds; allowed are {allowed}: give a "
            f"smaller max_new_tokens, or decode with plain generate."
        )

    def separates(self, one: int, other: int) -> bool:
        """Whether texts of these lengths lie on different sides of the border.

        >>> border = RopeBorder(kind="longrope", tokens=24)
        >>> border.separates(24, 25), border.separates(3, 24), border.separates(25, 90)
        (True, False, False)
        """
        return (one > self.tokens) != (other > self.tokens)


def find_rope_border(decoder: nn.Module) -> RopeBorder | None:
    """The lowest border of a decoder's rotary embeddings; None where none of them changes."""
    found = [border for module in decoder.modules() for border in borders_of(module)]
    return min(found, key=lambda border: border.tokens, default=None)


def borders_of(module: nn.Module) -> list[RopeBorder]:
    """The borders of one module; in models that mix layer types it holds a kind of RoPE for each type."""
    kinds = getattr(module, "rope_type", None)
    by_type: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
    return [
        RopeBorder(kind=kind, tokens=read_border(module, kind, layer_type))
        for layer_type, kind in by_type.items()
        if kind in MOVING
    ]


def read_border(module: Any, kind: str, layer_type: str | None) -> int:
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])

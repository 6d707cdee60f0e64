"""Compares what llama.cpp wrote, drafted and accepted with our chain; a difference is an error that says where."""
# T prompt position, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.outside.chain import Chain
from heads.evaluation.generated_text import excuse_ties, first_difference


def counts_of(chain: Chain, depth: int, new_tokens: int) -> dict[str, int]:
    """Our counts as llama.cpp counts: near the end a pass drafts fewer, to leave room for the backbone's own token.

    >>> chain = Chain(text=[1, 2, 3, 4, 5], drafts=[[2, 3], [5, 6]], accepted=[2, 1], begins=[1, 4])
    >>> counts_of(chain, 2, new_tokens=6), counts_of(chain, 2, new_tokens=5)
    ({'drafted': 3, 'accepted': 3}, {'drafted': 2, 'accepted': 2})
    """
    room = [max(0, min(depth, new_tokens - begin - 1)) for begin in chain.begins]
    accepted = sum(min(n, most) for n, most in zip(chain.accepted, room, strict=True))
    return {"drafted": sum(room), "accepted": accepted}


def check_texts(
    where: str, model: Any, prompt_1T: Tensor, texts: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
) -> bool:
    """Whether all texts equal the first; False if one differs from where two tokens tie by our float32 scores.

    Args:
        dtype: the engine's dtype, whose rounding is the bound for a tie.

    Raises:
        ValueError: the scores of the first two different tokens lie further apart than rounding.
    """

    @torch.no_grad()
    def scores_at(new: list[int]) -> Tensor:
        logits_V: Tensor = model(torch.cat([prompt_1T, prompt_1T.new_tensor([new])], dim=1)).logits[0, -1]
        return logits_V

    (first, text), *others = texts.items()
    excused = excuse_ties(scores_at, dtype)
    for name, other in others:
        at = first_difference(list(text), list(other))
        if at is not None and not excused(list(text), list(other)):
            raise ValueError(
                f"{where}: the text {first} and the text {name} part at token {at + 1}: "
                f"{list(text[at : at + 4])} and {list(other[at : at + 4])}."
            )
        if at is not None:
            return False
    return True


def check_counts(where: str, theirs: Mapping[str, Any], ours: Mapping[str, int]) -> None:
    """
    Raises:
        ValueError: drafted or accepted tokens that differ.
    """
    for key, count in ours.items():
        if theirs[key] != count:
            raise ValueError(f"{where}: llama.cpp counts {theirs[key]} tokens {key}, we {count}.")


def check_words(texts: Sequence[str], theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> int:
    """Compare both sides' token ids of each text; returns how many were compared.

    Raises:
        ValueError: a text that llama.cpp splits into other tokens.
    """
    for text, found, wanted in zip(texts, theirs, ours, strict=True):
        at = first_difference(list(wanted), list(found))
        if at is not None:
            raise ValueError(f"llama.cpp splits {text[:40]!r} into other tokens, from token {at + 1} on.")
    return sum(map(len, ours))

"""Replay the backbone's own text: find what its heads would have drafted at every position.

At each position a tree accepts its longest path that agrees with the text. So one walk along the text, which commits
its tokens one by one and drafts at each position, gives for every tree the number of tokens that it would have
accepted, without decoding with it. The walk uses only the contract of a family, so its drafts are those of decoding.

A position is that of a tree's root in a text. A place is a node's index when the candidates of a tree, the root among
them, are sorted best first: a budget of n nodes keeps the places below n.
"""
# B row of a batch, T prompt position, L token of a row, P position in one row's text, K depth, E candidate,
# V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.backbone.model import CommitPlan, Pass
from heads.backbone.projection import Projection
from heads.decoding.generate import check_temperature
from heads.decoding.trees.dynamic import DynamicTree, TreeCandidates, list_candidates
from heads.evaluation.methods import end_tokens
from heads.interface.token_heads import TokenHeads

RANKS = 10
"""How many ranks of a node's candidates are counted; a token of a lower rank counts as not drafted."""
NEVER = 2**30
"""The place of a node that is not a candidate."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A batch of texts with prompts padded on the left; row b has `lengths[b]` tokens after its prompt."""

    tokens_BL: Tensor
    valid_BT: Tensor
    lengths: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The heads' drafts at each position of one row's text.

    Attributes:
        ranks_PK: the rank of the text's token among head k's candidates, given the text before it; RANKS if it is
            not among the first RANKS or the text has ended.
        dynamic: (P, K, K) for each beam width: entry [p, D - 1, d - 1] is the place of the text's own node of depth d
            in a dynamic tree of depth D.
        text: prompt and new tokens, without padding.
        prompt: number of tokens of the prompt; the root of position p is `text[prompt + p]`.
    """

    ranks_PK: np.ndarray
    dynamic: Mapping[int, np.ndarray]
    text: list[int] = field(default_factory=list)
    prompt: int = 0


@torch.no_grad()
def write_texts(
    model: Any, prompts: Sequence[Tensor], request: dict[str, Any], *, rows: int, advance: Callable[[], Any]
) -> list[Texts]:
    """Let plain `generate` with the settings of `request` continue each prompt (1, T), `rows` prompts in a batch."""
    check_temperature(request.get("temperature", 0.0))
    found = []
    for start in range(0, len(prompts), rows):
        tokens_BT, valid_BT = pad_left(prompts[start : start + rows])
        tokens_BL = model.generate(tokens_BT, attention_mask=valid_BT.long(), **request)
        new = tokens_BL[:, tokens_BT.shape[1] :].tolist()
        lengths = [length_of(row, end_tokens(model)) for row in new]
        found.append(Texts(tokens_BL=tokens_BL, valid_BT=valid_BT, lengths=lengths))
        advance()
    return found


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), and False for padding, from prompts (1, T) of any length.

    >>> tokens_BT, valid_BT = pad_left([torch.tensor([[5, 6]]), torch.tensor([[7]])])
    >>> tokens_BT.tolist(), valid_BT.int().tolist()
    ([[5, 6], [0, 7]], [[1, 1], [0, 1]])
    """
    longest = max(prompt_1T.shape[1] for prompt_1T in prompts)
    tokens_BT = prompts[0].new_zeros(len(prompts), longest)
    valid_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for b, prompt_1T in enumerate(prompts):
        tokens_BT[b, longest - prompt_1T.shape[1] :] = prompt_1T[0]
        valid_BT[b, longest - prompt_1T.shape[1] :] = True
    return tokens_BT, valid_BT


def length_of(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """Number of tokens up to and including the first end token; padding follows it.

    >>> length_of([4, 5, 1, 0, 0], [1]), length_of([4, 5], [1])
    (3, 2)
    """
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


@torch.no_grad()
def replay(
    token_heads: TokenHeads, texts: Texts, *, widths: Sequence[int], nodes: int, advance: Callable[[], Any]
) -> list[Replay]:
    """Walk along a batch of texts and return a `Replay` for each row with at least two new tokens.

    Args:
        widths: beam widths of dynamic trees.
        nodes: the largest node budget that is searched.
        advance: called at each position.
    """
    prompt, heads_range = texts.valid_BT.shape[1], range(1, token_heads.num_heads + 1)
    new_BN = torch.ones_like(texts.tokens_BL[:, prompt:], dtype=torch.bool)
    _, output = token_heads.backbone.prefill(
        texts.tokens_BL, torch.cat([texts.valid_BT, new_BN], dim=1), token_heads.taps
    )
    projections = [token_heads.projection(k) for k in heads_range]
    ahead_BLK = tokens_ahead(texts, token_heads.num_heads)
    state = commit_slots(token_heads, None, output, slice(0, prompt), CommitPlan.whole(texts.valid_BT))
    one = CommitPlan.from_paths([[0]] * len(texts.lengths), texts.tokens_BL.device)
    ranks, places = [], {width: list[Tensor]() for width in widths}
    for i in range(max(texts.lengths) - 1):
        root_B, ahead_BK = texts.tokens_BL[:, prompt + i], ahead_BLK[:, i]
        ranks.append(ranks_along(token_heads, projections, state, root_B, ahead_BK))
        for width in widths:
            found = list_candidates(
                token_heads, projections, state, root_B, DynamicTree(nodes=max(2, nodes), width=width)
            )
            places[width].append(places_along(found, ahead_BK))
        state = commit_slots(token_heads, state, output, slice(prompt + i, prompt + i + 1), one)
        advance()
    return split_rows(texts, ranks, places)


def commit_slots(token_heads: TokenHeads, state: Any, output: Pass, slots: slice, plan: CommitPlan) -> Any:
    """The family's state after committing some slots of a pass over a whole text."""
    taps = {tap: hidden_BND[:, slots] for tap, hidden_BND in output.taps.items()}
    return token_heads.commit(state, output.tokens_BN[:, slots], taps, output.positions_BN[:, slots], plan)


def tokens_ahead(texts: Texts, depth: int) -> Tensor:
    """(B, P, K): the tokens after each position's root; -1 after the row's end."""
    prompt = texts.valid_BT.shape[1]
    new_BN = texts.tokens_BL[:, prompt:].clone()
    for b, length in enumerate(texts.lengths):
        new_BN[b, length:] = -1
    padded_BN = torch.cat([new_BN, new_BN.new_full((len(new_BN), depth), -1)], dim=1)
    return padded_BN[:, 1:].unfold(1, depth, 1)


def ranks_along(
    token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, ahead_BK: Tensor
) -> Tensor:
    """(B, K): the rank of each token ahead among its head's candidates, given the true tokens before it."""
    rows_B, level, tokens_B = torch.arange(len(root_B), device=root_B.device), token_heads.first_level(state), root_B
    ranks = []
    for k in range(1, token_heads.num_heads + 1):
        hidden_BD, level = token_heads.step(k, level, tokens_B, rows_B)
        logits_BV, tokens_B = projections[k - 1](hidden_BD), ahead_BK[:, k - 1].clamp(min=0)
        entries_B, scored_B = projections[k - 1].find(tokens_B)
        better_B = (logits_BV > logits_BV.gather(1, entries_B[:, None])).sum(dim=1)
        ranks.append(better_B.clamp(max=RANKS).masked_fill(~scored_B | (ahead_BK[:, k - 1] < 0), RANKS))
    return torch.stack(ranks, dim=1)


def places_along(found: TreeCandidates, ahead_BK: Tensor) -> Tensor:
    """(B, K, K): places at one position, as in `Replay.dynamic`; NEVER if the text's node is no candidate or d > D."""
    batch, depth = ahead_BK.shape
    places_BKK = torch.full((batch, depth, depth), NEVER, device=ahead_BK.device)
    index_E = torch.arange(found.count, device=ahead_BK.device)
    at_B1, alive_B = torch.zeros_like(ahead_BK[:, :1]), torch.ones_like(ahead_BK[:, 0], dtype=torch.bool)
    for d in range(1, depth + 1):
        is_next_BE = (found.tokens_BE == ahead_BK[:, d - 1, None]) & (found.parents_BE == at_B1) & (found.depths_E == d)
        at_B1 = is_next_BE.int().argmax(dim=1, keepdim=True)
        alive_B = alive_B & is_next_BE.any(dim=1)
        score_B1 = found.scores_BE.gather(1, at_B1)
        earlier_BE = (found.scores_BE > score_B1) | ((found.scores_BE == score_B1) & (index_E < at_B1))
        for limit in range(d, depth + 1):
            place_B = (earlier_BE & (found.depths_E <= limit)).sum(dim=1)
            places_BKK[:, limit - 1, d - 1] = place_B.masked_fill(~alive_B, NEVER)
    return places_BKK


def split_rows(texts: Texts, ranks: Sequence[Tensor], places: Mapping[int, Sequence[Tensor]]) -> list[Replay]:
    """The replay of each row, with a position for each of its new tokens but the last."""
    if not ranks:
        return []
    ranks_BPK = torch.stack(list(ranks), dim=1).cpu().numpy()
    places_BPKK = {width: torch.stack(list(found), dim=1).cpu().numpy() for width, found in places.items()}
    return [
        Replay(
            ranks_PK=ranks_BPK[b, : length - 1],
            dynamic={width: found[b, : length - 1] for width, found in places_BPKK.items()},
            text=text_of(texts, b),
            prompt=int(texts.valid_BT[b].sum()),
        )
        for b, length in enumerate(texts.lengths)
        if length > 1
    ]


def text_of(texts: Texts, b: int) -> list[int]:
    """The text of row b without its padding on either side."""
    prompt = texts.valid_BT.shape[1]
    padding = prompt - int(texts.valid_BT[b].sum())
    found: list[int] = texts.tokens_BL[b, padding : prompt + texts.lengths[b]].tolist()
    return found

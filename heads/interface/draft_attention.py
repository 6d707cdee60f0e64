"""Attention of a draft layer: the committed rows of a text, and a node's own path beside them.

    context    committed rows, computed from the backbone's true states; all nodes of a text share them
    own        rows of the path that leads to a node, computed from the layer's own output

One softmax goes over both, and no key is copied to where the others are. In training each position is a node, whose own
path are the unrolled steps at that position (EAGLE-3, Li et al. 2025, section 3.2, "training-time test").
"""
# B text, W node of a text (in training a position), S context slot, k row of an own path, H query head,
# G key-value head, R query heads a key-value head, E head width, M node of all texts

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORES_AT_A_TIME = 2**24
"""Attention scores that are stored for backward; of more, parts are computed again there."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Committed rows of B texts.

    Attributes:
        keys, values: (B, G, S, E).
        may_attend_BWS: which of them each query sees; W is 1 where all nodes of a text see the same.
    """

    keys_BGSE: Tensor
    values_BGSE: Tensor
    may_attend_BWS: Tensor


def attend(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    """(B, W, H, E): softmax attention over the context and each query's own rows together.

    Long texts are read in parts, whose scores backward computes again, so that memory does not grow with their square.
    """
    batch, nodes, heads, _ = queries_BWHE.shape
    slots = context.keys_BGSE.shape[2] + own_keys_BWkGE.shape[2]
    part = max(64, SCORES_AT_A_TIME // max(1, batch * heads * slots))
    if nodes <= part:
        return attend_at_once(queries_BWHE, context, own_keys_BWkGE, own_values_BWkGE)
    seen_BWS, found = context.may_attend_BWS.expand(batch, nodes, -1), []
    for start in range(0, nodes, part):
        at = slice(start, start + part)
        of_part = replace(context, may_attend_BWS=seen_BWS[:, at])
        of_queries = (x[:, at] for x in (queries_BWHE, own_keys_BWkGE, own_values_BWkGE))
        found.append(checkpoint(attend_at_once, next(of_queries), of_part, *of_queries, use_reentrant=False))
    return torch.cat(found, dim=1)


def attend_at_once(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    kv_heads, slots, width = context.keys_BGSE.shape[1:]
    queries_BWGRE = torch.unflatten(queries_BWHE, 2, (kv_heads, -1)) / math.sqrt(width)
    of_context = torch.einsum("bwgre,bgse->bgrws", queries_BWGRE, context.keys_BGSE)
    of_context = of_context.masked_fill(~context.may_attend_BWS[:, None, None], -torch.inf)
    of_own = torch.einsum("bwgre,bwkge->bgrwk", queries_BWGRE, own_keys_BWkGE)
    scores = torch.cat([of_context, of_own], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(own_values_BWkGE.dtype)
    read = torch.einsum("bgrws,bgse->bwgre", weights[..., :slots], context.values_BGSE)
    read = read + torch.einsum("bgrwk,bwkge->bwgre", weights[..., slots:], own_values_BWkGE)
    return read.flatten(2, 3)


def by_text(nodes_M: Tensor, num_texts: int) -> bool:
    """Whether nodes of texts `nodes_M` come text by text, equally many each; compiled graphs do not ask.

    >>> by_text(torch.tensor([0, 0, 1, 1]), 2), by_text(torch.tensor([1, 0, 0, 0]), 2)
    (True, False)
    """
    if num_texts == 1:
        return True
    if torch.compiler.is_compiling() or len(nodes_M) % num_texts:
        return False
    each = len(nodes_M) // num_texts
    return torch.equal(nodes_M, torch.arange(num_texts, device=nodes_M.device).repeat_interleave(each))

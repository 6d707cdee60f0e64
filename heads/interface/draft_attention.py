"""Attention of a draft layer: the committed rows of a text, and a node's own path beside them.

    context    committed rows, computed from the backbone's true states; all nodes of a text share them
    own        rows of the path that leads to a node, computed from the layer's own output

One softmax goes over both, without copying keys to one place. In training each position is a node, whose own path
consists of the unrolled steps at that position (EAGLE-3, Li et al. 2025, section 3.2, "training-time test").
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
"""The most attention scores that are stored for backward; if there are more, backward computes them again in parts."""
CAUSAL_PART = 64
"""Queries of one part of a causal block: a part computes scores up to its own end only."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Committed rows of B texts.

    Attributes:
        keys_BGSE, values_BGSE: keys and values.
        bias_BWS: added to the scores: 0 where a query sees a slot, else -inf (`seen_as_bias`); W is 1 where all nodes
            of a text see the same.
        causal: query w sees no slot after w, as in training.
    """

    keys_BGSE: Tensor
    values_BGSE: Tensor
    bias_BWS: Tensor
    causal: bool = False

    def of_queries(self, at: slice) -> Context:
        """The context of a range of queries; if it is causal, without the slots after the last of them."""
        if not self.causal:
            return replace(self, bias_BWS=self.bias_BWS[:, at])
        keys_BGSE, values_BGSE = self.keys_BGSE[:, :, : at.stop], self.values_BGSE[:, :, : at.stop]
        return Context(keys_BGSE=keys_BGSE, values_BGSE=values_BGSE, bias_BWS=self.bias_BWS[:, at, : at.stop])


def seen_as_bias(may_attend: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend, else -inf.

    >>> seen_as_bias(torch.tensor([True, False]), torch.float32)
    tensor([0., -inf])
    """
    return torch.zeros_like(may_attend, dtype=dtype).masked_fill_(~may_attend, -torch.inf)


def attend(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    """(B, W, H, E): softmax attention over the context and each query's own rows together.

    Long texts are read in parts whose scores backward computes again, so that memory does not grow with the square of
    the length.
    """
    batch, nodes, heads, _ = queries_BWHE.shape
    slots = context.keys_BGSE.shape[2] + own_keys_BWkGE.shape[2]
    fit = max(64, SCORES_AT_A_TIME // max(1, batch * heads * slots))
    part = min(fit, CAUSAL_PART) if context.causal else fit
    if nodes <= part:
        return attend_at_once(queries_BWHE, context, own_keys_BWkGE, own_values_BWkGE)
    context, found = replace(context, bias_BWS=context.bias_BWS.expand(batch, nodes, -1)), []
    for start in range(0, nodes, part):
        at = slice(start, min(start + part, nodes))
        of_part = context.of_queries(at)
        queries, keys, values = (x[:, at] for x in (queries_BWHE, own_keys_BWkGE, own_values_BWkGE))
        if nodes <= fit:
            found.append(attend_at_once(queries, of_part, keys, values))
        else:
            found.append(checkpoint(attend_at_once, queries, of_part, keys, values, use_reentrant=False))
    return torch.cat(found, dim=1)


def attend_at_once(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    kv_heads, slots, width = context.keys_BGSE.shape[1:]
    queries_BWGRE = torch.unflatten(queries_BWHE, 2, (kv_heads, -1)) / math.sqrt(width)
    of_context = torch.einsum("bwgre,bgse->bgrws", queries_BWGRE, context.keys_BGSE)
    of_own = torch.einsum("bwgre,bwkge->bgrwk", queries_BWGRE, own_keys_BWkGE)
    scores = torch.cat([of_context + context.bias_BWS[:, None, None], of_own], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(own_values_BWkGE.dtype)
    at_context, at_own = torch.split(weights, [slots, own_keys_BWkGE.shape[2]], dim=-1)
    read = torch.einsum("bgrws,bgse->bwgre", at_context, context.values_BGSE)
    read = read + torch.einsum("bgrwk,bwkge->bwgre", at_own, own_values_BWkGE)
    return read.flatten(2, 3)


def by_text(nodes_M: Tensor, num_texts: int) -> bool:
    """Whether nodes come text by text, equally many for each.

    A compiled graph may not read values, so within one the answer is False as soon as there are several texts.

    >>> by_text(torch.tensor([0, 0, 1, 1]), 2), by_text(torch.tensor([1, 0, 0, 0]), 2)
    (True, False)
    """
    if num_texts == 1:
        return True
    if torch.compiler.is_compiling() or len(nodes_M) % num_texts:
        return False
    each = len(nodes_M) // num_texts
    return torch.equal(nodes_M, torch.arange(num_texts, device=nodes_M.device).repeat_interleave(each))

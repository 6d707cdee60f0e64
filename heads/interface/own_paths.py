"""Decoder layers of the backbone's class over a text's committed rows and, beside them, each drafted node's own path.

    committed   rows of keys and values computed from the backbone's true states; all nodes of a text share them
    own paths   for each node the rows of its ancestors, computed from drafted tokens; no other node sees them

Hugging Face's layers ask a cache for all keys and values of their attention (`update`). `PathCache` answers with both
kinds and the new rows, and `sees_own_paths` masks the paths of other nodes. In training each position is a node, as in
draft_attention.py.
"""
# G group of nodes that share committed rows (a text), n node of a group, M node of all groups (M = G·n), S committed
# slot, d row of an own path, H key-value head, E head width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.interface.draft_attention import by_text


class PathCache:
    """The cache of one call of one layer: keys and values before the new rows; it keeps the new rows for the caller.

    Args:
        keys, values: (G, H, S + n·d, E), or None where nothing comes before.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values
        self.new: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.new = key_states, value_states
        if self.keys is None or self.values is None:
            return self.new
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)

    def with_new(self) -> PathCache:
        """The cache of the next call, which reads the new rows too."""
        assert self.new is not None
        if self.keys is None or self.values is None:
            return PathCache(*self.new)
        return PathCache(torch.cat([self.keys, self.new[0]], dim=2), torch.cat([self.values, self.new[1]], dim=2))


def beside(committed_GHSE: Tensor, own_MdHE: Tensor) -> Tensor:
    """(G, H, S + n·d, E): the committed rows of each group, then the own paths of its nodes, node by node."""
    groups, heads, _, width = committed_GHSE.shape
    own = own_MdHE.reshape(groups, -1, heads, width).transpose(1, 2)
    return torch.cat([committed_GHSE, own], dim=2)


def longer(own_MdHE: Tensor, new_GHnE: Tensor) -> Tensor:
    """(M, d + 1, H, E): each node's own path with its new row at the end."""
    return torch.cat([own_MdHE, new_GHnE.transpose(1, 2).flatten(0, 1)[:, None]], dim=1)


def sees_own_paths(committed_GS: Tensor, is_row_Gnd: Tensor) -> Tensor:
    """(G, n, S + n·d + n): which rows of `beside`, and which new rows after them, each node attends to.

    Args:
        committed_GS: whether a committed slot holds a row.
        is_row_Gnd: whether an entry of a node's own path holds a row.

    >>> sees_own_paths(torch.tensor([[True, False]]), torch.tensor([[[True], [False]]]))[0].int()
    tensor([[1, 0, 1, 0, 1, 0],
            [1, 0, 0, 0, 0, 1]], dtype=torch.int32)
    """
    groups, nodes, _ = is_row_Gnd.shape
    itself_nn = torch.eye(nodes, dtype=torch.bool, device=is_row_Gnd.device)
    own_Gnnd = itself_nn[:, :, None] & is_row_Gnd[:, None]
    committed_GnS = committed_GS[:, None].expand(-1, nodes, -1)
    return torch.cat([committed_GnS, own_Gnnd.flatten(2), itself_nn.expand(groups, -1, -1)], dim=2)


def sees_unrolled(may_attend_BTT: Tensor, steps: int) -> Tensor:
    """(B, T, steps·T): the attention mask of the last unrolled step over the rows of all steps.

    Position t attends to the first step's rows that `may_attend_BTT` allows, and of every later step to its own row t.

    >>> sees_unrolled(torch.ones(1, 2, 2, dtype=torch.bool).tril(), 3)[0].int()
    tensor([[1, 0, 1, 0, 1, 0],
            [1, 1, 0, 1, 0, 1]], dtype=torch.int32)
    """
    own_BTT = torch.eye(may_attend_BTT.shape[1], dtype=torch.bool, device=may_attend_BTT.device).expand_as(
        may_attend_BTT
    )
    return torch.cat([may_attend_BTT, *[own_BTT] * (steps - 1)], dim=2)


class PathContext:
    """The committed rows that nodes attend to.

    Nodes that come text by text, equally many for each, share one copy of their text's rows. In any other order each
    node is a group of its own, with a copy of these rows.
    """

    def __init__(self, level: dict[str, Any], texts_M: Tensor) -> None:
        self.level, self.texts_M = level, texts_M
        self.together = by_text(texts_M, len(level["context_real"]))
        self.groups = len(level["context_real"]) if self.together else len(texts_M)

    def grouped(self, x_M: Tensor) -> Tensor:
        return torch.unflatten(x_M, 0, (self.groups, -1))

    def of_texts(self, x_B: Tensor) -> Tensor:
        return x_B if self.together else x_B.index_select(0, self.texts_M)

    def seen(self, index: int, keys: Tensor, values: Tensor, rows_M: Tensor) -> tuple[PathCache, Tensor, Tensor]:
        """What a module's layer reads, which nodes attend to which rows of it, and the positions of the rows."""
        committed = [self.of_texts(self.level[name][index]) for name in ("context_keys", "context_values")]
        real, positions = (self.of_texts(self.level[name]) for name in ("context_real", "context_positions"))
        length, lag = keys.shape[1], index + 1
        own_Md = rows_M[:, None] - torch.arange(length, 0, -1, device=rows_M.device)
        may_attend = sees_own_paths(has_row(real, positions, lag), self.grouped(own_Md >= 0))
        slot_rows = torch.cat([positions - lag, self.grouped(own_Md).flatten(1), self.grouped(rows_M)], dim=1)
        return PathCache(beside(committed[0], keys), beside(committed[1], values)), may_attend, slot_rows


def has_row(real_BS: Tensor, positions_BS: Tensor, lag: int) -> Tensor:
    """(B, S): whether a slot has a row of the module that reads `lag` tokens ahead.

    Such a row joins a token with the state `lag` positions before it, so a text's first `lag` tokens have none.
    """
    return real_BS & (positions_BS >= lag)

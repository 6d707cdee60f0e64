"""A backbone's recurrent layers: where they are, and how they run in the passes of `heads.backbone.Backbone`."""
# B row, N node, T position

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from heads.backbone.cache import TreeCacheLayer
from heads.backbone.recurrent import mixers
from heads.backbone.recurrent.cache import RecurrentCache, RecurrentLayer, keeps_known_states
from heads.backbone.recurrent.levels import Levels, find_levels


class Recurrence:
    """The recurrent layers of one backbone.

    Attributes:
        continues: the model can read several tokens from a state; where it cannot, tokens after a state are read as a
            chain of nodes.
        step_error: how far the model's one-token steps differ from its forward over a whole text, as a share of the
            largest logit; 0.0 where only by rounding. heads/backbone/recurrent/probe.py finds both out.
    """

    def __init__(self, config: Any, layers: nn.ModuleList) -> None:
        self.config = config
        self.continues = True
        self.step_error = 0.0
        self.own = mixers.find_mixers(layers)
        self._of_heads: weakref.WeakKeyDictionary[Any, list[mixers.Mixer]] = weakref.WeakKeyDictionary()
        self._levels: Any = WeakIdKeyDictionary()  # of static trees, by their matrix

    @property
    def attention(self) -> int:
        """Index of the last layer with attention, if possible of one without a recurrent state beside it."""
        layers = self.new_cache(0).layers
        plain = [i for i, layer in enumerate(layers) if type(layer) is TreeCacheLayer]
        return max(plain or [i for i, layer in enumerate(layers) if isinstance(layer, TreeCacheLayer)])

    def new_cache(self, num_slots: int) -> RecurrentCache:
        return RecurrentCache(self.config, room=num_slots)

    def over_nodes(
        self, cache: RecurrentCache, heads: Iterable[Any], sees: Tensor, batch: int
    ) -> contextlib.AbstractContextManager[None]:
        """A context for a pass over nodes.

        Args:
            heads: heads whose layers run in the pass.
            sees: (N, N), or (B, N, N) where rows differ: True where a node sees another.
        """
        return mixers.over_nodes(self.all_mixers(heads), cache, self.levels(sees, batch))

    def over_whole_rows(
        self, cache: RecurrentCache, heads: Iterable[Any], valid_BT: Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """A context for a pass over a prompt; `valid_BT` is False for padding on the left."""
        return mixers.over_whole_rows(self.all_mixers(heads), cache, None if bool(valid_BT.all()) else valid_BT)

    def all_mixers(self, heads: Iterable[Any]) -> list[mixers.Mixer]:
        found = list(self.own)
        for one in heads:
            if one not in self._of_heads:
                self._of_heads[one] = mixers.find_mixers(one)
            found += [mixer for mixer in self._of_heads[one] if mixer not in found]
        return found

    def levels(self, sees: Tensor, batch: int) -> Levels:
        """The levels of a pass; those of a matrix that all rows share are found once and remembered."""
        if sees.ndim == 3:
            return find_levels(sees, batch)
        known = self._levels.setdefault(sees, {})
        if batch not in known:
            known[batch] = find_levels(sees, batch)
        found: Levels = known[batch]
        return found


def find_recurrence(model: Any, config: Any, layers: nn.ModuleList) -> Recurrence | None:
    """The recurrent layers of a model; None where it has none.

    Raises:
        ValueError: modules that `find_mixers` does not find keep recurrent states.
    """
    if not keeps_known_states(config):
        return None
    found = Recurrence(config, layers)
    stateful = {i for i, layer in enumerate(found.new_cache(0).layers) if isinstance(layer, RecurrentLayer)}
    if {mixer.module.layer_idx for mixer in found.own} != stateful:
        raise ValueError(
            f"{type(model).__name__} keeps recurrent states in modules that are not found here, so they cannot be "
            f"rolled back; choose a backbone of those in docs/decode.md."
        )
    return found

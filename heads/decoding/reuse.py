"""Caches that outlive a `generate` call, for conversations: the next call reads only the new tokens of its prompt.

The last call's caches are rolled back to the longest prefix that its text shares with the new prompt. The prompt's last
token is always read again, since its pass gives the first logits and the state that heads draft from. A recurrent state
can only be rolled back within the last pass: if the prompt differs from the text before that, it is read as a whole.
"""
# B row, T prompt position

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from heads.backbone.model import Backbone, BackboneState
from heads.backbone.support import adapted_layers, read_hooks
from heads.decoding.proposers.prompt_lookup import count_shared


class RollsBack(Protocol):
    """A drafter whose state can be rolled back."""

    def keep_slots(self, num_slots: int) -> None: ...


D = TypeVar("D", bound=RollsBack)


@dataclass(frozen=True, kw_only=True)
class CachedText(Generic[D]):
    """A call's committed tokens, one cache slot each, and the states of backbone and drafter over them."""

    tokens: Sequence[int]
    state: BackboneState
    drafter: D


class ReusableCaches(Generic[D]):
    """The caches of at most one call. A call takes them out and stores its own at its end, unless it fails.

    Args:
        others: further modules whose caches are reused: heads, or a draft model.
    """

    def __init__(self, *others: nn.Module) -> None:
        self._others = others
        self._cached: CachedText[D] | None = None
        self._made_by: list[Any] = []

    @property
    def length(self) -> int:
        return 0 if self._cached is None else len(self._cached.tokens)

    def reuse(self, backbone: Backbone, tokens_BT: Tensor, valid_BT: Tensor, mode: Any = None) -> CachedText[D] | None:
        """What is cached of a prompt's first tokens; None: nothing.

        Args:
            mode: the context of the call's passes: caches made in inference mode cannot be written to outside of it.

        Raises:
            ValueError: several rows, or padding: reusable caches have one slot for each token.
        """
        unpadded = bool(valid_BT.all())
        if len(tokens_BT) > 1 or not unpadded:
            raise ValueError(
                f"keep_caches=True was given for {len(tokens_BT)} rows{'' if unpadded else ' with padding'}; "
                f"caches are kept for one row without padding: give one text at a time, or leave keep_caches out."
            )
        border = backbone.rope_border
        if border is not None and border.separates(self.length, tokens_BT.shape[1]):
            self.forget()
        self.begin(backbone.model, mode)
        return self.take(tokens_BT[0].tolist())

    def take(self, tokens: Sequence[int]) -> CachedText[D] | None:
        """The cached text, rolled back to the prefix that it shares with these tokens; None where it shares none."""
        cached, self._cached = self._cached, None
        shared = 0 if cached is None else cached.state.cache.nearest(count_shared(cached.tokens, tokens[:-1]))
        if cached is None or not shared:
            return None
        cached.drafter.keep_slots(shared)
        return CachedText(tokens=cached.tokens[:shared], state=cached.state.keep_slots(shared), drafter=cached.drafter)

    def put(self, cached: CachedText[D]) -> None:
        self._cached = cached

    def forget(self) -> None:
        self._cached = None

    def begin(self, model: nn.Module, mode: Any) -> None:
        """Forget caches that were made in another mode, or with other weights, hooks or adapters than there are now."""
        made_by = [mode, *(mark_weights(one) for one in (model, *self._others))]
        if made_by != self._made_by:
            self._made_by = made_by
            self.forget()


def check_keeps(*backbones: Backbone) -> None:
    """Check that the caches of these backbones may be kept from call to call.

    Raises:
        ValueError: the recurrent state after generating tokens differs from the one after reading them as a prompt.
    """
    for backbone in backbones:
        if backbone.recurrence is not None and (error := backbone.recurrence.step_error):
            raise ValueError(
                f"keep_caches=True was given, but the one-token steps of {type(backbone.model).__name__} give logits "
                f"that differ by {error:.1e} of the largest one from those of the same text read anew, so kept states "
                f"would change the text; leave keep_caches out."
            )


def mark_weights(model: nn.Module) -> list[Any]:
    """A value that changes if a weight is replaced, edited or moved, a module hooked or replaced, an adapter switched.

    Two edits leave it as it was: of a weight through `.data`, which keeps its version, and of a module's attributes
    that are no tensors.
    """
    tensors = (*model.parameters(), *model.buffers())
    weights = [(id(t), t.dtype, t.device, None if t.is_inference() else t._version) for t in tensors]
    adapters = [
        (layer.disable_adapters, list(layer.active_adapters), list(layer.merged_adapters), dict(layer.scaling))
        for layer in adapted_layers(model).values()
    ]
    return [weights, adapters, read_hooks(model.modules())]

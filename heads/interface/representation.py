"""Position-wise heads, and f(x_≤t): which representation of the text so far they read from the backbone.

    hidden_offset 0    what the unembedding reads: the last layer's output after the final norm
    hidden_offset o    the output of the layer o layers before the end, through the same final norm
    … = all layers     the input embeddings alone, through the same final norm
    raw_hidden_states  the same without the final norm: hidden_states[-(o + 1)] of transformers (Hydra, the paper)

    prefix_layers 1    a decoder layer of the heads' own over any of these (Hydra++), the identity at first

Ankner et al., section 5.3.2 (figure 6) and 5.3.3 (figure 7). Inner taps pass through the final norm by default, since
without it they have another scale than what heads and unembeddings start from.
"""
# B batch, T position, N slot of a pass, R row, D model width

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.gradient_gate import gate
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.state import HiddenTap, StackTap
from heads.interface.layers import check_last_layer, identity_layer
from heads.interface.token_heads import HeadsConfig, TeacherForcing, TokenHeads
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class RepresentationConfig(HeadsConfig):
    """Fields of families that read f.

    Attributes:
        hidden_offset: which layer's output is read: 0 the last one's, o the one's o layers earlier; the backbone's
            number of layers: the input embeddings.
        raw_hidden_states: an earlier layer's output is read as it is, without the final norm, as the paper reads it.
            At offset 0 both are the same: transformers' last hidden state has passed the norm.
        prefix_layers: 1 puts one decoder layer of the backbone's class over f, which heads then read in its place
            (Hydra++). It runs over the context, inside each pass, and starts as the identity.
        prefix_norm: the prefix layer's output passes a final norm of the heads' own, started as the backbone's, as in
            Hydra's code. f is then normed twice, so heads do not start as the backbone.
    """

    hidden_offset: int = within(0, advice="at most the backbone's number of layers", default=0)
    raw_hidden_states: bool = False
    prefix_layers: Literal[0, 1] = 0
    prefix_norm: bool = False

    def validate_prefix_norm(self) -> None:
        if self.prefix_norm and not self.prefix_layers:
            raise ValueError("prefix_norm=True was given without a prefix layer; allowed is prefix_layers=1 with it.")


class PositionWiseHeads(TokenHeads):
    """Families that read one tap at the last committed position and, if grounded, the embeddings of drafted tokens.

    They write one method, `head`; training and drafting both call it. A family may also override
    `first_level` and `step` with cheaper ones; the conformance suite compares them with `head`.
    """

    tap: HiddenTap

    @abstractmethod
    def head(self, k: int, tap_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
        """Head k's hidden states (R, D) from the tap at t and the tokens x_{t+1} … x_{t+k}."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (self.tap,)

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        for k in range(1, self.num_heads + 1):
            rows_R = batch.rows[k - 1]
            tokens_Rk = torch.stack([batch.token(ahead, rows_R) for ahead in range(1, k + 1)], dim=1)
            yield self.head(k, batch.tap(self.tap, rows_R), tokens_Rk)

    def commit(self, state: Any, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan) -> Tensor:
        (tap,) = self.taps
        return plan.newest(taps[tap], state)

    def keep_rows(self, state: Tensor, rows_R: Tensor) -> Tensor:
        return state[rows_R]

    def keep_slots(self, state: Tensor, num_slots: int) -> Tensor:
        return state  # holds one slot only, which the next commit replaces

    def first_level(self, state: Tensor) -> Any:
        return state, torch.empty(state.shape[0], 0, dtype=torch.long, device=state.device)

    def step(self, k: int, level: Any, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Any]:
        tap_PD, tokens_P = level
        tap_MD = tap_PD.index_select(0, parents_M)
        tokens_Mk = torch.cat([tokens_P.index_select(0, parents_M), tokens_M[:, None]], dim=1)
        return self.head(k, tap_MD, tokens_Mk), (tap_MD, tokens_Mk)


class RepresentationHeads(PositionWiseHeads):
    """Position-wise heads whose `head` is given f in the form that their config names."""

    config: RepresentationConfig

    def __init__(self, config: RepresentationConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        if config.hidden_offset > backbone.num_layers:
            raise ValueError(
                f"hidden_offset={config.hidden_offset} was given; the backbone {backbone.name} has "
                f"{backbone.num_layers} layers: allowed are 0 to {backbone.num_layers}, its input embeddings."
            )
        if config.prefix_layers:
            check_last_layer(backbone, "a prefix layer is one")
        self.prefix = nn.ModuleList(identity_layer(backbone, slot) for slot in range(config.prefix_layers))
        self.prefix_norm = own_norm(backbone) if config.prefix_norm else nn.Identity()

    @property
    def tap(self) -> HiddenTap:  # type: ignore[override]
        return self.config.hidden_offset or "final"

    @property
    def taps(self) -> tuple[Tap, ...]:
        """f: the recorded tap where that is f already, else a stack that computes f inside each pass."""
        plain = self.reads_plain and not self.prefix
        return (self.tap,) if plain else (StackTap(heads=self, index=0, reads=self.tap),)

    @property
    def reads_plain(self) -> bool:
        """Whether f, before a prefix layer, is the tap as it is recorded."""
        return self.tap == "final" or self.config.raw_hidden_states

    def run_stack(
        self, index: int, hidden_BND: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache | None
    ) -> Tensor:
        """f, and the prefix layer over it."""
        f_BND = self.normed(hidden_BND)
        for layer in self.prefix:
            f_BND = self.backbone.run_layer(layer, f_BND, positions_BN, mask, cache)
        normed_BND: Tensor = self.prefix_norm(f_BND)
        return normed_BND

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        yield from self.heads_on(self.run_stack(0, batch.taps[self.tap], batch.positions_BT, batch.mask, None), batch)

    def heads_on(self, f_BTD: Tensor, batch: TeacherForcing) -> Iterator[Tensor]:
        """Head k's hidden states at its rows, for k = 1 … K, from f at every position."""
        yield from super().teacher_forced(replace(batch, taps={self.tap: f_BTD}))

    def normed(self, tap_D: Tensor) -> Tensor:
        """(…, D): the tap after the backbone's final norm, or as it is where it is normed already or read raw."""
        return tap_D if self.reads_plain else through_final_norm(self.backbone, tap_D)


def own_norm(backbone: Backbone) -> nn.Module:
    norm = remove_hook_from_module(copy.deepcopy(backbone.norm), recurse=True)
    own: nn.Module = norm.requires_grad_(True)
    return own


def through_final_norm(backbone: Backbone, hidden_D: Tensor) -> Tensor:
    """The backbone's final norm, run in the dtype of the hidden states (heads may be float32), behind the gate."""
    parameters = dict(backbone.norm.named_parameters())
    values = {name: gate(p, backbone.gradient_scale).to(hidden_D.dtype) for name, p in parameters.items()}
    home = next(iter(values.values()), hidden_D).device  # the norm may lie on another device
    normed_D: Tensor = torch.func.functional_call(backbone.norm, values, (hidden_D.to(home),))
    return normed_D.to(hidden_D.device)

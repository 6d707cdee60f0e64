"""What passes and commits exchange: the hidden states a pass records, the plan of a commit, the committed state.

The KV cache and the state of every family and draft model follow one `CommitPlan`, so they always hold the same tokens.
Rows of a batch commit different numbers of slots; slots that only pad a shorter row stay masked ("holes").
"""
# B batch, T position, N slot of a pass, S cache slot, A accepted slot, R remaining row, D model width

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from heads.backbone.cache import TreeCache

HiddenTap = int | Literal["final"]
"""A hidden state of the backbone: "final" is the one after the final norm, which the unembedding reads. An integer n is
the output of the layer n layers before the last, without the final norm; the number of layers means the embeddings."""


class RunsStacks(Protocol):
    """Heads with decoder layers of their own over the context."""

    def run_stack(
        self, index: int, hidden_BND: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache | None
    ) -> Tensor:
        """(B, N, D) after the layers of one stack, which have entries of their own in the cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class StackTap:
    """The output of a stack of the heads' own layers on a hidden state; passes run it as further backbone layers."""

    heads: RunsStacks
    index: int
    reads: HiddenTap


Tap = HiddenTap | StackTap
"""A recorded output of a pass: a hidden state of the backbone, or the output of a stack of the heads."""

HiddenTaps = dict[HiddenTap, Tensor]
Taps = dict[Tap, Tensor]


def hidden_taps(taps: Iterable[Tap]) -> tuple[HiddenTap, ...]:
    """The backbone's hidden states among the taps, and those that stacks read, each once.

    >>> hidden_taps(["final", StackTap(heads=..., index=0, reads=1), StackTap(heads=..., index=1, reads=1)])
    ('final', 1)
    """
    return tuple(dict.fromkeys(tap.reads if isinstance(tap, StackTap) else tap for tap in taps))


@contextlib.contextmanager
def recording(layers: nn.ModuleList, taps: Sequence[HiddenTap], device: torch.device) -> Iterator[HiddenTaps]:
    """Hooks on decoder layers that write hidden states into the yielded dict; they are removed on exit.

    Args:
        taps: "final" gets no hook, since the decoder returns it.
        device: recorded states are moved here.

    Raises:
        ValueError: a tap is deeper than the backbone.
    """
    recorded: HiddenTaps = {}
    handles: list[RemovableHandle] = []
    try:
        for tap in taps:
            if tap != "final":
                handles.append(hook(layers, tap, recorded, device))
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def hook(layers: nn.ModuleList, tap: int, recorded: HiddenTaps, device: torch.device) -> RemovableHandle:
    if not 0 <= tap <= len(layers):
        raise ValueError(f"A tap of {tap} layers before the end was asked of a backbone with {len(layers)} layers.")
    if tap == len(layers):  # the input of the first layer: the embeddings as the model scales them

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorded[tap] = (args[0] if args else kwargs["hidden_states"]).to(device)

        return layers[0].register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        recorded[tap] = (output[0] if isinstance(output, tuple) else output).to(device)

    return layers[len(layers) - 1 - tap].register_forward_hook(after)


@dataclass(frozen=True, kw_only=True)
class CommitPlan:
    """Which slots of one pass are committed, for the backbone's cache and every family's state.

    >>> plan = CommitPlan.from_paths([[0, 2], [0]], device="cpu")   # a ragged batch of two
    >>> plan.slots_BA, plan.valid_BA.int(), plan.newest_B
    (tensor([[0, 2],
            [0, 0]]), tensor([[1, 1],
            [1, 0]], dtype=torch.int32), tensor([2, 0]))

    Attributes:
        slots_BA: the committed slots of the pass, in order; slot 0 pads rows that commit fewer.
        valid_BA: False for slots that only pad, which stay masked, and for padding of the prompt.
        newest_B: the slot of the pass that each row commits last.
        all_keep: every row is known to commit at least one slot.
        in_place: in every row the committed slots are the first slots of the pass, in order, so no slot has to move.
    """

    slots_BA: Tensor
    valid_BA: Tensor
    newest_B: Tensor
    all_keep: bool
    in_place: bool

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]], device: torch.device | str) -> CommitPlan:
        """A plan from the accepted slots of each row; a row that commits nothing has an empty path."""
        longest = max(1, *(len(path) for path in paths))
        slots = [[*path, *[0] * (longest - len(path))] for path in paths]
        valid = [[i < len(path) for i in range(longest)] for path in paths]
        return cls(
            slots_BA=torch.tensor(slots, device=device),
            valid_BA=torch.tensor(valid, device=device),
            newest_B=torch.tensor([path[-1] if path else 0 for path in paths], device=device),
            all_keep=all(paths),
            in_place=all(row == list(range(longest)) for row in slots),
        )

    @classmethod
    def whole(cls, valid_BT: Tensor) -> CommitPlan:
        """Commit every slot, as after a prefill; padding on the left stays masked."""
        batch, length = valid_BT.shape
        slots_BT = torch.arange(length, device=valid_BT.device).expand(batch, length)
        newest_B = torch.full((batch,), length - 1, device=valid_BT.device)
        return cls(slots_BA=slots_BT, valid_BA=valid_BT, newest_B=newest_B, all_keep=False, in_place=True)

    def paths(self) -> list[list[int]]:
        """Each row's committed slots, on the host."""
        slots, valid = self.slots_BA.tolist(), self.valid_BA.tolist()
        return [[slot for slot, keep in zip(*row, strict=True) if keep] for row in zip(slots, valid, strict=True)]

    def select(self, x_BN: Tensor) -> Tensor:
        """The committed slots of a tensor over the pass's slots: (B, N, …) to (B, A, …)."""
        if self.in_place:
            return x_BN[:, : self.slots_BA.shape[1]]
        rows_B1 = torch.arange(x_BN.shape[0], device=x_BN.device)[:, None]
        return x_BN[rows_B1, self.slots_BA]

    def last(self, x_BA: Tensor) -> Tensor:
        """Each row's last entry of a tensor over committed slots: (B, A, …) to (B, …)."""
        places_A = torch.arange(x_BA.shape[1], device=x_BA.device)
        return x_BA[torch.arange(len(x_BA), device=x_BA.device), (self.valid_BA * places_A).argmax(dim=1)]

    def newest(self, x_BND: Tensor, before_BD: Tensor | None = None) -> Tensor:
        """(B, D): each row's last committed slot of a tensor over the pass's slots (B, N, D).

        Args:
            before_BD: the values for rows that commit nothing; None where there are none, or their values are unused.
        """
        if len(x_BND) == 1:
            newest_BD = x_BND.index_select(1, self.newest_B)[:, 0]
        else:
            newest_BD = x_BND[torch.arange(len(x_BND), device=x_BND.device), self.newest_B]
        if self.all_keep or before_BD is None:
            return newest_BD
        return torch.where(self.valid_BA.any(dim=1)[:, None], newest_BD, before_BD)


@dataclass(kw_only=True)
class BackboneState:
    """The committed tokens: one cache slot for each, and masked slots that only pad."""

    cache: TreeCache
    valid_BS: Tensor
    positions_BS: Tensor
    next_position_B: Tensor

    @classmethod
    def empty(cls, batch: int, device: torch.device, cache: TreeCache) -> BackboneState:
        """A state without tokens around an empty cache."""
        nothing_B0 = torch.empty(batch, 0, dtype=torch.long, device=device)
        return cls(
            cache=cache,
            valid_BS=nothing_B0.bool(),
            positions_BS=nothing_B0,
            next_position_B=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def keep_rows(self, rows_R: Tensor) -> BackboneState:
        """The state of some rows; the cache drops the others, and slots that are masked in every remaining row."""
        valid_RS = self.valid_BS[rows_R]
        slots_S = valid_RS.any(dim=0).nonzero().flatten()
        self.cache.keep_rows(rows_R, slots_S)
        return BackboneState(
            cache=self.cache,
            valid_BS=valid_RS[:, slots_S],
            positions_BS=self.positions_BS[rows_R][:, slots_S],
            next_position_B=self.next_position_B[rows_R],
        )

    def keep_slots(self, num_slots: int) -> BackboneState:
        """The state as it was when the first `num_slots` slots were committed.

        Raises:
            ValueError: a recurrent cache no longer has the state of that time; `cache.nearest` says how far it can go.
        """
        self.cache.keep_slots(num_slots)
        return self._first(num_slots)

    def go_back(self, num_slots: int, states: list[Any]) -> BackboneState:
        """As `keep_slots`, any number of slots back: `states` is what `cache.states()` returned then for these rows."""
        self.cache.go_back(num_slots, states)
        return self._first(num_slots)

    def _first(self, num_slots: int) -> BackboneState:
        valid_BS = self.valid_BS[:, :num_slots]
        return BackboneState(
            cache=self.cache,
            valid_BS=valid_BS,
            positions_BS=self.positions_BS[:, :num_slots],
            next_position_B=valid_BS.sum(dim=1),
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward over new slots: the tokens, their positions, and the taps."""

    tokens_BN: Tensor
    positions_BN: Tensor
    taps: Taps
    final_BND: Tensor

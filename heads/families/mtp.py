"""MTP heads: the multi-token-prediction modules that released models carry, and new ones like them.

    module j at row t        m^j_t = post_norm(layer(eh_proj [enorm E(x_{t+j}) ; hnorm m^{j-1}_t])), m^0_t the state:
                             its layer, of the backbone's own class, attends to the rows of module j up to t
    modules: per_head        head k at t is m^k_t, scored by the backbone's unembedding
    modules: one             head k is the only module run again on its own output: at row t + k - 1 it reads
                             E(x_{t+k}) and the output of head k - 1, and attends to the rows before

DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 23. The order in `eh_proj`, the state that is read and the
embedding of row 0 differ between architectures (heads/export/formats/mtp.py). A module passes on its normed output, as
in transformers' `MtpModel`, against which tests compare a chain. One module for all depths is how servers draft deeper
than a model has modules, and what FastMTP (arXiv:2509.18362) trains; training unrolls it as drafting runs it.

    a node x_{t+d} of a tree (the root has d = 1) is row t + d - j of module j. Modules j < d do not run for it, since
    their rows would need the backbone's state at t + 1 or later. So a node runs in modules d … K, each time after its
    parent's row in the same module.
"""
# B text, T position, N slot of a pass, A committed slot, S slot, G group of nodes, n node of a group, M tree node,
# d row of an own path, R row of a batch, D model width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.masks import causal, within_documents
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.projection import Projection
from heads.interface.draft_rows import context_slots, shifted
from heads.interface.layers import check_last_layer
from heads.interface.mtp_module import Module
from heads.interface.own_paths import PathCache, PathContext, has_row, longer, sees_unrolled
from heads.interface.token_heads import MAX_HEADS, HeadsConfig, TeacherForcing, TokenHeads
from heads.validation import validated


@validated
@dataclass(kw_only=True)
class Config(HeadsConfig):
    """Fields of `mtp` heads.

    Attributes:
        num_heads: K; with one module these are the steps that training unrolls, and drafts may go deeper.
        modules: "one" for all heads, run again on its own output, or one "per_head".
        start: a new module's layer is "copied" from the backbone's last, or "random" as the backbone's class draws it.
        attention: a module's layer is like the backbone's "last" attention layer, or like its last one with "full" or
            with "sliding" attention where it mixes them (Mellum).
        first: which half of `eh_proj` comes first, the "embedding" (DeepSeek-V3, GLM-4.5, Qwen3-Next), or the "state"
            (MiMo).
        reads: the backbone's "final" state, after its norm, or the "last" layer's output, before it (MiMo).
        blank_first: the embedding of a text's first row is zero (MiMo).
    """

    modules: Literal["one", "per_head"] = "one"
    start: Literal["copied", "random"] = "copied"
    attention: Literal["last", "full", "sliding"] = "last"
    first: Literal["embedding", "state"] = "embedding"
    reads: Literal["final", "last"] = "final"
    blank_first: bool = False


@dataclass(frozen=True, kw_only=True)
class MtpState:
    """One row of each module for each committed slot: module j's row lies j positions before the slot's token.

    Attributes:
        cache: layer j - 1 holds the keys and values of module j. As many layers follow; they hold, in place of keys,
            what module j reads at the slot after each slot, for rolling back.
        newest: for each module what it reads at the next slot, (B, D).
        real_BS: False where a slot only pads.
        positions_BS: positions of the slots' tokens.
        position_B: position of the last committed token.
    """

    cache: TreeCache
    newest: list[Tensor]
    real_BS: Tensor
    positions_BS: Tensor
    position_B: Tensor


class Heads(TokenHeads):
    """One module, or one a head."""

    grounded = True
    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        check_last_layer(backbone, "mtp heads have a layer")
        self.repeats = config.modules == "one"
        count = 1 if self.repeats else config.num_heads
        self.layers = nn.ModuleList(Module(config, backbone, index) for index in range(count))

    @property
    def max_depth(self) -> int:
        return MAX_HEADS if self.repeats else self.num_heads

    @property
    def taps(self) -> tuple[Tap, ...]:
        return ("final",) if self.config.reads == "final" else (0,)

    def projection(self, k: int) -> Projection:
        return self.scored(self.backbone.projection.without_norm())

    def _mask(self, may_attend: Tensor, rows: Tensor, slot_rows: Tensor) -> Any:
        return self.backbone.mask_style.finish(may_attend, rows, slot_rows, self.backbone.dtype)

    # --- training --------------------------------------------------------------------------------------------------

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        state_BTD = batch.taps[self.hidden_taps[0]]
        outputs = self._unrolled(batch, state_BTD) if self.repeats else self._chained(batch, state_BTD)
        for rows_R, output_BTD in zip(batch.rows, outputs, strict=True):
            yield output_BTD.flatten(0, 1)[rows_R]

    def _chained(self, batch: TeacherForcing, hidden_BTD: Tensor) -> Iterator[Tensor]:
        """Run module k at every position; it attends to its rows up to there."""
        for k, module in enumerate(self.layers, start=1):
            tokens_BT = shifted(batch.tokens_BT, k)
            hidden_BTD = module(self.backbone, tokens_BT, hidden_BTD, batch.positions_BT, batch.mask, None)
            yield hidden_BTD

    def _unrolled(self, batch: TeacherForcing, hidden_BTD: Tensor) -> Iterator[Tensor]:
        """Run step k at every position: it attends to step 1's rows up to there, and to later steps' rows just there.

        The mask is made from positions, which restart at 0 with each packed document.
        """
        may_attend_BTT = within_documents((batch.positions_BT == 0).cumsum(dim=1))
        before, slot_rows = PathCache(), list[Tensor]()
        for k in range(1, self.num_heads + 1):
            rows_BT = batch.positions_BT + (k - 1)
            slot_rows.append(rows_BT)
            mask = self._mask(sees_unrolled(may_attend_BTT, k), rows_BT, torch.cat(slot_rows, dim=1))
            tokens_BT = shifted(batch.tokens_BT, k)
            hidden_BTD = self.layers[0](self.backbone, tokens_BT, hidden_BTD, rows_BT, mask, before)
            before = before.with_new()
            yield hidden_BTD

    # --- drafting --------------------------------------------------------------------------------------------------

    def commit(
        self, state: MtpState | None, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan
    ) -> MtpState:
        """Add a row of each module for each committed token, all from true tokens and states."""
        tokens_BA, positions_BA = plan.select(tokens_BN), plan.select(positions_BN)
        hidden_BAD = plan.select(taps[self.taps[0]])
        if state is None:
            nothing_BD = torch.zeros_like(hidden_BAD[:, 0])
            state = MtpState(
                cache=TreeCache(),
                newest=[nothing_BD for _ in self.layers],
                real_BS=plan.valid_BA[:, :0],
                positions_BS=positions_BA[:, :0],
                position_B=torch.zeros_like(positions_BA[:, 0]),
            )
        any_B = plan.valid_BA.any(dim=1)
        positions_BS = torch.cat([state.positions_BS, positions_BA], dim=1)
        newest = list[Tensor]()
        for lag, (module, old_BD) in enumerate(zip(self.layers, state.newest, strict=True), start=1):
            before_BAD = torch.cat([old_BD[:, None], hidden_BAD[:, :-1]], dim=1)
            newest.append(torch.where(any_B[:, None], plan.last(hidden_BAD), old_BD))
            state.cache.update(hidden_BAD[:, None], hidden_BAD[:, None, :, :0], len(self.layers) + lag - 1)
            new_BAA = causal(plan.valid_BA & (positions_BA >= lag))
            seen_BAS = has_row(state.real_BS, state.positions_BS, lag)[:, None].expand(-1, new_BAA.shape[1], -1)
            rows_BA = positions_BA - lag
            mask = self._mask(torch.cat([seen_BAS, new_BAA], dim=2), rows_BA, positions_BS - lag)
            hidden_BAD = module(self.backbone, tokens_BA, before_BAD, rows_BA.clamp(min=0), mask, state.cache)
        state.cache.commit(None, positions_BA.shape[1])
        return MtpState(
            cache=state.cache,
            newest=newest,
            real_BS=torch.cat([state.real_BS, plan.valid_BA], dim=1),
            positions_BS=positions_BS,
            position_B=torch.where(any_B, plan.last(positions_BA), state.position_B),
        )

    def keep_rows(self, state: MtpState, rows_R: Tensor) -> MtpState:
        state.cache.keep_rows(rows_R)
        return MtpState(
            cache=state.cache,
            newest=[newest_BD[rows_R] for newest_BD in state.newest],
            real_BS=state.real_BS[rows_R],
            positions_BS=state.positions_BS[rows_R],
            position_B=state.position_B[rows_R],
        )

    def keep_slots(self, state: MtpState, num_slots: int) -> MtpState:
        real_BS, positions_BS = state.real_BS[:, :num_slots], state.positions_BS[:, :num_slots]
        last_B = (real_BS * torch.arange(num_slots, device=real_BS.device)).argmax(dim=1)
        rows_B = torch.arange(len(last_B), device=last_B.device)
        read = state.cache.layers[len(self.layers) :]
        newest = [layer.keys[rows_B, 0, last_B] for layer in read]
        state.cache.keep_slots(num_slots)
        return MtpState(
            cache=state.cache,
            newest=newest,
            real_BS=real_BS,
            positions_BS=positions_BS,
            position_B=positions_BS[rows_B, last_B],
        )

    def first_level(self, state: MtpState) -> dict[str, Any]:
        """The level before any node: what each module reads next, empty own paths, and each text's context.

        The context has `context_slots`; those without a row are masked.
        """
        layers, length = state.cache.layers[: len(self.layers)], state.real_BS.shape[1]
        slots = context_slots(length, layers[0].keys)
        texts = torch.arange(len(state.position_B), device=state.position_B.device)
        more = (0, slots - length)
        return {
            "hidden": state.newest,
            "positions": state.position_B,
            "texts": texts,
            "keys": [x.keys.new_zeros(len(texts), 0, *x.keys.shape[1::2]) for x in layers],
            "values": [x.values.new_zeros(len(texts), 0, *x.values.shape[1::2]) for x in layers],
            "context_keys": [x.keys[:, :, :slots] for x in layers],
            "context_values": [x.values[:, :, :slots] for x in layers],
            "context_real": nn.functional.pad(state.real_BS, more),
            "context_positions": nn.functional.pad(state.positions_BS, more),
        }

    def step(self, k: int, level: dict[str, Any], tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """See `TokenHeads.step`; with one module k may exceed K."""
        texts_M = level["texts"].index_select(0, parents_M)
        positions_M = level["positions"].index_select(0, parents_M) + 1
        outputs: list[Tensor] = []
        paths: list[tuple[Tensor, Tensor]] = []
        context = PathContext(level, texts_M)
        for place in range(len(level["hidden"])):  # modules k … K, or the only one
            index = 0 if self.repeats else k - 1 + place
            hidden_MD, keys, values = (level[name][place].index_select(0, parents_M) for name in OF_MODULE)
            rows_M = positions_M - (index + 1)
            cache, may_attend, slot_rows = context.seen(index, keys, values, rows_M)
            tokens, hidden, rows = (context.grouped(x) for x in (tokens_M, hidden_MD, rows_M))
            mask = self._mask(may_attend, rows, slot_rows)
            output = self.layers[index](self.backbone, tokens, hidden, rows.clamp(min=0), mask, cache)
            outputs.append(output.flatten(0, 1))
            assert cache.new is not None
            paths.append((longer(keys, cache.new[0]), longer(values, cache.new[1])))
        following = slice(None) if self.repeats else slice(1, None)  # module k has no row at t + 1
        nodes = {
            "hidden": outputs if self.repeats else outputs[:-1],
            "positions": positions_M,
            "texts": texts_M,
            "keys": [keys for keys, _ in paths[following]],
            "values": [values for _, values in paths[following]],
        }
        return outputs[0], level | nodes


OF_MODULE = ("hidden", "keys", "values")
"""Names of what a level holds for each node and each module that still runs."""

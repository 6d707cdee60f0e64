"""EAGLE-3 heads: one decoder layer on three hidden states of the backbone, run again on its own output.

    row of position P        token x_{P+1}, rotary position P
    committed (P ≤ t - 1)    r = fc([low ; mid ; high] at P)        true states, computed anew after each verification
    head 1 at t (P = t)      r = fc([low ; mid ; high] at t)        x_{t+1}: the root
    head k at t              r = r'' of head k - 1                  x_{t+k}, rotary position t + k - 1

    x = [N_e(E(x_{P+1})) ; N_h(r)]     r' = r + attention(x)     r'' = r' + MLP(N_p(r'))     logits = W N(r'')

Li et al. 2025 (EAGLE-3), section 3. Attention reads all committed rows and, in a tree, the rows of a node's own
ancestors. Training unrolls the same steps (its "training-time test"): head k's loss is that of the k-th step, so K is
the number of unrolled steps and drafts may go deeper. `fc_norm` and `norm_output` are EAGLE-3.1; `version: 1` is the
first EAGLE (Li et al. 2024), whose layer reads fc([E(x_{P+1}) ; final state]) and is scored by the backbone.
"""
# B text, T position, N slot of a pass, A committed slot, S context slot, k row of an own path, M tree node, R row,
# G key-value head, E head width, D model width, I input width of the attention

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from heads.backbone.masks import within_documents
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.projection import Projection
from heads.backbone.state import HiddenTap
from heads.interface.draft_attention import Context, by_text, seen_as_bias
from heads.interface.draft_layer import MidLayer, Rope, Turn, rms_weight, rope_parameters_of, shape_like
from heads.interface.draft_rows import CONTEXT, DraftRows, no_rows, shifted
from heads.interface.layers import OneUnembedding, Unembedding
from heads.interface.token_heads import MAX_HEADS, HeadsConfig, TeacherForcing, TokenHeads
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class Config(HeadsConfig):
    """Fields of `eagle` heads.

    Attributes:
        num_heads: K, the steps that training unrolls; drafts may go deeper.
        taps: hidden states to read, numbered as in transformers' `hidden_states`: 0 the embeddings, n the output of
            layer n, less than the number of layers L. None: 2, L // 2 and L - 3, which servers read; with fewer than
            seven layers 1, L // 2 and L - 1, each once.
        fc_norm: EAGLE-3.1: each of these states passes an RMS norm of its own before they are joined.
        norm_output: EAGLE-3.1: the next step reads N(r'') in place of r''.
        norm_before_residual: the residual stream starts at N_h(r) in place of r.
        version: 3, or 1, which has none of the above and `unembedding: shared`.
        unembedding: "own" (one for all steps, started from the backbone's) or "shared" (the backbone's).
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim: the layer's shape; None: the backbone's.
        rope_theta: base of rotary embeddings of the default kind; None: rotary embeddings like the backbone's.
        rms_norm_eps: of all norms; None: the backbone's, or 1e-6 where it has none.
    """

    taps: list[int] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    version: Literal[1, 3] = 3
    unembedding: Unembedding = "own"
    intermediate_size: int | None = within(1, 1 << 20, default=None)
    num_attention_heads: int | None = within(1, 1 << 20, default=None)
    num_key_value_heads: int | None = within(1, 1 << 20, default=None)
    head_dim: int | None = within(2, 1 << 20, default=None)
    rope_theta: float | None = within(above=0, default=None)
    rms_norm_eps: float | None = within(above=0, default=None)

    def validate_version(self) -> None:
        switches = [name for name in ("fc_norm", "norm_output", "norm_before_residual") if getattr(self, name)]
        switches += ["taps"] * (self.taps is not None)
        if self.version == 1 and switches:
            raise ValueError(f"{switches[0]} was given with version=1; EAGLE-1 has none of {', '.join(switches)}.")
        if self.version == 1 and self.unembedding != "shared":
            raise ValueError("version=1 was given with unembedding='own'; EAGLE-1 is scored by the backbone: 'shared'.")

    def validate_taps(self) -> None:
        if self.taps is not None and (not self.taps or sorted(set(self.taps)) != self.taps or self.taps[0] < 0):
            raise ValueError(f"taps={self.taps} was given; allowed are ascending numbers of hidden states, from 0.")


class Heads(TokenHeads):
    """One layer, one unembedding, any number of steps."""

    grounded = True
    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        width = backbone.hidden_size
        self.tap_layers = choose_taps(config, backbone)
        self.shape = shape_like(
            backbone,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        self.rope_parameters = rope_parameters_of(backbone, config.rope_theta)
        self.rope = Rope(self.shape, self.rope_parameters, backbone.config.max_position_embeddings)
        eps = self.shape.rms_norm_eps
        joined = 2 if config.version == 1 else len(self.tap_layers)
        self.fc = nn.Linear(joined * width, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in self.tap_layers)
        self.midlayer = MidLayer(
            self.shape, joins=config.version == 3, norm_before_residual=config.norm_before_residual
        )
        self.norm = nn.Identity() if config.version == 1 else nn.RMSNorm(width, eps=eps)
        if config.unembedding == "own":
            self.lm_head = OneUnembedding(backbone, config.draft_vocabulary)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Start the layer so that it passes on the highest state alone, scored as the backbone scores its final one."""
        self.midlayer.start(std=getattr(self.backbone.config, "initializer_range", 0.02))
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, -self.fc.out_features :])
        if isinstance(self.norm, nn.RMSNorm) and (weight_D := rms_weight(self.backbone, self.norm)) is not None:
            self.norm.weight.copy_(weight_D)

    @property
    def max_depth(self) -> int:
        return MAX_HEADS

    @property
    def taps(self) -> tuple[Tap, ...]:
        if self.config.version == 1:
            return ("final",)
        return tuple(self.backbone.num_layers - n for n in self.tap_layers)

    def projection(self, k: int) -> Projection:
        """One record for all k. The heads' own unembedding has no bias, because servers load none."""
        whole = self.backbone.projection.without_norm()
        return self.scored(whole if self.config.unembedding == "shared" else whole.with_weight(self.lm_head.weight))

    # --- one row ---------------------------------------------------------------------------------------------------

    def fuse(self, taps: dict[HiddenTap, Tensor]) -> Tensor:
        """(…, D): r from the backbone's states (version 1: the final state, which `join` reads)."""
        if self.config.version == 1:
            return taps["final"]
        states = [taps[tap] for tap in self.hidden_taps]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        fused_D: Tensor = self.fc(torch.cat(states, dim=-1))
        return fused_D

    def join(self, tokens: Tensor, hidden_D: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input (…, I) and the start of the residual stream (…, D), from x_{P+1} and r."""
        embedded_D = self.backbone.embed(tokens).to(hidden_D.dtype)
        if self.config.version == 1:
            hidden_D = self.fc(torch.cat([embedded_D, hidden_D], dim=-1))
        return self.midlayer.join(embedded_D, hidden_D)

    def finish(self, residual_D: Tensor, read_D: Tensor) -> tuple[Tensor, Tensor]:
        """(…, D) what is scored, and (…, D) what the next step reads."""
        output_D = self.midlayer.finish(residual_D, read_D)
        normed_D = self.norm(output_D)
        return normed_D, normed_D if self.config.norm_output else output_D

    # --- training --------------------------------------------------------------------------------------------------

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        """Run step k at every position: it attends to step 1's rows up to there, and to later steps' rows just there.

        The mask is made from positions, which restart at 0 with each packed document.
        """
        hidden_BTD, attention = self.fuse(batch.taps), self.midlayer.self_attn
        may_attend_BTT = within_documents((batch.positions_BT == 0).cumsum(dim=1))
        bias_BTT = seen_as_bias(may_attend_BTT, hidden_BTD.dtype)
        context, own_keys, own_values = None, list[Tensor](), list[Tensor]()
        for k in range(1, self.num_heads + 1):
            turn = self.rope.at(batch.positions_BT + (k - 1), hidden_BTD.dtype)
            inputs_BTI, residual_BTD = self.join(shifted(batch.tokens_BT, k), hidden_BTD)
            keys_BTGE, values_BTGE = attention.rows(inputs_BTI, turn)
            if context is None:
                keys_BGTE, values_BGTE = keys_BTGE.transpose(1, 2), values_BTGE.transpose(1, 2)
                context = Context(keys_BGSE=keys_BGTE, values_BGSE=values_BGTE, bias_BWS=bias_BTT, causal=True)
                own = keys_BTGE[:, :, None][:, :, :0], values_BTGE[:, :, None][:, :, :0]
            else:
                own_keys.append(keys_BTGE)
                own_values.append(values_BTGE)
                own = torch.stack(own_keys, dim=2), torch.stack(own_values, dim=2)
            scored_BTD, hidden_BTD = self.finish(residual_BTD, attention(inputs_BTI, turn, context, own))
            yield scored_BTD.flatten(0, 1)[batch.rows[k - 1]]

    # --- drafting --------------------------------------------------------------------------------------------------

    def commit(
        self, state: DraftRows | None, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan
    ) -> DraftRows:
        """Add rows of the committed slots, from true states: keys and values only, since no draft starts from them."""
        positions_BA = plan.select(positions_BN)
        fused_BAD = self.fuse({tap: plan.select(taps[tap]) for tap in self.hidden_taps})
        state = state or no_rows(fused_BAD, positions_BA)
        inputs_BAI, _ = self.join(plan.select(tokens_BN), state.read_by(fused_BAD))
        turn = self.rope.at((positions_BA - 1).clamp(min=0), inputs_BAI.dtype)
        return state.add(*self.midlayer.self_attn.rows(inputs_BAI, turn), fused_BAD, positions_BA, plan)

    def keep_rows(self, state: DraftRows, rows_R: Tensor) -> DraftRows:
        return state.keep_rows(rows_R)

    def keep_slots(self, state: DraftRows, num_slots: int) -> DraftRows:
        return state.keep_slots(num_slots)

    def first_level(self, state: DraftRows) -> dict[str, Tensor]:
        """The level before any node: r at the last committed position, empty own paths, and each text's context."""
        context, num_texts = state.context(), len(state.position_B)
        keys_BGSE = context["context_keys"]
        nothing_B0GE = keys_BGSE.new_zeros(num_texts, 0, *keys_BGSE.shape[1::2])
        texts_B = torch.arange(num_texts, device=state.position_B.device)
        start = (state.newest_BD, state.position_B, texts_B, nothing_B0GE, nothing_B0GE)
        return dict(zip(NODE, start, strict=True)) | context

    def step(
        self, k: int, level: dict[str, Tensor], tokens_M: Tensor, parents_M: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `TokenHeads.step`, for any k."""
        hidden_MD, positions_M, texts_M = (level[name].index_select(0, parents_M) for name in NODE[:3])
        inputs_MI, residual_MD = self.join(tokens_M, hidden_MD)
        turn = self.rope.at(positions_M, inputs_MI.dtype)
        own_keys, own_values = (
            torch.cat([level[name].index_select(0, parents_M), rows[:, None]], dim=1)
            for name, rows in zip(NODE[3:], self.midlayer.self_attn.rows(inputs_MI, turn), strict=True)
        )
        read_MD = self.read(level, texts_M, inputs_MI, turn.cos, turn.sin, own_keys, own_values)
        scored_MD, next_MD = self.finish(residual_MD, read_MD)
        nodes = dict(zip(NODE, (next_MD, positions_M + 1, texts_M, own_keys, own_values), strict=True))
        return scored_MD, level | nodes

    def read(self, level: dict[str, Tensor], texts_M: Tensor, *of_nodes: Tensor) -> Tensor:
        """(M, D): what the attention of each node reads; nodes are grouped by text where their order allows it."""
        context = [level[name] for name in CONTEXT]
        groups = len(context[0])
        if not by_text(texts_M, groups):  # each node is a group of its own, with a copy of its context
            groups, context = len(texts_M), [x.index_select(0, texts_M) for x in context]
        inputs, cos, sin, keys, values = (torch.unflatten(x, 0, (groups, -1)) for x in of_nodes)
        seen = Context(keys_BGSE=context[0], values_BGSE=context[1], bias_BWS=context[2][:, None])
        return self.midlayer.self_attn(inputs, Turn(cos=cos, sin=sin), seen, (keys, values)).flatten(0, 1)


NODE = ("hidden", "positions", "texts", "keys", "values")
"""Names of what a level holds for each node; for each text it holds `CONTEXT`."""


def choose_taps(config: Config, backbone: Backbone) -> list[int]:
    """The hidden states that are read, ascending; an empty list for version 1, which reads the final state.

    Raises:
        ValueError: a tap that is not below the number of layers.
    """
    if config.version == 1:
        return []
    layers = backbone.num_layers
    if config.taps is None:
        return [2, layers // 2, layers - 3] if layers >= 7 else sorted({min(1, layers - 1), layers // 2, layers - 1})
    if config.taps[-1] >= layers:
        raise ValueError(
            f"taps={config.taps} was given; the backbone {backbone.name} has {layers} layers: allowed are 0, its "
            f"embeddings, to {layers - 1}, the output of its last layer but one."
        )
    return config.taps

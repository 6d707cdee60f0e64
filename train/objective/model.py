"""The module that engines wrap: backbone, heads and loss in a single forward.

Since heads and loss run inside, engines that shard parameters gather every weight in use, in backward too. A frozen
backbone runs without autograd and stays in eval mode. A trained one has its own loss beside the heads', and gradients
from the heads pass the gradient gate (heads/backbone/gradient_gate.py): at the taps, at the embeddings that heads read,
and at the unembedding that they share.
"""
# B batch, T position, K trained head (the backbone's own first, where it is trained), M logged sum, R supervised row

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.backbone.gradient_gate import gate
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.backbone.state import HiddenTap
from heads.interface.token_heads import TeacherForcing, TokenHeads
from train.objective.documents_as_rows import refuse_states_of_heads
from train.objective.losses import weighted_loss
from train.objective.packed_backbone import PackedBackbone
from train.objective.soft_targets import Distillation
from train.objective.targets import HeadRows, count_supervised, labels_at, supervised_rows
from train.objective.teacher import Teacher
from train.objective.weights import LossConfig, SelfDistillationConfig


@dataclass(frozen=True, kw_only=True)
class BackboneStates:
    """Outputs of backbone and teacher on a batch of packed blocks, from which heads and losses are computed.

    Attributes:
        batch: the inputs of the heads.
        final_BTD: the backbone's final hidden states; None where it did not run and they were not stored.
        teacher_BTD: the teacher's final hidden states; None where there is no teacher.
        own_rows_R: supervised positions of the backbone's own distribution, in the flattened (B·T).
    """

    batch: TeacherForcing
    final_BTD: Tensor | None
    teacher_BTD: Tensor | None
    own_rows_R: Tensor

    @functools.cached_property
    def teaching_states(self) -> Tensor:
        """(B·T, D) the final hidden states without gradient, one tensor for all heads that they teach."""
        assert self.final_BTD is not None, "stored taps hold the final states where the loss reads them"
        return self.final_BTD.detach().flatten(0, 1)


class TrainedModel(PackedBackbone):
    """Backbone and heads with the Modified-CLM loss.

    Args:
        backbone: the wrapped causal LM.
        token_heads: the heads; None trains the backbone alone.
        trains_backbone: train the backbone together with the heads; without heads it is trained in any case.
        gradient_scale: LR_MB / LR_B, the gate on gradients from heads to a trained backbone.
        label_shift: for a backbone that is trained alone: its label at t is x_{t+label_shift}.
        lookahead: for a backbone that is trained alone: share of positions whose first layer sees one token ahead.
        attend_across_documents: let attention cross the documents of a packed block (labels never do).
        head_decay: head k's loss is weighted with head_decay ** (k - 1); the backbone's own with 1.
        loss: the heads' losses and their weights; None is the cross-entropy with the true tokens.
        self_distillation: distil the backbone as it is now, before training, into the trained one.
    """

    weights_K: Tensor

    def __init__(
        self,
        backbone: Backbone,
        token_heads: TokenHeads | None,
        *,
        trains_backbone: bool = False,
        gradient_scale: float = 1.0,
        label_shift: int = 1,
        lookahead: float = 0.0,
        attend_across_documents: bool = False,
        head_decay: float = 1.0,
        loss: LossConfig | None = None,
        self_distillation: SelfDistillationConfig | None = None,
    ) -> None:
        if token_heads is not None and not attend_across_documents:
            refuse_states_of_heads(token_heads)
        super().__init__(
            backbone,
            trains_backbone=trains_backbone or token_heads is None,
            lookahead=lookahead,
            attend_across_documents=attend_across_documents,
        )
        self.token_heads = token_heads
        self.self_distillation = self_distillation or SelfDistillationConfig()
        self.teacher = Teacher(backbone) if self.self_distillation.weight else None
        if token_heads is not None and trains_backbone:
            token_heads.backbone_was_trained = True
        self.backbone.gradient_scale = gradient_scale
        self.label_shift = label_shift
        self.loss = loss or LossConfig()
        self.chunk_elements: int | None = None  # logits that the loss holds at a time; chosen by the device
        weights = [1.0] * self.trains_backbone + self.loss.weights(self.num_heads, head_decay)
        self.register_buffer("weights_K", torch.tensor(weights), persistent=False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.trains_backbone and is_trained(name, self.model))

    @property
    def num_heads(self) -> int:
        return 0 if self.token_heads is None else self.token_heads.num_heads

    @property
    def shifts(self) -> list[int]:
        """The label shift of each trained head, the backbone's own first."""
        return [self.label_shift] * self.trains_backbone + list(range(2, self.num_heads + 2))

    @property
    def loss_names(self) -> list[str]:
        """Names of the logged sums: each head's cross-entropy, then the heads' other losses."""
        kinds = ["loss"] + ["soft"] * (self.loss.soft > 0) + ["regression"] * (self.loss.regression > 0)
        names = [f"head{k}_{kind}" for kind in kinds for k in range(1, self.num_heads + 1)]
        return ["backbone_loss"] * self.trains_backbone + names + ["backbone_kl"] * (self.teacher is not None)

    def counts_of_logged(self, counts_K: Tensor) -> Tensor:
        """(M,): the number of labels in each logged sum."""
        further = (self.loss.soft > 0) + (self.loss.regression > 0)
        own = [] if self.teacher is None else [counts_K[:1]]
        return torch.cat([counts_K, *[counts_K[self.trains_backbone :]] * further, *own])

    def train(self, mode: bool = True) -> TrainedModel:
        super().train(mode)
        self.model.train(mode and self.trains_backbone)
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        loss_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        counts_K: Tensor | None = None,
        hidden_states: Tensor | None = None,
        *,
        heads_weight: float = 1.0,
        inside: Callable[[], Any] | None = None,
    ) -> Any:
        """The loss of one micro-batch; or the result of `inside`, which is called with every weight gathered.

        Args:
            input_ids: (B, T) packed tokens.
            loss_mask: (B, T) True where a token may be a target.
            document_ids: (B, T) which document of its block a token belongs to.
            counts_K: labels of each head over the whole batch (all micro-batches, all processes); None counts this
                micro-batch alone.
            hidden_states: (B, taps, T, D) stored states of a frozen backbone, which then does not run.
            heads_weight: weight of the heads' losses relative to the backbone's own at this step (WarmInConfig).
            inside: evaluation or decoding under engines that shard weights; no other argument is given then, and every
                process has to make the same calls.

        Returns:
            loss: the weighted sum over heads of (sum of a head's losses / count of its labels).
            loss_sums_K: each head's sum of cross-entropies over this micro-batch, detached.
            logged_sums_M: these, the heads' other sums and the divergence from the teacher, named by `loss_names`.
        """
        if inside is not None:
            return inside()
        assert input_ids is not None
        assert loss_mask is not None
        assert document_ids is not None
        if counts_K is None:
            counts_K = self.count_labels(input_ids, loss_mask, document_ids)
        factors_K = self.weights_K / counts_K.to(self.weights_K.device).clamp(min=1)
        factors_K[int(self.trains_backbone) :] *= heads_weight
        states = self.backbone_states(input_ids, loss_mask, document_ids, stored_BNTD=hidden_states)
        heads = (
            replace(self.with_targets(rows, states), factor=factors_K[i])
            for i, rows in enumerate(self.head_rows(states, with_backbone=self.trains_backbone))
        )
        loss, sums = weighted_loss(heads, self.chunk_elements)
        further = [sums.soft] * (self.loss.soft > 0) + [sums.regression] * (self.loss.regression > 0)
        own = [] if self.teacher is None else [sums.soft[:1]]
        logged_M = torch.cat([sums.hard, *(sums_K[self.trains_backbone :] for sums_K in further), *own])
        return {"loss": loss, "loss_sums_K": sums.hard, "logged_sums_M": logged_M}

    def backbone_states(
        self,
        tokens_BT: Tensor,
        loss_mask_BT: Tensor,
        document_ids_BT: Tensor,
        *,
        lookahead: float | None = None,
        stored_BNTD: Tensor | None = None,
    ) -> BackboneStates:
        """Run teacher and backbone over packed blocks.

        Args:
            lookahead: replaces the model's own.
            stored_BNTD: stored taps of a frozen backbone, which then does not run.
        """
        teacher_BTD = self._teacher_states(tokens_BT, document_ids_BT)
        batch, final_BTD = self.teacher_forcing(tokens_BT, loss_mask_BT, document_ids_BT, lookahead, stored_BNTD)
        own_rows_R = supervised_rows(loss_mask_BT, document_ids_BT, self.label_shift)
        return BackboneStates(batch=batch, final_BTD=final_BTD, teacher_BTD=teacher_BTD, own_rows_R=own_rows_R)

    def head_rows(self, states: BackboneStates, *, with_backbone: bool) -> Iterator[HeadRows]:
        """Each head's supervised rows, one head at a time: a stack of K hidden states would be gigabytes.

        Args:
            with_backbone: yield the backbone's own rows first, whether it is trained or not.
        """
        if with_backbone:
            yield self._own_rows(states)
        if self.token_heads is None:
            return
        for k, hidden_RD in enumerate(self.token_heads.teacher_forced(states.batch), start=1):
            projection, rows_R = self.token_heads.projection(k), states.batch.rows[k - 1]
            yield HeadRows(
                head=k,
                hidden_RD=hidden_RD,
                labels_R=labels_at(states.batch.tokens_BT, rows_R, k + 1),
                shift=k + 1,
                rows_R=rows_R,
                projection=projection,
                gates=self._gates(projection),
                shared=projection.weight is self.backbone.projection.weight,
            )

    def _own_rows(self, states: BackboneStates) -> HeadRows:
        """The backbone's own rows: labels, and the teacher's distribution where there is a teacher."""
        assert states.final_BTD is not None, "stored taps serve heads alone"
        projection, rows_R = self.backbone.projection.without_norm(), states.own_rows_R
        rows = HeadRows(
            hidden_RD=states.final_BTD.flatten(0, 1)[rows_R],
            labels_R=labels_at(states.batch.tokens_BT, rows_R, self.label_shift),
            shift=self.label_shift,
            rows_R=rows_R,
            projection=projection,
            gates=[1.0] * len(projection.parameters()),
            shared=True,
        )
        if self.teacher is None or states.teacher_BTD is None:
            return rows
        share = self.self_distillation.weight
        distillation = Distillation(
            states_ND=states.teacher_BTD.flatten(0, 1),
            rows_R=rows_R,
            projection=self.teacher.projection,
            weight=share,
            temperature=self.self_distillation.temperature,
            divergence="kl",
        )
        return replace(rows, hard=1 - share, distillation=distillation)

    def with_targets(self, rows: HeadRows, states: BackboneStates) -> HeadRows:
        """A head's rows with the targets that `loss` gives; the backbone's own rows already have theirs."""
        if rows.head == 0:
            return rows
        rows, loss = replace(rows.scored(), hard=self.loss.hard), self.loss
        if not loss.reads_final_states:
            return rows
        distillation = Distillation(
            states_ND=states.teaching_states,
            rows_R=rows.predicting_rows(),
            projection=self.teaching_projection,
            weight=loss.soft,
            temperature=loss.temperature,
            top_n=loss.top_n,
            divergence=loss.divergence,
        )
        return replace(
            rows,
            distillation=distillation if loss.soft else None,
            target_RD=distillation.hidden() if loss.regression else None,
            regression=loss.regression,
        )

    @property
    def teaching_projection(self) -> Projection:
        """The backbone's projection, restricted to the draft vocabulary where the heads have one."""
        projection = self.backbone.projection.without_norm()
        return projection if self.token_heads is None else self.token_heads.scored(projection)

    def count_labels(self, tokens_BT: Tensor, loss_mask_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
        """(K,): labels of each trained head in a batch; heads with a draft vocabulary count only labels in it."""
        vocabulary = None if self.token_heads is None else self.token_heads.draft_vocabulary
        if vocabulary is None:
            return count_supervised(loss_mask_BT, document_ids_BT, self.shifts)
        own, of_heads = self.shifts[: self.trains_backbone], self.shifts[self.trains_backbone :]
        scored_BT = loss_mask_BT.bool() & vocabulary.find(tokens_BT)[1]
        return torch.cat(
            [
                count_supervised(loss_mask_BT, document_ids_BT, own),
                count_supervised(scored_BT, document_ids_BT, of_heads),
            ]
        )

    def teacher_forcing(
        self,
        tokens_BT: Tensor,
        loss_mask_BT: Tensor,
        document_ids_BT: Tensor,
        lookahead: float | None = None,
        states_BNTD: Tensor | None = None,
    ) -> tuple[TeacherForcing, Tensor | None]:
        """Run the backbone over packed blocks; returns the heads' inputs, gated, and the final hidden states.

        With stored taps the backbone does not run, and the final states are None unless they were stored too.
        """
        attended, positions_BT, mask = self.attention(document_ids_BT)
        if states_BNTD is not None:
            recorded = dict(zip(self.stored_taps, states_BNTD.unbind(1), strict=True))
            final_BTD = recorded.get("final")
        else:
            with self.autograd(), self.looking_ahead(attended, positions_BT, lookahead):
                final_BTD, recorded = self.run(self.backbone, tokens_BT, positions_BT, mask, self._taps)
        gated = {tap: gate(recorded[tap], self.backbone.gradient_scale) for tap in self._taps}
        if self.token_heads is not None and not torch.is_autocast_enabled(tokens_BT.device.type):
            dtype = next(self.token_heads.parameters()).dtype
            gated = {tap: hidden.to(dtype) for tap, hidden in gated.items()}
        rows = [supervised_rows(loss_mask_BT, document_ids_BT, k + 1) for k in range(1, self.num_heads + 1)]
        batch = TeacherForcing(tokens_BT=tokens_BT, taps=gated, positions_BT=positions_BT, mask=mask, rows=rows)
        return batch, final_BTD

    def _teacher_states(self, tokens_BT: Tensor, document_ids_BT: Tensor) -> Tensor | None:
        """The teacher runs before the trained backbone, since sharding engines run backward for the last forward."""
        if self.teacher is None:
            return None
        _, positions_BT, mask = self.attention(document_ids_BT)
        with self.teacher.running():
            return self.run(self.teacher.backbone, tokens_BT, positions_BT, mask)[0]

    def hidden_states(self, tokens_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
        """(B, taps, T, D): the backbone's states that heads and their loss read, in the order of `stored_taps`."""
        _, positions_BT, mask = self.attention(document_ids_BT)
        _, recorded = self.run(self.backbone, tokens_BT, positions_BT, mask, self.stored_taps)
        return torch.stack([recorded[tap] for tap in self.stored_taps], dim=1)

    @property
    def stored_taps(self) -> tuple[HiddenTap, ...]:
        """The heads' taps, and the final states where the loss reads them or the heads have no tap."""
        taps, reads_final = self._taps, self.loss.reads_final_states
        return taps if taps and ("final" in taps or not reads_final) else (*taps, "final")

    @property
    def _taps(self) -> tuple[HiddenTap, ...]:
        return () if self.token_heads is None else self.token_heads.hidden_taps

    def _gates(self, projection: Projection) -> list[float]:
        """Gradient factors of a projection's tensors: the gate on the backbone's, 1 on a head's own."""
        shared = {id(tensor) for tensor in self.backbone.projection.parameters()}
        return [self.backbone.gradient_scale if id(t) in shared else 1.0 for t in projection.parameters()]


def is_trained(name: str, model: Any) -> bool:
    """Whether a parameter is trained: with a LoRA adapter the adapter's alone, otherwise all."""
    return not getattr(model, "_hf_peft_config_loaded", False) or "lora_" in name

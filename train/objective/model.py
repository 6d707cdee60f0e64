"""The one module that is trained and wrapped: backbone, heads and loss in a single forward.

Heads and loss run inside, so that engines which shard parameters have gathered every weight that is used, in backward
too. A frozen backbone runs without autograd and stays in eval mode. A trained one has its own loss beside the heads',
and what flows back from heads passes the gradient gate (heads/backbone/gradient_gate.py): at the taps, at the
embeddings that heads read, and at the projection that they share.
"""
# B batch, T position, K trained objective, M logged sum, R supervised row of one objective

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.gradient_gate import gate
from heads.backbone.masks import positions_within_documents, within_documents
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.backbone.state import HiddenTap
from heads.interface.token_heads import TeacherForcing, TokenHeads
from train.objective.lookahead import first_layer_sees_ahead
from train.objective.loss_config import LossConfig
from train.objective.losses import Part, Teacher, weighted_loss
from train.objective.self_distillation import SelfDistillationConfig
from train.objective.targets import count_supervised, labels_at, scored_rows, supervised_rows
from train.objective.teacher import Original


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one distribution is trained on: the backbone's own (head 0) or head k's.

    Attributes:
        shift: the label at t is x_{t+shift}.
        rows_R: supervised positions in the flattened (B·T).
        hidden_RD: hidden states there, for `projection`.
        gates: a factor on the gradient of each of the projection's tensors.
        shared: the unembedding is the backbone's.
        all_BTD: hidden states at every position; of the backbone's own objective only.
        original_RD: the original's hidden states at the rows, where it is kept; of the backbone's own objective only.
        backbone_BTD: the backbone's final hidden states at every position, without gradient; None where it did not run
            and they are not stored.
    """

    head: int
    shift: int
    rows_R: Tensor
    hidden_RD: Tensor
    projection: Projection
    gates: list[float]
    shared: bool
    all_BTD: Tensor | None = None
    original_RD: Tensor | None = None
    backbone_BTD: Tensor | None = None

    def backbone_states(self) -> Tensor:
        """(R, D): the backbone's final ones where it predicts the same tokens, shift - 1 places ahead of the rows."""
        assert self.backbone_BTD is not None, "stored taps hold the final states where the loss reads them"
        return self.backbone_BTD.flatten(0, 1)[self.rows_R + self.shift - 1]

    def at_scored_rows(self, tokens_BT: Tensor) -> Objective:
        """Without the rows whose label the projection has no row for."""
        if self.projection.vocabulary is None:
            return self
        rows, _ = scored_rows(labels_at(tokens_BT, self.rows_R, self.shift), self.projection.vocabulary)
        return replace(self, rows_R=self.rows_R[rows], hidden_RD=self.hidden_RD[rows])

    def part(self, tokens_BT: Tensor, factor: Tensor | None = None) -> Part:
        """What the loss reads of it; `factor` is what the sum over its rows counts. All labels are scored."""
        labels_R = labels_at(tokens_BT, self.rows_R, self.shift)
        if self.projection.vocabulary is not None:
            labels_R = self.projection.vocabulary.find(labels_R)[0]
        return Part(
            projection=self.projection,
            hidden_RD=self.hidden_RD,
            labels_R=labels_R,
            factor=factor,
            gates=self.gates,
            shared=self.shared,
        )

    def loss_sum(self, tokens_BT: Tensor) -> Tensor:
        return weighted_loss([self.at_scored_rows(tokens_BT).part(tokens_BT)])[0]


class TrainedModel(nn.Module):
    """Backbone and heads with the Modified-CLM loss.

    Args:
        backbone: the wrapped causal LM.
        token_heads: the heads; None trains the backbone alone.
        trains_backbone: train it together with the heads; without heads it is trained in any case.
        gradient_scale: LR_MB / LR_B, the gate between heads and a trained backbone.
        label_shift: of a backbone that is trained alone: its label at t is x_{t+label_shift}.
        lookahead: share of positions whose first layer sees one token ahead while a backbone is trained alone.
        attend_across_documents: let attention cross the documents of a packed block (labels never do).
        head_decay: head k's loss is weighted with head_decay ** (k - 1); the backbone's own with 1.
        loss: what heads are trained on; true tokens where it is not given.
        self_distillation: the backbone as it is now, before training, teaches the trained one.
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
        super().__init__()
        self.model = backbone.model
        self.token_heads = token_heads
        self.backbone = backbone
        self.self_distillation = self_distillation or SelfDistillationConfig()
        self.original = Original(backbone) if self.self_distillation.weight else None
        self.trains_backbone = trains_backbone or token_heads is None
        if token_heads is not None and trains_backbone:
            token_heads.backbone_was_trained = True
        self.backbone.gradient_scale = gradient_scale
        self.label_shift = label_shift
        self.lookahead = lookahead
        self.attend_across_documents = attend_across_documents
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
        """The label shift of each trained objective, the backbone's own first."""
        return [self.label_shift] * self.trains_backbone + list(range(2, self.num_heads + 2))

    @property
    def loss_names(self) -> list[str]:
        """Of the logged sums: a cross-entropy for each objective, then what else the heads are trained on."""
        kinds = ["loss"] + ["soft"] * (self.loss.soft > 0) + ["regression"] * (self.loss.regression > 0)
        names = [f"head{k}_{kind}" for kind in kinds for k in range(1, self.num_heads + 1)]
        return ["backbone_loss"] * self.trains_backbone + names + ["backbone_kl"] * (self.original is not None)

    def counts_of_logged(self, counts_K: Tensor) -> Tensor:
        """(M,): for each logged sum how many labels it is over."""
        further = (self.loss.soft > 0) + (self.loss.regression > 0)
        own = [] if self.original is None else [counts_K[:1]]
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
        """The loss of one micro-batch; or, with every weight gathered as for that, what `inside` returns.

        Args:
            input_ids: (B, T) packed tokens.
            loss_mask: (B, T) True where a token may be a target.
            document_ids: (B, T) which document of its block a token belongs to.
            counts_K: labels of each objective over the whole batch (all micro-batches, all processes); the
                micro-batch's own where it is not given.
            hidden_states: (B, taps, T, D) of a frozen backbone that ran before, in place of running it.
            heads_weight: what the heads' losses count beside the backbone's own, at this step
            (train/objective/warm_in.py). inside: evaluation and decoding under engines that shard weights; nothing else
            is given then, and every
                process has to make the same calls.

        Returns:
            loss: the weighted sum over objectives of (sum of their losses / their count).
            loss_sums_K: each objective's sum of cross-entropies over this micro-batch, detached.
            logged_sums_M: these, the heads' other sums and the divergence from the original, as `loss_names` has them.
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
        objectives = self.objectives(
            input_ids,
            loss_mask,
            document_ids,
            with_backbone=self.trains_backbone,
            states_BNTD=hidden_states,
        )
        parts = (self.part(objective, input_ids, factors_K[i]) for i, objective in enumerate(objectives))
        loss, sums = weighted_loss(parts, self.chunk_elements)
        further = [sums.soft] * (self.loss.soft > 0) + [sums.regression] * (self.loss.regression > 0)
        own = [] if self.original is None else [sums.soft[:1]]
        logged_M = torch.cat([sums.hard, *(sums_K[self.trains_backbone :] for sums_K in further), *own])
        return {"loss": loss, "loss_sums_K": sums.hard, "logged_sums_M": logged_M}

    def part(self, objective: Objective, tokens_BT: Tensor, factor: Tensor | None = None) -> Part:
        """What the loss reads of an objective: the backbone's own has tokens and the original, heads have `loss`."""
        objective = objective.at_scored_rows(tokens_BT)
        part = objective.part(tokens_BT, factor)
        if objective.head == 0:
            return part if self.original is None else self._beside_original(part, objective)
        loss, states_RD = self.loss, objective.backbone_states() if self.loss.reads_final_states else None
        teacher = None
        if loss.soft and states_RD is not None:
            teacher = Teacher(
                hidden_RD=states_RD,
                projection=self.teaching_projection,
                weight=loss.soft,
                temperature=loss.temperature,
                top_n=loss.top_n,
                divergence=loss.divergence,
            )
        target_RD = states_RD if loss.regression else None
        return replace(part, hard=loss.hard, teacher=teacher, target_RD=target_RD, regression=loss.regression)

    @property
    def teaching_projection(self) -> Projection:
        """The backbone's own; over the tokens that the heads score, where these are not all."""
        projection = self.backbone.projection.without_norm()
        return projection if self.token_heads is None else self.token_heads.scored(projection)

    def count_labels(self, tokens_BT: Tensor, loss_mask_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
        """(K,): labels of each trained objective in a batch; heads count those that they score."""
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

    def _beside_original(self, part: Part, objective: Objective) -> Part:
        assert self.original is not None
        assert objective.original_RD is not None
        share, temperature = self.self_distillation.weight, self.self_distillation.temperature
        teacher = Teacher(
            hidden_RD=objective.original_RD,
            projection=self.original.projection,
            weight=share,
            temperature=temperature,
            divergence="kl",
        )
        return replace(part, hard=1 - share, teacher=teacher)

    def objectives(
        self,
        tokens_BT: Tensor,
        loss_mask_BT: Tensor,
        document_ids_BT: Tensor,
        *,
        with_backbone: bool,
        lookahead: float | None = None,
        states_BNTD: Tensor | None = None,
    ) -> Iterator[Objective]:
        """One at a time: a stack of K hidden states would be gigabytes.

        Args:
            with_backbone: begin with the backbone's own, trained or not.
            lookahead: in place of the model's own.
            states_BNTD: the taps of a backbone that ran before.
        """
        original_BTD = self._original_states(tokens_BT, document_ids_BT) if with_backbone else None
        batch, final_BTD = self.teacher_forcing(tokens_BT, loss_mask_BT, document_ids_BT, lookahead, states_BNTD)
        if with_backbone:
            assert final_BTD is not None, "stored taps serve heads alone"
            rows_R = supervised_rows(loss_mask_BT, document_ids_BT, self.label_shift)
            unembedding = self.backbone.projection.without_norm()
            yield Objective(
                head=0,
                shift=self.label_shift,
                rows_R=rows_R,
                hidden_RD=final_BTD.flatten(0, 1)[rows_R],
                projection=unembedding,
                gates=[1.0] * len(unembedding.parameters()),
                shared=True,
                all_BTD=final_BTD,
                original_RD=None if original_BTD is None else original_BTD.flatten(0, 1)[rows_R],
                backbone_BTD=final_BTD.detach(),
            )
        if self.token_heads is None:
            return
        for k, hidden_RD in enumerate(self.token_heads.teacher_forced(batch), start=1):
            projection = self.token_heads.projection(k)
            yield Objective(
                head=k,
                shift=k + 1,
                rows_R=batch.rows[k - 1],
                hidden_RD=hidden_RD,
                projection=projection,
                gates=self._gates(projection),
                shared=projection.weight is self.backbone.projection.weight,
                backbone_BTD=None if final_BTD is None else final_BTD.detach(),
            )

    def teacher_forcing(
        self,
        tokens_BT: Tensor,
        loss_mask_BT: Tensor,
        document_ids_BT: Tensor,
        lookahead: float | None = None,
        states_BNTD: Tensor | None = None,
    ) -> tuple[TeacherForcing, Tensor | None]:
        """Run the backbone over the packed block: what heads see, behind the gate, and the final hidden states.

        Where the taps were stored, the backbone does not run, and the final states are there if they are among them.
        """
        attended, positions_BT, may_attend_BTT = self._attention(document_ids_BT)
        mask = self._mask(may_attend_BTT, positions_BT)
        if states_BNTD is not None:
            recorded = dict(zip(self.stored_taps, states_BNTD.unbind(1), strict=True))
            final_BTD = recorded.get("final")
        else:
            with self._autograd(), self._lookahead(attended, may_attend_BTT, positions_BT, lookahead):
                final_BTD, recorded = self.backbone.forward(
                    tokens_BT, taps=self._taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
                )
        gated = {tap: gate(recorded[tap], self.backbone.gradient_scale) for tap in self._taps}
        if self.token_heads is not None and not torch.is_autocast_enabled(tokens_BT.device.type):
            dtype = next(self.token_heads.parameters()).dtype
            gated = {tap: hidden.to(dtype) for tap, hidden in gated.items()}
        rows = [supervised_rows(loss_mask_BT, document_ids_BT, k + 1) for k in range(1, self.num_heads + 1)]
        batch = TeacherForcing(tokens_BT=tokens_BT, taps=gated, positions_BT=positions_BT, mask=mask, rows=rows)
        return batch, final_BTD

    def _original_states(self, tokens_BT: Tensor, document_ids_BT: Tensor) -> Tensor | None:
        """Before the trained backbone runs: engines that shard weights count on the last pass being the one to undo."""
        if self.original is None:
            return None
        _, positions_BT, may_attend_BTT = self._attention(document_ids_BT)
        return self.original.final_states(tokens_BT, self._mask(may_attend_BTT, positions_BT), positions_BT)

    def hidden_states(self, tokens_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
        """(B, taps, T, D): what heads and their loss read of the backbone, to be stored; `stored_taps` names them."""
        _, positions_BT, may_attend_BTT = self._attention(document_ids_BT)
        mask = self._mask(may_attend_BTT, positions_BT)
        _, recorded = self.backbone.forward(
            tokens_BT, taps=self.stored_taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
        )
        return torch.stack([recorded[tap] for tap in self.stored_taps], dim=1)

    @property
    def stored_taps(self) -> tuple[HiddenTap, ...]:
        """The taps of the heads, and the final states where the loss reads them, or heads read none."""
        taps, reads_final = self._taps, self.loss.reads_final_states
        return taps if taps and ("final" in taps or not reads_final) else (*taps, "final")

    @property
    def _taps(self) -> tuple[HiddenTap, ...]:
        return () if self.token_heads is None else self.token_heads.hidden_taps

    def _attention(self, document_ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Documents as attention sees them, positions (B, T) in them, and who may attend to whom (B, T, T)."""
        attended = torch.zeros_like(document_ids_BT) if self.attend_across_documents else document_ids_BT
        return attended, positions_within_documents(attended), within_documents(attended)

    def _gates(self, projection: Projection) -> list[float]:
        """The gate on what is the backbone's, 1 on a head's own unembedding."""
        shared = {id(tensor) for tensor in self.backbone.projection.parameters()}
        return [self.backbone.gradient_scale if id(t) in shared else 1.0 for t in projection.parameters()]

    def _autograd(self) -> Any:
        return torch.set_grad_enabled(self.trains_backbone and torch.is_grad_enabled())

    def _mask(self, may_attend_BTT: Tensor, positions_BT: Tensor) -> Any:
        return self.backbone.mask_style.finish(may_attend_BTT, positions_BT, positions_BT, self.backbone.dtype)

    def _lookahead(
        self, document_ids_BT: Tensor, may_attend_BTT: Tensor, positions_BT: Tensor, share: float | None
    ) -> contextlib.AbstractContextManager[None]:
        share = self.lookahead if share is None else share
        if not share:
            return contextlib.nullcontext()
        return first_layer_sees_ahead(self.backbone, document_ids_BT, may_attend_BTT, positions_BT, share)


def is_trained(name: str, model: Any) -> bool:
    """Of a backbone with a LoRA adapter the adapter alone; else everything."""
    return not getattr(model, "_hf_peft_config_loaded", False) or "lora_" in name

"""DynaMo heads: each head has decoder layers of the backbone's own class, on the stem's output.

            ┌ last layer ─ norm ─ unembedding   x_{t+1}    the backbone itself, the first-token head
stem ───────┼ layer(s) 1 ─ norm ─ unembedding   x_{t+2}    head 1: layers of its own, norm and unembedding shared
            └ layer(s) 2 ─ norm ─ unembedding   x_{t+3}    head 2

DynaMo, section 3.1; the variants of figure 12 and table 9 are fields of `Config`. The stem is every layer up to the
penultimate (tap 1). A head reads the context up to its position and no drafted token after it, so its layers run inside
each backbone pass (heads/interface/layers.py), and the next draft is known as soon as a path is accepted.
"""
# B batch, T position, N slot of a pass, R supervised row, M tree node, D model width

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.gradient_gate import gate
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.projection import Projection
from heads.backbone.state import HiddenTap, StackTap
from heads.backbone.support import adapted_layers
from heads.extras import needs_extra
from heads.interface.layers import MAX_RANK, RANK_ADVICE, check_last_layer, in_slot, new_layer
from heads.interface.token_heads import MAX_HEADS, HeadsConfig, TeacherForcing, TokenHeads
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class Config(HeadsConfig):
    """Fields of `dynamo` heads.

    Attributes:
        num_heads: K, tokens predicted beside the backbone's own; 2 is the paper's T3.
        layers_per_head: decoder layers of each head, 0 to 16; 0 only with its own unembedding (the paper's 96M-T2).
        start: weights "random", as the backbone's class draws them (the paper), or "copied" from the last layer (C).
        tap: heads read the output of the "penultimate" layer (the paper) or of the "last" one (NP).
        unembedding: "shared" with the backbone, or "own", started from random weights (96M-T2, 99M-T2).
        lora_rank: a head's layer is the backbone's last layer itself with a LoRA of this rank added (70M-T2 LoRA), and
            the head owns only the LoRA; None: layers of its own.
        lora_targets: the linear layers that get a LoRA; None: peft's choice for the architecture.
    """

    num_heads: int = within(1, MAX_HEADS, default=2)
    layers_per_head: int = within(0, 16, default=1, advice="the paper has at most 2")
    start: Literal["random", "copied"] = "random"
    tap: Literal["penultimate", "last"] = "penultimate"
    unembedding: Literal["shared", "own"] = "shared"
    lora_rank: int | None = within(1, MAX_RANK, default=None, advice=RANK_ADVICE)
    lora_targets: list[str] | None = None

    def validate_layers(self) -> None:
        if self.layers_per_head == 0 and self.unembedding == "shared":
            raise ValueError(
                f"layers_per_head={self.layers_per_head} was given with unembedding={self.unembedding!r}; a head needs "
                f"at least one layer, or its own unembedding."
            )

    def validate_lora(self) -> None:
        if self.lora_rank is not None and self.layers_per_head != 1:
            raise ValueError(
                f"lora_rank={self.lora_rank} was given with layers_per_head={self.layers_per_head}; a LoRA goes with "
                f"one layer a head."
            )
        if self.lora_targets is not None and self.lora_rank is None:
            raise ValueError("lora_targets were given without lora_rank; give both, or neither.")


class Heads(TokenHeads):
    """K heads of decoder layers over the context."""

    config: Config

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        check_layers(config, backbone)
        heads = range(config.num_heads)
        if config.lora_rank is None:
            self.layers = nn.ModuleList(
                nn.ModuleList(
                    new_layer(backbone, config.start, k * config.layers_per_head + i)
                    for i in range(config.layers_per_head)
                )
                for k in heads
            )
        else:
            self.layers = nn.ModuleList(
                nn.ModuleList([SharedLayer(backbone, config.lora_rank, config.lora_targets, k)]) for k in heads
            )
        rows = config.draft_vocabulary
        own = [new_unembedding(backbone, rows) for _ in heads] if config.unembedding == "own" else []
        self.unembeddings = nn.ParameterList(own)

    @property
    def _tap(self) -> HiddenTap:
        return 1 if self.config.tap == "penultimate" else 0

    @property
    def taps(self) -> tuple[Tap, ...]:
        return tuple(StackTap(heads=self, index=k - 1, reads=self._tap) for k in range(1, self.num_heads + 1))

    @property
    def borrowed(self) -> Sequence[nn.Module]:
        return () if self.config.lora_rank is None else (self.backbone.attention_layer,)

    def projection(self, k: int) -> Projection:
        shared = self.backbone.projection
        own = replace(shared, weight=self.unembeddings[k - 1], bias=None) if len(self.unembeddings) else shared
        return self.scored(own)

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        for k in range(1, self.num_heads + 1):
            hidden_BTD = self.run_stack(k - 1, batch.taps[self._tap], batch.positions_BT, batch.mask, None)
            yield hidden_BTD.flatten(0, 1)[batch.rows[k - 1]]

    def run_stack(
        self, index: int, hidden_BND: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache | None
    ) -> Tensor:
        """(B, N, D) after the layers of head index + 1; `hidden_BND` itself where heads have no layers."""
        for layer in cast("nn.ModuleList", self.layers[index]):
            if isinstance(layer, SharedLayer):
                hidden_BND = layer.run(self.backbone, hidden_BND, positions_BN, mask, cache)
            else:
                hidden_BND = self.backbone.run_layer(layer, hidden_BND, positions_BN, mask, cache)
        return hidden_BND

    def commit(
        self, state: list[Tensor] | None, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan
    ) -> list[Tensor]:
        """Each head's output at the last committed position."""
        return [plan.newest(taps[tap], None if state is None else state[k]) for k, tap in enumerate(self.taps)]

    def keep_rows(self, state: list[Tensor], rows_R: Tensor) -> list[Tensor]:
        return [newest_BD[rows_R] for newest_BD in state]

    def keep_slots(self, state: list[Tensor], num_slots: int) -> list[Tensor]:
        return state  # holds one slot only, which the next commit replaces

    def first_level(self, state: list[Tensor]) -> list[Tensor]:
        return state

    def step(self, k: int, level: list[Tensor], tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, list[Tensor]]:
        chosen = [newest.index_select(0, parents_M) for newest in level]
        return chosen[k - 1], chosen


class SharedLayer(nn.Module):
    """The backbone's last layer with the head's own LoRA; no tensor of the backbone is registered here.

    A template of the layer on the meta device is called with the backbone's tensors and the LoRA's. The gradient into
    the backbone's tensors passes the gate, as every gradient from heads to backbone does.
    """

    def __init__(self, backbone: Backbone, rank: int, targets: list[str] | None, slot: int) -> None:
        super().__init__()
        with needs_extra("lora", f"heads.lora_rank={rank} was given"):
            from peft import LoraConfig, inject_adapter_in_model
        refuse_unknown_targets(backbone, targets or [])
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets or lora_targets(backbone))
        template = in_slot(backbone, copy.deepcopy(backbone.attention_layer), slot)
        try:
            inject_adapter_in_model(config, template)
        except ValueError as error:
            raise ValueError(
                f"No LoRA could be put into the last layer of {backbone.name} ({error}); name lora_targets."
            ) from error
        # ParameterDict takes no dots in names, and nothing else in a layer's names has a slash
        self.lora = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in template.named_parameters() if "lora_" in name}
        )
        # In a tuple: not a submodule. In eval mode: recomputed in backward, it would find its own meta tensors.
        self._template = (template.to("meta").eval(),)

    def run(self, backbone: Backbone, hidden_BTD: Tensor, positions_BT: Tensor, mask: Any, cache: Any) -> Tensor:
        layer, scale = backbone.attention_layer, backbone.gradient_scale
        shared = {name: gate(p, scale).to(hidden_BTD) for name, p in layer.named_parameters()}
        shared |= {name: buffer.to(hidden_BTD.device) for name, buffer in layer.named_buffers()}
        own = {name.replace("/", "."): p for name, p in self.lora.items()}
        (template,) = self._template
        names = [name for name, _ in (*template.named_parameters(), *template.named_buffers())]
        values = {name: own[name] if name in own else shared[name.replace(".base_layer", "")] for name in names}
        return backbone.run_layer(template, hidden_BTD, positions_BT, mask, cache, values=values)


def refuse_unknown_targets(backbone: Backbone, targets: list[str]) -> None:
    """Raise ValueError on a name that fits no module of the last layer; peft ignores it where another name fits."""
    names = [name for name, _ in backbone.attention_layer.named_modules() if name]
    unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unknown:
        allowed = sorted({name.rpartition(".")[2] for name in names})
        raise ValueError(
            f"lora_targets has {', '.join(map(repr, unknown))}, which names no part of the last layer of "
            f"{backbone.name}; allowed are linear layers among {', '.join(allowed)}."
        )


def check_layers(config: Config, backbone: Backbone) -> None:
    """Raise ValueError where the backbone has no stem, or its layers cannot be copied and trained."""
    if config.tap == "penultimate" and backbone.num_layers < 2:
        raise ValueError(
            f"The backbone {backbone.name} has {backbone.num_layers} layer; dynamo heads branch off after the "
            f"penultimate one: choose a deeper backbone, or set tap to 'last'."
        )
    check_last_layer(backbone, "dynamo heads are layers")
    if config.lora_rank is not None and adapted_layers(backbone.attention_layer):
        raise ValueError(
            f"lora_rank={config.lora_rank} was given on a backbone with a LoRA adapter; such heads add their own to "
            "its last layer as it is: train the whole backbone or none of it, or leave lora_rank out."
        )


def new_unembedding(backbone: Backbone, rows: int | None = None) -> nn.Parameter:
    """A random unembedding, drawn as the backbone's class draws embeddings; a row for every token by default."""
    weight = backbone.projection.weight
    std = getattr(backbone.config, "initializer_range", 0.02)
    return nn.Parameter(torch.empty_like(weight[:rows], dtype=torch.float32).normal_(std=std))


def lora_targets(backbone: Backbone) -> list[str]:
    """peft's usual linear layers of this architecture.

    Raises:
        ValueError: peft knows none.
    """
    with needs_extra("lora", "heads.lora_rank was given"):
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS
    kind = backbone.config.model_type
    if kind not in LORA_TARGETS:
        raise ValueError(
            f"peft names no LoRA targets for {kind}; give heads.lora_targets: the names of linear layers in one "
            f"decoder layer."
        )
    return list(LORA_TARGETS[kind])

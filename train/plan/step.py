"""One training step on tensors without memory: what is alive at its peak, and its FLOPs.

The real forward, loss and backward of `TrainedModel` run on fake tensors, with autocast as the run's. Three things
are assumed: every position is supervised (an upper bound), a block is one document, and attention runs in a fused
kernel: CUDA's memory-efficient one, which a 4-D mask is cast for in every layer, or the CPU's flash attention.
"""
# B batch, T position, H attention head, S slot

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.evaluation.accuracy import CHUNK_ELEMENTS, backbone_choices
from train.objective import losses as losses_module
from train.objective import model as model_module
from train.objective import targets as targets_module
from train.objective.losses import chunk_elements_on, plain_cross_entropy
from train.objective.model import TrainedModel
from train.plan.live_tensors import (
    BACKBONE,
    BACKWARD,
    FROZEN,
    GRADIENTS,
    HEADS,
    INPUTS,
    LOSS,
    TRAINED,
    LiveTensors,
    Moment,
)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What one process does between two updates.

    Attributes:
        batch: blocks of a micro-batch.
        eval_batch: blocks of an evaluation batch; 0 where nothing is evaluated.
        block_size: tokens of a block.
        accumulates: gradients of earlier micro-batches are there while one runs.
        autocast: dtype of mixed precision, or None.
        device_type: "cuda" or "cpu", whose attention kernel is assumed.
        stored: dtype of hidden states that are read in place of running the backbone; None where it runs.
        micro_batches: of one update; their stored states lie on the device together.
    """

    batch: int
    eval_batch: int
    block_size: int
    accumulates: bool
    autocast: torch.dtype | None
    device_type: str
    stored: torch.dtype | None = None
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """What was found.

    Attributes:
        training: the moments of a micro-batch that could be its peak; which one is depends on the engine.
        evaluating: those of an evaluation batch; it has no gradients.
        flops: of forward, loss and backward of one micro-batch.
        storing: those of the pass that stores the hidden states of a micro-batch; none where nothing is stored.
        storing_flops: of that pass over one block.
    """

    training: list[Moment]
    evaluating: list[Moment]
    flops: int
    storing: list[Moment]
    storing_flops: int


def trace_step(model: TrainedModel, shape: StepShape) -> Step:
    """Run a micro-batch and an evaluation batch. The model is on the meta device, and holds fake tensors afterwards."""
    mode = FakeTensorMode()
    make_fake(model, mode)
    model.chunk_elements = chunk_elements_on(shape.device_type)
    with mode, attention_kernel(shape.device_type), all_supervised():
        storing_flops, storing = trace_storing(model, shape) if shape.stored else (0, [])
        flops, training = trace_training(model, shape)
        model.zero_grad()
        evaluating = trace_evaluation(model, shape) if shape.eval_batch else []
    return Step(training=training, evaluating=evaluating, flops=flops, storing=storing, storing_flops=storing_flops)


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Let parameters and buffers say that they lie on a CPU: kernels, autocast and masks are chosen by that."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        kinds: list[Any] = [module._parameters, module._buffers]
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in seen:  # tied tensors stay tied; both are kept, so that no id is used twice
                    fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
                    is_weight = isinstance(tensor, nn.Parameter)
                    seen[id(tensor)] = (tensor, nn.Parameter(fake, tensor.requires_grad) if is_weight else fake)
                tensors[name] = seen[id(tensor)][1]


@torch.no_grad()
def trace_storing(model: TrainedModel, shape: StepShape) -> tuple[int, list[Moment]]:
    """The backbone's one pass over a micro-batch, as `train.hidden_states` makes it; its FLOPs are of one block."""
    model.train()
    with watching(model) as live:
        batch = a_batch(shape.batch, shape.block_size)
        with torch.autocast("cpu", dtype=shape.autocast, enabled=shape.autocast is not None):
            model.hidden_states(batch["input_ids"], batch["document_ids"])
        return live.flops // shape.batch, live.frontier


def trace_training(model: TrainedModel, shape: StepShape) -> tuple[int, list[Moment]]:
    model.train()
    with watching(model) as live:
        states = stored_states(model, shape)
        for _ in range(2 if shape.accumulates else 1):
            live.flops = 0
            batch = a_batch(shape.batch, shape.block_size) | {name: t[0] for name, t in states.items()}
            with torch.autocast("cpu", dtype=shape.autocast, enabled=shape.autocast is not None):
                out = model(**batch, counts_K=torch.ones(len(model.shifts)))
            del batch
            with live.making(BACKWARD):
                out["loss"].backward()
            del out
        return live.flops, live.frontier


@torch.no_grad()
def trace_evaluation(model: TrainedModel, shape: StepShape) -> list[Moment]:
    """Every objective's hidden states and one chunk of logits, as `train.evaluation.measure` makes them."""
    model.eval()
    with watching(model) as live:
        batch = a_batch(shape.eval_batch, shape.block_size)
        states = model.backbone_states(*batch.values(), lookahead=0.0)
        for found in model.head_rows(states, with_backbone=True):
            with live.making(LOSS):
                if found.head == 0 and states.final_BTD is not None:
                    backbone_choices(found.projection, states.final_BTD)
                rows = slice(0, max(1, CHUNK_ELEMENTS // len(found.projection.weight)))
                labels_R = torch.zeros_like(found.labels_R)
                plain_cross_entropy(found.projection, found.hidden_RD[rows], labels_R[rows])
        if model.token_heads is not None:  # tokens per pass are decoded with a copy in the backbone's dtype
            with live.making(HEADS):
                _ = [p.to(model.backbone.dtype) for p in model.token_heads.parameters()]
        return live.frontier


def a_batch(batch: int, block_size: int) -> dict[str, Tensor]:
    """A micro-batch of whole documents, in the order of TrainedModel.forward."""
    return {
        "input_ids": torch.zeros(batch, block_size, dtype=torch.long),
        "loss_mask": torch.ones(batch, block_size, dtype=torch.bool),
        "document_ids": torch.zeros(batch, block_size, dtype=torch.long),
    }


def stored_states(model: TrainedModel, shape: StepShape) -> dict[str, Tensor]:
    """(micro-batches, B, taps, T, D) where states are stored: the Trainer holds all micro-batches of an update."""
    if shape.stored is None:
        return {}
    assert model.token_heads is not None, "the config's check refuses this"
    taps, width = len(model.stored_taps), model.backbone.hidden_size
    size = (shape.micro_batches, shape.batch, taps, shape.block_size, width)
    return {"hidden_states": torch.zeros(size, dtype=shape.stored)}


@contextlib.contextmanager
def watching(model: TrainedModel) -> Iterator[LiveTensors]:
    """Count under the names of parts: before, in and after the backbone's forward, in the loss, gradients kept."""
    live = LiveTensors()

    one_pass, gate = losses_module.one_pass, model_module.gate

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        with live.making(LOSS):
            return one_pass(*args, **kwargs)

    def behind_taps(*args: Any, **kwargs: Any) -> Tensor:
        live.part = HEADS  # of stored states too, where the backbone neither begins nor ends
        return gate(*args, **kwargs)

    def begin(*_: Any) -> None:
        live.part = BACKBONE

    def end(*_: Any) -> None:
        live.part = HEADS

    decoder = model.backbone.decoder
    handles = [decoder.register_forward_pre_hook(begin), decoder.register_forward_hook(end)]
    for parameter in model.parameters():
        live.label(parameter, TRAINED if parameter.requires_grad else FROZEN)
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(lambda p: live.label(p.grad, GRADIENTS)))
    for buffer in model.buffers():
        live.label(buffer, FROZEN)
    try:
        replaced = (
            patch.object(losses_module, "one_pass", loss),
            patch.object(model_module, "gate", behind_taps),
        )
        with live, live.making(INPUTS), replaced[0], replaced[1]:
            yield live
    finally:
        for handle in handles:
            handle.remove()


def attention_kernel(device_type: str) -> Any:
    """In place of what a CPU would choose; for a CPU nothing is replaced."""
    if device_type == "cpu":
        return contextlib.nullcontext()
    return patch.object(F, "scaled_dot_product_attention", efficient_attention)


@contextlib.contextmanager
def all_supervised() -> Iterator[None]:
    """Rows where every position is a scored target: which are is what a tensor without memory cannot say."""

    def rows(loss_mask_BT: Tensor, document_ids_BT: Tensor, shift: int) -> Tensor:
        batch, length = loss_mask_BT.shape
        return torch.arange(batch * max(0, length - shift), device=loss_mask_BT.device)

    def scored(labels_R: Tensor, _: DraftVocabulary) -> tuple[Tensor, Tensor]:
        return torch.arange(len(labels_R), device=labels_R.device), torch.zeros_like(labels_R)

    with (
        patch.object(model_module, "supervised_rows", rows),
        patch.object(targets_module, "scored_rows", scored),
    ):
        yield


def efficient_attention(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as CUDA computes it under a dense mask: scores are never held, the mask is cast in every layer."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query_BHTD.dtype
    query_BHTD, key_BHSD, value_BHSD = (t.to(dtype) for t in (query_BHTD, key_BHSD, value_BHSD))
    batch, heads, length, _ = query_BHTD.shape
    if enable_gqa:
        groups = heads // key_BHSD.shape[1]
        key_BHSD, value_BHSD = (t.repeat_interleave(groups, dim=1) for t in (key_BHSD, value_BHSD))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(dtype, copy=True).expand(batch, heads, length, key_BHSD.shape[2])
    kept = any(t.requires_grad for t in (query_BHTD, key_BHSD, value_BHSD))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(query_BHTD, key_BHSD, value_BHSD, bias, kept, dropout_p, is_causal, scale=scale)[0]

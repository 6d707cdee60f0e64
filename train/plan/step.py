"""One training step on fake tensors, which have no memory: the bytes alive at its peak, and its FLOPs.

Forward, loss and backward are the run's own, with its autocast and gradient checkpointing. Three things are assumed:
every position is supervised (an upper bound), each block is one document, and attention runs in a fused kernel. On CUDA
that is the memory-efficient one, for which each layer casts a 4-D mask; on a CPU it is flash attention.
"""
# M micro-batch, B batch, N tap, T position, H attention head, S slot, D width, R supervised row

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.evaluation.accuracy import CHUNK_ELEMENTS, backbone_choices
from train.config import TrainConfig
from train.objective.chunks import chunk_elements_on
from train.objective.losses import plain_cross_entropy
from train.objective.model import TrainedModel
from train.plan.costs import evaluates, mixed_precision, stored_dtype, trainer_field
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
class TracedStep:
    """The peaks and FLOPs of a step. A peak is several candidate moments: the engine decides which is the highest.

    Attributes:
        training: candidates for the peak of a training micro-batch.
        evaluating: candidates for that of an evaluation batch, without gradients; empty if nothing is evaluated.
        storing: candidates for that of storing a micro-batch's hidden states; empty if nothing is stored.
        flops: forward, loss and backward of one micro-batch.
        storing_flops: the storing pass over one block.
    """

    training: list[Moment]
    evaluating: list[Moment]
    storing: list[Moment]
    flops: int
    storing_flops: int


def trace_step(model: TrainedModel, config: TrainConfig, device_type: str = "cuda") -> TracedStep:
    """Trace a micro-batch and an evaluation batch of a model on the meta device, whose tensors become fake ones."""
    # a draft layer's rotary frequencies are real numbers that no buffer holds (heads/interface/draft_layer.py)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = trainer_field(config, "per_device_train_batch_size")
    make_fake(model, mode)
    model.attend_across_documents = True  # a block is one document here, and fake document ids cannot be read
    model.chunk_elements = chunk_elements_on(device_type)
    with mode, cuda_attention() if device_type == "cuda" else contextlib.nullcontext():
        storing = trace_storing(model, config, batch) if config.cache_hidden_states else LiveTensors()
        training = trace_training(model, config, batch)
        model.zero_grad()
        evaluating = trace_evaluation(model, config) if evaluates(config) else LiveTensors()
    return TracedStep(
        training=training.peaks,
        evaluating=evaluating.peaks,
        storing=storing.peaks,
        flops=training.flops,
        storing_flops=storing.flops // batch,
    )


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake tensors on "cpu", since kernels, autocast and masks go by the device."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        kinds: list[Any] = [module._parameters, module._buffers]
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in seen:  # tied tensors stay tied; `seen` holds the old one, so no id is reused
                    fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
                    is_weight = isinstance(tensor, nn.Parameter)
                    seen[id(tensor)] = (tensor, nn.Parameter(fake, tensor.requires_grad) if is_weight else fake)
                tensors[name] = seen[id(tensor)][1]


@torch.no_grad()
def trace_storing(model: TrainedModel, config: TrainConfig, batch: int) -> LiveTensors:
    """The backbone's one pass over a micro-batch, as train/data/hidden_states.py makes it."""
    model.train()
    with recorded(model) as live, autocast(config):
        tokens_BT, _, document_ids_BT = full_blocks(config, batch)
        model.hidden_states(tokens_BT, document_ids_BT)
    return live


def trace_training(model: TrainedModel, config: TrainConfig, batch: int) -> LiveTensors:
    """The last micro-batch of an update, beside the gradients of earlier ones if there are any.

    Where hidden states are stored, the Trainer holds those of all micro-batches of the update.
    """
    model.train()
    micro_batches = trainer_field(config, "gradient_accumulation_steps")
    with recorded(model) as live:
        states_MBNTD = None
        if config.cache_hidden_states:
            size = (micro_batches, batch, len(model.stored_taps), config.data.block_size, model.backbone.hidden_size)
            states_MBNTD = torch.zeros(size, dtype=stored_dtype(config, model))
        for _ in range(min(2, micro_batches)):
            live.flops = 0
            blocks, states_BNTD = full_blocks(config, batch), None if states_MBNTD is None else states_MBNTD[0]
            with live.counting_as(INPUTS if states_BNTD is None else HEADS), autocast(config):
                loss = model(*blocks, counts_K=torch.ones(len(model.shifts)), hidden_states=states_BNTD)["loss"]
            del blocks, states_BNTD
            with live.counting_as(BACKWARD):
                loss.backward()
            del loss
    return live


@torch.no_grad()
def trace_evaluation(model: TrainedModel, config: TrainConfig) -> LiveTensors:
    """The hidden states of backbone and heads and one chunk of logits, as train/loop/evaluation.py makes them."""
    model.eval()
    with recorded(model) as live:
        blocks = full_blocks(config, trainer_field(config, "per_device_eval_batch_size"))
        states = model.backbone_states(*blocks, lookahead=0.0)
        for rows in model.head_rows(states, with_backbone=True):
            with live.counting_as(LOSS):
                if rows.head == 0 and states.final_BTD is not None:
                    backbone_choices(rows.projection, states.final_BTD)
                chunk = slice(0, max(1, CHUNK_ELEMENTS // len(rows.projection.weight)))
                labels_R = torch.zeros_like(rows.labels_R[chunk])
                plain_cross_entropy(rows.projection, rows.hidden_RD[chunk], labels_R)
        if model.token_heads is not None:  # decoding, for tokens per pass, copies the heads to the backbone's dtype
            with live.counting_as(HEADS):
                _ = [p.to(model.backbone.dtype) for p in model.token_heads.parameters()]
    return live


def full_blocks(config: TrainConfig, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, loss mask and document ids, (B, T) each, of blocks with one supervised document each."""
    size = (batch, config.data.block_size)
    return torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)


def autocast(config: TrainConfig) -> torch.autocast:
    dtype = mixed_precision(config)
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


@contextlib.contextmanager
def recorded(model: TrainedModel) -> Iterator[LiveTensors]:
    """Record live tensors as weights, as gradients, or as made before, in or after the backbone."""
    live = LiveTensors()

    def switch_to(purpose: str) -> Any:
        return lambda *_: setattr(live, "purpose", purpose)

    decoder = model.backbone.decoder
    hooks = [decoder.register_forward_pre_hook(switch_to(BACKBONE)), decoder.register_forward_hook(switch_to(HEADS))]
    for parameter in model.parameters():
        live.label(parameter, TRAINED if parameter.requires_grad else FROZEN)
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: live.label(p.grad, GRADIENTS)))
    for buffer in model.buffers():
        live.label(buffer, FROZEN)
    try:
        with live:
            yield live
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def cuda_attention() -> Iterator[None]:
    """Within the context, attention is CUDA's memory-efficient kernel, which a CPU would not choose.

    The function itself is replaced, since a TorchFunctionMode is off during backward, where layers are recomputed.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = efficient_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


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
    """Attend as the kernel does: no scores are stored, keys and values of a group are repeated, the mask is cast."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query_BHTD.dtype
    groups = query_BHTD.shape[1] // key_BHSD.shape[1] if enable_gqa else 1
    tensors = [query_BHTD.to(dtype), *(t.to(dtype) for t in (key_BHSD, value_BHSD))]
    if groups > 1:
        tensors[1:] = [t.repeat_interleave(groups, dim=1) for t in tensors[1:]]
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(dtype, copy=True).expand(*query_BHTD.shape[:3], key_BHSD.shape[2])
    for_backward = any(t.requires_grad for t in tensors)
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(*tensors, bias, for_backward, dropout_p, is_causal, scale=scale)[0]

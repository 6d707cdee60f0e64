"""Attention within the documents of packed blocks, without a mask of T × T.

With a dense mask, attention computes every pair of a block's positions, even those that the mask rules out. Here a
block's queries, keys and values are split at its documents, and each piece is plain causal attention, for which sdpa
has kernels that skip what lies ahead. On a GPU in half precision all documents are one call of PyTorch's
variable-length kernel (`torch.nn.attention.varlen`).

The documents' lengths travel as an attribute of a 4-D boolean tensor without elements, which Hugging Face models pass
to their layers like any 4-D mask. A layer that uses it as an ordinary mask fails, since no scores have its shape. Only
within `document_attention` do layers understand it; that context first compares their output with a dense mask's.
"""
# B batch, T position, H attention head, D its width

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heads.backbone.masks import FULL, SLIDING, positions_within_documents, within_documents
from heads.backbone.model import Backbone, read_layer_type

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn: Any = None  # type: ignore[no-redef]

LEAST_TOKENS = {"cpu": 32}
"""Tokens of a piece on average, below which starting pieces costs more than a dense mask."""
LEAST_TOKENS_ELSEWHERE = 1024  # on an accelerator, where a piece costs several launches; an estimate, not measured
COMPILED = "decoder layers are compiled"
OLDEST_GPU = (8, 0)  # that the variable-length kernel, which is Flash Attention's, runs on
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of attention's dropout in configs; the kernel has none."""


def mask_by_documents(document_ids_BT: Tensor, window: int | None, *, one_kernel: bool = False) -> Tensor | None:
    """(B, 1, 0, 0) with the lengths of each block's documents; None where a dense mask is needed, or costs less.

    Args:
        window: of sliding layers; None without one.
        one_kernel: all documents are one call of the variable-length kernel, so that short ones cost no more.

    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), None).documents
    [[64, 36]]
    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), 50)      # a window cuts the first document
    """
    lengths = [document_lengths(block_T) for block_T in document_ids_BT.cpu()]
    pieces = sum(map(len, lengths))
    if window is not None and max(map(max, lengths)) > window:
        return None
    if pieces > len(lengths) and document_ids_BT.numel() < pieces * least_tokens(document_ids_BT.device, one_kernel):
        return None
    return mask_of(lengths, document_ids_BT.device, one_kernel)


def mask_of(documents: list[list[int]], device: torch.device, one_kernel: bool) -> Tensor:
    """(B, 1, 0, 0) with the documents' lengths, and for one kernel their borders, which all layers share."""
    mask = torch.empty(len(documents), 1, 0, 0, dtype=torch.bool, device=device)
    borders = [0, *itertools.accumulate(itertools.chain(*documents))] if one_kernel else None
    mask.borders = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=device)  # type: ignore[attr-defined]
    mask.documents = documents  # type: ignore[attr-defined]
    return mask


def least_tokens(device: torch.device, one_kernel: bool) -> int:
    """Tokens that a document must have on average."""
    return 1 if one_kernel else LEAST_TOKENS.get(device.type, LEAST_TOKENS_ELSEWHERE)


def may_use_one_kernel(backbone: Backbone) -> bool:
    """Whether the variable-length kernel can be tried; the comparison with a dense mask then decides.

    Weights that an engine moves to the GPU later, as FSDP2 and ZeRO-3 do, are compared on the CPU: there it stays off.
    """
    config, device = backbone.model.config.get_text_config(), backbone.device
    return (
        varlen_attn is not None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= OLDEST_GPU
        and computed_in(device, backbone.dtype) in (torch.bfloat16, torch.float16)
        and not any(getattr(config, name, None) for name in DROPOUTS)
    )


def computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of attention: autocast's, as `trainer.bf16` sets it, or the tensors' own.

    Rotary embeddings leave float32 queries under autocast too, which sdpa casts by itself.
    """
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def document_lengths(block_T: Tensor) -> list[int]:
    """
    >>> document_lengths(torch.tensor([0, 0, 1, 2, 2]))
    [2, 1, 2]
    """
    lengths: list[int] = torch.unique_consecutive(block_T, return_counts=True)[1].tolist()
    return lengths


def sdpa_by_documents(
    module: nn.Module, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa; with a mask of `mask_by_documents`, for each document by itself. Returns (B, T, H, D)."""
    documents = getattr(attention_mask, "documents", None)
    if documents is None:
        return sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **settings)
    settings["is_causal"] = True
    if all(len(lengths) == 1 for lengths in documents):
        return sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, None, **settings)
    if attention_mask.borders is not None:
        dtype = computed_in(query_BHTD.device, query_BHTD.dtype)
        query, key, value = (tensor.to(dtype) for tensor in (query_BHTD, key_BHTD, value_BHTD))
        return in_one_kernel(query, key, value, attention_mask, settings.get("scaling")), None
    blocks = []
    for row, lengths in enumerate(documents):
        split = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query_BHTD, key_BHTD, value_BHTD)]
        pieces = [sdpa_attention_forward(module, *piece, None, **settings)[0] for piece in zip(*split, strict=True)]
        blocks.append(torch.cat(pieces, dim=1))
    return torch.cat(blocks), None


def in_one_kernel(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, mask: Any, scaling: float | None) -> Tensor:
    """Causal attention within each document, (B, T, H, D), by one call over the blocks laid end to end.

    Keys and values may have fewer heads than queries, as in grouped-query attention.
    """
    longest = max(map(max, mask.documents))
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHTD, key_BHTD, value_BHTD))
    attended: Any = varlen_attn(
        query, key, value, mask.borders, mask.borders, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    blocks: Tensor = attended.unflatten(0, (len(mask.documents), -1))
    return blocks


@contextlib.contextmanager
def document_attention(model: Any, compiled: bool, autocast: torch.dtype | None = None) -> Iterator[str]:
    """Within the context a `TrainedModel` attends by documents where that is possible; yields the choice in words.

    Args:
        compiled: decoder layers are compiled; their graphs would be compiled again for every set of document lengths.
        autocast: the dtype of the run's autocast, in which the layers are compared too.
    """
    if model.backbone.recurrence is not None:
        yield "each document as a row of its own, since a recurrent state would go on into the next"
        return
    with understood():
        with torch.autocast(model.backbone.device.type, autocast, enabled=autocast is not None):
            ways = [True, False] if may_use_one_kernel(model.backbone) else [False]
            found = {way: COMPILED if compiled else what_stops(model.backbone, way) for way in ways}
        model.one_kernel = next((way for way in ways if not found[way]), False)
        obstacle = found[model.one_kernel]
        model.attends_by_document = not obstacle
        few = least_tokens(model.backbone.device, model.one_kernel)
        by_document = "each document by itself, without a mask"
        if few > 1:
            by_document += f"; with one where they have fewer than {few} tokens each"
        try:
            yield f"with dense masks, as {obstacle}" if obstacle else by_document
        finally:
            model.attends_by_document = model.one_kernel = False


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Within the context transformers' sdpa layers understand the masks of `mask_by_documents`."""
    AttentionInterface.register("sdpa", sdpa_by_documents)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def what_stops(backbone: Backbone, one_kernel: bool) -> str:
    """Why a backbone cannot attend by documents; empty where its layers' output is the same as with a dense mask."""
    if backbone.mask_style.additive:
        return "attn_implementation is eager"
    try:
        by_document, dense = (first_layers(backbone, way) for way in (one_kernel, None))
    except (RuntimeError, ValueError, IndexError) as error:
        return f"this backbone's layers read their masks in another way ({str(error).splitlines()[0]})"
    difference = float((by_document - dense).norm() / dense.norm())
    eps = torch.finfo(computed_in(backbone.device, dense.dtype)).eps
    if difference <= 8 * eps:  # one layer or a few, whose sums have another order
        return ""
    return f"this backbone's layers would give something else (a relative difference of {difference:.1g})"


class _EnoughError(Exception):
    """Raised in a hook once the compared layers have run."""


@torch.no_grad()
def first_layers(backbone: Backbone, one_kernel: bool | None) -> Tensor:
    """(1, T, D): the hidden states behind the first layer of each layer type, on a block of two documents.

    Args:
        one_kernel: attend by documents, in one kernel or piece by piece; None: with a dense mask.
    """
    document_ids_BT = torch.tensor([[0] * 3 + [1] * 5], device=backbone.device)
    positions_BT = positions_within_documents(document_ids_BT)
    mask: Any = backbone.mask_style.finish(
        within_documents(document_ids_BT), positions_BT, positions_BT, backbone.dtype
    )
    if one_kernel is not None:
        mask = by_layer_type(backbone, mask_of([[3, 5]], backbone.device, one_kernel))
    types = [read_layer_type(layer) if backbone.mask_style.by_layer_type else FULL for layer in backbone.layers]
    last = backbone.layers[max(types.index(kind) for kind in types)]
    found: list[Tensor] = []

    def stop(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _EnoughError

    handle, was_training = last.register_forward_hook(stop), backbone.model.training
    backbone.model.eval()
    try:
        with contextlib.suppress(_EnoughError):
            tokens_BT = torch.arange(8, device=backbone.device)[None] % backbone.vocab_size
            backbone.forward(tokens_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False)
    finally:
        handle.remove()
        backbone.model.train(was_training)
    return found[0]


def is_by_documents(mask: Any) -> bool:
    """Whether this is a mask of `mask_by_documents`, or one for each layer type."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return all(hasattr(one, "documents") for one in masks)


def by_layer_type(backbone: Backbone, mask: Tensor) -> Any:
    return {FULL: mask, SLIDING: mask} if backbone.mask_style.by_layer_type else mask

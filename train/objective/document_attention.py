"""Attention within the documents of packed blocks, without a mask of T × T.

With a dense mask, attention computes every pair of a block's positions, even those that the mask rules out. Here a
block's queries, keys and values are split at its documents, and each piece is plain causal attention, for which sdpa
has kernels that skip what lies ahead.

The documents' lengths travel as an attribute of a 4-D boolean tensor without elements, which Hugging Face models pass
to their layers like any 4-D mask. A layer that uses it as an ordinary mask fails, since no scores have its shape. Only
within `document_attention` do layers understand it; that context first compares their output with a dense mask's.
"""
# B batch, T position, H attention head, D its width

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heads.backbone.masks import FULL, SLIDING, positions_within_documents, within_documents
from heads.backbone.model import Backbone, read_layer_type

LEAST_TOKENS = {"cpu": 32}
"""Tokens of a piece on average, below which starting pieces costs more than a dense mask."""
LEAST_TOKENS_ELSEWHERE = 1024  # on an accelerator, where a piece costs several launches; an estimate, not measured


def mask_by_documents(document_ids_BT: Tensor, window: int | None) -> Tensor | None:
    """(B, 1, 0, 0) with the lengths of each block's documents; None where a dense mask is needed, or costs less.

    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), None).documents
    [[64, 36]]
    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), 50)      # a window cuts the first document
    """
    lengths = [document_lengths(block_T) for block_T in document_ids_BT.cpu()]
    pieces = sum(map(len, lengths))
    if window is not None and max(map(max, lengths)) > window:
        return None
    if pieces > len(lengths) and document_ids_BT.numel() < pieces * least_tokens(document_ids_BT.device.type):
        return None
    mask = torch.empty(len(lengths), 1, 0, 0, dtype=torch.bool, device=document_ids_BT.device)
    mask.documents = lengths  # type: ignore[attr-defined]
    return mask


def least_tokens(device_type: str) -> int:
    return LEAST_TOKENS.get(device_type, LEAST_TOKENS_ELSEWHERE)


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
    blocks = []
    for row, lengths in enumerate(documents):
        split = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query_BHTD, key_BHTD, value_BHTD)]
        pieces = [sdpa_attention_forward(module, *piece, None, **settings)[0] for piece in zip(*split, strict=True)]
        blocks.append(torch.cat(pieces, dim=1))
    return torch.cat(blocks), None


@contextlib.contextmanager
def document_attention(model: Any, compiled: bool) -> Iterator[str]:
    """Within the context a `TrainedModel` attends by documents where that is possible; yields the choice in words.

    Args:
        compiled: decoder layers are compiled; their graphs would be compiled again for every set of document lengths.
    """
    if model.backbone.recurrence is not None:
        yield "each document as a row of its own, since a recurrent state would go on into the next"
        return
    with understood():
        obstacle = "decoder layers are compiled" if compiled else what_stops(model.backbone)
        model.attends_by_document = not obstacle
        few = least_tokens(model.backbone.device.type)
        by_document = f"each document by itself, without a mask; with one where they have less than {few} tokens each"
        try:
            yield f"with dense masks, as {obstacle}" if obstacle else by_document
        finally:
            model.attends_by_document = False


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Within the context transformers' sdpa layers understand the masks of `mask_by_documents`."""
    AttentionInterface.register("sdpa", sdpa_by_documents)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def what_stops(backbone: Backbone) -> str:
    """Why a backbone cannot attend by documents; empty where its layers' output is the same as with a dense mask."""
    if backbone.mask_style.additive:
        return "attn_implementation is eager"
    try:
        by_document, dense = (first_layers(backbone, by_document=way) for way in (True, False))
    except (RuntimeError, ValueError, IndexError) as error:
        return f"this backbone's layers read their masks in another way ({str(error).splitlines()[0]})"
    difference = float((by_document - dense).norm() / dense.norm())
    if difference <= 8 * torch.finfo(dense.dtype).eps:  # one layer or a few, whose sums have another order
        return ""
    return f"this backbone's layers would give something else (a relative difference of {difference:.1g})"


class _EnoughError(Exception):
    """Raised in a hook once the compared layers have run."""


@torch.no_grad()
def first_layers(backbone: Backbone, *, by_document: bool) -> Tensor:
    """(1, T, D): the hidden states behind the first layer of each layer type, on a block of two documents."""
    document_ids_BT = torch.tensor([[0] * 3 + [1] * 5], device=backbone.device)
    positions_BT = positions_within_documents(document_ids_BT)
    mask: Any = backbone.mask_style.finish(
        within_documents(document_ids_BT), positions_BT, positions_BT, backbone.dtype
    )
    if by_document:
        alone = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=backbone.device)
        alone.documents = [[3, 5]]  # type: ignore[attr-defined]
        mask = by_layer_type(backbone, alone)
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


def by_layer_type(backbone: Backbone, mask: Tensor) -> Any:
    return {FULL: mask, SLIDING: mask} if backbone.mask_style.by_layer_type else mask

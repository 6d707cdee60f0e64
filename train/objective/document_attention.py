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
WIDEST_HEAD = 256  # of the variable-length kernel, which is Flash Attention's


def mask_by_documents(document_ids_BT: Tensor, window: int | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """(B, 1, 0, 0) with the lengths of each block's documents; None where a dense mask is needed, or costs less.

    Args:
        window: of sliding layers; None without one.
        dtype: in which layers compute, which decides whether one kernel takes all documents.

    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), None).documents
    [[64, 36]]
    >>> mask_by_documents(torch.tensor([[0] * 64 + [1] * 36]), 50)      # a window cuts the first document
    """
    lengths = [document_lengths(block_T) for block_T in document_ids_BT.cpu()]
    pieces = sum(map(len, lengths))
    if window is not None and max(map(max, lengths)) > window:
        return None
    if pieces > len(lengths) and document_ids_BT.numel() < pieces * least_tokens(document_ids_BT.device, dtype):
        return None
    mask = torch.empty(len(lengths), 1, 0, 0, dtype=torch.bool, device=document_ids_BT.device)
    mask.documents = lengths  # type: ignore[attr-defined]
    return mask


def least_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens that a document must have on average."""
    return 1 if one_kernel_on(device, dtype) else LEAST_TOKENS.get(device.type, LEAST_TOKENS_ELSEWHERE)


def one_kernel_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one call of the variable-length kernel attends within all documents; torch before 2.10 has none."""
    return varlen_attn is not None and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


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
    fits = query_BHTD.shape[-1] <= WIDEST_HEAD and not settings.get("dropout")
    dtype = computed_in(query_BHTD.device, query_BHTD.dtype)
    if fits and one_kernel_on(query_BHTD.device, dtype):
        query, key, value = (tensor.to(dtype) for tensor in (query_BHTD, key_BHTD, value_BHTD))
        return in_one_kernel(query, key, value, documents, settings.get("scaling")), None
    blocks = []
    for row, lengths in enumerate(documents):
        split = [tensor[row : row + 1].split(lengths, dim=2) for tensor in (query_BHTD, key_BHTD, value_BHTD)]
        pieces = [sdpa_attention_forward(module, *piece, None, **settings)[0] for piece in zip(*split, strict=True)]
        blocks.append(torch.cat(pieces, dim=1))
    return torch.cat(blocks), None


def in_one_kernel(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, documents: list[list[int]], scaling: float | None
) -> Tensor:
    """Causal attention within each document, (B, T, H, D), by one call over the blocks laid end to end.

    Keys and values may have fewer heads than queries, as in grouped-query attention.
    """
    lengths = list(itertools.chain(*documents))
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(query_BHTD.device)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHTD, key_BHTD, value_BHTD))
    attended: Any = varlen_attn(
        query, key, value, borders, borders, max(lengths), max(lengths),
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    blocks: Tensor = attended.unflatten(0, (len(documents), -1))
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
        device = model.backbone.device
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            obstacle = "decoder layers are compiled" if compiled else what_stops(model.backbone)
            few = least_tokens(device, computed_in(device, model.backbone.dtype))
        model.attends_by_document = not obstacle
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

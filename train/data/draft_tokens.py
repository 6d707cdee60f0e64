"""Choose the tokens that heads with `heads.draft_vocabulary` score: the most frequent among their training targets.

The supervised tokens of all training blocks are counted, or of a stream's first STREAMED_BLOCKS blocks, which are the
same in every process. The share of targets that the chosen tokens cover goes into the log and into heads.json; other
tokens are never drafted.
"""
# T position, S draft token, V vocabulary

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor

from heads.interface.draft_vocabulary import most_frequent_tokens
from heads.interface.token_heads import TokenHeads
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)

STREAMED_BLOCKS = 1000
BATCH = 256


def settle_draft_vocabulary(model: TrainedModel, blocks: Any, *, chosen: bool) -> dict[str, Any]:
    """Choose the draft tokens of new heads and report how much of the training data they cover.

    Args:
        blocks: packed training blocks, stored or streamed.
        chosen: the heads were loaded with their draft tokens, which are not changed.

    Returns:
        {"draft_vocabulary": counts and coverage}; {} where every token is scored.

    Raises:
        ValueError: the heads score with rows of the backbone's unembedding, which this run trains.
    """
    token_heads = model.token_heads
    if token_heads is None or token_heads.draft_tokens_S is None:
        return {}
    counts_V = count_tokens(blocks, token_heads.backbone.vocab_size)
    if not chosen:
        token_heads.choose_draft_tokens(most_frequent_tokens(counts_V, token_heads.num_scored))
    refuse_trained_rows(token_heads)
    covered = int(counts_V[token_heads.draft_tokens_S.cpu()].sum()) / max(1, int(counts_V.sum()))
    scored, size, counted = token_heads.num_scored, token_heads.backbone.vocab_size, int(counts_V.sum())
    logger.info(f"heads score {scored:,} of {size:,} tokens, {covered:.2%} of {counted:,} supervised training tokens")
    return {"draft_vocabulary": {"tokens": scored, "coverage": covered, "counted_tokens": counted}}


def count_tokens(blocks: Any, vocab_size: int) -> Tensor:
    """(V,): how often each token is a target."""
    counts_V = np.zeros(vocab_size, np.int64)
    if isinstance(blocks, IterableDataset):
        blocks = blocks.take(STREAMED_BLOCKS)
    elif hasattr(blocks, "with_format"):
        blocks = blocks.with_format("numpy")
    for batch in batches(blocks):
        tokens_T = np.concatenate([np.asarray(row).ravel() for row in batch["input_ids"]])
        targets_T = np.concatenate([np.asarray(row, bool).ravel() for row in batch["loss_mask"]])
        counts_V += np.bincount(tokens_T[targets_T], minlength=vocab_size)
    return torch.from_numpy(counts_V)


def batches(blocks: Any) -> Any:
    """Columns of BATCH blocks at a time, from a dataset or from a plain list of blocks."""
    if hasattr(blocks, "iter"):
        return blocks.iter(batch_size=BATCH)
    rows = iter(blocks)
    groups = iter(lambda: list(islice(rows, BATCH)), [])
    return ({name: [row[name] for row in group] for name in ("input_ids", "loss_mask")} for group in groups)


def refuse_trained_rows(token_heads: TokenHeads) -> None:
    own = {id(parameter) for parameter in token_heads.parameters()}
    for k in range(1, token_heads.num_heads + 1):
        weight = token_heads.projection(k).weight
        if weight.requires_grad and id(weight) not in own:
            raise ValueError(
                f"heads.draft_vocabulary={token_heads.num_scored} was given with the backbone's unembedding, which "
                "rates.base trains: the rows would have to follow it at every step; give heads.unembedding: own, or "
                "leave draft_vocabulary out."
            )

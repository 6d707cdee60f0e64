"""A draft vocabulary for heads that were trained without one: their rows are cut, nothing is trained again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from heads.interface.draft_vocabulary import check_draft_tokens
from heads.interface.token_heads import TokenHeads


def prune_vocabulary(token_heads: TokenHeads, tokens: Tensor | Sequence[int]) -> TokenHeads:
    """New heads on the same backbone that score only `tokens`; the heads that were given stay as they are.

        few = heads.prune_vocabulary(token_heads, heads.most_frequent_tokens(counts, 8192))
        heads.save(few, "checkpoints/runs/grounded-8k")

    What was measured of the given heads is not said of the new ones: their default trees grow from typical accuracies
    until they are evaluated, or `headway tune-tree` fits one.

    Args:
        tokens: ids of the tokens to score.

    Raises:
        ValueError: ids that are none, or a token that these heads do not score.
    """
    ids_S = check_draft_tokens(tokens, None, token_heads.backbone.vocab_size)
    rows_S = ids_S
    if (vocabulary := token_heads.draft_vocabulary) is not None:
        rows_S, scored_S = vocabulary.find(ids_S.to(vocabulary.tokens_S.device))
        if not bool(scored_S.all()):
            missing = int(ids_S[int(scored_S.int().argmin())])
            raise ValueError(f"These heads do not score token {missing}; give tokens out of their draft vocabulary.")
    pruned = type(token_heads)(replace(token_heads.config, draft_vocabulary=len(ids_S)), token_heads.backbone)
    like = next(token_heads.parameters())
    pruned.to(device=like.device, dtype=like.dtype).choose_draft_tokens(ids_S)
    wanted = pruned.state_dict()
    for name, tensor in token_heads.state_dict().items():
        wanted[name].copy_(tensor if tensor.shape == wanted[name].shape else tensor[rows_S.to(tensor.device)])
    pruned.backbone_was_trained = token_heads.backbone_was_trained
    return pruned.train(token_heads.training)

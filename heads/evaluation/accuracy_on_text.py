"""Each head's accuracy and agreement on pieces of text (heads/evaluation/accuracy.py says what is counted)."""
# B block, R row, C row of a chunk, V vocabulary, D model width

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from heads.evaluation.accuracy import HeadAccuracy
from heads.evaluation.perplexity import BATCH, Block, predict, stack
from heads.interface.token_heads import TokenHeads


def measure_accuracy(
    token_heads: TokenHeads, blocks: Sequence[Block], report: Callable[[], None]
) -> list[HeadAccuracy]:
    """The backbone's accuracy and each head's, on all positions of all blocks."""
    meters = [HeadAccuracy() for _ in range(token_heads.num_heads + 1)]
    for start in range(0, len(blocks), BATCH):
        stacked = [
            stack(blocks[start : start + BATCH], n, token_heads.backbone.device) for n in range(1, len(meters) + 1)
        ]
        tokens_R = stacked[0][0].flatten()
        choices_R = torch.zeros_like(tokens_R)
        for n, made in enumerate(predict(token_heads, stacked[0][0], [rows_R for _, rows_R, _ in stacked]), start=1):
            if n == 1:
                choices_R[made.rows_R] = torch.cat([logits_CV.argmax(dim=1) for logits_CV in made.logits()])
            labels_R, chosen_R = tokens_R[made.rows_R + n], choices_R[made.rows_R + n - 1]
            meters[n - 1].update(made.projection, made.hidden_RD, labels_R, chosen_R)
        report()
    return meters

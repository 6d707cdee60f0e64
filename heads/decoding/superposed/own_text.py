"""Logits processors and stopping criteria of a `generate` call, on the drafts of superposed decoding.

All drafts of a prompt share one distribution, but what a repetition penalty or a stop string does to it depends on the
draft's own text. So each is called with one draft at a time, as plain generation calls it for a batch of one: the
draft's k likeliest tokens are then those of its own processed scores, and k² candidates remain. Where a call has
neither, nothing here runs.
"""
# R prompt that still runs, K draft, T token after the prompt, L length, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heads.decoding.request.entry import Call
from heads.decoding.request.request import STATEFUL


class OwnText:
    """
    Raises:
        ValueError: a processor with a state, which could not follow drafts that change places.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        request, prompts = call.request, range(len(call.tokens_BT))
        for processor in request.processors:
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} was asked for, which keeps a state from token to token, but "
                    f"superposed decoding's drafts change places; leave it out or decode with plain generate."
                )
        self.prompts_BT = call.tokens_BT.to(device)
        self.processors = [request.processors_of(prompt) for prompt in prompts] if request.processors else []
        self.criteria = [request.criteria_of(prompt) for prompt in prompts] if request.criteria else []

    def process(self, logits_RV: Tensor, running: Sequence[int], tokens_RKT: Tensor) -> Tensor:
        """(R, K, V): each draft's scores after all processors; (R, 1, V), the logits, where there are none.

        Args:
            running: the prompts of the rows, by their places in the batch.
            tokens_RKT: what follows the prompts so far.
        """
        if not self.processors:
            return logits_RV[:, None]
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        rows = []
        for row, prompt, text_1L in self.texts(running, tokens_RKT):
            scores_1V = logits_RV[row : row + 1].clone()
            for processor in self.processors[prompt]:
                scores_1V = processor(text_1L, scores_1V)
            rows.append(scores_1V)
        return torch.cat(rows).view(*tokens_RKT.shape[:2], -1)

    def ends(self, running: Sequence[int], tokens_RKT: Tensor) -> Tensor:
        """(R, K): which drafts a stopping criterion ends; a prompt's own end of text and length are not asked here."""
        if not self.criteria:
            return torch.zeros(tokens_RKT.shape[:2], dtype=torch.bool, device=tokens_RKT.device)
        ends = [
            bool(self.criteria[prompt](text_1L, None).all()) for _, prompt, text_1L in self.texts(running, tokens_RKT)
        ]
        return torch.tensor(ends, device=tokens_RKT.device).view(tokens_RKT.shape[:2])

    def texts(self, running: Sequence[int], tokens_RKT: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Each draft's row, its prompt, and its whole text (1, L), padding of the prompt included."""
        for row, prompt in enumerate(running):
            for tokens_T in tokens_RKT[row]:
                yield row, prompt, torch.cat([self.prompts_BT[prompt], tokens_T])[None]

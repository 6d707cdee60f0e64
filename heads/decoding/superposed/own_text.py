"""Logits processors and stopping criteria of a `generate` call, on the drafts of superposed decoding.

All drafts of a prompt share one distribution, but the effect of a repetition penalty or a stop string depends on the
draft's own text. So each of them is called with one draft at a time, as plain generation calls it for a batch of one,
and the draft's k likeliest tokens are those of its own processed scores.
"""
# R prompt that still runs, K draft, T token after the prompt, L length, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heads.decoding.request.entry import Call
from heads.decoding.request.request import STATEFUL


class OwnText:
    """The processors and stopping criteria of one call, for each prompt.

    Raises:
        ValueError: a processor with a state, which could not follow drafts whose order changes.
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
        """(R, K, V): each draft's scores after all processors; or the logits (R, 1, V) if the call has no processors.

        Args:
            running: the rows' prompts, by index in the batch that the call began with.
            tokens_RKT: the drafts so far.
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
        """(R, K): which drafts a stopping criterion ends; end tokens and the maximal length are handled elsewhere."""
        if not self.criteria:
            return torch.zeros(tokens_RKT.shape[:2], dtype=torch.bool, device=tokens_RKT.device)
        ends = [
            bool(self.criteria[prompt](text_1L, None).all()) for _, prompt, text_1L in self.texts(running, tokens_RKT)
        ]
        return torch.tensor(ends, device=tokens_RKT.device).view(tokens_RKT.shape[:2])

    def texts(self, running: Sequence[int], tokens_RKT: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Each draft's row, prompt, and whole text (1, L), the prompt's padding included."""
        for row, prompt in enumerate(running):
            for tokens_T in tokens_RKT[row]:
                yield row, prompt, torch.cat([self.prompts_BT[prompt], tokens_T])[None]

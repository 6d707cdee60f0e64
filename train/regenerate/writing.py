"""Generate in batches so that a row's sampled text does not depend on its batch.

`generate` has one random generator for a whole batch, so a row's samples would depend on the rows beside it. Here each
row has its own, seeded with the run's seed and the row's numbers, which gives one uniform number for each token. A
logits processor turns scores and number into a token by inverse transform sampling and masks all others; decoding
itself is greedy. So a row's text is the same in every batch, after every resume, and with or without heads, up to
rounding: in float32 and below, another batch size changes the last bits of logits.
"""
# B batch, T prompt position, L length so far, N new token, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from heads.backbone.loading import max_positions
from train.regenerate.config import RegenerateConfig

Key = tuple[int, ...]
"""Non-negative numbers that name one text: row, prompt in it, turn."""


class Writer:
    """Continues prompts with a backbone, alone or with heads.

    Args:
        ends: tokens that end a text; they stay in it.
        decoding: `TreeDecoding(…)` on this model; None for plain `generate`. The text is the same.
    """

    def __init__(self, model: Any, config: RegenerateConfig, ends: Iterable[int], decoding: Any = None) -> None:
        self.model = model
        self.config = config
        self.ends = sorted(set(ends))
        self.decoding = decoding
        self.longest = max_positions(model)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt with its new tokens fits the backbone's positions."""
        return self.longest is None or len(prompt) + self.config.max_new_tokens <= self.longest

    def write(self, prompts: Sequence[Sequence[int]], keys: Sequence[Key]) -> list[list[int]]:
        """The continuation of each prompt, up to its end token if any. Prompts of similar length share a batch."""
        answers: list[list[int]] = [[] for _ in prompts]
        by_length = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        for start in range(0, len(prompts), self.config.batch_size):
            batch = by_length[start : start + self.config.batch_size]
            found = self.write_batch([prompts[i] for i in batch], [keys[i] for i in batch])
            for i, answer in zip(batch, found, strict=True):
                answers[i] = answer
        return answers

    @torch.no_grad()
    def write_batch(self, prompts: Sequence[Sequence[int]], keys: Sequence[Key]) -> list[list[int]]:
        tokens_BT, mask_BT = pad_left(prompts, self.ends[0])
        length, device = tokens_BT.shape[1], self.model.device
        choose = self.processor(keys, length)
        with token_ids_alone(self.model):
            output_BL = self.model.generate(
                tokens_BT.to(device),
                attention_mask=mask_BT.to(device),
                generation_config=self.generation_config(),
                logits_processor=LogitsProcessorList([choose]),
                custom_generate=self.decoding,
            )
        if isinstance(choose, LookForNan):
            choose.refuse()
        return [self.cut(row) for row in output_BL[:, length:].tolist()]

    def generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )

    def processor(self, keys: Sequence[Key], length: int) -> LookForNan | SampleByRow:
        c = self.config
        if c.temperature == 0:
            return LookForNan(self.model.device)
        uniforms_BN = torch.stack([uniform_numbers((c.seed, *key), c.max_new_tokens) for key in keys])
        return SampleByRow(uniforms_BN, length, c.temperature, c.top_p)

    def cut(self, tokens: list[int]) -> list[int]:
        """Up to the first end token, it included; what follows is padding."""
        first = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: first + 1]


@contextmanager
def token_ids_alone(model: Any) -> Iterator[None]:
    """Within the context, the backbone's own generation settings hold only its special token ids.

    `generate` would apply all others where a request does not set them: penalties, suppressed tokens, lengths, ….
    """
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in names})
    try:
        yield
    finally:
        model.generation_config = own


class LookForNan(LogitsProcessor):
    """Checks the scores of greedy decoding for NaN without changing them; the result stays on the device.

    `argmax` treats NaN as the largest score, so decoding would silently repeat one token.
    """

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros((), dtype=torch.bool, device=device)

    def of_row(self, row: int) -> LookForNan:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen |= ~scores.amax(dim=1).isfinite().all()  # amax passes NaN on; infinite logits have no softmax either
        return scores

    def refuse(self) -> None:
        """
        Raises:
            ValueError: some scores were NaN.
        """
        refuse_nan(self.seen)


class SampleByRow(LogitsProcessor):
    """Masks all tokens but the one that the row's own number samples; the last processor of a greedy request.

    Plain `generate` calls it with whole batches; this library's decoding calls it row by row, through `of_row`.
    """

    def __init__(self, uniforms_BN: Tensor, prompt_length: int, temperature: float, top_p: float) -> None:
        self.uniforms_BN = uniforms_BN
        self.prompt_length = prompt_length
        self.temperature, self.top_p = temperature, top_p

    def of_row(self, row: int) -> SampleByRow:
        return SampleByRow(self.uniforms_BN[row : row + 1], self.prompt_length, self.temperature, self.top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms_B = self.uniforms_BN[:, input_ids.shape[1] - self.prompt_length].to(scores.device)
        probs_BV = (scores.double() / self.temperature).softmax(dim=1)
        tokens_B = sample(probs_BV, uniforms_B, self.top_p)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


def refuse_nan(seen: Tensor) -> None:
    """Raise ValueError where NaN was seen in a backbone's logits, or in what is made of them."""
    if bool(seen):
        raise ValueError(
            "The backbone's probabilities are NaN; look for damaged weights, and for overflow: give "
            "--backbone.dtype bfloat16 or float32 for a model that was in float16."
        )


def sample(probs_BV: Tensor, uniforms_B: Tensor, top_p: float) -> Tensor:
    """(B,) tokens: each number chooses the token whose share of [0, 1) contains it, likeliest tokens first.

    >>> probs = torch.tensor([[0.125, 0.5, 0.375]], dtype=torch.float64)   # shares: 1 to 0.5, 2 to 0.875, 0 to 1
    >>> [int(sample(probs, torch.tensor([u]), 1.0)) for u in (0.0, 0.49, 0.5, 0.9)]
    [1, 1, 2, 0]
    >>> int(sample(probs, torch.tensor([0.9]), 0.8))   # of tokens 1 and 2 alone
    2

    Raises:
        ValueError: NaN among the probabilities.
    """
    refuse_nan(probs_BV[:, :1].isnan().any())  # a softmax with one NaN has nothing else
    ranked_BV, order_BV = probs_BV.sort(dim=1, descending=True, stable=True)
    before_BV = ranked_BV.cumsum(dim=1) - ranked_BV
    allowed_BV = ranked_BV.masked_fill((before_BV >= top_p) & (before_BV > 0), 0.0)
    sums_BV = allowed_BV.cumsum(dim=1)
    ranks_B = (sums_BV <= uniforms_B[:, None] * sums_BV[:, -1:]).sum(dim=1)
    ranks_B = ranks_B.minimum((allowed_BV > 0).sum(dim=1) - 1)
    return order_BV.gather(1, ranks_B[:, None]).squeeze(1)


def uniform_numbers(key: Key, count: int) -> Tensor:
    """(count,) numbers in [0, 1) that depend on the key alone; a larger count only appends to them."""
    return torch.from_numpy(np.random.default_rng(key).random(count))


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and the mask that is 0 on padding.

    >>> pad_left([[5], [6, 7]], 0)
    (tensor([[0, 5],
            [6, 7]]), tensor([[0, 1],
            [1, 1]]))
    """
    longest = max(map(len, prompts))
    tokens = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)

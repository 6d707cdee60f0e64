"""Figures of drafts: perplexity under a judge, repetition within a draft, likeness between drafts.

Perplexity is exp of the mean -log p of a draft's own tokens, its end of text included, and averages are over prefixes,
as in table 1. A judge with another tokenizer scores all tokens of prefix and draft but the first five (section 5.1).
"""
# B prefix, K draft, T prefix position, N new token, L token of prefix and draft

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.evaluation.lossy.other_model import new_token_losses
from heads.extras import needs_extra

ROWS = 256
SKIPPED = 5


@torch.no_grad()
def perplexities(judge: Any, prefixes_BT: Tensor, drafts_BKN: Tensor) -> Tensor:
    """(B, K) under a judge with the same tokenizer."""
    k = drafts_BKN.shape[1]
    texts_RL = torch.cat([prefixes_BT.repeat_interleave(k, dim=0), drafts_BKN.flatten(0, 1)], dim=1)
    losses = [new_token_losses(judge, part_RL, prefixes_BT.shape[1]) for part_RL in texts_RL.split(ROWS)]
    scored_RN = is_text(drafts_BKN.flatten(0, 1), int(judge.generation_config.eos_token_id))
    means_R = (torch.cat(losses) * scored_RN).sum(dim=1) / scored_RN.sum(dim=1)
    return means_R.exp().view(-1, k)


def is_text(tokens_RN: Tensor, end: int) -> Tensor:
    """Which tokens belong to a draft: all up to its first end of text, which counts.

    >>> is_text(torch.tensor([[5, 0, 0], [5, 6, 7]]), 0).long().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    ends_RN = (tokens_RN == end).long()
    return ends_RN.cumsum(dim=1) - ends_RN == 0


@torch.no_grad()
def text_perplexities(judge: Any, tokenizer: Any, texts: Sequence[Sequence[str]]) -> Tensor:
    """(B, K) of whole texts under a judge with its own tokenizer."""
    rows = [tokenizer(text)["input_ids"] for drafts in texts for text in drafts]
    found = []
    for i in range(0, len(rows), ROWS):
        part = rows[i : i + ROWS]
        lengths_R = torch.tensor([len(row) for row in part])
        tokens_RL = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in part], batch_first=True)
        logits_RLV = judge(tokens_RL).logits[:, :-1].float()  # padding is on the right: no token before it sees it
        losses_RL = nn.functional.cross_entropy(logits_RLV.transpose(1, 2), tokens_RL[:, 1:], reduction="none")
        places_L = torch.arange(1, tokens_RL.shape[1])
        scored_RL = (places_L >= SKIPPED) & (places_L < lengths_R[:, None])
        found.append((losses_RL * scored_RL).sum(dim=1) / scored_RL.sum(dim=1).clamp(min=1))
    return torch.cat(found).double().exp().view(len(texts), -1)


def texts_of(tokenizer: Any, prefixes_BT: Tensor, drafts_BKN: Tensor) -> list[list[str]]:
    """Prefix and draft as text."""
    rows = zip(prefixes_BT.tolist(), drafts_BKN.tolist(), strict=True)
    return [[tokenizer.decode(prefix + draft, skip_special_tokens=True) for draft in drafts] for prefix, drafts in rows]


def unique_ngrams(tokens: Sequence[int], n: int) -> float:
    """The share of unique n-grams of a draft (section 5.2, figure 8).

    >>> unique_ngrams([1, 2, 1, 2, 3], 1), unique_ngrams([1, 2, 1, 2, 3], 2)
    (0.6, 0.75)
    """
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def self_bleu(drafts: Sequence[Sequence[int]]) -> float:
    """The mean BLEU of each draft with the others as references, 0 to 1, on tokens; low means diverse.

    >>> [round(self_bleu([[1, 2, 3, 4, 5], other]), 3) for other in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 9])]
    [1.0, 0.0]
    """
    with needs_extra("eval", "Self-BLEU was requested"):
        from sacrebleu.metrics import BLEU
    bleu = BLEU(tokenize="none", effective_order=True)
    lines = [" ".join(map(str, draft)) for draft in drafts]
    others = [lines[:i] + lines[i + 1 :] for i in range(len(lines))]
    scores = [bleu.sentence_score(line, rest).score for line, rest in zip(lines, others, strict=True)]
    return sum(scores) / len(scores) / 100

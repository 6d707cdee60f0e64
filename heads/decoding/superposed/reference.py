"""The plain reference of superposed decoding: one prompt, dictionaries and loops, no cache, from the equations.

Equations 1 to 7 and section 5.3 of Shen et al. (2024); Algorithm 1 where it agrees with them (as printed it makes one
token too few, and never drops a draft from which others were grown). Every pass reads the whole text anew: the tokens
that are certain, then one superposed embedding a token.
"""
# T position, D model width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Counts = Mapping[tuple[int, ...], Mapping[int, int]]
"""For each beginning of n − 1 tokens how often each token followed, for all n together."""


def count_plainly(documents: Sequence[Sequence[int]], order: int) -> dict[tuple[int, ...], dict[int, int]]:
    """The n-grams of 2 to `order` tokens.

    >>> count_plainly([[4, 5, 5]], 2)
    {(4,): {5: 1}, (5,): {5: 1}}
    """
    counts: dict[tuple[int, ...], dict[int, int]] = {}
    for document in documents:
        for n in range(2, order + 1):
            for i in range(len(document) - n + 1):
                after = counts.setdefault(tuple(document[i : i + n - 1]), {})
                after[document[i + n - 1]] = after.get(document[i + n - 1], 0) + 1
    return counts


def superposed_drafts(
    model: Any,
    prompt: Sequence[int],
    *,
    k: int,
    length: int,
    temperature: float,
    alpha: float,
    penalty: float,
    weights: Sequence[float] = (),
    counts: Counts | None = None,
    eos: frozenset[int] = frozenset(),
    reset_every: int | None = None,
    generator: torch.Generator | None = None,
) -> list[tuple[list[int], float]]:
    """The k drafts of `length` tokens that follow a prompt, shorter where they end, each with log p_i."""
    certain, superposed = list(prompt), list[Tensor]()
    before: list[int] = []  # tokens of the drafts sampled at resets
    drafts = first_of(next_log_p(model, certain, superposed, temperature), k)
    while True:
        made = len(before) + max(len(tokens) for tokens, _ in drafts)
        if made >= length or all(tokens[-1] in eos for tokens, _ in drafts):
            return [(before + tokens, score) for tokens, score in drafts]
        if reset_every == len(superposed) + 1:
            probabilities = torch.tensor([weights_of([score for _, score in drafts])], dtype=torch.float64)
            sampled = drafts[int(torch.multinomial(probabilities, 1, generator=generator))][0]
            if sampled[-1] in eos:
                return [(before + tokens, score) for tokens, score in drafts]
            certain, superposed, before = certain + sampled, [], before + sampled
            drafts = first_of(next_log_p(model, certain, superposed, temperature), k)
            continue
        superposed.append(superposed_embedding(model, drafts, eos))
        log_p = next_log_p(model, certain, superposed, temperature)
        best = sorted(log_p, key=lambda token: -log_p[token])[:k]
        candidates = list[tuple[list[int], float]]()
        for tokens, score in drafts:
            if tokens[-1] in eos:
                candidates.append((tokens, score))
                continue
            text = list(prompt) + before + tokens
            p_f = interpolated({token: log_p[token] for token in best}, text, counts, weights, alpha, penalty)
            candidates += [([*tokens, token], score + log_p_f) for token, log_p_f in p_f.items()]
        drafts = sorted(candidates, key=lambda draft: -draft[1])[:k]


def next_log_p(
    model: Any, certain: Sequence[int], superposed: Sequence[Tensor], temperature: float
) -> dict[int, float]:
    """log p_θ(x | M, x̃) of every token, at the temperature."""
    with torch.no_grad():
        known_TD = model.get_input_embeddings()(torch.tensor(list(certain)))
        read_1TD = torch.cat([known_TD, *[x[None] for x in superposed]])[None]
        logits_V = model(inputs_embeds=read_1TD, use_cache=False).logits[0, -1]
    return dict(enumerate(torch.log_softmax(logits_V.double() / temperature, dim=-1).tolist()))


def first_of(log_p: Mapping[int, float], k: int) -> list[tuple[list[int], float]]:
    """Equation 1."""
    return [([token], log_p[token]) for token in sorted(log_p, key=lambda token: -log_p[token])[:k]]


def weights_of(scores: Sequence[float]) -> list[float]:
    """Equation 4."""
    highest = max(scores)
    shares = [math.exp(score - highest) for score in scores]
    return [share / sum(shares) for share in shares]


def superposed_embedding(model: Any, drafts: Sequence[tuple[list[int], float]], eos: frozenset[int]) -> Tensor:
    """Equation 3, over the drafts that go on."""
    going_on = [(tokens[-1], score) for tokens, score in drafts if tokens[-1] not in eos]
    embed = model.get_input_embeddings()
    with torch.no_grad():
        terms = [
            gamma * embed(torch.tensor(token))
            for gamma, (token, _) in zip(weights_of([score for _, score in going_on]), going_on, strict=True)
        ]
    return torch.stack(terms).sum(dim=0)


def interpolated(
    log_p: Mapping[int, float],
    text: Sequence[int],
    counts: Counts | None,
    weights: Sequence[float],
    alpha: float,
    penalty: float,
) -> dict[int, float]:
    """Equations 5 to 7: log p_f of the candidates after one draft."""
    if counts is None or alpha == 0:
        return dict(log_p)
    p_ngram = dict.fromkeys(log_p, 0.0)
    for n, weight in enumerate(weights, start=2):
        after = counts.get(tuple(text[len(text) - n + 1 :]), {}) if len(text) >= n - 1 else {}
        for token in log_p:
            if token in after:
                p_ngram[token] += weight * after[token] / sum(after.values())
    if not any(p_ngram.values()):
        return {token: math.log(penalty) + (1 - alpha) * log_p[token] for token in log_p}
    return {
        token: (1 - alpha) * log_p[token] + alpha * math.log(p_ngram[token]) for token in log_p if p_ngram[token] > 0
    }

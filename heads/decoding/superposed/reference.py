"""The plain reference of superposed decoding, written from the equations: one prompt, dictionaries, loops, no cache.

It follows equations 1 to 7 and section 5.3 of Shen et al. (2024), and Algorithm 1 where it agrees with them (as printed
it makes one token too few, and never drops a draft from which others were grown). Every pass reads the whole text: the
tokens that are certain (the prompt and drafts sampled at resets), then one superposed embedding for each token.
"""
# T position, D model width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Counts = Mapping[tuple[int, ...], Mapping[int, int]]
"""For each sequence of n − 1 tokens, of any n, how often each token followed it."""


def count_plainly(documents: Sequence[Sequence[int]], order: int) -> dict[tuple[int, ...], dict[int, int]]:
    """Counts of the n-grams of 2 to `order` tokens.

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
    process: Callable[[list[int], Tensor], Tensor] = lambda text, logits_V: logits_V,
    stops: Callable[[list[int]], bool] = lambda text: False,
    token_heads: Any = None,
    head_weight: float = 0.0,
) -> list[tuple[list[int], float]]:
    """The k drafts of `length` tokens that follow a prompt, shorter where they end, each with log p_i.

    Args:
        process: applies logits processors to the logits that follow a text.
        stops: whether a stopping criterion ends a text.
        token_heads: grounded heads that read the states after the final norm; head 1 has the weight `head_weight`
            beside p_θ.
    """
    certain, superposed = list(prompt), list[Tensor]()
    before: list[int] = []  # tokens of the drafts sampled at resets

    def likeliest(text: list[int], logits_V: Tensor) -> list[tuple[list[int], float]]:
        """The k most probable tokens after a text, each with log p_θ(x | M, x̃) at the temperature (equation 1)."""
        log_p_V = torch.log_softmax(process(text, logits_V).double() / temperature, dim=-1).tolist()
        return [([token], log_p_V[token]) for token in sorted(range(len(log_p_V)), key=lambda x: -log_p_V[x])[:k]]

    def has_ended(tokens: list[int]) -> bool:
        return tokens[-1] in eos or stops(list(prompt) + before + tokens)

    drafts = likeliest(certain, next_logits(model, certain, superposed))
    while True:
        made = len(before) + max(len(tokens) for tokens, _ in drafts)
        if made >= length or all(has_ended(tokens) for tokens, _ in drafts):
            return [(before + tokens, score) for tokens, score in drafts]
        if reset_every == len(superposed) + 1:
            probabilities = torch.tensor([weights_of([score for _, score in drafts])], dtype=torch.float64)
            sampled = drafts[int(torch.multinomial(probabilities, 1, generator=generator))][0]
            if has_ended(sampled):
                return [(before + tokens, score) for tokens, score in drafts]
            certain, superposed, before = certain + sampled, [], before + sampled
            drafts = likeliest(certain, next_logits(model, certain, superposed))
            continue
        before_D = last_state(model, certain, superposed) if token_heads else None
        superposed.append(superposed_embedding(model, [draft for draft in drafts if not has_ended(draft[0])]))
        logits_V = next_logits(model, certain, superposed)
        candidates = list[tuple[list[int], float]]()
        for tokens, score in drafts:
            if has_ended(tokens):
                candidates.append((tokens, score))
                continue
            text = list(prompt) + before + tokens
            best = {token: score_of for [token], score_of in likeliest(text, logits_V)}
            if token_heads:
                log_p_V = head_log_p(token_heads, before_D, tokens[-1], temperature)
                best = {x: (1 - head_weight) * best[x] + head_weight * log_p_V[x] for x in best}
            p_f = interpolated(best, text, counts, weights, alpha, penalty)
            candidates += [([*tokens, token], score + log_p_f) for token, log_p_f in p_f.items()]
        drafts = sorted(candidates, key=lambda draft: -draft[1])[:k]


def next_logits(model: Any, certain: Sequence[int], superposed: Sequence[Tensor]) -> Tensor:
    """(V,): the logits after M and x̃."""
    with torch.no_grad():
        known_TD = model.get_input_embeddings()(torch.tensor(list(certain)))
        read_1TD = torch.cat([known_TD, *[x[None] for x in superposed]])[None]
        logits_V: Tensor = model(inputs_embeds=read_1TD, use_cache=False).logits[0, -1]
    return logits_V


def last_state(model: Any, certain: Sequence[int], superposed: Sequence[Tensor]) -> Tensor:
    """(D,): the state after M and x̃ that the unembedding reads."""
    with torch.no_grad():
        known_TD = model.get_input_embeddings()(torch.tensor(list(certain)))
        read_1TD = torch.cat([known_TD, *[x[None] for x in superposed]])[None]
        state_D: Tensor = model.get_decoder()(inputs_embeds=read_1TD, use_cache=False).last_hidden_state[0, -1]
    return state_D


def head_log_p(token_heads: Any, before_D: Any, token: int, temperature: float) -> list[float]:
    """log p_head(x | f, token) of every token x (heads/decoding/superposed/draft_head.py)."""
    with torch.no_grad():
        logits_1V = token_heads.projection(1)(token_heads.head(1, before_D[None], torch.tensor([[token]])))
    found: list[float] = torch.log_softmax(logits_1V[0].double() / temperature, dim=-1).tolist()
    return found


def weights_of(scores: Sequence[float]) -> list[float]:
    """Equation 4: the drafts' normalised probabilities."""
    highest = max(scores)
    shares = [math.exp(score - highest) for score in scores]
    return [share / sum(shares) for share in shares]


def superposed_embedding(model: Any, going_on: Sequence[tuple[list[int], float]]) -> Tensor:
    """Equation 3, over the drafts that have not ended."""
    embed = model.get_input_embeddings()
    with torch.no_grad():
        terms = [
            gamma * embed(torch.tensor(tokens[-1]))
            for gamma, (tokens, _) in zip(weights_of([score for _, score in going_on]), going_on, strict=True)
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

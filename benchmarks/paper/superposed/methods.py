"""The compared ways to write drafts; each gives (B, K, N) new tokens, the likeliest draft first if they are ordered.

Greedy, beam search and nucleus sampling are transformers' `generate`. The paper does not give the p of its nucleus;
0.95 is the value of Holtzman et al. "N-grams alone" (tables 1 and 3) takes the likeliest token of equation 5 each time.
"""
# B prefix, K draft, T prefix position, N new token, M candidate token

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads import SuperposedDecoding
from heads.decoding.superposed.step import PAPER_WEIGHTS
from heads.ngrams.table import NgramTable

NUCLEUS = 0.95
ROWS = 320
"""The most rows of a batch, so that memory does not grow with the number of prefixes."""


def greedy(model: Any, prefixes_BT: Tensor, length: int) -> Tensor:
    return generate(model, prefixes_BT, 1, length, do_sample=False)


def beam(model: Any, prefixes_BT: Tensor, k: int, length: int) -> Tensor:
    return generate(model, prefixes_BT, k, length, do_sample=False, num_beams=k, num_return_sequences=k)


def nucleus(model: Any, prefixes_BT: Tensor, k: int, length: int, seed: int = 0) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "top_p": NUCLEUS, "top_k": 0, "temperature": 1.0}
        return generate(model, prefixes_BT, k, length, num_return_sequences=k, **sampling)


def superposed(model: Any, prefixes_BT: Tensor, length: int, decoding: SuperposedDecoding) -> Tensor:
    return generate(model, prefixes_BT, decoding.config.k, length, do_sample=False, custom_generate=decoding)


@torch.no_grad()
def generate(model: Any, prefixes_BT: Tensor, k: int, length: int, **settings: Any) -> Tensor:
    """(B, k, length), padded with the end of text."""
    end = int(model.generation_config.eos_token_id)
    found = []
    for part_BT in prefixes_BT.split(max(1, ROWS // k)):
        rows_NL = model.generate(
            part_BT, attention_mask=torch.ones_like(part_BT), max_new_tokens=length, pad_token_id=end, **settings
        )
        new_NN = rows_NL[:, part_BT.shape[1] :]
        padded_NN = torch.full((len(rows_NL), length), end)
        padded_NN[:, : new_NN.shape[1]] = new_NN
        found.append(padded_NN.view(len(part_BT), k, length))
    return torch.cat(found)


def ngrams_alone(table: NgramTable, prefixes_BT: Tensor, length: int) -> Tensor:
    """(B, 1, length): each time the likeliest token of equation 5, or the most frequent one if no n-gram is known."""
    texts = [prefix_T.tolist() for prefix_T in prefixes_BT]
    for text in texts:
        for _ in range(length):
            text.append(likeliest(table, text, PAPER_WEIGHTS))
    return torch.tensor(texts)[:, None, prefixes_BT.shape[1] :]


def likeliest(table: NgramTable, text: Sequence[int], weights: Sequence[float]) -> int:
    """The token with the highest p_ngram, sought among those of known pairs, which include those of longer n-grams."""
    tokens, _ = table.next_counts(list(text[-1:]))
    if not len(tokens):
        return int(table.unigrams_V.argmax())
    context_1C = torch.tensor([list(text[-len(weights) :])])
    tokens_1M = torch.from_numpy(tokens)[None].long()
    orders_OM = table.next_token_probabilities(context_1C, tokens_1M)[0]
    mixture_M = torch.tensor(weights[: len(orders_OM)], dtype=torch.float64) @ orders_OM
    return int(tokens_1M[0, mixture_M.argmax()])

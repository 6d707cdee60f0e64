"""Draft models for tests, right in most places and wrong in some, beside plain `generate`."""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any

import torch
from plain_text import plain_generate
from tiny import PAD, SMALL, VOCAB, random_tokens, shared_model, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, GPTNeoConfig, MptConfig

K = 4
PROMPT = random_tokens(1, 5, seed=50)
PROMPTS = [random_tokens(n, seed=90 + n).tolist() for n in (3, 9, 6)]
IN_STEP = [random_tokens(4, seed=90 + n).tolist() for n in range(3)]
"""No padding, and with chains of one token no holes: until rows differ in what they have yet to read."""
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
PAIRS = [
    ("llama", "gpt_neox"),
    ("gpt_neox", "qwen3"),
    ("qwen3", "codegen"),
    ("mistral_windowed", "llama"),
    ("gemma3", "mistral_windowed"),
    ("codegen", "gemma2"),
    ("opt", "gpt2"),
]


@functools.cache
def noisy(name: str, noise: float = 0.02, vocab: int = VOCAB) -> Any:
    """The shared model with noise on its weights: right in most places, wrong in some."""
    model = copy.deepcopy(shared(name, vocab))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@functools.cache
def shared(name: str, vocab: int = VOCAB) -> Any:
    attn = "eager" if name in ("codegen", "gemma2") else "sdpa"
    if vocab == VOCAB:
        return shared_model(name, attn)
    return tiny_model(name, attn=attn, vocab_size=vocab, bos_token_id=None)


def both(model: Any, decoding: Any, tokens: Tensor = PROMPT, **options: Any) -> tuple[Tensor, Any]:
    """What `generate` gives, and what it gives with the decoding."""
    options = {"do_sample": False, "max_new_tokens": 24, **NO_EOS, **options}
    plain = plain_generate(model, tokens, **options)
    return plain, model.generate(tokens, custom_generate=decoding, return_dict_in_generate=True, **options)


PLAIN_DRAFTS = {
    "bloom": lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=128, expansion_ratio=2),
    "gpt_neo": lambda: GPTNeoConfig(
        **SMALL, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8
    ),
}
"""Models that count distances in cache slots: they draft as `PlainDraft`."""


def plain_draft_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(PLAIN_DRAFTS[name]()).double().eval()


TOY = 6
TOY_PROMPT = [2, 4, 3, 5]
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 3, "temperature": 2.0},
    "top_p": {"top_p": 0.8, "top_k": 0, "temperature": 2.5},
    "min_p": {"min_p": 0.1, "top_k": 0, "temperature": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.6, "top_k": 0, "temperature": 2.0},
}


def processors_of(model: Any, options: dict[str, Any]) -> Any:
    """The processors of logits that `generate` hands to its decoding."""
    found = []

    def take(model: Any, input_ids: Any, logits_processor: Any, **rest: Any) -> Any:
        found.append(logits_processor)
        return input_ids

    prompt = torch.tensor([TOY_PROMPT])
    model.generate(prompt, custom_generate=take, do_sample=True, max_new_tokens=3, **options)
    return found[0]


@torch.no_grad()
def joint(model: Any, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The processed distribution of the next three tokens, by plain enumeration."""
    processors = processors_of(model, options)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for ahead, probability in probabilities.items():
            text_1L = torch.tensor([[*TOY_PROMPT, *ahead]])
            scores_1V = processors(text_1L, model(text_1L).logits[:, -1].float())
            for token, p in enumerate(torch.softmax(scores_1V.double(), dim=-1)[0].tolist()):
                if p > 0:
                    longer[*ahead, token] = probability * p
        probabilities = longer
    return probabilities


def chi_square(found: collections.Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic over cells of at least 5 expected draws, the others together; and the degrees of freedom."""
    draws = sum(found.values())
    frequent = [text for text, p in wanted.items() if p * draws >= 5]
    statistic = sum((found[text] - wanted[text] * draws) ** 2 / (wanted[text] * draws) for text in frequent)
    rest = draws - sum(wanted[text] for text in frequent) * draws
    statistic += (draws - sum(found[text] for text in frequent) - rest) ** 2 / max(rest, 1.0)
    return statistic, len(frequent)


def limit(degrees: int, z: float = 3.3) -> float:
    """Wilson and Hilferty's approximation of the chi-square value that is passed once in two thousand times."""
    return degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3

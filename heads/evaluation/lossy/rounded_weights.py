"""What microscaling weights cost in quality: the error of the weights, perplexity, and how many drafts are accepted.

A model's linear layers get the numbers that their packed weights would stand for, one format after another, and the
original ones again. Products with packed weights compute with the same numbers (heads/quantization/multiply.py), so
that all formats are measured on one model in memory. Unembedding and embeddings are left as they are.
"""
# B block, T position, O outputs, I inputs, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.evaluation.methods import GreedySettings, plain, tree
from heads.evaluation.perplexity import Estimate
from heads.evaluation.same_text import SameText
from heads.evaluation.throughput import compare
from heads.interface.token_heads import TokenHeads
from heads.quantization.codec import pack, unpack
from heads.quantization.formats import BLOCK, Format


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A model with its weights in one format, None being the weights as they are.

    Attributes:
        weight_bytes: of all weights of the model, those that are left as they are included.
        weight_error: the norm of the difference over the norm of the weights, over all layers that are packed.
        perplexity: of the next token; None without texts.
        tokens_per_pass: of the heads alone; None without heads or prompts.
        same_text: whether heads wrote plain generation's text on the same weights.
    """

    format: Format | None
    weight_bytes: int
    weight_error: float
    perplexity: Estimate | None
    tokens_per_pass: float | None
    same_text: str | None


@torch.no_grad()
def measure_quality(
    model: Any,
    formats: Sequence[Format | None],
    texts: Sequence[Tensor],
    token_heads: TokenHeads | None = None,
    prompts: Sequence[Tensor] = (),
    *,
    settings: GreedySettings,
    report: Callable[[], None] = lambda: None,
) -> Iterator[Quality]:
    """One row for each format, in their order; the model is as before after each.

    Args:
        texts: (T,) token ids each; may be empty.
        prompts: (1, T) each; read with heads only.
        report: called after each of the `len(formats)` rows.

    Raises:
        ValueError: a layer's inputs do not fill blocks, or a weight is not finite.
    """
    for format in formats:
        with rounded(model, format) as (weight_bytes, error):
            per_pass, same = acceptance(model, token_heads, prompts, settings)
            found = Quality(
                format=format,
                weight_bytes=weight_bytes,
                weight_error=error,
                perplexity=perplexity_of(model, texts) if texts else None,
                tokens_per_pass=per_pass,
                same_text=same,
            )
        report()
        yield found


@contextmanager
def rounded(model: Any, format: Format | None) -> Iterator[tuple[int, float]]:
    """The model with its linear layers' weights rounded to a format; gives its bytes and the weights' error."""
    layers = [] if format is None else list(linear_layers(model))
    originals = [layer.weight.data for layer in layers]
    size = sum(parameter.nbytes for parameter in model.parameters())
    squares = errors = 0.0
    try:
        for layer, weight_OI in zip(layers, originals, strict=True):
            assert format is not None
            layer.weight.data = unpack(pack(weight_OI, format), format, weight_OI.dtype)
            size += int(weight_OI.numel() * format.bits_per_weight / 8) - weight_OI.nbytes
            squares += float(weight_OI.double().square().sum())
            errors += float((layer.weight.data.double() - weight_OI.double()).square().sum())
        yield size, math.sqrt(errors / squares) if squares else 0.0
    finally:
        for layer, weight_OI in zip(layers, originals, strict=True):
            layer.weight.data = weight_OI


def linear_layers(model: Any) -> Iterator[nn.Linear]:
    """Those whose weights are packed: all but the unembedding."""
    unembedding = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and layer is not unembedding:
            if layer.in_features % BLOCK:
                raise ValueError(f"{name} has {layer.in_features} inputs, and blocks of weights hold {BLOCK}.")
            yield layer


def perplexity_of(model: Any, texts: Sequence[Tensor]) -> Estimate:
    """Of the next token over texts, each of which is one observation."""
    sums, counts = [], []
    for text_T in texts:
        tokens_BT = text_T[None].to(model.device)
        log_TV = model(tokens_BT[:, :-1]).logits[0].float().log_softmax(-1)
        sums.append(float(log_TV.gather(1, tokens_BT[0, 1:, None]).sum()))
        counts.append(len(text_T) - 1)
    return Estimate.of(sums, counts, range(len(texts)))


def acceptance(
    model: Any, token_heads: TokenHeads | None, prompts: Sequence[Tensor], settings: GreedySettings
) -> tuple[float | None, str | None]:
    """Tokens per pass of the heads alone, and whether they wrote plain generation's text on these weights."""
    if token_heads is None or not prompts:
        return None, None
    methods = [plain(model, settings), tree(model, token_heads, settings, "heads", lookup=0, compile=False)]
    verdict = SameText(model=model, settings=settings, float32=None)
    found = compare(methods, prompts, repeats=1, verdict=verdict)[1]
    return found.tokens_per_pass, found.same_text

"""Checks of superposed decoding's weights, of the settings of `generate`, and of the backbone."""
# 14D one text of four embeddings

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from heads.backbone.model import Backbone
from heads.backbone.rounding import same_numbers
from heads.decoding.superposed.step import PAPER_WEIGHTS, NgramModel


def fit_weights(weights: Sequence[float] | None, ngrams: NgramModel | None) -> tuple[float, ...]:
    """λ for the orders from 2 on: the given ones, or the paper's.

    Raises:
        ValueError: weights without n-grams, something that is no n-gram table, a number of weights that does not fit
            the table, or weights that are negative or sum to 0 or to more than 1.

    >>> fit_weights([0.1, 0.4], None)
    Traceback (most recent call last):
    ValueError: weights=(0.1, 0.4) were given without n-grams, which they weigh; give ngrams, or leave weights out.
    """
    if ngrams is None:
        if weights is not None:
            raise ValueError(
                f"weights={tuple(weights)} were given without n-grams, which they weigh; give ngrams, or leave weights "
                f"out."
            )
        return ()
    if not hasattr(ngrams, "next_token_probabilities"):
        raise ValueError(
            f"ngrams={ngrams!r} was given; give a table that headway count-ngrams made, its folder, or None."
        )
    orders = ngrams.max_order - 1
    chosen = PAPER_WEIGHTS[:orders] if weights is None else tuple(weights)
    if not 1 <= len(chosen) <= orders:
        raise ValueError(
            f"{len(chosen)} weights were given, for n-grams of 2 to {len(chosen) + 1} tokens, but the table counts up "
            f"to {ngrams.max_order}; give 1 to {orders} weights, or count again with --order {len(chosen) + 1}."
        )
    if not all(math.isfinite(w) and w >= 0 for w in chosen) or not 0 < sum(chosen) <= 1 + 1e-9:
        raise ValueError(
            f"weights={chosen} were given; allowed are numbers from 0 on that sum to more than 0, at most 1."
        )
    return chosen


def refuse_other_choices(config: GenerationConfig, streamer: Any) -> None:
    """
    Raises:
        ValueError: settings of `generate` that cannot be followed with k drafts whose order changes.
    """
    given = {
        "do_sample=True": (config.do_sample, "the likeliest drafts are kept; give do_sample=False"),
        f"num_return_sequences={config.num_return_sequences}": (
            (config.num_return_sequences or 1) > 1,
            "every prompt returns k drafts; give k in its place",
        ),
        "a streamer": (streamer is not None, "drafts change places until the end; leave it out"),
        "output_scores or output_logits": (
            config.return_dict_in_generate and (config.output_scores or config.output_logits),
            "a pass scores candidates of all drafts; sequences_scores has the drafts' own",
        ),
    }
    for name, (is_given, reason) in given.items():
        if is_given:
            raise ValueError(f"{name} was given, which superposed decoding does not follow: {reason}.")


def refuse_settings_without_effect(ngrams: Any, token_heads: Any, **given: float | None) -> None:
    """
    Raises:
        ValueError: α or δ without n-grams, or β without heads.

    >>> refuse_settings_without_effect(None, None, alpha=0.1)
    Traceback (most recent call last):
    ValueError: alpha=0.1 was given without ngrams, which it is about; give both, or leave it out.
    """
    about = {"alpha": ("ngrams", ngrams), "penalty": ("ngrams", ngrams), "head_weight": ("token_heads", token_heads)}
    for name, value in given.items():
        needed, needs = about[name]
        if value is not None and needs is None:
            raise ValueError(
                f"{name}={value} was given without {needed}, which it is about; give both, or leave it out."
            )


def refuse_unused_generator(generator: Any, reset_every: int | None) -> None:
    """
    Raises:
        ValueError: a generator without resets, which alone sample.
    """
    if generator is not None and reset_every is None:
        raise ValueError(
            "generator was given without reset_every, and nothing is sampled then; give both, or leave it out."
        )


def refuse_heads_with_kept_caches(token_heads: Any) -> None:
    """
    Raises:
        ValueError: heads were given; their state over the prompt is not kept.
    """
    if token_heads is not None:
        raise ValueError(
            "keep_caches=True was given with token_heads, whose state over the prompt is not kept; leave one of them "
            "out."
        )


def embedding_factor(backbone: Backbone) -> float:
    """The factor on a token's embedding with which the backbone reads it as the token: 1.0, except for models that
    multiply only embeddings which they look up themselves (Falcon-H1).

    The backbone's outputs for embeddings and for the same tokens are compared, and a mean of two embeddings is tried.

    Raises:
        ValueError: the backbone takes no embeddings, or none that are not a token's, or reads them differently.
    """
    name = type(backbone.model).__name__
    backbone.refresh()
    was_training = backbone.model.training
    backbone.model.eval()
    tokens_14 = torch.arange(4, device=backbone.heads_device)[None] % backbone.vocab_size
    first = len(backbone.layers)  # the tap of what the first layer reads
    try:
        with torch.no_grad():
            embeddings_14D = backbone.embed(tokens_14)
            means_14D = embeddings_14D.add(embeddings_14D.flip(1)) / 2
            expected, seen = backbone.forward(tokens_14, taps=[first], use_cache=False)
            read_14D = embeddings_14D.clone()  # CTRL multiplies its input in place
            found, given = backbone.forward(tokens_14, taps=[first], use_cache=False, inputs_embeds=read_14D)
            factor = 1.0
            if not same_numbers(found, expected):
                factor = float((seen[first].double() / given[first].double()).nanmedian())
                found = backbone.forward(tokens_14, use_cache=False, inputs_embeds=embeddings_14D * factor)[0]
            backbone.forward(tokens_14, use_cache=False, inputs_embeds=means_14D * factor)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{name} cannot read embeddings in place of tokens ({error}), which superposed decoding feeds it; use "
            f"another backbone, or sample drafts with plain generate and num_return_sequences."
        ) from error
    finally:
        backbone.model.train(was_training)
    if not same_numbers(found, expected):
        raise ValueError(
            f"{name} reads the embeddings of tokens otherwise than the tokens themselves, so superposed decoding would "
            f"draft from wrong numbers; use another backbone."
        )
    return factor

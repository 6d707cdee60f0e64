"""Requests of `generate` that multi-token decoding cannot follow: an error, or a warning where the text is the same.

Accepted in silence are defaults, and settings of a model's generation_config that have no effect on plain generation
(Gemma's `cache_implementation="hybrid"`).
"""
# B batch, T prompt position, L length so far

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

UNSUPPORTED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance runs the backbone a second time for every token",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance pairs the rows of a batch",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn gets the row's index in the batch",
    "EncoderRepetitionPenaltyLogitsProcessor": "it keeps the prompts of the whole batch",
    "EncoderNoRepeatNGramLogitsProcessor": "it keeps the prompts of the whole batch",
    "WhisperTimeStampLogitsProcessor": "it keeps a state between calls",
}
UNSUPPORTED_SETTINGS = {
    "dola_layers": "DoLa chooses by the logits of several layers; leave it out or decode with plain generate",
    "prompt_lookup_num_tokens": "prompt lookup is TreeDecoding(token_heads, lookup=…) here; give that in its place",
    "assistant_early_exit": "drafts come from the decoding object; leave it out or decode with plain generate",
    "constraints": "they ask for a constrained beam search; leave them out or decode with plain generate",
    "force_words_ids": "they ask for a constrained beam search; leave them out or decode with plain generate",
    "use_mtp": "drafts come from the decoding object; leave it out or decode with plain generate",
}
HARMLESS_CACHES = (None, "dynamic", "hybrid")
"""Values of cache_implementation without effect; generate itself drops "hybrid"."""
KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",  # check_positions
    "token_type_ids",  # check_inputs
    "past_key_values",
    "use_cache",  # changes the speed of plain generation, not its text
    "cache_position",
    "logits_to_keep",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}


def check_supported(
    input_ids_BL: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Check that the request is one that multi-token decoding can follow.

    Raises:
        ValueError: beam search, guidance, another way to decode than greedy or sampling, processors or criteria that
            need the whole batch, embeddings instead of tokens, a cache of the caller's, or outputs that are not
            returned here.
    """
    rows = input_ids_BL.shape[0]
    check_settings(config)
    check_processors(processors)
    check_callers_own([*processors, *criteria], rows)
    if model_kwargs.get("inputs_embeds") is not None or input_ids_BL.shape[1] == 0:
        raise ValueError(
            "Multi-token decoding starts from input_ids of at least one token; "
            "inputs_embeds was given or they are empty."
        )
    check_cache(model_kwargs.get("past_key_values"), config)
    check_outputs(config, rows)
    warn_of_settings(config)


def check_settings(config: GenerationConfig) -> None:
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams} was given; multi-token decoding keeps one hypothesis a row (num_beams=1)."
        )
    for name, reason in UNSUPPORTED_SETTINGS.items():
        if value := getattr(config, name, None):
            raise ValueError(f"{name}={value!r} was given, which multi-token decoding does not follow: {reason}.")
    if config.get_generation_mode() == GenerationMode.CONTRASTIVE_SEARCH:
        raise ValueError(
            f"penalty_alpha={config.penalty_alpha} was given, which asks for contrastive search, and multi-token "
            f"decoding is greedy or samples; leave it out or decode with plain generate."
        )


def check_processors(processors: LogitsProcessorList) -> None:
    for processor in processors:
        for base in type(processor).__mro__:
            if reason := UNSUPPORTED_PROCESSORS.get(base.__name__):
                raise ValueError(
                    f"{type(processor).__name__} cannot be used with multi-token decoding: {reason}; "
                    f"leave it out or decode with plain generate."
                )


def check_callers_own(processors: Iterable[Any], rows: int) -> None:
    """Raise where a caller's own processor or criterion, called for single rows, might need the whole batch."""
    if rows == 1:
        return
    for processor in processors:
        if not type(processor).__module__.startswith("transformers.") and not hasattr(processor, "of_row"):
            raise ValueError(
                f"{type(processor).__name__} was given for {rows} rows, which multi-token decoding processes singly, "
                f"while a class that is not of transformers may tell rows apart; give rows one at a time, or add a "
                f"method `of_row(row)` that returns the object for that row alone (`return self` where rows do not "
                f"depend on each other)."
            )


def check_cache(cache: Any, config: GenerationConfig) -> None:
    """Raise for a cache that holds tokens, or that is not of the kind which `generate` makes by default."""
    if cache is None:
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values already holds tokens; multi-token decoding keeps its own cache, so give the whole text."
        )
    plain = type(cache) is DynamicCache and not cache.offloading
    if not plain and config.cache_implementation is None:
        raise ValueError(
            f"past_key_values was given as a {type(cache).__name__} of your own, but multi-token decoding keeps its "
            f"own cache, which rolls back; leave past_key_values out or decode with plain generate."
        )


def check_outputs(config: GenerationConfig, rows: int) -> None:
    if not config.return_dict_in_generate:
        return
    if config.output_attentions or config.output_hidden_states:
        raise ValueError(
            "output_attentions and output_hidden_states are not returned by multi-token decoding; ask a plain forward."
        )
    if rows > 1 and (config.output_scores or config.output_logits):
        raise ValueError("output_scores and output_logits are returned for one row at a time; give a batch of one.")


def warn_of_settings(config: GenerationConfig) -> None:
    """Warn of settings that have no effect here and never change the text; Python shows each warning once."""
    if config.cache_implementation not in HARMLESS_CACHES:
        warnings.warn(
            f"cache_implementation={config.cache_implementation!r} has no effect: multi-token decoding keeps a cache "
            f"of its own, which rolls back. The text is the same; leave it out, since generate makes that cache too.",
            stacklevel=5,
        )
    if config.prefill_chunk_size is not None:
        warnings.warn(
            f"prefill_chunk_size={config.prefill_chunk_size} has no effect: multi-token decoding reads long prompts in "
            f"chunks of its own. The text is the same; leave it out.",
            stacklevel=5,
        )


def check_inputs(model: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise for inputs that plain generation would hand to the backbone and a tree pass would not."""
    # For a text, generate gives image-text models an empty dict of encoded images; `take_images` has removed others.
    unknown = {name for name, value in model_kwargs.items() if value is not None and value != {}} - KNOWN_INPUTS
    if (image_types := model_kwargs.get("mm_token_type_ids")) is not None and not bool(image_types.any()):
        unknown.discard("mm_token_type_ids")  # all 0: processors of image-text models return them for a text
    types = model_kwargs.get("token_type_ids")
    # GPT-2 and similar models add an embedding for type 0 too; others use types for images, and text has type 0.
    if types is not None and (
        bool(types.any()) or "token_type_ids" in inspect.signature(model.get_decoder().forward).parameters
    ):
        unknown.add("token_type_ids")
    if unknown:
        raise ValueError(
            f"generate was given {', '.join(sorted(unknown))}, which multi-token decoding does not hand to the "
            f"backbone; leave it out or decode with plain generate."
        )


def read_valid(input_ids_BT: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, T): which prompt tokens are not padding, which must be on the left, since a row is continued on the right.

    Raises:
        ValueError: a mask of another shape, or with zeros elsewhere; a row that is all padding.
    """
    if attention_mask is None:
        return torch.ones_like(input_ids_BT, dtype=torch.bool)
    valid_BT = attention_mask.to(input_ids_BT.device).bool()
    if valid_BT.shape == input_ids_BT.shape and not bool((is_read_B := valid_BT.any(dim=1)).all()):
        empty = [row for row, is_read in enumerate(is_read_B.tolist()) if not is_read]
        raise ValueError(
            f"attention_mask hides every token of row {empty[0]} of input_ids, an empty prompt; "
            f"leave such prompts out or begin them with a token."
        )
    if valid_BT.shape != input_ids_BT.shape or not bool(
        (valid_BT.long().diff(dim=1) >= 0).all() & valid_BT[:, -1].all()
    ):
        raise ValueError(
            f"attention_mask of shape {tuple(valid_BT.shape)} must match input_ids {tuple(input_ids_BT.shape)} "
            f"and have its zeros on the left only; tokenize with padding_side='left'."
        )
    return valid_BT


def check_positions(position_ids: Tensor | None, valid_BL: Tensor) -> None:
    """Check that positions are those that `generate` prepares from the mask; those of padding do not matter.

    Raises:
        ValueError: positions that do not count each row's tokens from 0.
    """
    if position_ids is None:
        return
    expected_BL = valid_BL.long().cumsum(dim=1) - 1
    try:
        differs = (position_ids.to(valid_BL.device) != expected_BL) & valid_BL
    except RuntimeError:  # a shape that cannot be compared with the tokens'
        differs = valid_BL
    if bool(differs.any()):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} were given that do not count each row's tokens from 0; "
            f"multi-token decoding knows no other positions: leave position_ids out or decode with plain generate."
        )

"""`heads.generate`: `model.generate` with a decoding method, a streamer and stop strings.

`model.generate` hands a callable neither `streamer` nor `tokenizer`, and raises on `stop_strings`. A decoding method
finds the streamer by itself (heads/decoding/request/entry.py). Here all of them reach the decoding method.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from heads.decoding.request.entry import check_assistant

MIN_TEMPERATURE = 1e-6


class Streaming:
    """A decoding bound to a streamer, with the signature that `generate` expects of a callable."""

    def __init__(self, decoding: Any, streamer: Any) -> None:
        self.decoding = decoding
        self.streamer = streamer

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return self.decoding(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer=self.streamer,
            **model_kwargs,
        )


def generate(
    model: Any,
    decoding: Any,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    **inputs: Any,
) -> Any:
    """`model.generate` with a decoding method of this library and everything that `generate` takes.

    Args:
        model: the backbone.
        decoding: `TreeDecoding(…)` or another decoding object; None for plain `generate`.
        streamer: gets the tokens of each pass in one `put(tokens)`, or `put_drafted(tokens, drafted)` if it has that
            method; `drafted` says for each token whether it was drafted and accepted.
        tokenizer: needed for `stop_strings`.
        stop_strings: text that ends a row, as in `generate`.
        inputs: everything else that `model.generate` takes.

    Raises:
        ValueError: something that is no decoding method, stop strings without a tokenizer, or an assistant_model
            beside a decoding method.
    """
    if decoding is not None and not callable(decoding):
        raise ValueError(
            f"decoding={decoding!r:.80} was given; give heads.TreeDecoding(token_heads), another, or None."
        )
    if decoding is not None:
        check_assistant(inputs.get("assistant_model"), decoding)
    criteria = StoppingCriteriaList(stopping_criteria or [])
    config = copy.deepcopy(generation_config)
    stop_strings = stop_strings or getattr(config, "stop_strings", None) or model.generation_config.stop_strings
    if config is not None:
        config.stop_strings = None
        inputs["generation_config"] = config  # only if given: generate deprecates it together with other settings
    if model.generation_config.stop_strings:
        inputs["stop_strings"] = None  # otherwise generate would take those of the model
    if stop_strings:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} were given without a tokenizer; give tokenizer=… as well.")
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    custom = None if decoding is None else Streaming(decoding, streamer)
    own = own_generate(model)
    return own(**inputs, streamer=streamer, stopping_criteria=criteria, custom_generate=custom)


def own_generate(model: Any) -> Any:
    """`model.generate` as its class defines it.

    from_pretrained replaces it by the function in a folder's custom_generate/generate.py, which may call
    `heads.generate` again.
    """
    in_its_place = vars(model).get("generate")
    if isinstance(in_its_place, functools.partial) and in_its_place.keywords.get("model") is model:
        kind: Any = type(model)
        return functools.partial(kind.generate, model)
    return model.generate


def check_temperature(temperature: float) -> float:
    """`temperature`, if it is large enough to divide scores by; 0 means greedy on the command line.

    >>> check_temperature(0.7), check_temperature(0)
    (0.7, 0)

    Raises:
        ValueError: it is so small that scores would overflow.
    """
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature {temperature:g} was given, by which scores overflow; give {MIN_TEMPERATURE:g} or more, "
            f"or 0 for greedy text."
        )
    return temperature

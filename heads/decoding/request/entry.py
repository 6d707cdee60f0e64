"""The entry that all decoding methods share: it checks what `generate` was called with, then decodes.

A decoding method is a subclass with `check_model`, and `decode`, which runs the passes.
"""
# B row, T prompt position

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from heads.backbone.support import unwrap
from heads.decoding.request.images import take_images
from heads.decoding.request.output import DecodingOutput
from heads.decoding.request.request import Request, Row, choose_best, choose_sampled
from heads.decoding.request.unsupported import check_inputs, check_positions, check_supported, read_valid
from heads.interface.token_heads import TokenHeads

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
MOST_FRAMES = 32
"""How many frames up the call stack the calling `generate` is looked for."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `generate` call that was checked.

    Attributes:
        tokens_BT: the prompts.
        valid_BT: False for padding, which is on the left.
        streamer: gets the tokens as they are emitted; or None.
        images: the inputs of a prompt with images (`take_images`); None: it has no images.
    """

    request: Request
    tokens_BT: Tensor
    valid_BT: Tensor
    streamer: Any
    images: dict[str, Any] | None = None

    def rows(self) -> list[Row]:
        return [
            Row(request=self.request, tokens=tokens, device=self.tokens_BT.device, index=b)
            for b, tokens in enumerate(self.tokens_BT.tolist())
        ]


class Decoding(ABC):
    """A decoding method, with the signature that `generate` expects of `custom_generate`.

    Attributes:
        generator: source of randomness for sampling; None is torch's global one.
        reads_images: prompts may have images.
    """

    generator: torch.Generator | None
    reads_images: ClassVar[bool] = False

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | DecodingOutput:
        frame = inspect.currentframe()
        passed_over = held_by_generate(frame.f_back if frame is not None else None)
        check_assistant(passed_over.get("assistant_model"), self)
        streamer = passed_over.get("streamer") if streamer is None else streamer
        self.check_config(generation_config, streamer)
        if generation_config.do_sample:
            check_generator_device(self.generator, input_ids.device)
        self.check_model(model)
        request = read_request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.generator
        )
        valid_BT = read_valid(input_ids, model_kwargs.get("attention_mask"))
        images = take_images(model_kwargs, valid_BT) if self.reads_images else None
        others = {name: value for name, value in model_kwargs.items() if name not in (images or ())}
        check_inputs(model, others)
        check_positions(others.get("position_ids"), valid_BT)
        call = Call(request=request, tokens_BT=input_ids, valid_BT=valid_BT, streamer=streamer, images=images)
        return self.decode(model, call)

    def check_config(self, config: GenerationConfig, streamer: Any) -> None:  # noqa: B027  most methods follow all of it
        """Raise ValueError for settings of `generate`, or a streamer, that this method cannot follow."""

    @abstractmethod
    def check_model(self, model: Any) -> None:
        """Raise ValueError where the method cannot decode with this model."""

    @abstractmethod
    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        """The prompts with what follows them, padded on the right, as `generate` returns them."""


def held_by_generate(caller: FrameType | None) -> dict[str, Any]:
    """The streamer and the assistant model of the nearest `generate` among the callers, read from its frame.

    `generate` does not hand them to a callable: a TextIteratorStreamer would wait for ever, and an assistant would be
    ignored. Functions around the decoding method may lie between. The result is empty without a `generate`.
    """
    for _ in range(MOST_FRAMES):
        if caller is None:
            break
        if caller.f_code is GENERATE:
            return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model")}
        caller = caller.f_back
    return {}


def check_assistant(assistant_model: Any, decoding: Any) -> None:
    """
    Raises:
        ValueError: an assistant model beside a decoding method.
    """
    if assistant_model is not None:
        raise ValueError(
            f"assistant_model was given beside {type(decoding).__name__}, which drafts itself; give "
            f"heads.DraftModelDecoding(assistant_model) in its place, or leave one of them out."
        )


def check_token_heads(token_heads: Any) -> None:
    """
    Raises:
        ValueError: a model, a folder or anything else in place of heads.
    """
    if not isinstance(token_heads, TokenHeads):
        given = repr(token_heads) if isinstance(token_heads, str | Path) else f"a {type(token_heads).__name__}"
        raise ValueError(
            f"{given} was given in place of token heads; give what heads.load(folder, model) or "
            f"heads.create(family, model, num_heads=…) returns."
        )


def check_flag(value: Any, name: str, *, or_none: bool = False) -> Any:
    """`value`, if it is a bool, or None where that is allowed. Anything else might count as true, even "false".

    Raises:
        ValueError: anything else was given.

    >>> check_flag(True, "keep_caches")
    True
    """
    if isinstance(value, bool) or (value is None and or_none):
        return value
    allowed = "True, False and None" if or_none else "True and False"
    raise ValueError(f"{name}={value!r} was given; allowed are {allowed}.")


def check_generator(generator: Any) -> torch.Generator | None:
    """
    Raises:
        ValueError: a seed or anything else in place of a generator.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator={generator!r} was given; give None, or a torch.Generator such as "
            f"torch.Generator(device).manual_seed(0)."
        )
    return generator


def check_generator_device(generator: torch.Generator | None, *devices: torch.device) -> None:
    """
    Args:
        devices: those that a call samples on.

    Raises:
        ValueError: the generator is on another kind of device, or they are of two kinds.

    >>> check_generator_device(torch.Generator("cpu"), torch.device("cuda"))
    Traceback (most recent call last):
    ValueError: A generator on cpu was given, but this call samples on cuda; give a torch.Generator("cuda").
    """
    kinds = sorted({device.type for device in devices})
    if generator is None or kinds == [generator.device.type]:
        return
    advice = f'give a torch.Generator("{kinds[0]}")' if len(kinds) == 1 else "leave it out and call torch.manual_seed"
    raise ValueError(
        f"A generator on {generator.device.type} was given, but this call samples on {' and '.join(kinds)}; {advice}."
    )


def check_heads(token_heads: TokenHeads, model: Any) -> None:
    """Check that heads decode with the model that they were loaded on, in its dtype unless autocast casts for them.

    Raises:
        ValueError: another model, one without weights, one that has since been changed in a way that heads cannot
            follow, or heads whose parameters have another dtype than the model.
    """
    backbone = token_heads.backbone
    if unwrap(model) is not backbone.model:
        raise ValueError("generate was called on another model than the heads' backbone; load the heads on this model.")
    token_heads.refresh()
    dtypes = {p.dtype for p in token_heads.parameters() if p.is_floating_point()}  # packed layers hold integer codes
    others = sorted(str(dtype) for dtype in dtypes - {backbone.dtype})
    if others and not torch.is_autocast_enabled(backbone.device.type):
        raise ValueError(
            f"The heads are in {' and '.join(others)}, but the backbone is in {backbone.dtype}; "
            f"decode with token_heads.in_dtype(backbone.dtype), or load the heads without a dtype."
        )


def read_request(
    input_ids_BL: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generator: torch.Generator | None,
) -> Request:
    """Check the arguments that `generate` gives to a decoding callable, and collect them in a request.

    Raises:
        ValueError: as `check_supported` raises it; or stopping criteria for several rows without an eos token.
    """
    check_supported(input_ids_BL, logits_processor, stopping_criteria, config, model_kwargs)
    eos = [c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)]
    lengths = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
    others = [c for c in stopping_criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    if others and not eos and input_ids_BL.shape[0] > 1:
        raise ValueError(
            f"{type(others[0]).__name__} was given for {input_ids_BL.shape[0]} rows without an eos token, where "
            f"generate continues rows that have ended until all have; set eos_token_id or give single rows."
        )
    pad = getattr(config, "_pad_token_tensor", None)
    return Request(
        processors=LogitsProcessorList(logits_processor),
        choose=choose_sampled(generator) if config.do_sample else choose_best,
        greedy=not config.do_sample,
        max_length=min(lengths),
        eos_tokens=frozenset(token for tensor in eos for token in tensor.tolist()),
        criteria=StoppingCriteriaList(others),
        pad_token=0 if pad is None else int(pad),
        keep_scores=bool(config.output_scores and config.return_dict_in_generate),
        keep_logits=bool(config.output_logits and config.return_dict_in_generate),
        as_dict=bool(config.return_dict_in_generate),
        keep_cache=bool(config.return_dict_in_generate and config.use_cache),
        generator=generator,
        penalised_from=read_penalised_from(logits_processor),
    )


def read_penalised_from(processors: LogitsProcessorList) -> int:
    """The largest `prompt_ignore_length` of the processors: a number, or a tensor with one for each row.

    >>> from transformers import RepetitionPenaltyLogitsProcessor as Penalty
    >>> read_penalised_from([Penalty(1.2), Penalty(1.2, prompt_ignore_length=torch.tensor([3, 5]))])
    5
    """
    ignored = [getattr(processor, "prompt_ignore_length", None) for processor in processors]
    return max((int(n.max()) if isinstance(n, Tensor) else n for n in ignored if n is not None), default=0)

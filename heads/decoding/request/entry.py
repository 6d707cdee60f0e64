"""The one entry of every decoding method: it checks what `generate` was called with, and decodes.

A method is a subclass with two verbs: `check_model`, and `decode`, which runs the passes.
"""
# B row, T prompt position

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.backbone.support import unwrap
from heads.decoding.request.images import take_images
from heads.decoding.request.output import DecodingOutput
from heads.decoding.request.request import Request, Row, read_request
from heads.decoding.request.unsupported import check_inputs, check_positions, read_valid
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class Call:
    """One `generate` call that was checked.

    Attributes:
        tokens_BT: the prompts.
        valid_BT: False for padding, which is on the left.
        streamer: gets the tokens as they are emitted; None: nothing does.
        images: what `generate` made of the prompt's images; None: it has none.
    """

    request: Request
    tokens_BT: Tensor
    valid_BT: Tensor
    streamer: Any
    images: dict[str, Any] | None = None

    def rows(self) -> list[Row]:
        """The texts, which hold their prompts so far."""
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

    @abstractmethod
    def check_model(self, model: Any) -> None:
        """Raise ValueError where the method cannot decode with this model."""

    @abstractmethod
    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        """The prompts with what follows them, padded on the right, as `generate` returns them."""


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
    """`value`, if it is true or false, or None where that is allowed: a text such as "false" would count as true.

    Raises:
        ValueError: anything else.

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


def check_heads(token_heads: TokenHeads, model: Any) -> None:
    """Heads decode with the model that they were loaded on, and in its dtype unless autocast casts for them.

    Raises:
        ValueError: another model, one without weights, one that was changed since in a way that heads cannot follow, or
            parameters of another dtype than its hidden states.
    """
    backbone = token_heads.backbone
    if unwrap(model) is not backbone.model:
        raise ValueError("generate was called on another model than the heads' backbone; load the heads on this model.")
    token_heads.refresh()
    others = sorted({str(p.dtype) for p in token_heads.parameters() if p.dtype != backbone.dtype})
    if others and not torch.is_autocast_enabled(backbone.device.type):
        raise ValueError(
            f"The heads are in {' and '.join(others)}, but the backbone is in {backbone.dtype}; "
            f"decode with token_heads.in_dtype(backbone.dtype), or load the heads without a dtype."
        )

"""What custom_generate/generate.py of an exported folder calls: `generate`, decoded with the heads in that folder.

`from_pretrained(folder, trust_remote_code=True)` puts that file's function in place of `model.generate`, so
`transformers serve` decodes with it too. Every argument of `generate` is followed or refused. The streamer gets each
token, and an error that it raises, as when a client is gone, ends the decoding; stop strings, processors and criteria
work as in heads/decoding. A server answers a refused request with status 400 and the reason.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.utils import logging

from heads.checkpoint.remote import find_heads
from heads.checkpoint.save_load import load
from heads.decoding.generate import generate
from heads.decoding.request.entry import Call
from heads.decoding.request.output import DecodingOutput
from heads.decoding.tree_decoding import TreeDecoding

logger = logging.get_logger("transformers.headway")  # below transformers' own, so that `--log-level info` shows it

KEPT_AS = "_headway_decoding"
"""The model's attribute for its decoding, and the dtype and device for which that was made."""
REFUSED = {
    "assistant_model": "drafts come from the heads in this folder",
    "assistant_tokenizer": "drafts come from the heads in this folder",
    "synced_gpus": "ranks would run different numbers of passes",
    "negative_prompt_ids": "guidance runs the backbone a second time for every token",
    "negative_prompt_attention_mask": "guidance runs the backbone a second time for every token",
}
"""Arguments that `generate` would drop without a warning, since a custom decoding method does not take them."""


class CountedDecoding(TreeDecoding):
    """Tree decoding that logs, for each call, how many passes its tokens took."""

    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        """The tokens, or an output with `stats` if `return_dict_in_generate` is set."""
        request = replace(call.request, as_dict=True)
        output = super().decode(model, replace(call, request=request))
        assert isinstance(output, DecodingOutput)
        stats = output.stats
        logger.info(
            f"{stats.tokens} tokens in {stats.row_passes} passes, {stats.tokens_per_pass:.2f} tokens per pass, with "
            f"{self.token_heads.family} heads"
        )
        return output if call.request.as_dict else output.sequences


def generate_with_heads(model: Any, *positional: Any, **named: Any) -> Any:
    """`model.generate(…)`, decoded with the heads in the folder or repository that the model was loaded from.

    Args:
        positional, named: what `generate` takes. With a `custom_generate` of the caller's, the folder's heads are not
            used.

    Raises:
        ValueError: an argument that decoding with heads does not follow, or heads that do not fit the model.
    """
    asked = read_arguments(positional, named)
    custom = asked.pop("custom_generate", None)
    if isinstance(custom, str):
        return type(model).generate(model, custom_generate=custom, **asked)
    decoding = decoding_of(model) if custom is None else custom
    try:
        if custom is None:
            refuse(asked)
        return generate(model, decoding, **asked)
    except ValueError as error:
        raise to_answer(error) from error


def read_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, without those that are None.

    >>> read_arguments(([[1, 2]],), {"max_new_tokens": 4, "streamer": None})
    {'inputs': [[1, 2]], 'max_new_tokens': 4}
    """
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    given = dict(zip(names, positional, strict=False)) | named
    return {name: value for name, value in given.items() if value is not None}


def refuse(asked: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: an argument of REFUSED, or a cache with which `generate` ignores the decoding method.
    """
    for name in REFUSED:
        if asked.get(name, False) is not False:  # some are tensors
            raise ValueError(
                f"{name} was given, which decoding with heads does not follow: {REFUSED[name]}; leave it out, or "
                f"decode plainly with type(model).generate(model, …)."
            )
    config = asked.get("generation_config")
    if "paged" in (asked.get("cache_implementation"), getattr(config, "cache_implementation", None)):
        raise ValueError(
            "cache_implementation='paged' was given, with which generate batches continuously and leaves heads aside; "
            "leave it out, or decode plainly with type(model).generate(model, …)."
        )


def decoding_of(model: Any) -> CountedDecoding:
    """The decoding with the folder's heads, loaded at the model's first call, and again once it was moved or cast."""
    place = (model.dtype, model.device)
    kept = vars(model).get(KEPT_AS)
    if kept is None or kept[0] != place:
        source = str(model.name_or_path)
        commit = getattr(model.config, "_commit_hash", None)
        with torch.random.fork_rng(devices=[]):  # new modules draw their weights, and the call's seed is the user's
            token_heads = load(find_heads(source, commit=commit), model)
        kept = vars(model)[KEPT_AS] = (place, CountedDecoding(token_heads))
    found: CountedDecoding = kept[1]
    return found


def to_answer(error: ValueError) -> ValueError:
    """The error in the form that `transformers serve` answers with status 400 and the reason, and not with 500."""
    if "transformers.cli.serving.server" not in sys.modules:
        return error
    (base,) = (sys.modules["starlette.exceptions"].HTTPException,)
    answered: ValueError = type("RefusedRequest", (base, ValueError), {})(status_code=400, detail=str(error))
    return answered

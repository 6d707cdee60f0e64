"""Methods that decode a group of prompts: plain `generate`, trees, and what they are compared with.

These are plain `generate` compiled with a static cache, heads alone compiled, and transformers' `assistant_model`,
which decodes one text at a time. Its draft model is the demo's, not widened: beside a large backbone it costs far less
than a real model's draft model does, so this row flatters it.
"""
# B row of a group, T prompt position, L text position

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.real_costs.widened import Widened
from heads.backbone.compiling.graph import what_stops_compiling
from heads.checkpoint.opening import open_draft_model
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import (
    Method,
    Outcome,
    Promise,
    SampledSettings,
    Settings,
    assistant_model,
    compiled_static_cache,
)

DRAFT = "checkpoints/demo/draft"
COMPILED = ", compiled"


def make_method(name: str, model: Any, settings: Settings, decoding: TreeDecoding | None, **more: Any) -> Method:
    """A method that gives all prompts (B, T) of a group equally many new tokens; `more` is passed to `generate`.

    In float32 sampled text is plain generation's for the same seed. In half precision a pass over several tokens rounds
    logits differently, so a random number can fall on another token; there only the distribution is promised.
    """
    half = isinstance(settings, SampledSettings) and model.dtype != torch.float32
    promises: Promise = "same distribution" if half else "same text"

    def run(prompts_BT: Tensor) -> Outcome:
        if decoding is None:
            tokens = new_rows(settings.generate(model, prompts_BT, **more), prompts_BT)
            return Outcome(tokens=tokens, passes=len(tokens))
        output = settings.generate(model, prompts_BT, custom_generate=decoding, return_dict_in_generate=True)
        return Outcome(tokens=new_rows(output.sequences, prompts_BT), passes=output.stats.row_passes)

    return Method(name=name, run=run, promises=promises)


def new_rows(sequences_BL: Tensor, prompts_BT: Tensor) -> list[int]:
    """The new tokens of all rows, one row after the other."""
    tokens: list[int] = sequences_BL[:, prompts_BT.shape[1] :].flatten().tolist()
    return tokens


def compiled_methods(widened: Widened, settings: Settings, family: str) -> tuple[list[Method], dict[str, Any]]:
    """Plain `generate` and heads alone, both compiled, and the tree of the latter."""
    decoding = TreeDecoding(widened.token_heads[family], lookup=0, compile=True)
    names = f"plain{COMPILED}", f"{family} alone{COMPILED}"
    methods = [
        make_method(names[0], widened.model, settings, None, **compiled_static_cache()),
        make_method(names[1], widened.model, settings, decoding),
    ]
    return methods, {names[1]: decoding}


def why_not_compiled(widened: Widened) -> str:
    """Why nothing can be compiled here; empty if it can."""
    return what_stops_compiling(next(iter(widened.token_heads.values())).backbone)


def assisted_method(widened: Widened, settings: Settings) -> Method:
    """transformers' own assisted generation with its default settings, for groups of one row."""
    draft = open_draft_model(DRAFT).to(widened.model.dtype)
    draft.generation_config.eos_token_id = None  # no method ends a text
    return assistant_model(widened.model, draft, settings)

"""Architectures whose layers or names differ from most: every family decodes `generate`'s text, or says why not.

That the passes of these models are right is tested node by node in tests/heads/backbone/test_backbone.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import covering
from throwaway_families import make_heads
from tiny import FLOAT32_ONLY, PAD, random_tokens, shared_model

import heads
from heads.backbone.model import Backbone
from heads.decoding.request.unsupported import check_inputs

PROMPT = random_tokens(1, 6, seed=1, vocab=26)  # without the tokens of images
ASKED: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
EAGER = ("xglm", "ctrl", "gemma4", "gemma4_with_images")
NAMES = ["falcon", "deepseek_v2", "biogpt", "xglm", "ctrl", "gemma4", "gemma3_with_images", "gemma4_with_images"]


@covering(
    name=NAMES,
    family=["medusa", "grounded, prefix", "dynamo", "eagle"],
    always=lambda name, family: name == "ctrl" or name.startswith("gemma4"),  # which some families refuse
)
def test_every_family_decodes_generates_text_or_says_why_not(name, family):
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    model = shared_model(name, "eager" if name in EAGER else "sdpa", dtype)
    said = None
    if name.startswith("gemma4") and family not in ("medusa", "eagle"):
        said = "A Gemma4TextDecoderLayer needs more than a hidden state, positions and a mask"
    elif (name, family) == ("ctrl", "grounded, prefix"):
        said = "does not become the identity"
    if said is not None:
        with pytest.raises(ValueError, match=said):
            make_heads(family, Backbone(model), num_heads=2)
        return
    decoding = heads.TreeDecoding(make_heads(family, Backbone(model), num_heads=2), [[0], [1], [0, 0], [1, 1]])
    plain = model.generate(PROMPT, **ASKED)
    assert torch.equal(model.generate(PROMPT, custom_generate=decoding, **ASKED), plain)


def test_an_image_beside_the_text_is_refused():
    model = shared_model("gemma3_with_images", "sdpa")
    check_inputs(model, {"mm_encoder_outputs": {}})  # of a text alone
    for images in ({"pixel_values": torch.zeros(1, 3, 28, 28)}, {"mm_encoder_outputs": {"image": PROMPT}}):
        with pytest.raises(
            ValueError, match=f"generate was given {next(iter(images))}, which multi-token decoding does"
        ):
            check_inputs(model, images)

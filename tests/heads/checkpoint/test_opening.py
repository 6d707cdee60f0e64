"""Heads are opened with the backbone as they were trained on it, except for code, which is not run on a file's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from tiny import tiny_model

from heads.checkpoint import opening, save_load
from heads.checkpoint.opening import open_backbone, open_heads, recorded_backbone, why_not_packed
from heads.families import create
from heads.products.packed import is_packed


def save_heads(folder: Path, backbone: Any) -> Path:
    """A backbone in `base` without a tokenizer, a tokenizer in `words`, and heads whose recipe records `backbone`."""
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.config.name_or_path = "elsewhere/base"
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "words")
    recipe = {"config": {"backbone": backbone}}
    save_load.save(create("medusa", model, num_heads=1), folder / "heads", recipe=recipe)
    return folder / "heads"


def test_tokenizer_and_attention_are_those_of_training(tmp_path: Path) -> None:
    folder = save_heads(tmp_path, {"tokenizer": "elsewhere/words", "attn_implementation": "eager"})
    opened = open_heads([folder])
    assert opened.source == str(tmp_path / "base")
    assert opened.tokenizer("a")["input_ids"] == byte_tokenizer()("a")["input_ids"]
    assert opened.model.config._attn_implementation == "eager"


def test_everything_recorded_is_taken_but_trust(tmp_path: Path) -> None:
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    recorded = {"revision": "v2", "quantization": quantization, "trust_remote_code": True, "random_weights": True}
    config = recorded_backbone(save_heads(tmp_path, recorded), "float32")
    assert (config.revision, config.quantization, config.dtype) == ("v2", quantization, "float32")
    assert not config.trust_remote_code
    assert not config.random_weights


def test_a_named_backbone_is_loaded_as_it_is(tmp_path: Path) -> None:
    folder = save_heads(tmp_path, {"attn_implementation": "eager", "tokenizer": "elsewhere/words"})
    byte_tokenizer().save_pretrained(tmp_path / "base")
    assert open_heads([folder], str(tmp_path / "base")).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("recorded", [None, "base", {}])
def test_a_recipe_without_a_backbone_is_no_hindrance(tmp_path: Path, recorded: Any) -> None:
    assert recorded_backbone(save_heads(tmp_path, recorded), "auto").tokenizer is None


def test_a_recorded_field_of_another_type_is_named(tmp_path: Path) -> None:
    folder = save_heads(tmp_path, {"quantization": "4bit"})
    with pytest.raises(
        ValueError,
        match=r"heads\.json, recipe\.config\.backbone\.quantization='4bit' was given",
    ):
        open_heads([folder])


@pytest.mark.parametrize("trusted", [True, False])
def test_code_that_was_trusted_in_training_is_explained_where_loading_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    folder = save_heads(tmp_path, {"trust_remote_code": trusted})

    def fails(*_: Any) -> None:
        raise ValueError("It needs code.")

    monkeypatch.setattr(opening, "load_backbone", fails)
    with pytest.raises(ValueError, match=r"^It needs code\.") as caught:
        open_heads([folder])
    assert ("if you trust that code" in str(caught.value)) == trusted


def test_backbone_and_heads_are_packed_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = save_heads(tmp_path, {"tokenizer": "elsewhere/words"})
    for pack in (False, True):
        opened = open_heads([folder], pack=pack)
        assert [is_packed(one) for one in (opened.model, *opened.token_heads.values())] == [pack, pack]


def test_a_backbone_without_plain_linear_layers_is_no_packed_one(tmp_path: Path) -> None:
    tiny_model("gpt2", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no linear layer with plain weights, so there is nothing to pack"):
        open_backbone(str(tmp_path), pack=True)


def test_whether_weights_can_be_packed_is_known_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "default_device", lambda: "cpu")
    assert (why_not_packed("auto"), why_not_packed("float64")[:18]) == ("", "weights in float64")
    monkeypatch.setattr(opening, "default_device", lambda: "meta")
    assert why_not_packed("auto") == "weights on meta, and packing is for CPUs; leave them unpacked"

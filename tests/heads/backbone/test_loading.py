"""How a backbone and its tokenizer are asked for, and what is refused, on a tiny model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from tiny import tiny_model

from heads.backbone import loading
from heads.backbone.loading import BackboneConfig, load_backbone, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", attn="sdpa", vocab_size=NUM_TOKENS).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("tokenizer", "revision"), [(None, "v2"), ("org/base", "v2"), ("org/other", None)])
def test_a_revision_is_of_one_name(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str | None, revision: str | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        loading.AutoTokenizer, "from_pretrained", lambda name, **kwargs: asked.append((name, kwargs["revision"]))
    )
    load_tokenizer(BackboneConfig(name_or_path="org/base", revision="v2", tokenizer=tokenizer))
    assert asked == [(tokenizer or "org/base", revision)]


def test_random_weights_are_not_quantized(folder: Path) -> None:
    config = BackboneConfig(name_or_path=str(folder), random_weights=True, quantization={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match="random_weights and quantization were both given"):
        load_backbone(config)


def test_random_weights_may_run_the_code_that_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    model = load_backbone(BackboneConfig(name_or_path=str(folder)))
    monkeypatch.setattr(
        loading.AutoModelForCausalLM, "from_config", lambda config, **kwargs: [model, asked.append(kwargs)][0]
    )
    load_backbone(
        BackboneConfig(
            name_or_path=str(folder), random_weights=True, trust_remote_code=True, attn_implementation="eager"
        )
    )
    assert asked[0]["trust_remote_code"] is True
    assert asked[0]["attn_implementation"] == "eager"
    assert "revision" not in asked[0]


def test_truncated_weights_are_one_sentence(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="could not be loaded as a causal LM"):
        load_backbone(BackboneConfig(name_or_path=str(folder)))

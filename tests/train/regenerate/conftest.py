"""A folder with a tiny backbone, texts and conversations; and that backbone in float64."""

import json

import pytest
from regenerated_runs import CHATS, ENDS
from tiny_run import prepare
from transformers import GenerationConfig

from heads.backbone.loading import BackboneConfig, load_backbone, load_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    GenerationConfig(eos_token_id=list(ENDS)).save_pretrained(tmp_path / "base")
    turns = [
        [{"from": who, "value": text} for q in chat for who, text in (("human", q), ("gpt", "old"))] for chat in CHATS
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in turns))
    return tmp_path


@pytest.fixture
def backbone(folder):
    config = BackboneConfig(name_or_path=str(folder / "base"), dtype="float64")
    return load_backbone(config, "cpu"), load_tokenizer(config)

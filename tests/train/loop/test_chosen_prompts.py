"""Prompts that are decoded at evaluations: of chats they end where a reply begins, of plain text they are the start."""

import json
from types import SimpleNamespace

import datasets
import pytest
from repository import DEMO
from transformers import AutoTokenizer

from heads.data.documents import DataConfig, SourceConfig
from train.config import EvaluationConfig
from train.data.packing import build_datasets
from train.loop.evaluation import measure_decoding

TURNS = [("human", "What is this?"), ("gpt", "It is a reply."), ("human", "And more?"), ("gpt", "Another reply.")]
CHATS = [{"conversations": [{"from": who, "value": words} for who, words in TURNS]}] * 12


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "base")


@pytest.fixture
def prompts(tokenizer, tmp_path, monkeypatch):
    """The prompts that are decoded of the rows' blocks."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    accelerator = SimpleNamespace(process_index=0, num_processes=1, device="cpu", reduce=lambda counts, **_: counts)
    decoded = []

    def count(token_heads, found, config):
        decoded.extend(found)
        return 1, 1

    monkeypatch.setattr("train.loop.evaluation.count_decoding", count)

    def decode(rows, length, **config):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))], **config)
        blocks = build_datasets(data, tokenizer, num_heads=2, vocab_size=2048).train
        measure_decoding(None, blocks, EvaluationConfig(num_prompts=2, prompt_tokens=length), accelerator)
        assert len(decoded) == 2
        return decoded

    return decode


@pytest.mark.parametrize("packing", ["whole", "cut"])
def test_a_chats_prompt_ends_where_a_reply_begins(prompts, tokenizer, packing):
    """The first reply of the block that has its question there; nothing of another conversation is before it."""
    texts = [
        tokenizer.decode(ids) for ids in prompts(CHATS, 96, packing=packing, block_size=128, chat_template="vicuna")
    ]
    for text in texts:
        assert text.rstrip().endswith("ASSISTANT:"), text
        assert text.count("What is this?") <= 1
    assert "What is this?" in texts[0]
    assert "reply" not in texts[0]


def test_a_chats_prompt_is_its_last_tokens(prompts, tokenizer):
    for ids in prompts(CHATS, 4, packing="whole", block_size=128, chat_template="vicuna"):
        assert len(ids) == 4
        assert "ASSISTANT:".endswith(tokenizer.decode(ids).strip()[-4:])


def test_plain_texts_prompts_are_the_starts_of_blocks(prompts):
    rows = [{"input_ids": [5 + n] * 8} for n in range(8)]
    for ids in prompts(rows, 12, block_size=16):
        first, second = ids[:8].unique().tolist(), ids[8:].unique().tolist()
        assert (len(ids), len(first), len(second)) == (12, 1, 1)
        assert first != second

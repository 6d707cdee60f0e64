"""Heads are measured on what their run held out: the very documents that training set aside, by its record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from tiny import tiny_model

import heads
from heads.backbone.model import Backbone
from heads.checkpoint import held_out
from heads.checkpoint.held_out import find_held_out
from heads.data.documents import DataConfig, SourceConfig
from heads.data.rows import RowTokenizer
from heads.data.streams import is_held_out
from train.data import packing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("train", "eval"):
        texts = [f"{name} {'abc ' * n}" for n in range(1, 31)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def save(folder: Path, data: dict[str, Any] | None) -> Path:
    token_heads = heads.create("medusa", Backbone(tiny_model("llama", vocab_size=NUM_TOKENS)), num_heads=2)
    heads.save(token_heads, folder / "heads", recipe=None if data is None else {"config": {"data": data}})
    return folder / "heads"


def test_a_held_out_share_is_the_documents_that_training_set_aside(folder, monkeypatch):
    config = DataConfig(train=[SourceConfig(path=str(folder / "train.jsonl"))], eval_fraction=0.2, seed=3)
    found, _ = find_held_out(save(folder, asdict(config)), byte_tokenizer())
    assert found is not None
    assert found.described == f"6 documents of the 20.0% held out of {folder / 'train.jsonl'}"
    packed: list[Any] = []
    monkeypatch.setattr(packing, "pack_cached", lambda rows, *_: packed.append(list(rows["input_ids"])) or (None, None))
    train, evaluated = packing.read_sources(config, byte_tokenizer(), num_heads=2)
    packing.pack_stored(train, evaluated, config)
    assert sorted(found.documents) == sorted(packed[1])
    assert not {*map(tuple, found.documents)} & {*map(tuple, packed[0])}


def test_a_held_out_part_of_a_stream_is_the_rows_that_training_evaluated_on(folder, monkeypatch):
    paths = [folder / "train.jsonl", folder / "eval.jsonl"]
    sources = [SourceConfig(path=str(path), fraction=0.9) for path in paths]
    config = DataConfig(
        train=sources, eval_fraction=0.3, seed=3, streaming=True, block_size=16, max_eval_blocks=9, max_bad_fraction=0
    )
    found, _ = find_held_out(save(folder, asdict(config)), byte_tokenizer())
    assert found is not None
    assert found.described.endswith(f"of the 30.0% held out of {paths[0]}, {paths[1]}")
    packed = packing.build_datasets(config, byte_tokenizer(), num_heads=2, vocab_size=NUM_TOKENS)
    held_out = [token for block in packed.eval["input_ids"] for token in block]
    assert [token for document in found.documents for token in document][: len(held_out)] == held_out
    assert len(held_out) == 9 * 16


def test_rows_of_a_stream_that_were_trained_on_are_not_tokenised(folder, monkeypatch):
    read = []

    def counted(self, batch):
        read.extend(batch["row_number"])
        return tokenize(self, batch)

    tokenize = RowTokenizer.__call__
    monkeypatch.setattr(RowTokenizer, "__call__", counted)
    sources = [SourceConfig(path=str(folder / "train.jsonl"))]
    config = DataConfig(train=sources, eval_fraction=0.3, seed=3, streaming=True)
    found, _ = find_held_out(save(folder, asdict(config)), byte_tokenizer())
    assert found is not None
    assert len(read) >= len(found.documents) > 0
    assert all(is_held_out(number, share=0.3, seed=3) for number in read)


def test_eval_sources_are_read_whole_and_prompts_are_their_beginnings(folder):
    sources = {"train": [SourceConfig(path="gone.jsonl")], "eval": [SourceConfig(path=str(folder / "eval.jsonl"))]}
    found, _ = find_held_out(save(folder, asdict(DataConfig(**sources))), byte_tokenizer())
    assert found is not None
    assert len(found.documents) == 30
    text = byte_tokenizer().decode(found.prompts(3, num_tokens=12)[1][0].tolist())
    assert text.startswith("eval abc abc")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "the heads do not record what their run held out"),
        ({"train": [{"path": "x.jsonl"}], "eval": []}, "the run held nothing out"),
        ([1], "the heads do not record what their run held out"),
        ({"train": 3, "eval_fraction": 0.1}, "what the run held out cannot be read here (train=3 was given"),
        ({"train": [], "eval": [{"path": "python-stdlib"}]}, "files of the standard library"),
        ({"train": [], "eval": [{"path": "/gone/x.jsonl"}]}, "not on this machine (/gone/x.jsonl)"),
        ({"train": [{"path": "owner/on-the-hub"}], "eval_fraction": 0.1}, "not on this machine (owner/on-the-hub)"),
        ({"train": [], "eval": [{"path": __file__, "no_field": 1}]}, "what the run held out cannot be read here"),
    ],
    ids=str,
)
def test_where_nothing_can_be_read_it_is_said_why(folder, data, why):
    found, said = find_held_out(save(folder, data), byte_tokenizer())
    assert found is None
    assert why in said


def test_a_runs_folder_names_where_its_heads_are(folder):
    saved = save(folder, None)
    (folder / "run").mkdir()
    saved.rename(folder / "run" / "last")
    with pytest.raises(ValueError, match=r"run holds no heads.json; give .*run/last, where its run saved heads\."):
        heads.load(folder / "run", tiny_model("llama", vocab_size=NUM_TOKENS))
    assert held_out.find_held_out(folder / "run" / "last", byte_tokenizer())[0] is None

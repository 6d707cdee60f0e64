"""`data.packing: whole`: a document lies in one block where it fits in one, and nothing is lost."""

import io
from collections import Counter

import datasets
import numpy as np
import pytest
from repository import DEMO
from rich.console import Console
from transformers import AutoTokenizer

from heads.data.documents import DataConfig, SourceConfig
from train.data import whole_documents
from train.data.blocks import fill, pack
from train.data.inspect import show_data
from train.data.packing import build_datasets
from train.data.whole_documents import fill_whole, pack_whole, place

LENGTHS = [int(x) for x in np.random.default_rng(0).integers(1, 40, 300)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def documents(lengths):
    """Document n consists of the token n + 1; its first token is no target."""
    return [(np.full(length, n + 1, np.int32), np.arange(length) > 0) for n, length in enumerate(lengths)]


@pytest.mark.parametrize("window", [7, 4096])
def test_every_token_is_in_one_block_and_only_long_documents_are_cut(monkeypatch, window):
    monkeypatch.setattr(whole_documents, "WINDOW", window)
    blocks = list(pack_whole(documents(LENGTHS), 16))
    held, tokens = Counter(), Counter()
    for block in blocks:
        assert {len(column) for column in block.values()} == {16}
        assert block["document_ids"].tolist() == sorted(block["document_ids"].tolist())
        for number in set(block["document_ids"]):
            ids_T = block["input_ids"][block["document_ids"] == number]
            assert len(set(ids_T)) == 1  # one document, or padding
            held[int(ids_T[0])] += 1
        tokens.update(block["input_ids"].tolist())
        assert not block["loss_mask"][block["input_ids"] == 0].any()
    assert {n: tokens[n] for n in tokens if n} == dict(enumerate(LENGTHS, start=1))
    assert all(held[n] == -(-length // 16) for n, length in enumerate(LENGTHS, start=1))
    filling = fill_whole(LENGTHS, 16)
    assert (filling.blocks, filling.padding) == (len(blocks), tokens[0])
    assert filling.cut == sum(length > 16 for length in LENGTHS)


def test_cut_documents_are_counted_as_they_are_packed():
    blocks = list(pack(documents(LENGTHS), 16))
    held = Counter(int(token) for block in blocks for token in set(block["input_ids"]))
    filling = fill(LENGTHS, 16)
    assert (filling.blocks, filling.dropped, filling.padding) == (len(blocks), sum(LENGTHS) % 16, 0)
    assert 0 <= filling.cut - sum(count > 1 for count in held.values()) <= 1  # the last may lie in the dropped tail


def test_best_fit_wastes_little():
    """Below the bound of best-fit decreasing, 11/9 of the fewest blocks, which is at least the tokens' number."""
    lengths = [int(x) for x in np.random.default_rng(1).lognormal(4.0, 1.0, 2000) + 1 if x < 511]
    assert len(place(lengths, 512)) <= 1.01 * sum(lengths) / 512


def test_the_setting_reaches_stored_and_streamed_blocks(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    path = tmp_path / "chats.jsonl"
    turns = '{"conversations": [{"from": "human", "value": "%s"}, {"from": "gpt", "value": "Hello there."}]}\n'
    path.write_text("".join(turns % ("Hi " * (1 + n % 9)) for n in range(60)))
    source = SourceConfig(path=str(path))
    given = {"train": [source], "block_size": 128, "chat_template": "vicuna"}
    shown, blocks = {}, {}
    for packing, streaming in (("cut", False), ("whole", False), ("whole", True)):
        config = DataConfig(packing=packing, streaming=streaming, **given)
        output = io.StringIO()
        show_data(config, tokenizer, num_heads=2, vocab_size=2048, samples=0, console=Console(file=output, width=300))
        shown[packing, streaming] = output.getvalue()
        packed = build_datasets(config, tokenizer, num_heads=2, vocab_size=2048)
        blocks[packing, streaming] = [(block["input_ids"], block["loss_mask"]) for block in packed.train]
    assert "documents; 0.0% of them cut at edges of blocks" in shown["whole", False]
    assert "documents; 0.0% of them cut" not in shown["cut", False]
    assert "0.0% padding" in shown["cut", False]
    assert "packed (whole) while they are streamed" in shown["whole", True]

    def targets(packed):
        return sum(sum(mask) for _, mask in packed)

    assert targets(blocks["whole", False]) == targets(blocks["whole", True]) >= targets(blocks["cut", False])
    assert blocks["whole", False] != blocks["cut", False]

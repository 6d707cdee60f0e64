"""Stored hidden states: equal losses, one pass of the backbone, checksums, resume, room on the disk, refusals."""

import json
import os
import re
import shutil
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from datasets import Dataset
from tiny import tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.config import read_config
from train.data import hidden_states
from train.data.blocks import to_table, write_blocks
from train.data.hidden_states import cache_hidden_states, fingerprint_of_blocks
from train.loop.batches import as_arrays, collate
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig
from train.run import run

LENGTH = 10


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)
    monkeypatch.setattr(hidden_states, "plan_layout", small_shards(hidden_states.plan_layout))


def small_shards(plan):
    """Three blocks a shard, so that there are several."""

    def planned(*args):
        layout = plan(*args)
        return replace(layout, shard_bytes=3 * layout.block_bytes)

    return planned


VARIANTS = {
    "grounded, inner layer": ("grounded", {"hidden_offset": 2}),
    "gru, prefix over embeddings": ("gru", {"hidden_offset": 3, "prefix_layers": 1}),
}


def build(family="grounded", dtype=torch.float32, **settings):
    backbone = Backbone(tiny_model("llama", attn="sdpa", dtype=dtype))
    torch.manual_seed(1)
    family, options = VARIANTS.get(family, (family, {}))
    return TrainedModel(backbone, create(family, backbone, num_heads=2, **options).float(), **settings)


def some_rows(count=7, seed=0, length=LENGTH):
    tokens = np.random.default_rng(seed).integers(3, 20, (count, length), dtype=np.int32)
    documents = (np.arange(length) > 5).astype(np.int32)
    return [{"input_ids": ids, "loss_mask": np.ones(length, bool), "document_ids": documents} for ids in tokens]


def some_blocks(count=7, seed=0):
    return Dataset(to_table(some_rows(count, seed))).with_format("numpy")


def packed(path, rows):
    """Blocks as a run reads them: from an Arrow file, as arrays."""
    path.parent.mkdir(exist_ok=True)
    write_blocks(path, iter(rows))
    return as_arrays(Dataset.from_file(str(path)))


def store(model, blocks, dtype=None, context=nullcontext):
    return cache_hidden_states(model, blocks, collate=collate, batch_size=2, dtype=dtype, context=context)


@pytest.fixture
def passes(monkeypatch):
    """How many rows of tokens the backbone has read."""
    seen = []
    forward = Backbone.forward

    def counted(self, tokens, **inputs):
        seen.append(len(tokens))
        return forward(self, tokens, **inputs)

    monkeypatch.setattr(Backbone, "forward", counted)
    return seen


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("family", ["medusa", "grounded", "dynamo", "eagle", "mtp", *VARIANTS])
def test_loss_and_gradients_are_those_of_the_running_backbone(family, crossing, passes):
    model = build(family, attend_across_documents=crossing)
    cached = store(model, some_blocks())
    passes.clear()
    found = []
    for rows in (cached, cached.blocks):
        model.zero_grad()
        out = model(**collate([rows[i] for i in (6, 0, 3)]))  # another batch than the states were computed in
        out["loss"].backward()
        found.append([out["loss"], *(p.grad for p in model.token_heads.parameters())])
    assert passes == [3], "stored states did not take the backbone's place"
    for stored, live in zip(*found, strict=True):
        # float32 products over another number of rows add in another order; nothing else differs.
        torch.testing.assert_close(stored, live, rtol=1e-5, atol=1e-6)


def test_in_the_same_batches_the_states_are_the_same_bits():
    model = build("dynamo")
    cached = store(model, some_blocks())
    batch = collate(cached.__getitems__([3, 4]))
    live = model.hidden_states(batch["input_ids"], batch["document_ids"])
    assert torch.equal(batch["hidden_states"], live)
    assert live.shape == (2, 1, LENGTH, 32)


def test_a_second_run_reads_and_other_runs_have_a_folder_of_their_own(passes):
    model, same = build(), build()
    passes.clear()
    first = store(model, some_blocks())
    assert sum(passes) == 7
    again = store(same, some_blocks())
    assert sum(passes) == 7
    assert again.layout == first.layout
    others = [
        store(model, some_blocks(seed=1)),
        store(model, some_blocks(), dtype=torch.bfloat16),
        store(build("dynamo"), some_blocks()),
        store(build(attend_across_documents=True), some_blocks()),
        store(model, some_blocks(), context=lambda: torch.autocast("cpu", torch.bfloat16)),
    ]
    with torch.no_grad():
        model.model.get_input_embeddings().weight[4, 0] += 1.0
    others.append(store(model, some_blocks()))
    folders = {cached.layout.folder for cached in (first, *others)}
    assert len(folders) == 7


def test_the_same_blocks_are_found_again_wherever_and_whenever_they_were_packed(tmp_path, passes):
    model, file = build(), tmp_path / "packed" / "blocks.arrow"
    blocks = packed(file, some_rows())
    first = store(model, blocks)
    passes.clear()
    os.utime(file, (1, 1))
    touched = as_arrays(Dataset.from_file(str(file)))
    assert touched._fingerprint != blocks._fingerprint, "the test would not see a fingerprint of path and time"
    elsewhere = packed(tmp_path / "elsewhere" / "blocks.arrow", some_rows())
    in_order = elsewhere.select([6, 5, 4, 3, 2, 1, 0]).select([6, 5, 4, 3, 2, 1, 0])
    for same in (touched, packed(file, some_rows()), elsewhere, in_order, some_blocks()):
        assert store(model, same).layout == first.layout
    assert not passes
    assert store(model, packed(file, some_rows(seed=1))).layout.folder != first.layout.folder


def test_blocks_with_other_content_have_another_fingerprint(monkeypatch):
    monkeypatch.setattr(hidden_states, "BLOCKS_PER_READ", 4)  # the last read is not a full one
    rows = some_rows()
    other_token, other_document = some_rows(), some_rows()
    other_token[6]["input_ids"][-1] += 1
    other_document[6]["document_ids"] = np.zeros(LENGTH, np.int32)
    halves = [{name: row[name][half] for name in row} for row in rows for half in (slice(0, 5), slice(5, 10))]
    several = [rows, rows[::-1], rows[:6], other_token, other_document, halves]
    assert len({fingerprint_of_blocks(Dataset(to_table(each)).with_format("numpy")) for each in several}) == 6


def test_half_precision_stores_half_as_much_and_stays_near():
    model, blocks = build(), some_blocks()
    whole, half = store(model, blocks), store(model, blocks, dtype=torch.bfloat16)
    assert 2 * half.layout.file(0).stat().st_size == whole.layout.file(0).stat().st_size
    losses = [model(**collate([rows[i] for i in range(4)]))["loss"].item() for rows in (whole, half)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)  # bfloat16 keeps 8 bits of each hidden state
    assert losses[1] != losses[0]


@pytest.mark.parametrize("damage", ["cut short", "a changed byte", "no checksum", "checksum cut short"])
def test_only_what_is_missing_or_damaged_is_computed_again(damage, passes, caplog):
    model, blocks = build(), some_blocks()
    file = (first := store(model, blocks)).layout.file(1)
    states = [first[i]["hidden_states"].clone() for i in range(7)]
    passes.clear()
    content = bytearray(file.read_bytes())
    if damage == "cut short":
        file.write_bytes(content[:50])
    elif damage == "a changed byte":
        content[17] ^= 1
        file.write_bytes(content)
    elif damage == "no checksum":  # what an interrupted pass leaves
        file.with_suffix(".json").unlink()
        file.rename(file.with_suffix(".tmp"))
    else:
        file.with_suffix(".json").write_text("{")
    again = store(model, blocks)
    assert sum(passes) == 3
    assert all(torch.equal(again[i]["hidden_states"], state) for i, state in enumerate(states))
    assert ("does not have its checksum" in caplog.text) == (damage != "no checksum")


def test_too_little_room_is_said_before_anything_is_computed(monkeypatch, passes):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**20, 2**20 - 100, 100))
    model = build()
    passes.clear()
    with pytest.raises(ValueError, match=r"needs .* GiB more in .* point HF_DATASETS_CACHE to a larger disk"):
        store(model, some_blocks())
    assert not passes


def test_room_is_needed_for_what_all_processes_write(monkeypatch, passes):
    usage = namedtuple("usage", "total used free")
    model, blocks = build(), some_blocks()
    needed = 7 * LENGTH * 32 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**20, 0, needed + 10))
    passes.clear()
    other = [(11, needed + 10)]
    monkeypatch.setattr(hidden_states, "gather_object", lambda mine: mine + other)
    with pytest.raises(ValueError, match=r"needs .* GiB more in .* point HF_DATASETS_CACHE to a larger disk"):
        store(model, blocks)
    assert not passes
    other[:] = [(10, needed + 9)]  # what one process finds too little is too little for all
    with pytest.raises(ValueError, match="GiB more in"):
        store(model, blocks)
    other[:] = [(10, needed + 10)]
    assert len(store(model, blocks)) == 7
    gathered = []
    monkeypatch.setattr(hidden_states, "gather_object", lambda mine: gathered.extend(mine) or mine)
    store(model, blocks)
    assert gathered == [(0, needed + 10)], "a process that misses nothing must take part as well"


def test_each_process_writes_its_share_and_misses_what_others_did_not_leave(monkeypatch, passes):
    State = namedtuple("State", "process_index num_processes is_main_process wait_for_everyone")
    model, blocks = build(), some_blocks()
    passes.clear()
    monkeypatch.setattr(hidden_states, "PartialState", lambda: State(1, 2, False, lambda: None))
    with pytest.raises(ValueError, match="was left to another process and is not here"):
        store(model, blocks)
    assert sum(passes) == 3  # the second of three shards
    monkeypatch.setattr(hidden_states, "PartialState", lambda: State(0, 2, True, lambda: None))
    assert len(store(model, blocks)) == 7
    assert sum(passes) == 7


# ---- whole runs


def write_config(folder, name, **changes):
    content = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.1, "block_size": 16},
        "heads": {"num_heads": 2},
        "rates": {"heads": 1e-2},
        "evaluation": {"every_steps": 0, "num_prompts": 1, "prompt_tokens": 4, "new_tokens": 4},
        "trainer": {"num_train_epochs": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content | changes))
    return ["--config", str(path)]


@pytest.fixture
def base(tmp_path):
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"abc{i} " * 9}) + "\n" for i in range(20)))
    return tmp_path


def test_a_run_trains_the_same_heads(base, passes, caplog):
    logged = []
    caplog.set_level("INFO", "train")
    for name, flags in (("live", []), ("stored", ["--cache_hidden_states", "true"])):
        caplog.clear()
        where = run(read_config([*write_config(base, name), *flags]))
        lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        logged.append([line["loss"] for line in lines if "loss" in line])
    assert re.search(
        r"hidden states: \d+ blocks of 16 tokens, 1 tap\(s\) of 32 in torch.float32: 0.00 GiB", caplog.text
    )
    assert len(logged[0]) > 6
    assert logged[1] == pytest.approx(logged[0], rel=1e-3)  # logs keep four digits


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache_hidden_states", "true", "--rates.base", "1e-4"], "for a backbone that is trained"),
        (["--cache_hidden_states", "true", "--data.streaming", "true"], "was given with data.streaming"),
        (["--hidden_states_dtype", "bfloat16"], "without cache_hidden_states"),
    ],
)
def test_what_cannot_be_stored_is_refused(base, flags, message):
    with pytest.raises(ValueError, match=message):
        read_config([*write_config(base, "refused"), *flags])


@pytest.mark.parametrize("family", ["grounded", "dynamo"])
def test_a_teachers_states_are_stored_where_heads_do_not_read_them(family, passes):
    """DynaMo's heads read the penultimate layer: the final states lie beside it, from the same pass."""
    recipes = [LossConfig(), LossConfig(hard=0.5, soft=1.0, regression=0.3, top_n=5)]
    hard, taught = (build(family, loss=recipe) for recipe in recipes)
    blocks = some_blocks()
    passes.clear()  # of the probes of both projections
    stored = store(taught, blocks)
    assert sum(passes) == 7  # rows of tokens that the backbone read: each once
    assert stored.layout.taps == len(hard.stored_taps) + (family == "dynamo")
    batch = collate([stored[i] for i in range(4)])
    states = batch.pop("hidden_states")
    for model in (taught, build(family, loss=recipes[1])):
        with torch.no_grad():
            live, read = model(**batch), model(**batch, hidden_states=states)
        torch.testing.assert_close(read["logged_sums_M"], live["logged_sums_M"], rtol=1e-5, atol=1e-5)  # float32

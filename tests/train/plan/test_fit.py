"""Steps, time and disk by hand, and the sentences about what does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planned_runs import BACKBONE_NUMEL, HEAD_NUMEL, D, config

from heads.backbone.loading import BackboneConfig
from train.config import RatesConfig
from train.plan.costs import Machine, bytes_in_output_dir, count_steps, parse_bytes, run_seconds, stored_bytes
from train.plan.fit import warnings
from train.plan.memory import LAUNCHES, fewest_processes, memory_of
from train.plan.plan import make_plan
from train.plan.shapes import ParameterCount, build_on_meta


def test_steps_are_counted_as_the_trainer_does(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    assert count_steps(config(folder, trainer=trainer), 100, gpus=4) == 2 * 5  # 13 batches a process, 5 updates
    assert count_steps(config(folder, trainer=trainer), None, gpus=4) is None
    assert count_steps(config(folder, trainer={"max_steps": 7}), None, gpus=4) == 7


def test_times_of_what_is_not_stated_are_those_of_common_gpus():
    assert list(run_seconds(1e18, 0, Machine())) == ["A100", "L40S", "H100"]


def test_disk_by_hand(folder):
    changes = {"save_every_steps": 5, "save_dtype": "bfloat16", "rates": RatesConfig(base=1e-4)}
    both = config(folder, **changes)
    model = build_on_meta(both, "cpu")
    written = bytes_in_output_dir(both, model, None)
    numel = BACKBONE_NUMEL + 2 * HEAD_NUMEL
    assert list(written.values()) == [2 * numel, 3 * (4 + 8) * numel]  # no evaluation data: no best/
    assert stored_bytes(both, model, 10) == 0
    assert stored_bytes(config(folder), build_on_meta(config(folder), "cpu"), 10) == 10 * 16 * D * 4


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_all_checkpoints_stay(folder, limit):
    run = config(folder, save_every_steps=5, trainer={"save_total_limit": limit, "max_steps": 50})
    model = build_on_meta(run, "cpu")
    one = (4 + 8) * 2 * HEAD_NUMEL
    for steps, count in ((50, 10), (52, 11), (3, 1)):  # the last step is saved too
        written = bytes_in_output_dir(run, model, steps)
        assert written[f"{count} checkpoint-*/: none is removed without trainer.save_total_limit"] == count * one
    assert (
        bytes_in_output_dir(run, model, None)["each checkpoint-*/: none is removed, and their number is unknown"] == one
    )
    assert make_plan(run, tokens=1000).written == bytes_in_output_dir(run, model, 50)


def test_stored_states_take_their_own_dtype(folder):
    backbone = BackboneConfig(name_or_path=str(folder / "base"), dtype="bfloat16")
    for dtype, size in ((None, 2), ("float32", 4), ("float16", 2)):
        run = config(folder, backbone=backbone, cache_hidden_states=True, hidden_states_dtype=dtype)
        assert stored_bytes(run, build_on_meta(run, "cpu"), 10) == 10 * 16 * D * size


def test_a_disk_too_small_for_stored_states_is_warned_of(folder, monkeypatch):
    run = config(folder, cache_hidden_states=True)
    found = make_plan(run, tokens=1600)
    output, free = sum(found.written.values()), [0]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    free[0] = output + found.stored_bytes
    assert warnings(found, run, LAUNCHES, None) == []
    free[0] -= 1
    [sentence] = warnings(found, run, LAUNCHES, None)
    for words in ("output_dir ", "hidden states in ", "HF_DATASETS_CACHE to a larger disk", "save_total_limit"):
        assert words in sentence
    free[0] = output
    not_stored = replace(found.sizes, step=replace(found.sizes.step, storing_flops=0))
    assert warnings(replace(found, sizes=not_stored), run, LAUNCHES, None) == []


def test_too_small_a_memory_is_warned_of_with_what_would_fit(folder):
    run = config(folder)
    found = make_plan(run, tokens=1000, gpus=2)
    needs = {engine.name: memory_of(engine, found.sizes, 2).peak for engine in LAUNCHES}
    between = (min(needs.values()) + max(needs.values())) / 2
    sentences = warnings(found, run, LAUNCHES, int(between / 0.9))
    smallest, largest = min(needs, key=needs.get), max(needs, key=needs.get)
    assert any(sentence.startswith(f"{largest} does not fit: ") for sentence in sentences)
    assert "On these 2 GPUs" in sentences[-1]
    assert smallest in sentences[-1]
    assert warnings(found, run, LAUNCHES, 10**9) == []


def test_where_nothing_fits_it_says_what_to_change(folder):
    run = config(folder, rates=RatesConfig(base=1e-4))
    sentences = warnings(make_plan(run, tokens=1000), run, LAUNCHES, 20)
    assert "No engine makes it fit on any number of GPUs" in sentences[-1]
    for words in ("per_device_train_batch_size (now 2)", "gradient_checkpointing: true", "block_size (now 16)"):
        assert words in sentences[-1]


def test_more_gpus_are_named_where_they_help(folder):
    run = config(folder)
    found = make_plan(run, tokens=1000)
    step = replace(found.sizes.step, training=[{}], evaluating=[])
    none = ParameterCount()
    weights_only = replace(found, sizes=replace(found.sizes, root=none, unit=none, step=step))
    memory = found.sizes.all.nbytes
    sentence = warnings(weights_only, run, (LAUNCHES[2],), memory)[-1]
    fewest = fewest_processes(LAUNCHES[2], weights_only.sizes, 0.9 * memory)
    assert f"are {fewest}, with fsdp2" in sentence


def test_sizes_are_read_with_their_units():
    assert [parse_bytes(text) for text in ("80GB", "1.5 gib", "2e9")] == [80 * 10**9, 3 * 2**29, 2 * 10**9]

"""A plan's figures by hand: parameters, memory of every engine, FLOPs, steps, disk; and beside a real training step."""

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from throwaway_families import THROWAWAY
from tiny import CONFIGS
from transformers import AutoModelForCausalLM

from benchmarks.training.plan import TRAINED, Case, config_of, peak_on_cpu, planned
from heads.backbone.loading import BackboneConfig
from heads.backbone.model import Backbone
from heads.checkpoint.adapter import LoraSettings
from heads.data.documents import DataConfig, SourceConfig
from heads.interface.token_heads import HeadsConfig
from train.__main__ import dispatch
from train.config import RatesConfig, TrainConfig
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig, SelfDistillationConfig
from train.plan.command import plan
from train.plan.costs import Throughput, count_steps, disk, hours
from train.plan.fit import parse_bytes, warnings
from train.plan.live_tensors import BACKBONE, FROZEN, GRADIENTS, INPUTS, LOSS
from train.plan.live_tensors import TRAINED as TRAINED_WEIGHTS
from train.plan.memory import ENGINES, Sizes, fewest_processes, launched_engines, memory_of
from train.plan.plan import make_plan
from train.plan.shapes import build_on_meta, count_backbone, count_heads
from train.plan.step import StepShape, trace_step

ROOT = Path(__file__).resolve().parents[3]
DEMO = sorted((ROOT / "configs/demo").glob("*.yaml"))
V, D, W, L = 40, 32, 48, 3  # vocabulary, width, inner width and layers of the tiny Llama below


@pytest.fixture
def folder(tmp_path):
    config = CONFIGS["llama"]()
    config.vocab_size = V
    config.save_pretrained(tmp_path / "base")
    return tmp_path


def config(folder, **changes):
    fields = {
        "output_dir": str(folder / "run"),
        "backbone": BackboneConfig(name_or_path=str(folder / "base"), dtype="float32"),
        "data": DataConfig(train=[SourceConfig(path="nowhere")], block_size=16),
        "family": "medusa",
        "heads": {"num_heads": 2},
        "trainer": {"per_device_train_batch_size": 2},
    }
    return TrainConfig(**(fields | changes))


BACKBONE_NUMEL = 2 * V * D + L * (2 * D * D + 2 * D * D // 2 + 3 * D * W + 2 * D) + D  # two key-value heads of four
HEAD_NUMEL = D * D + D + V * D


def test_parameters_by_hand(folder):
    model = build_on_meta(config(folder), "cpu")
    assert all(p.device.type == "meta" for p in model.parameters())
    backbone, heads = count_backbone(model, None), count_heads(model)
    assert (backbone.trained, backbone.frozen) == (0, BACKBONE_NUMEL)
    assert (heads.trained, heads.frozen, heads.trained_bytes) == (2 * HEAD_NUMEL, 0, 8 * HEAD_NUMEL)


def test_a_trained_backbone_and_an_adapter_count_as_trained(folder):
    rates = RatesConfig(base=1e-4)
    assert count_backbone(build_on_meta(config(folder, rates=rates), "cpu"), None).trained == BACKBONE_NUMEL
    lora = config(folder, rates=rates)
    lora.lora = replace(lora.lora, rank=2)
    adapter = count_backbone(build_on_meta(lora, "cpu"), None)
    assert adapter.trained == L * 2 * ((D + D) + (D + D // 2))  # rank 2 on queries and values
    assert adapter.frozen == BACKBONE_NUMEL


def test_self_distillation_keeps_a_copy_where_no_adapter_can_be_switched_off(folder):
    rates, taught = RatesConfig(base=1e-4), SelfDistillationConfig(weight=1.0)
    alone, whole = (
        make_plan(config(folder, rates=rates, **more), device_type="cpu", tokens=1000)
        for more in ({}, {"self_distillation": taught})
    )
    assert alone.original.numel == 0
    assert (whole.original.frozen, whole.original.frozen_bytes) == (BACKBONE_NUMEL, whole.backbone.nbytes)
    assert whole.sizes.frozen - alone.sizes.frozen >= whole.backbone.trained_bytes
    assert whole.sizes.trained == alone.sizes.trained
    assert whole.step_flops > alone.step_flops
    adapted = config(folder, rates=rates, self_distillation=taught, lora=LoraSettings(rank=2))
    assert make_plan(adapted, device_type="cpu", tokens=1000).original.numel == 0


def test_quantised_matrices_take_their_bits(folder):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = build_on_meta(config(folder), "cpu")
    whole, small = count_backbone(model, None), count_backbone(model, quantization)
    matrices = L * (3 * D * D + 3 * D * W)
    assert whole.frozen_bytes - small.frozen_bytes == 4 * matrices - matrices * (1 / 2 + 4 / 64)


def test_flops_by_hand(folder):
    """Frozen backbone, Medusa heads: two products of a head's own, three with its unembedding, attention on all T²."""
    step = trace_step(build_on_meta(config(folder), "cpu"), shape())
    batch, length = 2, 16
    layers = batch * length * 2 * (L * (3 * D * D + 3 * D * W)) + L * 2 * (2 * batch * length * length * D)
    rows = [batch * (length - shift) for shift in (2, 3)]
    heads = sum(row * (2 * 2 * D * D + 3 * 2 * V * D) for row in rows)
    assert step.flops == layers + heads


def shape(**changes):
    fields = {"batch": 2, "eval_batch": 2, "block_size": 16, "accumulates": False, "autocast": None}
    return StepShape(**({**fields, "device_type": "cpu"} | changes))


@pytest.mark.parametrize(
    ("architecture", "device_type"), [("gpt_neox", "cuda"), ("gemma2", "cuda"), ("gpt2", "cpu"), ("cohere", "cuda")]
)
def test_any_backbone_and_any_family_can_be_traced(architecture, device_type):
    for kind in THROWAWAY.values():
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(CONFIGS[architecture]())
            backbone = Backbone(hf, check_projection=False)
            model = TrainedModel(backbone, kind(HeadsConfig(num_heads=2), backbone).float(), trains_backbone=True)
        step = trace_step(model, shape(device_type=device_type))
        assert step.flops > 0
        assert step.training[0][BACKBONE] > 0
        assert max(moment.get(GRADIENTS, 0) for moment in step.training) > 0


def test_no_family_is_named_in_the_plan():
    source = " ".join(path.read_text() for path in (ROOT / "train/plan").glob("*.py"))
    code = re.sub(r"configs/demo/\w+\.yaml", "", source)
    assert not re.findall(r"\b(medusa|grounded|dynamo|gru)\b", code)


# ---- engines: 40 bytes frozen, 80 trained in float32, on 4 processes

SIZES = Sizes(
    frozen=40,
    trained=80,
    moments=160,
    numel=30,
    trained_numel=20,
    root=6,
    unit=4,
    root_trained=2,
    unit_trained=3,
    half=False,
    training=[{BACKBONE: 1000}, {BACKBONE: 930, GRADIENTS: 80}],
    evaluating=[{BACKBONE: 300}],
)
BY_HAND = {
    # frozen + trained + gradients + optimizer + gathered + communication + activations
    "single": 40 + 80 + 80 + 160 + 930,
    "ddp": 40 + 80 + 80 + 160 + 80 + 930,
    "fsdp2": 10 + 20 + 0 + 40 + 4 * (6 + 2 * 4) + 4 * (2 + 2 * 3) + 1000,
    "fsdp2_multi_node": 10 + 20 + 0 + 40 + 56 + 32 + 1000,
    "zero1": 40 + 80 + 80 + (80 + 160) // 4 + 80 + 930,
    "zero2": 40 + 80 + 0 + (80 + 160) // 4 + 80 + 1000,
    "zero3": 10 + 20 + 0 + (80 + 160) // 4 + 120 + 80 + 1000,
    "zero3_offload": 0 + 0 + 0 + 0 + 120 + 80 + 1000,
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_each_engine_by_hand(engine):
    found = memory_of(engine, SIZES, 4)
    assert sum(found.training.values()) == BY_HAND[engine.name]
    assert found.host == (10 + 20 + 60 + 20 if engine.offloads else 0)
    gathered = {"fsdp2": 56, "fsdp2_multi_node": 56, "zero3": 120, "zero3_offload": 120}.get(engine.name, 0)
    kept = sum(found.training.get(part, 0) for part in (FROZEN, TRAINED_WEIGHTS, "optimizer states"))
    assert found.evaluating == kept + gathered + 300


def test_deepspeed_in_mixed_precision_has_two_bytes_and_a_master_copy():
    zero2 = next(engine for engine in ENGINES if engine.name == "zero2")
    found = memory_of(zero2, replace(SIZES, half=True), 4).training
    assert (found[FROZEN], found[TRAINED_WEIGHTS], found["optimizer states"]) == (20, 40, (4 + 8) * 20 // 4)


def test_fsdp2_follows_its_launch_file(tmp_path):
    (tmp_path / "fsdp2.yaml").write_text("fsdp_config: {fsdp_reshard_after_forward: false}\n")
    engine = launched_engines(tmp_path)[2]
    assert memory_of(engine, SIZES, 4).training["gathered for use"] == 4 * SIZES.numel
    assert launched_engines(tmp_path / "nowhere") == ENGINES


def test_engines_are_the_launch_files():
    assert {engine.name for engine in ENGINES} == {path.stem for path in (ROOT / "launch").glob("*.yaml")}


def test_the_fewest_processes_are_found():
    fsdp2 = ENGINES[2]
    needed = {n: memory_of(fsdp2, SIZES, n).peak for n in range(1, 9)}
    assert fewest_processes(fsdp2, SIZES, needed[5]) == 5
    assert fewest_processes(fsdp2, SIZES, 10) is None
    assert fewest_processes(ENGINES[0], SIZES, 10**9) == 1


def test_fsdp2_sums_in_float32_beside_gradients_of_the_compute_dtype():
    """Root group 2 and unit 3 trained: five gradients of two bytes wait, three are summed in four."""
    fsdp2 = ENGINES[2]
    assert memory_of(fsdp2, replace(SIZES, half=True), 4).training["communication"] == 2 * (2 + 3) + 4 * 3
    large_root = replace(SIZES, half=True, root_trained=11)
    assert memory_of(fsdp2, large_root, 4).training["communication"] == (2 + 4) * 11
    in_half = replace(SIZES, trained=2 * SIZES.trained_numel)  # bfloat16 weights without mixed precision
    assert memory_of(fsdp2, in_half, 4).training["communication"] == 2 * (2 + 3) + 2 * 3


# ---- steps, hours, disk


def test_steps_are_counted_as_the_trainer_does(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    assert count_steps(config(folder, trainer=trainer), 100, gpus=4) == 2 * 5  # 13 batches a process, 5 updates
    assert count_steps(config(folder, trainer=trainer), None, gpus=4) is None
    assert count_steps(config(folder, trainer={"max_steps": 7}), None, gpus=4) == 7


def test_hours_of_what_is_not_stated_are_those_of_common_gpus():
    assert list(hours(1e18, 0, 1, Throughput())) == ["A100", "L40S", "H100"]


def test_disk_by_hand(folder):
    changes = {"save_every_steps": 5, "save_dtype": "bfloat16", "rates": RatesConfig(base=1e-4)}
    both = config(folder, **changes)
    written, cached = disk(both, build_on_meta(both, "cpu"), 10)
    numel = BACKBONE_NUMEL + 2 * HEAD_NUMEL
    assert list(written.values()) == [2 * numel, 3 * (4 + 8) * numel]  # no evaluation data: no best/
    assert cached == 0
    assert disk(config(folder), build_on_meta(config(folder), "cpu"), 10)[1] == 10 * 16 * D * 4


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_all_checkpoints_stay(folder, limit):
    run = config(folder, save_every_steps=5, trainer={"save_total_limit": limit, "max_steps": 50})
    model = build_on_meta(run, "cpu")
    one = (4 + 8) * 2 * HEAD_NUMEL
    for steps, count in ((50, 10), (52, 11), (3, 1)):  # the last step is saved too
        written = disk(run, model, 10, steps)[0]
        assert written[f"{count} checkpoint-*/: all are kept, no trainer.save_total_limit"] == count * one
    assert disk(run, model, 10)[0]["each checkpoint-*/: all are kept, and how many is unknown"] == one
    assert make_plan(run, tokens=1000).written == disk(run, model, 10, 50)[0]


# ---- stored hidden states


def test_stored_states_take_their_own_dtype(folder):
    backbone = BackboneConfig(name_or_path=str(folder / "base"), dtype="bfloat16")
    for dtype, size in ((None, 2), ("float32", 4), ("float16", 2)):
        run = config(folder, backbone=backbone, cache_hidden_states=True, hidden_states_dtype=dtype)
        assert disk(run, build_on_meta(run, "cpu"), 10)[1] == 10 * 16 * D * size


def test_a_backbone_whose_states_are_stored_runs_once_per_block(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 7}
    live, stored = (
        make_plan(config(folder, trainer=trainer, cache_hidden_states=cached), tokens=160, gpus=2)
        for cached in (False, True)
    )
    assert (live.storing_flops, live.run_flops) == (0, 7 * live.step_flops)
    assert live.step_flops - stored.step_flops == 2 * 3 * 2 * stored.storing_flops  # blocks of an update
    assert stored.run_flops == 7 * stored.step_flops + 10 * stored.storing_flops
    assert replace(stored, blocks=None).run_flops is None


def test_a_teacher_costs_a_pass_through_the_unembedding_and_a_chunk_of_logits(folder):
    hard, soft = (make_plan(config(folder, loss=loss), tokens=160) for loss in (LossConfig(), LossConfig(soft=1.0)))
    assert soft.step_flops > hard.step_flops
    peaks = [max(moment.get(LOSS, 0) for moment in plan.sizes.training) for plan in (hard, soft)]
    assert peaks[1] > peaks[0]


def test_a_step_on_stored_states_has_no_backbone_in_it(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    live, stored = (
        make_plan(config(folder, trainer=trainer, **more), tokens=160).sizes
        for more in ({}, {"cache_hidden_states": True, "hidden_states_dtype": "bfloat16"})
    )
    assert all(BACKBONE in moment for moment in live.training)
    assert not any(BACKBONE in moment for moment in stored.training)
    states = 3 * 2 * 16 * D * 2  # all micro-batches of an update
    assert all(states <= moment[INPUTS] < states + 10_000 for moment in stored.training)
    assert live.storing_peak == 0
    assert stored.storing_peak > stored.frozen + stored.trained + 2 * 16 * D * 4
    assert all(memory_of(engine, stored, 4).peak >= stored.storing_peak for engine in ENGINES)


def test_a_disk_too_small_for_stored_states_is_warned_of(folder, monkeypatch):
    run = config(folder, cache_hidden_states=True)
    found = make_plan(run, tokens=1600)
    output, free = sum(found.written.values()), [0]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    free[0] = output + found.cached_states
    assert warnings(found, run, ENGINES, None) == []
    free[0] -= 1
    [sentence] = warnings(found, run, ENGINES, None)
    for words in ("output_dir ", "hidden states in ", "HF_DATASETS_CACHE to a larger disk", "save_total_limit"):
        assert words in sentence
    free[0] = output
    assert warnings(replace(found, storing_flops=0), run, ENGINES, None) == []


def test_the_rows_of_stored_states_are_shown_where_they_are_stored(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config", "configs/demo/grounded.yaml", "--tokens", "100000"]
    live, stored = printed(*flags), printed(*flags, "--cache_hidden_states", "true")
    assert "hidden states of all training blocks, if cached" in live
    rows = "storing hidden states", "FLOPs of storing the hidden states of a block", "in $HF_DATASETS_CACHE"
    for row in rows:
        assert row in stored
        assert row not in live


# ---- beside a real step


@pytest.mark.parametrize(
    "case",
    [
        Case(family="grounded", batch=2, block_size=32),
        Case(family="dynamo", rates=TRAINED, checkpointing=True, batch=2, block_size=32),
    ],
    ids=lambda case: case.family,
)
def test_the_plan_agrees_with_the_allocator(case, tmp_path):
    run = config_of(case, tmp_path)
    assert planned(run) == pytest.approx(peak_on_cpu(run), rel=0.15)


# ---- the command


def printed(*arguments):
    output = io.StringIO()
    plan([*arguments], Console(file=output, width=140))
    return output.getvalue()


@pytest.mark.parametrize("path", DEMO, ids=lambda path: path.stem)
def test_every_demo_config_is_planned(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = printed("--config", str(path), "--tokens", "1000000", "--gpus", "2", "--memory", "80GB")
    for words in ("Parameters", "frozen weights", "zero3", "FLOPs of the run", "hours on 2 x H100", "last/"):
        assert words in shown
    assert "NO" not in shown
    assert "warning" not in shown


def test_data_on_this_machine_is_counted(monkeypatch, tmp_path):
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 400)
    flags = ["--data.train", f"[{{path: {text}}}]", "--data.eval", "[]", "--trainer.max_steps", "-1"]
    shown = printed("--config", "configs/demo/grounded.yaml", *flags, "--data.heldout_list", "null")
    assert re.search(r"training blocks\s+\d", shown)
    assert re.search(r"steps\s+\d", shown)


def test_too_small_a_memory_is_warned_of_with_what_would_fit(folder):
    run = config(folder)
    found = make_plan(run, tokens=1000, gpus=2)
    needs = {engine.name: memory_of(engine, found.sizes, 2).peak for engine in ENGINES}
    between = (min(needs.values()) + max(needs.values())) / 2
    sentences = warnings(found, run, ENGINES, int(between / 0.9))
    smallest, largest = min(needs, key=needs.get), max(needs, key=needs.get)
    assert any(sentence.startswith(f"{largest} does not fit: ") for sentence in sentences)
    assert "On these 2 GPUs" in sentences[-1]
    assert smallest in sentences[-1]
    assert warnings(found, run, ENGINES, 10**9) == []


def test_where_nothing_fits_it_says_what_to_change(folder):
    run = config(folder, rates=RatesConfig(base=1e-4))
    sentences = warnings(make_plan(run, tokens=1000), run, ENGINES, 20)
    assert "No engine makes it fit on any number of GPUs" in sentences[-1]
    for words in ("per_device_train_batch_size (now 2)", "gradient_checkpointing: true", "block_size (now 16)"):
        assert words in sentences[-1]


def test_more_gpus_are_named_where_they_help(folder):
    run = config(folder)
    found = make_plan(run, tokens=1000)
    weights_only = replace(found, sizes=replace(SIZES, training=[{BACKBONE: 10}], evaluating=[], root=0, unit=1))
    sentence = warnings(weights_only, run, (ENGINES[2],), 100)[-1]
    fewest = fewest_processes(ENGINES[2], weights_only.sizes, 90)
    assert f"are {fewest}, with fsdp2" in sentence


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "80 parsecs"], "--memory '80 parsecs' was given; give a size with its unit, such as 80GB"),
        (["--gpus", "0"], "--gpus 0 was given; give a whole number of 1 and more"),
        (["--mfu", "40"], "--mfu 40.0 was given; it is a share of the peak"),
        (["--tflops", "-1"], "--tflops -1.0 was given; give a number above 0"),
        (["--backbone.name_or_path", "/nowhere/at-all"], "could not be loaded as a causal LM"),
    ],
)
def test_errors_are_one_sentence(flags, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        dispatch(["plan", "--config", "configs/demo/grounded.yaml", *flags])
    assert stopped.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert words in shown
    assert shown.count("\n") == 1


def test_help_explains_the_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        dispatch(["plan", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--gpus", "--memory", "--device", "--tokens", "--tflops", "--mfu", "--tokens-per-second", "--config"):
        assert flag in shown


def test_sizes_are_read_with_their_units():
    assert [parse_bytes(text) for text in ("80GB", "1.5 gib", "2e9")] == [80 * 10**9, 3 * 2**29, 2 * 10**9]

"""A traced step: its FLOPs by hand, any backbone and family, stored states, and its memory beside a real step's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_runs import D, L, V, W, config
from throwaway_families import THROWAWAY
from tiny import CONFIGS
from transformers import AutoModelForCausalLM

from benchmarks.training.plan import TRAINED, Case, config_of, peak_on_cpu, planned
from heads.backbone.model import Backbone
from heads.interface.token_heads import HeadsConfig
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig
from train.plan.live_tensors import BACKBONE, GRADIENTS, INPUTS, LOSS
from train.plan.memory import LAUNCHES, memory_of
from train.plan.plan import make_plan
from train.plan.shapes import build_on_meta
from train.plan.step import trace_step

ROOT = Path(__file__).resolve().parents[3]


def test_flops_by_hand(folder):
    """Frozen backbone, Medusa heads: two products of a head's own, three with its unembedding, attention on all T²."""
    step = trace_step(build_on_meta(config(folder), "cpu"), config(folder), "cpu")
    batch, length = 2, 16
    layers = batch * length * 2 * (L * (3 * D * D + 3 * D * W)) + L * 2 * (2 * batch * length * length * D)
    heads = 2 * batch * length * (2 * 2 * D * D + 3 * 2 * V * D)  # every position counts as supervised
    assert step.flops == layers + heads


@pytest.mark.parametrize(
    ("architecture", "device_type"), [("gpt_neox", "cuda"), ("gemma2", "cuda"), ("gpt2", "cpu"), ("cohere", "cuda")]
)
def test_any_backbone_and_any_family_can_be_traced(folder, architecture, device_type):
    for kind in THROWAWAY.values():
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(CONFIGS[architecture]())
            backbone = Backbone(hf, check_projection=False)
            model = TrainedModel(backbone, kind(HeadsConfig(num_heads=2), backbone).float(), trains_backbone=True)
        step = trace_step(model, config(folder), device_type)
        assert step.flops > 0
        assert step.training[0][BACKBONE] > 0
        assert max(moment.get(GRADIENTS, 0) for moment in step.training) > 0


def test_layers_that_are_recomputed_attend_as_they_did(folder):
    """Backward runs them again; on CUDA with another kernel than on the CPU that they stand on here."""
    run = config(folder, family="dynamo", rates=TRAINED)
    run.backbone.gradient_checkpointing = True
    assert make_plan(run, tokens=160, device_type="cuda").step_flops > 0


def test_layers_that_nothing_trains_are_not_recomputed(folder):
    """Medusa heads have no layer of the backbone's class, dynamo heads are such layers."""
    frozen = config(folder, family="dynamo")
    frozen.backbone.gradient_checkpointing = True
    assert build_on_meta(frozen, "cpu").token_heads.layers[0][0].gradient_checkpointing
    with pytest.raises(ValueError, match=r"gradient_checkpointing was given with a frozen backbone and heads without"):
        build_on_meta(replace(frozen, family="medusa"), "cpu")


def test_no_family_is_named_in_the_plan():
    source = " ".join(path.read_text() for path in (ROOT / "train/plan").glob("*.py"))
    code = re.sub(r"configs/demo/\w+\.yaml", "", source)
    assert not re.findall(r"\b(medusa|grounded|dynamo|gru|eagle|mtp)\b", code)


def test_a_backbone_whose_states_are_stored_runs_once_per_block(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 7}
    live, stored = (
        make_plan(config(folder, trainer=trainer, cache_hidden_states=cached), tokens=160, gpus=2)
        for cached in (False, True)
    )
    assert (live.sizes.step.storing_flops, live.run_flops) == (0, 7 * live.step_flops)
    assert live.step_flops - stored.step_flops == 2 * 3 * 2 * stored.sizes.step.storing_flops  # blocks of an update
    assert stored.run_flops == 7 * stored.step_flops + 10 * stored.sizes.step.storing_flops
    assert replace(stored, blocks=None).run_flops is None


def test_a_teacher_costs_a_pass_through_the_unembedding_and_a_chunk_of_logits(folder):
    hard, soft = (make_plan(config(folder, loss=loss), tokens=160) for loss in (LossConfig(), LossConfig(soft=1.0)))
    assert soft.step_flops > hard.step_flops
    peaks = [max(moment.get(LOSS, 0) for moment in plan.sizes.step.training) for plan in (hard, soft)]
    assert peaks[1] > peaks[0]


def test_a_step_on_stored_states_has_no_backbone_in_it(folder):
    trainer = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    live, stored = (
        make_plan(config(folder, trainer=trainer, **more), tokens=160).sizes
        for more in ({}, {"cache_hidden_states": True, "hidden_states_dtype": "bfloat16"})
    )
    assert all(BACKBONE in moment for moment in live.step.training)
    assert not any(BACKBONE in moment for moment in stored.step.training)
    states = 3 * 2 * 16 * D * 2  # all micro-batches of an update
    assert all(states <= moment[INPUTS] < states + 10_000 for moment in stored.step.training)
    assert live.storing_peak == 0
    assert stored.storing_peak > stored.all.nbytes + 2 * 16 * D * 4
    assert all(memory_of(engine, stored, 4).peak >= stored.storing_peak for engine in LAUNCHES)


@pytest.mark.parametrize(
    "case",
    [
        Case(family="grounded", batch=2, block_size=32),
        Case(family="dynamo", rates=TRAINED, checkpointing=True, batch=2, block_size=32),
        Case(family="eagle", batch=2, block_size=32),
    ],
    ids=lambda case: case.family,
)
def test_the_plan_agrees_with_the_allocator(case, tmp_path):
    run = config_of(case, tmp_path)
    assert planned(run) == pytest.approx(peak_on_cpu(run), rel=0.15)

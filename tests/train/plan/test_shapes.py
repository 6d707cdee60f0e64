"""Parameters of a run's model by hand, without its weights."""

from dataclasses import replace

import pytest
import torch
from planned_runs import BACKBONE_NUMEL, HEAD_NUMEL, D, L, W, config

from heads.backbone.loading import BackboneConfig
from heads.checkpoint.adapter import LoraSettings
from train.config import RatesConfig
from train.objective.weights import SelfDistillationConfig
from train.plan.plan import make_plan
from train.plan.shapes import ParameterCount, build_on_meta, count_backbone


def test_parameters_by_hand(folder):
    model = build_on_meta(config(folder), "cpu")
    assert all(p.device.type == "meta" for p in model.parameters())
    backbone, heads = count_backbone(model, None), ParameterCount.of(model.token_heads)
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
    assert alone.teacher.numel == 0
    assert (whole.teacher.frozen, whole.teacher.frozen_bytes) == (BACKBONE_NUMEL, whole.backbone.nbytes)
    assert whole.sizes.all.frozen_bytes - alone.sizes.all.frozen_bytes >= whole.backbone.trained_bytes
    assert whole.sizes.all.trained_bytes == alone.sizes.all.trained_bytes
    assert whole.step_flops > alone.step_flops
    adapted = config(folder, rates=rates, self_distillation=taught, lora=LoraSettings(rank=2))
    assert make_plan(adapted, device_type="cpu", tokens=1000).teacher.numel == 0


def test_quantised_matrices_take_their_bits(folder):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = build_on_meta(config(folder), "cpu")
    whole, small = count_backbone(model, None), count_backbone(model, quantization)
    matrices = L * (3 * D * D + 3 * D * W)
    assert whole.frozen_bytes - small.frozen_bytes == 4 * matrices - matrices * (1 / 2 + 4 / 64)


@pytest.mark.parametrize(("device_type", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_auto_is_the_dtype_of_the_config_on_an_accelerator(folder, device_type, dtype):
    base = folder / "base/config.json"
    base.write_text(base.read_text().replace('"model_type"', '"dtype": "bfloat16", "model_type"'))
    run = config(folder, backbone=BackboneConfig(name_or_path=str(folder / "base")))
    assert build_on_meta(run, device_type).backbone.dtype == dtype
    run.rates = RatesConfig(base=1e-4)
    assert build_on_meta(run, device_type).backbone.dtype == torch.float32  # what is trained

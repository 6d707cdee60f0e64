"""What is said of bfloat16 on CPUs with and without instructions for it, and what it does to a loss."""

import pytest
import torch
from tiny import random_tokens, tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.engine import half_precision
from train.engine.half_precision import advice_on_bfloat16, multiplies_bfloat16, settled_bf16
from train.objective.model import TrainedModel


@pytest.mark.parametrize(
    ("found", "has_it"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False, "cpu_name": "some"}, False),
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"bf16": True}, True),
    ],
)
def test_it_is_read_from_what_torch_finds(found, has_it, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert multiplies_bfloat16() is has_it


@pytest.mark.parametrize("has_it", [True, False])
def test_only_what_should_be_the_other_way_is_said(has_it, monkeypatch):
    monkeypatch.setattr(half_precision, "multiplies_bfloat16", lambda: has_it)
    assert advice_on_bfloat16("cpu", bf16=has_it) == ""
    wrong = advice_on_bfloat16("cpu", bf16=not has_it)
    assert ("takes less time" if has_it else "gain no speed") in wrong
    assert advice_on_bfloat16("cuda", bf16=not has_it) == ""


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_is_what_the_machine_can(has_it, monkeypatch):
    monkeypatch.setattr(half_precision, "multiplies_bfloat16", lambda: has_it)
    assert settled_bf16({"bf16": "auto"}, "cpu", trains_in_float32=False) == {"bf16": has_it}
    assert settled_bf16({"bf16": "auto"}, "cpu", trains_in_float32=True) == {"bf16": False}
    assert settled_bf16({"bf16": not has_it}, "cpu", trains_in_float32=False) == {"bf16": not has_it}
    assert settled_bf16({}, "cpu", trains_in_float32=False) == {}


def test_losses_in_bfloat16_are_those_of_float32_to_its_mantissa():
    backbone = Backbone(tiny_model("llama", attn="sdpa", dtype=torch.float32))
    model = TrainedModel(backbone, create("grounded", backbone, num_heads=2).float()).train()
    tokens_BT = random_tokens(4, 48)
    batch = tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), torch.zeros_like(tokens_BT)
    with torch.no_grad():
        exact = model(*batch)["loss"]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(*batch)["loss"]
    # 8 bits of mantissa in each product; a mean over 190 labels of errors of either sign
    torch.testing.assert_close(rounded, exact, rtol=2**-6, atol=0)
    assert rounded != exact

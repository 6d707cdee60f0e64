"""Quark's folders: the bytes that amd-quark 0.13 wrote, and folders that come back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from transformers import AutoModelForCausalLM

import heads
from heads.quantization.codec import Packed, pack, split_bytes, unpack
from heads.quantization.foreign.quark import DTYPES, MODES, load_quark, save_quark
from heads.quantization.formats import find_format
from heads.quantization.linear import MXLinear

BASE = ROOT / "checkpoints" / "demo" / "base"
NAME = "model.layers.3.mlp.down_proj"

# What export_safetensors of amd-quark 0.13 wrote for `weight()`: codes of two rows of one block, and the two scales.
WRITTEN = {
    ("mxfp4_e2m1", "even"): ("aed3401cb5d24a0dc5513a9dc4502ca6d4591cb5e24a0dc5613b9ed4502ca6d3", [128, 119]),
    ("mxfp4_e2m1", "floor"): ("cff5692ed7f46b0fe7735cafe6714ec7f6792ed7f46c0fe7735dbff6704ec7f5", [127, 118]),
    ("mxfp6_e2m3", "floor"): (
        "fe5bf1a4961f1c1df9ecb5871abe74f2d4a7983e6cb6e3c1566f6afad1d5d2ef62bcb8e58b4753fe9aed02873b9f5cf5",
        [127, 118],
    ),
    ("mxfp6_e3m2", "even"): (
        "3fbef970c74f9e9efd36d7971d5f7db9e6d35cef78fbf5e197ee66f9b3dd153f63faa9e1d1665b7b8ce987864f5c7ded",
        [125, 117],
    ),
    ("mxfp6_e3m2", "floor"): (
        "3fbef970c74f9e9efd36d7971d5f7db9e6d35cef78fbf5e19b2f77fdf4edd97f73feeaf1d5a76b7fcdf98bc75f5fbefd",
        [125, 116],
    ),
}


def weight() -> torch.Tensor:
    """Two blocks; the second's maximum rounds past the largest element of four and of E3M2's six bits."""
    weight_OI = ((torch.arange(2 * 32) * 37 % 101 - 50.5) / 7).reshape(2, 32)
    weight_OI[1] *= 1.09 * 2**-9
    return weight_OI


@pytest.mark.parametrize(("format", "mode"), WRITTEN)
def test_the_bytes_that_quark_wrote(format: str, mode: str) -> None:
    codes, scales = WRITTEN[format, mode]
    theirs = Packed(
        torch.tensor(list(bytes.fromhex(codes)), dtype=torch.uint8).reshape(2, -1),
        torch.tensor(scales, dtype=torch.uint8)[:, None],
    )
    (rule,) = (rule for rule, name in MODES.items() if name == mode)
    found = find_format(format)
    ours = pack(weight(), found, rule)
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(unpack(ours, found), unpack(theirs, found))
    differ = split_bytes(ours.codes, found.bits) != split_bytes(theirs.codes, found.bits)
    assert not unpack(ours, found)[differ].any()  # Quark drops the sign of zeros


def packed_model(format: str, rule: str = "floor") -> Any:
    config = heads.MXConfig(format, scale_rule=rule)
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, quantization_config=config)


@pytest.mark.parametrize(
    ("format", "rule"), [*((format, "floor") for format in DTYPES), ("mxfp6_e3m2", "compressed-tensors")]
)
def test_a_folder_comes_back_byte_for_byte(format: str, rule: str, tmp_path: Path) -> None:
    model = packed_model(format, rule)
    save_quark(model, tmp_path / "one")
    again = load_quark(tmp_path / "one", dtype=torch.float32)
    assert isinstance(again.get_submodule(NAME), MXLinear)
    tokens = torch.arange(9)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    save_quark(again, tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    first, second = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("one", "two"))
    assert first["quantization_config"] == second["quantization_config"]
    assert first["quantization_config"]["global_quant_config"]["weight"]["scale_calculation_mode"] == MODES[rule]
    assert first["quantization_config"]["exclude"] == ["lm_head"]


def test_formats_that_quark_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Quark has mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2"):
        save_quark(packed_model("mxint8"), tmp_path)


CHANGES = {
    "allowed is quark with": lambda fields: fields["global_quant_config"]["weight"].update(group_size=16),
    "quantises more than weights": lambda fields: fields["global_quant_config"].update(input_tensors={"dtype": "fp4"}),
    "some layers otherwise": lambda fields: fields.update(layer_quant_config={"*q_proj": {}}),
    "rounded but not packed": lambda fields: fields["export"].update(weight_format="fake_quantized"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_other_folders_are_refused(said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed is quark"):
        load_quark(BASE)
    save_quark(packed_model("mxfp6_e2m3"), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    CHANGES[said](fields["quantization_config"])
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=said):
        load_quark(tmp_path)

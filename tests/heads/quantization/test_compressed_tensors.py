"""compressed-tensors' folders: what we write it reads, and what it wrote we read, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import heads
from heads.quantization.foreign.compressed_tensors import (
    LAYOUTS,
    load_compressed_tensors,
    save_compressed_tensors,
)
from heads.quantization.linear import MXLinear

BASE = ROOT / "checkpoints" / "demo" / "base"
NAME = "model.layers.3.mlp.down_proj"
BITS = {"mxfp4_e2m1": 4, "mxfp6_e2m3": 6, "mxfp8_e4m3": 8}


def packed_model(format: str) -> Any:
    config = heads.MXConfig(format, scale_rule="compressed-tensors" if format in LAYOUTS else "floor")
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, quantization_config=config)


@pytest.mark.parametrize("format", LAYOUTS)
def test_its_decompressor_reads_our_folder(format: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = packed_model(format)
    save_compressed_tensors(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(fields).config_groups["group_0"]
    state = {
        key: stored[f"{NAME}.{key}"] for key in ("weight", "weight_packed", "weight_scale") if f"{NAME}.{key}" in stored
    }
    theirs = BaseCompressor.get_value_from_registry(LAYOUTS[format]).decompress(state, scheme)["weight"]
    ours = model.get_submodule(NAME).unpacked(torch.float32).weight
    assert torch.equal(theirs.float(), ours)
    assert fields["ignore"] == ["lm_head"]
    assert "lm_head.weight" not in stored  # tied


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_folder_comes_back_byte_for_byte(format: str, tmp_path: Path) -> None:
    model = packed_model(format)
    save_compressed_tensors(model, tmp_path / "one")
    again = load_compressed_tensors(tmp_path / "one", dtype=torch.float32)
    assert isinstance(again.get_submodule(NAME), MXLinear)
    tokens = torch.arange(9)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    save_compressed_tensors(again, tmp_path / "two")
    one, two = ((tmp_path / part / "model.safetensors").read_bytes() for part in ("one", "two"))
    assert one == two
    first, second = (json.loads((tmp_path / part / "config.json").read_text()) for part in ("one", "two"))
    assert first["quantization_config"] == second["quantization_config"]


def test_transformers_reads_our_folder(tmp_path: Path) -> None:
    model = packed_model("mxfp6_e2m3")
    save_compressed_tensors(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(theirs.config.quantization_config).__name__ == "CompressedTensorsConfig"
    tokens = torch.arange(9)[None]
    found, wanted = theirs(tokens).logits.float(), model(tokens).logits
    assert (found - wanted).norm() < 0.03 * wanted.norm()  # bfloat16, 8 bits: of 0.4 % for each of 8 layers


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compressed-tensors has mxfp4_e2m1"):
        save_compressed_tensors(packed_model("mxint8"), tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed are compressed-tensors"):
        load_compressed_tensors(BASE)
    save_compressed_tensors(packed_model("mxfp4_e2m1"), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="quantises activations"):
        load_compressed_tensors(tmp_path)

"""A backbone with packed weights, through `from_pretrained`, `save_pretrained` and every way to decode.

Texts are compared in float64, where any difference is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from safetensors import safe_open
from tiny import tiny_model
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

import heads
from heads.backbone.compiling.graph import what_stops_compiling
from heads.backbone.model import Backbone
from heads.quantization.codec import pack, unpack
from heads.quantization.formats import find_format
from heads.quantization.linear import MXLinear
from heads.quantization.quantizer import METHOD, linear_layers

DEMO = ROOT / "checkpoints" / "demo"
PROMPT = torch.arange(24)[None] * 13


def load(folder: Any, config: heads.MXConfig | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    if config is not None:  # None would take the place of what config.json says
        options["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


@pytest.fixture(scope="module")
def packed() -> Any:
    return load(DEMO / "base", heads.MXConfig("mxfp6_e2m3"))


def greedy(model: Any, decoding: Any = None, **options: Any) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False, custom_generate=decoding, **options)[0].tolist()


def test_all_linear_layers_but_the_unembedding_are_packed(packed: Any) -> None:
    layers = [name for name, module in packed.named_modules() if isinstance(module, MXLinear)]
    assert len(layers) == 8 * 7
    assert [name for name, _ in linear_layers(packed)] == ["lm_head"]
    plain = load(DEMO / "base")
    for name in layers[:7]:
        weight = plain.get_submodule(name).weight.detach()
        expected = unpack(pack(weight, find_format("mxfp6_e2m3")), find_format("mxfp6_e2m3"))
        assert torch.equal(packed.get_submodule(name).unpacked(torch.float32).weight, expected)


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxfp6_e2m3", "mxint8"])
def test_a_saved_folder_loads_without_the_original(name: str, tmp_path: Path) -> None:
    model = load(DEMO / "base", heads.MXConfig(name, skip=["down_proj"]))
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load(tmp_path)
    assert isinstance(again.model.layers[0].mlp.up_proj, MXLinear)
    assert type(again.model.layers[0].mlp.down_proj) is torch.nn.Linear
    for (one, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert one == other
        assert torch.equal(a, b)
    assert stored_bits(tmp_path, "up_proj") == find_format(name).bits_per_weight


def stored_bits(folder: Path, layer: str) -> float:
    """Bits a weight of these layers in the files."""
    size = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            size += sum(file.get_tensor(key).nbytes for key in file.keys() if f"{layer}.weight" in key)  # noqa: SIM118
    return 8 * size / (8 * 192 * 512)


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxint8"])
def test_without_our_quantizer_a_folder_is_an_error(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    load(DEMO / "base", heads.MXConfig(name)).save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["grounded", "medusa", "gru", "eagle"])
def test_greedy_text_with_heads_is_plain_generation_s(packed: Any, family: str) -> None:
    token_heads = heads.load(DEMO / family, packed)
    assert greedy(packed, heads.TreeDecoding(token_heads)) == greedy(packed)


@pytest.mark.parametrize(("family", "config"), [("dynamo", {}), ("grounded", {"prefix_layers": 1})])
def test_heads_with_layers_train_plain_copies_of_packed_ones(packed: Any, family: str, config: Any) -> None:
    token_heads = heads.create(family, packed, num_heads=2, **config).double()
    assert not any(isinstance(module, MXLinear) for module in token_heads.modules())
    assert all(p.is_floating_point() and p.requires_grad for p in token_heads.parameters())
    assert greedy(packed, heads.TreeDecoding(token_heads)) == greedy(packed)


def test_a_packed_draft_model_and_a_packed_backbone(packed: Any) -> None:
    draft = load(DEMO / "draft", heads.MXConfig("mxfp4_e2m1"))
    assert greedy(packed, heads.DraftModelDecoding(draft, k=3)) == greedy(packed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_passes_write_the_same_text(dtype: torch.dtype, captured: None, tmp_path: Path) -> None:
    """Each product is one node of the graph; in float32 it is the kernel's."""
    tiny_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    model = load(tmp_path, heads.MXConfig("mxfp6_e2m3"), dtype)
    token_heads = heads.create("medusa", model, num_heads=2)
    decoding = heads.TreeDecoding(token_heads, tree=[[0], [0, 0], [1]], lookup=0, compile=True)
    prompt, room = torch.arange(1, 9)[None], {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    compiled = model.generate(prompt, custom_generate=decoding, **room)
    assert decoding.backbone.compile_seconds
    assert torch.equal(compiled, model.generate(prompt, **room))


def test_compiled_passes_of_other_quantizers_are_refused(packed: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(packed.hf_quantizer.quantization_config, "quant_method", "bitsandbytes")
    assert what_stops_compiling(Backbone(packed)).startswith("the backbone is quantised, and not in a microscaling")


def test_dequantize_gives_plain_layers_with_the_same_logits(packed: Any) -> None:
    model = load(DEMO / "base", heads.MXConfig("mxfp6_e2m3"))
    plain = model.dequantize(torch.float64)
    assert not any(isinstance(module, MXLinear) for module in plain.modules())
    assert torch.equal(plain(PROMPT).logits, packed(PROMPT).logits)


def test_dequantize_gives_all_weights_the_dtype_that_was_asked_for() -> None:
    plain = load(DEMO / "base", heads.MXConfig("mxfp6_e2m3"), torch.bfloat16).dequantize(torch.float32)
    assert plain(PROMPT).logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": "fp6"}, "is no microscaling format"),
        ({"block_size": 16}, "blocks of 32"),
        ({"version": 2}, "reads version 1"),
        ({"skips": ["lm_head"]}, "no field of MXConfig"),
        ({"skip": "lm_head"}, "lists of names"),
        ({"skip": ["("]}, "is no regular expression"),
        ({"format": "mxint8", "scale_rule": "compressed-tensors"}, "it is defined for"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        heads.MXConfig(**fields)


def test_a_folder_of_another_block_size_is_refused(packed: Any, tmp_path: Path) -> None:
    packed.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["block_size"] = 64
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="block_size=64"):
        load(tmp_path)


def test_layers_whose_inputs_do_not_fill_blocks_are_named(tmp_path: Path) -> None:
    from tiny import tiny_model

    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"down_proj has 48 inputs.*skip=\['down_proj'\]"):
        load(tmp_path, heads.MXConfig("mxint8"))
    assert isinstance(
        load(tmp_path, heads.MXConfig("mxint8", skip=["down_proj"])).model.layers[0].mlp.up_proj, MXLinear
    )


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=29)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no linear layers to pack"):
        load(tmp_path, heads.MXConfig("mxint8"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = load(DEMO / "base", dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight: a weight that is not finite"):
        load(tmp_path, heads.MXConfig("mxint8"))


def test_packed_layers_stay_packed_where_a_device_map_places_them() -> None:
    model = load(DEMO / "base", heads.MXConfig("mxfp4_e2m1"), device_map={"": "cpu"})
    assert isinstance(model.model.layers[0].mlp.up_proj, MXLinear)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_name_in_skip_that_no_module_has_is_an_error():
    with pytest.raises(ValueError, match=r"skip='down_pro' was given, which names no module .* down_proj, gate_proj"):
        load(DEMO / "base", heads.MXConfig("mxint8", skip=["down_pro"]))

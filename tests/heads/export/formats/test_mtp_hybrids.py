"""Modules of hybrid backbones: a Qwen3-Next or Qwen3.5 folder is read, gives its logits, and is written back."""

from __future__ import annotations

import copy

import pytest
import torch
from family_checks import check_greedy, teacher_forced_logits
from safetensors.torch import load_file, save_file
from tiny import random_tokens, tiny_model

from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

PARTS = {"fc": (1, 2), "norm": (1,), "pre_fc_norm_embedding": (1,), "pre_fc_norm_hidden": (1,)}


def write_folder(folder, model):
    """The model's folder with one module: the layer is like the last full one, all of it random."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(1)
    layer = f"model.layers.{model.config.num_hidden_layers - 1}."
    module = {key.replace(layer, "mtp.layers.0."): tensor for key, tensor in tensors.items() if key.startswith(layer)}
    width = model.config.hidden_size
    for name, shape in PARTS.items():
        module[f"mtp.{name}.weight"] = torch.zeros([width * size for size in shape], dtype=torch.float64)
    for name, tensor in module.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        module[name] = tensor + noise / tensor.shape[-1] ** 0.5
    save_file(tensors | module, path, metadata={"format": "pt"})
    return module


def with_fused_experts(tensors):
    """Files have a tensor for each expert, the class of transformers one for all."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name or not name.endswith(".weight")}
    count = len({name.split(".")[2] for name in tensors if name not in found})
    parts = {
        part: [tensors[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(count)] for part in ("gate", "up", "down")
    }
    if count:
        found["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat(p) for p in zip(parts["gate"], parts["up"], strict=True)]
        )
        found["mlp.experts.down_proj"] = torch.stack(parts["down"])
    return found


@torch.no_grad()
def restated_logits(model, module, tokens_1T):
    """(1, T - 1, V) of one module along a text: a full layer over the next token's embedding and the state."""
    hidden_1TD = model.model(tokens_1T, use_cache=False).last_hidden_state[:, :-1]
    embedded_1TD = model.get_input_embeddings()(tokens_1T[:, 1:])
    layer, start = copy.deepcopy(model.model.layers[-1]), "mtp.layers.0."
    tensors = {name.removeprefix(start): x for name, x in module.items() if name.startswith(start)}
    layer.load_state_dict(with_fused_experts(tensors))

    def norm(x, name):
        scale = 1 + module[f"mtp.{name}.weight"]  # zero-centred
        return x * (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt() * scale

    both = torch.cat([norm(embedded_1TD, "pre_fc_norm_embedding"), norm(hidden_1TD, "pre_fc_norm_hidden")], dim=-1)
    length = both.shape[1]
    positions_1T = torch.arange(length)[None]
    mask = torch.full((1, 1, length, length), -torch.inf, dtype=torch.float64).triu(1)
    x = both @ module["mtp.fc.weight"].T
    out = layer(x, position_embeddings=model.model.rotary_emb(x, positions_1T), attention_mask=mask)
    return model.lm_head(norm(out[0] if isinstance(out, tuple) else out, "norm"))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_module_is_read_decodes_and_is_written_back(name, tmp_path):
    model = tiny_model(name, attn="sdpa")
    module = write_folder(tmp_path / "model", model)
    assert recognise(tmp_path / "model") == "mtp"
    token_heads = import_heads(tmp_path / "model", model)
    for ours, theirs in (("eh_proj", "fc"), ("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden")):
        assert torch.equal(getattr(token_heads.layers[0], ours).weight, module[f"mtp.{theirs}.weight"])
    tokens_1T = random_tokens(1, 12, seed=3)
    (found, *_), _ = teacher_forced_logits(token_heads, tokens_1T)
    wanted = restated_logits(model, module, tokens_1T)[0, : len(found)]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)  # cosines are float32
    export_heads(token_heads, "mtp", tmp_path / "same", model=str(tmp_path / "model"))
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("model", "same")]
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    check_greedy(token_heads, steps=4)
    export_heads(token_heads, "mtp", tmp_path / "trained", model=str(tmp_path / "model"))
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert {key for key, tensor in files[0].items() if not torch.equal(tensor, after[key])} == set(module)

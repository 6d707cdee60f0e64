"""Hydra's folders, built from the documented names and held against a plain restatement of its modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_greedy
from throwaway_families import make_heads
from tiny import shared_model
from torch import nn
from transformers import LlamaModel

import heads
from heads.backbone.model import Backbone
from heads.export.drafted_logits import drafted_logits
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

HEADS, LAYERS = 3, 3


class ResBlock(nn.Module):
    """As hydra_heads/mlp_head.py has it."""

    def __init__(self, width: int, read: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width * (read + 1), width)
        self.res_connection = nn.Linear(width * (read + 1), width) if read else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Hydra(nn.Module):
    """HydraMLP and HydraPrefixMLP; their state_dict has the names of the released files."""

    def __init__(self, model: Any, arch: str) -> None:
        super().__init__()
        width, vocab = model.config.hidden_size, model.config.vocab_size
        self.input_embed_fn, self.arch = model.model.embed_tokens, arch
        dropout = [nn.Dropout(0.0)] if arch == "prefix-mlp" else []
        if dropout:
            fields = model.config.to_dict() | {"num_hidden_layers": 1}
            # eager attention rounds its softmax to float32
            config = type(model.config).from_dict(fields, attn_implementation="sdpa")
            self.prefix_embeding_layer = LlamaModel(config)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*dropout, ResBlock(width, k), *([*dropout, ResBlock(width)] * (LAYERS - 1)))
            for k in range(1, HEADS + 1)
        )
        unembeddings = [nn.Linear(width, vocab) for _ in range(HEADS)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*dropout, one) if dropout else one for one in unembeddings)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        if self.arch == "prefix-mlp":
            hidden = self.prefix_embeding_layer(inputs_embeds=hidden).last_hidden_state
        embeds, inputs, found = self.input_embed_fn(tokens), [hidden], []
        for i in range(HEADS):
            inputs.append(torch.roll(embeds, shifts=-(i + 1), dims=1))
            found.append(self.hydra_lm_head[i](self.hydra_mlp[i](torch.cat(inputs, dim=-1))))
        return found


def released(folder: Path, model: Any, arch: str, offset: int = 0) -> Hydra:
    torch.manual_seed(7)
    original = Hydra(model, arch).double().eval()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(original.state_dict(), folder / "hydra_lm_head.pt")
    config = {
        "hydra_num_heads": HEADS,
        "hydra_num_layers": LAYERS,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": offset,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return original


def draft_texts(backbone: Backbone) -> torch.Tensor:
    """The texts that `drafted_logits` drafts after, with the tokens that it drafts along."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(backbone.vocab_size, (2, 12 + HEADS), generator=generator)


@pytest.mark.parametrize(("arch", "offset"), [("mlp", 0), ("mlp", 2), ("prefix-mlp", 0), ("prefix-mlp", 1)])
def test_a_released_folder_gives_its_logits_and_decodes(arch, offset, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    original = released(tmp_path, model, arch, offset)
    assert recognise(tmp_path) == "hydra"
    token_heads = import_heads(tmp_path, model)
    tokens_BT = draft_texts(token_heads.backbone)
    with torch.no_grad():
        states = model.model(tokens_BT, output_hidden_states=True).hidden_states
        wanted = original(states[-(offset + 1)], tokens_BT)
        for one, other in zip(drafted_logits(token_heads), wanted, strict=True):
            # float64 sums in another order
            torch.testing.assert_close(one, other[:, 11], atol=1e-9, rtol=0.0)
    repeated = [block.linear.weight for block in token_heads.bodies[0].rest]
    assert torch.equal(*repeated)
    assert repeated[0] is not repeated[1]
    check_greedy(token_heads, steps=5)  # trained further, then plain generation's text


@pytest.mark.parametrize("prefix", [False, True])
def test_what_is_written_loads_into_hydras_modules(prefix, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    options = {"prefix_layers": 1, "prefix_norm": True, "biases": True} if prefix else {}
    token_heads = make_heads("grounded", Backbone(model), num_hidden_layers=3, normalize_embeddings=False, **options)
    for body in token_heads.bodies:
        body.rest[1].load_state_dict(body.rest[0].state_dict())
    said = export_heads(token_heads, "hydra", tmp_path / "out")
    assert "the same logits" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hydra_num_layers"], config["hydra_head_arch"]) == (LAYERS, "prefix-mlp" if prefix else "mlp")
    original = Hydra(model, config["hydra_head_arch"]).double().eval()
    tensors = torch.load(tmp_path / "out" / "hydra_lm_head.pt", weights_only=True)
    missing, unexpected = original.load_state_dict(tensors, strict=False)
    copies = {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    assert set(missing) <= copies  # the code fills them from the backbone, or never reads them
    assert unexpected == []
    tokens_BT = draft_texts(token_heads.backbone)
    with torch.no_grad():
        wanted = original(model.model(tokens_BT).last_hidden_state, tokens_BT)
        for one, other in zip(drafted_logits(token_heads), wanted, strict=True):
            torch.testing.assert_close(one, other[:, 11], atol=1e-9, rtol=0.0)


def test_float32_heads_without_biases_come_back_within_rounding(tmp_path):
    backbone = Backbone(shared_model("llama", "sdpa", torch.float32))
    token_heads = make_heads("grounded", backbone, normalize_embeddings=False)
    assert "3 heads, the same logits" in export_heads(token_heads, "hydra", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "normalize_embeddings=True"),
        ({"hidden_width": 16}, "hidden_width=16"),
        ({"unembedding": "shared"}, "unembedding='shared'"),
        ({"prefix_layers": 1}, "a prefix layer without prefix_norm"),
        ({"hidden_offset": 1}, "hidden_offset without raw_hidden_states"),
        ({"normalize_embeddings": False, "num_hidden_layers": 3}, "repeats one block"),
        ({"normalize_embeddings": False, "draft_tokens": [3, 4, 5]}, "a draft vocabulary"),
    ],
)
def test_what_the_format_cannot_say_is_refused(options, said, tmp_path):
    token_heads = make_heads("grounded", Backbone(shared_model("llama", "sdpa", torch.float64)), **options)
    with pytest.raises(ValueError, match=said):
        export_heads(token_heads, "hydra", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_prefix_layer_of_another_class_is_refused(tmp_path):
    options = {"prefix_layers": 1, "prefix_norm": True, "normalize_embeddings": False}
    token_heads = make_heads("grounded", Backbone(shared_model("qwen3", "sdpa", torch.float64)), **options)
    with pytest.raises(ValueError, match="Hydra's prefix layer is a LlamaDecoderLayer"):
        export_heads(token_heads, "hydra", tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"grounded_heads": False}, "grounded_heads False"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn'"),
        ({"hydra_num_layers": 2}, "hydra_mlp.0.2.linear.weight"),
        ({"hydra_num_heads": 4}, "missing bodies.3"),
        ({"hidden_state_offset": 9}, "hidden_offset=9"),
        ({"hydra_num_heads": "3"}, "allowed are integers"),
    ],
)
def test_bad_folders_are_refused_with_the_reason(changed, said, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    released(tmp_path, model, "mlp")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, model)


def test_heads_of_another_backbone_are_refused(tmp_path):
    released(tmp_path, shared_model("llama", "sdpa", torch.float64), "mlp")
    with pytest.raises(ValueError, match="has another one"):
        import_heads(tmp_path, shared_model("llama", "sdpa", torch.float64, 1))


def test_two_formats_in_one_folder_are_not_guessed(tmp_path):
    released(tmp_path, shared_model("llama", "sdpa", torch.float64), "mlp")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3}))
    with pytest.raises(ValueError, match="of hydra and medusa; give --from"):
        import_heads(tmp_path, shared_model("llama", "sdpa", torch.float64))


def test_biases_and_the_second_norm_are_named_where_they_cannot_be():
    with pytest.raises(ValueError, match="prefix_norm=True was given without a prefix layer"):
        heads.create("grounded", shared_model("llama"), prefix_norm=True)

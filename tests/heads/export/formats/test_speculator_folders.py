"""IBM's speculators, built from the documented names and held against a plain restatement of their mathematics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_greedy
from safetensors.torch import load_file, save_file
from throwaway_families import make_heads
from tiny import shared_model

from heads.backbone.model import Backbone
from heads.export.drafted_logits import drafted_logits
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

HEADS, INNER = 3, 20
FLAGS = [(False, False), (False, True), (True, False), (True, True)]


def place(kind: str, k: int, tied: bool) -> int:
    return k if not tied else min(k, 1) if kind == "proj" else 0


def released(folder: Path, model: Any, tied: bool, scaled: bool, *, aliases: bool = False) -> dict[str, torch.Tensor]:
    """A folder as IBM's training writes it; with `aliases` shared tensors lie in it under each of their names."""
    width, vocab = model.config.hidden_size, model.config.vocab_size
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for k in range(HEADS):
        shapes = {"emb": (vocab, INNER), "proj": (INNER, INNER if k else width), "head": (vocab, INNER)}
        shapes |= {"ln": (INNER,), "ln_bias": (INNER,)}
        for kind, shape in shapes.items():
            part = "bias" if kind == "ln_bias" else "weight"
            kind = kind.removesuffix("_bias")
            first = f"speculator.{kind}.{place(kind, k, tied)}.{part}"
            if first not in tensors:
                tensors[first] = torch.randn(shape, generator=generator, dtype=torch.float64)
            if aliases:
                tensors[f"speculator.{kind}.{k}.{part}"] = tensors[first].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": width,
        "inner_dim": INNER,
        "n_predict": HEADS,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def restated(tensors: dict, tied: bool, scaled: bool, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """logits of each head along the tokens (B, K), as fms_extras/models/speculator.py computes them."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def of(kind: str, k: int, part: str = "weight") -> torch.Tensor:
        return tensors[f"speculator.{kind}.{place(kind, k, tied)}.{part}"]

    state_weight = 0.5 ** (0.5 / HEADS)
    emb_weight = math.sqrt(1 - state_weight**2)
    state = normed(hidden) / 2**0.5 if scaled else hidden
    found = []
    for k in range(HEADS):
        z = of("emb", k)[tokens[:, k]] * (emb_weight * math.sqrt(INNER / 2))
        state = state @ of("proj", k).T * state_weight + z
        state = of("ln", k) * normed(state) + of("ln", k, "bias")
        state = 0.5 * state * (1 + torch.erf(state / 2**0.5))
        found.append(state @ of("head", k).T)
    return found


def check_logits(token_heads: Any, tensors: dict, tied: bool, scaled: bool) -> None:
    backbone = token_heads.backbone
    tokens_BT = torch.randint(backbone.vocab_size, (2, 12 + HEADS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = backbone.model.model(tokens_BT[:, :12]).last_hidden_state[:, -1]
        wanted = restated(tensors, tied, scaled, hidden, tokens_BT[:, 12:])
        for one, other in zip(drafted_logits(token_heads), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0.0)  # float64


@pytest.mark.parametrize("aliases", [False, True])
@pytest.mark.parametrize(("tied", "scaled"), FLAGS)
def test_a_released_folder_gives_its_logits(tied, scaled, aliases, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    tensors = released(tmp_path, model, tied, scaled, aliases=aliases)
    assert recognise(tmp_path) == "mlp-speculator"
    check_logits(import_heads(tmp_path, model), tensors, tied, scaled)


@pytest.mark.parametrize("tied", [False, True])
def test_it_decodes_and_can_be_trained_further(tied, tmp_path):
    released(tmp_path, shared_model("llama", "sdpa", torch.float64), tied, True)
    stats = check_greedy(import_heads(tmp_path, shared_model("llama", "sdpa", torch.float64)))
    assert stats.tokens_per_pass > 1


@pytest.mark.parametrize(("tied", "scaled"), FLAGS)
def test_what_is_written_has_the_documented_names_and_logits(tied, scaled, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    options = {"inner_width": INNER, "tie_weights": tied, "scale_input": scaled}
    token_heads = make_heads("mlp_speculator", Backbone(model), num_heads=HEADS, **options)
    assert "bit for bit" in export_heads(token_heads, "mlp-speculator", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == released(tmp_path / "like", model, tied, scaled).keys()
    check_logits(token_heads, tensors, tied, scaled)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(config["top_k_tokens_per_head"]) == config["n_predict"] == HEADS
    assert config | json.loads((tmp_path / "like" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"emb_dim": 64}, "emb_dim 64"),
        ({"n_predict": 4}, "missing embeddings.3"),
        ({"n_predict": 0}, "allowed are integers from 1"),
        ({"inner_dim": 24}, "has shape"),
        ({"tie_weights": "yes"}, "allowed are true and false"),
        ({"tie_weights": True}, "differ"),
        ({"model_type": "llama"}, "no model_type mlp_speculator"),
    ],
)
def test_bad_folders_are_refused_with_the_reason(changed, said, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    released(tmp_path, model, False, False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, model, "mlp-speculator")


def test_a_stray_tensor_is_an_error_with_its_name(tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    tensors = released(tmp_path, model, False, False)
    save_file(tensors | {"speculator.ln0.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"speculator\.ln0\.weight"):
        import_heads(tmp_path, model)


def test_what_the_format_cannot_say_is_refused(tmp_path):
    backbone = Backbone(shared_model("llama", "sdpa", torch.float64))
    with pytest.raises(ValueError, match="draft vocabulary"):
        export_heads(make_heads("mlp_speculator", backbone, draft_tokens=[3, 4, 5]), "mlp-speculator", tmp_path / "a")
    with pytest.raises(ValueError, match="gru heads were given"):
        export_heads(make_heads("gru", backbone), "mlp-speculator", tmp_path / "a")
    other = Backbone(shared_model("gemma2", "eager", torch.float64))
    with pytest.raises(ValueError, match="scales, caps or shifts"):
        export_heads(make_heads("mlp_speculator", other), "mlp-speculator", tmp_path / "a")

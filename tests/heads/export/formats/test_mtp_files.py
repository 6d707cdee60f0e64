"""Modules of released models read from their files: logits and drafts are those of transformers' `MtpModel`."""

from __future__ import annotations

import json

import pytest
import torch
from family_checks import check_greedy, prefilled, teacher_forced_logits
from mtp_checkpoints import CONFIGS, PARTS, foreign_tensors, model_with_modules, roots, write_model
from safetensors.torch import load_file, save_file
from tiny import random_tokens
from transformers.cache_utils import MtpCache

import heads
from heads.backbone.model import Backbone
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import mtp, recognise

TOLERANCE = 1e-5  # transformers turns the same rows by one more position, and its cosines are float32
CASES = [
    ("glm4_moe", 1),
    ("glm4_moe", 2),
    ("deepseek_v3", 1),
    ("deepseek_v3", 3),
    ("qwen_like", 1),
    ("mellum", 1),
    ("mimo_like", 1),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory):
    name, count = request.param
    model, modules = model_with_modules(name, count)
    if name == "mimo_like":
        modules.config.mtp_hidden_states_first = True
    folder = write_model(tmp_path_factory.mktemp(name), name, model, modules)
    return name, count, model, modules, folder


def test_logits_along_a_text_are_those_of_transformers(case):
    """Module after module over the rows that have their token; MiMo's first embedding is blank."""
    name, count, model, modules, folder = case
    token_heads = import_heads(folder, model)
    assert token_heads.family == "mtp"
    assert token_heads.config.modules == ("one" if count == 1 else "per_head")
    tokens_BT = random_tokens(1, 12, seed=3)
    found, taps = teacher_forced_logits(token_heads, tokens_BT)
    hidden_BTD, cache = taps[token_heads.hidden_taps[0]], MtpCache(config=modules.config)
    for k in range(1, count + 1):
        rows = 12 - k
        embedded = model.get_input_embeddings()(tokens_BT[:, k:]).clone()
        if name == "mimo_like":
            embedded[:, 0] = 0.0
        positions_BT = torch.arange(k, 12)[None]
        with torch.no_grad():
            hidden_BTD = modules.forward_layer(k - 1, hidden_BTD[:, :rows], positions_BT, cache, inputs_embeds=embedded)
            wanted = model.lm_head(hidden_BTD[0, : rows - 1])
        torch.testing.assert_close(found[k - 1], wanted, atol=TOLERANCE, rtol=0.0)


def test_a_chain_drafts_what_transformers_drafts(case):
    name, count, model, modules, folder = case
    if name == "mimo_like":
        pytest.skip("transformers blanks no embedding and reads no state before the norm")
    token_heads = import_heads(folder, model)
    tokens_BT = random_tokens(1, 9, seed=4)
    with torch.no_grad():
        hidden_BTD = model.model(tokens_BT[:, :-1], use_cache=False).last_hidden_state
        positions_BT = torch.arange(1, 9)[None]
        drafted, _, _ = modules(tokens_BT[:, 1:], hidden_BTD, None, positions_BT, MtpCache(config=modules.config))
        _, state = prefilled(token_heads, tokens_BT[:, :-1].tolist())
        level, token_1, row_1 = token_heads.first_level(state), tokens_BT[:, -1], torch.arange(1)
        for k in range(1, count + 1):
            hidden_1D, level = token_heads.step(k, level, token_1, row_1)
            token_1 = token_heads.projection(k)(hidden_1D).argmax(dim=-1)
            assert token_1.item() == drafted[0, k - 1].item()


def test_greedy_text_is_generates(case):
    check_greedy(import_heads(case[4], case[2]), steps=4)


def test_heads_without_a_change_give_the_same_files(case, tmp_path):
    name, _, model, _, folder = case
    assert recognise(folder) == "mtp"
    said = export_heads(import_heads(folder, model), "mtp", tmp_path / "out", model=str(folder))
    assert "the same logits bit for bit" in said
    for path in folder.iterdir():
        written = tmp_path / "out" / path.name
        if path.suffix == ".safetensors":
            before, after = load_file(path), load_file(written)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before), name
        else:
            assert written.read_bytes() == path.read_bytes()


def test_trained_heads_change_the_modules_alone(case, tmp_path):
    name, _, model, modules, folder = case
    token_heads = import_heads(folder, model)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.mul_(1.5)
    export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = ("e_score_correction_bias", "embed_tokens.weight", "shared_head.head.weight")
    own = {key for key in foreign_tensors(name, model, modules) if not key.endswith(kept)}
    assert {key for key in before if not torch.equal(before[key], after[key])} == own
    again = import_heads(tmp_path / "out", model).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in token_heads.state_dict().items())


def test_rounding_to_the_files_is_told_from_other_logits(tmp_path, monkeypatch):
    """Heads in float64 beside a model's files in bfloat16."""
    model, modules = model_with_modules("glm4_moe", 2)
    folder = write_model(tmp_path / "model", "glm4_moe", model.bfloat16(), modules.bfloat16())
    token_heads = import_heads(folder, model.double())
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.mul_(1.01)
    before = {name: tensor.clone() for name, tensor in token_heads.state_dict().items()}
    said = export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    assert "the rounding of the model's files" in said
    assert all(torch.equal(tensor, before[name]) for name, tensor in token_heads.state_dict().items())
    right = mtp.read_modules

    def wrong(*given):
        found = right(*given)
        found.layers[1].eh_proj.weight.data.mul_(1.01)
        return found

    monkeypatch.setattr(mtp, "read_modules", wrong)
    with pytest.raises(ValueError, match=r"which the dtypes of .* do not explain"):
        export_heads(token_heads, "mtp", tmp_path / "other", model=str(folder))
    assert all(torch.equal(tensor, before[name]) for name, tensor in token_heads.state_dict().items())
    assert not (tmp_path / "other").exists()


def test_shards_without_modules_are_copied_as_they_are(tmp_path):
    model, modules = model_with_modules("qwen_like")
    folder = write_model(tmp_path / "model", "qwen_like", model, modules, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    token_heads = import_heads(folder, model)
    with torch.no_grad():
        token_heads.layers[0].eh_proj.weight.zero_()
    export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    changed = [p.name for p in folder.iterdir() if p.read_bytes() != (tmp_path / "out" / p.name).read_bytes()]
    assert changed == [sorted(folder.glob("*.safetensors"))[-1].name]


def test_modules_have_the_attention_that_the_config_gives_them(tmp_path):
    """Mellum's module slides where its last layer does not; nothing else says so."""
    model, modules = model_with_modules("mellum")
    folder = write_model(tmp_path / "model", "mellum", model, modules)
    assert import_heads(folder, model).config.attention == "sliding"
    assert import_heads(folder, model).layers[0].mtp_block.self_attn.sliding_window == 4
    with pytest.raises(ValueError, match="'attention': 'last'"):
        export_heads(heads.create("mtp", model), "mtp", tmp_path / "out", model=str(folder))
    model.config.mtp_layer_types = ["full_attention"]
    assert import_heads(folder, model).config.attention == "last"
    model.config.mtp_layer_types = ["chunked_attention"]
    with pytest.raises(ValueError, match="gives its modules chunked_attention, and its layers have full_attention and"):
        import_heads(folder, model)
    with pytest.raises(ValueError, match=r"sliding attention were asked for, and .* has no such layers"):
        heads.create("mtp", model_with_modules("qwen_like")[0], attention="sliding")


def test_native_folders_hold_imported_heads(tmp_path):
    model, modules = model_with_modules("glm4_moe", 2)
    folder = write_model(tmp_path / "model", "glm4_moe", model, modules)
    token_heads = import_heads(folder, model)
    heads.save(token_heads, tmp_path / "heads")
    again = heads.load(tmp_path / "heads", model).state_dict()
    for key, tensor in token_heads.state_dict().items():
        torch.testing.assert_close(again[key], tensor, atol=1e-6, rtol=0.0)  # files of heads hold float32


# --- refused ---------------------------------------------------------------------------------------------------------


def spoil(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


ROOT = roots("glm4_moe", 0, 3)[0]
BAD = {
    "a scale of quantised weights": (
        lambda t: t.update({f"{ROOT}eh_proj.weight_scale_inv": torch.ones(1)}),
        "is float64 beside scale_inv",
    ),
    "a scale of nothing": (lambda t: t.update({f"{ROOT}other.weight_scale_inv": torch.ones(1)}), "No place"),
    "codes without scales": (
        lambda t: t.update({f"{ROOT}eh_proj.weight": t[f"{ROOT}eh_proj.weight"].to(torch.float8_e4m3fn)}),
        "is float8_e4m3fn without scale_inv",
    ),
    "integers": (lambda t: t.update({f"{ROOT}eh_proj.weight": t[f"{ROOT}eh_proj.weight"].char()}), "is int8 without"),
    "no finite floats": (lambda t: t[f"{ROOT}enorm.weight"].fill_(float("nan")), "no finite floats"),
    "a part is missing": (lambda t: t.pop(f"{ROOT}hnorm.weight"), "missing are layers.0.hnorm.weight"),
    "an expert is missing": (lambda t: t.pop(f"{ROOT}mlp.experts.2.up_proj.weight"), "missing are experts"),
    "an expert too many": (
        lambda t: t.update({f"{ROOT}mlp.experts.9.up_proj.weight": torch.ones(16, 32)}),
        r"No place .*experts\.9",
    ),
    "another size": (lambda t: t.update({f"{ROOT}enorm.weight": torch.ones(32, 1)}), "of shape"),
    "another unembedding": (lambda t: t[f"{ROOT}shared_head.head.weight"].add_(1), "is not the backbone's unembedding"),
    "no module": (lambda t: [t.pop(key) for key in list(t) if key.startswith(ROOT)], "no multi-token-prediction"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_by_name(kind, tmp_path):
    model, modules = model_with_modules("glm4_moe")
    folder = write_model(tmp_path / "model", "glm4_moe", model, modules)
    change, said = BAD[kind]
    spoil(folder, change)
    with pytest.raises(ValueError, match=said):
        import_heads(folder, model, "mtp")


def test_an_index_that_leads_out_is_refused(tmp_path):
    model, modules = model_with_modules("qwen_like")
    folder = write_model(tmp_path / "model", "qwen_like", model, modules, max_shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["mtp.fc.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="elsewhere"):
        import_heads(folder, model, "mtp")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {"text_config": "x"}, "text_config that is no object"),
        ("config.json", {"num_hidden_layers": None}, "num_hidden_layers None"),
        ("config.json", {"num_hidden_layers": float("inf")}, "num_hidden_layers inf"),
        ("model.safetensors.index.json", {"weight_map": {"a": ["x"]}}, "no index of tensors"),
    ],
)
def test_configs_and_indices_of_anything_end_in_a_sentence(name, content, said, tmp_path):
    model, modules = model_with_modules("qwen_like")
    folder = write_model(tmp_path / "model", "qwen_like", model, modules)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        import_heads(folder, model, "mtp")
    with pytest.raises(ValueError, match="of no known format"):
        import_heads(folder, model)


def test_links_that_lead_out_of_the_model_are_not_copied(tmp_path):
    model, modules = model_with_modules("qwen_like")
    folder = write_model(tmp_path / "model", "qwen_like", model, modules)
    token_heads = import_heads(folder, model, "mtp")
    (tmp_path / "secret").write_text("secret")
    (folder / "extra.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="leads out of the model's folder"):
        export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    with pytest.raises(ValueError, match="is, holds or lies in"):
        export_heads(token_heads, "mtp", folder / "new", model=str(folder))


def test_heads_that_the_files_cannot_hold_are_refused(tmp_path):
    model, modules = model_with_modules("qwen_like")
    folder = write_model(tmp_path / "model", "qwen_like", model, modules)
    backbone = Backbone(model)
    for family, config, said in (
        ("medusa", {}, "medusa heads were given"),
        ("mtp", {"first": "state"}, "'first': 'state'"),
        ("mtp", {"modules": "per_head", "num_heads": 2}, "fill"),
    ):
        token_heads = heads.create(family, backbone, **config)
        with pytest.raises(ValueError, match=said):
            export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    assert not (tmp_path / "out").exists()


def test_every_layout_has_a_model():
    assert PARTS.keys() == CONFIGS.keys()

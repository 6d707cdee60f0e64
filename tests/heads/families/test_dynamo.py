"""DynaMo heads in every variant: drafting equals training, what they start from, what they own, what they refuse.

The suites of tests/heads/families/test_families.py and tests/heads/decoding hold for the family's default; here for the
rest.
"""

from __future__ import annotations

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, TOLERANCE, backbone_of, drafted, prefilled, teacher_forced
from matrices import covering
from throwaway_families import fit, make_heads
from tiny import ARCHITECTURES, random_tokens, tiny_model

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.checkpoint.adapter import LoraSettings, add_adapter
from heads.families import build_config
from heads.families.dynamo import Heads

NUM_HEADS = 2
VARIANTS = {
    "no layer": {"layers_per_head": 0, "tap": "last", "unembedding": "own"},
    "no layer, penultimate": {"layers_per_head": 0, "unembedding": "own"},
    "two layers": {"layers_per_head": 2},
    "copied": {"start": "copied"},
    "two copied": {"start": "copied", "layers_per_head": 2, "tap": "last"},
    "last": {"tap": "last"},
    "own unembedding": {"unembedding": "own"},
    "lora": {"lora_rank": 4},
    "lora on the last": {"lora_rank": 2, "tap": "last", "unembedding": "own"},
}
ON = ("llama", "gpt_neox", "mistral_windowed", "gemma3")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@covering(variant=[*VARIANTS], name=ON)
def test_teacher_forcing_equals_drafting(variant: str, name: str) -> None:
    """Every position of two packed documents, and a ragged tree pass behind a left-padded prefill."""
    token_heads = make_heads("dynamo", backbone_of(name), num_heads=NUM_HEADS, **VARIANTS[variant])
    tokens_BT = random_tokens(1, 13, seed=11)
    states = teacher_forced(token_heads, tokens_BT, torch.tensor([[0] * 5 + [1] * 8]))
    following = torch.tensor([[3, 4]])  # not read: these heads read no drafted token
    for (b, t), wanted in states[0].items():
        document = tokens_BT[b, (5 if t >= 5 else 0) : t + 1].tolist()
        found = drafted(token_heads, prefilled(token_heads, [document])[1], following)
        assert (found[0][0] - wanted).abs().max() < DEFAULT_TOLERANCE
        if (b, t) in states[1]:
            assert (found[1][0] - states[1][b, t]).abs().max() < DEFAULT_TOLERANCE


@covering(variant=[*VARIANTS], name=["llama", "gpt_neox"])
def test_state_after_a_ragged_commit_equals_a_prefill(variant: str, name: str) -> None:
    token_heads = make_heads("dynamo", backbone_of(name), num_heads=NUM_HEADS, **VARIANTS[variant])
    texts = [random_tokens(7, seed=12).tolist(), random_tokens(4, seed=13).tolist()]
    state, heads_state = prefilled(token_heads, texts)
    tokens_BN = random_tokens(2, 4, seed=14)  # a chain of four
    paths = [[0, 1, 2], [0]]
    with torch.no_grad():
        output = token_heads.backbone.verify(
            state, tokens_BN, torch.arange(4), torch.ones(4, 4, dtype=torch.bool).tril(), taps=token_heads.taps
        )
        plan = CommitPlan.from_paths(paths, "cpu")
        heads_state = token_heads.commit(heads_state, tokens_BN, output.taps, output.positions_BN, plan)
    found = drafted(token_heads, heads_state, torch.tensor([[3, 4], [3, 4]]))
    for row, text in enumerate(texts):
        whole = text + tokens_BN[row, paths[row]].tolist()
        wanted = drafted(token_heads, prefilled(token_heads, [whole])[1], torch.tensor([[3, 4]]))
        for one, other in zip(found, wanted, strict=True):
            assert (one[row] - other[0]).abs().max() < DEFAULT_TOLERANCE


@every_variant
def test_greedy_decoding_is_the_backbones_own(variant: str) -> None:
    token_heads = make_heads("dynamo", backbone_of("llama"), num_heads=NUM_HEADS, seed=1, **VARIANTS[variant])
    fit(token_heads, torch.cat([random_tokens(1, 5, seed=seed) for seed in range(50, 54)]))
    model = token_heads.backbone.model
    prompt = random_tokens(1, 6, seed=50)
    settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    wanted = model.generate(prompt, **settings)
    output = model.generate(
        prompt, **settings, return_dict_in_generate=True, custom_generate=heads.TreeDecoding(token_heads, lookup=0)
    )
    assert torch.equal(output.sequences, wanted)


@every_variant
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_every_variant_loads_back(variant: str, name: str, tmp_path) -> None:
    model = tiny_model(name, attn="sdpa", dtype=torch.float32)
    token_heads = make_heads("dynamo", Backbone(model), num_heads=NUM_HEADS, **VARIANTS[variant])
    heads.save(token_heads, tmp_path)
    loaded = heads.load(tmp_path, model)
    assert loaded.config == token_heads.config
    assert set(loaded.state_dict()) == set(token_heads.state_dict())
    tokens, following = [random_tokens(6, seed=3).tolist()], torch.tensor([[3, 4]])
    steps = [drafted(h, prefilled(h, tokens)[1], following) for h in (token_heads, loaded)]
    for one, other in zip(*steps, strict=True):
        assert torch.equal(one, other)


# --- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_random_start_draws_as_the_backbones_class_does(name: str, tmp_path) -> None:
    """From a model that was loaded from disk, too: what is loaded is marked as initialised."""
    made = tiny_model(name, dtype=torch.float32)
    made.save_pretrained(tmp_path)
    for model in (made, type(made).from_pretrained(tmp_path)):
        token_heads = heads.create("dynamo", model, num_heads=2)
        last = dict(model.get_decoder().layers[-1].named_parameters() if hasattr(model.get_decoder(), "layers") else {})
        last = last or dict(model.get_decoder().h[-1].named_parameters())
        one, two = (dict(layers[0].named_parameters()) for layers in token_heads.layers)
        matrices = [parameter for parameter in last if last[parameter].ndim == 2]
        assert set(one) == set(last)
        for parameter in matrices:
            assert not torch.equal(one[parameter], last[parameter])
            assert not torch.equal(one[parameter], two[parameter])
        drawn = torch.cat([one[parameter].flatten() for parameter in matrices])
        # Thousands of draws: the standard deviation is known to some percent.
        assert drawn.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
        assert abs(drawn.mean().item()) < 0.002
        for parameter in set(last) - set(matrices):  # biases 0, norms 1 (Gemma stores norms less one)
            wanted = 0.0 if parameter.endswith("bias") or name == "gemma" else 1.0
            assert bool((one[parameter] == wanted).all()), parameter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_copied_start_is_the_last_layer(name: str) -> None:
    backbone = backbone_of(name)
    token_heads = heads.create("dynamo", backbone, num_heads=2, start="copied", layers_per_head=2)
    last = dict(backbone.layers[-1].named_parameters())
    for layers in token_heads.layers:
        for layer in layers:
            for parameter, value in layer.named_parameters():
                assert torch.equal(value, last[parameter])
                assert value.data_ptr() != last[parameter].data_ptr()


def predictions(token_heads: Heads) -> list[torch.Tensor]:
    _, state = prefilled(token_heads, [random_tokens(6, seed=21).tolist()])
    found = drafted(token_heads, state, torch.tensor([[3, 4]])[:, : token_heads.num_heads])
    with torch.no_grad():
        return [token_heads.projection(k)(hidden)[0] for k, hidden in enumerate(found, start=1)]


@pytest.mark.parametrize("config", [{"start": "copied"}, {"lora_rank": 4}])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral_windowed"])
def test_copied_layers_and_untrained_loras_start_as_the_backbone(name: str, config: dict) -> None:
    if name in ("codegen", "phi3") and "lora_rank" in config:  # peft names no targets for phi3
        config = {**config, "lora_targets": ["qkv_proj"]}
    backbone = backbone_of(name)
    with torch.no_grad():
        wanted = backbone.model(input_ids=random_tokens(6, seed=21)[None], use_cache=False).logits[0, -1]
    for found in predictions(heads.create("dynamo", backbone, num_heads=2, **config).eval()):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE.get(name, DEFAULT_TOLERANCE) * 10)


def test_a_lora_head_follows_the_backbones_last_layer() -> None:
    """It holds no copy: what changes in the layer changes in the head."""
    backbone = Backbone(tiny_model("llama"))
    token_heads = heads.create("dynamo", backbone, num_heads=1, lora_rank=2).eval()
    before = predictions(token_heads)[0]
    with torch.no_grad():
        backbone.layers[-1].mlp.down_proj.weight.mul_(2.0)
    assert (predictions(token_heads)[0] - before).abs().max() > 0.1


def test_a_backbones_adapter_is_merged_into_copies_and_is_no_part_of_heads() -> None:
    model = tiny_model("llama")
    add_adapter(model, LoraSettings(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    backbone = Backbone(model)
    copied = heads.create("dynamo", backbone, num_heads=1, start="copied").double().eval()
    with torch.no_grad():
        wanted = model(input_ids=random_tokens(6, seed=21)[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(predictions(copied)[0], wanted, rtol=0, atol=1e-8)
    plain = heads.create("dynamo", tiny_model("llama"), num_heads=1)
    for token_heads in (copied, heads.create("dynamo", backbone, num_heads=1)):
        assert set(token_heads.state_dict()) == set(plain.state_dict())
        assert all(parameter.requires_grad for parameter in token_heads.parameters())
    with pytest.raises(ValueError, match="lora_rank=2 was given on a backbone with a LoRA adapter"):
        heads.create("dynamo", backbone, lora_rank=2)


# --- what heads own --------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_nothing_of_the_backbone_is_registered(variant: str, name: str) -> None:
    model = tiny_model(name)
    token_heads = make_heads("dynamo", Backbone(model), num_heads=2, **VARIANTS[variant])
    own = list(token_heads.parameters())
    assert own
    assert len(own) == len({id(p) for p in own}) == len(token_heads.state_dict())
    assert {id(p) for p in own}.isdisjoint(id(p) for p in model.parameters())
    storages = {p.untyped_storage().data_ptr() for p in own}
    assert storages.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())
    assert all(p.requires_grad and p.device.type == "cpu" for p in own)
    if "lora" in variant:
        assert all("lora" in name or "unembeddings" in name for name in token_heads.state_dict())


@every_variant
def test_a_copy_in_another_dtype_decodes(variant: str) -> None:
    token_heads = make_heads("dynamo", Backbone(tiny_model("llama")), num_heads=2, **VARIANTS[variant])
    half = token_heads.float().in_dtype(torch.float64)
    assert half is not token_heads
    assert half.backbone is token_heads.backbone
    assert all(torch.isfinite(logits).all() for logits in predictions(half))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"start": "warm"}, "start='warm' was given; allowed are 'random' and 'copied'"),
        ({"tap": "first"}, "tap='first' was given; allowed are 'penultimate' and 'last'"),
        ({"unembedding": "mine"}, "unembedding='mine' was given; allowed are 'shared' and 'own'"),
        ({"layers_per_head": 0}, "layers_per_head=0 was given with unembedding='shared'"),
        ({"layers_per_head": -1, "unembedding": "own"}, "layers_per_head=-1"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"lora_rank": 4, "layers_per_head": 2}, "lora_rank=4 was given with layers_per_head=2"),
        ({"lora_targets": ["q_proj"]}, "lora_targets were given without lora_rank"),
        ({"layers": 2}, "'layers' is no field of dynamo heads; .* Did you mean 'layers_per_head'"),
        (
            {"lora_targets": "q_proj", "lora_rank": 2},
            "lora_targets='q_proj' was given; allowed are lists of texts, or null",
        ),
    ],
)
def test_fields_that_cannot_be_built_are_refused(config: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_config("dynamo", **config)


def test_a_backbone_of_one_layer_has_no_stem() -> None:
    backbone = Backbone(tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(ValueError, match="has 1 layer; dynamo heads branch off after the penultimate"):
        heads.create("dynamo", backbone)
    assert heads.create("dynamo", backbone, tap="last").hidden_taps == (0,)


def test_lora_targets_that_do_not_exist_are_a_sentence() -> None:
    backbone = backbone_of("llama")
    for targets in (["query_key_value"], ["q_proj", "query_key_value"]):
        with pytest.raises(ValueError, match="lora_targets has 'query_key_value', which names no part"):
            heads.create("dynamo", backbone, lora_rank=2, lora_targets=targets)

"""EAGLE heads: against a plain restatement, every switch in training and drafting, memory of long texts, refusals.

The family as such is in tests/heads/families/test_families.py and in the suites of decoding.
"""

from __future__ import annotations

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, backbone_of, check_greedy, drafted, prefilled, teacher_forced
from throwaway_families import make_heads
from tiny import random_tokens, tiny_model
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

import heads
from heads.backbone.model import Backbone
from heads.families import build_config
from heads.families.eagle import choose_taps
from heads.interface import draft_attention
from heads.interface.token_heads import MAX_HEADS
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig

SWITCHES = {
    "3.1": {"fc_norm": True, "norm_output": True},
    "norm before residual": {"norm_before_residual": True, "unembedding": "shared"},
    "another shape": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10, "rope_theta": 500.0},
    "taps": {"taps": [0, 1], "intermediate_size": 20, "rms_norm_eps": 1e-3},
    "1": {"version": 1, "unembedding": "shared"},
}
every_switch = pytest.mark.parametrize("switch", SWITCHES)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


@torch.no_grad()
def plain_logits(token_heads, tokens, steps):
    """(steps, V): head k's logits after a whole text of `len(tokens)` tokens, of which the last `steps` are drafted.

    Written from the published formulas with transformers' own Llama parts: every row's keys and values are computed in
    one list, the row of position P from the token P + 1.
    """
    backbone, weights = token_heads.backbone, dict(token_heads.named_parameters())
    config, eps = backbone.config, 1e-6
    committed = len(tokens) - steps
    output = backbone.model(torch.tensor([tokens[:committed]]), output_hidden_states=True)
    low, middle, high = (output.hidden_states[n][0] for n in token_heads.tap_layers)
    fused = torch.cat([low, middle, high], dim=-1) @ weights["fc.weight"].T
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{**config.to_dict(), "rope_parameters": token_heads.rope_parameters}))
    n_heads, n_groups, width = config.num_attention_heads, config.num_key_value_heads, 8
    keys, values, logits, hidden = [], [], [], None
    layer = {name.removeprefix("midlayer."): w for name, w in weights.items()}
    for place in range(len(tokens) - 1):
        r = fused[place] if place < committed else hidden
        embedded = backbone.model.get_input_embeddings().weight[tokens[place + 1]]
        x = torch.cat([rms(embedded, layer["input_layernorm.weight"], eps), rms(r, layer["hidden_norm.weight"], eps)])
        q, k, v = ((layer[f"self_attn.{n}_proj.weight"] @ x).view(1, -1, 1, width) for n in "qkv")
        cos, sin = rotary(x[None, None], torch.tensor([[place]]))
        q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
        keys.append(k)
        values.append(v)
        k_all, v_all = (repeat_kv(torch.cat(part, dim=2), n_heads // n_groups) for part in (keys, values))
        read = F.scaled_dot_product_attention(q, k_all, v_all).flatten() @ layer["self_attn.o_proj.weight"].T
        residual = r + read
        normed = rms(residual, layer["post_attention_layernorm.weight"], eps)
        gate, up = (layer[f"mlp.{n}_proj.weight"] @ normed for n in ("gate", "up"))
        hidden = residual + layer["mlp.down_proj.weight"] @ (F.silu(gate) * up)
        if place >= committed - 1:
            logits.append(weights["lm_head.weight"] @ rms(hidden, weights["norm.weight"], eps))
    return torch.stack(logits)


def seven_layers():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return Backbone(LlamaForCausalLM(config).double().eval())


def test_drafts_are_those_of_the_published_formulas():
    token_heads = make_heads("eagle", seven_layers(), num_heads=3, rms_norm_eps=1e-6)
    assert token_heads.tap_layers == [2, 3, 4]
    tokens = random_tokens(12, seed=5).tolist()
    steps = 4  # one more than is trained
    wanted = plain_logits(token_heads, tokens, steps)
    _, state = prefilled(token_heads, [tokens[: len(tokens) - steps]])
    found = drafted(token_heads, state, torch.tensor([tokens[len(tokens) - steps :]]))
    for k, (hidden, logits) in enumerate(zip(found, wanted, strict=True), start=1):
        # rotary angles are float32 products there and float64 ones here
        torch.testing.assert_close(token_heads.projection(k)(hidden)[0], logits, atol=1e-5, rtol=0.0)


@every_switch
def test_training_is_drafting_along_the_true_tokens(switch):
    token_heads = make_heads("eagle", backbone_of("llama"), num_heads=3, **SWITCHES[switch])
    tokens_BT = random_tokens(1, 9, seed=11)
    (first, second, third) = teacher_forced(token_heads, tokens_BT, torch.zeros_like(tokens_BT))
    for t in (0, 3, 5):
        text = tokens_BT[0].tolist()
        steps = drafted(token_heads, prefilled(token_heads, [text[: t + 1]])[1], torch.tensor([text[t + 1 : t + 4]]))
        for found, wanted in zip(steps, (first, second, third), strict=True):
            if (0, t) in wanted:
                torch.testing.assert_close(found[0], wanted[0, t], atol=DEFAULT_TOLERANCE, rtol=0.0)


@every_switch
def test_greedy_text_is_the_backbones_and_drafts_go_deeper_than_training(switch):
    token_heads = make_heads("eagle", backbone_of("llama"), num_heads=2, seed=1, **SWITCHES[switch])
    assert token_heads.max_depth == MAX_HEADS
    stats = check_greedy(token_heads, steps=20, tree=[[0], [0, 0], [0, 0, 0], [0, 1], [1]])
    assert stats.tokens_per_pass > 1


def test_long_texts_are_read_in_parts_with_the_same_states_and_gradients(monkeypatch):
    token_heads = make_heads("eagle", backbone_of("llama"), num_heads=3)
    tokens_BT = random_tokens(2, 150, seed=2)
    found = []
    for scores, part in ((1, 64), (2**24, 64), (2**24, 150)):  # parts computed again, parts that are stored, one part
        monkeypatch.setattr(draft_attention, "SCORES_AT_A_TIME", scores)
        monkeypatch.setattr(draft_attention, "CAUSAL_PART", part)
        model = TrainedModel(token_heads.backbone, token_heads, loss=LossConfig(hard=0.0, soft=1.0)).train()
        token_heads.zero_grad()
        loss = model(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), torch.zeros_like(tokens_BT))["loss"]
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in token_heads.parameters())])
    for again, stored, at_once in zip(*found, strict=True):
        for in_parts in (again, stored):
            torch.testing.assert_close(in_parts, at_once, atol=1e-10, rtol=0.0)  # float64 sums in another order
        assert at_once.abs().max() > 0, "every weight is trained"


def test_heads_start_with_the_highest_state_scored_as_the_backbone_scores():
    for name in ("llama", "gemma"):
        backbone = backbone_of(name)
        token_heads = heads.create("eagle", backbone, num_heads=2).double()
        tokens = random_tokens(1, 6, seed=21)
        _, state = prefilled(token_heads, tokens.tolist())
        with torch.no_grad():
            high = backbone.model(tokens, output_hidden_states=True).hidden_states[token_heads.tap_layers[-1]][0, -1]
            for hidden in drafted(token_heads, state, torch.tensor([[3, 4]])):
                # norm and unembedding were copied through float32
                torch.testing.assert_close(hidden[0], backbone.norm(high), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("layers", "wanted"), [(1, [0]), (2, [1]), (3, [1, 2]), (6, [1, 3, 5]), (7, [2, 3, 4]), (32, [2, 16, 29])]
)
def test_default_taps(layers, wanted):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=1
    )
    with torch.device("meta"):
        backbone = Backbone(LlamaForCausalLM(config), check_projection=False)
    assert choose_taps(build_config("eagle"), backbone) == wanted


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"taps": [2, 1]}, r"taps=\[2, 1\] was given; allowed are ascending numbers"),
        ({"taps": []}, r"taps=\[\] was given"),
        ({"taps": [1, 3]}, r"taps=\[1, 3\] was given; the backbone .* has 3 layers: allowed are 0, .* to 2"),
        ({"version": 1}, r"version=1 was given with unembedding='own'"),
        ({"version": 1, "unembedding": "shared", "norm_output": True}, "norm_output was given with version=1"),
        ({"version": 2}, "version=2 was given; allowed are 1 and 3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3 and head_dim=8 were given"),
        ({"head_dim": 7}, "head_dim=7 were given"),
    ],
)
def test_what_cannot_be_built_is_refused(config, said):
    with pytest.raises(ValueError, match=said):
        heads.create("eagle", backbone_of("llama"), **config)


def test_a_scaled_rope_is_kept_and_a_moving_one_is_not():
    scaled = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    moving = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    for given, wanted in ((scaled, scaled), (moving, {"rope_type": "default", "rope_theta": 100.0})):
        model = tiny_model("llama")
        model.config.rope_parameters = given
        assert heads.create("eagle", Backbone(model)).rope_parameters == wanted

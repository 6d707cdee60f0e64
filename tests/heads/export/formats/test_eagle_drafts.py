"""EAGLE drafts: folders built from the documented names, against a plain restatement; and what is written."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_greedy
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from transformers import LlamaConfig, LlamaForCausalLM

import heads
from heads.export import folder as reading
from heads.export.drafted_logits import ROWS, TOKENS, drafted_logits
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

WIDTH, VOCAB, INNER, N_HEADS, N_GROUPS, HEAD_DIM, THETA, EPS = 32, 29, 40, 4, 2, 8, 500.0, 1e-5
K = 3
CHOSEN = [2, 3, 5, 7, 11, 13, 17, 19, 23]
LAYER_KEYS = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_GROUPS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB,
    "rope_theta": THETA,
}


@functools.cache
def seven_layers() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_GROUPS,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).double().eval()


def random_draft(*, version: int = 3, layer: str = "midlayer", fc_norm: bool = False, scored: int = VOCAB) -> dict:
    """Tensors by the names of released folders."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(WIDTH, generator=generator)

    wide = 2 * WIDTH if version == 3 else WIDTH
    found = {"fc.weight": matrix(WIDTH, (3 if version == 3 else 2) * WIDTH)}
    sizes = {"q": (N_HEADS * HEAD_DIM, wide), "k": (N_GROUPS * HEAD_DIM, wide), "v": (N_GROUPS * HEAD_DIM, wide)}
    for name, size in (sizes | {"o": (WIDTH, N_HEADS * HEAD_DIM)}).items():
        found[f"{layer}.self_attn.{name}_proj.weight"] = matrix(*size)
    for name, size in {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}.items():
        found[f"{layer}.mlp.{name}_proj.weight"] = matrix(*size)
    found[f"{layer}.post_attention_layernorm.weight"] = norm()
    if version == 3:
        found[f"{layer}.input_layernorm.weight"] = norm()
        found[f"{layer}.hidden_norm.weight"] = norm()
        found["norm.weight"] = norm()
        found["lm_head.weight"] = matrix(scored, WIDTH)
        found |= {f"fc_norm.{i}.weight": norm() for i in range(3 * fc_norm)}
    return found


def written_by_hand(folder: Path, tensors: dict, config: dict, *, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """(heads, E), pairs (i, i + E/2) turned by position · θ^(-2i/E)."""
    angle = position / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).double()
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)


@torch.no_grad()
def restated(tensors: dict, tokens: list[int], *, taps: tuple = (2, 3, 4), **switch: bool) -> Tensor:
    """(K, S): what each step scores after a text whose last K tokens are drafted; EAGLE-1 where `switch` says so."""
    model, first = seven_layers(), switch.get("first", False)
    w = {name.replace("layers.0.", "midlayer.").removeprefix("midlayer."): t.double() for name, t in tensors.items()}
    committed = len(tokens) - K
    states = model(torch.tensor([tokens[:committed]]), output_hidden_states=True).hidden_states
    parts = [states[n][0] for n in taps]
    if switch.get("fc_norm"):
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    fused = states[-1][0] if first else torch.cat(parts, dim=-1) @ w["fc.weight"].T
    keys, values, logits, following = [], [], [], None
    for place in range(len(tokens) - 1):
        r = fused[place] if place < committed else following
        embedded = model.get_input_embeddings().weight[tokens[place + 1]]
        if first:
            x = residual = w["fc.weight"] @ torch.cat([embedded, r])
        else:
            normed = rms(r, w["hidden_norm.weight"])
            x = torch.cat([rms(embedded, w["input_layernorm.weight"]), normed])
            residual = normed if switch.get("norm_before_residual") else r
        q, k, v = ((w[f"self_attn.{name}_proj.weight"] @ x).view(-1, HEAD_DIM) for name in "qkv")
        keys.append(rotated(k, place).repeat_interleave(2, dim=0))
        values.append(v.repeat_interleave(2, dim=0))
        weights = torch.einsum("he,she->hs", rotated(q, place), torch.stack(keys)) / HEAD_DIM**0.5
        read = torch.einsum("hs,she->he", weights.softmax(dim=-1), torch.stack(values)).flatten()
        residual = residual + w["self_attn.o_proj.weight"] @ read
        normed = rms(residual, w["post_attention_layernorm.weight"])
        gate, up = (w[f"mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        output = residual + w["mlp.down_proj.weight"] @ (F.silu(gate) * up)
        scored = output if first else rms(output, w["norm.weight"])
        following = scored if switch.get("norm_output") else output
        if place >= committed - 1:
            logits.append(w.get("lm_head.weight", model.lm_head.weight) @ scored)
    return torch.stack(logits)[:K]


def check_logits(token_heads: Any, tensors: dict, order: list[int] | None = None, **switch: Any) -> None:
    """Drafted logits along the texts of `drafted_logits`, in float64 but for RoPE's frequencies, float32 as Llama's."""
    tokens = torch.randint(VOCAB, (ROWS, TOKENS + K), generator=torch.Generator().manual_seed(0)).tolist()
    found = torch.stack(drafted_logits(token_heads), dim=1)
    for row, text in enumerate(tokens):
        wanted = restated(tensors, text, **switch)
        wanted = wanted if order is None else wanted[:, order]
        torch.testing.assert_close(found[row], wanted, atol=1e-6, rtol=0.0)


EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, "num_unrolled_steps": K, **LAYER_KEYS}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": VOCAB,
    "transformer_layer_config": LAYER_KEYS,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
}
EAGLE1 = {"architectures": ["LlamaForCausalLM"], "num_unrolled_steps": K, **LAYER_KEYS}


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_a_released_eagle3_folder_gives_its_logits_and_decodes(layer, tmp_path):
    tensors = random_draft(layer=layer)
    written_by_hand(tmp_path, tensors, EAGLE3, pickled=layer == "midlayer")
    assert recognise(tmp_path) == "eagle3"
    token_heads = import_heads(tmp_path, seven_layers())
    check_logits(token_heads, tensors)
    check_greedy(token_heads, steps=3)


def test_a_draft_vocabulary_in_any_order_is_read(tmp_path):
    tensors = random_draft(scored=len(CHOSEN))
    order = torch.randperm(len(CHOSEN), generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor(CHOSEN)[order]
    maps = {"d2t": chosen - torch.arange(len(chosen)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    maps["t2d"][chosen] = True
    written_by_hand(tmp_path, tensors | maps, EAGLE3 | {"draft_vocab_size": len(CHOSEN)})
    token_heads = import_heads(tmp_path, seven_layers())
    assert token_heads.draft_tokens_S.tolist() == CHOSEN
    check_logits(token_heads, tensors, order=order.argsort().tolist())


@pytest.mark.parametrize("switch", ["fc_norm", "norm_output", "norm_before_residual"])
def test_the_switches_of_speculators_are_read(switch, tmp_path):
    tensors = random_draft(layer="layers.0", fc_norm=switch == "fc_norm")
    embedding = {"embed_tokens.weight": seven_layers().get_input_embeddings().weight.detach().bfloat16()}
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    written_by_hand(tmp_path, tensors | embedding, SPECULATORS | ids | {switch: True})
    assert recognise(tmp_path) == "speculators"
    check_logits(import_heads(tmp_path, seven_layers()), tensors, taps=(0, 3, 6), **{switch: True})


@pytest.mark.parametrize("bias", [{}, {"fc.bias": torch.zeros(WIDTH)}])
def test_the_first_eagle_is_read(bias, tmp_path):
    tensors = random_draft(version=1, layer="layers.0")
    written_by_hand(tmp_path, tensors | bias, EAGLE1)
    assert recognise(tmp_path) == "eagle1"
    check_logits(import_heads(tmp_path, seven_layers()), tensors, first=True)


def new_heads(**config: Any) -> Any:
    token_heads = heads.create("eagle", seven_layers(), num_heads=K, intermediate_size=INNER, **config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return token_heads


def test_one_folder_for_three_servers(tmp_path):
    assert "bit for bit" in export_heads(new_heads(), "eagle3", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (VOCAB, VOCAB, 1)
    assert config["norm_before_residual"] is config["attention_bias"] is config["tie_word_embeddings"] is False
    assert not {"eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "norm_output"} & set(config)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in random_draft().items()}


def test_a_draft_vocabulary_is_written_as_both_maps(tmp_path):
    export_heads(new_heads(draft_tokens=CHOSEN), "eagle3", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (found["d2t"] + torch.arange(len(CHOSEN))).tolist() == CHOSEN
    assert found["d2t"].dtype == torch.int64
    assert found["t2d"].nonzero()[:, 0].tolist() == CHOSEN
    assert len(found["lm_head.weight"]) == len(CHOSEN)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == len(CHOSEN)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_a_shared_unembedding_is_written_as_a_copy(format, tmp_path):
    export_heads(new_heads(unembedding="shared"), format, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], seven_layers().lm_head.weight)


def test_speculators_names_hidden_states_switches_and_target(tmp_path):
    token_heads = new_heads(taps=[1, 3, 6], fc_norm=True, norm_output=True, norm_before_residual=True)
    export_heads(token_heads, "speculators", tmp_path / "out", verifier="org/model")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert all(config[name] for name in ("fc_norm", "norm_output", "norm_before_residual"))
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert config["transformer_layer_config"]["head_dim"] == HEAD_DIM
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = random_draft(layer="layers.0", fc_norm=True)
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}


@pytest.mark.parametrize(("server", "more"), [("vllm", set()), ("sglang", {"fc.bias"})])
def test_the_first_eagle_is_written_for_each_server(server, more, tmp_path):
    export_heads(new_heads(version=1, unembedding="shared"), "eagle1", tmp_path / "out", server=server)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(random_draft(version=1, layer="layers.0")) | more
    assert not any(bool(found[name].any()) for name in more)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM" + ("Eagle" if server == "sglang" else "")]


NOT_WRITTEN = {
    "fc_norm": ("eagle3", {"fc_norm": True}, "use --to speculators"),
    "taps": ("eagle3", {"taps": [1, 3, 6]}, "servers agree"),
    "version": ("eagle3", {"version": 1, "unembedding": "shared"}, "holds eagle heads with version=3"),
    "version 1": ("eagle1", {}, "holds eagle heads with version=1"),
}


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_what_a_format_cannot_say_is_refused(what, tmp_path):
    format, config, said = NOT_WRITTEN[what]
    with pytest.raises(ValueError, match=said):
        export_heads(new_heads(**config), format, tmp_path / "out")
    with pytest.raises(ValueError, match="medusa heads were given"):
        export_heads(heads.create("medusa", seven_layers()), format, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_scaled_embeddings_are_refused_in_both_directions(format, tmp_path):
    """A server's draft reads embeddings as they are stored, and Gemma's class scales them."""
    model = tiny_model("gemma3", attn="sdpa", dtype=torch.float32)
    with pytest.raises(ValueError, match="scales its embeddings"):
        export_heads(heads.create("eagle", model), format, tmp_path / "out")
    written_by_hand(tmp_path / "released", random_draft(), EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    with pytest.raises(ValueError, match="scales its embeddings"):
        import_heads(tmp_path / "released", model, "eagle3")


def changed(**config: Any) -> Any:
    return lambda tensors, found: found.update(config)


def stored(name: str, tensor: Tensor) -> Any:
    return lambda tensors, found: tensors.update({name: tensor})


BAD = {
    "another width": (changed(hidden_size=64), "has hidden_size 64"),
    "two layers": (changed(num_hidden_layers=2), "has num_hidden_layers 2"),
    "biases": (changed(attention_bias=True), "has attention_bias True"),
    "a norm before fc": (changed(norm_before_fc=True), "has norm_before_fc"),
    "another rope": (changed(rope_scaling={"type": "linear", "factor": 2.0}), "RoPE of the kind 'linear'"),
    "another embedding": (stored("embed_tokens.weight", torch.ones(VOCAB, WIDTH)), "an embedding of its own"),
    "a bias of fc": (stored("fc.bias", torch.ones(WIDTH)), "has fc.bias"),
    "a stray tensor": (stored("midlayer.conv.weight", torch.ones(1)), r"midlayer\.conv\.weight"),
    "a missing map": (changed(draft_vocab_size=5), "d2t is missing"),
    "a bad map": (stored("d2t", torch.full((VOCAB,), 3)), "that .* does not have"),
    "a missing tensor": (lambda tensors, found: tensors.pop("fc.weight"), r"missing fc\.weight"),
    "a vocabulary of words": (changed(draft_vocab_size="all"), "draft_vocab_size 'all'"),
    "a rope of words": (changed(rope_scaling="linear"), "give rope_theta as a number"),
    "a base of words": (changed(rope_theta="10k"), "base '10k'"),
    "hidden states of words": (changed(eagle_aux_hidden_state_layer_ids="low"), "hidden states 'low'"),
    "hidden states beyond the last": (changed(eagle_aux_hidden_state_layer_ids=[2, 3, 70]), "taps="),
    "heads without end": (changed(num_attention_heads=1 << 20, head_dim=1 << 20), "has a layer that cannot be"),
    "a base without end": (changed(rope_theta=10**400), "give rope_theta as a number"),
    "a share of each head's rope": (changed(partial_rotary_factor=0.5), "has partial_rotary_factor 0.5"),
    "the same beside the rope": (
        changed(rope_scaling={"type": "default", "partial_rotary_factor": 0.5}),
        "has partial_rotary_factor 0.5",
    ),
    "a map without an axis": (stored("d2t", torch.tensor(3)), "d2t of shape"),
    "an empty map": (
        lambda tensors, found: tensors.update({"d2t": torch.zeros(0), "lm_head.weight": torch.zeros(0, WIDTH)}),
        "d2t of shape",
    ),
    "marks without an axis": (
        lambda tensors, found: tensors.update({"d2t": torch.zeros(VOCAB), "t2d": torch.tensor(True)}),
        "t2d that marks other tokens",
    ),
    "a switch of words": (changed(norm_output="false"), "allowed are true and false"),
    "no number": (stored("fc.weight", torch.full((WIDTH, 3 * WIDTH), torch.nan)), "no finite floats"),
    "steps": (changed(num_unrolled_steps=99), "allowed are integers from 1 to 32"),
}


def test_a_number_of_5000_digits_is_said_to_be_one(tmp_path):
    written_by_hand(tmp_path, random_draft(), EAGLE3)
    config = (
        (tmp_path / "config.json")
        .read_text()
        .replace(f'"intermediate_size": {INNER}', f'"intermediate_size": {"9" * 5000}')
    )
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"config.json cannot be read \(a number of 5000 digits\)"):
        import_heads(tmp_path, seven_layers(), "eagle3")


def test_sizes_of_a_config_cost_no_memory(tmp_path, monkeypatch):
    """Layers as wide as a config says are not made before the tensors are known to be so wide."""
    monkeypatch.setattr(reading, "create", lambda *_, **__: pytest.fail("heads were made"))
    tensors, config = random_draft(), EAGLE3 | {"intermediate_size": 1 << 20}
    written_by_hand(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=r"has shape .* in place of \(1048576, 32\)"):
        import_heads(tmp_path, seven_layers())


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_refused_with_the_reason(what, tmp_path):
    tensors, config = random_draft(), dict(EAGLE3)
    change, said = BAD[what]
    change(tensors, config)
    written_by_hand(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, seven_layers(), "eagle3")


@pytest.mark.parametrize("found", [5, [{}], None, "LlamaForCausalLM"])
def test_a_folder_without_class_names_is_of_no_known_format(found, tmp_path):
    written_by_hand(tmp_path, random_draft(), LAYER_KEYS | {"architectures": found})
    with pytest.raises(ValueError, match="of no known format"):
        import_heads(tmp_path, seven_layers())


def test_maps_that_contradict_each_other_are_refused(tmp_path):
    tensors = random_draft(scored=2) | {"d2t": torch.tensor([4, 5]), "t2d": torch.arange(VOCAB) < 2}
    written_by_hand(tmp_path, tensors, EAGLE3 | {"draft_vocab_size": 2})
    with pytest.raises(ValueError, match="t2d that marks other tokens"):
        import_heads(tmp_path, seven_layers())

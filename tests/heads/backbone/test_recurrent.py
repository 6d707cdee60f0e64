"""Recurrent layers follow a tree: every node's logits are those of the model's own one-token steps along its path.

The reference reads a text with the model's own cache, token by token after the prompt, without padding and without a
tree. A state that is not rolled back, that saw padding or a neighbour's token changes logits by units.
"""

from __future__ import annotations

import pytest
import torch
from tiny import HYBRIDS, VOCAB, left_padded, random_tokens, shared_model, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, RwkvConfig
from transformers.cache_utils import DynamicCache

from heads.backbone import model as backbone_model
from heads.backbone.compiling.graph import what_stops_compiling
from heads.backbone.model import Backbone, CommitPlan
from heads.backbone.recurrent.cache import RecurrentCache, RecurrentLayer
from heads.decoding.trees.static import Tree

TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [1, 1]])
SECOND, IN_PLACE, SHORT, LAST = [0, 6, 7], [0, 1, 2, 3], [0, 1, 5], [0, 6, 8]
OTHERS = ("bamba", "jamba", "kimi_linear")
# Of the largest logit, with weights of float64. The first three classes compute their recurrence in float32 whatever
# the weights are: 3e-7 is seen. All but the last two do so in the chunks of a prompt, which padding and pieces move:
# 1.6e-6 is seen. Else 4e-16 is seen.
FLOAT32_STATES = ("nemotron_h", "olmo_hybrid", "kimi_linear")
FLOAT64_PROMPTS = ("lfm2", "jamba")
TOLERANCE, CHUNKED = 1e-12, 5e-6


def model_of(name: str):
    """In float64, since float32 hides small errors: changing each weight of KimiLinear by 6e-8 of it, a rounding of
    float32, can move the logits of one of these nodes by 2e-5 of the largest.
    """
    return shared_model(name, "sdpa", torch.float64)


def tolerance_of(name: str) -> float:
    return CHUNKED if name in FLOAT32_STATES else TOLERANCE


def prompt_tolerance_of(name: str) -> float:
    return TOLERANCE if name in FLOAT64_PROMPTS else CHUNKED


@torch.no_grad()
def steps(model, prompt: list[int], more: list[int]) -> Tensor:
    """(1 + len(more), V): logits after the prompt and after each further token, one token a step."""
    cache, logits = DynamicCache(config=model.config), []
    pieces = [prompt, *([token] for token in more)]
    for piece in pieces:
        past = cache.get_seq_length()
        positions = torch.arange(past, past + len(piece))[None]
        output = model(torch.tensor([piece]), position_ids=positions, past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def path_to(node: int) -> list[int]:
    path = [node]
    while TREE.parents[path[0]] >= 0:
        path.insert(0, TREE.parents[path[0]])
    return path


@torch.no_grad()
def error_of_rounds(model, prompts: list[list[int]], rounds: list[list[list[int]]]) -> float:
    """Largest error over all nodes of all rounds, in units of the largest logit."""
    backbone = Backbone(model)
    tokens_BT, mask_BT = left_padded(prompts)
    state, output = backbone.prefill(tokens_BT, mask_BT.bool())
    texts: list[list[int]] = [[] for _ in prompts]
    errors = [(backbone.logits(output.final_BND[b, -1]) - steps(model, p, [])[0]) for b, p in enumerate(prompts)]
    largest = 1.0
    for seed, paths in enumerate(rounds):
        tokens_BN = random_tokens(len(prompts), TREE.num_nodes, seed=100 + seed)
        output = backbone.verify(state, tokens_BN, TREE.depth_tensor("cpu"), TREE.sees_NN())
        logits_BNV = backbone.logits(output.final_BND)
        for b, prompt in enumerate(prompts):
            for leaf in (4, 8):
                path = path_to(leaf)
                wanted = steps(model, prompt, texts[b] + tokens_BN[b, path].tolist())[-len(path) :]
                errors.append(logits_BNV[b, path] - wanted)
                largest = max(largest, float(wanted.abs().max()))
            texts[b] += tokens_BN[b, paths[b]].tolist()
        state = backbone.commit(state, output, CommitPlan.from_paths(paths, "cpu"))
    return float(torch.stack([error.abs().max() for error in errors]).max()) / largest  # max() would drop a NaN


@pytest.mark.parametrize("name", [*HYBRIDS, *OTHERS])
def test_nodes_have_the_logits_of_one_token_steps(name):
    prompt = random_tokens(7, seed=1).tolist()
    assert error_of_rounds(model_of(name), [prompt], [[SECOND], [SHORT], [LAST]]) < tolerance_of(name)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_with_padding_that_commit_different_numbers(name):
    """A row that commits nothing keeps its state."""
    prompts = [random_tokens(n, seed=n).tolist() for n in (7, 3)]
    rounds = [[SECOND, IN_PLACE], [LAST, []], [[0], LAST]]
    assert error_of_rounds(model_of(name), prompts, rounds) < prompt_tolerance_of(name)


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2", "jamba"])
def test_a_prompt_read_in_pieces_is_the_same(name, monkeypatch):
    """Jamba's layers forget the state where several tokens follow it: found out, and read node by node."""
    monkeypatch.setattr(backbone_model, "PREFILL_TOKENS", 5)
    backbone = Backbone(model_of(name))
    assert backbone.recurrence is not None
    assert backbone.recurrence.continues == (name != "jamba")
    prompts = [random_tokens(n, seed=n).tolist() for n in (13, 8)]
    tokens_BT, mask_BT = left_padded(prompts)
    state, _ = backbone.read(tokens_BT, mask_BT.bool())
    first_BT = random_tokens(2, 3, seed=5)
    _, output = backbone.read(first_BT, torch.ones_like(first_BT, dtype=torch.bool), state=state)
    for b, prompt in enumerate(prompts):
        wanted_V = steps(backbone.model, prompt, first_BT[b].tolist())[-1]
        error = (backbone.logits(output.final_BND[b, -1]) - wanted_V).abs().max() / wanted_V.abs().max()
        assert error < prompt_tolerance_of(name)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_rows_are_dropped_and_states_roll_back_within_the_last_pass(name):
    backbone = Backbone(model_of(name))
    prompts = [random_tokens(6, seed=b).tolist() for b in range(3)]
    state, _ = backbone.prefill(*(x.bool() if i else x for i, x in enumerate(left_padded(prompts))))
    state = state.keep_rows(torch.tensor([1]))
    tokens_1N = random_tokens(1, TREE.num_nodes, seed=9)
    output = backbone.verify(state, tokens_1N, TREE.depth_tensor("cpu"), TREE.sees_NN())
    state = backbone.commit(state, output, CommitPlan.from_paths([IN_PLACE], "cpu"))
    assert isinstance(state.cache, RecurrentCache)
    assert [state.cache.nearest(n) for n in (11, 10, 8, 6, 5)] == [10, 10, 8, 6, 0]
    state = state.keep_slots(8)
    with pytest.raises(ValueError, match="cannot be rolled back by 1"):
        state.keep_slots(7)
    more = tokens_1N[0, IN_PLACE[:2]].tolist()
    output = backbone.verify(state, torch.tensor([[7]]), torch.zeros(1, dtype=torch.long), torch.ones(1, 1).bool())
    wanted_V = steps(backbone.model, prompts[1], [*more, 7])[-1]
    assert (backbone.logits(output.final_BND[0, 0]) - wanted_V).abs().max() < 1e-5


def test_projections_are_computed_once_for_all_nodes():
    """Else a pass would read the mixer's weights once for each level of the tree."""
    calls: list[int] = []
    model = tiny_model("falcon_h1", attn="sdpa", dtype=torch.float32)
    backbone = Backbone(model)
    assert backbone.recurrence is not None
    assert {(tuple(mixer.reads), mixer.writes) for mixer in backbone.recurrence.own} == {(("in_proj",), "out_proj")}
    mixer = backbone.layers[0].mamba
    for projection in (mixer.in_proj, mixer.out_proj):
        projection.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    state, _ = backbone.prefill(random_tokens(1, 4), torch.ones(1, 4).bool())
    calls.clear()
    backbone.verify(state, random_tokens(1, TREE.num_nodes), TREE.depth_tensor("cpu"), TREE.sees_NN())
    assert calls == [TREE.num_nodes, TREE.num_nodes]
    assert "in_proj" not in vars(mixer)
    assert "forward" not in vars(mixer)


SMALL = {
    config: {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2} for config in (MambaConfig, RwkvConfig)
}
SMALL[Mamba2Config] = {**SMALL[MambaConfig], "num_heads": 8, "head_dim": 8}


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.__name__)
def test_models_without_attention_are_refused(config):
    model = AutoModelForCausalLM.from_config(config(**SMALL[config]))
    with pytest.raises(ValueError, match=r"keeps a recurrent state that cannot be rolled back[^\n]*\.$") as caught:
        Backbone(model)
    assert ". " not in str(caught.value), "one sentence"


def test_a_state_that_is_not_followed_is_found_out(monkeypatch):
    monkeypatch.setattr(RecurrentLayer, "commit_state", lambda self, places: None)
    with pytest.raises(ValueError, match=r"differ from its own one-token steps by \d.* of the largest"):
        Backbone(tiny_model("lfm2", attn="sdpa"))


def test_no_graph_is_compiled_of_them():
    assert "recurrent layers" in what_stops_compiling(Backbone(model_of("lfm2")))

"""Backbone: tree passes equal plain recomputation, taps equal the model's hidden states, refusals are sentences.

Every comparison is against the plain model without a cache on the unpadded text of one path, so a wrong mask, a wrong
position, a wrong cache slot or a wrong window each change logits by units, not by rounding.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
from matrices import covering, wide
from tiny import ARCHITECTURES, EAGER_ONLY, FLOAT32_ONLY, VOCAB, left_padded, random_tokens, shared_model, tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPTNeoConfig,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    MptConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from heads.backbone.cache import GROWTH_SLOTS, TreeCache
from heads.backbone.masks import causal
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.trees.static import Tree

# Eleven nodes, three deep, branches at every depth; the second and last children make paths that are not in place.
TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [1, 1], [1, 1, 0], [2]])
IN_PLACE, SECOND, SHORT, LAST = [0, 1, 2, 3], [0, 6, 8, 9], [0, 1, 5], [0, 10]

# Errors are in units of the largest logit (sharpened models reach 10), or absolute where no logit is above 1.
# float32: sums in another order, over a few layers, stay under a hundred units in the last place (4e-6 is seen).
# float64 with sdpa: 1e-14 is seen. Norms compute in float32 whatever the dtype, but inputs that agree to fifteen digits
# practically always round to the same float.
# float64 with eager: the softmax over scores is a float32 one whose sum depends on the number of slots (masked ones
# included), so it gives what float32 gives; CodeGen has eager attention only and the same softmax.
TOLERANCE = {("eager", torch.float32): 1e-5, ("sdpa", torch.float32): 1e-5}
TOLERANCE |= {("eager", torch.float64): 1e-5, ("sdpa", torch.float64): 1e-10}

MATRIX = [(name, attn) for name in ARCHITECTURES for attn in ("eager", "sdpa")]
WINDOWED = [
    ("mistral_windowed", "eager"),
    ("mistral_windowed", "sdpa"),
    ("phi3_windowed", "sdpa"),
    ("qwen3_windowed", "sdpa"),
    ("qwen3_windowed", "eager"),
    ("gemma2", "eager"),
    ("gemma3", "eager"),
    ("gemma3", "sdpa"),
]
OTHERS = [("gpt_neox_serial", "sdpa"), ("cohere", "sdpa"), ("granite", "sdpa"), ("gpt2", "sdpa"), ("opt", "sdpa")]
OTHERS += [(name, "sdpa") for name in ("falcon", "deepseek_v2", "biogpt", "gemma3_with_images")]
OTHERS += [(name, "eager") for name in ("xglm", "ctrl", "gemma4", "gemma4_with_images")]


def skip_eager_only(name: str, attn: str) -> None:
    if attn == "sdpa" and name in EAGER_ONLY:
        pytest.skip(EAGER_ONLY[name])


@torch.no_grad()
def plain_logits(model, tokens: list[int]) -> Tensor:
    """The last position's logits from the plain model, nothing cached."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def path_of(tree: Tree, node: int) -> list[int]:
    """Nodes from the root down to a node."""
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


@torch.no_grad()
def tree_rounds(model, prompts: list[list[int]], rounds: list[list[list[int]]], tree: Tree = TREE) -> float:
    """Largest logit error over the prefill and all nodes of all rounds, in units of the largest logit (at least 1)."""
    backbone = Backbone(model)
    tokens_BT, mask_BT = left_padded(prompts)
    state, output = backbone.prefill(tokens_BT, mask_BT.bool())
    texts = [list(prompt) for prompt in prompts]
    expected = [plain_logits(model, text) for text in texts]
    errors = [(backbone.logits(output.final_BND[b, -1]) - expected[b]).abs().max() for b in range(len(texts))]
    for seed, paths in enumerate(rounds):
        tokens_BN = random_tokens(len(texts), tree.num_nodes, seed=100 + seed)
        output = backbone.verify(state, tokens_BN, tree.depth_tensor("cpu"), tree.sees_NN())
        logits_BNV = backbone.logits(output.final_BND)
        for b, text in enumerate(texts):
            for node in range(tree.num_nodes):
                branch = tokens_BN[b, path_of(tree, node)].tolist()
                expected.append(plain_logits(model, text + branch))
                errors.append((logits_BNV[b, node] - expected[-1]).abs().max())
            text += tokens_BN[b, paths[b]].tolist()
        state = backbone.commit(state, output, CommitPlan.from_paths(paths, "cpu"))
        assert state.next_position_B.tolist() == [len(text) for text in texts]
    return float(torch.stack(errors).max() / torch.stack(expected).abs().max().clamp(min=1.0))


@covering(
    model=[*MATRIX, *OTHERS],
    dtype=[torch.float64, torch.float32],
    always=lambda model, dtype: model[0] in FLOAT32_ONLY,
)
def test_tree_pass_equals_plain_recomputation_of_every_path(model, dtype):
    name, attn = model
    skip_eager_only(name, attn)
    if dtype == torch.float64 and name in FLOAT32_ONLY:
        pytest.skip(FLOAT32_ONLY[name])
    model = shared_model(name, attn, dtype)
    prompt = random_tokens(7, seed=1).tolist()
    error = tree_rounds(model, [prompt], [[SECOND], [IN_PLACE], [SHORT], [LAST]])
    assert error < TOLERANCE[attn, dtype]


@covering(name=ARCHITECTURES, attn=["sdpa", "eager"], always=lambda name, attn: name in EAGER_ONLY)
def test_ragged_batch_with_padding_and_holes(name, attn):
    """Rows of different length that accept paths of different length, one of them nothing at all."""
    skip_eager_only(name, attn)
    model = shared_model(name, attn, torch.float64)
    prompts = [random_tokens(4, seed=2).tolist(), random_tokens(9, seed=3).tolist()]
    error = tree_rounds(model, prompts, [[SECOND, [0]], [SHORT, IN_PLACE], [[], SECOND], [LAST, [0, 6]]])
    assert error < TOLERANCE[attn, torch.float64]


@pytest.mark.parametrize(("name", "attn"), [("llama", "eager"), ("llama", "sdpa"), ("codegen", "eager")])
def test_padding_on_the_left_of_a_single_row(name, attn):
    model = shared_model(name, attn, torch.float64)
    backbone = Backbone(model)
    prompt = random_tokens(5, seed=4).tolist()
    tokens_BT = torch.tensor([[0, 0, 0, *prompt]])
    with torch.no_grad():
        state, output = backbone.prefill(tokens_BT, torch.tensor([[False] * 3 + [True] * 5]))
        found = backbone.logits(output.final_BND[0, -1])
    assert state.next_position_B.tolist() == [5]
    assert (found - plain_logits(model, prompt)).abs().max() < TOLERANCE[attn, torch.float64]


@pytest.mark.parametrize(("name", "attn"), WINDOWED)
def test_windows_mask_by_position(name, attn):
    """Prompts are longer than the window of 8: a window counted in cache slots would be off after the first commit."""
    model = shared_model(name, attn, torch.float64)
    prompts = [random_tokens(22, seed=5).tolist(), random_tokens(13, seed=6).tolist()]
    error = tree_rounds(model, prompts, [[SECOND, [0]], [SHORT, IN_PLACE], [LAST, SECOND], [[0], [0, 6]]])
    assert error < TOLERANCE[attn, torch.float64]


def test_windows_hide_what_lies_outside():
    """The windowed model really is windowed here: its logits change when the window is lifted."""
    windowed = shared_model("mistral_windowed", "sdpa", torch.float64)
    full = shared_model("mistral", "sdpa", torch.float64)  # the same seed: the same weights
    prompt = random_tokens(22, seed=5).tolist()
    assert (plain_logits(windowed, prompt) - plain_logits(full, prompt)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "codegen"])
def test_cache_grows_past_its_reserve(name):
    model = shared_model(name, "eager", torch.float64)
    prompt = random_tokens(3, seed=7).tolist()
    chain = Tree([[0] * depth for depth in range(1, 60)])
    path = list(range(60))
    rounds = [[path]] * (GROWTH_SLOTS // 60 + 2)
    assert 3 + 60 * len(rounds) > GROWTH_SLOTS + 3 + 60  # the buffer has had to grow
    backbone = Backbone(model)
    with torch.no_grad():
        state, _ = backbone.prefill(torch.tensor([prompt]), torch.ones(1, 3, dtype=torch.bool))
        text, buffers = prompt, set()
        for seed, paths in enumerate(rounds):
            tokens_BN = random_tokens(1, 60, seed=seed)
            output = backbone.verify(state, tokens_BN, chain.depth_tensor("cpu"), chain.sees_NN())
            text = text + tokens_BN[0].tolist()
            state = backbone.commit(state, output, CommitPlan.from_paths(paths, "cpu"))
            buffers.add(state.cache.layers[0].keys.shape[-2])
        assert len(buffers) > 1
        found = backbone.logits(output.final_BND[0, -1])
    assert (found - plain_logits(model, text)).abs().max() < TOLERANCE["eager", torch.float64]


@pytest.mark.parametrize("seed", [0, 1, 2, wide(3), wide(4), wide(5)])
def test_random_trees_and_random_paths(seed):
    """Trees and paths that nobody chose: 3 rows, up to 14 nodes, any node may end a path."""
    rng = random.Random(seed)
    paths = [()]
    while len(paths) < 14:
        parent = rng.choice(paths)
        if len(parent) < 4:
            paths.append((*parent, sum(1 for p in paths if p[:-1] == parent and len(p) == len(parent) + 1)))
    tree = Tree(paths[1:])
    model = shared_model(rng.choice(["llama", "mistral_windowed", "gpt_neox"]), "sdpa", torch.float64)
    prompts = [random_tokens(rng.randint(1, 12), seed=seed * 3 + b).tolist() for b in range(3)]
    rounds = [[path_of(tree, rng.randrange(tree.num_nodes)) for _ in prompts] for _ in range(3)]
    assert tree_rounds(model, prompts, rounds, tree) < TOLERANCE["sdpa", torch.float64]


# --- taps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2", "gemma3", "granite"])
def test_taps_are_the_models_hidden_states(name):
    model = shared_model(name)
    backbone = Backbone(model)
    tokens = random_tokens(2, 6, seed=8)
    num_layers = backbone.num_layers
    with torch.no_grad():
        expected = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
        hooks_before = count_hooks(model)  # transformers itself leaves hooks for output_hidden_states
        final, taps = backbone.forward(tokens, taps=["final", *range(num_layers + 1)], use_cache=False)
        normed = backbone.norm(taps[0])
    # The same operations on the same inputs: equal to the bit.
    for n in range(1, num_layers + 1):
        assert torch.equal(taps[n], expected[num_layers - n]), f"tap {n}"
    assert torch.equal(taps["final"], expected[-1])
    assert torch.equal(final, expected[-1])
    assert torch.equal(normed, expected[-1])
    assert not torch.equal(taps[0], expected[-1]), "tap 0 lies before the final norm"
    assert count_hooks(model) == hooks_before, "a tap's hook stayed"


def count_hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_removed_when_the_forward_fails():
    model = shared_model("llama")
    backbone = Backbone(model)
    before = count_hooks(model)
    with pytest.raises(IndexError):
        backbone.forward(torch.tensor([[VOCAB + 5]]), taps=[1], use_cache=False)
    assert count_hooks(model) == before


def test_a_tap_that_does_not_exist_is_refused():
    backbone = Backbone(shared_model("llama"))
    before = count_hooks(backbone.model)
    with pytest.raises(ValueError, match=r"4 layers before the end .* 3 layers"):
        backbone.forward(random_tokens(1, 2), taps=[1, 4], use_cache=False)
    assert count_hooks(backbone.model) == before, "the hook of the tap before it stayed"


def test_prefill_and_verify_hand_out_the_taps_asked_for():
    backbone = Backbone(shared_model("llama"))
    with torch.no_grad():
        state, output = backbone.prefill(random_tokens(1, 4), torch.ones(1, 4, dtype=torch.bool), taps=["final", 1])
        assert set(output.taps) == {"final", 1}
        output = backbone.verify(state, random_tokens(1, 11), TREE.depth_tensor("cpu"), TREE.sees_NN(), taps=(2,))
    assert set(output.taps) == {2}
    assert output.taps[2].shape == (1, 11, 32)


# --- projection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2", "gemma3", "cohere", "granite", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_projection_record_gives_the_models_logits(name, dtype):
    model = shared_model(name, "eager", dtype)
    backbone = Backbone(model)
    tokens = random_tokens(2, 6, seed=9)
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        final, taps = backbone.forward(tokens, taps=[0], use_cache=False)
        # The same kernels in the same order: only a differently shaped product may round otherwise.
        close = {"rtol": 0.0, "atol": 4 * torch.finfo(dtype).eps * float(expected.abs().max())}
        torch.testing.assert_close(backbone.projection(taps[0]), expected, **close)
        torch.testing.assert_close(backbone.logits(final), expected, **close)


@pytest.mark.parametrize(
    ("name", "field", "value"), [("gemma2", "soft_cap", 30.0), ("cohere", "scale", 0.25), ("granite", "scale", 0.25)]
)
def test_projection_record_holds_scale_and_cap(name, field, value):
    assert getattr(Backbone(shared_model(name)).projection, field) == value


def test_codegen_has_a_bias_in_its_record():
    assert Backbone(shared_model("codegen")).projection.bias is not None


def test_logits_that_the_record_misses_are_refused():
    model = tiny_model("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden) * 1.01
    with pytest.raises(ValueError, match=r"LlamaForCausalLM computes its logits .* refused\.$"):
        Backbone(model)
    Backbone(model, check_projection=False)


def test_wrapping_keeps_training_mode():
    model = tiny_model("llama").train()
    Backbone(model)
    assert model.training
    assert all(module.training for module in model.modules())


# --- run_layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*ARCHITECTURES, "gpt_neox_serial", "mistral_windowed", "qwen3_windowed", "gemma2", "gemma3", "granite"]
)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_run_layer_one_by_one_gives_the_hidden_states(name, attn):
    skip_eager_only(name, attn)
    if name == "gemma2" and attn == "sdpa":
        pytest.skip("Gemma 2 has no sdpa attention in transformers (soft-capped scores)")
    model = shared_model(name, attn)
    backbone = Backbone(model)
    tokens = random_tokens(2, 12, seed=10)
    positions_BT = torch.arange(12).expand(2, 12)
    valid_BT = torch.ones(2, 12, dtype=torch.bool)
    with torch.no_grad():
        expected = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
        mask = backbone.mask_style.finish(causal(valid_BT), positions_BT, positions_BT, backbone.dtype)
        hidden = expected[0]
        cache = TreeCache()
        cached = []
        for n, layer in enumerate(backbone.layers):
            # From the model's own state before the layer: errors do not add up, so the bound is that of one layer.
            found = backbone.run_layer(layer, hidden, positions_BT, mask)
            # The first 7 positions, then the other 5 over the cache that they left.
            halves = []
            for part in (slice(0, 7), slice(7, 12)):
                part_mask = backbone.mask_style.finish(
                    causal(valid_BT)[:, part, : part.stop],
                    positions_BT[:, part],
                    positions_BT[:, : part.stop],
                    backbone.dtype,
                )
                halves.append(backbone.run_layer(layer, hidden[:, part], positions_BT[:, part], part_mask, cache))
                cache.layers[n].commit(None, part.stop - part.start)
            cached.append(torch.cat(halves, dim=1))
            if n + 1 < backbone.num_layers:
                hidden = expected[n + 1]
                wanted = hidden
            else:
                wanted, found, cached[n] = expected[-1], backbone.norm(found), backbone.norm(cached[n])
            # Batched products of other shapes; float32 inside norms and softmax, values of a few tens.
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)
            torch.testing.assert_close(cached[n], wanted, atol=1e-5, rtol=0.0)
    assert cache.get_seq_length() == 12


def test_run_layer_uses_the_positions_given():
    backbone = Backbone(shared_model("llama"))
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(5)[None]
    mask = backbone.mask_style.finish(causal(torch.ones(1, 5).bool()), positions, positions, torch.float64)
    stretched = backbone.run_layer(backbone.layers[0], hidden, positions * 3, mask)
    assert (stretched - backbone.run_layer(backbone.layers[0], hidden, positions, mask)).abs().max() > 1e-2


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(model) -> str:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        Backbone(model)
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message, f"one sentence: {message}"
    return message


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_tree_mask_is_refused(implementation):
    model = tiny_model("llama")
    model.config = type(model.config).from_dict(model.config.to_dict(), attn_implementation=implementation)
    assert implementation in refusal(model)


def test_encoder_decoder_is_refused():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    assert "decoder-only" in refusal(T5ForConditionalGeneration(config))


def test_alibi_and_local_attention_are_refused():
    """Their distances are counted in cache slots inside the layer: a tree pass would be silently wrong."""
    bloom = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)
    falcon = FalconConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True, parallel_attn=False
    )
    mpt = MptConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2)
    neo = GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    for config in (bloom, falcon, mpt, neo):
        refusal(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_model_that_ignores_what_a_tree_pass_gives_is_refused(ignored):
    """Its text would be silently wrong: architectures that nobody has tried are wrapped too."""
    model = tiny_model("llama")
    plain = model.model.forward
    model.model.forward = functools.wraps(plain)(lambda **given: plain(**{**given, ignored: None}))
    assert "does not heed the mask and the positions of a token tree: on a path of one, logits differ" in refusal(model)


def test_a_model_whose_numbers_are_rough_is_taken():
    """As where activations are quantised with one scale for all tokens of a pass."""
    model = tiny_model("llama")
    plain = model.model.norm.forward
    model.model.norm.forward = lambda hidden: plain(hidden) * (1 + 1e-3 * (hidden.shape[1] == 5))
    Backbone(model)


def test_a_model_that_reads_a_tree_mask_as_another_mask_is_refused():
    """ImageGPT flattens a 4-D mask, so that all nodes saw what the first one sees."""
    config = ImageGPTConfig(vocab_size=VOCAB + 1, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    assert "it ends in the error 'The size of tensor a" in refusal(ImageGPTForCausalImageModeling(config))


# --- commit plan and cache -------------------------------------------------------------------------------------------


def test_commit_plan_selects_and_knows_the_last():
    plan = CommitPlan.from_paths([[0, 2, 5], [0], []], "cpu")
    assert not plan.in_place
    x_BN = torch.arange(18).view(3, 6)
    assert plan.select(x_BN).tolist() == [[0, 2, 5], [6, 6, 6], [12, 12, 12]]
    assert plan.valid_BA.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert plan.last(plan.select(x_BN)).tolist() == [5, 6, 12]


@pytest.mark.parametrize(
    ("paths", "in_place"),
    [([[0, 1, 2]], True), ([[0], [0]], True), ([[0], []], True), ([[0, 1], [0]], False), ([[0, 2]], False)],
)
def test_commit_plan_in_place(paths, in_place):
    plan = CommitPlan.from_paths(paths, "cpu")
    assert plan.in_place == in_place
    slow = plan.slots_BA[..., None].float()
    x_BND = torch.arange(len(paths) * 4.0).view(len(paths), 4, 1)
    if in_place:
        assert torch.equal(plan.select(x_BND), torch.gather(x_BND, 1, slow.long()))


def test_whole_plan_makes_holes_of_padding():
    plan = CommitPlan.whole(torch.tensor([[False, True, True], [True, True, True]]))
    assert plan.in_place
    assert plan.newest_B.tolist() == [2, 2]
    assert plan.valid_BA.tolist() == [[False, True, True], [True, True, True]]


def test_tree_cache_keeps_the_path_and_forgets_the_rest():
    cache = TreeCache()
    first = torch.arange(3.0).view(1, 1, 3, 1)
    cache.update(first, first, 0)
    cache.commit(None, 3)
    pending = torch.arange(10.0, 15.0).view(1, 1, 5, 1)
    keys, _ = cache.update(pending, -pending, 0)
    assert keys.flatten().tolist() == [0, 1, 2, 10, 11, 12, 13, 14]
    assert cache.get_seq_length() == 3, "pending slots are not committed"
    cache.commit(torch.tensor([[0, 3, 4]]), 3)
    keys, values = cache.update(pending[:, :, :1], pending[:, :, :1], 0)
    assert keys.flatten().tolist() == [0, 1, 2, 10, 13, 14, 10]
    assert values.flatten().tolist() == [0, 1, 2, -10, -13, -14, 10]

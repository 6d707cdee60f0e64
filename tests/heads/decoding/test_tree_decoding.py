"""Tree decoding is `generate`: greedy text equal token for token, sampled text draw for draw, for every family.

Models and heads run in float64 with sdpa (rounding 1e-14 against gaps between the two best logits of 1e-3 and more), so
any difference is an error and none is excused. Equality alone would also hold if nothing were ever accepted; the first
test therefore counts paths by depth and by rank, and fails where one of them was never taken.
"""

from __future__ import annotations

import collections

import pytest
import torch
from matrices import covering
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import ARCHITECTURES, PAD, left_padded, random_tokens, shared_model, tiny_model
from tree_runs import NO_EOS, NUM_HEADS, PROMPT, TREE, WITH_AND_WITHOUT_LOOKUP, both, check_stats, decoding_of

import heads
from heads.backbone.model import Backbone
from heads.decoding import defaults as tree_choice
from heads.decoding.acceptance import rules
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP


@covering(family=FAMILIES, lookup=[DEFAULT_LOOKUP, 0])
def test_greedy_text_is_generates_on_every_architecture(family, lookup, monkeypatch):
    taken: collections.Counter[tuple[int, ...]] = collections.Counter()
    chains_followed = 0
    plain_walk = rules.walk

    def counting_walk(shape, *arguments):
        nonlocal chains_followed
        path = plain_walk(shape, *arguments)
        if path[-1] < TREE.num_nodes and shape.parents[: TREE.num_nodes] == TREE.parents:
            taken[TREE.paths[path[-1]]] += 1
        else:
            chains_followed += 1
        return path

    monkeypatch.setattr(rules, "walk", counting_walk)
    prompts = [PROMPT, random_tokens(1, 1, seed=1), random_tokens(1, 17, seed=2)]
    for name in (*ARCHITECTURES, "mistral_windowed", "gemma3"):
        model, decoding = decoding_of(family, name, lookup=lookup)
        for tokens in prompts:
            plain, ours = both(model, decoding, tokens, **NO_EOS)
            assert torch.equal(ours.sequences, plain.sequences), name
            check_stats(ours.stats, ours.sequences, tokens.shape[1])
    depths = {len(path) for path in taken}
    assert depths == set(range(NUM_HEADS + 1)), f"accepted depths {depths}: the equality above shows too little"
    beside = [path for path in taken if any(path)]
    assert beside, "no path beside the likeliest one was ever accepted"
    assert bool(chains_followed) == bool(lookup), "looked-up chains are followed where they are asked for"


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox"])
def test_greedy_text_with_eager_attention(name):
    """Eager softmax is a float32 one; the gaps between the two best logits are still a hundred times wider."""
    token_heads = fitted_heads("grounded", name, "eager")
    plain, ours = both(token_heads.backbone.model, heads.TreeDecoding(token_heads, TREE), **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("rule", ["rejection", "typical"])
@pytest.mark.parametrize(("family", "name"), [("medusa", "gpt_neox"), ("grounded", "gemma"), ("kv", "codegen")])
def test_greedy_text_is_generates_under_every_rule(family, name, rule):
    model, decoding = decoding_of(family, name, rule=rule)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    for options in ({}, {"repetition_penalty": 1.3}):
        plain, ours = both(model, decoding, tokens, attention_mask=mask, **options, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences)
        assert sum(ours.stats.accepted_per_depth) > 0


@covering(
    family=FAMILIES,
    tree=[2, 5, 16, 64, None, [[0]], [[1], [1, 1]], "file"],
    lookup=[DEFAULT_LOOKUP, 0],
    repeats=2,
)
def test_any_tree_gives_the_same_text(family, tree, lookup, tmp_path):
    if tree == "file":
        TREE.save(tmp_path / "tree.json")
        tree = tmp_path / "tree.json"
    model, decoding = decoding_of(family, "codegen", tree=tree, lookup=lookup)
    plain, ours = both(model, decoding, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    check_stats(ours.stats, ours.sequences, PROMPT.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_differs_only_where_the_two_best_logits_are_within_rounding(dtype, capsys):
    differing = 0
    for name in ARCHITECTURES:
        model = shared_model(name, "eager" if name == "codegen" else "sdpa", dtype)
        decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model), num_heads=NUM_HEADS), TREE)
        for seed in range(2):
            tokens = random_tokens(1, 5, seed=60 + seed)
            plain, ours = both(model, decoding, tokens, output_logits=True, **NO_EOS)
            differs = (plain.sequences != ours.sequences)[0]
            if not differs.any():
                continue
            differing += 1
            at = int(differs.int().argmax()) - tokens.shape[1]
            best = plain.logits[at][0].float().topk(2).values
            gap, scale = float(best[0] - best[1]), float(plain.logits[at].abs().max())
            with capsys.disabled():
                print(f"\n{name} {dtype}: token {at} differs, the two best logits are {gap:.3g} apart")
            # Logits are off by what tests/heads/backbone/test_backbone.py sees in float32: 4e-5 of 10, 30 units in the
            # last place; bfloat16 models round their sums once from float32 products, and two units are seen.
            assert gap < {torch.float32: 30, torch.bfloat16: 4}[dtype] * torch.finfo(dtype).eps * scale
    assert differing < len(ARCHITECTURES), "half of all texts differ: that is no rounding"


@covering(family=FAMILIES, name=["gpt_neox", "codegen", "mistral_windowed"], lookup=[DEFAULT_LOOKUP, 0], repeats=2)
def test_left_padding(family, name, lookup):
    """One padded row, then three rows of different length; rows end at different places and are filled with pad."""
    model, decoding = decoding_of(family, name, lookup=lookup)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    padded_row = torch.cat([torch.full((1, 4), PAD), PROMPT], dim=1)
    row_mask = torch.tensor([[0] * 4 + [1] * 5])
    alone, ours = both(model, decoding, padded_row, attention_mask=row_mask, **NO_EOS)
    assert torch.equal(ours.sequences, alone.sequences)
    unpadded, _ = both(model, decoding, PROMPT, **NO_EOS)
    assert torch.equal(ours.sequences[:, 4:], unpadded.sequences)

    free, _ = both(model, decoding, tokens, attention_mask=mask, **NO_EOS)
    new = free.sequences[:, 9:]
    # An end token that the rows reach at different places.
    firsts = {t: [row.index(t) if t in row else 99 for row in new.tolist()] for t in new.flatten().tolist()}
    eos = max(firsts, key=lambda t: (len(set(firsts[t])), -max(firsts[t])))
    assert len(set(firsts[eos])) > 1
    plain, ours = both(model, decoding, tokens, attention_mask=mask, eos_token_id=eos, pad_token_id=PAD)
    assert torch.equal(ours.sequences, plain.sequences)
    check_stats(ours.stats, ours.sequences, 9, pad=PAD)
    assert len({len(row) for row in ours.stats.drafted}) > 1, "rows end at different places"


def test_decoding_again_and_with_another_batch_size():
    """One decoding object serves many calls; nothing of a call is left behind."""
    model, decoding = decoding_of("kv", "qwen3")
    for tokens in (PROMPT, random_tokens(3, 6, seed=53), PROMPT, random_tokens(2, 4, seed=54)):
        plain, ours = both(model, decoding, tokens, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences)


def test_text_longer_than_the_caches_reserve():
    model, decoding = decoding_of("kv", "qwen3")
    plain, ours = both(model, decoding, max_new_tokens=320, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("name", ["gpt2", "opt", "codegen"])
def test_text_up_to_the_last_position_of_a_backbones_table(name, lookup):
    """Nodes behind the text's end would have positions that the table lacks; a padded row ends before the others."""
    table = {"max_position_embeddings": 40} if name == "opt" else {"n_positions": 40, "max_position_embeddings": 40}
    model = tiny_model(name, attn="eager" if name == "codegen" else "sdpa", **table)
    decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model), num_heads=NUM_HEADS), TREE, lookup=lookup)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (9, 6)])
    plain, ours = both(model, decoding, tokens, attention_mask=mask, max_new_tokens=None, max_length=40, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.sequences.shape[1] == 40


def test_the_default_tree_grows_from_measured_accuracy():
    token_heads = make_heads("medusa", Backbone(shared_model("llama", "sdpa")), num_heads=3)
    typical = heads.TreeDecoding(token_heads).tree
    assert typical.num_nodes == tree_choice.default_nodes(torch.device("cpu")) == 8
    assert tree_choice.default_nodes(torch.device("cuda"), 4) == tree_choice.default_nodes(torch.device("cuda")) == 16
    token_heads.measured_accuracy = [[0.9, 0.01], [0.9, 0.01], [0.9, 0.01]]
    measured = heads.TreeDecoding(token_heads, 4).tree
    assert measured.paths == ((), (0,), (0, 0), (0, 0, 0))


def test_rows_of_a_batch_share_the_default_nodes_on_a_cpu():
    decoding = heads.TreeDecoding(make_heads("medusa", Backbone(shared_model("llama", "sdpa")), num_heads=3))
    assert [decoding.settings.at(rows).tree.num_nodes for rows in (1, 2, 3, 4, 16)] == [8, 4, 2, 2, 2]
    assert decoding.settings.at(16) is decoding.settings.at(4), "equal trees are built once"
    asked_for = heads.TreeDecoding(decoding.token_heads, 8)
    assert [asked_for.settings.at(rows).tree.num_nodes for rows in (1, 16)] == [8, 8]


def test_the_default_looks_up_as_many_tokens_as_it_says():
    token_heads = fitted_heads("grounded", "llama")
    assert heads.TreeDecoding(token_heads).lookup == heads.TreeDecoding(token_heads, 4).lookup == DEFAULT_LOOKUP == 10


def test_training_mode_and_gradients_stay_off():
    model, decoding = decoding_of("own_output", "llama")
    out = model.generate(PROMPT, custom_generate=decoding, max_new_tokens=4, do_sample=False, **NO_EOS)
    assert not out.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "flag", [{"compile": "false"}, {"keep_caches": "no"}, {"keep_caches": None}, {"compile": 1}], ids=str
)
def test_a_flag_is_true_or_false(flag):
    token_heads = make_heads("medusa", Backbone(shared_model("llama")), num_heads=NUM_HEADS)
    with pytest.raises(ValueError, match=f"^{next(iter(flag))}=.* was given; allowed are "):
        heads.TreeDecoding(token_heads, TREE, **flag)
    if "keep_caches" in flag:
        with pytest.raises(ValueError, match=r"^keep_caches="):
            heads.DraftModelDecoding(shared_model("llama"), **flag)

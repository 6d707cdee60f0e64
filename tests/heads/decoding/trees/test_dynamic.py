"""Dynamic trees hold the nodes that plain Python finds over full distributions, and their text is `generate`'s."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import PAD, VOCAB, left_padded, random_tokens, shared_model
from torch import Tensor

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.acceptance import rules
from heads.decoding.trees.dynamic import DynamicTree, GrownTrees, TreeCandidates, grow, keep_best
from heads.decoding.trees.static import Shape
from heads.interface.token_heads import TokenHeads

NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
PROMPT = random_tokens(1, 5, seed=50)


def begin(token_heads: TokenHeads) -> tuple[Any, Tensor]:
    """The family's state behind three prompts of different length, and a root for each."""
    tokens_BT, mask_BT = left_padded([random_tokens(n, seed=40 + n).tolist() for n in (5, 8, 3)])
    _, output = token_heads.backbone.prefill(tokens_BT, mask_BT.bool(), token_heads.taps)
    plan = CommitPlan.whole(mask_BT.bool())
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    return state, torch.tensor([7, 11, 5])


def log_probs_after(
    token_heads: TokenHeads, state: Any, root_B: Tensor, row: int, path: tuple[int, ...]
) -> list[float]:
    """Full log-probabilities behind one path, drafted alone, one step at a time, in all rows at once."""
    level, rows = token_heads.first_level(state), torch.arange(len(root_B))
    for k, token in enumerate((None, *path), start=1):
        tokens_B = root_B if token is None else torch.full_like(root_B, token)
        hidden_BD, level = token_heads.step(k, level, tokens_B, rows)
    return token_heads.projection(1 + len(path))(hidden_BD).log_softmax(dim=-1)[row].tolist()


def token_paths(grown: GrownTrees, row: int) -> set[tuple[int, ...]]:
    shape, tokens = grown.shapes()[row], grown.tokens_BN[row].tolist()
    return {tuple(tokens[node] for node in shape.ancestors(end)[1:]) for end in range(shape.num_nodes)}


def plain_best_paths(
    log_probs_after: Callable[[tuple[int, ...]], Sequence[float]], *, nodes: int, depth: int, width: int
) -> set[tuple[int, ...]]:
    """The reference: paths of tokens that are kept, the root () among them.

    Args:
        log_probs_after: the next head's log-probability of every token behind a path.
    """
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        children = {
            (*path, token): scores[path] + log_prob
            for path in level
            for token, log_prob in enumerate(log_probs_after(path))
        }
        scores |= children
        level = heapq.nlargest(width, children, key=children.__getitem__)
    return set(heapq.nlargest(nodes, scores, key=scores.__getitem__))


@covering(family=FAMILIES, size=[(2, 3, 4), (6, 1, 4), (9, 3, 1), (16, 3, 2), (16, 2, 15), (40, 3, 3)], repeats=2)
@torch.no_grad()
def test_the_kept_nodes_are_those_of_the_plain_reference(family, size):
    nodes, depth, width = size
    token_heads = make_heads(family, Backbone(shared_model("llama", "sdpa")), num_heads=3)
    state, root_B = begin(token_heads)
    projections = [token_heads.projection(k + 1) for k in range(3)]
    grown = grow(token_heads, projections, state, root_B, DynamicTree(nodes=nodes, depth=depth, width=width))
    different = set()
    for row in range(3):
        behind = functools.cache(functools.partial(log_probs_after, token_heads, state, root_B, row))
        beam = width if token_heads.grounded else nodes - 1
        wanted = plain_best_paths(behind, nodes=nodes, depth=depth, width=beam)
        assert token_paths(grown, row) == wanted, f"row {row}"
        assert len(wanted) == min(nodes, grown.tokens_BN.shape[1])
        different.add(grown.shapes()[row].parents)
    assert torch.equal(grown.tokens_BN[:, 0], root_B)
    if nodes in (16, 40) and depth == 3:
        assert len(different) > 1, "rows have shapes of their own"


def test_a_beam_of_the_whole_budget_is_no_beam():
    """Independent heads are searched with one: at most nodes - 1 nodes of a level can be kept."""

    def uneven(path: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash(path) % 2**31)
        return torch.randn(5, generator=generator).mul(2).log_softmax(0).tolist()

    for nodes in (3, 8, 20):
        free = plain_best_paths(uneven, nodes=nodes, depth=4, width=5**4)
        assert plain_best_paths(uneven, nodes=nodes, depth=4, width=nodes - 1) == free


@pytest.mark.parametrize("chain", [0, 3])
def test_depths_sight_and_shapes_agree(chain):
    token_heads = make_heads("grounded", Backbone(shared_model("llama", "sdpa")), num_heads=3)
    state, root_B = begin(token_heads)
    with torch.no_grad():
        projections = [token_heads.projection(k + 1) for k in range(3)]
        grown = grow(token_heads, projections, state, root_B, DynamicTree(nodes=12))
    plain = grown
    if chain:
        grown = grown.with_chains(torch.arange(9).view(3, 3))
        assert grown.tokens_BN[:, -3:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for row, shape in enumerate(grown.shapes()):
        assert shape.depths == tuple(grown.depth_BN[row].tolist())
        assert torch.equal(shape.sees_NN(), grown.sees_BNN[row])
        assert all(parent < node for node, parent in enumerate(shape.parents))
        if chain:
            assert shape.parents == plain.shapes()[row].with_chain(chain).parents


def level(scores: list[float], parents: list[int], likeliest: list[bool], depths: list[int]) -> TreeCandidates:
    count = len(scores)
    return TreeCandidates(
        tokens_BE=torch.arange(count)[None],
        scores_BE=torch.tensor([scores]),
        parents_BE=torch.tensor([parents]),
        likeliest_BE=torch.tensor([likeliest]),
        depths_E=torch.tensor(depths),
    )


def test_the_likeliest_path_comes_first_so_that_it_is_in_place():
    found = level(
        [0, -0.1, -2.0, -3.0, -0.3, -2.1],
        [0, 0, 0, 0, 1, 2],
        [True, True, False, False, True, False],
        [0, 1, 1, 1, 2, 2],
    )
    kept = keep_best(found, 5, 2)
    assert kept.tokens_BN.tolist() == [[0, 1, 4, 2, 5]]
    assert kept.parents_BN.tolist() == [[0, 0, 1, 0, 3]]


def test_of_equal_scores_the_parent_is_kept_first():
    """A head that is certain gives its child the parent's own score, an impossible token all of them -inf."""
    certain = level(
        [0.0, 0.0, -math.inf, 0.0, -math.inf], [0, 0, 0, 1, 1], [True, True, False, True, False], [0, 1, 1, 2, 2]
    )
    for nodes in range(2, 6):
        kept = keep_best(certain, nodes, 2)
        assert all(parent < node for node, parent in enumerate(kept.shapes()[0].parents))
        assert kept.depth_BN.tolist() == [list(Shape((-1, *kept.parents_BN[0, 1:].tolist())).depths)]


# --- text ------------------------------------------------------------------------------------------------------------


@covering(family=FAMILIES, lookup=[10, 0])
def test_greedy_text_is_generates_in_ragged_batches(family, lookup, monkeypatch):
    """Three rows, padded on the left, on several architectures; drafts of every depth are accepted somewhere."""
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    depths: set[int] = set()
    beside = 0
    plain_walk = rules.walk

    def watched(shape, *arguments):
        nonlocal beside
        path = plain_walk(shape, *arguments)
        depths.add(len(path) - 1)
        beside += path != list(range(len(path)))
        return path

    monkeypatch.setattr(rules, "walk", watched)
    for name in ("llama", "gpt_neox", "codegen", "mistral_windowed"):
        token_heads = fitted_heads(family, name)
        decoding = heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=12, width=3), lookup=lookup)
        options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask, **NO_EOS}
        plain = plain_generate(token_heads.backbone.model, tokens, **options)
        ours = token_heads.backbone.model.generate(tokens, custom_generate=decoding, **options)
        assert torch.equal(ours, plain), name
    assert depths >= {0, 1, 2, 3}, f"accepted depths {depths}: the equality above shows too little"
    assert beside, "no path beside the likeliest one was ever accepted"


@pytest.mark.parametrize("family", ["medusa", "grounded"])
def test_rows_that_end_leave_the_batch_and_the_texts_end_cuts_paths(family):
    token_heads = fitted_heads(family, "qwen3")
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=9))
    tokens = random_tokens(4, 6, seed=53)
    free = model.generate(tokens, max_new_tokens=24, do_sample=False, **NO_EOS)[:, 6:]
    eos = int(free[0, 5])
    for length in (1, 2, 7, 24):
        options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": eos, "pad_token_id": PAD}
        plain = plain_generate(model, tokens, **options)
        assert torch.equal(model.generate(tokens, custom_generate=decoding, **options), plain)


def test_sampled_text_is_generates_draw_for_draw():
    token_heads = fitted_heads("grounded", "llama")
    decoding = heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=9))
    texts = []
    for custom in (None, decoding):
        torch.manual_seed(3)
        texts.append(
            token_heads.backbone.model.generate(
                PROMPT, max_new_tokens=32, do_sample=True, temperature=0.8, top_k=9, custom_generate=custom, **NO_EOS
            )
        )
    assert torch.equal(*texts)


def test_a_pass_synchronises_once_for_the_shapes(monkeypatch):
    """On a CPU nothing waits, so what would is counted: `tolist`, `item` and their like on tensors while drafting."""
    token_heads = fitted_heads("grounded", "llama")
    state, root_B = begin(token_heads)
    projections = [token_heads.projection(k + 1) for k in range(3)]
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        plain = getattr(torch.Tensor, name)

        def counted(self, *arguments, plain=plain, name=name, **more):
            waits.append(name)
            return plain(self, *arguments, **more)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with torch.no_grad():
        grown = grow(token_heads, projections, state, root_B, DynamicTree(nodes=12)).with_chains(root_B[:, None])
    assert waits == []
    grown.shapes()
    assert waits == ["tolist"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"nodes": 1}, {"nodes": 5000}, {"depth": 0}, {"width": 0}], ids=str)
def test_numbers_have_ranges(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=rf"DynamicTree\({name}={value}\) was given; allowed are"):
        DynamicTree(**given)


def test_a_tree_deeper_than_there_are_heads_is_refused():
    with pytest.raises(ValueError, match="4 deep but there are 3 heads"):
        heads.TreeDecoding(fitted_heads("grounded", "llama"), heads.DynamicTree(depth=4))


def test_a_vocabulary_smaller_than_the_budget_gives_fewer_nodes():
    token_heads = fitted_heads("grounded", "llama")
    state, root_B = begin(token_heads)
    with torch.no_grad():
        grown = grow(token_heads, [token_heads.projection(1)], state, root_B, DynamicTree(nodes=100, depth=1))
    assert grown.tokens_BN.shape == (3, 1 + VOCAB)


# --- the root alone --------------------------------------------------------------------------------------------------


@covering(family=FAMILIES, lookup=[10, 0])
def test_a_tree_of_the_root_alone_never_asks_the_heads(family, lookup, monkeypatch):
    token_heads = fitted_heads(family, "llama")
    for name in ("commit", "first_level", "step", "keep_rows"):
        monkeypatch.setattr(token_heads, name, lambda *_: pytest.fail("the heads were asked"))
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    decoding = heads.TreeDecoding(token_heads, heads.Tree.root_only(), lookup=lookup)
    options = {"max_new_tokens": 24, "attention_mask": mask, "do_sample": False, **NO_EOS}
    model = token_heads.backbone.model
    plain = model.generate(tokens, **options)
    ours = model.generate(tokens, custom_generate=decoding, return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, plain)
    assert (ours.stats.tokens_per_pass > 1) == bool(lookup)

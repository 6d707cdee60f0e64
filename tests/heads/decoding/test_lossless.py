"""Lossless rules give the backbone's distribution, whatever drafts are.

On toy vocabularies every outcome of every sample is enumerated with its probability: the rule's own code runs once for
each, and what comes out is the backbone's distribution to 1e-12 (float64 sums of a few thousand terms; 1e-15 is seen).
Through `generate` it is a chi-square test. Both are also run on rules that are wrong on purpose, and fail them.
"""
# V vocabulary, N node

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from throwaway_families import make_heads
from tiny import tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import heads
from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.backbone.model import Backbone
from heads.decoding.acceptance import probability as acceptance
from heads.decoding.acceptance.probability import reject_in_turn
from heads.decoding.acceptance.rules import ExactRule, RejectionRule, Rule, VerifiedNodes
from heads.decoding.proposers import static_tree
from heads.decoding.proposers.static_tree import sample_without_replacement
from heads.decoding.request.request import Request, Row
from heads.decoding.trees.static import Shape

EXACT = 1e-12


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_distribution(size: int, seed: int) -> Tensor:
    return torch.softmax(2 * torch.randn(size, generator=torch.Generator().manual_seed(seed)).double(), dim=-1)


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum()) / 2


# --- one token, enumerated -------------------------------------------------------------------------------------------


def draws_without_replacement(q: Sequence[float], count: int) -> Iterator[tuple[float, list[int]]]:
    """Every sequence of drafts and its probability; where q gives no more tokens, the first others fill up."""
    for sampled in itertools.permutations(range(len(q)), count):
        probability, left = 1.0, sum(q)
        for i, x in enumerate(sampled):
            if left > 0:
                probability *= q[x] / left
                left = sum(q[y] for y in range(len(q)) if y not in sampled[: i + 1])
            elif x != min(y for y in range(len(q)) if y not in sampled[:i]):
                probability = 0.0
        if probability:
            yield probability, list(sampled)


def law_of_the_token(p_V: Tensor, q_V: Tensor, num_drafts: int, stated_V: Tensor | None = None) -> Tensor:
    """The distribution that `reject_in_turn` gives over all drafts from q and all coins; it may be told another q."""
    stated_V = q_V if stated_V is None else stated_V
    law_V = torch.zeros_like(p_V)
    for probability, drafts in draws_without_replacement(q_V.tolist(), num_drafts):
        accept_C, rest_V = reject_in_turn(p_V, stated_V, drafts)
        for x, accepted in zip(drafts, accept_C.tolist(), strict=True):
            law_V[x] += probability * accepted
            probability *= 1 - accepted
        law_V += probability * rest_V
    return law_V


CASES: dict[str, tuple[Tensor, Tensor]] = {
    "figure 10": (doubles(0.30, 0.45, 0.10, 0.15), doubles(0.4, 0.3, 0.2, 0.1)),
    "random": (random_distribution(6, seed=1), random_distribution(6, seed=2)),
    "p = q": (random_distribution(5, seed=3), random_distribution(5, seed=3)),
    "p = q but for rounding": (random_distribution(5, seed=3), random_distribution(5, seed=3) * (1 + 1e-15)),
    "disjoint": (doubles(0.2, 0.8, 0, 0, 0), doubles(0, 0, 0.5, 0.3, 0.2)),
    "overlapping": (doubles(0.2, 0.5, 0.3, 0), doubles(0, 0.6, 0.1, 0.3)),
    "p one-hot": (doubles(0, 0, 1, 0), doubles(0.1, 0.2, 0.3, 0.4)),
    "q one-hot": (doubles(0.1, 0.2, 0.3, 0.4), doubles(0, 1, 0, 0)),
    "both one-hot, equal": (doubles(0, 1, 0), doubles(0, 1, 0)),
    "both one-hot, different": (doubles(0, 1, 0), doubles(1, 0, 0)),
    "not sampled at all": (random_distribution(4, seed=4), torch.zeros(4, dtype=torch.float64)),
    "q certain but for 1e-14": (doubles(0.3, 0.3, 0.4), doubles(1e-14, 1 - 2e-14, 1e-14)),
}


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_law_is_the_backbones(case, num_drafts):
    p_V, q_V = CASES[case]
    assert total_variation(law_of_the_token(p_V, q_V, num_drafts), p_V) <= EXACT


def test_drafts_are_kept_as_often_as_can_be():
    """For one draft no rule keeps more than Σ min(p, q); more drafts keep more."""
    p_V, q_V = CASES["random"]
    kept = []
    for count in (1, 2, 3):
        rejected = [
            probability * float((1 - reject_in_turn(p_V, q_V, drafts)[0]).prod())
            for probability, drafts in draws_without_replacement(q_V.tolist(), count)
        ]
        kept.append(1 - sum(rejected))
    assert kept[0] == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=EXACT)
    assert kept == sorted(kept)
    assert kept[2] - kept[0] > 0.05


def without_residual(r_V: Tensor, q_V: Tensor) -> Tensor:
    return r_V


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_the_enumeration_fails_a_rule_without_the_residual(num_drafts, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", without_residual)
    p_V, q_V = CASES["random"]
    assert total_variation(law_of_the_token(p_V, q_V, num_drafts), p_V) > 0.05


SOME = DraftVocabulary(tokens_S=torch.tensor([1, 2, 5]), size=6)
"""What heads with a draft vocabulary score."""


def law_of_scored_drafts(p_V: Tensor, q_S: Tensor, num_drafts: int, stated_V: Tensor) -> Tensor:
    """As `law_of_the_token`, with drafts from a distribution over `SOME` tokens, and the q that the rule is told."""
    law_V = torch.zeros_like(p_V)
    for probability, entries in draws_without_replacement(q_S.tolist(), num_drafts):
        drafts = SOME.ids(torch.tensor(entries)).tolist()
        accept_C, rest_V = reject_in_turn(p_V, stated_V, drafts)
        for x, accepted in zip(drafts, accept_C.tolist(), strict=True):
            law_V[x] += probability * accepted
            probability *= 1 - accepted
        law_V += probability * rest_V
    return law_V


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_tokens_law_is_the_backbones_where_heads_score_some_tokens(num_drafts):
    """q is 0 outside of the draft vocabulary, and a distribution inside: p's other tokens come from what is left."""
    p_V, q_S = random_distribution(6, seed=1), random_distribution(3, seed=2)
    assert total_variation(law_of_scored_drafts(p_V, q_S, num_drafts, SOME.spread(q_S, 0.0)), p_V) <= EXACT
    misplaced_V = torch.cat([q_S, torch.zeros(3, dtype=torch.float64)])  # entries taken for ids
    assert total_variation(law_of_scored_drafts(p_V, q_S, num_drafts, misplaced_V), p_V) > 0.02


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_the_enumeration_fails_where_q_is_not_what_drafts_were_drawn_from(num_drafts):
    """Drafts of temperature 1 weighed as if they were of temperature 1/2."""
    p_V, q_V = CASES["random"]
    assert total_variation(law_of_the_token(p_V, q_V, num_drafts, stated_V=q_V**2), p_V) > 0.02


# --- three tokens over a tree, enumerated ----------------------------------------------------------------------------


class Outcomes:
    """Runs a function once for every outcome of the choices that it asks for."""

    def __init__(self) -> None:
        self.script: list[int] = []

    def choose(self, probabilities: Sequence[float]) -> int:
        """An outcome of positive probability; which one is next in the script."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if self.asked == len(self.script):
            self.script.append(0)
        chosen = possible[self.script[self.asked]]
        self.left.append(len(possible) - 1 - self.script[self.asked])
        self.asked += 1
        self.probability *= probabilities[chosen] / sum(probabilities)
        return chosen

    def run_all(self, function: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        while True:
            self.asked, self.probability, self.left = 0, 1.0, list[int]()
            result = function()
            yield self.probability, result
            while self.left and self.left[-1] == 0:
                self.left.pop()
            if not self.left:
                return
            self.script = self.script[: len(self.left)]
            self.script[-1] += 1


@functools.cache
def toy_logits(role: str, text: tuple[int, ...], size: int = 3) -> Tensor:
    """A toy model: logits that depend on the whole text."""
    seed = sum((token + 1) * 7**i for i, token in enumerate(text)) + 1000 * (role == "draft")
    return 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


PROMPT = (2, 0)
BUSHY = Shape((-1, 0, 1, 1, 0, 4))  # two children below the root, two below the first of them and one below the other
LINE = Shape((-1, 0, 1))
TOY_PROCESSORS = {
    "none": [],
    "temperature and top_k": [TemperatureLogitsWarper(0.6), TopKLogitsWarper(2)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.6)],
}


@functools.cache
def p_after(text: tuple[int, ...], processors: str) -> list[float]:
    """The backbone's distribution behind a text, all processors applied."""
    own = LogitsProcessorList(TOY_PROCESSORS[processors])
    scores_1V = own(torch.tensor([text]), toy_logits("backbone", text)[None].clone())
    return torch.softmax(scores_1V[0], dim=-1, dtype=torch.float64).tolist()


@functools.cache
def q_after(text: tuple[int, ...]) -> Tensor:
    return torch.softmax(toy_logits("draft", text), dim=-1)


class ToyPass:
    """One pass of a rule over a tree, every random choice taken from `Outcomes`, those of the drafts included.

    Args:
        chain: looked-up tokens beside the tree.
    """

    def __init__(self, rule: Rule, tree: Shape, chain: Sequence[int], processors: str, outcomes: Outcomes) -> None:
        self.rule, self.tree, self.chain, self.outcomes = rule, tree, chain, outcomes
        self.shape = tree.with_chain(len(chain)) if chain else tree
        self.request = Request(
            processors=LogitsProcessorList(TOY_PROCESSORS[processors]),
            choose=lambda scores_1V: outcomes.choose(torch.softmax(scores_1V[0].double(), dim=-1).tolist()),
            max_length=99,
            eos_tokens=frozenset(),
            criteria=StoppingCriteriaList(),
            pad_token=0,
            keep_scores=False,
            keep_logits=False,
            as_dict=False,
            keep_cache=False,
            greedy=False,
        )

    def run(self) -> tuple[int, ...]:
        """The tokens that the pass emits."""
        tokens = [*self.draft(), *self.chain]
        texts = [self.text(tokens, node) for node in range(self.shape.num_nodes)]
        nodes = VerifiedNodes(
            shape=self.shape,
            tokens=tokens,
            logits_NV=torch.stack([toy_logits("backbone", text) for text in texts]),
            chosen=None,
            q_NV=torch.stack([q_after(text) for text in texts]) if self.rule.samples_drafts else None,
            sampled_from=[*self.tree.parents, *[-1] * len(self.chain)],
        )
        row = Row(request=self.request, tokens=list(PROMPT), device=torch.device("cpu"))
        path = self.rule.accept(row, nodes)
        emitted = tuple(row.tokens[len(PROMPT) :])
        assert [tokens[node] for node in path[1:]] == list(emitted[: len(path) - 1])
        assert len(emitted) == len(path), "the path's tokens and one more"
        return emitted

    def text(self, tokens: Sequence[int], node: int) -> tuple[int, ...]:
        return PROMPT[:-1] + tuple(tokens[i] for i in self.shape.ancestors(node))

    def draft(self) -> list[int]:
        """The tree's tokens, those of one parent without replacement; the likeliest where none are sampled."""
        tokens = [PROMPT[-1]]
        for node in range(1, self.tree.num_nodes):
            parent = self.tree.parents[node]
            q = q_after(self.text(tokens, parent)).tolist()
            for sibling in self.tree.children[parent]:
                if sibling < node:
                    q[tokens[sibling]] = 0.0
            tokens.append(self.outcomes.choose(q) if self.rule.samples_drafts else q.index(max(q)))
        return tokens

    def settle(self, drafts: Sequence[int], accept_C: Tensor, rest_V: Tensor, generator: Any) -> int:
        """In place of `acceptance.settle`."""
        for x, accepted in zip(drafts, accept_C.tolist(), strict=True):
            if self.outcomes.choose([1 - accepted, accepted]):
                return x
        return self.outcomes.choose(rest_V.tolist())


def law_of_three_tokens(
    rule: Rule, tree: Shape, chain: Sequence[int], processors: str, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], float]:
    """The distribution of the next three tokens; what a pass leaves open, plain generation fills."""
    outcomes = Outcomes()
    toy = ToyPass(rule, tree, chain, processors, outcomes)
    monkeypatch.setattr(acceptance, "settle", toy.settle)
    passes: dict[tuple[int, ...], float] = defaultdict(float)
    for probability, emitted in outcomes.run_all(toy.run):
        passes[emitted] += probability
    assert {len(emitted) for emitted in passes} >= {1, 3}, "some passes keep nothing, some whole paths"
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, probability in passes.items():
        for rest in itertools.product(range(3), repeat=3 - len(emitted)):
            law[emitted + rest] += probability * plain_law(emitted + rest, len(emitted), processors)
    return law


def plain_law(text: tuple[int, ...], start: int, processors: str) -> float:
    """The backbone's probability of text[start:], given what is before it."""
    return math.prod(p_after(PROMPT + text[:i], processors)[text[i]] for i in range(start, len(text)))


def distance_to_the_backbones(law: dict[tuple[int, ...], float], processors: str) -> float:
    texts = itertools.product(range(3), repeat=3)
    return sum(abs(law[text] - plain_law(text, 0, processors)) for text in texts) / 2


@pytest.mark.parametrize(
    ("processors", "tree", "chain"),
    [
        ("none", BUSHY, ()),
        ("none", BUSHY, (1, 1)),
        ("none", LINE, (1, 1)),
        ("temperature and top_k", BUSHY, (1, 1)),
        ("repetition penalty", BUSHY, (1, 1)),
    ],
    ids=["bushy", "bushy_chain", "line_chain", "temperature_top_k", "penalty"],
)
@pytest.mark.parametrize("rule", [ExactRule(), RejectionRule()], ids=["exact", "rejection"])
def test_three_tokens_of_a_tree_have_the_backbones_joint_distribution(rule, processors, tree, chain, monkeypatch):
    law = law_of_three_tokens(rule, tree, chain, processors, monkeypatch)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance_to_the_backbones(law, processors) <= EXACT


class TakesTheChainForDrawn(RejectionRule):
    """Wrong on purpose: the looked-up token is weighed as if q had given it."""

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        return super().accept(row, dataclasses.replace(nodes, sampled_from=nodes.shape.parents))


def test_the_joint_distribution_fails_wrong_rules(monkeypatch):
    law = law_of_three_tokens(TakesTheChainForDrawn(), LINE, (1, 1), "none", monkeypatch)
    assert distance_to_the_backbones(law, "none") > 0.005
    monkeypatch.setattr(acceptance, "residual", without_residual)
    law = law_of_three_tokens(RejectionRule(), BUSHY, (), "none", monkeypatch)
    assert distance_to_the_backbones(law, "none") > 0.01


# --- through generate, by chi-square ---------------------------------------------------------------------------------

DRAWS = 600
PROMPT_5 = torch.tensor([[1, 4, 2]])
TREE_5 = [[0], [0, 0], [0, 1], [1], [2], [2, 0]]
BASE: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "several": {"temperature": 1.5, "top_k": 4, "top_p": 0.95, "repetition_penalty": 1.2},
}


@functools.cache
def five_tokens() -> Any:
    return tiny_model("llama", attn="sdpa", seed=3, vocab_size=5, pad_token_id=None)


@functools.cache
def law_of_pairs(sampling: str) -> Tensor:
    """(25,): the backbone's exact distribution of (x_2, x_3), with the very processors that `generate` makes."""
    model, made = five_tokens(), []

    def capture(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, *_: Any, **__: Any) -> Tensor:
        made.append(logits_processor)
        return input_ids

    model.generate(PROMPT_5, custom_generate=capture, max_new_tokens=1, **(BASE | SAMPLING[sampling]))
    law = torch.ones(1, dtype=torch.float64)
    texts_CL = PROMPT_5
    for _ in range(3):
        with torch.no_grad():
            logits_CV = model(input_ids=texts_CL, use_cache=False).logits[:, -1].float()
        p_CV = torch.softmax(made[0](texts_CL, logits_CV), dim=-1, dtype=torch.float64)
        law = (law[:, None] * p_CV).flatten()
        next_C1 = torch.arange(5).repeat(len(texts_CL))[:, None]
        texts_CL = torch.cat([texts_CL.repeat_interleave(5, dim=0), next_C1], dim=1)
    return law.view(5, 25).sum(dim=0)


def p_value(found: Tensor, law: Tensor) -> float:
    """Pearson's chi-square of counts against a distribution; rare cells are put together, as the test asks for."""
    wanted = law * found.sum()
    assert float(found[law == 0].sum()) == 0, "a text that the backbone forbids"
    frequent = wanted >= 5
    cells = [*zip(found[frequent].tolist(), wanted[frequent].tolist(), strict=True)]
    if float(wanted[~frequent].sum()) > 0:
        cells.append((float(found[~frequent].sum()), float(wanted[~frequent].sum())))
    assert len(cells) >= 5, "too few cells to tell distributions apart"
    statistic = sum((f - w) ** 2 / w for f, w in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def sampled_pairs(
    sampling: str, rule: str, family: str, lookup: int, *, seed: int = 5, draft_tokens: Sequence[int] | None = None
) -> tuple[Tensor, Any]:
    """How often each (x_2, x_3) came out: both can come of the one tree pass after the prompt's."""
    token_heads = make_heads(family, Backbone(five_tokens()), num_heads=2, draft_tokens=draft_tokens)
    generator = torch.Generator().manual_seed(seed)
    decoding = heads.TreeDecoding(token_heads, TREE_5, generator=generator, lookup=lookup, rule=rule)
    out = five_tokens().generate(
        PROMPT_5,
        custom_generate=decoding,
        max_new_tokens=3,
        num_return_sequences=DRAWS,
        return_dict_in_generate=True,
        **(BASE | SAMPLING[sampling]),
    )
    return torch.bincount(out.sequences[:, 4] * 5 + out.sequences[:, 5], minlength=25).double(), out.stats


# Eight tests at 1e-4: were all seeds sampled anew, a right rule would fail one of them once in 1250 times. Seeds are
# fixed, so it passes always or never. 600 draws over 25 pairs find a law that is off by Σ(p' - p)²/p = 0.15 ninety-nine
# times in a hundred; the wrong rules below are far beyond that.
RIGHT, WRONG = 1e-4, 1e-12


@pytest.mark.parametrize(
    ("sampling", "family", "lookup"),
    [
        ("temperature", "medusa", 0),
        ("top_k", "own_output", 4),
        ("top_p", "medusa", 4),
        ("min_p", "own_output", 0),
        ("repetition_penalty", "medusa", 0),
        ("several", "own_output", 4),
    ],
)
def test_sampled_pairs_follow_the_backbones_distribution(sampling, family, lookup):
    found, stats = sampled_pairs(sampling, "rejection", family, lookup)
    assert min(stats.accepted_per_depth[:2]) > DRAWS / 50, "both depths were accepted at times"
    assert stats.accepted_per_depth[0] < stats.row_passes - DRAWS, "and rejected at times"
    assert p_value(found, law_of_pairs(sampling)) > RIGHT


@pytest.mark.parametrize(("sampling", "family"), [("temperature", "medusa"), ("several", "own_output")])
def test_sampled_pairs_of_heads_with_a_draft_vocabulary_follow_it_too(sampling, family):
    """Three of five tokens are scored; as many nodes stand below the root."""
    found, stats = sampled_pairs(sampling, "rejection", family, 0, draft_tokens=[0, 2, 3])
    assert min(stats.accepted_per_depth[:2]) > DRAWS / 50
    assert p_value(found, law_of_pairs(sampling)) > RIGHT


@pytest.mark.parametrize("sampling", ["min_p", "several"])
def test_pairs_of_the_exact_rule_follow_it_too(sampling):
    found, _ = sampled_pairs(sampling, "exact", "own_output", 0)
    assert p_value(found, law_of_pairs(sampling)) > RIGHT


@pytest.mark.parametrize("sampling", ["temperature", "repetition_penalty"])
def test_a_rule_without_the_residual_fails_the_chi_square(sampling, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", without_residual)
    found, _ = sampled_pairs(sampling, "rejection", "medusa", 0)
    assert p_value(found, law_of_pairs(sampling)) < WRONG


def test_drafts_of_another_temperature_than_stated_fail_the_chi_square(monkeypatch):
    """The rule is told q, but its drafts are sampled from q² (temperature 1/2)."""

    def colder(q_MV: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        return sample_without_replacement(q_MV**2, count, generator)

    monkeypatch.setattr(static_tree, "sample_without_replacement", colder)
    found, _ = sampled_pairs("temperature", "rejection", "medusa", 0)
    assert p_value(found, law_of_pairs("temperature")) < WRONG


def test_the_lossy_rule_fails_the_chi_square():
    found, _ = sampled_pairs("temperature", "typical", "medusa", 0)
    assert p_value(found, law_of_pairs("temperature")) < WRONG

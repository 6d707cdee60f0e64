"""All nodes in one batch beside the walk: the same text, the same samples from a seed, one synchronisation a pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrices import covering
from throwaway_families import fitted_heads
from tiny import PAD, VOCAB, left_padded, random_tokens
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

import heads
from heads.decoding.acceptance import batched
from heads.decoding.acceptance.batched import ReplayableNoise, score_nodes
from heads.decoding.request.request import Row
from heads.decoding.trees.static import Tree

TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
ROOM: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD, "max_new_tokens": 30}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy, penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "temperature": {"do_sample": True, "temperature": 1.3, "top_k": 0},
    "top_k, penalty": {"do_sample": True, "top_k": 8, "repetition_penalty": 1.2},
    "top_p": {"do_sample": True, "top_p": 0.8, "top_k": 0},
    "min_p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
}


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(batched, "is_faster", lambda *_: True)


class Waits(TorchFunctionMode):
    """Counts what an accelerator would be waited for: values that are read, and shapes that depend on values."""

    READ = ("tolist", "item", "cpu", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__")
    SHAPED = ("nonzero", "argwhere", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool
        self.count += name in self.READ + self.SHAPED or by_mask or (name == "where" and len(args) == 1)
        return func(*args, **(kwargs or {}))


def decode(token_heads: Any, prompt: torch.Tensor, seed: int = 3, tree: Any = TREE, **asked: Any) -> Any:
    decoding = heads.TreeDecoding(token_heads, tree, lookup=4)
    torch.manual_seed(seed)
    return token_heads.backbone.model.generate(
        prompt, custom_generate=decoding, return_dict_in_generate=True, **(ROOM | asked)
    )


@pytest.mark.parametrize("tree", [TREE, heads.DynamicTree(nodes=6)], ids=["static", "dynamic"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_text_is_generates_for_the_same_seed(setting, tree, everywhere):
    """Draws that are not used go back: after the call the generator stands where plain generation leaves it."""
    token_heads, asked = fitted_heads("grounded", "llama"), SETTINGS[setting]
    prompt = random_tokens(1, 5, seed=11)
    torch.manual_seed(3)
    plain = token_heads.backbone.model.generate(prompt, **ROOM, **asked)
    after = torch.rand(1)
    out = decode(token_heads, prompt, tree=tree, **asked)
    assert torch.equal(out.sequences, plain)
    assert torch.equal(torch.rand(1), after)
    assert out.stats.tokens_per_pass > 1.05, "drafts are to be accepted now and then"


def test_a_padded_batch_with_a_penalty_is_generates(everywhere):
    token_heads = fitted_heads("medusa", "llama")
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 6, 5)])
    asked = {"attention_mask": mask, "do_sample": False, "repetition_penalty": 1.3}
    plain = token_heads.backbone.model.generate(tokens, **ROOM, **asked)
    assert torch.equal(decode(token_heads, tokens, **asked).sequences, plain)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_rows_are_scored_in_groups_where_nodes_hold_many_numbers(do_sample, everywhere, monkeypatch):
    """Rows accept different numbers of tokens, so their prefixes part; whatever the groups, the text is one."""
    token_heads = fitted_heads("grounded", "llama")
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 6, 5)])
    asked = {"attention_mask": mask, "do_sample": do_sample, "repetition_penalty": 1.3}
    together = decode(token_heads, tokens, **asked)
    lengths: list[int] = []
    real = batched.score_nodes
    monkeypatch.setattr(batched, "score_nodes", lambda rows, *rest: lengths.append(len(rows)) or real(rows, *rest))
    for numbers, largest in ((1, 1), (2 * len(TREE.paths) * VOCAB, 2)):
        lengths.clear()
        monkeypatch.setattr(batched, "MAX_NUMBERS", numbers)
        assert torch.equal(decode(token_heads, tokens, **asked).sequences, together.sequences)
        assert max(lengths) == largest


def test_a_cpu_walks_where_nodes_hold_many_numbers_or_are_drawn_for():
    """16 nodes of 2,148 numbers are 1.05 calls: a walk of two depths is as long, one of three is longer."""

    class Asked:
        processors = LogitsProcessorList()
        max_length = 20

        def __init__(self, greedy: bool) -> None:
            self.greedy = greedy

        def processors_of(self, row: int) -> LogitsProcessorList:
            return self.processors

        def criteria_of(self, row: int) -> StoppingCriteriaList:
            return StoppingCriteriaList()

    greedy, sampled = (
        Row(request=Asked(greedy), tokens=[1] * 100, device=torch.device("cpu"))  # type: ignore[arg-type]
        for greedy in (True, False)
    )
    few, many = torch.zeros(1, 16, 2048), torch.zeros(1, 16, 32000)
    assert batched.is_faster([greedy], few, depths=3)
    assert not batched.is_faster([greedy], few, depths=2)
    assert not batched.is_faster([greedy], many, depths=10)
    assert not batched.is_faster([sampled], few, depths=10)
    assert batched.is_faster([sampled], many.to("meta"), depths=1)


@pytest.mark.parametrize("ignored", [5, 30, torch.tensor([7, 6, 5])], ids=["the prompt", "more", "of each row"])
def test_a_penalty_that_leaves_out_the_first_tokens_is_generates(ignored, everywhere):
    """Where it leaves out more than the text so far, the nodes' tokens would stand at columns that are no places."""
    token_heads = fitted_heads("grounded", "llama")
    rows = len(ignored) if isinstance(ignored, torch.Tensor) else 1
    prompt = random_tokens(rows, 5, seed=11)
    asked = {"do_sample": False, "logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, ignored)]}
    plain = token_heads.backbone.model.generate(prompt, **ROOM, **asked)
    assert torch.equal(decode(token_heads, prompt, **asked).sequences, plain)


@covering(asked=[{"do_sample": False}, *SETTINGS.values()], tree=[TREE, heads.DynamicTree(nodes=6)])
def test_a_pass_waits_once(asked, tree, everywhere):
    """Counted over whole calls of different length: what further passes add is once each."""
    token_heads = fitted_heads("grounded", "llama")
    prompt = random_tokens(1, 5, seed=11)
    seen = []
    for new_tokens in (6, 30):
        with Waits() as waiting:
            out = decode(token_heads, prompt, tree=tree, **asked | {"max_new_tokens": new_tokens})
        seen.append((out.stats.passes, waiting.count))
    (few, before), (many, after) = seen
    assert many > few
    assert after - before == many - few


class Odd(LogitsProcessor):
    """One of the caller's own, which may keep state."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape[0] == 1, "it is called for emitted tokens alone"
        return scores + (torch.arange(scores.shape[1]) % 3 == input_ids.shape[1] % 3)


@pytest.mark.parametrize(
    "asked", [{"logits_processor": LogitsProcessorList([Odd()])}, {"no_repeat_ngram_size": 2}], ids=["own", "ngrams"]
)
def test_other_processors_are_walked(asked, everywhere, monkeypatch):
    monkeypatch.setattr(batched, "choose_at_nodes", None)
    token_heads = fitted_heads("grounded", "llama")
    prompt = random_tokens(1, 5, seed=11)
    plain = token_heads.backbone.model.generate(prompt, do_sample=False, **ROOM, **asked)
    assert torch.equal(decode(token_heads, prompt, do_sample=False, **asked).sequences, plain)


def test_each_node_is_penalised_by_its_own_prefix():
    """Siblings do not count; a prefix that is shorter than others is filled up with what it holds."""
    tree = Tree([[0], [0, 0], [1]])
    tokens_N, logits_NV = torch.tensor([2, 5, 6, 7]), random_tokens(4, 10).float()[:, :1] + torch.arange(1.0, 11.0)

    class Asked:
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
        max_length = 20

        def processors_of(self, row: int) -> LogitsProcessorList:
            return self.processors

        def criteria_of(self, row: int) -> StoppingCriteriaList:
            return StoppingCriteriaList()

    row = Row(request=Asked(), tokens=[1, 2], device=torch.device("cpu"))  # type: ignore[arg-type]
    (found_NV,) = score_nodes([row], tokens_N[None], tree.sees_NN()[None], logits_NV[None])
    for node, held in enumerate(([1, 2], [1, 2, 5], [1, 2, 5, 6], [1, 2, 7])):
        expected_V = logits_NV[node].clone()
        expected_V[held] /= 2
        assert torch.equal(found_NV[node], expected_V)


@pytest.mark.parametrize("processors", [[], [RepetitionPenaltyLogitsProcessor(2.0)]], ids=["none", "penalty"])
def test_scores_lie_on_the_device_of_the_row(processors):
    """A spread backbone ends elsewhere; plain generation brings its scores back, and processors and draws are there."""

    class Asked:
        max_length = 20

        def processors_of(self, row: int) -> LogitsProcessorList:
            return LogitsProcessorList(processors)

        def criteria_of(self, row: int) -> StoppingCriteriaList:
            return StoppingCriteriaList()

    row = Row(request=Asked(), tokens=[1, 2], device=torch.device("meta"))  # type: ignore[arg-type]
    (found_NV,) = score_nodes([row], torch.tensor([[2, 5]]), Tree([[0]]).sees_NN()[None], torch.zeros(1, 2, 10))
    assert (found_NV.device.type, found_NV.shape) == ("meta", (2, 10))


def test_the_generator_is_rewound_to_where_the_walk_ended():
    generator = torch.Generator().manual_seed(1)
    plain = copy.copy(generator.get_state())
    noise = ReplayableNoise(generator)
    sampled_DV = noise.sample(torch.zeros(5), depths=4)
    noise.rewind(used=2)
    again = torch.Generator().manual_seed(1)
    again.set_state(plain)
    assert torch.equal(sampled_DV[1], [torch.zeros(5).exponential_(generator=again) for _ in range(2)][1])
    assert torch.equal(generator.get_state(), again.get_state())

"""What decoding has no equal of ends in a sentence or a warning, and what changes nothing passes.

Plain generation hands whole batches to processors and criteria; here they meet one row at a time. A class of the
caller's that tells rows apart would then be wrong without a word, so it is asked for a row's part, or refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from throwaway_families import fitted_heads
from tiny import EOS, PAD, VOCAB, random_tokens
from torch import Tensor
from transformers import LogitsProcessor, StaticCache, StoppingCriteria
from transformers.cache_utils import DynamicCache

import heads

PROMPTS = random_tokens(2, 6, seed=1)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}


class PushEach(LogitsProcessor):
    """Pushes each row towards a token of its own."""

    def __init__(self, mask_BV: Tensor) -> None:
        self.mask_BV = mask_BV

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.stack([scores_V + self.mask_BV[b] for b, scores_V in enumerate(scores)])


class PushEachOfRow(PushEach):
    def of_row(self, row: int) -> PushEach:
        return PushEach(self.mask_BV[row : row + 1])


class EndEach(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, lengths_B: Tensor) -> None:
        self.lengths_B = lengths_B

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths_B


class EndEachOfRow(EndEach):
    def of_row(self, row: int) -> EndEach:
        return EndEach(self.lengths_B[row : row + 1])


def masks() -> Tensor:
    mask_BV = torch.zeros(2, VOCAB)
    mask_BV[0, 5] = mask_BV[1, 7] = 100.0
    return mask_BV


def model_and(decoding: str) -> tuple[Any, Any]:
    """The model and a decoding of one class, lossless: dynamic decoding emits one token a pass."""
    token_heads = fitted_heads("medusa", "llama")
    model = token_heads.backbone.model
    if decoding == "draft":
        return model, heads.DraftModelDecoding(model, k=3)
    if decoding == "dynamic":
        return model, heads.DynamicDecoding(token_heads, threshold=1.0)
    return model, heads.TreeDecoding(token_heads, 6)


def run(model: Any, decoding: Any, tokens: Tensor = PROMPTS, **options: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": 12, **NO_EOS, **options}
    text: Tensor = model.generate(tokens, custom_generate=decoding, **options)
    return text


OWN = {
    "processor": ({"logits_processor": [PushEach(masks())]}, {"logits_processor": [PushEachOfRow(masks())]}),
    "criterion": (
        {"stopping_criteria": [EndEach(torch.tensor([8, 14]))], "eos_token_id": EOS},
        {"stopping_criteria": [EndEachOfRow(torch.tensor([8, 14]))], "eos_token_id": EOS},
    ),
}


@pytest.mark.parametrize("decoding", ["tree", "draft", "dynamic"])
@pytest.mark.parametrize("kind", OWN)
def test_own_classes_of_a_batch_give_a_rows_part_or_are_refused(kind, decoding):
    model, ours = model_and(decoding)
    refused, taken = OWN[kind]
    with pytest.raises(
        ValueError, match=r"was given for 2 rows.*give rows one at a time, or add a method `of_row\(row\)"
    ):
        run(model, ours, **refused)
    assert torch.equal(run(model, ours, **taken), run(model, None, **taken))


@pytest.mark.parametrize(
    "own",
    [
        {"logits_processor": [PushEach(masks()[:1])]},
        {"stopping_criteria": [EndEach(torch.tensor([8]))], "eos_token_id": EOS},
    ],
    ids=["processor", "criterion"],
)
def test_own_classes_score_a_single_row(own):
    model, ours = model_and("tree")
    assert torch.equal(run(model, ours, PROMPTS[:1], **own), run(model, None, PROMPTS[:1], **own))


def test_rows_of_one_prompt_are_a_batch_too():
    model, ours = model_and("tree")
    with pytest.raises(ValueError, match="PushEach was given for 2 rows"):
        run(model, ours, PROMPTS[:1], num_return_sequences=2, do_sample=True, logits_processor=[PushEach(masks())])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dola_layers": "low"}, "dola_layers='low' was given"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "penalty_alpha=0.5 was given, which asks for contrastive search"),
        ({"prompt_lookup_num_tokens": 5}, r"TreeDecoding\(token_heads, lookup=…\)"),
        ({"assistant_early_exit": 1}, "assistant_early_exit=1 was given"),
        ({"force_words_ids": [[7]]}, r"force_words_ids=\[\[7\]\] was given, .* constrained beam search"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("decoding", ["tree", "draft", "dynamic"])
def test_other_ways_to_decode_are_refused(asked, said, decoding):
    model, ours = model_and(decoding)
    with pytest.raises(ValueError, match=said):
        run(model, ours, **asked)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "hybrid"},
        {"penalty_alpha": 0.0},
        {"prompt_lookup_num_tokens": None, "assistant_early_exit": None, "dola_layers": None},
    ],
    ids=str,
)
def test_what_changes_nothing_passes_without_a_word(asked):
    model, ours = model_and("tree")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(model, ours, **asked), run(model, None, **asked))


def test_contrastive_settings_of_a_request_that_samples_pass():
    """generate itself follows penalty_alpha in greedy requests alone."""
    model, ours = model_and("tree")
    asked = {"penalty_alpha": 0.5, "top_k": 4, "do_sample": True}
    torch.manual_seed(0)
    plain = run(model, None, PROMPTS[:1], **asked)
    torch.manual_seed(0)
    assert torch.equal(run(model, ours, PROMPTS[:1], **asked), plain)


@pytest.mark.parametrize("asked", [{"cache_implementation": "static"}, {"prefill_chunk_size": 2}], ids=str)
def test_settings_of_memory_and_time_are_said_to_have_no_effect_once(asked):
    model, ours = model_and("tree")
    (name,) = asked
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        texts = [run(model, ours, **asked) for _ in range(2)]
    assert [str(one.message).split("=")[0] for one in caught] == [name]
    assert torch.equal(texts[0], run(model, None))


def test_a_hub_configuration_that_names_a_hybrid_cache_works(monkeypatch):
    model, ours = model_and("tree")
    monkeypatch.setattr(model.generation_config, "cache_implementation", "hybrid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(model, ours), run(model, None))


def test_caches_of_another_kind_are_refused_and_the_plain_one_is_taken():
    model, ours = model_and("tree")
    with pytest.raises(ValueError, match="past_key_values was given as a StaticCache of your own"):
        run(model, ours, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(ValueError, match="past_key_values was given as a DynamicCache of your own"):
        run(model, ours, past_key_values=DynamicCache(config=model.config, offloading=True))
    assert torch.equal(run(model, ours, past_key_values=DynamicCache(config=model.config)), run(model, None))

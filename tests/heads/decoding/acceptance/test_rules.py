"""The rules on real requests: greedy text under every rule, ends, scores, batches, and what typical acceptance accepts.

That lossless rules are lossless is in test_lossless.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from throwaway_families import fitted_heads
from tiny import PAD, left_padded, random_tokens
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

import heads
from heads.decoding.acceptance.probability import typical_threshold
from heads.decoding.acceptance.rules import ExactRule, RejectionRule, read_rule

TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 0, 0], [2], [2, 0]])
PROMPT = random_tokens(1, 5, seed=50)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 0}
RULES = ["rejection", "typical"]


def generate(rule: Any, tokens: Tensor = PROMPT, *, seed: int = 0, lookup: int = 10, **options: Any) -> Any:
    token_heads = fitted_heads("grounded", "qwen3")
    generator = torch.Generator().manual_seed(seed)
    decoding = heads.TreeDecoding(token_heads, TREE, generator=generator, lookup=lookup, rule=rule)
    options = {"max_new_tokens": 24, "return_dict_in_generate": True, **NO_EOS, **options}
    return token_heads.backbone.model.generate(tokens, custom_generate=decoding, **options)


def plain(tokens: Tensor = PROMPT, **options: Any) -> Tensor:
    model = fitted_heads("grounded", "qwen3").backbone.model
    return model.generate(tokens, do_sample=False, **{"max_new_tokens": 24, **NO_EOS, **options})


# --- which rule ------------------------------------------------------------------------------------------------------


def test_rules_by_name_and_by_object():
    generator = torch.Generator()
    assert type(read_rule("exact", generator)) is ExactRule
    rejection = read_rule("rejection", generator)
    assert isinstance(rejection, RejectionRule)
    assert rejection.generator is generator
    own = heads.TypicalRule(epsilon=0.2, delta=0.1)
    assert read_rule(own, generator) is own


@pytest.mark.parametrize("rule", ["typicall", "", None, 3, heads.TypicalRule])
def test_an_unknown_rule_is_refused_in_a_sentence(rule):
    with pytest.raises(ValueError, match=r"allowed are 'exact', 'rejection', 'typical' and heads\.TypicalRule"):
        heads.TreeDecoding(fitted_heads("grounded", "qwen3"), TREE, rule=rule)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(-0.1, 0.3), (1.1, 0.3), (0.1, -1.0), (0.1, float("nan")), ("a", 0.3), (0.1, None)]
)
def test_thresholds_are_probabilities(epsilon, delta):
    with pytest.raises(ValueError, match="from 0 to 1"):
        heads.TypicalRule(epsilon=epsilon, delta=delta)


# --- greedy requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["batched", "node_by_node"])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_and_passes_are_those_of_the_exact_rule(rule, options):
    """Also that nothing is drawn: drafts are the heads' best, so passes are as few."""
    out = generate(rule, do_sample=False, **options)
    assert torch.equal(out.sequences, plain(**options))
    assert out.stats.passes == generate("exact", do_sample=False, **options).stats.passes


# --- sampled requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_scores_and_logits_are_those_of_the_emitted_text(rule):
    """One for each emitted token, with its own prefix: what a plain pass over the text and its processors give."""
    out = generate(rule, repetition_penalty=1.3, output_scores=True, output_logits=True, **SAMPLED)
    assert sum(out.stats.accepted_per_depth) > 2, "drafted tokens are among them"
    model = fitted_heads("grounded", "qwen3").backbone.model
    with torch.no_grad():
        logits_LV = model(out.sequences, use_cache=False).logits[0].float()
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(1.2)])
    assert len(out.scores) == len(out.logits) == 24
    for i in range(24):
        raw_1V = logits_LV[None, PROMPT.shape[1] + i - 1]
        # float64 logits that agree to 1e-14 and are then rounded to float32.
        torch.testing.assert_close(out.logits[i], raw_1V, atol=2e-6, rtol=0.0)
        scores_1V = processors(out.sequences[:, : PROMPT.shape[1] + i], raw_1V.clone())
        torch.testing.assert_close(out.scores[i], scores_1V, atol=5e-6, rtol=0.0)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_a_batch_end_by_themselves(rule):
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    ends = list(range(3, 9))
    out = generate(rule, tokens=tokens, attention_mask=mask, eos_token_id=ends, **SAMPLED)
    for row, drafted in zip(out.sequences[:, 9:].tolist(), out.stats.drafted, strict=True):
        text = row[: len(drafted)]
        assert not set(text[:-1]) & set(ends), "nothing behind an end token"
        assert text[-1] in ends or len(text) == 24
        assert all(token == PAD for token in row[len(drafted) :])
    assert len({len(drafted) for drafted in out.stats.drafted}) > 1


@pytest.mark.parametrize("rule", RULES)
def test_a_length_cuts_a_path(rule):
    cut = 0
    for length in range(1, 12):
        out = generate(rule, max_new_tokens=length, **{**SAMPLED, "temperature": 0.3})
        assert out.sequences.shape[1] == PROMPT.shape[1] + length
        cut += out.stats.drafted[0][-1]
    assert cut, "no length cut a path after a drafted token"


def test_a_seed_repeats_a_text_and_the_global_source_does_not_matter():
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(texts))
        texts.append(generate("rejection", seed=seed, **{**SAMPLED, "temperature": 2.0}).sequences)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_without_drawn_drafts_rejection_is_the_exact_rule_draw_for_draw():
    """While every row copies, the looked-up chain is all there is; and so it is for drafters that draw nothing."""
    token_heads = fitted_heads("grounded", "qwen3")
    texts = []
    for rule in (ExactRule(), RejectionRule(torch.Generator().manual_seed(9))):
        rule.samples_drafts = False
        decoding = heads.TreeDecoding(token_heads, TREE, generator=torch.Generator().manual_seed(3), rule=rule)
        out = token_heads.backbone.model.generate(
            PROMPT, custom_generate=decoding, max_new_tokens=24, **SAMPLED, **NO_EOS
        )
        texts.append(out)
    assert torch.equal(*texts)


# --- typical acceptance (lossy) --------------------------------------------------------------------------------------

UNFITTED = random_tokens(1, 5, seed=4)  # the heads were not fitted to what follows: drafts of every likelihood
HOT = {**SAMPLED, "temperature": 4.0, "lookup": 0}


def test_typical_drafts_are_above_the_threshold_and_the_others_are_the_best():
    rule = heads.TypicalRule(epsilon=0.3, delta=0.5)
    out = generate(rule, UNFITTED, output_scores=True, **HOT)
    emitted, drafted = out.sequences[0, PROMPT.shape[1] :].tolist(), out.stats.drafted[0]
    kinds = {True: 0, False: 0}
    for i in range(1, 24):  # the first is the prompt's own, chosen as the request says
        p_V = torch.softmax(out.scores[i][0], dim=-1)
        if drafted[i]:
            assert float(p_V[emitted[i]]) > float(typical_threshold(p_V, 0.3, 0.5))
        else:
            assert emitted[i] == int(p_V.argmax())
        kinds[drafted[i]] += 1
    assert min(kinds.values()) > 3
    unlikely = sum(emitted[i] != int(out.scores[i].argmax()) for i in range(1, 24) if drafted[i])
    assert unlikely, "lossy: drafts stay that are not the best"


def test_lower_thresholds_keep_more():
    """At 0 every draft stays that has any probability, so each pass is as long as the tree is deep."""
    per_pass = []
    for threshold in (0.0, 0.02, 0.9):
        stats = generate(heads.TypicalRule(epsilon=threshold, delta=1.0), UNFITTED, **HOT).stats
        per_pass.append(stats.tokens / (stats.row_passes - 1))
    assert per_pass == sorted(per_pass, reverse=True)
    assert per_pass[0] == 4
    assert per_pass[2] < 3


def test_nothing_stays_behind_an_end_token():
    """With no threshold at all every path is whole, but a drafted end token still ends the text."""
    rule = heads.TypicalRule(epsilon=0.0, delta=0.0)
    free = generate(rule, UNFITTED, **HOT)
    emitted, drafted = free.sequences[0, PROMPT.shape[1] :].tolist(), free.stats.drafted[0]
    inside = [i for i in range(1, 23) if drafted[i] and drafted[i + 1] and emitted[i] not in emitted[:i]]
    assert inside
    for place in inside:
        out = generate(rule, UNFITTED, eos_token_id=emitted[place], **HOT)
        text = out.sequences[0, PROMPT.shape[1] :].tolist()
        assert emitted[place] not in text[:-1]
        assert len(text) == len(out.stats.drafted[0])


def test_typical_acceptance_refuses_processors_that_cannot_be_copied():
    class Own(LogitsProcessor):
        def __init__(self) -> None:
            self.lines = (line for line in "ab")  # a generator cannot be copied

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    own = LogitsProcessorList([Own()])
    with pytest.raises(ValueError, match=r"Own cannot be copied \(cannot pickle 'gener"):
        generate("typical", logits_processor=own, **SAMPLED)
    generate("rejection", logits_processor=own, **SAMPLED)

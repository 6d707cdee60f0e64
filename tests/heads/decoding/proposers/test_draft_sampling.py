"""Sampled text with a draft model has the backbone's distribution, and drafts are accepted as often as they should."""

from __future__ import annotations

import collections

import pytest
import torch
from draft_runs import NO_EOS, PROMPT, SETTINGS, TOY, TOY_PROMPT, chi_square, joint, limit, noisy, shared

import heads


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_has_the_backbones_distribution(setting):
    """Three tokens in many rows: the prompt's pass gives the first, drafts or residuals the others."""
    model, draft_model, options = shared("llama", TOY), noisy("llama", 0.3, TOY), SETTINGS[setting]
    decoding = heads.DraftModelDecoding(draft_model, k=2, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([TOY_PROMPT]).expand(1000, -1)
    out = model.generate(
        rows,
        custom_generate=decoding,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **NO_EOS,
        **options,
    )
    found = collections.Counter(map(tuple, out.sequences[:, 4:].tolist()))
    wanted = joint(model, options)
    assert set(found) <= set(wanted), "a text that the processors forbid"
    statistic, degrees = chi_square(found, wanted)
    assert statistic < limit(degrees), setting
    drafts, degrees_of_drafts = chi_square(found, joint(draft_model, options))
    assert drafts > 2 * limit(degrees_of_drafts), "the draft model's own distribution would have passed too"
    compared = out.stats.row_passes - len(rows)
    assert 0.1 * compared < out.stats.accepted_per_depth[0] < 0.95 * compared, "both branches are to be taken often"


def test_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """P(accepted) is Σ min(p, q): the backbone's and the draft model's distributions after the same first token."""
    model, draft_model = shared("llama", TOY), noisy("llama", 0.3, TOY)
    options = {"temperature": 2.0, "top_k": 0}
    overlap = 0.0
    p, q = joint(model, options), joint(draft_model, options)
    first = {a: sum(v for text, v in p.items() if text[0] == a) for a in range(TOY)}
    for a in range(TOY):
        for b in range(TOY):
            p_ab, q_ab = (
                sum(v for text, v in j.items() if text[:2] == (a, b)) / sum(v for text, v in j.items() if text[0] == a)
                for j in (p, q)
            )
            overlap += first[a] * min(p_ab, q_ab)
    rows = torch.tensor([TOY_PROMPT]).expand(2000, -1)
    decoding = heads.DraftModelDecoding(draft_model, k=1, generator=torch.Generator().manual_seed(5))
    stats = model.generate(
        rows,
        custom_generate=decoding,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **NO_EOS,
        **options,
    ).stats
    after_first = sum(row[1] for row in stats.drafted) / len(rows)
    assert after_first == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / len(rows)) ** 0.5)


def test_a_draft_model_that_is_the_backbone_is_always_right_in_sampling_too():
    out = shared("llama").generate(
        PROMPT,
        custom_generate=heads.DraftModelDecoding(shared("llama"), k=3, generator=torch.Generator().manual_seed(0)),
        max_new_tokens=21,
        do_sample=True,
        temperature=1.5,
        top_k=10,
        return_dict_in_generate=True,
        **NO_EOS,
    )
    assert out.stats.accepted_per_depth == [5, 5, 5]


def test_a_generator_repeats_the_text():
    texts = [
        shared("llama").generate(
            PROMPT,
            custom_generate=heads.DraftModelDecoding(noisy("llama"), generator=torch.Generator().manual_seed(seed)),
            max_new_tokens=20,
            do_sample=True,
            temperature=1.5,
            **NO_EOS,
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])

"""The length of a draft model's chain: by hand, by what was measured, and without effect on the text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from draft_runs import NO_EOS, PROMPT, both, noisy, shared

import heads
from heads.decoding.proposers import draft_model as module
from heads.decoding.proposers.draft_length import DEFAULT_K, MAX_K, PROBES, AdaptiveLength, Seconds, expected_tokens
from heads.decoding.proposers.draft_model import ModelDrafter


def test_expected_tokens_by_hand():
    assert expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125 == (1 - 0.5**4) / (1 - 0.5)


def test_the_best_length_by_hand():
    """Draft tokens of 1 s, passes of 4 + k seconds, α = 1/2: E / S is 1.5/6, 1.75/8, 1.875/10, …: one token pays best.

    Passes that take 20 s whatever their length: 1.5/21, 1.75/22, 1.875/23, 1.9375/24, 1.96875/25: 0.0815 at 3.
    """
    for verify, best in ((lambda k: 4.0 + k, 1), (lambda k: 20.0, 3)):
        length = AdaptiveLength(compared=1e9, accepted=5e8)
        for k in PROBES:
            assert length.choose(2) == k
            length.compared, length.accepted = 1e9, 5e8
            length.observe(k=k, draft=1.0 * k, verify=verify(k), accepted=[0, 0], compared=[1, 1])
        length.compared, length.accepted = 1e9, 5e8
        assert length.choose(2) == best
        assert length.choose(1) == PROBES[0], "another batch size has times of its own"


def test_alpha_counts_what_was_compared():
    """No draft behind a rejected one is compared; earlier counts fade by 2 %."""
    length = AdaptiveLength(compared=0.0, accepted=0.0)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[0, 2, 4], compared=[1, 3, 4])
    assert (length.accepted, length.compared) == (0 + 2 + 4, 1 + 3 + 4)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[0, 0, 0], compared=[1, 1, 1])
    assert length.alpha == pytest.approx(0.98 * 6 / (0.98 * 8 + 3), rel=1e-12)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[2], compared=[2])  # its row ended with the second draft
    assert length.alpha == pytest.approx((0.98**2 * 6 + 2) / (0.98 * (0.98 * 8 + 3) + 2), rel=1e-12)


def test_a_row_that_ends_inside_an_accepted_chain_compares_none_behind_its_end():
    """The draft model is the backbone, so no draft is ever rejected: compared and accepted grow by the same numbers."""
    greedy = shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS)[0, PROMPT.shape[1] :]
    end = next(t for i, t in enumerate(greedy.tolist()) if i >= 3 and t not in greedy[:i].tolist())
    decoding = heads.DraftModelDecoding(shared("llama"), k="adaptive")
    length = decoding.length
    length.compared = length.accepted = 1.0
    _, ours = both(shared("llama"), decoding, eos_token_id=end)
    assert ours.stats.drafted[0][-1], "the row is to end with a drafted token"
    assert length.compared == length.accepted > 1


def test_seconds_are_a_line_and_noise_never_makes_longer_passes_cheaper():
    seconds = Seconds()
    for k, verify in ((7, 9.0), (3, 5.0), (5, 7.0)):
        seconds.observe(k=k, draft=0.5 * k, verify=verify)
    assert seconds(10) == pytest.approx(0.5 * 10 + 2 + 10, rel=1e-9)
    falling = Seconds()
    for k, verify in ((7, 5.0), (3, 9.0)):
        falling.observe(k=k, draft=0.5 * k, verify=verify)
    assert falling(16) - falling(1) == pytest.approx(0.5 * 15, rel=1e-9)


def test_an_adaptive_length_writes_the_same_text_in_other_chains(monkeypatch):
    """Time is a script here: drafts that cost nearly nothing beside passes, then drafts that cost as much as passes."""
    longest = {}
    for case, per_draft in (("cheap", 0.001), ("dear", 1.0)):
        now, lengths = [0.0], []
        decoding = heads.DraftModelDecoding(noisy("llama"), k="adaptive")
        plain_propose = ModelDrafter.propose

        def timed_propose(self, rows, plain=plain_propose, now=now, lengths=lengths, per_draft=per_draft):
            before = now[0]
            proposal = plain(self, rows)
            lengths.append(self.k)
            self.draft_seconds = per_draft * self.k
            self.proposed_at = before
            now[0] = before + 1.0  # a pass takes a second whatever its length
            return proposal

        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda now=now: now[0]))
        monkeypatch.setattr(ModelDrafter, "propose", timed_propose)
        plain, ours = both(shared("llama"), decoding, max_new_tokens=80)
        monkeypatch.undo()
        assert torch.equal(ours.sequences, plain)
        assert lengths[: len(PROBES)] == list(PROBES)
        longest[case] = max(lengths[len(PROBES) :])
    assert longest["dear"] < DEFAULT_K < longest["cheap"] <= MAX_K


@pytest.mark.parametrize("k", [0, 17, -1, 2.0, True, "all"])
def test_a_length_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match='allowed are 1 to 16 drafted tokens, or "adaptive"'):
        heads.DraftModelDecoding(shared("llama"), k=k)

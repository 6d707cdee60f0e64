"""Find the best tree beside prompt lookup, by simulating decoding with the decoder's own `Lookup`.

Where a chain of tokens is copied, a tree's further nodes seldom matter, so the best tree with lookup is often smaller
than the best tree alone. The text, and how many tokens each tree accepts at each position, are known from the replay
(heads/tuning/replay.py). They determine whether a pass verifies the tree, tree and chain, or the chain alone, and how
many tokens it accepts. This holds for a single row; rows of a batch wait for each other.
"""
# P position, K depth

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heads.decoding.proposers.prompt_lookup import Lookup, count_shared
from heads.tuning.acceptance_rates import accepted
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import Replay
from heads.tuning.search import Choice


@dataclass(frozen=True, kw_only=True)
class TreeWithLookup:
    """A static tree and its predicted speed together with prompt lookup."""

    choice: Choice
    tokens_per_pass: float
    tokens_per_second: float


def best_tree_with_lookup(
    choices: Sequence[Choice], replays: Sequence[Replay], times: PassTimes, lookup: int
) -> TreeWithLookup | None:
    """The static tree with the most tokens per second beside chains of `lookup` tokens; None if no draft is accepted.

    Of the trees of one size and depth only the fastest is simulated.
    """
    best: dict[tuple[int, int], Choice] = {}
    for choice in choices:
        if choice.tokens_per_pass <= 1:
            continue
        key = (choice.nodes, choice.depth)
        if key not in best or choice.tokens_per_second > best[key].tokens_per_second:
            best[key] = choice
    found = [simulate(choice, replays, times, lookup) for choice in best.values()]
    return max(found, key=lambda one: (one.tokens_per_second, -one.choice.nodes), default=None)


def simulate(choice: Choice, replays: Sequence[Replay], times: PassTimes, lookup: int) -> TreeWithLookup:
    """Predict the speed of decoding all texts with this tree and lookup."""
    assert choice.places is not None
    tokens, passes, seconds = 0, 0, 0.0
    for one, places_PK in zip(replays, choice.places, strict=True):
        for chain, emitted, tree_too in simulate_passes(one, accepted(places_PK, choice.nodes), lookup, choice.depth):
            tokens += emitted
            passes += 1
            seconds += seconds_of(choice, times, chain, tree_too)
    return TreeWithLookup(choice=choice, tokens_per_pass=tokens / max(1, passes), tokens_per_second=tokens / seconds)


def simulate_passes(one: Replay, accepted_P: np.ndarray, lookup: int, depth: int) -> list[tuple[int, int, bool]]:
    """For each pass over a text: the chain's length, the tokens emitted, and whether the tree is verified too."""
    looking, found, position, last = Lookup(lookup), [], 0, len(accepted_P)
    while position < last:
        at = one.prompt + position + 1
        text = one.text[:at]
        chain_length = looking.find(text)
        alone = looking.copying and lookup > depth
        chain = looking.take(text, chain_length if alone or not chain_length else lookup)
        copied = count_shared(chain, one.text[at : at + len(chain)])
        right = copied if alone else max(copied, int(accepted_P[position]))
        found.append((len(chain), min(right + 1, last - position), not alone))
        position += right + 1
    return found


def seconds_of(choice: Choice, times: PassTimes, chain: int, tree_too: bool) -> float:
    """Predicted seconds of a pass with a chain of `chain` tokens, beside the tree or alone."""
    if not tree_too:
        return times.verify_at(1 + chain) + times.rest_static
    longer = times.verify_at(choice.nodes + chain) - times.verify_at(choice.nodes) if chain else 0.0
    return choice.seconds_per_pass + longer

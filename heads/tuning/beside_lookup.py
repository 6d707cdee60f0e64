"""The tree that is best beside a looked-up chain: decoding played on the texts, with the decoder's own `Lookup`.

Where a chain is copied, a tree's further nodes seldom matter, and where none is, they do as ever; so what is best
beside lookup is often a smaller tree than what is best alone. The text is known, and so is what each tree has accepted
at each place of it (heads/tuning/replay.py): whether a pass verifies the tree, tree and chain or the chain alone, and
how far it comes, follows place by place. Only one row at a time: in a batch chains wait for each other.
"""
# P place, K depth

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heads.decoding.proposers.prompt_lookup import Lookup
from heads.tuning.acceptance import accepted
from heads.tuning.replay import Replay
from heads.tuning.search import Choice
from heads.tuning.timing import PassTimes


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A static tree with what it promises beside a looked-up chain."""

    choice: Choice
    tokens_per_pass: float
    tokens_per_second: float


def best_beside_lookup(
    choices: Sequence[Choice], replays: Sequence[Replay], times: PassTimes, lookup: int
) -> Beside | None:
    """The static tree with most tokens a second beside a chain of `lookup` tokens; None where no draft is accepted."""
    best: dict[tuple[int, int], Choice] = {}
    for choice in choices:
        if choice.tokens_per_pass <= 1:
            continue
        key = (choice.nodes, choice.depth)
        if key not in best or choice.tokens_per_second > best[key].tokens_per_second:
            best[key] = choice
    found = [play(choice, replays, times, lookup) for choice in best.values()]
    return max(found, key=lambda one: (one.tokens_per_second, -one.choice.nodes), default=None)


def play(choice: Choice, replays: Sequence[Replay], times: PassTimes, lookup: int) -> Beside:
    """Decode all texts in mind."""
    assert choice.places is not None
    tokens, passes, seconds = 0, 0, 0.0
    for one, places_PK in zip(replays, choice.places, strict=True):
        for chain, emitted, beside_tree in walk(one, accepted(places_PK, choice.nodes), lookup, choice.depth):
            tokens += emitted
            passes += 1
            seconds += seconds_of(choice, times, chain, beside_tree)
    return Beside(choice=choice, tokens_per_pass=tokens / max(1, passes), tokens_per_second=tokens / seconds)


def walk(one: Replay, accepted_P: np.ndarray, lookup: int, depth: int) -> list[tuple[int, int, bool]]:
    """For each pass over one text: the chain's length, tokens emitted, whether the tree stands beside the chain."""
    looking, found, place, last = Lookup(lookup), [], 0, len(accepted_P)
    while place < last:
        at = one.prompt + place + 1
        text = one.text[:at]
        chain_length = looking.find(text)
        alone = looking.copying and lookup > depth
        chain = looking.take(text, chain_length if alone or not chain_length else lookup)
        copied = count_agreeing(chain, one.text[at : at + len(chain)])
        right = copied if alone else max(copied, int(accepted_P[place]))
        found.append((len(chain), min(right + 1, last - place), not alone))
        place += right + 1
    return found


def seconds_of(choice: Choice, times: PassTimes, chain: int, beside_tree: bool) -> float:
    """Of a pass, by the model of times; `seconds_per_pass` of the choice is that of the tree alone."""
    if not beside_tree:
        return times.verify_at(1 + chain) + times.rest_static
    longer = times.verify_at(choice.nodes + chain) - times.verify_at(choice.nodes) if chain else 0.0
    return choice.seconds_per_pass + longer


def count_agreeing(chain: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of a chain a text goes on with.

    >>> count_agreeing([4, 5, 6], [4, 5, 7]), count_agreeing([4], [])
    (2, 0)
    """
    agreeing = 0
    for mine, theirs in zip(chain, text, strict=False):
        if mine != theirs:
            break
        agreeing += 1
    return agreeing

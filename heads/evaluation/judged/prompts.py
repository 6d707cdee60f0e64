"""The questions to a language model as a judge, and how its verdict is read from the answer.

The wording is our own; the criteria are those of DynaMo's figures 7 and 8 (after Zheng et al. 2023): grammar,
creativity, depth, logical flow, coherence and information, whatever a text's length and its place in the question. The
judge ends with its verdict in double brackets. An answer without one, or with two different ones, has no verdict; such
answers are counted as unreadable, and no verdict is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Winner = Literal["A", "B", "tie"]

CRITERIA = (
    "Weigh how correct the grammar is (for code: the syntax), how creative and how deep the text is, whether one thing "
    "follows from the other, whether it is coherent, and how informative it is. Neither a text's length nor its place "
    "counts. First give your reasons in a few sentences."
)
SINGLE = """You rate a text that a language model wrote as the continuation of a prompt. {criteria} Then end with a \
whole number from 1 (worst) to 10 (best) in double brackets, such as [[4]].

Prompt:
{prompt}

Continuation:
{text}
"""
PAIR = """You compare two texts that two language models wrote as continuations of one prompt. {criteria} Then end \
with your verdict in double brackets: [[A]] if text A is better, [[B]] if text B is better, [[C]] if neither is.

Prompt:
{prompt}

Text A:
{a}

Text B:
{b}
"""
RANKING = """You put continuations of the same prompt in order, the best first. {criteria} Then end with their numbers \
in that order in double brackets, such as [[2, 1, 3]].

Prompt:
{prompt}

{texts}
"""
IN_BRACKETS = re.compile(r"\[\[([^\[\]]*)\]\]")


def ask_for_score(prompt: str, text: str) -> str:
    return SINGLE.format(criteria=CRITERIA, prompt=prompt, text=text)


def ask_for_winner(prompt: str, a: str, b: str) -> str:
    return PAIR.format(criteria=CRITERIA, prompt=prompt, a=a, b=b)


def ask_for_order(prompt: str, texts: Sequence[str]) -> str:
    listed = "\n\n".join(f"Text {number}:\n{text}" for number, text in enumerate(texts, start=1))
    return RANKING.format(criteria=CRITERIA, prompt=prompt, texts=listed)


def verdict_in(answer: str) -> str | None:
    """The content of the answer's double brackets; None if there are none or if they differ.

    >>> verdict_in("Better: [[A]]. So [[A]]"), verdict_in("[[A]] or [[B]]"), verdict_in("A is better")
    ('A', None, None)
    """
    found = {" ".join(inside.split()) for inside in IN_BRACKETS.findall(answer)}
    return found.pop() if len(found) == 1 else None


def read_score(answer: str) -> int | None:
    """A whole number from 1 to 10; None if the verdict is anything else.

    >>> read_score("It reads well. [[7]]"), read_score("[[11]]"), read_score("7 of 10")
    (7, None, None)
    """
    verdict = verdict_in(answer)
    return int(verdict) if verdict and re.fullmatch(r"10|[1-9]", verdict) else None


def read_winner(answer: str) -> Winner | None:
    """ "A", "B" or "tie"; None if the verdict is anything else.

    >>> read_winner("[[B]]"), read_winner("[[C]]"), read_winner("[[D]]")
    ('B', 'tie', None)
    """
    winners: dict[str, Winner] = {"A": "A", "B": "B", "C": "tie"}
    return winners.get(verdict_in(answer) or "")


def read_order(answer: str, many: int) -> tuple[int, ...] | None:
    """The indices of `many` texts, counted from 0, the best text first; None if the verdict is not an order of all.

    >>> read_order("[[2, 1, 3]]", 3), read_order("[[2, 2, 3]]", 3)
    ((1, 0, 2), None)
    """
    numbers = [int(number) - 1 for number in re.findall(r"\d+", verdict_in(answer) or "")]
    return tuple(numbers) if sorted(numbers) == list(range(many)) else None

"""What a judge is asked, and how its verdict is read.

The prompts are in our own words. They ask for what DynaMo's figures 7 and 8 ask (after Zheng et al. 2023): grammar,
creativity, depth, logical flow, coherence and how informative a text is, whatever its length and place, with a verdict
between double brackets. One that is not there, or is there in two ways, is none: it is counted, never guessed.
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
    """What stands in double brackets, if all brackets of the answer say the same.

    >>> verdict_in("Better: [[A]]. So [[A]]"), verdict_in("[[A]] or [[B]]"), verdict_in("A is better")
    ('A', None, None)
    """
    found = {" ".join(inside.split()) for inside in IN_BRACKETS.findall(answer)}
    return found.pop() if len(found) == 1 else None


def read_score(answer: str) -> int | None:
    """
    >>> read_score("It reads well. [[7]]"), read_score("[[11]]"), read_score("7 of 10")
    (7, None, None)
    """
    verdict = verdict_in(answer)
    return int(verdict) if verdict and re.fullmatch(r"10|[1-9]", verdict) else None


def read_winner(answer: str) -> Winner | None:
    """
    >>> read_winner("[[B]]"), read_winner("[[C]]"), read_winner("[[D]]")
    ('B', 'tie', None)
    """
    winners: dict[str, Winner] = {"A": "A", "B": "B", "C": "tie"}
    return winners.get(verdict_in(answer) or "")


def read_order(answer: str, many: int) -> tuple[int, ...] | None:
    """The texts' numbers from 0 on, the best first.

    >>> read_order("[[2, 1, 3]]", 3), read_order("[[2, 2, 3]]", 3)
    ((1, 0, 2), None)
    """
    numbers = [int(number) - 1 for number in re.findall(r"\d+", verdict_in(answer) or "")]
    return tuple(numbers) if sorted(numbers) == list(range(many)) else None

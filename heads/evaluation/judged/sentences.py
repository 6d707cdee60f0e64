"""Beginnings to be completed: the ten prompts of DynaMo's table 7, and ten of Python code with the same sentence types.

English prompts are noise to a backbone that was trained on Python alone. In code, statements stand for declarative
sentences, conditions and loops for questions, calls and negated conditions for imperatives, errors for exclamations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text that models continue and a judge reads.

    Attributes:
        name: the prompt's name in stored rows.
        kind: type of the sentence, or category of the question.
        text: what the judge reads.
        tokens: what the model continues; None: the tokens of `text`.
    """

    name: str
    kind: str
    text: str
    tokens: tuple[int, ...] | None = None


TABLE_7 = (
    ("simple declarative", "I am a student at the"),
    ("simple declarative", "This is going to be a very"),
    ("compound declarative", "He wanted to play, but"),
    ("W/H interrogative", "How can we"),
    ("W/H interrogative", "What will"),
    ("Y/N interrogative", "Will you"),
    ("affirmative imperative", "Please explain"),
    ("negative imperative", "Do not"),
    ("exclamatory", "Wow! I can't believe that"),
    ("exclamatory", "This is amazing! We"),
)
CODE = (
    ("simple declarative", "import os\nimport sys\n\ndef main("),
    ("simple declarative", "class Node:\n    def __init__(self"),
    ("compound declarative", "try:\n    value = int(text)\nexcept"),
    ("W/H interrogative", "for index, line in enumerate("),
    ("W/H interrogative", "while not done:\n    "),
    ("Y/N interrogative", "if isinstance(value, "),
    ("affirmative imperative", "    self.assertEqual("),
    ("negative imperative", "    if not self."),
    ("exclamatory", "        raise ValueError("),
    ("exclamatory", "    raise NotImplementedError\n\n    def "),
)


def prompts_of(language: str) -> list[Prompt]:
    """The ten prompts of a language, "english" or "code".

    >>> [len(prompts_of(language)) for language in ("english", "code")]
    [10, 10]
    """
    rows = {"english": TABLE_7, "code": CODE}[language]
    return [Prompt(name=f"{language} {i}", kind=kind, text=text) for i, (kind, text) in enumerate(rows, start=1)]

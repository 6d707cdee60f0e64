"""What is completed: the prompts of DynaMo's table 7, and ten beginnings of code in the same layout.

English prompts are noise to a backbone of Python alone. The code prompts take the same seven places: statements for
declarative sentences, tests for questions, calls and refusals for imperatives, errors for exclamations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """
    Attributes:
        name: of its row.
        kind: the sentence's type, or the question's category.
        text: what the judge is shown.
        tokens: what the model continues; None: the text's.
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
    """
    >>> [len(prompts_of(language)) for language in ("english", "code")]
    [10, 10]
    """
    rows = {"english": TABLE_7, "code": CODE}[language]
    return [Prompt(name=f"{language} {i}", kind=kind, text=text) for i, (kind, text) in enumerate(rows, start=1)]

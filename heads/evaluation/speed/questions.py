"""Questions with a category and one or several turns, in the row formats of MT-Bench, Spec-Bench and SPEED-Bench.

    {"question_id": 81, "category": "writing", "turns": ["Compose …", "Rewrite …"]}              MT-Bench, Spec-Bench
    {"question_id": "a1", "category": "coding", "messages": [{"role": "user", "content": "…"}]}   SPEED-Bench

Other fields are ignored. Of `messages`, system turns at the beginning are kept and users' turns are asked one after
another; turns of an assistant are left out, since the measured model writes its own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.data.conversations import read_turn

SHIPPED = Path(__file__).with_name("questions.jsonl")
"""Beginnings of code by category, for a backbone of code that knows no chats; some have several turns."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row.

    Attributes:
        name: its question_id.
        turns: the user's, at least one.
        system: what stands before them; empty where nothing does.
        place: file and line.
    """

    name: str
    category: str
    turns: tuple[str, ...]
    system: str = ""
    place: str = ""

    @property
    def digest(self) -> str:
        """A short name of what is asked: another one where a turn or the system's words differ."""
        return hashlib.sha256(json.dumps([self.system, *self.turns]).encode()).hexdigest()[:16]


def read_questions(path: Path, categories: Sequence[str] = (), per_category: int | None = None) -> list[Question]:
    """The questions of a file, in its order.

    Args:
        categories: only those; empty takes all.
        per_category: at most so many of each, the first ones.

    Raises:
        ValueError: no such file, one that is not UTF-8, a row that is no question (names its line), a question_id
            twice, or a category that was asked for and has no question.
    """
    if path.suffix != ".jsonl" or not path.is_file():
        raise ValueError(f"The questions {path} are no .jsonl file that exists; give one object a line.")
    try:
        lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)  # U+2028 may stand inside a text
    except UnicodeDecodeError as error:
        raise ValueError(f"The questions {path} are no text in UTF-8 ({error}); save the file as UTF-8.") from None
    found = [read_question(line, f"{path} line {number}") for number, line in lines if line.strip()]
    seen: dict[str, str] = {}
    for question in found:
        if question.name in seen:
            raise ValueError(
                f"{question.place} has the question_id {question.name} of {seen[question.name]}; rename it."
            )
        seen[question.name] = question.place
    there = list(dict.fromkeys(question.category for question in found))
    for category in categories:
        if category not in there:
            raise ValueError(f"{path} has no question of the category {category!r}; there are {', '.join(there)}.")
    if not found:
        raise ValueError(f"{path} holds no question; give at least one object a line.")
    chosen = [category for category in there if not categories or category in categories]
    first = {category: [q for q in found if q.category == category][:per_category] for category in chosen}
    return [question for question in found if question in first.get(question.category, [])]


def one_of_each_in_turn(questions: Sequence[Question]) -> list[Question]:
    """The first question of each category, then the second of each, and so on; categories as the file begins them.

    >>> asked = [Question(name=name, category=name[0], turns=("t",)) for name in ("a1", "a2", "a3", "b1", "b2")]
    >>> [question.name for question in one_of_each_in_turn(asked)]
    ['a1', 'b1', 'a2', 'b2', 'a3']
    """
    so_far: Counter[str] = Counter()
    rounds: dict[int, list[Question]] = {}
    for question in questions:
        rounds.setdefault(so_far[question.category], []).append(question)
        so_far[question.category] += 1
    return [question for _, asked in sorted(rounds.items()) for question in asked]


def read_question(line: str, place: str) -> Question:
    """
    >>> read_question('{"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}', "here").turns
    ('Compose.', 'Rewrite.')
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}); write one object in each line.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no object; a question has question_id, category and turns or messages.")
    for field in ("question_id", "category"):
        if row.get(field) in (None, ""):
            raise ValueError(f"{place} has no {field}; a question has question_id, category and turns or messages.")
    system, turns = read_turns(row, place)
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError(f"{place} has {'an empty turn' if turns else 'no turn of a user'}; write the user's words.")
    return Question(
        name=str(row["question_id"]), category=str(row["category"]), turns=tuple(turns), system=system, place=place
    )


def read_turns(row: dict[str, Any], place: str) -> tuple[str, list[str]]:
    """The system's words, and the user's turns."""
    if "turns" in row and "messages" not in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{place} has turns that are no list of texts; write the user's turns as a list.")
        return "", turns
    if not isinstance(row.get("messages"), list):
        raise ValueError(f"{place} has neither turns nor a list of messages; a question needs one of them.")
    try:
        messages = [read_turn(turn, number) for number, turn in enumerate(row["messages"], start=1)]
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None
    by_role = {role: [m["content"] for m in messages if m["role"] == role] for role in ("system", "user")}
    return "\n\n".join(by_role["system"]), by_role["user"]

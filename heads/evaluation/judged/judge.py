"""A judge of texts gives each text a score, names the better one of two, and puts several in order.

`AskedJudge` asks a language model, on a server or loaded here (llm_judges.py), stores each answer as it comes, and
reads its verdicts. The order in which it shows texts is random, since language models prefer some places (position
bias, Zheng et al. 2023).
`LikelihoodJudge` compares the log-likelihoods that another model gives the texts.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from heads.evaluation.judged.own_texts import name_of, refuse_own_texts
from heads.evaluation.judged.prompts import (
    Winner,
    ask_for_order,
    ask_for_score,
    ask_for_winner,
    read_order,
    read_score,
    read_winner,
    verdict_in,
)
from heads.evaluation.runs.rows import Rows

SWAPPED: dict[Winner, Winner] = {"A": "B", "B": "A", "tie": "tie"}


class Judge(Protocol):
    """What the suites need of a judge.

    Attributes:
        name: the judge's name in tables.
        identity: its name, and where it is asked; verdicts are stored under it.
        unreadable: how many answers so far had no verdict that could be read.
    """

    name: str
    unreadable: int

    @property
    def identity(self) -> str: ...

    def scores(self, texts: Sequence[tuple[str, str]]) -> list[float | None]:
        """The score of each (prompt, text), higher for better texts; None without a readable verdict."""
        ...

    def winners(self, pairs: Sequence[tuple[str, str, str]], seed: int) -> list[Winner | None]:
        """The better text of each (prompt, A, B), or "tie"; None without a readable verdict."""
        ...

    def verdicts(
        self, texts: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str, str]], seed: int
    ) -> tuple[list[float | None], list[Winner | None]]:
        """`scores` and `winners` in one call, so that the price of all questions is known before the first one."""
        ...

    def orders(self, lists: Sequence[tuple[str, Sequence[str]]], seed: int) -> list[tuple[int, ...] | None]:
        """For each (prompt, texts) the indices of its texts, the best first; None without a readable verdict."""
        ...


@dataclass(kw_only=True)
class AskedJudge(ABC):
    """A judge that is asked in words and answers in words.

    Attributes:
        cache: the file in which answers are stored; None: they are stored nowhere.
        same_again: whether a question that is asked again gets the same answer. Then an answer without a verdict is
            stored too; otherwise the next call asks that question again.
    """

    same_again: ClassVar[bool]

    name: str
    cache: Path | None = None
    unreadable: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._rows = Rows(self.cache, self.settings)

    @property
    def identity(self) -> str:
        return self.name

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All that an answer depends on, but for its question; an answer belongs to them."""

    @abstractmethod
    def ask_all(self, questions: Sequence[str], keep: Callable[[str, str], Any]) -> None:
        """Ask different questions, in any order, and call `keep(question, answer)` as soon as each is answered."""

    def answers(self, questions: Sequence[str]) -> list[str]:
        """The answer to each question, stored or asked for now.

        Raises:
            ValueError: the judge cannot be asked; the answers that it gave are stored.
        """
        found = {question: stored["answer"] for question in questions if (stored := self._rows.get(digest(question)))}

        def keep(question: str, answer: str) -> None:
            found[question] = answer
            if self.same_again or verdict_in(answer) is not None:
                self._rows.put(digest(question), {"answer": answer})

        self.ask_all([question for question in dict.fromkeys(questions) if question not in found], keep)
        return [str(found[question]) for question in questions]

    def scores(self, texts: Sequence[tuple[str, str]]) -> list[float | None]:
        return self.verdicts(texts, [], 0)[0]

    def winners(self, pairs: Sequence[tuple[str, str, str]], seed: int) -> list[Winner | None]:
        return self.verdicts([], pairs, seed)[1]

    def verdicts(
        self, texts: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str, str]], seed: int
    ) -> tuple[list[float | None], list[Winner | None]]:
        draw = random.Random(seed)
        swapped = [draw.random() < 0.5 for _ in pairs]
        about_pairs = [
            ask_for_winner(prompt, *((b, a) if swap else (a, b)))
            for (prompt, a, b), swap in zip(pairs, swapped, strict=True)
        ]
        answers = self.answers([*(ask_for_score(*text) for text in texts), *about_pairs])
        scores: list[float | None] = [read_score(answer) for answer in answers[: len(texts)]]
        winners = [read_winner(answer) for answer in answers[len(texts) :]]
        self._count([*scores, *winners])
        return scores, [
            SWAPPED[winner] if swap and winner is not None else winner
            for winner, swap in zip(winners, swapped, strict=True)
        ]

    def orders(self, lists: Sequence[tuple[str, Sequence[str]]], seed: int) -> list[tuple[int, ...] | None]:
        draw = random.Random(seed)
        places = [draw.sample(range(len(texts)), len(texts)) for _, texts in lists]
        asked = [
            ask_for_order(prompt, [texts[place] for place in order])
            for (prompt, texts), order in zip(lists, places, strict=True)
        ]
        answers = zip(self.answers(asked), places, strict=True)
        read = [read_order(answer, len(order)) for answer, order in answers]
        self._count(read)
        return [
            None if found is None else tuple(order[i] for i in found) for found, order in zip(read, places, strict=True)
        ]

    def _count(self, verdicts: Sequence[object]) -> None:
        self.unreadable += sum(verdict is None for verdict in verdicts)


def digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()


class LikelihoodJudge:
    """Scores a text by its mean log-likelihood under another model than the one that wrote it, in nats a token.

    This tells how plausible a text is to that model, not what it means. A model that wrote texts is refused, since it
    finds its own repetitions likely.

    Args:
        model, tokenizer: the judge's.
        writers: the models that wrote the texts.
        tie: two texts whose scores differ by at most so many nats a token are a tie.

    Raises:
        ValueError: the judge is a model that wrote texts.
    """

    def __init__(self, model: Any, tokenizer: Any, *writers: Any, tie: float = 0.0) -> None:
        refuse_own_texts(model, *writers)
        self.name = f"log-likelihood of {name_of(model) or type(model).__name__}, nats a token"
        self.unreadable = 0
        self.model, self.tokenizer, self.tie = model, tokenizer, tie
        self._known: dict[tuple[str, str], float] = {}

    @property
    def identity(self) -> str:
        return self.name

    def scores(self, texts: Sequence[tuple[str, str]]) -> list[float | None]:
        return [self.score(prompt, text) for prompt, text in texts]

    def winners(self, pairs: Sequence[tuple[str, str, str]], seed: int = 0) -> list[Winner | None]:
        return [self.winner(self.score(prompt, a), self.score(prompt, b)) for prompt, a, b in pairs]

    def verdicts(
        self, texts: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str, str]], seed: int = 0
    ) -> tuple[list[float | None], list[Winner | None]]:
        return self.scores(texts), self.winners(pairs, seed)

    def orders(self, lists: Sequence[tuple[str, Sequence[str]]], seed: int = 0) -> list[tuple[int, ...] | None]:
        scored = [[self.score(prompt, text) for text in texts] for prompt, texts in lists]
        return [tuple(sorted(range(len(scores)), key=lambda i: -scores[i])) for scores in scored]

    def winner(self, a: float, b: float) -> Winner:
        if a == b or abs(a - b) <= self.tie:  # a == b: two empty texts have -inf each, whose difference is nan
            return "tie"
        return "A" if a > b else "B"

    def score(self, prompt: str, text: str) -> float:
        """Mean log-likelihood of the text's tokens after the prompt, in nats a token; -inf for an empty text."""
        if (prompt, text) not in self._known:  # a baseline's text is compared with those of every threshold
            self._known[prompt, text] = self._score(prompt, text)
        return self._known[prompt, text]

    @torch.no_grad()
    def _score(self, prompt: str, text: str) -> float:
        before, ids = (self.tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (prompt, text))
        if not ids:
            return -float("inf")
        begin = [self.tokenizer.bos_token_id] if self.tokenizer.bos_token_id is not None else []
        tokens_1T = torch.tensor([[*begin, *before, *ids]], device=self.model.device)
        if tokens_1T.shape[1] == len(ids):  # the first token follows nothing, so it has no likelihood
            ids = ids[1:]
        log_p_TV = self.model(tokens_1T).logits[0, -len(ids) - 1 : -1].double().log_softmax(dim=-1)
        chosen_T = torch.tensor(ids, device=log_p_TV.device)
        return float(log_p_TV.gather(1, chosen_T[:, None]).mean()) if ids else -float("inf")

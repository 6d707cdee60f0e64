"""Acceptance against the position in the output: heads alone write texts as long as the backbone has positions for.

An end-of-text token does not end these texts, so that they reach the last position.
"""
# T prompt position

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.backbone.loading import max_positions
from heads.evaluation.methods import GreedySettings
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.speed import figures
from heads.evaluation.speed.measuring import Measurer
from heads.evaluation.speed.questions import Question, one_of_each_in_turn
from heads.evaluation.speed.speakers import ALONE, as_prompt
from heads.evaluation.tables import progress_bar

MOST_TOKENS = 32_768
"""Of a text whose length nobody gave: a text to a backbone's last of 131,072 positions takes hours."""


def measure_positions(
    task: SuiteTask, measurer: Measurer, questions: Sequence[Question], texts: int, tokens: int | None
) -> dict[str, Any]:
    """The curve over so many texts by heads alone, one question of each category in turn, round after round.

    Args:
        texts: at most one of each question is written.
        tokens: length of a text, at most what the backbone has positions for; 0: all of these; None: all of these up
            to MOST_TOKENS, which is also the length where the backbone has no limit.
    """
    prompts = {q.name: as_prompt(measurer.prompter.prompt(q, [])) for q in one_of_each_in_turn(questions)[:texts]}
    longest = max_positions(task.model)
    rooms = {name: room_behind(prompt_1T.shape[1], longest, tokens) for name, prompt_1T in prompts.items()}
    accepted: list[list[int]] = []
    with progress_bar(task.console, "tokens of long texts", sum(rooms.values())) as advance:
        for name, prompt_1T in prompts.items():
            row = task.rows.get(f"position {name}")
            if row is None:
                row = {"accepted": write_long(measurer, prompt_1T, Endless(new_tokens=rooms[name], advance=advance))}
                task.rows.put(f"position {name}", row)
            else:
                advance(rooms[name])
            accepted.append(row["accepted"])
    return {
        "method": ALONE,
        "texts": len(accepted),
        "tokens": max((1 + sum(one) + len(one) for one in accepted), default=0),
        "longest": longest,
        "cut": any(longest is not None and one.shape[1] + rooms[name] < longest for name, one in prompts.items()),
        "curve": figures.by_position(accepted),
    }


def room_behind(prompt: int, longest: int | None, tokens: int | None) -> int:
    """How long a text behind a prompt of so many tokens gets.

    >>> room_behind(48, 2048, None), room_behind(48, 2048, 512), room_behind(48, 2048, 4096)
    (2000, 512, 2000)
    >>> room_behind(48, 131_072, None), room_behind(48, 131_072, 131_072), room_behind(48, None, None)
    (32768, 131024, 32768)
    >>> room_behind(48, 131_072, 0), room_behind(48, None, 0)
    (131024, 32768)
    """
    whole = MOST_TOKENS if longest is None else longest - prompt
    if tokens == 0:
        return whole
    if tokens is None:
        return min(MOST_TOKENS, whole)
    return tokens if longest is None else min(tokens, whole)


def write_long(measurer: Measurer, prompt_1T: Tensor, settings: Endless) -> list[int]:
    """How many drafted tokens each pass of a long text accepted."""
    (speaker,) = [one for one in measurer.speakers if one.name == ALONE]
    speaker.begin()
    counted = speaker.answer(prompt_1T, settings, measurer.clock).counted
    speaker.begin()
    return [] if counted is None else counted.accepted


@dataclass(frozen=True, kw_only=True)
class Endless(GreedySettings):
    """Greedy settings under which an end-of-text token does not end a text.

    Attributes:
        advance: called with the number of tokens that a pass emitted.
    """

    advance: Callable[[int], Any] = lambda tokens: None

    def generate(self, model: Any, prompt_1T: Tensor, **more: Any) -> Any:
        more["streamer"] = Counter(self.advance)
        return super().generate(model, prompt_1T, min_new_tokens=self.new_tokens, **more)


class Counter:
    """A streamer that counts new tokens; the prompt comes first."""

    def __init__(self, advance: Callable[[int], Any]) -> None:
        self.advance, self.begun = advance, False

    def put(self, tokens: Tensor) -> None:
        if self.begun:
            self.advance(tokens.numel())
        self.begun = True

    def end(self) -> None:
        """Nothing is held back."""

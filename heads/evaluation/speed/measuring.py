"""Measure speakers on questions: interleaved repeats, the same conversations for all, one kept row for each question.

Plain generation's answers are fed back to every speaker, so that all read the same prompts; heads write the same
answers up to rounding. Plain goes first in the first repeat and the order turns round with each further one.
"""
# T prompt position

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.backbone.loading import max_positions
from heads.evaluation.generated_text import Verdict
from heads.evaluation.methods import GreedySettings
from heads.evaluation.speed.conversation import Prompter
from heads.evaluation.speed.questions import Question
from heads.evaluation.speed.speakers import PLAIN, Speaker, TimedAnswer, as_prompt

SpeedFigures = dict[str, Any]
"""Measured figures by name, as JSON stores them: of a question, a method or a whole run."""
SHAPES_KEPT = 4  # a dynamic tree has another shape in every pass


@dataclass(frozen=True, kw_only=True)
class Measurer:
    """Speakers, the first of them plain, and the settings that they share.

    Attributes:
        same_text: compares (prompt, plain's tokens, a speaker's tokens).
        clock: returns seconds; waits for an accelerator.
    """

    speakers: Sequence[Speaker]
    prompter: Prompter
    settings: GreedySettings
    repeats: int
    model: Any
    same_text: Callable[[Tensor, list[int], list[int]], Verdict]
    clock: Callable[[], float]

    def warm_up(self, question: Question) -> None:
        """One answer of each speaker that is not timed: a first call allocates memory and chooses kernels."""
        prompt_1T = as_prompt(self.prompter.prompt(question, []))
        for speaker in self.speakers:
            speaker.begin()
            speaker.answer(prompt_1T, self.settings, self.clock)

    def measure(self, question: Question) -> SpeedFigures:
        """The row of a question: its turns with each speaker's figures."""
        spoken: dict[str, list[list[TimedAnswer]]] = {speaker.name: [] for speaker in self.speakers}
        answers: list[list[int]] = []
        prompts: list[Tensor] = []
        for repeat in range(self.repeats):
            for speaker in self.speakers if repeat % 2 == 0 else self.speakers[::-1]:
                if speaker.name == PLAIN and repeat == 0:
                    said, answers, prompts = self.write(speaker, question)
                else:
                    said = self.repeat(speaker, prompts)
                spoken[speaker.name].append(said)
        turns = [
            self.turn(prompt_1T, {name: [said[i] for said in runs] for name, runs in spoken.items()})
            for i, prompt_1T in enumerate(prompts)
        ]
        ended = f"turn {len(answers) + 1} does not fit" if len(answers) < len(question.turns) else ""
        return {"question_id": question.name, "category": question.category, "turns": turns, "ended": ended}

    def write(self, speaker: Speaker, question: Question) -> tuple[list[TimedAnswer], list[list[int]], list[Tensor]]:
        """Plain's conversation: its answers, their tokens, and the prompts that follow from them."""
        speaker.begin()
        said: list[TimedAnswer] = []
        prompts: list[Tensor] = []
        for _ in question.turns:
            tokens = self.prompter.prompt(question, [answer.tokens for answer in said])
            if not self.fits(tokens):
                break
            prompts.append(as_prompt(tokens))
            said.append(speaker.answer(prompts[-1], self.settings, self.clock))
        return said, [answer.tokens for answer in said], prompts

    def repeat(self, speaker: Speaker, prompts: Sequence[Tensor]) -> list[TimedAnswer]:
        speaker.begin()
        return [speaker.answer(prompt_1T, self.settings, self.clock) for prompt_1T in prompts]

    def fits(self, tokens: Sequence[int]) -> bool:
        longest = max_positions(self.model)
        return longest is None or len(tokens) + self.settings.new_tokens <= longest

    def turn(self, prompt_1T: Tensor, answers: dict[str, list[TimedAnswer]]) -> SpeedFigures:
        plain = answers[PLAIN][0].tokens
        methods = {name: figures(runs) for name, runs in answers.items()}
        for name, runs in answers.items():
            if name != PLAIN:
                verdict = self.same_text(prompt_1T.to(self.model.device), plain, runs[0].tokens)
                methods[name]["differs_at"], methods[name]["ties"] = verdict.differs_at, verdict.ties
        return {"prompt_tokens": prompt_1T.shape[1], "methods": methods}


def figures(runs: Sequence[TimedAnswer]) -> SpeedFigures:
    """One speaker's figures of one turn: counts of the first repeat, seconds of all, medians of the phases."""
    first = runs[0]
    found: SpeedFigures = {
        "tokens": len(first.tokens),
        "passes": first.passes,
        "seconds": [run.seconds for run in runs],
        "phases": {phase: statistics.median(run.phases[phase] for run in runs) for phase in first.phases},
    }
    if first.counted is not None:
        found |= {"drafted": first.counted.drafted, "accepted": first.counted.accepted}
        found["trees"] = [
            {"parents": list(shape), "verified": count, "accepted": first.counted.times_accepted(shape)}
            for shape, count in first.counted.verified.most_common(SHAPES_KEPT)
        ]
    return found

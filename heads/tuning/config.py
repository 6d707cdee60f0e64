"""The settings of tuning: how tokens are chosen, the batch size, and the length of measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class TuneConfig:
    """The use that a tree is fitted to.

    Attributes:
        new_tokens: tokens to generate after each prompt.
        batch: rows decoded together.
        repetition_penalty: as in `generate`; 1 is no penalty, None the backbone's own.
        temperature: as in `generate`; 0 is greedy.
        repeats: rounds of timing; medians over them are taken.
        checked_prompts: prompts that are decoded with the fastest tree, at least one batch.
        compile: also decode them with compiled passes; tree.json records whether that was faster.

    Raises:
        ValueError: a number of tokens, rows, rounds or prompts is too small, a negative temperature, a penalty of at
            most 0, or one of them infinite.

    >>> TuneConfig(new_tokens=1)
    Traceback (most recent call last):
    heads.validation.InvalidFieldError: new_tokens=1 was given; allowed are integers of at least 2.
    """

    new_tokens: int = within(2, default=128)
    batch: int = within(1, default=1)
    repetition_penalty: float | None = within(above=0, default=None)
    temperature: float = within(0, default=0.0)
    repeats: int = within(1, default=15)
    checked_prompts: int = within(1, default=4)
    compile: bool = False

    @property
    def request(self) -> dict[str, Any]:
        return {**self.settings, "max_new_tokens": self.new_tokens}

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `generate` for choosing tokens."""
        settings: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            settings["temperature"] = float(self.temperature)
        if self.repetition_penalty is not None:
            settings["repetition_penalty"] = float(self.repetition_penalty)  # `generate` refuses integers
        return settings

"""The settings of tuning: how tokens are chosen, the batch size, and the length of measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
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
        ValueError: a number of tokens, rows, rounds or prompts is too small.
    """

    new_tokens: int = 128
    batch: int = 1
    repetition_penalty: float | None = None
    temperature: float = 0.0
    repeats: int = 15
    checked_prompts: int = 4
    compile: bool = False

    def __post_init__(self) -> None:
        for name, least in {"new_tokens": 2, "batch": 1, "repeats": 1, "checked_prompts": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} was given; allowed are {least} and more.")

    @property
    def request(self) -> dict[str, Any]:
        return {**self.settings, "max_new_tokens": self.new_tokens}

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `generate` for choosing tokens."""
        settings: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            settings["temperature"] = self.temperature
        if self.repetition_penalty is not None:
            settings["repetition_penalty"] = self.repetition_penalty
        return settings

"""How a backbone writes its own training data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class RegenerateConfig:
    """Fields of `python -m train regenerate-data`.

    Attributes:
        temperature: of sampling; 0 is greedy. 0.7 stays near greedy text without its repetitions.
        top_p: tokens are sampled from the fewest likeliest ones whose probabilities add up to this; 1 is all.
        max_new_tokens: tokens written at most for each answer, or behind each prompt of a text.
        prompt_tokens: tokens of a text that are its prompt.
        prompts_per_text: places of a text, evenly spread, that a prompt is taken from.
        batch_size: rows of one batch.
        seed: of sampling; each row has random numbers of its own.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 512
    prompt_tokens: int = 64
    prompts_per_text: int = 1
    batch_size: int = 16
    seed: int = 0

    def check(self) -> None:
        """
        Raises:
            ValueError: a value that nothing can be written with.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature} was given; allowed are 0 (greedy) and more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} was given; allowed are values over 0 and up to 1 (all tokens).")
        for name in ("max_new_tokens", "prompt_tokens", "prompts_per_text", "batch_size"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(self, name)} was given; allowed are 1 and more.")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} was given; allowed are 0 and more.")


@dataclass(kw_only=True)
class RegenerateFlags(RegenerateConfig):
    """All flags of the command.

    Attributes:
        out: the .jsonl file that is written, a line for each row; the same command resumes where it stopped.
        limit: write the first rows alone, this many.
        heads: folder of heads on this backbone, to write the same text faster; the fields that a run's file has there
            are not read.
    """

    out: str = ""
    limit: int | None = None
    heads: str | dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if not self.out:
            raise ValueError("--out was not given; name the file that is to be written, such as --out data/new.jsonl.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit {self.limit} was given; allowed are 1 row and more.")

    @property
    def decide_the_text(self) -> dict[str, Any]:
        """The fields that a resumed run must share.

        Another batch size changes only the last bits of logits, so a run may resume with one that needs less memory.
        """
        names = [field.name for field in dataclasses.fields(RegenerateConfig) if field.name != "batch_size"]
        return {name: getattr(self, name) for name in names}

"""How a backbone writes its own training data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class RegenerateConfig:
    """Fields of `python -m train regenerate-data`.

    Attributes:
        temperature: temperature of sampling; 0 is greedy. 0.7 stays near greedy text without its repetitions.
        top_p: sample from the fewest most probable tokens whose probabilities add up to this; 1 is all.
        max_new_tokens: most tokens that are generated for an answer, or after a prompt of a text.
        prompt_tokens: length of a text's prompt, in tokens.
        prompts_per_text: number of prompts taken from each text, at evenly spread places.
        batch_size: rows of one batch.
        seed: seed of sampling; each row has its own random numbers.
    """

    temperature: float = within(0, default=0.7, advice="0 is greedy")
    top_p: float = within(above=0, high=1, default=1.0, advice="1 is all tokens")
    max_new_tokens: int = within(1, default=512)
    prompt_tokens: int = within(1, default=64)
    prompts_per_text: int = within(1, default=1)
    batch_size: int = within(1, default=16)
    seed: int = within(0, default=0)


@validated
@dataclass(kw_only=True)
class RegenerateFlags(RegenerateConfig):
    """All flags of the command.

    Attributes:
        out: the .jsonl file to write, with a line for each row; the same command resumes where it stopped.
        limit: generate only the first rows, this many.
        heads: folder of heads on this backbone, which generate the same text faster; the `heads` fields of a run's
            YAML file are ignored.
    """

    out: str = ""
    limit: int | None = within(1, default=None)
    heads: str | dict[str, Any] | None = None

    def validate_out(self) -> None:
        if not self.out:
            raise ValueError("--out was not given; name the file to write, such as --out data/new.jsonl.")

    @property
    def decide_the_text(self) -> dict[str, Any]:
        """The fields that a resumed run must share: all but batch_size, which changes only the last bits of logits."""
        names = [field.name for field in dataclasses.fields(RegenerateConfig) if field.name != "batch_size"]
        return {name: getattr(self, name) for name in names}

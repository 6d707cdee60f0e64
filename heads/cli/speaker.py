"""One text from a prompt to the terminal: what is asked of `generate`, streamed as it comes, with its speed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.backbone.loading import max_positions
from heads.cli.streaming import TextStream
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.generate import check_temperature, generate
from heads.decoding.tree_decoding import TreeDecoding

Decoding = TreeDecoding | DraftModelDecoding
DRAFTED, RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: None leaves the backbone's own setting.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.temperature == 0 and not (self.top_p is None and self.top_k is None):
            raise ValueError("--top-p and --top-k choose what to sample from; give --temperature above 0 with them.")

    def fields(self) -> dict[str, Any]:
        """As arguments of `generate`."""
        fields: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            fields |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.repetition_penalty != 1.0:
            fields["repetition_penalty"] = self.repetition_penalty
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(kw_only=True)
class Spoken:
    """A text that was streamed, whole or stopped; `first_seconds` is when its first characters came."""

    text: str = ""
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    first_seconds: float | None = None
    stopped: bool = False

    def summary(self) -> str:
        per_pass, per_second = self.tokens / max(1, self.passes), self.tokens / max(1e-9, self.seconds)
        first = "" if self.first_seconds is None else f", the first after {self.first_seconds:.2f} s"
        stopped = ", stopped" if self.stopped else ""
        return f"{self.tokens} tokens, {per_pass:.2f} tokens per pass, {per_second:.1f} tokens/s{first}{stopped}"


@dataclass(kw_only=True)
class Speaker:
    """A backbone with a way to decode; None is plain `generate`."""

    model: Any
    tokenizer: Any
    decoding: Decoding | None
    sampling: Sampling
    new_tokens: int
    highlight: bool = False
    end_tokens: list[int] | None = field(default=None)

    def encode(self, text: str) -> Tensor:
        """(1, T) on the model's device."""
        return torch.tensor([self.tokenizer(text)["input_ids"]], dtype=torch.long, device=self.model.device)

    def speak(self, prompt_1T: Tensor) -> Spoken:
        """Write what follows the prompt to stdout as it comes; Ctrl-C stops it and keeps what was said.

        Raises:
            ValueError: the text would not fit the backbone's positions.
        """
        self.check_length(prompt_1T.shape[1])
        first: list[float] = []

        def write(piece: str, drafted: bool) -> None:
            if not first:
                first.append(time.perf_counter())
            self.write(piece, drafted)

        stream = TextStream(self.tokenizer, write)
        ends: dict[str, Any] = {} if self.end_tokens is None else {"eos_token_id": self.end_tokens}
        start, stopped = time.perf_counter(), False
        try:
            generate(
                self.model,
                self.decoding,
                streamer=stream,
                input_ids=prompt_1T,
                attention_mask=torch.ones_like(prompt_1T),
                max_new_tokens=self.new_tokens,
                **ends,
                **self.sampling.fields(),
            )
        except KeyboardInterrupt:
            stream.end()
            stopped = True
        return Spoken(
            text=stream.text,
            tokens=stream.num_tokens,
            passes=stream.num_passes,
            seconds=time.perf_counter() - start,
            first_seconds=first[0] - start if first else None,
            stopped=stopped,
        )

    def write(self, piece: str, drafted: bool) -> None:
        sys.stdout.write(f"{DRAFTED}{piece}{RESET}" if drafted and self.highlight else piece)
        sys.stdout.flush()

    def check_length(self, prompt_tokens: int) -> None:
        longest = max_positions(self.model)
        if prompt_tokens == 0:
            raise ValueError("The prompt has no tokens; give at least one word.")
        if longest is not None and prompt_tokens + self.new_tokens > longest:
            raise ValueError(
                f"The prompt has {prompt_tokens} tokens and {self.new_tokens} new ones may follow, but the "
                f"backbone has {longest} positions; shorten the prompt or lower --max-new-tokens."
            )

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
        server: base URL of an OpenAI-compatible server that generates in place of this process, such as
            http://localhost:8000/v1 of vLLM or SGLang.
        model: name of the backbone on that server.
        api_key_env: environment variable with the server's key; OPENAI_API_KEY where it is not given, if that is set.
        concurrency: rows that the server works on at once; 64 where it is not given.
    """

    out: str = ""
    limit: int | None = within(1, default=None)
    heads: str | dict[str, Any] | None = None
    server: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    concurrency: int | None = within(1, default=None)

    def validate_out(self) -> None:
        if not self.out:
            raise ValueError("--out was not given; name the file to write, such as --out data/new.jsonl.")

    def validate_server(self) -> None:
        if self.server is None:
            given = [name for name in ("model", "api_key_env", "concurrency") if getattr(self, name) is not None]
            if given:
                flag = given[0].replace("_", "-")
                raise ValueError(f"--{flag} was given without --server; give the server's URL, or leave it out.")
            return
        if self.model is None:
            raise ValueError("--server was given without --model; name the backbone as the server does.")
        if isinstance(self.heads, str):
            raise ValueError("--heads was given with --server; heads that the server decodes with are its own setting.")
        if self.batch_size != RegenerateConfig.batch_size:
            raise ValueError("--batch-size was given with --server, which makes its own batches; give --concurrency.")

    @property
    def decide_the_text(self) -> dict[str, Any]:
        """The fields that a resumed run must share: all but batch_size, which changes only the last bits of logits."""
        names = [field.name for field in dataclasses.fields(RegenerateConfig) if field.name != "batch_size"]
        return {name: getattr(self, name) for name in names}

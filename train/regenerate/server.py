"""Ask an OpenAI-compatible server (vLLM, SGLang, llama.cpp, …) for answers of the backbone that it serves.

    conversations                      /chat/completions with the turns, in the server's own chat template
    conversations, data.chat_template  /completions with the token ids of that template
    texts, token ids                   /completions with token ids

Optional fields ask for the generated tokens (vLLM's `return_token_ids`), for no change of the scores but temperature
and top_p, and for a seed of each answer. A server that refuses these fields is asked without them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heads.extras import needs_extra
from train.regenerate.config import RegenerateConfig
from train.regenerate.rewriting import GeneratedAnswer, RowPrompt, Tally

TIMEOUT = 600.0  # seconds for one answer
ALIVE_TIMEOUT = 60.0  # seconds for the list of models
SERVER_FAILS = 500  # HTTP status from which the server is at fault and not the request
TRIES = 7
"""Attempts for one answer if the server is busy, fails or is silent; the pauses double from 0.5 s to 8 s."""
REFUSED_AT_FIRST = 20
"""After this many refusals and no answer the command ends: the server refuses the settings, not a prompt."""


@dataclass(kw_only=True)
class Server:
    """One server and what it is asked for.

    Attributes:
        url: base URL of its API, such as http://localhost:8000/v1.
        model: name of the backbone there.
        key_variable: environment variable of the key; None is OPENAI_API_KEY, which local servers do not need.
        settings: temperature, top_p, seed and the most tokens of an answer.
        ends: tokens that end an answer.
        longest: the backbone's positions.
        vocab_size: number of the backbone's tokens.
        as_tokens: send conversations as token ids.
        tally: counts tokens, refusals and deviations.

    Raises:
        ValueError: no URL, or an environment variable that is not set.
    """

    url: str
    model: str
    key_variable: str | None
    settings: RegenerateConfig
    ends: Sequence[int]
    longest: int | None
    vocab_size: int
    as_tokens: bool
    tally: Tally = field(default_factory=Tally)
    _left_out: int = field(default=0, init=False)  # level of `levels`
    _answered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--server {self.url} was given; give a URL such as http://localhost:8000/v1.")
        key = os.environ.get(self.key_variable or "OPENAI_API_KEY")
        if self.key_variable and not key:
            raise ValueError(f"--api-key-env {self.key_variable} was given, and that variable is not set; set it.")
        with needs_extra("train", "A server was to write the data"):
            import openai
        self._openai = openai
        self._reached: dict[str, Any] = {"base_url": self.url, "api_key": key or "none", "timeout": TIMEOUT}
        self._client: Any = openai.AsyncOpenAI(max_retries=TRIES - 1, **self._reached)

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt with its new tokens fits the backbone's positions; the server may have fewer."""
        return self.longest is None or len(prompt) + self.settings.max_new_tokens <= self.longest

    @property
    def left_out(self) -> list[str]:
        """The fields that the server refused."""
        asked, now = flattened(self.levels[0]), flattened(self.levels[self._left_out])
        return [name for name in asked if name not in now]

    @property
    def levels(self) -> list[dict[str, Any]]:
        """The optional fields of a request, fewer at each level."""
        own = {"return_token_ids": True, "stop_token_ids": list(self.ends), **UNCHANGED_SCORES}
        return [{"seed": 0, "extra_body": own}, {"seed": 0}, {}]

    def refuse_other_models(self) -> None:
        """Check, before any prompt is sent, that the server has the model; a server that lists no models passes.

        Raises:
            ValueError: the server cannot be reached, wants another key, or does not have the model.
        """
        try:
            names = [found.id for found in self._openai.OpenAI(max_retries=1, **self._reached).models.list()]
        except self._openai.APIStatusError as error:
            self._refuse_key(error)
            return
        except self._openai.APIConnectionError:
            raise self._unreachable() from None
        except self._openai.OpenAIError:
            return
        if names and self.model not in names:
            raise ValueError(f"--model {self.model} was given; {self.url} has {', '.join(sorted(names)[:10])}.")

    async def answer(self, prompt: RowPrompt, key: Sequence[int]) -> GeneratedAnswer | None:
        """What the server generates after a prompt; None where it refuses, which is counted.

        Args:
            key: line and turn, which decide the seed together with `settings.seed`.

        Raises:
            ValueError: the server cannot be reached, wants another key, refuses everything, or stays too busy.
        """
        openai = self._openai
        try:
            response = await self._ask_with_fewer_fields(prompt, key)
        except openai.APITimeoutError:
            await self._stop_if_down()
            return self._refused(f"no answer within {TIMEOUT:.0f} s")
        except openai.APIConnectionError:
            raise self._unreachable() from None
        except openai.RateLimitError:
            raise ValueError(
                f"{self.url} refused more requests {TRIES} times in a row; lower --concurrency. The same "
                f"command resumes."
            ) from None
        except openai.APIStatusError as error:
            self._refuse_key(error)
            if error.status_code >= SERVER_FAILS:
                await self._stop_if_down()
            return self._refused(f"status {error.status_code}: {said_by(error)}")
        except (openai.OpenAIError, ValueError) as error:  # ValueError: the answer is no JSON
            return self._refused(f"an answer that cannot be read ({type(error).__name__})")
        return self._read(response, prompt)

    async def _ask_with_fewer_fields(self, prompt: RowPrompt, key: Sequence[int]) -> Any:
        """Send a prompt, with fewer optional fields after each refusal; one counts only when no field is left."""
        first = self._left_out
        for level in range(first, 3):
            try:
                response = await self._send(prompt, key, level)
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                refusal = error
            else:
                self._left_out = max(level, self._left_out)
                return response
        raise refusal

    async def _send(self, prompt: RowPrompt, key: Sequence[int], level: int) -> Any:
        c = self.settings
        asked = {"model": self.model, "max_tokens": c.max_new_tokens, "temperature": c.temperature, "top_p": c.top_p}
        asked |= self.levels[level]
        if "seed" in asked:
            asked["seed"] = seed_of(c.seed, *key)
        if prompt.messages is None or self.as_tokens:
            return await self._client.completions.create(prompt=prompt.tokens, **asked)
        return await self._client.chat.completions.create(messages=prompt.messages, **asked)

    def _read(self, response: Any, prompt: RowPrompt) -> GeneratedAnswer | None:
        choice = next(iter(getattr(response, "choices", None) or ()), None)
        if choice is None:
            return self._refused("an answer without choices")
        if choice.finish_reason not in ("stop", "length"):
            return self._refused(f"finish_reason {choice.finish_reason}")
        message = getattr(choice, "message", None)
        text = (message.content if message is not None else choice.text) or ""
        tokens = self._known_tokens(getattr(choice, "token_ids", None))
        encoded = getattr(choice, "prompt_token_ids", None) or getattr(response, "prompt_token_ids", None)
        tally = self.tally
        tally.other_prompts += encoded is not None and list(encoded) != prompt.tokens
        tally.without_thoughts += any(getattr(message, name, None) for name in ("reasoning", "reasoning_content"))
        tally.tokens += getattr(response.usage, "completion_tokens", None) or len(tokens or ())
        self._answered = True
        return GeneratedAnswer(tokens if message is None else None, cut=choice.finish_reason == "length", text=text)

    def _known_tokens(self, tokens: list[int] | None) -> list[int] | None:
        if tokens is None:
            return None
        if max(tokens, default=0) >= self.vocab_size:
            raise ValueError(
                f"{self.url} answered with the token {max(tokens)}, and the backbone of the config knows "
                f"{self.vocab_size}; give the config of the model {self.model!r}."
            )
        return list(tokens)

    def _refused(self, reason: str) -> GeneratedAnswer | None:
        refused = self.tally.refused
        refused[reason] = refused.get(reason, 0) + 1
        if not self._answered and sum(refused.values()) >= REFUSED_AT_FIRST:
            raise ValueError(f"{self.url} refused the first {REFUSED_AT_FIRST} requests; the last: {reason}")
        return None

    def _refuse_key(self, error: Any) -> None:
        """Raise ValueError for a key or a model's name that no other prompt will make right."""
        if error.status_code in (401, 403):
            raise ValueError(
                f"{self.url} wants another key (status {error.status_code}); name the environment variable that has "
                f"it by --api-key-env."
            ) from None
        if error.status_code == 404 and "/models" not in str(error.request.url):
            raise ValueError(
                f"{self.url} has no model {self.model!r}, or no API there (status 404: {said_by(error)}); correct "
                f"--model or --server."
            ) from None

    async def _stop_if_down(self) -> None:
        """End the command if the server fails on everything, and not only on the last prompt.

        Raises:
            ValueError: it does not list its models either, or a proxy in front of it says that it is down.
        """
        try:
            await self._client.with_options(max_retries=1, timeout=ALIVE_TIMEOUT).models.list()
        except self._openai.APIStatusError as error:
            if error.status_code >= SERVER_FAILS:
                raise ValueError(
                    f"{self.url} fails on every request (status {error.status_code}: {said_by(error)}); start the "
                    f"server again. The same command resumes."
                ) from None
        except self._openai.APIConnectionError:  # or a time-out
            raise self._unreachable() from None
        except self._openai.OpenAIError:
            return

    def _unreachable(self) -> ValueError:
        return ValueError(
            f"{self.url} cannot be reached; start the server there, or correct --server. The same command resumes."
        )


UNCHANGED_SCORES = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent because servers would take these from the backbone's generation_config.json, which this command ignores."""


def seed_of(*key: int) -> int:
    """A seed of 31 bits, which every server takes.

    >>> seed_of(0, 3, 1) == seed_of(0, 3, 1), seed_of(0, 3, 1) == seed_of(0, 3, 2)
    (True, False)
    """
    return int(np.random.SeedSequence(key).generate_state(1)[0]) >> 1


def flattened(fields: dict[str, Any]) -> list[str]:
    return [name for name in (*fields, *fields.get("extra_body", {})) if name != "extra_body"]


def said_by(error: Any) -> str:
    """The server's own message in one line, without numbers, so that refusals that differ only there count as one."""
    body = error.body if isinstance(error.body, dict) else {}
    words = str(body.get("message") or error.message).split()
    return " ".join("…" if word.strip("(),.:").isdigit() else word for word in words)[:200]

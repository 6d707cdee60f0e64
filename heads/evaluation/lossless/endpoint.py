"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, `transformers serve`, …) as a source of greedy answers.

Texts are sent to `/completions` and chats to `/chat/completions`, one at a time. Each request asks for token ids
(vLLM's `return_token_ids`); once a server has refused that field, it is left out.
"""
# T prompt position

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from heads.evaluation.lossless.answers import END, Answer, Asked
from heads.extras import needs_extra

TIMEOUT = 600.0  # seconds for one answer


@dataclass(kw_only=True)
class Endpoint:
    """One server. Its key is read from the environment's OPENAI_API_KEY; local servers need none.

    Attributes:
        url: base URL of its API, such as http://localhost:8000/v1.
        model: the model's name there.
        new_tokens: the most tokens of an answer.

    Raises:
        ValueError: the URL is not one of http or https.
        MissingExtraError: the package `openai` is not installed.
    """

    url: str
    model: str
    new_tokens: int
    _openai: Any = field(default=None, init=False)
    _client: Any = field(default=None, init=False)
    _asks_for_ids: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The endpoint {self.url!r} was given; give a URL such as http://localhost:8000/v1.")
        with needs_extra("eval", "A server was to be asked"):
            import openai
        self._openai = openai
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.OpenAI(base_url=self.url, api_key=key, timeout=TIMEOUT, max_retries=2)

    def answer(self, asked: Asked) -> Answer:
        """The greedy answer.

        Raises:
            ValueError: the server cannot be reached, refuses the request, or answers with something else.
        """
        return self._ask(asked.prompt, self.new_tokens)

    def resume(self, asked: Asked, new: Sequence[int]) -> Answer | None:
        """The answer that continues these new tokens and includes them.

        The prefix is sent as token ids, so the answer is None for chats and for prompts without tokens.

        Raises:
            ValueError: as `answer`.
        """
        if not isinstance(asked.prompt, str) or asked.prompt_1T is None:
            return None
        left = self.new_tokens - len(new)
        if left <= 0 or new[-1] == END:
            return Answer(text="", tokens=list(new), ended=new[-1] == END)
        found = self._ask([*asked.prompt_1T[0].tolist(), *new], left)
        return None if found.tokens is None else Answer(text="", tokens=[*new, *found.tokens], ended=found.ended)

    def _ask(self, prompt: Any, new_tokens: int) -> Answer:
        openai = self._openai
        try:
            return self._read(self._send(prompt, new_tokens))
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            if not self._asks_for_ids:
                raise ValueError(f"{self.url} refused a request: {error}") from None
            self._asks_for_ids = False
            return self._ask(prompt, new_tokens)
        except openai.APIConnectionError:
            raise ValueError(f"{self.url} cannot be reached; start the server there, or correct the URL.") from None
        except openai.APIStatusError as error:
            raise ValueError(
                f"{self.url} answered with status {error.status_code} for the model {self.model!r}: {error.message}"
            ) from None
        except openai.OpenAIError as error:
            raise ValueError(f"{self.url} gave no answer that can be read: {error}") from None

    def _send(self, prompt: Any, new_tokens: int) -> Any:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": new_tokens, "temperature": 0}
        if self._asks_for_ids:
            asked["extra_body"] = {"return_token_ids": True}
        if is_chat(prompt):
            return self._client.chat.completions.create(messages=prompt, **asked)
        return self._client.completions.create(prompt=prompt, **asked)

    def _read(self, response: Any) -> Answer:
        choices = getattr(response, "choices", None)
        if not choices:
            raise ValueError(f"{self.url} answered without choices; give the URL of an OpenAI-compatible API.")
        choice = choices[0]
        message = getattr(choice, "message", None)
        text = (message.content if message is not None else choice.text) or ""
        ended = choice.finish_reason == "stop"
        ids = getattr(choice, "token_ids", None)
        prompt = getattr(choice, "prompt_token_ids", None) or getattr(response, "prompt_token_ids", None)
        return Answer(text=text, tokens=None if ids is None else list(ids), ended=ended, prompt=prompt)


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)

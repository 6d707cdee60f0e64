"""A language model as a judge (Zheng et al. 2023): on an OpenAI-compatible server, or loaded here.

Answers are stored in a file, so that a call that is repeated or resumed asks no question twice. A server's answer
without a verdict is not stored, and the next call asks that question again. Before the first question to a server the
number and the price of all that are left to ask are printed.
"""
# T token of a question

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import track

from heads.data.chat import choose_template, encode_chat
from heads.evaluation.judged.judge import AskedJudge
from heads.evaluation.lossless.stored_answers import describe_files
from heads.extras import needs_extra

ENVIRONMENT = {"url": "HEADWAY_JUDGE_URL", "model": "HEADWAY_JUDGE_MODEL", "key": "OPENAI_API_KEY"}
CHARACTERS_A_TOKEN = 4
TIMEOUT = 120.0


@dataclass(kw_only=True)
class EndpointJudge(AskedJudge):
    """A model on an OpenAI-compatible server, asked greedily.

    Attributes:
        url: base URL of the server's API, such as http://localhost:8000/v1.
        model: the model's name there.
        concurrency: how many questions are sent at once.
        tries: how often a question is sent before the call fails, with growing pauses.
        answer_tokens: the most tokens of an answer.
        prices: dollars for a million tokens of questions, and of answers; None: unknown.

    Raises:
        ValueError: the URL is not one of http or https.
        MissingExtraError: the package `openai` is not installed.
    """

    same_again: ClassVar[bool] = False

    url: str
    model: str
    key: str = "none"
    concurrency: int = 8
    tries: int = 5
    answer_tokens: int = 400
    prices: tuple[float, float] | None = None
    console: Console = field(default_factory=lambda: Console(stderr=True))
    _openai: Any = field(default=None, init=False)
    _client: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The judge's URL {self.url!r} was given; give one such as http://localhost:8000/v1.")
        with needs_extra("eval", "A judge was to be asked"):
            import openai
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=self.url, api_key=self.key, timeout=TIMEOUT, max_retries=max(0, self.tries - 1)
        )
        super().__post_init__()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"model": self.model, "url": self.url, "answer_tokens": self.answer_tokens}

    @property
    def identity(self) -> str:
        return f"{self.name} at {self.url}"

    @classmethod
    def from_environment(cls, **given: Any) -> EndpointJudge:
        """The judge that HEADWAY_JUDGE_URL, HEADWAY_JUDGE_MODEL and OPENAI_API_KEY name.

        Raises:
            ValueError: no URL or no model is set.
        """
        found = {name: os.environ.get(variable) for name, variable in ENVIRONMENT.items()}
        missing = [ENVIRONMENT[name] for name in ("url", "model") if not found[name]]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; set HEADWAY_JUDGE_URL and "
                f"HEADWAY_JUDGE_MODEL to an OpenAI-compatible server, and OPENAI_API_KEY where it wants a key."
            )
        known = {name: value for name, value in found.items() if value}
        return cls(name=str(found["model"]), **(known | given))

    def reach(self) -> None:
        """Ask the server which models it has: any answer shows that it is there, since many servers do not say.

        Raises:
            ValueError: it cannot be reached.
        """
        try:
            self._client.models.with_raw_response.list()
        except self._openai.APIConnectionError as error:
            raise self._unreachable(error) from error
        except self._openai.OpenAIError:
            return

    def ask_all(self, questions: Sequence[str], keep: Callable[[str, str], Any]) -> None:
        """
        Raises:
            ValueError: the server cannot be reached or refuses.
        """
        if questions:
            self.console.print(self.estimate(questions), highlight=False)
        with ThreadPoolExecutor(self.concurrency) as pool:
            asked = {pool.submit(self.ask, question): question for question in questions}
            try:
                for done in track(as_completed(asked), "judged", len(asked), console=self.console, transient=True):
                    keep(asked[done], done.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def estimate(self, questions: Sequence[str]) -> str:
        """A sentence that says what the questions cost at most.

        >>> judge = EndpointJudge(name="m", url="http://localhost:1/v1", model="m", prices=(2.0, 10.0))
        >>> judge.estimate(["a" * 4000])
        'The judge m is asked 1 question of about 1,000 tokens in all, at most 400 tokens of answers: at most $0.01.'
        """
        asked = sum(map(len, questions)) // CHARACTERS_A_TOKEN
        answered = self.answer_tokens * len(questions)
        cost = ""
        if self.prices is not None:
            cost = f": at most ${(asked * self.prices[0] + answered * self.prices[1]) / 1e6:.2f}"
        plural = "" if len(questions) == 1 else "s"
        return (
            f"The judge {self.name} is asked {len(questions):,} question{plural} of about {asked:,} tokens in all, at "
            f"most {answered:,} tokens of answers{cost}."
        )

    def ask(self, question: str) -> str:
        try:
            answer = self._client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=self.answer_tokens,
            )
            return str(answer.choices[0].message.content or "")
        except self._openai.APIConnectionError as error:
            raise self._unreachable(error) from error
        except (self._openai.OpenAIError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(
                f"The judge {self.model} at {self.url} gave no answer ({' '.join(str(error).split())}); check the "
                f"model's name and the key. Answers so far are kept."
            ) from error

    def _unreachable(self, error: Exception) -> ValueError:
        return ValueError(
            f"The judge {self.model} at {self.url} cannot be reached after {self.tries} tries ({error}); start it "
            f"or set {ENVIRONMENT['url']}. Answers so far are kept."
        )


@dataclass(kw_only=True)
class LocalJudge(AskedJudge):
    """An instruction-tuned model that is loaded here, asked greedily through its chat template.

    Raises:
        ValueError: the tokenizer has no chat template; when it is asked, a template that refuses the question.
    """

    same_again: ClassVar[bool] = True

    loaded: Any
    tokenizer: Any
    answer_tokens: int = 400

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"{self.name} has no chat template, so it cannot be asked in words; give an instruction-tuned model, "
                f"or judge by log-likelihood."
            )
        super().__post_init__()

    @property
    def settings(self) -> Mapping[str, Any]:
        model = {"model": self.name, "files": describe_files([self.name]), "dtype": str(self.loaded.dtype)}
        return {**model, "answer_tokens": self.answer_tokens}

    def ask_all(self, questions: Sequence[str], keep: Callable[[str, str], Any]) -> None:
        """
        Raises:
            ValueError: the chat template refuses a question.
        """
        for question in track(questions, "judged", transient=True):
            keep(question, self.ask(question))

    def ask(self, question: str) -> str:
        template = choose_template(self.tokenizer, None)
        asked = encode_chat(self.tokenizer, template, [{"role": "user", "content": question}])
        asked_1T = torch.tensor([asked], device=self.loaded.device)
        found_1T = self.loaded.generate(
            asked_1T,
            attention_mask=torch.ones_like(asked_1T),
            do_sample=False,
            max_new_tokens=self.answer_tokens,
        )
        return str(self.tokenizer.decode(found_1T[0, len(asked) :], skip_special_tokens=True))

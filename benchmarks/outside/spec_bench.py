"""Headway in Spec-Bench: the `forward_func` of its `evaluation/eval.py: run_eval`, also on machines without CUDA.

Nothing of github.com/hemingkx/Spec-Bench is a part of this project; the user's checkout is imported. Its loop runs
unchanged. Replaced are fastchat and shortuuid, from which it imports a reader of questions, a chat template and a
random id (our template is the prompt alone, since the backbone is no chat model), and on a machine without CUDA its
`.to("cuda")` and `torch.cuda.synchronize`.
"""
# T prompt position

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import types
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.outside.answer_by_pass import decode
from heads.evaluation.methods import replaced

EVALUATION = "evaluation/eval.py"


def forward(
    inputs: Any, model: Any, tokenizer: Any, max_new_tokens: int, decoding: Any = None
) -> tuple[Tensor, int, int, list[int]]:
    """Spec-Bench's contract: (sequences, new tokens, passes, tokens of each pass)."""
    sequences_1L, passes = decode(model, decoding, inputs.input_ids, max_new_tokens)
    lengths = [len(chunk) for chunk in passes.chunks]
    return sequences_1L, sum(lengths), len(lengths), lengths


def run(
    copy: Path, opened: Any, decoding: Any, questions: Path, new_tokens: int, answers: Path
) -> list[dict[str, Any]]:
    """Run its `run_eval` on a file of questions; the rows of its file of answers."""
    with imported(copy) as evaluation, without_cuda(opened.model.device), contextlib.redirect_stdout(io.StringIO()):
        answers.unlink(missing_ok=True)
        evaluation.run_eval(
            model=opened.model,
            tokenizer=OnCpu(opened.tokenizer) if opened.model.device.type == "cpu" else opened.tokenizer,
            forward_func=forward,
            model_id="headway",
            question_file=str(questions),
            question_begin=None,
            question_end=None,
            answer_file=str(answers),
            max_new_tokens=new_tokens,
            num_choices=1,
            num_gpus_per_model=1,
            num_gpus_total=1,
            decoding=decoding,
        )
    return [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]


def speed(
    copy: Path, answers: Path, plain_answers: Path, tokenizer: str, task: str
) -> tuple[float, float, float, float]:
    """Its `evaluation/speed.py`: tokens a second, plain's, their ratio, and mean accepted tokens."""
    with imported(copy), contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module("evaluation.speed")
        ours, plain, ratio, lengths = module.speed(str(answers), str(plain_answers), tokenizer, task, report=False)
    return float(ours), float(plain), float(ratio), sum(lengths) / len(lengths)


@contextlib.contextmanager
def imported(copy: Path) -> Iterator[Any]:
    """Its module `evaluation.eval`, with `stand_ins` for fastchat and shortuuid.

    Raises:
        ValueError: the folder is no checkout of Spec-Bench.
    """
    if not (copy / EVALUATION).is_file():
        raise ValueError(f"{copy} holds no {EVALUATION}; give a checkout of github.com/hemingkx/Spec-Bench.")
    given = stand_ins()
    before = {name: sys.modules.get(name) for name in given}
    sys.modules.update(given)
    sys.path.insert(0, str(copy))
    try:
        yield importlib.import_module("evaluation.eval")
    finally:
        sys.path.remove(str(copy))
        for name in [name for name in sys.modules if name.partition(".")[0] == "evaluation"]:
            del sys.modules[name]
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules with the names that Spec-Bench imports from fastchat and shortuuid."""
    names = ("fastchat", "fastchat.llm_judge", "fastchat.llm_judge.common", "fastchat.model", "shortuuid")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["fastchat.llm_judge.common"].load_questions = load_questions
    modules["fastchat.model"].get_conversation_template = lambda _: PromptAlone()
    modules["shortuuid"].uuid = lambda: uuid.uuid4().hex[:22]
    return modules


def load_questions(path: str, begin: int | None, end: int | None) -> list[dict[str, Any]]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()][begin:end]


@dataclass
class PromptAlone:
    """A conversation whose prompt is the text of its turns, without a template."""

    roles: tuple[str, str] = ("user", "assistant")
    messages: list[list[Any]] = field(default_factory=list)
    stop_str: str | None = None
    stop_token_ids: list[int] | None = None
    name: str = "prompt alone"

    def append_message(self, role: str, text: str | None) -> None:
        self.messages.append([role, text])

    def get_prompt(self) -> str:
        return "".join(text for _, text in self.messages if text)


@contextlib.contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    """A context in which, on another device, synchronising CUDA does nothing."""
    if device.type == "cuda":
        yield
        return
    with replaced(torch.cuda, "synchronize", lambda *_: None):
        yield


@dataclass
class OnCpu:
    """A tokenizer whose `.to("cuda")` stays on the CPU."""

    tokenizer: Any

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        found = self.tokenizer(*arguments, **options)
        found.to = lambda *_: found
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

"""Headway in Model-Optimizer's `examples/specdec_bench`: a `Model` for its own loop and metrics.

Nothing of github.com/NVIDIA/Model-Optimizer is a part of this project; the user's checkout is imported. `run` returns
the tokens of each pass and when it ended, without the end-of-text token, as its guide asks.
"""
# T prompt position

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.outside.answer_by_pass import decode

FOLDER = "examples/specdec_bench"


class HeadwayModel:
    """Its `specdec_bench.models.base.Model`: one request at a time, greedy."""

    def __init__(self, model: Any, decoding: Any) -> None:
        self.model = model
        self.decoding = decoding

    async def run(
        self, prompt_ids: Sequence[int], max_length: int, end_id: int, request_id: int, turn_id: int
    ) -> dict[str, Any]:
        """The chunks of one beam, and times that begin with the call.

        Args:
            max_length: most new tokens.
            end_id: −1 ends no text.
        """
        prompt_1T = torch.tensor([list(prompt_ids)], device=self.model.device)
        ends = {} if end_id >= 0 else {"eos_token_id": None}
        _, passes = await asyncio.to_thread(decode, self.model, self.decoding, prompt_1T, max_length, **ends)
        chunks = [[token for token in chunk if token != end_id] for chunk in passes.chunks]
        return {
            "output_ids": [[chunk for chunk in chunks if chunk]],
            "output_logits": None,
            "token_times": passes.times,
        }

    def get_serving_config(self) -> dict[str, Any]:
        return {"decoding": type(self.decoding).__name__}

    def stop(self) -> None:
        """Called at the end; there is nothing to free."""


def run(copy: Path, opened: Any, decoding: Any, questions: Path, new_tokens: int, out: Path) -> dict[str, Any]:
    """Its loop on a file of questions in Spec-Bench's format: its acceptance and timing figures."""
    with imported(copy) as harness, contextlib.redirect_stdout(io.StringIO()):
        metrics = [harness.metrics.AcceptanceRate(), harness.metrics.Timing(1)]
        for metric in metrics:
            metric.update_directory(str(out))
        runner = harness.runners.SimpleRunner(HeadwayModel(opened.model, decoding), metrics=metrics)
        asyncio.run(
            harness.run_loop(
                runner,
                harness.datasets.SpecBench(str(questions)),
                opened.tokenizer,
                new_tokens,
                harness.postprocess_base,
                concurrency=1,
                end_id=-1 if opened.tokenizer.eos_token_id is None else opened.tokenizer.eos_token_id,
                completions=True,
            )
        )
    responses = [json.loads(line) for line in (out / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "acceptance": metrics[0].out,
        "timing": metrics[1].out,
        "tokens": list(metrics[1].total_tokens),
        "seconds": [times[-1] - times[0] for times in metrics[1].timing],
        "texts": [response["choices"][0]["turns"] for response in responses],
    }


@contextlib.contextmanager
def imported(copy: Path) -> Iterator[Any]:
    """Its module `run`.

    Raises:
        ValueError: the folder is no checkout of Model-Optimizer.
    """
    folder = copy / FOLDER
    if not (folder / "run.py").is_file():
        raise ValueError(f"{copy} holds no {FOLDER}/run.py; give a checkout of github.com/NVIDIA/Model-Optimizer.")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # it says which engines are not installed
            yield importlib.import_module("run")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("run", "specdec_bench")]:
            del sys.modules[name]

"""Writes the texts that a judge compares: the baseline's, and those of dynamic decoding at each threshold ε_b.

Every prompt gets several sampled texts (DynaMo, §3.4) with the settings of appendix A.1. The baseline's come from plain
`generate` on the backbone as it was before heads were trained with it.
"""
# T prompt position, B draw

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from heads.backbone.loading import max_positions
from heads.checkpoint.opening import find_backbone, open_backbone
from heads.checkpoint.schema import read_description
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.generated_text import repeated_ngrams
from heads.evaluation.judged.sentences import Prompt
from heads.evaluation.methods import end_tokens
from heads.evaluation.runs.task import SuiteTask

REQUEST = {"do_sample": True, "top_k": 50, "temperature": 0.7, "repetition_penalty": 1.1}


def open_baseline(task: SuiteTask) -> tuple[Any, str]:
    """The backbone as it was before heads were trained with it, and its name."""
    if task.backbone is None and read_description(task.folder).trained_backbone is not None:
        name = find_backbone(task.folder)
        return open_backbone(name, task.dtype, pack=task.pack).model, name
    return task.model, "the heads' backbone"


def check_room(task: SuiteTask, prompts: Sequence[Prompt], new_tokens: int) -> None:
    """Check that every prompt and the new tokens after it fit the backbone's positions.

    Raises:
        ValueError: a prompt that does not fit.
    """
    longest = max_positions(task.model)
    for prompt in prompts:
        length = tokens_of(prompt, task.tokenizer).shape[1] + new_tokens
        if longest is not None and length > longest:
            raise ValueError(
                f"The prompt {prompt.name} has {length} tokens with {new_tokens} new ones; the backbone reads "
                f"{longest}. Lower --max-new-tokens, or take shorter prompts."
            )


def tokens_of(prompt: Prompt, tokenizer: Any) -> torch.Tensor:
    return torch.tensor([list(prompt.tokens or tokenizer(prompt.text)["input_ids"])])


def write(model: Any, tokenizer: Any, prompt: Prompt, new_tokens: int, draws: int, decoding: Any = None) -> list[Any]:
    """One row of `as_row` for each draw, by `decoding` or, without one, by plain `generate`."""
    prompt_BT = tokens_of(prompt, tokenizer).to(model.device).repeat(draws, 1)
    output = model.generate(
        prompt_BT,
        attention_mask=torch.ones_like(prompt_BT),
        max_new_tokens=new_tokens,
        pad_token_id=end_tokens(model)[0] if end_tokens(model) else 0,
        return_dict_in_generate=True,
        **({} if decoding is None else {"custom_generate": decoding}),
        **REQUEST,
    )
    passes = None if decoding is None else output.stats.drafted
    return [
        as_row(model, tokenizer, new_N.tolist(), None if passes is None else passes[b])
        for b, new_N in enumerate(output.sequences[:, prompt_BT.shape[1] :])
    ]


def as_row(model: Any, tokenizer: Any, tokens: list[int], drafted: Sequence[int] | None) -> dict[str, Any]:
    ends = [i for i, token in enumerate(tokens) if token in end_tokens(model)]
    kept = tokens[: ends[0]] if ends else tokens
    return {
        "text": tokenizer.decode(kept, skip_special_tokens=True),
        "tokens": len(kept) if drafted is None else len(drafted),
        "passes": len(kept) if drafted is None else len(drafted) - sum(drafted),
        "repeated": repeated_ngrams(kept),
    }


def write_all(
    task: SuiteTask,
    baseline: Any,
    prompts: Sequence[Prompt],
    thresholds: Sequence[float],
    new_tokens: int,
    draws: int,
    seed: int,
    advance: Any,
    **dynamic: Any,
) -> dict[str, list[Any]]:
    """All texts by "base NAME" and "ε_b NAME"; texts that `task.rows` holds are read from it.

    Args:
        baseline: the model that continues the prompts by plain `generate`.
        dynamic: settings of `DynamicDecoding`.
    """
    found: dict[str, list[Any]] = {}
    for i, prompt in enumerate(prompts):
        for j, threshold in enumerate([None, *thresholds]):
            key = f"{'base' if threshold is None else threshold} {prompt.name}"
            row = task.rows.get(key)
            if row is None:
                number = seed + 10_007 * i + j
                torch.manual_seed(number)
                decoding = None
                if threshold is not None:
                    generator = torch.Generator(task.model.device).manual_seed(number)
                    decoding = DynamicDecoding(task.token_heads, threshold, generator=generator, **dynamic)
                model = baseline if threshold is None else task.model
                row = {"texts": write(model, task.tokenizer, prompt, new_tokens, draws, decoding)}
                task.rows.put(key, row)
            found[key] = row["texts"]
            advance()
    return found

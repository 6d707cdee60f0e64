"""Which fields of transformers' TrainingArguments `trainer` takes, and why it refuses the others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformers import TrainingArguments

from heads.validation import nearest

SET_BY_HEADWAY = {
    "output_dir",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "report_to",
    "resume_from_checkpoint",
    "save_strategy",
    "eval_strategy",
    "eval_steps",
    "seed",
    "data_seed",
    "remove_unused_columns",
}
"""Fields that have a place of their own in a run's config."""
NOT_HERE = {
    "optim": "the optimizer is AdamW with the fields of `optimizer`",
    "optim_args": "the optimizer is AdamW with the fields of `optimizer`",
    "label_smoothing_factor": "soft labels are the backbone's own: see loss",
    "label_names": "labels are made from tokens and masks",
    "gradient_checkpointing": "set backbone.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "set backbone.gradient_checkpointing",
    "fsdp": "engines are chosen by the launch file; see docs/engines.md",
    "fsdp_config": "engines are chosen by the launch file; see docs/engines.md",
    "deepspeed": "engines are chosen by the launch file; see docs/engines.md",
    "torch_compile": "set compile",
    "torch_compile_backend": "set compile",
    "torch_compile_mode": "set compile",
    "enable_jit_checkpoint": "a run that gets SIGTERM or SIGUSR1 is saved in any case",
    "logging_nan_inf_filter": "a step whose loss is not finite is skipped; see max_skipped_steps",
    "ignore_data_skip": "a resumed run goes on at its place in the data",
    "save_only_model": "checkpoints are there to resume from",
    "load_best_model_at_end": "the best heads are kept in best/ beside the last",
    "metric_for_best_model": "heads are judged by tokens per pass",
}
"""Fields that would have no effect, or another one than their name says; the value says what to do."""


def check_trainer_fields(fields: dict[str, Any]) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    known = list(defaults)
    for name in fields:
        if name in SET_BY_HEADWAY:
            raise ValueError(f"trainer.{name} has a field of its own in the run's config; remove it from `trainer`.")
        if name not in known:
            raise ValueError(f"trainer.{name} is no field of transformers.TrainingArguments.{nearest(name, known)}")
        if name in NOT_HERE:
            raise ValueError(f"trainer.{name} has no effect here and is refused: {NOT_HERE[name]}.")
        check_type(name, fields[name], defaults[name])


def check_type(name: str, value: Any, default: Any) -> None:
    """A field whose default is a number or a switch takes the same kind."""
    wanted = "true or false" if isinstance(default, bool) else "a number" if isinstance(default, int | float) else None
    is_number = isinstance(value, int | float) and not math.isnan(value)
    right = isinstance(value, bool) if wanted == "true or false" else is_number
    if wanted is not None and not right:
        raise ValueError(f"trainer.{name} takes {wanted}; {value!r} was given.")

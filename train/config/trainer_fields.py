"""The fields of transformers' TrainingArguments that `trainer` takes, their values, and why the others are refused."""

from __future__ import annotations

import dataclasses
import math
from types import NoneType
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from heads.validation import InvalidFieldError, Range, describe, members, nearest

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
    "save_steps",
    "eval_strategy",
    "eval_steps",
    "seed",
    "data_seed",
    "remove_unused_columns",
}
"""Fields that other parts of a run's config set."""
OWN_EVALUATION = "held-out blocks are measured by Headway itself; see evaluation"
LAUNCHED = "engines are chosen by the launch file; see docs/engines.md"
CHECKPOINTING = "set backbone.gradient_checkpointing"
UPLOAD = "upload last/ or best/ when the run has ended"
TRACKED = "metrics go where report_to says, which has no trackio"
NOT_HERE = {
    **dict.fromkeys(
        ("optim", "optim_args", "optim_target_modules"), "the optimizer is AdamW with the fields of `optimizer`"
    ),
    "label_smoothing_factor": "soft labels are the backbone's own: see loss",
    "label_names": "labels are made from tokens and masks",
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), CHECKPOINTING),
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), CHECKPOINTING),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "local_rank"), LAUNCHED),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "set compile"),
    "enable_jit_checkpoint": "a run that gets SIGTERM, SIGUSR1 or Ctrl-C is saved in any case",
    "logging_nan_inf_filter": "a step whose loss is not finite is skipped; see max_skipped_steps",
    "ignore_data_skip": "a resumed run continues at its place in the data",
    "save_only_model": "a checkpoint must hold all that a run resumes from",
    "load_best_model_at_end": "the best heads are saved in best/, beside the last",
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "the best heads have the most tokens per pass"),
    **dict.fromkeys(("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"), OWN_EVALUATION),
    **dict.fromkeys(("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"), OWN_EVALUATION),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), OWN_EVALUATION),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "a run trains, and evaluates where data is held out"),
    "average_tokens_across_devices": "losses always count the labels of all processes",
    "auto_find_batch_size": "a run takes the batch that its config names; `python -m train plan` says what fits",
    "use_liger_kernel": "the loss has chunks of its own",
    "liger_kernel_config": "the loss has chunks of its own",
    "neftune_noise_alpha": "noise on inputs was measured and brought nothing (docs/decisions.md)",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy"), UPLOAD),
    **dict.fromkeys(("hub_always_push", "hub_revision"), UPLOAD),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), TRACKED),
    "length_column_name": "all blocks have one length",
    "use_cache": "training passes keep no cache",
    "restore_callback_states_from_checkpoint": "no callback of a run has a state that a checkpoint holds",
    "save_on_each_node": "all processes share output_dir, where each node would write the same checkpoint",
}
"""Fields that would have no effect, a misleading or a harmful one, with the reason or what to do instead."""
RANGES = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), Range(1)),
    **dict.fromkeys(("gradient_accumulation_steps", "torch_empty_cache_steps", "ddp_timeout"), Range(1)),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb"), Range(1)),
    **dict.fromkeys(("warmup_steps", "max_grad_norm", "eval_delay", "dataloader_num_workers"), Range(0)),
    "save_total_limit": Range(0),
    **dict.fromkeys(("num_train_epochs", "logging_steps"), Range(above=0)),
    "max_steps": Range(-1),
}
"""The numbers that a run can train with."""
CHOICES = {
    "lr_scheduler_type": [kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy")],
    "logging_strategy": [kind.value for kind in IntervalStrategy],
    "train_sampling_strategy": ["random", "sequential"],
}
"""The names that a run can train with. Schedules that follow a metric are left out, since the Trainer reads `eval_loss`
for them, which heads do not have; so are orders by length, since all blocks have one length."""


def check_trainer_fields(fields: dict[str, Any]) -> None:
    """Raise ValueError on a field that is not taken, or on a value that no run could train with."""
    known = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    for name, value in fields.items():
        if name in SET_BY_HEADWAY:
            raise ValueError(f"trainer.{name} has a field of its own in the run's config; remove it from `trainer`.")
        if name not in known:
            raise ValueError(f"trainer.{name} is no field of transformers.TrainingArguments.{nearest(name, known)}")
        if name in NOT_HERE:
            raise ValueError(f"trainer.{name} was given and is refused: {NOT_HERE[name]}.")
        check_value(known[name], value)
    if fields.get("max_steps") == 0:
        raise ValueError("trainer.max_steps=0 was given; give 1 and more, or -1 for all of num_train_epochs.")
    if fields.get("bf16") and fields.get("fp16"):
        raise ValueError("trainer.bf16 and trainer.fp16 were both given; give one of them.")
    check_schedule(fields)


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Check that numbers and booleans have the field's type and range, and that names are known.

    Raises:
        InvalidFieldError: the value is of another type or out of its range.
        ValueError: the name is unknown.
    """
    name, kinds = f"trainer.{field.name}", set(members(field.type))
    if field.name == "bf16" and value == "auto":  # train/engine/half_precision.py
        return
    if choices := CHOICES.get(field.name):
        if value not in choices:
            raise ValueError(f"{name}={value!r} was given; allowed are {', '.join(choices)}.{nearest(value, choices)}")
        return
    if not kinds <= {int, float, bool, NoneType}:
        return  # the library checks texts and mappings
    limits = RANGES.get(field.name, Range())
    of_kind = type(value) in kinds or (type(value) is int and float in kinds)
    if not of_kind or not in_range(value, limits):
        allowed = describe(field.type, dataclasses.field(metadata={"validator": [limits]}))
        raise InvalidFieldError(name, value, allowed)


def in_range(value: float | None, limits: Range) -> bool:
    """
    >>> in_range(0.5, Range(0)), in_range(-1, Range(0)), in_range(float("nan"), Range())
    (True, False, False)
    """
    try:
        limits(value)
    except ValueError:
        return False
    return value is None or math.isfinite(value)


def check_schedule(fields: dict[str, Any]) -> None:
    """Build the schedule once for a dummy optimizer, since the library knows which arguments each schedule needs.

    Raises:
        ValueError: an argument is unknown or missing, or the schedule would ignore a setting.
    """
    name, arguments = fields.get("lr_scheduler_type", "cosine"), fields.get("lr_scheduler_kwargs")
    if name == "constant" and fields.get("warmup_steps"):
        raise ValueError("trainer.warmup_steps was given with the schedule constant; use constant_with_warmup.")
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidFieldError("trainer.lr_scheduler_kwargs", arguments, "names and values")
    if arguments and name.startswith("constant"):
        raise ValueError(f"trainer.lr_scheduler_kwargs was given with the schedule {name}, which takes none.")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        get_scheduler(name, optimizer, 1, 10, arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"trainer.lr_scheduler_type {name} was given with lr_scheduler_kwargs {arguments}: {error}"
        ) from None

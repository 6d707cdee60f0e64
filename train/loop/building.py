"""Build the parts of a run from its config: the trained model, the Trainer's arguments and the Trainer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from heads.backbone.loading import BackboneConfig, load_backbone
from heads.backbone.model import Backbone
from heads.checkpoint import save_load
from heads.checkpoint.adapter import LoraSettings, add_adapter, has_adapter
from heads.checkpoint.opening import load_recorded
from heads.checkpoint.schema import read_description
from heads.families import build_config, create_unchosen
from heads.interface.token_heads import TokenHeads
from heads.quantization.packed_heads import refuse_packed_heads
from train.checkpoint.interruption import Interruption
from train.checkpoint.progress import read_progress
from train.config import TrainConfig
from train.data.blocks import PackedData
from train.data.hidden_states import cache_hidden_states
from train.engine.engine import Engine, device_fields
from train.loop.batches import as_arrays, collate
from train.loop.console import RunLines
from train.loop.metrics import JsonLines
from train.loop.provenance import recipe
from train.loop.trainer import HeadsTrainer, use_one_gpu
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)


def refuse_what_cannot_be_split(config: TrainConfig, engine: Engine) -> None:
    """
    Raises:
        ValueError: the engine splits weights, and the backbone is quantised or self-distillation needs a whole copy.
    """
    if engine.shards_weights and config.backbone.quantization:
        raise ValueError(
            f"backbone.quantization was given with {engine.value}, and quantised weights cannot be split; use "
            f"launch/ddp.yaml, zero1.yaml or zero2.yaml, or load the backbone without it."
        )
    if engine.shards_weights and config.self_distillation.weight and not config.lora.rank:
        raise ValueError(
            f"self_distillation was given for a backbone of which all weights are trained under {engine.value}: it "
            f"keeps a second, unsharded backbone in each process; train a LoRA adapter (lora.rank), whose teacher "
            f"needs no copy, or use launch/ddp.yaml, zero1.yaml or zero2.yaml."
        )


def build_model(config: TrainConfig, device: torch.device) -> TrainedModel:
    return model_on(config, Backbone(load_trainable(config, device)))


def model_on(config: TrainConfig, backbone: Backbone) -> TrainedModel:
    """The config's model on a given backbone, which may be on the meta device (train/plan)."""
    token_heads = None if config.family is None else build_heads(config, backbone)
    model = TrainedModel(
        backbone,
        token_heads,
        trains_backbone=config.rates.base is not None,
        gradient_scale=config.rates.gradient_scale,
        label_shift=config.label_shift,
        lookahead=config.lookahead,
        attend_across_documents=config.data.attend_across_documents,
        head_decay=config.head_decay,
        loss=config.loss,
        self_distillation=config.self_distillation,
    )
    refuse_useless_checkpointing(config, model)
    return model


def refuse_useless_checkpointing(config: TrainConfig, model: TrainedModel) -> None:
    """Heads that have layers of the backbone's class recompute them too, so a frozen backbone alone says nothing.

    Raises:
        ValueError: backbone.gradient_checkpointing was given, and no layer that is trained could be recomputed.
    """
    if not config.backbone.gradient_checkpointing or config.rates.base is not None:
        return
    recomputed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not any(parameter.requires_grad for module in recomputed for parameter in module.parameters()):
        raise ValueError(
            "backbone.gradient_checkpointing was given with a frozen backbone and heads without layers of its kind, so "
            "it would have no effect; leave it out, or give rates.base."
        )


def trainable_fields(config: TrainConfig) -> BackboneConfig:
    """The backbone's fields, with float32 for a trained backbone unless the config names a dtype.

    bfloat16 has 8 bits of mantissa, so updates of 1e-6 of a weight's size would be lost. An adapter is float32 whatever
    the backbone's dtype.
    """
    fields = config.backbone
    if config.rates.base is not None and fields.dtype == "auto" and not fields.quantization:
        return replace(fields, dtype="float32")
    return fields


def load_trainable(config: TrainConfig, device: torch.device) -> Any:
    """The backbone, with the adapter of `init_from` or a new one where the config gives a LoRA rank."""
    fields = trainable_fields(config)
    if config.init_from is not None and read_description(config.init_from).trained_backbone is not None:
        model = load_recorded(fields, config.init_from, device)
    else:
        model = load_backbone(fields, device)
    if has_adapter(model):
        check_adapter(model, config)
    elif config.lora.rank:
        add_adapter(model, config.lora)
    return model


def check_adapter(model: Any, config: TrainConfig) -> None:
    """Check that the config trains the adapter that was loaded with `init_from`.

    Raises:
        ValueError: the config gives another adapter, or trains all weights.
    """
    rank = next(iter(model.peft_config.values())).r
    if config.rates.base is not None and config.lora != replace(LoraSettings(), rank=rank):
        raise ValueError(
            f"init_from {config.init_from} holds a backbone with a LoRA adapter of rank {rank}; to continue its "
            f"training, give lora.rank {rank} and no other lora field, or start from heads on a whole backbone."
        )


def build_heads(config: TrainConfig, backbone: Backbone) -> TokenHeads:
    """New heads, or those of `init_from`, which must be of the same family and fields; in float32 for training.

    The draft tokens of new heads are chosen later, from the training data (train/data/draft_tokens.py).

    Raises:
        ValueError: the heads of init_from are not those that the config describes.
    """
    assert config.family is not None
    if config.init_from is None:
        return create_unchosen(config.family, backbone, **config.heads).float()
    token_heads = save_load.load(config.init_from, backbone, dtype=torch.float32)
    refuse_packed_heads(token_heads, "Training")
    wanted = build_config(config.family, **config.heads)
    if token_heads.family != config.family or (config.heads and token_heads.config != wanted):
        raise ValueError(
            f"init_from {config.init_from} holds {token_heads.family} heads with {vars(token_heads.config)}; the "
            f"config asks for {config.family} with {vars(wanted)}: make them agree, or leave `heads` out to keep the "
            "folder's."
        )
    return token_heads.train()


def training_arguments(config: TrainConfig) -> TrainingArguments:
    every = config.evaluation.every_steps
    fields: dict[str, Any] = {
        "logging_steps": 10,
        "lr_scheduler_type": "cosine",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,  # every trained parameter is in every micro-batch's loss
        "logging_nan_inf_filter": False,  # train/loop/step_guard.py skips such steps, with fewer synchronisations
        "eval_steps": every or None,
        "eval_strategy": "steps" if every else "no",
        "save_steps": config.save_every_steps or 500,
        "save_strategy": "steps" if config.save_every_steps else "no",
        "save_total_limit": 2,
    }
    try:
        arguments = TrainingArguments(
            output_dir=config.output_dir,
            learning_rate=config.rates.heads if config.family is not None else config.rates.base,
            report_to=[name for name in config.report_to if name != "jsonl"],
            remove_unused_columns=False,
            label_names=[],
            seed=config.seed,
            **(fields | config.trainer | device_fields(config.trainer)),
        )
    except TypeError as error:
        raise ValueError(f"A field of `trainer` has a value of the wrong type: {error}") from error
    use_one_gpu(arguments)
    return arguments


def build_trainer(
    config: TrainConfig,
    arguments: TrainingArguments,
    model: TrainedModel,
    tokenizer: Any,
    data: PackedData,
    engine: Engine = Engine.ONE,
    interruption: Interruption | None = None,
    resumed_from: Path | None = None,
) -> HeadsTrainer:
    metrics = Path(config.output_dir) / "metrics.jsonl"
    resumes_at = None if resumed_from is None else read_progress(resumed_from).metrics_bytes
    callbacks: list[Any] = [RunLines(model.num_heads)]
    if "jsonl" in config.report_to:
        callbacks.append(JsonLines(metrics, resumes_at=resumes_at))
    return HeadsTrainer(
        config=config,
        recipe=recipe(config),
        engine=engine,
        interruption=interruption,
        resumed_from=resumed_from,
        model=model,
        args=arguments,
        train_dataset=as_arrays(data.train),
        eval_dataset=as_arrays(data.eval),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def skip_evaluation(arguments: TrainingArguments) -> None:
    logger.warning("No held-out data: nothing is evaluated; set data.eval or data.eval_fraction to measure the heads.")
    arguments.eval_strategy = IntervalStrategy.NO
    arguments.eval_on_start = False


def store_hidden_states(trainer: HeadsTrainer) -> None:
    """With `cache_hidden_states`, run the backbone once over the blocks and train on the stored states."""
    config = trainer.config
    if not config.cache_hidden_states:
        return
    trainer.model.to(trainer.args.device).train()
    trainer.train_dataset = cache_hidden_states(
        trainer.model,
        trainer.train_dataset,
        collate=collate,
        batch_size=trainer.args.per_device_train_batch_size,
        dtype=config.hidden_states_dtype and getattr(torch, config.hidden_states_dtype),
        context=trainer.compute_loss_context_manager,
        server=config.states_server,
    )
    if trainer.engine.shards_weights:
        trainer.model.to("cpu")  # the engine moves it shard by shard

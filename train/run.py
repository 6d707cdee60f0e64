"""One run from its config: build, train, save, and say where everything lies."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import IntervalStrategy

from heads.backbone.loading import BackboneConfig, load_backbone, load_tokenizer
from heads.backbone.model import Backbone
from heads.checkpoint import save_load as checkpoint
from heads.checkpoint.backbone import LoraSettings, add_adapter, has_adapter
from heads.checkpoint.opening import load_recorded
from heads.checkpoint.save_load import read_description
from heads.cli.info import describe_quality
from heads.families import build_config, create_unchosen
from heads.interface.token_heads import TokenHeads
from train.checkpoint.interruption import EXIT_CODE, Interruption, clear_marker, listening, set_marker
from train.checkpoint.progress import read_progress
from train.checkpoint.resume import check_shared_folder, choose_checkpoint, refuse_old_checkpoints
from train.checkpoint.whole import newest_whole
from train.config import TrainConfig, read_config
from train.data.blocks import PackedData
from train.data.draft_tokens import settle_draft_vocabulary
from train.data.hidden_states import cache_hidden_states
from train.data.packing import build_datasets
from train.engine.compiling import compile_where_it_wins
from train.engine.engine import Engine, describe_engine, device_fields, end_together, start_engine, use_all_cores
from train.engine.gathering import whole_weights
from train.loop.batches import as_arrays, collate
from train.loop.errors import explained_cache, names_checkpoint
from train.loop.metrics import JsonLines
from train.loop.overhead import log_heads_overhead
from train.loop.provenance import recipe
from train.loop.trainer import HeadsTrainer
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    """What train.py does."""
    explain_errors(lambda: run(read_config(arguments)))
    end_together()


def explain_errors(action: Callable[[], Any]) -> None:
    """Run an action; what a user can cause ends in one sentence and exit code 1. HEADWAY_TRACEBACK=1 shows all."""
    try:
        action()
    except (ValueError, OSError) as error:
        if os.environ.get("HEADWAY_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(1)


def run(config: TrainConfig) -> Path:
    """Train and save; returns the folder of the run.

    Raises:
        SystemExit: with code 75 after a signal that asks the run to end; it was saved to go on from.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.logging.set_verbosity_warning()
    with listening() as interruption:
        return run_listening(config, interruption)


def run_listening(config: TrainConfig, interruption: Interruption) -> Path:
    refuse_old_checkpoints(config)
    arguments = training_arguments(config)  # first: it starts the engine and decides on the device
    use_all_cores()
    engine = start_engine()
    if not PartialState().is_main_process:
        logging.getLogger().setLevel(logging.WARNING)  # one process says what all do
    logger.info(describe_engine(engine))
    refuse_what_cannot_be_split(config, engine)
    resumed_from = choose_checkpoint(config, arguments, engine)
    check_shared_folder(config)
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.backbone)
    # what is sharded is moved shard by shard, and may not fit on one device
    model = build_model(config, torch.device("cpu") if engine.shards_weights else arguments.device)
    # one process fills the cache, the others read it
    with explained_cache(), arguments.main_process_first(desc="tokenising"):
        data = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=model.backbone.vocab_size)
    if data.eval is None:
        skip_evaluation(arguments)
    settled = settle_draft_vocabulary(model, data.train, chosen=config.init_from is not None)
    trainer = build_trainer(config, arguments, model, tokenizer, data, engine, interruption, resumed_from)
    trainer.recipe |= settled
    describe_run(trainer, data)
    train(trainer)
    finish(trainer)
    return Path(config.output_dir)


def refuse_what_cannot_be_split(config: TrainConfig, engine: Engine) -> None:
    """
    Raises:
        ValueError: a quantised backbone, or a second whole one, under an engine that splits weights.
    """
    if engine.shards_weights and config.backbone.quantization:
        raise ValueError(
            f"backbone.quantization was given with {engine.value}, and quantised weights cannot be split; use "
            f"launch/ddp.yaml, zero1.yaml or zero2.yaml, or load the backbone without it."
        )
    if engine.shards_weights and config.self_distillation.weight and not config.lora.rank:
        raise ValueError(
            f"self_distillation was given for a backbone of which all weights are trained under {engine.value}: it "
            f"keeps a second, whole backbone in each process, which is what splitting is there to avoid; train a "
            f"LoRA adapter (lora.rank), whose original is the same weights, or use launch/ddp.yaml, zero1.yaml or "
            f"zero2.yaml."
        )


def train(trainer: HeadsTrainer) -> None:
    """From the start or from a checkpoint, to the end or to a signal.

    Raises:
        SystemExit: after a signal.
    """
    resumed_from, folder = trainer.resumed_from, Path(trainer.args.output_dir)
    if resumed_from is None:
        log_heads_overhead(trainer)
    else:
        trainer.args.eval_on_start = False  # the start was evaluated
    wanted = compile_choice(trainer.config, resumed_from)
    trainer.compiled = compile_where_it_wins(trainer, wanted, resumed=resumed_from is not None)
    store_hidden_states(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    clear_marker(folder)
    trainer.interruption.training = True
    with names_checkpoint(folder):
        trainer.train(resume_from_checkpoint=None if resumed_from is None else str(resumed_from))
    if trainer.interruption.agreed:
        leave(trainer)


def compile_choice(config: TrainConfig, resumed_from: Path | None) -> bool | str:
    """A run that goes on does as it did before: compiled layers round differently."""
    if config.compile == "auto" and resumed_from is not None:
        return read_progress(resumed_from).compiled
    return config.compile


def leave(trainer: HeadsTrainer) -> None:
    """Say where the run goes on from, for people and for schedulers.

    Raises:
        SystemExit: always.
    """
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir)
        last, _ = newest_whole(folder)
        saved = f"{last} is whole: the same command with --resume true goes on from it" if last else "nothing was saved"
        set_marker(folder, f"step {trainer.state.global_step}")
        logger.info(f"ended by {trainer.interruption.received or 'a signal to another process'}; {saved}.")
    end_together()
    sys.exit(EXIT_CODE)


def build_model(config: TrainConfig, device: torch.device) -> TrainedModel:
    return model_on(config, Backbone(load_trainable(config, device)))


def model_on(config: TrainConfig, backbone: Backbone) -> TrainedModel:
    """What is trained of the config, on a backbone that is there: with weights, or in shapes alone (train/plan)."""
    token_heads = None if config.family is None else build_heads(config, backbone)
    return TrainedModel(
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


def trainable_fields(config: TrainConfig) -> BackboneConfig:
    """The backbone's fields, in float32 where it is trained, unless the config names a dtype.

    Steps of 1e-6 of a weight's size are lost in bfloat16, which keeps 8 bits. An adapter is float32 whatever the dtype
    of the backbone under it.
    """
    fields = config.backbone
    if config.rates.base is not None and fields.dtype == "auto" and not fields.quantization:
        return replace(fields, dtype="float32")
    return fields


def load_trainable(config: TrainConfig, device: torch.device) -> Any:
    """The backbone, with its adapter if it has or is to have one."""
    fields = trainable_fields(config)
    if config.init_from is not None and read_description(config.init_from).get("trained_backbone") is not None:
        model = load_recorded(fields, config.init_from, device)
    else:
        model = load_backbone(fields, device)
    if has_adapter(model):
        check_adapter(model, config)
    elif config.lora.rank:
        add_adapter(model, config.lora)
    return model


def check_adapter(model: Any, config: TrainConfig) -> None:
    """An adapter that came with `init_from` is the one that is trained on.

    Raises:
        ValueError: the config asks for another one, or for all weights.
    """
    rank = next(iter(model.peft_config.values())).r
    if config.rates.base is not None and config.lora != replace(LoraSettings(), rank=rank):
        raise ValueError(
            f"init_from {config.init_from} holds a backbone with a LoRA adapter of rank {rank}; to train it on, give "
            f"lora.rank {rank} and no other lora field, or start from heads on a whole backbone."
        )


def build_heads(config: TrainConfig, backbone: Backbone) -> TokenHeads:
    """New heads, or those of `init_from`, which must be of the same family and fields; in float32 for training.

    A draft vocabulary of new heads is chosen when the data is there (train/data/draft_tokens.py).

    Raises:
        ValueError: init_from holds other heads than the config describes.
    """
    assert config.family is not None
    if config.init_from is None:
        return create_unchosen(config.family, backbone, **config.heads).float()
    token_heads = checkpoint.load(config.init_from, backbone, dtype=torch.float32)
    wanted = build_config(config.family, **config.heads)
    if token_heads.family != config.family or (config.heads and token_heads.config != wanted):
        raise ValueError(
            f"init_from {config.init_from} holds {token_heads.family} heads with {vars(token_heads.config)}; the "
            f"config asks for {config.family} with {vars(wanted)}: make them agree, or leave `heads` out to take them "
            "as they are."
        )
    return token_heads.train()


def training_arguments(config: TrainConfig) -> TrainingArguments:
    every = config.evaluation.every_steps
    fields: dict[str, Any] = {
        "logging_steps": 10,
        "lr_scheduler_type": "cosine",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,  # every trained parameter is in every micro-batch's loss
        "logging_nan_inf_filter": False,  # train/loop/step_guard.py skips such a step, and waits less often
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
        if arguments.n_gpu > 1:
            logger.warning("%d GPUs are here and one process: one GPU is used; see launch/ddp.yaml.", arguments.n_gpu)
            arguments._n_gpu = 1  # nn.DataParallel would scatter the label counts
        return arguments
    except TypeError as error:
        raise ValueError(f"A field of `trainer` has a value of the wrong type: {error}") from error


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
    goes_on_at = None if resumed_from is None else read_progress(resumed_from).metrics_bytes
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
        callbacks=[JsonLines(metrics, goes_on_at=goes_on_at)] if "jsonl" in config.report_to else [],
    )


def skip_evaluation(arguments: TrainingArguments) -> None:
    logger.warning("No held-out data: nothing is evaluated; set data.eval or data.eval_fraction to measure the heads.")
    arguments.eval_strategy = IntervalStrategy.NO
    arguments.eval_on_start = False


def describe_run(trainer: HeadsTrainer, data: PackedData) -> None:
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    blocks = f"{len(data.train):,} blocks" if hasattr(data.train, "__len__") else "streamed blocks"
    logger.info(
        f"{trained:,} parameters trained, {total - trained:,} frozen; "
        f"{blocks} of {trainer.config.data.block_size} tokens"
    )


def store_hidden_states(trainer: HeadsTrainer) -> None:
    """Where the config asks for it, let the backbone run once, here, and train on what it said."""
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
    )
    if trainer.engine.shards_weights:
        trainer.model.to("cpu")  # from where it is moved shard by shard


def finish(trainer: HeadsTrainer) -> None:
    """Evaluate the last step, save the last weights, say where they are.

    Raises:
        ValueError: the weights are not finite.
    """
    if not trainer.weights_are_finite():
        last, _ = newest_whole(trainer.args.output_dir)
        raise ValueError(
            f"The trained weights are not finite and are not saved; the last whole checkpoint is {last}; lower the "
            f"rates and train again."
        )
    measured: dict[str, Any] = {"step": trainer.state.global_step}
    if trainer.eval_dataset is not None:
        evaluated = [entry for entry in trainer.state.log_history if "eval_backbone_loss" in entry]
        if evaluated and evaluated[-1]["step"] == trainer.state.global_step:
            measured |= evaluated[-1]
        else:
            save_last(trainer, measured)  # first: what fails in an evaluation does not cost the run
            measured |= trainer.evaluate()
        measured |= trainer.backbone_quality(measured, "eval_")
    tell_quality(trainer, measured.get("backbone_ppl"))
    save_last(trainer, measured)
    folder = Path(trainer.args.output_dir)
    best = f", the best by tokens per pass ({trainer.best_tokens_per_pass:.2f}) in {folder / 'best'}"
    logger.info(f"saved in {folder / 'last'}{best if trainer.best_tokens_per_pass else ''}")


def tell_quality(trainer: HeadsTrainer, found: dict[str, Any] | None) -> None:
    """What the run did to the backbone: one line, and the same figures as the last line of the metrics."""
    if found is not None:
        trainer.log({f"backbone_ppl_{name}": value for name, value in found.items()})
        logger.info(f"PPL1 of the backbone: {describe_quality(found)}")


def save_last(trainer: HeadsTrainer, measured: dict[str, Any]) -> None:
    """The run's result. Where its folder cannot be written, it goes to a temporary one and the error says where.

    Raises:
        OSError: the folder could not be written.
    """
    with whole_weights(trainer.model) as writes:  # once: the other processes do not learn of a full disk
        if not writes:
            return
        try:
            trainer.write_heads("last", measured)
        except (OSError, RuntimeError) as error:  # an accelerator may be out of memory
            elsewhere = tempfile.mkdtemp(prefix="headway-")
            trainer.write_heads(elsewhere, measured)  # an absolute path: the run's folder does not come before it
            raise OSError(f"{error} What was trained lies in {elsewhere}.") from error

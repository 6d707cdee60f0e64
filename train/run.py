"""One run from its config: build, train, save, and log where the results are."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import set_seed

from heads.backbone.loading import load_tokenizer
from heads.extras import MissingExtraError
from train.checkpoint.earlier_run import refuse_used_folder, remove_earlier_run, starts_again_in
from train.checkpoint.interruption import Interruption, clear_marker, listening
from train.checkpoint.progress import read_progress
from train.checkpoint.resume import choose_checkpoint, make_run_folder
from train.checkpoint.run_folder import check_run_folder
from train.config import TrainConfig, read_config
from train.data.blocks import PackedData
from train.data.draft_tokens import settle_draft_vocabulary
from train.data.packing import build_datasets
from train.engine.compiling import compile_where_it_wins
from train.engine.engine import (
    announce_compiling,
    describe_engine,
    on_cpu,
    requested_engine,
    start_engine,
    use_all_cores,
)
from train.engine.half_precision import advice_on_bfloat16, autocast_dtype, settled_bf16
from train.engine.process_end import end_together
from train.loop.building import (
    build_model,
    build_trainer,
    refuse_what_cannot_be_split,
    skip_evaluation,
    store_hidden_states,
    training_arguments,
)
from train.loop.console import end_lines, set_up_logging
from train.loop.ending import exit_interrupted, finish
from train.loop.errors import explained_cache, names_checkpoint
from train.loop.overhead import log_heads_overhead
from train.loop.trainer import HeadsTrainer
from train.objective.document_attention import document_attention

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    explain_errors(lambda: run_to_the_end(read_config(arguments)))


def run_to_the_end(config: TrainConfig) -> None:
    run(config)
    end_together()


def explain_errors(action: Callable[[], Any]) -> None:
    """Run an action; an error that a user can cause ends the process with one sentence and exit code 1.

    Ctrl-C ends it with one line and exit code 130, except during a run, which handles signals itself
    (train/checkpoint/interruption.py). HEADWAY_TRACEBACK=1 shows the traceback of either.
    """
    try:
        action()
    except KeyboardInterrupt:
        if os.environ.get("HEADWAY_TRACEBACK") == "1":
            raise
        sys.stderr.write("interrupted: ended before it was done.\n")
        sys.exit(130)
    except (ValueError, OSError, MissingExtraError) as error:
        if os.environ.get("HEADWAY_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(1)


def run(config: TrainConfig) -> Path:
    """Train and save; returns the folder of the run.

    Raises:
        SystemExit: with code 75 after a signal to stop; the run was saved and can be resumed.
    """
    set_up_logging()
    with listening() as interruption:
        return run_listening(config, interruption)


def run_listening(config: TrainConfig, interruption: Interruption) -> Path:
    check_run_folder(config.output_dir)
    refuse_used_folder(config)
    interruption.starts_again_in = starts_again_in(config)
    announce_compiling()
    config = settle_bf16(config)
    arguments = training_arguments(config)  # first: it starts the engine and decides on the device
    use_all_cores()
    engine = start_engine()
    if not PartialState().is_main_process:
        logging.getLogger().setLevel(logging.WARNING)  # only the main process logs what all do
    logger.info(describe_engine(engine))
    if advice := advice_on_bfloat16(arguments.device.type, bf16=arguments.bf16):
        logger.log(logging.WARNING if arguments.bf16 else logging.INFO, advice)
    refuse_what_cannot_be_split(config, engine)
    resumed_from = choose_checkpoint(config, arguments, engine)
    make_run_folder(config)
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.backbone)
    # An engine that shards weights moves the model shard by shard; the whole may not fit on one device.
    model = build_model(config, torch.device("cpu") if engine.shards_weights else arguments.device)
    # One process fills the cache, and the others read it.
    with explained_cache(), arguments.main_process_first(desc="tokenising"):
        data = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=model.backbone.vocab_size)
    if data.eval is None:
        skip_evaluation(arguments)
    settled = settle_draft_vocabulary(model, data.train, chosen=config.init_from is not None)
    trainer = build_trainer(config, arguments, model, tokenizer, data, engine, interruption, resumed_from)
    trainer.recipe |= settled
    describe_run(trainer, data)
    try:
        train(trainer)
        finish(trainer)
    finally:
        end_lines(trainer)
    return Path(config.output_dir)


def settle_bf16(config: TrainConfig) -> TrainConfig:
    """The config with `trainer.bf16: auto` replaced by the choice for this machine, made before the engine starts."""
    on_processor, engine = on_cpu(config.trainer), requested_engine()
    device_type, deepspeed = "cpu" if on_processor else "cuda", engine is not None and engine.is_deepspeed
    fields = settled_bf16(config.trainer, device_type, trains_in_float32=on_processor and deepspeed)
    if fields != config.trainer:
        logger.info("trainer.bf16: auto is %s here", "bfloat16" if fields["bf16"] else "float32")
    return replace(config, trainer=fields)


def train(trainer: HeadsTrainer) -> None:
    """Train from the start or from a checkpoint, until the last step or a signal to stop.

    Raises:
        SystemExit: after a signal.
    """
    resumed_from = trainer.resumed_from
    if resumed_from is None:
        log_heads_overhead(trainer)
    else:
        trainer.args.eval_on_start = False  # the run that is resumed did that
    wanted = compile_choice(trainer.config, resumed_from)
    trainer.compiled = compile_where_it_wins(trainer, wanted, resumed=resumed_from is not None)
    with document_attention(trainer.model, trainer.compiled, autocast_dtype(trainer.args)) as chosen:
        logger.info("attention: %s", chosen)
        train_and_store(trainer, resumed_from)
    if trainer.interruption.agreed:
        exit_interrupted(trainer)


def train_and_store(trainer: HeadsTrainer, resumed_from: Path | None) -> None:
    """Store hidden states if the config asks for them, remove an earlier run if it allows that, and take the steps."""
    folder = Path(trainer.args.output_dir)
    store_hidden_states(trainer)
    remove_earlier_run(trainer.config)
    clear_marker(folder)
    trainer.interruption.training = True
    with names_checkpoint(folder):
        trainer.train(resume_from_checkpoint=None if resumed_from is None else str(resumed_from))


def compile_choice(config: TrainConfig, resumed_from: Path | None) -> bool | str:
    """Whether to compile; with `auto` a resumed run keeps its first choice, since compiled layers round differently."""
    if config.compile == "auto" and resumed_from is not None:
        return read_progress(resumed_from).compiled
    return config.compile


def describe_run(trainer: HeadsTrainer, data: PackedData) -> None:
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    blocks = f"{len(data.train):,} blocks" if hasattr(data.train, "__len__") else "streamed blocks"
    logger.info(
        f"{trained:,} parameters trained, {total - trained:,} frozen; "
        f"{blocks} of {trainer.config.data.block_size} tokens"
    )

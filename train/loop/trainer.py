"""`transformers.Trainer` with our loss, optimizer groups and evaluation, which saves only what is trained.

The rest (accumulation, schedulers, resuming, logging, engines) is the library's. Saving and evaluating go through
train/engine/gathering.py and `inside`, so that they are the same under every engine. Every private name of the Trainer
that is overridden or set stands in this file.
"""
# B batch, T position, K trained head (the backbone's own first, where it is trained), M logged sum

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from heads.interface.token_heads import TokenHeads
from train.checkpoint.interruption import Interruption, shield_workers
from train.checkpoint.optimizer_state import load_optimizer, load_schedule, save_optimizer
from train.checkpoint.progress import Place, Progress, blocks_per_batch, read_place, read_progress
from train.checkpoint.save import save_whole
from train.checkpoint.trained import explained_damage, measured_tokens_per_pass, read_trained, write_trained
from train.config import TrainConfig
from train.engine.engine import Engine, check_active
from train.engine.gathering import copy_for_decoding, filled, whole_weights
from train.engine.sharding import keep_gathered, shard
from train.loop.batches import collate, numbered
from train.loop.errors import explained_reading
from train.loop.evaluation import HeldOutBlocks, quality
from train.loop.metrics import RunningLosses
from train.loop.optimizer_groups import build_optimizer
from train.loop.step_guard import StepGuard, all_finite, read_together
from train.objective.model import TrainedModel
from train.objective.weights import WarmInConfig, warn_of_a_long_warm_in

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"
WRITERS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""The methods with which the Trainer writes a checkpoint."""


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep the Trainer from wrapping the model in nn.DataParallel, which would scatter the label counts."""
    if arguments.n_gpu > 1:
        logger.warning("One process uses one of the %d GPUs; see launch/ddp.yaml to use all.", arguments.n_gpu)
        arguments._n_gpu = 1


class HeadsTrainer(Trainer):
    """Trains a `TrainedModel`."""

    model: TrainedModel
    optimizer: Any
    control: Any

    def __init__(
        self,
        *,
        config: TrainConfig,
        recipe: dict[str, Any],
        engine: Engine,
        interruption: Interruption | None = None,
        resumed_from: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_collator=collate, **kwargs)
        for printer in (PrinterCallback, ProgressCallback):  # train/loop/console.py prints aligned lines instead
            self.remove_callback(printer)
        check_active(engine, self.accelerator)
        self.config = config
        self.engine = engine
        self.recipe = recipe
        self.interruption = interruption or Interruption()
        self.resumed_from = resumed_from
        # train/checkpoint/save.py removes older checkpoints, once the new one is whole.
        self.keep_checkpoints, self.args.save_total_limit = self.args.save_total_limit, None
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True  # the loss is divided by the labels of the whole batch
        self.loss_before: float | None = None  # the backbone's loss on held-out data before the first step
        best = Path(config.output_dir) / "best"
        self.best_tokens_per_pass = 0.0 if resumed_from is None else measured_tokens_per_pass(best)
        self.heads_overhead: float | None = None  # logged once, with the first log
        self.running_losses = RunningLosses()
        self.guard = StepGuard(self, config.max_skipped_steps)
        self.evaluation_put_off = False
        self.compiled = False
        self.decoding_copy: TokenHeads | None = None  # of sharded heads whose dtype is not the backbone's
        self.place = Place(0, 0)
        self._stop_signals = torch.zeros(())
        self.add_callback(Continuation(self))

    @property
    def token_heads(self) -> TokenHeads | None:
        return self.model.token_heads

    @property
    def summed_loss(self) -> Tensor:
        """() the Trainer's own sum of losses since the last log, of this process."""
        return self._tr_loss

    # ---- data

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.args.dataloader_num_workers:
            shield_workers(getattr(loader, "base_dataloader", loader))
        return loader

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        dataset = numbered(dataset) if description == "Training" else dataset
        return super()._get_dataloader(dataset, description, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """The micro-batches of one optimizer step, and the (K,) label counts."""
        with explained_reading():
            batches, counts_K = super().get_batch_samples(*args, **kwargs)
        self.guard.begin(batches)
        self.place.batches += len(batches)
        return batches, counts_K

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The epoch, and the batches taken in it.

        The Trainer derives both from the number of steps, which needs the data's length. For a stream the checkpoint
        has recorded them.
        """
        epochs, batches = super()._init_training_state(*args, **kwargs)
        if self.resumed_from is None or hasattr(self.train_dataset, "__len__"):
            return epochs, batches
        return read_place(self.resumed_from, self.args)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch unless all steps were taken; a Trainer that is resumed at the last step would take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        resumed = kwargs["epoch"] == kwargs["epochs_trained"]
        self.place = Place(kwargs["epoch"], kwargs["steps_trained_in_current_epoch"] if resumed else 0)
        super()._run_epoch(*args, **kwargs)

    # ---- loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """(K,): labels of each head over all micro-batches and processes, so that any split gives the same loss.

        The same reduction also sums how many processes received a signal to stop.
        """
        if not batch_samples:
            return None
        counts = [self.model.count_labels(b["input_ids"], b["loss_mask"], b["document_ids"]) for b in batch_samples]
        stops = torch.tensor([self.interruption.received is not None], dtype=torch.long)
        summed = self.accelerator.reduce(torch.cat([torch.stack(counts).sum(dim=0), stops]).to(device), reduction="sum")
        self._stop_signals = summed[-1]
        return summed[:-1]

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        outputs = model(**inputs, counts_K=num_items_in_batch, heads_weight=self.heads_weight)
        assert num_items_in_batch is not None, "a step has at least one micro-batch"
        self._remember(outputs["logged_sums_M"], num_items_in_batch)
        # DDP averages gradients over processes; each process holds its share of one sum.
        loss = self.guard.watch(outputs["loss"] * self.accelerator.num_processes)
        return (loss, outputs) if return_outputs else loss

    @property
    def heads_weight(self) -> float:
        """The weight of the heads' losses relative to the backbone's own in the present step."""
        return self.config.warm_in.weight(self.state.global_step, self.state.max_steps)

    def _remember(self, sums_M: Tensor, counts_K: Tensor) -> None:
        counts_M = self.model.counts_of_logged(counts_K) / self.current_gradient_accumulation_steps
        self.running_losses.add(sums_M, counts_M)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The last check before the optimizer's step: is the gradient finite, and did any process receive a signal?"""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        finite, self.interruption.agreed = read_together(norm, self._stop_signals)
        self.guard.close(finite)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add each head's mean losses since the last log."""
        if "loss" in logs:
            means = self.running_losses.take_means(self.accelerator)
            logs = self.guard.corrected(logs) | dict(zip(self.model.loss_names, means or [], strict=bool(means)))
            if self.config.warm_in != WarmInConfig():
                logs["heads_weight"] = self.config.warm_in.weight(self.state.global_step - 1, self.state.max_steps)
            if self.heads_overhead is not None:
                logs, self.heads_overhead = {**logs, "heads_overhead": self.heads_overhead}, None
        if "train_loss" in logs:  # over the whole run, not only after a resume
            logs["train_loss"] = self._total_loss_scalar / max(1, self.state.global_step - self.guard.skipped)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before each evaluation, also before one that comes later, so that its line has the loss until then."""
        last = self.state.global_step >= self.state.max_steps and self.eval_dataset is not None
        self.control.should_log |= self.control.should_evaluate or self.evaluation_put_off or last
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # ---- engine, optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Load a checkpoint's weights before the engine wraps the model, and the optimizer's state afterwards."""
        warn_of_a_long_warm_in(self.config.warm_in, max_steps)
        if resume_from_checkpoint is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            self._load_from_checkpoint(resume_from_checkpoint)
        if self.engine.shards_weights:
            self.decoding_copy = copy_for_decoding(self.model)
        if self.engine is Engine.FSDP2:
            shard(self.model, self.accelerator)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.engine is Engine.ZERO3:
            keep_gathered(self.model)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model, self.config)
        return self.optimizer

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure on held-out blocks, and save the heads if they have the best tokens per pass so far."""
        found = self.held_out(eval_dataset).measure()
        if self.state.global_step == 0:
            self.loss_before = found["backbone_loss"]
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if found.get("tokens_per_pass", 0.0) > self.best_tokens_per_pass and self.weights_are_finite():
            self.best_tokens_per_pass = found["tokens_per_pass"]
            self._save_best({"step": self.state.global_step, **found, **self.backbone_quality(found)})
        return metrics

    def evaluate_before(self) -> None:
        """Measure the backbone's loss before a run that trains it, unless an evaluation at step 0 does that."""
        if not self.measures_quality or self.args.eval_on_start:
            return
        self.loss_before = self.backbone_loss()

    def backbone_loss(self) -> float:
        """The backbone's present mean loss on the held-out blocks."""
        return self.held_out().backbone_loss()

    def held_out(self, blocks: Any = None) -> HeldOutBlocks:
        return HeldOutBlocks(
            model=self.model,
            blocks=self.eval_dataset if blocks is None else blocks,
            batch_size=self.args.per_device_eval_batch_size,
            config=self.config.evaluation,
            accelerator=self.accelerator,
            inside=self.inside,
            decoding_heads=self.decoding_heads,
        )

    @property
    def measures_quality(self) -> bool:
        """Whether the backbone is trained, on next tokens, and there is held-out data."""
        return self.model.trains_backbone and self.eval_dataset is not None and self.model.label_shift == 1

    def backbone_quality(self, found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """PPL_1 before and after, from an evaluation; empty where it was not measured before the run."""
        if not self.measures_quality or self.loss_before is None:
            return {}
        return {"backbone_ppl": quality(self.loss_before, found, prefix)}

    def decoding_heads(self) -> TokenHeads | None:
        """The heads to decode with, in the backbone's dtype; every process must call it."""
        if self.token_heads is None or not self.engine.shards_weights:
            return self.token_heads and self.token_heads.in_dtype(self.model.backbone.dtype)
        if self.decoding_copy is None:
            return self.token_heads
        return filled(self.decoding_copy, self.token_heads).to(self.args.device)

    @property
    def inside(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Runs a function with all weights gathered, in every process; None where no engine shards weights."""
        if not self.engine.shards_weights:
            return None
        return lambda function: self.model_wrapped(inside=function)

    # ---- saving and resuming

    def weights_are_finite(self) -> bool:
        """Every process must call it."""
        return all_finite(self.model, self.accelerator)

    def progress(self) -> Progress:
        """The counters that a checkpoint stores; every process must call it."""
        metrics = Path(self.args.output_dir) / "metrics.jsonl"
        return Progress(
            losses=[state for state in gather_object([self.running_losses.state()]) if state is not None],
            logged_loss=gather_object([self._tr_loss.item()]),
            all_losses=self._total_loss_scalar,
            skipped=self.guard.skipped,
            skipped_since_log=self.guard.skipped_since_log,
            steps_since_log=self.guard.steps_since_log,
            metrics_bytes=metrics.stat().st_size if metrics.is_file() else 0,
            measured_accuracy=None if self.token_heads is None else self.token_heads.measured_accuracy,
            loss_before=self.loss_before,
            evaluation_put_off=self.evaluation_put_off,
            data_pass=self.place.data_pass,
            compiled=self.compiled,
            blocks_in_pass=self.place.batches * blocks_per_batch(self.args),
        )

    def restore(self, progress: Progress) -> None:
        """Restore the checkpoint's counters, then make up for an evaluation that an interruption postponed."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.running_losses.restore(progress.losses, process, processes, self.accelerator.device)
        losses = progress.logged_loss
        self._tr_loss.fill_(losses[process] if len(losses) == processes else sum(losses) / len(losses))
        self._total_loss_scalar = progress.all_losses
        self._globalstep_last_logged = self.state.global_step - progress.steps_since_log
        self.guard.skipped = progress.skipped
        self.guard.skipped_since_log = progress.skipped_since_log
        self.guard.steps_since_log = progress.steps_since_log
        if self.token_heads is not None:
            self.token_heads.measured_accuracy = progress.measured_accuracy
        self.loss_before = progress.loss_before
        if progress.evaluation_put_off:
            self.evaluate()

    def write_heads(self, name: str, measured: dict[str, Any]) -> None:
        """Write heads or trained backbone into a folder of the run; inside `whole_weights`, on the main process."""
        self._write(Path(self.args.output_dir) / name, measured, getattr(torch, self.config.save_dtype))

    def _save_best(self, measured: dict[str, Any]) -> None:
        """Save the best heads so far; a full disk only warns, since the run does not need them."""
        with whole_weights(self.model) as writes:
            if writes:
                try:
                    self.write_heads("best", measured)
                except OSError as error:
                    logger.warning("The best heads so far were not saved: %s Training continues.", error)

    def _write(self, folder: Path, measured: dict[str, Any], dtype: torch.dtype) -> None:
        made_by = self.recipe | {"measured": measured}
        write_trained(self.model, folder, dtype=dtype, recipe=made_by, tokenizer=self.processing_class)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with whole_weights(self.model) as writes:
            if writes:
                folder = Path(output_dir or self.args.output_dir)
                self._write(folder, {"step": self.state.global_step}, torch.float32)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.model, self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; one that cannot be written is skipped and does not end the run."""
        save_whole(self, lambda: super(HeadsTrainer, self)._save_checkpoint(*args, **kwargs), writers=WRITERS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        read_trained(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "")
        with explained_damage(folder):
            load_optimizer(self.model, self.optimizer, folder)
            schedule = torch.load(folder / SCHEDULER, weights_only=True)
            changed = load_schedule(self.lr_scheduler, self.optimizer, schedule)
        for before, now in dict.fromkeys(changed):
            logger.warning("A peak rate was %g and is %g from now on, by the present config.", before, now)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with explained_damage(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)


class Continuation(TrainerCallback):
    """Restores the progress of a resumed run, and ends a run that received a signal to stop."""

    def __init__(self, trainer: HeadsTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.resumed_from is not None:
            self.trainer.restore(read_progress(self.trainer.resumed_from))
        else:
            self.trainer.evaluate_before()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after a signal. A due evaluation would take longer than schedulers wait, so the resumed run does it."""
        if self.trainer.interruption.agreed:
            self.trainer.evaluation_put_off, control.should_evaluate = control.should_evaluate, False
            control.should_save = control.should_training_stop = True

"""`transformers.Trainer` with our loss, our optimizer groups, our evaluation, and only the heads saved.

The rest (accumulation, schedulers, resume, logging, engines) is the library's. Saving and evaluating go through
train/gathering.py and `inside`, so that nothing depends on which engine holds the weights.
"""
# B batch, T position, K head

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainerCallback

from heads import checkpoint
from heads.interface import TokenHeads
from heads.trained_backbone import read_model, write_model
from train.config import TrainConfig
from train.engine import Engine, check_active
from train.evaluation import evaluate
from train.gathering import whole_weights
from train.model import TrainedModel
from train.optimizer_groups import optimizer_groups
from train.optimizer_state import load_optimizer, save_optimizer
from train.sharding import keep_gathered, shard
from train.targets import count_supervised

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Packed blocks of one length, so nothing is padded."""
    return {
        "input_ids": torch.tensor([row["input_ids"] for row in rows], dtype=torch.long),
        "loss_mask": torch.tensor([row["loss_mask"] for row in rows], dtype=torch.bool),
        "document_ids": torch.tensor([row["document_ids"] for row in rows], dtype=torch.long),
    }


class HeadsTrainer(Trainer):
    """Trains a `TrainedModel`."""

    model: TrainedModel
    optimizer: Any
    control: Any

    def __init__(self, *, config: TrainConfig, recipe: dict[str, Any], engine: Engine, **kwargs: Any) -> None:
        super().__init__(data_collator=collate, **kwargs)
        check_active(engine, self.accelerator)
        self.config = config
        self.engine = engine
        self.recipe = recipe
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True  # the loss is divided by the labels of the whole batch
        self.best_tokens_per_pass = best_so_far(config) if config.resume else 0.0
        self.heads_overhead: float | None = None  # told with the first log
        self._loss_sums_K: Tensor | None = None
        self._counts_K: Tensor | None = None

    @property
    def token_heads(self) -> TokenHeads | None:
        return self.model.token_heads

    # ---- loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """(K,): labels of each head over all micro-batches and processes, so that any split gives one loss."""
        if not batch_samples:
            return None
        counts = [count_supervised(b["loss_mask"], b["document_ids"], self.model.shifts) for b in batch_samples]
        counts_K = torch.stack(counts).sum(dim=0).to(device)
        return self.accelerator.reduce(counts_K, reduction="sum")

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        outputs = model(**inputs, counts_K=num_items_in_batch)
        self._remember(outputs["loss_sums_K"], num_items_in_batch)
        # DDP averages gradients over processes; each process holds its share of one sum.
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _remember(self, sums_K: Tensor, counts_K: Tensor | None) -> None:
        counts_K = torch.ones_like(sums_K) if counts_K is None else counts_K / self.current_gradient_accumulation_steps
        self._loss_sums_K = sums_K if self._loss_sums_K is None else self._loss_sums_K + sums_K
        self._counts_K = counts_K if self._counts_K is None else self._counts_K + counts_K

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each head's mean loss since the last log."""
        if "loss" in logs and self._loss_sums_K is not None and self._counts_K is not None:
            sums_K = self.accelerator.reduce(self._loss_sums_K.clone(), reduction="sum")
            means = (sums_K / self._counts_K.clamp(min=1)).tolist()
            logs = {**logs, **dict(zip(self.model.loss_names, means, strict=True))}
            self._loss_sums_K = self._counts_K = None
            if self.heads_overhead is not None:
                logs, self.heads_overhead = {**logs, "heads_overhead": self.heads_overhead}, None
        super().log(logs, start_time)

    # ---- engine, optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Weights come from a checkpoint before an engine takes them, the optimizer's state afterwards."""
        if resume_from_checkpoint is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            self._load_from_checkpoint(resume_from_checkpoint)
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
            c = self.config
            groups = optimizer_groups(
                self.model, heads_rate=c.rates.heads, base_rate=c.rates.base, weight_decay=c.optimizer.weight_decay
            )
            self.optimizer = torch.optim.AdamW(
                groups, betas=(c.optimizer.beta1, c.optimizer.beta2), eps=c.optimizer.eps, fused=True
            )
        return self.optimizer

    # ---- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Head accuracy and tokens per pass on held-out blocks; keeps the best heads by tokens per pass."""
        blocks = self.eval_dataset if eval_dataset is None else eval_dataset
        batch_size = self.args.per_device_eval_batch_size
        found = evaluate(self.model, blocks, collate, batch_size, self.config.evaluation, self.accelerator, self.inside)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if found.get("tokens_per_pass", 0.0) > self.best_tokens_per_pass:
            self.best_tokens_per_pass = found["tokens_per_pass"]
            self._save_best({"step": self.state.global_step, **found})
        return metrics

    @property
    def inside(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Runs a function with all weights gathered, on all processes alike; None where they always are."""
        if not self.engine.shards_weights:
            return None
        return lambda function: self.model_wrapped(inside=function)

    # ---- saving and resuming

    def save_heads(self, name: str, measured: dict[str, Any]) -> None:
        """Heads (or the trained backbone) into a folder of the run. Every process calls it; one writes."""
        with whole_weights(self.model) as writes:
            if writes:
                self._write(Path(self.args.output_dir) / name, measured, getattr(torch, self.config.save_dtype))

    def _save_best(self, measured: dict[str, Any]) -> None:
        """The best heads are a convenience: a disk that is full for the moment does not end the run."""
        try:
            self.save_heads("best", measured)
        except OSError as error:
            logger.warning("The best heads so far were not saved: %s Training goes on.", error)

    def _write(self, folder: Path, measured: dict[str, Any], dtype: torch.dtype) -> None:
        if self.token_heads is None:
            write_model(self.model.model, folder, dtype=dtype, tokenizer=self.processing_class)
        else:
            checkpoint.save(
                self.token_heads,
                folder,
                dtype=dtype,
                recipe=self.recipe | {"measured": measured},
                tokenizer=self.processing_class,
            )

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
        """A checkpoint that cannot be written costs itself, not the run."""
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by a RuntimeError
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning("No checkpoint at step %d: %s Training goes on.", self.state.global_step, error)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with explained_damage(folder):
            if self.token_heads is None:
                read_model(self.model.model, folder)
                return
            tensors = load_file(folder / checkpoint.TENSORS)
            if (backbone := checkpoint.named_backbone(folder)) is not None:
                read_model(self.model.model, backbone)
            elif self.model.trains_backbone:
                raise FileNotFoundError("the trained backbone")
        checkpoint.check_tensors(tensors, self.token_heads.state_dict(), folder)
        self.token_heads.load_state_dict(tensors)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "")
        with explained_damage(folder):
            load_optimizer(self.model, self.optimizer, folder)
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))


@contextlib.contextmanager
def explained_damage(folder: Path) -> Iterator[None]:
    """What a file that was cut short raises, as a sentence."""
    try:
        yield
    except (SafetensorError, RuntimeError, EOFError, FileNotFoundError) as error:
        raise ValueError(
            f"{folder} cannot be resumed from, a file in it is missing or cut short ({error}); remove that folder and "
            f"resume from the checkpoint before it."
        ) from error


def best_so_far(config: TrainConfig) -> float:
    """Tokens per pass of the heads in best/, for a run that goes on."""
    folder = Path(config.output_dir) / "best"
    if not (folder / checkpoint.DESCRIPTION).is_file():
        return 0.0
    measured = checkpoint.read_description(folder)["recipe"].get("measured", {})
    return float(measured.get("tokens_per_pass", 0.0))


class JsonLines(TrainerCallback):
    """`report_to: [jsonl]`: every log as one line of metrics.jsonl."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        self.path = path
        self.goes_on = goes_on

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and not self.goes_on:
            self.path.unlink(missing_ok=True)  # a new run in an old folder starts a new record

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")

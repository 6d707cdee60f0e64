"""Rows of an ablation: each is trained in this process by the project's own trainer.

How long a training takes depends on the machine's other load, so the cost of a step is measured separately, with the
models of all configs taking steps in turn on the same tokens.
"""
# B block, T position

from __future__ import annotations

import copy
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import yaml
from transformers import PrinterCallback, TrainerCallback, set_seed

from heads.backbone.loading import load_tokenizer
from heads.validation import nearest
from train.config import TrainConfig, read_config
from train.data.blocks import PackedData
from train.data.draft_tokens import settle_draft_vocabulary
from train.data.packing import build_datasets
from train.loop.building import build_model, build_trainer, store_hidden_states, training_arguments
from train.loop.optimizer_groups import optimizer_groups
from train.loop.trainer import HeadsTrainer
from train.objective.model import TrainedModel


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def named_rows(possible: Sequence[N], names: Sequence[str] | None) -> list[N]:
    """The named rows in the order of `possible`, by default all.

    Raises:
        ValueError: an unknown name.
    """
    known = [row.name for row in possible]
    for name in names or []:
        if name not in known:
            raise ValueError(f"--rows has {name!r}; allowed are {', '.join(known)}.{nearest(name, known)}")
    return [row for row in possible if names is None or row.name in names]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained variant; `seconds` is the time of its steps without evaluations."""

    model: TrainedModel
    trainer: HeadsTrainer
    data: PackedData
    tokenizer: Any
    seconds: float

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def train_row(
    config: TrainConfig,
    *,
    steps: bool = True,
    blocks: int | None = None,
    at_start: Callable[[HeadsTrainer], Any] = lambda trainer: None,
) -> Trained:
    """Build and train the model of a config as a run does, without compiling or saving anything.

    Args:
        steps: take the config's steps; False leaves the variant untrained.
        blocks: train only on this many of the shuffled blocks; hidden states are stored for these only.
        at_start: called with the trainer before the first step.

    Raises:
        ValueError: there are fewer blocks than `blocks`, so some would be seen twice.
    """
    arguments = training_arguments(config)
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.backbone)
    model = build_model(config, arguments.device)
    data = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=model.backbone.vocab_size)
    settle_draft_vocabulary(model, data.train, chosen=config.init_from is not None)
    trainer = build_trainer(config, arguments, model, tokenizer, data)
    trainer.remove_callback(PrinterCallback)  # standard output is for the table
    if blocks is not None:
        stored: Any = trainer.train_dataset
        if len(stored) < blocks:
            raise ValueError(
                f"{', '.join(source.path for source in config.data.train)} has {len(stored):,} blocks of "
                f"{config.data.block_size} tokens and {blocks:,} are needed, so that some would be seen twice; give "
                f"fewer steps or more data."
            )
        trainer.train_dataset = stored.select(range(blocks))
    if not steps:
        return Trained(model=model, trainer=trainer, data=data, tokenizer=tokenizer, seconds=0.0)
    at_start(trainer)
    store_hidden_states(trainer)
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.train()
    return Trained(model=model, trainer=trainer, data=data, tokenizer=tokenizer, seconds=clock.seconds)


class StepClock(TrainerCallback):
    """Seconds of the training steps with their data, without evaluations."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.mark = time.perf_counter()


def read_overridden(path: str | Path, overrides: Mapping[str, Any]) -> TrainConfig:
    """A run's YAML file with some keys replaced, checked like the config of any run.

    Raises:
        ValueError: the file does not exist, or the result has unknown fields or values that are not allowed.
    """
    if not Path(path).is_file():
        raise ValueError(f"--config {path} does not exist; runs are described in configs/*.yaml.")
    content = merge(yaml.safe_load(Path(path).read_text(encoding="utf-8")), overrides)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / Path(path).name
        written.write_text(yaml.safe_dump(content), encoding="utf-8")
        return read_config(["--config", str(written)])


def merge(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace nested keys one by one, and lists and values as a whole.

    >>> merge({"heads": {"num_heads": 4}, "seed": 0}, {"heads": {"prefix_layers": 1}, "seed": 1})
    {'heads': {'num_heads': 4, 'prefix_layers': 1}, 'seed': 1}
    """
    merged = copy.deepcopy(dict(content))
    for name, value in overrides.items():
        inner = merged.get(name)
        merged[name] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def short_run(config: TrainConfig, *, steps: int, batch: int, every_steps: int = 0, **more: Any) -> TrainConfig:
    """The config with an ablation's steps and batch, without reports and checkpoints.

    Args:
        every_steps: steps between evaluations, the first before training; 0 evaluates never.
        more: further fields to replace.
    """
    fields = {
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "eval_on_start": every_steps > 0,
        "disable_tqdm": True,
        "logging_steps": steps,
    }
    evaluation = dataclasses.replace(config.evaluation, every_steps=every_steps)
    given: dict[str, Any] = {
        "evaluation": evaluation,
        "trainer": config.trainer | fields,
        "report_to": [],
        "save_every_steps": 0,
    }
    return dataclasses.replace(config, **(given | more))


def what_trains(config: TrainConfig) -> dict[str, Any]:
    """The fields of a config on which a trained row depends: all but those about the run's folder."""
    fields = dataclasses.asdict(config)
    del fields["overwrite"]
    return fields | {"output_dir": None}


def step_seconds(configs: Mapping[str, TrainConfig], rounds: int, blocks: int) -> dict[str, float]:
    """Median seconds of a training step with `blocks` blocks, by the config's name, on the CPU."""
    steps = {name: stepper(config, blocks) for name, config in configs.items()}
    for step in steps.values():
        step()  # the first allocates the optimizer's state
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def choose_first_tokens(model: TrainedModel) -> int:
    """Let heads with a draft vocabulary score token ids 0 to S - 1, which cost as much as any others; returns S."""
    token_heads = model.token_heads
    if token_heads is None or token_heads.draft_tokens_S is None:
        return model.backbone.vocab_size
    token_heads.choose_draft_tokens(torch.arange(token_heads.num_scored))
    return token_heads.num_scored


def stepper(config: TrainConfig, blocks: int) -> Callable[[], None]:
    """One training step of a config as a function, on random tokens that the heads score."""
    model = build_model(config, torch.device("cpu")).train()
    tokens = choose_first_tokens(model)
    groups = optimizer_groups(model, heads_rate=config.rates.heads, base_rate=config.rates.base, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(tokens, (blocks, config.data.block_size), generator=generator)
    batch = {
        "input_ids": tokens_BT,
        "loss_mask": torch.ones_like(tokens_BT, dtype=torch.bool),
        "document_ids": torch.zeros_like(tokens_BT),
    }

    def step() -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
